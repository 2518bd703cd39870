"""The main job of amdvgpud, shown on a simulated node and checked step by step.

Starts the real daemon on simulated GPUs, cuts them by its API, runs a real program in a slice until it is refused VRAM,
kills it and sees the VRAM come back. Writes build/demo.json: {"ok", "steps": [{"name", "want", "got", "ok"}]}; exits
non-zero if any figure is wrong. Simulated is the driver, by softkfd, and its sysfs; kernels of a GPU do not run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import amdvgpud._abi
from amdvgpud.core import wire
from amdvgpud.core.cumask import parse_cu_mask
from amdvgpud.core.model import CuSet, PartitionId
from amdvgpud.core.render import draw_cus
from amdvgpud.core.sizes import human_size
from amdvgpud.ctl.client import Client, Refused
from amdvgpud.host.sysfs import SysfsReader

NODE = "2*mi300x,rx9070xt"
GIB = 1024**3
BUILD = Path(__file__).resolve().parents[1] / "build"
BIN = Path(sys.executable).parent
PROGRAMS = Path(amdvgpud._abi.__file__).parent
ENOUGH_S = 10.0
"""What is waited for comes within a second; after this it counts as not come."""


class Steps:
    """What was checked, printed as it goes."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []

    def check(self, name: str, want: object, got: object) -> None:
        ok = want == got
        self.taken.append({"name": name, "want": want, "got": got, "ok": ok})
        print(f"  {'ok  ' if ok else 'WRONG'} {name}: {got}" + ("" if ok else f", not {want}"), flush=True)

    def write(self) -> int:
        ok = all(step["ok"] for step in self.taken)
        BUILD.mkdir(exist_ok=True)
        (BUILD / "demo.json").write_text(json.dumps({"ok": ok, "steps": self.taken}, indent=1) + "\n")
        wrong = sum(not step["ok"] for step in self.taken)
        print(f"\n{len(self.taken)} figures checked, {wrong} wrong; all of them are in build/demo.json")
        return 0 if ok else 1


def title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def eventually(read: Callable[[], Any], want: object) -> object:
    """The value once it is ``want``, or what it was when the time was over."""
    end = time.monotonic() + ENOUGH_S
    while (got := read()) != want and time.monotonic() < end:
        time.sleep(0.05)
    return got


@contextmanager
def daemon() -> Iterator[tuple[Client, Path, int]]:
    """A real amdvgpud with directories of its own: (its API, its run directory, its TCP port)."""
    home = Path(tempfile.mkdtemp(prefix="amdvgpud-demo-", dir="/dev/shm"))
    run = home / "run"
    port = 19841
    process = subprocess.Popen(
        [
            *(BIN / "amdvgpud", "--simulate", NODE, "--run-dir", run, "--state-dir", home / "state"),
            *(
                "--cdi-dir",
                home / "cdi",
                "--rest-tcp",
                f"127.0.0.1:{port}",
                "--tick-s",
                "0.2",
                "--log-level",
                "warning",
            ),
        ]
    )
    try:
        client = Client(str(run / "api.sock"))
        while not (run / "api.sock").exists():
            if process.poll() is not None:
                raise SystemExit(f"amdvgpud ended with {process.returncode} before it was ready")
            time.sleep(0.01)
        yield client, run, port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(ENOUGH_S)
        subprocess.run(["umount", "-l", run / "slices"], check=False, capture_output=True)
        shutil.rmtree(home, ignore_errors=True)


def put(client: Client, name: str, spec: wire.SliceSpec) -> wire.SliceView:
    return client.change("PUT", f"/v1/slices/{name}", wire.SliceView, spec)[0]


def figures(item: wire.SliceView) -> list[int]:
    share = item.shares[0]
    return [share.asked_cus, share.granted_cus, share.effective_cus]


def show_placement(client: Client, run: Path) -> None:
    """Who has which CU: one letter a CU (a WGP on the RX 9070 XT), a line for each XCC, a group for each engine."""
    layouts = {p.id: p.layout for p in SysfsReader(run / "simulated").read_inventory().partitions}
    owned: dict[str, dict[str, CuSet]] = {}
    for item in client.get("/v1/slices", wire.SliceList)[0].slices:
        for share in item.shares:
            (cus,) = parse_cu_mask(f"0:{share.cus}", [layouts[PartitionId(share.partition)].cu_count])
            if cus is not None:
                owned.setdefault(share.partition, {})[item.name] = cus
    for partition, sets in owned.items():
        print(f"  {partition}")
        for line in draw_cus(layouts[PartitionId(partition)], sets):
            print(f"    {line}")


