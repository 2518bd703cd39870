"""Containers over a real Node on stand-ins: what is kept, what ends with them, who may start."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from amdvgpud.assembly import WAIT_FOR_POLICY_MS, hook_call
from amdvgpud.containers import Containers, ImagePolicy
from amdvgpud.core.caps import region_of
from amdvgpud.core.containers import Container, Report, Sighting
from amdvgpud.core.errors import Conflict
from amdvgpud.core.image import Verdict
from amdvgpud.core.model import Compute, ComputePolicy, Holder, Request, SliceName, slice_name
from amdvgpud.host.cdi import HOOK_TIMEOUT_S
from amdvgpud.node import Node
from amdvgpud.settings import read_settings
from tests.fakes import GIB, MemoryCdi, MemoryFiles, MemoryJournal, StillSysfs, an_inventory

ALICE, BOB = slice_name("alice"), slice_name("bob")
ID, OTHER = "0123456789abcdef" * 4, "f" * 64
REGION = region_of(an_inventory().gpus[0].pci_address)
STATIC = Verdict(False, "/init is a static program, which loads no library")


def scope(identity: str) -> str:
    return f"/machine.slice/libpod-{identity}.scope"


@dataclass
class StillProcesses:
    """Processes that are there until they are taken away; their ends are pipes' ends."""

    there: dict[int, Sighting] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)

    def add(self, pid: int, identity: str, *slices: SliceName) -> Sighting:
        cgroup = f"{scope(identity)}/container"
        self.there[pid] = Sighting(pid, pid * 10, frozenset({0}), slices, (cgroup,), cgroup)
        return self.there[pid]

    def end(self, pid: int) -> None:
        del self.there[pid]
        if (end := self.ends.pop(pid, None)) is not None:
            os.close(end)

    def sight(self, pid: int) -> Sighting | None:
        return self.there.get(pid)

    def find(self) -> tuple[Sighting, ...]:
        return tuple(self.there.values())

    def alive(self, pid: int, ticks: int) -> bool:
        return pid in self.there and self.there[pid].start_ticks == ticks

    def watch(self, pid: int, ticks: int) -> int | None:
        if not self.alive(pid, ticks):
            return None
        watched, self.ends[pid] = os.pipe()
        return watched


@dataclass
class MemoryRecord:
    kept: tuple[Container, ...] = ()

    def load(self) -> tuple[Container, ...]:
        return self.kept

    def save(self, containers: Iterable[Container]) -> None:
        self.kept = tuple(containers)


@dataclass
class StillImages:
    verdict: Verdict = field(default_factory=lambda: Verdict(True))

    def look(self, root: int, bundle: str) -> Verdict:
        return self.verdict


@dataclass
class StillCaps:
    lacking: str | None = None
    refusing: str = ""
    in_force: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    adopted: Mapping[str, set[str]] = field(default_factory=dict)

    def lack(self) -> str | None:
        return self.lacking

    def adopt(self, caps: Mapping[str, Iterable[str]]) -> None:
        self.adopted = {cgroup: set(regions) for cgroup, regions in caps.items()}

    def lift_all(self) -> None:
        self.in_force = {}

    def apply(self, wanted: Mapping[str, Mapping[str, int]]) -> Mapping[str, str]:
        self.in_force = wanted
        return dict.fromkeys(wanted, self.refusing)


@dataclass
class Scene:
    processes: StillProcesses = field(default_factory=StillProcesses)
    record: MemoryRecord = field(default_factory=MemoryRecord)
    images: StillImages = field(default_factory=StillImages)
    caps: StillCaps = field(default_factory=StillCaps)
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    sysfs: StillSysfs = field(default_factory=lambda: StillSysfs(an_inventory()))
    now_s: float = 1000.0
    policy: ImagePolicy = ImagePolicy.SHOW
    capping: bool = True

    async def start(self) -> None:
        """Again: a daemon that was started anew."""
        self.node = Node(
            self.sysfs,
            self.journal,
            MemoryFiles(),
            MemoryCdi(),
            now_s=lambda: self.now_s,
            process_alive=lambda h: h.pid is None or self.processes.alive(h.pid, h.start_ticks or 0),
        )
        await self.node.start()
        self.containers = Containers(
            self.node,
            self.processes,
            self.record,
            self.images,
            self.caps,
            capping=self.capping,
            policy=self.policy,
            allowance_bytes=1000,
            now_s=lambda: self.now_s,
        )
        await self.containers.start()

    async def slice(self, name: SliceName, vram_gib: int = 8) -> None:
        await self.node.put_slice(Request(name, Compute(percent=25), vram_gib * GIB))

    async def begin(self, pid: int, identity: str, *slices: SliceName, uid: int = 0) -> str | None:
        self.processes.add(pid, identity, *slices)
        refusals = [await self.report("start", pid, identity, name, uid) for name in slices]
        return next((refusal for refusal in refusals if refusal), None)

    async def report(self, step: Any, pid: int, identity: str, name: SliceName, uid: int = 0) -> str | None:
        report = Report(step, name, identity, pid, "/bundle", uid)
        if step == "stop":
            await self.containers.stopped(report)
            return None
        root = os.open("/", os.O_PATH)
        try:
            return await self.containers.started(report, root)
        finally:
            os.close(root)

    def who(self, name: SliceName = ALICE) -> list[tuple[str, int]]:
        return [(c.id, c.pid) for c in self.node.view().containers.get(name, ())]

    def events(self) -> list[str]:
        return [e.kind for e in self.node.events_since(0)[0] if e.kind.partition(".")[0] in ("container", "lease")]


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    await made.start()
    await made.slice(ALICE)
    yield made
    made.containers.close()
    for pid in list(made.processes.there):
        made.processes.end(pid)


