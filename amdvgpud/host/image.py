"""Looking into a container that is about to start: its command and the head of its first program.

Owns how that is read without harm: everything is opened below the container's root, links and ``..`` held inside it
(openat2(2), RESOLVE_IN_ROOT), and nothing but plain files is read: opening a device or a pipe of a stranger's could do
things, or never return. Does not own the verdict (:mod:`amdvgpud.core.image`).

Sources: the OCI runtime specification, ``config.md``: root.path, process.args, process.env, process.cwd.
"""

from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path
from typing import Final

import msgspec

from amdvgpud.core.image import HEAD_BYTES, Verdict, judge

_OPENAT2: Final = 437  # the same on all architectures that we are built for
_RESOLVE_IN_ROOT: Final = 0x10
_CONFIG_BYTES: Final = 4 << 20


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


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
        self._libc = ctypes.CDLL(None, use_errno=True)
        with Path("/proc/self/exe").open("rb") as program:
            self._own = program.read(HEAD_BYTES)

    def look(self, root: int, bundle: str) -> Verdict:
        """``root`` is a descriptor of the root folder in which ``bundle`` and the image's root are found."""
        try:
            content = self._read(root, f"{bundle}/config.json", _CONFIG_BYTES)
            config = msgspec.json.decode(content or b"", type=_Config)
            inside = self._open(root, os.path.join(bundle, config.root.path), os.O_PATH | os.O_DIRECTORY)  # noqa: PTH118
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
            found = self._open(root, path, os.O_PATH)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            if not stat.S_ISREG(os.fstat(found).st_mode):
                return None
            with open(f"/proc/self/fd/{found}", "rb") as file:  # noqa: PTH123 (the very file that was looked at)
                return file.read(room)
        finally:
            os.close(found)

    def _open(self, root: int, path: str, flags: int) -> int:
        how = _How(flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT)
        fd: int = self._libc.syscall(
            ctypes.c_long(_OPENAT2), root, os.fsencode(path), ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how))
        )
        if fd < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
        return fd
