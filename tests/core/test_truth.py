"""The kernel's figures held against the ledgers': whose is it, and what has no ledger seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amdvgpud.core.model import (
    Book,
    Compute,
    ComputePolicy,
    CuLayout,
    CuSet,
    Inventory,
    PartitionId,
    ProcessUsage,
    Request,
    Share,
    Slice,
    SliceName,
    Usage,
)
from amdvgpud.core.truth import (
    MAX_EXCUSED_QUEUES,
    Belonging,
    Comparison,
    GpuTruth,
    KernelPicture,
    KernelProcess,
    ProcessTruth,
    Truth,
    compare,
    context_save_bytes,
    driver_bytes_of,
    needs_gate,
)
from tests.fakes import GIB, a_gpu, in_mode

MIB = 1 << 20
GPUS = (a_gpu(0), a_gpu(1))
MACHINE = Inventory(GPUS, generation_id=1)
FIRST, SECOND = (p.id for p in MACHINE.partitions)
A, B = SliceName("a"), SliceName("b")


def a_slice(name: SliceName, *places: PartitionId, vram_bytes: int = 4 * GIB, whole: bool = False) -> Slice:
    shares = tuple(Share(at, vram_bytes, None if whole else CuSet((0, 1)), False, 2, 2, 2, "x") for at in places)
    return Slice(name, Request(name, Compute(ComputePolicy.BALANCED, percent=25)), shares, 0.0, 1)


def a_book(*slices: Slice) -> Book:
    return Book(1, MappingProxyType({item.name: item for item in slices}))


def a_process(
    pid: int, vram: Mapping[int, int], *slices: SliceName, claims: tuple[SliceName, ...] = (), namespace: int = 900
) -> KernelProcess:
    """As pid 7 of its own namespace, started at tick ``pid``."""
    return KernelProcess(pid, pid, 7, namespace, "python3", Belonging(slices, claims), vram)


def a_ledger(name: SliceName, *slots: tuple[int, Mapping[int, int]], namespace: int = 900) -> dict[SliceName, Usage]:
    """Slots as (start time, bytes by KFD gpu_id), all of pid 7."""
    return {
        name: Usage(
            name,
            processes=tuple(ProcessUsage(i, 7, start, namespace, used) for i, (start, used) in enumerate(slots)),
        )
    }


def compared(book: Book, usage: Mapping[SliceName, Usage], *processes: KernelProcess) -> Comparison:
    found = compare(book, MACHINE, usage, KernelPicture(1.0, processes))
    assert found is not None
    return found


def test_what_the_ledger_has_is_tracked_and_the_rest_is_not() -> None:
    process = replace(a_process(50, {1000: 5 * MIB, 1001: 0}, A), cu_occupancy={1000: 12, 1001: 0})
    assert compared(a_book(a_slice(A, FIRST)), a_ledger(A, (50, {1000: 3 * MIB})), process) == Comparison(
        {
            A: Truth(
                A,
                {FIRST: GpuTruth(5 * MIB, 2 * MIB, 12)},
                (ProcessTruth(50, 50, 7, 900, "python3", True, {FIRST: 5 * MIB}, {FIRST: 3 * MIB}),),
                gated=True,
            )
        }
    )


@pytest.mark.parametrize(
    ("gfx_target", "cus", "xccs", "driver_bytes"),
    [  # what the driver's own function gives, reckoned by hand
        ("gfx906", 60, 1, 20_986_880),
        ("gfx942", 304, 8, 186_019_840),
        ("gfx950", 256, 8, 181_829_632),
        ("gfx1030", 80, 1, 27_963_392),
        ("gfx1100", 96, 1, 46_145_536),
    ],
)
def test_what_a_queue_needs_is_what_the_driver_reckons_or_a_little_more(
    gfx_target: str, cus: int, xccs: int, driver_bytes: int
) -> None:
    layout = CuLayout(xccs, 1, 1, (cus // xccs,) * xccs, wgp=False, harvest_known=True)
    reckoned = context_save_bytes(replace(MACHINE.partitions[0], gfx_target=gfx_target, layout=layout))
    assert driver_bytes <= reckoned <= driver_bytes * 1.002


def excused(*processes: KernelProcess, book: Book | None = None) -> list[dict[PartitionId, int]]:
    """By process, in the order of their pids; each has one MiB in its slot of slice a on either GPU."""
    ledger = a_ledger(A, *((p.start_ticks, {1000: MIB, 1001: MIB}) for p in processes))
    found = compared(book or a_book(a_slice(A, FIRST)), ledger, *processes).slices[A]
    return [dict(p.queue_bytes) for p in found.processes]


ONE = context_save_bytes(MACHINE.partitions[0])


@pytest.mark.parametrize(("queues", "counted"), [(0, 0), (3, 3), (500, MAX_EXCUSED_QUEUES)])
def test_each_compute_queue_excuses_what_it_needs_up_to_a_bound(queues: int, counted: int) -> None:
    process = replace(a_process(50, {1000: 99 * GIB}, A), compute_queues={1000: queues})
    assert excused(process) == [{FIRST: counted * ONE} if counted else {}]


def test_queues_excuse_no_more_than_there_is_and_nothing_on_another_gpu() -> None:
    process = replace(a_process(50, {1000: 2 * MIB, 1001: 9 * GIB}, A), compute_queues={1000: 3})
    assert excused(process, book=a_book(a_slice(A, FIRST, SECOND))) == [{FIRST: MIB}]


def test_ten_processes_of_a_slice_have_one_bound_together_and_the_oldest_come_first() -> None:
    """Each by itself would excuse as much again."""
    many = [replace(a_process(50 + i, {1000: 20 * GIB}, A), start_ticks=80 - i) for i in range(10)]
    found = excused(*(replace(p, compute_queues={1000: MAX_EXCUSED_QUEUES - 2}) for p in many))
    assert [of.get(FIRST, 0) for of in found] == [*[0] * 8, 2 * ONE, (MAX_EXCUSED_QUEUES - 2) * ONE]
    idle = replace(a_process(49, {1000: MIB}, A), start_ticks=1, compute_queues={1000: 16})
    busy = replace(a_process(50, {1000: 9 * GIB}, A), compute_queues={1000: 4})
    assert excused(idle, busy) == [{}, {FIRST: 4 * ONE}]


def test_what_has_no_gate_has_no_excuse_and_takes_none_from_others() -> None:
    book, many = a_book(a_slice(A, FIRST)), {1000: MAX_EXCUSED_QUEUES}
    processes = [replace(a_process(pid, {1000: 20 * GIB}, A), compute_queues=many) for pid in (50, 51)]
    found = compared(book, a_ledger(A, (51, {1000: MIB})), *processes).slices[A]
    assert [(p.tracked, p.queue_bytes) for p in found.processes] == [
        (False, {}),
        (True, {FIRST: MAX_EXCUSED_QUEUES * ONE}),
    ]


def test_a_ledger_is_believed_up_to_what_can_be_true_and_who_has_most_is_not() -> None:
    """A guest has written into its own ledger what it took around the gate."""
    small, large = a_process(50, {1000: 3 * MIB}, A), a_process(51, {1000: 150 * MIB}, A)
    usage = a_ledger(A, (50, {1000: 3 * MIB}), (51, {1000: 150 * MIB}))
    picture = KernelPicture(1.0, (small, large))
    found = compare(a_book(a_slice(A, FIRST)), MACHINE, usage, picture, {(A, FIRST): 4 * MIB})
    assert found is not None
    assert [p.untracked_bytes for p in found.slices[A].processes] == [0, 149 * MIB]
    assert found.slices[A].gpus[FIRST] == GpuTruth(153 * MIB, 149 * MIB, None)
    found = compare(a_book(a_slice(A, FIRST)), MACHINE, usage, picture, {(A, FIRST): 0})
    assert found is not None
    assert [p.untracked_bytes for p in found.slices[A].processes] == [3 * MIB, 150 * MIB]
    found = compare(a_book(a_slice(A, FIRST)), MACHINE, usage, picture, {(A, FIRST): 200 * MIB})
    assert found is not None
    assert [p.untracked_bytes for p in found.slices[A].processes] == [0, 0]


def test_a_process_without_a_slot_is_unmanaged_even_before_it_has_taken_anything() -> None:
    found = compared(a_book(a_slice(A, FIRST)), a_ledger(A), a_process(50, {1000: 0}, A)).slices[A]
    assert [p.pid for p in found.unmanaged] == [50]
    assert found.gpus == {FIRST: GpuTruth(0, 0, None)}


def test_a_slot_is_a_process_s_own_by_pid_start_time_and_namespace() -> None:
    book, process = a_book(a_slice(A, FIRST)), a_process(50, {1000: MIB}, A)
    for ledger, tracked in (
        (a_ledger(A, (50, {})), True),
        (a_ledger(A, (51, {})), False),
        (a_ledger(A, (50, {}), namespace=901), False),
        (a_ledger(A, (50, {}), namespace=1), True),  # the gate could not read its namespace
    ):
        assert [p.tracked for p in compared(book, ledger, process).slices[A].processes] == [tracked]
    veiled = replace(process, pid_namespace=0)  # we cannot read its namespace
    assert [p.tracked for p in compared(book, a_ledger(A, (50, {})), veiled).slices[A].processes] == [True]


def test_a_claim_counts_only_where_the_ledger_knows_the_process() -> None:
    book, process = a_book(a_slice(A, FIRST)), a_process(50, {1000: MIB}, claims=(A,))
    believed = compared(book, a_ledger(A, (50, {1000: MIB})), process)
    assert ([p.pid for p in believed.slices[A].processes], believed.strangers) == ([50], ())
    doubted = compared(book, a_ledger(A), process)
    assert (doubted.slices[A].processes, [p.pid for p in doubted.strangers]) == ((), [50])


def test_of_two_slices_of_one_gpu_each_has_what_its_ledger_has_and_the_first_the_rest() -> None:
    book = a_book(a_slice(A, FIRST), a_slice(B, FIRST))
    ledgers = a_ledger(A, (50, {1000: 2 * MIB})) | a_ledger(B, (50, {1000: 3 * MIB}))
    found = compared(book, ledgers, a_process(50, {1000: 9 * MIB}, A, B))
    assert [found.slices[name].gpus[FIRST] for name in (A, B)] == [
        GpuTruth(6 * MIB, 4 * MIB, None),
        GpuTruth(3 * MIB, 0, None),
    ]


def test_vram_on_a_gpu_that_the_slice_does_not_have_is_a_strangers() -> None:
    found = compared(a_book(a_slice(A, FIRST)), a_ledger(A), a_process(50, {1000: MIB, 1001: 2 * MIB}, A))
    assert found.slices[A].gpus[FIRST].driver_bytes == MIB
    assert [(p.pid, p.driver_bytes) for p in found.strangers] == [(50, {SECOND: 2 * MIB})]


def test_a_process_that_only_has_everything_open_is_no_stranger_to_anybody() -> None:
    assert compared(a_book(), {}, a_process(50, {1000: 0, 1001: 0})).strangers == ()


def test_a_slice_that_has_all_of_its_partition_needs_no_gate_so_nothing_in_it_is_unmanaged() -> None:
    whole = a_slice(A, FIRST, vram_bytes=192 * GIB, whole=True)
    assert not needs_gate(whole, MACHINE)
    found = compared(a_book(whole), a_ledger(A), a_process(50, {1000: GIB}, A)).slices[A]
    assert (found.gpus[FIRST], found.unmanaged) == (GpuTruth(GIB, None, None), ())


def test_a_process_that_may_open_nothing_but_a_whole_slices_gpus_is_in_that_slice() -> None:
    """It has device nodes and nothing else: no mount, no ledger."""
    whole = a_slice(A, FIRST, vram_bytes=MACHINE.partitions[0].vram_bytes, whole=True)
    whole = replace(whole, request=replace(whole.request, compute=Compute(ComputePolicy.WHOLE)))
    inside = replace(a_process(50, {1000: 5 * MIB}), cu_occupancy={1000: 12})
    outside, elsewhere = a_process(51, {1000: 7 * MIB, 1001: 0}), a_process(52, {1001: 7 * MIB})
    found = compared(a_book(whole, a_slice(B, SECOND)), {}, inside, outside, elsewhere)
    assert found.slices[A].gpus[FIRST] == GpuTruth(5 * MIB, None, 12)
    assert [p.pid for p in found.slices[A].processes] == [50]
    assert (found.slices[A].unmanaged, [p.pid for p in found.strangers]) == ((), [51, 52])


def test_a_whole_slice_of_all_that_there_is_has_no_figure_rather_than_0() -> None:
    """Its processes cannot be told from the host's, so nothing is known of it; a mount still tells."""
    whole = a_slice(A, FIRST, SECOND, vram_bytes=MACHINE.partitions[0].vram_bytes, whole=True)
    whole = replace(whole, request=replace(whole.request, compute=Compute(ComputePolicy.WHOLE)))
    process = a_process(50, {1000: 5 * MIB, 1001: 0})
    found = compared(a_book(whole), {}, process)
    assert (found.slices[A].gpus, found.slices[A].processes, [p.pid for p in found.strangers]) == ({}, (), [50])
    found = compared(a_book(whole), {}, replace(process, belonging=Belonging((A,))))
    assert found.slices[A].gpus == {FIRST: GpuTruth(5 * MIB, None, None), SECOND: GpuTruth(0, None, None)}


