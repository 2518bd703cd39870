"""amdvgpud: the daemon's command line, and the one place where all parts are put together."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import logging
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from amdvgpud import __version__
from amdvgpud.containers import Containers, ImagePolicy
from amdvgpud.core import watchdog
from amdvgpud.core.errors import AmdvgpuError, HostFailure, Invalid, NotFound
from amdvgpud.core.health import Policy, unbound, wedged
from amdvgpud.core.model import Inventory, SliceName
from amdvgpud.core.modes import parse_targets
from amdvgpud.guard import Guard, Leftovers
from amdvgpud.host import amdsmi
from amdvgpud.host.cdi import (
    GATE_IN_CONTAINER,
    CdiFile,
    HookCall,
    SimulatedDevices,
    parse_spec,
    proven,
    replace_file,
    without_hooks,
)
from amdvgpud.host.cdi_partitions import WithPartitions
from amdvgpud.host.cgroup import DmemCaps, TreeFiles
from amdvgpud.host.containers import ContainerRecord, ProcContainers
from amdvgpud.host.health import StandingsFile, SysfsHealth
from amdvgpud.host.image import Images
from amdvgpud.host.kfd import KernelFigures
from amdvgpud.host.ledger import LedgerFiles
from amdvgpud.host.partition import PartitionFiles
from amdvgpud.host.pidfd import ProcessEnder, SlotOwners
from amdvgpud.host.procs import process_alive, start_ticks
from amdvgpud.host.smi import KfdChildren
from amdvgpud.host.store import BookStore
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.host.systemd import Supervisor, claim_machine
from amdvgpud.host.udev import DriverWord, UeventWatch
from amdvgpud.node import Node
from amdvgpud.ports import HealthCheck
from amdvgpud.serve.endpoints import Process
from amdvgpud.serve.exporter import ExporterHealth
from amdvgpud.serve.kubeapi import read_access
from amdvgpud.serve.metrics import CountedCdi, Metrics
from amdvgpud.serve.reports import ReportSocket
from amdvgpud.serve.rest import Api, ApiSettings
from amdvgpud.settings import SETTINGS, Settings, read_settings, shown
from amdvgpud.sim.driver import SimulatedDriver
from amdvgpud.sim.models import parse_simulation, table_rows
from amdvgpud.sim.tree import build_tree
from amdvgpud.watch import HealthWatch

if TYPE_CHECKING:
    from amdvgpud.kubernetes import Kubelet

log = logging.getLogger(__name__)

INSTALLED_HOOK: Final = Path("/usr/lib/amdvgpu/amdvgpu-hook")
"""What container runtimes run; on the host, so that a daemon in a container names the host's."""

INSTALLED_LIBRARY: Final = Path("/usr/lib/amdvgpu/libamdvgpu.so")
"""Where the packages put the gate; replaced there by rename on an upgrade, so running programs keep theirs."""

RELOADED: Final = frozenset(
    {"tick_s", "rescan_s", "log_level", "kernel.sample_s"} | {key for key in SETTINGS if key.startswith("watchdog.")}
)
"""Settings that a reload puts in force; the others are said to wait for a restart."""


REPORTS: Final = "report.sock"
"""Below run_dir; the hook's own default has run_dir's."""

WAIT_FOR_CAP_MS: Final = 300
"""How long a container's start may wait for the kernel's cap, where there is one: 200 ms more than for a report."""

WAIT_FOR_POLICY_MS: Final = 1500
"""The same where images.policy may refuse it: a busy machine must not let in what was to be kept out."""

SWITCH_ALLOWANCE_S: Final = 30
"""What the start may take longer for each GPU that the configuration may have cut anew; guessed, generously."""

# ---------------------------------------------------------------------------------------------- putting it together


