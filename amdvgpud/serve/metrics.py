"""/metrics: the node's picture as Prometheus text.

Owns the names (one table, :data:`METRICS`), the samples made from a snapshot, and the few counters that no snapshot
holds (:class:`Metrics`). Does no device I/O while it is scraped: usage is as of the last tick, the driver's own figures
as of the last :meth:`Metrics.sample`. A series ends with the slice it is about; what nobody knows is absent, never 0.

Labels carry identity and closed sets of words, never a value, a pid or a path; names that people give their workloads
are on ``amdvgpu_slice_info`` only. Sources: the Prometheus text format 0.0.4 and OpenMetrics 1.0.0.

The per-slice part is written here rather than by prometheus_client's writer: for 8 GPUs of 64 slices that one took 33
to 43 ms, most of it escaping the same labels again and again. Its counters and histograms are used, and its parsers
read the result in the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import prometheus_client
from prometheus_client.openmetrics import exposition as openmetrics_exposition

from amdvgpud.core import errors
from amdvgpud.core.health import Condition
from amdvgpud.core.model import Gpu, GpuId, Inventory, Slice, Usage, gpu_of
from amdvgpud.core.plan import capacities
from amdvgpud.guard import GuardView
from amdvgpud.node import NodeView
from amdvgpud.ports import CdiSpecs, CdiStatus, Sysfs
from amdvgpud.serve import kernel, views

CLASSIC: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

SLICE_STATES: Final = ("free", "held", "running", "lost")
_SHARE: Final = ("slice", "gpu_uuid", "partition")
_HTTP_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_WORK_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

Operation = Literal["create", "resize", "delete", "bind"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One name. ``unit`` is what the value counts; "" for a bare number. ``help`` says the rest."""

    name: str
    type: Literal["gauge", "counter", "histogram"]
    unit: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


