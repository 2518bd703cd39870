"""What the kernel says of who uses the GPUs, held against what the ledgers say: the words and the comparison, no I/O.

Owns which process counts as whose, and which bytes no ledger has seen. Does not own where the figures come from
(:mod:`amdvgpud.host.kfd`) nor what follows from them (:mod:`amdvgpud.core.watchdog`, :mod:`amdvgpud.guard`).

Sources of what the figures mean: ``kfd_process.c`` (files of kfd/proc), Documentation/gpu/drm-usage-stats.rst and
``amdgpu_fdinfo.c`` (fdinfo). Absent is absent: a figure that the kernel does not give is in no mapping here, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from amdvgpud.core.model import (
    Book,
    ComputePolicy,
    Gpu,
    GpuId,
    Inventory,
    Partition,
    PartitionId,
    ProcessUsage,
    Slice,
    SliceName,
    Usage,
)

# --------------------------------------------------------------------------------------------------- what was read


@dataclass(frozen=True, slots=True)
class Belonging:
    """Which slices a process is in. Two slices may be given to one container: then it is in both."""

    slices: tuple[SliceName, ...] = ()
    """Shown by its mounts, which a guest cannot make up."""
    claims: tuple[SliceName, ...] = ()
    """Said by its environment only, which anybody can write: believed where that slice's ledger knows the process."""


@dataclass(frozen=True, slots=True)
class KernelProcess:
    """One process that has a GPU open, as the kernel accounts for it. ``pid`` is as the machine's own /proc has it."""

    pid: int
    start_ticks: int
    """0: /proc does not know it (any more): the KFD is still clearing up after it, or /proc hides it."""
    inner_pid: int = 0
    """Its pid in the innermost of its pid namespaces, by which ledgers know it."""
    pid_namespace: int = 0
    """That namespace's inode; 0 where we may not know."""
    command: str = "?"
    belonging: Belonging = Belonging()
    vram_bytes: Mapping[int, int] = field(default_factory=dict)
    """KFD allocations by KFD gpu_id: an entry for each GPU that it may open, used or not."""
    drm_bytes: Mapping[str, int] = field(default_factory=dict)
    """By PCI address: all that its DRM clients have in VRAM, each client once. The address space that the KFD shares
    with a client is among it, so that this and ``vram_bytes`` overlap."""
    cu_occupancy: Mapping[int, int] = field(default_factory=dict)
    """By KFD gpu_id, where the kernel can tell (gfx9): waves in flight as full CUs, a sample of this moment."""
    evicted_ms: Mapping[int, int] = field(default_factory=dict)
    """By KFD gpu_id: how long its queues were evicted, since it started."""
    sdma_us: Mapping[int, int] = field(default_factory=dict)
    """By KFD gpu_id, where it is asked for: activity of its copy engines since it started."""
    cgroup: str | None = None
    """In the v2 hierarchy, of a process that is in a slice; None where that cannot be told."""
    compute_queues: Mapping[int, int] = field(default_factory=dict)
    """How many it has now, by KFD gpu_id; empty of one that is in no slice."""


@dataclass(frozen=True, slots=True)
class KernelPicture:
    """One look at all of it."""

    time_s: float = 0.0
    """Unix time."""
    processes: tuple[KernelProcess, ...] | None = None
    """By pid; None where the kernel's list cannot be had."""
    vram_used_bytes: Mapping[GpuId, int] = field(default_factory=dict)
    """Of the whole GPU, by anybody, as its driver says."""
    dmem_bytes: Mapping[str, Mapping[GpuId, int]] = field(default_factory=dict)
    """By cgroup, with all that is below it: what the dmem controller counts, of those that were asked for."""
    reasons: tuple[str, ...] = ()
    """Why something is missing, in sentences."""


# ------------------------------------------------------------------------------------------------ what follows


@dataclass(frozen=True, slots=True)
class ProcessTruth:
    """One process and one slice (or none), in the kernel's figures and the ledger's."""

    pid: int
    start_ticks: int
    inner_pid: int
    pid_namespace: int
    command: str
    tracked: bool
    """The slice's ledger has a slot of it: its gate is loaded."""
    driver_bytes: Mapping[PartitionId, int]
    ledger_bytes: Mapping[PartitionId, int]
    """What of its slot is believed."""
    sdma_us: Mapping[int, int] = field(default_factory=dict)
    cgroup: str | None = None
    queue_bytes: Mapping[PartitionId, int] = field(default_factory=dict)
    """What of :attr:`untracked_bytes` its queues may be the reason of; see :data:`MAX_EXCUSED_QUEUES`."""

    @property
    def untracked_bytes(self) -> int:
        return sum(self._untracked(at) for at in self.driver_bytes)

    @property
    def unexplained_bytes(self) -> int:
        """What is untracked and not for queues either: those of one GPU explain nothing on another."""
        return sum(max(0, self._untracked(at) - self.queue_bytes.get(at, 0)) for at in self.driver_bytes)

    def _untracked(self, at: PartitionId) -> int:
        return max(0, self.driver_bytes[at] - self.ledger_bytes.get(at, 0))


