"""The API as amdvgpuctl uses it: one blocking HTTP request over the unix socket at a time.

Owns the connection, the translation of what can go wrong into three errors, and strict decoding into the shapes of
:mod:`amdvgpud.core.wire`. The standard library's ``http.client`` over a unix socket rather than an asynchronous
client: a command makes one to three requests, and the asynchronous one costs more to import than all of them take.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NoReturn, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from amdvgpud.core import wire

DEFAULT_SOCKET: Final = "/run/amdvgpud/api.sock"
_TIMEOUT_S: Final = 30.0
"""For one answer. A grant takes milliseconds; a daemon that rescans 64 partitions takes a second. Guessed, generous."""

PATIENCE_S: Final = 10.0
"""A driver clears up within seconds after the last user of a whole GPU; pods are given as long."""
_AGAIN_S: Final = 0.5

_T = TypeVar("_T")
_JSON: Final = "application/json"


class ClientError(Exception):
    """Base of what can go wrong between here and the daemon. ``str(error)`` is one whole sentence for people."""


class Refused(ClientError):
    """The daemon answered no. ``problem`` is its own reason, as it gave it."""

    def __init__(self, problem: wire.Problem) -> None:
        super().__init__(problem.detail or problem.title)
        self.problem = problem


class NotPermitted(ClientError):
    """This user may not use the socket, or may read but not change things."""


class NotReachable(ClientError):
    """Nobody answers at the socket, or what answers does not speak this API."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """One daemon, by the path of its socket. Each call is a connection of its own: nothing to close, nothing stale."""

    def __init__(self, socket_path: str = DEFAULT_SOCKET, *, patience_s: float = PATIENCE_S) -> None:
        """``patience_s``: how long a change is tried again that the daemon holds back for the moment only."""
        self.socket_path = socket_path
        self._patience_s = patience_s

    def get(self, path: str, shape: type[_T], **query: str) -> tuple[_T, bytes]:
        """(the answer as ``shape``, the answer as the bytes that came): ``-o json`` prints what the API said."""
        return self._decoded(self._answer("GET", path, None, query), shape)

    def change(
        self,
        method: str,
        path: str,
        shape: type[_T],
        body: msgspec.Struct | None = None,
        headers: Mapping[str, str] | None = None,
        **query: str,
    ) -> tuple[_T, bytes]:
        """As :meth:`get`, for a request that changes something."""
        return self._decoded(self._answer(method, path, body, query, headers), shape)

    def content(self, path: str, **query: str) -> bytes:
        """The answer to a GET as it came, whatever it is: for what is kept or passed on, not understood."""
        return self._answer("GET", path, None, query)

    def delete(self, path: str, **query: str) -> None:
        self._answer("DELETE", path, None, query)

    def events(self, last_id: int | None = None) -> Iterator[tuple[str, bytes]]:
        """(event name, JSON) of each event after ``last_id`` (None: from now on), until the daemon closes the stream.

        Comments, which keep the connection alive, are left out. No timeout: an idle machine has nothing to tell.
        """
        headers = {"Accept": "text/event-stream"}
        if last_id is not None:
            headers["Last-Event-ID"] = str(last_id)
        response = self._open("GET", "/v1/events", None, {}, headers, timeout_s=None)
        with response:
            if response.status != 200:
                self._raise(response.status, response.read())
            yield from _sse(response)

    def _answer(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None,
        query: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        give_up_s = time.monotonic() + self._patience_s
        while True:
            response = self._open(method, path, body, query, {"Accept": _JSON, **(headers or {})}, _TIMEOUT_S)
            try:
                with response:
                    content = response.read()
            except (OSError, http.client.HTTPException) as e:
                told = e or type(e).__name__
                raise NotReachable(f"the daemon at {self.socket_path} broke off its answer: {told}") from e
            if response.status < 300:
                return content
            if response.status != 409 or response.headers["Retry-After"] is None or time.monotonic() >= give_up_s:
                self._raise(response.status, content)
            time.sleep(_AGAIN_S)

    def _open(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        timeout_s: float | None,
    ) -> http.client.HTTPResponse:
        sent = {**headers, "Connection": "close"}
        content = None
        if body is not None:
            content = msgspec.json.encode(body)
            sent["Content-Type"] = "application/merge-patch+json" if method == "PATCH" else _JSON
        connection = _UnixConnection(self.socket_path, timeout_s)
        try:
            connection.request(method, path + ("?" + urlencode(query) if query else ""), content, sent)
            return connection.getresponse()
        except PermissionError as e:
            raise NotPermitted(
                f"{self.socket_path}: permission denied. Root and members of the group 'amdvgpu' may use the daemon: "
                "usermod -aG amdvgpu USER, then log in anew"
            ) from e
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as e:
            raise NotReachable(
                f"no daemon answers at {self.socket_path}. Start it by 'systemctl start amdvgpud' (or 'amdvgpud'), "
                "or name its socket by --socket or AMDVGPU_SOCKET"
            ) from e
        except TimeoutError as e:
            raise NotReachable(f"the daemon at {self.socket_path} did not answer within {timeout_s:g} s") from e
        except (OSError, http.client.HTTPException) as e:
            raise NotReachable(f"talking to {self.socket_path} failed: {e or type(e).__name__}") from e
        finally:
            # With "Connection: close" the answer holds the socket by itself; closing here only drops ours.
            connection.close()

    def _decoded(self, content: bytes, shape: type[_T]) -> tuple[_T, bytes]:
        try:
            return msgspec.json.decode(content, type=shape), content
        except msgspec.DecodeError as e:
            raise NotReachable(
                f"what answers at {self.socket_path} does not speak this API ({e}): "
                "are amdvgpuctl and amdvgpud of the same version?"
            ) from e

    def _raise(self, status: int, content: bytes) -> NoReturn:
        try:
            problem = msgspec.json.decode(content, type=wire.Problem)
        except msgspec.DecodeError:
            problem = wire.Problem(
                type="about:blank", title="refused", status=status, detail=f"HTTP status {status}", code="internal"
            )
        if status in (401, 403):
            raise NotPermitted(problem.detail or problem.title)
        raise Refused(problem)


def _sse(lines: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """Server-sent events (WHATWG HTML, section 9.2.6) as far as this API uses them: event, data, comments."""
    name, data = "message", list[bytes]()
    for raw in lines:
        line = raw.rstrip(b"\r\n")
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value.decode()
        elif field == b"data":
            data.append(value)
        elif not line and data:
            yield name, b"\n".join(data)
            name, data = "message", []


def part(text: str) -> str:
    """``text`` as one segment of a path: a partition id has a slash in it."""
    return quote(text, safe="")
