"""The CDI file of whole partitions: ``amdvgpu.io/partition=<GPU>-<n>``, in a file of its own.

Owns which partitions have a device there and what it brings: the device nodes, and nothing else. The format is
:mod:`amdvgpud.host.cdi_spec`'s, the writing :mod:`amdvgpud.host.cdi`'s.

A name in a CDI file is a grant: nobody is asked when a runtime resolves it. So a partition is listed only while a slice
has all of it (``compute whole``), which keeps the planner from giving any of it to somebody else, by the one book there
is. Refused: listing all partitions (a container could take one that is full of slices), and a reservation in the
configuration beside the book (two truths about one partition).

What it is for: isolation by the driver alone. The container gets its partition without gate, library or mounts, so any
image will do; on the other hand nothing is counted in the slice's ledger. In a container that also has slices use the
whole slice's own device instead: there the gate is in, and refuses VRAM of a GPU that no policy names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from amdvgpud.core.errors import AmdvgpuError, Invalid
from amdvgpud.core.model import Inventory, Partition, Slice
from amdvgpud.core.render import partition_device, reserved_partitions
from amdvgpud.host.cdi import (
    NODE_MODE,
    PRELOAD_IN_CONTAINER,
    SOFTKFD_IN_CONTAINER,
    SOFTKFD_ROOT_IN_CONTAINER,
    SimulatedDevices,
    plain_node,
    remove_file,
    replace_file,
)
from amdvgpud.host.cdi_spec import KIND, Device, DeviceNode, Edits, Mount, Spec, document, minimum_version, proven
from amdvgpud.ports import CdiSpecs, CdiStatus

log = logging.getLogger(__name__)


class WithPartitions:
    """A :class:`amdvgpud.ports.CdiSpecs` that publishes what ``inner`` does, and the whole partitions beside it.

    ``kind`` is that of the slices; ours has its vendor. ``Invalid`` if it is ours already.
    """

    def __init__(
        self,
        inner: CdiSpecs,
        cdi_dir: Path,
        *,
        run_dir: Path,
        sysfs_root: Path = Path("/"),
        simulated: SimulatedDevices | None = None,
        kind: str = KIND,
    ) -> None:
        vendor, _, klass = kind.partition("/")
        if klass == "partition":
            raise Invalid.field("/cdi/kind", f"{kind!r} is the kind of whole partitions: take another for slices")
        self._inner = inner
        self._kind = f"{vendor}/partition"
        self.path = cdi_dir / f"{vendor}-partition.json"
        self._run_dir = run_dir
        self._host = simulated.root if simulated else sysfs_root
        self._simulated = simulated
        self._error: str | None = None

    def publish(self, slices: Sequence[Slice], inventory: Inventory) -> CdiStatus:
        """Slices first: a whole slice that cannot be published must not get a device of the other kind."""
        status = self._inner.publish(slices, inventory)
        if status.error is None:
            self._error = self._publish(slices, inventory)
        return self._with_error(status)

    def render(self, slices: Sequence[Slice], inventory: Inventory) -> dict[str, object]:
        return self._inner.render(slices, inventory)

    def render_partitions(self, slices: Iterable[Slice], inventory: Inventory) -> dict[str, object]:
        """The document of the whole partitions among ``slices`` (``devices`` may be empty here)."""
        devices, edits = self._devices(slices, inventory), self._common()
        return document(minimum_version(self._kind, devices, edits), self._kind, devices, edits)

    def status(self) -> CdiStatus:
        return self._with_error(self._inner.status())

    def _with_error(self, status: CdiStatus) -> CdiStatus:
        return status if self._error is None or status.error is not None else replace(status, error=self._error)

    def _publish(self, slices: Iterable[Slice], inventory: Inventory) -> str | None:
        try:
            devices = self._devices(slices, inventory)
            if not devices:
                remove_file(self.path)
                return None
            edits = self._common()
            spec = Spec(minimum_version(self._kind, devices, edits), self._kind, devices, edits)
            data = proven(spec)
            if self._simulated:
                replace_file(self._run_dir / "ld.so.preload-partition", f"{SOFTKFD_IN_CONTAINER}\n".encode())
            replace_file(self.path, data)
        except (AmdvgpuError, OSError) as failure:
            log.warning("%s was left as it is: %s", self.path, failure)
            return f"{self.path} was left as it is: {failure}"
        return None

    def _devices(self, slices: Iterable[Slice], inventory: Inventory) -> tuple[Device, ...]:
        return tuple(self._device(partition) for partition in reserved_partitions(slices, inventory))

    def _device(self, partition: Partition) -> Device:
        path = f"/dev/dri/renderD{partition.render_minor}"
        name = partition_device(partition)
        if self._simulated:
            return Device(name, Edits((), (), (plain_node(self._simulated, path),)))
        return Device(name, Edits((), (self._node(path),)))

    def _common(self) -> Edits:
        if self._simulated is None:
            return Edits((), (self._node("/dev/kfd"),))
        library = ("ro", "nosuid", "nodev", "bind")
        return Edits(
            (),
            (),
            (
                Mount(str(self._run_dir / "ld.so.preload-partition"), PRELOAD_IN_CONTAINER, library),
                Mount(str(self._simulated.softkfd), SOFTKFD_IN_CONTAINER, library),
                Mount(str(self._simulated.root), SOFTKFD_ROOT_IN_CONTAINER, ("rw", "nosuid", "nodev", "bind")),
                plain_node(self._simulated, "/dev/kfd"),
            ),
        )

    def _node(self, path: str) -> DeviceNode:
        on_host = str(self._host / path.lstrip("/"))
        return DeviceNode(path, None if on_host == path else on_host, file_mode=NODE_MODE, permissions="rw")
