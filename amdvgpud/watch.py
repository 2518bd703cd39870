"""The watch over the health of the GPUs: asks who can tell, lets the judge judge, and tells the Node.

Owns when somebody is asked, what the judge remembers, and how trouble that repeats is told. Does not own what follows
from a finding (:mod:`amdvgpud.core.health`), nor how one is made (:mod:`amdvgpud.host`).

Two kinds of sources. The built-in ones are the daemon's own eyes: one that cannot look makes every GPU unhealthy, for
nobody knows then. The optional ones may be absent or fail: that is shown (:attr:`HealthWatch.sources`) and changes
nothing, or an exporter that crashes would take the node out of service.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from amdvgpud.core.errors import AmdvgpuError
from amdvgpud.core.health import (
    NOBODY,
    Condition,
    Count,
    Finding,
    Look,
    Notice,
    Policy,
    Source,
    Standings,
    judge,
)
from amdvgpud.core.model import GpuId, Inventory
from amdvgpud.node import Node
from amdvgpud.ports import Examination, HealthCheck, HealthMemory

log = logging.getLogger(__name__)

SAID_EVERY_S: Final = 10.0
"""The same kind of notice of the same GPU is told so often at most; a program can fault thousands of times a second."""


class HealthWatch:
    """See the module's head. Each pulse and each notice ends with the Node knowing all verdicts.

    Bad news are judged at once. Good ones wait for a look of their own, which can take seconds in a driver that does
    not answer, and count for nothing if there were bad ones in the meantime. One look at a time, so that counters that
    were read earlier are never judged later.
    """

    def __init__(
        self,
        node: Node,
        *,
        built_in: Sequence[HealthCheck],
        optional: Sequence[HealthCheck] = (),
        memory: HealthMemory,
        policy: Policy,
        now_s: Callable[[], float],
    ) -> None:
        self._node = node
        self._built_in = tuple(built_in)
        self._optional = tuple(optional)
        self._memory = memory
        self._policy = policy
        self._now_s = now_s
        self._looking = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._standings: Standings = NOBODY
        self._kept: Standings = NOBODY
        """What the memory has."""
        self._bad_news: dict[GpuId, int] = {}
        """How many there were of each GPU."""
        self._began = False
        self._said: dict[tuple[GpuId, str], tuple[float, int]] = {}
        """When a kind of notice was told last, and how many were not since."""
        self.sources: dict[str, bool] = {}
        """Whether each source answered at the last pulse; one that is not here is not in it."""

    async def pulse(self) -> None:
        """Look at all GPUs. Where the machine is not as it was, it is scanned first, and looked at again."""
        async with self._looking:
            look, stale = await self._look(self._node.view().inventory)
            if stale:
                await self._node.rescan()
                look, _ = await self._look(self._node.view().inventory)
            await self._judge(look)

    async def hear(self, notices: Sequence[Notice]) -> None:
        """What drivers have said by themselves, in this order: told, and judged."""
        there = {gpu.id for gpu in self._node.view().inventory.gpus}
        notices = [notice for notice in notices if notice.gpu in there]
        good: dict[GpuId, tuple[Notice, int]] = {}
        for notice in notices:
            self._tell(notice)
            if notice.finding is not None:
                if notice.finding.lasting:  # what passes by itself is no later word on a fault that does not
                    good.pop(notice.gpu, None)
                    self._bad_news[notice.gpu] = self._bad_news.get(notice.gpu, 0) + 1
                await self._judge(Look(False, frozenset({notice.gpu}), (notice.finding,)))
            elif notice.good:
                known, _ = good.get(notice.gpu, (notice, 0))
                good[notice.gpu] = (notice if notice.renewed else known, self._bad_news.get(notice.gpu, 0))
        for notice, bad_news in good.values():
            await self._judge_good(notice, bad_news)

    async def _judge_good(self, notice: Notice, bad_news: int) -> None:
        """``bad_news``: so many there had been of the GPU when it was heard."""
        gpu = frozenset({notice.gpu})
        async with self._looking:
            counts: Mapping[GpuId, Mapping[Count, int]] = {}
            if notice.renewed:  # what has been counted until now is of before
                looks = [await self._examination(check, self._node.view().inventory) for check in self._built_in]
                counts = {notice.gpu: _merged(looks).get(notice.gpu, {})}
            if self._bad_news.get(notice.gpu, 0) == bad_news:
                none: frozenset[GpuId] = frozenset()
                await self._judge(
                    Look(False, gpu, (), counts, gpu if notice.recovered else none, gpu if notice.renewed else none)
                )

    async def _look(self, inventory: Inventory) -> tuple[Look, bool]:
        looks = [await self._examination(check, inventory) for check in (*self._built_in, *self._optional)]
        findings = tuple(finding for look in looks for finding in look.findings)
        look = Look(True, frozenset(gpu.id for gpu in inventory.gpus), findings, _merged(looks))
        return look, any(look.stale for look in looks)

    async def _examination(self, check: HealthCheck, inventory: Inventory) -> Examination:
        built_in = check in self._built_in
        try:
            found = await check.examine(inventory)
        except (AmdvgpuError, OSError) as error:
            if self.sources.get(check.name, True):
                effect = "every GPU counts as unhealthy" if built_in else "nothing changes by that"
                log.warning("The health check %r does not work, and %s: %s", check.name, effect, error)
            self.sources[check.name] = False
            if not built_in:
                return Examination()
            reason = f"the built-in check cannot run: {error}"
            return Examination(
                tuple(Finding(gpu.id, Source.CHECK, Condition.UNHEALTHY, reason) for gpu in inventory.gpus)
            )
        if found is None:
            self.sources.pop(check.name, None)
            return Examination()
        if not self.sources.get(check.name, True):
            log.info("The health check %r works again.", check.name)
        self.sources[check.name] = True
        return found

    async def _judge(self, look: Look) -> None:
        async with self._turn:
            if not self._began:
                self._standings = self._kept = await asyncio.to_thread(self._memory.load)
                self._began = True
            self._standings = judge(self._standings, look, self._now_s(), self._policy)
            await self._node.set_health({gpu: standing.verdict for gpu, standing in self._standings.items()})
            if self._standings != self._kept:
                try:
                    await asyncio.to_thread(self._memory.save, self._standings)
                except AmdvgpuError as error:
                    log.warning("What was found of the GPUs is not kept over a restart: %s", error)
                self._kept = self._standings

    def _tell(self, notice: Notice) -> None:
        """Repeated trouble is counted, not repeated."""
        now_s, key = self._now_s(), (notice.gpu, notice.kind)
        told_s, untold = self._said.get(key, (float("-inf"), 0))
        if now_s - told_s < SAID_EVERY_S:
            self._said[key] = (told_s, untold + 1)
            return
        self._said[key] = (now_s, 0)
        more = f" (and {untold} more like it were not told)" if untold else ""
        self._node.tell(f"gpu.{notice.kind}", notice.gpu, notice.text + more)


def _merged(looks: Sequence[Examination]) -> dict[GpuId, dict[Count, int]]:
    counts: dict[GpuId, dict[Count, int]] = {}
    for look in looks:
        for gpu, values in look.counts.items():
            counts.setdefault(gpu, {}).update(values)
    return counts
