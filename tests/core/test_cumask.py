from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amdvgpud.core import cumask
from amdvgpud.core.cumask import Place
from amdvgpud.core.errors import AmdvgpuError, Invalid
from amdvgpud.core.model import CuLayout, CuSet

LayoutOf = Callable[[str], CuLayout]


def first(count: int) -> int:
    return (1 << count) - 1


# ---------------------------------------------------------------------------------------------------------- the walk


def test_bits_go_over_the_xccs_first_then_over_the_engines(layout_of: LayoutOf) -> None:
    walk = cumask.kernel_walk(layout_of("MI300X"))
    assert walk[:8] == tuple(Place(xcc, 0, 0, 0) for xcc in range(8))
    assert walk[8:16] == tuple(Place(xcc, 1, 0, 0) for xcc in range(8))
    assert walk[24:32] == tuple(Place(xcc, 3, 0, 0) for xcc in range(8))
    assert walk[32:40] == tuple(Place(xcc, 0, 0, 1) for xcc in range(8))
    # Two engines have ten CUs: the last sixteen bits are theirs.
    assert walk[288:304] == tuple(Place(xcc, engine, 0, 9) for engine in (0, 1) for xcc in range(8))


def test_pairs_go_over_the_engines_then_over_the_arrays_on_wgp_gpus(layout_of: LayoutOf) -> None:
    walk = cumask.kernel_walk(layout_of("RX 9070 XT"))
    assert walk[:4] == (Place(0, 0, 0, 0), Place(0, 0, 0, 1), Place(0, 1, 0, 0), Place(0, 1, 0, 1))
    assert walk[8:10] == (Place(0, 0, 1, 0), Place(0, 0, 1, 1))
    assert walk[16:18] == (Place(0, 0, 0, 2), Place(0, 0, 0, 3))
    assert len(walk) == 64


def test_a_poorer_xcc_has_ghost_bits_and_a_richer_one_cus_without_a_bit() -> None:
    walk = cumask.kernel_walk(CuLayout(2, 2, 1, (3, 3, 2, 2), wgp=False))
    assert [walk[bit] for bit in (0, 2, 4, 6, 8)] == [
        Place(0, 0, 0, 0),
        Place(0, 1, 0, 0),
        Place(0, 0, 0, 1),
        Place(0, 1, 0, 1),
        Place(0, 0, 0, 2),
    ]
    assert [walk[bit] for bit in (1, 3, 5, 7, 9)] == [
        Place(1, 0, 0, 0),
        Place(1, 1, 0, 0),
        Place(1, 0, 0, 1),
        Place(1, 1, 0, 1),
        None,
    ]
    assert Place(0, 1, 0, 2) not in walk


def test_arrays_that_run_out_are_skipped() -> None:
    walk = cumask.kernel_walk(CuLayout(1, 3, 1, (3, 1, 2), wgp=False))
    assert walk == (
        Place(0, 0, 0, 0),
        Place(0, 1, 0, 0),
        Place(0, 2, 0, 0),
        Place(0, 0, 0, 1),
        Place(0, 2, 0, 1),
        Place(0, 0, 0, 2),
    )


@pytest.mark.parametrize(
    "layout",
    [
        CuLayout(2, 2, 1, (4, 4, 4, 4), wgp=True),
        CuLayout(1, 9, 1, (2,) * 9, wgp=False),
        CuLayout(1, 2, 3, (2,) * 6, wgp=False),
    ],
    ids=["several XCCs with WGPs", "nine engines", "three arrays"],
)
def test_no_bit_is_vouched_for_where_the_kernel_maps_none_or_overlapping_ones(layout: CuLayout) -> None:
    assert set(cumask.kernel_walk(layout)) == {None}
    assert not cumask.rows(layout).sliceable
    assert cumask.rows(layout).all_mask == 0


