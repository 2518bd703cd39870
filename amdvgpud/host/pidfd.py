"""Processes held by descriptor (pidfd_open(2)): told of their end at once, and ended without hitting another one.

A pid recurs; a pidfd means one process for good. It is opened first, and only then the pid is asked whether it is the
process that was meant: if it is, then so is the descriptor's, as that process was there before.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from amdvgpud.core.errors import HostFailure, NotFound
from amdvgpud.core.model import SliceName, Usage
from amdvgpud.host.procs import SliceMounts, inner_pid, start_ticks

MOST: Final = 1024
"""Processes that are watched at once; the ends of more are noticed with the next tick. Each costs a descriptor."""

Owner = tuple[SliceName, int, int]
"""A slot's owner: its slice, its pid in its own namespace, its start time."""


class ProcessEnder:
    """The implementation of :class:`amdvgpud.guard.Ender`."""

    def __init__(self, slices: Path, *, proc: Path = Path("/proc")) -> None:
        self._slices = slices
        self._proc = proc

    def end(self, pid: int, start: int, name: SliceName, number: int) -> None:
        """Send signal ``number`` to the process, if it is the one that started then **and** its mounts show the slice.

        ``NotFound`` where it is not, or has ended; nothing was sent then. A process whose environment alone says so is
        never hit, nor is the first process of the machine, nor we. ``HostFailure``: we may not (CAP_KILL).
        """
        if pid <= 1 or pid == os.getpid():
            raise NotFound(f"process {pid} is none that may be ended")
        try:
            held = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise NotFound(f"process {pid} has ended") from error
        except OSError as error:
            raise HostFailure(f"process {pid} cannot be held to be ended: {error.strerror}") from error
        try:
            if start_ticks(pid, self._proc) != start:
                raise NotFound(f"process {pid} has ended, or is another one by now")
            if name not in SliceMounts.look(self._slices, self._proc).of(pid).slices:
                raise NotFound(f"process {pid} is not shown by its mounts to be in slice {name}")
            signal.pidfd_send_signal(held, number)
        except ProcessLookupError as error:
            raise NotFound(f"process {pid} has ended") from error
        except PermissionError as error:
            raise HostFailure(
                f"process {pid} may not be ended by this daemon ({errno.errorcode[error.errno or 0]}): it needs "
                "CAP_KILL, which the drop-in watchdog-kill.conf gives it"
            ) from error
        finally:
            os.close(held)


class SlotOwners:
    """Watches the processes that have slots in ledgers; ``on_death`` is told the slice of one that has ended.

    Called from the loop, and calls back there. What cannot be watched (a process that /proc does not show, more than
    :data:`MOST`, no pidfds on this kernel) is left to the tick, which finds the dead as ever.
    """

    def __init__(self, on_death: Callable[[SliceName], None], *, proc: Path = Path("/proc"), most: int = MOST) -> None:
        self._on_death = on_death
        self._proc = proc
        self._most = most
        self._watched: dict[Owner, int | None] = {}
        """Each with its descriptor; None: it could not be held, and is not tried again."""

    async def follow(self, usage: Mapping[SliceName, Usage]) -> None:
        """Watch those who have slots now, and no others."""
        now = {(name, p.pid, p.start_ticks) for name, of in usage.items() for p in of.processes if p.start_ticks > 1}
        for gone in self._watched.keys() - now:
            self._drop(gone)
        room = self._most - sum(held is not None for held in self._watched.values())
        if fresh := sorted(now - self._watched.keys())[:room]:
            for owner, held in (await asyncio.to_thread(self._hold, fresh)).items():
                self._watched[owner] = held
                if held is not None:
                    asyncio.get_running_loop().add_reader(held, self._ended, owner)

    def close(self) -> None:
        for owner in list(self._watched):
            self._drop(owner)

    def _ended(self, owner: Owner) -> None:
        self._drop(owner)
        self._watched[owner] = None  # until its slot is cleared: it has been told
        self._on_death(owner[0])

    def _drop(self, owner: Owner) -> None:
        if (held := self._watched.pop(owner, None)) is not None:
            asyncio.get_running_loop().remove_reader(held)
            os.close(held)

    def _hold(self, owners: Iterable[Owner]) -> dict[Owner, int | None]:
        """A descriptor of each. Ledgers are guests' to write: what they say is looked for, and nothing else done."""
        wanted: dict[tuple[int, int], list[Owner]] = {}
        for owner in owners:
            wanted.setdefault(owner[1:], []).append(owner)
        found: dict[Owner, int | None] = dict.fromkeys(owners)
        for entry in self._proc.iterdir():
            if not entry.name.isdecimal() or (inner := inner_pid(int(entry.name), self._proc)) is None:
                continue
            pid = int(entry.name)
            if not any(inner == pid_inside for pid_inside, _ in wanted):
                continue
            ticks = start_ticks(pid, self._proc)
            for owner in wanted.pop((inner, ticks or 0), ()):
                found[owner] = self._open(pid, owner[2])
        return found

    def _open(self, pid: int, start: int) -> int | None:
        try:
            held = os.pidfd_open(pid)
        except OSError:
            return None
        if start_ticks(pid, self._proc) != start:
            os.close(held)
            return None
        return held
