"""What the checks on a machine with systemd as PID 1 share: tools, and the way they are run and reported.

A file of checks imports this one from beside it, marks its functions with ``check`` and ends with ``sys.exit(main())``.
It prints a line for each check, ``ok <sentence>``, ``skipped <sentence>: <why>`` or ``not ok <sentence>: <what was
seen>``, and ends with 1 if one failed. Arguments: only checks with one of these words. Runs as root inside the machine.
There /mnt/packages holds the packages, or /mnt/tree what they would install; /mnt/kfdclient takes VRAM. Only the
standard library is at hand.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SLICES = Path("/run/amdvgpud/slices")
DROP_INS = Path("/etc/systemd/system/amdvgpud.service.d")
SPEC = Path("/run/cdi/amdvgpu.io-slice.json")
KFDCLIENT = "/mnt/kfdclient"
WAIT_S = float(os.environ.get("WAIT_S", "40"))
"""For what must happen soon. Only a failure takes that long."""

checks: list[Callable[[], None]] = []


class Skipped(Exception):
    """Why a check cannot be made on this machine."""


def check(function: Callable[[], None]) -> Callable[[], None]:
    checks.append(function)
    return function


def run(*argv: str, code: int | None = 0) -> str:
    """Both streams of a command; AssertionError where it did not end with ``code`` (None: any)."""
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL)
    assert code is None or done.returncode == code, f"{' '.join(argv)} ended with {done.returncode}: {done.stdout}"
    return done.stdout


def until(what: str, holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.05)


def show(unit: str, *properties: str) -> list[str]:
    text = run("systemctl", "show", unit, *(f"--property={p}" for p in properties))
    found = dict(line.split("=", 1) for line in text.splitlines())
    return [found[p] for p in properties]


def packages(folder: str) -> list[str]:
    return sorted(str(path) for path in Path("/mnt", folder).iterdir() if path.suffix in (".deb", ".rpm"))


def main_pid() -> int:
    return int(show("amdvgpud.service", "MainPID")[0])


def journal(since: str = "") -> str:
    run("journalctl", "--sync", code=None)
    after = [f"--after-cursor={since}"] if since else []
    return run("journalctl", "--no-pager", "--unit=amdvgpud.service", "--output=cat", *after)


def cursor() -> str:
    run("journalctl", "--sync", code=None)
    return run("journalctl", "--lines=0", "--show-cursor").rpartition("cursor: ")[2].strip()


def ctl(*argv: str, code: int | None = 0) -> str:
    return run("amdvgpuctl", *argv, code=code)


def api(path: str) -> dict[str, Any]:
    """The answer to a GET; waits for a daemon that is just starting, as the socket belongs to systemd."""
    line = http.client.HTTPConnection("localhost", timeout=WAIT_S)
    line.sock = socket.socket(socket.AF_UNIX)
    line.sock.connect("/run/amdvgpud/api.sock")
    line.request("GET", path)
    answer: dict[str, Any] = json.loads(line.getresponse().read())
    return answer


def names() -> list[str]:
    return sorted(item["name"] for item in api("/v1/slices")["slices"])


def files_of(name: str) -> dict[str, tuple[int, bytes]]:
    """Inode and content of the slice's policy and ledger."""
    guest = SLICES / name / "guest"
    return {p: ((guest / p).stat().st_ino, (guest / p).read_bytes()) for p in ("policy", "ledger")}


def used_bytes(name: str) -> int:
    return sum(gpu["used_bytes"] for gpu in api(f"/v1/slices/{name}/usage")["gpus"])


@contextmanager
def drop_in(name: str, text: str) -> Iterator[None]:
    path = DROP_INS / f"{name}.conf"
    path.write_text(text)
    run("systemctl", "daemon-reload")
    try:
        yield
    finally:
        path.unlink()
        run("systemctl", "daemon-reload")


def clients() -> list[int]:
    return [int(pid) for pid in run("pgrep", "-f", f"^{KFDCLIENT}", code=None).split()]


