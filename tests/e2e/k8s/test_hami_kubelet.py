"""A real kubelet, containerd and API server, with the words of HAMi's scheduler written by the test: binding, Allocate,
a container that is held, its end. The scheduler itself is in test_hami.py."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import pytest

from amdvgpud.core import hami
from tests.e2e.k8s.api import eventually
from tests.e2e.k8s.cluster import NODE, Cluster, Program, daemon, pod
from tests.e2e.k8s.looks import masks_told, said_s
from tests.e2e.k8s.many import come_and_go

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

REGISTERED = "registered with the kubelet"
AMOUNTS = {"amd.com/gpumem": 2 * 196592, "amd.com/gpucores": 200}
QUEUE = "kfdclient --queue --count 0 >/dev/null"
SLICE = f"{QUEUE}; cat /run/amdvgpu/*/slice.json; env | grep -c LD_AUDIT; ls /usr/local/vgpu; sleep "


@pytest.fixture(scope="module", params=["nodes", "cdi"])
def served(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Program]:
    access = str(cluster.folder / "admin.kubeconfig")
    options = (
        "--kubelet-mode=hami",
        f"--kubelet-delivery={request.param}",
        f"--kube-config={access}",
        f"--kube-node-name={NODE}",
        "--tick-s=0.5",
        "--hami-amounts=on",
    )
    with daemon(cluster, "--simulate=2*mi300x", *options) as program:
        eventually("the GPUs", lambda: cluster.allocatable("amd.com/gpu") == 20, 120)
        assert time.time() - said_s(program, REGISTERED) < 2
        yield program
    eventually("no GPU", lambda: not cluster.allocatable("amd.com/gpu"))
    with daemon(cluster, "--simulate=2*mi300x", *options[:-1]):
        eventually("no amounts", lambda: not any(amounts(cluster).values()))
    eventually("no GPU again", lambda: not cluster.allocatable("amd.com/gpu"))


def notes(cluster: Cluster, name: str | None = None) -> Mapping[str, str]:
    found = cluster.api.node(NODE) if name is None else cluster.api.pod(name)
    annotations: dict[str, str] = found["metadata"].get("annotations") or {}
    return annotations


def schedule(cluster: Cluster, made: dict[str, Any], *grants: tuple[int, int, int]) -> None:
    """What HAMi's Filter and Bind do; ``grants``: (rank of the GPU, MiB, CUs) of each of its containers."""
    bind(cluster, made, "".join(f"{chosen(cluster, *grant)};" for grant in grants))


def chosen(cluster: Cluster, at: int, mib: int, cus: int) -> str:
    """One GPU, in the scheduler's words."""
    gpu = hami.parse_registration(notes(cluster)[hami.REGISTRATION])[at]
    return f"{gpu['id']},{gpu['type']},{mib},{cus}:"


def bind(cluster: Cluster, made: dict[str, Any], text: str) -> None:
    eventually("the lock to be free", lambda: hami.LOCK not in notes(cluster))
    name = made["metadata"]["name"]
    made["metadata"]["labels"] = {"hami.io/webhook": "ignore"}
    made["metadata"]["annotations"] = {
        hami.WAITING: text,
        hami.ALLOCATED: text,
        hami.ASSIGNED_NODE: NODE,
        hami.BIND_PHASE: hami.ALLOCATING,
        hami.BIND_TIME: "1700000000",
    }
    made["spec"]["schedulerName"] = "the-test"
    cluster.api.create_pod(made)
    lock = f"2026-01-01T00:00:00Z,default,{name}"
    cluster.api.patch(f"/api/v1/nodes/{NODE}", {"metadata": {"annotations": {hami.LOCK: lock}}})
    target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
    cluster.api.call("POST", f"/api/v1/namespaces/default/pods/{name}/binding", binding)


def is_in(cluster: Cluster, name: str, *phases: str) -> bool:
    return cluster.api.pod(name)["status"]["phase"] in phases


def mask_of(cluster: Cluster, name: str) -> int:
    eventually(f"what {name} has", lambda: "vgpu" in cluster.log_of(name))
    (gpu,) = json.loads(cluster.log_of(name).rpartition("}")[0] + "}")["gpus"]
    return int(gpu["cu_mask"], 16)


def slices(cluster: Cluster) -> list[str]:
    return cluster.corner.run("ls", "/run/amdvgpud/slices").output.split()


def gone(cluster: Cluster, *names: str) -> None:
    for name in names:
        cluster.api.delete_pod(name)
    for name in names:
        eventually(f"{name} to be gone", partial(cluster.api.gone, name))
    eventually("no slice", lambda: not slices(cluster))


