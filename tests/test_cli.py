"""Sub-commands of amdvgpud that work on files beside a daemon."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click.testing

from amdvgpud.cli import cli

EXAMPLE = Path(__file__).resolve().parents[1] / "cdi/examples/one-gpu.json"


def drop_hooks(cdi_dir: Path) -> click.testing.Result:
    return click.testing.CliRunner().invoke(cli, [f"--cdi-dir={cdi_dir}", "cdi", "drop-hooks"])


def test_hooks_are_taken_out_of_the_cdi_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "amdvgpu.io-slice.json"
    shutil.copy(EXAMPLE, file)
    before = file.read_text()
    assert "createRuntime" in before

    assert drop_hooks(tmp_path).output == f"{file}: names no hook\n"
    after = json.loads(file.read_text())
    expected = json.loads(before)
    for edits in (expected["containerEdits"], *(device["containerEdits"] for device in expected["devices"])):
        edits.pop("hooks", None)
    assert after == expected
    assert (drop_hooks(tmp_path).exit_code, json.loads(file.read_text())) == (0, after)


def test_without_a_cdi_file_there_is_nothing_to_drop(tmp_path: Path) -> None:
    result = drop_hooks(tmp_path)
    assert (result.exit_code, "no slice, so no file" in result.output) == (0, True)
    assert list(tmp_path.iterdir()) == []
