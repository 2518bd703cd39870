"""Partition modes: what a driver can cut a GPU into, what was asked for, and which mode suits a wanted mix of slices.

Owns the rules by XCC count (SPX whole, DPX halves, TPX thirds, QPX quarters, CPX an XCC each) and by memory mode, the
text of a target, the ids that HAMi's mode ``partition`` needs, and the comparison of modes. Does not own switching
(``host/partition.py``) nor whose consent it takes (``node.py``). Pure.

Sources: the driver's ``aqua_vanjaram.c`` and ``amdgpu_xcp.c`` for the modes; ROCm's k8s device plugin and HAMi's for
what a partition's id looks like there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product
from typing import Final

from amdvgpud.core import cumask
from amdvgpud.core.compute import parse_compute
from amdvgpud.core.errors import AmdvgpuError, Invalid
from amdvgpud.core.identify import resolve
from amdvgpud.core.model import (
    Compute,
    CuLayout,
    Gpu,
    GpuId,
    Inventory,
    PartitionId,
    Profile,
)
from amdvgpud.core.sizes import human_size, parse_size

_COUNT: Final[Mapping[str, int]] = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4}
_MEMORY: Final[Mapping[str, tuple[str, ...]]] = {
    "SPX": ("NPS1",),
    "DPX": ("NPS1", "NPS2"),
    "TPX": ("NPS1", "NPS4"),
    "QPX": ("NPS1", "NPS4"),
    "CPX": ("NPS1", "NPS4"),
}
"""What gfx942 drivers advertise. A hint for people where the driver is silent; no compute mode is refused by it."""

ALL: Final = "all"


# -------------------------------------------------------------------------------------------------------- profiles


def partition_count(mode: str, xcc_count: int) -> int:
    """Partitions that ``mode`` makes of ``xcc_count`` XCCs. A machine may show fewer: render minors run out."""
    return _COUNT.get(mode, xcc_count)


def total_xccs(mode: str | None, seen: Sequence[int], available: Iterable[str]) -> int:
    """XCCs of the whole GPU, from the XCCs of the partitions seen in ``mode`` and the modes it can be put into.

    Not the sum alone: the last GPU of eight in CPX shows seven partitions of its eight. In CPX the menu tells: only 8
    XCCs have a QPX, only 6 a TPX.
    """
    by_mode = max(seen) * partition_count(mode, len(seen)) if mode else 0
    by_menu = 8 if "QPX" in available else 6 if "TPX" in available else 0
    return max(sum(seen), by_mode, by_menu)


def profiles(
    available: Sequence[str], memory: Sequence[str], xcc_count: int, said: Mapping[str, Sequence[str]]
) -> tuple[Profile, ...]:
    """The Profiles of a GPU, in the order of ``available``.

    ``memory``: the memory modes that it has. ``said``: memory modes by compute mode, where the driver tells them.
    """
    found = []
    for index, mode in enumerate(available):
        count = partition_count(mode, xcc_count)
        known = said.get(mode) or [nps for nps in _MEMORY.get(mode, ()) if nps in memory]
        if count and xcc_count % count == 0:
            found.append(Profile(index, mode, count, xcc_count // count, tuple(known)))
    return tuple(found)


# --------------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True, slots=True)
class Target:
    """What a GPU is to be cut into. A part that is None stays as it is."""

    compute: str | None = None
    memory: str | None = None

    def __post_init__(self) -> None:
        if self.compute is None and self.memory is None:
            raise Invalid.field("/compute", "neither a compute mode nor a memory mode is asked for: name one of them")
        if self.compute is not None and not re.fullmatch(r"[A-Z]{3}", self.compute, re.ASCII):
            raise Invalid.field("/compute", f"{self.compute!r} is no compute mode: SPX, DPX, TPX, QPX or CPX")
        if self.memory is not None and not re.fullmatch(r"NPS[1-9]", self.memory, re.ASCII):
            raise Invalid.field("/memory", f"{self.memory!r} is no memory mode: NPS1, NPS2, NPS4 or NPS8")


def parse_target(text: str) -> Target:
    """``CPX``, ``CPX/NPS4`` or ``/NPS4``, letter case aside."""
    compute, _, memory = text.strip().upper().partition("/")
    return Target(compute or None, memory or None)


def parse_targets(texts: Iterable[str]) -> tuple[tuple[str, Target], ...]:
    """``GPU=MODE`` each, GPU in any form of its name or ``all``; the later one counts where two name a GPU."""
    found = []
    for text in texts:
        name, equals, mode = text.rpartition("=")
        if not equals or not name.strip():
            raise Invalid(f"{text!r} is no target: write GPU=MODE, as in 'all=CPX' or '0000:83:00.0=QPX'")
        found.append((name.strip(), parse_target(mode)))
    return tuple(found)


def check_target(gpu: Gpu, target: Target) -> None:
    """``Invalid`` names what this GPU can be put into instead."""
    if not gpu.profiles:
        raise Invalid.field(
            "/compute", f"{gpu.id} ({gpu.product_name}) cannot be partitioned: its driver offers no mode"
        )
    offered = {profile.mode: profile for profile in gpu.profiles}
    mode = target.compute or gpu.compute_partition
    if target.compute is not None and target.compute not in offered:
        raise Invalid.field(
            "/compute", f"{target.compute} is no mode of {gpu.id} ({gpu.product_name}): it has {', '.join(offered)}"
        )
    if target.memory is not None and target.memory != gpu.memory_partition:
        fitting = offered[mode].memory_modes if mode in offered else gpu.available_memory_partitions
        if target.memory not in fitting:
            raise Invalid.field(
                "/memory", f"{target.memory} does not go with {mode} on {gpu.id}: {', '.join(fitting) or 'none'} would"
            )


def resolve_targets(
    inventory: Inventory, targets: Iterable[tuple[str, Target]]
) -> tuple[dict[GpuId, Target], list[str]]:
    """The Target of each GPU that ``targets`` mean here, and a sentence for each name that means none.

    All names at once, before anything is switched: a switch moves GPUs in KFD order, and with it their indices.
    ``all`` means those GPUs that can be partitioned into that mode at all.
    """
    found: dict[GpuId, Target] = {}
    unknown = []
    for name, target in targets:
        if name.lower() == ALL:
            able = [g for g in inventory.gpus if target.compute in (None, *(p.mode for p in g.profiles)) and g.profiles]
            found |= {gpu.id: target for gpu in able}
            continue
        try:
            found |= {partition.gpu: target for partition in resolve(inventory, name)}
        except AmdvgpuError as error:
            unknown.append(str(error))
    return found, unknown


# ------------------------------------------------------------------------------------------------------------ HAMi


@dataclass(frozen=True, slots=True)
class HamiPartition:
    """A Partition as a device of HAMi's mode ``partition``: its parent does not appear beside it."""

    id: str
    """``GPU-<unique id>#<mode>``; where partitions share that id (or have none) with their number: ``…-3#cpx``."""
    partition: PartitionId
    mode: str
    """Lower case, as in the id."""
    devmem_mib: int
    devcore: int
    """CUs."""


