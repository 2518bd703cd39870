"""The OpenAPI document says what the API does: by a validator, and by machine-made requests to a live daemon."""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import Any, get_type_hints

import openapi_spec_validator

from amdvgpud.core import wire
from amdvgpud.serve import routes
from amdvgpud.serve.endpoints import ROUTES, Endpoints

NOT_CHECKED = (
    "positive_data_acceptance",  # a valid request may ask for more than this machine has
    "ignored_auth",  # reads need no token
)
TOKEN = "a token of this test only"  # noqa: S105 (a test's own)


def test_the_document_is_valid_openapi() -> None:
    openapi_spec_validator.validate(routes.openapi(ROUTES, "1.2.3"))


async def test_the_document_is_served(desk: Any) -> None:
    assert (await desk.ask("GET", "/openapi.json")).json == routes.openapi(ROUTES, "1.2.3")


def test_each_record_agrees_with_its_function() -> None:
    for route in ROUTES:
        hints = get_type_hints(route.handler)
        takes = list(inspect.signature(route.handler).parameters)
        assert takes == ["self", "call", "query"] + (["body"] if route.body else []), route.name
        assert (hints["query"], hints.get("body")) == (route.query, route.body), route.name
        assert getattr(Endpoints, route.name) is route.handler


def test_every_change_takes_dry_run_and_needs_a_writer() -> None:
    for route in ROUTES:
        changes = route.method != "GET"
        assert (route.who == "writers") is changes, route.name
        assert issubclass(route.query, routes.ChangeQuery) is changes, route.name


def test_bad_bodies_are_described_as_problems() -> None:
    document = routes.openapi(ROUTES, "1.2.3")
    for path in document["paths"].values():
        for operation in path.values():
            for status, answer in operation["responses"].items():
                if int(status) >= 400 and status != "503":
                    assert answer["content"] == {
                        "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
                    }
    assert set(document["components"]["schemas"]["Problem"]["required"]) >= {"type", "title", "status", "detail"}
    assert wire.Problem.__struct_fields__[:4] == ("type", "title", "status", "detail")


# ------------------------------------------------------------------------------------------- machine-made requests


async def test_machine_made_requests_find_no_5xx_and_no_answer_that_the_document_does_not_foresee(
    make_desk: Any,
) -> None:
    desk = await make_desk(settings={"max_wait_s": 0.01})
    desk.token_file.write_text(TOKEN)
    await desk.ask("PUT", "/v1/slices/0", {"vram": "1GiB", "compute": "25%"})
    asking = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{desk.port}/openapi.json"),
        *("--header", f"Authorization: Bearer {TOKEN}", "--header", "Accept: application/json"),
        *("--phases", "coverage,fuzzing", "--max-examples", "8", "--mode", "all"),
        *("--seed", "1", "--generation-deterministic", "--no-color"),
        *("--exclude-checks", ",".join(NOT_CHECKED)),
        cwd=desk.run_dir,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    text, _ = await asking.communicate()
    assert asking.returncode == 0, text.decode()
    # What was asked has reached the real thing: changes were made, others refused.
    assert desk.node.view().book.revision > 1
