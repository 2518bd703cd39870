"""The report socket with the real hook at its other end, and with others who say what they should not."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import amdvgpud._abi
from amdvgpud.core.containers import Report
from amdvgpud.core.model import SliceName
from amdvgpud.host.containers import ProcContainers
from amdvgpud.serve.reports import MAX_STRANGERS, PATIENCE_S, Allowance, ReportSocket

HOOK = Path(amdvgpud._abi.__file__).with_name("amdvgpu-hook")
STATE = {
    "ociVersion": "1.0.2",
    "id": "c0ffee",
    "status": "creating",
    "pid": os.getpid(),
    "bundle": "/b",
    "annotations": {},
}


@dataclass
class Ear:
    """Who is told. ``answer`` is what a start is answered; ``hold_s`` how long that takes."""

    answer: str | None = None
    hold_s: float = 0.0
    fault: Exception | None = None
    heard: list[tuple[Report, bool]] = field(default_factory=list)
    """With each report, whether the root that came with it was a folder that could be looked into."""

    async def started(self, report: Report, root: int | None) -> str | None:
        self.heard.append((report, root is not None and Path(f"/proc/self/fd/{root}/proc").exists()))
        if self.fault is not None:
            raise self.fault
        await asyncio.sleep(self.hold_s)
        return self.answer

    async def stopped(self, report: Report) -> None:
        self.heard.append((report, False))


@dataclass
class Post:
    path: Path
    ear: Ear
    allowance: Allowance

    async def hook(self, *argv: str, state: object = STATE) -> tuple[int, str]:
        """(exit code, standard error) of the real hook."""
        text = state if isinstance(state, bytes) else json.dumps(state).encode()
        # Patient before what was asked for: on a busy machine 100 ms are nothing.
        return await run_hook(*argv[:2], "--wait", "20000", *argv[2:], "--socket", str(self.path), state=text)

    async def say(self, content: bytes, fds: Sequence[int] = (), *, uid: int | None = None) -> str:
        """The answer to a message of anybody's (``uid``: of that user's); empty where the daemon only hung up."""
        loop = asyncio.get_running_loop()
        with await a_line(self, os.getuid() if uid is None else uid) as line:
            socket.send_fds(line, [content], list(fds))
            return (await loop.sock_recv(line, 4096)).decode()


async def run_hook(*argv: str, state: bytes) -> tuple[int, str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(HOOK, *argv, stdin=pipe, stderr=pipe)
    _, complaint = await process.communicate(state)
    assert process.returncode is not None
    return process.returncode, complaint.decode()


@pytest.fixture
async def post() -> AsyncIterator[Post]:
    with tempfile.TemporaryDirectory() as folder:  # short: a socket's name has 107 bytes
        Path(folder).chmod(0o711)
        made = Post(Path(folder) / "report.sock", Ear(), Allowance())
        pid_of = ProcContainers(Path(folder)).pid_of
        opened = ReportSocket(made.path, made.ear, pid_of, now_s=time.monotonic, allowance=made.allowance)
        opened.open()
        yield made
        await opened.close()
        assert not made.path.exists()


async def test_a_start_and_a_stop_are_heard_with_who_says_it(post: Post) -> None:
    assert await post.hook("start", "alice") == (0, "")
    assert await post.hook("stop", "alice", state=STATE | {"pid": 0}) == (0, "")
    alice, uid = SliceName("alice"), os.getuid()
    assert post.ear.heard == [
        (Report("start", alice, "c0ffee", os.getpid(), "/b", uid), uid == 0),
        (Report("stop", alice, "c0ffee", 0, "/b", uid), False),
    ]


async def test_the_state_is_read_whatever_else_is_in_it(post: Post) -> None:
    noise = {"id": "no", "pid": -1, "x": ["}", '"', "\\", {"id": [1]}], "deep": [[[["]"]]]]}
    state = {"annotations": noise, "root": "/r", **STATE, "id": 'quo"te\\ünd'}
    assert await post.hook("start", "a.b-1", state=json.dumps(state, indent=3, ensure_ascii=False).encode()) == (0, "")
    assert await post.hook("start", "big", state=STATE | {"annotations": {"last": "x" * 300_000}}) == (0, "")
    assert [(r.slice, r.id, r.pid) for r, _ in post.ear.heard] == [
        ("a.b-1", 'quo"te\\ünd', os.getpid()),
        ("big", "c0ffee", os.getpid()),
    ]


async def test_a_refusal_fails_the_hook_with_its_reason_and_a_stop_cannot_fail(post: Post) -> None:
    post.ear.answer = "slice alice would not be enforced: it is a static program"
    assert await post.hook("start", "alice") == (1, f"amdvgpu-hook: {post.ear.answer}\n")
    assert await post.hook("stop", "alice") == (0, "")


async def test_no_daemon_is_no_reason_not_to_start_unless_it_is_required(tmp_path: Path) -> None:
    away = ("--socket", str(tmp_path / "report.sock"))
    state = json.dumps(STATE).encode()
    assert await run_hook("start", "alice", *away, state=state) == (0, "")
    assert await run_hook("stop", "alice", *away, "--require", state=state) == (0, "")
    code, complaint = await run_hook("start", "alice", *away, "--require", state=state)
    assert (code, complaint.split(":")[1]) == (1, " no daemon answers at " + str(tmp_path / "report.sock"))


async def test_a_daemon_that_does_not_answer_is_waited_for_no_longer_than_told(post: Post) -> None:
    post.ear.hold_s = 30.0
    began_s = time.monotonic()
    assert await post.hook("start", "alice", "--wait", "50") == (0, "")
    code, complaint = await post.hook("start", "alice", "--wait", "50", "--require")
    assert (code, "did not answer within 50 ms" in complaint) == (1, True)
    assert time.monotonic() - began_s < 15


UNTOLD = "the configuration (images.policy) lets no container have a slice without the daemon's word"


async def test_where_a_policy_may_refuse_a_daemon_that_was_reached_must_say_yes(post: Post) -> None:
    assert await post.hook("start", "alice", "--judged") == (0, "")
    for content, why in ((b"{}", "has no id"), (b"{" + b" " * (1 << 20), "longer than")):
        code, complaint = await post.hook("start", "alice", "--judged", state=content)
        assert (code, why in complaint, UNTOLD in complaint) == (1, True, True)
    code, complaint = await post.hook("start", "alice", "--judged", state=STATE | {"id": "a" * 2000})
    assert (code, "the daemon did not take the report: no " in complaint) == (1, True)
    post.ear.hold_s = 30.0
    code, complaint = await post.hook("start", "alice", "--wait", "50", "--judged")
    assert (code, complaint) == (1, f"amdvgpu-hook: the daemon did not answer within 50 ms; {UNTOLD}\n")


async def test_where_a_policy_may_refuse_a_daemon_that_hangs_up_has_not_said_yes(post: Post) -> None:
    post.ear.fault = RuntimeError("a fault of the daemon's")
    code, complaint = await post.hook("start", "alice", "--judged")
    assert (code, complaint) == (1, f"amdvgpu-hook: the daemon hung up; {UNTOLD}\n")
    assert await post.hook("start", "alice") == (0, "")
    assert await post.hook("stop", "alice", "--judged") == (0, "")


async def test_where_a_policy_may_refuse_a_full_queue_is_a_daemon_that_is_there_and_no_listener_one_that_is_away(
    tmp_path: Path,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "report.sock")
        argv = ("start", "alice", "--judged", "--wait", "50", "--socket", path)
        state = json.dumps(STATE).encode()
        assert await run_hook(*argv, state=state) == (0, "")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(path)
            listening.listen(0)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
                first.connect(path)
                code, complaint = await run_hook(*argv, state=state)
                assert (code, UNTOLD in complaint) == (1, True)
        assert await run_hook(*argv, state=state) == (0, ""), "its name is there still, and nobody listens"


@pytest.mark.parametrize(
    "state", [b"", b"{", b"[]", b"null", b'{"id"', b'{"id":', b'{"id":"a', b'{"id":7}', b'{"pid":"x"}', b"\xff" * 4096]
)
async def test_a_state_that_cannot_be_understood_starts_the_container_and_tells_nothing(
    post: Post, state: bytes
) -> None:
    assert await post.hook("start", "alice", state=state) == (0, "")
    assert [report.id for report, _ in post.ear.heard] == []


async def test_options_of_a_newer_version_are_left_out_and_said(post: Post) -> None:
    """A CDI file outlives the daemon that wrote it, when an older package is put in its place."""
    code, complaint = await post.hook("start", "alice", "--what", "--wait", "nonsense")
    assert (code, complaint.count("this version has no option")) == (0, 3)
    assert [report.slice for report, _ in post.ear.heard] == ["alice"]


@pytest.mark.parametrize("argv", [(), ("start",), ("begin", "alice"), ("start", 'al"ice')])
async def test_wrong_words_are_said_to_be_wrong(argv: tuple[str, ...]) -> None:
    code, complaint = await run_hook(*argv, state=b"{}")
    assert (code, complaint.split(":")[0]) == (2, "usage")


GOOD = {"version": 1, "step": "start", "slice": "alice", "fds": "", "pid": 1, "id": "a", "bundle": "", "status": ""}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 100,
        b"[" * 8000,
        b"x" * 9000,
        json.dumps(GOOD | {"version": 2}).encode(),
        json.dumps(GOOD | {"slice": "../alice"}).encode(),
        json.dumps(GOOD | {"pid": -1}).encode(),
        json.dumps(GOOD | {"fds": "pr"}).encode(),
        json.dumps(GOOD | {"more": 1}).encode(),
        json.dumps(GOOD | {"id": "a" * 2000}).encode(),
        b'{"version":1,"step":"start","slice":"alice","id":"\xff"}',
    ],
)
async def test_a_message_that_is_not_understood_is_answered_and_nobody_is_told(post: Post, content: bytes) -> None:
    answer = await post.say(content)
    assert answer.startswith("no ") or answer == ""
    assert post.ear.heard == []
    assert await post.say(json.dumps(GOOD).encode()) == "ok"


async def test_descriptors_that_nobody_asked_for_are_closed(post: Post) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    null = os.open("/dev/null", os.O_RDONLY)
    for _ in range(20):
        assert (await post.say(json.dumps(GOOD).encode(), [null])).startswith("no 1 descriptors came")
        assert (await post.say(json.dumps(GOOD).encode(), [null] * 9)).startswith("no ")
        assert (await post.say(json.dumps(GOOD | {"fds": "p"}).encode(), [null])) == "ok"
    os.close(null)
    assert {report.pid for report, _ in post.ear.heard} == {0}, "what is no pidfd is nobody's"
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.root
async def test_whoever_connects_and_says_nothing_keeps_nobody_from_speaking(post: Post) -> None:
    """Under as many uids as a rootless user has."""
    silent = [await a_line(post, uid) for uid in range(100_000, 100_000 + 3 * MAX_STRANGERS)]
    good = json.dumps(GOOD).encode()
    async with asyncio.timeout(PATIENCE_S - 0.5):
        answers = [await post.say(good, uid=uid) for uid in (0, 4711, 0, 4712)]
    assert (answers, len(post.ear.heard)) == (["ok"] * 4, 4)
    assert sum(is_open(line) for line in silent) < MAX_STRANGERS
    for line in silent:
        line.close()


@pytest.mark.root
async def test_root_is_heard_beside_strangers_who_are_looked_into_for_long(post: Post) -> None:
    post.ear.hold_s = 5.0
    good = json.dumps(GOOD).encode()
    busy = [asyncio.create_task(post.say(good, uid=uid)) for uid in range(100_000, 100_000 + 2 * MAX_STRANGERS)]
    await asyncio.wait(busy, timeout=0.5)
    assert 0 < len(post.ear.heard) < MAX_STRANGERS
    post.ear.hold_s = 0.0
    async with asyncio.timeout(4):
        assert await post.say(good) == "ok"
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)


async def a_line(post: Post, uid: int) -> socket.socket:
    """A connection that the daemon takes for that user's."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.setblocking(False)
    own = os.geteuid()
    os.seteuid(uid)
    try:
        line.connect(str(post.path))
    finally:
        os.seteuid(own)
    await asyncio.sleep(0.001)
    return line


def is_open(line: socket.socket) -> bool:
    try:
        return line.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_the_socket_is_everybodys(post: Post) -> None:
    assert stat.S_IMODE(post.path.stat().st_mode) == 0o666


def test_one_user_may_speak_so_often_and_root_always() -> None:
    allowance = Allowance(per_s=2.0, burst=3.0)
    assert [allowance.take(1000, 10.0) for _ in range(4)] == [True, True, True, False]
    assert allowance.take(1001, 10.0), "another user's is another bucket"
    assert [allowance.take(1000, 10.6) for _ in range(2)] == [True, False]
    assert [allowance.take(1000, 99.0) for _ in range(4)] == [True, True, True, False]
    assert all(allowance.take(0, 99.0) for _ in range(1000))
