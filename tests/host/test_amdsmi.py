"""The fence around AMD SMI: stand-in ``amdsmi`` packages on PYTHONPATH do their worst, in the real child process.

The package of PyPI itself was tried by hand (7.0.2 without a library): its import ends with KeyError, as one case here.
"""

from __future__ import annotations

import json
import os
import select
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from amdvgpud.core.model import CuLayout, Gpu, GpuId, Inventory, Partition, PartitionId, Profile
from amdvgpud.host.amdsmi import Report, SmiGpu, SmiProfile, cross_check, read_report

GIB = 1024**3
UUID = "afff74a1-0000-1000-8054-e92b0a5d57c8"


def a_gpu(product_name: str = "AMD gfx942") -> Gpu:
    gpu = GpuId("GPU-af54e92b0a5d57c8")
    layout = CuLayout(8, 4, 1, (10, 10, 9, 9) * 8, wgp=False)
    partition = Partition(
        PartitionId(f"{gpu}/0"), gpu, 0, 2, 4711, 128, 192 * GIB, layout, "gfx942", 0xAF54E92B0A5D57C8
    )
    return Gpu(
        gpu, 0, "0000:05:00.0", 0xAF54E92B0A5D57C8, UUID, 0x74A1, 0, product_name, "gfx942", 192 * GIB, (partition,)
    )


INVENTORY = Inventory((a_gpu(),), generation_id=3, warnings=("an older warning",))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ``amdsmi`` package that answers well; tests append what goes wrong."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "amdsmi.py"
    path.write_text(
        textwrap.dedent(
            f"""
            import enum, os, time
            __version__ = "26.0.2"
            class AmdSmiMemoryType(enum.IntEnum):
                VRAM = 0
            def amdsmi_init(): pass
            def amdsmi_get_lib_version(): return {{"major": 26, "minor": 0, "release": 2}}
            def amdsmi_get_processor_handles(): return ["a handle"]
            def amdsmi_get_gpu_device_bdf(handle): return "0000:05:00.0"
            def amdsmi_get_gpu_device_uuid(handle): return "{UUID}"
            def amdsmi_get_gpu_asic_info(handle): return {{"market_name": "MI300X-O"}}
            def amdsmi_get_gpu_memory_total(handle, kind): return 192 * 1024**3
            """
        )
    )
    return path


def spoil(package: Path, code: str) -> None:
    package.write_text(package.read_text() + textwrap.dedent(code) + "\n")


def test_a_sound_package_is_read_whole(package: Path) -> None:
    assert read_report() == Report({"0000:05:00.0": SmiGpu("MI300X-O", UUID, 192 * GIB)})


def test_the_market_name_replaces_only_our_fallback() -> None:
    report = Report({"0000:05:00.0": SmiGpu("MI300X-O", UUID, 192 * GIB)})
    assert cross_check(INVENTORY, report) == replace(INVENTORY, gpus=(a_gpu("MI300X-O"),))
    named = Inventory((a_gpu("AMD Instinct MI300X OAM"),))
    assert cross_check(named, report) == named


PROFILES = """
def amdsmi_get_gpu_accelerator_partition_profile_config(handle):
    def one(kind, count, index, caps):
        return {"profile_type": kind, "num_partitions": count, "profile_index": index, "memory_caps": caps,
                "num_resources": 4, "resources": []}
    return {"num_profiles": 4, "profiles": [
        one("SPX", 1, 0, ["NPS1"]), one("CPX", 8, 3, ["NPS1", "NPS2"]), one("QPX", 5, 2, ["NPS1"]),
        one("N/A", 0, 99, ["N/A"]), "nonsense", one("DPX", -7, 1, None)]}
"""


def test_the_drivers_words_on_partition_modes_are_read_and_what_makes_no_sense_is_left_out(package: Path) -> None:
    spoil(package, PROFILES)
    assert read_report().gpus["0000:05:00.0"].profiles == (
        SmiProfile(0, "SPX", 1, ("NPS1",)),
        SmiProfile(3, "CPX", 8, ("NPS1", "NPS2")),
        SmiProfile(2, "QPX", 5, ("NPS1",)),
    )


def test_memory_modes_and_indices_come_from_amd_smi_and_a_count_that_differs_is_said() -> None:
    ours = (Profile(0, "SPX", 1, 8, ("NPS1",)), Profile(1, "QPX", 4, 2, ("NPS1", "NPS4")), Profile(2, "CPX", 8, 1, ()))
    theirs = (SmiProfile(3, "CPX", 8, ("NPS1", "NPS2")), SmiProfile(2, "QPX", 5, ("NPS1",)))
    inventory = Inventory((replace(a_gpu("MI300X"), profiles=ours),))
    checked = cross_check(inventory, Report({"0000:05:00.0": SmiGpu(None, UUID, 192 * GIB, theirs)}))
    assert checked.gpus[0].profiles == (ours[0], ours[1], Profile(3, "CPX", 8, 1, ("NPS1", "NPS2")))
    assert checked.warnings == ("0000:05:00.0: AMD SMI says that QPX makes 5 partitions, its XCCs make it 4",)


