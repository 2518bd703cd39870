"""Names of cgroups, and whose word about a container is believed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from amdvgpud.core.containers import Report, Sighting, container_of, disbelief, pod_of
from amdvgpud.core.model import SliceName

ID = "0123456789abcdef" * 4
OTHER = "f" * 64
POD = "3b0f5d1e-6a2c-4c9e-8f31-0d9a7e5b2c41"
SYSTEMD_POD = POD.replace("-", "_")
ALICE = SliceName("alice")


@pytest.mark.parametrize(
    ("cgroup", "container", "pod"),
    [
        (f"/machine.slice/libpod-{ID}.scope", ID, None),
        (f"/machine.slice/libpod-{ID}.scope/container", ID, None),
        (f"/libpod_parent/libpod-{ID}", ID, None),
        (f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope", ID, None),
        (f"/system.slice/a.service/libpod-payload-{ID}", ID, None),
        (f"/machine.slice/libpod-conmon-{ID}.scope", None, None),
        (f"/system.slice/docker-{ID}.scope", ID, None),
        (f"/docker/{ID}", ID, None),
        (f"/kubepods.slice/kubepods-pod{SYSTEMD_POD}.slice/cri-containerd-{ID}.scope", ID, POD),
        (
            f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD_POD}.slice/crio-{ID}.scope",
            ID,
            POD,
        ),
        (f"/kubepods/besteffort/pod{POD}/{ID}", ID, POD),
        (f"/kubelet/kubepods/pod{'a' * 32}/{ID}", ID, "a" * 32),
        (f"/docker/{OTHER}/kubelet/kubepods/pod{POD}/{ID}", ID, POD),
        (f"/kubepods-pod{SYSTEMD_POD}.slice:cri-containerd:{ID}", ID, POD),
        (f"/app/pod{POD}", None, None),
        ("/user.slice/user-1000.slice/session-2.scope", None, None),
        ("/", None, None),
    ],
)
def test_a_cgroup_names_its_container_and_its_pod(cgroup: str, container: str | None, pod: str | None) -> None:
    assert (container_of(cgroup), pod_of(cgroup)) == (container, pod)


REPORT = Report("start", ALICE, ID, 77, "/bundle", peer_uid=0)
SEEN = Sighting(77, 5, frozenset({0}), (ALICE,), (f"/docker/{ID}",), f"/docker/{ID}")


@pytest.mark.parametrize(
    ("report", "seen", "why"),
    [
        (REPORT, SEEN, None),
        (REPORT, replace(SEEN, cgroups=("/",)), None),
        (replace(REPORT, peer_uid=1000), replace(SEEN, uids=frozenset({100000, 1000})), None),
        (REPORT, None, "there is no process 77 on this machine"),
        (replace(REPORT, peer_uid=1000), SEEN, "process 77 is not uid 1000's"),
        (REPORT, replace(SEEN, slices=(SliceName("bob"),)), "process 77 does not have slice alice mounted"),
        (
            replace(REPORT, id=OTHER),
            SEEN,
            f"process 77 is in the cgroup of container {ID}, not {OTHER}",
        ),
    ],
    ids=["of root", "without a cgroup", "of a rootless owner", "no process", "a stranger's", "no mount", "another id"],
)
def test_a_report_is_believed_as_far_as_the_process_shows_it(
    report: Report, seen: Sighting | None, why: str | None
) -> None:
    assert disbelief(report, seen) == why
