"""amdvgpuctl in this process and as a process of its own, with a stand-in daemon and a stand-in gate."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click.testing
import pytest

from amdvgpud.core import wire
from amdvgpud.ctl.cli import cli
from tests.ctl.stand_ins import Ctl, FakeDaemon, Granted, Handler, Server, Start, slice_view

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def _public_folder() -> Iterator[Path]:
    """A folder that other users can pass through, which pytest's own are not; short, as a socket's path must be."""
    with tempfile.TemporaryDirectory(prefix="avg") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
def public() -> Iterator[Path]:
    with _public_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def public_all_along() -> Iterator[Path]:
    with _public_folder() as folder:
        yield folder


@pytest.fixture
def daemon(public: Path) -> Iterator[FakeDaemon]:
    path = public / "api.sock"
    with Server(str(path), Handler) as server:
        path.chmod(0o666)
        server.daemon = FakeDaemon(str(path))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.daemon
        server.shutdown()
        thread.join()


@pytest.fixture
def ctl(daemon: FakeDaemon) -> Ctl:
    """amdvgpuctl in this process, its output piped."""

    def run(*arguments: str) -> click.testing.Result:
        return click.testing.CliRunner().invoke(cli, ["--socket", daemon.socket, *arguments], prog_name="amdvgpuctl")

    return run


@pytest.fixture
def start() -> Iterator[Start]:
    """amdvgpuctl as a process; what is still there at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(
        *arguments: str, prefix: tuple[str, ...] = (), env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-B", "-c", "from amdvgpud.ctl.cli import main; main()", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.fixture(scope="session")
def stand_in_gate(public_all_along: Path) -> Path:
    """A library that does what the gate does for these tests: it says into the slice's ledger that it was loaded.

    It looks for policies where the gate does: below /run/amdvgpu, else in AMDVGPU_SLICE_DIR.
    """
    folder = public_all_along / "gate"
    folder.mkdir(mode=0o755)
    (folder / "gate.c").write_text(
        """
        #include <dirent.h>
        #include <fcntl.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <unistd.h>
        static int found;
        static void note(const char *where, const char *name) {
            char path[512];
            snprintf(path, sizeof path, "%s/%s/ledger", where, name);
            int fd = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
            if (fd < 0) return;
            found = 1;
            if (write(fd, "loaded\\n", 7) < 0) _exit(99);
            close(fd);
        }
        __attribute__((constructor)) static void start(void) {
            DIR *all = opendir("/run/amdvgpu");
            for (struct dirent *e; all && (e = readdir(all));)
                if (e->d_name[0] != '.') note("/run/amdvgpu", e->d_name);
            if (all) closedir(all);
            const char *here = getenv("AMDVGPU_SLICE_DIR");
            if (here && !found) note(here, ".");
        }
        """
    )
    library = folder / "libamdvgpu.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, folder / "gate.c"], check=True)
    library.chmod(0o755)
    return library


@pytest.fixture
def granted(daemon: FakeDaemon, public: Path, stand_in_gate: Path) -> Granted:
    home = public / "slices" / "alice"
    (home / "guest").mkdir(parents=True, mode=0o755)
    (home / "guest" / "policy").write_text("policy")
    (home / "guest" / "policy").chmod(0o444)
    ledger = home / "guest" / "ledger"
    ledger.touch()
    ledger.chmod(0o666)
    lease = wire.LeaseView(
        id="lease-1",
        slice="alice",
        holder="me",
        pid=1,
        created_s=1_700_000_000.0,
        expires_s=None,
        ephemeral=True,
        slice_dir=str(home),
        environment={"AMDVGPU_SLICE": "alice", "HSA_CU_MASK": "0:0-63"},
        preload=[str(stand_in_gate)],
    )
    daemon.says("POST", "/v1/leases", lease, 201)
    daemon.says("GET", "/v1/slices/alice", slice_view())
    daemon.says("DELETE", "/v1/leases/lease-1", b"", 204)
    return Granted(lease, ledger, ("--socket", daemon.socket, "run"))
