"""amdvgpuctl and the daemon as programs, on a simulated machine, with the real gate: leases from beginning to end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from amdvgpud.core import wire
from amdvgpud.ctl.client import Client
from tests.ctl.stand_ins import Start, served
from tests.ctl.test_run_gate import TAKER

pytestmark = pytest.mark.root

Ctl = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def socket(public_all_along: Path) -> Iterator[str]:
    """The daemon's, which has an MI300X and an RX 9070 XT that are simulated."""
    home = public_all_along / "daemon"
    home.mkdir(mode=0o755)
    yield from served(home, "--simulate=mi300x,rx9070xt")


@pytest.fixture
def ctl(start: Start, socket: str) -> Ctl:
    return lambda *arguments: start("--socket", socket, *arguments)


@pytest.fixture(scope="module")
def taker(public_all_along: Path) -> Path:
    program = public_all_along / "taker-of-daemon"
    subprocess.run(["gcc", "-O1", "-o", program, "-x", "c", "-"], input=TAKER, text=True, check=True)
    return program


@pytest.fixture
def gpu_id(socket: str) -> str:
    """Of the first GPU, as the KFD numbers it."""
    answer, _ = Client(socket).get("/v1/gpus/0", wire.GpuView)
    return str(answer.partitions[0].kfd_gpu_id)


ASKED = ("--gpu", "0", "--vram", "4GiB", "--compute", "25%")


def test_a_command_is_held_to_its_lease_and_is_shown_while_it_lasts(
    ctl: Ctl, taker: Path, gpu_id: str, socket: str
) -> None:
    shows = f"{sys.executable} -c 'from amdvgpud.ctl.cli import main; main()' --socket {socket} slice show"
    process = ctl("run", *ASKED, "--", str(taker), f'{shows} -o json "$AMDVGPU_SLICE"', gpu_id)
    out, err = process.communicate(timeout=60)
    said, _, shown = out.partition("\n")
    item = json.loads(shown)
    assert (process.returncode, said) == (0, "4096 MiB available, 16 blocks, then Cannot allocate memory")
    assert err.endswith("; enforced by: gate\n")
    assert (item["state"], item["shares"][0]["used_bytes"]) == ("running", 4 << 30)
    assert Client(socket).get("/v1/leases", wire.LeaseList)[0].leases == []
    assert Client(socket).get("/v1/slices", wire.SliceList)[0].slices == []


def test_a_command_has_a_cgroup_of_its_own_that_the_daemon_knows(ctl: Ctl, socket: str) -> None:
    """Where systemd runs the machine it is a scope; a machine without a v2 tree has no cgroup to give."""
    has_tree = any(" - cgroup2 " in line for line in Path("/proc/self/mountinfo").read_text().splitlines())
    process = ctl("run", "-q", *ASKED, "--", "sh", "-c", "cat /proc/self/cgroup; echo; exec sleep 600")
    assert process.stdout is not None
    lines = list(iter(process.stdout.readline, "\n"))
    cgroup = next(line.removeprefix("0::").strip() for line in lines if line.startswith("0::"))
    try:
        name = cgroup.rpartition("/")[2]
        assert bool(re.fullmatch(r"amdvgpu-run-[0-9a-f]{64}\.scope", name)) == has_tree
        if not has_tree:
            return
        (item,) = Client(socket).get("/v1/slices", wire.SliceList)[0].slices
        (container,) = Client(socket).get(f"/v1/slices/{item.name}", wire.SliceView)[0].containers
        assert (name, item.enforced_by) == (f"amdvgpu-run-{container.id}.scope", "gate")
    finally:
        process.terminate()
        process.wait(timeout=60)
    assert not list(Path("/sys/fs/cgroup").glob(f"**/{name}"))


def test_two_commands_have_slices_of_their_own(ctl: Ctl, taker: Path, gpu_id: str) -> None:
    first = ctl("run", "-q", *ASKED, "--", str(taker), "cat /run/amdvgpu/*/slice.json", gpu_id)
    second = ctl("run", "-q", *ASKED, "--", str(taker), "cat /run/amdvgpu/*/slice.json", gpu_id)
    masks = []
    for process in (first, second):
        said, _, document = process.communicate(timeout=60)[0].partition("\n")
        assert said == "4096 MiB available, 16 blocks, then Cannot allocate memory"
        masks.append(int(json.loads(document)["gpus"][0]["cu_mask"], 16))
    assert masks[0].bit_count() == masks[1].bit_count() == 64


def test_the_lease_of_a_killed_amdvgpuctl_ends_by_itself(ctl: Ctl, socket: str) -> None:
    client = Client(socket)
    process = ctl("run", "-q", *ASKED, "--", "sh", "-c", "echo ready; exec sleep 600")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    since = client.get("/v1/events", wire.EventList, since="0")[0].last_id
    assert len(client.get("/v1/leases", wire.LeaseList)[0].leases) == 1
    process.kill()
    process.wait(timeout=60)
    while client.get("/v1/leases", wire.LeaseList)[0].leases:
        since = client.get("/v1/events", wire.EventList, since=str(since), wait="20s")[0].last_id
    assert client.get("/v1/slices", wire.SliceList)[0].slices == []


def test_a_quota_is_raised_under_a_running_command(ctl: Ctl, taker: Path, gpu_id: str, socket: str) -> None:
    # Below 1.1 GiB the gate sets nothing aside for the runtime's scratch, so all of it is there to be taken.
    create = ctl("slice", "create", "grows", "--gpu", "0", "--vram", "1GiB", "--compute", "25%")
    assert create.communicate(timeout=60)[1] == ""
    resize = f"{sys.executable} -c 'from amdvgpud.ctl.cli import main; main()' --socket {socket} slice resize grows"
    process = ctl(
        "run", "-q", "--slice", "grows", "--", str(taker), f"{resize} --vram 2GiB && {taker} {gpu_id}", gpu_id
    )
    out, _ = process.communicate(timeout=60)
    taken = "1024 MiB available, 4 blocks, then Cannot allocate memory"
    where = Client(socket).get("/v1/slices/grows", wire.SliceView)[0].shares[0].partition
    assert out.splitlines() == [taken, f"grows: 2 GiB and 64 CUs of {where}", taken]
    assert ctl("slice", "delete", "grows").communicate(timeout=60) == ("grows: deleted\n", "")
