"""Processes by descriptor: real ones, ended and seen ending."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from amdvgpud.core.errors import NotFound
from amdvgpud.core.model import ProcessUsage, SliceName, Usage
from amdvgpud.host.pidfd import ProcessEnder, SlotOwners
from amdvgpud.host.procs import inner_pid, start_ticks

ALICE = SliceName("alice")


@pytest.fixture
def slices(tmp_path: Path) -> Path:
    (tmp_path / "slices/alice/guest").mkdir(parents=True)
    return tmp_path / "slices"


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """It has said that it is ready."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.kill()


def inside(slices: Path, then: str = "exec sleep 60") -> tuple[str, ...]:
    script = (
        "mkdir -p /run/amdvgpu && mount -t tmpfs none /run/amdvgpu && mkdir /run/amdvgpu/alice && "
        f"mount --bind {slices}/alice/guest /run/amdvgpu/alice && echo ready && {then}"
    )
    return ("unshare", "--mount", "--propagation", "private", "sh", "-ec", script)


def start_of(pid: int) -> int:
    ticks = start_ticks(pid)
    assert ticks is not None
    return ticks


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_of_the_slice_is_ended(slices: Path, number: int) -> None:
    with started(*inside(slices)) as process:
        ProcessEnder(slices).end(process.pid, start_of(process.pid), ALICE, number)
        assert process.wait(10) == -number


@pytest.mark.root
def test_a_process_of_another_slice_or_of_another_start_is_left_alone(slices: Path) -> None:
    with started(*inside(slices)) as process:
        for start, name in ((start_of(process.pid), "bob"), (start_of(process.pid) - 1, "alice")):
            with pytest.raises(NotFound):
                ProcessEnder(slices).end(process.pid, start, SliceName(name), signal.SIGKILL)
        assert process.poll() is None


def test_a_process_that_only_says_so_is_left_alone(slices: Path) -> None:
    script = f"AMDVGPU_SLICE_DIR={slices}/alice/guest exec sh -c 'echo ready; exec sleep 60'"
    with started("sh", "-c", script) as process:
        with pytest.raises(NotFound, match="not shown by its mounts"):
            ProcessEnder(slices).end(process.pid, start_of(process.pid), ALICE, signal.SIGKILL)
        assert process.poll() is None


@pytest.mark.parametrize("pid", [1, os.getpid(), 0, -1, 2**22 - 1])
def test_the_first_process_we_ourselves_and_nobody_cannot_be_ended(slices: Path, pid: int) -> None:
    with pytest.raises(NotFound):
        ProcessEnder(slices).end(pid, start_ticks(pid) or 0, ALICE, signal.SIGKILL)


def test_a_pid_that_changes_hands_while_it_is_looked_at_is_told_by_its_start(slices: Path, tmp_path: Path) -> None:
    """/proc shows the next owner of the pid; the descriptor is the first one's, and nothing is sent."""
    with started("sh", "-c", "echo ready; exec sleep 60") as process:
        fields = " ".join(["S", *map(str, range(4, 22)), "1", "23"])
        (tmp_path / str(process.pid)).mkdir()
        (tmp_path / str(process.pid) / "stat").write_text(f"{process.pid} (next) {fields}\n")
        with pytest.raises(NotFound, match="another one by now"):
            ProcessEnder(slices, proc=tmp_path).end(process.pid, start_of(process.pid), ALICE, signal.SIGKILL)
        assert process.poll() is None


# ------------------------------------------------------------------------------------------------------- slot owners


def a_ledger(*owners: tuple[int, int]) -> dict[SliceName, Usage]:
    """Slots of alice's ledger as (pid within its namespace, start time)."""
    return {
        ALICE: Usage(ALICE, processes=tuple(ProcessUsage(i, pid, at, 900, {}) for i, (pid, at) in enumerate(owners)))
    }


class Deaths:
    """Those that were told of, and a way to wait for the next."""

    def __init__(self) -> None:
        self.told: list[SliceName] = []
        self._one = asyncio.Event()

    def __call__(self, name: SliceName) -> None:
        self.told.append(name)
        self._one.set()

    async def next(self) -> None:
        await asyncio.wait_for(self._one.wait(), 10)
        self._one.clear()


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_the_end_of_a_slot_s_owner_is_told_at_once_and_once() -> None:
    deaths = Deaths()
    owners = SlotOwners(deaths)
    with started("sh", "-c", "echo ready; exec sleep 60") as process:
        ledger = a_ledger((process.pid, start_of(process.pid)))
        await owners.follow(ledger)
        process.kill()
        await deaths.next()
        await owners.follow(ledger)  # its slot is not cleared yet
        await asyncio.sleep(0)
    assert deaths.told == [ALICE]
    owners.close()


@pytest.mark.root
async def test_an_owner_in_a_pid_namespace_of_its_own_is_found_by_its_pid_there() -> None:
    deaths = Deaths()
    owners = SlotOwners(deaths)
    with started("unshare", "--pid", "--fork", "--kill-child", "sh", "-c", "echo ready; exec sleep 60") as process:
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert inner_pid(int(child)) == 1
        await owners.follow(a_ledger((1, start_of(int(child)))))
        os.kill(int(child), signal.SIGKILL)
        await deaths.next()
    owners.close()


async def test_what_a_ledger_makes_up_is_followed_nowhere_and_costs_no_descriptor() -> None:
    owners = SlotOwners(Deaths(), most=2)
    before = open_fds()
    await owners.follow(a_ledger((os.getpid(), 5), (2**22 - 1, 77), (1, 3)))
    assert open_fds() == before
    await owners.follow({})
    owners.close()


async def test_only_so_many_are_watched_and_those_without_a_slot_no_longer() -> None:
    before = open_fds()
    owners = SlotOwners(Deaths(), most=2)
    ready = "echo ready; exec sleep 60"
    with started("sh", "-c", ready) as a, started("sh", "-c", ready) as b, started("sh", "-c", ready) as c:
        here = open_fds()
        await owners.follow(a_ledger(*((p.pid, start_of(p.pid)) for p in (a, b, c))))
        assert open_fds() == here + 2
        await owners.follow(a_ledger((a.pid, start_of(a.pid))))
        assert open_fds() <= here + 1
        owners.close()
        assert open_fds() == here
    assert open_fds() == before
