"""The harness itself: real programs come up and run a pod; what the other tests rest on."""

from __future__ import annotations

import pytest

from tests.e2e.k8s.api import eventually
from tests.e2e.k8s.cluster import NODE, Cluster, pod

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]


def test_a_plain_pod_runs_to_its_end(cluster: Cluster) -> None:
    cluster.api.create_pod(pod("plain", "sh", "-c", "echo hello from $(id -u)"))
    ended = eventually("the pod's end", lambda: cluster.api.pod("plain")["status"]["phase"] in ("Succeeded", "Failed"))
    assert ended
    assert cluster.log_of("plain") == "hello from 0\n"
    assert cluster.api.pod("plain")["spec"]["nodeName"] == NODE
    cluster.api.delete_pod("plain")
    eventually("the pod to be gone", lambda: cluster.api.gone("plain"))


def test_the_kubelet_knows_no_gpu_before_a_device_plugin_registers(cluster: Cluster) -> None:
    assert cluster.allocatable("amd.com/gpu") is None
