"""A slice brought to one process tree on the host: what a container runtime does by CDI, done for a plain command.

Owns the private mounts and, where mounts are not allowed, the environment that stands in for them. Does not start or
watch the command (:mod:`amdvgpud.ctl.run`) and does not decide what is granted.

By mounts the command sees what a container sees: ``/run/amdvgpu/<slice>/`` read-only, its ledger writable, and an
``/etc/ld.so.preload`` that names the gate, so that ``env -i`` in the command does not shed the limit. The gate itself
is loaded from where it lies on the host: it is the same file system, and a mount would only add a way to fail.
Sources: mount(2), mount_namespaces(7), user_namespaces(7), ld.so(8), Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from amdvgpud.core.image import HEAD_BYTES, loader_of, same_architecture, script_words
from amdvgpud.core.render import PLATFORM_FOLDER, STAND_IN_FOLDER, preload_line
from amdvgpud.ctl.cgroup import OwnCgroup

GUEST_ROOT: Final = Path("/run/amdvgpu")
PRELOAD_FILE: Final = Path("/etc/ld.so.preload")
_STAGED_ETC: Final = "etc"

# linux/sched.h, linux/mount.h
_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWUSER: Final = 0x10000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20, 0x1000, 0x4000, 1 << 18
_MNT_DETACH: Final = 2
_HARMLESS: Final = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC


class CannotDeliver(Exception):
    """The slice cannot be brought to the command in this way. ``str(error)`` says which step and why."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What is to be delivered, whoever granted it."""

    slice: str
    guest: Path
    """The directory with policy and ledger, on the host."""
    environment: Mapping[str, str]
    preload: tuple[Path, ...]
    """Libraries to load before the command's own, in this order; the gate is the first."""
    cgroup: OwnCgroup | None = None
    """What the command is to be put into; None: nobody would be told of it."""


# ------------------------------------------------------------------------------------------------------ by mounts


def deliver_by_mounts(grant: Grant) -> None:
    """Give the calling process a mount namespace of its own with the slice in it.

    Without the right to mount, a user namespace of its own is tried first, in which the user is still who they are.
    To be called in a child that is about to exec: where it raises ``CannotDeliver``, the process is of no further use.
    """
    here = Path.cwd()
    try:
        existing = PRELOAD_FILE.read_text(errors="surrogateescape")
    except FileNotFoundError:
        existing = ""
    except OSError as e:
        raise CannotDeliver(f"{PRELOAD_FILE}: {e.strerror}") from e
    _enter_namespace()
    _mount(None, Path("/"), None, _MS_REC | _MS_PRIVATE)
    try:
        GUEST_ROOT.mkdir(mode=0o755, exist_ok=True)
    except OSError as e:
        raise CannotDeliver(f"{GUEST_ROOT} is not there to mount on; root makes it: mkdir {GUEST_ROOT}") from e
    try:
        # Held by descriptor, as the mounts below hide the paths. An outer slice stays in force within this one.
        outer = {p.name: os.open(p, os.O_PATH | os.O_CLOEXEC) for p in GUEST_ROOT.iterdir() if p.name != grant.slice}
        guest = os.open(grant.guest, os.O_PATH | os.O_CLOEXEC)
        ledger = os.open(grant.guest / "ledger", os.O_PATH | os.O_CLOEXEC)
    except OSError as e:
        raise CannotDeliver(f"{e.filename}: {e.strerror}") from e
    _mount_preload_file(format_preload([_line_of(library) for library in grant.preload], existing))
    _mount("amdvgpu", GUEST_ROOT, "tmpfs", _HARMLESS, "mode=0755,size=64k")
    for name, fd in outer.items():
        (GUEST_ROOT / name).mkdir()
        _mount(f"/proc/self/fd/{fd}", GUEST_ROOT / name, None, _MS_BIND | _MS_REC)
    inside = GUEST_ROOT / grant.slice
    inside.mkdir()
    _bind(guest, inside, _MS_RDONLY)
    _bind(ledger, inside / "ledger", 0)
    _mount(None, GUEST_ROOT, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _HARMLESS)
    os.chdir(here)  # through the new mounts: the old working directory may lie under one of them


