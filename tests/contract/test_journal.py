"""The Journal port: the stand-in and the real store keep the same promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from amdvgpud.core.errors import HostFailure
from amdvgpud.core.model import (
    Book,
    Compute,
    ComputePolicy,
    CuSet,
    GpuId,
    HealthOverride,
    Holder,
    Lease,
    LeaseId,
    PartitionId,
    Request,
    Share,
    Slice,
    Spread,
    slice_name,
)
from amdvgpud.host.store import BookStore
from amdvgpud.ports import Journal
from tests.fakes import GIB, MemoryJournal

Open = Callable[[], Journal]


@pytest.fixture(params=["memory", "sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Each call is another daemon on the same state; the one before is gone then."""
    kept = MemoryJournal()
    journals: list[Journal] = []

    def another() -> Journal:
        for journal in journals:
            journal.close()
        journals.append(kept if request.param == "memory" else BookStore(tmp_path))
        return journals[-1]

    yield another
    for journal in journals:
        journal.close()


def a_slice(name: str, revision: int = 1) -> Slice:
    request = Request(
        slice_name(name),
        Compute(ComputePolicy.EXACT, cu_count=38),
        16 * GIB,
        2,
        ("0", "GPU-1/0"),
        Spread.SPREAD,
        after=(slice_name("before"),),
    )
    share = Share(PartitionId("GPU-1/0"), 16 * GIB, CuSet((0, 1, 9)), False, 38, 38, 32, "abc")
    whole = Share(PartitionId("GPU-2/0"), 192 * GIB, None, False, 304, 304, 288, "def")
    return Slice(slice_name(name), request, (share, whole), 1234.5, revision, 1000)


def test_a_new_journal_is_an_empty_book(reopen: Open) -> None:
    assert reopen().load() == Book()


def test_all_of_a_book_comes_back(reopen: Open) -> None:
    journal = reopen()
    before = journal.load()
    lease = Lease(LeaseId("l1"), slice_name("a"), Holder("me", 7, 8), 1.5, 2.5, ephemeral=True)
    after = (
        before.with_slice(a_slice("a"))
        .with_slice(a_slice("b"))
        .with_lease(lease)
        .with_cordoned([GpuId("GPU-1")])
        .with_oversubscription({GpuId("GPU-2"): 1.5})
        .with_health_override(GpuId("GPU-1"), HealthOverride(False, 3.5))
    )
    journal.commit(before, after)
    assert reopen().load() == after


def test_what_was_taken_out_stays_out(reopen: Open) -> None:
    journal = reopen()
    empty = journal.load()
    two = empty.with_slice(a_slice("a")).with_slice(a_slice("b")).with_cordoned([GpuId("g")])
    two = two.with_health_override(GpuId("g"), HealthOverride(True, 1.0))
    journal.commit(empty, two)
    one = two.without_slice(slice_name("a")).with_cordoned([])
    one = one.with_health_override(GpuId("g"), None)
    journal.commit(two, one)
    assert reopen().load() == one


def test_a_change_can_be_taken_back(reopen: Open) -> None:
    journal = reopen()
    before = journal.load()
    after = before.with_slice(a_slice("a"))
    journal.commit(before, after)
    journal.commit(after, before)
    assert reopen().load() == before


def test_a_closed_one_refuses_a_change_and_keeps_what_it_has(reopen: Open) -> None:
    journal = reopen()
    before = journal.load()
    after = before.with_slice(a_slice("a"))
    journal.commit(before, after)
    journal.close()
    journal.close()  # a second one is harmless
    with pytest.raises(HostFailure, match="commit before load"):
        journal.commit(after, before)
    assert journal.load() == after
