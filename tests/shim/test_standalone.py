"""Limits by the environment alone: no daemon, no file that anybody made before."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.shim.conftest import Machine

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def alone(machine: Machine) -> Machine:
    """The machine with a topology that names its GPUs, and a runtime directory."""
    for node in (1, 2):
        place = machine.root / f"sys/devices/virtual/kfd/kfd/topology/nodes/{node}"
        (place / "gpu_id").write_text(f"{999 + node}\n")
        (place / "properties").write_text(
            f"simd_count 1216\nsimd_per_cu 4\nnum_xcc 8\ngfx_target_version 90402\ndrm_render_minor {127 + node}\n"
        )
    (machine.root / "runtime").mkdir()
    return machine


def play(machine: Machine, *words: str, **environment: str) -> tuple[list[str], str]:
    where = {"XDG_RUNTIME_DIR": str(machine.root / "runtime"), "AMDVGPU_SLICE_DIR": "", **environment}
    where = {k: v for k, v in {**machine.environment(), **where}.items() if v}
    done = subprocess.run([machine.built.drive, *words], env=where, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -9), (done.returncode, done.stdout, done.stderr)
    return [line.partition(" -> ")[2] for line in done.stdout.splitlines()], done.stderr


def ledgers(machine: Machine) -> list[Path]:
    return sorted((machine.root / "runtime/amdvgpu").iterdir())


def test_a_quota_and_cus_hold_on_every_gpu(alone: Machine) -> None:
    words = [
        "bank:1",
        f"alloc:1000:{3 * GIB}",
        f"alloc:1000:{2 * GIB}",
        f"alloc:1001:{3 * GIB}",
        "avail:1000",
        "queue:1000",
    ]
    bank = f"ok heap_type 1;size_in_bytes {4 * GIB};flags 0;width 8192;mem_clk_max 1300;"
    answers, said = play(alone, *words, AMDVGPU_VRAM="4GiB", AMDVGPU_CUS="0-37")
    assert (answers, said) == ([bank, "ok", "ENOMEM", "ok", f"ok {GIB}", "ok 1"], "")
    assert [r.split("mask=")[1] for r in alone.requests() if "mask=" in r] == [f"{(1 << 38) - 1:080x} -> 0"]


def test_all_processes_of_a_tree_share_one_ledger_through_fork_and_exec_and_a_session_of_their_own(
    alone: Machine,
) -> None:
    script = f"""
        D={alone.built.drive}
        $D alloc:1000:{3 * GIB} stop <&3 &
        exec 4>&1
        for try in $(seq 500); do setsid $D avail:1000 | grep -q 'ok {GIB}' && break; done
        setsid sh -c "$D alloc:1000:{2 * GIB}; exec $D fork alloc:1000:{512 * MIB}"
        python3 -c "import subprocess; subprocess.run(['$D', 'avail:1000'])"
    """
    environment = alone.environment(AMDVGPU_VRAM="4GiB", XDG_RUNTIME_DIR=str(alone.root / "runtime"))
    del environment["AMDVGPU_SLICE_DIR"]
    command = ["bash", "-c", f"coproc cat; exec 3<&${{COPROC[0]}}; {script} exec 3<&-; kill %2 %1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if " -> " in line]
    assert lines == [
        f"alloc:1000:{3 * GIB} -> ok",
        f"alloc:1000:{2 * GIB} -> ENOMEM",
        f"alloc:1000:{512 * MIB} -> ok",
        f"avail:1000 -> ok {GIB}",
    ]
    assert len(ledgers(alone)) == 1


def test_exec_gives_back_what_the_last_image_held_also_where_the_next_never_touches_the_gpu(alone: Machine) -> None:
    words = [f"alloc:1000:{3 * GIB}", "exec", "fork", f"alloc:1000:{2 * GIB}", "avail:1000"]
    # Parent and child play the rest; both are new images of nobody who still holds the 3 GiB.
    answers, _ = play(alone, *words, AMDVGPU_VRAM="4GiB")
    assert answers == ["ok", "ok", f"ok {2 * GIB}"]


def test_two_trees_do_not_share_and_the_ledgers_of_the_dead_are_removed(alone: Machine) -> None:
    word = f"alloc:1000:{3 * GIB}"
    first = subprocess.Popen(
        [alone.built.drive, word, "stop"],
        env={
            k: v
            for k, v in alone.environment(AMDVGPU_VRAM="4GiB", XDG_RUNTIME_DIR=str(alone.root / "runtime")).items()
            if k != "AMDVGPU_SLICE_DIR"
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout
    assert [first.stdout.readline() for _ in range(2)] == [f"{word} -> ok\n", "ready\n"]
    assert play(alone, word, AMDVGPU_VRAM="4GiB")[0] == ["ok"]
    assert len(ledgers(alone)) == 2
    first.communicate("\n")
    assert play(alone, word, AMDVGPU_VRAM="4GiB")[0] == ["ok"]
    assert len(ledgers(alone)) == 1


@pytest.mark.parametrize(
    ("environment", "first", "second"),
    [
        ({"HIP_DEVICE_MEMORY_LIMIT": "4096m"}, 4 * GIB, 4 * GIB),
        ({"HIP_DEVICE_MEMORY_LIMIT_0": "4g", "HIP_DEVICE_MEMORY_LIMIT_1": "2048M"}, 4 * GIB, 2 * GIB),
        ({"HIP_DEVICE_MEMORY_LIMIT": "3G", "HIP_DEVICE_MEMORY_LIMIT_1": "1073741824"}, 3 * GIB, GIB),
        ({"HIP_DEVICE_MEMORY_LIMIT_1": "1g"}, 16 * GIB, GIB),
        ({"FH_MEMORY_LIMIT": "2GiB"}, 2 * GIB, 2 * GIB),
        ({"AMDVGPU_VRAM": "1GiB", "HIP_DEVICE_MEMORY_LIMIT_0": "4g"}, GIB, GIB),
    ],
)
def test_others_names_for_a_limit_are_understood(
    alone: Machine, environment: dict[str, str], first: int, second: int
) -> None:
    answers, said = play(alone, "bank:1", "bank:2", **environment)
    assert [a.split(";")[1] for a in answers] == [f"size_in_bytes {first}", f"size_in_bytes {second}"]
    assert said == ""


@pytest.mark.parametrize(
    "environment",
    [
        {"AMDVGPU_VRAM": "lots"},
        {"AMDVGPU_VRAM": "4GiB", "AMDVGPU_CUS": "7-3"},
        {"FH_CU_RANGE": "all"},
        {"FH_MEMORY_LIMIT": "-1"},
        {"HIP_DEVICE_MEMORY_LIMIT": "1.5G"},
        {"HIP_DEVICE_MEMORY_LIMIT_1": "0"},
        {"AMDVGPU_VRAM": "4GiB@/dev/null"},
    ],
)
def test_what_is_no_limit_denies_vram_with_one_line(alone: Machine, environment: dict[str, str]) -> None:
    answers, said = play(alone, "alloc:1000:4096", "avail:1000", "alloc:1000:4096", **environment)
    assert answers == ["ENOMEM", "ok 0", "ENOMEM"]
    assert said.startswith("amdvgpu: ")
    assert said.endswith("\n")
    assert said.count("\n") == 1


def test_cus_that_would_hang_the_gpu_are_no_reason_to_give_all_of_them(alone: Machine) -> None:
    answers, said = play(alone, "queue:1000", AMDVGPU_CUS="0-3")  # eight XCCs
    assert answers == ["ENOMEM"]
    assert said == "amdvgpu: AMDVGPU_CUS leaves an XCC without a CU or splits a WGP: queues are refused\n"
    assert play(alone, "queue:1000", FH_CU_RANGE="0-7")[0] == ["ok 1"]


def test_without_a_gpu_in_the_topology_vram_is_refused(machine: Machine) -> None:
    answers, said = play(machine, "alloc:1000:4096", AMDVGPU_VRAM="4GiB", XDG_RUNTIME_DIR=str(machine.root))
    assert answers == ["ENOMEM"]
    assert "no GPU is found" in said


def test_a_place_that_others_can_write_is_not_used(alone: Machine) -> None:
    (alone.root / "runtime/amdvgpu").mkdir()
    (alone.root / "runtime/amdvgpu").chmod(0o777)
    assert play(alone, f"alloc:1000:{GIB}", AMDVGPU_VRAM="4GiB")[0] == ["ok"]
    assert ledgers(alone) == []  # the one in /tmp serves


def test_host_memory_serves_where_the_environment_allows_it(alone: Machine) -> None:
    word = f"alloc:1000:{GIB}"
    assert play(alone, word, AMDVGPU_VRAM="4GiB", STUB_VRAM_FULL="1")[0] == ["ENOMEM"]
    assert play(alone, word, AMDVGPU_VRAM="4GiB", STUB_VRAM_FULL="1", HIP_OVERSUBSCRIBE="1")[0] == ["ok"]


def test_it_can_be_switched_off_where_no_slice_is_and_only_there(alone: Machine) -> None:
    words = [f"alloc:1000:{8 * GIB}", "queue:1000"]
    off = {"AMDVGPU_VRAM": "4GiB", "AMDVGPU_CUS": "0-7", "AMDVGPU_DISABLE": "1"}
    assert play(alone, *words, **off)[0] == ["ok", "ok 1"]
    assert [r.split()[0] for r in alone.requests()] == ["ALLOC", "CREATE_QUEUE"]
    alone.slice("a", (0, 1024, None))
    assert alone.play(*words[:1], AMDVGPU_DISABLE="1") == ["ENOMEM"]
    assert play(alone, *words[:1], AMDVGPU_DISABLE="1", AMDVGPU_SLICE="a")[0] == ["ENOMEM"]


def test_a_slice_obeys_its_policy_and_a_lower_limit_that_a_tree_brought_along(alone: Machine) -> None:
    alone.slice("a", (0, 1024, None))
    limit = "512MiB@/somewhere/else"
    assert alone.play(f"alloc:1000:{600 * MIB}", f"alloc:1000:{500 * MIB}", AMDVGPU_VRAM=limit) == ["ENOMEM", "ok"]
    assert alone.play(f"alloc:1000:{600 * MIB}", HIP_DEVICE_MEMORY_LIMIT_0="1m") == ["ok"]


# ----------------------------------------------------------------------------------------------------------- the log


def test_by_default_nothing_is_said_of_what_goes_well_or_is_refused(alone: Machine) -> None:
    assert play(alone, f"alloc:1000:{8 * GIB}", "alloc:1000:4096", "queue:1000", AMDVGPU_VRAM="4GiB")[1] == ""


def test_info_tells_of_refusals_and_masks_and_debug_of_every_charge(alone: Machine) -> None:
    limits = {"AMDVGPU_VRAM": "4GiB", "AMDVGPU_CUS": "0-7"}
    words = [f"alloc:1000:{8 * GIB}", "alloc:1000:4096", "free:0", "queue:1000"]
    told = play(alone, *words, AMDVGPU_LOG="info", **limits)[1]
    assert [line.partition("] ")[2] for line in told.splitlines()] == [
        f"info: VRAM refused gpu=1000 bytes={8 * GIB} used=0 quota={4 * GIB} slot=0",
        "info: queue masked gpu=1000 queue=1 priority=7 cus=8 mask=ff refused=0",
    ]
    told = play(alone, *words, AMDVGPU_LOG="debug", **limits)[1]
    assert [line.partition("] ")[2].split(" gpu=")[0] for line in told.splitlines()] == [
        "info: VRAM refused",
        "debug: VRAM charged",
        "debug: VRAM given back handle=1 bytes=4096",
        "info: queue masked",
    ]
    assert play(alone, "alloc:1000:4096", AMDVGPU_LOG="off", AMDVGPU_VRAM="x") == (["ENOMEM"], "")


def test_a_log_file_is_cut_at_its_size(alone: Machine) -> None:
    log = alone.root / "log"
    log.write_bytes(b"x" * (1 << 20))
    where = {"AMDVGPU_LOG": "debug", "AMDVGPU_LOG_FILE": str(log), "AMDVGPU_VRAM": "4GiB"}
    assert play(alone, "alloc:1000:4096", "free:0", **where)[1] == ""
    assert (log.with_name("log.1").stat().st_size, len(log.read_text().splitlines())) == (1 << 20, 2)


# --------------------------------------------------------------------------------------------------------- a stranger


def test_a_program_without_a_gpu_is_told_nothing(alone: Machine) -> None:
    assert play(alone, "env:NONE", AMDVGPU_VRAM="lots", AMDVGPU_LOG="debug") == (["none"], "")


def test_the_limit_is_passed_on_with_its_ledger_and_once(alone: Machine) -> None:
    answers, _ = play(alone, "env:AMDVGPU_VRAM", "exec", "env:AMDVGPU_VRAM", AMDVGPU_VRAM="4GiB")
    assert answers == [f"4GiB@{ledgers(alone)[0]}"] * 2
    answers, _ = play(alone, "env:HIP_DEVICE_MEMORY_LIMIT_1", HIP_DEVICE_MEMORY_LIMIT_1="1g")
    assert answers[0].startswith("1g@/")
