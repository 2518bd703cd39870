"""The words of amdvgpud as values: what a node has, what is asked of it, what it has promised.

Frozen dataclasses that check themselves: a wrong value cannot be held. No I/O, no clock. ``Inventory`` is what the
kernel shows, ``Book`` what the daemon has promised, ``Usage`` what a ledger says; each is a picture, replaced whole.
The words are defined in ``docs/architecture.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final, NewType

from amdvgpud.core.errors import Invalid

GpuId = NewType("GpuId", str)
"""Stable id of one physical adapter: ``GPU-<16 hex digits>`` of its unique id; without one, ``pci-<dddd-bb-dd.f>``."""

PartitionId = NewType("PartitionId", str)
"""Stable id of a Partition: ``<GpuId>/<index>``; an unpartitioned GPU has just ``/0``."""

SliceName = NewType("SliceName", str)
"""Name of a Slice: unique on the node, its CDI device name and the name of its directory."""

LeaseId = NewType("LeaseId", str)

MAX_GPUS_PER_SLICE: Final = 16
"""Entries a policy file has room for (``AVG_MAX_GPUS`` of the shared header; compared by a test)."""

_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?", re.ASCII)


def slice_name(text: str, pointer: str = "/name") -> SliceName:
    """``text`` as a slice name. It becomes a file name, a CDI device name and a label, hence the small alphabet."""
    if not _NAME.fullmatch(text) or ".." in text:
        raise Invalid.field(
            pointer,
            f"{text!r} is no slice name: use 1 to 63 of a-z 0-9 . - (first and last a letter or digit, no '..')",
        )
    return SliceName(text)


def gpu_of(partition: PartitionId) -> GpuId:
    """The GPU a partition is of, also when neither is there any more: the id says it."""
    return GpuId(partition.rpartition("/")[0])


# --------------------------------------------------------------------------------------------------- compute units


@dataclass(frozen=True, slots=True)
class CuSet:
    """Compute units of one Partition, as the mask bits the KFD knows them by: ascending, distinct, at least one."""

    bits: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.bits:
            raise ValueError("a CuSet has at least one CU: an empty mask can hang the queue it is set on")
        if any(b <= a for a, b in zip(self.bits, self.bits[1:], strict=False)) or self.bits[0] < 0:
            raise ValueError(f"CU bits must be ascending, distinct and not negative: {self.bits}")

    @classmethod
    def from_mask(cls, mask: int) -> CuSet:
        """The set of the one-bits of ``mask`` (bit 0 is CU 0)."""
        return cls(tuple(i for i in range(mask.bit_length()) if mask >> i & 1))

    @property
    def mask(self) -> int:
        """The set as one whole number, bit 0 being CU 0."""
        value = 0
        for bit in self.bits:
            value |= 1 << bit
        return value

    def __len__(self) -> int:
        return len(self.bits)

    def __iter__(self) -> Iterator[int]:
        return iter(self.bits)


@dataclass(frozen=True, slots=True)
class CuLayout:
    """How the CUs of one Partition lie in silicon, as far as the kernel's mask walk depends on it.

    ``active`` holds the active CUs of each shader array, XCC-major, then engine, then array, as in
    ``active[(xcc * engines_per_xcc + engine) * arrays_per_engine + array]``. ``harvest_known`` is false where the
    kernel does not tell which CUs are fused off and ``active`` is an even split.
    """

    xcc_count: int
    engines_per_xcc: int
    arrays_per_engine: int
    active: tuple[int, ...]
    wgp: bool
    """gfx10 and later: bits come in pairs, and a mask that splits one is refused by driver and runtime."""
    harvest_known: bool = True

    def __post_init__(self) -> None:
        shape = self.xcc_count, self.engines_per_xcc, self.arrays_per_engine
        if min(shape) < 1 or len(self.active) != shape[0] * shape[1] * shape[2]:
            raise ValueError(f"{len(self.active)} arrays do not fill {shape} (XCCs, engines, arrays)")
        if min(self.active) < 0 or not sum(self.active):
            raise ValueError(f"a layout has at least one active CU, none negative: {self.active}")

    @property
    def cu_count(self) -> int:
        return sum(self.active)


# ------------------------------------------------------------------------------------------------------- inventory


class LinkKind(StrEnum):
    PCIE = "pcie"
    XGMI = "xgmi"


@dataclass(frozen=True, slots=True)
class Link:
    """A KFD io_link or p2p_link from a Partition to another KFD node. ``weight`` is the KFD's: less is nearer."""

    kind: LinkKind
    to_kfd_node: int
    weight: int


