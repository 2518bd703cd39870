"""The slices' files: made whole, kept up to date in place, read as hostile input, cleared of the dead."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import mmap
import os
import select
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from amdvgpud._abi import ffi, lib
from amdvgpud.core.cumask import layout_hash
from amdvgpud.core.errors import HostFailure, NotFound
from amdvgpud.core.model import (
    Compute,
    ComputePolicy,
    CuLayout,
    CuSet,
    Gpu,
    GpuId,
    GpuUsage,
    Inventory,
    Partition,
    PartitionId,
    Priority,
    ProcessUsage,
    Request,
    Share,
    Slice,
    Usage,
    slice_name,
)
from amdvgpud.host.ledger import LedgerFiles, write_slice
from amdvgpud.host.living import Processes, read_processes
from amdvgpud.host.procs import start_ticks

GIB = 1 << 30
ALICE = slice_name("alice")
BOB = slice_name("bob")


def a_partition(index: int, *, vram_bytes: int = 16 * GIB) -> Partition:
    return Partition(
        id=PartitionId(f"GPU-{index:016x}/0"),
        gpu=GpuId(f"GPU-{index:016x}"),
        index=0,
        kfd_node=index + 1,
        kfd_gpu_id=1000 + index,
        render_minor=128 + index,
        vram_bytes=vram_bytes,
        layout=LAYOUT,
        gfx_target="gfx942",
        unique_id=index + 1,
    )


def an_inventory(count: int = 2) -> Inventory:
    partitions = [a_partition(i) for i in range(count)]
    return Inventory(
        tuple(
            Gpu(
                id=p.gpu,
                index=i,
                pci_address=f"0000:0{i}:00.0",
                unique_id=p.unique_id,
                smi_uuid=None,
                device_id=0x74A1,
                revision=0,
                product_name="simulated",
                gfx_target=p.gfx_target,
                vram_bytes=p.vram_bytes,
                partitions=(p,),
            )
            for i, p in enumerate(partitions)
        )
    )


QUARTER = CuSet(tuple(range(76)))
LAYOUT = CuLayout(8, 4, 1, (10, 9, 10, 9) * 8, wgp=False)


def a_share(index: int = 0, vram_bytes: int = 4 * GIB, cus: CuSet | None = QUARTER) -> Share:
    count = len(cus) if cus else 304
    where = PartitionId(f"GPU-{index:016x}/0")
    return Share(where, vram_bytes, cus, False, count, count, count, layout_hash(LAYOUT))


def a_slice(*shares: Share, name: str = "alice", owner_uid: int = 0) -> Slice:
    request = Request(slice_name(name), Compute(ComputePolicy.BALANCED, percent=25), 4 * GIB, len(shares) or 1)
    return Slice(slice_name(name), request, shares or (a_share(),), 0.0, 1, owner_uid)


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A tree with the memory banks of KFD nodes 1 and 2, as the kernel prints them."""
    for node in (1, 2):
        bank = tmp_path / f"root/sys/devices/virtual/kfd/kfd/topology/nodes/{node}/mem_banks/0"
        bank.mkdir(parents=True)
        (bank / "properties").write_text(
            f"heap_type 1\nsize_in_bytes {16 * GIB}\nflags 0\nwidth 8192\nmem_clk_max 1300\n"
        )
    return tmp_path / "root"


@pytest.fixture
def files(tmp_path: Path, sysfs: Path) -> Iterator[LedgerFiles]:
    made = LedgerFiles(tmp_path / "run", sysfs_root=sysfs, tmpfs_bytes=4 << 20)
    made.prepare()
    yield made
    if made.slices.is_mount():
        subprocess.run(["umount", "--lazy", str(made.slices)], check=True)


def policy_of(guest: Path) -> ffi.CData:
    return ffi.from_buffer("struct avg_policy[]", (guest / "policy").read_bytes())[0]


