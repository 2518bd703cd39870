"""What AMD's metrics exporter says of the GPUs, if one runs here: an optional health check.

Its word counts only where it is ``unhealthy``: other words have changed from release to release, and a GPU that it does
not know is not one that is ill. It is asked over a connection of its own each time, since it may come and go.

Sources: ROCm/device-metrics-exporter (socket, service, fields); its .proto file and its server disagree on the name of
the package, so both are tried.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from amdvgpud.core.errors import HostFailure
from amdvgpud.core.health import Condition, Finding, Source
from amdvgpud.core.model import Inventory
from amdvgpud.ports import Examination

METHODS: Final = ("/metricssvc.MetricsService/List", "/gpumetricssvc.MetricsService/List")
CALL_S: Final = 5.0


class ExporterHealth:
    """A :class:`amdvgpud.ports.HealthCheck`."""

    name: Final = "exporter"

    def __init__(self, socket_path: Path, *, call_s: float = CALL_S) -> None:
        self._socket_path = socket_path
        self._call_s = call_s

    async def examine(self, inventory: Inventory) -> Examination | None:
        if not inventory.gpus or not await asyncio.to_thread(self._socket_path.is_socket):
            return None
        ill = {
            state.device.strip().lower()
            for state in (await self._list()).states
            if state.health.strip().lower() == "unhealthy"
        }
        reason = "AMD's metrics exporter calls it unhealthy"
        return Examination(
            tuple(
                Finding(gpu.id, Source.EXPORTER, Condition.UNHEALTHY, reason)
                for gpu in inventory.gpus
                if gpu.pci_address in ill
            )
        )

    async def _list(self) -> Any:
        try:
            import grpc.aio

            from amdvgpud.serve.pb import exporter_pb2 as pb
        except ImportError as error:
            raise HostFailure(
                f"there is an exporter at {self._socket_path}, and asking it takes grpcio and protobuf, which are not "
                f"installed ({error}): install them, or set health.exporter_socket to ''"
            ) from error
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(f"unix:{self._socket_path}", options=options) as channel:
            for method in METHODS:
                ask: Any = channel.unary_unary(
                    method, request_serializer=lambda _: b"", response_deserializer=pb.GpuStates.FromString
                )
                try:
                    return await ask(None, timeout=self._call_s)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNIMPLEMENTED or method == METHODS[-1]:
                        raise HostFailure(
                            f"the exporter at {self._socket_path}: {error.code().name}: {error.details()}"
                        ) from error
        raise AssertionError(METHODS)
