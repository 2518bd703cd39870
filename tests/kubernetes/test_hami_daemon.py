"""amdvgpud as a program in mode hami: a simulated machine, a stand-in kubelet, an API server in memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from amdvgpud.core import hami
from tests.daemons import PROGRAM, a_daemon, options_of
from tests.kubernetes.conftest import ENVIRONMENT, kubelet_options
from tests.serve.kube.fake_kubeapi import FakeKubeApi
from tests.serve.kube.kubelet import Kubelet
from tests.serve.kube.stage import HERE, a_container, bound_pod, slice_of


def settings_of(folder: Path, kubelet: Kubelet) -> list[str]:
    return ["--simulate=2*mi300x", f"--kube-config={folder}/kubeconfig", *kubelet_options(kubelet, "hami")]


@contextlib.contextmanager
def serving(folder: Path, kubelet: Kubelet, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    with a_daemon(folder, *settings_of(folder, kubelet), *options, env=ENVIRONMENT) as process:
        yield process


async def until(holds: Callable[[], Any]) -> Any:
    async with asyncio.timeout(30):
        while not (found := holds()):
            await asyncio.sleep(0.02)
    return found


def registered(api: FakeKubeApi) -> Sequence[Mapping[str, Any]]:
    return hami.parse_registration(api.annotations("node", HERE).get(hami.REGISTRATION, ""))


async def test_a_pod_of_the_scheduler_gets_its_share_also_after_a_kill_and_gives_it_back(
    folder: Path, kubelet: Kubelet, api: FakeKubeApi
) -> None:
    with serving(folder, kubelet) as process:
        plugin = await kubelet.registered(hami.COUNT_RESOURCE, within_s=30)
        gpus = await until(lambda: registered(api))
        assert [(gpu["count"], gpu["devcore"], gpu["health"]) for gpu in gpus] == [(10, 304, True)] * 2
        await until(lambda: len(plugin.healthy) == 20)
        pod = bound_pod("a", 1, f"{gpus[1]['id']},{gpus[1]['type']},16384,76:;")
        api.add_pod(pod)
        lock = {hami.LOCK: "2026-01-01T00:00:00Z,default,a"}
        api.change_node(HERE, {"metadata": {"annotations": lock}})
        (answer,) = await plugin.allocate([f"{gpus[1]['id']}#4"])
        assert answer.envs["HIP_DEVICE_MEMORY_LIMIT"] == "16384m"
        assert "LD_AUDIT" not in answer.envs
        paths = {mount.container_path for mount in answer.mounts}
        assert {"/usr/local/vgpu/libamvgpu.so", "/etc/ld.so.preload"} < paths
        assert api.annotations("pod", "default", "a")[hami.BIND_PHASE] == hami.SUCCESS
        assert hami.LOCK not in api.annotations("node", HERE)
        process.kill()
        await asyncio.to_thread(process.wait)
    await asyncio.wait_for(plugin.ended.wait(), 10)
    del kubelet.plugins[hami.COUNT_RESOURCE]
    with serving(folder, kubelet) as process:
        plugin = await kubelet.registered(hami.COUNT_RESOURCE, within_s=30)
        with pytest.raises(grpc.aio.AioRpcError, match="no binding pod found"):
            await plugin.allocate([f"{gpus[1]['id']}#4"])
        name = f"pod-{pod['metadata']['uid']}.0"
        assert (folder / "run" / "slices" / name).is_dir()
        api.delete_pod("default", "a")
        await until(lambda: not (folder / "run" / "slices" / name).exists())
        process.terminate()
        assert await asyncio.to_thread(process.wait, 10) == 0
    assert [gpu["health"] for gpu in registered(api)] == [True, True]
    command = [*PROGRAM, *options_of(folder, *settings_of(folder, kubelet)), "kube", "withdraw"]
    done = await asyncio.to_thread(subprocess.run, command, env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "The GPUs of node n1 are withdrawn from HAMi's scheduler.\n")
    assert ["health" in gpu for gpu in registered(api)] == [False, False]


async def test_a_pod_keeps_its_slice_when_the_book_was_lost(folder: Path, kubelet: Kubelet, api: FakeKubeApi) -> None:
    with serving(folder, kubelet) as process:
        plugin = await kubelet.registered(hami.COUNT_RESOURCE, within_s=30)
        gpus = await until(lambda: registered(api))
        wanted = a_container("main", gpumem=16384, gpucores=25)
        pod = api.add_pod(bound_pod("a", 1, f"{gpus[1]['id']},{gpus[1]['type']},16384,76:;", wanted))
        await until(lambda: len(plugin.healthy) == 20)
        await plugin.allocate([f"{gpus[1]['id']}#4"])
        kubelet.pods = [("default", "a", "main", hami.COUNT_RESOURCE, [f"{gpus[1]['id']}#4"])]
        api.change_pod("default", "a", {"status": {"phase": "Running"}})
        guest = folder / "run" / "slices" / slice_of(pod) / "guest"
        before = (guest / "ledger").stat().st_ino, json.loads((guest / "slice.json").read_text())
        process.kill()
        await asyncio.to_thread(process.wait)
        shutil.rmtree(folder / "state")
        del kubelet.plugins[hami.COUNT_RESOURCE]
        with serving(folder, kubelet):
            await kubelet.registered(hami.COUNT_RESOURCE, within_s=30)
            await until(lambda: [gpu["health"] for gpu in registered(api)] == [True, True])
            assert ((guest / "ledger").stat().st_ino, json.loads((guest / "slice.json").read_text())) == before
            api.delete_pod("default", "a")
            kubelet.pods = []
            await until(lambda: not guest.exists())


async def test_without_an_api_the_daemon_runs_and_the_kubelet_hears_of_gpus_when_it_comes(
    folder: Path, kubelet: Kubelet, api: FakeKubeApi
) -> None:
    node = api.nodes.pop(HERE)
    api.amounts = True
    with serving(folder, kubelet, "--hami-amounts=on") as process:
        await until(lambda: "GET nodes" in api.asked)
        api.nodes[HERE] = node
        await kubelet.registered(hami.COUNT_RESOURCE, within_s=30)
        assert process.poll() is None
        found = await until(lambda: api.nodes[HERE]["status"].get("capacity"))
        assert found == {"amd.com/gpumem": str(2 * 196592), "amd.com/gpucores": "200"}
