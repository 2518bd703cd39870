"""HAMi's words: what its scheduler reads of a cluster node, and what it writes on a node and its pods.

Owns every key and text that is shared with that scheduler, each with one writer and one reader, and what such a text
comes to in our own words. Decides nothing about placement, asks no API. What a pod carries may have been written by
its owner: it is a wish, checked here and placed by :mod:`amdvgpud.core.plan` like any other.

Sources: HAMi release 2.10 (the registration's fields, the grammar of allocations, the node lock) and its AMD device
plugin (which of the fields it fills, and how); Go's ``encoding/json`` for the bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from amdvgpud.core import cumask, plan, render
from amdvgpud.core.errors import Invalid, NotFound
from amdvgpud.core.health import Health
from amdvgpud.core.model import (
    Book,
    Compute,
    ComputePolicy,
    CuSet,
    Gpu,
    GpuId,
    Inventory,
    Partition,
    PartitionId,
    Priority,
    Request,
    Slice,
    SliceName,
    gpu_of,
    slice_name,
)
from amdvgpud.core.modes import hami_partitions

MIB: Final = 1024**2
INT32_MAX: Final = 2**31 - 1

# ------------------------------------------------------------------------------------------------------------- keys

REGISTRATION: Final = "hami.io/node-amd-register"
LOCK: Final = "hami.io/mutex.lock"
OPERATING_MODE: Final = "hami.io/amd-operating-mode"
COMPUTE_PARTITION: Final = "hami.io/amd-compute-partition"

WAITING: Final = "hami.io/amd-devices-to-allocate"
"""Erased container by container, by us."""
ALLOCATED: Final = "hami.io/amd-devices-allocated"
"""The same text, never changed: what the scheduler counts by."""
ASSIGNED_NODE: Final = "hami.io/vgpu-node"
BIND_PHASE: Final = "hami.io/bind-phase"
BIND_TIME: Final = "hami.io/bind-time"
CU_ALLOCATED: Final = "hami.io/amd-cu-allocated"

REGISTERED_AT: Final = "amdvgpu.io/registered"
"""Ours, on the Node: when the registration was last found true. It ages where the daemon has crashed."""
SERVED: Final = "amdvgpu.io/served"
"""Ours, on the pod: which of the kubelet's devices each container was served for, so that it is served once."""

AMOUNTS: Final = "amdvgpu.io/amounts"
"""Ours, on the Node: the amounts in its status are ours."""

ALLOCATING: Final = "allocating"
SUCCESS: Final = "success"
FAILED: Final = "failed"

COUNT_RESOURCE: Final = "amd.com/gpu"
PRIORITY_RESOURCE: Final = "amd.com/priority"
MEMORY_RESOURCE: Final = "amd.com/gpumem"
CORES_RESOURCE: Final = "amd.com/gpucores"
AMOUNT_RESOURCES: Final = (MEMORY_RESOURCE, CORES_RESOURCE)

EVENT_UNHEALTHY: Final = "AMDGPUUnhealthy"
EVENT_MISSING: Final = "AMDGPUMissing"
EVENT_RECOVERED: Final = "AMDGPURecovered"


# ----------------------------------------------------------------------------------------------------- registration


class Mode(StrEnum):
    """What a cluster node offers (``hami.io/amd-operating-mode``)."""

    CU = "cu"
    """GPUs, shared softly. A GPU that is cut is offered as its Partitions, shared softly too: none spans two."""
    PARTITION = "partition"
    """Partitions, one container each. A GPU without modes stays one, shared softly."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One GPU (or Partition) as the scheduler is told of it. Field names are those of the wire."""

    id: str
    index: int
    """Rank among the offers, in KFD node order."""
    count: int
    """How many containers may share it."""
    devmem: int
    """MiB that pods can get, oversubscription included; less what others than pods were promised."""
    devcore: int
    """CUs that pods can get, likewise."""
    type: str
    numa: int
    mode: str
    health: bool
    custominfo: Mapping[str, object]
    partition: PartitionId

    def __post_init__(self) -> None:
        if not self.id or not self.type or re.search(r"[,:;]", self.id + self.type):
            raise ValueError(
                f"{self.id!r}, {self.type!r}: neither may be empty or hold , : or ;, which nothing escapes"
            )
        if self.index < 0 or not all(0 <= n <= INT32_MAX for n in (self.count, self.devmem, self.devcore)):
            raise ValueError(f"{self.id}: a number that the scheduler cannot decode would hide every GPU of the node")