class Slots:
    """The guest's side of a ledger, as a gate would write it."""

    def __init__(self, path: Path, gpu_count: int = 1) -> None:
        self._fd = os.open(path, os.O_RDWR)
        self._map = mmap.mmap(self._fd, lib.avg_ledger_bytes(gpu_count))
        self._stride = lib.avg_slot_bytes(gpu_count)

    def put(self, offset: int, *words: int) -> None:
        for i, word in enumerate(words):
            self._map[offset + 8 * i : offset + 8 * i + 8] = word.to_bytes(8, "little")

    def claim(self, slot: int, pid: int, namespace: int, start_ticks: int, used: int = 0, gpu: int = 0) -> None:
        at = lib.AVG_LEDGER_HEAD_BYTES + slot * self._stride
        self.put(at, namespace << 32 | 1 << lib.AVG_OWNER_GEN_SHIFT | pid, start_ticks)
        self.put(at + lib.AVG_SLOT_HEAD_BYTES + gpu * lib.AVG_CELL_BYTES, used)

    def cell(self, slot: int, *words: int, gpu: int = 0) -> None:
        at = lib.AVG_LEDGER_HEAD_BYTES + slot * self._stride + lib.AVG_SLOT_HEAD_BYTES + gpu * lib.AVG_CELL_BYTES
        self.put(at, *words)

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)


def own_identity() -> tuple[int, int, int]:
    """(pid, pid namespace, start ticks) of this very process."""
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return os.getpid(), namespace, start


# ---------------------------------------------------------------------------------------------------------- writing


def test_a_slice_has_its_files_with_modes_that_no_umask_changes(files: LedgerFiles, sysfs: Path) -> None:
    before = os.umask(0o077)
    try:
        LedgerFiles(files.run_dir, sysfs_root=sysfs, tmpfs_bytes=4 << 20).prepare()
        files.write(a_slice(a_share(0), a_share(1), owner_uid=1000), an_inventory())
    finally:
        os.umask(before)
    home = files.slices / "alice"
    paths = [files.run_dir, files.slices, home, home / "guest", *sorted((home / "guest").iterdir())]
    assert {p.name: stat.S_IMODE(p.stat().st_mode) for p in paths} == {
        "run": 0o711,
        "slices": 0o711,
        "alice": 0o710 if os.geteuid() == 0 else 0o700,  # the group's bits show the mask of the owner's entry
        "guest": 0o755,
        "ledger": 0o666,
        "mem_banks-1000": 0o444,
        "mem_banks-1001": 0o444,
        "policy": 0o444,
        "slice.json": 0o444,
    }
    assert home.stat().st_uid == os.geteuid()


@pytest.mark.root
def test_the_owner_passes_through_the_slices_folder_changes_nothing_there_and_nobody_else_gets_in(
    files: LedgerFiles, tmp_path: Path
) -> None:
    files.write(a_slice(owner_uid=1000), an_inventory())
    for parent in [tmp_path, *tmp_path.parents]:
        parent.chmod(parent.stat().st_mode | 0o011)
    home = files.slices / "alice"
    tries = f"cat {home}/guest/slice.json >/dev/null && echo in; ls {home}; ln -s x {home}/y; mv {home}/guest {home}/z"

    def said(uid: int) -> str:
        command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "sh", "-c", tries]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    assert (said(1000), said(1001)) == ("in\n", "")
    assert [p.name for p in home.iterdir()] == ["guest"]


def test_the_policy_says_what_the_slice_has(files: LedgerFiles) -> None:
    files.write(a_slice(a_share(0), a_share(1, 32 * GIB, None)), an_inventory())
    policy = policy_of(files.slices / "alice/guest")
    assert (policy.magic, policy.version, policy.bytes) == (lib.AVG_POLICY_MAGIC, 1, 4096)
    assert (policy.gpu_count, policy.sequence, ffi.string(policy.name)) == (2, 0, b"alice")
    texts = b"0:0-75", b"GPU-0000000000000001,GPU-0000000000000002"
    assert policy.cu_mask_env_hash == lib.avg_text_hash(texts[0], len(texts[0]))
    assert policy.visible_env_hash == lib.avg_text_hash(texts[1], len(texts[1]))
    entries = [
        (g.kfd_gpu_id, g.kfd_node, g.vram_bytes, g.physical_bytes, g.cu_count, g.xcc_count, g.flags, g.priority)
        for g in (policy.gpu[0], policy.gpu[1])
    ]
    assert entries == [
        (1000, 1, 4 * GIB, 16 * GIB, 304, 8, lib.AVG_GPU_MASKED, 7),
        (1001, 2, 32 * GIB, 16 * GIB, 304, 8, 0, 7),
    ]
    assert list(policy.gpu[0].cu_mask) == [(1 << 64) - 1, (1 << 12) - 1] + [0] * 14
    assert list(policy.gpu[1].cu_mask) == [0] * 16


