"""Placement: rows, not ranges.

Decides where a request goes: which Partition, which CUs of it, how much VRAM. Pure: the same Book, Inventory and
Request give the same Plan. Every Plan is verified before it is returned, by code that does not choose; what cannot be
verified is an error, never a slice without limits. What a mask bit is belongs to :mod:`amdvgpud.core.cumask`.

Equations that hold on every Partition, over the Shares that are still present on it:
``promised == Σ share.vram_bytes <= floor(partition.vram_bytes * ratio)``; exclusive sets are disjoint from all others.
Slices that are used one after the other (``Request.after``) are the exception: of them those count that are used at the
same time, at their worst, and their sets may overlap.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from amdvgpud.core import cumask
from amdvgpud.core.cumask import Rows
from amdvgpud.core.errors import AmdvgpuError, Conflict, NoRoom
from amdvgpud.core.health import Health
from amdvgpud.core.identify import resolve
from amdvgpud.core.model import (
    Book,
    Compute,
    ComputePolicy,
    CuLayout,
    CuSet,
    Gpu,
    GpuId,
    Inventory,
    Partition,
    PartitionId,
    Request,
    Share,
    Slice,
    SliceName,
    Spread,
)
from amdvgpud.core.sizes import human_size

_ALL_FIT: Final[Mapping[GpuId, Health]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request would go: one Share a GPU, in KFD node order."""

    request: Request
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a Partition has, has promised and has left."""

    partition: PartitionId
    vram_limit_bytes: int
    """``vram_bytes`` of the Partition times the oversubscription ratio of its GPU."""
    vram_promised_bytes: int
    vram_free_bytes: int
    """``limit - promised``; 0 where more is promised than the limit (a ratio was lowered), and under a whole share."""
    row_count: int
    row_cus: int
    rows_free: int
    """Rows of which nobody has any part."""
    cus_allocated: int
    """CUs that at least one slice has."""
    cus_free: int
    """CUs of the free rows: what a balanced request can get."""
    sliceable: bool
    """False: a single row or WGP; it can be granted whole only."""
    slices: tuple[SliceName, ...]
    """Those with a Share here, by name."""


# --------------------------------------------------------------------------------------------------- what is taken


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What the present Shares take of one Partition. Derived from a Book and an Inventory, never stored."""

    partition: Partition
    gpu: Gpu
    rows: Rows
    layout_hash: str
    vram_limit_bytes: int
    vram_promised_bytes: int
    exclusive: int
    """CUs that belong to one slice, as a mask."""
    shared: tuple[int, ...]
    """Masks of the shared slices, one each."""
    shared_union: int
    whole: SliceName | None
    """The slice that has the whole Partition: nobody else gets anything."""
    slices: tuple[SliceName, ...]

    @property
    def taken(self) -> int:
        return self.exclusive | self.shared_union

    @property
    def vram_free_bytes(self) -> int:
        return 0 if self.whole else max(0, self.vram_limit_bytes - self.vram_promised_bytes)

    @property
    def load(self) -> float:
        """0 (empty) to 1 (full), VRAM and CUs alike; more where VRAM is oversubscribed."""
        if self.whole:
            return 1.0
        cus = self.taken.bit_count() / self.partition.cu_count
        return (cus + self.vram_promised_bytes / max(1, self.partition.vram_bytes)) / 2

    @property
    def name(self) -> str:
        """For people: ``0000:83:00.0/0``."""
        return f"{self.gpu.pci_address}/{self.partition.index}"


def is_present(share: Share, inventory: Inventory) -> bool:
    """Whether the Partition that ``share`` was cut from is there, with the silicon that it was cut for.

    A Share that is not present takes nothing of what is there now: its Slice is lost until the GPU comes back.
    """
    partition = inventory.partition(share.partition)
    return partition is not None and cumask.layout_hash(partition.layout) == share.layout_hash


@lru_cache(maxsize=8192)
def _mask_of(bits: tuple[int, ...]) -> int:
    return CuSet(bits).mask


def _in_turn(one: Request, other: Request) -> bool:
    """Whether the two are never used at the same time."""
    return other.name in one.after or one.name in other.after


def _apart(book: Book, request: Request) -> frozenset[SliceName]:
    """Whom a slice of ``request`` need not be kept apart from: itself, and those it is used in turn with."""
    return frozenset(
        name for name, item in book.slices.items() if name == request.name or _in_turn(item.request, request)
    )


