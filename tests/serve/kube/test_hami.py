"""The node's side of HAMi, against an API server in memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from aiohttp import web

from amdvgpud.core import hami, plan
from amdvgpud.core.errors import AmdvgpuError, Conflict, HostFailure, Invalid, Lingering, NoRoom, NotFound
from amdvgpud.core.health import Condition, Health
from amdvgpud.core.model import Compute, ComputePolicy, GpuId, Inventory, Priority, Request, Slice, SliceName
from amdvgpud.serve.kube.hami import GATE_IN_HAMI, HEARTBEAT_S, ROOM_LOOKS, HamiSettings, withdraw
from amdvgpud.serve.kube.pods import Held, Room
from amdvgpud.serve.kube.resources import Grant, GrantMount
from tests.fakes import Places, a_gpu, left_on
from tests.serve.kube.fake_kubeapi import Fault, failing
from tests.serve.kube.stage import GPU, HERE, OTHER, Stage, a_container, slice_of

QUARTER = f"{GPU},AMD Instinct MI300X,16384,76:"
HALF = f"{OTHER},AMD Instinct MI300X,32768,152:"
WHOLE = f"{GPU},AMD Instinct MI300X,196608,304:"


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    found = await Stage.of()
    await found.side.keep()
    yield found
    await found.close()


# ----------------------------------------------------------------------------------------------------- registration


async def test_the_node_is_registered_and_written_again_whoever_changed_it(stage: Stage) -> None:
    wanted = stage.api.annotations("node", HERE)[hami.REGISTRATION]
    assert [gpu["id"] for gpu in json.loads(wanted)] == [GPU, OTHER]
    for change in (None, "[]", "nonsense", wanted.replace('"health":true,', "")):
        stage.api.change_node(HERE, {"metadata": {"annotations": {hami.REGISTRATION: change}}})
        await stage.side.keep()
        assert stage.api.annotations("node", HERE)[hami.REGISTRATION] == wanted


async def test_nothing_is_written_while_nothing_has_changed_but_a_sign_of_life(stage: Stage) -> None:
    before = stage.api.asked.count("PATCH nodes")
    stage.now_s += 30
    await stage.side.keep()
    assert stage.api.asked.count("PATCH nodes") == before
    assert stage.api.annotations("node", HERE)[hami.REGISTERED_AT] == "1970-01-12T13:46:40Z"
    stage.now_s += HEARTBEAT_S
    await stage.side.keep()
    assert stage.api.annotations("node", HERE)[hami.REGISTERED_AT] == "1970-01-12T13:52:10Z"


async def test_a_change_of_health_is_registered_at_once_and_told(stage: Stage) -> None:
    running = asyncio.gather(stage.side.run(), stage.watch.run())
    await _until(lambda: stage.side._fit is not None)
    ill = Health(Condition.UNHEALTHY, "uncorrectable errors", "ras", 1.0)
    await stage.node.set_health({GpuId(GPU): ill})
    await _until(lambda: _health(stage) == [False, True])
    assert [d.healthy for d in stage.side.resource.devices(stage.node.view())] == [False] * 10 + [True] * 10
    await stage.node.set_health({GpuId(GPU): Health()})
    await _until(lambda: _health(stage) == [True, True])
    stage.sysfs.inventory = Inventory((a_gpu(0),), generation_id=2)
    await stage.node.rescan()
    await _until(lambda: _health(stage) == [True, False])
    await _until(lambda: len(stage.api.events) == 3)
    assert [(e["reason"], e["type"], e["message"]) for e in stage.api.events] == [
        (hami.EVENT_UNHEALTHY, "Warning", f"{GPU}: uncorrectable errors"),
        (hami.EVENT_RECOVERED, "Normal", f"{GPU}: it works"),
        (hami.EVENT_MISSING, "Warning", f"{OTHER} is not there any more"),
    ]
    running.cancel()


async def test_a_change_of_health_that_could_not_be_told_is_told_later(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    ill = Health(Condition.UNHEALTHY, "uncorrectable errors", "ras", 1.0)
    await stage.node.set_health({GpuId(GPU): ill})
    stage.api.faults = [("POST", "events", failing(403))] * 2
    for _ in range(2):
        await stage.side.keep()
    assert (stage.api.events, caplog.text.count("could not be written")) == ([], 1)
    for _ in range(2):
        await stage.side.keep()
    assert [(event["reason"], event["message"]) for event in stage.api.events] == [
        (hami.EVENT_UNHEALTHY, f"{GPU}: uncorrectable errors")
    ]
    # What has passed again before it could be told is told nobody.
    await stage.node.set_health({GpuId(GPU): Health()})
    stage.api.faults = [("POST", "events", failing(403))]
    await stage.side.keep()
    await stage.node.set_health({GpuId(GPU): ill})
    await stage.side.keep()
    assert len(stage.api.events) == 1


def _health(stage: Stage) -> list[bool]:
    return [gpu.get("health", False) for gpu in json.loads(stage.api.annotations("node", HERE)[hami.REGISTRATION])]


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


async def test_nothing_is_registered_before_the_pods_of_the_node_are_known() -> None:
    stage = await Stage.of()
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def slow(_: web.Request) -> None:
        reached.set()
        await go_on.wait()

    stage.api.faults = [("LIST", "pods", slow)]
    stage.scheduled("old", allocation=f"{QUARTER};")
    stage.api.change_pod("default", "old", {"status": {"phase": "Running"}})
    running = asyncio.gather(stage.side.run(), stage.watch.run())
    await reached.wait()
    assert "GET nodes" not in stage.api.asked
    go_on.set()
    await _until(lambda: hami.REGISTRATION in stage.api.annotations("node", HERE))
    assert _health(stage) == [False, True]
    running.cancel()
    await stage.close()


async def test_a_pod_that_nobody_here_has_served_is_told_of_as_it_comes_and_as_it_goes(stage: Stage) -> None:
    seen = stage.node.events_since(0)[1]
    running = asyncio.gather(stage.side.run(), stage.watch.run())
    await _until(lambda: stage.watch.listed.is_set() and stage.side._fit is not None)
    stage.scheduled("old", allocation=f"{QUARTER};")
    stage.api.change_pod("default", "old", {"status": {"phase": "Running"}})
    await _until(lambda: _health(stage) == [False, True])
    stage.api.delete_pod("default", "old")
    await _until(lambda: _health(stage) == [True, True])
    # Both are events of the node, which wake who tells the kubelet of devices.
    told = [(event.kind, event.subject) for event in stage.node.events_since(seen)[0]]
    assert told == [("gpu.stranger", GPU), ("gpu.stranger-gone", GPU)]
    running.cancel()


@pytest.mark.parametrize("text", [None, "", "nonsense", '{"elsewhere":"0"}', f'{{"{GPU}":"0-303"}}'])
async def test_what_a_pod_says_of_its_cus_is_put_right(stage: Stage, text: str | None) -> None:
    stage.pod("a", allocation=f"{QUARTER};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    after = await stage.restarted()  # a daemon that starts looks too
    after.api.change_pod("default", "a", {"metadata": {"annotations": {hami.CU_ALLOCATED: text}}})
    after.watch.pods = {p.metadata.uid: p for p in await after.client.list_pods(HERE)}
    await after.side.keep()
    assert json.loads(after.notes("a")[hami.CU_ALLOCATED]) == {GPU: "0-71"}


async def test_what_a_pod_says_of_its_cus_is_left_where_it_is_right_or_not_settled(stage: Stage) -> None:
    same = f'{{"{GPU}": "0-70, 71"}}'
    stage.pod("a", allocation=f"{QUARTER};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    stage.pod("whole", allocation=f"{OTHER},T,196608,304:;")
    await stage.side.resource.allocate([f"{OTHER}#0"])
    stage.pod("b", a_container("x"), a_container("y"), allocation=f"{QUARTER};{QUARTER};")
    await stage.side.resource.allocate([f"{GPU}#1"])
    for name in "ab":
        stage.api.change_pod("default", name, {"metadata": {"annotations": {hami.CU_ALLOCATED: same}}})
    stage.watch.pods = {p.metadata.uid: p for p in await stage.client.list_pods(HERE)}
    before = stage.api.asked.count("PATCH pods")
    await stage.side.keep()
    assert stage.api.asked.count("PATCH pods") == before


async def test_the_cus_of_an_init_container_are_said_until_it_has_ended(stage: Stage) -> None:
    most = f"{GPU},T,16384,200:"
    stage.pod("a", a_container("main"), init=[a_container("setup")], allocation=f"{most};{QUARTER};")
    for slot in range(2):
        await stage.side.resource.allocate([f"{GPU}#{slot}"])
    assert json.loads(stage.notes("a")[hami.CU_ALLOCATED]) == {GPU: "0-199"}
    status = {"initContainerStatuses": [{"name": "setup", "state": {"terminated": {"exitCode": 0}}}]}
    stage.api.change_pod("default", "a", {"status": status})
    stage.watch.pods = {p.metadata.uid: p for p in await stage.client.list_pods(HERE)}
    await stage.watch.release_ended(0)
    await stage.side.keep()
    assert json.loads(stage.notes("a")[hami.CU_ALLOCATED]) == {GPU: "0-71"}


async def test_a_node_whose_gpus_have_all_gone_says_so_of_what_it_had_registered() -> None:
    stage = await Stage.of()
    await stage.side.keep()
    after = await stage.restarted()
    after.sysfs.inventory = Inventory()
    await after.node.rescan()
    await after.side.keep()
    assert [(g["id"], "health" in g) for g in json.loads(after.api.annotations("node", HERE)[hami.REGISTRATION])] == [
        (GPU, False),
        (OTHER, False),
    ]
    await stage.close()


async def test_a_gpu_that_went_while_the_daemon_was_away_is_registered_without_health() -> None:
    stage = await Stage.of()
    await stage.side.keep()
    after = await stage.restarted()
    after.sysfs.inventory = Inventory((a_gpu(0),))
    await after.node.rescan()
    await after.side.keep()
    assert _health(after) == [True, False]
    devices = {d.id.rpartition("#")[0]: d.healthy for d in after.side.resource.devices(after.node.view())}
    assert devices == {GPU: True, OTHER: False}
    await stage.close()


async def test_a_stop_for_good_leaves_the_gpus_registered_and_none_healthy(stage: Stage) -> None:
    await withdraw(stage.client, HERE)
    assert _health(stage) == [False, False]
    assert hami.REGISTERED_AT not in stage.api.annotations("node", HERE)


@pytest.mark.parametrize(
    ("notes", "settings", "offered"),
    [
        ({}, HamiSettings(HERE), [(GPU, 10), (OTHER, 10)]),
        ({}, HamiSettings(HERE, split_count=3), [(GPU, 3), (OTHER, 3)]),
        ({hami.OPERATING_MODE: "partition"}, HamiSettings(HERE), [(f"{GPU}#spx", 1), (f"{OTHER}#spx", 1)]),
        ({}, HamiSettings(HERE, hami.Mode.PARTITION), [(f"{GPU}#spx", 1), (f"{OTHER}#spx", 1)]),
        ({hami.OPERATING_MODE: "cu"}, HamiSettings(HERE, hami.Mode.PARTITION), [(GPU, 10), (OTHER, 10)]),
        ({hami.OPERATING_MODE: "odd"}, HamiSettings(HERE, hami.Mode.PARTITION), [(GPU, 10), (OTHER, 10)]),
        (
            {hami.OPERATING_MODE: "partition", hami.COMPUTE_PARTITION: "dpx"},
            HamiSettings(HERE),
            [(f"{gpu}-{i}#dpx", 1) for gpu in (GPU, OTHER) for i in (0, 1)],
        ),
        ({hami.COMPUTE_PARTITION: "dpx"}, HamiSettings(HERE), [(GPU, 10), (OTHER, 10)]),
        (
            {hami.OPERATING_MODE: "partition", hami.COMPUTE_PARTITION: "nonsense"},
            HamiSettings(HERE),
            [(f"{GPU}#spx", 1), (f"{OTHER}#spx", 1)],
        ),
    ],
)
async def test_the_nodes_annotations_beat_the_configuration(
    notes: dict[str, str], settings: HamiSettings, offered: list[tuple[str, int]]
) -> None:
    stage = await Stage.of(settings=settings)
    stage.api.change_node(HERE, {"metadata": {"annotations": notes}})
    before = stage.side.known.is_set()
    await stage.side.keep()
    assert (before, stage.side.known.is_set()) == (False, True)
    assert [(o.id, o.count) for o in stage.side.offers(stage.node.view())] == offered
    await stage.close()


# --------------------------------------------------------------------------------------------------------- allocate


async def test_a_pod_gets_its_slice_and_all_books_say_so(stage: Stage) -> None:
    pod = stage.pod("a", allocation=f"{QUARTER};")
    grant = await stage.side.resource.allocate([f"{GPU}#0"])
    name = slice_of(pod)
    assert stage.slices() == {name: [(f"{GPU}/0", 16384, 72)]}
    (lease,) = stage.node.view().book.leases.values()
    assert (lease.holder.text, lease.ephemeral, lease.expires_s) == ("default/a/main", True, None)
    assert grant == Grant(
        cdi_devices=(f"amdvgpu.io/slice={name}",),
        environment=(("AMDVGPU_SLICE", name),),
        added_environment=(
            ("HSA_CU_MASK", "0:0-71"),
            ("HIP_DEVICE_MEMORY_LIMIT_0", "16384m"),
            ("HIP_DEVICE_MEMORY_LIMIT", "16384m"),
        ),
        added_mounts=(GrantMount("/usr/lib/amdvgpu/libamdvgpu.so", GATE_IN_HAMI),),
    )
    notes = stage.notes("a")
    assert (notes[hami.WAITING], notes[hami.ALLOCATED], notes[hami.BIND_PHASE]) == (";", f"{QUARTER};", hami.SUCCESS)
    assert json.loads(notes[hami.CU_ALLOCATED]) == {GPU: "0-71"}
    assert stage.locked() is None


async def test_two_pods_share_a_gpu_with_disjoint_cus(stage: Stage) -> None:
    half = f"{GPU},T,16384,152:;"
    for name in ("a", "b"):
        stage.pod(name, allocation=half)
        await stage.side.resource.allocate([f"{GPU}#0"])
    sets = [hami.parse_cus(stage.notes(name)[hami.CU_ALLOCATED])[GPU] for name in ("a", "b")]
    assert [len(cus) for cus in sets] == [152, 152]
    assert not sets[0].mask & sets[1].mask


async def test_a_whole_gpu_brings_neither_mask_nor_library(stage: Stage) -> None:
    stage.pod("a", allocation=f"{WHOLE};")
    grant = await stage.side.resource.allocate([f"{GPU}#3"])
    assert (grant.added_environment, grant.added_mounts) == ((), ())
    assert hami.CU_ALLOCATED not in stage.notes("a")
    assert next(iter(stage.node.view().book.slices.values())).request.compute.policy is ComputePolicy.WHOLE


async def test_gpus_with_different_quotas_come_by_name_like_all_others(stage: Stage) -> None:
    pod = stage.pod("a", a_container("main", 2), allocation=f"{QUARTER}{HALF};")
    grant = await stage.side.resource.allocate([f"{GPU}#0", f"{OTHER}#0"])
    names = (slice_of(pod), f"{slice_of(pod)}.1")
    assert tuple(stage.slices()) == names
    # So the hook comes along, and what rests on it: images.policy, hook.required, the kernel's cap.
    assert grant.cdi_devices == tuple(f"amdvgpu.io/slice={name}" for name in names)
    told = dict((*grant.environment, *grant.added_environment))
    assert told["ROCR_VISIBLE_DEVICES"] == f"{GPU},{OTHER}"
    assert told["HIP_DEVICE_MEMORY_LIMIT_1"] == "32768m"
    assert "HIP_DEVICE_MEMORY_LIMIT" not in told
    assert {item.request.together for item in stage.node.view().book.slices.values()} == {names}


@pytest.mark.parametrize(
    "allocation",
    [f";{QUARTER};{HALF};", f"{QUARTER};{HALF};", f";{QUARTER};{HALF};;"],
    ids=["placeholders", "none", "end"],
)
async def test_containers_get_what_is_theirs_in_both_shapes(stage: Stage, allocation: str) -> None:
    pod = stage.pod(
        "a",
        a_container("first", priority=0),
        a_container("side", 0),
        a_container("second"),
        init=[a_container("setup", 0)],
        allocation=allocation,
    )
    first = await stage.side.resource.allocate([f"{GPU}#0"])
    assert stage.locked() is not None
    assert stage.notes("a")[hami.BIND_PHASE] == hami.ALLOCATING
    second = await stage.side.resource.allocate([f"{OTHER}#0"])
    assert stage.slices() == {
        slice_of(pod, 0): [(f"{GPU}/0", 16384, 72)],
        slice_of(pod, 1): [(f"{OTHER}/0", 32768, 152)],
    }
    assert [dict(g.added_environment).get("AMD_TASK_PRIORITY") for g in (first, second)] == ["0", None]
    book = stage.node.view().book
    assert [book.slices[SliceName(slice_of(pod, i))].request.priority for i in (0, 1)] == [
        Priority.HIGH,
        Priority.NORMAL,
    ]
    holders = {lease.slice: lease.holder.text for lease in book.leases.values()}
    assert holders == {slice_of(pod, 0): "default/a/first", slice_of(pod, 1): "default/a/second"}
    assert (stage.locked(), stage.notes("a")[hami.BIND_PHASE]) == (None, hami.SUCCESS)
    assert len(hami.parse_allocation(stage.notes("a")[hami.WAITING])) == len(hami.parse_allocation(allocation))
    assert set(json.loads(stage.notes("a")[hami.CU_ALLOCATED])) == {GPU, OTHER}


async def test_the_pod_that_the_lock_names_is_served_whatever_order_the_kubelet_asks_in(stage: Stage) -> None:
    stage.scheduled("older", allocation=f"{HALF};")
    stage.pod("younger", allocation=f"{QUARTER};")
    await stage.side.resource.allocate([f"{OTHER}#0"])
    assert stage.notes("younger")[hami.BIND_PHASE] == hami.SUCCESS
    assert stage.notes("older")[hami.BIND_PHASE] == hami.ALLOCATING


async def test_without_a_lock_the_oldest_binding_that_fits_the_call_is_served(stage: Stage) -> None:
    stage.scheduled("two", a_container("main", 2), allocation=f"{QUARTER}{HALF};")
    stage.scheduled("one", allocation=f"{HALF};")
    stage.scheduled("later", allocation=f"{QUARTER};")
    await stage.side.resource.allocate([f"{OTHER}#0"])
    assert stage.notes("one")[hami.BIND_PHASE] == hami.SUCCESS


@pytest.mark.parametrize(
    "notes",
    [
        {hami.BIND_TIME: None},
        {hami.BIND_PHASE: hami.SUCCESS},
        {hami.ASSIGNED_NODE: "n2"},
        {hami.ALLOCATED: f"{HALF};"},
        {hami.ALLOCATED: "nonsense"},
        {hami.WAITING: "nonsense"},
        {hami.WAITING: f"{QUARTER}{HALF};", hami.ALLOCATED: f"{QUARTER}{HALF};"},
    ],
)
async def test_without_a_lock_a_pod_whose_text_is_not_the_schedulers_is_not_served(
    stage: Stage, notes: dict[str, str | None]
) -> None:
    stage.scheduled("a", allocation=f"{QUARTER};", notes=notes)
    with pytest.raises(NotFound, match="no binding pod found on node n1"):
        await stage.side.resource.allocate([f"{GPU}#0"])
    assert stage.slices() == {}


async def test_a_lock_of_a_pod_that_is_gone_is_released_and_the_pod_that_waits_is_served(stage: Stage) -> None:
    stage.lock({"metadata": {"namespace": "default", "name": "gone"}})
    stage.scheduled("a", allocation=f"{QUARTER};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    assert (stage.locked(), stage.notes("a")[hami.BIND_PHASE]) == (None, hami.SUCCESS)


@pytest.mark.parametrize("text", ["2026-01-01T00:00:00Z"])
async def test_a_lock_of_the_old_form_names_nobody_and_is_left_alone(stage: Stage, text: str) -> None:
    stage.scheduled("a", allocation=f"{QUARTER};")
    stage.api.change_node(HERE, {"metadata": {"annotations": {hami.LOCK: text}}})
    await stage.side.resource.allocate([f"{GPU}#0"])
    assert (stage.locked(), stage.notes("a")[hami.BIND_PHASE]) == (text, hami.SUCCESS)


@pytest.mark.parametrize(
    "away",
    [{"spec": {"nodeName": None}}, {"spec": {"nodeName": "n2"}}],
    ids=["not bound yet", "bound elsewhere"],
)
async def test_a_call_before_the_locks_pod_is_bound_here_is_for_another_and_does_it_no_harm(
    stage: Stage, away: dict[str, object]
) -> None:
    stage.pod("locked", allocation=f"{QUARTER};")
    stage.api.change_pod("default", "locked", away)
    with pytest.raises(NotFound, match="no binding pod found on node n1"):
        await stage.side.resource.allocate([f"{OTHER}#0"])
    for allocation, error in ((f"{OTHER},T,1,999:;", Invalid), (f"{HALF};", None)):
        # Only its init container asks for GPUs, so the scheduler took no lock for it.
        other = stage.scheduled(
            f"init-{stage.uids}", a_container("main", 0), init=[a_container("setup")], allocation=allocation
        )
        if error is None:
            await stage.side.resource.allocate([f"{OTHER}#0"])
            assert set(stage.slices()) == {slice_of(other)}
        else:
            with pytest.raises(error):
                await stage.side.resource.allocate([f"{OTHER}#0"])
            assert stage.notes(other["metadata"]["name"])[hami.BIND_PHASE] == hami.FAILED
        assert (stage.locked() or "").endswith(",default,locked")
        assert stage.notes("locked")[hami.BIND_PHASE] == hami.ALLOCATING
    locked = stage.api.change_pod("default", "locked", {"spec": {"nodeName": HERE}})
    await stage.side.resource.allocate([f"{GPU}#0"])
    assert stage.slices()[slice_of(locked)] == [(f"{GPU}/0", 16384, 72)]
    assert stage.locked() is None


async def test_a_call_for_another_number_of_gpus_is_not_for_the_locks_pod(stage: Stage) -> None:
    stage.pod("two", a_container("main", 2), allocation=f"{QUARTER}{HALF};")
    with pytest.raises(NotFound):
        await stage.side.resource.allocate([f"{OTHER}#0"])
    one = stage.scheduled("one", allocation=f"{HALF};")
    await stage.side.resource.allocate([f"{OTHER}#0"])
    assert set(stage.slices()) == {slice_of(one)}
    assert stage.notes("two")[hami.BIND_PHASE] == hami.ALLOCATING
    await stage.side.resource.allocate([f"{GPU}#0", f"{OTHER}#1"])
    assert stage.notes("two")[hami.BIND_PHASE] == hami.SUCCESS


@pytest.mark.parametrize(
    "lie",
    [
        {hami.WAITING: f"{QUARTER}{HALF};"},
        {hami.WAITING: ";"},
        {hami.WAITING: "nonsense"},
        {hami.BIND_PHASE: hami.SUCCESS},
        {hami.ASSIGNED_NODE: "n2"},
    ],
)
async def test_a_pod_that_hides_its_own_turn_does_not_get_anothers(stage: Stage, lie: dict[str, str]) -> None:
    stage.pod("liar", allocation=f"{QUARTER};", notes={hami.ALLOCATED: f"{QUARTER};", **lie})
    other = stage.scheduled("other", allocation=f"{HALF};")
    with contextlib.suppress(AmdvgpuError):
        await stage.side.resource.allocate([f"{GPU}#0"])
    assert stage.notes("other")[hami.BIND_PHASE] == hami.ALLOCATING
    await stage.side.resource.allocate([f"{OTHER}#0"])
    assert slice_of(other) in stage.slices()


async def test_a_pod_that_was_served_and_kept_its_lock_is_not_harmed_by_the_next_call(stage: Stage) -> None:
    first = stage.pod("a", allocation=f"{QUARTER};")
    stage.api.faults = [("PATCH", "nodes/n1", failing(500))] * 40
    await stage.side.resource.allocate([f"{GPU}#0"])
    stage.api.faults = []
    other = stage.scheduled("b", allocation=f"{HALF};")
    await stage.side.resource.allocate([f"{OTHER}#0"])
    assert set(stage.slices()) == {slice_of(first), slice_of(other)}
    assert (stage.locked() or "").endswith(",default,a")
    with pytest.raises(NotFound):
        await stage.side.resource.allocate([f"{OTHER}#1"])
    assert stage.notes("a")[hami.BIND_PHASE] == hami.SUCCESS


@pytest.mark.parametrize(
    "status",
    [
        {"phase": "Running"},
        {"phase": "Pending", "initContainerStatuses": [{"name": "setup", "state": {"running": {}}}]},
        {"phase": "Pending", "containerStatuses": [{"name": "main", "state": {"waiting": {}}, "restartCount": 1}]},
    ],
)
async def test_a_pod_that_has_run_gets_nobody_elses_call(stage: Stage, status: dict[str, object]) -> None:
    stage.pod("spider", allocation=f"{QUARTER};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    web = hami.format_served({0: [f"{OTHER}#0"]})
    stage.api.change_pod("default", "spider", {"status": status, "metadata": {"annotations": {hami.SERVED: web}}})
    fly = stage.scheduled("fly", allocation=f"{HALF};")
    grant = await stage.side.resource.allocate([f"{OTHER}#0"])
    assert grant.cdi_devices == (f"amdvgpu.io/slice={slice_of(fly)}",)


@pytest.mark.parametrize(
    "lies",
    [
        [{hami.ALLOCATED: WHOLE}],
        [{}, {hami.ALLOCATED: WHOLE}],
        [{}, {hami.WAITING: f"{WHOLE};{WHOLE};"}],
        [{}, {hami.WAITING: ";"}],
        [{hami.WAITING: f";{WHOLE};"}],
        [{hami.ALLOCATED: None}],
    ],
    ids=["shortened", "shortened later", "longer again", "hides it", "the other way round", "without"],
)
async def test_a_pod_cannot_have_its_container_served_in_the_name_of_one_that_ends_before(
    stage: Stage, lies: list[dict[str, str | None]]
) -> None:
    """What that one had is freed when it has succeeded, and would be under the container and the next pod then."""
    stage.pod("a", a_container("main"), init=[a_container("setup")], allocation=f"{WHOLE};{WHOLE};")
    for number, lie in enumerate(lies):
        stage.api.change_pod("default", "a", {"metadata": {"annotations": lie}})
        if number + 1 < len(lies):
            await stage.side.resource.allocate([f"{GPU}#0"])
    with pytest.raises((Invalid, Conflict)):
        await stage.side.resource.allocate([f"{GPU}#0"])
    assert (stage.slices(), stage.locked(), stage.notes("a")[hami.BIND_PHASE]) == ({}, None, hami.FAILED)


@pytest.mark.parametrize("locked", [False, True], ids=["", "its lock stayed"])
@pytest.mark.parametrize(
    "web",
    [
        {hami.SERVED: hami.format_served({0: [f"{OTHER}#0"]})},
        {hami.BIND_PHASE: hami.ALLOCATING, hami.WAITING: f"{QUARTER};"},
    ],
    ids=["it says what it has", "it says that it waits"],
)
async def test_a_pod_that_never_starts_gets_nobody_elses_call(stage: Stage, web: dict[str, str], locked: bool) -> None:
    spider = stage.pod("spider", allocation=f"{QUARTER};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    if locked:
        stage.lock(spider)
    stage.api.change_pod("default", "spider", {"metadata": {"annotations": web}})
    fly = stage.scheduled("fly", allocation=f"{HALF};")
    grant = await stage.side.resource.allocate([f"{OTHER}#0"])
    assert grant.cdi_devices == (f"amdvgpu.io/slice={slice_of(fly)}",)


async def test_a_pod_whose_init_container_has_ended_does_not_wait_whatever_it_says(stage: Stage) -> None:
    stage.pod("spider", a_container("main", 0), init=[a_container("setup")], allocation=f"{QUARTER};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    ended = {"initContainerStatuses": [{"name": "setup", "state": {"terminated": {"exitCode": 0}}}]}
    web = {hami.BIND_PHASE: hami.ALLOCATING, hami.WAITING: f"{QUARTER};"}
    stage.api.change_pod("default", "spider", {"status": ended, "metadata": {"annotations": web}})
    stage.watch.pods = {p.metadata.uid: p for p in await stage.client.list_pods(HERE)}
    assert await stage.watch.release_ended(0) == 1
    fly = stage.scheduled("fly", allocation=f"{HALF};")
    grant = await stage.side.resource.allocate([f"{OTHER}#0"])
    assert grant.cdi_devices == (f"amdvgpu.io/slice={slice_of(fly)}",)


# -------------------------------------------------------------------------------------------------------- asked again


async def test_a_call_that_comes_twice_gives_the_same_slice_and_takes_nothing_more(stage: Stage) -> None:
    pod = stage.pod("a", allocation=f"{QUARTER};")
    first = await stage.side.resource.allocate([f"{GPU}#0"])
    before = stage.slices()
    assert await stage.side.resource.allocate([f"{GPU}#0"]) == first
    # A daemon that has started since has only the pod's word for it, and takes that from the pod that the lock names.
    after = await stage.restarted()
    await after.side.keep()
    with pytest.raises(NotFound, match="no binding pod"):
        await after.side.resource.allocate([f"{GPU}#0"])
    stage.lock(pod)
    assert await after.side.resource.allocate([f"{GPU}#0"]) == first
    assert after.slices() == before


async def test_a_call_that_comes_twice_between_two_containers_does_not_take_the_seconds(stage: Stage) -> None:
    pod = stage.pod("a", a_container("x"), a_container("y"), allocation=f"{QUARTER};{HALF};")
    first = await stage.side.resource.allocate([f"{GPU}#0"])
    assert await stage.side.resource.allocate([f"{GPU}#0"]) == first
    assert set(stage.slices()) == {slice_of(pod, 0)}
    await stage.side.resource.allocate([f"{GPU}#1"])
    assert set(stage.slices()) == {slice_of(pod, 0), slice_of(pod, 1)}


@pytest.mark.parametrize(("restart", "served"), [("", 2), ("Always", 1)])
async def test_devices_of_an_init_container_that_ends_serve_the_next_container(
    stage: Stage, restart: str, served: int
) -> None:
    stage.pod("a", a_container("main"), init=[a_container("setup", restart=restart)], allocation=f"{QUARTER};{HALF};")
    for _ in range(2):
        await stage.side.resource.allocate([f"{GPU}#0"])
    assert len(stage.slices()) == served


@pytest.mark.parametrize(
    ("setup", "main", "granted"),
    [(WHOLE, WHOLE, 0), (f"{GPU},T,1024,200:", f"{GPU},T,1024,200:", 200), (WHOLE, QUARTER, 72), (QUARTER, WHOLE, 0)],
)
async def test_an_init_container_and_the_one_behind_it_have_the_same_gpu_in_turn(
    stage: Stage, setup: str, main: str, granted: int
) -> None:
    pod = stage.pod("a", a_container("main"), init=[a_container("setup")], allocation=f"{setup};{main};")
    for _ in range(2):
        await stage.side.resource.allocate([f"{GPU}#0"])
    assert (stage.notes("a")[hami.BIND_PHASE], stage.locked()) == (hami.SUCCESS, None)
    assert [share[2] for share in stage.slices()[slice_of(pod, 1)]] == [granted]
    assert plan.check(stage.node.view().book, stage.node.view().inventory) == ()
    # Everybody else is kept apart from both.
    stage.pod("b", allocation=f"{GPU},T,1024,152:;")
    with pytest.raises(NoRoom):
        await stage.side.resource.allocate([f"{GPU}#1"])
    assert set(stage.slices()) == {slice_of(pod, 0), slice_of(pod, 1)}


async def test_a_sidecar_and_a_container_run_together_and_never_share(stage: Stage) -> None:
    most = f"{GPU},T,1024,200:"
    stage.pod("a", a_container("main"), init=[a_container("side", restart="Always")], allocation=f"{most};{most};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    with pytest.raises(NoRoom, match="104 CUs"):
        await stage.side.resource.allocate([f"{GPU}#1"])
    assert stage.slices() == {}


async def test_ids_of_a_pod_that_ended_serve_the_pod_that_the_lock_names(stage: Stage) -> None:
    stage.pod("a", allocation=f"{QUARTER};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    stage.api.change_pod("default", "a", {"status": {"phase": "Succeeded"}})
    second = stage.pod("b", allocation=f"{HALF};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    assert slice_of(second) in stage.slices()
    stage.api.delete_pod("default", "b")
    with pytest.raises(NotFound, match="no binding pod"):
        await stage.side.resource.allocate([f"{GPU}#0"])


@pytest.mark.parametrize(("begun", "left"), [(False, 0), (True, 1)], ids=["nothing has run", "its init container runs"])
async def test_a_call_that_comes_again_and_fails_says_so_on_the_pod_and_frees_the_node(
    stage: Stage, begun: bool, left: int
) -> None:
    pod = stage.pod("a", a_container("x"), a_container("y"), allocation=f"{QUARTER};{HALF};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    if begun:
        state = {"initContainerStatuses": [{"name": "setup", "state": {"running": {}}}]}
        stage.api.change_pod("default", "a", {"status": state})
    stage.disk_fails = HostFailure("the disk is full")
    with pytest.raises(HostFailure, match="the disk is full"):
        await stage.side.resource.allocate([f"{GPU}#0"])
    assert (stage.locked(), stage.notes("a")[hami.BIND_PHASE]) == (None, hami.FAILED)
    # What runs keeps its slice: the kubelet ends it first.
    assert list(stage.slices()) == [slice_of(pod)] * left


@pytest.mark.parametrize("cus", [76, 8], ids=["the very slice", "one of an older allocation"])
async def test_a_crash_between_the_grant_and_the_patch_leaves_nothing_behind_that_hinders(
    stage: Stage, cus: int
) -> None:
    name = SliceName(slice_of(stage.pod("a", allocation=f"{QUARTER};")))
    # What a daemon that died there has in its Book.
    await stage.node.put_slice(Request(name, Compute(ComputePolicy.EXACT, cu_count=cus), 16384 << 20, on=(f"{GPU}/0",)))
    await stage.side.resource.allocate([f"{GPU}#0"])
    assert stage.slices() == {name: [(f"{GPU}/0", 16384, 72)]}


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("allocation", "error", "why"),
    [
        ("elsewhere,T,1,1:;", NotFound, f"this node has no GPU 'elsewhere'; it has {GPU}, {OTHER}"),
        (f"{GPU},T,17179869184,76:;", Invalid, "counts MiB, so write 16384 for 16 GiB"),
        (f"{GPU},T,0,76:;", Invalid, "no memory is named for 76 of the 304 CUs"),
        (f"{GPU},T,1,999:;", Invalid, "999 CUs are wanted"),
        (f"{QUARTER}{HALF};", Invalid, "has chosen 2 GPUs for default/a/main, and the kubelet 1"),
        (f"{GPU},T,x,1:;", Invalid, "is no allocation"),
        (";", Conflict, "none of its containers waits for a GPU"),
    ],
)
async def test_what_cannot_be_served_fails_that_pod_and_frees_the_node(
    stage: Stage, allocation: str, error: type[Exception], why: str
) -> None:
    stage.pod("a", allocation=allocation)
    with pytest.raises(error, match=why):
        await stage.side.resource.allocate([f"{GPU}#0"])
    assert (stage.locked(), stage.slices(), stage.notes("a")[hami.BIND_PHASE]) == (None, {}, hami.FAILED)
    stage.pod("b", allocation=f"{QUARTER};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    assert stage.notes("b")[hami.BIND_PHASE] == hami.SUCCESS


async def test_what_was_promised_to_others_is_never_overlapped_whatever_a_pod_says(stage: Stage) -> None:
    await stage.node.put_slice(
        Request(SliceName("alice"), Compute(ComputePolicy.EXACT, cu_count=288), 100 << 30, on=(GPU,))
    )
    stage.pod("a", allocation=f"{QUARTER};", notes={hami.CU_ALLOCATED: json.dumps({GPU: "0-303"})})
    with pytest.raises(NoRoom, match=r"wanted 16 GiB and 76 CUs \(72 here, .*\) on .* has 92 GiB and 16 CUs"):
        await stage.side.resource.allocate([f"{GPU}#0"])
    assert (set(stage.slices()), stage.locked()) == ({"alice"}, None)


async def test_small_pods_take_more_than_the_scheduler_counts_and_a_big_one_is_told_so(stage: Stage) -> None:
    for number in range(9):
        stage.pod(f"small-{number}", allocation=f"{GPU},T,1024,3:;")  # 1 % of 304; each XCC gives one
        await stage.side.resource.allocate([f"{GPU}#{number}"])
    small = stage.slices()
    assert {granted for shares in small.values() for *_, granted in shares} == {8}
    stage.pod("big", allocation=f"{GPU},T,1024,277:;")  # what the scheduler takes to be left: 304 - 9 * 3
    with pytest.raises(NoRoom) as refusal:
        await stage.side.resource.allocate([f"{GPU}#9"])
    assert "wanted 1 GiB and 277 CUs (272 here, as many on each XCC)" in str(refusal.value)
    assert "has 183 GiB and 232 CUs" in str(refusal.value)
    assert (stage.slices(), stage.locked(), stage.notes("big")[hami.BIND_PHASE]) == (small, None, hami.FAILED)
    assert hami.CU_ALLOCATED not in stage.notes("big")
    again = stage.pod("smaller", allocation=f"{GPU},T,1024,232:;")
    await stage.side.resource.allocate([f"{GPU}#9"])
    assert stage.slices()[slice_of(again)] == [(f"{GPU}/0", 1024, 232)]
    said = [stage.notes(name)[hami.CU_ALLOCATED] for _, name in stage.api.pods if name != "big"]
    masks = [hami.parse_cus(text)[GPU].mask for text in said]
    assert sum(mask.bit_count() for mask in masks) == 304
    assert sum(masks) == (1 << 304) - 1  # no bit twice


async def test_the_second_container_that_fails_takes_the_firsts_with_it(stage: Stage) -> None:
    stage.pod("a", a_container("x"), a_container("y"), allocation=f"{QUARTER};nowhere,T,1,1:;")
    await stage.side.resource.allocate([f"{GPU}#0"])
    with pytest.raises(NotFound):
        await stage.side.resource.allocate([f"{OTHER}#0"])
    assert (stage.slices(), stage.locked()) == ({}, None)
    with pytest.raises(NotFound, match="no binding pod"):
        await stage.side.resource.allocate([f"{GPU}#0"])
    assert stage.side.resource._given == {}


async def test_a_pod_that_ended_makes_room_at_once_for_the_one_that_the_scheduler_sent_in_its_place(
    stage: Stage,
) -> None:
    """The scheduler has seen the end in the API, and the watch has not."""
    stage.pod("a", allocation=f"{WHOLE};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    stage.api.change_pod("default", "a", {"status": {"phase": "Running"}})
    stage.watch.pods = {pod.metadata.uid: pod for pod in await stage.client.list_pods(HERE)}
    stage.api.change_pod("default", "a", {"status": {"phase": "Succeeded"}})
    second = stage.pod("b", allocation=f"{WHOLE};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    assert set(stage.slices()) == {slice_of(second)}


async def test_room_that_the_usual_look_has_just_made_is_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    first = stage.pod("a", allocation=f"{WHOLE};")
    await stage.side.resource.allocate([f"{GPU}#0"])

    async def nothing_left_to_free() -> Room:
        await stage.node.delete_slice(SliceName(slice_of(first)), force=True)
        return Room(0, 0)

    monkeypatch.setattr(stage.watch, "make_room", nothing_left_to_free)
    second = stage.pod("b", allocation=f"{WHOLE};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    assert set(stage.slices()) == {slice_of(second)}


@pytest.mark.parametrize("looks", [3, None])
async def test_what_the_kubelet_still_has_of_a_deleted_pod_is_waited_for_a_while(looks: int | None) -> None:
    stage = await Stage.of()
    await stage.side.keep()
    first = stage.pod("a", allocation=f"{WHOLE};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    stage.api.delete_pod("default", "a")
    asked = 0

    async def held() -> Held:
        nonlocal asked
        asked += 1
        return Held() if asked == looks else Held(frozenset({("default", "a")}))

    stage.watch._held = held
    second = stage.pod("b", allocation=f"{WHOLE};")
    if looks:
        await stage.side.resource.allocate([f"{GPU}#0"])
        assert set(stage.slices()) == {slice_of(second)}
    else:
        with pytest.raises(NoRoom):
            await stage.side.resource.allocate([f"{GPU}#0"])
        assert set(stage.slices()) == {slice_of(first)}
        assert asked == ROOM_LOOKS
    await stage.close()


# ------------------------------------------------------------------------------------------- failures, step by step


def _always(fault: Fault) -> list[Fault]:
    return [fault] * 8


async def _gone(_: web.Request) -> web.Response:
    return web.Response(status=404, text="{}")


@pytest.mark.parametrize(
    ("method", "path", "faults", "error"),
    [
        ("PATCH", "pods/a", _always(failing(500)), HostFailure),
        ("PATCH", "pods/a", _always(failing(403)), HostFailure),
        ("PATCH", "pods/a", [failing(409)], AmdvgpuError),
    ],
)
async def test_a_patch_of_the_pod_that_fails_leaves_nothing_reserved_and_no_lock(
    stage: Stage, method: str, path: str, faults: list[Fault], error: type[Exception]
) -> None:
    stage.pod("a", allocation=f"{QUARTER};")
    stage.api.faults = [(method, path, fault) for fault in faults]
    with pytest.raises(error):
        await stage.side.resource.allocate([f"{GPU}#0"])
    assert (stage.slices(), stage.locked()) == ({}, None)


@pytest.mark.parametrize("step", ["commit", "write", "publish"])
async def test_a_plan_that_cannot_be_carried_out_leaves_nothing_reserved_and_no_lock(stage: Stage, step: str) -> None:
    pod = stage.pod("a", allocation=f"{QUARTER};")
    name = f"write {slice_of(pod)}" if step == "write" else step
    faults = {"commit": stage.journal.faults, "write": stage.files.faults}.get(step)
    (faults or stage.node._disk.cdi.faults).failing.add(name)  # type: ignore[attr-defined]
    with pytest.raises(HostFailure):
        await stage.side.resource.allocate([f"{GPU}#0"])
    assert (stage.slices(), stage.locked(), stage.notes("a")[hami.BIND_PHASE]) == ({}, None, hami.FAILED)


@pytest.mark.parametrize(("method", "path"), [("PATCH", "pods/a"), ("PATCH", "nodes/n1")])
async def test_a_call_that_is_cancelled_while_the_api_is_slow_is_undone(stage: Stage, method: str, path: str) -> None:
    stage.pod("a", allocation=f"{QUARTER};")
    reached = asyncio.Event()

    async def slow(_: web.Request) -> None:
        reached.set()
        await asyncio.sleep(0.2)

    stage.api.faults = [(method, path, slow)]
    await _cancelled(stage, reached)
    assert (stage.slices(), stage.locked(), stage.notes("a")[hami.BIND_PHASE]) == ({}, None, hami.FAILED)


async def test_a_call_that_is_cancelled_while_its_slice_is_made_is_undone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = stage.pod("a", allocation=f"{QUARTER};")
    reached, go_on = asyncio.Event(), threading.Event()
    loop, write = asyncio.get_running_loop(), stage.files.write

    def slow(item: Slice, inventory: Inventory) -> None:
        loop.call_soon_threadsafe(reached.set)
        go_on.wait(10)
        write(item, inventory)

    monkeypatch.setattr(stage.files, "write", slow)
    loop.call_later(0.05, go_on.set)
    await _cancelled(stage, reached)
    assert f"write {slice_of(pod)}" in stage.files.faults.done
    assert (stage.slices(), stage.locked(), stage.notes("a")[hami.BIND_PHASE]) == ({}, None, hami.FAILED)


class Dirty:
    """A former user's 4 GiB, on all GPUs, for so many looks; and the pauses between these, which end when they may."""

    def __init__(self, stage: Stage, monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
        self.looks = looks
        self.paused: list[float] = []
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()
        monkeypatch.setattr(stage.node._leftovers, "on", self._on)
        monkeypatch.setattr(stage.side.resource, "_pause", self._pause)

    def _on(self, places: Places, *_: object) -> dict[GpuId, str]:
        self.looks -= 1
        return left_on(places, "a former user's 4 GiB") if self.looks >= 0 else {}

    async def _pause(self, seconds: float) -> None:
        self.paused.append(seconds)
        self.reached.set()
        await self.go_on.wait()


async def test_a_whole_gpu_that_is_not_clean_yet_is_waited_for_and_nobody_else_has_to(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    dirty = Dirty(stage, monkeypatch, looks=3)
    pod = stage.pod("a", allocation=f"{WHOLE};")
    call = asyncio.create_task(stage.side.resource.allocate([f"{GPU}#0"]))
    await asyncio.wait_for(dirty.reached.wait(), 10)
    # The registration and its look at stuck locks, and what others ask of the node.
    await stage.side.keep()
    await stage.node.put_slice(Request(SliceName("alice"), Compute(cu_count=8), 1 << 30, on=(OTHER,)))
    assert (stage.locked() is not None, stage.notes("a")[hami.BIND_PHASE]) == (True, hami.ALLOCATING)
    dirty.go_on.set()
    await call
    assert dirty.paused == [1, 1, 1]
    assert set(stage.slices()) == {slice_of(pod), "alice"}
    assert (stage.locked(), stage.notes("a")[hami.BIND_PHASE]) == (None, hami.SUCCESS)


async def test_a_whole_gpu_that_does_not_get_clean_is_refused_and_the_next_pod_may_come(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    dirty = Dirty(stage, monkeypatch, looks=11)
    dirty.go_on.set()
    stage.pod("a", allocation=f"{WHOLE};")
    with pytest.raises(Lingering, match="a former user's 4 GiB"):
        await stage.side.resource.allocate([f"{GPU}#0"])
    assert dirty.paused == [1] * 10
    assert (stage.slices(), stage.locked(), stage.notes("a")[hami.BIND_PHASE]) == ({}, None, hami.FAILED)
    stage.pod("b", allocation=f"{WHOLE};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    assert stage.notes("b")[hami.BIND_PHASE] == hami.SUCCESS


async def test_a_call_that_is_cancelled_while_it_waits_for_a_clean_gpu_is_undone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    dirty = Dirty(stage, monkeypatch, looks=99)
    stage.pod("a", allocation=f"{WHOLE};")
    await _cancelled(stage, dirty.reached)
    assert (stage.slices(), stage.locked(), stage.notes("a")[hami.BIND_PHASE]) == ({}, None, hami.FAILED)


async def test_what_an_ended_pod_has_left_is_waited_for_too(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.pod("a", allocation=f"{WHOLE};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    stage.api.change_pod("default", "a", {"status": {"phase": "Succeeded"}})
    stage.watch.pods = {pod.metadata.uid: pod for pod in await stage.client.list_pods(HERE)}
    dirty = Dirty(stage, monkeypatch, looks=2)
    dirty.go_on.set()
    pod = stage.pod("b", allocation=f"{WHOLE};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    assert (dirty.paused, set(stage.slices())) == ([1, 1], {slice_of(pod)})


async def _cancelled(stage: Stage, reached: asyncio.Event) -> None:
    call = asyncio.create_task(stage.side.resource.allocate([f"{GPU}#0"]))
    await asyncio.wait_for(reached.wait(), 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.gather(*stage.side.resource._undoing, return_exceptions=True)


async def test_a_patch_whose_answer_is_lost_is_found_to_be_done(stage: Stage) -> None:
    pod = stage.pod("a", allocation=f"{QUARTER};")

    async def done_but_lost(request: web.Request) -> web.StreamResponse:
        await stage.api._one(request, stage.api.pods, ("default", "a"))
        return await failing(500)(request)  # type: ignore[return-value]

    stage.api.faults = [("PATCH", "pods/a", done_but_lost), *[("PATCH", "pods/a", failing(500))] * 3]
    await stage.side.resource.allocate([f"{GPU}#0"])
    assert (set(stage.slices()), stage.locked()) == ({slice_of(pod)}, None)


async def test_a_lock_that_could_not_be_released_is_released_later(stage: Stage) -> None:
    stage.pod("a", allocation=f"{QUARTER};")
    stage.api.faults = [("PATCH", "nodes/n1", failing(500))] * 40
    await stage.side.resource.allocate([f"{GPU}#0"])
    assert stage.locked() is not None
    stage.api.faults = []
    await stage.side.keep()
    assert stage.locked() is None


async def test_a_lock_that_names_another_live_pod_is_never_removed(stage: Stage) -> None:
    stage.pod("a", allocation=f"{QUARTER};")
    other = stage.scheduled("b", allocation=f"{HALF};")

    async def taken_meanwhile(_: web.Request) -> None:
        stage.lock(other)

    stage.api.faults = [("PATCH", "nodes/n1", taken_meanwhile)]  # between our read and our write
    await stage.side.resource.allocate([f"{GPU}#0"])
    assert (stage.locked() or "").endswith(",default,b")
    await stage.side.keep()
    assert stage.locked() is not None


@pytest.mark.parametrize(
    ("what", "left"),
    [
        ({"metadata": {"annotations": {hami.BIND_PHASE: hami.SUCCESS}}}, False),
        ({"metadata": {"annotations": {hami.BIND_PHASE: hami.FAILED}}}, False),
        ({"status": {"phase": "Failed"}}, False),
        ({}, True),
    ],
)
async def test_a_lock_that_a_crash_left_behind_is_released_when_its_pod_is_past_it(
    stage: Stage, what: dict[str, object], left: bool
) -> None:
    stage.pod("a", allocation=f"{QUARTER};")
    stage.api.change_pod("default", "a", what)
    await stage.side.keep()
    assert (stage.locked() is not None) == left


# --------------------------------------------------------------------------------------------------------- preference


async def test_the_kubelet_is_told_to_take_slots_of_the_gpus_that_the_scheduler_chose(stage: Stage) -> None:
    resource, view = stage.side.resource, stage.node.view()
    available = [device.id for device in resource.devices(view)]
    assert resource.prefer(view, available, [], 2) == [f"{GPU}#0", f"{OTHER}#0"]
    stage.pod("a", allocation=f"{HALF};")
    stage.watch.pods = {p.metadata.uid: p for p in await stage.client.list_pods(HERE)}
    assert resource.prefer(view, available, [], 1) == [f"{OTHER}#0"]
    assert resource.prefer(view, available, [f"{GPU}#7"], 2) == [f"{GPU}#7", f"{OTHER}#0"]
    assert resource.prefer(view, available[:10], [], 3) == [f"{GPU}#{i}" for i in range(3)]


@pytest.mark.parametrize(
    ("gpus", "allocation"),
    [(0, f"{OTHER},T,1,1:;"), (2, f"{OTHER},T,1,1:;"), (2, f"{OTHER},T,1,1:{GPU},T,1,1:;")],
    ids=["it asks for no GPU", "for more than its text has", "for more than the call"],
)
async def test_a_pod_that_this_cannot_be_for_steers_nobody(stage: Stage, gpus: int, allocation: str) -> None:
    stage.scheduled("spoiler", a_container("main", gpus), allocation=allocation)
    stage.scheduled("real", allocation=f"{QUARTER};")
    stage.watch.pods = {p.metadata.uid: p for p in await stage.client.list_pods(HERE)}
    available = [f"{OTHER}#0", f"{GPU}#0"]
    assert stage.side.resource.prefer(stage.node.view(), available, [], 1) == [f"{GPU}#0"]


async def test_the_pod_that_had_the_lock_at_the_last_look_steers_first(stage: Stage) -> None:
    stage.scheduled("older", allocation=f"{QUARTER};")
    stage.pod("younger", allocation=f"{HALF};")
    stage.watch.pods = {p.metadata.uid: p for p in await stage.client.list_pods(HERE)}
    available = [f"{GPU}#0", f"{OTHER}#0"]
    assert stage.side.resource.prefer(stage.node.view(), available, [], 1) == [f"{GPU}#0"]
    await stage.side.keep()
    assert stage.side.resource.prefer(stage.node.view(), available, [], 1) == [f"{OTHER}#0"]


async def test_a_gpu_without_a_known_numa_node_has_none_for_the_kubelet(stage: Stage) -> None:
    (partition,) = a_gpu(0).partitions
    stage.sysfs.inventory = Inventory((replace(a_gpu(0), partitions=(replace(partition, numa_node=None),)),))
    await stage.node.rescan()
    assert {d.numa_node for d in stage.side.resource.devices(stage.node.view())} == {None}


async def test_a_lock_that_cannot_be_looked_into_keeps_no_pods_cus_from_being_put_right(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.pod("a", allocation=f"{QUARTER};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    stage.api.change_pod("default", "a", {"metadata": {"annotations": {hami.CU_ALLOCATED: "nonsense"}}})
    stage.watch.pods = {p.metadata.uid: p for p in await stage.client.list_pods(HERE)}
    stage.lock(stage.api.pods["default", "a"])
    stage.api.faults = [("PATCH", "nodes/n1", failing(409))] * 40
    await stage.side.keep()
    assert json.loads(stage.notes("a")[hami.CU_ALLOCATED]) == {GPU: "0-71"}
    assert "Whether the node lock was left behind could not be settled" in caplog.text


# --------------------------------------------------------------------------------------------------- starts again


@pytest.mark.parametrize("mains", [0, 1], ids=["it alone asks for GPUs", "the one behind it does too"])
async def test_an_init_container_whose_slice_is_freed_does_not_start_again(stage: Stage, mains: int) -> None:
    text = f"{WHOLE};" * (1 + mains)
    pod = stage.pod("a", a_container("main", mains), init=[a_container("setup")], allocation=text)
    for _ in range(1 + mains):
        await stage.side.resource.allocate([f"{GPU}#0"])
    uid = pod["metadata"]["uid"]
    assert await stage.side.resource.again(["x"], uid, "setup") is not None
    ended = {"initContainerStatuses": [{"name": "setup", "state": {"terminated": {"exitCode": 0}}}]}
    stage.api.change_pod("default", "a", {"status": ended})
    stage.watch.pods = {p.metadata.uid: p for p in await stage.client.list_pods(HERE)}
    assert await stage.watch.release_ended(0) == 1
    with pytest.raises(NotFound, match="init container setup of default/a has no slice here, for what it had is freed"):
        await stage.side.resource.again(["x"], uid, "setup")
    main = await stage.side.resource.again(["x"], uid, "main")
    assert (main is not None) == bool(mains)


async def test_a_container_that_starts_again_has_its_own_slices_even_while_the_api_is_away(stage: Stage) -> None:
    text = f"{GPU},AMD-x,8192,76:;{OTHER},AMD-x,4096,304:;"
    pod = stage.pod("a", a_container("main"), a_container("side"), allocation=text)
    await stage.side.resource.allocate([f"{GPU}#0"])
    await stage.side.resource.allocate([f"{OTHER}#0"])
    uid = pod["metadata"]["uid"]
    await stage.api.stop()
    for number, name in enumerate(("main", "side")):
        grant = await stage.side.resource.again(["x"], uid, name)
        assert grant is not None
        assert grant.cdi_devices == (f"amdvgpu.io/slice={slice_of(pod, number)}",)
    assert await stage.side.resource.again(["x"], uid, "another") is None
    assert await stage.side.resource.again(["x"], "00000000-0000-4000-8000-000000000099", "main") is None
    stage.sysfs.inventory = replace(stage.sysfs.inventory, gpus=stage.sysfs.inventory.gpus[:1])
    await stage.node.rescan()
    with pytest.raises(Conflict, match=f"slice {slice_of(pod, 1)} is lost"):
        await stage.side.resource.again(["x"], uid, "side")
