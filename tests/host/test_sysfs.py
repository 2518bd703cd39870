"""Discovery on small trees built here, file by file: joins, identities, old kernels, damage."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amdvgpud.core.identify import smi_uuid
from amdvgpud.core.model import (
    CuLayout,
    Gpu,
    GpuId,
    Inventory,
    Link,
    LinkKind,
    Partition,
    PartitionId,
    Profile,
    Unusable,
)
from amdvgpud.host import sysfs
from amdvgpud.host.sysfs import SysfsReader

GIB = 1024**3
SIMD_BASE = 2147487744

MI300X = {
    "simd_count": 1216,
    "simd_id_base": SIMD_BASE,
    "array_count": 32,
    "simd_arrays_per_engine": 1,
    "cu_per_simd_array": 10,
    "simd_per_cu": 4,
    "gfx_target_version": 90402,
    "vendor_id": 4098,
    "device_id": 0x74A1,
    "num_xcc": 8,
}
MI300X_CPX = MI300X | {"simd_count": 152, "array_count": 4, "num_xcc": 1}
RX9070XT = {
    "simd_count": 128,
    "simd_id_base": SIMD_BASE,
    "array_count": 8,
    "simd_arrays_per_engine": 2,
    "cu_per_simd_array": 8,
    "simd_per_cu": 2,
    "gfx_target_version": 120001,
    "vendor_id": 4098,
    "device_id": 0x7550,
    "num_xcc": 1,
}
DENIED = "permission denied (a device cgroup, or a reset in progress)"
CPU = {"cpu_cores_count": 64, "simd_count": 0, "drm_render_minor": 0, "gfx_target_version": 0}


class Machine:
    """Writes a root. ``add_*`` make the files of one view each; nothing is derived from another view."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.topology = root / "sys/class/kfd/kfd/topology"
        (root / "sys/bus/pci/devices").mkdir(parents=True)
        (root / "sys/class/drm").mkdir(parents=True)

    def write(self, path: Path | str, text: str) -> None:
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def add_pci(
        self,
        address: str,
        *,
        driver: str | None = "amdgpu",
        vendor: int = 0x1002,
        device: int = 0x74A1,
        pci_class: int = 0x120000,
        **files: str,
    ) -> None:
        home = self.root / "sys/bus/pci/devices" / address
        for name, number in (
            ("vendor", f"{vendor:#06x}"),
            ("device", f"{device:#06x}"),
            ("class", f"{pci_class:#08x}"),
        ):
            self.write(home / name, f"{number}\n")
        for name, text in ({"revision": "0x00", "numa_node": "-1"} | files).items():
            self.write(home / name, f"{text}\n")
        if driver:
            (home / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")

    def add_render(self, minor: int, owner: str) -> None:
        """``owner``: a PCI address, or the name of a partition's platform device."""
        bus = "platform" if owner.startswith("amdgpu") else "pci0000:00"
        (self.root / f"sys/class/drm/renderD{minor}").symlink_to(f"../../devices/{bus}/{owner}/drm/renderD{minor}")
        (self.root / f"sys/devices/{bus}/{owner}/drm/renderD{minor}").mkdir(parents=True)

    def add_node(
        self,
        number: int,
        properties: dict[str, int],
        *,
        gpu_id: int | None,
        banks: tuple[int, ...] = (16 * GIB,),
        links: tuple[tuple[int, int, int], ...] = (),
        **more: int,
    ) -> None:
        """``banks``: bytes of public framebuffer each; ``links``: (type, node_to, weight)."""
        home = self.topology / f"nodes/{number}"
        self.write(home / "properties", "".join(f"{key} {value}\n" for key, value in (properties | more).items()))
        if gpu_id is not None:
            self.write(home / "gpu_id", f"{gpu_id}\n")
        for n, size_bytes in enumerate(banks):
            self.write(home / f"mem_banks/{n}/properties", f"heap_type 1\nsize_in_bytes {size_bytes}\nflags 0\n")
        for n, (kind, to, weight) in enumerate(links):
            self.write(home / f"io_links/{n}/properties", f"type {kind}\nnode_to {to}\nweight {weight}\n")

    def add_gpu(self, address: str, node: int, minor: int, properties: dict[str, int] = MI300X, **files: str) -> None:
        """An unpartitioned GPU in all views. Its gpu_id is 1000 and its node number."""
        unique_id = int(files.get("unique_id") or "0", 16)
        self.add_pci(address, device=properties["device_id"], **files)  # type: ignore[arg-type]
        self.add_render(minor, address)
        self.add_node(
            node,
            properties,
            gpu_id=1000 + node,
            location_id=location_of(address),
            domain=int(address.split(":")[0], 16),
            drm_render_minor=minor,
            unique_id=unique_id,
        )

    def caches(self, node: int, entries: list[tuple[int, int, int]]) -> None:
        """Cache entries in order: (position, size in KiB, type)."""
        for n, (position, size, kind) in enumerate(entries):
            text = f"processor_id_low {SIMD_BASE + position}\nlevel 1\nsize {size}\ntype {kind}\nsibling_map 1,0\n"
            self.write(self.topology / f"nodes/{node}/caches/{n}/properties", text)

    def read(self) -> Inventory:
        return SysfsReader(self.root, name_tables=()).read_inventory()


def location_of(address: str) -> int:
    bus, device = address.split(":")[1], address.split(":")[2].split(".")[0]
    return int(bus, 16) << 8 | int(device, 16) << 3 | int(address[-1])


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def ids(inventory: Inventory) -> list[str]:
    return [gpu.id for gpu in inventory.gpus]


def reasons(inventory: Inventory) -> dict[str, str]:
    return {u.pci_address or u.name: u.reason for u in inventory.unusable}


def test_one_gpu_with_all_its_files(machine: Machine) -> None:
    machine.add_gpu(
        "0001:83:00.0",
        node=3,
        minor=128,
        revision="0x02",
        numa_node="1",
        unique_id="AF54e92b0a5d57c8",
        product_name="AMD Instinct MI300X OAM",
        mem_info_vram_total=str(192 * GIB),
        mem_info_vram_used="298844160",
        current_compute_partition="SPX",
        available_compute_partition="SPX, DPX, QPX, CPX",
        current_memory_partition="NPS1",
        available_memory_partition="NPS1, NPS4",
    )
    machine.add_node(1, CPU, gpu_id=0)
    machine.add_node(
        3,
        MI300X,
        gpu_id=4711,
        banks=(191 * GIB, GIB // 2),
        links=((2, 1, 20), (11, 4, 15), (7, 9, 1), (2, 5, 40)),
        location_id=0x8300,
        domain=1,
        drm_render_minor=128,
        unique_id=0xAF54E92B0A5D57C8,
        hive_id=99,
    )
    machine.write(machine.topology / "generation_id", "17\n")
    machine.write("sys/module/amdgpu/version", "6.12.12\n")
    machine.write("sys/module/amdgpu/srcversion", "533BB7E5866E52F63B9ACCB\n")
    gpu = GpuId("GPU-af54e92b0a5d57c8")
    partition = Partition(
        id=PartitionId(f"{gpu}/0"),
        gpu=gpu,
        index=0,
        kfd_node=3,
        kfd_gpu_id=4711,
        render_minor=128,
        vram_bytes=191 * GIB + GIB // 2,
        layout=CuLayout(8, 4, 1, (10,) * 16 + (9,) * 16, wgp=False, harvest_known=False),
        gfx_target="gfx942",
        unique_id=0xAF54E92B0A5D57C8,
        numa_node=1,
        links=(Link(LinkKind.PCIE, 1, 20), Link(LinkKind.XGMI, 4, 15), Link(LinkKind.PCIE, 5, 40)),
    )
    expected = Gpu(
        id=gpu,
        index=0,
        pci_address="0001:83:00.0",
        unique_id=0xAF54E92B0A5D57C8,
        smi_uuid="afff74a1-0000-1000-8054-e92b0a5d57c8",
        device_id=0x74A1,
        revision=2,
        product_name="AMD Instinct MI300X OAM",
        gfx_target="gfx942",
        vram_bytes=192 * GIB,
        partitions=(partition,),
        numa_node=1,
        compute_partition="SPX",
        memory_partition="NPS1",
        available_compute_partitions=("SPX", "DPX", "QPX", "CPX"),
        available_memory_partitions=("NPS1", "NPS4"),
        xgmi_hive_id=99,
        profiles=(
            Profile(0, "SPX", 1, 8, ("NPS1",)),
            Profile(1, "DPX", 2, 4, ("NPS1",)),
            Profile(2, "QPX", 4, 2, ("NPS1", "NPS4")),
            Profile(3, "CPX", 8, 1, ("NPS1", "NPS4")),
        ),
    )
    assert machine.read() == Inventory(
        (expected,), generation_id=17, driver_version="6.12.12", driver_src_version="533BB7E5866E52F63B9ACCB"
    )
    reader = SysfsReader(machine.root)
    assert reader.vram_used_bytes("0001:83:00.0") == 298844160
    assert reader.vram_used_bytes("0000:83:00.0") is None
    assert reader.vram_used_bytes("../../etc") is None


def test_temperatures_are_those_of_hwmon_and_a_card_that_may_sleep_is_not_kept_awake_for_them(machine: Machine) -> None:
    machine.add_gpu("0000:83:00.0", node=1, minor=128)
    reader = SysfsReader(machine.root)
    assert reader.temperatures_c("0000:83:00.0") == {}
    device = machine.root / "sys/bus/pci/devices/0000:83:00.0"
    monitor = device / "hwmon/hwmon5"
    monitor.mkdir(parents=True)
    for number, (label, value) in enumerate((("edge", "53000\n"), ("junction", "54500\n"), ("mem", "")), 1):
        (monitor / f"temp{number}_label").write_text(f"{label}\n")
        (monitor / f"temp{number}_input").write_text(value)
    (device / "power").mkdir(exist_ok=True)
    for status, seen in (("active", {"edge": 53.0, "junction": 54.5}), ("suspended", {}), ("suspending", {})):
        (device / "power/runtime_status").write_text(f"{status}\n")
        assert reader.temperatures_c("0000:83:00.0") == seen
    (device / "power/runtime_status").write_text("active\n")
    for control, delay, seen in (
        ("auto", "5000\n", {}),  # each read would start its five seconds anew
        ("on", "5000\n", {"edge": 53.0, "junction": 54.5}),
        ("auto", "-1\n", {"edge": 53.0, "junction": 54.5}),
        ("auto", "", {"edge": 53.0, "junction": 54.5}),  # a driver that does not use it answers EIO
    ):
        (device / "power/control").write_text(f"{control}\n")
        (device / "power/autosuspend_delay_ms").write_text(delay)
        assert reader.temperatures_c("0000:83:00.0") == seen
    assert reader.temperatures_c("../../etc") == {}


# --------------------------------------------------------------------------------------------- FR-01: partitions


@pytest.mark.parametrize("separator", ["_", "."])
@pytest.mark.parametrize("node_ids", [[0xAB] * 8, [0xAB, *range(0xB1, 0xB8)], list(range(0xB0, 0xB8))])
def test_eight_partitions_have_one_parent_whatever_ids_their_nodes_print(
    machine: Machine, node_ids: list[int], separator: str
) -> None:
    """FR-01. Render minors are in no order; each partition has the one that its own node names."""
    minors = [128, 135, 129, 134, 130, 133, 131, 132]
    machine.add_pci("0002:05:00.0", unique_id="ab", current_compute_partition="CPX")
    for index, minor in enumerate(minors):
        machine.add_render(minor, f"amdgpu_xcp{separator}{29 + index}" if index else "0002:05:00.0")
        machine.add_node(
            10 + index,
            MI300X_CPX,
            gpu_id=500 + index,
            location_id=0x500 | index,
            domain=2,
            drm_render_minor=minor,
            unique_id=node_ids[index],
        )
    (gpu,) = machine.read().gpus
    assert (gpu.id, gpu.pci_address, gpu.compute_partition) == ("GPU-00000000000000ab", "0002:05:00.0", "CPX")
    assert gpu.vram_bytes == 8 * 16 * GIB
    assert [(p.id, p.index, p.kfd_node, p.kfd_gpu_id, p.render_minor, p.unique_id) for p in gpu.partitions] == [
        (f"{gpu.id}/{n}", n, 10 + n, 500 + n, minors[n], node_ids[n]) for n in range(8)
    ]


def test_node_ids_that_differ_name_no_gpu_where_the_device_file_is_absent(machine: Machine) -> None:
    machine.add_pci("0000:05:00.0")
    for index in range(2):
        machine.add_render(128 + index, "amdgpu_xcp_1" if index else "0000:05:00.0")
        machine.add_node(
            1 + index,
            MI300X_CPX,
            gpu_id=500 + index,
            location_id=0x500 | index,
            drm_render_minor=128 + index,
            unique_id=0xB0 + index,
        )
    assert ids(machine.read()) == ["pci-0000-05-00.0"]


def test_a_virtual_function_is_a_gpu_of_its_own_and_no_partition(machine: Machine) -> None:
    """Function 1 exists and amdgpu drives it: the function bits are the device's own."""
    for function in range(2):
        machine.add_gpu(f"0000:05:00.{function}", node=1 + function, minor=128 + function, unique_id=f"a{function}")
    inventory = machine.read()
    assert [(g.id, g.pci_address, len(g.partitions)) for g in inventory.gpus] == [
        ("GPU-00000000000000a0", "0000:05:00.0", 1),
        ("GPU-00000000000000a1", "0000:05:00.1", 1),
    ]


@pytest.mark.parametrize(("driver", "pci_class"), [("snd_hda_intel", 0x040300), ("vfio-pci", 0x120000)])
def test_a_function_1_that_amdgpu_does_not_drive_is_not_taken_for_the_second_partition(
    machine: Machine, driver: str, pci_class: int
) -> None:
    machine.add_pci("0000:05:00.0", unique_id="ab")
    machine.add_pci("0000:05:00.1", driver=driver, pci_class=pci_class, device=0xAB38)
    for index in range(2):
        machine.add_render(128 + index, "amdgpu_xcp_1" if index else "0000:05:00.0")
        machine.add_node(
            1 + index, MI300X_CPX, gpu_id=500 + index, location_id=0x500 | index, drm_render_minor=128 + index
        )
    inventory = machine.read()
    assert [p.id for p in inventory.partitions] == ["GPU-00000000000000ab/0", "GPU-00000000000000ab/1"]
    assert [u.pci_address for u in inventory.unusable] == ["0000:05:00.1"] * (driver == "vfio-pci")


def test_one_bad_partition_leaves_the_others_and_their_indices(machine: Machine) -> None:
    machine.add_pci("0000:05:00.0", unique_id="ab")
    for index in range(3):
        machine.add_render(128 + index, f"amdgpu_xcp_{index}" if index else "0000:05:00.0")
        machine.add_node(
            1 + index,
            MI300X_CPX | ({"simd_per_cu": 3} if index == 1 else {}),
            gpu_id=500 + index,
            location_id=0x500 | index,
            drm_render_minor=128 + index,
        )
    inventory = machine.read()
    assert [p.id for p in inventory.partitions] == ["GPU-00000000000000ab/0", "GPU-00000000000000ab/2"]
    assert inventory.unusable == (
        Unusable(
            "0000:05:00.0",
            "KFD node 2",
            "torn: 152 SIMDs of 3 a CU, 4 arrays of 1 an engine on 1 XCCs do not fit together",
        ),
    )


# --------------------------------------------------------------------------------------------- FR-03: identities


@pytest.mark.parametrize("files", [{"unique_id": "0"}, {"unique_id": ""}, {}])
def test_a_gpu_without_unique_id_goes_by_its_address_and_disturbs_no_other(
    machine: Machine, files: dict[str, str]
) -> None:
    machine.add_gpu("0000:0b:00.0", 1, 128, RX9070XT, **files)
    machine.add_gpu("0000:05:00.0", 2, 129, unique_id="1234567890abcdef")
    machine.add_gpu("0000:0c:00.0", 3, 130, RX9070XT, **files)
    inventory = machine.read()
    assert [(g.id, g.index, g.smi_uuid) for g in inventory.gpus] == [
        ("pci-0000-0b-00.0", 0, None),
        ("GPU-1234567890abcdef", 1, smi_uuid(0x1234567890ABCDEF, 0x74A1)),
        ("pci-0000-0c-00.0", 2, None),
    ]
    assert (inventory.unusable, inventory.warnings) == ((), ())


def test_two_boards_with_one_unique_id_go_by_their_addresses(machine: Machine) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128, unique_id="ab")
    machine.add_gpu("0000:06:00.0", 2, 129, unique_id="ab")
    inventory = machine.read()
    assert ids(inventory) == ["pci-0000-05-00.0", "pci-0000-06-00.0"]
    assert inventory.warnings == (
        "0000:05:00.0, 0000:06:00.0: these GPUs share the unique id 00000000000000ab; they go by their PCI addresses",
    )


def test_a_twin_that_becomes_unusable_does_not_rename_the_other(machine: Machine) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128, unique_id="ab")
    machine.add_pci("0000:06:00.0", driver="vfio-pci", unique_id="ab")
    assert ids(machine.read()) == ["pci-0000-05-00.0"]


