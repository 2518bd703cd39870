"""The monitoring kit against the registry of metrics: no rule and no panel asks for what is not exported."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from amdvgpud.serve.exposition import METRICS
from tests.monitoring.kit import DASHBOARDS, KIT, RULES, SCRAPE, Expression, alerts, expressions, panels

OF_PROMETHEUS = {"up": (), "process_resident_memory_bytes": ()}
"""Names that Prometheus itself, or the client library, gives."""
OF_EVERY_SERIES = {"job", "instance"}
TROUBLESHOOTING = KIT.parent / "docs/troubleshooting.md"


def _labels() -> dict[str, set[str]]:
    """Series name → its labels."""
    found: dict[str, set[str]] = {name: set(labels) for name, labels in OF_PROMETHEUS.items()}
    for metric in METRICS:
        if metric.type == "histogram":
            found |= {metric.name + suffix: set(metric.labels) for suffix in ("_sum", "_count")}
            found[metric.name + "_bucket"] = {*metric.labels, "le"}
        else:
            found[metric.name] = set(metric.labels)
    return found


EXPRESSIONS = expressions()


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=[e.where for e in EXPRESSIONS])
def test_every_name_and_label_is_exported(expression: Expression) -> None:
    known = _labels()
    used = list(expression.selectors())
    assert used
    assert [name for name, _ in used if name not in known] == []
    assert [
        (name, label) for name, labels in used for label in labels if label not in known[name] | OF_EVERY_SERIES
    ] == []
    together = set.union(OF_EVERY_SERIES, *(known[name] for name, _ in used))
    assert [label for label in expression.groupings() if label not in together] == []


def test_the_reader_of_expressions_sees_what_is_there() -> None:
    """The checks above are worth what this reader sees."""
    text = 'sum by (slice, le) (rate(amdvgpu_x_total{a=~"b=c", d!="e"}[5m])) / on (f) group_left (g) up{job="amdvgpud"}'
    expression = Expression("here", text)
    assert list(expression.selectors()) == [("amdvgpu_x_total", ("a", "d")), ("up", ("job",))]
    assert list(expression.groupings()) == ["slice", "le", "f", "g"]


def _promtool(*arguments: str, folder: Path) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_the_rules_and_the_scrape_configuration() -> None:
    assert f"SUCCESS: {len(alerts())} rules found" in _promtool("check", "rules", RULES.name, folder=RULES.parent)
    _promtool("check", "config", SCRAPE.name, folder=SCRAPE.parent)


def test_promtool_accepts_every_expression_of_the_dashboards(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": _filled(e.text)}
        for number, e in enumerate(EXPRESSIONS)
        if not e.where.startswith("alert")
    ]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in _promtool("check", "rules", "rules.yml", folder=tmp_path)


def _filled(text: str) -> str:
    return re.sub(r"\$(?!__)\w+", ".*", text.replace("$__rate_interval", "1m"))


def test_each_alert_fires_when_it_should_and_not_before() -> None:
    _promtool("test", "rules", "amdvgpud.rules.test.yml", folder=RULES.parent)
    tested = re.findall(r"alertname: (\w+)", (RULES.parent / "amdvgpud.rules.test.yml").read_text())
    assert set(tested) == set(alerts())


def test_each_alert_says_what_it_is_and_where_to_read_on() -> None:
    headings = re.findall(r"^#+ (.+)$", TROUBLESHOOTING.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for name, fields in alerts().items():
        assert {"expr", "summary", "description", "runbook"} <= set(fields), name
        page, _, anchor = fields["runbook"].partition("#")
        assert page == "docs/troubleshooting.md"
        assert anchor in anchors, f"{name}: {anchor} is no section of {page}"


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda p: p.stem)
def test_a_dashboard_hangs_together(dashboard: Path) -> None:
    document = json.loads(dashboard.read_text())
    assert document["uid"] == dashboard.stem
    listed = list(document["panels"])
    assert len({p["id"] for p in listed}) == len(listed)
    variables = {v["name"] for v in document["templating"]["list"]}
    assert {"datasource", "instance", "gpu"} <= variables
    for panel in panels(dashboard):
        assert panel["description"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert set(re.findall(r"\$(?!__)(\w+)", target["expr"])) <= variables, panel["title"]
    areas = [p["gridPos"] for p in listed]
    for i, a in enumerate(areas):
        for b in areas[i + 1 :]:
            apart = (
                a["x"] + a["w"] <= b["x"]
                or b["x"] + b["w"] <= a["x"]
                or a["y"] + a["h"] <= b["y"]
                or b["y"] + b["h"] <= a["y"]
            )
            assert apart, (a, b)


def test_there_are_two_dashboards_and_one_is_of_slices() -> None:
    assert [d.stem for d in DASHBOARDS] == ["amdvgpud-node", "amdvgpud-slices"]
    slices = json.loads(DASHBOARDS[1].read_text())["templating"]["list"]
    assert [v["name"] for v in slices] == ["datasource", "instance", "gpu", "slice"]
