"""CU masks: which bit is which silicon, and the text of HSA_CU_MASK.

Owns the simulation of the kernel's bit walk, the grouping of bits into rows, columns and the tail, the capacity that
the hardware can balance over a set, and both grammars of the mask text: ours (canonical, strict) and ROCr's (as it is).
Decides nothing about who gets what: that is :mod:`amdvgpud.core.plan`.

Sources: ``mqd_symmetrically_map_cu_mask`` in the kernel's ``kfd_mqd_manager.c`` for the walk; ``core/util/flag.cpp``
and ``amd_aql_queue.cpp`` of ROCr for the grammar and its limits. Nothing here has been compared with real silicon.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from amdvgpud.core.errors import AmdvgpuError, Invalid
from amdvgpud.core.model import CuLayout, CuSet

MAX_MASK_BITS: Final = 1024
"""The KFD cuts a longer mask here (``kfd_chardev.c``), so a bit beyond it addresses nothing."""

_MAX_CUS_PER_ARRAY: Final = 16
_MAX_ENGINES_PER_XCC: Final = 8
_MAX_ARRAYS_PER_ENGINE: Final = 2


# ------------------------------------------------------------------------------------------------ bits and silicon


class Place(NamedTuple):
    """Where one CU lies: all four count from 0; ``cu`` is its logical number among the active CUs of its array."""

    xcc: int
    engine: int
    array: int
    cu: int


@lru_cache(maxsize=256)
def kernel_walk(layout: CuLayout) -> tuple[Place | None, ...]:
    """The Place that each mask bit switches on, one entry for each of ``layout.cu_count`` bits; None: a ghost bit.

    XCC ``x`` starts at bit ``x``; then, CU index outermost, array next, engine innermost, each array that still has a
    CU takes one bit (two on WGP GPUs) and the walk goes on ``XCC count`` bits (or pairs) further. All XCCs stop at the
    CU count of the whole node: so where XCCs are harvested unequally, a poorer one has bits that address nothing and
    a richer one has CUs that no bit addresses.

    All bits are ghosts for layouts that the kernel refuses (more than 8 engines or 2 arrays) and for several XCCs with
    WGPs, where neighbouring XCCs read overlapping pairs: no set of bits there can be vouched for, so none is granted.
    """
    count = layout.cu_count
    places: list[Place | None] = [None] * count
    end = min(count, MAX_MASK_BITS)
    if (
        layout.engines_per_xcc > _MAX_ENGINES_PER_XCC
        or layout.arrays_per_engine > _MAX_ARRAYS_PER_ENGINE
        or (layout.wgp and layout.xcc_count > 1)
    ):
        return tuple(places)
    width = 2 if layout.wgp else 1
    for xcc in range(layout.xcc_count):
        bit = xcc
        for cu, array, engine in _walk_order(layout, width):
            active = layout.active[(xcc * layout.engines_per_xcc + engine) * layout.arrays_per_engine + array]
            if active <= cu:
                continue
            if bit >= end:
                break
            for half in range(width):
                # An odd array has a pair whose second bit addresses nothing, and an odd total one that is cut in two.
                if cu + half < active and bit + half < end:
                    places[bit + half] = Place(xcc, engine, array, cu + half)
            bit += width * layout.xcc_count
    return tuple(places)


def _walk_order(layout: CuLayout, width: int) -> Iterator[tuple[int, int, int]]:
    for cu in range(0, _MAX_CUS_PER_ARRAY, width):
        for array in range(layout.arrays_per_engine):
            for engine in range(layout.engines_per_xcc):
                yield cu, array, engine


@dataclass(frozen=True, slots=True)
class Rows:
    """The bits of a layout, grouped for placement; all masks are whole numbers, bit 0 being CU 0.

    A **row** is one CU (WGP) in every engine of every XCC, a **column** the part of it in one engine: one bit an XCC,
    or one pair on WGP GPUs. ``sum of rows + sum of tail <= addressable``, the difference being bits that no set with
    equal counts on all XCCs can hold (only an unmasked share reaches them).
    """

    rows: tuple[int, ...]
    """Ascending by lowest bit."""
    columns: tuple[tuple[int, ...], ...]
    """``columns[r][i]``: the part of row ``r`` in the i-th living engine; ``rows[r] == sum(columns[r])``."""
    arrays: tuple[int, ...]
    """The array (of each engine) that row ``r`` lies in."""
    partners: tuple[int | None, ...]
    """gfx9: the row whose CUs share instruction and scalar caches with row ``r``'s. None on WGP GPUs."""
    tail: tuple[int, ...]
    """What is in no row, as columns: one bit an XCC (or one WGP). Granted without all rows only where a count is
    dictated (``exact``)."""
    addressable: int
    """All bits that are no ghosts."""
    column_cus: int
    row_cus: int

    @property
    def sliceable(self) -> bool:
        """One row cannot be divided: such a Partition is granted whole or not at all."""
        return len(self.rows) > 1

    @property
    def tail_mask(self) -> int:
        return sum(self.tail)

    @property
    def all_mask(self) -> int:
        """All rows and the tail: what a masked share can have at most."""
        return sum(self.rows) + self.tail_mask


