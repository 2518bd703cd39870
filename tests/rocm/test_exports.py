"""Every export of a HIP runtime has a rule in shim/front/hip.rules: a new way to take memory cannot come unnoticed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
FRONT = HERE.parents[1] / "shim" / "front"
TABLE = FRONT / "hip-exports.tsv"

Rules = tuple[re.Pattern[str], list[tuple[str, re.Pattern[str]]]]


def read_rules() -> Rules:
    """What a name that must have a rule looks like; and (class, pattern) in order."""
    names: re.Pattern[str] | None = None
    rules = []
    for line in (FRONT / "hip.rules").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        kind, _, pattern = line.partition(" ")
        if kind == "names":
            names = re.compile(pattern)
        else:
            rules.append((kind, re.compile(pattern)))
    assert names
    return names, rules


def class_of(name: str, rules: Rules) -> str | None:
    return next((kind for kind, pattern in rules[1] if pattern.fullmatch(name)), None)


def uncovered(names: set[str], rules: Rules) -> list[str]:
    """Names that have to do with memory or compute units and that no rule but the last resort (`works`) fits."""
    left = {n: class_of(n, rules) for n in names}
    return sorted(n for n, kind in left.items() if not kind or (kind == "works" and rules[0].fullmatch(n)))


def table() -> dict[str, tuple[str, set[str]]]:
    """The committed table: name -> its class and the versions that export it."""
    lines = [line.split("\t") for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return {name: (kind, set(versions.split(","))) for name, kind, versions in lines}


def test_the_table_of_four_runtimes_follows_from_the_rules() -> None:
    rules = read_rules()
    assert {name: kind for name, (kind, _) in table().items()} == {name: class_of(name, rules) for name in table()}


def test_the_table_has_every_export_of_four_runtimes() -> None:
    counts = {v: len([n for n, (_, vs) in table().items() if v in vs]) for v in ("5.2.3", "5.7.1", "6.4.3", "7.2.4")}
    assert counts == {"5.2.3": 409, "5.7.1": 459, "6.4.3": 502, "7.2.4": 525}


def test_no_name_of_memory_is_left_to_the_last_resort() -> None:
    assert uncovered(set(table()), read_rules()) == []


@pytest.mark.parametrize(
    "name", ["hipMallocFromTheFuture", "hipMemPoolAllocate", "hipArray4DCreate", "hipHeapGrow", "unheard_of"]
)
def test_a_new_name_of_memory_is_an_error(name: str) -> None:
    assert uncovered({name}, read_rules()) == [name]


@pytest.mark.rocm
def test_an_installed_runtime_exports_nothing_uncovered(runtime: Any, exports: Any) -> None:
    names = exports(runtime.library)
    assert (uncovered(names, read_rules()), len(names) > 400) == ([], True)


def test_what_the_front_binds_is_what_the_rules_say_it_does() -> None:
    """The names in front.c and the rules of class `front` are the same, over all names that any of the four exports."""
    # These are only listened to: what a graph will need is looked up when it is made ready.
    listened = {
        "hipGraphInstantiate",
        "hipGraphInstantiateWithFlags",
        "hipGraphInstantiateWithParams",
        "hipGraphExecDestroy",
    }
    bound = set(re.findall(r"^HIP\((\w+)\)", (FRONT / "names.h").read_text(), re.MULTILINE))
    assert bound - listened == {name for name, (kind, _) in table().items() if kind == "front"}
