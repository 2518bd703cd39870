"""A whole API over a real Node on stand-in ports, on a real unix socket and on real loopback TCP."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from amdvgpud.core.containers import Container
from amdvgpud.core.model import GpuUsage, Holder, ProcessUsage, SliceName, Usage
from amdvgpud.core.truth import Comparison, KernelPicture, KernelProcess, compare
from amdvgpud.guard import GuardView
from amdvgpud.node import Node
from amdvgpud.serve.endpoints import Process
from amdvgpud.serve.metrics import CountedCdi, Metrics
from amdvgpud.serve.rest import Api, ApiSettings
from tests.fakes import MemoryCdi, MemoryFiles, MemoryJournal, StillSysfs, an_inventory


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    """Without regard to letter case."""
    json: Any
    text: str


@dataclass
class Desk:
    """The API with the hands on all that is around it."""

    run_dir: Path
    gpu_count: int = 2
    now_s: float = 1000.0
    processes: dict[int, Process] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    compat: tuple[str, ...] = ()
    seen: GuardView = field(default_factory=GuardView)
    """What the kernel has said at its last look."""

    def __post_init__(self) -> None:
        self.sysfs = StillSysfs(an_inventory(self.gpu_count))
        self.files = MemoryFiles()
        self.token_file = self.run_dir / "token"
        self.metrics = Metrics(
            self.sysfs,
            version="1.2.3",
            python="3.11",
            cdi_kind="amdvgpu.io/slice",
            compat=self.compat,
            cluster_node="n1",
            now_s=lambda: self.now_s,
        )
        self.cdi = MemoryCdi()
        self.node = Node(
            self.sysfs,
            MemoryJournal(),
            self.files,
            CountedCdi(self.cdi, self.metrics),
            now_s=lambda: self.now_s,
            process_alive=self._alive,
        )
        self.api = self.another_api()
        self._clients = AsyncExitStack()

    def _alive(self, holder: Holder) -> bool:
        if holder.pid is None:
            return True
        process = self.processes.get(holder.pid)
        return process is not None and process.start_ticks == holder.start_ticks

    def another_api(self) -> Api:
        names = (f"made-{n}" for n in range(1, 1000))
        defaults: dict[str, Any] = {
            "socket_path": self.run_dir / "api.sock",
            "token_file": self.token_file,
            "tcp": ("127.0.0.1", 0),
            "max_wait_s": 20.0,
        }
        return Api(
            self.node,
            self.cdi,
            self.metrics,
            ApiSettings(**(defaults | self.settings)),
            version="1.2.3",
            run_dir=self.run_dir,
            process_of=self.processes.get,
            config=lambda: {"tick_s": 2.0, "rest.token": "hunter2hunter2"},
            now_s=lambda: self.now_s,
            new_name=lambda: next(names),
            guard=lambda: self.seen,
        )

    def kernel_says(self, *processes: KernelProcess) -> None:
        """That these use the GPUs; held against the ledgers as they are."""
        view = self.node.view()
        picture = KernelPicture(self.now_s, processes)
        comparison = compare(view.book, view.inventory, view.usage, picture)
        evicted_s = {(name, at): 1.5 for name, t in (comparison or Comparison()).slices.items() for at in t.gpus}
        self.seen = GuardView(picture, comparison, evicted_s, looked=True, duration_s=0.25, last_success_s=self.now_s)

    async def contained(self, *slices: str) -> None:
        """One container has them."""
        name = "0123456789abcdef" * 4
        one = Container(SliceName(""), name, 7, 70, f"/machine.slice/libpod-{name}.scope", None, 0.0, reported=True)
        await self.node.set_containers({SliceName(s): (replace(one, slice=SliceName(s)),) for s in slices})

    def kernel_counts(self, size_bytes: int) -> None:
        """For the container, on the first GPU."""
        view = self.node.view()
        ((one, *_), *_) = view.containers.values()
        counted = {str(one.cgroup): {view.inventory.gpus[0].id: size_bytes}}
        self.seen = replace(self.seen, picture=replace(self.seen.picture, dmem_bytes=counted))

    async def start(self) -> None:
        await self.node.start()
        await self.api.serve_unix()
        self.port = await self.api.serve_tcp()
        self.unix = await self._clients.enter_async_context(
            aiohttp.ClientSession(
                "http://localhost", connector=aiohttp.UnixConnector(str(self.run_dir / "api.sock"), limit=0)
            )
        )
        self.tcp = await self._clients.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{self.port}"))

    async def stop(self) -> None:
        await self._clients.aclose()
        await self.api.close()

    async def ask(self, method: str, path: str, body: object = None, *, tcp: bool = False, **more: Any) -> Answer:
        """One request; a dict body goes as JSON (as a merge patch for PATCH)."""
        headers = dict(more.pop("headers", {}))
        if body is not None:
            more["json"] = body
            if method == "PATCH":
                headers.setdefault("Content-Type", "application/merge-patch+json")
        async with (self.tcp if tcp else self.unix).request(method, path, headers=headers, **more) as answer:
            text = await answer.text()
            json = await answer.json(content_type=None) if "json" in answer.content_type and text else None
            return Answer(answer.status, answer.headers, json, text)

    def guest_uses(self, name: str, used_bytes: int, *, gpu: int = 0, pids: tuple[int, ...] = (4321,)) -> None:
        """What a guest of slice ``name`` has written into its ledger, on the gpu-th GPU."""
        kfd_gpu_id = self.sysfs.inventory.gpus[gpu].partitions[0].kfd_gpu_id
        self.files.usages[SliceName(name)] = Usage(
            SliceName(name),
            (GpuUsage(kfd_gpu_id, used_bytes, used_bytes + 100, 3, 4096, 7, 5),),
            tuple(ProcessUsage(i, pid, 77, 4026531836, {kfd_gpu_id: used_bytes}) for i, pid in enumerate(pids)),
            reclaimed_bytes=11,
        )


MakeDesk = Callable[..., Any]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Not tmp_path: a socket's path has to fit 108 bytes, and another uid has to be able to reach it."""
    with tempfile.TemporaryDirectory(prefix="avg") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture
async def make_desk(run_dir: Path) -> AsyncIterator[MakeDesk]:
    """``await make_desk(**what Desk takes)``: a started Desk, stopped after the test."""
    async with AsyncExitStack() as stack:

        async def make(**parts: Any) -> Desk:
            desk = Desk(run_dir, **parts)
            await desk.start()
            stack.push_async_callback(desk.stop)
            return desk

        yield make


@pytest.fixture
async def desk(make_desk: MakeDesk) -> Desk:
    made: Desk = await make_desk()
    return made


@pytest.fixture
def as_user() -> Callable[[int, int, list[int]], Any]:
    """``with as_user(uid, gid, groups):`` what connects inside has these credentials. Needs root."""

    @contextmanager
    def become(uid: int, gid: int, groups: list[int]) -> Iterator[None]:
        before = os.getgroups()
        os.setgroups(groups)
        os.setegid(gid)
        os.seteuid(uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)
            os.setgroups(before)

    return become
