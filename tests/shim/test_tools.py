"""amdvgpu-ledger and amdvgpu-cumask-check, as a person or a script runs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree

if TYPE_CHECKING:
    from tests.shim.conftest import Built, Machine

SHIM = Path(__file__).resolve().parents[2] / "shim"
MIB = 1 << 20


@pytest.fixture(scope="session")
def reader(built: Built) -> Path:
    made = built.drive.with_name("amdvgpu-ledger")
    built.cc(["-O1", str(SHIM / "tools/ledger.c"), "-o", str(made)])
    return made


def read(reader: Path, *words: str | Path, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run([reader, *words], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def gpus(reader: Path, guest: Path) -> list[dict[str, Any]]:
    status, said, _ = read(reader, "--json", guest)
    assert status == 0
    found = json.loads(said)["slices"]
    assert [s["slice"] for s in found] == ["a"]
    listed: list[dict[str, Any]] = found[0]["gpus"]
    return listed


def test_it_shows_what_is_taken_by_whom_while_they_run(machine: Machine, reader: Path) -> None:
    a = machine.slice("a", (0, 1000, None), (1, 100, None))
    player = machine.start(f"alloc:1000:{300 * MIB}", f"alloc:1000:{900 * MIB}", "stop")
    first, second = gpus(reader, a)
    process = {"pid": player.pid, "state": "alive", "used_bytes": 300 * MIB}
    assert first == {
        "kfd_gpu_id": 1000,
        "quota_bytes": 1000 * MIB,
        "used_bytes": 300 * MIB,
        "pending_bytes": 0,
        "promised_bytes": 0,
        "peak_bytes": 300 * MIB,
        "allocations": 1,
        "frees": 0,
        "denials": 1,
        "denied_bytes": 900 * MIB,
        "reclaimed_bytes": 0,
        "processes": [process],
    }
    assert (second["kfd_gpu_id"], second["used_bytes"], second["processes"]) == (1001, 0, [])
    player.kill()
    player.communicate()
    assert gpus(reader, a)[0]["processes"] == [{**process, "state": "gone"}]
    machine.play("avail:1000")
    assert (gpus(reader, a)[0]["used_bytes"], gpus(reader, a)[0]["reclaimed_bytes"]) == (0, 300 * MIB)


def test_for_people_it_is_two_lines(machine: Machine, reader: Path) -> None:
    a = machine.slice("a", (0, 1000, None))
    player = machine.start(f"alloc:1000:{300 * MIB}", "stop")
    assert read(reader, AMDVGPU_SLICE_DIR=str(a))[1].splitlines() == [
        "a",
        "  GPU 1000: 300.0 MiB of 1000.0 MiB taken, 0 B promised, peak 300.0 MiB; 1 allocations, 0 refused",
        f"    pid {player.pid:<7} alive        300.0 MiB",
    ]
    player.communicate("\n")


def test_it_watches_until_it_is_ended(machine: Machine, reader: Path) -> None:
    a = machine.slice("a", (0, 1000, None))
    with subprocess.Popen([reader, "--json", "-w0.01", a], stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout
        lines = [json.loads(watching.stdout.readline()) for _ in range(3)]
        watching.kill()
    assert lines[0] == lines[1] == lines[2]


def test_it_never_writes(machine: Machine, reader: Path) -> None:
    a = machine.slice("a", (0, 1000, None))
    machine.play(f"alloc:1000:{300 * MIB}")
    before = (a / "ledger").read_bytes()
    (a / "ledger").chmod(0o444)
    assert gpus(reader, a)[0]["used_bytes"] == 300 * MIB
    assert (a / "ledger").read_bytes() == before


@pytest.mark.parametrize("damage", ["nothing", "short", "foreign", "fifo"])
def test_what_cannot_be_read_is_said_and_is_no_crash(machine: Machine, reader: Path, damage: str) -> None:
    a = machine.slice("a", (0, 1000, None))
    if damage == "short":
        os.truncate(a / "ledger", 3000)
    elif damage == "foreign":
        (a / "ledger").write_bytes(b"\xff" * (a / "ledger").stat().st_size)
    elif damage == "fifo":
        (a / "ledger").unlink()
        os.mkfifo(a / "ledger")
    else:
        (a / "ledger").unlink()
    status, said, complaint = read(reader, a)
    assert (status, said) == (1, "")
    assert complaint.startswith(f"amdvgpu-ledger: {a}: ")
    assert complaint.count("\n") == 1


def test_a_ledger_full_of_noise_is_shown_and_is_no_crash(machine: Machine, reader: Path) -> None:
    a = machine.slice("a", (0, 1000, None))
    with (a / "ledger").open("r+b") as file:
        file.seek(32)
        file.write(b"\xff" * ((a / "ledger").stat().st_size - 32))
    assert gpus(reader, a)[0]["used_bytes"] == 2**64 - 1


@pytest.mark.parametrize("words", [["--nonsense"], ["-wx"], ["-w0"]])
def test_wrong_use_is_told(reader: Path, words: list[str]) -> None:
    status, said, complaint = read(reader, *words)
    assert (status, said) == (2, "")
    assert "usage: amdvgpu-ledger" in complaint


# ---------------------------------------------------------------------------------------------- amdvgpu-cumask-check


CLANGS = ("clang-21", "clang-20", "clang-19")
GPUS = ("gfx90a", "gfx942", "gfx1100", "gfx1201")


@pytest.fixture(scope="session")
def checker(built: Built) -> Path:
    """The program with the census kernel for each GPU beside it."""
    where = built.drive.with_name("cumask")
    where.mkdir()
    clang = next((path for name in CLANGS if (path := shutil.which(name))), None)
    assert clang, "the census kernel needs clang 19 or later: scripts/setup test"
    for gpu in GPUS:
        options = ["-x", "cl", "-cl-std=CL2.0", "-Xclang", "-finclude-default-header", "-target", "amdgcn-amd-amdhsa"]
        options += [f"-mcpu={gpu}", "-mcode-object-version=4", "-nogpulib", "-O2", "-Wall", "-Werror"]
        source, output = str(SHIM / "tools/census.cl"), str(where / f"census-{gpu}.co")
        done = subprocess.run([clang, *options, source, "-o", output], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    built.cc(["-O1", str(SHIM / "tools/cumask_check.c"), "-o", str(where / "amdvgpu-cumask-check"), "-ldl"])
    return where / "amdvgpu-cumask-check"


def test_the_census_kernel_is_built_for_each_gpu_and_reads_the_hardwares_numbers(checker: Path) -> None:
    for gpu in GPUS:
        code = (checker.parent / f"census-{gpu}.co").read_bytes()
        assert code.startswith(b"\x7fELF")
        assert f"amdgcn-amd-amdhsa--{gpu}".encode() in code  # what HIP matches with the GPU
        assert b"census" in code


@pytest.mark.rocm
def test_on_a_simulated_gpu_it_says_that_it_needs_a_real_one(checker: Path, built: Built, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        build_tree(parse_simulation("mi210"), Path(folder) / "machine")
        softkfd = tmp_path / "libsoftkfd.so"
        sources = [str(path) for path in sorted((SHIM.parent / "softkfd/src").glob("*.c"))]
        options = ["-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-format-truncation"]
        built.cc([*options, *sources, "-ldl", "-lpthread", "-o", str(softkfd)])
        environment = {"SOFTKFD_ROOT": f"{folder}/machine", "LD_PRELOAD": str(softkfd)}
        status, said, complaint = read(checker, "--cus", "0-15", **environment)
    assert (status, said) == (4, "")
    assert "It needs a real one; nothing is shown about masks" in complaint


@pytest.mark.rocm
def test_without_a_gpu_it_says_so(checker: Path) -> None:
    status, said, complaint = read(checker)
    assert (status, said) == (3, "")
    assert complaint.startswith("amdvgpu-cumask-check: this needs a GPU")


@pytest.mark.parametrize("words", [["--cus", "7-3"], ["--xccs", "0"], ["--nonsense"], ["file"]])
def test_the_checker_takes_no_nonsense(checker: Path, words: list[str]) -> None:
    status, said, complaint = read(checker, *words)
    assert (status, said) == (2, "")
    assert "usage: amdvgpu-cumask-check" in complaint
