"""Stand-ins for Node's ports, for tests that are about Node or about a face. tests/contract runs the same checks on
each of them and on the real thing. A fake can be told to fail, once, at a named step: that is how crashes are tried.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from amdvgpud.core.errors import Conflict, HostFailure, NotFound
from amdvgpud.core.model import (
    Book,
    CuLayout,
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
from amdvgpud.core.modes import profiles
from amdvgpud.core.truth import KernelPicture
from amdvgpud.ports import CdiStatus, KfdUser

GIB = 1024**3


def mi300x_layout() -> CuLayout:
    """304 CUs: 8 XCCs of 4 engines, 38 CUs each, two engines of each XCC with 10 CUs and two with 9."""
    return CuLayout(8, 4, 1, (10, 10, 9, 9) * 8, wgp=False)


def a_gpu(index: int, vram_bytes: int = 192 * GIB, layout: CuLayout | None = None) -> Gpu:
    """An unpartitioned GPU; all its numbers follow from ``index``, none equals another enumeration's."""
    gpu_id = GpuId(f"GPU-{0xABCD0000 + index:016x}")
    partition = Partition(
        PartitionId(f"{gpu_id}/0"),
        gpu_id,
        0,
        kfd_node=index + 2,
        kfd_gpu_id=1000 + index,
        render_minor=128 + index * 8,
        vram_bytes=vram_bytes,
        layout=layout or mi300x_layout(),
        gfx_target="gfx942",
        unique_id=0xABCD0000 + index,
        numa_node=0,
    )
    return Gpu(
        gpu_id,
        index,
        f"0000:{0x11 + index:02x}:00.0",
        0xABCD0000 + index,
        None,
        0x74A1,
        0,
        "AMD Instinct MI300X",
        "gfx942",
        vram_bytes,
        (partition,),
        numa_node=0,
        compute_partition="SPX",
        memory_partition="NPS1",
        profiles=profiles(("SPX", "DPX", "QPX", "CPX"), ("NPS1", "NPS4"), 8, {}),
    )


def in_mode(gpu: Gpu, mode: str) -> Gpu:
    """``gpu``, whole before, as its driver would cut it. Its gpu_ids are others, and it comes last in KFD order."""
    (whole,) = gpu.partitions
    count = next(p.partition_count for p in gpu.profiles if p.mode == mode)
    active = whole.layout.active
    each = len(active) // count
    partitions = tuple(
        replace(
            whole,
            id=PartitionId(f"{gpu.id}/{i}"),
            index=i,
            kfd_node=100 + 10 * gpu.index + i,
            kfd_gpu_id=5000 + 100 * gpu.index + 10 * count + i,
            render_minor=whole.render_minor + i,
            vram_bytes=gpu.vram_bytes // count,
            layout=replace(whole.layout, xcc_count=8 // count, active=active[i * each : (i + 1) * each]),
        )
        for i in range(count)
    )
    return replace(gpu, partitions=partitions, compute_partition=mode)


def an_inventory(gpu_count: int = 2) -> Inventory:
    return Inventory(tuple(a_gpu(i) for i in range(gpu_count)), generation_id=1)


@dataclass
class StillSysfs:
    """A machine that has what it is told to have."""

    inventory: Inventory
    used_bytes: dict[str, int] = field(default_factory=dict)
    degrees_c: dict[str, dict[str, float]] = field(default_factory=dict)
    reads: int = 0
    broken: OSError | None = None

    def read_inventory(self) -> Inventory:
        self.reads += 1
        if self.broken is not None:
            raise self.broken
        return self.inventory

    def vram_used_bytes(self, pci_address: str) -> int | None:
        return self.used_bytes.get(pci_address)

    def temperatures_c(self, pci_address: str) -> dict[str, float]:
        return self.degrees_c.get(pci_address, {})


@dataclass
class StillModes:
    """A driver over a StillSysfs: switches at once, refuses while a process has the GPU open, fails as it is told."""

    sysfs: StillSysfs
    opened: dict[GpuId, tuple[KfdUser, ...]] = field(default_factory=dict)
    refusals: list[Exception] = field(default_factory=list)
    """Raised by the next writes, one each."""
    requested: dict[GpuId, str] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)

    def users(self, gpu: Gpu | None) -> tuple[KfdUser, ...]:
        if gpu is not None:
            return self.opened.get(gpu.id, ())
        return tuple(user for users in self.opened.values() for user in users)

    def set_compute(self, gpu: Gpu, mode: str) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        if gpu.compute_partition == mode:
            return
        if self.opened.get(gpu.id):
            raise Conflict(f"{gpu.id}: EBUSY")
        self.written.append(f"{gpu.id} {mode}")
        whole = a_gpu(int(gpu.pci_address[5:7], 16) - 0x11)
        others = [g for g in self.sysfs.inventory.gpus if g.id != gpu.id]
        cut = whole if mode == "SPX" else in_mode(whole, mode)
        gpus = tuple(replace(g, index=i) for i, g in enumerate([*others, cut]))
        generation = self.sysfs.inventory.generation_id + 1
        self.sysfs.inventory = replace(self.sysfs.inventory, gpus=gpus, generation_id=generation)

    def request_memory(self, gpu: Gpu, mode: str) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.requested[gpu.id] = mode


