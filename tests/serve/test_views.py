"""What is said of a slice: by what its limits are held, and what the kernel knows of its processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from amdvgpud.core.containers import Container
from amdvgpud.core.image import Verdict
from amdvgpud.core.model import Book, Compute, ComputePolicy, Request, Slice, SliceName
from amdvgpud.core.plan import place
from amdvgpud.core.truth import ProcessTruth, Truth
from amdvgpud.serve.views import enforced_by
from tests.fakes import GIB, an_inventory

ALICE = SliceName("alice")
ID = "0123456789abcdef" * 4
SCOPE = f"/machine.slice/libpod-{ID}.scope"
CAPPED = Container(ALICE, ID, 7, 70, f"{SCOPE}/container", None, 0.0, reported=True, gate=Verdict(True), cap="")
STATIC = replace(CAPPED, gate=Verdict(False, "a static program"))
OTHER = replace(CAPPED, id="f" * 64, cgroup=f"/machine.slice/libpod-{'f' * 64}.scope")


def a_slice(compute: Compute, vram_bytes: int | None) -> Slice:
    request = Request(ALICE, compute, vram_bytes)
    return Slice(ALICE, request, place(Book(), an_inventory(), request).shares, 0.0, 1)


def processes(*cgroups: str | None) -> Truth:
    rows = (ProcessTruth(pid, 1, 1, 1, "x", True, {}, {}, {}, cgroup) for pid, cgroup in enumerate(cgroups))
    return Truth(ALICE, {}, tuple(rows), True)


@pytest.mark.parametrize(
    ("containers", "truth", "said"),
    [
        ((), None, "gate"),
        ((CAPPED,), None, "gate"),  # before the first look, or where the kernel's list cannot be had
        ((CAPPED,), processes(), "gate+dmem"),
        ((CAPPED,), processes(f"{SCOPE}/container", SCOPE), "gate+dmem"),
        ((CAPPED,), processes(f"{SCOPE}/container", "/user.slice/session-1.scope"), "gate"),
        ((CAPPED,), processes(f"{SCOPE}-not"), "gate"),
        ((CAPPED,), processes(None), "gate"),
        ((replace(CAPPED, cap="no dmem controller"),), processes(), "gate"),
        ((CAPPED, OTHER), processes(), "gate"),  # each up to the whole quota, and their sum is held by nobody
        ((STATIC,), processes(), "dmem"),
        ((STATIC,), processes("/elsewhere"), "none"),
        ((replace(STATIC, cap="no dmem controller"),), processes(), "none"),
    ],
)
def test_a_slice_says_by_what_it_is_enforced(containers: tuple[Container, ...], truth: Truth | None, said: str) -> None:
    assert enforced_by(a_slice(Compute(percent=25), GIB), an_inventory(), containers, truth) == said


def test_a_whole_gpu_has_nothing_to_enforce() -> None:
    assert enforced_by(a_slice(Compute(ComputePolicy.WHOLE), None), an_inventory(), (CAPPED,)) == "none"
