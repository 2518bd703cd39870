"""What the chart makes of its values: it lints, it validates, and the plain manifests are what it gives by default."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from amdvgpud.settings import read_settings

KUBERNETES = Path(__file__).resolve().parents[3] / "packaging/kubernetes"
CHART = KUBERNETES.parent / "helm/amdvgpud"
VERSIONS = ("1.28", "1.31", "1.35", "1.37")
VALUES: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "unprivileged": {"privileged": False},
    "profiles": {
        "mode": ["profiles"],
        "profiles": {"25c-48g": {"compute": "25%", "vram": "48GiB"}, "all": {"compute": "100%", "vram": "180GiB"}},
    },
    "all else": {
        "image": {"repository": "registry.example/amdvgpud", "tag": "1", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "secret"}],
        "mode": ["hami", "profiles"],
        "splitCount": 4,
        "takeOver": True,
        "nodeLabels": True,
        "amounts": True,
        "settings": {"rest.tcp_details": True, "tick_s": 1, "metrics.compat": ["hami"]},
        "simulate": "2*mi300x",
        "kubeletDir": "/var/lib/k0s/kubelet",
        "slicesTmpfs": {"enabled": False},
        "serviceAccount": {"create": False, "name": "mine"},
        "rbac": {"create": False},
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
        "nodeSelector": {"feature.node.kubernetes.io/pci-0300_1002.present": "true"},
    },
}


@pytest.fixture(scope="module")
def helm() -> Any:
    import helm_python

    return helm_python


def objects(manifests: ModuleType, values: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for text in manifests.manifests(values) for one in yaml.safe_load_all(text) if one]


def of_kind(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (one,) = (item for item in found if item["kind"] == kind)
    return one


def test_helm_has_nothing_against_it_but_the_lack_of_an_icon(helm: Any) -> None:
    found = helm.lint(str(CHART))
    assert [m["error"] for m in found["messages"]] == ["icon is recommended"]
    assert found["errors"] == []


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_of_kubernetes_would_take_it(
    values: dict[str, Any], version: str, manifests: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "rendered.yaml"
    file.write_text("---\n".join(manifests.manifests(values)))
    check = [str(Path(sys.executable).with_name("kubernetes-validate")), "-k", version, "--strict", str(file)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARN" not in done.stdout + done.stderr


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_daemon_takes_the_configuration(values: dict[str, Any], manifests: ModuleType, tmp_path: Path) -> None:
    text = of_kind(objects(manifests, values), "ConfigMap")["data"]["amdvgpud.toml"]
    assert tomllib.loads(text)
    file = tmp_path / "amdvgpud.toml"
    file.write_text(text)
    read_settings({}, {}, file)


def test_the_nodes_status_is_its_own_only_where_amounts_are_said(manifests: ModuleType) -> None:
    for amounts in (True, False):
        rules = of_kind(objects(manifests, {"amounts": amounts}), "ClusterRole")["rules"]
        assert ({"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]} in rules) is amounts


def test_without_privilege_it_has_one_capability_and_the_usual_filter(manifests: ModuleType) -> None:
    spec = of_kind(objects(manifests, {"privileged": False}), "DaemonSet")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "readOnlyRootFilesystem": True,
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "seccompProfile": {"type": "RuntimeDefault"},
        "capabilities": {"drop": ["ALL"], "add": ["DAC_OVERRIDE"]},
    }
    assert "SLICES_TMPFS" not in [one["name"] for one in container["env"]]


@pytest.mark.parametrize(
    "values",
    [
        {"splitcount": 1},
        {"mode": "hami"},
        {"mode": ["dra"]},
        {"image": {"name": "x"}},
        {"slicesTmpfs": {"size": "1GB"}},
    ],
    ids=str,
)
def test_a_value_that_does_not_exist_is_refused(values: dict[str, Any], manifests: ModuleType, helm: Any) -> None:
    with pytest.raises(helm.HelmError, match="schema"):
        manifests.manifests(values)


def test_the_plain_manifests_are_the_chart_with_its_defaults(manifests: ModuleType) -> None:
    made = manifests.head() + "---\n" + "---\n".join(manifests.manifests({}))
    assert manifests.MANIFESTS.read_text() == made, "run packaging/kubernetes/render.py"


@pytest.mark.parametrize("example", sorted(path.name for path in (KUBERNETES / "examples").iterdir()))
def test_the_examples_are_what_kubernetes_takes(example: str) -> None:
    check = [str(Path(sys.executable).with_name("kubernetes-validate")), "-k", VERSIONS[-1], "--strict"]
    subprocess.run([*check, str(KUBERNETES / "examples" / example)], check=True)
