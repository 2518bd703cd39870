#!/usr/bin/python3
"""What an operator does with the installed packages, on a machine whose PID 1 is systemd. Runs as root inside it.

/mnt/debs holds the packages, /mnt/newer the same of a later version with another gate in it (``stage`` makes both); or
/mnt/tree is what they would install. /mnt/kfdclient takes VRAM.
Prints a line for each check, ``ok <sentence>`` or ``not ok <sentence>: <what was seen>``; ends with 1 if one failed.
Arguments: only checks with one of these words. Standard library only.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
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
WAIT_S = 40.0
"""For what must happen soon. Only a failure takes that long."""

checks: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    checks.append(function)
    return function


# ------------------------------------------------------------------------------------------------------------ tools


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
    return [str(path) for path in Path("/mnt", folder).glob("*.deb")]


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


KFDCLIENT = "/mnt/kfdclient"


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


# ----------------------------------------------------------------------------------------------------------- checks


@check
def the_packages_install_and_the_daemon_is_ready() -> None:
    if Path("/mnt/tree").exists():
        _install_by_hand(Path("/mnt/tree"))
    else:
        run("dpkg", "--install", *packages("debs"))
    assert show("amdvgpud.service", "ActiveState", "SubState", "Type", "NRestarts") == [
        "active",
        "running",
        "notify",
        "0",
    ]
    assert run("systemctl", "is-enabled", "amdvgpud.service", "amdvgpud.socket").split() == ["enabled", "enabled"]
    failed = run("systemctl", "list-units", "--failed", "--no-legend", "--plain", "*amdvgpu*")
    assert failed == "", failed


def _install_by_hand(tree: Path) -> None:
    """What the packages' scripts do, for a tree as packaging/stage.py lays it out."""
    run("cp", "--archive", f"{tree}/.", "/")
    run("systemd-sysusers", "amdvgpud.conf")
    run("systemd-tmpfiles", "--create", "amdvgpud.conf")
    run("systemctl", "daemon-reload")
    run("systemctl", "enable", "--now", "amdvgpud.socket", "amdvgpud.service")


@check
def without_a_gpu_it_idles() -> None:
    assert api("/v1/gpus")["gpus"] == []
    assert not SPEC.exists()


@check
def with_gpus_it_lists_them() -> None:
    (DROP_INS / "simulate.conf").write_text("[Service]\nEnvironment=AMDVGPUD_SIMULATE=2*mi300x\n")
    run("systemctl", "daemon-reload")
    run("systemctl", "restart", "amdvgpud.service")
    products = [gpu["product_name"] for gpu in api("/v1/gpus")["gpus"]]
    assert products == ["AMD Instinct MI300X"] * 2, products
    assert ctl("gpu", "list").count("AMD Instinct MI300X") == 2
    assert "2 GPUs" in show("amdvgpud.service", "StatusText")[0]


@check
def a_driver_that_comes_later_is_found() -> None:
    """The tree of a machine comes up under a daemon that started without; the device rule has a check of its own."""
    root = Path("/run/later")
    (root / "sys").mkdir(parents=True)
    variables = f"AMDVGPUD_SIMULATE= AMDVGPUD_SYSFS_ROOT={root} AMDVGPUD_RESCAN_S=0.5"
    with drop_in("without-driver", f"[Service]\nEnvironment={variables}\n"):
        run("systemctl", "restart", "amdvgpud.service")
        pid = main_pid()
        assert (api("/v1/gpus")["gpus"], SPEC.exists()) == ([], False)
        run("cp", "--archive", "/run/amdvgpud/simulated/.", str(root))
        until("both GPUs", lambda: len(api("/v1/gpus")["gpus"]) == 2)
        assert main_pid() == pid
    run("systemctl", "restart", "amdvgpud.service")


@check
def a_slice_is_made_with_its_files_and_its_name() -> None:
    ctl("slice", "create", "alice", "--gpu", "0", "--vram", "16GiB", "--compute", "25%")
    assert names() == ["alice"]
    assert [d["name"] for d in json.loads(SPEC.read_text())["devices"]] == ["alice"]
    assert run("findmnt", "--noheadings", "--output=FSTYPE", str(SLICES)).strip() == "tmpfs"


@check
def the_socket_lets_in_root_and_the_group_only() -> None:
    found = Path("/run/amdvgpud/api.sock").stat()
    assert f"{found.st_mode & 0o777:o}" == "660"
    assert run("getent", "group", "amdvgpu").split(":")[2] == str(found.st_gid)
    stranger = ["setpriv", "--reuid=65534", "--regid=65534"]
    assert "ermi" in run(*stranger, "--clear-groups", "amdvgpuctl", "slice", "list", code=4)
    run(*stranger, f"--groups={found.st_gid}", "amdvgpuctl", "slice", "create", "grp", "--gpu", "1", "--vram", "1GiB")
    run(*stranger, f"--groups={found.st_gid}", "amdvgpuctl", "slice", "delete", "grp")


