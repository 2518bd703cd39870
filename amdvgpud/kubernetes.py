"""What speaks with a cluster, put together: imported, and gRPC with it, only where ``kubelet.mode`` asks for it.

Beside :mod:`amdvgpud.cli`, which puts the rest together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from amdvgpud.core.errors import Invalid
from amdvgpud.core.model import Inventory, Slice
from amdvgpud.core.render import partition_device
from amdvgpud.node import Node
from amdvgpud.ports import CdiSpecs
from amdvgpud.serve.metrics import Metrics
from amdvgpud.serve.podresources import PodResources
from amdvgpud.serve.resources import Grant, Mountpoints, Resource, grant_of
from amdvgpud.settings import Settings

try:
    from amdvgpud.serve.kubelet import DevicePlugin, KubeletSettings
    from amdvgpud.serve.kubelet_leases import Granting, KubeletLeases
    from amdvgpud.serve.profiles import ProfileResource, Profiles
    from amdvgpud.serve.whole import WholeResource, WholeResources
except ModuleNotFoundError as error:
    raise Invalid.field(
        "kubelet.mode",
        f"a kubelet is spoken to by gRPC, and there is no {error.name} here: install amdvgpud[kubernetes], or leave "
        "kubelet.mode empty",
    ) from error


class PartitionSpecs(Protocol):
    def render_partitions(self, slices: Sequence[Slice], inventory: Inventory) -> Mapping[str, Any]: ...


class Kubelet:
    """The resources that the settings ask for, and all that must run for them."""

    def __init__(
        self,
        settings: Settings,
        node: Node,
        cdi: CdiSpecs,
        partitions: PartitionSpecs,
        mountpoints: Mountpoints,
        metrics: Metrics,
    ) -> None:
        self._node = node
        self._cdi = cdi
        self._partitions = partitions
        self._mountpoints = mountpoints
        self._profiles = settings.kubelet_profiles if "profiles" in settings.kubelet_mode else ()
        pod_resources = PodResources(settings.kubelet_pod_resources)
        self._leases = leases = KubeletLeases(node, pod_resources, settings.kubelet_dir)
        self._offers: list[Callable[[], Sequence[Resource]]] = []
        policy = settings.kubelet_preference
        if self._profiles:
            cut = [ProfileResource(profile, node, leases, self.slices, policy) for profile in self._profiles]
            self._offers.append(lambda: cut)
        if "whole" in settings.kubelet_mode:
            whole = WholeResources(
                lambda name: WholeResource(name, node, leases, self.whole, settings.kubelet_naming, policy),
                node,
                settings.kubelet_naming,
            )
            self._offers.append(whole.now)
        self._plugin = DevicePlugin(
            node,
            lambda: [resource for offer in self._offers for resource in offer()],
            KubeletSettings(settings.kubelet_dir, settings.kubelet_delivery, settings.kubelet_take_over),
            metrics,
            pod_resources,
        )

    def offer(self, resources: Callable[[], Sequence[Resource]]) -> None:
        """What ``resources`` says, asked again and again, beside what the settings name; before :meth:`run`."""
        self._offers.append(resources)

    @property
    def slices(self) -> Granting:
        """What slices are for a container: the gate, its files and their GPUs."""
        return lambda items: grant_of(items, self._cdi.render(items, self._node.view().inventory), self._mountpoints)

    def whole(self, items: Sequence[Slice]) -> Grant:
        """What whole slices are for a container that needs no gate: their device nodes."""
        inventory = self._node.view().inventory
        document = self._partitions.render_partitions(items, inventory)
        places = [inventory.partition(share.partition) for item in items for share in item.shares]
        names = [partition_device(place) for place in places if place is not None]
        return grant_of(items, document, self._mountpoints, names=names)

    async def run(self) -> None:
        """Until cancelled. Profiles are cut first, so that a kubelet is not shown what is gone a moment later."""
        profiles = Profiles(self._node, self._profiles)
        await profiles.cut()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(profiles.run(), name="profiles")
            tasks.create_task(self._leases.run(), name="kubelet leases")
            tasks.create_task(self._plugin.run(), name="device plugin")
