"""Stands between the kubelet and a device plugin and keeps what they say to each other, byte by byte.

The plugin registers in a directory of ours, whose kubelet.sock is this; its socket is offered to the real kubelet from
here. Nothing is read but the endpoint's name in Register, and nothing is changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from amdvgpud.serve.pb import deviceplugin_pb2 as pb

_REGISTER: Final = "/v1beta1.Registration/Register"
_STREAM: Final = "/v1beta1.DevicePlugin/ListAndWatch"


@dataclass(frozen=True)
class Said:
    method: str
    request: bytes
    answers: list[bytes] = field(default_factory=list)
    """One, or those of the stream so far; none where the call failed."""


@dataclass
class Recorder:
    plugin_dir: Path
    """Where the plugin looks for a kubelet."""
    kubelet_dir: Path
    said: list[Said] = field(default_factory=list)
    _open: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def __aenter__(self) -> Recorder:
        self.plugin_dir.mkdir(exist_ok=True)
        await self._serve(self.plugin_dir / "kubelet.sock", self.kubelet_dir / "kubelet.sock")
        return self

    async def __aexit__(self, *why: object) -> None:
        await self._open.aclose()

    async def _serve(self, here: Path, there: Path) -> None:
        channel = grpc.aio.insecure_channel(f"unix:{there}")
        self._open.push_async_callback(channel.close)
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Forward(self, channel),))
        server.add_insecure_port(f"unix:{here}")
        await server.start()
        self._open.push_async_callback(server.stop, 0)

    async def offer(self, endpoint: str) -> None:
        """The plugin's socket, under its own name in the kubelet's directory."""
        await self._serve(self.kubelet_dir / endpoint, self.plugin_dir / endpoint)


class _Forward(grpc.GenericRpcHandler):
    def __init__(self, recorder: Recorder, channel: Any) -> None:
        self._recorder = recorder
        self._channel = channel

    def service(self, handler_call_details: Any) -> Any:
        method: str = handler_call_details.method

        async def one(request: bytes, context: Any) -> bytes:
            if method == _REGISTER:
                await self._recorder.offer(pb.RegisterRequest.FromString(request).endpoint)
            said = Said(method, request)
            self._recorder.said.append(said)
            try:
                answer: bytes = await self._channel.unary_unary(method)(request)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())
                raise
            said.answers.append(answer)
            return answer

        async def many(request: bytes, context: Any) -> AsyncIterator[bytes]:
            said = Said(method, request)
            self._recorder.said.append(said)
            answer: bytes
            async for answer in self._channel.unary_stream(method)(request):
                said.answers.append(answer)
                yield answer

        if method == _STREAM:
            return grpc.unary_stream_rpc_method_handler(many)
        return grpc.unary_unary_rpc_method_handler(one)
