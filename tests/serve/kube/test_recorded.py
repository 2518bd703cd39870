"""What a real kubelet 1.35 said to this daemon (tests/e2e/k8s/test_recorded.py), said again by default.

Recorded: a registration of ``amdvgpu.io/50c-90g`` with two devices, then a pod that asks for one and a pod for both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet

from amdvgpud.node import NodeView
from amdvgpud.serve.kube.resources import Device, Grant
from amdvgpud.serve.pb import deviceplugin_pb2 as pb
from tests.serve.conftest import Desk
from tests.serve.kube.kubelet import a_kubelet
from tests.serve.kube.test_kubelet import a_plugin, running

SAID: Final[list[dict[str, str]]] = json.loads((Path(__file__).parent / "recorded/kubelet.json").read_text())
NAME: Final = "amdvgpu.io/50c-90g"
MESSAGES: Final[dict[str, tuple[Any, Any]]] = {
    "/v1beta1.Registration/Register": (pb.RegisterRequest, pb.Empty),
    "/v1beta1.DevicePlugin/GetDevicePluginOptions": (pb.Empty, pb.DevicePluginOptions),
    "/v1beta1.DevicePlugin/ListAndWatch": (pb.Empty, pb.ListAndWatchResponse),
    "/v1beta1.DevicePlugin/GetPreferredAllocation": (pb.PreferredAllocationRequest, pb.PreferredAllocationResponse),
    "/v1beta1.DevicePlugin/Allocate": (pb.AllocateRequest, pb.AllocateResponse),
    "/v1beta1.DevicePlugin/PreStartContainer": (pb.PreStartContainerRequest, pb.PreStartContainerResponse),
}


@pytest.mark.parametrize("said", SAID, ids=lambda said: said["method"].rpartition("/")[2])
def test_our_messages_know_every_field_that_is_used(said: dict[str, str]) -> None:
    sent = bytes.fromhex(said["request"])
    message = MESSAGES[said["method"]][0].FromString(sent)
    assert message.SerializeToString(deterministic=True) == sent
    entries = [message, *getattr(message, "container_requests", ())]
    assert [len(UnknownFieldSet(entry)) for entry in entries] == [0] * len(entries)


class Recorded:
    """Two devices; keeps what it is asked."""

    name = NAME

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def devices(self, view: NodeView) -> Sequence[Device]:
        return [Device("50c-90g-0"), Device("50c-90g-1")]

    async def allocate(self, ids: Sequence[str]) -> Grant:
        self.asked.append(list(ids))
        return Grant(environment=(("IDS", " ".join(ids)),))

    async def again(self, ids: Sequence[str], pod_uid: str, container: str) -> Grant:
        raise AssertionError("this kubelet has no checkpoint")

    def prefer(self, view: NodeView, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        self.asked.append((sorted(available), list(must_include), size))
        return sorted(available)[:size]


async def test_the_kubelets_calls_are_answered_as_they_came(desk: Desk, run_dir: Path) -> None:
    resource = Recorded()
    folder = run_dir / "kubelet" / "device-plugins"
    answers = []
    async with a_kubelet(folder) as kubelet, running(a_plugin(desk, folder, resource)):
        plugin = await kubelet.registered(NAME)
        for said in SAID:
            if said["method"].endswith(("GetPreferredAllocation", "Allocate", "PreStartContainer")):
                answer = await plugin.channel.unary_unary(said["method"])(bytes.fromhex(said["request"]))
                answers.append(MESSAGES[said["method"]][1].FromString(answer))
    both = ["50c-90g-0", "50c-90g-1"]
    assert resource.asked == [(both, [], 1), both[:1], (both, [], 2), both]
    first, one, _, second, two, _ = answers
    assert [list(each.container_responses[0].deviceIDs) for each in (first, second)] == [both[:1], both]
    assert [each.container_responses[0].envs["IDS"] for each in (one, two)] == ["50c-90g-0", "50c-90g-0 50c-90g-1"]
