"""Whether a GPU works, as far as the kernel and its neighbours tell: findings, and the judge. No I/O, no clock.

Owns what a finding is, what follows from findings and error counters, and how slowly trust returns. Does not own where
findings come from (:mod:`amdvgpud.host`), nor what a face makes of a verdict.

Bad news counts at once, good news only after so many good looks in a row: a GPU that comes and goes must not be offered
in between. What cannot be told (a driver that answers EBUSY or EPERM is in the midst of a reset, most likely) is
``unknown`` for a while and ``unhealthy`` when it lasts. What an optional source does not say changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from amdvgpud.core.model import GpuId, HealthOverride


class Condition(StrEnum):
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """Works, and somebody should look. Takes new slices."""
    UNHEALTHY = "unhealthy"
    """Takes no new slice; what runs on it keeps what it has."""
    UNKNOWN = "unknown"
    """Cannot be told now (a reset is under way, say). Takes no new slice; becomes unhealthy if it lasts."""


_GRAVITY: Final = (Condition.HEALTHY, Condition.DEGRADED, Condition.UNKNOWN, Condition.UNHEALTHY)


class Source(StrEnum):
    """Who found it. Closed: a metric's label."""

    PULSE = "pulse"
    """The built-in look: the KFD node is there, the render node opens."""
    CHECK = "check"
    """The built-in look itself could not be taken: nothing is known of any GPU."""
    UEVENT = "uevent"
    SMI = "smi"
    """The KFD's own events."""
    RAS = "ras"
    RETIRED_PAGES = "retired_pages"
    PCIE = "pcie"
    """AER and link replays."""
    EXPORTER = "exporter"
    """AMD's metrics exporter, if one runs here."""
    OVERRIDE = "override"
    """A person."""


class Count(StrEnum):
    """Error counters of a GPU. They begin at 0 when the driver is loaded, but for retired pages, which last."""

    UNCORRECTABLE = "uncorrectable"
    CORRECTABLE = "correctable"
    RETIRED_PAGES = "retired_pages"
    PCIE_FATAL = "pcie_fatal"
    PCIE_NONFATAL = "pcie_nonfatal"
    PCIE_CORRECTABLE = "pcie_correctable"
    """With the replays of the link."""


@dataclass(frozen=True, slots=True)
class Health:
    """The standing verdict on one GPU."""

    condition: Condition = Condition.HEALTHY
    reason: str = ""
    """A sentence for people; empty where all is well."""
    source: str = ""
    """Who found it, one word of :class:`Source`; empty where all is well."""
    since_s: float = 0.0
    """Unix time of the last change of ``condition``."""

    @property
    def placeable(self) -> bool:
        return self.condition in (Condition.HEALTHY, Condition.DEGRADED)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one source says of one GPU at one moment."""

    gpu: GpuId
    source: Source
    condition: Condition
    reason: str
    lasting: bool = False
    """It stands until a driver takes it back or the GPU is another's to judge anew, not only until the next look."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was found out at one moment, of some GPUs."""

    whole: bool
    """Each of ``gpus`` was examined, so what is not said of it is good. False: news between two looks."""
    gpus: frozenset[GpuId]
    findings: tuple[Finding, ...] = ()
    counts: Mapping[GpuId, Mapping[Count, int]] = field(default_factory=dict)
    """Those that could be read."""
    recovered: frozenset[GpuId] = frozenset()
    """Of these the driver has taken back what it said before: lasting findings end, error counters do not."""
    renewed: frozenset[GpuId] = frozenset()
    """These were reset as a whole or begun anew: what was found or counted before counts no more."""


@dataclass(frozen=True, slots=True)
class Policy:
    good_looks: int = 3
    """0: nobody looks, so what a driver says by itself counts at once."""
    unknown_grace_s: float = 60.0
    """A full reset takes up to tens of seconds; twice that, guessed."""
    record_age_s: float = 24 * 3600.0
    """Errors that were counted longer ago count no more."""
    correctable_per_hour: int = 100
    """More than this is worth a look. Guessed: vendors publish no figure, and healthy boards count a few a day."""


