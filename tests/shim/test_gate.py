"""What the gate does with each request, seen from both sides: what the program is told, what reaches the driver."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from amdvgpud._abi import ffi, lib
from amdvgpud.core.model import CuLayout, CuSet, Priority

if TYPE_CHECKING:
    from tests.shim.conftest import Machine

MIB = 1 << 20
QUARTER = CuSet(tuple(range(76)))
QUARTER_HEX = f"{QUARTER.mask:080x}"


def masks(requests: list[str]) -> list[str]:
    return [r.split("mask=")[1].split()[0] for r in requests if r.startswith("SET_CU_MASK")]


# ---------------------------------------------------------------------------------------------------------- memory


def test_over_quota_is_enomem_and_nothing_reaches_the_driver(machine: Machine) -> None:
    a = machine.slice("a", (0, 1024, None))
    assert machine.play(f"alloc:1000:{600 * MIB}", f"alloc:1000:{600 * MIB}") == ["ok", "ENOMEM"]
    assert [r.split()[0] for r in machine.requests()] == ["ALLOC"]
    assert machine.used(a) == 600 * MIB  # of a dead process, until somebody looks


def test_a_freed_allocation_makes_room_again_and_an_unknown_handle_changes_nothing(machine: Machine) -> None:
    a = machine.slice("a", (0, 1024, None))
    words = [
        f"alloc:1000:{600 * MIB}",
        "freehandle:77",
        "avail:1000",
        "free:0",
        "avail:1000",
        f"alloc:1000:{1024 * MIB}",
    ]
    assert machine.play(*words) == ["ok", "ok", f"ok {424 * MIB}", "ok", f"ok {1024 * MIB}", "ok"]
    assert machine.used(a) == 1024 * MIB


def test_host_memory_is_not_charged(machine: Machine) -> None:
    a = machine.slice("a", (0, 1, None))
    assert machine.play(f"alloc:1000:{600 * MIB}:0xb0000002", f"alloc:1000:{600 * MIB}:0xb0000004") == ["ok", "ok"]
    assert machine.slots(a) == []


def test_a_charge_is_withdrawn_when_the_driver_refuses_and_its_error_is_told(machine: Machine) -> None:
    a = machine.slice("a", (0, 1024, None))
    assert machine.play(f"alloc:1000:{600 * MIB}", STUB_REFUSE="ALLOC:22") == ["EINVAL"]
    assert machine.used(a) == 0


def test_a_failed_free_keeps_the_charge(machine: Machine) -> None:
    machine.slice("a", (0, 1024, None))
    words = [f"alloc:1000:{600 * MIB}", "free:0", "avail:1000", "free:0", "avail:1000"]
    answers = machine.play(*words, STUB_REFUSE="FREE:16:0")
    assert answers == ["ok", "EBUSY", f"ok {424 * MIB}", "EBUSY", f"ok {424 * MIB}"]


def test_free_memory_is_the_smaller_of_the_drivers_word_and_what_the_slice_has_left(machine: Machine) -> None:
    machine.slice("a", (0, 1024, None))
    assert machine.play("avail:1000", STUB_AVAILABLE=str(100 * MIB)) == [f"ok {100 * MIB}"]
    assert machine.play("avail:1000") == [f"ok {1024 * MIB}"]


def test_a_process_is_charged_with_what_its_neighbours_hold(machine: Machine) -> None:
    machine.slice("a", (0, 1024, None))
    first = machine.start(f"alloc:1000:{600 * MIB}", "stop")
    assert machine.play("avail:1000", f"alloc:1000:{600 * MIB}") == [f"ok {424 * MIB}", "ENOMEM"]
    first.kill()
    first.communicate()
    assert machine.play("avail:1000", f"alloc:1000:{600 * MIB}") == [f"ok {1024 * MIB}", "ok"]


def test_two_slices_of_one_gpu_add_and_one_allocation_may_use_both(machine: Machine) -> None:
    a, b = machine.slice("a", (0, 600, None)), machine.slice("b", (0, 500, None))
    words = ["bank:1", f"alloc:1000:{400 * MIB}", f"alloc:1000:{400 * MIB}", f"alloc:1000:{250 * MIB}", "avail:1000"]
    bank = f"ok heap_type 1;size_in_bytes {1100 * MIB};flags 0;width 8192;mem_clk_max 1300;"
    assert machine.play(*words, f"alloc:1000:{100 * MIB}") == [bank, "ok", "ok", "ok", f"ok {50 * MIB}", "ENOMEM"]
    assert (machine.used(a), machine.used(b)) == (600 * MIB, 450 * MIB)


def test_each_gpu_has_its_own_quota_whichever_slice_it_comes_from(machine: Machine) -> None:
    machine.slice("a", (0, 600, None))
    machine.slice("b", (1, 300, None))
    words = [f"alloc:1000:{500 * MIB}", f"alloc:1001:{500 * MIB}", f"alloc:1001:{300 * MIB}"]
    assert machine.play(*words) == ["ok", "ENOMEM", "ok"]


def test_a_gpu_outside_every_slice_gives_the_runtimes_start_and_no_more(machine: Machine) -> None:
    machine.slice("a", (0, 600, None))
    answers, said = machine.play_all(
        f"alloc:7:{2 * MIB}", f"alloc:7:{64 * MIB}", "free:0", f"alloc:7:{8 * MIB}", "avail:7"
    )
    assert answers == ["ok", "ENOMEM", "ok", "ok", f"ok {8 * MIB}"]
    assert said == "amdvgpu: VRAM of a GPU that is in no slice of this process is refused\n"


def test_the_total_is_the_quota_clamped_to_what_there_is(machine: Machine) -> None:
    machine.slice("a", (0, 600, None))
    bank = "ok heap_type 1;size_in_bytes {};flags 0;width 8192;mem_clk_max 1300;"
    assert machine.play("bank:1", "bank:2") == [bank.format(600 * MIB), bank.format(16 << 30)]
    machine.slice("a", (0, 1 << 20, None))
    assert machine.play("bank:1") == [bank.format(16 << 30)]


def test_a_quota_raised_while_the_process_runs_serves_at_once_and_free_never_exceeds_the_total_shown(
    machine: Machine,
) -> None:
    machine.slice("a", (0, 600, None))
    player = machine.start(
        "bank:1", "stop", f"alloc:1000:{900 * MIB}", "avail:1000", "stop", "avail:1000", "alloc:1000:4096"
    )
    machine.slice("a", (0, 2000, None))
    assert player.stdin
    assert player.stdout
    player.stdin.write("\n")
    player.stdin.flush()
    assert [player.stdout.readline() for _ in range(3)][:2] == [
        f"alloc:1000:{900 * MIB} -> ok\n",
        f"avail:1000 -> ok {600 * MIB}\n",
    ]
    machine.slice("a", (0, 100, None))
    assert player.communicate("\n")[0] == "avail:1000 -> ok 0\nalloc:1000:4096 -> ENOMEM\n"


def test_a_refusal_is_counted_once_though_the_runtime_asks_twice(machine: Machine) -> None:
    a = machine.slice("a", (0, 100, None))
    request = f"alloc:1000:{200 * MIB}"
    assert machine.play(request, request, request, "alloc:1000:4096", "free:0") == ["ENOMEM"] * 3 + ["ok", "ok"]
    raw = (a / "ledger").read_bytes()
    at = lib.AVG_LEDGER_HEAD_BYTES + lib.AVG_SLOT_HEAD_BYTES
    cell = ffi.from_buffer("struct avg_cell[]", raw[at : at + lib.AVG_CELL_BYTES])[0]
    counts = (cell.used, cell.pending, cell.peak, cell.allocations, cell.frees, cell.denials, cell.denied_bytes)
    assert counts == (0, 0, 4096, 1, 1, 2, 400 * MIB)


def test_the_scratch_reserve_that_available_promised_is_never_refused(machine: Machine) -> None:
    """The runtime aborts otherwise. Between question and request a neighbour takes all that it can get."""
    machine.slice("a", (0, 1200, None))
    reserve = f"alloc:1000:{140 * MIB}:0x90000001"
    first = machine.start("avail:1000", "stop", reserve)
    answers = machine.play("avail:1000", f"alloc:1000:{1200 * MIB}", f"alloc:1000:{1060 * MIB}")
    assert answers == [f"ok {1060 * MIB}", "ENOMEM", "ok"]
    out, _ = first.communicate("\n")
    assert out == f"{reserve} -> ok\n"


def test_host_memory_serves_where_vram_is_out_only_if_the_slice_may_and_within_its_quota(machine: Machine) -> None:
    machine.slice("a", (0, 1024, None))
    words = [f"alloc:1000:{600 * MIB}", "alloc:1000:4096", f"alloc:1000:{600 * MIB}", "free:0", "avail:1000"]
    assert machine.play(*words[:1], STUB_VRAM_FULL="1") == ["ENOMEM"]
    machine.slice("a", (0, 1024, None), oversubscribe=True)
    machine.requests()
    assert machine.play(*words, STUB_VRAM_FULL="1") == ["ok", "ENOMEM", "ENOMEM", "ok", f"ok {1024 * MIB}"]
    flags = [r.split("flags=")[1].split()[0] for r in machine.requests() if r.startswith("ALLOC")]
    assert flags == ["b0000001", "b0000002", "b0000001"]


def test_a_slice_that_may_oversubscribe_is_shown_its_whole_quota_and_what_is_left_of_it(machine: Machine) -> None:
    machine.slice("a", (0, 20 << 10, None), oversubscribe=True)
    words = ["bank:1", f"alloc:1000:{12 << 30}", f"alloc:1000:{8 << 30}", "avail:1000", f"alloc:1000:{2 * MIB}"]
    bank = f"ok heap_type 1;size_in_bytes {20 << 30};flags 0;width 8192;mem_clk_max 1300;"
    answers = machine.play(*words, STUB_VRAM_FULL="1", STUB_AVAILABLE="0")
    assert answers == [bank, "ok", "ok", "ok 0", "ENOMEM"]


# ---------------------------------------------------------------------------------------------------------- queues


def test_every_compute_queue_gets_the_slices_mask_though_nobody_asked(machine: Machine) -> None:
    machine.slice("a", (0, 600, QUARTER))
    assert machine.play("queue:1000:2", "queue:1000:0", "queue:1000:1", "queue:1001:2") == [
        "ok 1",
        "ok 2",
        "ok 3",
        "ok 4",
    ]
    assert machine.requests() == [
        "CREATE_QUEUE gpu=1000 type=2 priority=7 -> 0",
        f"SET_CU_MASK queue=1 bits=320 mask={QUARTER_HEX} -> 0",
        "CREATE_QUEUE gpu=1000 type=0 priority=7 -> 0",
        f"SET_CU_MASK queue=2 bits=320 mask={QUARTER_HEX} -> 0",
        "CREATE_QUEUE gpu=1000 type=1 priority=7 -> 0",
        "CREATE_QUEUE gpu=1001 type=2 priority=7 -> 0",
    ]


def test_a_callers_mask_is_narrowed_and_the_same_is_not_sent_twice(machine: Machine) -> None:
    machine.slice("a", (0, 600, QUARTER))
    words = ["queue:1000", "mask:1:320:ffff", "mask:1:64:ffff", "mask:1:1024:" + "f" * 256, "mask:1:320:" + "f" * 80]
    assert machine.play(*words) == ["ok 1"] + ["ok"] * 4
    assert masks(machine.requests()) == [QUARTER_HEX, f"{0xFFFF:080x}", QUARTER_HEX]


@pytest.mark.parametrize(
    ("asked", "why"), [("0", "empty"), ("f" * 10 + "0" * 70, "outside"), ("7f", "leaves an XCC without a CU")]
)
def test_a_mask_that_would_hang_becomes_the_slices_own(machine: Machine, asked: str, why: str) -> None:
    machine.slice("a", (0, 600, QUARTER))
    assert machine.play("queue:1000", "mask:1:320:ff", f"mask:1:320:{asked}") == ["ok 1", "ok", "ok"]
    assert masks(machine.requests()) == [QUARTER_HEX, f"{0xFF:080x}", QUARTER_HEX]


def test_half_a_wgp_becomes_the_slices_own_mask(machine: Machine) -> None:
    machine.layout = CuLayout(1, 4, 2, (8,) * 8, wgp=True)
    for node in (1, 2):
        place = machine.root / f"sys/devices/virtual/kfd/kfd/topology/nodes/{node}/properties"
        place.write_text("simd_count 128\nsimd_per_cu 2\n")
    machine.slice("a", (0, 600, CuSet(tuple(range(16)))))
    assert machine.play("queue:1000", "mask:1:64:7", "mask:1:64:f") == ["ok 1", "ok", "ok"]
    assert masks(machine.requests()) == [f"{0xFFFF:016x}", f"{0xF:016x}"]


def test_malformed_masks_are_the_drivers_to_answer(machine: Machine) -> None:
    machine.slice("a", (0, 600, QUARTER))
    words = ["queue:1000", "mask:1:0:0", "mask:1:76:f", "mask:9:32:f", "badmask:1"]
    assert machine.play(*words[:4], STUB_REFUSE="SET_CU_MASK:22:1") == ["ok 1", "EINVAL", "EINVAL", "EINVAL"]


def test_a_queue_whose_mask_the_driver_refuses_is_destroyed_and_the_call_fails(machine: Machine) -> None:
    machine.slice("a", (0, 600, QUARTER))
    answers, said = machine.play_all("queue:1000", "queue:1000", STUB_REFUSE="SET_CU_MASK:16")
    assert answers == ["ENOMEM", "ENOMEM"]
    assert [r.split()[0] for r in machine.requests()] == ["CREATE_QUEUE", "SET_CU_MASK", "DESTROY_QUEUE"] * 2
    assert said == "amdvgpu: the driver refused the slice's CU mask on a queue\n"


def test_a_mask_made_for_another_partition_mode_is_not_sent_and_no_queue_runs(machine: Machine) -> None:
    machine.slice("a", (0, 600, QUARTER))
    place = machine.root / "sys/devices/virtual/kfd/kfd/topology/nodes/1/properties"
    place.write_text("simd_count 152\nsimd_per_cu 4\n")
    answers, said = machine.play_all("queue:1000")
    assert (answers, machine.requests()) == (["ENOMEM"], [])
    assert "another partition mode" in said


def test_two_slices_of_one_gpu_give_their_queues_both_sets_of_cus(machine: Machine) -> None:
    machine.slice("a", (0, 600, QUARTER))
    machine.slice("b", (0, 600, CuSet(tuple(range(80, 96)))))
    assert machine.play("queue:1000") == ["ok 1"]
    assert masks(machine.requests()) == [f"{QUARTER.mask | 0xFFFF << 80:080x}"]


def test_priorities_are_held_at_the_slices_ceiling_in_create_and_update(machine: Machine) -> None:
    machine.slice("a", (0, 600, None), priority=Priority.LOW)
    words = ["queue:1000:2:7", "update:1:15", "update:1:2", "queue:1000:1:15", "update:2:15"]
    assert machine.play(*words) == ["ok 1", "ok 15", "ok 2", "ok 2", "ok 15"]
    assert machine.requests() == [
        "CREATE_QUEUE gpu=1000 type=2 priority=3 -> 0",
        "UPDATE_QUEUE queue=1 priority=3 percentage=100 -> 0",
        "UPDATE_QUEUE queue=1 priority=2 percentage=100 -> 0",
        "CREATE_QUEUE gpu=1000 type=1 priority=15 -> 0",
        "UPDATE_QUEUE queue=2 priority=15 percentage=100 -> 0",
    ]


def test_a_destroyed_queue_is_forgotten(machine: Machine) -> None:
    machine.slice("a", (0, 600, QUARTER))
    assert machine.play("queue:1000", "destroy:1", "mask:1:320:ff") == ["ok 1", "ok", "ok"]
    assert masks(machine.requests())[-1] == f"{0xFF:080x}"  # the driver's to refuse: it is nobody's queue


# ------------------------------------------------------------------------------------------------------ environment


def test_what_slices_wrote_is_taken_out_and_what_the_user_wrote_stays(machine: Machine) -> None:
    machine.slice("a", (0, 600, QUARTER))
    asked = ["env:HSA_CU_MASK", "env:ROCR_VISIBLE_DEVICES", "env:HOME"]
    assert machine.play(*asked, HSA_CU_MASK="0:0-75", HOME="/") == ["none", "none", "/"]
    assert machine.play(*asked, HSA_CU_MASK="0:0-7", ROCR_VISIBLE_DEVICES="0") == ["0:0-7", "0", "none"]


def test_one_slices_list_of_gpus_stays_and_two_slices_lists_go(machine: Machine) -> None:
    machine.slice("a", (0, 600, None), (1, 600, None))
    both = "GPU-0000000000000001,GPU-0000000000000002"
    assert machine.play("env:ROCR_VISIBLE_DEVICES", ROCR_VISIBLE_DEVICES=both) == [both]
    machine.slice("b", (0, 600, None))
    assert machine.play("env:ROCR_VISIBLE_DEVICES", ROCR_VISIBLE_DEVICES=both) == ["none"]


def test_the_environment_may_lower_the_quota_and_never_raise_it(machine: Machine) -> None:
    machine.slice("a", (0, 600, None))
    words = [f"alloc:1000:{500 * MIB}", "bank:1"]
    bank = "ok heap_type 1;size_in_bytes {};flags 0;width 8192;mem_clk_max 1300;"
    assert machine.play(*words, AMDVGPU_VRAM="400MiB") == ["ENOMEM", bank.format(400 * MIB)]
    assert machine.play(*words, AMDVGPU_VRAM="400GiB") == ["ok", bank.format(600 * MIB)]


def test_amdvgpu_cus_narrows_the_slices_mask_and_never_widens_it(machine: Machine) -> None:
    machine.slice("a", (0, 600, QUARTER))
    assert machine.play("queue:1000", "queue:1000", AMDVGPU_CUS="0-15") == ["ok 1", "ok 2"]
    assert machine.play("queue:1000", AMDVGPU_CUS="0-303") == ["ok 1"]
    assert masks(machine.requests()) == [f"{0xFFFF:080x}"] * 2 + [QUARTER_HEX]


@pytest.mark.parametrize(("name", "value"), [("AMDVGPU_VRAM", "lots"), ("AMDVGPU_VRAM", ""), ("AMDVGPU_CUS", "7-3")])
def test_a_malformed_limit_denies_vram_with_one_line_and_never_means_none(
    machine: Machine, name: str, value: str
) -> None:
    machine.slice("a", (0, 600, None))
    answers, said = machine.play_all("alloc:1000:4096", "alloc:1000:4096", "avail:1000", **{name: value})
    assert answers == ["ENOMEM", "ENOMEM", "ok 0"]
    assert said.startswith(f"amdvgpu: {name} is no ")
    assert said.count("\n") == 1


# --------------------------------------------------------------------------------------------------------- damage


def damage_missing(guest: Path) -> None:
    (guest / "policy").unlink()


def damage_short(guest: Path) -> None:
    text = (guest / "policy").read_bytes()[:100]
    (guest / "policy").unlink()
    (guest / "policy").write_bytes(text)


def damage_newer(guest: Path) -> None:
    text = bytearray((guest / "policy").read_bytes())
    text[8] = 2
    (guest / "policy").unlink()
    (guest / "policy").write_bytes(text)


def damage_foreign(guest: Path) -> None:
    (guest / "policy").unlink()
    (guest / "policy").write_bytes(b"x" * 4096)


def damage_fifo(guest: Path) -> None:
    (guest / "policy").unlink()
    os.mkfifo(guest / "policy")


def damage_link(guest: Path) -> None:
    (guest / "policy").rename(guest / "elsewhere")
    (guest / "policy").symlink_to("elsewhere")


def damage_ledger_missing(guest: Path) -> None:
    (guest / "ledger").unlink()


def damage_ledger_short(guest: Path) -> None:
    os.truncate(guest / "ledger", 5000)


def damage_ledger_other(guest: Path) -> None:
    text = bytearray((guest / "ledger").read_bytes())
    text[24] ^= 1
    (guest / "ledger").write_bytes(text)


def damage_ledger_fifo(guest: Path) -> None:
    (guest / "ledger").unlink()
    os.mkfifo(guest / "ledger")


@pytest.mark.parametrize(
    "damage",
    [
        damage_missing,
        damage_short,
        damage_newer,
        damage_foreign,
        damage_fifo,
        damage_link,
        damage_ledger_missing,
        damage_ledger_short,
        damage_ledger_other,
        damage_ledger_fifo,
    ],
)
def test_a_slice_that_cannot_be_read_means_no_vram_one_line_and_no_crash(
    machine: Machine, damage: Callable[[Path], None]
) -> None:
    guest = machine.slice("a", (0, 600, None))
    damage(guest)
    answers, said = machine.play_all("alloc:1000:4096", "avail:1000", "alloc:1000:4096:0xb0000002", "alloc:1000:4096")
    assert answers == ["ENOMEM", "ok 0", "ok", "ENOMEM"]
    assert said.startswith(f"amdvgpu: {guest}: ")
    assert said.count("\n") == 1


def test_a_program_that_asks_the_kfd_for_nothing_is_told_nothing(machine: Machine) -> None:
    damage_short(machine.slice("a", (0, 600, None)))
    assert machine.play_all("env:NONE", "console", HSA_CU_MASK="0:0-75") == (["none", "EBADF"], "")


def test_without_any_slice_everything_passes(machine: Machine) -> None:
    words = [f"alloc:1000:{1 << 40}", "avail:1000", "queue:1000", "free:0"]
    assert machine.play(*words) == ["ok", f"ok {64 << 30}", "ok 1", "ok"]


def test_a_ledger_that_is_full_refuses_and_a_dead_process_in_it_makes_room(machine: Machine) -> None:
    a = machine.slice("a", (0, 600, None))
    raw = bytearray((a / "ledger").read_bytes())
    for slot in range(lib.AVG_SLOTS):
        at = lib.AVG_LEDGER_HEAD_BYTES + slot * lib.avg_slot_bytes(1)
        raw[at : at + 8] = (5 << lib.AVG_OWNER_NS_SHIFT | 1).to_bytes(8, "little")  # pid 1 of a namespace we cannot see
    (a / "ledger").write_bytes(raw)
    answers, said = machine.play_all("alloc:1000:4096")
    assert answers == ["ENOMEM"]
    assert said == "amdvgpu: a: no free slot in the ledger (128 processes), VRAM is refused\n"
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    at = lib.AVG_LEDGER_HEAD_BYTES
    raw[at : at + 8] = (namespace << lib.AVG_OWNER_NS_SHIFT | 0x3FFFFE).to_bytes(8, "little")  # a pid that nobody has
    (a / "ledger").write_bytes(raw)
    assert machine.play("alloc:1000:4096") == ["ok"]


# ----------------------------------------------------------------------------------------- fork, exec, users, copies


def test_a_forked_child_has_a_slot_of_its_own_and_owes_nothing_of_its_parents(machine: Machine) -> None:
    a = machine.slice("a", (0, 1000, None))
    words = [f"alloc:1000:{300 * MIB}", "fork", "free:0", "avail:1000", f"alloc:1000:{500 * MIB}"]
    assert machine.play(*words) == ["ok", "ok", f"ok {700 * MIB}", "ok"]
    assert sorted(used for _, used in machine.slots(a)) == [300 * MIB, 500 * MIB]


def test_a_thread_shares_its_processs_slot(machine: Machine) -> None:
    a = machine.slice("a", (0, 1000, None))
    assert machine.play(f"alloc:1000:{300 * MIB}", "thread", f"alloc:1000:{300 * MIB}") == ["ok", "ok"]
    assert [used for _, used in machine.slots(a)] == [600 * MIB]


def test_exec_gives_back_what_the_last_image_held_though_pid_and_start_time_stay(machine: Machine) -> None:
    a = machine.slice("a", (0, 1000, None))
    player = machine.start(f"alloc:1000:{900 * MIB}", "exec", f"alloc:1000:{800 * MIB}", "stop")
    assert machine.slots(a) == [(player.pid, 800 * MIB)]
    player.communicate("\n")


@pytest.mark.root
def test_an_image_after_exec_that_never_touches_the_gpu_holds_nothing(machine: Machine) -> None:
    a = machine.slice("a", (0, 1000, None))
    player = machine.start(f"alloc:1000:{900 * MIB}", "exec", "stop")
    assert machine.used(a) == 0
    player.communicate("\n")


def test_two_copies_of_the_library_charge_once(machine: Machine) -> None:
    a = machine.slice("a", (0, 1000, None))
    copy = machine.root / "copy.so"
    shutil.copy(machine.built.gate, copy)
    preload = f"{machine.built.gate} {copy} {machine.built.stub}"
    words = [f"alloc:1000:{600 * MIB}", "avail:1000", "queue:1000"]
    assert machine.play(*words, LD_PRELOAD=preload) == ["ok", f"ok {400 * MIB}", "ok 1"]
    assert machine.used(a) == 600 * MIB


@pytest.mark.root
def test_root_and_another_user_share_one_account_whichever_comes_first(machine: Machine) -> None:
    a = machine.slice("a", (0, 1000, None))
    words = [f"alloc:1000:{300 * MIB}", "stop"]
    log = {"STUB_LOG": "/dev/null"}
    root = machine.start(*words, **log)
    assert machine.play("setuid:1000", "avail:1000", f"alloc:1000:{800 * MIB}", **log) == [
        "ok",
        f"ok {700 * MIB}",
        "ENOMEM",
    ]
    root.communicate("\n")
    user = machine.start("setuid:1000", *words, **log)
    assert machine.play("avail:1000", **log) == [f"ok {700 * MIB}"]
    user.communicate("\n")
    assert machine.used(a) == 300 * MIB


def test_a_process_killed_with_charges_is_forgotten_before_the_next_ones_first_question(machine: Machine) -> None:
    a = machine.slice("a", (0, 1000, None))
    assert machine.play(f"alloc:1000:{900 * MIB}", "kill") == ["ok"]
    assert machine.used(a) == 900 * MIB
    assert machine.play("avail:1000", f"alloc:1000:{1000 * MIB}") == [f"ok {1000 * MIB}", "ok"]


def test_a_stopped_neighbour_keeps_its_charge(machine: Machine) -> None:
    machine.slice("a", (0, 1000, None))
    player = machine.start(f"alloc:1000:{900 * MIB}", "stop")
    player.send_signal(signal.SIGSTOP)
    assert machine.play(f"alloc:1000:{200 * MIB}") == ["ENOMEM"]
    player.kill()
    player.communicate()


def test_a_mended_ledger_is_charged_again_by_the_processes_that_live(machine: Machine) -> None:
    a = machine.slice("a", (0, 1000, None))
    player = machine.start(f"alloc:1000:{600 * MIB}", "stop", "alloc:1000:4096", "stop")
    head = (a / "ledger").read_bytes()[: lib.AVG_LEDGER_HEAD_BYTES]
    with (a / "ledger").open("r+b") as file:
        file.write(head.ljust(lib.avg_ledger_bytes(1), b"\0"))
    assert player.stdin
    assert player.stdout
    player.stdin.write("\n")
    player.stdin.flush()
    assert player.stdout.readline() == "alloc:1000:4096 -> ok\n"
    assert machine.slots(a) == [(player.pid, 600 * MIB + 4096)]
    player.communicate("\n")


@pytest.mark.root
def test_mounted_slices_are_obeyed_and_none_can_be_added_by_the_environment(machine: Machine) -> None:
    machine.slice("a", (0, 600, None))
    extra = machine.root / "extra"
    shutil.copytree(machine.root / "slices/a", extra)
    play = f"{machine.built.drive} alloc:1000:{500 * MIB} alloc:1000:{500 * MIB} bank:1"
    script = f"""
        mount -t tmpfs none /run && mkdir /run/amdvgpu && mkdir /run/amdvgpu/a
        mount --bind {machine.root}/slices/a /run/amdvgpu/a && mount -o remount,bind,ro /run/amdvgpu/a
        mount --bind {machine.root}/slices/a/ledger /run/amdvgpu/a/ledger
        export AMDVGPU_SLICE_DIR={extra} LD_PRELOAD="{machine.built.gate} {machine.built.stub}"
        exec {play}
    """
    environment = {k: v for k, v in machine.environment().items() if k not in ("LD_PRELOAD", "AMDVGPU_SLICE_DIR")}
    command = ["unshare", "--mount", "sh", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    answers = [line.partition(" -> ")[2] for line in done.stdout.splitlines()]
    assert answers[:2] == ["ok", "ENOMEM"]
    assert f"size_in_bytes {600 * MIB};" in answers[2]


@pytest.mark.root
def test_a_directory_that_anybody_here_could_have_written_is_no_slice(machine: Machine) -> None:
    """What a finished run left on the host, or a container's root made to have more."""
    machine.slice("a", (0, 600, None))
    machine.slice("forged", (0, 6000, None))
    machine.directories.pop()
    script = f"""
        mount -t tmpfs none /run && mkdir -p /run/amdvgpu/left && cp -r {machine.root}/slices/forged /run/amdvgpu
        export LD_PRELOAD="{machine.built.gate} {machine.built.stub}"
        exec {machine.built.drive} alloc:1000:{500 * MIB} alloc:1000:{500 * MIB}
    """
    environment = {k: v for k, v in machine.environment().items() if k != "LD_PRELOAD"}
    command = ["unshare", "--mount", "sh", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert [line.partition(" -> ")[2] for line in done.stdout.splitlines()] == ["ok", "ENOMEM"]
    named = {**environment, "AMDVGPU_SLICE": "a"}
    del named["AMDVGPU_SLICE_DIR"]
    done = subprocess.run(command, env=named, capture_output=True, text=True, check=True)
    assert [line.partition(" -> ")[2] for line in done.stdout.splitlines()] == ["ENOMEM", "ENOMEM"]
    assert done.stderr == "amdvgpu: AMDVGPU_SLICE names a slice, but none is mounted here: VRAM is refused: a\n"


def test_a_tasks_priority_lowers_the_slices_and_never_raises_it(machine: Machine) -> None:
    machine.slice("a", (0, 600, None))
    for asked in ("0", "1", "2"):
        assert machine.play("queue:1000:2:15", AMD_TASK_PRIORITY=asked) == ["ok 1"]
    assert [r.split("priority=")[1] for r in machine.requests()] == ["7 -> 0", "3 -> 0", "3 -> 0"]
