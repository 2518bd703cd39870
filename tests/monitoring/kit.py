"""The monitoring kit as data: every expression of the rules and the dashboards, and what names and labels it uses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KIT = Path(__file__).resolve().parents[2] / "packaging"
RULES = KIT / "prometheus/amdvgpud.rules.yml"
SCRAPE = KIT / "prometheus/amdvgpud.yml"
DASHBOARDS = tuple(sorted((KIT / "grafana").glob("*.json")))

_NAME = r"[a-zA-Z_][a-zA-Z0-9_]*"
_SELECTOR = re.compile(r"\b((?:amdvgpu|process|up)[a-zA-Z0-9_]*)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(rf"({_NAME})\s*(?:=~|!~|!=|=)")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class Expression:
    where: str
    text: str

    def selectors(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """(metric, labels that are matched on), in the order of the text."""
        plain = re.sub(r'"[^"]*"', '""', self.text)
        for match in _SELECTOR.finditer(_GROUPING.sub("", plain)):
            yield match[1], tuple(_MATCHER.findall(match[2] or ""))

    def groupings(self) -> Iterator[str]:
        """Labels in by, on and their kin."""
        for match in _GROUPING.finditer(self.text):
            yield from (label.strip() for label in match[1].split(",") if label.strip())


def alerts() -> Mapping[str, Mapping[str, str]]:
    """Alert → its plain fields. The file's own layout is read, which is YAML that needs no reader of YAML."""
    found: dict[str, dict[str, str]] = {}
    lines = RULES.read_text().splitlines()
    name, folded = "", False
    for line in lines:
        if match := re.fullmatch(r"      - alert: (\w+)", line):
            name = match[1]
            assert name not in found, f"{name} is there twice"
            found[name] = {}
        elif match := re.fullmatch(r" {8,10}(expr|for|summary|description|runbook): (.*)", line):
            folded = match[1] == "expr" and match[2] == ">-"
            found[name][match[1]] = "" if folded else match[2].strip('"')
        elif folded and line.startswith(" " * 10):
            found[name]["expr"] += line.strip() + " "
        else:
            folded = False
    return found


def panels(dashboard: Path) -> Iterator[dict[str, Any]]:
    for panel in json.loads(dashboard.read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def expressions() -> list[Expression]:
    """All of them; those of dashboards as they stand there, with their variables."""
    found = [Expression(f"alert {name}", fields["expr"]) for name, fields in alerts().items()]
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            where = f"{dashboard.stem}: {panel['title']}"
            found += [Expression(where, target["expr"]) for target in panel["targets"]]
    return found
