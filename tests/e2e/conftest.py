"""A private corner of this machine where real podman runs: own mounts, pids and /run, gone when the tests end.

What a container runtime needs to work inside another container (no CAP_SYS_RESOURCE, hybrid cgroups) is done here, so
that the tests read like what a user types. Nothing of the machine's own /run, /run/cdi or image store is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

import amdvgpud._abi
from amdvgpud.core.model import Book, Compute, ComputePolicy, Inventory, Request, Slice, slice_name
from amdvgpud.core.plan import place
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree

IMAGE = "localhost/glibc:1"
STATIC_IMAGE = "localhost/static:1"

_PROGRAMS: Final = """
    bash cat chmod cp dd env grep head id ln ls mkdir mknod mount mv od rm setpriv sh sleep stat su timeout touch true
    truncate umount
"""

_SETUP: Final = """
set -eu
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/cdi /run/store
if [ "$CGROUPS" = hugetlb ] && [ "$(stat -f -c %T /sys/fs/cgroup)" != cgroup2fs ]; then
  mkdir /run/cgroup
  mount -t tmpfs -o mode=755 tmpfs /run/cgroup
  for controller in /sys/fs/cgroup/*/; do
    mkdir "/run/cgroup/${controller#/sys/fs/cgroup/}"
    mount --bind "$controller" "/run/cgroup/${controller#/sys/fs/cgroup/}"
  done
  mkdir -p /run/cgroup/hugetlb
  mountpoint -q /run/cgroup/hugetlb || mount -t cgroup -o hugetlb hugetlb /run/cgroup/hugetlb
  mount --move /run/cgroup /sys/fs/cgroup
fi
mount --make-shared /run
echo ready
while read -r _; do :; done
"""
"""The first process of the namespaces: bash, because it reaps. When our end of its stdin ends, so do it and all others.

``hugetlb``: crun refuses hybrid cgroups, and takes them for plain v1 when no controller is bound to the unified tree.
The folder for that controller is made on a tmpfs of our own: on the machine's, other runtimes would take it for one.
/run is shared with processes that are started outside (below), so that the daemon's tmpfs is podman's too.
"""

_OWN_PROC: Final = 'mount -t proc proc /proc && exec "$@"'
_CLEAN: Final = "find /sys/fs/cgroup/$0 /sys/fs/cgroup/*/$0 -depth -type d -exec rmdir {} +"


@dataclass(frozen=True)
class Finished:
    """What a command printed (both streams together, without the last newline) and how it ended."""

    code: int
    output: str


