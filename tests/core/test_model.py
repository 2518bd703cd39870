from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amdvgpud.core.errors import Invalid
from amdvgpud.core.model import (
    Book,
    Compute,
    ComputePolicy,
    CuLayout,
    CuSet,
    Gpu,
    GpuId,
    GpuUsage,
    Holder,
    Inventory,
    Lease,
    LeaseId,
    Partition,
    PartitionId,
    Request,
    Slice,
    SliceName,
    Usage,
    slice_name,
)

LAYOUT = CuLayout(1, 2, 1, (4, 4), wgp=False)


def partition(gpu: str, index: int, node: int) -> Partition:
    return Partition(
        id=PartitionId(f"{gpu}/{index}"),
        gpu=GpuId(gpu),
        index=index,
        kfd_node=node,
        kfd_gpu_id=1000 + node,
        render_minor=127 + node,
        vram_bytes=1 << 30,
        layout=LAYOUT,
        gfx_target="gfx942",
        unique_id=1,
    )


def gpu(name: str, *partitions: Partition) -> Gpu:
    return Gpu(
        id=GpuId(name),
        index=0,
        pci_address="0000:83:00.0",
        unique_id=1,
        smi_uuid=None,
        device_id=0x74A1,
        revision=0,
        product_name="a GPU",
        gfx_target="gfx942",
        vram_bytes=1 << 30,
        partitions=partitions,
    )


def request(name: str = "a") -> Request:
    return Request(SliceName(name), Compute(percent=25.0))


def a_slice(name: str) -> Slice:
    return Slice(SliceName(name), request(name), (), created_s=1.0, revision=1)


def a_lease(lease_id: str, name: str) -> Lease:
    return Lease(LeaseId(lease_id), SliceName(name), Holder("somebody"), 1.0, None, ephemeral=False)


# -------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["a", "0", "alice", "a.b-c", "a" * 63, "9-9"])
def test_a_slice_name_is_kept(name: str) -> None:
    assert slice_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "A", "a" * 64, "-a", "a-", ".a", "a.", "a..b", "a/b", "a b", "a\n", "ä", "a_b", ".", ".."]
)
def test_a_slice_name_that_could_harm_a_path_or_a_label_is_refused(name: str) -> None:
    with pytest.raises(Invalid) as refusal:
        slice_name(name, "/slice")
    assert [field.pointer for field in refusal.value.fields] == ["/slice"]


# ------------------------------------------------------------------------------------------------------ compute units


@pytest.mark.parametrize("bits", [(), (1, 1), (2, 1), (-1,), (-1, 0)])
def test_a_set_of_cus_that_could_not_be_meant_cannot_be_held(bits: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="CU"):
        CuSet(bits)


@given(st.sets(st.integers(0, 1023), min_size=1))
def test_a_set_of_cus_and_its_mask_say_the_same(bits: set[int]) -> None:
    cus = CuSet(tuple(sorted(bits)))
    assert CuSet.from_mask(cus.mask) == cus
    assert (len(cus), list(cus)) == (len(bits), sorted(bits))
    assert cus.mask == sum(2**bit for bit in bits)


def test_no_mask_is_no_set() -> None:
    with pytest.raises(ValueError, match="at least one CU"):
        CuSet.from_mask(0)


@pytest.mark.parametrize(
    ("xccs", "engines", "arrays", "active"),
    [(1, 2, 1, (4,)), (0, 2, 1, ()), (1, 2, 1, (4, -1)), (1, 2, 1, (0, 0)), (1, 1, 0, ())],
)
def test_a_layout_that_does_not_add_up_cannot_be_held(
    xccs: int, engines: int, arrays: int, active: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"arrays do not fill|at least one active CU"):
        CuLayout(xccs, engines, arrays, active, wgp=False)


# ------------------------------------------------------------------------------------------------------------ request


