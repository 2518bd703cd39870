"""The amounts of gpumem and gpucores in the Node's status, against an API server in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from amdvgpud.core import hami
from amdvgpud.core.health import Condition, Health
from amdvgpud.core.model import Compute, GpuId, Request, SliceName
from amdvgpud.serve.kube.amounts import keep_amounts, remove_or_say
from tests.fakes import GIB
from tests.serve.kube.stage import GPU, HERE, OTHER, Stage

BOTH = {"amd.com/gpumem": str(2 * 192 * 1024), "amd.com/gpucores": "200"}


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    found = await Stage.of()
    found.api.amounts = True
    yield found
    await found.close()


def capacity(stage: Stage) -> dict[str, str]:
    return dict(stage.api.nodes[HERE]["status"].get("capacity") or {})


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def kept(stage: Stage) -> AsyncIterator[None]:
    async def pause(_: float) -> None:
        await asyncio.sleep(0.005)

    def offers() -> Any:
        return stage.side.offers(stage.node.view())

    task = asyncio.create_task(keep_amounts(stage.client, HERE, offers, pause))
    try:
        yield
    finally:
        task.cancel()


async def test_the_node_says_what_it_has_and_says_it_again_whoever_takes_it_away(stage: Stage) -> None:
    stage.api.change_node(HERE, {"status": {"capacity": {"cpu": "8"}}})
    async with kept(stage):
        await until(lambda: capacity(stage) == {"cpu": "8", **BOTH})
        assert stage.api.annotations("node", HERE)[hami.AMOUNTS] == "true"
        for gone in (dict.fromkeys(BOTH), {"amd.com/gpumem": "0"}):  # by somebody, by a kubelet that begins anew
            stage.api.change_node(HERE, {"status": {"capacity": gone}})
            await until(lambda: capacity(stage) == {"cpu": "8", **BOTH})


async def test_what_the_api_server_writes_shorter_is_not_written_again_and_again() -> None:
    stage = await Stage.of(*range(10))
    stage.api.amounts = True
    async with kept(stage):
        await until(lambda: capacity(stage).get("amd.com/gpucores") == "1k")
        stage.api.asked.clear()
        await until(lambda: stage.api.asked.count("GET nodes") >= 3)
    assert "PATCH nodes/status" not in stage.api.asked
    await stage.close()


async def test_a_sick_gpu_is_counted_and_what_slices_by_hand_have_is_not(stage: Stage) -> None:
    async with kept(stage):
        await until(lambda: capacity(stage) == BOTH)
        await stage.node.set_health({GpuId(GPU): Health(Condition.UNHEALTHY, "ras", "ras")})
        await stage.node.put_slice(Request(SliceName("alice"), Compute(percent=25), 64 * GIB, on=(OTHER,)))
        await until(lambda: capacity(stage)["amd.com/gpumem"] == str((192 + 128) * 1024))
        assert capacity(stage)["amd.com/gpucores"] == "200"


async def test_nothing_to_offer_is_no_zero(stage: Stage) -> None:
    """Which would have a kubelet that starts again refuse the pods that run."""
    async with kept(stage):
        await until(lambda: capacity(stage) == BOTH)
    task = asyncio.create_task(keep_amounts(stage.client, HERE, list, lambda _: asyncio.sleep(0.005)))
    await until(lambda: capacity(stage) == {})
    task.cancel()


async def test_switched_off_what_we_have_written_goes_and_what_others_have_stays(stage: Stage) -> None:
    stage.api.change_node(HERE, {"status": {"capacity": BOTH}})
    await remove_or_say(stage.client, HERE)
    assert capacity(stage) == BOTH
    async with kept(stage):
        await until(lambda: hami.AMOUNTS in stage.api.annotations("node", HERE))
    await remove_or_say(stage.client, HERE)
    assert (capacity(stage), hami.AMOUNTS in stage.api.annotations("node", HERE)) == ({}, False)


async def test_without_the_right_to_it_it_is_said_once_and_how_to_take_the_amounts_away(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    async with kept(stage):
        await until(lambda: capacity(stage) == BOTH)
    stage.api.amounts = False
    await remove_or_say(stage.client, HERE)
    assert "nodes/status is forbidden" in caplog.messages[-1]
    assert caplog.messages[-1].endswith(
        "kubectl patch node n1 --subresource=status --type=merge -p "
        """'{"status":{"capacity":{"amd.com/gpumem":null,"amd.com/gpucores":null}}}'"""
    )
    stage.api.change_node(HERE, {"status": {"capacity": {"amd.com/gpumem": None}}})
    caplog.clear()
    stage.api.asked.clear()
    async with kept(stage):
        await until(lambda: stage.api.asked.count("PATCH nodes/status") >= 3)
    (said,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert said.startswith("The amounts of node n1 cannot be written, tried again every 30 s: ")
