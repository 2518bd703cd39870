"""What the real ROCm runtime asks of a KFD, and how it takes an answer: facts that the design stands on.

softkfd runs no kernels: nothing here says what silicon does. Where runtimes differ, what is asserted is what all of
HIP 5.2 to 7.2 were seen to do.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.rocm

GIB = 1024**3
HERE = Path(__file__).resolve().parent
GPU_IDS = [4369, 4642, 4915]
UUIDS = [f"GPU-{0xA1B2C3D4E5F60000 + 0x1111 * (i + 1):016x}" for i in range(3)]
MASKS = "0:0-75;1:0-37"


def test_every_gpu_is_found_in_kfd_node_order(mi210s: Any, hiptest: Path) -> None:
    ran = mi210s.run(hiptest, "info")
    assert (ran.status, re.findall(r"dev \d+: (.*) bus=(\S+) total=(\d+) MP=(\d+)", ran.out)) == (
        0,
        [("AMD Instinct MI210", f"0000:{bus}:00.0", "68702699520", "104") for bus in ("05", "25", "45")],
    )


def test_rocminfo_shows_cus_engines_memory_and_ids(mi210s: Any) -> None:
    ran = mi210s.run("rocminfo")
    agents = [agent for agent in ran.out.split("*******") if "Device Type:             GPU" in agent]
    assert ran.status == 0
    assert [
        tuple(
            re.search(rf"{key}: +(\S+)", agent)[1]  # type: ignore[index]
            for key in ("Name", "Uuid", "Compute Unit", "Shader Engines", "SIMDs per CU", "Wavefront Size")
        )
        for agent in agents
    ] == [("gfx90a", uuid, "104", "8", "4", "64(0x40)") for uuid in UUIDS]
    assert all("67092480(0x3ffc000) KB" in agent for agent in agents)


@pytest.mark.parametrize(
    ("environment", "masks"),
    [
        ({}, {0: None, 1: None, 2: None}),
        ({"HSA_CU_MASK": MASKS}, {0: 76, 1: 38, 2: None}),
        ({"HSA_CU_MASK": MASKS, "ROCR_VISIBLE_DEVICES": "1,0"}, {1: 76, 0: 38}),
        ({"HSA_CU_MASK": MASKS, "ROCR_VISIBLE_DEVICES": f"{UUIDS[1]},{UUIDS[0]}"}, {1: 76, 0: 38}),
        ({"HSA_CU_MASK": MASKS, "HIP_VISIBLE_DEVICES": "1,0"}, {0: 76, 1: 38}),
        ({"HSA_CU_MASK": MASKS, "SOFTKFD_DENY": "renderD128=EPERM"}, {1: 76, 2: 38}),
        ({"HSA_CU_MASK": MASKS, "SOFTKFD_DENY": "renderD129=ENOENT"}, {0: 76, 2: 38}),
        # It fails open: a set that is wrong takes all later ones with it, and says nothing.
        ({"HSA_CU_MASK": "5:0-3;1:0-3"}, {0: None, 1: None, 2: None}),
        ({"HSA_CU_MASK": "0:0-3;0:4-7;1:0-3"}, {0: 4, 1: None, 2: None}),
        ({"HSA_CU_MASK": "0:0x0;1:0-3"}, {0: None, 1: None, 2: None}),
        ({"HSA_CU_MASK": MASKS, "HSA_CU_MASK_SKIP_INIT": "1"}, {0: None, 1: None, 2: None}),
    ],
    ids=str,
)
def test_hsa_cu_mask_follows_the_visible_devices_and_fails_open(
    mi210s: Any, hiptest: Path, environment: dict[str, str], masks: dict[int, int | None]
) -> None:
    ran = mi210s.run(hiptest, "streams", **environment)
    assert (ran.status, ran.masks) == (0, {GPU_IDS[gpu]: {count} for gpu, count in masks.items()})


def test_a_mask_past_the_last_cu_turns_every_cu_off(mi210s: Any, hiptest: Path) -> None:
    ran = mi210s.run(hiptest, "streams", ROCR_VISIBLE_DEVICES="0", HSA_CU_MASK="0:104-200")
    assert ran.masks == {GPU_IDS[0]: {0}}


def test_a_mask_is_as_long_as_its_highest_cu_needs(mi210s: Any, hiptest: Path) -> None:
    ran = mi210s.run(hiptest, "streams", ROCR_VISIBLE_DEVICES="0", HSA_CU_MASK="0:0-75")
    assert {request["bits"] for request in ran.asked if request["op"] == "SET_CU_MASK"} == {96}


def test_eacces_on_one_render_node_hides_every_gpu(mi210s: Any, hiptest: Path) -> None:
    assert "count=0" in mi210s.run(hiptest, "info", SOFTKFD_DENY="renderD128=EACCES").out


@pytest.mark.parametrize(
    ("visible", "count"),
    [("", 0), ("7", 0), ("0,0,1", 1), ("2,1", 2), (UUIDS[2].lower(), 1), ("GPU-a1b2c3d4e5f6", 0), (f"0,{UUIDS[2]}", 2)],
)
def test_a_visible_device_list_ends_at_its_first_bad_entry(
    mi210s: Any, hiptest: Path, visible: str, count: int
) -> None:
    assert f"count={count}\n" in mi210s.run(hiptest, "info", ROCR_VISIBLE_DEVICES=visible).out


def test_out_of_memory_is_an_error_that_a_program_can_go_on_after(mi210s: Any, hiptest: Path) -> None:
    ran = mi210s.run(hiptest, "oom", ROCR_VISIBLE_DEVICES="0")
    assert ran.status == 0
    answers = re.findall(r"hipMalloc\(&p\[(\d)\].* -> (\w+)", ran.out)
    assert answers == [
        ("0", "hipSuccess"),
        ("1", "hipErrorOutOfMemory"),
        ("2", "hipSuccess"),
        ("3", "hipErrorOutOfMemory"),
        ("0", "hipSuccess"),
    ]
    # It trims and asks once more; what is over the total is refused without asking.
    assert [request["size"] for request in ran.asked if request["op"] == "ALLOC" and request["err"]] == [5 * GIB] * 2


def test_the_total_is_what_the_memory_bank_says(mi210s: Any, hipclient: Path) -> None:
    bank = mi210s.root / "sys/class/kfd/kfd/topology/nodes/1/mem_banks/0/properties"
    before = bank.read_text()
    bank.write_text(before.replace("size_in_bytes 68702699520", f"size_in_bytes {16 * GIB}"))
    try:
        ran = mi210s.run(hipclient, "--step", "17G", "--count", "1")
    finally:
        bank.write_text(before)
    assert [line["total"] for line in ran.lines if line["op"] == "gpu"] == [16 * GIB, 68702699520, 68702699520]
    assert [line["result"] for line in ran.lines if line["op"] == "alloc"] == ["hipErrorOutOfMemory"]


def test_the_client_takes_memory_until_refused_and_gives_it_back(mi210s: Any, hipclient: Path) -> None:
    ran = mi210s.run(hipclient, "--gpu", "1", "--step", "20G", "--stream", "--free")
    assert (ran.status, [line["result"] for line in ran.lines if line["op"] == "alloc"]) == (
        0,
        ["hipSuccess"] * 3 + ["hipErrorOutOfMemory"],
    )
    assert (ran.lines[-1]["granted"], ran.lines[-1]["held"]) == (3, 0)


def test_copies_by_sdma_really_copy(mi210s: Any, hiptest: Path) -> None:
    ran = mi210s.run(hiptest, "work", ROCR_VISIBLE_DEVICES="0", GPU_FORCE_BLIT_COPY_SIZE="0")
    assert (ran.status, ran.out.count("equal"), ran.out.count("DIFFERS")) == (0, 2, 0)


def test_a_stream_with_a_mask_asks_for_that_mask(mi210s: Any, hiptest: Path) -> None:
    ran = mi210s.run(hiptest, "cumask", ROCR_VISIBLE_DEVICES="0")
    asked = [request["mask"] for request in ran.asked if request["op"] == "SET_CU_MASK"]
    assert (ran.status, asked) == (0, ["000000ff000000000000ffff"])


def test_a_refused_mask_fails_the_stream_that_asked_for_it_and_no_other(mi210s: Any, hiptest: Path) -> None:
    refused = mi210s.run(hiptest, "cumask", ROCR_VISIBLE_DEVICES="0", SOFTKFD_FAIL="SET_CU_MASK=EINVAL")
    assert "hipExtStreamCreateWithCUMask(&s, 3, m)         -> hipErrorOutOfMemory" in refused.out
    plain = mi210s.run(hiptest, "streams", HSA_CU_MASK=MASKS, SOFTKFD_FAIL="SET_CU_MASK=EINVAL")
    assert (plain.status, "hipError" in plain.out) == (0, False)


def test_nothing_is_asked_that_softkfd_does_not_know(mi210s: Any, hiptest: Path) -> None:
    ran = mi210s.run(hiptest, "info", "mem", "streams", "work", "async", ROCR_VISIBLE_DEVICES="0")
    unknown = {(request["op"], request["nr"]) for request in ran.asked if "UNHANDLED" in request["op"]}
    # 0x82 is an old debugger request of the out-of-tree driver (ROCr 5.2), which does without.
    assert unknown <= {("KFD_UNHANDLED", "0x82")}


@pytest.mark.root
def test_hip_in_a_container_has_the_gpus_that_are_mounted(mi210s: Any, hipclient: Path) -> None:
    """No variable selects them: the device list does. Another user, an empty environment, other pids."""
    script = HERE.parent / "sim" / "container.sh"
    rootfs = mi210s.root.with_name("container")
    rootfs.mkdir()
    places = [str(p) for p in (script, rootfs, mi210s.root, mi210s.softkfd, hipclient)]
    done = subprocess.run(
        ["sh", *places, "128 130", "/tmp/client", "--gpu", "1", "--step", "30G", "--stream"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout
    assert [line["pci"] for line in lines if line["op"] == "gpu"] == ["0000:05:00.0", "0000:45:00.0"]
    assert [line["result"] for line in lines if line["op"] == "alloc"] == ["hipSuccess"] * 2 + ["hipErrorOutOfMemory"]
