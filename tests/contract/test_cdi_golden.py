"""The CDI file as others see it: our examples byte for byte, our schema, and two validators that must agree.

``python tests/contract/test_cdi_golden.py`` writes the examples anew after a change that was meant.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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
from amdvgpud.host.cdi import CdiFile, HookCall, SimulatedDevices
from amdvgpud.host.cdi_spec import format_spec, parse_spec

CDI = Path(__file__).resolve().parents[2] / "cdi"
SCHEMA = json.loads((CDI / "schema/amdvgpu-slice.schema.json").read_text())
GIB = 2**30

MI300X = CuLayout(8, 4, 1, (10, 10, 9, 9) * 8, wgp=False)
RX9070XT = CuLayout(1, 4, 2, (8,) * 8, wgp=True)


def _gpu(index: int, unique_id: int, device_id: int, gfx: str, vram_bytes: int, layout: CuLayout) -> Gpu:
    gpu = GpuId(f"GPU-{unique_id:016x}")
    partition = Partition(
        PartitionId(f"{gpu}/0"), gpu, 0, index + 1, 51110 + index, 128 + index, vram_bytes, layout, gfx, unique_id
    )
    address = f"0000:{0x83 + index:02x}:00.0"
    return Gpu(gpu, index, address, unique_id, None, device_id, 0, "", gfx, vram_bytes, (partition,))


INVENTORY = Inventory(
    (
        _gpu(0, 0xD7B7DBB1E9C3F001, 0x74A1, "gfx942", 192 * GIB, MI300X),
        _gpu(1, 0x5A6F21C40D88E002, 0x7550, "gfx1201", 16 * GIB, RX9070XT),
    )
)


def _share(index: int, vram_bytes: int, cus: int) -> Share:
    partition = INVENTORY.gpus[index].partitions[0]
    mask = CuSet(tuple(range(cus)))
    return Share(partition.id, vram_bytes, mask, False, cus, cus, cus, layout_hash(partition.layout))


def _slice(name: str, *shares: Share) -> Slice:
    compute = Compute(ComputePolicy.EXACT, cu_count=shares[0].granted_cus)
    return Slice(
        slice_name(name), Request(slice_name(name), compute, shares[0].vram_bytes, len(shares)), shares, 0.0, 1
    )


ALICE = _slice("alice", _share(0, 48 * GIB, 64))
PAIR = _slice("pair", _share(0, 8 * GIB, 32), _share(1, 8 * GIB, 16))
DIGIT = _slice("0-1", _share(1, 4 * GIB, 8))


class _Installed(HookCall):
    """The hook as it is where the package is installed, whatever this machine has."""

    def there(self) -> bool:
        return True


HOOK = _Installed(Path("/usr/lib/amdvgpu/amdvgpu-hook"))
REAL = CdiFile(
    Path("/run/cdi"), run_dir=Path("/run/amdvgpud"), library=Path("/usr/lib/amdvgpu/libamdvgpu.so"), hook=HOOK
)
SIMULATED = CdiFile(
    Path("/run/cdi"),
    run_dir=Path("/run/amdvgpud"),
    library=Path("/usr/lib/amdvgpu/libamdvgpu.so"),
    simulated=SimulatedDevices(Path("/run/amdvgpud/simulated"), Path("/usr/lib/amdvgpu/libsoftkfd.so")),
    hook=HOOK,
)

EXAMPLES = {
    "one-gpu.json": REAL.render([ALICE], INVENTORY),
    "two-gpus.json": REAL.render([PAIR], INVENTORY),
    "simulated.json": SIMULATED.render([ALICE, DIGIT], INVENTORY),
}


def _as_written(document: dict[str, object]) -> bytes:
    return format_spec(parse_spec(json.dumps(document)))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_is_what_the_daemon_writes(name: str) -> None:
    assert (CDI / "examples" / name).read_bytes() == _as_written(EXAMPLES[name]), (
        f"cdi/examples/{name} differs: if that was meant, python tests/contract/test_cdi_golden.py writes it anew"
    )


def test_every_example_is_checked_here() -> None:
    assert {p.name for p in (CDI / "examples").glob("*.json")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_fits_the_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads((CDI / "examples" / name).read_text()))


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_of_an_example_needs_more_than_version_0_5_0(name: str) -> None:
    assert EXAMPLES[name]["cdiVersion"] in ("0.4.0", "0.5.0")


# ------------------------------------------------------------------------------------------- two validators agree

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**33) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=6), inner, max_size=2),
    max_leaves=3,
)
_WORDS = st.sampled_from(
    ("", "=", "A=1", "ro", "rw", "rwm", "/dev/kfd", "/x", "0", "0.3.0", "0.5.0", "1.1.0", "a/b", "amd.com/gpu", "b")
)


def _places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The path of each value in ``value``, itself included."""
    found = [path]
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _places(inner, (*path, key))
    return found


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """An example with one to three values taken out, replaced, doubled, or joined by a stranger."""
    document: Any = json.loads(json.dumps(draw(st.sampled_from(list(EXAMPLES.values())))))
    for _ in range(draw(st.integers(1, 3))):
        places = [p for p in _places(document) if p]
        if not places:
            break
        *path, last = draw(st.sampled_from(places))
        parent = document
        for step in path:
            parent = parent[step]
        change = draw(st.sampled_from(("remove", "replace", "word", "double", "stranger")))
        if change == "remove":
            del parent[last]
        elif change == "double" and isinstance(parent, list):
            parent.append(json.loads(json.dumps(parent[int(last)])))
        elif change == "stranger" and isinstance(parent, dict):
            parent[draw(st.sampled_from(("type", "uid", "annotations", "hooks", "netDevices", "x")))] = draw(_JSON)
        else:
            parent[last] = draw(_WORDS if change == "word" else _JSON)
    return document


