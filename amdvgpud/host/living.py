"""Who lives, as far as one /proc shows, and so whose slot in a ledger is certainly nobody's.

Owns that judgement, over pid namespaces. Sources: proc(5), pid_namespaces(7). Does not own what is done about a dead
one's slot (:mod:`amdvgpud.host.ledger`), nor the questions about one process (:mod:`amdvgpud.host.procs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC
"""Inode of the machine's own pid namespace (kernel, include/linux/proc_ns.h): from there all processes are seen."""


@dataclass(frozen=True, slots=True)
class Processes:
    """Which processes live, as far as this /proc shows: enough to say of a slot that its owner is certainly gone."""

    starts: Mapping[tuple[int, int], int]
    """(pid namespace inode, pid as counted there) -> start time in clock ticks."""
    veiled: frozenset[tuple[int, int]]
    """(innermost pid, start time) of processes whose namespace we may not see. Without CAP_SYS_PTRACE that is nearly
    every container's, and each has a pid 1: only the start time tells whether a slot's owner may be among them."""
    own_namespace: int
    """0: /proc cannot be believed at all."""
    pids: Mapping[tuple[int, int], int] = field(default_factory=dict, compare=False)
    """(innermost pid, start time) -> pid as this /proc counts it."""

    def gone(self, slot_pid: int, slot_namespace: int, start_ticks: int, reclaiming: bool) -> bool:
        """Whether the slot's owner is certainly dead.

        From the machine's own pid namespace everything is visible, so absence is death, in namespaces that have ended
        too. From another one only its own processes can be judged. A start time of 0 (being written) or 1 (its /proc
        was unreadable), and a slot under reclaim (the start time is its last owner's), are judged by the pid alone.
        """
        if not self.own_namespace:
            return False
        known = start_ticks > 1 and not reclaiming
        if any(pid == slot_pid and (start == start_ticks or not known) for pid, start in self.veiled):
            return False
        if slot_namespace != self.own_namespace and self.own_namespace != _INITIAL_PID_NAMESPACE:
            return False
        if slot_namespace <= 1:
            # The process could not read its own namespace: its pid may be counted in any.
            return self.own_namespace == _INITIAL_PID_NAMESPACE and all(pid != slot_pid for _, pid in self.starts)
        start = self.starts.get((slot_namespace, slot_pid))
        return start is None or (known and start != start_ticks)


def read_processes(proc: Path = Path("/proc")) -> Processes:
    """One look at ``proc``. A /proc that hides others' processes (hidepid) or is not mounted says nothing of death."""
    own = _namespace_of(proc / "self")
    if own == 0 or not (proc / "1").exists():
        return Processes({}, frozenset(), 0)
    starts: dict[tuple[int, int], int] = {}
    pids: dict[tuple[int, int], int] = {}
    veiled = set()
    for entry in proc.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            status = (entry / "status").read_text(errors="replace")
        except (OSError, ValueError):
            continue  # it ended while we looked
        # A zombie has given its memory back; but a leader may be one while its threads live on: num_threads says.
        if fields[0] in "XZ" and int(fields[17]) <= 1:
            continue
        # One number a namespace from ours inwards, so a process with one number is in ours, even where (a pid 1 that
        # is not dumpable, another user's) its link may not be read.
        numbers = next((ln.split()[1:] for ln in status.splitlines() if ln.startswith("NSpid:")), [entry.name])
        pid = int(numbers[-1])
        namespace = own if len(numbers) == 1 else _namespace_of(entry)
        pids[pid, int(fields[19])] = int(entry.name)
        if namespace:
            starts[namespace, pid] = int(fields[19])
        else:
            veiled.add((pid, int(fields[19])))
    return Processes(starts, frozenset(veiled), own, pids)


def _namespace_of(entry: Path) -> int:
    """Inode of the pid namespace, or 0 where we may not know (another user's process, seen without root)."""
    try:
        text = str((entry / "ns/pid").readlink())  # pid:[4026531836]
        return int(text.rpartition("[")[2].rstrip("]"))
    except (OSError, ValueError):
        return 0
