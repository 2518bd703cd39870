"""Pods of HAMi's scheduler that run since before this Book (it was lost, or is new), taken up as what they have.

Nothing of a GPU with such a pod is given to other pods of that scheduler (:meth:`PodWatch.strangers`), since nobody
here knows what of it is free. A pod's annotations say it, and its owner can write them. So they are believed only as
far as others say the same, to whom he cannot write:

* how much: the pod's own limits, which nobody changes once it is made;
* on which GPU: the kubelet's list of devices, whose ids are those of the GPUs where it has followed our preference;
* which compute units: only the annotation, and they have to be what the count comes to, on no other promise. It has
  the sum of all containers on a GPU, so that as many as one is to have are its own.

An owner who names other compute units than he has shares his own with others then: masks hold no hostile pod anyhow.

What is not so sure stays as it is, with the GPU held back: a pod of HAMi's own plugin (which names devices otherwise),
one with two containers on one GPU. Half of a pod is no answer: all of its containers are taken up, or none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from amdvgpud.core import hami, plan
from amdvgpud.core.errors import AmdvgpuError, Conflict, Invalid
from amdvgpud.core.hami import Offer
from amdvgpud.core.model import ComputePolicy, CuSet, Holder, LeaseId, Partition, PartitionId, Request
from amdvgpud.node import Node, NodeView
from amdvgpud.serve.kube.api import Pod, PodContainer
from amdvgpud.serve.kube.podresources import ContainerDevices
from amdvgpud.serve.kube.pods import PodWatch, asking

log = logging.getLogger(__name__)

LOOK_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Claim:
    """One slice that a container has."""

    request: Request
    places: Mapping[PartitionId, CuSet | None]
    holder: Holder


class Adoption:
    def __init__(
        self,
        node: Node,
        pods: PodWatch,
        offers: Callable[[NodeView], Sequence[Offer]],
        devices: Callable[[], Awaitable[Sequence[ContainerDevices]]],
    ) -> None:
        """``devices``: which container has which, by the kubelet's word; ``HostFailure`` where it does not answer."""
        self._node = node
        self._pods = pods
        self._offers = offers
        self._devices = devices
        self._said: dict[str, str] = {}
        self._known: set[str] = set()
        """Uids of pods that have had a slice in this Book: one that has none any more has lost it to an operator, who
        is not contradicted. Its GPU is held back all the same, since it runs there."""

    async def run(self) -> None:
        """Until cancelled: the kubelet may not have answered yet."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """One look. What cannot be taken up is said, once for each reason."""
        slices = self._node.view().book.slices
        unknown = self._pods.without(slices)
        ours = {uid for name in slices if (uid := hami.pod_uid(name)) is not None}
        self._known = (self._known & self._pods.pods.keys()) | ours
        self._said = {pod.metadata.uid: self._said.get(pod.metadata.uid, "") for pod in unknown}
        if not unknown:
            self._pods.saw({})
            return
        try:
            devices = await self._devices()
        except AmdvgpuError as error:
            log.debug("Which containers have GPUs cannot be asked now: %s", error)
            return
        self._pods.saw(
            {
                (pod.metadata.namespace, pod.metadata.name): frozenset(
                    gpu for container in asking(pod) for gpu in _gpus_of(pod, container, devices)
                )
                for pod in unknown
            }
        )
        for pod in unknown:
            if pod.metadata.uid in self._known:
                continue
            try:
                await self._take_up(pod, devices)
            except AmdvgpuError as error:
                if self._said[pod.metadata.uid] != str(error):
                    self._said[pod.metadata.uid] = str(error)
                    log.warning("%s runs since before this Book, and what it has cannot be told: %s", pod, error)

    async def _take_up(self, pod: Pod, devices: Sequence[ContainerDevices]) -> None:
        view = self._node.view()
        done: list[LeaseId] = []
        try:
            for claim in claims(pod, self._offers(view), view, devices):
                lease = await self._node.adopt(claim.holder, request=claim.request, places=claim.places)
                done.append(lease.id)
        except BaseException:
            for lease_id in done:
                await self._node.release_lease(lease_id)
            raise
        if done:
            log.info("%s runs since before this Book, and keeps what it has.", pod)


def claims(pod: Pod, offers: Sequence[Offer], view: NodeView, devices: Sequence[ContainerDevices]) -> tuple[Claim, ...]:
    """What the containers of ``pod`` have, those that have ended left out. ``Conflict`` or ``Invalid``: not surely."""
    allocated = [grants for grants in hami.parse_allocation(pod.annotations.get(hami.ALLOCATED, "")) if grants]
    containers = asking(pod)
    if len(allocated) != len(containers):
        raise Conflict(f"{len(containers)} of its containers ask for GPUs, and {len(allocated)} were allocated for")
    there = {offer.id: at for offer in offers if (at := view.inventory.partition(offer.partition)) is not None}
    limits = {where: at.vram_limit_bytes for where, at in plan.capacities(view.book, view.inventory).items()}
    cus = hami.parse_cus(text) if (text := pod.annotations.get(hami.CU_ALLOCATED, "")) else {}
    found = []
    for ordinal, (container, grants) in enumerate(zip(containers, allocated, strict=True)):
        if pod.runs_first(container) and pod.has_succeeded(container):
            continue
        _refuse_unless_asked(container, grants, there)
        _refuse_unless_held(pod, container, grants, devices)
        wanted = hami.wishes(grants, there, limits)
        requests = hami.requests(
            pod.metadata.uid,
            ordinal,
            wanted,
            priority=hami.priority_of(container.limit(hami.PRIORITY_RESOURCE)),
            oversubscribed=frozenset(gpu for gpu, ratio in view.book.oversubscription.items() if ratio > 1),
        )
        names = {str(wish.partition.id): wish.id for wish in wanted}
        for request in requests:
            places: dict[PartitionId, CuSet | None] = {}
            for where in request.on:
                whole = request.compute.policy is ComputePolicy.WHOLE
                if not whole and names[where] not in cus:
                    raise Conflict(f"{hami.CU_ALLOCATED} does not say which CUs of {names[where]} {container.name} has")
                places[PartitionId(where)] = None if whole else cus[names[where]]
            found.append(Claim(request, places, Holder(f"{pod}/{container.name}")))
    return tuple(found)


def _refuse_unless_asked(container: PodContainer, grants: hami.Container, there: Mapping[str, Partition]) -> None:
    """``Conflict`` where the allocation is not what the scheduler makes of the container's limits."""
    memory_mib, percent = container.limit(hami.MEMORY_RESOURCE), container.limit(hami.CORES_RESOURCE)
    for grant in grants:
        if (at := there.get(grant.id)) is None:
            raise Invalid(f"{grant.id} is not here")
        all_cus, pair = at.cu_count, 2 if at.layout.wgp else 1
        count = all_cus if percent is None else min(max(all_cus * percent // 100, 1), all_cus)
        rounded = min(-(-count // pair) * pair, all_cus)
        memory = memory_mib or at.vram_bytes // hami.MIB
        if grant.memory_mib != memory or grant.cu_count not in (count, rounded):
            raise Conflict(
                f"{grant.memory_mib} MiB and {grant.cu_count} CUs of {grant.id} are allocated to {container.name}, "
                f"whose limits come to {memory} and {count}"
            )
    if len(grants) != container.limit(hami.COUNT_RESOURCE):
        raise Conflict(f"{len(grants)} GPUs are allocated to {container.name}, which asks for another number")


def _refuse_unless_held(
    pod: Pod, container: PodContainer, grants: hami.Container, devices: Sequence[ContainerDevices]
) -> None:
    ids = sorted(_gpus_of(pod, container, devices))
    if ids != sorted(grant.id for grant in grants):
        raise Conflict(
            f"{', '.join(grant.id for grant in grants)} is allocated to {container.name}, and the kubelet says that it "
            f"has {', '.join(ids) or 'nothing'}"
        )


def _gpus_of(pod: Pod, container: PodContainer, devices: Sequence[ContainerDevices]) -> list[str]:
    """By the kubelet's word. What is no ``<id>#<slot>`` of ours (another plugin's) is an id of no GPU here."""
    mine = (pod.metadata.namespace, pod.metadata.name, container.name, hami.COUNT_RESOURCE)
    return [
        device.rpartition("#")[0]
        for each in devices
        if (each.namespace, each.pod, each.container, each.resource) == mine
        for device in each.ids
    ]
