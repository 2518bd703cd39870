"""The unit files: what systemd says of them, and that they agree with the settings they stand for."""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from amdvgpud.core.sizes import parse_size
from amdvgpud.settings import SETTINGS

SYSTEMD = Path(__file__).resolve().parents[2] / "systemd"
UNITS = sorted(p.name for p in SYSTEMD.iterdir() if p.suffix in (".service", ".socket", ".mount"))
DROP_INS = sorted(SYSTEMD.glob("drop-ins/*.conf"))
UNPRIVILEGED = SYSTEMD / "unprivileged/amdvgpud.service.conf"


def keys(text: str) -> dict[str, list[str]]:
    """Each key of a unit with its values, in order."""
    found = defaultdict(list)
    for line in text.splitlines():
        if match := re.match(r"([A-Za-z]+)=(.*)", line):
            found[match.group(1)].append(match.group(2))
    return dict(found)


SERVICE = keys((SYSTEMD / "amdvgpud.service").read_text())


@pytest.mark.parametrize("extra", [[], DROP_INS, [UNPRIVILEGED]], ids=["plain", "drop-ins", "unprivileged"])
def test_systemd_reads_every_unit_without_a_word(extra: list[Path], tmp_path: Path) -> None:
    for name in UNITS:
        # verify wants the program to be there, which it is on no machine that has not installed the package.
        (tmp_path / name).write_text((SYSTEMD / name).read_text().replace("/usr/bin/amdvgpud", "/usr/bin/env"))
    folder = tmp_path / "amdvgpud.service.d"
    folder.mkdir()
    for path in extra:
        (folder / path.name).write_text(path.read_text())
    argv = ["systemd-analyze", "verify", "--man=no", *(f"./{name}" for name in UNITS)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize(
    ("unit", "extra", "most"),
    [
        ("amdvgpud.service", [], 2.5),
        ("amdvgpud.service", DROP_INS, 3.0),
        ("amdvgpud.service", [UNPRIVILEGED], 2.0),
        ("amdvgpud-cdi-refresh.service", [], 2.5),
    ],
)
def test_the_exposure_stays_below_its_limit(unit: str, extra: list[Path], most: float, tmp_path: Path) -> None:
    (tmp_path / unit).write_text("\n".join(p.read_text() for p in (SYSTEMD / unit, *extra)))
    argv = ["systemd-analyze", "security", "--offline=yes", "--no-pager", f"./{unit}"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    overall = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert overall is not None, done.stdout + done.stderr
    assert float(overall.group(1)) <= most


def test_every_protection_that_is_not_taken_is_argued_in_the_unit() -> None:
    argv = ["systemd-analyze", "security", "--offline=yes", "--json=short", "./amdvgpud.service"]
    done = subprocess.run(argv, cwd=SYSTEMD, capture_output=True, text=True, check=False)
    open_doors = {row["name"].partition("=")[0].split("/")[0] for row in json.loads(done.stdout) if row["set"] is False}
    text = (SYSTEMD / "amdvgpud.service").read_text()
    assert {"PrivateDevices", "PrivateNetwork", "User"} <= open_doors, "the report was not understood"
    assert [name for name in sorted(open_doors) if name not in text] == []


def test_the_units_say_what_the_settings_say() -> None:
    mount = keys((SYSTEMD / "run-amdvgpud-slices.mount").read_text())
    socket = keys((SYSTEMD / "amdvgpud.socket").read_text())
    run_dir = SETTINGS["run_dir"].default
    options = dict(re.findall(r"(\w+)=(\w+)", mount["Options"][0]))
    assert mount["Where"] == [f"{run_dir}/slices"]
    assert parse_size(options["size"] + "iB", "size") == parse_size(str(SETTINGS["slices_tmpfs_bytes"].default), "size")
    assert socket["ListenStream"] == [f"{run_dir}/api.sock"]
    assert socket["SocketGroup"] == [SETTINGS["rest.socket_group"].default]
    assert socket["SocketMode"] == [SETTINGS["rest.socket_mode"].default]
    assert SERVICE["RuntimeDirectory"] == [str(run_dir).removeprefix("/run/")]
    assert SERVICE["StateDirectory"] == [str(SETTINGS["state_dir"].default).removeprefix("/var/lib/")]
    assert SERVICE["ReadWritePaths"] == [f"-{SETTINGS['cdi.dir'].default}"]


def test_ledgers_outlive_the_daemon_and_nothing_ties_the_mount_to_it() -> None:
    assert SERVICE["RuntimeDirectoryPreserve"] == ["yes"]
    mount = keys((SYSTEMD / "run-amdvgpud-slices.mount").read_text())
    assert not {"PartOf", "BindsTo", "StopWhenUnneeded", "Requires"} & mount.keys()


def test_the_watchdog_waits_for_many_ticks() -> None:
    tick = SETTINGS["tick_s"].default
    assert isinstance(tick, int)
    assert int(SERVICE["WatchdogSec"][0]) >= 10 * tick


def test_the_oneshot_is_locked_in_as_the_daemon_is() -> None:
    oneshot = keys((SYSTEMD / "amdvgpud-cdi-refresh.service").read_text())
    sandbox = re.compile(r"Protect|Restrict|Private|System(Call)|Capab|Ambient|Device|Memory|Lock|NoNew|Keyring|UMask")
    differ = {key for key in SERVICE | oneshot if sandbox.match(key) and SERVICE.get(key) != oneshot.get(key)}
    assert differ == {"RestrictAddressFamilies", "PrivateNetwork", "DeviceAllow"}
    assert set(oneshot["DeviceAllow"]) < set(SERVICE["DeviceAllow"])  # it has no child that hears the KFD's events


def test_the_group_of_the_socket_is_made() -> None:
    assert "g amdvgpu -" in (SYSTEMD / "sysusers.conf").read_text().splitlines()
