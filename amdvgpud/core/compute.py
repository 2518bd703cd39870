"""The text of a compute request, as API, command line and profiles write it: ``25%``, ``38``, ``whole``.

One writer, one reader. The policy stands beside it as a word of its own.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from amdvgpud.core.errors import Invalid
from amdvgpud.core.model import Compute, ComputePolicy

_PERCENT: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,15})?)\s*%", re.ASCII)
_COUNT: Final = re.compile(r"[0-9]{1,9}", re.ASCII)


def parse_compute(text: str, policy: str = ComputePolicy.BALANCED) -> Compute:
    """``text`` and ``policy`` as a Compute. ``Invalid`` names ``/compute`` or ``/policy``.

    ``whole`` is a policy too: it may stand in either place, and policy ``whole`` agrees with ``100%`` (the API's
    default) but with no smaller amount.
    """
    try:
        chosen = ComputePolicy(policy)
    except ValueError:
        raise Invalid.field(
            "/policy", f"{policy!r} is no policy: use one of {', '.join(p.value for p in ComputePolicy)}"
        ) from None
    amount = text.strip().lower()
    if amount == "whole":
        if chosen not in (ComputePolicy.BALANCED, ComputePolicy.WHOLE):
            raise Invalid.field("/compute", f"'whole' has no policy {chosen.value!r}: leave the policy out")
        return Compute(ComputePolicy.WHOLE)
    if match := _PERCENT.fullmatch(amount):
        percent = float(match[1])
        if chosen is ComputePolicy.WHOLE and percent == 100:
            return Compute(ComputePolicy.WHOLE)
        return Compute(chosen, percent=percent)
    if _COUNT.fullmatch(amount):
        return Compute(chosen, cu_count=int(amount))
    raise Invalid.field(
        "/compute", f"{text!r} is no amount of compute: write '25%', a CU count such as '38', or 'whole'"
    )


def format_compute(compute: Compute) -> str:
    """The shortest text that :func:`parse_compute`, given the same policy, reads back as ``compute``."""
    if compute.percent is not None:
        # Through Decimal: a float's own text turns to powers of ten below 0.0001, which the reader refuses.
        digits = f"{Decimal(repr(compute.percent)):f}"
        return f"{digits.removesuffix('.0')}%"
    return "whole" if compute.cu_count is None else str(compute.cu_count)
