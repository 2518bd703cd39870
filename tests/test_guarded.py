"""What goes around the gate, seen and ended by a real daemon: a KFD client with a slice's mounts and no gate.

softkfd keeps the accounts that the kernel keeps on a real machine; the processes, their mounts and signals are real.
"""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import amdvgpud._abi
from amdvgpud._abi import ffi, lib
from amdvgpud.core import wire
from amdvgpud.ctl.client import Client, Refused
from tests.ctl.stand_ins import served

pytestmark = pytest.mark.root

GIB = 1 << 30
ROOT = Path(__file__).parents[1]
PARTS = Path(amdvgpud._abi.__file__).parent
SLICE = wire.SliceSpec(vram="4GiB", compute="25%", on=["0"])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guarded")


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[Client]:
    """Of a daemon that looks often and has little patience."""
    patience = ("--kernel-sample-s=0.2", "--watchdog-after-s=3", "--watchdog-grace-s=0.5", "--watchdog-policy=kill")
    for socket in served(home, "--simulate=2*mi300x", *patience):
        yield Client(socket)


@contextmanager
def kfd_client(
    home: Path, inside: str | None, *libraries: str, count: int = 2, first: str = ""
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that holds ``count`` GiB of the first GPU; ``inside``: with that slice's files at their place.

    ``first``: what its shell does before it becomes that.
    """
    root = home / "run/simulated"
    preload = " ".join(str(PARTS / name) for name in libraries)
    guest, place = f"{home}/run/slices/{inside}/guest", f"/run/amdvgpu/{inside}"
    mounts = (
        f"mkdir -p /run/amdvgpu && mount -t tmpfs none /run/amdvgpu && mkdir {place} && "
        f"mount --bind {guest} {place} && mount -o remount,bind,ro {place} && "
        f"mount --bind {guest}/ledger {place}/ledger && "
    )
    client = f"{PARTS}/kfdclient --step 1G --count {count} --hold"
    holder = f"{first}\nexec env SOFTKFD_ROOT={root} LD_PRELOAD='{preload}' {client}"
    script = (mounts if inside else "") + holder
    with subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if json.loads(line)["op"] == "hold":
                    yield process, json.loads(line)["held"]
                    return
            raise AssertionError("it has not come to hold anything")
        finally:
            process.kill()


def until(what: Callable[[], bool], seconds: float = 100) -> None:
    end_s = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end_s, "it has not come to that"
        time.sleep(0.05)


def shown(client: Client, name: str) -> wire.SliceView:
    return client.get(f"/v1/slices/{name}", wire.SliceView)[0]


def told(client: Client) -> list[tuple[str, str]]:
    events, _ = client.get("/v1/events", wire.EventList, since="0")
    return [(e.kind, e.subject) for e in events.events if e.kind.startswith("watchdog.")]


@pytest.fixture
def new_slice(client: Client) -> Iterator[Callable[[str], None]]:
    made = []

    def make(name: str) -> None:
        client.change("PUT", f"/v1/slices/{name}", wire.SliceView, SLICE)
        made.append(name)

    yield make
    for name in made:
        client.delete(f"/v1/slices/{name}", force="true")


def test_a_process_without_the_gate_is_seen_and_ended_and_one_outside_is_never_touched(
    client: Client, home: Path, new_slice: Callable[[str], None]
) -> None:
    new_slice("alice")
    with kfd_client(home, None, "libsoftkfd.so") as (outside, _):
        with kfd_client(home, "alice", "libsoftkfd.so") as (rogue, _):
            until(lambda: shown(client, "alice").unmanaged_processes == 1)
            (share,) = shown(client, "alice").shares
            assert (share.driver_bytes, share.untracked_bytes, share.used_bytes) == (2 * GIB, 2 * GIB, 0)
            (process,) = client.get("/v1/slices/alice/processes", wire.ProcessList)[0].processes
            assert (process.host_pid, process.command, process.tracked) == (rogue.pid, "kfdclient", False)
            assert rogue.wait(100) == -signal.SIGTERM
        until(lambda: shown(client, "alice").unmanaged_processes == 0)
        assert outside.poll() is None
    assert told(client) == [("watchdog.unmanaged", "alice"), ("watchdog.ended", "alice")]


def test_a_process_behind_the_gate_is_tracked_and_left_alone(
    client: Client, home: Path, new_slice: Callable[[str], None]
) -> None:
    new_slice("bob")
    before = told(client)
    with kfd_client(home, "bob", "libamdvgpu.so", "libsoftkfd.so") as (process, held):
        until(lambda: shown(client, "bob").shares[0].driver_bytes == held)
        time.sleep(4.5)  # half as long again as the watchdog's patience
        (share,) = shown(client, "bob").shares
        assert (share.used_bytes, share.untracked_bytes, shown(client, "bob").unmanaged_processes) == (held, 0, 0)
        assert process.poll() is None
    assert told(client) == before


def test_a_ledger_that_its_guest_has_written_hides_nobody(
    client: Client, home: Path, new_slice: Callable[[str], None]
) -> None:
    """The kernel accounts 150 GiB to it, and so does its slot, under a quota of 4."""
    new_slice("mallory")
    write = f"from tests.test_guarded import forge; forge('{home}/run/slices/mallory/guest/ledger', $$, {150 * GIB})"
    before_it_takes_any = f'PYTHONPATH={ROOT} {sys.executable} -c "{write}"'
    with kfd_client(home, "mallory", "libsoftkfd.so", count=150, first=before_it_takes_any) as (rogue, _):
        assert rogue.wait(100) == -signal.SIGTERM
    assert [kind for kind, subject in told(client) if subject == "mallory"] == ["watchdog.untracked", "watchdog.ended"]


def forge(ledger: str, pid: int, used_bytes: int) -> None:
    """Give ``pid`` the first slot, with so many bytes on the slice's only GPU."""
    start_ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    namespace = Path(f"/proc/{pid}/ns/pid").stat().st_ino
    owner = pid | namespace << int(lib.AVG_OWNER_NS_SHIFT)
    with Path(ledger).open("r+b") as file:
        file.seek(lib.AVG_LEDGER_HEAD_BYTES)
        file.write(struct.pack("=QQ", owner, start_ticks))
        file.seek(lib.AVG_LEDGER_HEAD_BYTES + lib.AVG_SLOT_HEAD_BYTES)
        file.write(struct.pack("=Q", used_bytes))
        file.seek(ffi.offsetof("struct avg_ledger", "occupied"))
        file.write(struct.pack("=Q", 1))


def test_who_does_not_end_at_sigterm_is_killed(client: Client, home: Path, new_slice: Callable[[str], None]) -> None:
    new_slice("oscar")
    with kfd_client(home, "oscar", "libsoftkfd.so", first="trap '' TERM") as (stubborn, _):
        assert stubborn.wait(100) == -signal.SIGKILL
    assert told(client)[-3:] == [("watchdog.unmanaged", "oscar"), *[("watchdog.ended", "oscar")] * 2]


def test_a_whole_gpu_is_not_handed_on_while_somebody_is_on_it(client: Client, home: Path) -> None:
    whole = wire.SliceSpec(compute="whole", on=["0"])
    with kfd_client(home, None, "libsoftkfd.so") as (holder, held):
        refusal = pytest.raises(Refused, match=rf"{holder.pid} \(kfdclient\), with {held} bytes")
        with refusal:
            Client(client.socket_path, patience_s=0).change("PUT", "/v1/slices/carol", wire.SliceView, whole)
        going = threading.Timer(1.5, holder.kill)
        going.start()
        client.change("PUT", "/v1/slices/carol", wire.SliceView, whole)  # which asks again until it is clean
        assert holder.poll() == -signal.SIGKILL
    client.delete("/v1/slices/carol")
