"""The Book made true outside: journal, slices' files and CDI file, in the order that survives a crash.

Owns that order, its undoing, and the repair of what a crash left between two steps. Blocking, and one at a time: the
Node asks from a thread of its own while it holds the Book. Decides nothing and keeps nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from amdvgpud.core.errors import HostFailure, NotFound
from amdvgpud.core.model import Book, Inventory, Slice, SliceName, Usage
from amdvgpud.core.plan import lost_reason
from amdvgpud.ports import CdiSpecs, Journal, SliceFiles

log = logging.getLogger(__name__)


def changed(before: Book, after: Book) -> list[SliceName]:
    """The slices that are new in ``after``, or other than they were."""
    return [name for name, item in after.slices.items() if before.slices.get(name) is not item]


@dataclass(frozen=True, slots=True)
class Disk:
    journal: Journal
    files: SliceFiles
    cdi: CdiSpecs

    def commit(
        self, before: Book, after: Book, inventory: Inventory, lost: Container[SliceName], *, rewrite: bool
    ) -> None:
        """In order: journal, files of what is new, CDI, files of what is gone (a mount's source outlives its spec).

        On failure all says ``before`` again, as far as it can, and the failure is raised. ``rewrite``: a changed slice
        gets new files (its users, if any, are gone) rather than new values in the old.
        """
        self.journal.commit(before, after)
        fresh, gone = changed(before, after), before.slices.keys() - after.slices.keys()
        try:
            for name in fresh:
                if rewrite and name in before.slices:
                    self.files.remove(name)
                self.files.write(after.slices[name], inventory)
            if fresh or gone:
                # What was wrong with the files of a fresh one is past.
                self._publish(after, inventory, [name for name in after.slices if name in lost and name not in fresh])
        except Exception as error:  # whatever it is: disk and memory must not part
            self._undo(before, after, inventory, lost)
            if isinstance(error, OSError):
                raise HostFailure(f"the change was not made: {error}") from error
            raise
        for name in gone:
            self._remove(name)

    def repair(
        self, book: Book, inventory: Inventory, lost: Container[SliceName], stale: Iterable[SliceName]
    ) -> dict[SliceName, str]:
        """Files, of ``stale`` slices and of those that have none, and CDI for all live slices; by name, what failed.

        A slice that fails must not keep the others from working. Whoever still runs in a lost one keeps the policy
        that was: the GPU it names is not there.
        """
        there = self.files.names()
        wanting = (set(stale) | (book.slices.keys() - there)) & book.slices.keys()
        failed: dict[SliceName, str] = {}
        for name in (name for name in book.slices if name in wanting and name not in lost):
            try:
                self.files.write(book.slices[name], inventory)
            except Exception as error:
                failed[name] = f"its files could not be written: {error}"
                log.warning("%s: its files could not be written, it is not offered: %s", name, error)
        live = [item for name, item in book.slices.items() if name not in lost and name not in failed]
        if (refusal := self.cdi.publish(live, inventory).error) is not None:
            log.warning("The CDI file could not be written, the previous one stays: %s", refusal)
        for name in there - book.slices.keys():
            if not self._may_be_of_a_lost_book(name, book):
                self._remove(name)  # left by a crash between journal and files; nobody was ever told of it
        return failed

    def _may_be_of_a_lost_book(self, name: SliceName, book: Book) -> bool:
        """Whether somebody may have ``name`` by a Book that was lost: one that never had anything and finds files, or
        somebody lives in them. They stay for a slice that is made anew for who has it, with its ledger."""
        if book.revision == 0:
            return True
        with contextlib.suppress(NotFound, HostFailure):
            return bool(self.files.usage(name).processes)
        return False

    def reclaim(self, names: Iterable[SliceName]) -> list[tuple[SliceName, int]]:
        """(slice, bytes) where dead processes' charges were returned."""
        freed = []
        for name in names:
            # A slice may be deleted while its ledger is read: readers take no turn behind those who change the Book.
            # What else is wrong with a ledger shows where it is read, and is no reason to look past the others.
            with contextlib.suppress(NotFound, HostFailure):
                if freed_bytes := self.files.reclaim(name):
                    freed.append((name, freed_bytes))
        return freed

    def usage(self, names: Iterable[SliceName]) -> Mapping[SliceName, Usage]:
        """What the ledgers say; one that cannot be read says why, one that is not there is left out."""
        found = {}
        for name in names:
            try:
                found[name] = self.files.usage(name)
            except NotFound:
                continue
            except HostFailure as error:
                found[name] = Usage(name, damaged=str(error))
        return found

    def _publish(self, book: Book, inventory: Inventory, lost: Container[SliceName]) -> None:
        live: list[Slice] = [
            item for name, item in book.slices.items() if name not in lost and lost_reason(item, inventory) is None
        ]
        if (error := self.cdi.publish(live, inventory).error) is not None:
            raise HostFailure(f"the CDI file could not be written, so nothing was changed: {error}")

    def _remove(self, name: SliceName) -> None:
        """Nothing is promised by these files any more: that they stay is no reason to keep the promise.

        Any error, for the slice's owner may have put anything there (folders nested past Python's recursion, say).
        """
        try:
            self.files.remove(name)
        except Exception as error:
            log.warning("%s: its files could not be removed, the next scan tries again: %s", name, error)

    def _undo(self, before: Book, after: Book, inventory: Inventory, lost: Container[SliceName]) -> None:
        """Best effort, each step for itself: what it cannot mend, the next start's reconcile does."""
        steps: list[Callable[[], object]] = [lambda: self.journal.commit(after, before)]
        for name in changed(before, after):
            old = before.slices.get(name)
            steps.append(
                (lambda name=name: self.files.remove(name))  # type: ignore[misc]
                if old is None
                else (lambda old=old: self.files.write(old, inventory))  # type: ignore[misc]
            )
        steps.append(lambda: self._publish(before, inventory, lost))
        for step in steps:
            try:
                step()
            except Exception as error:
                log.warning("Undoing a failed change: %s", error)