class CheckedSysfs(SysfsReader):
    """The machine as sysfs has it, with AMD SMI's market names and doubts where that is installed and wanted.

    AMD SMI is asked anew only when the topology has changed: asking opens every GPU, and may take seconds.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._report: tuple[int, amdsmi.Report] | None = None

    def read_inventory(self) -> Inventory:
        inventory = super().read_inventory()
        if self._report is None or self._report[0] != inventory.generation_id:
            self._report = inventory.generation_id, amdsmi.read_report()
        return amdsmi.cross_check(inventory, self._report[1])


@dataclass(frozen=True, slots=True)
class Parts:
    """One daemon, put together; nothing has been read, locked or opened yet."""

    node: Node
    cdi: CountedCdi
    metrics: Metrics
    preload: tuple[Path, ...]
    """What a process in a slice preloads, in order: the gate, and on a simulated machine what it stands before."""
    simulated_root: Path | None
    watch: HealthWatch
    kfd: KfdChildren
    partitions: WithPartitions
    files: LedgerFiles
    figures: KernelFigures
    left: Leftovers
    containers: Containers
    reports: ReportSocket


def assemble(settings: Settings) -> Parts:
    """The real adapters around a Node; for a simulated machine, its tree is built here first."""
    root, simulated, refresh = settings.sysfs_root, None, _nothing
    partitions = PartitionFiles(root, own_pids=lambda: kfd.own_pids())
    eyes = SysfsHealth(root)
    if settings.simulate:
        root = settings.run_dir / "simulated"
        simulation = parse_simulation(settings.simulate)
        driver = SimulatedDriver(simulation, root)
        refresh = driver.refresh_processes
        partitions = PartitionFiles(root, write=driver.write, refresh=refresh, own_pids=lambda: kfd.own_pids())
        eyes = SysfsHealth(root, read=driver.read, open_node=driver.open_node)
        if build_tree(simulation, root):
            log.info("Simulated machine %s written to %s.", settings.simulate, root)
        simulated = SimulatedDevices(root, _packaged("libsoftkfd.so"))
    gate = _gate(settings)
    caps = DmemCaps(TreeFiles(), delegate=settings.dmem_delegate) if settings.dmem_enabled else None
    sysfs = (CheckedSysfs if settings.amdsmi else SysfsReader)(root)
    metrics = Metrics(
        sysfs,
        version=__version__,
        python=platform.python_version(),
        cdi_kind=settings.cdi_kind,
        compat=settings.metrics_compat,
        cluster_node=platform.node(),
    )
    cdi = CdiFile(
        settings.cdi_dir,
        run_dir=settings.run_dir,
        library=gate,
        sysfs_root=root,
        simulated=simulated,
        kind=settings.cdi_kind,
        card_nodes=settings.cdi_card_nodes,
        version_limit=settings.cdi_version_limit or None,
        hook=_hook(settings, caps),
    )
    whole = WithPartitions(
        cdi,
        settings.cdi_dir,
        run_dir=settings.run_dir,
        sysfs_root=root,
        simulated=simulated,
        kind=settings.cdi_kind,
    )
    counted = CountedCdi(whole, metrics)
    kfd = KfdChildren(
        lambda: node.view().inventory,
        lambda notices: watch.hear(notices),
        listening=settings.health_smi_events if simulated is not None or root == Path("/") else "off",
        environment={"SOFTKFD_ROOT": str(root), "LD_PRELOAD": str(simulated.softkfd)} if simulated else None,
    )
    files = LedgerFiles(settings.run_dir, sysfs_root=root, tmpfs_bytes=settings.slices_tmpfs_bytes)
    figures = KernelFigures(
        settings.run_dir / "slices",
        own_pids=kfd.own_pids,
        root=root,
        now_s=time.time,
        # softkfd sweeps what the dead held only when somebody opens it next: no sign that a driver leaks.
        vram_used_bytes=sysfs.vram_used_bytes if simulated is None else lambda pci_address: None,
        refresh=refresh,
        sdma=settings.kernel_sdma,
    )
    left = Leftovers(figures)
    node = Node(
        sysfs,
        BookStore(settings.state_dir),
        files,
        counted,
        now_s=time.time,
        process_alive=process_alive,
        max_slices_per_partition=settings.max_slices_per_partition,
        modes=partitions,
        kfd_holder=kfd,
        leftovers=left,
    )
    watch = HealthWatch(
        node,
        built_in=[eyes],
        optional=_optional_checks(settings, kfd if simulated is not None or root == Path("/") else None),
        memory=StandingsFile(settings.run_dir / "health.json"),
        policy=_health_policy(settings),
        now_s=time.time,
    )
    metrics.health_checks = lambda: watch.sources
    preload = (gate,) if simulated is None else (gate, simulated.softkfd)
    return Parts(
        node,
        counted,
        metrics,
        preload,
        None if simulated is None else root,
        watch,
        kfd,
        whole,
        files,
        figures,
        left,
        *_containers(settings, node, caps),
    )


def _containers(settings: Settings, node: Node, caps: DmemCaps | None) -> tuple[Containers, ReportSocket]:
    processes = ProcContainers(settings.run_dir / "slices")
    containers = Containers(
        node,
        processes,
        ContainerRecord(settings.run_dir / "containers.json"),
        Images(GATE_IN_CONTAINER),
        caps,
        policy=ImagePolicy(settings.images_policy),
        allowance_bytes=settings.dmem_allowance_bytes,
        now_s=time.time,
    )
    return containers, ReportSocket(settings.run_dir / REPORTS, containers, processes.pid_of, now_s=time.monotonic)


def _optional_checks(settings: Settings, kfd: KfdChildren | None) -> list[HealthCheck]:
    """``kfd`` None: the child knows no other root than this machine's."""
    exporter = settings.health_exporter_socket
    # An exporter of this machine knows nothing of simulated GPUs, which may have the same addresses.
    asked = [] if exporter is None or settings.simulate else [ExporterHealth(exporter)]
    return [*([] if kfd is None else [kfd]), *asked]


