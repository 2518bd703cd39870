"""Waiting for events: long polls and server-sent events, bounded in number, each of which can be ended at once.

Sources: the HTML standard's section on server-sent events for the frames. An id there is ``<epoch>-<event id>``: event
ids start anew with each daemon, and the epoch tells a client of the one before from one of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Final

import msgspec
from aiohttp import web

from amdvgpud.core import wire
from amdvgpud.events import Event
from amdvgpud.node import Node
from amdvgpud.serve import problem, views

log = logging.getLogger(__name__)

KEEP_ALIVE_S: Final = 15.0


class Watchers:
    """Those who wait. At ``limit`` of them one more is refused with 429; :meth:`close` ends them all at once."""

    def __init__(self, node: Node, limit: int, *, keep_alive_s: float = KEEP_ALIVE_S, stall_s: float = 10.0) -> None:
        """``stall_s``: who has not taken a frame for so long is dropped."""
        self._node = node
        self._limit = limit
        self._keep_alive_s = keep_alive_s
        self._stall_s = stall_s
        self._count = 0
        self._closed = asyncio.Event()
        self.epoch = secrets.token_hex(4)

    def __len__(self) -> int:
        return self._count

    def close(self) -> None:
        """All waits return, all streams end. For good."""
        self._closed.set()

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """One of the limited places, for as long as the context lasts."""
        if self._count >= self._limit:
            raise problem.Refusal(
                429,
                "too-many-watchers",
                f"{self._count} clients are waiting for events already, and the configuration allows no more",
                headers={"Retry-After": "5"},
            )
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1

    async def wait(self, since: int, timeout_s: float) -> None:
        """Return when an event after ``since`` exists, after ``timeout_s``, or when the daemon stops."""
        if self._closed.is_set() or timeout_s <= 0:
            return
        waits = {
            asyncio.create_task(self._node.wait_event(since, timeout_s), name="wait for an event"),
            asyncio.create_task(self._closed.wait(), name="wait for the end"),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def wait_until(self, true: Callable[[], bool], timeout_s: float) -> None:
        """Return when ``true()``, asked after each event, or after ``timeout_s``, or when the daemon stops."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        if timeout_s <= 0 or true():
            return  # who does not wait takes no place
        async with self.place():
            while not true() and not self._closed.is_set() and (left_s := end_s - loop.time()) > 0:
                _, last_id, _ = self._node.events_since(0)
                await self.wait(last_id, left_s)

    def resume_at(self, last_event_id: str | None) -> tuple[int, bool]:
        """(id after which to go on, whether the client missed something). A bare number is taken as of this daemon."""
        _, last_id, _ = self._node.events_since(0)
        if last_event_id is None:
            return last_id, False
        epoch, _, number = last_event_id.rpartition("-")
        if not (number.isascii() and number.isdigit() and len(number) < 19) or epoch not in ("", self.epoch):
            return last_id, True
        _, _, gap = self._node.events_since(int(number))
        return (last_id, True) if gap else (int(number), False)

    async def stream(self, request: web.Request, last_event_id: str | None, *, details: bool) -> web.StreamResponse:
        """Events as they come, until the client goes, stalls, or the daemon stops."""
        async with self.place():
            since, missed = self.resume_at(last_event_id)
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            )
            response.enable_chunked_encoding()
            await response.prepare(request)
            try:
                await self._write(response, self._resync(since) if missed else b": hello\n\n")
                while not self._closed.is_set():
                    events, last_id, gap = self._node.events_since(since)
                    frames = [self._resync(last_id)] if gap else [self._frame(e, details) for e in events]
                    since = last_id
                    if frames:
                        await self._write(response, b"".join(frames))
                        continue
                    await self.wait(since, self._keep_alive_s)
                    if self._node.events_since(since)[1] == since and not self._closed.is_set():
                        await self._write(response, b": nothing new\n\n")
                async with asyncio.timeout(self._stall_s):
                    await response.write_eof()
            except TimeoutError:
                log.info("A watcher has not read for %g s and is dropped.", self._stall_s)
                if request.transport is not None:
                    request.transport.abort()
            except ConnectionError:
                pass  # it has gone, as they do
            return response

    async def _write(self, response: web.StreamResponse, frame: bytes) -> None:
        # A full buffer makes this wait for the client, and that wait is what must not last.
        # Not wait_for, which until Python 3.12 can lose the cancellation of a client that has just gone.
        async with asyncio.timeout(self._stall_s):
            await response.write(frame)

    def _frame(self, event: Event, details: bool) -> bytes:
        content = msgspec.json.encode(views.event_view(event, details=details))
        return b"id: %s-%d\nevent: %s\ndata: %s\n\n" % (self.epoch.encode(), event.id, event.kind.encode(), content)

    def _resync(self, last_id: int) -> bytes:
        content = msgspec.json.encode(wire.EventList(events=[], last_id=last_id, resync=True))
        return b"id: %s-%d\nevent: resync\ndata: %s\n\n" % (self.epoch.encode(), last_id, content)
