"""Stand-ins for amdvgpuctl's tests: a daemon that says what it is told to, and the values it says."""

from __future__ import annotations

import socketserver
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from subprocess import Popen

import click.testing
import msgspec

from amdvgpud.core import wire
from tests.daemons import a_daemon, wait_for_api

GPU_ID = "GPU-0123456789abcdef"
PARTITION = f"{GPU_ID}/0"
GIB = 1 << 30


@dataclass
class Asked:
    method: str
    path: str
    """With its query."""
    body: object
    headers: Mapping[str, str]


@dataclass
class FakeDaemon:
    """Answers by (method, path with query); what it was asked stays in ``asked``."""

    socket: str
    answers: dict[tuple[str, str], tuple[int, bytes]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def says(self, method: str, path: str, value: object, status: int = 200) -> None:
        self.answers[method, path] = status, value if isinstance(value, bytes) else msgspec.json.encode(value)

    def refuses(self, method: str, path: str, status: int, detail: str, errors: list[dict[str, str]]) -> None:
        problem = wire.Problem(
            type="about:blank", title="No", status=status, detail=detail, code="invalid", errors=errors
        )
        self.says(method, path, problem, status)

    @property
    def requests(self) -> list[tuple[str, str]]:
        return [(a.method, a.path) for a in self.asked]


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    daemon: FakeDaemon

    def get_request(self) -> tuple[object, object]:  # type: ignore[override] # BaseHTTPRequestHandler wants an address
        connection, _ = super().get_request()
        return connection, ("local", 0)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def _answer(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        daemon = self.server.daemon
        body = msgspec.json.decode(raw) if raw else None
        daemon.asked.append(Asked(self.command, self.path, body, dict(self.headers)))
        unknown = wire.Problem(type="about:blank", title="Not found", status=404, detail=self.path, code="not-found")
        status, content = daemon.answers.get((self.command, self.path), (404, msgspec.json.encode(unknown)))
        self.send_response(status)
        stream = self.headers.get("Accept") == "text/event-stream"
        self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_PATCH = do_POST = do_DELETE = _answer  # noqa: N815 (http.server's names)

    def log_message(self, *_: object) -> None:
        pass


@dataclass
class Granted:
    """A slice that the fake daemon grants: its lease, and its ledger as the stand-in gate writes it."""

    lease: wire.LeaseView
    ledger: Path
    options: tuple[str, ...]

    @property
    def loads(self) -> int:
        return self.ledger.read_text().count("loaded")


def share() -> wire.ShareView:
    return wire.ShareView(
        partition=PARTITION,
        gpu=GPU_ID,
        vram_bytes=4 * GIB,
        used_bytes=GIB,
        asked_cus=76,
        granted_cus=64,
        effective_cus=64,
        cus="0-63",
        shared=False,
    )


def slice_view(name: str = "alice") -> wire.SliceView:
    return wire.SliceView(
        name=name,
        state="held",
        lost_reason=None,
        enforced_by="gate",
        cdi_device=f"amdvgpu.io/slice={name}",
        compute="25%",
        policy="balanced",
        shares=[share()],
        lease="lease-1",
        processes=2,
        created_s=1_700_000_000.0,
        revision=7,
        gate_seen=True,
        owner_uid=1000,
    )


Ctl = Callable[..., click.testing.Result]
Start = Callable[..., "Popen[str]"]


def served(home: Path, *options: str) -> Iterator[str]:
    """The socket of a real daemon that lives in ``home`` while the caller's fixture does; it must end with 0."""
    pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with (
        (home / "log").open("w") as log,
        a_daemon(home, "--tick-s=0.2", *options, stdout=log, **pipes) as daemon,
    ):
        wait_for_api(daemon)
        try:
            yield str(home / "run" / "api.sock")
        finally:
            daemon.terminate()
            _, rest = daemon.communicate(timeout=60)
            assert daemon.returncode == 0, rest
