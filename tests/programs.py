"""C programs and libraries of this tree, compiled for the tests as they are in the sources."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

SOFTKFD: Final = Path(__file__).resolve().parents[1] / "softkfd"


def compile_c(output: Path, sources: Sequence[Path], *options: str) -> Path:
    command = ["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-format-truncation"]
    subprocess.run([*command, "-o", str(output), *map(str, sources), *options], check=True)
    return output


def softkfd_in(folder: Path) -> Path:
    """``libsoftkfd.so``, made in ``folder``."""
    options = ("-fPIC", "-shared", "-fvisibility=hidden", "-ldl", "-lpthread")
    return compile_c(folder / "libsoftkfd.so", sorted((SOFTKFD / "src").glob("*.c")), *options)
