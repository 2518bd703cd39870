"""What the gate costs, as records {"median", "unit", "limit", "ok", "runs"} for bench/run.py.

Each run is one difference: the figure with the gate less the figure without, taken right after one another, so that a
slow minute of the machine is in both. Requests are timed over a KFD that answers at once (``shim/tests/stub.c``, in
processor time) and through the real HIP over softkfd (wall time, the lowest tenth of the calls). No silicon is in it.
"""

from __future__ import annotations

import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import amdvgpud._abi
from amdvgpud.core.model import Book, Compute, ComputePolicy, Inventory, Request, Slice, slice_name
from amdvgpud.core.plan import place
from amdvgpud.host.ledger import write_slice
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree

REPOSITORY = Path(__file__).resolve().parents[1]
INSTALLED = Path(amdvgpud._abi.__file__).parent
MIB = 1 << 20
ROUNDS = 9
Figures = Iterator[tuple[str, dict[str, Any]]]
STARTS = 60
"""Programs started in each of the two ways for one run of a start figure."""


def record(runs: list[float], unit: str, limit: float) -> dict[str, Any]:
    median = statistics.median(runs)
    return {
        "median": round(median, 3),
        "unit": unit,
        "limit": limit,
        "ok": median <= limit,
        "runs": [round(run, 3) for run in runs],
    }


