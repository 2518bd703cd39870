"""Kernel events about GPUs, heard through libudev: something changed, look again; and what only an event tells.

For all that a scan can find an event's content decides nothing: it says that a full scan is due, so a lost, doubled or
undecodable event costs a scan and no truth. Events come in storms (a partition switch moves dozens of devices within a
second), so a scan waits for a quiet moment, though not for ever. Some contents count: that a driver has given up its
GPU or has recovered it (``WEDGED``, Documentation/gpu/drm-uapi.rst), for no file says so; and that one has let its GPU
go, for it may have it again before anybody looks.

Reads are done when the socket is readable, on the event loop: no thread, no blocking read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyudev

from amdvgpud.core.errors import HostFailure

log = logging.getLogger(__name__)

SUBSYSTEMS: Final = ("drm", "kfd", "pci", "platform")
"""platform: the compute partitions' devices (amdgpu_xcp) live there."""
ACTIONS: Final = ("add", "remove", "change", "bind", "unbind", "move", "online", "offline")

QUIET_S: Final = 0.5
"""No event for so long ends a storm. Guessed: a partition switch pauses less than this between its events."""
LONGEST_STORM_S: Final = 5.0
"""So long a scan waits at most: something that never rests must not hide what else happens."""
BUFFER_BYTES: Final = 8 << 20
"""Room for some 20,000 events while the loop is busy (measured). One that is lost all the same costs a scan, and of a
WEDGED its news: the look that follows a scan then finds what can be found."""
READS: Final = 256
"""Events read at a time before the loop may do something else."""

_PCI_FUNCTION: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.ASCII)


@dataclass(frozen=True, slots=True)
class DriverWord:
    """What a driver has said of its GPU: that it has given it up, has recovered it, or (by going) has let it go."""

    pci_address: str
    wedged: str | None
    """What would bring it back, as the kernel has it: ``rebind,bus-reset``; ``none``: it is back. None: let go."""
    culprit: str = ""
    """The process that was at work, for people; empty where the kernel does not say."""


class UeventWatch:
    """Calls ``changed`` once after each storm of events, and ``said`` at once. ``seen`` counts events by (subsystem,
    action), both of closed sets: ``other`` is one that neither has."""

    def __init__(
        self,
        changed: Callable[[], Awaitable[None]],
        said: Callable[[DriverWord], None] = lambda word: None,
        *,
        quiet_s: float = QUIET_S,
        longest_storm_s: float = LONGEST_STORM_S,
    ) -> None:
        self._changed = changed
        self._said = said
        self._quiet_s = quiet_s
        self._longest_storm_s = longest_storm_s
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
            with contextlib.suppress(OSError):  # takes CAP_NET_ADMIN; without it the kernel's default must do
                monitor.set_receive_buffer_size(BUFFER_BYTES)
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
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._longest_storm_s
        while self._heard.is_set() and loop.time() < until_s:
            self._heard.clear()
            await asyncio.sleep(self._quiet_s)
        self._heard.clear()

    def _read(self, monitor: pyudev.Monitor) -> None:
        self._heard.set()
        try:
            for _ in range(READS):
                if (device := monitor.poll(timeout=0)) is None:
                    return
                self._take(device)
        except (OSError, ValueError) as error:  # an overrun buffer, a property that is no text
            self.seen["other", "unreadable"] += 1
            _clear_error(monitor.fileno())
            log.debug("An event could not be read; a scan follows all the same: %s", error)

    def _take(self, device: pyudev.Device) -> None:
        subsystem, action = str(device.subsystem), str(device.action)
        known = subsystem if subsystem in SUBSYSTEMS else "other", action if action in ACTIONS else "other"
        self.seen[known] += 1
        parent, card, rest = device.device_path.partition("/drm/card")
        functions = _PCI_FUNCTION.findall(parent)
        if subsystem != "drm" or not card or "/" in rest or not functions:
            # A connector of a card that goes is a monitor that was unplugged. A partition's card is no PCI device's;
            # what goes wrong with its GPU is said at the GPU's.
            return
        methods = device.properties.get("WEDGED")
        if action == "remove":
            self._said(DriverWord(functions[-1], None))
        elif action == "change" and methods is not None:
            pid, task = (device.properties.get(key, "") for key in ("PID", "TASK"))
            self._said(DriverWord(functions[-1], methods, f"{task or '?'}, pid {pid}" if pid else task))


def _clear_error(fd: int) -> None:
    """An overrun stays at the socket until somebody asks for it, and pyudev reads nothing meanwhile: the loop would be
    woken, and nothing be read, for ever."""
    with socket.socket(fileno=os.dup(fd)) as asked:
        asked.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
