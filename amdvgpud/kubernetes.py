"""What speaks with a cluster, put together: imported, and gRPC with it, only where the settings ask for it.

Beside :mod:`amdvgpud.assembly`, which puts the rest together.
"""

from __future__ import annotations

import asyncio
import json
import logging
import platform
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from amdvgpud.core import hami
from amdvgpud.core.cdi_runtimes import CdiWords
from amdvgpud.core.delivery import Choice, NodeSoftware, choose
from amdvgpud.core.errors import AmdvgpuError, Invalid
from amdvgpud.core.model import ComputePolicy, Inventory, Slice
from amdvgpud.core.render import partition_device
from amdvgpud.host.cdi import replace_file
from amdvgpud.node import Node
from amdvgpud.ports import CdiSpecs
from amdvgpud.serve.kube.adoption import Adoption
from amdvgpud.serve.kube.amounts import keep_amounts, remove_amounts, remove_or_say
from amdvgpud.serve.kube.api import SERVICE_ACCOUNT, KubeApi, read_access
from amdvgpud.serve.kube.delivery import Delivery
from amdvgpud.serve.kube.hami import HamiSettings, HamiSide
from amdvgpud.serve.kube.hami import withdraw as hami_withdraw
from amdvgpud.serve.kube.labels import keep_labels
from amdvgpud.serve.kube.own import NoNode, NotCounted, OwnDevices
from amdvgpud.serve.kube.podresources import PodResources, remembered_pods
from amdvgpud.serve.kube.pods import Held, PodWatch
from amdvgpud.serve.kube.resources import Grant, Mountpoints, grant_of
from amdvgpud.serve.metrics import Metrics
from amdvgpud.settings import Settings, hook_needs

try:
    from amdvgpud.serve.kube.kubelet import DevicePlugin, KubeletSettings
    from amdvgpud.serve.kube.leases import Granting, KubeletLeases
    from amdvgpud.serve.kube.profiles import ProfileResource, Profiles
    from amdvgpud.serve.kube.whole import WholeResource, WholeResources
except ModuleNotFoundError as error:
    raise Invalid.field(
        "kubelet.mode",
        f"a kubelet is spoken to by gRPC, and there is no {error.name} here: install amdvgpud[kubernetes], or leave "
        "kubelet.mode empty",
    ) from error