def _health_policy(settings: Settings) -> Policy:
    return Policy(
        good_looks=settings.health_good_looks if settings.health_pulse_s else 0,
        unknown_grace_s=settings.health_unknown_grace_s,
        record_age_s=settings.health_record_age_s,
        correctable_per_hour=settings.health_correctable_per_hour,
    )


def _in_cluster(settings: Settings) -> bool:
    return bool(settings.kubelet_mode) or settings.kube_labels


def _kubelet(settings: Settings, parts: Parts) -> Kubelet:
    # gRPC takes 0.1 s and 28 MB: for those only who have a kubelet.
    from amdvgpud.kubernetes import Kubelet

    return Kubelet(
        settings,
        parts.node,
        parts.cdi,
        parts.partitions,
        parts.files.mountpoints,
        parts.metrics,
        gate=parts.preload[0],
        environment=os.environ,
    )


def _nothing() -> None:
    """A real machine's kfd/proc is up to date by itself."""


def _rules(settings: Settings) -> watchdog.Rules:
    return watchdog.Rules(
        watchdog.Policy(settings.watchdog_policy),
        settings.watchdog_allowance,
        settings.watchdog_after_s,
        settings.watchdog_grace_s,
    )


def _api_settings(settings: Settings) -> ApiSettings:
    return ApiSettings(
        socket_path=settings.run_dir / "api.sock",
        socket_group=settings.rest_socket_group,
        socket_mode=settings.rest_socket_mode,
        tcp=settings.rest_tcp,
        tcp_details=settings.rest_tcp_details,
        token_file=settings.rest_token_file,
    )


def rehearse(settings: Settings) -> None:
    """``Invalid`` for values that are well formed and that :func:`assemble` would refuse. Writes and opens nothing.

    An installation without a gate is no fault of the settings, so it is not looked for unless they name one.
    """
    if settings.simulate:
        parse_simulation(settings.simulate)
    if settings.library is not None and not settings.library.is_file():
        raise Invalid.field("library", f"{str(settings.library)!r} is no file")
    _api_settings(settings)
    if _in_cluster(settings) and importlib.util.find_spec("grpc") is None:
        field = "kubelet.mode" if settings.kubelet_mode else "kube.labels"
        raise Invalid.field(field, "needs gRPC, which is not here: install amdvgpud[kubernetes]")
    if "hami" in settings.kubelet_mode or settings.kube_labels:
        read_access(settings.kube_config, os.environ)
    CdiFile(
        settings.cdi_dir,
        run_dir=settings.run_dir,
        library=settings.library or INSTALLED_LIBRARY,
        kind=settings.cdi_kind,
        version_limit=settings.cdi_version_limit or None,
    )


def _gate(settings: Settings) -> Path:
    candidates = [settings.library] if settings.library else [INSTALLED_LIBRARY, _packaged("libamdvgpu.so")]
    if (found := next((path for path in candidates if path.is_file()), None)) is None:
        raise NotFound(
            f"there is no gate at {' or '.join(map(str, candidates))}, so no slice would be enforced: "
            "install libamdvgpu, or set 'library' to where it is"
        )
    return found


