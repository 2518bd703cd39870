"""The API's own shapes: what goes over the socket as JSON, for the server and its client alike.

msgspec Structs: requests are decoded strictly (an unknown field is an error that names it), answers are encoded from
them, and OpenAPI is derived from them. Sizes in requests are bytes or a text of :mod:`amdvgpud.core.sizes`; in answers
always bytes. Adding a field is compatible; renaming or removing one needs /v2.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from amdvgpud.core.compute import parse_compute
from amdvgpud.core.model import Priority, Request, Spread, slice_name
from amdvgpud.core.sizes import parse_size

# The bounds below are for the OpenAPI document only: parse_size and parse_compute check, with better sentences.
Size = Annotated[
    Annotated[int, Meta(extra_json_schema={"minimum": 1, "maximum": 2**63 - 1})]
    | Annotated[str, Meta(extra_json_schema={"pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*([KMGTkmgt]?[Ii]?[Bb]?)\s*$"})],
    Meta(description="bytes, or a text such as '16GiB' (K M G T, KiB MiB GiB TiB)"),
]
Policy = Literal["balanced", "fine", "exact", "whole", "shared"]
PriorityName = Literal["low", "normal", "high"]


# ---------------------------------------------------------------------------------------------------- requests


class SliceSpec(Struct, forbid_unknown_fields=True, kw_only=True):
    """What is asked of one slice; `vram` and `compute` are for each of its GPUs."""

    compute: Annotated[
        str,
        Meta(
            description="'25%', '38' (CUs) or 'whole'",
            extra_json_schema={"pattern": r"^(whole|[0-9]{1,3}(\.[0-9]+)?%|[0-9]{1,4})$"},
        ),
    ] = "100%"
    policy: Policy = "balanced"
    vram: Size | None = None
    gpus: Annotated[int, Meta(ge=1, le=16, description="how many different GPUs")] = 1
    on: Annotated[
        list[str], Meta(max_length=64, description="GPUs or partitions, in any form that `gpu list` shows")
    ] = msgspec.field(default_factory=list)
    spread: Literal["binpack", "spread"] = "binpack"
    priority: Annotated[
        PriorityName, Meta(description="the most that its queues may ask for beside other slices of the GPU")
    ] = "normal"
    oversubscribe: Annotated[
        bool, Meta(description="host memory serves, within the quota, where the GPU has no VRAM left")
    ] = False
    owner: Annotated[
        int | str | None,
        Meta(
            description="user (uid or name) whose rootless runtime may mount the slice's files; without it, the caller"
        ),
    ] = None


class SliceResize(Struct, forbid_unknown_fields=True, kw_only=True):
    """A merge patch: the new VRAM quota on each GPU of the slice."""

    vram: Size


class LeaseSpec(Struct, forbid_unknown_fields=True, kw_only=True):
    """A lease on an existing slice (`slice`), or on one made for it (`request`): exactly one of the two.

    `pid` names the holder's process: the lease ends with it. `ttl_s` ends it after so many seconds unless renewed.
    `bind: container`: it ends with the last container that has the slice, once there was one.
    """

    slice: str | None = None
    request: SliceSpec | None = None
    holder: Annotated[str, Meta(max_length=256)] = ""
    pid: Annotated[int, Meta(ge=1)] | None = None
    ttl_s: Annotated[float, Meta(gt=0, le=31_536_000)] | None = None
    bind: Literal["holder", "container"] = "holder"


class LeaseRenewal(Struct, forbid_unknown_fields=True, kw_only=True):
    """A merge patch: `ttl_s` lets the lease end so many seconds from now; null takes its end away."""

    ttl_s: Annotated[float, Meta(gt=0, le=31_536_000)] | UnsetType | None = UNSET


class GpuPatch(Struct, forbid_unknown_fields=True, kw_only=True):
    """What an operator may set on a GPU."""

    cordoned: bool | UnsetType = UNSET
    oversubscription: Annotated[float, Meta(ge=1, le=16)] | UnsetType = UNSET
    health_override: (
        Annotated[
            Literal["healthy", "unhealthy", "none"],
            Meta(description="what holds, whatever is found of the GPU; none takes that back"),
        ]
        | UnsetType
    ) = UNSET


class PartitionSpec(Struct, forbid_unknown_fields=True, kw_only=True):
    """What a GPU is to be cut into: at least one of the two."""

    compute: (
        Annotated[str, Meta(description="SPX, DPX, TPX, QPX or CPX, as `profiles` lists them", max_length=8)] | None
    ) = None
    memory: (
        Annotated[
            str,
            Meta(
                description="NPS1, NPS2, NPS4 or NPS8; noted by the driver, in force when it is loaded anew",
                max_length=8,
            ),
        ]
        | None
    ) = None


def request_of(name: str, spec: SliceSpec, pointer: str = "name") -> Request:
    """``spec`` under ``name`` as a Request. ``Invalid`` names the field; ``pointer`` is what the name is called."""
    return Request(
        name=slice_name(name, pointer),
        compute=parse_compute(spec.compute, spec.policy),
        vram_bytes=None if spec.vram is None else parse_size(spec.vram, "/vram"),
        gpu_count=spec.gpus,
        on=tuple(spec.on),
        spread=Spread(spec.spread),
        priority=Priority(spec.priority),
        oversubscribe=spec.oversubscribe,
    )


# ----------------------------------------------------------------------------------------------------- answers


class LinkView(Struct, kw_only=True):
    kind: str
    to_partition: str | None
    to_kfd_node: int
    weight: int


class PartitionView(Struct, kw_only=True):
    id: str
    index: int
    kfd_node: int
    kfd_gpu_id: int
    render_node: str
    gfx_target: str
    vram_bytes: int
    vram_reserved_bytes: int
    vram_free_bytes: int
    cu_count: int
    cus_allocated: int
    xcc_count: int
    row_count: int
    row_cus: int
    wgp: bool
    harvest_known: bool
    numa_node: int | None
    links: list[LinkView]
    engines_per_xcc: int = 0
    arrays_per_engine: int = 0
    active: list[int] = msgspec.field(default_factory=list)
    """Active CUs of each shader array, as CuLayout has them; with them a client can draw where a CuSet lies."""


class ProfileView(Struct, kw_only=True):
    """One mode that a GPU can be cut into, and what each partition is in it."""

    index: int
    mode: str
    current: bool
    partition_count: int
    xccs_per_partition: int
    cus_per_partition: int
    """Of the whole divided by the count; harvest makes single partitions differ."""
    vram_bytes_per_partition: int
    memory_modes: list[str]


class HealthView(Struct, kw_only=True):
    """What holds of a GPU. One that is not `placeable` takes no new slice and no new lease; what is on it stays."""

    condition: Literal["healthy", "degraded", "unhealthy", "unknown"]
    placeable: bool
    reason: str
    source: Annotated[
        str, Meta(description="pulse, check, uevent, smi, ras, retired_pages, pcie, exporter, override; empty if well")
    ]
    since_s: Annotated[float, Meta(description="Unix time since when the condition is this one")]
    override: Annotated[Literal["healthy", "unhealthy"] | None, Meta(description="a person's word")]
    found: Annotated[
        Literal["healthy", "degraded", "unhealthy", "unknown"] | None,
        Meta(description="the condition without it; null: nobody has looked"),
    ]


class GpuView(Struct, kw_only=True):
    id: str
    index: int
    pci_address: str
    unique_id: str | None
    smi_uuid: str | None
    product_name: str
    gfx_target: str
    vram_bytes: int
    vram_used_bytes: int | None
    cu_count: int
    compute_partition: str | None
    memory_partition: str | None
    available_compute_partitions: list[str]
    available_memory_partitions: list[str]
    numa_node: int | None
    cordoned: bool
    health: Annotated[HealthView | None, Meta(description="null: nobody has looked at the GPU")] = None
    oversubscription: float
    partitions: list[PartitionView]
    profiles: list[ProfileView] = msgspec.field(default_factory=list)
    """Empty: the GPU cannot be partitioned."""
    temperatures_c: dict[str, float] = msgspec.field(default_factory=dict)
    """By the driver's name of the sensor, as of the last sample; empty where there is none, or the GPU may sleep."""


