"""What the library is to the dynamic linker of any image: small, undemanding, silent."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import amdvgpud._abi

if TYPE_CHECKING:
    from tests.shim.conftest import Built, Machine


def readelf(built: Built, *options: str) -> str:
    return subprocess.run(["readelf", "-W", *options, built.gate], capture_output=True, text=True, check=True).stdout


def test_it_needs_libc_and_nothing_else(built: Built) -> None:
    assert re.findall(r"NEEDED.*\[(.*)\]", readelf(built, "-d")) == ["libc.so.6"]


def test_its_symbol_versions_stay_at_the_floor(built: Built) -> None:
    assert set(re.findall(r"GLIBC_[0-9.]+|GLIBC_ABI\w+", readelf(built, "-V"))) <= {"GLIBC_2.2.5", "GLIBC_2.17"}


def test_the_hook_needs_no_library_of_the_host() -> None:
    """The host may have an older libc than the image that brought it, or musl."""
    hook = Path(amdvgpud._abi.__file__).with_name("amdvgpu-hook")
    said = subprocess.run(["readelf", "-Wdl", hook], capture_output=True, text=True, check=True).stdout
    assert ("NEEDED" in said, "INTERP" in said, "LOAD" in said) == (False, False, True)


def test_it_has_no_thread_local_storage_and_no_packed_relocations(built: Built) -> None:
    assert re.search(r"\bTLS\b", readelf(built, "-l")) is None
    assert "RELR" not in readelf(built, "-d")


def test_it_asks_libc_for_hardly_anything(built: Built) -> None:
    wanted = re.findall(r"(?:GLOBAL|WEAK)\s+\w+\s+UND (\w+)", readelf(built, "--dyn-syms"))
    optional = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__cxa_finalize"}
    assert set(wanted) - optional == {"__errno_location", "dl_iterate_phdr", "fileno", "environ", "__environ"}


def test_it_exports_what_the_version_script_lists_and_no_hip_name(built: Built) -> None:
    found = re.findall(r"(?:GLOBAL|WEAK)\s+DEFAULT\s+\d+ (\w+)", readelf(built, "--dyn-syms"))
    assert sorted(found) == [
        *("avg_first_copy", "fopen", "fopen64", "ioctl"),
        *("la_objopen", "la_symbind64", "la_version"),
    ]


def test_it_is_under_100_kib(built: Built) -> None:
    assert built.gate.stat().st_size < 100 * 1024


def test_a_program_without_a_gpu_starts_and_ends_as_ever(machine: Machine) -> None:
    machine.slice("a", (0, 600, None))
    program = [sys.executable, "-I", "-c", "import ssl, subprocess; print(subprocess.check_output(['true']))"]
    done = subprocess.run(program, env=machine.environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b''\n", "")


@pytest.mark.root
def test_it_opens_nothing_where_there_is_no_slice(machine: Machine) -> None:
    trace = machine.root / "trace"
    environment = {k: v for k, v in machine.environment().items() if k != "AMDVGPU_SLICE_DIR"}
    preload = environment.pop("LD_PRELOAD")
    traced = f"strace -o {trace} -E 'LD_PRELOAD={preload}' {machine.built.drive} env:X"
    command = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none /run && {traced}"]
    subprocess.run(command, env=environment, capture_output=True, check=True)
    lines = trace.read_text().splitlines()
    assert [ln for ln in lines if "amdvgpu" in ln and "libamdvgpu" not in ln and "execve" not in ln] == [
        'openat(AT_FDCWD, "/run/amdvgpu", O_RDONLY|O_CLOEXEC|O_DIRECTORY) = -1 ENOENT (No such file or directory)'
    ]
