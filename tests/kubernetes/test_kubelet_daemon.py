"""amdvgpud as a program, on a simulated machine, beside the stand-in kubelet: start, kill, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from amdvgpud.core import wire
from amdvgpud.ctl.client import Client
from tests.daemons import a_daemon, wait_for_api
from tests.kubernetes.conftest import kubelet_options
from tests.serve.kube.kubelet import Kubelet

PROFILE = "amdvgpu.io/25c-4g"


@contextlib.contextmanager
def serving(folder: Path, kubelet: Kubelet, **popen: Any) -> Iterator[subprocess.Popen[Any]]:
    profile = f"--kubelet-profiles={PROFILE.partition('/')[2]}=25%:4GiB"
    with a_daemon(folder, "--simulate=rx9070xt", profile, *kubelet_options(kubelet, "profiles"), **popen) as process:
        yield process


async def ended(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, 10)


async def test_a_termination_ends_the_streams_within_five_seconds_and_a_second_one_is_harmless(
    folder: Path, kubelet: Kubelet
) -> None:
    with serving(folder, kubelet) as process:
        plugin = await kubelet.registered(PROFILE, within_s=30)
        began_s = time.monotonic()
        process.terminate()
        await asyncio.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        assert await ended(process) == 0
        await asyncio.wait_for(plugin.ended.wait(), 5)
        assert time.monotonic() - began_s < 5
    assert [path.name for path in kubelet.dir.glob("amdvgpud-*")] == []


async def test_a_killed_daemon_comes_back_with_the_same_slices_and_the_same_answer(
    folder: Path, kubelet: Kubelet
) -> None:
    with serving(folder, kubelet):
        plugin = await kubelet.registered(PROFILE, within_s=30)
        assert plugin.healthy == ["25c-4g-0", "25c-4g-1", "25c-4g-2"]
        devices, (answer,) = plugin.healthy, await plugin.allocate(["25c-4g-2"])
    await asyncio.wait_for(plugin.ended.wait(), 10)
    (left,) = kubelet.dir.glob("amdvgpud-*")
    del kubelet.plugins[PROFILE]
    with serving(folder, kubelet):
        plugin = await kubelet.registered(PROFILE, within_s=30)
        assert (plugin.healthy, await plugin.allocate(["25c-4g-2"])) == (devices, [answer])
        assert not left.exists()
    assert kubelet.registrations == [PROFILE, PROFILE]


async def test_a_daemon_whose_book_was_lost_takes_up_what_containers_have_before_anybody_can_ask(
    folder: Path, kubelet: Kubelet
) -> None:
    ledger = folder / "run/slices/25c-4g-1/guest/ledger"
    with serving(folder, kubelet) as process:
        plugin = await kubelet.registered(PROFILE, within_s=30)
        await plugin.allocate(["25c-4g-1"])
        kubelet.pods = [("default", "p", "main", PROFILE, ["25c-4g-1"])]
        before = ledger.stat().st_ino
        process.kill()
        await ended(process)
        shutil.rmtree(folder / "state")
        with serving(folder, kubelet, stderr=subprocess.PIPE, text=True) as process:
            await asyncio.to_thread(wait_for_api, process)
            client = Client(str(folder / "run/api.sock"))
            found, _ = await asyncio.to_thread(client.get, "/v1/leases", wire.LeaseList)
            assert [(each.slice, each.holder) for each in found.leases] == [("25c-4g-1", f"kubelet {PROFILE} 25c-4g-1")]
            assert ledger.stat().st_ino == before


async def test_slices_of_profiles_go_at_the_start_of_a_daemon_that_serves_no_kubelet(
    folder: Path, kubelet: Kubelet
) -> None:
    slices = folder / "run" / "slices"
    with serving(folder, kubelet) as process:
        await kubelet.registered(PROFILE, within_s=30)
        assert sorted(path.name for path in slices.iterdir()) == ["25c-4g-0", "25c-4g-1", "25c-4g-2"]
        process.terminate()
        assert await ended(process) == 0
    with a_daemon(folder, "--simulate=rx9070xt", stderr=subprocess.PIPE, text=True) as process:
        await asyncio.to_thread(wait_for_api, process)
        assert list(slices.iterdir()) == []


ONE, OTHER = "rx9070xt:unique_id=0xa1", "rx9070xt:unique_id=0xb2"


@contextlib.contextmanager
def serving_two(folder: Path, kubelet: Kubelet, machine: str, mode: str) -> Iterator[None]:
    """A machine that has just started: nothing of /run is there."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    options = (f"--simulate={machine}", "--kubelet-profiles=25c-4g=25%:4GiB", "--kubelet-delivery=nodes")
    with a_daemon(folder, *options, *kubelet_options(kubelet, mode)):
        yield
    kubelet.plugins.clear()


async def test_after_a_reboot_a_container_finds_the_files_that_it_was_told_of(folder: Path, kubelet: Kubelet) -> None:
    with serving_two(folder, kubelet, f"{ONE},{OTHER}", "profiles"):
        plugin = await kubelet.registered(PROFILE, within_s=30)
        ids = plugin.healthy[:1]
        (told,) = await plugin.allocate(ids)
        kubelet.remember("uid", "main", PROFILE, ids, told)
    with serving_two(folder, kubelet, f"{ONE},{OTHER}", "profiles"):
        plugin = await kubelet.registered(PROFILE, within_s=30)
        paths = [mount.host_path for mount in told.mounts]
        (places,) = (path for path in paths if "places-" in path)
        assert not Path(places).exists()
        await plugin.pre_start(*ids)
        assert [entry.name for entry in Path(places).iterdir()] == ids
        assert [path for path in paths if not Path(path).exists()] == []


@pytest.mark.parametrize(("mode", "name"), [("whole", "amd.com/gpu"), ("profiles", PROFILE)])
async def test_a_container_does_not_start_on_the_gpu_that_has_its_nodes_after_a_reboot(
    folder: Path, kubelet: Kubelet, mode: str, name: str
) -> None:
    """The render minors have changed places meanwhile, and the kubelet tells the container what it was told before."""
    with serving_two(folder, kubelet, f"{ONE},{OTHER}", mode):
        plugin = await kubelet.registered(name, within_s=30)
        ids = plugin.healthy[:1]
        (told,) = await plugin.allocate(ids)
        kubelet.remember("uid", "main", name, ids, told)
        await plugin.pre_start(*ids)
    with serving_two(folder, kubelet, f"{OTHER},{ONE}", mode):
        plugin = await kubelet.registered(name, within_s=30)
        with pytest.raises(
            grpc.aio.AioRpcError, match=r"renderD128, and what it was given has .*renderD129 now: make the pod anew"
        ):
            await plugin.pre_start(*ids)
    with serving_two(folder, kubelet, f"{ONE},{OTHER}", mode):
        plugin = await kubelet.registered(name, within_s=30)
        await plugin.pre_start(*ids)


async def test_without_a_kubelet_there_is_no_grpc_in_the_daemon() -> None:
    script = "import sys; import amdvgpud.cli; sys.exit('grpc' in sys.modules or 'google.protobuf' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await process.wait() == 0
