"""Placement against tables, and against an oracle that knows the rules but not the planner.

The oracle (class ``Silicon`` and what follows it) is written from the rules alone and calls nothing of the product but
the model's values: it sorts where the product walks, enumerates where the product calculates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from itertools import combinations, product
from operator import or_
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amdvgpud.core import cumask
from amdvgpud.core import plan as planner
from amdvgpud.core.errors import AmdvgpuError, Conflict, NoRoom, NotFound
from amdvgpud.core.health import Condition, Health
from amdvgpud.core.model import (
    Book,
    Compute,
    ComputePolicy,
    CuLayout,
    CuSet,
    GpuId,
    Inventory,
    PartitionId,
    Request,
    Share,
    Slice,
    SliceName,
    Spread,
)
from amdvgpud.core.plan import Capacity, place, resize, take_over

GIB = 1024**3
LayoutOf = Callable[[str], CuLayout]
MakeInventory = Callable[..., Inventory]
Ask = Callable[..., Request]
Grant = Callable[[Book, Request, Iterable[Share]], Book]


def bits(start: int, stop: int) -> CuSet:
    return CuSet(tuple(range(start, stop)))


@pytest.fixture
def granted(grant: Grant) -> Callable[..., Book]:
    """The Book after each request was placed, in order."""

    def after(inventory: Inventory, *requests: Request, book: Book | None = None) -> Book:
        book = book or Book()
        for request in requests:
            book = grant(book, request, place(book, inventory, request).shares)
        return book

    return after


Granted = Callable[..., Book]


def sets_of(book: Book, name: str) -> list[CuSet | None]:
    return [share.cus for share in book.slices[SliceName(name)].shares]


def counts_of(share: Share) -> tuple[int, int, int]:
    return share.asked_cus, share.granted_cus, share.effective_cus


# ------------------------------------------------------------------------------------------------------- the policies


@pytest.mark.parametrize(
    ("model", "compute", "policy", "counts"),
    [
        ("MI300X", "2%", "balanced", (6, 32, 32)),
        ("MI300X", "25%", "balanced", (76, 64, 64)),
        ("MI300X", "50%", "balanced", (152, 160, 160)),
        ("MI300X", "38", "balanced", (38, 32, 32)),
        ("MI300X", "100%", "balanced", (304, 304, 288)),
        ("MI300X", "1", "balanced", (1, 32, 32)),
        ("MI300X", "2%", "fine", (6, 8, 8)),
        ("MI300X", "25%", "fine", (76, 80, 64)),
        ("MI300X", "100%", "fine", (304, 304, 288)),
        ("MI300X", "76", "exact", (76, 72, 64)),
        ("MI300X", "6", "exact", (6, 8, 8)),
        ("MI300X", "304", "exact", (304, 304, 288)),
        ("MI300X", "288", "exact", (288, 288, 288)),
        ("MI300X", "whole", "whole", (304, 304, 288)),
        ("MI300X", "33%", "shared", (100, 96, 96)),
        ("MI300X CPX", "25%", "balanced", (10, 8, 8)),
        ("MI210", "50%", "balanced", (52, 56, 56)),
        ("MI308X", "50%", "balanced", (40, 48, 48)),
        ("RX 9070 XT", "25%", "balanced", (16, 16, 16)),
        ("RX 9070 XT", "21", "exact", (21, 22, 16)),
        ("RX 9070 XT", "1", "exact", (1, 2, 2)),
        ("RX 7900 XTX", "33.3%", "balanced", (32, 36, 36)),
        ("RX 7900 XTX", "3%", "fine", (3, 2, 2)),
        ("Raphael", "whole", "whole", (2, 2, 2)),
    ],
)
def test_what_is_asked_granted_and_effective_on_an_empty_gpu(
    layout_of: LayoutOf,
    make_inventory: MakeInventory,
    ask: Ask,
    model: str,
    compute: str,
    policy: str,
    counts: tuple[int, int, int],
) -> None:
    (share,) = place(Book(), make_inventory(layout_of(model)), ask("a", compute, policy)).shares
    assert counts_of(share) == counts
    assert share.shared is (policy == "shared")
    assert (share.cus is None) is (policy == "whole")


@pytest.mark.parametrize(
    ("model", "compute", "policy"),
    [
        ("MI300X", "76", "exact"),
        ("MI300X", "1", "exact"),
        ("MI300X", "304", "exact"),
        ("MI300X", "whole", "whole"),
        ("MI210", "52", "exact"),
        ("MI308X", "25%", "balanced"),
        ("RX 9070 XT", "21", "exact"),
        ("RX 7900 XTX", "96", "exact"),
        ("Raphael", "whole", "whole"),
    ],
)
def test_what_was_granted_once_can_be_taken_over_as_it_is(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, model: str, compute: str, policy: str
) -> None:
    inventory = make_inventory(layout_of(model), layout_of(model))
    request = ask("a", compute, policy, gpus=2)
    plan = place(Book(), inventory, request)
    assert take_over(Book(), inventory, request, {s.partition: s.cus for s in reversed(plan.shares)}) == plan


def test_what_somebody_cannot_have_or_another_one_has_is_not_taken_over(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"), layout_of("MI300X"))
    first, second = (partition.id for partition in inventory.partitions)
    book = granted(inventory, ask("b", "152", "exact", on=("0",)))
    request = ask("a", "152", "exact")

    def refused(request: Request, *places: tuple[PartitionId, CuSet | None]) -> str:
        with pytest.raises(Conflict) as refusal:
            take_over(book, inventory, request, dict(places))
        return str(refusal.value)

    half, other_half = sets_of(book, "b")[0], bits(152, 304)
    assert take_over(book, inventory, request, {first: other_half}).shares[0].cus == other_half
    assert take_over(book, inventory, request, {second: half}).shares[0].partition == second
    assert "CUs with two owners" in refused(request, (first, half))
    assert "151 CUs are not what 152 come to" in refused(request, (second, bits(0, 151)))
    assert "unequal or no CUs on some XCC" in refused(request, (second, CuSet((*range(144), *range(144, 304, 20)))))
    assert "a whole share beside another" in refused(ask("a", "whole", "whole"), (first, None))
    assert "2 shares for 1 different GPUs" in refused(request, (first, other_half), (second, half))
    assert "bits that address no CU" in refused(request, (second, bits(200, 352)))
    assert "more VRAM promised than there is" in refused(replace(request, vram_bytes=192 * GIB), (first, other_half))
    assert "on GPU-9/0, which is not here" in refused(request, (PartitionId("GPU-9/0"), half))


def test_a_second_lease_gets_the_next_rows_here_and_the_first_rows_there(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"), layout_of("MI300X"))
    book = granted(inventory, ask("a", "96", on=("0",)), ask("b", "96", gpus=2))
    assert sets_of(book, "a") == [bits(0, 96)]
    assert sets_of(book, "b") == [bits(96, 192), bits(0, 96)]


def test_two_halves_of_nine_rows_are_five_and_four(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    book = granted(inventory, ask("a", "50%"), ask("b", "50%"))
    assert [counts_of(item.shares[0]) for item in book.slices.values()] == [(152, 160, 160), (152, 128, 128)]


def test_rows_that_share_caches_go_to_one_slice(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    book = granted(inventory, ask("a", "32"), ask("b", "64"), ask("c", "32"))
    # Row 1 shares caches with a's row 0: b takes the pair behind it, and c, which has no pair to take, the odd one.
    assert [sets_of(book, name) for name in "abc"] == [[bits(0, 32)], [bits(64, 128)], [bits(32, 64)]]


def test_an_odd_row_comes_from_a_broken_pair_before_a_lower_whole_one(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    book = granted(inventory, ask("a", "64"), ask("b", "32")).without_slice(SliceName("a"))
    assert sets_of(granted(inventory, ask("c", "32"), book=book), "c") == [bits(96, 128)]


def test_arrays_of_an_rdna_gpu_are_used_evenly(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("RX 9070 XT"))
    book = granted(inventory, ask("a", "8"), ask("b", "8"), ask("c", "8"), ask("d", "8"))
    book = book.without_slice(SliceName("a")).without_slice(SliceName("d"))
    # Free are row 0 (array 0), row 3 (array 1) and all from row 4 on; two rows must not be 0 and 4, both in array 0.
    assert sets_of(granted(inventory, ask("e", "16"), book=book), "e") == [CuSet((*range(8), *range(24, 32)))]


def test_fine_takes_columns_of_a_broken_row_before_it_breaks_another(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    book = granted(inventory, ask("a", "8", "fine"), ask("b", "40", "fine"), ask("c", "16", "fine"))
    assert [sets_of(book, name) for name in "abc"] == [
        [bits(0, 8)],
        [CuSet((*range(8, 16), *range(32, 64)))],
        [bits(16, 32)],
    ]


def test_fine_refuses_columns_of_one_engine_that_exact_takes(
    make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(CuLayout(1, 4, 1, (2,) * 4, wgp=False))
    book = granted(inventory, *(ask(f"s{i}", "1", "exact") for i in range(8)))
    for name in ("s0", "s4"):
        book = book.without_slice(SliceName(name))
    with pytest.raises(NoRoom, match="has 186 GiB and 1 CUs"):
        place(book, inventory, ask("f", "2", "fine"))
    assert place(book, inventory, ask("e", "2", "exact")).shares[0].cus == CuSet((0, 4))


def test_fine_keeps_engines_even_over_broken_rows(make_inventory: MakeInventory, ask: Ask, granted: Granted) -> None:
    inventory = make_inventory(CuLayout(1, 4, 1, (3,) * 4, wgp=False))
    book = granted(inventory, *(ask(f"s{i}", "1", "exact") for i in range(12)))
    # Each row misses one engine, none of them the first: two columns an engine is all that is even.
    for i in set(range(12)) - {1, 6, 11}:
        book = book.without_slice(SliceName(f"s{i}"))
    assert sets_of(granted(inventory, ask("f", "8", "fine"), book=book), "f") == [CuSet((0, 2, 3, 4, 5, 7, 9, 10))]


def test_fine_is_cut_in_rows_where_the_harvest_is_a_guess(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask
) -> None:
    guessed = replace(layout_of("MI300X"), harvest_known=False)
    (share,) = place(Book(), make_inventory(guessed), ask("a", "2%", "fine")).shares
    assert counts_of(share) == (6, 32, 32)


def test_the_tail_goes_to_nobody_but_the_owner_of_all_rows_unless_a_count_is_dictated(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    book = granted(inventory, *(ask(f"s{i}", "32") for i in range(9)))
    for policy in ("balanced", "fine"):
        with pytest.raises(NoRoom) as refusal:
            place(book, inventory, ask("x", "1", policy))
        assert refusal.value.reason == "no_cus"
    assert sets_of(granted(inventory, ask("all", "95%")), "all") == [bits(0, 304)]


def test_a_dictated_count_takes_the_tail_when_the_rows_are_gone(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    book = granted(inventory, ask("a", "152", "exact"), ask("b", "152", "exact"))
    assert [counts_of(book.slices[SliceName(name)].shares[0])[1] for name in "ab"] == [152, 152]
    (rest,) = sets_of(book, "b")
    assert rest is not None
    assert set(range(288, 304)) <= set(rest)
    # What is left of the tail is the bonus of who then has all rows.
    book = granted(inventory, *(ask(f"s{i}", "32") for i in range(9)))
    book = granted(inventory, ask("t", "8", "exact"), book=book)
    for i in range(9):
        book = book.without_slice(SliceName(f"s{i}"))
    assert sets_of(granted(inventory, ask("all", "95%"), book=book), "all") == [CuSet((*range(288), *range(296, 304)))]


def test_shared_slices_overlap_each_other_least_shared_first_and_nobody_else(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("RX 9070 XT"))
    book = granted(
        inventory,
        ask("own", "50%"),
        ask("s1", "25%", "shared"),
        ask("s2", "25%", "shared"),
        ask("s3", "50%", "shared"),
        ask("s4", "12.5%", "shared"),
    )
    assert sets_of(book, "own") == [bits(0, 32)]
    assert [sets_of(book, f"s{i}") for i in (1, 2, 3, 4)] == [
        [bits(32, 48)],
        [bits(48, 64)],
        [bits(32, 64)],
        [bits(32, 40)],
    ]
    with pytest.raises(NoRoom, match="has 11 GiB and 0 CUs"):
        place(book, make_inventory(layout_of("RX 9070 XT"), vram_bytes=16 * GIB), ask("x", "12.5%"))
    with pytest.raises(NoRoom):
        place(book, inventory, ask("x", "75%", "shared"))


def test_a_whole_share_suffers_nobody_and_comes_to_nobody(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    book = granted(inventory, ask("w", "whole", vram_bytes=None))
    assert [(s.vram_bytes, s.cus) for s in book.slices[SliceName("w")].shares] == [(192 * GIB, None)]
    for request in (ask("x", "25%"), ask("x", "25%", "shared"), ask("x", "8", "exact"), ask("x", "whole")):
        with pytest.raises(NoRoom, match=r"has 0 B and 0 CUs \(slice w has it whole\)"):
            place(book, inventory, request)
    # By quota there is room beside it, but it was promised to be alone.
    small = granted(inventory, ask("w", "whole", vram_bytes=GIB))
    with pytest.raises(NoRoom, match="slice w has it whole"):
        place(small, inventory, ask("x", "25%"))
    shared = granted(inventory, ask("s", "25%", "shared"))
    with pytest.raises(NoRoom, match="in use by s"):
        place(shared, inventory, ask("w", "whole"))


def test_a_partition_of_one_wgp_is_whole_or_nothing(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask
) -> None:
    inventory = make_inventory(layout_of("Raphael"), vram_bytes=GIB)
    with pytest.raises(NoRoom, match=r"cannot be divided \(one row of CUs\): ask for 'whole'"):
        place(Book(), inventory, ask("a", "100%"))
    assert place(Book(), inventory, ask("a", "whole")).shares[0].granted_cus == 2


def test_an_engine_that_has_but_half_a_wgp_counts_as_none(make_inventory: MakeInventory, ask: Ask) -> None:
    inventory = make_inventory(CuLayout(1, 2, 1, (6, 1), wgp=True))
    (share,) = place(Book(), inventory, ask("a", "2")).shares
    assert (share.cus, share.effective_cus) == (bits(0, 2), 2)


# ------------------------------------------------------------------------------------------------------------- memory


def test_quotas_never_exceed_the_vram_of_a_partition(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    book = granted(inventory, ask("a", "25%", vram_bytes=191 * GIB))
    rest = granted(inventory, ask("b", "25%", vram_bytes=None), book=book)
    assert rest.slices[SliceName("b")].shares[0].vram_bytes == GIB
    with pytest.raises(NoRoom, match="has 0 B and 160 CUs") as refusal:
        place(rest, inventory, ask("c", "25%", vram_bytes=1))
    assert refusal.value.reason == "no_vram"
    with pytest.raises(NoRoom):
        place(rest, inventory, ask("c", "25%", vram_bytes=None))


def test_a_second_request_for_all_memory_is_refused_with_what_is_left(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    book = granted(inventory, ask("a", "25%", vram_bytes=192 * GIB))
    with pytest.raises(NoRoom) as refusal:
        place(book, inventory, ask("b", "25%", vram_bytes=192 * GIB))
    assert str(refusal.value) == (
        "wanted 192 GiB and 76 CUs (25%) on one partition; the roomiest, 0000:83:00.0/0, has 0 B and 224 CUs"
    )


def test_oversubscription_counts_for_the_gpu_that_has_it(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"), layout_of("MI300X"))
    ratios = MappingProxyType({inventory.gpus[1].id: 1.5})
    book = granted(
        inventory,
        ask("a", "25%", vram_bytes=192 * GIB),
        ask("b", "25%", vram_bytes=192 * GIB),
        ask("c", "25%", vram_bytes=96 * GIB),
        book=Book(oversubscription=ratios),
    )
    assert [item.shares[0].partition for item in book.slices.values()] == [
        "GPU-0000000000000001/0",
        "GPU-0000000000000002/0",
        "GPU-0000000000000002/0",
    ]
    with pytest.raises(NoRoom):
        place(book, inventory, ask("d", "25%", vram_bytes=1))
    # Without a figure nobody is promised more than is there.
    assert place(Book(oversubscription=ratios), inventory, ask("e", "25%", vram_bytes=None, on=("1",))).shares[
        0
    ].vram_bytes == (192 * GIB)
    assert planner.check(book, inventory) == ()
    assert planner.check(replace(book, oversubscription=MappingProxyType({})), inventory) == (
        "GPU-0000000000000002/0: 288 GiB of VRAM promised of 192 GiB (b, c)",
    )


def test_a_resize_keeps_the_cus(layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    book = granted(inventory, ask("a", "25%", vram_bytes=100 * GIB), ask("b", "25%", vram_bytes=80 * GIB))
    item = book.slices[SliceName("a")]
    plan = resize(book, inventory, item, 112 * GIB)
    assert plan == planner.Plan(
        replace(item.request, vram_bytes=112 * GIB), (replace(item.shares[0], vram_bytes=112 * GIB),)
    )
    with pytest.raises(NoRoom, match=r"0000:83:00\.0/0 has 112 GiB for it") as refusal:
        resize(book, inventory, item, 112 * GIB + 1)
    assert refusal.value.reason == "no_vram"


def test_a_quota_can_be_lowered_where_more_is_promised_than_there_is(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    ratios = MappingProxyType({inventory.gpus[0].id: 2.0})
    requests = [ask("a", "25%", vram_bytes=192 * GIB), ask("b", "25%", vram_bytes=192 * GIB)]
    book = granted(inventory, *requests, book=Book(oversubscription=ratios))
    book = book.with_oversubscription({})
    item = book.slices[SliceName("a")]
    assert resize(book, inventory, item, 100 * GIB).shares[0].vram_bytes == 100 * GIB
    with pytest.raises(NoRoom):
        resize(book, inventory, item, 192 * GIB + 1)


def test_a_lost_slice_is_not_resized(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    book = granted(inventory, ask("a", "25%"))
    for now in (Inventory(), make_inventory(layout_of("MI355X"))):
        with pytest.raises(Conflict, match="slice a is lost: GPU-0000000000000001/0 is gone or laid out anew"):
            resize(book, now, book.slices[SliceName("a")], GIB)


# ------------------------------------------------------------------------------------------------ which GPU, and none


def test_several_gpus_are_always_different_ones(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X CPX"), layout_of("MI300X CPX"), partitions=8, vram_bytes=24 * GIB)
    shares = place(Book(), inventory, ask("a", "25%", gpus=2)).shares
    assert [share.partition for share in shares] == ["GPU-0000000000000001/0", "GPU-0000000000000002/0"]
    with pytest.raises(NoRoom, match="two shares of one slice never lie on one GPU") as refusal:
        place(Book(), inventory, ask("a", "25%", gpus=2, on=("0/0", "0/1")))
    assert refusal.value.reason == "no_gpu"
    full = granted(inventory, *(ask(f"w{i}", "whole", on=(f"1/{i}",)) for i in range(8)))
    with pytest.raises(NoRoom) as refusal:
        place(full, inventory, ask("a", "25%", gpus=2))
    assert str(refusal.value) == (
        "wanted 1 GiB and 10 CUs (25%) on each of 2 different GPUs; 1 GPU has room; "
        "of the others the roomiest, 0000:84:00.0/0, has 0 B and 0 CUs (slice w0 has it whole)"
    )


def test_binpack_fills_what_is_begun_and_spread_seeks_the_emptiest(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"), layout_of("MI300X"), layout_of("MI300X"))
    book = granted(inventory, ask("a", "25%", on=("1",)))
    (packed,) = place(book, inventory, ask("b", "25%")).shares
    (spread,) = place(book, inventory, ask("b", "25%", spread=Spread.SPREAD)).shares
    assert (packed.partition, spread.partition) == ("GPU-0000000000000002/0", "GPU-0000000000000001/0")
    (full,) = place(book, inventory, ask("b", "100%")).shares
    assert full.partition == "GPU-0000000000000001/0"


def test_in_partitions_binpack_keeps_whole_gpus_free_and_spread_goes_to_the_gpu_with_fewest_neighbours(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X CPX"), layout_of("MI300X CPX"), partitions=2)
    book = granted(inventory, ask("a", "100%", on=("1/0",)))
    (packed,) = place(book, inventory, ask("b", "100%")).shares
    (spread,) = place(book, inventory, ask("b", "25%", spread=Spread.SPREAD)).shares
    assert (packed.partition, spread.partition) == ("GPU-0000000000000002/1", "GPU-0000000000000001/0")


def test_cordoned_gpus_are_skipped_and_named_when_nothing_else_is_left(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask
) -> None:
    inventory = make_inventory(layout_of("MI300X"), layout_of("MI300X"))
    book = Book().with_cordoned([GpuId("GPU-0000000000000001")])
    assert place(book, inventory, ask("a", "25%")).shares[0].partition == "GPU-0000000000000002/0"
    with pytest.raises(NoRoom, match=r"takes none now \(GPU-0000000000000001: cordoned\)") as refusal:
        place(book, inventory, ask("a", "25%", on=("0",)))
    assert refusal.value.reason == "no_gpu"


def test_a_gpu_that_is_not_fit_takes_nothing_and_the_refusal_says_why(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask
) -> None:
    inventory = make_inventory(layout_of("MI300X"), layout_of("MI300X"))
    unfit = {GpuId("GPU-0000000000000001"): Health(Condition.UNHEALTHY, "2 uncorrectable errors in umc", "ras")}
    assert place(Book(), inventory, ask("a", "25%"), unfit).shares[0].partition == "GPU-0000000000000002/0"
    with pytest.raises(NoRoom, match=r"0001: unhealthy, 2 uncorrectable errors in umc\)"):
        place(Book(), inventory, ask("a", "25%", on=("0",)), unfit)


def test_a_node_without_gpus_says_so(ask: Ask) -> None:
    with pytest.raises(NoRoom, match="this node has no usable GPU") as refusal:
        place(Book(), Inventory(), ask("a", "25%"))
    assert refusal.value.reason == "no_gpu"


def test_an_unknown_place_is_not_found(layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask) -> None:
    with pytest.raises(NotFound):
        place(Book(), make_inventory(layout_of("MI300X")), ask("a", "25%", on=("0000:99:00.0",)))


def test_a_refusal_names_the_partition_that_comes_nearest(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("RX 7900 XTX"), layout_of("RX 7900 XTX"), vram_bytes=47 * GIB)
    book = granted(
        inventory,
        ask("a", "75%", vram_bytes=40 * GIB, on=("0",)),
        ask("b", "84", vram_bytes=16 * GIB, on=("1",)),
    )
    with pytest.raises(NoRoom) as refusal:
        place(book, inventory, ask("c", "38", vram_bytes=48 * GIB))
    assert str(refusal.value) == (
        "wanted 48 GiB and 38 CUs on one partition; the roomiest, 0000:84:00.0/0, has 31 GiB and 12 CUs"
    )
    with pytest.raises(NoRoom, match=r"wanted 1 GiB and 500 CUs on one partition; the roomiest, .* CUs") as refusal:
        place(Book(), inventory, ask("c", "500"))
    assert refusal.value.reason == "no_cus"


def test_a_slice_of_the_same_name_is_looked_past(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    book = granted(inventory, ask("a", "100%", vram_bytes=None))
    assert place(book, inventory, ask("a", "50%", vram_bytes=150 * GIB)).shares[0].cus == bits(0, 160)


def test_what_is_lost_takes_nothing_of_what_is_there_now(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    spx = make_inventory(layout_of("MI300X"), layout_of("MI300X"))
    cpx = make_inventory(layout_of("MI300X CPX"), layout_of("MI300X"), partitions=1)
    book = granted(spx, ask("a", "100%", gpus=2, vram_bytes=192 * GIB))
    # GPU 0 is another silicon now; GPU 1 is still promised.
    assert place(book, cpx, ask("b", "100%", vram_bytes=192 * GIB)).shares[0].partition == "GPU-0000000000000001/0"
    with pytest.raises(NoRoom):
        place(book, cpx, ask("b", "25%", on=("1",)))
    with pytest.raises(NoRoom):
        place(book, spx, ask("b", "25%", on=("0",)))


def test_capacities_are_free_and_promised(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"), layout_of("MI300X"), layout_of("Raphael"))
    book = granted(
        inventory,
        ask("a", "25%", vram_bytes=16 * GIB, on=("0",)),
        ask("c", "8", "fine", vram_bytes=16 * GIB, on=("0",)),
        ask("w", "whole", vram_bytes=16 * GIB, on=("1",)),
    )
    assert list(planner.capacities(book, inventory).values()) == [
        Capacity(
            PartitionId("GPU-0000000000000001/0"),
            vram_limit_bytes=192 * GIB,
            vram_promised_bytes=32 * GIB,
            vram_free_bytes=160 * GIB,
            row_count=9,
            row_cus=32,
            rows_free=6,
            cus_allocated=72,
            cus_free=192,
            sliceable=True,
            slices=(SliceName("a"), SliceName("c")),
        ),
        Capacity(
            PartitionId("GPU-0000000000000002/0"),
            vram_limit_bytes=192 * GIB,
            vram_promised_bytes=16 * GIB,
            vram_free_bytes=0,
            row_count=9,
            row_cus=32,
            rows_free=0,
            cus_allocated=304,
            cus_free=0,
            sliceable=True,
            slices=(SliceName("w"),),
        ),
        Capacity(
            PartitionId("GPU-0000000000000003/0"),
            vram_limit_bytes=192 * GIB,
            vram_promised_bytes=0,
            vram_free_bytes=192 * GIB,
            row_count=1,
            row_cus=2,
            rows_free=1,
            cus_allocated=0,
            cus_free=2,
            sliceable=False,
            slices=(),
        ),
    ]
    assert planner.capacity(book, inventory, inventory.partitions[0]).rows_free == 6


# -------------------------------------------------------------------------------------------- faults are not let pass


def test_a_plan_that_breaks_the_rules_is_an_error_and_no_slice(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    for mask, fault in (
        ((1 << 7) - 1, "unequal or no CUs on some XCC"),
        ((1 << 76) - 1, "unequal or no CUs on some XCC"),
        ((1 << 40) - 1, "policy balanced with 1 to 2 CUs an engine"),
        (((1 << 16) - 1) << 288, "CUs of the tail without all rows"),
        (1 << 304, "address no CU"),
    ):
        monkeypatch.setattr(planner, "_cut", lambda *_, mask=mask: mask)
        with pytest.raises(AmdvgpuError, match=f"the plan for slice a broke its own rules: .*{fault}") as refusal:
            place(Book(), inventory, ask("a", "25%"))
        assert not isinstance(refusal.value, NoRoom)
    monkeypatch.setattr(planner, "_cut", lambda *_: 0x7)
    with pytest.raises(AmdvgpuError, match="half a WGP"):
        place(Book(), make_inventory(layout_of("RX 9070 XT")), ask("a", "25%"))


def test_a_plan_whose_mask_text_is_not_read_back_as_meant_is_refused(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cumask, "format_cu_mask", lambda sets: "0:0-31,32-63")
    with pytest.raises(AmdvgpuError, match=r"the slice is refused: .* is no canonical CU mask") as refusal:
        place(Book(), make_inventory(layout_of("MI300X")), ask("a", "25%"))
    assert refusal.value.code == "internal"


def test_check_finds_what_a_book_should_never_hold(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted, grant: Grant
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    book = granted(inventory, ask("a", "25%"))
    twin = book.slices[SliceName("a")].shares
    assert planner.check(book, inventory) == ()
    assert planner.check(grant(book, ask("b", "25%"), twin), inventory) == (
        "GPU-0000000000000001/0: slice b has CUs that another slice has",
    )
    assert planner.check(grant(Book(), ask("b", "25%", gpus=2), twin * 2), inventory) == (
        "slice b has two shares of one GPU",
        "GPU-0000000000000001/0: slice b has CUs that another slice has",
    )
    whole = place(Book(), inventory, ask("w", "whole")).shares
    assert planner.check(grant(book, ask("w", "whole"), whole), inventory) == (
        "GPU-0000000000000001/0: whole, but has several owners (a, w)",
    )
    seven = make_inventory(CuLayout(1, 1, 1, (7,), wgp=False))
    raphael = make_inventory(layout_of("Raphael"))
    (share,) = place(Book(), seven, ask("a", "1")).shares
    moved = replace(share, layout_hash=place(Book(), raphael, ask("w", "whole")).shares[0].layout_hash)
    assert planner.check(grant(Book(), ask("a", "1"), [moved]), raphael) == (
        "slice a, GPU-0000000000000001/0: half a WGP",
        "slice a, GPU-0000000000000001/0: a mask on a partition that cannot be divided",
    )
    # Lost is no fault.
    assert planner.check(book, Inventory()) == ()


def test_what_is_over_before_a_slice_is_used_is_given_once_more_and_only_to_it(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    of = granted(inventory, ask("side", "10%", vram_bytes=10 * GIB), ask("setup", "50%", vram_bytes=90 * GIB))
    later = [
        replace(ask(name, "30%", vram_bytes=70 * GIB), after=(SliceName("setup"), SliceName("gone"))) for name in "ab"
    ]
    book = granted(inventory, *later, book=of)
    assert planner.check(book, inventory) == ()
    # side is there all the time: 10 + max(90, 70 + 70), not 240; and CUs of the two that run together are disjoint.
    (capacity,) = planner.capacities(book, inventory).values()
    assert (capacity.vram_promised_bytes, capacity.slices) == (150 * GIB, ("a", "b", "setup", "side"))
    sets = [cus for name in ("side", "setup", "a", "b") if (cus := sets_of(book, name)[0])]
    assert [one.mask & other.mask == 0 for one, other in combinations(sets, 2)] == [
        *(True, True, True),
        *(False, False),
        True,
    ]
    stranger = ask("c", "1", vram_bytes=50 * GIB)
    with pytest.raises(NoRoom, match="has 42 GiB"):
        place(book, inventory, stranger)
    # Who ends first may grow by what is left beside those that run at the same time, and no further.
    setup = book.slices[SliceName("setup")]
    assert resize(book, inventory, setup, 182 * GIB).shares[0].vram_bytes == 182 * GIB
    with pytest.raises(NoRoom, match="has 182 GiB for it"):
        resize(book, inventory, setup, 183 * GIB)
    # Without that relation the same Shares are a fault.
    for request in later:
        book = book.with_slice(replace(book.slices[request.name], request=replace(request, after=())))
    assert planner.check(book, inventory) == (
        "GPU-0000000000000001/0: slice a has CUs that another slice has",
        "GPU-0000000000000001/0: slice b has CUs that another slice has",
        "GPU-0000000000000001/0: 240 GiB of VRAM promised of 192 GiB (side, setup, a, b)",
    )


def test_a_whole_partition_is_had_in_turn(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, granted: Granted
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    first = ask("setup", "whole", vram_bytes=None)
    then = replace(ask("main", "whole", vram_bytes=None), after=(first.name,))
    book = granted(inventory, first, then)
    assert planner.check(book, inventory) == ()
    with pytest.raises(NoRoom):
        place(book, inventory, ask("c", "1", vram_bytes=GIB))
    assert planner.check(book.with_slice(replace(book.slices[then.name], request=replace(then, after=()))), inventory)


# --------------------------------------------------------------------------------------------------------- the oracle


@dataclass(frozen=True)
class Silicon:
    """What the mask bits of a layout are, by sorting: the k-th granule of XCC x in (CU, array, engine) order."""

    layout: CuLayout

    @property
    def step(self) -> int:
        return 2 if self.layout.wgp else 1

    def granules(self) -> dict[frozenset[int], tuple[int, int, int, int]]:
        """Grantable granules (bits of one CU or WGP) and their (xcc, engine, array, cu)."""
        layout, found = self.layout, {}
        if layout.wgp and layout.xcc_count > 1:
            return {}
        for xcc in range(layout.xcc_count):
            mine = [
                (cu, array, engine)
                for engine in range(layout.engines_per_xcc)
                for array in range(layout.arrays_per_engine)
                for cu in range(0, self.active(xcc, engine, array), self.step)
            ]
            for k, (cu, array, engine) in enumerate(sorted(mine)):
                granule = frozenset(self.step * k * layout.xcc_count + xcc + half for half in range(self.step))
                complete = cu + self.step <= self.active(xcc, engine, array)
                if max(granule) < min(sum(layout.active), 1024) and complete:  # the driver cuts masks at 1024
                    found[granule] = (xcc, engine, array, cu)
        return found

    def active(self, xcc: int, engine: int, array: int) -> int:
        layout = self.layout
        return layout.active[
            xcc * layout.engines_per_xcc * layout.arrays_per_engine + engine * layout.arrays_per_engine + array
        ]

    def rows(self) -> list[frozenset[int]]:
        """Sets of bits of the same CU and array that have one granule in every engine (that lives) of every XCC."""
        granules = self.granules()
        engines = {where[1] for where in granules.values()}
        by_level: dict[tuple[int, int], list[frozenset[int]]] = {}
        for granule, (_, _, array, cu) in granules.items():
            by_level.setdefault((array, cu), []).append(granule)
        full = self.layout.xcc_count * len(engines)
        return [frozenset().union(*found) for found in by_level.values() if len(found) == full]

    def tail(self) -> frozenset[int]:
        """As many granules outside the rows as every XCC has, the lowest ones of each."""
        rest: dict[int, list[frozenset[int]]] = {xcc: [] for xcc in range(self.layout.xcc_count)}
        in_rows = frozenset().union(*self.rows())
        for granule, where in self.granules().items():
            if not granule & in_rows:
                rest[where[0]].append(granule)
        equal = min(len(found) for found in rest.values())
        return frozenset().union(*(g for found in rest.values() for g in sorted(found, key=min)[:equal]))

    def tail_free(self, taken: frozenset[int]) -> int:
        """How many bits of the tail's columns (the k-th granule left on each XCC) nobody has any part of."""
        granules, tail = self.granules(), self.tail()
        by_xcc: dict[int, list[frozenset[int]]] = {xcc: [] for xcc in range(self.layout.xcc_count)}
        for granule in sorted((g for g in granules if g <= tail), key=min):
            by_xcc[granules[granule][0]].append(granule)
        columns = [frozenset().union(*parts) for parts in zip(*by_xcc.values(), strict=True)]
        return sum(len(column) for column in columns if not column & taken)

    def columns_free(self, taken: frozenset[int]) -> dict[int, int]:
        """By engine: how many of its row columns nobody has."""
        granules, free = self.granules(), Counter[int]()
        for row in self.rows():
            for engine in {where[1] for where in granules.values()}:
                column = {bit for granule, where in granules.items() if where[1] == engine for bit in granule} & row
                free[engine] += not column & taken
        return dict(free)

    def effective(self, bits: frozenset[int]) -> int:
        counts: Counter[tuple[int, int]] = Counter()
        for granule, (xcc, engine, _, _) in self.granules().items():
            counts[xcc, engine] += len(granule & bits)
        return self.layout.xcc_count * min(
            min(used) * len(used) if (used := [n for (x, _), n in counts.items() if x == xcc and n]) else 0
            for xcc in range(self.layout.xcc_count)
        )


