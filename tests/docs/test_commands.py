"""Every command in the documents is run, page by page, on a machine with simulated GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.conftest import Machine
from tests.docs.pages import NOT_RUN, PAGES, ROOT, Block, Command, blocks

_MACHINE = re.compile(r"<!-- machine: (\S+) -->")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def runnable(page: Path) -> list[Command]:
    return [c for block in blocks(page.read_text("utf-8")) if block.not_run is None for c in block.commands]


WITH_COMMANDS = [page for page in PAGES if runnable(page)]


@pytest.mark.root
@pytest.mark.podman
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_each_command_of_a_page_does_what_the_page_says(page: Path, machine: Callable[[str], Machine]) -> None:
    simulated = _MACHINE.search(page.read_text("utf-8"))
    reader = machine(simulated[1] if simulated else "2*mi300x,rx9070xt")
    for command in runnable(page):
        done = reader.run(command.text)
        where = f"{name_of(page)}:{command.line}: $ {command.text}"
        assert done.code == command.code, f"{where}\nended with {done.code}:\n{done.output}"
        said = "\n".join(command.output)
        assert command.matches(done.output), f"{where}\nprinted\n{done.output}\nnot\n{said}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_not_run_says_why(page: Path) -> None:
    for block in blocks(page.read_text("utf-8")):
        assert block.commands, f"line {block.line}: no command"
        assert block.not_run is None or block.not_run in NOT_RUN, f"line {block.line}: {block.not_run}"


def test_the_page_about_documents_lists_what_is_not_run_and_why() -> None:
    index = (ROOT / "docs/README.md").read_text("utf-8")
    used = {b.not_run for page in PAGES for b in blocks(page.read_text("utf-8")) if b.not_run}
    for word in used:
        assert f"| `{word}` | {NOT_RUN[word]} |" in index


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_reader_of_pages_sees_commands_continuations_outputs_and_codes() -> None:
    """The tests above are worth what this reader sees."""
    text = "```sh\n$ a\n> b\none\n...\n$ c\n(exit code 3)\n```\n\n<!-- not run: docker -->\n```sh\n$ d\n```\n"
    assert list(blocks(text + "```toml\nx\n```\n```sh\ne\nf\n```\n")) == [
        Block(2, None, (Command(2, "a\nb", ("one", "..."), 0), Command(6, "c", (), 3))),
        Block(12, "docker", (Command(12, "d", (), 0),)),
        Block(18, None, (Command(18, "e", (), 0), Command(19, "f", (), 0))),
    ]
    command = Command(1, "x", ("a ... z", "...", "end"), 0)
    assert command.matches("a b z\nend\n")
    assert command.matches("a  z\nmore\nand more\nend")
    assert not command.matches("a b\nend")
    assert not command.matches("a b z\nend\nmore")
