"""The simulated driver: what writing a partition file of a simulated machine does.

Owns who is refused with which errno, as far as the driver's sources say (``amdgpu_gfx.c``, ``amdgpu_gmc.c``,
``aqua_vanjaram.c``, ``kfd_device.c``), what goes wrong when a test wants it to, and ``kfd/proc``. What changes in the
root belongs to :mod:`amdvgpud.sim.tree`.

A simulated root is plain files, in which a write changes nothing by itself. So the one who writes
(:mod:`amdvgpud.host.partition`) is given this for its pen: the same path, the same text, the same errors; and then the
tree really is another. Refused: a file system of our own (FUSE, which needs a device of the host and root) and a thread
that watches the files (a write would not be refused, and nobody would know when it is done).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from amdvgpud.sim.models import Simulation
from amdvgpud.sim.tree import plug, present, repartition, unplug

_COMPUTE: Final = "current_compute_partition"
_MEMORY: Final = "current_memory_partition"
_PROC: Final = "sys/devices/virtual/kfd/kfd/proc"
_LOCK: Final = re.compile(r"\d+: FLOCK +\w+ +\w+ +(\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ", re.ASCII)


class SimulatedDriver:
    """Takes writes to the partition files of the machine in ``root``, which was built from ``simulation``."""

    def __init__(self, simulation: Simulation, root: Path) -> None:
        self._simulation = simulation
        self._root = root
        self._addresses = [gpu.pci_address for gpu in simulation.gpus]

    def write(self, path: Path, text: str) -> None:
        """``OSError`` as the driver's: EINVAL (no such mode, or not with the present memory mode), EBUSY (a process has
        the GPU open), ENOENT (this GPU has no such file). Returns when the topology is the new one.

        The memory mode is noted only: it changes when a driver is loaded, and here none ever is.
        """
        if not path.exists():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        index = next(i for i, gpu in enumerate(self._simulation.gpus) if gpu.pci_address == path.parent.name)
        gpu = present(self._simulation, self._root).gpus[index]
        mode = text.strip().upper()
        if path.name == _MEMORY:
            if mode not in {nps for modes in gpu.model.modes.values() for nps in modes}:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
            return
        if path.name != _COMPUTE:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if gpu.memory_mode not in gpu.model.modes.get(mode, ()):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        if mode == gpu.mode:
            return
        with self._locked():
            if self._users(gpu.pci_address):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
            repartition(self._simulation, self._root, index, mode)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """By softkfd's own lock: nobody opens a GPU meanwhile."""
        state = os.open(self._root / "state", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(state, fcntl.LOCK_EX)
            yield
        finally:
            os.close(state)

    # ------------------------------------------------------------------------------------------------------- faults

    def read(self, path: Path) -> str:
        """The text of a file of sysfs. ``OSError`` as the driver's while the GPU has a fault."""
        self._fail(path, next((part for part in reversed(path.parts) if part in self._addresses), None))
        return path.read_text()

    def open_node(self, path: Path) -> int:
        """A descriptor of a render node. ``OSError`` as the driver's while the GPU has a fault."""
        minors = {
            f"renderD{values['minor']}": values["device"].rpartition("/")[2]
            for line in (self._root / "gpus.conf").read_text().splitlines()
            if (values := dict(pair.split("=", 1) for pair in line.split()))
        }
        self._fail(path, minors.get(path.name))
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def set_fault(self, pci_address: str, error: int | None) -> None:
        """While it stands, the GPU's files cannot be read nor its render nodes opened, by this errno: EBUSY or EPERM in
        a reset, EIO or ENODEV when it has died. None: it is over. softkfd heeds it too."""
        file = self._root / "faults" / pci_address
        if error is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(f"{errno.errorcode[error]}\n")

    def tell(self, kfd_gpu_id: int, line: str) -> None:
        """Send one line of the KFD's events to all who listen, as in ``3 1 a test``."""
        with (self._root / "smi" / str(kfd_gpu_id)).open("a") as file:
            file.write(f"{line}\n")

    def unplug(self, pci_address: str) -> None:
        with self._locked():
            unplug(self._simulation, self._root, self._addresses.index(pci_address))

    def plug(self, pci_address: str) -> None:
        with self._locked():
            plug(self._simulation, self._root, self._addresses.index(pci_address))

    def _fail(self, path: Path, pci_address: str | None) -> None:
        fault = self._root / "faults" / (pci_address or "none")
        if fault.exists():
            number = int(getattr(errno, fault.read_text().strip()))
            raise OSError(number, os.strerror(number), str(path))

    # ---------------------------------------------------------------------------------------------------- processes

    def refresh_processes(self) -> None:
        """Make ``kfd/proc`` what the kernel's always is: a folder for each living KFD process, by its pid here.

        softkfd leaves the dead until somebody sweeps, and cannot know the pid here of a process in a container. The
        lock on such a one's token tells it: /proc/locks is in the pids of whoever reads it.
        """
        living = {token.name: token for token in self._tokens() if _lives(token)}
        shown = set()
        for link in (self._root / _PROC).iterdir():
            if (name := link.readlink().name) in living:
                shown.add(name)
            else:
                link.unlink(missing_ok=True)  # softkfd sweeps what it led to, with its VRAM
        wanting = {name for name in living.keys() - shown if (self._root / "processes" / name).is_dir()}
        pids = _lock_holders() if wanting else {}
        for name in wanting:
            try:
                there = living[name].stat()
            except FileNotFoundError:  # it has ended meanwhile
                continue
            if (pid := pids.get((os.major(there.st_dev), os.minor(there.st_dev), there.st_ino))) is not None:
                with contextlib.suppress(FileExistsError):  # softkfd was faster
                    (self._root / _PROC / str(pid)).symlink_to(Path("../../../../../../processes") / name)

    def _tokens(self) -> list[Path]:
        return list((self._root / "procs").iterdir())

    def _users(self, pci_address: str) -> list[str]:
        """Tokens of the living processes that have the GPU open (softkfd/README.md: ``procs/``).

        Not by ``kfd/proc``: what a container with a pid namespace of its own has open may not be shown there yet.
        """
        ids = {
            values["gpu_id"]
            for line in (self._root / "gpus.conf").read_text().splitlines()
            if (values := dict(pair.split("=", 1) for pair in line.split()))["device"].endswith(f"/{pci_address}")
        }
        return [token.name for token in self._tokens() if _lives(token) and ids & _opened(token)]


def _opened(token: Path) -> set[str]:
    """The gpu_ids that the process of ``token`` has open: the words after its pid."""
    return set(token.read_text().split()[1:])


def _lives(token: Path) -> bool:
    """A process keeps its token locked for as long as it lives."""
    try:
        fd = os.open(token, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _lock_holders() -> dict[tuple[int, int, int], int]:
    """Who holds a lock of flock(2) on what: pid by (major, minor, inode), in our pid namespace (proc_locks(5))."""
    lines = Path("/proc/locks").read_text().splitlines()
    found = (match for match in map(_LOCK.match, lines) if match is not None and match[1] != "0")
    return {(int(match[2], 16), int(match[3], 16), int(match[4])): int(match[1]) for match in found}
