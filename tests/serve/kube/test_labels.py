"""The labels are kept: written once, again when the machine is another one, and when somebody took them away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from amdvgpud.core.errors import HostFailure
from amdvgpud.core.labels import labels_of
from amdvgpud.core.model import Inventory
from amdvgpud.serve.kube.api import ClusterNode, Meta
from amdvgpud.serve.kube.labels import LOOK_S, RETRY_S, REVIEW_S, keep_labels
from tests.fakes import an_inventory


class Enough(Exception):
    pass


class Cluster:
    """A node of the API, a machine, and a clock that both are changed by: ``at`` maps seconds to what happens then."""

    def __init__(self, inventory: Inventory) -> None:
        self.inventory = inventory
        self.labels: dict[str, str] = {"kubernetes.io/os": "linux"}
        self.answers = True
        self.now_s = 0.0
        self.patches: list[tuple[float, int]] = []
        self.at: dict[float, str] = {}

    async def get_node(self, name: str) -> ClusterNode:
        if not self.answers:
            raise HostFailure("no answer")
        return ClusterNode(Meta(name=name, labels=dict(self.labels)))

    async def patch_node(self, name: str, *, labels: Mapping[str, str | None]) -> ClusterNode:
        assert name == "n"
        self.patches.append((self.now_s, len(labels)))
        for key, value in labels.items():
            self.labels.pop(key, None)
            if value is not None:
                self.labels[key] = value
        return ClusterNode(Meta(name=name))

    async def pause(self, seconds: float) -> None:
        self.now_s += seconds
        match self.at.get(self.now_s):
            case "enough":
                raise Enough
            case "gpu gone":
                self.inventory = replace(self.inventory, gpus=self.inventory.gpus[1:])
            case "labels gone":
                self.labels = {"kubernetes.io/os": "linux"}
            case "api back":
                self.answers = True
            case "same scan again":
                self.inventory = replace(self.inventory)

    async def run(self) -> None:
        with pytest.raises(Enough):
            await keep_labels(self, "n", lambda: self.inventory, self.pause)


async def test_they_are_written_once_and_a_scan_that_finds_the_same_writes_nothing() -> None:
    cluster = Cluster(an_inventory())
    cluster.at = {10: "same scan again", 60: "enough"}
    await cluster.run()
    assert cluster.labels == {"kubernetes.io/os": "linux"} | labels_of(cluster.inventory)
    assert cluster.patches == [(0, len(labels_of(cluster.inventory)))]


async def test_a_gpu_that_goes_is_out_of_them_within_seconds() -> None:
    cluster = Cluster(an_inventory())
    cluster.at = {60: "gpu gone", 60 + LOOK_S: "enough"}
    await cluster.run()
    assert cluster.labels == {"kubernetes.io/os": "linux"} | labels_of(cluster.inventory)
    assert [at for at, _ in cluster.patches] == [0, 60]


async def test_labels_that_somebody_took_away_come_back() -> None:
    cluster = Cluster(an_inventory())
    cluster.at = {50: "labels gone", REVIEW_S + LOOK_S: "enough"}
    await cluster.run()
    assert [at for at, _ in cluster.patches] == [0, REVIEW_S]


async def test_an_api_that_does_not_answer_is_asked_again_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(an_inventory())
    cluster.answers = False
    cluster.at = {2.5 * RETRY_S - 5: "api back", 4 * RETRY_S: "enough"}
    await cluster.run()
    assert [at for at, _ in cluster.patches] == [3 * RETRY_S]
    assert [r.levelname for r in caplog.records].count("WARNING") == 1
