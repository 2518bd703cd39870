"""Which way containers get their slices now: as it was set, or chosen by what the cluster node runs.

Owns when that is asked: before the first pod, with each registration (a kubelet that was upgraded registers us anew),
and again while the answer cannot be had. What follows from the answer is :mod:`amdvgpud.core.delivery`'s. A container
is told one way; one that runs keeps its own, whatever is chosen later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from amdvgpud.core.delivery import Choice, Way
from amdvgpud.core.errors import AmdvgpuError, HostFailure, Invalid

log = logging.getLogger(__name__)

ASK_S: Final = 5.0
"""How long the start waits for an API server that does not answer."""
AGAIN_S: Final = 60.0


class Delivery:
    """``ask`` None: ``choice`` was set and stays. ``hook_for``: settings that are worth nothing without the hook."""

    def __init__(
        self, choice: Choice, ask: Callable[[], Awaitable[Choice]] | None = None, *, hook_for: str = ""
    ) -> None:
        self._choice = choice
        self._ask = ask
        self._hook_for = hook_for

    @staticmethod
    def fixed(way: Way) -> Delivery:
        return Delivery(Choice(way, "kubelet.delivery says so"))

    @property
    def choice(self) -> Choice:
        return self._choice

    async def settle(self) -> None:
        """Choose for the start. ``Invalid`` where it is known that the hook which settings rest on cannot come."""
        await self._decide()
        if self._hook_for and self._choice.known and self._choice.way == "nodes":
            raise Invalid.field("kubelet.delivery", self._no_hook())

    async def renew(self) -> None:
        """Choose for a registration. ``HostFailure`` while settings rest on a hook that is not known to come."""
        await self._decide()
        if self._hook_for and self._choice.way == "nodes":
            raise HostFailure(self._no_hook())

    async def follow(self) -> None:
        """Until cancelled: ask again what could not be answered."""
        while self._ask is not None:
            await asyncio.sleep(AGAIN_S)
            if not self._choice.known:
                await self._decide()

    async def _decide(self) -> None:
        if self._ask is None:
            return
        before = self._choice
        try:
            async with asyncio.timeout(ASK_S):
                self._choice = await self._ask()
        except (AmdvgpuError, TimeoutError) as error:
            # What was known is more than nothing: a kubelet that comes again is rarely an older one.
            if not before.known:
                text = str(error) or f"no answer within {ASK_S:g} s"
                self._choice = Choice("nodes", f"the Node cannot be read: {text}", known=False)
        if self._choice == before:
            return
        if self._choice.way == "cdi":
            log.info("Containers get their slices by CDI names: %s.", self._choice.reason)
        else:
            log.warning(
                "Containers get their slices by device nodes, mounts and variables, and no hook: %s. Where the runtime "
                "resolves CDI names all the same, set kubelet.delivery = 'cdi'; to have it as it is, 'nodes'.",
                self._choice.reason,
            )

    def _no_hook(self) -> str:
        return (
            f"'auto' comes to 'nodes', which brings no hook into pods, and {self._hook_for} needs it: "
            f"{self._choice.reason}. Set it to 'cdi' where the runtime resolves CDI names all the same"
        )
