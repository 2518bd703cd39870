from __future__ import annotations

from dataclasses import replace

import pytest

from amdvgpud.core.errors import Invalid, NotFound
from amdvgpud.core.identify import canonical, forms, resolve, smi_uuid
from amdvgpud.core.model import CuLayout, Gpu, GpuId, Inventory, Partition, PartitionId

GIB = 1024**3


def a_gpu(
    index: int,
    unique_id: int,
    address: str,
    *,
    device_id: int = 0x74A1,
    partitions: int = 1,
    node_ids: tuple[int, ...] = (),
) -> Gpu:
    """``node_ids``: what the KFD nodes print, where each partition has an id of its own."""
    gpu = GpuId(f"GPU-{unique_id:016x}" if unique_id else f"pci-{address.replace(':', '-')}")
    return Gpu(
        gpu,
        index,
        address,
        unique_id,
        smi_uuid(unique_id, device_id) if unique_id else None,
        device_id,
        0,
        "a GPU",
        "gfx942",
        partitions * GIB,
        tuple(
            Partition(
                PartitionId(f"{gpu}/{n}"),
                gpu,
                n,
                kfd_node=index * 8 + n + 2,
                kfd_gpu_id=index * 8 + n + 1000,
                render_minor=128 + index * 8 + n,
                vram_bytes=GIB,
                layout=CuLayout(1, 4, 1, (10, 10, 9, 9), wgp=False),
                gfx_target="gfx942",
                unique_id=node_ids[n] if node_ids else unique_id,
            )
            for n in range(partitions)
        ),
    )


IGPU = a_gpu(0, 0, "0000:0b:00.0", device_id=0x164E)
WHOLE = a_gpu(1, 0xAF54E92B0A5D57C8, "0000:05:00.0")
CUT = a_gpu(2, 0xAF5BCE698DE95724, "0001:26:00.0", partitions=4)
NODE = Inventory((IGPU, WHOLE, CUT))


@pytest.mark.parametrize(
    ("unique_id", "device_id", "uuid"),
    [
        # MI300X: ASIC_SERIAL 0xAF54E92B0A5D57C8 of `amd-smi static` and the UUID of `amd-smi list`, ROCm documentation.
        (0xAF54E92B0A5D57C8, 0x74A1, "afff74a1-0000-1000-8054-e92b0a5d57c8"),
        # MI210: GPU-de8287300da37c72 and its UUID, as one program printed both.
        (0xDE8287300DA37C72, 0x740F, "deff740f-0000-1000-8082-87300da37c72"),
        # MI300X virtual functions: GPU-6104e2a75685060a and its UUID; the example of HAMi's device plugin.
        (0x6104E2A75685060A, 0x74B5, "61ff74b5-0000-1000-8004-e2a75685060a"),
        (0x8E1BB56457ADDD1B, 0x74B5, "8eff74b5-0000-1000-801b-b56457addd1b"),
        # The vector of AMD SMI's own unit test, but for its function byte.
        (0xDEADBEEF, 0x1234, "00ff1234-0000-1000-8000-0000deadbeef"),
        (2**64 - 1, 0xFFFF, "ffffffff-0000-1000-80ff-ffffffffffff"),
    ],
)
def test_the_smi_uuid_is_the_one_that_amd_smi_prints(unique_id: int, device_id: int, uuid: str) -> None:
    assert smi_uuid(unique_id, device_id) == uuid


def test_all_forms_stand_side_by_side_and_a_gpu_without_unique_id_has_fewer() -> None:
    assert forms(WHOLE) == (
        "GPU-af54e92b0a5d57c8",
        "0xaf54e92b0a5d57c8",
        "0000:05:00.0",
        "1",
        "afff74a1-0000-1000-8054-e92b0a5d57c8",
    )
    assert forms(IGPU) == ("pci-0000-0b-00.0", "0000:0b:00.0", "0")


def test_a_gpu_that_goes_by_its_address_because_its_unique_id_is_shared_has_no_hex_forms() -> None:
    twin = replace(a_gpu(0, 0, "0000:05:00.0"), unique_id=0)
    assert forms(twin) == ("pci-0000-05-00.0", "0000:05:00.0", "0")


@pytest.mark.parametrize("gpu", NODE.gpus, ids=lambda g: str(g.id))
@pytest.mark.parametrize("case", [str.lower, str.upper, str.swapcase, lambda t: f"  {t} "])
def test_every_form_means_the_same_gpu_in_any_letter_case(gpu: Gpu, case: object) -> None:
    assert callable(case)
    for form in forms(gpu):
        assert resolve(NODE, case(form)) == gpu.partitions, form
        last = gpu.partitions[-1]
        assert resolve(NODE, case(f"{form}/{last.index}")) == (last,), form


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("05:00.0", WHOLE.partitions),
        ("GPU-af54", WHOLE.partitions),
        ("0xAF5B", CUT.partitions),
        ("af0074a1-0000-1000-8054-e92b0a5d57c8", WHOLE.partitions),
        ("af0374a1-0000-1000-805b-ce698de95724", (CUT.partitions[3],)),
        ("afff74a1-0000-1000-805b-ce698de95724/2", (CUT.partitions[2],)),
    ],
)
def test_short_and_later_spellings_resolve_too(text: str, expected: tuple[Partition, ...]) -> None:
    assert resolve(NODE, text) == expected


