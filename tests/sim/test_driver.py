"""The simulated driver: what a switch changes, what it leaves alone, and whom it refuses. softkfd does the using."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.sim.driver import SimulatedDriver
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree, present

GIB = 1024**3
MachineOf = Callable[[str], Any]
CONTAINER = Path(__file__).with_name("container.sh")


class Bench:
    """A simulated machine with the pen of its driver."""

    def __init__(self, machine: Any, text: str) -> None:
        self.simulation = parse_simulation(text)
        self.machine = machine
        self.root: Path = machine.root
        self.driver = SimulatedDriver(self.simulation, self.root)

    def file(self, gpu: int, name: str = "current_compute_partition") -> Path:
        return self.root / "sys/bus/pci/devices" / self.simulation.gpus[gpu].pci_address / name

    def switch(self, gpu: int, mode: str) -> None:
        self.driver.write(self.file(gpu), mode)

    def refusal(self, gpu: int, mode: str, name: str = "current_compute_partition") -> str:
        with pytest.raises(OSError, match=r"\[Errno \d+\]") as refused:
            self.driver.write(self.file(gpu, name), mode)
        return errno.errorcode[refused.value.errno or 0]

    def seen(self) -> list[tuple[str, str | None, list[tuple[int, int, int]]]]:
        """(PCI address, mode, (KFD node, gpu_id, minor) of each partition) of each GPU, as discovery finds them."""
        inventory = SysfsReader(self.root, name_tables=()).read_inventory()
        assert (inventory.unusable, inventory.warnings) == ((), ())
        return [
            (g.pci_address, g.compute_partition, [(p.kfd_node, p.kfd_gpu_id, p.render_minor) for p in g.partitions])
            for g in inventory.gpus
        ]

    def shown(self) -> list[int]:
        """Pids of kfd/proc."""
        self.driver.refresh_processes()
        return [int(folder.name) for folder in (self.root / "sys/class/kfd/kfd/proc").iterdir()]

    def generation(self) -> int:
        return int((self.root / "sys/class/kfd/kfd/topology/generation_id").read_text())


@pytest.fixture
def bench(machine: MachineOf) -> Callable[[str], Bench]:
    return lambda text: Bench(machine(text), text)


MakeBench = Callable[[str], Bench]


@contextmanager
def holding(made: Bench, kfdclient: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """kfdclient on the host while it holds what it took; it ends with a line on its stdin, or with the block."""
    process = subprocess.Popen(
        [kfdclient, *arguments, "--hold"],
        env=made.machine.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with until_hold(process):
        yield process


@contextmanager
def until_hold(process: subprocess.Popen[str]) -> Iterator[None]:
    assert process.stdout is not None
    try:
        while '"hold"' not in (line := process.stdout.readline()):
            assert line, "the client ended"
        yield
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_a_switch_changes_nodes_ids_minors_and_generation_and_leaves_the_other_gpu_alone(bench: MakeBench) -> None:
    made = bench("2*mi300x")
    first, second = (gpu.pci_address for gpu in made.simulation.gpus)
    assert made.seen() == [(first, "SPX", [(1, 4369, 128)]), (second, "SPX", [(2, 4642, 136)])]
    other = made.file(1).parent.resolve()
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file() and not path.is_symlink()}
    made.switch(0, "CPX")
    assert made.seen() == [
        (second, "SPX", [(1, 4642, 136)]),
        (first, "CPX", [(2 + i, 0x8030 + i, 128 + i) for i in range(8)]),
    ]
    assert made.generation() == 1 + 1 + 8
    assert {path: path.read_bytes() for path in before} == before
    made.switch(1, "QPX")
    made.switch(0, "SPX")
    assert made.seen() == [
        (second, "QPX", [(1 + i, 0x8120 + i, 136 + i) for i in range(4)]),
        (first, "SPX", [(5, 0x8000, 128)]),
    ]


def test_a_switched_tree_is_that_of_a_machine_built_in_that_mode_but_for_names(bench: MakeBench) -> None:
    """Layouts, VRAM, links and caches do not depend on how the mode came about."""
    made = bench("mi300x")
    made.switch(0, "CPX")
    fresh = made.root.with_name("fresh")
    build_tree(parse_simulation("mi300x:mode=CPX"), fresh)
    (switched,) = SysfsReader(made.root, name_tables=()).read_inventory().gpus
    (built,) = SysfsReader(fresh, name_tables=()).read_inventory().gpus
    assert [(p.layout, p.vram_bytes, p.render_minor, p.links) for p in switched.partitions] == [
        (p.layout, p.vram_bytes, p.render_minor, p.links) for p in built.partitions
    ]
    assert switched.profiles == built.profiles


def test_the_eighth_of_eight_has_seven_partitions_after_a_switch_too(bench: MakeBench) -> None:
    made = bench("8*mi300x")
    made.switch(7, "CPX")
    assert [len(partitions) for _, _, partitions in made.seen()] == [1] * 7 + [7]
    (profile,) = [p for p in SysfsReader(made.root).read_inventory().gpus[7].profiles if p.mode == "CPX"]
    assert profile.partition_count == 8


def test_the_devices_keep_their_inodes_and_the_root_its_place(bench: MakeBench) -> None:
    made = bench("2*mi300x")
    kept = ["", "state", "procs", "log.jsonl", "sys/devices/virtual/kfd/kfd/proc", "dev/kfd"]
    kept += [f"dev/dri/{p.name}" for p in (made.root / "dev/dri").iterdir()]
    before = {name: (made.root / name).stat().st_ino for name in kept}
    made.switch(0, "CPX")
    assert {name: (made.root / name).stat().st_ino for name in kept} == before
    assert not (made.root / ".switch").exists()


def test_a_daemon_that_starts_again_finds_the_modes_as_they_are(bench: MakeBench) -> None:
    made = bench("2*mi300x")
    made.switch(1, "CPX")
    seen = made.seen()
    assert not build_tree(made.simulation, made.root)
    assert made.seen() == seen
    assert [gpu.mode for gpu in present(made.simulation, made.root).gpus] == ["SPX", "CPX"]


def test_a_switch_that_died_between_its_renames_is_mended_by_the_next_start(bench: MakeBench) -> None:
    made = bench("2*mi300x")
    seen = made.seen()
    aside = made.root / ".switch"
    aside.mkdir()
    (made.root / "sys/devices/virtual/kfd/kfd/topology").rename(aside / "old")
    assert not build_tree(made.simulation, made.root)
    assert made.seen() == seen
    made.switch(0, "DPX")
    assert [len(partitions) for _, _, partitions in made.seen()] == [1, 2]


def test_the_present_mode_again_changes_nothing(bench: MakeBench) -> None:
    made = bench("mi300x")
    made.switch(0, "spx\n")
    assert made.generation() == 1


def test_what_the_gpu_cannot_do_is_refused_as_the_driver_does(bench: MakeBench) -> None:
    made = bench("mi300x,mi210,mi300x:mode=CPX/NPS4")
    assert made.refusal(0, "TPX") == "EINVAL"
    assert made.refusal(0, "nonsense") == "EINVAL"
    assert made.refusal(1, "SPX") == "ENOENT"
    assert made.refusal(2, "SPX") == "EINVAL", "SPX does not go with NPS4"
    assert made.refusal(0, "NPS3", "current_memory_partition") == "EINVAL"
    assert made.refusal(0, "x", "vendor") == "EACCES"
    made.driver.write(made.file(0, "current_memory_partition"), "NPS4")
    assert made.file(0, "current_memory_partition").read_text() == "NPS1\n", "a memory mode waits for the next load"
    assert made.generation() == 1


def test_a_process_of_the_host_keeps_every_gpu_from_being_switched(bench: MakeBench, kfdclient: Path) -> None:
    """No device cgroup keeps it from any GPU, so the KFD gives it a context on each."""
    made = bench("2*mi300x")
    with holding(made, kfdclient, "--gpu", "1", "--step", "1G", "--count", "1") as process:
        assert [made.refusal(gpu, "CPX") for gpu in (0, 1)] == ["EBUSY", "EBUSY"]
        assert made.shown() == [process.pid]
        assert made.generation() == 1
    assert made.shown() == []
    made.switch(0, "CPX")
    assert len(made.seen()[1][2]) == 8


def test_memory_of_the_dead_on_a_switched_gpu_is_nobodys(bench: MakeBench, kfdclient: Path) -> None:
    made = bench("mi300x:vram=16GiB")
    made.machine.run(kfdclient, "--step", "4G", "--count", "2")
    made.switch(0, "CPX")
    lines = made.machine.run(kfdclient, "--gpu", "3", "--step", "256M", "--free")
    left = 2 * GIB - 64 * 1024**2  # softkfd keeps 64 MiB for page tables
    gpus = [(line["total"], line["available"]) for line in lines if line["op"] == "gpu"]
    assert gpus == [(2 * GIB, left)] * 8
    assert sum(line["op"] == "alloc" and line["result"] == "ok" for line in lines) == left // (256 << 20)
    assert made.machine.figure(str(made.file(0, "mem_info_vram_used").relative_to(made.root))) == 0


def test_a_render_node_that_no_partition_has_cannot_be_opened(bench: MakeBench) -> None:
    made = bench("mi300x")
    script = ["sh", "-c", "for i in 128 131; do : < /dev/dri/renderD$i && echo open; done 2>&1"]

    def tried() -> list[str]:
        done = subprocess.run(script, env=made.machine.environment(), capture_output=True, text=True, check=False)
        return [line.rpartition(": ")[2] for line in done.stdout.splitlines()]

    before = tried()
    made.switch(0, "CPX")
    assert (before[0], len(before), tried()) == ("open", 2, ["open", "open"])
    assert before[1] != "open"


@pytest.mark.root
def test_a_container_on_another_gpu_outlives_a_switch_and_sees_its_new_node(
    bench: MakeBench, kfdclient: Path, tmpfs: Path
) -> None:
    made = bench("2*mi300x")
    rootfs = tmpfs / "rootfs"
    rootfs.mkdir()
    command = ["sh", CONTAINER, rootfs, made.root, made.machine.softkfd, kfdclient, "136"]
    client = ["/tmp/client", "--step", "2G", "--count", "1", "--free", "--hold"]
    process = subprocess.Popen([*command, *client], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with until_hold(process):
        assert made.refusal(1, "CPX") == "EBUSY"
        made.switch(0, "CPX")
        used = "sys/class/kfd/kfd/topology/nodes/1/mem_banks/0/used_memory"
        assert made.machine.figure(used) == 2 * GIB
        out, _ = process.communicate("go\n", timeout=60)
        assert process.returncode == 0, out
        assert '"granted":1,"held":0' in out
        assert made.machine.figure(used) == 0, "of the node that the GPU has now"
        made.switch(1, "CPX")
    assert [len(partitions) for _, _, partitions in made.seen()] == [8, 8]


# --------------------------------------------------------------------------------------------------------- faults


def test_a_gpu_with_a_fault_answers_by_it_and_the_others_do_not(bench: MakeBench, kfdclient: Path) -> None:
    made = bench("2*mi300x-cpx")
    first, second = (gpu.pci_address for gpu in made.simulation.gpus)
    made.driver.set_fault(first, errno.EBUSY)
    for path in (made.file(0, "mem_info_vram_total"), made.file(0, "drm/card1/dev")):
        with pytest.raises(OSError, match="busy") as refused:
            made.driver.read(path)
        assert refused.value.errno == errno.EBUSY
    for minor in (128, 130, 135):
        with pytest.raises(OSError, match="busy"):
            made.driver.open_node(made.root / f"dev/dri/renderD{minor}")
    assert made.driver.read(made.file(1, "vendor")) == "0x1002\n"
    os.close(made.driver.open_node(made.root / "dev/dri/renderD136"))
    lines = made.machine.run(kfdclient, "--count", "0")
    assert [line["minor"] for line in lines if line["op"] == "gpu"] == list(range(136, 144))
    made.driver.set_fault(first, None)
    made.driver.set_fault(second, None)
    os.close(made.driver.open_node(made.root / "dev/dri/renderD128"))


def test_a_gpu_that_is_unplugged_is_gone_for_everybody_and_comes_back_last(bench: MakeBench, kfdclient: Path) -> None:
    made = bench("mi300x-cpx,mi300x")
    first, second = (gpu.pci_address for gpu in made.simulation.gpus)
    cut = made.seen()[0]
    made.driver.unplug(first)
    assert made.seen() == [(second, "SPX", [(1, 6553, 136)])]
    lines = made.machine.run(kfdclient, "--count", "0")
    assert [line["minor"] for line in lines if line["op"] == "gpu"] == [136]
    made.switch(1, "DPX")
    made.driver.plug(first)
    assert [(address, mode) for address, mode, _ in made.seen()] == [(second, "DPX"), (first, "CPX")]
    assert [minor for _, _, minor in made.seen()[1][2]] == [minor for _, _, minor in cut[2]]
    made.machine.run(kfdclient, "--gpu", "9", "--count", "1")
