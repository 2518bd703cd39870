"""The support bundle: what somebody who cannot log in here needs to see, in one file, without secrets.

Owns what goes in, what is taken out, and the shape of the archive: the same state gives the same names, order and
times of members, so two bundles of one machine can be compared by ``diff -r``. A part that cannot be had is told in
``missing.txt`` and the rest goes on: bundles are made on machines on which something is wrong.

Secrets: the token's file is read only to know what must not appear; values of keys that sound like secrets, passwords
in URLs, authorization headers and private keys are taken out of every member, whoever wrote it.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from amdvgpud.ctl.client import Client, ClientError
from amdvgpud.ctl.doctor import Finding

REMOVED: Final = "<removed>"
TOP: Final = "amdvgpud-support"
"""Folder that all members are in."""

_API: Final = (
    ("api/system.json", "/v1/system"),
    ("api/gpus.json", "/v1/gpus"),
    ("api/slices.json", "/v1/slices"),
    ("api/leases.json", "/v1/leases"),
    ("api/cdi.json", "/v1/cdi"),
    ("api/events.json", "/v1/events?since=0"),
    ("metrics.txt", "/metrics"),
)

_COMMANDS: Final = (
    ("versions/uname.txt", ("uname", "-srvm")),
    ("versions/packages.txt", ("dpkg-query", "-W", "amdvgpud", "amdvgpuctl", "libamdvgpu", "podman", "crun", "runc")),
    ("log/journal.txt", ("journalctl", "-u", "amdvgpud", "-n", "2000", "--no-pager", "-o", "short-iso")),
    ("log/unit.txt", ("systemctl", "show", "amdvgpud", "-p", "ActiveState,SubState,Result,NRestarts,DropInPaths")),
)

_SYSFS: Final = (
    "sys/module/amdgpu/version",
    "sys/module/amdgpu/srcversion",
    "sys/class/kfd/kfd/topology/generation_id",
    "sys/class/kfd/kfd/topology/system_properties",
    "sys/class/kfd/kfd/topology/nodes/*/gpu_id",
    "sys/class/kfd/kfd/topology/nodes/*/name",
    "sys/class/kfd/kfd/topology/nodes/*/properties",
    "sys/class/kfd/kfd/topology/nodes/*/mem_banks/*/properties",
    "sys/class/kfd/kfd/topology/nodes/*/io_links/*/properties",
    "sys/class/drm/card*/device/current_*_partition",
    "sys/class/drm/card*/device/available_*_partition",
    "sys/class/drm/card*/device/mem_info_*",
    "sys/class/drm/card*/device/product_name",
    "sys/class/drm/card*/device/uevent",
    "sys/fs/cgroup/cgroup.controllers",
    "sys/fs/cgroup/dmem.capacity",
    "sys/fs/selinux/enforce",
)
"""Small text files; caches of the topology are left out, as they come to thousands on one machine of eight GPUs."""

_HOST: Final = ("etc/os-release", "proc/cmdline")

_LARGEST_BYTES: Final = 4 << 20
"""Of one member; what is longer keeps its end. Guessed: a page of metrics of 512 slices takes 1 MiB."""

_SECRET_KEY: Final = re.compile(r"(token|secret|passw|credential|api[_-]?key|private[_-]?key|bearer)", re.IGNORECASE)
_PATTERNS: Final = (
    re.compile(r"()-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(://)[^/\s:@\"']+:[^/\s@\"']+(?=@)"),
    re.compile(r"(bearer )[A-Za-z0-9._~+/=-]{4,}", re.IGNORECASE),
    re.compile(r"((?:token|secret|passw[a-z]*)[\"']?\s*[=:]\s*[\"']?)[^\s\"',<]{4,}", re.IGNORECASE),
)
"""What shows by its surroundings that it is a secret; the first group stays."""


def members(
    client: Client, doctor: Sequence[Finding], *, root: Path = Path("/"), environment: Mapping[str, str] = os.environ
) -> dict[str, bytes]:
    """Name → content of all there is, secrets removed. Asks the daemon, reads below ``root``, runs a few commands."""
    found: dict[str, str] = {}
    missing: list[str] = []
    for name, request in _API:
        where, _, query = request.partition("?")
        try:
            content = client.content(where, **dict(p.split("=") for p in query.split("&") if p))
        except ClientError as error:
            missing.append(f"{name}: {error}")
            continue
        found[name] = _pretty(content) if name.endswith(".json") else content.decode(errors="replace")
    found["doctor.json"] = json.dumps([asdict(f) for f in doctor], indent=1, ensure_ascii=False) + "\n"

    secrets = set(_secrets_of_environment(environment))
    token_file = str(_config(found.get("api/system.json")).get("rest.token_file", "/etc/amdvgpud/token"))
    secrets |= set(_secrets_of_token_file(root / token_file.lstrip("/"), missing))
    for path in (root / "etc/amdvgpud/amdvgpud.toml", *sorted((root / "etc/amdvgpud/conf.d").glob("*.toml"))):
        name = f"config/{path.relative_to(root / 'etc/amdvgpud')}"
        try:
            text = path.read_text(errors="replace")
        except OSError as error:
            missing.append(f"{name}: {error.strerror}")
            continue
        kept, inside = _config_without_secrets(text)
        secrets |= inside
        if kept is None:
            missing.append(f"{name}: left out: it is no TOML, so nobody can say where its secrets end")
        else:
            found[name] = kept
    machine = _machine(_config(found.get("api/system.json")), root)
    for tree, patterns in ((machine, _SYSFS), (root, _HOST)):
        for path in sorted(p for pattern in patterns for p in tree.glob(pattern)):
            name = f"machine/{path.relative_to(tree)}"
            try:
                found[name] = path.read_text(errors="replace")
            except OSError as error:
                missing.append(f"{name}: {error.strerror}")
    for name, command in _COMMANDS:
        output = _output_of(command)
        if output is None:
            missing.append(f"{name}: {command[0]} is not here or does not answer")
        else:
            found[name] = output
    found["missing.txt"] = "".join(line + "\n" for line in missing)
    return {name: _clipped(without_secrets(text, secrets)).encode() for name, text in sorted(found.items())}


def archive(contents: Mapping[str, bytes]) -> bytes:
    """A tar.gz of ``contents`` under :data:`TOP`: same contents, same bytes."""
    tarred = io.BytesIO()
    with tarfile.open(fileobj=tarred, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(contents):
            entry = tarfile.TarInfo(f"{TOP}/{name}")
            entry.size, entry.mode, entry.mtime = len(contents[name]), 0o644, 0
            tar.addfile(entry, io.BytesIO(contents[name]))
    return gzip.compress(tarred.getvalue(), mtime=0)


def write(path: Path, content: bytes) -> None:
    """``content`` into a new file that only this user may read. ``FileExistsError``: it is there already."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """``text`` with each of ``secrets``, and what looks like one by its surroundings, taken out."""
    for secret in sorted(secrets, key=len, reverse=True):  # the longest first: one may be part of another
        text = text.replace(secret, REMOVED)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{REMOVED}", text)
    return text


# --------------------------------------------------------------------------------------------------------- secrets


def _config_without_secrets(text: str) -> tuple[str | None, set[str]]:
    """(the text without values of secret-sounding keys, these values). None: not to be told apart."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        if '"""' in text or "'''" in text:
            return None, set()
        document = {}
    values = set(_secret_values(document))
    lines = []
    for line in text.splitlines(keepends=True):
        key, equals, _ = line.partition("=")
        lines.append(f'{key}{equals} "{REMOVED}"\n' if equals and _is_secret(key.strip(" \t#\"'")) else line)
    return "".join(lines), values


