"""What the kernel accounts to each process: kfd/proc, DRM's fdinfo, the driver's own total of each GPU; and to cgroups.

Owns the reading, and what of it may be kept from one look to the next. Does not own what it means
(:mod:`amdvgpud.core.truth`). Opens no device. A file that vanishes is a process, a context or a queue that has ended,
and is no error; what cannot be read is absent.

Sources: ``kfd_process.c`` (kfd/proc; the folders ``context_<id>`` in it are further contexts of a process, and are
summed), Documentation/gpu/drm-usage-stats.rst and ``amdgpu_fdinfo.c`` (fdinfo), proc_pid_fdinfo(5).

Costs, as it is done again and again (bench/run.py holds it): descriptors rather than paths, no look at a process's
mounts while it is the one that it was, the dear files (evictions, occupancy: hardware locks) of slices' processes only,
and fdinfo of these only. ``sdma_`` files touch the memory of the process and schedule work in the kernel: on demand.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from amdvgpud.core.caps import region_of
from amdvgpud.core.model import Inventory
from amdvgpud.core.truth import Belonging, KernelPicture, KernelProcess
from amdvgpud.host.procs import SliceMounts, cgroup_of, inner_pid, start_ticks

_ROOM: Final = 4096
_PROC: Final = ("sys/class/kfd/kfd/proc", "sys/devices/virtual/kfd/kfd/proc")
_INITIAL_PID_NAMESPACE: Final = "pid:[4026531836]"
_KIB: Final = {b"": 1, b"KiB": 1 << 10, b"MiB": 1 << 20}
_SIZE: Final = re.compile(rb"(\d+)(?:[ \t]+(KiB|MiB))?")
_COMPUTE_QUEUE: Final = 0
"""``KFD_QUEUE_TYPE_COMPUTE`` of ``kfd_priv.h``, AQL or not; the request that makes a queue has numbers of its own."""
_YOUNG_LOOKS: Final = 2
_STRANGER_LOOKS: Final = 16
"""A process that is in no slice may enter one (a runtime, or ``amdvgpuctl run``, makes the mounts in the process that
then becomes the command). That is a matter of its first moments, so it is looked at anew at the next looks, and later
only now and then."""


@dataclass(slots=True)
class _Known:
    """What of a process stays as it is, mostly, for as long as it is the one that started then."""

    start_ticks: int
    belonging: Belonging
    inodes: tuple[int | None, ...]
    """Of the guest directories of ``belonging``: another one of the same name is another slice."""
    inner_pid: int
    pid_namespace: int
    command: str
    looks: int = 0

    @property
    def due(self) -> bool:
        return self.looks <= _YOUNG_LOOKS or self.looks % _STRANGER_LOOKS == 0


@dataclass(slots=True)
class _Figures:
    vram: dict[int, int] = field(default_factory=dict)
    occupancy: dict[int, int] = field(default_factory=dict)
    evicted: dict[int, int] = field(default_factory=dict)
    sdma: dict[int, int] = field(default_factory=dict)
    compute_queues: dict[int, int] = field(default_factory=dict)


class KernelFigures:
    """The implementation of :class:`amdvgpud.guard.Figures`. Blocking; callers in several threads take turns.

    ``root`` holds ``sys/``; ``slices`` is the directory of slices; ``vram_used_bytes`` tells a GPU's total by its PCI
    address, ``dmem_bytes`` what is counted for a cgroup by its region. ``refresh`` is called before each look: a
    simulation brings its kfd/proc up to date there. ``own_pids`` are of the daemon's own children, who use nothing.
    """

    def __init__(
        self,
        slices: Path,
        *,
        root: Path = Path("/"),
        proc: Path = Path("/proc"),
        now_s: Callable[[], float],
        vram_used_bytes: Callable[[str], int | None] = lambda pci_address: None,
        dmem_bytes: Callable[[str], Mapping[str, int]] = lambda cgroup: {},
        refresh: Callable[[], None] = lambda: None,
        own_pids: Callable[[], frozenset[int]] = frozenset,
        sdma: bool = False,
    ) -> None:
        self._slices = slices
        self._root = root
        self._proc = proc
        self._now_s = now_s
        self._vram_used_bytes = vram_used_bytes
        self._dmem_bytes = dmem_bytes
        self._refresh = refresh
        self._own_pids = own_pids
        self._sdma = sdma
        self._known: dict[int, _Known] = {}
        self._veiled = 0
        """Processes of slices whose descriptors this look was not shown."""
        self._turn = threading.Lock()

    def read(self, inventory: Inventory, cgroups: Collection[str] = ()) -> KernelPicture:
        with self._turn:
            return self._read(inventory, cgroups)

    def _read(self, inventory: Inventory, cgroups: Collection[str]) -> KernelPicture:
        with contextlib.suppress(OSError):  # the look is then at what was there before
            self._refresh()
        reasons = []
        self._veiled = 0
        processes: tuple[KernelProcess, ...] | None = None
        if (reason := self._foreign()) is not None:
            reasons.append(reason)
        elif (folder := self._open_proc()) is None:
            if inventory.gpus:
                reasons.append(f"{self._root / _PROC[0]} cannot be read, so nobody knows which processes use the GPUs")
        else:
            try:
                processes = tuple(sorted(self._processes(folder), key=lambda p: p.pid))
            finally:
                os.close(folder)
        if self._veiled:
            reasons.append(
                f"{self._veiled} processes of slices do not show this daemon what they have open, so VRAM that they "
                "took through render nodes alone (Vulkan, OpenGL) is not seen: give it CAP_SYS_PTRACE (systemd: the "
                "drop-in fdinfo.conf), or do without these figures"
            )
        used = {gpu.id: n for gpu in inventory.gpus if (n := self._vram_used(gpu.pci_address)) is not None}
        regions = {region_of(gpu.pci_address): gpu.id for gpu in inventory.gpus}
        counted = {
            cgroup: {regions[region]: n for region, n in self._dmem_bytes(cgroup).items() if region in regions}
            for cgroup in cgroups
        }
        dmem = {cgroup: of for cgroup, of in counted.items() if of}
        return KernelPicture(self._now_s(), processes, used, dmem, tuple(reasons))

    # -------------------------------------------------------------------------------------------------- whose list

    def _foreign(self) -> str | None:
        """The KFD numbers processes as the machine does. From another pid namespace its pids are other processes."""
        if self._root != Path("/"):
            return None  # a simulated machine numbers them as whoever built it does
        try:
            if str((self._proc / "self/ns/pid").readlink()) == _INITIAL_PID_NAMESPACE:
                return None
        except OSError:
            pass
        return (
            "this daemon is in a pid namespace of its own, in which the kernel's list of GPU processes means nothing: "
            "give it the host's (hostPID), or do without the kernel's figures"
        )

    def _open_proc(self) -> int | None:
        for tail in _PROC:
            try:
                return os.open(self._root / tail, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                continue
        return None

    # -------------------------------------------------------------------------------------------------- processes

    def _processes(self, folder: int) -> Iterator[KernelProcess]:
        mounts = SliceMounts.look(self._slices, self._proc)
        inodes: dict[str, int | None] = {}
        clients: set[tuple[bytes, bytes]] = set()
        living: set[int] = set()
        listed = {int(name) for name in _names(folder) if name.isascii() and name.isdecimal()} - self._own_pids()
        # By pid, so that a client that is shared (a descriptor that was passed on) is the oldest process's.
        for pid in sorted(listed | self._pids()):
            known = self._look_up(pid, pid in listed, mounts, inodes)
            if known is not None:
                living.add(pid)
            elif pid not in listed:
                continue
            belonging = Belonging() if known is None else known.belonging
            ours = bool(belonging.slices or belonging.claims)
            if not ours and pid not in listed:
                continue
            figures = self._figures(folder, pid, ours) if pid in listed else _Figures()
            drm = self._drm_bytes(pid, clients) if ours else {}
            if figures is None or (pid not in listed and not drm):
                continue
            yield KernelProcess(
                pid=pid,
                start_ticks=0 if known is None else known.start_ticks,
                inner_pid=pid if known is None else known.inner_pid,
                pid_namespace=0 if known is None else known.pid_namespace,
                command="?" if known is None else known.command,
                cgroup=cgroup_of(pid, self._proc) if ours else None,  # which it can leave at any time
                belonging=belonging,
                vram_bytes=figures.vram,
                drm_bytes=drm,
                cu_occupancy=figures.occupancy,
                evicted_ms=figures.evicted,
                sdma_us=figures.sdma,
                compute_queues=figures.compute_queues,
            )
        self._known = {pid: known for pid, known in self._known.items() if pid in living}

    def _pids(self) -> set[int]:
        """All processes: who draws only (Vulkan, OpenGL) is in no list of the KFD's."""
        try:
            fd = os.open(self._proc, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return set()
        try:
            return {int(name) for name in _names(fd) if name.isascii() and name.isdecimal()}
        finally:
            os.close(fd)

    def _look_up(self, pid: int, listed: bool, mounts: SliceMounts, inodes: dict[str, int | None]) -> _Known | None:
        """What is known of the process, looked at anew where it may be another one; None: /proc does not have it."""
        known = self._known.get(pid)
        if known is not None:
            known.looks += 1
            if not listed and not known.inodes and not known.due:
                return known  # most processes of the machine: not even whether it is the same one is asked each time
        ticks = start_ticks(pid, self._proc)
        if ticks is None:
            return None

        def inodes_of(belonging: Belonging) -> tuple[int | None, ...]:
            for name in (*belonging.slices, *belonging.claims):
                if name not in inodes:
                    inodes[name] = _inode(self._slices / name / "guest")
            return tuple(inodes[name] for name in (*belonging.slices, *belonging.claims))

        if known is not None and known.start_ticks == ticks and known.inodes == inodes_of(known.belonging):
            if known.inodes or not known.due:
                return known
            looks = known.looks
        else:
            looks = 0
        belonging = mounts.of(pid)
        inner, namespace = self._identity(pid) if belonging != Belonging() else (pid, 0)
        command = "?"
        if (text := _text(self._proc / str(pid) / "comm").strip()).isprintable() and text:
            command = text
        self._known[pid] = known = _Known(ticks, belonging, inodes_of(belonging), inner, namespace, command, looks)
        return known

    def _identity(self, pid: int) -> tuple[int, int]:
        """(pid in the innermost namespace, that namespace's inode or 0), as the gate writes them into the ledger."""
        entry = self._proc / str(pid)
        try:
            namespace = int(str((entry / "ns/pid").readlink()).rpartition("[")[2].rstrip("]"))
        except (OSError, ValueError):
            namespace = 0
        return inner_pid(pid, self._proc) or pid, namespace

    # ---------------------------------------------------------------------------------------------------- the KFD's

    def _figures(self, folder: int, pid: int, dear: bool) -> _Figures | None:
        """None: it ended while we looked."""
        found = _Figures()
        return found if self._add_context(folder, str(pid), dear, found) else None

    def _add_context(self, folder: int, name: str, dear: bool, found: _Figures) -> bool:
        try:
            here = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        except OSError:
            return False
        try:
            for entry in _names(here):
                kind, _, tail = entry.partition("_")
                if kind == "context":
                    self._add_context(here, entry, dear, found)
                elif entry == "queues" and dear:
                    self._add_queues(here, entry, found)
                elif not (tail.isascii() and tail.isdecimal()):
                    continue
                elif kind == "vram":
                    _add(found.vram, int(tail), _number(here, entry))
                elif kind == "stats" and dear:
                    _add(found.evicted, int(tail), _number(here, f"{entry}/evicted_ms"))
                    _add(found.occupancy, int(tail), _number(here, f"{entry}/cu_occupancy"))
                elif kind == "sdma" and dear and self._sdma:
                    _add(found.sdma, int(tail), _number(here, entry))
        finally:
            os.close(here)
        return True

    def _add_queues(self, folder: int, entry: str, found: _Figures) -> None:
        """Of compute: ``kfd_queue.c`` has an area for saving waves for no other type."""
        for queue in _listed(folder, entry):
            gpu_id = _number(folder, f"{entry}/{queue}/gpuid")
            if gpu_id is not None and _number(folder, f"{entry}/{queue}/type") == _COMPUTE_QUEUE:
                _add(found.compute_queues, gpu_id, 1)

    def _vram_used(self, pci_address: str) -> int | None:
        try:
            return self._vram_used_bytes(pci_address)
        except OSError:
            return None  # in a reset, say

    # ------------------------------------------------------------------------------------------------------- DRM's

    def _drm_bytes(self, pid: int, clients: set[tuple[bytes, bytes]]) -> dict[str, int]:
        """Resident VRAM of the process's DRM clients by PCI address, each client once for all processes.

        What a client shares with others is left out: one of them would be charged for it, and no file says which.
        Looked at are descriptors of files below /dev: reading all of a program's would take longer than all the rest.
        Without CAP_SYS_PTRACE there is nothing to see here but our own user's processes; without CAP_DAC_OVERRIDE too,
        not even which descriptors there are.
        """
        found: dict[str, int] = {}
        try:
            here = os.open(f"{self._proc}/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return found
        try:
            try:
                folder = os.open("fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
            except PermissionError:
                self._veiled += 1
                return found
            except OSError:
                return found
            try:
                numbers = _names(folder)
            finally:
                os.close(folder)
            for number in numbers:
                try:
                    if not os.readlink(f"fd/{number}", dir_fd=here).startswith("/dev/dri/"):
                        continue
                except PermissionError:
                    self._veiled += 1
                    break
                except OSError:
                    continue
                client = _parse_fdinfo(_bytes(here, f"fdinfo/{number}"))
                if client is not None and client.key not in clients:
                    clients.add(client.key)
                    address = client.pci_address
                    found[address] = found.get(address, 0) + client.vram_bytes
        finally:
            os.close(here)
        return found


@dataclass(frozen=True, slots=True)
class _Client:
    key: tuple[bytes, bytes]
    pci_address: str
    vram_bytes: int


def _parse_fdinfo(text: bytes) -> _Client | None:
    """One descriptor of an amdgpu node, of which the kernel tells memory; None for any other."""
    if _line(text, b"drm-driver") != b"amdgpu":
        return None
    address, identity = _line(text, b"drm-pdev"), _line(text, b"drm-client-id")
    resident = _size(_line(text, b"drm-resident-vram") or _line(text, b"drm-memory-vram"))
    if not address or not identity or resident is None:
        return None
    shared = _size(_line(text, b"drm-shared-vram")) or 0
    return _Client((address, identity), address.decode("ascii", "replace"), max(0, resident - shared))


def _line(text: bytes, key: bytes) -> bytes:
    """What follows ``key:`` in its line; nothing where there is none. (The first line is never DRM's.)"""
    at = text.find(b"\n" + key + b":")
    if at < 0:
        return b""
    return text[at + len(key) + 2 : text.find(b"\n", at + 1) % (len(text) + 1)].strip()


def _size(value: bytes) -> int | None:
    match = _SIZE.fullmatch(value)
    return None if match is None else int(match[1]) * _KIB[match[2] or b""]


# ------------------------------------------------------------------------------------------------------ small files


def _add(to: dict[int, int], gpu_id: int, value: int | None) -> None:
    if value is not None:
        to[gpu_id] = to.get(gpu_id, 0) + value


def _number(folder: int, name: str) -> int | None:
    text = _bytes(folder, name).strip()
    return int(text) if text.isdigit() and len(text) < 20 else None


def _bytes(folder: int, name: str) -> bytes:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return b""
    try:
        return os.read(fd, _ROOM)
    except OSError:  # ENODEV, ESRCH: gone between the two; EINVAL: the hardware does not tell
        return b""
    finally:
        os.close(fd)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def _names(folder: int) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _listed(folder: int, name: str) -> list[str]:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return []
    try:
        return _names(fd)
    finally:
        os.close(fd)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None
