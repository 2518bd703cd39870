"""The kubelet's device plugin API, v1beta1: a server for each resource name, in the kubelet's own directory.

Owns the protocol: sockets, registration and its repetition, the stream of devices, the answers. What the devices are
and what a container gets for them is a :class:`amdvgpud.serve.kube.resources.Resource`'s. Loads gRPC (0.1 s, 28 MB), so
it is imported only where a kubelet is to be served.

A registration is over when the kubelet is not the one that it was made with (its socket is another file), when our
socket is gone (a kubelet that starts empties the directory), or when nobody listens to our devices. Then all of it is
made anew, with a socket of a new name: so two instances never share one, and none deletes the other's.

That is looked at once a second rather than watched by inotify: ten seconds are allowed, inotify is not in the standard
library, and its own troubles (a directory that is not there yet, that is replaced, a queue that overflows) would need
the periodic look beside it.

Sources: k8s.io/kubelet ``pkg/apis/deviceplugin/v1beta1``; what the kubelet does: its ``cm/devicemanager``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import grpc
import grpc.aio

from amdvgpud.core.delivery import Way
from amdvgpud.core.errors import AmdvgpuError, Conflict, HostFailure, Invalid, NoRoom, NotFound
from amdvgpud.events import Event
from amdvgpud.node import NodeView
from amdvgpud.serve.kube.delivery import Delivery
from amdvgpud.serve.kube.neighbours import Counted, Neighbours, label_of
from amdvgpud.serve.kube.podresources import PodResources, remembered
from amdvgpud.serve.kube.resources import Device, Grant, Guarded, Resource
from amdvgpud.serve.pb import deviceplugin_pb2 as pb

log = logging.getLogger(__name__)

VERSION: Final = "v1beta1"
KUBELET_SOCKET: Final = "kubelet.sock"
PREFIX: Final = "amdvgpud-"
"""Of our sockets' names, so that those of an instance that was killed are known and removed."""

LOOK_S: Final = 1.0
UNHEARD_S: Final = 8.0
"""How long a kubelet that took a registration may leave the devices unread. It dials back at once; guessed."""
CALL_S: Final = 5.0
OFFERS_S: Final = 2.0
GRACE_S: Final = 1.0
"""What a call under way gets to end when its server does. The streams of devices end at once."""
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0

_PLUGIN: Final = f"{VERSION}.DevicePlugin"
_CHANNEL: Final = (("grpc.use_local_subchannel_pool", 1),)
"""Otherwise a new channel inherits the back-off of an old one to the same path."""


@dataclass(frozen=True, slots=True)
class KubeletSettings:
    dir: Path
    delivery: Delivery = field(default_factory=lambda: Delivery.fixed("nodes"))
    take_over: bool = False
    """Register a name although somebody else has it: the kubelet lets the last one win."""
    look_s: float = LOOK_S


class Told(Protocol):
    """What is needed of the Node: its picture, and to be woken when that changes."""

    def view(self) -> NodeView: ...

    def events_since(self, since: int) -> tuple[Sequence[Event], int, bool]: ...

    async def wait_event(self, since: int, timeout_s: float) -> None: ...


class Counts(Protocol):
    """What is counted of it (``amdvgpud.serve.metrics.Metrics``)."""

    def kubelet_registration(self, result: Literal["ok", "refused", "owned", "failed"]) -> None: ...

    def kubelet_allocation(self, result: Literal["ok", "refused", "failed"], duration_s: float) -> None: ...

    def kubelet_devices(self, resource: str, healthy: Sequence[bool] | None) -> None: ...


