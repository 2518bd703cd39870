"""Where the gate, and the simulated KFD, lie on this machine."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Final

from amdvgpud.core.errors import HostFailure

INSTALLED: Final = Path("/usr/lib/amdvgpu/libamdvgpu.so")


def gate_library() -> Path:
    """AMDVGPU_LIBRARY where it is set; else the package's; else the one that came with this Python package.

    ``HostFailure`` where there is none: without it nothing would be enforced, and ld.so only warns of a missing file.
    """
    if named := os.environ.get("AMDVGPU_LIBRARY"):
        if Path(named).is_file():
            return Path(named).absolute()
        raise HostFailure(f"AMDVGPU_LIBRARY names {named}, which is not there")
    # The extension is found, not imported: loading it would cost more than the rest of the start.
    extension = importlib.util.find_spec("amdvgpud._abi")
    beside = Path(extension.origin).parent / INSTALLED.name if extension and extension.origin else INSTALLED
    for candidate in (INSTALLED, beside):
        if candidate.is_file():
            return candidate
    raise HostFailure(
        f"the gate is not installed: neither {INSTALLED} nor {beside} exists. Install the package, or name the library "
        "by AMDVGPU_LIBRARY"
    )


def hook_program(gate: Path) -> Path:
    """The messenger that came with ``gate``, whether it is there or not: nothing depends on it."""
    return gate.with_name("amdvgpu-hook")


def softkfd_library(gate: Path) -> Path:
    """The simulated KFD that came with ``gate``; ``HostFailure`` where it did not."""
    beside = gate.with_name("libsoftkfd.so")
    if beside.is_file():
        return beside
    raise HostFailure(f"{beside} does not exist: simulated GPUs need the library that answers for them")
