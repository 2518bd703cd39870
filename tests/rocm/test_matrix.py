"""The gate under the real runtimes: every way to take VRAM, every question about it, every situation of the CU slice.

``ROCM`` says which runtimes (``make rocm-test``); verdicts come from what the simulated KFD was asked and what it
handed out, next to what the program was told. softkfd runs no kernels: this shows what is asked and granted, not what
silicon does. The table of all figures is build/rocm.json.
"""

from __future__ import annotations

import json
import mmap
import re
import signal
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from amdvgpud._abi import ffi
from amdvgpud.core.model import CuSet

pytestmark = [pytest.mark.rocm, pytest.mark.root]

QUOTA_MIB = 2048
STEP_MIB = 128
MIB = 1 << 20
KEPT_MIB = 160
"""What a runtime keeps for itself at most until a first stream works: its reserve of 140 MiB and some blocks."""
OUT = "hipErrorOutOfMemory"
OK = "hipSuccess"

Figures = tuple[dict[str, Any], dict[str, Any]]
"""What is wanted, and what came."""
Case = Callable[[Any, Any], Figures]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """A case: given the maker of beds and the module of shared things, what is wanted and what came."""
    CASES[function.__name__] = function
    return function


def between(low: float, high: float) -> Any:
    return SHARED["Between"](low, high)


SHARED: dict[str, Any] = {}


# ------------------------------------------------------------------------------------------------- ways to take VRAM

REFUSED_WAYS = [
    "malloc",
    "ext",
    "fine",
    "uncached",
    "pitch",
    "mempitch",
    "3d",
    "array",
    "array3d",
    "arraycreate",
    "array3dcreate",
    "mipmap",
    "mipmapcreate",
    "async",
    "pool",
    "create",
    "map",
    "graph",
    "captured",
    "graphnode",
    "module",
]
FREE_WAYS = ("managed", "host", "register")

ABSENT = {
    (5, 2): {"uncached", "mipmap", "mipmapcreate", "create", "map", "graph", "captured", "graphnode"},
    (5, 7): {"mipmap", "mipmapcreate", "map", "graphnode"},
    (6, 4): {"mipmap", "mipmapcreate"},
    (7, 2): {"mipmap", "mipmapcreate"},
}
"""What the runtime does not have, or says on a simulated MI210 that it does not support."""


HELD_AT_EXIT = ("map", "graph", "captured", "graphnode")
CRASHES_AT_EXIT = -signal.SIGSEGV
"""6.4.3, at the exit of any program that holds such memory then: far from the quota too, and without the gate."""


def by_way(way: str) -> Case:
    """The slice is filled by one way: never over, refused as out of memory, all granted is there, and it lives."""

    def run(bed: Any, runtime: Any) -> Figures:
        here = bed("2*mi210")  # 5.2.3 has no fine-grained memory where there is one GPU only
        quota, step = (QUOTA_MIB, STEP_MIB) if way != "module" else (512, 64)
        here.slice("a", (0, quota, None))
        ran = here.run(f"take:{way}:{step}:40", "take:malloc:64:1")
        first: dict[str, Any] = next((line for line in ran.lines if line["op"] == "take"), {})
        peak = SHARED["peak_mib"](ran.asked, here.inventory.partitions[0].kfd_gpu_id)
        if way in ABSENT[runtime.number[:2]]:
            return {"granted": 0, "taken_mib": between(0, 256), "status": 0}, {
                "granted": first.get("granted"),
                "taken_mib": peak,
                "status": ran.status,
            }
        wanted = {
            "taken_mib": between(quota - step - KEPT_MIB, quota),
            "granted_without_memory": 0,
            "error": first.get("error") if way == "module" and first.get("error") != OK else OUT,
            "status": CRASHES_AT_EXIT if runtime.number[:2] == (6, 4) and way in HELD_AT_EXIT else 0,
        }
        granted = first.get("granted", 0)
        return wanted, {
            "taken_mib": peak,
            "granted_without_memory": max(0, granted - peak // step),
            "error": first.get("error"),
            "status": ran.status,
        }

    return run


def by_free_way(way: str) -> Case:
    """Memory of the host, or managed: as much as one likes, and not a byte of the quota."""

    def run(bed: Any, runtime: Any) -> Figures:
        here = bed("mi210")
        here.slice("a", (0, QUOTA_MIB, None))
        ran = here.run(f"take:{way}:{STEP_MIB}:24", f"take:malloc:{STEP_MIB}")
        got = [line for line in ran.lines if line["op"] == "take"]
        peak = SHARED["peak_mib"](ran.asked, here.inventory.partitions[0].kfd_gpu_id)
        return {"first": 24, "then_mib": between(QUOTA_MIB - STEP_MIB - KEPT_MIB, QUOTA_MIB), "status": 0}, {
            "first": got[0]["granted"],
            "then_mib": peak,
            "status": ran.status,
        }

    return run


for _way in REFUSED_WAYS:
    CASES[f"take_{_way}"] = by_way(_way)
for _way in FREE_WAYS:
    CASES[f"not_charged_{_way}"] = by_free_way(_way)


def filled(here: Any, ran: Any, low: int = QUOTA_MIB - STEP_MIB - KEPT_MIB) -> Figures:
    takes = [line["error"] for line in ran.lines if line["op"] == "take"]
    peak = SHARED["peak_mib"](ran.asked, here.inventory.partitions[0].kfd_gpu_id)
    return {"taken_mib": between(low, QUOTA_MIB), "error": OUT, "status": 0}, {
        "taken_mib": peak,
        "error": takes[-1] if takes else None,
        "status": ran.status,
    }


@case
def take_after_streams_and_scratch(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, None))
    return filled(here, here.run("streams:4", f"take:malloc:{STEP_MIB}"))