# -------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("model", "row_count", "row_cus", "tail_cus"),
    [
        ("MI300X", 9, 32, 16),
        ("MI300A", 9, 24, 12),
        ("MI355X", 8, 32, 0),
        ("MI308X", 5, 16, 0),
        ("MI210", 13, 8, 0),
        ("MI250X", 13, 8, 6),
        ("MI300X CPX", 9, 4, 2),
        ("RX 7900 XTX", 8, 12, 0),
        ("RX 9070 XT", 8, 8, 0),
        ("RX 9060 XT", 8, 4, 0),
        ("Strix Halo", 10, 4, 0),
        ("Raphael", 1, 2, 0),
    ],
)
def test_rows_of_known_gpus(layout_of: LayoutOf, model: str, row_count: int, row_cus: int, tail_cus: int) -> None:
    rows = cumask.rows(layout_of(model))
    assert (len(rows.rows), rows.row_cus, rows.tail_mask.bit_count()) == (row_count, row_cus, tail_cus)
    assert rows.sliceable is (row_count > 1)
    # Where engines are alike, a row is a plain range.
    assert rows.rows == tuple(first(row_cus) << r * row_cus for r in range(row_count))


def test_a_row_of_unequally_harvested_xccs_is_no_plain_range() -> None:
    rows = cumask.rows(CuLayout(2, 2, 1, (3, 3, 3, 1), wgp=False))
    # XCC 1 runs out of its second engine: its third CU in engine 0 is its 4th bit, the other XCC's is its 5th.
    assert rows.rows == (0b1111,)
    assert rows.columns == ((0b0011, 0b1100),)
    assert rows.tail == (0b110000, 0b11000000)


def test_an_engine_that_is_fused_off_is_missing_from_no_row() -> None:
    rows = cumask.rows(CuLayout(1, 3, 2, (4, 4, 0, 0, 4, 4), wgp=True))
    assert (len(rows.rows), rows.row_cus, rows.tail) == (4, 4, ())


def test_half_a_wgp_is_in_no_row_and_no_tail() -> None:
    rows = cumask.rows(CuLayout(1, 2, 1, (5, 5), wgp=True))
    assert rows.rows == (0b1111, 0b11110000)
    assert rows.tail == ()


def test_row_partners_are_the_cus_that_share_caches(layout_of: LayoutOf) -> None:
    assert cumask.rows(layout_of("MI300X")).partners == (1, 0, 3, 2, 5, 4, 7, 6, None)
    assert set(cumask.rows(layout_of("RX 9070 XT")).partners) == {None}


# ---------------------------------------------------------------------------------------------------- what it is worth


@pytest.mark.parametrize(
    ("model", "cus", "effective"),
    [
        ("MI300X", 32, 32),
        ("MI300X", 64, 64),
        ("MI300X", 96, 96),
        ("MI300X", 38, 32),
        ("MI300X", 76, 64),
        ("MI300X", 100, 96),
        ("MI300X", 152, 128),
        ("MI300X", 203, 192),
        ("MI300X", 7, 0),
        ("MI300X", 8, 8),
        ("MI210", 26, 24),
        ("MI210", 52, 48),
        ("RX 7900 XTX", 24, 24),
        ("RX 7900 XTX", 32, 24),
        ("RX 9070 XT", 16, 16),
    ],
)
def test_a_plain_run_of_bits_is_worth_what_its_poorest_engine_allows(
    layout_of: LayoutOf, model: str, cus: int, effective: int
) -> None:
    assert cumask.effective_cus(layout_of(model), first(cus)) == effective


def test_a_whole_gpu_is_worth_its_balanced_part(layout_of: LayoutOf) -> None:
    assert cumask.effective_cus(layout_of("MI300X"), None) == 288
    assert cumask.effective_cus(layout_of("MI300X"), first(304)) == 288
    # Unmasked, also CUs without a bit count.
    assert cumask.effective_cus(CuLayout(1, 2, 1, (20, 20), wgp=False), None) == 40


def test_the_hash_tells_layouts_apart_by_silicon_only(layout_of: LayoutOf) -> None:
    layout = CuLayout(1, 2, 1, (4, 4), wgp=False)
    guessed = CuLayout(1, 2, 1, (4, 4), wgp=False, harvest_known=False)
    others = [
        CuLayout(1, 2, 1, (5, 3), wgp=False),
        CuLayout(1, 2, 1, (4, 4), wgp=True),
        CuLayout(2, 1, 1, (4, 4), wgp=False),
        CuLayout(1, 1, 2, (4, 4), wgp=False),
    ]
    assert cumask.layout_hash(layout) == cumask.layout_hash(guessed)
    assert len({cumask.layout_hash(one) for one in [layout, *others]}) == 5
    # Stored in journals: a change of the digest would lose every slice.
    assert cumask.layout_hash(layout_of("MI300X")) == "3cdea15e5798c438"


