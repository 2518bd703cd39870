"""Guard: one owner of the kernel's figures, over stand-in ports and a clock of its own."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from amdvgpud.core.containers import Container
from amdvgpud.core.errors import HostFailure, Lingering
from amdvgpud.core.model import (
    Compute,
    ComputePolicy,
    GpuUsage,
    Holder,
    PartitionId,
    ProcessUsage,
    Request,
    SliceName,
    Usage,
    slice_name,
)
from amdvgpud.core.truth import Belonging, GpuTruth, KernelPicture, KernelProcess
from amdvgpud.core.watchdog import Policy, Reason, Rules, Step
from amdvgpud.guard import Guard, GuardView, Leftovers
from amdvgpud.node import Node
from tests.fakes import (
    GIB,
    MemoryCdi,
    MemoryFiles,
    MemoryJournal,
    StillEnder,
    StillFigures,
    StillSysfs,
    a_gpu,
    an_inventory,
)

MIB = 1 << 20
ALICE = slice_name("alice")
FIRST = a_gpu(0).partitions[0].id


@dataclass
class Bench:
    """A node with alice on its first GPU, a guard, and the hands on the kernel's figures and the clock."""

    rules: Rules = field(default_factory=lambda: Rules(Policy.KILL, 10 * MIB, 60, 10))
    now_s: float = 1000.0

    def __post_init__(self) -> None:
        self.files = MemoryFiles()
        self.figures = StillFigures(KernelPicture(0.0, ()))
        self.ender = StillEnder()
        self.left = Leftovers(self.figures)
        self.node = Node(
            StillSysfs(an_inventory()),
            MemoryJournal(),
            self.files,
            MemoryCdi(),
            now_s=lambda: self.now_s,
            process_alive=lambda holder: True,
            leftovers=self.left,
        )
        self.guard = Guard(
            self.node,
            self.figures,
            self.ender,
            lambda: self.rules,
            now_s=lambda: self.now_s,
            monotonic_s=lambda: self.now_s,
            left=self.left,
        )

    async def start(self) -> None:
        await self.node.start()
        await self.node.put_slice(Request(ALICE, Compute(ComputePolicy.BALANCED, percent=25), 4 * GIB, on=("0",)))

    def has(self, *processes: KernelProcess, used: Mapping[int, int] | None = None) -> None:
        """``used``: VRAM of each GPU by index, as its driver says."""
        totals = {a_gpu(i).id: n for i, n in (used or {}).items()}
        self.figures.picture = KernelPicture(self.now_s, processes, totals)

    def ledger(self, *slots: tuple[int, int]) -> None:
        """Slots of alice's ledger as (start time, bytes on the first GPU), all of pid 7."""
        processes = tuple(ProcessUsage(i, 7, start, 900, {1000: n}) for i, (start, n) in enumerate(slots))
        self.files.usages[ALICE] = Usage(ALICE, (GpuUsage(1000, sum(n for _, n in slots), 0, 0, 0, 0, 0),), processes)

    async def look_after(self, seconds: float) -> GuardView:
        self.now_s += seconds
        self.figures.picture = replace(self.figures.picture, time_s=self.now_s)
        await self.guard.sample()
        return self.guard.view()

    def told(self) -> list[str]:
        events, _, _ = self.node.events_since(0)
        return [e.kind for e in events if e.kind.startswith("watchdog.")]


def rogue(vram_bytes: int, *, pid: int = 50, evicted_ms: int | None = None, inside: bool = True) -> KernelProcess:
    """A process of alice's (or of nobody's) that started at tick ``pid``."""
    return KernelProcess(
        pid,
        pid,
        7,
        900,
        "miner",
        Belonging((ALICE,)) if inside else Belonging(),
        {1000: vram_bytes},
        evicted_ms={} if evicted_ms is None else {1000: evicted_ms},
    )


@pytest.fixture
async def bench() -> Bench:
    made = Bench()
    await made.start()
    return made


async def test_before_the_first_look_nothing_is_claimed(bench: Bench) -> None:
    assert bench.guard.view() == GuardView()


async def test_a_look_shows_what_no_ledger_has(bench: Bench) -> None:
    bench.has(rogue(9 * MIB), used={0: GIB})
    bench.ledger((50, 5 * MIB))
    view = await bench.look_after(1)
    assert view.comparison is not None
    assert view.comparison.slices[ALICE].gpus == {FIRST: GpuTruth(9 * MIB, 4 * MIB, None)}
    assert (view.last_success_s, view.suspicions, view.looked) == (bench.now_s, (), True)


