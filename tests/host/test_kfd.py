"""The kernel's figures, read from a made tree: nested contexts, files that vanish, clients that are shared."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from amdvgpud.core.model import Inventory, SliceName
from amdvgpud.core.truth import Belonging, KernelPicture, KernelProcess
from amdvgpud.host.kfd import KernelFigures
from amdvgpud.host.procs import SliceMounts
from amdvgpud.host.sysfs import SysfsReader
from tests.fakes import a_gpu

MIB = 1 << 20
ALICE = Belonging((SliceName("alice"),))


@dataclass
class Machine:
    """sys/ and proc/ of a machine with processes that are made up, and a slice named alice."""

    root: Path

    def __post_init__(self) -> None:
        self.slices = self.root / "run/slices"
        (self.slices / "alice/guest").mkdir(parents=True)
        self.kfd = self.root / "sys/class/kfd/kfd/proc"
        self.kfd.mkdir(parents=True)
        (self.root / "proc").mkdir()

    def figures(self, *, sdma: bool = False, own_pids: frozenset[int] = frozenset()) -> KernelFigures:
        return KernelFigures(
            self.slices,
            root=self.root,
            proc=self.root / "proc",
            vram_used_bytes=SysfsReader(self.root).vram_used_bytes,
            now_s=lambda: 5.0,
            sdma=sdma,
            own_pids=lambda: own_pids,
        )

    def run(self, pid: int, *, inside: bool = False, start_ticks: int = 77, comm: str = "python3") -> None:
        """A process of /proc; ``inside``: with alice's files mounted, as pid 7 of a namespace of its own."""
        here = self.root / "proc" / str(pid)
        (here / "fd").mkdir(parents=True, exist_ok=True)
        (here / "fdinfo").mkdir(exist_ok=True)
        fields = " ".join(["S", *map(str, range(4, 22)), str(start_ticks), "23"])
        (here / "stat").write_text(f"{pid} ({comm}) {fields}\n")
        (here / "comm").write_text(f"{comm}\n")
        (here / "status").write_text(f"Name:\t{comm}\nNSpid:\t{pid}\t7\n" if inside else f"NSpid:\t{pid}\n")
        at = SliceMounts.look(self.slices)
        (here / "mountinfo").write_text(
            "20 1 0:5 / / rw - ext4 /dev/vda rw\n"
            + f"99 20 {at.file_system.decode()} {at.path.decode()}/alice/guest /run/amdvgpu/alice ro - tmpfs x rw\n"
            * inside
        )

    def open_kfd(self, pid: int, files: dict[str, int]) -> None:
        for name, value in files.items():
            path = self.kfd / str(pid) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")

    def open_drm(self, pid: int, number: int, text: str, link: str = "/dev/dri/renderD128") -> None:
        (self.root / f"proc/{pid}/fd/{number}").symlink_to(link)
        (self.root / f"proc/{pid}/fdinfo/{number}").write_text(f"pos:\t0\nflags:\t02\n{text}")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def fdinfo(client: int, kib: int, *, shared: int = 0, key: str = "resident", pdev: str = "0000:11:00.0") -> str:
    return (
        f"drm-driver:\tamdgpu\ndrm-client-id:\t{client}\ndrm-pdev:\t{pdev}\ndrm-total-vram:\t99999 KiB\n"
        f"drm-shared-vram:\t{shared} KiB\ndrm-{key}-vram:\t{kib} KiB\ndrm-engine-gfx:\t5 ns\n"
    )


def test_contexts_of_a_process_are_summed_and_only_a_slice_s_process_is_asked_for_the_dear_files(
    machine: Machine,
) -> None:
    files = {
        "vram_1000": 3 * MIB,
        "vram_1001": 0,
        "sdma_1000": 44,
        "stats_1000/evicted_ms": 5,
        "stats_1000/cu_occupancy": 12,
        "queues/1/type": 0,
        "queues/1/gpuid": 1000,
        "queues/2/type": 1,  # a copy engine's: no waves, nothing to save
        "queues/2/gpuid": 1000,
        "queues/3/type": 0,
        "queues/3/gpuid": 1001,
        "queues/4/gpuid": 1000,  # it ends while we look
        "context_1/queues/1/type": 0,
        "context_1/queues/1/gpuid": 1000,
        "context_1/vram_1000": 2 * MIB,
        "context_1/stats_1000/evicted_ms": 7,
        "context_1/context_2/vram_1001": MIB,
    }
    for pid, inside in ((50, True), (60, False)):
        machine.run(pid, inside=inside)
        machine.open_kfd(pid, files)
        (machine.root / f"proc/{pid}/cgroup").write_text("1:pids:/elsewhere\n0::/docker/0123\n")
    vram = {1000: 5 * MIB, 1001: MIB}
    assert machine.figures().read(Inventory()) == KernelPicture(
        5.0,
        (
            KernelProcess(
                50,
                77,
                7,
                0,
                "python3",
                ALICE,
                vram,
                cu_occupancy={1000: 12},
                evicted_ms={1000: 12},
                cgroup="/docker/0123",
                compute_queues={1000: 2, 1001: 1},
            ),
            KernelProcess(60, 77, 60, 0, "python3", Belonging(), vram),
        ),
    )
    (dear, _) = machine.figures(sdma=True).read(Inventory()).processes or ()
    assert dear.sdma_us == {1000: 44}


