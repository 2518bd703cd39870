"""A cgroup of its own for a command in a slice, so that the kernel can count and cap it apart from who started it.

By systemd where that runs the machine, as a scope, since then nobody else may make cgroups; otherwise in the cgroup v2
tree where we may. The daemon is told of it as of a container, by the same messenger that runtimes use: a cgroup is
named as theirs are, by 64 hex digits, and what the daemon believes is what /proc shows.

Fails open: the command starts without, and the slice then says by what it is enforced. Sources: systemd's
org.freedesktop.systemd1(5), StartTransientUnit; Documentation/admin-guide/cgroup-v2.rst; the OCI runtime
specification's "state".
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from amdvgpud.core.caps import WAIT_FOR_CAP_MS

SYSTEMD: Final = Path("/run/systemd/system")
_MOVE_S: Final = 2.0
"""How long systemd may take to move a process into its scope; it takes milliseconds."""
_TELL_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class OwnCgroup:
    """Of one command. Made by :meth:`enter` in the process that becomes it, removed by its parent."""

    slice: str
    hook: Path
    socket: Path
    """The daemon's socket for reports."""
    id: str

    @classmethod
    def fresh(cls, slice: str, hook: Path, socket: Path) -> OwnCgroup:
        return cls(slice, hook, socket, secrets.token_hex(32))

    @property
    def name(self) -> str:
        return f"amdvgpu-run-{self.id}.scope"

    def enter(self) -> str | None:
        """Move the calling process into it. Why that cannot be; None: it is in it."""
        return self._by_systemd() if SYSTEMD.is_dir() else self._by_hand()

    def tell(self) -> None:
        """Let the daemon look at the calling process, whose mounts show the slice, and cap it before it goes on."""
        state = {"ociVersion": "1.0.2", "id": self.id, "status": "created", "pid": os.getpid(), "bundle": ""}
        wait = ["--wait", str(WAIT_FOR_CAP_MS)]
        words: list[str | Path] = [self.hook, "start", self.slice, "--socket", self.socket, *wait]
        try:
            # What it answers about images is about containers', and this is none.
            subprocess.run(words, input=json.dumps(state).encode(), timeout=_TELL_S, check=False, capture_output=True)
        except (OSError, subprocess.TimeoutExpired):
            return

    def remove(self) -> None:
        """After the command's end; systemd has collected its scope by itself. One that is in use stays."""
        tree = _tree()
        try:
            if tree is not None and not SYSTEMD.is_dir():
                (tree / _here().lstrip("/") / self.name).rmdir()
        except OSError:
            return

    def _by_systemd(self) -> str | None:
        properties = ["3", "Description", "s", f"amdvgpuctl run in slice {self.slice}"]
        properties += ["PIDs", "au", "1", str(os.getpid()), "CollectMode", "s", "inactive-or-failed"]
        whose = [] if os.geteuid() == 0 else ["--user"]
        place = ["org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager"]
        call = ["busctl", *whose, "--timeout=5", "call", *place, "StartTransientUnit", "ssa(sv)a(sa(sv))"]
        try:
            done = subprocess.run(
                [*call, self.name, "fail", *properties, "0"], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"systemd could not be asked for a scope: {error}"
        if done.returncode:
            return f"systemd makes no scope: {done.stderr.strip() or done.returncode}"
        end_s = time.monotonic() + _MOVE_S
        while self.name not in _here():  # the call starts a job, and answers before it is done
            if time.monotonic() > end_s:
                return f"systemd has not moved the command into its scope within {_MOVE_S:g} s"
            time.sleep(0.005)
        return None

    def _by_hand(self) -> str | None:
        tree = _tree()
        if tree is None:
            return "this machine has no cgroup v2 tree"
        own = tree / _here().lstrip("/") / self.name
        try:
            own.mkdir()
            (own / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            return f"{own.parent}: {error.strerror}"
        return None


def _here() -> str:
    """The calling process's path in the v2 hierarchy; empty where there is none."""
    lines = Path("/proc/self/cgroup").read_text("utf-8", "surrogateescape").splitlines()
    return next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "")


def _tree() -> Path | None:
    """Where the v2 hierarchy is mounted. Hybrid machines have it below the v1 ones (proc_pid_mountinfo(5))."""
    for line in Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        if after.startswith("cgroup2 "):
            return Path(before.split()[4])
    return None