class RepartitionView(Struct, kw_only=True):
    """What a switch of modes has done, or with `dry_run` would do."""

    gpu: str
    before: str | None
    after: str | None
    changed: bool
    partitions: int
    index: int
    """Of the GPU, now: a switch moves it to the end of the KFD's order, and with it the others' indices."""
    memory: str | None
    memory_requested: str | None
    """Noted by the driver; in force only when the driver of the whole node is loaded anew."""
    lost: list[str]
    """Slices that were cut for the mode before. They come back with it."""
    settled: bool
    note: str


class ModeProposal(Struct, kw_only=True):
    """One mode for each GPU that is idle. `alone` slices have a partition to themselves, `sharing` ones have not."""

    modes: dict[str, str | None]
    alone: int
    sharing: int
    unplaced: int
    cus_wasted: int
    vram_wasted_bytes: int
    switches: int
    untouched: int
    text: str


class ModeProposals(Struct, kw_only=True):
    """Hardest isolation first; later ones waste less."""

    proposals: list[ModeProposal]
    busy: list[str]
    """GPUs with slices or leases, which were looked past."""


class UnusableView(Struct, kw_only=True):
    pci_address: str | None
    name: str
    reason: str


class GoneView(Struct, kw_only=True):
    """A GPU that was here, since the daemon's start or as slices say that are cut from it, and is not."""

    id: str
    since_s: float
    pci_address: str | None
    product_name: str | None


