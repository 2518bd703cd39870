"""Resources ``amdvgpu.io/<profile>``: slices that are cut beforehand, so that a scheduler only has to count them.

Owns the cutting and what the kubelet sees of it. A device is a slice, and its id the slice's name, so whatever kubelet
and daemon remember of each other over restarts agrees. Slices are kept when the daemon ends: cutting again finds them.

The Book says of a slice that it was cut for a profile (``Slice.profile``). Such a slice goes when its profile does, and
is cut anew when that changes, as soon as nobody has it. What an operator has made is never touched, whatever its name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from amdvgpud.core.errors import AmdvgpuError, Conflict, NoRoom, NotFound, Stale
from amdvgpud.core.model import Slice, SliceName
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
            and not self._leases.contested(view, item.name)
            and all(partition is not None and fit(view, partition.gpu) for partition in partitions)
        )
        return Device(item.name, healthy, None if partitions[0] is None else numa_node_of(partitions[0]))

    async def allocate(self, ids: Sequence[str]) -> Grant:
        return await self._leases.grant(self.name, self._named(ids), self._granting)

    def means(self, device: str) -> SliceName:
        return self._named([device])[0][1]

    def _named(self, ids: Sequence[str]) -> list[tuple[str, SliceName]]:
        there = {str(item.name): item for item in slices_of(self._profile, self._node.view())}
        if unknown := sorted(set(ids) - there.keys()):
            raise NotFound(f"{self.name} has no {', '.join(unknown)}; there are {', '.join(there) or 'none'}")
        return [(name, there[name].name) for name in ids]

    async def again(self, ids: Sequence[str], pod_uid: str, container: str) -> Grant:
        """Also of a slice that its profile does not offer any more: it is kept for this container."""
        slices = self._node.view().book.slices
        if unknown := sorted(set(ids) - slices.keys()):
            raise NotFound(f"{', '.join(unknown)}: this slice of {self.name} is no more; make the pod anew")
        return await self._leases.again(
            self.name, [(name, slices[SliceName(name)].name) for name in ids], self._granting
        )

    def prefer(self, view: NodeView, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        places = {}
        for item in slices_of(self._profile, view):
            if (partition := view.inventory.partition(item.shares[0].partition)) is not None:
                places[str(item.name)] = partition
        return prefer(places, available, must_include, size, self._policy)


def slices_of(profile: SliceProfile, view: NodeView) -> list[Slice]:
    """By number. What bears such a name and was asked for otherwise is somebody else's, or an earlier profile's. What
    an operator has made just so is as good as ours: to be given away, not to be deleted.
    """
    found = {
        n: item
        for name, item in view.book.slices.items()
        if (n := profile.number_of(name)) is not None and _is_of(profile, item)
    }
    return [found[n] for n in sorted(found)]


class Profiles:
    """Cuts the slices of all profiles, and again when the machine or what is promised has changed."""

    def __init__(self, node: Node, profiles: Sequence[SliceProfile]) -> None:
        self._node = node
        self._profiles = profiles
        self._said: dict[str, str] = {}
        self._kept: dict[str, str] = {}
        """By profile, there or not any more: why a slice that was cut for it is kept though it is not what it wants."""

    async def run(self) -> None:
        """Until cancelled."""
        seen = self._node.events_since(0)[1]
        await self.cut()
        while True:
            await self._node.wait_event(seen, 60)
            events, seen, dropped = self._node.events_since(seen)
            # Not every end of a use is an event: a process in a slice that nobody holds ends without one.
            if dropped or self._kept or any(event.kind.startswith(_AGAIN) for event in events):
                await self.cut()

    async def cut(self) -> None:
        """Bring the slices of each profile to its count, or to as many as fit; in the profiles' order.

        Idempotent. A profile that does not fit is said once, and is no matter for the others.
        """
        await self._clear()
        for profile in self._profiles:
            try:
                trouble, why = await self._cut(profile)
            except AmdvgpuError as error:
                trouble, why = str(error), ""
            self._say(profile.name, trouble, why)

    def _say(self, profile: str, trouble: str, why: str = "") -> None:
        if trouble and trouble != self._said.get(profile):
            log.warning("Profile %s: %s%s", profile, trouble, why)
        self._said[profile] = trouble

    async def _clear(self) -> None:
        """Delete what was cut for a profile that is no more, or that is another by now; what is in use stays."""
        profiles = {profile.name: profile for profile in self._profiles}
        kept: dict[str, str] = {}
        for name, item in self._node.view().book.slices.items():
            profile = profiles.get(item.profile)
            if not item.profile or (profile is not None and _is_of(profile, item)):
                continue
            try:
                await self._node.delete_slice(name)
                log.info("%s: deleted, the profile it was cut for %s.", name, "has changed" if profile else "is gone")
            except NotFound:
                continue
            except AmdvgpuError as error:
                kept[item.profile] = str(error)
        self._kept = kept
        for gone in (kept.keys() | self._said.keys()) - profiles.keys():
            in_use = "it is gone; slices that were cut for it are kept as long as they are in use"
            self._say(gone, in_use if gone in kept else "", f": {kept.get(gone)}")

    async def _cut(self, profile: SliceProfile) -> tuple[str, str]:
        """What an operator should know, empty where all is as configured; and details, which change with what is free
        and are no news by themselves."""
        there = slices_of(profile, self._node.view())
        wanted = profile.count or MOST
        for item in reversed(there[wanted:]):
            if not item.profile:
                continue
            try:
                await self._node.delete_slice(item.name)
            except Conflict as error:
                self._kept[profile.name] = str(error)
                return (
                    f"{len(there)} slices are there, {wanted} are configured; the rest goes when it is not in use",
                    "",
                )
        have, n, others = len(there), 0, []
        while have < wanted and n < MOST:
            name = profile.slice_name(n)
            n += 1
            if (taken := self._node.view().book.slices.get(name)) is not None:
                others += [] if taken.profile or taken.request == profile.request(n - 1) else [name]
                continue
            try:
                await self._node.put_slice(profile.request(n - 1), profile=profile.name, create_only=True)
                have += 1
            except Stale:
                continue  # somebody was faster
            except NoRoom as error:
                if profile.count or not have:
                    return f"there is room for {have} of its slices" + f", not {wanted}" * bool(
                        profile.count
                    ), f": {error}"
                break
        if profile.name in self._kept:
            return "slices of its earlier form are kept as long as they are in use", f": {self._kept[profile.name]}"
        if others:
            return f"{', '.join(others)} was not cut for it and is left alone, so that number is left out", ""
        return "", ""


def _is_of(profile: SliceProfile, item: Slice) -> bool:
    n = profile.number_of(item.name)
    return n is not None and item.request == profile.request(n)
