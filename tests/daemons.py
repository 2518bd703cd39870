"""amdvgpud as a program: a real daemon on a simulated machine, with all that it keeps in one folder."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

PROGRAM: Final = (sys.executable, "-c", "from amdvgpud.cli import main; main()")


def options_of(folder: Path, *more: str) -> list[str]:
    """A daemon that keeps to ``folder``, and ``more``, of which the last of two alike counts."""
    places = (f"--run-dir={folder}/run", f"--state-dir={folder}/state", f"--cdi-dir={folder}/cdi")
    return [*places, "--rest-tcp=", *more]


@contextlib.contextmanager
def a_daemon(folder: Path, *options: str, **popen: Any) -> Iterator[subprocess.Popen[Any]]:
    """It has just been started, and is killed at the end if it has not ended by then; what it mounts goes with it."""
    process = subprocess.Popen([*PROGRAM, *options_of(folder, *options)], **popen)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        subprocess.run(["umount", folder / "run" / "slices"], check=False, capture_output=True)


def wait_for_api(process: subprocess.Popen[str]) -> None:
    """Until it serves; it has to have been started with ``stderr=PIPE, text=True``."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if "The API listens on" in line:
            break
    assert process.poll() is None, "".join(said)