METRICS: Final = (
    Metric("amdvgpu_build_info", "gauge", "", ("version", "python"), "1; what is running."),
    Metric(
        "amdvgpu_gpu_info",
        "gauge",
        "",
        (
            "gpu_uuid",
            "gpu_id",
            "pci_bdf",
            "model",
            "gfx_target",
            "numa_node",
            "compute_partition",
            "memory_partition",
            "driver",
        ),
        "1; what a GPU is. Join on gpu_uuid. gpu_id is its rank in KFD order.",
    ),
    Metric("amdvgpu_gpu_vram_total_bytes", "gauge", "bytes", ("gpu_uuid",), "VRAM of the GPU, as the driver says."),
    Metric(
        "amdvgpu_gpu_vram_used_bytes",
        "gauge",
        "bytes",
        ("gpu_uuid",),
        "VRAM in use by anybody, as the driver said at the last sample.",
    ),
    Metric("amdvgpu_gpu_vram_reserved_bytes", "gauge", "bytes", ("gpu_uuid",), "Sum of the VRAM quotas on the GPU."),
    Metric(
        "amdvgpu_gpu_vram_overcommit_ratio",
        "gauge",
        "ratio",
        ("gpu_uuid",),
        "VRAM promised by VRAM there is; above 1 only where oversubscription is switched on.",
    ),
    Metric(
        "amdvgpu_gpu_vram_oversubscription_ratio",
        "gauge",
        "ratio",
        ("gpu_uuid",),
        "How far VRAM may be promised; 1 is off.",
    ),
    Metric("amdvgpu_gpu_cordoned", "gauge", "", ("gpu_uuid",), "1 where the GPU takes no new slice."),
    Metric(
        "amdvgpu_gpu_healthy",
        "gauge",
        "",
        ("gpu_uuid",),
        "1 where the GPU's health lets it take new slices; absent where nobody looks.",
    ),
    Metric(
        "amdvgpu_gpu_health_state",
        "gauge",
        "",
        ("gpu_uuid", "state"),
        "1 at the state that holds: healthy, degraded, unhealthy, unknown.",
    ),
    Metric(
        "amdvgpu_gpu_health_transitions_total",
        "counter",
        "",
        ("gpu_uuid", "source"),
        "Changes of the state since the start, by who found it: pulse, check (the built-in look cannot run), uevent, "
        "smi, ras, retired_pages, pcie, exporter, override (a person).",
    ),
    Metric(
        "amdvgpu_health_check_success",
        "gauge",
        "",
        ("check",),
        "1 where a source of health answered at the last look: sysfs, kfd, exporter; absent where there is none such.",
    ),
    Metric("amdvgpu_gpu_compute_units", "gauge", "CUs", ("gpu_uuid",), "Compute units of the GPU."),
    Metric(
        "amdvgpu_gpu_compute_units_allocated",
        "gauge",
        "CUs",
        ("gpu_uuid",),
        "Compute units that slices have; one that is shared counts once.",
    ),
    Metric(
        "amdvgpu_gpu_slices",
        "gauge",
        "",
        ("gpu_uuid", "state"),
        "Slices on the GPU by state: free, held (leased), running (has processes), lost (its partition is gone).",
    ),
    Metric(
        "amdvgpu_gpu_outside_processes",
        "gauge",
        "",
        ("gpu_uuid",),
        "Processes in no slice that have VRAM of the GPU by the KFD, as of the last look.",
    ),
    Metric(
        "amdvgpu_gpu_vram_outside_bytes",
        "gauge",
        "bytes",
        ("gpu_uuid",),
        "VRAM that the KFD accounts to processes in no slice.",
    ),
    Metric("amdvgpu_gpus_unusable", "gauge", "", (), "AMD devices of the machine that cannot be handed out."),
    Metric(
        "amdvgpu_slice_info",
        "gauge",
        "",
        ("slice", "gpu_uuid", "partition", "owner"),
        "1; who holds the slice. Names of workloads are here only, and empty over TCP unless rest.tcp_details is on.",
    ),
    Metric("amdvgpu_slice_vram_limit_bytes", "gauge", "bytes", _SHARE, "VRAM quota of the slice on the GPU."),
    Metric("amdvgpu_slice_vram_used_bytes", "gauge", "bytes", _SHARE, "VRAM charged to the slice's ledger."),
    Metric("amdvgpu_slice_vram_peak_bytes", "gauge", "bytes", _SHARE, "Most VRAM charged at once."),
    Metric(
        "amdvgpu_slice_denials_total",
        "counter",
        "",
        (*_SHARE, "reason"),
        "Requests for VRAM that were refused; reason limit: over the quota.",
    ),
    Metric("amdvgpu_slice_denied_bytes_total", "counter", "bytes", _SHARE, "VRAM that was asked for and refused."),
    Metric("amdvgpu_slice_allocations_total", "counter", "", _SHARE, "VRAM allocations that were charged."),
    Metric("amdvgpu_slice_frees_total", "counter", "", _SHARE, "VRAM charges that were returned."),
    Metric(
        "amdvgpu_slice_reclaimed_bytes_total",
        "counter",
        "bytes",
        ("slice",),
        "Charges of dead processes that were returned to the slice.",
    ),
    Metric("amdvgpu_slice_compute_units", "gauge", "CUs", _SHARE, "Compute units that the slice was granted."),
    Metric(
        "amdvgpu_slice_compute_ratio",
        "gauge",
        "ratio",
        _SHARE,
        "Compute units that the slice was granted by those of the partition.",
    ),
    Metric("amdvgpu_slice_processes", "gauge", "", ("slice",), "Live processes in the slice's ledger."),
    Metric(
        "amdvgpu_slice_vram_driver_bytes",
        "gauge",
        "bytes",
        _SHARE,
        "VRAM that the kernel accounts to the slice's processes, as of its last look.",
    ),
    Metric(
        "amdvgpu_slice_vram_untracked_bytes",
        "gauge",
        "bytes",
        _SHARE,
        "VRAM that the kernel accounts to the slice's processes and the ledger does not have.",
    ),
    Metric(
        "amdvgpu_slice_vram_dmem_bytes",
        "gauge",
        "bytes",
        _SHARE,
        "VRAM that the kernel's dmem controller counts for the slice's containers, as of the last look; absent where "
        "it cannot be told, as with two slices of a GPU in one container.",
    ),
    Metric(
        "amdvgpu_slice_unmanaged_processes",
        "gauge",
        "",
        ("slice",),
        "Processes of the slice that have a GPU open without a slot in its ledger: their gate is not loaded.",
    ),
    Metric(
        "amdvgpu_slice_compute_units_occupied",
        "gauge",
        "CUs",
        _SHARE,
        "CUs that the waves in flight would fill, sampled; an estimate, and only where the kernel tells it (gfx9).",
    ),
    Metric(
        "amdvgpu_slice_evicted_seconds_total",
        "counter",
        "seconds",
        _SHARE,
        "Time for which queues of the slice's processes were evicted, for want of VRAM or of a turn.",
    ),
    Metric(
        "amdvgpu_slice_ledger_damaged", "gauge", "", ("slice",), "1 where the slice's ledger file cannot be believed."
    ),
    Metric(
        "amdvgpu_allocation_duration_seconds",
        "histogram",
        "seconds",
        ("operation", "result"),
        "Time that a change took: operation create, resize, delete, bind; result ok or failed.",
        _WORK_BUCKETS,
    ),
    Metric(
        "amdvgpu_allocation_failures_total",
        "counter",
        "",
        ("operation", "reason"),
        "Changes that were refused or failed: reason no_vram, no_cus, no_gpu, conflict, invalid, internal.",
    ),
    Metric(
        "amdvgpu_watchdog_findings_total",
        "counter",
        "",
        ("reason",),
        "Processes that went around their slice's gate for longer than watchdog.after_s: reason unmanaged (no slot in "
        "the ledger) or untracked (more than the slot says).",
    ),
    Metric(
        "amdvgpu_watchdog_signals_total",
        "counter",
        "",
        ("signal",),
        "Signals that such processes were sent: terminate or kill.",
    ),
    Metric("amdvgpu_leases", "gauge", "", (), "Leases that exist."),
    Metric("amdvgpu_cdi_devices", "gauge", "", ("kind",), "Devices in the CDI file."),
    Metric(
        "amdvgpu_cdi_writes_total",
        "counter",
        "",
        ("result",),
        "Publications of the CDI file: result written, unchanged (same slices on the same GPUs as before), failed.",
    ),
    Metric("amdvgpu_cdi_conflicts", "gauge", "", (), "Our CDI devices that another file of the machine names too."),
    Metric(
        "amdvgpu_cdi_last_write_timestamp_seconds",
        "gauge",
        "seconds",
        (),
        "Unix time of the last publication that did not fail.",
    ),
    Metric(
        "amdvgpu_kubelet_registrations_total",
        "counter",
        "",
        ("result",),
        "Attempts to register a resource with the kubelet, by result: ok, refused (by the kubelet), owned (another "
        "plugin has the name), failed.",
    ),
    Metric(
        "amdvgpu_kubelet_devices",
        "gauge",
        "",
        ("resource", "state"),
        "Devices that a registered resource showed to the kubelet last, by state: healthy, unhealthy.",
    ),
    Metric(
        "amdvgpu_kubelet_delivery",
        "gauge",
        "",
        ("delivery",),
        "1 at the way in which pods get their slices: cdi, nodes. /v1/system has the reason.",
    ),
    Metric(
        "amdvgpu_kubelet_allocate_duration_seconds",
        "histogram",
        "seconds",
        ("result",),
        "Time that the kubelet's Allocate took, by result: ok, refused (the pod is told why), failed.",
        _WORK_BUCKETS,
    ),
    Metric(
        "amdvgpu_reconcile_duration_seconds",
        "histogram",
        "seconds",
        (),
        "Time that a scan of the machine and its reconciliation took.",
        _WORK_BUCKETS,
    ),
    Metric(
        "amdvgpu_reconcile_last_success_timestamp_seconds",
        "gauge",
        "seconds",
        (),
        "Unix time of the last scan and reconciliation that did not fail.",
    ),
    Metric(
        "amdvgpu_collector_success",
        "gauge",
        "",
        ("collector",),
        "1 where the last sample worked; collector sysfs or kernel.",
    ),
    Metric("amdvgpu_collector_duration_seconds", "gauge", "seconds", ("collector",), "Time that the last sample took."),
    Metric(
        "amdvgpu_collector_last_success_timestamp_seconds",
        "gauge",
        "seconds",
        ("collector",),
        "Unix time of the last sample that worked.",
    ),
    Metric(
        "amdvgpu_uevents_total",
        "counter",
        "",
        ("subsystem", "action"),
        "Kernel events heard: subsystem drm, kfd, pci, platform; action add, remove, change, bind, unbind, move, "
        "online, offline, other; other and unreadable: one that could not be read, which costs a scan.",
    ),
    Metric("amdvgpu_ready", "gauge", "", (), "1 once the first scan is done."),
    Metric("amdvgpu_watchers", "gauge", "", (), "Clients that wait for events."),
    Metric(
        "amdvgpu_http_requests_total",
        "counter",
        "",
        ("method", "route", "code"),
        "HTTP requests by route template; route 'none' where no route matched.",
    ),
    Metric(
        "amdvgpu_http_request_duration_seconds",
        "histogram",
        "seconds",
        ("method", "route"),
        "Time to answer an HTTP request; waits and streams are left out.",
        _HTTP_BUCKETS,
    ),
)

