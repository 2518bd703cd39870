"""The built-in look at the GPUs, and what the judge remembers, kept where a reboot forgets it.

Owns which files tell how a GPU is, and what each errno of them means. Does not own what follows
(:mod:`amdvgpud.core.health`). Opens render nodes and closes them at once; never /dev/kfd, which is
:mod:`amdvgpud.host.smi`'s, in a process of its own. A card that sleeps is looked at by what does not wake it.

Sources: ``amdgpu_ras.c`` (``ras/*_err_count``, ``gpu_vram_bad_pages``), ``amdgpu_pm.c`` and ``amdgpu_device.c``
(``pcie_replay_count``), Documentation/ABI/testing/sysfs-bus-pci-devices-aer_stats, Documentation/power/runtime_pm.rst.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from amdvgpud.core.errors import HostFailure
from amdvgpud.core.health import NOBODY, Condition, Count, Finding, Source, Standing, Standings
from amdvgpud.core.model import Gpu, GpuId, Inventory, Partition
from amdvgpud.ports import Examination

UNTELLING: Final = frozenset({errno.EBUSY, errno.EAGAIN, errno.EPERM, errno.EACCES})
"""A driver in the midst of a reset or a partition switch answers so: not 'gone', and not 'well' either."""

LOOK_S: Final = 15.0
"""A look at one GPU takes a millisecond; a driver that does not answer for so long hangs. Guessed."""

_T = TypeVar("_T")
_TOPOLOGY: Final = "sys/class/kfd/kfd/topology"
_ERROR_COUNT: Final = re.compile(r"^\s*(ue|ce)\s*:\s*(\d+)\s*$", re.ASCII | re.MULTILINE)
_AER_TOTAL: Final = re.compile(r"^TOTAL_ERR_(?:FATAL|NONFATAL|COR)\s+(\d+)\s*$", re.ASCII | re.MULTILINE)
_AER: Final = (
    ("aer_dev_fatal", Count.PCIE_FATAL),
    ("aer_dev_nonfatal", Count.PCIE_NONFATAL),
    ("aer_dev_correctable", Count.PCIE_CORRECTABLE),
)


def read_text(path: Path) -> str:
    return path.read_text("ascii", "replace")


def open_node(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _in_a_thread(work: Callable[[], _T]) -> asyncio.Future[_T]:
    """In a thread that keeps nobody from ending: a read that a driver never answers ends with the process only."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def run() -> None:
        settle: Callable[[], None]
        try:
            settle = partial(future.set_result, work())
        except Exception as error:
            settle = partial(future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the daemon has ended meanwhile
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, name="look", daemon=True).start()
    return future


