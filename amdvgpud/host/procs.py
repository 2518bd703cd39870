"""Processes of this machine, as far as a holder's life depends on them: start times from /proc (proc(5), field 22)."""

from __future__ import annotations

from pathlib import Path

from amdvgpud.core.model import Holder


def start_ticks(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Clock ticks after boot at which ``pid`` started; None where there is no such process (zombies have ended)."""
    try:
        stat = (proc / str(pid) / "stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The command name may hold blanks and brackets: fields are counted from its last bracket.
    fields = stat.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in "ZX":
        return None
    return int(fields[19])


def process_alive(holder: Holder, proc: Path = Path("/proc")) -> bool:
    """Whether the holder's process lives. A holder without one does not end by itself."""
    return holder.pid is None or start_ticks(holder.pid, proc) == holder.start_ticks