@pytest.mark.parametrize("text", ["no hex at all", "0x", "-5", "12345678901234567"])
def test_a_unique_id_that_cannot_be_read_makes_no_second_gpu_of_the_first(machine: Machine, text: str) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128, unique_id="ab")
    machine.write("sys/bus/pci/devices/0000:05:00.0/unique_id", text)
    assert machine.read() == Inventory(
        unusable=(
            Unusable(
                "0000:05:00.0",
                "AMD device 0x74a1",
                "its unique_id cannot be read now; guessing another id would make it another GPU",
            ),
        )
    )


# -------------------------------------------------------------------------------------------------- FR-04: joins


def test_neither_card_numbers_nor_pci_order_matter(machine: Machine) -> None:
    """FR-04. KFD order is the reverse of PCI order; the first card is a server's own display controller."""
    machine.add_pci("0000:01:00.0", driver="ast", vendor=0x1A03, device=0x2000, pci_class=0x030000)
    (machine.root / "sys/class/drm/card0").mkdir()
    machine.add_gpu("0000:05:00.0", node=4, minor=128, unique_id="a5")
    machine.add_gpu("0000:26:00.0", node=3, minor=129, unique_id="26")
    machine.add_gpu("0000:83:00.0", node=10, minor=130, unique_id="83")
    inventory = machine.read()
    assert [(g.index, g.pci_address, g.unique_id, g.partitions[0].render_minor) for g in inventory.gpus] == [
        (0, "0000:26:00.0", 0x26, 129),
        (1, "0000:05:00.0", 0xA5, 128),
        (2, "0000:83:00.0", 0x83, 130),
    ]
    assert inventory.unusable == ()


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"location_id": 0x500, "drm_render_minor": 129}, "2 KFD nodes claim partition 0 of 0000:05:00.0"),
        ({"location_id": 0x600, "drm_render_minor": 128}, "render minor 128 is also that of another KFD node"),
        ({"location_id": 0x600, "gpu_id": 1001}, "gpu_id 1001 is also that of another KFD node"),
    ],
)
def test_what_two_nodes_claim_goes_to_neither(machine: Machine, second: dict[str, int], reason: str) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128, unique_id="a5")
    machine.add_pci("0000:06:00.0", unique_id="a6")
    machine.add_render(129, "amdgpu_xcp_1")
    machine.add_gpu("0000:07:00.0", 3, 130, unique_id="a7")
    machine.add_node(2, MI300X, **{"gpu_id": 1002, "drm_render_minor": 129} | second)  # type: ignore[arg-type]
    inventory = machine.read()
    assert ids(inventory) == ["GPU-00000000000000a7"]
    assert {u.name: u.reason for u in inventory.unusable if u.name.startswith("KFD")} == {
        "KFD node 1": reason,
        "KFD node 2": reason,
    }