def hami_partitions(gpu: Gpu) -> tuple[HamiPartition, ...]:
    """One device a Partition, ids distinct. A GPU without modes has none: there it stays one GPU, shared softly.

    The mode ends the id in any case, because that is what others look for there. Numbers as the kernel has them, not
    the parent's divided by the count: eight in a row show one less on the last GPU of eight.
    """
    if gpu.compute_partition is None:
        return ()
    mode = gpu.compute_partition.lower()
    own = [p.unique_id for p in gpu.partitions]
    distinct = all(own) and len(set(own)) == len(own)
    parent = str(gpu.id)
    return tuple(
        HamiPartition(
            f"GPU-{p.unique_id:016x}#{mode}" if distinct else f"{parent}-{p.index}#{mode}",
            p.id,
            mode,
            p.vram_bytes >> 20,
            p.cu_count,
        )
        for p in gpu.partitions
    )


# --------------------------------------------------------------------------------------------------- suggesting modes


@dataclass(frozen=True, slots=True)
class Want:
    """So many slices alike. A percentage is of a whole GPU, because which partition there will be is the question."""

    text: str
    count: int
    compute: Compute
    vram_bytes: int


_WANT: Final = re.compile(r"(?:([0-9]{1,3})\s*x\s*)?([0-9.]+\s*%?):(.+)", re.ASCII | re.IGNORECASE)
MAX_WANTED: Final = 512