MAX_EXCUSED_QUEUES: Final = 64
"""So many compute queues of a slice on each of its Partitions excuse bytes that no ledger has, all its processes
together: HIP makes 4 in a process for plain streams, and more for streams with a priority or a mask. Beyond that a
program could make queues, or processes with queues, to hide behind. Guessed: 11 GiB of an MI300X are no small hole,
and honest workers would be ended for less. It fails closed: if the kernel counts what queues need, the seventeenth
process of four queues is found to go around the gate, with its gate loaded.

By Partition, as HIP makes its queues on each: one bound for a slice of 8 GPUs would be two queues on each."""


def context_save_bytes(partition: Partition) -> int:
    """VRAM that one compute queue may take beside all allocations: where the waves of the whole Partition are saved
    when another queue gets its turn. The runtime asks for the area as a range of SVM that prefers the GPU, so no gate
    sees it come, and newer kernels count it as the process's (``kfd_svm.c``).

    By ``kfd_queue_ctx_save_restore_size`` of ``kfd_queue.c`` (Linux 6.12 and later), never less: of each CU its vector
    and scalar registers, LDS and hardware registers; of each wave, of which there are at most 40, 12 bytes of control
    stack and 32 for debuggers; whole pages for each XCC. 178 MiB on an MI300X, 44 MiB on an RX 7900 XTX.
    """
    vector_kib = 512 if partition.gfx_target in _WIDE else 384 if partition.gfx_target in _WIDER else 256
    lds_kib = 160 if partition.gfx_target == "gfx950" else 64
    of_each_cu = (vector_kib + 16 + lds_kib + 4) * 1024 + 40 * (12 + 32)
    return partition.cu_count * of_each_cu + partition.layout.xcc_count * 2 * 4096


_WIDE: Final = frozenset({"gfx908", "gfx90a", "gfx942", "gfx950"})
_WIDER: Final = frozenset({"gfx1100", "gfx1101", "gfx1200", "gfx1201"})


@dataclass(frozen=True, slots=True)
class GpuTruth:
    """One Share of a slice."""

    driver_bytes: int
    untracked_bytes: int | None
    """What the driver accounts to the slice's processes and their ledger slots do not have; never negative. None where
    no gate is needed, and so none may be there to fill a ledger."""
    compute_units_occupied: int | None
    """None where the kernel does not tell."""


@dataclass(frozen=True, slots=True)
class Truth:
    """Of one slice."""

    slice: SliceName
    gpus: Mapping[PartitionId, GpuTruth]
    """Empty where the slice is whole Partitions and all that the machine has: nobody can tell whose a process is."""
    processes: tuple[ProcessTruth, ...]
    gated: bool
    """False for a slice that has all of its Partitions: it needs no gate, so that nothing in it is unmanaged."""

    @property
    def unmanaged(self) -> tuple[ProcessTruth, ...]:
        """Processes that have its GPUs open and no slot in its ledger: their gate is not loaded."""
        return tuple(p for p in self.processes if not p.tracked) if self.gated else ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of all. ``strangers`` are processes with VRAM that no slice accounts for."""

    slices: Mapping[SliceName, Truth] = field(default_factory=dict)
    strangers: tuple[ProcessTruth, ...] = ()


def needs_gate(item: Slice, inventory: Inventory) -> bool:
    """Whether ``item`` has a limit to hold; a slice that has all of its Partitions has none."""
    for share in item.shares:
        partition = inventory.partition(share.partition)
        if share.cus is not None or partition is None or share.vram_bytes < partition.vram_bytes:
            return True
    return False


def driver_bytes_of(process: KernelProcess, gpus: Iterable[Gpu], home: Iterable[PartitionId]) -> dict[PartitionId, int]:
    """VRAM of ``process`` by Partition, nothing counted twice.

    ``KFD + max(0, DRM - KFD)`` of each GPU: what the KFD allocated is mapped in an address space that belongs to a DRM
    client, and is (on recent kernels) in its figures too. Where it is not, this counts too little, never too much: a
    process must not be accused of bytes that it does not have. DRM figures do not tell Partitions, so what is DRM's
    alone is put down to the first of ``home`` on that GPU, or to its first Partition.
    """
    found: dict[PartitionId, int] = {}
    chosen = frozenset(home)
    for gpu in gpus:
        kfd = {p.id: process.vram_bytes[p.kfd_gpu_id] for p in gpu.partitions if p.kfd_gpu_id in process.vram_bytes}
        found |= kfd
        if (drm := process.drm_bytes.get(gpu.pci_address)) is not None:
            at = next((p.id for p in gpu.partitions if p.id in chosen), gpu.partitions[0].id)
            found[at] = found.get(at, 0) + max(0, drm - sum(kfd.values()))
    return found


Ceilings = Mapping[tuple[SliceName, PartitionId], int]
"""How many bytes of a slice's ledger can be true, where it claims more: a guest can write anything into its ledger."""
NO_CEILINGS: Final[Ceilings] = MappingProxyType({})


