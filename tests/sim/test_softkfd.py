"""softkfd without ROCm: what it answers, who shares what, and how a container finds it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from amdvgpud.sim.driver import SimulatedDriver
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree

GIB = 1024**3

# Requests by hand, so that wrong ones can be made too. Prints one JSON line a statement of the test.
REQUESTS = r"""
import array, errno, fcntl, json, os, struct, sys

kfd = os.open("/dev/kfd", os.O_RDWR | os.O_CLOEXEC)
GPU = {gpu}

def ask(number, layout, *values, direction=3, fd=None):
    packed = bytearray(struct.pack(layout, *values))
    try:
        fcntl.ioctl(kfd if fd is None else fd, direction << 30 | len(packed) << 16 | ord("K") << 8 | number, packed)
    except OSError as error:
        return errno.errorcode[error.errno]
    return list(struct.unpack(layout, packed))

def queue(percentage=100, priority=7, ring_size=4096, gpu=None):
    answer = ask(2, "=4Q6I3Q2I", 0, 0, 0, 0, ring_size, gpu or GPU, 2, percentage, priority, 0, 0, 0, 0, 0, 0)
    return answer if isinstance(answer, str) else answer[9]

def update(queue, percentage=100, priority=7):
    answer = ask(7, "=Q4I", 0, queue, 4096, percentage, priority, direction=1)
    return answer if isinstance(answer, str) else "ok"

def mask(queue, bits, words):
    buffer = array.array("I", words)
    answer = ask(0x1A, "=IIQ", queue, bits, buffer.buffer_info()[0], direction=1)
    return answer if isinstance(answer, str) else "ok"

def alloc(size, flags=1, gpu=None):
    answer = ask(0x16, "=4Q2I", 0x7F0000000000, size, 0, 0, gpu or GPU, flags)
    return answer if isinstance(answer, str) else answer[2]

def free(handle):
    answer = ask(0x17, "=Q", handle, direction=1)
    return answer if isinstance(answer, str) else "ok"

def show(value):
    print(json.dumps(value), flush=True)