def _line_of(library: Path) -> Path:
    beside = [library.parent / PLATFORM_FOLDER, library.parent / STAND_IN_FOLDER / library.name]
    return Path(preload_line(str(library), all(path.exists() for path in beside)))


def format_preload(libraries: Iterable[Path], existing: str) -> str:
    """The text of ld.so.preload: ``libraries`` first, then what was there before, each named once.

    The gate goes first: an interposer that answers by itself would else hide requests from it.
    """
    ours = [str(p) for p in libraries]
    for path in ours:
        if re.search(r"[\s:]", path):
            raise CannotDeliver(f"{path}: ld.so.preload takes blanks and colons for separators; install it elsewhere")
    kept = [line for line in existing.splitlines() if line.strip() and line.strip() not in ours]
    return "\n".join([*ours, *kept]) + "\n"


def _enter_namespace() -> None:
    uid, gid = os.geteuid(), os.getegid()
    try:
        _call("unshare", "a mount namespace", _CLONE_NEWNS)
        return
    except CannotDeliver:
        pass  # not root, or root without CAP_SYS_ADMIN: a user namespace may still be allowed
    _call("unshare", "a user namespace", _CLONE_NEWUSER | _CLONE_NEWNS)
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path("/proc/self", name).write_text(text)
    except OSError as e:
        raise CannotDeliver(f"user namespaces are restricted here: {e.filename}: {e.strerror}") from e


def _mount_preload_file(text: str) -> None:
    """Make /etc/ld.so.preload read ``text`` in this namespace.

    Where the host has the file, ours is bound over it. Most hosts have none, and a mount needs something to lie on.
    Creating it would change the host (an unlink would take the mount away with it, and a killed run would leave an
    empty file behind), so /etc is overlaid instead: our directory with that one file above the host's /etc, read-only.
    The price: the command cannot change /etc and is told so (EROFS). A host that minds creates the file, empty, once.
    A writable overlay was refused: changes that root makes under it would vanish with the command.
    """
    _mount("amdvgpu", GUEST_ROOT, "tmpfs", _HARMLESS, "mode=0755,size=64k")
    staged = GUEST_ROOT / _STAGED_ETC / PRELOAD_FILE.name
    staged.parent.mkdir()
    staged.write_text(text, errors="surrogateescape")
    staged.parent.chmod(0o755)
    staged.chmod(0o644)
    if PRELOAD_FILE.exists():
        fd = os.open(staged, os.O_PATH | os.O_CLOEXEC)
        _bind(fd, PRELOAD_FILE, _MS_RDONLY)
        os.close(fd)
    else:
        etc = PRELOAD_FILE.parent
        mounted = {p: os.open(p, os.O_PATH | os.O_CLOEXEC) for p in _mounts_below(etc)}
        _mount("amdvgpu", etc, "overlay", _MS_RDONLY, f"lowerdir={staged.parent}:{etc}")
        # An overlay shows its layers without what is mounted on them (resolv.conf and hosts, in a container).
        for path, fd in mounted.items():
            _mount(f"/proc/self/fd/{fd}", path, None, _MS_BIND | _MS_REC)
            os.close(fd)
    # The staging place goes out of sight: the gate takes every directory under /run/amdvgpu for a slice.
    _call("umount2", f"unmounting {GUEST_ROOT}", os.fsencode(GUEST_ROOT), _MNT_DETACH)


def _mounts_below(directory: Path) -> list[Path]:
    """Mount points under ``directory``, the outermost only: what lies below them comes along."""
    found: list[Path] = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        raw = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), line.split(b" ")[4])
        path = Path(os.fsdecode(raw))
        if directory in path.parents and not any(seen == path or seen in path.parents for seen in found):
            found = [seen for seen in found if path not in seen.parents] + [path]
    return found


def _bind(source_fd: int, target: Path, flags: int) -> None:
    """Bind what ``source_fd`` holds; the flags need a second call, as bind mounts ignore them in the first."""
    _mount(f"/proc/self/fd/{source_fd}", target, None, _MS_BIND)
    _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _HARMLESS | flags)


