"""What amdvgpuctl prints for people: tables and lines from the API's shapes.

On a terminal by rich; piped, plain columns without colour or box characters, the same words in the same order. Plain
text does without rich altogether, which is most of what a script would wait for. Programs take ``-o json``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from amdvgpud.core import wire
from amdvgpud.core.sizes import human_size

NONE = "-"


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    right: bool = False


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], out: TextIO | None = None) -> None:
    """``rows`` under ``columns``; with no row the titles alone, so that a script finds the same first line."""
    out = out or sys.stdout
    if out.isatty():
        _print_rich(columns, rows, out)
        return
    widths = [max(len(c.title), *(len(r[i]) for r in rows)) if rows else len(c.title) for i, c in enumerate(columns)]
    for row in [[c.title for c in columns], *rows]:
        cells = (t.rjust(w) if c.right else t.ljust(w) for t, w, c in zip(row, widths, columns, strict=True))
        print("  ".join(cells).rstrip(), file=out)


def _print_rich(columns: Sequence[Column], rows: Sequence[Sequence[str]], out: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))  # Text: no markup in foreign words
    Console(file=out, highlight=False).print(table)


_STYLES = {
    "running": "green",
    "held": "cyan",
    "lost": "red",
    "cordoned": "yellow",
    "degraded": "yellow",
    "unknown": "yellow",
    "unhealthy": "red",
    "no": "red",
    NONE: "dim",
}


def _columns(titles: str) -> list[Column]:
    """``titles`` by blanks; one that ends in ``>`` holds numbers and is set to the right."""
    return [Column(t.removesuffix(">"), t.endswith(">")) for t in titles.split()]


def print_facts(facts: Iterable[tuple[str, str]], out: TextIO | None = None) -> None:
    facts = list(facts)
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name.ljust(width)}  {value}".rstrip(), file=out or sys.stdout)


def _maybe(value: object) -> str:
    return NONE if value is None or value == "" else str(value)


def _size(number: int | None) -> str:
    return NONE if number is None else human_size(number)


def _free_of(total: int, taken: int) -> int:
    return max(0, total - taken)


# ----------------------------------------------------------------------------------------------------------- GPUs


def _state(gpu: wire.GpuView) -> str:
    if gpu.health is not None and not gpu.health.placeable:
        return gpu.health.condition
    if gpu.cordoned:
        return "cordoned"
    return "ok" if gpu.health is None or gpu.health.condition == "healthy" else gpu.health.condition


def _health(gpu: wire.GpuView) -> str:
    if gpu.health is None:
        return "nobody looks"
    return gpu.health.condition + (f": {gpu.health.reason}" if gpu.health.reason else "")


def health(gpu: wire.GpuView) -> None:
    facts = [("id", gpu.id), ("health", _health(gpu))]
    if (item := gpu.health) is not None:
        since = datetime.fromtimestamp(item.since_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        facts += [
            ("since", since if item.since_s else NONE),
            ("source", _maybe(item.source)),
            ("found", item.found or "nobody looks"),
            ("override", item.override or "none"),
            ("takes new slices", "yes" if item.placeable and not gpu.cordoned else "no"),
        ]
    print_facts(facts)


def gpus(answer: wire.GpuList) -> None:
    """Two tables: what each GPU has to give, and every name by which it can be asked for."""
    rows = []
    for gpu in answer.gpus:
        free_bytes = sum(p.vram_free_bytes for p in gpu.partitions)
        free_cus = sum(_free_of(p.cu_count, p.cus_allocated) for p in gpu.partitions)
        mode = "/".join(m for m in (gpu.compute_partition, gpu.memory_partition) if m)
        rows.append(
            [
                str(gpu.index),
                gpu.product_name,
                gpu.gfx_target,
                _maybe(mode),
                str(len(gpu.partitions)),
                human_size(gpu.vram_bytes),
                human_size(free_bytes),
                str(gpu.cu_count),
                str(free_cus),
                _state(gpu),
            ]
        )
    print_table(_columns("INDEX> PRODUCT GFX MODE PARTITIONS> VRAM> VRAM-FREE> CUS> CUS-FREE> STATE"), rows)
    print()
    names = [
        [str(g.index), g.id, g.pci_address, _maybe(g.unique_id), _maybe(g.smi_uuid)]
        for g in answer.gpus
    ]  # fmt: skip
    print_table(_columns("INDEX> ID PCI-ADDRESS UNIQUE-ID SMI-UUID"), names)
    for item in answer.unusable:
        print(f"unusable: {item.pci_address or item.name} ({item.name}): {item.reason}")
    for gone in answer.gone:
        print(f"gone: {gone.id}, since {utc_time(gone.since_s)}; it was at {_maybe(gone.pci_address)}")


def gpu(item: wire.GpuView) -> None:
    used = NONE if item.vram_used_bytes is None else human_size(item.vram_used_bytes)
    print_facts(
        [
            ("id", item.id),
            ("index", str(item.index)),
            ("PCI address", item.pci_address),
            ("unique id", _maybe(item.unique_id)),
            ("SMI UUID", _maybe(item.smi_uuid)),
            ("product", item.product_name),
            ("gfx target", item.gfx_target),
            ("VRAM", f"{human_size(item.vram_bytes)}, in use {used}"),
            ("CUs", str(item.cu_count)),
            *((f"{sensor} temperature", f"{degrees:g} °C") for sensor, degrees in item.temperatures_c.items()),
            ("compute mode", _mode(item.compute_partition, item.available_compute_partitions)),
            ("memory mode", _mode(item.memory_partition, item.available_memory_partitions)),
            ("NUMA node", _maybe(item.numa_node)),
            ("cordoned", "yes" if item.cordoned else "no"),
            ("health", _health(item)),
            ("oversubscription", "off" if item.oversubscription == 1 else f"{item.oversubscription:g} times the VRAM"),
        ]
    )
    print()
    rows = [
        [
            p.id,
            str(p.kfd_node),
            str(p.kfd_gpu_id),
            p.render_node,
            human_size(p.vram_bytes),
            human_size(p.vram_free_bytes),
            str(p.cu_count),
            str(_free_of(p.cu_count, p.cus_allocated)),
            f"{p.row_count} of {p.row_cus} CUs",
            str(p.xcc_count),
        ]
        for p in item.partitions
    ]
    titles = "PARTITION KFD-NODE> KFD-GPU-ID> RENDER-NODE VRAM> VRAM-FREE> CUS> CUS-FREE> ROWS XCCS>"
    print_table(_columns(titles), rows)
    if item.profiles:
        print()
        profiles(item.profiles)


def profiles(items: Sequence[wire.ProfileView]) -> None:
    """The modes that a GPU can be cut into."""
    rows = [
        [
            str(p.index),
            p.mode,
            "current" if p.current else NONE,
            str(p.partition_count),
            str(p.xccs_per_partition),
            str(p.cus_per_partition),
            human_size(p.vram_bytes_per_partition),
            " ".join(p.memory_modes) or NONE,
        ]
        for p in items
    ]
    print_table(_columns("PROFILE> MODE NOW PARTITIONS> XCCS-EACH> CUS-EACH> VRAM-EACH> MEMORY-MODES"), rows)


def proposals(answer: wire.ModeProposals) -> None:
    """What each proposal isolates and wastes, then the mode of each GPU in it."""
    rows = [
        [
            str(number),
            str(p.alone),
            str(p.sharing),
            str(p.unplaced),
            str(p.cus_wasted),
            human_size(p.vram_wasted_bytes),
            str(p.switches),
            str(p.untouched),
        ]
        for number, p in enumerate(answer.proposals, 1)
    ]
    titles = "PROPOSAL> ALONE> SHARING> UNPLACED> CUS-WASTED> VRAM-WASTED> SWITCHES> GPUS-UNUSED>"
    print_table(_columns(titles), rows)
    print()
    modes = [
        [str(number), gpu, _maybe(mode)]
        for number, p in enumerate(answer.proposals, 1)
        for gpu, mode in p.modes.items()
    ]
    print_table(_columns("PROPOSAL> GPU MODE"), modes)
    print("alone: the driver keeps others off (hard); sharing: the gate and CU masks do (soft)")
    if answer.busy:
        print(f"looked past, as slices are on them: {', '.join(answer.busy)}")


def _mode(now: str | None, available: Sequence[str]) -> str:
    return _maybe(now) + (f" (of {', '.join(available)})" if available else "")


# --------------------------------------------------------------------------------------------------------- slices


def slices(answer: wire.SliceList) -> None:
    rows = [
        [
            item.name,
            item.state,
            ",".join(s.partition for s in item.shares),
            human_size(sum(s.vram_bytes for s in item.shares)),
            human_size(sum(s.used_bytes for s in item.shares)),
            _cus(item.shares),
            item.policy,
            str(item.processes),
            item.enforced_by,
            _maybe(item.lease),
        ]
        for item in answer.slices
    ]
    print_table(_columns("NAME STATE PARTITIONS VRAM> USED> CUS> POLICY PROCESSES> ENFORCED-BY LEASE"), rows)


def slice(item: wire.SliceView, usage: wire.UsageView | None = None, processes: wire.ProcessList | None = None) -> None:  # noqa: A001
    unseen = item.enforced_by == "gate" and not item.gate_seen
    print_facts(
        [
            ("name", item.name),
            ("state", item.state + (f": {item.lost_reason}" if item.lost_reason else "")),
            ("enforced by", f"{item.enforced_by} (not seen yet)" if unseen else item.enforced_by),
            ("owner", f"uid {item.owner_uid}"),
            ("CDI device", _maybe(item.cdi_device)),
            ("compute", f"{item.compute} ({item.policy})"),
            ("priority", item.priority),
            ("out of VRAM", "host memory serves" if item.oversubscribe else "refused"),
            ("lease", _maybe(item.lease)),
            (
                "processes",
                str(item.processes)
                + (f" and {item.unmanaged_processes} without the gate" if item.unmanaged_processes else ""),
            ),
            ("created", utc_time(item.created_s)),
        ]
    )
    print()
    shares(item.shares)
    if item.containers:
        print()
        print_table(
            _columns("CONTAINER PID> POD GATE DMEM> KERNEL-CAP"),
            [
                [
                    container.id[:12] or "?",
                    str(container.pid),
                    _maybe(container.pod),
                    container.gate + (f": {container.gate_reason}" if container.gate_reason else ""),
                    NONE if container.dmem_bytes is None else human_size(sum(container.dmem_bytes.values())),
                    "yes" if container.cap == "" else f"no: {container.cap}" if container.cap else "-",
                ]
                for container in item.containers
            ],
        )
    if usage is not None:
        print()
        rows = [
            [
                g.partition,
                human_size(g.limit_bytes),
                human_size(g.used_bytes),
                human_size(g.peak_bytes),
                _size(g.driver_bytes),
                _size(g.untracked_bytes),
                str(g.denials),
                human_size(g.denied_bytes),
            ]
            for g in usage.gpus
        ]
        print_table(_columns("PARTITION LIMIT> USED> PEAK> DRIVER> UNTRACKED> DENIALS> DENIED>"), rows)
        if usage.damaged:
            print(f"the ledger is damaged: {usage.damaged}")
    if processes is not None and processes.processes:
        print()
        held = [
            [
                str(p.pid),
                _maybe(p.host_pid),
                _maybe(p.command),
                human_size(sum(p.used_bytes.values())),
                NONE if p.driver_bytes is None else human_size(sum(p.driver_bytes.values())),
                "yes" if p.tracked else "no",
            ]
            for p in processes.processes
        ]
        print_table(_columns("PID> HOST-PID> COMMAND USED> DRIVER> GATE"), held)


def shares(items: Sequence[wire.ShareView]) -> None:
    """Asked, granted and effective CUs beside each other, as every answer must show them."""
    rows = [
        [
            s.partition,
            human_size(s.vram_bytes),
            str(s.asked_cus),
            str(s.granted_cus),
            str(s.effective_cus),
            "yes" if s.shared else "no",
            "all, unmasked" if s.cus is None else s.cus,
        ]
        for s in items
    ]
    print_table(_columns("PARTITION VRAM> ASKED> GRANTED> EFFECTIVE> SHARED CUS"), rows)


def _cus(items: Sequence[wire.ShareView]) -> str:
    return "+".join(str(s.granted_cus) for s in items)


def amounts(items: Sequence[wire.ShareView]) -> str:
    """``4 GiB and 76 CUs of GPU-…/0``, one such for each share."""
    return ", ".join(f"{human_size(s.vram_bytes)} and {s.granted_cus} CUs of {s.partition}" for s in items)


def plan(answer: wire.PlanView, machine: wire.GpuList, others: wire.SliceList) -> None:
    """The shares, then a map of each partition with the CUs of this slice and of those that are there already."""
    shares(answer.shares)
    partitions = {p.id: p for g in machine.gpus for p in g.partitions}
    for share in answer.shares:
        where = partitions.get(share.partition)
        if share.cus is None or where is None or not where.active:
            continue  # all of it, or a daemon that does not tell how CUs lie
        placed = {answer.name: share.cus}
        for item in others.slices:
            for theirs in item.shares:
                if theirs.partition == share.partition and theirs.cus is not None:
                    placed[item.name] = theirs.cus
        print(f"\n{share.partition}")
        print("\n".join(_map(where, placed)))


def _map(where: wire.PartitionView, placed: Mapping[str, str]) -> list[str]:
    """``placed``: ranges by slice name."""
    from amdvgpud.core.cumask import parse_cu_mask
    from amdvgpud.core.model import CuLayout
    from amdvgpud.core.render import draw_cus

    layout = CuLayout(
        where.xcc_count,
        where.engines_per_xcc,
        where.arrays_per_engine,
        tuple(where.active),
        where.wgp,
        where.harvest_known,
    )
    sets = {name: parse_cu_mask(f"0:{ranges}", [where.cu_count])[0] for name, ranges in placed.items()}
    return draw_cus(layout, {name: cus for name, cus in sets.items() if cus is not None})


# --------------------------------------------------------------------------------------------------- all the rest


def leases(answer: wire.LeaseList) -> None:
    rows = [
        [
            item.id,
            item.slice,
            _maybe(item.pid),
            item.bind,
            utc_time(item.created_s),
            NONE if item.expires_s is None else utc_time(item.expires_s),
            "yes" if item.ephemeral else "no",
            _maybe(item.holder),
        ]
        for item in answer.leases
    ]
    print_table(_columns("ID SLICE PID> BIND CREATED EXPIRES EPHEMERAL HOLDER"), rows)


def event(item: wire.EventView) -> None:
    print(f"{utc_time(item.time_s)}  {item.id}  {item.kind}  {item.subject}  {item.detail}".rstrip(), flush=True)


def cdi(answer: wire.CdiView) -> None:
    print_facts(
        [
            ("kind", answer.kind),
            ("file", answer.path if answer.written else f"{answer.path} (not written)"),
            ("error", _maybe(answer.error)),
            ("conflicts", "; ".join(answer.conflicts) or NONE),
        ]
    )
    print()
    print_table([Column("DEVICE")], [[d] for d in [*answer.devices, *answer.partition_devices]])


def system(answer: wire.SystemView) -> None:
    print_facts(
        [
            ("version", answer.version),
            ("API", answer.api),
            ("ready", "yes" if answer.ready else "no"),
            ("simulated", _maybe(answer.simulated)),
            ("driver", _maybe(answer.driver_version)),
            *((("pods", f"by {k.delivery}: {k.reason}"),) if (k := answer.kubelet) else ()),
            ("revision", str(answer.revision)),
            ("topology generation", str(answer.generation_id)),
            ("features", ", ".join(answer.features) or NONE),
            *(("warning", text) for text in answer.warnings),
        ]
    )


def utc_time(unix_s: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
