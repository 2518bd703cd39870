"""Which container has a slice, told by the hook that real podman runs (runc and crun), and what follows from it."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.podman

GLIBC, STATIC = "localhost/glibc:1", "localhost/static:1"


def shown(served: Any, name: str) -> Any:
    return served.usage(name)


def containers(served: Any, name: str) -> list[Any]:
    found: list[Any] = shown(served, name)["containers"]
    return found


def running(served: Any, *devices: str, image: str = GLIBC, command: tuple[str, ...] = ("sleep", "60")) -> str:
    """The id of a container that was started, and goes on."""
    wanted = [option for name in devices for option in ("--device", f"amdvgpu.io/slice={name}")]
    done = served.corner.podman("run", "-d", "--rm", served.corner.cgroup_parent, *wanted, image, *command)
    assert done.code == 0, done.output
    return str(done.output.splitlines()[-1])


def stop(served: Any, container: str) -> None:
    assert served.corner.podman("rm", "--force", "--time", "0", container).code == 0


def known_while_it_runs(served: Any) -> None:
    container = running(served, "alice", "bob")
    try:
        for name in ("alice", "bob"):
            (one,) = containers(served, name)
            assert (one["id"], one["reported"], one["gate"], one["gate_reason"]) == (container, True, "yes", "")
            assert one["cap"], "this machine has no dmem controller, and that must be said"
        assert shown(served, "alice")["state"] == "running"
        refused = served.ctl("slice", "delete", "alice")
        assert refused.code != 0
        assert container[:12] in refused.output
    finally:
        stop(served, container)
    served.eventually(lambda: containers(served, "alice") + containers(served, "bob"), [])


def test_a_lease_for_a_container_lasts_as_long_as_the_container(served: Any) -> None:
    body = json.dumps({"slice": "carol", "bind": "container", "holder": "a job"})
    granted = json.loads(_api(served, "-X", "POST", "-d", body, "/v1/leases"))
    assert granted["pid"] is None
    container = running(served, "carol")
    try:
        (one,) = containers(served, "carol")
        assert json.loads(_api(served, f"/v1/leases/{granted['id']}"))["pid"] == one["pid"]
    finally:
        stop(served, container)
    served.eventually(lambda: json.loads(_api(served, "/v1/leases"))["leases"], [])


def _api(served: Any, *argv: str) -> str:
    *options, path = argv
    socket = ("--unix-socket", "/run/amdvgpud/api.sock", "-H", "Content-Type: application/json")
    done = served.corner.run("curl", "-sS", *socket, *options, f"http://localhost{path}")
    assert done.code == 0, done.output
    return str(done.output)


def test_a_container_is_known_from_its_start_to_its_end_with_runc(served: Any) -> None:
    known_while_it_runs(served)


def test_a_container_is_known_from_its_start_to_its_end_with_crun(crun_served: Any) -> None:
    known_while_it_runs(crun_served)
