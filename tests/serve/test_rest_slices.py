"""Slices, GPUs and leases over the real unix socket."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from amdvgpud.core.health import Condition, Health
from amdvgpud.core.model import Inventory, SliceName
from amdvgpud.core.truth import Belonging, KernelProcess
from amdvgpud.serve.endpoints import Process

GIB = 1024**3
GPU0 = "GPU-00000000abcd0000"


async def test_a_put_creates_and_the_same_put_again_changes_nothing(desk: Any) -> None:
    spec = {"vram": "16GiB", "compute": "25%", "on": ["0"]}
    first = await desk.ask("PUT", "/v1/slices/alice", spec)
    again = await desk.ask("PUT", "/v1/slices/alice", spec)
    assert (first.status, again.status) == (201, 200)
    assert first.headers["Location"] == "/v1/slices/alice"
    assert first.json == again.json == (await desk.ask("GET", "/v1/slices/alice")).json
    assert first.json == {
        "name": "alice",
        "state": "free",
        "lost_reason": None,
        "enforced_by": "gate",
        "cdi_device": "amdvgpu.io/slice=alice",
        "compute": "25%",
        "policy": "balanced",
        "shares": [
            {
                "partition": f"{GPU0}/0",
                "gpu": GPU0,
                "vram_bytes": 16 * GIB,
                "used_bytes": 0,
                "asked_cus": 76,
                "granted_cus": first.json["shares"][0]["granted_cus"],
                "effective_cus": first.json["shares"][0]["effective_cus"],
                "cus": first.json["shares"][0]["cus"],
                "shared": False,
                "driver_bytes": None,
                "untracked_bytes": None,
                "dmem_bytes": None,
            }
        ],
        "lease": None,
        "processes": 0,
        "created_s": 1000.0,
        "revision": 1,
        "priority": "normal",
        "oversubscribe": False,
        "unmanaged_processes": None,
        "gate_seen": False,
        "owner_uid": 0,
        "profile": "",
        "containers": [],
    }


async def test_root_makes_a_slice_for_somebody_else_and_putting_it_again_leaves_it_theirs(desk: Any) -> None:
    spec = {"vram": "1GiB", "compute": "25%"}
    made = await desk.ask("PUT", "/v1/slices/alice", {**spec, "owner": "nobody"})
    again = await desk.ask("PUT", "/v1/slices/alice", spec)
    assert (made.status, again.status) == (201, 200)
    assert made.json["owner_uid"] == again.json["owner_uid"] == 65534
    given = await desk.ask("PUT", "/v1/slices/alice", {**spec, "owner": 1000})
    assert (given.status, given.json["owner_uid"]) == (200, 1000)


@pytest.mark.parametrize("owner", ["no such user", -1, 2**32 - 1, "²"])
async def test_an_owner_who_is_nobody_here_is_refused_by_name(desk: Any, owner: object) -> None:
    answer = await desk.ask("PUT", "/v1/slices/alice", {"compute": "25%", "owner": owner})
    assert (answer.status, answer.json["errors"][0]["pointer"]) == (422, "/owner")
    assert (await desk.ask("GET", "/v1/slices")).json["slices"] == []


async def test_a_ledger_that_was_used_shows_that_the_gate_was_there(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"compute": "25%"})
    desk.files.run_a_process_in("alice")
    assert (await desk.ask("GET", "/v1/slices/alice/usage")).status == 200
    assert (await desk.ask("GET", "/v1/slices/alice")).json["gate_seen"]


async def test_priority_and_oversubscription_are_asked_for_and_shown(desk: Any) -> None:
    spec = {"vram": "1GiB", "compute": "25%", "priority": "low", "oversubscribe": True}
    made = await desk.ask("PUT", "/v1/slices/alice", spec)
    shown = (await desk.ask("GET", "/v1/slices/alice")).json
    assert (made.status, shown["priority"], shown["oversubscribe"]) == (201, "low", True)
    wrong = await desk.ask("PUT", "/v1/slices/bob", {**spec, "priority": "urgent"})
    assert wrong.status == 422
    changed = await desk.ask("PUT", "/v1/slices/alice", {**spec, "priority": "high"})
    assert (changed.status, changed.json["priority"]) == (200, "high")


async def test_a_dry_run_answers_the_placement_and_changes_nothing(desk: Any) -> None:
    would = await desk.ask("PUT", "/v1/slices/alice?dry_run=true", {"vram": "1GiB", "compute": "25%"})
    assert would.status == 200
    assert would.json["cdi"] == {"devices": [{"name": "alice"}]}
    assert (await desk.ask("GET", "/v1/slices")).json == {"slices": [], "revision": 0, "next_cursor": None}
    did = await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%"})
    assert did.json["shares"] == would.json["shares"]


async def test_every_change_has_a_dry_run_that_changes_nothing(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%"})
    lease = (await desk.ask("POST", "/v1/leases", {"slice": "alice", "ttl_s": 60})).json["id"]
    before = desk.node.view().book
    answers = [
        await desk.ask("PUT", "/v1/slices/bob?dry_run", {"vram": "1GiB", "compute": "25%"}),
        await desk.ask("PATCH", "/v1/slices/alice?dry_run=true", {"vram": "2GiB"}),
        await desk.ask("DELETE", "/v1/slices/alice?dry_run=true&force"),
        await desk.ask("POST", "/v1/leases?dry_run=true", {"request": {"vram": "1GiB", "compute": "25%"}}),
        await desk.ask("PATCH", f"/v1/leases/{lease}?dry_run=true", {"ttl_s": 5}),
        await desk.ask("DELETE", f"/v1/leases/{lease}?dry_run=true"),
        await desk.ask("PATCH", "/v1/gpus/0?dry_run=true", {"cordoned": True, "oversubscription": 2}),
        await desk.ask("POST", "/v1/reload?dry_run=true"),
    ]
    assert [a.status for a in answers] == [200] * len(answers)
    assert answers[6].json["cordoned"] is True
    assert desk.node.view().book is before


async def test_a_dry_run_is_refused_where_the_change_would_be(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%"})
    await desk.ask("POST", "/v1/leases", {"slice": "alice"})
    for method, path, body in (
        ("DELETE", "/v1/slices/alice", None),
        ("PUT", "/v1/slices/alice", {"vram": "2GiB", "compute": "25%"}),
        ("POST", "/v1/leases", {"slice": "alice"}),
        ("PATCH", "/v1/slices/alice", {"vram": "4TiB"}),
    ):
        would = await desk.ask(method, f"{path}?dry_run=true", body)
        does = await desk.ask(method, path, body)
        assert (would.status, would.json["code"]) == (does.status, does.json["code"]) == (409, would.json["code"])


async def test_a_resize_is_a_merge_patch_and_works_while_the_slice_runs(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%"})
    desk.guest_uses("alice", 5000)
    answer = await desk.ask("PATCH", "/v1/slices/alice", {"vram": "2GiB"})
    assert (answer.status, answer.json["shares"][0]["vram_bytes"], answer.json["revision"]) == (200, 2 * GIB, 2)


async def test_a_running_slice_is_deleted_by_force_only(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%"})
    desk.guest_uses("alice", 5000, pids=(4321, 4322))
    refused = await desk.ask("DELETE", "/v1/slices/alice")
    assert (refused.status, refused.json["code"]) == (409, "conflict")
    assert "2 processes run in it" in refused.json["detail"]
    assert (await desk.ask("DELETE", "/v1/slices/alice?force")).status == 204
    assert (await desk.ask("GET", "/v1/slices/alice")).status == 404


async def test_usage_and_processes_are_those_of_the_ledger_now(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%", "on": ["0"]})
    desk.guest_uses("alice", 5000)
    assert (await desk.ask("GET", "/v1/slices/alice/usage")).json == {
        "slice": "alice",
        "gpus": [
            {
                "partition": f"{GPU0}/0",
                "limit_bytes": GIB,
                "used_bytes": 5000,
                "peak_bytes": 5100,
                "denials": 3,
                "denied_bytes": 4096,
                "allocations": 7,
                "frees": 5,
                "driver_bytes": None,
                "untracked_bytes": None,
                "dmem_bytes": None,
            }
        ],
        "damaged": None,
        "reclaimed_bytes": 11,
    }
    assert (await desk.ask("GET", "/v1/slices/alice/processes")).json == {
        "slice": "alice",
        "processes": [
            {
                "pid": 4321,
                "pid_namespace": 4026531836,
                "used_bytes": {f"{GPU0}/0": 5000},
                "host_pid": None,
                "command": None,
                "driver_bytes": None,
                "sdma_us": None,
                "tracked": True,
            }
        ],
    }
    assert (await desk.ask("GET", "/v1/slices/alice")).json["state"] == "running"


async def test_what_the_kernel_says_stands_beside_what_the_ledger_says(desk: Any) -> None:
    """A process with a slot that holds more than it says, and one whose gate is not loaded."""
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%", "on": ["0"]})
    desk.guest_uses("alice", 5000)
    await desk.node.tick()
    (slot,) = desk.node.view().usage["alice"].processes
    inside = Belonging((SliceName("alice"),))
    desk.kernel_says(
        KernelProcess(
            900, slot.start_ticks, slot.pid, slot.pid_namespace, "python3", inside, {1000: 5600}, sdma_us={1000: 44}
        ),
        KernelProcess(901, 77, 8, slot.pid_namespace, "miner", inside, {1000: 300}),
    )
    item = (await desk.ask("GET", "/v1/slices/alice")).json
    figures = ("used_bytes", "driver_bytes", "untracked_bytes")
    assert ([item["shares"][0][key] for key in figures], item["unmanaged_processes"]) == ([5000, 5900, 900], 1)
    usage = (await desk.ask("GET", "/v1/slices/alice/usage")).json["gpus"][0]
    assert [usage[key] for key in figures] == [5000, 5900, 900]
    at, namespace = f"{GPU0}/0", slot.pid_namespace
    assert (await desk.ask("GET", "/v1/slices/alice/processes")).json["processes"] == [
        {
            "pid": 4321,
            "pid_namespace": namespace,
            "used_bytes": {at: 5000},
            "host_pid": 900,
            "command": "python3",
            "driver_bytes": {at: 5600},
            "sdma_us": {at: 44},
            "tracked": True,
        },
        {
            "pid": 8,
            "pid_namespace": namespace,
            "used_bytes": {},
            "host_pid": 901,
            "command": "miner",
            "driver_bytes": {at: 300},
            "sdma_us": None,
            "tracked": False,
        },
    ]


async def test_what_the_kernel_counts_for_a_container_is_shown_for_it_and_for_its_slice(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%", "on": ["0"]})
    desk.kernel_says()
    await desk.contained("alice")
    uncounted = (await desk.ask("GET", "/v1/slices/alice")).json
    assert (uncounted["containers"][0]["dmem_bytes"], uncounted["shares"][0]["dmem_bytes"]) == (None, None)
    desk.kernel_counts(700)
    item = (await desk.ask("GET", "/v1/slices/alice")).json
    assert (item["containers"][0]["dmem_bytes"], item["shares"][0]["dmem_bytes"]) == ({GPU0: 700}, 700)
    assert (await desk.ask("GET", "/v1/slices/alice/usage")).json["gpus"][0]["dmem_bytes"] == 700


async def test_a_list_comes_in_pages_by_name_and_by_filter(desk: Any) -> None:
    for n, name in enumerate(("delta", "alpha", "charlie", "bravo")):
        await desk.ask("PUT", f"/v1/slices/{name}", {"vram": "1GiB", "compute": "10%", "on": [str(n % 2)]})
    await desk.ask("POST", "/v1/leases", {"slice": "bravo"})
    first = (await desk.ask("GET", "/v1/slices?limit=3")).json
    rest = (await desk.ask("GET", f"/v1/slices?limit=3&cursor={first['next_cursor']}")).json
    assert [s["name"] for s in first["slices"]] == ["alpha", "bravo", "charlie"]
    assert ([s["name"] for s in rest["slices"]], rest["next_cursor"]) == (["delta"], None)

    async def names(query: str) -> list[str]:
        return [s["name"] for s in (await desk.ask("GET", f"/v1/slices?{query}")).json["slices"]]

    assert await names(f"gpu={GPU0.lower()}") == ["charlie", "delta"]
    assert await names("state=held") == ["bravo"]
    assert await names("state=held&gpu=0") == []


async def test_a_list_waits_until_the_revision_is_another_one(desk: Any) -> None:
    waiting = asyncio.create_task(desk.ask("GET", "/v1/slices?since=0&wait=15s"))
    await _until(lambda: len(desk.api._watchers) == 1)
    assert not waiting.done()
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%"})
    assert [s["name"] for s in (await waiting).json["slices"]] == ["alice"]
    # A revision that this daemon has never had is from another life: answered at once.
    assert (await desk.ask("GET", "/v1/slices?since=99&wait=15s")).json["revision"] == 1


async def test_a_ratio_that_would_break_a_promise_is_refused_by_a_dry_run_too(desk: Any) -> None:
    path = f"/v1/gpus/{GPU0}"
    await desk.ask("PATCH", path, {"oversubscription": 2})
    for name in ("a", "b"):
        await desk.ask("PUT", f"/v1/slices/{name}", {"vram": "128GiB", "compute": "25%", "on": ["0"]})
    asked = {"oversubscription": 1.25}
    dry, real = await desk.ask("PATCH", f"{path}?dry_run", asked), await desk.ask("PATCH", path, asked)
    assert (dry.status, dry.json) == (real.status, real.json)
    assert (real.status, real.json["code"]) == (409, "conflict")
    assert (await desk.ask("PATCH", f"{path}?dry_run", {"oversubscription": 1.5})).json["oversubscription"] == 1.5
    assert (await desk.ask("GET", path)).json["oversubscription"] == 2


@pytest.mark.parametrize("left", ["other partitions", "nothing"])
async def test_a_gpu_that_changes_while_it_is_set_is_answered_all_the_same(
    desk: Any, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cordoned = desk.node.set_cordoned
    gpu = desk.sysfs.inventory.gpus[0]
    cut = replace(gpu, partitions=(replace(gpu.partitions[0], id=f"{GPU0}/1", index=1),))

    async def set_and_cut(*arguments: Any) -> None:
        await set_cordoned(*arguments)
        desk.sysfs.inventory = Inventory((cut,) if left == "other partitions" else ())
        await desk.node.rescan()

    monkeypatch.setattr(desk.node, "set_cordoned", set_and_cut)
    answer = await desk.ask("PATCH", f"/v1/gpus/{GPU0}", {"cordoned": True})
    shown = [p["index"] for p in answer.json["partitions"]]
    assert (answer.status, answer.json["cordoned"], shown) == (200, True, [1 if left == "other partitions" else 0])


async def test_gpus_show_what_is_promised_and_what_an_operator_has_set(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "64GiB", "compute": "25%", "on": ["0"]})
    answer = await desk.ask("PATCH", f"/v1/gpus/{GPU0}", {"cordoned": True, "oversubscription": 1.5})
    assert answer.status == 200
    gpu = (await desk.ask("GET", "/v1/gpus/0")).json
    assert gpu == answer.json == (await desk.ask("GET", "/v1/gpus")).json["gpus"][0]
    assert (gpu["cordoned"], gpu["oversubscription"], gpu["vram_used_bytes"]) == (True, 1.5, None)
    partition = gpu["partitions"][0]
    assert (partition["vram_reserved_bytes"], partition["vram_free_bytes"]) == (64 * GIB, 288 * GIB - 64 * GIB)
    refused = await desk.ask("PUT", "/v1/slices/bob", {"vram": "1GiB", "compute": "25%", "on": ["0"]})
    assert (refused.status, refused.json["code"]) == (409, "no-room")


async def test_how_a_gpu_is_is_shown_and_an_operator_has_the_last_word(desk: Any) -> None:
    path = f"/v1/gpus/{GPU0}"
    assert (await desk.ask("GET", path)).json["health"] is None
    await desk.node.set_health({GPU0: Health(Condition.UNHEALTHY, "renderD128 answers EIO", "pulse", 5.0)})
    found = {
        "condition": "unhealthy",
        "placeable": False,
        "reason": "renderD128 answers EIO",
        "source": "pulse",
        "since_s": 5.0,
        "override": None,
        "found": "unhealthy",
    }
    assert (await desk.ask("GET", path)).json["health"] == found
    refused = await desk.ask("PUT", "/v1/slices/bob", {"vram": "1GiB", "compute": "25%", "on": ["0"]})
    assert (refused.status, refused.json["code"]) == (409, "no-room")
    forced = {
        "condition": "healthy",
        "placeable": True,
        "reason": "set by a person; found was unhealthy: renderD128 answers EIO",
        "source": "override",
        "since_s": 1000.0,
        "override": "healthy",
        "found": "unhealthy",
    }
    asked = {"health_override": "healthy"}
    dry = (await desk.ask("PATCH", f"{path}?dry_run", asked)).json["health"]
    assert dry == forced | {"since_s": 5.0}
    assert (await desk.ask("GET", path)).json["health"] == found
    assert (await desk.ask("PATCH", path, asked)).json["health"] == forced
    assert (await desk.ask("PATCH", path, {"health_override": "none"})).json["health"] == found
    await desk.node.set_health({})
    assert (await desk.ask("PATCH", path, {"health_override": "unhealthy"})).json["health"]["found"] is None
    assert (await desk.ask("PATCH", f"{path}?dry_run", {"health_override": "none"})).json["health"] is None


async def test_the_drivers_own_vram_figure_is_shown_where_there_is_one(desk: Any) -> None:
    desk.sysfs.used_bytes = {"0000:12:00.0": 777}
    await desk.metrics.sample(desk.node.view().inventory)
    assert [g["vram_used_bytes"] for g in (await desk.ask("GET", "/v1/gpus")).json["gpus"]] == [None, 777]


async def test_twenty_simultaneous_claims_of_the_last_slice_give_one_success_and_nineteen_conflicts(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/last", {"vram": "1GiB", "compute": "25%"})
    answers = await asyncio.gather(
        *(desk.ask("POST", "/v1/leases", {"slice": "last", "holder": f"h{n}"}) for n in range(20))
    )
    assert sorted(a.status for a in answers) == [201] + [409] * 19


async def test_twenty_simultaneous_claims_of_the_last_room_never_promise_more_than_there_is(desk: Any) -> None:
    body = {"request": {"vram": "100GiB", "compute": "10%"}}  # one fits on each of the two GPUs of 192 GiB
    answers = await asyncio.gather(*(desk.ask("POST", "/v1/leases", body) for _ in range(20)))
    assert sorted(a.status for a in answers) == [201, 201] + [409] * 18
    assert {a.json["code"] for a in answers if a.status == 409} == {"no-room"}


async def test_a_lease_says_where_its_slice_lies_and_ends_with_its_process(desk: Any) -> None:
    desk.processes[500] = Process(uid=0, start_ticks=42)
    lease = await desk.ask(
        "POST", "/v1/leases", {"request": {"vram": "1GiB", "compute": "25%"}, "holder": "train.py", "pid": 500}
    )
    assert lease.status == 201
    assert lease.headers["Location"] == f"/v1/leases/{lease.json['id']}"
    assert {k: lease.json[k] for k in ("slice", "holder", "pid", "expires_s", "ephemeral", "slice_dir")} == {
        "slice": "made-1",
        "holder": "train.py",
        "pid": 500,
        "expires_s": None,
        "ephemeral": True,
        "slice_dir": f"{desk.run_dir}/slices/made-1",
    }
    assert lease.json["environment"]["AMDVGPU_SLICE"] == "made-1"
    assert (await desk.ask("GET", "/v1/leases")).json["leases"] == [lease.json]
    desk.processes[500] = Process(uid=0, start_ticks=43)  # the pid came round again
    await desk.node.tick()
    assert (await desk.ask("GET", lease.headers["Location"])).status == 404
    assert (await desk.ask("GET", "/v1/slices")).json["slices"] == []


async def test_a_lease_is_renewed_and_released(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%"})
    lease = (await desk.ask("POST", "/v1/leases", {"slice": "alice", "ttl_s": 10})).json
    assert lease["expires_s"] == 1010.0
    desk.now_s = 1005.0
    assert (await desk.ask("PATCH", f"/v1/leases/{lease['id']}", {"ttl_s": 60})).json["expires_s"] == 1065.0
    assert (await desk.ask("PATCH", f"/v1/leases/{lease['id']}", {})).json["expires_s"] == 1065.0
    assert (await desk.ask("PATCH", f"/v1/leases/{lease['id']}", {"ttl_s": None})).json["expires_s"] is None
    assert (await desk.ask("DELETE", f"/v1/leases/{lease['id']}")).status == 204
    assert (await desk.ask("GET", "/v1/slices/alice")).json["state"] == "free"


async def test_an_idempotency_key_gets_the_first_answer_again_for_a_day(desk: Any) -> None:
    body = {"request": {"vram": "1GiB", "compute": "25%"}}
    key = {"Idempotency-Key": "k1"}
    first = await desk.ask("POST", "/v1/leases", body, headers=key)
    again = await desk.ask("POST", "/v1/leases", body, headers=key)
    assert (again.status, again.json) == (201, first.json)
    assert again.headers["Location"] == first.headers["Location"]
    assert (first.headers.get("Idempotency-Replayed"), again.headers["Idempotency-Replayed"]) == (None, "true")
    other = await desk.ask("POST", "/v1/leases", {**body, "holder": "else"}, headers=key)
    assert (other.status, other.json["code"]) == (422, "key-reused")
    desk.now_s += 24 * 3600 + 1
    later = await desk.ask("POST", "/v1/leases", body, headers=key)
    assert later.json["id"] != first.json["id"]


async def test_a_refusal_is_not_kept_under_its_idempotency_key(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%"})
    held = (await desk.ask("POST", "/v1/leases", {"slice": "alice"})).json
    key = {"Idempotency-Key": "k1"}
    assert (await desk.ask("POST", "/v1/leases", {"slice": "alice"}, headers=key)).status == 409
    await desk.ask("DELETE", f"/v1/leases/{held['id']}")
    assert (await desk.ask("POST", "/v1/leases", {"slice": "alice"}, headers=key)).status == 201


async def test_a_change_is_tied_to_a_revision_by_if_match(desk: Any) -> None:
    made = await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%"})
    tag = made.headers["ETag"]
    assert tag.startswith('"1.')
    desk.guest_uses("alice", 5000)  # usage is no reason to refuse a change
    assert (await desk.ask("PATCH", "/v1/slices/alice", {"vram": "2GiB"}, headers={"If-Match": tag})).status == 200
    for stale in (tag, '"1"', 'W/"2"', '"7", "8"'):
        for method, body in (
            ("PATCH", {"vram": "3GiB"}),
            ("PUT", {"vram": "3GiB", "compute": "25%"}),
            ("DELETE", None),
        ):
            refused = await desk.ask(method, "/v1/slices/alice", body, headers={"If-Match": stale})
            assert (refused.status, refused.json["code"]) == (412, "stale"), (stale, method)
    assert (
        await desk.ask("PATCH", "/v1/slices/alice", {"vram": "3GiB"}, headers={"If-Match": '"9", "2"'})
    ).status == 200
    missing = await desk.ask("PUT", "/v1/slices/bob", {"vram": "1GiB"}, headers={"If-Match": "*"})
    assert missing.status == 412


async def test_if_none_match_star_creates_and_never_replaces(desk: Any) -> None:
    only = {"If-None-Match": "*"}
    spec = {"vram": "1GiB", "compute": "25%"}
    assert (await desk.ask("PUT", "/v1/slices/alice", spec, headers=only)).status == 201
    assert (await desk.ask("PUT", "/v1/slices/alice", spec, headers=only)).status == 412
    assert (await desk.ask("PUT", "/v1/slices/alice?dry_run=true", spec, headers=only)).status == 412


@pytest.mark.parametrize("path", ["/v1/slices/alice", "/v1/slices", "/v1/gpus", "/v1/gpus/0", "/v1/leases"])
async def test_a_get_with_the_present_etag_is_answered_by_304_until_something_changes(desk: Any, path: str) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%", "on": ["0"]})
    first = await desk.ask("GET", path)
    tag = {"If-None-Match": first.headers["ETag"]}
    same = await desk.ask("GET", path, headers=tag)
    assert (same.status, same.text, same.headers["ETag"]) == (304, "", first.headers["ETag"])
    await desk.ask("PATCH", "/v1/slices/alice", {"vram": "2GiB"})
    assert (await desk.ask("GET", path, headers=tag)).status == 200


async def test_a_304_is_not_given_when_only_live_figures_changed(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%", "on": ["0"]})
    first = await desk.ask("GET", "/v1/slices/alice")
    desk.guest_uses("alice", 5000)
    await desk.node.tick()
    again = await desk.ask("GET", "/v1/slices/alice", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status, again.json["shares"][0]["used_bytes"]) == (200, 5000)


async def test_cdi_system_root_and_health_answer(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%"})
    assert (await desk.ask("GET", "/v1/cdi")).json == {
        "kind": "amdvgpu.io/slice",
        "path": "memory",
        "written": True,
        "error": None,
        "devices": ["amdvgpu.io/slice=alice"],
        "conflicts": [],
        "spec": {"devices": [{"name": "alice"}]},
        "partition_devices": [],
    }
    system = (await desk.ask("GET", "/v1/system")).json
    assert (system["version"], system["ready"], system["revision"]) == ("1.2.3", True, 1)
    assert system["config"] == {"tick_s": 2.0, "rest.token": "(hidden)"}
    root = (await desk.ask("GET", "/")).json
    assert (root["versions"], root["links"]["slices"]) == (["v1"], "/v1/slices")
    for path in root["links"].values():
        if path != "/v1/events" and path != "/v1/reload":
            assert (await desk.ask("GET", path)).status == 200, path
    assert (await desk.ask("GET", "/healthz")).json == {"status": "ok"}
    assert (await desk.ask("GET", "/readyz")).json == {"status": "ok"}


async def test_a_reload_looks_at_the_machine_again(desk: Any) -> None:
    reads = desk.sysfs.reads
    assert (await desk.ask("POST", "/v1/reload")).status == 200
    assert desk.sysfs.reads == reads + 1


async def _until(true: Any) -> None:
    """Let the loop run until ``true()``; the test's own time limit is the bound."""
    while not true():
        await asyncio.sleep(0)