HAMI_METRICS: Final = (
    Metric("hami_vgpumonitor_collect_success", "gauge", "", ("node",), "1 (HAMi's name)."),
    Metric(
        "hami_host_gpu_memory_used_bytes",
        "gauge",
        "bytes",
        ("node", "device_index", "device_uuid", "device_type"),
        "VRAM in use by anybody (HAMi's name for amdvgpu_gpu_vram_used_bytes).",
    ),
    Metric(
        "hami_host_gpu_utilization_ratio",
        "gauge",
        "per cent",
        ("node", "device_index", "device_uuid", "device_type"),
        "How busy the GPU is, 0 to 100 (HAMi's name and scale).",
    ),
    Metric(
        "hami_vgpu_memory_used_bytes",
        "gauge",
        "bytes",
        ("namespace", "pod", "container", "vdevice_index", "device_uuid"),
        "VRAM charged to a slice (HAMi's name); outside Kubernetes container is the slice's name.",
    ),
    Metric(
        "hami_vgpu_memory_limit_bytes",
        "gauge",
        "bytes",
        ("namespace", "pod", "container", "vdevice_index", "device_uuid"),
        "VRAM quota of a slice (HAMi's name); outside Kubernetes container is the slice's name.",
    ),
)
"""Added by ``[metrics] compat = ["hami"]``: HAMi's names, labels and scale, for its dashboards. How busy a GPU
is has no source here yet, so ``hami_host_gpu_utilization_ratio`` is absent."""

