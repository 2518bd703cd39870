"""What has happened, as a ring that watchers read at their own pace.

Ids grow by one an event and begin anew with each daemon. Who comes too late for the ring is told so and reads the lists
again: an event is an occasion to look, never the only place where a truth is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

log = logging.getLogger(__name__)

RING: Final = 1024
"""Events kept for those who come back late."""


@dataclass(frozen=True, slots=True)
class Event:
    id: int
    revision: int
    time_s: float
    kind: str
    subject: str
    detail: str


class Events:
    """Of one daemon. Its last id is ``last_id``; 0: nothing has happened yet."""

    def __init__(self) -> None:
        self._ring: deque[Event] = deque(maxlen=RING)
        self._added = asyncio.Event()
        self.last_id = 0

    def tell(self, kind: str, subject: str, detail: str, *, revision: int, time_s: float) -> None:
        self.last_id += 1
        self._ring.append(Event(self.last_id, revision, time_s, kind, subject, detail))
        log.info("%s: %s (%s)", subject, detail, kind)
        self._added.set()
        self._added = asyncio.Event()

    def since(self, since: int) -> tuple[Sequence[Event], int, bool]:
        """(events after id ``since``, last id, whether some in between were dropped or never were this daemon's)."""
        events = [e for e in self._ring if e.id > since]
        oldest = self._ring[0].id if self._ring else self.last_id + 1
        return events, self.last_id, since + 1 < oldest or since > self.last_id

    async def wait(self, since: int, timeout_s: float) -> None:
        """Return when an event after ``since`` exists, or after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.last_id <= since:
                    await self._added.wait()
        except TimeoutError:
            return
