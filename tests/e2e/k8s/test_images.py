"""images.policy on the real kubelet and containerd: what the gate cannot get into does not start."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.e2e.k8s.api import eventually
from tests.e2e.k8s.cluster import STATIC, Cluster, daemon, pod
from tests.e2e.k8s.looks import GIB, answers, ended, removed

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

PROFILE: Final = "amdvgpu.io/25c-48g"


def test_a_static_program_does_not_start_by_cdi_and_a_dynamic_one_is_held(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "amdvgpud.toml"
    file.write_text(
        'simulate = "mi300x"\nkubelet.mode = ["profiles"]\nkubelet.delivery = "cdi"\nimages.policy = "refuse"\n'
        'kubelet.profiles.25c-48g = {compute = "25%", vram = "48GiB"}\n'
    )
    with daemon(cluster, "--config", str(file)):
        eventually("the profile", lambda: cluster.allocatable(PROFILE) == 3)
        refused = pod("static", "/bin/cat", "/run/amdvgpu/25c-48g-0/slice.json", limits={PROFILE: 1})
        refused["spec"]["containers"][0]["image"] = STATIC
        cluster.api.create_pod(refused)
        cluster.api.create_pod(pod("dynamic", "kfdclient", "--count", "1", limits={PROFILE: 1}))
        assert ended(cluster, "static") == "Failed"
        (status,) = cluster.api.pod("static")["status"]["containerStatuses"]
        assert "/bin/cat is a static program, which loads no library" in status["state"]["terminated"]["message"]
        assert cluster.log_of("static") == ""
        assert ended(cluster, "dynamic") == "Succeeded"
        assert answers(cluster.log_of("dynamic"), "gpu", "total") == [(48 * GIB,)]
        removed(cluster, "static", "dynamic")
    eventually("nothing to be offered", lambda: not cluster.allocatable(PROFILE))
