"""The CDI file: how a container runtime learns what the name ``amdvgpu.io/slice=alice`` stands for.

Owns the format (typed model, one writer, one strict reader, side by side), the rendering of slices into it, and the
one file ``<vendor>-<class>.json``: written aside, checked, renamed; whole at every moment. Does not own the files it
mounts into containers (``host/ledger.py``) nor the values of the variables (``core/render.py``).

Sources: the CDI specification and, where they differ, its reference reader (github.com/cncf-tags/
container-device-interface, ``pkg/cdi`` and ``specs-go``); what podman, containerd and docker were seen to do. The
reader here refuses all that the reference reader refuses, and more: a document that passes is good for every runtime.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from amdvgpud.core.cumask import layout_hash
from amdvgpud.core.errors import AmdvgpuError, Invalid
from amdvgpud.core.model import Inventory, Partition, Slice, SliceName
from amdvgpud.core.render import PLATFORM_FOLDER, STAND_IN_FOLDER, container_environment, preload_line
from amdvgpud.ports import CdiStatus

log = logging.getLogger(__name__)

KIND: Final = "amdvgpu.io/slice"
STANDARD_DIRS: Final = (Path("/etc/cdi"), Path("/var/run/cdi"))
"""Where runtimes look unless told otherwise; the later one wins."""

VERSIONS: Final = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
"""Spec versions that exist, oldest first. A reader refuses one that its own table does not hold."""

ENOUGH: Final = "0.5.0"
"""What our rendering needs at most: a slice name may begin with a digit, a device node may have a host path."""

GATE_IN_CONTAINER: Final = "/usr/lib/amdvgpu/libamdvgpu.so"
SOFTKFD_IN_CONTAINER: Final = "/usr/lib/amdvgpu/libsoftkfd.so"
SOFTKFD_ROOT_IN_CONTAINER: Final = "/run/softkfd"
"""Where the emulator looks when no variable tells it, so that an empty environment does not take the GPUs away."""
SLICES_IN_CONTAINER: Final = "/run/amdvgpu"
PRELOAD_IN_CONTAINER: Final = "/etc/ld.so.preload"
TOPOLOGY: Final = "/sys/devices/virtual/kfd/kfd/topology/nodes"

NODE_MODE: Final = 0o666
"""Mode of the injected device nodes.

