"""One record a route, and what the records give: strict decoding of queries, and the OpenAPI document.

Owns the shape of the table. Does not own its lines (``endpoints.py``), nor HTTP itself (``rest.py``). Sources: OpenAPI
3.1.0, whose schemas are JSON Schema 2020-12, which is what msgspec writes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from amdvgpud.core import wire
from amdvgpud.core.errors import FieldError
from amdvgpud.serve import problem
from amdvgpud.serve.access import Caller

JSON: Final = "application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
EVENT_STREAM: Final = "text/event-stream"
METRICS_TEXT: Final = "text/plain"

_DURATION: Final = re.compile(r"([0-9]{1,6})(ms|s|m)?", re.ASCII)
_PARAMETER: Final = re.compile(r"\{(\w+)\}")
_Q = TypeVar("_Q", bound=Struct)

Duration = Annotated[
    str,
    Meta(
        description="a whole number of ms, s or m, as in '30s'; longer waits than the server allows are shortened",
        extra_json_schema={"pattern": r"^[0-9]{1,6}(ms|s|m)?$"},
    ),
]


class NoQuery(Struct, forbid_unknown_fields=True):
    pass


class ChangeQuery(Struct, forbid_unknown_fields=True):
    dry_run: Annotated[bool, Meta(description="say what would happen, and change nothing")] = False


class DeleteQuery(ChangeQuery, forbid_unknown_fields=True):
    force: Annotated[bool, Meta(description="though processes run in it or a lease holds it")] = False


class PartitionQuery(ChangeQuery, forbid_unknown_fields=True):
    force: Annotated[bool, Meta(description="though slices that nobody uses are lost by it")] = False


class WishQuery(Struct, forbid_unknown_fields=True):
    want: Annotated[
        str,
        Meta(
            max_length=512,
            description="slices with commas between them: '4x25%:47GiB' (of a whole GPU) or '38:24GiB' (CUs) each",
            extra_json_schema={"pattern": "^[0-9A-Za-z%:., ]*$"},
        ),
    ] = ""


# Optional parameters are unset rather than None: msgspec takes the text "null" for None, and a query has no null.


class SliceQuery(Struct, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=500, description="at most so many at once")] = 500
    cursor: Annotated[str, Meta(description="`next_cursor` of the answer before")] | UnsetType = UNSET
    gpu: (
        Annotated[str, Meta(description="only slices on this GPU or partition, in any form of its name")] | UnsetType
    ) = UNSET
    state: wire.SliceState | UnsetType = UNSET
    since: Annotated[int, Meta(ge=0, description="answer when the revision is another one than this")] | UnsetType = (
        UNSET
    )
    wait: Annotated[Duration, Meta(description="with `since`: at most so long")] = "0s"


class EventQuery(Struct, forbid_unknown_fields=True):
    since: Annotated[int, Meta(ge=0, description="events after this id; without it, from now on")] | UnsetType = UNSET
    wait: Annotated[Duration, Meta(description="JSON only: wait at most so long for the first event")] = "0s"


@dataclass(frozen=True, slots=True)
class Call:
    """One request that has come through the door, its query and body apart."""

    request: web.Request
    caller: Caller
    path: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a route answers. ``revision`` makes an ETag, which a GET may be spared by and a change be tied to."""

    value: Struct | None
    status: int = 200
    revision: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[..., Awaitable[Reply | web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method on one path. ``handler`` takes (self, call), then ``query`` and ``body`` where the record has them."""

    method: Literal["GET", "PUT", "PATCH", "POST", "DELETE"]
    path: str
    summary: str
    handler: Handler
    answers: Mapping[int, tuple[type[Struct], ...]]
    """By status: the shapes it may have; none for no content."""
    body: type[Struct] | None = None
    query: type[Struct] = NoQuery
    who: Literal["anybody", "details", "writers"] = "anybody"
    problems: tuple[int, ...] = ()
    """Statuses a caller must reckon with, besides those that every route has."""
    media: tuple[str, ...] = (JSON,)
    request_headers: Mapping[str, str] = field(default_factory=dict)
    """Header → what it does."""

    @property
    def name(self) -> str:
        """Operation id: the handler's name."""
        return self.handler.__name__


def parse_duration_s(text: str, longest_s: float, name: str = "wait") -> float:
    """Seconds of ``text``, at most ``longest_s``."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise problem.invalid(
            (FieldError(name, f"{text!r} is no duration: a whole number of ms, s or m, as in '30s'"),), body=False
        )
    return min(int(match[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0}[match[2] or "s"], longest_s)


def decode_query(pairs: Iterable[tuple[str, str]], shape: type[_Q]) -> _Q:
    """Query parameters as ``shape``. A flag without a value is on; what is unknown or comes twice is refused."""
    flags = {f.name for f in msgspec.structs.fields(shape) if isinstance(f.default, bool)}
    given: dict[str, str] = {}
    for name, value in pairs:
        if name in given:
            raise problem.invalid((FieldError(name, "is given twice"),), body=False)
        given[name] = "true" if name in flags and value == "" else value
        if name in flags and given[name] not in ("true", "false"):
            raise problem.invalid((FieldError(name, f"{value!r} is neither true nor false"),), body=False)
    try:
        return msgspec.convert(given, shape, strict=False)
    except msgspec.ValidationError as error:
        raise problem.invalid(problem.bad_fields(error, body=False), body=False) from error


# --------------------------------------------------------------------------------------------------------- OpenAPI

_ALWAYS: Final = (400, 403, 404, 405, 500)
_REF: Final = "#/components/schemas/{name}"


def openapi(routes: Iterable[Route], version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of ``routes``."""
    routes = list(routes)
    shapes: dict[type[Struct], None] = {wire.Problem: None}
    for route in routes:
        shapes |= dict.fromkeys(shape for options in route.answers.values() for shape in options)
        shapes |= {route.body: None} if route.body else {}
    listed = list(shapes)
    refs, components = msgspec.json.schema_components(listed, schema_hook=_any_value, ref_template=_REF)
    ref_of = dict(zip(listed, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, ref_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "amdvgpud",
            "version": version,
            "description": "Slices of AMD GPUs on one machine. Changes need the unix socket, or the token over TCP.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _any_value(kind: type) -> dict[str, Any]:
    if kind is object:
        return {"description": "any JSON value"}
    raise NotImplementedError(kind)


def _operation(route: Route, ref_of: Mapping[type[Struct], Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in _PARAMETER.findall(route.path)
        ]
        + _query_parameters(route.query)
        + [
            {"name": name, "in": "header", "description": meaning, "schema": {"type": "string"}}
            for name, meaning in route.request_headers.items()
        ],
        "responses": {},
    }
    problems = {*_ALWAYS, *route.problems}
    if route.who == "writers":
        # A caller without credentials may still read, hence the empty alternative.
        operation["security"] = [{"token": []}, {}]
        problems |= {401}
    if route.body is not None:
        content = {"schema": ref_of[route.body]}
        media = (MERGE_PATCH, JSON) if route.method == "PATCH" else (JSON,)
        operation["requestBody"] = {"required": True, "content": dict.fromkeys(media, content)}
        problems |= {408, 413, 415, 422}
    for status, options in route.answers.items():
        answer: dict[str, Any] = {"description": HTTPStatus(status).phrase}
        if options:
            schema = ref_of[options[0]] if len(options) == 1 else {"anyOf": [ref_of[o] for o in options]}
            answer["content"] = {JSON: {"schema": schema}}
        elif status != 204 and JSON in route.media:
            answer["content"] = {JSON: {"schema": {"type": "object"}}}
        for media_type in route.media:
            if media_type != JSON:
                answer.setdefault("content", {})[media_type] = {"schema": {"type": "string"}}
        operation["responses"][str(status)] = answer
    if "If-None-Match" in route.request_headers and route.method == "GET":
        operation["responses"]["304"] = {"description": HTTPStatus(304).phrase}
    for status in sorted(problems - {int(s) for s in operation["responses"]}):
        operation["responses"][str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {problem.MEDIA: {"schema": ref_of[wire.Problem]}},
        }
    return operation


def _query_parameters(shape: type[Struct]) -> list[dict[str, Any]]:
    (_, schemas) = msgspec.json.schema_components([shape], ref_template=_REF)
    properties = schemas[shape.__name__].get("properties", {})
    parameters = []
    for name, schema in properties.items():
        parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
    return parameters
