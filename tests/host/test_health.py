"""The built-in look: what each file and each errno says, on a simulated machine whose files can be made to say it."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from amdvgpud.core.errors import HostFailure
from amdvgpud.core.health import Condition, Count, Finding, Health, Source, Standing, Tally
from amdvgpud.core.model import Inventory
from amdvgpud.host.health import StandingsFile, SysfsHealth
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.ports import Examination
from amdvgpud.sim.driver import SimulatedDriver
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree

FIRST = "0000:05:00.0"


class Bench:
    """A machine, the inventory of its start, and what the check says of the first GPU."""

    def __init__(self, root: Path, text: str) -> None:
        simulation = parse_simulation(text)
        build_tree(simulation, root)
        self.root = root
        self.driver = SimulatedDriver(simulation, root)
        self.check = SysfsHealth(root, read=self.driver.read, open_node=self.driver.open_node)
        self.inventory: Inventory = SysfsReader(root, name_tables=()).read_inventory()

    def look(self) -> Examination:
        return asyncio.run(self.check.examine(self.inventory))

    def found(self) -> list[tuple[Condition, str]]:
        look = self.look()
        assert {(f.gpu, f.source, f.lasting) for f in look.findings} <= {
            (self.inventory.gpus[0].id, Source.PULSE, False)
        }
        return [(f.condition, f.reason) for f in look.findings]

    def write(self, name: str, text: str) -> None:
        path = self.root / "sys/bus/pci/devices" / FIRST / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def counts(self) -> dict[Count, int]:
        return dict(self.look().counts[self.inventory.gpus[0].id])


@pytest.fixture
def bench(tmp_path: Path) -> Callable[[str], Bench]:
    return lambda text: Bench(tmp_path / "machine", text)


MakeBench = Callable[[str], Bench]


def test_gpus_that_are_well_give_no_finding_and_no_scan(bench: MakeBench) -> None:
    made = bench("2*mi300x-cpx")
    ids = [gpu.id for gpu in made.inventory.gpus]
    assert made.look() == Examination((), {ids[0]: {}, ids[1]: {}}, False)


@pytest.mark.parametrize(
    ("error", "condition", "reason"),
    [
        (errno.EBUSY, Condition.UNKNOWN, "answers EBUSY, as in a reset"),
        (errno.EAGAIN, Condition.UNKNOWN, "answers EAGAIN, as in a reset"),
        (errno.EPERM, Condition.UNKNOWN, "answers EPERM, as in a reset"),
        (errno.EIO, Condition.UNHEALTHY, "answers EIO"),
        (errno.ENODEV, Condition.UNHEALTHY, "answers ENODEV"),
    ],
)
def test_what_a_render_node_answers(bench: MakeBench, error: int, condition: Condition, reason: str) -> None:
    made = bench("2*mi210")
    made.driver.set_fault(FIRST, error)
    assert made.found() == [(condition, f"/dev/dri/renderD128 {reason}")]
    made.driver.set_fault(FIRST, None)
    assert made.found() == []


def test_no_descriptor_stays_open(bench: MakeBench) -> None:
    made = bench("2*mi300x-cpx")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    made.look()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_gpu_that_is_gone_is_unhealthy_and_a_scan_is_due(bench: MakeBench) -> None:
    made = bench("2*mi210")
    made.driver.unplug(FIRST)
    look = made.look()
    first, second = (gpu.id for gpu in made.inventory.gpus)
    assert [(f.gpu, f.reason) for f in look.findings] == [
        (first, "KFD node 1 is another GPU's now"),
        (second, "KFD node 2 is not there any more"),  # numbers have moved: the scan that is due comes first
    ]
    assert look.stale


def test_a_render_node_that_is_gone_is_unhealthy(bench: MakeBench) -> None:
    made = bench("2*mi210")
    (made.root / "dev/dri/renderD128").unlink()
    assert made.found() == [(Condition.UNHEALTHY, "/dev/dri/renderD128 is not there any more")]
    assert made.look().stale


def test_a_partition_that_is_gone_makes_its_gpu_unhealthy(bench: MakeBench) -> None:
    made = bench("mi300x-cpx")
    (made.root / "dev/dri/renderD131").unlink()
    assert made.found() == [(Condition.UNHEALTHY, "/dev/dri/renderD131 is not there any more")]


def test_a_gpu_that_somebody_else_has_cut_anew_wants_a_scan(bench: MakeBench) -> None:
    made = bench("mi300x")
    assert not made.look().stale
    made.driver.write(made.root / "sys/bus/pci/devices" / FIRST / "current_compute_partition", "CPX")
    assert made.look().stale


def test_a_card_that_sleeps_is_not_woken(bench: MakeBench) -> None:
    made = bench("rx7900xtx")
    made.write("power/runtime_status", "suspended\n")
    made.write("pcie_replay_count", "7\n")
    read: set[str] = set()
    opened: list[Path] = []

    def reading(path: Path) -> str:
        read.add(path.name)
        return path.read_text()

    def opening(path: Path) -> int:
        opened.append(path)
        return made.driver.open_node(path)

    check = SysfsHealth(made.root, read=reading, open_node=opening)
    assert asyncio.run(check.examine(made.inventory)) == Examination()
    assert (read, opened) == ({"generation_id", "runtime_status", "gpu_id"}, [])
    (made.root / "dev/dri/renderD128").unlink()
    assert [f.condition for f in asyncio.run(check.examine(made.inventory)).findings] == [Condition.UNHEALTHY]


def test_counters_are_sums_over_their_files(bench: MakeBench) -> None:
    made = bench("mi300x")
    made.write("ras/umc_err_count", "ue: 1\nce: 20\nde: 4\n")
    made.write("ras/gfx_err_count", "ue: 2\nce: 300\n")
    made.write("ras/features", "feature mask: 0x5\n")
    made.write("ras/gpu_vram_bad_pages", "0x00000010 : 0x00001000 : R\n0x00000011 : 0x00001000 : P\n")
    made.write("pcie_replay_count", "5\n")
    made.write("aer_dev_correctable", "RxErr 0\nBadTLP 3\nTOTAL_ERR_COR 3\n")
    made.write("aer_dev_fatal", "Undefined 0\nTOTAL_ERR_FATAL 1\n")
    made.write("aer_dev_nonfatal", "Undefined 0\nTOTAL_ERR_NONFATAL 2\n")
    assert made.counts() == {
        Count.UNCORRECTABLE: 3,
        Count.CORRECTABLE: 320,
        Count.RETIRED_PAGES: 2,
        Count.PCIE_FATAL: 1,
        Count.PCIE_NONFATAL: 2,
        Count.PCIE_CORRECTABLE: 8,
    }


def test_a_sum_without_one_of_its_parts_is_no_sum(bench: MakeBench) -> None:
    """It would seem to go back, as after a reset, and a GPU would count as mended."""
    made = bench("mi300x")
    made.write("ras/umc_err_count", "ue: 1\nce: 20\n")
    made.write("ras/gfx_err_count", "ue: 2\nce: 300\n")

    def read(path: Path) -> str:
        if path.name == "gfx_err_count":
            raise OSError(errno.EBUSY, "busy")
        return path.read_text()

    made.check = SysfsHealth(made.root, read=read, open_node=made.driver.open_node)
    assert made.counts() == {}


@pytest.mark.parametrize("text", ["", "garbage\n", "ue: -1\n", "ue 3\n"])
def test_a_counter_in_another_form_is_no_counter(bench: MakeBench, text: str) -> None:
    made = bench("mi300x")
    made.write("pcie_replay_count", text)
    made.write("aer_dev_fatal", text)
    assert made.counts() == {}


def test_a_topology_that_cannot_be_read_is_a_check_that_cannot_run(bench: MakeBench) -> None:
    made = bench("mi210")
    (made.root / "sys/class/kfd/kfd/topology/generation_id").unlink()
    with pytest.raises(HostFailure, match="the KFD's topology cannot be read"):
        made.look()


async def test_a_driver_that_hangs_keeps_one_thread_and_makes_its_own_gpu_unhealthy(bench: MakeBench) -> None:
    made = bench("2*mi210")
    answers = threading.Event()
    asked: list[str] = []

    def opening(path: Path) -> int:
        asked.append(path.name)
        if path.name == "renderD128":
            answers.wait(60)
        return made.driver.open_node(path)

    check = SysfsHealth(made.root, read=made.driver.read, open_node=opening, look_s=0.3)
    first = made.inventory.gpus[0].id
    for _ in range(2):
        look = await check.examine(made.inventory)
        assert [(f.gpu, f.condition, f.reason) for f in look.findings] == [
            (first, Condition.UNHEALTHY, f"its driver hangs: a look at {first} has not ended after 0.3 s")
        ]
    assert sorted(asked) == ["renderD128", "renderD129", "renderD129"]
    answers.set()
    check = SysfsHealth(made.root, read=made.driver.read, open_node=opening)
    assert (await check.examine(made.inventory)).findings == ()


async def test_looks_at_the_same_time_are_one(bench: MakeBench) -> None:
    made = bench("2*mi210")
    opened: list[str] = []

    def opening(path: Path) -> int:
        opened.append(path.name)
        time.sleep(0.05)
        return made.driver.open_node(path)

    check = SysfsHealth(made.root, read=made.driver.read, open_node=opening)
    looks = await asyncio.gather(*(check.examine(made.inventory) for _ in range(3)))
    assert [look.findings for look in looks] == [(), (), ()]
    assert sorted(opened) == ["renderD128", "renderD129"]


def test_a_machine_without_gpus_has_nothing_to_look_at(tmp_path: Path) -> None:
    assert asyncio.run(SysfsHealth(tmp_path).examine(Inventory())) == Examination()


# --------------------------------------------------------------------------------------------------------- memory


def test_what_was_found_outlives_the_daemon_and_not_the_machines_run(tmp_path: Path) -> None:
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("one\n")
    kept = StandingsFile(tmp_path / "health.json", boot_id=boot_id)
    assert kept.load() == {}
    gpu = Bench(tmp_path / "machine", "mi210").inventory.gpus[0].id
    fault = Finding(gpu, Source.UEVENT, Condition.UNHEALTHY, "wedged", lasting=True)
    health = Health(Condition.UNHEALTHY, "wedged", "uevent", 5.0)
    standings = {gpu: Standing(health, 1, 2.0, (fault,), {Count.UNCORRECTABLE: Tally(3, ((1.0, 3),))})}
    kept.save(standings)
    assert StandingsFile(tmp_path / "health.json", boot_id=boot_id).load() == standings
    assert (tmp_path / "health.json").stat().st_mode & 0o777 == 0o600
    boot_id.write_text("two\n")
    assert kept.load() == {}


@pytest.mark.parametrize("content", [b"", b"{", b'{"boot_id": 3}', b'{"boot_id":"x","standings":{"a":{}}}'])
def test_a_memory_that_cannot_be_understood_is_no_memory(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "health.json").write_bytes(content)
    assert StandingsFile(tmp_path / "health.json").load() == {}


def test_a_memory_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    with pytest.raises(HostFailure, match=r"health\.json"):
        StandingsFile(tmp_path / "nowhere/health.json").save({})
