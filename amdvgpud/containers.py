"""Which container has which slice: told by hooks, checked by /proc, kept over a restart, and what follows from it.

Owns the list of containers, the watch for their end, and the word to the runtime whether one may start: its image is
looked into, and its VRAM is capped by the kernel where that can be, before the start goes on. The Node gets the list
whole, as it gets health, and does with leases what follows. Does not own the socket of the hooks
(:mod:`amdvgpud.serve.reports`), what is believed (:mod:`amdvgpud.core.containers`), nor how caps are written.

Fail open: a container whose report cannot be understood or is not believed, or in whose image nothing can be read,
starts. Only a policy that was asked for (``images.policy``) refuses, and then all of these: what cannot be judged could
be what is to be kept out. A refusal harms nobody but who has reported, as the hook that reported is who gets it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Final, Protocol

from amdvgpud.core.caps import capped_cgroup, quotas, wanted_caps
from amdvgpud.core.containers import NOT_LOOKED_INTO, Container, Report, Sighting, disbelief
from amdvgpud.core.image import Verdict
from amdvgpud.core.model import Slice, SliceName
from amdvgpud.core.truth import needs_gate
from amdvgpud.node import Node

log = logging.getLogger(__name__)


class ImagePolicy(StrEnum):
    """What becomes of a container that the gate cannot get into, as far as is known."""

    SHOW = "show"
    DMEM = "dmem"
    """It starts only under the kernel's cap."""
    REFUSE = "refuse"


LOOK_INTO_IMAGE_S: Final = 0.06
"""Longest look into an image: the hook waits 100 ms in all. A root on a slow or dead file system is not known then."""

LOOK_BEFORE_REFUSING_S: Final = 3.0
"""The same where a policy depends on it; the hook waits 5 s then, and takes no answer for a no."""


TELL_S: Final = 0.02
"""How long a start waits for the Node to know of the container."""


class Processes(Protocol):
    """What /proc shows of processes with slices."""

    def sight(self, pid: int) -> Sighting | None: ...

    def find(self) -> Sequence[Sighting]:
        """The first process of each container that has a slice."""
        ...

    def alive(self, pid: int, ticks: int) -> bool: ...

    def watch(self, pid: int, ticks: int) -> int | None:
        """A descriptor, to be closed by the caller, that is readable when the process has ended; None: it has."""
        ...


class Record(Protocol):
    """What outlives the daemon, but not the boot."""

    def load(self) -> Sequence[Container]: ...

    def save(self, containers: Iterable[Container]) -> None: ...


class Images(Protocol):
    def look(self, root: int, bundle: str) -> Verdict:
        """Whether the gate gets into the first program of the container of ``bundle``. Reads only.

        ``root`` is a descriptor of the root folder that the container's first process sees.
        """
        ...


class Caps(Protocol):
    """The kernel's caps on VRAM, by cgroup."""

    def lack(self) -> str | None:
        """Why nothing can be capped on this machine; None: it can."""
        ...

    def adopt(self, caps: Mapping[str, Iterable[str]]) -> None:
        """These regions, by cgroup, have caps that were set before this daemon was started."""
        ...

    def apply(self, wanted: Mapping[str, Mapping[str, int]]) -> Mapping[str, str]:
        """Make these the caps in force, and lift those that were set before and are not among them.

        Where processes are in one of those still, it keeps its cap until they have gone. The answer is for each wanted
        cgroup why it is not capped; empty: it is, as read back. Applying twice equals once.
        """
        ...

    def lift_all(self) -> None:
        """Lift whatever was set."""
        ...


