from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from amdvgpud.core import plan as planner
from amdvgpud.core.errors import Conflict
from amdvgpud.core.model import Book, CuLayout, CuSet, Inventory, Request, Share, Slice, SliceName
from amdvgpud.core.render import draw_cus, slice_environment

GIB = 1024**3
LayoutOf = Callable[[str], CuLayout]
MakeInventory = Callable[..., Inventory]
Ask = Callable[..., Request]
SliceOf = Callable[[Inventory, Request], Slice]


@pytest.fixture
def slice_of(grant: Callable[[Book, Request, Iterable[Share]], Book]) -> SliceOf:
    def item(inventory: Inventory, request: Request) -> Slice:
        return grant(Book(), request, planner.place(Book(), inventory, request).shares).slices[request.name]

    return item


# ------------------------------------------------------------------------------------------------------- environment


def test_a_slice_of_one_gpu_names_no_visible_devices(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, slice_of: SliceOf
) -> None:
    inventory = make_inventory(layout_of("MI300X"), layout_of("MI300X"))
    item = slice_of(inventory, ask("alice", "25%", vram_bytes=16 * GIB, on=("1",)))
    assert slice_environment(item, inventory) == {
        "AMDVGPU_SLICE": "alice",
        "HSA_CU_MASK": "0:0-63",
        "HIP_DEVICE_MEMORY_LIMIT_0": "16384m",
    }


def test_several_gpus_come_in_kfd_order_and_all_indices_with_them(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, slice_of: SliceOf
) -> None:
    inventory = make_inventory(layout_of("MI300X"), layout_of("MI210"), layout_of("RX 9070 XT"), layout_of("MI300X"))
    item = slice_of(inventory, ask("bob", "25%", gpus=2, on=("2", "0")))
    assert slice_environment(item, inventory) == {
        "AMDVGPU_SLICE": "bob",
        "ROCR_VISIBLE_DEVICES": "GPU-0000000000000001,GPU-0000000000000003",
        "HSA_CU_MASK": "0:0-63;1:0-15",
        "HIP_DEVICE_MEMORY_LIMIT_0": "1024m",
        "HIP_DEVICE_MEMORY_LIMIT_1": "1024m",
    }


def test_gpus_without_a_token_of_their_own_are_named_by_rank_among_the_injected(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, slice_of: SliceOf
) -> None:
    shared = make_inventory(layout_of("MI300X CPX"), layout_of("MI300X CPX"), partitions=2)
    none = make_inventory(*[layout_of("MI300X")] * 4, unique=False)
    on_shared = slice_of(shared, ask("c", "25%", gpus=2, on=("0/1", "1/1")))
    on_none = slice_of(none, ask("c", "25%", gpus=2, on=("1", "3")))
    assert slice_environment(on_shared, shared)["ROCR_VISIBLE_DEVICES"] == "0,1"
    assert slice_environment(on_none, none)["ROCR_VISIBLE_DEVICES"] == "0,1"
    # On the host all nodes count.
    assert slice_environment(on_shared, shared, all_nodes_visible=True)["ROCR_VISIBLE_DEVICES"] == "1,3"
    assert slice_environment(on_none, none, all_nodes_visible=True)["ROCR_VISIBLE_DEVICES"] == "1,3"


def test_one_gpu_without_a_token_makes_all_of_them_ranks(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, slice_of: SliceOf
) -> None:
    inventory = make_inventory(layout_of("MI300X"), layout_of("MI300X"))
    first, second = inventory.gpus
    nameless = replace(first, partitions=(replace(first.partitions[0], unique_id=0),))
    inventory = replace(inventory, gpus=(nameless, second))
    item = slice_of(inventory, ask("c", "25%", gpus=2))
    assert slice_environment(item, inventory)["ROCR_VISIBLE_DEVICES"] == "0,1"


def test_on_the_host_one_gpu_is_named_too(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, slice_of: SliceOf
) -> None:
    inventory = make_inventory(layout_of("MI300X"), layout_of("MI300X"))
    item = slice_of(inventory, ask("alice", "25%", on=("1",)))
    assert slice_environment(item, inventory, all_nodes_visible=True)["ROCR_VISIBLE_DEVICES"] == "GPU-0000000000000002"