def test_a_node_that_no_pci_device_matches_is_dropped_with_the_address(machine: Machine) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128)
    shutil.rmtree(machine.root / "sys/bus/pci/devices/0000:05:00.0")
    expected = (Unusable("0000:05:00.0", "KFD node 1", "no PCI device at 0000:05:00.0 matches it"),)
    assert machine.read() == Inventory(unusable=expected)


def test_a_domain_that_differs_is_another_device(machine: Machine) -> None:
    machine.add_gpu("0001:05:00.0", 1, 128)
    machine.add_node(1, MI300X, gpu_id=1001, location_id=0x500, domain=0, drm_render_minor=128)
    assert reasons(machine.read()) == {
        "0000:05:00.0": "no PCI device at 0000:05:00.0 matches it",
        "0001:05:00.0": "no KFD node belongs to it: the driver offers no compute on it",
    }


def test_kfd_and_pci_that_name_different_devices_are_not_joined(machine: Machine) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128)
    machine.write("sys/bus/pci/devices/0000:05:00.0/device", "0x7550\n")
    assert reasons(machine.read()) == {"0000:05:00.0": "the KFD says device id 0x74a1, PCI says 0x7550"}


def test_a_render_node_of_another_gpu_is_not_handed_out(machine: Machine) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128, unique_id="a5")
    (machine.root / "sys/class/drm/renderD128").unlink()
    machine.add_render(128, "0000:06:00.0")
    assert reasons(machine.read()) == {"0000:05:00.0": "renderD128, which the KFD names, belongs to 0000:06:00.0"}