class SysfsHealth:
    """The built-in check on a directory that holds ``sys/`` and ``dev/``.

    ``read`` and ``open_node`` are the driver's side: a simulated machine's files are plain ones, which never fail.
    """

    name: Final = "sysfs"

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        read: Callable[[Path], str] = read_text,
        open_node: Callable[[Path], int] = open_node,
        look_s: float = LOOK_S,
    ) -> None:
        self._root = root
        self._look_s = look_s
        self._pending: dict[str, asyncio.Future[Any]] = {}
        self._read = read
        self._open_node = open_node

    async def examine(self, inventory: Inventory) -> Examination:
        """Each GPU in a thread of its own: a driver that hangs keeps its readers, and must not keep the others' too."""
        if not inventory.gpus:
            return Examination()
        generation = await self._bounded("the KFD's topology", self._generation)
        looks = await asyncio.gather(*(self._of_gpu(gpu) for gpu in inventory.gpus))
        return Examination(
            tuple(finding for look in looks for finding in look.findings),
            {gpu: counts for look in looks for gpu, counts in look.counts.items()},
            generation != inventory.generation_id or any(look.stale for look in looks),
        )

    async def _of_gpu(self, gpu: Gpu) -> Examination:
        try:
            return await self._bounded(gpu.id, lambda: self._look_at(gpu))
        except HostFailure as error:
            return Examination((Finding(gpu.id, Source.PULSE, Condition.UNHEALTHY, f"its driver hangs: {error}"),))

    async def _bounded(self, what: str, work: Callable[[], _T]) -> _T:
        """``HostFailure`` when it takes too long. It cannot be taken back; the next look waits for the same one."""
        pending = self._pending.get(what) or self._pending.setdefault(what, _in_a_thread(work))
        await asyncio.wait({pending}, timeout=self._look_s)
        if not pending.done():
            raise HostFailure(f"a look at {what} has not ended after {self._look_s:g} s")
        self._pending.pop(what, None)  # another look may have waited for it too, and be done with it
        result: _T = pending.result()
        return result

    def _look_at(self, gpu: Gpu) -> Examination:
        trouble = self._trouble(gpu)
        findings = () if trouble is None else (trouble,)
        if self._asleep(gpu):
            return Examination(findings)
        # What only says that something is gone, or was cut anew, is for a scan to say.
        gone = trouble is not None and trouble.condition is Condition.UNHEALTHY
        stale = gone or self._mode(gpu) not in (None, gpu.compute_partition)
        return Examination(findings, {gpu.id: dict(self._counts(gpu))}, stale)

    def _generation(self) -> int:
        try:
            return int(self._read(self._root / _TOPOLOGY / "generation_id"))
        except (OSError, ValueError) as error:
            raise HostFailure(f"the KFD's topology cannot be read: {error}") from error

    # ----------------------------------------------------------------------------------------------------- one GPU

    def _device(self, gpu: Gpu, name: str) -> Path:
        return self._root / "sys/bus/pci/devices" / gpu.pci_address / name

    def _asleep(self, gpu: Gpu) -> bool:
        """Runtime-suspended. Reading this wakes no card; most other files, and an open render node, do."""
        try:
            return self._read(self._device(gpu, "power/runtime_status")).strip() in ("suspended", "suspending")
        except OSError:
            return False

    def _trouble(self, gpu: Gpu) -> Finding | None:
        """The gravest that its partitions have, the first of equals."""
        asleep = self._asleep(gpu)
        troubles = [self._of_partition(gpu, partition, asleep) for partition in gpu.partitions]
        grave = [t for t in troubles if t is not None and t.condition is Condition.UNHEALTHY]
        return next((t for t in (*grave, *troubles) if t is not None), None)

    def _of_partition(self, gpu: Gpu, partition: Partition, asleep: bool) -> Finding | None:
        node = self._root / _TOPOLOGY / "nodes" / str(partition.kfd_node) / "gpu_id"
        render = self._root / f"dev/dri/renderD{partition.render_minor}"
        try:
            if self._read(node).strip() != str(partition.kfd_gpu_id):
                return Finding(
                    gpu.id, Source.PULSE, Condition.UNHEALTHY, f"KFD node {partition.kfd_node} is another GPU's now"
                )
        except OSError as error:
            return self._refused(gpu, f"KFD node {partition.kfd_node}", error)
        try:
            if asleep:
                render.stat()
            else:
                os.close(self._open_node(render))
        except OSError as error:
            return self._refused(gpu, f"/dev/dri/{render.name}", error)
        return None

    def _refused(self, gpu: Gpu, what: str, error: OSError) -> Finding:
        name = errno.errorcode.get(error.errno or 0, str(error))
        if error.errno in UNTELLING:
            return Finding(gpu.id, Source.PULSE, Condition.UNKNOWN, f"{what} answers {name}, as in a reset")
        if error.errno == errno.ENOENT:
            return Finding(gpu.id, Source.PULSE, Condition.UNHEALTHY, f"{what} is not there any more")
        return Finding(gpu.id, Source.PULSE, Condition.UNHEALTHY, f"{what} answers {name}")

    def _mode(self, gpu: Gpu) -> str | None:
        """None: none, or none to be had now."""
        try:
            return self._read(self._device(gpu, "current_compute_partition")).strip()
        except OSError:
            return None

    # ---------------------------------------------------------------------------------------------------- counters

    def _counts(self, gpu: Gpu) -> Iterator[tuple[Count, int]]:
        """Those that this GPU and driver have; a file that cannot be read now is left out."""
        uncorrectable = correctable = 0
        files = self._ras_files(gpu)
        read = 0
        for path in files:
            try:
                found = _ERROR_COUNT.findall(self._read(path))
            except OSError:
                continue
            read += 1
            uncorrectable += sum(int(number) for kind, number in found if kind == "ue")
            correctable += sum(int(number) for kind, number in found if kind == "ce")
        # All or nothing: a sum without some of its parts would seem to go back, as after a reset.
        if files and read == len(files):
            yield Count.UNCORRECTABLE, uncorrectable
            yield Count.CORRECTABLE, correctable
        if (pages := self._text(gpu, "ras/gpu_vram_bad_pages")) is not None:
            yield Count.RETIRED_PAGES, sum(1 for line in pages.splitlines() if line.strip())
        sums: dict[Count, int] = {}
        for name, count in _AER:
            if (match := _AER_TOTAL.search(self._text(gpu, name) or "")) is not None:
                sums[count] = int(match[1])
        replays = (self._text(gpu, "pcie_replay_count") or "").strip()
        if replays.isascii() and replays.isdigit():
            sums[Count.PCIE_CORRECTABLE] = sums.get(Count.PCIE_CORRECTABLE, 0) + int(replays)
        yield from sums.items()

    def _ras_files(self, gpu: Gpu) -> list[Path]:
        try:
            return sorted(p for p in self._device(gpu, "ras").iterdir() if p.name.endswith("_err_count"))
        except OSError:
            return []

    def _text(self, gpu: Gpu, name: str) -> str | None:
        try:
            return self._read(self._device(gpu, name))
        except OSError:
            return None


# --------------------------------------------------------------------------------------------------------- memory


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    boot_id: str
    standings: dict[GpuId, Standing]


class StandingsFile:
    """The judge's memory, as a file in the run directory. A reboot forgets it, as it does the counters in it."""

    def __init__(self, path: Path, *, boot_id: Path = Path("/proc/sys/kernel/random/boot_id")) -> None:
        self._path = path
        self._boot_id_file = boot_id

    def load(self) -> Standings:
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Kept)
        except (OSError, ValueError, msgspec.DecodeError):
            return NOBODY  # nothing that is lost by it cannot be found again
        return kept.standings if kept.boot_id == self._boot_id() else NOBODY

    def save(self, standings: Standings) -> None:
        new = self._path.with_name(f".{self._path.name}.new")
        try:
            new.touch(0o600)
            new.write_bytes(msgspec.json.encode(_Kept(self._boot_id(), dict(standings))))
            new.rename(self._path)  # not synced: it need not outlive the machine's present run
        except OSError as error:
            raise HostFailure(f"{self._path}: {error}") from error

    def _boot_id(self) -> str:
        try:
            return self._boot_id_file.read_text().strip()
        except OSError:
            return ""
