"""/etc/amdvgpud/amdvgpud.toml as the packages ship it: every setting, commented out, at its default."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from amdvgpud.settings import SETTINGS, Setting

HEAD = """\
# Settings of amdvgpud. Each is shown with its default: take the sign away and change it. Files in conf.d/ beside this
# one come after it by name, then the environment, then the command line. Check with: amdvgpud config check
# Apply with: systemctl reload amdvgpud (a file with an error changes nothing).
"""


def conffile() -> str:
    """The text. Read back, it sets nothing; with the signs taken away, it sets every key to its default."""
    sections: dict[str, list[Setting]] = {"": []}
    for setting in SETTINGS.values():
        sections.setdefault(setting.key.rpartition(".")[0], []).append(setting)
    text = HEAD
    for section, settings in sections.items():
        if section:
            text += f"\n[{section}]\n"
        for setting in settings:
            meaning = textwrap.fill(setting.meaning, 118, initial_indent="# ", subsequent_indent="# ")
            # TOML writes texts, numbers, booleans and flat lists as JSON does.
            text += f"\n{meaning}\n#{setting.key.rpartition('.')[2]} = {json.dumps(setting.default)}\n"
    return text


if __name__ == "__main__":
    sys.stdout.write(conffile())
