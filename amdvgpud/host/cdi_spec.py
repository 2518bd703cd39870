"""The format of a CDI file: a typed model, one writer and one strict reader, side by side.

Owns what a document may say. Does not own what ours says, nor where it lies (:mod:`amdvgpud.host.cdi`).

Sources: the CDI specification and, where they differ, its reference reader (github.com/cncf-tags/
container-device-interface, ``pkg/cdi`` and ``specs-go``); what podman, containerd and docker were seen to do. The
reader here refuses all that the reference reader refuses, and more: a document that passes is good for every runtime.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import msgspec

from amdvgpud.core.errors import Invalid

KIND: Final = "amdvgpu.io/slice"
"""Of our slices, unless the configuration has another."""

VERSIONS: Final = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
"""Spec versions that exist, oldest first. A reader refuses one that its own table does not hold."""


# ------------------------------------------------------------------------------------------------------------ the model


def need(holds: bool, pointer: str, detail: str) -> None:
    """``Invalid`` at ``pointer`` unless it holds."""
    if not holds:
        raise Invalid.field(pointer, detail)


def _text(value: str, pointer: str, what: str) -> None:
    need(bool(value) and "\0" not in value, pointer, f"{value!r} is no {what}: it is empty or has a NUL in it")


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node in the container; ``host_path`` None: the same path on the host."""

    path: str
    host_path: str | None = None
    type: str | None = None
    major: int | None = None
    minor: int | None = None
    file_mode: int | None = None
    permissions: str | None = None
    uid: int | None = None
    gid: int | None = None

    def __post_init__(self) -> None:
        _text(self.path, "/path", "path")
        need(self.host_path != "", "/hostPath", "'' is no path: leave the key out")
        need(
            self.type in (None, "b", "c", "u", "p"), "/type", f"{self.type!r} is no kind of device node: one of b c u p"
        )
        need(
            not set(self.permissions or "") - set("rwm"),
            "/permissions",
            f"{self.permissions!r} is no device cgroup access: letters of 'rwm' only",
        )
        for key, number in (("/major", self.major), ("/minor", self.minor)):
            need(number is None or -(2**63) <= number < 2**63, key, f"{number} does not fit 64 bits")
        for key, number in (("/fileMode", self.file_mode), ("/uid", self.uid), ("/gid", self.gid)):
            need(number is None or 0 <= number < 2**32, key, f"{number} does not fit 32 bits without sign")


@dataclass(frozen=True, slots=True)
class Mount:
    host_path: str
    container_path: str
    options: tuple[str, ...] = ()
    type: str | None = None

    def __post_init__(self) -> None:
        _text(self.host_path, "/hostPath", "path")
        _text(self.container_path, "/containerPath", "path")


@dataclass(frozen=True, slots=True)
class Hook:
    """A program of the host that the runtime runs at a step of a container's life."""

    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None

    _NAMES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")

    def __post_init__(self) -> None:
        need(self.hook_name in self._NAMES, "/hookName", f"{self.hook_name!r} is not one of {', '.join(self._NAMES)}")
        _text(self.path, "/path", "path")
        _check_environment(self.env)
        need(self.timeout is None or 0 <= self.timeout < 2**31, "/timeout", f"{self.timeout} is no time in seconds")


@dataclass(frozen=True, slots=True)
class Edits:
    """What is changed in a container: of one device, or (``Spec.edits``) once for any device of the file."""

    env: tuple[str, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()
    additional_gids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_environment(self.env)
        for index, gid in enumerate(self.additional_gids):
            need(0 <= gid < 2**32, f"/additionalGids/{index}", f"{gid} does not fit 32 bits without sign")

    def __bool__(self) -> bool:
        return any((self.env, self.device_nodes, self.mounts, self.hooks, self.additional_gids))


def _check_environment(env: tuple[str, ...]) -> None:
    for index, entry in enumerate(env):
        need(
            entry.find("=") > 0 and "\0" not in entry,
            f"/env/{index}",
            f"{entry!r} is no variable: it must read NAME=value",
        )


Annotations = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    edits: Edits
    annotations: Annotations = ()

    _NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?", re.ASCII)

    def __post_init__(self) -> None:
        need(
            self._NAME.fullmatch(self.name) is not None,
            "/name",
            f"{self.name!r} is no device name: letters, digits and inside also _ - . :",
        )
        _check_annotations(self.annotations)
        need(
            bool(self.edits),
            "/containerEdits",
            f"device {self.name!r} would change nothing in a container: readers refuse such an entry",
        )


_KIND_PART: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]", re.ASCII)


