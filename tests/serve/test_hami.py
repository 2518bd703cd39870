"""The node's side of HAMi, against an API server in memory."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from aiohttp import web

from amdvgpud.core import hami
from amdvgpud.core.errors import AmdvgpuError, Conflict, HostFailure, Invalid, NoRoom, NotFound
from amdvgpud.core.health import Condition, Health
from amdvgpud.core.model import Compute, ComputePolicy, GpuId, Inventory, Priority, Request, Slice, SliceName
from amdvgpud.serve.hami import GATE_IN_HAMI, HEARTBEAT_S, HamiSettings, withdraw
from amdvgpud.serve.resources import Grant, GrantMount
from tests.fakes import a_gpu
from tests.serve.cluster import GPU, HERE, OTHER, Cluster, a_container, slice_of
from tests.serve.fake_kubeapi import Fault, failing

QUARTER = f"{GPU},AMD Instinct MI300X,16384,76:"
HALF = f"{OTHER},AMD Instinct MI300X,32768,152:"
WHOLE = f"{GPU},AMD Instinct MI300X,196608,304:"


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    found = await Cluster.of()
    await found.side.keep()
    yield found
    await found.close()


# ----------------------------------------------------------------------------------------------------- registration


async def test_the_node_is_registered_and_written_again_whoever_changed_it(cluster: Cluster) -> None:
    wanted = cluster.api.annotations("node", HERE)[hami.REGISTRATION]
    assert [gpu["id"] for gpu in json.loads(wanted)] == [GPU, OTHER]
    for change in (None, "[]", "nonsense", wanted.replace('"health":true,', "")):
        cluster.api.change_node(HERE, {"metadata": {"annotations": {hami.REGISTRATION: change}}})
        await cluster.side.keep()
        assert cluster.api.annotations("node", HERE)[hami.REGISTRATION] == wanted


async def test_nothing_is_written_while_nothing_has_changed_but_a_sign_of_life(cluster: Cluster) -> None:
    before = cluster.api.asked.count("PATCH nodes")
    cluster.now_s += 30
    await cluster.side.keep()
    assert cluster.api.asked.count("PATCH nodes") == before
    assert cluster.api.annotations("node", HERE)[hami.REGISTERED_AT] == "1970-01-12T13:46:40Z"
    cluster.now_s += HEARTBEAT_S
    await cluster.side.keep()
    assert cluster.api.annotations("node", HERE)[hami.REGISTERED_AT] == "1970-01-12T13:52:10Z"


async def test_a_change_of_health_is_registered_at_once_and_told(cluster: Cluster) -> None:
    running = asyncio.create_task(cluster.side.run())
    await _until(lambda: "GET nodes" in cluster.api.asked)
    ill = Health(Condition.UNHEALTHY, "uncorrectable errors", "ras", 1.0)
    await cluster.node.set_health({GpuId(GPU): ill})
    await _until(lambda: _health(cluster) == [False, True])
    assert [d.healthy for d in cluster.side.resource.devices(cluster.node.view())] == [False] * 10 + [True] * 10
    await cluster.node.set_health({GpuId(GPU): Health()})
    await _until(lambda: _health(cluster) == [True, True])
    cluster.sysfs.inventory = Inventory((a_gpu(0),), generation_id=2)
    await cluster.node.rescan()
    await _until(lambda: _health(cluster) == [True, False])
    await _until(lambda: len(cluster.api.events) == 3)
    assert [(e["reason"], e["type"], e["message"]) for e in cluster.api.events] == [
        (hami.EVENT_UNHEALTHY, "Warning", f"{GPU}: uncorrectable errors"),
        (hami.EVENT_RECOVERED, "Normal", f"{GPU}: it works"),
        (hami.EVENT_MISSING, "Warning", f"{OTHER} is not there any more"),
    ]
    running.cancel()


def _health(cluster: Cluster) -> list[bool]:
    return [gpu.get("health", False) for gpu in json.loads(cluster.api.annotations("node", HERE)[hami.REGISTRATION])]


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


async def test_a_node_whose_gpus_have_all_gone_says_so_of_what_it_had_registered() -> None:
    cluster = await Cluster.of()
    await cluster.side.keep()
    after = await cluster.restarted()
    after.sysfs.inventory = Inventory()
    await after.node.rescan()
    await after.side.keep()
    assert [(g["id"], "health" in g) for g in json.loads(after.api.annotations("node", HERE)[hami.REGISTRATION])] == [
        (GPU, False),
        (OTHER, False),
    ]
    await cluster.close()


async def test_a_stop_for_good_leaves_the_gpus_registered_and_none_healthy(cluster: Cluster) -> None:
    await withdraw(cluster.client, HERE)
    assert _health(cluster) == [False, False]
    assert hami.REGISTERED_AT not in cluster.api.annotations("node", HERE)


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
    cluster = await Cluster.of(settings=settings)
    cluster.api.change_node(HERE, {"metadata": {"annotations": notes}})
    before = cluster.side.known.is_set()
    await cluster.side.keep()
    assert (before, cluster.side.known.is_set()) == (False, True)
    assert [(o.id, o.count) for o in cluster.side.offers(cluster.node.view())] == offered
    await cluster.close()


# --------------------------------------------------------------------------------------------------------- allocate


async def test_a_pod_gets_its_slice_and_all_books_say_so(cluster: Cluster) -> None:
    pod = cluster.pod("a", allocation=f"{QUARTER};")
    grant = await cluster.side.resource.allocate([f"{GPU}#0"])
    name = slice_of(pod)
    assert cluster.slices() == {name: [(f"{GPU}/0", 16384, 72)]}
    (lease,) = cluster.node.view().book.leases.values()
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
    notes = cluster.notes("a")
    assert (notes[hami.WAITING], notes[hami.ALLOCATED], notes[hami.BIND_PHASE]) == (";", f"{QUARTER};", hami.SUCCESS)
    assert json.loads(notes[hami.CU_ALLOCATED]) == {GPU: "0-71"}
    assert cluster.locked() is None


async def test_two_pods_share_a_gpu_with_disjoint_cus(cluster: Cluster) -> None:
    half = f"{GPU},T,16384,152:;"
    for name in ("a", "b"):
        cluster.pod(name, allocation=half)
        await cluster.side.resource.allocate([f"{GPU}#0"])
    sets = [hami.parse_cus(cluster.notes(name)[hami.CU_ALLOCATED])[GPU] for name in ("a", "b")]
    assert [len(cus) for cus in sets] == [152, 152]
    assert not sets[0].mask & sets[1].mask


async def test_a_whole_gpu_brings_neither_mask_nor_library(cluster: Cluster) -> None:
    cluster.pod("a", allocation=f"{WHOLE};")
    grant = await cluster.side.resource.allocate([f"{GPU}#3"])
    assert (grant.added_environment, grant.added_mounts) == ((), ())
    assert hami.CU_ALLOCATED not in cluster.notes("a")
    assert next(iter(cluster.node.view().book.slices.values())).request.compute.policy is ComputePolicy.WHOLE


async def test_gpus_with_different_quotas_are_told_in_full_and_not_by_name(cluster: Cluster) -> None:
    pod = cluster.pod("a", a_container("main", 2), allocation=f"{QUARTER}{HALF};")
    grant = await cluster.side.resource.allocate([f"{GPU}#0", f"{OTHER}#0"])
    assert set(cluster.slices()) == {slice_of(pod), f"{slice_of(pod)}.1"}
    assert grant.cdi_devices == ()
    assert dict(grant.environment)["ROCR_VISIBLE_DEVICES"] == f"{GPU},{OTHER}"
    assert dict(grant.environment)["HIP_DEVICE_MEMORY_LIMIT_1"] == "32768m"
    assert "HIP_DEVICE_MEMORY_LIMIT" not in dict(grant.environment)


@pytest.mark.parametrize(
    "allocation",
    [f";{QUARTER};{HALF};", f"{QUARTER};{HALF};", f";{QUARTER};{HALF};;"],
    ids=["placeholders", "none", "end"],
)
async def test_containers_get_what_is_theirs_in_both_shapes(cluster: Cluster, allocation: str) -> None:
    pod = cluster.pod(
        "a",
        a_container("first", priority=0),
        a_container("side", 0),
        a_container("second"),
        init=[a_container("setup", 0)],
        allocation=allocation,
    )
    first = await cluster.side.resource.allocate([f"{GPU}#0"])
    assert cluster.locked() is not None
    assert cluster.notes("a")[hami.BIND_PHASE] == hami.ALLOCATING
    second = await cluster.side.resource.allocate([f"{OTHER}#0"])
    assert cluster.slices() == {
        slice_of(pod, 0): [(f"{GPU}/0", 16384, 72)],
        slice_of(pod, 1): [(f"{OTHER}/0", 32768, 152)],
    }
    assert [dict(g.added_environment).get("AMD_TASK_PRIORITY") for g in (first, second)] == ["0", None]
    book = cluster.node.view().book
    assert [book.slices[SliceName(slice_of(pod, i))].request.priority for i in (0, 1)] == [
        Priority.HIGH,
        Priority.NORMAL,
    ]
    holders = {lease.slice: lease.holder.text for lease in book.leases.values()}
    assert holders == {slice_of(pod, 0): "default/a/first", slice_of(pod, 1): "default/a/second"}
    assert (cluster.locked(), cluster.notes("a")[hami.BIND_PHASE]) == (None, hami.SUCCESS)
    assert len(hami.parse_allocation(cluster.notes("a")[hami.WAITING])) == len(hami.parse_allocation(allocation))
    assert set(json.loads(cluster.notes("a")[hami.CU_ALLOCATED])) == {GPU, OTHER}


async def test_the_pod_that_the_lock_names_is_served_whatever_order_the_kubelet_asks_in(cluster: Cluster) -> None:
    cluster.scheduled("older", allocation=f"{HALF};")
    cluster.pod("younger", allocation=f"{QUARTER};")
    await cluster.side.resource.allocate([f"{OTHER}#0"])
    assert cluster.notes("younger")[hami.BIND_PHASE] == hami.SUCCESS
    assert cluster.notes("older")[hami.BIND_PHASE] == hami.ALLOCATING


async def test_without_a_lock_the_oldest_binding_that_fits_the_call_is_served(cluster: Cluster) -> None:
    cluster.scheduled("two", a_container("main", 2), allocation=f"{QUARTER}{HALF};")
    cluster.scheduled("one", allocation=f"{HALF};")
    cluster.scheduled("later", allocation=f"{QUARTER};")
    await cluster.side.resource.allocate([f"{OTHER}#0"])
    assert cluster.notes("one")[hami.BIND_PHASE] == hami.SUCCESS


@pytest.mark.parametrize(
    "notes",
    [
        {hami.BIND_TIME: None},
        {hami.BIND_PHASE: hami.SUCCESS},
        {hami.ASSIGNED_NODE: "n2"},
        {hami.ALLOCATED: f"{HALF};"},
        {hami.WAITING: "nonsense"},
        {hami.WAITING: f"{QUARTER}{HALF};", hami.ALLOCATED: f"{QUARTER}{HALF};"},
    ],
)
async def test_without_a_lock_a_pod_whose_text_is_not_the_schedulers_is_not_served(
    cluster: Cluster, notes: dict[str, str | None]
) -> None:
    cluster.scheduled("a", allocation=f"{QUARTER};", notes=notes)
    with pytest.raises(NotFound, match="no binding pod found on node n1"):
        await cluster.side.resource.allocate([f"{GPU}#0"])
    assert cluster.slices() == {}


async def test_a_lock_of_a_pod_that_is_gone_is_released_and_the_pod_that_waits_is_served(cluster: Cluster) -> None:
    cluster.lock({"metadata": {"namespace": "default", "name": "gone"}})
    cluster.scheduled("a", allocation=f"{QUARTER};")
    await cluster.side.resource.allocate([f"{GPU}#0"])
    assert (cluster.locked(), cluster.notes("a")[hami.BIND_PHASE]) == (None, hami.SUCCESS)


@pytest.mark.parametrize("text", ["2026-01-01T00:00:00Z"])
async def test_a_lock_of_the_old_form_names_nobody_and_is_left_alone(cluster: Cluster, text: str) -> None:
    cluster.scheduled("a", allocation=f"{QUARTER};")
    cluster.api.change_node(HERE, {"metadata": {"annotations": {hami.LOCK: text}}})
    await cluster.side.resource.allocate([f"{GPU}#0"])
    assert (cluster.locked(), cluster.notes("a")[hami.BIND_PHASE]) == (text, hami.SUCCESS)


# -------------------------------------------------------------------------------------------------------- asked again


async def test_a_call_that_comes_twice_gives_the_same_slice_and_takes_nothing_more(cluster: Cluster) -> None:
    cluster.pod("a", allocation=f"{QUARTER};")
    first = await cluster.side.resource.allocate([f"{GPU}#0"])
    before = cluster.slices()
    assert await cluster.side.resource.allocate([f"{GPU}#0"]) == first
    after = await cluster.restarted()
    await after.side.keep()
    assert await after.side.resource.allocate([f"{GPU}#0"]) == first
    assert after.slices() == before


async def test_a_call_that_comes_twice_between_two_containers_does_not_take_the_seconds(cluster: Cluster) -> None:
    pod = cluster.pod("a", a_container("x"), a_container("y"), allocation=f"{QUARTER};{HALF};")
    first = await cluster.side.resource.allocate([f"{GPU}#0"])
    assert await cluster.side.resource.allocate([f"{GPU}#0"]) == first
    assert set(cluster.slices()) == {slice_of(pod, 0)}
    await cluster.side.resource.allocate([f"{GPU}#1"])
    assert set(cluster.slices()) == {slice_of(pod, 0), slice_of(pod, 1)}


@pytest.mark.parametrize(("restart", "served"), [("", 2), ("Always", 1)])
async def test_devices_of_an_init_container_that_ends_serve_the_next_container(
    cluster: Cluster, restart: str, served: int
) -> None:
    cluster.pod("a", a_container("main"), init=[a_container("setup", restart=restart)], allocation=f"{QUARTER};{HALF};")
    for _ in range(2):
        await cluster.side.resource.allocate([f"{GPU}#0"])
    assert len(cluster.slices()) == served


async def test_ids_of_a_pod_that_ended_serve_the_pod_that_the_lock_names(cluster: Cluster) -> None:
    cluster.pod("a", allocation=f"{QUARTER};")
    await cluster.side.resource.allocate([f"{GPU}#0"])
    cluster.api.change_pod("default", "a", {"status": {"phase": "Succeeded"}})
    second = cluster.pod("b", allocation=f"{HALF};")
    await cluster.side.resource.allocate([f"{GPU}#0"])
    assert slice_of(second) in cluster.slices()
    cluster.api.delete_pod("default", "b")
    with pytest.raises(NotFound, match="no binding pod"):
        await cluster.side.resource.allocate([f"{GPU}#0"])


async def test_a_crash_between_the_grant_and_the_patch_leaves_nothing_behind_that_hinders(cluster: Cluster) -> None:
    cluster.pod("a", allocation=f"{QUARTER};")
    name = SliceName(slice_of(cluster.api.pods["default", "a"]))
    # What a daemon that died there has in its Book: the very slice, or one of an older allocation.
    for cus in (76, 8):
        request = Request(name, Compute(ComputePolicy.EXACT, cu_count=cus), 16384 << 20, on=(f"{GPU}/0",))
        await cluster.node.put_slice(request)
        await cluster.side.resource.allocate([f"{GPU}#0"])
        assert cluster.slices() == {name: [(f"{GPU}/0", 16384, 72)]}
        await cluster.node.delete_slice(name, force=True)
        cluster.api.delete_pod("default", "a")
        cluster.uids -= 1
        cluster.pod("a", allocation=f"{QUARTER};")


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
    cluster: Cluster, allocation: str, error: type[Exception], why: str
) -> None:
    cluster.pod("a", allocation=allocation)
    with pytest.raises(error, match=why):
        await cluster.side.resource.allocate([f"{GPU}#0"])
    assert (cluster.locked(), cluster.slices(), cluster.notes("a")[hami.BIND_PHASE]) == (None, {}, hami.FAILED)
    cluster.pod("b", allocation=f"{QUARTER};")
    await cluster.side.resource.allocate([f"{GPU}#0"])
    assert cluster.notes("b")[hami.BIND_PHASE] == hami.SUCCESS


async def test_a_pod_of_another_node_is_refused(cluster: Cluster) -> None:
    cluster.pod("a", allocation=f"{QUARTER};", notes={hami.ASSIGNED_NODE: "n2"})
    with pytest.raises(Invalid, match="default/a was assigned to node 'n2', and this is 'n1'"):
        await cluster.side.resource.allocate([f"{GPU}#0"])
    assert cluster.locked() is None


async def test_what_was_promised_to_others_is_never_overlapped_whatever_a_pod_says(cluster: Cluster) -> None:
    await cluster.node.put_slice(
        Request(SliceName("alice"), Compute(ComputePolicy.EXACT, cu_count=288), 100 << 30, on=(GPU,))
    )
    cluster.pod("a", allocation=f"{QUARTER};", notes={hami.CU_ALLOCATED: json.dumps({GPU: "0-303"})})
    with pytest.raises(NoRoom, match=r"wanted 16 GiB and 76 CUs on .* has 92 GiB and 16 CUs"):
        await cluster.side.resource.allocate([f"{GPU}#0"])
    assert (set(cluster.slices()), cluster.locked()) == ({"alice"}, None)


async def test_the_second_container_that_fails_takes_the_firsts_with_it(cluster: Cluster) -> None:
    cluster.pod("a", a_container("x"), a_container("y"), allocation=f"{QUARTER};nowhere,T,1,1:;")
    await cluster.side.resource.allocate([f"{GPU}#0"])
    with pytest.raises(NotFound):
        await cluster.side.resource.allocate([f"{OTHER}#0"])
    assert (cluster.slices(), cluster.locked()) == ({}, None)


async def test_a_pod_that_ended_makes_room_at_once_for_the_one_that_the_scheduler_sent_in_its_place(
    cluster: Cluster,
) -> None:
    cluster.pod("a", allocation=f"{WHOLE};")
    await cluster.side.resource.allocate([f"{GPU}#0"])
    cluster.api.change_pod("default", "a", {"status": {"phase": "Succeeded"}})
    second = cluster.pod("b", allocation=f"{WHOLE};")
    await cluster.side.resource.allocate([f"{GPU}#0"])
    assert set(cluster.slices()) == {slice_of(second)}


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
    cluster: Cluster, method: str, path: str, faults: list[Fault], error: type[Exception]
) -> None:
    cluster.pod("a", allocation=f"{QUARTER};")
    cluster.api.faults = [(method, path, fault) for fault in faults]
    with pytest.raises(error):
        await cluster.side.resource.allocate([f"{GPU}#0"])
    assert (cluster.slices(), cluster.locked()) == ({}, None)


@pytest.mark.parametrize("step", ["commit", "write", "publish"])
async def test_a_plan_that_cannot_be_carried_out_leaves_nothing_reserved_and_no_lock(
    cluster: Cluster, step: str
) -> None:
    pod = cluster.pod("a", allocation=f"{QUARTER};")
    name = f"write {slice_of(pod)}" if step == "write" else step
    faults = {"commit": cluster.journal.faults, "write": cluster.files.faults}.get(step)
    (faults or cluster.node._cdi.faults).failing.add(name)  # type: ignore[attr-defined]
    with pytest.raises(HostFailure):
        await cluster.side.resource.allocate([f"{GPU}#0"])
    assert (cluster.slices(), cluster.locked(), cluster.notes("a")[hami.BIND_PHASE]) == ({}, None, hami.FAILED)


@pytest.mark.parametrize(("method", "path"), [("PATCH", "pods/a"), ("PATCH", "nodes/n1")])
async def test_a_call_that_is_cancelled_while_the_api_is_slow_is_undone(
    cluster: Cluster, method: str, path: str
) -> None:
    cluster.pod("a", allocation=f"{QUARTER};")
    reached = asyncio.Event()

    async def slow(_: web.Request) -> None:
        reached.set()
        await asyncio.sleep(0.2)

    cluster.api.faults = [(method, path, slow)]
    await _cancelled(cluster, reached)
    assert (cluster.slices(), cluster.locked(), cluster.notes("a")[hami.BIND_PHASE]) == ({}, None, hami.FAILED)


async def test_a_call_that_is_cancelled_while_its_slice_is_made_is_undone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = cluster.pod("a", allocation=f"{QUARTER};")
    reached, go_on = asyncio.Event(), threading.Event()
    loop, write = asyncio.get_running_loop(), cluster.files.write

    def slow(item: Slice, inventory: Inventory) -> None:
        loop.call_soon_threadsafe(reached.set)
        go_on.wait(10)
        write(item, inventory)

    monkeypatch.setattr(cluster.files, "write", slow)
    loop.call_later(0.05, go_on.set)
    await _cancelled(cluster, reached)
    assert f"write {slice_of(pod)}" in cluster.files.faults.done
    assert (cluster.slices(), cluster.locked(), cluster.notes("a")[hami.BIND_PHASE]) == ({}, None, hami.FAILED)


async def _cancelled(cluster: Cluster, reached: asyncio.Event) -> None:
    call = asyncio.create_task(cluster.side.resource.allocate([f"{GPU}#0"]))
    await reached.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.gather(*cluster.side.resource._undoing, return_exceptions=True)


async def test_a_patch_whose_answer_is_lost_is_found_to_be_done(cluster: Cluster) -> None:
    pod = cluster.pod("a", allocation=f"{QUARTER};")

    async def done_but_lost(request: web.Request) -> web.StreamResponse:
        await cluster.api._one(request, cluster.api.pods, ("default", "a"))
        return await failing(500)(request)  # type: ignore[return-value]

    cluster.api.faults = [("PATCH", "pods/a", done_but_lost), *[("PATCH", "pods/a", failing(500))] * 3]
    await cluster.side.resource.allocate([f"{GPU}#0"])
    assert (set(cluster.slices()), cluster.locked()) == ({slice_of(pod)}, None)


async def test_a_lock_that_could_not_be_released_is_released_later(cluster: Cluster) -> None:
    cluster.pod("a", allocation=f"{QUARTER};")
    cluster.api.faults = [("PATCH", "nodes/n1", failing(500))] * 40
    await cluster.side.resource.allocate([f"{GPU}#0"])
    assert cluster.locked() is not None
    cluster.api.faults = []
    await cluster.side.keep()
    assert cluster.locked() is None


async def test_a_lock_that_names_another_live_pod_is_never_removed(cluster: Cluster) -> None:
    cluster.pod("a", allocation=f"{QUARTER};")
    other = cluster.scheduled("b", allocation=f"{HALF};")

    async def taken_meanwhile(_: web.Request) -> None:
        cluster.lock(other)

    cluster.api.faults = [("PATCH", "nodes/n1", taken_meanwhile)]  # between our read and our write
    await cluster.side.resource.allocate([f"{GPU}#0"])
    assert (cluster.locked() or "").endswith(",default,b")
    await cluster.side.keep()
    assert cluster.locked() is not None


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
    cluster: Cluster, what: dict[str, object], left: bool
) -> None:
    cluster.pod("a", allocation=f"{QUARTER};")
    cluster.api.change_pod("default", "a", what)
    await cluster.side.keep()
    assert (cluster.locked() is not None) == left


# --------------------------------------------------------------------------------------------------------- preference


async def test_the_kubelet_is_told_to_take_slots_of_the_gpus_that_the_scheduler_chose(cluster: Cluster) -> None:
    resource, view = cluster.side.resource, cluster.node.view()
    available = [device.id for device in resource.devices(view)]
    assert resource.prefer(view, available, [], 2) == [f"{GPU}#0", f"{OTHER}#0"]
    cluster.pod("a", allocation=f"{HALF};")
    cluster.watch.pods = {p.metadata.uid: p for p in await cluster.client.list_pods(HERE)}
    assert resource.prefer(view, available, [], 1) == [f"{OTHER}#0"]
    assert resource.prefer(view, available, [f"{GPU}#7"], 2) == [f"{GPU}#7", f"{OTHER}#0"]
    assert resource.prefer(view, available[:10], [], 3) == [f"{GPU}#{i}" for i in range(3)]


async def test_a_gpu_without_a_known_numa_node_has_none_for_the_kubelet(cluster: Cluster) -> None:
    (partition,) = a_gpu(0).partitions
    cluster.sysfs.inventory = Inventory((replace(a_gpu(0), partitions=(replace(partition, numa_node=None),)),))
    await cluster.node.rescan()
    assert {d.numa_node for d in cluster.side.resource.devices(cluster.node.view())} == {None}
