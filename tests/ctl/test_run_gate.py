"""`amdvgpuctl run` with the real gate over the simulated KFD: the quota holds, whichever way the slice was delivered.

A small C program asks the KFD for VRAM in blocks of 256 MiB until it is refused. softkfd is an emulator: what is shown
is that every request of the command passes the gate, not what silicon does.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree
from tests.ctl.stand_ins import Start
from tests.ctl.test_run import AS_USER, WITHOUT_NAMESPACES

TAKER = """
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
struct alloc { uint64_t va, size, handle, mmap_offset; uint32_t gpu_id, flags; };
struct available { uint64_t bytes; uint32_t gpu_id, pad; };
int main(int argc, char **argv) {
    int kfd = open("/dev/kfd", O_RDWR | O_CLOEXEC), blocks = 0;
    if (kfd < 0) return perror("/dev/kfd"), 9;
    uint32_t gpu_id = strtoul(argv[argc - 1], NULL, 10);
    struct available left = {.gpu_id = gpu_id};
    ioctl(kfd, 0xc0104b23, &left);
    for (; blocks < 4096; blocks++) {
        struct alloc a = {.va = (1ull << 40) + ((uint64_t)blocks << 28), .size = 1 << 28, .gpu_id = gpu_id,
                          .flags = 0xb0000001};
        if (ioctl(kfd, 0xc0284b16, &a)) break;
    }
    printf("%llu MiB available, %d blocks, then %s\\n", (unsigned long long)left.bytes >> 20, blocks, strerror(errno));
    fflush(stdout);
    return argc > 2 ? system(argv[1]) : 0; /* holding all that it has got */
}
"""


@pytest.fixture(scope="module")
def machine(public_all_along: Path) -> Path:
    root = public_all_along / "machine"
    root.mkdir(mode=0o755)
    build_tree(parse_simulation("mi300x,rx9070xt"), root)
    return root


@pytest.fixture(scope="module")
def taker(public_all_along: Path) -> Path:
    program = public_all_along / "taker"
    subprocess.run(["gcc", "-O1", "-o", program, "-x", "c", "-"], input=TAKER, text=True, check=True)
    return program


def taken(
    start: Start, machine: Path, deliver: str, *command: str, prefix: tuple[str, ...] = (), vram: str = "4GiB"
) -> tuple[int, str, str]:
    options = ("--sysfs-root", str(machine), "--deliver", deliver, "--gpu", "0", "--vram", vram, "--compute", "25%")
    # /tmp, as a user namespace may not reach root's own runtime directory.
    process = start("run", "--standalone", *options, "--", *command, prefix=prefix, env={"XDG_RUNTIME_DIR": "/tmp"})
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err.rpartition("enforced by: ")[2]


@pytest.fixture(scope="module")
def gpu_id(machine: Path) -> str:
    return str(SysfsReader(machine).read_inventory().gpus[0].partitions[0].kfd_gpu_id)


HELD = "4096 MiB available, 16 blocks, then Cannot allocate memory\n"


def test_by_the_environment_the_quota_holds(start: Start, machine: Path, taker: Path, gpu_id: str) -> None:
    assert taken(start, machine, "environment", str(taker), gpu_id) == (0, HELD, "gate (environment)\n")


def test_the_quota_is_the_one_that_was_asked_for(start: Start, machine: Path, taker: Path, gpu_id: str) -> None:
    said = "1536 MiB available, 6 blocks, then Cannot allocate memory\n"
    assert taken(start, machine, "environment", str(taker), gpu_id, vram="1536MiB")[:2] == (0, said)


@pytest.mark.root
def test_by_mounts_the_quota_holds(start: Start, machine: Path, taker: Path, gpu_id: str) -> None:
    assert taken(start, machine, "mounts", str(taker), gpu_id) == (0, HELD, "gate\n")


@pytest.mark.root
def test_by_mounts_the_quota_holds_in_an_emptied_environment(
    start: Start, machine: Path, taker: Path, gpu_id: str
) -> None:
    command = ("env", "-i", f"SOFTKFD_ROOT={machine}", str(taker), gpu_id)
    assert taken(start, machine, "mounts", *command) == (0, HELD, "gate\n")


@pytest.mark.root
def test_a_child_of_the_command_shares_its_quota(start: Start, machine: Path, taker: Path, gpu_id: str) -> None:
    nothing = "0 MiB available, 0 blocks, then Cannot allocate memory\n"
    command = (str(taker), f"{taker} {gpu_id}", gpu_id)
    assert taken(start, machine, "mounts", *command) == (0, HELD + nothing, "gate\n")


@pytest.mark.root
def test_a_second_process_finds_what_the_first_has_left_by_ending(
    start: Start, machine: Path, taker: Path, gpu_id: str
) -> None:
    twice = f"{taker} {gpu_id}; {taker} {gpu_id}"
    assert taken(start, machine, "mounts", "sh", "-c", twice) == (0, HELD * 2, "gate\n")


@pytest.mark.root
def test_a_user_is_held_by_a_user_namespace(start: Start, machine: Path, taker: Path, gpu_id: str) -> None:
    Path("/run/amdvgpu").mkdir(exist_ok=True)
    (machine / "state").chmod(0o666)
    (machine / "dev" / "kfd").chmod(0o666)
    assert taken(start, machine, "mounts", str(taker), gpu_id, prefix=AS_USER) == (0, HELD, "gate\n")


@pytest.mark.root
def test_without_namespaces_the_environment_holds_it_and_says_so(
    start: Start, machine: Path, taker: Path, gpu_id: str
) -> None:
    code, out, by = taken(start, machine, "auto", str(taker), gpu_id, prefix=WITHOUT_NAMESPACES)
    why = "(a user namespace is not allowed here: user.max_user_namespaces is used up)"
    assert (code, out, by) == (0, HELD, f"gate (environment) {why}\n")
