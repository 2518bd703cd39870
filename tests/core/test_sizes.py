from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amdvgpud.core.errors import Invalid
from amdvgpud.core.sizes import MAX_BYTES, format_size, human_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (1, 1),
        (MAX_BYTES, MAX_BYTES),
        ("1", 1),
        ("4096B", 4096),
        ("16GiB", 16 * 1024**3),
        ("16gi", 16 * 1024**3),
        ("16G", 16 * 1000**3),
        ("16GB", 16 * 1000**3),
        ("1k", 1000),
        ("1Ki", 1024),
        ("2TiB", 2 * 1024**4),
        ("1T", 1000**4),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("0.5 KiB", 512),
        ("  8 MiB  ", 8 * 1024**2),
        ("9223372036854775807", MAX_BYTES),
        # Through a float this would be another number.
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_is_read(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "G",
        "0",
        0,
        -1,
        "-1",
        "+1",
        "1e9",
        "0x10",
        "1,5GiB",
        "1.GiB",
        ".5GiB",
        "1 Gi B",
        "16GiBs",
        "1P",
        "0.3",
        "0.0001KiB",
        "inf",
        "nan",
        "max",
        "unlimited",
        MAX_BYTES + 1,
        "8388608TiB",
        "1_000",
        "٣",
        "²",
        True,
        1.5,
        None,
        b"1",
        ["1"],
    ],
)
def test_a_bad_size_is_an_error_never_zero_and_never_unlimited(text: object) -> None:
    with pytest.raises(Invalid) as refusal:
        parse_size(text, "/vram")  # type: ignore[arg-type]
    assert [field.pointer for field in refusal.value.fields] == ["/vram"]
    assert repr(text) in str(refusal.value)


@given(st.integers(1, MAX_BYTES))
def test_what_is_written_is_read_back(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(16 * 1024**3, "16GiB"), (1536 * 1024**2, "1536MiB"), (1025, "1025"), (1024**4, "1TiB"), (1, "1"), (0, "0")],
)
def test_a_size_is_written_in_the_largest_unit_that_divides_it(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (31 * 1024**3, "31 GiB"),
        (17158897664, "15.98 GiB"),
        (1024**4, "1 TiB"),
        (3000 * 1024**4, "3000 TiB"),
    ],
)
def test_a_size_for_people_has_four_figures(size_bytes: int, text: str) -> None:
    assert human_size(size_bytes) == text


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        size_bytes = parse_size(text)
    except Invalid:
        return
    assert 1 <= size_bytes <= MAX_BYTES