@lru_cache(maxsize=256)
def rows(layout: CuLayout) -> Rows:
    """The rows, columns and tail of ``layout``, by simulating the walk: closed formulas fail on unequal harvest."""
    walk = kernel_walk(layout)
    width = 2 if layout.wgp else 1
    # bit of each granule (CU, or WGP by its first bit) by its place
    granules: dict[Place, int] = {}
    for bit in range(0, len(walk), width):
        # A WGP of which only one half can be named would be refused as half a pair: it is in no row and no tail.
        halves = walk[bit : bit + width]
        if len(halves) == width and all(halves):
            granules[halves[0]] = ((1 << width) - 1) << bit  # type: ignore[index]  # all() has seen it
    # An engine fused off everywhere is not missing from any row.
    engines = sorted({place.engine for place in granules})
    found: list[tuple[int, int, tuple[int, ...]]] = []
    in_rows = 0
    for cu in range(0, _MAX_CUS_PER_ARRAY, width):
        for array in range(layout.arrays_per_engine):
            columns = []
            for engine in engines:
                parts = [granules.get(Place(xcc, engine, array, cu)) for xcc in range(layout.xcc_count)]
                columns.append(0 if None in parts else sum(part for part in parts if part))
            if engines and all(columns):
                found.append((array, cu, tuple(columns)))
                in_rows |= sum(columns)
    found.sort(key=lambda row: _lowest_bit(sum(row[2])))
    index = {(array, cu): i for i, (array, cu, _) in enumerate(found)}
    # The k-th granule left over on each XCC makes the k-th column of the tail; with equal harvest it is one engine's.
    left: list[list[int]] = [[] for _ in range(layout.xcc_count)]
    for place, mask in sorted(granules.items(), key=lambda item: item[1]):
        if not mask & in_rows:
            left[place.xcc].append(mask)
    return Rows(
        rows=tuple(sum(columns) for _, _, columns in found),
        columns=tuple(columns for _, _, columns in found),
        arrays=tuple(array for array, _, _ in found),
        partners=tuple(None if layout.wgp else index.get((array, cu ^ 1)) for array, cu, _ in found),
        tail=tuple(sum(column) for column in zip(*left, strict=False)),
        addressable=sum(1 << bit for bit, place in enumerate(walk) if place is not None),
        column_cus=width * layout.xcc_count,
        row_cus=width * layout.xcc_count * len(engines),
    )


