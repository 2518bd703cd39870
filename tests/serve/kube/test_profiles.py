"""Profiles, whole GPUs, and the leases that the kubelet holds on them: a real Node, no kubelet but what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from amdvgpud.core.containers import Container
from amdvgpud.core.errors import Conflict, HostFailure, Lingering, NoRoom, NotFound
from amdvgpud.core.health import Condition, Health
from amdvgpud.core.model import Compute, ComputePolicy, Gpu, GpuId, Holder, Request, Slice, SliceName, Usage
from amdvgpud.core.profiles import SliceProfile, parse_profiles
from amdvgpud.ports import KfdUser
from amdvgpud.serve.endpoints import Process
from amdvgpud.serve.kube.leases import KubeletLeases
from amdvgpud.serve.kube.podresources import ContainerDevices
from amdvgpud.serve.kube.profiles import ProfileResource, Profiles, slices_of
from amdvgpud.serve.kube.resources import Device, Grant
from amdvgpud.serve.kube.whole import WholeResource, WholeResources, resource_names
from tests.fakes import GIB, Places, an_inventory, in_mode, left_on
from tests.serve.conftest import Desk

QUARTER = SliceProfile("25c-48g", Compute(percent=25), 48 * GIB, 3)


def by_name(items: Sequence[Slice]) -> Grant:
    return Grant(tuple(f"amdvgpu.io/slice={item.name}" for item in items))


@dataclass
class Said:
    """What a kubelet says of its pods; ``started_s``: since when it runs."""

    containers: list[ContainerDevices] = field(default_factory=list)
    started_s: float = 0.0
    silent: bool = False
    asked: int = 0

    async def list(self) -> tuple[ContainerDevices, ...]:
        self.asked += 1
        if self.silent:
            raise HostFailure("no kubelet")
        return tuple(self.containers)

    async def since_s(self) -> float:
        if self.silent:
            raise HostFailure("no kubelet")
        return self.started_s

    def runs(self, resource: str, *ids: str) -> None:
        self.containers = [ContainerDevices("default", "p", "c", resource, ids)] if ids else []


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def leases(desk: Desk, said: Said, run_dir: Path) -> KubeletLeases:
    plugins = run_dir / "kubelet" / "device-plugins"
    plugins.mkdir(parents=True)
    (plugins.parent / "pods").mkdir()
    return KubeletLeases(desk.node, said, plugins, now_s=lambda: desk.now_s)  # type: ignore[arg-type]


@pytest.fixture
async def quarters(desk: Desk, leases: KubeletLeases) -> ProfileResource:
    await Profiles(desk.node, [QUARTER]).cut()
    return ProfileResource(QUARTER, desk.node, leases, by_name)


def held(desk: Desk) -> dict[str, str]:
    return {lease.slice: lease.holder.text for lease in desk.node.view().book.leases.values()}


def states(resource: Any, desk: Desk) -> dict[str, bool]:
    return {device.id: device.healthy for device in resource.devices(desk.node.view())}


# ------------------------------------------------------------------------------------------------------- cutting


async def test_slices_are_cut_once_and_found_again(desk: Desk) -> None:
    for _ in range(2):
        await Profiles(desk.node, [QUARTER]).cut()
        book = desk.node.view().book
        assert (sorted(book.slices), book.revision) == (["25c-48g-0", "25c-48g-1", "25c-48g-2"], 3)


async def test_a_count_of_zero_cuts_as_many_as_fit(desk: Desk) -> None:
    await Profiles(desk.node, parse_profiles("big=50%:96GiB:1, rest=25%:48GiB:0")).cut()
    assert sorted(desk.node.view().book.slices) == ["big-0", *(f"rest-{n}" for n in range(6))]


async def test_a_profile_that_does_not_fit_is_said_once_and_the_others_go_on(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    profiles = Profiles(desk.node, parse_profiles("huge=25%:900GiB, five=50%:96GiB:5, small=5%:1GiB:1"))
    for _ in range(2):
        await profiles.cut()
    assert sorted(desk.node.view().book.slices) == ["five-0", "five-1", "five-2", "five-3"]
    huge, five, small = (r.getMessage() for r in caplog.records if r.name == "amdvgpud.serve.kube.profiles")
    assert huge.startswith("Profile huge: there is room for 0 of its slices: wanted 900 GiB")
    assert five.startswith("Profile five: there is room for 4 of its slices, not 5: wanted 96 GiB")
    assert small.startswith("Profile small: there is room for 0 of its slices, not 1: wanted")


async def test_what_is_in_use_is_kept_when_its_profile_changes_and_replaced_later(
    desk: Desk, leases: KubeletLeases, said: Said, quarters: ProfileResource
) -> None:
    await quarters.allocate(["25c-48g-1"])
    said.runs("amdvgpu.io/25c-48g", "25c-48g-1")
    smaller = SliceProfile("25c-48g", Compute(percent=25), 24 * GIB, 2)
    cutting = Profiles(desk.node, [smaller])
    resource = ProfileResource(smaller, desk.node, leases, by_name)
    await cutting.cut()
    await cutting.cut()
    # One of the old three is in use; the others have the new size, and the number is that of the new profile.
    assert states(resource, desk) == {"25c-48g-0": True, "25c-48g-2": True}
    assert held(desk) == {"25c-48g-1": "kubelet amdvgpu.io/25c-48g 25c-48g-1"}


async def test_more_than_are_configured_go_when_nobody_uses_them(
    desk: Desk, leases: KubeletLeases, quarters: ProfileResource
) -> None:
    await quarters.allocate(["25c-48g-2"])
    cutting = Profiles(desk.node, [SliceProfile("25c-48g", Compute(percent=25), 48 * GIB, 1)])
    await cutting.cut()
    assert sorted(desk.node.view().book.slices) == ["25c-48g-0", "25c-48g-1", "25c-48g-2"]
    (lease,) = desk.node.view().book.leases
    await desk.node.release_lease(lease)
    await cutting.cut()
    assert sorted(desk.node.view().book.slices) == ["25c-48g-0"]


async def test_slices_of_a_profile_that_is_gone_go_and_one_that_is_in_use_when_it_is_free(
    desk: Desk, quarters: ProfileResource, caplog: pytest.LogCaptureFixture
) -> None:
    await quarters.allocate(["25c-48g-1"])
    cutting = Profiles(desk.node, parse_profiles("small=5%:1GiB:1"))
    for _ in range(2):
        await cutting.cut()
        assert sorted(desk.node.view().book.slices) == ["25c-48g-1", "small-0"]
    await desk.node.release_lease(*desk.node.view().book.leases)
    desk.files.run_a_process_in(SliceName("25c-48g-1"))
    await cutting.cut()
    assert sorted(desk.node.view().book.slices) == ["25c-48g-1", "small-0"]
    desk.files.usages[SliceName("25c-48g-1")] = Usage(SliceName("25c-48g-1"))
    await cutting.cut()
    assert sorted(desk.node.view().book.slices) == ["small-0"]
    (said,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert said.startswith("Profile 25c-48g: it is gone; slices that were cut for it are kept as long as they are in")


async def test_a_slice_in_which_a_process_ends_goes_although_no_event_says_so(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Profiles(desk.node, [QUARTER]).cut()
    for n in range(3):
        desk.files.run_a_process_in(SliceName(f"25c-48g-{n}"))
    looked, asked = asyncio.Event(), asyncio.Event()

    async def wait_event(since: int, timeout_s: float) -> None:
        looked.set()
        await asked.wait()
        asked.clear()

    monkeypatch.setattr(desk.node, "wait_event", wait_event)
    running = asyncio.create_task(Profiles(desk.node, []).run())
    await asyncio.wait_for(looked.wait(), 10)
    desk.files.usages = {name: Usage(name) for name in desk.files.usages}
    looked.clear()
    asked.set()
    await asyncio.wait_for(looked.wait(), 10)
    assert desk.node.view().book.slices == {}
    running.cancel()


async def test_what_an_operator_has_made_is_left_alone_whatever_its_name(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is just as the profile wants it is given to pods; the number of any other is left out."""
    alike, other, neither = (SliceName(name) for name in ("25c-48g-2", "25c-48g-1", "25c-48g-7"))
    await desk.node.put_slice(QUARTER.request(2))
    for name in (other, neither):
        await desk.node.put_slice(Request(name, Compute(percent=5), GIB))
    before = {name: desk.node.view().book.slices[name] for name in (alike, other, neither)}
    await Profiles(desk.node, [QUARTER]).cut()
    assert [item.name for item in slices_of(QUARTER, desk.node.view())] == ["25c-48g-0", "25c-48g-2", "25c-48g-3"]
    assert caplog.messages[-1].startswith("Profile 25c-48g: 25c-48g-1 was not cut for it and is left alone")
    for profiles in ([replace(QUARTER, count=1)], [replace(QUARTER, vram_bytes=GIB, count=1)], []):
        await Profiles(desk.node, profiles).cut()
        slices = desk.node.view().book.slices
        assert {name: slices[name] for name in before} == before
    assert slices.keys() == before.keys()


