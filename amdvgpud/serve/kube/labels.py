"""Keeps the labels of this cluster node that say what GPUs it has; the names are :mod:`amdvgpud.core.labels`'s.

Written when the machine differs from what the labels say, and looked at every few minutes, because somebody may have
taken them away. Labels of other kinds are left alone. They are kept at a stop: pods that select them stay schedulable
over an upgrade of the daemon.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from amdvgpud.core.errors import AmdvgpuError
from amdvgpud.core.labels import labels_of, stale
from amdvgpud.core.model import Inventory
from amdvgpud.serve.kube.api import ClusterNode

log = logging.getLogger(__name__)

LOOK_S: Final = 5.0
REVIEW_S: Final = 300.0
RETRY_S: Final = 30.0


class NodeApi(Protocol):
    """What of the Kubernetes API this needs."""

    async def get_node(self, name: str) -> ClusterNode: ...

    async def patch_node(self, name: str, *, labels: Mapping[str, str | None]) -> ClusterNode: ...


async def keep_labels(
    api: NodeApi,
    node: str,
    inventory: Callable[[], Inventory],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Does not return; ends by being cancelled. An API that does not answer is asked again, and told of once."""
    silent = False
    while True:
        wanted = labels_of(inventory())
        try:
            await _write(api, node, wanted)
            left_s, silent = REVIEW_S, False
        except AmdvgpuError as error:
            if not silent:
                log.warning("Node %s cannot be labelled, tried again every %g s: %s", node, RETRY_S, error)
            left_s, silent = RETRY_S, True
        while left_s > 0 and labels_of(inventory()) == wanted:
            await pause(LOOK_S)
            left_s -= LOOK_S


async def _write(api: NodeApi, node: str, wanted: Mapping[str, str]) -> None:
    changes = stale((await api.get_node(node)).metadata.labels or {}, wanted)
    if changes:
        await api.patch_node(node, labels=changes)
        log.info("Node %s: %d labels of its GPUs written or taken away.", node, len(changes))
