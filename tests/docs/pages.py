"""Documents as a reader takes them: the blocks of commands in them, and what is said to come back.

A fenced block ``sh`` is what a reader types: each line after ``$ `` is a command (``> `` goes on with it), the lines
below it are what it prints; ``...`` stands for any text, alone on a line for any lines. No line: nothing is said of
what it prints. ``(exit code N)`` as the last line: it ends so, and not with 0. In a block without any ``$ `` each line
is a command of which nothing more is said. A comment above a block,
``<!-- not run: WORD -->``, takes it out of the test; WORD must be one of :data:`NOT_RUN`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "cdi/README.md")

NOT_RUN: Final = {
    "daemon": "is the daemon itself; the test has one running",
    "systemd": "needs systemd as PID 1; tests/e2e/systemd runs the units on such a machine",
    "docker": "needs a docker daemon; `make e2e-runtimes` runs one",
    "containerd": "needs containerd or a kubelet; `make e2e-runtimes` runs containerd",
    "kubernetes": "needs a cluster",
    "slurm": "needs Slurm; `make e2e-slurm` runs one",
    "hardware": "needs an AMD GPU, or changes the machine for good",
    "rootless": "needs a user with a rootless podman of its own; `make e2e-runtimes` has one",
    "prometheus": "needs services that tests/monitoring starts for itself",
    "build": "builds this repository; CI runs it",
    "example": "shows a form, not a command",
}
"""Why a block is not run here."""

_BLOCK: Final = re.compile(
    r"(?:<!-- not run: (?P<why>.*?) -->\n+)?^```(?P<kind>\S*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
_ANYTHING: Final = re.compile(r"(?<!\.)\.\.\.(?!\.)")
"""Three dots, no more: a drawing of free compute units has rows of them."""
_SHELL: Final = ("sh", "bash", "console", "shell")


@dataclass(frozen=True, slots=True)
class Command:
    line: int
    text: str
    output: tuple[str, ...]
    code: int

    def matches(self, output: str) -> bool:
        """Whether ``output`` is what the document says; trailing blanks do not count."""
        got = "\n".join(line.rstrip() for line in output.rstrip().splitlines())
        pattern = ""
        for line in self.output:
            if line.strip() == "...":
                pattern += r"(?:.*\n)*?"
            else:
                pattern += ".*?".join(map(re.escape, _ANYTHING.split(line.rstrip()))) + r"\n"
        return not self.output or re.fullmatch(pattern, got + "\n") is not None


@dataclass(frozen=True, slots=True)
class Block:
    line: int
    not_run: str | None
    commands: tuple[Command, ...]


def blocks(text: str) -> Iterator[Block]:
    """Blocks of commands, in order. ``ValueError``: one that has text before its first command."""
    for match in _BLOCK.finditer(text):
        if match["kind"] in _SHELL:
            line = text.count("\n", 0, match.start("body")) + 1
            yield Block(line, match["why"], tuple(_commands(match["body"], line)))


def _commands(body: str, line: int) -> Iterator[Command]:
    text: list[str] = []
    output: list[str] = []
    at = line
    lines = body.splitlines()
    if not any(said.startswith("$ ") for said in lines):
        lines = [f"$ {said}" for said in lines if said]
    for number, said in enumerate([*lines, "$ "], line):
        if said.startswith("$ "):
            if text:
                code = 0
                if output and (match := re.fullmatch(r"\(exit code (\d+)\)", output[-1])):
                    code = int(match[1])
                    output.pop()
                yield Command(at, "\n".join(text), tuple(output), code)
            text, output, at = [said[2:]], [], number
        elif said.startswith("> ") and not output and text:
            text.append(said[2:])
        elif text:
            output.append(said)
        else:
            raise ValueError(f"line {number}: {said!r} is before the first command, which begins with '$ '")
