"""One owner of what the kernel says: it looks on a schedule, holds the ledgers against it, and acts by the policy.

Owns the last picture, what followed from it, and the watchdog's suspicions. Faces get :meth:`Guard.view`, which is
frozen; nothing is read in a scrape. Decides by :mod:`amdvgpud.core.watchdog`, acts through two ports. Before a whole
Partition is handed on, :class:`Leftovers` looks who is still there, for the Node.

A figure is never a reason to refuse a slice its limits: this reports what goes around them, and fails open. It looks so
often that it never takes more than a hundredth of one core (:data:`COST`), however many processes there are.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from amdvgpud.core.caps import capped_cgroup
from amdvgpud.core.errors import AmdvgpuError, NotFound
from amdvgpud.core.leftovers import Baseline, learn, leftovers
from amdvgpud.core.model import Gpu, GpuId, Inventory, Partition, PartitionId, ProcessUsage, SliceName, Usage
from amdvgpud.core.truth import Ceilings, Comparison, KernelPicture, compare
from amdvgpud.core.watchdog import Policy, Reason, Rules, Step, Suspicion, Suspicions, judge
from amdvgpud.node import Node, NodeView

log = logging.getLogger(__name__)

COST: Final = 0.01
"""The part of one core that looking may take at most: after a look that took long, the next one waits longer. What
reading the ledgers takes is not counted: their number is bounded, and the number of processes is not."""

_SIGNALS: Final = {Step.TERMINATE: signal.SIGTERM, Step.KILL: signal.SIGKILL}


class Figures(Protocol):
    """What the kernel says now. Blocking, from any thread; raises nothing, as what cannot be had is absent."""

    def read(self, inventory: Inventory, cgroups: Collection[str] = ()) -> KernelPicture:
        """``cgroups``: of which the picture is to say what the dmem controller counts."""
        ...


class Ender(Protocol):
    """Ends a process of a slice, and never another one."""

    def end(self, pid: int, start: int, name: SliceName, number: int) -> None:
        """``NotFound``: it is not that process, or not in that slice, any more. ``HostFailure``: it may not be done."""
        ...


@dataclass(frozen=True, slots=True)
class GuardView:
    """What the faces show."""

    picture: KernelPicture = field(default_factory=KernelPicture)
    comparison: Comparison | None = None
    """None: never looked, or the kernel's list of processes could not be had."""
    evicted_s: Mapping[tuple[SliceName, PartitionId], float] = field(default_factory=dict)
    """How long queues of each slice's processes have been evicted, since the slice or this daemon began."""
    suspicions: tuple[Suspicion, ...] = ()
    findings: Mapping[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    """Suspicions that lasted, since this daemon started."""
    signals: Mapping[Step, int] = field(default_factory=lambda: dict.fromkeys(_SIGNALS, 0))
    looked: bool = False
    duration_s: float = 0.0
    """Of the last look."""
    last_success_s: float | None = None
    """Unix time of the last look that had a list of processes."""
    warnings: tuple[str, ...] = ()


class Leftovers:
    """The implementation of :class:`amdvgpud.ports.Leftovers`: a fresh look, against what is normal for the GPU."""

    def __init__(self, figures: Figures) -> None:
        self._figures = figures
        self._baselines: Mapping[GpuId, Baseline] = {}

    def learn(self, inventory: Inventory, picture: KernelPicture) -> None:
        self._baselines = learn(self._baselines, inventory.gpus, picture)

    def on(
        self, places: Sequence[tuple[Gpu, Partition]], inventory: Inventory, heir: SliceName | None = None
    ) -> Mapping[GpuId, str]:
        """Blocking. Where nothing can be seen, nothing is held back: a grant does not hang on a figure."""
        picture = self._figures.read(inventory)
        everything = frozenset(p.kfd_gpu_id for p in inventory.partitions)
        return {
            gpu.id: reason
            for gpu, partition in places
            if (reason := leftovers(gpu, (partition,), everything, picture, self._baselines.get(gpu.id), heir))
        }


class Guard:
    """See the module's head. :meth:`sample` is one look; :meth:`run` looks for ever."""

    def __init__(
        self,
        node: Node,
        figures: Figures,
        ender: Ender,
        rules: Callable[[], Rules],
        *,
        now_s: Callable[[], float],
        monotonic_s: Callable[[], float] = time.monotonic,
        left: Leftovers | None = None,
    ) -> None:
        """``now_s`` is Unix time, and ``monotonic_s`` what the watchdog's patience is measured by."""
        self._node = node
        self._figures = figures
        self._ender = ender
        self._rules = rules
        self._now_s = now_s
        self._monotonic_s = monotonic_s
        self._left = left
        self._view = GuardView()
        self._suspicions: Suspicions = {}
        self._quotas: dict[tuple[SliceName, PartitionId], int] = {}
        """The largest that each slice has had since it was last without a process."""
        self._evicted_ms: dict[tuple[SliceName, PartitionId], dict[tuple[int, int], int]] = {}
        self._evicted_before_ms: dict[tuple[SliceName, PartitionId], int] = {}
        """Of processes that have ended."""
        self._cost_s = 0.0

    def view(self) -> GuardView:
        """The present picture, without those of its slices that are gone; no I/O."""
        slices = self._node.view().book.slices
        seen = self._view.comparison
        if seen is None or seen.slices.keys() <= slices.keys():
            return self._view
        there = {name: truth for name, truth in seen.slices.items() if name in slices}
        return replace(
            self._view,
            comparison=Comparison(there, seen.strangers),
            evicted_s={key: s for key, s in self._view.evicted_s.items() if key[0] in slices},
            suspicions=tuple(s for s in self._view.suspicions if s.slice in slices),
        )

    async def run(self, sample_s: Callable[[], float]) -> None:
        """A look every ``sample_s()``, or sooner where a process has been asked to end."""
        while True:
            await self.sample()
            rules = self._rules()
            wait_s = sample_s()
            if rules.policy is Policy.KILL and any(s.step for s in self._suspicions.values()):
                wait_s = min(wait_s, rules.grace_s)
            await asyncio.sleep(max(wait_s, self._cost_s / COST))

    async def sample(self) -> None:
        """One look, and what follows from it. Whatever goes wrong is logged: the next look may do better."""
        try:
            await self._sample()
        except (AmdvgpuError, OSError) as error:
            log.warning("A look at the kernel's figures failed, the next one follows: %s", error)

    async def _sample(self) -> None:
        before = await self._node.refresh_usage()
        cgroups = {cgroup for of in before.containers.values() for c in of if (cgroup := capped_cgroup(c)) is not None}
        picture, duration_s, cost_s = await asyncio.to_thread(self._look, before.inventory, cgroups)
        # A process takes and gives back all the time. Its gate charges before the driver serves and withdraws after it
        # has freed, so of two readings around the kernel's the larger one is fair.
        after = await self._node.refresh_usage()
        began_s = time.thread_time()
        usage = {name: _larger(before.usage.get(name), of) for name, of in after.usage.items()}
        ceilings = self._ceilings(after, before.usage)
        comparison = compare(after.book, before.inventory, usage, picture, ceilings)
        if self._left is not None:
            self._left.learn(before.inventory, picture)
        if comparison is not None:
            self._count_evictions(after.book.slices, before.inventory, picture, comparison)
        findings, signals = dict(self._view.findings), dict(self._view.signals)
        due: tuple[Suspicion, ...] = ()
        if comparison is not None:
            self._suspicions, due = judge(self._rules(), comparison, self._suspicions, self._monotonic_s())
        self._cost_s = cost_s + time.thread_time() - began_s
        for suspicion in due:
            await self._act(suspicion, findings, signals)
        standing = tuple(self._suspicions.values())
        self._view = GuardView(
            picture,
            comparison,
            {
                key: (self._evicted_before_ms.get(key, 0) + sum(of.values())) / 1000
                for key, of in self._evicted_ms.items()
            },
            standing,
            findings,
            signals,
            True,
            duration_s,
            self._view.last_success_s if comparison is None else self._now_s(),
            (*picture.reasons, *self._warnings(standing)),
        )

    def _look(self, inventory: Inventory, cgroups: Collection[str]) -> tuple[KernelPicture, float, float]:
        """The picture, how long it took, and how much of it was work."""
        began_s, worked_s = time.perf_counter(), time.thread_time()
        picture = self._figures.read(inventory, cgroups)
        return picture, time.perf_counter() - began_s, time.thread_time() - worked_s

    def _warnings(self, standing: Sequence[Suspicion]) -> tuple[str, ...]:
        if self._rules().policy is Policy.OBSERVE:
            return ()
        return tuple(f"slice {s.slice}: {s}" for s in standing if s.step is not None)

    def _ceilings(self, view: NodeView, before: Mapping[SliceName, Usage]) -> Ceilings:
        """For ledgers that claim more than gates have ever let in: somebody else has written that.

        What came in under a larger quota may stay when that is lowered. What a ledger has at the first look of all may
        have come so before this daemon was started: that it is too much shows (used above the quota), and is held
        against nobody. Readings are judged one by one, as their larger figures together may exceed what ever was;
        who writes another ledger between the two can so pass for up to twice the quota.
        """
        found: dict[tuple[SliceName, PartitionId], int] = {}
        quotas: dict[tuple[SliceName, PartitionId], int] = {}
        for name, item in view.book.slices.items():
            readings = [usage for usage in (before.get(name), view.usage.get(name)) if usage is not None]
            for share in item.shares:
                partition = view.inventory.partition(share.partition)
                key = (name, share.partition)
                if partition is None:  # nobody can say what is used there now
                    if key in self._quotas:
                        quotas[key] = self._quotas[key]
                    continue
                claimed = max((u.used_bytes(partition.kfd_gpu_id) for u in readings), default=0)
                known = self._quotas.get(key, share.vram_bytes) if self._view.looked else claimed
                quotas[key] = max(share.vram_bytes, known if any(u.processes for u in readings) else 0)
                if claimed > quotas[key]:
                    found[key] = quotas[key]
        self._quotas = quotas
        return found

    # -------------------------------------------------------------------------------------------------- evictions

    def _count_evictions(
        self, slices: Mapping[SliceName, object], inventory: Inventory, picture: KernelPicture, seen: Comparison
    ) -> None:
        """The kernel counts from each process's start; a counter must not fall when one ends."""
        by_gpu_id = {p.kfd_gpu_id: p.id for p in inventory.partitions}
        kernel = {(p.pid, p.start_ticks): p.evicted_ms for p in picture.processes or ()}
        for key in [k for k in self._evicted_ms if k[0] not in slices]:
            del self._evicted_ms[key]
            self._evicted_before_ms.pop(key, None)
        for name, truth in seen.slices.items():
            living = {(p.pid, p.start_ticks) for p in truth.processes}
            for who in living:
                for gpu_id, ms in kernel.get(who, {}).items():
                    if (at := by_gpu_id.get(gpu_id)) in truth.gpus and at is not None:
                        self._evicted_ms.setdefault((name, at), {})[who] = ms
            for key, of in self._evicted_ms.items():
                if key[0] == name:
                    for who in of.keys() - living:
                        self._evicted_before_ms[key] = self._evicted_before_ms.get(key, 0) + of.pop(who)

    # ------------------------------------------------------------------------------------------------- acting

    async def _act(self, of: Suspicion, findings: dict[Reason, int], signals: dict[Step, int]) -> None:
        tell = self._node.tell
        if of.step is Step.TELL:
            findings[of.reason] += 1
            tell(f"watchdog.{of.reason}", of.slice, str(of))
            if self._rules().policy is not Policy.OBSERVE:
                log.warning("%s: %s.", of.slice, of)
        elif of.step is Step.SURVIVED:
            tell("watchdog.survived", of.slice, f"process {of.pid} ({of.command}) is there still after SIGKILL")
        if of.step not in _SIGNALS:
            return
        number = _SIGNALS[of.step]
        try:
            await asyncio.to_thread(self._ender.end, of.pid, of.start_ticks, of.slice, number)
        except NotFound as error:
            log.info("%s: %s; nothing was done to it.", of.slice, error)
        except AmdvgpuError as error:
            tell("watchdog.powerless", of.slice, str(error))
            log.warning("%s: %s", of.slice, error)
        else:
            signals[of.step] += 1
            tell("watchdog.ended", of.slice, f"process {of.pid} ({of.command}) was sent {number.name}")


def _larger(before: Usage | None, after: Usage) -> Usage:
    """``after``, with each slot's larger figure of the two; and the slots that are gone since, which were there."""
    if before is None or before is after:
        return after
    slots = {(p.slot, p.pid, p.start_ticks): p for p in before.processes}
    merged = []
    for process in after.processes:
        was = slots.pop((process.slot, process.pid, process.start_ticks), None)
        merged.append(process if was is None else _larger_slot(was, process))
    return replace(after, processes=(*merged, *slots.values()))


def _larger_slot(was: ProcessUsage, now: ProcessUsage) -> ProcessUsage:
    ids = was.used_bytes.keys() | now.used_bytes.keys()
    return replace(now, used_bytes={i: max(was.used_bytes.get(i, 0), now.used_bytes.get(i, 0)) for i in ids})
