"""Which ids a container gets, on captured topologies; the expectations are those of AMD's own device plugin."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from amdvgpud.core.model import Inventory, Link, LinkKind, Partition
from amdvgpud.core.prefer import distance, prefer
from amdvgpud.host.sysfs import SysfsReader
from tests.fakes import a_gpu


@pytest.fixture(scope="module")
def mi210(captures: Path) -> Inventory:
    """Eight GPUs in two hives: 1 to 4 and 5 to 8."""
    return SysfsReader(captures / "mi210-8gpu", name_tables=()).read_inventory()


@pytest.fixture(scope="module")
def cpx(unpacked: Path) -> Inventory:
    """Eight MI300X of eight partitions each; the last one shows seven."""
    return SysfsReader(unpacked / "mi300x-8gpu-cpx", name_tables=()).read_inventory()


def numbered(inventory: Inventory) -> dict[str, Partition]:
    """GPUs as ``1``, ``2``…; partitions of a GPU as ``1.0``, ``1.1``…, in KFD order."""
    return {
        f"{gpu.index + 1}.{partition.index}"
        if len(inventory.gpus) < len(inventory.partitions)
        else str(gpu.index + 1): partition
        for gpu in inventory.gpus
        for partition in gpu.partitions
    }


@pytest.mark.fixtures
@pytest.mark.parametrize(
    ("available", "must", "size", "chosen"),
    [
        ("12345678", "", 1, "1"),
        ("12345678", "", 3, "123"),
        ("12345678", "", 5, "12345"),
        ("345678", "", 3, "567"),
        ("12345678", "6", 2, "65"),
        ("12345678", "", 8, "12345678"),
        ("12", "", 4, "12"),
        ("12345678", "72", 2, "72"),
    ],
)
def test_gpus_of_one_hive_are_taken_together(
    mi210: Inventory, available: str, must: str, size: int, chosen: str
) -> None:
    assert "".join(prefer(numbered(mi210), list(available), list(must), size)) == chosen


@pytest.mark.fixtures
@pytest.mark.parametrize(("size", "chosen"), [(1, "1"), (2, "15"), (3, "125")])
def test_spread_takes_them_from_far_apart(mi210: Inventory, size: int, chosen: str) -> None:
    assert "".join(prefer(numbered(mi210), list("12345678"), [], size, "spread")) == chosen


@pytest.mark.fixtures
def test_the_greedy_choice_is_as_near_as_the_best_of_all(mi210: Inventory) -> None:
    places = numbered(mi210)

    def total(group: tuple[str, ...]) -> int:
        return sum(distance(places[a], places[b]) for a, b in combinations(group, 2))

    for size in range(1, 9):
        for held in combinations("12345678", 2):
            left = [entry for entry in "12345678" if entry not in held]
            best = min(map(total, combinations(left, min(size, len(left)))))
            assert total(prefer(places, left, [], size)) == best, (size, held)


@pytest.mark.fixtures
def test_partitions_come_from_the_gpu_that_has_the_fewest_left(cpx: Inventory) -> None:
    places = numbered(cpx)
    everything = list(places)
    assert prefer(places, everything, [], 3) == ("8.0", "8.1", "8.2")
    assert prefer(places, everything, [], 8) == tuple(f"1.{n}" for n in range(8))
    assert prefer(places, [e for e in everything if e not in ("3.0", "3.1")], [], 2) == ("3.2", "3.3")


def slots_of(*counts: int) -> dict[str, Partition]:
    return {f"{gpu}#{slot}": a_gpu(gpu).partitions[0] for gpu, count in enumerate(counts) for slot in range(count)}


def test_slots_of_different_gpus_come_before_two_of_one() -> None:
    places = slots_of(3, 3, 3)
    assert prefer(places, list(places), [], 3, apart=True) == ("0#0", "1#0", "2#0")
    assert prefer(places, list(places), ["1#2"], 2, apart=True) == ("1#2", "0#0")
    assert prefer(places, list(places), [], 3) == ("0#0", "0#1", "0#2")
    assert sorted(prefer(places, list(places), [], 4, apart=True)) == ["0#0", "0#1", "1#0", "2#0"]


@pytest.mark.parametrize(("policy", "chosen"), [("binpack", "1#0"), ("besteffort", "1#0"), ("spread", "0#0")])
def test_a_single_one_comes_from_the_fullest_gpu_or_with_spread_from_the_emptiest(policy: str, chosen: str) -> None:
    places = slots_of(3, 2)
    assert prefer(places, list(places), [], 1, policy) == (chosen,)


def test_an_id_that_nobody_knows_is_never_chosen() -> None:
    places = slots_of(2)
    assert prefer(places, ["gone#0", "0#1", "0#0"], ["gone#1"], 1) == ("0#0",)


def test_no_link_is_farther_than_pcie_and_that_than_xgmi() -> None:
    one, two = a_gpu(0).partitions[0], a_gpu(1).partitions[0]
    linked = {kind: replace(one, links=(Link(kind, two.kfd_node, 15),)) for kind in LinkKind}
    assert (distance(linked[LinkKind.XGMI], two), distance(two, linked[LinkKind.PCIE]), distance(one, two)) == (
        40,
        70,
        80,
    )
    assert distance(replace(one, numa_node=1), two) == 90
    assert distance(one, one) == 30
