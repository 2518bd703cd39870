"""Pods of this node as the API has them, and the end of the slices that they leave behind.

Owns when a pod is over for us. A slice is promised VRAM and CUs that another pod would be given next, so it goes only
when all say that nothing can run in it: the API, asked anew just then (a watch may be behind, or broken), and the
slice's ledger; and of a pod that was deleted before its containers were seen to have ended, perhaps by force, also the
kubelet, where it can be asked, the containers that are known here, and for a whole GPU the KFD (which on a node with
only one cannot tell them from the host's own processes). While any of them says otherwise, or cannot be asked, the
slice stays. That of an init container goes as soon as it has succeeded: the scheduler counts a pod by its other
containers from then on, and sends more.

The other way round nobody asks: a slice without a pod is all that the Book and the API differ in, whatever happened to
daemon, kubelet or node in between, and the first look after a start finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from amdvgpud.core import hami
from amdvgpud.core.errors import AmdvgpuError, Conflict, Invalid, NotFound
from amdvgpud.core.model import Slice, SliceName
from amdvgpud.node import Node
from amdvgpud.serve.kube.api import KubeApi, Listed, Pod, PodContainer
from amdvgpud.serve.kube.resources import nothing_to_find

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""Between two looks at slices whose pod is over. A pod that ends is looked at at once, too."""
GRACE_S: Final = 5.0
"""After a pod was deleted: its last process may still be ending (a forced deletion asks nobody). Guessed."""
SAID_S: Final = 60.0
"""A slice that is held up longer is said in the log, once."""


@dataclass(frozen=True, slots=True)
class Held:
    """The pods that have devices of the kubelet."""

    names: frozenset[tuple[str, str]] = frozenset()
    """(namespace, name), as it answers. Since 1.34 only of pods that are active: one deleted by force is none."""
    uids: frozenset[str] = frozenset()
    """As it remembers them on disk until it has cleared up behind a pod."""


class Room(NamedTuple):
    """What came of a look at pods that are over: slices that were released, and pods that hold theirs all the same."""

    freed: int
    held_up: int


