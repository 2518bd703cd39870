"""The policy and ledger files of each slice: made, kept up to date, read, and cleared of dead processes.

Owns ``<run_dir>/slices``. Layout of both files: ``shim/include/amdvgpu/abi.h``, read here through ``amdvgpud._abi``.
The gate (``shim/``) is the other party; neither talks to the other but through these files.

The policy is ours alone, so it is mapped and changed by whole 8-byte stores. The ledger can be written by the guest:
what is read from it is bounds checked and never admits anything (quotas come from the Book), it is read by ``pread``
(a mapping of a file that the guest cuts short kills the reader), and the one thing that must be a compare-and-swap on
a mapping, taking a dead process's slot apart, is done in C behind a SIGBUS guard.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import logging
import mmap
import os
import secrets
import shutil
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from amdvgpud._abi import ffi, lib
from amdvgpud.core.errors import HostFailure, NotFound
from amdvgpud.core.model import (
    ComputePolicy,
    CuSet,
    GpuUsage,
    Inventory,
    Partition,
    Priority,
    ProcessUsage,
    Request,
    Share,
    Slice,
    SliceName,
    Usage,
)
from amdvgpud.core.render import slice_environment
from amdvgpud.host.living import read_processes
from amdvgpud.host.procs import start_ticks

log = logging.getLogger(__name__)

_WORD: Final = 8
_MOST_BYTES: Final = (1 << 63) - 1
_MS_NOSUID_NODEV_NOEXEC: Final = 2 | 4 | 8
_MS_REMOUNT: Final = 32
_ROOM: Final = 4096
"""Bytes of the small files beside policy and ledger that we are willing to read."""


# ---------------------------------------------------------------------------------------------------------- writing


def write_slice(directory: Path, item: Slice, inventory: Inventory, *, sysfs_root: Path = Path("/")) -> None:
    """Make ``directory`` the guest directory of ``item``, or bring it up to date in place.

    Afterwards it holds ``policy``, ``ledger``, ``slice.json`` and one ``mem_banks-<kfd_gpu_id>`` a GPU. A directory
    that already serves the same GPUs keeps its inodes and its ledger; any other is replaced whole, by rename. Needs no
    daemon and no root. ``NotFound``: a share is on a partition that the inventory lacks. ``HostFailure``: no write.
    """
    placed = _placed(item, inventory)
    with _translated(f"slice {item.name!r}: cannot write {directory}"):
        if _serves(directory, placed):
            _update(directory, item, placed, inventory, sysfs_root)
            return
        fresh = directory.with_name(f".new-{directory.name}")
        _discard(fresh)
        _make(fresh, item, placed, inventory, sysfs_root)
        _replace(fresh, directory)


def _placed(item: Slice, inventory: Inventory) -> list[tuple[Share, Partition]]:
    """Each share with the Partition it is on; cell ``i`` of a ledger slot belongs to entry ``i``."""
    placed = []
    for share in item.shares:
        partition = inventory.partition(share.partition)
        if partition is None:
            there = ", ".join(p.id for p in inventory.partitions) or "none"
            raise NotFound(f"slice {item.name!r} is on partition {share.partition}, which is not here (here: {there})")
        placed.append((share, partition))
    return placed


def _policy_words(item: Slice, placed: Sequence[tuple[Share, Partition]], environment: Mapping[str, str]) -> list[int]:
    """The policy as its 8-byte words, with ``sequence`` and ``slice_key`` still 0."""
    policy = ffi.new("struct avg_policy *")
    policy.magic = lib.AVG_POLICY_MAGIC
    policy.version = lib.AVG_VERSION
    policy.bytes = lib.AVG_POLICY_BYTES
    policy.gpu_count = len(placed)
    policy.cu_mask_env_hash = _text_hash(environment.get("HSA_CU_MASK"))
    policy.visible_env_hash = _text_hash(environment.get("ROCR_VISIBLE_DEVICES"))
    policy.name = item.name.encode()
    for entry, (share, partition) in zip(policy.gpu, placed, strict=False):
        entry.kfd_gpu_id = partition.kfd_gpu_id
        entry.kfd_node = partition.kfd_node
        entry.render_minor = partition.render_minor
        entry.vram_bytes = share.vram_bytes
        entry.physical_bytes = partition.vram_bytes
        entry.cu_count = partition.cu_count
        entry.xcc_count = partition.layout.xcc_count
        entry.flags = (
            (lib.AVG_GPU_MASKED if share.cus else 0)
            | (lib.AVG_GPU_WGP if partition.layout.wgp else 0)
            | (lib.AVG_GPU_OVERSUBSCRIBE if item.request.oversubscribe else 0)
        )
        entry.priority = _priority_ceiling(item.request)
        mask = share.cus.mask if share.cus else 0
        for word in range(lib.AVG_MASK_WORDS):
            entry.cu_mask[word] = mask >> 64 * word & 0xFFFFFFFFFFFFFFFF
    return list(memoryview(ffi.buffer(policy)[:]).cast("Q"))


_CEILINGS: Final = {Priority.LOW: 3, Priority.NORMAL: 7, Priority.HIGH: 11}
"""The driver serves 0 to 6 by its low pipe, 7 to 10 by the medium and 11 to 15 by the high one. 7 is what runtimes ask
for an ordinary stream and 11 for a high one (15 up to ROCm 5.7); the steps of libhsakmt below 7 are 0, 3 and 5."""


def _priority_ceiling(request: Request) -> int:
    """Alone on its partition nobody has to be protected from the slice, so a program's own order of streams stands."""
    if request.compute.policy is ComputePolicy.WHOLE and request.priority is Priority.NORMAL:
        return int(lib.AVG_PRIORITY_NONE)
    return _CEILINGS[request.priority]


