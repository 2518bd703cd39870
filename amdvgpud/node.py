"""This machine's state: one owner of the Book, who decides by core and acts through ports.

``Node`` is the only one who changes the Book. Everybody else gets frozen pictures. One grant, in order: place (pure)
-> journal on disk -> policy and ledger files -> CDI spec -> Book -> watchers -> answer. A crash between any two is
repaired at start by one ``reconcile``, which is the same code that a hot-plug runs.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, TypeVar

from amdvgpud.core import identify, modes
from amdvgpud.core import plan as planner
from amdvgpud.core.containers import Container
from amdvgpud.core.errors import AmdvgpuError, Conflict, HostFailure, Invalid, Lingering, NoRoom, NotFound, Stale
from amdvgpud.core.health import Condition, Health, effective
from amdvgpud.core.model import (
    Book,
    ComputePolicy,
    CuSet,
    Gone,
    Gpu,
    GpuId,
    HealthOverride,
    Holder,
    Inventory,
    Lease,
    LeaseId,
    PartitionId,
    Request,
    Share,
    Slice,
    SliceName,
    Usage,
    gpu_of,
)
from amdvgpud.core.modes import Target
from amdvgpud.core.plan import Plan
from amdvgpud.core.truth import given_only
from amdvgpud.disk import Disk, changed
from amdvgpud.events import Event, Events
from amdvgpud.ports import (
    CdiSpecs,
    CdiStatus,
    Journal,
    KfdHolder,
    Leftovers,
    Modes,
    NoKfdHolder,
    NoLeftovers,
    NoModes,
    SliceFiles,
    Sysfs,
    named,
)

log = logging.getLogger(__name__)

SETTLING_LOOKS: Final = 10
SETTLING_PAUSE_S: Final = 0.2
"""How long a switch waits for two scans alike: the write returns when the KFD is back, so the first two should be. The
rest is for what userspace and other GPUs do meanwhile; guessed."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Repartition:
    """What a switch of modes has done, or would do."""

    gpu: GpuId
    before: str | None
    after: str | None
    """The compute mode before and after; equal: nothing was switched."""
    partitions: int
    index: int
    """Rank in KFD node order, which a switch moves to the last."""
    memory: str | None
    memory_requested: str | None
    """The memory mode that the driver was told to come up with, when it is loaded anew; None: none was asked for."""
    lost: tuple[SliceName, ...]
    """Slices that were cut for the mode before."""
    settled: bool
    """False: the topology still changed after the last look that was allowed; a later scan has the rest."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """What the faces show: one consistent picture."""

    inventory: Inventory
    book: Book
    usage: dict[SliceName, Usage]
    lost: dict[SliceName, str]
    cdi: CdiStatus
    ready: bool
    warnings: tuple[str, ...] = ()
    """What an operator should look at: of the scan, of promises that cannot be kept, of the machine, of the files."""
    containers: Mapping[SliceName, Sequence[Container]] = field(default_factory=dict)
    """Which have the slice."""
    health: Mapping[GpuId, Health] = field(default_factory=dict)
    """What holds of each GPU that is there and was looked at, or that a person has given his word on."""
    health_found: Mapping[GpuId, Health] = field(default_factory=dict)
    """The same without people's words."""
    gone: tuple[Gone, ...] = ()
    health_changes: Mapping[tuple[GpuId, str], int] = field(default_factory=dict)
    """Changes of condition since the start, by GPU and by the source that they are due to."""


