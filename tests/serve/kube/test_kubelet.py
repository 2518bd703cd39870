"""The device plugin against the stand-in kubelet, over real sockets: registration, devices, answers, neighbours."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from amdvgpud.core.delivery import Choice, Way
from amdvgpud.core.errors import Conflict, NoRoom, NotFound
from amdvgpud.core.health import Condition, Health
from amdvgpud.core.model import Compute, Partition
from amdvgpud.core.profiles import SliceProfile
from amdvgpud.node import NodeView
from amdvgpud.serve.kube.delivery import Delivery
from amdvgpud.serve.kube.kubelet import DevicePlugin, KubeletSettings, outdated
from amdvgpud.serve.kube.leases import KubeletLeases
from amdvgpud.serve.kube.podresources import CHECKPOINT, PodResources
from amdvgpud.serve.kube.profiles import ProfileResource, Profiles
from amdvgpud.serve.kube.resources import Device, Grant, GrantMount, GrantNode, Resource, fit, numa_node_of
from amdvgpud.serve.pb import deviceplugin_pb2 as pb
from tests.serve.conftest import Desk
from tests.serve.kube.kubelet import a_kubelet

GPU = "amd.com/gpu"


@dataclass
class TenSlots:
    """Ten slots a GPU; each is given a device node after its own id."""

    name: str = GPU
    failures: list[Exception] = field(default_factory=list)
    node: str = "/dev/dri/renderD128"
    strange: bool = False
    """What starts was served by somebody else."""

    def devices(self, view: NodeView) -> Sequence[Device]:
        return tuple(
            Device(f"{key(place)}#{slot}", fit(view, place.gpu), numa_node_of(place))
            for place in view.inventory.partitions
            for slot in range(10)
        )

    async def allocate(self, ids: Sequence[str]) -> Grant:
        if self.failures:
            raise self.failures.pop(0)
        return Grant(
            ("amdvgpu.io/slice=a",),
            (("AMDVGPU_SLICE", "a"),),
            (GrantMount("/run/amdvgpud/slices/a/guest/ledger", "/run/amdvgpu/a/ledger", read_only=False),),
            (GrantNode(self.node, self.node),),
            added_environment=(("IDS", ",".join(ids)),),
        )

    async def again(self, ids: Sequence[str], pod_uid: str, container: str) -> Grant | None:
        assert (pod_uid, container) == ("uid-1", "main")
        return None if self.strange else await self.allocate(ids)

    def prefer(self, view: NodeView, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        if self.failures:
            raise self.failures.pop(0)
        return sorted(available, reverse=True)[:size]


def key(partition: Partition) -> str:
    return partition.gpu


@pytest.fixture
def plugins_dir(run_dir: Path) -> Path:
    return run_dir / "kubelet" / "device-plugins"


def a_plugin(desk: Desk, dir: Path, *resources: Resource, **settings: object) -> DevicePlugin:
    return DevicePlugin(
        desk.node,
        lambda: resources or (TenSlots(),),
        KubeletSettings(dir, look_s=0.05, **settings),  # type: ignore[arg-type]
        desk.metrics,
        PodResources(dir.parent / "pod-resources" / "kubelet.sock"),
    )


@contextlib.asynccontextmanager
async def running(plugin: DevicePlugin) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(plugin.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_resource_is_registered_and_its_devices_are_shown(desk: Desk, plugins_dir: Path) -> None:
    async with a_kubelet(plugins_dir) as kubelet, running(a_plugin(desk, plugins_dir)):
        plugin = await kubelet.registered(GPU, within_s=2)
    assert (plugin.request.version, plugin.request.resource_name) == ("v1beta1", GPU)
    assert plugin.request.options.get_preferred_allocation_available
    assert plugin.request.options.pre_start_required
    gpus = [g.id for g in desk.sysfs.inventory.gpus]
    assert plugin.healthy == [f"{gpu}#{n}" for gpu in gpus for n in range(10)]


async def test_all_slots_of_a_gpu_turn_unhealthy_in_one_update_and_return(desk: Desk, plugins_dir: Path) -> None:
    first, second = (g.id for g in desk.sysfs.inventory.gpus)
    async with a_kubelet(plugins_dir) as kubelet, running(a_plugin(desk, plugins_dir)):
        plugin = await kubelet.registered(GPU)
        await desk.node.set_health({first: Health(Condition.UNHEALTHY, "its node cannot be opened", "node")})
        await plugin.until(lambda p: len(p.updates) == 2, within_s=1)
        assert plugin.healthy == [f"{second}#{n}" for n in range(10)]
        await desk.node.set_health({first: Health()})
        await plugin.until(lambda p: len(p.updates) == 3, within_s=1)
        assert len(plugin.healthy) == 20


@pytest.mark.parametrize("delivery", ["cdi", "nodes"])
async def test_a_container_gets_one_route_and_nothing_twice(desk: Desk, plugins_dir: Path, delivery: Way) -> None:
    plugin = a_plugin(desk, plugins_dir, delivery=Delivery.fixed(delivery))
    async with a_kubelet(plugins_dir) as kubelet, running(plugin):
        answer, other = await (await kubelet.registered(GPU)).allocate(["x#1", "y#2"], ["z#3"])
    assert dict(answer.annotations) == {}
    assert other.envs["IDS"] == "z#3"
    if delivery == "cdi":
        assert [d.name for d in answer.cdi_devices] == ["amdvgpu.io/slice=a"]
        assert (dict(answer.envs), list(answer.mounts), list(answer.devices)) == ({"IDS": "x#1,y#2"}, [], [])
    else:
        assert list(answer.cdi_devices) == []
        assert dict(answer.envs) == {"AMDVGPU_SLICE": "a", "IDS": "x#1,y#2"}
        assert [(m.host_path, m.container_path, m.read_only) for m in answer.mounts] == [
            ("/run/amdvgpud/slices/a/guest/ledger", "/run/amdvgpu/a/ledger", False)
        ]
        assert [(d.host_path, d.container_path, d.permissions) for d in answer.devices] == [
            ("/dev/dri/renderD128", "/dev/dri/renderD128", "rw")
        ]


async def test_nothing_is_registered_until_the_hook_that_settings_need_is_known_to_come(
    desk: Desk, plugins_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [Choice("nodes", "CDI is off"), Choice("cdi", "CDI is on")]

    async def ask() -> Choice:
        return answers.pop(0)

    delivery = Delivery(Choice("nodes", "not asked", known=False), ask, hook_for="hook.required")
    async with a_kubelet(plugins_dir) as kubelet, running(a_plugin(desk, plugins_dir, delivery=delivery)):
        plugin = await kubelet.registered(GPU)
        (answer,) = await plugin.allocate(["x#1"])
    assert [d.name for d in answer.cdi_devices] == ["amdvgpu.io/slice=a"]
    assert kubelet.registrations == [GPU]
    assert any("is not registered" in text and "hook.required needs it: CDI is off" in text for text in caplog.messages)


@pytest.mark.parametrize(
    "grant",
    [
        {"mounts": (GrantMount("/a", "/x"),), "added_mounts": (GrantMount("/b", "/x"),)},
        {"mounts": (GrantMount("/a", "/dev/kfd"),), "nodes": (GrantNode("/dev/kfd", "/dev/kfd"),)},
        {"environment": (("A", "1"),), "added_environment": (("A", "2"),)},
        {"cdi_devices": ("k=a", "k=a")},
    ],
)
def test_a_grant_that_brings_something_twice_cannot_be_held(grant: dict[str, tuple[object, ...]]) -> None:
    with pytest.raises(ValueError, match="twice"):
        Grant(**grant)  # type: ignore[arg-type]


async def test_where_one_container_of_a_call_is_refused_what_the_others_got_is_taken_back(
    desk: Desk, plugins_dir: Path
) -> None:
    """What they had before the call stays."""
    profile = SliceProfile("25c-48g", Compute(percent=25), 48 << 30, 3)
    await Profiles(desk.node, [profile]).cut()
    leases = KubeletLeases(desk.node, PodResources(plugins_dir / "none"), plugins_dir)
    resource = ProfileResource(profile, desk.node, leases, lambda items: Grant(tuple(item.name for item in items)))
    async with a_kubelet(plugins_dir) as kubelet, running(a_plugin(desk, plugins_dir, resource)):
        plugin = await kubelet.registered(resource.name)
        await plugin.allocate(["25c-48g-0"])
        with pytest.raises(grpc.aio.AioRpcError, match="has no 25c-48g-9"):
            await plugin.allocate(["25c-48g-0"], ["25c-48g-1"], ["25c-48g-9"])
        assert [lease.slice for lease in desk.node.view().book.leases.values()] == ["25c-48g-0"]
        await plugin.allocate(["25c-48g-1"], ["25c-48g-2"])
        assert len(desk.node.view().book.leases) == 3


async def test_a_refusal_is_told_in_full_and_is_this_pods_only(desk: Desk, plugins_dir: Path) -> None:
    resource = TenSlots(
        failures=[NoRoom("wanted 48 GiB, the roomiest has 31 GiB", "no_vram"), Conflict("held"), KeyError("x")]
    )
    async with a_kubelet(plugins_dir) as kubelet, running(a_plugin(desk, plugins_dir, resource)):
        plugin = await kubelet.registered(GPU)
        codes = []
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await plugin.allocate(["x#1"])
            codes.append((refused.value.code().name, refused.value.details()))
        assert (await plugin.allocate(["x#1"]))[0].envs["IDS"] == "x#1"
    assert codes == [
        ("RESOURCE_EXHAUSTED", "amdvgpud: wanted 48 GiB, the roomiest has 31 GiB"),
        ("FAILED_PRECONDITION", "amdvgpud: held"),
        ("INTERNAL", "amdvgpud: KeyError: 'x'"),
    ]


@pytest.mark.parametrize("delivery", ["cdi", "nodes"])
async def test_a_container_starts_with_what_it_was_told_while_that_is_still_so(
    desk: Desk, plugins_dir: Path, delivery: Way
) -> None:
    """Names of CDI are resolved at each start."""
    resource = TenSlots()
    door = a_plugin(desk, plugins_dir, resource, delivery=Delivery.fixed(delivery))
    async with a_kubelet(plugins_dir) as kubelet, running(door):
        plugin = await kubelet.registered(GPU)
        (told,) = await plugin.allocate(["x#1", "y#2"])
        kubelet.remember("uid-1", "main", GPU, ["y#2", "x#1"], told)
        kubelet.remember("uid-2", "other", GPU, ["y#2"], told)
        await plugin.pre_start("x#1", "y#2")
        resource.node = "/dev/dri/renderD136"
        if delivery == "cdi":
            await plugin.pre_start("x#1", "y#2")
            return
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await plugin.pre_start("x#1", "y#2")
        assert refused.value.code().name == "FAILED_PRECONDITION"
        assert str(refused.value.details()).startswith(
            "amdvgpud: container main: the kubelet starts it with /dev/dri/renderD128, and what it was "
            "given has /dev/dri/renderD136 now: make the pod anew"
        )
        resource.strange = True
        await plugin.pre_start("x#1", "y#2")


async def test_a_container_whose_slice_is_lost_does_not_start_and_one_that_nobody_knows_does(
    desk: Desk, plugins_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resource = TenSlots()
    async with a_kubelet(plugins_dir) as kubelet, running(a_plugin(desk, plugins_dir, resource)):
        plugin = await kubelet.registered(GPU)
        await plugin.pre_start("x#1")
        kubelet.remember("uid-1", "main", GPU, ["x#1"], (await plugin.allocate(["x#1"]))[0])
        resource.failures = [Conflict("slice a is lost: its GPU is gone")]
        with pytest.raises(grpc.aio.AioRpcError, match="slice a is lost: its GPU is gone"):
            await plugin.pre_start("x#1")
        (checkpoint := plugins_dir / CHECKPOINT).write_text("[")
        await plugin.pre_start("x#1")
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [text.partition(" cannot be read")[0] for text in said if "checkpoint" in text] == [
        f"{GPU}: the kubelet's checkpoint has no container with x#1",
        f"{GPU}: nobody knows what the container with x#1 was told: the kubelet's checkpoint {checkpoint}",
    ]


async def test_a_container_that_has_nothing_any_more_starts_only_where_another_has_something_by_the_same_devices(
    desk: Desk, plugins_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of the two starts the kubelet does not say."""
    resource, has = TenSlots(), {"setup": False, "main": True}

    async def again(ids: Sequence[str], pod_uid: str, container: str) -> Grant | None:
        if not has[container]:
            raise NotFound(f"{container} has no slice here")
        return None if resource.strange else await resource.allocate(ids)

    monkeypatch.setattr(resource, "again", again)
    async with a_kubelet(plugins_dir) as kubelet, running(a_plugin(desk, plugins_dir, resource)):
        plugin = await kubelet.registered(GPU)
        (told,) = await plugin.allocate(["x#1"])
        for container in has:
            kubelet.remember("uid-1", container, GPU, ["x#1"], told)
        for resource.strange in (True, False):
            await plugin.pre_start("x#1")
        has["main"] = False
        with pytest.raises(grpc.aio.AioRpcError, match="has no slice here") as refused:
            await plugin.pre_start("x#1")
        assert refused.value.code().name == "NOT_FOUND"
        has.update(setup=True)
        await plugin.pre_start("x#1")


