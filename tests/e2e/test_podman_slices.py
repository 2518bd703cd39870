"""The main job with real podman: the daemon's own CDI file, the gate in the container, a program that takes VRAM.

The GPUs are simulated (softkfd answers on plain files that stand at /dev/kfd and the render nodes), all else is real:
daemon, command line, CDI file, podman, runc and crun, the mounted policy and ledger, the gate loaded by the container's
own dynamic linker. The program is kfdclient, which makes the requests that ROCm makes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import amdvgpud._abi

pytestmark = pytest.mark.podman

GIB = 2**30
IMAGE = "localhost/glibc:1"
ALICE, BOB, CAROL = 4 * GIB, 2 * GIB, GIB


class Answers:
    """What kfdclient said, line by line, and how it ended."""

    def __init__(self, code: int, output: str) -> None:
        self.code = code
        self.output = output
        self.lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    def of(self, op: str, *keys: str) -> list[tuple[Any, ...]]:
        return [tuple(line[key] for key in keys) for line in self.lines if line["op"] == op]


def ask(
    served: Any, devices: list[str], *argv: str, before: str = "", options: tuple[str, ...] = (), alone: bool = True
) -> Answers:
    """kfdclient with ``argv`` in a container with ``devices``; ``before`` stands before its name in the script."""
    script = f"{before} /bin/kfdclient {' '.join(argv)}"
    if alone:
        served.settle()  # what the last container held comes back with a tick of the daemon
    done = served.corner.container(devices, "sh", "-c", script, options=options)
    return Answers(done.code, done.output)


def used(served: Any, name: str) -> dict[str, int]:
    return {share["partition"]: share["used_bytes"] for share in served.usage(name)["shares"]}


def masks_of(served: Any, before: int) -> list[tuple[int, int]]:
    """(gpu_id, mask) of each CU mask that the simulated KFD was told since its log was ``before`` bytes long."""
    log = served.corner.path("/run/amdvgpud/simulated/log.jsonl").read_bytes()[before:]
    told = [line for line in map(json.loads, log.splitlines()) if line["op"] == "SET_CU_MASK"]
    return [(line["gpu"], int(line["mask"], 16)) for line in told]


def log_size(served: Any) -> int:
    size: int = served.corner.path("/run/amdvgpud/simulated/log.jsonl").stat().st_size
    return size


def granted_masks(served: Any, name: str) -> dict[int, int]:
    """gpu_id -> mask, from the slice.json that the container sees."""
    text = served.corner.path(f"/run/amdvgpud/slices/{name}/guest/slice.json").read_text()
    return {gpu["kfd_gpu_id"]: int(gpu["cu_mask"], 16) for gpu in json.loads(text)["gpus"]}


def one_slice_holds(served: Any) -> None:
    answers = ask(served, ["alice"])
    assert answers.of("gpu", "index", "total", "available") == [(0, ALICE, ALICE)], answers.output
    assert answers.of("alloc", "result", "held", "available") == [
        ("ok", 1 * GIB, 3 * GIB),
        ("ok", 2 * GIB, 2 * GIB),
        ("ok", 3 * GIB, 1 * GIB),
        ("ok", 4 * GIB, 0),
        ("ENOMEM", 4 * GIB, 0),
    ]
    assert answers.code == 0


def test_a_container_is_held_to_its_slice(served: Any) -> None:
    one_slice_holds(served)


def test_a_container_of_crun_is_held_to_its_slice(crun_served: Any) -> None:
    one_slice_holds(crun_served)


def test_a_queue_gets_the_slices_mask_though_nobody_asks_for_one(served: Any) -> None:
    before = log_size(served)
    answers = ask(served, ["alice"], "--queue", "--count", "0")
    assert answers.code == 0, answers.output
    assert masks_of(served, before) == list(granted_masks(served, "alice").items())


def test_two_slices_on_two_gpus_are_two_gpus_each_with_its_own_quota_and_mask(served: Any) -> None:
    answers = ask(served, ["alice", "bob"])
    assert answers.of("gpu", "total") == [(ALICE,), (BOB,)], answers.output
    assert answers.of("end", "held") == [(ALICE,)]
    before = log_size(served)
    answers = ask(served, ["alice", "bob"], "--gpu", "1", "--queue")
    assert answers.of("end", "held") == [(BOB,)], answers.output
    assert masks_of(served, before) == list(granted_masks(served, "bob").items())


def test_the_variables_of_one_device_neither_hide_nor_shrink_anothers_gpu(served: Any) -> None:
    """pair sets ROCR_VISIBLE_DEVICES to its own two GPUs and HSA_CU_MASK for them; podman keeps the last of each."""
    variables = served.corner.container(["alice", "pair"], "env").output
    assert "ROCR_VISIBLE_DEVICES" not in variables
    assert "HSA_CU_MASK" not in variables
    assert "ROCR_VISIBLE_DEVICES=GPU-" in served.corner.container(["pair"], "env").output
    answers = ask(served, ["alice", "pair"], "--count", "0")
    assert answers.of("gpu", "total") == [(ALICE,), (GIB,), (GIB,)], answers.output


def test_two_slices_of_one_gpu_are_one_gpu_of_both_quotas_and_both_masks(served: Any) -> None:
    before = log_size(served)
    answers = ask(served, ["alice", "carol"], "--queue")
    assert answers.of("gpu", "total") == [(ALICE + CAROL,)], answers.output
    assert answers.of("end", "held") == [(ALICE + CAROL,)]
    ((gpu_id, mask),) = granted_masks(served, "alice").items()
    assert masks_of(served, before) == [(gpu_id, mask | granted_masks(served, "carol")[gpu_id])]


def test_a_gpu_that_is_not_in_the_slice_is_not_there(served: Any) -> None:
    answers = ask(served, ["alice"], "--gpu", "1", "--count", "0")
    assert (answers.code, answers.of("end", "result")) == (3, [("no such GPU",)])


def test_an_empty_environment_changes_nothing(served: Any) -> None:
    answers = ask(served, ["alice"], "--step", "4G", before="env -i")
    assert answers.of("alloc", "result") == [("ok",), ("ENOMEM",)], answers.output


def test_user_1000_is_held_to_the_same_account_as_root(served: Any) -> None:
    """Root takes 3 GiB and holds them; uid 1000 of the same container is refused 2 GiB and granted half of one."""
    script = """
        sleep 100 | kfdclient --count 3 --hold > /tmp/root &
        until grep -q hold /tmp/root; do sleep 0.05; done
        for size in 2G 512M; do
            setpriv --reuid=1000 --regid=1000 --clear-groups /bin/kfdclient --step $size --count 1
        done
    """
    served.settle()
    done = served.corner.container(["alice"], "sh", "-c", script)
    answers = Answers(done.code, done.output)
    assert answers.of("alloc", "result", "held") == [("ENOMEM", 0), ("ok", GIB // 2)], answers.output
    alone = ask(served, ["alice"], options=("--user=1000:1000",))
    assert alone.of("end", "held") == [(ALICE,)], alone.output


def test_root_of_the_container_takes_no_more_after_it_has_tried_to_change_the_policy(served: Any) -> None:
    attacks = "; ".join(
        f"({attack}) 2>/dev/null"
        for attack in (
            "echo 1 > /run/amdvgpu/alice/policy",
            "truncate -s 0 /run/amdvgpu/alice/policy",
            "rm -f /run/amdvgpu/alice/policy",
            "chmod 0 /run/amdvgpu/alice/policy",
            "umount -l /run/amdvgpu/alice",
            "mount -o remount,bind,rw /run/amdvgpu/alice",
            "umount -l /run/amdvgpu",
            "mv /run/amdvgpu /run/gone",
        )
    )
    answers = ask(served, ["alice"], before=f"{attacks};")
    assert answers.of("end", "held") == [(ALICE,)], answers.output


def beside_the_mounted_policy_is_no_room(served: Any) -> None:
    """Of two slices of one GPU the quotas add, so root of a container would raise its own by a copy of its policy."""
    copy = "mkdir /run/amdvgpu/more && cp /run/amdvgpu/alice/* /run/amdvgpu/more/;"
    answers = ask(served, ["alice"], before=copy)
    assert "Read-only file system" in answers.output
    assert answers.of("end", "held") == [(ALICE,)], answers.output


def test_root_of_the_container_cannot_put_a_policy_beside_the_mounted_one(served: Any) -> None:
    beside_the_mounted_policy_is_no_room(served)


def test_nor_can_root_of_a_container_of_crun(crun_served: Any) -> None:
    beside_the_mounted_policy_is_no_room(crun_served)


@pytest.fixture
def holding(served: Any) -> Any:
    """A container that has taken 3 GiB of alice and stays."""
    served.settle()
    corner = served.corner
    script = "sleep 1000 | exec kfdclient --count 3 --hold"
    made = corner.podman(
        "run",
        "--detach",
        "--name=holder",
        corner.cgroup_parent,
        "--device=amdvgpu.io/slice=alice",
        IMAGE,
        "sh",
        "-c",
        script,
    )
    assert made.code == 0, made.output
    served.eventually(lambda: '"hold"' in corner.podman("logs", "holder").output, True)
    yield served
    corner.podman("rm", "--force", "--time=0", "holder")


def test_what_a_container_holds_shows_and_comes_back_when_it_is_killed(holding: Any) -> None:
    (partition,) = used(holding, "alice")
    holding.eventually(lambda: used(holding, "alice"), {partition: 3 * GIB})
    assert holding.usage("alice")["state"] == "running"
    second = [ask(holding, ["alice"], "--step", size, "--count", "1", alone=False) for size in ("2G", "512M")]
    assert [answers.of("alloc", "result") for answers in second] == [[("ENOMEM",)], [("ok",)]]
    assert holding.corner.podman("kill", "--signal=KILL", "holder").code == 0
    holding.eventually(lambda: used(holding, "alice"), {partition: 0})


def test_a_container_that_starts_again_in_a_new_pid_namespace_starts_at_zero(holding: Any) -> None:
    """With the same process numbers; a guest cannot judge the dead of another namespace, the daemon's tick does."""
    corner = holding.corner
    assert corner.podman("kill", "--signal=KILL", "holder").code == 0
    holding.settle()
    assert corner.podman("start", "holder").code == 0
    holding.eventually(lambda: corner.podman("logs", "holder").output.count('"hold"'), 2)
    answers = Answers(0, corner.podman("logs", "holder").output)
    assert answers.of("gpu", "available") == [(ALICE,), (ALICE,)], answers.output