def test_a_gpu_whose_render_node_is_gone_is_not_handed_out(machine: Machine) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128)
    (machine.root / "sys/class/drm/renderD128").unlink()
    assert reasons(machine.read()) == {
        "0000:05:00.0": "no render node: renderD128, which the KFD names, does not exist"
    }


# ----------------------------------------------------------------------------------- devices that are not for us


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        ("radeon", "its driver is radeon, not amdgpu"),
        ("vfio-pci", "its driver is vfio-pci, not amdgpu"),
        (None, "no driver is bound to it"),
        ("amdgpu", "no KFD node belongs to it: the driver offers no compute on it"),
    ],
)
def test_an_amd_gpu_that_is_not_amdgpus_compute_device_is_listed_with_its_driver(
    machine: Machine, driver: str | None, reason: str
) -> None:
    machine.add_node(0, CPU, gpu_id=0)
    machine.add_pci("0000:05:00.0", driver=driver, product_name="a board")
    machine.add_pci("0000:05:00.1", driver="snd_hda_intel", pci_class=0x040300)
    machine.add_pci("0000:01:00.0", driver="nvidia", vendor=0x10DE, pci_class=0x030000)
    assert machine.read() == Inventory(unusable=(Unusable("0000:05:00.0", "a board", reason),))


def test_a_gpu_that_was_given_to_vfio_while_its_node_lingers_is_unusable(machine: Machine) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128)
    driver = machine.root / "sys/bus/pci/devices/0000:05:00.0/driver"
    driver.unlink()
    driver.symlink_to("../../../bus/pci/drivers/vfio-pci")
    assert reasons(machine.read()) == {"0000:05:00.0": "its driver is vfio-pci, not amdgpu"}


def test_a_machine_without_gpu_or_driver_is_an_empty_inventory(machine: Machine, tmp_path: Path) -> None:
    """FR-55."""
    assert machine.read() == Inventory()
    assert SysfsReader(tmp_path / "nowhere").read_inventory() == Inventory()
    machine.add_node(0, CPU, gpu_id=0)
    assert machine.read() == Inventory()


def test_an_amdgpu_without_kfd_says_so(machine: Machine) -> None:
    machine.add_pci("0000:05:00.0")
    assert reasons(machine.read()) == {
        "0000:05:00.0": "there is no KFD topology: amdgpu came up without compute (HSA) support"
    }


def test_the_topology_is_also_found_where_the_class_link_is_missing(machine: Machine) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128, unique_id="ab")
    before = machine.read()
    (machine.root / "sys/devices/virtual/kfd").mkdir(parents=True)
    (machine.root / "sys/class/kfd/kfd").rename(machine.root / "sys/devices/virtual/kfd/kfd")
    assert machine.read() == before
    assert ids(before) == ["GPU-00000000000000ab"]


