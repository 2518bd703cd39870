"""What a former user may have left on a GPU: VRAM that no process accounts for any more. Pure.

After a process has gone, the driver clears up for a while, and now and then it never ends. A whole GPU that is handed
on meanwhile is not the whole of it. What is normal is different on each machine (firmware, page tables, a desktop), so
it is learned: the unexplained bytes of each GPU while nobody uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from amdvgpud.core.model import Gpu, GpuId, Partition, SliceName
from amdvgpud.core.truth import KernelPicture, KernelProcess, given_only

TOLERANCE_BYTES: Final = 256 << 20
"""Unexplained bytes go up and down by that much on a healthy GPU; guessed."""
SETTLING_S: Final = 300.0
"""VRAM that is still unexplained so long after the last use is somebody's whom we cannot see (a desktop), and is taken
for normal from then on: a GPU is never held back for good by what is no user's; guessed."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What is normal on one GPU, and since when it is not."""

    unexplained_bytes: int
    used: bool = False
    """It has been in use, and the bytes have not been back to normal since."""
    idle_since_s: float | None = None


def unexplained_bytes(gpu: Gpu, picture: KernelPicture) -> int | None:
    """VRAM of ``gpu`` that the KFD accounts to no process; None where that cannot be told."""
    used = picture.vram_used_bytes.get(gpu.id)
    if used is None or picture.processes is None:
        return None
    return max(0, used - sum(_kfd_bytes(p, gpu.partitions) for p in picture.processes))


def learn(before: Mapping[GpuId, Baseline], gpus: Iterable[Gpu], picture: KernelPicture) -> dict[GpuId, Baseline]:
    """The baselines after this picture; of a GPU that cannot be judged now, what was known."""
    after = {}
    for gpu in gpus:
        known = before.get(gpu.id)
        now = unexplained_bytes(gpu, picture)
        if now is None or picture.processes is None:
            learned = known
        elif any(_kfd_bytes(p, gpu.partitions) for p in picture.processes):
            # Found in use at the first look: nothing is known of what is normal, and nothing is held back for it.
            learned = None if known is None else Baseline(known.unexplained_bytes, True)
        else:
            learned = _idle(known, now, picture.time_s)
        if learned is not None:
            after[gpu.id] = learned
    return after


def _idle(known: Baseline | None, now_bytes: int, time_s: float) -> Baseline:
    if known is None or not known.used or now_bytes <= known.unexplained_bytes + TOLERANCE_BYTES:
        return Baseline(now_bytes)
    since = time_s if known.idle_since_s is None else known.idle_since_s
    return Baseline(now_bytes) if time_s - since >= SETTLING_S else Baseline(known.unexplained_bytes, True, since)


def leftovers(
    gpu: Gpu,
    partitions: Iterable[Partition],
    all_ids: frozenset[int],
    picture: KernelPicture,
    known: Baseline | None,
    heir: SliceName | None = None,
) -> str | None:
    """Why ``partitions`` of ``gpu`` cannot be handed on as a whole, in words; None: nothing was left there.

    Nobody should be there: a process that has VRAM on them, or was given just these (of ``all_ids``, which are the
    KFD gpu_ids of the machine; a process of the host has all of them open and is in nobody's way by that). But those in
    the slice ``heir``: they are whom it is handed on to.
    """
    places = tuple(partitions)
    own = frozenset(p.kfd_gpu_id for p in places)
    there = [p for p in picture.processes or () if _is_there(p, own, all_ids) and heir not in p.belonging.slices]
    reasons = []
    if there:
        held = sum(_kfd_bytes(p, places) for p in there)
        names = ", ".join(f"{p.pid} ({p.command})" for p in there[:8])
        more = f" and {len(there) - 8} more" if len(there) > 8 else ""
        reasons.append(f"KFD processes are on it: {names}{more}, with {held} bytes of VRAM")
    elif known is not None and known.used and (now := unexplained_bytes(gpu, picture)) is not None:
        over = now - known.unexplained_bytes
        if over > TOLERANCE_BYTES:
            reasons.append(f"{over} bytes of VRAM are held by nobody since its last use")
    return "; ".join(reasons) or None


def _is_there(process: KernelProcess, own: frozenset[int], all_ids: frozenset[int]) -> bool:
    if any(process.vram_bytes.get(gpu_id) for gpu_id in own):
        return True
    return given_only(process.vram_bytes.keys(), own, all_ids)


def _kfd_bytes(process: KernelProcess, partitions: Iterable[Partition]) -> int:
    return sum(process.vram_bytes.get(p.kfd_gpu_id, 0) for p in partitions)
