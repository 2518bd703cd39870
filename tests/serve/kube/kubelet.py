"""A stand-in for the kubelet's side of the device plugin API, over real gRPC on real sockets.

Does what the kubelet's device manager does, as far as a plugin can see it: takes a registration, dials back, reads the
stream of devices, asks for preferences and allocations; empties its directory when it starts. The real one is tried in
tests on demand.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from amdvgpud.serve.pb import deviceplugin_pb2 as pb
from amdvgpud.serve.pb import podresources_pb2 as resources_pb

_CHANNEL = (("grpc.use_local_subchannel_pool", 1),)


@dataclass
class Plugin:
    """One registered resource, as the kubelet sees it."""

    request: pb.RegisterRequest
    channel: grpc.aio.Channel
    updates: list[list[pb.Device]] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    broken: str = ""
    """How the stream of devices was broken off, if it was."""

    @property
    def healthy(self) -> list[str]:
        return [d.ID for d in self.updates[-1] if d.health == "Healthy"]

    async def until(self, holds: Callable[[Plugin], bool], within_s: float = 10) -> None:
        async with asyncio.timeout(within_s):
            while not (self.updates and holds(self)):
                self.changed.clear()
                await self.changed.wait()

    async def listen(self) -> None:
        watch = self.channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch",
            request_serializer=pb.Empty.SerializeToString,
            response_deserializer=pb.ListAndWatchResponse.FromString,
        )
        try:
            async for answer in watch(pb.Empty()):
                self.updates.append(list(answer.devices))
                self.changed.set()
        except grpc.aio.AioRpcError as error:
            self.broken = error.code().name
        finally:
            self.ended.set()

    async def call(self, method: str, request: Any, answer: Any) -> Any:
        return await self.channel.unary_unary(
            f"/v1beta1.DevicePlugin/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )(request, timeout=10)

    async def allocate(self, *containers: Sequence[str]) -> list[pb.ContainerAllocateResponse]:
        request = pb.AllocateRequest(
            container_requests=[pb.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
        )
        answer = await self.call("Allocate", request, pb.AllocateResponse)
        return list(answer.container_responses)

    async def pre_start(self, *ids: str) -> None:
        """What is asked before each start of a container, if the plugin wants it."""
        await self.call("PreStartContainer", pb.PreStartContainerRequest(devices_ids=ids), pb.PreStartContainerResponse)

    async def prefer(self, available: Sequence[str], size: int, must: Sequence[str] = ()) -> list[str]:
        request = pb.PreferredAllocationRequest()
        request.container_requests.add(available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size)
        answer = await self.call("GetPreferredAllocation", request, pb.PreferredAllocationResponse)
        return list(answer.container_responses[0].deviceIDs)


class Kubelet:
    """``dir`` is its directory of device plugins; ``<dir>/../pod-resources/kubelet.sock`` says who has what."""

    def __init__(self, dir: Path, *, listens: bool = True) -> None:
        self.dir = dir
        self.pod_resources_socket = dir.parent / "pod-resources" / "kubelet.sock"
        self.plugins: dict[str, Plugin] = {}
        self.registrations: list[str] = []
        self.refusals: list[str] = []
        """Texts that the next registrations are refused with, one each."""
        self.pods: list[tuple[str, str, str, str, list[str]]] = []
        """(namespace, pod, container, resource, device ids) of the active pods."""
        self.foreign: dict[str, list[str]] = {}
        """Devices of other plugins."""
        self._listens = listens
        self._servers: list[grpc.aio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._registered = asyncio.Event()

    async def start(self) -> None:
        """As the kubelet does: whatever lies in the directory, its last run's checkpoint aside, is removed."""
        self.dir.mkdir(parents=True, exist_ok=True)
        for path in self.dir.iterdir():
            if path.name != "kubelet_internal_checkpoint":
                path.unlink()
        await self._open()

    async def _open(self) -> None:
        self.pod_resources_socket.parent.mkdir(exist_ok=True)
        await self._serve(
            self.dir / "kubelet.sock", "v1beta1.Registration", Register=(self._register, pb.RegisterRequest, pb.Empty)
        )
        await self._serve(
            self.pod_resources_socket,
            "v1.PodResourcesLister",
            List=(self._list, resources_pb.ListPodResourcesRequest, resources_pb.ListPodResourcesResponse),
            GetAllocatableResources=(
                self._allocatable,
                resources_pb.AllocatableResourcesRequest,
                resources_pb.AllocatableResourcesResponse,
            ),
        )

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for plugin in self.plugins.values():
            await plugin.channel.close()
        self.plugins.clear()
        for server in self._servers:
            await server.stop(0)
        self._servers.clear()

    async def restart(self, *, tidy: bool = True) -> None:
        """``tidy`` False: one that leaves what others have in the directory."""
        await self.stop()
        if tidy:
            await self.start()
        else:
            await self._open()

    async def registered(self, *names: str, within_s: float = 10) -> Plugin:
        """The plugin of the last of ``names``, once all are registered and have shown their devices."""
        async with asyncio.timeout(within_s):
            for name in names:
                while name not in self.plugins:
                    self._registered.clear()
                    await self._registered.wait()
                await self.plugins[name].until(lambda _: True, within_s)
        return self.plugins[names[-1]]

    def remember(self, uid: str, container: str, resource: str, ids: Sequence[str], answer: Any) -> None:
        """Its checkpoint has this container, beside those that it has already, and there is the pod's directory."""
        path = self.dir / "kubelet_internal_checkpoint"
        document: dict[str, Any] = {"Data": {"PodDeviceEntries": [], "RegisteredDevices": {}}, "Checksum": 1}
        if path.exists():
            document = json.loads(path.read_text())
        told = b64encode(answer.SerializeToString()).decode()
        entry = {"PodUID": uid, "ContainerName": container, "ResourceName": resource, "DeviceIDs": {"0": list(ids)}}
        document["Data"]["PodDeviceEntries"].append(entry | {"AllocResp": told})
        path.write_text(json.dumps(document))
        (self.dir.parent / "pods" / uid).mkdir(parents=True, exist_ok=True)

    async def _serve(self, path: Path, service: str, **methods: tuple[Any, Any, Any]) -> None:
        server = grpc.aio.server()
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                function, request_deserializer=request.FromString, response_serializer=answer.SerializeToString
            )
            for name, (function, request, answer) in methods.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._servers.append(server)

    async def _register(self, request: pb.RegisterRequest, context: Any) -> pb.Empty:
        self.registrations.append(request.resource_name)
        if self.refusals:
            await context.abort(grpc.StatusCode.UNKNOWN, self.refusals.pop(0))
        channel = grpc.aio.insecure_channel(f"unix:{self.dir / request.endpoint}", options=_CHANNEL)
        self.plugins[request.resource_name] = plugin = Plugin(request, channel)
        if self._listens:
            task = asyncio.create_task(plugin.listen())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._registered.set()
        return pb.Empty()

    async def _list(self, request: Any, context: Any) -> resources_pb.ListPodResourcesResponse:
        answer = resources_pb.ListPodResourcesResponse()
        for namespace, pod, container, resource, ids in self.pods:
            entry = answer.pod_resources.add(name=pod, namespace=namespace)
            entry.containers.add(name=container).devices.add(resource_name=resource, device_ids=ids)
        return answer

    async def _allocatable(self, request: Any, context: Any) -> resources_pb.AllocatableResourcesResponse:
        answer = resources_pb.AllocatableResourcesResponse()
        for name, ids in self.foreign.items():
            answer.devices.add(resource_name=name, device_ids=ids)
        for name, plugin in self.plugins.items():
            living = plugin.updates and not plugin.ended.is_set()
            answer.devices.add(resource_name=name, device_ids=plugin.healthy if living else [])
        return answer


@contextlib.asynccontextmanager
async def a_kubelet(dir: Path, **how: Any) -> Any:
    kubelet = Kubelet(dir, **how)
    await kubelet.start()
    try:
        yield kubelet
    finally:
        await kubelet.stop()
