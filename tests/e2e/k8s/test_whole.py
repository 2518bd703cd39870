"""Whole GPUs for pods, by device nodes and by CDI: the real kubelet allocates, containerd injects."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Final

import pytest

from tests.e2e.conftest import BIN
from tests.e2e.k8s.api import eventually
from tests.e2e.k8s.cluster import Cluster, daemon, pod
from tests.e2e.k8s.looks import answers, ended, removed, said_s

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

GPU: Final = "amd.com/gpu"
LOOK: Final = "cat /etc/ld.so.preload; ls /dev/dri; ls /run/amdvgpu 2>/dev/null; kfdclient --step 1G --count 1"


@pytest.fixture(params=["nodes", "cdi"])
def served(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[None]:
    options = ("--simulate", "2*mi300x", "--kubelet-mode", "whole", "--kubelet-delivery", request.param)
    with daemon(cluster, *options) as running:
        eventually("two GPUs", partial(offers, cluster, 2), 60)
        assert time.time() - said_s(running, "registered with the kubelet") < 2
        yield
    eventually("no GPU", partial(offers, cluster, 0), 30)  # the next daemon's are not these


def offers(cluster: Cluster, count: int) -> bool:
    return (cluster.allocatable(GPU) or 0) == count


def slices(cluster: Cluster) -> str:
    return cluster.corner.run(str(BIN / "amdvgpuctl"), "slice", "list").output


@pytest.mark.usefixtures("served")
def test_a_pod_has_one_gpu_for_itself_without_a_gate(cluster: Cluster) -> None:
    for name in ("one", "two"):
        cluster.api.create_pod(pod(name, "sh", "-c", f"{LOOK}; sleep infinity", limits={GPU: 1}))
    seen = set()
    for name in ("one", "two"):
        eventually("the pod's process", lambda name=name: answers(cluster.log_of(name), "end", "held"))  # type: ignore[misc]
        log = cluster.log_of(name)
        nodes = {line for line in log.splitlines() if line.startswith("renderD")}
        assert (len(nodes), "libamdvgpu" in log, answers(log, "alloc", "result")) == (1, False, [("ok",)])
        seen |= nodes
    assert len(seen) == 2
    assert slices(cluster).count("whole-gpu-") == 2
    cluster.api.create_pod(pod("third", "true", limits={GPU: 1}))
    removed(cluster, "one")
    assert ended(cluster, "third") == "Succeeded"  # it waited for a GPU, and got the one that came free
    removed(cluster, "two", "third")
    eventually("the GPUs to be nobody's", lambda: "whole-gpu-" not in slices(cluster), 180)


@pytest.mark.usefixtures("served")
def test_a_gpu_with_a_slice_is_not_offered_as_a_whole(cluster: Cluster) -> None:
    ctl = str(BIN / "amdvgpuctl")
    done = cluster.corner.run(ctl, "slice", "create", "alice", "--gpu", "0", "--vram", "1GiB", "--compute", "25%")
    assert done.code == 0, done.output
    eventually("one GPU", partial(offers, cluster, 1), 10)
    assert cluster.corner.run(ctl, "slice", "delete", "alice").code == 0
    eventually("both GPUs", partial(offers, cluster, 2), 10)