log = logging.getLogger(__name__)


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
        *,
        gate: Path,
        find: Callable[[], Awaitable[None]],
        environment: Mapping[str, str],
        read_cdi_words: Callable[[str, str, Path | None], CdiWords],
    ) -> None:
        """``environment``: the variables that others have set for us (:data:`FOREIGN`). ``read_cdi_words``: what the
        configuration of a runtime (name, version, file or None) says."""
        self._node = node
        self._cdi = cdi
        self._partitions = partitions
        self._mountpoints = mountpoints
        profiles = settings.kubelet_profiles if "profiles" in settings.kubelet_mode else ()
        self._profiled = Profiles(node, profiles)
        pod_resources = PodResources(settings.kubelet_pod_resources)
        self._leases = leases = KubeletLeases(
            node,
            pod_resources,
            settings.kubelet_dir,
            find=find,
            meant=lambda: {resource.name: resource.means for offer in self._offers for resource in offer()},
        )
        self._offers: list[Callable[[], Sequence[ProfileResource | WholeResource]]] = []
        policy = settings.kubelet_preference
        if profiles:
            cut = [ProfileResource(profile, node, leases, self.slices, policy) for profile in profiles]
            self._offers.append(lambda: cut)
        if "whole" in settings.kubelet_mode:
            whole = WholeResources(
                lambda name: WholeResource(name, node, leases, self.whole, settings.kubelet_naming, policy),
                node,
                settings.kubelet_naming,
            )
            self._offers.append(whole.now)
        self.delivery = _delivery(settings, environment, read_cdi_words)
        door = KubeletSettings(settings.kubelet_dir, self.delivery, settings.kubelet_take_over)
        counted = _counting(settings, environment)
        self._plugin = DevicePlugin(
            node,
            lambda: [resource for offer in self._offers for resource in offer()],
            door,
            metrics,
            pod_resources,
            counted=counted,
        )
        if settings.kubelet_mode:
            metrics.kubelet_delivery = lambda: self.delivery.choice.way
        self._labelled = cluster_api(settings, environment) if settings.kube_labels else None
        self._says_amounts = settings.hami_amounts
        self._hami: _Hami | None = None
        if "hami" in settings.kubelet_mode:
            api, name = cluster_api(settings, environment)
            watch = PodWatch(node, api, name, held=_holders(pod_resources, settings), find=find, now_s=time.time)
            side = HamiSide(
                node,
                api,
                HamiSettings(
                    name,
                    settings.hami_mode or environment.get("OPERATING_MODE") or hami.Mode.CU,
                    settings.hami_compute_partition or environment.get("COMPUTE_PARTITION", ""),
                    settings.kubelet_split_count,
                    str(gate),
                ),
                watch,
                self._of_pod,
            )
            # A plugin of its own: the others must not wait for a cluster that may not be there.
            plugin = DevicePlugin(node, lambda: [side.resource], door, metrics, pod_resources, counted=counted)
            adoption = Adoption(node, watch, side.offers, pod_resources.list)
            self._hami = _Hami(api, side, watch, plugin, adoption, lambda: self._amounts(api, name, side))

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

    def _of_pod(self, items: Sequence[Slice]) -> Grant:
        """Beside a slice in part a whole one needs the gate too, which refuses VRAM of a GPU that no policy names."""
        alone = all(item.request.compute.policy is ComputePolicy.WHOLE for item in items)
        return self.whole(items) if alone else self.slices(items)

    async def start(self) -> None:
        """Before the doors open: ``Invalid`` where what the settings ask for cannot be had from this cluster node."""
        if self._offers or self._hami is not None:
            await self.delivery.settle()
        # Profiles are cut before a kubelet is shown what is gone a moment later; and what a container has that this
        # Book does not know of is taken up before others can have it: whole GPUs, then slices as they are cut.
        await self._adopt()
        await self._profiled.cut()
        await self._adopt()

    async def _adopt(self) -> None:
        try:
            await self._leases.adopt()
        except AmdvgpuError as error:
            log.info("Which containers have devices cannot be asked yet: %s", error)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._profiled.run(), name="profiles")
            tasks.create_task(self._leases.run(), name="kubelet leases")
            tasks.create_task(self._plugin.run(), name="device plugin")
            tasks.create_task(self.delivery.follow(), name="kubelet delivery")
            if self._hami is not None:
                tasks.create_task(self._hami.run(), name="hami")
            if self._labelled is not None:
                tasks.create_task(self._label(*self._labelled), name="node labels")

    async def _amounts(self, api: KubeApi, name: str, side: HamiSide) -> None:
        if self._says_amounts:
            await keep_amounts(api, name, lambda: side.offers(self._node.view()))
        else:
            await remove_or_say(api, name)

    async def _label(self, api: KubeApi, name: str) -> None:
        try:
            await keep_labels(api, name, lambda: self._node.view().inventory)
        finally:
            await api.close()


class _Hami:
    """What runs for HAMi's scheduler. The kubelet hears of GPUs when it is known how they are offered."""

    def __init__(
        self,
        api: KubeApi,
        side: HamiSide,
        watch: PodWatch,
        plugin: DevicePlugin,
        adoption: Adoption,
        amounts: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._api = api
        self._adoption = adoption
        self._amounts = amounts
        self._side = side
        self._watch = watch
        self._plugin = plugin

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._side.run(), name="hami registration")
                tasks.create_task(self._watch.run(), name="hami pods")
                await self._side.known.wait()
                tasks.create_task(self._amounts(), name="amounts of the Node")
                await self._watch.listed.wait()
                await self._adoption.look()
                tasks.create_task(self._adoption.run(), name="hami pods of before this Book")
                tasks.create_task(self._plugin.run(), name="hami device plugin")
        finally:
            await self._api.close()


