"""Discovery on captured trees of real machines, read in place: whole inventories, written out.

The expectations were taken from the files by hand, not from the reader. Captures that are no ``sys/`` tree yet (an
archive; a DRM card and a KFD folder by themselves) are put together in a temporary folder, by extraction or symlink.
"""

from __future__ import annotations

from pathlib import Path

import pytest

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
    Unusable,
)
from amdvgpud.host.sysfs import SysfsReader

pytestmark = pytest.mark.fixtures

MIB = 1024**2
PCIE, XGMI = LinkKind.PCIE, LinkKind.XGMI
NO_KFD = "there is no KFD topology: amdgpu came up without compute (HSA) support"


def card_tree(capture: Path, root: Path) -> Path:
    """``root`` with the capture's DRM card, and its KFD folder if it has one, where sysfs has them."""
    drm = root / "sys/class/drm"
    drm.mkdir(parents=True)
    for card in capture.glob("card*"):
        (drm / card.name).symlink_to(card)
    if (capture / "kfd").is_dir():
        (root / "sys/class/kfd").mkdir()
        (root / "sys/class/kfd/kfd").symlink_to(capture / "kfd")
    return root


def read(root: Path) -> Inventory:
    """Without name tables: what a board is called must not depend on the machine that runs the tests."""
    return SysfsReader(root, name_tables=()).read_inventory()


def xgmi(weight: int, *nodes: int) -> tuple[Link, ...]:
    return tuple(Link(XGMI, node, weight) for node in nodes)


def pcie(weight: int, *nodes: int) -> tuple[Link, ...]:
    return tuple(Link(PCIE, node, weight) for node in nodes)


def board(
    index: int,
    address: str,
    unique_id: int,
    device_id: int,
    gfx_target: str,
    partitions: tuple[Partition, ...],
    numa_node: int,
    hive_id: int,
) -> Gpu:
    """A GPU as a tree without PCI files shows it: no modes, no revision, no product name but the fallback."""
    return Gpu(
        id=GpuId(f"GPU-{unique_id:016x}"),
        index=index,
        pci_address=address,
        unique_id=unique_id,
        smi_uuid=smi_uuid(unique_id, device_id),
        device_id=device_id,
        revision=0,
        product_name=f"AMD {gfx_target}",
        gfx_target=gfx_target,
        vram_bytes=sum(p.vram_bytes for p in partitions),
        partitions=partitions,
        numa_node=numa_node,
        xgmi_hive_id=hive_id,
    )


# ------------------------------------------------------------------------------------------------------------ MI210

MI210 = [
    # PCI address, unique id, NUMA node, hive id: in KFD order, which is neither PCI order nor its reverse
    ("0000:63:00.0", 0x1901EAD3A2ECD4A6, 0, 12609507387757274807),
    ("0000:43:00.0", 0x51276AC12CE05DB3, 0, 12609507387757274807),
    ("0000:03:00.0", 0x93BB3629C01AEA1C, 0, 12609507387757274807),
    ("0000:26:00.0", 0x4344E78B718814CD, 0, 12609507387757274807),
    ("0000:e3:00.0", 0xAEA834AA2723EB57, 1, 18091350218769748594),
    ("0000:c3:00.0", 0xA3781B5A10FCF54A, 1, 18091350218769748594),
    ("0000:83:00.0", 0xF83F06EFB714E6CF, 1, 18091350218769748594),
    ("0000:a3:00.0", 0xC34EC50444DD0A6D, 1, 18091350218769748594),
]


