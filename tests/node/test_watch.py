"""The watch over the GPUs: who is asked, what a source that fails does, and how trouble that repeats is told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from amdvgpud.core.errors import HostFailure
from amdvgpud.core.health import Condition, Count, Finding, Policy, Source, Standings, smi_notice, unbound, wedged
from amdvgpud.core.model import GpuId, Inventory
from amdvgpud.node import Node
from amdvgpud.ports import Examination
from amdvgpud.watch import HealthWatch
from tests.fakes import MemoryCdi, MemoryFiles, MemoryJournal, StillSysfs, an_inventory


@dataclass
class Check:
    """A source that says what it is told to."""

    name: str
    answer: Examination | HostFailure | None = field(default_factory=Examination)
    asked: int = 0
    slow: asyncio.Event | None = None
    """Set: who asks next has what there is to see then, when this comes."""
    waits: asyncio.Event = field(default_factory=asyncio.Event)

    async def examine(self, inventory: Inventory) -> Examination | None:
        self.asked += 1
        if self.slow is not None:
            seen, slow, self.slow = self.answer, self.slow, None
            assert not isinstance(seen, HostFailure)
            self.waits.set()
            await slow.wait()
            return seen
        if isinstance(self.answer, HostFailure):
            raise self.answer
        return self.answer


@dataclass
class Memory:
    standings: Standings = field(default_factory=dict)
    saved: int = 0

    def load(self) -> Standings:
        return self.standings

    def save(self, standings: Standings) -> None:
        self.saved += 1
        self.standings = standings


class Bench:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.sysfs = StillSysfs(an_inventory())
        self.eyes, self.exporter = Check("sysfs"), Check("exporter")
        self.memory = Memory()
        self.node = Node(
            self.sysfs,
            MemoryJournal(),
            MemoryFiles(),
            MemoryCdi(),
            now_s=lambda: self.now_s,
            process_alive=lambda holder: True,
        )
        self.first, self.second = (gpu.id for gpu in self.sysfs.inventory.gpus)
        self.watch = self.restarted()

    def restarted(self) -> HealthWatch:
        self.watch = HealthWatch(
            self.node,
            built_in=[self.eyes],
            optional=[self.exporter],
            memory=self.memory,
            policy=Policy(good_looks=2),
            now_s=lambda: self.now_s,
        )
        return self.watch

    def finding(self, condition: Condition = Condition.UNHEALTHY, reason: str = "broken") -> Examination:
        return Examination((Finding(self.first, Source.PULSE, condition, reason),))

    def conditions(self) -> dict[GpuId, str]:
        return {gpu: str(health.condition) for gpu, health in self.node.view().health.items()}

    def told(self) -> list[tuple[str, str]]:
        """(kind, GPU) of the events about GPUs."""
        return [(e.kind, e.subject) for e in self.node.events_since(0)[0] if e.kind.startswith("gpu.")]


@pytest.fixture
async def bench() -> Bench:
    made = Bench()
    await made.node.start()
    return made


async def test_what_a_source_finds_is_the_nodes_verdict_and_an_event(bench: Bench) -> None:
    await bench.watch.pulse()
    assert bench.told() == []
    bench.eyes.answer = bench.finding()
    await bench.watch.pulse()
    assert bench.conditions() == {bench.first: "unhealthy", bench.second: "healthy"}
    bench.eyes.answer = Examination()
    for _ in range(2):
        await bench.watch.pulse()
    assert bench.told() == [("gpu.unhealthy", bench.first), ("gpu.healthy", bench.first)]
    assert bench.node.view().health_changes == {(bench.first, "pulse"): 2}


async def test_an_optional_source_that_is_not_here_or_does_not_answer_changes_nothing(bench: Bench) -> None:
    bench.exporter.answer = None
    await bench.watch.pulse()
    assert (set(bench.conditions().values()), bench.watch.sources) == ({"healthy"}, {"sysfs": True})
    bench.exporter.answer = HostFailure("no answer")
    await bench.watch.pulse()
    assert (set(bench.conditions().values()), bench.watch.sources) == (
        {"healthy"},
        {"sysfs": True, "exporter": False},
    )


async def test_built_in_eyes_that_cannot_look_make_every_gpu_unhealthy_with_that_reason(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.eyes.answer = HostFailure("no topology")
    for _ in range(2):
        await bench.watch.pulse()
    health = bench.node.view().health[bench.second]
    assert set(bench.conditions().values()) == {"unhealthy"}
    assert (health.source, health.reason) == ("check", "the built-in check cannot run: no topology")
    assert [m for m in caplog.messages if "health check" in m] == [
        "The health check 'sysfs' does not work, and every GPU counts as unhealthy: no topology"
    ]
    bench.eyes.answer = Examination()
    await bench.watch.pulse()
    assert bench.watch.sources["sysfs"]


async def test_a_machine_that_is_not_as_it_was_is_scanned_and_looked_at_again(bench: Bench) -> None:
    bench.eyes.answer = replace(bench.finding(), stale=True)
    inventory = bench.sysfs.inventory
    bench.sysfs.inventory = replace(inventory, gpus=inventory.gpus[1:])
    await bench.watch.pulse()
    assert bench.eyes.asked == 2
    assert bench.conditions() == {bench.second: "healthy"}


async def test_a_wedged_gpu_takes_no_new_slice_until_it_has_recovered(bench: Bench) -> None:
    await bench.watch.pulse()
    await bench.watch.hear([wedged(bench.first, "rebind")])
    await bench.watch.pulse()
    await bench.watch.pulse()
    assert bench.conditions()[bench.first] == "unhealthy"
    await bench.watch.hear([wedged(bench.first, "none")])
    for _ in range(2):
        await bench.watch.pulse()
    assert bench.conditions()[bench.first] == "healthy"
    assert [kind for kind, _ in bench.told()] == ["gpu.wedged", "gpu.unhealthy", "gpu.recovered", "gpu.healthy"]


async def test_a_gpu_whose_driver_has_let_it_go_meanwhile_is_found_anew(bench: Bench) -> None:
    """Bound again before anybody looked, it was never missing."""
    await bench.watch.pulse()
    await bench.watch.hear([wedged(bench.first, "rebind"), unbound(bench.first)])
    for _ in range(2):
        await bench.watch.pulse()
    assert bench.conditions()[bench.first] == "healthy"


async def test_a_recovery_alone_is_told_and_nothing_more(bench: Bench) -> None:
    await bench.watch.pulse()
    await bench.watch.hear([wedged(bench.first, "none", "python3, pid 7")])
    assert (bench.told(), set(bench.conditions().values())) == ([("gpu.recovered", bench.first)], {"healthy"})


async def test_errors_counted_before_a_whole_reset_count_no_more(bench: Bench) -> None:
    over = smi_notice(bench.first, "4 1")
    assert over is not None
    bench.eyes.answer = Examination((), {bench.first: {Count.UNCORRECTABLE: 1}})
    await bench.watch.pulse()
    assert bench.conditions()[bench.first] == "unhealthy"
    bench.eyes.answer = Examination((), {bench.first: {Count.UNCORRECTABLE: 2}})  # counted in the reset
    await bench.watch.hear([over])
    for _ in range(2):
        await bench.watch.pulse()
    assert bench.conditions()[bench.first] == "healthy"


async def test_a_program_cannot_wash_errors_off_by_having_its_queue_reset(bench: Bench) -> None:
    """amdgpu says ``WEDGED=none`` after it has reset one queue, too."""
    bench.eyes.answer = Examination((), {bench.first: {Count.UNCORRECTABLE: 1}})
    await bench.watch.pulse()
    await bench.watch.hear([wedged(bench.first, "none", "python3, pid 7")])
    for _ in range(5):
        await bench.watch.pulse()
    assert bench.conditions()[bench.first] == "unhealthy"


async def test_bad_news_that_come_while_a_recovery_is_looked_at_are_the_last_word(bench: Bench) -> None:
    await bench.watch.pulse()
    bench.eyes.slow = seen = asyncio.Event()
    looking = asyncio.create_task(bench.watch.hear([unbound(bench.first)]))
    await bench.eyes.waits.wait()
    await bench.watch.hear([wedged(bench.first, "rebind")])
    assert bench.conditions()[bench.first] == "unhealthy"  # at once, whoever else looks
    seen.set()
    await looking
    for _ in range(5):
        await bench.watch.pulse()
    assert bench.conditions()[bench.first] == "unhealthy"


async def test_within_one_report_too_the_last_word_counts(bench: Bench) -> None:
    await bench.watch.pulse()
    await bench.watch.hear([wedged(bench.first, "rebind"), wedged(bench.first, "none"), wedged(bench.first, "rebind")])
    for _ in range(5):
        await bench.watch.pulse()
    assert bench.conditions()[bench.first] == "unhealthy"


async def test_a_gpu_that_slows_down_after_its_reset_has_recovered_all_the_same(bench: Bench) -> None:
    throttled = smi_notice(bench.first, "2 10:3")
    assert throttled is not None
    await bench.watch.pulse()
    await bench.watch.hear([wedged(bench.first, "rebind"), wedged(bench.first, "none"), throttled])
    for _ in range(3):
        await bench.watch.pulse()
    assert bench.conditions()[bench.first] == "healthy"


async def test_counters_read_before_a_reset_are_not_judged_after_it(bench: Bench) -> None:
    """Else they would seem to have gone back, and what a reset had counted would then count as new."""
    over = smi_notice(bench.first, "4 1")
    assert over is not None
    bench.eyes.answer = Examination((), {bench.first: {Count.UNCORRECTABLE: 1}})
    await bench.watch.pulse()
    bench.eyes.slow = seen = asyncio.Event()
    pulse = asyncio.create_task(bench.watch.pulse())
    await bench.eyes.waits.wait()
    bench.eyes.answer = Examination((), {bench.first: {Count.UNCORRECTABLE: 2}})
    heard = asyncio.create_task(bench.watch.hear([over]))
    await asyncio.wait({heard}, timeout=0.3)
    seen.set()
    await asyncio.gather(pulse, heard)
    for _ in range(2):
        await bench.watch.pulse()
    assert bench.conditions()[bench.first] == "healthy"


async def test_a_fault_outlives_the_daemon(bench: Bench) -> None:
    await bench.watch.pulse()
    await bench.watch.hear([wedged(bench.first, "rebind")])
    saved = bench.memory.saved
    await bench.restarted().pulse()
    assert bench.conditions()[bench.first] == "unhealthy"
    await bench.watch.pulse()
    assert bench.memory.saved == saved  # nothing has changed


async def test_a_memory_that_cannot_be_kept_is_said_and_no_more(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def failing(standings: Standings) -> None:
        raise HostFailure("no space")

    bench.memory.save = failing  # type: ignore[method-assign]
    await bench.watch.pulse()
    assert "What was found of the GPUs is not kept over a restart: no space" in caplog.messages
    assert set(bench.conditions().values()) == {"healthy"}


async def test_repeated_trouble_is_counted_and_not_repeated(bench: Bench) -> None:
    notice = smi_notice(bench.first, "1 7:python3")
    assert notice is not None
    for _ in range(1000):
        await bench.watch.hear([notice])
    assert bench.told() == [("gpu.vm-fault", bench.first)]
    bench.now_s += 10
    await bench.watch.hear([notice])
    assert bench.node.events_since(0)[0][-1].detail.endswith("(and 999 more like it were not told)")


async def test_a_notice_of_a_gpu_that_is_not_here_is_nobodys(bench: Bench) -> None:
    await bench.watch.hear([wedged(GpuId("GPU-of-another-driver"), "rebind")])
    assert bench.told() == []