def even_choices(free: Mapping[int, int]) -> set[int]:
    """All counts of columns that can be chosen so that no two engines differ by more than one."""
    found = set()
    for level in range(max(free.values()) + 1):
        if all(count >= level for count in free.values()):
            more = sum(count > level for count in free.values())
            found |= {level * len(free) + extra for extra in range(more + 1)}
    return found


def expected_cus(silicon: Silicon, request: Request, exclusive: frozenset[int], shared: frozenset[int]) -> int | None:
    """How many CUs must be granted; None: a refusal. Whole is the caller's affair."""
    layout, compute = silicon.layout, request.compute
    rows, total = silicon.rows(), sum(layout.active)
    if len(rows) < 2:
        return None
    column = silicon.step * layout.xcc_count
    row = len(rows[0])
    all_columns = len(rows) * row // column
    tail_columns = len(silicon.tail()) // column
    exact = (
        Fraction(str(compute.percent)) * total / 100 if compute.percent is not None else Fraction(compute.cu_count or 0)
    )
    if exact > total:
        return None
    blocked = exclusive if compute.policy is ComputePolicy.SHARED else exclusive | shared
    if compute.policy is ComputePolicy.EXACT:
        count = int(exact)
        wanted = (count + 1) // 2 if layout.wgp else max(1, count // layout.xcc_count)
        wanted = min(wanted, all_columns + tail_columns)
        free = sum(silicon.columns_free(blocked).values()) + silicon.tail_free(blocked) // column
        return wanted * column if wanted <= free else None
    in_columns = compute.policy is ComputePolicy.FINE and layout.harvest_known
    granule, most = (column, all_columns) if in_columns else (row, len(rows))
    if in_columns:
        possible = even_choices(silicon.columns_free(blocked))
    else:
        possible = set(range(sum(not r & blocked for r in rows) + 1))
    quotient = exact / granule
    down = int(quotient)
    nearest = min(most, max(1, down + (quotient - down >= Fraction(1, 2))))
    lowest = min(nearest, max(1, down))
    granted = max((n for n in possible if lowest <= n <= nearest), default=None)
    if granted is None:
        return None
    return granted * granule + (silicon.tail_free(blocked) if granted == most else 0)