class PodWatch:
    """The pods that are bound to this node, by uid; slices of those that ended are released."""

    def __init__(
        self,
        node: Node,
        api: KubeApi,
        cluster_node: str,
        *,
        held: Callable[[], Awaitable[Held]] | None = None,
        find: Callable[[], Awaitable[None]] = nothing_to_find,
        grace_s: float = GRACE_S,
        now_s: Callable[[], float],
    ) -> None:
        """``held``: asks the kubelet, ``HostFailure`` where it does not answer; None: it cannot be asked here, and the
        others decide. ``find`` makes the Node know the containers that have slices, also those that no hook tells of.
        """
        self._node = node
        self._api = api
        self._cluster_node = cluster_node
        self._held = held
        self._find = find
        self._grace_s = grace_s
        self._now_s = now_s
        self._over_since: dict[str, float] = {}
        self._said: set[str] = set()
        self._final: set[str] = set()
        """Uids that the API called over when it was asked, before the watch did. A pod that is over stays so."""
        self._ended: set[str] = set()
        """Uids of pods whose containers had ended when they were last seen: the kubelet has said so, and is not asked
        when they have been deleted. It lets a pod go from the API no sooner, unless somebody deletes it by force. The
        phase alone does not say it: the control plane calls pods failed whose Node object is gone."""
        self._changed = asyncio.Event()
        self.pods: dict[str, Pod] = {}
        self.listed = asyncio.Event()
        """Set when :attr:`pods` has been filled for the first time."""
        self.told = asyncio.Event()
        """Set at the next change of :attr:`pods`; the one after has another."""
        self.seen_with: Mapping[tuple[str, str], frozenset[str]] = {}
        """By (namespace, name): the GPUs that the kubelet's list has for a pod without a slice here."""

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="pods")
            tasks.create_task(self._look(), name="slices of pods that ended")

    async def _follow(self) -> None:
        async for change in self._api.watch_pods(self._cluster_node):
            seen = change.pods if isinstance(change, Listed) else (change.pod,)
            self._ended |= {pod.metadata.uid for pod in seen if pod.ended and pod.stopped}
            if isinstance(change, Listed):
                self.pods = {pod.metadata.uid: pod for pod in change.pods}
                self._final &= self.pods.keys()
                self.listed.set()
            elif change.deleted:
                self.pods.pop(change.pod.metadata.uid, None)
                self._final.discard(change.pod.metadata.uid)
            elif change.pod.ended or change.pod.metadata.uid not in self._final:
                self.pods[change.pod.metadata.uid] = change.pod
            self._changed.set()
            self._tell()

    def _tell(self) -> None:
        self.told.set()
        self.told = asyncio.Event()

    def saw(self, seen_with: Mapping[tuple[str, str], frozenset[str]]) -> None:
        """What :attr:`seen_with` is now."""
        if seen_with != self.seen_with:
            self.seen_with = seen_with
            self._tell()

    def without(self, slices: Iterable[SliceName]) -> list[Pod]:
        """The pods that run, ask for GPUs and have no slice here."""
        ours = {hami.pod_uid(name) for name in slices}
        return [
            pod for uid, pod in self.pods.items() if pod.status.phase == "Running" and uid not in ours and asking(pod)
        ]

    def strangers(self, slices: Iterable[SliceName]) -> dict[str, Pod]:
        """By the id of a GPU: a pod that runs on it and has no slice here, by the scheduler's word or the kubelet's.

        It was served before this Book was begun (by HAMi's own plugin, or by a daemon whose state was lost). What it
        has of the GPU nobody here knows, so nothing of it can be promised. New pods cannot pretend: they run only once
        served. One that rewrites the scheduler's word is still seen by the kubelet's, where that names GPUs as we do.
        """
        found: dict[str, Pod] = {}
        for pod in self.without(slices):
            found |= dict.fromkeys(self.seen_with.get((pod.metadata.namespace, pod.metadata.name), ()), pod)
            with contextlib.suppress(Invalid):
                text = pod.annotations.get(hami.ALLOCATED, "")
                allocated = [grants for grants in hami.parse_allocation(text) if grants]
                for container, grants in zip(asking(pod), allocated, strict=False):
                    if not (pod.runs_first(container) and pod.has_succeeded(container)):
                        found |= {grant.id: pod for grant in grants}
        return found

    async def _look(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self.release_ended(self._grace_s)
            except AmdvgpuError as error:
                log.warning("Whether slices of pods are over cannot be told now, they stay: %s", error)

    async def release_ended(self, grace_s: float) -> int:
        """Free the slices of pods that have been over for ``grace_s``; how many. ``HostFailure``: nobody can tell."""
        now_s = self._now_s()
        over = {uid for uid in self._slices() if _is_over(self.pods.get(uid))}
        self._over_since = {uid: self._over_since.get(uid, now_s) for uid in over}
        self._said &= over
        self._ended &= self._slices().keys()
        due = [uid for uid in over if now_s - self._over_since[uid] >= grace_s]
        if not due and not self._past(self.pods):
            return 0
        return (await self._release(due)).freed

    async def make_room(self) -> Room:
        """Free what pods had that are over by now, without a grace: a scheduler has dealt it out again.

        It has seen their end in the API, whatever our watch has seen. ``HostFailure``: nobody can tell.
        """
        return await self._release(self._slices())

    def _slices(self) -> dict[str, list[SliceName]]:
        found: dict[str, list[SliceName]] = {}
        for name in self._node.view().book.slices:
            if (uid := hami.pod_uid(name)) is not None:
                found.setdefault(uid, []).append(name)
        return found

    async def _release(self, uids: Iterable[str]) -> Room:
        """What the pods ``uids`` had, if the API asked anew calls them over; and what init containers had."""
        fresh = {pod.metadata.uid: pod for pod in await self._api.list_pods(self._cluster_node)}
        due = [uid for uid in uids if _is_over(fresh.get(uid))]
        self._take_for_over(due, fresh)
        past = self._past(fresh)
        if due or past:
            await self._node.tick()  # what has just ended must not count as running
        usage, slices = self._node.view().usage, self._slices()
        held_up = 0
        freed = await self._free(
            [name for name in past if name not in usage or not usage[name].processes],
            "its init container has succeeded",
        )
        deleted = [uid for uid in due if uid not in fresh and uid not in self._ended]
        held = await self._held() if self._held is not None and deleted else Held()
        # The kubelet knows pods by name, and a stateful one comes again under its own: then its word is about that one.
        again = {(pod.metadata.namespace, pod.metadata.name) for pod in fresh.values() if not pod.ended}
        if deleted:
            await self._find()
        for uid in due:
            if not (mine := slices.get(uid, [])):
                continue
            if running := [name for name in mine if name in usage and usage[name].processes]:
                why = f"processes run in {', '.join(running)}"
            elif uid in deleted and (uid in held.uids or self._owners(mine) & held.names - again):
                why = "the kubelet has it"
            else:
                why = await self._occupied(mine) if uid in deleted else ""
            if why:
                self._say(uid, mine, why)
                held_up += 1
            else:
                freed += await self._free(mine, "its pod is over")
        return Room(freed, held_up)

    def _take_for_over(self, uids: Iterable[str], fresh: Mapping[str, Pod]) -> None:
        """The watch may still tell of them as running; without their slices they would pass for strangers then."""
        for uid in uids:
            if _is_over(self.pods.get(uid)):
                continue
            self._final.add(uid)
            if uid in fresh:
                self.pods[uid] = fresh[uid]
            else:
                del self.pods[uid]

    async def _occupied(self, names: Iterable[SliceName]) -> str:
        """Why a slice of them cannot be free, by what no ledger knows of; '': all can be."""
        for name in names:
            try:
                await self._node.refuse_if_occupied(name, "freed")
            except NotFound:
                continue
            except Conflict as error:
                return str(error)
        return ""

    def _past(self, pods: Mapping[str, Pod]) -> list[SliceName]:
        """Slices of init containers that have succeeded, of pods that are not over."""
        slices = self._node.view().book.slices
        ours = {hami.pod_uid(name) for name in slices}
        return [
            item.name
            for uid, pod in pods.items()
            if uid in ours and not pod.ended
            for ordinal, container in enumerate(asking(pod))
            if pod.runs_first(container) and pod.has_succeeded(container)
            for item in slices_of(slices, uid, ordinal)
        ]

    async def _free(self, names: Iterable[SliceName], why: str) -> int:
        freed = 0
        for name in names:
            with contextlib.suppress(NotFound):
                await self._node.delete_slice(name, force=True)  # with its lease
                log.info("%s: %s, so it was released.", name, why)
                freed += 1
        return freed

    def _owners(self, names: Iterable[SliceName]) -> frozenset[tuple[str, str]]:
        """Namespace and name of the pod, as the lease has them: the pod itself may be gone."""
        leases = self._node.view().book.leases.values()
        texts = [lease.holder.text.split("/") for lease in leases if lease.slice in set(names)]
        return frozenset((text[0], text[1]) for text in texts if len(text) == 3)

    def _say(self, uid: str, names: Iterable[SliceName], why: str) -> None:
        now_s = self._now_s()
        if uid not in self._said and now_s - self._over_since.get(uid, now_s) >= SAID_S:
            self._said.add(uid)
            log.warning("Pod %s is over, but %s stay(s): %s.", uid, ", ".join(names), why)


def _is_over(pod: Pod | None) -> bool:
    return pod is None or pod.ended


def asking(pod: Pod) -> list[PodContainer]:
    """The containers that ask for GPUs, in the kubelet's order. The slices of the n-th are ``pod-<uid>.<n>``."""
    return [each for each in pod.every_container if each.limit(hami.COUNT_RESOURCE)]


def slices_of(slices: Mapping[SliceName, Slice], uid: str, ordinal: int) -> list[Slice]:
    """What the pod's ``ordinal``-th container that asks for GPUs has: one slice, or one for each kind of quota."""
    first = hami.pod_slice(uid, ordinal)
    return [item for name, item in sorted(slices.items()) if name == first or name.startswith(f"{first}.")]


def waiting_of(pods: Mapping[str, Pod], cluster_node: str) -> list[Pod]:
    """The pods that a scheduler has sent here and that wait for an allocation, oldest binding first.

    The API's order says nothing, and nor does a pod's own text about when: ties are broken by uid, so that two looks
    agree.
    """
    found = [pod for pod in pods.values() if _waits(pod, cluster_node)]
    return sorted(found, key=lambda pod: (_bind_time(pod), pod.metadata.uid))


def _waits(pod: Pod, cluster_node: str) -> bool:
    notes = pod.annotations
    return (
        pod.status.phase == "Pending"
        and pod.spec.node_name == cluster_node
        and notes.get(hami.ASSIGNED_NODE) == cluster_node
        and notes.get(hami.BIND_PHASE) == hami.ALLOCATING
        and hami.BIND_TIME in notes
        and hami.is_waiting(notes.get(hami.WAITING, ""))
    )


def _bind_time(pod: Pod) -> int:
    text = pod.annotations.get(hami.BIND_TIME, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0
