"""Pods that ask for a profile: the real kubelet allocates, containerd injects, a process in the pod is held."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import pytest

from amdvgpud.sim.driver import SimulatedDriver
from amdvgpud.sim.models import parse_simulation
from tests.e2e.k8s.api import eventually
from tests.e2e.k8s.cluster import Cluster, Program, daemon, pod
from tests.e2e.k8s.looks import GIB, answers, ended, masks_told, removed, said_s, written
from tests.e2e.k8s.many import come_and_go

pytestmark = [pytest.mark.root, pytest.mark.timeout(3000)]

PROFILE: Final = "amdvgpu.io/25c-48g"
REGISTERED: Final = "registered with the kubelet"


class Served(NamedTuple):
    daemon: Program
    allocatable_s: float
    """From the registration, by the daemon's own log, until the API said that the resource is allocatable."""


@pytest.fixture(scope="module", params=["nodes", "cdi"])
def served(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("profiles") / "amdvgpud.toml"
    file.write_text(
        'simulate = "2*mi300x"\ntick_s = 0.2\nhealth.pulse_s = 0.5\nhealth.good_looks = 1\n'
        f'kubelet.mode = ["profiles"]\nkubelet.delivery = "{request.param}"\n'
        'kubelet.profiles.25c-48g = {compute = "25%", vram = "48GiB"}\n'
    )
    with daemon(cluster, "--config", str(file)) as running:
        eventually("the registration", lambda: REGISTERED in running.log.read_text(), 30)
        eventually("the profile", lambda: cluster.allocatable(PROFILE), 30)
        yield Served(running, time.time() - said_s(running, REGISTERED))
    eventually("nothing to be offered", lambda: not cluster.allocatable(PROFILE))


def offers(cluster: Cluster, count: int) -> bool:
    return cluster.allocatable(PROFILE) == count


@pytest.mark.usefixtures("served")
def test_each_gpu_offers_what_fits(cluster: Cluster) -> None:
    """Of 192 GiB the driver keeps some, so there are three times 48 for a pod."""
    assert cluster.allocatable(PROFILE) == 6


@pytest.mark.usefixtures("served")
def test_a_process_of_the_pod_is_held_to_its_quota(cluster: Cluster) -> None:
    cluster.api.create_pod(pod("held", "kfdclient", "--step", "16G", limits={PROFILE: 1}))
    assert ended(cluster, "held") == "Succeeded"
    log = cluster.log_of("held")
    assert answers(log, "gpu", "total") == [(48 * GIB,)]
    assert answers(log, "alloc", "result") == [("ok",), ("ok",), ("ok",), ("ENOMEM",)]
    removed(cluster, "held")


@pytest.mark.usefixtures("served")
def test_two_pods_have_compute_units_of_their_own(cluster: Cluster) -> None:
    """By what they are shown, and by what the KFD was told for their queues."""
    before = len(masks_told(cluster))
    script = "kfdclient --queue --count 0 >/dev/null; cat /run/amdvgpu/*/slice.json; sleep infinity"
    for name in ("one", "two"):
        cluster.api.create_pod(pod(name, "sh", "-c", script, limits={PROFILE: 1}))
    masks = []
    for name in ("one", "two"):
        eventually("the pod's slice", partial(written, cluster, name))
        (gpu,) = json.loads(cluster.log_of(name))["gpus"]
        masks.append((gpu["kfd_gpu_id"], int(gpu["cu_mask"], 16)))
    (first_gpu, first), (second_gpu, second) = masks
    assert [first.bit_count(), second.bit_count()] == [64, 64]  # whole rows: 25 % of 304, rounded down
    assert first_gpu != second_gpu or not first & second
    assert sorted(masks_told(cluster)[before:]) == sorted(masks)
    removed(cluster, "one", "two")


def test_a_gpu_whose_driver_fails_is_taken_from_the_kubelet_and_given_back(cluster: Cluster, served: Served) -> None:
    """A pulse finds it; from then on a second, of which the kubelet's own status takes half of one here."""
    root = cluster.corner.path("/run/amdvgpud/simulated")
    simulation = parse_simulation("2*mi300x")
    driver = SimulatedDriver(simulation, root)
    for fault, word, left in ((errno.EIO, "(gpu.unhealthy)", 3), (None, "(gpu.healthy)", 6)):
        driver.set_fault(simulation.gpus[1].pci_address, fault)
        eventually(f"{left} to be allocatable", partial(offers, cluster, left), 10)
        assert time.time() - said_s(served.daemon, word) < 1.5


def test_the_kubelet_comes_back_and_finds_all_again(cluster: Cluster, served: Served) -> None:
    cluster.api.create_pod(pod("stays", "sh", "-c", "kfdclient --count 1; sleep infinity", limits={PROFILE: 1}))
    eventually("the pod's process", lambda: answers(cluster.log_of("stays"), "end", "held"))
    eventually("the pod to run", lambda: cluster.api.pod("stays")["status"]["phase"] == "Running")
    registered = served.daemon.log.read_text().count(REGISTERED)
    cluster.programs["kubelet"].end()
    cluster.start_kubelet()
    # The Node's status is still that of before: a pod that came now would be refused by the kubelet.
    eventually("a registration", lambda: served.daemon.log.read_text().count(REGISTERED) > registered, 30)
    eventually("the profile again", lambda: cluster.allocatable(PROFILE) == 6, 30)
    cluster.api.create_pod(pod("next", "kfdclient", "--count", "1", limits={PROFILE: 1}))
    assert ended(cluster, "next") == "Succeeded"
    assert cluster.api.pod("stays")["status"]["phase"] == "Running"
    removed(cluster, "stays", "next")


def test_what_is_registered_is_allocatable_within_two_seconds(served: Served) -> None:
    """Of which the kubelet's own status takes half a second here."""
    assert served.allocatable_s < 2


def test_two_hundred_pods_come_and_go_and_nothing_is_left(cluster: Cluster, served: Served) -> None:
    """More at a time than there are slices, so that some wait for what others give back."""

    def create(made: dict[str, Any], _: Collection[str]) -> None:
        cluster.api.create_pod(made)

    come_and_go(cluster, served.daemon, {PROFILE: 1}, create, together=9)
