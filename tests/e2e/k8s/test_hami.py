"""Pods that HAMi's real scheduler places on GPUs of this daemon: from its webhook to a process that is held.

Needs HAMi's scheduler: ``AMDVGPU_E2E_HAMI=/path/to/scheduler``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.conftest import BIN
from tests.e2e.k8s.api import Api, eventually
from tests.e2e.k8s.cluster import NODE, Cluster, Program, daemon, pod
from tests.e2e.k8s.looks import GIB, answers, ended, removed, written

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

REGISTER: Final = "hami.io/node-amd-register"
LOCK: Final = "hami.io/mutex.lock"
QUARTER: Final = {"amd.com/gpu": 1, "amd.com/gpucores": 25, "amd.com/gpumem": 16384}


@pytest.fixture(scope="module")
def served(cluster: Cluster, account: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    """The daemon with the manifests' own account; HAMi's scheduler has seen its registration."""
    del account
    cluster.start_hami(Path(os.environ["AMDVGPU_E2E_HAMI"]))
    file = tmp_path_factory.mktemp("hami") / "amdvgpud.toml"
    file.write_text(
        'simulate = "2*mi300x"\ntick_s = 0.2\nrescan_s = 1\nkubelet.mode = ["hami"]\n'
        f'kube.config = "{cluster.folder}/amdvgpud.kubeconfig"\nkube.node_name = "{NODE}"\n'
    )
    with daemon(cluster, "--config", str(file)) as running:
        eventually("the GPUs", lambda: cluster.allocatable("amd.com/gpu"), 30)
        eventually("the registration", lambda: annotation(cluster, REGISTER), 30)
        yield running


def annotation(cluster: Cluster, key: str) -> str | None:
    """Of the node."""
    value: str | None = cluster.api.node(NODE)["metadata"].get("annotations", {}).get(key)
    return value


def notes_of(cluster: Cluster, name: str) -> dict[str, str]:
    found: dict[str, str] = cluster.api.pod(name)["metadata"].get("annotations", {})
    return found


def slice_of(cluster: Cluster, name: str) -> list[tuple[int, int]]:
    """(gpu_id, CU mask) of each GPU, from the slice.json that the pod has printed."""
    eventually(f"the slice of {name}", partial(written, cluster, name))
    return [(gpu["kfd_gpu_id"], int(gpu["cu_mask"], 16)) for gpu in json.loads(cluster.log_of(name))["gpus"]]


@pytest.mark.usefixtures("served")
def test_a_pod_of_a_quarter_and_16_gib_is_held_to_it(cluster: Cluster) -> None:
    cluster.api.create_pod(pod("quarter", "kfdclient", "--step", "8G", "--queue", limits=QUARTER))
    assert ended(cluster, "quarter") == "Succeeded"
    made = cluster.api.pod("quarter")
    assert made["spec"]["schedulerName"] == "hami-scheduler"
    log = cluster.log_of("quarter")
    assert answers(log, "gpu", "total") == [(16 * GIB,)]
    assert answers(log, "alloc", "result") == [("ok",), ("ok",), ("ENOMEM",)]
    told = notes_of(cluster, "quarter")
    assert told["hami.io/bind-phase"] == "success"
    assert told["hami.io/amd-devices-to-allocate"] == ";"
    assert re.fullmatch(r"[^,]+,[^,]*AMD[^,]*,16384,76:;", told["hami.io/amd-devices-allocated"])
    (given,) = json.loads(told["hami.io/amd-cu-allocated"]).items()
    assert given[0] == told["hami.io/amd-devices-allocated"].split(",")[0]
    assert annotation(cluster, LOCK) is None
    removed(cluster, "quarter")


@pytest.mark.usefixtures("served")
def test_two_pods_share_a_gpu_with_disjoint_compute_units(cluster: Cluster) -> None:
    """Told to pack, HAMi puts both on one GPU."""
    names = ("left", "right")
    for name in names:
        wanted = pod(name, "sh", "-c", "cat /run/amdvgpu/*/slice.json; sleep infinity", limits=QUARTER)
        wanted["metadata"]["annotations"] = {"hami.io/gpu-scheduler-policy": "binpack"}
        cluster.api.create_pod(wanted)
    ((left_gpu, left),), ((right_gpu, right),) = (slice_of(cluster, name) for name in names)
    assert left_gpu == right_gpu
    assert (left.bit_count(), right.bit_count(), left & right) == (72, 72, 0)  # 76 down to whole XCCs
    removed(cluster, *names)


@pytest.mark.usefixtures("served")
def test_a_gpu_that_is_full_for_hami_leaves_the_pod_pending_and_the_lock_free(cluster: Cluster) -> None:
    cluster.api.create_pod(pod("huge", "true", limits=QUARTER | {"amd.com/gpumem": 1 << 20}))
    conditions: Any = eventually("the scheduler's word", lambda: cluster.api.pod("huge")["status"].get("conditions"))
    assert [(c["type"], c["status"]) for c in conditions] == [("PodScheduled", "False")]
    assert annotation(cluster, LOCK) is None
    removed(cluster, "huge")


@pytest.mark.usefixtures("served")
def test_a_whole_gpu_has_no_mask_and_no_library(cluster: Cluster) -> None:
    script = "ls -A /run/amdvgpu /etc/ld.so.preload; env | grep -c HSA_CU_MASK; kfdclient --count 1"
    cluster.api.create_pod(pod("whole", "sh", "-c", script, limits={"amd.com/gpu": 1}))
    assert ended(cluster, "whole") == "Succeeded"
    log = cluster.log_of("whole")
    ((total,),) = answers(log, "gpu", "total")
    assert total > 191 * GIB
    assert "\n0\n" in f"\n{log}"
    removed(cluster, "whole")


def told(cluster: Cluster) -> tuple[int | None, list[bool]]:
    """What the kubelet may allocate, and which GPUs the registration calls healthy (Go leaves false out)."""
    registered = json.loads(annotation(cluster, REGISTER) or "[]")
    return cluster.allocatable("amd.com/gpu"), [gpu.get("health", False) for gpu in registered]


@pytest.mark.usefixtures("served")
def test_a_gpu_that_is_unhealthy_is_told_to_the_kubelet_and_to_hami(cluster: Cluster) -> None:
    for word, wanted in (("unhealthy", (10, [True, False])), ("none", (20, [True, True]))):
        done = cluster.corner.run(str(BIN / "amdvgpuctl"), "gpu", "health", "1", "--override", word)
        assert done.code == 0, done.output
        eventually(f"{wanted}", partial(lambda expected: told(cluster) == expected, wanted), 45)


@pytest.mark.usefixtures("served")
def test_when_pods_have_ended_all_is_free_again(cluster: Cluster) -> None:
    names = [f"again-{i}" for i in range(8)]
    for name in names:
        cluster.api.create_pod(pod(name, "kfdclient", "--count", "1", limits=QUARTER))
    assert {ended(cluster, name) for name in names} == {"Succeeded"}
    removed(cluster, *names)
    whole = [f"whole-{i}" for i in range(2)]
    for name in whole:
        cluster.api.create_pod(pod(name, "kfdclient", "--count", "1", limits={"amd.com/gpu": 1}))
    assert {ended(cluster, name) for name in whole} == {"Succeeded"}
    removed(cluster, *whole)
    assert annotation(cluster, LOCK) is None
