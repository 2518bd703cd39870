"""What this machine lacks for slices of its GPUs, each lack with its cure.

Owns two halves that meet in one small record: :func:`read_probe` asks the machine and judges nothing; :func:`findings`
judges the record and asks nothing, so every verdict can be tried with a machine that does not exist. Changes nothing,
and never opens ``/dev/kfd``: an open one would hold up a change of the partition mode.

Sources: Documentation/gpu/amdgpu and amdkfd's topology in sysfs, cgroups(7), selinuxfs, the configuration files of
docker, containerd and CRI-O; what each runtime accepts is :mod:`amdvgpud.core.cdi_runtimes`'.
"""

from __future__ import annotations

import grp
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from amdvgpud.core import wire
from amdvgpud.core.cdi_runtimes import (
    CDI_VERSION,
    looks_into,
    missing_access,
    refusal,
    to_switch_on,
    words_of,
)
from amdvgpud.core.errors import HostFailure, Invalid
from amdvgpud.ctl.client import Client, ClientError, NotPermitted

State = Literal["ok", "note", "missing"]
"""``note``: works, but somebody should know. ``missing``: something will not work, and ``cure`` says how it would."""

_AMD: Final = "0x1002"
_DISPLAY_CLASSES: Final = ("0x03", "0x12")
"""PCI base classes of a GPU: display controller (VGA, 3D) and processing accelerator (Instinct)."""

_PAIRED_MASKS: Final = (6, 0)
"""First kernel whose amdgpu deals CU mask bits of gfx10 and later out by whole WGPs (commit cff35798fad5)."""


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    state: State
    text: str
    cure: str = ""


# ------------------------------------------------------------------------------------------------------- the record


@dataclass(frozen=True, slots=True)
class DeviceNode:
    path: str
    mode: int
    group: tuple[int, str]
    """(number, name); the number again where it has no name."""
    usable: bool
    """This process may read and write it."""


@dataclass(frozen=True, slots=True)
class Runtime:
    name: str
    version: str
    """As it prints it; '' where it does not say."""
    switched_on: bool = False
    """Its configuration switches CDI on in so many words."""
    dirs: tuple[str, ...] | None = None
    """CDI directories that its configuration names; None: it names none, so its own defaults hold."""


@dataclass(frozen=True, slots=True)
class Image:
    """An unpacked image, as far as the gate's loading depends on it."""

    root: str
    loaders: tuple[str, ...]
    """File names of the dynamic loaders in it; none: only static programs can run."""
    preload: tuple[str, ...]
    """Lines of its own /etc/ld.so.preload, which ours is mounted over."""
    machine: str
    """The architecture of the host, as uname calls it."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """What the daemon said of itself; ``trouble`` says why it did not, and then the rest is empty."""

    trouble: str = ""
    forbidden: bool = False
    system: wire.SystemView | None = None
    cdi: wire.CdiView | None = None
    lost: tuple[tuple[str, str], ...] = ()
    """(slice, reason)"""
    unusable: tuple[tuple[str, str], ...] = ()
    """(device, reason)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One machine, seen by one user. The defaults are a machine with nothing wrong, and without an image to look at."""

    uid: int = 0
    groups: frozenset[int] = frozenset()
    kernel: str = "6.12.0"
    driver_loaded: bool = True
    driver_version: str | None = None
    """Of an out-of-tree (DKMS) amdgpu; the kernel's own says none."""
    gpus: tuple[str, ...] = ("0000:03:00.0",)
    """PCI addresses of AMD's display and accelerator functions."""
    gfx_majors: frozenset[int] = frozenset({9})
    """Of the GPUs that the KFD shows to this process."""
    kfd: DeviceNode | None = DeviceNode("/dev/kfd", 0o666, (0, "root"), True)
    render_nodes: tuple[DeviceNode, ...] = (DeviceNode("/dev/dri/renderD128", 0o666, (0, "root"), True),)
    """Of amdgpu; other drivers' are left out."""
    selinux_enforces: bool = False
    container_use_devices: bool | None = None
    """The SELinux boolean; None: the policy has none, or there is no SELinux."""
    cgroups: Literal["v2", "hybrid", "v1", "none"] = "v2"
    dmem: bool = True
    """The controller is there and has a region of amdgpu."""
    user_namespaces: bool = True
    """A user without rights may make one, with mounts of their own in it."""
    guest_root: bool = True
    """/run/amdvgpu is there to mount on."""
    writable: tuple[tuple[str, int], ...] = ()
    """(slice, pid of one process) where a slice's directory is mounted and may be written to."""
    runtimes: tuple[Runtime, ...] = (Runtime("podman", "5.4.2"),)
    gate: str = "/usr/lib/amdvgpu/libamdvgpu.so"
    """Path of the library; '' with ``gate_trouble``."""
    gate_trouble: str = ""
    daemon: Daemon = Daemon()
    image: Image | None = None


