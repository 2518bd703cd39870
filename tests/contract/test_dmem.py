"""The unit tests' cgroup tree keeps the promises that the kernel's has to keep: tests/e2e/vm asks that of one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from amdvgpud.host.cgroup import Files
from tests.e2e.vm.dmem_checks import CHECKS, Machine
from tests.host.dmem_kernel import Kernel

REGION = "drm/0000:03:00.0/vram"


class StandIn:
    region, above, cgroup = REGION, "/a.slice", "/a.slice/b.scope"

    def __init__(self) -> None:
        self.kernel = Kernel(regions={REGION})
        self.files: Files = self.kernel

    def charge(self, size_bytes: int) -> bool:
        return self.kernel.charge(self.cgroup, self.region, size_bytes)

    def live_above(self) -> None:
        self.kernel.busy.add(self.above)

    def unplug(self) -> None:
        self.kernel.remove_device(self.region)

    def plug_in(self) -> None:
        self.kernel.regions.add(self.region)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_stand_in_does_as_the_kernel_does(check: Callable[[Machine], None]) -> None:
    check(StandIn())