async def test_slices_of_the_earlier_form_go_also_beyond_the_new_count(desk: Desk, quarters: ProfileResource) -> None:
    await Profiles(desk.node, [SliceProfile("25c-48g", Compute(percent=25), 24 * GIB, 1)]).cut()
    assert sorted(desk.node.view().book.slices) == ["25c-48g-0"]


# ------------------------------------------------------------------------------------------------------- devices


async def test_a_slice_is_fit_while_its_gpu_is_and_nobody_else_holds_it(desk: Desk, quarters: ProfileResource) -> None:
    view = desk.node.view()
    assert quarters.devices(view) == [Device(f"25c-48g-{n}", True, 0) for n in range(3)]
    await desk.node.grant_lease(Holder("somebody"), slice=SliceName("25c-48g-1"))
    assert states(quarters, desk) == {"25c-48g-0": True, "25c-48g-1": False, "25c-48g-2": True}
    (gpu,) = {share.partition.rpartition("/")[0] for item in slices_of(QUARTER, view) for share in item.shares}
    for verdict, fit in ((Condition.UNKNOWN, False), (Condition.DEGRADED, True), (Condition.UNHEALTHY, False)):
        await desk.node.set_health({g.id: Health(verdict) for g in view.inventory.gpus if g.id == gpu})
        assert states(quarters, desk)["25c-48g-0"] is fit, verdict
    await desk.node.set_health({})
    await desk.node.set_cordoned(view.inventory.gpus[0].id, True)
    await desk.node.set_cordoned(view.inventory.gpus[1].id, True)
    assert not any(states(quarters, desk).values())


