"""The GPUs' device nodes for the daemon's own pod: what is offered, to whom, and how it is named."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from amdvgpud.host.cdi_spec import parse_spec
from amdvgpud.serve.kube.delivery import Delivery
from amdvgpud.serve.kube.own import RESOURCE, OwnDevices
from amdvgpud.serve.kube.podresources import ContainerDevices, PodResources
from amdvgpud.serve.pb import deviceplugin_pb2 as pb
from tests.serve.conftest import Desk
from tests.serve.kube.kubelet import Kubelet, a_kubelet
from tests.serve.kube.test_kubelet import a_plugin, plugins_dir, running  # noqa: F401


@pytest.fixture
def published() -> list[Mapping[str, Any]]:
    return []


def own(published: list[Mapping[str, Any]], kubelet: Kubelet | None = None, root: Path = Path("/")) -> OwnDevices:
    async def nobody() -> tuple[ContainerDevices, ...]:
        return ()

    holders = nobody if kubelet is None else PodResources(kubelet.pod_resources_socket).list
    return OwnDevices("gpu-system", holders, published.append, root)


@pytest.mark.root
async def test_by_names_it_is_all_numbers_that_there_may_be_and_by_nodes_those_that_are_there(
    tmp_path: Path, published: list[Mapping[str, Any]]
) -> None:
    (tmp_path / "dev/dri").mkdir(parents=True)
    for name, number in (("kfd", (511, 0)), ("dri/renderD129", (226, 129)), ("dri/renderD300", (226, 300))):
        os.mknod(tmp_path / "dev" / name, 0o600 | stat.S_IFCHR, os.makedev(*number))
    (tmp_path / "dev/dri/renderD130").touch()  # no device
    grant = await own(published, root=tmp_path).allocate(["gpus"])
    assert grant.cdi_devices == ("amdvgpu.io/daemon=gpus",)
    assert [node.host_path for node in grant.nodes] == ["/dev/kfd", "/dev/dri/renderD129", "/dev/dri/renderD300"]
    (document,) = published
    parse_spec(json.dumps(document).encode())
    nodes = {n["path"]: (n["major"], n["minor"], n["permissions"]) for n in _nodes(document)}
    assert nodes == {f"/dev/dri/renderD{minor}": (226, minor, "rw") for minor in (*range(128, 192), 300)} | {
        "/dev/kfd": (511, 0, "rw")
    }


def _nodes(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    (device,) = document["devices"]
    nodes: list[dict[str, Any]] = device["containerEdits"]["deviceNodes"]
    return nodes


@pytest.mark.parametrize(
    ("holders", "refused"),
    [
        (["gpu-system/daemon"], None),
        (["default/thief"], "default/thief (main) asks for it: take it out of that pod's limits, and ask for a slice"),
        (["gpu-system/daemon", "default/thief"], "default/thief (main) asks for it"),
        ([], "a pod that the kubelet does not name asks for it"),
    ],
)
async def test_a_container_starts_with_it_in_its_own_namespace_only(
    desk: Desk,
    plugins_dir: Path,  # noqa: F811
    published: list[Mapping[str, Any]],
    holders: list[str],
    refused: str | None,
) -> None:
    async with a_kubelet(plugins_dir) as kubelet:
        kubelet.pods = [(*name.split("/"), "main", RESOURCE, ["gpus"]) for name in holders]
        kubelet.pods.append(("default", "other", "main", "cpu.example/x", ["gpus"]))
        resource = own(published, kubelet)
        async with running(a_plugin(desk, plugins_dir, resource, delivery=Delivery.fixed("cdi"))):
            plugin = await kubelet.registered(RESOURCE)
            (answer,) = await plugin.allocate(["gpus"])
            assert [device.name for device in answer.cdi_devices] == ["amdvgpu.io/daemon=gpus"]
            asked = plugin.call("PreStartContainer", pb.PreStartContainerRequest(devices_ids=["gpus"]), pb.Empty)
            if refused is None:
                await asked
                return
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await asked
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused in str(error.value.details())
