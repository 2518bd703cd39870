"""What the gate reads and did not write, fuzzed: policy, ledger, the memory-bank file, sizes and CU lists.

The harnesses are ``shim/tests/fuzz.c``, their seeds ``shim/tests/fuzz/<kind>``. Here each runs for a moment over the
seeds and what it makes of them; ``make fuzz`` runs each for minutes (``FUZZ_SECONDS``) and keeps what it finds under
``build/fuzz``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.shim.conftest import Built

REPOSITORY = Path(__file__).resolve().parents[2]
SHIM = REPOSITORY / "shim"
SECONDS = int(os.environ.get("FUZZ_SECONDS", "2"))
CHECKS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1", "-std=gnu11", "-D_GNU_SOURCE"]
QUICK = [
    "-DAVG_SPINS=1",
    "-DAVG_YIELDS=1",
    "-DRECLAIM_EVERY=8",
    "-DWAIT_MS=1",
]  # a hostile neighbour is hardly waited for
LOUD = {"policy", "ledger"}


def clang(*arguments: str) -> None:
    done = subprocess.run(["clang", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def build_parts(where: Path, source: Path) -> Path:
    """All of the gate but its entry points, as an archive: each harness takes what it needs."""
    listed = re.search(r"set\(AVG_GATE_SOURCES ([^)]*)\)", (SHIM / "CMakeLists.txt").read_text())
    assert listed
    objects = []
    for name in listed[1].split():
        if name != "src/gate.c":
            objects.append(str(where / name.replace("/", "_")) + ".o")
            include = f"-I{SHIM / 'include'}"
            clang(*CHECKS, *QUICK, "-fsanitize=fuzzer-no-link", include, "-c", str(source / name), "-o", objects[-1])
    subprocess.run(["ar", "rcs", where / "parts.a", *objects], check=True)
    return where / "parts.a"


@pytest.fixture(scope="session")
def harness(built: Built) -> Callable[[str], Path]:
    where = built.drive.with_name("fuzz")
    where.mkdir()
    parts = build_parts(where, SHIM)

    def made(kind: str) -> Path:
        source = str(SHIM / "tests/fuzz.c")
        options = ["-fsanitize=fuzzer", f"-DFUZZ_{kind.upper()}", f"-I{SHIM / 'include'}"]
        clang(*CHECKS, *options, source, str(parts), "-o", str(where / kind))
        return where / kind

    return made


@pytest.mark.timeout(SECONDS * 2 + 120)
@pytest.mark.parametrize("kind", ["sizes", "cus", "bank", "policy", "ledger"])
def test_no_input_breaks_the_gate(harness: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    program = harness(kind)
    kept = REPOSITORY / "build/fuzz" / kind if "FUZZ_SECONDS" in os.environ else tmp_path
    corpus = kept / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in (SHIM / "tests/fuzz" / kind).iterdir():
        shutil.copy(seed, corpus)
    options = [f"-max_total_time={SECONDS}", f"-artifact_prefix={kept}/", "-seed=1", "-timeout=20"]
    if kind in LOUD:
        options.append("-close_fd_mask=2")
    done = subprocess.run([program, *options, corpus], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{kept} has the input:\n{done.stderr[-4000:]}"
    runs = re.search(r"Done (\d+) runs", done.stderr)
    assert runs
    assert int(runs[1]) > 100
