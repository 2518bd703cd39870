"""Render nodes: VRAM that Vulkan and OpenGL take, and what SMI tools are told.

The nodes are real device numbers without a driver behind them; the stub answers for one.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from amdvgpud._abi import ffi
from amdvgpud.core.model import CuSet

if TYPE_CHECKING:
    from tests.shim.conftest import Machine

MIB = 1 << 20
VRAM_USAGE, VRAM_GTT, VIS_VRAM_USAGE, MEMORY = 0x10, 0x14, 0x17, 0x19
pytestmark = pytest.mark.root


def node(machine: Machine, minor: int = 128) -> Path:
    path = machine.root / f"renderD{minor}"
    if not path.exists():
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(226, minor))
    return path


def openings(machine: Machine, **numbers: int) -> str:
    """The library that finds the kernel's number of the opening behind descriptor ``fd50`` and so on in a file."""
    place = machine.built.gate_fdinfo.with_name("fdinfo")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name, number in numbers.items():
        (place / name[2:]).write_text(f"pos:\t0\nflags:\t02\ndrm-driver:\tamdgpu\ndrm-client-id:\t{number}\n")
    return f"{machine.built.gate_fdinfo} {machine.built.stub}"


def test_gem_memory_is_charged_with_the_kfds_in_whole_pages_and_refused_over_quota(machine: Machine) -> None:
    a = machine.slice("a", (0, 1024, None))
    words = [
        f"node:50:{node(machine)}",
        f"gem:50:{600 * MIB + 1}",
        f"alloc:1000:{400 * MIB}",
        f"gem:50:{100 * MIB}",
        "gemclose:50:1",
        f"gem:50:{100 * MIB}",
        "avail:1000",
    ]
    assert machine.play(*words) == ["ok", "ok 1", "ok", "ENOMEM", "ok", "ok 2", f"ok {524 * MIB}"]
    assert [r for r in machine.requests() if r.startswith("GEM")] == [
        f"GEM_CREATE fd=50 bytes={600 * MIB + 1} domains=4 -> 0",
        "GEM_CLOSE fd=50 handle=1 -> 0",
        f"GEM_CREATE fd=50 bytes={100 * MIB} domains=4 -> 0",
    ]
    assert machine.used(a) == 500 * MIB


def test_what_may_lie_in_host_memory_goes_there_when_the_quota_is_used_up(machine: Machine) -> None:
    a = machine.slice("a", (0, 100, None))
    words = [f"node:50:{node(machine)}", f"gem:50:{200 * MIB}:6", f"gem:50:{200 * MIB}:2", "gemclose:50:1"]
    assert machine.play(*words) == ["ok", "ok 1", "ok 2", "ok"]
    assert [r.split("domains=")[1] for r in machine.requests() if "domains" in r] == ["2 -> 0", "2 -> 0"]
    assert machine.used(a) == 0


def test_a_charge_goes_when_the_driver_refuses_and_stays_when_it_refuses_to_close(machine: Machine) -> None:
    machine.slice("a", (0, 1024, None))
    words = [f"node:50:{node(machine)}", f"gem:50:{MIB}", "avail:1000"]
    assert machine.play(*words, STUB_REFUSE="GEM_CREATE:12") == ["ok", "ENOMEM", f"ok {1024 * MIB}"]
    words = [*words[:2], "gemclose:50:1", "avail:1000"]
    assert machine.play(*words, STUB_REFUSE="GEM_CLOSE:22") == ["ok", "ok 1", "EINVAL", f"ok {1023 * MIB}"]


def test_the_same_handle_in_two_openings_is_two_handles_and_a_dup_is_the_same_opening(machine: Machine) -> None:
    machine.slice("a", (0, 1024, None))
    preload = openings(machine, fd50=7, fd51=7, fd52=8)
    words = [
        f"node:50:{node(machine)}",
        "dup:50:51",
        f"node:52:{node(machine)}",
        f"gem:50:{100 * MIB}",
        "gemclose:52:1",  # nobody's handle in that opening
        "avail:1000",
        "gemclose:51:1",
        "avail:1000",
    ]
    answers = machine.play(*words, LD_PRELOAD=preload)
    assert answers[3:] == ["ok 1", "ok", f"ok {924 * MIB}", "ok", f"ok {1024 * MIB}"]


def test_memory_of_a_file_that_was_closed_comes_back_when_it_is_needed(machine: Machine) -> None:
    machine.slice("a", (0, 1024, None))
    preload = openings(machine, fd50=7, fd51=7)
    words = [
        f"node:50:{node(machine)}",
        "dup:50:51",
        f"gem:50:{1000 * MIB}",
        "close:50",
        f"alloc:1000:{500 * MIB}",  # the dup still holds it
        "close:51",
        f"alloc:1000:{500 * MIB}",
        "avail:1000",
    ]
    assert machine.play(*words, LD_PRELOAD=preload)[2:] == ["ok 1", "ok", "ENOMEM", "ok", "ok", f"ok {524 * MIB}"]


