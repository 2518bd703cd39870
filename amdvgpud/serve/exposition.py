"""What may stand on /metrics, and how it is written: one table of names, and the page of a scrape.

Sources: the Prometheus text format 0.0.4 and OpenMetrics 1.0.0. Labels carry identity and closed sets of words, never a
value, a pid or a path; names that people give their workloads are on ``amdvgpu_slice_info`` only.

Written here rather than by prometheus_client's writer: for 8 GPUs of 64 slices that one took 33 to 43 ms, most of it
escaping the same labels again and again. Its parsers read the result in the tests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

CLASSIC: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_SHARE: Final = ("slice", "gpu_uuid", "partition")
_HTTP_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_WORK_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


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
    Metric(
        "amdvgpu_gpu_temperature_celsius",
        "gauge",
        "celsius",
        ("gpu_uuid", "sensor"),
        "Temperature at the last sample, by the driver's sensors (edge, junction, mem); absent of a GPU that may sleep "
        "when idle (its power/control is auto), which reading would keep awake.",
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
    Metric(
        "amdvgpu_gpu_gone",
        "gauge",
        "",
        ("gpu_uuid",),
        "1 for each GPU that was here, since the daemon's start or as slices say that are cut from it, and is not.",
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

BY_NAME: Final = {m.name: m for m in (*METRICS, *HAMI_METRICS)}
_ESCAPES: Final = {"\\": r"\\", "\n": r"\n", '"': r"\""}
_TO_ESCAPE: Final = re.compile(r'[\\\n"]')


# ------------------------------------------------------------------------------------------------------ the writer


def escaped(text: str) -> str:
    return _TO_ESCAPE.sub(lambda m: _ESCAPES[m[0]], text)


def labels_text(names: Sequence[str], values: Sequence[str]) -> str:
    """``{a="x",b="y"}``, values escaped; nothing for no labels."""
    if not names:
        return ""
    return "{" + ",".join(f'{n}="{escaped(v)}"' for n, v in zip(names, values, strict=True)) + "}"


class Page:
    """The text under construction: families in the table's order, each whole."""

    def __init__(self, open_metrics: bool) -> None:
        self._open_metrics = open_metrics
        self._parts: list[str] = []

    def family(self, name: str, lines: Sequence[str]) -> None:
        """``lines`` are ``<labels> <value>`` without the name. No line, no family: what is absent is not mentioned."""
        if not lines:
            return
        metric = BY_NAME[name]
        family = name.removesuffix("_total") if self._open_metrics and metric.type == "counter" else name
        head = f"# HELP {family} {metric.help}\n# TYPE {family} {metric.type}\n"
        if self._open_metrics and metric.unit and family.endswith("_" + metric.unit):
            head = f"# UNIT {family} {metric.unit}\n" + head
        self._parts.append(head + name + f"\n{name}".join(lines) + "\n")

    def add(self, text: str) -> None:
        self._parts.append(text)

    def text(self) -> str:
        return "".join(self._parts)
