"""Pods that HAMi's real scheduler places on GPUs of this daemon: from its webhook to a process that is held.

Its scheduler is built, or named: ``AMDVGPU_E2E_HAMI=/path/to/scheduler``.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, Final

import pytest

from amdvgpud.core import hami
from tests.e2e.conftest import BIN
from tests.e2e.k8s.api import PODS, Api, eventually
from tests.e2e.k8s.cluster import NODE, Cluster, Service, daemon, pod
from tests.e2e.k8s.looks import GIB, answers, ended, masks_told, removed, why, written
from tests.e2e.k8s.many import Standing, come_and_go

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

REGISTER: Final = "hami.io/node-amd-register"
LOCK: Final = "hami.io/mutex.lock"
QUARTER: Final = {"amd.com/gpu": 1, "amd.com/gpucores": 25, "amd.com/gpumem": 16384}
SLICE: Final = "cat /run/amdvgpu/*/slice.json; sleep infinity"
REGISTERED: Final = "registered with the kubelet"


@pytest.fixture(scope="module")
def served(
    hami_runs: None, cluster: Cluster, account: Api, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """The daemon with the manifests' own account; HAMi's scheduler has seen its registration."""
    del account, hami_runs
    file = tmp_path_factory.mktemp("hami") / "amdvgpud.toml"
    file.write_text(
        'simulate = "2*mi300x"\ntick_s = 0.2\nrescan_s = 1\nkubelet.mode = ["hami"]\n'
        f'kube.config = "{cluster.folder}/amdvgpud.kubeconfig"\nkube.node_name = "{NODE}"\n'
    )
    with daemon(cluster, "--config", str(file)) as running:
        eventually("the GPUs", lambda: cluster.allocatable("amd.com/gpu"), 30)
        eventually("the registration", lambda: annotation(cluster, REGISTER), 30)
        yield running


@pytest.fixture(autouse=True)
def no_pods(hami_runs: None, cluster: Cluster) -> Iterator[None]:
    """What a test that failed has left is no matter for the next one."""
    yield
    removed(cluster, *(each["metadata"]["name"] for each in cluster.api.get(PODS)["items"]))


def annotation(cluster: Cluster, key: str) -> str | None:
    """Of the node."""
    value: str | None = cluster.api.node(NODE)["metadata"].get("annotations", {}).get(key)
    return value


def notes_of(cluster: Cluster, name: str) -> dict[str, str]:
    found: dict[str, str] = cluster.api.pod(name)["metadata"].get("annotations", {})
    return found


def gpus(cluster: Cluster) -> list[str]:
    """The ids that are registered."""
    return [gpu["id"] for gpu in json.loads(annotation(cluster, REGISTER) or "[]")]


def share(percent: int, mib: int, count: int = 1) -> dict[str, int]:
    return {"amd.com/gpu": count, "amd.com/gpucores": percent, "amd.com/gpumem": mib}


def staying(name: str, limits: Mapping[str, int], *, on: str | None = None) -> dict[str, Any]:
    """A pod that prints its slice and stays; ``on``: on that GPU and no other."""
    made = pod(name, "sh", "-c", SLICE, limits=limits)
    if on is not None:
        made["metadata"]["annotations"] = {"amd.com/use-gpu-uuid": on}
    return made


def container(name: str, limits: Mapping[str, int], *argv: str) -> dict[str, Any]:
    found: dict[str, Any] = pod(name, *(argv or ("sh", "-c", SLICE)), limits=limits)["spec"]["containers"][0]
    return found | {"name": name}


def running(cluster: Cluster, *names: str) -> None:
    for name in names:
        eventually(name, partial(lambda each: cluster.api.pod(each)["status"]["phase"] != "Pending", name))
        assert cluster.api.pod(name)["status"]["phase"] == "Running", why(cluster, name)


def cus_told(cluster: Cluster, name: str) -> dict[str, int]:
    """By the id of a GPU: the mask that the pod's annotation says it has."""
    text = notes_of(cluster, name)[hami.CU_ALLOCATED]
    return {gpu: cus.mask for gpu, cus in hami.parse_cus(text).items()}


