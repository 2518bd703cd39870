"""PUT /v1/gpus/{id}/partition, the profiles of a GPU, and /v1/suggest-modes, as a client meets them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from amdvgpud.core.model import GpuId
from amdvgpud.ports import KfdUser
from tests.fakes import GIB, StillModes

FIRST = "GPU-00000000abcd0000"


@pytest.fixture
def modes(desk: Any) -> StillModes:
    """The driver of the desk's machine."""
    made = StillModes(desk.sysfs)
    desk.node._modes = made
    return made


async def test_a_gpu_shows_the_modes_it_can_be_cut_into(desk: Any) -> None:
    profiles = (await desk.ask("GET", "/v1/gpus/0")).json["profiles"]
    assert profiles[3] == {
        "index": 3,
        "mode": "CPX",
        "current": False,
        "partition_count": 8,
        "xccs_per_partition": 1,
        "cus_per_partition": 38,
        "vram_bytes_per_partition": 24 * GIB,
        "memory_modes": ["NPS1", "NPS4"],
    }
    assert [p["mode"] for p in profiles if p["current"]] == ["SPX"]


async def test_a_gpu_is_cut_by_any_of_its_names_whatever_the_letter_case(desk: Any, modes: StillModes) -> None:
    answer = await desk.ask("PUT", "/v1/gpus/0000:11:00.0/partition", {"compute": "cpx", "memory": "nps4"})
    assert answer.status == 200
    note = answer.json.pop("note")
    assert answer.json == {
        "gpu": FIRST,
        "before": "SPX",
        "after": "CPX",
        "changed": True,
        "partitions": 8,
        "index": 1,
        "memory": "NPS1",
        "memory_requested": "NPS4",
        "lost": [],
        "settled": True,
    }
    assert note.startswith(f"{FIRST} was put from SPX into CPX (partitions: 8); it is number 1 now")
    assert "takes effect when the amdgpu driver of this whole node is unloaded and loaded again" in note
    assert modes.requested == {GpuId(FIRST): "NPS4"}
    gpu = (await desk.ask("GET", f"/v1/gpus/{FIRST}")).json
    assert ([p["id"] for p in gpu["partitions"]], gpu["compute_partition"]) == (
        [f"{FIRST}/{i}" for i in range(8)],
        "CPX",
    )
    again = (await desk.ask("PUT", f"/v1/gpus/{FIRST}/partition", {"compute": "CPX"})).json
    assert (again["changed"], again["note"]) == (False, f"{FIRST} is in CPX already")


async def test_a_gpu_in_use_is_a_409_that_names_who(desk: Any, modes: StillModes) -> None:
    modes.opened[GpuId(FIRST)] = (KfdUser(4242, "python3"),)
    answer = await desk.ask("PUT", "/v1/gpus/0/partition?force", {"compute": "CPX"})
    assert (answer.status, answer.json["code"]) == (409, "conflict")
    assert answer.json["detail"] == f"{FIRST} cannot be put into CPX: KFD processes have it open: 4242 (python3)"


async def test_slices_are_lost_by_force_only_and_a_dry_run_says_so_first(desk: Any, modes: StillModes) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%", "on": ["0"]})
    for query in ("", "?dry_run"):
        answer = await desk.ask("PUT", f"/v1/gpus/0/partition{query}", {"compute": "CPX"})
        assert answer.status == 409
        assert "the slices alice were cut for SPX" in answer.json["detail"]
    answer = await desk.ask("PUT", "/v1/gpus/0/partition?dry_run&force", {"compute": "CPX"})
    assert (answer.json["lost"], answer.json["partitions"]) == (["alice"], 8)
    assert answer.json["note"] == (
        f"{FIRST} would be put from SPX into CPX (partitions: 8); lost until SPX is back: alice"
    )
    assert (await desk.ask("GET", "/v1/slices/alice")).json["state"] == "free"
    assert (await desk.ask("PUT", "/v1/gpus/0/partition?force", {"compute": "CPX"})).json["lost"] == ["alice"]
    assert (await desk.ask("GET", "/v1/slices/alice")).json["state"] == "lost"


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({}, "/compute"),
        ({"compute": "TPX"}, "/compute"),
        ({"compute": "CPX", "memory": "NPS2"}, "/memory"),
        ({"memory": "4"}, "/memory"),
        ({"mode": "CPX"}, "/mode"),
        ({"compute": 8}, "/compute"),
    ],
)
async def test_a_bad_field_is_named(desk: Any, modes: StillModes, body: dict[str, object], pointer: str) -> None:
    answer = await desk.ask("PUT", "/v1/gpus/0/partition", body)
    assert (answer.status, [e["pointer"] for e in answer.json["errors"]]) == (422, [pointer])
    assert modes.written == []


