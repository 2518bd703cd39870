"""Partitions with real podman, on a simulated machine: slices inside them, whole ones, switches under use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytestmark = pytest.mark.podman

GIB = 2**30
IMAGE = "localhost/glibc:1"
CUT = "0000:25:00.0"
CUT_ID = "GPU-a1b2c3d4e5f62222"
LEFT_OF_PARTITION = 24 * GIB - 2 * 2**20 - 64 * 2**20  # an eighth of 196592 MiB, less what softkfd keeps


@pytest.fixture(scope="module")
def cut(served: Any) -> Any:
    """The daemon, with its second MI300X in CPX: a slice in partition 3, and a whole partition, number 5."""
    served.settle()
    assert served.ctl("slice", "delete", "pair").code == 0
    switched = served.ctl("gpu", "partition", CUT, "cpx")
    assert switched.code == 0, switched.output
    assert switched.output.startswith(f"{CUT_ID} was put from SPX into CPX (partitions: 8)")
    served.create("inside", "--gpu", f"{CUT}/3", "--vram", "2GiB", "--compute", "25%")
    served.create("whole", "--gpu", f"{CUT}/5", "--compute", "whole")
    return served


def answers(output: str, op: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [line for line in lines if line["op"] == op]


@contextmanager
def running(served: Any, device: str) -> Iterator[None]:
    """A container with ``device`` in which kfdclient holds one GiB."""
    client = ("sh", "-c", "sleep 600 | /bin/kfdclient --step 1G --count 1 --hold")
    corner = served.corner
    started = corner.podman("run", "-d", "--name", "holder", corner.cgroup_parent, "--device", device, IMAGE, *client)
    assert started.code == 0, started.output
    try:
        served.eventually(lambda: '"hold"' in corner.podman("logs", "holder").output, True)
        yield
    finally:
        corner.podman("rm", "-f", "-t", "0", "holder")


def test_a_slice_inside_a_partition_is_held_to_its_quota_and_mask(cut: Any) -> None:
    done = cut.corner.container(["inside"], "sh", "-c", "/bin/kfdclient --queue --step 1G")
    assert done.code == 0, done.output
    assert [line["total"] for line in answers(done.output, "gpu")] == [2 * GIB]
    assert [line["result"] for line in answers(done.output, "alloc")] == ["ok", "ok", "ENOMEM"]
    log = cut.corner.path("/run/amdvgpud/simulated/log.jsonl").read_text().splitlines()
    told = [line for line in map(json.loads, log) if line["op"] == "SET_CU_MASK"][-1]
    assert (told["gpu"], told["set"]) == (0x8130 + 3, 8), "two rows of four CUs, of partition 3"


def test_a_whole_partition_is_a_device_of_its_own_kind_without_the_gate(cut: Any) -> None:
    listed = cut.ctl("cdi", "list").output.splitlines()
    assert f"amdvgpu.io/partition={CUT_ID}-5" in listed
    assert f"amdvgpu.io/partition={CUT_ID}-3" not in listed
    corner = cut.corner
    script = "cat /etc/ld.so.preload; ls /run; /bin/kfdclient --step 4G --free"
    device = ("--device", f"amdvgpu.io/partition={CUT_ID}-5")
    done = corner.podman("run", "--rm", corner.cgroup_parent, *device, IMAGE, "sh", "-c", script)
    assert done.code == 0, done.output
    assert done.output.splitlines()[0] == "/usr/lib/amdvgpu/libsoftkfd.so"
    assert "amdvgpu" not in done.output.splitlines()[1:4]
    (gpu,) = answers(done.output, "gpu")
    assert (gpu["gpu_id"], gpu["total"], gpu["available"]) == (0x8135, 196592 * 2**20 // 8, LEFT_OF_PARTITION)
    assert len([a for a in answers(done.output, "alloc") if a["result"] == "ok"]) == 5


def test_a_partition_that_nobody_reserved_cannot_be_asked_for(cut: Any) -> None:
    corner = cut.corner
    device = ("--device", f"amdvgpu.io/partition={CUT_ID}-0")
    done = corner.podman("run", "--rm", corner.cgroup_parent, *device, IMAGE, "true")
    assert done.code != 0
    assert "unresolvable CDI devices" in done.output


def test_a_container_in_a_slice_keeps_its_gpu_from_being_switched_and_not_the_other(cut: Any) -> None:
    with running(cut, "amdvgpu.io/slice=inside"):
        cut.eventually(lambda: cut.usage("inside")["processes"] > 0, True)
        refused = cut.ctl("gpu", "partition", CUT, "spx", "--force")
        assert refused.code == 1
        assert "cannot be put into SPX: processes run in slice inside" in refused.output
        tried = cut.ctl("gpu", "partition", "0000:05:00.0", "cpx", "--force", "--dry-run")
        assert "would be put from SPX into CPX" in tried.output, tried.output
    cut.settle()


def test_a_container_with_a_whole_partition_is_found_by_the_driver(cut: Any) -> None:
    """No ledger knows of it; kfd/proc does, by the pid that it has on the host."""
    with running(cut, f"amdvgpu.io/partition={CUT_ID}-5"):
        refused = cut.ctl("gpu", "partition", CUT, "spx", "--force")
        assert refused.code == 1
        assert "cannot be put into SPX: KFD processes have it open" in refused.output
        assert "(kfdclient)" in refused.output
        assert cut.ctl("gpu", "show", CUT).output.count("renderD") == 8


def test_a_forced_switch_loses_slices_and_their_devices_and_both_come_back(cut: Any) -> None:
    cut.settle()
    switched = cut.ctl("gpu", "partition", CUT, "spx", "--force")
    assert switched.code == 0, switched.output
    assert "lost until CPX is back: inside, whole" in switched.output
    assert cut.usage("inside")["state"] == "lost"
    assert "inside" not in cut.ctl("cdi", "list").output
    assert cut.corner.container(["inside"], "true").code != 0
    back = cut.ctl("gpu", "partition", CUT, "cpx")
    assert back.code == 0, back.output
    done = cut.corner.container(["inside"], "/bin/kfdclient", "--step", "1G")
    assert [line["total"] for line in answers(done.output, "gpu")] == [2 * GIB]
