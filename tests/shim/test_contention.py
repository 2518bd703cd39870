"""Many at one quota: nobody goes over it, nobody is refused what fits, the dead are forgotten.

The verdict is never the gate's own: the stub under it counts the bytes that are really out.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.shim.conftest import Machine

MIB = 1 << 20


def truth(machine: Machine, quota_bytes: int) -> Path:
    path = machine.root / "held"
    path.write_bytes(struct.pack("<4Q", quota_bytes, 0, 0, 0).ljust(4096, b"\0"))
    return path


def contend(machine: Machine, held: Path, *words: object) -> list[int]:
    environment = machine.environment(STUB_HELD=str(held))
    del environment["STUB_LOG"]
    command = [str(machine.built.contend), *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [int(word) for word in done.stdout.split()]


def over_commits(held: Path) -> int:
    return int(struct.unpack_from("<4Q", held.read_bytes())[2])


def test_of_two_requests_of_which_one_fits_exactly_one_wins_a_thousand_times(machine: Machine) -> None:
    machine.slice("a", (0, 1024, None))
    held = truth(machine, 1024 * MIB)
    assert contend(machine, held, "race", 1000, 600 * MIB, 1000) == [0, 1000, 0]
    assert over_commits(held) == 0


def test_of_two_requests_that_both_fit_both_win(machine: Machine) -> None:
    machine.slice("a", (0, 1024, None))
    assert contend(machine, truth(machine, 1024 * MIB), "race", 1000, 500 * MIB, 1000) == [0, 0, 1000]


def test_threads_and_processes_at_the_edge_never_go_over(machine: Machine) -> None:
    a = machine.slice("a", (0, 20, None))
    held = truth(machine, 20 * MIB)
    contend(machine, held, "mixed", 1000, 4, 4, 3000, 8 * MIB, 0)
    quota, most, over, out = struct.unpack_from("<4Q", held.read_bytes())
    assert (over, out) == (0, 0)
    assert 10 * MIB < most <= quota
    assert machine.used(a) == 0


def test_small_requests_are_not_refused_beside_a_greedy_neighbour(machine: Machine) -> None:
    machine.slice("a", (0, 1024, None))
    held = truth(machine, 1024 * MIB)
    # Six small threads hold two of up to 1 MiB each: all of that fits beside the neighbour's 1012, at every moment.
    refused, done = contend(machine, held, "mixed", 1000, 4, 2, 5000, MIB, 1012 * MIB)
    assert (refused, done, over_commits(held)) == (0, 30000, 0)


def test_after_kills_at_random_moments_everything_comes_back(machine: Machine) -> None:
    """Each round starts eight, kills them after a random number of their own steps, and finds the whole quota free."""
    machine.slice("a", (0, 64, None))
    chance = random.Random(7)
    held = truth(machine, 1 << 62)
    environment = machine.environment(STUB_HELD=str(held))
    del environment["STUB_LOG"]
    for _ in range(12):
        command = [str(machine.built.contend), "hold", "1000", str(16 * MIB), str(1 << 40)]
        players = [subprocess.Popen(command, env=environment) for _ in range(8)]
        wanted = chance.randrange(2000)
        for player in players:
            spins = 0
            while spins < wanted and player.poll() is None:  # no clock: so many looks at it
                spins += 1
            os.kill(player.pid, signal.SIGKILL)
        for player in players:
            assert player.wait() == -signal.SIGKILL
        assert machine.play("avail:1000") == [f"ok {64 * MIB}"]


def test_a_signal_handler_that_asks_in_the_middle_of_a_request_is_answered_at_once(machine: Machine) -> None:
    """It cannot wait for the thread that it interrupts. What it is granted is charged and given back like anything."""
    a = machine.slice("a", (0, 1024, None))
    held = truth(machine, 1024 * MIB)
    granted, denied = contend(machine, held, "signals", 1000, MIB, 200_000)
    assert granted > 0
    assert denied > 0
    assert (machine.used(a), over_commits(held)) == (0, 0)