def test_an_ambiguous_prefix_is_refused_with_what_it_could_mean() -> None:
    with pytest.raises(Invalid) as refusal:
        resolve(NODE, "GPU-AF5")
    assert str(refusal.value) == (
        "'GPU-AF5' could mean any of GPU-af54e92b0a5d57c8, GPU-af5bce698de95724: write more of it"
    )


def test_an_unknown_name_is_answered_with_all_that_are_valid() -> None:
    with pytest.raises(NotFound) as refusal:
        resolve(NODE, "card0")
    assert str(refusal.value) == (
        "'card0' names no GPU of this node; valid are: "
        "pci-0000-0b-00.0 = 0000:0b:00.0 = 0; "
        "GPU-af54e92b0a5d57c8 = 0xaf54e92b0a5d57c8 = 0000:05:00.0 = 1 = afff74a1-0000-1000-8054-e92b0a5d57c8; "
        "GPU-af5bce698de95724 = 0xaf5bce698de95724 = 0001:26:00.0 = 2 = afff74a1-0000-1000-805b-ce698de95724"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "/0",
        "3",
        "-1",
        "01",
        "GPU-",
        "0x",
        "0",  # not on this node: see below
        "GPU-00",
        "0xffffffffffffffffff",
        "26:00.0",
        "0000:05:00.1",
        "afff74a2-0000-1000-8054-e92b0a5d57c8",
        "af0474a1-0000-1000-805b-ce698de95724",
        "ＧＰＵ-af54e92b0a5d57c8",
        "١",
    ],
)
def test_a_name_that_is_nearly_one_is_not_found(text: str) -> None:
    node = replace(NODE, gpus=(WHOLE, CUT))
    with pytest.raises(NotFound):
        resolve(node, text)


@pytest.mark.parametrize("number", ["4", "-1", "", "00", "0/0", "x"])
def test_a_partition_that_is_not_there_is_answered_with_those_that_are(number: str) -> None:
    with pytest.raises(NotFound) as refusal:
        resolve(NODE, f"2/{number}")
    assert str(refusal.value) == (
        f"'2/{number}': there is no partition {number!r} of it; it has GPU-af5bce698de95724/0, "
        "GPU-af5bce698de95724/1, GPU-af5bce698de95724/2, GPU-af5bce698de95724/3"
    )


def test_an_empty_node_says_that_it_is_empty() -> None:
    with pytest.raises(NotFound, match="this node has none that can be used"):
        resolve(Inventory(), "0")


def test_the_id_of_one_kfd_node_names_its_partition_and_the_boards_id_all_of_them() -> None:
    """FR-01 and FR-02 together: newer drivers give each partition of a GPU an id of its own."""
    gpu = a_gpu(0, 0x1111, "0000:05:00.0", partitions=3, node_ids=(0xA1, 0xA2, 0xA3))
    node = Inventory((gpu,))
    assert resolve(node, "GPU-0000000000001111") == gpu.partitions
    assert resolve(node, "GPU-00000000000000A2") == (gpu.partitions[1],)


def test_an_id_that_nodes_of_two_gpus_print_is_refused() -> None:
    """Two boards with one unique id go by their addresses (FR-03); their shared id means neither."""
    twins = tuple(
        replace(g, partitions=tuple(replace(p, unique_id=0x77) for p in g.partitions))
        for g in (a_gpu(0, 0, "0000:05:00.0"), a_gpu(1, 0, "0000:06:00.0"))
    )
    with pytest.raises(Invalid) as refusal:
        resolve(Inventory(twins), "0x0000000000000077")
    assert str(refusal.value) == (
        "'0x0000000000000077' could mean any of pci-0000-05-00.0, pci-0000-06-00.0: write more of it"
    )


def test_two_gpus_without_unique_id_never_share_a_name() -> None:
    """FR-03."""
    node = Inventory((IGPU, a_gpu(1, 0, "0000:0c:00.0", device_id=0x164E)))
    assert not set(forms(node.gpus[0])) & set(forms(node.gpus[1]))
    assert resolve(node, "PCI-0000-0C-00.0") == node.gpus[1].partitions


@pytest.mark.parametrize(
    ("text", "lasting"),
    [
        ("1", WHOLE.id),
        ("05:00.0", WHOLE.id),
        ("1/0", WHOLE.partitions[0].id),
        ("2", CUT.id),
        ("GPU-AF5B/3", CUT.partitions[3].id),
        (str(CUT.id), CUT.id),
        ("0", IGPU.id),
    ],
)
def test_the_lasting_id_of_a_name_is_that_of_the_gpu_or_of_the_partition_it_means(text: str, lasting: str) -> None:
    assert canonical(NODE, text) == lasting


def test_the_lasting_id_of_a_kfd_nodes_own_id_is_its_partitions() -> None:
    cut = a_gpu(0, 0x11, "0000:05:00.0", partitions=2, node_ids=(0x11, 0x12))
    assert canonical(Inventory((cut,)), "0x0000000000000012") == f"{cut.id}/1"
