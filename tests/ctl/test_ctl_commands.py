"""amdvgpuctl's commands: what they ask of the daemon, what they print, and by which code they end."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from amdvgpud.core import wire
from amdvgpud.ctl import show
from amdvgpud.ctl.cli import EXIT_CODES, cli, main
from tests.ctl.stand_ins import GIB, GPU_ID, PARTITION, Ctl, FakeDaemon, Start, share, slice_view


def gpu_view(**changes: object) -> wire.GpuView:
    partition = wire.PartitionView(
        id=PARTITION,
        index=0,
        kfd_node=2,
        kfd_gpu_id=4711,
        render_node="/dev/dri/renderD128",
        gfx_target="gfx1201",
        vram_bytes=16 * GIB,
        vram_reserved_bytes=4 * GIB,
        vram_free_bytes=12 * GIB,
        cu_count=64,
        cus_allocated=16,
        xcc_count=1,
        row_count=8,
        row_cus=8,
        wgp=True,
        harvest_known=True,
        numa_node=None,
        links=[],
        engines_per_xcc=4,
        arrays_per_engine=2,
        active=[8] * 8,
    )
    plain = wire.GpuView(
        id=GPU_ID,
        index=0,
        pci_address="0000:83:00.0",
        unique_id="0x0123456789abcdef",
        smi_uuid="01ff7550-0000-1000-8123-456789abcdef",
        product_name="AMD Radeon RX 9070 XT",
        gfx_target="gfx1201",
        vram_bytes=16 * GIB,
        vram_used_bytes=None,
        cu_count=64,
        compute_partition=None,
        memory_partition=None,
        available_compute_partitions=[],
        available_memory_partitions=[],
        numa_node=None,
        cordoned=False,
        oversubscription=1.0,
        partitions=[partition],
    )
    return msgspec.structs.replace(plain, **changes)


def gpu_list() -> wire.GpuList:
    no_id = gpu_view(
        id="pci-0000-03-00.0",
        index=1,
        pci_address="0000:03:00.0",
        unique_id=None,
        smi_uuid=None,
        product_name="AMD Radeon Graphics",
        cordoned=True,
    )
    lost = wire.UnusableView(pci_address="0000:04:00.0", name="amdgpu", reason="it has no render node")
    left = wire.GoneView(id="GPU-77", since_s=1_700_000_000.0, pci_address="0000:05:00.0", product_name=None)
    return wire.GpuList(gpus=[gpu_view(), no_id], unusable=[lost], revision=3, gone=[left])


def cdi_view(path: Path, **changes: object) -> wire.CdiView:
    spec: dict[str, object] = {
        "cdiVersion": "0.5.0",
        "kind": "amdvgpu.io/slice",
        "devices": [{"name": "alice", "containerEdits": {"env": ["AMDVGPU_SLICE=alice"]}}],
    }
    plain = wire.CdiView(
        kind="amdvgpu.io/slice",
        path=str(path),
        written=True,
        error=None,
        devices=["amdvgpu.io/slice=alice"],
        conflicts=[],
        spec=spec,
    )
    return msgspec.structs.replace(plain, **changes)


USAGE = wire.UsageView(
    slice="alice",
    gpus=[
        wire.GpuUsageView(
            partition=PARTITION,
            limit_bytes=4 * GIB,
            used_bytes=GIB,
            peak_bytes=2 * GIB,
            denials=3,
            denied_bytes=GIB // 2,
            allocations=10,
            frees=7,
            driver_bytes=GIB + GIB // 8,
            untracked_bytes=GIB // 8,
        )
    ],
    damaged=None,
    reclaimed_bytes=0,
)
PROCESSES = wire.ProcessList(
    slice="alice",
    processes=[
        wire.ProcessView(
            pid=4711,
            pid_namespace=1,
            used_bytes={PARTITION: GIB},
            host_pid=90210,
            command="python3",
            driver_bytes={PARTITION: GIB},
        ),
        wire.ProcessView(pid=8, pid_namespace=1, used_bytes={}, driver_bytes={PARTITION: GIB // 8}, tracked=False),
    ],
)
SYSTEM = wire.SystemView(
    version="0.1.0",
    api="v1",
    features=["dry-run", "leases"],
    simulated=None,
    driver_version="6.12.12",
    generation_id=2,
    revision=3,
    ready=True,
    warnings=["0000:03:00.0: harvest is not known"],
    config={},
)
LEASES = wire.LeaseList(
    leases=[
        wire.LeaseView(
            id="lease-1",
            slice="alice",
            holder="amdvgpuctl run python3",
            pid=4711,
            created_s=1_700_000_000.0,
            expires_s=1_700_000_060.0,
            ephemeral=False,
            slice_dir="/run/amdvgpud/slices/alice",
            environment={},
        )
    ],
    revision=3,
)
EVENT = wire.EventView(id=1, revision=1, time_s=1_700_000_000.0, kind="slice.created", subject="alice", detail="4 GiB")


# ------------------------------------------------------------------------------------------------------- goldens


GPU_LIST = """\
INDEX  PRODUCT                GFX      MODE  PARTITIONS    VRAM  VRAM-FREE  CUS  CUS-FREE  STATE
    0  AMD Radeon RX 9070 XT  gfx1201  -              1  16 GiB     12 GiB   64        48  ok
    1  AMD Radeon Graphics    gfx1201  -              1  16 GiB     12 GiB   64        48  cordoned

