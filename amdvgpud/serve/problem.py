"""What goes wrong, as HTTP: RFC 9457 problem details from one place.

Owns the map from :mod:`amdvgpud.core.errors`, from msgspec's decoding errors and from aiohttp's own refusals to a
status and a body. A 5xx is ours alone: no input may cause one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import web

from amdvgpud.core import errors, wire

MEDIA: Final = "application/problem+json"
TYPE_PREFIX: Final = "tag:amdvgpu.io,2026:problem/"
"""Problem types are names (RFC 4151), not addresses: there is nothing to fetch. The last part is the ``code``."""

STATUS: Final[Mapping[type[errors.AmdvgpuError], int]] = {
    errors.Invalid: 422,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.Stale: 412,
    errors.NoRoom: 409,
    errors.StateUnreadable: 503,
    errors.HostFailure: 500,
}

_AT: Final = re.compile(r"^(.*?)(?: - at `(?:key in )?\$(.*)`)?$", re.DOTALL)
_FIELD_NAMED: Final = re.compile(r"(?:unknown|missing required) field `([^`]*)`")
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


class Refusal(Exception):
    """A refusal that is about HTTP and not about slices: status, code, sentence, and headers that go with it."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        fields: tuple[errors.FieldError, ...] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.fields = fields
        self.headers = dict(headers or {})


def bad_fields(error: msgspec.ValidationError, *, body: bool) -> tuple[errors.FieldError, ...]:
    """msgspec's sentence as a field and what is wrong there: a JSON pointer for a body, a bare name for a query."""
    match = _AT.match(str(error))
    assert match is not None  # noqa: S101  # the pattern matches any text
    detail, path = match[1], match[2] or ""
    steps = [name or ("0" if index == "..." else index) for name, index in _STEP.findall(path)]
    if named := _FIELD_NAMED.search(detail):
        steps.append(named[1])
    if not body:
        return (errors.FieldError("/".join(steps), detail),)
    return (errors.FieldError("".join("/" + s.replace("~", "~0").replace("/", "~1") for s in steps), detail),)


def invalid(fields: tuple[errors.FieldError, ...], *, body: bool) -> Refusal:
    """A request of the right form with wrong values in it: 422 for a body, 400 for a query or a header."""
    status, code = (422, "invalid") if body else (400, "bad-parameter")
    return Refusal(
        status, code, "; ".join(f"{f.pointer or 'the body'}: {f.detail}" for f in fields) or "invalid", fields=fields
    )


def under(error: errors.Invalid, prefix: str) -> errors.Invalid:
    """``error`` with its pointers below ``prefix``, for a shape that holds the bad one."""
    fields = tuple(errors.FieldError(prefix + f.pointer, f.detail) for f in error.fields)
    return errors.Invalid("; ".join(f"{f.pointer}: {f.detail}" for f in fields) or error.detail, fields)


def refusal_of(error: Exception) -> Refusal | None:
    """``error`` as what the client is told; None for what nobody foresaw."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, errors.AmdvgpuError):
        status = next((s for kind, s in STATUS.items() if isinstance(error, kind)), 500)
        fields = error.fields if isinstance(error, errors.Invalid) else ()
        again = {"Retry-After": str(error.RETRY_AFTER_S)} if isinstance(error, errors.Lingering) else {}
        return Refusal(status, error.code, error.detail, fields=fields, headers=again)
    if isinstance(error, web.HTTPException):
        phrase = HTTPStatus(error.status).phrase
        details = {
            404: "there is nothing at this path; GET / lists what there is",
            405: "this path does not take that method; the Allow header names those it takes",
            413: "the body is larger than this API takes",
        }
        keep = {k: v for k, v in error.headers.items() if k in ("Allow", "Location")}
        # Codes stay while the phrases of HTTP change: 413's did with Python 3.13.
        lasting = {404: "not-found", 413: "request-entity-too-large"}
        code = lasting.get(error.status) or phrase.lower().replace(" ", "-")
        return Refusal(error.status, code, details.get(error.status, phrase), headers=keep)
    return None


def _text(value: str) -> str:
    # aiohttp hands over bytes of a header or path that are no UTF-8 as lone surrogates, which JSON cannot hold.
    return value.encode("utf-8", "replace").decode()


def response_of(refusal: Refusal) -> web.Response:
    """The answer for ``refusal``. ``errors`` names body fields by ``pointer`` and other ones by ``parameter``."""
    problem = wire.Problem(
        type=TYPE_PREFIX + refusal.code,
        title=HTTPStatus(refusal.status).phrase,
        status=refusal.status,
        detail=_text(refusal.detail),
        code=refusal.code,
        errors=[
            {
                "pointer" if f.pointer.startswith("/") or not f.pointer else "parameter": _text(f.pointer),
                "detail": _text(f.detail),
            }
            for f in refusal.fields
        ],
    )
    content = msgspec.json.encode(problem)
    headers = {"Cache-Control": "no-store", **refusal.headers}
    return web.Response(status=refusal.status, body=content, content_type=MEDIA, headers=headers)
