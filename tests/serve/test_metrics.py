"""/metrics: what is named, what is absent, what ends with its slice; read back by parsers that are not ours."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from typing import Any

import pytest
from prometheus_client import parser as classic_parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from amdvgpud.core import wire
from amdvgpud.core.errors import Conflict, NoRoom
from amdvgpud.core.health import Condition, Health
from amdvgpud.core.model import Holder, Inventory, SliceName
from amdvgpud.core.truth import Belonging, KernelProcess
from amdvgpud.serve.exposition import CLASSIC, HAMI_METRICS, METRICS, OPENMETRICS, labels_text
from amdvgpud.serve.metrics import SLICE_STATES
from tests.fakes import an_inventory

GIB = 1024**3
GPU0, GPU1 = "GPU-00000000abcd0000", "GPU-00000000abcd0001"
OPEN = {"Accept": "application/openmetrics-text; version=1.0.0, text/plain;q=0.5"}


async def _samples(desk: Any, **more: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of a scrape over the unix socket: (name, sorted labels) → value. A sample that comes twice fails."""
    text = (await desk.ask("GET", "/metrics", **more)).text
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in classic_parser.text_string_to_metric_families(text):
        for s in family.samples:
            key = s.name, tuple(sorted(s.labels.items()))
            assert key not in found, key
            found[key] = s.value
    return found


def _of(samples: dict[Any, float], name: str) -> dict[tuple[str, ...], float]:
    """Label values in order of label names → value, of one name."""
    return {tuple(v for _, v in labels): value for (n, labels), value in samples.items() if n == name}


async def test_a_slice_shows_limit_usage_units_and_counts_under_its_identity(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "16GiB", "compute": "25%", "on": ["0"]})
    desk.guest_uses("alice", 5000)
    await desk.node.tick()
    got = await _samples(desk)
    share = tuple(sorted({"slice": "alice", "gpu_uuid": GPU0, "partition": "0"}.items()))
    assert {name: value for (name, labels), value in got.items() if labels == share} == {
        "amdvgpu_slice_vram_limit_bytes": 16 * GIB,
        "amdvgpu_slice_vram_used_bytes": 5000,
        "amdvgpu_slice_vram_peak_bytes": 5100,
        "amdvgpu_slice_denied_bytes_total": 4096,
        "amdvgpu_slice_allocations_total": 7,
        "amdvgpu_slice_frees_total": 5,
        "amdvgpu_slice_compute_units": 64,
        "amdvgpu_slice_compute_ratio": 64 / 304,
    }
    assert got["amdvgpu_slice_denials_total", tuple(sorted([*share, ("reason", "limit")]))] == 3
    alone = (("slice", "alice"),)
    assert got["amdvgpu_slice_reclaimed_bytes_total", alone] == 11
    assert got["amdvgpu_slice_processes", alone] == 1
    assert got["amdvgpu_slice_ledger_damaged", alone] == 0


