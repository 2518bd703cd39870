"""/metrics: the node's picture as Prometheus text.

Owns the samples made from a snapshot, and the few counters that no snapshot holds (:class:`Metrics`). Names and text
are :mod:`amdvgpud.serve.exposition`'s. Does no device I/O while it is scraped: usage is as of the last tick, the
driver's own figures as of the last :meth:`Metrics.sample`. A series ends with the slice it is about; what nobody knows
is absent, never 0. What is counted here, prometheus_client counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from amdvgpud.serve.exposition import BY_NAME, METRICS, Page, escaped, labels_text

SLICE_STATES: Final = ("free", "held", "running", "lost")

Operation = Literal["create", "resize", "delete", "bind"]


@dataclass(frozen=True, slots=True)
class _Sample:
    """What one :meth:`Metrics.sample` found."""

    vram_used_bytes: Mapping[GpuId, int]
    ok: bool
    duration_s: float
    temperatures_c: Mapping[GpuId, Mapping[str, float]] = field(default_factory=dict)


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
        temperatures_c: dict[GpuId, Mapping[str, float]] = {}
        ok = True
        for gpu in gpus:
            try:
                used_bytes = self._sysfs.vram_used_bytes(gpu.pci_address)
                temperatures_c[gpu.id] = self._sysfs.temperatures_c(gpu.pci_address)
            except OSError:
                used_bytes, ok = None, False
            if used_bytes is not None:
                found[gpu.id] = used_bytes
        return _Sample(found, ok, time.perf_counter() - began_s, temperatures_c)

    @property
    def vram_used_bytes(self) -> Mapping[GpuId, int]:
        """The driver's figures of the last sample; a GPU without one is not in it."""
        return self._sample.vram_used_bytes

    @property
    def temperatures_c(self) -> Mapping[GpuId, Mapping[str, float]]:
        """By GPU and sensor, as of the last sample."""
        return self._sample.temperatures_c

    # -------------------------------------------------------------------------------------------------- writing

    def render(
        self, view: NodeView, *, open_metrics: bool, details: bool, watchers: int = 0, seen: GuardView | None = None
    ) -> bytes:
        """The whole answer. ``details``: holders' texts are shown. ``seen``: what the kernel says of who uses what."""
        page = Page(open_metrics)
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

    def _gpus(self, page: Page, view: NodeView) -> None:
        gpus = view.inventory.gpus
        uuid = {g.id: labels_text(("gpu_uuid",), (g.id,)) for g in gpus}
        info = BY_NAME["amdvgpu_gpu_info"].labels
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
        page.family(
            "amdvgpu_gpu_temperature_celsius",
            [
                f"{labels_text(('gpu_uuid', 'sensor'), (g.id, sensor))} {degrees:g}"
                for g in gpus
                for sensor, degrees in self._sample.temperatures_c.get(g.id, {}).items()
            ],
        )
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
        page.family("amdvgpu_gpu_gone", [f'{{gpu_uuid="{gone.id}"}} 1' for gone in view.gone])
        page.family("amdvgpu_gpus_unusable", [f" {len(view.inventory.unusable)}"])

    def _slices(self, page: Page, view: NodeView, details: bool) -> None:
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
                info.append(f'{inner},owner="{escaped(holders.get(item.name, ""))}"}} 1')
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

    def _daemon(self, page: Page, view: NodeView, watchers: int, seen: GuardView) -> None:
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

    def _hami_names(self, page: Page, view: NodeView) -> None:
        host = BY_NAME["hami_host_gpu_memory_used_bytes"].labels
        guest = BY_NAME["hami_vgpu_memory_used_bytes"].labels
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
    metric = BY_NAME[name]
    return prometheus_client.Counter(name, metric.help, metric.labels, registry=registry)


def _histogram(name: str, registry: prometheus_client.CollectorRegistry) -> prometheus_client.Histogram:
    metric = BY_NAME[name]
    return prometheus_client.Histogram(name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)


def _without_created(text: str) -> str:
    """``text`` without the ``_created`` samples; prometheus_client's switch for them is one for the whole process."""
    kept = [line for line in text.splitlines(keepends=True) if "_created" not in line]
    return "".join(kept)
