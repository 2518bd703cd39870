"""The admission protocol, proven on the C itself: ``shim/tests/explore.c`` runs the real ``ledger.c`` in every order.

What is walked and what is checked in each state stands at the head of that file. Here: which processes, which asks,
which deaths; what must come out; and that each rule of the protocol is needed, by breaking the C and seeing it found.
``EXPLORE=long`` adds the walks of minutes (`make chaos`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.shim.conftest import Built

SHIM = Path(__file__).resolve().parents[2] / "shim"
LONG = os.environ.get("EXPLORE") == "long"


def compiled(built: Built, name: str, *options: str) -> Path:
    made = built.drive.with_name(name)
    built.cc(["-O2", *options, str(SHIM / "tests/explore.c"), "-o", str(made)])
    return made


@pytest.fixture(scope="session")
def explorer(built: Built) -> Path:
    return compiled(built, "explore")


def walk(explorer: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run([explorer, *words], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    found["path"] = done.stderr
    return found


def all_of(explorer: Path, words: str) -> set[str]:
    """The outcomes of every run; fails where a state was wrong."""
    found = walk(explorer, *words.split())
    assert found["fault"] == "", f"{words}: {found['fault']}\n{found['path'][-3000:]}"
    return set(found["outcomes"])


ONE = {"won refused", "refused won"}
"""Exactly one of two."""

LONG_WALKS: list[tuple[str, set[str]]] = [
    ("10 1 0 6:Ad 6:A", ONE),  # starts again under the pid of the dead
    ("10 1 0 6:A 6:Ad", ONE),
    ("10 1 0 6:AWx 6:AW", ONE | {"won won"}),
    ("10 2 0 6:sAk 6:sAd", ONE | {"dead won", "dead refused"}),
    ("10 0 1 6:sP 6:sP", ONE | {"refused refused"}),
]
ONE_OF_THREE = {"won refused refused", "refused won refused", "refused refused won"}
TWO_OF_THREE = {"won won refused", "won refused won", "refused won won"}
LONG_THREES: list[tuple[str, set[str]]] = [
    ("10 0 0 6:sA 6:sA 6:sA", ONE_OF_THREE),
    ("10 0 0 5:sAW 6:sA 4:sA", TWO_OF_THREE - {"won won refused"} | {"won won won"}),
    ("10 0 0 6:sAW 6:sAW 6:sAW", ONE_OF_THREE | TWO_OF_THREE | {"won won won"}),
]


@pytest.mark.parametrize(
    ("words", "outcomes"),
    [
        ("10 0 0 6:A 6:A", ONE),
        ("10 0 0 10:A 1:A", ONE),
        ("10 0 0 1:A 10:A", ONE),
        ("10 0 0 5:A 5:A", {"won won"}),
        ("10 0 0 11:A 10:A", {"refused won"}),
        ("10 0 0 6:AW 6:AW", ONE | {"won won"}),
    ],
)
def test_in_every_order_of_two_processes_exactly_those_win_that_should(
    explorer: Path, words: str, outcomes: set[str]
) -> None:
    assert all_of(explorer, words) == outcomes


@pytest.mark.timeout(1800 if LONG else 120)
@pytest.mark.parametrize(
    ("words", "outcomes"), [("10 0 0 4:sA 4:sA 4:sA", TWO_OF_THREE), *(LONG_THREES if LONG else ())]
)
def test_in_every_order_of_three_processes_that_have_their_slots_as_many_win_as_fit(
    explorer: Path, words: str, outcomes: set[str]
) -> None:
    assert all_of(explorer, words) == outcomes


@pytest.mark.timeout(7200 if LONG else 120)
@pytest.mark.parametrize(
    ("words", "outcomes"),
    [
        # a death for good at any step, of the one in the lower slot and of the one in the upper
        ("10 1 0 6:sAWk 6:sAW", ONE | {"won won", "dead won", "dead refused"}),
        ("10 1 0 6:sAW 6:sAWk", ONE | {"won won", "won dead", "refused dead"}),
        # the same beside the daemon, which takes the dead one's slot apart meanwhile
        ("10 1 0 6:sAWk 6:sA 0:D", ONE | {"won won", "dead won", "dead refused"}),
        # an exec at any step: pid and start time stay
        ("10 1 0 6:sAx 6:sA", ONE),
        # a reclaimer that dies in its work and starts again under its pid
        ("10 2 0 6:sAk 1:sAd", {"won won", "dead won"}),
        *(LONG_WALKS if LONG else ()),
    ],
)
def test_a_death_or_exec_at_any_step_never_goes_over_and_leaves_nobody_stuck(
    explorer: Path, words: str, outcomes: set[str]
) -> None:
    assert all_of(explorer, words) == outcomes


@pytest.mark.parametrize(
    ("words", "outcomes"),
    [
        ("10 0 0 6:P 6:A", ONE),
        ("10 0 0 6:P 6:P", ONE),
        # Both fit. While it is redeemed a promise counts twice: a neighbour that looks twice just then is refused.
        ("10 0 0 5:P 5:P", ONE | {"won won"}),
        # Time may pass anywhere: waits end, promises run out, and still nothing goes over.
        ("10 0 1 6:sA 6:sA", ONE | {"won busy", "busy won", "busy busy"}),
        ("10 0 1 6:sP 6:sA", ONE | {"won busy", "refused busy"}),
    ],
)
def test_a_promise_is_kept_until_its_time_is_over_and_never_past_the_quota(
    explorer: Path, words: str, outcomes: set[str]
) -> None:
    assert all_of(explorer, words) == outcomes


# ------------------------------------------------------------------------------------------- each rule is needed

ANNOUNCE = "        AVG_STORE(&cell->pending, bytes);\n"
TAKE = "                if (earmark) AVG_STORE(&cell->earmark, earmark);"
READ_PENDING = "            uint64_t announced = AVG_LOAD(&cell->pending);"
READ_USED = "            used += AVG_LOAD(&cell->used); /* last: see the head of this file */"
CLEAR_BIT = "    __atomic_fetch_and(&ledger->occupied[index / 64], ~(1ULL << index % 64), __ATOMIC_SEQ_CST);\n"
SET_FREE = "    avg_owner_swap(slot, mine, avg_owner_after(mine, 0, 0, 0));\n"
GIVE_WAY = "if (avg_sum(sums.used, bytes) > quota || sums.lower) break;"
REDEEM = "    __atomic_fetch_add(&cell->used, bytes, __ATOMIC_SEQ_CST);\n    int stood = promised(cell) >= bytes;"

OVER, PAIR, PROMISE = "over the quota", "10 0 0 6:A 6:A", "10 0 1 6:sP 6:sA"
SETTLED = "10 0 0 6:sA 6:sA"
"""The pair again where looks at what nobody else changes are no steps: that must hide nothing."""
BREAKS: dict[str, tuple[dict[str, str], str, str]] = {
    # what is put in place of what in the C, a walk that finds it, by which check
    "no announcement": ({ANNOUNCE: ""}, PAIR, OVER),
    "announced by a release store": (
        {ANNOUNCE: "__atomic_store_n(&cell->pending, bytes, __ATOMIC_RELEASE);"},
        PAIR,
        OVER,
    ),
    "pending cleared before used is raised": ({TAKE: "AVG_STORE(&cell->pending, 0);" + TAKE}, PAIR, OVER),
    "used read before pending": ({READ_PENDING: READ_USED + READ_PENDING, READ_USED: ""}, PAIR, OVER),
    "both withdraw": ({GIVE_WAY: "AVG_STORE(&cell->pending, 0); return AVG_OVER;"}, PAIR, ""),
    "nobody withdraws": (
        {GIVE_WAY: "if (avg_sum(sums.used, bytes) > quota) break;"},
        PAIR,
        "stuck: nobody can go on",
    ),
    "seized without looking": (
        {"if (!avg_owner_swap(slot, dead, mine)) return 0;": "AVG_STORE(&slot->owner, mine);"},
        "10 1 0 6:sAk 6:A 0:D",
        "the slot of a living process was taken away",
    ),
    "occupied cleared after the slot is free": (
        {CLEAR_BIT: "", SET_FREE: SET_FREE + CLEAR_BIT},
        "10 1 0 6:sAk 6:A 0:D",
        "memory is out in a slot that sums pass over",
    ),
    "a past life as reclaimer overlooked": (
        {"if (owner & AVG_OWNER_RECLAIM) return 1;": "if (owner & AVG_OWNER_RECLAIM) return 0;"},
        "10 2 0 6:sAk 1:sAd",
        "a slot is left in the hands of a past life",
    ),
    "promise redeemed without a second look": ({REDEEM: REDEEM.replace("promised(cell) >= bytes", "1")}, PROMISE, OVER),
    "promise taken away before it is charged": (
        {REDEEM: "AVG_STORE(&cell->earmark, 0);" + REDEEM.replace("promised(cell) >= bytes", "1")},
        PROMISE,
        OVER,
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_each_rule_is_needed(built: Built, tmp_path: Path, name: str) -> None:
    """The walk goes red when one rule is dropped from the real source."""
    changes, words, fault = BREAKS[name]
    texts = {file: (SHIM / "src" / file).read_text() for file in ("ledger.c", "slot.h", "ledger.h", "os.h")}
    for number, there in enumerate(changes):  # marks first: what is put may hold what another change looks for
        places = [file for file, text in texts.items() if text.count(there) == 1]
        assert len(places) == 1, f"{there!r} has gone: say here what stands for it now"
        texts[places[0]] = texts[places[0]].replace(there, f"<{number}>")
    for file in texts:
        for number, put in enumerate(changes.values()):
            texts[file] = texts[file].replace(f"<{number}>", put)
        (tmp_path / file).write_text(texts[file])
    broken = compiled(built, "explore-" + re.sub(r"\W", "-", name), f'-DLEDGER="{tmp_path}/ledger.c"')
    for walked in (words, SETTLED) if words == PAIR else (words,):
        found = walk(broken, *walked.split())
        if fault:
            assert found["fault"] == fault
        else:
            assert "refused refused" in found["outcomes"]
