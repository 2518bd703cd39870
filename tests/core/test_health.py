"""The judge: bad news at once, good news after a while, doubt for a grace, counters since the last reset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import pytest

from amdvgpud.core.health import (
    MAX_RECORDS,
    NOBODY,
    Condition,
    Count,
    Finding,
    Health,
    Look,
    Policy,
    Source,
    Standings,
    effective,
    judge,
    smi_notice,
    wedged,
)
from amdvgpud.core.model import GpuId, HealthOverride

A, B = GpuId("a"), GpuId("b")
POLICY = Policy(good_looks=3, unknown_grace_s=60, record_age_s=1000, correctable_per_hour=10)
BUSY = (Condition.UNKNOWN, "renderD128 answers EBUSY")
SHUT = (Condition.UNHEALTHY, "renderD128 answers EIO")


@dataclass
class Bench:
    """One judge, with a hand on the clock."""

    standings: Standings = field(default_factory=lambda: NOBODY)
    now_s: float = 100.0
    policy: Policy = POLICY

    def look(
        self,
        *said: tuple[Condition, str],
        gpus: tuple[GpuId, ...] = (A,),
        whole: bool = True,
        lasting: bool = False,
        recovered: bool = False,
        renewed: bool = False,
        after_s: float = 10.0,
        source: Source = Source.PULSE,
        counts: Mapping[str, int] = MappingProxyType({}),
    ) -> str:
        """The condition of the first GPU after what was ``said`` of it ``after_s`` later."""
        self.now_s += after_s
        findings = tuple(Finding(gpus[0], source, condition, reason, lasting) for condition, reason in said)
        found = {gpus[0]: {Count(name): value for name, value in counts.items()}}
        first: frozenset[GpuId] = frozenset({gpus[0]})
        none: frozenset[GpuId] = frozenset()
        look = Look(whole, frozenset(gpus), findings, found, first if recovered else none, first if renewed else none)
        self.standings = judge(self.standings, look, self.now_s, self.policy)
        return str(self.verdict(gpus[0]).condition)

    def verdict(self, gpu: GpuId = A) -> Health:
        return self.standings[gpu].verdict


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_first_verdict_is_what_is_found(bench: Bench) -> None:
    assert bench.look() == "healthy"
    assert Bench().look(SHUT) == "unhealthy"
    assert bench.verdict() == Health(Condition.HEALTHY, "", "", 110.0)


def test_bad_news_count_at_once_and_good_ones_after_three_looks_in_a_row(bench: Bench) -> None:
    seen = [bench.look(*said) for said in ((), (SHUT,), (), (), (SHUT,), (), (), (), ())]
    assert seen == ["healthy", *["unhealthy"] * 6, "healthy", "healthy"]


def test_a_verdict_says_why_who_and_since_when(bench: Bench) -> None:
    bench.look()
    bench.look(SHUT)
    bench.look((Condition.UNHEALTHY, "renderD128 answers ENODEV"))
    assert bench.verdict() == Health(Condition.UNHEALTHY, "renderD128 answers ENODEV", "pulse", 120.0)


def test_all_gpus_turn_in_one_judgement_and_each_by_its_own(bench: Bench) -> None:
    bench.look(gpus=(A, B))
    bench.look(SHUT, gpus=(A, B))
    assert [bench.verdict(gpu).condition for gpu in (A, B)] == ["unhealthy", "healthy"]


def test_doubt_becomes_unhealthy_when_it_lasts(bench: Bench) -> None:
    bench.look()
    seen = [bench.look(BUSY) for _ in range(7)]
    assert seen == [*["unknown"] * 6, "unhealthy"]
    assert bench.verdict().reason == "renderD128 answers EBUSY, for 60 s now"


def test_doubt_that_passes_returns_after_good_looks(bench: Bench) -> None:
    bench.look()
    assert [bench.look(*said) for said in ((BUSY,), (), (BUSY,), (), (), ())] == [*["unknown"] * 5, "healthy"]


def test_doubt_that_comes_and_goes_is_counted_from_its_last_coming(bench: Bench) -> None:
    bench.look()
    bench.look(BUSY)
    bench.look(after_s=50)
    assert bench.look(BUSY, after_s=50) == "unknown"


def test_a_broken_gpu_that_cannot_be_seen_stays_broken(bench: Bench) -> None:
    bench.look(SHUT)
    assert [bench.look(*said) for said in ((), (), (BUSY,), (), (), ())] == [*["unhealthy"] * 5, "healthy"]


def test_the_gravest_of_several_findings_counts(bench: Bench) -> None:
    assert bench.look((Condition.DEGRADED, "hot"), SHUT, BUSY) == "unhealthy"
    assert bench.verdict().reason == "renderD128 answers EIO"


def test_an_unhealthy_gpu_may_return_as_a_degraded_one(bench: Bench) -> None:
    bench.look(SHUT)
    hot = (Condition.DEGRADED, "hot")
    assert [bench.look(hot) for _ in range(3)] == ["unhealthy", "unhealthy", "degraded"]


def test_news_between_looks_can_be_bad_and_are_never_good(bench: Bench) -> None:
    bench.look()
    assert bench.look(SHUT, whole=False) == "unhealthy"
    assert [bench.look(whole=False) for _ in range(5)] == ["unhealthy"] * 5
    assert [bench.look() for _ in range(3)] == ["unhealthy", "unhealthy", "healthy"]


def test_news_of_one_gpu_leave_the_others_alone(bench: Bench) -> None:
    bench.look(gpus=(B, A))
    bench.look(SHUT, gpus=(A,), whole=False)
    assert bench.verdict(B).condition == "healthy"


def test_a_lasting_fault_stands_until_the_reset_is_over(bench: Bench) -> None:
    bench.look()
    lost = (Condition.UNHEALTHY, "the kernel has given it up")
    bench.look(lost, whole=False, lasting=True)
    assert [bench.look() for _ in range(4)] == ["unhealthy"] * 4
    bench.look(whole=False, recovered=True)
    assert [bench.look() for _ in range(3)] == ["unhealthy", "unhealthy", "healthy"]


@pytest.mark.parametrize("end", ["recovered", "renewed"])
def test_where_nobody_looks_the_end_of_a_reset_counts_at_once(end: str) -> None:
    bench = Bench(policy=replace(POLICY, good_looks=0))
    lost = (Condition.UNHEALTHY, "the kernel has given it up")
    assert bench.look(lost, whole=False, lasting=True) == "unhealthy"
    assert bench.look(whole=False) == "unhealthy"
    assert bench.look(whole=False, recovered=end == "recovered", renewed=end == "renewed") == "healthy"


def test_a_source_that_says_another_thing_means_the_other_thing(bench: Bench) -> None:
    bench.look((Condition.UNHEALTHY, "first"), lasting=True)
    bench.look((Condition.DEGRADED, "second"), lasting=True)
    assert [f.reason for f in bench.standings[A].faults] == ["second"]


def test_a_gpu_that_is_gone_is_forgotten_with_its_faults(bench: Bench) -> None:
    bench.look(SHUT, lasting=True)
    bench.look(gpus=(B,))
    assert set(bench.standings) == {B}
    assert bench.look(gpus=(A, B)) == "healthy"


# ------------------------------------------------------------------------------------------------------- counters


@pytest.mark.parametrize(
    ("count", "first", "grown", "verdict"),
    [
        ("uncorrectable", "unhealthy", "unhealthy", "uncorrectable memory errors: 5 within 1000 s"),
        ("pcie_fatal", "healthy", "unhealthy", "fatal errors of PCIe: 2 within 1000 s"),
        ("pcie_nonfatal", "healthy", "degraded", "uncorrectable errors of PCIe: 2 within 1000 s"),
        ("retired_pages", "healthy", "degraded", "pages of VRAM retired: 2 within 1000 s"),
        ("correctable", "healthy", "healthy", ""),
        ("pcie_correctable", "healthy", "healthy", ""),
    ],
)
def test_what_a_counter_says_at_first_and_when_it_grows(
    bench: Bench, count: str, first: str, grown: str, verdict: str
) -> None:
    assert bench.look(counts={count: 3}) == first
    assert bench.look(counts={count: 5}) == grown
    assert bench.verdict().reason == verdict


def test_correctable_errors_count_by_their_rate(bench: Bench) -> None:
    bench.look(counts={"correctable": 1000})
    assert bench.look(counts={"correctable": 1010}) == "healthy"
    assert bench.look(counts={"correctable": 1011}) == "degraded"
    assert bench.verdict().reason == "correctable memory errors: 11 within an hour, and 10 are worth a look"
    assert bench.look(counts={"correctable": 1011}, after_s=3600) == "degraded"
    assert [bench.look(counts={"correctable": 1011}) for _ in range(2)] == ["degraded", "healthy"]


def test_errors_of_memory_and_link_are_not_washed_off_by_a_driver_that_has_reset_a_ring(bench: Bench) -> None:
    bench.look(counts={"uncorrectable": 2})
    bench.look(whole=False, recovered=True)
    assert [bench.look(counts={"uncorrectable": 2}) for _ in range(4)] == ["unhealthy"] * 4


def test_records_from_before_the_gpu_was_begun_anew_count_no_more(bench: Bench) -> None:
    bench.look(counts={"uncorrectable": 2})
    bench.look(counts={"uncorrectable": 2}, whole=False, renewed=True)
    assert [bench.look(counts={"uncorrectable": 2}) for _ in range(3)] == ["unhealthy", "unhealthy", "healthy"]
    assert bench.look(counts={"uncorrectable": 3}) == "unhealthy"


def test_a_counter_that_went_back_is_of_a_driver_that_was_loaded_anew(bench: Bench) -> None:
    bench.look(counts={"uncorrectable": 2})
    assert [bench.look(counts={"uncorrectable": 0}) for _ in range(3)] == ["unhealthy", "unhealthy", "healthy"]


def test_records_that_are_old_count_no_more(bench: Bench) -> None:
    bench.look(counts={"uncorrectable": 1})
    assert bench.look(counts={"uncorrectable": 1}, after_s=999) == "unhealthy"
    assert [bench.look(counts={"uncorrectable": 1}) for _ in range(3)] == ["unhealthy", "unhealthy", "healthy"]


def test_a_counter_that_cannot_be_read_now_keeps_what_it_said(bench: Bench) -> None:
    bench.look(counts={"uncorrectable": 1})
    assert [bench.look() for _ in range(4)] == ["unhealthy"] * 4


def test_records_are_bounded_and_lose_no_error(bench: Bench) -> None:
    for value in range(1, 3 * MAX_RECORDS):
        bench.look(counts={"uncorrectable": value}, after_s=0.1)
    grown = bench.standings[A].tallies[Count.UNCORRECTABLE].grown
    assert (len(grown), sum(by for _, by in grown)) == (MAX_RECORDS, 3 * MAX_RECORDS - 1)


# ------------------------------------------------------------------------------------------------------ overrides


def test_a_persons_word_holds_and_says_what_was_found() -> None:
    found = Health(Condition.UNHEALTHY, "renderD128 answers EIO", "pulse", 5.0)
    assert effective(found, HealthOverride(True, 9.0)) == Health(
        Condition.HEALTHY, "set by a person; found was unhealthy: renderD128 answers EIO", "override", 9.0
    )
    assert effective(None, HealthOverride(False, 9.0)) == Health(
        Condition.UNHEALTHY, "set by a person; nobody has looked", "override", 9.0
    )
    assert effective(found, None) is found


# ------------------------------------------------------------------------------------------------------- notices


@pytest.mark.parametrize(
    ("methods", "kind", "condition"),
    [
        ("none", "recovered", None),
        ("rebind", "wedged", Condition.UNHEALTHY),
        ("rebind,bus-reset", "wedged", Condition.UNHEALTHY),
        ("a-method-of-tomorrow", "wedged", Condition.UNHEALTHY),
    ],
)
def test_what_a_wedged_uevent_means(methods: str, kind: str, condition: Condition | None) -> None:
    notice = wedged(A, methods, "python3, pid 7")
    found = None if notice.finding is None else (notice.finding.condition, notice.finding.lasting)
    assert (notice.kind, notice.recovered, notice.renewed) == (kind, condition is None, False)
    assert found == (None if condition is None else (condition, True))
    assert notice.text.endswith("(python3, pid 7 was at work)")


@pytest.mark.parametrize(
    ("line", "kind", "condition"),
    [
        ("1 77:python3\n", "vm-fault", None),
        ("2 10:3", "throttled", Condition.DEGRADED),
        ("3 1 ring timeout", "reset", Condition.UNKNOWN),
        ("3 1", "reset", Condition.UNKNOWN),
        ("4 1", "recovered", None),
    ],
)
def test_what_a_line_of_the_kfds_events_means(line: str, kind: str, condition: Condition | None) -> None:
    notice = smi_notice(A, line)
    assert notice is not None
    assert (notice.kind, notice.finding and notice.finding.condition) == (kind, condition)
    assert (notice.recovered, notice.renewed) == (False, kind == "recovered")


@pytest.mark.parametrize("line", ["", "x", "9 77:python3", "b", "-1 2"])
def test_other_lines_mean_nothing(line: str) -> None:
    assert smi_notice(A, line) is None


def test_a_reset_is_doubt_from_its_first_line_to_its_last_and_then_good_looks_count(bench: Bench) -> None:
    bench.look()
    bench.look((Condition.UNKNOWN, "it is being reset"), whole=False, lasting=True)
    assert [bench.look() for _ in range(3)] == ["unknown"] * 3
    bench.look(whole=False, recovered=True)
    assert [bench.look() for _ in range(3)] == ["unknown", "unknown", "healthy"]


RESETTING = (Condition.UNKNOWN, "it is being reset")


def test_a_reset_whose_end_nobody_heard_ends_by_what_the_eyes_see_after_the_grace(bench: Bench) -> None:
    bench.look()
    bench.look(RESETTING, whole=False, lasting=True, source=Source.SMI)
    seen = [bench.look() for _ in range(9)]
    assert seen == [*["unknown"] * 7, "healthy", "healthy"]  # 60 s of grace, and the third good look of it on


def test_a_reset_that_the_eyes_still_see_after_the_grace_has_not_ended(bench: Bench) -> None:
    bench.look()
    bench.look(RESETTING, whole=False, lasting=True, source=Source.SMI)
    assert [bench.look(BUSY) for _ in range(9)] == [*["unknown"] * 5, *["unhealthy"] * 4]


def test_a_gpu_that_was_given_up_does_not_return_by_looking_well(bench: Bench) -> None:
    bench.look()
    bench.look(RESETTING, whole=False, lasting=True, source=Source.SMI)
    bench.look((Condition.UNHEALTHY, "given up"), whole=False, lasting=True, source=Source.UEVENT)
    assert [bench.look(after_s=50) for _ in range(9)] == ["unhealthy"] * 9
