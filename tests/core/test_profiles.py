"""Slice profiles: their two written forms, and the names of their slices."""

from __future__ import annotations

import pytest

from amdvgpud.core.errors import Invalid
from amdvgpud.core.model import Compute, ComputePolicy
from amdvgpud.core.profiles import SliceProfile, parse_profiles

GIB = 1024**3
QUARTER = SliceProfile("25c-48g", Compute(percent=25), 48 * GIB, 4)
WHOLE = SliceProfile("all", Compute(ComputePolicy.WHOLE), None)


def test_a_table_and_a_text_say_the_same() -> None:
    table = {"25c-48g": {"compute": "25%", "vram": "48GiB", "count": 4}, "all": {"compute": "whole"}}
    assert parse_profiles(table) == (QUARTER, WHOLE)
    assert parse_profiles("25c-48g=25%:48GiB:4, all=whole") == (QUARTER, WHOLE)
    assert parse_profiles(["25c-48g=25%:48GiB:4", "all=whole::0"]) == (QUARTER, WHOLE)
    assert parse_profiles({}) == parse_profiles("") == ()


@pytest.mark.parametrize("profile", [QUARTER, WHOLE, SliceProfile("a.b", Compute(cu_count=38), 3 * 2**20 + 1)])
def test_a_profile_reads_back_as_it_was_written(profile: SliceProfile) -> None:
    assert parse_profiles(str(profile)) == (profile,)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("25c", "'25c' is no profile: write name=compute:vram:count"),
        ("A=25%:1GiB", "'A' is no profile name"),
        ("a..b=25%:1GiB", "is no profile name"),
        ("a=25%", "profile 'a' needs a size of VRAM"),
        ("a=whole:1GiB", "profile 'a' needs a size of VRAM, unless"),
        ("a=lots:1GiB", "profile 'a': 'lots' is no amount of compute"),
        ("a=25%:much", "profile 'a': 'much' is no size"),
        ("a=25%:1GiB:99999", "a count of 99999 is out of range"),
        ("a=25%:1GiB:-1", "is no profile"),
        ("a=25%:1GiB,a=5%:1GiB", "profile 'a' is there twice"),
        ({"a": {"compute": "25%", "vram": "1GiB", "mem": 1}}, "mem is no part of a profile"),
        ({"a": {"compute": "25%", "vram": "1GiB", "count": True}}, "True is no count"),
        ({"a": "25%"}, "'25%' is no table"),
        (7, "7 is no table of profiles"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_by_its_name(value: object, said: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_profiles(value)
    assert said in refused.value.detail


@pytest.mark.parametrize(
    ("name", "number"),
    [("25c-48g-0", 0), ("25c-48g-12", 12), ("25c-48g", None), ("25c-48g-01", None), ("25c-48g-x", None), ("b-0", None)],
)
def test_a_slice_is_known_by_its_name(name: str, number: int | None) -> None:
    assert QUARTER.number_of(name) == number
