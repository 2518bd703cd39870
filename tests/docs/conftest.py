"""A machine for readers of the documents: the daemon at its default places, podman, and what the examples name.

Built on the corner of tests/e2e: mounts, /run and an image store of its own; here /etc and /var/lib are its own too, so
that a document may write there. Stand-ins: ``train.py``, the reader's own program, is one line; the image that the
documents name is made of this machine's bash and coreutils, as no registry is asked.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from amdvgpud.ctl.client import Client
from tests.e2e.conftest import _CLEAN, Corner, Finished, _corner, containers_conf, glibc_tar, until

__all__ = ["containers_conf", "glibc_tar"]

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
IMAGE = "docker.io/rocm/pytorch:latest"

_OWN_FILES = """
set -eu
for folder in /etc /var/lib; do
  mkdir -p /run/own$folder/upper /run/own$folder/work
  mount -t overlay overlay -o lowerdir=$folder,upperdir=/run/own$folder/upper,workdir=/run/own$folder/work $folder
done
mkdir -p /run/reader/bin /etc/amdvgpud
cat > /run/reader/bin/podman <<'END'
#!/bin/sh
first=$1; shift
[ "$first" = run ] && set -- "$PARENT" "$@"
store=/run/store
exec /usr/bin/podman --root $store/root --runroot $store/run --tmpdir $store/tmp --runtime runc "$first" "$@"
END
printf '#!/bin/sh\\nexec "$@"\\n' > /run/reader/bin/sudo
chmod 755 /run/reader/bin/*
echo 'import os; print("training in", os.environ.get("AMDVGPU_SLICE", "no slice"))' > /run/reader/train.py
"""


_OWN_NETWORK = """
import fcntl, socket, struct, sys
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))
print("ready", flush=True)
sys.stdin.read()
"""
"""Holds a network namespace with nothing but a loopback: the documents speak of port 9841, which others may have."""


@dataclass(frozen=True)
class Machine:
    corner: Corner
    folder: Path
    network: int
    """Process that holds its network namespace."""

    def start(self, *argv: str, log: Path) -> subprocess.Popen[bytes]:
        return self.corner.start_outside("nsenter", f"--net=/proc/{self.network}/ns/net", "--", *argv, log=log)

    def run(self, command: str, variables: Mapping[str, str] = {}, timeout_s: float = 60) -> Finished:
        """``command`` as a reader's bash runs it, in the reader's folder; both streams together."""
        environment = [
            f"PATH={BIN}:/run/reader/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            f"PARENT={self.corner.cgroup_parent}",
            "HOME=/run/reader",
            *(f"{name}={value}" for name, value in variables.items()),
        ]
        log = self.folder / "output"
        in_folder = 'cd /run/reader; exec bash -c "$0"'
        process = self.start("env", *environment, "bash", "-c", in_folder, command, log=log)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            pytest.fail(f"{command!r} did not end within {timeout_s:g} s: {log.read_text()}", pytrace=False)
        return Finished(code, log.read_text(errors="replace").rstrip("\n"))


@pytest.fixture(scope="session")
def reader(containers_conf: Path, glibc_tar: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("reader")
    holder = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-c", _OWN_NETWORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        for corner in _corner(containers_conf, "runc", "as-is", {IMAGE: glibc_tar}):
            made = corner.run("sh", "-c", _OWN_FILES)
            assert made.code == 0, made.output
            yield Machine(corner, folder, holder.pid)
            parent = corner.cgroup_parent.partition("=")[2]
        until("the cgroups of the containers", lambda: _without_cgroups(parent))
    finally:
        holder.communicate()


def _without_cgroups(parent: str) -> bool:
    """Whether they are gone. podman may outlive its command here: it is not in the pid namespace of the corner."""
    subprocess.run(["sh", "-c", _CLEAN, parent], check=False, capture_output=True)
    return not [*Path("/sys/fs/cgroup").glob(parent), *Path("/sys/fs/cgroup").glob(f"*/{parent}")]


@pytest.fixture
def machine(reader: Machine, tmp_path: Path) -> Iterator[Callable[[str], Machine]]:
    """``machine("mi300x")``: the reader's machine with a fresh daemon that simulates these GPUs."""
    started: list[subprocess.Popen[bytes]] = []
    log = tmp_path / "daemon.log"

    def start(simulated: str) -> Machine:
        command = (str(BIN / "amdvgpud"), "--simulate", simulated, "--tick-s", "0.2", "--rest-tcp", "127.0.0.1:9841")
        started.append(reader.start(*command, log=log))
        socket = str(reader.corner.path("/run/amdvgpud/api.sock"))

        def answers() -> bool:
            assert started[0].poll() is None, log.read_text()
            try:
                return bool(Client(socket).content("/readyz"))
            except Exception:
                return False

        until("the daemon", answers)
        return reader

    yield start
    ended = [daemon.poll() for daemon in started]
    for daemon in started:
        daemon.terminate()
        daemon.wait(20)
    reader.corner.run("sh", "-c", "rm -rf /var/lib/amdvgpud /run/amdvgpud /run/cdi/*; rm -rf /etc/amdvgpud/*")
    # One that has ended in the midst of a page says why in its own words only.
    assert ended == [None] * len(started), log.read_text()
