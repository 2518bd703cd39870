"""The simulated machine as files: read back with nothing but the rules of the kernel's own files."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from amdvgpud.core.errors import HostFailure, Invalid
from amdvgpud.sim.models import MODELS, parse_simulation
from amdvgpud.sim.tree import build_tree


def tree(text: str, folder: Path, **options: str) -> Path:
    root = folder / "machine"
    build_tree(parse_simulation(text), root, **options)
    return root


def numbers(path: Path) -> dict[str, int]:
    return {key: int(value) for key, value in (line.split() for line in path.read_text().splitlines())}


def nodes(root: Path) -> list[Path]:
    """GPU nodes in node order."""
    found = sorted((root / "sys/class/kfd/kfd/topology/nodes").iterdir(), key=lambda p: int(p.name))
    return [node for node in found if (node / "gpu_id").read_text() != "0\n"]


def properties(root: Path) -> list[dict[str, int]]:
    return [numbers(node / "properties") for node in nodes(root)]


def harvest(node: Path) -> list[int]:
    """Active CUs of each shader array, by the positions of the L1 vector caches: the size class with a place per CU.

    Places, not entries: on CDNA2 the scalar caches are of the same size, at places where there is a vector cache too.
    """
    own = numbers(node / "properties")
    places: dict[str, set[int]] = {}
    for cache in (node / "caches").iterdir():
        entry = dict(line.split() for line in (cache / "properties").read_text().splitlines())
        if (entry["level"], entry["type"]) == ("1", "9"):
            places.setdefault(entry["size"], set()).add(int(entry["processor_id_low"]) - own["simd_id_base"])
    [of_cus] = [p for p in places.values() if len(p) == own["simd_count"] // own["simd_per_cu"]]
    counts = [0] * own["array_count"]
    for place in of_cus:
        counts[place // own["cu_per_simd_array"]] += 1
    return counts


def every_file(root: Path) -> dict[str, str]:
    """All of a tree: links by their targets, files by their text, sparse files by their size."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_file():
            size = path.stat().st_size
            found[name] = f"{size} bytes" if size > 100_000 else path.read_bytes().hex()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_every_model_shows_its_cus_in_simds_and_in_cache_entries(name: str, tmpfs: Path) -> None:
    model = MODELS[name]
    root = tree(name, tmpfs)
    [own] = properties(root)
    [node] = nodes(root)
    assert own["simd_count"] / own["simd_per_cu"] == model.cu_count
    assert own["array_count"] == model.xcc_count * model.engines_per_xcc * model.arrays_per_engine
    assert own["caches_count"] == len(list((node / "caches").iterdir()))
    assert harvest(node) == list(model.active)


@pytest.mark.parametrize(("text", "caches"), [("mi210", 217), ("mi300x-cpx", 80), ("phoenix", 27)])
def test_a_node_has_as_many_caches_as_a_captured_one(text: str, caches: int, tmpfs: Path) -> None:
    assert {p["caches_count"] for p in properties(tree(text, tmpfs))} == {caches}


def test_the_harvest_can_be_read_back_from_cache_positions(tmpfs: Path) -> None:
    [node] = nodes(tree("mi308x:harvest=5.5.6.4", tmpfs))
    assert harvest(node) == [5, 5, 6, 4] * 4


def test_a_partition_has_its_own_xccs_harvest(tmpfs: Path) -> None:
    found = [harvest(node) for node in nodes(tree("mi300x-cpx", tmpfs))]
    active = MODELS["mi300x"].active
    assert found == [list(active[4 * i : 4 * i + 4]) for i in range(8)]


def test_on_rdna_whole_wgps_are_fused_off(tmpfs: Path) -> None:
    [node] = nodes(tree("rx9070xt:harvest=8.6.8.6.8.8.4.8", tmpfs))
    assert harvest(node) == [8, 6, 8, 6, 8, 8, 4, 8]