async def test_a_lost_slice_stays_and_is_unfit(desk: Desk, quarters: ProfileResource) -> None:
    desk.sysfs.inventory = an_inventory(0)
    await desk.node.rescan()
    assert quarters.devices(desk.node.view()) == [Device(f"25c-48g-{n}", False, None) for n in range(3)]


@pytest.mark.parametrize(("numa_node", "told"), [(None, None), (-1, None), (1, 1), (0, 0)])
async def test_only_a_numa_node_that_there_is_is_told(
    make_desk: Any, run_dir: Path, numa_node: int | None, told: int | None
) -> None:
    desk = await make_desk()
    gpus = tuple(
        replace(gpu, partitions=tuple(replace(p, numa_node=numa_node) for p in gpu.partitions))
        for gpu in desk.sysfs.inventory.gpus
    )
    desk.sysfs.inventory = replace(desk.sysfs.inventory, gpus=gpus, generation_id=2)
    await desk.node.rescan()
    await Profiles(desk.node, [QUARTER]).cut()
    leases = KubeletLeases(desk.node, Said(), run_dir)  # type: ignore[arg-type]
    resource = ProfileResource(QUARTER, desk.node, leases, by_name)
    assert {device.numa_node for device in resource.devices(desk.node.view())} == {told}


# ------------------------------------------------------------------------------------------------------ allocate


async def test_the_second_call_gives_the_same_and_takes_nothing_more(desk: Desk, quarters: ProfileResource) -> None:
    first = await quarters.allocate(["25c-48g-0", "25c-48g-2"])
    revision = desk.node.view().book.revision
    assert await quarters.allocate(["25c-48g-0", "25c-48g-2"]) == first
    assert first.cdi_devices == ("amdvgpu.io/slice=25c-48g-0", "amdvgpu.io/slice=25c-48g-2")
    assert desk.node.view().book.revision == revision
    assert held(desk) == {f"25c-48g-{n}": f"kubelet amdvgpu.io/25c-48g 25c-48g-{n}" for n in (0, 2)}


async def test_a_call_that_fails_has_taken_nothing(
    desk: Desk, quarters: ProfileResource, leases: KubeletLeases
) -> None:
    await desk.node.grant_lease(Holder("somebody"), slice=SliceName("25c-48g-1"))
    with pytest.raises(Conflict, match=r"held by lease .* \(somebody\)"):
        await quarters.allocate(["25c-48g-0", "25c-48g-1"])
    with pytest.raises(NotFound, match="has no 25c-48g-9; there are 25c-48g-0, 25c-48g-1, 25c-48g-2"):
        await quarters.allocate(["25c-48g-0", "25c-48g-9"])

    def failing(items: Sequence[Slice]) -> Grant:
        raise HostFailure("the disk is full")

    with pytest.raises(HostFailure):
        await ProfileResource(QUARTER, desk.node, leases, failing).allocate(["25c-48g-0"])
    assert held(desk) == {"25c-48g-1": "somebody"}


