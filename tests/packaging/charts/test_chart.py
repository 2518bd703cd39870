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
    "privileged": {"privileged": True, "capabilities": ["SYS_PTRACE"], "slicesTmpfs": {"enabled": True, "size": "1Gi"}},
    "without devices of its own": {"ownDevices": False, "simulate": "mi300x", "resources": {}},
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
        "slicesTmpfs": {"enabled": True},
        "delivery": "cdi",
        "runtimeConfig": "/etc/containerd/config.toml",
        "port": 9000,
        "capabilities": ["KILL", "SYS_PTRACE"],
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


def pods_of(manifests: ModuleType, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The pods' specifications by the name of their DaemonSet."""
    sets = [item for item in objects(manifests, values) if item["kind"] == "DaemonSet"]
    return {item["metadata"]["name"]: item["spec"]["template"]["spec"] for item in sets}


NO_RIGHTS = {
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "seccompProfile": {"type": "RuntimeDefault"},
    "capabilities": {"drop": ["ALL"]},
}


def test_by_default_nothing_is_privileged_and_no_capability_is_kept(manifests: ModuleType) -> None:
    pods = pods_of(manifests, {})
    assert list(pods) == ["amdvgpud", "amdvgpud-own-devices"]
    for spec in pods.values():
        assert [one["securityContext"] for one in spec["containers"]] == [NO_RIGHTS]
        assert "initContainers" not in spec
    assert pods["amdvgpud"]["containers"][0]["resources"]["limits"]["amdvgpu.io/daemon"] == 1
    other = pods["amdvgpud-own-devices"]
    assert "amdvgpu.io/daemon" not in other["containers"][0]["resources"]["limits"]
    assert not {"hostPID", "hostNetwork"} & other.keys()


def test_a_mount_for_the_node_is_made_by_a_container_that_ends(manifests: ModuleType) -> None:
    spec = pods_of(manifests, {"slicesTmpfs": {"enabled": True}})["amdvgpud"]
    (first,), (container,) = spec["initContainers"], spec["containers"]
    assert first["command"] == ["/usr/lib/amdvgpud/entry", "mount-slices"]
    assert first["securityContext"]["privileged"] is True
    assert [(m["name"], m["mountPropagation"]) for m in first["volumeMounts"]] == [("run", "Bidirectional")]
    assert container["securityContext"] == NO_RIGHTS
    assert "SLICES_TMPFS" not in [one["name"] for one in container["env"]]


def test_privilege_is_had_by_asking_for_it_and_takes_no_other_pod(manifests: ModuleType) -> None:
    values = {"privileged": True, "slicesTmpfs": {"enabled": True}}
    ((name, spec),) = pods_of(manifests, values).items()
    (container,) = spec["containers"]
    assert (name, container["securityContext"]) == ("amdvgpud", {"readOnlyRootFilesystem": True, "privileged": True})
    given = {one["name"]: one.get("value") for one in container["env"]}
    assert (given["KEEP_CAPABILITIES"], given["SLICES_TMPFS"]) == ("none", "256M")
    assert "amdvgpu.io/daemon" not in container["resources"]["limits"]
    assert "initContainers" not in spec


def test_a_port_is_one_for_the_daemon_and_its_probes(manifests: ModuleType) -> None:
    (container,) = pods_of(manifests, {"port": 9000})["amdvgpud"]["containers"]
    assert {container[f"{which}Probe"]["httpGet"]["port"] for which in ("startup", "liveness", "readiness")} == {9000}
    configuration = of_kind(objects(manifests, {"port": 9000}), "ConfigMap")["data"]["amdvgpud.toml"]
    assert tomllib.loads(configuration)["rest"]["tcp"] == "127.0.0.1:9000"


@pytest.mark.parametrize(
    "values",
    [
        {"splitcount": 1},
        {"mode": "hami"},
        {"mode": ["dra"]},
        {"image": {"name": "x"}},
        {"slicesTmpfs": {"size": "1GB"}},
        {"runtimeConfig": "config.toml"},
        {"delivery": "both"},
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
