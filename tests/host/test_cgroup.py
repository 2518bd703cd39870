"""Caps over a cgroup tree that behaves as the kernel's does. tests/e2e/vm tries the same on the kernel's own."""

from __future__ import annotations

import pytest

from amdvgpud.host.cgroup import DmemCaps, dmem_bytes
from tests.host.dmem_kernel import OTHER, REGION, Kernel

GIB = 2**30
GIB = 2**30
SCOPE = "/machine.slice/libpod-a.scope"


def capped(kernel: Kernel, *, delegate: bool = True) -> tuple[DmemCaps, str]:
    caps = DmemCaps(kernel, delegate=delegate)
    return caps, caps.apply({SCOPE: {REGION: GIB}})[SCOPE]


def test_the_controller_is_switched_on_above_and_each_region_has_a_write_of_its_own() -> None:
    kernel = Kernel()
    assert DmemCaps(kernel).apply({SCOPE: {REGION: GIB, OTHER: 2 * GIB}}) == {SCOPE: ""}
    assert kernel.writes == [
        "/cgroup.subtree_control +dmem",
        "/machine.slice/cgroup.subtree_control +dmem",
        f"{SCOPE}/dmem.max {REGION} {GIB}",
        f"{SCOPE}/dmem.max {OTHER} {2 * GIB}",
    ]


def test_what_is_in_force_is_not_written_again() -> None:
    kernel = Kernel()
    caps, why = capped(kernel)
    kernel.writes.clear()
    assert (why, caps.apply({SCOPE: {REGION: GIB}}), kernel.writes) == ("", {SCOPE: ""}, [])


def test_a_limit_that_a_removed_device_took_along_is_put_back() -> None:
    kernel = Kernel()
    caps, _ = capped(kernel)
    kernel.remove_device(REGION)
    assert "knows no region" in caps.apply({SCOPE: {REGION: GIB}})[SCOPE]
    kernel.regions.add(REGION)
    assert caps.apply({SCOPE: {REGION: GIB}}) == {SCOPE: ""}
    assert kernel.limits == {(SCOPE, REGION): str(GIB)}


def test_a_write_that_did_nothing_is_seen() -> None:
    kernel = Kernel(used={(SCOPE, REGION): 3 * GIB})
    _, why = capped(kernel)
    assert why == (
        f"{SCOPE}/dmem.max: the kernel took {GIB} for {REGION} and left it at max; {3 * GIB} bytes are in use, and a "
        "limit below that does nothing on this kernel"
    )


def test_what_is_not_wanted_any_more_is_lifted_and_what_is_gone_with_its_cgroup_is_no_trouble() -> None:
    kernel = Kernel()
    caps, _ = capped(kernel)
    assert caps.apply({}) == {}
    assert kernel.limits == {(SCOPE, REGION): "max"}
    kernel.writes.clear()
    assert (caps.apply({}), kernel.writes) == ({}, [])
    caps.apply({SCOPE: {REGION: GIB}})
    kernel.gone.add(SCOPE)
    assert caps.apply({}) == {}


def test_a_cgroup_with_processes_keeps_its_cap_though_its_first_one_has_ended() -> None:
    kernel = Kernel()
    caps, _ = capped(kernel)
    kernel.populated.add(SCOPE)
    caps.apply({})
    assert kernel.limits == {(SCOPE, REGION): str(GIB)}
    kernel.populated.clear()
    caps.apply({})
    assert kernel.limits == {(SCOPE, REGION): "max"}


def test_where_no_caps_are_wanted_any_more_nobody_keeps_one() -> None:
    kernel = Kernel(populated={SCOPE})
    caps, _ = capped(kernel)
    caps.lift_all()
    assert kernel.limits == {(SCOPE, REGION): "max"}


def test_a_cap_that_cannot_be_lifted_is_told_of_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Kernel()
    caps, _ = capped(kernel)
    kernel.read_only = True
    for _ in range(3):
        caps.apply({})
    assert len([m for m in caplog.messages if "is not wanted any more, and stays" in m]) == 1
    kernel.read_only = False
    caps.apply({})
    assert kernel.limits == {(SCOPE, REGION): "max"}


@pytest.mark.parametrize(
    ("kernel", "delegate", "why"),
    [
        (Kernel(busy={"/machine.slice"}), True, "/machine.slice has processes of its own"),
        (Kernel(read_only=True), True, "/cgroup.subtree_control cannot be written: the tree is read-only"),
        (Kernel(), False, "/cgroup.subtree_control has no dmem, and dmem.delegate is false"),
        (Kernel(regions={OTHER}), True, f"the kernel knows no region {REGION}"),
        (Kernel(switched_on={"/", "/machine.slice"}, gone={SCOPE}), True, f"{SCOPE}/dmem.max cannot be read"),
    ],
    ids=["processes above", "read-only tree", "not to be delegated", "no region", "gone meanwhile"],
)
def test_why_a_cgroup_is_not_capped_is_said(kernel: Kernel, delegate: bool, why: str) -> None:
    assert capped(kernel, delegate=delegate)[1].startswith(why)


def test_where_others_have_switched_it_on_nothing_is_delegated() -> None:
    assert capped(Kernel(switched_on={"/", "/machine.slice"}), delegate=False)[1] == ""


def test_a_machine_without_the_controller_says_so() -> None:
    assert DmemCaps(Kernel()).lack() is None
    assert "no cgroup v2 tree" in str(DmemCaps(Kernel(controllers="")).lack())
    assert "no dmem controller" in str(DmemCaps(Kernel(controllers="cpu memory")).lack())


def test_what_is_counted_for_a_cgroup_is_told_by_region_and_nothing_where_nobody_counts() -> None:
    kernel = Kernel(used={(SCOPE, REGION): 3 * GIB})
    assert dmem_bytes(kernel, SCOPE) == {}
    kernel.switched_on |= {"/", "/machine.slice"}
    assert dmem_bytes(kernel, SCOPE) == {REGION: 3 * GIB, OTHER: 0}
    kernel.gone.add(SCOPE)
    assert dmem_bytes(kernel, SCOPE) == {}
