"""A driver that loads after the daemon has started, on a real kernel with udev: check-in-vm runs this. See machine.py.

There is no GPU in there: vgem, another DRM driver, brings a render node; amdgpu without hardware brings /dev/kfd and a
topology of CPUs only. What a GPU's own files look like is tested elsewhere (tests/host), on trees of real machines.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from urllib.request import urlopen

from tests.e2e.systemd.machine import api, check, ctl, drop_in, journal, main, main_pid, run, show, until

RENDER = Path("/dev/dri/renderD128")
KFD = Path("/dev/kfd")
ONLY_BY_EVENTS = "[Service]\nEnvironment=AMDVGPUD_RESCAN_S=3600\n"


def figure(series: str) -> int:
    """Of the daemon's metrics; 0 where there is no such series."""
    with urlopen("http://127.0.0.1:9841/metrics") as answer:
        found = re.search(f"^{re.escape(series)} (\\d+)", answer.read().decode(), re.MULTILINE)
    return int(float(found.group(1))) if found else 0


def scans() -> int:
    """How often the daemon has looked at the machine."""
    return figure("amdvgpu_reconcile_duration_seconds_count")


def heard(action: str) -> int:
    """Of the events of subsystem drm."""
    return figure(f'amdvgpu_uevents_total{{subsystem="drm",action="{action}"}}')


def opened_where_the_daemon_lives(node: Path) -> str:
    """What a process in the daemon's own cgroup is told that opens the node: its device rules are those of that one."""
    procs = f"/sys/fs/cgroup{show('amdvgpud.service', 'ControlGroup')[0]}/cgroup.procs"
    return run("sh", "-c", f"echo $$ >{procs} && : <>{node}", code=None)


@check
def at_boot_it_starts_without_a_driver() -> None:
    until("active", lambda: show("amdvgpud.service", "ActiveState") == ["active"])
    assert show("amdvgpud.service", "NRestarts") == ["0"]
    assert (api("/v1/gpus")["gpus"], RENDER.exists(), KFD.exists()) == ([], False, False)


@check
def a_render_node_that_came_later_may_be_opened_and_no_other_node() -> None:
    pid = main_pid()
    run("modprobe", "vgem")
    until("the render node", RENDER.is_char_device)
    assert opened_where_the_daemon_lives(RENDER) == ""
    assert "Operation not permitted" in opened_where_the_daemon_lives(Path("/dev/kmsg"))
    run("modprobe", "--remove", "vgem")
    assert main_pid() == pid


@check
def drivers_that_come_and_go_are_heard() -> None:
    """The periodic scan is an hour away, so that whatever is scanned was heard of: vgem's card and render node.

    A storm is one scan; but emulated, the events of one driver come so slowly that they may be two.
    """
    with drop_in("events", ONLY_BY_EVENTS):
        run("systemctl", "restart", "amdvgpud.service")
        for action, step in (("add", ["modprobe", "vgem"]), ("remove", ["modprobe", "--remove", "vgem"])):
            before, events = scans(), heard(action)
            run(*step)
            until(
                f"a scan after {' '.join(step)}",
                lambda before=before, events=events, action=action: (  # type: ignore[misc]
                    scans() > before and heard(action) >= events + 2
                ),
            )
            run("udevadm", "settle")
            print(f"    # {action}: {heard(action) - events} events, {scans() - before} scans", flush=True)
        there = api("/v1/gpus")
        run("systemctl", "restart", "amdvgpud.service")
        assert api("/v1/gpus") == there


@check
def amdgpu_without_hardware_is_no_gpu_and_no_trouble() -> None:
    with drop_in("events", ONLY_BY_EVENTS):
        run("systemctl", "restart", "amdvgpud.service")
        pid, before = main_pid(), scans()
        run("modprobe", "amdgpu")
        until("a scan", lambda: scans() > before)
        assert KFD.is_char_device()
        assert Path("/sys/class/kfd/kfd/topology/nodes/0/properties").exists()
        assert (api("/v1/gpus")["gpus"], main_pid()) == ([], pid)
        said = ctl("doctor", code=None)
        assert re.search(r"driver: amdgpu .*is loaded", said), said


@check
def a_kfd_that_came_later_may_be_opened_too() -> None:
    """Its number is not fixed, so that a rule by name was of no use when the daemon's unit started."""
    pid = main_pid()
    until("the rule", lambda: "not permitted" not in opened_where_the_daemon_lives(KFD))
    assert "not permitted" in opened_where_the_daemon_lives(Path("/dev/kmsg"))
    run("systemctl", "restart", "amdvgpud.service")
    assert "not permitted" not in opened_where_the_daemon_lives(KFD)
    assert pid != main_pid()


@check
def the_journal_holds_no_warning() -> None:
    text = run("journalctl", "--no-pager", "--unit=amdvgpud.service", "--priority=warning", "--output=cat")
    assert text.strip() in ("", "-- No entries --"), text
    assert "is ready" in journal()


if __name__ == "__main__":
    sys.exit(main())
