"""What each route of the API does: the lines of the route table, and the functions they name.

Owns the meaning of /v1. Every function gets a caller who may do what the route's record says, and a query and a body
that have the record's shapes; it answers a Reply or raises one of :mod:`amdvgpud.core.errors`. Does not own the doors,
the codes of errors, ETags on the way out or counting (``rest.py``).
"""

from __future__ import annotations

import base64
import binascii
import pwd
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import msgspec
from aiohttp import web
from msgspec import UNSET

from amdvgpud.core import identify, wire
from amdvgpud.core.delivery import Choice
from amdvgpud.core.errors import Conflict, FieldError, Invalid, NotFound, Stale
from amdvgpud.core.health import Health, effective
from amdvgpud.core.model import Book, Gpu, HealthOverride, Holder, Lease, LeaseId, Request, Slice, SliceName
from amdvgpud.core.modes import Target, parse_want
from amdvgpud.core.plan import Plan, resize
from amdvgpud.core.render import partition_device, reserved_partitions
from amdvgpud.core.sizes import parse_size
from amdvgpud.guard import GuardView
from amdvgpud.node import Node, NodeView
from amdvgpud.ports import CdiSpecs
from amdvgpud.serve import conditions, page, problem, routes, views
from amdvgpud.serve.exposition import CLASSIC, OPENMETRICS
from amdvgpud.serve.metrics import Metrics
from amdvgpud.serve.routes import Call, Reply, Route
from amdvgpud.serve.streams import Watchers

API: Final = "v1"
FEATURES: Final = (
    "containers",
    "dry-run",
    "etag",
    "idempotency-key",
    "kubelet",
    "leases",
    "long-poll",
    "metrics",
    "oversubscription",
    "partition-modes",
    "resize",
    "sse",
)
"""Grows by a word with each addition to /v1, so that a client can ask before it relies on it."""

_LEASE_ID_LENGTH: Final = 64

_OVERRIDES: Final[Mapping[str, bool | None]] = {"healthy": True, "unhealthy": False, "none": None}


class Process(NamedTuple):
    """A process of this machine, as /proc shows it at one moment."""

    uid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class About:
    """What the API tells of the daemon around it."""

    version: str
    run_dir: PurePath
    cdi_kind: str
    simulated: str | None
    config: Callable[[], Mapping[str, object]]
    """Settings fit for showing: without secrets."""
    preload: Sequence[PurePath] = ()
    """Libraries that a process in a slice preloads, in order."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What it needs to find in its environment besides the slice's own: a simulated machine's root."""
    delivery: Callable[[], Choice | None] = lambda: None
    """How pods get their slices; None: no kubelet is served."""