# ----------------------------------------------------------------------------------------------------- the verdicts


def findings(probe: Probe) -> Iterator[Finding]:
    """What is well and what is missing, from the silicon upwards. Without GPUs of one's own, a simulated machine's
    daemon is judged as any other: what the hardware lacks is then a note."""
    simulated = bool(probe.daemon.system and probe.daemon.system.simulated)
    for finding in _hardware(probe):
        yield Finding(finding.subject, "note", finding.text) if simulated and finding.state == "missing" else finding
    yield from _kernel(probe)
    yield from _gate(probe)
    yield from _run(probe)
    for name, pid in probe.writable:
        yield Finding(
            f"slice {name}",
            "missing",
            f"process {pid} has it mounted writable, so that the gate does not take it for one and holds nothing",
            "mount its guest directory read-only and its ledger writable over that, as its CDI device does",
        )
    yield from _daemon(probe.daemon)
    yield from _runtimes(probe)
    if probe.image is not None:
        yield from _image(probe.image)


def _hardware(probe: Probe) -> Iterator[Finding]:
    if not probe.gpus:
        yield Finding("GPUs", "missing", "no AMD GPU on the PCI bus", "try the product: amdvgpud --simulate mi300x")
    else:
        yield Finding("GPUs", "ok", ", ".join(probe.gpus))
    if not probe.driver_loaded:
        yield Finding(
            "driver",
            "missing",
            "the module amdgpu is not loaded",
            "modprobe amdgpu; if that fails, dmesg says why (a missing linux-firmware package, a blacklist, vfio)",
        )
        return
    yield Finding("driver", "ok", f"amdgpu {probe.driver_version or 'of the kernel'} is loaded")
    if probe.kfd is None:
        yield Finding(
            "/dev/kfd",
            "missing",
            "amdgpu is loaded, but there is no /dev/kfd",
            "a kernel with CONFIG_HSA_AMD; in a container or VM: hand the device in",
        )
    if not probe.render_nodes:
        yield Finding(
            "render nodes",
            "missing",
            "amdgpu has no /dev/dri/renderD*",
            "dmesg | grep amdgpu says whether the GPU came up; udev must run for the nodes to be made",
        )
    nodes = [node for node in (probe.kfd, *probe.render_nodes) if node is not None]
    for node in nodes:
        yield from _access(node, probe)
    if probe.selinux_enforces:
        if probe.container_use_devices:
            yield Finding("SELinux", "ok", "enforces, and container_use_devices is on")
        else:
            yield Finding(
                "SELinux",
                "missing",
                "enforces, and keeps containers from devices",
                "setsebool -P container_use_devices on",
            )


def _access(node: DeviceNode, probe: Probe) -> Iterator[Finding]:
    lacks = missing_access(node.path, node.mode, node.group, uid=probe.uid, groups=probe.groups, selinux_enforces=False)
    if not lacks and node.usable:
        yield Finding(node.path, "ok", f"mode {node.mode & 0o777:04o}, group {node.group[1]}, open to this user")
    elif not lacks:
        yield Finding(
            node.path,
            "missing",
            "its mode allows this user, and yet access is refused: a device cgroup or a security module",
            "in a container: hand the device in; on the host: dmesg names the module that refused",
        )
    for sentence in lacks:
        # The user reaches the node, and only a rootless container would lose the group: to be known, not cured here.
        text, _, cure = sentence.rpartition(": ")
        yield Finding(node.path, "note" if node.usable else "missing", text, cure)


