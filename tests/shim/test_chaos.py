"""Random deaths and races over many rounds: the quota holds, everything comes back, no promise is broken.

The short form; ``make chaos`` runs 10 000 rounds (``CHAOS_ROUNDS``), and the long walks of test_explore.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from amdvgpud.core.model import Book, Compute, ComputePolicy, Request, Slice, slice_name
from amdvgpud.core.plan import place
from amdvgpud.host.ledger import write_slice
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree

if TYPE_CHECKING:
    from tests.shim.conftest import Built, Machine

REPOSITORY = Path(__file__).resolve().parents[2]
SHIM = REPOSITORY / "shim"
ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "150"))
MIB = 1 << 20
INNER = ("memory", "drm", "queue", "process", "ledger", "environ", "standalone", "next")


@pytest.mark.timeout(120 + ROUNDS // 5)
def test_eight_processes_of_which_one_is_always_being_killed_stay_within_the_quota(
    built: Built, machine: Machine
) -> None:
    chaos = built.drive.with_name("chaos")
    sources = [str(SHIM / f"src/{name}.c") for name in INNER]
    built.cc(["-O2", "-pthread", *sources, str(SHIM / "tests/chaos.c"), "-o", str(chaos)])
    a = machine.slice("a", (0, 64, None))
    environment = {k: v for k, v in machine.environment().items() if k != "LD_PRELOAD"}
    command = [str(chaos), "1000", str(64 * MIB), str(ROUNDS), "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    assert (found["rounds"], found["over"], found["left_bytes"]) == (ROUNDS, 0, 0)
    assert 32 * MIB < found["most_bytes"] <= 64 * MIB
    assert found["granted"] > ROUNDS
    assert machine.used(a) == 0


@pytest.fixture
def simulated(built: Built) -> Iterator[tuple[dict[str, str], Path]]:
    """Environment of a program on a simulated MI210 with a slice of 1.2 GiB, and the slice's guest directory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root, guest = Path(folder) / "machine", Path(folder) / "slice"
        build_tree(parse_simulation("mi210"), root)
        inventory = SysfsReader(root).read_inventory()
        request = Request(slice_name("a"), Compute(ComputePolicy.BALANCED, percent=50), 1200 * MIB)
        granted = Slice(slice_name("a"), request, place(Book(), inventory, request).shares, 0.0, 1)
        write_slice(guest, granted, inventory, sysfs_root=root)
        softkfd = Path(folder) / "libsoftkfd.so"
        sources = [str(path) for path in sorted((REPOSITORY / "softkfd/src").glob("*.c"))]
        options = ["-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-format-truncation"]
        built.cc([*options, *sources, "-ldl", "-lpthread", "-o", str(softkfd)])
        environment = {"PATH": os.environ["PATH"], "SOFTKFD_ROOT": str(root), "AMDVGPU_SLICE_DIR": str(guest)}
        yield {**environment, "LD_PRELOAD": f"{built.gate} {softkfd}"}, guest


def test_two_processes_at_the_threshold_of_the_scratch_reserve_never_make_each_other_abort(
    built: Built, simulated: tuple[dict[str, str], Path]
) -> None:
    """1200 MiB: more than eight times 140, so one may want the reserve; then nothing is promised to the other."""
    environment, _ = simulated
    race = built.drive.with_name("chaos_reserve")
    built.cc(["-O1", str(SHIM / "tests/chaos_reserve.c"), "-o", str(race)])
    done = subprocess.run([race, "100"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["rounds"], found["aborts"]) == (100, 0)
    assert found["reserves"] >= 100  # each round's first; the second only where the first had already ended
