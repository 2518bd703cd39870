"""What a GPU may be called, and which Partitions a name means.

Owns the forms that people, other tools and other daemons use for a GPU. Does not own the canonical ids (the scan gives
them). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from amdvgpud.core.errors import Invalid, NotFound
from amdvgpud.core.model import Gpu, Inventory, Partition

_HEX_ID: Final = re.compile(r"(?:gpu-|0x)([0-9a-f]{1,16})")
_ADDRESS: Final = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[01][0-9a-f]\.[0-7])")
_SMI_UUID: Final = re.compile(r"([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{4})-0000-1000-80([0-9a-f]{2})-([0-9a-f]{12})")
_WHOLE_DEVICE: Final = 0xFF


def smi_uuid(unique_id: int, device_id: int) -> str:
    """The UUID that AMD SMI prints for the GPU with this unique id (64 bits) and PCI device id (16 bits).

    A version-1 UUID without a clock: time-low holds the unique id's top byte, a function byte and the device id; the
    clock sequence's low byte and the node hold its other seven bytes. Source: ROCm/amdsmi ``src/amd_smi/
    amd_smi_uuid.cc`` (``amdsmi_uuid_gen``), called by ``amdsmi_get_gpu_device_uuid`` in ``amd_smi.cc``.

    The function byte is 0xff (the whole device) up to the libraries of ROCm 7.0; later ones put the partition id there,
    0 for an unpartitioned GPU, so one board has two spellings. We print the older, which is what schedulers have
    stored; :func:`resolve` takes both.
    """
    top, second, low = unique_id >> 56 & 0xFF, unique_id >> 48 & 0xFF, unique_id & (1 << 48) - 1
    return f"{top:02x}{_WHOLE_DEVICE:02x}{device_id & 0xFFFF:04x}-0000-1000-80{second:02x}-{low:012x}"


def forms(gpu: Gpu) -> tuple[str, ...]:
    """All names under which ``gpu`` is known, the canonical id first, each of them once.

    Id, ``0x`` and ``GPU-`` hex of its unique id, PCI address, index, SMI UUID; those that need a unique id only with
    one. ``<any of these>/<n>`` names Partition n.
    """
    names = [str(gpu.id)]
    if gpu.unique_id:
        names += [f"0x{gpu.unique_id:016x}", f"GPU-{gpu.unique_id:016x}"]
    names += [gpu.pci_address, str(gpu.index)]
    if gpu.smi_uuid:
        names.append(gpu.smi_uuid)
    return tuple(dict.fromkeys(names))


def resolve(inventory: Inventory, text: str) -> tuple[Partition, ...]:
    """The Partitions that ``text`` names, in partition order: all of a GPU, or the one of ``<gpu>/<n>``.

    Any form of :func:`forms`, in either letter case; the PCI address also without ``0000:``, the SMI UUID with either
    function byte; a unique id also by its first digits (after ``GPU-`` or ``0x``) if only one GPU has them, and by the
    id a Partition's own KFD node prints. ``NotFound`` lists the names valid here; ``Invalid`` if several GPUs match.
    """
    wanted = text.strip().lower()
    name, slash, number = wanted.partition("/")
    found = _partitions(inventory, text, name)
    if not slash:
        return found
    one = tuple(p for p in found if number == str(p.index))
    if not one:
        there = ", ".join(str(p.id) for p in found)
        raise NotFound(f"{text!r}: there is no partition {number!r} of it; it has {there}")
    return one


def canonical(inventory: Inventory, text: str) -> str:
    """``text`` as an id that means the same after a reboot or a switch of modes: a GpuId, or a PartitionId.

    An index is a rank on this boot's machine: kept as it was written, it would come to mean another GPU. Raises what
    :func:`resolve` does.
    """
    found = resolve(inventory, text)
    whole = len(found) == sum(p.gpu == found[0].gpu for p in inventory.partitions)
    return str(found[0].gpu if whole and "/" not in text else found[0].id)


def _partitions(inventory: Inventory, text: str, name: str) -> tuple[Partition, ...]:
    gpus = inventory.gpus
    if same := [g for g in gpus if name in {form.lower() for form in forms(g)}]:
        return _only(same, inventory, text).partitions

    if match := _ADDRESS.fullmatch(name):
        address = f"{match[1] or '0000'}:{match[2]}"
        return _only([g for g in gpus if g.pci_address == address], inventory, text).partitions

    if match := _SMI_UUID.fullmatch(name):
        top, function, device, second, low = match.groups()
        key = int(top + second + low, 16), int(device, 16)
        gpu = _only([g for g in gpus if g.unique_id and (g.unique_id, g.device_id) == key], inventory, text)
        return _of_function_byte(gpu, int(function, 16), inventory, text)

    if match := _HEX_ID.fullmatch(name):
        digits = match[1]
        # A node's own id comes before prefixes: it is written out in full. Partitions may share one with their GPU
        # (then it means all of them) or have one each.
        own = tuple(p for p in inventory.partitions if p.unique_id and p.unique_id == int(digits, 16))
        if own and len({p.gpu for p in own}) == 1:
            return own
        begin = [g for g in gpus if g.unique_id and f"{g.unique_id:016x}".startswith(digits)]
        sharing = [g for g in gpus if g.id in {p.gpu for p in own}]
        return _only(begin or sharing, inventory, text).partitions

    raise _unknown(inventory, text)


def _of_function_byte(gpu: Gpu, function: int, inventory: Inventory, text: str) -> tuple[Partition, ...]:
    """The Partitions that the function byte of an SMI UUID selects: the whole device, or a partition id."""
    if function == _WHOLE_DEVICE:
        return gpu.partitions
    chosen = tuple(p for p in gpu.partitions if p.index == function)
    if not chosen:
        raise _unknown(inventory, text)
    return chosen


def _only(gpus: Sequence[Gpu], inventory: Inventory, text: str) -> Gpu:
    if not gpus:
        raise _unknown(inventory, text)
    if len(gpus) > 1:
        raise Invalid(f"{text!r} could mean any of {', '.join(g.id for g in gpus)}: write more of it")
    return gpus[0]


def _unknown(inventory: Inventory, text: str) -> NotFound:
    if not inventory.gpus:
        return NotFound(f"{text!r} names no GPU: this node has none that can be used")
    valid = "; ".join(" = ".join(forms(g)) for g in inventory.gpus)
    return NotFound(f"{text!r} names no GPU of this node; valid are: {valid}")