class Endpoints:
    def __init__(
        self,
        node: Node,
        cdi: CdiSpecs,
        metrics: Metrics,
        watchers: Watchers,
        about: About,
        *,
        process_of: Callable[[int], Process | None],
        reload: Callable[[], Awaitable[None]],
        new_name: Callable[[], str],
        max_wait_s: float,
        guard: Callable[[], GuardView] = GuardView,
    ) -> None:
        """``cdi`` is only asked what it would write. ``new_name`` names the slices that are made for a lease."""
        self._node = node
        self._cdi = cdi
        self._metrics = metrics
        self._watchers = watchers
        self._about = about
        self._process_of = process_of
        self._reload = reload
        self._new_name = new_name
        self._max_wait_s = max_wait_s
        self._guard = guard

    # ------------------------------------------------------------------------------------------------ the daemon

    async def get_root(self, call: Call, query: routes.NoQuery) -> Reply | web.StreamResponse:
        if page.wants_page(call.request.headers.get("Accept", "")):
            return web.Response(status=303, headers={"Location": page.PATH, "Vary": "Accept"})
        plain = {r.name.removeprefix("list_").removeprefix("get_"): r.path for r in ROUTES if "{" not in r.path}
        return Reply(
            wire.Links(
                name="amdvgpud", version=self._about.version, versions=[API], features=list(FEATURES), links=plain
            )
        )

    async def get_system(self, call: Call, query: routes.NoQuery) -> Reply:
        return self._system(self._node.view())

    async def reload(self, call: Call, query: routes.ChangeQuery) -> Reply:
        if not query.dry_run:
            await self._reload()
        return self._system(self._node.view())

    def _system(self, view: NodeView) -> Reply:
        choice = self._about.delivery()
        return Reply(
            wire.SystemView(
                version=self._about.version,
                api=API,
                features=list(FEATURES),
                simulated=self._about.simulated,
                driver_version=view.inventory.driver_version,
                generation_id=view.inventory.generation_id,
                revision=view.book.revision,
                ready=view.ready,
                warnings=[*view.warnings, *self._guard().warnings],
                config=dict(self._about.config()),
                kubelet=None if choice is None else wire.KubeletView(choice.way, choice.reason, choice.known),
            )
        )

    async def get_healthz(self, call: Call, query: routes.NoQuery) -> Reply:
        return Reply(wire.Health(status="ok"))

    async def get_readyz(self, call: Call, query: routes.NoQuery) -> Reply:
        ready = self._node.view().ready
        return Reply(wire.Health(status="ok" if ready else "starting"), 200 if ready else 503)

    async def get_metrics(self, call: Call, query: routes.NoQuery) -> web.StreamResponse:
        open_metrics = "application/openmetrics-text" in call.request.headers.get("Accept", "")
        content = self._metrics.render(
            self._node.view(),
            open_metrics=open_metrics,
            details=call.caller.may_see_details,
            watchers=len(self._watchers),
            seen=self._guard(),
        )
        return web.Response(body=content, headers={"Content-Type": OPENMETRICS if open_metrics else CLASSIC})

    async def get_openapi(self, call: Call, query: routes.NoQuery) -> web.StreamResponse:
        return web.Response(body=_document(self._about.version), content_type=routes.JSON)

    # ------------------------------------------------------------------------------------------------------ GPUs

    async def list_gpus(self, call: Call, query: routes.NoQuery) -> Reply:
        view = self._node.view()
        sampled = self._metrics
        listed = views.gpu_list(view, sampled.vram_used_bytes, sampled.temperatures_c)
        return Reply(listed, revision=view.book.revision)

    async def get_gpu(self, call: Call, query: routes.NoQuery) -> Reply:
        view = self._node.view()
        return self._gpu_reply(view, _gpu(view, call.path["id"]))

    async def patch_gpu(self, call: Call, query: routes.ChangeQuery, body: wire.GpuPatch) -> Reply:
        view = self._node.view()
        gpu = _gpu(view, call.path["id"])
        # A GPU has no revision of its own: what is promised on it changes with the Book's.
        conditions.if_revision(call.request.headers, view.book.revision, f"GPU {gpu.id}")
        if query.dry_run:
            book = view.book
            if body.cordoned is not UNSET:
                book = book.with_cordoned(book.cordoned | {gpu.id} if body.cordoned else book.cordoned - {gpu.id})
            if body.oversubscription is not UNSET:
                self._node.check_oversubscription(gpu.id, body.oversubscription)
                book = book.with_oversubscription({**book.oversubscription, gpu.id: body.oversubscription})
            health = view.health
            if body.health_override is not UNSET:
                healthy = _OVERRIDES[body.health_override]
                # The time is that of the present word or verdict: there is no new one yet.
                was = view.book.health_overrides.get(gpu.id) or view.health.get(gpu.id, Health())
                word = None if healthy is None else HealthOverride(healthy, was.since_s)
                book = book.with_health_override(gpu.id, word)
                held = effective(view.health_found.get(gpu.id), word)
                health = {k: v for k, v in health.items() if k != gpu.id} | ({} if held is None else {gpu.id: held})
            book = replace(book, revision=view.book.revision)
            return self._gpu_reply(replace(view, book=book, health=health), gpu)
        # The one that can be refused goes first, so that a refusal leaves nothing half done.
        if body.oversubscription is not UNSET:
            await self._node.set_oversubscription(gpu.id, body.oversubscription)
        if body.cordoned is not UNSET:
            await self._node.set_cordoned(gpu.id, body.cordoned)
        if body.health_override is not UNSET:
            await self._node.set_health_override(gpu.id, _OVERRIDES[body.health_override])
        now = self._node.view()
        there = now.inventory.gpu(gpu.id)
        # Cut anew or pulled out meanwhile: the picture and the GPU in it have to be of one moment.
        return self._gpu_reply(now, there) if there else self._gpu_reply(replace(now, inventory=view.inventory), gpu)

    async def put_gpu_partition(self, call: Call, query: routes.PartitionQuery, body: wire.PartitionSpec) -> Reply:
        view = self._node.view()
        gpu = _gpu(view, call.path["id"])
        revision = conditions.if_revision(call.request.headers, view.book.revision, f"GPU {gpu.id}")
        target = Target(*(text.upper() if text else None for text in (body.compute, body.memory)))
        done = await self._node.partition_gpu(
            gpu.id, target, force=query.force, dry_run=query.dry_run, if_revision=revision
        )
        return Reply(views.repartition_view(done, dry_run=query.dry_run))

    async def suggest_modes(self, call: Call, query: routes.WishQuery) -> Reply:
        try:
            wants = [parse_want(text) for text in query.want.split(",") if text.strip()]
        except Invalid as error:
            raise problem.invalid((FieldError("want", error.fields[0].detail),), body=False) from error
        return Reply(views.mode_proposals(self._node.view(), wants))

    def _gpu_reply(self, view: NodeView, gpu: Gpu) -> Reply:
        sampled = self._metrics
        shown = views.gpu_view(view, gpu, sampled.vram_used_bytes.get(gpu.id), sampled.temperatures_c)
        return Reply(shown, revision=view.book.revision)

    # ---------------------------------------------------------------------------------------------------- slices

    async def list_slices(self, call: Call, query: routes.SliceQuery) -> Reply:
        wait_s = routes.parse_duration_s(query.wait, self._max_wait_s)
        if query.since is not UNSET:
            since = query.since
            await self._watchers.wait_until(lambda: self._node.view().book.revision != since, wait_s)
        view = self._node.view()
        on = None
        if query.gpu is not UNSET:
            on = {p.id for p in _resolve(view, query.gpu, "gpu")}
        after = None if query.cursor is UNSET else _name_of_cursor(query.cursor)
        found = [
            item
            for item in views.slice_views(view, self._about.cdi_kind, self._guard())
            if (after is None or item.name > after)
            and (query.state is UNSET or item.state == query.state)
            and (on is None or any(s.partition in on for s in item.shares))
        ]
        page, more = found[: query.limit], len(found) > query.limit
        return Reply(
            wire.SliceList(
                slices=page,
                revision=view.book.revision,
                next_cursor=_cursor_of_name(page[-1].name) if more else None,
            ),
            revision=view.book.revision,
        )

    async def get_slice(self, call: Call, query: routes.NoQuery) -> Reply:
        view = self._node.view()
        return self._slice_reply(view, _slice(view, call.path["name"]))

    async def put_slice(self, call: Call, query: routes.ChangeQuery, body: wire.SliceSpec) -> Reply:
        request = wire.request_of(call.path["name"], body)
        there = self._node.view().book.slices.get(request.name)
        headers = call.request.headers
        revision = conditions.if_revision(headers, there.revision if there else None, f"slice {request.name}")
        create_only = conditions.create_only(headers)
        if query.dry_run:
            if there is not None and create_only:
                raise Stale(f"slice {request.name} exists already (revision {there.revision})")
            if there is not None and there.request != request:
                await self._would_be_used(there, "replaced")
            return self._plan_reply(request.name, await self._node.plan(request))
        owner_uid = _owner_uid(call, body, there.owner_uid if there else None)
        with self._metrics.operation("create"):
            item, new = await self._node.put_slice(
                request, owner_uid=owner_uid, if_revision=revision, create_only=create_only
            )
        reply = self._slice_reply(self._node.view(), item)
        if not new:
            return reply
        return replace(reply, status=201, headers={"Location": f"/v1/slices/{item.name}"})

    async def patch_slice(self, call: Call, query: routes.ChangeQuery, body: wire.SliceResize) -> Reply:
        vram_bytes = parse_size(body.vram, "/vram")
        view = self._node.view()
        item = _slice(view, call.path["name"])
        revision = conditions.if_revision(call.request.headers, item.revision, f"slice {item.name}")
        if query.dry_run:
            if item.name in view.lost:
                raise Conflict(f"slice {item.name} is lost ({view.lost[item.name]}): it cannot be resized")
            return self._plan_reply(item.name, resize(view.book, view.inventory, item, vram_bytes))
        with self._metrics.operation("resize"):
            item = await self._node.resize_slice(item.name, vram_bytes, if_revision=revision)
        return self._slice_reply(self._node.view(), item)

    async def delete_slice(self, call: Call, query: routes.DeleteQuery) -> Reply:
        view = self._node.view()
        item = _slice(view, call.path["name"])
        revision = conditions.if_revision(call.request.headers, item.revision, f"slice {item.name}")
        if query.dry_run:
            if not query.force:
                await self._would_be_used(item, "deleted")
            return Reply(wire.PlanView(name=item.name, shares=[], cdi={}))
        with self._metrics.operation("delete"):
            await self._node.delete_slice(item.name, if_revision=revision, force=query.force)
        return Reply(None, 204)

    async def _would_be_used(self, item: Slice, verb: str) -> None:
        """``Conflict``, as Node would raise it, where ``item`` is held or runs."""
        view = await self._node.refresh_usage([item.name])
        if (lease := view.book.lease_of(item.name)) is not None:
            raise Conflict(f"slice {item.name} cannot be {verb}: lease {lease.id} holds it")
        usage = view.usage.get(item.name)
        if usage is not None and usage.processes:
            raise Conflict(f"slice {item.name} cannot be {verb}: {len(usage.processes)} processes run in it")

    async def get_usage(self, call: Call, query: routes.NoQuery) -> Reply:
        view, item = await self._fresh(call.path["name"])
        return Reply(views.usage_view(view, item, self._guard()))

    async def list_processes(self, call: Call, query: routes.NoQuery) -> Reply:
        view, item = await self._fresh(call.path["name"])
        return Reply(views.process_list(view, item, self._guard()))

    async def _fresh(self, name: str) -> tuple[NodeView, Slice]:
        """The picture with this slice's ledger read just now."""
        item = _slice(self._node.view(), name)
        view = await self._node.refresh_usage([item.name])
        return view, _slice(view, name)

    def _slice_reply(self, view: NodeView, item: Slice) -> Reply:
        if item.name not in view.book.slices:
            # Deleted by somebody else between our change and this answer, which still says what we did.
            view = replace(view, book=Book(view.book.revision, {item.name: item}))
        seen = self._guard()
        return Reply(views.slice_view(view, item, self._about.cdi_kind, seen), revision=item.revision)

    def _plan_reply(self, name: SliceName, plan: Plan) -> Reply:
        inventory = self._node.view().inventory
        item = Slice(name, plan.request, plan.shares, created_s=0.0, revision=0)
        return Reply(views.plan_view(name, plan.shares, inventory, self._cdi.render([item], inventory)))

    # ---------------------------------------------------------------------------------------------------- leases

    async def list_leases(self, call: Call, query: routes.NoQuery) -> Reply:
        view = self._node.view()
        leases = sorted(view.book.leases.values(), key=lambda lease: (lease.created_s, lease.id))
        return Reply(
            wire.LeaseList(leases=[self._lease_view(call, view, x) for x in leases], revision=view.book.revision),
            revision=view.book.revision,
        )

    async def get_lease(self, call: Call, query: routes.NoQuery) -> Reply:
        view = self._node.view()
        return self._lease_reply(call, view, _lease(view, call.path["id"]))

    async def post_lease(self, call: Call, query: routes.ChangeQuery, body: wire.LeaseSpec) -> Reply:
        if (body.slice is None) == (body.request is None):
            raise Invalid(
                "give either 'slice' (an existing one) or 'request' (one to be made for the lease), one of the two",
                (FieldError("/slice", "exactly one of 'slice' and 'request'"),),
            )
        if body.bind == "container" and body.pid is not None:
            raise Invalid.field("/pid", "a lease that is bound to a container gets its process when that one starts")
        holder = self._holder(call, body)
        request: Request | None = None
        name: SliceName | None = None
        if body.request is not None:
            try:
                request = wire.request_of(self._new_name(), body.request)
            except Invalid as error:
                raise problem.under(error, "/request") from error
        else:
            assert body.slice is not None  # noqa: S101  # one of the two is given
            name = _slice(self._node.view(), body.slice).name
        owner_uid = call.caller.uid if body.request is None else _owner_uid(call, body.request, None, "/request")
        if query.dry_run:
            return await self._would_lease(name, request)
        with self._metrics.operation("bind"):
            lease = await self._node.grant_lease(
                holder,
                slice=name,
                request=request,
                ttl_s=body.ttl_s,
                owner_uid=owner_uid,
                container=body.bind == "container",
            )
        reply = self._lease_reply(call, self._node.view(), lease)
        return replace(reply, status=201, headers={"Location": f"/v1/leases/{lease.id}"})

    async def _would_lease(self, name: SliceName | None, request: Request | None) -> Reply:
        if request is not None:
            return self._plan_reply(request.name, await self._node.plan(request))
        view = self._node.view()
        item = _slice(view, name or "")
        if item.name in view.lost:
            raise Conflict(f"slice {item.name} is lost: {view.lost[item.name]}")
        if (held := view.book.lease_of(item.name)) is not None:
            raise Conflict(f"slice {item.name} is held by lease {held.id} ({held.holder.text or 'no name given'})")
        return self._plan_reply(item.name, Plan(item.request, item.shares))

    def _holder(self, call: Call, body: wire.LeaseSpec) -> Holder:
        """Who holds. A named process must be there, and be the caller's own unless the caller is root."""
        if body.pid is None:
            return Holder(body.holder)
        peer = call.caller.peer
        if peer is None:
            # Who has the token may be anybody of the group; without credentials no process is provably theirs.
            raise Invalid.field(
                "/pid", "a process can be named over the unix socket only, where the kernel says who is asking"
            )
        process = self._process_of(body.pid)
        if process is None:
            raise Invalid.field("/pid", f"there is no process {body.pid} on this machine (pids are the host's)")
        if peer.uid not in (0, process.uid):
            raise problem.Refusal(
                403,
                "forbidden",
                f"process {body.pid} belongs to uid {process.uid}: uid {peer.uid} may name its own processes only",
                fields=(FieldError("/pid", f"belongs to uid {process.uid}"),),
            )
        return Holder(body.holder, body.pid, process.start_ticks)

    async def patch_lease(self, call: Call, query: routes.ChangeQuery, body: wire.LeaseRenewal) -> Reply:
        view = self._node.view()
        lease = _lease(view, call.path["id"])
        if query.dry_run or body.ttl_s is UNSET:
            return self._lease_reply(call, view, lease)
        return self._lease_reply(call, self._node.view(), await self._node.renew_lease(lease.id, body.ttl_s))

    async def delete_lease(self, call: Call, query: routes.ChangeQuery) -> Reply:
        view = self._node.view()
        lease = _lease(view, call.path["id"])
        if query.dry_run:
            return self._lease_reply(call, view, lease)
        await self._node.release_lease(lease.id)
        return Reply(None, 204)

    def _lease_view(self, call: Call, view: NodeView, lease: Lease) -> wire.LeaseView:
        return views.lease_view(
            view,
            lease,
            self._about.run_dir,
            details=call.caller.may_see_details,
            preload=self._about.preload,
            environment_of_machine=self._about.environment,
        )

    def _lease_reply(self, call: Call, view: NodeView, lease: Lease) -> Reply:
        return Reply(self._lease_view(call, view, lease), revision=view.book.revision)

    # ------------------------------------------------------------------------------------------- CDI and events

    async def get_cdi(self, call: Call, query: routes.NoQuery) -> Reply:
        view = self._node.view()
        live = [s for _, s in sorted(view.book.slices.items()) if s.name not in view.lost]
        spec = self._cdi.render(live, view.inventory) if live else None
        kind = self._about.cdi_kind
        return Reply(
            wire.CdiView(
                kind=kind,
                path=view.cdi.path,
                written=view.cdi.written,
                error=view.cdi.error,
                devices=[f"{kind}={s.name}" for s in live] if view.cdi.written else [],
                conflicts=list(view.cdi.conflicts),
                spec=spec,
                partition_devices=[
                    f"{kind.partition('/')[0]}/partition={partition_device(p)}"
                    for p in reserved_partitions(live, view.inventory)
                ],
            )
        )

    async def get_events(self, call: Call, query: routes.EventQuery) -> Reply | web.StreamResponse:
        headers = call.request.headers
        details = call.caller.may_see_details
        wait_s = routes.parse_duration_s(query.wait, self._max_wait_s)
        if routes.JSON not in headers.get("Accept", ""):
            last = headers.get("Last-Event-ID", None if query.since is UNSET else str(query.since))
            return await self._watchers.stream(call.request, last, details=details)
        since = self._node.events_since(0)[1] if query.since is UNSET else query.since
        await self._watchers.wait_until(lambda: self._node.events_since(since)[1] != since, wait_s)
        events, last_id, resync = self._node.events_since(since)
        return Reply(
            wire.EventList(
                events=[views.event_view(e, details=details) for e in events], last_id=last_id, resync=resync
            )
        )