class GpuList(Struct, kw_only=True):
    gpus: list[GpuView]
    unusable: list[UnusableView]
    revision: int
    gone: list[GoneView] = msgspec.field(default_factory=list)


class ShareView(Struct, kw_only=True):
    partition: str
    gpu: str
    vram_bytes: int
    used_bytes: int
    asked_cus: int
    granted_cus: int
    effective_cus: int
    cus: str | None
    """Ranges as HSA_CU_MASK writes them (`0-31,64`); null: all, unmasked."""
    shared: bool
    driver_bytes: int | None = None
    """VRAM that the kernel accounts to the slice's processes, as of its last look; null: it cannot be told."""
    untracked_bytes: int | None = None
    """Of these, what their ledger slots do not have; null also where the slice needs no gate."""
    dmem_bytes: int | None = None
    """VRAM that the kernel's dmem controller counts for the slice's containers, as of the last look; null: it cannot be
    told, also where a container has another slice on the GPU too."""


SliceState = Literal["free", "held", "running", "lost"]


class ContainerView(Struct, kw_only=True):
    """A container that has the slice. `cap`: why the kernel does not cap its VRAM; empty: it does; null: not tried.
    `dmem_bytes`: what the kernel's dmem controller counts for all of it, by GPU; null: it cannot be told."""

    id: str
    pid: int
    pod: str | None
    since_s: float
    reported: Annotated[bool, Meta(description="by the runtime's hook, when it started; else found later")]
    gate: Annotated[Literal["yes", "no", "unknown"], Meta(description="whether the gate gets into its first program")]
    gate_reason: str
    cap: str | None
    dmem_bytes: dict[str, int] | None = None


class SliceView(Struct, kw_only=True):
    """`state`: lost when a GPU of it is gone, running when its ledger has a live process or a container has it, held
    when leased."""

    name: str
    state: SliceState
    lost_reason: str | None
    enforced_by: Annotated[
        str,
        Meta(
            description="what holds the limits: 'gate'; 'gate+dmem' where the kernel caps the VRAM too; 'dmem' or "
            "'none' where the gate cannot be in the containers that have it; 'none' for a whole unmasked GPU, too"
        ),
    ]
    gate_seen: Annotated[
        bool,
        Meta(description="a process of the slice has used the ledger: its gate was loaded. False says nothing yet"),
    ] = False
    owner_uid: int = 0
    profile: Annotated[
        str, Meta(description="the profile of the configuration that it was cut for, and goes with; empty: none")
    ] = ""
    cdi_device: str | None
    compute: str
    policy: Policy
    shares: list[ShareView]
    lease: str | None
    processes: int
    created_s: float
    revision: int
    priority: PriorityName = "normal"
    oversubscribe: bool = False
    unmanaged_processes: int | None = None
    """Processes of the slice that have its GPUs open and no slot in its ledger: their gate is not loaded."""
    containers: list[ContainerView] = msgspec.field(default_factory=list)