def split_count(gpu: Gpu, configured: int) -> int:
    """``configured``, or if that is 0 what HAMi's plugin takes: 2 for gfx12, else 10."""
    return configured or (2 if gpu.gfx_target.startswith("gfx12") else 10)


def type_of(product_name: str) -> str:
    """The product's name as the scheduler can find it: it looks for ``AMD`` in front, and escapes nothing."""
    name = " ".join(re.sub(r"[,:;]", " ", product_name).split())
    if not name:
        return "AMD GPU"
    return name if name.upper().startswith("AMD") else f"AMD {name}"


def places(inventory: Inventory, mode: Mode) -> dict[str, Partition]:
    """The Partition behind each id that is offered, in KFD node order.

    A GPU has the id that AMD SMI prints; without a unique id, ours. Partitions have ids of their own in any case:
    those of one GPU may share their unique id.
    """
    found: list[tuple[str, Partition]] = []
    for gpu in inventory.gpus:
        cut = hami_partitions(gpu) if mode is Mode.PARTITION or len(gpu.partitions) > 1 else ()
        ids = {each.partition: each.id for each in cut}
        found += [(ids.get(partition.id) or _id_of(gpu, partition), partition) for partition in gpu.partitions]
    return dict(sorted(found, key=lambda each: each[1].kfd_node))


def _id_of(gpu: Gpu, partition: Partition) -> str:
    whole = gpu.smi_uuid or str(gpu.id)
    return whole if len(gpu.partitions) == 1 else f"{whole}-{partition.index}"


