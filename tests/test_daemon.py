"""The daemon's eternal tasks, with all parts real and the machine simulated."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from amdvgpud.cli import Daemon
from amdvgpud.core.errors import HostFailure
from amdvgpud.host.systemd import Supervisor
from amdvgpud.settings import Settings, read_settings


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
    places = [f"--run-dir={settings.run_dir}", f"--state-dir={settings.state_dir}", f"--cdi-dir={settings.cdi_dir}"]
    main = "from amdvgpud.cli import main; main()"
    arguments = ["--simulate=rx9070xt", "--rest-tcp=", *places]
    process = subprocess.Popen([sys.executable, "-c", main, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said: list[str] = []
        while "The API listens on" not in "".join(said[-1:]):
            said.append(process.stderr.readline())
            assert said[-1], "".join(said)
        yield process
    finally:
        process.kill()
        process.communicate()
        subprocess.run(["umount", settings.run_dir / "slices"], check=False, capture_output=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_that_come_while_it_ends_are_harmless(daemon: subprocess.Popen[str], number: signal.Signals) -> None:
    daemon.terminate()
    while daemon.poll() is None:
        daemon.send_signal(number)
        # A thousand a second. Without a pause the sender has one of two processors to itself, and what is then tried
        # is how the interpreter takes a storm.
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(0.001)
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