def parse_want(text: str) -> Want:
    """``4x25%:48GiB``: four slices with a quarter of a GPU's CUs and 48 GiB each; ``38:24GiB``: one, with 38 CUs."""
    match = _WANT.fullmatch(text.strip())
    if match is None:
        raise Invalid.field(
            "/want", f"{text!r} is no wish: write COUNTxCOMPUTE:VRAM, as in '4x25%:47GiB' or '38:24GiB'"
        )
    count = int(match[1] or 1)
    if not 1 <= count <= MAX_WANTED:
        raise Invalid.field("/want", f"{count} slices is out of range: 1 to {MAX_WANTED}")
    return Want(text.strip(), count, parse_compute(match[2]), parse_size(match[3], "/want"))


@dataclass(frozen=True, slots=True)
class Proposal:
    """One mode for each GPU, and how the wanted slices would lie in them.

    ``alone + sharing + unplaced == all that are wanted``. **Alone** is hard: the slice is the only one in its
    partition, so the driver itself keeps others off its XCCs and its part of the VRAM. **Sharing** is soft: there are
    others in its partition, or room for them, and the gate and CU masks stand between neighbours.
    """

    modes: tuple[tuple[GpuId, str | None], ...]
    alone: int
    sharing: int
    unplaced: int
    cus_wasted: int
    """What is granted beyond what was asked: of a partition that one slice has alone, all the rest of it."""
    vram_wasted_bytes: int
    switches: int
    """GPUs that are in another mode now."""
    untouched: int
    """GPUs that nothing is placed on."""


@dataclass(slots=True)
class _Bin:
    """A partition while slices are tried in it."""

    gpu: GpuId
    shape: _Shape
    asked: list[int]
    """CUs, one each."""
    granted_cus: int
    rows_left: int
    vram_left: int

    def takes_alone(self, cus: int, vram_bytes: int) -> bool:
        whole = cus <= self.shape.cu_count or self._rows(cus)[0] <= self.rows_left
        return not self.asked and vram_bytes <= self.shape.vram_bytes and whole

    def takes_one_more(self, cus: int, vram_bytes: int) -> bool:
        fits = self._rows(cus)[0] <= self.rows_left and vram_bytes <= self.vram_left
        return bool(self.asked) and self.shape.sliceable and fits

    @property
    def is_full(self) -> bool:
        return not self.rows_left or not self.shape.sliceable

    def _rows(self, cus: int) -> tuple[int, int]:
        """The least and the usual number of rows for so many CUs, as the planner rounds."""
        exact = cus / self.shape.row_cus
        return max(1, int(exact)), max(1, int(exact + 0.5))

    def put(self, cus: int, vram_bytes: int) -> None:
        rows = min(self._rows(cus)[1], self.rows_left)
        self.asked.append(cus)
        self.granted_cus += rows * self.shape.row_cus
        self.rows_left -= rows
        self.vram_left -= vram_bytes


