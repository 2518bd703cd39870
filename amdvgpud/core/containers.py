"""Containers that have a slice: who they are, whose word about them is believed, what is said of them.

Pure. What /proc shows comes in as a :class:`Sighting`, what a runtime's hook says as a :class:`Report`; the two are
held against each other here. Names of cgroups as seen with the systemd and the cgroupfs driver: podman 5.4, also
rootless; docker 26; containerd 1.7 over the CRI; CRI-O 1.34; the kubelet's ``kubepods`` tree under containerd.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from amdvgpud.core.image import Verdict
from amdvgpud.core.model import SliceName

NOT_LOOKED_INTO: Final = Verdict(None, "its image was not looked into")

Step = Literal["start", "stop"]

_ID: Final = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?:\.scope)?(?=/|$)")
_MONITOR: Final = re.compile(r"-conmon-[0-9a-f]{64}")
"""podman's and CRI-O's supervisors have a cgroup that is named like their container's, and are not in it."""
_POD: Final = re.compile(r"[/-]pod([0-9a-f]{8}(?:[_-][0-9a-f]{4}){3}[_-][0-9a-f]{12}|[0-9a-f]{32})(?=[./:]|$)")
"""The systemd driver writes a pod's uid with ``_`` for ``-``; a static pod's uid has neither."""


def container_of(cgroup: str) -> str | None:
    """The id of the container that a cgroup path belongs to; None where it names none."""
    if _MONITOR.search(cgroup):
        return None
    found = _ID.findall(cgroup)
    return found[-1] if found else None


def pod_of(cgroup: str) -> str | None:
    """The uid of the Kubernetes pod that a cgroup path belongs to."""
    found = _POD.findall(cgroup) if "kubepods" in cgroup else []
    return found[-1].replace("_", "-") if found else None


@dataclass(frozen=True, slots=True)
class Report:
    """What a runtime's hook says. ``pid`` as this machine counts it; 0: not said, or there is no process."""

    step: Step
    slice: SliceName
    id: str
    pid: int
    bundle: str
    peer_uid: int


@dataclass(frozen=True, slots=True)
class Sighting:
    """A process as /proc shows it at one moment."""

    pid: int
    start_ticks: int
    uids: frozenset[int]
    """Its own real uid, and the owner of its user namespace where that is not the machine's first."""
    slices: tuple[SliceName, ...]
    """Shown by its mounts."""
    cgroups: tuple[str, ...]
    """Its paths in all hierarchies; the v2 one first."""
    unified: str | None
    """The v2 one; None where the machine has no such hierarchy."""

    @property
    def container(self) -> str | None:
        return next((found for path in self.cgroups if (found := container_of(path))), None)

    @property
    def pod(self) -> str | None:
        return next((found for path in self.cgroups if (found := pod_of(path))), None)


@dataclass(frozen=True, slots=True)
class Container:
    """A container that has a slice (one of two has two of these). It lives as long as its first process."""

    slice: SliceName
    id: str
    pid: int
    start_ticks: int
    cgroup: str | None
    """Below the mount of the v2 hierarchy; None where the machine has none, or the process is in its root."""
    pod: str | None
    since_s: float
    """Unix time."""
    reported: bool
    """By a hook; else it was found by the look that follows a start of the daemon."""
    gate: Verdict = NOT_LOOKED_INTO
    """Whether the gate gets into its first program."""
    cap: str | None = None
    """Why the kernel does not cap its VRAM; empty: it does. None: not tried."""
    quotas: Mapping[str, int] = field(default_factory=dict, hash=False)
    """What of its cgroup's cap is this slice's: bytes by region. A slice that is deleted under it leaves them here."""


def disbelief(report: Report, seen: Sighting | None) -> str | None:
    """Why a report of a start is not believed; None: it is.

    A report only says where to look. That the process has the slice is shown by its mounts, which a guest cannot make
    up and which runc and crun have made when they run createRuntime hooks (seen; the specification leaves it open, and
    a runtime that mounts later would be believed at the next look, not here). So is the container's id by its
    cgroup, where it names one: with cgroups disabled nothing contradicts. Who reports must be root or have a right to
    the process: its user, or the owner of its user namespace, as a rootless runtime is.
    """
    if seen is None:
        return f"there is no process {report.pid} on this machine"
    if report.peer_uid != 0 and report.peer_uid not in seen.uids:
        return f"process {report.pid} is not uid {report.peer_uid}'s"
    if report.slice not in seen.slices:
        return f"process {report.pid} does not have slice {report.slice} mounted"
    if seen.container not in (None, report.id):
        return f"process {report.pid} is in the cgroup of container {seen.container}, not {report.id}"
    return None
