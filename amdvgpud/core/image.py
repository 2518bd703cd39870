"""Whether the gate gets into the first program of an image. Pure: what is read of files comes in by a function.

The gate is a shared library that the dynamic linker of glibc loads, told by ``/etc/ld.so.preload``. So it is not in a
static program, not in one of musl (which reads no such file, but obeys LD_PRELOAD), not in one for another
architecture. A glibc that is too old for it does not exist: it asks for nothing newer than the first glibc of each
architecture that it is built for (tests/shim/test_library.py holds that).

Only the first program is judged: a shell of glibc that starts a static program is not seen through. Inits that only
start another program are, because runtimes put static ones in front (``podman run --init``).

Sources: elf(5); execve(2) for scripts; the command lines of tini, dumb-init and catatonit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from posixpath import basename, join, normpath
from typing import Final

HEAD_BYTES: Final = 65536
"""Enough of a program: linkers put the program headers and the loader's name into the first page."""

_INITS: Final = frozenset({"tini", "tini-static", "dumb-init", "catatonit", "docker-init", "podman-init", "init"})
_WITH_VALUE: Final = frozenset({"-p", "-e", "-r", "--rewrite"})
_STEPS: Final = 8
_DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

HeadOf = Callable[[str], bytes | None]
"""The first :data:`HEAD_BYTES` of the file at an absolute path of the image; None: there is no such file."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``fits`` None: not known. ``reason`` is of a no, or why nothing is known."""

    fits: bool | None
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.fits is True) == bool(self.reason):
            raise ValueError(f"a verdict has a reason unless it is yes: {self.fits}, {self.reason!r}")


def loader_of(head: bytes) -> str | None:
    """The PT_INTERP of an ELF program; None: it has none. ``struct.error`` where the text breaks off."""
    wide = head[4] == 2
    order = "<" if head[5] == 1 else ">"
    (table,) = struct.unpack_from(order + ("Q" if wide else "I"), head, 32 if wide else 28)
    size, count = struct.unpack_from(order + "HH", head, 54 if wide else 42)
    for at in range(table, table + size * count, size or 1):
        if struct.unpack_from(order + "I", head, at) == (3,):
            word = "Q" if wide else "I"
            (offset,) = struct.unpack_from(order + word, head, at + (8 if wide else 4))
            (length,) = struct.unpack_from(order + word, head, at + (32 if wide else 16))
            return head[offset : offset + length].rstrip(b"\0").decode("utf-8", "surrogateescape")
    return None


def same_architecture(head: bytes, other: bytes) -> bool:
    """Whether two ELF files are for one kind of processor, of one word size."""
    return (head[4], head[18:20]) == (other[4], other[18:20])


def script_words(head: bytes) -> list[str]:
    """What the first line of a script names: the interpreter and its argument; ``env`` is seen through."""
    words = [word.decode("utf-8", "surrogateescape") for word in head[2:].split(b"\n", 1)[0].split()]
    if words and basename(words[0]) == "env":
        words = [w for w in words[1:] if not w.startswith("-") and "=" not in w]
    return words


def judge(
    argv: Sequence[str], environment: Mapping[str, str], cwd: str, head_of: HeadOf, own: bytes, gate: str
) -> Verdict:
    """Of the command ``argv`` of an image. ``own`` is the head of a program for this machine, ``gate`` the path that
    LD_PRELOAD would have to name."""
    argv = list(argv)
    for _ in range(_STEPS):
        if not argv:
            return Verdict(None, "it has no command")
        path, head = _found(argv[0], environment.get("PATH", _DEFAULT_PATH), cwd, head_of)
        if head is None:
            return Verdict(None, f"there is no program {argv[0]} in its image")
        if head[:2] == b"#!":
            argv = [*script_words(head)[:1], path]
            continue
        if head[:4] != b"\x7fELF" or len(head) < 64:
            return Verdict(None, f"{path} is no program of a kind that is known")
        if not same_architecture(head, own):
            return Verdict(False, f"{path} is a program for another architecture than the gate")
        try:
            loader = loader_of(head)
        except struct.error:
            return Verdict(None, f"{path} is no ELF program that can be read")
        if loader is None:
            if basename(path) in _INITS and (rest := _started_by_init(argv)):
                argv = rest
                continue
            return Verdict(False, f"{path} is a static program, which loads no library")
        if "ld-musl" in loader and gate not in environment.get("LD_PRELOAD", "").replace(":", " ").split():
            return Verdict(False, f"{path} is a program of musl, which reads no ld.so.preload (set LD_PRELOAD={gate})")
        return Verdict(True)
    return Verdict(None, f"{argv[0]} is started by too many others to follow")


def _found(program: str, search_path: str, cwd: str, head_of: HeadOf) -> tuple[str, bytes | None]:
    folders = [""] if "/" in program else search_path.split(":")
    for folder in folders:
        path = normpath(join(cwd or "/", folder, program))
        if (head := head_of(path)) is not None:
            return path, head
    return program, None


def _started_by_init(argv: Sequence[str]) -> list[str]:
    """The command line after an init and its own options."""
    rest = list(argv[1:])
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "--":
            break
        if option in _WITH_VALUE and rest:
            rest.pop(0)
    return rest