def _kernel(probe: Probe) -> Iterator[Finding]:
    release = _release(probe.kernel)
    if release is not None and release < _PAIRED_MASKS and any(major >= 10 for major in probe.gfx_majors):
        if probe.driver_version is None:
            yield Finding(
                "kernel",
                "missing",
                f"{probe.kernel} takes CU masks of RDNA GPUs bit by bit and so splits WGPs, which may hang the GPU",
                "a kernel of 6.0 or later, or AMD's DKMS driver; until then use whole RDNA GPUs: --compute whole",
            )
        else:
            yield Finding("kernel", "note", f"{probe.kernel} is before 6.0; masks are the DKMS driver's: keep it new")
    else:
        yield Finding("kernel", "ok", probe.kernel)
    if probe.cgroups in ("v1", "none"):
        yield Finding(
            "cgroups",
            "note",
            "version 2 is not mounted: the gate works, but a process cannot be told to be of a container",
            "systemd.unified_cgroup_hierarchy=1 on the kernel's command line",
        )
    elif probe.dmem:
        yield Finding("cgroups", "ok", f"{probe.cgroups}, with the dmem controller (a hard cap on VRAM is possible)")
    else:
        yield Finding(
            "cgroups",
            "note",
            f"{probe.cgroups}, without the dmem controller: limits rest on the gate, the kernel caps nothing",
            "a kernel of 6.14 or later with CONFIG_CGROUP_DMEM; no Debian kernel has it yet",
        )


def _gate(probe: Probe) -> Iterator[Finding]:
    if probe.gate:
        yield Finding("gate", "ok", probe.gate)
    else:
        yield Finding("gate", "missing", probe.gate_trouble, "install the package libamdvgpu")


def _run(probe: Probe) -> Iterator[Finding]:
    """What keeps `amdvgpuctl run` from private mounts. Root makes both by itself, so there is nothing to say then."""
    if probe.uid == 0:
        return
    text = "amdvgpuctl run brings its limits by environment variables only, which `env -i` sheds: "
    if not probe.user_namespaces:
        yield Finding(
            "run",
            "note",
            text + "user namespaces are restricted",
            "sysctl user.max_user_namespaces=16384 kernel.apparmor_restrict_unprivileged_userns=0",
        )
    elif not probe.guest_root:
        yield Finding("run", "note", text + "/run/amdvgpu is not there to mount on", "as root: mkdir /run/amdvgpu")


def _daemon(daemon: Daemon) -> Iterator[Finding]:
    if daemon.forbidden:
        yield Finding(
            "daemon", "missing", "this user may not use its socket", "usermod -aG amdvgpu USER, then log in anew"
        )
        return
    if daemon.system is None:
        yield Finding("daemon", "missing", daemon.trouble, "systemctl start amdvgpud; journalctl -u amdvgpud says more")
        return
    system = daemon.system
    about = f"version {system.version}" + (f", simulating {system.simulated}" if system.simulated else "")
    if system.ready:
        yield Finding("daemon", "ok", about)
    else:
        yield Finding("daemon", "missing", f"{about}: has not finished its first look at the machine", "wait for it")
    for warning in system.warnings:
        yield Finding("daemon", "note", warning)
    if system.kubelet is not None:
        yield _kubelet(system.kubelet)
    for device, reason in daemon.unusable:
        yield Finding(device, "note", f"cannot be cut: {reason}")
    for name, reason in daemon.lost:
        yield Finding(
            f"slice {name}",
            "missing",
            f"lost: {reason}",
            f"bring the GPU back, or amdvgpuctl slice delete {name}",
        )
    if daemon.cdi is not None:
        if daemon.cdi.error:
            yield Finding(
                "CDI file", "missing", f"{daemon.cdi.path} was not written: {daemon.cdi.error}",
                "let the daemon write there (a drop-in with ReadWritePaths=), or set cdi.dir",
            )  # fmt: skip
        for conflict in daemon.cdi.conflicts:
            yield Finding(
                "CDI file", "missing", f"another file has the same names: {conflict}", "remove that file"
            )  # fmt: skip