# ---------------------------------------------------------------------------------------------------- looking up


def _resolve(view: NodeView, text: str, parameter: str) -> tuple[Any, ...]:
    try:
        return identify.resolve(view.inventory, text)
    except NotFound as error:
        for gone in view.gone:
            if text in (gone.id, gone.pci_address):
                raise NotFound(f"GPU {gone.id} was here and is gone") from error
        raise
    except Invalid as error:
        raise problem.invalid((FieldError(parameter, error.detail),), body=False) from error


def _gpu(view: NodeView, text: str) -> Gpu:
    partition = _resolve(view, text, "id")[0]
    gpu = view.inventory.gpu(partition.gpu)
    assert gpu is not None  # noqa: S101  # a partition of this inventory is of a GPU of it
    return gpu


def _slice(view: NodeView, name: str) -> Slice:
    if (there := view.book.slices.get(SliceName(name))) is None:
        raise NotFound(f"no slice {name} here; there are {', '.join(sorted(view.book.slices)) or 'none'}")
    return there


@lru_cache(maxsize=1)
def _document(version: str) -> bytes:
    """Made when it is first asked for: it takes as long as half of all else that a start does."""
    return msgspec.json.encode(routes.openapi(ROUTES, version))


def _owner_uid(call: Call, spec: wire.SliceSpec, there: int | None, at: str = "") -> int:
    """Whose slice it is to be: as asked, else as it is (``there``), else the caller's. Only root may name another."""
    owner = spec.owner
    if owner is None:
        return call.caller.uid if there is None else there
    try:
        uid = owner if isinstance(owner, int) else int(owner) if owner.isdecimal() else pwd.getpwnam(owner).pw_uid
    except (KeyError, ValueError):
        raise Invalid.field(f"{at}/owner", f"{owner!r} is no user of this machine: give a name or a uid") from None
    if not 0 <= uid < 2**32 - 1:
        raise Invalid.field(f"{at}/owner", f"{owner!r} is no uid")
    if call.caller.uid not in (0, uid):
        raise problem.Refusal(403, "forbidden", f"only root may make slices for others: {owner!r} is not you")
    return uid