"""


def asked(machine: Any, body: str, **env: str) -> list[Any]:
    """What ``body``, with the functions above, shows on the first GPU of ``machine``."""
    gpu = int((machine.root / "sys/class/kfd/kfd/topology/nodes/1/gpu_id").read_text())
    script = REQUESTS.replace("{gpu}", str(gpu)) + body
    found: list[Any] = machine.run(sys.executable, "-c", script, env=env)
    return found


MakeMachine = Callable[[str], Any]


# ----------------------------------------------------------------------------------------------------------- requests


def test_memory_is_granted_until_the_gpu_is_full(machine: MakeMachine, kfdclient: Path) -> None:
    lines = machine("mi210:vram=4GiB").run(kfdclient, "--step", "1G", "--free")
    left = 4 * GIB - 64 * 1024**2  # softkfd keeps 64 MiB for page tables
    assert lines[1] == {
        "op": "gpu",
        "index": 0,
        "node": 1,
        "gpu_id": 4369,
        "minor": 128,
        "total": 4 * GIB,
        "available": left,
    }
    assert [(line["result"], line["held"], line["available"]) for line in lines if line["op"] == "alloc"] == [
        ("ok", GIB, left - GIB),
        ("ok", 2 * GIB, left - 2 * GIB),
        ("ok", 3 * GIB, left - 3 * GIB),
        ("ENOMEM", 3 * GIB, left - 3 * GIB),
    ]
    assert lines[-1] == {"op": "end", "granted": 3, "held": 0, "available": left}


def test_a_queue_and_its_mask_are_logged_with_the_gpu(machine: MakeMachine, kfdclient: Path) -> None:
    made = machine("2*mi210")
    made.run(kfdclient, "--gpu", "1", "--count", "0", "--mask", "f0000000f", "--priority", "11")
    queue, mask = made.log("CREATE_QUEUE", "SET_CU_MASK")
    assert (queue["gpu"], queue["prio"], queue["err"]) == (4642, 11, 0)
    assert (mask["node"], mask["bits"], mask["set"], mask["mask"], mask["err"]) == (2, 64, 8, "0000000f0000000f", 0)


@pytest.mark.parametrize(
    ("statement", "answer"),
    [
        ("mask(99, 32, [1])", "EFAULT"),
        ("mask(queue(), 0, [1])", "EINVAL"),
        ("mask(queue(), 76, [1, 1, 1])", "EINVAL"),
        ("mask(queue(), 32, [0])", "ok"),
        ("mask(queue(), 2048, [1] * 64)", "ok"),
        ("update(99)", "EFAULT"),
        ("update(queue(), percentage=0)", "ok"),
        ("update(queue(), percentage=101)", "EINVAL"),
        ("update(queue(), priority=16)", "EINVAL"),
        ("queue(priority=15)", 1),
        ("queue(priority=16)", "EINVAL"),
        ("queue(percentage=101)", "EINVAL"),
        ("queue(ring_size=4097)", "EINVAL"),
        ("queue(gpu=7)", "EINVAL"),
        ("ask(3, '=2I', 99, 0)", "EINVAL"),
        ("alloc(0)", "EINVAL"),
        ("alloc(4096, gpu=7)", "EINVAL"),
        ("alloc(2**63)", "ENOMEM"),
        ("alloc(2**46, flags=2)", "ENOMEM"),
        ("free(0)", "EINVAL"),
        ("free(12345)", "EINVAL"),
        ("free(alloc(4096))", "ok"),
        ("ask(0x7f, '=I', 0)", "EINVAL"),
    ],
)
def test_wrong_requests_are_answered_as_the_driver_does(machine: MakeMachine, statement: str, answer: object) -> None:
    assert asked(machine("mi210"), f"show({statement})") == [answer]


def test_a_mask_is_cut_at_1024_bits(machine: MakeMachine) -> None:
    made = machine("mi210")
    asked(made, "mask(queue(), 2048, [1] * 64)")
    [line] = made.log("SET_CU_MASK")
    assert (line["bits"], line["set"], len(line["mask"])) == (2048, 32, 256)


def test_half_a_wgp_is_refused_where_cus_come_in_pairs(machine: MakeMachine) -> None:
    assert asked(machine("rx9070xt"), "show(mask(queue(), 32, [0x7])); show(mask(queue(), 32, [0xF]))") == [
        "EINVAL",
        "ok",
    ]


def test_gtt_has_a_limit_of_its_own(machine: MakeMachine) -> None:
    made = machine("mi210:vram=1GiB")
    assert asked(made, "show([isinstance(alloc(8 << 30, flags=2), int) for _ in range(5)])") == [[True] * 4 + [False]]
    assert made.figure("sys/bus/pci/devices/0000:05:00.0/mem_info_gtt_used") == 32 * GIB
    assert made.figure("sys/bus/pci/devices/0000:05:00.0/mem_info_vram_used") == 0


def test_a_descriptor_of_another_process_is_refused(machine: MakeMachine) -> None:
    body = """
show(isinstance(alloc(4096), int))
if not (child := os.fork()):
    show(alloc(4096))
    kfd = os.open("/dev/kfd", os.O_RDWR)
    show(isinstance(alloc(4096), int))
    os._exit(0)
os.waitpid(child, 0)
show(isinstance(alloc(4096), int))
"""
    assert asked(machine("mi210"), body) == [True, "EBADF", True, True]


def test_requests_can_be_made_to_fail(machine: MakeMachine) -> None:
    made = machine("mi210")
    body = "show([queue(), mask(1, 32, [1]), alloc(4096)])"
    fail = "CREATE_QUEUE=ENOMEM,SET_CU_MASK=EBUSY,ALLOC=5"
    assert asked(made, body, SOFTKFD_FAIL=fail) == [["ENOMEM", "EBUSY", "EIO"]]
    assert [(line["op"], line["err"]) for line in made.log("CREATE_QUEUE", "SET_CU_MASK", "ALLOC")] == [
        ("CREATE_QUEUE", 12),
        ("SET_CU_MASK", 16),
        ("ALLOC", 5),
    ]


def test_a_device_can_be_denied(machine: MakeMachine, kfdclient: Path) -> None:
    lines = machine("2*mi210").run(kfdclient, "--count", "0", env={"SOFTKFD_DENY": "renderD128=EPERM"})
    assert [line["node"] for line in lines if line["op"] == "gpu"] == [2]
    lines = machine("2*mi210").run(kfdclient, env={"SOFTKFD_DENY": "kfd=EACCES"}, status=3)
    assert lines == [{"op": "open", "result": "EACCES"}]


def test_without_a_machine_the_library_does_nothing(softkfd: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", "import os; print(os.path.exists('/dev/kfd'), os.listdir('/sys/class')[0] != '')"],
        env={"LD_PRELOAD": str(softkfd), "SOFTKFD_ROOT": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (shown.stdout, shown.stderr) == (f"{Path('/dev/kfd').exists()} True\n", "")


def test_device_files_say_that_they_are_character_devices(machine: MakeMachine) -> None:
    body = """
