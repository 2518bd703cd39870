"""amdvgpuctl on partition modes: what it asks and prints; then with a real daemon on simulated GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import amdvgpud._abi
from amdvgpud.core import wire
from amdvgpud.ctl.client import Client
from tests.ctl.stand_ins import GPU_ID, Ctl, FakeDaemon, Start, served

KFDCLIENT = Path(amdvgpud._abi.__file__).with_name("kfdclient")


def switched(**changes: object) -> wire.RepartitionView:
    view = wire.RepartitionView(
        gpu=GPU_ID,
        before="SPX",
        after="CPX",
        changed=True,
        partitions=8,
        index=1,
        memory="NPS1",
        memory_requested=None,
        lost=[],
        settled=True,
        note="it was put into CPX",
    )
    return msgspec.structs.replace(view, **changes)


@pytest.mark.parametrize(
    ("options", "query", "memory"),
    [
        ((), "", None),
        (("--dry-run",), "?dry_run=true", None),
        (("--force", "--memory", "nps4"), "?force=true", "nps4"),
        (("--dry-run", "--force"), "?dry_run=true&force=true", None),
    ],
)
def test_a_switch_is_one_request_and_its_note_is_what_is_printed(
    daemon: FakeDaemon, ctl: Ctl, options: tuple[str, ...], query: str, memory: str | None
) -> None:
    daemon.says("PUT", f"/v1/gpus/0/partition{query}", switched())
    done = ctl("gpu", "partition", "0", "cpx", *options)
    assert (done.exit_code, done.output) == (0, "it was put into CPX\n")
    (asked,) = daemon.asked
    assert asked.body == {"compute": "cpx", "memory": memory}


def test_a_refusal_is_one_line_and_exit_code_1(daemon: FakeDaemon, ctl: Ctl) -> None:
    daemon.refuses("PUT", "/v1/gpus/0/partition", 409, "KFD processes have it open: 4242 (python3)", [])
    done = ctl("gpu", "partition", "0", "cpx")
    assert (done.exit_code, done.stderr) == (1, "amdvgpuctl: KFD processes have it open: 4242 (python3)\n")


def test_proposals_are_two_tables_and_say_what_hard_and_soft_are(daemon: FakeDaemon, ctl: Ctl) -> None:
    proposal = wire.ModeProposal(
        modes={GPU_ID: "QPX"},
        alone=4,
        sharing=0,
        unplaced=0,
        cus_wasted=12,
        vram_wasted_bytes=1 << 30,
        switches=1,
        untouched=0,
        text="",
    )
    daemon.says(
        "GET",
        "/v1/suggest-modes?want=4x25%25%3A47GiB%2C1x5%3A1GiB",
        wire.ModeProposals(proposals=[proposal], busy=["x"]),
    )
    done = ctl("plan", "--suggest-mode", "--want", "4x25%:47GiB", "--want", "1x5:1GiB")
    assert (done.exit_code, done.output.splitlines()) == (
        0,
        [
            "PROPOSAL  ALONE  SHARING  UNPLACED  CUS-WASTED  VRAM-WASTED  SWITCHES  GPUS-UNUSED",
            "       1      4        0         0          12        1 GiB         1            0",
            "",
            "PROPOSAL  GPU                   MODE",
            "       1  GPU-0123456789abcdef  QPX",
            "alone: the driver keeps others off (hard); sharing: the gate and CU masks do (soft)",
            "looked past, as slices are on them: x",
        ],
    )


def test_a_wish_without_suggest_mode_is_a_wrong_command_line(ctl: Ctl) -> None:
    assert ctl("plan", "--want", "1x5:1GiB").exit_code == 2
    assert ctl("plan", "--suggest-mode").exit_code == 2


# ------------------------------------------------------------------------------------------------- with a real daemon

Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def socket() -> Iterator[str]:
    """Of a daemon with four MI300X, that its configuration wants in CPX, but for the second. On a tmpfs: the machine is
    thousands of files, and is written anew with each switch."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="avg") as name:
        Path(name).chmod(0o755)
        yield from served(Path(name), "--simulate=4*mi300x", "--partition-target=all=CPX,1=SPX")


@pytest.fixture
def run(start: Start, socket: str) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        process = start("--socket", socket, *arguments)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    return run


Answer = Callable[..., tuple[int, str, str]]


def gpu(socket: str, address: str) -> wire.GpuView:
    return Client(socket).get(f"/v1/gpus/{address}", wire.GpuView)[0]


