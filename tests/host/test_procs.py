"""Start times of processes, as a pid alone is no identity; and by what it is told which slice a process is in."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from amdvgpud.core.model import Holder, SliceName
from amdvgpud.core.truth import Belonging
from amdvgpud.host.procs import SliceMounts, cgroup_of, process_alive, start_ticks


def test_we_are_alive_and_somebody_with_our_pid_is_not_us() -> None:
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    assert process_alive(Holder("us", os.getpid(), ticks))
    assert not process_alive(Holder("a former us", os.getpid(), ticks - 1))


def test_a_zombie_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read()  # the pipe closes as it exits; it is not waited for yet
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert start_ticks(child.pid) is None


def test_a_command_name_may_hold_brackets_and_blanks(tmp_path: Path) -> None:
    fields = " ".join(["S", *map(str, range(4, 22)), "987654", "23"])
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "stat").write_text(f"5 (a) b (c) {fields}\n")
    assert start_ticks(5, tmp_path) == 987654


def test_a_holder_without_a_process_never_ends_by_itself() -> None:
    assert process_alive(Holder("somebody"))


# ------------------------------------------------------------------------------------------------- whose it is


@pytest.fixture
def slices(tmp_path: Path) -> Iterator[Path]:
    """A directory of slices on a tmpfs of its own, with alice and bob in it."""
    here = tmp_path / "run dir" / "slices"
    here.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", here], check=True)
    for name in ("alice", "bob"):
        (here / name / "guest").mkdir(parents=True)
    yield here
    subprocess.run(["umount", "-l", here], check=True)


@contextmanager
def unshared(commands: str, environment: Mapping[str, str] | None = None) -> Iterator[int]:
    """The pid of a process with mounts of its own, made by ``commands``."""
    script = (
        "mkdir -p /run/amdvgpu && mount -t tmpfs none /run/amdvgpu && cd /run/amdvgpu && "
        f"mkdir -p alice bob mine deep/run/amdvgpu/alice && {commands} && echo ready && exec sleep 60"
    )
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **(environment or {})}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.mark.root
@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ("mount --bind {0}/alice/guest alice", ("alice",)),
        ("mount --bind {0}/bob/guest bob && mount --bind {0}/alice/guest alice", ("bob", "alice")),
        ("mount --bind {0}/alice/guest deep/run/amdvgpu/alice", ("alice",)),  # before the container's root is changed
        ("mount --bind {0}/alice/guest mine", ()),  # not where the gate looks
        ("mount --bind {0}/alice/guest bob", ()),  # alice's files in bob's place are neither
        ("mount --bind {0}/alice alice", ()),
        ("mount --bind mine alice", ()),  # the place without the files
        ("true", ()),
    ],
)
def test_a_process_is_in_the_slice_whose_files_are_mounted_at_its_place(
    slices: Path, commands: str, expected: tuple[str, ...]
) -> None:
    with unshared(commands.format(shlex.quote(str(slices)))) as pid:
        assert SliceMounts.look(slices).of(pid) == Belonging(tuple(SliceName(n) for n in expected))


@pytest.mark.root
def test_a_former_slice_of_the_same_name_is_another_one(slices: Path) -> None:
    with unshared(f"mount --bind {shlex.quote(str(slices))}/alice/guest alice") as pid:
        (slices / "alice").rename(slices / ".old-alice")
        (slices / ".old-alice" / "guest").rmdir()
        (slices / "alice" / "guest").mkdir(parents=True)
        assert SliceMounts.look(slices).of(pid) == Belonging()


@pytest.mark.root
def test_a_slice_without_a_file_system_of_its_own_is_told_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "slices" / "alice" / "guest").mkdir(parents=True)
    with unshared(f"mount --bind {tmp_path}/slices/alice/guest alice") as pid:
        assert SliceMounts.look(tmp_path / "slices").of(pid) == Belonging((SliceName("alice"),))


@pytest.mark.root
def test_what_the_whole_host_has_mounted_puts_nobody_into_a_slice(slices: Path, tmp_path: Path) -> None:
    with unshared(f"mount --bind {shlex.quote(str(slices))}/alice/guest alice") as host:
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "mountinfo").write_text(Path(f"/proc/{host}/mountinfo").read_text())
        (tmp_path / "7").symlink_to(f"/proc/{host}")
        assert SliceMounts.look(slices, tmp_path).of(7) == Belonging()


@pytest.mark.root
def test_the_environment_claims_and_does_not_prove(slices: Path) -> None:
    claim = {"AMDVGPU_SLICE_DIR": f"{slices}/bob/guest"}
    with unshared(f"mount --bind {shlex.quote(str(slices))}/alice/guest alice", claim) as pid:
        assert SliceMounts.look(slices).of(pid) == Belonging((SliceName("alice"),), (SliceName("bob"),))
    with unshared("true", {"AMDVGPU_SLICE_DIR": f"{slices}/../bob/guest"}) as pid:
        assert SliceMounts.look(slices).of(pid) == Belonging()


@pytest.mark.root
def test_a_process_that_is_not_there_is_in_no_slice_and_in_no_cgroup(slices: Path) -> None:
    assert SliceMounts.look(slices).of(2**22 + 1) == Belonging()
    assert cgroup_of(2**22 + 1) is None


def test_the_cgroup_is_the_one_of_the_second_version(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "cgroup").write_text("4:memory:/old\n0::/user.slice/a b\n")
    assert cgroup_of(5, tmp_path) == "/user.slice/a b"
    (tmp_path / "5" / "cgroup").write_text("4:memory:/old\n")
    assert cgroup_of(5, tmp_path) is None
