"""Start times of processes: a pid alone is no identity."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from amdvgpud.core.model import Holder
from amdvgpud.host.procs import process_alive, start_ticks


def test_we_are_alive_and_somebody_with_our_pid_is_not_us() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    assert process_alive(Holder("us", os.getpid(), ticks))
    assert not process_alive(Holder("a former us", os.getpid(), ticks - 1))


def test_a_zombie_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read()  # the pipe closes as it exits; it is not waited for yet
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert start_ticks(child.pid) is None


def test_a_command_name_may_hold_brackets_and_blanks(tmp_path: Path) -> None:
    fields = " ".join(["S", *map(str, range(4, 22)), "987654", "23"])
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "stat").write_text(f"5 (a) b (c) {fields}\n")
    assert start_ticks(5, tmp_path) == 987654


def test_a_holder_without_a_process_never_ends_by_itself() -> None:
    assert process_alive(Holder("somebody"))
