from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amdvgpud.core.compute import format_compute, parse_compute
from amdvgpud.core.errors import Invalid
from amdvgpud.core.model import Compute, ComputePolicy


@pytest.mark.parametrize(
    ("text", "policy", "compute"),
    [
        ("25%", "balanced", Compute(percent=25.0)),
        (" 12.5 % ", "fine", Compute(ComputePolicy.FINE, percent=12.5)),
        ("38", "exact", Compute(ComputePolicy.EXACT, cu_count=38)),
        ("38", "balanced", Compute(cu_count=38)),
        ("whole", "balanced", Compute(ComputePolicy.WHOLE)),
        ("Whole", "whole", Compute(ComputePolicy.WHOLE)),
        ("100%", "whole", Compute(ComputePolicy.WHOLE)),
        ("50%", "shared", Compute(ComputePolicy.SHARED, percent=50.0)),
    ],
)
def test_a_compute_text_is_read(text: str, policy: str, compute: Compute) -> None:
    assert parse_compute(text, policy) == compute


@pytest.mark.parametrize(
    ("text", "policy", "pointer"),
    [
        ("", "balanced", "/compute"),
        ("0%", "balanced", "/compute"),
        ("100.1%", "balanced", "/compute"),
        ("-5%", "balanced", "/compute"),
        ("1e1%", "balanced", "/compute"),
        ("0", "balanced", "/compute"),
        ("1025", "balanced", "/compute"),
        ("38.5", "balanced", "/compute"),
        ("٣", "balanced", "/compute"),
        ("25", "whole", "/compute"),
        ("25%", "whole", "/compute"),
        ("25%", "exact", "/compute"),
        ("whole", "shared", "/compute"),
        ("quarter", "balanced", "/compute"),
        ("25%", "greedy", "/policy"),
    ],
)
def test_a_bad_compute_text_is_refused_by_the_name_of_its_field(text: str, policy: str, pointer: str) -> None:
    with pytest.raises(Invalid) as refusal:
        parse_compute(text, policy)
    assert [field.pointer for field in refusal.value.fields] == [pointer]


_policies = st.sampled_from([p for p in ComputePolicy if p is not ComputePolicy.WHOLE])
_computes = (
    st.builds(Compute, _policies, cu_count=st.integers(1, 1024))
    | st.builds(
        Compute,
        _policies.filter(lambda p: p is not ComputePolicy.EXACT),
        percent=st.decimals("0.00001", 100, places=5).map(float),
    )
    | st.just(Compute(ComputePolicy.WHOLE))
)


@given(_computes)
def test_what_is_written_is_read_back(compute: Compute) -> None:
    assert parse_compute(format_compute(compute), compute.policy) == compute


def test_texts_are_short() -> None:
    assert format_compute(Compute(percent=25.0)) == "25%"
    assert format_compute(Compute(percent=0.00001)) == "0.00001%"