def cus_promised(cluster: Cluster, name: str) -> dict[str, int]:
    """The same, of all containers of the pod, as the daemon's API shows its Book."""
    uid = cluster.api.pod(name)["metadata"]["uid"]
    asked = [("gpu", "gpus"), ("slice", "slices")]
    gpu, book = (
        json.loads(cluster.corner.run(str(BIN / "amdvgpuctl"), what, "list", "-o", "json").output)[key]
        for what, key in asked
    )
    ids = {each["id"]: each["smi_uuid"] for each in gpu}
    found: dict[str, int] = {}
    for item in book:
        for part in item["shares"] if hami.pod_uid(item["name"]) == uid else ():
            where = ids[part["gpu"]]
            (cus,) = hami.parse_cus(json.dumps({where: part["cus"]})).values()
            assert not found.get(where, 0) & cus.mask
            found[where] = found.get(where, 0) | cus.mask
    return found


def all_apart(masks: list[dict[str, int]]) -> bool:
    """Whether no CU of a GPU is in two of ``masks``."""
    for gpu in {gpu for mask in masks for gpu in mask}:
        of_gpu = [mask.get(gpu, 0) for mask in masks]
        if sum(each.bit_count() for each in of_gpu) != (sum(of_gpu)).bit_count():
            return False
    return True


def emptied(cluster: Cluster, *names: str) -> None:
    """The pods removed, and nothing of them left."""
    removed(cluster, *names)
    eventually("an empty Book", lambda: Standing.of(cluster) == Standing((), (), (), (), None))


def slice_of(cluster: Cluster, name: str) -> list[tuple[int, int]]:
    """(gpu_id, CU mask) of each GPU, from the slice.json that the pod has printed."""
    eventually(f"the slice of {name}", partial(written, cluster, name))
    return [(gpu["kfd_gpu_id"], int(gpu["cu_mask"], 16)) for gpu in json.loads(cluster.log_of(name))["gpus"]]


@pytest.mark.usefixtures("served")
def test_a_pod_of_a_quarter_and_16_gib_is_held_to_it(cluster: Cluster) -> None:
    before = len(masks_told(cluster))
    cluster.api.create_pod(pod("quarter", "kfdclient", "--step", "8G", "--queue", limits=QUARTER))
    assert ended(cluster, "quarter") == "Succeeded"
    made = cluster.api.pod("quarter")
    assert made["spec"]["schedulerName"] == "hami-scheduler"
    log = cluster.log_of("quarter")
    assert answers(log, "gpu", "total") == [(16 * GIB,)]
    assert answers(log, "alloc", "result") == [("ok",), ("ok",), ("ENOMEM",)]
    assert [mask.bit_count() for _, mask in masks_told(cluster)[before:]] == [72]  # of its queue: 76 down to whole XCCs
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
        wanted = staying(name, QUARTER)
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
    look = "cat /etc/ld.so.preload; ls /usr/local/vgpu /run/amdvgpu 2>/dev/null"
    script = f"{look}; env | grep -c HSA_CU_MASK; kfdclient --count 1"
    cluster.api.create_pod(pod("whole", "sh", "-c", script, limits={"amd.com/gpu": 1}))
    assert ended(cluster, "whole") == "Succeeded"
    log = cluster.log_of("whole")
    ((total,),) = answers(log, "gpu", "total")
    assert total > 191 * GIB
    assert "\n0\n" in f"\n{log}"
    assert [name for name in ("libamdvgpu", "libamvgpu", "slice.json") if name in log] == []
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


@pytest.mark.usefixtures("served")
def test_what_a_pod_is_told_of_its_compute_units_is_what_the_book_has(cluster: Cluster) -> None:
    wanted = {"a": share(25, 16384), "b": share(33, 8192), "c": share(10, 4096, 2), "d": share(1, 1024)}
    for name, limits in wanted.items():
        cluster.api.create_pod(staying(name, limits))
    running(cluster, *wanted)
    told = {name: cus_told(cluster, name) for name in wanted}
    assert told == {name: cus_promised(cluster, name) for name in wanted}
    assert {name: sorted(mask.bit_count() for mask in told[name].values()) for name in wanted} == {
        "a": [72], "b": [96], "c": [24, 24], "d": [8],
    }  # fmt: skip
    assert all_apart(list(told.values()))
    emptied(cluster, *wanted)


