"""The committed manifests as pods of the real kubelet: without privilege, with a service account's token, in the image
as it is built. What is not real here is in daemonset.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from amdvgpud.core import hami
from amdvgpud.serve.kube.api import VERBS
from tests.e2e.k8s.api import eventually
from tests.e2e.k8s.cluster import ACCOUNT, NODE, Cluster, daemon, pod
from tests.e2e.k8s.conftest import MANIFESTS
from tests.e2e.k8s.daemonset import IMAGE, Deployed, showing_runtime
from tests.e2e.k8s.looks import GIB, answers, ended, removed
from tests.e2e.k8s.test_hami_kubelet import schedule

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

PROFILE: Final = "amdvgpu.io/25c-48g"
OWN: Final = "amdvgpu.io/daemon"
SEEN: Final[Any] = {"hostPID": True}
"""The corner has a pid namespace of its own, and only in the machine's own is a process that is not there dead for sure
(host/ledger.py); on a real node the daemon's pod is in that one, and pods need not be."""
CONFIGURATION: Final = """\
simulate = "2*mi300x"
kubelet.mode = ["hami", "profiles"]
kubelet.profiles.25c-48g = {compute = "25%", vram = "48GiB", count = 2}
kubelet.runtime_config = "/runtime/containerd.toml"
kube.labels = true
tick_s = 0.5
"""


@dataclass
class Running:
    deployed: Deployed
    daemon: str
    """The pod's name; a test that ends it starts another one."""


@pytest.fixture(scope="module")
def running(cluster: Cluster, daemon_root: Path) -> Iterator[Running]:
    cluster.corner.run("rm", "-rf", "/var/lib/amdvgpud")
    cluster.add_image(IMAGE, daemon_root, ["/usr/lib/amdvgpud/entry"])
    deployed = Deployed(cluster, showing_runtime(cluster))
    deployed.apply(MANIFESTS, CONFIGURATION)
    beside = deployed.create("amdvgpud-own-devices")
    eventually("the daemon's own resource", lambda: cluster.allocatable(OWN) == 1)
    running = Running(deployed, deployed.start("amdvgpud"))
    eventually("the profile", lambda: cluster.allocatable(PROFILE) == 2)
    yield running
    deployed.end(running.daemon, beside)
    cluster.corner.run("sh", "-c", "rm -rf /var/lib/amdvgpud /run/amdvgpud/* /usr/lib/amdvgpu /run/cdi/*")