class Crash(BaseException):  # not an error: the end of the process, as kill -9 makes it
    """Nobody catches this, so nothing is undone after it."""


@dataclass
class Faults:
    """Steps that fail, or end the process, once each, when their turn comes; ``done`` is what has happened so far."""

    failing: set[str] = field(default_factory=set)
    crashing: set[str] = field(default_factory=set)
    done: list[str] = field(default_factory=list)
    error: type[Exception] = HostFailure

    def step(self, name: str) -> None:
        if name in self.crashing:
            self.crashing.remove(name)
            raise Crash(name)
        if name in self.failing:
            self.failing.remove(name)
            raise self.error(f"{name}: no luck")
        self.done.append(name)


@dataclass
class MemoryJournal:
    stored: Book = field(default_factory=Book)
    faults: Faults = field(default_factory=Faults)
    open: bool = False

    def load(self) -> Book:
        self.open = True
        return self.stored

    def commit(self, before: Book, after: Book) -> None:
        if not self.open:
            raise HostFailure("commit before load")
        self.faults.step("commit")
        self.stored = after

    def close(self) -> None:
        self.open = False


@dataclass
class MemoryFiles:
    """Directories as a dict; ``usages`` is what guests have written into their ledgers."""

    faults: Faults = field(default_factory=Faults)
    written: dict[SliceName, Slice] = field(default_factory=dict)
    usages: dict[SliceName, Usage] = field(default_factory=dict)
    dead_bytes: dict[SliceName, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    unopenable: set[SliceName] = field(default_factory=set)
    """Slices whose ledger is there and cannot be opened."""
    broken: Exception | None = None
    """What writing raises, once."""

    def prepare(self) -> None:
        self.faults.step("prepare")

    def write(self, item: Slice, inventory: Inventory) -> None:
        self.faults.step(f"write {item.name}")
        if self.broken is not None:
            error, self.broken = self.broken, None
            raise error
        self.written[item.name] = item
        self.usages.setdefault(item.name, Usage(item.name))

    def remove(self, name: SliceName) -> None:
        self.faults.step(f"remove {name}")
        self.written.pop(name, None)
        self.usages.pop(name, None)

    def names(self) -> frozenset[SliceName]:
        return frozenset(self.written)

    def usage(self, name: SliceName) -> Usage:
        self._there(name)
        return self.usages[name]

    def reclaim(self, name: SliceName) -> int:
        self._there(name)
        if freed := self.dead_bytes.pop(name, 0):
            before = self.usages[name]
            self.usages[name] = replace(before, processes=(), reclaimed_bytes=before.reclaimed_bytes + freed)
        return freed

    def _there(self, name: SliceName) -> None:
        if name not in self.usages:
            raise NotFound(f"slice {name} has no directory")
        if name in self.unopenable:
            raise HostFailure(f"slice {name}: its ledger cannot be opened")

    def run_a_process_in(self, name: SliceName, pid: int = 4321) -> None:
        self.usages[name] = Usage(name, processes=(ProcessUsage(0, pid, 77, 1, {}),))


@dataclass
class MemoryCdi:
    faults: Faults = field(default_factory=Faults)
    published: tuple[SliceName, ...] = ()
    last: CdiStatus = field(default_factory=lambda: CdiStatus("memory", False, None, ()))

    def publish(self, slices: Sequence[Slice], inventory: Inventory) -> CdiStatus:
        try:
            self.faults.step("publish")
        except HostFailure as error:
            self.last = replace(self.last, error=str(error))
            return self.last
        self.published = tuple(sorted(s.name for s in slices))
        self.last = CdiStatus("memory", bool(slices), None, ())
        return self.last

    def render(self, slices: Sequence[Slice], inventory: Inventory) -> dict[str, object]:
        return {"devices": [{"name": s.name} for s in slices]}

    def status(self) -> CdiStatus:
        return self.last


@dataclass
class StillFigures:
    """A kernel that says what it is told to say."""

    picture: KernelPicture = field(default_factory=KernelPicture)
    looks: int = 0
    cgroups: Collection[str] = ()
    """That were asked for last."""

    def read(self, inventory: Inventory, cgroups: Collection[str] = ()) -> KernelPicture:
        self.looks += 1
        self.cgroups = cgroups
        return self.picture


@dataclass
class StillEnder:
    """Ends whoever it knows: process (pid, start time) -> the slice that its mounts show."""

    living: dict[tuple[int, int], SliceName] = field(default_factory=dict)
    sent: list[tuple[int, int]] = field(default_factory=list)
    refusal: HostFailure | None = None

    def end(self, pid: int, start: int, name: SliceName, number: int) -> None:
        if self.refusal is not None:
            raise self.refusal
        if self.living.get((pid, start)) != name:
            raise NotFound(f"process {pid} has ended, or is another one by now")
        self.sent.append((pid, number))


Places = Sequence[tuple[Gpu, Partition]]


def left_on(places: Places, reason: str) -> dict[GpuId, str]:
    """What a :class:`amdvgpud.ports.Leftovers` says that sees something on each of ``places``."""
    return {gpu.id: reason for gpu, _ in places}