@pytest.mark.usefixtures("served")
def test_each_container_of_a_pod_has_a_share_of_its_own(cluster: Cluster) -> None:
    """With one that asks for nothing before them, of which the scheduler keeps no place in its text."""
    made = pod("several", "true")
    made["spec"]["containers"] = [
        container("none", {}, "sleep", "infinity"),
        container("left", share(25, 16384)),
        container("right", share(10, 4096)),
    ]
    made["spec"]["initContainers"] = [container("first", share(5, 2048), "sh", "-c", "cat /run/amdvgpu/*/slice.json")]
    cluster.api.create_pod(made)
    running(cluster, "several")
    assert notes_of(cluster, "several")[hami.BIND_PHASE] == hami.SUCCESS
    assert not hami.is_waiting(notes_of(cluster, "several")[hami.WAITING])
    given = {}
    for name in ("first", "left", "right"):
        eventually(name, partial(lambda each: cluster.log_of("several", each).rstrip().endswith("}"), name))
        (gpu,) = json.loads(cluster.log_of("several", name))["gpus"]
        given[name] = (gpu["vram_bytes"] >> 20, int(gpu["cu_mask"], 16).bit_count())
    assert given == {"first": (2048, 8), "left": (16384, 72), "right": (4096, 24)}
    assert annotation(cluster, LOCK) is None
    emptied(cluster, "several")


@pytest.mark.usefixtures("served")
def test_a_pod_whose_init_container_alone_wants_a_gpu_is_served_without_a_lock(cluster: Cluster) -> None:
    """HAMi 2.10 takes none for it. Its GPU is everybody's again while the pod runs on."""
    made = pod("early", "sleep", "infinity")
    made["spec"]["initContainers"] = [container("first", QUARTER, "kfdclient", "--step", "8G")]
    cluster.api.create_pod(made)
    running(cluster, "early")
    assert answers(cluster.log_of("early", "first"), "alloc", "result") == [("ok",), ("ok",), ("ENOMEM",)]
    eventually("no slice", lambda: Standing.of(cluster) == Standing((), (), (), (), None))
    assert told(cluster) == (20, [True, True])
    emptied(cluster, "early")


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("limits", [{"amd.com/gpu": 1}, share(66, 100_000)], ids=["whole", "two thirds"])
def test_an_init_container_and_the_one_behind_it_have_the_same_gpu_in_turn(
    cluster: Cluster, limits: Mapping[str, int]
) -> None:
    """For the scheduler such a pod is the larger of the two, so it fits a GPU that has no room for their sum."""
    made = pod("turns", "kfdclient", "--count", "1", limits=limits)
    made["metadata"]["annotations"] = {"amd.com/use-gpu-uuid": gpus(cluster)[0]}
    made["spec"]["initContainers"] = [container("first", limits, "kfdclient", "--count", "1")]
    cluster.api.create_pod(made)
    assert ended(cluster, "turns") == "Succeeded", why(cluster, "turns")
    assert answers(cluster.log_of("turns", "first"), "alloc", "result") == [("ok",)]
    assert answers(cluster.log_of("turns"), "alloc", "result") == [("ok",)]
    emptied(cluster, "turns")


@pytest.mark.usefixtures("served")
def test_what_an_init_container_had_is_given_to_the_next_pod_while_its_own_runs_on(cluster: Cluster) -> None:
    gpu = gpus(cluster)[0]
    made = staying("after", share(25, 16384), on=gpu)
    made["spec"]["initContainers"] = [container("first", share(50, 90_000), "kfdclient", "--count", "1")]
    cluster.api.create_pod(made)
    running(cluster, "after")
    has = cus_promised(cluster, "after")
    # The scheduler counts the first as its main container only by now, and sends it here.
    cluster.api.create_pod(staying("next", share(70, 150_000), on=gpu))
    running(cluster, "after", "next")
    assert [mask.bit_count() for mask in cus_told(cluster, "next").values()] == [208]
    assert all_apart([cus_promised(cluster, "after"), cus_told(cluster, "next")])
    assert cus_promised(cluster, "after").keys() == has.keys()
    eventually("the annotation", lambda: cus_told(cluster, "after") == cus_promised(cluster, "after"))
    emptied(cluster, "after", "next")


