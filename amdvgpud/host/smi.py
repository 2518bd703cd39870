"""The KFD's own events, and whether /dev/kfd opens: asked by a child process, never by the daemon's.

Owns the child (:mod:`amdvgpud.host.kfd_child`): when there is one, what it says, and that there is none while a GPU is
cut anew (:class:`amdvgpud.ports.KfdHolder`). What a line of the events means is core's.

Whether to listen is a bargain. An open /dev/kfd is a KFD process: while there is one, drivers refuse to cut any GPU
anew, whoever asks. Our own switches send the child away first; those of other tools cannot. So ``auto`` listens where
no GPU can be cut, which is every Radeon and every APU. There it costs one thing: amdgpu cannot be unloaded meanwhile,
as with any open file of it. Where GPUs can be cut, resets are still heard by uevent on newer kernels and seen by the
pulse; who wants the events there switches them on.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from amdvgpud.core.errors import HostFailure
from amdvgpud.core.health import Condition, Finding, Notice, Source, smi_notice
from amdvgpud.core.model import GpuId, Inventory
from amdvgpud.ports import Examination

log = logging.getLogger(__name__)

_CHILD: Final = Path(__file__).with_name("kfd_child.py")
_ANSWER_S: Final = 10.0
"""Opening waits while another GPU is cut anew; beyond this the child is given up."""
_GONE_S: Final = 2.0
_BACK_OFF_S: Final = (1.0, 5.0, 30.0)

Listening = Literal["auto", "on", "off"]


class KfdChildren:
    """Starts and ends the child. A :class:`~amdvgpud.ports.KfdHolder`, and the health check of /dev/kfd."""

    name: Final = "kfd"

    def __init__(
        self,
        inventory: Callable[[], Inventory],
        hear: Callable[[Sequence[Notice]], Awaitable[None]],
        *,
        listening: Listening = "auto",
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        """``environment``: of the child, where it is not ours."""
        self._inventory = inventory
        self._hear = hear
        self._listening = listening
        self._environment = environment
        self._python = python
        self._may = asyncio.Event()
        self._may.set()
        self._held = 0
        self._turn = asyncio.Lock()
        """The listener's."""
        self._probing = asyncio.Lock()
        self._listener: Process | None = None
        self._listens = False
        """The turn is a listener's, be there a child yet or not."""
        self._dismissed = False
        self._ids: dict[int, GpuId] = {}
        self._heard_of: tuple[dict[int, GpuId], int] = ({}, 0)
        """What the listener was started for, and in which generation of the topology."""
        self._living: set[int] = set()
        self._own: frozenset[int] = frozenset()
        self._told: str = ""

    # ----------------------------------------------------------------------------------------------------- holding

    def own_pids(self) -> frozenset[int]:
        """Pids of ours in kfd/proc, also of a child that has just ended: the kernel clears up a moment later."""
        return self._own

    async def let_go(self) -> None:
        self._held += 1
        self._may.clear()
        self._dismiss()
        async with self._turn, self._probing:  # whoever runs has ended
            return

    def take_up(self) -> None:
        self._held -= 1
        if not self._held:
            self._may.set()

    def refresh(self) -> None:
        """The machine has been scanned: if it has other GPUs now, or one anew, listen to these.

        A GPU that its driver let go and took again has the same id, and what listened to it before is deaf: the
        kernel's listener hangs on the node that is gone (``kfd_smi_events.c``). Each such change is a new generation.
        """
        if self._listens and (self._wanted(), self._inventory().generation_id) != self._heard_of:
            self._dismiss()

    def _dismiss(self) -> None:
        self._dismissed = True
        if self._listener is not None and self._listener.stdin is not None:
            self._listener.stdin.close()

    # --------------------------------------------------------------------------------------------------- listening

    def _wanted(self) -> dict[int, GpuId]:
        gpus = self._inventory().gpus
        cuttable = any(gpu.profiles for gpu in gpus)
        if self._listening == "off" or (self._listening == "auto" and cuttable):
            return {}
        return {partition.kfd_gpu_id: gpu.id for gpu in gpus for partition in gpu.partitions}

    async def run(self, look_s: float = 1.0) -> None:
        """Until cancelled: listen whenever there is something to listen to, and nobody has to let go."""
        failures = 0
        while True:
            await self._may.wait()
            if not self._wanted():
                await asyncio.sleep(look_s)
                continue
            began_s = time.monotonic()
            if await self._listen():
                failures = 0
                await asyncio.sleep(0)
                continue
            if time.monotonic() - began_s > _BACK_OFF_S[-1]:
                failures = 0
            await asyncio.sleep(_BACK_OFF_S[min(failures, len(_BACK_OFF_S) - 1)])
            failures += 1

    async def _listen(self) -> bool:
        """One child, from start to end; false: it has ended by itself."""
        async with self._turn:
            if not self._may.is_set():
                return True
            self._dismissed, self._listens = False, True
            self._ids = self._wanted()
            self._heard_of = (self._ids, self._inventory().generation_id)
            try:
                async with self._child(*map(str, self._ids)) as child:
                    self._listener = child
                    if self._dismissed:  # while it was being started
                        self._dismiss()
                    assert child.stdout is not None  # noqa: S101
                    while line := await child.stdout.readline():
                        await self._take(line.decode("ascii", "replace").strip())
            except OSError as error:
                self._say(f"the program that listens to them cannot be started: {error}")
            except ValueError:  # a line without an end
                self._say("what came was no line")
            finally:
                self._listener, self._listens = None, False
            return self._dismissed

    async def _take(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "event":
            number, _, text = rest.partition(" ")
            gpu = self._ids.get(int(number)) if number.isdigit() else None
            notice = None if gpu is None else smi_notice(gpu, text)
            if notice is not None:
                await self._hear([notice])
        elif word == "refused" or (word == "open" and rest != "ok"):
            self._say(line)

    def _say(self, what: str) -> None:
        """Once, until it is something else."""
        if what != self._told:
            self._told = what
            log.warning("Events of the KFD are not heard (%s); the pulse still looks at the GPUs.", what)

    # ----------------------------------------------------------------------------------------------------- probing

    async def examine(self, inventory: Inventory) -> Examination | None:
        """Whether /dev/kfd opens, also beside a listener: it was open before a reset that shuts it for others. While a
        GPU is cut anew nobody asks."""
        if not inventory.gpus or not self._may.is_set():
            return Examination()
        async with self._probing:
            if not self._may.is_set():
                return Examination()
            try:
                async with self._child("probe") as child:
                    assert child.stdout is not None  # noqa: S101
                    async with asyncio.timeout(_ANSWER_S):
                        answer = (await child.stdout.readline()).decode("ascii", "replace").split()
            except OSError as error:
                raise HostFailure(f"the program that opens /dev/kfd cannot be started: {error}") from error
            except TimeoutError:
                answer = ["open", "EBUSY"]
        return _verdict(inventory, answer)

    @contextlib.asynccontextmanager
    async def _child(self, *words: str) -> AsyncIterator[Process]:
        """Gone when the block ends: its standard input ends, and if that is not enough it is killed."""
        child = await asyncio.create_subprocess_exec(
            self._python,
            *("-I", "-S", str(_CHILD), *words),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            env=None if self._environment is None else {**os.environ, **self._environment},
        )
        self._living.add(child.pid)
        self._own = frozenset(self._living)
        try:
            yield child
        finally:
            self._living.discard(child.pid)
            assert child.stdin is not None  # noqa: S101
            child.stdin.close()
            try:
                # Not wait_for: until Python 3.12 it loses a cancellation that comes as the child ends, and then the
                # daemon would not end.
                async with asyncio.timeout(_GONE_S):
                    await child.wait()
            except (TimeoutError, asyncio.CancelledError) as error:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                if isinstance(error, asyncio.CancelledError):
                    raise
                # One that the driver holds dies when that lets it go; nobody waits for it.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GONE_S):
                        await child.wait()


def _verdict(inventory: Inventory, answer: list[str]) -> Examination:
    """``HostFailure`` where it says nothing of the GPUs: this process may not open it, or the child has crashed."""
    name = answer[1] if len(answer) == 2 and answer[0] == "open" else "nothing"
    if name == "ok":
        return Examination()
    if name in ("EPERM", "EACCES", "nothing"):
        raise HostFailure(f"/dev/kfd answers {name} to this daemon, which tells nothing of the GPUs")
    busy = name in (errno.errorcode[number] for number in (errno.EBUSY, errno.EAGAIN))
    condition, when = (Condition.UNKNOWN, ", as in a reset") if busy else (Condition.UNHEALTHY, "")
    reason = f"/dev/kfd answers {name}{when}"
    return Examination(tuple(Finding(gpu.id, Source.PULSE, condition, reason) for gpu in inventory.gpus))