def test_eight_mi210_in_two_hives(captures: Path) -> None:
    """No gpu_id, memory bank, cache or PCI file in this capture: see the reader for what stands in."""
    gpus = []
    for rank, (address, unique_id, numa, hive) in enumerate(MI210):
        node, gpu = 2 + rank, GpuId(f"GPU-{unique_id:016x}")
        own_hive, other_hive = ((2, 3, 4, 5), (6, 7, 8, 9)) if numa == 0 else ((6, 7, 8, 9), (2, 3, 4, 5))
        partition = Partition(
            id=PartitionId(f"{gpu}/0"),
            gpu=gpu,
            index=0,
            kfd_node=node,
            kfd_gpu_id=int(address[5:7], 16) << 8,
            render_minor=128 + rank,
            vram_bytes=65520 * MIB,
            layout=CuLayout(1, 8, 1, (13,) * 8, wgp=False, harvest_known=False),
            gfx_target="gfx90a",
            unique_id=unique_id,
            numa_node=numa,
            links=(
                *pcie(20, numa),
                *xgmi(15, *(n for n in own_hive if n != node)),
                *pcie(52, 1 - numa),
                *pcie(72, *other_hive),
            ),
        )
        gpus.append(board(rank, address, unique_id, 0x740F, "gfx90a", (partition,), numa, hive))
    warnings = tuple(f"{a}: the tree holds no VRAM figure; 65520 MiB a partition is nominal" for a, *_ in MI210)
    assert read(captures / "mi210-8gpu") == Inventory(tuple(gpus), warnings=warnings)


# ------------------------------------------------------------------------------------------------- MI300X and MI308X

MI300X = [
    # PCI address, unique id (all partitions print their board's), partitions, NUMA node
    ("0000:05:00.0", 16404946649897475633, 8, 0),
    ("0000:27:00.0", 2472748907779728154, 8, 0),
    ("0000:47:00.0", 15565237874008425757, 8, 0),
    ("0000:65:00.0", 12035684874187068538, 8, 0),
    ("0000:85:00.0", 15304831566906821053, 8, 1),
    ("0000:a7:00.0", 13644590235195043050, 8, 1),
    ("0000:c7:00.0", 13326531576914550249, 8, 1),
    ("0000:e5:00.0", 15931900197903628278, 7, 1),
]


def test_eight_mi300x_in_cpx_are_sixty_three_partitions(unpacked: Path) -> None:
    """The eighth board has seven: its last found no DRM minor left. No gpu_id, memory bank, cache or PCI file here."""
    nodes = iter(range(2, 65))
    gpus = []
    for rank, (address, unique_id, count, numa) in enumerate(MI300X):
        gpu = GpuId(f"GPU-{unique_id:016x}")
        mine = [next(nodes) for _ in range(count)]
        partitions = tuple(
            Partition(
                id=PartitionId(f"{gpu}/{index}"),
                gpu=gpu,
                index=index,
                kfd_node=node,
                kfd_gpu_id=(int(address[5:7], 16) << 8) + index,
                render_minor=126 + node,
                vram_bytes=24574 * MIB,
                layout=CuLayout(1, 4, 1, (10, 10, 9, 9), wgp=False, harvest_known=False),
                gfx_target="gfx942",
                unique_id=unique_id,
                numa_node=numa,
                links=(
                    *pcie(20, numa),
                    *(Link(XGMI, peer, 13 if peer in mine else 41) for peer in range(2, 65) if peer != node),
                ),
            )
            for index, node in enumerate(mine)
        )
        gpus.append(board(rank, address, unique_id, 0x74A1, "gfx942", partitions, numa, 15188982192727901047))
    warnings = tuple(f"{a}: the tree holds no VRAM figure; 24574 MiB a partition is nominal" for a, *_ in MI300X)
    inventory = read(unpacked / "mi300x-8gpu-cpx")
    assert inventory == Inventory(tuple(gpus), generation_id=80, warnings=warnings)
    assert len(inventory.partitions) == 63


