"""The real ROCm user space over softkfd: both built from the sources of this tree, machines of models it knows."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from amdvgpud.core.cumask import layout_hash
from amdvgpud.core.model import Compute, ComputePolicy, CuSet, Inventory, Request, Share, Slice, slice_name
from amdvgpud.host.ledger import write_slice
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree
from tests.programs import SOFTKFD, compile_c, softkfd_in

HERE = Path(__file__).resolve().parent
HIP = ("-D__HIP_PLATFORM_AMD__", "-lamdhip64")


@pytest.fixture(scope="session")
def softkfd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return softkfd_in(tmp_path_factory.mktemp("softkfd"))


@pytest.fixture(scope="session")
def hiptest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(tmp_path_factory.mktemp("hiptest") / "hiptest", [HERE / "hiptest.c"], *HIP)


@pytest.fixture(scope="session")
def hipclient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(tmp_path_factory.mktemp("hipclient") / "hipclient", [SOFTKFD / "hipclient.c"], *HIP)


@dataclass(frozen=True)
class Ran:
    """What a program printed, how it ended, and what it asked of the KFD."""

    status: int
    out: str
    asked: list[dict[str, Any]]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]

    @property
    def masks(self) -> dict[int, set[int | None]]:
        """gpu_id -> CU counts set on its compute queues; None: a queue without a mask."""
        on_queue: dict[int, dict[int, int | None]] = {}
        for request in self.asked:
            if request["op"] == "CREATE_QUEUE" and request["type"] in (0, 2):
                on_queue.setdefault(request["gpu"], {})[request["q"]] = None
            elif request["op"] == "SET_CU_MASK" and not request["err"]:
                on_queue[request["gpu"]][request["q"]] = request["set"]
        return {gpu: set(counts.values()) for gpu, counts in on_queue.items()}


@dataclass(frozen=True)
class Machine:
    root: Path
    softkfd: Path
    bin: Path

    def run(self, program: Path | str, *arguments: str, **env: str) -> Ran:
        log = self.root / "log.jsonl"
        log.write_text("")
        path = f"{self.bin}:{os.environ['PATH']}"
        done = subprocess.run(
            [program, *arguments],
            env={"PATH": path, "SOFTKFD_ROOT": str(self.root), "LD_PRELOAD": str(self.softkfd), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        return Ran(done.returncode, done.stdout, [json.loads(line) for line in log.read_text().splitlines()])


@pytest.fixture(scope="module")
def mi210s(softkfd: Path) -> Iterator[Machine]:
    """Three MI210: a GPU that every packaged ROCm from 5.2 on knows."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        # Debian's rocminfo asks lsmod whether the driver is loaded; here it is not.
        bin_folder = Path(folder) / "bin"
        bin_folder.mkdir()
        (bin_folder / "lsmod").write_text('#!/bin/sh\necho "amdgpu 1 0"\n')
        (bin_folder / "lsmod").chmod(0o755)
        root = Path(folder) / "machine"
        build_tree(parse_simulation("3*mi210"), root)
        yield Machine(root, softkfd, bin_folder)


# ------------------------------------------------------------------------------------------- the matrix of runtimes

MIB = 1 << 20
SHIM = HERE.parents[1] / "shim"
RUNTIMES = ("5.2.3", "5.7.1", "6.4.3", "7.2.4")


def installed_runtime() -> str:
    """The version of this machine's own packages: 5.2.3 in Debian 12, 5.7.1 in Debian 13."""
    argv = ["dpkg-query", "--show", "--showformat=${Version}", "libamdhip64-dev"]
    found = re.match(r"[0-9.]+", subprocess.run(argv, capture_output=True, text=True, check=False).stdout)
    return found[0] if found and found[0] in RUNTIMES else RUNTIMES[0]


TABLE = HERE.parents[1] / "build" / "rocm.json"


def asked_runtimes() -> tuple[str, ...]:
    """``ROCM``: versions by commas, or ``all``. Without it the runtime that is installed here."""
    wanted = os.environ.get("ROCM", "") or installed_runtime()
    return RUNTIMES if wanted == "all" else tuple(wanted.split(","))


@dataclass(frozen=True)
class Between:
    """A figure that may lie anywhere in a range, both ends included."""

    low: float
    high: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (int, float)) and self.low <= other <= self.high

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.low} to {self.high}"


@dataclass(frozen=True)
class Runtime:
    """One ROCm user space: where it is, and the test programs built against it."""

    version: str
    root: Path
    parts: Path
    """Mounted in each bed: the gate, softkfd, the programs."""

    @property
    def number(self) -> tuple[int, ...]:
        return tuple(map(int, self.version.split(".")))

    @property
    def library(self) -> Path:
        where = self.root / "usr/lib/x86_64-linux-gnu"
        return next(p for p in sorted(where.glob("libamdhip64.so.[0-9]")))


