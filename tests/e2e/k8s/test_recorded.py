"""What the kubelet says to this daemon, byte by byte, is still what tests/serve/kube/recorded keeps and replays.

``AMDVGPU_E2E_RECORD=1`` writes it anew.
"""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from amdvgpud.serve.pb import deviceplugin_pb2 as pb
from tests.e2e.k8s.api import eventually
from tests.e2e.k8s.cluster import Cluster, daemon, pod
from tests.e2e.k8s.looks import ended, removed
from tests.e2e.k8s.recorder import Recorder

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

KEPT: Final = Path(__file__).resolve().parents[2] / "serve/kube/recorded/kubelet.json"
PROFILE: Final = "amdvgpu.io/50c-90g"


async def exchange(cluster: Cluster, file: Path) -> list[dict[str, str]]:
    """One registration, and pods of one and of two slices."""
    corner = cluster.corner
    async with Recorder(corner.path("/run/recorded"), corner.path("/var/lib/kubelet/device-plugins")) as recorder:
        with daemon(cluster, "--config", str(file)):
            await asyncio.to_thread(eventually, "the profile", partial(cluster.allocatable, PROFILE), 30)
            for name, count in (("one", 1), ("two", 2)):
                cluster.api.create_pod(pod(name, "true", limits={PROFILE: count}))
                assert await asyncio.to_thread(ended, cluster, name) == "Succeeded"
        await asyncio.to_thread(removed, cluster, "one", "two")
    return [{"method": said.method, "request": said.request.hex()} for said in recorder.said]


async def test_the_exchange_is_as_it_was_recorded(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "amdvgpud.toml"
    file.write_text(
        'simulate = "mi300x"\nkubelet.mode = ["profiles"]\nkubelet.dir = "/run/recorded"\n'
        'kubelet.profiles.50c-90g = {compute = "50%", vram = "90GiB"}\n'
    )
    said = await exchange(cluster, file)
    if os.environ.get("AMDVGPU_E2E_RECORD"):
        KEPT.write_text(json.dumps(said, indent=1) + "\n")
    kept = json.loads(KEPT.read_text())
    # The first is our own registration, in which the name of the socket is a new one each time.
    assert said[0]["method"] == kept[0]["method"]
    assert [in_order(each) for each in said[1:]] == [in_order(each) for each in kept[1:]]


def in_order(said: dict[str, str]) -> tuple[str, list[list[str]]]:
    """(method, ids in it): the kubelet keeps them in a Go map, and so writes them in another order each time."""
    content = bytes.fromhex(said["request"])
    if said["method"].endswith("/Allocate"):
        return said["method"], [
            sorted(c.devices_ids) for c in pb.AllocateRequest.FromString(content).container_requests
        ]
    if said["method"].endswith("/GetPreferredAllocation"):
        asked = pb.PreferredAllocationRequest.FromString(content).container_requests
        return said["method"], [[*sorted(c.available_deviceIDs), str(c.allocation_size)] for c in asked]
    if said["method"].endswith("/PreStartContainer"):
        return said["method"], [sorted(pb.PreStartContainerRequest.FromString(content).devices_ids)]
    return said["method"], [[said["request"]]]