def test_the_daemons_own_children_use_nothing(machine: Machine) -> None:
    for pid in (50, 60):
        machine.run(pid)
        machine.open_kfd(pid, {"vram_1000": 0})
    picture = machine.figures(own_pids=frozenset({50})).read(Inventory())
    assert [process.pid for process in picture.processes or ()] == [60]


def test_what_cannot_be_read_is_absent_and_not_zero(machine: Machine) -> None:
    machine.run(50, inside=True)
    machine.open_kfd(50, {"vram_1000": MIB})
    (machine.kfd / "50/vram_1001").write_text("many\n")
    (machine.kfd / "50/vram_1002").mkdir()
    (machine.kfd / "50/stats_1000").mkdir()  # gfx11: no cu_occupancy in it
    (process,) = machine.figures().read(Inventory()).processes or ()
    assert (process.vram_bytes, process.cu_occupancy, process.evicted_ms) == ({1000: MIB}, {}, {})


def test_a_client_counts_once_however_many_descriptors_and_processes_have_it(machine: Machine) -> None:
    for pid in (50, 51):
        machine.run(pid, inside=True)
    machine.open_drm(50, 3, fdinfo(8, 1024))
    machine.open_drm(50, 4, fdinfo(8, 1024))
    machine.open_drm(50, 5, fdinfo(9, 512, shared=128))
    machine.open_drm(50, 6, fdinfo(9, 256, pdev="0000:12:00.0", key="memory"))  # other GPU, and an older kernel's name
    machine.open_drm(50, 7, fdinfo(10, 4096), link="/srv/dump")
    machine.open_drm(50, 8, fdinfo(11, 4096).replace("amdgpu", "i915"))
    machine.open_drm(50, 9, "drm-driver:\tamdgpu\ndrm-client-id:\t12\n")
    machine.open_drm(51, 3, fdinfo(8, 1024))  # passed on by 50
    machine.open_drm(51, 4, fdinfo(13, 64))
    found = {p.pid: p.drm_bytes for p in machine.figures().read(Inventory()).processes or ()}
    assert found == {
        50: {"0000:11:00.0": (1024 + 512 - 128) << 10, "0000:12:00.0": 256 << 10},
        51: {"0000:11:00.0": 64 << 10},
    }


def test_a_process_of_no_slice_that_only_draws_is_left_alone(machine: Machine) -> None:
    machine.run(50)
    machine.open_drm(50, 3, fdinfo(8, 1024))
    assert machine.figures().read(Inventory()).processes == ()


def test_who_entered_a_slice_after_the_first_look_is_found_and_who_has_its_pid_next_is_not_taken_for_it(
    machine: Machine,
) -> None:
    figures = machine.figures()

    def seen() -> list[tuple[int, int, tuple[str, ...]]]:
        found = figures.read(Inventory()).processes or ()
        return [(p.pid, p.start_ticks, p.belonging.slices) for p in found]

    machine.run(50)
    machine.open_kfd(50, {"vram_1000": MIB})
    assert seen() == [(50, 77, ())]
    machine.run(50, inside=True)
    assert seen() == [(50, 77, ("alice",))]
    machine.run(50, start_ticks=99)
    assert seen() == [(50, 99, ())]
    machine.run(50, start_ticks=100, inside=True)
    assert seen() == [(50, 100, ("alice",))]
    # Alice's directory is another one of the same name: the mount in the process is listed as deleted from now on.
    machine.run(50, start_ticks=100)
    (machine.slices / "alice/guest").rename(machine.slices / "alice/former")
    (machine.slices / "alice/guest").mkdir()
    assert seen() == [(50, 100, ())]


def test_mounts_are_not_read_again_while_the_process_is_the_same(machine: Machine) -> None:
    figures = machine.figures()
    machine.run(50, inside=True)
    machine.open_kfd(50, {"vram_1000": MIB})
    first = figures.read(Inventory())
    (machine.root / "proc/50/mountinfo").unlink()
    assert figures.read(Inventory()) == first


def test_a_process_that_the_kfd_still_clears_up_after_is_listed(machine: Machine) -> None:
    machine.open_kfd(50, {"vram_1000": MIB})
    assert machine.figures().read(Inventory()).processes == (KernelProcess(50, 0, 50, vram_bytes={1000: MIB}),)