class Program:
    """A program in a slice, under ``amdvgpuctl run``: it prints JSON lines, then holds what it has."""

    def __init__(self, run: Path, slice: str, command: list[str | Path]) -> None:
        print(f"  $ amdvgpuctl run --slice {slice} -- {' '.join([Path(command[0]).name, *map(str, command[1:])])}")
        self.process = subprocess.Popen(
            [BIN / "amdvgpuctl", "--socket", run / "api.sock", "run", "--slice", slice, "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def lines(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            yield json.loads(text)

    def end(self) -> None:
        """SIGKILL to all of it, as the kernel would on a bad day: nobody gets to clean up."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(ENOUGH_S)


def programs() -> Iterator[tuple[list[str | Path], str]]:
    """(command, what it goes through): the real HIP runtime where it is installed, then a client that needs none."""
    hip = BUILD / "hipclient"
    source = BUILD.parent / "softkfd" / "hipclient.c"
    if Path("/usr/include/hip/hip_runtime_api.h").exists() and shutil.which("cc"):
        BUILD.mkdir(exist_ok=True)
        options = ["-O1", "-D__HIP_PLATFORM_AMD__", "-D_GNU_SOURCE", "-o", str(hip), str(source), "-lamdhip64"]
        if subprocess.run(["cc", *options], check=False, capture_output=True).returncode == 0:
            yield [hip, "--stream"], "the real HIP runtime"
    yield [PROGRAMS / "kfdclient", "--queue"], "a small C client that speaks the KFD's requests"


@dataclass
class Outcome:
    """What a program saw and got until it was refused."""

    total_bytes: int = 0
    held_bytes: int = 0
    refusal: str = ""


def take_until_refused(run: Path, slice: str) -> tuple[Program, Outcome]:
    for command, through in programs():
        title(f"A program takes VRAM in {slice}, 1 GiB at a time, through {through}")
        program, outcome = Program(run, slice, [*command, "--step", "1G", "--hold"]), Outcome()
        for said in program.lines():
            if said["op"] == "gpu" and said["index"] == 0:
                outcome.total_bytes = said["total"]
            elif said["op"] == "alloc" and said["result"] not in ("ok", "hipSuccess"):
                outcome.refusal = said["result"]
            elif said["op"] == "hold":
                outcome.held_bytes = said["held"]
                print(f"  it holds {human_size(outcome.held_bytes)} and was then refused: {outcome.refusal}")
                return program, outcome
        program.end()
        print("  this ROCm does not know the GPUs of this node")
    raise SystemExit("no program could take VRAM in the slice")


def masks(run: Path) -> list[int]:
    """CUs in each mask that the simulated driver was asked for, in order."""
    log = (run / "simulated" / "log.jsonl").read_text().splitlines()
    return [said["set"] for said in map(json.loads, log) if said["op"] == "SET_CU_MASK"]


def usage(client: Client) -> wire.GpuUsageView:
    return client.get("/v1/slices/alice/usage", wire.UsageView)[0].gpus[0]


def metric(port: int, line_start: str) -> float | None:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=ENOUGH_S) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith(line_start):
                return float(line.rpartition(" ")[2])
    return None


def main() -> int:
    if os.geteuid() != 0:
        print("make demo: run it as root (sudo make demo): slices are delivered by mounts", file=sys.stderr)
        return 2
    steps = Steps()
    with daemon() as (client, run, port):
        show(steps, client, run, port)
    return steps.write()


def show(steps: Steps, client: Client, run: Path, port: int) -> None:
    title(f"A daemon on a simulated node: amdvgpud --simulate '{NODE}'")
    gpus = client.get("/v1/gpus", wire.GpuList)[0].gpus
    for gpu in gpus:
        print(f"  {gpu.index}  {gpu.id}  {gpu.product_name:22} {gpu.cu_count:3} CUs  {human_size(gpu.vram_bytes)}")
    steps.check("CUs of the GPUs found", [304, 304, 64], [gpu.cu_count for gpu in gpus])

    title("Three slices by the API: a quarter and a half of GPU 0, and one over two GPUs")
    alice = put(client, "alice", wire.SliceSpec(compute="25%", vram="16GiB", on=["0"]))
    bob = put(client, "bob", wire.SliceSpec(compute="50%", vram="96GiB", on=["0"]))
    carol = put(client, "carol", wire.SliceSpec(compute="25%", vram="8GiB", gpus=2, on=["1", "2"]))
    show_placement(client, run)
    steps.check("alice: asked, granted, effective CUs", [76, 64, 64], figures(alice))
    steps.check("bob: asked, granted, effective CUs", [152, 160, 160], figures(bob))
    steps.check("GPUs of carol", [gpus[1].id, gpus[2].id], [share.gpu for share in carol.shares])

    title("The CDI devices that podman, docker and containerd resolve")
    cdi = client.get("/v1/cdi", wire.CdiView)[0]
    for device in cdi.devices:
        print(f"  podman run --device {device} ...")
    steps.check("CDI devices", [f"amdvgpu.io/slice={name}" for name in ("alice", "bob", "carol")], cdi.devices)

    running, got = take_until_refused(run, "alice")
    steps.check("what the program sees as its GPU's memory, bytes", 16 * GIB, got.total_bytes)
    steps.check("it was refused as out of memory", True, got.refusal in ("ENOMEM", "hipErrorOutOfMemory"))
    steps.check("bytes it got, 1 GiB at a time, are within the quota", True, 15 * GIB <= got.held_bytes <= 16 * GIB)
    steps.check("CUs in the masks that the driver was asked for", [64], sorted(set(masks(run))))

    title("While it runs: the ledger and the metrics")
    used = usage(client).used_bytes
    steps.check(
        "ledger: it has what the program holds, and no more than the quota", True, got.held_bytes <= used <= 16 * GIB
    )
    steps.check("denials are counted", True, usage(client).denials > 0)
    name = 'amdvgpu_slice_vram_used_bytes{slice="alice"'
    steps.check("metrics: the same bytes", float(used), eventually(lambda: metric(port, name), float(used)))

    title("kill -9, and the VRAM comes back")
    running.end()
    steps.check("bytes used afterwards", 0, eventually(lambda: usage(client).used_bytes, 0))

    title("A request that cannot be granted")
    try:
        put(client, "dave", wire.SliceSpec(compute="50%", vram="120GiB", on=["0"]))
        steps.check("dave is refused", "no-room", "granted")
    except Refused as refused:
        print(f"  {refused}")
        steps.check("dave is refused", "no-room", refused.problem.code)
    names = [item.name for item in client.get("/v1/slices", wire.SliceList)[0].slices]
    steps.check("and nothing has changed", ["alice", "bob", "carol"], names)


if __name__ == "__main__":
    raise SystemExit(main())