@dataclass(frozen=True, slots=True)
class Partition:
    """What the kernel offers as one compute device: a KFD node and its render node.

    ``kfd_node``, ``kfd_gpu_id`` and ``render_minor`` are this boot's numbers: read anew at each scan, never stored.
    """

    id: PartitionId
    gpu: GpuId
    index: int
    kfd_node: int
    kfd_gpu_id: int
    render_minor: int
    vram_bytes: int
    layout: CuLayout
    gfx_target: str
    unique_id: int
    """As this KFD node prints it; partitions of one GPU may share it. 0: none."""
    numa_node: int | None = None
    links: tuple[Link, ...] = ()

    @property
    def cu_count(self) -> int:
        return self.layout.cu_count


@dataclass(frozen=True, slots=True)
class Profile:
    """One way in which a driver can cut a GPU: a compute partition mode and what it makes."""

    index: int
    """Rank in the driver's own list, from 0."""
    mode: str
    """``SPX``, ``DPX``, ``TPX``, ``QPX`` or ``CPX``."""
    partition_count: int
    xccs_per_partition: int
    memory_modes: tuple[str, ...]
    """The memory modes (``NPS1``…) that it goes with on this GPU."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One physical adapter: one PCI function with an amdgpu driver, and the Partitions it offers now (at least one)."""

    id: GpuId
    index: int
    """Rank in KFD node order, from 0: the order in which HIP counts. Never PCI order."""
    pci_address: str
    """``dddd:bb:dd.f``, lower case."""
    unique_id: int
    smi_uuid: str | None
    """As AMD SMI prints it, computed from sysfs; None without a unique id."""
    device_id: int
    revision: int
    product_name: str
    gfx_target: str
    vram_bytes: int
    """Whole device, as the driver reports it (mem_info); without that file, the sum of the partitions."""
    partitions: tuple[Partition, ...]
    numa_node: int | None = None
    compute_partition: str | None = None
    memory_partition: str | None = None
    available_compute_partitions: tuple[str, ...] = ()
    available_memory_partitions: tuple[str, ...] = ()
    xgmi_hive_id: int = 0
    profiles: tuple[Profile, ...] = ()
    """In the driver's order; empty where the GPU cannot be partitioned."""

    def __post_init__(self) -> None:
        if not self.partitions:
            raise ValueError(f"{self.id} has no partition: it is not a GPU that can be used")

    @property
    def cu_count(self) -> int:
        return sum(p.cu_count for p in self.partitions)


@dataclass(frozen=True, slots=True)
class Unusable:
    """An AMD display or compute device of the machine that cannot be handed out, and why."""

    pci_address: str | None
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A GPU that was here, by an earlier scan or by slices that are cut from it, and is not: not even as unusable."""

    id: GpuId
    since_s: float
    """Unix time of the first scan that did not find it."""
    pci_address: str | None = None
    """Where it was; None where only the Book knows of it."""
    product_name: str | None = None


@dataclass(frozen=True, slots=True)
class Inventory:
    """What the machine has: GPUs in KFD order, what is unusable, what was odd. Replaced whole by each scan."""

    gpus: tuple[Gpu, ...] = ()
    unusable: tuple[Unusable, ...] = ()
    generation_id: int = 0
    """The KFD topology's own counter at the time of the scan."""
    driver_version: str | None = None
    driver_src_version: str | None = None
    """The driver's sum of its own sources; only where it was built with one."""
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ids = [p.id for p in self.partitions]
        if len(set(ids)) != len(ids):
            raise ValueError(f"two partitions share an id: {ids}")

    @property
    def partitions(self) -> tuple[Partition, ...]:
        """All Partitions in KFD node order."""
        return tuple(sorted((p for g in self.gpus for p in g.partitions), key=lambda p: p.kfd_node))

    def partition(self, wanted: PartitionId) -> Partition | None:
        return next((p for g in self.gpus for p in g.partitions if p.id == wanted), None)

    def gpu(self, wanted: GpuId) -> Gpu | None:
        return next((g for g in self.gpus if g.id == wanted), None)


# --------------------------------------------------------------------------------------------------------- request


class ComputePolicy(StrEnum):
    BALANCED = "balanced"
    """Whole rows: one CU (WGP) in every engine of every XCC. Rounded to rows; no CU has two owners."""
    FINE = "fine"
    """Rows, then single columns (one engine of every XCC): closer to the asked count, one CU column uneven at most."""
    EXACT = "exact"
    """A count dictated from outside: down to a multiple of the XCC count (at least one each), up to whole WGPs."""
    WHOLE = "whole"
    """The whole Partition, alone on it, with no mask."""
    SHARED = "shared"
    """Rows that may overlap with other shared slices', never with anybody else's."""


