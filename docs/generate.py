"""The parts of the documents that the code knows better, written into them from its tables.

    python docs/generate.py           write them
    python docs/generate.py --check   say which documents are not as they would be written

A document marks such a part: in Markdown ``<!-- generated: NAME -->`` to ``<!-- end -->``, in a man page
``.\\" generated: NAME`` to ``.\\" end``. NAME is a key of :data:`PARTS`; the rest of the document is nobody's but its
author's. tests/docs compares, so a setting, a metric, a route or an option cannot change without its document.
"""

from __future__ import annotations

import importlib
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from amdvgpud import __version__
from amdvgpud.cli import cli as amdvgpud_cli
from amdvgpud.ctl.cli import EXIT_CODES
from amdvgpud.ctl.cli import cli as amdvgpuctl_cli
from amdvgpud.daemon import RELOADED
from amdvgpud.serve.endpoints import ROUTES
from amdvgpud.serve.exposition import HAMI_METRICS, METRICS, Metric
from amdvgpud.serve.routes import openapi
from amdvgpud.settings import FORMS, SETTINGS

REPOSITORY: Final = Path(__file__).resolve().parents[1]

_MARKED: Final = re.compile(
    r"(?P<head><!-- generated: (?P<md>\S+) -->\n|\.\\\" generated: (?P<man>\S+)\n).*?(?P<end><!-- end -->|\.\\\" end)",
    re.DOTALL,
)


def documents() -> list[Path]:
    """All that may hold a generated part, in a fixed order."""
    return sorted([*REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("packaging/man/*.[1-9]")])


def filled(text: str) -> str:
    """``text`` with each marked part as the code has it now. ``KeyError``: a part that nobody makes."""
    return _MARKED.sub(lambda m: m["head"] + PARTS[m["md"] or m["man"]]() + m["end"], text)


# -------------------------------------------------------------------------------------------------------- Markdown


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def settings_md() -> str:
    return _table(
        ("key", "value", "default", "meaning"),
        (
            (
                _code(s.key),
                s.form,
                _code(json.dumps(s.default)),
                s.meaning + ("" if s.key not in RELOADED else " In force at a reload."),
            )
            for s in SETTINGS.values()
        ),
    )


def forms_md() -> str:
    return _table(("value", "is"), ((form, text) for form, text in FORMS.items()))


def names_md() -> str:
    return _table(
        ("key", "environment", "command line"),
        ((_code(s.key), _code(s.variable), _code(f"{s.flag} {s.form}")) for s in SETTINGS.values()),
    )


def conffile_md() -> str:
    text: str = runpy.run_path(str(REPOSITORY / "packaging/conffile.py"))["conffile"]()
    return f"```toml\n{text}```\n"


def _metrics_md(metrics: Iterable[Metric]) -> str:
    return _table(
        ("name", "type", "unit", "labels", "meaning"),
        ((_code(m.name), m.type, m.unit, ", ".join(map(_code, m.labels)), m.help) for m in metrics),
    )


def metrics_md() -> str:
    return _metrics_md(METRICS)


def hami_metrics_md() -> str:
    return _metrics_md(HAMI_METRICS)


def exit_codes_md() -> str:
    return _table(("code", "meaning"), EXIT_CODES)


_WHO: Final = {"anybody": "anybody", "details": "socket; TCP with `rest.tcp_details`", "writers": "socket, or token"}


def routes_md() -> str:
    return _table(
        ("request", "does", "body", "answers", "who may"),
        (
            (
                _code(f"{r.method} {r.path}"),
                r.summary,
                _shape(r.body.__name__) if r.body else "",
                ", ".join(f"{status} {' or '.join(_shape(s.__name__) for s in shapes)}".strip()
                          for status, shapes in r.answers.items()),
                _WHO[r.who],
            )
            for r in ROUTES
        ),
    )  # fmt: skip