def test_a_slice_is_unlimited_only_with_all_cus_and_all_vram_of_a_partition_that_is_there() -> None:
    assert needs_gate(a_slice(A, FIRST, whole=True), MACHINE)
    assert needs_gate(a_slice(A, FIRST, vram_bytes=192 * GIB), MACHINE)
    assert needs_gate(a_slice(A, PartitionId("GPU-gone/0"), vram_bytes=192 * GIB, whole=True), MACHINE)


def test_without_a_list_of_processes_there_is_nothing_to_compare() -> None:
    assert compare(a_book(a_slice(A, FIRST)), MACHINE, {}, KernelPicture(1.0, None)) is None


def test_what_the_kfd_maps_for_a_drm_client_counts_once() -> None:
    address = GPUS[0].pci_address

    def bytes_on_gpu(kfd: int, drm: int) -> int:
        process = replace(a_process(50, {1000: kfd}), drm_bytes={address: drm})
        return driver_bytes_of(process, GPUS, ())[FIRST]

    assert [bytes_on_gpu(5, 5), bytes_on_gpu(5, 8), bytes_on_gpu(5, 0), bytes_on_gpu(0, 8)] == [5, 8, 5, 8]


def test_drm_figures_are_of_the_whole_gpu_and_go_to_the_partition_of_the_slice() -> None:
    gpu = in_mode(a_gpu(0), "QPX")
    ids = [p.id for p in gpu.partitions]
    vram = {p.kfd_gpu_id: 10 for p in gpu.partitions[:3]}
    process = replace(a_process(50, vram), drm_bytes={gpu.pci_address: 42})
    assert driver_bytes_of(process, (gpu,), (ids[2],)) == {ids[0]: 10, ids[1]: 10, ids[2]: 22}
    assert driver_bytes_of(process, (gpu,), ()) == {ids[0]: 22, ids[1]: 10, ids[2]: 10}


