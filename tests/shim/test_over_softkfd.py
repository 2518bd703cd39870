"""The gate before the emulated machine instead of the stub: what is handed out is counted by somebody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from amdvgpud.core.compute import parse_compute
from amdvgpud.core.model import Book, Request, Slice, slice_name
from amdvgpud.core.plan import place
from amdvgpud.host.ledger import write_slice
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree

if TYPE_CHECKING:
    from tests.shim.conftest import Built

MIB = 1 << 20
SOFTKFD = Path(__file__).resolve().parents[2] / "softkfd/src"

GEM = """
import fcntl, os, struct, sys
fd = os.open("/dev/dri/renderD128", os.O_RDWR)
def create(mib):
    asked = bytearray(struct.pack("4Q", mib << 20, 4096, 4, 0))
    fcntl.ioctl(fd, 0xC0206440, asked)
    return struct.unpack_from("I", asked)[0]
handle = create(600)
try:
    create(600)
except OSError as error:
    print(error.errno)
fcntl.ioctl(fd, 0x40086409, struct.pack("2I", handle, 0))
create(900)
told = (__import__("ctypes").c_uint64 * 12)()
fcntl.ioctl(fd, 0x40206445, struct.pack("QIIQQ", __import__("ctypes").addressof(told), 96, 0x19, 0, 0))
print(*(value >> 20 for value in told[:3]))
"""


@dataclass(frozen=True)
class Emulated:
    root: Path
    library: Path
    slice: Path
    log: Path

    def environment(self, gate: Path) -> dict[str, str]:
        self.log.write_text("")
        return {
            "PATH": os.environ["PATH"],
            "SOFTKFD_ROOT": str(self.root),
            "LD_PRELOAD": f"{gate} {self.library}",
            "AMDVGPU_SLICE_DIR": str(self.slice),
        }

    def asked(self, operation: str) -> list[dict[str, object]]:
        return [r for r in map(json.loads, self.log.read_text().splitlines()) if r["op"] == operation]


@pytest.fixture(scope="module")
def softkfd(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("softkfd") / "libsoftkfd.so"
    options = ["-Wno-format-truncation", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-ldl", "-lpthread"]
    built.cc([*map(str, sorted(SOFTKFD.glob("*.c"))), "-o", str(output), *options])
    return output


@pytest.fixture
def emulated(softkfd: Path) -> Iterator[Emulated]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root = Path(folder) / "machine"
        build_tree(parse_simulation("2*mi210"), root)
        inventory = SysfsReader(root).read_inventory()
        request = Request(slice_name("a"), parse_compute("25%", "balanced"), 1024 * MIB, on=("0",))
        guest = Path(folder) / "a"
        item = Slice(request.name, request, place(Book(), inventory, request).shares, 0.0, 1)
        write_slice(guest, item, inventory, sysfs_root=root)
        yield Emulated(root, softkfd, guest, root / "log.jsonl")


def test_gem_memory_that_an_emulated_driver_hands_out_is_held_to_the_quota(emulated: Emulated, built: Built) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", GEM],
        env=emulated.environment(built.gate),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "12\n1024 1024 900\n", "")
    sizes = [(r["size"], r["err"]) for r in emulated.asked("GEM_CREATE")]
    assert sizes == [(600 * MIB, 0), (900 * MIB, 0)]


@pytest.mark.rocm
@pytest.mark.parametrize("way", ["preload", "audit", "both", "no slice", "no slice, audit"])
def test_the_real_runtime_is_held_whichever_way_the_library_comes(
    emulated: Emulated, built: Built, tmp_path: Path, way: str
) -> None:
    client = tmp_path / "hipclient"
    built.cc(["-O1", "-D__HIP_PLATFORM_AMD__", str(SOFTKFD.parent / "hipclient.c"), "-o", str(client), "-lamdhip64"])
    environment = emulated.environment(built.gate)
    if "audit" in way:
        environment["LD_PRELOAD"] = str(emulated.library)
    if "audit" in way or way == "both":
        environment["LD_AUDIT"] = str(built.gate)
    cus = 24
    if "no slice" in way:
        del environment["AMDVGPU_SLICE_DIR"]
        environment |= {"AMDVGPU_VRAM": "1GiB", "AMDVGPU_CUS": "0-25", "XDG_RUNTIME_DIR": str(emulated.slice.parent)}
        cus = 26
    done = subprocess.run(
        [client, "--step", "256M", "--stream"], env=environment, capture_output=True, text=True, check=False
    )
    end = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, end["granted"]) == (0, 3)  # three and what the runtime takes for itself
    assert {r["set"] for r in emulated.asked("SET_CU_MASK")} == {cus}
    made = {r["q"] for r in emulated.asked("CREATE_QUEUE") if r["type"] in (0, 2)}
    assert {r["q"] for r in emulated.asked("SET_CU_MASK")} == made


@pytest.mark.rocm
def test_the_real_runtime_gets_host_memory_where_vram_is_out_and_no_more_than_the_quota(
    emulated: Emulated, built: Built, tmp_path: Path
) -> None:
    client = tmp_path / "hipclient"
    built.cc(["-O1", "-D__HIP_PLATFORM_AMD__", str(SOFTKFD.parent / "hipclient.c"), "-o", str(client), "-lamdhip64"])
    inventory = SysfsReader(emulated.root).read_inventory()
    book = Book().with_oversubscription({inventory.gpus[0].id: 2.0})
    quota = inventory.gpus[0].vram_bytes + (8 << 30)
    for oversubscribe, wanted in ((False, 7), (True, 8)):
        request = Request(slice_name("a"), parse_compute("25%"), quota, on=("0",), oversubscribe=oversubscribe)
        item = Slice(request.name, request, place(book, inventory, request).shares, 0.0, 1)
        write_slice(emulated.slice, item, inventory, sysfs_root=emulated.root)
        done = subprocess.run(
            [client, "--step", "8G"], env=emulated.environment(built.gate), capture_output=True, text=True, check=False
        )
        end = json.loads(done.stdout.splitlines()[-1])
        assert (done.returncode, end["granted"]) == (0, wanted)


@pytest.mark.rocm
def test_the_real_rocm_smi_shows_the_slice_and_what_it_uses_and_other_gpus_as_they_are(
    emulated: Emulated, built: Built, tmp_path: Path
) -> None:
    client = tmp_path / "kfdclient"
    built.cc(["-O1", str(SOFTKFD.parent / "kfdclient.c"), "-o", str(client)])
    environment = emulated.environment(built.gate)
    holder = subprocess.Popen(
        [client, "--step", "300M", "--count", "2", "--hold"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout
    while '"alloc"' not in holder.stdout.readline():
        pass
    holder.stdout.readline()
    done = subprocess.run(
        ["rocm-smi", "--showmeminfo", "vram", "--json"], env=environment, capture_output=True, text=True, check=False
    )
    holder.communicate("\n")
    shown = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    total, used = "VRAM Total Memory (B)", "VRAM Total Used Memory (B)"
    assert (shown["card0"][total], shown["card0"][used]) == (str(1024 * MIB), str(600 * MIB))
    assert int(shown["card1"][total]) > 60 << 30