def _shape(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def queries_md() -> str:
    document = openapi(ROUTES, __version__)
    rows = []
    for route in ROUTES:
        for parameter in document["paths"][route.path][route.method.lower()]["parameters"]:
            if parameter["in"] != "path":
                what = parameter.get("description") or parameter["schema"].get("description", "")
                rows.append((_code(f"{route.method} {route.path}"), parameter["in"], _code(parameter["name"]), what))
    return _table(("request", "in", "name", "meaning"), rows)


def shapes_md() -> str:
    """Each shape of the OpenAPI document with its fields, in the order of first use."""
    schemas = openapi(ROUTES, __version__)["components"]["schemas"]
    text = ""
    for name in sorted(schemas):
        schema = schemas[name]
        text += f"\n### {name}\n\n"
        if about := schema.get("description"):
            text += about + "\n\n"
        required = set(schema.get("required", ()))
        text += _table(
            ("field", "type", "", "meaning"),
            (
                (_code(key), _type(value), "" if key in required else "optional", value.get("description", ""))
                for key, value in schema.get("properties", {}).items()
            ),
        )
    return text + "\n"


def _type(schema: Mapping[str, Any]) -> str:
    if ref := schema.get("$ref"):
        return _shape(ref.rpartition("/")[2])
    if options := schema.get("anyOf"):
        return " or ".join(dict.fromkeys(map(_type, options)))
    if values := schema.get("enum"):
        return ", ".join(_code(str(v)) for v in values)
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema['items'])}" if schema.get("items") else "list"
    if kind == "object" and isinstance(inner := schema.get("additionalProperties"), Mapping) and inner:
        return f"object of {_type(inner)}"
    return str(kind)


# --------------------------------------------------------------------------------------------- commands, from click


def _commands(group: click.Command, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """(words, command) of every command that does something, in the order of the help."""
    if isinstance(group, click.Group):
        if group.invoke_without_command:
            yield words, group
        context = click.Context(group, info_name=words[-1])
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if command is not None and not command.hidden:
                yield from _commands(command, (*words, name))
    else:
        yield words, group


def _arguments(command: click.Command) -> str:
    context = click.Context(command)
    return " ".join(p.make_metavar(context) for p in command.params if isinstance(p, click.Argument))


def _options(command: click.Command) -> Iterator[tuple[str, str]]:
    """(how it is written, what it does); the default is said where click itself would."""
    context = click.Context(command, max_content_width=10_000)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context)):
            yield record


def _help(command: click.Command) -> list[str]:
    """Paragraphs; the epilog of exit codes is a part of its own."""
    return [" ".join(p.split()) for p in (command.help or "").split("\n\n") if p.strip()]


def commands_md(root: click.Command, name: str) -> str:
    text = ""
    for words, command in _commands(root, (name,)):
        text += f"\n## {' '.join(words)}\n\n"
        synopsis = " ".join(filter(None, (" ".join(words), "[OPTIONS]" if any(_options(command)) else "",
                                          _arguments(command))))  # fmt: skip
        text += f"`{synopsis}`\n\n" + "\n\n".join(_help(command)) + "\n"
        if options := list(_options(command)):
            text += "\n" + _table(("option", "meaning"), ((_code(written), about) for written, about in options))
    return text + "\n"


def alerts_md() -> str:
    """The alerts of the kit. Its file is our own, so lines are enough to read it by."""
    text = (REPOSITORY / "packaging/prometheus/amdvgpud.rules.yml").read_text("utf-8")
    rows = []
    for rule in text.split("      - alert: ")[1:]:
        found = dict(re.findall(r"^ +(for|summary|runbook): \"?(.*?)\"?$", rule, re.MULTILINE))
        summary = re.sub(r"\{\{ *\$labels\.(\w+) *\}\}", r"*\1*", found["summary"])
        summary = re.sub(r"\{\{ *\$value.*?\}\}", "*so much*", summary)
        page, _, anchor = found["runbook"].partition("#")
        link = f"[{anchor.replace('-', ' ')}](../{page.removeprefix('docs/')}#{anchor})"
        rows.append((_code(rule.split()[0]), summary, found.get("for", "at once"), link))
    return _table(("alert", "says", "after", "then read"), rows)