class Containers:
    def __init__(
        self,
        node: Node,
        processes: Processes,
        record: Record,
        images: Images,
        caps: Caps,
        *,
        capping: bool = True,
        policy: ImagePolicy = ImagePolicy.SHOW,
        allowance_bytes: int = 0,
        now_s: Callable[[], float],
    ) -> None:
        """Not ``capping``: no caps are wanted. ``allowance_bytes``: what a cap has above the quotas, on each GPU."""
        self._node = node
        self._processes = processes
        self._record = record
        self._images = images
        self._caps = caps
        self._capping = capping
        self._policy = policy
        self._allowance_bytes = allowance_bytes
        self._now_s = now_s
        self._all: dict[tuple[SliceName, str], Container] = {}
        """Also those whose slice was deleted under them: they keep the cap, as they keep the mounted limits."""
        self._told: tuple[tuple[Container, ...], ...] = ((), ())
        """What the Node has (those whose slice is there) and what the record has, after the last that succeeded."""
        self._watched: dict[tuple[SliceName, str], int] = {}
        self._changing = asyncio.Lock()
        self._telling = asyncio.Lock()
        self._looks: set[asyncio.Task[None]] = set()

    # --------------------------------------------------------------------------------------------------- lifetime

    async def start(self) -> None:
        """Find again what ran before. After the Node's own start: leases of containers that are gone end here."""
        self._all = {(c.slice, c.id): c for c in await asyncio.to_thread(self._record.load)}
        self._caps.adopt({cgroup: caps.keys() for cgroup, caps in wanted_caps(self._all.values(), 0).items()})
        await self.find()
        if self._all:
            log.info("Found again after a start: %d containers that have slices.", len(self._all))

    async def find(self) -> None:
        """Once in a while: a look for containers that no hook has told of, and :meth:`look`."""
        for seen in await asyncio.to_thread(self._processes.find):
            for name in seen.slices:
                container = self._container(name, seen, reported=False)
                # Not while another one looks: what it found must not be forgotten.
                async with self._changing:
                    if container.slice in self._node.view().book.slices:
                        self._all.setdefault((container.slice, container.id), container)
        await self.look()

    async def look(self) -> None:
        """Once a period, and when one has ended: forget those that are gone, put caps right."""
        async with self._changing:
            before = self._all

            def gone() -> list[tuple[SliceName, str]]:
                return [key for key, c in before.items() if not self._processes.alive(c.pid, c.start_ticks)]

            ended = set(await asyncio.to_thread(gone))
            await self._become({key: c for key, c in before.items() if key not in ended})
        await self._tell()

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for fd in self._watched.values():
            loop.remove_reader(fd)
            os.close(fd)
        self._watched.clear()
        for task in self._looks:
            task.cancel()

    # ---------------------------------------------------------------------------------------------------- reports

    async def started(self, report: Report, root: int | None) -> str | None:
        """A container is about to start: why it must not, or None. ``root`` as :class:`Images` has it; ours no longer
        than this call. A report that is not believed changes nothing but, by policy, its own container's start."""
        seen = await asyncio.to_thread(self._processes.sight, report.pid)
        item = self._node.view().book.slices.get(report.slice)
        limited = item is not None and needs_gate(item, self._node.view().inventory)
        if (why := disbelief(report, seen)) is not None or seen is None:
            log.warning("%s: a report of container %.64s is not believed: %s", report.slice, report.id, why)
            if not limited or self._policy is ImagePolicy.SHOW:
                return None
            return self._unenforced(report.slice, f"the report of it is not believed: {why}")
        if item is None:
            return None  # deleted by force while this one was being made; it keeps the limits that it has mounted
        gate = await self._verdict(root, report.bundle) if limited else Verdict(True)
        container = replace(self._container(report.slice, seen, reported=True), id=report.id, gate=gate)
        key = (container.slice, container.id)
        known = self._all.get(key)
        if known is not None and known.pid != container.pid and self._processes.alive(known.pid, known.start_ticks):
            # In a cgroup that names no container anybody can take another one's id, and with it its place.
            why = f"a container of that id has it already (pid {known.pid})"
            log.warning("%s: a report of container %.64s is not believed: %s", report.slice, report.id, why)
            return None if self._policy is ImagePolicy.SHOW else self._unenforced(report.slice, why)
        async with self._changing:
            await self._become({**self._all, key: container})
            container = self._all.get(key, container)
            refusal = self._refusal(container)
            if refusal is not None:
                await self._become({k: c for k, c in self._all.items() if k != key})
        # The runtime waits, and the Node may be at work on something that takes seconds: it is told in any case.
        await asyncio.wait({self._soon(self._tell())}, timeout=TELL_S)
        if refusal is not None:
            log.warning("%s: %s", container.slice, refusal)
        elif gate.fits is False:
            log.warning(
                "%s: not enforced by the gate in container %.12s: %s", container.slice, container.id, gate.reason
            )
        return refusal

    async def stopped(self, report: Report) -> None:
        """A hint to look now. The end itself is seen in /proc, whoever says so."""
        if (report.slice, report.id) in self._all:
            await self.look()

    async def _verdict(self, root: int | None, bundle: str) -> Verdict:
        if root is None:
            return NOT_LOOKED_INTO
        own = os.dup(root)  # the look may outlast the caller

        def look() -> Verdict:
            try:
                return self._images.look(own, bundle)
            finally:
                os.close(own)

        try:
            async with asyncio.timeout(
                LOOK_INTO_IMAGE_S if self._policy is ImagePolicy.SHOW else LOOK_BEFORE_REFUSING_S
            ):
                return await asyncio.shield(asyncio.to_thread(look))
        except TimeoutError:
            return Verdict(None, "its image was not looked into: that takes too long")

    def _refusal(self, container: Container) -> str | None:
        if container.gate.fits is True or self._policy is ImagePolicy.SHOW:
            return None
        if self._policy is ImagePolicy.REFUSE:
            return self._unenforced(container.slice, container.gate.reason)
        if container.cap == "":
            return None
        lack = f", and the kernel does not cap it: {container.cap or 'dmem.enabled is false'}"
        return self._unenforced(container.slice, container.gate.reason, lack)

    def _unenforced(self, name: SliceName, reason: str, lack: str = "") -> str:
        return f"slice {name} would not be enforced: {reason} (images.policy is {self._policy.value!r}{lack})"

    # ----------------------------------------------------------------------------------------------------- acting

    def _container(self, name: SliceName, seen: Sighting, *, reported: bool) -> Container:
        return Container(
            slice=name,
            id=seen.container or "",
            pid=seen.pid,
            start_ticks=seen.start_ticks,
            cgroup=seen.unified if seen.unified != "/" else None,
            pod=seen.pod,
            since_s=self._now_s(),
            reported=reported,
        )

    async def _become(self, after: dict[tuple[SliceName, str], Container]) -> None:
        """Be ``after``: caps and watches. The lock is the caller's; :meth:`_tell` is to follow, without it."""
        self._all = await self._capped(after)
        self._watch()

    async def _tell(self) -> None:
        """Let the Node and the record have what there is by now."""
        async with self._telling:
            slices = self._node.view().book.slices
            everybody = tuple(self._all.values())
            present = tuple(c for c in everybody if _slice_of(c, slices) is not None)
            if self._told == (present, everybody):
                return
            by_slice: dict[SliceName, tuple[Container, ...]] = {}
            for container in present:
                by_slice[container.slice] = (*by_slice.get(container.slice, ()), container)
            await self._node.set_containers(by_slice)
            await asyncio.to_thread(self._record.save, everybody)
            self._told = (present, everybody)

    async def _capped(
        self, containers: dict[tuple[SliceName, str], Container]
    ) -> dict[tuple[SliceName, str], Container]:
        if not containers and not self._all:
            return containers
        lack = await asyncio.to_thread(self._caps.lack)
        if not self._capping:
            if lack is None:
                await asyncio.to_thread(self._caps.lift_all)
            return {key: replace(c, cap=None, quotas={}) for key, c in containers.items()}
        view = self._node.view()
        for key, container in containers.items():
            if (item := _slice_of(container, view.book.slices)) is not None:
                # Of a GPU that is not in the inventory now, what was known: its region may be there all the same.
                containers[key] = replace(container, quotas={**container.quotas, **quotas(item, view.inventory)})
        answers: Mapping[str, str] = {}
        if lack is None:
            wanted = wanted_caps(containers.values(), self._allowance_bytes)
            answers = await asyncio.to_thread(self._caps.apply, wanted)

        def answer(container: Container) -> str:
            cgroup = capped_cgroup(container)
            if lack is not None:
                return lack
            if cgroup is None:
                return "it has no cgroup of its own"
            return answers.get(cgroup, "none of its GPUs is there")

        return {key: replace(c, cap=answer(c)) for key, c in containers.items()}

    def _watch(self) -> None:
        """A pidfd each: their end is seen at once. Where there is none to be had, the next look sees it."""
        loop = asyncio.get_running_loop()
        for key in [k for k in self._watched if k not in self._all]:
            fd = self._watched.pop(key)
            loop.remove_reader(fd)
            os.close(fd)
        for key, container in self._all.items():
            if key in self._watched:
                continue
            fd_or_none = self._processes.watch(container.pid, container.start_ticks)
            if fd_or_none is None:
                continue
            self._watched[key] = fd_or_none
            loop.add_reader(fd_or_none, self._ended, key)

    def _ended(self, key: tuple[SliceName, str]) -> None:
        fd = self._watched.pop(key)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        self._soon(self.look())

    def _soon(self, what: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._or_say(what), name="containers")
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)
        return task

    async def _or_say(self, what: Coroutine[None, None, None]) -> None:
        try:
            await what
        except Exception as error:
            log.warning("A container has begun or ended, and what follows is left to the next look: %s", error)


def _slice_of(container: Container, slices: Mapping[SliceName, Slice]) -> Slice | None:
    """The slice that it has, if that is there still: one of the name that was made later is another one."""
    item = slices.get(container.slice)
    return None if item is None or item.created_s > container.since_s else item
