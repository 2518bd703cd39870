"""Every way in which the library comes into a process, and every way in which a caller comes to `ioctl`."""

from __future__ import annotations

import errno
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from amdvgpud.core.model import CuSet
from amdvgpud.core.render import preload_line

if TYPE_CHECKING:
    from tests.shim.conftest import Built, Machine

MIB = 1 << 20
SHIM = Path(__file__).resolve().parents[2] / "shim"
FITS, TOO_MUCH = 500 * MIB, 600 * MIB
HELD = f"0 {errno.ENOMEM}"
"""Answers to a request that fits and one that does not, where the gate is in the way of both."""
TO_THE_STUB = "0 0"
TO_THE_KERNEL = f"{errno.EBADF} {errno.EBADF}"
"""Past the gate, and past the stub behind it as well."""
HELD_BEFORE_THE_KERNEL = f"{errno.EBADF} {errno.ENOMEM}"
"""The gate was asked; what it let through went to the kernel, as the caller is bound to libc."""


RUST = """
use std::ffi::CString;
use std::os::raw::{c_char, c_int, c_ulong, c_void};
extern "C" {
    fn ioctl(fd: c_int, request: c_ulong, ...) -> c_int;
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}
#[repr(C)]
struct Alloc { va: u64, bytes: u64, handle: u64, offset: u64, gpu: u32, flags: u32 }
fn own(bytes: c_ulong) -> c_int {
    let mut asked = Alloc { va: 0, bytes: bytes as u64, handle: 0, offset: 0, gpu: 1000, flags: 0xb0000001 };
    if unsafe { ioctl(1000, 0xc0284b16, &mut asked as *mut Alloc) } == 0 { return 0; }
    std::io::Error::last_os_error().raw_os_error().unwrap()
}
fn main() {
    let words: Vec<String> = std::env::args().collect();
    for bytes in &words[3..] {
        let bytes: c_ulong = bytes.parse().unwrap();
        let error = if words[1] == "own" { own(bytes) } else {
            let (file, name) = (CString::new(words[2].as_str()).unwrap(), CString::new("probe").unwrap());
            unsafe {
                let found = dlsym(dlopen(file.as_ptr(), 2), name.as_ptr());
                assert!(!found.is_null());
                std::mem::transmute::<*mut c_void, extern "C" fn(c_ulong) -> c_int>(found)(bytes)
            }
        };
        print!("{} ", error);
    }
}
"""
"""``rust own|dlopen LIBRARY BYTES...``: asks by itself, or by a library that it opens, as bindings to ROCr do."""


@dataclass(frozen=True)
class Probes:
    library: Path
    program: Path
    no_plt: Path
    """The program without a PLT: addresses by relocation, as Rust programs have them too."""
    static: Path


@pytest.fixture(scope="session")
def probes(built: Built) -> Probes:
    where = built.gate.parent
    made = Probes(where / "libprobe.so", where / "probe", where / "probe-no-plt", where / "probe-static")
    source = str(SHIM / "tests/probe.c")
    built.cc(["-O1", "-shared", "-fPIC", "-Wno-unused-function", source, "-o", str(made.library)])
    built.cc(["-O1", "-DPROGRAM", source, "-o", str(made.program), "-ldl"])
    built.cc(["-O1", "-DPROGRAM", "-fno-plt", source, "-o", str(made.no_plt), "-ldl"])
    static = where / "static.c"
    static.write_text(
        f'#include "{source}"\n'
        'int main(int n, char **v) { for (int i = 3; i < n; i++) printf("%d ", probe(strtoul(v[i], 0, 0))); }\n'
    )
    built.cc(["-O1", "-static", "-Wno-unused-function", str(static), "-o", str(made.static)])
    return made


