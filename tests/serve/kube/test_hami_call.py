"""HAMi's side as a kubelet calls it: one call for several containers, over a real socket."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from amdvgpud.core import hami
from amdvgpud.serve.kube.kubelet import DevicePlugin, KubeletSettings
from amdvgpud.serve.kube.podresources import PodResources
from amdvgpud.serve.metrics import Metrics
from tests.serve.kube.kubelet import Plugin, a_kubelet
from tests.serve.kube.stage import GPU, HERE, OTHER, Stage, a_container, slice_of


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    found = await Stage.of()
    await found.side.keep()
    yield found
    await found.close()


@pytest.fixture
async def plugin(stage: Stage) -> AsyncIterator[Plugin]:
    """The resource, as a kubelet reaches it."""
    metrics = Metrics(stage.sysfs, version="", python="", cdi_kind="amdvgpu.io/slice", compat=(), cluster_node=HERE)
    with tempfile.TemporaryDirectory(prefix="avg") as folder:
        plugins = Path(folder) / "device-plugins"
        door = DevicePlugin(
            stage.node,
            lambda: [stage.side.resource],
            KubeletSettings(plugins, look_s=0.05),
            metrics,
            PodResources(plugins.parent / "pod-resources" / "kubelet.sock"),
        )
        async with a_kubelet(plugins) as kubelet:
            task = asyncio.create_task(door.run())
            yield await kubelet.registered("amd.com/gpu")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_one_call_for_two_containers_serves_both(stage: Stage, plugin: Plugin) -> None:
    text = f"{GPU},AMD-x,8192,76:;{OTHER},AMD-x,4096,152:;"
    pod = stage.pod("a", a_container("main"), a_container("side"), allocation=text)
    main, side = await plugin.allocate([f"{GPU}#0"], [f"{OTHER}#0"])
    assert (main.envs["AMDVGPU_SLICE"], side.envs["AMDVGPU_SLICE"]) == (slice_of(pod, 0), slice_of(pod, 1))
    assert (stage.locked(), stage.notes("a")[hami.BIND_PHASE]) == (None, hami.SUCCESS)


async def test_one_call_for_two_containers_of_which_one_is_refused_gives_nothing(stage: Stage, plugin: Plugin) -> None:
    text = f"{GPU},AMD-x,8192,76:;{OTHER},AMD-x,999999999,152:;"
    stage.pod("a", a_container("main"), a_container("side"), allocation=text)
    with pytest.raises(grpc.aio.AioRpcError):
        await plugin.allocate([f"{GPU}#0"], [f"{OTHER}#0"])
    assert (stage.slices(), stage.locked(), stage.notes("a")[hami.BIND_PHASE]) == ({}, None, hami.FAILED)


async def test_one_call_for_more_containers_than_wait_gives_nothing(stage: Stage, plugin: Plugin) -> None:
    """The second finds no pod that it could be for: the first is the pod's only one."""
    stage.pod("a", allocation=f"{GPU},AMD-x,8192,76:;")
    with pytest.raises(grpc.aio.AioRpcError, match="no binding pod found"):
        await plugin.allocate([f"{GPU}#0"], [f"{OTHER}#0"])
    assert (stage.slices(), stage.locked(), stage.notes("a")[hami.BIND_PHASE]) == ({}, None, hami.FAILED)