MI308X = [
    # PCI address, unique id, gpu_ids by partition, first render minor, NUMA node
    ("0000:0a:00.0", 598046273873802902, (24248, 41657, 59065, 2236), 128, 0),
    ("0000:80:00.0", 11803749423592941193, (22879, 42334, 57694, 3931), 136, 0),
    ("0000:a4:00.0", 10187445671099294242, (16964, 48709, 64069, 5184), 144, 0),
    ("0000:c8:00.0", 9604994527082705072, (28521, 37736, 55144, 14701), 152, 0),
    ("0001:0b:00.0", 17466021589395472075, (23332, 42789, 58149, 3360), 160, 1),
    ("0001:81:00.0", 1044926823201815193, (23747, 41154, 58562, 2759), 168, 1),
    ("0001:a5:00.0", 13372828617950681944, (18392, 48089, 65497, 4572), 176, 1),
    ("0001:c9:00.0", 6576958293045616595, (27381, 38644, 54004, 15601), 184, 1),
]


def test_eight_mi308x_in_cpx_over_two_pci_domains(unpacked: Path) -> None:
    """With gpu_ids, memory banks and caches. A fourth of 192 GiB each, but 16 MiB less in each board's last one."""
    gpus = []
    for rank, (address, unique_id, gpu_ids, minor, numa) in enumerate(MI308X):
        gpu = GpuId(f"GPU-{unique_id:016x}")
        mine = range(2 + 4 * rank, 6 + 4 * rank)
        partitions = tuple(
            Partition(
                id=PartitionId(f"{gpu}/{index}"),
                gpu=gpu,
                index=index,
                kfd_node=node,
                kfd_gpu_id=gpu_ids[index],
                render_minor=minor + index,
                vram_bytes=(49152 if index < 3 else 49136) * MIB,
                layout=CuLayout(1, 4, 1, (5, 5, 5, 5), wgp=False),
                gfx_target="gfx942",
                unique_id=unique_id,
                numa_node=numa,
                links=(
                    *pcie(20, numa),
                    *(Link(XGMI, peer, 13 if peer in mine else 41) for peer in range(2, 34) if peer != node),
                    *pcie(41, 1 - numa),
                ),
            )
            for index, node in enumerate(mine)
        )
        gpus.append(board(rank, address, unique_id, 0x74A2, "gfx942", partitions, numa, 2095653680343411291))
    assert read(unpacked / "mi308x-8gpu-cpx") == Inventory(tuple(gpus), generation_id=33)


# --------------------------------------------------------------------------------------------------------- one card


def test_the_phoenix_apu(captures: Path, tmp_path: Path) -> None:
    """A unique_id file that is empty; a NUMA node of -1; a KFD that offers more memory than the carve-out."""
    gpu = GpuId("pci-0000-64-00.0")
    partition = Partition(
        id=PartitionId("pci-0000-64-00.0/0"),
        gpu=gpu,
        index=0,
        kfd_node=1,
        kfd_gpu_id=35218,
        render_minor=128,
        vram_bytes=31433977856,
        layout=CuLayout(1, 1, 2, (6, 6), wgp=True),
        gfx_target="gfx1103",
        unique_id=0,
        links=pcie(20, 0),
    )
    apu = Gpu(
        id=gpu,
        index=0,
        pci_address="0000:64:00.0",
        unique_id=0,
        smi_uuid=None,
        device_id=0x15BF,
        revision=0xDD,
        product_name="AMD gfx1103",
        gfx_target="gfx1103",
        vram_bytes=4096 * MIB,
        partitions=(partition,),
    )
    root = card_tree(captures / "lact-phoenix", tmp_path)
    assert read(root) == Inventory((apu,), generation_id=2)

    table = tmp_path / "amdgpu.ids"
    table.write_text("# a comment\n1.0.0\n15BF,\tC1,\tanother revision\n15BF,\tDD,\ta name, with a comma\n")
    (named,) = SysfsReader(root, name_tables=[tmp_path / "absent", table]).read_inventory().gpus
    assert named.product_name == "a name, with a comma"
    used = SysfsReader(root).vram_used_bytes("0000:64:00.0")
    assert used == int((captures / "lact-phoenix/card1/device/mem_info_vram_used").read_text())