# ------------------------------------------------------------------------------------------ FR-05: compute units


@pytest.mark.parametrize(
    ("properties", "layout"),
    [
        (RX9070XT, CuLayout(1, 4, 2, (8,) * 8, wgp=True, harvest_known=False)),
        (RX9070XT | {"gfx_target_version": 110000}, CuLayout(1, 4, 2, (8,) * 8, wgp=True, harvest_known=False)),
        (MI300X, CuLayout(8, 4, 1, (10,) * 16 + (9,) * 16, wgp=False, harvest_known=False)),
        (RX9070XT | {"simd_count": 108}, CuLayout(1, 4, 2, (8, 8, 8, 6, 6, 6, 6, 6), wgp=True, harvest_known=False)),
    ],
)
def test_cus_are_simds_by_simds_a_cu(machine: Machine, properties: dict[str, int], layout: CuLayout) -> None:
    """FR-05: 64 CUs of 128 SIMDs on gfx11 and gfx12, 304 of 1216 on gfx942."""
    machine.add_gpu("0000:05:00.0", 1, 128, properties)
    (gpu,) = machine.read().gpus
    assert gpu.partitions[0].layout == layout
    assert gpu.cu_count == properties["simd_count"] // properties["simd_per_cu"]


SMALL = RX9070XT | {"simd_count": 20, "array_count": 2, "cu_per_simd_array": 8}
"""Ten CUs in two arrays of up to eight."""
VECTOR = [0, 1, 4, 5, 6, 7, 8, 9, 12, 13]
"""Where they are: six in the first array, four in the second."""
SCALAR = [0, 4, 6, 8, 12]


@pytest.mark.parametrize(
    ("entries", "known"),
    [
        ([(p, 32, 9) for p in VECTOR] + [(p, 16, 9) for p in SCALAR], True),
        ([(p, 16, 9) for p in VECTOR] + [(p, 32, 10) for p in SCALAR] + [(p, 16, 9) for p in SCALAR], True),
        ([(p, 16, 9) for p in SCALAR] + [(p, 16, 9) for p in VECTOR], True),
        ([(p, 16, 9) for p in VECTOR[:-1]] + [(p, 16, 9) for p in SCALAR], False),
        ([(p, 16, 9) for p in [*VECTOR[:-1], 16]], False),
        ([(p, 16, 9) for p in [*VECTOR[:-2], 7, 13]], False),
        ([(p, 16, 9) for p in [0, 1, 2, 3, 4, 8, 9, 10, 11, 12]], False),
        ([(p, 32, 9) for p in VECTOR] + [(p + 1, 16, 9) for p in range(2, 12)], False),
        ([(p, 16, 10) for p in VECTOR], False),
    ],
    ids=[
        "two sizes",
        "one size, told apart by order",
        "one size, scalar first",
        "one missing",
        "one outside",
        "one twice",
        "a split WGP",
        "two that fit and differ",
        "no vector cache at all",
    ],
)
def test_the_harvest_map_comes_from_the_vector_caches_or_is_an_even_split(
    machine: Machine, entries: list[tuple[int, int, int]], known: bool
) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128, SMALL)
    machine.caches(1, entries)
    inventory = machine.read()
    (partition,) = inventory.partitions
    assert partition.layout == CuLayout(1, 1, 2, (6, 4), wgp=True, harvest_known=known)
    warning = (
        "0000:05:00.0/0: its cache entries do not account for its 10 CUs; which CUs are fused off is unknown and an "
        "even split is assumed"
    )
    assert inventory.warnings == (() if known else (warning,))


def test_a_map_that_is_not_the_even_split_is_believed(machine: Machine) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128, SMALL)
    machine.caches(1, [(p, 32, 9) for p in (0, 1, 8, 9, 10, 11, 12, 13, 14, 15)])
    assert machine.read().partitions[0].layout == CuLayout(1, 1, 2, (2, 8), wgp=True)


def test_six_engines_of_gfx11_have_a_total_but_no_trusted_map(machine: Machine) -> None:
    """The driver reads the bitmap of engines 4 and 5 at the wrong stride when it lists caches."""
    navi31 = RX9070XT | {"simd_count": 168, "array_count": 12, "gfx_target_version": 110000, "device_id": 0x744C}
    machine.add_gpu("0000:05:00.0", 1, 128, navi31)
    machine.caches(1, [(8 * array + cu, 32, 9) for array in range(12) for cu in range(8 if array < 6 else 6)])
    inventory = machine.read()
    assert inventory.partitions[0].layout == CuLayout(1, 6, 2, (8,) * 6 + (6,) * 6, wgp=True, harvest_known=False)
    assert inventory.warnings == ()


# ------------------------------------------------------------------------------------------------ memory, NUMA, names


@pytest.mark.parametrize(
    ("banks", "total", "vram_bytes"),
    [
        ("heap_type 1\nsize_in_bytes 17179869184\n", "99", 16 * GIB),
        ("heap_type 2\nsize_in_bytes 17179869184\n", "99", 16 * GIB),
        ("heap_type 0\nsize_in_bytes 17179869184\n", "17163091968", 17163091968),
        ("heap_type 1\nsize_in_bytes", "17163091968", 17163091968),
        ("heap_type 1\nsize_in_bytes 99999999999999999999\n", "17163091968", 17163091968),
        ("heap_type 1\nsize_in_bytes -1\n", "17163091968", 17163091968),
    ],
)
def test_vram_is_the_framebuffer_heaps_else_the_devices_own_figure(
    machine: Machine, banks: str, total: str, vram_bytes: int
) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128, mem_info_vram_total=total)
    machine.write(machine.topology / "nodes/1/mem_banks/0/properties", banks)
    assert machine.read().partitions[0].vram_bytes == vram_bytes


def test_a_gpu_of_unknown_memory_is_not_handed_out(machine: Machine) -> None:
    """A quota could not be a part of it. The nominal figures are for captures, never for a machine."""
    machine.add_gpu("0000:05:00.0", 1, 128)
    shutil.rmtree(machine.topology / "nodes/1/mem_banks")
    assert {u.name: u.reason for u in machine.read().unusable} == {
        "KFD node 1": "nothing says how much VRAM it has (no readable memory bank, no mem_info_vram_total)",
        "AMD device 0x74a1": "none of its partitions can be used",
    }