@case
def take_streams_by_the_hundred(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, None))
    ran = here.run("take:stream:0:100", f"take:malloc:{STEP_MIB}")
    return filled(here, ran)


@case
def take_by_raw_requests(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, None))
    ran = here.run("/parts/kfdclient", "--queue", "--step", f"{STEP_MIB}M")
    return {"granted": QUOTA_MIB // STEP_MIB, "taken_mib": QUOTA_MIB, "error": "ENOMEM"}, {
        "granted": len([line for line in ran.lines if line["op"] == "alloc" and line["result"] == "ok"]),
        "taken_mib": SHARED["peak_mib"](ran.asked, here.inventory.partitions[0].kfd_gpu_id),
        "error": [line["result"] for line in ran.lines if line["op"] == "alloc"][-1],
    }


@case
def take_on_a_gpu_of_no_slice(bed: Any, runtime: Any) -> Figures:
    here = bed("2*mi210")
    here.slice("a", (0, QUOTA_MIB, None))
    ran = here.run("device:1", "take:malloc:16:40", "device:0", "take:malloc:16:1")
    return {"taken_mib": between(0, 8), "errors": [OUT, OK], "status": 0}, {
        "taken_mib": SHARED["peak_mib"](ran.asked, here.inventory.partitions[1].kfd_gpu_id),
        "errors": [line["error"] for line in ran.lines if line["op"] == "take"],
        "status": ran.status,
    }


@case
def what_is_freed_can_be_taken_again(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, None))
    ran = here.run(*(f"take:malloc:{STEP_MIB}", "drop") * 5)
    return {"granted": [between(14, 16)] * 5, "status": 0}, {
        "granted": [line["granted"] for line in ran.lines if line["op"] == "take"],
        "status": ran.status,
    }


@case
def two_slices_of_one_gpu_in_one_container_add(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, 768, None))
    here.slice("b", (0, QUOTA_MIB - 768, None))
    return filled(here, here.run(f"take:malloc:{STEP_MIB}"))


@case
def an_exit_with_memory_held_is_what_it_is_without_the_gate(bed: Any, runtime: Any) -> Figures:
    here = bed("2*mi210")
    ways = [way for way in HELD_AT_EXIT if way not in ABSENT[runtime.number[:2]]]
    without = {way: here.run(f"take:{way}:{STEP_MIB}:1", gated=False).status for way in ways}
    here.slice("a", (0, QUOTA_MIB, None))
    return without, {way: here.run(f"take:{way}:{STEP_MIB}:1").status for way in ways}


# -------------------------------------------------------------------------------------------------- several processes


@case
def two_processes_race(bed: Any, runtime: Any) -> Figures:
    """Three rounds; together never over, and not far under."""
    peaks, statuses = [], []
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, None))
    for _ in range(3):
        (here.machine / "log.jsonl").write_text("")
        racers = [here.start(f"take:malloc:{STEP_MIB}", "wait") for _ in range(2)]
        for racer in racers:
            until_waiting(racer)
        peaks.append(SHARED["peak_mib"](here.asked(), here.inventory.partitions[0].kfd_gpu_id))
        for racer in racers:
            racer.communicate("\n", timeout=100)
            statuses.append(racer.returncode)
    return {"taken_mib": [between(QUOTA_MIB - STEP_MIB - 2 * KEPT_MIB, QUOTA_MIB)] * 3, "status": [0] * 6}, {
        "taken_mib": peaks,
        "status": statuses,
    }


