"""The HTTP face: two doors, one way through them, and an end within seconds.

Owns the sockets (the unix socket's mode, group and succession; loopback TCP; sockets that systemd opened), who is let
through, strict decoding on the way in, ETag and problem details on the way out, and the counting of requests. Does not
own what the routes do (``endpoints.py``). No input may cause a 5xx: what nobody foresaw is logged and answered as one.

Known limits, from aiohttp: what is no HTTP at all gets its plain-text 400; there is no timeout for a slow header, so
connections are bounded by the process's open files only.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import ipaddress
import logging
import os
import secrets
import socket
import stat
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import HttpVersion11, web

from amdvgpud.core.delivery import Choice
from amdvgpud.core.errors import HostFailure, Invalid
from amdvgpud.guard import GuardView
from amdvgpud.node import Node
from amdvgpud.ports import CdiSpecs
from amdvgpud.serve import access, conditions, page, problem, routes
from amdvgpud.serve.access import Caller
from amdvgpud.serve.endpoints import ROUTES, About, Endpoints, Process
from amdvgpud.serve.metrics import Metrics
from amdvgpud.serve.routes import Call, Reply, Route
from amdvgpud.serve.streams import Watchers

log = logging.getLogger(__name__)

SHUTDOWN_S: Final = 2.0
"""For requests that are being answered when the daemon stops; streams and waits end at once. The whole stop has 5 s,
and of those the interpreter's own end takes 0.3 s, on a busy machine 2 s."""