Said, because silence means different things: 0666 with podman 4.3 and 5.4, containerd 2.1 and docker 28 (seen), the
host's own mode with the newest reader (read in its source). 0666, because the door is the container and not its user
accounts: a root process and one of uid 1000 in one container share one account (and one ledger, 0666 for the same
reason), whatever ``render`` is numbered here. Refused: group and mode taken from the host's node. That number would
have to be stored in the file, it means nothing in the image's /etc/group, and whoever lacks it needs ``--group-add``.
No uid, gid, major or minor either: the runtime reads the device numbers at creation (the major of /dev/kfd is dynamic).
Podman makes the container's user the owner then, docker 26 root (seen): without this mode its other users are out. A
rootless runtime ignores all of it and bind-mounts the host's node: there group ``render`` and keep-groups decide. What
would change our mind: a /dev shared between containers.
"""


# ------------------------------------------------------------------------------------------------------- the format


def _need(holds: bool, pointer: str, detail: str) -> None:
    if not holds:
        raise Invalid.field(pointer, detail)


def _text(value: str, pointer: str, what: str) -> None:
    _need(bool(value) and "\0" not in value, pointer, f"{value!r} is no {what}: it is empty or has a NUL in it")


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
        _need(self.host_path != "", "/hostPath", "'' is no path: leave the key out")
        _need(
            self.type in (None, "b", "c", "u", "p"), "/type", f"{self.type!r} is no kind of device node: one of b c u p"
        )
        _need(
            not set(self.permissions or "") - set("rwm"),
            "/permissions",
            f"{self.permissions!r} is no device cgroup access: letters of 'rwm' only",
        )
        for key, number in (("/major", self.major), ("/minor", self.minor)):
            _need(number is None or -(2**63) <= number < 2**63, key, f"{number} does not fit 64 bits")
        for key, number in (("/fileMode", self.file_mode), ("/uid", self.uid), ("/gid", self.gid)):
            _need(number is None or 0 <= number < 2**32, key, f"{number} does not fit 32 bits without sign")


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
        _need(self.hook_name in self._NAMES, "/hookName", f"{self.hook_name!r} is not one of {', '.join(self._NAMES)}")
        _text(self.path, "/path", "path")
        _check_environment(self.env)
        _need(self.timeout is None or 0 <= self.timeout < 2**31, "/timeout", f"{self.timeout} is no time in seconds")


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
            _need(0 <= gid < 2**32, f"/additionalGids/{index}", f"{gid} does not fit 32 bits without sign")

    def __bool__(self) -> bool:
        return any((self.env, self.device_nodes, self.mounts, self.hooks, self.additional_gids))


def _check_environment(env: tuple[str, ...]) -> None:
    for index, entry in enumerate(env):
        _need(
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
        _need(
            self._NAME.fullmatch(self.name) is not None,
            "/name",
            f"{self.name!r} is no device name: letters, digits and inside also _ - . :",
        )
        _check_annotations(self.annotations)
        _need(
            bool(self.edits),
            "/containerEdits",
            f"device {self.name!r} would change nothing in a container: readers refuse such an entry",
        )


_KIND_PART: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]", re.ASCII)


def check_kind(kind: str) -> None:
    """``Invalid`` unless ``kind`` is a vendor/class that is safe with every runtime seen so far."""
    vendor, slash, klass = kind.partition("/")
    _need(bool(slash), "/kind", f"{kind!r} is no kind: it reads vendor/class, as in {KIND!r}")
    for what, part in (("vendor", vendor), ("class", klass)):
        _need(
            len(part) != 1,
            "/kind",
            f"{kind!r} has a {what} of one letter, on which the parser of podman 5 and 6 and of docker 26 and 28 "
            "panics: use two or more",
        )
        _need(
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
        _need(
            self.version in VERSIONS,
            "/cdiVersion",
            f"{self.version!r} is no CDI version that is known: {', '.join(VERSIONS)}",
        )
        check_kind(self.kind)
        _check_annotations(self.annotations)
        _need(bool(self.devices), "/devices", "a file without a device is refused by readers: delete it instead")
        names = [d.name for d in self.devices]
        for index, name in enumerate(names):
            _need(
                name not in names[:index],
                f"/devices/{index}/name",
                f"{name!r} occurs twice: readers drop both, the device could not be resolved",
            )
        least = minimum_version(self.kind, self.devices, self.edits, self.annotations)
        _need(
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
        _need(
            good and _ANNOTATION_NAME.fullmatch(name) is not None,
            "/annotations",
            f"{key!r} is no annotation key: [DNS name/]name, the name at most 63 of A-Z a-z 0-9 _ - .",
        )
    size = sum(len(k.encode()) + len(v.encode()) for k, v in annotations)
    _need(size <= _ANNOTATIONS_BYTES, "/annotations", f"{size} bytes are more than the {_ANNOTATIONS_BYTES} allowed")


# ------------------------------------------------------------------------------------------- format: writer, reader


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
        _need(key in keys, f"{pointer}/{key}", f"no key that may stand here: one of {', '.join(keys)}")
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


# --------------------------------------------------------------------------------------------------------- the file


@dataclass(frozen=True, slots=True)
class SimulatedDevices:
    """A simulated node: ``root`` holds its ``sys/`` and ``dev/`` (plain files), ``softkfd`` is the emulator library."""

    root: Path
    softkfd: Path


HOOK_TIMEOUT_S: Final = 10
"""After this the runtime itself ends a hook, and fails the start. The hook gives up long before (100 ms; 5 s where a
policy may refuse): this is for one that the machine does not let run at all, and is a guess."""


@dataclass(frozen=True, slots=True)
class HookCall:
    """The program that tells the daemon of containers (cdi/hook), and what it is told besides step and slice."""

    program: Path
    arguments: tuple[str, ...] = ()

    def there(self) -> bool:
        """A runtime fails each start whose hook is missing, so it is named only while it is there."""
        return os.access(self.program, os.X_OK) and self.program.is_file()

    def hooks(self, name: str) -> tuple[Hook, ...]:
        # createRuntime, not prestart: that one is deprecated. Not createContainer, which knows no pid (seen).
        return tuple(
            Hook(step, str(self.program), (self.program.name, word, name, *self.arguments), timeout=HOOK_TIMEOUT_S)
            for step, word in (("createRuntime", "start"), ("poststop", "stop"))
        )


def without_hooks(spec: Spec) -> Spec:
    """``spec`` as it is when there is no program to run: what a removal of the package leaves behind must not fail."""

    def bare(edits: Edits) -> Edits:
        return replace(edits, hooks=())

    devices = tuple(replace(device, edits=bare(device.edits)) for device in spec.devices)
    return replace(spec, devices=devices, edits=bare(spec.edits))


_SLICES_OPTIONS: Final = ("ro", "nosuid", "nodev", "noexec", "mode=755", "size=64k")
_GUEST_OPTIONS: Final = ("ro", "nosuid", "nodev", "noexec", "bind")
_LEDGER_OPTIONS: Final = ("rw", "nosuid", "nodev", "noexec", "bind")
_LIBRARY_OPTIONS: Final = ("ro", "nosuid", "nodev", "bind")
_OVERLAY_OPTIONS: Final = ("ro", "bind")
_PLAIN_NODE_OPTIONS: Final = ("rw", "nosuid", "nodev", "bind")
"""Not noexec: the runtime maps a device's memory executable, and here that memory is the plain file."""


