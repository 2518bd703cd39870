"""The page: three files that draw in a browser what the API says to everybody who may read.

Owns how they are answered. They come from the package and never from anywhere else, so there is no path to walk out of;
they talk to nobody but this API, which the content policy holds a browser to.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import Final

from aiohttp import web

PATH: Final = "/page/"

_TYPES: Final = {"index.html": "text/html", "page.js": "text/javascript", "page.css": "text/css"}

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Inline styles, for colours and column counts are set on elements; scripts come from here only."""


def wants_page(accept: str) -> bool:
    """Whether an ``Accept`` header is a browser's that opens a page, rather than a client's of the API."""
    return "text/html" in accept.lower()


async def answer(request: web.Request) -> web.Response:
    """One of the files; the bare path is the page itself. 404 for any other name."""
    name = request.match_info.get("name") or "index.html"
    if (kind := _TYPES.get(name)) is None:
        raise web.HTTPNotFound
    content = (resources.files(__package__) / name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {"ETag": tag, "Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}
    if request.headers.get("If-None-Match") == tag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=content, content_type=kind, charset="utf-8", headers=headers)
