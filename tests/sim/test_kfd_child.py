"""The child that opens /dev/kfd, and who starts and ends it: the real program over softkfd."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from amdvgpud.core.errors import HostFailure
from amdvgpud.core.health import Condition, Notice
from amdvgpud.core.model import Inventory
from amdvgpud.host import kfd_child
from amdvgpud.host.smi import KfdChildren, Listening
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.sim.driver import SimulatedDriver
from amdvgpud.sim.models import parse_simulation

MachineOf = Callable[[str], Any]


class Bench:
    """A machine with its children; what these have told."""

    def __init__(self, machine: Any, text: str, listening: Listening, **environment: str) -> None:
        self.root: Path = machine.root
        self.driver = SimulatedDriver(parse_simulation(text), self.root)
        self.notices: list[Notice] = []
        self.told = asyncio.Event()
        self.children = KfdChildren(
            self.inventory, self.hear, listening=listening, environment={**machine.environment(), **environment}
        )

    def inventory(self) -> Inventory:
        return SysfsReader(self.root, name_tables=()).read_inventory()

    async def hear(self, notices: Sequence[Notice]) -> None:
        self.notices += notices
        self.told.set()

    def shown(self) -> set[int]:
        """Pids of kfd/proc."""
        self.driver.refresh_processes()
        return {int(folder.name) for folder in (self.root / "sys/class/kfd/kfd/proc").iterdir()}

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.children.run(0.01))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def listening(self) -> bool:
        asked = (self.root / "log.jsonl").read_text().count('"op":"SMI_EVENTS"')
        return bool(self.shown()) and asked >= len(self.inventory().partitions)


@pytest.fixture
def bench(machine: MachineOf) -> Callable[..., Bench]:
    return lambda text, listening="auto", **environment: Bench(machine(text), text, listening, **environment)


MakeBench = Callable[..., Bench]


async def test_events_of_each_gpu_are_heard(bench: MakeBench) -> None:
    made = bench("2*rx7900xtx")
    first, second = made.inventory().gpus
    async with made.running():
        await made.until(made.listening)
        made.driver.tell(first.partitions[0].kfd_gpu_id, "3 1 ring timeout")
        await asyncio.wait_for(made.told.wait(), 60)
        made.told.clear()
        made.driver.tell(second.partitions[0].kfd_gpu_id, "9 not asked for")
        made.driver.tell(second.partitions[0].kfd_gpu_id, "1 77:python3")
        await asyncio.wait_for(made.told.wait(), 60)
    assert [(n.gpu, n.kind) for n in made.notices] == [(first.id, "reset"), (second.id, "vm-fault")]


async def test_nobody_has_the_kfd_open_while_it_is_to_be_let_go(bench: MakeBench) -> None:
    made = bench("mi300x", "on")
    gpu = made.root / "sys/bus/pci/devices" / made.inventory().gpus[0].pci_address / "current_compute_partition"
    async with made.running():
        await made.until(made.listening)
        assert made.shown() == set(made.children.own_pids())
        with pytest.raises(OSError, match="busy") as refused:
            made.driver.write(gpu, "DPX")
        assert refused.value.errno == errno.EBUSY
        await made.children.let_go()
        await made.children.let_go()
        assert made.shown() == set()
        made.driver.write(gpu, "DPX")
        assert await made.children.examine(made.inventory()) is not None
        made.children.take_up()
        await asyncio.sleep(0.05)
        assert made.shown() == set()
        made.children.take_up()
        await made.until(made.listening)


async def test_other_gpus_are_listened_to_after_a_scan(bench: MakeBench) -> None:
    made = bench("2*rx7900xtx")
    gone, _ = made.inventory().gpus
    async with made.running():
        await made.until(made.listening)
        before = made.children.own_pids()
        made.children.refresh()
        await asyncio.sleep(0.05)
        assert made.children.own_pids() == before
        made.driver.unplug(gone.pci_address)
        made.children.refresh()
        await made.until(lambda: made.children.own_pids() != before and made.listening())


async def test_a_gpu_that_came_anew_under_its_old_id_is_listened_to_anew(bench: MakeBench) -> None:
    """As the kernel gives it: its id is made of what it is and where. The simulation would give it another one."""
    made = bench("2*rx7900xtx")
    generation = made.root / "sys/class/kfd/kfd/topology/generation_id"
    async with made.running():
        await made.until(made.listening)
        before = made.children.own_pids()
        generation.write_text(f"{int(generation.read_text()) + 2}\n")
        made.children.refresh()
        await made.until(lambda: made.children.own_pids() != before and made.listening())


async def test_a_listener_that_is_starting_lets_go_too(bench: MakeBench) -> None:
    made = bench("2*rx7900xtx")
    async with made.running():
        await asyncio.sleep(0)  # the listener has its turn, and there is no child yet
        async with asyncio.timeout(20):
            await made.children.let_go()
        assert made.shown() == set()


async def test_a_reset_shows_beside_a_listener_that_had_the_kfd_open_before(bench: MakeBench) -> None:
    made = bench("rx7900xtx")
    (gpu,) = made.inventory().gpus
    async with made.running():
        await made.until(made.listening)
        listener = made.children.own_pids()
        made.driver.set_fault(gpu.pci_address, errno.EBUSY)
        examination = await made.children.examine(made.inventory())
        assert examination is not None
        assert listener < made.children.own_pids()
        assert made.shown() == listener


async def test_a_listener_that_is_starting_keeps_no_pulse_waiting(bench: MakeBench) -> None:
    made = bench("2*rx7900xtx")
    async with made.running():
        await asyncio.sleep(0)  # the listener has its turn, and there is no child yet
        async with asyncio.timeout(20):
            assert await made.children.examine(made.inventory()) is not None
        await made.until(made.listening)


async def test_a_child_that_ends_as_soon_as_it_listens_is_not_started_again_and_again(
    bench: MakeBench, tmp_path: Path
) -> None:
    made = bench("rx7900xtx")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho x >> {tmp_path}/started\necho listening 1\n")
    python.chmod(0o755)
    children = KfdChildren(made.inventory, made.hear, python=str(python))
    task = asyncio.create_task(children.run(0.01))
    await made.until((tmp_path / "started").exists)
    await asyncio.sleep(0.5)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert (tmp_path / "started").read_text() == "x\n"


@pytest.mark.parametrize(("listening", "model"), [("auto", "mi300x"), ("off", "rx7900xtx")])
async def test_where_a_gpu_can_be_cut_nobody_listens_unless_told_to(
    bench: MakeBench, listening: str, model: str
) -> None:
    made = bench(model, listening)
    async with made.running():
        await asyncio.sleep(0.1)
        assert made.shown() == set()


async def test_a_child_goes_with_the_daemon(bench: MakeBench) -> None:
    made = bench("rx7900xtx")
    async with made.running():
        await made.until(made.listening)
    assert made.shown() == set()


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("", []),
        ("EBUSY", [(Condition.UNKNOWN, "/dev/kfd answers EBUSY, as in a reset")]),
        ("ENODEV", [(Condition.UNHEALTHY, "/dev/kfd answers ENODEV")]),
    ],
)
async def test_a_probe_tells_of_all_gpus_and_leaves_nobody_behind(
    bench: MakeBench, fault: str, found: list[tuple[Condition, str]]
) -> None:
    made = bench("2*mi300x", SOFTKFD_DENY=f"kfd={fault}" if fault else "")
    examination = await made.children.examine(made.inventory())
    assert examination is not None
    assert [(f.condition, f.reason) for f in examination.findings] == found * 2
    assert made.shown() == set()


async def test_a_probe_that_may_not_open_it_tells_nothing(bench: MakeBench) -> None:
    """The daemon's own device cgroup may be without it: that is no fault of any GPU."""
    made = bench("mi300x", SOFTKFD_DENY="kfd=EPERM")
    with pytest.raises(HostFailure, match="answers EPERM to this daemon, which tells nothing of the GPUs"):
        await made.children.examine(made.inventory())


async def test_a_child_that_cannot_be_started_is_said(bench: MakeBench) -> None:
    made = bench("mi300x")
    children = KfdChildren(made.inventory, made.hear, python="/nowhere/python")
    with pytest.raises(HostFailure, match="cannot be started"):
        await children.examine(made.inventory())


def test_a_child_ends_with_its_standard_input_which_is_with_the_daemon_however_that_ends(machine: MachineOf) -> None:
    made = machine("rx7900xtx")
    gpu_id = SysfsReader(made.root, name_tables=()).read_inventory().gpus[0].partitions[0].kfd_gpu_id
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(kfd_child.__file__), str(gpu_id)],
        env=made.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    with daemon:
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
        assert daemon.stdout.readline() == "open ok\n"
        daemon.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.01)


DAEMON = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-I", "-S", *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode(), sep="\\n", end="", flush=True)
child.wait()
"""
