"""A grant is made of what the CDI file says, for real slices rendered by the real writer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from amdvgpud.core import hami
from amdvgpud.core.delivery import Way
from amdvgpud.core.model import Book, Compute, Inventory, Request, Slice, SliceName
from amdvgpud.core.plan import place
from amdvgpud.host.cdi import CdiFile, SimulatedDevices
from amdvgpud.serve.kube.kubelet import answer_of
from amdvgpud.serve.kube.resources import Grant, GrantMount, GrantNode, grant_of
from tests.fakes import GIB, a_gpu, an_inventory


def a_slice(name: str, on: str, inventory: Inventory) -> Slice:
    request = Request(SliceName(name), Compute(percent=25), 48 * GIB, on=(on,))
    return Slice(request.name, request, place(Book(), inventory, request).shares, 0.0, 1)


def places(names: Sequence[str]) -> str:
    return f"/run/amdvgpud/slices/{names[0]}/places-{'+'.join(names)}"


@pytest.fixture
def inventory() -> Inventory:
    return an_inventory(2)


@pytest.fixture
def cdi(tmp_path: Path) -> CdiFile:
    return CdiFile(tmp_path, run_dir=Path("/run/amdvgpud"), library=Path("/usr/lib/amdvgpu/libamdvgpu.so"))


def test_a_slice_is_the_same_with_cdi_and_without(inventory: Inventory, cdi: CdiFile) -> None:
    item = a_slice("alice", "0", inventory)
    grant = grant_of([item], cdi.render([item], inventory), places)
    guest = "/run/amdvgpud/slices/alice/guest"
    sysfs = "/sys/devices/virtual/kfd/kfd/topology/nodes/2/mem_banks/0/properties"
    assert grant == Grant(
        cdi_devices=("amdvgpu.io/slice=alice",),
        environment=(
            ("AMDVGPU_SLICE", "alice"),
            ("HSA_CU_MASK", "0:0-63"),
            ("HIP_DEVICE_MEMORY_LIMIT_0", "49152m"),
        ),
        mounts=(
            # CDI mounts a tmpfs here, which the kubelet cannot: the same closed door by a directory with one place
            GrantMount("/run/amdvgpud/slices/alice/places-alice", "/run/amdvgpu"),
            GrantMount("/usr/lib/amdvgpu/libamdvgpu.so", "/usr/lib/amdvgpu/libamdvgpu.so"),
            GrantMount("/run/amdvgpud/ld.so.preload", "/etc/ld.so.preload"),
            GrantMount(guest, "/run/amdvgpu/alice"),
            GrantMount(f"{guest}/ledger", "/run/amdvgpu/alice/ledger", read_only=False),
            GrantMount(f"{guest}/mem_banks-1000", sysfs),
        ),
        nodes=(GrantNode("/dev/kfd", "/dev/kfd"), GrantNode("/dev/dri/renderD128", "/dev/dri/renderD128")),
    )


def test_two_slices_of_one_container_add_up_and_bring_no_variable_that_is_wrong_for_one(
    inventory: Inventory, cdi: CdiFile
) -> None:
    items = [a_slice("alice", "0", inventory), a_slice("bob", "1", inventory)]
    grant = grant_of(items, cdi.render(items, inventory), places)
    assert grant.cdi_devices == ("amdvgpu.io/slice=alice", "amdvgpu.io/slice=bob")
    # Both say 0:0-63 and 49152m, each of its own first GPU; the names differ.
    assert dict(grant.environment).keys() == {"HSA_CU_MASK", "HIP_DEVICE_MEMORY_LIMIT_0"}
    paths = [mount.container_path for mount in grant.mounts]
    assert len(set(paths)) == len(paths)
    assert {"/run/amdvgpu", "/run/amdvgpu/alice", "/run/amdvgpu/bob/ledger"} <= set(paths)
    assert grant.mounts[0].host_path.endswith("places-alice+bob")
    assert [node.container_path for node in grant.nodes] == ["/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD136"]


def test_slices_that_are_made_for_one_container_each_tell_the_variables_of_all(
    inventory: Inventory, tmp_path: Path
) -> None:
    cdi = CdiFile(tmp_path, run_dir=tmp_path, library=Path("/usr/lib/amdvgpu/libamdvgpu.so"))
    both = (SliceName("pod-u.0"), SliceName("pod-u.0.1"))
    first, second = (a_slice(name, on, inventory) for name, on in zip(both, ("1", "0"), strict=True))
    second = replace(second, shares=(replace(second.shares[0], vram_bytes=GIB),))
    items = [replace(item, request=replace(item.request, together=both)) for item in (first, second)]
    told = {
        "AMDVGPU_SLICE": "pod-u.0,pod-u.0.1",
        "ROCR_VISIBLE_DEVICES": "GPU-00000000abcd0000,GPU-00000000abcd0001",
        "HSA_CU_MASK": "0:0-63;1:0-63",
        "HIP_DEVICE_MEMORY_LIMIT_0": "1024m",  # as the container counts GPUs, not as its slices are named
        "HIP_DEVICE_MEMORY_LIMIT_1": "49152m",
    }
    grant = grant_of(items, cdi.render(items, inventory), places)
    assert (grant.cdi_devices, dict(grant.environment)) == (tuple(f"amdvgpu.io/slice={name}" for name in both), told)
    # In the file too, whichever of them was there first: a runtime lets the last one win.
    for slices in (items[:1], items):
        cdi.publish(slices, inventory)
    devices = json.loads(cdi.path.read_text())["devices"]
    for device in devices:
        assert dict(entry.split("=", 1) for entry in device["containerEdits"]["env"]) == told
    assert [device["name"] for device in devices] == list(both)


def test_on_a_simulated_node_the_emulator_comes_along(inventory: Inventory, tmp_path: Path) -> None:
    simulated = SimulatedDevices(tmp_path / "tree", Path("/usr/lib/amdvgpu/libsoftkfd.so"))
    cdi = CdiFile(
        tmp_path, run_dir=Path("/run/amdvgpud"), library=Path("/usr/lib/amdvgpu/libamdvgpu.so"), simulated=simulated
    )
    item = a_slice("alice", "0", inventory)
    grant = grant_of([item], cdi.render([item], inventory), places)
    assert grant.nodes == ()
    assert {mount.container_path: mount.read_only for mount in grant.mounts} == {
        "/run/amdvgpu": True,
        "/run/amdvgpu/alice": True,
        "/run/amdvgpu/alice/ledger": False,
        "/usr/lib/amdvgpu/libamdvgpu.so": True,
        "/usr/lib/amdvgpu/libsoftkfd.so": True,
        "/etc/ld.so.preload": True,
        "/run/softkfd": False,
        "/dev/kfd": False,
        "/dev/dri/renderD128": False,
    }


@pytest.mark.parametrize("delivery", ["cdi", "nodes"])
def test_what_is_added_is_told_in_either_way(delivery: Way) -> None:
    grant = Grant(
        ("amdvgpu.io/slice=a",),
        (("A", "1"),),
        (GrantMount("/a", "/a"),),
        (GrantNode("/dev/kfd", "/dev/kfd"),),
        added_environment=(("B", "2"),),
        added_mounts=(GrantMount("/b", "/b"),),
    )
    answer = answer_of(grant, delivery)
    told: dict[str, Any] = {
        "envs": dict(answer.envs),
        "mounts": [m.host_path for m in answer.mounts],
        "nodes": [d.host_path for d in answer.devices],
        "cdi": [d.name for d in answer.cdi_devices],
    }
    assert told == (
        {"envs": {"B": "2"}, "mounts": ["/b"], "nodes": [], "cdi": ["amdvgpu.io/slice=a"]}
        if delivery == "cdi"
        else {"envs": {"A": "1", "B": "2"}, "mounts": ["/a", "/b"], "nodes": ["/dev/kfd"], "cdi": []}
    )


@pytest.mark.parametrize(
    ("gfx_target", "split_count", "count"),
    [("gfx942", 0, 10), ("gfx1201", 0, 2), ("gfx1201", 5, 5), ("gfx1100", 0, 10)],
)
def test_how_many_may_share_a_gpu(gfx_target: str, split_count: int, count: int) -> None:
    assert hami.split_count(replace(a_gpu(0), gfx_target=gfx_target), split_count) == count
