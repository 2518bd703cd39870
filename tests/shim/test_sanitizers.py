"""The gate's code with address and undefined-behaviour checks, over whole, damaged and hostile slices."""

from __future__ import annotations

import os
import random
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from amdvgpud._abi import lib
from amdvgpud.core.model import CuSet

if TYPE_CHECKING:
    from tests.shim.conftest import Built, Machine

SHIM = Path(__file__).resolve().parents[2] / "shim"
SOURCES = ("memory", "drm", "queue", "process", "ledger", "environ", "standalone", "next")


@pytest.fixture(scope="session")
def unit(built: Built) -> Path:
    made = built.drive.with_name("unit")
    sources = [str(SHIM / f"src/{name}.c") for name in SOURCES]
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1", "-pthread"]
    built.cc([*checks, *sources, str(SHIM / "tests/unit.c"), "-o", str(made)])
    return made


def run(unit: Path, machine: Machine, seed: int, steps: int = 3000, *more: str) -> None:
    environment = {k: v for k, v in machine.environment().items() if k != "LD_PRELOAD"}
    done = subprocess.run(
        [unit, str(seed), str(steps), *more], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    assert "Sanitizer" not in done.stderr
    assert "runtime error" not in done.stderr


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_requests_over_two_slices(unit: Path, machine: Machine, seed: int) -> None:
    machine.slice("a", (0, 600, CuSet(tuple(range(76)))), (1, 100, None))
    machine.slice("b", (0, 300, CuSet(tuple(range(80, 96)))))
    run(unit, machine, seed)


@pytest.mark.root
def test_random_requests_on_render_nodes_that_come_and_go(unit: Path, machine: Machine) -> None:
    machine.slice("a", (0, 600, CuSet(tuple(range(76)))), (1, 100, None))
    node = machine.root / "renderD128"
    os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(226, 128))
    run(unit, machine, 5, 3000, str(node))


@pytest.mark.parametrize("seed", range(6))
def test_a_ledger_full_of_noise(unit: Path, machine: Machine, seed: int) -> None:
    a = machine.slice("a", (0, 600, None))
    noise = random.Random(seed)
    size = lib.avg_ledger_bytes(1)
    with (a / "ledger").open("r+b") as file:
        file.seek(32)  # a guest's own part: the head must hold or nothing is looked at
        file.write(noise.randbytes(size - 32))
    run(unit, machine, seed, 300)


@pytest.mark.parametrize("seed", range(6))
def test_a_policy_full_of_noise_behind_its_head(unit: Path, machine: Machine, seed: int) -> None:
    a = machine.slice("a", (0, 600, CuSet(tuple(range(8)))))
    raw = bytearray((a / "policy").read_bytes())
    raw[256:] = random.Random(seed).randbytes(len(raw) - 256)
    raw[256:260] = (1000).to_bytes(4, "little")
    (a / "policy").unlink()
    (a / "policy").write_bytes(raw)
    run(unit, machine, seed, 300)