def test_files_that_are_no_more_keep_a_container_from_starting(tmp_path: Path) -> None:
    grant = Grant(mounts=(GrantMount("/made/anew", "/run/amdvgpu"),), added_mounts=(GrantMount("/on/the/host", "/x"),))
    paths = ["/made/anew", "/on/the/host", str(tmp_path)]
    told = pb.ContainerAllocateResponse(mounts=[pb.Mount(host_path=path) for path in paths])
    assert outdated(told, grant) is None
    told.mounts.append(pb.Mount(host_path=f"{tmp_path}/mem_banks-1000"))
    assert outdated(told, grant) == (
        f"the kubelet starts it with {tmp_path}/mem_banks-1000, which is no more: make the pod anew"
    )


async def test_where_no_preference_can_be_told_the_kubelet_chooses(desk: Desk, plugins_dir: Path) -> None:
    resource = TenSlots()
    async with a_kubelet(plugins_dir) as kubelet, running(a_plugin(desk, plugins_dir, resource)):
        plugin = await kubelet.registered(GPU)
        assert await plugin.prefer(["a", "b", "c"], 2) == ["c", "b"]
        resource.failures.append(ValueError("no idea"))
        assert await plugin.prefer(["a", "b", "c"], 2, must=["b"]) == ["b", "a"]


