"""Slice profiles: slices of one size that a node cuts beforehand and offers by a resource name of their own.

One writer and one reader of the text form, ``25c-48g=25%:48GiB:4`` (name, compute, VRAM, how many), and the reader of
the same as a table of the configuration. For schedulers that can count and nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from amdvgpud.core.compute import format_compute, parse_compute
from amdvgpud.core.errors import Invalid
from amdvgpud.core.model import Compute, ComputePolicy, Request, SliceName
from amdvgpud.core.sizes import format_size, parse_size

_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,48}[a-z0-9])?", re.ASCII)
MOST: Final = 10_000


@dataclass(frozen=True, slots=True)
class SliceProfile:
    """``count`` 0: as many as fit. ``vram_bytes`` None: all of a whole partition."""

    name: str
    compute: Compute
    vram_bytes: int | None
    count: int = 0

    def __post_init__(self) -> None:
        # Short enough for "<name>-<n>" to be a slice's name, and good as the second half of a resource's name.
        if not _NAME.fullmatch(self.name) or ".." in self.name:
            raise Invalid(f"{self.name!r} is no profile name: use 1 to 50 of a-z 0-9 . - (as a slice's name)")
        if (self.vram_bytes is None) != (self.compute.policy is ComputePolicy.WHOLE):
            raise Invalid(f"profile {self.name!r} needs a size of VRAM, unless its compute is 'whole', which has all")
        if not 0 <= self.count <= MOST:
            raise Invalid(
                f"profile {self.name!r}: a count of {self.count} is out of range: 0 (as many as fit) to {MOST}"
            )

    def __str__(self) -> str:
        vram = "" if self.vram_bytes is None else format_size(self.vram_bytes)
        return f"{self.name}={format_compute(self.compute)}:{vram}:{self.count}"

    def slice_name(self, n: int) -> SliceName:
        """Of the n-th slice; also the device's id, since a kubelet remembers ids over restarts of both sides."""
        return SliceName(f"{self.name}-{n}")

    def number_of(self, name: str) -> int | None:
        """The n of :meth:`slice_name`; None for a slice of somebody else."""
        head, _, tail = name.rpartition("-")
        return int(tail) if head == self.name and tail.isdecimal() and tail == str(int(tail)) else None

    def request(self, n: int) -> Request:
        return Request(self.slice_name(n), self.compute, self.vram_bytes)


def parse_profiles(value: object) -> tuple[SliceProfile, ...]:
    """From a table ``{name: {compute, vram, count}}``, from texts, or from one text with commas; in their order.

    ``Invalid`` names the profile and what is wrong with it.
    """
    if isinstance(value, Mapping):
        made = tuple(_of_table(str(name), entry) for name, entry in value.items())
    else:
        texts = value.split(",") if isinstance(value, str) else value
        if not isinstance(texts, Iterable) or not all(isinstance(text, str) for text in texts):
            raise Invalid(f"{value!r} is no table of profiles, as in {{25c-48g = {{compute = '25%', vram = '48GiB'}}}}")
        made = tuple(_of_text(text.strip()) for text in texts if text.strip())
    names = [profile.name for profile in made]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise Invalid(f"profile {twice[0]!r} is there twice")
    return made


def _of_table(name: str, entry: object) -> SliceProfile:
    if not isinstance(entry, Mapping) or (unknown := sorted(entry.keys() - {"compute", "vram", "count"})):
        what = (
            f"{', '.join(unknown)} is no part of a profile" if isinstance(entry, Mapping) else f"{entry!r} is no table"
        )
        raise Invalid(
            f"profile {name!r}: {what}: give compute, vram and count, as in {{compute = '25%', vram = '48GiB'}}"
        )
    count = entry.get("count", 0)
    if not isinstance(count, int) or isinstance(count, bool):
        raise Invalid(f"profile {name!r}: {count!r} is no count")
    return _made(name, str(entry.get("compute", "")), entry.get("vram", ""), count)


def _of_text(text: str) -> SliceProfile:
    name, equals, rest = text.partition("=")
    compute, _, tail = rest.partition(":")
    vram, _, count = tail.partition(":")
    if not equals or not (count.isdecimal() or not count):
        raise Invalid(f"{text!r} is no profile: write name=compute:vram:count, as in '25c-48g=25%:48GiB:0'")
    return _made(name, compute, vram, int(count or 0))


def _made(name: str, compute: str, vram: object, count: int) -> SliceProfile:
    try:
        size = None if vram == "" else parse_size(vram, "vram")  # type: ignore[arg-type]
        amount = parse_compute(compute)
    except Invalid as error:
        raise Invalid(f"profile {name!r}: {error.fields[0].detail}") from error
    return SliceProfile(name, amount, size, count)
