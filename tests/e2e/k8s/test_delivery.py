"""Which way pods get their slices, chosen by what the real kubelet and containerd say of themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import BIN
from tests.e2e.k8s.api import eventually
from tests.e2e.k8s.cluster import NODE, Cluster, daemon, pod
from tests.e2e.k8s.looks import GIB, answers, ended, removed

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

PROFILE = "amdvgpu.io/25c-48g"


def restart_containerd(cluster: Cluster, *, cdi: bool) -> None:
    cluster.programs["containerd"].end()
    cluster.start_containerd({}, cdi=cdi)
    eventually("the node", cluster.node_ready)


@pytest.fixture(params=[True, False], ids=["CDI on", "CDI off"])
def on(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[bool]:
    if not request.param:
        restart_containerd(cluster, cdi=False)
    yield request.param
    if not request.param:
        restart_containerd(cluster, cdi=True)


@pytest.mark.usefixtures("account")
def test_a_pod_gets_its_slice_in_the_way_that_this_containerd_knows(cluster: Cluster, on: bool, tmp_path: Path) -> None:
    runtime = f"{cluster.folder}/containerd.toml"
    file = tmp_path / "amdvgpud.toml"
    file.write_text(
        'simulate = "mi300x"\ntick_s = 0.2\nkubelet.mode = ["profiles"]\n'
        'kubelet.profiles.25c-48g = {compute = "25%", vram = "48GiB", count = 1}\n'
        f'kube.config = "{cluster.folder}/amdvgpud.kubeconfig"\nkube.node_name = "{NODE}"\n'
        f'kubelet.runtime_config = "{runtime}"\n'
    )
    with daemon(cluster, "--config", str(file)) as running:
        eventually("the profile", lambda: cluster.allocatable(PROFILE) == 1)
        said = cluster.corner.run(str(BIN / "amdvgpuctl"), "status", "-o", "json")
        kubelet = json.loads(said.output)["kubelet"]
        assert (kubelet["delivery"], kubelet["known"]) == (("cdi", True) if on else ("nodes", True))
        assert kubelet["reason"].endswith(f"switched on by {runtime}" if on else f"by {runtime}")
        cluster.api.create_pod(pod("chosen", "kfdclient", "--step", "16G", limits={PROFILE: 1}))
        assert ended(cluster, "chosen") == "Succeeded", cluster.log_of("chosen")
        log = cluster.log_of("chosen")
        assert answers(log, "gpu", "total") == [(48 * GIB,)]
        assert answers(log, "alloc", "result") == [("ok",), ("ok",), ("ok",), ("ENOMEM",)]
        assert ("and no hook: CDI is switched off in containerd" in running.log.read_text()) is not on
        removed(cluster, "chosen")
    eventually("the profile to be gone", lambda: not cluster.allocatable(PROFILE))
