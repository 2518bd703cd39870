"""The layering, held by a tool."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def test_the_import_contracts_hold() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([tool], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def test_every_package_has_a_layer() -> None:
    layered = (REPOSITORY / ".importlinter").read_text()
    modules = [p.stem for p in (REPOSITORY / "amdvgpud").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    unplaced = [m for m in modules if f"amdvgpud.{m}" not in layered and m not in ("__init__", "__main__")]
    assert unplaced == []