@case
def two_processes_race_for_their_reserves(bed: Any, runtime: Any) -> Figures:
    """The quota has room for one reserve of 140 MiB above the runtime's threshold: neither process may abort."""
    here = bed("mi210")
    here.slice("a", (0, 1250, None))
    statuses, peaks = [], []
    for _ in range(3):
        (here.machine / "log.jsonl").write_text("")
        racers = [here.start("streams:1", "take:malloc:64:4", "wait") for _ in range(2)]
        for racer in racers:
            until_waiting(racer)
        peaks.append(SHARED["peak_mib"](here.asked(), here.inventory.partitions[0].kfd_gpu_id))
        for racer in racers:
            racer.communicate("\n", timeout=100)
            statuses.append(racer.returncode)
    return {"status": [0] * 6, "taken_mib": [between(512, 1250)] * 3}, {"status": statuses, "taken_mib": peaks}


def until_waiting(started: Any) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for text in started.stdout:
        if text.startswith("{"):
            lines.append(json.loads(text))
            if lines[-1]["op"] == "wait":
                return lines
    raise AssertionError(f"ended before it waited: {lines}")


@case
def a_copy_comes_back_as_it_was(bed: Any, runtime: Any) -> Figures:
    """More than a copy of 22 bits can say: from ROCr 6.1 on it is then one of 30, where the GPU has such."""
    models = ["mi210", "mi300x", "rx7900xtx"] if runtime.number >= (5, 7) else ["mi210"]
    if runtime.number >= (7, 2):
        models.remove("mi210")  # fetched from it by a kernel, and nothing here runs one
    came = {}
    for model in models:
        here = bed(model)
        here.slice("a", (0, QUOTA_MIB, None))
        ran = here.run("copy:32", GPU_FORCE_BLIT_COPY_SIZE="0")
        came[model] = next(((line["error"], line["same"]) for line in ran.lines if line["op"] == "copy"), ran.out)
    return dict.fromkeys(came, (OK, 32 * MIB)), came


@case
def a_killed_process_gives_everything_back(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, None))
    victim = here.start(f"take:malloc:{STEP_MIB}", "wait")
    until_waiting(victim)
    held = here.used_mib()
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=100)
    want, got = filled(here, here.run(f"take:malloc:{STEP_MIB}"))
    return want | {"held_mib": between(QUOTA_MIB - STEP_MIB - KEPT_MIB, QUOTA_MIB)}, got | {"held_mib": held}


@case
def a_fork_before_any_use(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, None))
    return filled(here, here.run("fork", f"take:malloc:{STEP_MIB}"))


@case
def a_fork_after_use_asks_nothing(bed: Any, runtime: Any) -> Figures:
    """ROCm's own thunk refuses a forked child; how it ends differs by version, that it takes nothing does not."""
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, None))
    ran = here.run("take:malloc:256:1", "fork", "take:malloc:128:1")
    pids = {request["pid"] for request in ran.asked if request["op"] in ("ALLOC", "CREATE_QUEUE")}
    return {"processes_that_asked": 1, "parent_status": 0, "child_error": OUT}, {
        "processes_that_asked": len(pids),
        "parent_status": ran.status,
        "child_error": [line["error"] for line in ran.lines if line["op"] == "take"][-1],
    }


@case
def an_exec_starts_with_the_whole_quota(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, None))
    ran = here.run("take:malloc:512:2", "exec", f"take:malloc:{STEP_MIB}")
    return {"granted": between(14, 16), "status": 0}, {
        "granted": [line["granted"] for line in ran.lines if line["op"] == "take"][-1],
        "status": ran.status,
    }


@case
def an_imported_handle_is_not_charged(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, None))
    handle = here.folder / "handle"
    # 7.2.4 goes by dma-buf unless told, and then fails over softkfd without the gate as well.
    legacy = {"HSA_ENABLE_IPC_MODE_LEGACY": "1"}
    owner = here.start(f"export:{handle}", "wait", **legacy)
    exported = until_waiting(owner)
    other = here.start(f"import:{handle}", f"take:malloc:{STEP_MIB}", "wait", **legacy)
    lines = until_waiting(other)
    used = here.used_mib()
    for started in (owner, other):
        started.communicate("\n", timeout=100)
    return {"export": OK, "import": OK, "used_mib": between(QUOTA_MIB - STEP_MIB - KEPT_MIB, QUOTA_MIB)}, {
        "export": exported[0]["error"],
        "import": lines[0]["error"],
        "used_mib": used,
    }


# --------------------------------------------------------------------------------------------------------- questions


def answers(line: dict[str, Any]) -> dict[str, Any]:
    """Every answer about the total in MiB, by who gave it."""
    totals = {"memgetinfo": line["total"], "devicetotal": line["device_total"], "prop": line["prop_total"]}
    totals |= {key: value[1] for key, value in line.items() if key.startswith("hipGetDeviceProp")}
    return {key: value / MIB for key, value in totals.items()}