INDEX  ID                    PCI-ADDRESS   UNIQUE-ID           SMI-UUID
    0  GPU-0123456789abcdef  0000:83:00.0  0x0123456789abcdef  01ff7550-0000-1000-8123-456789abcdef
    1  pci-0000-03-00.0      0000:03:00.0  -                   -
unusable: 0000:04:00.0 (amdgpu): it has no render node
gone: GPU-77, since 2023-11-14T22:13:20Z; it was at 0000:05:00.0
"""

GPU_SHOW = """\
id                GPU-0123456789abcdef
index             0
PCI address       0000:83:00.0
unique id         0x0123456789abcdef
SMI UUID          01ff7550-0000-1000-8123-456789abcdef
product           AMD Radeon RX 9070 XT
gfx target        gfx1201
VRAM              16 GiB, in use -
CUs               64
compute mode      -
memory mode       -
NUMA node         -
cordoned          no
health            nobody looks
oversubscription  off

PARTITION               KFD-NODE  KFD-GPU-ID  RENDER-NODE            VRAM  VRAM-FREE  CUS  CUS-FREE  ROWS        XCCS
GPU-0123456789abcdef/0         2        4711  /dev/dri/renderD128  16 GiB     12 GiB   64        48  8 of 8 CUs     1
"""

SLICE_LIST = """\
NAME   STATE  PARTITIONS               VRAM   USED  CUS  POLICY    PROCESSES  ENFORCED-BY  LEASE
alice  held   GPU-0123456789abcdef/0  4 GiB  1 GiB   64  balanced          2  gate         lease-1
"""

SLICE_SHOW = """\
name         alice
state        held
enforced by  gate
owner        uid 1000
CDI device   amdvgpu.io/slice=alice
compute      25% (balanced)
priority     normal
out of VRAM  refused
lease        lease-1
processes    2
created      2023-11-14T22:13:20Z

PARTITION                VRAM  ASKED  GRANTED  EFFECTIVE  SHARED  CUS
GPU-0123456789abcdef/0  4 GiB     76       64         64  no      0-63

PARTITION               LIMIT   USED   PEAK     DRIVER  UNTRACKED  DENIALS   DENIED
GPU-0123456789abcdef/0  4 GiB  1 GiB  2 GiB  1.125 GiB    128 MiB        3  512 MiB

 PID  HOST-PID  COMMAND   USED   DRIVER  GATE
4711     90210  python3  1 GiB    1 GiB  yes
   8         -  -          0 B  128 MiB  no