def _is_secret(key: str) -> bool:
    # A key that names where a secret lies is worth knowing, and is none itself.
    return bool(_SECRET_KEY.search(key)) and not key.endswith(("_file", "_path", "_dir"))


def _secret_values(table: Mapping[str, Any], inside: bool = False) -> Iterator[str]:
    for key, value in table.items():
        secret = inside or _is_secret(key)
        if isinstance(value, dict):
            yield from _secret_values(value, secret)
        elif secret:
            yield from (str(v) for v in (value if isinstance(value, list) else [value]) if len(str(v)) >= 4)


def _secrets_of_environment(environment: Mapping[str, str]) -> Iterator[str]:
    yield from (value for name, value in environment.items() if len(value) >= 4 and _is_secret(name))


def _secrets_of_token_file(path: Path, missing: list[str]) -> Iterator[str]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return
    except OSError:
        missing.append(f"{path.name}: not readable, so its content was not looked for in the other files")
        return
    yield from (line.strip() for line in lines if len(line.strip()) >= 4)


# ----------------------------------------------------------------------------------------------------------- parts


def _config(system: str | None) -> Mapping[str, object]:
    """The settings in force, from the answer of /v1/system; none where it did not answer."""
    config = json.loads(system).get("config", {}) if system else {}
    return config if isinstance(config, dict) else {}


def _machine(config: Mapping[str, object], root: Path) -> Path:
    """Where the daemon looks for sys/: a simulated machine's is its own tree."""
    if config.get("simulate"):
        return Path(str(config.get("run_dir")), "simulated")
    looked_at = str(config.get("sysfs_root", "/"))
    return root if looked_at == "/" else Path(looked_at)


def _pretty(content: bytes) -> str:
    return json.dumps(json.loads(content), indent=1, ensure_ascii=False) + "\n"


def _output_of(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=20,
            check=False,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace")


def _clipped(text: str) -> str:
    return text if len(text) <= _LARGEST_BYTES else "(the beginning is left out)\n" + text[-_LARGEST_BYTES:]