@contextmanager
def program(slice_name: str, gib: int) -> Iterator[int]:
    """A program in the slice that holds ``gib`` GiB; its pid."""
    argv = ["amdvgpuctl", "run", "--slice", slice_name, "--require-gate", "-q", "--", KFDCLIENT, "--step", "1G"]
    started = subprocess.Popen(
        [*argv, "--count", str(gib), "--hold"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        until(
            f"{gib} GiB of {slice_name} in use",
            lambda: (clients() and used_bytes(slice_name) == gib << 30) or started.poll() is not None,
        )
        assert started.poll() is None, f"the program ended: {started.stdout.read()}"  # type: ignore[union-attr]
        yield clients()[-1]
    finally:
        started.kill()
        started.wait()
        run("pkill", "-KILL", "-f", f"^{KFDCLIENT}", code=None)
        until("the lease has ended", lambda: api("/v1/leases")["leases"] == [])


def image(*more: str) -> Path:
    """A root for containers: the client of the KFD, cat, echo, sleep and ``more``, with this system's own C library,
    because the simulated KFD was built for that one; and a static program, if one was staged.
    """
    path = Path("/tmp/image.tar")
    programs = (KFDCLIENT, "/usr/bin/cat", "/usr/bin/echo", "/usr/bin/sleep", *more)
    libraries = {word for word in run("ldd", *programs).split() if word.startswith("/") and not word.endswith(":")}
    with tarfile.open(path, "w") as tar:
        for folder in ("dev", "etc", "proc", "run", "sys", "tmp", "usr/lib"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for file in (*programs, *sorted(libraries)):
            tar.add(Path(file).resolve(), arcname=file)
        if Path("/mnt/static").exists():
            tar.add("/mnt/static", arcname="static")
    return path


def install() -> None:
    """The packages, or by hand what their scripts do for a tree as packaging/stage.py lays it out."""
    tree = Path("/mnt/tree")
    if not tree.exists():
        # rpm: on Debian, whose packages it does not know.
        rpm = ["rpm", "--install", "--nodeps"]
        run(*(rpm if shutil.which("rpm") else ["dpkg", "--install"]), *packages("packages"))
        return
    run("cp", "--archive", f"{tree}/.", "/")
    run("systemd-sysusers", "amdvgpud.conf")
    run("systemd-tmpfiles", "--create", "amdvgpud.conf")
    run("systemctl", "daemon-reload")
    run("systemctl", "enable", "--now", "amdvgpud.socket", "amdvgpud.service")


def simulate(gpus: str) -> None:
    """From now on the daemon serves simulated GPUs."""
    (DROP_INS / "simulate.conf").write_text(f"[Service]\nEnvironment=AMDVGPUD_SIMULATE={gpus}\n")
    run("systemctl", "daemon-reload")
    run("systemctl", "restart", "amdvgpud.service")


def main() -> int:
    DROP_INS.mkdir(parents=True, exist_ok=True)
    wanted, failed = sys.argv[1:], 0
    for function in checks:
        name = function.__name__.replace("_", " ")
        if wanted and not any(word in name for word in wanted):
            continue
        started = time.monotonic()
        # The checks start it more often in a minute than the unit allows.
        run("systemctl", "reset-failed", "amdvgpud.service", code=None)
        try:
            function()
            print(f"ok {name} ({time.monotonic() - started:.1f} s)", flush=True)
        except Skipped as reason:
            print(f"skipped {name}: {reason}", flush=True)
        except Exception as error:
            failed += 1
            where = traceback.extract_tb(error.__traceback__)[-1].lineno
            said = str(error).replace("\n", "\n    ") or traceback.format_exc().replace("\n", "\n    ")
            print(f"not ok {name}: line {where}: {said}", flush=True)
            print("    journal: " + journal()[-1500:].replace("\n", "\n    "), flush=True)
    return 1 if failed else 0