def _lease(view: NodeView, lease_id: str) -> Lease:
    if (there := view.book.leases.get(LeaseId(lease_id))) is None:
        raise NotFound(f"no lease {lease_id[:_LEASE_ID_LENGTH]} here: it was released, has expired or never was")
    return there


def _cursor_of_name(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def _name_of_cursor(cursor: str) -> str:
    try:
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise problem.invalid(
            (FieldError("cursor", f"{cursor!r} is no cursor: take 'next_cursor' of the answer before, as it is"),),
            body=False,
        ) from error


# ---------------------------------------------------------------------------------------------------- the table

_MATCH: Final = {"If-Match": "change it only if it is at one of these ETags or revisions"}
_NONE_MATCH: Final = {"If-None-Match": "304 if the answer is still the one with this ETag"}
_CREATE: Final = {**_MATCH, "If-None-Match": "'*': create it, never replace it"}
_KEY: Final = {"Idempotency-Key": "the same key with the same body gets the first answer again, for 24 hours"}
_RESUME: Final = {"Last-Event-ID": "go on after this event"}
_E: Final = Endpoints

ROUTES: Final = (
    Route("GET", "/", "Versions, features and links", _E.get_root, {200: (wire.Links,)}),
    Route("GET", "/v1/system", "The daemon and its settings", _E.get_system, {200: (wire.SystemView,)}),
    Route(
        "POST",
        "/v1/reload",
        "Look at the machine again, and make files and CDI say what is promised",
        _E.reload,
        {200: (wire.SystemView,)},
        query=routes.ChangeQuery,
        who="writers",
    ),
    Route(
        "GET",
        "/v1/gpus",
        "GPUs and what is left of them",
        _E.list_gpus,
        {200: (wire.GpuList,)},
        request_headers=_NONE_MATCH,
    ),
    Route(
        "GET",
        "/v1/gpus/{id}",
        "One GPU, by any form of its name",
        _E.get_gpu,
        {200: (wire.GpuView,)},
        request_headers=_NONE_MATCH,
    ),
    Route(
        "PATCH",
        "/v1/gpus/{id}",
        "Cordon a GPU, say how far its VRAM may be promised, or have the last word on its health",
        _E.patch_gpu,
        {200: (wire.GpuView,)},
        body=wire.GpuPatch,
        query=routes.ChangeQuery,
        who="writers",
        problems=(409, 412),
        request_headers=_MATCH,
    ),
    Route(
        "PUT",
        "/v1/gpus/{id}/partition",
        "Cut an idle GPU into another mode",
        _E.put_gpu_partition,
        {200: (wire.RepartitionView,)},
        body=wire.PartitionSpec,
        query=routes.PartitionQuery,
        who="writers",
        problems=(409, 412),
        request_headers=_MATCH,
    ),
    Route(
        "GET",
        "/v1/suggest-modes",
        "Which partition modes suit a mix of slices",
        _E.suggest_modes,
        {200: (wire.ModeProposals,)},
        query=routes.WishQuery,
    ),
    Route(
        "GET",
        "/v1/slices",
        "Slices in order of their names",
        _E.list_slices,
        {200: (wire.SliceList,)},
        query=routes.SliceQuery,
        problems=(429,),
        request_headers=_NONE_MATCH,
    ),
    Route(
        "GET",
        "/v1/slices/{name}",
        "One slice",
        _E.get_slice,
        {200: (wire.SliceView,)},
        request_headers=_NONE_MATCH,
    ),
    Route(
        "PUT",
        "/v1/slices/{name}",
        "Create a slice, or replace one that nobody uses",
        _E.put_slice,
        {200: (wire.SliceView, wire.PlanView), 201: (wire.SliceView,)},
        body=wire.SliceSpec,
        query=routes.ChangeQuery,
        who="writers",
        problems=(409, 412),
        request_headers=_CREATE,
    ),
    Route(
        "PATCH",
        "/v1/slices/{name}",
        "Resize the VRAM quota of a slice, also while it runs",
        _E.patch_slice,
        {200: (wire.SliceView, wire.PlanView)},
        body=wire.SliceResize,
        query=routes.ChangeQuery,
        who="writers",
        problems=(409, 412),
        request_headers=_MATCH,
    ),
    Route(
        "DELETE",
        "/v1/slices/{name}",
        "Delete a slice",
        _E.delete_slice,
        {204: (), 200: (wire.PlanView,)},
        query=routes.DeleteQuery,
        who="writers",
        problems=(409, 412),
        request_headers=_MATCH,
    ),
    Route(
        "GET",
        "/v1/slices/{name}/usage",
        "What the slice's ledger says now",
        _E.get_usage,
        {200: (wire.UsageView,)},
    ),
    Route(
        "GET",
        "/v1/slices/{name}/processes",
        "The processes in the slice's ledger",
        _E.list_processes,
        {200: (wire.ProcessList,)},
        who="details",
    ),
    Route("GET", "/v1/leases", "Leases", _E.list_leases, {200: (wire.LeaseList,)}, request_headers=_NONE_MATCH),
    Route(
        "POST",
        "/v1/leases",
        "Hold a slice, or have one made and hold it",
        _E.post_lease,
        {201: (wire.LeaseView,), 200: (wire.PlanView,)},
        body=wire.LeaseSpec,
        query=routes.ChangeQuery,
        who="writers",
        problems=(409,),
        request_headers=_KEY,
    ),
    Route("GET", "/v1/leases/{id}", "One lease", _E.get_lease, {200: (wire.LeaseView,)}, request_headers=_NONE_MATCH),
    Route(
        "PATCH",
        "/v1/leases/{id}",
        "Renew a lease: from now on it lasts so long",
        _E.patch_lease,
        {200: (wire.LeaseView,)},
        body=wire.LeaseRenewal,
        query=routes.ChangeQuery,
        who="writers",
        problems=(409,),
    ),
    Route(
        "DELETE",
        "/v1/leases/{id}",
        "Give a slice back",
        _E.delete_lease,
        {204: (), 200: (wire.LeaseView,)},
        query=routes.ChangeQuery,
        who="writers",
        problems=(409,),
    ),
    Route("GET", "/v1/cdi", "The CDI file", _E.get_cdi, {200: (wire.CdiView,)}),
    Route(
        "GET",
        "/v1/events",
        "What happens, as it happens: a stream, or a long poll where Accept is application/json",
        _E.get_events,
        {200: (wire.EventList,)},
        query=routes.EventQuery,
        problems=(429,),
        media=(routes.JSON, routes.EVENT_STREAM),
        request_headers=_RESUME,
    ),
    Route("GET", "/healthz", "Whether the daemon lives", _E.get_healthz, {200: (wire.Health,)}),
    Route(
        "GET",
        "/readyz",
        "Whether the first scan of the machine is done",
        _E.get_readyz,
        {200: (wire.Health,), 503: (wire.Health,)},
    ),
    Route(
        "GET",
        "/metrics",
        "Prometheus metrics",
        _E.get_metrics,
        {200: ()},
        media=(routes.METRICS_TEXT, "application/openmetrics-text"),
    ),
    Route("GET", "/openapi.json", "This API as OpenAPI 3.1", _E.get_openapi, {200: ()}),
)
"""All that the API answers, in the order of the documentation."""
