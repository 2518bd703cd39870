"""The samples for Slurm, as slurmd would run them, against the daemon; Slurm itself is not here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from amdvgpud import _abi
from tests.docs.conftest import BIN, Machine

pytestmark = [pytest.mark.root, pytest.mark.podman]

SAMPLES = Path(__file__).resolve().parents[2] / "docs/guide/slurm"
BESIDE = Path(_abi.__file__).parent
JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_UID": "1000", "AMDVGPU_PATH": str(BIN)}
COMMENT = "amdvgpu:vram=1GiB,compute=25%"


@pytest.fixture
def node(machine: Callable[[str], Machine]) -> Machine:
    return machine("mi300x")


def test_a_job_is_given_a_slice_is_held_to_it_and_gives_it_back(node: Machine) -> None:
    prolog = node.run(str(SAMPLES / "prolog"), {**JOB, "SLURM_JOB_COMMENT": COMMENT})
    assert prolog.code == 0, prolog.output
    assert prolog.output.startswith("job-77: 1 GiB and 64 CUs of ")

    as_user = "setpriv --reuid 1000 --regid 1000 --clear-groups --"
    task = node.run(f"{as_user} {SAMPLES}/task-prolog", JOB)
    assert task.output.splitlines() == [
        "export AMDVGPU_SLICE=job-77",
        "export AMDVGPU_SLICE_DIR=/run/amdvgpud/slices/job-77/guest",
        "export LD_PRELOAD=/usr/lib/amdvgpu/libamdvgpu.so",
    ]

    # The library is where pip puts it here, and what answers for the simulated GPU stands behind it.
    gate = task.output.replace("/usr/lib/amdvgpu/libamdvgpu.so", f"{BESIDE}/libamdvgpu.so:{BESIDE}/libsoftkfd.so")
    program = f"cp {BESIDE}/kfdclient . && {as_user} ./kfdclient --step 256M --count 8"
    step = f"export SOFTKFD_ROOT=/run/amdvgpud/simulated\n{gate}\n{program}"
    said = [json.loads(line) for line in node.run(step, JOB).output.splitlines()]
    assert [line["result"] for line in said if line["op"] == "alloc"] == ["ok"] * 4 + ["ENOMEM"]

    epilog = node.run(str(SAMPLES / "epilog"), JOB)
    assert (epilog.code, epilog.output) == (0, "job-77: deleted")


def test_a_job_that_asks_for_nothing_is_left_alone(node: Machine) -> None:
    for name in ("prolog", "task-prolog", "epilog"):
        done = node.run(str(SAMPLES / name), JOB)
        assert (done.code, done.output) == (0, "")


def test_a_job_that_cannot_be_served_does_not_start(node: Machine) -> None:
    done = node.run(str(SAMPLES / "prolog"), {**JOB, "SLURM_JOB_COMMENT": "amdvgpu:vram=900GiB"})
    assert done.code == 1
    assert done.output.startswith("amdvgpuctl: wanted 900 GiB")
