"""What a kubelet says of its pods' devices: over its socket, and in its checkpoint."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from amdvgpud.core.errors import HostFailure
from amdvgpud.serve.kube.podresources import (
    CheckpointEntry,
    ContainerDevices,
    PodResources,
    read_checkpoint,
    remembered_pods,
)
from tests.serve.kube.kubelet import a_kubelet

OF_KUBELET_1_35 = (
    '{"Data":{"PodDeviceEntries":[{"PodUID":"uid-w","ContainerName":"main","ResourceName":"amd.com/gpu","DeviceIDs":'
    '{"0":["GPU-a1b2c3d4e5f63333-0"]},"AllocResp":"Ej0KEi9ldGMv"}],"RegisteredDevices":{"amd.com/gpu":["GPU-a1b2c3d4'
    'e5f63333-0"],"amdvgpu.io/25c-48g":["25c-48g-0","25c-48g-1"]}},"Checksum":2904008296}'
)
"""As one wrote it here, its answer cut short."""


def test_a_pod_is_remembered_as_long_as_the_kubelet_has_its_devices_and_its_directory(tmp_path: Path) -> None:
    plugins, of_pod = tmp_path / "device-plugins", tmp_path / "pods" / "uid-w"
    plugins.mkdir()
    assert remembered_pods("amd.com/gpu", plugins) == frozenset()
    (plugins / "kubelet_internal_checkpoint").write_text(OF_KUBELET_1_35)
    assert remembered_pods("amd.com/gpu", plugins) == frozenset()
    of_pod.mkdir(parents=True)
    assert remembered_pods("amd.com/gpu", plugins) == {"uid-w"}
    assert remembered_pods("amd.com/other", plugins) == frozenset()


async def test_who_has_what_is_asked_over_the_socket(run_dir: Path) -> None:
    async with a_kubelet(run_dir / "device-plugins") as kubelet:
        kubelet.pods = [
            ("default", "train", "main", "amd.com/gpu", ["a#0", "b#1"]),
            ("default", "train", "side", "cpu.example/x", ["7"]),
        ]
        kubelet.foreign = {"amd.com/gpu": ["a#0", "a#1"]}
        asked = PodResources(kubelet.pod_resources_socket)
        assert await asked.list() == (
            ContainerDevices("default", "train", "main", "amd.com/gpu", ("a#0", "b#1")),
            ContainerDevices("default", "train", "side", "cpu.example/x", ("7",)),
        )
        assert await asked.allocatable() == {"amd.com/gpu": frozenset({"a#0", "a#1"})}
        assert abs(await asked.since_s() - time.time()) < 60
        await kubelet.stop()
        with pytest.raises(HostFailure):
            await asked.list()
        assert await asked.allocatable() is None


async def test_a_socket_that_nobody_answers_on_is_a_kubelet_that_is_away(run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(run_dir / "kubelet.sock"))
    with pytest.raises(HostFailure, match=r"pod resources at .*kubelet\.sock: UNAVAILABLE"):
        await PodResources(run_dir / "kubelet.sock").list()


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        (
            OF_KUBELET_1_35,
            (CheckpointEntry("uid-w", "main", "amd.com/gpu", ("GPU-a1b2c3d4e5f63333-0",), b"\x12=\n\x12/etc/"),),
        ),
        ('{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}', ()),
        (
            json.dumps(
                {
                    "Data": {
                        "PodDeviceEntries": [
                            {
                                "PodUID": "u",
                                "ContainerName": "c",
                                "ResourceName": "r",
                                "DeviceIDs": {"-1": None, "1": ["x"]},
                            },
                            {"PodUID": "v", "ContainerName": "c", "ResourceName": "r", "DeviceIDs": ["y", "z"]},
                        ]
                    }
                }
            ),
            (CheckpointEntry("u", "c", "r", ("x",)), CheckpointEntry("v", "c", "r", ("y", "z"))),
        ),
        (None, ()),
    ],
    ids=["as written", "no pods", "by NUMA node and as a list", "no file"],
)
def test_the_checkpoint_is_read_in_each_of_its_forms(
    text: str | None, entries: tuple[CheckpointEntry, ...], tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "c").write_text(text)
    assert read_checkpoint(tmp_path / "c") == entries


@pytest.mark.parametrize("text", ["", "[]", '{"Data":{}}', '{"Data":{"PodDeviceEntries":[{}]}}', "\x00"])
def test_a_checkpoint_that_cannot_be_understood_is_not_taken_for_an_empty_one(text: str, tmp_path: Path) -> None:
    (tmp_path / "c").write_text(text)
    with pytest.raises(HostFailure, match=r"the kubelet's checkpoint .* cannot be read"):
        read_checkpoint(tmp_path / "c")
