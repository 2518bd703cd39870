"""When it is asked which way pods get their slices, and what is made of no answer."""

from __future__ import annotations

import asyncio
import logging

import pytest

from amdvgpud.core.delivery import Choice
from amdvgpud.core.errors import HostFailure, Invalid
from amdvgpud.serve.kube import delivery as module
from amdvgpud.serve.kube.delivery import Delivery

NOT_YET = Choice("nodes", "it has not been asked for yet", known=False)
NAMES = Choice("cdi", "both resolve CDI names")
NODES = Choice("nodes", "CDI is off in containerd 1.7.24")


class Cluster:
    def __init__(self, *answers: Choice | Exception) -> None:
        self.answers = list(answers)

    async def __call__(self) -> Choice:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_a_choice_that_was_set_is_asked_of_nobody() -> None:
    chosen = Delivery.fixed("cdi")
    await chosen.settle()
    await chosen.renew()
    await chosen.follow()
    assert chosen.choice == Choice("cdi", "kubelet.delivery says so")


async def test_each_registration_asks_anew_and_only_a_change_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    chosen = Delivery(NOT_YET, Cluster(NODES, NODES, NAMES, NAMES))
    await chosen.settle()
    seen = []
    for _ in range(3):
        await chosen.renew()
        seen.append(chosen.choice.way)
    assert seen == ["nodes", "cdi", "cdi"]
    assert [(r.levelname, r.getMessage().partition(":")[0]) for r in caplog.records] == [
        ("WARNING", "Containers get their slices by device nodes, mounts and variables, and no hook"),
        ("INFO", "Containers get their slices by CDI names"),
    ]
    assert "set kubelet.delivery = 'cdi'" in caplog.records[0].getMessage()


async def test_without_an_answer_it_is_nodes_until_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.001)
    cluster = Cluster(HostFailure("GET nodes: refused"), HostFailure("GET nodes: refused"), NAMES)
    chosen = Delivery(NOT_YET, cluster)
    await chosen.settle()
    assert chosen.choice == Choice("nodes", "the Node cannot be read: GET nodes: refused", known=False)
    following = asyncio.create_task(chosen.follow())
    async with asyncio.timeout(10):
        while chosen.choice != NAMES:
            await asyncio.sleep(0.001)
    following.cancel()
    assert cluster.answers == []


async def test_an_api_that_goes_away_changes_nothing() -> None:
    chosen = Delivery(NOT_YET, Cluster(NAMES, HostFailure("away")))
    await chosen.settle()
    await chosen.renew()
    assert chosen.choice == NAMES


async def test_an_api_that_does_not_answer_holds_up_the_start_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ASK_S", 0.01)

    async def silence() -> Choice:
        await asyncio.Event().wait()
        raise AssertionError

    chosen = Delivery(NOT_YET, silence)
    await chosen.settle()
    assert chosen.choice == Choice("nodes", "the Node cannot be read: no answer within 0.01 s", known=False)


async def test_where_the_hook_is_needed_and_cannot_come_the_start_is_refused() -> None:
    chosen = Delivery(NOT_YET, Cluster(NODES), hook_for="hook.required")
    with pytest.raises(Invalid) as refused:
        await chosen.settle()
    assert str(refused.value) == (
        "kubelet.delivery: 'auto' comes to 'nodes', which brings no hook into pods, and hook.required needs it: CDI is "
        "off in containerd 1.7.24. Set it to 'cdi' where the runtime resolves CDI names all the same"
    )


async def test_where_the_hook_is_needed_and_nobody_answers_nothing_is_registered_yet() -> None:
    chosen = Delivery(NOT_YET, Cluster(HostFailure("away"), HostFailure("away"), NAMES), hook_for="hook.required")
    await chosen.settle()
    with pytest.raises(HostFailure, match=r"hook\.required needs it: the Node cannot be read: away"):
        await chosen.renew()
    await chosen.renew()
    assert chosen.choice == NAMES