class DevicePlugin:
    """All resources of the node, registered as long as :meth:`run` runs."""

    def __init__(
        self,
        node: Told,
        offers: Callable[[], Sequence[Resource]],
        settings: KubeletSettings,
        metrics: Counts,
        pod_resources: PodResources,
        *,
        counted: Counted | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``offers``: what is to be registered now, asked again after each event of the node; distinct names."""
        self._node = node
        self._offers = offers
        self._settings = settings
        self._metrics = metrics
        self._neighbours = Neighbours(
            settings.dir, PREFIX, pod_resources, counted, lambda: self._sleep(settings.look_s)
        )
        self._sleep = sleep
        self._resources: dict[str, Resource] = {}

    async def run(self) -> None:
        """Until cancelled. Begins when the node is ready: nothing is answered from before the first scan."""
        await asyncio.to_thread(self._sweep)
        serving: dict[str, asyncio.Task[None]] = {}
        seen = 0
        try:
            while True:
                seen = self._node.events_since(seen)[1]
                self._resources = {resource.name: resource for resource in self._offers()}
                gone = [serving.pop(name) for name in serving.keys() - self._resources.keys()]
                for task in gone:
                    task.cancel()
                await asyncio.gather(*gone, return_exceptions=True)
                for name in self._resources.keys() - serving.keys():
                    serving[name] = asyncio.create_task(self._serve(name), name=f"kubelet {name}")
                await self._node.wait_event(seen, OFFERS_S)  # not each change of an offer is an event of the node
        finally:
            for task in serving.values():
                task.cancel()
            await asyncio.gather(*serving.values(), return_exceptions=True)

    # ------------------------------------------------------------------------------------------ one resource

    async def _serve(self, name: str) -> None:
        """One registration after the other; what goes wrong with this name is no matter for the others."""
        pause_s, trouble = FIRST_PAUSE_S, ""
        while True:
            door = await self._door()
            try:
                await self._refuse_second_owner(name)
                await self._settings.delivery.renew()
                why = await self._registered(name, door)
                log.info("%s: the registration is over, %s.", name, why)
                pause_s, trouble = FIRST_PAUSE_S, ""
                continue
            except _Unheard as error:
                text = str(error)
            except Conflict as error:
                self._metrics.kubelet_registration("owned")
                text = str(error)
            except grpc.aio.AioRpcError as error:
                self._metrics.kubelet_registration("refused")
                text = f"the kubelet refused the registration: {error.code().name}: {error.details()}"
            except Exception as error:
                self._metrics.kubelet_registration("failed")
                text = f"{type(error).__name__}: {error}"
            if text != trouble:
                log.warning("%s is not registered, tried again with growing pauses: %s", name, text)
            trouble = text
            await self._pause(pause_s, door)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _registered(self, name: str, door: _File) -> str:
        """Serve and register; why that is over. Raises what keeps the kubelet from taking it."""
        session = _Session(self._node, name, self._resources.__getitem__, self._settings, self._metrics)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((session.handler(),))
        # Not the name's own letters alone: the kubelet's directory is shared with other plugins and other instances.
        path = self._settings.dir / f"{PREFIX}{label_of(name)}-{secrets.token_hex(4)}.sock"
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        try:
            ours = await asyncio.to_thread(_file, path)
            await self._register(name, path.name)
            self._metrics.kubelet_registration("ok")
            log.info("%s: registered with the kubelet as %s.", name, path.name)
            unheard_s = 0.0
            while True:
                await self._sleep(self._settings.look_s)
                if await asyncio.to_thread(_file, self._settings.dir / KUBELET_SOCKET) != door:
                    return "the kubelet's socket is another one now"
                if ours is None or await asyncio.to_thread(_file, path) != ours:
                    return "our socket was removed"
                unheard_s = 0.0 if session.listeners else unheard_s + self._settings.look_s
                if unheard_s >= UNHEARD_S:
                    if session.heard:
                        return "the kubelet does not listen any more"
                    raise _Unheard(f"the kubelet took the registration and did not ask for devices in {UNHEARD_S:g} s")
        finally:
            self._metrics.kubelet_devices(name, None)
            session.over.set()
            await server.stop(GRACE_S)

    async def _register(self, name: str, endpoint: str) -> None:
        async with grpc.aio.insecure_channel(
            f"unix:{self._settings.dir / KUBELET_SOCKET}", options=_CHANNEL
        ) as channel:
            register = channel.unary_unary(
                f"/{VERSION}.Registration/Register",
                request_serializer=pb.RegisterRequest.SerializeToString,
                response_deserializer=pb.Empty.FromString,
            )
            await register(
                pb.RegisterRequest(
                    version=VERSION,
                    endpoint=endpoint,
                    resource_name=name,
                    options=_options(),
                ),
                timeout=CALL_S,
            )

    async def _door(self) -> _File:
        """The kubelet's socket, once there is one; the directory may come late too."""
        while (door := await asyncio.to_thread(_file, self._settings.dir / KUBELET_SOCKET)) is None:
            await self._sleep(self._settings.look_s)
        return door

    async def _pause(self, pause_s: float, door: _File) -> None:
        """``pause_s``, or less if another kubelet comes meanwhile: it has refused nothing yet."""
        while pause_s > 0:
            await self._sleep(step := min(pause_s, self._settings.look_s))
            pause_s -= step
            if await asyncio.to_thread(_file, self._settings.dir / KUBELET_SOCKET) != door:
                return

    # --------------------------------------------------------------------------------------------- neighbours

    async def _refuse_second_owner(self, name: str) -> None:
        if not self._settings.take_over:
            resource = self._resources[name]
            ours = lambda: {device.id: device.healthy for device in resource.devices(self._node.view())}  # noqa: E731
            await self._neighbours.refuse_second_owner(name, ours)

    def _sweep(self) -> None:
        """Remove the sockets that instances before us left when they were killed. One that answers is left alone."""
        with contextlib.suppress(OSError):
            for path in self._settings.dir.glob(f"{PREFIX}*.sock"):
                with socket.socket(socket.AF_UNIX) as line, contextlib.suppress(OSError):
                    line.settimeout(1)
                    try:
                        line.connect(str(path))
                    except ConnectionRefusedError:
                        path.unlink()
                        log.info("%s is left from an instance that was killed: removed.", path)


class _Unheard(Exception):
    pass


class _Session:
    """The five methods of one resource's server, for as long as one registration lasts."""

    def __init__(
        self,
        node: Told,
        name: str,
        resource_of: Callable[[str], Resource],
        settings: KubeletSettings,
        metrics: Counts,
    ) -> None:
        self._node = node
        self._name = name
        self._resource_of = resource_of
        self._settings = settings
        self._metrics = metrics
        self.listeners = 0
        self.heard = False
        self.over = asyncio.Event()

    def handler(self) -> grpc.GenericRpcHandler:
        def unary(method: Callable[[Any, Any], Awaitable[Any]], request: Any, answer: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                method, request_deserializer=request.FromString, response_serializer=answer.SerializeToString
            )

        methods = {
            "GetDevicePluginOptions": unary(self._get_options, pb.Empty, pb.DevicePluginOptions),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list_and_watch,
                request_deserializer=pb.Empty.FromString,
                response_serializer=pb.ListAndWatchResponse.SerializeToString,
            ),
            "GetPreferredAllocation": unary(
                self._get_preferred, pb.PreferredAllocationRequest, pb.PreferredAllocationResponse
            ),
            "Allocate": unary(self._allocate, pb.AllocateRequest, pb.AllocateResponse),
            "PreStartContainer": unary(self._pre_start, pb.PreStartContainerRequest, pb.PreStartContainerResponse),
        }
        return grpc.method_handlers_generic_handler(_PLUGIN, methods)

    async def _get_options(self, request: pb.Empty, context: Any) -> pb.DevicePluginOptions:
        return _options()

    async def _list_and_watch(self, request: pb.Empty, context: Any) -> AsyncIterator[pb.ListAndWatchResponse]:
        """All devices now, and again as soon as an event of the node changes one of them."""
        self.listeners += 1
        self.heard = True
        sent: tuple[Device, ...] | None = None
        seen = 0
        try:
            while not self.over.is_set():
                seen = self._node.events_since(seen)[1]
                devices = tuple(self._resource_of(self._name).devices(self._node.view()))
                if devices != sent:
                    sent = devices
                    self._metrics.kubelet_devices(self._name, [device.healthy for device in devices])
                    yield pb.ListAndWatchResponse(devices=[_device(device) for device in devices])
                waits = [asyncio.ensure_future(wait) for wait in (self._node.wait_event(seen, 60), self.over.wait())]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
        finally:
            self.listeners -= 1

    async def _get_preferred(
        self, request: pb.PreferredAllocationRequest, context: Any
    ) -> pb.PreferredAllocationResponse:
        answer = pb.PreferredAllocationResponse()
        for asked in request.container_requests:
            available, must = list(asked.available_deviceIDs), list(asked.must_include_deviceIDs)
            size = asked.allocation_size
            try:
                chosen = list(self._resource_of(self._name).prefer(self._node.view(), available, must, size))
            except Exception as error:
                # A preference is no reason to fail a pod: what the kubelet would have taken itself is fine too.
                log.warning("%s: no preference among %d devices: %s", self._name, len(available), error)
                chosen = [*must, *(entry for entry in available if entry not in must)][:size]
            answer.container_responses.add(deviceIDs=chosen)
        return answer

    async def _allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:
        began_s = time.perf_counter()
        result: Literal["ok", "refused", "failed"] = "failed"
        containers = [list(asked.devices_ids) for asked in request.container_requests]
        ids = [entry for asked in containers for entry in asked]
        try:
            grants = await self._grants(containers)
            way = self._settings.delivery.choice.way
            answer = pb.AllocateResponse(container_responses=[answer_of(grant, way) for grant in grants])
            result = "ok"
            return answer
        except AmdvgpuError as error:
            result = "refused"
            log.warning("%s: %s was not given: %s", self._name, ", ".join(ids), error)
            await context.abort(_code(error), f"amdvgpud: {error}")
        except Exception as error:
            log.exception("%s: %s was not given", self._name, ", ".join(ids))
            await context.abort(grpc.StatusCode.INTERNAL, f"amdvgpud: {type(error).__name__}: {error}")
        finally:
            self._metrics.kubelet_allocation(result, time.perf_counter() - began_s)
        raise AssertionError("abort raises")

    async def _grants(self, containers: Sequence[Sequence[str]]) -> Sequence[Grant]:
        """One for each container, or none is given: the kubelet refuses a pod whole."""
        grants = []
        async with contextlib.AsyncExitStack() as undo:
            for ids in containers:
                grant = await self._resource_of(self._name).allocate(ids)
                grants.append(grant)
                if grant.undo is not None:
                    undo.push_async_callback(grant.undo)
            undo.pop_all()
        return grants

    async def _pre_start(self, request: pb.PreStartContainerRequest, context: Any) -> pb.PreStartContainerResponse:
        """The kubelet starts a container: with what Allocate has told, which it never asks for again.

        After a reboot, or a reload of the driver, that may name another's GPU, or files that are not there any more:
        then files are made anew and the container waits, with a sentence, where what was told is not so any more.
        """
        ids = list(request.devices_ids)
        try:
            await self._let_start(ids)
        except AmdvgpuError as error:
            log.warning("%s: a container with %s does not start: %s", self._name, ", ".join(ids), error)
            await context.abort(_code(error), f"amdvgpud: {error}")
        return pb.PreStartContainerResponse()

    async def _let_start(self, ids: Sequence[str]) -> None:
        """``AmdvgpuError``: the container that has ``ids`` must not start.

        The kubelet does not say which container it is; its checkpoint does, and what it was told. Where that does not,
        the container starts: it is most likely right, and would be nobody's to mend.
        """
        resource = self._resource_of(self._name)
        if isinstance(resource, Guarded):
            await resource.before_start(ids)
        try:
            every = await asyncio.to_thread(remembered, self._settings.dir)
        except HostFailure as error:
            log.warning("%s: nobody knows what the container with %s was told: %s", self._name, ", ".join(ids), error)
            return
        told = [entry for entry in every if entry.resource == self._name and set(entry.ids) == set(ids)]
        if not told:
            log.warning("%s: the kubelet's checkpoint has no container with %s", self._name, ", ".join(ids))
        freed: NotFound | None = None
        others = False
        for entry in told:  # an init container, whose devices go to one behind it, has an entry too
            try:
                grant = await self._resource_of(self._name).again(ids, entry.pod_uid, entry.container)
            except NotFound as error:
                freed = error
                continue
            others = True
            if grant is None or not entry.answer:
                continue
            answer = pb.ContainerAllocateResponse.FromString(entry.answer)
            if (why := await asyncio.to_thread(outdated, answer, grant)) is not None:
                raise Conflict(f"container {entry.container}: {why}")
        # Which of them starts cannot be told; most often it is the one that still has something. One that nobody here
        # has served counts too: a stranger's program is let be.
        if freed is not None and not others:
            raise freed


