"""What the gate's tests share: the library built from source, a KFD that answers at once, slices on disk, a player.

Nothing installed is tested here: all is compiled once a session from ``shim/``, with the flags that
``shim/CMakeLists.txt`` gives the library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from amdvgpud._abi import ffi, lib
from amdvgpud.core.cumask import layout_hash
from amdvgpud.core.model import (
    Compute,
    ComputePolicy,
    CuLayout,
    CuSet,
    Gpu,
    GpuId,
    Inventory,
    Partition,
    PartitionId,
    Priority,
    Request,
    Share,
    Slice,
    slice_name,
)
from amdvgpud.host.ledger import write_slice

SHIM = Path(__file__).resolve().parents[2] / "shim"
MIB = 1 << 20


@dataclass(frozen=True)
class Built:
    """The compiled parts. ``cc`` compiles more."""

    gate: Path
    gate_fdinfo: Path
    """The same, but for where it reads the kernel's numbers of openings: from ``fdinfo`` beside it."""
    stub: Path
    drive: Path
    contend: Path
    pure: Path
    cc: Callable[[Sequence[str]], None]


def gate_flags() -> list[str]:
    """Compile and link options of the library, read from its CMakeLists.txt: one place to change them."""
    text = (SHIM / "CMakeLists.txt").read_text()
    found: list[str] = []
    for command in ("target_compile_options", "target_link_options"):
        match = re.search(rf"{command}\(amdvgpu PRIVATE ([^)]*)\)", text)
        assert match, f"{command} of amdvgpu has gone from shim/CMakeLists.txt"
        found += match[1].replace("${CMAKE_CURRENT_SOURCE_DIR}", str(SHIM)).split()
    return found