class Node:
    """See the module's head. Coroutines that change something run to their end even if their caller is cancelled."""

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
        modes: Modes | None = None,
        kfd_holder: KfdHolder | None = None,
        leftovers: Leftovers | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``now_s`` is Unix time; ``process_alive`` answers for a holder's process (a holder without one lives);
        ``pause`` waits so many seconds."""
        self._sysfs = sysfs
        self._modes = modes or NoModes()
        self._kfd_holder = kfd_holder or NoKfdHolder()
        self._leftovers = leftovers or NoLeftovers()
        self._pause = pause
        self._disk = Disk(journal, files, cdi)
        self._now_s = now_s
        self._process_alive = process_alive
        self._max_slices_per_partition = max_slices_per_partition

        self._changing = asyncio.Lock()
        self._next_scan: asyncio.Task[None] | None = None
        self._book = Book()
        self._inventory = Inventory()
        self._seen: dict[GpuId, Gpu] = {}
        """Each GPU that a scan has found, as it was last."""
        self._gone: dict[GpuId, Gone] = {}
        self._lost: dict[SliceName, str] = {}
        self._broken: tuple[str, ...] = ()
        """Promises that the machine, as it is now, cannot keep."""
        self._scan_failure: str | None = None
        self._usage: dict[SliceName, Usage] = {}
        self._found: dict[GpuId, Health] = {}
        """What was found of each GPU; ``_health`` is what holds, with what people have said."""
        self._health: dict[GpuId, Health] = {}
        self._health_changes: Counter[tuple[GpuId, str]] = Counter()
        self._containers: dict[SliceName, tuple[Container, ...]] = {}
        self._ready = False
        self._events = Events()

    def __repr__(self) -> str:
        gpus, slices, leases = len(self._inventory.gpus), len(self._book.slices), len(self._book.leases)
        return f"<Node r{self._book.revision}: {gpus} GPUs, {slices} slices ({len(self._lost)} lost), {leases} leases>"

    # ------------------------------------------------------------------------------------------------- pictures

    def view(self) -> NodeView:
        """The present picture; no I/O (usage is as of the last tick or the last :meth:`refresh_usage`)."""
        return NodeView(
            self._inventory,
            self._book,
            dict(self._usage),
            dict(self._lost),
            self._disk.cdi.status(),
            self._ready,
            (
                *([self._scan_failure] if self._scan_failure else []),
                *self._broken,
                *self._inventory.warnings,
                *self._disk.files.warnings,
                *self._unfit_warnings(),
            ),
            containers={name: c for name, c in self._containers.items() if name in self._book.slices},
            health={gpu.id: self._health[gpu.id] for gpu in self._inventory.gpus if gpu.id in self._health},
            health_found={gpu.id: self._found[gpu.id] for gpu in self._inventory.gpus if gpu.id in self._found},
            gone=tuple(self._gone.values()),
            health_changes=dict(self._health_changes),
        )

    def _unfit_warnings(self) -> Iterator[str]:
        """GPUs that take no new slice, and who is on them: these keep what they have, CDI device included."""
        for gpu in self._inventory.gpus:
            if (health := self._health.get(gpu.id)) is not None and not health.placeable:
                names = ", ".join(item.name for item in self._slices_on(gpu.id))
                keeps = f"; what it has stays as it is: {names}" if names else ""
                yield f"{gpu.id} is {health.condition} and takes no new slice: {health.reason}{keeps}"

    async def refresh_usage(self, names: Sequence[SliceName] | None = None) -> NodeView:
        """Read the ledgers anew (all, or those named), then the picture."""
        wanted = list(self._book.slices) if names is None else [n for n in names if n in self._book.slices]
        await self._read_ledgers(wanted)
        return self.view()

    async def plan(self, request: Request) -> Plan:
        """Where ``request`` would go; nothing changes. Raises what :meth:`put_slice` would."""
        return await self._place_on_clean(request)

    # ------------------------------------------------------------------------------------------------- lifetime

    async def start(self) -> None:
        """Load the Book, scan, and make files and CDI say what the Book says. Ready afterwards.

        ``StateUnreadable`` and ``HostFailure`` mean that the daemon must not go on: a node that forgot its promises
        would make them twice.
        """
        await asyncio.to_thread(self._disk.files.prepare)
        self._book = await asyncio.to_thread(self._disk.journal.load)
        self._weigh_health()
        await self.rescan()
        self._ready = True
        log.info("%r is ready.", self)

    async def close(self) -> None:
        """Let go of the Book on disk, after the change that is being made; a later one is refused (``HostFailure``)."""
        async with self._changing:
            await asyncio.to_thread(self._disk.journal.close)

    async def rescan(self) -> None:
        """Read the machine again and reconcile. Coalesces: callers that arrive before it begins share one scan."""
        if self._next_scan is None:
            self._next_scan = asyncio.create_task(self._scan(), name="rescan")
        await asyncio.shield(self._next_scan)

    async def tick(self) -> None:
        """Once a period: end the leases that are over, return what dead processes held, read the ledgers."""
        await self._end_leases()
        await self.reclaim(list(self._book.slices))

    async def reclaim(self, names: Sequence[SliceName]) -> None:
        """Return what dead processes held in these slices, and read their ledgers. A slice that is gone is none."""
        for name, freed_bytes in await asyncio.to_thread(self._disk.reclaim, names):
            self.tell("ledger.reclaimed", name, f"{freed_bytes} bytes of dead processes were returned to the slice")
        await self._read_ledgers(names)

    # --------------------------------------------------------------------------------------------------- slices

    async def put_slice(
        self,
        request: Request,
        *,
        owner_uid: int = 0,
        profile: str = "",
        if_revision: int | None = None,
        create_only: bool = False,
    ) -> tuple[Slice, bool]:
        """Create the slice, or replace it if it differs (``Conflict`` while it runs or is held); true if it is new.

        Asking again for what is there already changes nothing. ``if_revision``: ``Stale`` unless the slice is there at
        just that revision. ``create_only``: ``Stale`` if it is there at all. ``profile``: what it is cut for.
        """
        return await self._change(self._put_slice(request, owner_uid, profile, if_revision, create_only))

    async def resize_slice(self, name: SliceName, vram_bytes: int, *, if_revision: int | None = None) -> Slice:
        """A new VRAM quota on each GPU of the slice, running or not: more at once, less as memory is freed."""
        return await self._change(self._resize_slice(name, vram_bytes, if_revision))

    async def delete_slice(self, name: SliceName, *, if_revision: int | None = None, force: bool = False) -> None:
        """``Conflict`` while processes run in it or somebody holds it, unless ``force``.

        Forced, its CUs and VRAM are free for others while what runs in it keeps its limits: the mounted files stay.
        """
        await self._change(self._delete_slice(name, if_revision, force))

    async def refuse_if_occupied(self, name: SliceName, verb: str) -> None:
        """``Conflict``: the slice cannot be ``verb``, because processes or containers are in it, whoever holds it.
        ``NotFound``: there is no such slice.
        """
        await self._refuse_if_occupied(self._slice(name), verb)

    # --------------------------------------------------------------------------------------------------- leases

    async def grant_lease(
        self,
        holder: Holder,
        *,
        slice: SliceName | None = None,
        request: Request | None = None,
        ttl_s: float | None = None,
        owner_uid: int = 0,
        container: bool = False,
    ) -> Lease:
        """Exactly one of ``slice`` (``Conflict`` if it is held or lost) and ``request`` (an ephemeral slice).

        ``container``: it ends with the last container that has the slice, once there was one (:meth:`set_containers`).
        """
        if (slice is None) == (request is None):
            raise Invalid("a lease is either on an existing slice or on a requested one: name exactly one of the two")
        return await self._change(self._grant_lease(holder, slice, request, ttl_s, owner_uid, container))

    async def adopt(
        self,
        holder: Holder,
        *,
        slice: SliceName | None = None,
        request: Request | None = None,
        places: Mapping[PartitionId, CuSet | None] = MappingProxyType({}),
    ) -> Lease:
        """What ``holder`` has already, and this Book does not know of: it was lost, or is new. Exactly one of ``slice``
        and ``request``; of the latter ``places`` has the CUs on each Partition (None: whole).

        That its GPU is unfit or in use is no reason against it. ``Conflict`` where a rule of placement, or another
        promise, says that it cannot be so.
        """
        return await self._change(self._adopt(holder, slice, request, places))

    async def renew_lease(self, lease_id: LeaseId, ttl_s: float | None) -> Lease:
        """The lease now ends ``ttl_s`` from now (None: not by time)."""
        return await self._change(self._renew_lease(lease_id, ttl_s))

    async def release_lease(self, lease_id: LeaseId) -> None:
        """End the lease; an ephemeral slice goes with it, whoever runs in it (its files stay mounted there)."""
        await self._change(self._release_lease(lease_id, "lease.released", "released by its holder"))

    # ----------------------------------------------------------------------------------------------------- GPUs

    async def set_cordoned(self, gpu: GpuId, cordoned: bool) -> None:
        """A cordoned GPU takes no new slice; what is on it stays."""
        await self._change(self._set_cordoned(gpu, cordoned))

    async def set_containers(self, containers: Mapping[SliceName, tuple[Container, ...]]) -> None:
        """Who has which slice, whole. A lease for a container is bound to the first one, then to one of the others,
        and ends with the last."""
        await self._change(self._set_containers(containers))

    async def set_health(self, verdicts: Mapping[GpuId, Health]) -> None:
        """The standing verdicts, whole. A GPU that is not placeable takes no new slice; each change is an event."""
        self._found = dict(verdicts)
        self._weigh_health()

    async def set_health_override(self, gpu: GpuId, healthy: bool | None) -> None:
        """A person's word, which holds whatever is found; None takes it back."""
        await self._change(self._set_health_override(gpu, healthy))

    async def set_oversubscription(self, gpu: GpuId, ratio: float) -> None:
        """VRAM quotas on each partition of ``gpu`` may sum up to ``ratio`` times what it has; 1.0 switches it off."""
        await self._change(self._set_oversubscription(gpu, ratio))

    async def partition_gpu(
        self, gpu: GpuId, target: Target, *, force: bool = False, dry_run: bool = False, if_revision: int | None = None
    ) -> Repartition:
        """Cut ``gpu`` into another compute mode, and let its driver note another memory mode.

        ``Conflict`` names the leases, the slices with processes and the KFD processes on it; and the slices without
        any, unless ``force``: these are lost then, as their partitions are, and come back with the mode they were cut
        for. Nothing is moved. ``Invalid`` for a mode the GPU does not have; the driver's own refusals as
        :class:`Modes` gives them. What is so already changes nothing. ``dry_run``: the same refusals, and nothing else.

        Nothing of a switch is journalled. It is one write, which the kernel does or does not, and what it means for
        slices follows from Book and machine in every scan: a daemon that dies before the write finds the old mode when
        it starts, one that dies after it the new one and its slices lost. An intent on disk could only be wrong.
        """
        return await self._change(self._partition_alone(gpu, target, force, dry_run, if_revision))

    async def apply_targets(self, targets: Sequence[tuple[str, Target]]) -> None:
        """Cut each GPU that is idle as the configuration wants it. One that is not is said, and left as it is."""
        wanted, unknown = modes.resolve_targets(self._inventory, targets)
        for sentence in unknown:
            log.warning("partition.target: %s", sentence)
        for gpu, target in wanted.items():
            try:
                await self.partition_gpu(gpu, target)
            except AmdvgpuError as error:
                self.tell("gpu.target-refused", gpu, f"it stays as it is: {error}")
                log.warning("%s: the configured mode was not set: %s", gpu, error)

    # --------------------------------------------------------------------------------------------------- events

    def events_since(self, since: int) -> tuple[Sequence[Event], int, bool]:
        """(events after id ``since``, last id, whether some in between were dropped or never were this daemon's)."""
        return self._events.since(since)

    async def wait_event(self, since: int, timeout_s: float) -> None:
        """Return when an event after ``since`` exists, or after ``timeout_s``."""
        await self._events.wait(since, timeout_s)

    def tell(self, kind: str, subject: str, detail: str) -> None:
        """Tell the watchers what somebody has noticed. ``kind``: of a closed set."""
        self._events.tell(kind, subject, detail, revision=self._book.revision, time_s=self._now_s())

    # ---------------------------------------------------------------------------------------- changes, one at a time

    async def _change(self, change: Awaitable[_T]) -> _T:
        """Run ``change`` alone and to its end, even if the caller goes away in the middle of it."""

        async def alone() -> _T:
            async with self._changing:
                return await change

        return await asyncio.shield(asyncio.create_task(alone(), name="change"))

    async def _put_slice(
        self, request: Request, owner_uid: int, profile: str, if_revision: int | None, create_only: bool
    ) -> tuple[Slice, bool]:
        request = self._canonical(request)
        there = self._book.slices.get(request.name)
        if create_only and there is not None:
            raise Stale(f"slice {request.name} exists already (revision {there.revision})")
        if if_revision is not None:
            self._slice(request.name, if_revision)
        if there is not None:
            same = (self._canonical(there.request), there.owner_uid) == (request, owner_uid)
            if same and request.name not in self._lost:
                return there, False
            await self._refuse_if_used(there, "replaced")
        item = replace(self._placed(request, owner_uid, await self._place_on_clean(request)), profile=profile)
        await self._become(self._book.with_slice(item), rewrite=True)
        verb = "created" if there is None else "replaced"
        self.tell(f"slice.{verb}", item.name, f"{verb} on {', '.join(s.partition for s in item.shares)}")
        return item, there is None

    async def _resize_slice(self, name: SliceName, vram_bytes: int, if_revision: int | None) -> Slice:
        there = self._slice(name, if_revision)
        if name in self._lost:
            raise Conflict(f"slice {name} is lost ({self._lost[name]}): it can be deleted or replaced, not resized")
        plan = planner.resize(self._book, self._inventory, there, vram_bytes)
        request = replace(there.request, vram_bytes=vram_bytes)
        item = replace(there, request=request, shares=plan.shares, revision=self._book.revision + 1)
        await self._become(self._book.with_slice(item))
        self.tell("slice.resized", name, f"its quota is now {vram_bytes} bytes on each GPU")
        return item

    async def _delete_slice(self, name: SliceName, if_revision: int | None, force: bool) -> None:
        there = self._slice(name, if_revision)
        if not force:
            await self._refuse_if_used(there, "deleted")
        await self._become(self._book.without_slice(name))
        self.tell("slice.deleted", name, "deleted by force" if force else "deleted")

    async def _grant_lease(
        self,
        holder: Holder,
        slice: SliceName | None,
        request: Request | None,
        ttl_s: float | None,
        owner_uid: int,
        container: bool,
    ) -> Lease:
        now_s = self._now_s()
        if request is not None:
            if request.name in self._book.slices:
                raise Conflict(f"slice {request.name} exists already: lease it by its name, or ask under another one")
            request = self._canonical(request)
            item = self._placed(request, owner_uid, await self._place_on_clean(request))
            book = self._book.with_slice(item)
        else:
            assert slice is not None  # noqa: S101  # grant_lease has checked it
            item = self._slice(slice)
            if slice in self._lost:
                raise Conflict(f"slice {slice} is lost: {self._lost[slice]}")
            self._refuse_if_unfit(item)
            if (held := self._book.lease_of(slice)) is not None:
                raise Conflict(f"slice {slice} is held by lease {held.id} ({held.holder.text or 'no name given'})")
            await self._refuse_if_unclean(item, heirs=container)
            book = self._book
            if owner_uid not in (0, item.owner_uid):
                item = replace(item, owner_uid=owner_uid, revision=book.revision + 1)
                book = book.with_slice(item)
        lease = Lease(
            LeaseId(secrets.token_hex(8)),
            item.name,
            holder,
            now_s,
            None if ttl_s is None else now_s + ttl_s,
            ephemeral=request is not None,
            container=container,
        )
        if container:
            lease = _bound(lease, self._containers.get(item.name, ()))
        await self._become(book.with_lease(lease))
        self.tell("lease.granted", lease.id, f"slice {item.name} is held by {holder.text or 'somebody'}")
        return lease

    async def _adopt(
        self,
        holder: Holder,
        slice: SliceName | None,
        request: Request | None,
        places: Mapping[PartitionId, CuSet | None],
    ) -> Lease:
        book = self._book
        if request is not None:
            if request.name in book.slices:
                raise Conflict(f"slice {request.name} exists already")
            request = self._canonical(request)
            item = self._placed(request, 0, planner.take_over(book, self._inventory, request, places))
            book = book.with_slice(item)
        else:
            assert slice is not None  # noqa: S101  # as adopt has it
            item = self._slice(slice)
            if (held := book.lease_of(slice)) is not None:
                raise Conflict(f"slice {slice} is held by lease {held.id} ({held.holder.text or 'no name given'})")
        ephemeral = request is not None
        lease = Lease(LeaseId(secrets.token_hex(8)), item.name, holder, self._now_s(), None, ephemeral)
        await self._become(book.with_lease(lease))
        self.tell("lease.granted", lease.id, f"slice {item.name} is held by {holder.text}, since before this Book")
        return lease

    def _refuse_if_unfit(self, item: Slice) -> None:
        """``Conflict``: a new holder would be a new user of a GPU that takes none."""
        for share in item.shares:
            gpu = gpu_of(share.partition)
            if (health := self._health.get(gpu)) is not None and not health.placeable:
                raise Conflict(
                    f"slice {item.name} is on {gpu}, which is {health.condition} and takes no new user: {health.reason}"
                )

    async def _renew_lease(self, lease_id: LeaseId, ttl_s: float | None) -> Lease:
        expires_s = None if ttl_s is None else self._now_s() + ttl_s
        lease = replace(self._lease(lease_id), expires_s=expires_s)
        await self._become(self._book.with_lease(lease))
        self.tell("lease.renewed", lease_id, "it has no end" if ttl_s is None else f"it ends in {ttl_s:g} s")
        return lease

    async def _release_lease(self, lease_id: LeaseId, kind: str, why: str) -> None:
        lease = self._lease(lease_id)
        book = self._book.without_lease(lease_id)
        await self._become(book.without_slice(lease.slice) if lease.ephemeral else book)
        self.tell(kind, lease_id, f"slice {lease.slice}: {why}")

    async def _end_leases(self) -> None:
        now_s = self._now_s()
        for lease in list(self._book.leases.values()):
            if lease.expires_s is not None and lease.expires_s <= now_s:
                kind, why = "lease.expired", "its time is over"
            elif lease.container and self._containers.get(lease.slice):
                continue  # another container may have the slice still: set_containers is told
            elif not self._process_alive(lease.holder):
                kind, why = "lease.holder-ended", f"process {lease.holder.pid} has ended"
            else:
                continue
            try:
                await self._change(self._release_lease(lease.id, kind, why))
            except NotFound:
                continue  # its holder was faster
            except AmdvgpuError as error:
                log.warning(
                    "%s: the lease is over but could not be ended, the next tick tries again: %s", lease.id, error
                )

    async def _set_containers(self, containers: Mapping[SliceName, tuple[Container, ...]]) -> None:
        before, self._containers = self._containers, dict(containers)
        was = {(c.slice, c.id): c for group in before.values() for c in group}
        now = {(c.slice, c.id): c for group in containers.values() for c in group}
        for (name, identity), container in now.items():
            if (name, identity) not in was:
                self.tell("container.started", name, f"container {identity[:12]} has it (pid {container.pid})")
        for name, identity in was.keys() - now.keys():
            self.tell("container.ended", name, f"container {identity[:12]} has ended")
        for lease in list(self._book.leases.values()):
            if not lease.container:
                continue
            bound = _bound(lease, containers.get(lease.slice, ()))
            if bound.holder.pid is None and lease.holder.pid is not None:
                await self._release_lease(lease.id, "lease.container-ended", "its last container has ended")
            elif bound != lease:
                await self._become(self._book.with_lease(bound))
                self.tell("lease.bound", lease.id, f"it lasts as long as process {bound.holder.pid} of its container")

    async def _set_cordoned(self, gpu: GpuId, cordoned: bool) -> None:
        self._gpu(gpu)
        if (gpu in self._book.cordoned) == cordoned:
            return
        await self._become(self._book.with_cordoned(self._book.cordoned ^ {gpu}))
        self.tell("gpu.cordoned" if cordoned else "gpu.uncordoned", gpu, "set by an operator")

    async def _set_health_override(self, gpu: GpuId, healthy: bool | None) -> None:
        self._gpu(gpu)
        was = self._book.health_overrides.get(gpu)
        if (None if was is None else was.healthy) == healthy:
            return
        word = None if healthy is None else HealthOverride(healthy, self._now_s())
        await self._become(self._book.with_health_override(gpu, word))
        said = "taken back" if healthy is None else f"it is {'healthy' if healthy else 'unhealthy'}, whatever is found"
        self.tell("gpu.health-override", gpu, f"set by an operator: {said}")
        self._weigh_health()

    def _weigh_health(self) -> None:
        """Make ``_health`` what holds now, and tell what has changed. The first look at a healthy GPU is no change."""
        words, before = self._book.health_overrides, self._health
        self._health = {
            gpu: health
            for gpu in self._found.keys() | words.keys()
            if (health := effective(self._found.get(gpu), words.get(gpu))) is not None
        }
        for gpu, health in self._health.items():
            was = before.get(gpu, Health())
            if health.condition is not was.condition:
                self._health_changes[gpu, health.source or was.source] += 1
                self.tell(f"gpu.{health.condition}", gpu, health.reason or f"it was {was.condition}")

    def check_oversubscription(self, gpu: GpuId, ratio: float) -> None:
        """Raises what :meth:`set_oversubscription` would; nothing changes."""
        if ratio < 1:
            raise Invalid.field("/oversubscription", f"{ratio:g} is below 1, which would withhold VRAM: at least 1")
        for partition in self._gpu(gpu).partitions:
            promised = sum(
                share.vram_bytes
                for item in self._book.slices.values()
                for share in item.shares
                if share.partition == partition.id
            )
            if promised > ratio * partition.vram_bytes:
                raise Conflict(
                    f"{partition.id} has {promised} bytes promised of {partition.vram_bytes}: "
                    f"a ratio of {ratio:g} would break a promise; delete or shrink slices first"
                )

    async def _set_oversubscription(self, gpu: GpuId, ratio: float) -> None:
        self.check_oversubscription(gpu, ratio)
        ratios = {g: r for g, r in self._book.oversubscription.items() if g != gpu} | (
            {gpu: ratio} if ratio > 1 else {}
        )
        if ratios == self._book.oversubscription:
            return
        await self._become(self._book.with_oversubscription(ratios))
        self.tell("gpu.oversubscription", gpu, f"VRAM may now be promised {ratio:g} times")

    async def _partition_alone(
        self, gpu: GpuId, target: Target, force: bool, dry_run: bool, if_revision: int | None
    ) -> Repartition:
        """With nobody of ours in the KFD: a driver refuses while any process has the GPU open, and ours is one."""
        await self._kfd_holder.let_go()
        try:
            return await self._partition_gpu(gpu, target, force, dry_run, if_revision)
        finally:
            self._kfd_holder.take_up()

    async def _partition_gpu(
        self, gpu: GpuId, target: Target, force: bool, dry_run: bool, if_revision: int | None
    ) -> Repartition:
        if if_revision not in (None, self._book.revision):
            raise Stale(f"GPU {gpu} is at revision {self._book.revision}, not {if_revision}: read it again")
        # Others may have switched it since the last scan; what is decided here is decided on what is there.
        await self._reconcile(await asyncio.to_thread(self._sysfs.read_inventory))
        there = self._gpu(gpu)
        modes.check_target(there, target)
        compute = target.compute if target.compute != there.compute_partition else None
        memory = target.memory if target.memory != there.memory_partition else None
        lost = self._slices_on(gpu) if compute is not None else []
        if compute is not None:
            await self._refuse_if_gpu_is_used(there, compute, lost, force)
        settled = True
        # The one that is refused more often goes first, so that a refusal leaves nothing half done.
        if not dry_run and compute is not None:
            settled = await self._switch(there, compute)
        if not dry_run and memory is not None:
            await self._request_memory(there, memory, compute)
        now = self._inventory.gpu(gpu) or there
        profile = next((p for p in there.profiles if p.mode == compute), None)
        return Repartition(
            gpu=gpu,
            before=there.compute_partition,
            after=compute or there.compute_partition,
            partitions=profile.partition_count if dry_run and profile else len(now.partitions),
            index=now.index,
            memory=now.memory_partition,
            memory_requested=memory,
            lost=tuple(item.name for item in lost),
            settled=settled,
        )

    async def _request_memory(self, gpu: Gpu, mode: str, switched_to: str | None) -> None:
        try:
            await asyncio.to_thread(self._modes.request_memory, gpu, mode)
        except AmdvgpuError as error:
            if switched_to is None:
                raise
            raise type(error)(f"{gpu.id} is in {switched_to} now; but {error}") from error
        self.tell("gpu.memory-mode-requested", gpu.id, f"{mode} when the driver of the whole node is loaded anew")

    async def _switch(self, gpu: Gpu, mode: str) -> bool:
        """Let the driver do it, and look until the machine is still; true if it is."""
        log.info("%s: from %s to %s.", gpu.id, gpu.compute_partition, mode)
        try:
            await asyncio.to_thread(self._modes.set_compute, gpu, mode)
        except AmdvgpuError:
            # Refused, or half done (EIO): either way what is there now is what counts.
            await self._settle()
            raise
        settled = await self._settle()
        now = self._inventory.gpu(gpu.id)
        if now is None or now.compute_partition != mode:
            found = "the GPU is not there any more" if now is None else f"it is in {now.compute_partition}"
            raise HostFailure(
                f"{gpu.id}: the driver took the switch to {mode}, but {found}; the kernel's log says more"
            )
        self.tell(
            "gpu.partitioned", gpu.id, f"from {gpu.compute_partition} to {mode}; partitions: {len(now.partitions)}"
        )
        if not settled:
            log.warning("%s: the topology still changes after %d looks; the next scan goes on.", gpu.id, SETTLING_LOOKS)
        return settled

    async def _settle(self) -> bool:
        """Reconcile on a picture that two looks in a row agree on; on the last one, if there is none (then false)."""
        before = await asyncio.to_thread(self._sysfs.read_inventory)
        for _ in range(SETTLING_LOOKS):
            await self._pause(SETTLING_PAUSE_S)
            after = await asyncio.to_thread(self._sysfs.read_inventory)
            if after == before:
                await self._reconcile(after)
                return True
            before = after
        await self._reconcile(before)
        return False

    def _slices_on(self, gpu: GpuId) -> list[Slice]:
        """Those that are not lost already."""
        return [
            item
            for name, item in sorted(self._book.slices.items())
            if name not in self._lost and any(gpu_of(share.partition) == gpu for share in item.shares)
        ]

    async def _refuse_if_gpu_is_used(self, gpu: Gpu, mode: str, slices: Sequence[Slice], force: bool) -> None:
        """``Conflict`` names all that stands in the way at once, so that nobody has to ask again for the next."""
        names = [item.name for item in slices]
        await asyncio.to_thread(self._disk.reclaim, names)  # as for a deletion: what has just ended is in nobody's way
        await self._read_ledgers(names)
        reasons, idle = [], []
        for item in slices:
            lease = self._book.lease_of(item.name)
            processes = self._usage.get(item.name, Usage(item.name)).processes
            if lease is not None:
                reasons.append(f"lease {lease.id} ({lease.holder.text or 'no name given'}) holds slice {item.name}")
            elif processes:
                reasons.append(f"processes run in slice {item.name} ({', '.join(str(p.pid) for p in processes[:8])})")
            else:
                idle.append(item.name)
        if users := await asyncio.to_thread(self._modes.users, gpu):
            reasons.append(f"KFD processes have it open: {named(users)}")
        if reasons:
            raise Conflict(f"{gpu.id} cannot be put into {mode}: {'; '.join(reasons)}")
        if idle and not force:
            raise Conflict(
                f"{gpu.id} cannot be put into {mode}: the slices {', '.join(idle)} were cut for "
                f"{gpu.compute_partition} and would be lost; delete them, or ask by force: they then come back with "
                "that mode only"
            )

    # ---------------------------------------------------------------------------------------------- looking up, placing

    def _gpu(self, gpu: GpuId) -> Gpu:
        if (there := self._inventory.gpu(gpu)) is None:
            raise NotFound(f"no GPU {gpu} here; there are {', '.join(g.id for g in self._inventory.gpus) or 'none'}")
        return there

    def _slice(self, name: SliceName, if_revision: int | None = None) -> Slice:
        there = self._book.slices.get(name)
        if there is None and if_revision is not None:
            raise Stale(f"slice {name} does not exist, so it has no revision {if_revision}")
        if there is None:
            raise NotFound(f"no slice {name} here; there are {', '.join(sorted(self._book.slices)) or 'none'}")
        if if_revision not in (None, there.revision):
            raise Stale(f"slice {name} is at revision {there.revision}, not {if_revision}: read it again")
        return there

    def _lease(self, lease_id: LeaseId) -> Lease:
        if (there := self._book.leases.get(lease_id)) is None:
            raise NotFound(f"no lease {lease_id} here: it was released, has expired or never was")
        return there

    def _canonical(self, request: Request) -> Request:
        """The places it names by ids that last; one that cannot be told now stays as it was written."""

        def lasting(text: str) -> str:
            try:
                return identify.canonical(self._inventory, text)
            except AmdvgpuError:
                return text

        return replace(request, on=tuple(lasting(text) for text in request.on))

    async def _place_on_clean(self, request: Request) -> Plan:
        """As :meth:`_place`; and what goes to whole Partitions goes to none on which a former user has left something.

        ``Lingering`` where only such ones are left: mostly that passes.
        """
        unclean: dict[GpuId, Health] = {}
        while True:
            try:
                plan = self._place(request, unclean)
            except NoRoom as error:
                if not unclean:
                    raise
                reasons = "; ".join(f"{gpu}: {verdict.reason}" for gpu, verdict in unclean.items())
                raise Lingering(f"slice {request.name} wants a whole partition, and is held back: {reasons}") from error
            if request.compute.policy is not ComputePolicy.WHOLE:
                return plan
            found = await self._left_on(plan.shares)
            if found.keys() <= unclean.keys():
                return plan
            unclean |= {gpu: Health(Condition.UNKNOWN, reason) for gpu, reason in found.items()}

    async def _left_on(self, shares: Sequence[Share], heir: SliceName | None = None) -> Mapping[GpuId, str]:
        inventory = self._inventory
        places = [
            (gpu, partition)
            for share in shares
            if (partition := inventory.partition(share.partition)) and (gpu := inventory.gpu(partition.gpu))
        ]
        return await asyncio.to_thread(self._leftovers.on, places, inventory, heir) if places else {}

    async def _refuse_if_unclean(self, item: Slice, *, heirs: bool) -> None:
        """``Lingering`` for whole Partitions that are handed on while somebody is there still. ``heirs``: who is in the
        slice is whom it is for; else that may be its last holder's."""
        if item.request.compute.policy is not ComputePolicy.WHOLE:
            return
        if found := await self._left_on(item.shares, item.name if heirs else None):
            reasons = "; ".join(f"{gpu}: {reason}" for gpu, reason in found.items())
            raise Lingering(f"slice {item.name} has whole partitions, and is held back: {reasons}")

    def _place(self, request: Request, unclean: Mapping[GpuId, Health] = MappingProxyType({})) -> Plan:
        unfit = {gpu: verdict for gpu, verdict in self._health.items() if not verdict.placeable} | dict(unclean)
        plan = planner.place(self._book, self._inventory, request, unfit)
        for share in plan.shares:
            neighbours = sum(
                other.partition == share.partition
                for item in self._book.slices.values()
                if item.name != request.name
                for other in item.shares
            )
            if neighbours >= self._max_slices_per_partition:
                raise Conflict(f"{share.partition} has {neighbours} slices, and the configuration allows no more")
        return plan

    def _placed(self, request: Request, owner_uid: int, plan: Plan | None = None) -> Slice:
        shares = (plan or self._place(request)).shares
        return Slice(request.name, request, shares, self._now_s(), self._book.revision + 1, owner_uid)

    async def _refuse_if_used(self, item: Slice, verb: str) -> None:
        if (lease := self._book.lease_of(item.name)) is not None:
            raise Conflict(f"slice {item.name} cannot be {verb}: lease {lease.id} ({lease.holder.text}) holds it")
        await self._refuse_if_occupied(item, verb)

    async def _refuse_if_occupied(self, item: Slice, verb: str) -> None:
        there = self._containers.get(item.name, ())
        if containers := [c for c in there if self._process_alive(Holder("", c.pid, c.start_ticks))]:
            named_ones = ", ".join(f"{c.id[:12] or '?'} (pid {c.pid})" for c in containers[:8])
            raise Conflict(f"slice {item.name} cannot be {verb}: container {named_ones} has it")
        await asyncio.to_thread(
            self._disk.reclaim, [item.name]
        )  # what has just ended must not count until the next tick
        try:
            usage = await asyncio.to_thread(self._disk.files.usage, item.name)
        except NotFound:
            return  # lost since before a reboot: it has no files, so nobody runs in it
        except HostFailure as error:
            raise Conflict(
                f"slice {item.name} cannot be {verb}: {error}, so nobody knows what runs in it; ask by force"
            ) from error
        if item.name in self._book.slices:  # asked from outside of a change, it may have been deleted meanwhile
            self._usage[item.name] = usage
        if processes := usage.processes:
            pids = ", ".join(str(p.pid) for p in processes[:8])
            raise Conflict(f"slice {item.name} cannot be {verb}: {len(processes)} processes run in it (pids {pids})")
        if item.request.compute.policy is ComputePolicy.WHOLE:
            await self._refuse_if_open(item, verb)

    async def _refuse_if_open(self, item: Slice, verb: str) -> None:
        """A container may have a whole partition without the gate, and then no ledger knows of it; the KFD does.

        Who has this slice's GPUs open and no other was given just these. A process of the host has all GPUs open, and
        is in nobody's way here.
        """
        places = [self._inventory.partition(share.partition) for share in item.shares]
        own = {place.kfd_gpu_id for place in places if place is not None}
        everything = {place.kfd_gpu_id for place in self._inventory.partitions}
        users = await asyncio.to_thread(self._modes.users, None) if own < everything else ()
        inside = tuple(user for user in users if given_only(user.kfd_gpu_ids, own, everything))
        if inside:
            raise Conflict(f"slice {item.name} cannot be {verb}: its partition is open in {named(inside)}")

    # ------------------------------------------------------------------------------------------------- acting

    async def _become(self, after: Book, *, rewrite: bool = False) -> None:
        """Make journal, files and CDI say ``after``, then be it; on failure be ``before`` again and raise.

        ``rewrite``: a changed slice gets new files (its users, if any, are gone) rather than new values in the old.
        """
        before = self._book
        lost = frozenset(self._lost)
        await asyncio.to_thread(self._disk.commit, before, after, self._inventory, lost, rewrite=rewrite)
        self._book = after
        if self._broken:
            self._broken = planner.check(after, self._inventory)
        for name in before.slices.keys() - after.slices.keys():
            self._lost.pop(name, None)
            self._usage.pop(name, None)
        for name in changed(before, after):
            self._lost.pop(name, None)
            self._usage.setdefault(name, Usage(name))

    async def _scan(self) -> None:
        async with self._changing:
            self._next_scan = None
            try:
                inventory = await asyncio.to_thread(self._sysfs.read_inventory)
                await self._reconcile(inventory)
            except (AmdvgpuError, OSError) as error:
                self._scan_failure = f"The last scan of the machine failed: {error}"
                raise
            self._scan_failure = None

    async def _reconcile(self, inventory: Inventory) -> None:
        """Make files and CDI say what the Book says on ``inventory``. The same at start, after a crash, on hot-plug.

        On a machine that has not changed since the last time, the files that are there say so already.
        """
        same = self._ready and inventory == self._inventory
        if inventory != self._inventory:
            usable = ", ".join(f"{g.index}:{g.product_name}" for g in inventory.gpus)
            self._inventory = inventory
            self.tell("inventory.changed", "node", f"GPUs: {usable or 'none'}; unusable: {len(inventory.unusable)}")
        self._look_for_gone()
        was_lost = self._lost
        reasons = {item.name: planner.lost_reason(item, inventory) for item in self._book.slices.values()}
        self._lost = {name: reason for name, reason in reasons.items() if reason is not None}
        stale = was_lost.keys() if same else self._book.slices.keys()
        self._lost |= await asyncio.to_thread(self._disk.repair, self._book, inventory, frozenset(self._lost), stale)
        self._look_for_broken_promises()
        for name in self._book.slices:
            if name in self._lost and name not in was_lost:
                self.tell("slice.lost", name, self._lost[name])
            elif name in was_lost and name not in self._lost:
                self.tell("slice.returned", name, "what it was cut from is back, and so are its files")
        await self._read_ledgers(list(self._book.slices))

    def _look_for_gone(self) -> None:
        """Who has left, and who is back. What another driver has taken is unusable, and so is still here."""
        there = {gpu.id: gpu for gpu in self._inventory.gpus}
        unusable = {device.pci_address for device in self._inventory.unusable}
        self._seen |= there
        cut_from = {gpu_of(share.partition) for item in self._book.slices.values() for share in item.shares}
        before, self._gone = self._gone, {}
        for gpu in sorted((self._seen.keys() | cut_from) - there.keys()):
            if (last := self._seen.get(gpu)) is not None and last.pci_address in unusable:
                continue
            new = Gone(gpu, self._now_s(), *((last.pci_address, last.product_name) if last else ()))
            self._gone[gpu] = before.get(gpu, new)
            if gpu not in before:
                self.tell("gpu.gone", gpu, f"it was at {last.pci_address}" if last else "slices are cut from it")
        for gpu in before.keys() & there.keys():
            self.tell("gpu.returned", gpu, f"it is at {there[gpu].pci_address}")

    def _look_for_broken_promises(self) -> None:
        broken = planner.check(self._book, self._inventory)
        for sentence in broken:
            if sentence not in self._broken:
                log.warning("%s.", sentence)
        self._broken = broken

    async def _read_ledgers(self, names: Iterable[SliceName]) -> None:
        usage = await asyncio.to_thread(self._disk.usage, names)
        self._usage.update((n, u) for n, u in usage.items() if n in self._book.slices)


def _bound(lease: Lease, containers: Sequence[Container]) -> Lease:
    """``lease`` with the process of one of ``containers``: the one that it has already, if it is among them."""
    if any((c.pid, c.start_ticks) == (lease.holder.pid, lease.holder.start_ticks) for c in containers):
        return lease
    pid, ticks = (containers[0].pid, containers[0].start_ticks) if containers else (None, None)
    return replace(lease, holder=replace(lease.holder, pid=pid, start_ticks=ticks))
