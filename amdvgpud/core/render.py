"""A Slice in the words of others: environment variables for the runtime and its neighbours, and a map for people.

Owns foreign units and index orders. What it renders is information beside the gate, which obeys the policy by gpu_id
and takes HSA_CU_MASK out of its own process; only programs that the gate does not reach go by it.

Sources: ROCr ``amd_filter_device.cpp`` for the tokens of ROCR_VISIBLE_DEVICES; HAMi's hook for HIP_DEVICE_MEMORY_LIMIT.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Final

from amdvgpud.core import cumask
from amdvgpud.core.errors import Conflict
from amdvgpud.core.model import ComputePolicy, CuLayout, CuSet, Inventory, Partition, Slice

MIB: Final = 1024**2


PLATFORM_FOLDER: Final = "platform"
STAND_IN_FOLDER: Final = "lib32"


def slice_environment(item: Slice, inventory: Inventory, *, all_nodes_visible: bool = False) -> dict[str, str]:
    """What a process in ``item`` should find in its environment; one order for all, that of ``item.shares``.

    * ``AMDVGPU_SLICE``: the name.
    * ``ROCR_VISIBLE_DEVICES``: only for several GPUs, where an order has to be told. One GPU is selected by what is
      injected, and the variable of a second CDI device would hide it.
    * ``HSA_CU_MASK``: canonical and read back; only if a share is masked.
    * ``HIP_DEVICE_MEMORY_LIMIT_<i>``: in whole MiB, rounded down; none for a share that has all of its Partition.

    ``all_nodes_visible``: the process sees the GPUs of the whole machine, as on the host (no device cgroup). Then one
    GPU needs ROCR_VISIBLE_DEVICES too, and ranks count all KFD nodes instead of the injected ones.

    ``Conflict`` if a Partition is gone: bits of one GPU must never be written for another.
    """
    partitions: list[Partition] = []
    for share in item.shares:
        partition = inventory.partition(share.partition)
        if partition is None or cumask.layout_hash(partition.layout) != share.layout_hash:
            raise Conflict(f"slice {item.name} is lost: {share.partition} is gone or laid out anew; delete it")
        partitions.append(partition)
    environment = {"AMDVGPU_SLICE": str(item.name)}
    if len(partitions) > 1 or all_nodes_visible:
        environment["ROCR_VISIBLE_DEVICES"] = ",".join(_visible(partitions, inventory, all_nodes_visible))
    mask = cumask.proven_cu_mask([share.cus for share in item.shares], [p.cu_count for p in partitions])
    if mask:
        environment["HSA_CU_MASK"] = mask
    for i, (share, partition) in enumerate(zip(item.shares, partitions, strict=True)):
        if share.cus is not None or share.vram_bytes < partition.vram_bytes:
            environment[f"HIP_DEVICE_MEMORY_LIMIT_{i}"] = _hami_size(share.vram_bytes)
    return environment


def container_environment(slices: Sequence[Slice], inventory: Inventory) -> dict[str, str]:
    """As :func:`slice_environment`, over all slices of one container, in the order in which it counts GPUs."""
    shares = {share.partition: share for item in slices for share in item.shares}
    ordered = [shares[p.id] for p in inventory.partitions if p.id in shares]
    if len(ordered) != len(shares):
        ordered = list(shares.values())  # one is gone, which the rendering refuses by its name
    environment = slice_environment(replace(slices[0], shares=tuple(ordered)), inventory)
    return environment | {"AMDVGPU_SLICE": ",".join(item.name for item in slices)}


def preload_line(library: str, by_platform: bool) -> str:
    """The line of ld.so.preload that brings ``library`` (a path), and where ``by_platform`` nothing to 32-bit programs.

    A linker that finds a library of the other word size says so on standard error, at each start. ``$PLATFORM`` is its
    own word for what it loads: on x86-64 x86_64, haswell or xeon_phi (some Intel processors; glibc 2.31 to 2.43), in
    a 32-bit program i686 or i586. Beside the library lies a folder with a link of each name, to the library's own
    folder or to that of an empty stand-in. Refused: ``$LIB``, of which each distribution makes something else.
    """
    folder, _, name = library.rpartition("/")
    return f"{folder}/{PLATFORM_FOLDER}/$PLATFORM/{name}" if by_platform else library


def _visible(partitions: Sequence[Partition], inventory: Inventory, all_nodes_visible: bool) -> list[str]:
    """UUID tokens if each names one node of the machine, else ranks for all.

    Partitions of one GPU may share their unique id, and ROCr ends the list at an ambiguous token without a word. A
    token is 20 characters, the most that ROCr takes.
    """
    everywhere = [p.unique_id for p in inventory.partitions]
    if all(p.unique_id and everywhere.count(p.unique_id) == 1 for p in partitions):
        return [f"GPU-{p.unique_id:016x}" for p in partitions]
    seen = sorted(p.kfd_node for p in (inventory.partitions if all_nodes_visible else partitions))
    return [str(seen.index(p.kfd_node)) for p in partitions]


def _hami_size(size_bytes: int) -> str:
    """``<MiB>m``. Below one MiB plain bytes, which that hook reads as well: 0m could be read as no limit."""
    return f"{size_bytes // MIB}m" if size_bytes >= MIB else str(size_bytes)


# ---------------------------------------------------------------------------------------------------- whole partitions


def partition_device(partition: Partition) -> str:
    """Its CDI device name: the id, with a dash for the slash that CDI does not take."""
    return f"{partition.gpu}-{partition.index}"


def reserved_partitions(slices: Iterable[Slice], inventory: Inventory) -> tuple[Partition, ...]:
    """The Partitions that a slice which is not lost has whole, by name: nobody else gets anything of them."""
    found = {}
    for item in slices:
        if item.request.compute.policy is not ComputePolicy.WHOLE:
            continue
        for share in item.shares:
            partition = inventory.partition(share.partition)
            if partition is not None and cumask.layout_hash(partition.layout) == share.layout_hash:
                found[partition_device(partition)] = partition
    return tuple(partition for _, partition in sorted(found.items()))


# ----------------------------------------------------------------------------------------------------------- the map

_LETTERS: Final = ascii_lowercase + ascii_uppercase + digits
_FREE, _TAIL, _MANY, _UNMASKED = ".", ":", "#", "?"


def draw_cus(layout: CuLayout, sets: Mapping[str, CuSet]) -> list[str]:
    """A map of who has which CU, a line for each XCC (and shader array), a group for each engine; then the legend.

    One character a CU, on WGP GPUs one a WGP: a letter for a slice, ``#`` several slices, ``.`` free, ``:`` free but
    only with all rows, ``?`` only for a whole share (no mask with equal counts on all XCCs can name it). A group is as
    long as the array with the most CUs.
    """
    width = 2 if layout.wgp else 1
    letters = {name: _LETTERS[i] if i < len(_LETTERS) else _MANY for i, name in enumerate(sets)}
    masks = {name: cus.mask for name, cus in sets.items()}
    rows = cumask.rows(layout)
    tail, maskable = rows.tail_mask, rows.all_mask
    bits = {place: bit for bit, place in enumerate(cumask.kernel_walk(layout)) if place is not None}

    def sign(place: cumask.Place) -> str:
        bit = bits.get(place)
        if bit is None or not maskable >> bit & 1:
            return _UNMASKED
        owners = [letters[name] for name, mask in masks.items() if mask >> bit & 1]
        if owners:
            return owners[0] if len(owners) == 1 else _MANY
        return _TAIL if tail >> bit & 1 else _FREE

    cells = -(-max(layout.active) // width)
    body: dict[str, list[str]] = {}
    for xcc in range(layout.xcc_count):
        for array in range(layout.arrays_per_engine):
            groups = []
            for engine in range(layout.engines_per_xcc):
                active = layout.active[(xcc * layout.engines_per_xcc + engine) * layout.arrays_per_engine + array]
                signs = "".join(sign(cumask.Place(xcc, engine, array, cu)) for cu in range(0, active, width))
                groups.append(signs.ljust(cells))
            body[f"XCC {xcc}" + (f" array {array}" if layout.arrays_per_engine > 1 else "")] = groups
    margin = max(map(len, body))
    column = max(cells, len(f"SE{layout.engines_per_xcc - 1}"))
    heads = "  ".join(f"SE{engine}".ljust(column) for engine in range(layout.engines_per_xcc))
    lines = [f"{'':{margin}}  {heads}".rstrip()]
    lines += [
        f"{label:{margin}}  {'  '.join(group.ljust(column) for group in groups)}".rstrip()
        for label, groups in body.items()
    ]
    drawn = "".join("".join(groups) for groups in body.values())
    lines += [f"{letters[name]} = {name} ({len(cus)} CUs: {cumask.format_ranges(cus)})" for name, cus in sets.items()]
    meanings = {_FREE: "free", _TAIL: "free, only with all rows", _MANY: "several", _UNMASKED: "only for a whole share"}
    notes = [f"{character} {meaning}" for character, meaning in meanings.items() if character in drawn]
    lines.append("; ".join([f"one sign is one {'WGP (2 CUs)' if layout.wgp else 'CU'}", *notes]))
    return lines
