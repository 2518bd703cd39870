"""The node's side of HAMi: what its scheduler is told, and what a pod that it has sent here gets.

Owns the registration and its truth, the way from a call of the kubelet to the pod that is meant, and what becomes of
node lock and bind phase on every way out of that. Placement is the Node's, the texts are :mod:`amdvgpud.core.hami`'s,
pods that end are :mod:`amdvgpud.serve.kube.pods`'s.

A call of the kubelet names devices and no pod. The scheduler binds one pod at a time and writes its name into the node
lock, so the pod that the lock names is the one, if the call can be for it; else the pods are searched, and then what
they carry may have been written by anybody. Either way the Book decides what is free, never a pod's text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from amdvgpud.core import hami, plan
from amdvgpud.core.errors import AmdvgpuError, Conflict, HostFailure, Invalid, NoRoom, NotFound, Stale
from amdvgpud.core.hami import Container, Mode, Offer
from amdvgpud.core.health import Health
from amdvgpud.core.model import GpuId, Holder, Request, Slice, SliceName
from amdvgpud.core.modes import parse_target
from amdvgpud.node import Node, NodeView
from amdvgpud.serve.kube.api import ClusterNode, KubeApi, Pod, PodContainer
from amdvgpud.serve.kube.pods import PodWatch, asking, slices_of, waiting_of
from amdvgpud.serve.kube.resources import Device, Grant, GrantMount, numa_node_of, patiently

log = logging.getLogger(__name__)

REGISTER_S: Final = 30.0
AGAIN_S: Final = 5.0
HEARTBEAT_S: Final = 300.0
"""How old the time of a registration may get before it is written again although nothing else has changed."""
LOCK_TRIES: Final = 5
LOCK_PAUSE_S: Final = 0.1
ROOM_LOOKS: Final = 10
ROOM_PAUSE_S: Final = 0.2
"""Between looks for what ended pods still hold: two seconds in all. Longer is of no use, for in this call the kubelet
waits with all else, clearing up behind a pod included. Guessed."""
GATE_IN_HAMI: Final = "/usr/local/vgpu/libamvgpu.so"
"""Where HAMi's documentation says that the library is."""

Deliver = Callable[[Sequence[Slice]], Grant]
"""What slices are for a container. May touch the disk, so it is called in a thread."""


@dataclass(frozen=True, slots=True)
class HamiSettings:
    cluster_node: str
    mode: str = Mode.CU
    """Where the Node's annotation does not say. What is no mode is cu, as HAMi has it, and is said."""
    compute_partition: str = ""
    """The compute mode for idle GPUs in mode ``partition``, likewise; empty: as they are."""
    split_count: int = 0
    gate: str = ""
    """The gate on the host, for HAMi's place; empty: not there."""