def compare(
    book: Book,
    inventory: Inventory,
    usage: Mapping[SliceName, Usage],
    picture: KernelPicture,
    ceilings: Ceilings = NO_CEILINGS,
) -> Comparison | None:
    """Whose each process is, and what its ledger does not know. None where there is no list of processes.

    A process in two slices of one GPU: what their ledgers have is each one's own, what is more is the first one's.
    Above a ceiling the processes with most are not believed: who has taken what is the slice's own affair.

    Whole Partitions are given as device nodes, without anything that names their slice. So a process that may open
    nothing but those is its; where the machine has nothing but those, it cannot be told from one of the host's, and the
    slice has no figures.
    """
    if picture.processes is None:
        return None
    by_gpu_id = {p.kfd_gpu_id: p for p in inventory.partitions}
    slots = {name: {(p.pid, p.start_ticks): p for p in of.processes} for name, of in usage.items()}
    members: dict[SliceName, list[_Member]] = {name: [] for name in book.slices}
    everything = by_gpu_id.keys()
    whole = _whole_slices(book, inventory)
    untold = {item.name for item, ids in whole if ids == everything}
    strangers = []
    for process in picture.processes:
        own = _slices_of(process, book, slots) or _whole_slice_of(process, whole, everything)
        places = {share.partition for item, _ in own for share in item.shares}
        left = driver_bytes_of(process, inventory.gpus, places)
        rows = [(item, slot, _of_ledger(item, slot, by_gpu_id)) for item, slot in own]
        for rank, (item, slot, ledger) in enumerate(rows):
            mine: dict[PartitionId, int] = {}
            for share in item.shares:
                if (there := left.get(share.partition)) is not None:
                    others = sum(of.get(share.partition, 0) for _, _, of in rows[rank + 1 :])
                    mine[share.partition] = max(min(there, ledger.get(share.partition, 0)), there - others)
                    left[share.partition] = there - mine[share.partition]
            if mine or slot is not None:
                members[item.name].append((process, _truth_of(process, slot is not None, mine, ledger)))
        outside = {at: n for at, n in left.items() if at not in places and n}
        if outside:
            strangers.append(_truth_of(process, False, outside, {}))
    for (name, at), ceiling in ceilings.items():
        members[name] = _disbelieved(members[name], at, ceiling)
    slices = {name: _slice_truth(book.slices[name], inventory, of) for name, of in members.items()}
    for name in untold:
        if not members[name]:  # nobody known is not nobody there
            slices[name] = replace(slices[name], gpus={})
    return Comparison(slices, tuple(strangers))


_Member = tuple[KernelProcess, ProcessTruth]
_Slots = Mapping[SliceName, Mapping[tuple[int, int], ProcessUsage]]


def _slices_of(process: KernelProcess, book: Book, slots: _Slots) -> list[tuple[Slice, ProcessUsage | None]]:
    """The slices that the process is in, each with its slot there."""
    found = []
    for name in dict.fromkeys((*process.belonging.slices, *process.belonging.claims)):
        item = book.slices.get(name)
        slot = slots.get(name, {}).get((process.inner_pid, process.start_ticks))
        if slot is not None and process.pid_namespace and slot.pid_namespace > 1:
            slot = slot if slot.pid_namespace == process.pid_namespace else None
        if item is not None and (slot is not None or name in process.belonging.slices):
            found.append((item, slot))
    return found


def _whole_slices(book: Book, inventory: Inventory) -> list[tuple[Slice, frozenset[int]]]:
    """Those that are whole Partitions, with the KFD gpu_ids of these."""
    found = []
    for item in book.slices.values():
        if item.request.compute.policy is ComputePolicy.WHOLE:
            partitions = (inventory.partition(share.partition) for share in item.shares)
            found.append((item, frozenset(p.kfd_gpu_id for p in partitions if p is not None)))
    return found


