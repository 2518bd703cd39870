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


def scans() -> int:
    """How often the daemon has looked at the machine."""
    with urlopen("http://127.0.0.1:9841/metrics") as answer:
        found = re.search(r"^amdvgpu_reconcile_duration_seconds_count (\d+)", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(float(found.group(1)))


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
    """The periodic scan is an hour away, so that whatever is scanned was heard of."""
    with drop_in("events", ONLY_BY_EVENTS):
        run("systemctl", "restart", "amdvgpud.service")
        for step in (["modprobe", "vgem"], ["modprobe", "--remove", "vgem"]):
            before = scans()
            run(*step)
            until(f"a scan after {' '.join(step)}", lambda before=before: scans() > before)  # type: ignore[misc]


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
def the_journal_holds_no_warning() -> None:
    text = run("journalctl", "--no-pager", "--unit=amdvgpud.service", "--priority=warning", "--output=cat")
    assert text.strip() in ("", "-- No entries --"), text
    assert "is ready" in journal()


if __name__ == "__main__":
    sys.exit(main())
