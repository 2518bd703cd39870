"""A node's labels for its GPUs: AMD's names and forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from amdvgpud.core.labels import KINDS, labels_of, stale
from amdvgpud.core.model import Inventory
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree


def inventory_of(simulation: str, root: Path) -> Inventory:
    build_tree(parse_simulation(simulation), root)
    return SysfsReader(root).read_inventory()


def test_one_kind_of_gpu_is_one_value_and_its_count_in_the_old_form(tmp_path: Path) -> None:
    labels = labels_of(inventory_of("2*rx9070xt", tmp_path))
    assert {key: value for key, value in labels.items() if "cu-count" in key or "vram" in key} == {
        "amd.com/gpu.cu-count": "64",
        "beta.amd.com/gpu.cu-count": "64",
        "beta.amd.com/gpu.cu-count.64": "2",
        "amd.com/gpu.vram": "16G",
        "beta.amd.com/gpu.vram": "16G",
        "beta.amd.com/gpu.vram.16G": "2",
    }
    assert labels["amd.com/gpu.simd-count"] == "128"


def test_two_kinds_of_gpu_are_counted_by_value_in_both_forms(tmp_path: Path) -> None:
    labels = labels_of(inventory_of("2*mi300x,rx9070xt", tmp_path))
    assert {key: value for key, value in labels.items() if "simd-count" in key} == {
        "amd.com/gpu.simd-count.1216": "2",
        "amd.com/gpu.simd-count.128": "1",
        "beta.amd.com/gpu.simd-count.1216": "2",
        "beta.amd.com/gpu.simd-count.128": "1",
    }


def test_partitions_are_counted_as_the_kfd_counts_devices(tmp_path: Path) -> None:
    labels = labels_of(inventory_of("mi300x-cpx", tmp_path))
    assert labels["beta.amd.com/gpu.cu-count.38"] == "8"
    assert labels["amd.com/gpu.compute-memory-partition"] == "cpx_nps1"
    assert labels["amd.com/gpu.compute-partitioning-supported"] == "true"


def test_without_a_gpu_there_is_no_label() -> None:
    assert labels_of(Inventory()) == {}


@pytest.mark.parametrize("simulation", ["2*mi300x,rx9070xt", "mi300x-cpx", "mi210,strixhalo"])
def test_kubernetes_takes_every_key_and_value(simulation: str, tmp_path: Path) -> None:
    for key, value in labels_of(inventory_of(simulation, tmp_path)).items():
        prefix, name = key.split("/")
        assert prefix in ("amd.com", "beta.amd.com")
        for text in (name, value):
            assert 0 < len(text) <= 63
            assert (text[0] + text[-1]).isalnum()
            assert all(letter.isalnum() or letter in "-_." for letter in text), text


def test_what_is_no_longer_so_is_taken_away_and_others_labels_stay() -> None:
    there = {
        "amd.com/gpu.vram": "192G",
        "beta.amd.com/gpu.vram.192G": "1",
        "amd.com/gpu.family": "AI",
        "kubernetes.io/os": "linux",
    }
    assert stale(there, {"amd.com/gpu.vram": "16G"}) == {
        "amd.com/gpu.vram": "16G",
        "beta.amd.com/gpu.vram.192G": None,
    }
    assert stale({"amd.com/gpu.vram": "16G"}, {"amd.com/gpu.vram": "16G"}) == {}


def test_the_kinds_are_those_of_amds_labeller_that_need_no_open_gpu() -> None:
    left_out = {"family", "firmware", "driver-src-version"}
    assert not left_out & set(KINDS)
    assert len(KINDS) == 12 - len(left_out)