def test_the_ledger_tool_of_the_wheel_tells_a_container_of_its_own_slice(holding: Any) -> None:
    tool = Path(amdvgpud._abi.__file__).with_name("amdvgpu-ledger")
    done = holding.corner.container(
        ["alice"], "amdvgpu-ledger", "--json", options=("--volume", f"{tool}:/bin/amdvgpu-ledger:ro")
    )
    assert done.code == 0, done.output
    told = json.loads(done.output)["slices"]
    assert [(item["slice"], [gpu["used_bytes"] for gpu in item["gpus"]]) for item in told] == [("alice", [3 * GIB])]


def test_a_deleted_slice_cannot_be_asked_for_any_more(served: Any) -> None:
    served.create("0-short", "--gpu", "1", "--vram", "1GiB", "--compute", "10%")
    assert ask(served, ["0-short"], "--step", "1G").of("end", "held") == [(GIB,)]
    served.settle()
    assert served.ctl("slice", "delete", "0-short").code == 0
    answer = served.corner.container(["0-short"], "true")
    assert (answer.code, answer.output) == (
        126,
        "Error: setting up CDI devices: unresolvable CDI devices amdvgpu.io/slice=0-short",
    )


def test_the_command_line_says_that_podman_resolves_the_slice(served: Any) -> None:
    answer = served.ctl("cdi", "validate", "alice")
    assert answer.code == 0, answer.output
    assert re.search(r"podman [0-9.]+ would resolve it", " ".join(answer.output.split()).replace(": ", " "))


