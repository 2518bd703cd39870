"""Runs in network and mount namespaces of its own: a daemon, faults, and how long each takes to show. Prints JSON.

Used by tests/test_health_daemon.py and by bench/run.py.
"""

from __future__ import annotations

import errno
import http.client
import json
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from amdvgpud.sim.driver import SimulatedDriver
from amdvgpud.sim.models import parse_simulation
from tests.daemons import a_daemon
from tests.uevents import seem_to_have_udevd, send_uevent

NODE = "3*rx7900xtx"
PULSE_S = 1.0


OPTIONS = (f"--simulate={NODE}", f"--health-pulse-s={PULSE_S}", "--rescan-s=3600", "--health-good-looks=1")


class Corner:
    """A daemon that keeps to ``folder``, looked at until it shows something."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "run/api.sock"
        self.root = folder / "run/simulated"
        self.until(self.socket.exists)
        self.driver = SimulatedDriver(parse_simulation(NODE), self.root)
        self.gpus: list[dict[str, Any]] = self.get("/v1/gpus")["gpus"]

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.socket))
        connection.request("GET", path)
        content = connection.getresponse().read().decode()
        connection.close()
        return content if path == "/metrics" else json.loads(content)

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

        self.driver.unplug(third["pci_address"])
        send_uevent("remove", self.path(third))
        seen["unplugged_s"] = self.until(lambda: len(self.get("/v1/gpus")["gpus"]) == 2)
        return seen


def main() -> None:
    seem_to_have_udevd()
    with tempfile.TemporaryDirectory(dir="/run") as name, a_daemon(Path(name), *OPTIONS) as daemon:
        print(json.dumps(Corner(Path(name)).measure()))
        daemon.terminate()
        daemon.wait(30)


if __name__ == "__main__":
    main()
