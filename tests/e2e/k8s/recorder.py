"""Stands between the daemon and those that it speaks with, and keeps what they say to each other, byte by byte.

Recorder, between the kubelet and a device plugin: the plugin registers in a directory of ours, whose kubelet.sock is
this; its socket is offered to the real kubelet from here. Nothing is read but the endpoint's name in Register, and
nothing is changed.

ApiRecorder, between the daemon and the API server: plain HTTP on the loopback on this side. Of the objects that come
back only what the daemon reads is kept: the rest is a machine's own.
"""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import grpc
import grpc.aio
from aiohttp import web

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
    told: Callable[[Said, bool], None] = lambda said, over: None
    """Called when a call of one answer begins, and when it is over."""
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
            self._recorder.told(said, False)
            try:
                answer: bytes = await self._channel.unary_unary(method)(request)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())
                raise
            finally:
                self._recorder.told(said, True)
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


Call = dict[str, Any]
"""``method``, ``path`` with its query, ``sent``, ``status`` and ``answer``, the last cut down."""


@dataclass
class ApiRecorder:
    server: str
    ca: Path
    calls: list[Call] = field(default_factory=list)
    """In the order in which they were answered; without watches."""
    url: str = ""
    _open: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def __aenter__(self) -> ApiRecorder:
        tls = ssl.create_default_context(cafile=str(self.ca))
        self._session = await self._open.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls))
        )
        app = web.Application(client_max_size=4 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        self._open.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *why: object) -> None:
        await self._open.aclose()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {key: request.headers[key] for key in ("Authorization", "Content-Type") if key in request.headers}
        url = self.server + request.path_qs
        async with self._session.request(
            request.method, url, data=body or None, headers=headers, timeout=aiohttp.ClientTimeout(total=None)
        ) as answer:
            out = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await out.prepare(request)
            kept = bytearray()
            async for chunk in answer.content.iter_any():
                kept += b"" if "watch" in request.query else chunk
                await out.write(chunk)
            if "watch" not in request.query:
                call = {"method": request.method, "path": request.path_qs, "sent": body.decode()}
                self.calls.append(call | {"status": answer.status, "answer": cut(json.loads(kept))})
        return out


_META: Final = ("name", "namespace", "uid", "resourceVersion", "annotations", "deletionTimestamp")
_SPEC: Final = ("nodeName", "schedulerName")
_STATUS: Final = ("phase", "initContainerStatuses")
_CONTAINER: Final = ("name", "image", "resources", "restartPolicy")


def cut(found: dict[str, Any]) -> dict[str, Any]:
    """A Node, a Pod or a list of Pods without what the daemon does not read; a Status as it is; nothing of an Event."""
    if found.get("kind") == "Status":
        return found
    if found.get("kind") == "Event":
        return {}
    if "items" in found:
        version = found["metadata"]["resourceVersion"]
        return {"metadata": {"resourceVersion": version}, "items": [cut(each) for each in found["items"]]}
    kept: dict[str, Any] = {"metadata": _of(found["metadata"], _META), "status": _of(found["status"], _STATUS)}
    if "containers" in found.get("spec", {}):
        kept["spec"] = _of(found["spec"], _SPEC)
        for group in ("initContainers", "containers"):
            if group in found["spec"]:
                kept["spec"][group] = [_of(each, _CONTAINER) for each in found["spec"][group]]
    return kept


def _of(found: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: found[key] for key in keys if key in found}