@dataclass(frozen=True, slots=True)
class Tally:
    """One counter: its value at the last look, and when it grew by how much."""

    value: int
    grown: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """All that the judge remembers of one GPU."""

    verdict: Health
    good_looks: int = 0
    """In a row, since something bad was found."""
    doubtful_since_s: float | None = None
    """Since when nothing certain is known."""
    faults: tuple[Finding, ...] = ()
    """Lasting findings."""
    tallies: Mapping[Count, Tally] = field(default_factory=dict)


Standings = Mapping[GpuId, Standing]
NOBODY: Final[Standings] = MappingProxyType({})


def judge(before: Standings, look: Look, now_s: float, policy: Policy) -> Standings:
    """What stands after ``look``. A GPU that a whole look does not name is not there, and is forgotten with its faults.

    The first verdict on a GPU is what is found, without waiting for good looks.
    """
    kept = {gpu: was for gpu, was in before.items() if gpu in look.gpus} if look.whole else dict(before)
    for gpu in look.gpus:
        kept[gpu] = _stand(kept.get(gpu), look, gpu, now_s, policy)
    return kept


def _stand(was: Standing | None, look: Look, gpu: GpuId, now_s: float, policy: Policy) -> Standing:
    found = [f for f in look.findings if f.gpu == gpu]
    tallies = _tally(was, look.counts.get(gpu, {}), now_s, policy)
    # A counter that went back is of a driver that was loaded anew, which is as good as a reset.
    reloaded = was is not None and any(t.value < was.tallies[c].value for c, t in tallies.items() if c in was.tallies)
    faults: tuple[Finding, ...] = () if was is None else was.faults
    if gpu in look.renewed or reloaded:
        tallies = {count: Tally(tally.value) for count, tally in tallies.items()}
        faults = ()
    if gpu in look.recovered or (was is not None and _end_is_overdue(was, look, found, now_s, policy)):
        faults = ()
    faults = _distinct((*faults, *(f for f in found if f.lasting)))
    worst = _worst([*found, *faults, *_records(gpu, tallies, now_s, policy)])
    doubtful_since_s = None
    if worst is not None and worst.condition is Condition.UNKNOWN:
        since_s = now_s if was is None or was.doubtful_since_s is None else was.doubtful_since_s
        doubtful_since_s = since_s
        if now_s - since_s >= policy.unknown_grace_s:
            reason = f"{worst.reason}, for {now_s - since_s:.0f} s now"
            worst = replace(worst, condition=Condition.UNHEALTHY, reason=reason)
    good = look.whole or (gpu in look.recovered | look.renewed and not policy.good_looks)
    verdict, good_looks = _verdict(was, worst, good, now_s, policy)
    return Standing(verdict, good_looks, doubtful_since_s, faults, tallies)


def _end_is_overdue(was: Standing, look: Look, found: Iterable[Finding], now_s: float, policy: Policy) -> bool:
    """Whether a driver said that it resets, and whoever could have heard the end of it was not listening by then.

    After the grace the eyes' word counts in place of one that may have been lost (with a restart of the daemon, or a
    listener that was sent away): /dev/kfd answers EAGAIN as long as a reset lasts. What a driver said for certain,
    that it has given its GPU up, stands.
    """
    return (
        look.whole
        and not any(finding.condition in (Condition.UNKNOWN, Condition.UNHEALTHY) for finding in found)
        and was.doubtful_since_s is not None
        and now_s - was.doubtful_since_s >= policy.unknown_grace_s
        and all(fault.condition is Condition.UNKNOWN for fault in was.faults)
    )


