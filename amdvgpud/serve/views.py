"""From the node's pictures to the API's shapes: pure functions, no I/O, no clock.

Owns what a face shows of a GPU, a slice, a lease. What is hidden from whom is decided by the caller; the functions that
can hide take ``details``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import Final, Literal

from amdvgpud.core import cumask, modes, wire
from amdvgpud.core.caps import capped_cgroup, counted_bytes
from amdvgpud.core.compute import format_compute
from amdvgpud.core.containers import Container
from amdvgpud.core.errors import Conflict
from amdvgpud.core.model import (
    Gpu,
    GpuId,
    Inventory,
    Lease,
    Partition,
    PartitionId,
    Profile,
    Share,
    Slice,
    Usage,
    gpu_of,
)
from amdvgpud.core.plan import Capacity, capacities
from amdvgpud.core.render import slice_environment
from amdvgpud.core.truth import GpuTruth, Truth, needs_gate
from amdvgpud.events import Event
from amdvgpud.guard import GuardView
from amdvgpud.node import NodeView, Repartition

_WORD_OF: Final[Mapping[bool | None, Literal["yes", "no", "unknown"]]] = {True: "yes", False: "no", None: "unknown"}


def partition_view(partition: Partition, capacity: Capacity, by_node: Mapping[int, PartitionId]) -> wire.PartitionView:
    """``by_node``: the Partition of each KFD node, to name what a link leads to."""
    return wire.PartitionView(
        id=partition.id,
        index=partition.index,
        kfd_node=partition.kfd_node,
        kfd_gpu_id=partition.kfd_gpu_id,
        render_node=f"/dev/dri/renderD{partition.render_minor}",
        gfx_target=partition.gfx_target,
        vram_bytes=partition.vram_bytes,
        vram_reserved_bytes=capacity.vram_promised_bytes,
        vram_free_bytes=capacity.vram_free_bytes,
        cu_count=partition.cu_count,
        cus_allocated=capacity.cus_allocated,
        xcc_count=partition.layout.xcc_count,
        engines_per_xcc=partition.layout.engines_per_xcc,
        arrays_per_engine=partition.layout.arrays_per_engine,
        active=list(partition.layout.active),
        row_count=capacity.row_count,
        row_cus=capacity.row_cus,
        wgp=partition.layout.wgp,
        harvest_known=partition.layout.harvest_known,
        numa_node=partition.numa_node,
        links=[
            wire.LinkView(
                kind=link.kind,
                to_partition=by_node.get(link.to_kfd_node),
                to_kfd_node=link.to_kfd_node,
                weight=link.weight,
            )
            for link in partition.links
        ],
    )


Temperatures = Mapping[GpuId, Mapping[str, float]]
NO_TEMPERATURES: Final[Temperatures] = MappingProxyType({})


def gpu_view(
    view: NodeView, gpu: Gpu, vram_used_bytes: int | None = None, temperatures_c: Temperatures = NO_TEMPERATURES
) -> wire.GpuView:
    """``vram_used_bytes``: the driver's figure as last sampled; None where there is none (absent is not zero)."""
    used = {} if vram_used_bytes is None else {gpu.id: vram_used_bytes}
    return _gpu_views(view, (gpu,), used, temperatures_c)[0]


def gpu_list(view: NodeView, vram_used_bytes: Mapping[GpuId, int], temperatures_c: Temperatures) -> wire.GpuList:
    return wire.GpuList(
        gpus=_gpu_views(view, view.inventory.gpus, vram_used_bytes, temperatures_c),
        unusable=[
            wire.UnusableView(pci_address=u.pci_address, name=u.name, reason=u.reason) for u in view.inventory.unusable
        ],
        revision=view.book.revision,
        gone=[
            wire.GoneView(id=g.id, since_s=g.since_s, pci_address=g.pci_address, product_name=g.product_name)
            for g in view.gone
        ],
    )