import stat
for path in ("/dev/kfd", "/dev/dri/renderD128", "/dev/dri/card1"):
    for found in (os.stat(path), os.lstat(path), os.fstat(os.open(path, os.O_RDONLY))):
        show([stat.S_ISCHR(found.st_mode), os.major(found.st_rdev), os.minor(found.st_rdev)])
show(os.path.realpath("/sys/dev/char/226:128/device"))
"""
    assert asked(machine("mi210"), body) == [
        *[[True, 235, 0]] * 3,
        *[[True, 226, 128]] * 3,
        *[[True, 226, 1]] * 3,
        "/sys/devices/pci0000:00/0000:05:00.0",
    ]


def test_the_event_stream_gives_the_events_of_its_mask_from_the_ask_on(machine: MakeMachine) -> None:
    """Lines as of kfd_smi_events.c: the event's number in hex, then its text."""
    made = machine("2*mi210")
    body = """
import select
show(ask(0x1F, "=II", 1, 0))
stream = ask(0x1F, "=II", GPU, 0)[1]
os.write(stream, struct.pack("=Q", 1 << 2 | 1 << 3))
driver = open(os.environ["SOFTKFD_ROOT"] + f"/smi/{GPU}", "a")
driver.write("1 77:python3\\n3 1 ring timeout\\n")
driver.flush()
select.select([stream], [], [], 10)
show(os.read(stream, 4096).decode())
show(select.select([stream], [], [], 0.1)[0])
"""
    assert asked(made, body) == ["EINVAL", "3 1 ring timeout\n", []]


# ---------------------------------------------------------------------------------------------------- many processes


