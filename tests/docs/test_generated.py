"""The generated parts of the documents, the man pages and the completions, against the code and by the real tools."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from amdvgpud.cli import cli as amdvgpud_cli
from amdvgpud.ctl.cli import cli as amdvgpuctl_cli
from amdvgpud.settings import SETTINGS, read_settings, shown

ROOT = Path(__file__).resolve().parents[2]
GENERATE: dict[str, Any] = runpy.run_path(str(ROOT / "docs/generate.py"), run_name="generate")
PROGRAMS = {"amdvgpuctl": amdvgpuctl_cli, "amdvgpud": amdvgpud_cli}
MAN = sorted((ROOT / "packaging/man").glob("*.[1-9]"))


@pytest.mark.parametrize("path", GENERATE["documents"](), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_document_is_as_the_code_has_it(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text == GENERATE["filled"](text), "write it anew: python docs/generate.py"


def test_every_part_has_a_document_that_shows_it() -> None:
    text = "".join(path.read_text("utf-8") for path in GENERATE["documents"]())
    assert set(re.findall(r"generated: (\S+)", text)) == set(GENERATE["PARTS"])


def test_a_changed_option_makes_its_document_stale() -> None:
    """The comparison above is worth what it sees."""
    path = ROOT / "packaging/man/amdvgpuctl.1"
    text = path.read_text("utf-8")
    changed = text.replace("\\-\\-image\\-root", "\\-\\-image\\-roof")
    assert changed != text
    assert GENERATE["filled"](changed) == text


def _default_file() -> str:
    page = (ROOT / "docs/reference/configuration.md").read_text("utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    return str(block)


def test_the_default_file_sets_nothing_and_uncommented_sets_each_key_to_its_default(tmp_path: Path) -> None:
    file = tmp_path / "amdvgpud.toml"
    file.write_text(_default_file())
    assert [key for table in tomllib.loads(_default_file()).values() for key in table] == []
    file.write_text(re.sub(r"(?m)^#(\w+ = )", r"\1", _default_file()))
    settings = read_settings({}, {}, file)
    assert shown(settings) == shown(read_settings({}, {}))
    assert set(settings.origin.values()) == {str(file)}
    assert set(settings.origin) == set(SETTINGS)


# -------------------------------------------------------------------------------------------------------- man pages


def test_there_are_the_four_pages() -> None:
    assert [p.name for p in MAN] == ["amdvgpu-metrics.7", "amdvgpuctl.1", "amdvgpud.8", "amdvgpud.toml.5"]


@pytest.mark.parametrize("page", MAN, ids=lambda p: p.name)
def test_mandoc_finds_no_fault_with_a_page(page: Path) -> None:
    done = subprocess.run(["mandoc", "-T", "lint", "-W", "warning", page], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def _as_read(page: str) -> str:
    """The page as a reader sees it, without the line breaks that its width brings."""
    done = subprocess.run(
        ["mandoc", "-T", "utf8", "-O", "width=500", ROOT / "packaging/man" / page],
        capture_output=True,
        text=True,
        check=True,
    )
    return re.sub(r".\x08", "", done.stdout)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_page_of_a_program_has_every_option_of_its_help(program: str) -> None:
    page = _as_read({"amdvgpuctl": "amdvgpuctl.1", "amdvgpud": "amdvgpud.8"}[program])
    waiting: list[list[str]] = [[]]
    seen = 0
    while waiting:
        words = waiting.pop()
        text = CliRunner().invoke(PROGRAMS[program], [*words, "--help"], prog_name=program).output
        options, _, commands = text.partition("Commands:\n")
        for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", options, re.MULTILINE):
            if option != "--help":
                seen += 1
                assert option in page, (words, option)
        for name in re.findall(r"^  ([\w-]+) ", commands.partition("\n\n")[0], re.MULTILINE):
            assert name in page
            waiting.append([*words, name])
    assert seen > 20


# ------------------------------------------------------------------------------------------------------ completions


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("share")
    subprocess.run([sys.executable, ROOT / "packaging/completions/build.py", folder], check=True)
    return folder


def _shell(*argv: str, input: str | None = None) -> str:
    assert shutil.which(argv[0]), f"{argv[0]} is not here: scripts/setup test installs it"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": "/nonexistent", "TERM": "dumb", "AMDVGPU_SOCKET": "/nonexistent/api.sock"}
    done = subprocess.run(argv, input=input, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    return done.stdout


def test_bash_completes_commands_and_options(share: Path) -> None:
    source = f"source {share}/bash-completion/completions"
    ask = """
    ask() { local program=$1; shift; COMP_WORDS=("$program" "$@"); COMP_CWORD=$#; COMPREPLY=()
      "$(complete -p "$program" | sed 's/.*-F \\([^ ]*\\).*/\\1/')" "$program"; echo "${COMPREPLY[@]}"; }
    """
    said = _shell("bash", "--norc", "-c", f"{source}/amdvgpuctl; {source}/amdvgpud; {ask}"
                  "ask amdvgpuctl sl; ask amdvgpuctl slice create --vr; "
                  "ask amdvgpud con"
                  )  # fmt: skip
    assert said.splitlines() == ["slice", "--vram", "config"]


def test_fish_completes_commands_and_options(share: Path) -> None:
    source = f"source {share}/fish/vendor_completions.d"
    said = _shell("fish", "--no-config", "-c", f"{source}/amdvgpuctl.fish; {source}/amdvgpud.fish; "
                  "complete -C 'amdvgpuctl sl'; complete -C 'amdvgpuctl slice create --vr'; complete -C 'amdvgpud con'"
                  )  # fmt: skip
    assert [line.split("\t")[0] for line in said.splitlines()] == ["slice", "--vram", "config"]


def test_zsh_completes_commands(share: Path) -> None:
    """In a terminal of its own, with the Tab key: zsh completes nowhere else."""
    script = f"""
    zmodload zsh/zpty
    zpty -b terminal zsh -f -i
    zpty -w terminal "PS1=; fpath=({share}/zsh/vendor-completions \\$fpath); autoload -U compinit; compinit -u -D"
    zpty -w terminal "bindkey '^I' complete-word; print rea''dy"
    zpty -r -m terminal line '*ready*'
    zpty -w -n terminal "amdvgpuctl slice cr"$'\\t'
    zpty -r -m terminal line '*slice create*' && print completed
    """
    assert _shell("zsh", "-f", "-c", script).splitlines()[-1] == "completed"