async def test_a_switch_is_tied_to_a_revision_and_needs_a_writer(desk: Any, modes: StillModes) -> None:
    stale = await desk.ask("PUT", "/v1/gpus/0/partition", {"compute": "CPX"}, headers={"If-Match": '"7"'})
    assert stale.status == 412
    assert (await desk.ask("PUT", "/v1/gpus/0/partition", {"compute": "CPX"}, tcp=True)).status in (401, 403)
    assert modes.written == []


async def test_a_daemon_without_a_way_to_switch_says_so(desk: Any) -> None:
    answer = await desk.ask("PUT", "/v1/gpus/0/partition", {"compute": "CPX"})
    assert (answer.status, answer.json["code"]) == (500, "host-failure")
    assert "without a way to switch modes" in answer.json["detail"]


async def test_modes_are_compared_for_a_mix_of_slices(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%", "on": ["0"]})
    answer = (await desk.ask("GET", "/v1/suggest-modes", params={"want": "4x25%:48GiB"})).json
    assert answer["busy"] == [FIRST]
    assert answer["proposals"] == [
        {
            "modes": {"GPU-00000000abcd0001": "QPX"},
            "alone": 4,
            "sharing": 0,
            "unplaced": 0,
            "cus_wasted": 0,
            "vram_wasted_bytes": 0,
            "switches": 1,
            "untouched": 0,
            "text": "1 x QPX: 4 alone (hard), 0 sharing (soft); wasted 0 CUs and 0 B",
        }
    ]
    assert (await desk.ask("GET", "/v1/suggest-modes")).json == {"proposals": [], "busy": [FIRST]}


async def test_a_wish_that_cannot_be_read_is_named(desk: Any) -> None:
    answer = await desk.ask("GET", "/v1/suggest-modes", params={"want": "4x25%:48GiB,lots"})
    assert answer.status == 400
    assert answer.json["errors"] == [
        {
            "parameter": "want",
            "detail": "'lots' is no wish: write COUNTxCOMPUTE:VRAM, as in '4x25%:47GiB' or '38:24GiB'",
        }
    ]


async def test_reserved_partitions_are_listed_with_the_cdi_file(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/whole", {"compute": "whole", "on": ["1"]})
    answer = (await desk.ask("GET", "/v1/cdi")).json
    assert answer["partition_devices"] == ["amdvgpu.io/partition=GPU-00000000abcd0001-0"]


async def test_a_gpu_without_modes_has_no_profiles(make_desk: Callable[..., Any]) -> None:
    desk = await make_desk()
    gpus = tuple(replace(gpu, profiles=()) for gpu in desk.sysfs.inventory.gpus)
    desk.sysfs.inventory = replace(desk.sysfs.inventory, gpus=gpus)
    await desk.node.rescan()
    assert (await desk.ask("GET", "/v1/gpus/0")).json["profiles"] == []
    answer = await desk.ask("PUT", "/v1/gpus/0/partition", {"compute": "CPX"})
    assert answer.status == 422
    assert "cannot be partitioned" in answer.json["detail"]