def _hook(settings: Settings, caps: DmemCaps | None) -> HookCall | None:
    """The hook as runtimes are to run it. One that is not installed is no fault: nothing depends on it but speed."""
    if not settings.hook_enabled:
        return None
    program = next((p for p in (INSTALLED_HOOK, _packaged("amdvgpu-hook")) if p.is_file()), INSTALLED_HOOK)
    arguments: list[str] = []
    if (socket_path := settings.run_dir / REPORTS) != Path("/run/amdvgpud") / REPORTS:
        arguments += ["--socket", str(socket_path)]
    if settings.images_policy != "show":
        arguments += ["--wait", str(WAIT_FOR_POLICY_MS)]
    elif caps is not None and caps.lack() is None:
        arguments += ["--wait", str(WAIT_FOR_CAP_MS)]
    return HookCall(program, (*arguments, *(["--require"] if settings.hook_required else [])))


def _packaged(name: str) -> Path:
    from amdvgpud import _abi  # the compiled module marks where this program's own libraries lie

    return Path(_abi.__file__).with_name(name)


def _process_of(pid: int) -> Process | None:
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
    ticks = start_ticks(pid)
    return None if ticks is None else Process(uid, ticks)


# ------------------------------------------------------------------------------------------------------- the daemon


class Daemon:
    """The eternal tasks, and the way in and out of them. Settings may be read again while it runs."""

    def __init__(self, settings: Settings, read_again: Callable[[], Settings], supervisor: Supervisor) -> None:
        self._settings = settings
        self._read_again = read_again
        self._supervisor = supervisor
        self._stop = asyncio.Event()
        self._parts = assemble(settings)
        self._kubelet = _kubelet(settings, self._parts) if _in_cluster(settings) else None
        self._guard = Guard(
            self._parts.node,
            self._parts.figures,
            ProcessEnder(settings.run_dir / "slices"),
            lambda: _rules(self._settings),
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
            _api_settings(s),
            version=__version__,
            run_dir=s.run_dir,
            process_of=_process_of,
            cdi_kind=s.cdi_kind,
            simulated=s.simulate or None,
            config=lambda: shown(self._settings),
            reload=self.reload,
            preload=self._parts.preload,
            guard=self._guard.view,
            environment={"SOFTKFD_ROOT": str(self._parts.simulated_root)} if self._parts.simulated_root else {},
        )

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
        await self._pulse()

    async def _pulses(self) -> None:
        while True:
            await asyncio.sleep(self._settings.health_pulse_s or self._settings.rescan_s)
            await self._pulse()

    async def _pulse(self) -> None:
        if not self._settings.health_pulse_s:
            return
        try:
            await self._parts.watch.pulse()
        except (AmdvgpuError, OSError) as error:
            log.warning(
                "A look at the GPUs failed, the next one is due in %g s: %s", self._settings.health_pulse_s, error
            )


async def _serve(settings: Settings, read_again: Callable[[], Settings]) -> None:
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


# ------------------------------------------------------------------------------------------------- the command line


class _JournalFormatter(logging.Formatter):
    """Lines for the journal: the priority that it sorts by in front, no time of our own (sd-daemon(3))."""

    _PRIORITY: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}

    def format(self, record: logging.LogRecord) -> str:
        return f"<{self._PRIORITY.get(record.levelno, 5)}>{super().format(record)}"


