"""The report socket: where runtimes' hooks say which container has got a slice. One message in, one line out.

Owns the socket (mode 0666: a rootless runtime's hook must reach it), the message's shape and how often one user may
speak. It only reports: nothing can be asked or changed here but by what /proc confirms (:mod:`amdvgpud.containers`).
Its other end is ``cdi/hook/hook.c``.

The message: JSON in one packet of at most :data:`MESSAGE_BYTES`, with up to two descriptors whose kinds ``fds`` names
in order (``p``: a pidfd of the container's first process, ``r``: the root that it sees). The answer: ``ok``, or
``refuse`` and a sentence, or ``no`` and why the message was not taken.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol

import msgspec

from amdvgpud.core.containers import Report
from amdvgpud.core.errors import HostFailure, Invalid
from amdvgpud.core.model import slice_name
from amdvgpud.serve import access

log = logging.getLogger(__name__)

MESSAGE_BYTES: Final = 8192
REPLY_BYTES: Final = 1000
MAX_FDS: Final = 2
PATIENCE_S: Final = 5.0
"""For the message of one who has connected: a hook sends it as soon as its runtime has told it what it is about."""
MAX_STRANGERS: Final = 64
"""Connections of others than root at a time, whoever they are: a user of a machine may have 65536 uids. One more takes
the place of the one that has been silent for longest, as a hook is never silent. Root, whose runtimes start most
containers, waits for nobody."""
_SERVED: Final = 8
"""Reports of others than root that are looked into at a time."""
_BACKLOG: Final = 128


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    version: Literal[1]
    step: Literal["start", "stop"]
    slice: Annotated[str, msgspec.Meta(max_length=63)]
    fds: Annotated[str, msgspec.Meta(pattern="^p?r?$")] = ""
    pid: Annotated[int, msgspec.Meta(ge=0)] = 0
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    bundle: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    status: str = ""


class Listener(Protocol):
    """Who is told; see :class:`amdvgpud.containers.Containers`."""

    async def started(self, report: Report, root: int | None) -> str | None: ...

    async def stopped(self, report: Report) -> None: ...


@dataclass
class Allowance:
    """How often each user may speak: a bucket a uid, of ``burst``, filled by ``per_s`` a second.

    Root may always: who is root can harm the daemon in better ways, and a report of root's that is not taken would be a
    container that nobody looked at.
    """

    per_s: float = 10.0
    burst: float = 40.0
    _spent: dict[int, tuple[float, float]] = field(default_factory=dict)
    """(how much is spent, when that was so) by uid; whoever has spent nothing is not kept."""

    def take(self, uid: int, now_s: float) -> bool:
        if uid == 0:
            return True
        self._spent = {u: (s, t) for u, (s, t) in self._spent.items() if s > (now_s - t) * self.per_s}
        spent, at_s = self._spent.get(uid, (0.0, now_s))
        spent = max(0.0, spent - (now_s - at_s) * self.per_s)
        if spent + 1 > self.burst:
            return False
        self._spent[uid] = (spent + 1, now_s)
        return True


class ReportSocket:
    """Make it, :meth:`open` it, :meth:`close` it. ``pid_of`` tells a pidfd's process as this machine counts it."""

    def __init__(
        self,
        path: Path,
        listener: Listener,
        pid_of: Callable[[int], int | None],
        *,
        now_s: Callable[[], float],
        allowance: Allowance | None = None,
    ) -> None:
        self._path = path
        self._listener = listener
        self._pid_of = pid_of
        self._now_s = now_s
        self._allowance = allowance or Allowance()
        self._listening: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._talks: set[asyncio.Task[None]] = set()
        self._strangers: set[asyncio.Task[None]] = set()
        self._silent: dict[asyncio.Task[None], None] = {}
        """Those of them that have said nothing yet, the oldest first."""
        self._serving = asyncio.Semaphore(_SERVED)

    def open(self) -> None:
        """``HostFailure`` where it cannot be made. What was left there is replaced: the daemon has the run directory's
        lock, so whoever made it is gone."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        aside = self._path.with_name(f".{self._path.name}.new")
        try:
            aside.unlink(missing_ok=True)
            sock.bind(str(aside))
            aside.chmod(0o666)
            sock.listen(_BACKLOG)
            aside.rename(self._path)
        except OSError as error:
            sock.close()
            raise HostFailure(f"the report socket {self._path} cannot be made: {error}") from error
        self._listening = sock
        self._accepting = asyncio.get_running_loop().create_task(self._accept(sock), name="reports")

    async def close(self) -> None:
        if self._listening is None:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()
        tasks = [task for task in (self._accepting, *self._talks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listening.close()
        self._listening = None

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(sock)
            except OSError as error:
                log.warning("A report could not be heard: %s", error)
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    await asyncio.sleep(1)  # the connection is still there, and so would be the error
                continue
            uid = access.peer_of(peer).uid
            if uid and not self._make_room():
                peer.close()
                continue
            task = loop.create_task(self._talk(peer, uid), name="report")
            self._talks.add(task)
            task.add_done_callback(self._talks.discard)
            if uid:
                self._strangers.add(task)
                task.add_done_callback(self._strangers.discard)
                self._silent[task] = None
                task.add_done_callback(self._has_spoken)
            await asyncio.sleep(0)  # let it begin: the queue may be long

    def _make_room(self) -> bool:
        """For one more that is not root's."""
        if len(self._strangers) < MAX_STRANGERS:
            return True
        oldest = next(iter(self._silent), None)
        if oldest is None:
            return False
        oldest.cancel()
        self._has_spoken(oldest)
        self._strangers.discard(oldest)
        return True

    def _has_spoken(self, talk: asyncio.Task[None] | None) -> None:
        if talk is not None:
            self._silent.pop(talk, None)

    async def _talk(self, peer: socket.socket, uid: int) -> None:
        fds: list[int] = []
        try:
            if self._allowance.take(uid, self._now_s()):
                async with asyncio.timeout(PATIENCE_S):
                    await _readable(peer)
                self._has_spoken(asyncio.current_task())
                async with self._serving if uid else contextlib.nullcontext():
                    content, fds, whole = _receive(peer)
                    reply = await self._reply(uid, content, fds) if whole else "no the message is too long"
            else:
                reply = f"no uid {uid} reports too often"
            if content_fits := reply.encode("utf-8", "replace")[:REPLY_BYTES]:
                peer.send(content_fits, socket.MSG_NOSIGNAL)
        except (OSError, TimeoutError) as error:
            log.debug("A report was not heard to its end: %s", error)
        except Exception:
            log.exception("A report was not answered.")
        finally:
            for fd in fds:
                os.close(fd)
            peer.close()

    async def _reply(self, uid: int, content: bytes, fds: list[int]) -> str:
        try:
            message = msgspec.json.decode(content, type=Message)
            name = slice_name(message.slice)
        except (msgspec.MsgspecError, Invalid, UnicodeDecodeError, RecursionError) as error:
            return f"no the message is not understood: {error}"
        if len(message.fds) != len(fds):
            return f"no {len(fds)} descriptors came, {len(message.fds)} were named"
        named = dict(zip(message.fds, fds, strict=True))
        # By the pidfd where there is one: a number means something else to a runtime that is in a container itself.
        pid = self._pid_of(named["p"]) if "p" in named else message.pid
        report = Report(message.step, name, message.id, pid or 0, message.bundle, uid)
        if message.step == "stop":
            await self._listener.stopped(report)
            return "ok"
        # Only root's word is followed into a file system: another user's may be one that never answers.
        refusal = await self._listener.started(report, named.get("r") if uid == 0 else None)
        return "ok" if refusal is None else f"refuse {refusal}"


def _receive(peer: socket.socket) -> tuple[bytes, list[int], bool]:
    """(the message, the descriptors that came with it: the caller's to close, whether it is whole)."""
    room = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
    content, control, flags, _ = peer.recvmsg(MESSAGE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            got = array.array("i")
            got.frombytes(payload[: len(payload) - len(payload) % got.itemsize])
            fds.extend(got)
    return content, fds, not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)


def _readable(sock: socket.socket) -> Awaitable[None]:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, wake)
    ready.add_done_callback(lambda _: loop.remove_reader(sock))
    return ready