def test_partitions_share_address_and_id_and_differ_in_function_and_minor(tmpfs: Path) -> None:
    root = tree("mi308x-cpx:domain=1:unique_id=0x84ca9b8b7d2b6d6", tmpfs)
    shown = [
        (p["location_id"], p["domain"], p["drm_render_minor"], p["num_xcc"], p["simd_count"], f"{p['unique_id']:x}")
        for p in properties(root)
    ]
    assert shown == [(0x500 | i, 1, 128 + i, 1, 80, "84ca9b8b7d2b6d6") for i in range(4)]
    assert len({(node / "gpu_id").read_text() for node in nodes(root)}) == 4
    assert {(n / "mem_banks/0/properties").read_text().split()[3] for n in nodes(root)} == {"51539607552"}


def test_a_gpu_with_modes_has_eight_render_minors_in_every_mode(tmpfs: Path) -> None:
    root = tree("2*mi300x,rx9070xt", tmpfs)
    assert sorted(p.name for p in (root / "dev/dri").iterdir() if "render" in p.name) == [
        f"renderD{minor}" for minor in range(128, 128 + 17)
    ]
    assert [p["drm_render_minor"] for p in properties(root)] == [128, 136, 144]
    xcps = sorted((root / "sys/devices/platform").iterdir(), key=lambda p: int(p.name.rpartition("_")[2]))
    assert [p.name for p in xcps] == [f"amdgpu_xcp_{i}" for i in range(14)]


def test_xcp_devices_have_either_of_two_names(tmpfs: Path) -> None:
    root = tree("mi300x-cpx", tmpfs, xcp_separator=".")
    link = root / "sys/class/drm/renderD129"
    assert str(link.readlink()) == "../../devices/platform/amdgpu_xcp.0/drm/renderD129"
    assert (link / "device").resolve().name == "amdgpu_xcp.0"


def test_eight_gpus_in_cpx_run_out_of_minors_at_63_partitions_in_well_under_a_second(tmpfs: Path) -> None:
    start = time.process_time()
    root = tree("8*mi300x-cpx", tmpfs)
    assert time.process_time() - start < 1.0
    found = properties(root)
    assert len(found) == 63
    assert Counter(p["location_id"] >> 8 for p in found) == {0x05 + 0x20 * i: 8 if i < 7 else 7 for i in range(8)}
    assert {p["simd_count"] for p in found} == {152}
    assert max(p["drm_render_minor"] for p in found) == 190


def test_gpus_beyond_the_last_minor_are_refused(tmpfs: Path) -> None:
    with pytest.raises(Invalid, match="needs more than 64 DRM minors: GPU 8"):
        tree("9*mi300x", tmpfs)
    assert list(tmpfs.iterdir()) == []


def test_the_first_card_of_a_server_is_not_an_amd_gpu(tmpfs: Path) -> None:
    root = tree("mi300x", tmpfs)
    assert (root / "sys/class/drm/card0/device/vendor").read_text() == "0x1a03\n"
    assert (root / "sys/class/drm/card1/device/vendor").read_text() == "0x1002\n"
    assert (root / "sys/class/drm/renderD128").resolve() == (
        root / "sys/devices/pci0000:00/0000:05:00.0/drm/renderD128"
    )


def test_links_are_counted_and_a_hive_is_of_one_model(tmpfs: Path) -> None:
    root = tree("2*mi300x,2*rx9070xt,phoenix", tmpfs)
    links = [
        (
            [tuple(numbers(link / "properties")[k] for k in ("type", "node_to", "weight")) for link in ordered(node)],
            len(list((node / "p2p_links").iterdir())),
        )
        for node in nodes(root)
    ]
    assert links == [
        ([(2, 0, 20), (11, 2, 15)], 2),
        ([(2, 0, 20), (11, 1, 15)], 2),
        ([(2, 0, 20)], 3),
        ([(2, 0, 20)], 3),
        ([(2, 0, 20)], 0),
    ]
    shown = properties(root)
    assert [(p["io_links_count"], p["p2p_links_count"]) for p in shown] == [(2, 2), (2, 2), (1, 3), (1, 3), (1, 0)]
    assert shown[0]["hive_id"] == shown[1]["hive_id"] != 0
    assert [p["hive_id"] for p in shown[2:]] == [0, 0, 0]