@pytest.mark.usefixtures("served")
def test_a_pod_that_has_the_lock_and_is_not_bound_yet_is_not_harmed_by_one_without_a_lock(cluster: Cluster) -> None:
    gpu = hami.parse_registration(annotation(cluster, REGISTER) or "")[1]
    text = f"{gpu['id']},{gpu['type']},16384,76:;"
    waits = pod("waits", "true", limits=QUARTER)
    waits["metadata"] |= {
        "labels": {"hami.io/webhook": "ignore"},
        "annotations": {
            hami.WAITING: text, hami.ALLOCATED: text, hami.ASSIGNED_NODE: NODE, hami.BIND_PHASE: hami.ALLOCATING,
            hami.BIND_TIME: "1",
        },
    }  # fmt: skip
    waits["spec"]["schedulerName"] = "nobody"
    cluster.api.create_pod(waits)
    lock = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())},default,waits"
    cluster.api.patch(f"/api/v1/nodes/{NODE}", {"metadata": {"annotations": {LOCK: lock}}})
    # Only its init container asks for a GPU: HAMi 2.10 takes no lock for it, and binds it now.
    made = pod("passes", "true")
    made["spec"]["initContainers"] = [container("first", QUARTER, "kfdclient", "--step", "8G")]
    cluster.api.create_pod(made)
    assert ended(cluster, "passes") == "Succeeded", why(cluster, "passes")
    assert answers(cluster.log_of("passes", "first"), "alloc", "result") == [("ok",), ("ok",), ("ENOMEM",)]
    assert annotation(cluster, LOCK) == lock
    assert notes_of(cluster, "waits")[hami.BIND_PHASE] == hami.ALLOCATING
    target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "waits"}, "target": target}
    cluster.api.call("POST", f"{PODS}/waits/binding", binding)
    assert ended(cluster, "waits") == "Succeeded", why(cluster, "waits")
    assert annotation(cluster, LOCK) is None
    assert list(cus_told(cluster, "waits")) == [gpu["id"]]
    emptied(cluster, "waits", "passes")


@pytest.mark.usefixtures("served")
def test_small_pods_that_took_more_than_was_counted_let_only_the_big_one_fail(cluster: Cluster) -> None:
    """Each of 1 % is 3 compute units for the scheduler and 8 here, so nine of them have 72 where it counts 27."""
    gpu = gpus(cluster)[0]
    small = [f"small-{i}" for i in range(9)]
    for name in small:
        cluster.api.create_pod(staying(name, share(1, 1024), on=gpu))
    running(cluster, *small)
    before = {name: cus_told(cluster, name) for name in small}
    assert all_apart(list(before.values()))
    assert {mask.bit_count() for each in before.values() for mask in each.values()} == {8}
    cluster.api.create_pod(staying("big", share(90, 65536), on=gpu))
    assert ended(cluster, "big") == "Failed"
    message = cluster.api.pod("big")["status"]["message"]
    wanted = r"wanted 64 GiB and 273 CUs \(272 here, as many on each XCC\) on one partition"
    assert re.search(wanted + r"; the roomiest, \S+, has \S+ GiB and 232 CUs", message)
    assert notes_of(cluster, "big")[hami.BIND_PHASE] == hami.FAILED
    eventually("no lock", lambda: annotation(cluster, LOCK) is None)
    removed(cluster, "big")
    cluster.api.create_pod(staying("fits", share(75, 65536), on=gpu))
    running(cluster, "fits", *small)
    after = [cus_told(cluster, name) for name in small]
    assert after == list(before.values())
    assert all_apart([*after, cus_told(cluster, "fits")])
    emptied(cluster, "fits", *small)


@pytest.mark.usefixtures("served")
def test_a_bad_pod_harms_only_itself(cluster: Cluster) -> None:
    """One that cannot start, and one that brings the scheduler's words itself and would have all of the GPU."""
    cluster.api.create_pod(staying("good", QUARTER))
    running(cluster, "good")
    has = cus_told(cluster, "good")
    cluster.api.create_pod(pod("broken", "/no/such/program", limits=QUARTER))
    assert ended(cluster, "broken") == "Failed"
    gpu = hami.parse_registration(annotation(cluster, REGISTER) or "")[gpus(cluster).index(next(iter(has)))]
    text = f"{gpu['id']},{gpu['type']},{gpu['devmem']},{gpu['devcore']}:;"
    forged = pod("forged", "true", limits={"amd.com/gpu": 1})
    forged["metadata"] |= {
        "labels": {"hami.io/webhook": "ignore"},
        "annotations": {
            hami.WAITING: text, hami.ALLOCATED: text, hami.ASSIGNED_NODE: NODE, hami.BIND_PHASE: hami.ALLOCATING,
            hami.BIND_TIME: "1",
        },
    }  # fmt: skip
    forged["spec"]["schedulerName"] = "nobody"
    cluster.api.create_pod(forged)
    target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": "forged"}, "target": target}
    cluster.api.call("POST", f"{PODS}/forged/binding", binding)
    assert ended(cluster, "forged") == "Failed"
    cluster.api.create_pod(staying("next", QUARTER))
    running(cluster, "good", "next")
    assert cus_told(cluster, "good") == has == cus_promised(cluster, "good")
    assert all_apart([has, cus_told(cluster, "next")])
    emptied(cluster, "good", "broken", "forged", "next")


def registrations(served: Service) -> int:
    return served.log.read_text().count(REGISTERED)


