"""What the API had for pods of HAMi's scheduler 2.10 (tests/e2e/k8s/test_hami_recorded.py), answered again by default.

Recorded: two simulated GPUs are registered; a pod for all of one; two pods of 1 %, and one of 98 % beside them that is
refused; a pod whose init container alone asks, for which the scheduler takes no lock; a pod of three containers that
ask and one that does not; a GPU that turns unhealthy. What is written must be what was written then, byte by byte.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from amdvgpud.core.errors import NoRoom
from amdvgpud.core.hami import REGISTERED_AT
from amdvgpud.core.health import Condition, Health
from amdvgpud.core.model import SliceName
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.node import Node
from amdvgpud.serve.kube.api import Access, KubeApi
from amdvgpud.serve.kube.hami import HamiSettings, HamiSide
from amdvgpud.serve.kube.pods import PodWatch
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree
from tests.fakes import MemoryCdi, MemoryFiles, MemoryJournal
from tests.serve.kube.fake_kubeapi import status
from tests.serve.kube.stage import deliver

Json = dict[str, Any]
SCENES: Final[list[Json]] = json.loads((Path(__file__).parent / "recorded/hami.json").read_text())


class Answers:
    """An API server that knows what it was asked in one scene, and gives the same answers; ``asked`` is what comes."""

    def __init__(self) -> None:
        self.left: list[Json] = []
        self.asked: list[tuple[str, str, str]] = []

    def of(self, calls: list[Json]) -> None:
        self.left, self.asked = list(calls), []

    async def answer(self, request: web.Request) -> web.Response:
        if request.path.endswith("/events"):
            return web.json_response({})  # for people, in words of our own
        method, path, sent = request.method, request.path_qs, await request.text()
        self.asked.append((method, path, sent))
        for call in self.left:
            if (call["method"], call["path"]) == (method, path):
                self.left.remove(call)
                return web.json_response(call["answer"], status=call["status"])
        return status(404, f"{method} {path} was not asked then", "NotFound")


class Replay:
    def __init__(self, answers: Answers, url: str, machine: Path) -> None:
        self.answers = answers
        self.now_s = 0.0
        self.client = KubeApi(Access(url))
        self.node = Node(
            SysfsReader(machine), MemoryJournal(), MemoryFiles(), MemoryCdi(),
            now_s=lambda: self.now_s, process_alive=lambda _: True,
        )  # fmt: skip
        here = SCENES[0]["calls"][0]["answer"]["metadata"]["name"]
        watch = PodWatch(self.node, self.client, here, now_s=lambda: self.now_s)
        self.side = HamiSide(self.node, self.client, HamiSettings(here), watch, deliver, now_s=lambda: self.now_s)

    async def play(self, scene: Json) -> None:
        self.answers.of(scene["calls"])
        match scene["what"]:
            case "register":
                written = json.loads(scene["calls"][-1]["sent"])["metadata"]["annotations"][REGISTERED_AT]
                self.now_s = datetime.fromisoformat(written).timestamp()
                await self.side.keep()
            case "allocate" if "failed" in scene["calls"][-3]["sent"]:
                with pytest.raises(NoRoom):
                    await self.side.resource.allocate(scene["ids"])
            case "allocate":
                await self.side.resource.allocate(scene["ids"])
            case "released":
                await self.node.delete_slice(SliceName(scene["slice"]), force=True)
            case "unhealthy":
                (gpu,) = (gpu.id for gpu in self.node.view().inventory.gpus if gpu.smi_uuid == scene["gpu"])
                await self.node.set_health({gpu: Health(Condition.UNHEALTHY, "as somebody said", "override", 1.0)})


@pytest.fixture
async def replay(tmp_path: Path) -> AsyncIterator[Replay]:
    build_tree(parse_simulation("2*mi300x"), tmp_path)
    answers = Answers()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answers.answer)
    server = TestServer(app)
    await server.start_server()
    found = Replay(answers, str(server.make_url("")).rstrip("/"), tmp_path)
    await found.node.start()
    yield found
    await found.client.close()
    await server.close()


async def test_all_that_was_written_for_hamis_scheduler_is_written_again(replay: Replay) -> None:
    assert [scene["what"] for scene in SCENES] == [
        "register", *["allocate"] * 5, "released", *["allocate"] * 3, "unhealthy", "register",
    ]  # fmt: skip
    for scene in SCENES:
        await replay.play(scene)
        assert replay.answers.asked == [(call["method"], call["path"], call["sent"]) for call in scene["calls"]]
