"""A cgroup v2 tree with dmem, for tests; tests/e2e/vm tries the same on a kernel's own."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field

REGION, OTHER = "drm/0000:03:00.0/vram", "drm/0000:83:00.0/vram"


def _fails(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@dataclass
class Kernel:
    """A cgroup v2 tree with dmem: the traps of kernel/cgroup/dmem.c and of cgroup v2's own files."""

    controllers: str = "cpu memory dmem"
    regions: set[str] = field(default_factory=lambda: {REGION, OTHER})
    switched_on: set[str] = field(default_factory=set)
    """Cgroups that have dmem in their subtree_control; "/" is the root."""
    busy: set[str] = field(default_factory=set)
    read_only: bool = False
    limits: dict[tuple[str, str], str] = field(default_factory=dict)
    used: dict[tuple[str, str], int] = field(default_factory=dict)
    writes: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    populated: set[str] = field(default_factory=set)

    def read(self, path: str) -> str:
        cgroup, _, name = path.rpartition("/")
        self._there(cgroup, name)
        if name == "cgroup.controllers":
            return self.controllers
        if name == "cgroup.subtree_control":
            return "cpu dmem\n" if (cgroup or "/") in self.switched_on else "cpu\n"
        if name == "cgroup.events":
            return f"populated {int(cgroup in self.populated)}\nfrozen 0\n"
        if name == "dmem.current":
            return "".join(f"{r} {self.used.get((cgroup, r), 0)}\n" for r in sorted(self.regions))
        return "".join(f"{r} {self.limits.get((cgroup, r), 'max')}\n" for r in sorted(self.regions))

    def write(self, path: str, text: str) -> None:
        cgroup, _, name = path.rpartition("/")
        self._there(cgroup, name)
        if self.read_only:
            raise _fails(errno.EROFS)
        self.writes.append(f"{path} {text.strip()}")
        if name == "cgroup.subtree_control":
            if cgroup in self.busy:
                raise _fails(errno.EBUSY)
            self.switched_on.add(cgroup or "/")
            return
        region, _, value = text.strip().partition(" ")
        if region not in self.regions or "\n" in text.strip():
            raise _fails(errno.EINVAL)
        if value != "max" and int(value) < self.used.get((cgroup, region), 0):
            return  # silently
        self.limits[cgroup, region] = value

    def _there(self, cgroup: str, name: str) -> None:
        if not self.controllers or cgroup in self.gone:
            raise _fails(errno.ENOENT)
        above = cgroup.rpartition("/")[0] or "/"
        if name.startswith("dmem.") and above not in self.switched_on:
            raise _fails(errno.ENOENT)

    def charge(self, cgroup: str, region: str, size_bytes: int) -> bool:
        limit = self.limits.get((cgroup, region), "max")
        used = self.used.get((cgroup, region), 0) + size_bytes
        if region not in self.regions or (limit != "max" and used > int(limit)):
            return False
        self.used[cgroup, region] = used
        return True

    def remove_device(self, region: str) -> None:
        self.regions.discard(region)
        self.limits = {key: value for key, value in self.limits.items() if key[1] != region}
        self.used = {key: value for key, value in self.used.items() if key[1] != region}