"""

LEASE_LIST = """\
ID       SLICE   PID  BIND    CREATED               EXPIRES               EPHEMERAL  HOLDER
lease-1  alice  4711  holder  2023-11-14T22:13:20Z  2023-11-14T22:14:20Z  no         amdvgpuctl run python3
"""

STATUS = """\
version              0.1.0
API                  v1
ready                yes
simulated            -
driver               6.12.12
revision             3
topology generation  2
features             dry-run, leases
warning              0000:03:00.0: harvest is not known
"""

EVENTS = "2023-11-14T22:13:20Z  1  slice.created  alice  4 GiB\n"

READS: list[tuple[tuple[str, ...], str, object, str]] = [
    (("gpu", "list"), "/v1/gpus", gpu_list(), GPU_LIST),
    (("gpu", "show", "0"), "/v1/gpus/0", gpu_view(), GPU_SHOW),
    (("slice", "list"), "/v1/slices", wire.SliceList(slices=[slice_view()], revision=3), SLICE_LIST),
    (("slice", "show", "alice"), "/v1/slices/alice", slice_view(), SLICE_SHOW),
    (("lease", "list"), "/v1/leases", LEASES, LEASE_LIST),
    (("status",), "/v1/system", SYSTEM, STATUS),
]


@pytest.mark.parametrize(("command", "path", "answer", "text"), READS, ids=[" ".join(r[0][:2]) for r in READS])
def test_piped_output_is_plain_and_aligned(
    daemon: FakeDaemon, ctl: Ctl, command: tuple[str, ...], path: str, answer: object, text: str
) -> None:
    daemon.says("GET", path, answer)
    daemon.says("GET", "/v1/slices/alice/usage", USAGE)
    daemon.says("GET", "/v1/slices/alice/processes", PROCESSES)
    done = ctl(*command)
    assert (done.exit_code, done.stdout, done.stderr) == (0, text, "")


def test_of_each_container_is_shown_what_the_kernel_counts_for_it_and_whether_it_is_capped(
    daemon: FakeDaemon, ctl: Ctl
) -> None:
    one = wire.ContainerView(
        id="f" * 64,
        pid=7,
        pod=None,
        since_s=1.0,
        reported=True,
        gate="yes",
        gate_reason="",
        cap="",
        dmem_bytes={"G": GIB},
    )
    other = msgspec.structs.replace(one, id="e" * 64, cap="this kernel has no dmem controller", dmem_bytes=None)
    daemon.says("GET", "/v1/slices/alice", msgspec.structs.replace(slice_view(), containers=[one, other]))
    daemon.says("GET", "/v1/slices/alice/usage", USAGE)
    daemon.says("GET", "/v1/slices/alice/processes", PROCESSES)
    shown = [
        line.split(maxsplit=5)
        for line in ctl("slice", "show", "alice").stdout.splitlines()
        if "fff" in line or "eee" in line
    ]
    assert shown == [
        ["f" * 12, "7", "-", "yes", "1", "GiB  yes"],
        ["e" * 12, "7", "-", "yes", "-", "no: this kernel has no dmem controller"],
    ]


@pytest.mark.parametrize(("command", "path", "answer", "_text"), READS, ids=[" ".join(r[0][:2]) for r in READS])
def test_json_is_what_the_api_said_byte_for_byte(
    daemon: FakeDaemon, ctl: Ctl, command: tuple[str, ...], path: str, answer: object, _text: str
) -> None:
    raw = msgspec.json.encode(answer) + b" "  # a blank that decoding and encoding anew would lose
    daemon.says("GET", path, raw)
    daemon.says("GET", "/v1/slices/alice/usage", USAGE)
    daemon.says("GET", "/v1/slices/alice/processes", PROCESSES)
    done = ctl(*command, "-o", "json")
    assert (done.exit_code, done.stdout_bytes, done.stderr) == (0, raw + b"\n", "")


def test_a_field_that_a_newer_daemon_adds_is_no_error(daemon: FakeDaemon, ctl: Ctl) -> None:
    raw = {**msgspec.to_builtins(SYSTEM), "added_in_2030": 1}
    daemon.says("GET", "/v1/system", raw)
    assert ctl("status").stdout == STATUS


def test_all_pages_of_a_long_list_are_shown(daemon: FakeDaemon, ctl: Ctl) -> None:
    pages = [wire.SliceList(slices=[slice_view(n)], revision=3, next_cursor=c) for n, c in (("a", "x y"), ("b", None))]
    daemon.says("GET", "/v1/slices", pages[0])
    daemon.says("GET", "/v1/slices?cursor=x+y", pages[1])
    shown = json.loads(ctl("slice", "list", "-o", "json").stdout)
    assert ([s["name"] for s in shown["slices"]], shown["next_cursor"]) == (["a", "b"], None)


def test_an_empty_list_still_has_its_titles(daemon: FakeDaemon, ctl: Ctl) -> None:
    daemon.says("GET", "/v1/leases", wire.LeaseList(leases=[], revision=0))
    assert ctl("lease", "list").stdout == "ID  SLICE  PID  BIND  CREATED  EXPIRES  EPHEMERAL  HOLDER\n"


def test_on_a_terminal_tables_have_a_rule_and_no_markup_of_strangers(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")
    leases = msgspec.structs.replace(LEASES, leases=[msgspec.structs.replace(LEASES.leases[0], holder="[u]m[/u]")])
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        show.leases(leases)
    shown = os.read(master, 65536).decode()
    os.close(master)
    assert "─" in shown
    assert "[u]m[/u]" in shown


# ------------------------------------------------------------------------------------------------------- changes


def test_slice_create_asks_for_what_was_said_and_only_if_there_is_none_yet(daemon: FakeDaemon, ctl: Ctl) -> None:
    daemon.says("PUT", "/v1/slices/alice", slice_view(), 201)
    command = "slice create alice --vram 16GiB --compute 25% --policy fine --gpu 0 --gpu 0000:83:00.0 --spread"
    command += " --priority low --oversubscribe --owner ann"
    done = ctl(*command.split())
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"alice: 4 GiB and 64 CUs of {PARTITION}\npodman run --device amdvgpu.io/slice=alice …\n"
    (asked,) = daemon.asked
    assert asked.headers["If-None-Match"] == "*"
    assert asked.body == {
        "owner": "ann",
        "vram": "16GiB",
        "compute": "25%",
        "policy": "fine",
        "gpus": 2,
        "on": ["0", "0000:83:00.0"],
        "spread": "spread",
        "priority": "low",
        "oversubscribe": True,
    }


def test_gpus_may_be_fewer_than_the_places_named(daemon: FakeDaemon, ctl: Ctl) -> None:
    daemon.says("PUT", "/v1/slices/alice", slice_view(), 201)
    assert ctl(*["slice", "create", "alice", "--gpu", "0", "--gpu", "1", "--gpus", "1"]).exit_code == 0
    body = daemon.asked[0].body
    assert isinstance(body, dict)
    assert (body["gpus"], body["on"]) == (1, ["0", "1"])


PLAN = f"""\
PARTITION                VRAM  ASKED  GRANTED  EFFECTIVE  SHARED  CUS
{PARTITION}  4 GiB     76       16         16  no      0-15