class HamiSide:
    """What runs as long as the daemon, and the one resource that the kubelet is told of once it is known."""

    def __init__(
        self,
        node: Node,
        api: KubeApi,
        settings: HamiSettings,
        pods: PodWatch,
        deliver: Deliver,
        *,
        now_s: Callable[[], float] = time.time,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._node = node
        self._api = api
        self._settings = settings
        self._pods = pods
        self._now_s = now_s
        self._pause = pause
        self._strangers: frozenset[str] = frozenset()
        self._lock = NodeLock(api, settings.cluster_node, pause=pause, jitter=jitter)
        self._mode = Mode.CU
        self.known = asyncio.Event()
        """Set when the Node has been asked for its mode: before that nothing is offered, to nobody."""
        self._offered: tuple[Offer, ...] = ()
        self._said = ""
        self._fit: dict[GpuId, Health | None] | None = None
        """As was told last; None in it: that it has gone."""
        self._untold: set[GpuId] = set()
        self.resource = HamiResource(node, api, settings, pods, deliver, self._lock, self.offers, pause)

    def offers(self, view: NodeView) -> tuple[Offer, ...]:
        """What is offered now; what was and is gone stays, without health, and so does what a stranger is on."""
        now = hami.offers(view.inventory, view.book, view.health, mode=self._mode, splits=self._settings.split_count)
        held = self._pods.strangers(view.book.slices)
        self._tell_strangers({offer.id: held[offer.id] for offer in now if offer.id in held})
        now = tuple(replace(offer, health=False) if offer.id in held else offer for offer in now)
        self._offered = hami.with_missing(now, self._offered, view.inventory)
        return self._offered

    async def run(self) -> None:
        """Until cancelled: learn the mode, then keep the registration true and tell of health. Begins when the pods are
        known: before that nobody can tell which GPUs are free."""
        await self._pods.listed.wait()
        trouble = ""
        while True:
            try:
                await self.keep()
            except AmdvgpuError as error:
                if str(error) != trouble:
                    trouble = str(error)
                    log.warning("HAMi's scheduler cannot be told of this node, each %g s again: %s", AGAIN_S, error)
                await self._pause(AGAIN_S)
                continue
            trouble = ""
            await self._until_due()

    async def _until_due(self) -> None:
        """The interval, or less if what is offered changes: only then is the API asked before its time."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + REGISTER_S
        while (left_s := deadline_s - loop.time()) > 0:
            seen, told = self._node.events_since(0)[1], self._pods.told
            if self._registration(self._node.view()) != self._said:
                return
            waits = [asyncio.ensure_future(wait) for wait in (self._node.wait_event(seen, left_s), told.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    async def keep(self) -> None:
        """One look: the annotation is made to say what is so, whoever changed it; a lock that nobody needs goes."""
        cluster = await self._api.get_node(self._settings.cluster_node)
        if not self.known.is_set():
            # What an earlier start has offered and is gone: left out it would not be withdrawn, the scheduler goes on.
            self._offered = hami.parse_offers(cluster.annotations.get(hami.REGISTRATION, ""))
            await self._learn_mode(cluster)
        view = self._node.view()
        text = self._registration(view)
        now_s = self._now_s()
        if cluster.annotations.get(hami.REGISTRATION) != text or _age_s(cluster, now_s) > HEARTBEAT_S:
            notes = {hami.REGISTRATION: text, hami.REGISTERED_AT: _rfc3339(now_s)}
            await self._api.patch_node(self._settings.cluster_node, annotations=notes)
            log.info("HAMi's scheduler was told of %d GPUs or partitions.", len(self._offered))
        self._said = text
        await self._tell_health(view)
        try:
            await self._lock.release_if_stuck(cluster)
        except AmdvgpuError as error:
            log.warning("Whether the node lock was left behind could not be settled, it is tried again: %s", error)
        await self._keep_cus(view)

    def _tell_strangers(self, held: Mapping[str, Pod]) -> None:
        """As events of the node: what depends on pods must wake those who show what is offered, too."""
        before, self._strangers = self._strangers, frozenset(held)
        for gpu in held.keys() - before:
            why = f"{held[gpu]} runs on it and has no slice here: HAMi's pods are given none of that GPU until it ends"
            log.warning("%s: %s.", gpu, why)
            self._node.tell("gpu.stranger", gpu, why)
        for gpu in before - held.keys():
            self._node.tell("gpu.stranger-gone", gpu, "no pod runs on it any more that has no slice here")

    async def _keep_cus(self, view: NodeView) -> None:
        """Make what each pod says of its CUs what the Book says: its owner can write it too, and an init container that
        ends takes some away. Not of one that is still being served, nor of a slice that is lost now."""
        names = {offer.partition: offer.id for offer in self._offered}
        lost = {hami.pod_uid(name) for name in view.lost}
        for uid, cus in hami.cus_of_pods(view.book, names).items():
            pod = self._pods.pods.get(uid)
            if pod is None or pod.ended or uid in lost or hami.is_waiting(pod.annotations.get(hami.WAITING, "")):
                continue
            text = pod.annotations.get(hami.CU_ALLOCATED)
            with contextlib.suppress(Invalid):
                if (hami.parse_cus(text) if text is not None else {}) == cus:
                    continue
            log.info("%s said of its CUs %.200r, which is not what it has (any more): put right.", pod, text)
            try:
                await self._api.patch_pod(pod, {hami.CU_ALLOCATED: hami.format_cus(cus) if cus else None})
            except AmdvgpuError as error:
                log.warning("%s: the CUs that it has could not be written: %s", pod, error)

    def _registration(self, view: NodeView) -> str:
        return hami.format_registration(self.offers(view))

    async def _learn_mode(self, cluster: ClusterNode) -> None:
        """The Node's annotation beats the configuration, as HAMi has it. Read once: a mode under pods is no mode."""
        text = cluster.annotations.get(hami.OPERATING_MODE, self._settings.mode)
        try:
            mode = Mode(text.strip().lower())
        except ValueError:
            log.warning("%r is no operating mode of HAMi (cu or partition): cu it is.", text)
            mode = Mode.CU
        wanted = cluster.annotations.get(hami.COMPUTE_PARTITION, self._settings.compute_partition)
        if mode is Mode.PARTITION and wanted:
            try:
                target = parse_target(wanted)
            except Invalid as error:
                log.warning("%s: %s; GPUs stay as they are.", hami.COMPUTE_PARTITION, error)
            else:
                await self._node.apply_targets([("all", target)])
        self._mode = mode
        self.known.set()

    async def _tell_health(self, view: NodeView) -> None:
        """Events on the Node, for people. The first look is only the baseline. None of it is worth a failure: what
        could not be written is tried again with the next look."""
        here: dict[GpuId, Health | None] = {gpu.id: view.health.get(gpu.id, Health()) for gpu in view.inventory.gpus}
        if self._fit is None:
            self._fit = here
        for gpu, health in (dict.fromkeys(self._fit) | here).items():
            is_ = _state(health)
            if is_ != _state(self._fit.get(gpu, Health())):
                message = f"{gpu} is not there any more" if health is None else f"{gpu}: {health.reason or 'it works'}"
                warning = is_ != hami.EVENT_RECOVERED
                try:
                    await self._api.tell_of_node(
                        self._settings.cluster_node, is_, message, warning=warning, now_s=self._now_s()
                    )
                except AmdvgpuError as error:
                    level = logging.DEBUG if gpu in self._untold else logging.WARNING
                    log.log(level, "The event %s of %s could not be written: %s", is_, gpu, error)
                    self._untold.add(gpu)
                    continue
            self._fit[gpu] = health
            self._untold.discard(gpu)


async def withdraw(api: KubeApi, cluster_node: str) -> None:
    """For a stop for good: the GPUs stay registered, and none is healthy, so that nothing more is sent here."""
    cluster = await api.get_node(cluster_node)
    if (text := cluster.annotations.get(hami.REGISTRATION)) is not None:
        notes = {hami.REGISTRATION: hami.format_withdrawn(text), hami.REGISTERED_AT: None}
        await api.patch_node(cluster_node, annotations=notes)


def _state(health: Health | None) -> str:
    if health is None:
        return hami.EVENT_MISSING
    return hami.EVENT_RECOVERED if health.placeable else hami.EVENT_UNHEALTHY


def _rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _age_s(cluster: ClusterNode, now_s: float) -> float:
    try:
        at = datetime.fromisoformat(cluster.annotations.get(hami.REGISTERED_AT, ""))
        return now_s - at.timestamp()
    except ValueError:
        return float("inf")


# ---------------------------------------------------------------------------------------------------------- the lock


class NodeLock:
    """HAMi's lock on this node, which the scheduler takes for a pod and we release. Shared with other vendors."""

    def __init__(
        self,
        api: KubeApi,
        cluster_node: str,
        *,
        pause: Callable[[float], Awaitable[None]],
        jitter: Callable[[], float],
    ) -> None:
        self._api = api
        self._cluster_node = cluster_node
        self._pause = pause
        self._jitter = jitter
        self._looked = ""
        """Its text when it was last looked at."""

    def named(self, pod: Pod) -> bool:
        """Whether it was this pod's at the last look, which may be some time ago."""
        return _is_of(self._looked, pod.metadata.namespace, pod.metadata.name)

    def look(self, cluster: ClusterNode) -> str | None:
        """What it says now; None: nobody has it."""
        text = cluster.annotations.get(hami.LOCK)
        self._looked = text or ""
        return text

    async def release(
        self, namespace: str, pod: str, *, exactly: str | None = None, seen: ClusterNode | None = None
    ) -> None:
        """Release it if it is this pod's (``exactly``: and still of this very text). Whose it is is asked on each try;
        ``seen`` spares the first question, for a Node that has changed since is not patched.

        ``HostFailure`` or ``Stale`` if it could not be; it is tried again later (:meth:`release_if_stuck`).
        """
        for attempt in range(LOCK_TRIES):
            try:
                cluster = seen or await self._api.get_node(self._cluster_node)
                seen = None
                text = self.look(cluster)
                if text is None or exactly not in (None, text) or not _is_of(text, namespace, pod):
                    return
                await self._api.patch_node(
                    self._cluster_node,
                    annotations={hami.LOCK: None},
                    resource_version=cluster.metadata.resource_version,
                )
                return
            except (HostFailure, Stale):
                if attempt + 1 == LOCK_TRIES:
                    raise
            await self._pause(LOCK_PAUSE_S * 2**attempt * (1 + self._jitter() / 2))

    async def release_if_stuck(self, cluster: ClusterNode) -> None:
        """Release a lock whose pod is gone, or has been bound or refused: who should have done it has crashed."""
        text = self.look(cluster)
        if text is None:
            return
        try:
            lock = hami.parse_lock(text)
        except Invalid as error:
            log.warning("The scheduler will break it when it is old enough: %s", error)
            return
        if lock.namespace is None or lock.pod is None:
            return
        try:
            pod = await self._api.get_pod(lock.namespace, lock.pod)
            done = pod.ended or pod.annotations.get(hami.BIND_PHASE) in (hami.SUCCESS, hami.FAILED)
        except NotFound:
            done = True
        if done:
            await self.release(lock.namespace, lock.pod, exactly=text, seen=cluster)
            log.warning("The node lock of %s/%s was left behind, and is released.", lock.namespace, lock.pod)


def _is_of(text: str, namespace: str, pod: str) -> bool:
    try:
        return hami.parse_lock(text).is_of(namespace, pod)
    except Invalid:
        return False


# ------------------------------------------------------------------------------------------------------ the resource


@dataclass(frozen=True, slots=True)
class _Turn:
    """One container to be served: the pod's ``ordinal``-th that asks for GPUs, and its place in the pod's text."""

    pod: Pod
    position: int
    ordinal: int
    grants: Container
    container: PodContainer | None

    @property
    def holder(self) -> Holder:
        return Holder(f"{self.pod}/{self.container.name if self.container else self.ordinal}")


class HamiResource:
    """``amd.com/gpu``: a :class:`amdvgpud.serve.kube.resources.Resource` whose devices mean nothing but a count."""

    name: Final = hami.COUNT_RESOURCE

    def __init__(
        self,
        node: Node,
        api: KubeApi,
        settings: HamiSettings,
        pods: PodWatch,
        deliver: Deliver,
        lock: NodeLock,
        offers: Callable[[NodeView], tuple[Offer, ...]],
        pause: Callable[[float], Awaitable[None]],
    ) -> None:
        self._node = node
        self._api = api
        self._settings = settings
        self._pods = pods
        self._deliver = deliver
        self._lock = lock
        self._offers = offers
        self._pause = pause
        self._turn = asyncio.Lock()
        """The node lock does not keep two calls for one pod apart."""
        self._given: dict[tuple[str, int], frozenset[str]] = {}
        """By pod uid and ordinal: the ids that a container was served for. In memory, where no pod's owner writes."""
        self._undoing: set[asyncio.Task[Grant]] = set()

    def devices(self, view: NodeView) -> Sequence[Device]:
        """``<id>#<slot>``, as many of a GPU as containers may share it; health as in the registration."""
        found = []
        for offer in self._offers(view):
            partition = view.inventory.partition(offer.partition)
            numa_node = None if partition is None else numa_node_of(partition)
            found += [Device(f"{offer.id}#{slot}", offer.health, numa_node) for slot in range(offer.count)]
        return found

    def prefer(self, view: NodeView, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        """Slots of the GPUs that the scheduler has chosen for the pod that waits, so that the kubelet's books agree.

        One slot of a GPU each: a request never means two of one. Without a pod that waits, slots of different GPUs. As
        for a call, a pod's text is believed only where it fits its own request: of those the one that had the lock when
        it was last looked at, else the oldest binding.
        """
        waiting = [pod for pod in waiting_of(self._pods.pods, self._settings.cluster_node) if _believed(pod, size)]
        waiting.sort(key=lambda pod: not self._lock.named(pod))
        chosen = hami.first_waiting(waiting[0].annotations[hami.WAITING]) if waiting else None
        order = {grant.id: rank for rank, grant in enumerate(chosen[1])} if chosen else {}
        found = list(must_include)
        taken = {device.rpartition("#")[0] for device in found}
        # Twice: first no GPU two times, then whatever is left.
        for again in (False, True):
            for device in sorted(available, key=lambda each: order.get(each.rpartition("#")[0], len(order))):
                gpu = device.rpartition("#")[0]
                if len(found) < size and device not in found and (again or gpu not in taken):
                    found.append(device)
                    taken.add(gpu)
        return found

    async def allocate(self, ids: Sequence[str]) -> Grant:
        """What the pod that is meant gets. Cancelled, it undoes what it has done, whoever waits for that."""
        work = asyncio.create_task(self._alone(frozenset(ids)), name="allocate")
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.cancel()
            self._undoing.add(work)
            work.add_done_callback(self._undone)
            raise

    async def again(self, ids: Sequence[str], pod_uid: str, container: str) -> Grant | None:
        """Told without the API, which may be away while containers start again.

        ``NotFound`` of an init container that has nothing (any more): the kubelet would start it with what it was told
        once, which may be another's now. Of a pod that the watch does not know (yet) nobody can tell, so that starts.
        """
        view = self._node.view()
        slices = [
            item
            for name, item in sorted(view.book.slices.items())
            if hami.pod_uid(name) == pod_uid
            and (lease := view.book.lease_of(name)) is not None
            and lease.holder.text.endswith(f"/{container}")
        ]
        for item in slices:
            if item.name in view.lost:
                raise Conflict(f"slice {item.name} is lost: {view.lost[item.name]}")
        if slices:
            return await asyncio.to_thread(self._deliver, slices)
        pod = self._pods.pods.get(pod_uid)
        if pod is not None and any(each.name == container and pod.runs_first(each) for each in asking(pod)):
            raise NotFound(
                f"init container {container} of {pod} has no slice here, for what it had is freed when it has "
                "succeeded: make the pod anew"
            )
        return None

    def _undone(self, work: asyncio.Task[Grant]) -> None:
        self._undoing.discard(work)
        if not work.cancelled() and work.exception() is not None:
            log.warning("An allocation that nobody waits for any more: %s", work.exception())

    async def _alone(self, ids: frozenset[str]) -> Grant:
        async with self._turn:
            slices = self._node.view().book.slices
            self._given = {at: given for at, given in self._given.items() if hami.pod_slice(*at) in slices}
            cluster = await self._api.get_node(self._settings.cluster_node)
            pod, again = await self._meant(cluster, ids)
            done: list[SliceName] = []
            try:
                if again is None:
                    grant = await self._serve(cluster, pod, ids, done)
                    return replace(grant, undo=lambda: self._take_back(pod, done))
                grant = await self._answer(pod, again)
                await self._bound(cluster, pod)
                return grant
            except BaseException:
                if again is None or pod.status.phase == "Pending":
                    await self._fail(pod, done)
                raise

    async def _take_back(self, pod: Pod, done: Sequence[SliceName]) -> None:
        async with self._turn:
            await self._fail(pod, done)

    # ------------------------------------------------------------------------------------- which pod is meant

    async def _meant(self, cluster: ClusterNode, ids: frozenset[str]) -> tuple[Pod, int | None]:
        """The pod, and which of its containers was served for ``ids`` already (None: none, so the next is meant).

        The pod that the lock names, unless the call cannot be for it: the scheduler locks before it binds, and takes no
        lock for a pod of which only init containers ask for GPUs, nor is one taken for a pod that came past its
        webhook. What speaks against the lock's pod must not be what a pod's owner can write: one that hides its own
        turn would get another's. So it is this node's word, the pod's spec and the Book.

        That leaves one case: a pod without a lock whose call comes while the lock's pod waits here too, for as many
        GPUs. Nothing tells the two calls apart, and the lock's pod is taken.
        """
        named = await self._named(cluster)
        if named is not None:
            said = hami.parse_served(named.annotations.get(hami.SERVED, ""))
            if (again := self._served(named, ids, said | self._given_to(named))) is not None:
                return named, again
        if named is not None and self._may_ask(named, len(ids)):
            return named, None
        pods = {pod.metadata.uid: pod for pod in await self._api.list_pods(self._settings.cluster_node)}
        for pod in pods.values():
            # The kubelet asks again only for what has not run. A pod that runs could list the devices of others, and
            # would have them sent into its own slice. So could one that never starts (an image that is not there), so
            # this goes by memory: after a start of the daemon a call that comes again is refused.
            fresh = pod.status.phase == "Pending" and not pod.begun
            if fresh and (again := self._served(pod, ids, self._given_to(pod))) is not None:
                return pod, again
        for pod in waiting_of(pods, self._settings.cluster_node):
            turn = _believed(pod, len(ids))
            if turn is not None and not pod.begun and self._is_next(turn):
                log.warning("The node lock names no pod that this can be for; %s waits, and is taken for the one.", pod)
                return pod, None
        raise NotFound(f"no binding pod found on node {self._settings.cluster_node}")

    async def _named(self, cluster: ClusterNode) -> Pod | None:
        """The pod that the lock names, if it is bound here already. What else it names is left alone; a
        lock of a pod that is gone is released."""
        text = self._lock.look(cluster)
        lock = None if text is None else hami.parse_lock(text)
        if lock is None or lock.namespace is None or lock.pod is None:
            return None
        try:
            pod = await self._api.get_pod(lock.namespace, lock.pod)
        except NotFound:
            await self._lock.release(lock.namespace, lock.pod, exactly=text, seen=cluster)
            return None
        # By what only a binding sets: an annotation could be changed by its owner, to have another served in its turn.
        return pod if pod.spec.node_name == self._settings.cluster_node else None

    def _may_ask(self, pod: Pod, count: int) -> bool:
        """Whether the kubelet can be asking for ``count`` devices for a container of ``pod`` that was not served yet.
        One that is past it keeps its lock where that could not be released."""
        slices = self._node.view().book.slices
        left = [
            container
            for ordinal, container in enumerate(asking(pod))
            if not slices_of(slices, pod.metadata.uid, ordinal)
        ]
        return not pod.begun and any(container.limit(hami.COUNT_RESOURCE) == count for container in left)

    def _served(self, pod: Pod, ids: frozenset[str], given: Mapping[int, frozenset[str]]) -> int | None:
        """The container that has ``ids`` (by ``given``) and its slices; None where another of the pod waits for them.

        The kubelet gives the devices of an init container that ends to a later container of the same pod. Whether one
        waits is the Book's to say: a pod that denied it would have its container run with what is freed behind it.
        """
        slices, uid = self._node.view().book.slices, pod.metadata.uid
        waits = not all(slices_of(slices, uid, ordinal) for ordinal in range(len(asking(pod))))
        for ordinal, served in sorted(given.items(), reverse=True):
            if served != ids or not slices_of(slices, uid, ordinal):
                continue
            container = _container(pod, ordinal)
            if not (waits and container is not None and pod.runs_first(container)):
                return ordinal
        return None

    def _given_to(self, pod: Pod) -> dict[int, frozenset[str]]:
        return {ordinal: ids for (uid, ordinal), ids in self._given.items() if uid == pod.metadata.uid}

    def _is_next(self, turn: _Turn) -> bool:
        """Whether the kubelet can be asking for this one: it asks for a pod's containers in their order, all of them
        before any runs. By the Book, for ``turn`` is what the pod says: one that had a container served in an init
        container's name would keep the GPUs that are freed behind that.

        The last that has slices counts too where this daemon has not served it: a crash came before its patch.
        """
        slices, uid = self._node.view().book.slices, turn.pod.metadata.uid
        first = next(ordinal for ordinal in itertools.count() if not slices_of(slices, uid, ordinal))
        return turn.ordinal == first or (turn.ordinal == first - 1 and (uid, turn.ordinal) not in self._given)

    # ------------------------------------------------------------------------------------------- serving it

    async def _serve(self, cluster: ClusterNode, pod: Pod, ids: frozenset[str], done: list[SliceName]) -> Grant:
        """``done`` tells the caller what there may be to undo."""
        turn = _turn(pod)
        if turn is None:
            raise Conflict(f"{pod}: none of its containers waits for a GPU")
        if len(turn.grants) != len(ids):
            raise Invalid(
                f"{pod}: the scheduler has chosen {len(turn.grants)} GPUs for {turn.holder.text}, and the kubelet "
                f"{len(ids)}"
            )
        if _believed(pod, len(ids)) is None or not self._is_next(turn):
            raise Invalid(
                f"{pod}: by its annotations {turn.holder.text} is next, of {hami.ALLOCATED}: "
                f"{pod.annotations.get(hami.ALLOCATED, '')!r:.200} still {hami.WAITING}: "
                f"{pod.annotations.get(hami.WAITING, '')!r:.200}. That does not fit its limits or what it was served, "
                "so it is not as the scheduler wrote it: make the pod anew and leave these alone"
            )
        for request in self._requests(turn):
            done.append(request.name)
            await self._hold(request, turn.holder)
        grant = await self._answer(pod, turn.ordinal)
        written = await self._write(turn, ids)
        self._given[pod.metadata.uid, turn.ordinal] = ids
        await self._bound(cluster, written)
        return grant

    async def _bound(self, cluster: ClusterNode, pod: Pod) -> None:
        """The next pod may come if no container of this one waits. A release that fails is made up for later."""
        if hami.is_waiting(pod.annotations.get(hami.WAITING, "")):
            return
        try:
            await self._lock.release(pod.metadata.namespace, pod.metadata.name, seen=cluster)
        except AmdvgpuError as error:
            log.warning("%s is served, but its node lock could not be released yet: %s", pod, error)

    def _requests(self, turn: _Turn) -> tuple[Request, ...]:
        view = self._node.view()
        there = {
            offer.id: partition
            for offer in self._offers(view)
            if (partition := view.inventory.partition(offer.partition))
        }
        for gpu, pod in self._pods.strangers(view.book.slices).items():
            if gpu in {grant.id for grant in turn.grants}:
                raise Conflict(f"{pod} runs on {gpu} and has no slice here, so nobody knows what of it is free")
        limits = {where: at.vram_limit_bytes for where, at in plan.capacities(view.book, view.inventory).items()}
        priority = turn.container.limit(hami.PRIORITY_RESOURCE) if turn.container else None
        uid = turn.pod.metadata.uid
        # The scheduler counts a pod as the larger of an init container and all others together. All are allocated for
        # before the first of them runs, so what an init container has is promised once more to those behind it.
        over = [
            item.name
            for ordinal, container in enumerate(asking(turn.pod)[: turn.ordinal])
            if turn.pod.runs_first(container)
            for item in slices_of(view.book.slices, uid, ordinal)
        ]
        return hami.requests(
            uid,
            turn.ordinal,
            hami.wishes(turn.grants, there, limits),
            after=tuple(over),
            priority=hami.priority_of(priority),
            oversubscribed=frozenset(gpu for gpu, ratio in view.book.oversubscription.items() if ratio > 1),
        )

    async def _hold(self, request: Request, holder: Holder) -> None:
        """The slice and its lease. One that is there was made for this container by a call whose answer was lost."""
        there = self._node.view().book.slices.get(request.name)
        if there is not None and there.request == request and request.name not in self._node.view().lost:
            return
        if there is not None:
            await self._drop(request.name)
        # The turn is kept while a GPU is waited for: the node lock names this pod until it is bound or refused, so a
        # call that came meanwhile would be taken for a second one for it.
        for _ in range(ROOM_LOOKS):
            seen = self._node.view().book.revision
            try:
                await patiently(lambda: self._node.grant_lease(holder, request=request), self._pause)
                return
            except NoRoom:
                # The scheduler gives away at once what an ended pod had; we wait a while. Now is the time to look. And
                # the watch may be a moment behind, and so is the kubelet of a pod that was deleted without a grace.
                room = await self._pods.make_room()
                if room == (0, 0) and self._node.view().book.revision == seen:
                    raise
                if room.held_up and not room.freed:
                    await self._pause(ROOM_PAUSE_S)
        await patiently(lambda: self._node.grant_lease(holder, request=request), self._pause)

    async def _drop(self, name: SliceName) -> None:
        try:
            await self._node.delete_slice(name, force=True)
        except NotFound:
            return
        except AmdvgpuError as error:
            log.warning("%s could not be released, it goes with its pod: %s", name, error)

    async def _write(self, turn: _Turn, ids: frozenset[str]) -> Pod:
        """Erase the container, say what it got, and if it was the last one, that the pod is bound: in one patch."""
        pod = turn.pod
        view = self._node.view()
        waiting = hami.without_waiting(pod.annotations[hami.WAITING], turn.position)
        served = hami.parse_served(pod.annotations.get(hami.SERVED, "")) | {turn.ordinal: ids}
        notes: dict[str, str | None] = {hami.WAITING: waiting, hami.SERVED: hami.format_served(served)}
        names = {offer.partition: offer.id for offer in self._offers(view)}
        if cus := hami.cus_of_pods(view.book, names).get(pod.metadata.uid):
            notes[hami.CU_ALLOCATED] = hami.format_cus(cus)
        if not hami.is_waiting(waiting):
            notes[hami.BIND_PHASE] = hami.SUCCESS
        try:
            return await self._api.patch_pod(pod, notes)
        except HostFailure:
            # The answer may have been lost, and not the patch.
            there = await self._api.get_pod(pod.metadata.namespace, pod.metadata.name)
            if there.metadata.uid == pod.metadata.uid and notes.items() <= there.annotations.items():
                return there
            raise

    async def _fail(self, pod: Pod, done: Sequence[SliceName]) -> None:
        """Free what it got, say that it was not bound, and let the next one come: each for itself.

        The kubelet refuses a pod whole, so what its other containers got goes too, while nothing of it can run. What
        the API does not take now, :meth:`NodeLock.release_if_stuck` or the scheduler does later.
        """
        uid = pod.metadata.uid
        if pod.status.phase == "Pending" and not pod.begun:
            others = [name for name in self._node.view().book.slices if hami.pod_uid(name) == uid]
            done = list(dict.fromkeys([*done, *others]))
        for name in done:
            # In turn behind a grant that is still under way although its caller has gone.
            await self._drop(name)
        try:
            await self._api.patch_pod(pod, {hami.BIND_PHASE: hami.FAILED})
        except AmdvgpuError as error:
            log.warning("%s: that it was not bound could not be written: %s", pod, error)
        try:
            await self._lock.release(pod.metadata.namespace, pod.metadata.name)
        except AmdvgpuError as error:
            log.warning("%s: its node lock could not be released yet: %s", pod, error)

    async def _answer(self, pod: Pod, ordinal: int) -> Grant:
        """What the container gets. All GPUs whole: their nodes and nothing else, no gate and no mask."""
        view = self._node.view()
        slices = slices_of(view.book.slices, pod.metadata.uid, ordinal)
        grant = await asyncio.to_thread(self._deliver, slices)
        container = _container(pod, ordinal)
        priority = container.limit(hami.PRIORITY_RESOURCE) if container else None
        wanted = hami.container_environment(slices, view.inventory, priority)
        sliced = any(share.cus is not None for item in slices for share in item.shares)
        added = (GrantMount(self._settings.gate, GATE_IN_HAMI),) if sliced and self._settings.gate else ()
        brought = {key for key, _ in grant.environment}
        return Grant(
            cdi_devices=grant.cdi_devices,
            environment=grant.environment,
            mounts=grant.mounts,
            nodes=grant.nodes,
            added_environment=tuple((key, value) for key, value in wanted.items() if key not in brought),
            added_mounts=added,
        )


def _container(pod: Pod, ordinal: int) -> PodContainer | None:
    found = asking(pod)
    return found[ordinal] if ordinal < len(found) else None


def _turn(pod: Pod) -> _Turn | None:
    """The pod's next container; None: none waits. ``Invalid`` where its text is no allocation."""
    text = pod.annotations.get(hami.WAITING, "")
    waiting = hami.first_waiting(text)
    if waiting is None:
        return None
    left = sum(1 for grants in hami.parse_allocation(text) if grants)
    total = sum(1 for grants in hami.parse_allocation(pod.annotations.get(hami.ALLOCATED, text)) if grants)
    ordinal = max(0, total - left)
    return _Turn(pod, waiting[0], ordinal, waiting[1], _container(pod, ordinal))


def _believed(pod: Pod, count: int) -> _Turn | None:
    """The pod's turn if its text can be the scheduler's: it fits the pod's own request, and that the ``count`` of the
    call, and what waits is the end of what was allocated."""
    try:
        turn = _turn(pod)
        waiting, allocated = (
            [grants for grants in hami.parse_allocation(pod.annotations.get(key, "")) if grants]
            for key in (hami.WAITING, hami.ALLOCATED)
        )
    except Invalid:
        return None
    if turn is None or turn.container is None:
        return None
    asked = turn.container.limit(hami.COUNT_RESOURCE)
    fits = asked == len(turn.grants) == count and allocated[turn.ordinal :] == waiting
    return turn if fits else None