@dataclass(frozen=True, slots=True)
class Compute:
    """How much compute is asked on each GPU: a share in per cent or a CU count (exactly one; none for WHOLE)."""

    policy: ComputePolicy = ComputePolicy.BALANCED
    percent: float | None = None
    cu_count: int | None = None

    def __post_init__(self) -> None:
        given = (self.percent is not None) + (self.cu_count is not None)
        if given != (self.policy is not ComputePolicy.WHOLE):
            raise Invalid.field("/compute", "give a percentage or a CU count, one of the two; 'whole' takes neither")
        if self.policy is ComputePolicy.EXACT and self.cu_count is None:
            raise Invalid.field("/compute", "'exact' takes a CU count, not a percentage")
        if self.percent is not None and not 0 < self.percent <= 100:
            raise Invalid.field("/compute", f"{self.percent:g}% is out of range: more than 0 and at most 100 per cent")
        if self.cu_count is not None and not 1 <= self.cu_count <= 1024:
            raise Invalid.field("/compute", f"{self.cu_count} CUs is out of range: 1 to 1024")


class Priority(StrEnum):
    """The most that a slice's compute queues may ask for, among the tenants of a GPU. A ceiling, not a reservation."""

    LOW = "low"
    NORMAL = "normal"
    """What runtimes ask for unless a program wants more. Alone on its Partition (WHOLE) a slice has no ceiling then."""
    HIGH = "high"


class Spread(StrEnum):
    BINPACK = "binpack"
    """The fullest partition that still fits: leaves whole GPUs free."""
    SPREAD = "spread"
    """The emptiest one: fewest neighbours."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for, not yet placed. ``vram_bytes`` and ``compute`` are for each of ``gpu_count`` different GPUs.

    ``vram_bytes`` None asks for all that is left of the Partition (WHOLE: all of it). ``on`` names Partitions or GPUs
    to place on, in any form :func:`amdvgpud.core.identify.resolve` knows; empty: anywhere.
    """

    name: SliceName
    compute: Compute
    vram_bytes: int | None = None
    gpu_count: int = 1
    on: tuple[str, ...] = ()
    spread: Spread = Spread.BINPACK
    priority: Priority = Priority.NORMAL
    oversubscribe: bool = False
    """Where the driver has no VRAM left, host memory serves within the same quota: slower, but no refusal."""
    after: tuple[SliceName, ...] = ()
    """Slices that are over before this one is used, so that it may be given what they have. Whoever asks must know: a
    pod's init container has ended before its next container starts. From each other slice both are kept apart."""
    together: tuple[SliceName, ...] = ()
    """All slices of the one container that this is for, itself among them. Then each tells the variables of all: of two
    CDI devices that set one, the last would hide what the others bring. Empty: what comes beside it nobody knows."""

    def __post_init__(self) -> None:
        if not 1 <= self.gpu_count <= MAX_GPUS_PER_SLICE:
            raise Invalid.field("/gpu_count", f"{self.gpu_count} is out of range: 1 to {MAX_GPUS_PER_SLICE} GPUs")
        if self.vram_bytes is not None and self.vram_bytes < 1:
            raise Invalid.field("/vram", f"{self.vram_bytes} bytes is no quota: at least 1")
        if self.on and len(self.on) < self.gpu_count:
            raise Invalid.field("/on", f"{len(self.on)} places are named for {self.gpu_count} GPUs")


# ------------------------------------------------------------------------------------------------- slices and book


@dataclass(frozen=True, slots=True)
class Share:
    """A Quota placed on one Partition. ``cus`` None: the whole Partition, unmasked."""

    partition: PartitionId
    vram_bytes: int
    cus: CuSet | None
    shared: bool
    asked_cus: int
    granted_cus: int
    effective_cus: int
    """CUs' worth of work the hardware can balance over the set: min over engines x engines, min over XCCs x XCCs."""
    layout_hash: str
    """Digest of the CuLayout the set was cut for: another layout makes the same bits other silicon."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A named unit of grant: one Share per GPU; one CDI device, one policy, one Ledger."""

    name: SliceName
    request: Request
    shares: tuple[Share, ...]
    """In KFD node order, which is the order a container counts them in."""
    created_s: float
    """Unix time."""
    revision: int
    """The Book's revision that last changed this slice; its ETag."""
    owner_uid: int = 0
    """Who may pass through the slice's directory on the host (a rootless runtime must)."""
    profile: str = ""
    """The profile of the configuration that it was cut for, and goes with; empty: somebody has asked for it."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a Lease: a free text for people and, where known, a process whose end is the Lease's end.

    A process is its host pid **and** its start time (clock ticks since boot, field 22 of /proc/<pid>/stat): pids recur.
    """

    text: str
    pid: int | None = None
    start_ticks: int | None = None

    def __post_init__(self) -> None:
        if (self.pid is None) != (self.start_ticks is None):
            raise ValueError("a holder process is a pid together with its start time")