FOREIGN = ("NODE_NAME", "OPERATING_MODE", "COMPUTE_PARTITION", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
"""Variables that a DaemonSet sets as HAMi's plugin has them, or that Kubernetes sets. Ours, if set, beat them."""


def cluster_api(settings: Settings, environment: Mapping[str, str]) -> tuple[KubeApi, str]:
    """The API, and this node's name there. ``Invalid`` where nobody says how to reach it."""
    name = settings.kube_node_name or environment.get("NODE_NAME") or platform.node().lower()
    return KubeApi(read_access(settings.kube_config, environment)), name


def _delivery(
    settings: Settings, environment: Mapping[str, str], read_cdi_words: Callable[[str, str, Path | None], CdiWords]
) -> Delivery:
    if settings.kubelet_delivery != "auto":
        return Delivery(Choice("cdi" if settings.kubelet_delivery == "cdi" else "nodes", "kubelet.delivery says so"))
    if settings.kube_config is not None:
        cluster_api(settings, environment)  # one that is named and cannot be used is told at once

    async def ask() -> Choice:
        try:
            api, name = cluster_api(settings, environment)
        except Invalid as error:
            return Choice("nodes", f"nobody says which versions kubelet and runtime have ({error.detail})")
        try:
            found = (await api.get_node(name)).status.node_info
        finally:
            await api.close()
        software = NodeSoftware(found.kubelet_version, found.container_runtime_version)
        words = await asyncio.to_thread(
            read_cdi_words, software.runtime_name, software.runtime_version, settings.kubelet_runtime_config
        )
        return choose(software, words, str(settings.cdi_dir))

    return Delivery(Choice("nodes", "it has not been asked for yet", known=False), ask, hook_for=hook_needs(settings))


def _counting(settings: Settings, environment: Mapping[str, str]) -> Callable[[str], Awaitable[int | None]]:
    async def counted(resource: str) -> int | None:
        try:
            api, name = cluster_api(settings, environment)
        except Invalid:
            return None
        try:
            return (await api.get_node(name)).status.allocatable_of(resource)
        except AmdvgpuError:
            return None
        finally:
            await api.close()

    return counted


def _holders(pod_resources: PodResources, settings: Settings) -> Callable[[], Awaitable[Held]]:
    async def held() -> Held:
        uids = await asyncio.to_thread(remembered_pods, hami.COUNT_RESOURCE, settings.kubelet_dir)
        if not settings.kubelet_pod_resources.parent.is_dir():
            return Held(uids=uids)  # not mounted here: it can never be asked, and the others have to do
        every = await pod_resources.list()
        names = frozenset((each.namespace, each.pod) for each in every if each.resource == hami.COUNT_RESOURCE)
        return Held(names, uids)

    return held


async def offer_own_devices(
    settings: Settings,
    environment: Mapping[str, str],
    read_cdi_words: Callable[[str, str, Path | None], CdiWords],
    mounted: Path = SERVICE_ACCOUNT,
) -> None:
    """Offer the kubelet what the daemon's own pod needs (:mod:`amdvgpud.serve.kube.own`), until cancelled.

    ``Invalid`` outside of a pod: whose pods may have it is not known there.
    """
    try:
        namespace = (mounted / "namespace").read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"this is for a pod with a service account, whose namespace cannot be read: {error}") from error
    pod_resources = PodResources(settings.kubelet_pod_resources)
    own = OwnDevices(namespace, pod_resources.list, lambda document: publish(settings.cdi_dir, document))
    delivery = _delivery(settings, environment, read_cdi_words)
    door = KubeletSettings(settings.kubelet_dir, delivery, settings.kubelet_take_over)
    plugin = DevicePlugin(NoNode(), lambda: [own], door, NotCounted(), pod_resources)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(plugin.run(), name="own devices")
        tasks.create_task(delivery.follow(), name="kubelet delivery")


def publish(cdi_dir: Path, document: Mapping[str, Any]) -> None:
    """``document`` as the file of its kind in ``cdi_dir``."""
    name = document["kind"].replace("/", "-")
    replace_file(cdi_dir / f"{name}.json", json.dumps(document, indent=1).encode())


async def withdraw(settings: Settings, environment: Mapping[str, str]) -> str:
    """Mark what this node has registered as unhealthy; the node's name."""
    api, name = cluster_api(settings, environment)
    try:
        await hami_withdraw(api, name)
        await remove_amounts(api, name)
    finally:
        await api.close()
    return name
