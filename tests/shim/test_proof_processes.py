"""Whose slot is whose, where processes come and go in unusual ways: what the walks of test_explore.py take for granted.

There a process is a number that is alive or not. Here the kernel says so: clone and vfork, pid namespaces, a pid that
was used before, a ledger that is replaced by a link or is cut short under a process that has it mapped.
"""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from amdvgpud._abi import ffi, lib

if TYPE_CHECKING:
    from tests.shim.conftest import Machine

MIB = 1 << 20


def in_namespace(machine: Machine, *words: str) -> list[str]:
    """What came back in a pid namespace of its own, with its own /proc."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", str(machine.built.drive), *words]
    done = subprocess.run(command, env=machine.environment(), capture_output=True, text=True, check=True)
    return [line.partition(" -> ")[2] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("way", ["clone", "fork"])
def test_a_child_owes_nothing_of_its_parents_however_it_was_made(machine: Machine, way: str) -> None:
    a = machine.slice("a", (0, 1000, None))
    words = [f"alloc:1000:{300 * MIB}", way, "free:0", "avail:1000", f"alloc:1000:{500 * MIB}"]
    assert machine.play(*words) == ["ok", "ok", f"ok {700 * MIB}", "ok"]
    assert sorted(used for _, used in machine.slots(a)) == [300 * MIB, 500 * MIB]


def test_an_image_begun_in_a_vfork_child_has_a_slot_of_its_own_beside_its_waiting_parents(machine: Machine) -> None:
    a = machine.slice("a", (0, 1000, None))
    player = machine.start(f"alloc:1000:{300 * MIB}", "vfork", f"alloc:1000:{500 * MIB}", "avail:1000", "stop")
    slots = machine.slots(a)
    assert (slots[0], slots[1][1], len(slots)) == ((player.pid, 300 * MIB), 500 * MIB, 2)
    assert slots[1][0] != player.pid
    player.communicate("\n")


@pytest.mark.root
def test_processes_of_two_pid_namespaces_count_together_and_never_call_each_other_dead(machine: Machine) -> None:
    a = machine.slice("a", (0, 1000, None))
    player = machine.start(f"alloc:1000:{600 * MIB}", "stop")
    words = ["avail:1000", f"alloc:1000:{500 * MIB}", f"alloc:1000:{400 * MIB}"]
    assert in_namespace(machine, *words) == [f"ok {400 * MIB}", "ENOMEM", "ok"]
    # Gone now, but of another namespace: only the daemon can tell, and until then the charge stays.
    assert sorted(used for _, used in machine.slots(a)) == [400 * MIB, 600 * MIB]
    assert machine.play("avail:1000") == ["ok 0"]
    player.kill()
    player.communicate()
    # A later namespace may get the number of one that is gone, and then rightly calls its processes dead: not ours.
    assert in_namespace(machine, "avail:1000")[0] in ("ok 0", f"ok {400 * MIB}")
    assert 600 * MIB in [used for _, used in machine.slots(a)]
    machine.play("avail:1000")
    assert 600 * MIB not in [used for _, used in machine.slots(a)]


@pytest.mark.parametrize("same", [True, False])
def test_a_living_pid_with_another_start_time_is_not_who_left_the_charge(machine: Machine, same: bool) -> None:
    a = machine.slice("a", (0, 1000, None))
    player = machine.start(f"alloc:1000:{600 * MIB}", "stop", f"alloc:1000:{100 * MIB}", "stop")
    raw = bytearray((a / "ledger").read_bytes())
    at = lib.AVG_LEDGER_HEAD_BYTES + ffi.offsetof("struct avg_slot", "start_ticks")
    started = int.from_bytes(raw[at : at + 8], "little")
    with (a / "ledger").open("r+b") as file:
        file.seek(at)
        file.write((started if same else started - 1).to_bytes(8, "little"))
    assert machine.play("avail:1000") == [f"ok {400 * MIB if same else 1000 * MIB}"]
    # Wronged by a guest that writes such things, it charges itself again with all that it holds.
    assert player.stdin
    assert player.stdout
    player.stdin.write("\n")
    player.stdin.flush()
    assert player.stdout.readline() == f"alloc:1000:{100 * MIB} -> ok\n"
    assert [slot for slot in machine.slots(a) if slot[1]] == [(player.pid, 700 * MIB)]
    player.communicate("\n")


def test_a_ledger_that_is_a_link_is_not_followed(machine: Machine) -> None:
    a = machine.slice("a", (0, 1000, None))
    (a / "ledger").rename(a / "elsewhere")
    (a / "ledger").symlink_to("elsewhere")
    assert machine.play("alloc:1000:4096", "avail:1000") == ["ENOMEM", "ok 0"]


def test_a_ledger_of_a_newer_version_means_no_vram(machine: Machine) -> None:
    a = machine.slice("a", (0, 1000, None))
    with (a / "ledger").open("r+b") as file:
        file.seek(ffi.offsetof("struct avg_ledger", "version"))
        file.write((lib.AVG_VERSION + 1).to_bytes(4, "little"))
    assert machine.play("alloc:1000:4096", "avail:1000") == ["ENOMEM", "ok 0"]


def test_who_cuts_its_ledger_short_harms_itself(machine: Machine) -> None:
    """The one that has it mapped dies at its next request; the next to start is refused VRAM."""
    a = machine.slice("a", (0, 1000, None))
    player = machine.start(f"alloc:1000:{600 * MIB}", "stop", "alloc:1000:4096")
    os.truncate(a / "ledger", 0)
    player.communicate("\n")
    assert player.returncode == -signal.SIGBUS
    assert machine.play("alloc:1000:4096") == ["ENOMEM"]


@pytest.mark.root
def test_who_may_not_write_the_ledger_is_refused_vram(machine: Machine) -> None:
    """Memory that nobody counts would be the alternative."""
    a = machine.slice("a", (0, 1000, None))
    os.chown(a / "ledger", 1, 1)
    (a / "ledger").chmod(0o644)
    command = ["setpriv", "--bounding-set=-dac_override", str(machine.built.drive), "alloc:1000:4096", "avail:1000"]
    done = subprocess.run(command, env=machine.environment(), capture_output=True, text=True, check=True)
    assert [line.partition(" -> ")[2] for line in done.stdout.splitlines()] == ["ENOMEM", "ok 0"]
    assert done.stderr.startswith(f"amdvgpu: {a}: no permission to use a file of the slice")