async def test_it_registers_again_when_the_kubelet_restarts(desk: Desk, plugins_dir: Path) -> None:
    async with a_kubelet(plugins_dir) as kubelet, running(a_plugin(desk, plugins_dir)):
        for _ in range(3):
            await kubelet.registered(GPU)
            await kubelet.restart()  # empties the directory, our socket with it
        await kubelet.registered(GPU)
        assert len(list(plugins_dir.glob("amdvgpud-*.sock"))) == 1


async def test_it_registers_again_with_a_kubelet_that_leaves_its_socket_alone(desk: Desk, plugins_dir: Path) -> None:
    async with a_kubelet(plugins_dir) as kubelet, running(a_plugin(desk, plugins_dir)):
        await kubelet.registered(GPU)
        await kubelet.restart(tidy=False)
        await kubelet.registered(GPU, within_s=5)


async def test_a_kubelet_that_takes_it_and_does_not_listen_is_told_again(
    desk: Desk, plugins_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def hurry(seconds: float) -> None:
        await asyncio.sleep(0.001)

    plugin = DevicePlugin(
        desk.node,
        lambda: (TenSlots(),),
        KubeletSettings(plugins_dir, look_s=1),
        desk.metrics,
        PodResources(plugins_dir.parent / "pod-resources" / "kubelet.sock"),
        sleep=hurry,
    )
    async with a_kubelet(plugins_dir, listens=False) as kubelet, running(plugin), asyncio.timeout(20):
        while len(kubelet.registrations) < 3:
            await asyncio.sleep(0.01)
    warnings = [
        r.getMessage() for r in caplog.records if r.name == "amdvgpud.serve.kube.kubelet" and r.levelname == "WARNING"
    ]
    (warning,) = warnings
    assert warning.endswith("the kubelet took the registration and did not ask for devices in 8 s")


async def test_it_registers_again_when_only_its_own_socket_goes(desk: Desk, plugins_dir: Path) -> None:
    async with a_kubelet(plugins_dir) as kubelet, running(a_plugin(desk, plugins_dir)):
        first = await kubelet.registered(GPU)
        (plugins_dir / first.request.endpoint).unlink()
        await first.ended.wait()
        del kubelet.plugins[GPU]
        assert (await kubelet.registered(GPU)).request.endpoint != first.request.endpoint


async def test_the_directory_may_come_after_it(desk: Desk, plugins_dir: Path) -> None:
    async with running(a_plugin(desk, plugins_dir)):
        await asyncio.sleep(0.2)
        async with a_kubelet(plugins_dir) as kubelet:
            await kubelet.registered(GPU)


async def test_a_kubelet_that_goes_between_start_and_registration_is_waited_for(desk: Desk, plugins_dir: Path) -> None:
    plugins_dir.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as dead:  # a socket nobody answers on: a kubelet that was killed left it
        dead.bind(str(plugins_dir / "kubelet.sock"))
    async with running(a_plugin(desk, plugins_dir)):
        await asyncio.sleep(0.3)
        async with a_kubelet(plugins_dir) as kubelet:
            await kubelet.registered(GPU)


async def test_a_refused_registration_is_tried_again_with_growing_pauses(desk: Desk, plugins_dir: Path) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        await (asyncio.Event().wait() if seconds == 100 else asyncio.sleep(0))

    plugin = DevicePlugin(
        desk.node,
        lambda: (TenSlots(),),
        KubeletSettings(plugins_dir, look_s=100),
        desk.metrics,
        PodResources(plugins_dir.parent / "pod-resources" / "kubelet.sock"),
        sleep=sleep,
    )
    async with a_kubelet(plugins_dir) as kubelet:
        kubelet.refusals = ["not now"] * 8
        async with running(plugin):
            await kubelet.registered(GPU)
    assert [s for s in waited if s != 100] == [1, 2, 4, 8, 16, 32, 60, 60]
    text = desk.metrics.render(desk.node.view(), open_metrics=False, details=False).decode()
    assert 'amdvgpu_kubelet_registrations_total{result="refused"} 8.0' in text
    assert 'amdvgpu_kubelet_registrations_total{result="ok"} 1.0' in text


async def test_a_stale_socket_of_ours_is_removed_and_a_living_one_is_not(desk: Desk, plugins_dir: Path) -> None:
    plugins_dir.mkdir(parents=True)
    stale, living = plugins_dir / "amdvgpud-amd.com_gpu-1.sock", plugins_dir / "amdvgpud-amd.com_gpu-2.sock"
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as listening:
        dead.bind(str(stale))
        dead.close()
        listening.bind(str(living))
        listening.listen()
        async with running(a_plugin(desk, plugins_dir)):
            async with asyncio.timeout(5):
                while stale.exists():
                    await asyncio.sleep(0.01)
        assert living.exists()


async def test_a_newer_instance_takes_over_and_the_old_one_leaves_its_socket_alone(
    desk: Desk, plugins_dir: Path
) -> None:
    async with a_kubelet(plugins_dir) as kubelet:
        async with running(a_plugin(desk, plugins_dir)):
            old = await kubelet.registered(GPU)  # whose devices the kubelet has until the newer one is registered
            newer = running(a_plugin(desk, plugins_dir))
            await newer.__aenter__()
            async with asyncio.timeout(10):
                while (new := await kubelet.registered(GPU)) is old:
                    await asyncio.sleep(0.01)
        assert not (plugins_dir / old.request.endpoint).exists()
        assert (plugins_dir / new.request.endpoint).exists()
        assert (await new.allocate(["x#1"]))[0].envs["IDS"] == "x#1"
        await newer.__aexit__(None, None, None)


async def test_streams_end_and_the_socket_goes_when_it_is_stopped(desk: Desk, plugins_dir: Path) -> None:
    async with a_kubelet(plugins_dir) as kubelet:
        async with running(a_plugin(desk, plugins_dir)):
            plugin = await kubelet.registered(GPU)
        async with asyncio.timeout(5):
            await plugin.ended.wait()
    assert (plugin.broken, (plugins_dir / plugin.request.endpoint).exists()) == ("", False)


async def test_a_resource_that_fails_does_not_keep_the_others_out(desk: Desk, plugins_dir: Path) -> None:
    class Broken(TenSlots):
        def devices(self, view: NodeView) -> Sequence[Device]:
            raise RuntimeError("a defect")

    async with (
        a_kubelet(plugins_dir) as kubelet,
        running(a_plugin(desk, plugins_dir, Broken("amd.com/bad"), TenSlots())),
    ):
        assert len((await kubelet.registered(GPU)).healthy) == 20


async def test_a_name_that_another_living_plugin_serves_is_not_taken(desk: Desk, plugins_dir: Path) -> None:
    """The other one's socket is called as the common Go library calls it."""
    async with a_kubelet(plugins_dir) as kubelet:
        other = grpc.aio.server()
        other.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "v1beta1.DevicePlugin",
                    {"GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(_nothing)},
                ),
            )
        )
        other.add_insecure_port(f"unix:{plugins_dir / 'amd.com_gpu'}")
        await other.start()
        async with running(a_plugin(desk, plugins_dir, TenSlots(), TenSlots("amd.com/other"))):
            await kubelet.registered("amd.com/other")
            await asyncio.sleep(0.3)
            assert kubelet.registrations == ["amd.com/other"]
            await other.stop(0)
            await kubelet.registered(GPU)