@check
def a_rootless_owner_passes_through_to_the_own_slice_only() -> None:
    group = str(Path("/run/amdvgpud/api.sock").stat().st_gid)
    member = ["setpriv", "--reuid=1234", "--regid=1234", f"--groups={group}"]
    run(*member, "amdvgpuctl", "slice", "create", "owned", "--gpu", "1", "--vram", "1GiB")
    try:
        assert (SLICES / "owned").stat().st_uid == 1234
        owner = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups"]
        assert "mem_banks" in run(*owner, "ls", str(SLICES / "owned" / "guest"))
        run(*owner, "ls", str(SLICES / "alice"), code=2)
        run(*owner, "ls", str(SLICES), code=2)
    finally:
        ctl("slice", "delete", "owned")


@check
def a_kill_restarts_it_and_running_programs_keep_their_ledger() -> None:
    with program("alice", 2):
        before, pid = files_of("alice"), main_pid()
        os.kill(pid, signal.SIGKILL)
        until("another main process", lambda: main_pid() not in (0, pid))
        until("ready", lambda: show("amdvgpud.service", "SubState") == ["running"])
        assert names() == ["alice"]
        assert files_of("alice") == before
        assert used_bytes("alice") == 2 << 30


@check
def what_a_killed_program_held_comes_back() -> None:
    with program("alice", 3) as pid:
        os.kill(pid, signal.SIGKILL)
        until("nothing in use", lambda: used_bytes("alice") == 0)


