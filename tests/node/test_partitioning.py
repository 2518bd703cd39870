"""Node cuts GPUs anew: who is asked, who is named, what is lost, and what a crash in the middle leaves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from amdvgpud.core.errors import Conflict, HostFailure, Invalid, Stale
from amdvgpud.core.model import Compute, ComputePolicy, Gpu, GpuId, Holder, Inventory, Request, slice_name
from amdvgpud.core.modes import Target, parse_targets
from amdvgpud.node import SETTLING_LOOKS, Node, Repartition
from amdvgpud.ports import KfdUser
from tests.fakes import GIB, Crash, MemoryCdi, MemoryFiles, MemoryJournal, StillModes, StillSysfs, an_inventory

FIRST = GpuId("GPU-00000000abcd0000")
SECOND = GpuId("GPU-00000000abcd0001")
CPX = Target("CPX")


@dataclass
class Bench:
    """A Node over a driver that switches at once."""

    sysfs: StillSysfs = field(default_factory=lambda: StillSysfs(an_inventory()))
    paused_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.modes = StillModes(self.sysfs)
        self.journal = MemoryJournal()
        self.files = MemoryFiles()
        self.cdi = MemoryCdi()
        self.node = self.restarted()

    def restarted(self) -> Node:
        self.node = Node(
            self.sysfs,
            self.journal,
            self.files,
            self.cdi,
            now_s=lambda: 1000.0,
            process_alive=lambda holder: True,
            modes=self.modes,
            pause=self._pause,
        )
        return self.node

    async def _pause(self, seconds: float) -> None:
        self.paused_s.append(seconds)

    def mode_of(self, gpu: GpuId) -> str | None:
        there = self.sysfs.inventory.gpu(gpu)
        return there.compute_partition if there else None

    def kinds(self) -> list[str]:
        return [event.kind for event in self.node.events_since(0)[0]]

    async def put(self, name: str, on: str = "0", compute: Compute = Compute(percent=25.0)) -> None:  # noqa: B008
        await self.node.put_slice(Request(slice_name(name), compute, 4 * GIB, on=(on,)))


@pytest.fixture
async def bench() -> Bench:
    made = Bench()
    await made.node.start()
    return made


async def test_an_idle_gpu_is_cut_and_its_partitions_can_be_given_out(bench: Bench) -> None:
    assert await bench.node.partition_gpu(FIRST, CPX) == Repartition(
        FIRST, "SPX", "CPX", partitions=8, index=1, memory="NPS1", memory_requested=None, lost=(), settled=True
    )
    assert (bench.mode_of(FIRST), bench.mode_of(SECOND)) == ("CPX", "SPX")
    await bench.put("alice", f"{FIRST}/3")
    share = bench.node.view().book.slices[slice_name("alice")].shares[0]
    assert (share.partition, share.asked_cus, share.granted_cus) == (f"{FIRST}/3", 10, 8)
    assert "gpu.partitioned" in bench.kinds()


async def test_a_gpu_that_is_in_the_mode_already_is_left_alone(bench: Bench) -> None:
    await bench.put("alice")
    done = await bench.node.partition_gpu(FIRST, Target("SPX", "NPS1"))
    assert (done.before, done.after, done.lost, done.memory_requested) == ("SPX", "SPX", (), None)
    assert (bench.modes.written, bench.modes.requested) == ([], {})


async def test_a_lease_a_process_in_a_slice_and_a_kfd_process_are_all_named_at_once(bench: Bench) -> None:
    await bench.put("held")
    await bench.put("busy")
    lease = await bench.node.grant_lease(Holder("alice's notebook"), slice=slice_name("held"))
    bench.files.run_a_process_in(slice_name("busy"), pid=77)
    bench.modes.opened[FIRST] = (KfdUser(4242, "python3"),)
    for force in (False, True):
        with pytest.raises(Conflict) as refused:
            await bench.node.partition_gpu(FIRST, CPX, force=force)
        assert refused.value.detail == (
            f"{FIRST} cannot be put into CPX: processes run in slice busy (77); "
            f"lease {lease.id} (alice's notebook) holds slice held; KFD processes have it open: 4242 (python3)"
        )
    assert bench.modes.written == []


async def test_a_process_that_has_just_ended_is_in_nobodys_way(bench: Bench) -> None:
    await bench.put("alice")
    bench.files.run_a_process_in(slice_name("alice"))
    bench.files.dead_bytes[slice_name("alice")] = 1
    assert (await bench.node.partition_gpu(FIRST, CPX, force=True)).after == "CPX"


async def test_what_is_on_another_gpu_is_in_nobodys_way(bench: Bench) -> None:
    await bench.put("alice", "1")
    bench.files.run_a_process_in(slice_name("alice"))
    bench.modes.opened[SECOND] = (KfdUser(4242, "python3"),)
    assert (await bench.node.partition_gpu(FIRST, CPX)).after == "CPX"
    assert bench.node.view().lost == {}


async def test_slices_that_nobody_uses_are_lost_only_by_force_and_come_back_with_their_mode(bench: Bench) -> None:
    await bench.put("alice")
    await bench.put("bob", "1")
    with pytest.raises(Conflict, match="the slices alice were cut for SPX and would be lost; delete them"):
        await bench.node.partition_gpu(FIRST, CPX)
    before = bench.node.view().book
    done = await bench.node.partition_gpu(FIRST, CPX, force=True)
    assert done.lost == ("alice",)
    assert set(bench.node.view().lost) == {"alice"}
    assert list(bench.cdi.published) == ["bob"]
    assert bench.node.view().book == before, "what was promised is as it was: nothing is moved"
    # Lost slices stand in nobody's way.
    assert (await bench.node.partition_gpu(FIRST, Target("SPX"))).lost == ()
    assert bench.node.view().lost == {}
    assert list(bench.cdi.published) == ["alice", "bob"]


async def test_a_dry_run_refuses_alike_and_switches_nothing(bench: Bench) -> None:
    await bench.put("alice")
    with pytest.raises(Conflict, match="would be lost"):
        await bench.node.partition_gpu(FIRST, CPX, dry_run=True)
    done = await bench.node.partition_gpu(FIRST, Target("CPX", "NPS4"), dry_run=True, force=True)
    assert (done.after, done.partitions, done.lost, done.memory_requested) == ("CPX", 8, ("alice",), "NPS4")
    assert (bench.modes.written, bench.modes.requested, bench.node.view().lost) == ([], {}, {})


async def test_a_memory_mode_is_only_noted(bench: Bench) -> None:
    await bench.put("alice")
    with pytest.raises(Invalid, match="NPS4 does not go with SPX"):
        await bench.node.partition_gpu(FIRST, Target(memory="NPS4"))
    await bench.node.delete_slice(slice_name("alice"))
    done = await bench.node.partition_gpu(FIRST, Target("CPX", "NPS4"))
    assert (done.memory, done.memory_requested) == ("NPS1", "NPS4")
    assert bench.modes.requested == {FIRST: "NPS4"}
    assert "gpu.memory-mode-requested" in bench.kinds()


async def test_a_refused_switch_notes_no_memory_mode_and_a_refused_note_says_what_was_switched(bench: Bench) -> None:
    bench.modes.refusals.append(Conflict("EBUSY"))
    with pytest.raises(Conflict, match=r"^EBUSY$"):
        await bench.node.partition_gpu(FIRST, Target("CPX", "NPS4"))
    assert (bench.mode_of(FIRST), bench.modes.requested) == ("SPX", {})

    def refuse(gpu: Any, mode: str) -> None:
        raise HostFailure("EACCES")

    bench.modes.request_memory = refuse  # type: ignore[method-assign]
    with pytest.raises(HostFailure, match=f"^{FIRST} is in CPX now; but EACCES$"):
        await bench.node.partition_gpu(FIRST, Target("CPX", "NPS4"))
    assert bench.mode_of(FIRST) == "CPX"


async def test_a_mode_that_the_gpu_does_not_have_names_those_it_has(bench: Bench) -> None:
    with pytest.raises(Invalid, match=r"TPX is no mode of .*: it has SPX, DPX, QPX, CPX"):
        await bench.node.partition_gpu(FIRST, Target("TPX"))
    bench.sysfs.inventory = Inventory(tuple(replace(g, profiles=()) for g in bench.sysfs.inventory.gpus))
    with pytest.raises(Invalid, match="cannot be partitioned: its driver offers no mode"):
        await bench.node.partition_gpu(FIRST, CPX)


async def test_an_old_picture_is_refused(bench: Bench) -> None:
    with pytest.raises(Stale, match="is at revision 0, not 7"):
        await bench.node.partition_gpu(FIRST, CPX, if_revision=7)


@pytest.mark.parametrize("refusal", [Conflict("EBUSY"), HostFailure("EIO")])
async def test_what_the_driver_refuses_is_passed_on_and_the_machine_is_read_again(
    bench: Bench, refusal: Exception
) -> None:
    reads = bench.sysfs.reads
    bench.modes.refusals.append(refusal)
    with pytest.raises(type(refusal), match=str(refusal)):
        await bench.node.partition_gpu(FIRST, CPX)
    assert bench.sysfs.reads >= reads + 3, "once before, and until two looks agree after"


async def test_a_gpu_that_does_not_come_back_loses_its_slices_and_is_said(bench: Bench) -> None:
    await bench.put("alice")
    whole = bench.sysfs.inventory

    def half_done(gpu: Any, mode: str) -> None:
        bench.sysfs.inventory = replace(whole, gpus=whole.gpus[1:], generation_id=2)

    bench.modes.set_compute = half_done  # type: ignore[method-assign]
    with pytest.raises(HostFailure, match="the driver took the switch to CPX, but the GPU is not there any more"):
        await bench.node.partition_gpu(FIRST, CPX, force=True)
    assert bench.node.view().lost == {"alice": f"{FIRST}/0 is not there"}


async def test_a_driver_that_says_yes_and_does_nothing_is_not_believed(bench: Bench) -> None:
    bench.modes.set_compute = lambda gpu, mode: None  # type: ignore[method-assign]
    with pytest.raises(HostFailure, match="took the switch to CPX, but it is in SPX"):
        await bench.node.partition_gpu(FIRST, CPX)


async def test_a_topology_that_does_not_settle_is_waited_for_in_vain_only_so_long(bench: Bench) -> None:
    class Restless(StillSysfs):
        def read_inventory(self) -> Inventory:
            self.reads += 1
            return replace(self.inventory, generation_id=self.reads)

    bench.sysfs = bench.modes.sysfs = Restless(an_inventory())
    await bench.restarted().start()
    done = await bench.node.partition_gpu(FIRST, CPX)
    assert (done.settled, len(bench.paused_s)) == (False, SETTLING_LOOKS)
    assert bench.mode_of(FIRST) == "CPX"


@pytest.mark.parametrize("written", [False, True])
async def test_a_crash_before_or_after_the_write_is_what_the_next_start_finds(bench: Bench, written: bool) -> None:
    await bench.put("alice")
    switch = bench.modes.set_compute

    def crash(gpu: Any, mode: str) -> None:
        if written:
            switch(gpu, mode)
        raise Crash

    bench.modes.set_compute = crash  # type: ignore[method-assign]
    with pytest.raises(Crash):
        await bench.node.partition_gpu(FIRST, CPX, force=True)
    bench.modes.set_compute = switch  # type: ignore[method-assign]

    await bench.restarted().start()
    assert set(bench.node.view().lost) == ({"alice"} if written else set())
    assert list(bench.cdi.published) == ([] if written else ["alice"])
    # Asking again does what is left to do, and no more.
    assert (await bench.node.partition_gpu(FIRST, CPX, force=True)).after == "CPX"
    assert bench.modes.written == [f"{FIRST} CPX"]


async def test_a_switch_by_somebody_else_is_seen_before_anything_is_decided(bench: Bench) -> None:
    gpu = bench.sysfs.inventory.gpu(FIRST)
    assert gpu is not None
    bench.modes.set_compute(gpu, "CPX")
    done = await bench.node.partition_gpu(FIRST, CPX)
    assert (done.before, done.after, done.partitions) == ("CPX", "CPX", 8)


async def test_the_configured_modes_are_given_to_idle_gpus_and_others_are_said(bench: Bench) -> None:
    await bench.put("alice", "1")
    await bench.node.apply_targets(parse_targets(["all=CPX", "0=QPX", "0000:99:00.0=CPX"]))
    assert (bench.mode_of(FIRST), bench.mode_of(SECOND)) == ("QPX", "SPX")
    assert [(e.kind, e.subject) for e in bench.node.events_since(0)[0] if e.kind.startswith("gpu.")] == [
        ("gpu.partitioned", FIRST),
        ("gpu.target-refused", SECOND),
    ]
    assert bench.node.view().lost == {}


async def test_a_whole_slice_is_not_deleted_under_a_container_that_has_its_partition(bench: Bench) -> None:
    """Such a container needs no gate, so no ledger knows of it: the KFD does."""
    await bench.node.partition_gpu(FIRST, CPX)
    whole = Request(slice_name("whole"), Compute(ComputePolicy.WHOLE), on=(f"{FIRST}/2",))
    item, _ = await bench.node.put_slice(whole)
    place = bench.node.view().inventory.partition(item.shares[0].partition)
    assert place is not None
    on_host = KfdUser(1, "rocm-smi", frozenset(p.kfd_gpu_id for p in bench.node.view().inventory.partitions))
    bench.modes.opened[FIRST] = (on_host, KfdUser(88, "vllm", frozenset({place.kfd_gpu_id})))
    with pytest.raises(Conflict, match=r"its partition is open in 88 \(vllm\)$"):
        await bench.node.delete_slice(item.name)
    bench.modes.opened[FIRST] = (on_host,)
    await bench.node.delete_slice(item.name)
    assert item.name not in bench.node.view().book.slices


async def test_whoever_of_ours_has_the_kfd_open_lets_go_for_a_switch_whatever_comes_of_it(bench: Bench) -> None:
    said: list[str] = []

    class OurChildren:
        async def let_go(self) -> None:
            said.append("let go")

        def take_up(self) -> None:
            said.append("take up")

    class Driver(StillModes):
        def set_compute(self, gpu: Gpu, mode: str) -> None:
            said.append("cut")
            super().set_compute(gpu, mode)

    bench.modes = Driver(bench.sysfs, refusals=[HostFailure("EIO")])
    bench.node = Node(
        bench.sysfs,
        bench.journal,
        bench.files,
        bench.cdi,
        now_s=lambda: 1000.0,
        process_alive=lambda holder: True,
        modes=bench.modes,
        kfd_holder=OurChildren(),
        pause=bench._pause,
    )
    await bench.node.start()
    gpu = bench.sysfs.inventory.gpus[0].id
    with pytest.raises(HostFailure, match="EIO"):
        await bench.node.partition_gpu(gpu, Target("CPX", None))
    await bench.node.partition_gpu(gpu, Target("CPX", None))
    assert said == ["let go", "cut", "take up"] * 2