def _text_hash(text: str | None) -> int:
    """As the gate computes it over the value it finds in its environment; 0 where no such variable is written."""
    if text is None:
        return 0
    raw = text.encode()
    return int(lib.avg_text_hash(raw, len(raw)))


_SEQUENCE: Final = int(ffi.offsetof("struct avg_policy", "sequence")) // _WORD
_SLICE_KEY: Final = int(ffi.offsetof("struct avg_policy", "slice_key")) // _WORD
_GPU: Final = int(ffi.offsetof("struct avg_policy", "gpu")) // _WORD
_GPU_WORDS: Final = int(ffi.sizeof("struct avg_policy_gpu")) // _WORD
_QUOTA: Final = int(ffi.offsetof("struct avg_policy_gpu", "vram_bytes")) // _WORD
_LIVE: Final = frozenset(_GPU + i * _GPU_WORDS + _QUOTA for i in range(lib.AVG_MAX_GPUS))
"""Words that a reader loads singly: changing one needs no sequence."""


def _make(
    directory: Path,
    item: Slice,
    placed: Sequence[tuple[Share, Partition]],
    inventory: Inventory,
    sysfs_root: Path,
) -> None:
    environment = slice_environment(item, inventory)
    words = _policy_words(item, placed, environment)
    words[_SLICE_KEY] = secrets.randbits(64) | 1
    directory.mkdir()
    directory.chmod(0o755)
    _create(directory / "policy", 0o444, memoryview(_bytes_of(words)))
    _create(directory / "slice.json", 0o444, _slice_json(item, placed, environment))
    for share, partition in placed:
        _create(directory / f"mem_banks-{partition.kfd_gpu_id}", 0o444, _mem_banks(item, share, partition, sysfs_root))
    with _opened(directory / "ledger", os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        os.fchmod(fd, 0o666)
        _restore_ledger(fd, len(placed), words[_SLICE_KEY])


def _update(
    directory: Path,
    item: Slice,
    placed: Sequence[tuple[Share, Partition]],
    inventory: Inventory,
    sysfs_root: Path,
) -> None:
    environment = slice_environment(item, inventory)
    words = _policy_words(item, placed, environment)
    with _opened_to_write(directory / "policy") as fd, mmap.mmap(fd, lib.AVG_POLICY_BYTES) as mapped:
        now = memoryview(mapped[:]).cast("Q")
        words[_SLICE_KEY] = now[_SLICE_KEY]
        words[_SEQUENCE] = now[_SEQUENCE] & ~1
        changed = [i for i, word in enumerate(words) if word != now[i]]
        with memoryview(mapped) as view:
            base = ffi.from_buffer(view)

            # A quota alone is one store, whole by itself. Anything else is bracketed by an odd sequence, so that a gate
            # that copies a mask at this moment looks again. A daemon that died in between left it odd: ended here too.
            if not set(changed) <= _LIVE:
                stores = [(i, words[i]) for i in changed if i != _SEQUENCE]
                sequence = words[_SEQUENCE]
                stores = [(_SEQUENCE, sequence + 1), *stores, (_SEQUENCE, (sequence + 2) % (1 << 64))]
            else:
                stores = [(i, words[i]) for i in changed]
            for word, value in stores:
                lib.avg_store(base + word * _WORD, value)
            del base  # or the mapping could not be closed
    texts = {f"mem_banks-{p.kfd_gpu_id}": _mem_banks(item, share, p, sysfs_root) for share, p in placed}
    texts["slice.json"] = _slice_json(item, placed, environment)
    for name, text in texts.items():
        if _read_small(directory / name) != text:
            # In place: a container has the memory bank's very inode mounted over the KFD's file; and what is there
            # needs no new page of a tmpfs that some guest has filled. A reader that comes between the two calls sees
            # the new text with the rest of a longer old one behind it.
            with _opened_to_write(directory / name) as fd:
                os.pwrite(fd, text, 0)
                os.ftruncate(fd, len(text))


def _serves(directory: Path, placed: Sequence[tuple[Share, Partition]]) -> bool:
    """Whether ``directory`` is whole, of our version and for the same GPUs in the same order."""
    policy = _read_policy(directory)
    if policy is None or not stat.S_ISREG(_mode(directory / "ledger")):
        return False
    return [g.kfd_gpu_id for g in policy.gpus] == [p.kfd_gpu_id for _, p in placed]


def _mem_banks(item: Slice, share: Share, partition: Partition, sysfs_root: Path) -> bytes:
    """The KFD's memory-bank text of ``partition`` with the slice's size: what the runtime takes for the total.

    Never more than there is, unless host memory may serve: a request above the total would fail in the runtime.
    """
    source = sysfs_root / f"sys/devices/virtual/kfd/kfd/topology/nodes/{partition.kfd_node}/mem_banks/0/properties"
    size = share.vram_bytes if item.request.oversubscribe else min(share.vram_bytes, partition.vram_bytes)
    try:
        lines = source.read_text().splitlines()
    except OSError as error:
        # Nothing is left unlimited by this: the file only tells the total, the gate holds the quota.
        log.warning("KFD node %d has no readable memory bank (%s): a plain one is shown", partition.kfd_node, error)
        lines = ["heap_type 1", "size_in_bytes 0", "flags 0", "width 0", "mem_clk_max 0"]
    return "".join(f"size_in_bytes {size}\n" if ln.startswith("size_in_bytes ") else f"{ln}\n" for ln in lines).encode()


def _slice_json(item: Slice, placed: Sequence[tuple[Share, Partition]], environment: Mapping[str, str]) -> bytes:
    document = {
        "slice": item.name,
        "priority": item.request.priority,
        "oversubscribe": item.request.oversubscribe,
        "gpus": [
            {
                "partition": share.partition,
                "kfd_gpu_id": partition.kfd_gpu_id,
                "gfx_target": partition.gfx_target,
                "vram_bytes": share.vram_bytes,
                "physical_vram_bytes": partition.vram_bytes,
                "cu_count": share.granted_cus,
                "effective_cus": share.effective_cus,
                "physical_cu_count": partition.cu_count,
                "cu_mask": None if share.cus is None else hex(CuSet(share.cus.bits).mask),
            }
            for share, partition in placed
        ],
        "environment": dict(environment),
    }
    return (json.dumps(document, indent=2) + "\n").encode()


def _restore_ledger(fd: int, gpu_count: int, slice_key: int) -> None:
    """Give the open ledger its size, its space on disk and its head; slots are left as they are."""
    size = int(lib.avg_ledger_bytes(gpu_count))
    os.ftruncate(fd, size)
    os.posix_fallocate(fd, 0, size)  # a guest must not meet a full tmpfs as SIGBUS in the middle of a charge
    os.pwrite(fd, _ledger_head(gpu_count, slice_key), 0)


_OCCUPIED: Final = int(ffi.offsetof("struct avg_ledger", "occupied"))
"""Byte offset of the first field of the head that the gates write; those before it are ours."""
_OCCUPIED_BYTES: Final = slice(_OCCUPIED, _OCCUPIED + lib.AVG_SLOTS // 8)


def _ledger_head(gpu_count: int, slice_key: int) -> bytes:
    """The fields of the head that are ours."""
    head = ffi.new("struct avg_ledger *")
    head.magic = lib.AVG_LEDGER_MAGIC
    head.version = lib.AVG_VERSION
    head.slot_count = lib.AVG_SLOTS
    head.slot_bytes = lib.avg_slot_bytes(gpu_count)
    head.gpu_count = gpu_count
    head.slice_key = slice_key
    return bytes(ffi.buffer(head)[:_OCCUPIED])


# ---------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class _PolicyGpu:
    kfd_gpu_id: int
    bound_bytes: int
    """More than this no honest process can hold: what is above it was made up."""


@dataclass(frozen=True, slots=True)
class _Policy:
    gpus: tuple[_PolicyGpu, ...]
    slice_key: int


def _read_policy(directory: Path) -> _Policy | None:
    """What of our own policy is needed to read the ledger beside it; None where there is none that we understand."""
    raw = _read_small(directory / "policy")
    if len(raw) != lib.AVG_POLICY_BYTES:
        return None
    policy = ffi.from_buffer("struct avg_policy[]", raw)[0]
    if policy.magic != lib.AVG_POLICY_MAGIC or policy.version != lib.AVG_VERSION:
        return None
    if not 1 <= policy.gpu_count <= lib.AVG_MAX_GPUS:
        return None
    entries = [policy.gpu[i] for i in range(policy.gpu_count)]
    gpus = tuple(_PolicyGpu(int(g.kfd_gpu_id), max(int(g.vram_bytes), int(g.physical_bytes))) for g in entries)
    return _Policy(gpus, int(policy.slice_key))


@dataclass(frozen=True, slots=True)
class _SlotView:
    """The identity of one slot, as its writer (the guest) states it."""

    index: int
    owner: int
    start_ticks: int

    @property
    def pid(self) -> int:
        return self.owner & int(lib.AVG_OWNER_PID_MASK)

    @property
    def pid_namespace(self) -> int:
        return self.owner >> int(lib.AVG_OWNER_NS_SHIFT)

    @property
    def reclaiming(self) -> bool:
        return bool(self.owner & int(lib.AVG_OWNER_RECLAIM))


def _slots(words: memoryview, gpu_count: int) -> Iterator[tuple[_SlotView, int]]:
    """Each owned slot and the index of its first cell's first word. All slots are looked at: `occupied` is for
    honest readers, and a guest could lower it to hide."""
    head, stride = lib.AVG_LEDGER_HEAD_BYTES // _WORD, lib.avg_slot_bytes(gpu_count) // _WORD
    for index in range(lib.AVG_SLOTS):
        at = head + index * stride
        if words[at] & lib.AVG_OWNER_PID_MASK:
            yield _SlotView(index, words[at], words[at + 1]), at + lib.AVG_SLOT_HEAD_BYTES // _WORD


# Order of the words of struct avg_cell and struct avg_past.
_USED, _PENDING, _EARMARK, _PEAK, _ALLOCATIONS, _FREES, _DENIALS, _DENIED = range(8)
_PAST_PEAK, _PAST_ALLOCATIONS, _PAST_FREES, _PAST_DENIALS, _PAST_DENIED, _PAST_RECLAIMED = range(6)


def _read_usage(name: SliceName, raw: bytes, policy: _Policy, damaged: str | None) -> Usage:
    words = memoryview(raw).cast("Q")
    gpu_count, cell_words = len(policy.gpus), lib.AVG_CELL_BYTES // _WORD
    sums = [[0] * cell_words for _ in policy.gpus]
    processes = []
    for slot, first in _slots(words, gpu_count):
        used = {}
        for index, gpu in enumerate(policy.gpus):
            cell = words[first + index * cell_words : first + (index + 1) * cell_words]
            if cell[_USED] > gpu.bound_bytes:
                damaged = damaged or f"slot {slot.index} claims {cell[_USED]} bytes, more than GPU or quota have"
            used[gpu.kfd_gpu_id] = min(cell[_USED], gpu.bound_bytes)
            total = sums[index]
            total[_USED] += used[gpu.kfd_gpu_id]
            total[_PEAK] = max(total[_PEAK], min(cell[_PEAK], gpu.bound_bytes))
            for counter in (_ALLOCATIONS, _FREES, _DENIALS, _DENIED):
                total[counter] += cell[counter]
        if not slot.reclaiming:
            processes.append(ProcessUsage(slot.index, slot.pid, slot.start_ticks, slot.pid_namespace, used))
    past_at = int(ffi.offsetof("struct avg_ledger", "past")) // _WORD
    past_words = int(ffi.sizeof("struct avg_past")) // _WORD
    reclaimed, gpus = 0, []
    for index, (gpu, total) in enumerate(zip(policy.gpus, sums, strict=True)):
        past = words[past_at + index * past_words : past_at + (index + 1) * past_words]
        reclaimed += past[_PAST_RECLAIMED]
        used_bytes = min(total[_USED], gpu.bound_bytes)
        gpus.append(
            GpuUsage(
                kfd_gpu_id=gpu.kfd_gpu_id,
                used_bytes=used_bytes,
                peak_bytes=max(used_bytes, total[_PEAK], min(past[_PAST_PEAK], gpu.bound_bytes)),
                denials=_bounded(total[_DENIALS] + past[_PAST_DENIALS]),
                denied_bytes=_bounded(total[_DENIED] + past[_PAST_DENIED]),
                allocations=_bounded(total[_ALLOCATIONS] + past[_PAST_ALLOCATIONS]),
                frees=_bounded(total[_FREES] + past[_PAST_FREES]),
            )
        )
    return Usage(name, tuple(gpus), tuple(processes), damaged, _bounded(reclaimed))


def _bounded(count: int) -> int:
    return min(count, _MOST_BYTES)


# ------------------------------------------------------------------------------------------------------------- port


class LedgerFiles:
    """The slices' directories under ``run_dir/slices`` (:class:`amdvgpud.ports.SliceFiles`). Not thread safe.

    ``warnings`` says in whole sentences what could not be had (a tmpfs of its own) and what that means.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        sysfs_root: Path = Path("/"),
        tmpfs_bytes: int = 64 << 20,
        proc: Path = Path("/proc"),
    ) -> None:
        self.run_dir = run_dir
        self.slices = run_dir / "slices"
        self.warnings: tuple[str, ...] = ()
        self._sysfs_root = sysfs_root
        self._tmpfs_bytes = tmpfs_bytes
        self._proc = proc
        self._damaged: dict[SliceName, str] = {}
        self._quiet: dict[SliceName, tuple[bytes, Usage]] = {}
        """Slices in which nobody is, as they were last read: (what :meth:`_glance` saw before, the picture)."""
        self._seen_alive: dict[SliceName, dict[_SlotView, int]] = {}
        """Slots whose owners lived at the last look, with their pids as our /proc has them."""

    def prepare(self) -> None:
        """The directory of slices, on its own size-limited tmpfs. ``HostFailure``: not even the directory.

        Where no tmpfs can be mounted (not root, no capability in a container) an ordinary directory serves, and
        ``warnings`` says so: then a guest that grows its ledger fills whatever ``run_dir`` lies on.
        """
        with _translated(f"cannot prepare {self.slices}"):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self.run_dir.chmod(0o711)  # pass through, not list: a rootless runtime must reach its own slice
            self.slices.mkdir(exist_ok=True)
            self.warnings = ()
            if reason := self._mount():
                warning = (
                    f"{self.slices} is not on a tmpfs of its own ({reason}): a guest that grows its ledger can fill "
                    f"the file system of {self.run_dir}; run the daemon as root, or mount a small tmpfs there"
                )
                self.warnings = (warning,)
                log.warning("%s", warning)
            self.slices.chmod(0o711)
            for left in self.slices.glob(".*-*"):
                _discard(left)

    def write(self, item: Slice, inventory: Inventory) -> None:
        """Make or update the slice's directory; idempotent. ``NotFound`` and ``HostFailure`` as :func:`write_slice`."""
        placed = _placed(item, inventory)
        self._quiet.pop(item.name, None)
        try:
            self._write(item, placed, inventory)
        except HostFailure as error:
            # A guest that has grown its ledger fills the tmpfs for all: cut them back, then try once more.
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENOSPC):
                raise
            for name in self.names():
                with suppress(HostFailure, NotFound):
                    self.usage(name)  # which mends it
            self._write(item, placed, inventory)

    def _write(self, item: Slice, placed: Sequence[tuple[Share, Partition]], inventory: Inventory) -> None:
        home = self.slices / item.name
        with _translated(f"slice {item.name!r}: cannot write {home}", self._tmpfs_bytes):
            if _serves(home / "guest", placed):
                _update(home / "guest", item, placed, inventory, self._sysfs_root)
                self._own(home, item.owner_uid)
                return
            fresh = self.slices / f".new-{item.name}"
            _discard(fresh)
            try:
                fresh.mkdir()
                _make(fresh / "guest", item, placed, inventory, self._sysfs_root)
                self._own(fresh, item.owner_uid)
                _replace(fresh, home)
            except BaseException:
                _discard(fresh)
                raise
            self._damaged.pop(item.name, None)

    def remove(self, name: SliceName) -> None:
        """The slice's directory is gone afterwards; containers that have it mounted keep their inodes."""
        home, old = self.slices / name, self.slices / f".old-{name}"
        with _translated(f"slice {name!r}: cannot remove {home}"):
            _discard(old)
            with suppress(FileNotFoundError):
                home.rename(old)
            _discard(old)
        self._damaged.pop(name, None)
        self._quiet.pop(name, None)
        self._seen_alive.pop(name, None)

    def mountpoints(self, names: Sequence[str]) -> str:
        """A directory that holds an empty one for each of ``names`` and nothing else, for a mount at the place where a
        container has its slices. It lies in the first one's home, and goes with it. ``HostFailure``: there is none.
        """
        places = self.slices / names[0] / ("places-" + hashlib.sha256("\n".join(names).encode()).hexdigest()[:16])
        with _translated(f"slice {names[0]!r}: cannot make {places}", self._tmpfs_bytes):
            for place in (places, *(places / name for name in names)):
                place.mkdir(exist_ok=True)
                place.chmod(0o755)
        return str(places)

    def names(self) -> frozenset[SliceName]:
        if not self.slices.is_dir():
            return frozenset()
        return frozenset(SliceName(p.name) for p in self.slices.iterdir() if not p.name.startswith(".") and p.is_dir())

    def usage(self, name: SliceName) -> Usage:
        """A picture of the ledger. A file that was cut short, grown or overwritten is mended here and now, and the
        slice stays ``damaged`` for as long as its directory lives: what was lost from it cannot come back.
        """
        glance = self._glance(name)
        if glance is not None and glance == self._quiet.get(name, (None, None))[0]:
            return self._quiet[name][1]
        self._quiet.pop(name, None)
        guest = self.slices / name / "guest"
        policy = _read_policy(guest)
        if policy is None:
            if not guest.is_dir():
                raise NotFound(f"slice {name!r} has no directory under {self.slices}")
            return Usage(name, damaged="the policy file is missing or not of this version: write the slice anew")
        with _translated(f"slice {name!r}: cannot read its ledger"), _opened(guest / "ledger", os.O_RDWR) as fd:
            raw = self._read_whole(fd, name, policy)
        usage = _read_usage(name, raw, policy, self._damaged.get(name))
        if usage.damaged is not None:
            self._flag(name, usage.damaged)
        elif glance is not None and not usage.processes and not any(glance[_OCCUPIED_BYTES]):
            self._quiet[name] = glance, usage
        return usage

    def reclaim(self, name: SliceName) -> int:
        """Return the charges of dead processes to the slice; the bytes returned (0 where /proc hides processes)."""
        if name in self._quiet and self._glance(name) == self._quiet[name][0]:
            return 0
        guest = self.slices / name / "guest"
        policy = _read_policy(guest)
        if policy is None:
            return 0
        given = 0
        with _translated(f"slice {name!r}: cannot open its ledger"), _opened(guest / "ledger", os.O_RDWR) as fd:
            words = memoryview(self._read_whole(fd, name, policy)).cast("Q")
            # The ledger is read before /proc: who has a slot in the picture was there before we looked for the living.
            owned = [slot for slot, _ in _slots(words, len(policy.gpus))]
            if all(self._still_lives(name, slot) for slot in owned):
                return 0
            living = read_processes(self._proc)
            dead = [s for s in owned if living.gone(s.pid, s.pid_namespace, s.start_ticks, s.reclaiming)]
            there = {s: living.pids.get((s.pid, s.start_ticks)) for s in owned if s not in dead}
            self._seen_alive[name] = {slot: pid for slot, pid in there.items() if pid is not None}
            if not dead:
                return 0
            with mmap.mmap(fd, len(words) * _WORD) as mapped, memoryview(mapped) as view:
                base = ffi.from_buffer(view)
                for slot in dead:
                    given += self._clear(base, slot, policy, living.own_namespace, name)
                del base
        return _bounded(given)

    def _still_lives(self, name: SliceName, slot: _SlotView) -> bool:
        """Whether the owner that was found alive before is there still: one file instead of all of /proc."""
        pid = None if slot.reclaiming else self._seen_alive.get(name, {}).get(slot)
        return pid is not None and start_ticks(pid, self._proc) == slot.start_ticks

    def _glance(self, name: SliceName) -> bytes | None:
        """Identity, size and head of the ledger; None where it cannot be read.

        Most slices have nobody in them most of the time, and then the head says so: while it is the same and no slot
        is occupied, there is nothing new to read. A guest can lie there as it can in the slots, about itself.
        """
        try:
            fd = os.open(
                f"{self.slices}/{name}/guest/ledger", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError:
            return None
        try:
            there = os.fstat(fd)
            return os.pread(fd, lib.AVG_LEDGER_HEAD_BYTES, 0) + struct.pack("2Q", there.st_ino, there.st_size)
        except OSError:
            return None
        finally:
            os.close(fd)

    def _clear(self, base: Any, slot: _SlotView, policy: _Policy, namespace: int, name: SliceName) -> int:
        count = len(policy.gpus)
        result = int(lib.avg_reclaim_guarded(base, count, slot.index, slot.owner, namespace, os.getpid()))
        if result < 0:
            self._flag(name, "the ledger was cut short while dead processes were cleared from it")
            return 0
        given = min(result, sum(g.bound_bytes for g in policy.gpus))
        if given:
            log.info("%s: %d bytes of dead process %d came back to the slice", name, given, slot.pid)
        return given

    def _read_whole(self, fd: int, name: SliceName, policy: _Policy) -> bytes:
        """The ledger at its right size, mended first if it needs it."""
        count = len(policy.gpus)
        size, wanted = os.fstat(fd).st_size, int(lib.avg_ledger_bytes(count))
        raw = os.pread(fd, wanted, 0)
        found = None
        if size != wanted:
            found = f"the ledger was {'grown' if size > wanted else 'cut short'} to {size} bytes instead of {wanted}"
        elif not raw.startswith(_ledger_head(count, policy.slice_key)):
            found = "the head of the ledger was overwritten"
        if found is not None:
            self._flag(name, found)
            _restore_ledger(fd, count, policy.slice_key)
            # Whose bit was lost would not be counted any more: all slots are looked at from now on.
            os.pwrite(fd, b"\xff" * (lib.AVG_SLOTS // 8), _OCCUPIED)
            raw = os.pread(fd, wanted, 0)
        return raw.ljust(wanted, b"\0")  # cut short again under our hands: what is not there counts as nothing

    def _flag(self, name: SliceName, what: str) -> None:
        if name not in self._damaged:
            log.warning("%s: %s; it is mended, but its figures are not to be believed", name, what)
            self._damaged[name] = what

    def _own(self, home: Path, owner_uid: int) -> None:
        """Ours, 0700, and passable for the slice's owner, whose rootless runtime must get through to bind the files.

        By an ACL, not by giving the directory away: its owner could put a link to somebody else's files where root
        writes the policy, or fill it with more than a removal can walk through.
        """
        home.chmod(0o700)
        if os.geteuid() != 0 or owner_uid == 0:
            return
        # The execute bit for one user, and nothing for anybody else (posix_acl_xattr.h; tag, permissions, id).
        unnamed = 0xFFFFFFFF
        entries = [(0x01, 7, unnamed), (0x02, 1, owner_uid), (0x04, 0, unnamed), (0x10, 1, unnamed), (0x20, 0, unnamed)]
        acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
        os.setxattr(home, "system.posix_acl_access", acl)

    def _mount(self) -> str | None:
        """Why ``slices`` is not on its own tmpfs of the wanted size, or None."""
        mounted = self.slices.is_mount()
        if mounted:
            there = os.statvfs(self.slices)
            if there.f_blocks * there.f_frsize == self._tmpfs_bytes:
                return None
        libc = ctypes.CDLL(None, use_errno=True)
        flags = _MS_NOSUID_NODEV_NOEXEC | (_MS_REMOUNT if mounted else 0)
        options = f"size={self._tmpfs_bytes},mode=0711".encode()
        if libc.mount(b"amdvgpud", os.fsencode(self.slices), b"tmpfs", flags, options) == 0:
            return None
        return os.strerror(ctypes.get_errno())


# ------------------------------------------------------------------------------------------------------ small files


def _bytes_of(words: Sequence[int]) -> bytes:
    return b"".join(word.to_bytes(_WORD, "little") for word in words)


@contextmanager
def _translated(what: str, tmpfs_bytes: int | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT) and tmpfs_bytes is not None
        hint = f"; its tmpfs of {tmpfs_bytes} bytes is full: delete slices or raise its size" if full else ""
        raise HostFailure(f"{what}: {error}{hint}") from error


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Neither follows a link nor waits at a FIFO: what lies here may have been put there by somebody else."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _opened_to_write(path: Path) -> Iterator[int]:
    """A file of ours that is 0444. With CAP_DAC_OVERRIDE it opens all the same; without, which root may be as well (in
    a pod), the mode is lifted for the moment. Guests have the file on a read-only mount, whatever its mode."""
    lifted = not os.access(path, os.W_OK, effective_ids=True)
    if lifted:
        path.chmod(0o644)
    try:
        with _opened(path, os.O_RDWR) as fd:
            yield fd
    finally:
        if lifted:
            path.chmod(0o444)


def _create(path: Path, mode: int, content: bytes | memoryview) -> None:
    with _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        os.fchmod(fd, mode)  # whatever the umask
        os.write(fd, content)


def _read_small(path: Path) -> bytes:
    """The file's content, or nothing where it is not a small regular file."""
    try:
        with _opened(path, os.O_RDONLY) as fd:
            return os.pread(fd, _ROOM * 4, 0)
    except OSError:
        return b""


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _replace(fresh: Path, target: Path) -> None:
    """``fresh`` becomes ``target``; an older one is moved aside first (no rename goes over a full directory)."""
    old = target.with_name(f".old-{target.name}")
    _discard(old)
    with suppress(FileNotFoundError):
        target.rename(old)
    fresh.rename(target)
    _discard(old)


def _discard(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