def suggest(inventory: Inventory, wants: Sequence[Want], busy: frozenset[GpuId] = frozenset()) -> tuple[Proposal, ...]:
    """Modes for the GPUs that are not ``busy``, hardest isolation first; each further one isolates less and wastes
    clearly less. Only those that place the most. Empty without an idle GPU, and without a wish.

    Figures follow from row sizes and capacities as the planner has them, on layouts cut from the present ones; what a
    real switch gives is read from the machine after it. GPUs that are alike are not told apart, and where there are
    very many combinations, alike ones get the same mode.
    """
    gpus = [gpu for gpu in inventory.gpus if gpu.id not in busy]
    if not gpus or not wants:
        return ()
    biggest = max(gpu.cu_count for gpu in gpus)
    wanted = sorted(
        ((_cus_of(want, biggest), want.vram_bytes) for want in wants for _ in range(want.count)), reverse=True
    )
    shapes = {(gpu.id, mode): _shapes(gpu, mode) for gpu in gpus for mode in _modes_of(gpu)}
    found = [_try(gpus, modes, shapes, wanted, packed) for modes in _assignments(gpus) for packed in (False, True)]
    fewest = min(p.unplaced for p in found)
    total_cus, total_vram = sum(g.cu_count for g in gpus), sum(g.vram_bytes for g in gpus)

    def waste(p: Proposal) -> float:
        return p.cus_wasted / total_cus + p.vram_wasted_bytes / total_vram

    front: list[Proposal] = []
    for p in sorted(
        (p for p in found if p.unplaced == fewest), key=lambda p: (p.sharing, waste(p), -p.untouched, p.switches)
    ):
        if not front or waste(p) < _WORTH_WHILE * waste(front[-1]):
            front.append(p)
    return tuple(front[:5])


def _cus_of(want: Want, whole: int) -> int:
    if want.compute.percent is None:
        return want.compute.cu_count or 1
    return max(1, round(want.compute.percent * whole / 100))


def _modes_of(gpu: Gpu) -> list[str | None]:
    """Those that need no driver reload; a GPU without modes stays as it is."""
    fitting = [p.mode for p in gpu.profiles if gpu.memory_partition in (None, *p.memory_modes)]
    return [*fitting] if fitting else [gpu.compute_partition]


_MANY: Final = 2000
_WORTH_WHILE: Final = 0.8
"""Less isolation is proposed only where it saves a fifth of the waste; guessed, to keep the list short."""


