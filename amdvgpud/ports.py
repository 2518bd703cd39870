"""What the node needs of the outside world: narrow protocols, in core's words, and the values that pass through them.

Their real sides lie in :mod:`amdvgpud.host`, their stand-ins with the tests; both keep the same promises, which
tests/contract checks. Nobody but :mod:`amdvgpud.node` calls those that change something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from amdvgpud.core.errors import HostFailure
from amdvgpud.core.health import Count, Finding, Standings
from amdvgpud.core.model import Book, Gpu, GpuId, Inventory, Partition, Slice, SliceName, Usage


class Sysfs(Protocol):
    """Reads the machine. Does not raise for what it finds there: that is what ``unusable`` is for."""

    def read_inventory(self) -> Inventory: ...

    def vram_used_bytes(self, pci_address: str) -> int | None:
        """The driver's own figure for the whole device; None where it cannot be had (absent is not zero)."""
        ...

    def temperatures_c(self, pci_address: str) -> Mapping[str, float]:
        """Degrees Celsius by the driver's name of the sensor (edge, junction, mem); none of a GPU that may sleep."""
        ...


@dataclass(frozen=True, slots=True)
class KfdUser:
    """A process that has a GPU open through the KFD. ``command`` for people; ``?`` where it cannot be read."""

    pid: int
    command: str
    kfd_gpu_ids: frozenset[int] = frozenset()
    """All that it has open: what its device cgroup admits, so on the host every GPU, in a container its own."""


def named(users: Sequence[KfdUser]) -> str:
    """At most eight of them, for a sentence."""
    shown = ", ".join(f"{user.pid} ({user.command})" for user in users[:8])
    return shown + (f" and {len(users) - 8} more" if len(users) > 8 else "")


class Modes(Protocol):
    """Cuts a GPU anew. Never asked by anybody but :meth:`Node.partition_gpu`, one switch at a time."""

    def users(self, gpu: Gpu | None) -> tuple[KfdUser, ...]:
        """The processes that have ``gpu`` open (None: any GPU), by pid; those that can be seen."""
        ...

    def set_compute(self, gpu: Gpu, mode: str) -> None:
        """Returns when it is done. ``Conflict``: the driver does not allow it now; ``HostFailure``: it could not."""
        ...

    def request_memory(self, gpu: Gpu, mode: str) -> None:
        """Note that the driver shall come up with this memory mode when it is loaded anew. Errors as above."""
        ...


class NoModes:
    """Where nothing can be cut anew: a :class:`Modes` that says so."""

    def users(self, gpu: Gpu | None) -> tuple[KfdUser, ...]:
        return ()

    def set_compute(self, gpu: Gpu, mode: str) -> None:
        raise HostFailure(f"{gpu.id}: this daemon was put together without a way to switch modes")

    def request_memory(self, gpu: Gpu, mode: str) -> None:
        self.set_compute(gpu, mode)


class KfdHolder(Protocol):
    """Whoever of ours has /dev/kfd open: each such process keeps the driver from cutting a GPU anew."""

    async def let_go(self) -> None:
        """Returns when nobody of ours has it open, nor will have until as many :meth:`take_up` came."""
        ...

    def take_up(self) -> None: ...


class NoKfdHolder:
    """Where nobody has: a :class:`KfdHolder` with nothing to do."""

    async def let_go(self) -> None:
        return

    def take_up(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class Examination:
    """What one look at all GPUs has found out."""

    findings: tuple[Finding, ...] = ()
    counts: Mapping[GpuId, Mapping[Count, int]] = field(default_factory=dict)
    stale: bool = False
    """The machine is not what the inventory says: a scan is due."""


class HealthCheck(Protocol):
    """One way to find out how the GPUs are."""

    @property
    def name(self) -> str:
        """One word of a closed set: a metric's label."""
        ...

    async def examine(self, inventory: Inventory) -> Examination | None:
        """None: this machine has no such source, and that says nothing. ``HostFailure``: it does not answer."""
        ...


class HealthMemory(Protocol):
    """What the judge remembers, over restarts of the daemon but not of the machine: its counters begin anew then."""

    def load(self) -> Standings:
        """Empty where there is nothing, or nothing that can be understood."""
        ...

    def save(self, standings: Standings) -> None:
        """``HostFailure`` where it cannot be kept."""
        ...


class Leftovers(Protocol):
    """Looks who is on a Partition that is to be handed on as a whole."""

    def on(
        self, places: Sequence[tuple[Gpu, Partition]], inventory: Inventory, heir: SliceName | None = None
    ) -> Mapping[GpuId, str]:
        """By GPU, why its partition among ``places`` cannot be handed on now, in words; who is in the slice ``heir`` is
        no reason. One look for all of them. Blocking."""
        ...


class NoLeftovers:
    """Where nobody can look: a :class:`Leftovers` that sees nothing."""

    def on(
        self, places: Sequence[tuple[Gpu, Partition]], inventory: Inventory, heir: SliceName | None = None
    ) -> Mapping[GpuId, str]:
        return {}


class Journal(Protocol):
    """The Book on disk. ``commit`` returns when the change would survive a power cut."""

    def load(self) -> Book:
        """``StateUnreadable`` (file untouched) where it cannot be understood; an empty Book where there is none."""
        ...

    def commit(self, before: Book, after: Book) -> None: ...

    def close(self) -> None:
        """Let go of it: another may keep its Book here. Until the next ``load`` a ``commit`` is a ``HostFailure``."""
        ...


class SliceFiles(Protocol):
    """The policy and ledger files of each slice (design: one directory a slice). Every call is idempotent."""

    @property
    def warnings(self) -> Sequence[str]:
        """What is less than it should be here, for operators: slices' files without a size limit, say."""
        ...

    def prepare(self) -> None:
        """The directory of slices, on its own size-limited tmpfs where that can be had. ``HostFailure`` if not."""
        ...

    def write(self, item: Slice, inventory: Inventory) -> None:
        """Make the slice's directory, or bring its policy up to date in place; ledgers keep inode and content."""
        ...

    def remove(self, name: SliceName) -> None: ...

    def names(self) -> frozenset[SliceName]:
        """The slices that have a directory, whoever made it."""
        ...

    def usage(self, name: SliceName) -> Usage:
        """A picture of the ledger, read with pread and bounds checked; a damaged file is a finding, not an error.

        ``NotFound`` where the slice has no directory.
        """
        ...

    def reclaim(self, name: SliceName) -> int:
        """Return the charges of dead processes to the slice; the bytes returned. ``NotFound`` as :meth:`usage`."""
        ...


@dataclass(frozen=True, slots=True)
class CdiStatus:
    path: str
    written: bool
    """False: there is no file, because there is no slice to name or because the last write failed."""
    error: str | None
    conflicts: tuple[str, ...]


class CdiSpecs(Protocol):
    """The CDI file. The previous one stays whole until a valid new one replaces it."""

    def publish(self, slices: Sequence[Slice], inventory: Inventory) -> CdiStatus: ...

    def render(self, slices: Sequence[Slice], inventory: Inventory) -> dict[str, object]:
        """The document that ``publish`` would write (``devices`` may be empty here)."""
        ...

    def status(self) -> CdiStatus: ...