@pytest.mark.usefixtures("served")
def test_two_pods_on_one_gpu_are_held_to_disjoint_shares_and_give_them_back(cluster: Cluster) -> None:
    before = len(masks_told(cluster))
    for name in ("left", "right"):
        made = pod(name, "sh", "-c", SLICE + "infinity", limits={"amd.com/gpu": 1})
        schedule(cluster, made, (0, 16384, 152))
    left, right = (mask_of(cluster, name) for name in ("left", "right"))
    assert sorted(mask for _, mask in masks_told(cluster)[before:]) == sorted((left, right))  # what their queues got
    assert (left.bit_count(), right.bit_count(), left & right) == (152, 152, 0)
    assert notes(cluster, "left")[hami.BIND_PHASE] == hami.SUCCESS
    assert "libamvgpu.so" in cluster.log_of("left")
    assert "\n0\n" in cluster.log_of("left")
    assert hami.LOCK not in notes(cluster)
    gone(cluster, "left", "right")


@pytest.mark.usefixtures("served")
def test_a_pod_that_runs_to_its_end_frees_its_slice_while_its_object_is_still_there(cluster: Cluster) -> None:
    schedule(cluster, pod("short", "true", limits={"amd.com/gpu": 1}), (1, 8192, 76))
    eventually("its end", lambda: is_in(cluster, "short", "Succeeded"))
    eventually("no slice", lambda: not slices(cluster))
    gone(cluster, "short")


@pytest.mark.usefixtures("served")
def test_a_pod_that_cannot_be_served_fails_with_the_reason_and_the_next_one_is(cluster: Cluster) -> None:
    schedule(cluster, pod("greedy", "true", limits={"amd.com/gpu": 1}), (0, 17179869184, 76))
    eventually("its end", lambda: is_in(cluster, "greedy", "Failed"))
    assert "amd.com/gpumem counts MiB" in cluster.api.pod("greedy")["status"]["message"]
    schedule(cluster, pod("modest", "true", limits={"amd.com/gpu": 1}), (0, 16384, 76))
    eventually("its end", lambda: is_in(cluster, "modest", "Succeeded"))
    gone(cluster, "greedy", "modest")


@pytest.mark.usefixtures("served")
def test_the_node_has_amounts_that_the_kubelet_keeps_and_that_come_back(cluster: Cluster) -> None:
    eventually("the amounts", lambda: amounts(cluster) == AMOUNTS)
    gone = {"status": {"capacity": dict.fromkeys(AMOUNTS)}}
    cluster.api.patch(f"/api/v1/nodes/{NODE}/status", gone)
    eventually("the amounts to be gone", lambda: not any(amounts(cluster).values()))
    eventually("the amounts", lambda: amounts(cluster) == AMOUNTS)


def amounts(cluster: Cluster) -> dict[str, int | None]:
    return {resource: cluster.allocatable(resource) for resource in AMOUNTS}


def test_a_kubelet_that_starts_again_finds_its_pod_with_the_same_share(cluster: Cluster, served: Program) -> None:
    schedule(cluster, pod("stays", "sh", "-c", SLICE + "infinity", limits={"amd.com/gpu": 1}), (0, 16384, 76))
    mask, before = mask_of(cluster, "stays"), slices(cluster)
    registered = served.log.read_text().count(REGISTERED)
    cluster.programs["kubelet"].end()
    cluster.start_kubelet()
    # The Node's status is still that of before: a pod that came now would be refused by the kubelet.
    eventually("a registration", lambda: served.log.read_text().count(REGISTERED) > registered)
    eventually("the GPUs", lambda: cluster.allocatable("amd.com/gpu") == 20, 120)
    assert amounts(cluster) == AMOUNTS
    schedule(cluster, pod("beside", "sh", "-c", SLICE + "infinity", limits={"amd.com/gpu": 1}), (0, 16384, 76))
    assert mask_of(cluster, "beside") & mask == 0
    assert is_in(cluster, "stays", "Running")
    assert set(before) < set(slices(cluster))
    gone(cluster, "stays", "beside")


def test_two_hundred_pods_come_and_go_and_nothing_is_left(cluster: Cluster, served: Program) -> None:
    """Four quarters fill a GPU: each new pod gets what one has left that the API calls over, as a scheduler does it."""
    where: dict[str, int] = {}

    def create(made: dict[str, Any], alive: Collection[str]) -> None:
        load = [sum(where[name] == at for name in alive) for at in (0, 1)]
        at = where[made["metadata"]["name"]] = load.index(min(load))
        schedule(cluster, made, (at, 49000, 76))

    come_and_go(cluster, served, {hami.COUNT_RESOURCE: 1}, create, together=8)