def check_kind(kind: str) -> None:
    """``Invalid`` unless ``kind`` is a vendor/class that is safe with every runtime seen so far."""
    vendor, slash, klass = kind.partition("/")
    need(bool(slash), "/kind", f"{kind!r} is no kind: it reads vendor/class, as in {KIND!r}")
    for what, part in (("vendor", vendor), ("class", klass)):
        need(
            len(part) != 1,
            "/kind",
            f"{kind!r} has a {what} of one letter, on which the parser of podman 5 and 6 and of docker 26 and 28 "
            "panics: use two or more",
        )
        need(
            _KIND_PART.fullmatch(part) is not None,
            "/kind",
            f"{part!r} is no {what} of a kind: it begins with a letter, ends with a letter or digit, inside also _ - .",
        )


@dataclass(frozen=True, slots=True)
class Spec:
    """One CDI file. ``version`` is checked against the fields in use, as a reader does it."""

    version: str
    kind: str
    devices: tuple[Device, ...]
    edits: Edits = Edits()
    annotations: Annotations = ()

    def __post_init__(self) -> None:
        need(
            self.version in VERSIONS,
            "/cdiVersion",
            f"{self.version!r} is no CDI version that is known: {', '.join(VERSIONS)}",
        )
        check_kind(self.kind)
        _check_annotations(self.annotations)
        need(bool(self.devices), "/devices", "a file without a device is refused by readers: delete it instead")
        names = [d.name for d in self.devices]
        for index, name in enumerate(names):
            need(
                name not in names[:index],
                f"/devices/{index}/name",
                f"{name!r} occurs twice: readers drop both, the device could not be resolved",
            )
        least = minimum_version(self.kind, self.devices, self.edits, self.annotations)
        need(
            VERSIONS.index(self.version) >= VERSIONS.index(least),
            "/cdiVersion",
            f"{self.version!r} is too low for the fields in use, which need {least!r}: readers refuse such a file",
        )


def minimum_version(kind: str, devices: Iterable[Device], edits: Edits = Edits(), annotations: Annotations = ()) -> str:
    """The lowest version that covers the fields in use; a reader refuses a file that declares less.

    Never the newest: Debian 12's podman resolves nothing from a 0.6.0 file, even if it uses no new field.
    """
    devices = tuple(devices)
    all_edits = (edits, *(d.edits for d in devices))
    needed = "0.3.0"
    if any(m.type is not None for e in all_edits for m in e.mounts):
        needed = "0.4.0"
    if any(n.host_path is not None for e in all_edits for n in e.device_nodes) or any(
        d.name[0].isdigit() for d in devices
    ):
        needed = "0.5.0"
    if annotations or any(d.annotations for d in devices) or "." in kind.partition("/")[2]:
        needed = "0.6.0"
    if any(e.additional_gids for e in all_edits):
        needed = "0.7.0"
    return needed


_ANNOTATION_PREFIX: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", re.ASCII)
_ANNOTATION_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII)
_ANNOTATIONS_BYTES: Final = 256 * 1024


def _check_annotations(annotations: Annotations) -> None:
    for key, _ in annotations:
        prefix, slash, name = key.rpartition("/")
        good = not slash or (len(prefix) <= 253 and _ANNOTATION_PREFIX.fullmatch(prefix) is not None)
        need(
            good and _ANNOTATION_NAME.fullmatch(name) is not None,
            "/annotations",
            f"{key!r} is no annotation key: [DNS name/]name, the name at most 63 of A-Z a-z 0-9 _ - .",
        )
    size = sum(len(k.encode()) + len(v.encode()) for k, v in annotations)
    need(size <= _ANNOTATIONS_BYTES, "/annotations", f"{size} bytes are more than the {_ANNOTATIONS_BYTES} allowed")


# ----------------------------------------------------------------------------------------------- the writer, the reader


def document_of(spec: Spec) -> dict[str, object]:
    """``spec`` as the JSON document, keys in a fixed order, nothing that is unset."""
    return document(spec.version, spec.kind, spec.devices, spec.edits, spec.annotations)


def format_spec(spec: Spec) -> bytes:
    """The bytes of the file. JSON, not YAML: there a slice called ``on`` or ``y`` is a boolean."""
    return _bytes(document_of(spec))