@pytest.mark.root
def test_the_configured_modes_are_there_when_the_daemon_opens_its_doors(socket: str) -> None:
    gpus = sorted(Client(socket).get("/v1/gpus", wire.GpuList)[0].gpus, key=lambda g: g.id)
    assert [(g.compute_partition, len(g.partitions)) for g in gpus] == [
        ("CPX", 8),
        ("SPX", 1),
        ("CPX", 8),
        ("CPX", 8),
    ]


@pytest.mark.root
def test_a_slice_inside_a_partition_is_held_and_found_by_its_rank(run: Answer, socket: str) -> None:
    """On the host every node is visible, and partitions share their unique id: the partition is named by its rank."""
    of = gpu(socket, "0000:45:00.0")
    place = of.partitions[3]
    nodes = sorted(p.kfd_node for g in Client(socket).get("/v1/gpus", wire.GpuList)[0].gpus for p in g.partitions)
    rank = nodes.index(place.kfd_node)
    assert run("slice", "create", "inside", "--gpu", place.id, "--vram", "3GiB", "--compute", "25%")[0] == 0
    code, out, err = run("run", "--slice", "inside", "--", "sh", "-c", "echo $ROCR_VISIBLE_DEVICES")
    assert (code, out) == (0, f"{rank}\n"), err
    code, out, err = run("run", "--slice", "inside", "--", str(KFDCLIENT), "--gpu", str(rank), "--queue")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0, out + err
    taken = next(line for line in lines if line["op"] == "gpu" and line["index"] == rank)
    assert (taken["gpu_id"], taken["total"]) == (place.kfd_gpu_id, 3 << 30)
    assert [line["result"] for line in lines if line["op"] == "alloc"] == ["ok", "ok", "ok", "ENOMEM"]
    # The neighbouring partition is another GPU to the gate: nothing of it is this slice's.
    code, out, _ = run("run", "--slice", "inside", "--", str(KFDCLIENT), "--gpu", str(rank + 1))
    assert '"granted":0' in out


@pytest.mark.root
def test_a_running_command_is_named_and_its_gpu_stays_as_it_is(run: Answer, start: Start, socket: str) -> None:
    fifo = Path(socket).with_name("hold")
    os.mkfifo(fifo)
    held = start(
        *("--socket", socket, "run", "-q", "--gpu", "0000:65:00.0/1", "--vram", "2GiB", "--compute", "50%", "--"),
        *("sh", "-c", f"exec {KFDCLIENT} --count 0 --hold < {fifo}"),
    )
    writer = fifo.open("w")
    assert held.stdout is not None
    while '"hold"' not in held.stdout.readline():
        assert held.poll() is None
    code, _, err = run("gpu", "partition", "0000:65:00.0", "spx", "--force")
    assert code == 1
    assert "lease " in err
    assert "(amdvgpuctl run sh) holds slice" in err
    assert "KFD processes have it open: " in err
    assert "(kfdclient)" in err
    # It is a process of the host, which the KFD gives every GPU: the others cannot be switched either.
    code, _, err = run("gpu", "partition", "0000:05:00.0", "spx")
    assert code == 1
    assert "KFD processes have it open: " in err
    assert gpu(socket, "0000:65:00.0").compute_partition == "CPX"
    writer.close()
    held.communicate(timeout=60)
    assert held.returncode == 0
    code, out, err = run("gpu", "partition", "0000:05:00.0", "spx")
    assert (code, err) == (0, "")
    assert "was put from CPX into SPX (partitions: 1); it is number 3 now" in out


@pytest.mark.root
def test_a_slice_of_a_mode_that_is_gone_is_lost_and_works_again_when_it_is_back(run: Answer, socket: str) -> None:
    place = gpu(socket, "0000:65:00.0").partitions[2].id
    assert run("slice", "create", "comes-back", "--gpu", place, "--vram", "1GiB", "--compute", "25%")[0] == 0
    assert run("gpu", "partition", "0000:65:00.0", "qpx")[0] == 1
    assert run("gpu", "partition", "0000:65:00.0", "qpx", "--force")[0] == 0
    code, _, err = run("run", "--slice", "comes-back", "--", "true")
    assert (code, "is lost" in err) == (1, True)
    assert run("gpu", "partition", "0000:65:00.0", "cpx")[0] == 0
    now = gpu(socket, "0000:65:00.0").partitions[2]
    code, out, err = run("run", "--slice", "comes-back", "--", "sh", "-c", "cat /run/amdvgpu/comes-back/slice.json")
    assert code == 0, err
    (budget,) = json.loads(out)["gpus"]
    assert (budget["kfd_gpu_id"], now.id) == (now.kfd_gpu_id, place)