@pytest.mark.parametrize(("text", "numa"), [("1", 1), ("0", 0), ("-1", None), ("", None), ("x", None), (None, None)])
def test_an_unknown_numa_node_stays_unknown(machine: Machine, text: str | None, numa: int | None) -> None:
    """FR-47. A link to a CPU node is there, and is not asked."""
    machine.add_node(0, CPU, gpu_id=0)
    machine.add_gpu("0000:05:00.0", 1, 128)
    machine.write(machine.topology / "nodes/1/io_links/0/properties", "type 2\nnode_to 0\nweight 20\n")
    file = machine.root / "sys/bus/pci/devices/0000:05:00.0/numa_node"
    file.unlink()
    if text is not None:
        file.write_text(text)
    (gpu,) = machine.read().gpus
    assert (gpu.numa_node, gpu.partitions[0].numa_node) == (numa, numa)


@pytest.mark.parametrize(
    ("revision", "product_name", "expected"),
    [
        ("0xc0", "", "AMD Radeon RX 9070 XT"),
        ("0xc3", "", "AMD Radeon RX 9070"),
        ("0xff", "", "AMD gfx1201"),
        ("torn", "", "AMD gfx1201"),
        ("0xc0", "what the board says", "what the board says"),
        ("0xc0", "two\nlines", "AMD Radeon RX 9070 XT"),
        ("0xc0", "\x1b[31m red", "AMD Radeon RX 9070 XT"),
    ],
)
def test_a_name_is_the_boards_else_libdrms_for_the_revision_else_the_gfx_target(
    machine: Machine, revision: str, product_name: str, expected: str
) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128, RX9070XT, revision=revision, product_name=product_name)
    table = machine.root / "usr/share/libdrm/amdgpu.ids"
    machine.write(table, "# x\n\n1.0.0\n7550,\tC0,\tAMD Radeon RX 9070 XT\n7550,\tC3,\tAMD Radeon RX 9070\nno,line\n")
    assert SysfsReader(machine.root).read_inventory().gpus[0].product_name == expected


# ---------------------------------------------------------------------------------------------------- old kernels


def test_a_kernel_of_long_ago_is_read_as_far_as_it_speaks(machine: Machine) -> None:
    """No num_xcc, domain, gfx_target_version, unique_id or hive_id; the ASIC's name is what tells the target."""
    vega20 = {
        "simd_count": 240,
        "array_count": 4,
        "simd_arrays_per_engine": 1,
        "cu_per_simd_array": 16,
        "simd_per_cu": 4,
        "location_id": 0x300,
        "drm_render_minor": 128,
    }
    machine.add_pci("0000:03:00.0", device=0x66AF, revision="0xc1", mem_info_vram_total=str(16 * GIB))
    machine.add_render(128, "0000:03:00.0")
    machine.add_node(1, vega20, gpu_id=51234)
    machine.write(machine.topology / "nodes/1/name", "vega20\n")
    inventory = machine.read()
    (gpu,) = inventory.gpus
    assert (gpu.id, gpu.gfx_target, gpu.device_id) == ("pci-0000-03-00.0", "gfx906", 0x66AF)
    assert gpu.partitions[0].layout == CuLayout(1, 4, 1, (15,) * 4, wgp=False, harvest_known=False)
    assert (inventory.unusable, inventory.warnings) == ((), ())


@pytest.mark.parametrize(("simd_per_cu", "wgp"), [(2, True), (4, False)])
def test_a_gpu_that_does_not_say_its_target_has_pairs_if_it_has_two_simds_a_cu(
    machine: Machine, simd_per_cu: int, wgp: bool
) -> None:
    silent = RX9070XT | {"simd_per_cu": simd_per_cu, "gfx_target_version": 0}
    machine.add_gpu("0000:05:00.0", 1, 128, silent)
    machine.write(machine.topology / "nodes/1/name", "ip discovery\n")
    inventory = machine.read()
    assert inventory.partitions[0].layout.wgp is wgp
    assert inventory.warnings == ("KFD node 1 does not say its gfx target",)


def test_a_machines_node_without_gpu_id_is_unusable_as_no_policy_could_name_it(machine: Machine) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128)
    (machine.topology / "nodes/1/gpu_id").unlink()
    assert reasons(machine.read())["KFD node 1"] == "no gpu_id: missing"


# --------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "torn: it has a gpu_id but no simd_count"),
        ("cpu_cores_count 0\nsimd_cou", "torn: it has a gpu_id but no simd_count"),
        (
            "cpu_cores_count 0\nsimd_count 1216\nsimd_per_cu 4\narray_count 3",
            "torn: its properties have no location_id, drm_render_minor, simd_arrays_per_engine",
        ),
        ("\xff\xfe\x00garbage\n" * 40, "torn: it has a gpu_id but no simd_count"),
        ("simd_count -4\n", "torn: it has a gpu_id but no simd_count"),
        ("simd_count 99999999999999999999999999999\n", "torn: it has a gpu_id but no simd_count"),
    ],
)
def test_torn_properties_are_a_reason_and_no_figure(machine: Machine, text: str, reason: str) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128)
    machine.add_gpu("0000:06:00.0", 2, 129, unique_id="ab")
    machine.write(machine.topology / "nodes/1/properties", text)
    inventory = machine.read()
    assert ids(inventory) == ["GPU-00000000000000ab"]
    assert reasons(inventory)["KFD node 1"] == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"drm_render_minor": 0}, "no render node: drm_render_minor is 0"),
        ({"drm_render_minor": 12}, "no render node: drm_render_minor is 12"),
        ({"location_id": 0x10500}, "location_id 66816 of domain 0 is no PCI address"),
        ({"num_xcc": 1}, "torn: 32 engines an XCC and 304 CUs in 32 arrays is no GPU's shape"),
        ({"num_xcc": 7}, "torn: 1216 SIMDs of 4 a CU, 32 arrays of 1 an engine on 7 XCCs do not fit together"),
        ({"num_xcc": 0}, "torn: 1216 SIMDs of 4 a CU, 32 arrays of 1 an engine on 0 XCCs do not fit together"),
        ({"simd_per_cu": 0}, "torn: 1216 SIMDs of 0 a CU, 32 arrays of 1 an engine on 8 XCCs do not fit together"),
        ({"simd_count": 1215}, "torn: 1215 SIMDs of 4 a CU, 32 arrays of 1 an engine on 8 XCCs do not fit together"),
        ({"simd_count": 10**18}, f"torn: 4 engines an XCC and {10**18 // 4} CUs in 32 arrays is no GPU's shape"),
        ({"gfx_target_version": 4711}, "gfx_target_version 4711 is no gfx target"),
    ],
)
def test_impossible_properties_are_a_reason_and_no_figure(
    machine: Machine, change: dict[str, int], reason: str
) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128, MI300X)
    place = {"location_id": 0x500, "drm_render_minor": 128}
    machine.add_node(1, MI300X | place | change, gpu_id=1001)
    assert reason in {u.reason for u in machine.read().unusable}
    assert machine.read().gpus == ()


