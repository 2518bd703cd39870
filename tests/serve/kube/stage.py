"""A cluster of one node for tests of what faces it: an API server in memory, a Node, and a scheduler that does what
HAMi's does: writes an allocation on a pod, takes the node lock for it, binds it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from amdvgpud.core import hami
from amdvgpud.core.model import Inventory, Slice
from amdvgpud.node import Node
from amdvgpud.serve.kube.api import Access, KubeApi
from amdvgpud.serve.kube.hami import HamiSettings, HamiSide
from amdvgpud.serve.kube.pods import Held, PodWatch
from amdvgpud.serve.kube.resources import Grant
from tests.fakes import MemoryCdi, MemoryFiles, MemoryJournal, StillModes, StillSysfs, a_gpu
from tests.serve.kube.fake_kubeapi import FakeKubeApi, Json

HERE = "n1"
GPU, OTHER = (f"GPU-{0xABCD0000 + i:016x}" for i in (0, 1))


def deliver(slices: Sequence[Slice]) -> Grant:
    names = tuple(item.name for item in slices)
    return Grant(
        cdi_devices=tuple(f"amdvgpu.io/slice={name}" for name in names),
        environment=(("AMDVGPU_SLICE", ",".join(names)),),
    )


@dataclass
class Stage:
    api: FakeKubeApi
    client: KubeApi
    sysfs: StillSysfs
    modes: StillModes
    node: Node
    files: MemoryFiles
    journal: MemoryJournal
    watch: PodWatch
    side: HamiSide
    now_s: float = 1_000_000.0
    held: set[tuple[str, str]] = field(default_factory=set)
    """Pods that the kubelet says have devices."""
    remembered: set[str] = field(default_factory=set)
    """Uids of those that it has on disk."""
    uids: int = 0
    disk_fails: Exception | None = None
    """What happens when it is written down what slices are for a container."""

    @classmethod
    async def of(cls, *gpus: int, settings: HamiSettings | None = None, journal: MemoryJournal | None = None) -> Stage:
        api = FakeKubeApi()
        api.add_node(HERE)
        client = KubeApi(Access(await api.start()), timeout_s=5, pause=_at_once)
        return await cls.around(api, client, gpus or (0, 1), settings, MemoryJournal())

    @classmethod
    async def around(
        cls,
        api: FakeKubeApi,
        client: KubeApi,
        gpus: Sequence[int],
        settings: HamiSettings | None,
        journal: MemoryJournal,
    ) -> Stage:
        sysfs = StillSysfs(Inventory(tuple(a_gpu(i) for i in gpus), generation_id=1))
        files = MemoryFiles()
        modes = StillModes(sysfs)
        node = Node(
            sysfs,
            journal,
            files,
            MemoryCdi(),
            now_s=lambda: stage.now_s,
            process_alive=lambda _: True,
            modes=modes,
            pause=_at_once,
        )
        settings = settings or HamiSettings(HERE, gate="/usr/lib/amdvgpu/libamdvgpu.so")

        async def held() -> Held:
            return Held(frozenset(stage.held), frozenset(stage.remembered))

        def delivered(slices: Sequence[Slice]) -> Grant:
            if stage.disk_fails is not None:
                raise stage.disk_fails
            return deliver(slices)

        watch = PodWatch(node, client, HERE, held=held, now_s=lambda: stage.now_s)
        side = HamiSide(
            node, client, settings, watch, delivered, now_s=lambda: stage.now_s, pause=_at_once, jitter=lambda: 0.0
        )
        stage = cls(api, client, sysfs, modes, node, files, journal, watch, side)
        await node.start()
        return stage

    async def restarted(self) -> Stage:
        """The daemon anew, over what is on disk and in the API."""
        return await self.around(self.api, self.client, (0, 1), None, self.journal)

    async def close(self) -> None:
        await self.client.close()
        await self.api.stop()

    # ----------------------------------------------------------------------------------------- what others do

    def pod(self, name: str, *containers: Json, allocation: str, **more: Any) -> Json:
        """Scheduled, locked and bound: the kubelet is about to allocate for it."""
        return self.lock(self.scheduled(name, *containers, allocation=allocation, **more))

    def scheduled(
        self,
        name: str,
        *containers: Json,
        allocation: str,
        init: Sequence[Json] = (),
        notes: dict[str, Any] | None = None,
    ) -> Json:
        self.uids += 1
        return self.api.add_pod(bound_pod(name, self.uids, allocation, *containers, init=init, notes=notes))

    def lock(self, pod: Json) -> Json:
        text = f"2026-01-01T00:00:00Z,{pod['metadata']['namespace']},{pod['metadata']['name']}"
        self.api.change_node(HERE, {"metadata": {"annotations": {hami.LOCK: text}}})
        return pod

    # -------------------------------------------------------------------------------------------- what is seen

    def locked(self) -> str | None:
        return self.api.annotations("node", HERE).get(hami.LOCK)

    def notes(self, name: str) -> dict[str, str]:
        return self.api.annotations("pod", "default", name)

    def slices(self) -> dict[str, list[tuple[str, int, int]]]:
        """By name: (partition, MiB, CUs; 0: whole) of each share."""
        return {
            name: [(s.partition, s.vram_bytes >> 20, len(s.cus or ())) for s in item.shares]
            for name, item in sorted(self.node.view().book.slices.items())
        }


def bound_pod(
    name: str,
    number: int,
    allocation: str,
    *containers: Json,
    init: Sequence[Json] = (),
    notes: dict[str, str | None] | None = None,
) -> Json:
    """As the scheduler leaves it when it has bound it; ``notes`` are laid over its annotations (None: taken away)."""
    annotations = {
        hami.WAITING: allocation,
        hami.ALLOCATED: allocation,
        hami.ASSIGNED_NODE: HERE,
        hami.BIND_PHASE: hami.ALLOCATING,
        hami.BIND_TIME: str(1_000_000 + number),
        **(notes or {}),
    }
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": f"00000000-0000-4000-8000-{number:012}",
            "annotations": {key: value for key, value in annotations.items() if value is not None},
        },
        "spec": {
            "nodeName": HERE,
            "initContainers": list(init),
            "containers": list(containers) or [a_container("main")],
        },
        "status": {"phase": "Pending"},
    }


def a_container(name: str, gpus: int = 1, restart: str = "", **limits: int) -> Json:
    wanted = {"amd.com/gpu": gpus} if gpus else {}
    wanted |= {f"amd.com/{key}": value for key, value in limits.items()}
    return {
        "name": name,
        "image": "none",
        "resources": {"limits": {key: str(value) for key, value in wanted.items()}},
        **({"restartPolicy": restart} if restart else {}),
    }


def slice_of(pod: Json, ordinal: int = 0) -> str:
    return f"pod-{pod['metadata']['uid']}.{ordinal}"


async def _at_once(_: float) -> None:
    await asyncio.sleep(0)
