"""A real Prometheus scrapes a real amdvgpud on simulated GPUs, fires an alert, and answers every panel's query."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from amdvgpud import _abi
from tests.monitoring.kit import RULES, SCRAPE, Expression, alerts, expressions

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]

BIN = Path(sys.executable).parent
PATIENCE_S = 25.0
"""What is waited for comes within a few seconds; on a busy machine later. After this it counts as not come."""

MAY_BE_EMPTY = {
    "amdvgpud-node: Refused or failed changes": "nothing was refused",
    "amdvgpud-node: Changes of health, by who found them": "no GPU has changed",
    "amdvgpud-node: Time of changes (95th percentile)": "no change since the first scrape",
}


def eventually(what: str, read: Callable[[], Any]) -> Any:
    """What ``read`` says once it is true; fail, naming ``what``, when that does not come."""
    end_s = time.monotonic() + PATIENCE_S
    while not (said := read()):
        assert time.monotonic() < end_s, f"waited {PATIENCE_S:g} s in vain for {what}"
        time.sleep(0.1)
    return said


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Prometheus:
    port: int

    def ask(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["data"]

    def firing(self) -> dict[str, dict[str, str]]:
        return {a["labels"]["alertname"]: a for a in self.ask("alerts")["alerts"] if a["state"] == "firing"}

    def result(self, expression: str) -> list[Any]:
        return list(self.ask("query", query=expression)["result"])


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a program; it ends with the tests of this file, the last one first."""
    programs: list[subprocess.Popen[bytes]] = []

    def start(*argv: str | Path, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as out:
            programs.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out))
        return programs[-1]

    yield start
    for program in reversed(programs):
        program.send_signal(signal.SIGTERM)
        try:
            program.wait(15)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()


@pytest.fixture(scope="module")
def prometheus(started: Callable[..., subprocess.Popen[bytes]]) -> Iterator[Prometheus]:
    """Prometheus with the shipped files, which has scraped a daemon with a slice that a program fills.

    Of the files only what would take minutes is changed: the port, the interval, and how long trouble must last.
    """
    home = Path(tempfile.mkdtemp(prefix="amdvgpu-prometheus-", dir="/dev/shm"))
    run, ctl, port = home / "run", BIN / "amdvgpuctl", free_port()
    try:
        daemon = started(
            *(BIN / "amdvgpud", "--simulate", "mi300x,rx9070xt", "--run-dir", run, "--state-dir", home / "state"),
            *("--cdi-dir", home / "cdi", "--rest-tcp", f"127.0.0.1:{port}", "--tick-s", "0.2", "--rescan-s", "1"),
            log=home / "daemon.log",
        )
        eventually("the daemon", lambda: (run / "api.sock").exists() or daemon.poll() is not None)
        assert daemon.poll() is None, (home / "daemon.log").read_text()
        asked_for = ("slice", "create", "alice", "--gpu", "0", "--vram", "4GiB", "--compute", "25%")
        subprocess.run([ctl, "--socket", run / "api.sock", *asked_for], check=True, capture_output=True)

        (home / "amdvgpud.rules.yml").write_text(re.sub(r"(?m)^(\s+for:) \d+m$", r"\1 1s", RULES.read_text()))
        scrape = SCRAPE.read_text().replace("127.0.0.1:9841", f"127.0.0.1:{port}")
        scrape = scrape.replace("scrape_interval: 15s", "scrape_interval: 1s")
        (home / "prometheus.yml").write_text(f"global: {{evaluation_interval: 1s}}\n{scrape}")
        asked = Prometheus(free_port())
        server = started(
            *("prometheus", f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/tsdb"),
            f"--web.listen-address=127.0.0.1:{asked.port}",
            log=home / "prometheus.log",
        )

        def scraped() -> bool:
            assert server.poll() is None, (home / "prometheus.log").read_text()
            try:
                return bool(asked.result('amdvgpu_slice_vram_used_bytes{slice="alice"} == 0'))
            except OSError:
                return False

        eventually("the first sample", scraped)
        assert asked.firing() == {}
        client = Path(_abi.__file__).with_name("kfdclient")
        in_slice = [ctl, "--socket", run / "api.sock", "run", "-q", "--slice", "alice", "--"]
        # Takes all of the quota at once and is refused the next block; sleeps as /dev/null is its input.
        started(*in_slice, "sh", "-c", f"sleep 60 | {client} --step 256M --hold", log=home / "program.log")
        yield asked
    finally:
        subprocess.run(["umount", "-l", run / "slices"], check=False, capture_output=True)
        shutil.rmtree(home, ignore_errors=True)


def test_a_slice_that_is_filled_fires_the_shipped_alert(prometheus: Prometheus) -> None:
    fired = eventually("the alert", lambda: prometheus.firing().get("AmdvgpuSliceNearLimit"))
    assert {k: fired["labels"][k] for k in ("slice", "job", "partition", "severity")} == {
        "slice": "alice",
        "job": "amdvgpud",
        "partition": "0",
        "severity": "warning",
    }
    assert re.fullmatch(r"slice alice on 127\.0\.0\.1:\d+ uses 100% of its VRAM", fired["annotations"]["summary"])
    assert set(prometheus.firing()) == {"AmdvgpuSliceNearLimit"}


def test_every_alert_is_judged_without_an_error(prometheus: Prometheus) -> None:
    def judged() -> list[dict[str, Any]]:
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        return rules if all(rule["health"] != "unknown" for rule in rules) else []

    assert {rule["name"]: rule["health"] for rule in eventually("a round", judged)} == dict.fromkeys(alerts(), "ok")


def _query(expression: Expression) -> str:
    text = expression.text.replace("$__rate_interval", "30s")
    return re.sub(r"\$(?!__)\w+", ".*", text)


def test_every_panel_gets_an_answer(prometheus: Prometheus) -> None:
    """A query with a wrong label or a wrong join is valid, and answers nothing: so each must answer something."""
    eventually("the slice's use", lambda: prometheus.result('amdvgpu_slice_vram_used_bytes{slice="alice"} > 0'))
    panels = [e for e in expressions() if not e.where.startswith("alert") and e.where not in MAY_BE_EMPTY]

    def empty() -> list[str]:
        return [f"{e.where}: {e.text}" for e in panels if not prometheus.result(_query(e))]

    # Rates need two samples, and some of what is sampled is looked at only every few seconds.
    with contextlib.suppress(AssertionError):
        eventually("all panels", lambda: not empty())
    assert empty() == []
    for expression in expressions():
        if expression.where in MAY_BE_EMPTY:
            prometheus.result(_query(expression))


def test_the_variables_of_the_dashboards_find_their_values(prometheus: Prometheus) -> None:
    assert prometheus.ask("label/slice/values", **{"match[]": "amdvgpu_slice_vram_limit_bytes"}) == ["alice"]
    gpus = prometheus.ask("label/gpu_uuid/values", **{"match[]": "amdvgpu_gpu_info"})
    assert [gpu[:4] for gpu in gpus] == ["GPU-", "GPU-"]