async def test_a_container_has_its_slices_from_the_report_to_the_end_of_its_first_process(scene: Scene) -> None:
    await scene.slice(BOB, 4)
    assert await scene.begin(7, ID, ALICE, BOB) is None
    assert (scene.who(), scene.who(BOB)) == ([(ID, 7)], [(ID, 7)])
    assert scene.caps.in_force == {scope(ID): {REGION: 12 * GIB + 1000}}
    scene.processes.end(7)
    await scene.report("stop", 0, ID, ALICE)
    assert (scene.who(), scene.who(BOB)) == ([], [])
    assert scene.caps.in_force == {}
    assert scene.events() == ["container.started", "container.started", "container.ended", "container.ended"]


async def test_the_end_is_seen_without_a_word_from_anybody(scene: Scene) -> None:
    await scene.begin(7, ID, ALICE)
    since = scene.node.events_since(0)[1]
    scene.processes.end(7)
    await scene.node.wait_event(since, 10)
    assert scene.who() == []


async def test_a_stop_that_is_not_true_changes_nothing(scene: Scene) -> None:
    await scene.begin(7, ID, ALICE)
    await scene.report("stop", 0, ID, ALICE, uid=1000)
    assert scene.who() == [(ID, 7)]


async def test_a_report_that_is_not_believed_is_answered_and_changes_nothing(scene: Scene) -> None:
    assert await scene.begin(7, ID, ALICE, uid=1000) is None
    assert await scene.report("start", 8, ID, ALICE) is None
    assert (scene.who(), scene.record.kept) == ([], ())


async def test_after_a_restart_they_are_there_again_with_what_was_known(scene: Scene) -> None:
    scene.images.verdict = STATIC
    await scene.begin(7, ID, ALICE)
    before = scene.node.view().containers
    scene.containers.close()
    await scene.start()
    assert scene.node.view().containers == before
    assert before[ALICE][0].gate == STATIC


async def test_after_a_restart_those_that_came_and_went_meanwhile_are_told_apart(scene: Scene) -> None:
    await scene.begin(7, ID, ALICE)
    scene.containers.close()
    scene.processes.end(7)
    scene.processes.add(9, OTHER, ALICE)
    await scene.start()
    ((found,),) = scene.node.view().containers.values()
    assert (found.id, found.pid, found.reported, found.gate.fits) == (OTHER, 9, False, None)
    assert scene.caps.in_force == {scope(OTHER): {REGION: 8 * GIB + 1000}}


async def test_one_that_no_hook_told_of_is_found_later_and_the_report_counts_if_it_comes(scene: Scene) -> None:
    scene.processes.add(7, ID, ALICE)
    await scene.containers.find()
    await scene.containers.find()
    assert scene.who() == [(ID, 7)]
    assert await scene.report("start", 7, ID, ALICE) is None
    ((one,),) = scene.node.view().containers.values()
    assert (one.reported, scene.events()) == (True, ["container.started"])


async def test_a_cap_that_was_lost_is_asked_for_again_at_each_look_and_what_became_of_it_is_shown(scene: Scene) -> None:
    await scene.begin(7, ID, ALICE)
    scene.caps.refusing = "the kernel knows no region"
    await scene.containers.look()
    assert [c.cap for c in scene.node.view().containers[ALICE]] == ["the kernel knows no region"]
    scene.caps.lacking = "no dmem controller"
    await scene.containers.look()
    assert [c.cap for c in scene.node.view().containers[ALICE]] == ["no dmem controller"]


async def test_a_resized_slice_has_another_cap_at_the_next_look(scene: Scene) -> None:
    await scene.begin(7, ID, ALICE)
    await scene.node.resize_slice(ALICE, 4 * GIB)
    await scene.containers.look()
    assert scene.caps.in_force == {scope(ID): {REGION: 4 * GIB + 1000}}