def test_a_whole_gpu_has_no_mask_and_no_limit_unless_it_has_a_quota(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, slice_of: SliceOf
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    everything = slice_of(inventory, ask("w", "whole", vram_bytes=None))
    some = slice_of(inventory, ask("w", "whole", vram_bytes=100 * GIB))
    assert slice_environment(everything, inventory) == {"AMDVGPU_SLICE": "w"}
    assert slice_environment(some, inventory) == {"AMDVGPU_SLICE": "w", "HIP_DEVICE_MEMORY_LIMIT_0": "102400m"}


@pytest.mark.parametrize(
    ("vram_bytes", "text"), [(1024**2, "1m"), (1024**2 * 2 - 1, "1m"), (1024**2 - 1, "1048575"), (1, "1")]
)
def test_a_limit_is_never_rounded_up_and_never_to_nothing(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, slice_of: SliceOf, vram_bytes: int, text: str
) -> None:
    inventory = make_inventory(layout_of("MI300X"))
    item = slice_of(inventory, ask("a", "25%", vram_bytes=vram_bytes))
    assert slice_environment(item, inventory)["HIP_DEVICE_MEMORY_LIMIT_0"] == text


def test_a_lost_slice_has_no_environment(
    layout_of: LayoutOf, make_inventory: MakeInventory, ask: Ask, slice_of: SliceOf
) -> None:
    item = slice_of(make_inventory(layout_of("MI300X")), ask("a", "25%"))
    for now in (Inventory(), make_inventory(layout_of("MI355X"))):
        with pytest.raises(Conflict, match="slice a is lost"):
            slice_environment(item, now)


# ----------------------------------------------------------------------------------------------------------- the map


def test_the_map_of_an_mi300x_has_a_line_for_each_xcc(layout_of: LayoutOf) -> None:
    sets = {
        "alice": CuSet(tuple(range(64))),
        "bob": CuSet(tuple(range(64, 160))),
        "carol": CuSet(tuple(range(160, 168))),
    }
    row = "aabbbc...:  aabbb....:  aabbb....   aabbb...."
    assert draw_cus(layout_of("MI300X"), sets) == [
        "       SE0         SE1         SE2         SE3",
        *(f"XCC {xcc}  {row}" for xcc in range(8)),
        "a = alice (64 CUs: 0-63)",
        "b = bob (96 CUs: 64-159)",
        "c = carol (8 CUs: 160-167)",
        "one sign is one CU; . free; : free, only with all rows",
    ]


def test_the_map_of_an_rx_9070_xt_counts_wgps_by_array(layout_of: LayoutOf) -> None:
    sets = {"alice": CuSet(tuple(range(24))), "bob": CuSet(tuple(range(16, 48)))}
    assert draw_cus(layout_of("RX 9070 XT"), sets) == [
        "               SE0   SE1   SE2   SE3",
        "XCC 0 array 0  a#b.  a#b.  a#b.  a#b.",
        "XCC 0 array 1  abb.  abb.  abb.  abb.",
        "a = alice (24 CUs: 0-23)",
        "b = bob (32 CUs: 16-47)",
        "one sign is one WGP (2 CUs); . free; # several",
    ]


def test_the_map_shows_cus_that_no_mask_can_have() -> None:
    assert draw_cus(CuLayout(2, 2, 1, (3, 3, 2, 2), wgp=False), {"a": CuSet((0, 1, 2, 3))}) == [
        "       SE0  SE1",
        "XCC 0  a.?  a.?",
        "XCC 1  a.   a.",
        "a = a (4 CUs: 0-3)",
        "one sign is one CU; . free; ? only for a whole share",
    ]


def test_more_slices_than_letters_are_still_drawn(layout_of: LayoutOf) -> None:
    sets = {f"s{i}": CuSet((0,)) if i else CuSet((1,)) for i in range(63)}
    lines = draw_cus(layout_of("MI210"), sets)
    assert lines[1].startswith("XCC 0  #")
    assert lines[2] == "a = s0 (1 CUs: 1)"
    assert lines[-2] == "# = s62 (1 CUs: 0)"
    assert SliceName("s62") in lines[-2]
