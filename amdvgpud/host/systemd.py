"""What systemd and a service say to each other: sd_notify(3) and sd_listen_fds(3); and the lock of this machine.

A datagram to the socket systemd names; without systemd nothing is said and nothing fails. The standard library is
enough for it: no package kept for this is both current and present on Debian 12.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from amdvgpud.core.errors import Conflict, HostFailure

_FIRST_FD: Final = 3


class Supervisor:
    """The line to systemd, as the environment at start names it; a mute one where there is none."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self.inherited_fds: tuple[int, ...] = ()
        if environment.get("LISTEN_PID") == str(os.getpid()):
            count = int(environment.get("LISTEN_FDS", "0"))
            self.inherited_fds = tuple(range(_FIRST_FD, _FIRST_FD + count))

    def notify(self, *assignments: str) -> None:
        """Say e.g. ``READY=1``, ``STATUS=…``, ``WATCHDOG=1``. A supervisor that does not listen is no error of ours."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as line:
            try:
                line.sendto("\n".join(assignments).encode(), address)
            except OSError:
                return


def claim_machine(run_dir: Path) -> int:
    """Be the one amdvgpud of this run directory: an open, locked file descriptor, to be kept until the end.

    ``Conflict`` if another one lives. The lock goes with its process, so a crash leaves nothing to clean up.
    """
    path = run_dir / "lock"
    try:
        run_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HostFailure(
            f"{path} cannot be made: {error}; run amdvgpud as root, or with --run-dir elsewhere"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(fd, 32).decode("ascii", "replace").strip()
        os.close(fd)
        raise Conflict(f"another amdvgpud (pid {owner or 'unknown'}) serves {run_dir}; it was left alone") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