@case
def the_total_is_the_quota_everywhere(bed: Any, runtime: Any) -> Figures:
    here = bed("2*mi210")
    here.slice("a", (0, QUOTA_MIB, None), (1, 3072, None))
    lines = [line for line in here.run("questions").lines if line["op"] == "questions"]
    got = {f"{i}_{key}": value for i, line in enumerate(lines) for key, value in answers(line).items()}
    names = ["memgetinfo", "devicetotal", "prop", "hipGetDeviceProperties"]
    if runtime.number >= (6,):
        names += ["hipGetDevicePropertiesR0600", "hipGetDevicePropertiesR0000"]
    return {f"{i}_{key}": quota for i, quota in enumerate((QUOTA_MIB, 3072)) for key in names}, got


@case
def a_quota_above_the_gpu_shows_the_gpu(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, 1 << 20, None))
    lines = [line for line in here.run("questions").lines if line["op"] == "questions"]
    got = set(answers(lines[0]).values())
    return {"totals": [here.inventory.partitions[0].vram_bytes / MIB]}, {"totals": sorted(got)}


@case
def free_is_what_is_left(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, None))
    ran = here.run("questions", "take:malloc:512:2", "questions")
    lines = [line for line in ran.lines if line["op"] == "questions"]
    taken = SHARED["peak_mib"](ran.asked, here.inventory.partitions[0].kfd_gpu_id)
    return {"before": between(QUOTA_MIB - 16, QUOTA_MIB), "after": between(QUOTA_MIB - taken - 8, QUOTA_MIB - 1024)}, {
        "before": lines[0]["free"] / MIB,
        "after": lines[1]["free"] / MIB,
    }


@case
def smi_tools_show_the_slice(bed: Any, runtime: Any) -> Figures:
    """Total and used of the slice, by what the suite has: rocm-smi, and from Debian 13 on amd-smi as well."""
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, None))
    neighbour = here.start("take:malloc:512:2", "wait")
    until_waiting(neighbour)
    ran = here.run("/usr/bin/rocm-smi", "--showmeminfo", "vram", "--json")
    card = json.loads(ran.out[ran.out.index("{") :])["card0"]
    got = {"rocm-smi": [int(card[f"VRAM Total {what}(B)"]) // MIB for what in ("Memory ", "Used Memory ")]}
    if runtime.root != Path("/"):
        ran = here.run("/usr/bin/amd-smi", "metric", "-m", "--json")
        said = json.loads(re.sub(r"^[^\[{]*", "", ran.out))
        usage = (said["gpu_data"] if isinstance(said, dict) else said)[0]["mem_usage"]
        got["amd-smi"] = [usage[f"{what}_vram"]["value"] for what in ("total", "used")]
    neighbour.communicate("\n", timeout=100)
    return {tool: [QUOTA_MIB, between(1024, 1024 + KEPT_MIB)] for tool in got}, got


@case
def free_counts_the_neighbour_in(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, None))
    neighbour = here.start("take:malloc:512:2", "wait")
    until_waiting(neighbour)
    line = next(line for line in here.run("questions").lines if line["op"] == "questions")
    neighbour.communicate("\n", timeout=100)
    return {"free_mib": between(QUOTA_MIB - 1024 - 16, QUOTA_MIB - 1024), "total_mib": QUOTA_MIB}, {
        "free_mib": line["free"] / MIB,
        "total_mib": line["total"] / MIB,
    }


@case
def rocminfo_shows_the_quota_as_pool(bed: Any, runtime: Any) -> Figures:
    here = bed("2*mi210")
    here.slice("a", (0, QUOTA_MIB, None), (1, 3072, None))
    ran = here.run("/usr/bin/rocminfo")
    agents = [agent for agent in ran.out.split("*******") if "Device Type:             GPU" in agent]
    sizes = [{int(size) for size in re.findall(r"Size: +(\d+)\(0x[0-9a-f]+\) KB", agent)} for agent in agents]
    pools = [sorted(size for size in found if size > 1 << 18) for found in sizes]
    return {"pools_kib": [[QUOTA_MIB << 10], [3072 << 10]], "status": 0}, {"pools_kib": pools, "status": ran.status}


# --------------------------------------------------------------------------------------------------- the compute slice

FIRST = tuple(range(40))
SECOND = tuple(range(48, 96))
WIDE = "ffffffffffffffffffffffffff"
"""All 104 CUs of an MI210."""


def hex_of(cus: Iterable[int]) -> str:
    return f"{sum(1 << cu for cu in cus):x}"


def on_queues(asked: list[dict[str, Any]]) -> dict[str, list[str]]:
    """gpu_id -> the masks that its compute queues ended with, each once; ``none``: a queue without a mask."""
    queues: dict[tuple[int, int], tuple[int, str]] = {}
    for request in asked:
        key = (request["pid"], request.get("q", -1))
        if request["op"] == "CREATE_QUEUE" and request["type"] in (0, 2) and not request["err"]:
            queues[key] = (request["gpu"], "none")
        elif request["op"] == "SET_CU_MASK" and not request["err"]:
            queues[key] = (request["gpu"], f"{int(request['mask'], 16):x}")
    masks: dict[str, set[str]] = {}
    for gpu, mask in queues.values():
        masks.setdefault(str(gpu), set()).add(mask)
    return {gpu: sorted(found) for gpu, found in sorted(masks.items())}


SITUATIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "plain_streams": (("streams:2",), {}),
    "unsetenv": (("unsetenv:HSA_CU_MASK", "streams:2"), {"HSA_CU_MASK": "0:0-39;1:48-95"}),
    "setenv_to_the_whole_gpu": (("setenv:HSA_CU_MASK=0:0-103;1:0-103", "streams:2"), {}),
    "environment_of_the_whole_gpu": (("streams:2",), {"HSA_CU_MASK": "0:0-103;1:0-103"}),
    "skip_init": (("streams:2",), {"HSA_CU_MASK_SKIP_INIT": "1"}),
    "empty_environment": (("/usr/bin/env", "-i", "/parts/ways", "streams:2"), {}),
    "global_mask_of_80": (("streams:2",), {"ROC_GLOBAL_CU_MASK": "0xffffffffffffffffffff"}),
    "stream_mask_wider": ((f"mask:{WIDE}",), {}),
    "stream_mask_outside": ((f"mask:{hex_of(range(96, 104))}",), {}),
    "raw_queue": (("/parts/kfdclient", "--queue", "--mask", WIDE, "--count", "1"), {}),
    "reversed_by_rocr": (("streams:2",), {"ROCR_VISIBLE_DEVICES": "1,0"}),
    "reversed_by_hip": (("streams:2",), {"HIP_VISIBLE_DEVICES": "1,0"}),
    "reversed_by_both": (("streams:2",), {"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1,0"}),
    "second_gpu_only": (("streams:2",), {"ROCR_VISIBLE_DEVICES": "1"}),
    "second_gpu_alone_is_mounted": (("streams:2",), {"gpus": (1,)}),
    "gate_without_visible_variables_and_user_mask": (("streams:2", f"mask:{WIDE}"), {}),
}