def _refusal(document: Any) -> Invalid | None:
    try:
        parse_spec(json.dumps(document))
    except Invalid as refused:
        return refused
    return None


@settings(max_examples=400)
@given(mutated())
def test_a_document_is_read_or_refused_and_what_is_read_is_written_the_same(document: Any) -> None:
    refused = _refusal(document)
    if refused is None:
        spec = parse_spec(json.dumps(document))
        assert parse_spec(format_spec(spec)) == spec
    else:
        assert refused.fields[0].pointer == "" or refused.fields[0].pointer.startswith("/")


def _with_a_fraction() -> Any:
    document = json.loads(json.dumps(next(d for d in EXAMPLES.values() if "hooks" in json.dumps(d))))
    document["devices"][0]["containerEdits"]["hooks"][0]["timeout"] = 1.0
    return document


@settings(max_examples=400)
@given(mutated())
@example(_with_a_fraction())
def test_what_the_schema_lets_through_the_reader_refuses_for_arithmetic_only(document: Any) -> None:
    """And for 1.0, which a schema takes for a whole number and the reference reader (Go's encoding/json) does not."""
    refused = _refusal(document)
    if refused is not None and jsonschema.Draft202012Validator(SCHEMA).is_valid(document):
        reasons = ("too low for the fields in use", "occurs twice", "is no whole number")
        assert any(reason in refused.detail for reason in reasons)


# ------------------------------------------------------------------------------------------------- the other files


@pytest.mark.parametrize("name", ["config-1.7.toml", "config-2.toml"])
def test_the_containerd_example_switches_cdi_on_and_names_both_directories(name: str) -> None:
    (plugin,) = tomllib.loads((CDI / "examples/containerd" / name).read_text())["plugins"].values()
    assert plugin == {"enable_cdi": True, "cdi_spec_dirs": ["/etc/cdi", "/var/run/cdi"]}


def test_the_docker_and_crio_examples_name_both_directories() -> None:
    docker = json.loads((CDI / "examples/docker/daemon.json").read_text())
    assert docker == {"features": {"cdi": True}, "cdi-spec-dirs": ["/etc/cdi", "/var/run/cdi"]}
    crio = tomllib.loads((CDI / "examples/cri-o/10-cdi.conf").read_text())
    assert crio == {"crio": {"runtime": {"cdi_spec_dirs": ["/etc/cdi", "/var/run/cdi"]}}}


if __name__ == "__main__":
    for file, content in EXAMPLES.items():
        (CDI / "examples" / file).write_bytes(_as_written(content))
