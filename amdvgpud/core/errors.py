"""The errors of amdvgpud: few, split by what the reader can do about them.

Each carries a stable ``code`` (for programs) and a sentence (for people) that names the thing, the value, the reason
and the way out. Foreign exceptions are translated into these at the border, with the cause kept (``raise … from``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class FieldError:
    """One bad field of a request: an RFC 6901 JSON pointer and what is wrong with the value there."""

    pointer: str
    detail: str


class AmdvgpuError(Exception):
    """Base of all errors that reach a user. ``str(error)`` is the whole sentence."""

    code: ClassVar[str] = "internal"

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class Invalid(AmdvgpuError):
    """What was asked is malformed: nothing will make it work but other words. ``fields`` names the bad ones."""

    code = "invalid"

    def __init__(self, detail: str, fields: tuple[FieldError, ...] = ()) -> None:
        super().__init__(detail)
        self.fields = fields

    @classmethod
    def field(cls, pointer: str, detail: str) -> Invalid:
        """One bad field; the sentence is that field's."""
        return cls(f"{pointer}: {detail}", (FieldError(pointer, detail),))


class NotFound(AmdvgpuError):
    """The named thing does not exist here. The sentence lists what does."""

    code = "not-found"


class Conflict(AmdvgpuError):
    """The request is well formed but the present state forbids it (already held, still in use, lost)."""

    code = "conflict"


class Lingering(Conflict):
    """What was asked for is not clean yet: a former user has left something there, which mostly goes by itself."""

    RETRY_AFTER_S: ClassVar[int] = 10
    """When asking again is worth it; guessed."""


class Stale(AmdvgpuError):
    """The caller's picture is older than the state: read again, decide again (HTTP 412)."""

    code = "stale"


class NoRoom(AmdvgpuError):
    """No partition can take the request now. The sentence names the roomiest one and what is missing."""

    code = "no-room"

    def __init__(self, detail: str, reason: str) -> None:
        """``reason`` is one of the closed set ``no_vram``, ``no_cus``, ``no_gpu`` (metrics use it as a label)."""
        super().__init__(detail)
        self.reason = reason


class StateUnreadable(AmdvgpuError):
    """A file that holds state cannot be understood. It is left as it is; a person has to look at it."""

    code = "state-unreadable"


class HostFailure(AmdvgpuError):
    """The machine did not let us do our part (a mount, a write, a missing device). The sentence says which."""

    code = "host-failure"