def gaps_md() -> str:
    """The gate's own list: one truth, beside the code that it is about."""
    text = (REPOSITORY / "shim/README.md").read_text("utf-8")
    _, _, section = text.partition("## What it does not hold: the written list of gaps\n\n")
    listed, _, _ = section.partition("\n\n")
    # Links there are relative to the gate's folder.
    return re.sub(r"\]\((?!https?:|/|#)", "](../shim/", listed) + "\n"


# -------------------------------------------------------------------------------------------------------- man pages


def _man(text: str) -> str:
    """``text`` for a line of man(7): backslashes, hyphens that are to be copied, and what would be a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    text = text.replace("…", "...").replace("›", ">").replace("×", "x")
    return re.sub(r"^([.'])", r"\\&\1", text)


def _entry(head: str, *paragraphs: str) -> str:
    """``head`` is roff already; the paragraphs are plain."""
    return f".TP\n{head}\n" + ".IP\n".join(_man(p) + "\n" for p in paragraphs)


def commands_man(root: click.Command, name: str) -> str:
    text = ""
    for words, command in _commands(root, (name,)):
        if words == (name,):
            continue  # the program itself: its options are a part of their own
        arguments = _man(_arguments(command))
        options = list(_options(command))
        plain = [f"\\fB{_man(' '.join(words[1:]))}\\fR", "[\\fIoptions\\fR]" if options else "", arguments]
        text += f".SS {' '.join(filter(None, plain))}\n" + ".PP\n".join(_man(p) + "\n" for p in _help(command))
        text += "".join(_entry(f"\\fB{_man(written)}\\fR", about) for written, about in options)
    return text


def options_man(root: click.Command) -> str:
    return "".join(_entry(f"\\fB{_man(written)}\\fR", about) for written, about in _options(root))


def exit_codes_man() -> str:
    return "".join(_entry(f"\\fB{_man(code)}\\fR", meaning) for code, meaning in EXIT_CODES)


def settings_man() -> str:
    text = ""
    for setting in SETTINGS.values():
        text += _entry(
            f"\\fB{_man(setting.key)}\\fR = \\fI{setting.form}\\fR",
            setting.meaning + (" In force at a reload." if setting.key in RELOADED else ""),
            f"Default: {json.dumps(setting.default)}. Environment: {setting.variable}. "
            f"Command line: {setting.flag} {setting.form}.",
        )
    return text


def forms_man() -> str:
    return "".join(_entry(f"\\fI{form}\\fR", text) for form, text in FORMS.items())


def _metrics_man(metrics: Iterable[Metric]) -> str:
    text = ""
    for m in metrics:
        labels = f"{{{', '.join(m.labels)}}}" if m.labels else ""
        unit = f", {m.unit}" if m.unit else ""
        text += _entry(f"\\fB{m.name}\\fR{_man(labels)}", f"{m.type}{unit}. {m.help}")
    return text


FIGURES: Final[Sequence[tuple[str, str, str]]] = (
    (
        "watchdog.allowance",
        "VRAM of a process that its ledger does not have, beside what its queues need",
        "guess; the driver sets 8 MiB aside for page tables (`AMDGPU_VM_RESERVED_VRAM`), managed memory has no bound",
    ),
    (
        "amdvgpud.core.truth.MAX_EXCUSED_QUEUES",
        "compute queues of a slice on each of its partitions, whose need is not held against its processes",
        "guess; HIP makes 4 in a process for plain streams",
    ),
    ("watchdog.after_s", "how long it must last", "guess; six looks at the default `kernel.sample_s`"),
    ("watchdog.grace_s", "from the telling to SIGTERM, and on to SIGKILL", "as docker and podman have it"),
    (
        "amdvgpud.core.leftovers.TOLERANCE_BYTES",
        "by which VRAM that nobody accounts for may grow on a GPU that is handed on whole",
        "guess",
    ),
    ("amdvgpud.core.leftovers.SETTLING_S", "after which it is taken for normal", "guess"),
    ("amdvgpud.node.SETTLING_PAUSE_S", "between two looks at leftovers while a grant waits", "guess"),
    (
        "dmem.allowance",
        "of the kernel's cap above the quotas",
        "guess; **too little for several queues on an MI300X**, if areas for saving waves count there too (not seen)",
    ),
    (
        "kernel.sample_s",
        "between two looks at the kernel's figures",
        "a look at 8 GPUs and 500 processes is to be a hundredth of a core then: `make bench` says whether it is",
    ),
    ("amdvgpud.guard.COST", "of one core that these looks may take at most", "the same bound, for any machine"),
    ("health.pulse_s", "between two looks at each GPU", "choice; a look at eight GPUs in CPX takes 6 ms"),
    ("health.good_looks", "good looks in a row before a GPU is well again", "guess"),
    (
        "health.unknown_grace_s",
        "for which a GPU that answers as in a reset is not called unhealthy",
        "guess; twice the longest reset heard of",
    ),
    ("health.correctable_per_hour", "correctable errors that are worth a look", "guess; vendors publish none"),
    ("health.record_age_s", "for which an error counts", "choice"),
    ("amdvgpud.host.health.LOOK_S", "after which a driver that does not answer hangs", "guess"),
    ("amdvgpud.host.udev.QUIET_S", "without an event that ends a storm of them", "guess"),
    ("amdvgpud.host.udev.LONGEST_STORM_S", "for which a storm can hold a scan back", "guess"),
    (
        "amdvgpud.containers.LOOK_INTO_IMAGE_S",
        "for a look into an image that decides nothing",
        "so that the hook is done within its 100 ms",
    ),
    ("amdvgpud.containers.LOOK_BEFORE_REFUSING_S", "for one that a policy hangs on", "guess"),
    (
        "amdvgpud.assembly.WAIT_FOR_POLICY_MS",
        "for which a start waits for that policy's word",
        "above the line before, below the next",
    ),
    ("amdvgpud.host.cdi.HOOK_TIMEOUT_S", "after which the runtime ends the hook", "guess"),
)
"""(setting or constant, what it is, what it is grounded on): figures that decide something and are no promise."""


def figures_md() -> str:
    def value(name: str) -> object:
        if name in SETTINGS:
            return SETTINGS[name].default
        module, _, constant = name.rpartition(".")
        number = getattr(importlib.import_module(module), constant)
        return f"{number >> 20}MiB" if constant.endswith("_BYTES") else number

    rows = ((_code(name.removeprefix("amdvgpud.")), f"{value(name)}", what, why) for name, what, why in FIGURES)
    return _table(("name", "value", "is", "rests on"), rows)


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "figures": figures_md,
    "settings": settings_md,
    "settings-forms": forms_md,
    "settings-names": names_md,
    "settings-file": conffile_md,
    "metrics": metrics_md,
    "metrics-hami": hami_metrics_md,
    "exit-codes": exit_codes_md,
    "routes": routes_md,
    "queries": queries_md,
    "shapes": shapes_md,
    "alerts": alerts_md,
    "gaps": gaps_md,
    "amdvgpuctl": lambda: commands_md(amdvgpuctl_cli, "amdvgpuctl"),
    "man-amdvgpuctl-options": lambda: options_man(amdvgpuctl_cli),
    "man-amdvgpuctl-commands": lambda: commands_man(amdvgpuctl_cli, "amdvgpuctl"),
    "man-amdvgpuctl-exit-codes": exit_codes_man,
    "man-amdvgpud-options": lambda: options_man(amdvgpud_cli),
    "man-amdvgpud-commands": lambda: commands_man(amdvgpud_cli, "amdvgpud"),
    "man-settings": settings_man,
    "man-settings-forms": forms_man,
    "man-metrics": lambda: _metrics_man(METRICS),
    "man-metrics-hami": lambda: _metrics_man(HAMI_METRICS),
}


def main(arguments: Sequence[str]) -> int:
    stale = []
    for path in documents():
        text = path.read_text("utf-8")
        if (fresh := filled(text)) != text:
            stale.append(str(path.relative_to(REPOSITORY)))
            if "--check" not in arguments:
                path.write_text(fresh, "utf-8")
    if stale:
        print(("not as the code has it: " if "--check" in arguments else "written: ") + ", ".join(stale))
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
