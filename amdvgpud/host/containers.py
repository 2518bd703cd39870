"""Containers of this machine, by /proc: what a reported process is, and which processes have a slice's files mounted.

Owns what is read of a process for that (proc(5), ioctl_ns(2)). Does not own what is believed
(:mod:`amdvgpud.core.containers`). Works without CAP_SYS_PTRACE: what needs it is left out, never guessed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from amdvgpud.core.containers import Container, Sighting, container_of
from amdvgpud.host.procs import SliceMounts, cgroup_of, start_ticks

log = logging.getLogger(__name__)

_NS_GET_OWNER_UID: Final = 0xB704
_FIRST_USER_NS: Final = 0xEFFFFFFD  # PROC_USER_INIT_INO of the kernel's proc_ns.h


class ProcContainers:
    """Looks at processes. ``slices`` is the directory of the slices' files."""

    def __init__(self, slices: Path, proc: Path = Path("/proc")) -> None:
        self._slices = slices
        self._proc = proc

    def sight(self, pid: int) -> Sighting | None:
        """The process; None where there is none, or where it became another one while we looked."""
        return self._sight(pid, SliceMounts.look(self._slices, self._proc))

    def find(self) -> tuple[Sighting, ...]:
        """The first process of each container that has a slice: the oldest of those with one container id."""
        mounts = SliceMounts.look(self._slices, self._proc)
        first: dict[str, Sighting] = {}
        for pid in self._pids():
            # Cheap first: most processes of a machine are in no container.
            name = next((found for path in self._cgroups(pid) if (found := container_of(path))), None)
            seen = self._sight(pid, mounts) if name else None
            if name is None or seen is None or not seen.slices:
                continue
            if name not in first or (seen.start_ticks, seen.pid) < (first[name].start_ticks, first[name].pid):
                first[name] = seen
        return tuple(first.values())

    def watch(self, pid: int, ticks: int) -> int | None:
        """A pidfd that becomes readable when just this process has ended; the caller closes it. None: it has."""
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return None
        if start_ticks(pid, self._proc) == ticks:
            return fd
        os.close(fd)
        return None

    def alive(self, pid: int, ticks: int) -> bool:
        return start_ticks(pid, self._proc) == ticks

    def pid_of(self, pidfd: int) -> int | None:
        """The process that a pidfd is of, as our own namespace counts it; None: ended, or no pidfd at all."""
        try:
            text = Path(f"/proc/self/fdinfo/{pidfd}").read_text("ascii", "replace")
        except OSError:
            return None
        found = next((line.split()[1] for line in text.splitlines() if line.startswith("Pid:")), "-1")
        return int(found) if found.isdigit() and int(found) > 0 else None

    def _pids(self) -> Iterator[int]:
        return (int(name) for name in os.listdir(self._proc) if name.isdigit())  # noqa: PTH208 (names, not paths)

    def _sight(self, pid: int, mounts: SliceMounts) -> Sighting | None:
        ticks = start_ticks(pid, self._proc)
        if ticks is None:
            return None
        slices = mounts.of(pid).slices
        seen = Sighting(pid, ticks, self._uids(pid), slices, self._cgroups(pid), cgroup_of(pid, self._proc))
        return seen if start_ticks(pid, self._proc) == ticks else None

    def _uids(self, pid: int) -> frozenset[int]:
        # Not the owner of /proc/<pid>: that is root while a process is not dumpable, as a runtime's first process is.
        uids = set()
        try:
            status = (self._proc / str(pid) / "status").read_text("utf-8", "replace")
            uids = {int(line.split()[1]) for line in status.splitlines() if line.startswith("Uid:")}
            namespace = os.open(self._proc / str(pid) / "ns/user", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return frozenset(uids)
        try:
            if os.fstat(namespace).st_ino != _FIRST_USER_NS:
                uids.add(struct.unpack("I", fcntl.ioctl(namespace, _NS_GET_OWNER_UID, b"\0" * 4))[0])
        except OSError:
            pass
        finally:
            os.close(namespace)
        return frozenset(uids)

    def _cgroups(self, pid: int) -> tuple[str, ...]:
        """In all hierarchies; the v2 one, if the process is in one, first."""
        unified = cgroup_of(pid, self._proc)
        try:
            text = (self._proc / str(pid) / "cgroup").read_text("utf-8", "surrogateescape")
        except OSError:
            return ()
        paths = [line.split(":", 2)[2] for line in text.splitlines() if line.count(":") >= 2]
        return tuple(dict.fromkeys(([unified] if unified else []) + paths))


class ContainerRecord:
    """What was told of containers, kept over a restart of the daemon: a file of JSON beside the slices' files.

    On a tmpfs, so it ends with the boot, as they do. What cannot be read is no loss: a look at /proc finds most of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> tuple[Container, ...]:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=tuple[Container, ...])
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s tells nothing of the containers that run, a look at /proc must do: %s", self.path, error)
            return ()

    def save(self, containers: Iterable[Container]) -> None:
        fresh = self.path.with_suffix(".new")
        try:
            fresh.touch(mode=0o600)
            fresh.write_bytes(msgspec.json.encode(tuple(containers)))
            fresh.rename(self.path)
        except OSError as error:
            log.warning("%s: what was told of containers is not kept over a restart: %s", self.path, error)
