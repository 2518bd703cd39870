"""Discovery and simulation meet: what the model table says, written as files, is what the reader finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from amdvgpud.core.model import Inventory
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.sim.models import MODELS, SimGpu, parse_simulation
from amdvgpud.sim.tree import build_tree


def read(text: str, root: Path, **how: str) -> tuple[tuple[SimGpu, ...], Inventory]:
    simulation = parse_simulation(text)
    build_tree(simulation, root, **how)
    return simulation.gpus, SysfsReader(root, name_tables=()).read_inventory()


def map_is_trusted(gpu: SimGpu) -> bool:
    """Not from the cache entries of more than four engines on gfx11 and gfx12."""
    return not (gpu.model.wgp and gpu.model.engines_per_xcc > 4)


@pytest.mark.parametrize("text", [*MODELS, *(f"{m.name}-{mode.lower()}" for m in MODELS.values() for mode in m.modes)])
def test_every_model_in_every_mode_is_read_back(text: str, tmp_path: Path) -> None:
    (simulated,), inventory = read(text, tmp_path / "root")
    (gpu,) = inventory.gpus
    assert (inventory.unusable, inventory.warnings) == ((), ())
    assert (gpu.pci_address, gpu.unique_id, gpu.product_name, gpu.gfx_target, gpu.vram_bytes, gpu.device_id) == (
        simulated.pci_address,
        simulated.unique_id,
        simulated.product,
        simulated.model.gfx_target,
        simulated.vram_bytes,
        simulated.model.device_id,
    )
    assert [p.vram_bytes for p in gpu.partitions] == [simulated.partition_memory_bytes] * simulated.partition_count
    for partition in gpu.partitions:
        layout, active = partition.layout, simulated.active_in(partition.index)
        assert (layout.xcc_count, layout.engines_per_xcc, layout.wgp) == (
            simulated.xccs_per_partition,
            simulated.model.engines_per_xcc,
            simulated.model.wgp,
        )
        assert (layout.harvest_known, layout.cu_count) == (map_is_trusted(simulated), sum(active))
        assert layout.active == active or not layout.harvest_known


@pytest.mark.parametrize("separator", ["_", "."])
def test_eight_mi300x_in_cpx_have_sixty_three_partitions(tmp_path: Path, separator: str) -> None:
    _, inventory = read("8*mi300x-cpx", tmp_path / "root", xcp_separator=separator)
    assert [len(gpu.partitions) for gpu in inventory.gpus] == [8] * 7 + [7]
    assert [p.render_minor for p in inventory.partitions] == list(range(128, 191))
    assert (inventory.unusable, inventory.warnings) == ((), ())
    assert {len(p.links) for p in inventory.partitions} == {63}
    assert {g.compute_partition for g in inventory.gpus} == {"CPX"}


def test_a_harvest_override_arrives_as_the_map(tmp_path: Path) -> None:
    _, inventory = read("rx9070xt:harvest=8.8.6.6.8.8.8.4", tmp_path / "root")
    assert inventory.partitions[0].layout.active == (8, 8, 6, 6, 8, 8, 8, 4)
