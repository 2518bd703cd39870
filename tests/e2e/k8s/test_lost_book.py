"""A daemon whose state was lost under pods that run: it finds them at the real kubelet, and they keep their shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from tests.e2e.conftest import BIN
from tests.e2e.k8s.api import eventually
from tests.e2e.k8s.cluster import NODE, Cluster, Program, daemon, pod
from tests.e2e.k8s.looks import answers, removed
from tests.e2e.k8s.test_hami_kubelet import mask_of, schedule, slices

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

GPU: Final = "amd.com/gpu"
QUARTER: Final = {"amd.com/gpu": 1, "amd.com/gpumem": 16384, "amd.com/gpucores": 25}
SHOW: Final = ("sh", "-c", "cat /run/amdvgpu/*/slice.json; ls /usr/local/vgpu; sleep infinity")


@contextmanager
def serving(cluster: Cluster, mode: str, *options: str, devices: int) -> Iterator[Program]:
    """With an empty state each time: ``daemon`` removes it."""
    with daemon(cluster, "--simulate=2*mi300x", f"--kubelet-mode={mode}", "--tick-s=0.5", *options) as program:
        eventually("a registration", lambda: f"{GPU}: registered" in program.log.read_text(), 120)
        eventually("the GPUs", lambda: (cluster.allocatable(GPU) or 0) == devices, 120)
        yield program


def leases(cluster: Cluster) -> str:
    return cluster.corner.run(str(BIN / "amdvgpuctl"), "lease", "list").output


def test_a_pod_keeps_its_whole_gpu(cluster: Cluster) -> None:
    with serving(cluster, "whole", devices=2):
        # A client whose standard input ends would end too, and with it the kubelet's word that the pod has a GPU.
        holds = "sleep infinity | kfdclient --step 1G --count 1 --hold"
        cluster.api.create_pod(pod("whole", "sh", "-c", holds, limits={GPU: 1}))
        eventually("its process", lambda: answers(cluster.log_of("whole"), "alloc", "result"))
        before = slices(cluster)
    with serving(cluster, "whole", devices=2) as again:
        assert slices(cluster) == before
        assert "default/whole (main) has" in again.log.read_text()
        removed(cluster, "whole")
        eventually("no slice", lambda: not slices(cluster), 120)
    eventually("no GPU", lambda: not cluster.allocatable(GPU))


def test_a_pod_of_hamis_scheduler_keeps_its_slice_and_the_next_one_gets_another(cluster: Cluster) -> None:
    access = (f"--kube-config={cluster.folder / 'admin.kubeconfig'}", f"--kube-node-name={NODE}")
    with serving(cluster, "hami", *access, devices=20):
        schedule(cluster, pod("stays", *SHOW, limits=QUARTER), (1, 16384, 76))
        mask, before = mask_of(cluster, "stays"), slices(cluster)
        eventually("it to run", lambda: cluster.api.pod("stays")["status"]["phase"] == "Running")
    with serving(cluster, "hami", *access, devices=20) as again:
        eventually("its slice", lambda: slices(cluster) == before)
        assert "default/stays runs since before this Book, and keeps what it has" in again.log.read_text()
        schedule(cluster, pod("beside", *SHOW, limits=QUARTER), (1, 16384, 76))
        assert mask_of(cluster, "beside") & mask == 0
        assert "default/stays/main" in leases(cluster)
        removed(cluster, "stays", "beside")
        eventually("no slice", lambda: not slices(cluster), 120)
    eventually("no GPU", lambda: not cluster.allocatable(GPU))
