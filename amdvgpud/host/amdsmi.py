"""A fence around AMD SMI, the optional extra ``amdvgpud[amdsmi]``: market names, memory modes, and a second opinion.

Owns asking the library and comparing its answer with ours. Never a source of ids, of sizes that limits are made from,
or of which GPUs exist: those come from sysfs, with or without this.

Why a fence. The Python package is ctypes structures around whatever ``libamd_smi.so`` it finds: without the library it
prints to stdout and ends its import with ``KeyError`` (so does 7.0.2 of PyPI, which has no library in it, on a machine
without ROCm); under another generation of the library it misreads memory. So it is asked in a process of its own
(``python -m amdvgpud.host.amdsmi``), which may crash, hang or shout, and which gives its device files back by ending.
ROCm installs its own copy of the package beside the library; that is the one to prefer (put it on PYTHONPATH).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from amdvgpud.core.model import Gpu, Inventory, Profile
from amdvgpud.host.sysfs import fallback_name

TIMEOUT_S: Final = 10.0
"""Guessed: initialising the library on eight GPUs in CPX takes well under this; a hung driver takes for ever."""

_MAX_ANSWER_BYTES: Final = 1 << 20
_LIBRARY_OF_RELEASE: Final = {5: (23,), 6: (24, 25), 7: (26,)}
"""Major versions of ``libamd_smi.so`` by ROCm release, which is how the packages on PyPI are numbered."""


@dataclass(frozen=True, slots=True)
class SmiProfile:
    """A partition mode as AMD SMI describes it: it asks the driver about each, which for us would mean writing the
    driver's selector."""

    index: int
    mode: str
    partition_count: int
    memory_modes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SmiGpu:
    """What AMD SMI says of one PCI device; None: it does not say."""

    market_name: str | None = None
    uuid: str | None = None
    vram_bytes: int | None = None
    profiles: tuple[SmiProfile, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """AMD SMI's answer by PCI address, or why there is none (then ``gpus`` is empty)."""

    gpus: Mapping[str, SmiGpu] = field(default_factory=dict)
    reason: str | None = None


# ----------------------------------------------------------------------------------------------------- our process


def read_report(timeout_s: float = TIMEOUT_S) -> Report:
    """Ask AMD SMI, for ``timeout_s`` at most (blocking: call it off the event loop). Raises nothing."""
    ours = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH", ""), ours) if p)
    try:
        # -P: what lies in the folder the daemon was started in is not imported.
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "amdvgpud.host.amdsmi"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        return Report(reason=f"its process cannot be started: {error}")
    try:
        raw, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # The whole session, for what the library may have started. Not yet waited for, so the number is still ours.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return Report(reason=f"no answer within {timeout_s:g} s")
    finally:
        if child.stdout:
            child.stdout.close()
    if child.returncode != 0:
        died = f"was ended by signal {-child.returncode}" if child.returncode < 0 else f"ended with {child.returncode}"
        return Report(reason=f"its process {died}")
    return _parse(raw)


def _parse(raw: bytes) -> Report:
    """The child's answer, believed only as far as its types: what it relays comes from a library we do not know."""
    try:
        answer = json.loads(raw[:_MAX_ANSWER_BYTES])
        if answer.get("reason") is not None:
            return Report(reason=_clean(answer["reason"]) or "it did not say why")
        gpus = {str(address).lower(): _parse_gpu(said) for address, said in answer["gpus"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Report(reason=f"its answer makes no sense ({type(error).__name__})")
    return Report(gpus=gpus)


def _parse_gpu(said: Mapping[str, object]) -> SmiGpu:
    vram_bytes = said.get("vram_bytes")
    return SmiGpu(
        market_name=_clean(said.get("market_name")),
        uuid=_clean(said.get("uuid")),
        vram_bytes=vram_bytes if type(vram_bytes) is int and vram_bytes > 0 else None,
        profiles=_parse_profiles(said.get("profiles")),
    )


def _parse_profiles(said: object) -> tuple[SmiProfile, ...]:
    """Those that make sense: the others are what a misread structure looks like."""
    found = []
    for item in said if isinstance(said, list) else []:
        if not isinstance(item, dict):
            continue
        index, mode, count = (item.get(key) for key in ("profile_index", "profile_type", "num_partitions"))
        caps = item.get("memory_caps")
        memory = [nps for nps in caps if isinstance(nps, str)] if isinstance(caps, list) else []
        if not (isinstance(mode, str) and isinstance(index, int) and isinstance(count, int)):
            continue
        if re.fullmatch(r"[A-Z]PX", mode) and 0 <= index < 64 and 1 <= count <= 64:
            found.append(SmiProfile(index, mode, count, tuple(m for m in memory if re.fullmatch(r"NPS[1-9]", m))))
    return tuple(found)


def _clean(text: object) -> str | None:
    """One printable line of moderate length, or None for what is no name (``N/A``, a bare hex number, nothing)."""
    if not isinstance(text, str):
        return None
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())[:128]
    return None if re.fullmatch(r"(?i)|n/a|none|0x[0-9a-f]+", line) else line


def cross_check(inventory: Inventory, report: Report) -> Inventory:
    """``inventory`` with a market name where ours is only the fallback, and a warning for each contradiction.

    Never another id, size, GPU or order: where the two disagree, ours stands (a library of the wrong generation reads
    garbage without noticing) and a person is told. Without a report, the same inventory and one warning why.
    """
    if report.reason is not None:
        said = f"AMD SMI was not heard: {report.reason}"
        return replace(inventory, warnings=(*inventory.warnings, said))
    warnings: list[str] = []
    gpus = tuple(_check_gpu(gpu, report.gpus.get(gpu.pci_address), warnings) for gpu in inventory.gpus)
    known = {gpu.pci_address for gpu in gpus} | {item.pci_address for item in inventory.unusable}
    # Some versions give each partition an address of its own, with the partition index for a function.
    strangers = sorted(a for a in report.gpus if a not in known and f"{a[:-1]}0" not in known)
    warnings += [f"{address}: AMD SMI lists a GPU there that sysfs does not" for address in strangers]
    return replace(inventory, gpus=gpus, warnings=(*inventory.warnings, *warnings))


def _check_gpu(gpu: Gpu, said: SmiGpu | None, warnings: list[str]) -> Gpu:
    if said is None:
        warnings.append(f"{gpu.pci_address}: AMD SMI does not list this GPU")
        return gpu
    if said.uuid and gpu.smi_uuid and _without_function(said.uuid) != _without_function(gpu.smi_uuid):
        warnings.append(f"{gpu.pci_address}: AMD SMI says UUID {said.uuid}, sysfs makes it {gpu.smi_uuid}")
    if said.vram_bytes and abs(said.vram_bytes - gpu.vram_bytes) > gpu.vram_bytes // 64:
        # A 64th: libraries that count in MB round. Anything larger is another GPU or a misread structure.
        warnings.append(
            f"{gpu.pci_address}: AMD SMI says {said.vram_bytes >> 20} MiB of VRAM, sysfs {gpu.vram_bytes >> 20} MiB"
        )
    gpu = replace(gpu, profiles=tuple(_check_profile(gpu, profile, said, warnings) for profile in gpu.profiles))
    if said.market_name and gpu.product_name == fallback_name(gpu.gfx_target):
        return replace(gpu, product_name=said.market_name)
    return gpu


def _check_profile(gpu: Gpu, profile: Profile, said: SmiGpu, warnings: list[str]) -> Profile:
    """The memory modes and the index are the driver's own words there, where ours may be a rule and a rank."""
    theirs = next((p for p in said.profiles if p.mode == profile.mode), None)
    if theirs is None:
        return profile
    if theirs.partition_count != profile.partition_count:
        warnings.append(
            f"{gpu.pci_address}: AMD SMI says that {profile.mode} makes {theirs.partition_count} partitions, "
            f"its XCCs make it {profile.partition_count}"
        )
        return profile
    return replace(profile, index=theirs.index, memory_modes=theirs.memory_modes or profile.memory_modes)


def _without_function(uuid: str) -> str:
    """An SMI UUID without its function byte, which later libraries fill with the partition id."""
    return f"{uuid[:2]}{uuid[4:]}".lower()


# ---------------------------------------------------------------------------------------------- the other process


def _ask() -> dict[str, object]:
    """In the child: what ``amdsmi`` says, as JSON-able values. Anything may be raised from here."""
    try:
        import amdsmi
    except ModuleNotFoundError as error:
        if error.name == "amdsmi":
            return {"reason": "the Python package amdsmi is not installed"}
        raise
    amdsmi.amdsmi_init()
    if wrong := _wrong_version(amdsmi):
        return {"reason": wrong}
    gpus: dict[str, object] = {}
    for handle in amdsmi.amdsmi_get_processor_handles():
        address = amdsmi.amdsmi_get_gpu_device_bdf(handle)
        # Partitions of a GPU may come with its address: the first is the GPU's own.
        gpus.setdefault(
            address,
            {
                "market_name": _or_none(lambda h: amdsmi.amdsmi_get_gpu_asic_info(h)["market_name"], handle),
                "uuid": _or_none(amdsmi.amdsmi_get_gpu_device_uuid, handle),
                "vram_bytes": _or_none(
                    lambda h: amdsmi.amdsmi_get_gpu_memory_total(h, amdsmi.AmdSmiMemoryType.VRAM), handle
                ),
                "profiles": _or_none(
                    lambda h: amdsmi.amdsmi_get_gpu_accelerator_partition_profile_config(h)["profiles"], handle
                ),
            },
        )
    return {"gpus": gpus}


def _or_none(call: Callable[[Any], object], handle: object) -> object:
    """One detail; one that this GPU or this version lacks costs only itself."""
    try:
        return call(handle)
    except Exception:
        return None


def _wrong_version(amdsmi: Any) -> str | None:
    """Why package and library do not belong together, where both say what they are.

    A package beside its library has the library's number (26.0.2); one from PyPI has the ROCm release's (7.0.2).
    """
    try:
        package = [int(n) for n in re.findall(r"\d+", str(amdsmi.__version__))[:2]]
        said = amdsmi.amdsmi_get_lib_version()
        library = [int(said["major"]), int(said["minor"])]
    except Exception:
        return None
    if len(package) < 2:
        return None
    release = _LIBRARY_OF_RELEASE.get(package[0])
    fits = package == library if release is None else library[0] in release
    if package[0] == 7 and fits:  # from ROCm 7 on the minor numbers go together, and structures change with them
        fits = package[1] == library[1]
    if fits:
        return None
    return f"package {package[0]}.{package[1]} does not belong to library {library[0]}.{library[1]}"


def main() -> None:
    """Print AMD SMI's answer as one JSON object, and nothing else, whatever the library prints."""
    answer_fd = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash here is expected; its core would only fill a disk
    try:
        answer = json.dumps(_ask())
    except BaseException as error:  # SystemExit too: this process must say why
        answer = json.dumps({"reason": f"{type(error).__name__}: {error}"})
    with open(answer_fd, "w", encoding="utf-8") as out:  # noqa: PTH123 - a descriptor
        out.write(answer)
    os._exit(0)  # past the library's own destructors, which have nothing to give back that the kernel does not take


if __name__ == "__main__":
    main()
