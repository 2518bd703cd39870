"""`amdvgpuctl run`: how a slice reaches a command, and how the command's end comes back.

A stand-in gate writes into the ledger that it was loaded; ``test_run_gate.py`` has the real one.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ctl.stand_ins import FakeDaemon, Granted, Start

WHAT = "amdvgpuctl: slice alice: 4 GiB and 64 CUs of GPU-0123456789abcdef/0"
BY_MOUNTS = f"{WHAT}; enforced by: gate\n"
BY_ENVIRONMENT = f"{WHAT}; enforced by: gate (environment)\n"
AS_USER = ("setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups")
WITHOUT_NAMESPACES = (
    "unshare", "--user", "--map-root-user", "sh", "-c",
    'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all "$@"', "sh",
)  # fmt: skip
"""A user namespace in which no further one may be made, and no capability to mount without one."""


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def end_of(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


# ---------------------------------------------------------------------------------------------- what can be had by all


def test_by_the_environment_the_command_finds_slice_and_gate_and_the_line_says_so(
    granted: Granted, start: Start
) -> None:
    show = 'echo "$HSA_CU_MASK $AMDVGPU_SLICE_DIR $LD_PRELOAD"'
    done = end_of(start(*granted.options, "--deliver", "environment", "--", "sh", "-c", show))
    gate = granted.lease.preload[0]
    assert done == (0, f"0:0-63 {granted.lease.slice_dir}/guest {gate}\n", BY_ENVIRONMENT)
    assert granted.loads == 1


def test_a_preload_that_the_user_has_is_kept_behind_the_gate(granted: Granted, start: Start) -> None:
    run = (*granted.options, "-q", "--deliver", "environment", "--", "printenv", "LD_PRELOAD")
    code, out, _ = end_of(start(*run, env={"LD_PRELOAD": "/nonexistent/mine.so"}))
    assert (code, out) == (0, f"{granted.lease.preload[0]}:/nonexistent/mine.so\n")


def test_the_lease_is_asked_for_this_process_and_released_when_the_command_ends(
    granted: Granted, daemon: FakeDaemon, start: Start
) -> None:
    asked = ("--vram", "4GiB", "--compute", "25%", "--gpu", "0", "--gpu", "1", "--spread")
    process = start(*granted.options, "--deliver", "environment", *asked, "--", "true")
    assert end_of(process)[0] == 0
    assert daemon.requests == [
        ("POST", "/v1/leases"),
        ("GET", "/v1/slices/alice"),
        ("DELETE", "/v1/leases/lease-1"),
    ]
    assert daemon.asked[0].body == {
        "slice": None,
        "request": {
            "compute": "25%",
            "policy": "balanced",
            "vram": "4GiB",
            "gpus": 2,
            "on": ["0", "1"],
            "spread": "spread",
            "priority": "normal",
            "oversubscribe": False,
            "owner": None,
        },
        "holder": "amdvgpuctl run true",
        "pid": process.pid,
        "ttl_s": None,
        "bind": "holder",
    }


def test_a_slice_that_exists_is_leased_by_its_name(granted: Granted, daemon: FakeDaemon, start: Start) -> None:
    assert end_of(start(*granted.options, "--deliver", "environment", "--slice", "alice", "--", "true"))[0] == 0
    body = daemon.asked[0].body
    assert isinstance(body, dict)
    assert (body["slice"], body["request"]) == ("alice", None)


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_the_exit_code_is_the_commands_and_128_more_than_a_signal(
    granted: Granted, daemon: FakeDaemon, start: Start, script: str, code: int
) -> None:
    assert end_of(start(*granted.options, "-q", "--deliver", "environment", "--", "sh", "-c", script)) == (code, "", "")
    assert daemon.requests[-1] == ("DELETE", "/v1/leases/lease-1")


def test_a_command_that_is_not_there_is_127_and_takes_no_lease(
    granted: Granted, daemon: FakeDaemon, start: Start
) -> None:
    done = end_of(start(*granted.options, "--", "no-such-command"))
    assert done == (127, "", "amdvgpuctl: no-such-command: command not found\n")
    assert daemon.requests == []


def test_a_file_that_cannot_be_executed_is_126_and_takes_no_lease(
    granted: Granted, daemon: FakeDaemon, start: Start, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    plain.touch(0o644)
    assert end_of(start(*granted.options, "--", str(plain))) == (126, "", f"amdvgpuctl: {plain}: not executable\n")
    assert daemon.requests == []


def test_an_executable_that_exec_refuses_is_126_and_the_lease_is_released(
    granted: Granted, daemon: FakeDaemon, start: Start, tmp_path: Path
) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\0\1\2")
    garbage.chmod(0o755)
    code, _, err = end_of(start(*granted.options, "-q", "--deliver", "environment", "--", str(garbage)))
    assert (code, err) == (126, f"amdvgpuctl: {garbage}: [Errno 8] Exec format error: '{garbage}'\n")
    assert daemon.requests[-1] == ("DELETE", "/v1/leases/lease-1")


TELL = """
import signal
wanted = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
print("ready", flush=True)
while (got := signal.Signals(signal.sigwait(wanted))) != signal.SIGUSR1:
    print(got.name, flush=True)
