"""Partition modes: the rules, the texts, HAMi's ids, and the comparison of modes for a mix of slices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from amdvgpud.core.errors import Invalid
from amdvgpud.core.model import GpuId, Inventory, PartitionId, Profile
from amdvgpud.core.modes import (
    HamiPartition,
    Target,
    check_target,
    describe,
    hami_partitions,
    parse_target,
    parse_targets,
    parse_want,
    profiles,
    resolve_targets,
    suggest,
    total_xccs,
)
from tests.fakes import a_gpu, an_inventory, in_mode

FIRST, SECOND = GpuId("GPU-00000000abcd0000"), GpuId("GPU-00000000abcd0001")


@pytest.mark.parametrize(
    ("mode", "seen", "available", "xccs"),
    [
        ("SPX", [8], ("SPX", "DPX", "QPX", "CPX"), 8),
        ("QPX", [2, 2, 2, 2], ("SPX", "DPX", "QPX", "CPX"), 8),
        ("CPX", [1] * 7, ("SPX", "DPX", "QPX", "CPX"), 8),  # the eighth GPU of eight, for want of a render minor
        ("CPX", [1] * 5, ("SPX", "TPX", "CPX"), 6),
        ("DPX", [2], ("SPX", "DPX", "CPX"), 4),  # one of two shown
        ("CPX", [1] * 4, ("SPX", "DPX", "CPX"), 4),
        (None, [8], (), 8),
    ],
)
def test_the_xccs_of_a_gpu_are_known_though_a_partition_is_not_shown(
    mode: str | None, seen: list[int], available: tuple[str, ...], xccs: int
) -> None:
    assert total_xccs(mode, seen, available) == xccs


def test_profiles_keep_the_drivers_order_and_believe_what_it_says_of_memory_modes() -> None:
    assert profiles(("SPX", "TPX", "CPX"), ("NPS1", "NPS4"), 6, {"CPX": ("NPS4",)}) == (
        Profile(0, "SPX", 1, 6, ("NPS1",)),
        Profile(1, "TPX", 3, 2, ("NPS1", "NPS4")),
        Profile(2, "CPX", 6, 1, ("NPS4",)),
    )


def test_a_mode_that_does_not_divide_the_xccs_is_no_profile() -> None:
    assert [p.mode for p in profiles(("SPX", "TPX", "CPX"), ("NPS1",), 8, {})] == ["SPX", "CPX"]


@pytest.mark.parametrize(
    ("text", "target"),
    [("cpx", Target("CPX")), (" QPX/nps4 ", Target("QPX", "NPS4")), ("/NPS1", Target(None, "NPS1"))],
)
def test_a_target_is_read_whatever_its_letter_case(text: str, target: Target) -> None:
    assert parse_target(text) == target


@pytest.mark.parametrize(
    ("text", "said"), [("", "neither"), ("CPXX", "'CPXX' is no compute mode"), ("CPX/4", "'4' is")]
)
def test_a_text_that_is_no_target_is_refused(text: str, said: str) -> None:
    with pytest.raises(Invalid, match=said):
        parse_target(text)


def test_targets_are_pairs_and_the_gpus_name_may_hold_anything_but_commas() -> None:
    assert parse_targets(["all=CPX", "0000:05:00.0=QPX/NPS4"]) == (
        ("all", Target("CPX")),
        ("0000:05:00.0", Target("QPX", "NPS4")),
    )
    with pytest.raises(Invalid, match="'CPX' is no target: write GPU=MODE"):
        parse_targets(["CPX"])


def test_targets_are_resolved_at_once_the_later_one_counts_and_unknown_names_are_said() -> None:
    plain = replace(a_gpu(2), profiles=())
    inventory = Inventory((*an_inventory().gpus, plain))
    found, unknown = resolve_targets(inventory, parse_targets(["ALL=CPX", "1=QPX", "0000:99:00.0=SPX"]))
    assert found == {FIRST: Target("CPX"), SECOND: Target("QPX")}
    assert [sentence.partition(":00.0'")[0] for sentence in unknown] == ["'0000:99"]


def test_a_target_is_checked_against_what_the_gpu_offers() -> None:
    gpu = a_gpu(0)
    check_target(gpu, Target("CPX", "NPS4"))
    for target, said in (
        (Target("TPX"), "it has SPX, DPX, QPX, CPX"),
        (Target("SPX", "NPS4"), "NPS4 does not go with SPX"),
        (Target(memory="NPS4"), "NPS4 does not go with SPX"),
    ):
        with pytest.raises(Invalid, match=said):
            check_target(gpu, target)


# ------------------------------------------------------------------------------------------------------------- HAMi


def test_partitions_that_share_an_id_get_distinct_ids_for_hami() -> None:
    cut = hami_partitions(in_mode(a_gpu(0), "CPX"))
    assert cut[3] == HamiPartition(f"{FIRST}-3#cpx", PartitionId(f"{FIRST}/3"), "cpx", devmem_mib=24 * 1024, devcore=38)
    assert len({p.id for p in cut}) == 8


def test_partitions_with_ids_of_their_own_keep_the_form_that_hami_has() -> None:
    gpu = in_mode(a_gpu(0), "DPX")
    own = tuple(replace(p, unique_id=0xA0 + p.index) for p in gpu.partitions)
    assert [p.id for p in hami_partitions(replace(gpu, partitions=own))] == [
        "GPU-00000000000000a0#dpx",
        "GPU-00000000000000a1#dpx",
    ]


def test_a_whole_gpu_with_modes_is_one_partition_and_one_without_is_none() -> None:
    assert [p.id for p in hami_partitions(a_gpu(0))] == [f"{FIRST}#spx"]
    assert hami_partitions(replace(a_gpu(0), compute_partition=None)) == ()
    nameless = replace(a_gpu(0), id=GpuId("pci-0000-11-00.0"), unique_id=0)
    nameless = replace(nameless, partitions=tuple(replace(p, unique_id=0) for p in nameless.partitions))
    assert [p.id for p in hami_partitions(nameless)] == ["pci-0000-11-00.0-0#spx"]


# ---------------------------------------------------------------------------------------------------- which mode suits


def found(inventory: Inventory, *wants: str, busy: frozenset[GpuId] = frozenset()) -> list[str]:
    return [describe(p) for p in suggest(inventory, [parse_want(text) for text in wants], busy)]


def test_four_quarters_of_one_gpu_are_hard_and_without_waste_in_qpx() -> None:
    assert found(an_inventory(1), "4x25%:48GiB") == ["1 x QPX: 4 alone (hard), 0 sharing (soft); wasted 0 CUs and 0 B"]


def test_more_isolation_costs_waste_and_both_are_offered() -> None:
    assert found(an_inventory(1), "6x8:8GiB") == [
        "1 x CPX: 6 alone (hard), 0 sharing (soft); wasted 180 CUs and 96 GiB",
        "1 x QPX: 0 alone (hard), 6 sharing (soft); wasted 0 CUs and 0 B",
    ]


def test_gpus_get_modes_of_their_own() -> None:
    (best, *_) = suggest(an_inventory(2), [parse_want("1x100%:192GiB"), parse_want("8x12%:24GiB")])
    assert (sorted(mode or "" for _, mode in best.modes), best.alone, best.sharing, best.unplaced) == (
        ["CPX", "SPX"],
        9,
        0,
        0,
    )
    assert (best.switches, best.untouched) == (1, 0)


def test_a_gpu_that_is_in_a_mode_already_keeps_it_among_its_likes() -> None:
    inventory = Inventory((a_gpu(0), in_mode(a_gpu(1), "CPX")))
    (best, *_) = suggest(inventory, [parse_want("1x100%:192GiB"), parse_want("8x12%:24GiB")])
    assert (dict(best.modes), best.switches) == ({FIRST: "SPX", SECOND: "CPX"}, 0)


def test_what_no_mode_can_place_is_counted_and_busy_gpus_are_looked_past() -> None:
    assert found(an_inventory(1), "3x50%:96GiB")[0] == (
        "1 x DPX: 2 alone (hard), 0 sharing (soft), 1 without a place; wasted 0 CUs and 0 B"
    )
    assert found(an_inventory(1), "1x50%:96GiB", busy=frozenset({FIRST})) == []
    (best, *_) = suggest(an_inventory(2), [parse_want("1x50%:96GiB")], frozenset({FIRST}))
    assert dict(best.modes) == {SECOND: "DPX"}


def test_a_gpu_without_modes_takes_part_as_it_is() -> None:
    plain = replace(a_gpu(0), profiles=(), compute_partition=None)
    (said,) = found(Inventory((plain,)), "2x50%:90GiB")
    assert said == "1 x -: 0 alone (hard), 2 sharing (soft); wasted 0 CUs and 0 B", "five rows and four"


def test_modes_of_another_memory_mode_are_not_proposed() -> None:
    gpu = replace(a_gpu(0), memory_partition="NPS4")
    assert {p.modes[0][1] for p in suggest(Inventory((gpu,)), [parse_want("4x10:8GiB")])} <= {"QPX", "CPX"}


@pytest.mark.parametrize("mode", ["SPX", "DPX", "QPX", "CPX"])
def test_the_layouts_that_are_compared_are_those_that_a_switch_gives(mode: str) -> None:
    """Cut from the whole GPU, and put together again from its partitions."""
    from amdvgpud.core.modes import _cut

    wanted = [(p.layout, p.vram_bytes) for p in (in_mode(a_gpu(0), mode) if mode != "SPX" else a_gpu(0)).partitions]
    assert _cut(a_gpu(0), mode) == wanted
    assert _cut(in_mode(a_gpu(0), "CPX"), mode) == wanted
    shown = in_mode(a_gpu(0), "CPX")
    seven = _cut(replace(shown, partitions=shown.partitions[:7]), mode)
    assert seven == (wanted[:7] if mode == "CPX" else wanted), "the eighth is like its neighbour, but has no minor"


def test_eight_gpus_and_many_wishes_are_compared_in_no_time() -> None:
    proposals = suggest(an_inventory(8), [parse_want("40x12:20GiB"), parse_want("6x50%:90GiB")])
    assert all(p.alone + p.sharing + p.unplaced == 46 for p in proposals)
    assert proposals


@pytest.mark.parametrize("text", ["", "25%", "x25%:1GiB", "0x25%:1GiB", "513x1:1GiB", "25%:", "whole:1GiB", "0:1GiB"])
def test_a_text_that_is_no_wish_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        parse_want(text)