_BY_NAME: Final = {m.name: m for m in (*METRICS, *HAMI_METRICS)}
_ESCAPES: Final = {"\\": r"\\", "\n": r"\n", '"': r"\""}
_TO_ESCAPE: Final = re.compile(r'[\\\n"]')


# ------------------------------------------------------------------------------------------------------ the writer


def _value(text: str) -> str:
    return _TO_ESCAPE.sub(lambda m: _ESCAPES[m[0]], text)


def labels_text(names: Sequence[str], values: Sequence[str]) -> str:
    """``{a="x",b="y"}``, values escaped; nothing for no labels."""
    if not names:
        return ""
    return "{" + ",".join(f'{n}="{_value(v)}"' for n, v in zip(names, values, strict=True)) + "}"


class _Page:
    """The text under construction: families in the table's order, each whole."""

    def __init__(self, open_metrics: bool) -> None:
        self._open_metrics = open_metrics
        self._parts: list[str] = []

    def family(self, name: str, lines: Sequence[str]) -> None:
        """``lines`` are ``<labels> <value>`` without the name. No line, no family: what is absent is not mentioned."""
        if not lines:
            return
        metric = _BY_NAME[name]
        family = name.removesuffix("_total") if self._open_metrics and metric.type == "counter" else name
        head = f"# HELP {family} {metric.help}\n# TYPE {family} {metric.type}\n"
        if self._open_metrics and metric.unit and family.endswith("_" + metric.unit):
            head = f"# UNIT {family} {metric.unit}\n" + head
        self._parts.append(head + name + f"\n{name}".join(lines) + "\n")

    def add(self, text: str) -> None:
        self._parts.append(text)

    def text(self) -> str:
        return "".join(self._parts)


# ----------------------------------------------------------------------------------------------------- the counters


@dataclass(frozen=True, slots=True)
class _Sample:
    """What one :meth:`Metrics.sample` found."""

    vram_used_bytes: Mapping[GpuId, int]
    ok: bool
    duration_s: float