async def test_a_gpu_shows_what_it_has_what_is_promised_and_by_how_much(desk: Any) -> None:
    await desk.ask("PATCH", "/v1/gpus/0", {"oversubscription": 1.5})
    for name, vram in (("alice", "96GiB"), ("bob", "192GiB")):
        await desk.ask("PUT", f"/v1/slices/{name}", {"vram": vram, "compute": "25%", "on": ["0"]})
    await desk.ask("POST", "/v1/leases", {"slice": "bob"})
    desk.sysfs.used_bytes = {"0000:11:00.0": 777}
    await desk.metrics.sample(desk.node.view().inventory)
    got = await _samples(desk)
    assert _of(got, "amdvgpu_gpu_vram_total_bytes") == {(GPU0,): 192 * GIB, (GPU1,): 192 * GIB}
    assert _of(got, "amdvgpu_gpu_vram_used_bytes") == {(GPU0,): 777}  # absent is not zero
    assert _of(got, "amdvgpu_gpu_vram_reserved_bytes") == {(GPU0,): 288 * GIB, (GPU1,): 0}
    assert _of(got, "amdvgpu_gpu_vram_overcommit_ratio") == {(GPU0,): 1.5, (GPU1,): 0}
    assert _of(got, "amdvgpu_gpu_vram_oversubscription_ratio") == {(GPU0,): 1.5, (GPU1,): 1}
    assert _of(got, "amdvgpu_gpu_compute_units") == {(GPU0,): 304, (GPU1,): 304}
    assert _of(got, "amdvgpu_gpu_compute_units_allocated") == {(GPU0,): 128, (GPU1,): 0}
    assert _of(got, "amdvgpu_gpu_slices") == {
        (gpu, state): float(gpu == GPU0 and state in ("free", "held")) for gpu in (GPU0, GPU1) for state in SLICE_STATES
    }
    (info,) = [dict(labels) for (n, labels) in got if n == "amdvgpu_gpu_info" and ("gpu_uuid", GPU0) in labels]
    assert info == {
        "gpu_uuid": GPU0,
        "gpu_id": "0",
        "pci_bdf": "0000:11:00.0",
        "model": "AMD Instinct MI300X",
        "gfx_target": "gfx942",
        "numa_node": "0",
        "compute_partition": "SPX",
        "memory_partition": "NPS1",
        "driver": "",
    }


async def test_how_a_gpu_is_is_a_state_of_it_with_who_found_each_change(desk: Any) -> None:
    assert not any("health" in name for name, _ in await _samples(desk))
    bad = Health(Condition.UNHEALTHY, "renderD128 answers EIO", "pulse", 5.0)
    doubt = Health(Condition.UNKNOWN, "it is being reset", "smi", 6.0)
    await desk.node.set_health({GPU0: bad, GPU1: Health()})
    await desk.node.set_health({GPU0: Health(), GPU1: doubt})
    desk.metrics.health_checks = lambda: {"sysfs": True, "exporter": False}
    got = await _samples(desk)
    assert _of(got, "amdvgpu_gpu_healthy") == {(GPU0,): 1, (GPU1,): 0}
    states = ("healthy", "degraded", "unhealthy", "unknown")
    assert _of(got, "amdvgpu_gpu_health_state") == {
        (gpu, state): int(state == held) for gpu, held in ((GPU0, "healthy"), (GPU1, "unknown")) for state in states
    }
    assert _of(got, "amdvgpu_gpu_health_transitions_total") == {(GPU0, "pulse"): 2, (GPU1, "smi"): 1}
    assert _of(got, "amdvgpu_health_check_success") == {("exporter",): 0, ("sysfs",): 1}


async def test_the_series_of_a_slice_are_gone_in_the_scrape_after_its_end(desk: Any) -> None:
    await desk.ask("GET", "/metrics")
    before = set(await _samples(desk))
    body = {"request": {"vram": "1GiB", "compute": "25%"}, "holder": "h"}
    lease = (await desk.ask("POST", "/v1/leases", body)).json
    desk.guest_uses(lease["slice"], 5000)
    await desk.node.tick()
    during = set(await _samples(desk))
    assert len([k for k in during if ("slice", lease["slice"]) in k[1]]) == 13
    await desk.ask("DELETE", f"/v1/leases/{lease['id']}")
    after = set(await _samples(desk))
    assert [k for k in after if ("slice", lease["slice"]) in k[1]] == []
    # What stays is of closed sets: how often which operation and route was used.
    assert {name.split("_")[1] for name, _ in after - before} <= {"http", "allocation", "cdi"}


