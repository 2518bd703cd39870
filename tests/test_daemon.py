"""The daemon's eternal tasks, with all parts real and the machine simulated."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import amdvgpud._abi
from amdvgpud.core.errors import HostFailure
from amdvgpud.core.model import Compute, ComputePolicy, Request, slice_name
from amdvgpud.daemon import Daemon
from amdvgpud.host.store import BookStore
from amdvgpud.host.systemd import Supervisor
from amdvgpud.node import Node
from amdvgpud.settings import Settings, read_settings
from tests.daemons import a_daemon, wait_for_api


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "amdvgpud.toml").touch()
    return read_settings(
        {},
        {
            "simulate": "rx9070xt",
            "run_dir": str(tmp_path / "run"),
            "state_dir": str(tmp_path / "state"),
            "cdi.dir": str(tmp_path / "cdi"),
            "rest.tcp": "",
        },
        tmp_path / "amdvgpud.toml",
    )


@pytest.fixture
def daemon(settings: Settings) -> Iterator[subprocess.Popen[str]]:
    """As a program, when it serves."""
    with a_daemon(settings.run_dir.parent, "--simulate=rx9070xt", stderr=subprocess.PIPE, text=True) as process:
        wait_for_api(process)
        yield process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_that_come_while_it_ends_are_harmless(daemon: subprocess.Popen[str], number: signal.Signals) -> None:
    daemon.terminate()
    # As fast as one process can. At 4 million a second from another core it was seen to end within a second, too: what
    # comes while one is pending is one with it. The end that blocked signals in one thread, instead of ignoring them,
    # did not stand this.
    while daemon.poll() is None:
        daemon.send_signal(number)
    assert daemon.stderr is not None
    said = daemon.stderr.read()
    assert (daemon.returncode, "Traceback" in said) == (0, False), said


@pytest.mark.parametrize("failure", [HostFailure("no luck"), OSError("no sysfs")])
async def test_a_scan_that_fails_is_said_and_ends_nothing(
    settings: Settings, failure: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = Daemon(settings, lambda: settings, Supervisor({}))

    async def failing() -> None:
        raise failure

    monkeypatch.setattr(daemon._parts.node, "rescan", failing)
    await daemon._look_again()
    assert caplog.messages == [f"A scan of the machine failed, the next one is due in 30 s: {failure}"]


@pytest.mark.root
async def test_another_daemon_may_have_the_state_once_it_has_ended(settings: Settings) -> None:
    daemon = Daemon(settings, lambda: settings, Supervisor({}))
    daemon.stop()
    try:
        async with asyncio.timeout(20):
            await daemon.run()
    finally:
        gc.unfreeze()  # run() has frozen what the other tests have made, too
        subprocess.run(["umount", settings.run_dir / "slices"], check=False, capture_output=True)
    with closing(BookStore(settings.state_dir)) as store:
        assert store.load() == daemon._parts.node.view().book


@pytest.mark.root
async def test_what_a_process_held_is_back_when_it_dies_and_not_with_the_next_tick(settings: Settings) -> None:
    """The ticks are by hand here: after the one that has found the process, none comes."""
    daemon = Daemon(settings, lambda: settings, Supervisor({}))
    node, name = daemon._parts.node, slice_name("alice")
    await node.start()
    try:
        await node.put_slice(Request(name, Compute(ComputePolicy.BALANCED, percent=25), 4 << 30))
        parts, root = Path(amdvgpud._abi.__file__).parent, settings.run_dir / "simulated"
        environment = {
            "SOFTKFD_ROOT": str(root),
            "AMDVGPU_SLICE_DIR": str(settings.run_dir / "slices/alice/guest"),
            "LD_PRELOAD": f"{parts}/libamdvgpu.so {parts}/libsoftkfd.so",
        }
        holder = [str(parts / "kfdclient"), "--step", "1G", "--count", "2", "--hold"]
        with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            assert any(b'"hold"' in line for line in process.stdout)
            await node.tick()
            await daemon._owners.follow(node.view().usage)
            assert node.view().usage[name].used_bytes(_only_gpu_id(node)) == 2 << 30
            process.kill()
            async with asyncio.timeout(20):
                while node.view().usage[name].used_bytes(_only_gpu_id(node)):
                    await asyncio.sleep(0.01)
    finally:
        daemon._owners.close()
        await node.close()
        subprocess.run(["umount", settings.run_dir / "slices"], check=False, capture_output=True)


def _only_gpu_id(node: Node) -> int:
    (partition,) = node.view().inventory.partitions
    return partition.kfd_gpu_id