async def test_a_look_is_also_at_what_is_counted_for_the_containers_own_cgroups(bench: Bench) -> None:
    scope = f"/machine.slice/libpod-{'a' * 64}.scope"
    one = Container(ALICE, "a" * 64, 7, 70, f"{scope}/container", None, 0.0, reported=True)
    await bench.node.set_containers({ALICE: (one, replace(one, id="b" * 64, cgroup="/user.slice"))})
    await bench.look_after(1)
    assert set(bench.figures.cgroups) == {scope}


async def test_a_look_without_a_list_of_processes_says_why_and_keeps_the_time_of_the_last_good_one(
    bench: Bench,
) -> None:
    await bench.look_after(1)
    bench.figures.picture = KernelPicture(0.0, None, reasons=("no KFD here",))
    view = await bench.look_after(1)
    assert (view.comparison, view.last_success_s, view.warnings) == (None, bench.now_s - 1, ("no KFD here",))


async def test_a_charge_that_was_withdrawn_while_the_kernel_was_asked_still_counts(bench: Bench) -> None:
    """The process freed after the kernel had been read: its ledger is the smaller one by then, and it is no rogue."""
    bench.ledger((50, 90 * MIB))

    class Freed(StillFigures):
        def read(self, inventory: object, cgroups: object = ()) -> KernelPicture:
            bench.ledger((50, 0))
            return KernelPicture(0.0, (rogue(90 * MIB),))

    bench.guard._figures = Freed()
    view = await bench.look_after(1)
    assert view.comparison is not None
    assert view.comparison.slices[ALICE].gpus[FIRST].untracked_bytes == 0


async def test_a_ledger_that_claims_more_than_its_quota_hides_nobody(bench: Bench) -> None:
    bench.ender.living[(50, 50)] = ALICE
    await bench.look_after(0)
    bench.has(rogue(150 * GIB))
    bench.ledger((50, 150 * GIB))
    for _ in range(9):
        view = await bench.look_after(10)
    assert view.comparison is not None
    assert view.comparison.slices[ALICE].gpus[FIRST] == GpuTruth(150 * GIB, 146 * GIB, None)
    assert [number for _, number in bench.ender.sent] == [signal.SIGTERM, signal.SIGKILL]


async def test_what_came_in_under_a_larger_quota_is_held_against_nobody(bench: Bench) -> None:
    bench.has(rogue(4 * GIB))
    bench.ledger((50, 4 * GIB))
    await bench.look_after(0)
    await bench.node.resize_slice(ALICE, 1 * GIB)
    for _ in range(9):
        view = await bench.look_after(10)
    assert (view.suspicions, bench.ender.sent) == ((), [])
    bench.has()
    bench.ledger()
    await bench.look_after(10)  # nobody is left from then, so that from here on the new quota counts
    bench.has(rogue(4 * GIB))
    bench.ledger((50, 4 * GIB))
    view = await bench.look_after(10)
    assert [s.untracked_bytes for s in view.suspicions] == [3 * GIB]


async def test_what_a_ledger_had_before_this_daemon_came_is_held_against_nobody(bench: Bench) -> None:
    bench.has(rogue(5 * GIB))
    bench.ledger((50, 5 * GIB))
    view = await bench.look_after(0)
    assert view.suspicions == ()
    bench.has(rogue(6 * GIB))
    bench.ledger((50, 6 * GIB))
    view = await bench.look_after(10)
    assert [s.untracked_bytes for s in view.suspicions] == [1 * GIB]


async def test_a_process_without_a_slot_is_told_of_then_asked_to_end_then_ended(bench: Bench) -> None:
    bench.has(rogue(GIB))
    bench.ender.living[50, 50] = ALICE
    for seconds in (0, 30, 30, 5, 5, 10, 10):
        await bench.look_after(seconds)
    assert bench.ender.sent == [(50, signal.SIGTERM), (50, signal.SIGKILL)]
    assert bench.told() == ["watchdog.unmanaged", "watchdog.ended", "watchdog.ended", "watchdog.survived"]
    view = bench.guard.view()
    assert (view.findings, view.signals) == (
        {Reason.UNMANAGED: 1, Reason.UNTRACKED: 0},
        {Step.TERMINATE: 1, Step.KILL: 1},
    )
    bench.has()
    assert (await bench.look_after(1)).suspicions == ()


