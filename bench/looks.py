"""What it costs to hold the kernel's figures against the ledgers: one whole look of the guard at a full machine."""

from __future__ import annotations

import asyncio
import logging
import shutil
import struct
import subprocess
import tempfile
import time
from pathlib import Path

from amdvgpud._abi import ffi, lib
from amdvgpud.core.model import Compute, ComputePolicy, Request, slice_name
from amdvgpud.core.watchdog import Rules
from amdvgpud.guard import Guard, Leftovers
from amdvgpud.host.kfd import KernelFigures
from amdvgpud.host.ledger import LedgerFiles
from amdvgpud.host.procs import SliceMounts
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.node import Node
from tests.fakes import GIB, MemoryCdi, MemoryJournal, StillEnder, StillSysfs, an_inventory

SLICES = 64
GPU_IDS = range(1000, 1008)
DRM_FD, FDS = 30, 40
STAT = " ".join(str(field) for field in range(4, 22))
FDINFO = """pos:\t0
flags:\t02100002
mnt_id:\t30
ino:\t700
drm-driver:\tamdgpu
drm-client-id:\t{client}
drm-pdev:\t0000:{bus:02x}:00.0
pasid:\t32771
drm-total-vram:\t1048576 KiB
drm-shared-vram:\t0
drm-resident-vram:\t1048576 KiB
drm-total-gtt:\t2048 KiB
drm-engine-gfx:\t0 ns
drm-engine-compute:\t0 ns
"""


class MadeMachine:
    """8 GPUs and 500 processes that use them: 400 in slices, each with one GPU, as a container sees it, and 100 of the
    host, with all 8 open. Beside them 1000 that use none. Files on a tmpfs stand for the kernel's: the system calls are
    the same, what serves them is not.
    """

    def __init__(self) -> None:
        self._root = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="amdvgpud-figures-"))
        self._loop = asyncio.new_event_loop()
        logging.getLogger("amdvgpud.host.ledger").setLevel(logging.ERROR)  # it misses the made GPUs' memory banks
        inventory = an_inventory(8)
        proc = self._root / "proc"
        proc.mkdir()
        self._files = LedgerFiles(self._root / "run", proc=proc)
        self._slices = self._files.slices
        node = Node(
            StillSysfs(inventory),
            MemoryJournal(),
            self._files,
            MemoryCdi(),
            now_s=time.time,
            process_alive=lambda holder: True,
        )
        self._loop.run_until_complete(node.start())
        for index in range(SLICES):
            compute = Compute(ComputePolicy.SHARED, percent=10)
            request = Request(slice_name(f"s{index}"), compute, 8 * GIB, on=(str(index % 8),))
            self._loop.run_until_complete(node.put_slice(request))
        at = SliceMounts.look(self._slices)
        self._mounts = "".join(f"{i} 1 8:1 /m{i} /mnt/{i} rw - ext4 /dev/vda1 rw\n" for i in range(30))
        self._guest = (
            f"99 1 {at.file_system.decode()} {at.path.decode()}/s{{0}}/guest /run/amdvgpu/s{{0}} ro - tmpfs x\n"
        )
        for pid in range(1000, 1400):
            self._process(pid, slice_index=pid % SLICES)
            self._slot(pid)
            self._kfd(pid, [GPU_IDS[pid % 8]])
        for pid in range(1400, 1500):
            self._process(pid)
            self._kfd(pid, GPU_IDS)
        for pid in range(5000, 6000):
            self._process(pid)
        for gpu in inventory.gpus:
            folder = self._root / "sys/bus/pci/devices" / gpu.pci_address
            folder.mkdir(parents=True)
            (folder / "mem_info_vram_used").write_text("68719476736\n")
        figures = KernelFigures(
            self._slices,
            root=self._root,
            proc=proc,
            now_s=time.time,
            vram_used_bytes=SysfsReader(self._root).vram_used_bytes,
        )
        left = Leftovers(figures)
        self._guard = Guard(node, figures, StillEnder(), Rules, now_s=time.time, left=left)
        for _ in range(3):  # each process is looked at more closely at first
            self.sample_ms()

    def sample_ms(self) -> float:
        """Of one processor, for one look and all that follows from it, the ledgers read twice."""
        began_s = time.process_time()
        self._loop.run_until_complete(self._guard.sample())
        took_s = time.process_time() - began_s
        view = self._guard.view()
        assert len(view.picture.processes or ()) == 500
        assert view.comparison is not None
        assert sum(p.tracked for of in view.comparison.slices.values() for p in of.processes) == 400
        return took_s * 1000

    def close(self) -> None:
        self._loop.close()
        subprocess.run(["umount", self._slices], check=False, capture_output=True)
        shutil.rmtree(self._root)

    def _process(self, pid: int, slice_index: int | None = None) -> None:
        here = self._root / "proc" / str(pid)
        (here / "fd").mkdir(parents=True)
        (here / "fdinfo").mkdir()
        (here / "stat").write_text(f"{pid} (python3) S {STAT} {pid} 23\n")
        (here / "status").write_text(f"Name:\tpython3\nNSpid:\t{pid}\t7\n")
        (here / "comm").write_text("python3\n")
        (here / "environ").write_bytes(b"NAME=value\0" * 50)
        inside = "" if slice_index is None else self._guest.format(slice_index)
        (here / "mountinfo").write_text(self._mounts + inside)
        for number in range(FDS):
            target = "/dev/dri/renderD128" if number == DRM_FD else f"/usr/lib/lib{number}.so"
            (here / "fd" / str(number)).symlink_to(target)
        (here / "fdinfo" / str(DRM_FD)).write_text(FDINFO.format(client=pid, bus=pid % 8 + 1))

    def _slot(self, pid: int) -> None:
        """As its gate would have it: its GPU's one GiB."""
        words, number = memoryview(bytearray(lib.avg_slot_bytes(1))).cast("Q"), (pid - 1000) // SLICES
        words[0], words[1], words[lib.AVG_SLOT_HEAD_BYTES // 8] = 7, pid, GIB
        with (self._slices / f"s{pid % SLICES}/guest/ledger").open("r+b") as file:
            file.seek(lib.AVG_LEDGER_HEAD_BYTES + number * len(words) * 8)
            file.write(words)
            file.seek(ffi.offsetof("struct avg_ledger", "occupied"))
            file.write(struct.pack("=Q", (1 << number + 1) - 1))

    def _kfd(self, pid: int, gpu_ids: range | list[int]) -> None:
        here = self._root / "sys/class/kfd/kfd/proc" / str(pid)
        (here / "queues").mkdir(parents=True)
        (here / "pasid").write_text("0\n")
        for gpu_id in gpu_ids:
            (here / f"vram_{gpu_id}").write_text("1073741824\n")
            (here / f"sdma_{gpu_id}").write_text("0\n")
            (here / f"counters_{gpu_id}").mkdir()
            (here / f"stats_{gpu_id}").mkdir()
            (here / f"stats_{gpu_id}" / "evicted_ms").write_text("0\n")
            (here / f"stats_{gpu_id}" / "cu_occupancy").write_text("3\n")
