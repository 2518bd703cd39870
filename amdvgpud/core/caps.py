"""The kernel's own cap on VRAM: what is to be written for which cgroup. Pure; writing is :mod:`amdvgpud.host.cgroup`'s.

Source: kernel/cgroup/dmem.c (Linux 6.14 and later). amdgpu registers one region a PCI function, ``drm/<bdf>/vram``,
also where the GPU is partitioned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from amdvgpud.core.containers import Container, container_of
from amdvgpud.core.model import Inventory, Slice

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