def _gate(output: Path) -> None:
    """The gate with the flags and sources that shim/CMakeLists.txt gives it."""
    text = (SHIM / "CMakeLists.txt").read_text()
    words: list[str] = []
    for command in ("target_compile_options", "target_link_options"):
        found = re.search(rf"{command}\(amdvgpu PRIVATE ([^)]*)\)", text)
        assert found
        words += found[1].replace("${CMAKE_CURRENT_SOURCE_DIR}", str(SHIM)).split()
    listed = re.search(r"set\(AVG_GATE_SOURCES ([^)]*)\)", text)
    assert listed
    sources = [SHIM / name for name in listed[1].split()]
    compile_c(output, sources, *words, "-shared", "-fPIC", f"-I{SHIM / 'include'}")


def _code_object(output: Path) -> None:
    """An empty kernel and a variable of 64 MiB, for gfx90a; where there is no linker for it the cases say so."""
    linker = next((found for name in ("ld.lld", "ld.lld-15", "ld.lld-19") if (found := shutil.which(name))), None)
    if not shutil.which("clang") or not linker:
        return
    compiled = output.with_suffix(".o")
    target = ["--target=amdgcn-amd-amdhsa", "-mcpu=gfx90a", "-nogpulib", "-O1", "-x", "cl", "-cl-std=CL2.0"]
    subprocess.run(["clang", *target, "-c", str(HERE / "nothing.cl"), "-o", str(compiled)], check=True)
    subprocess.run([linker, "-shared", str(compiled), "-o", str(output)], check=True)


