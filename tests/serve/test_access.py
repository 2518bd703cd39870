"""Who may do what: the kernel's word on the unix socket, the token and the Host header on TCP."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amdvgpud.core.errors import HostFailure, Invalid
from amdvgpud.serve import access
from amdvgpud.serve.endpoints import Process
from amdvgpud.serve.rest import ApiSettings

SPEC = {"vram": "1GiB", "compute": "25%"}
TOKEN = "correct horse battery staple"  # noqa: S105 (a test's own)

AsUser = Callable[[int, int, list[int]], Any]


async def test_tcp_reads_and_changes_nothing_without_the_token(desk: Any) -> None:
    assert (await desk.ask("GET", "/v1/slices", tcp=True)).status == 200
    refused = await desk.ask("PUT", "/v1/slices/alice", SPEC, tcp=True)
    assert (refused.status, refused.json["code"]) == (401, "token-needed")
    assert refused.headers["WWW-Authenticate"] == 'Bearer realm="amdvgpud"'
    assert str(desk.token_file) in refused.json["detail"]
    assert desk.node.view().book.slices == {}


@pytest.mark.parametrize(
    ("content", "header", "status"),
    [
        (TOKEN, f"Bearer {TOKEN}", 201),
        (TOKEN + "\n", f"bearer {TOKEN}", 201),
        (TOKEN, f"Bearer {TOKEN}x", 401),
        (TOKEN, f"Basic {TOKEN}", 401),
        (TOKEN, "Bearer ", 401),
        ("", "Bearer ", 401),
        ("short", "Bearer short", 401),
        (None, "Bearer ", 401),
    ],
)
async def test_the_token_file_is_the_lock_of_tcp(desk: Any, content: str | None, header: str, status: int) -> None:
    if content is not None:
        desk.token_file.write_text(content)
    answer = await desk.ask("PUT", "/v1/slices/alice", SPEC, tcp=True, headers={"Authorization": header})
    assert answer.status == status


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("LOCALHOST:9841", True),
        ("127.0.0.1:9841", True),
        ("[::1]:9841", True),
        ("127.0.0.1.evil.example:9841", False),
        ("evil.example", False),
        ("localhost:", False),
        ("localhost@evil.example", False),
        ("", False),
        (None, False),
    ],
)
def test_only_these_hosts_are_this_machine(host: str | None, local: bool) -> None:
    assert access.host_is_local(host) is local


async def test_a_rebound_name_is_refused_on_tcp_and_no_matter_on_the_unix_socket(desk: Any) -> None:
    refused = await desk.ask("GET", "/v1/slices", tcp=True, headers={"Host": "evil.example"})
    assert (refused.status, refused.json["code"]) == (403, "foreign-host")
    assert (await desk.ask("GET", "/v1/slices", headers={"Host": "evil.example"})).status == 200


async def test_tcp_hides_processes_and_what_people_call_their_work(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", SPEC)
    await desk.ask("POST", "/v1/leases", {"slice": "alice", "holder": "the secret project"})
    assert (await desk.ask("GET", "/v1/slices/alice/processes", tcp=True)).status == 403
    assert (await desk.ask("GET", "/v1/slices/alice/processes")).status == 200
    for path in ("/v1/leases", "/v1/slices", "/metrics", "/v1/events?since=0"):
        json = {"Accept": "application/json"}
        shown = (await desk.ask("GET", path, headers=json)).text
        hidden = (await desk.ask("GET", path, headers=json, tcp=True)).text
        assert "the secret project" not in hidden, path
        assert ("the secret project" in shown) is (path != "/v1/slices"), path


async def test_details_over_tcp_are_a_setting_and_come_with_the_token(make_desk: Any) -> None:
    desk = await make_desk(settings={"tcp_details": True})
    await desk.ask("PUT", "/v1/slices/alice", SPEC)
    assert (await desk.ask("GET", "/v1/slices/alice/processes", tcp=True)).status == 200


async def test_the_token_shows_details_too(desk: Any) -> None:
    desk.token_file.write_text(TOKEN)
    await desk.ask("PUT", "/v1/slices/alice", SPEC)
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    assert (await desk.ask("GET", "/v1/slices/alice/processes", tcp=True, headers=bearer)).status == 200


@pytest.mark.root
@pytest.mark.parametrize(
    ("uid", "gid", "groups", "may_write"),
    [
        (0, 0, [], True),
        (1000, 1000, [], False),
        (1000, 1000, [7, 44], True),  # a supplementary group
        (1000, 44, [], True),  # the primary one
        (1000, 1000, list(range(1000, 1300)), False),  # more groups than can be read: none counts
    ],
)
def test_the_kernel_says_who_is_at_the_unix_socket(
    as_user: AsUser, monkeypatch: pytest.MonkeyPatch, uid: int, gid: int, groups: list[int], may_write: bool
) -> None:
    monkeypatch.setattr(access, "group_id", {"amdvgpu": 44}.get)
    with as_user(uid, gid, groups):
        ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        caller = access.unix_caller(ours, "amdvgpu")
    assert caller.peer is not None
    assert (caller.peer.uid, caller.may_write, caller.may_see_details) == (uid, may_write, True)
    assert may_write or "usermod -aG amdvgpu" in caller.refusal


@pytest.mark.root
def test_without_such_a_group_only_root_may_change_things(as_user: AsUser) -> None:
    with as_user(1000, 1000, []):
        ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert access.unix_caller(ours, "no-such-group-here").may_write is False


@pytest.mark.root
async def test_a_stranger_reads_over_the_unix_socket_and_changes_nothing(make_desk: Any, as_user: AsUser) -> None:
    desk = await make_desk(settings={"socket_mode": 0o666})
    with as_user(1000, 1000, []):
        status, _ = await _raw(desk, "GET", "/v1/slices", b"")
        assert status == 200
        status, text = await _raw(desk, "PUT", "/v1/slices/alice", b"{}")
        assert status == 403
        assert b"uid 1000 may read only" in text


@pytest.mark.root
async def test_a_member_of_the_group_owns_its_slice_and_may_name_its_own_processes_only(
    make_desk: Any, as_user: AsUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "group_id", {"amdvgpu": 44}.get)
    processes = {500: Process(1000, 42), 501: Process(1001, 43)}
    desk = await make_desk(processes=processes, settings={"socket_mode": 0o666})
    with as_user(1000, 1000, [44]):
        assert (await _raw(desk, "PUT", "/v1/slices/alice", b'{"vram": "1GiB"}'))[0] == 201
        assert [s.owner_uid for s in desk.node.view().book.slices.values()] == [1000]
        status, text = await _raw(desk, "POST", "/v1/leases", b'{"slice": "alice", "pid": 501}')
        assert (status, b"/pid" in text) == (403, True)
        assert (await _raw(desk, "POST", "/v1/leases", b'{"slice": "alice", "pid": 500}'))[0] == 201
    (lease,) = desk.node.view().book.leases.values()
    assert (lease.holder.pid, lease.holder.start_ticks) == (500, 42)


async def test_a_process_that_is_not_there_or_asked_for_over_tcp_is_refused_by_field(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", SPEC)
    missing = await desk.ask("POST", "/v1/leases", {"slice": "alice", "pid": 500})
    assert (missing.status, missing.json["errors"][0]["pointer"]) == (422, "/pid")
    desk.token_file.write_text(TOKEN)
    desk.processes[500] = Process(0, 1)
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    tcp = await desk.ask("POST", "/v1/leases", {"slice": "alice", "pid": 500}, tcp=True, headers=bearer)
    assert (tcp.status, tcp.json["errors"][0]["pointer"]) == (422, "/pid")
    assert desk.node.view().book.leases == {}


# -------------------------------------------------------------------------------------------------- the socket file


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
async def test_the_socket_has_its_mode_and_group_under_any_umask(
    make_desk: Any, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    monkeypatch.setattr(access, "group_id", {"amdvgpu": os.getegid()}.get)
    before = os.umask(umask)
    try:
        desk = await make_desk()
    finally:
        os.umask(before)
    found = (desk.run_dir / "api.sock").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, os.getegid())
    assert [p.name for p in desk.run_dir.iterdir() if p.name.endswith(".new")] == []


@pytest.mark.root
async def test_the_socket_belongs_to_the_group_before_anybody_can_connect(
    make_desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "group_id", {"amdvgpu": 44}.get)
    seen: list[tuple[int, int, bool]] = []
    listen = socket.socket.listen

    def watched(self: socket.socket, backlog: int) -> None:
        if self.family == socket.AF_UNIX and not seen:
            name = Path(self.getsockname())
            found = name.stat()
            seen.append((stat.S_IMODE(found.st_mode), found.st_gid, name.name == "api.sock"))
        listen(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", watched)
    await make_desk()
    assert seen == [(0o660, 44, False)]


async def test_a_dead_socket_is_replaced(run_dir: Path, make_desk: Any) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(run_dir / "api.sock"))
        dead.listen()
    desk = await make_desk()
    assert (await desk.ask("GET", "/healthz")).status == 200


async def test_a_second_daemon_fails_clearly_and_leaves_the_first_alone(desk: Any) -> None:
    second = desk.another_api()
    with pytest.raises(HostFailure, match=r"another daemon answers at .*api\.sock: stop it"):
        await second.serve_unix()
    await second.close()
    assert (await desk.ask("GET", "/healthz")).status == 200


async def test_a_daemon_whose_socket_somebody_removed_is_still_not_replaced(desk: Any) -> None:
    (desk.run_dir / "api.sock").unlink()
    with pytest.raises(HostFailure, match="another daemon answers"):
        await desk.another_api().serve_unix()


async def test_a_closed_api_leaves_what_has_taken_its_place_alone(desk: Any) -> None:
    (desk.run_dir / "api.sock").unlink()
    (desk.run_dir / "api.sock").write_text("somebody's")
    await desk.api.close()
    assert (desk.run_dir / "api.sock").read_text() == "somebody's"


async def test_a_live_socket_without_a_lock_is_left_alone_too(run_dir: Path, desk: Any) -> None:
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(run_dir / "other.sock"))
        live.listen()
        with pytest.raises(HostFailure, match="another daemon answers"):
            await desk.another_api().serve_unix(run_dir / "other.sock")
        assert (run_dir / "other.sock").is_socket()


async def test_what_is_no_socket_is_never_replaced(run_dir: Path, desk: Any) -> None:
    (run_dir / "file").write_text("somebody's")
    with pytest.raises(HostFailure, match="is no socket"):
        await desk.another_api().serve_unix(run_dir / "file")
    assert (run_dir / "file").read_text() == "somebody's"


async def test_a_closed_api_takes_its_socket_along_and_another_can_start(desk: Any) -> None:
    await desk.api.close()
    assert not (desk.run_dir / "api.sock").exists()
    second = desk.another_api()
    await second.serve_unix()
    await desk.api.close()  # a second signal: harmless, and not at the successor's cost
    assert (desk.run_dir / "api.sock").is_socket()
    await second.close()


async def test_a_taken_port_is_said_clearly(desk: Any) -> None:
    with pytest.raises(HostFailure, match=f"127.0.0.1:{desk.port}: Address already in use; set rest.tcp"):
        await desk.another_api().serve_tcp("127.0.0.1", desk.port)


def test_tcp_is_for_loopback_only() -> None:
    with pytest.raises(Invalid, match=r"rest\.tcp: '0\.0\.0\.0' is no loopback address"):
        ApiSettings(tcp=("0.0.0.0", 9841))


async def test_a_socket_that_listens_already_is_served(desk: Any) -> None:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    api = desk.another_api()
    await api.serve_socket(sock)
    async with desk.tcp.get(f"http://127.0.0.1:{sock.getsockname()[1]}/healthz") as answer:
        assert answer.status == 200
    await api.close()


async def _raw(desk: Any, method: str, path: str, body: bytes) -> tuple[int, bytes]:
    """One request on a connection made just here: by whom the process is at this moment."""
    reader, writer = await asyncio.open_unix_connection(str(desk.run_dir / "api.sock"))
    writer.write(
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(answer.split()[1]), answer