def _lowest_bit(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


@lru_cache(maxsize=256)
def xcc_masks(layout: CuLayout) -> tuple[int, ...]:
    """The addressable bits of each XCC."""
    masks = [0] * layout.xcc_count
    for bit, place in enumerate(kernel_walk(layout)):
        if place is not None:
            masks[place.xcc] |= 1 << bit
    return tuple(masks)


@lru_cache(maxsize=256)
def engine_masks(layout: CuLayout) -> tuple[tuple[int, ...], ...]:
    """``engine_masks(layout)[xcc][engine]``: the addressable bits of each engine of each XCC."""
    masks = [[0] * layout.engines_per_xcc for _ in range(layout.xcc_count)]
    for bit, place in enumerate(kernel_walk(layout)):
        if place is not None:
            masks[place.xcc][place.engine] |= 1 << bit
    return tuple(tuple(engines) for engines in masks)


def effective_cus(layout: CuLayout, mask: int | None) -> int:
    """CUs' worth of work that the hardware can balance over ``mask`` (None: unmasked, every active CU).

    Workgroups are dealt evenly over the XCCs, and within one evenly over the engines that have any CU switched on,
    whatever each has: so the poorest engine sets the pace of its XCC, and the poorest XCC that of all. Computed from
    that rule, not measured.
    """
    if mask is None:
        arrays = layout.arrays_per_engine
        sums = [sum(layout.active[i : i + arrays]) for i in range(0, len(layout.active), arrays)]
        per_xcc = [sums[i : i + layout.engines_per_xcc] for i in range(0, len(sums), layout.engines_per_xcc)]
    else:
        per_xcc = [[(mask & engine).bit_count() for engine in engines] for engines in engine_masks(layout)]
    balanced = []
    for counts in per_xcc:
        used = [count for count in counts if count]
        balanced.append(min(used, default=0) * len(used))
    return min(balanced) * layout.xcc_count


@lru_cache(maxsize=256)
def layout_hash(layout: CuLayout) -> str:
    """16 hex digits that differ where the same bits would be other silicon.

    ``harvest_known`` is left out: learning that a guess was right changes no silicon.
    """
    text = (
        f"{layout.xcc_count}x{layout.engines_per_xcc}x{layout.arrays_per_engine}"
        f"{'w' if layout.wgp else 'c'}:{','.join(map(str, layout.active))}"
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------- text of HSA_CU_MASK


def format_ranges(cus: CuSet) -> str:
    """``0-31,64``: ascending, runs as long as they go, no blanks."""
    parts = []
    start = last = cus.bits[0]
    for bit in (*cus.bits[1:], -1):
        if bit != last + 1:
            parts.append(str(start) if start == last else f"{start}-{last}")
            start = bit
        last = bit
    return ",".join(parts)


def format_cu_mask(sets: Sequence[CuSet | None]) -> str:
    """The canonical text for ``sets``, one a GPU in the order a container counts them; ``""`` where none is masked.

    A whole GPU (None) gets no set: the same effect as a full one, and one thing less for ROCr to misread.
    """
    return ";".join(f"{gpu}:{format_ranges(cus)}" for gpu, cus in enumerate(sets) if cus is not None)


_NUMBER: Final = r"(?:0|[1-9][0-9]{0,3})"
_RANGE: Final = re.compile(rf"({_NUMBER})(?:-({_NUMBER}))?", re.ASCII)


def parse_cu_mask(text: str, cu_counts: Sequence[int]) -> tuple[CuSet | None, ...]:
    """What a canonical text says of each GPU; ``cu_counts`` holds the CU count of each.

    Shares no code with the writer, and refuses (``Invalid``) all that the writer would not write, however ROCr takes
    it: blanks, leading zeros, ranges that are inverted, single, touching or out of order, a GPU or CU that is absent.
    """
    sets: list[CuSet | None] = [None] * len(cu_counts)
    if text == "":
        return tuple(sets)
    last_gpu = -1
    for part in text.split(";"):
        head, colon, body = part.partition(":")
        if not colon or not re.fullmatch(_NUMBER, head, re.ASCII) or not last_gpu < int(head) < len(cu_counts):
            raise _refused(text, f"{part!r} does not begin with the next GPU of {len(cu_counts)} and a colon")
        last_gpu = int(head)
        bits: list[int] = []
        for item in body.split(","):
            match = _RANGE.fullmatch(item)
            if match is None:
                raise _refused(text, f"{item!r} is no CU and no range of CUs")
            first = int(match[1])
            last = first if match[2] is None else int(match[2])
            if match[2] is not None and last <= first:
                raise _refused(text, f"{item!r} does not ascend")
            if bits and first <= bits[-1] + 1:
                raise _refused(text, f"{item!r} overlaps, touches or precedes what stands before it")
            if last >= cu_counts[last_gpu]:
                raise _refused(text, f"{item!r} is beyond the {cu_counts[last_gpu]} CUs of GPU {last_gpu}")
            bits.extend(range(first, last + 1))
        sets[last_gpu] = CuSet(tuple(bits))
    return tuple(sets)


def _refused(text: str, why: str) -> Invalid:
    return Invalid(f"{text!r} is no canonical CU mask: {why}")


def rocr_reads(text: str, gpu_count: int, max_cu_count: int) -> Mapping[int, int]:
    """The masks that ROCr takes from ``text``, by GPU; ``max_cu_count`` is the largest of all visible GPUs.

    Its grammar as it is, oddities included: the first bad set ends the reading without a word, sets before it stay,
    GPUs that are not in the result run unrestricted. Both limits are one too high in ROCr, and so here. An empty
    element between two commas, which is undefined there, counts as an error.
    """
    masks: dict[int, int] = {}
    for part in "".join(text.split()).upper().removesuffix(";").split(";"):
        halves = part.split(":")
        if len(halves) != 2:
            break
        gpus = _rocr_ids(halves[0], gpu_count)
        mask = _rocr_hex(halves[1][2:], max_cu_count) if halves[1].startswith("0X") else None
        if mask is None:
            mask = sum(1 << cu for cu in _rocr_ids(halves[1], max_cu_count) or ())
        if not gpus or not mask or any(gpu in masks for gpu in gpus):
            break
        masks |= dict.fromkeys(gpus, mask)
    return masks


def _rocr_ids(text: str, limit: int) -> set[int] | None:
    """The ids of a list, those above ``limit`` dropped; None: an error."""
    ids: set[int] = set()
    for item in text.removesuffix(",").split(","):
        ends = item.split("-")
        if len(ends) > 2 or not "".join(ends).isdecimal() or not item.isascii():
            return None
        first = int(ends[0] or "0")
        last = int(ends[-1] or ends[0])
        if last < first:
            return None
        for value in range(first, min(last, limit) + 1):
            if value in ids:
                return None
            ids.add(value)
    return ids or None


def _rocr_hex(digits: str, max_cu_count: int) -> int | None:
    """The mask of a hex number, cut to the dwords that hold ``max_cu_count`` CUs; None: an error."""
    if not re.fullmatch(r"[0-9A-F]+", digits, re.ASCII):
        return 0
    dwords = max_cu_count // 32 + 1
    return int(digits, 16) & ((1 << 32 * dwords) - 1)


def proven_cu_mask(sets: Sequence[CuSet | None], cu_counts: Sequence[int]) -> str:
    """:func:`format_cu_mask`, read back by the strict reader and by ROCr's grammar before anybody uses it.

    A text that either reads otherwise than meant is an ``AmdvgpuError``: HSA_CU_MASK fails open without a word, so
    what cannot be proven is refused here instead of run unrestricted.
    """
    text = format_cu_mask(sets)
    meant = {gpu: cus.mask for gpu, cus in enumerate(sets) if cus is not None}
    try:
        read = parse_cu_mask(text, cu_counts)
    except Invalid as error:
        # Our own text: nothing that the asker could put right by other words.
        raise AmdvgpuError(f"the slice is refused: {error}") from error
    if read != tuple(sets) or rocr_reads(text, len(sets), max(cu_counts, default=0)) != meant:
        raise AmdvgpuError(f"the slice is refused: the CU mask {text!r} is not read back as it was meant")
    return text
