"""The kernel's cap on VRAM: the dmem controller's files in the cgroup tree.

Owns how a cap is put on a cgroup, seen to be in force, and lifted, and what is counted. Does not own which cgroup gets
what (:mod:`amdvgpud.core.caps`). Sources: kernel/cgroup/dmem.c and Documentation/admin-guide/cgroup-v2.rst of Linux
6.14 and later. tests/e2e/vm tries it on a kernel 7.2.

The traps, each met by reading back what was written:

* A file holds a line a region, and takes **one region a write**; an unknown region is EINVAL.
* On kernels before the reclaim series of 2026, lowering a limit below what is used **succeeds and does nothing**.
* ``dmem.max`` is only there where each cgroup above has ``+dmem`` in its ``cgroup.subtree_control``, which is EBUSY for
  one that has processes of its own.
* A device that is removed, or a driver that is loaded anew, takes the limits with it.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Final, Protocol

log = logging.getLogger(__name__)

TREE: Final = Path("/sys/fs/cgroup")
_LIFTED: Final = "max"


class Files(Protocol):
    """The files of a cgroup tree, by path below its mount. Both raise ``OSError`` as the kernel does."""

    def read(self, path: str) -> str: ...

    def write(self, path: str, text: str) -> None: ...


class TreeFiles:
    """The real ones."""

    def __init__(self, mount: Path = TREE) -> None:
        self._mount = mount

    def read(self, path: str) -> str:
        return (self._mount / path.lstrip("/")).read_text("ascii", "replace")

    def write(self, path: str, text: str) -> None:
        # One write(2), whole: buffered I/O could cut it, and would make the file where the kernel did not.
        fd = os.open(self._mount / path.lstrip("/"), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)


class DmemCaps:
    """Caps by cgroup; a :class:`amdvgpud.containers.Caps`. ``delegate``: switch the controller on where it is off."""

    def __init__(self, files: Files, *, delegate: bool = True) -> None:
        self._files = files
        self._delegate = delegate
        self._set: dict[str, frozenset[str]] = {}
        """The regions that we have put caps on, by cgroup."""
        self._told: set[tuple[str, str]] = set()
        """Caps that could not be lifted, and were told of."""

    def lack(self) -> str | None:
        """Why nothing can be capped on this machine; None: it can."""
        try:
            controllers = self._files.read("cgroup.controllers").split()
        except OSError:
            return f"{TREE} is no cgroup v2 tree (cgroup v1 or hybrid), and only that has the dmem controller"
        if "dmem" not in controllers:
            return "this kernel has no dmem controller (Linux 6.14 and later with CONFIG_CGROUP_DMEM)"
        return None

    def adopt(self, caps: Mapping[str, Iterable[str]]) -> None:
        """Of a daemon before this one, by its record: lifted when they are not wanted, as our own are."""
        self._set = {cgroup: frozenset(regions) for cgroup, regions in caps.items()}

    def apply(self, wanted: Mapping[str, Mapping[str, int]]) -> Mapping[str, str]:
        """Make ``wanted`` (bytes by region, by cgroup) the caps in force, and lift those of ours that are not wanted.

        The answer is for each wanted cgroup why it is not capped, in one sentence; empty: it is, as read back. A cgroup
        that is not wanted any more keeps its cap while processes are in it, for its first one may have ended before the
        others; and what could not be lifted is tried again.
        """
        after = {cgroup: frozenset(regions) for cgroup, regions in wanted.items()}
        for cgroup, regions in self._set.items():
            kept = regions if cgroup not in wanted and self._populated(cgroup) else frozenset()
            unwanted = regions - kept - wanted.get(cgroup, {}).keys()
            kept |= {region for region in unwanted if not self._lift(cgroup, region)}
            if kept:
                after[cgroup] = after.get(cgroup, frozenset()) | kept
        self._set = after
        return {cgroup: self._cap(cgroup, regions) for cgroup, regions in wanted.items()}

    def lift_all(self) -> None:
        """No caps are wanted on this machine any more, be there processes or not."""
        self._set = {
            cgroup: kept
            for cgroup, regions in self._set.items()
            if (kept := frozenset(region for region in regions if not self._lift(cgroup, region)))
        }

    # ------------------------------------------------------------------------------------------------- one cgroup

    def _populated(self, cgroup: str) -> bool:
        try:
            return "populated 1" in self._files.read(f"{cgroup}/cgroup.events").splitlines()
        except OSError:
            return False

    def _cap(self, cgroup: str, regions: Mapping[str, int]) -> str:
        try:
            in_force = _lines(self._files.read(f"{cgroup}/dmem.max"))
        except OSError:
            if (why := self._switch_on(cgroup)) is not None:
                return why
            try:
                in_force = _lines(self._files.read(f"{cgroup}/dmem.max"))
            except OSError as error:
                return f"{cgroup}/dmem.max cannot be read: {_said(error)}"
        wrong = [self._write(cgroup, r, b) for r, b in sorted(regions.items()) if in_force.get(r) != str(b)]
        return "; ".join(reason for reason in wrong if reason)

    def _write(self, cgroup: str, region: str, limit_bytes: int) -> str:
        path = f"{cgroup}/dmem.max"
        try:
            self._files.write(path, f"{region} {limit_bytes}\n")
            now = _lines(self._files.read(path)).get(region)
            used = _lines(self._files.read(f"{cgroup}/dmem.current")).get(region, "?")
        except OSError as error:
            if error.errno == errno.EINVAL:
                return f"the kernel knows no region {region}: the driver registers none, or the GPU has just gone"
            return f"{path} cannot be written: {_said(error)}"
        if now == str(limit_bytes):
            log.info("%s: %s is capped at %d bytes by the kernel.", cgroup, region, limit_bytes)
            return ""
        return (
            f"{path}: the kernel took {limit_bytes} for {region} and left it at {now or 'nothing'}; {used} bytes are "
            "in use, and a limit below that does nothing on this kernel"
        )

    def _lift(self, cgroup: str, region: str) -> bool:
        """False: it is there still. Mostly the cgroup has gone with its container, and the cap with it; or the GPU."""
        try:
            self._files.write(f"{cgroup}/dmem.max", f"{region} {_LIFTED}\n")
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV, errno.EINVAL):
                return True
            if (cgroup, region) not in self._told:
                log.warning("%s: the cap on %s is not wanted any more, and stays: %s", cgroup, region, _said(error))
            self._told.add((cgroup, region))
            return False
        self._told.discard((cgroup, region))
        return True

    def _switch_on(self, cgroup: str) -> str | None:
        """Switch the controller on in each cgroup above; why that is not so, or None."""
        for above in reversed(PurePosixPath(cgroup).parents):
            control = str(above / "cgroup.subtree_control")
            try:
                if "dmem" in self._files.read(control).split():
                    continue
                if not self._delegate:
                    return f"{control} has no dmem, and dmem.delegate is false"
                self._files.write(control, "+dmem")
                log.info("%s: dmem is switched on for what is below.", above)
            except OSError as error:
                if error.errno == errno.EBUSY:
                    return f"{above} has processes of its own, so the kernel lets no controller be switched on below it"
                return f"{control} cannot be written: {_said(error)}"
        return None


def dmem_bytes(files: Files, cgroup: str) -> dict[str, int]:
    """What the controller counts for the cgroup and all below it, by region; nothing where it does not count there."""
    try:
        lines = _lines(files.read(f"{cgroup}/dmem.current"))
    except OSError:
        return {}
    return {region: int(text) for region, text in lines.items() if text.isdecimal()}


def _lines(text: str) -> dict[str, str]:
    """``region value`` a line. A region's name has no blank."""
    return {region: value for region, _, value in (line.rpartition(" ") for line in text.splitlines()) if region}


def _said(error: OSError) -> str:
    if error.errno == errno.EROFS:
        return "the tree is read-only for this daemon (systemd: the drop-in dmem.conf opens it)"
    return os.strerror(error.errno or 0)