def _bytes(document: Mapping[str, object]) -> bytes:
    # Told to indent, json does without its C encoder: 30 ms instead of 3 for 500 devices, at each change of a slice.
    return msgspec.json.format(json.dumps(document).encode(), indent=2) + b"\n"


def document(
    version: str, kind: str, devices: Iterable[Device], edits: Edits, annotations: Annotations = ()
) -> dict[str, object]:
    return _set(
        cdiVersion=version,
        kind=kind,
        annotations=dict(annotations),
        containerEdits=_edits_document(edits),
    ) | {
        "devices": [
            _set(name=d.name, annotations=dict(d.annotations), containerEdits=_edits_document(d.edits)) for d in devices
        ]
    }


def _set(**pairs: object) -> dict[str, object]:
    return {key: value for key, value in pairs.items() if value not in (None, [], {}, ())}


def _edits_document(edits: Edits) -> dict[str, object]:
    return _set(
        env=list(edits.env),
        deviceNodes=[
            _set(
                path=n.path,
                hostPath=n.host_path,
                type=n.type,
                major=n.major,
                minor=n.minor,
                fileMode=n.file_mode,
                permissions=n.permissions,
                uid=n.uid,
                gid=n.gid,
            )
            for n in edits.device_nodes
        ],
        mounts=[
            _set(hostPath=m.host_path, containerPath=m.container_path, type=m.type, options=list(m.options))
            for m in edits.mounts
        ],
        hooks=[
            _set(hookName=h.hook_name, path=h.path, args=list(h.args), env=list(h.env), timeout=h.timeout)
            for h in edits.hooks
        ],
        additionalGids=list(edits.additional_gids),
    )


_T = TypeVar("_T")