def by_situation(words: tuple[str, ...], how: dict[str, Any]) -> Case:
    """Whatever is set, every compute queue has the slice's mask of the GPU that it is on."""

    def run(bed: Any, runtime: Any) -> Figures:
        here = bed("2*mi210")
        here.slice("a", (0, QUOTA_MIB, CuSet(FIRST)), (1, QUOTA_MIB, CuSet(SECOND)))
        ran = here.run(*words, **how)
        ids = [str(p.kfd_gpu_id) for p in here.inventory.partitions]
        want = {ids[0]: [hex_of(FIRST)], ids[1]: [hex_of(SECOND)]}
        if "ROC_GLOBAL_CU_MASK" in how:  # what it leaves of the second slice; the runtime's own queue has no part in it
            want[ids[1]] = [hex_of(range(48, 80)), hex_of(SECOND)]
        if how.get("ROCR_VISIBLE_DEVICES") == "1" or how.get("gpus") == (1,):
            del want[ids[0]]
        if words[0] == "/parts/kfdclient":
            del want[ids[1]]
        return {"masks": want, "status": 0}, {"masks": on_queues(ran.asked), "status": ran.status}

    return run


for _name, (_words, _how) in SITUATIONS.items():
    CASES[f"mask_{_name}"] = by_situation(_words, _how)


@case
def mask_inside_the_slice_stands(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, CuSet(FIRST)))
    ran = here.run("mask:ffff")
    gpu = str(here.inventory.partitions[0].kfd_gpu_id)
    found = on_queues(ran.asked).get(gpu, [])
    return {"narrow": True, "others": True, "status": 0}, {
        "narrow": "ffff" in found,
        "others": set(found) <= {"ffff", hex_of(FIRST)},
        "status": ran.status,
    }


@case
def mask_of_two_slices_in_two_processes(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, CuSet(FIRST)))
    here.slice("b", (0, QUOTA_MIB, CuSet(SECOND)))
    gpu = str(here.inventory.partitions[0].kfd_gpu_id)
    got = {name: on_queues(here.run("streams:2", f"mask:{WIDE}", slices=[name]).asked).get(gpu) for name in "ab"}
    return {"a": [hex_of(FIRST)], "b": [hex_of(SECOND)]}, got