def _gpu_views(
    view: NodeView, gpus: Iterable[Gpu], vram_used_bytes: Mapping[GpuId, int], temperatures_c: Temperatures
) -> list[wire.GpuView]:
    capacity = capacities(view.book, view.inventory)
    by_node = {p.kfd_node: p.id for p in view.inventory.partitions}
    return [
        wire.GpuView(
            id=gpu.id,
            index=gpu.index,
            pci_address=gpu.pci_address,
            unique_id=f"0x{gpu.unique_id:016x}" if gpu.unique_id else None,
            smi_uuid=gpu.smi_uuid,
            product_name=gpu.product_name,
            gfx_target=gpu.gfx_target,
            vram_bytes=gpu.vram_bytes,
            vram_used_bytes=vram_used_bytes.get(gpu.id),
            cu_count=gpu.cu_count,
            compute_partition=gpu.compute_partition,
            memory_partition=gpu.memory_partition,
            available_compute_partitions=list(gpu.available_compute_partitions),
            available_memory_partitions=list(gpu.available_memory_partitions),
            numa_node=gpu.numa_node,
            cordoned=gpu.id in view.book.cordoned,
            health=health_view(view, gpu.id),
            oversubscription=view.book.oversubscription.get(gpu.id, 1.0),
            partitions=[partition_view(p, capacity[p.id], by_node) for p in gpu.partitions],
            profiles=[profile_view(gpu, profile) for profile in gpu.profiles],
            temperatures_c=dict(temperatures_c.get(gpu.id, {})),
        )
        for gpu in gpus
    ]


def health_view(view: NodeView, gpu: GpuId) -> wire.HealthView | None:
    if (health := view.health.get(gpu)) is None:
        return None
    word, found = view.book.health_overrides.get(gpu), view.health_found.get(gpu)
    return wire.HealthView(
        condition=health.condition.value,
        placeable=health.placeable,
        reason=health.reason,
        source=health.source,
        since_s=health.since_s,
        override=None if word is None else "healthy" if word.healthy else "unhealthy",
        found=None if found is None else found.condition.value,
    )


def profile_view(gpu: Gpu, profile: Profile) -> wire.ProfileView:
    # By XCC, not the GPU's sum by the count: in CPX a partition may not be shown, for want of a render minor.
    cus_per_xcc = gpu.cu_count / sum(p.layout.xcc_count for p in gpu.partitions)
    return wire.ProfileView(
        index=profile.index,
        mode=profile.mode,
        current=profile.mode == gpu.compute_partition,
        partition_count=profile.partition_count,
        xccs_per_partition=profile.xccs_per_partition,
        cus_per_partition=round(cus_per_xcc * profile.xccs_per_partition),
        vram_bytes_per_partition=gpu.vram_bytes // profile.partition_count,
        memory_modes=list(profile.memory_modes),
    )


def repartition_view(done: Repartition, *, dry_run: bool) -> wire.RepartitionView:
    changed = done.before != done.after
    notes = []
    if changed:
        verb = "would be put" if dry_run else "was put"
        notes.append(f"{done.gpu} {verb} from {done.before} into {done.after} (partitions: {done.partitions})")
        if not dry_run:
            notes.append(f"it is number {done.index} now, as the KFD puts what returns at its end")
    else:
        notes.append(f"{done.gpu} is in {done.after} already")
    if done.lost:
        notes.append(f"lost until {done.before} is back: {', '.join(done.lost)}")
    if done.memory_requested:
        noted = "would note" if dry_run else "has noted"
        notes.append(
            f"the driver {noted} {done.memory_requested}; it takes effect when the amdgpu driver of this whole node is "
            f"unloaded and loaded again (until then {done.memory}), which ends everything on all its GPUs, and in one "
            "xGMI hive all GPUs have to ask for the same"
        )
    if not done.settled:
        notes.append("the topology was still changing at the last look; the next scan has the rest")
    return wire.RepartitionView(
        gpu=done.gpu,
        before=done.before,
        after=done.after,
        changed=changed,
        partitions=done.partitions,
        index=done.index,
        memory=done.memory,
        memory_requested=done.memory_requested,
        lost=list(done.lost),
        settled=done.settled,
        note="; ".join(notes),
    )


