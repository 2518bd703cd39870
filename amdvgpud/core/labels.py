"""Labels of a cluster node that say what GPUs it has, under the names that AMD's node labeller writes.

What is counted: a kind of label (``cu-count``) with one value on all GPUs is ``amd.com/gpu.cu-count=304``; with
several, each is a label of its own that counts: ``amd.com/gpu.cu-count.304=8``. The old form
``beta.amd.com/gpu.cu-count.304=8`` always counts, and has the plain form beside it where there is one value. As AMD's
does, this counts what the KFD calls a device: a partition.

What holds of the node: ``driver-version``, ``driver-src-version`` and what there is of partition modes are one plain
label each, in no other form. Whether a node can be partitioned is what its first GPU says.

``family`` and ``firmware`` are left out: they take requests to an open render node, and this daemon opens none.

Source: ``cmd/k8s-node-labeller/main.go`` of ROCm/k8s-device-plugin.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Final

from amdvgpud.core.model import Gpu, Inventory, Partition

PREFIX: Final = "amd.com/gpu."
BETA: Final = "beta.amd.com/gpu."
COUNTED: Final = ("cu-count", "device-id", "product-name", "simd-count", "vram")
OF_NODE: Final = (
    "compute-memory-partition",
    "compute-partitioning-supported",
    "driver-src-version",
    "driver-version",
    "memory-partitioning-supported",
)
_LONGEST: Final = 63
"""Of a label's value, and of its name behind the slash."""
_STRANGE: Final = re.compile(r"[^A-Za-z0-9_.-]")


def labels_of(inventory: Inventory) -> dict[str, str]:
    """All labels of ``inventory``; none without a GPU. What is unknown of a GPU is not labelled."""
    if not inventory.gpus:
        return {}
    counted: dict[str, Counter[str]] = {kind: Counter() for kind in COUNTED}
    for gpu in inventory.gpus:
        for partition in gpu.partitions:
            for kind, value in _of(gpu, partition).items():
                if value:
                    counted[kind][value] += 1
    labels = {f"{PREFIX}{kind}": value for kind, value in _of_node(inventory).items() if value}
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
    ours = tuple(f"{prefix}{kind}" for prefix in (PREFIX, BETA) for kind in (*COUNTED, *OF_NODE))
    gone = {
        key for key in labels if key not in wanted and (key in ours or key.startswith(tuple(f"{k}." for k in ours)))
    }
    changed = {key: value for key, value in wanted.items() if labels.get(key) != value}
    return changed | dict.fromkeys(sorted(gone))


def _of_node(inventory: Inventory) -> dict[str, str]:
    first = min(inventory.gpus, key=lambda gpu: gpu.pci_address)
    modes = {(gpu.compute_partition, gpu.memory_partition) for gpu in inventory.gpus}
    known = {f"{compute}_{memory}".lower() for compute, memory in modes if compute and memory}
    return {
        "compute-memory-partition": known.pop() if len(known) == 1 else "",
        "compute-partitioning-supported": str(bool(first.available_compute_partitions)).lower(),
        "driver-src-version": _value(inventory.driver_src_version or ""),
        "driver-version": _value(inventory.driver_version or ""),
        "memory-partitioning-supported": str(bool(first.available_memory_partitions)).lower(),
    }


def _of(gpu: Gpu, partition: Partition) -> dict[str, str]:
    return {
        "cu-count": str(partition.cu_count),
        "device-id": f"{gpu.device_id:x}",
        "product-name": _value(gpu.product_name.replace(" ", "_").replace("(", "").replace(")", "")),
        # 4 SIMDs a CU on GCN and CDNA, 2 on RDNA (kernel, simd_per_cu in the KFD's topology).
        "simd-count": str(partition.cu_count * (2 if partition.layout.wgp else 4)),
        "vram": f"{(partition.vram_bytes + (1 << 29)) >> 30}G",
    }


def _value(text: str) -> str:
    """``text`` as a label's value: letters, digits and ``-_.`` only, beginning and ending with one of the former."""
    return _STRANGE.sub("_", text)[:_LONGEST].strip("-_.")
