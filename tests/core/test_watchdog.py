"""When a process that goes around the gate is told of, and when it is ended."""

from __future__ import annotations

import pytest

from amdvgpud.core.model import PartitionId, SliceName
from amdvgpud.core.truth import Comparison, GpuTruth, ProcessTruth, Truth
from amdvgpud.core.watchdog import Policy, Reason, Rules, Step, Suspicions, judge

A = SliceName("a")
AT = PartitionId("GPU-0/0")
RULES = Rules(Policy.KILL, allowance_bytes=10, after_s=60, grace_s=10)


def a_look(
    driver: int, ledger: int | None, *, gated: bool = True, pid: int = 50, start_ticks: int = 77, queues: int = 0
) -> Comparison:
    """One process of slice ``a``; ``ledger`` None: it has no slot. ``queues``: bytes that its queues excuse."""
    known = {} if ledger is None else {AT: ledger}
    process = ProcessTruth(
        pid, start_ticks, 7, 900, "python3", ledger is not None, {AT: driver}, known, queue_bytes={AT: queues}
    )
    return Comparison({A: Truth(A, {AT: GpuTruth(driver, 0, None)}, (process,), gated)})


def steps(rules: Rules, looks: list[tuple[float, Comparison]]) -> list[tuple[float, Step | None, Reason]]:
    suspicions: Suspicions = {}
    taken = []
    for now_s, look in looks:
        suspicions, due = judge(rules, look, suspicions, now_s)
        taken += [(now_s, s.step, s.reason) for s in due]
    return taken


BAD = a_look(100, None)
LOOKS = [(float(t), BAD) for t in range(0, 130, 10)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy.OBSERVE, [(60.0, Step.TELL)]),
        (Policy.WARN, [(60.0, Step.TELL)]),
        (Policy.KILL, [(60.0, Step.TELL), (70.0, Step.TERMINATE), (80.0, Step.KILL), (90.0, Step.SURVIVED)]),
    ],
)
def test_what_lasts_is_told_once_and_ended_only_where_that_is_the_policy(
    policy: Policy, expected: list[tuple[float, Step]]
) -> None:
    rules = Rules(policy, 10, 60, 10)
    assert steps(rules, LOOKS) == [(at, step, Reason.UNMANAGED) for at, step in expected]


@pytest.mark.parametrize(
    ("driver", "ledger", "reason"),
    [
        (100, None, Reason.UNMANAGED),
        (1, None, Reason.UNMANAGED),
        (0, None, None),  # it has the KFD open, and that is all
        (100, 100, None),
        (110, 100, None),  # just the allowance
        (111, 100, Reason.UNTRACKED),
        (100, 5000, None),  # a charge that the driver has not served yet
    ],
)
def test_what_counts_is_vram_beyond_what_the_ledger_and_the_allowance_have(
    driver: int, ledger: int | None, reason: Reason | None
) -> None:
    suspicions, due = judge(RULES, a_look(driver, ledger), {}, 5.0)
    assert [s.reason for s in suspicions.values()] == ([] if reason is None else [reason])
    assert due == ()


def test_what_its_queues_need_is_no_sign_of_anything() -> None:
    assert judge(RULES, a_look(4000, 100, queues=3890), {}, 5.0)[0] == {}
    assert [s.reason for s in judge(RULES, a_look(4001, 100, queues=3890), {}, 5.0)[0].values()] == [Reason.UNTRACKED]
    assert judge(RULES, a_look(100, None, queues=3890), {}, 5.0)[0], "without a gate there is nothing to excuse"


def test_what_queues_need_on_one_gpu_explains_nothing_on_another() -> None:
    driver = {AT: 50, PartitionId("GPU-1/0"): 50}
    for queues, blamed in (({AT: 40, PartitionId("GPU-1/0"): 50}, False), ({AT: 500}, True)):
        process = ProcessTruth(50, 77, 7, 900, "python3", True, driver, {}, queue_bytes=queues)
        look = Comparison({A: Truth(A, {}, (process,), True)})
        assert bool(judge(RULES, look, {}, 5.0)[0]) is blamed


def test_one_look_in_which_all_is_well_starts_the_time_anew() -> None:
    looks = [(0.0, BAD), (50.0, BAD), (59.0, a_look(0, None)), (60.0, BAD), (119.0, BAD), (120.0, BAD)]
    assert steps(RULES, looks) == [(120.0, Step.TELL, Reason.UNMANAGED)]


def test_a_slot_that_comes_and_goes_does_not_start_the_time_anew() -> None:
    looks = [(float(t), a_look(100, None if t % 20 else 0)) for t in range(0, 90, 10)]
    assert [(at, step) for at, step, _ in steps(RULES, looks)] == [
        (60.0, Step.TELL),
        (70.0, Step.TERMINATE),
        (80.0, Step.KILL),
    ]


def test_another_process_of_the_same_pid_has_its_own_time() -> None:
    other = a_look(100, None, start_ticks=78)
    looks = [(0.0, BAD), (30.0, other), (60.0, other), (90.0, other)]
    assert steps(RULES, looks) == [(90.0, Step.TELL, Reason.UNMANAGED)]


def test_who_gives_it_back_at_sigterm_is_not_killed() -> None:
    looks = [(0.0, BAD), (60.0, BAD), (70.0, BAD), (80.0, a_look(0, None)), (90.0, a_look(0, None))]
    assert [(at, step) for at, step, _ in steps(RULES, looks)] == [(60.0, Step.TELL), (70.0, Step.TERMINATE)]


def test_a_slice_that_needs_no_gate_is_not_watched() -> None:
    assert steps(RULES, [(t, a_look(100, None, gated=False)) for t in (0.0, 100.0)]) == []


def test_a_policy_that_has_become_kill_ends_what_was_only_told() -> None:
    suspicions, _ = judge(Rules(Policy.OBSERVE, 10, 60, 10), BAD, {}, 0.0)
    suspicions, _ = judge(Rules(Policy.OBSERVE, 10, 60, 10), BAD, suspicions, 60.0)
    _, due = judge(RULES, BAD, suspicions, 70.0)
    assert [s.step for s in due] == [Step.TERMINATE]


def test_rules_with_a_negative_figure_cannot_be_held() -> None:
    with pytest.raises(ValueError, match="negative"):
        Rules(after_s=-1)
