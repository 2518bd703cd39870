"""The part of /metrics that comes from the kernel: what its last look found, as lines of each family.

Owns which figure is which series. Names, helps and the page are :mod:`amdvgpud.serve.exposition`'s. A figure that the
kernel does not give has no series, and a slice's series end with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from amdvgpud.core.caps import counted_bytes
from amdvgpud.core.truth import Comparison
from amdvgpud.guard import GuardView
from amdvgpud.node import NodeView

NAMES: Final = frozenset(
    {
        "amdvgpu_slice_vram_driver_bytes",
        "amdvgpu_slice_vram_untracked_bytes",
        "amdvgpu_slice_vram_dmem_bytes",
        "amdvgpu_slice_unmanaged_processes",
        "amdvgpu_slice_compute_units_occupied",
        "amdvgpu_slice_evicted_seconds_total",
        "amdvgpu_gpu_outside_processes",
        "amdvgpu_gpu_vram_outside_bytes",
        "amdvgpu_watchdog_findings_total",
        "amdvgpu_watchdog_signals_total",
    }
)


def families(view: NodeView, seen: GuardView) -> Iterator[tuple[str, list[str]]]:
    """Each of :data:`NAMES` with its lines, which are ``<labels> <value>``; none where nothing is known."""
    lines: dict[str, list[str]] = {name: [] for name in sorted(NAMES)}
    if seen.comparison is not None:
        _slices(lines, seen.comparison)
        _strangers(lines, view, seen.comparison)
    for name, item in sorted(view.book.slices.items()):
        for share in item.shares:
            held = counted_bytes(name, share.partition, view.containers, view.book, seen.picture.dmem_bytes)
            if held is not None:
                lines["amdvgpu_slice_vram_dmem_bytes"].append(f"{_share(name, share.partition)} {held}")
    for (name, partition), seconds in sorted(seen.evicted_s.items()):
        lines["amdvgpu_slice_evicted_seconds_total"].append(f"{_share(name, partition)} {seconds}")
    for reason, count in seen.findings.items():
        lines["amdvgpu_watchdog_findings_total"].append(f'{{reason="{reason}"}} {count}')
    for step, count in seen.signals.items():
        lines["amdvgpu_watchdog_signals_total"].append(f'{{signal="{step}"}} {count}')
    yield from lines.items()


def _slices(lines: dict[str, list[str]], seen: Comparison) -> None:
    for name, truth in sorted(seen.slices.items()):
        for partition, gpu in truth.gpus.items():
            labels = _share(name, partition)
            for metric, value in (
                ("amdvgpu_slice_vram_driver_bytes", gpu.driver_bytes),
                ("amdvgpu_slice_vram_untracked_bytes", gpu.untracked_bytes),
                ("amdvgpu_slice_compute_units_occupied", gpu.compute_units_occupied),
            ):
                if value is not None:
                    lines[metric].append(f"{labels} {value}")
        if truth.gated:
            lines["amdvgpu_slice_unmanaged_processes"].append(f'{{slice="{name}"}} {len(truth.unmanaged)}')


def _strangers(lines: dict[str, list[str]], view: NodeView, seen: Comparison) -> None:
    for gpu in view.inventory.gpus:
        held = [
            sum(n for at, n in process.driver_bytes.items() if at in {p.id for p in gpu.partitions})
            for process in seen.strangers
        ]
        labels = f'{{gpu_uuid="{gpu.id}"}}'
        lines["amdvgpu_gpu_outside_processes"].append(f"{labels} {sum(n > 0 for n in held)}")
        lines["amdvgpu_gpu_vram_outside_bytes"].append(f"{labels} {sum(held)}")


def _share(name: str, partition: str) -> str:
    gpu, _, index = partition.rpartition("/")
    return f'{{slice="{name}",gpu_uuid="{gpu}",partition="{index}"}}'