class SliceList(Struct, kw_only=True):
    slices: list[SliceView]
    revision: int
    next_cursor: str | None = None


class PlanView(Struct, kw_only=True):
    """The answer to a dry run: what would be granted, and the CDI device that would be written."""

    name: str
    shares: list[ShareView]
    cdi: dict[str, object]


class LeaseView(Struct, kw_only=True):
    id: str
    slice: str
    holder: str
    pid: int | None
    created_s: float
    expires_s: float | None
    ephemeral: bool
    slice_dir: str
    """Where on this machine the slice's files lie (`…/guest` is what a container sees)."""
    environment: dict[str, str]
    """What a process in the slice should find in its environment."""
    preload: list[str] = msgspec.field(default_factory=list)
    """Libraries to load into it, in this order, as paths on this machine; empty: the gate where it is installed."""
    bind: Literal["holder", "container"] = "holder"


class LeaseList(Struct, kw_only=True):
    leases: list[LeaseView]
    revision: int


class GpuUsageView(Struct, kw_only=True):
    partition: str
    limit_bytes: int
    used_bytes: int
    peak_bytes: int
    denials: int
    denied_bytes: int
    allocations: int
    frees: int
    driver_bytes: int | None = None
    untracked_bytes: int | None = None
    dmem_bytes: int | None = None


class UsageView(Struct, kw_only=True):
    slice: str
    gpus: list[GpuUsageView]
    damaged: str | None
    reclaimed_bytes: int


class ProcessView(Struct, kw_only=True):
    """`pid` as the process's own namespace counts it; `tracked`: it has a slot in the ledger, so its gate is loaded.

    What the kernel says (`host_pid`, `command`, `driver_bytes`) is as of its last look, and null where it says nothing.
    """

    pid: int
    pid_namespace: int
    used_bytes: dict[str, int]
    """By partition id."""
    host_pid: int | None = None
    command: str | None = None
    driver_bytes: dict[str, int] | None = None
    sdma_us: Annotated[
        dict[str, int] | None,
        Meta(description="activity of its copy engines since it started, in µs; null: not read (kernel.sdma)"),
    ] = None
    tracked: bool = True


class ProcessList(Struct, kw_only=True):
    slice: str
    processes: list[ProcessView]


class CdiView(Struct, kw_only=True):
    kind: str
    path: str
    written: bool
    error: str | None
    devices: list[str]
    conflicts: list[str]
    spec: dict[str, object] | None
    partition_devices: list[str] = msgspec.field(default_factory=list)
    """Whole partitions, each reserved by a slice that has all of it."""


class EventView(Struct, kw_only=True):
    """One thing that happened. `id` grows by one an event since the daemon started; `revision` is the Book's."""

    id: int
    revision: int
    time_s: float
    kind: str
    subject: str
    detail: str


class EventList(Struct, kw_only=True):
    events: list[EventView]
    last_id: int
    resync: bool
    """The ring has dropped events after `since`: read the lists again."""


class KubeletView(Struct):
    """How pods get what they are given."""

    delivery: Literal["cdi", "nodes"]
    reason: str
    known: bool
    """False: it may be the other way as soon as the Kubernetes API answers."""


class SystemView(Struct, kw_only=True):
    version: str
    api: str
    features: list[str]
    simulated: str | None
    driver_version: str | None
    generation_id: int
    revision: int
    ready: bool
    warnings: list[str]
    config: dict[str, object]
    kubelet: KubeletView | None = None
    """None: no kubelet is served."""


class Problem(Struct, kw_only=True, omit_defaults=True):
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    errors: list[dict[str, str]] = msgspec.field(default_factory=list)


class Links(Struct, kw_only=True):
    """The way in: `GET /`."""

    name: str
    version: str
    versions: list[str]
    features: list[str]
    links: dict[str, str]


class Health(Struct, kw_only=True):
    status: Literal["ok", "starting"]
