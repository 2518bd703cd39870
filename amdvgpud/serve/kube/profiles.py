"""Resources ``amdvgpu.io/<profile>``: slices that are cut beforehand, so that a scheduler only has to count them.

Owns the cutting and what the kubelet sees of it. A device is a slice, and its id the slice's name, so whatever kubelet
and daemon remember of each other over restarts agrees. Slices are kept when the daemon ends: cutting again finds them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from amdvgpud.core.errors import AmdvgpuError, Conflict, NoRoom, NotFound
from amdvgpud.core.model import Slice
from amdvgpud.core.prefer import prefer
from amdvgpud.core.profiles import MOST, SliceProfile
from amdvgpud.node import Node, NodeView
from amdvgpud.serve.kube.leases import Granting, KubeletLeases, held_by_others
from amdvgpud.serve.kube.resources import Device, Grant, fit, numa_node_of

log = logging.getLogger(__name__)

DOMAIN: Final = "amdvgpu.io"

_AGAIN: Final = ("inventory.", "gpu.", "slice.deleted", "lease.released", "lease.expired", "lease.holder-ended")
"""Events after which there may be room that was not there before."""


class ProfileResource:
    """A :class:`amdvgpud.serve.kube.resources.Resource`."""

    def __init__(
        self, profile: SliceProfile, node: Node, leases: KubeletLeases, granting: Granting, policy: str = "besteffort"
    ) -> None:
        self.name = f"{DOMAIN}/{profile.name}"
        self._profile = profile
        self._node = node
        self._leases = leases
        self._granting = granting
        self._policy = policy

    def devices(self, view: NodeView) -> Sequence[Device]:
        """The slices that are as the profile says now. One of an earlier profile, still in use, is not among them."""
        return [self._device(view, item) for item in slices_of(self._profile, view)]

    def _device(self, view: NodeView, item: Slice) -> Device:
        partitions = [view.inventory.partition(share.partition) for share in item.shares]
        healthy = (
            item.name not in view.lost
            and not held_by_others(view, item.name)
            and all(partition is not None and fit(view, partition.gpu) for partition in partitions)
        )
        return Device(item.name, healthy, None if partitions[0] is None else numa_node_of(partitions[0]))

    async def allocate(self, ids: Sequence[str]) -> Grant:
        there = {str(item.name): item for item in slices_of(self._profile, self._node.view())}
        if unknown := sorted(set(ids) - there.keys()):
            raise NotFound(f"{self.name} has no {', '.join(unknown)}; there are {', '.join(there) or 'none'}")
        return await self._leases.grant(self.name, [(name, there[name].name) for name in ids], self._granting)

    def prefer(self, view: NodeView, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        places = {}
        for item in slices_of(self._profile, view):
            if (partition := view.inventory.partition(item.shares[0].partition)) is not None:
                places[str(item.name)] = partition
        return prefer(places, available, must_include, size, self._policy)


def slices_of(profile: SliceProfile, view: NodeView) -> list[Slice]:
    """By number. What bears such a name and was asked for otherwise is somebody else's, or an earlier profile's."""
    found = {
        n: item
        for name, item in view.book.slices.items()
        if (n := profile.number_of(name)) is not None and item.request == profile.request(n)
    }
    return [found[n] for n in sorted(found)]


class Profiles:
    """Cuts the slices of all profiles, and again when the machine or what is promised has changed."""

    def __init__(self, node: Node, profiles: Sequence[SliceProfile]) -> None:
        self._node = node
        self._profiles = profiles
        self._said: dict[str, str] = {}

    async def run(self) -> None:
        """Until cancelled."""
        seen = self._node.events_since(0)[1]
        await self.cut()
        while True:
            await self._node.wait_event(seen, 60)
            events, seen, dropped = self._node.events_since(seen)
            if dropped or any(event.kind.startswith(_AGAIN) for event in events):
                await self.cut()

    async def cut(self) -> None:
        """Bring the slices of each profile to its count, or to as many as fit; in the profiles' order.

        Idempotent. A profile that does not fit is said once, and is no matter for the others.
        """
        for profile in self._profiles:
            try:
                trouble, why = await self._cut(profile)
            except AmdvgpuError as error:
                trouble, why = str(error), ""
            if trouble and trouble != self._said.get(profile.name):
                log.warning("Profile %s: %s%s", profile.name, trouble, why)
            self._said[profile.name] = trouble

    async def _cut(self, profile: SliceProfile) -> tuple[str, str]:
        """What an operator should know, empty where all is as configured; and details, which change with what is free
        and are no news by themselves."""
        there = slices_of(profile, self._node.view())
        wanted = profile.count or MOST
        for item in reversed(there[wanted:]):
            try:
                await self._node.delete_slice(item.name)
            except Conflict:
                return (
                    f"{len(there)} slices are there, {wanted} are configured; the rest goes when it is not in use",
                    "",
                )
        have, n, in_the_way = len(there), 0, []
        while have < wanted and n < MOST:
            name = profile.slice_name(n)
            taken = self._node.view().book.slices.get(name)
            if taken is not None and taken.request == profile.request(n):
                n += 1
                continue
            try:
                await self._node.put_slice(profile.request(n))
                have += 1
            except NoRoom as error:
                if profile.count or not have:
                    return f"there is room for {have} of its slices" + f", not {wanted}" * bool(
                        profile.count
                    ), f": {error}"
                break
            except Conflict as error:
                if taken is None:
                    raise
                in_the_way.append(str(error))
            n += 1
        if in_the_way:
            return "slices of its earlier form are kept as long as they are in use", f": {in_the_way[0]}"
        return "", ""
