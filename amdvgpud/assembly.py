"""All parts put together: from the settings to one Node with its adapters around it.

Owns who is given what. Nothing is read, locked or opened here but a simulated machine's tree, which is built.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from amdvgpud import __version__
from amdvgpud.containers import Containers, ImagePolicy
from amdvgpud.core import watchdog
from amdvgpud.core.caps import WAIT_FOR_CAP_MS
from amdvgpud.core.errors import Invalid, NotFound
from amdvgpud.core.health import Policy
from amdvgpud.core.model import Inventory
from amdvgpud.guard import Leftovers
from amdvgpud.host import amdsmi
from amdvgpud.host.cdi import GATE_IN_CONTAINER, CdiFile, HookCall, SimulatedDevices
from amdvgpud.host.cdi_partitions import WithPartitions
from amdvgpud.host.cgroup import DmemCaps, TreeFiles, dmem_bytes
from amdvgpud.host.containers import ContainerRecord, ProcContainers
from amdvgpud.host.health import StandingsFile, SysfsHealth
from amdvgpud.host.image import Images
from amdvgpud.host.kfd import KernelFigures
from amdvgpud.host.ledger import LedgerFiles
from amdvgpud.host.partition import PartitionFiles
from amdvgpud.host.procs import process_alive, start_ticks
from amdvgpud.host.runtime_config import read_cdi_words
from amdvgpud.host.smi import KfdChildren
from amdvgpud.host.store import BookStore
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.node import Node
from amdvgpud.ports import HealthCheck
from amdvgpud.serve.endpoints import Process
from amdvgpud.serve.exporter import ExporterHealth
from amdvgpud.serve.kube.api import read_access
from amdvgpud.serve.metrics import CountedCdi, Metrics
from amdvgpud.serve.reports import ReportSocket
from amdvgpud.serve.rest import ApiSettings
from amdvgpud.settings import Settings
from amdvgpud.sim.driver import SimulatedDriver
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree
from amdvgpud.watch import HealthWatch

if TYPE_CHECKING:
    from amdvgpud.kubernetes import Kubelet

log = logging.getLogger(__name__)

INSTALLED_HOOK: Final = Path("/usr/lib/amdvgpu/amdvgpu-hook")
"""What container runtimes run; on the host, so that a daemon in a container names the host's."""

INSTALLED_LIBRARY: Final = Path("/usr/lib/amdvgpu/libamdvgpu.so")
"""Where the packages put the gate; replaced there by rename on an upgrade, so running programs keep theirs."""

REPORTS: Final = "report.sock"
"""Below run_dir; the hook's own default has run_dir's."""

WAIT_FOR_POLICY_MS: Final = 5000
"""How long a container's start may wait where images.policy may refuse it, or hook.required asks for our word. What is
not said by then is a no, so it is long: a start that fails for want of an answer is a fault of ours, and one that goes
on would be a hole. Below :data:`HOOK_TIMEOUT_S`, so that the reason said is the hook's and not the runtime's."""


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
        # Where containers get it from: a daemon in one itself names the host's, as with the gate.
        softkfd = INSTALLED_LIBRARY.with_name("libsoftkfd.so")
        simulated = SimulatedDevices(root, softkfd if softkfd.is_file() else _packaged(softkfd.name))
    gate = _gate(settings)
    tree = TreeFiles()
    caps = DmemCaps(tree, delegate=settings.dmem_delegate)
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
        hook=hook_call(settings, caps if settings.dmem_enabled else None),
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
        dmem_bytes=lambda cgroup: dmem_bytes(tree, cgroup),
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


def _containers(settings: Settings, node: Node, caps: DmemCaps) -> tuple[Containers, ReportSocket]:
    processes = ProcContainers(settings.run_dir / "slices")
    containers = Containers(
        node,
        processes,
        ContainerRecord(settings.run_dir / "containers.json"),
        Images(GATE_IN_CONTAINER),
        caps,
        capping=settings.dmem_enabled,
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


def in_cluster(settings: Settings) -> bool:
    return bool(settings.kubelet_mode) or settings.kube_labels


def kubelet_of(settings: Settings, parts: Parts) -> Kubelet:
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
        find=parts.containers.find,
        environment=os.environ,
        read_cdi_words=read_cdi_words,
    )


def _nothing() -> None:
    """A real machine's kfd/proc is up to date by itself."""


def rules_of(settings: Settings) -> watchdog.Rules:
    return watchdog.Rules(
        watchdog.Policy(settings.watchdog_policy),
        settings.watchdog_allowance,
        settings.watchdog_after_s,
        settings.watchdog_grace_s,
    )


def api_settings(settings: Settings) -> ApiSettings:
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
    api_settings(settings)
    if in_cluster(settings) and importlib.util.find_spec("grpc") is None:
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


def hook_call(settings: Settings, caps: DmemCaps | None) -> HookCall | None:
    """The hook as runtimes are to run it. One that is not installed is no fault: nothing depends on it but speed."""
    if not settings.hook_enabled:
        return None
    program = next((p for p in (INSTALLED_HOOK, _packaged("amdvgpu-hook")) if p.is_file()), INSTALLED_HOOK)
    arguments: list[str] = []
    if (socket_path := settings.run_dir / REPORTS) != Path("/run/amdvgpud") / REPORTS:
        arguments += ["--socket", str(socket_path)]
    judged = settings.images_policy != "show"
    if judged or settings.hook_required:
        arguments += ["--wait", str(WAIT_FOR_POLICY_MS), *(["--judged"] if judged else [])]
    elif caps is not None and caps.lack() is None:
        arguments += ["--wait", str(WAIT_FOR_CAP_MS)]
    return HookCall(program, (*arguments, *(["--require"] if settings.hook_required else [])))


def _packaged(name: str) -> Path:
    from amdvgpud import _abi  # the compiled module marks where this program's own libraries lie

    return Path(_abi.__file__).with_name(name)


def process_of(pid: int) -> Process | None:
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
    ticks = start_ticks(pid)
    return None if ticks is None else Process(uid, ticks)