def _start_logging(level: str) -> None:
    handler = logging.StreamHandler()
    if "JOURNAL_STREAM" in os.environ:
        handler.setFormatter(_JournalFormatter("%(name)s: %(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _flags_of_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """One option for each setting, from the one table. What is not given is not passed, so other sources count."""
    for setting in reversed(list(SETTINGS.values())):
        names = [setting.flag, setting.key.replace(".", "__")]
        # Not click's own default: what is not given must not count as given.
        text = f"{setting.meaning}  [default: {json.dumps(setting.default)}]"
        command = click.option(*names, metavar=setting.form, default=None, help=text)(command)
    return click.option("--config", "file", type=click.Path(path_type=Path), help="Read this file, not the default.")(
        command
    )


def _settings(file: Path | None, flags: Mapping[str, str | None]) -> Settings:
    given = {key.replace("__", "."): text for key, text in flags.items() if text is not None}
    return read_settings(os.environ, given, file)


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="amdvgpud")
@_flags_of_settings
@click.pass_context
def cli(context: click.Context, /, file: Path | None, **flags: str | None) -> None:
    """Share the AMD GPUs of this machine: serve slices of them until told to stop.

    Each option is also a key of /etc/amdvgpud/amdvgpud.toml and a variable AMDVGPUD_<KEY>.
    """

    def read_again() -> Settings:
        return _settings(file, flags)

    context.obj = read_again
    if context.invoked_subcommand is None:
        settings = read_again()
        _start_logging(settings.log_level)
        asyncio.run(_serve(settings, read_again))


@cli.group()
def sim() -> None:
    """Simulated machines."""


@sim.command("models")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
def sim_models(output: str) -> None:
    """List the GPU models that --simulate knows; a value with '?' has no source."""
    rows = table_rows()
    if output == "json":
        click.echo(json.dumps(rows, indent=1))
        return
    widths = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    for row in [{key: key.upper() for key in widths}, *rows]:
        click.echo("  ".join(row[key].ljust(width) for key, width in widths.items()).rstrip())


@cli.group()
def config() -> None:
    """The configuration."""


@config.command("check")
@click.pass_obj
def config_check(read: Callable[[], Settings]) -> None:
    """Read all sources and say whether the daemon would start with them. Touches nothing that runs."""
    settings = read()
    rehearse(settings)
    changed = [key for key, origin in settings.origin.items() if origin != "default"]
    click.echo(f"The configuration is valid; not at their defaults: {', '.join(changed) or 'none'}.")


@config.command("show")
@click.option("--origin", is_flag=True, help="Say where each value came from.")
@click.pass_obj
def config_show(read: Callable[[], Settings], origin: bool) -> None:
    """Show each setting in force, as TOML."""
    settings = read()
    for key, value in shown(settings).items():
        line = f"{key} = {json.dumps(value)}"
        click.echo(f"{line}  # {settings.origin[key]}" if origin else line)


@cli.group()
def kube() -> None:
    """The Kubernetes cluster."""


@kube.command("withdraw")
@click.pass_obj
def kube_withdraw(read: Callable[[], Settings]) -> None:
    """Tell HAMi's scheduler that no GPU of this node is healthy: before the node goes for good.

    A daemon that runs writes the registration again, so stop it first. Pods that run are left alone.
    """
    from amdvgpud.kubernetes import withdraw

    settings = read()
    _start_logging(settings.log_level)
    name = asyncio.run(withdraw(settings, os.environ))
    click.echo(f"The GPUs of node {name} are withdrawn from HAMi's scheduler.")


@cli.group()
def cdi() -> None:
    """The CDI file."""


@cdi.command("refresh")
@click.option("--oneshot", is_flag=True, required=True, help="Do it once and end: there is no other way yet.")
@click.pass_obj
def cdi_refresh(read: Callable[[], Settings], oneshot: bool) -> None:
    """Bring the files of all stored slices and the CDI file up to date without a daemon.

    For those who want no daemon to run all the time: slices made while one ran are found again after a reboot.
    """
    settings = read()
    _start_logging(settings.log_level)

    async def refresh() -> None:
        lock = claim_machine(settings.run_dir)
        try:
            node = assemble(settings).node
            await node.start()
            status = node.view().cdi
        finally:
            os.close(lock)
        if status.error is not None:
            raise HostFailure(f"{status.path}: {status.error}")
        click.echo(f"{status.path}: {'written' if status.written else 'no slice, so no file'}")

    asyncio.run(refresh())


@cdi.command("drop-hooks")
@click.pass_obj
def cdi_drop_hooks(read: Callable[[], Settings]) -> None:
    """Take amdvgpu-hook out of the CDI file, as must be done before the program is removed.

    A runtime fails each start whose hook is missing. For removals of the package, after the daemon has been stopped:
    one that runs leaves the hook out by itself when it has gone, but only at its next look.
    """
    settings = read()
    path = CdiFile(settings.cdi_dir, run_dir=settings.run_dir, library=INSTALLED_LIBRARY, kind=settings.cdi_kind).path
    try:
        spec = parse_spec(path.read_bytes())
        replace_file(path, proven(without_hooks(spec)))
    except FileNotFoundError:
        click.echo(f"{path}: no slice, so no file")
        return
    except OSError as error:
        raise HostFailure(f"{path}: the hooks are still in it: {error}") from error
    click.echo(f"{path}: names no hook")


def main() -> None:
    """Entry point. Exit codes: 0 ended as asked, 1 refused by the machine or the state, 2 wrong words."""
    try:
        cli(prog_name="amdvgpud", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except AmdvgpuError as error:
        click.echo(f"amdvgpud: {error}", err=True)
        sys.exit(2 if error.code == "invalid" else 1)


if __name__ == "__main__":
    main()
