"""BookStore: what the contract tests cannot see, that is damage and durability."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from amdvgpud.core.errors import Conflict, HostFailure, StateUnreadable
from amdvgpud.core.model import Book, Compute, GpuId, HealthOverride, Request, Slice, slice_name
from amdvgpud.host.store import BookStore

A_SLICE = Slice(slice_name("a"), Request(slice_name("a"), Compute(percent=25.0)), (), 1.0, 1)
LIE = b'{"name":"x","shares":[{"cus":{"bits":[1,1]}}]}'.hex()


def found(directory: Path) -> Book:
    """What a daemon would start with."""
    with closing(BookStore(directory)) as store:
        return store.load()


def made(directory: Path) -> Path:
    found(directory)
    return directory / "state.db"


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda p: p.write_bytes(b""), id="emptied"),
        pytest.param(lambda p: p.write_bytes(b"not a database at all" * 100), id="overwritten"),
        pytest.param(lambda p: p.write_bytes(p.read_bytes()[:3000]), id="cut short"),
        pytest.param(lambda p: _sql(p, "UPDATE meta SET value = 99 WHERE key = 'schema_version'"), id="newer schema"),
        pytest.param(lambda p: _sql(p, "DROP TABLE leases"), id="a table missing"),
        pytest.param(lambda p: _sql(p, "INSERT INTO slices VALUES ('x', x'7b7d')"), id="a row that is no slice"),
        pytest.param(lambda p: _sql(p, f"INSERT INTO slices VALUES ('x', x'{LIE}')"), id="a row that lies"),
    ],
)
def test_a_state_that_cannot_be_understood_stops_us_and_is_left_alone(tmp_path: Path, damage: object) -> None:
    path = made(tmp_path)
    damage(path)  # type: ignore[operator]
    before = path.read_bytes()
    with pytest.raises(StateUnreadable, match=f"{path} cannot be understood: .*left as it is"):
        found(tmp_path)
    assert path.read_bytes() == before


def _sql(path: Path, statement: str) -> None:
    db = sqlite3.connect(path)
    db.execute(statement)
    db.commit()
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()


def test_the_state_is_ours_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        path = made(tmp_path / "state")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_half_made_first_state_is_no_lost_state(tmp_path: Path) -> None:
    (tmp_path / "state.new").write_bytes(b"")
    assert found(tmp_path) == Book()


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HostFailure, match="could not be made"):
        found(tmp_path / "file" / "below")


def test_a_slice_of_before_a_field_was_added_is_read_with_its_default(tmp_path: Path) -> None:
    path = made(tmp_path)
    old = '{"name":"a","request":{"name":"a","compute":{"policy":"balanced","percent":25.0,"cu_count":null},'
    old += '"vram_bytes":null,"gpu_count":1,"on":[],"spread":"binpack"},"shares":[],"created_s":1.0,"revision":1}'
    _sql(path, f"INSERT INTO slices VALUES ('a', x'{old.encode().hex()}')")
    assert found(tmp_path).slices == {slice_name("a"): A_SLICE}


def as_of_version_1(path: Path) -> None:
    _sql(path, "DROP TABLE health_overrides")
    _sql(path, "UPDATE meta SET value = 1 WHERE key = 'schema_version'")


def test_a_state_of_version_1_becomes_one_of_ours_with_all_that_is_in_it(tmp_path: Path) -> None:
    with closing(BookStore(tmp_path)) as store:
        before = store.load()
        book = before.with_slice(A_SLICE).with_cordoned([GpuId("GPU-2")])
        store.commit(before, book)
    as_of_version_1(store.path)
    with closing(BookStore(tmp_path)) as store:
        assert store.load() == book
        after = book.with_health_override(GpuId("GPU-2"), HealthOverride(False, 5.0))
        store.commit(book, after)
    assert found(tmp_path) == after


def test_a_state_of_version_1_that_cannot_be_understood_stays_one(tmp_path: Path) -> None:
    path = made(tmp_path)
    as_of_version_1(path)
    _sql(path, f"INSERT INTO slices VALUES ('x', x'{LIE}')")
    before = path.read_bytes()
    with pytest.raises(StateUnreadable):
        found(tmp_path)
    assert path.read_bytes() == before


def test_a_change_that_could_not_be_taken_back_is_gone_with_the_next_one(tmp_path: Path) -> None:
    with closing(BookStore(tmp_path)) as store:
        empty = store.load()
        store.commit(empty, empty.with_oversubscription({GpuId("GPU-1"): 2.0}).with_slice(A_SLICE))
        # Whoever could not withdraw that (a full disk) goes on from the Book before it.
        after = empty.with_cordoned([GpuId("GPU-2")])
        store.commit(empty, after)
    assert found(tmp_path) == after


def test_two_daemons_never_keep_one_book(tmp_path: Path) -> None:
    with closing(BookStore(tmp_path)) as first:
        first.load()
        with pytest.raises(Conflict, match=f"another amdvgpud keeps its state in {tmp_path}"):
            found(tmp_path)
    assert found(tmp_path) == Book()


def test_a_commit_that_returned_survives_kill_9(tmp_path: Path) -> None:
    program = f"""
import os, pathlib, signal
from amdvgpud.core.model import GpuId
from amdvgpud.host.store import BookStore
store = BookStore(pathlib.Path({str(tmp_path)!r}))
book = store.load()
store.commit(book, book.with_cordoned([GpuId("GPU-1")]))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert found(tmp_path).cordoned == {"GPU-1"}