def _kubelet(kubelet: wire.KubeletView) -> Finding:
    if kubelet.delivery == "cdi":
        return Finding("kubelet", "ok", f"pods get slices by CDI names: {kubelet.reason}")
    text = f"pods get slices by device nodes and without the hook: {kubelet.reason}"
    return Finding("kubelet", "note", text, "switch CDI on in the runtime; where it is on: kubelet.delivery = 'cdi'")


def _runtimes(probe: Probe) -> Iterator[Finding]:
    cdi = probe.daemon.cdi
    directory = str(Path(cdi.path).parent) if cdi else "/run/cdi"
    version = str(cdi.spec.get("cdiVersion", CDI_VERSION)) if cdi and cdi.spec else CDI_VERSION
    if not probe.runtimes:
        yield Finding(
            "runtimes", "note", "no container runtime here; amdvgpuctl run needs none", "apt install podman"
        )  # fmt: skip
    for runtime in probe.runtimes:
        yield _judged(runtime, version, directory)


def _judged(runtime: Runtime, cdi_version: str, directory: str) -> Finding:
    subject = f"{runtime.name} {runtime.version}".rstrip()
    if not runtime.version:
        return Finding(subject, "note", "does not say its version, so nobody can say what it accepts")
    try:
        why_not = refusal(runtime.name, runtime.version, cdi_version, directory)
        needed = to_switch_on(runtime.name, runtime.version, "/run/cdi")
    except Invalid as error:
        return Finding(subject, "note", str(error))
    if why_not:
        cure = f"a newer {runtime.name}" + ("" if looks_into(None, directory) else "; or set cdi.dir to /run/cdi")
        return Finding(subject, "missing", f"would refuse the CDI file: {why_not}", cure)
    if needed and not runtime.switched_on:
        return Finding(subject, "missing", "has CDI, but switched off", f"{', '.join(needed)}, and restart it")
    if not looks_into(runtime.dirs, directory):
        setting = to_switch_on(runtime.name, runtime.version, "/elsewhere")[-1].replace("/elsewhere", directory)
        looked_into = ("/etc/cdi", "/run/cdi") if runtime.dirs is None else runtime.dirs
        text = f"looks for CDI files in {', '.join(looked_into)} only"
        return Finding(subject, "missing", text, f"put {setting}, and restart it")
    return Finding(subject, "ok", f"would resolve amdvgpu.io/slice=… from {directory} (CDI {cdi_version})")


def _image(image: Image) -> Iterator[Finding]:
    glibc = [name for name in image.loaders if name.startswith("ld-linux")]
    musl = [name for name in image.loaders if name.startswith("ld-musl")]
    ours = image.machine.replace("_", "-")
    if not image.loaders:
        yield Finding(
            image.root,
            "missing",
            "has no dynamic loader: its programs are static, and the gate cannot get into them",
            "an image with glibc; or a GPU of its own for this one",
        )
    elif glibc and not any(ours in name for name in glibc):
        yield Finding(
            image.root,
            "missing",
            f"is for another architecture ({', '.join(glibc)}): the gate cannot get into its programs",
            f"an image for {image.machine}",
        )
    elif musl and not glibc:
        yield Finding(
            image.root,
            "missing",
            "has musl, which reads no ld.so.preload: the CDI device does not load the gate there",
            "an image with glibc (ROCm itself needs it); else LD_PRELOAD=/usr/lib/amdvgpu/libamdvgpu.so in the image",
        )
    else:
        yield Finding(image.root, "ok", f"has glibc ({', '.join(glibc)})")
    if image.preload:
        yield Finding(
            image.root,
            "note",
            f"has an /etc/ld.so.preload of its own ({', '.join(image.preload)}), which ours hides",
            "preload these by LD_PRELOAD if they are needed",
        )


