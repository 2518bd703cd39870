"""Which cgroup gets which cap."""

from __future__ import annotations

from dataclasses import replace

from amdvgpud.core.caps import capped_cgroup, counted_bytes, quotas, wanted_caps
from amdvgpud.core.containers import Container
from amdvgpud.core.model import Book, Compute, Inventory, PartitionId, Request, Slice, SliceName, slice_name
from amdvgpud.core.plan import place
from tests.fakes import GIB, an_inventory

ID = "0123456789abcdef" * 4
ALICE, BOB = SliceName("alice"), SliceName("bob")
SCOPE = f"/machine.slice/libpod-{ID}.scope"
C = Container(ALICE, ID, 7, 70, f"{SCOPE}/container", None, 0.0, reported=True)


def book(**vram_gib: int) -> Book:
    made = Book()
    for name, gib in vram_gib.items():
        gpus = 2 if name == "pair" else 1
        request = Request(slice_name(name), Compute(percent=10), gib * GIB, gpu_count=gpus)
        made = made.with_slice(
            Slice(request.name, request, place(made, an_inventory(), request).shares, created_s=0.0, revision=1)
        )
    return made


def having(containers: list[Container], of: Book, inventory: Inventory | None = None) -> list[Container]:
    """Each with its quotas, if its slice is there."""
    there = inventory or an_inventory()
    return [replace(c, quotas=quotas(of.slices[c.slice], there)) if c.slice in of.slices else c for c in containers]


def test_the_cap_goes_on_the_topmost_cgroup_that_is_the_containers_own() -> None:
    assert capped_cgroup(C) == SCOPE
    assert capped_cgroup(replace(C, cgroup=f"/docker/{ID}")) == f"/docker/{ID}"


def test_a_cgroup_that_is_not_the_containers_own_is_not_capped() -> None:
    for cgroup in (None, "/user.slice/session-1.scope", f"/docker/{'f' * 64}", f"/libpod-conmon-{ID}.scope"):
        assert capped_cgroup(replace(C, cgroup=cgroup)) is None


def test_slices_of_one_container_add_up_on_each_gpu_and_the_allowance_is_given_once() -> None:
    pair, bob = replace(C, slice=SliceName("pair")), replace(C, slice=BOB)
    first, second = (f"drm/{gpu.pci_address}/vram" for gpu in an_inventory().gpus)
    wanted = wanted_caps(having([C, bob, pair], book(alice=8, bob=4, pair=2)), 1000)
    assert wanted == {SCOPE: {first: 14 * GIB + 1000, second: 2 * GIB + 1000}}


def test_a_slice_that_is_told_twice_counts_once_and_one_that_is_gone_not_at_all() -> None:
    region = f"drm/{an_inventory().gpus[0].pci_address}/vram"
    assert wanted_caps(having([C, C, replace(C, slice=BOB)], book(alice=8)), 0) == {SCOPE: {region: 8 * GIB}}


def test_a_gpu_that_is_gone_is_not_capped() -> None:
    assert wanted_caps(having([C], book(alice=8), an_inventory(0)), 0) == {}


def test_what_the_kernel_counts_is_a_slices_where_its_containers_have_only_that_on_the_gpu() -> None:
    made = book(alice=8, bob=4)
    (share,) = made.slices[ALICE].shares
    gpu = an_inventory().gpus[0].id
    other = replace(C, id="f" * 64, cgroup=f"/machine.slice/libpod-{'f' * 64}.scope")
    dmem = {SCOPE: {gpu: 3 * GIB}, str(other.cgroup): {gpu: GIB}}

    def counted(**containers: tuple[Container, ...]) -> int | None:
        return counted_bytes(ALICE, share.partition, {SliceName(n): of for n, of in containers.items()}, made, dmem)

    assert counted(alice=(C,)) == 3 * GIB
    assert counted(alice=(C, other)) == 4 * GIB
    assert counted(alice=(C,), bob=(replace(other, slice=BOB),)) == 3 * GIB


def test_where_it_cannot_be_told_whose_it_is_nothing_is_said() -> None:
    made = book(alice=8, bob=4)
    (share,) = made.slices[ALICE].shares
    dmem = {SCOPE: {an_inventory().gpus[0].id: 3 * GIB}}
    for containers in (
        {},
        {ALICE: (C,), BOB: (replace(C, slice=BOB),)},
        {ALICE: (C,), SliceName("gone"): (replace(C, slice=SliceName("gone")),)},
        {ALICE: (C, replace(C, id="f" * 64, cgroup=f"/docker/{'f' * 64}"))},
        {ALICE: (replace(C, cgroup="/user.slice"),)},
    ):
        assert counted_bytes(ALICE, share.partition, containers, made, dmem) is None
    elsewhere = replace(
        made.slices[BOB], shares=tuple(replace(s, partition=PartitionId("GPU-x/0")) for s in made.slices[BOB].shares)
    )
    both = {ALICE: (C,), BOB: (replace(C, slice=BOB),)}
    assert counted_bytes(ALICE, share.partition, both, made.with_slice(elsewhere), dmem) == 3 * GIB
