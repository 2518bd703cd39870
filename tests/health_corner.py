"""Runs in network and mount namespaces of its own, and prints JSON: a daemon, faults, and how long each takes to show;
or (``storm``) what it makes of a machine that changes under it, and what a fresh start makes of that; or (``scans``)
how often it scans for a thousand events.

Used by tests/test_health_daemon.py and by bench/run.py.
"""

from __future__ import annotations

import errno
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from amdvgpud.host.udev import QUIET_S
from amdvgpud.sim.driver import SimulatedDriver
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree
from tests.daemons import a_daemon
from tests.uevents import seem_to_have_udevd, send_uevent

NODE = "3*rx7900xtx"
PULSE_S = 1.0
SCANS = "amdvgpu_reconcile_duration_seconds_count"


STORMY_NODE = "3*mi300x"
OPTIONS = (f"--health-pulse-s={PULSE_S}", "--rescan-s=3600", "--health-good-looks=1")


class Corner:
    """A daemon that keeps to ``folder``, looked at until it shows something."""

    def __init__(self, folder: Path, node: str = NODE, root: Path | None = None) -> None:
        self.folder = folder
        self.socket = folder / "run/api.sock"
        self.root = root or folder / "run/simulated"
        self.until(self.socket.exists)
        self.driver = SimulatedDriver(parse_simulation(node), self.root)
        self.gpus: list[dict[str, Any]] = self.get("/v1/gpus")["gpus"]

    def get(self, path: str) -> Any:
        content = self.ask("GET", path)
        return content if path == "/metrics" else json.loads(content)

    def ask(self, method: str, path: str, body: str | None = None) -> str:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.socket))
        connection.request(method, path, body, {} if body is None else {"Content-Type": "application/json"})
        content = connection.getresponse().read().decode()
        connection.close()
        return content

    def until(self, condition: Callable[[], bool]) -> float:
        """Seconds until it holds."""
        began_s = time.perf_counter()
        while not condition():
            if time.perf_counter() - began_s > 40:  # and then it ends the daemon, before whoever started it gives up
                raise TimeoutError(condition)
            time.sleep(0.01)
        return time.perf_counter() - began_s

    def shows(self, gpu: dict[str, Any], condition: str) -> bool:
        """In API and metrics alike."""
        if self.get(f"/v1/gpus/{gpu['id']}")["health"]["condition"] != condition:
            return False
        line = f'amdvgpu_gpu_health_state{{gpu_uuid="{gpu["id"]}",state="{condition}"}} 1'
        return line in self.get("/metrics").splitlines()

    def path(self, gpu: dict[str, Any]) -> str:
        return f"/devices/pci0000:00/{gpu['pci_address']}/drm/card1"

    def measure(self) -> dict[str, float]:
        first, second, third = self.gpus
        seen = {"pulse_s": PULSE_S}
        self.until(lambda: self.shows(first, "healthy"))
        asked = self.root / "log.jsonl"
        self.until(lambda: asked.read_text().count('"op":"SMI_EVENTS"') == 3)

        send_uevent("change", self.path(first), WEDGED="rebind")
        seen["wedged_s"] = self.until(lambda: self.shows(first, "unhealthy"))

        self.driver.tell(second["partitions"][0]["kfd_gpu_id"], "3 1 ring timeout")
        seen["kfd_event_s"] = self.until(lambda: self.shows(second, "unknown"))
        self.driver.tell(second["partitions"][0]["kfd_gpu_id"], "4 1")
        seen["recovered_s"] = self.until(lambda: self.shows(second, "healthy"))

        self.driver.set_fault(second["pci_address"], errno.EIO)
        seen["without_event_s"] = self.until(lambda: self.shows(second, "unhealthy"))

        self.driver.set_fault(second["pci_address"], None)
        self.until(lambda: self.shows(second, "healthy"))
        self.driver.set_fault(second["pci_address"], errno.EIO)
        send_uevent("change", self.path(second))
        seen["with_event_s"] = self.until(lambda: self.shows(second, "unhealthy"))

        self.driver.unplug(third["pci_address"])
        send_uevent("remove", self.path(third))
        seen["unplugged_s"] = self.until(lambda: len(self.get("/v1/gpus")["gpus"]) == 2)
        return seen

    def scans(self) -> dict[str, float]:
        """A thousand events over nine tenths of a second, and the scans that follow."""
        gpu = self.gpus[0]
        heard, before = self.count("amdvgpu_uevents_total"), self.count(SCANS)
        began_s = time.perf_counter()
        for number in range(1000):
            time.sleep(max(0.0, began_s + number * 0.0009 - time.perf_counter()))
            send_uevent("change", self.path(gpu))
        sent_s = time.perf_counter() - began_s
        self.until(lambda: self.count("amdvgpu_uevents_total") - heard >= 1000 and self.count(SCANS) > before)
        time.sleep(2 * QUIET_S)  # one more would come after that
        return {"sent_s": sent_s, "scans": self.count(SCANS) - before}

    def count(self, name: str) -> float:
        """Sum of the series ``name``."""
        lines = self.get("/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def storm(self) -> None:
        """The machine changes, and tells of it in more events than anybody can read."""
        goes, is_cut, returns = self.gpus
        for name, gpu in (("alice", goes), ("bob", is_cut), ("carol", returns)):
            self.ask("PUT", f"/v1/slices/{name}", json.dumps({"vram": "8GiB", "compute": "25%", "on": [gpu["id"]]}))
        self.driver.unplug(returns["pci_address"])
        for number in range(1000):
            send_uevent(("add", "remove", "change")[number % 3], self.path(returns))
            if number == 300:
                mode = f"sys/bus/pci/devices/{is_cut['pci_address']}/current_compute_partition"
                self.driver.write(self.root / mode, "CPX")
            if number == 600:
                self.driver.unplug(goes["pci_address"])
            if number == 900:
                self.driver.plug(returns["pci_address"])
        for _ in range(30_000):  # the queue of the daemon's socket overruns
            send_uevent("change", self.path(is_cut))
        self.until(lambda: self.partitions() == {is_cut["id"]: 8, returns["id"]: 1})

    def partitions(self) -> dict[str, int]:
        return {gpu["id"]: len(gpu["partitions"]) for gpu in self.get("/v1/gpus")["gpus"]}

    def state(self) -> dict[str, Any]:
        """All that is shown of GPUs and slices, but for times and for figures that are a sample of some moment."""
        self.until(lambda: all(self.shows(gpu, "healthy") for gpu in self.get("/v1/gpus")["gpus"]))
        seen = {"gpus": self.get("/v1/gpus")["gpus"], "slices": self.get("/v1/slices")["slices"]}
        for gpu in seen["gpus"]:
            del gpu["health"]["since_s"]
        for item in seen["slices"]:
            del item["unmanaged_processes"]
            for share in item["shares"]:
                del share["driver_bytes"], share["untracked_bytes"]
        return seen | {file.name: json.loads(file.read_text()) for file in (self.folder / "cdi").iterdir()}


def measure(folder: Path) -> dict[str, float]:
    with a_daemon(folder, f"--simulate={NODE}", *OPTIONS) as daemon:
        seen = Corner(folder).measure()
        end(daemon)
        return seen


def scans(folder: Path) -> dict[str, float]:
    with a_daemon(folder, f"--simulate={NODE}", *OPTIONS) as daemon:
        corner = Corner(folder)
        corner.until(lambda: all(corner.shows(gpu, "healthy") for gpu in corner.gpus))
        seen = corner.scans()
        end(daemon)
        return seen


def storm(folder: Path) -> list[dict[str, Any]]:
    """What the daemon shows of a machine that was there before it, and what the next one shows."""
    states = []
    machine = folder / "machine"
    build_tree(parse_simulation(STORMY_NODE), machine)
    for start in range(2):
        with a_daemon(folder, f"--sysfs-root={machine}", *OPTIONS) as daemon:
            corner = Corner(folder, STORMY_NODE, machine)
            if start == 0:
                corner.storm()
            states.append(corner.state())
            end(daemon)
    return states


def end(daemon: subprocess.Popen[Any]) -> None:
    daemon.terminate()
    daemon.wait(30)


def main() -> None:
    seem_to_have_udevd()
    with tempfile.TemporaryDirectory(dir="/run") as name:
        wanted = {"storm": storm, "scans": scans}.get(sys.argv[-1], measure)
        print(json.dumps(wanted(Path(name))))


if __name__ == "__main__":
    main()