# ---------------------------------------------------------------------------------------------------- properties

amounts = st.integers(0, 1 << 40)
names = st.sampled_from((A, B, SliceName("gone")))


@st.composite
def pictures(draw: st.DrawFn) -> tuple[dict[SliceName, Usage], tuple[KernelProcess, ...]]:
    processes, slots = [], {A: list[tuple[int, Mapping[int, int]]](), B: []}
    for pid in range(50, 50 + draw(st.integers(0, 5))):
        vram = draw(st.dictionaries(st.sampled_from((1000, 1001, 4242)), amounts))
        process = a_process(
            pid, vram, *draw(st.lists(names, unique=True)), claims=tuple(draw(st.lists(names, unique=True)))
        )
        processes.append(
            replace(process, drm_bytes=draw(st.dictionaries(st.sampled_from([g.pci_address for g in GPUS]), amounts)))
        )
        for own in slots.values():
            if draw(st.booleans()):
                own.append((pid, draw(st.dictionaries(st.sampled_from((1000, 1001)), amounts))))
    return a_ledger(A, *slots[A]) | a_ledger(B, *slots[B]), tuple(processes)


@given(pictures())
def test_every_byte_of_the_driver_is_somebody_s_and_nobody_s_twice(
    picture: tuple[dict[SliceName, Usage], tuple[KernelProcess, ...]],
) -> None:
    usage, processes = picture
    found = compared(a_book(a_slice(A, FIRST), a_slice(B, FIRST, SECOND)), usage, *processes)
    for process in processes:
        there = driver_bytes_of(process, GPUS, ())
        rows = [t for truth in found.slices.values() for t in truth.processes] + list(found.strangers)
        told = [t.driver_bytes for t in rows if t.pid == process.pid]
        assert {at: sum(row.get(at, 0) for row in told) for at in there} == there
    for truth in found.slices.values():
        for at, gpu in truth.gpus.items():
            assert gpu.untracked_bytes is not None
            assert 0 <= gpu.untracked_bytes <= gpu.driver_bytes
            assert gpu.driver_bytes == sum(p.driver_bytes.get(at, 0) for p in truth.processes)
