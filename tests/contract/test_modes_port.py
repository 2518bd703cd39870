"""The Modes port: the stand-in, and the real writer over a simulated machine, keep the same promises."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from amdvgpud.core.errors import AmdvgpuError, Conflict
from amdvgpud.core.model import Gpu, Inventory
from amdvgpud.host.partition import PartitionFiles
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.ports import KfdUser, Modes
from amdvgpud.sim.driver import SimulatedDriver
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree
from tests.fakes import StillModes, StillSysfs, an_inventory

Open = Callable[[Gpu], AbstractContextManager[None]]
Machine = tuple[Modes, Callable[[], Inventory], Open]


@pytest.fixture(params=["stand-in", "simulated"])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Two MI300X in SPX, how they look now, and a way to have one of them open as this process."""
    if request.param == "stand-in":
        sysfs = StillSysfs(an_inventory())
        modes = StillModes(sysfs)

        @contextmanager
        def opened(gpu: Gpu) -> Iterator[None]:
            modes.opened[gpu.id] = (KfdUser(os.getpid(), "pytest"),)
            yield
            modes.opened.clear()

        yield modes, sysfs.read_inventory, opened
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        root = Path(folder) / "machine"
        simulation = parse_simulation("2*mi300x")
        build_tree(simulation, root)
        driver = SimulatedDriver(simulation, root)

        @contextmanager
        def open_by_token(gpu: Gpu) -> Iterator[None]:
            """What softkfd leaves for as long as a process lives: a locked token, and what kfd/proc shows of it."""
            kfd_gpu_id = gpu.partitions[0].kfd_gpu_id
            folder = root / "processes/00000001"
            folder.mkdir()
            (folder / f"vram_{kfd_gpu_id}").write_text("0\n")
            with (root / "procs/00000001").open("w") as token:
                token.write(f"{os.getpid()}\n{kfd_gpu_id}\n")
                token.flush()
                fcntl.flock(token, fcntl.LOCK_EX)
                yield

        yield (
            PartitionFiles(root, write=driver.write, refresh=driver.refresh_processes),
            SysfsReader(root, name_tables=()).read_inventory,
            open_by_token,
        )


def of_mode(gpu: Gpu) -> tuple[str | None, int, int]:
    return gpu.compute_partition, len(gpu.partitions), gpu.partitions[0].layout.xcc_count


def test_a_switch_gives_the_partitions_of_the_mode_and_moves_the_gpu_to_the_end(machine: Machine) -> None:
    modes, read, _ = machine
    first, second = read().gpus
    for mode, count in (("CPX", 8), ("QPX", 4), ("DPX", 2), ("SPX", 1)):
        there = read().gpu(first.id)
        assert there is not None
        modes.set_compute(there, mode)
        after = read()
        assert [gpu.id for gpu in after.gpus] == [second.id, first.id]
        assert of_mode(after.gpus[1]) == (mode, count, 8 // count)
        assert sum(p.cu_count for p in after.gpus[1].partitions) == 304
        assert after.gpus[0].partitions[0].kfd_gpu_id == second.partitions[0].kfd_gpu_id


def test_the_generation_grows_and_ids_of_partitions_are_stable(machine: Machine) -> None:
    modes, read, _ = machine
    before = read()
    modes.set_compute(before.gpus[0], "CPX")
    after = read()
    assert after.generation_id > before.generation_id
    cut = after.gpu(before.gpus[0].id)
    assert cut is not None
    assert [p.id for p in cut.partitions] == [f"{cut.id}/{i}" for i in range(8)]
    assert len({p.kfd_gpu_id for p in after.partitions}) == 9


def test_the_present_mode_again_is_no_switch(machine: Machine) -> None:
    modes, read, _ = machine
    before = read()
    modes.set_compute(before.gpus[0], "SPX")
    assert read() == before


def test_a_request_for_a_memory_mode_changes_nothing_now(machine: Machine) -> None:
    modes, read, _ = machine
    before = read()
    modes.request_memory(before.gpus[0], "NPS4")
    assert read() == before


def test_nobody_uses_a_machine_that_nobody_uses(machine: Machine) -> None:
    modes, read, _ = machine
    assert modes.users(None) == modes.users(read().gpus[0]) == ()


def test_a_gpu_that_a_process_has_open_is_not_switched_and_the_process_is_known(machine: Machine) -> None:
    modes, read, opened = machine
    first, second = read().gpus
    with opened(first):
        assert [user.pid for user in modes.users(first)] == [os.getpid()]
        assert modes.users(second) == ()
        with pytest.raises(Conflict, match="EBUSY"):
            modes.set_compute(first, "CPX")
        assert read().gpus == (first, second)
        modes.set_compute(second, "CPX")
    modes.set_compute(first, "CPX")
    assert [len(gpu.partitions) for gpu in read().gpus] == [8, 8]


def test_a_mode_that_there_is_not_is_refused(machine: Machine) -> None:
    modes, read, _ = machine
    with pytest.raises((AmdvgpuError, StopIteration)):
        modes.set_compute(read().gpus[0], "TPX")