def _release(kernel: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", kernel)
    return None if match is None else (int(match[1]), int(match[2]))


# ------------------------------------------------------------------------------------------------ asking the machine


def ask_daemon(client: Client) -> Daemon:
    """What the daemon says of itself; a daemon that cannot be asked is an answer, too."""
    try:
        system, _ = client.get("/v1/system", wire.SystemView)
        cdi, _ = client.get("/v1/cdi", wire.CdiView)
        gpus, _ = client.get("/v1/gpus", wire.GpuList)
        slices, _ = client.get("/v1/slices", wire.SliceList, state="lost")
    except NotPermitted as error:
        return Daemon(str(error), forbidden=True)
    except ClientError as error:
        return Daemon(str(error))
    return Daemon(
        system=system,
        cdi=cdi,
        lost=tuple((s.name, s.lost_reason or "its GPU is gone") for s in slices.slices),
        unusable=tuple((u.pci_address or u.name, u.reason) for u in gpus.unusable),
    )


def read_probe(
    daemon: Daemon, runtimes: Iterable[tuple[str, str]], *, root: Path = Path("/"), image_root: Path | None = None
) -> Probe:
    """This machine as the calling user sees it. ``root`` holds ``sys``, ``dev``, ``etc`` and ``proc``.

    ``runtimes``: (name, version) of those installed. What cannot be read counts as not there; nothing raises.
    """
    kfd = root / "dev/kfd"
    gate, gate_trouble = _gate_library()
    cgroups, dmem = _cgroups(root)
    return Probe(
        uid=os.geteuid(),
        groups=frozenset(os.getgroups()) | {os.getegid()},
        kernel=os.uname().release,
        driver_loaded=(root / "sys/module/amdgpu").is_dir(),
        driver_version=_line(root / "sys/module/amdgpu/version"),
        gpus=tuple(_amd_gpus(root)),
        gfx_majors=frozenset(_gfx_majors(root)),
        kfd=_node(kfd, root),
        render_nodes=tuple(n for path in _render_paths(root) if (n := _node(path, root)) is not None),
        selinux_enforces=_line(root / "sys/fs/selinux/enforce") == "1",
        container_use_devices=_boolean(root / "sys/fs/selinux/booleans/container_use_devices"),
        cgroups=cgroups,
        dmem=dmem,
        user_namespaces=_user_namespaces(root),
        guest_root=(root / "run/amdvgpu").is_dir(),
        writable=tuple(sorted(_writable(root).items())),
        runtimes=tuple(_configured(name, version, root) for name, version in runtimes),
        gate=gate,
        gate_trouble=gate_trouble,
        daemon=daemon,
        image=None if image_root is None else _read_image(image_root),
    )


def _writable(root: Path) -> dict[str, int]:
    """Slices that a process has mounted where the gate looks, and not read-only: each with the first such process.

    Of those processes that this user may look at; by the gate's own measure (ST_RDONLY: of the mount, or of what
    is mounted); who makes up such a directory in a container of his own is listed too, and has gained nothing by it.
    """
    found: dict[str, int] = {}
    pids = sorted(int(entry.name) for entry in _entries(root / "proc") if entry.name.isdigit())
    for pid in pids:
        for line in (_line(root / f"proc/{pid}/mountinfo") or "").splitlines():
            mount, _, source = line.partition(" - ")
            fields = mount.split()
            if len(fields) < 6 or not (place := re.fullmatch(r"/run/amdvgpu/([a-z0-9.-]+)", fields[4])):
                continue
            options = {*fields[5].split(","), *source.split()[-1].split(",")}
            if "ro" not in options:
                found.setdefault(place[1], pid)
    return found


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _gate_library() -> tuple[str, str]:
    from amdvgpud.ctl.libraries import gate_library

    try:
        return str(gate_library()), ""
    except HostFailure as error:
        return "", str(error)


def _line(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def _boolean(path: Path) -> bool | None:
    text = _line(path)  # selinuxfs: the value in force, then the one that waits to be committed
    return None if not text else text.split()[0] == "1"


def _node(path: Path, root: Path) -> DeviceNode | None:
    try:
        found = path.stat()
    except OSError:
        return None
    try:
        name = grp.getgrgid(found.st_gid).gr_name
    except KeyError:
        name = str(found.st_gid)
    shown = "/" + str(path.relative_to(root))
    return DeviceNode(shown, stat.S_IMODE(found.st_mode), (found.st_gid, name), os.access(path, os.R_OK | os.W_OK))


def _amd_gpus(root: Path) -> Iterator[str]:
    for path in _listed(root / "sys/bus/pci/devices"):
        if _line(path / "vendor") == _AMD and (_line(path / "class") or "").startswith(_DISPLAY_CLASSES):
            yield path.name


def _render_paths(root: Path) -> Iterator[Path]:
    for path in _listed(root / "sys/class/drm"):
        if path.name.startswith("renderD") and _line(path / "device/vendor") in (_AMD, None):
            # None: a partition of a GPU (amdgpu_xcp), which is a platform device and has no vendor.
            yield root / "dev/dri" / path.name


def _gfx_majors(root: Path) -> Iterator[int]:
    for node in _listed(root / "sys/class/kfd/kfd/topology/nodes"):
        match = re.search(r"^gfx_target_version (\d+)$", _line(node / "properties") or "", re.MULTILINE)
        if match is not None and int(match[1]):
            yield int(match[1]) // 10000


def _listed(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _cgroups(root: Path) -> tuple[Literal["v2", "hybrid", "v1", "none"], bool]:
    top = root / "sys/fs/cgroup"
    if (controllers := _line(top / "cgroup.controllers")) is not None:
        return "v2", "dmem" in controllers.split() and "/vram" in (_line(top / "dmem.capacity") or "")
    if (top / "unified/cgroup.controllers").exists():
        return "hybrid", False
    return ("v1" if _listed(top) else "none"), False


def _user_namespaces(root: Path) -> bool:
    """By the kernel's limit, Debian's old switch and Ubuntu's new one; a switch that is not there forbids nothing."""
    kernel = root / "proc/sys/kernel"
    return (
        _line(root / "proc/sys/user/max_user_namespaces") != "0"
        and _line(kernel / "unprivileged_userns_clone") != "0"
        and _line(kernel / "apparmor_restrict_unprivileged_userns") != "1"
    )


def _configured(name: str, version: str, root: Path) -> Runtime:
    """The runtime with what its own configuration says of CDI. Files that cannot be read or parsed say nothing."""
    try:
        if name == "docker":
            document: Any = json.loads((root / "etc/docker/daemon.json").read_text())
            features = document.get("features", {})
            return Runtime(name, version, features.get("cdi") is True, _dirs(document.get("cdi-spec-dirs")))
        if name == "containerd":
            words = words_of([tomllib.loads((root / "etc/containerd/config.toml").read_text())], "")
            return Runtime(name, version, words.enabled is True, words.dirs)
        if name == "cri-o":
            files = [root / "etc/crio/crio.conf", *_listed(root / "etc/crio/crio.conf.d")]
            words = words_of([tomllib.loads(file.read_text()) for file in files if file.exists()], "")
            return Runtime(name, version, dirs=words.dirs)
    except (OSError, ValueError, AttributeError):
        pass
    return Runtime(name, version)


def _dirs(value: object) -> tuple[str, ...] | None:
    return tuple(map(str, value)) if isinstance(value, list) and value else None


def _read_image(root: Path) -> Image:
    loaders = set()
    for folder in ("lib", "lib64", "usr/lib", "usr/lib64"):
        if (root / folder).is_symlink() and (root / folder).readlink().is_absolute():
            continue  # would be followed out of the image; what it points to is in this list as well
        for path in _listed(root / folder):
            if re.fullmatch(r"ld-(linux[\w-]*|musl-[\w-]+)\.so\.\d+", path.name):
                loaders.add(path.name)
    own = [line.strip() for line in (_line(root / "etc/ld.so.preload") or "").splitlines() if line.strip()]
    return Image(str(root), tuple(sorted(loaders)), tuple(own), os.uname().machine)
