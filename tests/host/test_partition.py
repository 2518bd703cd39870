"""The writer of current_compute_partition: what it writes, what each errno is said to mean, and who is named."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from amdvgpud.core.errors import AmdvgpuError, Conflict, HostFailure
from amdvgpud.host.partition import PartitionFiles, write_attribute
from amdvgpud.ports import KfdUser
from tests.fakes import a_gpu, in_mode

GPU = a_gpu(0)
CUT = in_mode(GPU, "CPX")


class Kernel:
    """A root with the GPU's partition files and processes of the KFD; /proc beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.device = root / "sys/bus/pci/devices" / GPU.pci_address
        self.device.mkdir(parents=True)
        for name in ("current_compute_partition", "current_memory_partition"):
            (self.device / name).write_text("before\n")
        self.processes = root / "sys/class/kfd/kfd/proc"
        self.processes.mkdir(parents=True)

    def process(self, pid: int, command: str, *files: str) -> None:
        (self.root / "proc" / str(pid)).mkdir(parents=True)
        (self.root / "proc" / str(pid) / "comm").write_text(f"{command}\n")
        for file in files:
            path = self.processes / str(pid) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("0\n")

    def files(self, number: int | None = None, **more: object) -> PartitionFiles:
        def refuse(path: Path, text: str) -> None:
            raise OSError(number, os.strerror(number or 0), str(path))

        pen = write_attribute if number is None else refuse
        return PartitionFiles(self.root, write=pen, proc=self.root / "proc", **more)  # type: ignore[arg-type]


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_the_mode_is_written_as_the_word_that_the_driver_knows(kernel: Kernel) -> None:
    files = kernel.files()
    (kernel.device / "current_compute_partition").write_text("")
    (kernel.device / "current_memory_partition").write_text("")
    files.set_compute(GPU, "CPX")
    files.request_memory(GPU, "NPS4")
    assert (kernel.device / "current_compute_partition").read_text() == "CPX"
    assert (kernel.device / "current_memory_partition").read_text() == "NPS4"


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.EINVAL, Conflict, "the driver does not allow it now (EINVAL). The GPU is in SPX/NPS1;"),
        (errno.EPERM, HostFailure, "may not be written (EPERM). Either the GPU is being reset"),
        (errno.EACCES, HostFailure, "may not be written (EACCES)"),
        (errno.EIO, HostFailure, "could not bring it up again (EIO). It may be missing"),
        (errno.EROFS, HostFailure, "/sys is read-only for this daemon (EROFS)"),
        (errno.ENOENT, HostFailure, "is not there (ENOENT): this driver does not switch this GPU"),
        (errno.ENODEV, HostFailure, "No such device"),
    ],
)
def test_each_errno_of_the_driver_has_its_meaning_said(
    kernel: Kernel, number: int, kind: type[AmdvgpuError], said: str
) -> None:
    for write in (kernel.files(number).set_compute, kernel.files(number).request_memory):
        with pytest.raises(kind) as refused:
            write(GPU, "CPX")
        assert refused.value.detail.startswith(f"{GPU.id} ({GPU.pci_address}) was not put into CPX: ")
        assert said in refused.value.detail


def test_a_file_that_is_not_there_is_no_switch(kernel: Kernel) -> None:
    (kernel.device / "current_compute_partition").unlink()
    with pytest.raises(HostFailure, match="is not there"):
        kernel.files().set_compute(GPU, "CPX")
    assert not (kernel.device / "current_compute_partition").exists(), "and none is made"


def busy(kernel: Kernel) -> str:
    with pytest.raises(Conflict) as refused:
        kernel.files(errno.EBUSY).set_compute(GPU, "CPX")
    return refused.value.detail.partition("(EBUSY). ")[2]


def test_ebusy_names_who_has_the_gpu_open_or_who_else_it_could_be(kernel: Kernel) -> None:
    assert busy(kernel).startswith("No process is seen that has it open")
    kernel.process(70, "trainer", "vram_999")
    assert busy(kernel).startswith("No process is seen that has it open, but 70 (trainer) use other GPUs")
    for pid in range(80, 90):
        kernel.process(pid, f"p{pid}", "vram_1000")
    assert busy(kernel) == "It is open in " + ", ".join(f"{p} (p{p})" for p in range(80, 88)) + " and 2 more"


@pytest.mark.parametrize(
    "file", ["vram_1000", "sdma_1000", "stats_1000/evicted_ms", "counters_1000/faults", "context_1/vram_1000"]
)
def test_a_process_has_a_gpu_open_as_soon_as_the_kfd_has_a_file_for_it(kernel: Kernel, file: str) -> None:
    kernel.process(4242, "python3", file)
    kernel.process(4243, "other", file.replace("1000", "1001"))
    files = kernel.files()
    assert files.users(GPU) == (KfdUser(4242, "python3", frozenset({1000})),)
    assert [user.pid for user in files.users(None)] == [4242, 4243]


def test_a_queue_counts_where_the_kernel_has_no_such_files(kernel: Kernel) -> None:
    kernel.process(5, "old", "queues/0/gpuid")
    (kernel.processes / "5/queues/0/gpuid").write_text("1000\n")
    assert kernel.files().users(GPU) == (KfdUser(5, "old", frozenset({1000})),)


def test_a_user_of_any_partition_is_a_user_of_the_gpu(kernel: Kernel) -> None:
    kernel.process(5, "vllm", f"vram_{CUT.partitions[3].kfd_gpu_id}")
    assert [user.pid for user in kernel.files().users(CUT)] == [5]
    assert kernel.files().users(GPU) == ()


def test_what_is_no_process_or_has_just_ended_is_passed_over(kernel: Kernel) -> None:
    kernel.process(5, "x", "vram_1000")
    (kernel.root / "proc/5/comm").unlink()
    (kernel.processes / "self").mkdir()
    (kernel.processes / "6").mkdir()
    assert kernel.files().users(GPU) == (KfdUser(5, "?", frozenset({1000})),)
    assert kernel.files(refresh=(kernel.processes / "5/vram_1000").unlink).users(GPU) == ()
    kernel.process(7, "x", "vram_1000")
    (kernel.root / "proc/7/comm").write_bytes(b"\x1b[31mred\n")
    assert kernel.files().users(GPU)[0].command == "?"


def test_a_machine_without_a_kfd_has_no_users(tmp_path: Path) -> None:
    assert PartitionFiles(tmp_path).users(None) == ()


def test_a_gpu_with_an_unknown_mode_is_named_without_one(kernel: Kernel) -> None:
    unknown = replace(GPU, compute_partition=None, memory_partition=None)
    with pytest.raises(Conflict, match="The GPU is in the present modes;"):
        kernel.files(errno.EINVAL).set_compute(unknown, "CPX")
