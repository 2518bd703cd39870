"""The committed manifests as running pods, with what a DaemonSet's controller and the API server's plugins would do.

Changed is only what this machine asks for: simulated GPUs, a port that nobody has, the API server's own address (there
is no kube-proxy behind a Service's), the certificate that a controller publishes, and values that a chart would render.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from tests.e2e.conftest import BIN
from tests.e2e.k8s.api import eventually
from tests.e2e.k8s.cluster import NODE, Cluster, free_ports

NAMESPACE: Final = "kube-system"
IMAGE: Final = "docker.io/library/amdvgpud:0.1.0"
"""What a runtime makes of the manifests' own name."""
Json = dict[str, Any]

_TOLERATED: Final = ("not-ready", "unreachable", "disk-pressure", "memory-pressure", "pid-pressure", "unschedulable")


@dataclass
class Deployed:
    """The manifests, applied. ``change`` is done to each template of a pod, as a value of the chart would."""

    cluster: Cluster
    change: Callable[[Json], None]
    port: int = field(default_factory=lambda: free_ports(1)[0])
    sets: dict[str, Json] = field(default_factory=dict)
    made: int = 0

    def apply(self, manifests: Path, configuration: str) -> None:
        """``configuration``: lines beside the ConfigMap's, of which those that it has too are replaced."""
        certificate = {"ca.crt": self.cluster.api.ca.read_text()}
        root = {"name": "kube-root-ca.crt", "namespace": NAMESPACE}
        self.cluster.api.apply_object({"apiVersion": "v1", "kind": "ConfigMap", "metadata": root, "data": certificate})
        for item in yaml.safe_load_all(manifests.read_text()):
            if item["kind"] == "ConfigMap":
                own = item["data"]["amdvgpud.toml"].replace(":9841", f":{self.port}")
                keys = {line.partition(" =")[0] for line in configuration.splitlines()}
                kept = [line for line in own.splitlines() if line.partition(" =")[0] not in keys]
                item["data"]["amdvgpud.toml"] = "\n".join(kept) + "\n" + configuration
            applied = self.cluster.api.apply_object(item)
            if item["kind"] == "DaemonSet":
                self.sets[item["metadata"]["name"]] = applied

    def create(self, of: str) -> str:
        """A pod of the DaemonSet ``of``; its name."""
        self.made += 1
        made = self._as_the_controller_would(self.sets[of], f"{of}-{self.made}")
        self._as_admitted(made["spec"])
        self.change(made)
        self.cluster.api.create_pod(made)
        name: str = made["metadata"]["name"]
        return name

    def ready(self, name: str) -> bool:
        conditions = self.cluster.api.pod(name, NAMESPACE)["status"].get("conditions", ())
        return any((c["type"], c["status"]) == ("Ready", "True") for c in conditions)

    def start(self, of: str) -> str:
        """As :meth:`create`; returns when it is ready. Fails with what it has said."""
        name = self.create(of)
        try:
            eventually(f"{name} to be ready", partial(self.ready, name))
        except AssertionError as error:
            status = json.dumps(self.cluster.api.pod(name, NAMESPACE)["status"], indent=1)
            raise AssertionError(f"{error}\n{status}\n{self.said(name)}") from None
        return name

    def said(self, name: str) -> str:
        container = self.cluster.api.pod(name, NAMESPACE)["spec"]["containers"][0]["name"]
        return self.cluster.log_of(name, container, NAMESPACE)

    def end(self, *names: str) -> None:
        for name in names:
            self.cluster.api.delete_pod(name, NAMESPACE)
        for name in names:
            eventually(f"{name} to be gone", partial(self.cluster.api.gone, name, NAMESPACE))

    def main_pid(self, name: str) -> int:
        """Of its container, as the corner counts."""
        (state,) = self.cluster.api.pod(name, NAMESPACE)["status"]["containerStatuses"]
        task = state["containerID"].partition("://")[2]
        listed = self.cluster.ctr("task", "ls").output
        return next(int(line.split()[1]) for line in listed.splitlines() if line.startswith(task))

    def in_it(self, name: str, script: str) -> str:
        """What ``script`` says in the container of ``name``."""
        (state,) = self.cluster.api.pod(name, NAMESPACE)["status"]["containerStatuses"]
        task = state["containerID"].partition("://")[2]
        self.made += 1
        done = self.cluster.ctr("task", "exec", "--exec-id", f"look-{self.made}", task, "sh", "-c", script)
        return done.output

    def ctl(self, *argv: str) -> Any:
        """amdvgpuctl on the node, with the daemon in the pod."""
        done = self.cluster.corner.run(str(BIN / "amdvgpuctl"), *argv, "-o", "json")
        assert done.code == 0, done.output
        return json.loads(done.output)

    # ------------------------------------------------------------------------------------------------------ inside

    def _as_the_controller_would(self, daemonset: Json, name: str) -> Json:
        """A DaemonSet's pod for NODE: its owner, its place, its six tolerations."""
        template = copy.deepcopy(daemonset["spec"]["template"])
        owner = {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "name": daemonset["metadata"]["name"],
            "uid": daemonset["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
        here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [here]}}
        template["spec"]["affinity"] = {"nodeAffinity": required}
        template["spec"].setdefault("tolerations", []).extend(
            {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": effect}
            for key, effect in zip(_TOLERATED, ["NoExecute"] * 2 + ["NoSchedule"] * 4, strict=True)
        )
        metadata = {**template["metadata"], "name": name, "namespace": NAMESPACE, "ownerReferences": [owner]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}

    def _as_admitted(self, spec: Json) -> None:
        """The service account's folder, as the API server's plugin mounts it; the kubelet asks for the token."""
        items = [{"key": "ca.crt", "path": "ca.crt"}]
        namespace = {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
        sources = [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
            {"configMap": {"name": "kube-root-ca.crt", "items": items}},
            {"downwardAPI": {"items": [namespace]}},
        ]
        spec["volumes"].append({"name": "kube-api-access", "projected": {"sources": sources, "defaultMode": 0o644}})
        mount = {"name": "kube-api-access", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}
        for container in spec["containers"]:
            container["volumeMounts"].append({**mount, "readOnly": True})
            api = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.cluster.ports["api"])}
            container["env"] += [{"name": name, "value": value} for name, value in api.items()]
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe in container:
                    container[probe]["httpGet"]["port"] = self.port


def showing_runtime(cluster: Cluster) -> Callable[[Json], None]:
    """What the chart's value ``runtimeConfig`` does; and the node's network for all, since there is no other here."""

    def change(pod: Json) -> None:
        file = {"path": f"{cluster.folder}/containerd.toml", "type": "File"}
        pod["spec"]["volumes"].append({"name": "runtime", "hostPath": file})
        pod["spec"]["hostNetwork"] = True
        for container in pod["spec"]["containers"]:
            mount = {"name": "runtime", "mountPath": "/runtime/containerd.toml", "readOnly": True}
            container["volumeMounts"].append(mount)

    return change
