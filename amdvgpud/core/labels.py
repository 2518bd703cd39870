"""Labels of a cluster node that say what GPUs it has, under the names that AMD's node labeller writes.

A kind of label (``cu-count``) with one value on all GPUs is ``amd.com/gpu.cu-count=304``; with several, each is a label
of its own that counts: ``amd.com/gpu.cu-count.304=8``. The old form ``beta.amd.com/gpu.cu-count.304=8`` always counts,
and has the plain form beside it where there is one value. As AMD's does, this counts what the KFD calls a device: a
partition. Of its kinds ``family``, ``firmware`` and ``driver-src-version`` are left out: they take requests to an open
render node, and this daemon opens none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Final

from amdvgpud.core.model import Gpu, Inventory, Partition

PREFIX: Final = "amd.com/gpu."
BETA: Final = "beta.amd.com/gpu."
KINDS: Final = (
    "compute-memory-partition",
    "compute-partitioning-supported",
    "cu-count",
    "device-id",
    "driver-version",
    "memory-partitioning-supported",
    "product-name",
    "simd-count",
    "vram",
)
_LONGEST: Final = 63
"""Of a label's value, and of its name behind the slash."""
_STRANGE: Final = re.compile(r"[^A-Za-z0-9_.-]")


def labels_of(inventory: Inventory) -> dict[str, str]:
    """All labels of ``inventory``; none without a GPU. What is unknown of a GPU is not labelled."""
    counted: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for gpu in inventory.gpus:
        for partition in gpu.partitions:
            for kind, value in _of(inventory, gpu, partition).items():
                if value:
                    counted[kind][value] += 1
    labels: dict[str, str] = {}
    for kind, values in counted.items():
        one = len(values) == 1
        for value, count in sorted(values.items()):
            if one:
                labels[f"{PREFIX}{kind}"] = labels[f"{BETA}{kind}"] = value
            for prefix in (BETA,) if one else (BETA, PREFIX):
                key = f"{prefix}{kind}.{value}"
                name = key.split("/")[1][:_LONGEST].rstrip("-_.")
                labels[f"{key.split('/')[0]}/{name}"] = str(count)
    return labels


def stale(labels: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str | None]:
    """What a merge patch must change in a node's ``labels``: None takes one away. Only kinds that are written here."""
    ours = tuple(f"{prefix}{kind}" for prefix in (PREFIX, BETA) for kind in KINDS)
    gone = {key for key in labels if key not in wanted and key.startswith(ours)}
    changed = {key: value for key, value in wanted.items() if labels.get(key) != value}
    return changed | dict.fromkeys(sorted(gone))


def _of(inventory: Inventory, gpu: Gpu, partition: Partition) -> dict[str, str]:
    modes = gpu.compute_partition, gpu.memory_partition
    return {
        "compute-memory-partition": "_".join(mode.lower() for mode in modes if mode) if all(modes) else "",
        "compute-partitioning-supported": str(bool(gpu.available_compute_partitions)).lower(),
        "cu-count": str(partition.cu_count),
        "device-id": f"{gpu.device_id:x}",
        "driver-version": _value(inventory.driver_version or ""),
        "memory-partitioning-supported": str(bool(gpu.available_memory_partitions)).lower(),
        "product-name": _value(gpu.product_name.replace(" ", "_").replace("(", "").replace(")", "")),
        # 4 SIMDs a CU on GCN and CDNA, 2 on RDNA (kernel, simd_per_cu in the KFD's topology).
        "simd-count": str(partition.cu_count * (2 if partition.layout.wgp else 4)),
        "vram": f"{(partition.vram_bytes + (1 << 29)) >> 30}G",
    }


def _value(text: str) -> str:
    """``text`` as a label's value: letters, digits and ``-_.`` only, beginning and ending with one of the former."""
    return _STRANGE.sub("_", text)[:_LONGEST].strip("-_.")
