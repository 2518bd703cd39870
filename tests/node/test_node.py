"""Node: one owner of the Book, over stand-in ports."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field, replace

import pytest

from amdvgpud.core.errors import Conflict, HostFailure, Invalid, NoRoom, NotFound, Stale
from amdvgpud.core.health import Condition, Health
from amdvgpud.core.model import (
    Book,
    Compute,
    ComputePolicy,
    Gone,
    GpuId,
    Holder,
    Inventory,
    Lease,
    LeaseId,
    Request,
    Slice,
    SliceName,
    Unusable,
    Usage,
    slice_name,
)
from amdvgpud.node import Node
from tests.fakes import GIB, Crash, Faults, MemoryCdi, MemoryFiles, MemoryJournal, StillSysfs, a_gpu, an_inventory

ALICE = slice_name("alice")
BOB = slice_name("bob")


@dataclass
class Bench:
    """A Node on stand-ins, with the hands on its clock and on what goes wrong."""

    sysfs: StillSysfs = field(default_factory=lambda: StillSysfs(an_inventory()))
    faults: Faults = field(default_factory=Faults)
    now_s: float = 1000.0
    dead: set[int] = field(default_factory=set)
    max_slices: int = 64

    def __post_init__(self) -> None:
        self.journal = MemoryJournal(faults=self.faults)
        self.files = MemoryFiles(self.faults)
        self.cdi = MemoryCdi(self.faults)
        self.node = self.restarted()

    def restarted(self) -> Node:
        """A second daemon on what the first has left behind."""
        self.node = Node(
            self.sysfs,
            self.journal,
            self.files,
            self.cdi,
            now_s=lambda: self.now_s,
            process_alive=lambda holder: holder.pid not in self.dead,
            max_slices_per_partition=self.max_slices,
        )
        return self.node

    async def put_alice_and_delete_bob(self) -> None:
        await self.node.put_slice(quarter())
        await self.node.delete_slice(BOB)

    def everything(self) -> tuple[set[SliceName], set[SliceName], set[SliceName], tuple[SliceName, ...]]:
        """The slices as Book, journal, files and CDI have them: four accounts of one truth."""
        return (
            set(self.node.view().book.slices),
            set(self.journal.stored.slices),
            set(self.files.names()),
            self.cdi.published,
        )


@pytest.fixture
async def bench() -> Bench:
    made = Bench()
    await made.node.start()
    made.faults.done.clear()
    return made


def quarter(name: SliceName = ALICE, vram_bytes: int | None = 16 * GIB, **more: object) -> Request:
    return replace(Request(name, Compute(percent=25.0), vram_bytes), **more)  # type: ignore[arg-type]


async def test_a_grant_goes_to_journal_then_files_then_cdi(bench: Bench) -> None:
    item, new = await bench.node.put_slice(quarter())
    assert new
    assert bench.faults.done == ["commit", "write alice", "publish"]
    assert (item.revision, item.created_s, item.shares[0].vram_bytes) == (1, 1000.0, 16 * GIB)
    assert bench.everything() == ({ALICE}, {ALICE}, {ALICE}, (ALICE,))


@pytest.mark.parametrize("step", ["commit", "write alice", "publish"])
async def test_a_grant_that_fails_at_any_step_leaves_nothing(bench: Bench, step: str) -> None:
    bench.faults.failing.add(step)
    with pytest.raises(HostFailure, match="no luck"):
        await bench.node.put_slice(quarter())
    assert bench.everything() == (set(), set(), set(), ())
    assert bench.journal.stored.revision == 0


@pytest.mark.parametrize(
    ("step", "survives"), [("commit", False), ("write alice", True), ("publish", True), ("remove bob", True)]
)
async def test_a_crash_before_any_step_is_repaired_at_the_next_start(bench: Bench, step: str, survives: bool) -> None:
    await bench.node.put_slice(quarter(BOB))
    bench.faults.crashing.add(step)
    with pytest.raises(Crash):
        await bench.put_alice_and_delete_bob()

    await bench.restarted().start()
    book, journal, files, published = bench.everything()
    assert book == journal == files == set(published)
    assert (ALICE in book, BOB in book) == (survives, step != "remove bob")


@pytest.mark.parametrize("nested", [False, True])
async def test_a_directory_that_will_not_go_away_does_not_undo_a_deletion(bench: Bench, nested: bool) -> None:
    await bench.node.put_slice(quarter())
    bench.faults.failing.add("remove alice")
    if nested:
        bench.faults.error = RecursionError
    await bench.node.delete_slice(ALICE)
    assert bench.everything() == (set(), set(), {ALICE}, ())
    await bench.node.rescan()
    assert bench.everything() == (set(), set(), set(), ())


async def test_a_stray_directory_that_will_not_go_away_does_not_keep_the_daemon_from_starting(bench: Bench) -> None:
    bench.files.written[BOB] = bench.node._placed(quarter(BOB), 0)
    bench.faults.failing.add("remove bob")
    node = bench.restarted()
    await node.start()
    assert node.view().ready


async def test_a_fault_that_nobody_foresaw_leaves_disk_and_memory_alike(bench: Bench) -> None:
    bench.files.broken = ZeroDivisionError("nobody foresaw it")
    with pytest.raises(ZeroDivisionError):
        await bench.node.put_slice(quarter())
    assert bench.everything() == (set(), set(), set(), ())


async def test_a_slice_whose_files_could_not_be_written_is_not_offered_until_they_can(bench: Bench) -> None:
    await bench.node.put_slice(quarter())
    bench.faults.failing.add("write alice")
    bench.sysfs.inventory = replace(bench.sysfs.inventory, generation_id=2)
    await bench.node.rescan()
    assert bench.node.view().lost == {ALICE: "its files could not be written: write alice: no luck"}
    await bench.node.put_slice(quarter(BOB))
    assert bench.everything()[3] == (BOB,)
    bench.faults.failing.add("write alice")
    await bench.node.rescan()
    await bench.node.rescan()
    assert bench.everything()[3] == (ALICE, BOB)
    assert [e.kind for e in bench.node.events_since(0)[0] if e.subject == ALICE] == [
        "slice.created",
        "slice.lost",
        "slice.returned",
    ]


async def test_a_scan_that_failed_is_said_until_one_has_worked(bench: Bench) -> None:
    bench.sysfs.broken = OSError("no sysfs today")
    with pytest.raises(OSError, match="no sysfs today"):
        await bench.node.rescan()
    assert bench.node.view().warnings == ("The last scan of the machine failed: no sysfs today",)
    bench.sysfs.broken = None
    await bench.node.rescan()
    assert bench.node.view().warnings == ()


async def test_promises_that_a_smaller_partition_cannot_keep_are_said_until_they_are_mended(bench: Bench) -> None:
    await bench.node.put_slice(quarter(on=("0",), vram_bytes=96 * GIB))
    gpu = a_gpu(0)
    smaller = replace(gpu.partitions[0], vram_bytes=48 * GIB)  # another memory mode
    bench.sysfs.inventory = Inventory((replace(gpu, partitions=(smaller,)),))
    await bench.node.rescan()
    (warning,) = bench.node.view().warnings
    assert warning == f"{smaller.id}: 96 GiB of VRAM promised of 48 GiB (alice)"
    await bench.node.resize_slice(ALICE, 48 * GIB)
    assert bench.node.view().warnings == ()


async def test_the_same_request_again_changes_nothing(bench: Bench) -> None:
    first, _ = await bench.node.put_slice(quarter())
    bench.faults.done.clear()
    assert await bench.node.put_slice(quarter()) == (first, False)
    assert bench.faults.done == []


async def test_a_place_is_kept_by_an_id_that_lasts_and_asked_for_again_by_any_name(bench: Bench) -> None:
    item, _ = await bench.node.put_slice(replace(quarter(), on=("0",)))
    gpu = bench.node.view().inventory.gpus[0]
    assert item.request.on == (gpu.id,)
    assert await bench.node.put_slice(replace(quarter(), on=(gpu.pci_address,))) == (item, False)


async def test_another_request_of_the_same_name_replaces_the_slice_with_new_files(bench: Bench) -> None:
    await bench.node.put_slice(quarter())
    bench.faults.done.clear()
    item, new = await bench.node.put_slice(quarter(vram_bytes=32 * GIB))
    assert (new, item.shares[0].vram_bytes) == (False, 32 * GIB)
    assert bench.faults.done == ["commit", "remove alice", "write alice", "publish"]


async def test_a_slice_in_use_is_neither_replaced_nor_deleted(bench: Bench) -> None:
    await bench.node.put_slice(quarter())
    bench.files.run_a_process_in(ALICE, pid=4321)
    with pytest.raises(Conflict, match="alice cannot be replaced: 1 processes run in it \\(pids 4321\\)"):
        await bench.node.put_slice(quarter(vram_bytes=GIB))
    with pytest.raises(Conflict, match="cannot be deleted"):
        await bench.node.delete_slice(ALICE)
    await bench.node.delete_slice(ALICE, force=True)
    assert bench.everything() == (set(), set(), set(), ())


async def test_a_slice_that_is_deleted_while_it_is_asked_about_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.node.put_slice(quarter())
    usage, asked, go_on = bench.files.usage, threading.Event(), threading.Event()

    def slowly(name: SliceName) -> Usage:
        found = usage(name)
        asked.set()
        go_on.wait(10)
        return found

    monkeypatch.setattr(bench.files, "usage", slowly)
    asking = asyncio.create_task(bench.node.refuse_if_occupied(ALICE, "freed"))
    await asyncio.to_thread(asked.wait, 10)
    await bench.node.delete_slice(ALICE, force=True)
    go_on.set()
    await asking
    assert ALICE not in bench.node.view().usage


async def test_deleting_withdraws_the_cdi_device_before_the_files(bench: Bench) -> None:
    await bench.node.put_slice(quarter())
    bench.faults.done.clear()
    await bench.node.delete_slice(ALICE)
    assert bench.faults.done == ["commit", "publish", "remove alice"]


async def test_a_running_slice_is_resized_in_place(bench: Bench) -> None:
    before, _ = await bench.node.put_slice(quarter())
    bench.files.run_a_process_in(ALICE)
    bench.faults.done.clear()
    after = await bench.node.resize_slice(ALICE, 8 * GIB)
    assert (after.shares[0].vram_bytes, after.request.vram_bytes) == (8 * GIB, 8 * GIB)
    assert after.shares[0].cus == before.shares[0].cus
    assert bench.faults.done == ["commit", "write alice", "publish"]
    with pytest.raises(NoRoom):
        await bench.node.resize_slice(ALICE, 193 * GIB)


async def test_revisions_guard_against_lost_updates(bench: Bench) -> None:
    item, _ = await bench.node.put_slice(quarter(), create_only=True)
    with pytest.raises(Stale, match="exists already"):
        await bench.node.put_slice(quarter(), create_only=True)
    with pytest.raises(Stale, match="at revision 1, not 7"):
        await bench.node.resize_slice(ALICE, GIB, if_revision=7)
    with pytest.raises(Stale, match="does not exist"):
        await bench.node.delete_slice(BOB, if_revision=1)
    await bench.node.delete_slice(ALICE, if_revision=item.revision)
    with pytest.raises(NotFound, match="no slice alice here; there are none"):
        await bench.node.delete_slice(ALICE)


async def test_of_twenty_who_want_the_last_slice_one_gets_it(bench: Bench) -> None:
    await bench.node.put_slice(quarter())
    answers = await asyncio.gather(
        *(bench.node.grant_lease(Holder(f"client {i}"), slice=ALICE) for i in range(20)), return_exceptions=True
    )
    assert sorted(type(a).__name__ for a in answers) == ["Conflict"] * 19 + ["Lease"]


async def test_an_ephemeral_slice_goes_with_its_lease(bench: Bench) -> None:
    lease = await bench.node.grant_lease(Holder("run"), request=quarter(BOB))
    assert lease.ephemeral
    assert bench.everything() == ({BOB}, {BOB}, {BOB}, (BOB,))
    bench.files.run_a_process_in(BOB)
    await bench.node.release_lease(lease.id)
    assert bench.everything() == (set(), set(), set(), ())
    assert bench.journal.stored.leases == {}


async def test_a_lease_ends_with_its_time_or_with_its_holder(bench: Bench) -> None:
    await bench.node.put_slice(quarter())
    timed = await bench.node.grant_lease(Holder("timed"), slice=ALICE, ttl_s=60)
    alive = await bench.node.grant_lease(Holder("process", 77, 5), request=quarter(BOB))
    await bench.node.tick()
    assert set(bench.node.view().book.leases) == {timed.id, alive.id}

    bench.now_s += 60
    bench.dead.add(77)
    await bench.node.tick()
    assert bench.node.view().book.leases == {}
    assert set(bench.node.view().book.slices) == {ALICE}
    kinds = [e.kind for e in bench.node.events_since(0)[0]]
    assert kinds[-2:] == ["lease.expired", "lease.holder-ended"]


async def test_a_renewed_lease_lives_on(bench: Bench) -> None:
    lease = await bench.node.grant_lease(Holder("timed"), request=quarter(), ttl_s=60)
    bench.now_s += 50
    assert (await bench.node.renew_lease(lease.id, 60)).expires_s == 1110
    bench.now_s += 50
    await bench.node.tick()
    assert set(bench.node.view().book.leases) == {lease.id}


async def test_leases_and_slices_come_back_with_the_same_ids_and_cus(bench: Bench) -> None:
    await bench.node.put_slice(quarter())
    await bench.node.grant_lease(Holder("somebody"), slice=ALICE)
    before = bench.node.view().book
    await bench.restarted().start()
    assert bench.node.view().book == before


async def test_a_slice_whose_gpu_is_gone_is_lost_and_comes_back_the_same(bench: Bench) -> None:
    item, _ = await bench.node.put_slice(quarter(on=("1",)))
    both = bench.sysfs.inventory
    bench.sysfs.inventory = Inventory((both.gpus[0],))
    await bench.node.rescan()
    view = bench.node.view()
    assert view.lost == {ALICE: f"{item.shares[0].partition} is not there"}
    assert (view.book.slices, bench.cdi.published) == ({ALICE: item}, ())
    with pytest.raises(Conflict, match="lost"):
        await bench.node.resize_slice(ALICE, GIB)
    with pytest.raises(Conflict, match="lost"):
        await bench.node.grant_lease(Holder("x"), slice=ALICE)

    bench.sysfs.inventory = both
    await bench.node.rescan()
    assert (bench.node.view().lost, bench.cdi.published) == ({}, (ALICE,))
    assert [e.kind for e in bench.node.events_since(0)[0] if e.subject == ALICE] == [
        "slice.created",
        "slice.lost",
        "slice.returned",
    ]


async def test_a_gpu_that_was_here_and_is_not_is_gone_until_it_is_back(bench: Bench) -> None:
    both = bench.sysfs.inventory
    one, other = both.gpus
    bench.sysfs.inventory = Inventory((one,))
    await bench.node.rescan()
    bench.now_s += 60
    await bench.node.rescan()
    gone = Gone(other.id, bench.now_s - 60, other.pci_address, other.product_name)
    assert bench.node.view().gone == (gone,)
    taken = Unusable(other.pci_address, "vfio-pci", "another driver has it")
    bench.sysfs.inventory = Inventory((one,), (taken,))
    await bench.node.rescan()
    assert bench.node.view().gone == ()
    bench.sysfs.inventory = Inventory((one,))
    await bench.node.rescan()
    bench.sysfs.inventory = both
    await bench.node.rescan()
    assert bench.node.view().gone == ()
    told = [e.kind for e in bench.node.events_since(0)[0] if e.subject == other.id]
    assert told == ["gpu.gone", "gpu.gone", "gpu.returned"]


async def test_a_gpu_that_slices_are_cut_from_is_gone_for_a_daemon_that_never_saw_it(bench: Bench) -> None:
    item, _ = await bench.node.put_slice(quarter(on=("1",)))
    other = bench.sysfs.inventory.gpus[1]
    bench.sysfs.inventory = Inventory((bench.sysfs.inventory.gpus[0],))
    again = bench.restarted()
    await again.start()
    assert [(gone.id, gone.pci_address) for gone in again.view().gone] == [(other.id, None)]
    await again.delete_slice(item.name)
    await again.rescan()
    assert again.view().gone == ()


async def test_another_layout_of_the_same_gpu_loses_its_slices(bench: Bench) -> None:
    await bench.node.put_slice(quarter(on=("0",)))
    gpu = a_gpu(0)
    cut = replace(gpu.partitions[0], layout=replace(gpu.partitions[0].layout, active=(9,) * 32))
    bench.sysfs.inventory = Inventory((replace(gpu, partitions=(cut,)),))
    await bench.node.rescan()
    assert "another layout" in bench.node.view().lost[ALICE]


async def test_renumbered_devices_get_their_files_written_anew(bench: Bench) -> None:
    await bench.node.put_slice(quarter(on=("0",)))
    gpu = a_gpu(0)
    moved = replace(gpu.partitions[0], render_minor=200, kfd_gpu_id=7)
    bench.sysfs.inventory = Inventory((replace(gpu, partitions=(moved,)),))
    bench.faults.done.clear()
    await bench.node.rescan()
    assert bench.faults.done == ["write alice", "publish"]


async def test_on_the_same_machine_a_scan_writes_only_what_is_missing(bench: Bench) -> None:
    await bench.node.put_slice(quarter())
    await bench.node.put_slice(quarter(BOB))
    del bench.files.written[BOB]
    bench.faults.done.clear()
    await bench.node.rescan()
    assert bench.faults.done == ["write bob", "publish"]


async def test_files_that_nobody_was_promised_are_removed_at_start(bench: Bench) -> None:
    await bench.node.put_slice(quarter())
    bench.files.written[BOB] = replace(bench.node._placed(quarter(BOB), 0))
    await bench.restarted().start()
    assert bench.files.names() == {ALICE}


async def test_files_of_a_book_that_was_lost_stay_while_somebody_may_have_them(bench: Bench) -> None:
    for name in (ALICE, BOB):
        await bench.node.put_slice(quarter(name))
    bench.files.run_a_process_in(BOB)
    bench.journal.stored = Book()
    await bench.restarted().start()
    assert bench.files.names() == {ALICE, BOB}
    await bench.node.set_cordoned(bench.sysfs.inventory.gpus[0].id, True)  # this Book is in use
    await bench.node.rescan()
    assert bench.files.names() == {BOB}
    bench.files.usages[BOB] = Usage(BOB)
    await bench.node.rescan()
    assert bench.files.names() == frozenset()


async def test_what_a_holder_has_of_a_lost_book_is_taken_up_with_its_ledger_whatever_its_gpu_is_like(
    bench: Bench,
) -> None:
    exact = Request(ALICE, Compute(ComputePolicy.EXACT, cu_count=76), GIB)
    lease = await bench.node.grant_lease(Holder("a pod"), request=exact)
    before = bench.node.view().book.slices[ALICE]
    bench.files.run_a_process_in(ALICE)
    bench.journal.stored = Book()
    await bench.restarted().start()
    gpu = bench.sysfs.inventory.gpus[0].id
    await bench.node.set_health({gpu: Health(Condition.UNHEALTHY, "ras", "ras")})
    places = {share.partition: share.cus for share in before.shares}
    after = await bench.node.adopt(Holder("a pod"), request=exact, places=places)
    assert bench.node.view().book.slices[ALICE].shares == before.shares
    assert (after.holder, after.ephemeral, after.id != lease.id) == (lease.holder, True, True)
    await bench.node.tick()
    assert len(bench.node.view().usage[ALICE].processes) == 1
    with pytest.raises(Conflict, match="exists already"):
        await bench.node.adopt(Holder("another"), request=exact, places=places)
    with pytest.raises(Conflict, match="CUs with two owners"):
        await bench.node.adopt(Holder("another"), request=replace(exact, name=BOB), places=places)
    with pytest.raises(Conflict, match=r"is held by lease .* \(a pod\)"):
        await bench.node.adopt(Holder("another"), slice=ALICE)


async def test_callers_of_rescan_share_one_scan(bench: Bench) -> None:
    bench.sysfs.reads = 0
    await asyncio.gather(*(bench.node.rescan() for _ in range(10)))
    assert bench.sysfs.reads == 1


async def test_a_change_is_finished_though_its_caller_goes_away(bench: Bench) -> None:
    task = asyncio.create_task(bench.node.put_slice(quarter()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await bench.node.rescan()  # waits its turn behind the change
    assert bench.everything() == ({ALICE}, {ALICE}, {ALICE}, (ALICE,))


async def test_what_dead_processes_held_is_returned_and_told(bench: Bench) -> None:
    await bench.node.put_slice(quarter())
    bench.files.run_a_process_in(ALICE)
    bench.files.dead_bytes[ALICE] = 5 * GIB
    await bench.node.tick()
    assert bench.node.view().usage[ALICE].processes == ()
    assert bench.node.events_since(0)[0][-1].kind == "ledger.reclaimed"


async def test_a_slice_deleted_under_a_tick_does_not_end_the_daemon(bench: Bench) -> None:
    await bench.node.put_slice(quarter())
    await bench.node.put_slice(quarter(BOB))
    del bench.files.usages[ALICE]  # its directory goes between the list of names and the reading
    await bench.node.tick()
    assert bench.node.view().usage[BOB].processes == ()


async def test_one_ledger_that_cannot_be_opened_does_not_blind_the_tick_to_the_others(bench: Bench) -> None:
    await bench.node.put_slice(quarter())
    await bench.node.put_slice(quarter(BOB))
    bench.files.run_a_process_in(BOB)
    bench.files.dead_bytes[BOB] = 5 * GIB
    bench.files.unopenable.add(ALICE)
    await bench.node.tick()
    usage = bench.node.view().usage
    assert usage[BOB].reclaimed_bytes == 5 * GIB
    assert usage[ALICE].damaged == "slice alice: its ledger cannot be opened"


async def test_a_slice_whose_ledger_cannot_be_opened_is_not_taken_for_idle(bench: Bench) -> None:
    await bench.node.put_slice(quarter())
    bench.files.unopenable.add(ALICE)
    with pytest.raises(Conflict, match=r"alice cannot be deleted: .* nobody knows what runs in it"):
        await bench.node.delete_slice(ALICE)
    await bench.node.delete_slice(ALICE, force=True)
    assert bench.everything() == (set(), set(), set(), ())


async def test_a_lost_slice_that_has_no_files_since_a_reboot_is_deleted_like_any_other(bench: Bench) -> None:
    await bench.node.put_slice(quarter(on=("1",)))
    bench.sysfs.inventory = Inventory((bench.sysfs.inventory.gpus[0],))
    bench.files.written.clear()  # the run directory is a tmpfs
    bench.files.usages.clear()
    node = bench.restarted()
    await node.start()
    assert set(node.view().lost) == {ALICE}
    await node.delete_slice(ALICE)
    assert bench.everything() == (set(), set(), set(), ())


async def test_what_has_just_ended_does_not_keep_a_slice_from_being_deleted(bench: Bench) -> None:
    await bench.node.put_slice(quarter())
    bench.files.run_a_process_in(ALICE)
    bench.files.dead_bytes[ALICE] = GIB
    await bench.node.delete_slice(ALICE)
    assert bench.everything() == (set(), set(), set(), ())


async def test_a_cordoned_gpu_takes_nothing_new(bench: Bench) -> None:
    gpu = bench.sysfs.inventory.gpus[0].id
    await bench.node.set_cordoned(gpu, True)
    with pytest.raises(NoRoom):
        await bench.node.put_slice(quarter(on=(gpu,)))
    await bench.node.set_cordoned(gpu, False)
    await bench.node.put_slice(quarter(on=(gpu,)))
    with pytest.raises(NotFound, match="no GPU GPU-x here"):
        await bench.node.set_cordoned(GpuId("GPU-x"), True)


async def test_oversubscription_is_off_until_switched_on_and_never_breaks_a_promise(bench: Bench) -> None:
    gpu = bench.sysfs.inventory.gpus[0].id
    whole = Request(ALICE, Compute(percent=25.0), 192 * GIB, on=(gpu,))
    half_more = Request(BOB, Compute(percent=25.0), 96 * GIB, on=(gpu,))
    await bench.node.put_slice(whole)
    with pytest.raises(NoRoom):
        await bench.node.put_slice(half_more)
    await bench.node.set_oversubscription(gpu, 1.5)
    await bench.node.put_slice(half_more)
    with pytest.raises(Conflict, match="would break a promise"):
        await bench.node.set_oversubscription(gpu, 1.0)
    with pytest.raises(Invalid):
        await bench.node.set_oversubscription(gpu, 0.5)


async def test_no_partition_gets_more_slices_than_configured() -> None:
    bench = Bench(max_slices=2)
    await bench.node.start()
    for name in (ALICE, BOB):
        await bench.node.put_slice(Request(name, Compute(cu_count=32), GIB, on=("0",)))
    with pytest.raises(Conflict, match="has 2 slices"):
        await bench.node.put_slice(Request(slice_name("carol"), Compute(cu_count=32), GIB, on=("0",)))


async def test_events_are_replayed_and_a_gap_is_said(bench: Bench) -> None:
    start = bench.node.events_since(0)[1]
    waiting = asyncio.create_task(bench.node.wait_event(start, 10))
    await bench.node.put_slice(quarter())
    await waiting
    events, last, dropped = bench.node.events_since(start)
    assert ([e.kind for e in events], last, dropped) == (["slice.created"], start + 1, False)
    assert bench.node.events_since(last + 99)[2]
    for _ in range(1100):
        bench.node.tell("noise", "x", "y")
    assert bench.node.events_since(start)[2]


async def test_a_whole_gpu_takes_no_neighbour(bench: Bench) -> None:
    await bench.node.put_slice(Request(ALICE, Compute(ComputePolicy.WHOLE), on=("0",)))
    with pytest.raises(NoRoom):
        await bench.node.put_slice(quarter(BOB, on=("0",)))


async def test_a_lease_on_neither_or_both_is_refused(bench: Bench) -> None:
    with pytest.raises(Invalid, match="exactly one"):
        await bench.node.grant_lease(Holder("x"))
    with pytest.raises(Invalid, match="exactly one"):
        await bench.node.grant_lease(Holder("x"), slice=ALICE, request=quarter())


async def test_the_repr_shows_the_state(bench: Bench) -> None:
    await bench.node.put_slice(quarter())
    assert repr(bench.node) == "<Node r1: 2 GPUs, 1 slices (0 lost), 0 leases>"


def test_an_unreadable_book_is_not_needed_to_name_things() -> None:
    lease = Lease(LeaseId("l"), ALICE, Holder("x"), 0.0, None, ephemeral=False)
    item = Slice(ALICE, quarter(), (), 0.0, 1)
    book = Book().with_slice(item).with_lease(lease)
    assert book.without_slice(ALICE).leases == {}
    assert book.lease_of(BOB) is None


# ------------------------------------------------------------------------------------------------------ health

BROKEN = Health(Condition.UNHEALTHY, "/dev/dri/renderD128 answers EIO", "pulse", 5.0)


async def test_a_gpu_that_is_not_well_takes_no_new_slice_and_no_new_holder_and_keeps_what_it_has(bench: Bench) -> None:
    first, second = (gpu.id for gpu in bench.sysfs.inventory.gpus)
    item, _ = await bench.node.put_slice(quarter(on=(first,)))
    lease = await bench.node.grant_lease(Holder("me"), slice=ALICE)
    free, _ = await bench.node.put_slice(quarter(BOB, on=(first,)))
    await bench.node.set_health({first: BROKEN, second: Health()})
    with pytest.raises(NoRoom, match=f"{first}: unhealthy, /dev/dri/renderD128 answers EIO"):
        await bench.node.put_slice(quarter(slice_name("carol"), on=(first,)))
    with pytest.raises(Conflict, match=f"slice bob is on {first}, which is unhealthy and takes no new user: /dev/dri"):
        await bench.node.grant_lease(Holder("you"), slice=BOB)
    view = bench.node.view()
    assert (view.book.slices, view.book.leases) == ({ALICE: item, BOB: free}, {lease.id: lease})
    assert bench.cdi.published == (ALICE, BOB)
    [warning] = view.warnings
    assert warning == (
        f"{first} is unhealthy and takes no new slice: /dev/dri/renderD128 answers EIO; what it has stays as it is: "
        "alice, bob"
    )


async def test_a_persons_word_holds_over_what_is_found_and_over_restarts(bench: Bench) -> None:
    gpu = bench.sysfs.inventory.gpus[0].id
    await bench.node.set_health({gpu: BROKEN})
    await bench.node.set_health_override(gpu, True)
    await bench.node.set_health_override(gpu, True)
    assert bench.node.view().health[gpu] == Health(
        Condition.HEALTHY, "set by a person; found was unhealthy: /dev/dri/renderD128 answers EIO", "override", 1000.0
    )
    await bench.restarted().start()
    assert bench.node.view().health[gpu].reason == "set by a person; nobody has looked"
    await bench.node.set_health({gpu: BROKEN})
    assert bench.node.view().health[gpu].placeable
    await bench.node.set_health_override(gpu, None)
    view = bench.node.view()
    assert (view.health[gpu], view.health_found[gpu]) == (BROKEN, BROKEN)
    assert [e.kind for e in bench.node.events_since(0)[0] if e.kind.startswith("gpu.")] == [
        "gpu.health-override",
        "gpu.unhealthy",
    ]
    with pytest.raises(NotFound):
        await bench.node.set_health_override(GpuId("GPU-x"), True)


async def test_an_end_waits_for_the_change_that_is_being_made_and_refuses_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, finish, commit = threading.Event(), threading.Event(), bench.journal.commit

    def slowly(before: Book, after: Book) -> None:
        begun.set()
        assert finish.wait(20)
        commit(before, after)

    monkeypatch.setattr(bench.journal, "commit", slowly)
    putting = asyncio.create_task(bench.node.put_slice(quarter()))
    assert await asyncio.to_thread(begun.wait, 20)
    closing = asyncio.create_task(bench.node.close())
    late = asyncio.create_task(bench.node.put_slice(quarter(BOB)))
    await asyncio.sleep(0)
    finish.set()
    await asyncio.gather(putting, closing)
    with pytest.raises(HostFailure, match="commit before load"):
        await late
    assert bench.everything() == ({ALICE}, {ALICE}, {ALICE}, (ALICE,))