async def test_the_cap_of_a_container_that_runs_outlives_its_slice_and_the_daemon(scene: Scene) -> None:
    cap = {scope(ID): {REGION: 8 * GIB + 1000}}
    await scene.begin(7, ID, ALICE)
    await scene.node.delete_slice(ALICE, force=True)
    await scene.containers.look()
    assert (scene.who(), scene.caps.in_force) == ([], cap)
    scene.containers.close()
    await scene.start()
    assert scene.caps.in_force == cap
    scene.now_s += 10
    await scene.slice(ALICE, vram_gib=2)  # another one of the name
    await scene.containers.look()
    assert (scene.who(), scene.caps.in_force) == ([], cap)
    scene.processes.end(7)
    await scene.containers.look()
    assert scene.caps.in_force == {}


async def test_nobody_takes_the_place_of_a_container_that_runs(scene: Scene) -> None:
    """Whose cgroup names no container can say any id."""
    await scene.begin(7, ID, ALICE)
    liar = Sighting(8, 80, frozenset({1000}), (ALICE,), ("/user.slice",), "/user.slice")
    scene.processes.there[8] = liar
    assert await scene.report("start", 8, ID, ALICE, uid=1000) is None
    assert (scene.who(), list(scene.caps.in_force)) == ([(ID, 7)], [scope(ID)])


async def test_a_gpu_that_is_not_seen_for_a_moment_takes_no_cap_away(scene: Scene) -> None:
    await scene.begin(7, ID, ALICE)
    before = scene.caps.in_force
    scene.sysfs.inventory = an_inventory(0)
    await scene.node.rescan()
    await scene.containers.look()
    assert (scene.caps.in_force, before) == (before, {scope(ID): {REGION: 8 * GIB + 1000}})


async def test_on_cgroup_v1_there_is_nothing_to_cap(scene: Scene) -> None:
    """Its paths name the container, and lead nowhere in the tree that has the controller."""
    seen = scene.processes.add(7, ID, ALICE)
    scene.processes.there[7] = replace(seen, unified=None)
    assert await scene.report("start", 7, ID, ALICE) is None
    assert [(c.id, c.cgroup, c.cap) for c in scene.node.view().containers[ALICE]] == [
        (ID, None, "it has no cgroup of its own")
    ]


async def test_caps_that_are_not_wanted_any_more_are_lifted_after_a_restart(scene: Scene) -> None:
    await scene.begin(7, ID, ALICE)
    scene.containers.close()
    scene.capping = False
    await scene.start()
    assert scene.caps.adopted == {scope(ID): {REGION}}
    assert scene.caps.in_force == {}
    assert [c.cap for c in scene.node.view().containers[ALICE]] == [None]


async def test_a_start_does_not_wait_for_a_node_that_is_at_work(scene: Scene) -> None:
    """A partition switch takes seconds; the cap is there before the answer, and the Node hears of it afterwards."""
    working = asyncio.Event()

    async def at_work() -> None:
        await working.wait()

    change = asyncio.create_task(scene.node._change(at_work()))
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        assert await scene.begin(7, ID, ALICE) is None
    assert (scene.who(), list(scene.caps.in_force)) == ([], [scope(ID)])
    working.set()
    await change
    async with asyncio.timeout(20):
        while not scene.who():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("policy", "verdict", "refusing", "starts"),
    [
        (ImagePolicy.SHOW, STATIC, "", True),
        (ImagePolicy.REFUSE, STATIC, "", False),
        (ImagePolicy.REFUSE, Verdict(None, "its image was not looked into"), "", False),
        (ImagePolicy.REFUSE, Verdict(True), "no cap", True),
        (ImagePolicy.DMEM, STATIC, "", True),
        (ImagePolicy.DMEM, STATIC, "no cap", False),
        (ImagePolicy.DMEM, Verdict(True), "no cap", True),
    ],
)
async def test_the_policy_says_what_becomes_of_an_image_that_the_gate_cannot_get_into(
    policy: ImagePolicy, verdict: Verdict, refusing: str, starts: bool
) -> None:
    scene = Scene(images=StillImages(verdict), caps=StillCaps(refusing=refusing), policy=policy)
    await scene.start()
    await scene.slice(ALICE)
    refusal = await scene.begin(7, ID, ALICE)
    assert (refusal is None, scene.who()) == (starts, [(ID, 7)] if starts else [])
    if refusal is not None:
        assert refusal.startswith(
            f"slice alice would not be enforced: {verdict.reason} (images.policy is {policy.value!r}"
        )
        assert scene.caps.in_force == {}
    scene.containers.close()