def given_only(opened: Set[int], own: Set[int], everything: Set[int]) -> bool:
    """Whether who may open ``opened`` was given of ``own`` and of nothing else. All are KFD gpu_ids, ``everything`` the
    machine's: a process of the host may open that, and cannot be told from others where there is no more than ``own``.
    """
    return bool(opened) and opened <= own < everything


def _whole_slice_of(
    process: KernelProcess, whole: Iterable[tuple[Slice, frozenset[int]]], everything: Set[int]
) -> list[tuple[Slice, ProcessUsage | None]]:
    opened = process.vram_bytes.keys()
    return [(item, None) for item, ids in whole if given_only(opened, ids, everything)]


def _of_ledger(item: Slice, slot: ProcessUsage | None, by_gpu_id: Mapping[int, Partition]) -> dict[PartitionId, int]:
    """What the slot has on the slice's own Partitions; a guest can write others into it."""
    found = {} if slot is None else {by_gpu_id[g].id: n for g, n in slot.used_bytes.items() if g in by_gpu_id}
    return {share.partition: found[share.partition] for share in item.shares if share.partition in found}


def _truth_of(
    process: KernelProcess, tracked: bool, driver: Mapping[PartitionId, int], ledger: Mapping[PartitionId, int]
) -> ProcessTruth:
    return ProcessTruth(
        process.pid,
        process.start_ticks,
        process.inner_pid,
        process.pid_namespace,
        process.command,
        tracked,
        driver,
        ledger,
        process.sdma_us,
        process.cgroup,
    )


def _disbelieved(members: list[_Member], at: PartitionId, ceiling: int) -> list[_Member]:
    """With slots cut down until what they explain of the driver's figures is no more than ``ceiling``."""
    explained = {i: min(t.driver_bytes.get(at, 0), t.ledger_bytes.get(at, 0)) for i, (_, t) in enumerate(members)}
    excess = sum(explained.values()) - ceiling
    found = list(members)
    for i in sorted(explained, key=lambda i: explained[i], reverse=True):
        if excess <= 0:
            break
        process, truth = members[i]
        left = max(0, explained[i] - excess)
        found[i] = (process, replace(truth, ledger_bytes={**truth.ledger_bytes, at: left}))
        excess -= explained[i] - left
    return found


def _excused(members: Sequence[_Member], partitions: Iterable[Partition]) -> list[_Member]:
    """With what their queues explain. The oldest come first, as no later process can change what is theirs; a bound
    that were spent in an order that moves would blame another one at each look, and none for long enough."""
    excuses: list[dict[PartitionId, int]] = [{} for _ in members]
    oldest_first = sorted(range(len(members)), key=lambda i: (members[i][1].start_ticks, members[i][1].pid))
    for partition in partitions:
        at, each = partition.id, context_save_bytes(partition)
        left = MAX_EXCUSED_QUEUES * each
        for i in oldest_first:
            process, truth = members[i]
            if truth.tracked and at in truth.driver_bytes:
                untracked = max(0, truth.driver_bytes[at] - truth.ledger_bytes.get(at, 0))
                excuse = min(untracked, process.compute_queues.get(partition.kfd_gpu_id, 0) * each, left)
                if excuse:
                    excuses[i][at] = excuse
                    left -= excuse
    return [(process, replace(truth, queue_bytes=of)) for (process, truth), of in zip(members, excuses, strict=True)]


def _slice_truth(item: Slice, inventory: Inventory, seen: Sequence[_Member]) -> Truth:
    there = (inventory.partition(share.partition) for share in item.shares)
    pairs = _excused(seen, [partition for partition in there if partition is not None])
    gpus = {}
    gated = needs_gate(item, inventory)
    for share in item.shares:
        partition = inventory.partition(share.partition)
        if partition is None:
            continue  # lost: nobody can say what is used there
        at, gpu_id = share.partition, partition.kfd_gpu_id
        driver = [(t.driver_bytes.get(at, 0), t.ledger_bytes.get(at, 0)) for _, t in pairs]
        occupied = [p.cu_occupancy[gpu_id] for p, _ in pairs if gpu_id in p.cu_occupancy]
        gpus[at] = GpuTruth(
            driver_bytes=sum(n for n, _ in driver),
            untracked_bytes=sum(max(0, n - known) for n, known in driver) if gated else None,
            compute_units_occupied=sum(occupied) if occupied else None,
        )
    return Truth(item.name, gpus, tuple(t for _, t in pairs), gated)