def mode_proposals(view: NodeView, wants: Sequence[modes.Want]) -> wire.ModeProposals:
    """GPUs with slices that are not lost are left out: what is on them was cut for the mode they are in."""
    busy = {
        gpu_of(share.partition)
        for name, item in view.book.slices.items()
        if name not in view.lost
        for share in item.shares
    }
    return wire.ModeProposals(
        proposals=[
            wire.ModeProposal(
                modes=dict(p.modes),
                alone=p.alone,
                sharing=p.sharing,
                unplaced=p.unplaced,
                cus_wasted=p.cus_wasted,
                vram_wasted_bytes=p.vram_wasted_bytes,
                switches=p.switches,
                untouched=p.untouched,
                text=modes.describe(p),
            )
            for p in modes.suggest(view.inventory, wants, frozenset(busy))
        ],
        busy=sorted(busy),
    )


def share_view(
    share: Share,
    inventory: Inventory,
    usage: Usage | None,
    seen: GpuTruth | None = None,
    dmem_bytes: int | None = None,
) -> wire.ShareView:
    partition = inventory.partition(share.partition)
    used = 0 if usage is None or partition is None else usage.used_bytes(partition.kfd_gpu_id)
    return wire.ShareView(
        partition=share.partition,
        gpu=gpu_of(share.partition),
        vram_bytes=share.vram_bytes,
        used_bytes=used,
        asked_cus=share.asked_cus,
        granted_cus=share.granted_cus,
        effective_cus=share.effective_cus,
        cus=None if share.cus is None else cumask.format_ranges(share.cus),
        shared=share.shared,
        driver_bytes=seen.driver_bytes if seen else None,
        untracked_bytes=seen.untracked_bytes if seen else None,
        dmem_bytes=dmem_bytes,
    )


def states(view: NodeView) -> Iterator[tuple[Slice, wire.SliceState, Lease | None]]:
    """Each slice in order of names, its state, and the Lease on it."""
    leases = {lease.slice: lease for lease in view.book.leases.values()}
    for name, item in sorted(view.book.slices.items()):
        lease = leases.get(name)
        usage = view.usage.get(name)
        if name in view.lost:
            yield item, "lost", lease
        elif (usage is not None and usage.processes) or view.containers.get(name):
            yield item, "running", lease
        else:
            yield item, "free" if lease is None else "held", lease


def enforced_by(
    item: Slice, inventory: Inventory, containers: Sequence[Container] = (), truth: Truth | None = None
) -> str:
    """``none`` for a slice that has all of its Partitions and so nothing to hold; else by what its limits are held.

    Of several containers each is capped at the whole quota, so the kernel holds no sum: that is no cap of the slice.
    Nor is one that a process of the slice is outside of, as ``truth`` shows; without it nobody knows.
    """
    if not needs_gate(item, inventory):
        return "none"
    tops = {capped_cgroup(c) if c.cap == "" else None for c in containers}
    top = tops.pop() if len(tops) == 1 else None
    inside = truth is not None and all(f"{p.cgroup}/".startswith(f"{top}/") for p in truth.processes)
    capped = top is not None and inside
    if containers and all(c.gate.fits is False for c in containers):
        return "dmem" if capped else "none"
    return "gate+dmem" if capped else "gate"


def slice_views(view: NodeView, cdi_kind: str, seen: GuardView) -> list[wire.SliceView]:
    """All slices in order of names. ``seen``: what the kernel says."""
    return [_slice_view(view, item, state, lease, cdi_kind, seen) for item, state, lease in states(view)]