@pytest.mark.parametrize("policy", ImagePolicy)
async def test_a_report_that_is_not_believed_stops_its_own_container_where_a_policy_may_refuse(
    policy: ImagePolicy,
) -> None:
    scene = Scene(policy=policy)
    await scene.start()
    await scene.slice(ALICE)
    refusal = await scene.containers.started(Report("start", ALICE, ID, 7, "/b", 0), None)
    assert scene.who() == []
    if policy is ImagePolicy.SHOW:
        assert refusal is None
    else:
        assert refusal == (
            "slice alice would not be enforced: the report of it is not believed: there is no process 7 on this "
            f"machine (images.policy is {policy.value!r})"
        )
    scene.containers.close()


async def test_a_slice_with_nothing_to_hold_takes_any_image() -> None:
    scene = Scene(images=StillImages(STATIC), policy=ImagePolicy.REFUSE)
    await scene.start()
    await scene.node.put_slice(Request(ALICE, Compute(ComputePolicy.WHOLE)))
    assert await scene.begin(7, ID, ALICE) is None
    scene.containers.close()


async def test_a_slice_that_a_container_has_is_not_deleted_until_its_process_has_ended(scene: Scene) -> None:
    await scene.begin(7, ID, ALICE)
    with pytest.raises(Conflict, match="container 0123456789ab \\(pid 7\\) has it"):
        await scene.node.delete_slice(ALICE)
    scene.processes.there.pop(7)
    await scene.node.delete_slice(ALICE)
    assert scene.who() == []


async def test_another_slice_of_the_name_is_not_the_containers(scene: Scene) -> None:
    await scene.begin(7, ID, ALICE)
    await scene.node.delete_slice(ALICE, force=True)
    scene.now_s += 10
    await scene.slice(ALICE)
    await scene.containers.look()
    assert scene.who() == []


# ----------------------------------------------------------------------------------------------- leases for containers


async def test_a_lease_for_a_container_waits_for_it_and_ends_with_the_last(scene: Scene) -> None:
    lease = await scene.node.grant_lease(Holder("job"), slice=ALICE, container=True)
    await scene.node.tick()
    assert scene.node.view().book.leases[lease.id].holder == Holder("job")
    await scene.begin(7, ID, ALICE)
    assert scene.node.view().book.leases[lease.id].holder == Holder("job", 7, 70)
    await scene.begin(9, OTHER, ALICE)
    scene.processes.end(7)
    await scene.node.tick()  # before anybody looked
    await scene.containers.look()
    assert scene.node.view().book.leases[lease.id].holder == Holder("job", 9, 90)
    scene.processes.end(9)
    await scene.containers.look()
    assert scene.node.view().book.leases == {}
    assert scene.events()[-1] == "lease.container-ended"


async def test_a_lease_ends_though_its_container_ended_while_no_daemon_ran(scene: Scene) -> None:
    await scene.node.grant_lease(Holder("job"), slice=ALICE, container=True)
    await scene.begin(7, ID, ALICE)
    scene.containers.close()
    scene.processes.end(7)
    await scene.start()
    await scene.containers.look()
    await scene.node.tick()
    assert scene.node.view().book.leases == {}


async def test_an_ephemeral_slice_goes_with_the_container_that_its_lease_was_for(scene: Scene) -> None:
    request = Request(BOB, Compute(percent=10), GIB)
    await scene.node.grant_lease(Holder("job"), request=request, container=True)
    await scene.begin(7, ID, BOB)
    scene.processes.end(7)
    await scene.containers.look()
    assert set(scene.node.view().book.slices) == {ALICE}


async def test_a_lease_that_is_granted_while_a_container_has_the_slice_is_that_ones(scene: Scene) -> None:
    await scene.begin(7, ID, ALICE)
    lease = await scene.node.grant_lease(Holder("job"), slice=ALICE, container=True)
    assert (lease.holder.pid, lease.container) == (7, True)


async def test_leases_of_other_kinds_do_not_mind_containers(scene: Scene) -> None:
    lease = await scene.node.grant_lease(Holder("job"), slice=ALICE)
    await scene.begin(7, ID, ALICE)
    scene.processes.end(7)
    await scene.containers.look()
    assert scene.node.view().book.leases == {lease.id: replace(lease)}


# ------------------------------------------------------------------------------------------- what the hook is told


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({}, ()),
        ({"hook.required": "true"}, ("--wait", "5000", "--require")),
        ({"images.policy": "refuse"}, ("--wait", "5000", "--judged")),
        ({"images.policy": "dmem", "hook.required": "true"}, ("--wait", "5000", "--judged", "--require")),
    ],
)
def test_the_hook_is_told_to_insist_where_a_policy_may_refuse(
    flags: dict[str, str], told: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "amdvgpud.toml").touch()
    call = hook_call(read_settings({}, flags, tmp_path / "amdvgpud.toml"), None)
    assert call is not None
    assert call.arguments == told
    assert WAIT_FOR_POLICY_MS < HOOK_TIMEOUT_S * 1000, "else the runtime says only that it has ended a hook"