def test_a_file_cut_in_the_unique_id_is_not_another_gpu(machine: Machine) -> None:
    whole = "".join(f"{key} {value}\n" for key, value in MI300X.items())
    machine.add_gpu("0000:05:00.0", 1, 128)
    cut = f"{whole}location_id 1280\ndrm_render_minor 128\nunique_id 18019"
    machine.write(machine.topology / "nodes/1/properties", cut)
    assert reasons(machine.read())["KFD node 1"] == "torn: its properties end in the middle of the unique_id"


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """End of a path -> errno of reading it: what root in a test cannot get from files."""
    failing: dict[str, int] = {}
    real = sysfs._read

    def read(path: str) -> bytes | OSError:
        number = next((n for end, n in failing.items() if path.endswith(end)), 0)
        return OSError(number, os.strerror(number)) if number else real(path)

    monkeypatch.setattr(sysfs, "_read", read)
    return failing


def test_nodes_that_the_device_cgroup_hides_are_listed_as_such(machine: Machine, errors: dict[str, int]) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128)
    machine.add_gpu("0000:06:00.0", 2, 129, unique_id="ab")
    errors.update({"nodes/1/properties": errno.EPERM, "nodes/1/gpu_id": errno.EPERM})
    inventory = machine.read()
    assert ids(inventory) == ["GPU-00000000000000ab"]
    assert reasons(inventory)["KFD node 1"] == f"its properties cannot be read: {DENIED}"


def test_a_reset_makes_details_unknown_and_not_the_gpu_gone(machine: Machine, errors: dict[str, int]) -> None:
    machine.add_gpu(
        "0000:05:00.0",
        1,
        128,
        unique_id="ab",
        mem_info_vram_total="1",
        mem_info_vram_used="1",
        current_compute_partition="SPX",
        current_memory_partition="NPS1",
    )
    errors.update(
        {
            "mem_info_vram_total": errno.EPERM,
            "mem_info_vram_used": errno.EPERM,
            "current_compute_partition": errno.EBUSY,
            "current_memory_partition": errno.EPERM,
        }
    )
    inventory = machine.read()
    (gpu,) = inventory.gpus
    assert (gpu.compute_partition, gpu.memory_partition, gpu.vram_bytes) == (None, None, 16 * GIB)
    assert inventory.warnings == (
        "0000:05:00.0: current_compute_partition is unknown for now: busy (a reset or a partition switch in progress)",
        f"0000:05:00.0: current_memory_partition is unknown for now: {DENIED}",
    )
    assert SysfsReader(machine.root).vram_used_bytes("0000:05:00.0") is None


def test_a_mode_that_cannot_be_read_for_a_moment_is_what_it_was(machine: Machine, errors: dict[str, int]) -> None:
    """But not that of a GPU which has another count of partitions by now, nor for a file that is gone."""
    modes = {"current_compute_partition": "SPX", "current_memory_partition": "NPS1"}
    machine.add_gpu("0000:05:00.0", 1, 128, unique_id="ab", **modes)  # type: ignore[arg-type]
    reader = SysfsReader(machine.root)
    before = reader.read_inventory()
    errors.update(dict.fromkeys(modes, errno.EBUSY))
    now = reader.read_inventory()
    assert now.gpus == before.gpus
    assert (now.gpus[0].compute_partition, now.gpus[0].memory_partition) == ("SPX", "NPS1")
    assert now.warnings[0] == (
        "0000:05:00.0: current_compute_partition is unknown for now: busy (a reset or a partition switch in progress); "
        "taken for SPX, as it was"
    )
    reader._read_modes = {(address, name, 8): mode for (address, name, _), mode in reader._read_modes.items()}
    assert reader.read_inventory().gpus[0].compute_partition is None
    errors.update(dict.fromkeys(modes, errno.ENOENT))
    assert reader.read_inventory().gpus[0].compute_partition is None


def test_a_unique_id_that_is_denied_makes_no_second_gpu_either(machine: Machine, errors: dict[str, int]) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128, unique_id="ab")
    errors["unique_id"] = errno.EPERM
    assert machine.read().gpus == ()


def test_a_topology_that_changes_under_the_scan_is_read_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128, unique_id="ab")
    said: Iterator[int] = iter([7, 8, 8, 8])
    monkeypatch.setattr(sysfs._Scan, "generation", lambda self: next(said))
    inventory = machine.read()
    assert (inventory.generation_id, inventory.warnings) == (8, ())
    assert list(said) == []


