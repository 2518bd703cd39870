"""The real ROCm user space over softkfd: both built from the sources of this tree, machines of models it knows."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree

HERE = Path(__file__).resolve().parent
SOFTKFD = HERE.parents[1] / "softkfd"
HIP = ("-D__HIP_PLATFORM_AMD__", "-lamdhip64")


def compile_c(output: Path, sources: Sequence[Path], *options: str) -> Path:
    command = ["gcc", "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-format-truncation"]
    subprocess.run([*command, "-o", str(output), *map(str, sources), *options], check=True)
    return output


@pytest.fixture(scope="session")
def softkfd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("softkfd") / "libsoftkfd.so"
    options = ("-fPIC", "-shared", "-fvisibility=hidden", "-ldl", "-lpthread")
    return compile_c(output, sorted((SOFTKFD / "src").glob("*.c")), *options)


@pytest.fixture(scope="session")
def hiptest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(tmp_path_factory.mktemp("hiptest") / "hiptest", [HERE / "hiptest.c"], *HIP)


@pytest.fixture(scope="session")
def hipclient(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(tmp_path_factory.mktemp("hipclient") / "hipclient", [SOFTKFD / "hipclient.c"], *HIP)


@dataclass(frozen=True)
class Ran:
    """What a program printed, how it ended, and what it asked of the KFD."""

    status: int
    out: str
    asked: list[dict[str, Any]]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]

    @property
    def masks(self) -> dict[int, set[int | None]]:
        """gpu_id -> CU counts set on its compute queues; None: a queue without a mask."""
        on_queue: dict[int, dict[int, int | None]] = {}
        for request in self.asked:
            if request["op"] == "CREATE_QUEUE" and request["type"] in (0, 2):
                on_queue.setdefault(request["gpu"], {})[request["q"]] = None
            elif request["op"] == "SET_CU_MASK" and not request["err"]:
                on_queue[request["gpu"]][request["q"]] = request["set"]
        return {gpu: set(counts.values()) for gpu, counts in on_queue.items()}


@dataclass(frozen=True)
class Machine:
    root: Path
    softkfd: Path
    bin: Path

    def run(self, program: Path | str, *arguments: str, **env: str) -> Ran:
        log = self.root / "log.jsonl"
        log.write_text("")
        path = f"{self.bin}:{os.environ['PATH']}"
        done = subprocess.run(
            [program, *arguments],
            env={"PATH": path, "SOFTKFD_ROOT": str(self.root), "LD_PRELOAD": str(self.softkfd), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        return Ran(done.returncode, done.stdout, [json.loads(line) for line in log.read_text().splitlines()])


@pytest.fixture(scope="module")
def mi210s(softkfd: Path) -> Iterator[Machine]:
    """Three MI210: a GPU that every packaged ROCm from 5.2 on knows."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        # Debian's rocminfo asks lsmod whether the driver is loaded; here it is not.
        bin_folder = Path(folder) / "bin"
        bin_folder.mkdir()
        (bin_folder / "lsmod").write_text('#!/bin/sh\necho "amdgpu 1 0"\n')
        (bin_folder / "lsmod").chmod(0o755)
        root = Path(folder) / "machine"
        build_tree(parse_simulation("3*mi210"), root)
        yield Machine(root, softkfd, bin_folder)
