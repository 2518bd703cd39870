"""Processes as /proc shows them: real ones in namespaces of their own, and made-up trees for the rest."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from amdvgpud.core.containers import Container
from amdvgpud.core.image import Verdict
from amdvgpud.core.model import SliceName
from amdvgpud.host.containers import ContainerRecord, ProcContainers
from amdvgpud.host.procs import start_ticks

ID = "0123456789abcdef" * 4
ALICE = SliceName("alice")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child
        child.kill()


def test_a_process_is_seen_with_its_user_and_without_slices_that_it_does_not_have(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    seen = ProcContainers(tmp_path).sight(sleeper.pid)
    assert seen is not None
    assert (seen.pid, seen.start_ticks, seen.slices) == (sleeper.pid, start_ticks(sleeper.pid), ())
    assert os.getuid() in seen.uids
    assert ProcContainers(tmp_path).sight(2**22 + 1) is None


@pytest.mark.root
def test_the_owner_of_a_user_namespace_has_a_right_to_what_runs_in_it(tmp_path: Path) -> None:
    script = "echo ready; exec sleep 60"
    command = ["setpriv", "--reuid=65534", "--clear-groups", "unshare", "--user", "--map-root-user", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        seen = ProcContainers(tmp_path).sight(child.pid)
        child.kill()
    assert seen is not None
    assert 65534 in seen.uids


def process(proc: Path, pid: int, ticks: int, cgroup: str, *slices: str, slices_dir: Path) -> None:
    """A process in a made-up /proc, with guest directories of ``slices``, which are on a real file system."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    fields = " ".join(["S", "1", *["0"] * 17, str(ticks), "0", "0"])
    (folder / "stat").write_text(f"{pid} (x) {fields}\n")
    (folder / "status").write_text("Name:\tx\nUid:\t0\t0\t0\t0\n")
    (folder / "cgroup").write_text(f"5:pids:{cgroup}\n0::{cgroup}\n")
    (folder / "environ").write_text("")
    device, root = _place(slices_dir)
    lines = [f"9{n} 1 {device} {root}/{name}/guest /run/amdvgpu/{name} ro - x x ro" for n, name in enumerate(slices)]
    (folder / "mountinfo").write_text("\n".join(lines) + "\n")


def _place(folder: Path) -> tuple[str, str]:
    """(major:minor, path within the file system) of a folder, by our own mounts."""
    best = ("", "", "")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        _, _, device, root, place, *_ = line.split(" ")
        if (str(folder) + "/").startswith(place.rstrip("/") + "/") and len(place) >= len(best[2]):
            best = (device, root, place)
    return best[0], (best[1].rstrip("/") + "/" + str(folder)[len(best[2].rstrip("/")) + 1 :]).rstrip("/")


def test_the_oldest_process_of_each_container_with_a_slice_is_found(tmp_path: Path) -> None:
    slices, proc = tmp_path / "slices", tmp_path / "proc"
    (slices / "alice/guest").mkdir(parents=True)
    scope = f"/machine.slice/libpod-{ID}.scope"
    process(proc, 20, 500, f"{scope}/container", "alice", slices_dir=slices)
    process(proc, 30, 400, f"{scope}/container", "alice", slices_dir=slices)
    process(proc, 40, 300, "/machine.slice/libpod-" + "e" * 64 + ".scope", slices_dir=slices)  # no slice
    process(proc, 50, 200, "/user.slice", "alice", slices_dir=slices)  # no container
    process(proc, 60, 100, f"/machine.slice/libpod-conmon-{ID}.scope", slices_dir=slices)
    (seen,) = ProcContainers(slices, proc).find()
    assert (seen.pid, seen.container, seen.slices, seen.cgroups) == (30, ID, (ALICE,), (f"{scope}/container",))


def test_the_end_of_a_process_is_seen_at_once(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    ticks = start_ticks(sleeper.pid)
    assert ticks is not None
    processes = ProcContainers(tmp_path)
    assert processes.watch(sleeper.pid, ticks + 1) is None, "another process of that number"
    watched = processes.watch(sleeper.pid, ticks)
    assert watched is not None
    assert processes.pid_of(watched) == sleeper.pid
    sleeper.kill()
    assert select.select([watched], [], [], 10)[0] == [watched]
    sleeper.wait()
    assert processes.pid_of(watched) is None
    assert not processes.alive(sleeper.pid, ticks)
    os.close(watched)


def test_what_is_no_pidfd_is_nobodys(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        assert ProcContainers(tmp_path).pid_of(file.fileno()) is None
    assert ProcContainers(tmp_path).pid_of(9999) is None


def test_what_was_told_of_containers_outlives_the_daemon(tmp_path: Path) -> None:
    record = ContainerRecord(tmp_path / "containers.json")
    assert record.load() == ()
    one = Container(ALICE, ID, 7, 70, "/docker/x", "pod", 5.5, True, Verdict(False, "static"), "")
    record.save([one])
    assert record.load() == (one,)
    record.path.write_text('[{"slice": 3}]')
    assert record.load() == ()
