"""What the tests look at again and again: how a pod ended, what its process said."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any, Final

from tests.e2e.k8s.api import eventually
from tests.e2e.k8s.cluster import Cluster, Program

GIB: Final = 2**30


def answers(log: str, op: str, *keys: str) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [tuple(line[key] for key in keys) for line in lines if line.get("op") == op]


def ended(cluster: Cluster, name: str) -> str:
    """Waits for the end of the pod and gives how it ended."""
    phases = ("Succeeded", "Failed")
    eventually(f"the end of {name}", lambda: cluster.api.pod(name)["status"]["phase"] in phases)
    phase: str = cluster.api.pod(name)["status"]["phase"]
    return phase


def why(cluster: Cluster, name: str) -> str:
    """How the pod stands, and what its events and the kubelet's log say of it: for the message of a failure."""
    if cluster.api.gone(name):
        return f"{name} is gone"
    found = cluster.api.pod(name)
    said = cluster.api.get(f"/api/v1/namespaces/default/events?fieldSelector=involvedObject.name={name}")["items"]
    log = cluster.programs["kubelet"].log.read_text(errors="replace").splitlines()
    return "\n".join(
        [
            f"{name}: {json.dumps(found['status'])}",
            *(f"  {event['reason']}: {event['message']}" for event in said),
            *[f"  {line}" for line in log if f'"default/{name}"' in line or found["metadata"]["uid"] in line][-20:],
        ]
    )


def masks_told(cluster: Cluster, before: int = 0) -> list[tuple[int, int]]:
    """(gpu_id, CU mask) of each queue that the simulated KFD was told of, since its log was ``before`` bytes long."""
    log = cluster.corner.path("/run/amdvgpud/simulated/log.jsonl").read_bytes()[before:]
    told = [line for line in map(json.loads, log.splitlines()) if line["op"] == "SET_CU_MASK"]
    return [(line["gpu"], int(line["mask"], 16)) for line in told]


def said_s(program: Program, words: str) -> float:
    """Unix time of the last line of the daemon's log that has ``words``, as the line itself gives it."""
    *_, line = (line for line in program.log.read_text().splitlines() if words in line)
    return time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S")) + int(line[20:23]) / 1000


def written(cluster: Cluster, name: str) -> bool:
    """Whether the pod's log is a whole JSON object yet."""
    return cluster.log_of(name).rstrip().endswith("}")


def removed(cluster: Cluster, *names: str) -> None:
    for name in names:
        cluster.api.delete_pod(name)
    for name in names:
        eventually(f"{name} to be gone", partial(cluster.api.gone, name))
