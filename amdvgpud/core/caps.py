"""The kernel's own cap on VRAM: what is to be written for which cgroup, and whose what it counts is. Pure; files are
:mod:`amdvgpud.host.cgroup`'s.

Source: kernel/cgroup/dmem.c (Linux 6.14 and later). amdgpu registers one region a PCI function, ``drm/<bdf>/vram``,
also where the GPU is partitioned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from amdvgpud.core.containers import Container, container_of
from amdvgpud.core.model import Book, GpuId, Inventory, PartitionId, Slice, SliceName, gpu_of

WAIT_FOR_CAP_MS: Final = 300
"""How long the start of a container or a command may wait for its cap: 200 ms more than for a report without one."""


def region_of(pci_address: str) -> str:
    return f"drm/{pci_address}/vram"


def capped_cgroup(container: Container) -> str | None:
    """The cgroup that a container's cap goes on: the topmost one that is the container's own, by its id.

    None where no cgroup names the container: it then shares one with whoever started it, who must not be capped.
    What is below belongs to the container (a runtime's own ``container`` folder; what a guest makes), and is held too.
    """
    if container.cgroup is None:
        return None
    path = ""
    for name in container.cgroup.strip("/").split("/"):
        path = f"{path}/{name}"
        if container_of(path) == container.id:
            return path
    return None


def quotas(item: Slice, inventory: Inventory) -> dict[str, int]:
    """Bytes by region that ``item`` may have; nothing for a GPU that is not there."""
    found: dict[str, int] = {}
    for share in item.shares:
        partition = inventory.partition(share.partition)
        gpu = None if partition is None else inventory.gpu(partition.gpu)
        if gpu is not None:
            region = region_of(gpu.pci_address)
            found[region] = found.get(region, 0) + share.vram_bytes
    return found


def wanted_caps(containers: Iterable[Container], allowance_bytes: int) -> Mapping[str, Mapping[str, int]]:
    """Bytes by region, by cgroup: of all slices that a container has, summed, and the allowance once a region."""
    wanted: dict[str, dict[str, int]] = {}
    counted: set[tuple[str, str]] = set()
    for container in containers:
        cgroup = capped_cgroup(container)
        if cgroup is None or not container.quotas or (cgroup, container.slice) in counted:
            continue
        counted.add((cgroup, container.slice))
        regions = wanted.setdefault(cgroup, {})
        for region, quota_bytes in container.quotas.items():
            regions[region] = regions.get(region, allowance_bytes) + quota_bytes
    return wanted


def counted_bytes(
    name: SliceName,
    partition: PartitionId,
    containers: Mapping[SliceName, Sequence[Container]],
    book: Book,
    dmem: Mapping[str, Mapping[GpuId, int]],
) -> int | None:
    """What the kernel counts on the GPU of ``partition`` for the containers of slice ``name``. ``dmem``: by cgroup.

    None where that cannot be told: there is no container, or one that is not counted; or one has more than this one
    share on the GPU, for a cgroup has one figure for a whole GPU. A slice that is gone may have been there.
    """
    gpu = gpu_of(partition)
    shares = {n: sum(gpu_of(s.partition) == gpu for s in item.shares) for n, item in book.slices.items()}
    found: dict[str, int] = {}
    for container in containers.get(name, ()):
        cgroup = capped_cgroup(container)
        own = sum(shares.get(n, 1) for n, all_ in containers.items() if any(c.id == container.id for c in all_))
        if cgroup is None or own != 1 or (counted := dmem.get(cgroup, {}).get(gpu)) is None:
            return None
        found[cgroup] = counted
    return sum(found.values()) if found else None
