"""Processes of this machine, by /proc: when they started, and which slice and cgroup each is in.

Owns what /proc says of a process (proc(5)). Does not own who of all lives (:mod:`amdvgpud.host.living`), nor what
follows from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from amdvgpud.core.model import Holder, SliceName
from amdvgpud.core.truth import Belonging

_CLAIM: Final = b"AMDVGPU_SLICE_DIR="
_ROOM: Final = 1 << 20
"""Bytes of one /proc file that we are willing to read: a process can make its mounts and its environment long."""


def start_ticks(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Clock ticks after boot at which ``pid`` started; None where there is no such process (zombies have ended)."""
    # The command name may hold blanks and brackets: fields are counted from its last bracket.
    fields = _read(f"{proc}/{pid}/stat").rpartition(b")")[2].split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return None
    return int(fields[19])


def process_alive(holder: Holder, proc: Path = Path("/proc")) -> bool:
    """Whether the holder's process lives. A holder without one does not end by itself."""
    return holder.pid is None or start_ticks(holder.pid, proc) == holder.start_ticks


def inner_pid(pid: int, proc: Path = Path("/proc")) -> int | None:
    """The process's pid in the innermost of its pid namespaces, as it knows itself; None where it has ended."""
    text = _read(f"{proc}/{pid}/status")
    numbers = re.search(rb"^NSpid:(?:\s+\d+)*\s+(\d+)$", text, re.MULTILINE)
    return int(numbers[1]) if numbers else pid if text else None


def cgroup_of(pid: int, proc: Path = Path("/proc")) -> str | None:
    """The process's cgroup in the v2 hierarchy, as a path below its mount; None where that cannot be told."""
    for line in _read(f"{proc}/{pid}/cgroup").splitlines():
        if line.startswith(b"0::/"):
            return os.fsdecode(line[3:])
    return None


@dataclass(frozen=True, slots=True)
class SliceMounts:
    """Tells by its mounts which slice a process is in. Made by one look at our own, good for a round of questions.

    A process is in a slice where that slice's guest directory, told by file system and path in it, is mounted at the
    place that the gate reads (``/run/amdvgpu/<name>``). Each half alone proves nothing: the place can be made by
    anybody, and the directory is below a mount of ours that every process of the host has. Before a container has
    changed its root, the place has the path of its root file system in front, so the end of it counts. A directory
    that was removed is listed as deleted, so that the slice which has its name today is not meant.

    A slice that is mounted there for the whole host tells nothing of anybody: whoever did that has not put all the
    processes of the host into it.
    """

    slices: Path
    proc: Path
    file_system: bytes
    """``major:minor`` of what ``slices`` lies on; empty: not to be found among our mounts, and nobody is in a slice."""
    path: bytes
    """Of ``slices``, from the root of that file system, as mountinfo would write it."""
    everywhere: frozenset[SliceName] = frozenset()
    """Slices that the host itself has mounted at their place."""

    @classmethod
    def look(cls, slices: Path, proc: Path = Path("/proc")) -> Self:
        try:
            fd = os.open(slices, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return cls(slices, proc, b"", b"")
        try:
            found = re.search(rb"^mnt_id:\s*(\d+)$", _read(f"/proc/self/fdinfo/{fd}"), re.MULTILINE)
            here = _escaped(os.fsencode(Path(f"/proc/self/fd/{fd}").readlink()))
        finally:
            os.close(fd)
        ours = _read("/proc/self/mountinfo")
        for line in ours.splitlines():
            fields = line.split(b" ", 5)
            if found is not None and len(fields) == 6 and fields[0] == found[1]:
                path = fields[3].rstrip(b"/") + here.removeprefix(fields[4].rstrip(b"/"))
                bare = cls(slices, proc, fields[2], path)
                host = (*bare._mounted(ours), *bare._mounted(_read(f"{proc}/1/mountinfo")))
                return replace(bare, everywhere=frozenset(name for name, place in host if place == _place(name)))
        return cls(slices, proc, b"", b"")

    def of(self, pid: int) -> Belonging:
        """Nothing known is nothing belonging: of a process that has ended, or whose /proc we may not read."""
        mounts = _read(f"{self.proc}/{pid}/mountinfo")
        shown = {name: None for name, place in self._mounted(mounts) if place.endswith(_place(name))}
        slices = tuple(name for name in shown if name not in self.everywhere)
        return Belonging(slices, tuple(name for name in self._claims(pid) if name not in slices))

    def _mounted(self, mounts: bytes) -> Iterator[tuple[SliceName, bytes]]:
        """Each slice whose guest directory is in this mountinfo, and where (names have blanks and the like in octal).

        Of a line: mount id, parent, file system, root within it, place, and more (proc_pid_mountinfo(5)).
        """
        before, after = self.path + b"/", b"/guest"
        for line in mounts.splitlines() if self.file_system else ():
            if before not in line:
                continue
            fields = line.split(b" ", 5)
            if len(fields) < 6 or fields[2] != self.file_system:
                continue
            root = fields[3]
            name = root[len(before) : -len(after)]
            if root == before + name + after and b"/" not in name and name.isascii():
                yield SliceName(name.decode()), fields[4]

    def _claims(self, pid: int) -> Iterator[SliceName]:
        for text in _read(f"{self.proc}/{pid}/environ").split(b"\0"):
            if text.startswith(_CLAIM):
                guest = Path(os.fsdecode(text[len(_CLAIM) :]))
                if guest.name == "guest" and guest.parent.parent == self.slices:
                    yield SliceName(guest.parent.name)


def _place(name: SliceName) -> bytes:
    return f"/run/amdvgpu/{name}".encode()


def _escaped(path: bytes) -> bytes:
    """As the kernel writes it in mountinfo."""
    return re.sub(rb"[ \t\n\\]", lambda m: b"\\%03o" % m[0][0], path)


def _read(path: str) -> bytes:
    """A file of /proc; nothing where it cannot be read: most likely its process has ended."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        parts = []
        left = _ROOM
        while left > 0 and (part := os.read(fd, min(left, 65536))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    except OSError:
        return b""
    finally:
        os.close(fd)
