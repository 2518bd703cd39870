"""A node's labels for its GPUs: AMD's names and forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from amdvgpud.core.labels import COUNTED, OF_NODE, labels_of, stale
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


@pytest.mark.parametrize(
    ("simulation", "mode", "supported"),
    [
        ("2*mi300x,rx9070xt", "spx_nps1", "true"),
        ("rx9070xt,2*mi300x-cpx", "cpx_nps1", "false"),
        ("mi300x,mi300x-cpx", None, "true"),
        ("rx9070xt", None, "false"),
    ],
)
def test_what_holds_of_the_node_is_one_plain_label_each(
    simulation: str, mode: str | None, supported: str, tmp_path: Path
) -> None:
    """Where GPUs differ too: a selector asks for just this key. What modes there are is the first GPU's word."""
    labels = labels_of(inventory_of(simulation, tmp_path))
    wanted = {
        "amd.com/gpu.compute-memory-partition": mode,
        "amd.com/gpu.compute-partitioning-supported": supported,
        "amd.com/gpu.driver-src-version": "0123456789ABCDEF0123456",
        "amd.com/gpu.driver-version": "6.12.12",
        "amd.com/gpu.memory-partitioning-supported": supported,
    }
    assert {key: value for key, value in labels.items() if any(kind in key for kind in OF_NODE)} == {
        key: value for key, value in wanted.items() if value is not None
    }


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
        "beta.amd.com/gpu.compute-partitioning-supported.true": "2",
        "amd.com/gpu.driver-version": "6.10.5",
        "amd.com/gpu.family": "AI",
        "amd.com/gpu.vram-free": "somebody else's",
        "kubernetes.io/os": "linux",
    }
    assert stale(there, {"amd.com/gpu.vram": "16G"}) == {
        "amd.com/gpu.vram": "16G",
        "beta.amd.com/gpu.vram.192G": None,
        "beta.amd.com/gpu.compute-partitioning-supported.true": None,
        "amd.com/gpu.driver-version": None,
    }
    assert stale({"amd.com/gpu.vram": "16G"}, {"amd.com/gpu.vram": "16G"}) == {}


def test_the_kinds_are_those_of_amds_labeller_that_need_no_open_gpu() -> None:
    left_out = {"family", "firmware"}
    assert not left_out & {*COUNTED, *OF_NODE}
    assert len(COUNTED) + len(OF_NODE) == 12 - len(left_out)