@dataclass(frozen=True, slots=True)
class Lease:
    """A Holder's right to a Slice, with expiry or none. At most one per Slice."""

    id: LeaseId
    slice: SliceName
    holder: Holder
    created_s: float
    expires_s: float | None
    ephemeral: bool
    """The slice was made for this lease and goes with it."""
    container: bool = False
    """It lasts as long as the container that takes the slice: the holder gets that one's first process."""


@dataclass(frozen=True, slots=True)
class HealthOverride:
    """A person's word on a GPU, which holds whatever is found of it."""

    healthy: bool
    since_s: float


@dataclass(frozen=True, slots=True)
class Book:
    """All that the node has promised. ``free + sum of quotas == partition.vram_bytes`` unless oversubscribed.

    Values are Mappings that nobody changes: a new Book is made for each change (:meth:`with_slice` and its kin).
    """

    revision: int = 0
    slices: Mapping[SliceName, Slice] = field(default_factory=lambda: MappingProxyType({}))
    leases: Mapping[LeaseId, Lease] = field(default_factory=lambda: MappingProxyType({}))
    cordoned: frozenset[GpuId] = frozenset()
    oversubscription: Mapping[GpuId, float] = field(default_factory=lambda: MappingProxyType({}))
    """VRAM promised may reach this many times what the GPU has; a GPU not listed: 1.0, which is off."""
    health_overrides: Mapping[GpuId, HealthOverride] = field(default_factory=lambda: MappingProxyType({}))

    def with_slice(self, item: Slice) -> Book:
        return self._next(slices={**self.slices, item.name: item})

    def without_slice(self, name: SliceName) -> Book:
        return self._next(
            slices={k: v for k, v in self.slices.items() if k != name},
            leases={k: v for k, v in self.leases.items() if v.slice != name},
        )

    def with_lease(self, item: Lease) -> Book:
        return self._next(leases={**self.leases, item.id: item})

    def without_lease(self, lease_id: LeaseId) -> Book:
        return self._next(leases={k: v for k, v in self.leases.items() if k != lease_id})

    def with_cordoned(self, cordoned: Iterable[GpuId]) -> Book:
        return self._next(cordoned=frozenset(cordoned))

    def with_oversubscription(self, ratios: Mapping[GpuId, float]) -> Book:
        return self._next(oversubscription=ratios)

    def with_health_override(self, gpu: GpuId, word: HealthOverride | None) -> Book:
        kept = {k: v for k, v in self.health_overrides.items() if k != gpu}
        return self._next(health_overrides=kept if word is None else {**kept, gpu: word})

    def lease_of(self, name: SliceName) -> Lease | None:
        return next((lease for lease in self.leases.values() if lease.slice == name), None)

    def _next(
        self,
        slices: Mapping[SliceName, Slice] | None = None,
        leases: Mapping[LeaseId, Lease] | None = None,
        cordoned: frozenset[GpuId] | None = None,
        oversubscription: Mapping[GpuId, float] | None = None,
        health_overrides: Mapping[GpuId, HealthOverride] | None = None,
    ) -> Book:
        return Book(
            self.revision + 1,
            MappingProxyType(dict(self.slices if slices is None else slices)),
            MappingProxyType(dict(self.leases if leases is None else leases)),
            self.cordoned if cordoned is None else cordoned,
            MappingProxyType(dict(self.oversubscription if oversubscription is None else oversubscription)),
            MappingProxyType(dict(self.health_overrides if health_overrides is None else health_overrides)),
        )


# ----------------------------------------------------------------------------------------------------------- usage


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """What one Ledger says of one of its GPUs. Guest-writable: shown, never admitted by."""

    kfd_gpu_id: int
    used_bytes: int
    peak_bytes: int
    denials: int
    denied_bytes: int
    allocations: int
    frees: int


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """One live slot. ``pid`` is the pid as its own namespace counts it; ``pid_namespace`` that namespace's inode."""

    slot: int
    pid: int
    start_ticks: int
    pid_namespace: int
    used_bytes: Mapping[int, int]
    """By KFD gpu_id."""


@dataclass(frozen=True, slots=True)
class Usage:
    """A frozen picture of one Ledger."""

    slice: SliceName
    gpus: tuple[GpuUsage, ...] = ()
    processes: tuple[ProcessUsage, ...] = ()
    damaged: str | None = None
    """Why the ledger cannot be believed (shortened, grown, foreign magic), or None."""
    reclaimed_bytes: int = 0
    """Charges of dead processes returned since the slice was made."""

    def used_bytes(self, kfd_gpu_id: int) -> int:
        return next((g.used_bytes for g in self.gpus if g.kfd_gpu_id == kfd_gpu_id), 0)