@pytest.mark.parametrize(("policy", "warned"), [(Policy.OBSERVE, 0), (Policy.WARN, 1)])
async def test_nobody_is_ended_where_that_is_not_the_policy(policy: Policy, warned: int) -> None:
    bench = Bench(Rules(policy, 10 * MIB, 60, 10))
    await bench.start()
    bench.has(rogue(GIB))
    bench.ledger((50, MIB))
    bench.ender.living[50, 50] = ALICE
    for _ in range(5):
        await bench.look_after(60)
    assert (bench.ender.sent, bench.told()) == ([], ["watchdog.untracked"])
    assert len(bench.guard.view().warnings) == warned


async def test_a_pid_that_is_another_process_s_by_now_is_left_alone(bench: Bench) -> None:
    bench.has(rogue(GIB))
    bench.ender.living[50, 51] = ALICE
    for seconds in (0, 60, 10, 10, 10):
        await bench.look_after(seconds)
    assert (bench.ender.sent, bench.told()) == ([], ["watchdog.unmanaged", "watchdog.survived"])


async def test_a_process_of_no_slice_is_never_touched(bench: Bench) -> None:
    bench.has(rogue(GIB, inside=False))
    for seconds in (0, 60, 10, 10):
        view = await bench.look_after(seconds)
    assert (bench.ender.sent, bench.told()) == ([], [])
    assert view.comparison is not None
    assert [p.pid for p in view.comparison.strangers] == [50]


async def test_what_the_daemon_may_not_end_is_said(bench: Bench) -> None:
    bench.has(rogue(GIB))
    bench.ender.refusal = HostFailure("needs CAP_KILL")
    for seconds in (0, 60, 10):
        await bench.look_after(seconds)
    assert bench.told() == ["watchdog.unmanaged", "watchdog.powerless"]


async def test_evictions_count_on_when_a_process_ends_and_end_with_their_slice(bench: Bench) -> None:
    def evicted(view: GuardView) -> dict[tuple[SliceName, PartitionId], float]:
        return dict(view.evicted_s)

    bench.has(rogue(1, evicted_ms=1500), rogue(1, pid=51, evicted_ms=500))
    assert evicted(await bench.look_after(1)) == {(ALICE, FIRST): 2.0}
    bench.has(rogue(1, pid=51, evicted_ms=700), rogue(1, pid=52, evicted_ms=100))
    assert evicted(await bench.look_after(1)) == {(ALICE, FIRST): 2.3}
    bench.has()
    assert evicted(await bench.look_after(1)) == {(ALICE, FIRST): 2.3}
    await bench.node.delete_slice(ALICE)
    assert bench.guard.view() == replace(bench.guard.view(), evicted_s={}, suspicions=())
    assert evicted(await bench.look_after(1)) == {}


async def test_what_is_shown_of_a_slice_ends_with_it(bench: Bench) -> None:
    bench.has(rogue(GIB))
    await bench.look_after(1)
    await bench.node.delete_slice(ALICE)
    view = bench.guard.view()
    assert view.comparison is not None
    assert (dict(view.comparison.slices), view.suspicions) == ({}, ())


# ------------------------------------------------------------------------------------------------ before a grant


def whole(name: str, *on: str) -> Request:
    return Request(SliceName(name), Compute(ComputePolicy.WHOLE), on=on)


async def test_a_whole_gpu_on_which_somebody_still_is_is_held_back_with_the_reason(bench: Bench) -> None:
    stranger = KernelProcess(60, 60, 60, 0, "python3", vram_bytes={1001: 5 * MIB, 1000: 0})
    bench.has(stranger)
    with pytest.raises(Lingering, match=rf"60 \(python3\), with {5 * MIB} bytes of VRAM"):
        await bench.node.put_slice(whole("bob", "1"))
    with pytest.raises(Lingering):
        await bench.node.plan(whole("bob", "1"))
    bench.has(replace(stranger, vram_bytes={1001: 0, 1000: 0}))  # a process of the host that only has all open
    made, _ = await bench.node.put_slice(whole("bob", "1"))
    assert made.name == "bob"