def test_without_the_kernel_s_list_nobody_knows_and_the_totals_are_read_all_the_same(machine: Machine) -> None:
    shutil.rmtree(machine.root / "sys")
    gpus = machine.root / "sys/bus/pci/devices/0000:11:00.0"
    gpus.mkdir(parents=True)
    (gpus / "mem_info_vram_used").write_text("4096\n")
    picture = machine.figures().read(Inventory((a_gpu(0), a_gpu(1))))
    assert (picture.processes, picture.vram_used_bytes) == (None, {a_gpu(0).id: 4096})
    assert len(picture.reasons) == 1
    assert machine.figures().read(Inventory()).reasons == ()


def test_from_a_pid_namespace_of_its_own_the_real_machine_s_list_is_not_believed(machine: Machine) -> None:
    (machine.root / "proc/self/ns").mkdir(parents=True)
    (machine.root / "proc/self/ns/pid").symlink_to("pid:[4026532001]")
    figures = KernelFigures(machine.slices, root=Path("/"), proc=machine.root / "proc", now_s=lambda: 5.0)
    picture = figures.read(Inventory())
    assert picture.processes is None
    assert "hostPID" in picture.reasons[0]


def test_files_that_vanish_while_they_are_read_are_no_error(machine: Machine) -> None:
    """A thread makes and removes processes all the while."""
    stop = threading.Event()
    machine.run(40, inside=True)
    machine.open_kfd(40, {"vram_1000": MIB, "context_1/vram_1000": MIB})

    def churn() -> None:
        while not stop.is_set():
            for pid in (50, 51, 52):
                machine.run(pid, inside=True)
                machine.open_kfd(pid, {"vram_1000": MIB, "context_1/vram_1000": MIB, "stats_1000/evicted_ms": 1})
                machine.open_drm(pid, 3, fdinfo(pid, 1024))
            for pid in (50, 51, 52):
                shutil.rmtree(machine.kfd / str(pid))
                shutil.rmtree(machine.root / "proc" / str(pid))

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        figures = machine.figures()
        for _ in range(150):
            found = {p.pid: p for p in figures.read(Inventory()).processes or ()}
            assert found[40].vram_bytes == {1000: 2 * MIB}
            assert set(found) <= {40, 50, 51, 52}
            assert all(sum(p.vram_bytes.values()) <= 2 * MIB for p in found.values())
    finally:
        stop.set()
        thread.join()


def test_processes_that_do_not_show_what_they_have_open_are_counted_and_told_of(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without CAP_SYS_PTRACE: /proc lists their descriptors, and says nothing of them."""
    for pid in (50, 51, 60):
        machine.run(pid, inside=pid != 60)
        machine.open_kfd(pid, {"vram_1000": MIB})
        machine.open_drm(pid, 3, fdinfo(pid, 1024))
    assert machine.figures().read(Inventory()).reasons == ()
    real = os.readlink

    def denied(path: str | Path, *, dir_fd: int | None = None) -> str:
        if str(path).startswith("fd/"):
            raise PermissionError(13, "Permission denied")
        return str(real(path, dir_fd=dir_fd))

    monkeypatch.setattr(os, "readlink", denied)
    (reason,) = machine.figures().read(Inventory()).reasons
    assert reason.startswith("2 processes of slices do not show this daemon what they have open")


def test_who_does_not_even_list_its_descriptors_is_counted_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without CAP_DAC_OVERRIDE: the folder ``fd`` of another user's process cannot be opened."""
    for pid in (50, 51, 60):
        machine.run(pid, inside=pid != 60)
        machine.open_kfd(pid, {"vram_1000": MIB})
    (machine.root / "proc/51/fd").rmdir()  # it has ended
    real = os.open

    def denied(path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if str(path) == "fd" and (Path(f"/proc/self/fd/{dir_fd}").readlink() / "fd").exists():
            raise PermissionError(13, "Permission denied")
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", denied)
    (reason,) = machine.figures().read(Inventory()).reasons
    assert reason.startswith("1 processes of slices do not show this daemon what they have open")


def test_a_look_leaves_no_descriptor_open(machine: Machine) -> None:
    machine.run(50, inside=True)
    machine.open_kfd(50, {"vram_1000": MIB, "context_1/vram_1000": MIB})
    with contextlib.suppress(OSError):
        machine.open_drm(50, 3, fdinfo(8, 1024))
    figures = machine.figures()
    figures.read(Inventory())
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    figures.read(Inventory())
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_what_is_counted_for_a_cgroup_is_told_by_gpu_and_only_of_cgroups_that_are_asked_for(machine: Machine) -> None:
    gpus = (a_gpu(0), a_gpu(1))
    regions = [f"drm/{gpu.pci_address}/vram" for gpu in gpus]
    counted = {"/a": {regions[0]: 7, "drm/0000:ff:00.0/vram": 9}, "/b": {}, "/c": {regions[1]: 5}}
    figures = KernelFigures(
        machine.slices, root=machine.root, now_s=lambda: 5.0, dmem_bytes=lambda cgroup: counted[cgroup]
    )
    assert figures.read(Inventory(gpus), {"/a", "/b"}).dmem_bytes == {"/a": {gpus[0].id: 7}}
    assert figures.read(Inventory(gpus)).dmem_bytes == {}
