"""Kernel events about GPUs, heard through libudev, as one word: something changed, look again.

An event's content decides nothing: it says that a full scan is due, so a lost, doubled or undecodable event costs a
scan and no truth. Events come in storms (a partition switch moves dozens of devices within a second), so a scan waits
for a quiet moment. Reads are done when the socket is readable, on the event loop: no thread, no blocking read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pyudev

from amdvgpud.core.errors import HostFailure

log = logging.getLogger(__name__)

SUBSYSTEMS: Final = ("drm", "kfd", "pci", "platform")
"""platform: the compute partitions' devices (amdgpu_xcp) live there."""

QUIET_S: Final = 0.5
"""No event for so long ends a storm. Guessed: a partition switch pauses less than this between its events."""


class UeventWatch:
    """Calls ``changed`` once after each storm of events. ``seen`` counts them by (subsystem, action)."""

    def __init__(self, changed: Callable[[], Awaitable[None]], *, quiet_s: float = QUIET_S) -> None:
        self._changed = changed
        self._quiet_s = quiet_s
        self._heard = asyncio.Event()
        self.seen: Counter[tuple[str, str]] = Counter()

    async def run(self) -> None:
        """Until cancelled. ``HostFailure`` where the event socket cannot be had."""
        try:
            # libudev's own events follow the rules that set modes and groups; without udevd, the kernel's must do.
            source = "udev" if Path("/run/udev/control").exists() else "kernel"
            monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source)
            for subsystem in SUBSYSTEMS:
                monitor.filter_by(subsystem)
            monitor.start()
        except (OSError, ImportError) as error:
            raise HostFailure(f"kernel events cannot be heard: {error}") from error
        loop = asyncio.get_running_loop()
        loop.add_reader(monitor.fileno(), self._read, monitor)
        try:
            while True:
                await self._heard.wait()
                await self._quiet()
                await self._changed()
        finally:
            loop.remove_reader(monitor.fileno())

    async def _quiet(self) -> None:
        while self._heard.is_set():
            self._heard.clear()
            await asyncio.sleep(self._quiet_s)

    def _read(self, monitor: pyudev.Monitor) -> None:
        self._heard.set()
        try:
            while (device := monitor.poll(timeout=0)) is not None:
                self.seen[str(device.subsystem), str(device.action)] += 1
        except (OSError, ValueError) as error:  # an overrun buffer, a property that is no text
            self.seen["unknown", "unreadable"] += 1
            log.debug("An event could not be read; a scan follows all the same: %s", error)
