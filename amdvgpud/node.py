"""This machine's state: one owner of the Book, who decides by core and acts through ports.

``Node`` is the only one who changes the Book. Everybody else gets frozen pictures. One grant, in order: place (pure)
-> journal on disk -> policy and ledger files -> CDI spec -> Book -> watchers -> answer. A crash between any two is
repaired at start by one ``reconcile``, which is the same code that a hot-plug runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from amdvgpud.core.model import (
    Book,
    GpuId,
    Holder,
    Inventory,
    Lease,
    LeaseId,
    Request,
    Slice,
    SliceName,
    Usage,
)
from amdvgpud.core.plan import Plan


class Sysfs(Protocol):
    """Reads the machine. Does not raise for what it finds there: that is what ``unusable`` is for."""

    def read_inventory(self) -> Inventory: ...

    def vram_used_bytes(self, pci_address: str) -> int | None:
        """The driver's own figure for the whole device; None where it cannot be had (absent is not zero)."""
        ...


class Journal(Protocol):
    """The Book on disk. ``commit`` returns when the change would survive a power cut."""

    def load(self) -> Book:
        """``StateUnreadable`` (file untouched) where it cannot be understood; an empty Book where there is none."""
        ...

    def commit(self, before: Book, after: Book) -> None: ...


class SliceFiles(Protocol):
    """The policy and ledger files of each slice (design: one directory a slice). Every call is idempotent."""

    def prepare(self) -> None:
        """The directory of slices, on its own size-limited tmpfs where that can be had. ``HostFailure`` if not."""
        ...

    def write(self, item: Slice, inventory: Inventory) -> None:
        """Make the slice's directory, or bring its policy up to date in place; ledgers keep inode and content."""
        ...

    def remove(self, name: SliceName) -> None: ...

    def names(self) -> frozenset[SliceName]:
        """The slices that have a directory, whoever made it."""
        ...

    def usage(self, name: SliceName) -> Usage:
        """A picture of the ledger, read with pread and bounds checked; a damaged file is a finding, not an error."""
        ...

    def reclaim(self, name: SliceName) -> int:
        """Return the charges of dead processes to the slice; the bytes returned."""
        ...


@dataclass(frozen=True, slots=True)
class CdiStatus:
    path: str
    written: bool
    """False: there is no file, because there is no slice to name or because the last write failed."""
    error: str | None
    conflicts: tuple[str, ...]


class CdiSpecs(Protocol):
    """The CDI file. The previous one stays whole until a valid new one replaces it."""

    def publish(self, slices: Sequence[Slice], inventory: Inventory) -> CdiStatus: ...

    def render(self, slices: Sequence[Slice], inventory: Inventory) -> dict[str, object]:
        """The document that ``publish`` would write (``devices`` may be empty here)."""
        ...

    def status(self) -> CdiStatus: ...


@dataclass(frozen=True, slots=True)
class Event:
    id: int
    revision: int
    time_s: float
    kind: str
    subject: str
    detail: str


@dataclass(frozen=True, slots=True)
class NodeView:
    """What the faces show: one consistent picture."""

    inventory: Inventory
    book: Book
    usage: dict[SliceName, Usage]
    lost: dict[SliceName, str]
    cdi: CdiStatus
    ready: bool


class Node:
    def __init__(
        self,
        sysfs: Sysfs,
        journal: Journal,
        files: SliceFiles,
        cdi: CdiSpecs,
        *,
        now_s: Callable[[], float],
        process_alive: Callable[[Holder], bool],
        max_slices_per_partition: int = 64,
    ) -> None: ...

    async def start(self) -> None:
        """Load the Book, scan, reconcile files and CDI with it. Ready afterwards."""

    def view(self) -> NodeView:
        """The present picture; no I/O (usage is as of the last tick or the last :meth:`refresh_usage`)."""
        raise NotImplementedError

    async def refresh_usage(self, names: Sequence[SliceName] | None = None) -> NodeView:
        """Read the ledgers anew (all, or those named), then the picture."""
        raise NotImplementedError

    async def plan(self, request: Request) -> Plan:
        """Where ``request`` would go; nothing changes. ``NoRoom``, ``Invalid``, ``NotFound`` as :meth:`put_slice`."""
        raise NotImplementedError

    async def put_slice(
        self,
        request: Request,
        *,
        owner_uid: int = 0,
        if_revision: int | None = None,
        create_only: bool = False,
    ) -> tuple[Slice, bool]:
        """Create the slice, or replace it if it differs (refused while it runs or is held); true if it is new."""
        raise NotImplementedError

    async def resize_slice(self, name: SliceName, vram_bytes: int, *, if_revision: int | None = None) -> Slice:
        raise NotImplementedError

    async def delete_slice(self, name: SliceName, *, if_revision: int | None = None, force: bool = False) -> None:
        """``Conflict`` while processes run in it or somebody holds it, unless ``force``."""

    async def grant_lease(
        self,
        holder: Holder,
        *,
        slice: SliceName | None = None,
        request: Request | None = None,
        ttl_s: float | None = None,
        owner_uid: int = 0,
    ) -> Lease:
        """Exactly one of ``slice`` (``Conflict`` if held) and ``request`` (an ephemeral slice)."""
        raise NotImplementedError

    async def renew_lease(self, lease_id: LeaseId, ttl_s: float | None) -> Lease:
        raise NotImplementedError

    async def release_lease(self, lease_id: LeaseId) -> None: ...

    async def set_cordoned(self, gpu: GpuId, cordoned: bool) -> None: ...

    async def set_oversubscription(self, gpu: GpuId, ratio: float) -> None: ...

    async def rescan(self) -> None:
        """Read the machine again and reconcile. Coalesces: callers that arrive while one runs share the next."""

    async def tick(self) -> None:
        """Once a period: expire leases, end those of dead holders, reclaim dead slots, refresh usage."""

    def events_since(self, since: int) -> tuple[Sequence[Event], int, bool]:
        """(events after id ``since``, last id, whether some were dropped in between)."""
        raise NotImplementedError

    async def wait_event(self, since: int, timeout_s: float) -> None:
        """Return when an event after ``since`` exists, or after ``timeout_s``."""
