"""What podman makes of the real rendering, on stand-ins.

The machine need not have a GPU. /dev/kfd stands in as /dev/fuse (it can be opened, and is on no runtime's list of
devices that are always allowed), the render nodes are nodes of the right numbers without a driver: an open that the
device cgroup lets through ends in ENXIO, one that it does not in EPERM. The memory-bank file, which sysfs has only
where the KFD is, is replaced in the document by another file of sysfs. All else is byte for byte what is published.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any, Protocol

import pytest

from amdvgpud.host.cdi import CdiFile

pytestmark = pytest.mark.podman

OVERLAID = {"1": "/sys/kernel/profiling", "2": "/sys/kernel/uevent_seqnum"}
"""By KFD node: what stands in for its memory-bank file."""


class Finished(Protocol):
    code: int
    output: str


class Corner(Protocol):
    def path(self, inside: str) -> Path: ...
    def container(
        self, devices: list[str], *argv: str, options: tuple[str, ...] = (), image: str = ...
    ) -> Finished: ...
    def podman(self, *argv: str) -> Finished: ...
    @property
    def cgroup_parent(self) -> str: ...


class Published:
    """The slices of ``machine`` on stand-in devices, published in the corner's /run/cdi."""

    def __init__(self, corner: Corner, machine: Any, folder: Path) -> None:
        self.corner = corner
        self.run_dir = folder / "run"
        root = folder / "root"
        (root / "dev/dri").mkdir(parents=True)
        os.mknod(root / "dev/kfd", stat.S_IFCHR | 0o600, os.makedev(10, 229))
        for minor in (128, 129):
            os.mknod(root / f"dev/dri/renderD{minor}", stat.S_IFCHR | 0o600, os.makedev(226, minor))
        library = folder / "libamdvgpu.so"
        subprocess.run(["cc", "-shared", "-o", library, "-xc", "/dev/null"], check=True)
        for item in machine.book.slices.values():
            self._make_files(self.run_dir / "slices" / item.name / "guest", item, machine.inventory)
        # paths of the document are the machine's own, the file goes to where podman in the corner looks
        cdi = CdiFile(corner.path("/run/cdi"), run_dir=self.run_dir, library=library, sysfs_root=root, standard_dirs=())
        status = cdi.publish(tuple(machine.book.slices.values()), machine.inventory)
        assert (status.written, status.error, status.conflicts) == (True, None, ())
        text = cdi.path.read_text()
        overlay = r"/sys/devices/virtual/kfd/kfd/topology/nodes/(\d+)/mem_banks/0/properties"
        cdi.path.write_text(re.sub(overlay, lambda match: OVERLAID[match[1]], text))
        self.document = json.loads(text)

    @staticmethod
    def _make_files(guest: Path, item: Any, inventory: Any) -> None:
        guest.mkdir(parents=True)
        guest.parent.chmod(0o700)
        (guest / "policy").write_text(f"policy of {item.name}\n")
        (guest / "policy").chmod(0o444)
        (guest / "ledger").write_bytes(bytes(4096))
        (guest / "ledger").chmod(0o666)
        for share in item.shares:
            gpu_id = inventory.partition(share.partition).kfd_gpu_id
            (guest / f"mem_banks-{gpu_id}").write_text(f"size_in_bytes {share.vram_bytes}\n")

    def guest(self, name: str) -> Path:
        return self.run_dir / "slices" / name / "guest"

    def sh(self, devices: list[str], script: str, *options: str) -> str:
        """What ``script`` prints in a container with ``devices``, whether or not it ends well."""
        return self.corner.container(devices, "sh", "-c", script, options=options).output


