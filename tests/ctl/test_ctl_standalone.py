"""`amdvgpuctl run --standalone`: discovery, placement and files by the command itself, on a simulated machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree
from tests.ctl.stand_ins import Start

GIB = 1 << 30


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("machine")
    build_tree(parse_simulation("mi300x,rx9070xt"), root)
    return root


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where the private slice directories are made."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def env(home: Path, stand_in_gate: Path) -> dict[str, str]:
    simulated = stand_in_gate.with_name("libsoftkfd.so")  # what it would answer is not asked here
    subprocess.run(["gcc", "-shared", "-o", simulated, "-x", "c", "/dev/null"], check=True)
    return {"XDG_RUNTIME_DIR": str(home), "AMDVGPU_LIBRARY": str(stand_in_gate)}


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_the_command_gets_a_private_slice_that_is_gone_afterwards(
    machine: Path, home: Path, env: dict[str, str], start: Start
) -> None:
    show = 'cat "$AMDVGPU_SLICE_DIR/slice.json"; stat -c %a "$AMDVGPU_SLICE_DIR/.." >&2; echo "$SOFTKFD_ROOT" >&2'
    asked = ("--deliver", "environment", "--gpu", "0", "--vram", "4GiB", "--compute", "25%")
    run = ("run", "--standalone", "--sysfs-root", str(machine), *asked, "--", "sh", "-c", show)
    code, out, err = ended(start(*run, env=env))
    slice_json = json.loads(out)
    (gpu,) = slice_json["gpus"]
    assert code == 0
    assert (gpu["vram_bytes"], gpu["cu_count"], gpu["physical_cu_count"]) == (4 * GIB, 64, 304)
    said, mode, root = err.splitlines()
    where = gpu["partition"]
    assert said == f"amdvgpuctl: standalone: 4 GiB and 64 CUs of {where}; enforced by: gate (environment)"
    assert (mode, root) == ("700", str(machine))
    assert slice_json["slice"].startswith("standalone-")
    assert list(home.iterdir()) == []


def test_its_slice_is_gone_after_a_signal_too(machine: Path, home: Path, env: dict[str, str], start: Start) -> None:
    run = ("run", "--standalone", "-q", "--sysfs-root", str(machine), "--deliver", "environment", "--vram", "1GiB")
    process = start(*run, "--", "sh", "-c", "echo ready; exec sleep 600", env=env)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert len(list(home.iterdir())) == 1
    process.terminate()
    assert ended(process) == (143, "", "")
    assert list(home.iterdir()) == []


@pytest.mark.root
def test_it_is_delivered_by_mounts_as_a_leased_slice_is(machine: Path, env: dict[str, str], start: Start) -> None:
    run = ("run", "--standalone", "-q", "--sysfs-root", str(machine), "--deliver", "mounts", "--vram", "1GiB")
    code, out, err = ended(
        start(*run, "--", "sh", "-c", "cat /run/amdvgpu/*/slice.json; cat /etc/ld.so.preload", env=env)
    )
    document, _, preload = out.rpartition("}\n")
    assert (code, err) == (0, "")
    assert json.loads(document + "}")["gpus"][0]["vram_bytes"] == GIB
    gate = Path(env["AMDVGPU_LIBRARY"])
    assert preload.splitlines() == [str(gate), str(gate.with_name("libsoftkfd.so"))]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--gpu", "7"), "7"),
        (("--vram", "1TiB"), "the roomiest"),
        (("--vram", "much"), "'much' is no size"),
        (("--compute", "101%"), "out of range"),
    ],
)
def test_what_cannot_be_placed_is_refused_in_one_line(
    machine: Path, env: dict[str, str], start: Start, asked: tuple[str, ...], said: str
) -> None:
    run = ("run", "--standalone", "--sysfs-root", str(machine), *asked, "--", "echo", "never")
    code, out, err = ended(start(*run, env=env))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert said in err


def test_a_machine_without_a_gpu_is_said_to_have_none(tmp_path: Path, env: dict[str, str], start: Start) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = ended(
        start("run", "--standalone", "--sysfs-root", f"{tmp_path}/empty", "--vram", "1GiB", "--", "true", env=env)
    )
    assert (code, err) == (1, f"amdvgpuctl: there is no usable AMD GPU under {tmp_path}/empty\n")


def test_a_gate_that_is_named_and_not_there_stops_the_run(machine: Path, env: dict[str, str], start: Start) -> None:
    run = ("run", "--standalone", "--sysfs-root", str(machine), "--vram", "1GiB", "--", "echo", "never")
    code, out, err = ended(start(*run, env={**env, "AMDVGPU_LIBRARY": "/nonexistent.so"}))
    assert (code, out) == (1, "")
    assert err == "amdvgpuctl: AMDVGPU_LIBRARY names /nonexistent.so, which is not there\n"