# --------------------------------------------------------------------------------------------------- starts again


async def test_what_starts_again_has_what_it_had_and_keeps_its_lease(
    desk: Desk, said: Said, leases: KubeletLeases, quarters: ProfileResource, whole: WholeResource
) -> None:
    """Also while something is in it, though its profile has another form by now, and from a Book that has forgotten."""
    device = f"{desk.sysfs.inventory.gpus[1].id}-0"
    granted = [await quarters.allocate(["25c-48g-0"]), await whole.allocate([device])]
    said.runs(quarters.name, "25c-48g-0")
    await looks(desk, leases, 1)
    before = desk.node.view().book.leases
    desk.files.run_a_process_in(SliceName("25c-48g-0"))
    quarters._profile = replace(QUARTER, vram_bytes=GIB)
    for _ in range(2):
        again = [await quarters.again(["25c-48g-0"], "uid", "c"), await whole.again([device], "uid", "c")]
        assert again == granted
    assert desk.node.view().book.leases == before
    for lease in before:
        await desk.node.release_lease(lease)
    assert await quarters.again(["25c-48g-0"], "uid", "c") == granted[0]
    assert await whole.again([device], "uid", "c") == granted[1]
    assert held(desk) == {
        "25c-48g-0": f"kubelet {quarters.name} 25c-48g-0",
        f"whole-{device.lower()}": f"kubelet amd.com/gpu {device}",
    }


async def test_what_is_lost_or_no_more_or_another_ones_does_not_start_again(
    desk: Desk, quarters: ProfileResource, whole: WholeResource
) -> None:
    await quarters.allocate(["25c-48g-0"])
    await desk.node.grant_lease(Holder("somebody"), slice=SliceName("25c-48g-1"))
    with pytest.raises(NotFound, match=r"^25c-48g-9: this slice of .*25c-48g is no more; make the pod anew"):
        await quarters.again(["25c-48g-9"], "uid", "c")
    with pytest.raises(Conflict, match=r"held by lease .* \(somebody\)"):
        await quarters.again(["25c-48g-1"], "uid", "c")
    device = f"{desk.sysfs.inventory.gpus[1].id}-0"
    desk.sysfs.inventory = an_inventory(0)
    await desk.node.rescan()
    with pytest.raises(Conflict, match="slice 25c-48g-0 is lost"):
        await quarters.again(["25c-48g-0"], "uid", "c")
    with pytest.raises(NotFound, match=f"has no {device}"):
        await whole.again([device], "uid", "c")


# ------------------------------------------------------------------------------------------------------- release


async def looks(desk: Desk, leases: KubeletLeases, count: int) -> None:
    for _ in range(count):
        desk.now_s += 10
        await leases.look()


async def test_a_lease_ends_when_its_container_is_no_more(
    desk: Desk, leases: KubeletLeases, said: Said, quarters: ProfileResource
) -> None:
    await quarters.allocate(["25c-48g-0", "25c-48g-1"])
    said.runs("amdvgpu.io/25c-48g", "25c-48g-0", "25c-48g-1")
    await looks(desk, leases, 3)
    said.runs("amdvgpu.io/25c-48g", "25c-48g-1")
    await looks(desk, leases, 1)
    assert set(held(desk)) == {"25c-48g-0", "25c-48g-1"}  # one look may have come at a bad moment
    await looks(desk, leases, 1)
    assert set(held(desk)) == {"25c-48g-1"}
    assert sorted(desk.node.view().book.slices) == ["25c-48g-0", "25c-48g-1", "25c-48g-2"]


async def test_a_container_that_is_still_being_started_keeps_its_lease_and_one_that_never_was_does_not(
    desk: Desk, leases: KubeletLeases, run_dir: Path, quarters: ProfileResource
) -> None:
    await quarters.allocate(["25c-48g-0", "25c-48g-1", "25c-48g-2"])
    kubelet = run_dir / "kubelet"
    (kubelet / "pods" / "uid-0").mkdir()
    checkpoint = {
        "Data": {
            "PodDeviceEntries": [
                {"PodUID": uid, "ContainerName": "c", "ResourceName": "amdvgpu.io/25c-48g", "DeviceIDs": ids}
                for uid, ids in (("uid-0", {"-1": ["25c-48g-0"]}), ("uid-gone", {"0": ["25c-48g-1"]}))
            ],
            "RegisteredDevices": {},
        },
        "Checksum": 1,
    }
    (kubelet / "device-plugins" / "kubelet_internal_checkpoint").write_text(json.dumps(checkpoint))
    await looks(desk, leases, 3)
    assert set(held(desk)) == {"25c-48g-0", "25c-48g-1", "25c-48g-2"}
    await looks(desk, leases, 20)
    assert set(held(desk)) == {"25c-48g-0"}


