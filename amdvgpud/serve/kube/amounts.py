"""How much ``amd.com/gpumem`` and ``amd.com/gpucores`` the Node has, in its own status, for whoever reads it there.

As extended resources, which is what Kubernetes has for amounts: a patch of the status, and no device plugin, whose
devices would be one for each MiB. The kubelet keeps what it does not know in the capacity and copies it to what is
allocatable. A kubelet whose checkpoint is gone zeroes it, and anybody may take it away, so it is looked at again and
again. An annotation on the Node says that it was us: what others have written there is not taken away.

Off unless asked for. HAMi's scheduler does not read it, and counts for each GPU what is counted here for all of them: a
pod with two GPUs and ``gpumem: 1024`` has 2048 MiB, and the Node's sum knows of 1024. So the sum refuses nothing that
that scheduler has found room for, and cannot take its place.

Source: Kubernetes' documentation of extended resources; the kubelet's ``nodestatus`` setters.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol

from amdvgpud.core import hami
from amdvgpud.core.errors import AmdvgpuError
from amdvgpud.core.hami import Offer
from amdvgpud.serve.kube.api import ClusterNode

log = logging.getLogger(__name__)

LOOK_S: Final = 2.0
REVIEW_S: Final = 30.0


class NodeApi(Protocol):
    """What of the Kubernetes API this needs."""

    async def get_node(self, name: str) -> ClusterNode: ...

    async def patch_node(self, name: str, *, annotations: Mapping[str, str | None]) -> ClusterNode: ...

    async def patch_capacity(self, name: str, capacity: Mapping[str, str | None]) -> ClusterNode: ...


async def keep_amounts(
    api: NodeApi,
    node: str,
    offers: Callable[[], Sequence[Offer]],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Does not return; ends by being cancelled. What goes wrong is told once, and tried again."""
    trouble = ""
    while True:
        wanted = hami.amounts(offers())
        try:
            await _write(api, node, wanted)
            trouble = ""
        except AmdvgpuError as error:
            if str(error) != trouble:
                trouble = str(error)
                log.warning(
                    "The amounts of node %s cannot be written, tried again every %g s: %s", node, REVIEW_S, error
                )
        left_s = REVIEW_S
        while left_s > 0 and hami.amounts(offers()) == wanted:
            await pause(LOOK_S)
            left_s -= LOOK_S


async def _write(api: NodeApi, node: str, wanted: Mapping[str, str]) -> None:
    if not wanted:
        # Nothing to offer is no zero: a kubelet that starts again admits its pods anew, and a zero refuses those that
        # run. A resource that the Node does not have is not asked about.
        await remove_amounts(api, node)
        return
    there = await api.get_node(node)
    if hami.AMOUNTS not in there.annotations:
        await api.patch_node(node, annotations={hami.AMOUNTS: "true"})  # first: what it says is never too little
    if any(there.status.capacity_of(resource) != int(amount) for resource, amount in wanted.items()):
        await api.patch_capacity(node, wanted)
        log.info("Node %s says that it has %s.", node, ", ".join(f"{n} of {what}" for what, n in wanted.items()))


async def remove_amounts(api: NodeApi, node: str) -> bool:
    """Take away what we have written, if it is there; whether it was. ``AmdvgpuError`` where that cannot be done."""
    there = await api.get_node(node)
    if hami.AMOUNTS not in there.annotations:
        return False
    if there.status.capacity and not there.status.capacity.keys().isdisjoint(hami.AMOUNT_RESOURCES):
        await api.patch_capacity(node, dict.fromkeys(hami.AMOUNT_RESOURCES))
    await api.patch_node(node, annotations={hami.AMOUNTS: None})
    return True


async def remove_or_say(api: NodeApi, node: str) -> None:
    """For a start with the amounts switched off: the right to take them away may be switched off with them."""
    try:
        if await remove_amounts(api, node):
            log.info("The amounts that node %s said it has were taken away.", node)
    except AmdvgpuError as error:
        patch = ",".join(f'"{resource}":null' for resource in hami.AMOUNT_RESOURCES)
        log.warning(
            "The amounts of node %s stay, though they are switched off: %s. To take them away: "
            "kubectl patch node %s --subresource=status --type=merge -p '{\"status\":{\"capacity\":{%s}}}'",
            node, error, node, patch,
        )  # fmt: skip
