"""Runs in the VM as root: the checks of dmem_checks.py on the kernel's own cgroup tree and the stand-in driver."""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parent))

from dmem_checks import CHECKS  # type: ignore[import-not-found]  # beside this file, in the VM

from amdvgpud.host.cgroup import TREE, TreeFiles

PATIENCE_S: Final = 60.0


class Kernel:
    def __init__(self, number: int) -> None:
        self.files = TreeFiles()
        self.device = next(Path("/sys/bus/pci/drivers/amdgpu").glob("0000:*")).name
        self.region = f"drm/{self.device}/vram"
        self.above, self.cgroup = f"/check{number}.slice", f"/check{number}.slice/a.scope"
        (TREE / self.cgroup.lstrip("/")).mkdir(parents=True)
        self._living: list[subprocess.Popen[bytes]] = []

    def charge(self, size_bytes: int) -> bool:
        script = f"echo $$ > {TREE}{self.cgroup}/cgroup.procs && echo {size_bytes} > {self._charges}"
        return subprocess.run(["sh", "-c", script], stderr=subprocess.DEVNULL, check=False).returncode == 0

    @property
    def _charges(self) -> Path:
        return Path(f"/sys/bus/pci/devices/{self.device}/fake_charge")

    def live_above(self) -> None:
        script = f"echo $$ > {TREE}{self.above}/cgroup.procs && echo in && exec sleep 600"
        process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        self._living.append(process)

    def unplug(self) -> None:
        Path(f"/sys/bus/pci/devices/{self.device}/remove").write_text("1")
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
        if self._charges.exists():
            self._charges.write_text("0")
        for process in self._living:
            process.kill()
            process.wait()


def main() -> int:
    print(Path("/proc/sys/kernel/osrelease").read_text().strip(), (TREE / "dmem.capacity").read_text().strip())
    failed = 0
    for number, check in enumerate(CHECKS):
        machine = Kernel(number)
        try:
            check(machine)
            print(f"ok      {check.__name__}")
        except Exception:
            failed += 1
            print(f"FAILED  {check.__name__}\n{traceback.format_exc()}")
        finally:
            machine.leave()
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    return 1 if failed or not CHECKS else 0


if __name__ == "__main__":
    sys.exit(main())