async def test_nothing_ends_while_somebody_runs_in_it_or_the_kubelet_cannot_know(
    desk: Desk, leases: KubeletLeases, said: Said, quarters: ProfileResource
) -> None:
    await quarters.allocate(["25c-48g-0"])
    said.runs("amdvgpu.io/25c-48g", "25c-48g-0")
    await looks(desk, leases, 1)
    said.runs("")
    said.started_s = desk.now_s  # it restarts
    await looks(desk, leases, 5)
    said.silent = True
    with pytest.raises(HostFailure):
        await leases.look()
    said.silent = False
    desk.files.run_a_process_in(SliceName("25c-48g-0"))
    await desk.node.tick()
    await looks(desk, leases, 5)
    assert set(held(desk)) == {"25c-48g-0"}
    desk.files.usages.clear()
    desk.files.write(desk.node.view().book.slices[SliceName("25c-48g-0")], desk.sysfs.inventory)
    await desk.node.tick()
    await looks(desk, leases, 2)
    assert held(desk) == {}


async def test_a_device_that_is_given_to_the_next_container_before_we_looked_has_a_new_lease(
    desk: Desk, leases: KubeletLeases, said: Said, quarters: ProfileResource
) -> None:
    answer = await quarters.allocate(["25c-48g-0"])
    said.runs("amdvgpu.io/25c-48g", "25c-48g-0")
    await looks(desk, leases, 1)
    (before,) = desk.node.view().book.leases
    assert await quarters.allocate(["25c-48g-0"]) == answer
    (after,) = desk.node.view().book.leases
    assert after != before
    said.runs("")
    await looks(desk, leases, 3)
    assert set(held(desk)) == {"25c-48g-0"}  # its own container is being started


def in_it(desk: Desk, name: str, how: str) -> Callable[[], Awaitable[None]]:
    """Somebody is in the slice; what is returned, a look for containers, makes the node know."""
    if how == "process":
        desk.files.run_a_process_in(SliceName(name))
    desk.processes[77] = Process(1, 500)

    async def find() -> None:
        there = Container(SliceName(name), "c0ffee", 77, 500, None, "uid", 0, reported=False)
        await desk.node.set_containers({SliceName(name): (there,)} if how == "container" and desk.processes else {})

    return find


@pytest.mark.parametrize("how", ["process", "container"])
@pytest.mark.parametrize("restarted", [False, True], ids=["", "after a restart of the daemon"])
async def test_a_device_that_somebody_is_in_is_not_given_again_and_offered_to_nobody_until_he_is_gone(
    desk: Desk, leases: KubeletLeases, said: Said, quarters: ProfileResource, how: str, restarted: bool
) -> None:
    """A kubelet that has lost its checkpoint lets its containers run and takes their devices for free."""
    await quarters.allocate(["25c-48g-0"])
    said.runs(quarters.name, "25c-48g-0")
    await looks(desk, leases, 1)
    said.runs(quarters.name)
    if restarted:
        leases = KubeletLeases(desk.node, said, leases._plugins_dir, now_s=lambda: desk.now_s)  # type: ignore[arg-type]
        quarters = ProfileResource(QUARTER, desk.node, leases, by_name)
    leases._find, waited = in_it(desk, "25c-48g-0", how), []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    leases._sleep = sleep
    lease, seen = desk.node.view().book.leases, desk.node.events_since(0)[1]
    with pytest.raises(Conflict, match=f"25c-48g-0 cannot be given to another container, as the kubelet asks: .*{how}"):
        await quarters.allocate(["25c-48g-0"])
    assert (waited, desk.node.view().book.leases) == ([1] * 10, lease)
    assert states(quarters, desk) == {"25c-48g-0": False, "25c-48g-1": True, "25c-48g-2": True}
    assert [event.kind for event in desk.node.events_since(seen)[0]][-1] == "device.contested"  # the kubelet is told
    await looks(desk, leases, 5)
    assert desk.node.view().book.leases == lease
    desk.files.usages[SliceName("25c-48g-0")] = Usage(SliceName("25c-48g-0"))
    desk.processes.clear()
    await desk.node.tick()
    await looks(desk, leases, 6)
    assert held(desk) == {}
    assert all(states(quarters, desk).values())
    await quarters.allocate(["25c-48g-0"])