def slice_view(view: NodeView, item: Slice, cdi_kind: str, seen: GuardView) -> wire.SliceView:
    state, lease = next((state, lease) for other, state, lease in states(view) if other.name == item.name)
    return _slice_view(view, item, state, lease, cdi_kind, seen)


def _truth_of(seen: GuardView, item: Slice) -> Truth | None:
    return None if seen.comparison is None else seen.comparison.slices.get(item.name)


def _counted_bytes(view: NodeView, item: Slice, share: Share, seen: GuardView) -> int | None:
    return counted_bytes(item.name, share.partition, view.containers, view.book, seen.picture.dmem_bytes)


def _slice_view(
    view: NodeView,
    item: Slice,
    state: wire.SliceState,
    lease: Lease | None,
    cdi_kind: str,
    seen: GuardView,
) -> wire.SliceView:
    truth = _truth_of(seen, item)
    gpus = truth.gpus if truth else {}
    usage = view.usage.get(item.name) or Usage(item.name)
    lost = view.lost.get(item.name)
    containers = view.containers.get(item.name, ())
    return wire.SliceView(
        name=item.name,
        state=state,
        lost_reason=lost,
        enforced_by=enforced_by(item, view.inventory, containers, truth),
        gate_seen=bool(usage.processes) or any(gpu.allocations or gpu.peak_bytes for gpu in usage.gpus),
        owner_uid=item.owner_uid,
        profile=item.profile,
        cdi_device=f"{cdi_kind}={item.name}" if lost is None and view.cdi.written else None,
        compute=format_compute(item.request.compute),
        policy=item.request.compute.policy.value,
        shares=[
            share_view(s, view.inventory, usage, gpus.get(s.partition), _counted_bytes(view, item, s, seen))
            for s in item.shares
        ],
        lease=None if lease is None else lease.id,
        processes=len(usage.processes),
        created_s=item.created_s,
        revision=item.revision,
        priority=item.request.priority.value,
        oversubscribe=item.request.oversubscribe,
        unmanaged_processes=len(truth.unmanaged) if truth else None,
        containers=[
            wire.ContainerView(
                id=c.id,
                pid=c.pid,
                pod=c.pod,
                since_s=c.since_s,
                reported=c.reported,
                gate=_WORD_OF[c.gate.fits],
                gate_reason=c.gate.reason,
                cap=c.cap,
                dmem_bytes=_dmem_bytes(c, seen),
            )
            for c in containers
        ],
    )


def _dmem_bytes(container: Container, seen: GuardView) -> dict[str, int] | None:
    counted = seen.picture.dmem_bytes.get(capped_cgroup(container) or "")
    return None if counted is None else {str(gpu): n for gpu, n in sorted(counted.items())}


def usage_view(view: NodeView, item: Slice, seen: GuardView) -> wire.UsageView:
    """Figures of GPUs that are gone are left out: nobody knows them."""
    truth = _truth_of(seen, item)
    usage = view.usage.get(item.name) or Usage(item.name)
    by_gpu_id = {g.kfd_gpu_id: g for g in usage.gpus}
    gpus = []
    for share in item.shares:
        partition = view.inventory.partition(share.partition)
        if partition is None:
            continue
        ledger = by_gpu_id.get(partition.kfd_gpu_id)
        driver = truth.gpus.get(share.partition) if truth else None
        gpus.append(
            wire.GpuUsageView(
                partition=share.partition,
                limit_bytes=share.vram_bytes,
                used_bytes=ledger.used_bytes if ledger else 0,
                peak_bytes=ledger.peak_bytes if ledger else 0,
                denials=ledger.denials if ledger else 0,
                denied_bytes=ledger.denied_bytes if ledger else 0,
                allocations=ledger.allocations if ledger else 0,
                frees=ledger.frees if ledger else 0,
                driver_bytes=driver.driver_bytes if driver else None,
                untracked_bytes=driver.untracked_bytes if driver else None,
                dmem_bytes=_counted_bytes(view, item, share, seen),
            )
        )
    return wire.UsageView(slice=item.name, gpus=gpus, damaged=usage.damaged, reclaimed_bytes=usage.reclaimed_bytes)


