"""Exclusive GPUs and partitions, by the resource names that AMD's own device plugin has for them.

A device is a Partition (a GPU that is not partitioned has one). What is handed out is a whole slice of it: the Book
then keeps everybody else away, and the container gets device nodes alone, without gate, library or mask. The slice is
made at Allocate and goes with its lease; a Partition of which anything is promised otherwise is not fit meanwhile.

Names as ROCm/k8s-device-plugin gives them: by compute and memory mode (``cpx_nps4``), ``single`` or ``mixed``. Other
than there, a GPU without modes on a mixed node is announced too, as ``amd.com/gpu``. One that has modes, and whose mode
could never be read, is left out: there is no name for it, so it is not shown as unhealthy either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from amdvgpud.core.errors import NotFound
from amdvgpud.core.model import (
    Compute,
    ComputePolicy,
    Inventory,
    Partition,
    Request,
    Slice,
    SliceName,
)
from amdvgpud.core.prefer import prefer
from amdvgpud.core.render import partition_device
from amdvgpud.node import Node, NodeView
from amdvgpud.serve.kube.leases import Granting, KubeletLeases, device_of
from amdvgpud.serve.kube.resources import Device, Grant, fit, numa_node_of

log = logging.getLogger(__name__)

NAMINGS: Final = ("single", "mixed")
GPU: Final = "amd.com/gpu"


def resource_names(inventory: Inventory, naming: str) -> Mapping[str, tuple[Partition, ...]]:
    """The Partitions by resource name. Empty for ``single`` on a node whose GPUs are cut in different ways: there one
    name would stand for different things, and a pod would get whichever comes first. A GPU without modes is of no way.
    """
    found: dict[str, list[Partition]] = {}
    for gpu in inventory.gpus:
        compute_unread = gpu.compute_partition is None and gpu.available_compute_partitions
        if compute_unread or (gpu.memory_partition is None and gpu.available_memory_partitions):
            continue  # it has modes, and the one that it is in could never be read
        mode = f"{gpu.compute_partition}_{gpu.memory_partition}".lower()
        has_mode = gpu.compute_partition and gpu.memory_partition
        found.setdefault(mode if has_mode else "", []).extend(gpu.partitions)
    if naming == "single":
        alike = len(found.keys() - {""}) <= 1
        return {GPU: tuple(p for places in found.values() for p in places)} if found and alike else {}
    return {f"amd.com/{mode}" if mode else GPU: tuple(partitions) for mode, partitions in sorted(found.items())}


class WholeResource:
    """A :class:`amdvgpud.serve.kube.resources.Resource`."""

    def __init__(
        self, name: str, node: Node, leases: KubeletLeases, granting: Granting, naming: str, policy: str = "besteffort"
    ) -> None:
        self.name = name
        self._node = node
        self._leases = leases
        self._granting = granting
        self._naming = naming
        self._policy = policy

    def _places(self, view: NodeView) -> Mapping[str, Partition]:
        return {partition_device(p): p for p in resource_names(view.inventory, self._naming).get(self.name, ())}

    def devices(self, view: NodeView) -> Sequence[Device]:
        promised = {
            share.partition
            for item in view.book.slices.values()
            if not _ours(view, item) or self._leases.contested(view, item.name)
            for share in item.shares
        }
        return [
            Device(device, fit(view, place.gpu) and place.id not in promised, numa_node_of(place))
            for device, place in self._places(view).items()
        ]

    async def allocate(self, ids: Sequence[str]) -> Grant:
        return await self._leases.grant(self.name, self._requests(ids), self._granting)

    async def again(self, ids: Sequence[str], pod_uid: str, container: str) -> Grant:
        return await self._leases.again(self.name, self._requests(ids), self._granting)

    def means(self, device: str) -> Request:
        return self._requests([device])[0][1]

    def _requests(self, ids: Sequence[str]) -> Sequence[tuple[str, Request]]:
        places = self._places(self._node.view())
        if unknown := sorted(set(ids) - places.keys()):
            raise NotFound(f"{self.name} has no {', '.join(unknown)}; there are {', '.join(places) or 'none'}")
        return [
            (device, Request(_slice_name(device), Compute(ComputePolicy.WHOLE), on=(str(places[device].id),)))
            for device in ids
        ]

    def prefer(self, view: NodeView, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        return prefer(self._places(view), available, must_include, size, self._policy)


class WholeResources:
    """The resources that the node has now: their names follow the modes that its GPUs are in."""

    def __init__(self, make: Callable[[str], WholeResource], node: Node, naming: str) -> None:
        self._make = make
        self._node = node
        self._naming = naming
        self._made: dict[str, WholeResource] = {}
        self._said = False

    def now(self) -> Sequence[WholeResource]:
        inventory = self._node.view().inventory
        names = resource_names(inventory, self._naming)
        if inventory.gpus and not names and not self._said:
            log.warning(
                "The GPUs are partitioned in different ways, so one name cannot stand for all of them, and none is "
                "offered. Set kubelet.naming to mixed, or partition them alike."
            )
        self._said = bool(inventory.gpus and not names)
        for name in names:
            if name not in self._made:
                self._made[name] = self._make(name)
        return [self._made[name] for name in names]


def _slice_name(device: str) -> SliceName:
    return SliceName(f"whole-{device.lower()}")


def _ours(view: NodeView, item: Slice) -> bool:
    lease = view.book.lease_of(item.name)
    return lease is not None and item.name.startswith("whole-") and device_of(lease.holder) is not None
