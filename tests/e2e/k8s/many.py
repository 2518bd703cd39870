"""Pods by the hundred: they come, some at a time, end in different ways and go, and nothing may be left of them."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any, Final

from amdvgpud.core import hami
from tests.e2e.conftest import BIN
from tests.e2e.k8s.api import PATIENCE_S, PODS, eventually
from tests.e2e.k8s.cluster import NODE, Cluster, Program, pod
from tests.e2e.k8s.looks import why

MANY: Final = 200
WARM: Final = 20
"""After so many the daemon has all the threads and connections that it needs."""
SETTLED_S: Final = 120.0
"""A lease of a profile ends within a minute, if its pod ran for seconds only."""
POOL: Final = 8
"""Connections to the API are kept open or not, and threads are made up to a number as they are needed. A leak of one a
pod would be twenty times this."""
RSS_MIB: Final = 8
"""What a process may grow by in MANY pods without a leak: events and logs are kept up to a number. Guessed."""

_ENDS: Final = (
    ("kfdclient", "--count", "1"),
    ("sleep", "infinity"),  # deleted while it runs
    ("true",),
    ("sh", "-c", "exit 3"),
)

_BUCKET: Final = re.compile(
    r'^amdvgpu_kubelet_allocate_duration_seconds_bucket\{le="([^"]+)",result="[^"]+"\} (\S+)$', re.MULTILINE
)

Create = Callable[[dict[str, Any], Collection[str]], None]
"""Takes the pod, and the names of those that have not ended yet."""


def come_and_go(cluster: Cluster, program: Program, limits: dict[str, int], create: Create, *, together: int) -> None:
    """MANY pods ``many-<n>``, at most ``together`` of them not over yet; each is deleted when it has ended or runs.

    A pod that ended otherwise than it was made to fails the test, with what its status, its events and the kubelet say;
    and so does what they leave behind in the Book, in files or in ``program``, the daemon.
    """
    before = eventually("no lease", lambda: (at := Standing.of(cluster)).leases == () and at, SETTLED_S)
    _pass_by(cluster, limits, create, together, range(WARM))
    eventually("what was before", lambda: Standing.of(cluster) == before, SETTLED_S)
    held = Held.of(program)
    _pass_by(cluster, limits, create, together, range(WARM, MANY))
    left = Standing.of(cluster)

    def settled() -> bool:
        nonlocal left
        left = Standing.of(cluster)
        return bool(left == before)

    try:
        eventually("what was before", settled, SETTLED_S)
    except AssertionError:
        assert left == before
    grown = Held.of(program)
    print(f"{MANY} pods: {held} after the first {WARM}, {grown} after all")
    print(f"{MANY} pods: 99 of 100 calls of Allocate took at most {_p99_s(cluster):g} s")
    assert grown.no_more_than(held), (held, grown)


def _pass_by(cluster: Cluster, limits: dict[str, int], create: Create, together: int, numbers: range) -> None:
    waiting = [pod(f"many-{i}", *_ENDS[i % len(_ENDS)], limits=limits) for i in numbers]
    to_come, alive, here = list(reversed(waiting)), set[str](), set[str]()
    moved_s = time.monotonic()
    while to_come or here:
        before = len(to_come), len(alive), len(here)
        while to_come and len(alive) < together:
            made = to_come.pop()
            name = made["metadata"]["name"]
            create(made, frozenset(alive))
            alive.add(name)
            here.add(name)
        found = {each["metadata"]["name"]: each for each in cluster.api.get(PODS)["items"]}
        for name in sorted(here & found.keys()):
            if _has_ended(cluster, found[name]):
                alive.discard(name)
            if "deletionTimestamp" not in found[name]["metadata"] and _is_due(found[name]):
                cluster.api.delete_pod(name)
        here &= found.keys()
        alive &= here
        if before != (len(to_come), len(alive), len(here)):
            moved_s = time.monotonic()
        assert time.monotonic() < moved_s + PATIENCE_S, "\n".join(why(cluster, name) for name in sorted(here))
        time.sleep(0.05)


def _has_ended(cluster: Cluster, found: dict[str, Any]) -> bool:
    """Whether it is over; fails if it is so in a way that was not meant."""
    phase, name = found["status"]["phase"], found["metadata"]["name"]
    if phase not in ("Succeeded", "Failed"):
        return False
    meant = {"sh": ["Failed", 3], "sleep": ["Failed", 137]}.get(found["spec"]["containers"][0]["command"][0])
    codes = [c["state"].get("terminated", {}).get("exitCode") for c in found["status"].get("containerStatuses", ())]
    assert [phase, *codes] == (meant or ["Succeeded", 0]), why(cluster, name)
    return True


def _is_due(found: dict[str, Any]) -> bool:
    """Whether a user would delete it now."""
    endless = found["spec"]["containers"][0]["command"][0] == "sleep"
    return bool(found["status"]["phase"] in (("Running",) if endless else ("Succeeded", "Failed")))


@dataclass(frozen=True)
class Standing:
    """What is promised, and all places where it is written. The same before the pods came and after they have gone."""

    slices: tuple[str, ...]
    leases: tuple[str, ...]
    folders: tuple[str, ...]
    """Of ledgers and policies."""
    cdi: tuple[str, ...]
    lock: str | None

    @staticmethod
    def of(cluster: Cluster) -> Standing:
        book = {what: _listed(cluster, what) for what in ("slice", "lease")}
        annotations = cluster.api.node(NODE)["metadata"].get("annotations") or {}
        return Standing(
            tuple(sorted(each["name"] for each in book["slice"])),
            tuple(sorted(each["slice"] for each in book["lease"])),
            tuple(sorted(cluster.corner.run("ls", "/run/amdvgpud/slices").output.split())),
            tuple(sorted(_cdi_names(cluster))),
            annotations.get(hami.LOCK),
        )


def _listed(cluster: Cluster, what: str) -> list[dict[str, Any]]:
    done = cluster.corner.run(str(BIN / "amdvgpuctl"), what, "list", "-o", "json")
    assert done.code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.output)[f"{what}s"]
    return found


def _p99_s(cluster: Cluster) -> float:
    """The bucket of the histogram that the 99th of 100 calls is in, whatever came of them; nan if there was none."""
    done = cluster.corner.run(
        "curl", "--silent", "--fail", "--unix-socket", "/run/amdvgpud/api.sock", "http://daemon/metrics"
    )
    assert done.code == 0, done.output
    counts: defaultdict[float, float] = defaultdict(float)
    for bucket, count in _BUCKET.findall(done.output):
        counts[float(bucket)] += float(count)
    return min((bucket for bucket, count in counts.items() if count >= 0.99 * counts[inf] > 0), default=nan)


def _cdi_names(cluster: Cluster) -> list[str]:
    files = sorted(cluster.corner.path("/run/cdi").glob("amdvgpu*.json"))
    return [device["name"] for file in files for device in json.loads(file.read_text())["devices"]]


@dataclass(frozen=True)
class Held:
    """What a process has. The memory may grow a little for good reasons; the others must not."""

    descriptors: int
    threads: int
    mounts: int
    rss_mib: int

    @staticmethod
    def of(program: Program) -> Held:
        proc = Path(f"/proc/{program.pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
        return Held(
            len(list((proc / "fd").iterdir())),
            int(status["Threads"]),
            len((proc / "mountinfo").read_text().splitlines()),
            int(status["VmRSS"].split()[0]) >> 10,
        )

    def no_more_than(self, before: Held) -> bool:
        return (
            self.descriptors <= before.descriptors + POOL
            and self.threads <= before.threads + POOL
            and self.mounts <= before.mounts
            and self.rss_mib <= before.rss_mib + RSS_MIB
        )
