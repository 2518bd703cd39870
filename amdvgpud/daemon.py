"""The daemon: its eternal tasks, the way in and out of them, and the signals.

Owns when things are looked at. What is done then is the parts' own (:mod:`amdvgpud.assembly`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Final

from amdvgpud import __version__
from amdvgpud.assembly import api_settings, assemble, in_cluster, kubelet_of, process_of, rules_of
from amdvgpud.core.delivery import Choice
from amdvgpud.core.errors import AmdvgpuError, HostFailure
from amdvgpud.core.health import unbound, wedged
from amdvgpud.core.model import SliceName
from amdvgpud.core.modes import parse_targets
from amdvgpud.guard import Guard
from amdvgpud.host.pidfd import ProcessEnder, SlotOwners
from amdvgpud.host.systemd import Supervisor, claim_machine
from amdvgpud.host.udev import DriverWord, UeventWatch
from amdvgpud.serve.kube.profiles import Profiles
from amdvgpud.serve.rest import Api
from amdvgpud.settings import SETTINGS, Settings, shown

log = logging.getLogger(__name__)

RELOADED: Final = frozenset(
    {"tick_s", "rescan_s", "log_level", "kernel.sample_s"} | {key for key in SETTINGS if key.startswith("watchdog.")}
)
"""Settings that a reload puts in force; the others are said to wait for a restart."""

LAST_CHANGE_S: Final = 5
"""How long the end waits for the change that is being made: half of what the unit gives it. After that the Book is left
to the end of the process, which does it no harm."""

SWITCH_ALLOWANCE_S: Final = 30
"""What the start may take longer for each GPU that the configuration may have cut anew; guessed, generously."""


class Daemon:
    """The eternal tasks, and the way in and out of them. Settings may be read again while it runs."""

    def __init__(self, settings: Settings, read_again: Callable[[], Settings], supervisor: Supervisor) -> None:
        self._settings = settings
        self._read_again = read_again
        self._supervisor = supervisor
        self._stop = asyncio.Event()
        self._parts = assemble(settings)
        self._kubelet = kubelet_of(settings, self._parts) if in_cluster(settings) else None
        self._guard = Guard(
            self._parts.node,
            self._parts.figures,
            ProcessEnder(settings.run_dir / "slices"),
            lambda: rules_of(self._settings),
            now_s=time.time,
            left=self._parts.left,
        )
        self._owners = SlotOwners(self._reclaim_soon)
        self._bereft: set[SliceName] = set()
        """Slices of which a process has ended: what it held is returned at once."""
        self._reclaiming: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until :meth:`stop`; or until something that must not end does, and then with its error."""
        node = self._parts.node
        await node.start()
        # Before the doors open: nobody has been given anything of a GPU that is about to be cut anew.
        if targets := parse_targets(self._settings.partition_target):
            # A switch takes seconds, and there may be many: systemd must not take that for a start that hangs.
            allowed_s = SWITCH_ALLOWANCE_S * (1 + len(node.view().inventory.gpus))
            self._supervisor.notify(f"EXTEND_TIMEOUT_USEC={allowed_s * 1_000_000}", "STATUS=Partitioning GPUs")
            await node.apply_targets(targets)
        await self._pulse()  # and nobody is given anything of a GPU that is not well
        await self._parts.containers.start()
        if self._kubelet is not None:
            await self._kubelet.start()
        else:
            # What was cut for a kubelet goes, where none is served any more; but for what it has leases of: nobody
            # looks after these now, and whether their pods have ended only the kubelet knows.
            await Profiles(node, ()).cut()
        api = self._api()
        # What the start has made lives as long as the daemon. The collector would walk it again and again in the midst
        # of requests, tens of milliseconds at a time.
        gc.freeze()
        try:
            await self._open_doors(api)
            self._supervisor.notify("READY=1", f"STATUS={node!r}")
            async with asyncio.TaskGroup() as tasks:
                eternal = [
                    tasks.create_task(self._tick(), name="tick"),
                    tasks.create_task(self._rescan(), name="rescan"),
                    tasks.create_task(self._watch(tasks), name="uevents"),
                    tasks.create_task(self._pulses(), name="pulse"),
                    tasks.create_task(self._parts.kfd.run(), name="kfd events"),
                    tasks.create_task(self._guard.run(lambda: self._settings.kernel_sample_s), name="guard"),
                ]
                if self._kubelet is not None:
                    eternal.append(tasks.create_task(self._kubelet.run(), name="kubelet"))
                await self._stop.wait()
                self._supervisor.notify("STOPPING=1")
                for task in eternal:
                    task.cancel()
        finally:
            self._owners.close()
            await self._parts.reports.close()
            self._parts.containers.close()
            await api.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_CHANGE_S):
                    await node.close()

    def stop(self) -> None:
        """A second call is harmless."""
        self._stop.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    async def reload(self) -> None:
        """Read the settings again and look at the machine. On an error the old settings stay, and the error goes on."""
        self._supervisor.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            fresh = await asyncio.to_thread(self._read_again)
            old, new = shown(self._settings), shown(fresh)
            if waiting := [key for key in new if new[key] != old[key] and key not in RELOADED]:
                log.warning("Changed, but in force only after a restart: %s.", ", ".join(waiting))
            self._settings = fresh
            logging.getLogger().setLevel(fresh.log_level.upper())
            with self._parts.metrics.reconcile():
                await self._parts.node.rescan()
        finally:
            self._supervisor.notify("READY=1", f"STATUS={self._parts.node!r}")

    async def reload_or_say(self) -> None:
        """:meth:`reload` for a signal, which nobody answers: an error is logged."""
        try:
            await self.reload()
        except AmdvgpuError as error:
            log.error("The settings stay as they were: %s", error)

    def _api(self) -> Api:
        s = self._settings
        return Api(
            self._parts.node,
            self._parts.cdi,
            self._parts.metrics,
            api_settings(s),
            version=__version__,
            run_dir=s.run_dir,
            process_of=process_of,
            cdi_kind=s.cdi_kind,
            simulated=s.simulate or None,
            config=lambda: shown(self._settings),
            reload=self.reload,
            preload=self._parts.preload,
            guard=self._guard.view,
            delivery=self._how_pods_get_theirs,
            environment={"SOFTKFD_ROOT": str(self._parts.simulated_root)} if self._parts.simulated_root else {},
        )

    def _how_pods_get_theirs(self) -> Choice | None:
        return self._kubelet.delivery.choice if self._kubelet is not None and self._settings.kubelet_mode else None

    async def _open_doors(self, api: Api) -> None:
        if self._supervisor.inherited_fds:
            for fd in self._supervisor.inherited_fds:
                await api.serve_socket(socket.socket(fileno=fd))
        else:
            await api.serve_unix()
        if self._settings.rest_tcp is not None:
            await api.serve_tcp()
        if self._settings.hook_enabled:
            self._parts.reports.open()

    async def _tick(self) -> None:
        while True:
            node = self._parts.node
            try:
                await self._parts.containers.look()
                await node.tick()
                await self._parts.metrics.sample(node.view().inventory)
                await self._owners.follow(node.view().usage)
            except (AmdvgpuError, OSError) as error:
                log.warning(
                    "A look at ledgers and leases failed, the next one is due in %g s: %s", self._settings.tick_s, error
                )
            self._supervisor.notify("WATCHDOG=1")
            await asyncio.sleep(self._settings.tick_s)

    def _reclaim_soon(self, name: SliceName) -> None:
        """Many may end together: one look serves all that have ended before it begins."""
        self._bereft.add(name)
        if self._reclaiming is None or self._reclaiming.done():
            self._reclaiming = asyncio.get_running_loop().create_task(self._reclaim(), name="reclaim")

    async def _reclaim(self) -> None:
        while self._bereft:
            names, self._bereft = sorted(self._bereft), set()
            try:
                await self._parts.node.reclaim(names)
            except (AmdvgpuError, OSError) as error:
                log.warning("What dead processes held could not be returned, the next tick tries again: %s", error)

    async def _rescan(self) -> None:
        while True:
            await asyncio.sleep(self._settings.rescan_s)
            await self._look_again()
            await self._find_containers()

    async def _look_at_containers(self) -> None:
        try:
            await self._parts.containers.look()
        except (AmdvgpuError, OSError) as error:
            log.warning("A look at containers failed, the next one is due in %g s: %s", self._settings.tick_s, error)

    async def _find_containers(self) -> None:
        try:
            await self._parts.containers.find()
        except (AmdvgpuError, OSError) as error:
            log.warning("A look for containers failed, the next one is due in %g s: %s", self._settings.rescan_s, error)

    async def _watch(self, tasks: asyncio.TaskGroup) -> None:
        """Events are a convenience: where they cannot be heard, the periodic scan still finds what changes."""

        def said(word: DriverWord) -> None:
            for gpu in self._parts.node.view().inventory.gpus:
                if gpu.pci_address == word.pci_address:
                    notice = unbound(gpu.id) if word.wedged is None else wedged(gpu.id, word.wedged, word.culprit)
                    tasks.create_task(self._parts.watch.hear([notice]))

        try:
            watch = UeventWatch(self._look_again, said)
            self._parts.metrics.uevents = watch.seen
            await watch.run()
        except HostFailure as error:
            log.warning("%s; changes are found by the scan every %g s.", error, self._settings.rescan_s)
            await asyncio.Event().wait()

    async def _look_again(self) -> None:
        """A scan that fails ends neither the daemon nor the hearing of events: what it had before stays in force."""
        try:
            with self._parts.metrics.reconcile():
                await self._parts.node.rescan()
        except (AmdvgpuError, OSError) as error:
            log.warning("A scan of the machine failed, the next one is due in %g s: %s", self._settings.rescan_s, error)
        self._parts.kfd.refresh()
        await self._look_at_containers()  # a GPU that came back has no caps
        await self._pulse()

    async def _pulses(self) -> None:
        while True:
            await asyncio.sleep(self._settings.health_pulse_s or self._settings.rescan_s)
            await self._pulse()

    async def _pulse(self) -> None:
        if not self._settings.health_pulse_s:
            return
        before = self._parts.node.view().inventory
        try:
            await self._parts.watch.pulse()
            if self._parts.node.view().inventory is not before:  # it has had to scan
                self._parts.kfd.refresh()
                await self._look_at_containers()
        except (AmdvgpuError, OSError) as error:
            log.warning(
                "A look at the GPUs failed, the next one is due in %g s: %s", self._settings.health_pulse_s, error
            )


