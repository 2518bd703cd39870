"""Which containers have which devices, as the kubelet says: its pod resources API (v1), and its checkpoint beside it.

Reads only. The API knows pods by name and lists those that are active, without init containers that have ended; the
checkpoint knows pods by uid and forgets one only when the next pod with devices comes. So neither alone says that a
device is free. What follows from the two is decided by those who hold the devices.

Sources: k8s.io/kubelet ``pkg/apis/podresources/v1``; ``pkg/kubelet/cm/devicemanager/checkpoint`` of Kubernetes.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from amdvgpud.core.errors import HostFailure

CALL_S: Final = 5.0
LONGEST_ANSWER: Final = 16 * 2**20
"""The kubelet's own limit for this API; gRPC's default of 4 MiB is too little for a thousand pods with many devices."""


CHECKPOINT: Final = "kubelet_internal_checkpoint"


@dataclass(frozen=True, slots=True)
class ContainerDevices:
    """The devices of one resource that one container has."""

    namespace: str
    pod: str
    container: str
    resource: str
    ids: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.namespace}/{self.pod} ({self.container})"


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """The same as the kubelet has it on disk."""

    pod_uid: str
    container: str
    resource: str
    ids: tuple[str, ...]
    answer: bytes = b""
    """What Allocate told of them (``ContainerAllocateResponse``): the container is started with that, each time."""


class PodResources:
    """A client of the kubelet's pod resources socket; a connection for each call, since calls are rare."""

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path

    async def list(self) -> tuple[ContainerDevices, ...]:
        """``HostFailure`` where the kubelet does not answer: nobody knows then, and no device is free."""
        from amdvgpud.serve.pb import podresources_pb2 as pb

        answer = await self._call("List", pb.ListPodResourcesRequest(), pb.ListPodResourcesResponse)
        return tuple(
            ContainerDevices(pod.namespace, pod.name, container.name, devices.resource_name, tuple(devices.device_ids))
            for pod in answer.pod_resources
            for container in pod.containers
            for devices in container.devices
        )

    async def since_s(self) -> float:
        """Unix time from which this kubelet serves. ``HostFailure`` where there is none."""
        try:
            return (await asyncio.to_thread(self._socket_path.stat)).st_ctime
        except OSError as error:
            raise HostFailure(f"there is no kubelet at {self._socket_path}") from error

    async def allocatable(self) -> Mapping[str, frozenset[str]] | None:
        """Healthy devices by resource, whoever registered them; None where the kubelet does not say (old, or away)."""
        from amdvgpud.serve.pb import podresources_pb2 as pb

        try:
            answer = await self._call(
                "GetAllocatableResources", pb.AllocatableResourcesRequest(), pb.AllocatableResourcesResponse
            )
        except HostFailure:
            return None
        found: dict[str, frozenset[str]] = {}
        for devices in answer.devices:  # one entry for each NUMA node
            found[devices.resource_name] = found.get(devices.resource_name, frozenset()) | set(devices.device_ids)
        return found

    async def _call(self, method: str, request: Any, answer: Any) -> Any:
        await self.since_s()
        import grpc.aio

        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", LONGEST_ANSWER))
        async with grpc.aio.insecure_channel(f"unix:{self._socket_path}", options=options) as channel:
            ask = channel.unary_unary(
                f"/v1.PodResourcesLister/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=answer.FromString,
            )
            try:
                return await ask(request, timeout=CALL_S)
            except grpc.aio.AioRpcError as error:
                raise HostFailure(
                    f"the kubelet's pod resources at {self._socket_path}: {error.code().name}: {error.details()}"
                ) from error


def read_checkpoint(path: Path) -> tuple[CheckpointEntry, ...]:
    """``kubelet_internal_checkpoint`` of the kubelet's directory of device plugins; empty where there is none.

    ``HostFailure`` where it cannot be understood. Its checksum is the kubelet's own business (it is over a Go value's
    printed form); the file is replaced by rename, so it is whole.
    """
    try:
        document = json.loads(path.read_bytes())
        entries = document["Data"]["PodDeviceEntries"] or []
        return tuple(
            CheckpointEntry(
                e["PodUID"],
                e["ContainerName"],
                e["ResourceName"],
                _ids(e["DeviceIDs"]),
                b64decode(e.get("AllocResp") or ""),
            )
            for e in entries
        )
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HostFailure(f"the kubelet's checkpoint {path} cannot be read: {error!r}") from error


def remembered_pods(resource: str, plugins_dir: Path) -> frozenset[str]:
    """The uids of pods with devices of ``resource`` that the kubelet is not done with. ``HostFailure`` as above.

    An entry of the checkpoint goes when the next pod is given something, a pod's directory when its containers have
    ended and its volumes are unmounted: it takes both. None where the pods' directories are not to be seen here (a
    DaemonSet does not mount them, for the pods' secrets are in them): entries alone may be of pods long gone.
    """
    if not _pods_of(plugins_dir).is_dir():
        return frozenset()
    return frozenset(entry.pod_uid for entry in remembered(plugins_dir) if entry.resource == resource)


def _ids(value: object) -> tuple[str, ...]:
    """By NUMA node since Kubernetes 1.20, a plain list before."""
    if isinstance(value, dict):
        return tuple(entry for of_node in value.values() for entry in of_node or ())
    return tuple(value) if isinstance(value, list) else ()


def remembered(plugins_dir: Path) -> tuple[CheckpointEntry, ...]:
    """Of the checkpoint, what belongs to pods that the kubelet still has a directory of: it forgets others late."""
    pods = _pods_of(plugins_dir)
    entries = read_checkpoint(plugins_dir / CHECKPOINT)
    return tuple(entry for entry in entries if (pods / entry.pod_uid).is_dir() or not pods.is_dir())


def _pods_of(plugins_dir: Path) -> Path:
    return plugins_dir.parent / "pods"