class Metrics:
    """The counters, the last sample, and the writer. One for a daemon; safe to count from other threads."""

    def __init__(
        self,
        sysfs: Sysfs,
        *,
        version: str,
        python: str,
        cdi_kind: str,
        compat: Iterable[str] = (),
        cluster_node: str = "",
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """``compat`` may hold ``"hami"``; ``cluster_node`` is the label ``node`` that HAMi's names have."""
        self._sysfs = sysfs
        self._build = labels_text(("version", "python"), (version, python))
        self._cdi_kind = cdi_kind
        self._hami = "hami" in set(compat)
        self._cluster_node = cluster_node
        self._now_s = now_s
        self._sample = _Sample({}, False, 0.0)
        self._sampled_s: float | None = None
        self._reconciled_s: float | None = None
        self.uevents: Mapping[tuple[str, str], int] = {}
        """Kernel events heard, by (subsystem, action); whoever hears them counts them here."""
        self.health_checks: Callable[[], Mapping[str, bool]] = dict
        """Whether each source of health answered at its last look; whoever puts the daemon together sets it."""
        self._cdi_written_s: float | None = None

        registry = prometheus_client.CollectorRegistry()
        self._registry = registry
        self._http_count = _counter("amdvgpu_http_requests_total", registry)
        self._http_time = _histogram("amdvgpu_http_request_duration_seconds", registry)
        self._operation_time = _histogram("amdvgpu_allocation_duration_seconds", registry)
        self._failures = _counter("amdvgpu_allocation_failures_total", registry)
        self._cdi_writes = _counter("amdvgpu_cdi_writes_total", registry)
        self._reconcile_time = _histogram("amdvgpu_reconcile_duration_seconds", registry)
        self._kubelet_registrations = _counter("amdvgpu_kubelet_registrations_total", registry)
        self._kubelet_allocate_time = _histogram("amdvgpu_kubelet_allocate_duration_seconds", registry)
        self._kubelet_devices: dict[str, Sequence[bool]] = {}
        self.kubelet_delivery: Callable[[], str] = str
        """The way in which pods get their slices; '' where no kubelet is served."""
        prometheus_client.ProcessCollector(registry=registry)

    # ------------------------------------------------------------------------------------------------- counting

    @contextlib.contextmanager
    def operation(self, operation: Operation) -> Iterator[None]:
        """Time what the context does, and count its failure by reason. The error goes on."""
        began_s = time.perf_counter()
        result = "failed"
        try:
            yield
            result = "ok"
        except errors.AmdvgpuError as error:
            self._failures.labels(operation, _reason(error)).inc()
            raise
        except asyncio.CancelledError:
            raise
        except Exception:
            self._failures.labels(operation, "internal").inc()
            raise
        finally:
            self._operation_time.labels(operation, result).observe(time.perf_counter() - began_s)

    @contextlib.contextmanager
    def reconcile(self) -> Iterator[None]:
        """Time a scan with its reconciliation (``with metrics.reconcile(): await node.rescan()``)."""
        began_s = time.perf_counter()
        try:
            yield
            self._reconciled_s = self._now_s()
        finally:
            self._reconcile_time.observe(time.perf_counter() - began_s)

    def request(self, method: str, route: str, code: int, duration_s: float | None) -> None:
        """Count a request. ``method`` and ``route`` must be of the route table; ``duration_s`` None: a wait."""
        self._http_count.labels(method, route, str(code)).inc()
        if duration_s is not None:
            self._http_time.labels(method, route).observe(duration_s)

    def cdi_published(self, result: Literal["written", "unchanged", "failed"]) -> None:
        self._cdi_writes.labels(result).inc()
        if result != "failed":
            self._cdi_written_s = self._now_s()

    def kubelet_registration(self, result: Literal["ok", "refused", "owned", "failed"]) -> None:
        self._kubelet_registrations.labels(result).inc()

    def kubelet_allocation(self, result: Literal["ok", "refused", "failed"], duration_s: float) -> None:
        self._kubelet_allocate_time.labels(result).observe(duration_s)

    def kubelet_devices(self, resource: str, healthy: Sequence[bool] | None) -> None:
        """What the kubelet was last told of ``resource``; None: it is not registered any more."""
        if healthy is None:
            self._kubelet_devices.pop(resource, None)
        else:
            self._kubelet_devices[resource] = healthy

    # ------------------------------------------------------------------------------------------------- sampling

    async def sample(self, inventory: Inventory) -> None:
        """Ask the driver for its own figures, in a thread. Call it once a period; scrapes show what it found."""
        self._sample = await asyncio.to_thread(self._sampled, inventory.gpus)
        if self._sample.ok:
            self._sampled_s = self._now_s()

    def _sampled(self, gpus: Sequence[Gpu]) -> _Sample:
        began_s = time.perf_counter()
        found: dict[GpuId, int] = {}
        ok = True
        for gpu in gpus:
            try:
                used_bytes = self._sysfs.vram_used_bytes(gpu.pci_address)
            except OSError:
                used_bytes, ok = None, False
            if used_bytes is not None:
                found[gpu.id] = used_bytes
        return _Sample(found, ok, time.perf_counter() - began_s)

    @property
    def vram_used_bytes(self) -> Mapping[GpuId, int]:
        """The driver's figures of the last sample; a GPU without one is not in it."""
        return self._sample.vram_used_bytes

    # -------------------------------------------------------------------------------------------------- writing

    def render(
        self, view: NodeView, *, open_metrics: bool, details: bool, watchers: int = 0, seen: GuardView | None = None
    ) -> bytes:
        """The whole answer. ``details``: holders' texts are shown. ``seen``: what the kernel says of who uses what."""
        page = _Page(open_metrics)
        page.family("amdvgpu_build_info", [f"{self._build} 1"])
        self._gpus(page, view)
        self._slices(page, view, details)
        seen = seen or GuardView()
        for name, lines in kernel.families(view, seen):
            page.family(name, lines)
        self._daemon(page, view, watchers, seen)
        if self._hami:
            self._hami_names(page, view)
        write = openmetrics_exposition.generate_latest if open_metrics else prometheus_client.generate_latest
        page.add(_without_created(write(self._registry).decode()))
        return page.text().encode()

    def _gpus(self, page: _Page, view: NodeView) -> None:
        gpus = view.inventory.gpus
        uuid = {g.id: labels_text(("gpu_uuid",), (g.id,)) for g in gpus}
        info = _BY_NAME["amdvgpu_gpu_info"].labels
        page.family(
            "amdvgpu_gpu_info",
            [
                labels_text(
                    info,
                    (
                        g.id,
                        str(g.index),
                        g.pci_address,
                        g.product_name,
                        g.gfx_target,
                        "" if g.numa_node is None else str(g.numa_node),
                        g.compute_partition or "",
                        g.memory_partition or "",
                        view.inventory.driver_version or "",
                    ),
                )
                + " 1"
                for g in gpus
            ],
        )
        capacity = capacities(view.book, view.inventory)
        reserved = {g.id: sum(capacity[p.id].vram_promised_bytes for p in g.partitions) for g in gpus}
        used = self._sample.vram_used_bytes
        page.family("amdvgpu_gpu_vram_total_bytes", [f"{uuid[g.id]} {g.vram_bytes}" for g in gpus])
        page.family("amdvgpu_gpu_vram_used_bytes", [f"{uuid[g.id]} {used[g.id]}" for g in gpus if g.id in used])
        page.family("amdvgpu_gpu_vram_reserved_bytes", [f"{uuid[g.id]} {reserved[g.id]}" for g in gpus])
        page.family(
            "amdvgpu_gpu_vram_overcommit_ratio",
            [f"{uuid[g.id]} {reserved[g.id] / g.vram_bytes}" for g in gpus if g.vram_bytes],
        )
        ratios = view.book.oversubscription
        page.family("amdvgpu_gpu_vram_oversubscription_ratio", [f"{uuid[g.id]} {ratios.get(g.id, 1.0)}" for g in gpus])
        cordoned = view.book.cordoned
        page.family("amdvgpu_gpu_cordoned", [f"{uuid[g.id]} {int(g.id in cordoned)}" for g in gpus])
        health = {g.id: view.health[g.id] for g in gpus if g.id in view.health}
        page.family("amdvgpu_gpu_healthy", [f"{uuid[gpu]} {int(h.placeable)}" for gpu, h in health.items()])
        page.family(
            "amdvgpu_gpu_health_state",
            [
                f"{labels_text(('gpu_uuid', 'state'), (gpu, state))} {int(h.condition is state)}"
                for gpu, h in health.items()
                for state in Condition
            ],
        )
        page.family(
            "amdvgpu_gpu_health_transitions_total",
            [
                f"{labels_text(('gpu_uuid', 'source'), key)} {n}"
                for key, n in sorted(view.health_changes.items())
                if key[0] in health
            ],
        )
        page.family("amdvgpu_gpu_compute_units", [f"{uuid[g.id]} {g.cu_count}" for g in gpus])
        page.family(
            "amdvgpu_gpu_compute_units_allocated",
            [f"{uuid[g.id]} {sum(capacity[p.id].cus_allocated for p in g.partitions)}" for g in gpus],
        )
        count = {(g.id, state): 0 for g in gpus for state in SLICE_STATES}
        for item, state, _ in views.states(view):
            for gpu_id in {gpu_of(s.partition) for s in item.shares}:
                if (gpu_id, state) in count:
                    count[gpu_id, state] += 1
        page.family(
            "amdvgpu_gpu_slices",
            [f"{labels_text(('gpu_uuid', 'state'), key)} {n}" for key, n in count.items()],
        )
        page.family("amdvgpu_gpus_unusable", [f" {len(view.inventory.unusable)}"])

    def _slices(self, page: _Page, view: NodeView, details: bool) -> None:
        partitions = {p.id: p for p in view.inventory.partitions}
        holders = {lease.slice: lease.holder.text for lease in view.book.leases.values()} if details else {}
        own = (m.name for m in METRICS if m.name.startswith("amdvgpu_slice_") and m.name not in kernel.NAMES)
        one: dict[str, list[str]] = {name: [] for name in own}
        (
            info, limit, used, peak, denials, denied, allocations, frees, reclaimed, units, ratio, processes, damaged
        ) = one.values()  # fmt: skip
        for item in sorted(view.book.slices.values(), key=lambda s: s.name):
            usage = view.usage.get(item.name) or Usage(item.name)
            by_gpu_id = {g.kfd_gpu_id: g for g in usage.gpus}
            name = f'{{slice="{item.name}"}}'
            for share in item.shares:
                gpu_id, _, index = share.partition.rpartition("/")
                inner = f'{{slice="{item.name}",gpu_uuid="{gpu_id}",partition="{index}"'
                labels = inner + "} "
                info.append(f'{inner},owner="{_value(holders.get(item.name, ""))}"}} 1')
                limit.append(f"{labels}{share.vram_bytes}")
                units.append(f"{labels}{share.granted_cus}")
                partition = partitions.get(share.partition)
                if partition is None:
                    continue  # lost: promised still, but nobody can say what is used
                ratio.append(f"{labels}{share.granted_cus / partition.cu_count}")
                seen = by_gpu_id.get(partition.kfd_gpu_id)
                used.append(f"{labels}{seen.used_bytes if seen else 0}")
                peak.append(f"{labels}{seen.peak_bytes if seen else 0}")
                denials.append(f'{inner},reason="limit"}} {seen.denials if seen else 0}')
                denied.append(f"{labels}{seen.denied_bytes if seen else 0}")
                allocations.append(f"{labels}{seen.allocations if seen else 0}")
                frees.append(f"{labels}{seen.frees if seen else 0}")
            reclaimed.append(f"{name} {usage.reclaimed_bytes}")
            processes.append(f"{name} {len(usage.processes)}")
            damaged.append(f"{name} {int(usage.damaged is not None)}")
        for metric, lines in one.items():
            page.family(metric, lines)

    def _daemon(self, page: _Page, view: NodeView, watchers: int, seen: GuardView) -> None:
        live = len(view.book.slices) - len(view.lost) if view.cdi.written else 0
        page.family("amdvgpu_leases", [f" {len(view.book.leases)}"])
        page.family("amdvgpu_cdi_devices", [f"{labels_text(('kind',), (self._cdi_kind,))} {live}"])
        page.family("amdvgpu_cdi_conflicts", [f" {len(view.cdi.conflicts)}"])
        page.family("amdvgpu_cdi_last_write_timestamp_seconds", _time(self._cdi_written_s))
        page.family("amdvgpu_reconcile_last_success_timestamp_seconds", _time(self._reconciled_s))
        page.family(
            "amdvgpu_kubelet_devices",
            [
                f"{labels_text(('resource', 'state'), (name, state))} {healthy.count(state == 'healthy')}"
                for name, healthy in sorted(self._kubelet_devices.items())
                for state in ("healthy", "unhealthy")
            ],
        )
        way = self.kubelet_delivery()
        page.family("amdvgpu_kubelet_delivery", [f"{labels_text(('delivery',), (way,))} 1"] if way else [])
        sysfs, by_kernel = '{collector="sysfs"}', '{collector="kernel"}'
        looks = (
            [(sysfs, self._sample.ok, self._sample.duration_s)] if self._sampled_s or self._sample.duration_s else []
        )
        if seen.looked:
            looks.append((by_kernel, seen.picture.processes is not None, seen.duration_s))
        page.family("amdvgpu_collector_success", [f"{labels} {int(ok)}" for labels, ok, _ in looks])
        page.family("amdvgpu_collector_duration_seconds", [f"{labels} {took_s}" for labels, _, took_s in looks])
        page.family(
            "amdvgpu_collector_last_success_timestamp_seconds",
            [*_time(self._sampled_s, sysfs), *_time(seen.last_success_s, by_kernel)],
        )
        page.family(
            "amdvgpu_health_check_success",
            [f"{labels_text(('check',), (name,))} {int(ok)}" for name, ok in sorted(self.health_checks().items())],
        )
        page.family(
            "amdvgpu_uevents_total",
            [f"{labels_text(('subsystem', 'action'), key)} {n}" for key, n in sorted(self.uevents.items())],
        )
        page.family("amdvgpu_ready", [f" {int(view.ready)}"])
        page.family("amdvgpu_watchers", [f" {watchers}"])

    def _hami_names(self, page: _Page, view: NodeView) -> None:
        host = _BY_NAME["hami_host_gpu_memory_used_bytes"].labels
        guest = _BY_NAME["hami_vgpu_memory_used_bytes"].labels
        partitions = {p.id: p for p in view.inventory.partitions}
        page.family(
            "hami_vgpumonitor_collect_success", [f"{labels_text(('node',), (self._cluster_node,))} {int(view.ready)}"]
        )
        page.family(
            "hami_host_gpu_memory_used_bytes",
            [
                f"{labels_text(host, (self._cluster_node, str(g.index), g.id, _hami_type(g)))} {used}"
                for g in view.inventory.gpus
                if (used := self._sample.vram_used_bytes.get(g.id)) is not None
            ],
        )
        used_lines, limit_lines = [], []
        for item in sorted(view.book.slices.values(), key=lambda s: s.name):
            usage = view.usage.get(item.name) or Usage(item.name)
            for index, share in enumerate(item.shares):
                labels = labels_text(guest, ("", "", item.name, str(index), gpu_of(share.partition)))
                limit_lines.append(f"{labels} {share.vram_bytes}")
                if (partition := partitions.get(share.partition)) is not None:
                    used_lines.append(f"{labels} {usage.used_bytes(partition.kfd_gpu_id)}")
        page.family("hami_vgpu_memory_used_bytes", used_lines)
        page.family("hami_vgpu_memory_limit_bytes", limit_lines)


class CountedCdi:
    """A CdiSpecs that counts what another one publishes. Same slices on the same GPUs as before: ``unchanged``."""

    def __init__(self, inner: CdiSpecs, metrics: Metrics) -> None:
        self._inner = inner
        self._metrics = metrics
        self._last: tuple[tuple[Slice, ...], Inventory] | None = None

    def publish(self, slices: Sequence[Slice], inventory: Inventory) -> CdiStatus:
        status = self._inner.publish(slices, inventory)
        now = tuple(slices), inventory
        if status.error is not None:
            self._metrics.cdi_published("failed")
        else:
            self._metrics.cdi_published("unchanged" if now == self._last else "written")
            self._last = now
        return status

    def render(self, slices: Sequence[Slice], inventory: Inventory) -> dict[str, object]:
        return self._inner.render(slices, inventory)

    def status(self) -> CdiStatus:
        return self._inner.status()


def _reason(error: errors.AmdvgpuError) -> str:
    if isinstance(error, errors.NoRoom):
        return error.reason
    if isinstance(error, errors.Conflict | errors.Stale):
        return "conflict"
    return "invalid" if isinstance(error, errors.Invalid | errors.NotFound) else "internal"


def _time(unix_s: float | None, labels: str = "") -> list[str]:
    return [] if unix_s is None else [f"{labels} {unix_s}"]


def _hami_type(gpu: Gpu) -> str:
    # HAMi's own figures depend on the type beginning with AMD, and its lists cannot hold these three characters.
    name = gpu.product_name if gpu.product_name.upper().startswith("AMD") else f"AMD {gpu.product_name}"
    return re.sub("[,:;]", " ", name)


def _counter(name: str, registry: prometheus_client.CollectorRegistry) -> prometheus_client.Counter:
    metric = _BY_NAME[name]
    return prometheus_client.Counter(name, metric.help, metric.labels, registry=registry)


def _histogram(name: str, registry: prometheus_client.CollectorRegistry) -> prometheus_client.Histogram:
    metric = _BY_NAME[name]
    return prometheus_client.Histogram(name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)


def _without_created(text: str) -> str:
    """``text`` without the ``_created`` samples; prometheus_client's switch for them is one for the whole process."""
    kept = [line for line in text.splitlines(keepends=True) if "_created" not in line]
    return "".join(kept)