async def serve(settings: Settings, read_again: Callable[[], Settings]) -> None:
    supervisor = Supervisor(os.environ)
    lock = claim_machine(settings.run_dir)
    try:
        daemon = Daemon(settings, read_again, supervisor)
        loop = asyncio.get_running_loop()
        asked: set[int] = set()
        reloads: set[asyncio.Task[None]] = set()

        def reload() -> None:
            asked.discard(signal.SIGHUP)
            # One at work, and one that will see what has changed since that began, are enough for any storm of signals.
            if daemon.stopping or len(reloads) >= 2:
                return
            reloads.add(task := loop.create_task(daemon.reload_or_say(), name="reload"))
            task.add_done_callback(reloads.discard)

        # Not the loop's own handlers: it reads a storm of signals for as long as the storm lasts.
        def hear(number: int, _: object) -> None:
            if asked.isdisjoint({signal.SIGTERM, signal.SIGINT, number}):
                asked.add(number)
                loop.call_soon_threadsafe(reload if number == signal.SIGHUP else daemon.stop)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, hear)
        await daemon.run()
    finally:
        # The interpreter gives signals that have a handler their deadly default back before it has ended, and leaves
        # those alone that are ignored: a second one must not make a failure of an end as asked. Blocking them would do
        # for this thread only, and one that waits for a child is there until the end.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.close(lock)