def offers(
    inventory: Inventory, book: Book, health: Mapping[GpuId, Health], *, mode: Mode, splits: int
) -> tuple[Offer, ...]:
    """What to register. An unfit or cordoned GPU, or one of which nothing is left for pods, is there with no health.

    ``Σ quotas of pods + devmem == limit - Σ quotas of others``: the scheduler knows of pods only, so what others were
    promised is taken from what it may deal out.
    """
    others = {name: item for name, item in book.slices.items() if pod_uid(name) is None}
    taken = plan.occupancy(replace(book, slices=MappingProxyType(others)), inventory)
    found = []
    for index, (name, partition) in enumerate(places(inventory, mode).items()):
        gpu = inventory.gpu(partition.gpu)
        assert gpu is not None, "places are of GPUs of this inventory"  # noqa: S101
        at = taken[partition.id]
        devmem = (at.vram_limit_bytes - at.vram_promised_bytes) // MIB
        devcore = partition.cu_count - at.taken.bit_count()
        left = devmem > 0 and devcore > 0 and at.whole is None
        alone = "#" in name and mode is Mode.PARTITION
        found.append(
            Offer(
                id=name,
                index=index,
                count=1 if alone or not at.rows.sliceable else split_count(gpu, splits),
                devmem=min(devmem if left else at.vram_limit_bytes // MIB, INT32_MAX),
                devcore=devcore if left else partition.cu_count,
                type=type_of(gpu.product_name),
                numa=-1 if partition.numa_node is None else partition.numa_node,
                mode=(gpu.compute_partition or "").lower() if "#" in name else "",
                health=left and gpu.id not in book.cordoned and health.get(gpu.id, Health()).placeable,
                custominfo=_custominfo(gpu, partition, "#" in name),
                partition=partition.id,
            )
        )
    return tuple(found)


def _custominfo(gpu: Gpu, partition: Partition, cut: bool) -> dict[str, object]:
    facts: dict[str, object] = {"pciBDF": gpu.pci_address, "cuPerWGP": 2 if partition.layout.wgp else 1}
    if cut:
        modes = (gpu.compute_partition, gpu.memory_partition)
        facts["partitionProfile"] = "_".join(mode.lower() for mode in modes if mode)
    elif gpu.profiles:
        facts["partitionProfiles"] = [
            {
                "profile_index": profile.index,
                "type": profile.mode,
                "memory_caps": ",".join(profile.memory_modes),
                "num_partitions": profile.partition_count,
                "xcc_per_partition": profile.xccs_per_partition,
            }
            for profile in gpu.profiles
        ]
    return facts


def with_missing(now: Sequence[Offer], before: Sequence[Offer], inventory: Inventory) -> tuple[Offer, ...]:
    """``now``, and what was offered ``before`` of GPUs that are gone, with no health.

    A Partition that is gone because its GPU is cut anew is left out: nobody can come back to it.
    """
    here = {offer.id for offer in now}
    for gpu in inventory.gpus:
        here |= {str(gpu.id), gpu.smi_uuid or "", gpu.pci_address}
    gone = [
        replace(offer, health=False) for offer in before if offer.id not in here and gpu_of(offer.partition) not in here
    ]
    return (*now, *(replace(offer, index=len(now) + i) for i, offer in enumerate(gone)))


def amounts(offers: Sequence[Offer]) -> dict[str, str]:
    """What the Node has of what pods count in MiB and in per cent; empty where nothing is offered.

    A GPU without health counts too: the pods on it are counted, and what was too much once would refuse the pods of the
    other GPUs, also those that run when the kubelet starts anew and admits them again.
    """
    if not offers:
        return {}
    return {
        MEMORY_RESOURCE: str(sum(offer.devmem for offer in offers)),
        CORES_RESOURCE: str(100 * len(offers)),
    }


_WIRE: Final = ("id", "index", "count", "devmem", "devcore", "type", "numa", "mode", "health")


def format_registration(offers: Iterable[Offer]) -> str:
    """The annotation, byte for byte as Go encodes HAMi's ``DeviceInfo``: fields in its order, zero values left out."""
    return _go_json([_registered(offer) for offer in offers])


def _registered(offer: Offer) -> dict[str, object]:
    fields: dict[str, object] = {key: getattr(offer, key) for key in _WIRE}
    fields["devicevendor"] = "amd"
    fields["custominfo"] = _sorted(offer.custominfo)
    return {key: value for key, value in fields.items() if value}


def parse_registration(text: str) -> list[dict[str, object]]:
    """The objects of a registration, whoever wrote it; none where it cannot be understood."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def parse_offers(text: str) -> tuple[Offer, ...]:
    """The offers of a registration, whoever wrote it; what cannot be one is left out. Of what it has offered before, a
    daemon that starts has no other memory.

    ``partition`` is none that there is, but tells :func:`with_missing` the GPU.
    """
    found: dict[str, Offer] = {}
    for each in parse_registration(text):
        try:
            facts = dict(each.get("custominfo") or {})  # type: ignore[call-overload]
            name = str(each.get("id", ""))
            # The id of a Partition does not name its GPU; where that sits does.
            parent = facts.get("pciBDF", name.partition("#")[0]) if "#" in name else name
            numbers = [int(each.get(key, 0)) for key in ("index", "count", "devmem", "devcore", "numa")]  # type: ignore[call-overload]
            index, count, devmem, devcore, numa = numbers
            found[name] = Offer(
                name,
                index,
                count,
                devmem,
                devcore,
                str(each.get("type", "")),
                numa,
                str(each.get("mode", "")),
                each.get("health") is True,
                facts,
                PartitionId(f"{parent}/0"),
            )
        except (ValueError, TypeError, OverflowError):
            continue
    return tuple(found.values())


def format_withdrawn(text: str) -> str:
    """The registration ``text`` with no GPU healthy. An empty list, or none, withdraws nothing: HAMi keeps its own."""
    return _go_json([{k: v for k, v in each.items() if k != "health"} for each in parse_registration(text)])


def _sorted(value: object) -> object:
    """Go sorts the keys of maps, nested ones too."""
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(each) for each in value] if isinstance(value, list) else value


def _go_json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":  # only ever inside strings
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# ------------------------------------------------------------------------------------------------------ allocations


@dataclass(frozen=True, slots=True)
class Grant:
    """What the scheduler has chosen for one container on one GPU."""

    id: str
    type: str
    memory_mib: int
    cu_count: int


Container = tuple[Grant, ...]
"""The Grants of one container; empty: it asks for no GPU, or has been served."""

_NUMBER: Final = re.compile(r"[0-9]{1,19}", re.ASCII)


def parse_allocation(text: str) -> tuple[Container, ...]:
    """``uuid,type,MiB,CUs:`` for each GPU, ``;`` after each container. ``Invalid`` names the part that is none.

    Empty containers are kept. The scheduler writes them in some shapes of a pod and not in others, so a position in
    this tuple says nothing about which container of the pod it is.
    """
    return tuple(_container(part) for part in _containers(text))


def _containers(text: str) -> list[str]:
    parts = text.split(";")
    return parts[:-1] if not parts[-1].strip() else parts


def _container(part: str) -> Container:
    return tuple(_grant(segment) for segment in part.split(":") if segment.strip())


def _grant(segment: str) -> Grant:
    fields = [each.strip() for each in segment.split(",")]
    # Fields beyond the fourth are for later schedulers.
    if len(fields) < 4 or not fields[0] or not fields[1] or not all(_NUMBER.fullmatch(n) for n in fields[2:4]):
        raise Invalid(f"{segment[:200]!r} is no allocation: it has to be id,type,MiB,CUs with whole numbers")
    return Grant(fields[0], fields[1], int(fields[2]), int(fields[3]))


def format_allocation(containers: Iterable[Container]) -> str:
    return "".join(
        "".join(f"{g.id},{g.type},{g.memory_mib},{g.cu_count}:" for g in grants) + ";" for grants in containers
    )


def first_waiting(text: str) -> tuple[int, Container] | None:
    """(position, Grants) of the first container that waits; None: none does. By order, never by index."""
    return next(((at, grants) for at, grants in enumerate(parse_allocation(text)) if grants), None)


def without_waiting(text: str, position: int) -> str:
    """``text`` with that container served. All others stay as they were written, to the byte."""
    return "".join(f"{'' if at == position else part};" for at, part in enumerate(_containers(text)))


def is_waiting(text: str) -> bool:
    """Whether any container still waits. Text that is no allocation waits for nobody: it is never served."""
    try:
        return first_waiting(text) is not None
    except Invalid:
        return False


# ------------------------------------------------------------------------------------------- from an allocation to us


@dataclass(frozen=True, slots=True)
class Wish:
    """What one container is to get on one Partition, checked. ``cu_count`` None: the whole Partition."""

    id: str
    partition: Partition
    vram_bytes: int | None
    cu_count: int | None


def wishes(grants: Container, there: Mapping[str, Partition], limits: Mapping[PartitionId, int]) -> tuple[Wish, ...]:
    """``grants`` on the Partitions ``there``; ``limits`` are the bytes that may be promised on each.

    Whole is whole in both: all CUs (or none named) and all VRAM (or none named). ``NotFound`` for an id that this
    cluster node does not have: no other is taken in its place. ``Invalid`` for what cannot be meant.
    """
    if len({grant.id for grant in grants}) != len(grants):
        raise Invalid(f"one GPU twice in one container: {', '.join(grant.id for grant in grants)}")
    return tuple(_wish(grant, there, limits) for grant in grants)


def _wish(grant: Grant, there: Mapping[str, Partition], limits: Mapping[PartitionId, int]) -> Wish:
    partition = there.get(grant.id)
    if partition is None:
        raise NotFound(f"this node has no GPU {grant.id!r}; it has {', '.join(there) or 'none'}")
    limit_mib = limits[partition.id] // MIB
    if grant.memory_mib > limit_mib:
        raise Invalid(
            f"{grant.memory_mib} MiB are wanted of {grant.id}, which has {limit_mib}: amd.com/gpumem counts MiB, "
            "so write 16384 for 16 GiB"
        )
    if grant.cu_count > partition.cu_count:
        raise Invalid(f"{grant.cu_count} CUs are wanted of {grant.id}, which has {partition.cu_count}")
    all_cus = grant.cu_count in (0, partition.cu_count)
    if all_cus and grant.memory_mib in (0, limit_mib):
        return Wish(grant.id, partition, None, None)
    if grant.memory_mib == 0:
        raise Invalid(
            f"no memory is named for {grant.cu_count} of the {partition.cu_count} CUs of {grant.id}: "
            "only a whole GPU goes without"
        )
    return Wish(grant.id, partition, grant.memory_mib * MIB, grant.cu_count or partition.cu_count)


def requests(
    uid: str,
    ordinal: int,
    wanted: Sequence[Wish],
    *,
    after: tuple[SliceName, ...] = (),
    priority: Priority,
    oversubscribed: frozenset[GpuId],
) -> tuple[Request, ...]:
    """What to ask of the Node for a container, the pod's ``ordinal``-th that asks for GPUs: mostly one Request.
    ``after``: the slices of those that have ended when it starts.

    A Request has one quota for all its GPUs, and no GPU twice; what does not go together is asked for one by one.
    """
    groups: list[list[Wish]] = []
    for wish in wanted:
        for group in groups:
            alike = (group[0].vram_bytes, group[0].cu_count) == (wish.vram_bytes, wish.cu_count)
            spills = (group[0].partition.gpu in oversubscribed) == (wish.partition.gpu in oversubscribed)
            if alike and spills and wish.partition.gpu not in {other.partition.gpu for other in group}:
                group.append(wish)
                break
        else:
            groups.append([wish])
    names = tuple(pod_slice(uid, ordinal, part) for part in range(len(groups)))
    return tuple(
        Request(
            name,
            Compute(ComputePolicy.WHOLE)
            if group[0].cu_count is None
            else Compute(ComputePolicy.EXACT, cu_count=group[0].cu_count),
            vram_bytes=group[0].vram_bytes,
            gpu_count=len(group),
            on=tuple(str(wish.partition.id) for wish in group),
            priority=priority,
            oversubscribe=group[0].partition.gpu in oversubscribed and group[0].cu_count is not None,
            after=after,
            together=names if len(names) > 1 else (),
        )
        for name, group in zip(names, groups, strict=True)
    )


def priority_of(task_priority: int | None) -> Priority:
    """``amd.com/priority`` as the ceiling of a slice: 0 is high. None: none was asked for."""
    if task_priority is None:
        return Priority.NORMAL
    return Priority.HIGH if task_priority == 0 else Priority.LOW


# --------------------------------------------------------------------------------------------------- slices of pods

_POD_SLICE: Final = re.compile(r"pod-(?P<uid>[a-z0-9-]{1,44})\.[0-9]{1,4}(?:\.[0-9]{1,2})?", re.ASCII)


def pod_slice(uid: str, ordinal: int, part: int = 0) -> SliceName:
    """``pod-<uid>.<ordinal>``: the same for the same container whenever it is asked, and on each daemon."""
    name = slice_name(f"pod-{uid}.{ordinal}" + (f".{part}" if part else ""), "pod uid")
    if pod_uid(name) != uid:
        raise Invalid(f"{uid!r} is no uid of a pod")
    return name


def pod_uid(name: str) -> str | None:
    """The uid of the pod that the slice ``name`` is for; None: it is not a pod's."""
    match = _POD_SLICE.fullmatch(name)
    return match["uid"] if match else None


def cus_of_pods(book: Book, ids: Mapping[PartitionId, str]) -> dict[str, dict[str, CuSet]]:
    """By the uid of each pod that has slices: the CUs of all its containers together, by the id that is offered. A GPU
    that it has whole is not among them."""
    masks: dict[str, dict[str, int]] = {}
    for name, item in book.slices.items():
        if (uid := pod_uid(name)) is None:
            continue
        of_pod = masks.setdefault(uid, {})
        for share in item.shares:
            if share.cus is not None and share.partition in ids:
                where = ids[share.partition]
                of_pod[where] = of_pod.get(where, 0) | share.cus.mask
    return {
        uid: {where: CuSet.from_mask(mask) for where, mask in sorted(of_pod.items())} for uid, of_pod in masks.items()
    }


def format_cus(cus: Mapping[str, CuSet]) -> str:
    """``{"<id>":"0-75,80"}``, keys sorted."""
    return _go_json({where: cumask.format_ranges(cus[where]) for where in sorted(cus)})


def parse_cus(text: str) -> dict[str, CuSet]:
    """``Invalid`` for what is no such object; blanks and empty items are let pass, as HAMi's plugin does."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Invalid(f"{text[:200]!r} is no list of CUs: {error}") from error
    if not isinstance(found, dict) or not found:
        raise Invalid(f"{text[:200]!r} is no list of CUs: it has to be an object that names at least one GPU")
    return {_named(where): _ranges(ranges) for where, ranges in found.items()}


def _named(where: str) -> str:
    if not where.strip():
        raise Invalid("a list of CUs without the id of a GPU")
    return where


def _ranges(text: object) -> CuSet:
    if not isinstance(text, str):
        raise Invalid(f"{text!r} is no list of CUs")
    mask = 0
    for item in filter(None, (each.strip() for each in text.split(","))):
        match = re.fullmatch(r"([0-9]{1,4}) *(?:- *([0-9]{1,4}))?", item, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise Invalid(f"{item[:40]!r} is no range of CUs")
        mask |= (1 << last + 1) - (1 << first)
    if not mask:
        raise Invalid(f"{text[:40]!r} names no CU")
    return CuSet.from_mask(mask)


def format_served(served: Mapping[int, Iterable[str]]) -> str:
    """``{"<ordinal>":["<the kubelet's device id>",…]}``."""
    return _go_json({str(ordinal): sorted(served[ordinal]) for ordinal in sorted(served)})


def parse_served(text: str) -> dict[int, frozenset[str]]:
    """Nothing where it cannot be understood: a pod may have written it, and is then served by the scheduler's word."""
    try:
        found = json.loads(text or "{}")
        return {int(ordinal): frozenset(map(str, ids)) for ordinal, ids in found.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


# -------------------------------------------------------------------------------------------------------- node lock


@dataclass(frozen=True, slots=True)
class Lock:
    """Who holds the node lock. ``pod`` None: the old form, a time only."""

    time: str
    namespace: str | None = None
    pod: str | None = None

    def is_of(self, namespace: str, pod: str) -> bool:
        return (self.namespace, self.pod) == (namespace, pod)


def parse_lock(text: str) -> Lock:
    """``<RFC 3339 time>,<namespace>,<pod>``; ``Invalid`` for any other number of commas, as HAMi has it."""
    fields = text.split(",")
    if len(fields) == 1:
        return Lock(fields[0])
    if len(fields) != 3 or not all(fields):
        raise Invalid(f"the node lock {text[:200]!r} is malformed: it has to be time,namespace,pod")
    return Lock(*fields)


def format_lock(lock: Lock) -> str:
    return lock.time if lock.pod is None else f"{lock.time},{lock.namespace},{lock.pod}"


# ------------------------------------------------------------------------------------------------- inside a container


def container_environment(
    slices: Sequence[Slice], inventory: Inventory, task_priority: int | None = None
) -> dict[str, str]:
    """What HAMi's documentation promises that a container finds, over all its slices.

    As :func:`render.container_environment` has it, and besides: the memory limit without a number where all GPUs have
    the same one, for older hooks, and ``AMD_TASK_PRIORITY``.
    """
    found = render.container_environment(slices, inventory)
    limits = [value for key, value in found.items() if key.startswith("HIP_DEVICE_MEMORY_LIMIT_")]
    if len(limits) == sum(len(item.shares) for item in slices) and len(set(limits)) == 1:
        found["HIP_DEVICE_MEMORY_LIMIT"] = limits[0]
    if task_priority is not None:
        found["AMD_TASK_PRIORITY"] = str(task_priority)
    return found
