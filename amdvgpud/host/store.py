"""The Book on disk: one sqlite file, changed in transactions that survive a power cut.

Slices, leases and what operators set on GPUs are each a row; a row's value is the JSON of its core dataclass, so that
the model is declared once. WAL with ``synchronous=FULL``: a commit that returned is on the medium. Nothing of this boot
is stored (no render minor, no KFD gpu_id): what is placed is named by stable ids only.

A state that cannot be understood is never emptied and never written to: ``StateUnreadable`` says what to do.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from amdvgpud.core.errors import Conflict, HostFailure, StateUnreadable
from amdvgpud.core.model import Book, GpuId, HealthOverride, Lease, LeaseId, Slice, SliceName

SCHEMA_VERSION: Final = 2
"""Raised when a row's meaning changes; a newer number than ours is refused, an older one is migrated."""

_SCHEMA: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE slices (name TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE leases (id TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE cordoned (gpu TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;
CREATE TABLE oversubscription (gpu TEXT PRIMARY KEY, ratio REAL NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE health_overrides (gpu TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT, WITHOUT ROWID;
"""

_MIGRATIONS: Final[Mapping[int, str]] = {
    1: "CREATE TABLE health_overrides (gpu TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT, WITHOUT ROWID",
}
"""The statement that makes a file of that version one of the next."""

_T = TypeVar("_T", Slice, Lease)
_decode_override: Final = msgspec.json.Decoder(HealthOverride).decode


class BookStore:
    """The Journal port over ``<directory>/state.db``. One writer; calls come one at a time, from any thread."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "state.db"
        self._db: sqlite3.Connection | None = None
        self._lock: int | None = None
        self._stored = Book()
        """What the file says. Not always what our caller takes it to say: a change may have failed to be withdrawn."""

    def load(self) -> Book:
        """The stored Book; an empty one where there is no file. ``StateUnreadable`` leaves the file as it is.

        ``Conflict`` while another one keeps its Book here: two would each promise what the other has promised.
        """
        self.close()
        self._claim()
        if not self.path.exists():
            self._create()
        # sqlite takes an empty file for an empty database; here it is a lost one.
        if self.path.stat().st_size == 0:
            raise self._unreadable("it is empty")
        try:
            self._db = db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
            if (verdict := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise self._unreadable(str(verdict))
            meta = self._migrated(db, dict(db.execute("SELECT key, value FROM meta")))
            if meta.get("schema_version") != SCHEMA_VERSION:
                raise self._unreadable(
                    f"its schema version is {meta.get('schema_version')}, this amdvgpud knows {SCHEMA_VERSION}"
                )
            self._stored = Book(
                meta["revision"],
                {s.name: s for s in self._rows(db, "slices", Slice)},
                {lease.id: lease for lease in self._rows(db, "leases", Lease)},
                frozenset(GpuId(gpu) for (gpu,) in db.execute("SELECT gpu FROM cordoned")),
                {GpuId(gpu): ratio for gpu, ratio in db.execute("SELECT gpu, ratio FROM oversubscription")},
                {GpuId(gpu): _decode_override(v) for gpu, v in db.execute("SELECT gpu, value FROM health_overrides")},
            )
            if db.in_transaction:
                db.execute("COMMIT")
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            return self._stored
        except (sqlite3.Error, KeyError, ValueError, msgspec.ValidationError, msgspec.DecodeError) as error:
            raise self._unreadable(str(error)) from error

    def commit(self, before: Book, after: Book) -> None:
        """Make the file say ``after``. All or nothing; durable on return.

        What is written is the difference to what the file says, not to ``before``: where an earlier change could not be
        withdrawn, it goes with the next one, and does not come back at the next start beside what was promised since.
        """
        if self._db is None:
            raise HostFailure(f"{self.path}: commit before load")
        db, before = self._db, self._stored
        try:
            db.execute("BEGIN IMMEDIATE")
            _replace(db, "slices", "name", before.slices, after.slices)
            _replace(db, "leases", "id", before.leases, after.leases)
            if before.cordoned != after.cordoned:
                db.execute("DELETE FROM cordoned")
                db.executemany("INSERT INTO cordoned VALUES (?)", [(gpu,) for gpu in sorted(after.cordoned)])
            if before.oversubscription != after.oversubscription:
                db.execute("DELETE FROM oversubscription")
                db.executemany("INSERT INTO oversubscription VALUES (?, ?)", sorted(after.oversubscription.items()))
            if before.health_overrides != after.health_overrides:
                words = [(gpu, msgspec.json.encode(word)) for gpu, word in sorted(after.health_overrides.items())]
                db.execute("DELETE FROM health_overrides")
                db.executemany("INSERT INTO health_overrides VALUES (?, ?)", words)
            db.execute("UPDATE meta SET value = ? WHERE key = 'revision'", (after.revision,))
            db.execute("COMMIT")
        except sqlite3.Error as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise HostFailure(f"{self.path}: the change could not be stored and was not made: {error}") from error
        self._stored = after

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _claim(self) -> None:
        """The directory's own lock: it leaves no file behind, and goes with its process."""
        directory = self.path.parent
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise HostFailure(f"{directory}: the directory of the state could not be made: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise Conflict(
                f"another amdvgpud keeps its state in {directory} ({error}): stop it, or give this one another "
                "state_dir"
            ) from error

    def _create(self) -> None:
        # Under another name first: a crash in the middle must not leave what `load` would call a lost state.
        fresh = self.path.with_suffix(".new")
        try:
            fresh.unlink(missing_ok=True)
            with closing(sqlite3.connect(fresh)) as db, db:
                db.executescript(_SCHEMA)
                db.executemany("INSERT INTO meta VALUES (?, ?)", [("schema_version", SCHEMA_VERSION), ("revision", 0)])
            fresh.chmod(0o600)
            fresh.rename(self.path)
            directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except (OSError, sqlite3.Error) as error:
            raise HostFailure(f"{self.path}: the state file could not be made: {error}") from error

    def _migrated(self, db: sqlite3.Connection, meta: dict[str, int]) -> dict[str, int]:
        """An older file becomes one of ours, in a transaction that is left open: only what can be read is kept so."""
        while (step := _MIGRATIONS.get(meta.get("schema_version", 0))) is not None:
            if not db.in_transaction:
                db.execute("BEGIN IMMEDIATE")
            meta = {**meta, "schema_version": meta["schema_version"] + 1}
            db.execute(step)
            db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (meta["schema_version"],))
        return meta

    def _rows(self, db: sqlite3.Connection, table: str, kind: type[_T]) -> Iterable[_T]:
        decode: Callable[[bytes], _T] = msgspec.json.Decoder(kind).decode
        for (value,) in db.execute(f"SELECT value FROM {table}"):  # noqa: S608  # our own constants
            yield decode(value)

    def _unreadable(self, reason: str) -> StateUnreadable:
        self.close()
        return StateUnreadable(
            f"{self.path} cannot be understood: {reason}. It was left as it is, and nothing is granted. Restore it "
            "from a copy, or move it away to start without any slice: containers that run keep their limits either way."
        )


def _replace(
    db: sqlite3.Connection,
    table: str,
    key: str,
    before: Mapping[SliceName, Slice] | Mapping[LeaseId, Lease],
    after: Mapping[SliceName, Slice] | Mapping[LeaseId, Lease],
) -> None:
    old: Mapping[str, object] = {str(k): v for k, v in before.items()}
    new: Mapping[str, object] = {str(k): v for k, v in after.items()}
    gone = [(k,) for k in old if k not in new]
    changed = [(k, msgspec.json.encode(v)) for k, v in new.items() if old.get(k) is not v and old.get(k) != v]
    db.executemany(f"DELETE FROM {table} WHERE {key} = ?", gone)  # noqa: S608  # our own constants
    db.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", changed)  # noqa: S608
