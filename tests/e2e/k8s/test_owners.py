"""A resource name that another device plugin has, at the real kubelet: not taken, whatever the other one looks like."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import grpc
import grpc.aio
import pytest

from amdvgpud.serve.pb import deviceplugin_pb2 as pb
from tests.e2e.conftest import BIN
from tests.e2e.k8s.api import eventually
from tests.e2e.k8s.cluster import Cluster, Program, daemon

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

GPU: Final = "amd.com/gpu"
WHOLE: Final = ("--simulate", "2*mi300x", "--kubelet-mode", "whole", "--kubelet-delivery", "nodes")


@contextlib.asynccontextmanager
async def a_stranger(cluster: Cluster, ids: Sequence[str]) -> AsyncIterator[None]:
    """A plugin of amd.com/gpu that has ``ids``, and a socket whose name says nothing."""
    folder = cluster.corner.path("/var/lib/kubelet/device-plugins")
    over = asyncio.Event()

    async def options(request: bytes, context: Any) -> bytes:
        return b""

    async def devices(request: bytes, context: Any) -> AsyncIterator[bytes]:
        answer = pb.ListAndWatchResponse(devices=[pb.Device(ID=each, health="Healthy") for each in ids])
        yield answer.SerializeToString()
        await over.wait()

    server = grpc.aio.server()
    methods: dict[str, Any] = {
        "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(options),
        "ListAndWatch": grpc.unary_stream_rpc_method_handler(devices),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", methods),))
    server.add_insecure_port(f"unix:{folder}/stranger.sock")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{folder}/kubelet.sock") as channel:
        register: Any = channel.unary_unary(
            "/v1beta1.Registration/Register", request_serializer=pb.RegisterRequest.SerializeToString
        )
        await register(pb.RegisterRequest(version="v1beta1", endpoint="stranger.sock", resource_name=GPU), timeout=10)
    try:
        yield
    finally:
        over.set()
        await server.stop(0)


async def until(what: str, look: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(eventually, what, look)


def offers(cluster: Cluster, count: int) -> Callable[[], bool]:
    return lambda: (cluster.allocatable(GPU) or 0) == count


def says(program: Program, words: str) -> Callable[[], bool]:
    return lambda: words in program.log.read_text()


async def test_a_plugin_with_our_ids_and_a_socket_that_says_nothing_keeps_the_name(cluster: Cluster) -> None:
    with daemon(cluster, *WHOLE) as ours:
        await until("two GPUs", offers(cluster, 2))
        found = cluster.corner.run(str(BIN / "amdvgpuctl"), "gpu", "list", "--output", "json")
        ids = [f"{gpu['id']}-0" for gpu in json.loads(found.output)["gpus"]]
        assert len(ids) == 2
    await until("no GPU", offers(cluster, 0))
    async with a_stranger(cluster, ids[:1]):
        await until("the stranger's GPU", offers(cluster, 1))
        with daemon(cluster, *WHOLE) as ours:
            told = f"the kubelet has 1 devices of {GPU} that this daemon has not registered ({ids[0]})"
            await until("a refusal", says(ours, told))
            assert not says(ours, f"{GPU}: registered")()
    await until("no GPU", offers(cluster, 0))


async def test_a_daemon_that_was_killed_has_its_name_again_without_a_word(cluster: Cluster) -> None:
    """The kubelet keeps the devices of a plugin that is gone for five minutes, and its count in the API too."""
    for count in (1, 2):
        simulated = f"{count}*mi300x"
        with daemon(cluster, *WHOLE, "--simulate", simulated) as ours:
            await until(f"{count} GPUs", offers(cluster, count))
            assert not says(ours, "is not registered")()
            assert ours._running is not None
            ours._running.kill()
            await asyncio.to_thread(ours._running.wait)
    await until("no GPU", offers(cluster, 0))
