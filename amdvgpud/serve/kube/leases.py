"""Leases whose holder is the kubelet: made when it allocates, ended when the container is no more.

The kubelet never says that a container has ended. So its list of pod resources is looked at every few seconds, and a
lease ends when its device is no longer in it. The list alone is not enough: it does not have init containers, and a
kubelet that has just started knows no pods yet. So

* a device that was in the list and is not any more has ended, seen twice in a row;
* one that never was in it is kept while the kubelet's checkpoint has it for a pod whose directory is there (an init
  container, a pod that is being started), and ended otherwise once its lease is not new;
* nothing ends while somebody is in the slice, or within a minute of the kubelet's start, or while it does not answer.

Late is harmless: a kubelet that hands out again what has been in its list ends the old lease by that. But one that has
lost its checkpoint hands out what a container still has: it lets that run and forgets its devices. So a device that
somebody is in is never handed out again, whoever asks, and shown as unhealthy until he is gone. The kubelet asks once a
container, before it is made, so he is never the one that it asks for.

The other way round, what a container has by that list and nobody holds in this Book (it was lost, or is new) is taken
up as it is: a device is a slice that is cut already, or a Partition, and no pod can write in that list.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from amdvgpud.core.errors import AmdvgpuError, Conflict, HostFailure, Lingering, NotFound
from amdvgpud.core.model import Holder, Lease, LeaseId, PartitionId, Request, Slice, SliceName
from amdvgpud.node import Node, NodeView
from amdvgpud.serve.kube.podresources import CheckpointEntry, PodResources, remembered
from amdvgpud.serve.kube.resources import Grant, nothing_to_find, patiently

log = logging.getLogger(__name__)

LOOK_S: Final = 10.0
NEW_S: Final = 30.0
"""How long a lease may be in neither list nor checkpoint: the kubelet writes the latter when Allocate has answered, and
makes the pod's directory in the pod's first turn, before volumes and images are waited for."""
STARTING_S: Final = 60.0
"""How long a kubelet's list is not believed after its start; guessed."""
LOOKS: Final = 2

Granting = Callable[[Sequence[Slice]], Grant]
"""What slices are for a container. May touch the disk, so it is called in a thread."""

Meaning = Callable[[str], SliceName | Request]
"""What a device is: a slice that is cut, or one to be made of a whole Partition. ``NotFound``: there is none."""

_WORD: Final = "kubelet"


def holder_of(resource: str, device: str) -> Holder:
    return Holder(f"{_WORD} {resource} {device}")


def device_of(holder: Holder) -> tuple[str, str] | None:
    """(resource, device) of a holder that :func:`holder_of` made; None for anybody else."""
    word, _, rest = holder.text.partition(" ")
    resource, _, device = rest.partition(" ")
    return (resource, device) if word == _WORD and device else None


def held_by_others(view: NodeView, name: SliceName) -> bool:
    lease = view.book.lease_of(name)
    return lease is not None and device_of(lease.holder) is None


