"""What a pod costs that HAMi's scheduler sends: 200 of them come and go, on real files, over an API server in memory.

The API server answers on the loopback in the same process, so its own time is in the figure, and a network is not.
Raises if anything is left at the end: a slice, a lease, a lock, a folder.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import amdvgpud._abi
from amdvgpud.core import hami
from amdvgpud.host.cdi import CdiFile
from amdvgpud.host.ledger import LedgerFiles
from amdvgpud.host.store import BookStore
from amdvgpud.host.sysfs import SysfsReader
from amdvgpud.node import Node
from amdvgpud.serve.kube.api import Access, KubeApi
from amdvgpud.serve.kube.hami import HamiSettings, HamiSide
from amdvgpud.serve.kube.pods import PodWatch
from amdvgpud.serve.kube.resources import grant_of
from amdvgpud.sim.models import parse_simulation
from amdvgpud.sim.tree import build_tree
from bench.gate import record
from tests.serve.kube.fake_kubeapi import FakeKubeApi
from tests.serve.kube.stage import HERE, bound_pod

PODS = 200
ROUNDS = 3
TOGETHER = 10


def figures() -> Iterator[tuple[str, dict[str, Any]]]:
    p99s, took = zip(*(asyncio.run(_round()) for _ in range(ROUNDS)), strict=True)
    yield "allocate for a pod of HAMi's scheduler, p99", record(list(p99s), "ms", 20.0)
    yield f"{PODS} pods made and deleted, nothing left", record(list(took), "s", 60.0)


async def _round() -> tuple[float, float]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="amdvgpud-bench-"))
    try:
        return await _pods(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _pods(folder: Path) -> tuple[float, float]:
    """(99th percentile of an Allocate in ms, seconds for all)."""
    machine = folder / "machine"
    build_tree(parse_simulation("2*mi300x"), machine)
    cdi = CdiFile(
        folder / "cdi",
        run_dir=folder / "run",
        library=Path(amdvgpud._abi.__file__).with_name("libamdvgpu.so"),
        sysfs_root=machine,
    )
    files = LedgerFiles(folder / "run", sysfs_root=machine, tmpfs_bytes=256 << 20)
    node = Node(
        SysfsReader(machine), BookStore(folder / "state"), files, cdi, now_s=time.time, process_alive=lambda _: True
    )
    await node.start()
    server = FakeKubeApi()
    server.add_node(HERE)
    api = KubeApi(Access(await server.start()))
    watch = PodWatch(node, api, HERE, now_s=time.time)
    side = HamiSide(
        node,
        api,
        HamiSettings(HERE),
        watch,
        lambda items: grant_of(items, cdi.render(items, node.view().inventory), lambda _: str(folder)),
    )
    await side.keep()
    following = asyncio.create_task(watch.run())
    gpus = [offer.id for offer in side.offers(node.view())]
    took, began = [], time.perf_counter()
    for number in range(PODS):
        _add(server, number, gpus[number % len(gpus)])
        start = time.perf_counter()
        await side.resource.allocate([f"{gpus[number % len(gpus)]}#0"])
        took.append(time.perf_counter() - start)
        if number >= TOGETHER:
            server.delete_pod("default", f"p{number - TOGETHER}")
        if number % TOGETHER == 0:
            await watch.release_ended(0)
    for number in range(PODS - TOGETHER, PODS):
        server.delete_pod("default", f"p{number}")
    while watch.pods:
        await asyncio.sleep(0.01)
    await watch.release_ended(0)
    seconds = time.perf_counter() - began
    following.cancel()
    book = node.view().book
    left = [*book.slices, *book.leases, *files.names(), *server.annotations("node", HERE).keys() & {hami.LOCK}]
    assert not left, left
    await api.close()
    await server.stop()
    return statistics.quantiles(took, n=100)[98] * 1000, seconds


def _add(server: FakeKubeApi, number: int, gpu: str) -> None:
    server.add_pod(bound_pod(f"p{number}", number, f"{gpu},AMD,8192,30:;"))
    lock = f"2026-01-01T00:00:00Z,default,p{number}"
    server.change_node(HERE, {"metadata": {"annotations": {hami.LOCK: lock}}})
