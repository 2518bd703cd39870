"""What the kubelet waits for: Allocate over its own protocol, 200 times, each freed again.

The daemon is real and its machine simulated; the kubelet is the tests' stand-in, in this process.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.serve.kube.kubelet import Plugin, a_kubelet

CYCLES: Final = 200
LIMIT_MS: Final = 20.0
REGISTER_LIMIT_S: Final = 2.0
PROFILE: Final = "amdvgpu.io/10c"


def figures() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, entry of bench.json) each."""
    registered_s, cut_ms, whole_ms = asyncio.run(_measured())
    yield "kubelet: from the socket's return to devices shown", _entry([registered_s], "s", REGISTER_LIMIT_S)
    yield f"kubelet: Allocate of a pre-cut slice, p99 of {CYCLES}", _entry([_p99(cut_ms)], "ms", LIMIT_MS)
    yield f"kubelet: Allocate of a whole GPU, p99 of {CYCLES}", _entry([_p99(whole_ms)], "ms", LIMIT_MS)


async def _measured() -> tuple[float, list[float], list[float]]:
    with tempfile.TemporaryDirectory(prefix="amdvgpud-bench-", dir="/dev/shm") as folder:
        at = Path(folder)
        async with a_kubelet(at / "kubelet" / "device-plugins") as kubelet:
            daemon = subprocess.Popen(
                [
                    *(Path(sys.executable).with_name("amdvgpud"), "--simulate", "3*mi300x", "--rest-tcp", ""),
                    *("--run-dir", at / "run", "--state-dir", at / "state", "--cdi-dir", at / "cdi"),
                    *("--kubelet-mode", "profiles,whole", "--kubelet-profiles", "10c=10%:16GiB:16"),
                    *("--kubelet-dir", kubelet.dir, "--kubelet-pod-resources", kubelet.pod_resources_socket),
                    *("--log-level", "error"),
                ]
            )
            try:
                await kubelet.registered(PROFILE, "amd.com/gpu", within_s=60)
                await kubelet.restart()
                began_s = time.perf_counter()
                cut = await kubelet.registered("amd.com/gpu", PROFILE, within_s=60)
                registered_s = time.perf_counter() - began_s
                cut_ms = await _cycles(at, cut)
                return registered_s, cut_ms, await _cycles(at, kubelet.plugins["amd.com/gpu"])
            finally:
                daemon.send_signal(signal.SIGTERM)
                daemon.wait(30)
                subprocess.run(["umount", "-l", at / "run" / "slices"], check=False, capture_output=True)


async def _cycles(at: Path, plugin: Plugin) -> list[float]:
    """Milliseconds of each; what was taken is given back by the API, which is not counted."""
    took = []
    for n in range(CYCLES):
        device = plugin.healthy[n % len(plugin.healthy)]
        began_s = time.perf_counter()
        await plugin.allocate([device])
        took.append((time.perf_counter() - began_s) * 1000)
        await asyncio.to_thread(_free, at)
    return took


def _free(at: Path) -> None:
    for lease in json.loads(_ask(at, "GET", "/v1/leases"))["leases"]:
        _ask(at, "DELETE", f"/v1/leases/{lease['id']}")


def _ask(at: Path, method: str, path: str) -> bytes:
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    with connection.sock as line:
        line.connect(str(at / "run" / "api.sock"))
        connection.request(method, path)
        answer = connection.getresponse()
        if answer.status >= 400:
            raise SystemExit(f"{method} {path}: {answer.status} {answer.read().decode()}")
        return answer.read()


def _p99(took: list[float]) -> float:
    return statistics.quantiles(took, n=100)[98]


def _entry(runs: list[float], unit: str, limit: float) -> dict[str, Any]:
    median = statistics.median(runs)
    return {"median": round(median, 3), "unit": unit, "limit": limit, "ok": median <= limit, "runs": runs}


if __name__ == "__main__":
    for name, entry in figures():
        print(name, entry)
