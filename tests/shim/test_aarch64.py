"""The gate for aarch64: built by Debian's cross compiler, looked at by readelf, run by qemu's user mode.

qemu translates instructions and passes system calls on, so this shows that the code is right for the architecture's
calling convention, atomics and system call numbers; not how its memory model behaves on silicon, and nothing of a GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from amdvgpud.core.model import CuSet

if TYPE_CHECKING:
    from tests.shim.conftest import Built, Machine

SHIM = Path(__file__).resolve().parents[2] / "shim"
CC = "aarch64-linux-gnu-gcc"
SYSROOT = "/usr/aarch64-linux-gnu"
MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("arm")


def flags_and_sources() -> tuple[list[str], list[str]]:
    """As shim/CMakeLists.txt has them for this architecture."""
    text = (SHIM / "CMakeLists.txt").read_text()
    found = re.findall(r"target_(?:compile|link)_options\(amdvgpu PRIVATE ([^)]*)\)", text)
    flags = " ".join(found).replace("${CMAKE_CURRENT_SOURCE_DIR}", str(SHIM)).split()
    sources = re.search(r"set\(AVG_GATE_SOURCES ([^)]*)\)", text)
    assert sources
    assert "-mno-outline-atomics" in flags
    return flags, [str(SHIM / name) for name in sources[1].split()]


@pytest.fixture(scope="session")
def arm(built: Built) -> Built:
    """The same parts for aarch64; the player is a script that starts it under qemu."""
    where = built.drive.with_name("aarch64")
    where.mkdir(exist_ok=True)
    where.chmod(0o755)
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    assert qemu, "qemu-user is missing: scripts/setup test"

    def cc(*arguments: str) -> None:
        base = [CC, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", f"-I{SHIM / 'include'}"]
        done = subprocess.run([*base, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    made = replace(built, gate=where / "libamdvgpu.so", stub=where / "libstubkfd.so", drive=where / "drive")
    flags, sources = flags_and_sources()
    tests = SHIM / "tests"
    cc(*flags, "-shared", "-fPIC", *sources, "-o", str(made.gate))
    cc("-O1", "-shared", "-fPIC", str(tests / "stub.c"), "-o", str(made.stub), "-ldl")
    cc("-O1", "-pthread", str(tests / "drive.c"), "-o", str(where / "drive.bin"))
    inner = [source for source in sources if not source.endswith(("gate.c", "audit.c"))]
    cc("-O1", "-pthread", *inner, str(tests / "unit.c"), "-o", str(where / "unit.bin"))
    for name in ("drive", "unit"):
        script = where / name
        script.write_text(f'#!/bin/sh\nexec {qemu} -L {SYSROOT} {where}/{name}.bin "$@"\n')
        script.chmod(0o755)
    return made


@pytest.fixture
def play(arm: Built, machine: Machine) -> Callable[..., list[str]]:
    machine.built = arm

    def played(*words: str, **environment: str) -> list[str]:
        preload = f"LD_PRELOAD={arm.gate} {arm.stub}"  # in the guest only: qemu itself is a program of this machine
        return machine.play(*words, LD_PRELOAD="", QEMU_SET_ENV=preload, **environment)

    return played


def readelf(arm: Built, *options: str) -> str:
    return subprocess.run(["readelf", "-W", *options, arm.gate], capture_output=True, text=True, check=True).stdout


def test_the_library_is_as_undemanding_as_on_x86_64(arm: Built) -> None:
    assert "AArch64" in readelf(arm, "-h")
    assert re.findall(r"NEEDED.*\[(.*)\]", readelf(arm, "-d")) == ["libc.so.6"]
    assert set(re.findall(r"GLIBC_[0-9.]+|GLIBC_ABI\w+", readelf(arm, "-V"))) == {"GLIBC_2.17"}
    assert re.search(r"\bTLS\b", readelf(arm, "-l")) is None
    assert "RELR" not in readelf(arm, "-d")
    assert arm.gate.stat().st_size < 100 * 1024


def test_it_asks_libc_for_what_it_asks_on_x86_64_and_memset(arm: Built, built: Built) -> None:
    def wanted(library: Built) -> set[str]:
        return set(re.findall(r"(?:GLOBAL|WEAK)\s+\w+\s+UND (\w+)", readelf(library, "--dyn-syms")))

    assert wanted(arm) - wanted(built) <= {"memset"}


def test_the_two_builds_export_the_same(arm: Built, built: Built) -> None:
    def exported(library: Built) -> set[str]:
        return set(re.findall(r"(?:GLOBAL|WEAK)\s+DEFAULT\s+\d+ (\w+)", readelf(library, "--dyn-syms")))

    assert exported(arm) == exported(built)


def test_memory_is_charged_refused_and_given_back(machine: Machine, play: Callable[..., list[str]]) -> None:
    a = machine.slice("a", (0, 1024, None))
    words = [f"alloc:1000:{600 * MIB}", f"alloc:1000:{600 * MIB}", "free:0", "avail:1000", f"alloc:1000:{1000 * MIB}"]
    assert play(*words) == ["ok", "ENOMEM", "ok", f"ok {1024 * MIB}", "ok"]
    assert machine.used(a) == 1000 * MIB
    assert play("avail:1000") == [f"ok {1024 * MIB}"]  # the dead are found by their pid


def test_the_mask_is_set_on_a_queue_and_the_size_of_the_slice_is_shown(
    machine: Machine, play: Callable[..., list[str]]
) -> None:
    machine.slice("a", (0, 600, CuSet(tuple(range(76)))))
    bank = f"ok heap_type 1;size_in_bytes {600 * MIB};flags 0;width 8192;mem_clk_max 1300;"
    assert play("queue:1000", "bank:1") == ["ok 1", bank]
    assert [r for r in machine.requests() if r.startswith("SET_CU_MASK")] == [
        f"SET_CU_MASK queue=1 bits=320 mask={(1 << 76) - 1:080x} -> 0"
    ]


def test_a_slice_that_cannot_be_read_means_no_vram(machine: Machine, play: Callable[..., list[str]]) -> None:
    guest = machine.slice("a", (0, 600, None))
    (guest / "policy").unlink()
    assert play("alloc:1000:4096", "avail:1000") == ["ENOMEM", "ok 0"]


def test_the_unit_tests_pass(arm: Built, machine: Machine) -> None:
    machine.slice("a", (0, 600, CuSet(tuple(range(76)))), (1, 100, None))
    machine.slice("b", (0, 300, CuSet(tuple(range(80, 96)))))
    environment = {k: v for k, v in machine.environment().items() if k != "LD_PRELOAD"}
    unit = arm.drive.with_name("unit")
    done = subprocess.run([unit, "1", "1000", "tame"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