def restart_kubelet(cluster: Cluster, served: Service) -> None:
    before = registrations(served)
    cluster.programs["kubelet"].end()
    cluster.start_kubelet()
    # The Node's status is still that of before: a pod that came now would be refused by the kubelet.
    eventually("a registration", lambda: registrations(served) > before)


def kill_daemon(cluster: Cluster, served: Service) -> None:
    del cluster
    before = registrations(served)
    served.end(signal.SIGKILL)
    served.start()
    eventually("a registration", lambda: registrations(served) > before)


@pytest.mark.parametrize("restart", [restart_kubelet, kill_daemon])
def test_after_a_restart_all_is_as_it_was_and_the_next_pod_comes_beside_it(
    cluster: Cluster, served: Service, restart: Any
) -> None:
    cluster.api.create_pod(staying("stays", QUARTER))
    running(cluster, "stays")
    has = cus_told(cluster, "stays")
    restart(cluster, served)
    eventually("the GPUs", lambda: told(cluster) == (20, [True, True]))
    cluster.api.create_pod(staying("beside", QUARTER, on=next(iter(has))))
    running(cluster, "stays", "beside")
    assert cus_promised(cluster, "stays") == has == cus_told(cluster, "stays")
    assert all_apart([has, cus_told(cluster, "beside")])
    assert annotation(cluster, LOCK) is None
    emptied(cluster, "stays", "beside")


def test_a_pod_that_is_sent_while_the_daemon_is_away_fails_and_leaves_no_lock_behind(
    cluster: Cluster, served: Service
) -> None:
    served.end(signal.SIGKILL)
    cluster.api.create_pod(pod("early", "true", limits=QUARTER))
    assert ended(cluster, "early") == "Failed"
    lock = annotation(cluster, LOCK)
    assert lock is not None
    assert lock.endswith(",default,early")
    before = registrations(served)
    served.start()
    eventually("no lock", lambda: annotation(cluster, LOCK) is None)
    eventually("a registration", lambda: registrations(served) > before)
    eventually("the GPUs", lambda: told(cluster) == (20, [True, True]))
    cluster.api.create_pod(pod("late", "true", limits=QUARTER))
    assert ended(cluster, "late") == "Succeeded", why(cluster, "late")
    emptied(cluster, "early", "late")


def says_unhealthy(cluster: Cluster, gpu: str) -> bool:
    """Whether the scheduler refuses a pod for that GPU by now: it reads the registration every 15 seconds."""
    cluster.api.create_pod(staying("probe", QUARTER, on=gpu))
    try:
        found = eventually("a word", lambda: cluster.api.pod("probe")["status"].get("conditions"))
        return any(each["type"] == "PodScheduled" and "NotHealth" in each.get("message", "") for each in found)
    finally:
        removed(cluster, "probe")


@pytest.mark.usefixtures("served")
def test_the_scheduler_sends_nothing_to_a_gpu_that_is_unhealthy_until_it_is_well(cluster: Cluster) -> None:
    well, ill = gpus(cluster)
    override = (str(BIN / "amdvgpuctl"), "gpu", "health", "1", "--override")
    assert cluster.corner.run(*override, "unhealthy").code == 0
    eventually("the scheduler to know", lambda: says_unhealthy(cluster, ill))
    names = [f"sent-{i}" for i in range(4)]
    for name in names:
        cluster.api.create_pod(staying(name, QUARTER))
    running(cluster, *names)
    assert {gpu for name in names for gpu in cus_told(cluster, name)} == {well}
    cluster.api.create_pod(staying("fifth", QUARTER))
    eventually("its refusal", lambda: cluster.api.pod("fifth")["status"].get("conditions"))
    assert "nodeName" not in cluster.api.pod("fifth")["spec"]
    assert cluster.corner.run(*override, "none").code == 0
    # kube-scheduler looks at the fifth again when a pod ends, or after five minutes; not because of an annotation.
    eventually("the scheduler to know", lambda: not says_unhealthy(cluster, ill))
    running(cluster, "fifth")
    assert list(cus_told(cluster, "fifth")) == [ill]
    emptied(cluster, "fifth", *names)


def test_two_hundred_pods_come_and_go_and_nothing_is_left(cluster: Cluster, served: Service) -> None:
    """One at a time for the scheduler: while the lock is another's it binds none, and tries again seconds later."""

    def create(made: dict[str, Any], alive: Collection[str]) -> None:
        del alive
        cluster.api.create_pod(made)
        eventually("its binding", lambda: "nodeName" in cluster.api.pod(made["metadata"]["name"])["spec"])

    come_and_go(cluster, served, share(25, 49000), create, together=8)