# ------------------------------------------------------------------------------------------------------- messages


def answer_of(grant: Grant, delivery: Way) -> pb.ContainerAllocateResponse:
    """``grant`` in one way: CDI names, or variables, mounts and device nodes."""
    by_name = delivery == "cdi" and bool(grant.cdi_devices)
    environment = [*(() if by_name else grant.environment), *grant.added_environment]
    mounts = [*(() if by_name else grant.mounts), *grant.added_mounts]
    return pb.ContainerAllocateResponse(
        envs=dict(environment),
        mounts=[
            pb.Mount(container_path=m.container_path, host_path=m.host_path, read_only=m.read_only) for m in mounts
        ],
        devices=[
            pb.DeviceSpec(container_path=n.container_path, host_path=n.host_path, permissions=n.permissions)
            for n in (() if by_name else grant.nodes)
        ],
        cdi_devices=[pb.CDIDevice(name=name) for name in (grant.cdi_devices if by_name else ())],
    )


def outdated(told: pb.ContainerAllocateResponse, grant: Grant) -> str | None:
    """Why a container must not start with what it was ``told`` where it would get ``grant`` now; None: it may.

    Names of CDI are resolved at each start, so they are right or unknown to the runtime. Blocking.
    """
    was, now = _nodes((*told.devices, *told.mounts)), _nodes((*grant.nodes, *grant.mounts))
    if was - now:
        return (
            f"the kubelet starts it with {', '.join(sorted(was - now))}, and what it was given has "
            f"{', '.join(sorted(now - was)) or 'none of these'} now: make the pod anew, or use kubelet.delivery = cdi, "
            "by which this follows"
        )
    there = {mount.host_path for mount in (*grant.mounts, *grant.added_mounts)}
    gone = [m.host_path for m in told.mounts if m.host_path not in there and not Path(m.host_path).exists()]
    if gone:
        return f"the kubelet starts it with {', '.join(gone)}, which is no more: make the pod anew"
    return None


def _nodes(entries: Iterable[Any]) -> set[str]:
    """On the host. A simulated machine has files for device nodes, and these are mounted."""
    return {entry.host_path for entry in entries if entry.container_path.startswith("/dev/")}


def _options() -> pb.DevicePluginOptions:
    return pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)


def _device(device: Device) -> pb.Device:
    health = "Healthy" if device.healthy else "Unhealthy"
    if device.numa_node is None:
        return pb.Device(ID=device.id, health=health)
    return pb.Device(ID=device.id, health=health, topology=pb.TopologyInfo(nodes=[pb.NUMANode(ID=device.numa_node)]))


def _code(error: AmdvgpuError) -> grpc.StatusCode:
    for kind, code in (
        (Invalid, grpc.StatusCode.INVALID_ARGUMENT),
        (NotFound, grpc.StatusCode.NOT_FOUND),
        (NoRoom, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Conflict, grpc.StatusCode.FAILED_PRECONDITION),
    ):
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.UNAVAILABLE


# ---------------------------------------------------------------------------------------------------------- files

_File = tuple[int, int, int]
"""Device, inode and time of change: inodes alone are given anew at once."""


def _file(path: Path) -> _File | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