def _verdict(
    was: Standing | None, worst: Finding | None, good: bool, now_s: float, policy: Policy
) -> tuple[Health, int]:
    """The verdict, and the good looks in a row that it took into account. ``good``: what was not found is not there."""
    condition = Condition.HEALTHY if worst is None else worst.condition
    new = Health(condition, "", "", now_s) if worst is None else Health(condition, worst.reason, worst.source, now_s)
    if was is None:
        return new, 0
    if condition is was.verdict.condition:
        return replace(new, since_s=was.verdict.since_s), 0
    if _GRAVITY.index(condition) > _GRAVITY.index(was.verdict.condition):
        return new, 0
    if not good:
        return was.verdict, was.good_looks  # no news are no good news
    if condition is Condition.UNKNOWN:
        return was.verdict, 0  # unhealthy, and now not even that can be seen
    good_looks = was.good_looks + 1
    return (new, 0) if good_looks >= policy.good_looks else (was.verdict, good_looks)


def _distinct(faults: Iterable[Finding]) -> tuple[Finding, ...]:
    """The last of each source."""
    return tuple({fault.source: fault for fault in faults}.values())


def _worst(findings: Iterable[Finding]) -> Finding | None:
    """The gravest, the first of equals; None if nothing is wrong."""
    return max(
        (f for f in findings if f.condition is not Condition.HEALTHY),
        key=lambda f: _GRAVITY.index(f.condition),
        default=None,
    )


# ------------------------------------------------------------------------------------------------------- counters

_SINCE_THE_DRIVER_WAS_LOADED: Final = frozenset({Count.UNCORRECTABLE})
"""What these say at a first look has happened, and counts. Of the others it is not known when it did: fatal errors of
PCIe are counted while firmware sets links up, correctable ones have a rate, and retired pages last over boots."""


def _tally(was: Standing | None, counts: Mapping[Count, int], now_s: float, policy: Policy) -> dict[Count, Tally]:
    """A counter that cannot be read now keeps what it had."""
    tallies = {} if was is None else dict(was.tallies)
    for count, value in counts.items():
        first = Tally(0 if count in _SINCE_THE_DRIVER_WAS_LOADED else value)
        before = tallies.get(count, first)
        grown = [(when_s, by) for when_s, by in before.grown if now_s - when_s < policy.record_age_s]
        if value > before.value:
            grown.append((now_s, value - before.value))
        tallies[count] = Tally(value, _thinned(grown))
    return tallies


MAX_RECORDS: Final = 64


