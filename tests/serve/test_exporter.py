"""AMD's metrics exporter as a source of health: a real gRPC server that speaks as it does."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc.aio
import pytest

from amdvgpud.core.errors import HostFailure
from amdvgpud.core.health import Condition, Finding, Source
from amdvgpud.core.model import Inventory
from amdvgpud.ports import Examination
from amdvgpud.serve.exporter import METHODS, ExporterHealth
from amdvgpud.serve.pb import exporter_pb2 as pb
from tests.fakes import an_inventory

INVENTORY = an_inventory()
FIRST, SECOND = (gpu.pci_address for gpu in INVENTORY.gpus)


@contextlib.asynccontextmanager
async def exporter(method: str, states: Sequence[tuple[str, str]] | None) -> AsyncIterator[ExporterHealth]:
    """Serves ``method``; ``states`` (device, health) None: it fails."""

    async def answer(request: bytes, context: grpc.aio.ServicerContext[bytes, pb.GpuStates]) -> pb.GpuStates:
        assert request == b""
        if states is None:
            await context.abort(grpc.StatusCode.INTERNAL, "no agent")
        return pb.GpuStates(states=[pb.GpuState(device=device, health=health) for device, health in states or ()])

    service, name = method[1:].split("/")
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(
        answer, request_deserializer=lambda content: content, response_serializer=pb.GpuStates.SerializeToString
    )
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {name: handler})])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "exporter.sock"
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        try:
            yield ExporterHealth(path)
        finally:
            await server.stop(None)


@pytest.mark.parametrize("method", METHODS)
async def test_a_gpu_that_it_calls_unhealthy_is(method: str) -> None:
    async with exporter(method, [(FIRST, "healthy"), (SECOND.upper(), "Unhealthy")]) as check:
        assert await check.examine(INVENTORY) == Examination(
            (
                Finding(
                    INVENTORY.gpus[1].id,
                    Source.EXPORTER,
                    Condition.UNHEALTHY,
                    "AMD's metrics exporter calls it unhealthy",
                ),
            )
        )


@pytest.mark.parametrize("word", ["healthy", "unknown", "", "warning", "not unhealthy"])
async def test_no_other_word_counts_nor_a_gpu_that_is_not_here(word: str) -> None:
    async with exporter(METHODS[0], [(FIRST, word), ("0000:99:00.0", "unhealthy"), ("", "unhealthy")]) as check:
        assert await check.examine(INVENTORY) == Examination()


async def test_one_that_fails_is_said_and_finds_nothing() -> None:
    async with exporter(METHODS[0], None) as check:
        with pytest.raises(HostFailure, match=r"the exporter at .*: INTERNAL: no agent"):
            await check.examine(INVENTORY)


async def test_one_that_speaks_another_language_is_said() -> None:
    async with exporter("/another.Service/List", []) as check:
        with pytest.raises(HostFailure, match="UNIMPLEMENTED"):
            await check.examine(INVENTORY)


async def test_without_a_socket_there_is_no_exporter(tmp_path: Path) -> None:
    assert await ExporterHealth(tmp_path / "none.sock").examine(INVENTORY) is None
    (tmp_path / "file").touch()
    assert await ExporterHealth(tmp_path / "file").examine(INVENTORY) is None
    assert await ExporterHealth(tmp_path / "none.sock").examine(Inventory()) is None
