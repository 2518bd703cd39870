"""The CDI file of whole partitions: which are in it, what they bring, and that it never outlives what it names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from amdvgpud.core.errors import Invalid
from amdvgpud.core.model import Book, Compute, ComputePolicy, Inventory, Request, Slice, slice_name
from amdvgpud.core.plan import place
from amdvgpud.host.cdi import CdiFile, SimulatedDevices
from amdvgpud.host.cdi_partitions import WithPartitions
from amdvgpud.host.cdi_spec import parse_spec
from tests.fakes import GIB, a_gpu, in_mode

CUT = in_mode(a_gpu(0), "CPX")
INVENTORY = Inventory((CUT, a_gpu(1)))
WHOLE = Compute(ComputePolicy.WHOLE)


def a_book(*wanted: tuple[str, Compute, str]) -> tuple[Slice, ...]:
    book = Book()
    for name, compute, on in wanted:
        request = Request(slice_name(name), compute, None if compute is WHOLE else GIB, on=(on,))
        book = book.with_slice(Slice(request.name, request, place(book, INVENTORY, request).shares, 0.0, 1))
    return tuple(book.slices.values())


@pytest.fixture
def cdi(tmp_path: Path) -> WithPartitions:
    run_dir, library = tmp_path / "run", tmp_path / "libamdvgpu.so"
    run_dir.mkdir()
    library.touch()
    return WithPartitions(
        CdiFile(tmp_path / "cdi", run_dir=run_dir, library=library, standard_dirs=()), tmp_path / "cdi", run_dir=run_dir
    )


def test_only_partitions_that_a_slice_has_whole_are_named(cdi: WithPartitions) -> None:
    slices = a_book(("part", Compute(percent=25.0), f"{CUT.id}/0"), ("all", WHOLE, f"{CUT.id}/3"))
    assert cdi.publish(slices, INVENTORY).error is None
    assert cdi.path.name == "amdvgpu.io-partition.json"
    assert json.loads(cdi.path.read_bytes()) == {
        "cdiVersion": "0.3.0",
        "kind": "amdvgpu.io/partition",
        "containerEdits": {"deviceNodes": [{"path": "/dev/kfd", "fileMode": 0o666, "permissions": "rw"}]},
        "devices": [
            {
                "name": f"{CUT.id}-3",
                "containerEdits": {
                    "deviceNodes": [{"path": "/dev/dri/renderD131", "fileMode": 0o666, "permissions": "rw"}]
                },
            }
        ],
    }


def test_a_whole_gpu_and_a_slice_over_two_are_partitions_too(cdi: WithPartitions) -> None:
    slices = a_book(("gpu", WHOLE, "1"))
    cdi.publish(slices, INVENTORY)
    assert [d.name for d in parse_spec(cdi.path.read_bytes()).devices] == ["GPU-00000000abcd0001-0"]


def test_the_file_goes_with_its_last_device(cdi: WithPartitions) -> None:
    slices = a_book(("all", WHOLE, f"{CUT.id}/3"), ("part", Compute(percent=25.0), f"{CUT.id}/0"))
    cdi.publish(slices, INVENTORY)
    assert cdi.path.exists()
    cdi.publish(slices[1:], INVENTORY)
    assert not cdi.path.exists()
    # A slice of another mode than the present one is somebody else's partition now.
    cdi.publish(slices[:1], INVENTORY)
    assert cdi.path.exists()
    cdi.publish(slices[:1], replace(INVENTORY, gpus=(a_gpu(0), a_gpu(1))))
    assert not cdi.path.exists()


def test_a_failure_of_either_file_is_the_status(cdi: WithPartitions, tmp_path: Path) -> None:
    slices = a_book(("all", WHOLE, f"{CUT.id}/3"))
    cdi.path.mkdir(parents=True)
    said = cdi.publish(slices, INVENTORY).error
    assert said is not None
    assert said.startswith(f"{cdi.path} was left as it is: ")
    assert cdi.status().error == said
    cdi.path.rmdir()
    assert cdi.publish(slices, INVENTORY).error is None
    assert cdi.status().error is None


def test_simulated_partitions_are_mounts_with_the_emulator_and_without_the_gate(tmp_path: Path) -> None:
    run_dir, library = tmp_path / "run", tmp_path / "libamdvgpu.so"
    run_dir.mkdir()
    library.touch()
    simulated = SimulatedDevices(tmp_path / "machine", tmp_path / "libsoftkfd.so")
    inner = CdiFile(tmp_path / "cdi", run_dir=run_dir, library=library, simulated=simulated, standard_dirs=())
    cdi = WithPartitions(inner, tmp_path / "cdi", run_dir=run_dir, simulated=simulated)
    assert cdi.publish(a_book(("all", WHOLE, f"{CUT.id}/3")), INVENTORY).error is None
    spec = parse_spec(cdi.path.read_bytes())
    assert [m.container_path for m in spec.edits.mounts] == [
        "/etc/ld.so.preload",
        "/usr/lib/amdvgpu/libsoftkfd.so",
        "/run/softkfd",
        "/dev/kfd",
    ]
    assert [m.container_path for m in spec.devices[0].edits.mounts] == ["/dev/dri/renderD131"]
    assert (run_dir / "ld.so.preload-partition").read_text() == "/usr/lib/amdvgpu/libsoftkfd.so\n"


def test_slices_cannot_take_the_kind_of_partitions(tmp_path: Path) -> None:
    inner = CdiFile(tmp_path, run_dir=tmp_path, library=tmp_path / "x", standard_dirs=())
    with pytest.raises(Invalid, match="is the kind of whole partitions"):
        WithPartitions(inner, tmp_path, run_dir=tmp_path, kind="example.com/partition")