async def test_a_whole_slice_that_is_there_already_is_handed_on_clean_too(bench: Bench) -> None:
    await bench.node.put_slice(whole("bob", "1"))
    stranger = KernelProcess(60, 60, 60, 0, "python3", vram_bytes={1001: 5 * MIB, 1000: 0})
    bench.has(stranger)
    with pytest.raises(Lingering, match=rf"bob has whole .*: KFD .* 60 \(python3\), with {5 * MIB} bytes"):
        await bench.node.grant_lease(Holder("job"), slice=SliceName("bob"))
    bench.has(replace(stranger, belonging=Belonging((SliceName("bob"),))))  # a container that has it already
    with pytest.raises(Lingering, match="60"):  # somebody's whose lease has ended
        await bench.node.grant_lease(Holder("job"), slice=SliceName("bob"))
    await bench.node.grant_lease(Holder("job"), slice=SliceName("bob"), container=True)


async def test_a_part_of_a_gpu_is_leased_beside_anybody(bench: Bench) -> None:
    bench.has(rogue(MIB, inside=False))
    await bench.node.grant_lease(Holder("job"), slice=ALICE)


async def test_a_whole_gpu_is_taken_from_those_that_are_clean(bench: Bench) -> None:
    await bench.node.delete_slice(ALICE)
    bench.has(rogue(MIB, inside=False))  # on the first GPU, which would be the choice
    made, _ = await bench.node.put_slice(whole("bob"))
    assert [s.partition for s in made.shares] == [a_gpu(1).partitions[0].id]
    with pytest.raises(Lingering, match="miner"):
        await bench.node.put_slice(whole("carol"))


async def test_one_look_serves_all_gpus_of_a_plan(bench: Bench) -> None:
    """It is taken while nothing else can change."""
    await bench.node.delete_slice(ALICE)
    before = bench.figures.looks
    plan = await bench.node.plan(replace(whole("bob"), gpu_count=2))
    assert (len(plan.shares), bench.figures.looks - before) == (2, 1)


async def test_who_was_given_only_this_gpu_is_there_even_without_vram(bench: Bench) -> None:
    bench.has(KernelProcess(60, 60, 60, 0, "python3", vram_bytes={1001: 0}))
    with pytest.raises(Lingering, match="60"):
        await bench.node.put_slice(whole("bob", "1"))


async def test_a_part_of_a_gpu_is_granted_beside_anybody(bench: Bench) -> None:
    bench.has(KernelProcess(60, 60, 60, 0, "python3", vram_bytes={1001: GIB}))
    await bench.node.put_slice(Request(SliceName("bob"), Compute(ComputePolicy.BALANCED, percent=25), GIB, on=("1",)))


async def test_vram_that_nobody_has_any_more_holds_a_whole_gpu_back_until_it_is_back_to_normal(bench: Bench) -> None:
    user = KernelProcess(60, 60, 60, 0, "python3", vram_bytes={1001: 4 * GIB})
    bench.has(used={1: 300 * MIB})
    await bench.look_after(1)
    bench.has(user, used={1: 4 * GIB + 400 * MIB})
    await bench.look_after(1)
    bench.has(used={1: 3 * GIB})
    await bench.look_after(1)
    with pytest.raises(Lingering, match=rf"{3 * GIB - 300 * MIB} bytes of VRAM are held by nobody"):
        await bench.node.put_slice(whole("bob", "1"))
    bench.has(used={1: 310 * MIB})
    await bench.node.put_slice(whole("bob", "1"))


async def test_vram_that_stays_is_taken_for_normal_after_a_while(bench: Bench) -> None:
    bench.has(used={1: 300 * MIB})
    await bench.look_after(1)
    bench.has(KernelProcess(60, 60, 60, 0, "x", vram_bytes={1001: GIB}), used={1: 2 * GIB})
    await bench.look_after(1)
    bench.has(used={1: 2 * GIB})
    await bench.look_after(1)
    with pytest.raises(Lingering):
        await bench.node.plan(whole("bob", "1"))
    await bench.look_after(300)
    await bench.node.plan(whole("bob", "1"))


async def test_a_desktop_that_grows_on_an_unused_gpu_holds_nothing_back(bench: Bench) -> None:
    for used in (300 * MIB, 3 * GIB):
        bench.has(used={1: used})
        await bench.look_after(1)
    await bench.node.plan(whole("bob", "1"))


async def test_what_cannot_be_seen_holds_nothing_back(bench: Bench) -> None:
    bench.figures.picture = KernelPicture(0.0, None)
    await bench.node.put_slice(whole("bob", "1"))