class CdiFile:
    """The file of this node's slices in ``cdi_dir``; the implementation of :class:`amdvgpud.ports.CdiSpecs`.

    ``run_dir`` is where the slices' directories lie (``slices/<name>/guest``); ``library`` the gate on this host;
    ``sysfs_root`` where device nodes are looked for. ``simulated`` changes the rendering to plain files bind-mounted
    at the device paths. ``card_nodes`` adds the DRM primary node of each partition (wanted by a few display programs,
    by ROCm never). ``version_limit`` is the newest CDI version an operator allows in the file. ``hook`` is named in it
    for as long as its program is there.

    ``Invalid`` at construction for a kind that a runtime would choke on and for a limit below what slices need, so that
    a bad setting stops the start and never breaks a file.
    """

    def __init__(
        self,
        cdi_dir: Path,
        *,
        run_dir: Path,
        library: Path,
        sysfs_root: Path = Path("/"),
        simulated: SimulatedDevices | None = None,
        kind: str = KIND,
        card_nodes: bool = False,
        version_limit: str | None = None,
        standard_dirs: Sequence[Path] = STANDARD_DIRS,
        hook: HookCall | None = None,
    ) -> None:
        check_kind(kind)
        vendor, _, klass = kind.partition("/")
        _need(
            vendor != "amd.com",
            "/cdi/kind",
            f"{kind!r} is refused: docker 29.3 and later take any file of vendor 'amd.com' for AMD's own toolkit and "
            f"point --gpus at it; use a vendor of your own, as in {KIND!r}",
        )
        _need(
            "." not in klass,
            "/cdi/kind",
            f"{kind!r} has a dot in its class, which needs CDI 0.6.0: podman before 4.9 would resolve no slice",
        )
        if version_limit is not None:
            _need(
                version_limit in VERSIONS,
                "/cdi/version_limit",
                f"{version_limit!r} is no CDI version that is known: {', '.join(VERSIONS)}",
            )
            _need(
                VERSIONS.index(version_limit) >= VERSIONS.index(ENOUGH),
                "/cdi/version_limit",
                f"{version_limit!r} is too low: a slice name may begin with a digit, which needs {ENOUGH!r}; "
                f"allow {ENOUGH!r} (every runtime with CDI since podman 4.3 reads it) or leave the limit out",
            )
        self.path = cdi_dir / f"{vendor}-{klass}.json"
        self._kind = kind
        self._run_dir = run_dir
        self._library = library
        self._host = simulated.root if simulated else sysfs_root
        self._simulated = simulated
        self._card_nodes = card_nodes
        self._standard_dirs = tuple(standard_dirs)
        self._hook = hook
        self._status = CdiStatus(str(self.path), written=self.path.exists(), error=None, conflicts=())
        self._rendered: dict[str, tuple[tuple[Slice, ...], Inventory, HookCall | None, Device]] = {}
        """Devices as of the last :meth:`publish`: of hundreds, a change of one slice changes its container's."""

    # ------------------------------------------------------------------------------------------------ CdiSpecs

    def publish(self, slices: Sequence[Slice], inventory: Inventory) -> CdiStatus:
        """Make the file say what ``slices`` are. Does not raise: on failure the previous file stays, status says why.

        The mounts' sources must exist before (a runtime fails a container for a missing one), so the files of a slice
        are written first and removed last; the preload file, which belongs to no slice, is written here.
        """
        error = None
        written = False
        try:
            hook = self._live_hook()
            devices, edits = self._devices(slices, inventory, hook), self._common()
            if devices:
                spec = Spec(minimum_version(self._kind, devices, edits), self._kind, devices, edits)
                data = proven(spec)
                replace_file(self._run_dir / "ld.so.preload", self._preload())
                replace_file(self.path, data)
                written = True
                items = {item.name: item for item in slices}
                self._rendered = {
                    d.name: (_together(items[SliceName(d.name)], items), inventory, hook, d) for d in devices
                }
            else:
                remove_file(self.path)  # readers refuse an empty list of devices
        except (AmdvgpuError, OSError) as failure:
            error = f"{self.path} was left as it is: {failure}"
            if error != self._status.error:
                log.warning("%s", error)
        self._status = CdiStatus(str(self.path), written, error, self._conflicts([s.name for s in slices]))
        return self._status

    def render(self, slices: Sequence[Slice], inventory: Inventory) -> dict[str, object]:
        """The document that :meth:`publish` would write; nothing is written (``devices`` may be empty here)."""
        devices, edits = self._devices(slices, inventory, self._live_hook()), self._common()
        return document(minimum_version(self._kind, devices, edits), self._kind, devices, edits)

    def status(self) -> CdiStatus:
        """As of the last :meth:`publish`."""
        return self._status

    # ----------------------------------------------------------------------------------------------- rendering

    def _live_hook(self) -> HookCall | None:
        return self._hook if self._hook is not None and self._hook.there() else None

    def _devices(self, slices: Sequence[Slice], inventory: Inventory, hook: HookCall | None) -> tuple[Device, ...]:
        """One device a live slice, by name. Lost ones are left out: a name that cannot be resolved is a clear error
        at container start, a mask cut for another layout is somebody else's silicon."""
        devices = []
        items = {item.name: item for item in slices}
        for item in slices:
            group = _together(item, items)
            before, on, by, device = self._rendered.get(item.name, ((), None, None, None))
            # The very same objects: comparing them would cost as much as rendering. Card nodes are looked up on disk.
            same = len(before) == len(group) and all(map(is_, before, group)) and on is inventory and by is hook
            if device is not None and same and not self._card_nodes:
                devices.append(device)
            elif places := _live_partitions(item, inventory):
                group = tuple(each for each in group if _live_partitions(each, inventory))
                devices.append(self._device(item, group, places, inventory, hook))
        return tuple(sorted(devices, key=lambda d: d.name))

    def _device(
        self,
        item: Slice,
        group: tuple[Slice, ...],
        places: tuple[Partition, ...],
        inventory: Inventory,
        hook: HookCall | None,
    ) -> Device:
        guest = self._run_dir / "slices" / item.name / "guest"
        inside = f"{SLICES_IN_CONTAINER}/{item.name}"
        env = tuple(f"{key}={value}" for key, value in container_environment(group, inventory).items())
        mounts = [
            Mount(str(guest), inside, _GUEST_OPTIONS),
            Mount(str(guest / "ledger"), f"{inside}/ledger", _LEDGER_OPTIONS),
        ]
        nodes: list[DeviceNode] = []
        for place in places:
            paths = [f"/dev/dri/renderD{place.render_minor}", *self._cards_of(place)]
            if self._simulated:
                mounts += [plain_node(self._simulated, path) for path in paths]
                continue
            nodes += [self._node(path) for path in paths]
            # For programs that the gate is not in (static, musl): the gate itself answers reads of this file with the
            # sum of all the container's slices of the GPU. Of two slices of one GPU the runtime keeps one mount, the
            # later slice's: such a program then sees less than it has, never more.
            overlay = f"{TOPOLOGY}/{place.kfd_node}/mem_banks/0/properties"
            mounts.append(Mount(str(guest / f"mem_banks-{place.kfd_gpu_id}"), overlay, _OVERLAY_OPTIONS))
        return Device(item.name, Edits(env, tuple(nodes), tuple(mounts), hook.hooks(item.name) if hook else ()))

    def _common(self) -> Edits:
        """The edits of the whole file: readers apply them once, however many of its devices a container gets."""
        # What lies below this is all that the gate believes. Without a mount of its own, root of a container could put
        # a policy beside ours there, which adds a quota (tried), or rename the folder. runc and crun make it read-only
        # last, when the slices' mounts stand in it; one that did it at once would fail the container, not the limit.
        slices = Mount("tmpfs", SLICES_IN_CONTAINER, _SLICES_OPTIONS, type="tmpfs")
        gate: tuple[Mount, ...] = (
            slices,
            Mount(str(self._library), GATE_IN_CONTAINER, _LIBRARY_OPTIONS),
            Mount(str(self._run_dir / "ld.so.preload"), PRELOAD_IN_CONTAINER, _LIBRARY_OPTIONS),
        )
        if self._by_platform():
            inside = GATE_IN_CONTAINER.rpartition("/")[0]
            beside = (PLATFORM_FOLDER, STAND_IN_FOLDER)
            gate += tuple(
                Mount(str(self._library.parent / name), f"{inside}/{name}", _LIBRARY_OPTIONS) for name in beside
            )
        if self._simulated is None:
            return Edits((), (self._node("/dev/kfd"),), gate)
        # A runtime takes no plain file as a device node, and cannot mount at a path of sysfs that does not exist.
        # Writable: the emulator keeps what all processes have allocated in its root. That tree is no secret and no
        # limit, it is the make-believe hardware.
        root = Mount(str(self._simulated.root), SOFTKFD_ROOT_IN_CONTAINER, _PLAIN_NODE_OPTIONS)
        softkfd = Mount(str(self._simulated.softkfd), SOFTKFD_IN_CONTAINER, _LIBRARY_OPTIONS)
        return Edits((), (), (*gate, softkfd, root, plain_node(self._simulated, "/dev/kfd")))

    def _preload(self) -> bytes:
        """Gate before emulator: the first to be asked must be the one that limits, the other answers by itself."""
        lines = [GATE_IN_CONTAINER] + ([SOFTKFD_IN_CONTAINER] if self._simulated else [])
        return "".join(f"{preload_line(line, self._by_platform())}\n" for line in lines).encode()

    def _by_platform(self) -> bool:
        """Whether the library was installed with what spares 32-bit programs a complaint (packages do; wheels cannot
        hold links)."""
        return all((self._library.parent / name).is_dir() for name in (PLATFORM_FOLDER, STAND_IN_FOLDER))

    def _node(self, path: str) -> DeviceNode:
        on_host = str(self._host / path.lstrip("/"))
        # no "m": a container that may use its GPU needs no right to make nodes of it
        return DeviceNode(path, None if on_host == path else on_host, file_mode=NODE_MODE, permissions="rw")

    def _cards_of(self, place: Partition) -> list[str]:
        if not self._card_nodes:
            return []
        beside = self._host / f"sys/class/drm/renderD{place.render_minor}/device/drm"
        return sorted(f"/dev/dri/{entry.name}" for entry in beside.glob("card*"))

    # ----------------------------------------------------------------------------------------------- conflicts

    def _conflicts(self, names: Sequence[str]) -> tuple[str, ...]:
        """What in the CDI directories keeps our names from being resolved, or resolves them to something else."""
        found: list[str] = []
        own_dir = self.path.parent
        if own_dir.is_dir() and stat.S_IMODE(own_dir.stat().st_mode) & 0o005 != 0o005:
            found.append(f"{own_dir} is closed to other users: a rootless runtime reads no CDI file in it (chmod 0755)")
        for folder in _distinct_dirs((*self._standard_dirs, own_dir)):
            for other in _entries(folder):
                if other.suffix not in (".json", ".yaml") or other == self.path or not os.path.isfile(other):  # noqa: PTH113
                    continue  # (Path.is_file raises for what we may not look at)
                clash = _names_in(other, self._kind) & set(names)
                unread = other.suffix == ".yaml" and _mentions(other, self._kind)
                if not clash and not unread:
                    continue
                what = ", ".join(sorted(clash)) if clash else "devices of this kind (YAML, not looked into)"
                effect = (
                    "runtimes then resolve neither"
                    if folder == own_dir
                    else "the directory that a runtime reads last wins"
                )
                found.append(f"{other} also names {self._kind}={what}: {effect}; remove one of the two")
        return tuple(found)


