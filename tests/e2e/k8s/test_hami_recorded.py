"""What the daemon reads from the API and writes into it for pods of HAMi's own scheduler is still what
tests/serve/kube/recorded/hami.json keeps and replays.

``AMDVGPU_E2E_RECORD=1`` writes it anew; once more, if a look of the daemon's own fell into an Allocate, which the
replay does not forgive.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any, Final

import pytest

from amdvgpud.core import hami
from amdvgpud.serve.pb import deviceplugin_pb2 as pb
from tests.e2e.conftest import BIN
from tests.e2e.k8s.api import Api, eventually
from tests.e2e.k8s.cluster import NODE, Cluster, daemon
from tests.e2e.k8s.looks import ended, removed
from tests.e2e.k8s.many import Standing
from tests.e2e.k8s.recorder import ApiRecorder, Call, Recorder, Said
from tests.e2e.k8s.test_hami import container, gpus, running, share, staying, told

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

KEPT: Final = Path(__file__).resolve().parents[2] / "serve/kube/recorded/hami.json"
SIMULATED: Final = "2*mi300x"

Scene = dict[str, Any]
"""``what`` happened, with what is needed to let it happen again, and the ``calls`` of the API that came of it."""


class Scenes:
    """Parts what the recorders hear into scenes: an Allocate from its begin to its end, and registrations."""

    def __init__(self, api: ApiRecorder) -> None:
        self.found: list[Scene] = []
        self._api = api
        self._since = 0
        self._registration = ""

    def told(self, said: Said, over: bool) -> None:
        if not said.method.endswith("/Allocate"):
            return
        if not over:
            self._registered()
            return
        (asked,) = pb.AllocateRequest.FromString(said.request).container_requests
        self._add("allocate", self._calls(), ids=sorted(asked.devices_ids))

    def _calls(self) -> list[Call]:
        since, self._since = self._since, len(self._api.calls)
        return self._api.calls[since:]

    def _registered(self) -> None:
        """The registrations that were written since the last scene, each with the look before it.

        Once: the scheduler takes one away where it has seen no capacity yet, and then the same is written again.
        """
        last: Call | None = None
        for call in self._calls():
            if call["method"] == "PATCH" and hami.REGISTRATION in call["sent"] and last is not None:
                text = json.loads(call["sent"])["metadata"]["annotations"][hami.REGISTRATION]
                if text != self._registration:
                    self._add("register", [last, call])
                self._registration = text
            last = call if call["path"] == f"/api/v1/nodes/{NODE}" else last

    def _add(self, what: str, calls: list[Call], **more: Any) -> None:
        self.found.append({"what": what, **more, "calls": calls})

    def released(self, slice_name: str) -> None:
        self._registered()
        self._add("released", [], slice=slice_name)

    def unhealthy(self, gpu: str) -> None:
        self._registered()
        self._add("unhealthy", [], gpu=gpu)

    def close(self) -> list[Scene]:
        self._registered()
        return self.found


async def exchange(cluster: Cluster, account: Api, folder: Path) -> list[Scene]:
    """Pods in all shapes, one by one, on two GPUs; the last look is at one that is unhealthy."""
    plugins = cluster.corner.path("/var/lib/kubelet/device-plugins")
    async with (
        ApiRecorder(f"https://127.0.0.1:{account.port}", account.ca) as api,
        Recorder(cluster.corner.path("/run/recorded"), plugins) as kubelet,
    ):
        scenes = Scenes(api)
        kubelet.told = scenes.told
        access = json.loads(cluster.kubeconfig("recorded", account.token).read_text())
        access["clusters"][0]["cluster"] = {"server": api.url}
        (folder / "kubeconfig").write_text(json.dumps(access))
        file = folder / "amdvgpud.toml"
        file.write_text(
            f'simulate = "{SIMULATED}"\ntick_s = 0.2\nkubelet.mode = ["hami"]\nkubelet.dir = "/run/recorded"\n'
            f'kube.config = "{folder}/kubeconfig"\nkube.node_name = "{NODE}"\n'
        )
        with daemon(cluster, "--config", str(file)):
            await asyncio.to_thread(_pods, cluster, scenes)
        return scenes.close()


def _pods(cluster: Cluster, scenes: Scenes) -> None:
    eventually("the GPUs", lambda: cluster.allocatable(hami.COUNT_RESOURCE) == 20)
    eventually("the registration", lambda: len(gpus(cluster)) == 2)
    first, second = gpus(cluster)
    create = cluster.api.create_pod
    create(staying("whole", {"amd.com/gpu": 1}, on=second))
    running(cluster, "whole")
    for name in ("small", "little"):
        create(staying(name, share(1, 1024), on=first))
        running(cluster, name)
    create(staying("big", share(98, 65536), on=first))  # fits for the scheduler, which counts 3 CUs of the others' 8
    assert ended(cluster, "big") == "Failed"
    removed(cluster, "big")
    early = staying("early", {}, on=first)
    early["spec"]["initContainers"] = [container("first", share(10, 4096), "true")]
    uid = create(early)["metadata"]["uid"]
    running(cluster, "early")
    name = hami.pod_slice(uid, 0)
    eventually("its release", lambda: name not in Standing.of(cluster).slices)
    scenes.released(name)
    several = staying("several", {}, on=first)
    several["spec"]["containers"] = [
        container("none", {}, "sleep", "infinity"),
        container("left", share(25, 16384)),
        container("right", share(10, 4096)),
    ]
    several["spec"]["initContainers"] = [container("before", share(5, 2048), "true")]
    create(several)
    running(cluster, "several")
    scenes.unhealthy(second)
    done = cluster.corner.run(str(BIN / "amdvgpuctl"), "gpu", "health", "1", "--override", "unhealthy")
    assert done.code == 0, done.output
    eventually("its word", lambda: told(cluster) == (10, [True, False]))
    removed(cluster, "whole", "small", "little", "early", "several")


async def test_the_exchange_is_as_it_was_recorded(
    hami_runs: None, cluster: Cluster, account: Api, tmp_path: Path
) -> None:
    scenes = await exchange(cluster, account, tmp_path)
    if os.environ.get("AMDVGPU_E2E_RECORD"):
        KEPT.write_text("[\n" + ",\n".join(json.dumps(scene, ensure_ascii=False) for scene in scenes) + "\n]\n")
    now, then = alike(scenes), alike(json.loads(KEPT.read_text()))
    assert [each[0] for each in now] == [each[0] for each in then]
    for (_, *calls), (_, *kept) in zip(now, then, strict=True):
        # The daemon looks around at times of its own: such a look may fall into an Allocate, and writes nothing.
        looks = iter(calls)
        assert [call for call in kept if call not in looks] == []
        assert [call for call in calls if call[0] != "GET"] == [call for call in kept if call[0] != "GET"]


def alike(scenes: list[Scene]) -> list[Any]:
    """What does not differ from run to run: no versions, times, uids and slots that the kubelet has chosen; and none of
    what was tried again because the kubelet had written its Node in between."""
    text = json.dumps(
        [[each["what"], *(_told(call) for call in each["calls"] if call["status"] != 409)] for each in scenes]
    )
    for pattern, name in (
        (r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}", "uid"),
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|[+-]\d\d:\d\d)", "time"),
        (r'(resourceVersion[\\": ]+)\d+', r"\1version"),
        (r"#\d+", "#slot"),
    ):
        text = re.sub(pattern, name, text)
    found: list[Any] = json.loads(text)
    return found


def _told(call: Call) -> tuple[str, str, str, dict[str, Any]]:
    """A call, and of the answer the annotations that are HAMi's; without times, which other vendors have there too, and
    without the registration, which the scheduler may have taken away for a moment."""
    notes = call["answer"].get("metadata", {}).get("annotations", {})
    timed = (hami.BIND_TIME, "hami.io/vgpu-time", "hami.io/node-handshake", hami.REGISTRATION)
    theirs = {key: notes[key] for key in notes if key.startswith("hami.io/") and not key.startswith(timed)}
    return call["method"], call["path"], call["sent"], theirs