def test_another_opening_under_a_closed_ones_descriptor_is_told_apart(machine: Machine) -> None:
    machine.slice("a", (0, 1024, None))
    preload = openings(machine, fd50=7)
    fdinfo = machine.built.gate_fdinfo.with_name("fdinfo") / "50"
    words = [
        f"node:50:{node(machine)}",
        f"gem:50:{1000 * MIB}",
        "close:50",
        f"put:{fdinfo}:drm-client-id:8",
        f"node:50:{node(machine)}",
        "gemclose:50:1",  # a handle 1 of the new opening, an import say
        f"gem:50:{900 * MIB}",
    ]
    assert machine.play(*words, LD_PRELOAD=preload)[-2:] == ["ok", "ok 2"]


def test_without_the_kernels_number_a_closed_descriptor_is_noticed_too(machine: Machine) -> None:
    machine.slice("a", (0, 1024, None))
    words = [f"node:50:{node(machine)}", f"gem:50:{1000 * MIB}", "close:50", "avail:1000"]
    assert machine.play(*words)[-1] == f"ok {1024 * MIB}"


def test_a_forked_child_owes_nothing_of_its_parents_render_node(machine: Machine) -> None:
    a = machine.slice("a", (0, 1000, None))
    words = [f"node:50:{node(machine)}", f"gem:50:{300 * MIB}", "fork", "gemclose:50:1", f"gem:50:{500 * MIB}"]
    assert machine.play(*words) == ["ok", "ok 1", "ok", "ok 2"]
    assert sorted(used for _, used in machine.slots(a)) == [300 * MIB, 500 * MIB]


def test_more_openings_than_are_remembered_are_refused_until_some_are_closed(machine: Machine) -> None:
    machine.slice("a", (0, 1024, None))
    path = node(machine)
    words = [word for fd in range(50, 114) for word in (f"node:{fd}:{path}", f"gem:{fd}:4096")]
    words += [f"node:200:{path}", "gem:200:4096", "close:60", "gem:200:4096"]
    assert machine.play(*words)[-4:] == ["ok", "ENOMEM", "ok", "ok 1"]


def test_other_files_and_other_drivers_requests_pass_untouched(machine: Machine) -> None:
    machine.slice("a", (0, 1, None))
    plain = machine.root / "plain"
    plain.write_text("")
    words = [f"node:50:{plain}", f"gem:50:{64 * MIB}", f"node:51:{node(machine, 140)}", f"gem:51:{64 * MIB}"]
    # Node 140 is no GPU of the slice and nothing says that it is amdgpu's; a pointer where amdgpu has its domains.
    words += [f"node:52:{node(machine)}", f"gem:52:{64 * MIB}:0x7ffd00000004"]
    assert machine.play(*words) == ["ok", "ok 1"] * 3


