"""The daemon as a service, on this machine's own systemd in a container: what tests/e2e/systemd/checks.py looks at.

The short set, on a tree laid out as the packages do it. All of it, on packages and two versions of systemd:
``make e2e-systemd``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.timeout(400)]

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = REPOSITORY / "tests/e2e/systemd"
CHECKS = (
    "the packages install and the daemon is ready",
    "without a gpu it idles",
    "with gpus it lists them",
    "a driver that comes later is found",
    "a slice is made with its files and its name",
    "a command has a scope of its own that the daemon knows",
    "a kill restarts it and running programs keep their ledger",
    "stop and start keep slices and ledgers",
    "a reload with an error fails and changes nothing",
    "a hanging daemon is found and started anew",
    "the journal holds no warning",
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """What the booted system sees at /mnt: the installed tree, the checks, a client of the KFD."""
    with tempfile.TemporaryDirectory(prefix="amdvgpud-systemd-") as name:
        made = Path(name)
        made.chmod(0o755)
        wheels = made / "wheels"
        stage = [
            "packaging/stage.py",
            "--wheels",
            str(wheels),
            "--into",
            str(made / "tree"),
            "--lists",
            str(made / "lists"),
        ]
        pip = [sys.executable, "-m", "pip", "--quiet"]
        hashed = ["--require-hashes", "--no-deps", "--only-binary=:all:", "-r", "packaging/requirements.lock"]
        for argv in (
            [*pip, "download", *hashed, "--dest", str(wheels)],
            [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), "."],
            [sys.executable, *stage],
            ["gcc", "-D_GNU_SOURCE", "-O1", "-o", str(made / "kfdclient"), "softkfd/kfdclient.c"],
        ):
            subprocess.run(argv, cwd=REPOSITORY, check=True)
        shutil.copytree(HERE, made / "tests/e2e/systemd")
        yield made


@pytest.fixture(scope="module")
def report(folder: Path) -> str:
    words = " ".join(f"'{name}'" for name in CHECKS)
    (folder / "start").write_text(f"#!/bin/sh\ncd /mnt && exec python3 -m tests.e2e.systemd.checks {words}\n")
    (folder / "start").chmod(0o755)
    argv = [str(HERE / "boot"), "/", str(folder), "start"]
    return subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False).stdout


@pytest.mark.parametrize("name", CHECKS)
def test_the_service(name: str, report: str) -> None:
    assert f"\nok {name} (" in f"\n{report}", report