async def test_ten_thousand_leases_later_the_answer_is_as_long_as_before(
    desk: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def cycle(n: int) -> None:
        request = wire.request_of(f"s{n}", wire.SliceSpec(vram="1GiB", compute="25%"))
        with desk.metrics.operation("bind"):
            lease = await desk.node.grant_lease(Holder(f"holder {n}"), request=request)
        await desk.node.release_lease(lease.id)

    async def size() -> int:
        return len(await _samples(desk))

    async def at_once(function: Any, *args: Any, **named: Any) -> Any:
        return function(*args, **named)

    # The ports are in memory here: twenty thousand hops to a thread and lines of log would be most of the time.
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    caplog.set_level("WARNING")
    await cycle(0)
    await size()
    before = await size()
    for n in range(1, 10_000):
        await cycle(n)
    assert await size() == before
    assert len(desk.node.view().usage) == 0


async def test_a_lease_without_a_process_and_a_whole_gpu_show_limit_units_and_zero_usage_at_once(desk: Any) -> None:
    await desk.ask("POST", "/v1/leases", {"request": {"vram": "1GiB", "compute": "25%", "on": ["0"]}})
    await desk.ask("POST", "/v1/leases", {"request": {"compute": "whole", "on": ["1"]}})
    got = await _samples(desk)
    made, whole = (GPU0, "0", "made-1"), (GPU1, "0", "made-2")
    assert _of(got, "amdvgpu_slice_vram_limit_bytes") == {made: GIB, whole: 192 * GIB}
    assert _of(got, "amdvgpu_slice_compute_units") == {made: 64, whole: 304}
    assert _of(got, "amdvgpu_slice_compute_ratio") == {made: 64 / 304, whole: 1}
    assert _of(got, "amdvgpu_slice_vram_used_bytes") == {made: 0, whole: 0}


async def test_the_number_of_series_does_not_depend_on_any_value(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%"})
    await desk.ask("PATCH", "/v1/slices/alice", {"vram": "2GiB"})
    await _samples(desk)
    before = set(await _samples(desk))
    for n in range(1, 4):
        await desk.ask("PATCH", "/v1/slices/alice", {"vram": f"{n}GiB"})
        desk.guest_uses("alice", n * 1000, pids=tuple(range(n)))
        await desk.node.tick()
        assert set(await _samples(desk)) == before


async def test_a_slice_of_two_gpus_has_one_series_for_each_and_none_twice(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/two", {"vram": "1GiB", "compute": "25%", "gpus": 2})
    await desk.ask("PUT", "/v1/slices/one", {"vram": "2GiB", "compute": "25%", "on": ["1"]})
    desk.guest_uses("two", 5000, gpu=1)
    await desk.node.tick()
    used = _of(await _samples(desk), "amdvgpu_slice_vram_used_bytes")
    assert used == {(GPU0, "0", "two"): 0, (GPU1, "0", "two"): 5000, (GPU1, "0", "one"): 0}


async def test_a_lost_slice_keeps_its_promise_and_shows_no_usage(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%", "on": ["1"]})
    desk.sysfs.inventory = Inventory(desk.sysfs.inventory.gpus[:1])
    await desk.node.rescan()
    got = await _samples(desk)
    assert _of(got, "amdvgpu_slice_vram_limit_bytes") == {(GPU1, "0", "alice"): GIB}
    assert _of(got, "amdvgpu_slice_vram_used_bytes") == {}
    assert _of(got, "amdvgpu_cdi_devices") == {("amdvgpu.io/slice",): 0}


async def test_a_gpu_that_has_left_is_not_as_if_it_had_never_been(desk: Any) -> None:
    assert _of(await _samples(desk), "amdvgpu_gpu_gone") == {}
    there, left = desk.sysfs.inventory.gpus
    desk.sysfs.inventory = Inventory((there,))
    await desk.node.rescan()
    assert _of(await _samples(desk), "amdvgpu_gpu_gone") == {(left.id,): 1}
    listed = (await desk.ask("GET", "/v1/gpus")).json
    assert [(g["id"], g["pci_address"]) for g in listed["gone"]] == [(left.id, left.pci_address)]
    for name in (left.id, left.pci_address):
        answer = await desk.ask("GET", f"/v1/gpus/{name}")
        assert (answer.status, answer.json["detail"]) == (404, f"GPU {left.id} was here and is gone")
    assert "names no GPU" in (await desk.ask("GET", "/v1/gpus/GPU-77")).json["detail"]


async def test_temperatures_are_of_the_last_sample_and_absent_of_who_has_none(desk: Any) -> None:
    warm, _ = desk.node.view().inventory.gpus
    desk.sysfs.degrees_c = {warm.pci_address: {"edge": 41.5, "junction": 50.0}}
    assert _of(await _samples(desk), "amdvgpu_gpu_temperature_celsius") == {}
    await desk.metrics.sample(desk.node.view().inventory)
    assert _of(await _samples(desk), "amdvgpu_gpu_temperature_celsius") == {
        (warm.id, "edge"): 41.5,
        (warm.id, "junction"): 50.0,
    }
    listed = (await desk.ask("GET", "/v1/gpus")).json["gpus"]
    assert [g["temperatures_c"] for g in listed] == [{"edge": 41.5, "junction": 50.0}, {}]
    assert (await desk.ask("GET", f"/v1/gpus/{warm.id}")).json["temperatures_c"]["edge"] == 41.5


async def test_a_scrape_reads_no_device(desk: Any) -> None:
    def refuse(pci_address: str) -> int | None:
        raise AssertionError("a scrape has read a device")

    desk.sysfs.vram_used_bytes = desk.sysfs.temperatures_c = refuse
    reads = desk.sysfs.reads
    assert (await desk.ask("GET", "/metrics")).status == 200
    assert desk.sysfs.reads == reads


async def test_a_sample_that_fails_is_told_and_its_figures_are_absent(desk: Any) -> None:
    def broken(pci_address: str) -> int | None:
        if pci_address == "0000:11:00.0":
            raise OSError("gone")
        return 5

    desk.sysfs.vram_used_bytes = broken
    await desk.metrics.sample(desk.node.view().inventory)
    got = await _samples(desk)
    assert _of(got, "amdvgpu_gpu_vram_used_bytes") == {(GPU1,): 5}
    assert _of(got, "amdvgpu_collector_success") == {("sysfs",): 0}
    assert _of(got, "amdvgpu_collector_last_success_timestamp_seconds") == {}
    desk.sysfs.vram_used_bytes = lambda pci_address: 5
    await desk.metrics.sample(desk.node.view().inventory)
    got = await _samples(desk)
    assert _of(got, "amdvgpu_collector_success") == {("sysfs",): 1}
    assert _of(got, "amdvgpu_collector_last_success_timestamp_seconds") == {("sysfs",): 1000}


async def test_operations_are_timed_and_failures_counted_by_reason(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/a", {"vram": "1GiB", "compute": "25%"})
    await desk.ask("PUT", "/v1/slices/b", {"vram": "4TiB", "compute": "25%"})
    await desk.ask("POST", "/v1/leases", {"slice": "a"})
    await desk.ask("POST", "/v1/leases", {"slice": "a"})
    await desk.ask("DELETE", "/v1/slices/a")
    got = await _samples(desk)
    assert _of(got, "amdvgpu_allocation_failures_total") == {
        ("create", "no_vram"): 1,
        ("bind", "conflict"): 1,
        ("delete", "conflict"): 1,
    }
    assert _of(got, "amdvgpu_allocation_duration_seconds_count") == {
        ("create", "ok"): 1,
        ("create", "failed"): 1,
        ("bind", "ok"): 1,
        ("bind", "failed"): 1,
        ("delete", "failed"): 1,
    }


async def test_an_operation_counts_what_nobody_foresaw_as_internal_and_passes_it_on(desk: Any) -> None:
    metrics = desk.metrics
    for error in (ZeroDivisionError(), NoRoom("full", "no_cus"), Conflict("held")):
        with pytest.raises(type(error)), metrics.operation("resize"):
            raise error
    with pytest.raises(asyncio.CancelledError), metrics.operation("resize"):
        raise asyncio.CancelledError
    samples = [s for f in metrics._registry.collect() for s in f.samples if s.name.endswith("failures_total")]
    assert {s.labels["reason"]: s.value for s in samples} == {"internal": 1, "no_cus": 1, "conflict": 1}


async def test_publications_of_the_cdi_file_are_counted_by_result(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/a", {"vram": "1GiB", "compute": "25%"})
    await desk.ask("POST", "/v1/reload")
    desk.cdi.faults.failing.add("publish")
    desk.now_s = 2000.0
    await desk.ask("PUT", "/v1/slices/b", {"vram": "1GiB", "compute": "25%"})
    got = await _samples(desk)
    # At start, for a; the reload's and the undoing of b change nothing; the failed one is b's.
    assert _of(got, "amdvgpu_cdi_writes_total") == {("written",): 2, ("unchanged",): 2, ("failed",): 1}
    assert _of(got, "amdvgpu_cdi_last_write_timestamp_seconds") == {(): 2000.0}
    assert _of(got, "amdvgpu_reconcile_duration_seconds_count") == {(): 1}
    assert _of(got, "amdvgpu_reconcile_last_success_timestamp_seconds") == {(): 1000.0}


async def test_requests_are_counted_by_template_never_by_path(desk: Any) -> None:
    for path in ("/v1/slices/a", "/v1/slices/b", "/nothing/here", "/v1/slices?since=0&wait=0s"):
        await desk.ask("GET", path)
    await desk.ask("PROPFIND", "/v1/slices")
    got = await _samples(desk)
    assert _of(got, "amdvgpu_http_requests_total") == {
        ("404", "GET", "/v1/slices/{name}"): 2,
        ("404", "GET", "none"): 1,
        ("200", "GET", "/v1/slices"): 1,
        ("405", "other", "none"): 1,
    }
    assert ("GET", "/v1/slices") not in _of(got, "amdvgpu_http_request_duration_seconds_count")


async def test_names_of_workloads_are_on_slice_info_only(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%"})
    await desk.ask("POST", "/v1/leases", {"slice": "alice", "holder": 'train "a\\b"\nnow'})
    got = await _samples(desk)
    assert [n for n, labels in got if any("train" in v for _, v in labels)] == ["amdvgpu_slice_info"]
    assert list(_of(got, "amdvgpu_slice_info")) == [(GPU0, 'train "a\\b"\nnow', "0", "alice")]
    assert list(_of(await _samples(desk, tcp=True), "amdvgpu_slice_info")) == [(GPU0, "", "0", "alice")]


# ------------------------------------------------------------------------------------------------------ the formats


async def _full(make_desk: Any) -> Any:
    """A desk with every source in use."""
    desk = await make_desk(compat=("hami",))
    there = desk.sysfs.inventory
    for desk.sysfs.inventory in (an_inventory(3), there):  # one is gone
        await desk.node.rescan()
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%", "on": ["0"]})
    await desk.ask("PUT", "/v1/slices/bob", {"vram": "4TiB", "compute": "25%"})
    await desk.ask("POST", "/v1/leases", {"slice": "alice", "holder": "train.py"})
    desk.guest_uses("alice", 5000)
    await desk.ask("POST", "/v1/reload")
    desk.sysfs.used_bytes = {"0000:11:00.0": 777}
    desk.sysfs.degrees_c = {"0000:11:00.0": {"edge": 41.5}}
    await desk.metrics.sample(desk.node.view().inventory)
    desk.metrics.kubelet_devices("amd.com/gpu", [True, False])
    desk.metrics.kubelet_delivery = lambda: "cdi"
    await desk.node.set_health({GPU0: Health(Condition.DEGRADED, "hot", "smi", 5.0)})
    desk.metrics.health_checks = lambda: {"sysfs": True}
    desk.metrics.uevents = {("drm", "add"): 3}
    await desk.node.tick()
    inside = Belonging((SliceName("alice"),))
    desk.kernel_says(KernelProcess(99, 5, belonging=inside, vram_bytes={1000: 1}, cu_occupancy={1000: 9}))
    await desk.contained("alice")
    desk.kernel_counts(700)
    return desk


async def test_every_name_is_in_the_table_with_its_type_labels_and_help(make_desk: Any) -> None:
    desk = await _full(make_desk)
    text = (await desk.ask("GET", "/metrics")).text
    families = {
        f.name + ("_total" if f.type == "counter" else ""): f
        for f in classic_parser.text_string_to_metric_families(text)
        if not f.name.startswith(("process_", "python_"))
    }
    table = {m.name: m for m in (*METRICS, *HAMI_METRICS) if m.name != "hami_host_gpu_utilization_ratio"}
    assert set(families) == set(table)
    for name, family in families.items():
        metric = table[name]
        assert (family.type, family.documentation) == (metric.type, metric.help), name
        for s in family.samples:
            assert set(s.labels) - {"le"} == set(metric.labels), name


def test_one_unit_a_name_and_the_name_says_it() -> None:
    for metric in METRICS:
        base = metric.name.removesuffix("_total")
        for unit in ("bytes", "seconds", "ratio"):
            assert base.endswith("_" + unit) is (metric.unit == unit), metric.name
        assert ("compute_units" in base) is (metric.unit == "CUs"), metric.name
        assert metric.name.endswith("_total") is (metric.type == "counter"), metric.name
        assert metric.help.endswith("."), metric.name
        assert set(metric.labels).isdisjoint({"pid", "container_id", "path", "limit"}), metric.name


async def test_openmetrics_is_written_for_who_asks_for_it(make_desk: Any) -> None:
    desk = await _full(make_desk)
    await desk.ask("GET", "/metrics")
    plain = await desk.ask("GET", "/metrics")
    opened = await desk.ask("GET", "/metrics", headers=OPEN)
    assert (plain.headers["Content-Type"], opened.headers["Content-Type"]) == (CLASSIC, OPENMETRICS)
    # A strict parser.
    families = list(openmetrics_parser.text_string_to_metric_families(opened.text))  # type: ignore[no-untyped-call]
    changing = ("amdvgpu_http_", "process_", "python_")
    read = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for f in families
        for s in f.samples
        if not s.name.startswith(changing)
    }
    same = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for f in classic_parser.text_string_to_metric_families(plain.text)
        for s in f.samples
        if not s.name.startswith(changing)
    }
    assert read == same
    assert {f.name: f.unit for f in families}["amdvgpu_slice_vram_used_bytes"] == "bytes"
    for text in (plain.text, opened.text):
        assert "_created" not in text


@pytest.mark.parametrize("compat", [(), ("hami",)])
async def test_promtool_finds_nothing_to_say(make_desk: Any, compat: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is in Debian's package prometheus: apt-get install prometheus"
    desk = await _full(lambda **parts: make_desk(**(parts | {"compat": compat})))
    text = (await desk.ask("GET", "/metrics")).text
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


async def test_hamis_names_come_with_hamis_labels_and_only_if_asked_for(make_desk: Any) -> None:
    desk = await _full(make_desk)
    got = await _samples(desk)
    host = {"node": "n1", "device_index": "0", "device_uuid": GPU0, "device_type": "AMD Instinct MI300X"}
    guest = {"namespace": "", "pod": "", "container": "alice", "vdevice_index": "0", "device_uuid": GPU0}
    assert {(n, labels): v for (n, labels), v in got.items() if n.startswith("hami")} == {
        ("hami_vgpumonitor_collect_success", (("node", "n1"),)): 1,
        ("hami_host_gpu_memory_used_bytes", tuple(sorted(host.items()))): 777,
        ("hami_vgpu_memory_used_bytes", tuple(sorted(guest.items()))): 5000,
        ("hami_vgpu_memory_limit_bytes", tuple(sorted(guest.items()))): GIB,
    }


async def test_without_the_switch_there_is_no_name_of_hamis(desk: Any) -> None:
    assert not [n for n, _ in await _samples(desk) if n.startswith("hami")]


def test_label_values_are_escaped() -> None:
    assert labels_text(("a", "b"), ('x"y', "p\\q\nr")) == r'{a="x\"y",b="p\\q\nr"}'
    assert labels_text((), ()) == ""


# -------------------------------------------------------------------------------------------- what the kernel says


def _rogue(**figures: Any) -> KernelProcess:
    """A process of alice's that no ledger knows, with 7000 bytes on the first GPU; and on the second as they are."""
    return KernelProcess(99, 5, belonging=Belonging((SliceName("alice"),)), vram_bytes={1000: 7000, 1001: 0}, **figures)


async def test_before_the_kernel_was_asked_its_figures_are_absent_and_not_zero(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%", "on": ["0"]})
    text = (await desk.ask("GET", "/metrics")).text
    absent = ("driver_bytes", "untracked_bytes", "unmanaged_processes", "occupied", "evicted", "outside")
    assert [word for word in absent if word in text] == []


async def test_what_goes_around_the_gate_is_counted_by_slice_and_what_is_in_none_by_gpu(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%", "on": ["0"]})
    stranger = KernelProcess(100, 5, vram_bytes={1000: 0, 1001: 300})
    desk.kernel_says(_rogue(), stranger)
    got = await _samples(desk)
    share = (GPU0, "0", "alice")
    assert _of(got, "amdvgpu_slice_vram_driver_bytes") == {share: 7000}
    assert _of(got, "amdvgpu_slice_vram_untracked_bytes") == {share: 7000}
    assert _of(got, "amdvgpu_slice_unmanaged_processes") == {("alice",): 1}
    assert _of(got, "amdvgpu_slice_evicted_seconds_total") == {share: 1.5}
    assert _of(got, "amdvgpu_slice_compute_units_occupied") == {}
    assert _of(got, "amdvgpu_gpu_outside_processes") == {(GPU0,): 0, (GPU1,): 1}
    assert _of(got, "amdvgpu_gpu_vram_outside_bytes") == {(GPU0,): 0, (GPU1,): 300}
    assert _of(got, "amdvgpu_watchdog_findings_total") == {("unmanaged",): 0, ("untracked",): 0}
    assert _of(got, "amdvgpu_watchdog_signals_total") == {("terminate",): 0, ("kill",): 0}
    assert _of(got, "amdvgpu_collector_success")[("kernel",)] == 1
    assert _of(got, "amdvgpu_collector_last_success_timestamp_seconds")[("kernel",)] == 1000


async def test_occupancy_is_shown_where_the_kernel_tells_it(desk: Any) -> None:
    await desk.ask("PUT", "/v1/slices/alice", {"vram": "1GiB", "compute": "25%", "on": ["0"]})
    desk.kernel_says(_rogue(cu_occupancy={1000: 12}))
    assert _of(await _samples(desk), "amdvgpu_slice_compute_units_occupied") == {(GPU0, "0", "alice"): 12}


async def test_what_the_kernel_counts_for_containers_is_absent_where_it_is_not_a_slices_alone(desk: Any) -> None:
    for name in ("alice", "bob"):
        await desk.ask("PUT", f"/v1/slices/{name}", {"vram": "1GiB", "compute": "25%", "on": ["0"]})
    metric = "amdvgpu_slice_vram_dmem_bytes"
    assert _of(await _samples(desk), metric) == {}
    await desk.contained("alice")
    desk.kernel_counts(700)
    assert _of(await _samples(desk), metric) == {(GPU0, "0", "alice"): 700}
    await desk.contained("alice", "bob")
    assert _of(await _samples(desk), metric) == {}
