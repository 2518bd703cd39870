"""Which container runtime reads which CDI file: a table, and questions to it. Pure; asks no runtime anything.

Source of the table: the CDI library that each release of each runtime was built with, from its own list of modules at
the release's tag, checked against podman 4.3 to 6.1, containerd 1.7 and 2.1 and docker 26 and 28. A distribution may
build an older release with a newer library, so a real one can take more than is said here, not less. Between two
releases that were looked at, the older one's answer is given.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from amdvgpud.core.errors import Invalid

STANDARD_DIRS: Final = ("/etc/cdi", "/var/run/cdi", "/run/cdi")

CDI_VERSION: Final = "0.5.0"
"""The highest version that our CDI file ever declares."""

_Release = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Runtime:
    accepted: tuple[tuple[_Release, str], ...]
    """(first release, newest CDI version it accepts), ascending; before the first there is no CDI."""
    on_since: _Release | None
    """First release with CDI switched on; None: wherever there is CDI at all."""
    switch: str
    dirs_since: _Release
    """First release whose CDI directories can be set, by ``dirs_setting``."""
    dirs_setting: str


_RUNTIMES: Final = {
    "podman": _Runtime(
        (((4, 1, 0), "0.4.0"), ((4, 3, 0), "0.5.0"), ((4, 9, 0), "0.6.0"), ((5, 2, 0), "0.8.0"), ((5, 5, 0), "1.0.0")),
        None,
        "",
        (5, 5, 0),
        "--cdi-spec-dir",
    ),
    "docker": _Runtime(
        (((25, 0, 0), "0.6.0"), ((28, 0, 0), "0.8.0"), ((28, 2, 0), "1.0.0"), ((29, 3, 0), "1.1.0")),
        (28, 2, 0),
        '"features": {"cdi": true} in /etc/docker/daemon.json',
        (25, 0, 0),
        '"cdi-spec-dirs" in /etc/docker/daemon.json',
    ),
    "containerd": _Runtime(
        (
            ((1, 7, 0), "0.5.0"),
            ((1, 7, 20), "0.7.0"),
            ((1, 7, 27), "0.8.0"),
            ((2, 0, 5), "1.0.0"),
            ((2, 3, 0), "1.1.0"),
        ),
        (2, 0, 0),
        "enable_cdi = true in the CRI plugin's table of /etc/containerd/config.toml",
        (1, 7, 0),
        "cdi_spec_dirs in the CRI plugin's table of /etc/containerd/config.toml",
    ),
    "cri-o": _Runtime(
        (
            ((1, 26, 0), "0.5.0"),
            ((1, 28, 0), "0.6.0"),
            ((1, 30, 0), "0.7.0"),
            ((1, 31, 0), "0.8.0"),
            ((1, 33, 0), "1.0.0"),
            ((1, 35, 0), "1.1.0"),
        ),
        None,
        "",
        (1, 26, 0),
        "cdi_spec_dirs in the table crio.runtime of /etc/crio/crio.conf",
    ),
}

RUNTIMES: Final = tuple(_RUNTIMES)
"""The runtimes that are known here, by the name of their command (but ``cri-o``)."""

_VERSION: Final = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?!\d)", re.ASCII)
_CDI_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)", re.ASCII)


def versions_accepted(runtime: str, version: str) -> str:
    """The newest CDI version that ``version`` of ``runtime`` accepts (all from 0.3.0 up to it); '' where it has no CDI.

    ``version`` is as the program prints it: ``4.3.1``, ``28.5.2+dfsg3``, ``v2.1.9~ds1``. ``Invalid`` for a runtime
    that is not known and for a text that is no version.
    """
    known, release = _of(runtime, version)
    newest = ""
    for first, accepted in known.accepted:
        if release >= first:
            newest = accepted
    return newest


def refusal(runtime: str, version: str, cdi_version: str, cdi_dir: str) -> str | None:
    """Why this runtime would resolve nothing from a file of ``cdi_version`` in ``cdi_dir``; None: it would.

    A file that is refused shows to the user as an unresolvable device and no more, hence this sentence.
    """
    known, release = _of(runtime, version)
    newest = versions_accepted(runtime, version)
    who = f"{runtime} {version}"
    if not newest:
        return f"{who} has no CDI: the first with it is {_text(known.accepted[0][0])}"
    if not (wanted := _CDI_VERSION.fullmatch(cdi_version)):
        raise Invalid.field("/cdiVersion", f"{cdi_version!r} is no CDI version: it reads like '0.5.0'")
    if _numbers(wanted) > _numbers(_CDI_VERSION.fullmatch(newest)):
        return f"{who} accepts CDI files up to {newest}, this one declares {cdi_version}"
    if cdi_dir.rstrip("/") not in STANDARD_DIRS and release < known.dirs_since:
        return f"{who} reads {STANDARD_DIRS[0]} and {STANDARD_DIRS[1]} only, not {cdi_dir}"
    return None


def to_switch_on(runtime: str, version: str, cdi_dir: str) -> tuple[str, ...]:
    """What must be set in ``version`` of ``runtime`` before it looks into ``cdi_dir``; empty: nothing."""
    known, release = _of(runtime, version)
    needed = []
    if known.on_since is not None and release < known.on_since:
        needed.append(known.switch)
    if cdi_dir.rstrip("/") not in STANDARD_DIRS:
        needed.append(f"{cdi_dir} among {known.dirs_setting}")
    return tuple(needed)


def _of(runtime: str, version: str) -> tuple[_Runtime, _Release]:
    if (known := _RUNTIMES.get(runtime)) is None:
        raise Invalid.field("/runtime", f"{runtime!r} is not known here: one of {', '.join(RUNTIMES)}")
    if (match := _VERSION.match(version)) is None:
        raise Invalid.field("/version", f"{version!r} is no version of {runtime}: it reads like '4.3.1'")
    return known, _numbers(match)


def _numbers(match: re.Match[str] | None) -> _Release:
    assert match is not None  # noqa: S101 - the table's own texts
    return int(match[1]), int(match[2]), int(match[3] or 0)


def _text(release: _Release) -> str:
    return ".".join(map(str, release))


@dataclass(frozen=True, slots=True)
class CdiWords:
    """What a runtime's own configuration says of CDI, and where it does (``source``)."""

    enabled: bool | None = None
    """None: nothing, so the release's default holds."""
    dirs: tuple[str, ...] | None = None
    """None: it names none, so :data:`STANDARD_DIRS` hold."""
    source: str = ""
    lack: str = ""
    """Why nothing is known of ``enabled``, as half a sentence; for people."""


