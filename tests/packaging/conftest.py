"""What the packaging tests share: a clean copy of the source, and the scripts of packaging/ as modules."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git tracks or would, as they are in the work tree now: what a clean clone would hold."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    copy = tmp_path_factory.mktemp("source") / "amdvgpud"
    for name in listed.split("\0"):
        if name and (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name)
    return copy


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """``script("sbom")``: packaging/sbom.py as a module."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(
            f"packaging_{name.replace('/', '_')}", REPOSITORY / "packaging" / f"{name}.py"
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def manifests(script: Callable[[str], ModuleType]) -> ModuleType:
    """packaging/kubernetes/render.py."""
    return script("kubernetes/render")
