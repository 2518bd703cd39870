"""Slices of pods that ended, and how they come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from amdvgpud.core import hami
from amdvgpud.core.errors import HostFailure
from amdvgpud.core.model import Compute, ComputePolicy, Request, SliceName
from amdvgpud.serve.pods import SAID_S
from tests.serve.cluster import GPU, HERE, Cluster, slice_of
from tests.serve.fake_kubeapi import Json, failing

QUARTER = f"{GPU},T,16384,76:;"


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    found = await Cluster.of()
    await found.side.keep()
    yield found
    await found.close()


async def served(cluster: Cluster, name: str, allocation: str = QUARTER) -> Json:
    pod = cluster.pod(name, allocation=allocation)
    await cluster.side.resource.allocate([f"{GPU}#0"])
    cluster.api.change_pod("default", name, {"status": {"phase": "Running"}})
    await seen(cluster)
    return pod


async def seen(cluster: Cluster) -> None:
    cluster.watch.pods = {pod.metadata.uid: pod for pod in await cluster.client.list_pods(HERE)}


def end(cluster: Cluster, how: str, name: str = "a") -> None:
    if how == "deleted":
        cluster.api.delete_pod("default", name)
    else:
        cluster.api.change_pod("default", name, {"status": {"phase": how}})


@pytest.mark.parametrize("how", ["Succeeded", "Failed", "deleted"])
async def test_a_pod_that_is_over_gives_its_slice_back_after_a_grace(cluster: Cluster, how: str) -> None:
    await served(cluster, "a")
    end(cluster, how)
    await seen(cluster)
    assert [await cluster.watch.release_ended(5), len(cluster.slices())] == [0, 1]
    cluster.now_s += 4
    assert await cluster.watch.release_ended(5) == 0
    cluster.now_s += 1
    assert [await cluster.watch.release_ended(5), cluster.slices()] == [1, {}]
    assert cluster.node.view().book.leases == {}


@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown"])
async def test_a_pod_that_is_not_over_keeps_its_slice(cluster: Cluster, phase: str) -> None:
    await served(cluster, "a")
    end(cluster, phase)
    await seen(cluster)
    assert [await cluster.watch.release_ended(0), len(cluster.slices())] == [0, 1]


async def test_a_watch_that_is_behind_releases_nothing_that_the_api_still_has(cluster: Cluster) -> None:
    await served(cluster, "a")
    cluster.watch.pods = {}
    assert [await cluster.watch.release_ended(0), len(cluster.slices())] == [0, 1]


async def test_while_the_api_is_away_nothing_is_released(cluster: Cluster) -> None:
    await served(cluster, "a")
    cluster.watch.pods = {}
    cluster.api.faults = [("LIST", "pods", failing(503))] * 4
    with pytest.raises(HostFailure):
        await cluster.watch.release_ended(0)
    assert len(cluster.slices()) == 1


async def test_while_processes_run_in_it_a_slice_stays_and_that_is_said_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    pod = await served(cluster, "a")
    cluster.files.run_a_process_in(SliceName(slice_of(pod)))
    end(cluster, "deleted")
    await seen(cluster)
    for _ in range(3):
        assert await cluster.watch.release_ended(0) == 0
        cluster.now_s += SAID_S
    assert [record.getMessage() for record in caplog.records if "stay" in record.getMessage()] == [
        f"Pod {pod['metadata']['uid']} is over, but {slice_of(pod)} stay(s): processes run in {slice_of(pod)}."
    ]
    cluster.files.dead_bytes[SliceName(slice_of(pod))] = 1  # they have ended; the node's look finds it
    assert await cluster.watch.release_ended(0) == 1


async def test_while_the_kubelet_has_a_deleted_pod_its_slice_stays(cluster: Cluster) -> None:
    await served(cluster, "a")
    cluster.held = {("default", "a")}
    end(cluster, "deleted")
    await seen(cluster)
    assert await cluster.watch.release_ended(0) == 0
    cluster.held = set()
    assert await cluster.watch.release_ended(0) == 1


async def test_the_kubelets_word_about_a_pod_that_came_again_is_not_about_the_first(cluster: Cluster) -> None:
    first = await served(cluster, "a")
    end(cluster, "deleted")
    second = await served(cluster, "a")
    cluster.held = {("default", "a")}
    await seen(cluster)
    assert await cluster.watch.release_ended(0) == 1
    assert (slice_of(first) in cluster.slices(), slice_of(second) in cluster.slices()) == (False, True)


async def test_a_pod_whose_containers_ended_frees_its_slice_whatever_the_kubelet_still_lists(cluster: Cluster) -> None:
    await served(cluster, "a")
    cluster.held = {("default", "a")}
    end(cluster, "Succeeded")
    await seen(cluster)
    assert await cluster.watch.release_ended(0) == 1


async def test_slices_of_others_are_nobodys_business_here(cluster: Cluster) -> None:
    await cluster.node.put_slice(Request(SliceName("alice"), Compute(ComputePolicy.BALANCED, percent=25), 1 << 30))
    assert [await cluster.watch.release_ended(0), set(cluster.slices())] == [0, {"alice"}]


async def test_a_daemon_that_starts_again_finds_what_ended_meanwhile_and_keeps_the_rest(cluster: Cluster) -> None:
    await served(cluster, "a")
    rest = await served(cluster, "b")
    end(cluster, "deleted")
    after = await cluster.restarted()
    await after.side.keep()
    running = asyncio.create_task(after.watch.run())
    async with asyncio.timeout(10):
        while len(after.watch.pods) != 1:
            await asyncio.sleep(0.005)
    assert await after.watch.release_ended(0) == 1
    assert set(after.slices()) == {slice_of(rest)}
    running.cancel()


async def test_two_hundred_pods_come_and_go_and_nothing_is_left(cluster: Cluster) -> None:
    running = asyncio.create_task(cluster.watch.run())
    alive: list[str] = []
    for number in range(200):
        name = f"p{number}"
        pod = cluster.pod(name, allocation=f"{GPU},T,8192,24:;")
        await cluster.side.resource.allocate([f"{GPU}#{number % 10}"])
        assert cluster.locked() is None
        assert slice_of(pod) in cluster.slices()
        alive.append(name)
        if len(alive) == 10:  # as many as the scheduler lets share a GPU
            for _ in range(1 + number % 7):
                end(cluster, ("Succeeded", "Failed", "deleted")[number % 3], alive.pop(number % len(alive)))
    for name in alive:
        end(cluster, "deleted", name)
    async with asyncio.timeout(10):
        while any(not pod.ended for pod in cluster.watch.pods.values()):
            await asyncio.sleep(0.005)
    cluster.now_s += 10
    await cluster.watch.release_ended(0)
    assert (cluster.slices(), cluster.node.view().book.leases, cluster.locked()) == ({}, {}, None)
    assert cluster.files.names() == frozenset()
    notes = [pod["metadata"]["annotations"] for pod in cluster.api.pods.values()]
    assert {each[hami.BIND_PHASE] for each in notes} == {hami.SUCCESS}
    running.cancel()
