"""The daemon, and the whole node, end and come back while a pod has something: profiles and whole GPUs.

By device nodes: the kubelet keeps what it was told of them, and starts containers with it again and again.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.conftest import BIN
from tests.e2e.k8s.api import eventually
from tests.e2e.k8s.cluster import Cluster, Service, daemon, pod
from tests.e2e.k8s.looks import GIB, answers, removed

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

REGISTERED: Final = "registered with the kubelet"
GPUS: Final = ("mi300x:unique_id=0xa1", "mi300x:unique_id=0xb2")
_POWER_CUT: Final = """
for process in /proc/[0-9]*; do
  [[ "$(cat "$process/comm" 2>/dev/null)" != containerd-shim* ]] || kill -KILL "${process#/proc/}"
done
awk '$5 ~ "^/run/(amdvgpud|containerd|cdi)/" { print $5 }' /proc/self/mountinfo | tac | xargs -r -n1 umount -l
rm -rf /run/amdvgpud /run/cdi/* /run/containerd/state
"""
HOLDS: Final = "ls /dev/dri; kfdclient --step 1G --count 1; sleep infinity"


@dataclass
class Node:
    """What of the cluster's node ends and comes back."""

    cluster: Cluster
    daemon: Service
    config: Path
    mode: str
    resource: str
    count: int

    def machine(self, *gpus: str) -> None:
        """What the daemon finds when it starts: these GPUs, in this order."""
        self.config.write_text(
            f'simulate = "{",".join(gpus)}"\ntick_s = 0.2\nkubelet.mode = ["{self.mode}"]\n'
            'kubelet.delivery = "nodes"\nkubelet.profiles.25c-48g = {compute = "25%", vram = "48GiB"}\n'
        )

    @property
    def vram_bytes(self) -> int:
        """What a container is shown; of a GPU's 192 GiB the driver keeps some."""
        return 48 * GIB if self.mode == "profiles" else 196592 << 20

    def start_daemon(self) -> None:
        """Returns when all is offered again."""
        registered = self.daemon.log.read_text().count(REGISTERED) if self.daemon.log.exists() else 0
        if not self.daemon.alive():
            self.daemon.start()
        eventually("a registration", lambda: self.daemon.log.read_text().count(REGISTERED) > registered)
        eventually("what it offers", lambda: self.cluster.allocatable(self.resource) == self.count)

    def reboot(self, *gpus: str) -> None:
        """All that runs on the node is killed, and /run is empty; the API server is elsewhere. ``gpus``: in this order.

        containerd keeps its images in /run here, so these stay; and so does what the corner itself has there.
        """
        self.daemon.end(signal.SIGKILL)
        self.cluster.kill("containerd", "kubelet")
        done = self.cluster.corner.run("bash", "-c", _POWER_CUT)
        assert done.code == 0, done.output
        self.machine(*gpus)
        self.cluster.programs["containerd"].start()
        self.cluster.ready("containerd", lambda: self.cluster.ctr("version").code == 0)
        self.daemon.start()
        self.cluster.start_kubelet()
        self.start_daemon()

    def settled(self, name: str) -> bool:
        return (
            self.cluster.api.pod(name)["status"].get("reason") == "UnexpectedAdmissionError"
            or "make the pod anew" in str(self.status(name))
            or self._holds(name, 1)
        )

    def slices(self) -> list[str]:
        """That somebody holds, one line each."""
        listed = self.cluster.corner.run(str(BIN / "amdvgpuctl"), "lease", "list").output
        return [line for line in listed.splitlines() if "kubelet" in line]

    def runs(self, name: str, *, starts: int) -> None:
        """Waits until the container of the pod has been started again so many times, and holds its VRAM."""
        eventually(f"{name} to hold", partial(self._holds, name, starts))

    def _holds(self, name: str, starts: int) -> bool:
        found = self.status(name)
        return found.get("restartCount") == starts and bool(answers(self.log(name, starts), "end", "held"))

    def log(self, name: str, start: int) -> str:
        return self.cluster.log_of(name, start=start)

    def status(self, name: str) -> dict[str, Any]:
        (found,) = self.cluster.api.pod(name)["status"].get("containerStatuses") or [{}]
        return dict(found)

    def kill_container(self, name: str) -> None:
        wanted = f'labels."io.kubernetes.pod.name"=={name},labels."io.kubernetes.container.name"==main'
        listed = self.cluster.ctr("containers", "list", "--quiet", wanted)
        assert listed.code == 0, listed.output
        (container,) = set(listed.output.split()) & set(self.cluster.ctr("tasks", "list", "--quiet").output.split())
        done = self.cluster.ctr("tasks", "kill", "--signal=SIGKILL", container)
        assert done.code == 0, done.output


@pytest.fixture(params=["profiles", "whole"])
def node(cluster: Cluster, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    resource, count = ("amdvgpu.io/25c-48g", 6) if request.param == "profiles" else ("amd.com/gpu", 2)
    config = tmp_path / "amdvgpud.toml"
    Node(cluster, None, config, request.param, resource, count).machine(*GPUS)  # type: ignore[arg-type]
    with daemon(cluster, "--config", str(config)) as running:
        found = Node(cluster, running, config, request.param, resource, count)
        eventually("what it offers", lambda: cluster.allocatable(resource) == count)
        yield found
    eventually("nothing to be offered", lambda: not cluster.allocatable(resource))


def staying(node: Node, name: str) -> dict[str, Any]:
    return pod(name, "sh", "-c", HOLDS, limits={node.resource: 1}, restartPolicy="Always")


def test_a_daemon_that_was_killed_finds_what_its_pods_have(cluster: Cluster, node: Node) -> None:
    cluster.api.create_pod(staying(node, "stays"))
    node.runs("stays", starts=0)
    held = node.slices()
    node.daemon.end(signal.SIGKILL)
    node.start_daemon()
    assert (len(held), node.slices()) == (1, held)
    cluster.api.create_pod(staying(node, "next"))
    node.runs("next", starts=0)
    assert len(node.slices()) == 2
    node.kill_container("stays")
    node.runs("stays", starts=1)
    first, again, other = (node.log(*which).split("\n{")[0] for which in (("stays", 0), ("stays", 1), ("next", 0)))
    assert first == again
    assert node.mode == "profiles" or other != first
    removed(cluster, "stays", "next")


def test_a_container_does_not_start_again_on_what_has_become_another_ones(cluster: Cluster, node: Node) -> None:
    """The driver was loaded anew, and the render minors have changed places; the kubelet knows nothing of that."""
    cluster.api.create_pod(staying(node, "stays"))
    node.runs("stays", starts=0)
    node.daemon.end(signal.SIGKILL)
    node.machine(*reversed(GPUS))
    node.start_daemon()
    node.kill_container("stays")
    said: Any = eventually(
        "a refusal", lambda: "make the pod anew" in str(node.status("stays")) and node.status("stays")
    )
    assert said["state"]["waiting"]["reason"] == "CreateContainerConfigError"
    node.daemon.end(signal.SIGKILL)
    node.machine(*GPUS)
    node.start_daemon()
    node.runs("stays", starts=1)
    removed(cluster, "stays")


def test_after_a_reboot_nothing_is_given_twice_and_all_comes_back(cluster: Cluster, node: Node) -> None:
    """The render minors have changed places too.

    The kubelet looks at its pods before any plugin has registered, and refuses those that had devices: seen each time.
    A plugin that is faster than it would have them started again, or not, as above; either is allowed here.
    """
    cluster.api.create_pod(staying(node, "stays"))
    node.runs("stays", starts=0)
    held = node.slices()
    node.reboot(*reversed(GPUS))
    assert (len(held), node.slices()) == (1, held)
    eventually("what becomes of the pod", lambda: node.settled("stays"))
    cluster.api.create_pod(staying(node, "next"))
    node.runs("next", starts=0)
    if cluster.api.pod("stays")["status"]["phase"] == "Running":
        assert len(node.slices()) == 2
    assert answers(node.log("next", 0), "gpu", "total") == [(node.vram_bytes,)]
    removed(cluster, "stays", "next")
    eventually("all to be free", lambda: not node.slices(), 180)
    assert cluster.allocatable(node.resource) == node.count
