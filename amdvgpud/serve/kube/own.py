"""The GPUs' device nodes for the daemon's own pod, offered to the kubelet as one device of a resource of their own.

The KFD shows the topology of a GPU only to a process whose device cgroup may open its render node, and Kubernetes has
no word for that but a privileged container, or a device plugin. So the daemon's pod asks for ``amdvgpu.io/daemon``,
which a second, smaller pod serves: it opens nothing and knows no GPU. By CDI the pod is let at all numbers that render
nodes can have, so that what is plugged in or cut later is seen as well; by nodes at those that are there.

Whoever has this device gets around every limit, and the kubelet gives it to any pod that asks first. So before the
container starts the kubelet asks back (PreStartContainer), and a pod of another namespace is refused, by the kubelet's
own word of who has it. Who may make pods in our namespace is trusted: they could mount our socket as well.

Sources: ``kfd_devcgroup_check_permission`` (amdkfd's kfd_priv.h: read and write of the render node), DRM's minors
(drm_drv.c: 64 of each kind, render nodes from 128; later ones anywhere), the CDI specification 0.3.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from amdvgpud.core.errors import Conflict
from amdvgpud.core.model import Book, Inventory
from amdvgpud.events import Event
from amdvgpud.node import NodeView
from amdvgpud.ports import CdiStatus
from amdvgpud.serve.kube.podresources import ContainerDevices
from amdvgpud.serve.kube.resources import Device, Grant, GrantNode

log = logging.getLogger(__name__)

RESOURCE: Final = "amdvgpu.io/daemon"
_NAME: Final = "gpus"
_DRM_MAJOR: Final = 226
_RENDER_MINORS: Final = range(128, 192)


class OwnDevices:
    """One device that stands for the nodes of all GPUs (``amdvgpud.serve.kube.resources.Resource``)."""

    name = RESOURCE

    def __init__(
        self,
        namespace: str,
        holders: Callable[[], Awaitable[Sequence[ContainerDevices]]],
        publish: Callable[[Mapping[str, Any]], None],
        root: Path = Path("/"),
    ) -> None:
        """``holders``: who has what, by the kubelet. ``publish``: makes a CDI file of a document. ``root`` has dev/."""
        self._namespace = namespace
        self._holders = holders
        self._publish = publish
        self._root = root

    def devices(self, view: NodeView) -> Sequence[Device]:
        return (Device(_NAME),)

    async def allocate(self, ids: Sequence[str]) -> Grant:
        """Published anew each time: the number of /dev/kfd is dealt out when its driver is loaded."""
        found = await asyncio.to_thread(lambda: dict(self._found()))
        await asyncio.to_thread(self._publish, document(found))
        return Grant((f"{RESOURCE}={_NAME}",), nodes=tuple(GrantNode(path, path) for path in found))

    async def again(self, ids: Sequence[str], pod_uid: str, container: str) -> Grant | None:
        """None: what a container was told stays so, for it is only let at more or fewer nodes."""
        return None

    def prefer(self, view: NodeView, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        return available[:size]

    async def before_start(self, ids: Sequence[str]) -> None:
        """``Conflict`` unless the kubelet says that a pod of our namespace has it. It asks before each start."""
        having = [entry for entry in await self._holders() if entry.resource == RESOURCE]
        others = [entry for entry in having if entry.namespace != self._namespace]
        if others or not having:
            whose = str(others[0]) if others else "a pod that the kubelet does not name"
            raise Conflict(
                f"{RESOURCE} is for the daemon's own pod in {self._namespace}, and {whose} asks for it: "
                "take it out of that pod's limits, and ask for a slice"
            )

    def _found(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """The nodes that are there, by path, with their numbers."""
        for path in (self._root / "dev/kfd", *sorted((self._root / "dev/dri").glob("renderD*"))):
            try:
                seen = path.stat()
            except OSError:
                continue  # gone since it was listed, or never there
            if stat.S_ISCHR(seen.st_mode):
                number = os.major(seen.st_rdev), os.minor(seen.st_rdev)
                yield f"/{path.relative_to(self._root)}", number


def document(found: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """The CDI file: ``found`` and all render nodes that there may be.

    With type and number it names nodes that are not there yet. A runtime makes none of them, for the pod's /dev is the
    node's own, mounted (runc, crun); it puts them into the device cgroup.
    """
    usual = {f"/dev/dri/renderD{minor}": (_DRM_MAJOR, minor) for minor in _RENDER_MINORS}
    nodes = [
        {"path": path, "type": "c", "major": major, "minor": minor, "permissions": "rw"}
        for path, (major, minor) in sorted({**usual, **found}.items())
    ]
    device = {"name": _NAME, "containerEdits": {"deviceNodes": nodes}}
    return {"cdiVersion": "0.3.0", "kind": RESOURCE, "devices": [device]}


class NoNode:
    """For a plugin whose devices are no news of a Node's."""

    def view(self) -> NodeView:
        return NodeView(Inventory(), Book(), {}, {}, CdiStatus("", False, None, ()), ready=True)

    def events_since(self, since: int) -> tuple[Sequence[Event], int, bool]:
        return (), since, False

    async def wait_event(self, since: int, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)


class NotCounted:
    """For a plugin whose program serves no metrics."""

    def kubelet_registration(self, result: str) -> None: ...

    def kubelet_allocation(self, result: str, duration_s: float) -> None: ...

    def kubelet_devices(self, resource: str, healthy: Sequence[bool] | None) -> None: ...
