"""One container with GPUs of different quotas, so with several slices: by device nodes and by CDI names alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import BIN
from tests.e2e.k8s.api import eventually
from tests.e2e.k8s.cluster import NODE, Cluster, daemon, pod
from tests.e2e.k8s.test_hami_kubelet import bind, chosen, gone

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

SCRIPT = "env; ls /run/amdvgpu; echo that is all; sleep infinity"


@pytest.fixture(params=["nodes", "cdi"])
def delivery(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[str]:
    """With CDI also what rests on the hook: an image that the gate cannot get into would not start."""
    options = [
        "--simulate=mi300x,rx9070xt",
        "--kubelet-mode=hami",
        f"--kubelet-delivery={request.param}",
        f"--kube-config={cluster.folder}/admin.kubeconfig",
        f"--kube-node-name={NODE}",
        "--tick-s=0.5",
        *(["--images-policy=refuse"] if request.param == "cdi" else []),
    ]
    with daemon(cluster, *options):
        eventually("the GPUs", lambda: cluster.allocatable("amd.com/gpu") == 12, 120)
        yield request.param
    eventually("no GPU", lambda: not cluster.allocatable("amd.com/gpu"))


def slices(cluster: Cluster) -> list[dict[str, Any]]:
    answer = cluster.corner.run(str(BIN / "amdvgpuctl"), "slice", "list", "-o", "json").output
    found: list[dict[str, Any]] = json.loads(answer)["slices"]
    return found


def test_a_container_with_gpus_of_different_quotas_is_told_of_both(cluster: Cluster, delivery: str) -> None:
    made = pod("unlike", "sh", "-c", SCRIPT, limits={"amd.com/gpu": 2})
    bind(cluster, made, chosen(cluster, 0, 49152, 76) + chosen(cluster, 1, 4096, 16) + ";")
    eventually("its words", lambda: "that is all" in cluster.log_of("unlike"))
    uid = cluster.api.pod("unlike")["metadata"]["uid"]
    names = [f"pod-{uid}.0", f"pod-{uid}.0.1"]
    said = cluster.log_of("unlike").splitlines()
    told = dict(line.split("=", 1) for line in said if "=" in line)
    assert told["AMDVGPU_SLICE"] == ",".join(names)
    assert len(told["ROCR_VISIBLE_DEVICES"].split(",")) == 2
    assert [told[f"HIP_DEVICE_MEMORY_LIMIT_{i}"] for i in (0, 1)] == ["49152m", "4096m"]
    assert [part.partition(":")[0] for part in told["HSA_CU_MASK"].split(";")] == ["0", "1"]
    assert [word for word in said if word in names] == names
    if delivery == "cdi":
        eventually(
            "the hook's word of both",
            lambda: [[c["reported"] for c in item["containers"]] for item in slices(cluster)] == [[True], [True]],
        )
    gone(cluster, "unlike")
