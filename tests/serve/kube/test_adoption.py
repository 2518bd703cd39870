"""Pods of HAMi's scheduler that a daemon with a new Book finds running, against an API server in memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from amdvgpud.core import hami
from amdvgpud.core.errors import Conflict, HostFailure
from amdvgpud.core.model import Compute, Request, SliceName
from amdvgpud.serve.kube.adoption import Adoption
from amdvgpud.serve.kube.podresources import ContainerDevices
from tests.fakes import GIB, MemoryJournal
from tests.serve.kube.stage import GPU, HERE, OTHER, Stage, a_container, slice_of

QUARTER = f"{GPU},AMD Instinct MI300X,16384,76:"
HALF = f"{OTHER},AMD Instinct MI300X,32768,152:"
WHOLE = f"{OTHER},AMD Instinct MI300X,196608,304:"


@dataclass
class Lost:
    """A daemon before and one after its Book was lost; what the kubelet says in between."""

    stage: Stage
    devices: list[ContainerDevices] = field(default_factory=list)
    silent: bool = False

    async def serve(self, name: str, *containers: Any, allocation: str, **more: Any) -> dict[str, Any]:
        """As the scheduler and the kubelet do it; it runs then."""
        pod = self.stage.pod(name, *containers, allocation=allocation, **more)
        for container, grants in zip(
            [*more.get("init", ()), *containers], hami.parse_allocation(allocation), strict=True
        ):
            ids = [f"{grant.id}#{len(self.devices)}" for grant in grants]
            await self.stage.side.resource.allocate(ids)
            self.devices.append(ContainerDevices("default", name, container["name"], "amd.com/gpu", tuple(ids)))
        self.stage.api.change_pod("default", name, {"status": {"phase": "Running"}})
        return pod

    async def new_daemon(self) -> tuple[Stage, Adoption]:
        after = await Stage.around(self.stage.api, self.stage.client, (0, 1), None, MemoryJournal())
        after.uids = self.stage.uids
        after.watch.pods = {pod.metadata.uid: pod for pod in await after.client.list_pods(HERE)}
        await after.side.keep()

        async def devices() -> list[ContainerDevices]:
            if self.silent:
                raise HostFailure("no kubelet")
            return self.devices

        return after, Adoption(after.node, after.watch, after.side.offers, devices)


@pytest.fixture
async def lost() -> AsyncIterator[Lost]:
    stage = await Stage.of()
    await stage.side.keep()
    yield Lost(stage)
    await stage.close()


def shares(stage: Stage) -> dict[str, Any]:
    return {name: (item.request, item.shares) for name, item in stage.node.view().book.slices.items()}


def holders(stage: Stage) -> dict[str, str]:
    return {lease.slice: lease.holder.text for lease in stage.node.view().book.leases.values()}


def health(stage: Stage) -> list[bool]:
    text = stage.api.annotations("node", HERE)[hami.REGISTRATION]
    return ["health" in gpu for gpu in hami.parse_registration(text)]


async def test_pods_keep_what_they_have_and_the_rest_of_their_gpus_is_given_again(lost: Lost) -> None:
    quarter = a_container("main", gpumem=16384, gpucores=25)
    for name in ("a", "b"):
        await lost.serve(name, quarter, allocation=f"{QUARTER};")
    await lost.serve("c", a_container("main"), allocation=f"{WHOLE};")
    after, adoption = await lost.new_daemon()
    assert (shares(after), health(after)) == ({}, [False, False])
    await adoption.look()
    assert (shares(after), holders(after)) == (shares(lost.stage), holders(lost.stage))
    await after.side.keep()
    assert health(after) == [True, True]
    before = len(after.node.view().book.leases)
    await adoption.look()
    assert len(after.node.view().book.leases) == before
    next_one = after.pod("next", quarter, allocation=f"{QUARTER};")
    await after.side.resource.allocate([f"{GPU}#9"])
    masks = [item.shares[0].cus for item in after.node.view().book.slices.values() if item.shares[0].cus]
    assert sum(len(mask) for mask in masks) == len({cu for mask in masks for cu in mask}) == 3 * 72
    after.api.delete_pod("default", "a")
    after.watch.pods = {pod.metadata.uid: pod for pod in await after.client.list_pods(HERE)}
    assert await after.watch.release_ended(0) == 1
    assert slice_of(next_one) in shares(after)


async def test_a_pod_of_several_containers_and_gpus_is_taken_up_whole(lost: Lost) -> None:
    second = a_container("second", gpumem=32768, gpucores=50)
    both = QUARTER + QUARTER.replace(GPU, OTHER)
    await lost.serve("two", a_container("first", gpus=2, gpumem=16384, gpucores=25), allocation=f"{both};")
    pod = await lost.serve("one", second, allocation=f"{HALF};")
    after, adoption = await lost.new_daemon()
    await adoption.look()
    assert shares(after) == shares(lost.stage)
    assert holders(after)[SliceName(slice_of(pod))] == "default/one/second"


async def test_a_limit_that_the_api_server_writes_with_a_unit_is_what_it_was(lost: Lost) -> None:
    pod = await lost.serve(
        "a", a_container("main", gpumem=16000, gpucores=25), allocation=f"{QUARTER.replace('16384', '16000')};"
    )
    (container,) = lost.stage.api.pods["default", "a"]["spec"]["containers"]
    assert container["resources"]["limits"]["amd.com/gpumem"] == "16k"
    after, adoption = await lost.new_daemon()
    await adoption.look()
    assert slice_of(pod) in shares(after)
    assert shares(after) == shares(lost.stage)


async def test_a_slice_that_an_operator_takes_from_a_running_pod_is_not_given_back_to_it(lost: Lost) -> None:
    pod = await lost.serve("a", a_container("main", gpumem=16384, gpucores=25), allocation=f"{QUARTER};")
    after, adoption = await lost.new_daemon()
    for _ in range(2):
        await adoption.look()
    await after.node.delete_slice(SliceName(slice_of(pod)), force=True)
    for _ in range(2):
        await adoption.look()
    assert shares(after) == {}
    await after.side.keep()
    assert health(after) == [False, True]


async def test_what_an_init_container_had_that_has_ended_is_not_taken_up(lost: Lost) -> None:
    load, main = (a_container(name, gpumem=16384, gpucores=25) for name in ("load", "main"))
    pod = await lost.serve("a", main, init=[load], allocation=f"{QUARTER.replace(GPU, OTHER)};{QUARTER};")
    ended = [{"name": "load", "state": {"terminated": {"exitCode": 0}}}]
    lost.stage.api.change_pod("default", "a", {"status": {"initContainerStatuses": ended}})
    after, adoption = await lost.new_daemon()
    await adoption.look()
    assert set(shares(after)) == {slice_of(pod, 1)}
    assert shares(after)[slice_of(pod, 1)][1] == shares(lost.stage)[slice_of(pod, 1)][1]


def notes(lost: Lost, **patch: str) -> None:
    lost.stage.api.change_pod("default", "a", {"metadata": {"annotations": patch}})


@pytest.mark.parametrize(
    ("forge", "why"),
    [
        (
            lambda lost: notes(lost, **{hami.ALLOCATED: QUARTER.replace("16384", "1024") + ";"}),
            "1024 MiB and 76 CUs .* whose limits come to 16384 and 76",
        ),
        (lambda lost: notes(lost, **{hami.ALLOCATED: QUARTER.replace("76", "3") + ";"}), "limits come to 16384 and 76"),
        (lambda lost: notes(lost, **{hami.ALLOCATED: f"{QUARTER};{QUARTER};"}), "1 of its containers .* and 2 were"),
        (
            lambda lost: notes(
                lost,
                **{
                    hami.ALLOCATED: QUARTER.replace(GPU, OTHER) + ";",
                    hami.CU_ALLOCATED: lost.stage.notes("a")[hami.CU_ALLOCATED].replace(GPU, OTHER),
                },
            ),
            f"{OTHER} is allocated to main, and the kubelet says that it has {GPU}",
        ),
        (lambda lost: notes(lost, **{hami.CU_ALLOCATED: f'{{"{GPU}":"0-7"}}'}), "8 CUs are not what 76 come to"),
        (lambda lost: notes(lost, **{hami.CU_ALLOCATED: f'{{"{GPU}":"8-80"}}'}), "73 CUs are not what 76 come to"),
        (lambda lost: notes(lost, **{hami.CU_ALLOCATED: ""}), "does not say which CUs"),
        (lambda lost: notes(lost, **{hami.CU_ALLOCATED: "nonsense"}), "no list of CUs"),
        (lambda lost: lost.devices.clear(), "the kubelet says that it has nothing"),
    ],
)
async def test_what_is_not_surely_so_is_not_taken_up_and_said_once(
    lost: Lost, caplog: pytest.LogCaptureFixture, forge: Callable[[Lost], None], why: str
) -> None:
    await lost.serve("a", a_container("main", gpumem=16384, gpucores=25), allocation=f"{QUARTER};")
    forge(lost)
    after, adoption = await lost.new_daemon()
    caplog.clear()
    for _ in range(2):
        await adoption.look()
    assert shares(after) == {}
    (said,) = (r.getMessage() for r in caplog.records if r.name.endswith("adoption"))
    assert said.startswith("default/a runs since before this Book, and what it has cannot be told: ")
    assert re.search(why, said), said
    after.pod("new", a_container("main"), allocation=f"{QUARTER};")  # on the GPU that it has, whatever it says
    with pytest.raises(Conflict, match="has no slice here"):
        await after.side.resource.allocate([f"{GPU}#5"])


async def test_a_gpu_is_held_back_by_the_kubelets_word_when_a_pod_hides_the_schedulers_and_until_it_ends(
    lost: Lost,
) -> None:
    await lost.serve("a", a_container("main", gpumem=16384, gpucores=25), allocation=f"{QUARTER};")
    notes(lost, **{hami.ALLOCATED: ""})
    after, adoption = await lost.new_daemon()
    assert health(after) == [True, True]
    told = after.watch.told
    await adoption.look()
    assert told.is_set()
    await after.side.keep()
    assert health(after) == [False, True]
    after.watch.pods = {}
    await adoption.look()
    await after.side.keep()
    assert health(after) == [True, True]


async def test_half_of_a_pod_is_not_taken_up(lost: Lost) -> None:
    first, second = (a_container(name, gpumem=16384, gpucores=25) for name in ("first", "second"))
    await lost.serve("a", first, second, allocation=f"{QUARTER};{QUARTER.replace(GPU, OTHER)};")
    after, adoption = await lost.new_daemon()
    await after.node.put_slice(Request(SliceName("alice"), Compute(percent=100), GIB, on=(OTHER,)))
    await adoption.look()
    assert set(shares(after)) == {"alice"}


async def test_two_containers_of_a_pod_on_one_gpu_are_not_told_apart(lost: Lost) -> None:
    first, second = (a_container(name, gpumem=16384, gpucores=25) for name in ("first", "second"))
    await lost.serve("a", first, second, allocation=f"{QUARTER};{QUARTER};")
    after, adoption = await lost.new_daemon()
    await adoption.look()
    assert shares(after) == {}


async def test_a_kubelet_that_does_not_answer_is_asked_again(lost: Lost, monkeypatch: pytest.MonkeyPatch) -> None:
    pod = await lost.serve("a", a_container("main", gpumem=16384, gpucores=25), allocation=f"{QUARTER};")
    lost.silent = True
    after, adoption = await lost.new_daemon()
    await adoption.look()
    assert shares(after) == {}
    lost.silent = False
    monkeypatch.setattr("amdvgpud.serve.kube.adoption.LOOK_S", 0.01)
    running = asyncio.create_task(adoption.run())
    async with asyncio.timeout(10):
        while slice_of(pod) not in shares(after):
            await asyncio.sleep(0.01)
    running.cancel()