@pytest.mark.parametrize(
    ("policy", "priority", "ceiling"),
    [
        (ComputePolicy.BALANCED, Priority.LOW, 3),
        (ComputePolicy.BALANCED, Priority.NORMAL, 7),
        (ComputePolicy.SHARED, Priority.HIGH, 11),
        (ComputePolicy.WHOLE, Priority.NORMAL, 15),  # nobody beside it to be protected from it
        (ComputePolicy.WHOLE, Priority.LOW, 3),
    ],
)
def test_a_priority_is_a_ceiling_for_queues(
    files: LedgerFiles, policy: ComputePolicy, priority: Priority, ceiling: int
) -> None:
    item = a_slice()
    compute = Compute(policy, percent=None if policy is ComputePolicy.WHOLE else 25)
    files.write(replace(item, request=replace(item.request, compute=compute, priority=priority)), an_inventory())
    assert policy_of(files.slices / "alice/guest").gpu[0].priority == ceiling


def test_a_slice_that_may_oversubscribe_is_marked_and_shown_its_whole_quota(files: LedgerFiles) -> None:
    item = a_slice(a_share(0, 32 * GIB))
    files.write(replace(item, request=replace(item.request, oversubscribe=True)), an_inventory())
    guest = files.slices / "alice/guest"
    assert policy_of(guest).gpu[0].flags == lib.AVG_GPU_MASKED | lib.AVG_GPU_OVERSUBSCRIBE
    assert f"size_in_bytes {32 * GIB}\n" in (guest / "mem_banks-1000").read_text()
    told = json.loads((guest / "slice.json").read_text())
    assert (told["priority"], told["oversubscribe"]) == ("normal", True)


def test_the_memory_bank_shows_the_quota_clamped_to_the_gpu(files: LedgerFiles) -> None:
    files.write(a_slice(a_share(0), a_share(1, 32 * GIB)), an_inventory())
    guest = files.slices / "alice/guest"
    text = "heap_type 1\nsize_in_bytes {}\nflags 0\nwidth 8192\nmem_clk_max 1300\n"
    assert (guest / "mem_banks-1000").read_text() == text.format(4 * GIB)
    assert (guest / "mem_banks-1001").read_text() == text.format(16 * GIB)


def test_a_resize_happens_in_the_very_inodes_that_containers_have_mounted(files: LedgerFiles) -> None:
    files.write(a_slice(a_share(0, 10 * GIB)), an_inventory())
    guest = files.slices / "alice/guest"
    names = ("policy", "ledger", "mem_banks-1000")
    inodes = [(guest / n).stat().st_ino for n in names]
    slots = Slots(guest / "ledger")
    slots.claim(3, *own_identity(), used=GIB)
    with (guest / "policy").open("rb") as mounted:
        files.write(a_slice(a_share(0, 2 * GIB)), an_inventory())
        assert ffi.from_buffer("struct avg_policy[]", mounted.read())[0].gpu[0].vram_bytes == 2 * GIB
    assert [(guest / n).stat().st_ino for n in names] == inodes
    assert (guest / "mem_banks-1000").read_text().splitlines()[1] == f"size_in_bytes {2 * GIB}"
    assert json.loads((guest / "slice.json").read_text())["gpus"][0]["vram_bytes"] == 2 * GIB
    assert files.usage(ALICE).used_bytes(1000) == GIB
    assert policy_of(guest).sequence == 0  # a quota is one store, whole by itself
    slots.close()


@pytest.mark.root
def test_root_without_any_capability_writes_its_files_anew(files: LedgerFiles) -> None:
    """As in a pod: the files are root's and nobody may write them, and without CAP_DAC_OVERRIDE that holds for root."""
    inventory = an_inventory()
    files.write(a_slice(a_share()), inventory)
    policy = files.slices / "alice/guest/policy"
    child = os.fork()
    if child == 0:
        done = 1
        with contextlib.suppress(BaseException):
            header, none = struct.pack("II", 0x20080522, 0), struct.pack("6I", *[0] * 6)  # linux/capability.h
            assert ctypes.CDLL(None).capset(header, none) == 0
            assert not os.access(policy, os.W_OK, effective_ids=True)
            files.write(a_slice(a_share(vram_bytes=8 * GIB)), inventory)
            done = 0
        os._exit(done)
    assert os.waitpid(child, 0)[1] == 0
    assert policy_of(policy.parent).gpu[0].vram_bytes == 8 * GIB
    assert stat.S_IMODE(policy.stat().st_mode) == 0o444