def _thinned(grown: list[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """At most :data:`MAX_RECORDS`: the oldest become one, of the later time."""
    extra = len(grown) - MAX_RECORDS
    if extra > 0:
        grown = [(grown[extra][0], sum(by for _, by in grown[: extra + 1])), *grown[extra + 1 :]]
    return tuple(grown)


def _records(gpu: GpuId, tallies: Mapping[Count, Tally], now_s: float, policy: Policy) -> list[Finding]:
    """What the counters say: since the GPU was last begun anew, and young enough."""

    def recent(count: Count, age_s: float) -> int:
        grown = tallies[count].grown if count in tallies else ()
        return sum(by for when_s, by in grown if now_s - when_s < age_s)

    found = []
    for count, source, condition, what in _GRAVE:
        if number := recent(count, policy.record_age_s):
            found.append(Finding(gpu, source, condition, f"{what}: {number} within {_in_words(policy.record_age_s)}"))
    for count, source, what in _RATED:
        if (number := recent(count, 3600.0)) > policy.correctable_per_hour:
            reason = f"{what}: {number} within an hour, and {policy.correctable_per_hour} are worth a look"
            found.append(Finding(gpu, source, Condition.DEGRADED, reason))
    return found


def _in_words(age_s: float) -> str:
    return f"{age_s / 3600:g} h" if age_s >= 3600 else f"{age_s:g} s"


_GRAVE: Final = (
    (Count.UNCORRECTABLE, Source.RAS, Condition.UNHEALTHY, "uncorrectable memory errors"),
    (Count.PCIE_FATAL, Source.PCIE, Condition.UNHEALTHY, "fatal errors of PCIe"),
    (Count.PCIE_NONFATAL, Source.PCIE, Condition.DEGRADED, "uncorrectable errors of PCIe"),
    (Count.RETIRED_PAGES, Source.RETIRED_PAGES, Condition.DEGRADED, "pages of VRAM retired"),
)
_RATED: Final = (
    (Count.CORRECTABLE, Source.RAS, "correctable memory errors"),
    (Count.PCIE_CORRECTABLE, Source.PCIE, "errors and replays of PCIe that were mended"),
)


# ------------------------------------------------------------------------------------------------------ overrides


def effective(found: Health | None, word: HealthOverride | None) -> Health | None:
    """What holds: a person's word, else what was found; None where nobody has looked."""
    if word is None:
        return found
    otherwise = "nobody has looked" if found is None else f"found was {found.condition}"
    if found is not None and found.reason:
        otherwise += f": {found.reason}"
    condition = Condition.HEALTHY if word.healthy else Condition.UNHEALTHY
    return Health(condition, f"set by a person; {otherwise}", Source.OVERRIDE, word.since_s)


# ------------------------------------------------------------------------------------------------------- notices


@dataclass(frozen=True, slots=True)
class Notice:
    """What a driver has said of a GPU by itself, between two looks."""

    gpu: GpuId
    kind: str
    """Of the event that tells it: ``gpu.<kind>``."""
    text: str
    finding: Finding | None = None
    recovered: bool = False
    """See :attr:`Look.recovered`."""
    renewed: bool = False
    """See :attr:`Look.renewed`."""

    @property
    def good(self) -> bool:
        return self.recovered or self.renewed


def wedged(gpu: GpuId, methods: str, culprit: str = "") -> Notice:
    """A uevent with ``WEDGED=<methods>`` (Documentation/gpu/drm-uapi.rst): ``none`` is a GPU that has recovered by
    itself; anything else, known today or not, is one that the driver has given up until somebody does that.

    amdgpu says ``none`` of one ring or one queue too (amdgpu_job.c, mes_userqueue.c), which any program can bring
    about: it must not wash off errors that memory or link have made.
    """
    by = f" ({culprit} was at work)" if culprit else ""
    if methods.strip() in ("none", ""):
        return Notice(gpu, "recovered", f"the driver has reset it; what ran on it may be lost{by}", recovered=True)
    text = f"the driver has given it up, and asks for: {methods.replace(',', ', ')}"
    # A reason is shown to everybody, so it names no process; events are for those who may see details.
    return Notice(gpu, "wedged", text + by, Finding(gpu, Source.UEVENT, Condition.UNHEALTHY, text, lasting=True))


def unbound(gpu: GpuId) -> Notice:
    """Its driver has let it go: whatever comes back is to be found anew, and may be back before anybody looks."""
    return Notice(gpu, "unbound", "its driver has let it go", renewed=True)


SMI_VM_FAULT: Final = 1
SMI_THERMAL_THROTTLE: Final = 2
SMI_PRE_RESET: Final = 3
SMI_POST_RESET: Final = 4


def smi_notice(gpu: GpuId, line: str) -> Notice | None:
    """One line of the KFD's events (kfd_smi_events.c): the number in hex, then text; None for what is not one of ours.

    A fault in a process's memory is that process's, and says nothing of the GPU.
    """
    number, _, text = line.strip().partition(" ")
    try:
        event = int(number, 16)
    except ValueError:
        return None
    if event == SMI_VM_FAULT:
        return Notice(gpu, "vm-fault", f"a process has touched memory that it has not (pid and name: {text})")
    if event == SMI_THERMAL_THROTTLE:
        why = f"it slows down for its temperature or power (bits and count: {text})"
        return Notice(gpu, "throttled", why, Finding(gpu, Source.SMI, Condition.DEGRADED, why))
    if event == SMI_PRE_RESET:
        cause = text.partition(" ")[2]
        why = "it is being reset" + (f" ({cause})" if cause else "")
        return Notice(gpu, "reset", why, Finding(gpu, Source.SMI, Condition.UNKNOWN, why, lasting=True))
    if event == SMI_POST_RESET:
        # Of the whole GPU, which is how a driver mends memory that was found to be wrong.
        return Notice(gpu, "recovered", "its reset is over; what ran on it is lost", renewed=True)
    return None
