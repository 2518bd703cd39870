"""Sizes in bytes: one grammar for config, API, command line and policy.

``size = number [unit]``; ``number`` is decimal, with or without a fraction; ``unit`` is ``B``, a decimal prefix
``K M G T`` (powers of 1000, with or without ``B``) or a binary one ``Ki Mi Gi Ti`` (powers of 1024, with or without
``B``). Letter case does not matter; blanks around and before the unit are allowed. The result is a whole number of
bytes, at least 1. A text that is refused is an error: it never means zero and never means unlimited.

``16G`` is 16 * 1000**3 here, as in SI and in the kernel's own block layer; ``16GiB`` is what a GPU's data sheet means.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from amdvgpud.core.errors import Invalid

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS |= dict.fromkeys((_prefix, _prefix + "b"), 1000**_power)
    _UNITS |= dict.fromkeys((_prefix + "i", _prefix + "ib"), 1024**_power)

MAX_BYTES: Final = 2**63 - 1
"""The largest size: what a signed 64-bit field of the policy can hold."""


def parse_size(value: str | int, pointer: str = "size") -> int:
    """Bytes of ``value``; an ``int`` is bytes already. ``Invalid`` names ``pointer``, the value and the grammar."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Invalid.field(pointer, f"{value!r} is no size: write bytes, or a number with a unit, as in '16GiB'")
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value)
        if match is None or (unit := _UNITS.get(match[2].lower())) is None:
            raise Invalid.field(
                pointer, f"{value!r} is no size: write bytes, or a number with a unit (K M G T, KiB MiB GiB TiB)"
            )
        exact = Decimal(match[1]) * unit
        if exact != exact.to_integral_value():
            raise Invalid.field(pointer, f"{value!r} is not a whole number of bytes")
        size = int(exact)
    if not 1 <= size <= MAX_BYTES:
        raise Invalid.field(pointer, f"{value!r} is out of range: a size is 1 to {MAX_BYTES} bytes")
    return size


def format_size(size_bytes: int) -> str:
    """The shortest exact text that :func:`parse_size` reads back as ``size_bytes`` (binary units first, else bytes)."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size_bytes and size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{unit}"
    return str(size_bytes)


def human_size(size_bytes: int) -> str:
    """``size_bytes`` for people's eyes, rounded to four figures: ``15.98 GiB``. Not read back."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{size_bytes} B" if unit == "B" else f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