def _assignments(gpus: Sequence[Gpu]) -> Iterable[tuple[str | None, ...]]:
    """A mode for each of ``gpus``, in order. Of alike GPUs only how many get a mode is varied, and those in that mode
    now come first."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, gpu in enumerate(gpus):
        groups.setdefault((gpu.device_id, gpu.cu_count, gpu.vram_bytes, *_modes_of(gpu)), []).append(i)
    choices = []
    combinations = 1
    for members in groups.values():
        modes = _modes_of(gpus[members[0]])
        options = list(combinations_with_replacement(modes, len(members)))
        if combinations * len(options) > _MANY:
            options = [(mode,) * len(members) for mode in modes]
        combinations *= len(options)
        choices.append([(members, option) for option in options])
    for chosen in product(*choices):
        assigned: dict[int, str | None] = {}
        for members, option in chosen:
            left = list(option)
            for i in members:
                if gpus[i].compute_partition in left:
                    left.remove(gpus[i].compute_partition)
                    assigned[i] = gpus[i].compute_partition
            for i in members:
                if i not in assigned:
                    assigned[i] = left.pop(0)
        yield tuple(assigned[i] for i in range(len(gpus)))


@dataclass(frozen=True, slots=True)
class _Shape:
    """What counts of a partition when slices are tried in it."""

    cu_count: int
    row_cus: int
    row_count: int
    sliceable: bool
    vram_bytes: int


def _shapes(gpu: Gpu, mode: str | None) -> list[_Shape]:
    """Of each partition that ``gpu`` has in ``mode``."""
    found = []
    for layout, vram_bytes in _cut(gpu, mode):
        rows = cumask.rows(layout)
        found.append(_Shape(layout.cu_count, rows.row_cus, len(rows.rows), rows.sliceable, vram_bytes))
    return found


def _cut(gpu: Gpu, mode: str | None) -> list[tuple[CuLayout, int]]:
    """Layout and VRAM of each partition in ``mode``: the GPU's own where that is the present one, else cut from it."""
    profile = next((p for p in gpu.profiles if p.mode == mode), None)
    if profile is None or mode == gpu.compute_partition:
        return [(p.layout, p.vram_bytes) for p in gpu.partitions]
    first = gpu.partitions[0].layout
    arrays = first.engines_per_xcc * first.arrays_per_engine
    active = [n for p in gpu.partitions for n in p.layout.active]
    whole = profile.partition_count * profile.xccs_per_partition * arrays
    active += active[-arrays:] * ((whole - len(active)) // arrays)  # a partition that is not shown: like its neighbour
    each = profile.xccs_per_partition * arrays
    # Not from the partitions' own figures: each was rounded down, and one may not be shown.
    vram_bytes = gpu.vram_bytes // profile.partition_count
    return [
        (replace(first, xcc_count=profile.xccs_per_partition, active=tuple(active[i : i + each])), vram_bytes)
        for i in range(0, whole, each)
    ]


def _try(
    gpus: Sequence[Gpu],
    modes: tuple[str | None, ...],
    shapes: Mapping[tuple[GpuId, str | None], list[_Shape]],
    wanted: Sequence[tuple[int, int]],
    packed: bool,
) -> Proposal:
    """Largest first, each into the smallest partition that takes it; an empty one first, or (``packed``) last.

    Packed, what is left of a partition is for others, so its one slice has it alone only if nothing is left.
    """
    bins = [
        _Bin(gpu.id, shape, [], 0, shape.row_count, shape.vram_bytes)
        for gpu, mode in zip(gpus, modes, strict=True)
        for shape in shapes[gpu.id, mode]
    ]
    unplaced = 0
    used: set[GpuId] = set()
    for cus, vram_bytes in wanted:
        empty = [b for b in bins if b.takes_alone(cus, vram_bytes)]
        shared = [b for b in bins if b.takes_one_more(cus, vram_bytes)]
        candidates = (shared or empty) if packed else (empty or shared)
        if not candidates:
            unplaced += 1
            continue
        best = min(candidates, key=lambda b: (b.shape.cu_count, b.gpu not in used, b.rows_left, b.vram_left))
        best.put(cus, vram_bytes)
        used.add(best.gpu)
    alone = [b for b in bins if len(b.asked) == 1 and (b.is_full or not packed)]
    others = [b for b in bins if b.asked and b not in alone]
    return Proposal(
        modes=tuple((gpu.id, mode) for gpu, mode in zip(gpus, modes, strict=True)),
        alone=len(alone),
        sharing=sum(len(b.asked) for b in others),
        unplaced=unplaced,
        cus_wasted=sum(max(0, b.shape.cu_count - b.asked[0]) for b in alone)
        + sum(max(0, b.granted_cus - sum(b.asked)) for b in others),
        vram_wasted_bytes=sum(b.vram_left for b in alone),
        switches=sum(mode != gpu.compute_partition for gpu, mode in zip(gpus, modes, strict=True)),
        untouched=len(gpus) - len(used),
    )


def describe(proposal: Proposal) -> str:
    """One line for people: ``QPX x1, SPX x1: 4 alone (hard), 2 sharing (soft); wasted 8 CUs and 1 GiB``."""
    counts: dict[str, int] = {}
    for _, mode in proposal.modes:
        counts[mode or "-"] = counts.get(mode or "-", 0) + 1
    modes = ", ".join(f"{count} x {mode}" for mode, count in counts.items())
    parts = [f"{proposal.alone} alone (hard)", f"{proposal.sharing} sharing (soft)"]
    if proposal.unplaced:
        parts.append(f"{proposal.unplaced} without a place")
    return f"{modes}: {', '.join(parts)}; wasted {proposal.cus_wasted} CUs and {human_size(proposal.vram_wasted_bytes)}"
