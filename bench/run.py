"""What the README claims, measured: build/bench.json {"<name>": {"median", "unit", "limit", "ok", "runs"}}.

Medians of interleaved rounds: each round runs every benchmark once, so that a slow minute of the machine is spread over
all of them. Exits non-zero if a figure is over its limit. Needs root: the slices' own tmpfs is measured with them.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import amdvgpud._abi
from amdvgpud.core.model import (
    Book,
    Compute,
    ComputePolicy,
    CuLayout,
    Gpu,
    GpuId,
    Inventory,
    Partition,
    PartitionId,
    Request,
    Slice,
    slice_name,
)
from amdvgpud.core.plan import place
from amdvgpud.host.health import SysfsHealth
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree

HOOK = Path(amdvgpud._abi.__file__).with_name("amdvgpu-hook")
REPOSITORY = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
GIB = 1024**3
ROUNDS = 5
CREATES = 100
"""Slices made per round: the 99th percentile of these is one figure."""
WARM_UP = 20
"""Requests that are not counted, before those that are: a virtual machine's processor takes tens of milliseconds to
answer anything, /healthz included, after half a second of idling. That is told of the machine, not of the daemon."""


@dataclass
class Benchmark:
    name: str
    unit: str
    limit: float
    once: Callable[[], float]
    runs: list[float] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------------ the daemon


class Daemon:
    """A real amdvgpud on a simulated node, with directories of its own."""

    def __init__(self, node: str) -> None:
        """Its machine is there before it starts, as a real one's is: the kernel makes sysfs, not the daemon."""
        # State on the disk that users have, sockets and slices on a tmpfs as /run is.
        (REPOSITORY / "build").mkdir(exist_ok=True)
        self.state = Path(tempfile.mkdtemp(dir=REPOSITORY / "build", prefix="bench-"))
        self.run = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="amdvgpud-bench-"))
        build_tree(parse_simulation(node), self.run / "simulated")
        self.started_s = time.perf_counter()
        self.process = subprocess.Popen(
            [
                BIN / "amdvgpud",
                *(
                    "--simulate",
                    node,
                    "--run-dir",
                    self.run,
                    "--state-dir",
                    self.state,
                    "--cdi-dir",
                    self.state / "cdi",
                ),
                *("--rest-tcp", "", "--log-level", "error", "--max-slices-per-partition", "128"),
            ]
        )

    def wait_ready(self) -> float:
        """Seconds from the start of the process to the first yes of /readyz."""
        while self.process.poll() is None:
            try:
                if self.ask("GET", "/readyz")[0] == 200:
                    return time.perf_counter() - self.started_s
            except OSError:
                time.sleep(0.002)
        raise SystemExit(f"amdvgpud ended with {self.process.returncode} before it was ready")

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        with connection.sock as line:
            line.connect(str(self.run / "api.sock"))
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, path, content, {"Content-Type": "application/json"} if content else {})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def put_slice(self, name: str, **spec: object) -> None:
        status, answer = self.ask("PUT", f"/v1/slices/{name}", spec)
        if status not in (200, 201):
            raise SystemExit(f"PUT {name}: {status} {answer.decode()}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(10)
        subprocess.run(["umount", "-l", self.run / "slices"], check=False, capture_output=True)
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.rmtree(self.state, ignore_errors=True)


@contextmanager
def daemon(node: str) -> Iterator[Daemon]:
    made = Daemon(node)
    try:
        made.wait_ready()
        yield made
    finally:
        made.stop()


# --------------------------------------------------------------------------------------------------- the benchmarks


def cold_start_s() -> float:
    made = Daemon("8*mi300x:mode=CPX")
    try:
        return made.wait_ready()
    finally:
        made.stop()


def placement_ms() -> float:
    """One placement on 8 GPUs with 64 slices each."""
    gpus = tuple(_gpu(i) for i in range(8))
    inventory, book = Inventory(gpus), Book()
    for i in range(8 * 64):
        name = slice_name(f"s{i}")
        request = Request(name, Compute(ComputePolicy.SHARED, percent=10), GIB, on=(str(i % 8),))
        book = book.with_slice(Slice(name, request, place(book, inventory, request).shares, 0.0, 1))
    request = Request(slice_name("new"), Compute(ComputePolicy.SHARED, percent=10), GIB)
    took = []
    for _ in range(50):
        start = time.perf_counter()
        place(book, inventory, request)
        took.append(time.perf_counter() - start)
    return statistics.median(took) * 1000


def _gpu(index: int) -> Gpu:
    gpu = GpuId(f"GPU-{index + 1:016x}")
    layout = CuLayout(8, 4, 1, (10, 10, 9, 9) * 8, wgp=False)
    partition = Partition(
        PartitionId(f"{gpu}/0"), gpu, 0, index + 1, index + 1, 128 + index, 192 * GIB, layout, "gfx942", index + 1
    )
    address = f"0000:{index + 1:02x}:00.0"
    return Gpu(gpu, index, address, index + 1, None, 0x74A1, 0, "MI300X", "gfx942", 192 * GIB, (partition,))


def create_p99_ms() -> float:
    """The 99th percentile of making a slice by REST: placed, on disk, files written, CDI file replaced."""
    with daemon("2*mi300x,rx9070xt") as made:
        took = []
        for i in range(WARM_UP + CREATES):
            start = time.perf_counter()
            made.put_slice(f"s{i}", compute="10%", policy="shared", vram="1GiB")
            took.append(time.perf_counter() - start)
        return statistics.quantiles(took[WARM_UP:], n=100)[98] * 1000


class BusyNode:
    """8 GPUs with 64 slices each, made once and asked in every round."""

    def __init__(self) -> None:
        self.made = Daemon("8*mi300x")
        self.made.wait_ready()
        self.idle_rss_mib = self.rss_mib()
        for i in range(8 * 64):
            self.made.put_slice(f"s{i}", compute="10%", policy="shared", vram="1GiB", on=[str(i % 8)])

    def rss_mib(self) -> float:
        status = Path(f"/proc/{self.made.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def metrics_ms(self) -> float:
        """The median of some scrapes."""
        took = []
        for _ in range(WARM_UP * 2):
            start = time.perf_counter()
            status, _ = self.made.ask("GET", "/metrics")
            assert status == 200
            took.append(time.perf_counter() - start)
        return statistics.median(took[WARM_UP:]) * 1000

    def hook_ms(self) -> float:
        """A container's start told by the hook, process and all: what a start of one takes longer by, for each slice.

        The container is a process with the slice mounted as runtimes mount it; the daemon looks it up in /proc.
        """
        inside = (
            "mount -t tmpfs tmpfs /run && mkdir -p /run/amdvgpu/s0 && mount --bind $0/slices/s0/guest /run/amdvgpu/s0 "
            "&& echo ready && exec sleep 600"
        )
        command = ["unshare", "--mount", "--propagation=private", "sh", "-c", inside, str(self.made.run)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as container:
            assert container.stdout is not None
            assert container.stdout.readline() == b"ready\n"
            state = json.dumps({"id": "bench", "pid": container.pid, "bundle": "/nowhere"}).encode()
            hook = [
                str(HOOK),
                "start",
                "s0",
                "--socket",
                str(self.made.run / "report.sock"),
                "--require",
                "--wait",
                "5000",
            ]
            took = []
            for _ in range(WARM_UP * 2):
                start = time.perf_counter()
                subprocess.run(hook, input=state, check=True)
                took.append(time.perf_counter() - start)
            known = self.made.ask("GET", "/v1/slices/s0")[1]
            container.kill()
        assert b'"id":"bench"' in known, "the report was not believed"
        return statistics.median(took[WARM_UP:]) * 1000


def idle_rss_mib() -> float:
    with daemon("8*mi300x:mode=CPX") as made:
        time.sleep(3)  # past a first tick: what it needs while nothing happens
        status = Path(f"/proc/{made.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024


def look_ms() -> float:
    """Each render node opened, each error counter read: what a pulse costs, but for the child that opens /dev/kfd."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root = Path(folder) / "machine"
        build_tree(parse_simulation("8*mi300x-cpx"), root)
        inventory = SysfsReader(root).read_inventory()
        for gpu in inventory.gpus:
            ras = root / "sys/bus/pci/devices" / gpu.pci_address / "ras"
            ras.mkdir()
            for block in range(16):
                (ras / f"block{block}_err_count").write_text("ue: 0\nce: 0\n")
        began_s = time.perf_counter()
        asyncio.run(SysfsHealth(root).examine(inventory))
        return (time.perf_counter() - began_s) * 1000


class Faults:
    """How soon a fault shows in API and metrics alike: a daemon with a pulse of 1 s, in a corner of its own."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def wedged_s(self) -> float:
        command = ["unshare", "--net", "--mount", sys.executable, "-m", "tests.health_corner"]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        self._seen = json.loads(done.stdout)
        return self._seen["wedged_s"]

    def scans(self) -> float:
        command = ["unshare", "--net", "--mount", sys.executable, "-m", "tests.health_corner", "scans"]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        seen: dict[str, float] = json.loads(done.stdout)
        return seen["scans"]

    def unplugged_s(self) -> float:
        return self._seen["unplugged_s"]

    def without_event_s(self) -> float:
        return self._seen["without_event_s"]


def show(name: str, entry: dict[str, Any]) -> None:
    verdict = "ok  " if entry["ok"] else "OVER"
    print(f"{verdict} {name:57} {entry['median']:9.3f} {entry['unit']} (limit {entry['limit']:g})", flush=True)


def main() -> int:
    if os.geteuid() != 0:
        print("make bench: run it as root; the slices' own tmpfs is part of what is measured", file=sys.stderr)
        return 2
    sys.path.append(str(REPOSITORY))
    from bench import gate, kubelet, pods
    from bench.looks import MadeMachine

    busy, faults, made = BusyNode(), Faults(), MadeMachine()
    benchmarks = [
        Benchmark("cold start to ready, 8 GPUs in CPX", "s", 1.0, cold_start_s),
        Benchmark("one placement, 8 GPUs x 64 slices", "ms", 2.0, placement_ms),
        Benchmark("create a slice by REST, p99", "ms", 25.0, create_p99_ms),
        Benchmark("/metrics, 8 GPUs x 64 slices", "ms", 30.0, busy.metrics_ms),
        Benchmark("one look at 8 GPUs in CPX", "ms", 50.0, look_ms),
        Benchmark("a container's start told by amdvgpu-hook", "ms", 5.0, busy.hook_ms),
        Benchmark("a GPU that its driver gives up, from the uevent", "s", 1.0, faults.wedged_s),
        Benchmark("a GPU that is unplugged, from the uevent", "s", 1.0, faults.unplugged_s),
        Benchmark("a GPU that breaks without an event, pulse of 1 s", "s", 1.2, faults.without_event_s),
        Benchmark("scans for 1000 uevents, one each 0.9 ms", "", 1.0, faults.scans),
        Benchmark("resident memory, idle, 8 GPUs in CPX", "MiB", 70.0, idle_rss_mib),
        # At the default period (kernel.sample_s, 10 s) this is a hundredth of a core; a dearer look comes less often.
        Benchmark("a look at the kernel's figures, 8 GPUs, 500 processes", "ms", 100.0, made.sample_ms),
    ]
    try:
        for _ in range(ROUNDS):
            for benchmark in benchmarks:
                benchmark.runs.append(benchmark.once())
    finally:
        busy.made.stop()
        made.close()
    report: dict[str, dict[str, Any]] = {}
    for b in benchmarks:
        median = statistics.median(b.runs)
        report[b.name] = {
            "median": round(median, 3),
            "unit": b.unit,
            "limit": b.limit,
            "ok": median <= b.limit,
            "runs": [round(r, 3) for r in b.runs],
        }
        show(b.name, report[b.name])
    for name, entry in chain(gate.figures(), kubelet.figures(), pods.figures()):
        report[name] = entry
        show(name, entry)
    (REPOSITORY / "build" / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(entry["ok"] for entry in report.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
