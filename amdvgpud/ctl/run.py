"""A command in a slice: start it, stand aside, pass on how it ended.

Owns the process: fork, exec, signals, exit code. What the slice is and how it is brought in are
:mod:`amdvgpud.ctl.delivery`'s. The command stays in our process group, so the terminal treats both as one job.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Final, NoReturn

from amdvgpud.ctl.delivery import (
    CannotDeliver,
    Grant,
    Program,
    deliver_by_mounts,
    die_with_parent,
    environment_of,
)

NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126

_PASSED_ON: Final = frozenset(
    {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
_AWAITED: Final = _PASSED_ON | {signal.SIGCHLD}
_GRACE_S: Final = 10.0
"""Between SIGTERM and SIGKILL at the end of the time to live; as container runtimes have it."""

Announce = Callable[[bool, str | None, str | None], str]
"""(whether by mounts, why not by mounts, why it has no cgroup of its own) -> what people are told."""


class Deliver(StrEnum):
    AUTO = "auto"
    """By mounts; where they are not allowed, by the environment."""
    MOUNTS = "mounts"
    """By mounts, or the command does not start."""
    ENVIRONMENT = "environment"


def run(
    grant: Grant,
    program: Program,
    command: Sequence[str],
    deliver: Deliver,
    announce: Announce,
    ttl_s: float | None = None,
) -> int:
    """Run ``command`` (its whole argv) in the slice of ``grant`` and return its exit code, 128 + n for signal n.

    ``announce`` gives the text for standard error; it is printed when the slice is in place and just before the command
    starts, so nothing of the command's can come before it. After ``ttl_s`` the command gets
    SIGTERM, and SIGKILL if it is still there after a grace. ``CannotDeliver`` where
    ``deliver`` insists on mounts and they are not allowed; the command has not been started then.
    """
    # Blocked here and taken by sigwaitinfo: no handler, so no moment in which a signal is lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    try:
        why_not: str | None = None
        if deliver is not Deliver.ENVIRONMENT:
            code, why_not = _attempt(
                grant, program, command, before, partial(announce, True, None), ttl_s, mounted=True
            )
            if why_not is None:
                return code
            if deliver is Deliver.MOUNTS:
                raise CannotDeliver(why_not)
        # A second child: the first may already be in a namespace that is of no use.
        return _attempt(grant, program, command, before, partial(announce, False, why_not), ttl_s, mounted=False)[0]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _attempt(
    grant: Grant,
    program: Program,
    command: Sequence[str],
    mask: set[int | signal.Signals],
    announce: Callable[[str | None], str],
    ttl_s: float | None,
    *,
    mounted: bool,
) -> tuple[int, str | None]:
    """(exit code, why the mounts could not be made: the command has not been started then)."""
    environment = environment_of(grant, os.environ, mounted=mounted, musl=program.musl)
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    word_in, word_out = os.pipe2(os.O_CLOEXEC)  # exec closes it: nothing said means that the command runs
    child = os.fork()
    if child == 0:
        _become(grant if mounted else None, program, command, environment, mask, announce, parent, word_out)
    os.close(word_out)
    with open(word_in, "rb") as words:  # noqa: PTH123 (a descriptor)
        word = words.read()
    code = _wait(child, ttl_s)
    if mounted and grant.cgroup is not None:
        grant.cgroup.remove()
    return code, word.decode() or None


def _wait(child: int, ttl_s: float | None) -> int:
    """Pass signals on until ``child`` ends; its exit code. Ends it after ``ttl_s``."""
    end_s = None if ttl_s is None else time.monotonic() + ttl_s
    last_word = signal.SIGTERM
    while True:
        info = _next_signal(end_s)
        if info is None:
            os.kill(child, last_word)
            last_word, end_s = signal.SIGKILL, time.monotonic() + _GRACE_S
        elif info.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        elif info.si_code <= 0:
            # Sent by a process, to us. What the terminal sends (SI_KERNEL) the command has got itself.
            os.kill(child, info.si_signo)


def _next_signal(end_s: float | None) -> signal.struct_siginfo | None:
    """The next signal that is awaited; None when ``end_s`` (monotonic) has come first."""
    if end_s is None:
        return signal.sigwaitinfo(_AWAITED)
    return signal.sigtimedwait(_AWAITED, max(0.0, end_s - time.monotonic()))


def _become(
    mounts: Grant | None,
    program: Program,
    command: Sequence[str],
    environment: Mapping[str, str],
    mask: set[int | signal.Signals],
    announce: Callable[[str | None], str],
    parent: int,
    word: int,
) -> NoReturn:
    """In the child: be the command. Ends by exec or by _exit, never by an exception: what is below is the parent's."""
    code = NOT_EXECUTABLE
    try:
        shared = None  # why it is in its caller's cgroup
        if mounts is not None:
            cgroup = mounts.cgroup
            if cgroup is not None:
                # Before the mounts: they may come with a user namespace, from which no cgroup can be asked for.
                shared = cgroup.enter()
            deliver_by_mounts(mounts)
            if cgroup is not None and shared is None:
                cgroup.tell()
        # Killed outright, amdvgpuctl can release nothing, and the daemon ends the lease: a command that went on would
        # use what is promised to somebody else. SIGKILL as SIGTERM can be ignored.
        die_with_parent(signal.SIGKILL, parent)
        if announcement := announce(shared):
            os.write(2, announcement.encode() + b"\n")
        for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores these two, and exec would hand that down
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execve(program.path, list(command), dict(environment))  # noqa: S606 (no shell is the point)
    except CannotDeliver as e:
        os.write(word, str(e).encode())
    except FileNotFoundError:
        # The file was there a moment ago: what is missing is the interpreter or loader that it names.
        os.write(2, f"amdvgpuctl: {command[0]}: its interpreter is not found\n".encode())
        code = NOT_FOUND
    except BaseException as e:
        os.write(2, f"amdvgpuctl: {command[0]}: {e}\n".encode())
    finally:
        os._exit(code)