def _mount(source: str | None, target: Path, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if t is None else os.fsencode(t) for t in (source, target, kind, options)]
    _call("mount", f"mounting {target}", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def _call(name: str, doing: str, *arguments: object) -> None:
    """One libc call that answers 0 or sets errno. By ctypes: os.unshare is 3.12's, and mount is nobody's."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        code = ctypes.get_errno()
        # unshare says ENOSPC where the sysctl user.max_user_namespaces (0 on hardened machines) is used up.
        why = "user.max_user_namespaces is used up" if code == errno.ENOSPC and name == "unshare" else os.strerror(code)
        raise CannotDeliver(f"{doing} is not allowed here: {why}")


def die_with_parent(signal_number: int, parent: int) -> None:
    """Let the kernel send ``signal_number`` to this process when ``parent`` ends (prctl(2), PR_SET_PDEATHSIG).

    To be called after the namespaces are entered: a change of credentials clears it.
    """
    _call("prctl", "tying the command to amdvgpuctl", 1, ctypes.c_ulong(signal_number), 0, 0, 0)
    if os.getppid() != parent:
        raise CannotDeliver("amdvgpuctl has ended before the command started")


# -------------------------------------------------------------------------------------------------- by environment


def environment_of(grant: Grant, base: Mapping[str, str], *, mounted: bool, musl: bool = False) -> dict[str, str]:
    """The command's environment: ``base``, the grant's own over it, and what stands in for mounts that are not there.

    musl reads no ld.so.preload, so its programs get LD_PRELOAD beside the mounts.
    """
    result = {**base, **grant.environment}
    if not mounted:
        result["AMDVGPU_SLICE_DIR"] = str(grant.guest)
    if not mounted or musl:
        # Ours first, for the reason that format_preload gives; LD_PRELOAD takes blanks as well as colons.
        kept = [p for p in re.split(r"[\s:]+", base.get("LD_PRELOAD", "")) if p]
        text = format_preload(grant.preload, "\n".join(kept))
        result["LD_PRELOAD"] = ":".join(text.split())
    return result


# ----------------------------------------------------------------------------------------------------- the command


@dataclass(frozen=True, slots=True)
class Program:
    """What the command is, as far as a preloaded library can reach it."""

    path: Path
    musl: bool
    out_of_reach: str | None
    """Why the gate cannot be in this program; None: it can."""


def program_of(command: str, search_path: str | None) -> Program:
    """The program that ``command`` starts, scripts followed to their interpreter.

    ``FileNotFoundError`` and ``PermissionError`` as exec would have it. Only the first program is judged: a shell that
    starts a static program is not seen through.
    """
    found = shutil.which(command, path=search_path)
    if found is None:
        named = Path(command)
        if "/" in command and named.exists():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), command)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command)
    path = Path(found)
    musl, reason = _reach(path, search_path)
    return Program(path, musl, reason)


def _reach(path: Path, search_path: str | None, depth: int = 4) -> tuple[bool, str | None]:
    """(is it a musl program, why the gate cannot be in it). What cannot be read or understood is not accused."""
    try:
        head = _head_of(path)
        if head[:2] == b"#!" and depth:
            interpreter = _interpreter_of(head, search_path)
            return _reach(interpreter, search_path, depth - 1) if interpreter else (False, None)
        if head[:4] != b"\x7fELF":
            return False, None
        if not same_architecture(head, _head_of(Path("/proc/self/exe"))):
            return False, f"{path} is a program for another architecture than the gate"
        loader = loader_of(head)
    except (OSError, struct.error):
        return False, None
    if loader is None:
        return False, f"{path} is a static program, which loads no library"
    return "ld-musl" in loader, None


def _head_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD_BYTES)


def _interpreter_of(script: bytes, search_path: str | None) -> Path | None:
    words = script_words(script)
    found = shutil.which(words[0], path=search_path) if words else None
    return Path(found) if found else None