def test_memory_of_a_killed_process_comes_back(machine: MakeMachine, kfdclient: Path) -> None:
    made = machine("mi210:vram=4GiB")
    holder = subprocess.Popen(
        [kfdclient, "--step", "3G", "--count", "1", "--hold"],
        env=made.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        while '"hold"' not in holder.stdout.readline():
            assert holder.poll() is None
        assert made.figure("sys/bus/pci/devices/0000:05:00.0/mem_info_vram_used") == 3 * GIB
        assert made.figure(f"sys/class/kfd/kfd/proc/{holder.pid}/vram_4369") == 3 * GIB
        lines = made.run(kfdclient, "--step", "2G", status=1)
        assert [line["result"] for line in lines if line["op"] == "alloc"] == ["ENOMEM"]
        holder.send_signal(signal.SIGKILL)
    lines = made.run(kfdclient, "--step", "2G", "--count", "1", "--free")
    assert [line["result"] for line in lines if line["op"] == "alloc"] == ["ok"]
    subprocess.run(["/bin/true"], env=made.environment(SOFTKFD_REAP="1"), check=True)
    assert list((made.root / "sys/class/kfd/kfd/proc").iterdir()) == []
    assert made.figure("sys/bus/pci/devices/0000:05:00.0/mem_info_vram_used") == 0


def test_kfd_proc_shows_a_process_from_its_first_open_with_the_driver_s_files(machine: MakeMachine) -> None:
    """cu_occupancy is there only where the hardware counts it (gfx9)."""
    made = machine("mi210,rx7900xtx")
    body = """
KFD_PROC = "/sys/class/kfd/kfd/proc"
show(os.listdir(KFD_PROC) == [str(os.getpid())])
os.close(kfd)
folder = f"{KFD_PROC}/{os.getpid()}"
show(sorted(os.path.relpath(os.path.join(d, f), folder) for d, _, files in os.walk(folder) for f in files))
"""
    ids = [int(line.split()[0].split("=")[1]) for line in (made.root / "gpus.conf").read_text().splitlines()]
    per_gpu = [
        "sdma_{}",
        "stats_{}/evicted_ms",
        "vram_{}",
        *(f"counters_{{}}/{c}" for c in ("faults", "page_in", "page_out")),
    ]
    files = [name.format(gpu_id) for gpu_id in ids for name in per_gpu]
    assert asked(made, body) == [True, sorted(["pasid", f"stats_{ids[0]}/cu_occupancy", *files])]


def test_kfd_proc_does_not_count_what_came_by_a_render_node(machine: MakeMachine) -> None:
    made = machine("mi210")
    body = """
gem = bytearray(struct.pack("=4Q", 1 << 30, 4096, 4, 0))
fcntl.ioctl(os.open("/dev/dri/renderD128", os.O_RDWR), 3 << 30 | len(gem) << 16 | ord("d") << 8 | 0x40, gem)
alloc(1 << 20)
show(int(open(f"/sys/class/kfd/kfd/proc/{os.getpid()}/vram_4369").read()))
show(int(open("/sys/bus/pci/devices/0000:05:00.0/mem_info_vram_used").read()))
"""
    assert asked(made, body) == [1 << 20, (1 << 30) + (1 << 20)]


def test_partitions_have_memory_of_their_own_and_figures_of_the_whole_gpu(
    machine: MakeMachine, kfdclient: Path
) -> None:
    made = machine("mi300x-cpx:vram=8GiB")
    lines = made.run(kfdclient, "--gpu", "5", "--step", "256M")
    assert [line["total"] for line in lines if line["op"] == "gpu"] == [GIB] * 8
    assert lines[-1]["granted"] == 3
    nodes = "sys/class/kfd/kfd/topology/nodes"
    assert [made.figure(f"{nodes}/{n}/mem_banks/0/used_memory") for n in (1, 6, 8)] == [768 * 1024**2] * 3


def test_a_table_that_makes_no_sense_refuses_memory_and_crashes_nobody(machine: MakeMachine) -> None:
    made = machine("mi210")
    (made.root / "state").write_bytes(b"\xff" * 4096 + bytes((8 << 20) - 4096))
    assert asked(made, "show([alloc(4096), free(1)])") == [["ENOMEM", "EINVAL"]]


def test_many_processes_at_once_never_get_more_than_there_is(machine: MakeMachine, kfdclient: Path) -> None:
    made = machine("mi210:vram=1GiB")
    command = [str(kfdclient), "--step", "16M", "--hold"]
    running = [
        subprocess.Popen(command, env=made.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    held = []
    for process in running:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        held.append(next(int(line.split(":")[-1].rstrip("}\n")) for line in lines if '"hold"' in line))
    assert sum(held) == GIB - 64 * 1024**2
    for process in running:
        process.communicate("\n")


# ------------------------------------------------------------------------------------------------------- containers

CONTAINER = Path(__file__).with_name("container.sh")


def in_container(made: Any, kfdclient: Path, folder: Path, minors: str, *command: str) -> subprocess.Popen[str]:
    """``command`` in a container with the GPUs of ``minors``; ``/tmp/client`` is kfdclient."""
    root = folder / f"container-{minors.replace(' ', '-')}"
    root.mkdir()
    places = [str(p) for p in (CONTAINER, root, made.root, made.softkfd, kfdclient)]
    return subprocess.Popen(["sh", *places, minors, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.root
def test_a_container_has_the_gpus_that_are_mounted_with_an_empty_environment_and_another_user(
    machine: MakeMachine, kfdclient: Path, tmpfs: Path
) -> None:
    made = machine("3*mi210")
    with in_container(made, kfdclient, tmpfs, "130", "/tmp/client", "--step", "16G", "--free") as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert '"op":"gpu","index":0,"node":3' in out
    assert out.count('"op":"gpu"') == 1
    assert out.count('"result":"ENOMEM"') == 1


@pytest.mark.root
def test_a_render_node_that_is_not_mounted_does_not_exist(machine: MakeMachine, kfdclient: Path, tmpfs: Path) -> None:
    script = "ls /dev/dri; cat /dev/dri/renderD129 || cat /sys/class/drm/renderD129/dev"
    with in_container(machine("2*mi210"), kfdclient, tmpfs, "128", "/bin/sh", "-c", f"{script} 2>&1") as process:
        out, _ = process.communicate(timeout=60)
    assert out.splitlines()[0] == "renderD128"
    assert out.splitlines()[-1] == "226:129"


@pytest.mark.root
def test_containers_and_host_share_the_memory_of_a_gpu(machine: MakeMachine, kfdclient: Path, tmpfs: Path) -> None:
    made = machine("mi210:vram=4GiB")
    hold = ("/tmp/client", "--step", "2G", "--count", "1", "--hold")
    with in_container(made, kfdclient, tmpfs, "128", *hold) as holder:
        assert holder.stdout is not None
        while '"hold"' not in (line := holder.stdout.readline()):
            assert line, "the container ended"
        refused = made.run(kfdclient, "--step", "3G", status=1)
        assert [line["result"] for line in refused if line["op"] == "alloc"] == ["ENOMEM"]
        # The program has pid 1 in there: it is told by its lock, not by its number.
        # (The one that was refused is still shown; nobody has swept since.)
        assert len(list((made.root / "sys/class/kfd/kfd/proc").iterdir())) == 1
        [token] = [p for p in (made.root / "procs").iterdir() if p.read_text() == "0\n4369\n"]
        # The program, not unshare: having changed its user, it does not die with its parent.
        os.kill(int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()), signal.SIGKILL)
        with token.open() as lock:  # a killed process holds its locks for a moment
            fcntl.flock(lock, fcntl.LOCK_EX)
    granted = made.run(kfdclient, "--step", "3G", "--count", "1")
    assert [line["result"] for line in granted if line["op"] == "alloc"] == ["ok"]


@pytest.mark.root
def test_the_driver_shows_a_process_of_a_container_by_its_pid_here_for_as_long_as_it_lives(
    machine: MakeMachine, kfdclient: Path, tmpfs: Path
) -> None:
    made = machine("2*mi210")
    driver = SimulatedDriver(parse_simulation("2*mi210"), made.root)
    proc = made.root / "sys/class/kfd/kfd/proc"
    hold = ("/tmp/client", "--step", "2G", "--count", "1", "--queue", "--hold")
    with in_container(made, kfdclient, tmpfs, "129", *hold) as holder:
        assert holder.stdout is not None
        while '"hold"' not in (line := holder.stdout.readline()):
            assert line, "the container ended"
        assert list(proc.iterdir()) == []
        for _ in range(2):
            driver.refresh_processes()
        pid = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text())
        assert [folder.name for folder in proc.iterdir()] == [str(pid)]
        assert made.figure(f"sys/class/kfd/kfd/proc/{pid}/vram_4642") == 2 * GIB
        assert made.figure(f"sys/class/kfd/kfd/proc/{pid}/queues/1/gpuid") == 4642
        assert made.figure(f"sys/class/kfd/kfd/proc/{pid}/queues/1/type") == 0
        assert not (proc / f"{pid}/vram_4369").exists()
        [token] = (made.root / "procs").iterdir()
        os.kill(pid, signal.SIGKILL)
        with token.open() as lock:  # a killed process holds its locks for a moment
            fcntl.flock(lock, fcntl.LOCK_EX)
    driver.refresh_processes()
    assert list(proc.iterdir()) == []


def test_a_machine_built_under_a_narrow_umask_serves_everybody(tmpfs: Path) -> None:
    before = os.umask(0o077)
    try:
        build_tree(parse_simulation("mi210"), tmpfs / "machine")
    finally:
        os.umask(before)
    shut = [
        path
        for path in (tmpfs / "machine").rglob("*")
        if not path.is_symlink() and path.stat().st_mode & 0o044 != 0o044
    ]
    assert shut == []
