"""Whether the gate gets into the first program of an image; heads of programs are made by hand."""

from __future__ import annotations

import struct

import pytest

from amdvgpud.core.image import Verdict, judge, loader_of

GATE = "/usr/lib/amdvgpu/libamdvgpu.so"


def program(loader: str | None, machine: int = 62) -> bytes:
    """An ELF of 64 bit, with a PT_LOAD, and a PT_INTERP if there is a ``loader``."""
    name = b"" if loader is None else loader.encode() + b"\0"
    headers = [struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 0, 0, 0)]
    if loader is not None:
        headers.append(struct.pack("<IIQQQQQQ", 3, 4, 64 + 56 * 2, 0, 0, len(name), len(name), 1))
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    head = ident + struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, len(headers), 0, 0, 0)
    return head + b"".join(headers) + name


GLIBC, MUSL, STATIC = program("/lib64/ld-linux-x86-64.so.2"), program("/lib/ld-musl-x86_64.so.1"), program(None)
FILES = {
    "/bin/bash": GLIBC,
    "/usr/bin/python3": GLIBC,
    "/bin/busybox": STATIC,
    "/bin/ash": MUSL,
    "/bin/arm": program("/lib/ld-linux-aarch64.so.1", machine=183),
    "/sbin/tini": STATIC,
    "/app/run": b"#!/bin/bash -e\n",
    "/app/main.py": b"#!/usr/bin/env -S python3\n",
    "/app/loop": b"#!/app/loop\n",
    "/etc/motd": b"hello",
    "/bin/torn": GLIBC[:70],
}


@pytest.mark.parametrize(
    ("argv", "environment", "verdict"),
    [
        (["/bin/bash"], {}, Verdict(True)),
        (["python3", "train.py"], {}, Verdict(True)),
        (["python3"], {"PATH": "/opt:/usr/bin"}, Verdict(True)),
        (["./run"], {}, Verdict(True)),
        (["/app/main.py"], {}, Verdict(True)),
        (["/sbin/tini", "-g", "-p", "SIGTERM", "--", "python3"], {}, Verdict(True)),
        (["/sbin/tini", "bash"], {}, Verdict(True)),
        (["busybox", "sh"], {}, Verdict(False, "/bin/busybox is a static program, which loads no library")),
        (["/sbin/tini", "busybox"], {}, Verdict(False, "/bin/busybox is a static program, which loads no library")),
        (["/sbin/tini"], {}, Verdict(False, "/sbin/tini is a static program, which loads no library")),
        (["/bin/arm"], {}, Verdict(False, "/bin/arm is a program for another architecture than the gate")),
        (
            ["ash"],
            {},
            Verdict(False, f"/bin/ash is a program of musl, which reads no ld.so.preload (set LD_PRELOAD={GATE})"),
        ),
        (["ash"], {"LD_PRELOAD": f"/lib/x.so:{GATE}"}, Verdict(True)),
        (["nothing"], {}, Verdict(None, "there is no program nothing in its image")),
        (["/etc/motd"], {}, Verdict(None, "/etc/motd is no program of a kind that is known")),
        (["/bin/torn"], {}, Verdict(None, "/bin/torn is no ELF program that can be read")),
        (["/app/loop"], {}, Verdict(None, "/app/loop is started by too many others to follow")),
        ([], {}, Verdict(None, "it has no command")),
    ],
)
def test_the_first_program_decides(argv: list[str], environment: dict[str, str], verdict: Verdict) -> None:
    path = {"PATH": "/usr/bin:/bin"} | environment
    assert judge(argv, path, "/app", FILES.get, GLIBC, GATE) == verdict


def test_the_loader_is_read_from_programs_of_either_word_size_and_order() -> None:
    assert loader_of(GLIBC) == "/lib64/ld-linux-x86-64.so.2"
    assert loader_of(STATIC) is None


def test_a_verdict_without_a_reason_is_a_yes_only() -> None:
    for fits, reason in ((False, ""), (None, ""), (True, "why not")):
        with pytest.raises(ValueError, match="reason"):
            Verdict(fits, reason)