_BACKLOG: Final = 128
_METHODS: Final = frozenset({"GET", "PUT", "PATCH", "POST", "DELETE", "HEAD", "OPTIONS"})
_SECRET_WORDS: Final = ("token", "password", "secret")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """What an operator can set about the API."""

    socket_path: Path = Path("/run/amdvgpud/api.sock")
    socket_group: str = "amdvgpu"
    """Who may change things besides root; where the machine has no such group, root only."""
    socket_mode: int = 0o660
    tcp: tuple[str, int] | None = ("127.0.0.1", 9841)
    """A loopback address and a port (0: any free one); None: no TCP."""
    tcp_details: bool = False
    """Process lists and the texts in which people name their workloads are shown over TCP too."""
    token_file: Path = Path("/etc/amdvgpud/token")
    max_watchers: int = 64
    max_body_bytes: int = 64 * 1024
    body_timeout_s: float = 10.0
    max_wait_s: float = 60.0
    """The longest long poll."""
    keep_alive_s: float = 15.0
    """Between two comments on an event stream."""
    stall_s: float = 10.0
    """An event stream that has not been read for so long is dropped."""

    def __post_init__(self) -> None:
        if self.tcp is not None and not _is_loopback(self.tcp[0]):
            raise Invalid.field(
                "rest.tcp",
                f"{self.tcp[0]!r} is no loopback address: the API has no TLS and no accounts, so put a proxy in front "
                "of 127.0.0.1 to reach it from elsewhere",
            )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Api:
    """The API over one Node. Make it, open doors by ``serve_*``, and :meth:`close` it (twice does no harm)."""

    def __init__(
        self,
        node: Node,
        cdi: CdiSpecs,
        metrics: Metrics,
        settings: ApiSettings,
        *,
        version: str,
        run_dir: Path,
        process_of: Callable[[int], Process | None],
        cdi_kind: str = "amdvgpu.io/slice",
        simulated: str | None = None,
        config: Callable[[], Mapping[str, object]] = dict,
        reload: Callable[[], Awaitable[None]] | None = None,
        now_s: Callable[[], float] = time.time,
        new_name: Callable[[], str] = lambda: f"lease-{secrets.token_hex(4)}",
        preload: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        guard: Callable[[], GuardView] = GuardView,
        delivery: Callable[[], Choice | None] = lambda: None,
    ) -> None:
        """``cdi`` is asked only what it would write. ``process_of`` reads /proc: None where there is no such process.

        ``preload`` and ``environment`` are what a process in any slice of this machine needs besides the slice's own.
        ``guard`` is what the kernel says of who uses what. ``delivery`` is how pods get their slices, if a kubelet is
        served.
        ``config`` gives the settings to show; ``reload`` None: look at the machine again and reconcile.
        """
        self._settings = settings
        self._metrics = metrics
        self._watchers = Watchers(
            node, settings.max_watchers, keep_alive_s=settings.keep_alive_s, stall_s=settings.stall_s
        )
        self._replays = conditions.Replays(now_s)

        async def look_again() -> None:
            with metrics.reconcile():
                await node.rescan()

        about = About(
            version,
            run_dir,
            cdi_kind,
            simulated,
            lambda: _without_secrets(config()),
            preload,
            environment or {},
            delivery,
        )
        self._endpoints = Endpoints(
            node,
            cdi,
            metrics,
            self._watchers,
            about,
            process_of=process_of,
            reload=reload or look_again,
            new_name=new_name,
            max_wait_s=settings.max_wait_s,
            guard=guard,
        )
        self._runner: web.AppRunner | None = None
        self._socket: _SocketFile | None = None
        self._closed = False
        self._own_uid = os.geteuid()

    # -------------------------------------------------------------------------------------------------- lifetime

    def make_app(self) -> web.Application:
        """A fresh application with all routes; for tests, and for :meth:`serve_unix` and its kin."""
        app = web.Application(client_max_size=self._settings.max_body_bytes, middlewares=[self._outermost])
        for route in ROUTES:
            app.router.add_route(route.method, route.path, self._handler_of(route), expect_handler=_expect)
        app.router.add_get(page.PATH + "{name:[^/]*}", page.answer, expect_handler=_expect)
        return app

    async def serve_unix(self, path: Path | None = None, group: str | None = None, mode: int | None = None) -> None:
        """Open the unix socket (by default where the settings say).

        Whatever the umask, it has its mode and group before anybody can connect. A dead socket is replaced;
        ``HostFailure`` where a live one or something else is in the way, which is left alone.
        """
        where = path or self._settings.socket_path
        chosen = self._settings.socket_mode if mode is None else mode
        self._socket = _SocketFile.claim(where, group or self._settings.socket_group, chosen)
        await self.serve_socket(self._socket.listening)
        log.info("The API listens on %s.", where)

    async def serve_tcp(self, host: str | None = None, port: int | None = None) -> int:
        """Open loopback TCP (by default as the settings say); the port, which is another one if 0 was asked."""
        set_host, set_port = self._settings.tcp or ("127.0.0.1", 9841)
        host, port = host or set_host, set_port if port is None else port
        if not _is_loopback(host):
            raise Invalid.field("rest.tcp", f"{host!r} is no loopback address")
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, port))
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            raise HostFailure(
                f"the API cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; set rest.tcp to another "
                "address, or to '' for none"
            ) from error
        bound = int(sock.getsockname()[1])
        await self.serve_socket(sock)
        log.info("Reads and /metrics are served on http://%s:%d.", host, bound)
        return bound

    async def serve_socket(self, sock: socket.socket) -> None:
        """Serve on a socket that listens already (systemd's, for one). Its family decides what callers may do."""
        if self._runner is None:
            self._runner = web.AppRunner(
                self.make_app(), access_log=None, shutdown_timeout=SHUTDOWN_S, auto_decompress=False
            )
            await self._runner.setup()
        sock.setblocking(False)
        await web.SockSite(self._runner, sock, backlog=_BACKLOG).start()

    async def close(self) -> None:
        """Take no more, end streams and waits at once, let what is being answered finish (:data:`SHUTDOWN_S`)."""
        self._watchers.close()
        if self._closed:
            return
        self._closed = True
        if self._socket is not None:
            self._socket.remove()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._socket is not None:
            self._socket.release()

    # ------------------------------------------------------------------------------------------------- a request

    @web.middleware
    async def _outermost(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        began_s = time.perf_counter()
        try:
            self._check_host(request)
            response = await handler(request)
        except Exception as error:
            refusal = problem.refusal_of(error)
            if refusal is None:
                log.exception("%s %s failed for a reason that nobody foresaw.", request.method, request.path)
                refusal = problem.Refusal(500, "internal", "this is a fault of the daemon, its log says more")
            elif refusal.status >= 500:
                log.error("%s %s: %s", request.method, request.path, refusal.detail)
            response = problem.response_of(refusal)
        resource = request.match_info.route.resource
        waits = response.content_type == routes.EVENT_STREAM or "wait" in request.query
        self._metrics.request(
            request.method if request.method in _METHODS else "other",
            "none" if resource is None else resource.canonical,
            response.status,
            None if waits else time.perf_counter() - began_s,
        )
        if not response.prepared:
            response.headers.setdefault("Cache-Control", "no-cache")
            response.headers.setdefault("X-Content-Type-Options", "nosniff")
        return response

    def _handler_of(self, route: Route) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            caller = self._caller(request)
            _let_through(route, caller)
            call = Call(request, caller, request.match_info)
            query = routes.decode_query(request.query.items(), route.query)
            given: dict[str, Any] = {"query": query}
            content = b""
            if route.body is not None:
                content = await self._body(route, request)
                given["body"] = _decode_body(content, route.body)
            key = request.headers.get("Idempotency-Key")
            if key is None or "Idempotency-Key" not in route.request_headers or getattr(query, "dry_run", False):
                return _response(route, request, await route.handler(self._endpoints, call, **given))
            return await self._once(route, call, key, content, given)

        return handle

    async def _once(
        self, route: Route, call: Call, key: str, content: bytes, given: Mapping[str, Any]
    ) -> web.StreamResponse:
        """Do it, or answer as it was answered before."""
        who = "token" if call.caller.peer is None else f"uid {call.caller.uid}"
        asked = hashlib.sha256(f"{route.method} {call.request.path_qs}\n".encode("utf-8", "replace") + content).digest()
        kept = self._replays.begin(who, key, asked)
        if kept is not None:
            return web.Response(
                status=kept.status, body=kept.content, headers={**kept.headers, "Idempotency-Replayed": "true"}
            )
        try:
            response = _response(route, call.request, await route.handler(self._endpoints, call, **given))
            if isinstance(response, web.Response) and isinstance(response.body, bytes):
                headers = {k: v for k, v in response.headers.items() if k in ("Content-Type", "ETag", "Location")}
                kept = conditions.Kept(asked, response.status, response.body, headers, self._replays.until_s())
            return response
        finally:
            self._replays.end(who, key, kept)

    async def _body(self, route: Route, request: web.Request) -> bytes:
        takes = (routes.MERGE_PATCH, routes.JSON) if route.method == "PATCH" else (routes.JSON,)
        given = request.headers.get("Content-Type", "")
        if given.partition(";")[0].strip().lower() not in takes:
            raise problem.Refusal(
                415,
                "unsupported-media-type",
                f"Content-Type is {given or 'not given'}: send {' or '.join(takes)}",
                headers={"Accept-Patch" if route.method == "PATCH" else "Accept": ", ".join(takes)},
            )
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise problem.Refusal(415, "unsupported-media-type", "Content-Encoding: send the body as it is")
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                return await request.read()
        except TimeoutError as error:
            raise problem.Refusal(
                408, "request-timeout", f"the body did not come within {self._settings.body_timeout_s:g} s"
            ) from error

    def _check_host(self, request: web.Request) -> None:
        sock = _socket_of(request)
        if (sock is None or sock.family != socket.AF_UNIX) and not access.host_is_local(request.headers.get("Host")):
            raise problem.Refusal(
                403,
                "foreign-host",
                "over TCP the Host header has to be localhost, 127.0.0.1 or [::1] (with the port): "
                "pages of other sites must not reach this API through a rebound name",
            )

    def _caller(self, request: web.Request) -> Caller:
        sock = _socket_of(request)
        if sock is not None and sock.family == socket.AF_UNIX:
            return access.unix_caller(sock, self._settings.socket_group, self._own_uid)
        return access.tcp_caller(
            request.headers.get("Authorization"), self._settings.token_file, self._settings.tcp_details
        )


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """aiohttp asks this before any middleware, so that its own refusal would come as plain text."""
    if request.version < HttpVersion11:
        return None  # RFC 9110, 10.1.1: an older client's expectation is looked past
    if request.headers.get("Expect", "").lower() != "100-continue":
        return problem.response_of(problem.Refusal(417, "expectation-failed", "Expect: only 100-continue is known"))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # as aiohttp does: the interim answer is none yet
    return None


def _socket_of(request: web.Request) -> access.Socket | None:
    return None if request.transport is None else request.transport.get_extra_info("socket")


def _let_through(route: Route, caller: Caller) -> None:
    if route.who == "writers" and not caller.may_write:
        status, code = (401, "token-needed") if caller.token_missing else (403, "forbidden")
        headers = {"WWW-Authenticate": 'Bearer realm="amdvgpud"'} if status == 401 else {}
        raise problem.Refusal(status, code, caller.refusal, headers=headers)
    if route.who == "details" and not caller.may_see_details:
        raise problem.Refusal(
            403, "forbidden", "this is shown over the unix socket; over TCP only with the token or rest.tcp_details"
        )


def _decode_body(content: bytes, shape: type[msgspec.Struct]) -> msgspec.Struct:
    try:
        return msgspec.json.decode(content, type=shape)
    except msgspec.ValidationError as error:
        raise problem.invalid(problem.bad_fields(error, body=True), body=True) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise problem.Refusal(400, "malformed", f"the body is no JSON: {error}") from error


def _response(route: Route, request: web.Request, reply: Reply | web.StreamResponse) -> web.StreamResponse:
    if isinstance(reply, web.StreamResponse):
        return reply
    if reply.value is None:
        return web.Response(status=reply.status, headers=reply.headers)
    content = msgspec.json.encode(reply.value)
    headers = dict(reply.headers)
    if reply.revision is not None:
        tag = conditions.etag(reply.revision, content)
        headers["ETag"] = tag
        if route.method == "GET" and conditions.not_modified(request.headers, tag):
            return web.Response(status=304, headers=headers)
    return web.Response(status=reply.status, body=content, content_type=routes.JSON, headers=headers)


def _without_secrets(config: Mapping[str, object]) -> dict[str, object]:
    """Settings as they may be shown. Names of files that hold a secret are no secret."""
    return {
        key: "(hidden)" if any(key.lower().endswith(word) for word in _SECRET_WORDS) else value
        for key, value in config.items()
    }


# ------------------------------------------------------------------------------------------------- the socket file


@dataclass(frozen=True, slots=True)
class _SocketFile:
    """A listening unix socket that is at its path with the right mode and group, and the lock that says it is ours."""

    path: Path
    listening: socket.socket
    lock: int
    inode: int

    @classmethod
    def claim(cls, path: Path, group: str, mode: int) -> _SocketFile:
        """The lock first: of two daemons that start at once, the second must not unlink the first one's socket."""
        try:
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HostFailure(f"the API socket cannot be made in {path.parent}: {error}") from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise HostFailure(_taken(path)) from error
            _check_free(path)
            return cls._placed(path, group, mode, lock)
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def _placed(cls, path: Path, group: str, mode: int, lock: int) -> _SocketFile:
        # Made under another name and renamed: nobody ever meets it with another mode, another group, or deaf.
        aside = path.with_name(f".{path.name}.new")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            aside.unlink(missing_ok=True)
            sock.bind(str(aside))
            gid = access.group_id(group)
            if gid is None:
                # Who connects through the owner's group may read; changes are decided by credentials, so root's alone.
                log.warning("This machine has no group %r: only root may change things over the API socket.", group)
            else:
                os.chown(aside, -1, gid)
            aside.chmod(mode)
            sock.listen(_BACKLOG)
            inode = aside.stat().st_ino
            aside.rename(path)
        except OSError as error:
            sock.close()
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            why = (
                f"the group {group!r} cannot be set ({error}); run as root, or set rest.socket_group to one of yours"
                if error.errno == errno.EPERM
                else str(error)
            )
            raise HostFailure(f"the API socket {path} cannot be made: {why}") from error
        return cls(path, sock, lock, inode)

    def remove(self) -> None:
        """Take the name away, unless it is another one's by now."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self.inode:
                self.path.unlink()

    def release(self) -> None:
        os.close(self.lock)


def _check_free(path: Path) -> None:
    """``HostFailure`` where something at ``path`` may not be replaced. A socket that nobody answers may."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise HostFailure(f"the API socket {path} cannot be made: {error}") from error
    if not stat.S_ISSOCK(found.st_mode):
        raise HostFailure(f"{path} is there and is no socket: move it away, or set another rest.socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            log.info("%s was left by a daemon that is gone; it is replaced.", path)
            return
        except OSError as error:
            # EAGAIN: its backlog is full, so it lives. Anything else: not known to be dead, so not replaced.
            raise HostFailure(f"{_taken(path)} ({error})") from error
    raise HostFailure(_taken(path))


def _taken(path: Path) -> str:
    return f"another daemon answers at {path}: stop it (systemctl stop amdvgpud), or give this one another run_dir"