def test_noise_on_stdout_is_not_the_answer(package: Path) -> None:
    spoil(
        package, 'print("{}"); os.write(1, b"Unable to load\\n" * 50_000); import atexit; atexit.register(print, "bye")'
    )
    assert read_report() == Report({"0000:05:00.0": SmiGpu("MI300X-O", UUID, 192 * GIB)})


def test_a_detail_that_fails_costs_only_itself(package: Path) -> None:
    spoil(package, "def amdsmi_get_gpu_asic_info(handle): raise RuntimeError('AMDSMI_STATUS_NOT_SUPPORTED')")
    assert read_report() == Report({"0000:05:00.0": SmiGpu(None, UUID, 192 * GIB)})


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('a line'); print('another'); raise KeyError('libamd_smi.so')", "KeyError: 'libamd_smi.so'"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def amdsmi_init(): raise RuntimeError('driver not loaded')", "RuntimeError: driver not loaded"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("os._exit(3)", "its process ended with 3"),
        ("import ctypes; ctypes.string_at(8)", "its process was ended by signal 11"),
        ("def amdsmi_init(): os.abort()", "its process was ended by signal 6"),
        ('__version__ = "7.0.2"\ndef amdsmi_get_lib_version(): return {"major": 26, "minor": 2}',
         "package 7.0 does not belong to library 26.2"),
        ('__version__ = "6.4.1"', "package 6.4 does not belong to library 26.0"),
        ('__version__ = "25.3.0+a1"', "package 25.3 does not belong to library 26.0"),
        ("def amdsmi_get_processor_handles(): return None", "TypeError: 'NoneType' object is not iterable"),
        ("def amdsmi_get_gpu_device_bdf(handle): return object()",
         "TypeError: keys must be str, int, float, bool or None, not object"),
    ],
)  # fmt: skip
def test_a_broken_package_leaves_the_inventory_as_it_is_and_says_why(package: Path, code: str, reason: str) -> None:
    spoil(package, code)
    report = read_report()
    assert report == Report(reason=reason)
    expected = replace(INVENTORY, warnings=("an older warning", f"AMD SMI was not heard: {reason}"))
    assert cross_check(INVENTORY, report) == expected


def test_no_package_at_all_is_a_reason_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "amdsmi.py").write_text("raise ModuleNotFoundError(\"No module named 'amdsmi'\", name='amdsmi')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert read_report() == Report(reason="the Python package amdsmi is not installed")


def test_a_package_that_hangs_is_ended_with_all_it_started(package: Path, tmp_path: Path) -> None:
    left = tmp_path / "grandchild"
    spoil(
        package,
        f"""
        import subprocess
        with open({str(left)!r}, "w") as out:
            out.write(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(600)
        """,
    )
    report = read_report(timeout_s=2)
    assert report == Report(reason="no answer within 2 s")
    assert has_ended(int(left.read_text()))


def has_ended(pid: int) -> bool:
    """Waits for it, as a kill takes its moment."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    waiter = select.poll()
    waiter.register(fd, select.POLLIN)
    try:
        return bool(waiter.poll(10_000))
    finally:
        os.close(fd)


def test_a_lie_becomes_a_warning_and_never_a_figure() -> None:
    lie = Report(
        {
            "0000:05:00.0": SmiGpu("MI300X-O", "00ff74a1-0000-1000-8000-000000000001", 1 * GIB),
            "0000:99:00.0": SmiGpu("a ghost", None, None),
        }
    )
    expected = replace(
        INVENTORY,
        gpus=(a_gpu("MI300X-O"),),
        warnings=(
            "an older warning",
            "0000:05:00.0: AMD SMI says UUID 00ff74a1-0000-1000-8000-000000000001, sysfs makes it " + UUID,
            "0000:05:00.0: AMD SMI says 1024 MiB of VRAM, sysfs 196608 MiB",
            "0000:99:00.0: AMD SMI lists a GPU there that sysfs does not",
        ),
    )
    assert cross_check(INVENTORY, lie) == expected


def test_a_gpu_that_amd_smi_does_not_list_stays(package: Path) -> None:
    spoil(package, "def amdsmi_get_processor_handles(): return []")
    expected = replace(INVENTORY, warnings=("an older warning", "0000:05:00.0: AMD SMI does not list this GPU"))
    assert cross_check(INVENTORY, read_report()) == expected


def test_the_later_spelling_of_the_uuid_and_partition_addresses_are_no_contradiction() -> None:
    report = Report(
        {
            "0000:05:00.0": SmiGpu("N", UUID.replace("afff", "af00"), 192 * GIB),
            "0000:05:00.1": SmiGpu("N", UUID.replace("afff", "af01"), 192 * GIB),
        }
    )
    assert cross_check(INVENTORY, report).warnings == ("an older warning",)


@pytest.mark.parametrize("name", ["N/A", "", "0x74a1", "\x00\x1b", "x" * 500, 7, None, ["MI300X"]])
def test_what_is_no_name_is_not_taken_for_one(package: Path, name: object) -> None:
    said_as_json = json.dumps(name)
    spoil(package, "import json")
    spoil(package, f"def amdsmi_get_gpu_asic_info(handle): return {{'market_name': json.loads({said_as_json!r})}}")
    report = read_report()
    assert report.reason is None
    said = cross_check(INVENTORY, report).gpus[0].product_name
    assert said == ("x" * 128 if name == "x" * 500 else "AMD gfx942")