def test_the_file_is_where_everybody_looks_and_readable(served: Any) -> None:
    file: Path = served.corner.path("/run/cdi/amdvgpu.io-slice.json")
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    assert file.stat().st_mode & 0o7777 == 0o644


def test_a_container_that_has_taken_its_gate_out_is_told_by_the_kernels_figures(served: Any) -> None:
    """It may mount, and takes ld.so.preload away. What stands for the kernel here it preloads itself. Beside it one
    with the gate, which is no news."""
    served.settle()
    preload = served.corner.container(["alice"], "cat", "/etc/ld.so.preload").output.split()
    (kernel,) = (path for path in preload if "softkfd" in path)
    hold = "/bin/kfdclient --step 1G --count 1 --hold"
    evade = f"umount /etc/ld.so.preload && sleep 60 | LD_PRELOAD={kernel} {hold}"
    for name, script, rights in (("without", evade, ("--cap-add", "SYS_ADMIN")), ("with", f"sleep 60 | {hold}", ())):
        where = ("--device", "amdvgpu.io/slice=alice", served.corner.cgroup_parent)
        started = served.corner.podman(
            "run", "--rm", "--detach", "--name", name, *where, *rights, IMAGE, "sh", "-c", script
        )
        assert started.code == 0, started.output

    def figures() -> list[Any]:
        (share,), seen = served.usage("alice")["shares"], served.usage("alice")["unmanaged_processes"]
        return [share["used_bytes"], share["driver_bytes"], share["untracked_bytes"], seen]

    served.eventually(figures, [GIB, 2 * GIB, GIB, 1])
    shown = served.ctl("slice", "show", "alice").output
    assert [line.split()[-1] for line in shown.splitlines() if "kfdclient" in line] == ["yes", "no"]
    assert served.corner.podman("rm", "--force", "--time", "0", "without", "with").code == 0
    served.eventually(figures, [0, 0, 0, 0])