@pytest.mark.parametrize(
    ("policy", "percent", "cu_count"),
    [
        (ComputePolicy.BALANCED, None, None),
        (ComputePolicy.BALANCED, 25.0, 38),
        (ComputePolicy.BALANCED, 0.0, None),
        (ComputePolicy.BALANCED, 100.5, None),
        (ComputePolicy.BALANCED, float("nan"), None),
        (ComputePolicy.BALANCED, float("inf"), None),
        (ComputePolicy.FINE, None, 0),
        (ComputePolicy.FINE, None, 1025),
        (ComputePolicy.EXACT, 25.0, None),
        (ComputePolicy.WHOLE, 100.0, None),
        (ComputePolicy.WHOLE, None, 304),
    ],
)
def test_an_amount_of_compute_that_makes_no_sense_is_refused(
    policy: ComputePolicy, percent: float | None, cu_count: int | None
) -> None:
    with pytest.raises(Invalid) as refusal:
        Compute(policy, percent, cu_count)
    assert [field.pointer for field in refusal.value.fields] == ["/compute"]


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"gpu_count": 0}, "/gpu_count"),
        ({"gpu_count": 17}, "/gpu_count"),
        ({"vram_bytes": 0}, "/vram"),
        ({"gpu_count": 2, "on": ("0",)}, "/on"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(changes: dict[str, object], pointer: str) -> None:
    with pytest.raises(Invalid) as refusal:
        replace(request(), **changes)  # type: ignore[arg-type]
    assert [field.pointer for field in refusal.value.fields] == [pointer]


# ---------------------------------------------------------------------------------------------------------- inventory


def test_partitions_come_in_kfd_order_whatever_gpu_they_are_of() -> None:
    late, early, middle = partition("pci-a", 0, 3), partition("pci-b", 0, 1), partition("pci-a", 1, 2)
    inventory = Inventory((gpu("pci-a", late, middle), gpu("pci-b", early)))
    assert inventory.partitions == (early, middle, late)
    assert inventory.partition(PartitionId("pci-a/1")) == middle
    assert inventory.partition(PartitionId("pci-a/7")) is None
    assert inventory.gpu(GpuId("pci-b")) == inventory.gpus[1]
    assert inventory.gpu(GpuId("pci-c")) is None
    assert inventory.gpus[0].cu_count == 16


def test_two_partitions_of_one_id_cannot_be_held() -> None:
    one = partition("pci-a", 0, 1)
    with pytest.raises(ValueError, match="two partitions share an id"):
        Inventory((gpu("pci-a", one), gpu("pci-a", one)))


def test_a_gpu_without_a_partition_cannot_be_held() -> None:
    with pytest.raises(ValueError, match="has no partition"):
        gpu("pci-a")


# --------------------------------------------------------------------------------------------------------------- book


def test_each_change_makes_another_book_one_revision_on() -> None:
    empty = Book()
    one = empty.with_slice(a_slice("a"))
    two = one.with_lease(a_lease("l", "a"))
    assert (empty, empty.revision) == (Book(), 0)
    assert (one.revision, dict(one.slices), dict(one.leases)) == (1, {"a": a_slice("a")}, {})
    assert (two.revision, dict(two.slices), dict(two.leases)) == (2, {"a": a_slice("a")}, {"l": a_lease("l", "a")})
    assert two.lease_of(SliceName("a")) == a_lease("l", "a")
    assert two.lease_of(SliceName("b")) is None
    assert two.without_lease(LeaseId("l")) == replace(one, revision=3)


def test_a_slice_takes_its_lease_with_it() -> None:
    book = Book().with_slice(a_slice("a")).with_slice(a_slice("b"))
    book = book.with_lease(a_lease("la", "a")).with_lease(a_lease("lb", "b")).without_slice(SliceName("a"))
    assert (list(book.slices), list(book.leases)) == (["b"], ["lb"])


def test_what_an_operator_set_outlives_other_changes() -> None:
    book = Book().with_cordoned([GpuId("g")]).with_oversubscription({GpuId("g"): 1.5}).with_slice(a_slice("a"))
    assert (book.cordoned, dict(book.oversubscription), book.revision) == (frozenset({"g"}), {"g": 1.5}, 3)


def test_a_book_cannot_be_changed() -> None:
    book = Book().with_slice(a_slice("a"))
    assert isinstance(book.slices, MappingProxyType)
    with pytest.raises(TypeError):
        book.slices[SliceName("b")] = a_slice("b")  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        book.revision = 7  # type: ignore[misc]


def test_a_holder_process_is_a_pid_with_its_start_time() -> None:
    assert Holder("x", 17, 4711).pid == 17
    for pid, start in ((17, None), (None, 4711)):
        with pytest.raises(ValueError, match="a pid together with its start time"):
            Holder("x", pid, start)


def test_usage_of_a_gpu_that_the_ledger_does_not_know_is_nothing() -> None:
    usage = Usage(SliceName("a"), (GpuUsage(7, 100, 200, 0, 0, 1, 0),))
    assert (usage.used_bytes(7), usage.used_bytes(8)) == (100, 0)
