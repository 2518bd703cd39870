"""What is done about a process that goes around its slice's gate: a pure decision, once a sample.

Owns when a suspicion becomes a finding, and which step follows. Does not own the figures (:mod:`amdvgpud.core.truth`)
nor the steps themselves (:mod:`amdvgpud.guard`).

The kernel's figures and a ledger are read at two moments, and the kernel gives memory back a little after a process has
freed it or ended. So one sample proves nothing: what counts is what has been so in every sample for ``after_s``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from amdvgpud.core.model import SliceName
from amdvgpud.core.truth import Comparison, ProcessTruth, Truth


class Policy(StrEnum):
    OBSERVE = "observe"
    """Say it, in an event and in the metrics."""
    WARN = "warn"
    """Warn of it in the log too, and in the node's warnings for as long as it lasts."""
    KILL = "kill"
    """End the process too, a grace after it was told of: SIGTERM, and SIGKILL after another one."""


class Reason(StrEnum):
    UNMANAGED = "unmanaged"
    """VRAM, and no slot in the ledger: the gate is not loaded."""
    UNTRACKED = "untracked"
    """More VRAM than its slot has (as far as all slots of the slice can be true together), by more than the allowance
    and what its queues may have: the gate is loaded, and something goes around it."""


class Step(StrEnum):
    TELL = "tell"
    TERMINATE = "terminate"
    KILL = "kill"
    SURVIVED = "survived"
    """It is there still, a grace after SIGKILL: the kernel cannot end it now."""


@dataclass(frozen=True, slots=True)
class Rules:
    policy: Policy = Policy.OBSERVE
    allowance_bytes: int = 64 << 20
    """Of one process on all its GPUs: what it may have that its gate does not see, beside what its queues need (which
    is reckoned by the driver's source): page tables, for which the driver sets 8 MiB aside (AMDGPU_VM_RESERVED_VRAM),
    and managed memory. Guessed: over softkfd it is nothing, and nobody has measured it on hardware."""
    after_s: float = 60.0
    grace_s: float = 10.0
    """Between the telling, SIGTERM and SIGKILL; as container runtimes have it."""

    def __post_init__(self) -> None:
        if self.allowance_bytes < 0 or self.after_s < 0 or self.grace_s < 0:
            raise ValueError(f"{self!r} has a negative figure")


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A process that goes around the gate of ``slice``, for now or for long enough."""

    slice: SliceName
    pid: int
    start_ticks: int
    command: str
    reason: Reason
    untracked_bytes: int
    since_s: float
    step: Step | None = None
    """The last one that was taken; None: it has not lasted long enough."""
    step_s: float = 0.0

    def __str__(self) -> str:
        what = "no slot in the ledger" if self.reason is Reason.UNMANAGED else "no slot to explain them"
        return f"process {self.pid} ({self.command}) has {self.untracked_bytes} bytes of VRAM and {what}"


Suspicions = Mapping[tuple[SliceName, int, int], Suspicion]
"""By slice, pid and start time."""


def judge(
    rules: Rules, comparison: Comparison, before: Suspicions, now_s: float
) -> tuple[Suspicions, tuple[Suspicion, ...]]:
    """The suspicions after this sample, and those of them whose ``step`` is to be taken now.

    One that is in order again is forgotten, whatever was done about it.
    """
    after: dict[tuple[SliceName, int, int], Suspicion] = {}
    due = []
    for truth in comparison.slices.values():
        for process in truth.processes if truth.gated else ():
            reason = _reason(rules, process)
            if reason is None:
                continue
            key = (truth.slice, process.pid, process.start_ticks)
            suspicion = _suspicion(truth, process, reason, now_s)
            if (known := before.get(key)) is not None:
                # Another reason does not start the time anew: a slot that comes and goes would outlast any patience.
                suspicion = replace(suspicion, since_s=known.since_s, step=known.step, step_s=known.step_s)
            step = _next_step(rules, suspicion, now_s)
            if step is not None:
                suspicion = replace(suspicion, step=step, step_s=now_s)
                due.append(suspicion)
            after[key] = suspicion
    return after, tuple(due)


def _reason(rules: Rules, process: ProcessTruth) -> Reason | None:
    if not process.tracked:
        # Without a byte of VRAM it may be looking only: rocminfo opens the KFD too.
        return Reason.UNMANAGED if process.untracked_bytes else None
    return Reason.UNTRACKED if process.unexplained_bytes > rules.allowance_bytes else None


def _suspicion(truth: Truth, process: ProcessTruth, reason: Reason, now_s: float) -> Suspicion:
    return Suspicion(
        truth.slice, process.pid, process.start_ticks, process.command, reason, process.untracked_bytes, now_s
    )


def _next_step(rules: Rules, of: Suspicion, now_s: float) -> Step | None:
    if of.step is None:
        return Step.TELL if now_s - of.since_s >= rules.after_s else None
    if rules.policy is not Policy.KILL or now_s - of.step_s < rules.grace_s:
        return None
    return _AFTER.get(of.step)


_AFTER: Final = {Step.TELL: Step.TERMINATE, Step.TERMINATE: Step.KILL, Step.KILL: Step.SURVIVED}
