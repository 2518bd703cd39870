"""Looking into a container that is about to start: its command and the head of its first program.

Owns how that is read without harm: everything is opened below the container's root, links and ``..`` held inside it,
and nothing but plain files is read: opening a device or a pipe of a stranger's could do things, or never return. Does
not own the verdict (:mod:`amdvgpud.core.image`).

The way inside is walked step by step, not by openat2(2) with RESOLVE_IN_ROOT, which would do the same in one: our unit
has RestrictSUIDSGID, and under that systemd lets nobody call openat2, as no filter can see its flags (ENOSYS, seen
with systemd 257).

Sources: the OCI runtime specification, ``config.md``: root.path, process.args, process.env, process.cwd.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

import msgspec

from amdvgpud.core.image import HEAD_BYTES, Verdict, judge

_CONFIG_BYTES: Final = 4 << 20
_MAX_LINKS: Final = 40
"""The kernel's own bound (MAXSYMLINKS)."""


class _Root(msgspec.Struct):
    path: str


class _Process(msgspec.Struct):
    args: list[str] = msgspec.field(default_factory=list)
    env: list[str] = msgspec.field(default_factory=list)
    cwd: str = "/"


class _Config(msgspec.Struct):
    root: _Root
    process: _Process = msgspec.field(default_factory=_Process)


class Images:
    """``gate`` is the gate's path in containers."""

    def __init__(self, gate: str) -> None:
        self._gate = gate
        with Path("/proc/self/exe").open("rb") as program:
            self._own = program.read(HEAD_BYTES)

    def look(self, root: int, bundle: str) -> Verdict:
        """``root`` is a descriptor of the root folder in which ``bundle`` and the image's root are found."""
        try:
            content = self._read(root, f"{bundle}/config.json", _CONFIG_BYTES)
            config = msgspec.json.decode(content or b"", type=_Config)
            inside = open_inside(root, os.path.join(bundle, config.root.path))  # noqa: PTH118
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            return Verdict(None, f"its bundle cannot be read: {error}")
        try:
            environment = dict(entry.partition("=")[::2] for entry in config.process.env)
            return judge(
                config.process.args,
                environment,
                config.process.cwd,
                lambda path: self._read(inside, path, HEAD_BYTES),
                self._own,
                self._gate,
            )
        except OSError as error:
            return Verdict(None, f"its image cannot be read: {error}")
        finally:
            os.close(inside)

    def _read(self, root: int, path: str, room: int) -> bytes | None:
        """The first ``room`` bytes of a plain file; None where there is none at ``path``."""
        try:
            found = open_inside(root, path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            if not stat.S_ISREG(os.fstat(found).st_mode):
                return None
            with open(f"/proc/self/fd/{found}", "rb") as file:  # noqa: PTH123 (the very file that was looked at)
                return file.read(room)
        finally:
            os.close(found)


def open_inside(root: int, path: str) -> int:
    """An O_PATH descriptor of ``path`` as a process with the root ``root`` would find it; the caller's to close.

    No step is the kernel's to lead out: each opens one name and follows no link, a link's text is walked as a path, and
    ``..`` is the folder that we came through, whoever moves it meanwhile. Magic links (/proc) are texts like others.
    """
    if "\0" in path:
        raise FileNotFoundError(errno.ENOENT, "no file has such a name", path)
    way = [os.dup(root)]
    left = path.split("/")[::-1]
    links = 0
    try:
        while left:
            name = left.pop()
            if name in ("", "."):
                continue
            if name == "..":
                if len(way) > 1:
                    os.close(way.pop())
                continue
            way.append(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=way[-1]))
            if not stat.S_ISLNK(os.fstat(way[-1]).st_mode):
                continue
            target = os.readlink("", dir_fd=way[-1])
            os.close(way.pop())
            if (links := links + 1) > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            while target.startswith("/") and len(way) > 1:
                os.close(way.pop())
            left += target.split("/")[::-1]
        return way.pop()
    finally:
        for fd in way:
            os.close(fd)
