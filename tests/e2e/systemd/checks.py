"""What an operator does with the installed packages, on a machine whose PID 1 is systemd. How it is run: machine.py.

/mnt/later holds the packages of a later version, made of another source (``stage`` builds them).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.e2e.systemd.machine import (
    DROP_INS,
    KFDCLIENT,
    SLICES,
    SPEC,
    Skipped,
    api,
    check,
    ctl,
    cursor,
    drop_in,
    files_of,
    image,
    install,
    journal,
    main,
    main_pid,
    names,
    packages,
    program,
    run,
    show,
    simulate,
    until,
    used_bytes,
)


@check
def the_packages_install_and_the_daemon_is_ready() -> None:
    install()
    assert show("amdvgpud.service", "ActiveState", "SubState", "Type", "NRestarts") == [
        "active",
        "running",
        "notify",
        "0",
    ]
    assert run("systemctl", "is-enabled", "amdvgpud.service", "amdvgpud.socket").split() == ["enabled", "enabled"]
    failed = run("systemctl", "list-units", "--failed", "--no-legend", "--plain", "*amdvgpu*")
    assert failed == "", failed


@check
def without_a_gpu_it_idles() -> None:
    assert api("/v1/gpus")["gpus"] == []
    assert not SPEC.exists()


@check
def with_gpus_it_lists_them() -> None:
    simulate("2*mi300x")
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
        assert "user:1234:--x" in run("getfacl", "--absolute-names", str(SLICES / "owned"))
        owner = ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups"]
        assert "mem_banks" in run(*owner, "ls", str(SLICES / "owned" / "guest"))
        run(*owner, "ls", str(SLICES / "alice"), code=2)
        run(*owner, "ls", str(SLICES), code=2)
    finally:
        ctl("slice", "delete", "owned")


@check
def a_command_has_a_scope_of_its_own_that_the_daemon_knows() -> None:
    with program("alice", 1) as pid:
        cgroup = Path(f"/proc/{pid}/cgroup").read_text().rpartition("0::")[2].strip()
        (one,) = api("/v1/slices/alice")["containers"]
        assert cgroup == f"/system.slice/amdvgpu-run-{one['id']}.scope"
        unit = Path(cgroup).name
        assert show(unit, "ActiveState", "Description") == ["active", "amdvgpuctl run in slice alice"]
        assert (one["pid"], one["reported"]) == (pid, True)
        assert one["cap"], "no kernel of this test bed has the dmem controller, and that must be said"
    until("the scope is collected", lambda: show(unit, "LoadState") == ["not-found"])
    assert api("/v1/slices/alice")["containers"] == []


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
    said = run("systemctl", "stop", "amdvgpud.service")
    assert "amdvgpud.socket" in said, f"systemctl does not say that the socket starts it again: {said}"
    assert show("amdvgpud.service", "ActiveState") == ["inactive"]
    assert names() == ["alice"]


@check
def with_its_socket_stopped_too_it_stays_stopped() -> None:
    run("systemctl", "stop", "amdvgpud.socket", "amdvgpud.service")
    assert "no daemon answers" in ctl("slice", "list", code=3)
    assert show("amdvgpud.service", "ActiveState") == ["inactive"]
    run("systemctl", "start", "amdvgpud.service")
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
        assert effective == 1 << 1 | 1 << 5 | 1 << 19, hex(effective)  # DAC_OVERRIDE, KILL, SYS_PTRACE
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


def _gates_mapped_by(pid: int) -> set[int]:
    """Inodes of the gate in a program's memory."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split(maxsplit=5)[4]) for line in lines if "libamdvgpu" in line}


@check
def an_upgrade_under_load_keeps_library_ledger_and_socket() -> None:
    gate = Path("/usr/lib/amdvgpu/libamdvgpu.so")
    with program("alice", 2) as pid:
        before, daemon, old, version = files_of("alice"), main_pid(), gate.stat().st_ino, api("/v1/system")["version"]
        old_bytes = gate.read_bytes()
        caller = subprocess.Popen(
            ["sh", "-c", "while :; do amdvgpuctl slice list -o json >/run/e2e/answer || exit 1; done"],
            stderr=subprocess.PIPE,
        )
        run("dpkg", "--install", *packages("later"))
        until("the new daemon answers", lambda: main_pid() not in (0, daemon) and names() == ["alice"])
        refused = caller.poll()
        caller.kill()
        assert refused is None, f"a call was refused during the upgrade: {caller.stderr.read()!r}"  # type: ignore[union-attr]
        assert version != "99.0.0"
        assert api("/v1/system")["version"] == "99.0.0"
        assert b"the gate of a later version" in gate.read_bytes()
        assert b"the gate of a later version" not in old_bytes
        assert gate.stat().st_ino != old
        assert _gates_mapped_by(pid) == {old}
        assert files_of("alice") == before
        assert used_bytes("alice") == 2 << 30
    until("nothing in use", lambda: used_bytes("alice") == 0)
    with program("alice", 1) as pid:
        assert _gates_mapped_by(pid) == {gate.stat().st_ino}


@check
def going_back_to_the_version_before_keeps_the_slices_too() -> None:
    with program("alice", 1):
        before = files_of("alice")
        run("dpkg", "--install", *packages("packages"))
        until("the old daemon answers", lambda: api("/v1/system")["version"] != "99.0.0")
        assert (names(), files_of("alice"), used_bytes("alice")) == (["alice"], before, 1 << 30)


PODMAN = ("podman", "--runtime=runc", "--cgroup-manager=cgroupfs", "--events-backend=file")
OPTIONS = ("--rm", "--network=host", "--pids-limit=0", "--device=amdvgpu.io/slice=alice")
CONTAINER = (*PODMAN, "run", *OPTIONS, "localhost/glibc:1", KFDCLIENT, "--step", "1G", "--free", "--count")


@check
def podman_gives_a_container_its_slice() -> None:
    if not Path("/usr/bin/podman").exists():
        raise Skipped("no podman in this root")
    run(*PODMAN, "import", str(image()), "localhost/glibc:1")
    assert "ENOMEM" not in run(*CONTAINER, "16")
    assert "ENOMEM" in run(*CONTAINER, "17")
    assert used_bytes("alice") == 0


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
def removal_stops_it_but_no_container_and_purge_leaves_nothing() -> None:
    assert "amdvgpu-hook" in SPEC.read_text()
    run("dpkg", "--remove", "amdvgpud")
    assert run("systemctl", "is-active", "amdvgpud.service", code=None).strip() == "inactive"
    assert "amdvgpu-hook" not in SPEC.read_text()
    if Path("/usr/bin/podman").exists():  # what its slice held before, its gate still holds
        assert "ENOMEM" not in run(*CONTAINER, "16")
        assert "ENOMEM" in run(*CONTAINER, "17")
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


if __name__ == "__main__":
    sys.exit(main())