def lowest_tenth(values: list[float]) -> float:
    return statistics.median(sorted(values)[: max(1, len(values) // 10)])


@dataclass(frozen=True)
class Bed:
    """A simulated MI210 with one slice of 48 GiB, and the programs that are timed on it."""

    folder: Path
    inventory: Inventory
    gpu_id: int
    gate: Path

    def slice(self, name: str, vram_bytes: int) -> Path:
        request = Request(slice_name(name), Compute(ComputePolicy.BALANCED, percent=50), vram_bytes)
        granted = Slice(slice_name(name), request, place(Book(), self.inventory, request).shares, 0.0, 1)
        guest = self.folder / name
        write_slice(guest, granted, self.inventory, sysfs_root=self.folder / "machine")
        return guest

    def run(self, *command: str | Path | int, preload: list[Path], guest: Path | None = None, **more: str) -> str:
        """Standard output of a program, with the gate before ``preload`` where it is given a slice."""
        environment = {"PATH": os.environ["PATH"], "SOFTKFD_ROOT": str(self.folder / "machine"), **more}
        if guest:
            environment["AMDVGPU_SLICE_DIR"] = str(guest)
            preload = [self.gate, *preload]
        environment["LD_PRELOAD"] = " ".join(map(str, preload))
        return subprocess.run(
            list(map(str, command)), env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout


@contextmanager
def bed(gate: Path) -> Iterator[Bed]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="amdvgpud-bench-") as folder:
        where = Path(folder)
        build_tree(parse_simulation("mi210"), where / "machine")
        inventory = SysfsReader(where / "machine").read_inventory()
        gpu_id = next(iter(inventory.gpus)).partitions[0].kfd_gpu_id
        tests = REPOSITORY / "shim/tests"
        cc = ["cc", "-O2", "-D_GNU_SOURCE", f"-I{REPOSITORY / 'shim/include'}"]
        for command in (
            [*cc, "-shared", "-fPIC", tests / "stub.c", "-o", where / "stub.so", "-ldl"],
            [*cc, tests / "bench.c", "-o", where / "pairs"],
            [*cc, "-pthread", tests / "contend.c", "-o", where / "contend"],
            [
                *cc,
                "-pthread",
                "-D__HIP_PLATFORM_AMD__",
                REPOSITORY / "bench/hip.c",
                "-o",
                where / "hiptime",
                "-lamdhip64",
            ],
        ):
            subprocess.run(list(map(str, command)), check=True)
        yield Bed(where, inventory, gpu_id, gate)


# ----------------------------------------------------------------------------------------- requests over the stub KFD


def stub_figures(made: Bed) -> Figures:
    guest, stub = made.slice("stub", 48 << 30), [made.folder / "stub.so"]
    loops = 100_000

    def once(neighbours: int, slice_: Path | None) -> dict[str, float]:
        words: list[str | Path | int] = [made.folder / "pairs", made.gpu_id, 4096, loops, neighbours]
        best: dict[str, float] = {}
        for _ in range(3):
            found: dict[str, float] = json.loads(made.run(*words, preload=stub, guest=slice_))
            best = {key: min(value, best.get(key, value)) for key, value in found.items()}
        return best

    pair, crowded, other = [], [], []
    for _ in range(ROUNDS):
        without, with_, with_64 = once(0, None), once(0, guest), once(64, guest)
        pair.append(with_["pair_ns"] - without["pair_ns"])
        crowded.append(with_64["pair_ns"] - without["pair_ns"])
        other.append(with_["other_ns"] - without["other_ns"])
    yield "gate: ALLOC+FREE", record(pair, "ns", 120)
    yield "gate: ALLOC+FREE, 64 live slots", record(crowded, "ns", 250)
    yield "gate: ioctl of another device", record(other, "ns", 5)


def contention_figures(made: Bed) -> Figures:
    """A million small admissions by six threads in three processes, beside a neighbour who asks for too much."""
    guest, held = made.slice("contended", 1 << 30), made.folder / "held"
    held.write_bytes(struct.pack("<4Q", 1 << 30, 0, 0, 0).ljust(4096, b"\0"))
    words: list[str | Path | int] = [made.folder / "contend", "mixed", made.gpu_id, 4, 2, 166_700, MIB, 1012 * MIB]
    said = made.run(*words, preload=[made.folder / "stub.so"], guest=guest, STUB_HELD=str(held))
    refused, done = map(int, said.split())
    over = struct.unpack_from("<4Q", held.read_bytes())[2]
    assert done + refused >= 1_000_000
    yield "gate: false refusals in 1,000,000 contended admissions", record([refused], "", 0)
    yield "gate: over-commits in 1,000,000 contended admissions", record([over], "", 0)


# ------------------------------------------------------------------------------------------- the real HIP over softkfd


def hip_figures(made: Bed) -> Figures:
    guest, softkfd = made.slice("hip", 48 << 30), [INSTALLED / "libsoftkfd.so"]

    def timed(*words: str | int, gate: bool) -> float:
        return float(made.run(made.folder / "hiptime", *words, preload=softkfd, guest=guest if gate else None))

    def differences(*words: str | int, percent: bool = False) -> list[float]:
        runs = []
        for _ in range(ROUNDS):
            without, with_ = timed(*words, gate=False), timed(*words, gate=True)
            runs.append((with_ / without - 1) * 100 if percent else with_ - without)
        return runs

    pairs = "gate: hipMalloc+hipFree, "
    yield pairs + "4 KiB", record(differences("pairs", 4096, 20_000), "ns", 50)
    yield pairs + "2 MiB", record(differences("pairs", 2 * MIB, 2000, percent=True), "%", 2)
    yield pairs + "64 MiB", record(differences("pairs", 64 * MIB, 2000, percent=True), "%", 2)
    many = ", 8 threads in 4 processes"
    yield pairs + "4 KiB" + many, record(differences("pairs", 4096, 5000, 4, 2), "ns", 50)
    yield pairs + "2 MiB" + many, record(differences("pairs", 2 * MIB, 500, 4, 2, percent=True), "%", 2)
    yield "gate: hipMemGetInfo", record(differences("info", 20_000), "ns", 500)
    starts, processor = start_differences(made, [made.folder / "hiptime", "start"], softkfd, guest, starts=10)
    yield "gate: start of a HIP program", record(starts, "ms", 1.5)
    yield "gate: start of a HIP program, processor time", record(processor, "ms", 1.5)


# --------------------------------------------------------------------------------------------------------------- starts


def spawned(command: list[str | Path], environment: dict[str, str]) -> tuple[float, float]:
    """Wall and processor milliseconds of one program, from its start to its end."""
    start = time.perf_counter()
    child = os.posix_spawn(command[0], list(map(str, command)), environment)
    _, status, used = os.wait4(child, 0)
    wall = (time.perf_counter() - start) * 1000
    if status:
        raise SystemExit(f"bench: {command[0]} ended with {status}")
    return wall, (used.ru_utime + used.ru_stime) * 1000


def start_differences(
    made: Bed, command: list[str | Path], preload: list[Path], guest: Path | None, *, starts: int = STARTS
) -> tuple[list[float], list[float]]:
    """Wall and processor milliseconds more with the gate: of the lowest tenth of interleaved starts, one a round."""
    base = {"PATH": os.environ["PATH"], "SOFTKFD_ROOT": str(made.folder / "machine")}
    plain = {**base, "LD_PRELOAD": " ".join(map(str, preload))}
    gated = {**base, "LD_PRELOAD": " ".join(map(str, [made.gate, *preload]))}
    if guest:
        gated["AMDVGPU_SLICE_DIR"] = str(guest)
    walls, processors = [], []
    for _ in range(ROUNDS):
        without, with_ = [], []
        for _ in range(starts):
            without.append(spawned(command, plain))
            with_.append(spawned(command, gated))
        walls.append(lowest_tenth([w for w, _ in with_]) - lowest_tenth([w for w, _ in without]))
        processors.append(lowest_tenth([c for _, c in with_]) - lowest_tenth([c for _, c in without]))
    return walls, processors


def start_figures(made: Bed) -> Figures:
    in_slice = start_differences(made, ["/bin/true"], [], made.slice("start", 1 << 30))
    outside = start_differences(made, ["/bin/true"], [], None)
    yield "gate: start of /bin/true in a slice", record(in_slice[0], "ms", 1)
    yield "gate: start of /bin/true in a slice, processor time", record(in_slice[1], "ms", 1)
    yield "gate: start of /bin/true without a slice", record(outside[0], "ms", 1)


def figures(gate: Path = INSTALLED / "libamdvgpu.so") -> Figures:
    """All of them by name, as they come. About three minutes."""
    with bed(gate) as made:
        for group in (stub_figures, contention_figures, start_figures, hip_figures):
            yield from group(made)


if __name__ == "__main__":  # by itself, and for another build of the gate: gate.py [PATH]
    for name, entry in figures(*map(Path, sys.argv[1:])):
        verdict = "ok  " if entry["ok"] else "OVER"
        print(f"{verdict} {name:60} {entry['median']:9.3f} {entry['unit']} (limit {entry['limit']:g})")