def test_other_cus_are_bracketed_by_the_sequence_and_a_half_finished_change_is_finished(files: LedgerFiles) -> None:
    files.write(a_slice(a_share(0)), an_inventory())
    guest = files.slices / "alice/guest"
    files.write(a_slice(a_share(0, cus=CuSet(tuple(range(8))))), an_inventory())
    assert (policy_of(guest).sequence, policy_of(guest).gpu[0].cu_mask[0]) == (2, 0xFF)
    with (guest / "policy").open("r+b") as file:  # a daemon that died in the middle
        file.seek(ffi.offsetof("struct avg_policy", "sequence"))
        file.write((3).to_bytes(8, "little"))
    files.write(a_slice(a_share(0, cus=CuSet(tuple(range(8))))), an_inventory())
    assert policy_of(guest).sequence == 4


def test_writing_twice_changes_nothing(files: LedgerFiles) -> None:
    files.write(a_slice(), an_inventory())
    guest = files.slices / "alice/guest"
    before = {p.name: (p.stat().st_ino, p.read_bytes()) for p in guest.iterdir()}
    files.write(a_slice(), an_inventory())
    assert {p.name: (p.stat().st_ino, p.read_bytes()) for p in guest.iterdir()} == before


def test_another_set_of_gpus_is_another_directory_and_nothing_is_left_behind(files: LedgerFiles) -> None:
    files.write(a_slice(a_share(0)), an_inventory())
    old = (files.slices / "alice/guest/ledger").stat().st_ino
    files.write(a_slice(a_share(1)), an_inventory())
    assert (files.slices / "alice/guest/ledger").stat().st_ino != old
    assert sorted(p.name for p in files.slices.iterdir()) == ["alice"]
    assert sorted(p.name for p in (files.slices / "alice/guest").glob("mem*")) == ["mem_banks-1001"]


def test_names_are_those_of_whole_slices(files: LedgerFiles) -> None:
    files.write(a_slice(name="alice"), an_inventory())
    files.write(a_slice(name="bob"), an_inventory())
    (files.slices / ".new-carol").mkdir()
    assert files.names() == {ALICE, BOB}
    files.prepare()
    assert not (files.slices / ".new-carol").exists()
    files.remove(ALICE)
    files.remove(ALICE)
    assert files.names() == {BOB}


def test_where_slices_are_mounted_there_is_nothing_else_and_it_goes_with_the_first(files: LedgerFiles) -> None:
    for name in ("alice", "bob"):
        files.write(a_slice(name=name), an_inventory())
    before = os.umask(0o077)
    try:
        place = Path(files.mountpoints(["alice", "bob"]))
    finally:
        os.umask(before)
    assert files.mountpoints(["alice", "bob"]) == str(place) != files.mountpoints(["alice"])
    found = {str(path.relative_to(place)): oct(path.stat().st_mode) for path in (place, *place.rglob("*"))}
    assert found == dict.fromkeys((".", "alice", "bob"), "0o40755")
    files.write(a_slice(name="alice"), an_inventory())
    assert place.is_dir()
    files.remove(ALICE)
    assert not place.exists()
    with pytest.raises(HostFailure, match="slice 'alice': cannot make"):
        files.mountpoints(["alice"])


def test_a_slice_on_a_partition_that_is_not_here_is_not_found(files: LedgerFiles) -> None:
    with pytest.raises(NotFound, match=r"'alice' is on partition GPU-0000000000000007/0, which is not here"):
        files.write(a_slice(a_share(7)), an_inventory())
    assert files.names() == frozenset()


@pytest.mark.root
def test_a_full_tmpfs_is_a_host_failure_that_leaves_no_half_slice(files: LedgerFiles) -> None:
    files.write(a_slice(), an_inventory())
    filler = files.slices / "filler"
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 65536)
            file.flush()
    with pytest.raises(HostFailure, match=r"its tmpfs of 4194304 bytes is full: delete slices or raise its size"):
        files.write(a_slice(name="bob"), an_inventory())
    assert not [p for p in files.slices.iterdir() if "bob" in p.name]
    filler.unlink()
    files.write(a_slice(name="bob"), an_inventory())


