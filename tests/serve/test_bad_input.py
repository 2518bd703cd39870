"""Bad input: a 4xx that names the field, in one form, and nothing changed. Never a 5xx."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import yarl

SPEC = {"vram": "1GiB", "compute": "25%"}


@pytest.mark.parametrize(
    ("body", "pointer", "says"),
    [
        ({"vram": "lots"}, "/vram", "'lots' is no size"),
        ({"vram": 0}, "/vram", "out of range"),
        ({"vram": -1}, "/vram", "out of range"),
        ({"vram": "1.5"}, "/vram", "not a whole number of bytes"),
        ({"vram": 1.5}, "/vram", "Expected `int | str | null`, got `float`"),
        ({"vram": "16EiB"}, "/vram", "is no size"),
        ({"compute": "half"}, "/compute", "'half' is no amount of compute"),
        ({"compute": "0%"}, "/compute", "out of range"),
        ({"compute": "101%"}, "/compute", "out of range"),
        ({"compute": "25%", "policy": "exact"}, "/compute", "'exact' takes a CU count"),
        ({"policy": "best"}, "/policy", "Invalid enum value"),
        ({"gpus": 0}, "/gpus", ">= 1"),
        ({"gpus": 17}, "/gpus", "<= 16"),
        ({"on": [0]}, "/on/0", "Expected `str`, got `int`"),
        ({"gpus": 2, "on": ["0"]}, "/on", "1 places are named for 2 GPUs"),
        ({"vrm": "1GiB"}, "/vrm", "unknown field"),
        ({"a~b/c": 1}, "/a~0b~1c", "unknown field"),
        ([], "", "got `array`"),
    ],
)
async def test_a_bad_field_is_named_and_nothing_changes(desk: Any, body: Any, pointer: str, says: str) -> None:
    for method, path, sent, prefix in (
        ("PUT", "/v1/slices/alice", body, ""),
        ("POST", "/v1/leases", {"request": body}, "/request"),
    ):
        answer = await desk.ask(method, path, sent)
        assert answer.status == 422
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert answer.json["type"] == "tag:amdvgpu.io,2026:problem/invalid"
        assert (answer.json["status"], answer.json["code"]) == (422, "invalid")
        assert [e["pointer"] for e in answer.json["errors"]] == [prefix + pointer]
        assert says in answer.json["errors"][0]["detail"]
        assert says in answer.json["detail"]
    assert desk.node.view().book.revision == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "pointer"),
    [
        ("PATCH", "/v1/slices/alice", {}, "/vram"),
        ("PATCH", "/v1/slices/alice", {"vram": None}, "/vram"),
        ("PATCH", "/v1/slices/alice", {"vram": "0"}, "/vram"),
        ("PATCH", "/v1/gpus/0", {"cordoned": "yes"}, "/cordoned"),
        ("PATCH", "/v1/gpus/0", {"health_override": "degraded"}, "/health_override"),
        ("PATCH", "/v1/gpus/0", {"oversubscription": 0.5}, "/oversubscription"),
        ("POST", "/v1/leases", {"slice": "alice", "ttl_s": 0}, "/ttl_s"),
        ("POST", "/v1/leases", {"slice": "alice", "pid": 0}, "/pid"),
        ("POST", "/v1/leases", {"slice": "alice", "pid": 10**30}, "/pid"),
        ("POST", "/v1/leases", {"slice": "alice", "request": SPEC}, "/slice"),
        ("POST", "/v1/leases", {}, "/slice"),
    ],
)
async def test_each_other_body_names_its_bad_field(desk: Any, method: str, path: str, body: Any, pointer: str) -> None:
    await desk.ask("PUT", "/v1/slices/alice", SPEC)
    answer = await desk.ask(method, path, body)
    assert (answer.status, [e["pointer"] for e in answer.json["errors"]]) == (422, [pointer])
    assert desk.node.view().book.revision == 1


@pytest.mark.parametrize("name", ["Alice", "-a", "a..b", "a" * 64, "a%00b", "a%2Fb", "%C3%A9", "%FF", "a%20b"])
async def test_a_bad_slice_name_is_named_as_the_parameter_it_is(desk: Any, name: str) -> None:
    answer = await desk.ask("PUT", yarl.URL(f"/v1/slices/{name}", encoded=True), SPEC)
    assert (answer.status, [e["parameter"] for e in answer.json["errors"]]) == (422, ["name"])
    assert "is no slice name" in answer.json["detail"]
    assert (await desk.ask("GET", yarl.URL(f"/v1/slices/{name}", encoded=True))).status == 404


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        ("/v1/slices?limit=0", "limit"),
        ("/v1/slices?limit=501", "limit"),
        ("/v1/slices?limit=many", "limit"),
        ("/v1/slices?limit=1&limit=2", "limit"),
        ("/v1/slices?cursor=%21", "cursor"),
        ("/v1/slices?cursor=_w", "cursor"),
        ("/v1/slices?state=happy", "state"),
        ("/v1/slices?since=-1", "since"),
        ("/v1/slices?wait=soon", "wait"),
        ("/v1/slices?since=null", "since"),
        ("/v1/slices?state=null", "state"),
        ("/v1/slices?colour=red", "colour"),
        ("/v1/events?since=x", "since"),
        ("/v1/gpus?x", "x"),
    ],
)
async def test_a_bad_query_parameter_is_named(desk: Any, path: str, parameter: str) -> None:
    answer = await desk.ask("GET", path, headers={"Accept": "application/json"})
    assert (answer.status, answer.json["code"]) == (400, "bad-parameter")
    assert [e["parameter"] for e in answer.json["errors"]] == [parameter]


@pytest.mark.parametrize(
    ("headers", "parameter"),
    [
        ({"If-Match": "1"}, "If-Match"),
        ({"If-Match": '"1" "2"'}, "If-Match"),
        ({"If-None-Match": '"1"'}, "If-None-Match"),
    ],
)
async def test_a_bad_condition_is_refused_rather_than_looked_past(
    desk: Any, headers: dict[str, str], parameter: str
) -> None:
    answer = await desk.ask("PUT", "/v1/slices/alice", SPEC, headers=headers)
    assert (answer.status, [e["parameter"] for e in answer.json["errors"]]) == (400, [parameter])
    assert desk.node.view().book.revision == 0


@pytest.mark.parametrize("key", ["", "k" * 256])
async def test_an_idempotency_key_has_a_length(desk: Any, key: str) -> None:
    answer = await desk.ask("POST", "/v1/leases", {"request": SPEC}, headers={"Idempotency-Key": key})
    assert (answer.status, answer.json["errors"][0]["parameter"]) == (400, "Idempotency-Key")


async def test_what_is_not_there_is_answered_with_what_is(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", SPEC)
    missing = await desk.ask("GET", "/v1/slices/bob")
    assert (missing.status, missing.json["detail"]) == (404, "no slice bob here; there are alice")
    gpu = await desk.ask("GET", "/v1/gpus/GPU-ffffffffffffffff")
    assert gpu.status == 404
    assert "GPU-00000000abcd0000" in gpu.json["detail"]
    assert (await desk.ask("GET", "/v1/gpus/GPU-00000000abcd")).status == 400  # both begin so: ambiguous
    assert (await desk.ask("GET", "/v1/leases/none")).status == 404


async def test_the_routers_own_refusals_are_problem_details_too(desk: Any) -> None:
    missing = await desk.ask("GET", "/v2/slices")
    assert (missing.status, missing.json["code"]) == (404, "not-found")
    method = await desk.ask("POST", "/v1/slices/alice", {})
    assert (method.status, method.json["code"]) == (405, "method-not-allowed")
    assert set(method.headers["Allow"].split(",")) == {"GET", "PUT", "PATCH", "DELETE"}
    for answer in (missing, method):
        assert answer.headers["Content-Type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {}, 400, "malformed"),
        (b"", {}, 400, "malformed"),
        (b"{}{}", {}, 400, "malformed"),
        (b'{"vram": NaN}', {}, 400, "malformed"),
        (b'{"vram": "\xff"}', {}, 400, "malformed"),
        (b'{"vram": "\\ud800"}', {}, 400, "malformed"),
        (b'{"vram":' + b"[" * 30000, {}, 422, "invalid"),
        (b'{"vram":' + b"9" * 30000 + b"}", {}, 422, "invalid"),
        (b'{"vram":"' + b"9" * 30000 + b'"}', {}, 422, "invalid"),
        (b"{" + b" " * 65536 + b"}", {}, 413, "request-entity-too-large"),
        (b"a=b", {"Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported-media-type"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "unsupported-media-type"),
        (b"{}", {"Content-Encoding": "gzip"}, 415, "unsupported-media-type"),
        (b"{}", {"Expect": "miracles"}, 417, "expectation-failed"),
        (b"{", {"Expect": "100-continue"}, 400, "malformed"),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused(
    desk: Any, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    sent = {"Content-Type": "application/json", **headers}
    answer = await desk.ask("PUT", "/v1/slices/alice", data=content, headers=sent)
    assert (answer.status, answer.json and answer.json["code"]) == (status, code)
    assert desk.node.view().book.revision == 0


async def test_a_body_that_never_ends_is_refused_by_size_and_one_that_never_comes_by_time(make_desk: Any) -> None:
    desk = await make_desk(settings={"body_timeout_s": 0.05})

    async def endless() -> Any:
        while True:
            yield b" " * 4096

    answer = await desk.ask("PUT", "/v1/slices/alice", data=endless(), headers={"Content-Type": "application/json"})
    assert answer.status == 413
    reader, writer = await asyncio.open_unix_connection(str(desk.run_dir / "api.sock"))
    writer.write(
        b"PUT /v1/slices/alice HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    )
    assert (await reader.readline()).split()[1] == b"408"
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /v1/slices?limit=\xff HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /v1/slices/\xff\xfe HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"PUT /v1/slices/%ff HTTP/1.1\r\nHost: [::1\r\nConnection: close\r\nContent-Type: \xff\r\n\r\n",
        b'GET /v1/slices HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nIf-None-Match: "\xff\r\n\r\n',
        b"DELETE /v1/slices/a HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nIf-Match: \xff\r\n\r\n",
        b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAccept: application/json\xff\r\n\r\n",
        b"BREW /v1/slices HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET //// HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /v1/gpus/%00 HTTP/1.1\r\nHost: \xff\r\nConnection: close\r\n\r\n",
        b"GET /v1/gpus/" + b"9" * 6000 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET /v1/slices?since=" + b"9" * 6000 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"PUT /v1/slices/a HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: a/\xff\r\n\r\n",
        b"\x16\x03\x01\x02\x00\r\n\r\n",
    ],
)
async def test_no_bytes_make_the_daemon_fail(desk: Any, raw: bytes) -> None:
    for reader, writer in (
        await asyncio.open_unix_connection(str(desk.run_dir / "api.sock")),
        await asyncio.open_connection("127.0.0.1", desk.port),
    ):
        writer.write(raw)
        answer = await reader.read()  # no end of our side first: aiohttp would not answer at all, and nothing be tried
        assert b"200" <= answer.split()[1] < b"500", answer
        writer.close()
        await writer.wait_closed()
    assert (await desk.ask("GET", "/healthz")).status == 200


async def test_an_unforeseen_fault_is_answered_as_one_and_told_in_the_log_only(
    desk: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise ZeroDivisionError("inner secret")

    monkeypatch.setattr(desk.node, "view", broken)
    answer = await desk.ask("GET", "/v1/slices")
    assert (answer.status, answer.json["code"]) == (500, "internal")
    assert "inner secret" not in answer.text
    assert "inner secret" in caplog.text


async def test_a_failure_of_the_machine_is_said_as_such(desk: Any) -> None:
    desk.cdi.faults.failing.add("publish")
    answer = await desk.ask("PUT", "/v1/slices/alice", SPEC)
    assert (answer.status, answer.json["code"]) == (500, "host-failure")
    assert "CDI file could not be written, so nothing was changed" in answer.json["detail"]