@check
def what_the_first_process_of_a_killed_container_held_comes_back() -> None:
    if str(Path("/proc/self/ns/pid").readlink()) != "pid:[4026531836]":
        raise Skipped(
            "only from the machine's own pid namespace can a daemon tell that another namespace's process is dead"
        )
    argv = ["unshare", "--pid", "--fork", "--mount-proc", KFDCLIENT, "--step", "1G", "--count", "2", "--hold"]
    held = subprocess.Popen(
        ["amdvgpuctl", "run", "--slice", "alice", "-q", "--", *argv], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        until("2 GiB in use", lambda: used_bytes("alice") == 2 << 30)
        run("pkill", "-KILL", "-f", f"^{KFDCLIENT}")
        until("nothing in use", lambda: used_bytes("alice") == 0)
    finally:
        held.kill()
        held.wait()
        run("pkill", "-KILL", "-f", f"^{KFDCLIENT}", code=None)
        until("the lease has ended", lambda: api("/v1/leases")["leases"] == [])


@check
def stop_and_start_keep_slices_and_ledgers() -> None:
    with program("alice", 2):
        before = files_of("alice")
        started = time.monotonic()
        run("systemctl", "stop", "amdvgpud.socket", "amdvgpud.service")
        assert time.monotonic() - started < 5
        assert show("amdvgpud.service", "Result", "ExecMainStatus") == ["success", "0"]
        assert files_of("alice") == before
        run("systemctl", "start", "amdvgpud.service")
        assert files_of("alice") == before
        assert (names(), used_bytes("alice")) == (["alice"], 2 << 30)


@check
def a_call_starts_a_stopped_daemon() -> None:
    run("systemctl", "stop", "amdvgpud.service")
    assert names() == ["alice"]


@check
def a_reload_with_an_error_fails_and_changes_nothing() -> None:
    config = Path("/etc/amdvgpud/amdvgpud.toml")
    good, pid = config.read_text(), main_pid()
    try:
        config.write_text("log_levle = 1\n" + good)
        run("systemctl", "reload", "amdvgpud.service", code=1)
        assert "log_level?" in journal(), "the nearest name is not in the journal"
        since = cursor()
        os.kill(pid, signal.SIGHUP)  # past the check of the unit
        until("the refusal in the journal", lambda: "log_level?" in journal(since))
        assert show("amdvgpud.service", "MainPID", "SubState") == [str(pid), "running"]
        assert names() == ["alice"]
        config.write_text('log_level = "debug"\n' + good)
        run("systemctl", "reload", "amdvgpud.service")
        until("the new level", lambda: api("/v1/system")["config"]["log_level"] == "debug")
    finally:
        config.write_text(good)
        run("systemctl", "reload", "amdvgpud.service")
    assert main_pid() == pid


@check
def a_hanging_daemon_is_found_and_started_anew() -> None:
    with drop_in("watchdog", "[Service]\nWatchdogSec=3\nEnvironment=AMDVGPUD_TICK_S=0.5\n"):
        run("systemctl", "restart", "amdvgpud.service")
        before, pid, since = files_of("alice"), main_pid(), cursor()
        os.kill(pid, signal.SIGSTOP)
        until("another main process", lambda: main_pid() not in (0, pid))
        until("ready", lambda: show("amdvgpud.service", "SubState") == ["running"])
        assert "atchdog" in journal(since)
        assert files_of("alice") == before
    run("systemctl", "restart", "amdvgpud.service")


@check
def the_mount_is_not_taken_away_by_mistake() -> None:
    run("systemctl", "stop", "run-amdvgpud-slices.mount", code=4)
    assert SLICES.is_mount()


@check
def wrong_settings_end_it_without_a_loop() -> None:
    with drop_in("wrong", "[Service]\nEnvironment=AMDVGPUD_TICK_S=never\n"):
        since = cursor()
        run("systemctl", "restart", "amdvgpud.service", code=1)
        assert show("amdvgpud.service", "ActiveState", "NRestarts", "ExecMainStatus") == ["failed", "0", "2"]
        assert "tick_s" in journal(since)
        run("systemctl", "stop", "amdvgpud.socket")
    run("systemctl", "reset-failed", "amdvgpud.service", "amdvgpud.socket")
    run("systemctl", "start", "amdvgpud.service")
    assert names() == ["alice"]


@check
def a_second_daemon_leaves_the_first_alone() -> None:
    assert "another amdvgpud" in run("env", "AMDVGPUD_SIMULATE=mi210", "amdvgpud", code=1)
    assert names() == ["alice"]


@check
def the_device_rule_by_number_lets_drm_through_before_the_driver_is_there() -> None:
    """No driver is behind the node: ENXIO says that the device cgroup let the open through, EPERM that it did not."""
    node = Path("/dev/drm-by-number")
    os.mknod(node, 0o020666, os.makedev(226, 200))
    try:
        seen = {}
        for rule in ("none", "char-226 rw", "char-drm rw"):
            unit = ["systemd-run", "--quiet", "--collect", "--pipe", "--wait", "--property=DevicePolicy=closed"]
            allow = [] if rule == "none" else [f"--property=DeviceAllow={rule}"]
            seen[rule] = run(*unit, *allow, "sh", "-c", f": <>{node}", code=None)
        if "not permitted" not in seen["none"]:
            raise Skipped("device rules are not enforced here (no device programs on this cgroup)")
        assert "No such device or address" in seen["char-226 rw"], seen
        if "drm" not in Path("/proc/devices").read_text():
            assert "not permitted" in seen["char-drm rw"], seen
    finally:
        node.unlink()


@check
def it_runs_with_all_drop_ins_on() -> None:
    for path in Path("/usr/share/amdvgpud/systemd").glob("*.conf"):
        (DROP_INS / path.name).symlink_to(path)
    try:
        run("systemctl", "daemon-reload")
        run("systemctl", "restart", "amdvgpud.service")
        assert names() == ["alice"]
        status = Path(f"/proc/{main_pid()}/status").read_text()
        effective = int(next(ln for ln in status.splitlines() if ln.startswith("CapEff:")).split()[1], 16)
        assert effective == 0b101011 | 1 << 19, hex(effective)  # CHOWN, DAC_OVERRIDE, FOWNER, KILL, SYS_PTRACE
    finally:
        for path in Path("/usr/share/amdvgpud/systemd").glob("*.conf"):
            (DROP_INS / path.name).unlink()
        run("systemctl", "daemon-reload")
        run("systemctl", "restart", "amdvgpud.service")


@check
def the_oneshot_writes_the_file_without_a_daemon_and_steps_back_beside_one() -> None:
    spec = SPEC.read_bytes()
    run("systemctl", "start", "amdvgpud-cdi-refresh.service")
    assert show("amdvgpud-cdi-refresh.service", "Result")[0] in ("exec-condition", "success")
    run("systemctl", "stop", "amdvgpud.socket", "amdvgpud.service")
    SPEC.unlink()
    refresh = Path("/etc/systemd/system/amdvgpud-cdi-refresh.service.d")
    refresh.mkdir()
    (refresh / "simulate.conf").write_text((DROP_INS / "simulate.conf").read_text())
    run("systemctl", "daemon-reload")
    run("systemctl", "start", "amdvgpud-cdi-refresh.service")
    assert SPEC.read_bytes() == spec
    run("systemctl", "start", "amdvgpud.service")


@check
def an_upgrade_under_load_keeps_library_ledger_and_socket() -> None:
    with program("alice", 2) as pid:
        gate = Path("/usr/lib/amdvgpu/libamdvgpu.so")
        before, daemon, old = files_of("alice"), main_pid(), gate.stat().st_ino
        caller = subprocess.Popen(
            ["sh", "-c", "while :; do amdvgpuctl slice list -o json >/run/e2e/answer || exit 1; done"],
            stderr=subprocess.PIPE,
        )
        run("dpkg", "--install", *packages("newer"))
        until("the new daemon answers", lambda: main_pid() not in (0, daemon) and names() == ["alice"])
        refused = caller.poll()
        caller.kill()
        assert refused is None, f"a call was refused during the upgrade: {caller.stderr.read()!r}"  # type: ignore[union-attr]
        assert gate.stat().st_ino != old
        mapped = [
            ln.split(maxsplit=5) for ln in Path(f"/proc/{pid}/maps").read_text().splitlines() if "libamdvgpu" in ln
        ]
        assert {int(fields[4]) for fields in mapped} == {old}, mapped
        assert files_of("alice") == before
        assert used_bytes("alice") == 2 << 30
    until("nothing in use", lambda: used_bytes("alice") == 0)
    with program("alice", 1) as pid:
        mapped = [
            ln.split(maxsplit=5) for ln in Path(f"/proc/{pid}/maps").read_text().splitlines() if "libamdvgpu" in ln
        ]
        assert {int(fields[4]) for fields in mapped} == {gate.stat().st_ino}, mapped


@check
def podman_gives_a_container_its_slice() -> None:
    if not Path("/usr/bin/podman").exists():
        raise Skipped("no podman in this root")
    podman = ["podman", "--runtime=runc", "--cgroup-manager=cgroupfs", "--events-backend=file"]
    run(*podman, "import", str(_image()), "localhost/glibc:1")
    options = ["--rm", "--network=host", "--pids-limit=0", "--device=amdvgpu.io/slice=alice"]
    container = [*podman, "run", *options, "localhost/glibc:1", "/mnt/kfdclient", "--step", "1G", "--free", "--count"]
    assert "ENOMEM" not in run(*container, "16")
    assert "ENOMEM" in run(*container, "17")
    assert used_bytes("alice") == 0


def _image() -> Path:
    """The client of the KFD with this system's own C library: the simulated KFD was built for that one."""
    path = Path("/tmp/image.tar")
    libraries = [word for word in run("ldd", KFDCLIENT).split() if word.startswith("/")]
    with tarfile.open(path, "w") as tar:
        for folder in ("dev", "etc", "proc", "run", "sys", "tmp", "usr/lib"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for file in (KFDCLIENT, *libraries):
            tar.add(Path(file).resolve(), arcname=file)
    return path


@check
def the_journal_holds_no_warning() -> None:
    """But for those that the checks before provoked; a system call or a path that the sandbox denied would be here."""
    text = run("journalctl", "--no-pager", "--unit=amdvgpud.service", "--priority=warning", "--output=cat")
    provoked = (
        "log_levle|tick_s|atchdog|signal|Main process exited|Failed |Reload failed|Control process exited|Killing"
    )
    left = [ln for ln in text.splitlines() if ln and not re.search(provoked, ln)]
    assert left == [], left


@check
def it_runs_without_root() -> None:
    run("/usr/share/amdvgpud/systemd/unprivileged/switch", "on")
    run("systemctl", "start", "amdvgpud.service")
    status = Path(f"/proc/{main_pid()}/status").read_text()
    uid = run("id", "--user", "amdvgpud").strip()
    assert next(ln for ln in status.splitlines() if ln.startswith("Uid:")).split()[1] == uid
    assert next(ln for ln in status.splitlines() if ln.startswith("CapPrm:")).split()[1] == "0" * 16
    assert names() == ["alice"]
    ctl("slice", "create", "bob", "--gpu", "0", "--vram", "4GiB", "--compute", "25%")
    assert sorted(d["name"] for d in json.loads(SPEC.read_text())["devices"]) == ["alice", "bob"]
    with program("bob", 1):
        assert used_bytes("bob") == 1 << 30
    run("/usr/share/amdvgpud/systemd/unprivileged/switch", "off")
    run("systemctl", "start", "amdvgpud.service")
    assert names() == ["alice", "bob"]
    with program("bob", 1):
        assert used_bytes("bob") == 1 << 30


@check
def removal_stops_it_and_purge_leaves_nothing() -> None:
    run("dpkg", "--remove", "amdvgpud")
    assert run("systemctl", "is-active", "amdvgpud.service", code=None).strip() == "inactive"
    assert Path("/etc/amdvgpud/amdvgpud.toml").exists()
    run("dpkg", "--purge", "amdvgpud", "amdvgpuctl", "libamdvgpu")
    homes = [
        "/etc/amdvgpud/amdvgpud.toml",
        "/run/amdvgpud",
        "/var/lib/amdvgpud",
        "/usr/lib/amdvgpud",
        "/usr/lib/amdvgpu",
    ]
    left = [path for path in (*homes, str(SPEC)) if Path(path).exists()]
    assert left == [], left
    failed = run("systemctl", "list-units", "--failed", "--no-legend", "--plain", "*amdvgpu*")
    assert failed == "", failed


class Skipped(Exception):
    pass


def main() -> None:
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
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