def test_the_daemon_has_no_right_of_roots_and_may_open_render_nodes_only(cluster: Cluster, running: Running) -> None:
    said = running.deployed.in_it(running.daemon, "cat /proc/self/status /proc/self/cgroup; touch /x /etc/x")
    status = dict(line.split(":\t", 1) for line in said.splitlines() if ":\t" in line)
    assert {status[f"Cap{which}"] for which in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert said.count("Read-only file system") == 2
    (path,) = (line.split(":", 2)[2] for line in said.splitlines() if ":devices:" in line)
    allowed = cluster.corner.run("cat", f"/sys/fs/cgroup/devices{path}/devices.list").output.splitlines()
    assert "a *:* rwm" not in allowed
    assert {f"c 226:{minor} rw" for minor in range(128, 192)} <= set(allowed)
    assert not [rule for rule in allowed if rule.startswith("b") and rule != "b *:* m"]


def test_it_has_chosen_names_by_the_node_and_the_runtimes_configuration(running: Running) -> None:
    kubelet = running.deployed.ctl("status")["kubelet"]
    assert (kubelet["delivery"], kubelet["known"]) == ("cdi", True)
    assert kubelet["reason"].endswith("resolve CDI names, switched on by /runtime/containerd.toml")


@pytest.mark.usefixtures("running")
def test_a_pod_that_asks_for_a_profile_is_held_to_it(cluster: Cluster) -> None:
    cluster.api.create_pod(pod("held", "kfdclient", "--step", "16G", limits={PROFILE: 1}, **SEEN))
    assert ended(cluster, "held") == "Succeeded", cluster.log_of("held")
    log = cluster.log_of("held")
    assert answers(log, "gpu", "total") == [(48 * GIB,)]
    assert answers(log, "alloc", "result") == [("ok",), ("ok",), ("ok",), ("ENOMEM",)]
    removed(cluster, "held")


def slices_of(running: Running) -> dict[str, Any]:
    return {item["name"]: item["shares"] for item in running.deployed.ctl("slice", "list")["slices"]}


def test_a_daemon_that_is_replaced_loses_nothing(cluster: Cluster, running: Running) -> None:
    cluster.api.create_pod(pod("stays", "sh", "-c", "kfdclient --count 1; sleep infinity", limits={PROFILE: 1}, **SEEN))
    eventually("the pod's process", lambda: answers(cluster.log_of("stays"), "end", "held"))
    leases = [lease["id"] for lease in running.deployed.ctl("lease", "list")["leases"]]
    before, file = slices_of(running), cluster.corner.run("cat", "/run/cdi/amdvgpu.io-slice.json").output
    running.deployed.end(running.daemon)
    assert cluster.api.pod("stays")["status"]["phase"] == "Running"
    running.daemon = running.deployed.start("amdvgpud")
    assert slices_of(running) == before
    eventually("the profile again", lambda: cluster.allocatable(PROFILE) == 2)
    assert [lease["id"] for lease in running.deployed.ctl("lease", "list")["leases"]] == leases
    assert cluster.corner.run("cat", "/run/cdi/amdvgpu.io-slice.json").output == file
    cluster.api.create_pod(pod("next", "kfdclient", "--count", "1", limits={PROFILE: 1}, **SEEN))
    assert ended(cluster, "next") == "Succeeded"
    assert cluster.api.pod("stays")["status"]["phase"] == "Running"
    removed(cluster, "stays", "next")


def test_beside_a_daemon_of_the_node_it_ends_with_one_line_and_changes_nothing(
    cluster: Cluster, running: Running
) -> None:
    running.deployed.end(running.daemon)
    look = (
        "find /usr/lib/amdvgpu /run/cdi /run/amdvgpud -name simulated -prune -o -type f -printf '%p %T@ %i\\n' | sort"
    )
    gate = "echo older > /usr/lib/amdvgpu/libamdvgpu.so"  # a package of the node may have another release of it
    assert cluster.corner.run("sh", "-c", gate).code == 0
    with daemon(cluster, "--simulate", "2*mi300x", "--rescan-s", "3600", "--tick-s", "3600") as node_own:
        eventually("the node's own daemon", lambda: "The API listens on" in node_own.log.read_text())
        before = cluster.corner.run("sh", "-c", look).output
        name = running.deployed.create("amdvgpud")
        eventually("its end", lambda: "another amdvgpud" in running.deployed.said(name))
        assert running.deployed.said(name) == (
            f"amdvgpud: another amdvgpud (pid {node_own.pid}) serves /run/amdvgpud; it was left alone\n"
        )
        running.deployed.end(name)
        assert cluster.corner.run("sh", "-c", look).output == before
    running.daemon = running.deployed.start("amdvgpud")
    assert cluster.corner.run("grep", "-cx", "older", "/usr/lib/amdvgpu/libamdvgpu.so").output == "0"


def test_the_daemons_own_device_is_for_pods_of_its_namespace_only(cluster: Cluster, running: Running) -> None:
    running.deployed.end(running.daemon)
    cluster.api.create_pod(pod("thief", "sleep", "infinity", limits={OWN: 1}))

    def waits_for() -> str:
        (state,) = cluster.api.pod("thief")["status"].get("containerStatuses", [{}])
        return str(state.get("state", {}).get("waiting", {}).get("message", ""))

    eventually("the refusal", lambda: "is for the daemon's own pod in kube-system, and default/thief" in waits_for())
    assert cluster.log_of("thief") == ""
    removed(cluster, "thief")
    running.daemon = running.deployed.start("amdvgpud")


def used(cluster: Cluster) -> tuple[dict[str, set[str]], list[str]]:
    """What the account has asked for, by resource; and what was refused."""
    asked: dict[str, set[str]] = {}
    refused = []
    for line in (cluster.folder / "audit.log").read_text().splitlines():
        event = json.loads(line)
        if event["user"]["username"] == ACCOUNT and "objectRef" in event:
            asked.setdefault(event["objectRef"]["resource"], set()).add(event["verb"])
            if event["responseStatus"]["code"] == 403:
                refused.append(event["requestURI"])
    return asked, refused


def test_it_uses_each_right_that_its_roles_give_and_asks_for_no_other(cluster: Cluster, running: Running) -> None:
    eventually("HAMi's registration", lambda: cluster.allocatable("amd.com/gpu") == 20)
    schedule(cluster, pod("scheduled", "kfdclient", "--count", "1", limits={"amd.com/gpu": 1}, **SEEN), (0, 16384, 76))
    assert ended(cluster, "scheduled") == "Succeeded"
    for word in ("unhealthy", "none"):
        running.deployed.ctl("gpu", "health", "1", "--override", word)
    wanted = {resource: set(verbs) for resource, verbs in VERBS.items()}
    # The tests of the API itself look at other names, and with this account too.
    asked = eventually("an event", lambda: (found := used(cluster)[0]).get("events") and found)
    assert {resource: asked[resource] for resource in wanted} == wanted
    assert used(cluster)[1] == []
    events = cluster.api.get("/api/v1/namespaces/default/events")["items"]
    assert any(event["involvedObject"]["name"] == NODE and "GPU" in event["message"] for event in events)
    assert hami.REGISTRATION in cluster.api.node(NODE)["metadata"]["annotations"]
    removed(cluster, "scheduled")
