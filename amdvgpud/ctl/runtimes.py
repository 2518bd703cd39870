"""Whether the container runtimes of this machine would resolve our CDI devices.

Owns the questions to the machine: the file as it lies there, and the version of each runtime. What a version accepts is
:mod:`amdvgpud.core.cdi_runtimes`'. Runtimes are asked ``--version`` only: that needs no daemon and changes nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from amdvgpud.core import wire
from amdvgpud.core.cdi_runtimes import RUNTIMES, refusal, to_switch_on
from amdvgpud.core.errors import Invalid

_COMMANDS = {"cri-o": "crio"}
"""Where the command is not called as the runtime is."""


def installed() -> Iterator[tuple[str, str]]:
    """(name, version) of each runtime that is found on the PATH; version '' where it does not say."""
    for runtime in RUNTIMES:
        command = _COMMANDS.get(runtime, runtime)
        if shutil.which(command):
            yield runtime, _version_of(command)


@dataclass(frozen=True, slots=True)
class Finding:
    good: bool
    subject: str
    text: str


def findings(cdi: wire.CdiView, name: str | None) -> Iterator[Finding]:
    """What is right and wrong with the file, then with each runtime that is installed here."""
    path = Path(cdi.path)
    if cdi.error:
        yield Finding(False, cdi.path, f"the daemon could not write it: {cdi.error}")
    for conflict in cdi.conflicts:
        yield Finding(False, cdi.path, f"another file has the same names: {conflict}")
    wanted = None if name is None else f"{cdi.kind}={name}"
    if wanted is not None and wanted not in cdi.devices:
        yield Finding(False, wanted, f"no such device; there are {', '.join(cdi.devices) or 'none'}")
    if not cdi.written or cdi.spec is None:
        yield Finding(not cdi.devices and wanted is None, cdi.path, "not written: there is no slice to name")
        return
    yield _file(path, cdi.spec)
    version = str(cdi.spec.get("cdiVersion", ""))
    yield from (_runtime(name, release, version, str(path.parent)) for name, release in installed())


def _file(path: Path, spec: dict[str, object]) -> Finding:
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)  # noqa: PTH116
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return Finding(False, str(path), "the file is gone; `amdvgpud cdi refresh --oneshot` writes it anew")
    except (OSError, ValueError) as e:
        return Finding(False, str(path), f"cannot be read: {e}")
    if content != spec:
        return Finding(False, str(path), "somebody else has changed it: it is not what the daemon wrote")
    if not mode & stat.S_IROTH:
        return Finding(False, str(path), f"mode {mode:04o}: a rootless runtime cannot read it; 0644 is right")
    return Finding(True, str(path), f"as the daemon wrote it, CDI {spec.get('cdiVersion')}, mode {mode:04o}")


def _runtime(runtime: str, version: str, cdi_version: str, directory: str) -> Finding:
    try:
        why_not = refusal(runtime, version, cdi_version, directory)
        needed = to_switch_on(runtime, version, directory)
    except Invalid as e:
        return Finding(False, runtime, str(e))
    if why_not:
        return Finding(False, runtime, why_not)
    # What has to be switched on is said, not judged: whether it is on, the runtime's own configuration knows.
    return Finding(
        True, f"{runtime} {version}", "would resolve it" + (f"; needs {', '.join(needed)}" if needed else "")
    )


def _version_of(command: str) -> str:
    """The first word of ``command --version`` that begins like a version; '' where it does not say."""
    try:
        done = subprocess.run(
            [command, "--version"], capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next((w.rstrip(",") for w in done.stdout.split() if w.lstrip("v")[:1].isdigit()), "")