def test_an_amd_gpu_outside_the_slice_gives_hardly_any_memory(machine: Machine) -> None:
    machine.slice("a", (0, 600, None))
    words = f"node:50:{node(machine, 140)} gem:50:{4 * MIB} gem:50:{64 * MIB} userqueue:50:1"
    script = f"""
        mount -t tmpfs none /sys && mkdir -p /sys/dev/char/226:140/device && cd /sys/dev/char/226:140/device
        ln -s ../../../bus/pci/drivers/amdgpu driver
        export LD_PRELOAD="{machine.built.gate} {machine.built.stub}"
        exec {machine.built.drive} {words}
    """
    environment = {k: v for k, v in machine.environment().items() if k != "LD_PRELOAD"}
    command = ["unshare", "--mount", "sh", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    answers = [line.partition(" -> ")[2] for line in done.stdout.splitlines()]
    assert answers == ["ok", "ok 1", "ENOMEM", "ENOMEM"]


def test_a_policy_of_an_older_daemon_leaves_render_nodes_alone(machine: Machine) -> None:
    a = machine.slice("a", (0, 1, None))
    raw = bytearray((a / "policy").read_bytes())
    at = ffi.offsetof("struct avg_policy", "gpu") + ffi.offsetof("struct avg_policy_gpu", "render_minor")
    raw[at : at + 4] = bytes(4)
    (a / "policy").unlink()
    (a / "policy").write_bytes(raw)
    assert machine.play(f"node:50:{node(machine)}", f"gem:50:{64 * MIB}") == ["ok", "ok 1"]


def test_a_slice_that_cannot_be_read_gives_no_gem_memory(machine: Machine) -> None:
    (machine.slice("a", (0, 600, None)) / "policy").unlink()
    assert machine.play(f"node:50:{node(machine)}", "gem:50:4096") == ["ok", "ENOMEM"]


# ------------------------------------------------------------------------------------------------------- other doors


def test_a_compute_queue_of_drm_is_refused_where_the_slice_has_a_mask(machine: Machine) -> None:
    machine.slice("a", (0, 600, CuSet(tuple(range(76)))), (1, 600, None))
    words = [f"node:50:{node(machine)}", "userqueue:50:1", "userqueue:50:0"]
    words += [f"node:51:{node(machine, 129)}", "userqueue:51:1"]
    answers, said = machine.play_all(*words)
    assert answers == ["ok", "ENOMEM", "ok", "ok", "ok"]
    assert said == "amdvgpu: a compute queue of DRM cannot be held to the slice's CUs and is refused\n"


def test_restoring_a_checkpoint_and_a_second_context_are_refused_in_a_slice(machine: Machine) -> None:
    machine.slice("a", (0, 600, None))
    answers, said = machine.play_all("criu:0", "criu:3", "context")
    assert answers == ["ok", "ENOMEM", "ENOMEM"]
    assert said.count("\n") == 1
    machine.directories.clear()
    assert machine.play("criu:3", "context") == ["ok", "ok"]


# --------------------------------------------------------------------------------------------------------- reporting


def test_amdgpu_info_tells_of_the_slice(machine: Machine) -> None:
    machine.slice("a", (0, 1024, None))
    words = [f"node:50:{node(machine)}", f"gem:50:{100 * MIB}", f"alloc:1000:{100 * MIB}"]
    words += [f"info:50:{query}" for query in (VRAM_USAGE, VRAM_GTT, VIS_VRAM_USAGE, MEMORY, 5)]
    whole, seen = 16 << 30, 256 * MIB
    assert machine.play(*words)[3:] == [
        f"ok {200 * MIB}",
        f"ok {1024 * MIB} {seen} {whole}",
        f"ok {128 * MIB}",
        f"ok {1024 * MIB} {1024 * MIB} {200 * MIB} {768 * MIB} {seen} {seen} {128 * MIB} {seen} {whole} {whole}",
        "ok 7",
    ]


def test_the_drivers_memory_files_tell_of_the_slice_and_of_other_gpus_the_truth(machine: Machine) -> None:
    machine.slice("a", (0, 1024, None))
    for card, minor in ((0, 128), (1, 129)):
        device = machine.root / f"sys/class/drm/card{card}/device"
        (device / f"drm/renderD{minor}").mkdir(parents=True)
        for name, value in (("vram_total", 16 << 30), ("vram_used", 12 << 30), ("vis_vram_total", 256 * MIB)):
            (device / f"mem_info_{name}").write_text(f"{value}\n")
        (device / "mem_info_gtt_total").write_text("5\n")
    names = ("vram_total", "vram_used", "vis_vram_total", "gtt_total")
    words = [f"alloc:1000:{100 * MIB}"]
    words += [f"cat:/sys/class/drm/card{card}/device/mem_info_{name}" for card in (0, 1) for name in names]
    mine = [f"ok {1024 * MIB}", f"ok {100 * MIB}", f"ok {256 * MIB}", "ok 5"]
    others = [f"ok {16 << 30}", f"ok {12 << 30}", f"ok {256 * MIB}", "ok 5"]
    assert machine.play(*words) == ["ok", *mine, *others]


def test_all_totals_are_one(machine: Machine) -> None:
    """The runtime keeps the total it was first told; what tools in the same process are told agrees with it."""
    machine.slice("a", (0, 1024, None))
    device = machine.root / "sys/class/drm/card0/device"
    (device / "drm/renderD128").mkdir(parents=True)
    (device / "mem_info_vram_total").write_text(f"{16 << 30}\n")
    path = "cat:/sys/class/drm/card0/device/mem_info_vram_total"
    player = machine.start("bank:1", f"node:50:{node(machine)}", "stop", path, f"info:50:{VRAM_USAGE}")
    machine.slice("a", (0, 2048, None))
    assert player.communicate("\n")[0].splitlines()[0].endswith(f"-> ok {1024 * MIB}")
    assert machine.play(path) == [f"ok {2048 * MIB}"]


def test_a_reader_of_files_takes_no_slot_and_does_not_count_the_dead(machine: Machine) -> None:
    a = machine.slice("a", (0, 1024, None))
    machine.play(f"alloc:1000:{100 * MIB}", "kill")
    assert machine.play(f"node:50:{node(machine)}", f"info:50:{VRAM_USAGE}") == ["ok", "ok 0"]
    assert machine.slots(a) == []