async def test_the_container_of_a_pod_that_was_deleted_by_force_is_waited_for(
    desk: Desk, leases: KubeletLeases, quarters: ProfileResource
) -> None:
    """The kubelet takes its devices for free at once, and ends it then."""
    await quarters.allocate(["25c-48g-0"])
    leases._find, waited = in_it(desk, "25c-48g-0", "container"), []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            desk.processes.clear()

    leases._sleep = sleep
    await quarters.allocate(["25c-48g-0"])
    assert waited == [1, 1, 1]
    assert all(states(quarters, desk).values())


async def test_a_whole_gpu_that_is_open_is_neither_given_again_nor_freed(
    desk: Desk, leases: KubeletLeases, said: Said, whole: WholeResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (f"{gpu.id}-0" for gpu in desk.sysfs.inventory.gpus)
    await whole.allocate([first])
    own = frozenset({desk.sysfs.inventory.gpus[0].partitions[0].kfd_gpu_id})
    users: list[tuple[KfdUser, ...]] = [(KfdUser(88, "vllm", own),)]
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(desk.node._modes, "users", lambda gpu: users[0])
    monkeypatch.setattr(leases, "_sleep", sleep)
    with pytest.raises(Conflict, match=r"its partition is open in 88 \(vllm\)$"):
        await whole.allocate([first])
    assert (len(waited), states(whole, desk)) == (10, {first: False, second: True})
    await looks(desk, leases, 20)
    assert set(held(desk)) == {f"whole-{first.lower()}"}
    users[0] = ()
    await looks(desk, leases, 1)
    assert held(desk) == {}
    assert states(whole, desk) == {first: True, second: True}


async def test_a_whole_gpu_that_is_not_clean_yet_is_waited_for_a_little(
    desk: Desk, leases: KubeletLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    dirty = [3]

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    def on(places: Places, *_: object) -> dict[GpuId, str]:
        dirty[0] -= 1
        return left_on(places, "a former user's 4 GiB") if dirty[0] >= 0 else {}

    monkeypatch.setattr(leases, "_sleep", sleep)
    monkeypatch.setattr(desk.node._leftovers, "on", on)
    desk.sysfs.inventory = an_inventory(1)
    await desk.node.rescan()
    (device,) = (f"{gpu.id}-0" for gpu in desk.sysfs.inventory.gpus)
    whole = WholeResource("amd.com/gpu", desk.node, leases, by_name, "single")
    await whole.allocate([device])
    assert waited == [1, 1, 1]
    await desk.node.release_lease(*desk.node.view().book.leases)
    dirty[0] = 99
    with pytest.raises(Lingering, match="a former user's 4 GiB"):
        await whole.allocate([device])
    assert (len(waited), held(desk)) == (13, {})


async def test_a_slice_that_is_cut_already_is_not_kept_waiting_by_a_gpu_that_is_not_clean(
    desk: Desk, leases: KubeletLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    quarter = SliceProfile("25c-48g", Compute(percent=25), 48 * GIB, 1)
    await Profiles(desk.node, [quarter]).cut()
    waits, clean = asyncio.Event(), asyncio.Event()

    async def sleep(_: float) -> None:
        waits.set()
        await clean.wait()

    monkeypatch.setattr(leases, "_sleep", sleep)

    def on(places: Places, *_: object) -> dict[GpuId, str]:
        return {} if clean.is_set() else left_on(places, "a former user's 4 GiB")

    monkeypatch.setattr(desk.node._leftovers, "on", on)
    free = desk.sysfs.inventory.gpus[1].id
    whole = asyncio.create_task(
        WholeResource("amd.com/gpu", desk.node, leases, by_name, "single").allocate([f"{free}-0"])
    )
    await asyncio.wait_for(waits.wait(), 10)
    async with asyncio.timeout(10):
        await ProfileResource(quarter, desk.node, leases, by_name).allocate(["25c-48g-0"])
    assert set(held(desk)) == {"25c-48g-0"}
    clean.set()
    await whole


async def test_leases_of_others_are_no_business_of_the_kubelet(
    desk: Desk, leases: KubeletLeases, said: Said, quarters: ProfileResource
) -> None:
    await desk.node.grant_lease(Holder("kubelet"), slice=SliceName("25c-48g-0"))
    await looks(desk, leases, 50)
    assert held(desk) == {"25c-48g-0": "kubelet"}


# ------------------------------------------------------------------------------------------------- of before this Book


async def test_what_containers_have_and_nobody_holds_is_taken_up(
    desk: Desk, leases: KubeletLeases, said: Said, quarters: ProfileResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pods of a Book that was lost: one has a slice, which is cut again alike, the other a whole GPU."""
    free = desk.sysfs.inventory.gpus[1].id
    whole = WholeResource("amd.com/gpu", desk.node, leases, by_name, "single")
    monkeypatch.setattr(leases, "_meant", lambda: {each.name: each.means for each in (quarters, whole)})
    monkeypatch.setattr(desk.node._leftovers, "on", lambda places, *_: left_on(places, "the pod that has it"))
    await desk.node.set_health({free: Health(Condition.UNHEALTHY, "ras", "ras")})
    said.containers = [
        ContainerDevices("default", "p", "c", "amdvgpu.io/25c-48g", ("25c-48g-1",)),
        ContainerDevices("default", "q", "c", "amd.com/gpu", (f"{free}-0",)),
        ContainerDevices("default", "r", "c", "example.com/other", ("x",)),
    ]
    for _ in range(2):
        await leases.adopt()
        assert held(desk) == {
            "25c-48g-1": "kubelet amdvgpu.io/25c-48g 25c-48g-1",
            f"whole-{free.lower()}-0": f"kubelet amd.com/gpu {free}-0",
        }
    await looks(desk, leases, 1)
    said.containers = []
    await looks(desk, leases, 2)
    assert held(desk) == {}
    assert f"whole-{free.lower()}-0" not in desk.node.view().book.slices


async def test_before_anything_is_given_the_kubelets_list_is_taken_up_as_soon_as_it_answers(
    desk: Desk, leases: KubeletLeases, said: Said, quarters: ProfileResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_meant", lambda: {quarters.name: quarters.means})
    said.runs(quarters.name, "25c-48g-1")
    said.silent = True
    with pytest.raises(HostFailure):
        await leases.adopt()
    await quarters.allocate(["25c-48g-0"])  # it may have no list of pod resources at all
    assert held(desk).keys() == {"25c-48g-0"}
    said.silent = False
    desk.files.run_a_process_in(SliceName("25c-48g-1"))
    monkeypatch.setattr(leases, "_sleep", lambda _: asyncio.sleep(0))
    with pytest.raises(Lingering, match="25c-48g-1 cannot be given to another container"):
        await quarters.allocate(["25c-48g-1"])  # it has lost its checkpoint, and not its containers
    assert held(desk).keys() == {"25c-48g-0", "25c-48g-1"}
    asked = said.asked
    await quarters.allocate(["25c-48g-2"])
    assert said.asked == asked


async def test_a_kubelet_that_came_up_during_the_start_is_asked_at_once(
    desk: Desk, said: Said, quarters: ProfileResource, leases: KubeletLeases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_meant", lambda: {quarters.name: quarters.means})
    said.runs(quarters.name, "25c-48g-1")
    sleeping = asyncio.Event()

    async def sleep(_: float) -> None:
        sleeping.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(leases, "_sleep", sleep)
    running = asyncio.create_task(leases.run())
    await sleeping.wait()
    assert held(desk).keys() == {"25c-48g-1"}
    running.cancel()


async def test_what_cannot_be_so_is_said_once_and_nobody_loses_what_he_has(
    desk: Desk,
    leases: KubeletLeases,
    said: Said,
    quarters: ProfileResource,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken = desk.sysfs.inventory.gpus[0].id
    whole = WholeResource("amd.com/gpu", desk.node, leases, by_name, "single")
    monkeypatch.setattr(leases, "_meant", lambda: {each.name: each.means for each in (quarters, whole)})
    await desk.node.grant_lease(Holder("somebody"), slice=SliceName("25c-48g-0"))
    said.containers = [
        ContainerDevices("default", "p", "c", "amdvgpu.io/25c-48g", ("25c-48g-0", "25c-48g-7")),
        ContainerDevices("default", "q", "c", "amd.com/gpu", (f"{taken}-0",)),
    ]
    for _ in range(2):
        await leases.adopt()
    assert held(desk) == {"25c-48g-0": "somebody"}
    first, second, third = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert first.startswith("default/p (c) has 25c-48g-0, and the Book cannot say so: slice 25c-48g-0 is held by lease")
    assert "has no 25c-48g-7" in second
    assert "a whole share beside another" in third


# --------------------------------------------------------------------------------------------------------- whole


def of_mode(gpu: Gpu, mode: str | None) -> Gpu:
    """None: a GPU that has none; ``?``, and ``?`` behind a mode: one whose compute or memory mode could not be read."""
    if mode is None:
        return replace(gpu, compute_partition=None, memory_partition=None)
    if mode == "?":
        return replace(gpu, compute_partition=None, available_compute_partitions=("SPX", "CPX"))
    if mode.endswith("?"):
        return replace(of_mode(gpu, mode[:-1]), memory_partition=None, available_memory_partitions=("NPS1", "NPS4"))
    return gpu if mode == "SPX" else in_mode(gpu, mode)


@pytest.mark.parametrize(
    ("modes", "naming", "names"),
    [
        (("SPX", "SPX"), "single", {"amd.com/gpu": 2}),
        (("CPX", "CPX"), "single", {"amd.com/gpu": 16}),
        (("SPX", "CPX"), "single", {}),
        ((None, "SPX"), "single", {"amd.com/gpu": 2}),
        ((None, "CPX"), "single", {"amd.com/gpu": 9}),
        ((None, "SPX", "CPX"), "single", {}),
        (("?", "CPX"), "single", {"amd.com/gpu": 8}),
        (("?", "CPX"), "mixed", {"amd.com/cpx_nps1": 8}),
        (("SPX?", "CPX"), "mixed", {"amd.com/cpx_nps1": 8}),
        (("?",), "single", {}),
        ((None, None), "single", {"amd.com/gpu": 2}),
        ((None, None), "mixed", {"amd.com/gpu": 2}),
        (("CPX", "CPX"), "mixed", {"amd.com/cpx_nps1": 16}),
        (("SPX", "CPX"), "mixed", {"amd.com/spx_nps1": 1, "amd.com/cpx_nps1": 8}),
        ((None, "QPX"), "mixed", {"amd.com/gpu": 1, "amd.com/qpx_nps1": 4}),
        ((), "single", {}),
    ],
)
def test_names_follow_the_modes(modes: Sequence[str | None], naming: str, names: Mapping[str, int]) -> None:
    gpus = [of_mode(gpu, mode) for gpu, mode in zip(an_inventory(len(modes)).gpus, modes, strict=True)]
    inventory = replace(an_inventory(0), gpus=tuple(gpus))
    assert {name: len(places) for name, places in resource_names(inventory, naming).items()} == names


@pytest.fixture
def whole(desk: Desk, leases: KubeletLeases) -> WholeResource:
    return WholeResource("amd.com/gpu", desk.node, leases, by_name, "single")


async def test_a_whole_gpu_is_taken_from_everybody_else_and_comes_back(
    desk: Desk, leases: KubeletLeases, said: Said, whole: WholeResource
) -> None:
    first, second = (f"{gpu.id}-0" for gpu in desk.sysfs.inventory.gpus)
    assert states(whole, desk) == {first: True, second: True}
    await desk.node.put_slice(Request(SliceName("alice"), Compute(percent=25), GIB, on=("0",)))
    assert states(whole, desk) == {first: False, second: True}
    granted = await whole.allocate([second])
    assert await whole.allocate([second]) == granted
    assert states(whole, desk) == {first: False, second: True}
    (name,) = held(desk)
    assert desk.node.view().book.slices[SliceName(name)].request.compute.policy is ComputePolicy.WHOLE
    with pytest.raises(NoRoom):
        await desk.node.put_slice(Request(SliceName("bob"), Compute(percent=25), GIB, on=("1",)))
    with pytest.raises(NoRoom):
        await whole.allocate([first])
    said.runs("amd.com/gpu", second)
    await looks(desk, leases, 1)
    said.runs("")
    await looks(desk, leases, 2)
    assert sorted(desk.node.view().book.slices) == ["alice"]


async def test_gpus_that_are_cut_in_different_ways_are_not_offered_by_one_name(
    desk: Desk, leases: KubeletLeases, caplog: pytest.LogCaptureFixture
) -> None:
    offered = WholeResources(
        lambda name: WholeResource(name, desk.node, leases, by_name, "single"), desk.node, "single"
    )
    assert [resource.name for resource in offered.now()] == ["amd.com/gpu"]
    first, second = desk.sysfs.inventory.gpus
    desk.sysfs.inventory = replace(desk.sysfs.inventory, gpus=(first, in_mode(second, "CPX")), generation_id=2)
    await desk.node.rescan()
    assert list(offered.now()) == list(offered.now()) == []
    (text,) = [r.getMessage() for r in caplog.records if r.name == "amdvgpud.serve.kube.whole"]
    assert text.startswith("The GPUs are partitioned in different ways")