def _entries(folder: Path) -> list[Path]:
    """What lies in ``folder``; what we may not read, a runtime of ours need not resolve: nothing."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def plain_node(simulated: SimulatedDevices, path: str) -> Mount:
    return Mount(str(simulated.root / path.lstrip("/")), path, _PLAIN_NODE_OPTIONS)


def _together(item: Slice, items: Mapping[SliceName, Slice]) -> tuple[Slice, ...]:
    """``item`` and the slices that its container has beside it, as far as they are made."""
    return tuple(items[name] for name in item.request.together if name in items) or (item,)


def _live_partitions(item: Slice, inventory: Inventory) -> tuple[Partition, ...]:
    """The Partitions of ``item`` in order; empty if one is gone or has another layout than its CUs were cut for."""
    found = []
    for share in item.shares:
        place = inventory.partition(share.partition)
        if place is None or layout_hash(place.layout) != share.layout_hash:
            return ()
        found.append(place)
    return tuple(found)


def proven(spec: Spec) -> bytes:
    """The bytes of the file, after they were read back; ``Invalid`` where they do not say what was meant."""
    data = format_spec(spec)
    _need(parse_spec(data) == spec, "", "the document does not read back as what was meant")
    _once_each(spec)
    return data


def _once_each(spec: Spec) -> None:
    """``Invalid`` where one device brings a path or a variable twice; readers let the last one win, silently."""
    for device in spec.devices:
        both = (spec.edits, device.edits)
        keys = [entry.partition("=")[0] for e in both for entry in e.env]
        keys += [n.path for e in both for n in e.device_nodes] + [m.container_path for e in both for m in e.mounts]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        _need(not twice, "/devices", f"device {device.name!r} sets {', '.join(twice)} twice")


def _distinct_dirs(dirs: Iterable[Path]) -> list[Path]:
    """``dirs`` without those that are a later one's second name (/var/run is a link to /run)."""
    return list({os.path.realpath(d): d for d in dirs}.values())


