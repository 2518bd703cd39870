"""The CDI file: rendering, and how it gets to the disk."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from amdvgpud.core.cumask import layout_hash
from amdvgpud.core.errors import Invalid
from amdvgpud.core.model import (
    Compute,
    ComputePolicy,
    CuLayout,
    CuSet,
    Gpu,
    GpuId,
    Inventory,
    Partition,
    PartitionId,
    Request,
    Share,
    Slice,
    slice_name,
)
from amdvgpud.core.render import slice_environment
from amdvgpud.host.cdi import CdiFile, SimulatedDevices
from amdvgpud.host.cdi_spec import (
    DeviceNode,
    Edits,
    Mount,
    parse_spec,
)
from amdvgpud.ports import CdiStatus

GIB = 2**30
LAYOUT = CuLayout(1, 4, 2, (8,) * 8, wgp=True)


def a_gpu(index: int) -> Gpu:
    gpu = GpuId(f"GPU-{0xA0 + index:016x}")
    partition = Partition(
        PartitionId(f"{gpu}/0"),
        gpu,
        0,
        index + 1,
        40000 + index,
        128 + index,
        16 * GIB,
        LAYOUT,
        "gfx1201",
        0xA0 + index,
    )
    return Gpu(
        gpu,
        index,
        f"0000:{index + 3:02x}:00.0",
        0xA0 + index,
        None,
        0x7550,
        0xC0,
        "",
        "gfx1201",
        16 * GIB,
        (partition,),
    )


INVENTORY = Inventory((a_gpu(0), a_gpu(1)))


def a_slice(name: str, *gpus: int, cus: CuSet | None = CuSet(tuple(range(16)))) -> Slice:  # noqa: B008 - frozen
    policy = Compute(ComputePolicy.EXACT, cu_count=len(cus)) if cus else Compute(ComputePolicy.WHOLE)
    granted = len(cus) if cus else LAYOUT.cu_count
    shares = tuple(
        Share(INVENTORY.gpus[i].partitions[0].id, 4 * GIB, cus, False, granted, granted, granted, layout_hash(LAYOUT))
        for i in gpus
    )
    return Slice(slice_name(name), Request(slice_name(name), policy, 4 * GIB, len(gpus)), shares, 0.0, 1)


@pytest.fixture
def there(tmp_path: Path) -> CdiFile:
    """A CdiFile whose directories are all under ``tmp_path``."""
    return CdiFile(
        tmp_path / "cdi",
        run_dir=tmp_path / "run",
        library=Path("/lib/gate.so"),
        standard_dirs=(tmp_path / "etc", tmp_path / "cdi"),
    )


@pytest.fixture
def narrow_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


# -------------------------------------------------------------------------------------------------------- rendering


def edits_of(document: dict[str, object], name: str) -> Edits:
    spec = parse_spec(json.dumps(document))
    return next(d.edits for d in spec.devices if d.name == name)


def test_a_slice_gets_its_render_node_its_guest_directory_its_ledger_and_the_memory_bank_overlay(
    there: CdiFile, tmp_path: Path
) -> None:
    item = a_slice("alice", 1)
    guest = f"{tmp_path}/run/slices/alice/guest"
    assert edits_of(there.render([item], INVENTORY), "alice") == Edits(
        env=tuple(f"{k}={v}" for k, v in slice_environment(item, INVENTORY).items()),
        device_nodes=(DeviceNode("/dev/dri/renderD129", file_mode=0o666, permissions="rw"),),
        mounts=(
            Mount(guest, "/run/amdvgpu/alice", ("ro", "nosuid", "nodev", "noexec", "bind")),
            Mount(f"{guest}/ledger", "/run/amdvgpu/alice/ledger", ("rw", "nosuid", "nodev", "noexec", "bind")),
            Mount(
                f"{guest}/mem_banks-40001",
                "/sys/devices/virtual/kfd/kfd/topology/nodes/2/mem_banks/0/properties",
                ("ro", "bind"),
            ),
        ),
    )


def test_the_file_gives_every_container_the_kfd_the_gate_and_the_preload_list(there: CdiFile, tmp_path: Path) -> None:
    spec = parse_spec(json.dumps(there.render([a_slice("alice", 0)], INVENTORY)))
    assert (spec.version, spec.kind) == ("0.4.0", "amdvgpu.io/slice")
    assert spec.edits == Edits(
        device_nodes=(DeviceNode("/dev/kfd", file_mode=0o666, permissions="rw"),),
        mounts=(
            Mount("tmpfs", "/run/amdvgpu", ("ro", "nosuid", "nodev", "noexec", "mode=755", "size=64k"), "tmpfs"),
            Mount("/lib/gate.so", "/usr/lib/amdvgpu/libamdvgpu.so", ("ro", "nosuid", "nodev", "bind")),
            Mount(f"{tmp_path}/run/ld.so.preload", "/etc/ld.so.preload", ("ro", "nosuid", "nodev", "bind")),
        ),
    )


def test_a_slice_over_two_gpus_has_both_nodes_and_both_overlays_each_path_once(there: CdiFile) -> None:
    edits = edits_of(there.render([a_slice("pair", 0, 1)], INVENTORY), "pair")
    assert [n.path for n in edits.device_nodes] == ["/dev/dri/renderD128", "/dev/dri/renderD129"]
    assert [m.container_path for m in edits.mounts] == [
        "/run/amdvgpu/pair",
        "/run/amdvgpu/pair/ledger",
        "/sys/devices/virtual/kfd/kfd/topology/nodes/1/mem_banks/0/properties",
        "/sys/devices/virtual/kfd/kfd/topology/nodes/2/mem_banks/0/properties",
    ]


def test_a_whole_gpu_without_a_mask_is_watched_like_any_other(there: CdiFile) -> None:
    whole, part = a_slice("whole", 0, cus=None), a_slice("whole", 0)
    document, other = (edits_of(there.render([s], INVENTORY), "whole") for s in (whole, part))
    assert (document.mounts, document.device_nodes) == (other.mounts, other.device_nodes)


def test_a_name_that_begins_with_a_digit_raises_the_version_no_further_than_it_must(there: CdiFile) -> None:
    assert there.render([a_slice("0-1", 0)], INVENTORY)["cdiVersion"] == "0.5.0"


def test_device_nodes_of_another_root_are_named_by_their_host_path(tmp_path: Path) -> None:
    there = CdiFile(tmp_path, run_dir=tmp_path, library=tmp_path / "gate", sysfs_root=Path("/other"))
    document = there.render([a_slice("alice", 0)], INVENTORY)
    assert document["cdiVersion"] == "0.5.0"
    node = edits_of(document, "alice").device_nodes[0]
    assert (node.path, node.host_path) == ("/dev/dri/renderD128", "/other/dev/dri/renderD128")


def test_the_card_node_comes_along_only_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "sys/class/drm/renderD128/device/drm/card7").mkdir(parents=True)
    (tmp_path / "sys/class/drm/renderD128/device/drm/renderD128").mkdir()

    def nodes(card_nodes: bool) -> list[str]:
        there = CdiFile(
            tmp_path, run_dir=tmp_path, library=tmp_path / "gate", sysfs_root=tmp_path, card_nodes=card_nodes
        )
        return [n.path for n in edits_of(there.render([a_slice("a1", 0)], INVENTORY), "a1").device_nodes]

    assert nodes(False) == ["/dev/dri/renderD128"]
    assert nodes(True) == ["/dev/dri/renderD128", "/dev/dri/card7"]


def test_a_simulated_node_mounts_plain_files_and_nothing_under_sys(tmp_path: Path) -> None:
    there = CdiFile(
        tmp_path / "cdi",
        run_dir=tmp_path,
        library=Path("/lib/gate.so"),
        simulated=SimulatedDevices(Path("/sim"), Path("/lib/softkfd.so")),
    )
    document = there.render([a_slice("alice", 1)], INVENTORY)
    spec = parse_spec(json.dumps(document))
    everything = [spec.edits, *(d.edits for d in spec.devices)]
    assert [n for e in everything for n in e.device_nodes] == []
    assert [(m.host_path, m.container_path) for e in everything for m in e.mounts] == [
        ("tmpfs", "/run/amdvgpu"),
        ("/lib/gate.so", "/usr/lib/amdvgpu/libamdvgpu.so"),
        (f"{tmp_path}/ld.so.preload", "/etc/ld.so.preload"),
        ("/lib/softkfd.so", "/usr/lib/amdvgpu/libsoftkfd.so"),
        ("/sim", "/run/softkfd"),
        ("/sim/dev/kfd", "/dev/kfd"),
        (f"{tmp_path}/slices/alice/guest", "/run/amdvgpu/alice"),
        (f"{tmp_path}/slices/alice/guest/ledger", "/run/amdvgpu/alice/ledger"),
        ("/sim/dev/dri/renderD129", "/dev/dri/renderD129"),
    ]
    there.publish([a_slice("alice", 1)], INVENTORY)
    assert (
        tmp_path / "ld.so.preload"
    ).read_text() == "/usr/lib/amdvgpu/libamdvgpu.so\n/usr/lib/amdvgpu/libsoftkfd.so\n"


def test_where_the_library_has_a_stand_in_the_linker_chooses_by_platform(tmp_path: Path) -> None:
    library = tmp_path / "lib/libamdvgpu.so"
    for folder in ("platform", "lib32"):
        (library.parent / folder).mkdir(parents=True)
    there = CdiFile(
        tmp_path / "cdi",
        run_dir=tmp_path,
        library=library,
        simulated=SimulatedDevices(Path("/sim"), Path("/lib/softkfd.so")),
    )
    there.publish([a_slice("alice", 1)], INVENTORY)
    mounts = [(m.host_path, m.container_path) for m in parse_spec((there.path).read_text()).edits.mounts]
    assert mounts[1:5] == [
        (str(library), "/usr/lib/amdvgpu/libamdvgpu.so"),
        (f"{tmp_path}/ld.so.preload", "/etc/ld.so.preload"),
        (f"{library.parent}/platform", "/usr/lib/amdvgpu/platform"),
        (f"{library.parent}/lib32", "/usr/lib/amdvgpu/lib32"),
    ]
    assert (tmp_path / "ld.so.preload").read_text().splitlines() == [
        "/usr/lib/amdvgpu/platform/$PLATFORM/libamdvgpu.so",
        "/usr/lib/amdvgpu/platform/$PLATFORM/libsoftkfd.so",
    ]


@pytest.mark.parametrize("change", ["gone", "another layout"])
def test_a_lost_slice_has_no_device(there: CdiFile, change: str) -> None:
    first, second = INVENTORY.gpus
    if change == "gone":
        now = Inventory((first,))
    else:
        other = replace(second.partitions[0], layout=CuLayout(1, 4, 2, (8,) * 7 + (6,), wgp=True))
        now = Inventory((first, replace(second, partitions=(other,))))
    document = there.render([a_slice("kept", 0), a_slice("lost", 1), a_slice("half", 0, 1)], now)
    assert [d.name for d in parse_spec(json.dumps(document)).devices] == ["kept"]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("amd.com/slice", "docker 29.3 and later take any file of vendor 'amd.com' for AMD's own toolkit"),
        ("x/slice", "a vendor of one letter"),
        ("amdvgpu.io/s", "a class of one letter"),
        ("amdvgpu.io/gpu.slice", "needs CDI 0.6.0"),
        ("amdvgpu.io", "it reads vendor/class"),
    ],
)
def test_a_kind_that_harms_is_refused_at_the_start(tmp_path: Path, kind: str, says: str) -> None:
    with pytest.raises(Invalid, match=says):
        CdiFile(tmp_path, run_dir=tmp_path, library=tmp_path, kind=kind)


@pytest.mark.parametrize("limit", ["0.3.0", "0.4.0", "0.9.0", "newest"])
def test_a_version_limit_that_slices_cannot_keep_is_an_error_at_the_start(tmp_path: Path, limit: str) -> None:
    with pytest.raises(Invalid, match=limit):
        CdiFile(tmp_path, run_dir=tmp_path, library=tmp_path, version_limit=limit)


def test_a_version_limit_with_room_changes_nothing(tmp_path: Path) -> None:
    there = CdiFile(tmp_path, run_dir=tmp_path, library=tmp_path, version_limit="1.0.0")
    assert there.render([a_slice("alice", 0)], INVENTORY)["cdiVersion"] == "0.4.0"


# --------------------------------------------------------------------------------------------------------- the file


@pytest.mark.usefixtures("narrow_umask")
def test_modes_do_not_depend_on_the_umask(there: CdiFile, tmp_path: Path) -> None:
    there.publish([a_slice("alice", 0)], INVENTORY)

    def mode(name: str) -> int:
        return stat.S_IMODE((tmp_path / name).stat().st_mode)

    modes = {name: mode(name) for name in ("cdi", "cdi/amdvgpu.io-slice.json", "run/ld.so.preload")}
    assert modes == {"cdi": 0o755, "cdi/amdvgpu.io-slice.json": 0o644, "run/ld.so.preload": 0o644}


def test_the_file_reads_as_what_was_rendered_and_leaves_nothing_beside_it(there: CdiFile, tmp_path: Path) -> None:
    items = [a_slice("bob", 1), a_slice("alice", 0)]
    status = there.publish(items, INVENTORY)
    assert status == CdiStatus(f"{tmp_path}/cdi/amdvgpu.io-slice.json", written=True, error=None, conflicts=())
    assert there.status() == status
    assert json.loads(there.path.read_text()) == there.render(items, INVENTORY)
    assert [d.name for d in parse_spec(there.path.read_text()).devices] == ["alice", "bob"]
    assert [p.name for p in there.path.parent.iterdir()] == ["amdvgpu.io-slice.json"]
    assert (tmp_path / "run/ld.so.preload").read_text() == "/usr/lib/amdvgpu/libamdvgpu.so\n"


def test_the_same_slices_again_do_not_touch_the_file(there: CdiFile) -> None:
    there.publish([a_slice("alice", 0), a_slice("bob", 1)], INVENTORY)
    before = there.path.stat()
    there.publish([a_slice("bob", 1), a_slice("alice", 0)], INVENTORY)
    assert (there.path.stat().st_ino, there.path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_another_slice_of_the_same_name_or_another_machine_is_never_shown_as_it_was_before(there: CdiFile) -> None:
    alice = a_slice("alice", 0)
    there.publish([alice], INVENTORY)
    assert edits_of(there.render([a_slice("alice", 1)], INVENTORY), "alice").device_nodes[0].path.endswith("129")
    gpu = INVENTORY.gpus[0]
    moved = Inventory((replace(gpu, partitions=(replace(gpu.partitions[0], render_minor=200),)),))
    there.publish([alice], moved)
    assert edits_of(json.loads(there.path.read_text()), "alice").device_nodes[0].path == "/dev/dri/renderD200"
    there.publish([alice], Inventory())
    assert not there.path.exists()


def test_a_changed_file_is_another_inode_so_that_a_reader_keeps_the_whole_old_one(there: CdiFile) -> None:
    there.publish([a_slice("alice", 0)], INVENTORY)
    with there.path.open() as reader:
        there.publish([a_slice("alice", 0), a_slice("bob", 1)], INVENTORY)
        assert [d.name for d in parse_spec(reader.read()).devices] == ["alice"]
    assert [d.name for d in parse_spec(there.path.read_text()).devices] == ["alice", "bob"]


def test_a_file_somebody_has_changed_or_closed_is_put_right(there: CdiFile) -> None:
    there.publish([a_slice("alice", 0)], INVENTORY)
    good = there.path.read_bytes()
    there.path.chmod(0o600)
    there.publish([a_slice("alice", 0)], INVENTORY)
    assert stat.S_IMODE(there.path.stat().st_mode) == 0o644
    there.path.write_bytes(good[:100])
    there.publish([a_slice("alice", 0)], INVENTORY)
    assert there.path.read_bytes() == good


def test_without_a_slice_there_is_no_file(there: CdiFile) -> None:
    there.publish([a_slice("alice", 0)], INVENTORY)
    assert there.publish([], INVENTORY) == CdiStatus(str(there.path), written=False, error=None, conflicts=())
    assert not there.path.exists()
    assert there.publish([], INVENTORY).error is None  # twice is once


def test_an_invalid_document_leaves_the_previous_file_and_says_why(
    there: CdiFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.publish([a_slice("alice", 0)], INVENTORY)
    before = there.path.read_bytes()
    monkeypatch.setattr("amdvgpud.host.cdi.container_environment", lambda items, inventory: {"": "no name"})
    status = there.publish([a_slice("alice", 0), a_slice("bob", 1)], INVENTORY)
    assert there.path.read_bytes() == before
    assert status.written is False
    assert status.error is not None
    assert "'=no name' is no variable" in status.error


def test_a_variable_of_one_device_twice_is_not_written(there: CdiFile, monkeypatch: pytest.MonkeyPatch) -> None:
    twice = a_slice("alice", 0)
    monkeypatch.setattr("amdvgpud.host.cdi._live_partitions", lambda item, inventory: inventory.partitions[:1] * 2)
    status = there.publish([twice], INVENTORY)
    assert status.error is not None
    assert "sets /dev/dri/renderD128, /sys/devices/virtual" in status.error
    assert not there.path.exists()


def test_a_write_that_fails_leaves_the_previous_file_and_no_rubbish(
    there: CdiFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.publish([a_slice("alice", 0)], INVENTORY)
    before = there.path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    status = there.publish([a_slice("bob", 1)], INVENTORY)
    assert status.error is not None
    assert "No space left on device" in status.error
    assert there.path.read_bytes() == before
    assert [p.name for p in there.path.parent.iterdir()] == ["amdvgpu.io-slice.json"]


def test_a_residue_of_a_power_cut_is_no_spec_for_any_reader(there: CdiFile, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    rename = Path.rename

    def watch(self: Path, target: Path) -> Path:
        names.append(self.name)
        assert self.parent == target.parent
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watch)
    there.publish([a_slice("alice", 0)], INVENTORY)
    assert [n.endswith(".tmp") for n in names] == [True, True]


# -------------------------------------------------------------------------------------------------------- conflicts


def foreign(names: list[str], kind: str = "amdvgpu.io/slice") -> str:
    return json.dumps({"cdiVersion": "0.3.0", "kind": kind, "devices": [{"name": n} for n in names]})


def test_the_same_name_in_another_standard_directory_is_reported(there: CdiFile, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/old.json").write_text(foreign(["alice", "carol"]))
    (conflict,) = there.publish([a_slice("alice", 0)], INVENTORY).conflicts
    assert conflict == (
        f"{tmp_path}/etc/old.json also names amdvgpu.io/slice=alice: the directory that a runtime reads last wins; "
        "remove one of the two"
    )


def test_the_same_name_beside_our_file_is_reported_even_in_a_hidden_file(there: CdiFile, tmp_path: Path) -> None:
    (tmp_path / "cdi").mkdir(mode=0o755)
    (tmp_path / "cdi/.x.json").write_text(foreign(["alice"]))
    (conflict,) = there.publish([a_slice("alice", 0)], INVENTORY).conflicts
    assert conflict == (
        f"{tmp_path}/cdi/.x.json also names amdvgpu.io/slice=alice: runtimes then resolve neither; "
        "remove one of the two"
    )


def test_a_yaml_file_of_our_kind_is_reported_without_being_read(there: CdiFile, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/a.yaml").write_text('cdiVersion: "0.5.0"\nkind: amdvgpu.io/slice\ndevices: []\n')
    (tmp_path / "etc/b.yaml").write_text('cdiVersion: "0.5.0"\nkind: nvidia.com/gpu\ndevices: []\n')
    (conflict,) = there.publish([a_slice("alice", 0)], INVENTORY).conflicts
    assert conflict.startswith(f"{tmp_path}/etc/a.yaml also names amdvgpu.io/slice=devices of this kind")


def test_other_peoples_files_are_none_of_our_business(there: CdiFile, tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "amd.json").write_text(foreign(["alice"], kind="amd.com/gpu"))
    (folder / "other.json").write_text(foreign(["carol"]))
    (folder / "half.json").write_text(foreign(["alice"])[:30])
    (folder / "odd.json").write_text('{"kind": "amdvgpu.io/slice", "devices": 7}')
    (folder / "list.json").write_text("[]")
    (folder / "alice.txt").write_text(foreign(["alice"]))
    (folder / "folder.json").mkdir()
    (folder / "dangling.json").symlink_to("/nowhere")
    assert there.publish([a_slice("alice", 0)], INVENTORY).conflicts == ()


def test_a_second_name_of_the_same_directory_is_no_conflict(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "var").symlink_to(tmp_path / "run")
    there = CdiFile(
        tmp_path / "run",
        run_dir=tmp_path,
        library=tmp_path / "gate",
        standard_dirs=(tmp_path / "etc", tmp_path / "var"),
    )
    there.publish([a_slice("alice", 0)], INVENTORY)
    assert there.publish([a_slice("alice", 0)], INVENTORY).conflicts == ()


def test_a_directory_closed_to_others_is_reported(there: CdiFile, tmp_path: Path) -> None:
    (tmp_path / "cdi").mkdir(mode=0o700)
    (conflict,) = there.publish([a_slice("alice", 0)], INVENTORY).conflicts
    assert (
        conflict == f"{tmp_path}/cdi is closed to other users: a rootless runtime reads no CDI file in it (chmod 0755)"
    )
