"""What a node offers to its kubelet: resource names, the devices behind them, and what a container gets for some.

Owns the interface between the face that speaks the kubelet's protocol (:mod:`amdvgpud.serve.kube.kubelet`) and those
who decide what a device of a resource is, and makes a :class:`Grant` of slices. "Device" is the kubelet's word here: an
id that it counts and hands out. Does not own the protocol, and loads neither gRPC nor protobuf.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from amdvgpud.core.errors import Lingering
from amdvgpud.core.model import GpuId, Partition, Slice
from amdvgpud.node import NodeView

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Device:
    """One id that the kubelet may hand out. ``numa_node`` None: not known, and then no topology is told."""

    id: str
    healthy: bool = True
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class GrantMount:
    """A bind mount; the kubelet's protocol knows no options but read-only."""

    host_path: str
    container_path: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class GrantNode:
    host_path: str
    container_path: str
    permissions: str = "rw"


@dataclass(frozen=True, slots=True)
class Grant:
    """What one container gets. ``cdi_devices`` says it all, by names that the runtime resolves; the other three say
    the same without CDI. The kubelet is given one of the two, never both. :func:`grant_of` makes both from one text.
    What is ``added`` no CDI device brings, so it is told in either way.
    """

    cdi_devices: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    mounts: tuple[GrantMount, ...] = ()
    nodes: tuple[GrantNode, ...] = ()
    added_environment: tuple[tuple[str, str], ...] = ()
    added_mounts: tuple[GrantMount, ...] = ()
    undo: Callable[[], Awaitable[None]] | None = field(default=None, compare=False, repr=False)
    """Takes back what the call that made it has taken; None: it has taken nothing."""

    def __post_init__(self) -> None:
        paths = [m.container_path for m in (*self.mounts, *self.added_mounts)] + [n.container_path for n in self.nodes]
        names = [name for name, _ in (*self.environment, *self.added_environment)]
        for what in (paths, names, list(self.cdi_devices)):
            if twice := sorted({entry for entry in what if what.count(entry) > 1}):
                raise ValueError(f"a container would get {', '.join(twice)} twice")


class Resource(Protocol):
    """One resource name that the kubelet counts devices of."""

    @property
    def name(self) -> str:
        """As pods write it: ``amd.com/gpu``."""
        ...

    def devices(self, view: NodeView) -> Sequence[Device]:
        """All of them, fit or not, in a stable order. No I/O: it is asked at each event of the node."""
        ...

    async def allocate(self, ids: Sequence[str]) -> Grant:
        """What the one container that the kubelet gives ``ids`` to gets. Asked again with the same ids, the same.

        An ``AmdvgpuError`` fails this pod only and has taken nothing; its text is what ``kubectl describe pod`` shows.
        """
        ...

    async def again(self, ids: Sequence[str], pod_uid: str, container: str) -> Grant | None:
        """What a container that was given ``ids`` would get now, as it is about to start, perhaps once more.

        None: nobody here has served it (it is from before), and what it has is not known. An ``AmdvgpuError``: it must
        not start; the kubelet shows the text and tries again. ``NotFound``: what it had is freed, which says nothing of
        another container that has the same ids.
        """
        ...

    def prefer(self, view: NodeView, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        """``size`` of ``available``, among them all of ``must_include``. An ``AmdvgpuError``: the kubelet chooses."""
        ...


@runtime_checkable
class Guarded(Protocol):
    """A resource that the kubelet asks back about before it starts a container with its devices."""

    async def before_start(self, ids: Sequence[str]) -> None:
        """An ``AmdvgpuError`` keeps that container from starting, and its text is in the pod's events."""
        ...


# -------------------------------------------------------------------------------------------------------- health


def fit(view: NodeView, gpu: GpuId) -> bool:
    """Whether something new may be placed on ``gpu``: it is there, works, and no operator has cordoned it.

    What runs on it already is not asked about: the kubelet ends no pod because its device turned unhealthy.
    """
    if view.inventory.gpu(gpu) is None or gpu in view.book.cordoned:
        return False
    verdict = view.health.get(gpu)
    return verdict is None or verdict.placeable


def numa_node_of(partition: Partition) -> int | None:
    """For the kubelet, which takes a negative node for a request to place on a node that no machine has."""
    node = partition.numa_node
    return node if node is not None and node >= 0 else None


# ------------------------------------------------------------------------------------------------------- patience

PATIENCE_S: Final = 10
"""How long a call of the kubelet waits for a whole GPU to be clean. It admits no other pod meanwhile; guessed."""


async def patiently(ask: Callable[[], Awaitable[_T]], pause: Callable[[float], Awaitable[None]]) -> _T:
    """``ask()``, once a second while a former user's rest is on the GPU: the kubelet asks once, and then the pod has
    failed. ``Lingering`` after :data:`PATIENCE_S`. Nothing is held between two tries.
    """
    for second in itertools.count():
        try:
            return await ask()
        except Lingering:
            if second >= PATIENCE_S:
                raise
        await pause(1)
    raise AssertionError("counts for ever")


# -------------------------------------------------------------------------------------------------------- grants

Mountpoints = Callable[[Sequence[str]], str]
"""(names) -> a directory of the host that holds an empty directory of each name and nothing else."""


def grant_of(
    slices: Sequence[Slice], document: Mapping[str, Any], mountpoints: Mountpoints, *, names: Sequence[str] = ()
) -> Grant:
    """``slices`` for one container, from ``document``: what the CDI file says of them (``CdiSpecs.render``).

    So there is one truth about what a slice brings, whichever way it is delivered. ``names``: the devices' names where
    they are not the slices' own. Two slices of one container: their mounts add up (of one path the later one counts, as
    with CDI), and a variable that they disagree about is left out, since it would be wrong for one of them; the gate
    goes by the mounted policies.

    The kubelet's mounts have no type. A tmpfs, which keeps the directory of slices closed to the container's root,
    becomes a read-only directory of ``mountpoints`` with nothing in it but the places where slices are mounted.
    """
    wanted = list(names) or [str(item.name) for item in slices]
    by_name = {device["name"]: device.get("containerEdits", {}) for device in document["devices"]}
    edits = [document.get("containerEdits", {}), *(by_name[name] for name in wanted)]
    mounts = {}
    for mount in _all(edits, "mounts"):
        path, host_path = mount["containerPath"], mount["hostPath"]
        if mount.get("type") == "tmpfs":
            host_path, options = mountpoints(wanted), ("ro",)
        else:
            options = mount.get("options", ())
        mounts[path] = GrantMount(host_path, path, read_only="ro" in options)
    nodes = {
        node["path"]: GrantNode(node.get("hostPath", node["path"]), node["path"], node.get("permissions", "rw"))
        for node in _all(edits, "deviceNodes")
    }
    return Grant(
        cdi_devices=tuple(f"{document['kind']}={name}" for name in wanted),
        environment=_agreed(entry.partition("=")[::2] for entry in _all(edits, "env")),
        mounts=tuple(mounts.values()),
        nodes=tuple(nodes.values()),
    )


def _all(edits: Iterable[Mapping[str, Any]], key: str) -> Iterable[Any]:
    return (entry for edit in edits for entry in edit.get(key, ()))


def _agreed(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    values: dict[str, set[str]] = {}
    for name, value in pairs:
        values.setdefault(name, set()).add(value)
    return tuple((name, found.pop()) for name, found in values.items() if len(found) == 1)


async def nothing_to_find() -> None:
    """Where nobody looks for containers: the ledgers and the KFD have to do."""
