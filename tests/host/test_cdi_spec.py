"""The format of a CDI file, and the rules of its readers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amdvgpud.core.errors import Invalid
from amdvgpud.host.cdi_spec import (
    Device,
    DeviceNode,
    Edits,
    Hook,
    Mount,
    Spec,
    format_spec,
    minimum_version,
    parse_spec,
)

A_NODE = DeviceNode("/dev/dri/renderD128", permissions="rw")
AN_EDIT = Edits(env=("A=1",))


@pytest.mark.parametrize(
    ("needed", "kind", "device", "edits"),
    [
        ("0.3.0", "a-vendor.io/slice", Device("s", AN_EDIT), Edits()),
        ("0.3.0", "vendor/slice", Device("a:b", Edits(device_nodes=(A_NODE,))), Edits()),
        ("0.4.0", "vendor/slice", Device("s", AN_EDIT), Edits(mounts=(Mount("/a", "/b", type="bind"),))),
        ("0.5.0", "vendor/slice", Device("0", AN_EDIT), Edits()),
        ("0.5.0", "vendor/slice", Device("s", AN_EDIT), Edits(device_nodes=(DeviceNode("/dev/kfd", "/x/kfd"),))),
        ("0.6.0", "vendor/sl.ice", Device("s", AN_EDIT), Edits()),
        ("0.6.0", "vendor/slice", Device("s", AN_EDIT, (("a.io/b", "c"),)), Edits()),
        ("0.7.0", "vendor/slice", Device("0", Edits(additional_gids=(44,)), (("b", "c"),)), Edits()),
    ],
)
def test_the_lowest_version_that_covers_the_fields_in_use_is_declared_and_a_lower_one_refused(
    needed: str, kind: str, device: Device, edits: Edits
) -> None:
    assert minimum_version(kind, [device], edits) == needed
    assert Spec(needed, kind, (device,), edits).version == needed
    if needed != "0.3.0":
        with pytest.raises(Invalid, match=f"'0.3.0' is too low for the fields in use, which need '{needed}'"):
            Spec("0.3.0", kind, (device,), edits)


GOOD = {
    "cdiVersion": "0.5.0",
    "kind": "amdvgpu.io/slice",
    "containerEdits": {"deviceNodes": [{"path": "/dev/kfd", "permissions": "rw"}]},
    "devices": [
        {
            "name": "alice",
            "containerEdits": {
                "env": ["A=1"],
                "mounts": [{"hostPath": "/a", "containerPath": "/b", "options": ["ro"]}],
                "hooks": [{"hookName": "createRuntime", "path": "/bin/true", "timeout": 0}],
            },
        }
    ],
}


@pytest.mark.parametrize(
    ("at", "value", "pointer", "says"),
    [
        ("cdiVersion", 0.5, "/cdiVersion", "0.5 is no text"),
        ("cdiVersion", "0.9.0", "/cdiVersion", "no CDI version that is known"),
        ("cdiVersion", "v0.5.0", "/cdiVersion", "no CDI version that is known"),
        ("kind", "slice", "/kind", "it reads vendor/class"),
        ("kind", "amdvgpu.io/s", "/kind", "a class of one letter"),
        ("kind", "a/slice", "/kind", "a vendor of one letter"),
        ("kind", "amdvgpu.io/2lice", "/kind", "is no class of a kind"),
        ("kind", "amdvgpu.io/slice/x", "/kind", "is no class of a kind"),
        ("kind", "/slice", "/kind", "'' is no vendor of a kind"),
        ("devices", [], "/devices", "a file without a device"),
        ("devices", None, "/devices", "None is no list"),
        ("devices/1", {"name": "alice", "containerEdits": {"env": ["A=1"]}}, "/devices/1/name", "occurs twice"),
        ("devices/0/containerEdits", {}, "/devices/0/containerEdits", "would change nothing"),
        ("devices/0/name", "", "/devices/0/name", "is no device name"),
        ("devices/0/name", "alice-", "/devices/0/name", "is no device name"),
        ("devices/0/name", "a/b", "/devices/0/name", "is no device name"),
        ("devices/0/name", "ä", "/devices/0/name", "is no device name"),
        ("devices/0/name", 7, "/devices/0/name", "7 is no text"),
        ("devices/0/nmae", "x", "/devices/0/nmae", "no key that may stand here"),
        ("devices/0/containerEdits/env/0", "A", "/devices/0/containerEdits/env/0", "NAME=value"),
        ("devices/0/containerEdits/env/0", "=1", "/devices/0/containerEdits/env/0", "NAME=value"),
        ("devices/0/containerEdits/env", "A=1", "/devices/0/containerEdits/env", "is no list"),
        ("devices/0/containerEdits/mounts/0/hostPath", "", "/devices/0/containerEdits/mounts/0/hostPath", "is no path"),
        (
            "devices/0/containerEdits/mounts/0/containerPath",
            "",
            "/devices/0/containerEdits/mounts/0/containerPath",
            "is no path",
        ),
        (
            "devices/0/containerEdits/hooks/0/hookName",
            "poststart ",
            "/devices/0/containerEdits/hooks/0/hookName",
            "is not one of prestart",
        ),
        ("devices/0/containerEdits/hooks/0/path", "", "/devices/0/containerEdits/hooks/0/path", "is no path"),
        (
            "devices/0/containerEdits/hooks/0/env",
            ["X"],
            "/devices/0/containerEdits/hooks/0/env/0",
            "NAME=value",
        ),
        ("containerEdits", [], "/containerEdits", "is no object"),
        ("containerEdits/netDevices", [], "/containerEdits/netDevices", "no key that may stand here"),
        ("containerEdits/deviceNodes/0/path", "", "/containerEdits/deviceNodes/0/path", "is no path"),
        ("containerEdits/deviceNodes/0/type", "x", "/containerEdits/deviceNodes/0/type", "one of b c u p"),
        ("containerEdits/deviceNodes/0/permissions", "rx", "/containerEdits/deviceNodes/0/permissions", "'rwm' only"),
        ("containerEdits/deviceNodes/0/fileMode", -1, "/containerEdits/deviceNodes/0/fileMode", "32 bits"),
        ("containerEdits/deviceNodes/0/gid", True, "/containerEdits/deviceNodes/0/gid", "True is no whole number"),
        ("containerEdits/deviceNodes/0/uid", "0", "/containerEdits/deviceNodes/0/uid", "is no whole number"),
        ("annotations", {"a b": "c"}, "/annotations", "no annotation key"),
        ("annotations", {"a": 1}, "/annotations/a", "1 is no text"),
        ("annotations", {"a": "x" * 300_000}, "/annotations", "more than the 262144 allowed"),
    ],
)
def test_what_a_reader_would_refuse_is_refused_with_its_place_and_reason(
    at: str, value: object, pointer: str, says: str
) -> None:
    parse_spec(json.dumps(GOOD))  # the document is good but for the one change
    document = json.loads(json.dumps(GOOD))
    *path, last = at.split("/")
    parent = document
    for step in path:
        parent = parent[int(step)] if isinstance(parent, list) else parent[step]
    if isinstance(parent, list):
        parent[int(last) : int(last) + 1] = [value]
    else:
        parent[last] = value
    with pytest.raises(Invalid) as refused:
        parse_spec(json.dumps(document))
    assert refused.value.fields[0].pointer == pointer
    assert says in refused.value.detail


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"cdiVersion": NaN}', '{"kind": "a", "kind": "b"}', "[" * 100_000, '{"kind": "\\ud800"}'],
)
def test_what_is_no_json_object_is_an_error_and_nothing_worse(text: str) -> None:
    with pytest.raises(Invalid):
        parse_spec(text)


def test_a_file_that_is_no_utf8_is_an_error_and_nothing_worse() -> None:
    with pytest.raises(Invalid, match="is not JSON in UTF-8"):
        parse_spec(b'{"kind": "\xff"}')


_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
_variables = st.builds(lambda k, v: f"{k.replace('=', '_')}={v}", _texts, _texts)
_small = st.integers(0, 2**32 - 1)
_tuples_of_texts = st.lists(_texts, max_size=2).map(tuple)
_nodes = st.builds(
    DeviceNode,
    path=_texts,
    host_path=st.none() | _texts,
    type=st.sampled_from((None, "b", "c", "u", "p")),
    major=st.none() | _small,
    minor=st.none() | _small,
    file_mode=st.none() | _small,
    permissions=st.sampled_from((None, "r", "rw", "rwm")),
    uid=st.none() | _small,
    gid=st.none() | _small,
)
_hooks = st.builds(
    Hook,
    hook_name=st.sampled_from(Hook._NAMES),
    path=_texts,
    args=_tuples_of_texts,
    env=st.lists(_variables, max_size=2).map(tuple),
    timeout=st.none() | st.integers(0, 60),
)
_mounts = st.builds(Mount, host_path=_texts, container_path=_texts, options=_tuples_of_texts, type=st.none() | _texts)
_edits = st.builds(
    Edits,
    env=st.lists(_variables, max_size=2).map(tuple),
    device_nodes=st.lists(_nodes, max_size=2).map(tuple),
    mounts=st.lists(_mounts, max_size=2).map(tuple),
    hooks=st.lists(_hooks, max_size=1).map(tuple),
    additional_gids=st.lists(_small, max_size=2).map(tuple),
)
_annotations = st.dictionaries(st.sampled_from(("a", "a.io/b")), _texts, max_size=2).map(lambda d: tuple(d.items()))
_devices = st.builds(
    Device,
    name=st.from_regex(r"\A[a-zA-Z0-9]([a-z0-9_.:-]{0,6}[a-z0-9])?\Z"),
    edits=_edits.filter(bool),
    annotations=_annotations,
)


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    kind = draw(st.sampled_from(("amdvgpu.io/slice", "vendor/sl.ice")))
    devices = tuple(draw(st.lists(_devices, min_size=1, max_size=3, unique_by=lambda d: d.name)))
    edits, annotations = draw(_edits), draw(_annotations)
    return Spec(minimum_version(kind, devices, edits, annotations), kind, devices, edits, annotations)


@given(specs())
def test_what_is_written_is_read_back_the_same(spec: Spec) -> None:
    assert parse_spec(format_spec(spec)) == spec