# ------------------------------------------------------------------------------------------------------------- texts


def test_ranges_are_as_long_as_they_go() -> None:
    assert cumask.format_ranges(CuSet((*range(32), 64))) == "0-31,64"
    assert cumask.format_ranges(CuSet((5,))) == "5"
    assert cumask.format_ranges(CuSet((0, 2, 3))) == "0,2-3"


def test_whole_gpus_get_no_set() -> None:
    assert cumask.format_cu_mask([CuSet((0, 1)), None, CuSet((7,))]) == "0:0-1;2:7"
    assert cumask.format_cu_mask([None, None]) == ""


_sets = st.lists(
    st.none() | st.sets(st.integers(0, 303), min_size=1).map(lambda bits: CuSet(tuple(sorted(bits)))),
    min_size=1,
    max_size=16,
)


@given(_sets)
def test_both_readers_read_what_was_written(sets: list[CuSet | None]) -> None:
    text = cumask.format_cu_mask(sets)
    assert cumask.parse_cu_mask(text, [304] * len(sets)) == tuple(sets)
    assert cumask.rocr_reads(text, len(sets), 304) == {gpu: cus.mask for gpu, cus in enumerate(sets) if cus}


@given(st.text(alphabet="0123:;,- x", max_size=12))
def test_the_strict_reader_takes_nothing_that_the_writer_would_not_write(text: str) -> None:
    try:
        sets = cumask.parse_cu_mask(text, [33, 4, 8])
    except Invalid:
        return
    assert cumask.format_cu_mask(sets) == text


@pytest.mark.parametrize(
    "text",
    [
        "0:0-3;",
        "0:0-3,",
        "0:0- 3",
        "0:3-0",
        "0:3-3",
        "0:0,1",
        "0:0-3,4-5",
        "0:0-3,2",
        "0:5,2",
        "0:00",
        "00:0",
        "0:",
        "0",
        ":0",
        ";",
        "0:0;0:1",
        "1:0;0:1",
        "0:0x3",
        "0:8",
        "0:0-8",
        "2:0",
        "0:-5",
        "0:3-",
        "0:0-1-2",
        "0,1:0",
        "0:٣",
        "0:0\n",
    ],
)
def test_the_strict_reader_refuses(text: str) -> None:
    with pytest.raises(Invalid, match="is no canonical CU mask"):
        cumask.parse_cu_mask(text, [8, 8])


@pytest.mark.parametrize(
    ("text", "masks"),
    [
        ("", {}),
        ("0:0-3", {0: 0xF}),
        (" 0 : 0 - 3 ", {0: 0xF}),
        ("0:0-3,", {0: 0xF}),
        ("0:0-3;", {0: 0xF}),
        ("0:3-", {0: 0x8}),
        ("0:-5", {0: 0x3F}),
        ("0-1:0", {0: 1, 1: 1}),
        ("0:0x1f", {0: 0x1F}),
        ("0:0x0", {}),
        ("0:0x", {}),
        # A bad set takes all later ones with it; what went before stays.
        ("0:0;1:zz;2:1", {0: 1}),
        ("0:0;0:1;1:1", {0: 1}),
        ("0:1,1", {}),
        ("0:4-2", {}),
        ("0:0-1-2", {}),
        ("0:0,,1", {}),
        ("0:0:1", {}),
        # Ids beyond the end are dropped, ranges clipped; and the end is one too far.
        ("0:0-999", {0: (1 << 9) - 1}),
        ("0:8", {0: 1 << 8}),
        ("0:9", {}),
        ("2:0", {2: 1}),
        ("3:0", {}),
    ],
)
def test_rocr_reads(text: str, masks: dict[int, int]) -> None:
    assert cumask.rocr_reads(text, 2, 8) == masks


def test_a_text_that_is_not_read_back_as_meant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cumask.proven_cu_mask([CuSet((0, 1))], [8]) == "0:0-1"
    # A CU that the GPU has not: written, but never used.
    with pytest.raises(AmdvgpuError, match="beyond the 8 CUs of GPU 0"):
        cumask.proven_cu_mask([CuSet((8,))], [8])
    monkeypatch.setattr(cumask, "format_cu_mask", lambda sets: "0:0-2")
    with pytest.raises(AmdvgpuError, match="not read back as it was meant"):
        cumask.proven_cu_mask([CuSet((0, 1))], [8])