def test_the_vangogh_apu(captures: Path, tmp_path: Path) -> None:
    """Its vector and scalar caches have one size: only their order tells which are which. No CPU node, few files."""
    gpu = GpuId("pci-0000-04-00.0")
    partition = Partition(
        id=PartitionId("pci-0000-04-00.0/0"),
        gpu=gpu,
        index=0,
        kfd_node=1,
        kfd_gpu_id=8784,
        render_minor=128,
        vram_bytes=8 << 30,
        layout=CuLayout(1, 1, 1, (8,), wgp=True),
        gfx_target="gfx1033",
        unique_id=0,
        links=pcie(20, 0),
    )
    apu = Gpu(
        id=gpu,
        index=0,
        pci_address="0000:04:00.0",
        unique_id=0,
        smi_uuid=None,
        device_id=0x163F,
        revision=0,
        product_name="AMD gfx1033",
        gfx_target="gfx1033",
        vram_bytes=8 << 30,
        partitions=(partition,),
    )
    assert read(card_tree(captures / "lact-vangogh", tmp_path)) == Inventory((apu,), generation_id=2)


@pytest.mark.parametrize(
    ("capture", "address", "device"),
    [
        ("lact-r7-240", "0000:01:00.0", "0x6617"),
        ("lact-r9-280", "0000:01:00.0", "0x679a"),
        ("lact-rx5500xt", "0000:04:00.0", "0x7340"),
        ("lact-rx5700xt", "0000:28:00.0", "0x731f"),
        ("lact-rx580", "0000:09:00.0", "0x67df"),
        ("lact-rx6600", "0000:12:00.0", "0x73ff"),
        ("lact-rx6600xt", "0000:0b:00.0", "0x73ff"),
        ("lact-rx6900xt", "0000:0c:00.0", "0x73bf"),
        ("lact-rx7600s", "0000:03:00.0", "0x7480"),
        ("lact-rx7700s", "0000:03:00.0", "0x7480"),
        ("lact-rx7800xt", "0000:03:00.0", "0x747e"),
        ("lact-rx7900xtx", "0000:03:00.0", "0x744c"),
        ("lact-rx9070", "0000:03:00.0", "0x7550"),
        ("lact-rx9070xt", "0000:0f:00.0", "0x7550"),
        ("lact-vega56", "0000:0b:00.0", "0x687f"),
    ],
)
def test_a_card_without_a_kfd_is_listed_with_that_reason(
    captures: Path, tmp_path: Path, capture: str, address: str, device: str
) -> None:
    """Display captures. Several lack vendor-given files (device, class, revision): the uevent file has the rest."""
    root = card_tree(captures / capture, tmp_path)
    assert read(root) == Inventory(unusable=(Unusable(address, f"AMD device {device}", NO_KFD),))


def test_another_projects_capture_of_a_vega_56(captures: Path) -> None:
    expected = (Unusable("0000:09:00.0", "AMD device 0x687f", NO_KFD),)
    assert read(captures / "vega56-drm-procfs") == Inventory(unusable=expected)


def test_nodes_with_a_render_minor_but_no_simd_are_no_gpus(captures: Path) -> None:
    """A hand-made tree of another project's tests, with lines that end in carriage return and line feed."""
    reason = "it names a render node or a gfx target but has no SIMD: not a GPU that can compute"
    expected = tuple(Unusable(None, f"KFD node {n}", reason) for n in range(3))
    assert read(captures / "container-toolkit-minimal") == Inventory(unusable=expected)


def test_a_capture_of_something_else_is_an_empty_machine(captures: Path) -> None:
    assert read(captures / "debugfs-amdgpu-firmware-info") == Inventory()


def test_every_capture_is_covered_here(captures: Path) -> None:
    """A capture that is added must get its expectation."""
    known = Path(__file__).read_text("utf-8")
    missing = [folder.name for folder in captures.iterdir() if folder.is_dir() and f'"{folder.name}' not in known]
    missing = [name for name in missing if f"/{name}" not in known and f'/ "{name}' not in known]
    assert missing == []