async def test_a_name_of_which_the_kubelet_has_foreign_devices_is_taken_only_by_order(
    desk: Desk, plugins_dir: Path
) -> None:
    async with a_kubelet(plugins_dir) as kubelet:
        kubelet.foreign[GPU] = ["0000:11:00.0"]
        async with running(a_plugin(desk, plugins_dir)):
            await asyncio.sleep(0.3)
            assert kubelet.registrations == []
        async with running(a_plugin(desk, plugins_dir, take_over=True)):
            await kubelet.registered(GPU)


async def test_devices_with_our_own_ids_are_another_plugins_before_we_have_registered(
    desk: Desk, plugins_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever its socket is called."""
    gpu = desk.sysfs.inventory.gpus[0].id
    async with a_kubelet(plugins_dir) as kubelet:
        kubelet.foreign[GPU] = [f"{gpu}#0", f"{gpu}#1"]
        async with running(a_plugin(desk, plugins_dir, TenSlots(), TenSlots("amd.com/other"))):
            await kubelet.registered("amd.com/other")
            async with asyncio.timeout(10):
                while not (said := [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]):
                    await asyncio.sleep(0.01)
            assert kubelet.registrations == ["amd.com/other"]
            assert f"2 devices of {GPU} that this daemon has not registered ({gpu}#0), so another plugin has" in said[0]
            assert said[0].endswith("remove it, or set kubelet.take_over to take the name from it")
            del kubelet.foreign[GPU]
            await kubelet.registered(GPU)


async def test_what_a_daemon_before_this_one_has_left_at_the_kubelet_is_nobody_elses(
    desk: Desk, plugins_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looked: list[float] = []

    async def sleep(seconds: float) -> None:
        looked.append(seconds)
        kubelet.foreign.clear()
        await asyncio.sleep(0)

    async with a_kubelet(plugins_dir) as kubelet:
        kubelet.foreign[GPU] = ["of-another-configuration#0"]
        plugin = a_plugin(desk, plugins_dir)
        plugin._sleep = sleep
        async with running(plugin):
            await kubelet.registered(GPU)
    assert looked[0] == 0.05
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == []


@pytest.mark.parametrize(("count", "registered"), [(7, False), (20, True), (0, True), (None, True)])
async def test_where_the_kubelet_does_not_say_who_has_what_the_nodes_own_count_does(
    desk: Desk, plugins_dir: Path, caplog: pytest.LogCaptureFixture, count: int | None, registered: bool
) -> None:
    async def counted(resource: str) -> int | None:
        return count if resource == GPU else None

    async with a_kubelet(plugins_dir) as kubelet:
        plugin = DevicePlugin(
            desk.node,
            lambda: (TenSlots(),),
            KubeletSettings(plugins_dir, look_s=0.01),
            desk.metrics,
            PodResources(plugins_dir.parent / "nowhere.sock"),
            counted=counted,
        )
        async with running(plugin), asyncio.timeout(10):
            while not (said := [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]) and not registered:
                await asyncio.sleep(0.01)
            if registered:
                await kubelet.registered(GPU)
    assert (bool(kubelet.registrations), bool(said)) == (registered, not registered)
    assert registered or f"the Node has 7 of {GPU}, which this daemon has not registered and has 20 of" in said[0]


async def _nothing(request: bytes, context: object) -> bytes:
    return b""
