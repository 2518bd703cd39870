"""amdvgpud as a program, on a simulated machine, beside the stand-in kubelet: start, kill, stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.serve.kube.kubelet import Kubelet, a_kubelet

PROFILE = "amdvgpu.io/25c-4g"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not tmp_path: a socket's path has to fit 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="avg") as folder:
        yield Path(folder)


@pytest.fixture
async def kubelet(folder: Path) -> AsyncIterator[Kubelet]:
    async with a_kubelet(folder / "kubelet" / "device-plugins") as kubelet:
        yield kubelet


@contextlib.contextmanager
def a_daemon(folder: Path, kubelet: Kubelet, mode: str = "profiles") -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", "from amdvgpud.cli import main; main()", "--simulate=rx9070xt", "--rest-tcp="),
            *(f"--run-dir={folder}/run", f"--state-dir={folder}/state", f"--cdi-dir={folder}/cdi"),
            *(f"--kubelet-mode={mode}", f"--kubelet-profiles={PROFILE.partition('/')[2]}=25%:4GiB"),
            *(f"--kubelet-dir={kubelet.dir}", f"--kubelet-pod-resources={kubelet.pod_resources_socket}"),
        ]
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        subprocess.run(["umount", folder / "run" / "slices"], check=False, capture_output=True)


async def ended(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, 10)


async def test_a_termination_ends_the_streams_within_five_seconds_and_a_second_one_is_harmless(
    folder: Path, kubelet: Kubelet
) -> None:
    with a_daemon(folder, kubelet) as process:
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
    with a_daemon(folder, kubelet):
        plugin = await kubelet.registered(PROFILE, within_s=30)
        assert plugin.healthy == ["25c-4g-0", "25c-4g-1", "25c-4g-2"]
        devices, (answer,) = plugin.healthy, await plugin.allocate(["25c-4g-2"])
    await asyncio.wait_for(plugin.ended.wait(), 10)
    (left,) = kubelet.dir.glob("amdvgpud-*")
    del kubelet.plugins[PROFILE]
    with a_daemon(folder, kubelet):
        plugin = await kubelet.registered(PROFILE, within_s=30)
        assert (plugin.healthy, await plugin.allocate(["25c-4g-2"])) == (devices, [answer])
        assert not left.exists()
    assert kubelet.registrations == [PROFILE, PROFILE]


async def test_without_a_kubelet_there_is_no_grpc_in_the_daemon(folder: Path) -> None:
    script = "import sys; import amdvgpud.cli; sys.exit('grpc' in sys.modules or 'google.protobuf' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    assert await process.wait() == 0