def process_list(view: NodeView, item: Slice, seen: GuardView) -> wire.ProcessList:
    """Those in the ledger, each with what the kernel says of it, then those that only the kernel knows.

    Bytes on a GPU that the inventory does not have are left out.
    """
    usage = view.usage.get(item.name) or Usage(item.name)
    truth = _truth_of(seen, item)
    by_gpu_id = {p.kfd_gpu_id: p.id for p in view.inventory.partitions}

    def by_partition(figures: Mapping[int, int]) -> dict[str, int]:
        return {by_gpu_id[g]: n for g, n in sorted(figures.items()) if g in by_gpu_id}

    known = {(p.inner_pid, p.start_ticks): p for p in truth.processes if p.tracked} if truth else {}
    rows = []
    for slot in usage.processes:
        kernel = known.get((slot.pid, slot.start_ticks))
        rows.append(
            wire.ProcessView(
                pid=slot.pid,
                pid_namespace=slot.pid_namespace,
                used_bytes=by_partition(slot.used_bytes),
                host_pid=kernel.pid if kernel else None,
                command=kernel.command if kernel else None,
                driver_bytes=_by_text(kernel.driver_bytes) if kernel else None,
                sdma_us=by_partition(kernel.sdma_us) or None if kernel else None,
            )
        )
    rows += [
        wire.ProcessView(
            pid=process.inner_pid,
            pid_namespace=process.pid_namespace,
            used_bytes={},
            host_pid=process.pid,
            command=process.command,
            driver_bytes=_by_text(process.driver_bytes),
            sdma_us=by_partition(process.sdma_us) or None,
            tracked=False,
        )
        for process in (truth.processes if truth else ())
        if not process.tracked
    ]
    return wire.ProcessList(slice=item.name, processes=rows)


def _by_text(figures: Mapping[PartitionId, int]) -> dict[str, int]:
    return {str(at): n for at, n in sorted(figures.items())}


def lease_view(
    view: NodeView,
    lease: Lease,
    run_dir: PurePath,
    *,
    details: bool,
    preload: Sequence[PurePath] = (),
    environment_of_machine: Mapping[str, str] = MappingProxyType({}),
) -> wire.LeaseView:
    """``preload`` and ``environment_of_machine``: what every process in a slice of this machine needs to find."""
    try:
        # A lease's process runs on the host, where it sees all GPUs.
        environment = slice_environment(view.book.slices[lease.slice], view.inventory, all_nodes_visible=True)
    except Conflict:
        environment = {}  # what it was cut from is gone; the slice says so
    return wire.LeaseView(
        id=lease.id,
        slice=lease.slice,
        holder=lease.holder.text if details else "",
        pid=lease.holder.pid if details else None,
        created_s=lease.created_s,
        expires_s=lease.expires_s,
        ephemeral=lease.ephemeral,
        slice_dir=str(run_dir / "slices" / lease.slice),
        environment={**environment_of_machine, **environment},
        preload=[str(path) for path in preload],
        bind="container" if lease.container else "holder",
    )


def event_view(event: Event, *, details: bool) -> wire.EventView:
    """``detail`` may hold a holder's text, so it is for those who may see details."""
    return wire.EventView(
        id=event.id,
        revision=event.revision,
        time_s=event.time_s,
        kind=event.kind,
        subject=event.subject,
        detail=event.detail if details else "",
    )


def plan_view(name: str, shares: tuple[Share, ...], inventory: Inventory, cdi: dict[str, object]) -> wire.PlanView:
    return wire.PlanView(name=name, shares=[share_view(s, inventory, None) for s in shares], cdi=cdi)
