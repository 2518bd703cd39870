"""The admission protocol, checked over all interleavings: a model of ``shim/src/ledger.c`` and ``slot.h``.

Each step of the model is one load, store or compare-and-swap of the C, in its order; between any two the others may
run, and a process may die. A state is a tuple, so all of them can be walked: nothing is sampled. What the model leaves
out: promises (earmarks), more than two slots, and time (waiting is looking again, for as long as it takes).

``REAL`` is the truth that the ledger stands for: bytes that the driver has given to living processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

QUOTA = 10
FREE = ("free", 0)
Owner = tuple[str, int]
"""Who and which claim: the generation in the owner word, without its wrapping."""


class Slot(NamedTuple):
    owner: Owner
    used: int = 0
    pending: int = 0


class Actor(NamedTuple):
    """One process (or the daemon): where it is in its program and what it holds in registers."""

    pc: str
    slot: int = 0
    """Which slot is being reclaimed."""
    used_sum: int = 0
    pending_sum: int = 0
    lower: bool = False
    seen: Owner = FREE
    refusals: int = 0
    generation: int = 0
    back: str = ""
    """Where to go on after a reclaim."""
    real: int = 0
    restarted: bool = False
    outcome: str = ""


class World(NamedTuple):
    slots: tuple[Slot, Slot]
    actors: tuple[Actor, ...]

    def with_slot(self, index: int, **changes: object) -> World:
        slots = list(self.slots)
        slots[index] = slots[index]._replace(**changes)  # type: ignore[arg-type]
        return self._replace(slots=(slots[0], slots[1]))

    def with_actor(self, who: int, **changes: object) -> World:
        actors = list(self.actors)
        actors[who] = actors[who]._replace(**changes)  # type: ignore[arg-type]
        return self._replace(actors=tuple(actors))


class Protocol:
    """The programs. Process 0 has slot 0 and process 1 slot 1; actor 2, where there is one, is the daemon.

    ``asks``: bytes each process asks for. ``crashes``: these processes may die anywhere, once, and start again.
    ``broken`` breaks one rule, by name, to see that the checks notice.
    """

    def __init__(self, asks: tuple[int, int], *, crashes: frozenset[int] = frozenset(), broken: str = "") -> None:
        self.asks = asks
        self.crashes = crashes
        self.broken = broken

    def start(self) -> World:
        slots = Slot(("p0", 1)), Slot(("p1", 1))
        actors = [Actor("look", generation=1), Actor("look", generation=1)]
        if self.crashes:
            actors.append(Actor("judge"))
        return World(slots, tuple(actors))

    def steps(self, world: World) -> Iterator[tuple[str, World]]:
        for who, actor in enumerate(world.actors):
            if actor.pc not in ("end", "dead"):
                yield f"{who}:{actor.pc}", self.step(world, who)
                if who in self.crashes and not actor.restarted:
                    yield f"{who}:dies", world.with_actor(who, pc="dead", real=0)
            elif actor.pc == "dead":
                yield f"{who}:restarts", world.with_actor(who, **Actor("claim", restarted=True)._asdict())

    # One method a step would hide the order; this reads from top to bottom like the C.
    def step(self, world: World, who: int) -> World:
        me, mine = world.actors[who], world.slots[who] if who < 2 else world.slots[0]
        asked = self.asks[who] if who < 2 else 0

        def go(pc: str, **changes: object) -> World:
            return world.with_actor(who, pc=pc, **changes)

        match me.pc:
            # --- look: each slot's pending, then its used
            case "look" | "look again" | "look lower":
                return go(f"{me.pc}/0", used_sum=0, pending_sum=0, lower=False)
            case "look/0" | "look/1" | "look/2" | "look/3":
                return self.read(world, who, "look")
            case "look again/0" | "look again/1" | "look again/2" | "look again/3":
                return self.read(world, who, "look again")
            case "look lower/0" | "look lower/1" | "look lower/2" | "look lower/3":
                return self.read(world, who, "look lower")

            # --- decide
            case "look/done":
                if me.used_sum + asked <= QUOTA:
                    return go("announce")
                if me.refusals:
                    return go("end", outcome="refused")
                return go("judge", refusals=1, back="look", slot=1 - who)
            case "announce":
                if self.broken == "no announcement":
                    return go("look again")
                return world.with_slot(who, pending=asked).with_actor(who, pc="look again")
            case "look again/done":
                pending = me.pending_sum + (asked if self.broken == "no announcement" else 0)
                if me.used_sum + pending <= QUOTA:
                    return go("take")
                if self.broken == "both withdraw":
                    return go("withdraw", outcome="refused")
                if me.used_sum + asked > QUOTA or me.lower:
                    return go("withdraw")
                return go("judge", back="look again", slot=1 - who)
            case "take":
                if self.broken == "pending first":
                    return world.with_slot(who, pending=0).with_actor(who, pc="take used")
                return world.with_slot(who, used=mine.used + asked).with_actor(who, pc="settle")
            case "take used":
                return world.with_slot(who, used=mine.used + asked).with_actor(who, pc="driver gives")
            case "settle":
                return world.with_slot(who, pending=0).with_actor(who, pc="driver gives")
            case "withdraw":
                after = "end" if me.outcome else "look lower"
                return world.with_slot(who, pending=0).with_actor(who, pc=after)
            case "look lower/done":
                return go("judge", back="look lower", slot=1 - who) if me.lower else go("look")

            # --- hold, then give back
            case "driver gives":
                return go("driver takes" if self.crashes else "end", real=asked, outcome="won")
            case "driver takes":
                return go("uncharge", real=0)
            case "uncharge":
                return world.with_slot(who, used=mine.used - asked).with_actor(who, pc="end")

            # --- reclaim the slot `me.slot`, if its owner is dead, and go on at `me.back`
            case "judge":
                owner = world.slots[me.slot].owner
                if self.is_dead(world, owner):
                    return go("seize", seen=owner)
                if who == 2:  # the daemon looks at the one, then at the other
                    return go("judge", slot=1) if me.slot == 0 else go("end")
                return go(me.back)
            case "seize":
                if self.broken == "seize without looking" or world.slots[me.slot].owner == me.seen:
                    seized = world.with_slot(me.slot, owner=(self.reclaimer(world, who), me.seen[1] + 1))
                    return seized.with_actor(who, pc="clear pending")
                return go("judge" if who == 2 else me.back)
            case "clear pending":
                return world.with_slot(me.slot, pending=0).with_actor(who, pc="clear used")
            case "clear used":
                return world.with_slot(me.slot, used=0).with_actor(who, pc="set free")
            case "set free":
                owner = ("free", me.seen[1] + 1)
                after = "judge" if who == 2 else me.back
                if world.slots[me.slot].owner != (self.reclaimer(world, who), me.seen[1] + 1):
                    return go(after)
                return world.with_slot(me.slot, owner=owner).with_actor(who, pc=after)

            # --- a process that starts where one has died: it takes the slot once it is free
            case "claim":
                if mine.owner[0] == "free":
                    generation = mine.owner[1] + 1
                    return world.with_slot(who, owner=(f"p{who}", generation)).with_actor(
                        who, pc="look", generation=generation
                    )
                return go("judge", back="claim", slot=who)
        raise AssertionError(me.pc)

    def read(self, world: World, who: int, name: str) -> World:
        """One load of a look. Where deaths are explored, a slot is read in one step: there are too many states else,
        and what lies between the two loads is explored without deaths."""
        me = world.actors[who]
        step = int(me.pc.rpartition("/")[2])
        order = ("used", "pending") if self.broken == "used read first" else ("pending", "used")
        wanted = [order[step % 2]] if not self.crashes else ["pending", "used"]
        index = step // 2 if not self.crashes else step
        slot = world.slots[index]
        if "pending" in wanted:
            lower = me.lower or (slot.pending > 0 and index < who)
            me = me._replace(pending_sum=me.pending_sum + slot.pending, lower=lower)
        if "used" in wanted:
            me = me._replace(used_sum=me.used_sum + slot.used)
        last = 1 if self.crashes else 3
        pc = f"{name}/done" if step == last else f"{name}/{step + 1}"
        return world.with_actor(who, **me._replace(pc=pc)._asdict())

    @staticmethod
    def reclaimer(world: World, who: int) -> str:
        return f"r{who}{'+' if world.actors[who].restarted else ''}"

    @staticmethod
    def is_dead(world: World, owner: Owner) -> bool:
        """Its process has ended, or is a later one under the same number (whose claim is another generation)."""
        name, generation = owner
        if name == "free":
            return False
        actor = world.actors[int(name[1])]
        if name[0] == "r":
            return actor.pc == "dead" or actor.restarted != name.endswith("+")
        return actor.pc == "dead" or actor.generation != generation


def explore(protocol: Protocol, check: Callable[[World], None]) -> tuple[int, set[tuple[str, str]]]:
    """Walk every reachable state; (their number, outcomes of the two processes in the final ones).

    Fails where a state is wrong by ``check``, or cannot get to an end at all.
    """
    start = protocol.start()
    before: dict[World, list[World]] = {start: []}
    waiting, ends = [start], []
    while waiting:
        world = waiting.pop()
        check(world)
        final = True
        for _, after in protocol.steps(world):
            final = False
            if after not in before:
                before[after] = []
                waiting.append(after)
            before[after].append(world)
        if final:
            ends.append(world)
    can_end, stack = set(ends), list(ends)
    while stack:
        for world in before[stack.pop()]:
            if world not in can_end:
                can_end.add(world)
                stack.append(world)
    stuck = len(before) - len(can_end)
    assert not stuck, f"{stuck} of {len(before)} states never end"
    return len(before), {(w.actors[0].outcome, w.actors[1].outcome) for w in ends}


def within_quota(world: World) -> None:
    real = sum(actor.real for actor in world.actors[:2])
    assert real <= QUOTA, f"over quota: {world}"
    for actor, slot in zip(world.actors, world.slots, strict=False):
        assert actor.pc == "dead" or actor.real <= slot.used, f"memory out without a charge: {world}"


@pytest.mark.parametrize(
    ("asks", "outcomes"),
    [
        ((6, 6), {("won", "refused"), ("refused", "won")}),
        ((10, 1), {("won", "refused"), ("refused", "won")}),
        ((1, 10), {("won", "refused"), ("refused", "won")}),
        ((5, 5), {("won", "won")}),
        ((11, 10), {("refused", "won")}),
    ],
)
def test_in_every_order_of_two_processes_exactly_those_win_that_should(
    asks: tuple[int, int], outcomes: set[tuple[str, str]]
) -> None:
    states, found = explore(Protocol(asks), within_quota)
    assert found == outcomes
    assert states > 100


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("asks", [(6, 6), (10, 1)])
def test_a_death_at_any_step_and_a_restart_never_go_over_and_nothing_is_stuck(asks: tuple[int, int], dies: int) -> None:
    def check(world: World) -> None:
        within_quota(world)
        if all(actor.pc == "end" for actor in world.actors[:2]):
            assert [(s.used, s.pending) for s in world.slots] == [(0, 0), (0, 0)], world

    states, _ = explore(Protocol(asks, crashes=frozenset({dies})), check)
    assert states > 10_000


@pytest.mark.parametrize("broken", ["no announcement", "pending first", "used read first", "seize without looking"])
def test_each_rule_is_needed(broken: str) -> None:
    """The checks above see it when one is dropped."""
    crashes = frozenset({1} if broken == "seize without looking" else ())
    with pytest.raises(AssertionError):
        explore(Protocol((6, 6), crashes=crashes, broken=broken), within_quota)


def test_without_the_tie_break_both_may_lose() -> None:
    _, found = explore(Protocol((6, 6), broken="both withdraw"), within_quota)
    assert ("refused", "refused") in found