class KubeletLeases:
    def __init__(
        self,
        node: Node,
        pod_resources: PodResources,
        plugins_dir: Path,
        *,
        find: Callable[[], Awaitable[None]] = nothing_to_find,
        meant: Callable[[], Mapping[str, Meaning]] = dict,
        now_s: Callable[[], float] = time.time,
        look_s: float = LOOK_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``plugins_dir``: the kubelet's directory of device plugins, which has the checkpoint too. ``find`` makes the
        Node know the containers that have slices, also those that no hook tells of. ``meant``: by resource, what a
        device of it is."""
        self._node = node
        self._pod_resources = pod_resources
        self._plugins_dir = plugins_dir
        self._find = find
        self._meant = meant
        self._said: frozenset[tuple[str, str]] = frozenset()
        self._now_s = now_s
        self._look_s = look_s
        self._sleep = sleep
        self._one_at_a_time: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Of grants of one resource, so that the second of two calls for one device finds what the first has taken."""
        self._seen: set[LeaseId] = set()
        self._missing: Counter[LeaseId] = Counter()
        self._adopted = False
        """Whether the kubelet has once said what its containers have, since this daemon's start."""
        self._contested: set[LeaseId] = set()
        """Whose devices the kubelet has asked for while somebody was in them."""

    def contested(self, view: NodeView, name: SliceName) -> bool:
        """Whether the kubelet takes ``name`` for free and it is not. No I/O."""
        lease = view.book.lease_of(name)
        return lease is not None and lease.id in self._contested

    async def grant(
        self, resource: str, wanted: Sequence[tuple[str, SliceName | Request]], granting: Granting
    ) -> Grant:
        """What a container gets for the devices of ``wanted``: each is a slice that is there, or one to be made.

        Asked again for what the kubelet holds already, the same, and nothing more is taken. ``Conflict`` where somebody
        else holds a slice or is in it, or it is lost; else as :meth:`Node.grant_lease`. What fails has taken nothing.
        """
        if not self._adopted:
            # It was not there at the start, and is now. One that allocates and does not list is served all the same: a
            # node without its list of pod resources could give nothing else, and who is in a slice is still looked for.
            with contextlib.suppress(HostFailure):
                await self.adopt()
        async with self._one_at_a_time[resource]:
            return await self._grant(resource, wanted, granting, starts=False)

    async def again(
        self, resource: str, wanted: Sequence[tuple[str, SliceName | Request]], granting: Granting
    ) -> Grant:
        """What a container that has the devices already gets, now that it starts (once more): its leases are kept, and
        taken anew where this Book knows of none. ``Conflict`` as :meth:`grant`, but for who is in a slice: what of this
        container ran in it has ended.
        """
        async with self._one_at_a_time[resource]:
            return await self._grant(resource, wanted, granting, starts=True)

    async def _grant(
        self, resource: str, wanted: Sequence[tuple[str, SliceName | Request]], granting: Granting, *, starts: bool
    ) -> Grant:
        items, new = [], []
        try:
            for device, what in wanted:
                name = what.name if isinstance(what, Request) else what
                there = self._node.view().book.lease_of(name)
                if there is not None and device_of(there.holder) is not None and not starts:
                    await self._refuse_if_occupied(there)
                if there is not None and there.id in self._seen and not starts:
                    # The kubelet asks for what it has given to a container already: that one is no more, and we have
                    # not looked since. The next one gets it as if new, so that a whole GPU is looked over first.
                    await self._end(there, "its device is given to the next container")
                    there = None
                if there is None or device_of(there.holder) is None:
                    new.append(await self._lease(holder_of(resource, device), what))
                else:
                    self._missing.pop(there.id, None)  # a look that is under way must not end it now
                view = self._node.view()
                if name in view.lost:
                    raise Conflict(f"slice {name} is lost: {view.lost[name]}")
                items.append(view.book.slices[name])
            grant = await asyncio.to_thread(granting, items)
        except BaseException:
            await self._give_back(new)
            raise
        return replace(grant, undo=partial(self._give_back, new)) if new else grant

    async def _give_back(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            await self._end(lease, "the call that asked for it failed")

    async def _refuse_if_occupied(self, lease: Lease) -> None:
        """``Conflict``, and the device is offered to nobody as long as somebody is in it.

        He is waited for a little: of a pod that was deleted by force the kubelet takes the devices for free at once and
        ends its containers then, and the KFD knows a process a moment longer than it lives.
        """

        async def ask() -> None:
            await self._find()
            try:
                await self._node.refuse_if_occupied(lease.slice, "given to another container, as the kubelet asks")
            except Conflict as error:
                raise Lingering(str(error)) from error

        try:
            await patiently(ask, self._sleep)
        except Conflict as error:
            self._contested.add(lease.id)
            self._node.tell("device.contested", lease.slice, str(error))
            raise

    async def _lease(self, holder: Holder, what: SliceName | Request) -> Lease:
        wanted: dict[str, Any] = {"request" if isinstance(what, Request) else "slice": what}
        return await patiently(lambda: self._node.grant_lease(holder, **wanted), self._sleep)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self.adopt()
                await self.look()
            except (AmdvgpuError, OSError) as error:
                log.debug("Who has which devices is not known now, nothing is released: %s", error)
            await self._sleep(self._look_s)

    async def adopt(self) -> None:
        """Take leases for what containers have and nobody holds. ``HostFailure`` where the kubelet does not answer.

        What cannot be so (another promise was made of it meanwhile) is said, and its container keeps the limits that it
        has. That a slice was cut as it was is not looked at: the kubelet knows no more of it than its name.
        """
        meant, failed = self._meant(), set()
        for container in await self._pod_resources.list() if meant else ():
            if (meaning := meant.get(container.resource)) is None:
                continue
            async with self._one_at_a_time[container.resource]:
                for device in container.ids:
                    where = container.resource, device
                    if where in {device_of(lease.holder) for lease in self._node.view().book.leases.values()}:
                        continue
                    try:
                        await self._adopt(where, meaning(device))
                        log.info("%s has %s of before this Book, and keeps it.", container, device)
                    except AmdvgpuError as error:
                        failed.add(where)
                        if where not in self._said:
                            log.warning("%s has %s, and the Book cannot say so: %s", container, device, error)
        self._said = frozenset(failed)
        if meant:
            self._adopted = True

    async def _adopt(self, where: tuple[str, str], what: SliceName | Request) -> None:
        holder = holder_of(*where)
        if isinstance(what, Request):
            places = dict.fromkeys((PartitionId(place) for place in what.on), None)
            await self._node.adopt(holder, request=what, places=places)
        else:
            await self._node.adopt(holder, slice=what)

    async def look(self) -> None:
        """One look; ends the leases that are over. ``HostFailure`` where the kubelet does not answer."""
        ours = {
            lease.id: (lease, where)
            for lease in self._node.view().book.leases.values()
            if (where := device_of(lease.holder)) is not None
        }
        self._seen &= ours.keys()
        self._contested &= ours.keys()
        for gone in self._missing.keys() - ours.keys():
            del self._missing[gone]
        if not ours or self._now_s() - await self._pod_resources.since_s() < STARTING_S:
            return
        active = {(c.resource, entry): c for c in await self._pod_resources.list() for entry in c.ids}
        remembered = await asyncio.to_thread(self._remembered)
        for lease, where in ours.values():
            if where in active:
                self._seen.add(lease.id)
                self._missing.pop(lease.id, None)
            elif self._over(lease, where, remembered):
                self._missing[lease.id] += 1
                if self._missing[lease.id] >= LOOKS and not await self._is_occupied(lease):
                    await self._end(lease, "its container is no more")
            else:
                self._missing.pop(lease.id, None)

    def _over(
        self, lease: Lease, where: tuple[str, str], remembered: Mapping[tuple[str, str], CheckpointEntry]
    ) -> bool:
        usage = self._node.view().usage.get(lease.slice)
        if usage is not None and usage.processes:
            return False
        if lease.id in self._seen:
            return True
        return where not in remembered and self._now_s() - lease.created_s > NEW_S

    async def _is_occupied(self, lease: Lease) -> bool:
        """By what no ledger knows of: a container that has not used its GPU yet, a whole GPU that is open."""
        await self._find()
        try:
            await self._node.refuse_if_occupied(lease.slice, "freed")
        except Conflict as error:
            log.debug("%s: the kubelet knows of no container, and it is kept: %s", lease.id, error)
            return True
        return False

    def _remembered(self) -> Mapping[tuple[str, str], CheckpointEntry]:
        return {(entry.resource, device): entry for entry in remembered(self._plugins_dir) for device in entry.ids}

    async def _end(self, lease: Lease, why: str) -> None:
        try:
            await self._node.release_lease(lease.id)
            log.info("%s: slice %s is free, %s (%s).", lease.id, lease.slice, why, lease.holder.text)
        except NotFound:
            pass  # ended by other means
        except AmdvgpuError as error:
            log.warning("%s: the lease is over but could not be ended, the next look tries again: %s", lease.id, error)