def test_a_topology_that_never_rests_is_said_after_three_scans(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.add_gpu("0000:05:00.0", 1, 128, unique_id="ab")
    said: Iterator[int] = iter(range(100))
    monkeypatch.setattr(sysfs._Scan, "generation", lambda self: next(said))
    inventory = machine.read()
    assert (ids(inventory), inventory.generation_id) == (["GPU-00000000000000ab"], 4)
    assert inventory.warnings == ("the KFD topology changed during each of 3 scans: this picture may mix old and new",)


# Damage at random. Two GPUs: all of it happens to the files of the first, and the second must come out untouched.


def write_pair(root: Path) -> Machine:
    machine = Machine(root)
    machine.add_node(0, CPU, gpu_id=0)
    machine.add_gpu(
        "0000:05:00.0", 1, 128, SMALL, unique_id="a5", current_compute_partition="SPX", mem_info_vram_total="9"
    )
    machine.caches(1, [(p, 16, 9) for p in VECTOR] + [(p, 16, 9) for p in SCALAR])
    machine.write(machine.topology / "nodes/1/io_links/0/properties", "type 2\nnode_to 0\nweight 20\n")
    machine.add_gpu("0000:b6:00.0", 2, 136, MI300X, unique_id="b6")
    return machine


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], Gpu]:
    """A tree to copy, the files of its first GPU, and its second GPU as it must stay."""
    root = tmp_path_factory.mktemp("pair") / "whole"
    inventory = write_pair(root).read()
    assert ids(inventory) == ["GPU-00000000000000a5", "GPU-00000000000000b6"]
    files = [str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() and "nodes/1/" in str(p)]
    files += [str(p.relative_to(root)) for p in (root / "sys/bus/pci/devices/0000:05:00.0").iterdir()]
    return root, sorted(files), inventory.gpus[1]


DAMAGE = st.one_of(
    st.just(("delete", b"")),
    st.just(("folder", b"")),
    st.just(("dangle", b"")),
    st.tuples(st.just("write"), st.binary(max_size=80)),
    st.tuples(st.just("write"), st.sampled_from([b"-1\n", b"0\n", b"9" * 30, b"\x00", b"0x\n", "١٢\n".encode()])),
    st.tuples(st.just("cut"), st.integers(0, 400).map(str).map(str.encode)),
    st.tuples(
        st.just("swap"), st.tuples(st.integers(0, 400), st.integers(0, 255)).map("{0[0]} {0[1]}".format).map(str.encode)
    ),
)


@settings(max_examples=300, database=None)
@given(data=st.data())
def test_no_damage_raises_and_none_spreads_to_another_gpu(
    pair: tuple[Path, list[str], Gpu], data: st.DataObject
) -> None:
    root, files, untouched = pair
    damage = data.draw(st.dictionaries(st.sampled_from(files), DAMAGE, min_size=1, max_size=6))
    before = {name: content_of(root / name) for name in damage}
    try:
        for name, (how, what) in damage.items():
            spoil(root / name, how, what)
        inventory = SysfsReader(root, name_tables=()).read_inventory()
    finally:
        for name, content in before.items():
            mend(root / name, content)

    assert replace(inventory.gpus[-1], index=1) == untouched
    for gpu in inventory.gpus[:-1]:
        assert gpu.pci_address == "0000:05:00.0"
        assert gpu.id == ("GPU-00000000000000a5" if gpu.unique_id == 0xA5 else gpu.id)
        assert all(0 < p.vram_bytes <= 1 << 48 and p.render_minor == 128 for p in gpu.partitions)
    if len(inventory.gpus) == 1:
        assert inventory.unusable
    assert all(u.reason for u in inventory.unusable)


def spoil(path: Path, how: str, what: bytes) -> None:
    before = path.read_bytes() if path.is_file() else b""
    path.unlink()
    match how:
        case "folder":
            path.mkdir()
        case "dangle":
            path.symlink_to("nowhere")
        case "write":
            path.write_bytes(what)
        case "cut":
            path.write_bytes(before[: int(what)])
        case "swap":
            place, byte = map(int, what.split())
            place %= max(1, len(before))
            path.write_bytes(before[:place] + bytes([byte]) + before[place + 1 :])


def content_of(path: Path) -> bytes | Path:
    return path.readlink() if path.is_symlink() else path.read_bytes()


def mend(path: Path, content: bytes | Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    if isinstance(content, Path):
        path.symlink_to(content)
    else:
        path.write_bytes(content)


def test_mending_mends(pair: tuple[Path, list[str], Gpu]) -> None:
    """The random test above repairs its tree after each example, and would prove nothing if it did not."""
    root, files, untouched = pair
    assert SysfsReader(root, name_tables=()).read_inventory().gpus[1] == untouched
    assert all((root / name).is_file() or (root / name).is_symlink() for name in files)
    assert ids(SysfsReader(root, name_tables=()).read_inventory())[0] == "GPU-00000000000000a5"


# --------------------------------------------------------------------------------------------------------- profiles


def a_partitioned_machine(machine: Machine, **files: Any) -> Gpu:
    machine.add_gpu("0000:83:00.0", node=1, minor=128, mem_info_vram_total=str(192 * GIB), **files)
    machine.add_node(1, MI300X, gpu_id=4711, banks=(192 * GIB,), location_id=0x8300, drm_render_minor=128)
    (gpu,) = machine.read().gpus
    return gpu


def test_a_driver_that_describes_the_selected_profile_is_believed_about_it(machine: Machine) -> None:
    device = "sys/bus/pci/devices/0000:83:00.0/compute_partition_config"
    machine.write(f"{device}/supported_xcp_configs", "SPX, DPX, QPX, CPX\n")
    machine.write(f"{device}/xcp_config", "CPX\n")
    machine.write(f"{device}/supported_nps_configs", "NPS1, NPS2\n")
    gpu = a_partitioned_machine(machine, current_compute_partition="SPX", available_memory_partition="NPS1, NPS2, NPS4")
    assert [(p.mode, p.memory_modes) for p in gpu.profiles] == [
        ("SPX", ("NPS1",)),
        ("DPX", ("NPS1", "NPS2")),
        ("QPX", ("NPS1", "NPS4")),
        ("CPX", ("NPS1", "NPS2")),  # of CPX the driver speaks; the others are by the rule
    ]


@pytest.mark.parametrize("available", ["", "SPX", "nonsense, !"])
def test_one_mode_or_none_is_nothing_to_choose_from(machine: Machine, available: str) -> None:
    """A function of a virtual machine shows the mode that its host has chosen."""
    gpu = a_partitioned_machine(machine, current_compute_partition="SPX", available_compute_partition=available)
    assert gpu.profiles == ()