@case
def mask_of_two_slices_in_one_process_is_both(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, CuSet(FIRST)))
    here.slice("b", (0, QUOTA_MIB, CuSet(SECOND)))
    ran = here.run("streams:2")
    gpu = str(here.inventory.partitions[0].kfd_gpu_id)
    return {"masks": {gpu: [hex_of(FIRST + SECOND)]}}, {"masks": on_queues(ran.asked)}


@case
def mask_never_leaves_an_xcc_without_a_cu(bed: Any, runtime: Any) -> Figures:
    """MI300X: a user's mask that meets the slice on four of eight XCCs only gives way to the slice's own."""
    if runtime.number < (5, 7):
        return {"known": False}, {"known": False}
    here = bed("mi300x")
    cus = tuple(range(76))
    here.slice("a", (0, QUOTA_MIB, CuSet(cus)))
    outside = hex_of(range(72, 104))
    ran = here.run("streams:1", f"mask:{outside}")
    gpu = str(here.inventory.partitions[0].kfd_gpu_id)
    return {"masks": {gpu: [hex_of(cus)]}, "status": 0}, {"masks": on_queues(ran.asked), "status": ran.status}


@case
def mask_of_whole_wgps(bed: Any, runtime: Any) -> Figures:
    """A GPU of WGPs, and a mask in its bits: HIP counts WGPs there, the KFD counts CUs."""
    model = "rx9070xt" if runtime.number >= (6, 4) else "rx7900xtx"
    if runtime.number < (5, 7):
        return {"known": False}, {"known": False}
    here = bed(model)
    cus = tuple(range(16))
    here.slice("a", (0, QUOTA_MIB, CuSet(cus)))
    ran = here.run("streams:1", "mask:ffffffff")
    gpu = str(here.inventory.partitions[0].kfd_gpu_id)
    return {"masks": {gpu: [hex_of(cus)]}, "status": 0}, {"masks": on_queues(ran.asked), "status": ran.status}


def set_priority(directory: Path, ceiling: int) -> None:
    """Write the ceiling of GPU 0 into a policy, as the daemon would."""
    fields = dict(ffi.typeof("struct avg_policy").fields)
    at = fields["gpu"].offset + dict(ffi.typeof("struct avg_policy_gpu").fields)["priority"].offset
    with (directory / "policy").open("r+b") as file, mmap.mmap(file.fileno(), 0) as words:
        words[at : at + 4] = struct.pack("=I", ceiling)