@pytest.fixture(scope="session", params=asked_runtimes())
def runtime(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    version: str = request.param
    root = Path("/")
    if version != installed_runtime():
        made = subprocess.run(
            [HERE.parents[1] / "scripts" / "rocm-root", version], stdout=subprocess.PIPE, text=True, check=True
        )
        root = Path(made.stdout.strip())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        parts = Path(folder)
        parts.chmod(0o755)
        here = Runtime(version, root, parts)
        include = [f"-I{root / 'usr/include'}"] if root != Path("/") else []
        _gate(parts / "libamdvgpu.so")
        softkfd_in(parts)
        compile_c(
            parts / "ways",
            [HERE / "ways.c"],
            *include,
            "-D__HIP_PLATFORM_AMD__",
            "-Wno-deprecated-declarations",
            "-rdynamic",
            str(here.library),
            "-Wl,--unresolved-symbols=ignore-in-shared-libs",
            "-ldl",
        )
        compile_c(parts / "kfdclient", [SOFTKFD / "kfdclient.c"])
        compile_c(parts / "elsewhere", [HERE / "elsewhere.c"], "-ldl")
        compile_c(
            parts / "libelsewhere.so",
            [],
            *("-shared", "-Wl,--no-as-needed", "-Wl,-rpath,/parts", "-Wl,--unresolved-symbols=ignore-in-shared-libs"),
            *(str(parts / "libsoftkfd.so"), str(here.library)),
        )
        _code_object(parts / "nothing.hsaco")
        # Debian's older rocminfo asks lsmod whether the driver is loaded; here it is not.
        (parts / "lsmod").write_text('#!/bin/sh\necho "amdgpu 1 0"\n')
        (parts / "lsmod").chmod(0o755)
        yield here


@dataclass
class Bed:
    """A machine, slices of it, and what programs in a container with these slices do."""

    runtime: Runtime
    folder: Path
    inventory: Inventory
    slices: list[str] = field(default_factory=list)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def machine(self) -> Path:
        return self.folder / "machine"

    def slice(self, name: str, *shares: tuple[int, int, CuSet | None]) -> None:
        """A slice with (partition index, quota in MiB, CUs) shares; every program started afterwards is in it."""
        made = []
        for index, vram_mib, cus in shares:
            partition = self.inventory.partitions[index]
            count = len(cus) if cus else partition.cu_count
            digest = layout_hash(partition.layout)
            made.append(Share(partition.id, vram_mib * MIB, cus, False, count, count, count, digest))
        request = Request(slice_name(name), Compute(ComputePolicy.BALANCED, percent=25), MIB, len(made))
        item = Slice(slice_name(name), request, tuple(made), 0.0, 1)
        write_slice(self.folder / "slices" / name, item, self.inventory, sysfs_root=self.machine)
        self.slices.append(name)

    def start(
        self,
        *words: str,
        gated: bool = True,
        slices: Sequence[str] | None = None,
        gpus: Sequence[int] | None = None,
        **env: str,
    ) -> subprocess.Popen[str]:
        """A program (``ways`` with words, or a path) in a container with these slices and GPUs; else with all."""
        minors = [p.render_minor for p in self.inventory.partitions]
        if gpus is not None:
            minors = [minors[i] for i in gpus]
        inside = tempfile.mkdtemp(dir=self.folder)
        for name in ("machine", "slices", "parts"):
            (Path(inside) / name).symlink_to(self.folder / name)
        (Path(inside) / "inside").mkdir()
        program = list(words) if words and words[0].startswith("/") else ["/parts/ways", *words]
        preloaded = "libamdvgpu.so libsoftkfd.so" if gated else "libsoftkfd.so"
        named = self.slices if slices is None else slices
        process = subprocess.Popen(
            [
                "sh",
                HERE / "enter.sh",
                self.runtime.root,
                inside,
                " ".join(named),
                " ".join(map(str, minors)),
                preloaded,
                *program,
            ],
            env={"PATH": "/parts:/usr/bin:/bin:/usr/sbin", "CODE_OBJECT": "/parts/nothing.hsaco", **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        """End what still runs (a case failed before it did)."""
        for process in self.started:
            process.kill()
            process.communicate(timeout=100)

    def run(self, *words: str, **how: Any) -> Ran:
        log = self.machine / "log.jsonl"
        log.write_text("")
        started = self.start(*words, **how)
        out, _ = started.communicate(timeout=100)
        return Ran(started.returncode, out, self.asked())

    def asked(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.machine / "log.jsonl").read_text().splitlines()]

    def used_mib(self, index: int = 0) -> int:
        """VRAM that the simulated KFD has handed out on that GPU now, after clearing up behind the dead."""
        subprocess.run(
            ["/bin/true"],
            env={
                "LD_PRELOAD": str(self.runtime.parts / "libsoftkfd.so"),
                "SOFTKFD_ROOT": str(self.machine),
                "SOFTKFD_REAP": "1",
            },
            check=True,
        )
        node = self.inventory.partitions[index].render_minor
        return int((self.machine / f"sys/class/drm/renderD{node}/device/mem_info_vram_used").read_text()) // MIB


def peak_mib(asked: Sequence[dict[str, Any]], gpu_id: int) -> int:
    """The most VRAM of a GPU that the requests that were granted held at one time, in whole MiB, rounded up."""
    held = most = 0
    for request in asked:
        if request.get("gpu") != gpu_id or request.get("err"):
            continue
        if request["op"] == "ALLOC" and "VRAM" in request["flags"]:
            held += request["size"]
            most = max(most, held)
        elif request["op"] == "FREE" and request["vram"]:
            held -= request["size"]
    return -(-most // MIB)


@pytest.fixture
def bed(runtime: Runtime) -> Iterator[Any]:
    """Makes beds: ``bed("2*mi210")``."""
    with ExitStack() as stack:

        def make(simulation: str) -> Bed:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            folder.chmod(0o755)
            (folder / "slices").mkdir()
            (folder / "parts").symlink_to(runtime.parts)
            build_tree(parse_simulation(simulation), folder / "machine")
            made = Bed(runtime, folder, SysfsReader(folder / "machine").read_inventory())
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture(scope="session")
def table() -> Iterator[dict[str, dict[str, dict[str, Any]]]]:
    """What each case wanted and got, by runtime and case; added to build/rocm.json at the end."""
    lines: dict[str, dict[str, dict[str, Any]]] = {}
    yield lines
    kept = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for version, cases in lines.items():
        kept[version] = kept.get(version, {}) | cases
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(json.dumps(kept, indent=1, sort_keys=True, default=repr) + "\n")


@pytest.fixture(scope="session")
def exports() -> Callable[[Path], set[str]]:
    """The names that a library exports, without their versions."""

    def read(library: Path) -> set[str]:
        listed = subprocess.run(
            ["readelf", "--dyn-syms", "--wide", str(library)], stdout=subprocess.PIPE, text=True, check=True
        )
        rows = [line.split() for line in listed.stdout.splitlines()]
        return {
            row[7].partition("@")[0]
            for row in rows
            if len(row) > 7
            and row[3] in ("FUNC", "OBJECT")
            and row[4] in ("GLOBAL", "WEAK")
            and row[6] not in ("UND", "ABS")
        }

    return read


@pytest.fixture(scope="session")
def shared() -> dict[str, Any]:
    """What the cases need of this file; test files cannot import one another."""
    return {"Between": Between, "peak_mib": peak_mib}