def ordered(node: Path) -> list[Path]:
    return sorted((node / "io_links").iterdir(), key=lambda p: int(p.name))


def test_partition_files_exist_only_where_there_are_modes(tmpfs: Path) -> None:
    root = tree("mi300x:mode=CPX/NPS4,rx9070xt", tmpfs)
    files = {
        name: (root / "sys/bus/pci/devices/0000:05:00.0" / name).read_text().strip()
        for name in (
            "current_compute_partition",
            "available_compute_partition",
            "current_memory_partition",
            "available_memory_partition",
            "product_name",
            "unique_id",
            "mem_info_vram_total",
        )
    }
    assert files == {
        "current_compute_partition": "CPX",
        "available_compute_partition": "SPX, DPX, QPX, CPX",
        "current_memory_partition": "NPS4",
        "available_memory_partition": "NPS1, NPS2, NPS4",
        "product_name": "AMD Instinct MI300X",
        "unique_id": "a1b2c3d4e5f61111",
        "mem_info_vram_total": str(196592 * 1024**2),
    }
    radeon = root / "sys/bus/pci/devices/0000:25:00.0"
    assert not list(radeon.glob("*partition*"))
    assert (radeon / "driver").resolve().name == "amdgpu"


def test_the_same_simulation_gives_the_same_tree(tmpfs: Path) -> None:
    text = "2*mi300x-cpx,rx9070xt,raphael"
    first, second = tree(text, tmpfs / "a"), tree(text, tmpfs / "b")
    assert every_file(first) == every_file(second)


def test_a_machine_that_stands_is_left_alone(tmpfs: Path) -> None:
    root = tmpfs / "machine"
    simulation = parse_simulation("mi210")
    assert build_tree(simulation, root)
    inode = (root / "dev/kfd").stat().st_ino
    (root / "log.jsonl").write_text("{}\n")
    assert not build_tree(simulation, root)
    assert ((root / "dev/kfd").stat().st_ino, (root / "log.jsonl").read_text()) == (inode, "{}\n")


def test_another_simulation_replaces_the_machine_whole(tmpfs: Path) -> None:
    root = tree("8*mi210", tmpfs)
    tree("rx9070xt", tmpfs)
    assert [p["device_id"] for p in properties(root)] == [0x7550]
    assert [p.name for p in tmpfs.iterdir()] == ["machine"]


def test_what_is_left_of_a_killed_build_is_cleared_away(tmpfs: Path) -> None:
    (tmpfs / ".machine.new/sys").mkdir(parents=True)
    (tmpfs / ".machine.old").mkdir()
    root = tree("mi210", tmpfs)
    assert [p.name for p in tmpfs.iterdir()] == ["machine"]
    assert len(nodes(root)) == 1


def test_a_folder_with_something_else_in_it_is_never_touched(tmpfs: Path) -> None:
    (tmpfs / "machine").mkdir()
    (tmpfs / "machine/thesis.tex").write_text("three years")
    with pytest.raises(HostFailure, match="is not empty and holds no simulated machine"):
        tree("mi210", tmpfs)
    assert (tmpfs / "machine/thesis.tex").read_text() == "three years"


def test_a_place_that_cannot_be_written_is_said(tmpfs: Path) -> None:
    (tmpfs / "file").write_text("")
    with pytest.raises(HostFailure, match="the simulated machine cannot be written to"):
        tree("mi210", tmpfs / "file")


def test_whoever_uses_the_gpus_may_write_what_softkfd_writes(tmpfs: Path) -> None:
    root = tree("mi210", tmpfs)
    modes = {
        name: oct((root / name).stat().st_mode & 0o777)
        for name in ("dev/kfd", "dev/dri/renderD128", "state", "log.jsonl", "procs", "processes", "gpus.conf", "sys")
    }
    assert modes == {
        "dev/kfd": "0o666",
        "dev/dri/renderD128": "0o666",
        "state": "0o666",
        "log.jsonl": "0o666",
        "procs": "0o777",
        "processes": "0o777",
        "gpus.conf": "0o644",
        "sys": "0o755",
    }
