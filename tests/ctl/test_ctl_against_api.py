"""amdvgpuctl against the real API over a real Node: that both mean the same by every request.

The Node stands on stand-in ports (two MI300X), so what is shown here is the talk, not the hardware.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from amdvgpud.core.model import Holder, Inventory, Slice
from amdvgpud.host.procs import process_alive, start_ticks
from amdvgpud.node import Node
from amdvgpud.serve.endpoints import Process
from amdvgpud.serve.metrics import Metrics
from amdvgpud.serve.rest import Api, ApiSettings
from tests.fakes import MemoryCdi, MemoryFiles, MemoryJournal, StillSysfs, an_inventory

ROOT = Path(__file__).resolve().parents[2]
FIRST = "GPU-00000000abcd0000"
SECOND = "GPU-00000000abcd0001"


@dataclass
class Ended:
    code: int
    out: str
    err: str


Say = Callable[..., Awaitable[Ended]]


def _process_of(pid: int) -> Process | None:
    ticks = start_ticks(pid)
    return None if ticks is None else Process(os.getuid(), ticks)


@dataclass
class FilesWithPolicy(MemoryFiles):
    """Stand-in files of which the policy can be read, as amdvgpuctl makes sure before it runs anything."""

    slices: Path = Path()

    def write(self, item: Slice, inventory: Inventory) -> None:
        super().write(item, inventory)
        guest = self.slices / item.name / "guest"
        guest.mkdir(parents=True, exist_ok=True)
        (guest / "policy").touch()


@pytest.fixture
async def say() -> AsyncIterator[Say]:
    """``say("slice list")``: amdvgpuctl with these words, in a process of its own, at a daemon of this test."""
    with tempfile.TemporaryDirectory(prefix="avg") as folder:  # not tmp_path: a socket's path has to fit 108 bytes
        run_dir = Path(folder)
        sysfs, cdi = StillSysfs(an_inventory(2)), MemoryCdi()
        files = FilesWithPolicy(slices=run_dir / "slices")

        def alive(holder: Holder) -> bool:
            return process_alive(holder)

        node = Node(sysfs, MemoryJournal(), files, cdi, now_s=lambda: 1_700_000_000.0, process_alive=alive)
        metrics = Metrics(
            sysfs,
            version="1.2.3",
            python="3.11",
            cdi_kind="amdvgpu.io/slice",
            compat=(),
            cluster_node="n1",
            now_s=lambda: 1_700_000_000.0,
        )
        settings = ApiSettings(socket_path=run_dir / "api.sock", tcp=None)
        api = Api(node, cdi, metrics, settings, version="1.2.3", run_dir=run_dir, process_of=_process_of)
        await node.start()
        await api.serve_unix()

        async def run(words: str, *more: str, env: dict[str, str] | None = None) -> Ended:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-B", "-c", "from amdvgpud.ctl.cli import main; main()"),
                *(*words.split(), *more),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "AMDVGPU_SOCKET": str(run_dir / "api.sock"),
                    **(env or {}),
                },
            )
            out, err = await process.communicate()
            assert process.returncode is not None
            return Ended(process.returncode, out.decode(), err.decode())

        yield run
        await api.close()


async def test_a_slice_is_planned_created_shown_resized_and_deleted(say: Say) -> None:
    asked = "alice --gpu 0 --vram 16GiB --compute 25%"
    planned = await say(f"plan {asked}")
    assert (planned.code, planned.err) == (0, "")
    assert f"{FIRST}/0  16 GiB     76       64" in planned.out
    created = await say(f"slice create {asked}")
    assert created == Ended(
        0, f"alice: 16 GiB and 64 CUs of {FIRST}/0\npodman run --device amdvgpu.io/slice=alice …\n", ""
    )
    again = await say(f"slice create {asked}")
    assert (again.code, again.out, again.err.count("\n")) == (1, "", 1)
    shown = await say("slice show alice -o json")
    assert json.loads(shown.out)["shares"][0]["vram_bytes"] == 16 << 30
    assert (await say("slice show alice")).code == 0
    resized = await say("slice resize alice --vram 8GiB")
    assert resized == Ended(0, f"alice: 8 GiB and 64 CUs of {FIRST}/0\n", "")
    listed = await say("slice list")
    assert listed.out.splitlines()[1].split()[:6] == ["alice", "free", f"{FIRST}/0", "8", "GiB", "0"]
    assert await say("slice delete alice") == Ended(0, "alice: deleted\n", "")
    assert (await say("slice delete alice")).code == 1


async def test_every_name_that_gpu_list_shows_is_understood_by_gpu_show(say: Say) -> None:
    listed = json.loads((await say("gpu list -o json")).out)
    gpu = listed["gpus"][1]
    forms = [str(gpu["index"]), gpu["id"], gpu["pci_address"], gpu["unique_id"], gpu["partitions"][0]["id"]]
    shown = [json.loads((await say("gpu show", form, "-o", "json")).out)["id"] for form in forms]
    assert shown == [gpu["id"]] * len(forms)


async def test_an_unknown_gpu_is_refused_with_the_names_there_are(say: Say) -> None:
    ended = await say("gpu show GPU-99")
    assert (ended.code, ended.out) == (1, "")
    assert FIRST in ended.err


async def test_how_a_gpu_is_is_shown_and_overridden(say: Say) -> None:
    assert await say("gpu health 0") == Ended(0, f"id      {FIRST}\nhealth  nobody looks\n", "")
    forced = await say("gpu health 0 --override unhealthy")
    assert forced.out.splitlines()[0:2] == [
        f"id                {FIRST}",
        "health            unhealthy: set by a person; nobody has looked",
    ]
    assert forced.out.splitlines()[3:] == [
        "source            override",
        "found             nobody looks",
        "override          unhealthy",
        "takes new slices  no",
    ]
    assert "unhealthy\n" in (await say("gpu list")).out
    assert "health            unhealthy: set by a person" in (await say("gpu show 0")).out
    refused = await say("slice create bob --gpu 0 --vram 1GiB --compute 25%")
    assert (refused.code, f"{FIRST}: unhealthy, set by a person" in refused.err) == (1, True)
    assert json.loads((await say("gpu health 0 --override none -o json")).out)["health"] is None


async def test_a_cordoned_gpu_takes_nothing_and_oversubscription_is_shown(say: Say) -> None:
    assert await say("gpu cordon 0") == Ended(0, f"{FIRST}: cordoned, oversubscription off\n", "")
    ended = await say("slice create alice --gpu 0 --vram 1GiB --compute 8")
    assert ended.code == 1
    assert await say("gpu uncordon 0") == Ended(0, f"{FIRST}: open for new slices, oversubscription off\n", "")
    assert await say("gpu oversubscribe 0 1.5") == Ended(0, f"{FIRST}: open for new slices, oversubscription 1.5\n", "")


async def test_a_refused_field_is_named(say: Say) -> None:
    ended = await say("slice create alice --vram nonsense")
    assert (ended.code, ended.out) == (1, "")
    assert "/vram" in ended.err
    assert "'nonsense'" in ended.err


async def test_the_refusal_for_want_of_room_is_the_daemons_sentence(say: Say) -> None:
    ended = await say("slice create alice --vram 1TiB --compute 25%")
    assert (ended.code, ended.err.count("\n")) == (1, 1)
    assert "the roomiest" in ended.err


async def test_run_holds_a_lease_while_the_command_runs_and_none_after(say: Say, tmp_path: Path) -> None:
    gate = tmp_path / "libamdvgpu.so"
    subprocess.run(["gcc", "-shared", "-o", gate, "-x", "c", "/dev/null"], check=True)  # what it holds is not asked
    ask = f"{sys.executable} -c 'from amdvgpud.ctl.cli import main; main()' lease list -o json; echo $AMDVGPU_SLICE"
    run = "run --deliver environment --gpu 1 --vram 4GiB --compute 25% -- sh -c"
    ended = await say(run, ask, env={"AMDVGPU_LIBRARY": str(gate)})
    leases, name = ended.out.splitlines()
    (lease,) = json.loads(leases)["leases"]
    assert ended.code == 0
    assert ended.err == (f"amdvgpuctl: slice {name}: 4 GiB and 64 CUs of {SECOND}/0; enforced by: gate (environment)\n")
    assert (lease["slice"], lease["holder"], lease["ephemeral"]) == (name, "amdvgpuctl run sh", True)
    assert lease["environment"]["ROCR_VISIBLE_DEVICES"] == SECOND
    assert json.loads((await say("lease list -o json")).out)["leases"] == []
    assert json.loads((await say("slice list -o json")).out)["slices"] == []


async def test_a_lease_is_created_for_a_container_listed_and_released(say: Say) -> None:
    await say("slice create alice --vram 1GiB --compute 25%")
    made = await say("lease create --slice alice --bind container --holder job --ttl 1h")
    assert (made.code, made.err) == (0, "")
    identity, _, rest = made.out.partition(": ")
    assert rest == "slice alice\npodman run --device amdvgpu.io/slice=alice …\n"
    assert (await say("lease list")).out.splitlines()[1].split()[:4] == [identity, "alice", "-", "container"]
    again = await say("lease create --slice alice")
    assert (again.code, f"lease {identity}" in again.err) == (1, True)
    refused = await say("lease create --slice alice --bind container --pid 1")
    assert (refused.code, "gets its process when that one starts" in refused.err) == (1, True)
    assert (await say(f"lease release {identity}")).out == f"{identity}: released\n"
    made = await say("lease create --vram 1GiB --compute 25%")
    identity, _, rest = made.out.partition(": slice ")
    assert (await say(f"slice show {rest.splitlines()[0]}")).code == 0
    await say(f"lease release {identity}")
    assert (await say(f"slice show {rest.splitlines()[0]}")).code == 1


async def test_status_events_and_cdi_are_read(say: Say) -> None:
    await say("slice create alice --vram 1GiB --compute 25%")
    for words in ("status", "events", "cdi list", "cdi show alice", "lease list"):
        ended = await say(words)
        assert (ended.code, ended.err) == (0, ""), words
    assert "alice" in (await say("events")).out
