"""ETag, If-Match, If-None-Match (RFC 9110 section 13) and Idempotency-Key: what ties a request to a picture.

An ETag here is strong: ``"<revision>.<digest of the answer>"``. The digest, because live figures (usage, state) change
without a revision, and a 304 for other bytes would be a lie; the revision, because a change is to be tied to what was
promised and not to what was used meanwhile: ``If-Match`` compares the part before the dot, and takes ``"<revision>"``.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from multidict import CIMultiDictProxy

from amdvgpud.core.errors import FieldError, Stale
from amdvgpud.serve import problem

_TAGS: Final = re.compile(r'\s*(?:(W/)?"([\x21\x23-\x7e\x80-\xff]*)"\s*(?:,\s*|$))', re.ASCII)

KEPT_S: Final = 24 * 3600.0
MAX_KEYS: Final = 4096
"""Beyond this the oldest result is forgotten: a client that repeats a request that late gets it done twice."""
MAX_KEY_LENGTH: Final = 255


Headers = CIMultiDictProxy[str]


def _all(headers: Headers, name: str) -> str | None:
    """The header as one list, however many lines it came in; None without it."""
    return ", ".join(headers.getall(name)) if name in headers else None


def etag(revision: int, content: bytes) -> str:
    return f'"{revision}.{zlib.crc32(content):08x}"'


def _tags(header: str, name: str) -> list[tuple[bool, str]]:
    """(weak, tag) of each entry."""
    tags, at = [], 0
    while at < len(header):
        match = _TAGS.match(header, at)
        if match is None:
            raise problem.invalid(
                (FieldError(name, f"{header!r} is no list of entity tags: write '*' or tags in double quotes"),),
                body=False,
            )
        tags.append((match[1] is not None, match[2]))
        at = match.end()
    return tags


def not_modified(headers: Headers, current: str) -> bool:
    """Whether a GET may be answered by 304: the client has just this answer."""
    header = _all(headers, "If-None-Match")
    if header is None:
        return False
    return header.strip() == "*" or any(f'"{tag}"' == current for _, tag in _tags(header, "If-None-Match"))


def create_only(headers: Headers) -> bool:
    """``If-None-Match: *`` on a PUT. Other tags there would say 'replace it unless it is this one': refused."""
    header = _all(headers, "If-None-Match")
    if header is None:
        return False
    if header.strip() != "*":
        raise problem.invalid(
            (FieldError("If-None-Match", f"{header!r}: a change takes only '*', which means: create, never replace"),),
            body=False,
        )
    return True


def if_revision(headers: Headers, current: int | None, what: str) -> int | None:
    """The revision that a change is tied to by If-Match, or None if it is not. ``current`` None: it is not there.

    ``Stale`` where no tag matches. Weak tags never match, as the RFC has it.
    """
    header = _all(headers, "If-Match")
    if header is None:
        return None
    if header.strip() == "*":
        if current is None:
            raise Stale(f"{what} does not exist, and 'If-Match: *' asks that it does")
        return None
    tags = _tags(header, "If-Match")
    if current is not None and any(not weak and tag.partition(".")[0] == str(current) for weak, tag in tags):
        return current
    now = "does not exist" if current is None else f"is at revision {current}"
    raise Stale(f"{what} {now}, and If-Match is {header}: read it again")


# ----------------------------------------------------------------------------------------------- Idempotency-Key


@dataclass(frozen=True, slots=True)
class Kept:
    """The first answer to a key: what was asked (a digest), and what was said."""

    asked: bytes
    status: int
    content: bytes
    headers: Mapping[str, str]
    until_s: float


class Replays:
    """Answers by Idempotency-Key, for 24 hours, in memory: a restart of the daemon forgets them.

    Only successes are kept: what was refused for want of room may be asked again by the same key. Keys are each
    caller's own (``who``): another user's answer is never replayed.
    """

    def __init__(self, now_s: Callable[[], float], max_keys: int = MAX_KEYS) -> None:
        self._now_s = now_s
        self._max_keys = max_keys
        self._kept: dict[tuple[str, str], Kept] = {}
        self._running: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, who: str, key: str, asked: bytes) -> Kept | None:
        """The answer to replay, or None: then do it, and call :meth:`end`.

        ``Refusal`` 422 if the key was used for something else, 409 if its first request is not answered yet.
        """
        if not 1 <= len(key) <= MAX_KEY_LENGTH:
            raise problem.invalid(
                (FieldError("Idempotency-Key", f"a key of {len(key)} characters: 1 to {MAX_KEY_LENGTH}"),), body=False
            )
        now_s = self._now_s()
        # Oldest first: all live equally long, so the dict's own order is that of their ends.
        while self._kept and (first := next(iter(self._kept))) and self._kept[first].until_s <= now_s:
            del self._kept[first]
        kept = self._kept.get((who, key))
        if kept is not None and kept.asked != asked:
            raise problem.Refusal(
                422,
                "key-reused",
                "this Idempotency-Key was used for another request: use a new key for a new request",
                fields=(FieldError("Idempotency-Key", "was used for another request"),),
            )
        if kept is None and (who, key) in self._running:
            raise problem.Refusal(409, "conflict", "the first request of this Idempotency-Key is not answered yet")
        if kept is None:
            self._running.add((who, key))
        return kept

    def end(self, who: str, key: str, kept: Kept | None) -> None:
        """The request of ``key`` is over; ``kept`` None: it failed, and the key is free again."""
        self._running.discard((who, key))
        if kept is not None:
            self._kept[who, key] = kept
            if len(self._kept) > self._max_keys:
                del self._kept[next(iter(self._kept))]

    def until_s(self) -> float:
        return self._now_s() + KEPT_S
