"""The completion scripts of both programs for bash, zsh and fish, where each shell looks for them.

    python packaging/completions/build.py SHARE     as in /usr/share

Made when the packages are, by the click that they ship: a script asks the program at each Tab, in words that belong to
that click. Needs click alone, not amdvgpud.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from click.shell_completion import get_completion_class

PLACES = {
    "bash": "bash-completion/completions/{}",
    "zsh": "zsh/vendor-completions/_{}",
    "fish": "fish/vendor_completions.d/{}.fish",
}


def script(program: str, shell: str) -> str:
    kind = get_completion_class(shell)
    assert kind is not None, f"this click completes nothing in {shell}"  # noqa: S101
    return kind(click.Command(program), {}, program, f"_{program.upper()}_COMPLETE").source()


def main(share: Path) -> None:
    for program in ("amdvgpud", "amdvgpuctl"):
        for shell, place in PLACES.items():
            target = share / place.format(program)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(script(program, shell))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