def gate_sources() -> list[str]:
    match = re.search(r"set\(AVG_GATE_SOURCES ([^)]*)\)", (SHIM / "CMakeLists.txt").read_text())
    assert match
    return [str(SHIM / name) for name in match[1].split()]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    where = tmp_path_factory.mktemp("shim")
    where.parent.chmod(0o755)
    where.chmod(0o755)  # a test runs the player as another user
    for parent in where.parents:
        if parent.owner() == "root" and parent != Path("/") and parent.stat().st_mode & 0o077 == 0:
            parent.chmod(0o711)
    compiler = os.environ.get("CC") or shutil.which("cc") or "cc"

    def cc(arguments: Sequence[str]) -> None:
        base = [compiler, "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", f"-I{SHIM / 'include'}"]
        done = subprocess.run([*base, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    made = Built(
        gate=where / "libamdvgpu.so",
        gate_fdinfo=where / "fdinfo-gate.so",
        stub=where / "libstubkfd.so",
        drive=where / "drive",
        contend=where / "contend",
        pure=where / "libpure.so",
        cc=cc,
    )
    tests = SHIM / "tests"
    cc([*gate_flags(), "-shared", "-fPIC", *gate_sources(), "-o", str(made.gate)])
    elsewhere = f'-DAVG_FDINFO="{where}/fdinfo/"'
    cc([elsewhere, *gate_flags(), "-shared", "-fPIC", *gate_sources(), "-o", str(made.gate_fdinfo)])
    cc(["-O1", "-shared", "-fPIC", str(tests / "stub.c"), "-o", str(made.stub), "-ldl"])
    cc(["-O1", "-pthread", str(tests / "drive.c"), "-o", str(made.drive)])
    cc(["-O1", "-pthread", str(tests / "contend.c"), "-o", str(made.contend)])
    cc(["-O1", "-shared", "-fPIC", str(tests / "pure.c"), "-o", str(made.pure)])
    return made


@dataclass
class Machine:
    """Two simulated GPUs (gpu_id 1000 and 1001: 304 CUs on 8 XCCs, 16 GiB) and slices of them on disk."""

    built: Built
    root: Path
    directories: list[Path] = field(default_factory=list)
    layout: CuLayout = field(default_factory=lambda: CuLayout(8, 4, 1, (10, 9, 10, 9) * 8, wgp=False))

    @property
    def inventory(self) -> Inventory:
        gpus = []
        for i in range(2):
            partition = Partition(
                id=PartitionId(f"GPU-{i:016x}/0"),
                gpu=GpuId(f"GPU-{i:016x}"),
                index=0,
                kfd_node=i + 1,
                kfd_gpu_id=1000 + i,
                render_minor=128 + i,
                vram_bytes=16 << 30,
                layout=self.layout,
                gfx_target="gfx942",
                unique_id=i + 1,
            )
            name = f"0000:0{i}:00.0"
            gpus.append(
                Gpu(partition.gpu, i, name, i, None, 0x74A1, 0, "sim", "gfx942", 16 << 30, partitions=(partition,))
            )
        return Inventory(tuple(gpus))

    def slice(
        self,
        name: str,
        *shares: tuple[int, int, CuSet | None],
        priority: Priority = Priority.NORMAL,
        oversubscribe: bool = False,
    ) -> Path:
        """The guest directory of a slice with (GPU index, quota in MiB, CUs) shares; written anew if it exists."""
        made = []
        for index, vram_mib, cus in shares:
            count = len(cus) if cus else self.layout.cu_count
            partition = PartitionId(f"GPU-{index:016x}/0")
            digest = layout_hash(self.layout)
            made.append(Share(partition, vram_mib * MIB, cus, False, count, count, count, digest))
        request = Request(
            slice_name(name),
            Compute(ComputePolicy.BALANCED, percent=25),
            MIB,
            len(made),
            priority=priority,
            oversubscribe=oversubscribe,
        )
        directory = self.root / "slices" / name
        directory.parent.mkdir(exist_ok=True)
        directory.parent.chmod(0o755)
        write_slice(
            directory, Slice(slice_name(name), request, tuple(made), 0.0, 1), self.inventory, sysfs_root=self.root
        )
        if directory not in self.directories:
            self.directories.append(directory)
        return directory

    def environment(self, **more: str) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "LD_PRELOAD": f"{self.built.gate} {self.built.stub}",
            "AMDVGPU_SLICE_DIR": ":".join(map(str, self.directories)),
            "STUB_LOG": str(self.root / "requests"),
            "STUB_ROOT": str(self.root),
            **more,
        }

    def play(self, *words: str, **environment: str) -> list[str]:
        """What came back for each word, without the word: ``ok``, ``ok <value>`` or the name of an errno."""
        return self.play_all(*words, **environment)[0]

    def play_all(self, *words: str, **environment: str) -> tuple[list[str], str]:
        done = subprocess.run(
            [self.built.drive, *words], env=self.environment(**environment), capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, -9), (done.returncode, done.stdout, done.stderr)
        return [line.partition(" -> ")[2] for line in done.stdout.splitlines()], done.stderr

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """A player that stands at its ``stop`` word (already there when this returns)."""
        started = subprocess.Popen(
            [self.built.drive, *words],
            env=self.environment(**environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert started.stdout
        for line in started.stdout:
            if line == "ready\n":
                return started
        raise AssertionError("the player ended before its stop")

    def requests(self) -> list[str]:
        """What reached the driver, one line a request; cleared by reading."""
        log = self.root / "requests"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines

    def used(self, directory: Path, gpu: int = 0) -> int:
        """Bytes charged over all slots of GPU ``gpu`` of the slice, read as any stranger would."""
        return sum(used for _, used in self.slots(directory, gpu))

    def slots(self, directory: Path, gpu: int = 0) -> list[tuple[int, int]]:
        """(pid, bytes charged) of each owned slot."""
        raw = (directory / "ledger").read_bytes()
        count = ffi.from_buffer("struct avg_ledger *", raw[: lib.AVG_LEDGER_HEAD_BYTES]).gpu_count
        found = []
        for slot in range(lib.AVG_SLOTS):
            at = lib.AVG_LEDGER_HEAD_BYTES + slot * lib.avg_slot_bytes(count)
            owner = int.from_bytes(raw[at : at + 8], "little") & lib.AVG_OWNER_PID_MASK
            cell = at + lib.AVG_SLOT_HEAD_BYTES + gpu * lib.AVG_CELL_BYTES
            if owner:
                found.append((owner, int.from_bytes(raw[cell : cell + 8], "little")))
        return found


@pytest.fixture
def machine(built: Built, tmp_path: Path) -> Machine:
    tmp_path.chmod(0o755)
    for node in (1, 2):
        place = tmp_path / f"sys/devices/virtual/kfd/kfd/topology/nodes/{node}"
        (place / "mem_banks/0").mkdir(parents=True)
        (place / "properties").write_text("cpu_cores_count 0\nsimd_count 1216\nsimd_per_cu 4\n")
        (place / "mem_banks/0/properties").write_text(
            f"heap_type 1\nsize_in_bytes {16 << 30}\nflags 0\nwidth 8192\nmem_clk_max 1300\n"
        )
    return Machine(built, tmp_path)