{PARTITION}
               SE0   SE1   SE2   SE3
XCC 0 array 0  ab..  ab..  ab..  ab..
XCC 0 array 1  ab..  ab..  ab..  ab..
a = alice (16 CUs: 0-15)
b = bob (16 CUs: 16-31)
one sign is one WGP (2 CUs); . free
"""


@pytest.mark.parametrize("command", [("plan", "alice"), ("slice", "create", "alice", "--dry-run")])
def test_a_plan_draws_the_cus_beside_those_that_others_have(
    daemon: FakeDaemon, ctl: Ctl, command: tuple[str, ...]
) -> None:
    ours = msgspec.structs.replace(share(), granted_cus=16, effective_cus=16, cus="0-15")
    bobs = msgspec.structs.replace(share(), cus="16-31")
    bob = msgspec.structs.replace(slice_view("bob"), shares=[bobs])
    daemon.says("PUT", "/v1/slices/alice?dry_run=true", wire.PlanView(name="alice", shares=[ours], cdi={}))
    daemon.says("GET", "/v1/gpus", gpu_list())
    daemon.says("GET", "/v1/slices", wire.SliceList(slices=[bob], revision=3))
    done = ctl(*command, "--compute", "25%")
    assert done.stdout == PLAN
    assert (done.exit_code, done.stderr) == (0, "")


def test_resize_delete_release_cordon_and_oversubscribe_say_what_they_did(daemon: FakeDaemon, ctl: Ctl) -> None:
    daemon.says("PATCH", "/v1/slices/alice", slice_view())
    daemon.says("DELETE", "/v1/slices/alice?force=true", b"", 204)
    daemon.says("DELETE", "/v1/leases/lease-1", b"", 204)
    daemon.says("PATCH", "/v1/gpus/0", gpu_view(cordoned=True, oversubscription=1.5))
    said = [
        ctl("slice", "resize", "alice", "--vram", "8GiB").stdout,
        ctl("slice", "delete", "alice", "--force").stdout,
        ctl("lease", "release", "lease-1").stdout,
        ctl("gpu", "cordon", "0").stdout,
        ctl("gpu", "uncordon", "0").stdout,
        ctl("gpu", "oversubscribe", "0", "1.5").stdout,
    ]
    gpu = f"{GPU_ID}: cordoned, oversubscription 1.5\n"
    assert said == [
        f"alice: 4 GiB and 64 CUs of {PARTITION}\n",
        "alice: deleted\n",
        "lease-1: released\n",
        gpu,
        gpu,
        gpu,
    ]
    assert [a.body for a in daemon.asked] == [
        {"vram": "8GiB"},
        None,
        None,
        {"cordoned": True},
        {"cordoned": False},
        {"oversubscription": 1.5},
    ]


def test_a_lease_is_asked_for_on_a_slice_that_exists_or_on_one_made_for_it(daemon: FakeDaemon, ctl: Ctl) -> None:
    daemon.says("POST", "/v1/leases", LEASES.leases[0], 201)
    daemon.says("GET", "/v1/slices/alice", msgspec.structs.replace(slice_view(), cdi_device="amdvgpu.io/slice=alice"))
    bound = ctl("lease", "create", "--slice", "alice", "--bind", "container", "--ttl", "10m", "--holder", "a job")
    assert bound.output == "lease-1: slice alice\npodman run --device amdvgpu.io/slice=alice …\n"
    assert ctl("lease", "create", "--vram", "1GiB", "--gpu", "0", "--pid", "7", "-o", "json").exit_code == 0
    assert [a.body for a in daemon.asked if a.body] == [
        {"slice": "alice", "request": None, "holder": "a job", "pid": None, "ttl_s": 600.0, "bind": "container"},
        {
            "slice": None,
            "request": msgspec.to_builtins(wire.SliceSpec(vram="1GiB", on=["0"])),
            "holder": "",
            "pid": 7,
            "ttl_s": None,
            "bind": "holder",
        },
    ]
    both = ctl("lease", "create", "--slice", "alice", "--vram", "1GiB")
    assert (both.exit_code, "leave out the options that describe a new one" in both.stderr) == (2, True)


def test_a_partition_id_is_one_segment_of_the_path(daemon: FakeDaemon, ctl: Ctl) -> None:
    daemon.says("GET", f"/v1/gpus/{GPU_ID}%2F0", gpu_view())
    assert ctl("gpu", "show", PARTITION).exit_code == 0


# -------------------------------------------------------------------------------------------------------- errors


def test_a_refusal_ends_with_1_and_lists_the_fields_it_did_not_name(daemon: FakeDaemon, ctl: Ctl) -> None:
    errors = [{"pointer": "/vram", "detail": "'x' is no size"}, {"pointer": "/gpus", "detail": "0 is too few"}]
    daemon.refuses("PUT", "/v1/slices/alice", 400, "/vram: 'x' is no size", errors)
    done = ctl("slice", "create", "alice", "--vram", "x")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "amdvgpuctl: /vram: 'x' is no size\n  /gpus: 0 is too few\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("slice", "create"), "Missing argument 'NAME'"),
        (("gpu", "oversubscribe", "0", "17"), "17.0 is not in the range"),
        (("run", "--ttl", "soon", "true"), "'soon' is no time"),
        (("run", "--slice", "a", "--vram", "1GiB", "true"), "--slice names a slice that exists"),
        (("nonsense",), "No such command 'nonsense'"),
    ],
)
def test_a_wrong_command_line_ends_with_2(ctl: Ctl, arguments: tuple[str, ...], said: str) -> None:
    done = ctl(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr


def test_no_daemon_ends_with_3_and_says_how_to_start_it(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["--socket", f"{tmp_path}/none.sock", "status"])
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr == (
        f"amdvgpuctl: no daemon answers at {tmp_path}/none.sock. Start it by 'systemctl start amdvgpud' (or "
        "'amdvgpud'), or name its socket by --socket or AMDVGPU_SOCKET\n"
    )


def test_something_else_at_the_socket_ends_with_3(daemon: FakeDaemon, ctl: Ctl) -> None:
    daemon.says("GET", "/v1/system", b"<html>")
    done = ctl("status")
    assert done.exit_code == 3
    assert "does not speak this API" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_user_who_may_only_read_ends_with_4(daemon: FakeDaemon, ctl: Ctl) -> None:
    daemon.refuses("DELETE", "/v1/slices/alice", 403, "uid 1000 may read only", [])
    done = ctl("slice", "delete", "alice")
    assert (done.exit_code, done.stderr) == (4, "amdvgpuctl: uid 1000 may read only\n")


@pytest.mark.root
def test_a_socket_that_lets_nobody_in_ends_with_4_and_names_the_group(daemon: FakeDaemon, start: Start) -> None:
    Path(daemon.socket).chmod(0o600)
    process = start(
        "--socket", daemon.socket, "status", prefix=("setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups")
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "members of the group 'amdvgpu'" in err


def test_the_socket_may_come_from_the_environment(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.says("GET", "/v1/system", SYSTEM)
    monkeypatch.setenv("AMDVGPU_SOCKET", daemon.socket)
    assert CliRunner().invoke(cli, ["status"]).stdout == STATUS


def test_a_reader_that_has_seen_enough_is_no_error(daemon: FakeDaemon, start: Start) -> None:
    daemon.says("GET", "/v1/gpus", msgspec.structs.replace(gpu_list(), gpus=[gpu_view()] * 2000))
    process = start("--socket", daemon.socket, "gpu", "list")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert err == ""
    assert process.returncode != 0


def test_a_fault_of_the_program_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by nought")

    monkeypatch.setattr(cli, "main", fails)
    with pytest.raises(SystemExit) as end:
        main()
    err = capsys.readouterr().err
    assert end.value.code == 1
    assert err.startswith(
        "amdvgpuctl: this is a fault of the program: ZeroDivisionError: by nought (test_ctl_commands.py:"
    )
    assert err.count("\n") == 1


def test_an_interrupted_follower_ends_quietly_with_130(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("amdvgpud.ctl.client.Client.get", interrupted)
    monkeypatch.setattr(sys, "argv", ["amdvgpuctl", "--socket", daemon.socket, "events", "-f"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130


# ----------------------------------------------------------------------------------------------------- help, shells


@pytest.mark.parametrize("command", [(), ("run",)])
def test_the_exit_codes_are_in_the_help(command: tuple[str, ...]) -> None:
    text = CliRunner().invoke(cli, [*command, "--help"]).output
    for code, meaning in EXIT_CODES:
        assert f"  {code:<9} {meaning}\n" in text


def commands(group: object, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [path]
    for name, command in getattr(group, "commands", {}).items():
        found += commands(command, (*path, name))
    return found


@pytest.mark.parametrize("command", commands(cli), ids=" ".join)
def test_every_help_is_of_whole_sentences(command: tuple[str, ...]) -> None:
    at: object = cli
    for name in command:
        assert isinstance(at, click.Group)
        at = at.commands[name]
    assert isinstance(at, click.Command)
    for text in [at.help, *(p.help for p in at.params if isinstance(p, click.Option))]:
        assert text
        assert text.rstrip().endswith("."), text


def test_help_imports_neither_tables_nor_the_daemon() -> None:
    """What makes the start slow: measured, --help takes 50 ms without these."""
    code = (
        "import sys\nfrom amdvgpud.ctl.cli import cli\ncli.main(['--help'], standalone_mode=False)\n"
        "print(sorted({'rich', 'msgspec', 'aiohttp', 'asyncio', 'amdvgpud.host'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_completion_script(shell: str) -> None:
    done = CliRunner().invoke(cli, ["completion", shell], prog_name="amdvgpuctl")
    assert done.exit_code == 0
    assert "_AMDVGPUCTL_COMPLETE" in done.stdout


def test_names_of_slices_are_completed_and_a_missing_daemon_completes_nothing(
    daemon: FakeDaemon, start: Start, tmp_path: Path
) -> None:
    daemon.says("GET", "/v1/slices", wire.SliceList(slices=[slice_view("alice"), slice_view("bob")], revision=1))

    def completions(socket: str) -> str:
        words = {"COMP_WORDS": "amdvgpuctl slice show a", "COMP_CWORD": "3", "AMDVGPU_SOCKET": socket}
        return start(env={"_AMDVGPUCTL_COMPLETE": "bash_complete", **words}).communicate(timeout=60)[0]

    assert completions(daemon.socket) == "plain,alice\n"
    assert completions(f"{tmp_path}/none.sock") == "\n"


# --------------------------------------------------------------------------------------------------- events and CDI


def test_events_are_lines_for_people_and_objects_for_programs(daemon: FakeDaemon, ctl: Ctl) -> None:
    past = wire.EventList(events=[EVENT], last_id=1, resync=False)
    daemon.says("GET", "/v1/events?since=0", past)
    assert ctl("events").stdout == EVENTS
    assert ctl("events", "-o", "json").stdout_bytes == msgspec.json.encode(EVENT) + b"\n"


def test_following_goes_on_where_the_list_ended(daemon: FakeDaemon, ctl: Ctl) -> None:
    past = wire.EventList(events=[EVENT], last_id=1, resync=False)
    second = msgspec.structs.replace(EVENT, id=2)
    stream = b": hello\n\nid: a-2\nevent: slice.created\ndata: " + msgspec.json.encode(second) + b"\n\n"
    resync = b'id: a-9\nevent: resync\ndata: {"events":[],"last_id":9,"resync":true}\n\n'
    daemon.answers["GET", "/v1/events?since=0"] = 200, msgspec.json.encode(past)
    daemon.answers["GET", "/v1/events"] = 200, stream + resync
    done = ctl("events", "--follow")
    assert done.stdout == EVENTS + EVENTS.replace("  1  ", "  2  ")
    assert done.stderr == "amdvgpuctl: events have been missed; read the lists for the present state\n"
    assert daemon.asked[-1].headers["Last-Event-ID"] == "1"


CDI_LIST = """\
kind       amdvgpu.io/slice
file       {path}
error      -
conflicts  -