def parse_spec(data: bytes | str) -> Spec:
    """The reader: ``parse_spec(format_spec(s)) == s``. ``Invalid`` names the JSON pointer, the value and the rule.

    Strict where a reference reader is (unknown keys and key spellings, the minimum-version rule), and where one only
    guesses (a null, a number as text). Keys of CDI that we never write (``intelRdt``, ``netDevices``) are refused too.
    """
    try:
        document = json.loads(data, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except RecursionError as error:
        raise Invalid.field("", "the document is nested too deeply to be a CDI file") from error
    except ValueError as error:
        raise Invalid.field("", f"the document is not JSON in UTF-8: {error}") from error
    root = _object(document, "", ("cdiVersion", "kind", "annotations", "containerEdits", "devices"))
    edits = _edits(root.get("containerEdits", {}), "/containerEdits")
    devices = _list(root.get("devices", []), "/devices", _device)
    return _at(
        "",
        lambda: Spec(
            _string(root.get("cdiVersion", ""), "/cdiVersion"),
            _string(root.get("kind", ""), "/kind"),
            devices,
            edits,
            _annotations(root),
        ),
    )


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError(f"a key occurs twice among {[key for key, _ in pairs]}")
    return document


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _at(pointer: str, make: Callable[[], _T]) -> _T:
    """``make()``, with its complaint put at ``pointer``."""
    try:
        return make()
    except Invalid as error:
        inner = error.fields[0]
        raise Invalid.field(pointer + inner.pointer, inner.detail) from error


def _object(value: object, pointer: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Invalid.field(pointer, f"{value!r} is no object")
    for key in value:
        need(key in keys, f"{pointer}/{key}", f"no key that may stand here: one of {', '.join(keys)}")
    return value


def _list(value: object, pointer: str, item: Callable[[object, str], _T]) -> tuple[_T, ...]:
    if not isinstance(value, list):
        raise Invalid.field(pointer, f"{value!r} is no list")
    return tuple(item(entry, f"{pointer}/{index}") for index, entry in enumerate(value))


def _string(value: object, pointer: str) -> str:
    if not isinstance(value, str):
        raise Invalid.field(pointer, f"{value!r} is no text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Invalid.field(pointer, f"{value!r} is not Unicode: half of a surrogate pair") from error
    return value


def _number(value: object, pointer: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise Invalid.field(pointer, f"{value!r} is no whole number")
    return value


def _maybe(source: Mapping[str, object], key: str, pointer: str, item: Callable[[object, str], _T]) -> _T | None:
    return item(source[key], f"{pointer}/{key}") if key in source else None


def _strings(source: Mapping[str, object], key: str, pointer: str) -> tuple[str, ...]:
    return _list(source.get(key, []), f"{pointer}/{key}", _string)


def _annotations(source: Mapping[str, object], pointer: str = "") -> Annotations:
    pairs = source.get("annotations", {})
    if not isinstance(pairs, dict):
        raise Invalid.field(f"{pointer}/annotations", f"{pairs!r} is no object")
    return tuple((key, _string(value, f"{pointer}/annotations/{key}")) for key, value in pairs.items())


def _device(value: object, pointer: str) -> Device:
    source = _object(value, pointer, ("name", "annotations", "containerEdits"))
    name = _string(source.get("name", ""), f"{pointer}/name")
    edits = _edits(source.get("containerEdits", {}), f"{pointer}/containerEdits")
    annotations = _annotations(source, pointer)
    return _at(pointer, lambda: Device(name, edits, annotations))


def _edits(value: object, pointer: str) -> Edits:
    source = _object(value, pointer, ("env", "deviceNodes", "mounts", "hooks", "additionalGids"))
    parts = (
        _strings(source, "env", pointer),
        _list(source.get("deviceNodes", []), f"{pointer}/deviceNodes", _device_node),
        _list(source.get("mounts", []), f"{pointer}/mounts", _mount),
        _list(source.get("hooks", []), f"{pointer}/hooks", _hook),
        _list(source.get("additionalGids", []), f"{pointer}/additionalGids", _number),
    )
    return _at(pointer, lambda: Edits(*parts))


def _device_node(value: object, pointer: str) -> DeviceNode:
    keys = ("path", "hostPath", "type", "major", "minor", "fileMode", "permissions", "uid", "gid")
    source = _object(value, pointer, keys)
    path = _string(source.get("path", ""), f"{pointer}/path")
    texts = {key: _maybe(source, key, pointer, _string) for key in ("hostPath", "type", "permissions")}
    numbers = {key: _maybe(source, key, pointer, _number) for key in ("major", "minor", "fileMode", "uid", "gid")}
    return _at(
        pointer,
        lambda: DeviceNode(
            path,
            texts["hostPath"],
            texts["type"],
            numbers["major"],
            numbers["minor"],
            numbers["fileMode"],
            texts["permissions"],
            numbers["uid"],
            numbers["gid"],
        ),
    )


def _mount(value: object, pointer: str) -> Mount:
    source = _object(value, pointer, ("hostPath", "containerPath", "type", "options"))
    paths = [_string(source.get(key, ""), f"{pointer}/{key}") for key in ("hostPath", "containerPath")]
    options = _strings(source, "options", pointer)
    kind = _maybe(source, "type", pointer, _string)
    return _at(pointer, lambda: Mount(paths[0], paths[1], options, kind))


def _hook(value: object, pointer: str) -> Hook:
    source = _object(value, pointer, ("hookName", "path", "args", "env", "timeout"))
    texts = [_string(source.get(key, ""), f"{pointer}/{key}") for key in ("hookName", "path")]
    args, env = _strings(source, "args", pointer), _strings(source, "env", pointer)
    timeout = _maybe(source, "timeout", pointer, _number)
    return _at(pointer, lambda: Hook(texts[0], texts[1], args, env, timeout))


# ------------------------------------------------------------------------------------------------------ what is written


def without_hooks(spec: Spec) -> Spec:
    """``spec`` as it is when there is no program to run: what a removal of the package leaves behind must not fail."""

    def bare(edits: Edits) -> Edits:
        return replace(edits, hooks=())

    devices = tuple(replace(device, edits=bare(device.edits)) for device in spec.devices)
    return replace(spec, devices=devices, edits=bare(spec.edits))


def proven(spec: Spec) -> bytes:
    """The bytes of the file, after they were read back; ``Invalid`` where they do not say what was meant."""
    data = format_spec(spec)
    need(parse_spec(data) == spec, "", "the document does not read back as what was meant")
    _once_each(spec)
    return data


def _once_each(spec: Spec) -> None:
    """``Invalid`` where one device brings a path or a variable twice; readers let the last one win, silently."""
    for device in spec.devices:
        both = (spec.edits, device.edits)
        keys = [entry.partition("=")[0] for e in both for entry in e.env]
        keys += [n.path for e in both for n in e.device_nodes] + [m.container_path for e in both for m in e.mounts]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        need(not twice, "/devices", f"device {device.name!r} sets {', '.join(twice)} twice")
