"""The manifests for Kubernetes, as far as no Helm is needed; the chart itself: ``make charts``."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import yaml

from amdvgpud import __version__
from amdvgpud.serve.kube.api import EVENTS_NAMESPACE, VERBS


def test_the_plain_manifests_are_of_the_chart_as_it_is(manifests: ModuleType) -> None:
    assert manifests.MANIFESTS.read_text().splitlines(keepends=True)[0] == manifests.head(), (
        "the chart has changed: run packaging/kubernetes/render.py (make charts installs what it needs)"
    )


def test_the_chart_is_of_this_version(repository: Path) -> None:
    chart = (repository / "packaging/helm/amdvgpud/Chart.yaml").read_text()
    assert re.findall(r"^(?:version|appVersion): (.*)$", chart, re.MULTILINE) == [__version__] * 2


def test_its_roles_are_what_the_daemon_asks_of_the_api(manifests: ModuleType) -> None:
    roles = [item for item in yaml.safe_load_all(manifests.MANIFESTS.read_text()) if item["kind"].endswith("Role")]
    assert [role["metadata"].get("namespace") for role in roles] == [None, EVENTS_NAMESPACE]
    rules = [rule for role in roles for rule in role["rules"]]
    assert {rule["resources"][0]: tuple(rule["verbs"]) for rule in rules} == VERBS
    assert all(len(rule["resources"]) == 1 and rule["apiGroups"] == [""] for rule in rules)
