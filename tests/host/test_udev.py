"""Kernel events by the real libudev: in a network namespace of its own (root), and over umockdev (anybody)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A machine's event socket with nobody else on it.
CORNER = r"""
import asyncio, json, time
from amdvgpud.host.udev import UeventWatch
from tests.uevents import seem_to_have_udevd, send_uevent as send

seem_to_have_udevd()
scans, said = [], []

async def changed():
    scans.append(time.monotonic())

async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)

async def main():
    watch = UeventWatch(changed, said.append, quiet_s=0.2, longest_storm_s=2.0)
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0.2)
    print(json.dumps(await scenario(watch)))
    task.cancel()

"""
GPU = "/devices/pci0000:00/0000:00:01.1/0000:05:00.0/drm/card1"


def in_a_corner(scenario: str) -> Any:
    """What the coroutine ``scenario(watch)`` gives, in namespaces of its own."""
    program = CORNER + scenario + "\nasyncio.run(main())\n"
    done = subprocess.run(
        ["unshare", "--net", "--mount", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.root
def test_a_thousand_events_in_a_second_are_one_scan_and_none_is_missed() -> None:
    """The loop turns between them and never rests: on a busy machine a pause of the sender can be a quiet moment."""
    seen, scans = in_a_corner(f"""
async def scenario(watch):
    for number in range(1000):
        send(("add", "remove", "change")[number % 3], "{GPU}")
        if number % 20 == 19:
            await asyncio.sleep(0)
    await until(lambda: scans)
    await asyncio.sleep(0.5)
    return [sum(watch.seen.values()), len(scans)]
""")
    assert (seen, scans) == (1000, 1)


@pytest.mark.root
def test_something_that_never_rests_does_not_hide_what_else_happens() -> None:
    scans = in_a_corner(f"""
async def scenario(watch):
    for _ in range(60):
        send("change", "{GPU}")
        await asyncio.sleep(0.05)
    return len(scans)
""")
    assert scans == 1


@pytest.mark.root
def test_what_a_driver_says_of_its_gpu_is_told_at_once_by_the_pci_address() -> None:
    told, before_the_scan = in_a_corner(f"""
async def scenario(watch):
    send("change", "{GPU}", HOTPLUG="1")
    send("change", "{GPU}", WEDGED="rebind,bus-reset", PID="77", TASK="python3")
    send("change", "/devices/platform/amdgpu_xcp_3/drm/card9", WEDGED="none")
    send("remove", "/devices/platform/amdgpu_xcp_3/drm/card9")
    send("remove", "{GPU.replace("card1", "renderD128")}")
    send("remove", "{GPU}/card1-DP-3")
    send("remove", "{GPU}")
    await until(lambda: len(said) == 2)
    early = not scans
    await until(lambda: scans)
    return [[(w.pci_address, w.wedged, w.culprit) for w in said], early]
""")
    assert told == [["0000:05:00.0", "rebind,bus-reset", "python3, pid 77"], ["0000:05:00.0", None, ""]]
    assert before_the_scan


@pytest.mark.root
def test_an_overrun_and_what_is_no_text_end_in_a_scan_and_nothing_worse() -> None:
    unreadable, heard_after = in_a_corner(f"""
async def scenario(watch):
    send("change", "{GPU}", WEDGED=bytes([0xFF, 0xFE]), NAME=bytes([0xC3, 0x28]))
    for _ in range(30000):  # the loop does not read meanwhile
        send("change", "{GPU}")
    before = -1
    while (now := sum(watch.seen.values())) != before:
        before = now
        await asyncio.sleep(0.5)
    await until(lambda: scans)
    first = len(scans)
    send("remove", "{GPU}")
    await until(lambda: len(scans) > first)
    return [watch.seen["other", "unreadable"], sum(watch.seen.values()) - before]
""")
    assert unreadable >= 2
    assert heard_after == 1


@pytest.mark.root
def test_events_of_other_subsystems_are_not_heard_and_an_action_that_libudev_refuses_costs_a_scan() -> None:
    seen = in_a_corner(f"""
async def scenario(watch):
    send("add", "/devices/virtual/net/tun0", "net")
    send("dance", "{GPU}")
    send("bind", "/devices/pci0000:00/0000:05:00.0", "pci")
    send("change", "/devices/virtual/kfd/kfd", "kfd")
    send("add", "/devices/platform/amdgpu_xcp_3", "platform")
    await until(lambda: sum(watch.seen.values()) == 4)
    return sorted([*key, n] for key, n in watch.seen.items())
""")
    assert seen == [["kfd", "change", 1], ["other", "unreadable", 1], ["pci", "bind", 1], ["platform", "add", 1]]


# ------------------------------------------------------------------------------------------------------- umockdev

TESTBED = r"""
import asyncio, ctypes, json
from amdvgpud.host.udev import UeventWatch

library = ctypes.CDLL("libumockdev.so.0")
library.umockdev_testbed_new.restype = ctypes.c_void_p
testbed = ctypes.c_void_p(library.umockdev_testbed_new())

def add(text):
    assert library.umockdev_testbed_add_from_string(testbed, text.encode(), None)

PCI = "P: /devices/pci0000:00/0000:05:00.0\nE: SUBSYSTEM=pci\nE: DRIVER=amdgpu\nA: vendor=0x1002\\n\n"
CARD = "P: /devices/pci0000:00/0000:05:00.0/drm/card1\nN: dri/card1\nE: SUBSYSTEM=drm\nE: DEVNAME=/dev/dri/card1\n"
scans = []

async def changed():
    scans.append(1)

async def main():
    add(PCI)
    watch = UeventWatch(changed, quiet_s=0.2)
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0.2)
    add(CARD)
    path = b"/sys/devices/pci0000:00/0000:05:00.0/drm/card1"
    library.umockdev_testbed_uevent(testbed, path, b"change")
    # And no umockdev_testbed_remove_device: nobody looks here, and from 0.18.4 on it sends a "remove" itself.
    library.umockdev_testbed_uevent(testbed, path, b"remove")
    async with asyncio.timeout(30):
        while not scans:
            await asyncio.sleep(0.01)
    print(json.dumps([sorted([*key, n] for key, n in watch.seen.items()), len(scans)]))
    task.cancel()

asyncio.run(main())
"""


def test_a_card_that_comes_changes_and_goes_is_heard_and_is_one_scan() -> None:
    done = subprocess.run(
        ["umockdev-wrapper", sys.executable, "-c", TESTBED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    seen, scans = json.loads(done.stdout)
    assert (seen, scans) == ([["drm", "add", 1], ["drm", "change", 1], ["drm", "remove", 1]], 1)