def _promised_bytes(owners: Mapping[SliceName, tuple[Request, int]]) -> int:
    """The most that these (Request, quota) have of one Partition at any time.

    Exact for slices of which each waits for all that end before it, as a pod's containers do; never too little. Those
    that wait for the same one are a group, and groups do not wait for each other.
    """
    groups: dict[SliceName, list[tuple[Request, int]]] = {}
    for name, owner in owners.items():
        groups.setdefault(next((first for first in owner[0].after if first in owners), name), []).append(owner)
    total = 0
    for group in groups.values():
        passing = {name for request, _ in group for name in request.after}
        peaks = [sum(quota for request, quota in group if request.name not in passing)]
        peaks += (
            sum(quota for request, quota in group if not _in_turn(request, one))
            for one, _ in group
            if one.name in passing
        )
        total += max(peaks)
    return total


def occupancy(book: Book, inventory: Inventory, *, without: Collection[SliceName] = ()) -> dict[PartitionId, Occupancy]:
    """What is taken of each Partition, in KFD node order; the slices ``without`` are looked past."""
    partitions = inventory.partitions
    hashes = {p.id: cumask.layout_hash(p.layout) for p in partitions}
    quotas: dict[PartitionId, dict[SliceName, tuple[Request, int]]] = {where: {} for where in hashes}
    exclusive = dict.fromkeys(hashes, 0)
    shared: dict[PartitionId, list[int]] = {}
    whole: dict[PartitionId, SliceName] = {}
    for name, item in book.slices.items():
        if name in without:
            continue
        for share in item.shares:
            where = share.partition
            if hashes.get(where) != share.layout_hash:
                continue
            quotas[where][name] = item.request, share.vram_bytes
            if share.cus is None:
                whole[where] = name
            elif share.shared:
                shared.setdefault(where, []).append(_mask_of(share.cus.bits))
            else:
                exclusive[where] |= _mask_of(share.cus.bits)
    gpus = {gpu.id: gpu for gpu in inventory.gpus}
    result = {}
    for p in partitions:
        masks = tuple(shared.get(p.id, ()))
        union = 0
        for mask in masks:
            union |= mask
        result[p.id] = Occupancy(
            partition=p,
            gpu=gpus[p.gpu],
            rows=cumask.rows(p.layout),
            layout_hash=hashes[p.id],
            vram_limit_bytes=int(p.vram_bytes * _ratio(book, p.gpu)),
            vram_promised_bytes=_promised_bytes(quotas[p.id]),
            exclusive=exclusive[p.id],
            shared=masks,
            shared_union=union,
            whole=whole.get(p.id),
            slices=tuple(sorted(quotas[p.id])),
        )
    return result


def _ratio(book: Book, gpu: GpuId) -> Fraction:
    return _as_written(book.oversubscription.get(gpu, 1.0))


@lru_cache(maxsize=1024)
def _as_written(number: float) -> Fraction:
    """A float as the decimal that people wrote: 33.3 is 333/10 here, so that halves round as on paper."""
    return Fraction(Decimal(repr(number)))


def capacities(book: Book, inventory: Inventory) -> dict[PartitionId, Capacity]:
    """The Capacity of every Partition, in KFD node order: one pass over the Book for all of them."""
    return {where: _capacity(taken) for where, taken in occupancy(book, inventory).items()}


def capacity(book: Book, inventory: Inventory, partition: Partition) -> Capacity:
    """The Capacity of one Partition of ``inventory``; for many at once use :func:`capacities`."""
    return _capacity(occupancy(book, inventory)[partition.id])


def _capacity(at: Occupancy) -> Capacity:
    free = 0 if at.whole else len(_free_rows(at.rows, at.taken))
    return Capacity(
        partition=at.partition.id,
        vram_limit_bytes=at.vram_limit_bytes,
        vram_promised_bytes=at.vram_promised_bytes,
        vram_free_bytes=at.vram_free_bytes,
        row_count=len(at.rows.rows),
        row_cus=at.rows.row_cus,
        rows_free=free,
        cus_allocated=at.partition.cu_count if at.whole else at.taken.bit_count(),
        cus_free=free * at.rows.row_cus,
        sliceable=at.rows.sliceable,
        slices=at.slices,
    )


# ------------------------------------------------------------------------------------------------- how much to take


@dataclass(frozen=True, slots=True)
class _Want:
    """A Compute as it comes to one Partition, in the granules of its policy (rows, or columns)."""

    asked_cus: int
    nominal: int
    """The asked amount, rounded half up to granules, at least one, no more than there are."""
    least: int
    """The asked amount rounded down (at least one). Between the two the grant follows what is free: two halves of nine
    rows are five and four. Less than this is a refusal."""
    granule_cus: int