@st.composite
def layouts(draw: st.DrawFn) -> CuLayout:
    wgp = draw(st.booleans())
    xccs = 1 if wgp else draw(st.sampled_from([1, 1, 2, 3, 4, 6, 8]))
    engines = draw(st.integers(1, 8))
    arrays = draw(st.integers(1, 2))
    top = draw(st.integers(1, 10)) * (2 if wgp else 1)
    top = min(top, 16)
    spread = draw(st.sampled_from([0, 0, 1, 1, 2, top]))
    harvest = st.integers(max(0, top - spread), top)
    if wgp and draw(st.booleans()):
        harvest = harvest.map(lambda n: n - n % 2)
    counts = xccs * engines * arrays
    if draw(st.booleans()):
        one = draw(st.lists(harvest, min_size=engines * arrays, max_size=engines * arrays))
        active = tuple(one * xccs)
    else:
        active = tuple(draw(st.lists(harvest, min_size=counts, max_size=counts)))
    if not sum(active):
        active = (top,) * counts
    return CuLayout(xccs, engines, arrays, active, wgp, harvest_known=draw(st.sampled_from([True, True, True, False])))


_amounts = st.builds(
    Compute,
    st.sampled_from([ComputePolicy.BALANCED, ComputePolicy.FINE, ComputePolicy.SHARED]),
    percent=st.integers(1, 600).map(lambda n: n / 10) | st.just(100.0),
) | st.builds(
    Compute, st.sampled_from([p for p in ComputePolicy if p is not ComputePolicy.WHOLE]), cu_count=st.integers(1, 100)
)
# Whole shares end all else on the GPU, so they are rare.
_computes = st.integers(0, 15).flatmap(lambda n: _amounts if n else st.just(Compute(ComputePolicy.WHOLE)))
_steps = st.lists(st.tuples(_computes, st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=16)


@settings(max_examples=250)
@given(layout=layouts(), steps=_steps)
def test_plans_on_random_gpus_keep_the_rules_and_refusals_are_true(
    layout: CuLayout, steps: list[tuple[Compute, int, int]], make_inventory: MakeInventory, grant: Grant
) -> None:
    """Slices come and go on one GPU; after each step the oracle says what must have happened."""
    silicon, vram_bytes = Silicon(layout), 100
    inventory = make_inventory(layout, vram_bytes=vram_bytes)
    granules, rows, tail = silicon.granules(), silicon.rows(), silicon.tail()
    in_rows = frozenset().union(*rows)
    book = Book()
    for number, (compute, quota, leaving) in enumerate(steps):
        request = Request(SliceName(f"s{number}"), compute, quota)
        shares = [share for item in book.slices.values() for share in item.shares]
        exclusive = frozenset(bit for share in shares if share.cus and not share.shared for bit in share.cus)
        shared = frozenset(bit for share in shares if share.cus and share.shared for bit in share.cus)
        fits = sum(share.vram_bytes for share in shares) + quota <= vram_bytes
        fits = fits and all(share.cus is not None for share in shares)
        if compute.policy is ComputePolicy.WHOLE:
            expected = None if shares else layout.cu_count
        else:
            expected = expected_cus(silicon, request, exclusive, shared)
        try:
            plan = place(book, inventory, request)
        except NoRoom:
            assert not fits or expected is None
            continue
        assert fits
        assert expected is not None
        assert plan == place(
            replace(book, slices=MappingProxyType(dict(reversed(list(book.slices.items()))))), inventory, request
        )
        (share,) = plan.shares
        assert (share.granted_cus, share.vram_bytes) == (expected, quota)
        if share.cus is not None:
            got = frozenset(share.cus)
            assert not got & exclusive
            assert share.shared or not got & shared
            # Whole granules that exist, as many on each XCC, one at least.
            mine = {granule: where for granule, where in granules.items() if granule <= got}
            assert frozenset().union(*mine) == got
            on_xcc = Counter(where[0] for where in mine.values())
            assert len(on_xcc) == layout.xcc_count
            assert len(set(on_xcc.values())) == 1
            assert not got & tail or in_rows <= got or compute.policy is ComputePolicy.EXACT
            assert got <= in_rows | tail
            if compute.policy in (ComputePolicy.BALANCED, ComputePolicy.SHARED):
                assert all(row <= got or not row & got for row in rows)
            if compute.policy is ComputePolicy.FINE and not in_rows <= got:
                living = {where[1] for where in granules.values()}
                of_xcc = [Counter(dict.fromkeys(living, 0)) for _ in range(layout.xcc_count)]
                for where in mine.values():
                    of_xcc[where[0]][where[1]] += 1
                assert all(max(counts.values()) - min(counts.values()) <= 1 for counts in of_xcc)
            assert share.effective_cus == silicon.effective(got)
            assert len(got) == share.granted_cus
        book = grant(book, request, plan.shares)
        assert planner.check(book, inventory) == ()
        names = sorted(book.slices)
        if leaving == 0 and len(names) > 1:
            book = book.without_slice(names[(number * 7) % len(names)])


@settings(max_examples=60)
@given(
    models=st.lists(st.sampled_from(["MI300X", "MI210", "RX 9070 XT", "Raphael"]), min_size=1, max_size=4),
    steps=st.lists(st.tuples(_computes, st.integers(1, 40), st.integers(1, 3), st.sampled_from(Spread)), max_size=12),
)
def test_plans_over_several_gpus_take_different_ones_that_each_have_room(
    models: list[str],
    steps: list[tuple[Compute, int, int, Spread]],
    layout_of: LayoutOf,
    make_inventory: MakeInventory,
    grant: Grant,
) -> None:
    inventory = make_inventory(*(layout_of(model) for model in models), vram_bytes=100)
    book = Book()
    for number, (compute, quota, gpu_count, spread) in enumerate(steps):
        request = Request(SliceName(f"s{number}"), compute, quota, gpu_count, spread=spread)
        alone = []
        for gpu in inventory.gpus:
            try:
                alone.append(place(book, inventory, replace(request, gpu_count=1, on=(gpu.id,))).shares[0])
            except NoRoom:
                continue
        try:
            shares = place(book, inventory, request).shares
        except NoRoom:
            assert len(alone) < gpu_count
            continue
        # Each share is what its GPU would have given by itself; the order is that of the KFD.
        assert len({share.partition for share in shares}) == gpu_count
        assert [share for share in alone if share in shares] == list(shares)
        book = grant(book, request, shares)
        assert planner.check(book, inventory) == ()


def test_a_slice_of_many_gpus_is_a_value(layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask) -> None:
    inventory = make_inventory(*[layout_of("MI300X")] * 8)
    plan = place(Book(), inventory, ask("a", "25%", gpus=8, spread=Spread.SPREAD))
    assert plan == place(Book(), inventory, ask("a", "25%", gpus=8, spread=Spread.SPREAD))
    assert [share.cus for share in plan.shares] == [bits(0, 64)] * 8
    assert isinstance(Slice(SliceName("a"), plan.request, plan.shares, 0.0, 1), Slice)


def phases(kinds: Iterable[tuple[str, str]]) -> list[set[str]]:
    """Who runs at the same time in a pod of these (kind, name), in order: each ``init`` with each ``side`` that has
    started before it; then all of these with each ``app``."""
    sides: set[str] = set()
    found = []
    rest = set()
    for kind, name in kinds:
        if kind == "init":
            found.append({name, *sides})
        elif kind == "side":
            sides.add(name)
        else:
            rest.add(name)
    return [*found, sides | rest]


_container = st.tuples(st.sampled_from(["init", "init", "side"]), st.integers(1, 60), st.integers(1, 200))
_app = st.tuples(st.just("app"), st.integers(1, 60), st.integers(1, 200))
_pods = st.lists(
    st.tuples(st.lists(_container, max_size=3), st.lists(_app, max_size=2)).map(lambda pod: [*pod[0], *pod[1]]),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150)
@given(pods=_pods)
def test_containers_that_run_in_turn_are_promised_what_they_have_at_their_worst_and_no_more(
    pods: list[list[tuple[str, int, int]]], layout_of: LayoutOf, make_inventory: MakeInventory, grant: Grant
) -> None:
    inventory = make_inventory(layout_of("MI300X"), vram_bytes=100)
    book = Book()
    running: list[list[tuple[str, str]]] = []
    for number, containers in enumerate(pods):
        of_pod: list[tuple[str, str]] = []
        running.append(of_pod)
        for at, (kind, quota, cus) in enumerate(containers):
            before = tuple(SliceName(name) for other, name in of_pod if other == "init")
            compute = Compute(ComputePolicy.EXACT, cu_count=cus)
            request = Request(SliceName(f"p{number}.{at}"), compute, quota, after=before)
            try:
                book = grant(book, request, place(book, inventory, request).shares)
            except NoRoom:
                continue
            of_pod.append((kind, request.name))
            shares = {name: item.shares[0] for name, item in book.slices.items()}
            worst = sum(
                max(sum(shares[SliceName(name)].vram_bytes for name in phase) for phase in phases(pod))
                for pod in running
            )
            (capacity,) = planner.capacities(book, inventory).values()
            assert capacity.vram_promised_bytes == worst <= 100
            for moment in product(*map(phases, running)):
                sets = [shares[SliceName(name)].cus for name in set().union(*moment)]
                masks = [each.mask for each in sets if each is not None]
                assert sum(masks) == reduce(or_, masks, 0)
            assert planner.check(book, inventory) == ()