@pytest.fixture(scope="session")
def rust(built: Built) -> Path:
    made = built.gate.with_name("rust-probe")
    source = made.with_suffix(".rs")
    source.write_text(RUST)
    done = subprocess.run(
        ["rustc", "--edition", "2021", "-O", "-o", made, source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return made


def loaded_by(machine: Machine, way: str) -> dict[str, str]:
    gate, stub = str(machine.built.gate), str(machine.built.stub)
    environment = machine.environment()
    environment["LD_PRELOAD"] = stub if way == "audit" else f"{gate} {stub}"
    if way in ("audit", "both"):
        environment["LD_AUDIT"] = gate
    return environment


def ask(program: Path, environment: dict[str, str], how: str, library: Path, *sizes: int) -> str:
    command = [str(program), how, str(library), *map(str, sizes or (FITS, TOO_MUCH))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("way", "program", "how", "answers"),
    [
        ("preload", "program", "own", HELD),
        ("preload", "no_plt", "own", HELD),
        ("preload", "program", "deepbind", TO_THE_KERNEL),
        ("preload", "program", "dlmopen", TO_THE_KERNEL),
        ("preload", "program", "handle", TO_THE_KERNEL),
        ("audit", "program", "own", HELD),
        ("audit", "no_plt", "own", TO_THE_STUB),
        ("audit", "program", "deepbind", HELD_BEFORE_THE_KERNEL),
        ("audit", "program", "dlmopen", HELD_BEFORE_THE_KERNEL),
        ("audit", "program", "handle", HELD_BEFORE_THE_KERNEL),
        ("both", "program", "own", HELD),
        ("both", "no_plt", "own", HELD),
        ("both", "program", "deepbind", HELD),
        ("both", "program", "dlmopen", HELD_BEFORE_THE_KERNEL),
        ("both", "program", "handle", HELD),
    ],
)
def test_which_callers_each_way_of_loading_reaches(
    machine: Machine, probes: Probes, way: str, program: str, how: str, answers: str
) -> None:
    machine.slice("a", (0, 550, None))
    assert ask(getattr(probes, program), loaded_by(machine, way), how, probes.library) == answers


@pytest.mark.parametrize(
    ("way", "how", "answers"),
    [
        ("preload", "own", HELD),
        ("preload", "dlopen", HELD),
        ("audit", "own", TO_THE_STUB),
        ("audit", "dlopen", HELD),
        ("both", "own", HELD),
        ("both", "dlopen", HELD),
    ],
)
def test_a_rust_program_is_held_but_for_its_own_calls_under_audit_alone(
    machine: Machine, probes: Probes, rust: Path, way: str, how: str, answers: str
) -> None:
    machine.slice("a", (0, 550, None))
    assert ask(rust, loaded_by(machine, way), how, probes.library) == answers


@pytest.mark.parametrize("way", ["audit", "both"])
def test_loaded_twice_it_charges_once_and_in_any_namespace_for_the_same_slice(
    machine: Machine, probes: Probes, way: str
) -> None:
    a = machine.slice("a", (0, 550, None))
    environment = loaded_by(machine, way)
    assert ask(probes.program, environment, "own", probes.library, 300 * MIB, 300 * MIB) == HELD
    assert machine.used(a) == 300 * MIB
    machine.requests()
    # What the other namespace was refused by the kernel is charged to nobody; what the program took counts.
    assert ask(probes.program, environment, "twice", probes.library, 500 * MIB, 500 * MIB) == f"{errno.EBADF} 0"


@pytest.mark.parametrize("way", ["preload", "audit", "both"])
def test_each_way_serves_all_requests_alike(machine: Machine, way: str) -> None:
    a = machine.slice("a", (0, 1024, None))
    environment = loaded_by(machine, way)
    words = [
        "bank:1",
        f"alloc:1000:{600 * MIB}",
        f"alloc:1000:{600 * MIB}",
        "avail:1000",
        "free:0",
        "fork",
        "avail:1000",
    ]
    answers = machine.play(*words, **{k: v for k, v in environment.items() if k.startswith("LD_")})
    bank = f"ok heap_type 1;size_in_bytes {1024 * MIB};flags 0;width 8192;mem_clk_max 1300;"
    assert answers == [bank, "ok", "ENOMEM", f"ok {424 * MIB}", "ok", f"ok {1024 * MIB}"]
    assert machine.used(a) == 0


def test_an_audited_program_has_its_environment_repaired_and_masks_set(machine: Machine) -> None:
    machine.slice("a", (0, 600, CuSet(tuple(range(76)))))
    environment = {k: v for k, v in loaded_by(machine, "audit").items() if k.startswith("LD_")}
    assert machine.play("env:HSA_CU_MASK", "queue:1000", HSA_CU_MASK="0:0-75", **environment) == ["none", "ok 1"]
    assert [r.split()[0] for r in machine.requests()] == ["CREATE_QUEUE", "SET_CU_MASK"]


def test_a_copy_under_another_inode_beside_an_audited_one_charges_once(machine: Machine) -> None:
    a = machine.slice("a", (0, 1000, None))
    copy = machine.root / "copy.so"
    shutil.copy(machine.built.gate, copy)
    preload = f"{copy} {machine.built.stub}"
    assert machine.play(f"alloc:1000:{600 * MIB}", LD_PRELOAD=preload, LD_AUDIT=str(machine.built.gate)) == ["ok"]
    assert machine.used(a) == 600 * MIB


@pytest.mark.parametrize("way", ["preload", "audit", "both"])
def test_python_is_held_by_fcntl_and_by_ctypes(machine: Machine, way: str) -> None:
    machine.slice("a", (0, 550, None))
    program = """
import ctypes, fcntl, struct, sys
def ask(call, size):
    asked = bytearray(struct.pack("4QII", 0, size, 0, 0, 1000, 0xB0000001))
    try:
        return call(0, 0xC0284B16, asked) and ctypes.get_errno()
    except OSError as error:
        return error.errno
def by_ctypes(fd, request, asked):
    call = ctypes.CDLL(None, use_errno=True).ioctl
    return call(fd, ctypes.c_ulong(request), (ctypes.c_char * len(asked)).from_buffer(asked))
print(ask(fcntl.ioctl, 500 << 20), ask(fcntl.ioctl, 600 << 20), ask(by_ctypes, 600 << 20))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", program],
        env=loaded_by(machine, way),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("0 12 12\n", "")


def test_a_static_program_is_not_reached_and_not_harmed(machine: Machine, probes: Probes) -> None:
    machine.slice("a", (0, 550, None))
    assert ask(probes.static, loaded_by(machine, "both"), "own", probes.library) == TO_THE_KERNEL


def in_a_container(machine: Machine, command: str, preload: str) -> subprocess.CompletedProcess[str]:
    """``command`` with slice a mounted as a container has it, and an /etc/ld.so.preload of ``preload``."""
    work = machine.root / "overlay"
    work.mkdir(exist_ok=True)
    script = f"""
        set -e
        mount -t tmpfs none {work} && mkdir {work}/upper {work}/work
        mount -t overlay none -o lowerdir=/etc,upperdir={work}/upper,workdir={work}/work /etc
        mount -t tmpfs none /run && mkdir -p /run/amdvgpu/a && mount --bind {machine.root}/slices/a /run/amdvgpu/a
        mount -o remount,bind,ro /run/amdvgpu/a && mount --bind {machine.root}/slices/a/ledger /run/amdvgpu/a/ledger
        printf '%s\\n' '{preload}' > /etc/ld.so.preload
        exec {command}
    """
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def for_anybody(built: Built, probes: Probes) -> Iterator[Path]:
    """Gate, stub and program where any user may reach them, whatever becomes of pytest's own directories."""
    with tempfile.TemporaryDirectory(prefix="amdvgpu-", dir="/tmp") as folder:
        where = Path(folder)
        where.chmod(0o755)
        for file in (built.gate, built.stub, probes.program):
            shutil.copy(file, where)
        yield where


@pytest.mark.root
@pytest.mark.parametrize("how", ["", "env -i", "setpriv --reuid 1000 --clear-groups", "setuid"])
def test_the_file_reaches_programs_without_an_environment_and_privileged_ones(
    machine: Machine, for_anybody: Path, how: str
) -> None:
    machine.slice("a", (0, 550, None))
    program = for_anybody / "probe"
    if how == "setuid":
        program.chmod(0o4755)
        how = "setpriv --reuid 1000 --clear-groups env LD_PRELOAD=/nowhere.so AMDVGPU_VRAM=1 LD_AUDIT=/nowhere.so"
    preload = f"{for_anybody}/libamdvgpu.so {for_anybody}/libstubkfd.so"
    done = in_a_container(machine, f"{how} {program} own x {FITS} {TOO_MUCH}", preload)
    said = "\n".join(line for line in done.stderr.splitlines() if "/nowhere.so" not in line)
    assert (done.returncode, done.stdout.strip(), said) == (0, HELD, "")


STARTS = """
void _start(void) { __asm__("mov $1, %eax; mov $7, %ebx; int $0x80"); }
"""
"""A 32-bit program that its dynamic linker loads, and that then ends with 7; it needs no 32-bit libc to be built."""


@pytest.mark.root
def test_a_32_bit_program_starts_without_a_word_where_its_linker_finds_the_stand_in(machine: Machine) -> None:
    """By $PLATFORM, the linker's own word for what it loads; without, it complains of the other word size."""
    machine.slice("a", (0, 550, None))
    where = machine.built.gate.parent / "gates"
    for folder in ("lib32", "platform"):
        (where / folder).mkdir(parents=True)
    shutil.copy(machine.built.gate, where)
    machine.built.cc(
        ["-m32", "-shared", "-nostdlib", "-fPIC", str(SHIM / "src/stub32.c"), "-o", f"{where}/lib32/libamdvgpu.so"]
    )
    for name, target in runpy.run_path(str(SHIM.parent / "packaging/stage.py"))["PLATFORMS"].items():
        (where / "platform" / name).symlink_to(target)
    source, small = machine.root / "starts.c", machine.root / "starts"
    source.write_text(STARTS)
    linker = "-Wl,-dynamic-linker,/lib/ld-linux.so.2"
    machine.built.cc(["-m32", "-nostdlib", "-fPIE", "-pie", linker, str(source), "-o", str(small)])
    command = f"{machine.built.drive} alloc:1000:{TOO_MUCH}; {small}; echo $?"
    line = preload_line(f"{where}/libamdvgpu.so", by_platform=True)
    done = in_a_container(machine, f"sh -c '{command}'", line)
    assert (done.stdout, done.stderr) == (f"alloc:1000:{TOO_MUCH} -> ENOMEM\n7\n", "")
    done = in_a_container(machine, str(small), f"{where}/libamdvgpu.so")
    assert done.returncode == 7
    assert "wrong ELF class: ELFCLASS64" in done.stderr


def test_a_musl_program_is_held_by_ld_preload(machine: Machine) -> None:
    machine.slice("a", (0, 550, None))
    program, stub = machine.root / "musl-probe", machine.root / "libmuslstub.so"
    include = f"-I{SHIM / 'include'}"
    source = machine.root / "probe.c"
    source.write_text(
        f'#include "{SHIM / "tests/probe.c"}"\n#include <stdio.h>\n'
        'int main(int n, char **v) { for (int i = 1; i < n; i++) printf("%d ", probe(strtoul(v[i], 0, 0))); }\n'
    )
    subprocess.run(["musl-gcc", "-O1", "-D_GNU_SOURCE", "-w", include, source, "-o", program], check=True)
    answers = machine.root / "stub.c"
    answers.write_text("int ioctl(int fd, int request, ...) { return 0; }\n")
    subprocess.run(["musl-gcc", "-shared", "-fPIC", "-w", answers, "-o", stub], check=True)
    environment = {**machine.environment(), "LD_PRELOAD": f"{machine.built.gate}:{stub}"}
    done = subprocess.run(
        [program, str(FITS), str(TOO_MUCH)], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, HELD, "")