def _want(at: Occupancy, compute: Compute) -> _Want | None:
    """None: the Partition cannot grant this, however empty (too many CUs, or not sliceable)."""
    layout, rows = at.partition.layout, at.rows
    if compute.policy is ComputePolicy.WHOLE:
        return _Want(layout.cu_count, 1, 1, layout.cu_count)
    if compute.percent is not None:
        exact = _as_written(compute.percent) * layout.cu_count / 100
    else:
        exact = Fraction(compute.cu_count or 0)
    asked = max(1, _half_up(exact))
    if not rows.sliceable or asked > layout.cu_count:
        return None
    in_columns = _in_columns(at, compute.policy)
    granule = rows.column_cus if in_columns else rows.row_cus
    total = sum(len(columns) for columns in rows.columns) if in_columns else len(rows.rows)
    if compute.policy is ComputePolicy.EXACT:
        # Dictated from outside: down to an equal count on each XCC (at least one), up to whole WGPs.
        count = -(-asked // granule) if layout.wgp else max(1, asked // granule)
        count = min(count, total + len(rows.tail))
        return _Want(asked, count, count, granule)
    nominal = min(total, max(1, _half_up(exact / granule)))
    return _Want(asked, nominal, min(nominal, max(1, int(exact / granule))), granule)


def _half_up(value: Fraction) -> int:
    return int(value + Fraction(1, 2))


def _in_columns(at: Occupancy, policy: ComputePolicy) -> bool:
    """Whether ``policy`` is cut in columns here.

    Where the harvest is a guess, which engine a column lies in is one too, so ``fine`` falls back to rows. ``exact``
    does not: a column has one CU on every XCC whichever engine it is in, and its count is dictated.
    """
    return policy is ComputePolicy.EXACT or (policy is ComputePolicy.FINE and at.partition.layout.harvest_known)


def _free_rows(rows: Rows, taken: int) -> list[int]:
    return [i for i, row in enumerate(rows.rows) if not row & taken]


def _blocked(at: Occupancy, policy: ComputePolicy) -> int:
    """The CUs that a request of this policy may not touch."""
    return at.exclusive if policy is ComputePolicy.SHARED else at.taken


def _free_granules(at: Occupancy, compute: Compute, want: _Want) -> int:
    """How many granules of ``want`` the Partition could grant now under the balance rule of the policy."""
    if compute.policy is ComputePolicy.WHOLE:
        return 0 if at.slices else 1
    if at.whole:
        return 0
    blocked = _blocked(at, compute.policy)
    if not _in_columns(at, compute.policy):
        return len(_free_rows(at.rows, blocked))
    free = _free_columns(at.rows, blocked)
    if compute.policy is ComputePolicy.EXACT:
        return sum(free) + len(_free_tail(at.rows, blocked))
    # Engines may differ by one column: so many full rounds as the poorest engine has, and one more where there is any.
    low = min(free)
    return low * len(free) + sum(1 for count in free if count > low)


def _free_columns(rows: Rows, taken: int) -> list[int]:
    """How many free columns each living engine has, the tail not counted."""
    counts = [0] * len(rows.columns[0])
    for columns in rows.columns:
        for engine, column in enumerate(columns):
            if not column & taken:
                counts[engine] += 1
    return counts


def _free_tail(rows: Rows, taken: int) -> list[int]:
    return [column for column in rows.tail if not column & taken]


# ------------------------------------------------------------------------------------------------------ which to take


def _cut(at: Occupancy, compute: Compute, want: _Want, free: int) -> int | None:
    """The CUs to grant, as a mask; None: unmasked. Only where ``free >= want.least``."""
    if compute.policy is ComputePolicy.WHOLE:
        return None
    count = min(want.nominal, free)
    blocked = _blocked(at, compute.policy)
    tail = _free_tail(at.rows, blocked)
    if _in_columns(at, compute.policy):
        mask = _pick_columns(at.rows, blocked, count)
        if compute.policy is ComputePolicy.EXACT:
            # The tail last: who dictates a count promises two halves of a GPU, and its rows alone may be an odd number
            # of columns less than it has. Such a slice is uneven over the engines, and says so by its effective CUs.
            return mask | sum(tail[: max(0, count - sum(_free_columns(at.rows, blocked)))])
        total = sum(len(columns) for columns in at.rows.columns)
        return mask | (sum(tail) if count == total else 0)
    picked = _pick_rows(at, _free_rows(at.rows, blocked), count)
    mask = sum(at.rows.rows[i] for i in picked)
    # To all others the tail comes only as a bonus: to whoever has all rows, what of it nobody has.
    return mask | (sum(tail) if count == len(at.rows.rows) else 0)


def _pick_rows(at: Occupancy, free: Sequence[int], count: int) -> list[int]:
    """``count`` of the ``free`` rows: the least shared first, then as the silicon likes them, then the lowest."""
    if at.shared and len(free) > count:
        levels: dict[int, list[int]] = {}
        for row in free:
            mask = at.rows.rows[row]
            levels.setdefault(sum(1 for other in at.shared if other & mask), []).append(row)
        picked: list[int] = []
        for _, level in sorted(levels.items()):
            picked += _pick_alike(at.rows, level, min(len(level), count - len(picked)))
        return picked
    return _pick_alike(at.rows, free, count)


def _pick_alike(rows: Rows, free: Sequence[int], count: int) -> list[int]:
    if max(rows.arrays) > 0:
        return _pick_over_arrays(rows, free, count)
    return _pick_in_pairs(rows, free, count)


def _pick_over_arrays(rows: Rows, free: Sequence[int], count: int) -> list[int]:
    """Rows spread over the arrays of the engines as evenly as the free ones allow.

    Soft: where earlier releases left one array emptier, a slice is granted lopsided rather than refused, because the
    hardware deals work by engine, and the engines stay even.
    """
    by_array: dict[int, list[int]] = {}
    for row in free:
        by_array.setdefault(rows.arrays[row], []).append(row)
    have = dict.fromkeys(by_array, 0)
    picked = []
    for _ in range(count):
        array = min(by_array, key=lambda a: (not by_array[a], have[a], -len(by_array[a]), a))
        picked.append(by_array[array].pop(0))
        have[array] += 1
    return picked


def _pick_in_pairs(rows: Rows, free: Sequence[int], count: int) -> list[int]:
    """Row pairs first, so that two slices seldom share instruction and scalar caches.

    An odd row comes from a pair that is broken already before it breaks one. Soft: harvest can shift which physical
    CUs share, and the last free rows are granted whoever sits beside them.
    """
    left = set(free)
    pairs = [(row, partner) for row in free if (partner := rows.partners[row]) is not None and row < partner]
    whole = [pair for pair in pairs if pair[1] in left]
    picked: list[int] = []
    for pair in whole[: count // 2]:
        picked += pair
    left.difference_update(picked)

    def breaks_a_pair(row: int) -> bool:
        partner = rows.partners[row]
        return partner is None or partner in left

    picked += sorted(left, key=lambda row: (breaks_a_pair(row), row))[: count - len(picked)]
    return picked


def _pick_columns(rows: Rows, taken: int, count: int) -> int:
    """``count`` columns as a mask: full rows, then always the engine that has the fewest, from broken rows first."""
    engines = len(rows.columns[0])
    full = _free_rows(rows, taken)
    mask = sum(rows.rows[row] for row in full[: count // engines])
    used = min(len(full), count // engines)
    have = [used] * engines
    # Best fit: the row with the fewest free columns first; full rows last, and all engines from the same one.
    broken = sorted(
        (i for i, row in enumerate(rows.rows) if row & taken),
        key=lambda i: (sum(1 for column in rows.columns[i] if not column & taken), i),
    )
    order = [*broken, *full[used:]]
    queues = [
        [(place, rows.columns[row][e]) for place, row in enumerate(order) if not rows.columns[row][e] & taken]
        for e in range(engines)
    ]
    # What lies beyond all rows is the caller's affair (the tail), hence the bound.
    for _ in range(min(count - used * engines, sum(map(len, queues)))):
        engine = min((e for e in range(engines) if queues[e]), key=lambda e: (have[e], queues[e][0][0], e))
        mask |= queues[engine].pop(0)[1]
        have[engine] += 1
    return mask


# ------------------------------------------------------------------------------------------------------------- place


def place(book: Book, inventory: Inventory, request: Request, unfit: Mapping[GpuId, Health] = _ALL_FIT) -> Plan:
    """Where ``request`` goes. A slice of the same name in the Book is looked past: the Plan replaces it; and so are
    those that are over before it is used.

    Nothing is placed on the ``unfit`` GPUs, nor on cordoned ones.
    ``NoRoom`` names the roomiest partition and what is missing; ``NotFound`` or ``Invalid`` for what ``on`` names;
    ``AmdvgpuError`` where the Plan does not stand its own examination.
    """
    taken = occupancy(book, inventory, without=_apart(book, request))
    candidates = _candidates(book, inventory, request, taken, unfit)
    fits: list[tuple[Occupancy, _Want, int]] = []
    for at in candidates:
        want = _want(at, request.compute)
        if want is None or _vram_of(at, request) is None:
            continue
        free = _free_granules(at, request.compute, want)
        if free >= want.least:
            fits.append((at, want, free))
    load_of_gpu: dict[GpuId, float] = {}
    for at in taken.values():
        load_of_gpu[at.gpu.id] = load_of_gpu.get(at.gpu.id, 0.0) + at.load

    def rank(fit: tuple[Occupancy, _Want, int]) -> tuple[float, float, int]:
        here, gpu = fit[0].load, load_of_gpu[fit[0].gpu.id]
        if request.spread is Spread.SPREAD:
            return gpu, here, fit[0].partition.kfd_node
        return -here, -gpu, fit[0].partition.kfd_node

    chosen: dict[GpuId, tuple[Occupancy, _Want, int]] = {}
    for fit in sorted(fits, key=rank):
        chosen.setdefault(fit[0].gpu.id, fit)
        if len(chosen) == request.gpu_count:
            break
    if len(chosen) < request.gpu_count:
        raise _no_room(inventory, request, candidates, [at for at, _, _ in fits])
    shares = [_share(at, want, free, request) for at, want, free in chosen.values()]
    shares.sort(key=lambda share: taken[share.partition].partition.kfd_node)
    plan = Plan(request, tuple(shares))
    _verify(plan, taken)
    return plan


def _candidates(
    book: Book,
    inventory: Inventory,
    request: Request,
    taken: dict[PartitionId, Occupancy],
    unfit: Mapping[GpuId, Health],
) -> list[Occupancy]:
    """The Partitions that the request may go to, in KFD node order."""
    allowed = {p.id for text in request.on for p in resolve(inventory, text)} if request.on else set(taken)
    resting = book.cordoned | unfit.keys()
    found = [at for where, at in taken.items() if where in allowed and at.gpu.id not in resting]
    if found:
        return found
    if not taken:
        raise NoRoom(f"{_wanted_text(request)}; this node has no usable GPU", "no_gpu")
    gpus = sorted({at.gpu.id for where, at in taken.items() if where in allowed})
    reasons = "; ".join(
        f"{g}: {unfit[g].condition}, {unfit[g].reason}" if g in unfit else f"{g}: cordoned" for g in gpus
    )
    raise NoRoom(f"{_wanted_text(request)}; every GPU it could go to takes none now ({reasons})", "no_gpu")


def _vram_of(at: Occupancy, request: Request) -> int | None:
    """The quota that the request comes to here; None: there is not so much left."""
    left = at.vram_free_bytes
    if request.vram_bytes is None:
        # All that is left, but never more than is there: oversubscription has to be asked for in figures.
        return min(left, at.partition.vram_bytes) or None
    return request.vram_bytes if request.vram_bytes <= left else None


def _share(at: Occupancy, want: _Want, free: int, request: Request) -> Share:
    mask = _cut(at, request.compute, want, free)
    layout = at.partition.layout
    vram_bytes = _vram_of(at, request)
    assert vram_bytes is not None, "only partitions with enough VRAM are cut"  # noqa: S101
    return Share(
        partition=at.partition.id,
        vram_bytes=vram_bytes,
        cus=None if mask is None else CuSet.from_mask(mask),
        shared=request.compute.policy is ComputePolicy.SHARED,
        asked_cus=want.asked_cus,
        granted_cus=layout.cu_count if mask is None else mask.bit_count(),
        effective_cus=cumask.effective_cus(layout, mask),
        layout_hash=at.layout_hash,
    )


def take_over(book: Book, inventory: Inventory, request: Request, places: Mapping[PartitionId, CuSet | None]) -> Plan:
    """What somebody has already, as a Plan for ``request``: nothing is chosen here. ``places``: the CUs on each of its
    Partitions (None: whole). ``Conflict`` where such a request does not come to that, or somebody else has it.
    """
    taken = occupancy(book, inventory)
    if missing := sorted(where for where in places if where not in taken):
        raise Conflict(f"slice {request.name} is on {', '.join(missing)}, which is not here")
    shares, faults = [], []
    for where, at in taken.items():
        if where not in places:
            continue
        cus, layout = places[where], at.partition.layout
        mask = None if cus is None else cus.mask
        want = _want(at, request.compute)
        granted = layout.cu_count if mask is None else mask.bit_count()
        if want is None or granted != min(want.nominal * want.granule_cus, layout.cu_count):
            faults.append(f"{where}: {granted} CUs are not what {request.compute.cu_count} come to")
        shares.append(
            Share(
                partition=where,
                vram_bytes=at.partition.vram_bytes if request.vram_bytes is None else request.vram_bytes,
                cus=cus,
                shared=False,
                asked_cus=granted if want is None else want.asked_cus,
                granted_cus=granted,
                effective_cus=cumask.effective_cus(layout, mask),
                layout_hash=at.layout_hash,
            )
        )
    plan = Plan(request, tuple(shares))
    if faults := [*faults, *_plan_faults(plan, taken)]:
        raise Conflict(f"slice {request.name} cannot be what somebody has: {'; '.join(faults)}")
    return plan


def resize(book: Book, inventory: Inventory, item: Slice, vram_bytes: int) -> Plan:
    """The same CUs with another VRAM quota on each GPU.

    ``Conflict`` if the slice is lost; ``NoRoom`` if a GPU has not so much left. Less than before is always granted,
    also where more is promised than the GPU has (a ratio was lowered): that is the way back.
    """
    request = replace(item.request, vram_bytes=vram_bytes)
    taken = occupancy(book, inventory, without=_apart(book, item.request))
    for share in item.shares:
        at = taken.get(share.partition)
        if at is None or at.layout_hash != share.layout_hash:
            raise Conflict(f"slice {item.name} is lost: {share.partition} is gone or laid out anew; delete it")
        left = max(0, at.vram_limit_bytes - at.vram_promised_bytes)
        if vram_bytes > max(left, share.vram_bytes):
            raise NoRoom(
                f"wanted {human_size(vram_bytes)} for slice {item.name}; {at.name} has {human_size(left)} for it "
                f"beside what is promised to others",
                "no_vram",
            )
    plan = Plan(request, tuple(replace(share, vram_bytes=vram_bytes) for share in item.shares))
    _verify(plan, taken, before=item.shares)
    return plan


# --------------------------------------------------------------------------------------------------------- refusals


def _wanted_text(request: Request, want: _Want | None = None, layout: CuLayout | None = None) -> str:
    """``want`` and ``layout``: what it comes to on the Partition that is spoken of; None: it comes to nothing there."""
    compute = request.compute
    parts = []
    if request.vram_bytes is not None:
        parts.append(human_size(request.vram_bytes))
    if compute.policy is ComputePolicy.WHOLE:
        parts.append("all CUs unshared")
    elif compute.percent is not None:
        percent = f"{compute.percent:g}% of the CUs"
        parts.append(percent if want is None else f"{want.asked_cus} CUs ({compute.percent:g}%)")
    else:
        parts.append(f"{compute.cu_count} CUs")
    if want is not None and layout is not None and compute.policy is ComputePolicy.EXACT:
        granted = want.nominal * want.granule_cus
        if granted != want.asked_cus:
            parts[-1] += f" ({granted} here, {'whole WGPs' if layout.wgp else 'as many on each XCC'})"
    where = "one partition" if request.gpu_count == 1 else f"each of {request.gpu_count} different GPUs"
    return f"wanted {' and '.join(parts)} on {where}"


def _no_room(inventory: Inventory, request: Request, candidates: list[Occupancy], fitting: list[Occupancy]) -> NoRoom:
    """The refusal: what was wanted, which partition comes nearest, and what that one has."""
    allowed = sorted({at.gpu.id for at in candidates})
    if len(allowed) < request.gpu_count:
        return NoRoom(
            f"{_wanted_text(request)}; only {len(allowed)} of the {len(inventory.gpus)} GPUs may be used for it "
            f"({', '.join(allowed)}), and two shares of one slice never lie on one GPU",
            "no_gpu",
        )
    roomy = {at.gpu.id for at in fitting}
    rest = [at for at in candidates if at.gpu.id not in roomy]
    compute = request.compute

    def measure(at: Occupancy) -> tuple[int, bool, bool, float]:
        want = _want(at, compute)
        free = 0 if want is None else _free_granules(at, compute, want)
        enough_cus = want is not None and free >= want.least
        enough_vram = _vram_of(at, request) is not None
        near = min(1.0, free / want.least) if want is not None else 0.0
        near += min(1.0, at.vram_free_bytes / (request.vram_bytes or at.partition.vram_bytes or 1))
        return _free_cus(at, compute, want, free), enough_cus, enough_vram, near

    measures = [(at, measure(at)) for at in rest]
    # max() keeps the first of equals: KFD node order decides.
    at, (free_cus, enough_cus, enough_vram, _) = max(measures, key=lambda m: (m[1][1] + m[1][2], m[1][3]))
    want = _want(at, compute)
    text = _wanted_text(request, want, at.partition.layout)
    others = f"{len(roomy)} GPU{'s have' if len(roomy) > 1 else ' has'} room; of the others " if roomy else ""
    text += f"; {others}the roomiest, {at.name}, has {human_size(at.vram_free_bytes)} and {free_cus} CUs"
    if at.whole:
        text += f" (slice {at.whole} has it whole)"
    elif compute.policy is ComputePolicy.WHOLE and at.slices:
        text += f" and is in use by {', '.join(at.slices[:4])}{' and others' if len(at.slices) > 4 else ''}"
    elif compute.policy is not ComputePolicy.WHOLE and not at.rows.sliceable:
        text += " and cannot be divided (one row of CUs): ask for 'whole'"
    return NoRoom(text, "no_vram" if enough_cus and not enough_vram else "no_cus")


def _free_cus(at: Occupancy, compute: Compute, want: _Want | None, free: int) -> int:
    """CUs that a request of this kind could still get here."""
    if at.whole or not at.rows.sliceable or compute.policy is ComputePolicy.WHOLE:
        return 0 if at.slices else at.partition.cu_count
    if not at.slices:
        return at.rows.all_mask.bit_count()
    return free * want.granule_cus if want is not None else len(_free_rows(at.rows, at.taken)) * at.rows.row_cus


# ------------------------------------------------------------------------------------------------------- examination


def _share_faults(share: Share, partition: Partition, policy: ComputePolicy) -> Iterable[str]:
    """What is wrong with ``share`` by itself. Looks at bits, never at how they were chosen."""
    layout = partition.layout
    if (share.cus is None) != (policy is ComputePolicy.WHOLE):
        yield f"{share.partition}: policy {policy.value} with {'no' if share.cus is None else 'a'} CU set"
    if share.shared != (policy is ComputePolicy.SHARED):
        yield f"{share.partition}: policy {policy.value} is marked shared={share.shared}"
    if share.vram_bytes < 1:
        yield f"{share.partition}: a quota of {share.vram_bytes} bytes"
    mask = None if share.cus is None else _mask_of(share.cus.bits)
    granted = layout.cu_count if mask is None else mask.bit_count()
    if (share.granted_cus, share.effective_cus) != (granted, cumask.effective_cus(layout, mask)):
        yield f"{share.partition}: says {share.granted_cus} granted and {share.effective_cus} effective CUs"
    if mask is None:
        return
    by_xcc = cumask.xcc_masks(layout)
    addressable = 0
    for xcc in by_xcc:
        addressable |= xcc
    if mask & ~addressable:
        yield f"{share.partition}: bits that address no CU"
    counts = {(mask & xcc).bit_count() for xcc in by_xcc}
    if len(counts) != 1 or 0 in counts:
        yield f"{share.partition}: unequal or no CUs on some XCC ({sorted(counts)})"
    even = sum(1 << bit for bit in range(0, layout.cu_count, 2))
    if layout.wgp and (mask & even) << 1 != mask & ~even:
        yield f"{share.partition}: half a WGP"
    rows = cumask.rows(layout)
    if not rows.sliceable:
        yield f"{share.partition}: a mask on a partition that cannot be divided"
    body = mask & ~rows.tail_mask
    in_rows = sum(rows.rows)
    complete = body == in_rows
    if mask != body and not complete and policy is not ComputePolicy.EXACT:
        yield f"{share.partition}: CUs of the tail without all rows"
    # Engines count by what they have of the rows: the tail is uneven by nature, and only the owner of all has it.
    step = 2 if layout.wgp else 1
    slack = {ComputePolicy.BALANCED: 0, ComputePolicy.SHARED: 0, ComputePolicy.FINE: step}.get(policy)
    if slack is not None and not complete:
        living = [engine for xcc in cumask.engine_masks(layout) for engine in xcc if engine & in_rows]
        least, most = (f(((body & engine).bit_count() for engine in living), default=0) for f in (min, max))
        if most - least > slack:
            yield f"{share.partition}: policy {policy.value} with {least} to {most} CUs an engine"


def _verify(plan: Plan, taken: dict[PartitionId, Occupancy], before: Sequence[Share] = ()) -> None:
    """``AmdvgpuError`` unless the Plan keeps every rule; ``taken`` is without the slice itself.

    Our own fault, if it ever is one: a lease that is refused, never one that starts without its limits.
    """
    if faults := _plan_faults(plan, taken, before):
        raise AmdvgpuError(f"the plan for slice {plan.request.name} broke its own rules: {'; '.join(faults)}")
    places = [taken[share.partition] for share in plan.shares]
    cumask.proven_cu_mask([share.cus for share in plan.shares], [at.partition.cu_count for at in places])


def _plan_faults(plan: Plan, taken: Mapping[PartitionId, Occupancy], before: Sequence[Share] = ()) -> list[str]:
    faults: list[str] = []
    old = {share.partition: share.vram_bytes for share in before}
    places = [taken[share.partition] for share in plan.shares]
    for share, at in zip(plan.shares, places, strict=True):
        faults += _share_faults(share, at.partition, plan.request.compute.policy)
        mask = None if share.cus is None else _mask_of(share.cus.bits)
        if at.whole or (mask is None and at.slices):
            faults.append(f"{share.partition}: a whole share beside another ({', '.join(at.slices)})")
        if mask is not None and mask & (at.exclusive if share.shared else at.taken):
            faults.append(f"{share.partition}: CUs with two owners")
        if share.vram_bytes > max(at.vram_limit_bytes - at.vram_promised_bytes, old.get(share.partition, 0)):
            faults.append(f"{share.partition}: more VRAM promised than there is")
        if share.layout_hash != at.layout_hash:
            faults.append(f"{share.partition}: cut for another layout")
    if len({at.gpu.id for at in places}) != len(places) or len(places) != plan.request.gpu_count:
        faults.append(f"{len(places)} shares for {plan.request.gpu_count} different GPUs")
    nodes = [at.partition.kfd_node for at in places]
    if nodes != sorted(nodes):
        faults.append("shares out of KFD order")
    return faults


def lost_reason(item: Slice, inventory: Inventory) -> str | None:
    """Why ``item`` cannot be used on what the machine has now; None while it can.

    A changed layout loses a slice too: the same mask bits would be other silicon, perhaps somebody else's.
    """
    for share in item.shares:
        partition = inventory.partition(share.partition)
        if partition is None:
            return f"{share.partition} is not there"
        if cumask.layout_hash(partition.layout) != share.layout_hash:
            return f"{share.partition} has another layout of compute units than the slice was cut for"
    return None


def check(book: Book, inventory: Inventory) -> tuple[str, ...]:
    """What in the Book breaks the rules of placement on this Inventory, a sentence each; nothing: all is well.

    For the reload of a journal and for tests. Shares that are not present are no fault (their slice is lost).
    """
    faults: list[str] = []
    owned: dict[PartitionId, list[tuple[Slice, Share]]] = {}
    for item in book.slices.values():
        present = [share for share in item.shares if is_present(share, inventory)]
        for share in present:
            partition = inventory.partition(share.partition)
            if partition is not None:
                owned.setdefault(share.partition, []).append((item, share))
                found = _share_faults(share, partition, item.request.compute.policy)
                faults += [f"slice {item.name}, {fault}" for fault in found]
        gpus = [partition.gpu for share in present if (partition := inventory.partition(share.partition))]
        if len(set(gpus)) != len(gpus):
            faults.append(f"slice {item.name} has two shares of one GPU")
    for where, owners in owned.items():
        names = ", ".join(item.name for item, _ in owners)
        alone = [item for item, share in owners if share.cus is None]
        if any(one is not item and not _in_turn(one.request, item.request) for one in alone for item, _ in owners):
            faults.append(f"{where}: whole, but has several owners ({names})")
        exclusive = shared = 0
        for at, (item, share) in enumerate(owners):
            mask = 0 if share.cus is None else _mask_of(share.cus.bits)
            # First against all together: that nearly always settles it.
            if mask & (exclusive if share.shared else exclusive | shared) and any(
                mask & _mask_of(other.cus.bits) and not _in_turn(item.request, before.request)
                for before, other in owners[:at]
                if other.cus is not None and not (share.shared and other.shared)
            ):
                faults.append(f"{where}: slice {item.name} has CUs that another slice has")
            if share.shared:
                shared |= mask
            else:
                exclusive |= mask
        partition = inventory.partition(where)
        promised = _promised_bytes({item.name: (item.request, share.vram_bytes) for item, share in owners})
        if partition is not None and promised > (limit := int(partition.vram_bytes * _ratio(book, partition.gpu))):
            faults.append(f"{where}: {human_size(promised)} of VRAM promised of {human_size(limit)} ({names})")
    return tuple(faults)