raise SystemExit(5)
"""
"""Names each signal that comes, until SIGUSR1: what came twice shows before the end."""


def test_a_signal_sent_to_amdvgpuctl_reaches_the_command_once(granted: Granted, start: Start) -> None:
    process = start(*granted.options, "-q", "--deliver", "environment", "--", sys.executable, "-c", TELL)
    assert first_line(process) == "ready\n"
    process.terminate()
    assert first_line(process) == "SIGTERM\n"
    process.send_signal(signal.SIGUSR1)
    assert end_of(process) == (5, "", "")


def test_control_c_at_the_terminal_reaches_the_command_once(granted: Granted) -> None:
    """The terminal sends it to both; were it passed on too, the command would see it a second time before SIGUSR1."""
    master, slave = pty.openpty()
    run = [sys.executable, "-c", "from amdvgpud.ctl.cli import main; main()", *granted.options, "-q"]
    with subprocess.Popen(
        ["setsid", "--ctty", *run, "--deliver", "environment", "--", sys.executable, "-c", TELL],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    ) as process:
        os.close(slave)
        with os.fdopen(master, "r+b", buffering=0) as terminal:

            def line() -> bytes:
                return b"".join(iter(lambda: terminal.read(1), b"\n"))

            assert line() == b"ready\r"
            terminal.write(b"\x03")
            assert line() == b"^CSIGINT\r"
            process.send_signal(signal.SIGUSR1)
            assert process.wait(timeout=60) == 5
            with pytest.raises(
                OSError, match="Input/output error"
            ):  # the end of a terminal; a second name would be here
                terminal.read(1)


def test_a_command_without_a_handler_dies_of_the_signal(granted: Granted, daemon: FakeDaemon, start: Start) -> None:
    process = start(*granted.options, "-q", "--deliver", "environment", "--", "sh", "-c", "echo ready; exec sleep 600")
    assert first_line(process) == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert end_of(process) == (143, "", "")
    assert daemon.requests[-1] == ("DELETE", "/v1/leases/lease-1")


def test_the_command_dies_with_an_amdvgpuctl_that_is_killed(granted: Granted, start: Start) -> None:
    process = start(*granted.options, "-q", "--deliver", "environment", "--", "sh", "-c", "echo $$; exec sleep 600")
    pid = int(first_line(process))
    watched = os.pidfd_open(pid)
    try:
        process.kill()
        assert select.select([watched], [], [], 30)[0] == [watched]
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(watched, signal.SIGKILL)  # it holds the pipes that the end of the test waits for
        os.close(watched)


def test_python_does_not_hand_down_the_signals_it_ignores(granted: Granted, start: Start) -> None:
    run = (*granted.options, "-q", "--deliver", "environment", "--", "grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status")
    _, out, _ = end_of(start(*run))
    # What whoever started the tests ignores is theirs; Python adds SIGPIPE and SIGXFSZ.
    status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines() if "\t" in line)
    theirs = int(status["SigIgn"], 16) & ~(1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)
    assert [int(line.split()[1], 16) for line in out.splitlines()] == [int(status["SigBlk"], 16), theirs]


def test_the_time_to_live_ends_the_command(granted: Granted, daemon: FakeDaemon, start: Start) -> None:
    run = (*granted.options, "-q", "--deliver", "environment", "--ttl", "1s", "--", "sleep", "600")
    assert end_of(start(*run))[0] == 143
    assert daemon.requests[-1] == ("DELETE", "/v1/leases/lease-1")


def test_a_refused_lease_starts_nothing_and_says_the_daemons_reason(
    granted: Granted, daemon: FakeDaemon, start: Start
) -> None:
    daemon.refuses("POST", "/v1/leases", 409, "wanted 48 GiB; the roomiest, X/0, has 31 GiB", [])
    done = end_of(start(*granted.options, "--", "echo", "never"))
    assert done == (1, "", "amdvgpuctl: wanted 48 GiB; the roomiest, X/0, has 31 GiB\n")


def test_the_commands_own_code_stands_when_the_release_fails(
    granted: Granted, daemon: FakeDaemon, start: Start
) -> None:
    daemon.refuses("DELETE", "/v1/leases/lease-1", 404, "lease-1 has ended", [])
    code, _, err = end_of(start(*granted.options, "--deliver", "environment", "--", "sh", "-c", "exit 3"))
    assert (code, err) == (3, f"{BY_ENVIRONMENT}amdvgpuctl: lease lease-1 was not released: lease-1 has ended\n")


@pytest.mark.root
def test_a_slice_whose_files_belong_to_another_user_is_not_run_in(
    granted: Granted, daemon: FakeDaemon, start: Start
) -> None:
    Path(granted.lease.slice_dir).chmod(0o700)
    code, out, err = end_of(start(*granted.options, "--", "echo", "never", prefix=AS_USER))
    assert (code, out, err.count("\n")) == (4, "", 1)
    assert "slice alice belongs to another user: uid 1000 cannot read" in err
    assert daemon.requests[-1] == ("DELETE", "/v1/leases/lease-1")


# ------------------------------------------------------------------------------------------- what the gate cannot reach


@pytest.fixture
def static_program(tmp_path: Path) -> Path:
    source, program = tmp_path / "static.c", tmp_path / "static"
    source.write_text("int main(void) { return 0; }")
    subprocess.run(["gcc", "-static", "-o", program, source], check=True)
    return program


def test_a_static_program_runs_but_is_said_not_to_be_held(granted: Granted, start: Start, static_program: Path) -> None:
    code, _, err = end_of(start(*granted.options, "--deliver", "environment", "--", str(static_program)))
    reason = f"{static_program} is a static program, which loads no library"
    assert (code, err) == (0, f"{WHAT}; NOT enforced: {reason}\n")


def test_a_script_of_a_static_interpreter_is_refused_where_the_gate_is_required(
    granted: Granted, daemon: FakeDaemon, start: Start, static_program: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script"
    script.write_text(f"#!/usr/bin/env {static_program}\n")
    script.chmod(0o755)
    code, _, err = end_of(start(*granted.options, "--require-gate", "--", str(script)))
    reason = f"{static_program} is a static program, which loads no library: its limits would not be enforced"
    assert (code, err) == (1, f"amdvgpuctl: {reason}\n")
    assert daemon.requests == []


# ----------------------------------------------------------------------------------------------------- by mounts: root


@pytest.mark.root
def test_by_mounts_the_command_sees_what_a_container_sees(granted: Granted, start: Start) -> None:
    script = """
        cat /etc/ld.so.preload /run/amdvgpu/alice/policy
        (: > /run/amdvgpu/alice/policy) 2> /dev/null || echo policy is read-only
        (: > /run/amdvgpu/mine) 2> /dev/null || echo the root is read-only
        echo used >> /run/amdvgpu/alice/ledger && echo ledger is writable
        echo "${AMDVGPU_SLICE_DIR-unset} ${LD_PRELOAD-unset} $AMDVGPU_SLICE"
    """
    code, out, err = end_of(start(*granted.options, "--", "sh", "-c", script))
    assert out.splitlines() == [
        granted.lease.preload[0],
        "policypolicy is read-only",
        "the root is read-only",
        "ledger is writable",
        "unset unset alice",
    ]
    assert (code, err) == (0, BY_MOUNTS)
    assert granted.ledger.read_text() == "loaded\n" * 2 + "used\n"  # the shell and cat


@pytest.mark.root
def test_an_empty_environment_does_not_shed_the_gate(granted: Granted, start: Start) -> None:
    assert end_of(start(*granted.options, "-q", "--", "env", "-i", "/bin/true")) == (0, "", "")
    assert granted.loads == 2


@pytest.mark.root
def test_nothing_of_it_is_left_on_the_host(granted: Granted, start: Start) -> None:
    preload = Path("/etc/ld.so.preload")
    before = preload.read_text() if preload.exists() else None
    assert end_of(start(*granted.options, "-q", "--", "true"))[0] == 0
    assert (preload.read_text() if preload.exists() else None) == before
    assert list(Path("/run/amdvgpu").iterdir()) == []
    mounted = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    assert not mounted & {"/etc", "/etc/ld.so.preload", "/run/amdvgpu", "/run/amdvgpu/alice"}


@pytest.mark.root
def test_lines_of_a_preload_file_that_the_host_has_are_kept(granted: Granted, start: Start, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("# of the host\n")
    # A namespace in which the host has such a file: an overlay, as the host's own /etc is not to be touched.
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "ld.so.preload").write_text("# of the host\n")
    mount = f'mount -t overlay o -o lowerdir={tmp_path}/etc:/etc /etc && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", mount, "sh")
    code, out, err = end_of(start(*granted.options, "--", "cat", "/etc/ld.so.preload", prefix=prefix))
    assert (code, out, err) == (0, f"{granted.lease.preload[0]}\n# of the host\n", BY_MOUNTS)


@pytest.mark.root
def test_what_is_mounted_under_etc_is_still_there(granted: Granted, start: Start, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("mounted over\n")
    mount = f'mount --bind {tmp_path}/hosts /etc/hosts && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", mount, "sh")
    code, out, err = end_of(start(*granted.options, "--", "cat", "/etc/hosts", prefix=prefix))
    assert (code, out, err) == (0, "mounted over\n", BY_MOUNTS)


@pytest.mark.root
def test_an_outer_slice_stays_in_force_within_an_inner_one(granted: Granted, start: Start, tmp_path: Path) -> None:
    outer = tmp_path / "outer" / "bob"
    outer.mkdir(parents=True)
    (outer / "policy").write_text("bob's")
    prefix = ("unshare", "--mount", "sh", "-c", f'mount --bind {outer.parent} /run/amdvgpu && exec "$@"', "sh")
    Path("/run/amdvgpu").mkdir(exist_ok=True)
    script = "cat /run/amdvgpu/alice/policy /run/amdvgpu/bob/policy"
    assert end_of(start(*granted.options, "--", "sh", "-c", script, prefix=prefix)) == (0, "policybob's", BY_MOUNTS)


# ----------------------------------------------------------------------------------------------------- by mounts: users


@pytest.mark.root
def test_a_user_gets_the_mounts_by_a_user_namespace_and_stays_who_they_are(granted: Granted, start: Start) -> None:
    Path("/run/amdvgpu").mkdir(exist_ok=True)
    script = "id -u; cat /etc/ld.so.preload; grep CapEff /proc/self/status; echo used >> /run/amdvgpu/alice/ledger"
    code, out, err = end_of(start(*granted.options, "--", "sh", "-c", script, prefix=AS_USER))
    assert (code, out) == (0, f"1000\n{granted.lease.preload[0]}\nCapEff:\t0000000000000000\n")
    # Nobody makes cgroups for a user without a session: that is said, and keeps nothing from starting.
    assert re.fullmatch(re.escape(BY_MOUNTS.strip()) + "; no cgroup of its own: .+\n", err)
    assert granted.ledger.read_text().endswith("used\n")


@pytest.mark.root
def test_where_namespaces_are_not_allowed_the_environment_serves_and_the_line_says_why(
    granted: Granted, start: Start
) -> None:
    run = (*granted.options, "--", "printenv", "AMDVGPU_SLICE_DIR")
    code, out, err = end_of(start(*run, prefix=WITHOUT_NAMESPACES))
    why = " (a user namespace is not allowed here: user.max_user_namespaces is used up)\n"
    assert (code, out, err) == (0, f"{granted.lease.slice_dir}/guest\n", BY_ENVIRONMENT.rstrip() + why)
    assert granted.loads == 1


@pytest.mark.root
def test_where_mounts_are_insisted_on_and_not_allowed_nothing_starts(
    granted: Granted, daemon: FakeDaemon, start: Start
) -> None:
    run = (*granted.options, "--deliver", "mounts", "--", "echo", "never")
    code, out, err = end_of(start(*run, prefix=WITHOUT_NAMESPACES))
    why = "a user namespace is not allowed here: user.max_user_namespaces is used up"
    assert (code, out, err) == (1, "", f"amdvgpuctl: the slice cannot be delivered by mounts: {why}\n")
    assert daemon.requests[-1] == ("DELETE", "/v1/leases/lease-1")
