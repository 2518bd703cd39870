"""Slices of pods that ended, and how they come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from amdvgpud.core import hami
from amdvgpud.core.errors import Conflict, HostFailure
from amdvgpud.core.model import Compute, ComputePolicy, GpuId, Request, SliceName
from amdvgpud.ports import KfdUser
from amdvgpud.serve.kube.api import Changed
from amdvgpud.serve.kube.pods import SAID_S
from tests.serve.kube.fake_kubeapi import Json, failing
from tests.serve.kube.stage import GPU, HERE, OTHER, Stage, a_container, slice_of

QUARTER = f"{GPU},T,16384,76:;"


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    found = await Stage.of()
    await found.side.keep()
    yield found
    await found.close()


async def served(stage: Stage, name: str, allocation: str = QUARTER) -> Json:
    pod = stage.pod(name, allocation=allocation)
    await stage.side.resource.allocate([f"{GPU}#0"])
    stage.api.change_pod("default", name, {"status": {"phase": "Running"}})
    await seen(stage)
    return pod


async def seen(stage: Stage) -> None:
    stage.watch.pods = {pod.metadata.uid: pod for pod in await stage.client.list_pods(HERE)}


def end(stage: Stage, how: str, name: str = "a") -> None:
    if how == "deleted":
        stage.api.delete_pod("default", name)
    else:
        stage.api.change_pod("default", name, {"status": {"phase": how}})


@pytest.mark.parametrize("how", ["Succeeded", "Failed", "deleted"])
async def test_a_pod_that_is_over_gives_its_slice_back_after_a_grace(stage: Stage, how: str) -> None:
    await served(stage, "a")
    end(stage, how)
    await seen(stage)
    assert [await stage.watch.release_ended(5), len(stage.slices())] == [0, 1]
    stage.now_s += 4
    assert await stage.watch.release_ended(5) == 0
    stage.now_s += 1
    assert [await stage.watch.release_ended(5), stage.slices()] == [1, {}]
    assert stage.node.view().book.leases == {}


@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown"])
async def test_a_pod_that_is_not_over_keeps_its_slice(stage: Stage, phase: str) -> None:
    await served(stage, "a")
    end(stage, phase)
    await seen(stage)
    assert [await stage.watch.release_ended(0), len(stage.slices())] == [0, 1]


async def test_a_watch_that_is_behind_releases_nothing_that_the_api_still_has(stage: Stage) -> None:
    await served(stage, "a")
    stage.watch.pods = {}
    assert [await stage.watch.release_ended(0), len(stage.slices())] == [0, 1]


async def test_a_pod_that_the_api_called_over_is_so_whatever_an_older_watch_still_tells(stage: Stage) -> None:
    """Without its slice it would pass for a stranger on its GPU."""
    pod = await served(stage, "a")
    running = stage.watch.pods[pod["metadata"]["uid"]]
    end(stage, "Succeeded")
    assert await stage.watch.make_room() == (1, 0)
    told: asyncio.Queue[Changed] = asyncio.Queue()
    stage.client.watch_pods = lambda node: queued(told)  # type: ignore[method-assign]
    following = asyncio.create_task(stage.watch.run())
    told.put_nowait(Changed(running, deleted=False))
    await told.join()
    assert all(offer.health for offer in stage.side.offers(stage.node.view()))
    told.put_nowait(Changed(running, deleted=True))
    await told.join()
    assert (stage.watch.pods, stage.watch._final) == ({}, set())
    following.cancel()


async def test_a_pod_that_had_ended_before_it_was_deleted_is_over_whatever_the_kubelet_still_lists(
    stage: Stage,
) -> None:
    pod = await served(stage, "a")
    stage.held = {("default", "a")}
    end(stage, "Succeeded")
    (ended,) = await stage.client.list_pods(HERE)
    end(stage, "deleted")
    told: asyncio.Queue[Changed] = asyncio.Queue()
    stage.client.watch_pods = lambda node: queued(told)  # type: ignore[method-assign]
    following = asyncio.create_task(stage.watch.run())
    told.put_nowait(Changed(ended, deleted=False))
    told.put_nowait(Changed(ended, deleted=True))
    await told.join()
    assert await stage.watch.make_room() == (1, 0)
    assert slice_of(pod) not in stage.slices()
    await stage.watch.release_ended(0)
    assert stage.watch._ended == set()
    following.cancel()


@pytest.mark.parametrize(
    ("states", "freed"),
    [
        ([{"terminated": {"exitCode": 137}}, {"running": {}}], 0),
        ([{"terminated": {"exitCode": 137}}, {"waiting": {"reason": "ContainerCreating"}}], 0),
        ([{"terminated": {"exitCode": 137}}, {"terminated": {"exitCode": 0}}], 1),
    ],
)
async def test_of_a_pod_that_was_called_failed_while_its_containers_ran_the_kubelet_is_asked(
    stage: Stage, states: list[Json], freed: int
) -> None:
    """As the control plane calls those of a Node object that is gone, and deletes them by force."""
    await served(stage, "a")
    stage.held = {("default", "a")}
    init, main = ([{"name": name, "state": state}] for name, state in zip(("init", "main"), states, strict=True))
    stage.api.change_pod("default", "a", {"status": {"initContainerStatuses": init, "containerStatuses": main}})
    end(stage, "Failed")
    (failed,) = await stage.client.list_pods(HERE)
    end(stage, "deleted")
    told: asyncio.Queue[Changed] = asyncio.Queue()
    stage.client.watch_pods = lambda node: queued(told)  # type: ignore[method-assign]
    following = asyncio.create_task(stage.watch.run())
    told.put_nowait(Changed(failed, deleted=False))
    told.put_nowait(Changed(failed, deleted=True))
    await told.join()
    assert await stage.watch.make_room() == (freed, 1 - freed)
    following.cancel()


async def queued(told: asyncio.Queue[Changed]) -> AsyncIterator[Changed]:
    while True:
        yield await told.get()
        told.task_done()


async def test_while_the_api_is_away_nothing_is_released(stage: Stage) -> None:
    await served(stage, "a")
    stage.watch.pods = {}
    stage.api.faults = [("LIST", "pods", failing(503))] * 4
    with pytest.raises(HostFailure):
        await stage.watch.release_ended(0)
    assert len(stage.slices()) == 1


async def test_while_processes_run_in_it_a_slice_stays_and_that_is_said_once(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    pod = await served(stage, "a")
    stage.files.run_a_process_in(SliceName(slice_of(pod)))
    end(stage, "deleted")
    await seen(stage)
    for _ in range(3):
        assert await stage.watch.release_ended(0) == 0
        stage.now_s += SAID_S
    assert [record.getMessage() for record in caplog.records if "stay" in record.getMessage()] == [
        f"Pod {pod['metadata']['uid']} is over, but {slice_of(pod)} stay(s): processes run in {slice_of(pod)}."
    ]
    stage.files.dead_bytes[SliceName(slice_of(pod))] = 1  # they have ended; the node's look finds it
    assert await stage.watch.release_ended(0) == 1


async def test_while_the_kubelet_has_a_deleted_pod_its_slice_stays(stage: Stage) -> None:
    await served(stage, "a")
    stage.held = {("default", "a")}
    end(stage, "deleted")
    await seen(stage)
    assert await stage.watch.release_ended(0) == 0
    stage.held = set()
    assert await stage.watch.release_ended(0) == 1


async def test_while_the_kubelet_remembers_a_pod_that_was_deleted_by_force_its_slice_stays(stage: Stage) -> None:
    pod = await served(stage, "a")
    stage.remembered = {pod["metadata"]["uid"]}
    end(stage, "deleted")
    await served(stage, "a")  # another under its name, which the kubelet has too
    stage.held = {("default", "a")}
    await seen(stage)
    assert [await stage.watch.release_ended(0), len(stage.slices())] == [0, 2]
    stage.remembered = set()
    assert [await stage.watch.release_ended(0), len(stage.slices())] == [1, 1]


async def test_a_whole_gpu_of_a_deleted_pod_stays_while_somebody_has_it_open(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    pod = await served(stage, "a", f"{GPU},T,196608,304:;")
    (partition,) = stage.sysfs.inventory.gpus[0].partitions
    user = KfdUser(4711, "python3", frozenset({partition.kfd_gpu_id}))
    stage.modes.opened[GpuId(GPU)] = (user,)
    end(stage, "deleted")
    await seen(stage)
    for _ in range(2):
        assert [await stage.watch.release_ended(5), set(stage.slices())] == [0, {slice_of(pod)}]
        stage.now_s += SAID_S
    assert "its partition is open in 4711" in caplog.text
    stage.modes.opened.clear()
    assert [await stage.watch.release_ended(5), stage.slices()] == [1, {}]


async def test_the_kubelets_word_about_a_pod_that_came_again_is_not_about_the_first(stage: Stage) -> None:
    first = await served(stage, "a")
    end(stage, "deleted")
    second = await served(stage, "a")
    stage.held = {("default", "a")}
    await seen(stage)
    assert await stage.watch.release_ended(0) == 1
    assert (slice_of(first) in stage.slices(), slice_of(second) in stage.slices()) == (False, True)


async def test_a_pod_whose_containers_ended_frees_its_slice_whatever_the_kubelet_still_lists(stage: Stage) -> None:
    await served(stage, "a")
    stage.held = {("default", "a")}
    end(stage, "Succeeded")
    await seen(stage)
    assert await stage.watch.release_ended(0) == 1


ENDED = {"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
SETUP = f"{GPU},T,90000,144:"


async def with_init(stage: Stage, restart: str = "") -> tuple[str, str]:
    """The slices of an init container and of the container behind it."""
    pod = stage.pod(
        "a", a_container("main"), init=[a_container("setup", restart=restart)], allocation=f"{SETUP};{QUARTER}"
    )
    for slot in range(2):
        await stage.side.resource.allocate([f"{GPU}#{slot}"])
    await seen(stage)
    return slice_of(pod, 0), slice_of(pod, 1)


def init_is(stage: Stage, state: Json) -> None:
    stage.api.change_pod("default", "a", {"status": {"initContainerStatuses": [{"name": "setup", **state}]}})


async def test_what_an_init_container_had_is_free_as_soon_as_it_has_succeeded(stage: Stage) -> None:
    _, main = await with_init(stage)
    init_is(stage, ENDED)
    await seen(stage)
    assert [await stage.watch.release_ended(5), set(stage.slices())] == [1, {main}]
    assert {lease.slice for lease in stage.node.view().book.leases.values()} == {main}
    assert [await stage.watch.release_ended(5), set(stage.slices())] == [0, {main}]


async def test_a_pod_that_the_scheduler_sent_where_an_init_container_has_ended_finds_room(stage: Stage) -> None:
    _, main = await with_init(stage)
    init_is(stage, ENDED)
    await seen(stage)
    after = stage.pod("b", allocation=f"{GPU},T,180000,160:;")
    await stage.side.resource.allocate([f"{GPU}#2"])
    assert set(stage.slices()) == {main, slice_of(after)}


async def test_a_pod_of_which_only_the_init_container_had_a_gpu_is_no_stranger_there_afterwards(stage: Stage) -> None:
    stage.pod("a", a_container("main", 0), init=[a_container("setup")], allocation=f"{SETUP};")
    await stage.side.resource.allocate([f"{GPU}#0"])
    init_is(stage, ENDED)
    stage.api.change_pod("default", "a", {"status": {"phase": "Running"}})
    await seen(stage)
    assert [await stage.watch.release_ended(5), stage.slices()] == [1, {}]
    assert all(offer.health for offer in stage.side.offers(stage.node.view()))


@pytest.mark.parametrize(
    ("state", "restart", "running"),
    [
        ({"state": {"running": {}}}, "", False),
        ({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 3}, "", False),
        ({"state": {"terminated": {"exitCode": 1}}}, "", False),
        (ENDED, "Always", False),
        (ENDED, "", True),
    ],
    ids=["runs", "will run again", "has failed", "a sidecar", "its processes remain"],
)
async def test_an_init_container_that_may_still_use_its_slice_keeps_it(
    stage: Stage, state: Json, restart: str, running: bool
) -> None:
    setup, main = await with_init(stage, restart)
    init_is(stage, state)
    await seen(stage)
    if running:
        stage.files.run_a_process_in(SliceName(setup))
    assert [await stage.watch.release_ended(0), set(stage.slices())] == [0, {setup, main}]


async def test_slices_of_others_are_nobodys_business_here(stage: Stage) -> None:
    await stage.node.put_slice(Request(SliceName("alice"), Compute(ComputePolicy.BALANCED, percent=25), 1 << 30))
    assert [await stage.watch.release_ended(0), set(stage.slices())] == [0, {"alice"}]


async def test_a_daemon_that_starts_again_finds_what_ended_meanwhile_and_keeps_the_rest(stage: Stage) -> None:
    await served(stage, "a")
    rest = await served(stage, "b")
    end(stage, "deleted")
    after = await stage.restarted()
    await after.side.keep()
    running = asyncio.create_task(after.watch.run())
    async with asyncio.timeout(10):
        while len(after.watch.pods) != 1:
            await asyncio.sleep(0.005)
    assert await after.watch.release_ended(0) == 1
    assert set(after.slices()) == {slice_of(rest)}
    running.cancel()


async def test_of_a_gpu_with_a_pod_that_was_served_before_this_book_nothing_is_given(stage: Stage) -> None:
    stage.scheduled("old", allocation=QUARTER)
    stage.api.change_pod("default", "old", {"status": {"phase": "Running"}})
    stage.scheduled(
        "without", a_container("main", 0), allocation=f"{OTHER},T,1,1:;"
    )  # asks for nothing: says what it likes
    stage.api.change_pod("default", "without", {"status": {"phase": "Running"}})
    await seen(stage)
    await stage.side.keep()
    text = stage.api.annotations("node", HERE)[hami.REGISTRATION]
    assert ["health" in gpu for gpu in hami.parse_registration(text)] == [False, True]
    stage.pod("new", allocation=QUARTER)
    with pytest.raises(Conflict, match=f"default/old runs on {GPU} and has no slice here"):
        await stage.side.resource.allocate([f"{GPU}#0"])
    end(stage, "deleted", "old")
    await seen(stage)
    await served(stage, "newer")
    assert len(stage.slices()) == 1


async def test_two_hundred_pods_come_and_go_and_nothing_is_left(stage: Stage) -> None:
    running = asyncio.create_task(stage.watch.run())
    alive: list[str] = []
    for number in range(200):
        name = f"p{number}"
        pod = stage.pod(name, allocation=f"{GPU},T,8192,24:;")
        await stage.side.resource.allocate([f"{GPU}#{number % 10}"])
        assert stage.locked() is None
        assert slice_of(pod) in stage.slices()
        alive.append(name)
        if len(alive) == 10:  # as many as the scheduler lets share a GPU
            for _ in range(1 + number % 7):
                end(stage, ("Succeeded", "Failed", "deleted")[number % 3], alive.pop(number % len(alive)))
    for name in alive:
        end(stage, "deleted", name)
    async with asyncio.timeout(10):
        while any(not pod.ended for pod in stage.watch.pods.values()):
            await asyncio.sleep(0.005)
    stage.now_s += 10
    await stage.watch.release_ended(0)
    assert (stage.slices(), stage.node.view().book.leases, stage.locked()) == ({}, {}, None)
    assert stage.files.names() == frozenset()
    notes = [pod["metadata"]["annotations"] for pod in stage.api.pods.values()]
    assert {each[hami.BIND_PHASE] for each in notes} == {hami.SUCCESS}
    running.cancel()
