"""Partition switches as the real ROCm runtimes see them: what they find afterwards, and how a partition is named.

Partitions exist on MI300 and later only, which ROCm 5.2 (Debian 12) does not know: there it is seen that such GPUs are
left out, whole or cut, and the others kept. With ``ROCM=all`` 5.7.1, 6.4.3 and 7.2.4 are asked for all of it. softkfd
runs no kernels: this is what runtimes ask and show.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from amdvgpud.core.model import CuSet
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.sim.driver import SimulatedDriver
from amdvgpud.sim.models import parse_simulation

pytestmark = [pytest.mark.rocm, pytest.mark.root]

KNOWS_MI300 = (5, 7)
MACHINE = "mi300x,mi210"
CUT = "GPU-a1b2c3d4e5f61111"
OTHER = "GPU-a1b2c3d4e5f62222"


def switched(made: Any, mode: str) -> Any:
    """``made`` with its MI300X in ``mode``; what is mounted into containers from now on is the new topology."""
    path = made.machine / "sys/bus/pci/devices/0000:05:00.0/current_compute_partition"
    SimulatedDriver(parse_simulation(MACHINE), made.machine).write(path, mode)
    made.inventory = SysfsReader(made.machine).read_inventory()
    return made


def agents(made: Any, **how: Any) -> list[tuple[str, str, int]]:
    """(gfx target, UUID, CUs) of each GPU that rocminfo shows, in its order."""
    ran = made.run("/usr/bin/rocminfo", gated=False, **how)
    assert ran.status == 0, ran.out
    found = []
    for agent in ran.out.split("*******"):
        if "Device Type:             GPU" in agent:
            name, uuid, cus = (
                re.search(rf"^  {key}: +(\S+)", agent, re.MULTILINE) for key in ("Name", "Uuid", "Compute Unit")
            )
            assert name, agent
            assert uuid, agent
            assert cus, agent
            found.append((name[1], uuid[1], int(cus[1])))
    return found


def test_a_switch_moves_the_gpu_to_the_end_and_splits_it(bed: Any, runtime: Any) -> None:
    made = bed(MACHINE)
    if runtime.number < KNOWS_MI300:
        assert agents(made) == agents(switched(made, "CPX")) == [("gfx90a", OTHER, 104)]
        return
    assert agents(made) == [("gfx942", CUT, 304), ("gfx90a", OTHER, 104)]
    assert agents(switched(made, "CPX")) == [("gfx90a", OTHER, 104)] + [("gfx942", CUT, 38)] * 8
    assert agents(switched(made, "QPX")) == [("gfx90a", OTHER, 104)] + [("gfx942", CUT, 76)] * 4
    assert agents(switched(made, "SPX")) == [("gfx90a", OTHER, 104), ("gfx942", CUT, 304)]


def test_a_partition_is_named_by_its_rank_because_its_id_is_its_neighbours_too(bed: Any, runtime: Any) -> None:
    made = switched(bed(MACHINE), "CPX")
    if runtime.number < KNOWS_MI300:
        assert agents(made, ROCR_VISIBLE_DEVICES="0") == [("gfx90a", OTHER, 104)]
        return
    assert agents(made, ROCR_VISIBLE_DEVICES="3") == [("gfx942", CUT, 38)]
    assert agents(made, ROCR_VISIBLE_DEVICES=CUT) == [], "ambiguous: the list ends there, without a word"
    assert agents(made, ROCR_VISIBLE_DEVICES=f"{OTHER},{CUT},0") == [("gfx90a", OTHER, 104)]
    # In a container with only some of the render nodes, ranks count those.
    assert agents(made, gpus=(3, 5), ROCR_VISIBLE_DEVICES="1") == [("gfx942", CUT, 38)]


def test_a_slice_inside_a_partition_is_held_by_the_gate(bed: Any, runtime: Any) -> None:
    made = switched(bed(MACHINE), "CPX")
    made.slice("inside", (4, 2048, CuSet(tuple(range(8)))))
    ran = made.run("/parts/kfdclient", "--queue", "--step", "512M", gpus=(4,))
    assert ran.status == 0, ran.out
    assert [line["total"] for line in ran.lines if line["op"] == "gpu"] == [2 << 30]
    assert ran.masks == {made.inventory.partitions[4].kfd_gpu_id: {8}}
    if runtime.number >= KNOWS_MI300:
        assert agents_total(made) == 2 << 20


def shown_cus(made: Any, *words: str, **how: Any) -> list[int]:
    return [line["attribute_cus"] for line in made.run("questions", *words, **how).lines if line["op"] == "questions"]


def test_the_front_tells_of_a_partition_where_all_of_one_gpu_agree(bed: Any, runtime: Any) -> None:
    """Partitions share the PCI address by which the front knows a device: with two different slices it is silent."""
    made = switched(bed(MACHINE), "CPX")
    if runtime.number < KNOWS_MI300:
        return
    made.slice("inside", (4, 2048, CuSet(tuple(range(8)))))
    ran = made.run("questions", "take:async:4096:1", "take:async:512:1", gpus=(4,))
    assert [line["error"] for line in ran.lines if line["op"] == "take"] == ["hipErrorOutOfMemory", "hipSuccess"]
    assert shown_cus(made, gpus=(4,)) == [8]
    made.slice("beside", (5, 4096, CuSet(tuple(range(8)))))
    assert shown_cus(made, gpus=(4, 5)) == [8, 8]
    made.slice("larger", (6, 4096, CuSet(tuple(range(16)))))
    assert shown_cus(made, gpus=(4, 5, 6)) == [38, 38, 38]


def agents_total(made: Any) -> int:
    """KiB of the global pool that the runtime shows of the one GPU of the slice, the gate being in."""
    ran = made.run("/usr/bin/rocminfo", gpus=(4,))
    (gpu,) = [agent for agent in ran.out.split("*******") if "Device Type:             GPU" in agent]
    pool = re.search(r"Segment: +GLOBAL; FLAGS: COARSE GRAINED\s+Size: +(\d+)", gpu)
    assert pool
    return int(pool[1])