_CONFLICT_BYTES: Final = 4 * 2**20
"""Guessed: a thousand devices take less. What lies beyond is not looked into."""


def _read_some(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_CONFLICT_BYTES)
    except OSError:
        return b""


def _mentions(path: Path, kind: str) -> bool:
    return (
        re.search(rb"^\"?kind\"?\s*:\s*[\"']?" + re.escape(kind.encode()) + rb"\b", _read_some(path), re.MULTILINE)
        is not None
    )


def _names_in(path: Path, kind: str) -> set[str]:
    """Names of ``kind`` that a foreign JSON file gives, as far as it can be read; what is malformed, readers skip."""
    try:
        document = json.loads(_read_some(path))
        if document["kind"] != kind:
            return set()
        return {device["name"] for device in document["devices"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return set()


# ---------------------------------------------------------------------------------------------------- atomic writes


def replace_file(path: Path, data: bytes) -> None:
    """Make ``path`` hold ``data``, mode 0644 in a directory of mode 0755, whatever the umask; equal bytes: no write.

    The temporary file lies in the same directory, because watching runtimes notice a rename inside it and none into
    it, and ends in ``.tmp``, because a reader takes even ``.x.json`` for a spec, and then our names are there twice.
    One left behind by a power cut is never read by anybody.
    """
    if _holds(path, data):
        return
    _make_dirs(path.parent)
    fd, name = tempfile.mkstemp(prefix="amdvgpu-", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(fd, 0o644)
            os.fsync(fd)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_dir(path.parent)


def _holds(path: Path, data: bytes) -> bool:
    try:
        mode = path.lstat().st_mode
        return stat.S_ISREG(mode) and stat.S_IMODE(mode) == 0o644 and path.read_bytes() == data
    except OSError:
        return False


def remove_file(path: Path) -> None:
    try:
        path.unlink()
    except FileNotFoundError:
        return
    _sync_dir(path.parent)


def _make_dirs(folder: Path) -> None:
    """Make ``folder`` and what is missing above it, 0755; what is there keeps its mode: it may be somebody else's."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    for part in reversed(missing):
        try:
            part.mkdir()
        except FileExistsError:
            continue
        part.chmod(0o755)


def _sync_dir(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
