"""The CDI file: how a container runtime learns what the name ``amdvgpu.io/slice=alice`` stands for.

Owns the rendering of slices into it, and the one file ``<vendor>-<class>.json``: written aside, checked, renamed; whole
at every moment. Does not own the format (:mod:`amdvgpud.host.cdi_spec`), the files it mounts into containers
(``host/ledger.py``) nor the values of the variables (``core/render.py``).
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from pathlib import Path
from typing import Final

from amdvgpud.core.cumask import layout_hash
from amdvgpud.core.errors import AmdvgpuError
from amdvgpud.core.model import Inventory, Partition, Slice, SliceName
from amdvgpud.core.render import PLATFORM_FOLDER, STAND_IN_FOLDER, container_environment, preload_line
from amdvgpud.host.cdi_spec import (
    KIND,
    VERSIONS,
    Device,
    DeviceNode,
    Edits,
    Hook,
    Mount,
    Spec,
    check_kind,
    document,
    minimum_version,
    need,
    proven,
)
from amdvgpud.ports import CdiStatus

log = logging.getLogger(__name__)

STANDARD_DIRS: Final = (Path("/etc/cdi"), Path("/var/run/cdi"))
"""Where runtimes look unless told otherwise; the later one wins."""

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
        need(
            vendor != "amd.com",
            "/cdi/kind",
            f"{kind!r} is refused: docker 29.3 and later take any file of vendor 'amd.com' for AMD's own toolkit and "
            f"point --gpus at it; use a vendor of your own, as in {KIND!r}",
        )
        need(
            "." not in klass,
            "/cdi/kind",
            f"{kind!r} has a dot in its class, which needs CDI 0.6.0: podman before 4.9 would resolve no slice",
        )
        if version_limit is not None:
            need(
                version_limit in VERSIONS,
                "/cdi/version_limit",
                f"{version_limit!r} is no CDI version that is known: {', '.join(VERSIONS)}",
            )
            need(
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