@case
def priority_never_above_the_ceiling(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    here.slice("a", (0, QUOTA_MIB, None))
    (here.folder / "slices" / "a" / "policy").chmod(0o644)
    set_priority(here.folder / "slices" / "a", 5)
    ran = here.run("streams:1", "priority")
    compute = {(r["pid"], r["q"]) for r in ran.asked if r["op"] == "CREATE_QUEUE" and r["type"] in (0, 2)}
    seen = [
        r["prio"] for r in ran.asked if r["op"] in ("CREATE_QUEUE", "UPDATE_QUEUE") and (r["pid"], r["q"]) in compute
    ]
    return {"highest": 5, "lowest": 0, "status": 0}, {"highest": max(seen), "lowest": min(seen), "status": ran.status}


# ------------------------------------------------------------------------------------------------------ the HIP front


def front_bed(bed: Any, runtime: Any, model: str = "2*mi210", cus: tuple[int, ...] = FIRST) -> Any:
    here = bed(model)
    here.slice("a", (0, QUOTA_MIB, CuSet(cus)))
    return here


@case
def front_reports_the_cus_of_the_slice(bed: Any, runtime: Any) -> Figures:
    here = bed("2*mi210")
    here.slice("a", (0, QUOTA_MIB, CuSet(FIRST)), (1, QUOTA_MIB, CuSet(SECOND)))
    lines = [line for line in here.run("questions").lines if line["op"] == "questions"]
    got = [
        {line["attribute_cus"], line["prop_cus"], *(v[2] for k, v in line.items() if k.startswith("hipGetDeviceProp"))}
        for line in lines
    ]
    return {"cus": [[40], [48]]}, {"cus": [sorted(found) for found in got]}


@case
def front_reports_the_cus_of_the_gpu_where_switched_so(bed: Any, runtime: Any) -> Figures:
    here = front_bed(bed, runtime)
    got = {}
    for name in ("AMDVGPU_REPORT_CUS", "AMDVGPU_HIP_FRONT"):
        line = next(line for line in here.run("questions", **{name: "0"}).lines if line["op"] == "questions")
        got[name] = [line["attribute_cus"], line["prop_cus"]]
    return {"AMDVGPU_REPORT_CUS": [104, 104], "AMDVGPU_HIP_FRONT": [104, 104]}, got


@case
def front_reports_wgps_where_the_runtime_does(bed: Any, runtime: Any) -> Figures:
    if runtime.number < (5, 7):
        return {"known": False}, {"known": False}
    here = front_bed(bed, runtime, "rx9070xt" if runtime.number >= (6, 4) else "rx7900xtx", tuple(range(16)))
    line = next(line for line in here.run("questions").lines if line["op"] == "questions")
    return {"attribute": 8, "prop": 8}, {"attribute": line["attribute_cus"], "prop": line["prop_cus"]}


@case
def front_answers_callers_by_address(bed: Any, runtime: Any) -> Figures:
    """By dlsym on a handle, on RTLD_DEFAULT, and by hipGetProcAddress (which 6.1 brought)."""
    here = front_bed(bed, runtime)
    ran = here.run("proc:dlsym", "proc:default", "proc:hip")
    return {"cus": [40, 40, 40 if runtime.number >= (6, 1) else -1]}, {
        "cus": [line["cus"] for line in ran.lines if line["op"] == "proc"]
    }


CTYPES = """
import ctypes
hip = ctypes.CDLL("%s")
ask = hip.hipDeviceGetAttribute
count = ctypes.c_int(-1)
print(ask(ctypes.byref(count), 63, 0), count.value)
"""


@case
def front_answers_a_runtime_loaded_by_python(bed: Any, runtime: Any) -> Figures:
    """The address is fetched before any call was made, so before the runtime itself has done anything."""
    here = front_bed(bed, runtime)
    ran = here.run("/usr/bin/python3", "-c", CTYPES % runtime.library.name)
    return {"answer": "0 40", "status": 0}, {"answer": ran.out.strip(), "status": ran.status}


LAUNCHES = ("host", "spt", "multi", "module", "modulemulti")
"""Cooperative launches: of a host function or of a module's, on one device or on each."""
NOT_COOPERATIVE = ("plain", "extmulti")


@case
def front_refuses_a_cooperative_grid_that_cannot_run_at_once(bed: Any, runtime: Any) -> Figures:
    """The kernel runs 32 blocks of 64 a CU: 1280 fit 40 CUs, and 3328 the whole GPU, which the runtime goes by."""
    if not (runtime.parts / "nothing.hsaco").exists():
        return {"known": False}, {"known": False}
    here = bed("2*mi210")
    here.slice("a", (0, QUOTA_MIB, CuSet(FIRST)), (1, QUOTA_MIB, CuSet(FIRST)))
    known = LAUNCHES if runtime.number >= (5, 7) else LAUNCHES[:3]
    # Not to the runtime's own end, which was once seen to wait for ever over softkfd: 6.4.3, without the front.
    words = [f"cooperative:{how}:{blocks}" for how in known for blocks in (1280, 1281, 3328)]
    words += [f"cooperative:{how}:3328" for how in NOT_COOPERATIVE] + ["quit"]
    got = {}
    for name, env in (("with", {}), ("without", {"AMDVGPU_HIP_FRONT": "0"})):
        lines = [line for line in here.run(*words, **env).lines if line["op"] == "cooperative"]
        got[name] = {how: [x["error"] for x in lines if x["how"] == how] for how in known + NOT_COOPERATIVE}
    large = "hipErrorCooperativeLaunchTooLarge"
    other = {key: [OK] for key in NOT_COOPERATIVE}
    return {
        "with": {key: [OK, large, large] for key in known} | other,
        "without": {key: [OK, OK, OK] for key in known} | other,
    }, got


@case
def front_occupancy_agrees(bed: Any, runtime: Any) -> Figures:
    if not (runtime.parts / "nothing.hsaco").exists():
        return {"known": False}, {"known": False}
    line = next(line for line in front_bed(bed, runtime).run("occupancy").lines if line["op"] == "occupancy")
    return {"per": 32, "grid": 1280}, {"per": line["per"], "grid": line["grid"]}


@case
def front_lets_pass_what_cached_memory_can_serve(bed: Any, runtime: Any) -> Figures:
    here = front_bed(bed, runtime)
    ran = here.run("take:async:600:3", "drop", "take:async:600:3", "drop", "take:async:600:3")
    return {"granted": [3, 3, 3], "status": 0}, {
        "granted": [line["granted"] for line in ran.lines if line["op"] == "take"],
        "status": ran.status,
    }


@case
def front_refuses_more_than_there_is_and_leaves_the_rest(bed: Any, runtime: Any) -> Figures:
    """The 7.2 pool would take all of it, fail, and keep it."""
    here = front_bed(bed, runtime)
    ran = here.run("take:async:4096:1", "take:async:1024:1", "take:malloc:512:1")
    return {"errors": [OUT, OK, OK], "status": 0}, {
        "errors": [line["error"] for line in ran.lines if line["op"] == "take"],
        "status": ran.status,
    }


def by_late_launch(how: str) -> Case:
    """A graph made ready in time: 6.4.3 and 7.2.4 crash where it then gets no memory. Once there is some, it runs."""

    def run(bed: Any, runtime: Any) -> Figures:
        if runtime.number < (5, 7):
            return {"known": False}, {"known": False}
        ran = front_bed(bed, runtime).run(f"late:{how}:1024:1200")
        # 5.7 takes a graph's memory when the node is added, so it is the other allocation that finds no room.
        ready, first = (OUT, OK) if runtime.number < (6,) else (OK, OUT)
        return {"ready": ready, "launches": [first, OK], "status": 0}, {
            "ready": next(line["error"] for line in ran.lines if line["op"] == "ready"),
            "launches": [line["error"] for line in ran.lines if line["op"] == "launch"][:2],
            "status": ran.status,
        }

    return run


for _form, _called in (("plain", "a_launch"), ("spt", "an_spt_launch"), ("child", "a_launch_of_a_child_graph")):
    CASES[f"front_refuses_{_called}_for_which_there_is_no_room"] = by_late_launch(_form)


@case
def front_switched_off_the_gate_holds(bed: Any, runtime: Any) -> Figures:
    here = front_bed(bed, runtime)
    peaks = {}
    for way in ("malloc", "array", "async"):
        ran = here.run(f"take:{way}:{STEP_MIB}:40", AMDVGPU_HIP_FRONT="0")
        peaks[way] = SHARED["peak_mib"](ran.asked, here.inventory.partitions[0].kfd_gpu_id)
    return dict.fromkeys(peaks, between(QUOTA_MIB - STEP_MIB - KEPT_MIB, QUOTA_MIB)), peaks


@case
def front_is_not_there_without_a_slice(bed: Any, runtime: Any) -> Figures:
    here = bed("mi210")
    line = next(line for line in here.run("questions", slices=[]).lines if line["op"] == "questions")
    return {"cus": 104, "total_mib": here.inventory.partitions[0].vram_bytes / MIB}, {
        "cus": line["attribute_cus"],
        "total_mib": line["total"] / MIB,
    }


# ------------------------------------------------------------------------------- where only the requests are reached


@case
def by_audit_the_gate_holds_without_its_front(bed: Any, runtime: Any) -> Figures:
    here = front_bed(bed, runtime, "mi210")
    ran = here.run("questions", "streams:1", f"take:malloc:{STEP_MIB}", gated=False, LD_AUDIT="/parts/libamdvgpu.so")
    want, got = filled(here, ran)
    line = next(line for line in ran.lines if line["op"] == "questions")
    gpu = str(here.inventory.partitions[0].kfd_gpu_id)
    return want | {"total_mib": QUOTA_MIB, "cus": 104, "masks": {gpu: [hex_of(FIRST)]}}, got | {
        "total_mib": line["total"] / MIB,
        "cus": line["attribute_cus"],
        "masks": on_queues(ran.asked),
    }


def by_place(how: str) -> Case:
    """HIP in a namespace of its own, or bound to its own libraries first: reached by LD_AUDIT, not by the file."""

    def run(bed: Any, runtime: Any) -> Figures:
        here = front_bed(bed, runtime, "mi210")
        got = {}
        for name, options in (("file", {}), ("audit", {"gated": False, "LD_AUDIT": "/parts/libamdvgpu.so"})):
            ran = here.run("/parts/elsewhere", how, "/parts/libelsewhere.so", **options)
            line = next(line for line in ran.lines if line["op"] == "elsewhere")
            got[name] = [line["failed"], line["total"] // MIB, line["cus"], line["granted"]]
        whole = here.inventory.partitions[0].vram_bytes // MIB
        held = [0, QUOTA_MIB, 104, between(14, 16)]
        return {"file": [0, whole, 104, 64], "audit": held}, got

    return run


CASES["in_another_namespace_audit_holds_and_the_file_does_not"] = by_place("namespace")
CASES["bound_deep_audit_holds_and_the_file_does_not"] = by_place("deep")


# --------------------------------------------------------------------------------------------------------- the matrix


@pytest.mark.parametrize("name", CASES)
def test_the_gate_holds_under_the_real_runtime(name: str, runtime: Any, bed: Any, table: Any, shared: Any) -> None:
    SHARED.update(shared)
    want, got = CASES[name](bed, runtime)
    table.setdefault(runtime.version, {})[name] = {"ok": want == got, "want": want, "got": got}
    assert got == want
