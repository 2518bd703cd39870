"""The layout is one: what the C compiler makes of the header is what Python reads through."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from amdvgpud._abi import ffi, lib
from amdvgpud.core.model import MAX_GPUS_PER_SLICE

if TYPE_CHECKING:
    from tests.shim.conftest import Built

STRUCTS = ("avg_policy_gpu", "avg_policy", "avg_cell", "avg_slot", "avg_past", "avg_ledger")


def test_c_and_python_agree_on_every_offset_and_size(built: Built, tmp_path: Path) -> None:
    mine = {}
    lines = []
    for struct in STRUCTS:
        mine[struct] = ffi.sizeof(f"struct {struct}")
        lines.append(f'printf("{struct} %zu\\n", sizeof(struct {struct}));')
        for name, field in ffi.typeof(f"struct {struct}").fields:
            mine[f"{struct}.{name}"] = field.offset
            lines.append(f'printf("{struct}.{name} %zu\\n", offsetof(struct {struct}, {name}));')
    source = tmp_path / "offsets.c"
    source.write_text("#include <amdvgpu/abi.h>\n#include <stdio.h>\nint main(void) {" + "".join(lines) + "}")
    built.cc([str(source), "-o", str(tmp_path / "offsets")])
    printed = subprocess.run([tmp_path / "offsets"], capture_output=True, text=True, check=True).stdout
    assert {name: int(value) for name, value in (line.split() for line in printed.splitlines())} == mine


def test_nothing_has_moved_since_version_1() -> None:
    """The first layout, by value: whoever changes a line here breaks every running container."""
    assert lib.AVG_VERSION == 1
    offsets = {
        f"{struct}.{name}": field.offset
        for struct in ("avg_policy", "avg_policy_gpu", "avg_slot", "avg_cell", "avg_ledger")
        for name, field in ffi.typeof(f"struct {struct}").fields
        if not name.startswith("reserved")
    }
    assert offsets == {
        "avg_policy.magic": 0,
        "avg_policy.version": 8,
        "avg_policy.bytes": 12,
        "avg_policy.gpu_count": 16,
        "avg_policy.flags": 20,
        "avg_policy.sequence": 24,
        "avg_policy.slice_key": 32,
        "avg_policy.cu_mask_env_hash": 40,
        "avg_policy.visible_env_hash": 48,
        "avg_policy.name": 64,
        "avg_policy.gpu": 256,
        "avg_policy_gpu.kfd_gpu_id": 0,
        "avg_policy_gpu.kfd_node": 4,
        "avg_policy_gpu.vram_bytes": 8,
        "avg_policy_gpu.physical_bytes": 16,
        "avg_policy_gpu.cu_count": 24,
        "avg_policy_gpu.xcc_count": 28,
        "avg_policy_gpu.flags": 30,
        "avg_policy_gpu.priority": 32,
        "avg_policy_gpu.render_minor": 36,
        "avg_policy_gpu.cu_mask": 48,
        "avg_slot.owner": 0,
        "avg_slot.start_ticks": 8,
        "avg_slot.cookie": 16,
        "avg_slot.notes": 32,
        "avg_cell.used": 0,
        "avg_cell.pending": 8,
        "avg_cell.earmark": 16,
        "avg_cell.peak": 24,
        "avg_cell.allocations": 32,
        "avg_cell.frees": 40,
        "avg_cell.denials": 48,
        "avg_cell.denied_bytes": 56,
        "avg_ledger.magic": 0,
        "avg_ledger.version": 8,
        "avg_ledger.slot_count": 12,
        "avg_ledger.slot_bytes": 16,
        "avg_ledger.gpu_count": 20,
        "avg_ledger.slice_key": 24,
        "avg_ledger.occupied": 32,
        "avg_ledger.first_owner": 48,
        "avg_ledger.first_start": 56,
        "avg_ledger.past": 256,
    }


def test_room_for_gpus_is_the_models() -> None:
    assert lib.AVG_MAX_GPUS == MAX_GPUS_PER_SLICE


def test_hashes_of_environment_texts_are_fnv_1a() -> None:
    assert (lib.avg_text_hash(b"", 0), lib.avg_text_hash(b"a", 1)) == (0xCBF29CE484222325, 0xAF63DC4C8601EC8C)