@dataclass(frozen=True)
class Corner:
    """Namespaces of one first process; commands are run in them by nsenter."""

    pid: int
    runtime: str
    folder: Path

    def path(self, inside: str) -> Path:
        """Where this process finds the file that is ``inside`` in there."""
        return Path(f"/proc/{self.pid}/root{inside}")

    def command(self, *argv: str) -> list[str]:
        return ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--ipc", "--", *argv]

    def run(self, *argv: str, timeout_s: float = 60) -> Finished:
        done = subprocess.run(
            self.command(*argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
            env=self.environment(), check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return Finished(done.returncode, done.stdout.rstrip("\n"))

    def environment(self) -> dict[str, str]:
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "PODMAN_IGNORE_CGROUPSV1_WARNING": "1",
            "HOME": "/root",
        }

    def podman(self, *argv: str, timeout_s: float = 60) -> Finished:
        store = ("--root", "/run/store/root", "--runroot", "/run/store/run", "--tmpdir", "/run/store/tmp")
        return self.run("podman", *store, "--runtime", self.runtime, *argv, timeout_s=timeout_s)

    def container(
        self, devices: Sequence[str], *argv: str, options: Sequence[str] = (), image: str = IMAGE
    ) -> Finished:
        """``podman run --rm --device amdvgpu.io/slice=<each of devices> … argv``."""
        wanted = [option for name in devices for option in ("--device", f"amdvgpu.io/slice={name}")]
        return self.podman("run", "--rm", self.cgroup_parent, *wanted, *options, image, *argv)

    @property
    def cgroup_parent(self) -> str:
        """The option for a cgroup folder that nobody else's containers are in, so that it can be removed afterwards."""
        return f"--cgroup-parent={self._cgroup}"

    @property
    def _cgroup(self) -> str:
        return f"amdvgpu-e2e-{self.pid}"

    def command_outside(self, *argv: str) -> list[str]:
        """What starts ``argv`` so that it sees the corner's files but all pids of the machine, as a service has.

        Its mounts below /run are the corner's too. It ends with this process, and each step becomes the next: the
        process that is started is the program.
        """
        enter = ("nsenter", f"--target={self.pid}", "--mount", "--ipc", "--", "setpriv", "--pdeathsig=KILL", "--")
        own_proc = ("unshare", "--mount", "--propagation=unchanged", "sh", "-c", _OWN_PROC, "sh")
        return [*enter, *own_proc, *argv]

    def start_outside(self, *argv: str, log: Path) -> subprocess.Popen[bytes]:
        """As :meth:`command_outside`; its output goes to ``log``."""
        with log.open("wb") as out:
            return subprocess.Popen(
                self.command_outside(*argv), stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.environment()
            )

    def leave(self) -> None:
        self.podman("rm", "--all", "--force")
        self.run("sh", "-c", _CLEAN, self._cgroup)


@dataclass(frozen=True)
class Served:
    """A corner with the real daemon in it: its default paths, its socket, its CDI file; simulated GPUs."""

    corner: Corner
    log: Path

    def ctl(self, *argv: str) -> Finished:
        return self.corner.run(str(BIN / "amdvgpuctl"), *argv)

    def create(self, name: str, *argv: str) -> None:
        made = self.ctl("slice", "create", name, *argv)
        assert made.code == 0, made.output

    @staticmethod
    def eventually(what: Callable[[], Any], wanted: Any) -> None:
        """Wait until ``what()`` is ``wanted``; fail with what it was instead."""
        with contextlib.suppress(AssertionError):
            until("", lambda: what() == wanted)
        assert what() == wanted

    def settle(self) -> None:
        """Wait until the daemon has seen that nobody is left in any slice."""
        listed = ("slice", "list", "-o", "json")
        self.eventually(lambda: sum(s["processes"] for s in json.loads(self.ctl(*listed).output)["slices"]), 0)

    def usage(self, name: str) -> Any:
        """The slice as ``amdvgpuctl slice show -o json`` gives it."""
        shown = self.ctl("slice", "show", name, "-o", "json")
        assert shown.code == 0, shown.output
        return json.loads(shown.output)


BIN: Final = Path(sys.executable).parent
SIMULATED: Final = "2*mi300x,rx9070xt"
TICK_S: Final = 0.2
"""Shorter than the default: what dead processes of a container held comes back with the daemon's next look."""
PATIENCE_S: Final = 20.0
"""What is waited for comes within a second or so; on a busy machine later. After this it counts as not come."""


def until(what: str, holds: Callable[[], bool]) -> None:
    """Return as soon as ``holds()``; fail, saying ``what`` was waited for, after PATIENCE_S."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, f"waited {PATIENCE_S:g} s in vain for {what}"
        time.sleep(0.05)


def _serve(corner: Corner, folder: Path, *more: str) -> Iterator[Served]:
    log = folder / "log"
    options = (
        "--simulate",
        SIMULATED,
        "--state-dir",
        str(folder),
        "--rest-tcp",
        "",
        "--tick-s",
        str(TICK_S),
        "--kernel-sample-s",
        "1",
        *more,
    )
    daemon = corner.start_outside(str(BIN / "amdvgpud"), *options, log=log)
    served = Served(corner, log)
    try:
        until("the daemon", lambda: daemon.poll() is not None or served.ctl("gpu", "list").code == 0)
        assert daemon.poll() is None, log.read_text()
        served.create("alice", "--gpu", "0", "--vram", "4GiB", "--compute", "25%")
        served.create("bob", "--gpu", "2", "--vram", "2GiB", "--compute", "50%")
        served.create("carol", "--gpu", "0", "--vram", "1GiB", "--compute", "32")
        served.create("pair", "--gpu", "1", "--gpu", "2", "--vram", "1GiB", "--compute", "25%")
        yield served
    finally:
        daemon.terminate()
        daemon.wait(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def served(corner: Corner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The daemon, with alice and carol on one MI300X, bob on the Radeon, pair on the other MI300X and the Radeon."""
    yield from _serve(corner, tmp_path_factory.mktemp("daemon"))


@pytest.fixture(scope="module")
def crun_served(crun_corner: Corner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from _serve(crun_corner, tmp_path_factory.mktemp("daemon"))


@pytest.fixture(scope="session")
def containers_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """podman asks for 1048576 files and 32768 processes; raising a limit may be forbidden here, so it asks for ours."""
    folder = tmp_path_factory.mktemp("conf")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    (folder / "containers.conf").write_text(
        f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc=32768:32768"]\n'
        'netns = "none"\npids_limit = 0\n[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    return folder


@pytest.fixture(scope="session")
def glibc_tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of this machine's own bash and coreutils with the libraries they need: no registry, no download."""
    root = tmp_path_factory.mktemp("glibc")
    for folder in (
        "bin",
        "dev",
        "etc",
        "home",
        "lib",
        "lib64",
        "opt",
        "proc",
        "run",
        "sys",
        "tmp",
        "usr/lib",
        "usr/bin",
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    wanted = [Path(found) for name in _PROGRAMS.split() if (found := shutil.which(name))]
    wanted.append(Path(amdvgpud._abi.__file__).with_name("kfdclient"))
    for program in wanted:
        shutil.copy2(program, root / "bin" / program.name)
    for library in sorted({lib for program in wanted for lib in _libraries(program)}):
        target = root / library.relative_to("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library.resolve(), target)
    (root / "etc/passwd").write_text("root:x:0:0:root:/:/bin/bash\nuser:x:1000:1000::/:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\nuser:x:1000:\n")
    return _tar(root, tmp_path_factory.mktemp("images") / "glibc.tar")


def _libraries(program: Path) -> list[Path]:
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
    return [Path(word) for line in listed.splitlines() for word in line.split() if word.startswith("/")]


def _tar(root: Path, target: Path) -> Path:
    subprocess.run(["tar", "-C", root, "--owner=0", "--group=0", "-cf", target, "."], check=True)
    return target


@pytest.fixture(scope="session")
def static_tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one static program: what neither ld.so.preload nor any other way of loading a library reaches."""
    folder = tmp_path_factory.mktemp("static")
    (folder / "cat.c").write_text(
        "#include <fcntl.h>\n#include <unistd.h>\n"
        "int main(int n, char **names) {\n"
        "  char bytes[4096];\n"
        "  for (int i = 1; i < n; i++) {\n"
        "    int fd = open(names[i], O_RDONLY);\n"
        "    ssize_t size = fd < 0 ? -1 : read(fd, bytes, sizeof bytes);\n"
        "    if (size < 0 || write(1, bytes, size) != size) return 1;\n"
        "  }\n"
        "  return 0;\n}\n"
    )
    root = folder / "root"
    for name in ("bin", "dev", "etc", "proc", "run", "sys", "tmp"):
        (root / name).mkdir(parents=True)
    subprocess.run(["cc", "-static", "-o", root / "bin/cat", folder / "cat.c"], check=True)
    return _tar(root, folder / "static.tar")


def _corner(folder: Path, runtime: str, cgroups: str, images: dict[str, Path]) -> Iterator[Corner]:
    first = subprocess.Popen(
        [
            "unshare",
            "--mount",
            "--pid",
            "--ipc",
            "--fork",
            "--kill-child",
            "--propagation=private",
            "bash",
            "-c",
            _SETUP,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CGROUPS": cgroups},
    )
    try:
        assert first.stdin is not None
        assert first.stdout is not None
        assert first.stdout.readline() == "ready\n"
        (child,) = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        corner = Corner(int(child), runtime, folder)
        for name, tar in images.items():
            imported = corner.podman("import", "--quiet", str(tar), name)
            assert imported.code == 0, imported.output
        yield corner
        corner.leave()
    finally:
        first.kill()  # --kill-child: the namespaces' first process, and with it conmon and whatever else is left
        first.communicate()


@pytest.fixture(scope="module")
def corner(containers_conf: Path, glibc_tar: Path, static_tar: Path) -> Iterator[Corner]:
    """podman with runc on the cgroups as they are; both images in its store."""
    yield from _corner(containers_conf, "runc", "as-is", {IMAGE: glibc_tar, STATIC_IMAGE: static_tar})


@pytest.fixture(scope="module")
def crun_corner(containers_conf: Path, glibc_tar: Path) -> Iterator[Corner]:
    yield from _corner(containers_conf, "crun", "hugetlb", {IMAGE: glibc_tar})


def place_slice(inventory: Inventory, book: Book, name: str, vram_bytes: int, cus: int, *on: str) -> Book:
    """``book`` with a slice of ``cus`` CUs on each of the GPUs ``on``, as the planner cuts it."""
    compute = Compute(ComputePolicy.EXACT, cu_count=cus)
    request = Request(slice_name(name), compute, vram_bytes, len(on), on)
    shares = place(book, inventory, request).shares
    return book.with_slice(Slice(request.name, request, shares, created_s=0.0, revision=book.revision + 1))


@dataclass(frozen=True)
class Machine:
    """Two simulated GPUs as the daemon would see them, and slices: of the first, the second, the first, and of both."""

    root: Path
    inventory: Inventory
    book: Book


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    root = tmp_path_factory.mktemp("machine")
    build_tree(parse_simulation("2*rx9070xt"), root)
    inventory = SysfsReader(root).read_inventory()
    book = place_slice(inventory, Book(), "alice", 4 * 2**30, 16, "0")
    book = place_slice(inventory, book, "bob", 2 * 2**30, 8, "1")
    book = place_slice(inventory, book, "carol", 2**30, 4, "0")
    return Machine(root, inventory, place_slice(inventory, book, "0-pair", 2**30, 4, "0", "1"))