@pytest.fixture(scope="module")
def here(corner: Corner, machine: Any, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(corner, machine, tmp_path_factory.mktemp("published"))


def test_a_container_with_one_slice_sees_its_gpu_its_files_and_nothing_of_others(here: Published) -> None:
    script = """
        ls /dev/dri /run/amdvgpu
        stat -c '%n %a %u:%g %t:%T' /dev/kfd /dev/dri/*
        cat /run/amdvgpu/alice/policy /etc/ld.so.preload /sys/kernel/profiling
    """
    assert here.sh(["alice"], script).splitlines() == [
        "/dev/dri:", "renderD128", "", "/run/amdvgpu:", "alice",
        "/dev/kfd 666 0:0 a:e5", "/dev/dri/renderD128 666 0:0 e2:80",
        "policy of alice", "/usr/lib/amdvgpu/libamdvgpu.so", f"size_in_bytes {4 * 2**30}",
    ]  # fmt: skip


def test_the_same_with_crun(crun_corner: Corner, machine: Any, tmp_path: Path) -> None:
    there = Published(crun_corner, machine, tmp_path)
    test_a_container_with_one_slice_sees_its_gpu_its_files_and_nothing_of_others(there)
    test_a_container_opens_its_own_devices_and_no_other_even_if_it_makes_the_node(there)
    test_two_slices_of_one_gpu_come_with_both_policies_and_the_later_ones_memory_bank(there)


def test_what_is_mounted_is_read_only_but_for_the_ledger(here: Published) -> None:
    found = {}
    for line in here.sh(["alice"], "cat /proc/self/mountinfo").splitlines():
        _, _, _, _, target, options, *_ = line.split()
        if "amdvgpu" in target or target in ("/etc/ld.so.preload", OVERLAID["1"]):
            found[target] = set(options.split(",")) - {"relatime"}
    assert found == {
        "/run/amdvgpu": {"ro", "nosuid", "nodev", "noexec"},
        "/run/amdvgpu/alice": {"ro", "nosuid", "nodev", "noexec"},
        "/run/amdvgpu/alice/ledger": {"rw", "nosuid", "nodev", "noexec"},
        "/usr/lib/amdvgpu/libamdvgpu.so": {"ro", "nosuid", "nodev"},
        "/etc/ld.so.preload": {"ro", "nosuid", "nodev"},
        OVERLAID["1"]: {"ro"},
    }


def test_a_container_opens_its_own_devices_and_no_other_even_if_it_makes_the_node(here: Published) -> None:
    script = """
        (exec 3<>/dev/kfd) && echo kfd opened
        (exec 3<>/dev/dri/renderD128)
        mknod /tmp/other c 226 129
        (exec 3<>/tmp/other)
        true
    """
    printed = here.sh(["alice"], script, "--cap-add=MKNOD")
    assert re.findall(r"kfd opened|renderD128: .*|other: .*", printed) == [
        "kfd opened",
        "renderD128: No such device or address",
        "other: Operation not permitted",
    ]


def test_two_slices_on_two_gpus_add_up(here: Published) -> None:
    script = """
        echo /dev/dri/* /run/amdvgpu/*
        cat /run/amdvgpu/*/policy /sys/kernel/profiling /sys/kernel/uevent_seqnum
        grep -c ld.so.preload /proc/self/mountinfo
    """
    assert here.sh(["alice", "bob"], script).splitlines() == [
        "/dev/dri/renderD128 /dev/dri/renderD129 /run/amdvgpu/alice /run/amdvgpu/bob",
        "policy of alice", "policy of bob", f"size_in_bytes {4 * 2**30}", f"size_in_bytes {2 * 2**30}",
        "1",
    ]  # fmt: skip


def test_two_slices_of_one_gpu_come_with_both_policies_and_the_later_ones_memory_bank(here: Published) -> None:
    """One mount survives at one path: a static program then sees less than the sum, never more."""
    script = """
        echo /dev/dri/*
        cat /run/amdvgpu/*/policy /sys/kernel/profiling
        grep -c profiling /proc/self/mountinfo
    """
    both = ["/dev/dri/renderD128", "policy of alice", "policy of carol"]
    assert here.sh(["alice", "carol"], script).splitlines() == [*both, f"size_in_bytes {2**30}", "1"]
    assert here.sh(["carol", "alice"], script).splitlines() == [*both, f"size_in_bytes {4 * 2**30}", "1"]


def test_a_slice_over_two_gpus_whose_name_begins_with_a_digit_is_resolved(here: Published) -> None:
    assert here.sh(["0-pair"], "echo /dev/dri/* $AMDVGPU_SLICE") == (
        "/dev/dri/renderD128 /dev/dri/renderD129 0-pair"
    )  # fmt: skip


def test_an_unknown_name_is_an_error_of_podman(here: Published) -> None:
    answer = here.corner.container(["nobody"], "true")
    assert (answer.code, answer.output) == (
        126,
        "Error: setting up CDI devices: unresolvable CDI devices amdvgpu.io/slice=nobody",
    )
    assert here.corner.container(["alice", "nobody"], "true").code == 126


def test_user_1000_opens_the_devices_reads_the_policy_and_writes_the_ledger(here: Published) -> None:
    script = """
        id -u; stat -c '%u:%g %a' /dev/kfd
        (exec 3<>/dev/kfd) && cat /run/amdvgpu/alice/policy && echo 1000 > /run/amdvgpu/alice/ledger && echo written
    """
    printed = here.sh(["alice"], script, "--user=1000:1000").splitlines()
    assert printed == ["1000", "1000:1000 666", "policy of alice", "written"]
    assert (here.guest("alice") / "ledger").read_bytes()[:4] == b"1000"


def test_another_account_of_the_container_opens_the_devices_too(here: Published) -> None:
    """A container of root that goes on as uid 1000 (or the other way round) keeps its GPU: the file says mode 0666."""
    script = "setpriv --reuid=1000 --regid=1000 --clear-groups sh -c 'id -u; (exec 3<>/dev/kfd) && echo opened'"
    assert here.sh(["alice"], script).splitlines() == ["1000", "opened"]


def test_the_gate_is_loaded_after_an_empty_environment(here: Published) -> None:
    gate = "/usr/lib/amdvgpu/libamdvgpu.so"
    assert gate in here.sh(["alice"], "env -i /bin/cat /proc/self/maps")
    assert gate not in here.sh([], "env -i /bin/cat /proc/self/maps")


def test_a_static_program_runs_unharmed_without_the_gate_and_sees_the_overlay(here: Published) -> None:
    static = here.corner.container(["alice"], "/bin/cat", "/proc/self/maps", OVERLAID["1"], image="localhost/static:1")
    assert static.code == 0
    assert "libamdvgpu" not in static.output
    assert static.output.endswith(f"size_in_bytes {4 * 2**30}")


@pytest.mark.parametrize(
    "attack",
    [
        "echo mine > /run/amdvgpu/alice/policy",
        "rm -f /run/amdvgpu/alice/policy",
        "chmod 666 /run/amdvgpu/alice/policy",
        "mv /run/amdvgpu/alice /run/amdvgpu/gone",
        "mv /run/amdvgpu /run/gone",
        "touch /run/amdvgpu/other",
        "touch /run/amdvgpu/alice/other",
        "umount /run/amdvgpu/alice",
        "mount -o remount,bind,rw /run/amdvgpu/alice",
        "rm -f /run/amdvgpu/alice/ledger",
        "echo > /etc/ld.so.preload",
        "rm -f /etc/ld.so.preload",
        "mv -f /etc/ld.so.preload /etc/none",
        "umount /etc/ld.so.preload",
        "dd if=/dev/zero of=/usr/lib/amdvgpu/libamdvgpu.so bs=1 count=1 conv=notrunc",
        "echo 1 > /sys/kernel/profiling",
    ],
)
def test_root_of_the_container_cannot_change_what_holds_it(here: Published, attack: str) -> None:
    before = {p: p.read_bytes() for p in here.run_dir.rglob("*") if p.is_file()}
    script = f"({attack}) 2>/dev/null && echo done; cat /run/amdvgpu/alice/policy /etc/ld.so.preload"
    assert here.sh(["alice"], script).splitlines() == ["policy of alice", "/usr/lib/amdvgpu/libamdvgpu.so"]
    assert {p: p.read_bytes() for p in here.run_dir.rglob("*") if p.is_file()} == before


def test_a_withdrawn_slice_is_gone_for_the_next_start(here: Published, machine: Any, tmp_path: Path) -> None:
    """podman resolves the name at each start, not once at create."""
    device = "--device=amdvgpu.io/slice=bob"
    made = here.corner.podman("create", here.corner.cgroup_parent, "--name=later", device, "localhost/glibc:1", "true")
    assert made.code == 0, made.output
    assert here.corner.podman("start", "--attach", "later").code == 0
    file = here.corner.path("/run/cdi/amdvgpu.io-slice.json")
    text = file.read_text()
    try:
        file.write_text(text.replace('"bob"', '"bert"'))
        answer = here.corner.podman("start", "--attach", "later")
        assert "unresolvable CDI devices amdvgpu.io/slice=bob" in answer.output
    finally:
        file.write_text(text)
        here.corner.podman("rm", "--force", "later")
