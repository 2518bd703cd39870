"""Events: streams, long polls, their bounds and their end."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp

SPEC = {"vram": "1GiB", "compute": "25%"}


async def _frames(stream: aiohttp.ClientResponse, count: int) -> list[dict[str, str]]:
    """The next ``count`` frames that are no comments."""
    found: list[dict[str, str]] = []
    frame: dict[str, str] = {}
    while len(found) < count:
        line = (await stream.content.readline()).decode()
        assert line, f"the stream ended after {found}"
        if line == "\n":
            if frame:
                found.append(frame)
            frame = {}
        elif not line.startswith(":"):
            name, _, value = line.rstrip("\n").partition(": ")
            frame[name] = value
    return found


async def test_a_stream_tells_what_happens_from_now_on(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/before", SPEC)
    async with desk.unix.get("/v1/events") as stream:
        assert stream.headers["Content-Type"] == "text/event-stream"
        await stream.content.readline()
        await desk.ask("PUT", "/v1/slices/alice", SPEC)
        await desk.ask("DELETE", "/v1/slices/alice")
        made, deleted = await _frames(stream, 2)
    assert (made["event"], deleted["event"]) == ("slice.created", "slice.deleted")
    told = json.loads(made["data"])
    assert (told["subject"], told["kind"], told["revision"], told["time_s"]) == ("alice", "slice.created", 2, 1000.0)
    assert made["id"] == f"{desk.api._watchers.epoch}-{told['id']}"


async def test_a_stream_goes_on_after_the_last_event_that_the_client_has(desk: Any) -> None:
    async with desk.unix.get("/v1/events") as stream:
        await stream.content.readline()
        await desk.ask("PUT", "/v1/slices/a", SPEC)
        (seen,) = await _frames(stream, 1)
    await desk.ask("PUT", "/v1/slices/b", SPEC)
    for last in (seen["id"], seen["id"].partition("-")[2]):
        async with desk.unix.get("/v1/events", headers={"Last-Event-ID": last}) as stream:
            (missed,) = await _frames(stream, 1)
        assert json.loads(missed["data"])["subject"] == "b"


async def test_a_client_that_missed_something_is_told_to_read_again(desk: Any) -> None:
    for n in range(1100):
        desk.node.tell("test", "node", str(n))  # more than the ring holds
    for last in ("1", "99999", f"{desk.api._watchers.epoch}-1", "deadbeef-5", "nonsense", "²"):
        async with desk.unix.get("/v1/events", headers={"Last-Event-ID": last}) as stream:
            (frame,) = await _frames(stream, 1)
            assert frame["event"] == "resync", last
            await desk.ask("PUT", f"/v1/slices/s{abs(hash(last))}", {"vram": 1, "compute": "1%"})
            (live,) = await _frames(stream, 1)
            assert live["event"] == "slice.created", last


async def test_an_event_id_of_the_daemon_before_is_not_taken_for_one_of_this(desk: Any) -> None:
    _, last_id, _ = desk.node.events_since(0)
    async with desk.unix.get("/v1/events", headers={"Last-Event-ID": f"deadbeef-{last_id}"}) as stream:
        (frame,) = await _frames(stream, 1)
    assert frame["event"] == "resync"


async def test_an_idle_stream_is_kept_alive_by_comments(make_desk: Any) -> None:
    desk = await make_desk(settings={"keep_alive_s": 0.01})
    async with desk.unix.get("/v1/events") as stream:
        lines = [await stream.content.readline() for _ in range(6)]
    assert lines == [b": hello\n", b"\n", b": nothing new\n", b"\n", b": nothing new\n", b"\n"]


async def test_a_long_poll_answers_at_once_what_is_there_and_waits_for_what_is_not(desk: Any) -> None:
    accept = {"Accept": "application/json"}
    await desk.ask("PUT", "/v1/slices/a", SPEC)
    there = (await desk.ask("GET", "/v1/events?since=0&wait=15s", headers=accept)).json
    assert [e["kind"] for e in there["events"]] == ["inventory.changed", "slice.created"]
    waiting = asyncio.create_task(desk.ask("GET", f"/v1/events?since={there['last_id']}&wait=15s", headers=accept))
    while not len(desk.api._watchers):
        await asyncio.sleep(0)
    await desk.ask("DELETE", "/v1/slices/a")
    answer = (await waiting).json
    assert ([e["kind"] for e in answer["events"]], answer["resync"]) == (["slice.deleted"], False)
    assert (await desk.ask("GET", "/v1/events?since=9999&wait=15s", headers=accept)).json["resync"] is True


async def test_a_long_poll_ends_when_its_time_is_over(make_desk: Any) -> None:
    desk = await make_desk(settings={"max_wait_s": 0.01})
    answer = await desk.ask("GET", "/v1/events?wait=50m", headers={"Accept": "application/json"})
    assert (answer.status, answer.json["events"]) == (200, [])
    assert (await desk.ask("GET", "/v1/slices?since=0&wait=50m")).status == 200


async def test_watchers_are_bounded_and_a_place_is_free_again_when_one_goes(make_desk: Any) -> None:
    desk = await make_desk(settings={"max_watchers": 2, "keep_alive_s": 0.01})
    async with desk.unix.get("/v1/events") as first, desk.unix.get("/v1/events") as second:
        await first.content.readline()
        await second.content.readline()
        refused = await desk.ask("GET", "/v1/events")
        assert (refused.status, refused.json["code"], refused.headers["Retry-After"]) == (429, "too-many-watchers", "5")
        assert (await desk.ask("GET", "/v1/slices?since=0&wait=1s")).status == 429
        for who_does_not_wait in ("/v1/slices", "/v1/slices?since=0", "/v1/slices?since=7&wait=1s"):
            assert (await desk.ask("GET", who_does_not_wait)).status == 200
        past = await desk.ask("GET", "/v1/events?since=0", headers={"Accept": "application/json"})
        assert [e["kind"] for e in past.json["events"]] == ["inventory.changed"]
    while len(desk.api._watchers):
        await asyncio.sleep(0.001)  # the keep-alive finds out that they are gone
    async with desk.unix.get("/v1/events") as stream:
        assert stream.status == 200


async def test_a_watcher_that_does_not_read_is_dropped_and_the_others_are_not(make_desk: Any) -> None:
    desk = await make_desk(settings={"stall_s": 0.05})
    reader, writer = await asyncio.open_unix_connection(str(desk.run_dir / "api.sock"), limit=1024)
    writer.write(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    async with desk.unix.get("/v1/events") as other:
        await other.content.readline()
        while len(desk.api._watchers) < 2:
            await asyncio.sleep(0)
        told = 0
        while len(desk.api._watchers) == 2:  # until the socket's buffers are full and the time is over
            told += 1
            desk.node.tell("test", "node", "x" * 100_000)
            await _frames(other, 1)
        (frame,) = [f for f in [desk.node.tell("test", "node", "last")] for f in await _frames(other, 1)]
        assert json.loads(frame["data"])["detail"] == "last"
    writer.close()
    assert reader is not None


async def test_closing_ends_streams_and_waits_within_seconds(desk: Any) -> None:
    async with desk.unix.get("/v1/events") as stream:
        await stream.content.readline()
        waiting = asyncio.create_task(desk.ask("GET", "/v1/slices?since=0&wait=20s"))
        while len(desk.api._watchers) < 2:
            await asyncio.sleep(0)
        began_s = time.monotonic()
        await desk.api.close()
        took_s = time.monotonic() - began_s
        assert (await waiting).status == 200
        rest = await stream.content.read()
    assert rest in (b"", b"\n")
    assert took_s < 5
