"""Whether a GPU works, as far as the kernel and its neighbours tell: the words, and no I/O.

Owns what a finding is and what follows from it. Does not own where findings come from (:mod:`amdvgpud.host`), nor what
a face makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Condition(StrEnum):
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """Works, and somebody should look. Takes new slices."""
    UNHEALTHY = "unhealthy"
    """Takes no new slice; what runs on it keeps what it has."""
    UNKNOWN = "unknown"
    """Cannot be told now (a reset is under way, say). Takes no new slice; becomes unhealthy if it lasts."""


@dataclass(frozen=True, slots=True)
class Health:
    """The standing verdict on one GPU."""

    condition: Condition = Condition.HEALTHY
    reason: str = ""
    """A sentence for people; empty where all is well."""
    source: str = ""
    """Who found it, one word of a closed list (a metric's label); empty where all is well."""
    since_s: float = 0.0
    """Unix time of the last change of ``condition``."""

    @property
    def placeable(self) -> bool:
        return self.condition in (Condition.HEALTHY, Condition.DEGRADED)
