"""How soon a fault shows: the real daemon on a simulated machine, in a corner with an event socket of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.root
def test_a_fault_is_in_api_and_metrics_soon_after_its_event_and_within_a_pulse_without_one() -> None:
    """The limits leave room for a loaded machine; what it takes is measured by `make bench`."""
    done = subprocess.run(
        ["unshare", "--net", "--mount", sys.executable, "-m", "tests.health_corner"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen.keys() == {"wedged_s", "unplugged_s", "kfd_event_s", "without_event_s", "recovered_s", "pulse_s"}
    assert seen["wedged_s"] < 1.0
    assert seen["unplugged_s"] < 3.0
    assert seen["kfd_event_s"] < 1.0
    assert seen["without_event_s"] < seen["pulse_s"] + 2.0
