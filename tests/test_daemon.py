"""The daemon's eternal tasks, with all parts real and the machine simulated."""

from __future__ import annotations

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
