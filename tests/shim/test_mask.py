"""Narrowing a mask, and the two texts a user may lower a slice by: pure C, held to oracles in Python."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from hypothesis import example, given, settings
from hypothesis import strategies as st

from amdvgpud.core.errors import Invalid
from amdvgpud.core.sizes import parse_size

if TYPE_CHECKING:
    from tests.shim.conftest import Built

WORDS = 16


class Mask(ctypes.Structure):
    _fields_ = (("word", ctypes.c_uint64 * WORDS),)

    @classmethod
    def of(cls, value: int) -> Mask:
        return cls((ctypes.c_uint64 * WORDS)(*(value >> 64 * i & (1 << 64) - 1 for i in range(WORDS))))

    @property
    def value(self) -> int:
        return sum(int(word) << 64 * i for i, word in enumerate(self.word))


class Rule(ctypes.Structure):
    _fields_ = (("mask", Mask), ("cus", ctypes.c_uint32), ("xccs", ctypes.c_uint32), ("wgp", ctypes.c_int))


_loaded: dict[str, ctypes.CDLL] = {}


def pure(built: Built) -> ctypes.CDLL:
    library = _loaded.setdefault(str(built.pure), ctypes.CDLL(str(built.pure)))
    library.pure_size.restype = ctypes.c_uint64
    return library


def sound(mask: int, cus: int, xccs: int, wgp: bool) -> bool:
    """The rule in other words: every residue of the XCC count has a bit, and no WGP is split."""
    bits = [bit for bit in range(1024) if mask >> bit & 1]
    served = {bit % xccs for bit in bits} == set(range(xccs))
    whole = not wgp or all(mask >> (bit ^ 1) & 1 for bit in bits)
    return served and whole and bool(bits) and all(bit < cus for bit in bits)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, bool, int]:
    """(slice's mask, CU count, XCC count, WGP, asked mask); the slice's mask is a sound one, as the planner's are."""
    wgp = draw(st.booleans())
    xccs = 1 if wgp else draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    cus = draw(st.integers(1, 1024 // xccs // 2)) * xccs * 2
    if wgp:
        pairs = draw(st.sets(st.integers(0, cus // 2 - 1), min_size=1))
        mask = sum(3 << 2 * pair for pair in pairs)
    else:
        mask = 0
        for xcc in range(xccs):
            for row in draw(st.sets(st.integers(0, cus // xccs - 1), min_size=1)):
                mask |= 1 << (row * xccs + xcc)
    asked = draw(st.integers(0, (1 << 1024) - 1) | st.just(mask) | st.integers(0, (1 << cus) - 1))
    return mask, cus, xccs, wgp, asked


@settings(max_examples=400)
@given(case=cases())
@example(case=((1 << 76) - 1, 304, 8, False, ((1 << 104) - 1) ^ ((1 << 72) - 1)))
def test_a_narrowed_mask_is_within_the_slice_and_sound(built: Built, case: tuple[int, int, int, bool, int]) -> None:
    mask, cus, xccs, wgp, asked = case
    out = Mask()
    rule = Rule(Mask.of(mask), cus, xccs, wgp)
    pure(built).pure_narrow(ctypes.byref(rule), ctypes.byref(Mask.of(asked)), ctypes.byref(out))
    both = mask & asked
    assert out.value == (both if sound(both, cus, xccs, wgp) else mask)
    assert sound(out.value, cus, xccs, wgp)
    again = Mask()
    pure(built).pure_narrow(ctypes.byref(rule), ctypes.byref(out), ctypes.byref(again))
    assert again.value == out.value


def test_the_length_sent_is_the_cu_count_in_whole_words(built: Built) -> None:
    lengths = {n: pure(built).pure_bits(ctypes.byref(Rule(Mask(), n, 1, 0))) for n in (304, 38, 152, 76, 104, 64, 2000)}
    assert lengths == {304: 320, 38: 64, 152: 160, 76: 96, 104: 128, 64: 64, 2000: 1024}


@settings(max_examples=400)
@given(
    text=st.from_regex(r"\A[ \t]?[0-9]{1,20}(\.[0-9]{1,6})?[ ]?([kmgtKMGT]i?)?[bB]?[ ]?\Z")
    | st.text(alphabet="0123456789.kmgtiBx- ", max_size=12)
)
@example(text="4GiB")
@example(text="1.50 G")
@example(text="9223372036854775807")
@example(text="9223372036854775808")
@example(text="0")
def test_sizes_are_read_as_everywhere_else_in_the_project(built: Built, text: str) -> None:
    try:
        wanted = parse_size(text)
    except Invalid:
        wanted = 0
    assert pure(built).pure_size(text.encode()) == wanted


def test_lists_of_cus(built: Built) -> None:
    table = {
        "0": 1,
        "0-3,8": 0x10F,
        "1023": 1 << 1023,
        "5,5": 32,
        "": None,
        "0-": None,
        "3-1": None,
        "1024": None,
        "0,": None,
        "0 - 3": None,
        "x": None,
        "99999999999999999999999": None,
    }
    found: dict[str, int | None] = {}
    for text in table:
        out = Mask()
        found[text] = out.value if pure(built).pure_cus(text.encode(), ctypes.byref(out)) else None
    assert found == table