DEVICE
amdvgpu.io/slice=alice
"""


def test_cdi_list_and_show(daemon: FakeDaemon, ctl: Ctl, tmp_path: Path) -> None:
    path = tmp_path / "amdvgpu.io-slice.json"
    view = cdi_view(path)
    daemon.says("GET", "/v1/cdi", view)
    assert ctl("cdi", "list").stdout == CDI_LIST.format(path=path)
    assert json.loads(ctl("cdi", "show").stdout) == view.spec
    assert json.loads(ctl("cdi", "show", "alice").stdout)["name"] == "alice"
    missing = ctl("cdi", "show", "bob")
    assert (missing.exit_code, missing.stderr.count("\n")) == (1, 1)


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The only container runtime of the machine, of the version given."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))

    def installed(version: str) -> None:
        (programs / "podman").write_text(f"#!/bin/sh\necho podman version {version}\n")
        (programs / "podman").chmod(0o755)

    return installed


def test_validate_compares_the_file_and_judges_the_runtimes_by_version(
    daemon: FakeDaemon, ctl: Ctl, tmp_path: Path, podman: Callable[[str], None]
) -> None:
    podman("5.5.1")
    path = tmp_path / "amdvgpu.io-slice.json"
    view = cdi_view(path)
    path.write_bytes(msgspec.json.encode(view.spec))
    path.chmod(0o644)
    daemon.says("GET", "/v1/cdi", view)
    done = ctl("cdi", "validate", "alice")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        f"ok  {path}: as the daemon wrote it, CDI 0.5.0, mode 0644",
        f"ok  podman 5.5.1: would resolve it; needs {tmp_path} among --cdi-spec-dir",
    ]


@pytest.mark.parametrize(
    ("version", "written", "mode", "name", "bad"),
    [
        ("4.2.0", None, 0o644, "alice", "podman 4.2.0 accepts CDI files up to 0.4.0, this one declares 0.5.0"),
        ("5.5.1", b"{}", 0o644, "alice", "somebody else has changed it"),
        ("5.5.1", b"{", 0o644, "alice", "cannot be read"),
        ("5.5.1", None, 0o600, "alice", "a rootless runtime cannot read it"),
        ("5.5.1", None, 0o644, "bob", "no such device; there are amdvgpu.io/slice=alice"),
        ("unknown", None, 0o644, "alice", "is no version of podman"),
    ],
)
def test_validate_ends_with_1_and_says_what_is_bad(
    daemon: FakeDaemon,
    ctl: Ctl,
    tmp_path: Path,
    podman: Callable[[str], None],
    version: str,
    written: bytes | None,
    mode: int,
    name: str,
    bad: str,
) -> None:
    podman(version)
    path = tmp_path / "amdvgpu.io-slice.json"
    view = cdi_view(path)
    path.write_bytes(msgspec.json.encode(view.spec) if written is None else written)
    path.chmod(mode)
    daemon.says("GET", "/v1/cdi", view)
    done = ctl("cdi", "validate", name)
    assert done.exit_code == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("BAD")]
    assert bad in line
