"""Cutting a GPU anew: the writer of ``current_compute_partition``, and the reader of who keeps the driver from it.

Owns two writes (compute mode, request for a memory mode), what each errno of the driver means to a person, and the
processes of ``kfd/proc``. Does not own whether a switch may be tried (``node.py``) nor reading the result
(``host/sysfs.py``). Opens no device: an open /dev/kfd would be the very thing that blocks a switch.

Sources: ``amdgpu_gfx.c``, ``amdgpu_gmc.c``, ``aqua_vanjaram.c`` (the writes), ``kfd_device.c``
``kgd2kfd_check_and_lock_kfd`` (EBUSY), ``kfd_process.c`` (the files of a process).
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from amdvgpud.core.errors import Conflict, HostFailure
from amdvgpud.core.model import Gpu
from amdvgpud.ports import KfdUser, named

_OF_GPU: Final = re.compile(r"(?:vram|sdma|stats|counters)_(\d{1,10})", re.ASCII)


def write_attribute(path: Path, text: str) -> None:
    """``text`` to a sysfs attribute, by one write, as the kernel wants it; ``OSError`` as the kernel's."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


class PartitionFiles:
    """The implementation of :class:`amdvgpud.ports.Modes` on a directory that holds ``sys/``.

    ``write`` is the pen: a simulated machine's is its simulated driver. ``refresh`` is called before ``kfd/proc`` is
    read: the kernel always has it right, a simulation when it is told to. ``own_pids`` are of our own children, who go
    away before a switch and are nobody's users.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        *,
        write: Callable[[Path, str], None] = write_attribute,
        refresh: Callable[[], None] = lambda: None,
        own_pids: Callable[[], frozenset[int]] = frozenset,
        proc: Path = Path("/proc"),
    ) -> None:
        self._root = root
        self._write = write
        self._refresh = refresh
        self._own_pids = own_pids
        self._proc = proc

    # --------------------------------------------------------------------------------------------------- who uses

    def users(self, gpu: Gpu | None) -> tuple[KfdUser, ...]:
        """The processes that have ``gpu`` open (None: any GPU), by pid.

        The KFD gives a process a file ``vram_<gpu_id>`` for each GPU that its device cgroup admits, from its first
        open of /dev/kfd to its end, whether it uses the GPU or not. Just these are what the driver refuses a switch
        for, so bytes and queues are not looked at (a queue counts, though, where those files are missing).
        """
        ids = None if gpu is None else {partition.kfd_gpu_id for partition in gpu.partitions}
        found = []
        self._refresh()
        own = self._own_pids()
        for folder in self._processes():
            pid = int(folder.name)
            if pid in own:
                continue
            opened = _opened(folder)
            if ids is None or ids & opened:
                found.append(KfdUser(pid, self._command(pid), frozenset(opened)))
        return tuple(sorted(found, key=lambda user: user.pid))

    def _processes(self) -> list[Path]:
        for tail in ("sys/class/kfd/kfd/proc", "sys/devices/virtual/kfd/kfd/proc"):
            try:
                return [p for p in (self._root / tail).iterdir() if p.name.isascii() and p.name.isdigit()]
            except OSError:
                continue
        return []

    def _command(self, pid: int) -> str:
        try:
            text = (self._proc / str(pid) / "comm").read_text("utf-8", "replace").strip()
        except OSError:
            return "?"
        return text if text.isprintable() else "?"

    # ------------------------------------------------------------------------------------------------------ writes

    def set_compute(self, gpu: Gpu, mode: str) -> None:
        """Returns when the driver has torn down and rebuilt the GPU's KFD nodes. ``Conflict``: as things stand it does
        not (EBUSY, EINVAL); ``HostFailure``: it could not (EPERM, EIO and all else)."""
        path = self._path(gpu, "current_compute_partition")
        try:
            self._write(path, mode)
        except OSError as error:
            raise self._refusal(gpu, path, mode, error) from error

    def request_memory(self, gpu: Gpu, mode: str) -> None:
        """Let the driver note that it shall come up with this memory mode. Nothing changes until it is loaded anew."""
        path = self._path(gpu, "current_memory_partition")
        try:
            self._write(path, mode)
        except OSError as error:
            raise self._refusal(gpu, path, mode, error) from error

    def _path(self, gpu: Gpu, name: str) -> Path:
        return self._root / "sys/bus/pci/devices" / gpu.pci_address / name

    def _refusal(self, gpu: Gpu, path: Path, mode: str, error: OSError) -> Conflict | HostFailure:
        what = f"{gpu.id} ({gpu.pci_address}) was not put into {mode}"
        if error.errno == errno.EBUSY:
            return Conflict(f"{what}: the driver says that the KFD is in use (EBUSY). {self._busy(gpu)}")
        if error.errno == errno.EINVAL:
            now = "/".join(filter(None, (gpu.compute_partition, gpu.memory_partition))) or "the present modes"
            return Conflict(
                f"{what}: the driver does not allow it now (EINVAL). The GPU is in {now}; a mode can go with one "
                "memory mode and not with another, and a virtual function's mode is its host's to choose"
            )
        if error.errno in (errno.EPERM, errno.EACCES):
            return HostFailure(
                f"{what}: {path} may not be written ({errno.errorcode[error.errno]}). Either the GPU is being reset "
                "(try again when that is over), or this daemon is not root, or the function is a virtual one"
            )
        if error.errno == errno.EROFS:
            return HostFailure(
                f"{what}: /sys is read-only for this daemon (EROFS). Its unit keeps it so by default; the drop-in "
                "partitions.conf opens the devices' part of it"
            )
        if error.errno == errno.EIO:
            return HostFailure(
                f"{what}: the driver took the KFD down for this GPU and could not bring it up again (EIO). It may be "
                "missing from the machine until the driver is loaded anew; the kernel's log says more"
            )
        if error.errno == errno.ENOENT:
            return HostFailure(f"{what}: {path} is not there (ENOENT): this driver does not switch this GPU")
        return HostFailure(f"{what}: {path}: {error.strerror or error}")

    def _busy(self, gpu: Gpu) -> str:
        if users := self.users(gpu):
            return f"It is open in {named(users)}"
        if users := self.users(None):
            return (
                f"No process is seen that has it open, but {named(users)} use other GPUs: older drivers refuse while "
                "any process has /dev/kfd open, and a process that has just ended holds on for a moment"
            )
        return (
            "No process is seen that has it open: one that has just ended, or another switch or reset at this moment. "
            "Try again"
        )


def _opened(folder: Path) -> set[int]:
    """gpu_ids of one process of kfd/proc. Newer kernels put further contexts of a process in folders of their own."""
    found: set[int] = set()
    try:
        entries = list(folder.iterdir())
    except OSError:
        return found  # it has just ended
    for entry in entries:
        if match := _OF_GPU.fullmatch(entry.name):
            found.add(int(match[1]))
        elif entry.name.startswith("context_"):
            found |= _opened(entry)
        elif entry.name == "queues":
            found |= _gpus_of_queues(entry)
    return found


def _gpus_of_queues(folder: Path) -> set[int]:
    found = set()
    try:
        for queue in folder.iterdir():
            text = (queue / "gpuid").read_text().strip()
            found |= {int(text)} if text.isascii() and text.isdigit() else set()
    except OSError:
        pass  # a queue that was destroyed meanwhile
    return found
