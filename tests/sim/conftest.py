"""softkfd and its client, built from the sources of this tree, and simulated machines on a tmpfs."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree
from tests.programs import SOFTKFD, compile_c, softkfd_in


@pytest.fixture(scope="session")
def softkfd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libsoftkfd.so."""
    return softkfd_in(tmp_path_factory.mktemp("softkfd"))


@pytest.fixture(scope="session")
def kfdclient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(tmp_path_factory.mktemp("kfdclient") / "kfdclient", [SOFTKFD / "kfdclient.c"])


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A folder on a tmpfs, readable by everybody (unlike pytest's own)."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@dataclass(frozen=True)
class Machine:
    """A simulated machine with softkfd in front of the programs that run on it."""

    root: Path
    softkfd: Path

    def environment(self, **more: str) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "SOFTKFD_ROOT": str(self.root), "LD_PRELOAD": str(self.softkfd), **more}

    def run(
        self, program: Path | str, *arguments: str, env: Mapping[str, str] | None = None, status: int = 0
    ) -> list[dict[str, Any]]:
        """The JSON lines that ``program`` prints; its exit status must be ``status``."""
        done = subprocess.run(
            [program, *arguments],
            env=self.environment(**(env or {})),
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == status, done.stdout
        return [json.loads(line) for line in done.stdout.splitlines()]

    def log(self, *ops: str) -> list[dict[str, Any]]:
        """What softkfd was asked, those of ``ops`` only."""
        lines = [json.loads(line) for line in (self.root / "log.jsonl").read_text().splitlines()]
        return [line for line in lines if not ops or line["op"] in ops]

    def figure(self, path: str) -> int:
        return int((self.root / path).read_text())


@pytest.fixture
def machine(tmpfs: Path, softkfd: Path) -> Callable[[str], Machine]:
    """``machine("2*mi210")``: a machine with these GPUs."""

    def make(text: str) -> Machine:
        root = tmpfs / "machine"
        build_tree(parse_simulation(text), root)
        return Machine(root, softkfd)

    return make