def words_of(documents: Iterable[Mapping[str, Any]], source: str) -> CdiWords:
    """From the parsed configuration of containerd or CRI-O: the main file and what it includes, the later winning.

    By the last keys, wherever they are: the CRI plugin's table has had three names so far.
    """
    values: dict[str, Any] = {}
    for document in documents:
        values |= _values(document)
    enabled, dirs = values.get("enable_cdi"), values.get("cdi_spec_dirs")
    return CdiWords(
        enabled if isinstance(enabled, bool) else None,
        tuple(map(str, dirs)) if isinstance(dirs, list) and dirs else None,
        source,
        "" if isinstance(enabled, bool) else f"{source} does not",
    )


def _values(table: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _values(value) if isinstance(value, Mapping) else {key: value}
    return found


def looks_into(dirs: Iterable[str] | None, cdi_dir: str) -> bool:
    """Whether a runtime whose configuration names ``dirs`` (None: none) finds files in ``cdi_dir``."""
    return _plain(cdi_dir) in map(_plain, STANDARD_DIRS if dirs is None else dirs)


def _plain(directory: str) -> str:
    """``/var/run`` is ``/run``."""
    return re.sub("^/var/run(?=/|$)", "/run", directory.rstrip("/"))


def missing_access(
    path: str, mode: int, group: tuple[int, str], *, uid: int, groups: Collection[int], selinux_enforces: bool
) -> tuple[str, ...]:
    """What keeps the containers of user ``uid`` from the host's node at ``path``; empty: nothing that is known here.

    ``mode`` and ``group`` (number, name) are the node's own: nothing is concluded from a group's name. ``groups`` are
    the user's. A runtime that runs as root makes nodes of its own, so there only SELinux is asked.
    """
    found = []
    if uid != 0 and mode & 0o006 != 0o006:
        number, name = group
        if mode & 0o060 != 0o060:
            found.append(f"{path} has mode {mode & 0o7777:04o}: nobody but its owner may use it (udev rule: MODE 0660)")
        elif number not in groups:
            found.append(
                f"user {uid} is not in group {name} ({number}) of {path}: usermod -aG {name} USER, log in anew"
            )
        else:
            found.append(
                f"a rootless container loses group {name} ({number}) of {path}: podman run --group-add keep-groups"
            )
    if selinux_enforces:
        found.append("SELinux enforces: containers reach devices only with setsebool -P container_use_devices on")
    return tuple(found)
