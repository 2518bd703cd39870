"""The kernel's own cgroup tree and the stand-in driver, as dmem_checks.py wants a machine. In the VM, as root."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from amdvgpud.host.cgroup import TREE, Files, TreeFiles

PATIENCE_S: Final = 60.0


class Kernel:
    def __init__(self, number: int, address: str) -> None:
        """``number`` tells the parts of the tree of several apart; ``address``: the stand-in's device on PCI."""
        self.files: Files = TreeFiles()
        self.region = f"drm/{address}/vram"
        self.above, self.cgroup = f"/check{number}.slice", f"/check{number}.slice/a.scope"
        self._device = Path("/sys/bus/pci/devices", address)
        (TREE / self.cgroup.lstrip("/")).mkdir(parents=True)
        self._living: list[subprocess.Popen[bytes]] = []

    def charge(self, size_bytes: int) -> bool:
        script = f"echo $$ > {TREE}{self.cgroup}/cgroup.procs && echo {size_bytes} > {self._device}/fake_charge"
        return subprocess.run(["sh", "-c", script], stderr=subprocess.DEVNULL, check=False).returncode == 0

    def live_above(self) -> None:
        script = f"echo $$ > {TREE}{self.above}/cgroup.procs && echo in && exec sleep 600"
        process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        self._living.append(process)

    def unplug(self) -> None:
        (self._device / "remove").write_text("1")
        self._until(lambda: self.region not in (TREE / "dmem.capacity").read_text())

    def plug_in(self) -> None:
        Path("/sys/bus/pci/rescan").write_text("1")
        self._until(lambda: self.region in (TREE / "dmem.capacity").read_text())

    def _until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline_s, "the device did not come or go"
            time.sleep(0.1)

    def leave(self) -> None:
        if (charges := self._device / "fake_charge").exists():
            charges.write_text("0")
        for process in self._living:
            process.kill()
            process.wait()