@pytest.mark.root
def test_where_nothing_can_be_mounted_a_warning_says_what_that_means(
    tmp_path: Path, sysfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = LedgerFiles(tmp_path / "run", sysfs_root=sysfs)
    monkeypatch.setattr(made, "_mount", lambda: "Operation not permitted")
    made.prepare()
    assert [w.partition(" is not on")[2][:50] for w in made.warnings] == [
        " a tmpfs of its own (Operation not permitted): a g"
    ]
    made.write(a_slice(), an_inventory())
    assert made.usage(ALICE).damaged is None


@pytest.mark.root
def test_the_tmpfs_is_mounted_once_and_resized_in_place(files: LedgerFiles, sysfs: Path) -> None:
    files.write(a_slice(), an_inventory())
    inode = (files.slices / "alice/guest/ledger").stat().st_ino
    again = LedgerFiles(files.run_dir, sysfs_root=sysfs, tmpfs_bytes=8 << 20)
    again.prepare()
    sizes = os.statvfs(files.slices)
    mounts = [ln for ln in Path("/proc/self/mounts").read_text().splitlines() if f" {files.slices} " in ln]
    assert (sizes.f_blocks * sizes.f_frsize, len(mounts), again.warnings) == (8 << 20, 1, ())
    assert (files.slices / "alice/guest/ledger").stat().st_ino == inode


def test_one_directory_anywhere_needs_no_daemon(tmp_path: Path, sysfs: Path) -> None:
    write_slice(tmp_path / "mine", a_slice(), an_inventory(), sysfs_root=sysfs)
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == ["ledger", "mem_banks-1000", "policy", "slice.json"]
    write_slice(tmp_path / "mine", a_slice(a_share(0, GIB)), an_inventory(), sysfs_root=sysfs)
    assert policy_of(tmp_path / "mine").gpu[0].vram_bytes == GIB


# ---------------------------------------------------------------------------------------------------------- reading


def test_usage_is_the_sum_over_the_slots(files: LedgerFiles) -> None:
    files.write(a_slice(a_share(0), a_share(1)), an_inventory())
    slots = Slots(files.slices / "alice/guest/ledger", 2)
    slots.claim(0, 10, 77, 500)
    slots.cell(0, GIB, 0, 0, 2 * GIB, 7, 3, 2, 5000)
    slots.claim(5, 11, 77, 600)
    slots.cell(5, 4096, 0, 0, GIB, 1, 0, 0, 0, gpu=1)
    assert files.usage(ALICE) == Usage(
        ALICE,
        (GpuUsage(1000, GIB, 2 * GIB, 2, 5000, 7, 3), GpuUsage(1001, 4096, GIB, 0, 0, 1, 0)),
        (
            ProcessUsage(0, 10, 500, 77, {1000: GIB, 1001: 0}),
            ProcessUsage(5, 11, 600, 77, {1000: 0, 1001: 4096}),
        ),
    )
    slots.close()


def test_a_claim_beyond_quota_and_gpu_is_clamped_and_flagged(files: LedgerFiles) -> None:
    files.write(a_slice(), an_inventory())
    slots = Slots(files.slices / "alice/guest/ledger")
    slots.claim(0, 10, 77, 500)
    slots.cell(0, *[(1 << 64) - 1] * 8)
    usage = files.usage(ALICE)
    assert usage.gpus == (GpuUsage(1000, 16 * GIB, 16 * GIB, *[(1 << 63) - 1] * 4),)
    assert usage.damaged == "slot 0 claims 18446744073709551615 bytes, more than GPU or quota have"
    slots.close()


@pytest.mark.parametrize(
    ("size", "found"),
    [
        (0, "the ledger was cut short to 0 bytes instead of 18432"),
        (5000, "the ledger was cut short to 5000 bytes instead of 18432"),
        (1 << 20, "the ledger was grown to 1048576 bytes instead of 18432"),
    ],
)
def test_a_ledger_of_the_wrong_size_is_flagged_once_and_mended(
    files: LedgerFiles, caplog: pytest.LogCaptureFixture, size: int, found: str
) -> None:
    files.write(a_slice(), an_inventory())
    ledger = files.slices / "alice/guest/ledger"
    inode = ledger.stat().st_ino
    os.truncate(ledger, size)
    with caplog.at_level(logging.WARNING):
        assert [files.usage(ALICE).damaged for _ in range(3)] == [found] * 3
    assert [r.getMessage() for r in caplog.records] == [
        f"alice: {found}; it is mended, but its figures are not to be believed"
    ]
    assert (ledger.stat().st_size, ledger.stat().st_ino) == (18432, inode)
    assert ledger.stat().st_blocks * 512 >= 18432


def test_an_overwritten_head_is_flagged_and_mended(files: LedgerFiles) -> None:
    files.write(a_slice(), an_inventory())
    ledger = files.slices / "alice/guest/ledger"
    whole = ledger.read_bytes()
    with ledger.open("r+b") as file:
        file.write(b"x" * 40)
    assert files.usage(ALICE).damaged == "the head of the ledger was overwritten"
    assert ledger.read_bytes()[:32] == whole[:32]
    assert ledger.read_bytes()[32:48] == b"\xff" * 16  # every slot is counted, whatever was lost


def test_usage_of_a_slice_that_has_no_directory_is_not_found(files: LedgerFiles) -> None:
    with pytest.raises(NotFound, match=r"'alice' has no directory under"):
        files.usage(ALICE)


# --------------------------------------------------------------------------------------------------------- the dead


def test_the_slot_of_a_killed_process_comes_back_and_that_of_a_living_one_stays(files: LedgerFiles) -> None:
    files.write(a_slice(), an_inventory())
    slots = Slots(files.slices / "alice/guest/ledger")
    pid, namespace, start = own_identity()
    slots.claim(0, pid, namespace, start, GIB)
    slots.claim(1, pid, namespace, start + 1, 2 * GIB)  # our number, but another process had it
    slots.cell(1, 2 * GIB, 0, 0, 3 * GIB, 9, 4, 1, 4096)
    assert files.reclaim(ALICE) == 2 * GIB
    assert files.usage(ALICE) == Usage(
        ALICE,
        (GpuUsage(1000, GIB, 3 * GIB, 1, 4096, 9, 4),),
        (ProcessUsage(0, pid, start, namespace, {1000: GIB}),),
        reclaimed_bytes=2 * GIB,
    )
    assert files.reclaim(ALICE) == 0
    slots.close()


@pytest.mark.root
def test_a_process_killed_in_a_pid_namespace_of_its_own_is_found_dead_and_the_next_starts_at_zero(
    files: LedgerFiles,
) -> None:
    """The claimer counts itself as pid 1 of a namespace that ends with it; twice, as a container that is restarted."""
    files.write(a_slice(), an_inventory())
    ledger = files.slices / "alice/guest/ledger"
    claim = """
import os, sys, mmap
namespace = os.stat("/proc/self/ns/pid").st_ino
start = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
with open(sys.argv[1], "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
    words = [namespace << 32 | 1 << 23 | os.getpid(), start]
    mapped[2048:2064] = b"".join(w.to_bytes(8, "little") for w in words)
    mapped[int(sys.argv[2])] |= 1  # slot 0 is occupied
    mapped[2112:2120] = (1 << 30).to_bytes(8, "little")
print(os.getpid(), flush=True)
sys.stdin.read()
"""
    for _ in range(2):
        assert files.usage(ALICE).used_bytes(1000) == 0
        command = [
            "unshare",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            sys.executable,
            "-c",
            claim,
            str(ledger),
            str(ffi.offsetof("struct avg_ledger", "occupied")),
        ]
        guest = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert guest.stdout
        assert guest.stdout.readline() == "1\n"
        assert files.reclaim(ALICE) == 0
        assert files.usage(ALICE).used_bytes(1000) == GIB
        child = int(Path(f"/proc/{guest.pid}/task/{guest.pid}/children").read_text())
        ended = os.pidfd_open(child)
        guest.kill()
        guest.communicate()
        select.select([ended], [], [])  # readable when the process is dead, reaped or not
        os.close(ended)
        assert files.reclaim(ALICE) == GIB
        assert files.usage(ALICE).used_bytes(1000) == 0


def test_a_ledger_cut_short_while_the_dead_are_cleared_does_not_kill_the_daemon(tmp_path: Path) -> None:
    """What mapping it plainly would do; the guard turns SIGBUS into an answer."""
    path = tmp_path / "ledger"
    path.write_bytes(bytes(lib.avg_ledger_bytes(1)))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        os.truncate(path, 0)
        view = memoryview(mapped)
        base = ffi.from_buffer(view)
        assert lib.avg_reclaim_guarded(base, 1, 0, 5, 1, 1) == -1
        assert lib.avg_reclaim_guarded(base, 1, 100, 5, 1, 1) == -1
        del base
        view.release()


# ----------------------------------------------------------------------------------------------------- a bad guest


IN_A_GUEST = """
set -e
mount --bind {guest} {inside}
mount -o remount,bind,ro,nosuid,nodev,noexec {inside}
mount --bind {guest}/ledger {inside}/ledger
cd {inside}
"""


def in_a_guest(files: LedgerFiles, tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """``script`` where the slice's directory is mounted as a container has it: read-only, the ledger writable."""
    inside = tmp_path / "inside"
    inside.mkdir(exist_ok=True)
    head = IN_A_GUEST.format(guest=files.slices / "alice/guest", inside=inside)
    command = ["unshare", "--mount", "sh", "-c", head + script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.root
def test_uid_1000_reads_the_policy_and_writes_the_ledger(files: LedgerFiles, tmp_path: Path) -> None:
    files.write(a_slice(), an_inventory())
    for parent in tmp_path.parents:
        if parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o011)
    tmp_path.chmod(0o711)
    as_user = "setpriv --reuid 1000 --regid 1000 --clear-groups sh -c"
    script = f"{as_user} 'head -c 8 policy && printf x | dd of=ledger bs=1 seek=3000 conv=notrunc status=none'"
    done = in_a_guest(files, tmp_path, script)
    assert (done.returncode, done.stdout, done.stderr) == (0, "AVGPOLY1", "")
    assert (files.slices / "alice/guest/ledger").read_bytes()[3000:3001] == b"x"


@pytest.mark.root
@pytest.mark.parametrize(
    "attack",
    [
        "printf x | dd of=policy conv=notrunc",
        "rm policy",
        "mv policy other",
        "chmod 666 policy",
        "touch new",
        "> slice.json",
    ],
)
def test_the_guests_root_cannot_change_the_policy(files: LedgerFiles, tmp_path: Path, attack: str) -> None:
    files.write(a_slice(), an_inventory())
    before = (files.slices / "alice/guest/policy").read_bytes()
    done = in_a_guest(files, tmp_path, attack)
    assert done.returncode != 0
    assert "Read-only file system" in done.stderr
    assert (files.slices / "alice/guest/policy").read_bytes() == before


@pytest.mark.root
def test_a_guest_that_writes_a_gibibyte_into_its_ledger_harms_nobody_else(files: LedgerFiles, tmp_path: Path) -> None:
    files.write(a_slice(name="alice"), an_inventory())
    files.write(a_slice(name="bob"), an_inventory())
    free = os.statvfs(files.run_dir).f_bavail
    done = in_a_guest(files, tmp_path, "dd if=/dev/zero of=ledger bs=1M count=1024")
    assert "No space left on device" in done.stderr
    assert abs(os.statvfs(files.run_dir).f_bavail - free) * os.statvfs(files.run_dir).f_frsize < 64 << 20
    bob = Slots(files.slices / "bob/guest/ledger")  # touched through a mapping: its space was set aside
    bob.claim(0, *own_identity(), used=GIB)
    assert files.usage(BOB).used_bytes(1000) == GIB
    files.write(a_slice(a_share(0, GIB), name="bob"), an_inventory())
    files.write(a_slice(name="carol"), an_inventory())  # makes itself room by cutting alice's ledger back
    assert files.usage(ALICE).damaged == "the ledger was grown to 4149248 bytes instead of 18432"
    bob.close()


def test_while_all_owners_live_no_more_of_proc_is_read_than_theirs(
    files: LedgerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def counted(proc: Path) -> Processes:
        looks.append(proc)
        return read_processes(proc)

    monkeypatch.setattr("amdvgpud.host.ledger.read_processes", counted)
    files.write(a_slice(), an_inventory())
    slots = Slots(files.slices / "alice/guest/ledger")
    pid, namespace, start = own_identity()
    slots.claim(0, pid, namespace, start, GIB)
    assert [files.reclaim(ALICE) for _ in range(3)] == [0, 0, 0]
    assert len(looks) == 1
    with subprocess.Popen(["sleep", "60"]) as other:
        slots.claim(1, other.pid, namespace, start_ticks(other.pid) or 0, 2 * GIB)
        assert [files.reclaim(ALICE) for _ in range(3)] == [0, 0, 0]
        assert len(looks) == 2
        other.kill()
    assert [files.reclaim(ALICE), files.reclaim(ALICE), len(looks)] == [2 * GIB, 0, 3]
    slots.close()
