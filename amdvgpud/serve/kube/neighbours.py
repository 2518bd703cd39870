"""Whether a resource name is somebody else's already. The kubelet gives it to the last one who registers it, silently.

No plugin says which name it serves, and its devices are not to be asked for: one whose stream of devices is opened and
dropped may take that for the end of its kubelet, and end (AMD's own plugin does). So there are three signs, none of
which harms anybody:

* a living socket that is called after the name, as the common Go library calls it;
* devices of that name at the kubelet. It has them from a living plugin only and drops them when that one's stream ends,
  so whatever their ids, they are not ours before we have registered;
* where the kubelet does not say so, what the API says that the Node has of it. That lags by seconds, and two owners
  with equally many devices look like one.

Two daemons of ours are one owner: the older one has the name until the newer one, which takes its place, registers it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from amdvgpud.core.errors import Conflict
from amdvgpud.serve.kube.podresources import PodResources
from amdvgpud.serve.pb import deviceplugin_pb2 as pb

SETTLING_LOOKS: Final = 15
"""How often devices of a name are seen before they are somebody else's. The kubelet drops those of a plugin that has
just ended (a daemon before this one) in a moment, its status in the API follows after ten seconds unless configured."""

Counted = Callable[[str], Awaitable[int | None]]
"""How many devices of a resource the Node has to give, by the API's word; None: it cannot be asked."""


class Neighbours:
    """Of one kubelet, in whose directory of device plugins sockets of ours begin with ``prefix``."""

    def __init__(
        self,
        dir: Path,
        prefix: str,
        pod_resources: PodResources,
        counted: Counted | None,
        pause: Callable[[], Awaitable[None]],
    ) -> None:
        """``pause`` lies between two looks."""
        self._dir = dir
        self._prefix = prefix
        self._pod_resources = pod_resources
        self._counted = counted
        self._pause = pause

    async def refuse_second_owner(self, name: str, ours: Callable[[], dict[str, bool]]) -> None:
        """``Conflict`` where somebody else has ``name``. ``ours``: our devices of it, and whether each is healthy."""
        for path in await self._sockets():
            if not path.name.startswith(self._prefix) and _plain(name) in _plain(path.name) and await answers(path):
                raise Conflict(f"another device plugin serves {name} at {path}; {_WAY_OUT}")
        for _ in range(SETTLING_LOOKS):
            if (trouble := await self._others(name, ours())) is None:
                return
            await self._pause()
        raise Conflict(f"{trouble}; {_WAY_OUT}")

    async def _others(self, name: str, ours: dict[str, bool]) -> str | None:
        known = await self._pod_resources.allocatable()
        if known is None:
            count = None if self._counted is None else await self._counted(name)
            if not count or count == sum(ours.values()) or await self._sibling(name):
                return None
            return f"the Node has {count} of {name}, which this daemon has not registered and has {len(ours)} of"
        there = known.get(name, frozenset())
        if foreign := sorted(there - ours.keys()):
            return f"the kubelet has {len(foreign)} devices of {name} from another plugin ({foreign[0]})"
        if there and not await self._sibling(name):
            return (
                f"the kubelet has {len(there)} devices of {name} that this daemon has not registered "
                f"({min(there)}), so another plugin has"
            )
        return None

    async def _sibling(self, name: str) -> bool:
        """Whether a daemon of ours lives that may have registered ``name``."""
        mine = re.compile(re.escape(f"{self._prefix}{label_of(name)}-") + r"[0-9a-f]+\.sock")
        for path in await self._sockets():
            if mine.fullmatch(path.name) and await answers(path):
                return True
        return False

    async def _sockets(self) -> list[Path]:
        return await asyncio.to_thread(lambda: sorted(self._dir.glob("*")))


_WAY_OUT: Final = "remove it, or set kubelet.take_over to take the name from it"


def label_of(name: str) -> str:
    """A resource's name as a part of a socket's name."""
    return re.sub("[^A-Za-z0-9.-]", "_", name)[:40]


def _plain(text: str) -> str:
    return re.sub("[^a-z0-9]", "", text.lower())


async def answers(path: Path) -> bool:
    """Whether a device plugin lives behind ``path``."""
    # A pool of its own: otherwise a new channel inherits the back-off of an old one to the same path.
    async with grpc.aio.insecure_channel(f"unix:{path}", options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        ask = channel.unary_unary(
            "/v1beta1.DevicePlugin/GetDevicePluginOptions",
            request_serializer=pb.Empty.SerializeToString,
            response_deserializer=pb.DevicePluginOptions.FromString,
        )
        try:
            await ask(pb.Empty(), timeout=1)
        except grpc.aio.AioRpcError:
            return False
        return True
