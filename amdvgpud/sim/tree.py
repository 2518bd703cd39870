"""A simulation as files: a root that looks like the sysfs and /dev of the simulated machine.

Owns the layout of the simulated root: the KFD topology, the PCI and platform devices with their DRM nodes, the sparse
files that stand for device nodes, and what ``softkfd`` reads and keeps there (``gpus.conf``, ``state``, ``procs/``,
``processes/``, ``smi/``, ``faults/``, ``log.jsonl``; described in softkfd/README.md). What each GPU *is* comes from
:mod:`amdvgpud.sim.models`.

Files, order and formats follow captures of real machines and the driver's sources (kfd_topology.c, kfd_crat.c,
amdgpu_xcp.c, amdgpu_xcp_drv.c). The same simulation always gives the same tree, byte for byte.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from amdvgpud.core.errors import HostFailure, Invalid
from amdvgpud.sim.models import GIB, PAGE, SimGpu, Simulation

LAYOUT: Final = 3
"""Version of the root's layout; raise it when a root that already stands must be built anew."""

DRM_MINORS: Final = 64
"""Classic minors of each kind (card0 to card63, renderD128 to renderD191). Newer kernels have more, but an eight-way
MI300X machine in CPX was captured with 63 partitions, not 64: that is the machine worth simulating."""
RENDER_BASE: Final = 128
XCP_DEVICES: Final = 7
"""Platform DRM devices that the driver adds for a GPU with partition modes, whatever its mode is."""

GTT_BYTES: Final = 32 * GIB
SYSTEM_MEMORY_BYTES: Final = 64 * GIB
CPU_CORES: Final = 16
"""Fixed, not this machine's: the same simulation gives the same tree everywhere."""

KFD_FILE_BYTES: Final = 1 << 40
RENDER_FILE_BYTES: Final = 2 << 40
"""Sizes of the sparse files behind /dev/kfd and renderD*: softkfd maps VRAM from offset 2 MiB on and GTT from 1 TiB."""
STATE_FILE_BYTES: Final = 8 << 20

_TOPOLOGY: Final = "sys/devices/virtual/kfd/kfd/topology"
_ANYBODY: Final = 0o666
"""Mode of what softkfd writes: it runs inside the programs that use the simulated GPUs, as whoever they are."""
_SIMD_ID_BASE: Final = 0x80001000
_LINK_PCIE: Final = 2
_LINK_XGMI: Final = 11


@dataclass(frozen=True, slots=True)
class _Node:
    """One KFD GPU node, with its numbers on the simulated machine."""

    gpu: SimGpu
    gpu_index: int
    partition: int
    node: int
    gpu_id: int
    card: int
    minor: int
    simd_id_base: int
    hive_id: int
    device_path: str
    """Of the device whose DRM nodes these are, from the root: the PCI function or a platform device."""

    @property
    def active(self) -> tuple[int, ...]:
        return self.gpu.active_in(self.partition)

    @property
    def location_id(self) -> int:
        return self.gpu.bus << 8 | self.partition

    @property
    def memory_bytes(self) -> int:
        return self.gpu.partition_memory_bytes


@dataclass(frozen=True, slots=True)
class _Xcp:
    """A platform DRM device of a GPU: there in every mode, in use only by some."""

    number: int
    card: int
    minor: int
    path: str


def build_tree(simulation: Simulation, root: Path, *, xcp_separator: str = "_") -> bool:
    """Make ``root`` the simulated machine; false if it already is that one, and then nothing is touched.

    A root that stands is kept because containers may have it mounted and softkfd keeps their VRAM in it: a daemon that
    starts again must not take their GPUs away. Another simulation's root is replaced whole: the new one is built beside
    it and renamed. ``xcp_separator``: drivers call a partition's device ``amdgpu_xcp_3`` or ``amdgpu_xcp.3``.

    ``Invalid`` if the GPUs need more DRM minors than there are; ``HostFailure`` if ``root`` holds something else, or
    cannot be written.
    """
    label = f"layout {LAYOUT}, xcp{xcp_separator}\n" + "".join(f"{gpu}\n" for gpu in simulation.gpus)
    mark = root / "simulation"
    server = _is_server(simulation)
    nodes, xcps = _number(simulation, xcp_separator)
    try:
        if mark.is_file() and mark.read_text() == label:
            _mend(root)
            return False
        if root.exists() and not mark.is_file() and any(root.iterdir()):
            raise HostFailure(
                f"{root} is not empty and holds no simulated machine: name another folder, or empty it yourself"
            )
        new, old = root.with_name(f".{root.name}.new"), root.with_name(f".{root.name}.old")
        for leftover in (new, old):
            if leftover.exists():
                shutil.rmtree(leftover)
        new.mkdir(parents=True)
        new.chmod(0o755)
        out = _Writer(str(new))
        _write_machine(out, simulation, nodes, xcps, with_bmc=server)
        # Last: a tree without its mark is one that somebody did not finish, and is never taken for a machine.
        out.file("simulation", label)
        if root.exists():
            root.rename(old)
        new.rename(root)
        if old.exists():
            shutil.rmtree(old)
    except OSError as error:
        raise HostFailure(f"the simulated machine cannot be written to {root}: {error}") from error
    return True


def repartition(simulation: Simulation, root: Path, index: int, mode: str) -> None:
    """Put GPU ``index`` of the machine that stands in ``root`` into ``mode``, in place, as a driver does it.

    Its KFD nodes go and new ones come **last** in KFD order, with new gpu_ids (``kfd_topology.c`` appends a node that
    comes back); all nodes are numbered anew, and the generation grows. The root, the devices' files and their inodes,
    the other GPUs' gpu_ids and memory, softkfd's table and its processes stay: containers have them mounted. The
    content of the GPU's own memory is gone. The caller has made sure that nobody uses it, and holds softkfd's lock.

    ``simulation`` is the one that the root was built from: what was switched since is read from the root itself, so a
    daemon that starts again with the same text finds the machine as it left it.
    """
    now, order, _ = _present(simulation, root)
    gpus = tuple(replace(gpu, mode=mode) if i == index else gpu for i, gpu in enumerate(now.gpus))
    after = Simulation(simulation.text, gpus)
    for _, minor, _ in _drm_devices(after, _xcp_separator(root))[0][index]:
        os.truncate(root / f"dev/dri/renderD{minor}", 0)
        os.truncate(root / f"dev/dri/renderD{minor}", RENDER_FILE_BYTES)
    _replace_topology(simulation, root, after, [*(i for i in order if i != index), index], index)
    # Last, as the file is what says that a switch is done: a daemon that died before finds the old mode, and switches.
    _rewrite(root / _pci_path(gpus[index]) / "current_compute_partition", f"{mode}\n")


def unplug(simulation: Simulation, root: Path, index: int) -> None:
    """Take GPU ``index`` out of the machine in ``root``: out of KFD, PCI, DRM and /dev. Mounts of its nodes stay."""
    now, order, _ = _present(simulation, root)
    _replace_topology(simulation, root, now, [i for i in order if i != index], index)
    aside = root / _UNPLUGGED / now.gpus[index].pci_address
    for path in _plugs(now, root, index):
        (aside / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).rename(aside / path)


def plug(simulation: Simulation, root: Path, index: int) -> None:
    """Put an unplugged GPU back: last in KFD order, under new gpu_ids."""
    now, order, _ = _present(simulation, root)
    aside = root / _UNPLUGGED / now.gpus[index].pci_address
    for path in _plugs(now, root, index):
        (aside / path).rename(root / path)
    shutil.rmtree(aside)
    _replace_topology(simulation, root, now, [*order, index], index)


_UNPLUGGED: Final = ".unplugged"


def _plugs(simulation: Simulation, root: Path, index: int) -> Iterator[str]:
    """The names under which the machine knows a GPU; what they lead to stays where it is, for who comes back."""
    address = simulation.gpus[index].pci_address
    yield f"sys/bus/pci/devices/{address}"
    yield f"sys/bus/pci/drivers/amdgpu/{address}"
    for card, minor, path in _drm_devices(simulation, _xcp_separator(root))[0][index]:
        if path.startswith("sys/devices/platform/"):
            yield f"sys/bus/platform/devices/{path.rpartition('/')[2]}"
        for name, number in ((f"card{card}", card), (f"renderD{minor}", minor)):
            yield f"sys/class/drm/{name}"
            yield f"sys/dev/char/226:{number}"
            yield f"dev/dri/{name}"


def _replace_topology(
    simulation: Simulation, root: Path, after: Simulation, order: Sequence[int], changed: int
) -> None:
    """The KFD's nodes become those of the GPUs in ``order``, in modes as ``after`` has them; gpu_ids of GPU ``changed``
    are new."""
    _, _, gpu_ids = _present(simulation, root)
    kept = {place: gpu_id for place, gpu_id in gpu_ids.items() if place[0] != changed}
    nodes, _ = _number(after, _xcp_separator(root), order, kept)
    was = int((root / _TOPOLOGY / "generation_id").read_text())
    own = [node for node in nodes if node.gpu_index == changed]
    aside = root / ".switch"
    if aside.exists():
        shutil.rmtree(aside)  # of a daemon that died in a switch
    aside.mkdir()
    _write_topology(_Writer(str(aside)), nodes, generation=was + len(gpu_ids) - len(kept) + len(own))
    was_node = {place: 1 + rank for rank, place in enumerate(gpu_ids)}
    for node in nodes:
        if (place := (node.gpu_index, node.partition)) in kept:  # a figure of what goes on there, not of the switch
            old, new = (f"{_TOPOLOGY}/nodes/{n}/mem_banks/0/used_memory" for n in (was_node[place], node.node))
            (aside / new).write_text((root / old).read_text())
    (root / _TOPOLOGY).rename(aside / "old")
    (aside / _TOPOLOGY).rename(root / _TOPOLOGY)
    _rewrite(root / "gpus.conf", "".join(_conf_line(node) for node in nodes))
    shutil.rmtree(aside)


def _mend(root: Path) -> None:
    """After a daemon that died between the two renames of :func:`repartition`: the topology that was."""
    if not (root / _TOPOLOGY).exists() and (root / ".switch/old").exists():
        (root / ".switch/old").rename(root / _TOPOLOGY)


def present(simulation: Simulation, root: Path) -> Simulation:
    """``simulation`` with the compute modes that its GPUs in ``root`` are in now."""
    return _present(simulation, root)[0]


def _present(simulation: Simulation, root: Path) -> tuple[Simulation, list[int], dict[tuple[int, int], int]]:
    """The machine as it is, its GPUs in KFD order, and the gpu_id of each (GPU, partition)."""
    gpus, by_path = [], {}
    for index, gpu in enumerate(simulation.gpus):
        path = _pci_path(gpu)
        by_path[path] = index
        mode = root / path / "current_compute_partition"
        gpus.append(replace(gpu, mode=mode.read_text().strip()) if mode.exists() else gpu)
    order: list[int] = []
    gpu_ids: dict[tuple[int, int], int] = {}
    for line in (root / "gpus.conf").read_text().splitlines():
        values = dict(pair.split("=", 1) for pair in line.split())
        index = by_path[values["device"]]
        if index not in order:
            order.append(index)
        partition = sum(place[0] == index for place in gpu_ids)
        gpu_ids[index, partition] = int(values["gpu_id"])
    return Simulation(simulation.text, tuple(gpus)), order, gpu_ids


def _xcp_separator(root: Path) -> str:
    return (root / "simulation").read_text().splitlines()[0].rpartition("xcp")[2]


def _rewrite(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.chmod(0o644)
    new.rename(path)


def _is_server(simulation: Simulation) -> bool:
    """Whether the machine has a management board, whose display controller takes card0."""
    return any(gpu.model.modes or gpu.model.hive_size for gpu in simulation.gpus)


class _Writer:
    """Writes below one folder. Paths are relative to it; folders are made as needed, once.

    Plain system calls: eight GPUs in CPX are some 15,000 files, and pathlib would cost as much again as the writing.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._made: set[str] = {""}

    def folder(self, path: str, mode: int = 0o755) -> None:
        if path in self._made:
            return
        self.folder(path.rpartition("/")[0])
        full = f"{self._root}/{path}"
        os.mkdir(full)  # noqa: PTH102
        os.chmod(full, mode)  # noqa: PTH101  (the daemon's umask must not shut softkfd out)
        self._made.add(path)

    def blob(self, path: str, content: bytes, mode: int = 0o644) -> None:
        self.folder(path.rpartition("/")[0])
        fd = os.open(f"{self._root}/{path}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            os.write(fd, content)
            os.fchmod(fd, mode)
        finally:
            os.close(fd)

    def file(self, path: str, text: str, mode: int = 0o644) -> None:
        self.blob(path, text.encode() if text.endswith("\n") or not text else text.encode() + b"\n", mode)

    def files(self, folder: str, contents: Iterable[tuple[str, str]]) -> None:
        for name, text in contents:
            self.file(f"{folder}/{name}", text)

    def sparse(self, path: str, size_bytes: int) -> None:
        self.file(path, "", _ANYBODY)
        os.truncate(f"{self._root}/{path}", size_bytes)

    def link(self, path: str, to: str) -> None:
        """A relative link at ``path`` to ``to``, both from the root; it ends in the name of ``to``, as in sysfs."""
        folder = path.rpartition("/")[0]
        self.folder(folder)
        parent, _, name = to.rpartition("/")
        os.symlink(f"{os.path.relpath(parent, folder)}/{name}", f"{self._root}/{path}")  # noqa: PTH211


def _properties(pairs: Iterable[tuple[str, int | str]]) -> str:
    return "".join(f"{key} {value}\n" for key, value in pairs)


# ------------------------------------------------------------------------------------------------------ the machine


def _write_machine(
    out: _Writer, simulation: Simulation, nodes: Sequence[_Node], xcps: Sequence[_Xcp], *, with_bmc: bool
) -> None:
    if with_bmc:
        _write_bmc(out)
    _write_kfd(out, nodes)
    for index, gpu in enumerate(simulation.gpus):
        _write_pci_device(out, gpu, index, [n for n in nodes if n.gpu_index == index])
    for xcp in xcps:
        _write_xcp(out, xcp)
    _write_driver(out)
    _write_softkfd(out, nodes)


_DrmDevice = tuple[int, int, str]
"""Card, render minor, and the path of the device whose nodes these are."""


def _drm_devices(simulation: Simulation, xcp_separator: str) -> tuple[list[list[_DrmDevice]], list[_Xcp]]:
    """The DRM devices of each GPU, those of partitions included that its mode does not make; and these by themselves.

    As a driver gives them that finds the GPUs one after another. No mode changes them.
    """
    of_gpus: list[list[_DrmDevice]] = []
    xcps: list[_Xcp] = []
    card, minor = int(_is_server(simulation)), RENDER_BASE
    for index, gpu in enumerate(simulation.gpus):
        if card >= DRM_MINORS or minor >= RENDER_BASE + DRM_MINORS:
            raise Invalid.field(
                "/simulate",
                f"{simulation.text!r} needs more than {DRM_MINORS} DRM minors: "
                f"GPU {index} ({gpu.model.name}) gets none; a GPU with partition modes takes {1 + XCP_DEVICES}",
            )
        devices = [(card, minor, _pci_path(gpu))]
        card, minor = card + 1, minor + 1
        for _ in range(XCP_DEVICES if gpu.model.modes else 0):
            if card >= DRM_MINORS or minor >= RENDER_BASE + DRM_MINORS:
                break  # the driver says "Skip xcp node" and goes on: the GPU has fewer partitions
            path = f"sys/devices/platform/amdgpu_xcp{xcp_separator}{len(xcps)}"
            xcps.append(_Xcp(len(xcps), card, minor, path))
            devices.append((card, minor, path))
            card, minor = card + 1, minor + 1
        of_gpus.append(devices)
    return of_gpus, xcps


_SWITCHED_IDS: Final = 0x8000
"""gpu_ids of GPUs that were switched begin here, past those of a fresh machine. In the driver they are a hash."""


def _number(
    simulation: Simulation,
    xcp_separator: str,
    order: Sequence[int] | None = None,
    kept: Mapping[tuple[int, int], int] | None = None,
) -> tuple[list[_Node], list[_Xcp]]:
    """Give every GPU its card, minors and KFD nodes. A fresh machine unless ``order`` (of the GPUs, in the KFD) and
    ``kept`` (gpu_ids by GPU and partition; those of others are new) say what has become of it."""
    of_gpus, xcps = _drm_devices(simulation, xcp_separator)
    nodes: list[_Node] = []
    simd_id = _SIMD_ID_BASE
    for index in range(len(simulation.gpus)) if order is None else order:
        gpu = simulation.gpus[index]
        hive_id = _hive_id(simulation, index)
        for partition, (node_card, node_minor, path) in enumerate(of_gpus[index][: gpu.partition_count]):
            number = len(nodes)
            mode_rank = [*gpu.model.modes, gpu.mode].index(gpu.mode)
            switched = _SWITCHED_IDS + 0x100 * index + 0x10 * mode_rank + partition
            nodes.append(
                _Node(
                    gpu=gpu,
                    gpu_index=index,
                    partition=partition,
                    node=1 + number,
                    gpu_id=0x1000 + 0x111 * (number + 1) if kept is None else kept.get((index, partition), switched),
                    card=node_card,
                    minor=node_minor,
                    simd_id_base=simd_id,
                    hive_id=hive_id,
                    device_path=path,
                )
            )
            simd_id += len(nodes[-1].active) * gpu.model.max_cus_per_array
    return nodes, xcps


def _hive_id(simulation: Simulation, index: int) -> int:
    """Neighbours of one model form a hive, up to its size; one such GPU without partitions has nobody to link to."""
    gpu = simulation.gpus[index]
    alike = [i for i, g in enumerate(simulation.gpus) if g.model is gpu.model and g.model.hive_size]
    if index not in alike:
        return 0
    hive, members = alike.index(index) // gpu.model.hive_size, gpu.model.hive_size
    if len(alike[hive * members : (hive + 1) * members]) < 2 and gpu.partition_count < 2:
        return 0
    return 0x2A2A2A2A2A2A0000 + (gpu.model.device_id << 4) + hive


# --------------------------------------------------------------------------------------------------------- the KFD


def _write_kfd(out: _Writer, nodes: Sequence[_Node]) -> None:
    out.file("sys/devices/virtual/kfd/kfd/dev", "235:0")
    out.file("sys/devices/virtual/kfd/kfd/uevent", "MAJOR=235\nMINOR=0\nDEVNAME=kfd")
    out.link("sys/devices/virtual/kfd/kfd/subsystem", "sys/class/kfd")
    out.link("sys/class/kfd/kfd", "sys/devices/virtual/kfd/kfd")
    out.link("sys/dev/char/235:0", "sys/devices/virtual/kfd/kfd")
    out.folder("sys/devices/virtual/kfd/kfd/proc", 0o777)
    _write_topology(out, nodes, generation=1)


def _write_topology(out: _Writer, nodes: Sequence[_Node], *, generation: int) -> None:
    out.file(f"{_TOPOLOGY}/generation_id", str(generation))
    out.file(
        f"{_TOPOLOGY}/system_properties",
        _properties([("platform_oem", 0), ("platform_id", 0), ("platform_rev", 0)]),
    )
    _write_cpu_node(out, nodes)
    for node in nodes:
        _write_gpu_node(out, node, nodes)


_ZERO_ON_A_CPU: Final = (
    "simd_id_base max_waves_per_simd lds_size_in_kb gds_size_in_kb num_gws wave_front_size array_count "
    "simd_arrays_per_engine cu_per_simd_array simd_per_cu max_slots_scratch_cu gfx_target_version vendor_id "
    "device_id location_id domain drm_render_minor hive_id num_sdma_engines num_sdma_xgmi_engines "
    "num_sdma_queues_per_engine num_cp_queues"
)


def _write_cpu_node(out: _Writer, nodes: Sequence[_Node]) -> None:
    path = f"{_TOPOLOGY}/nodes/0"
    out.file(f"{path}/gpu_id", "0")
    out.file(f"{path}/name", "")
    out.file(
        f"{path}/properties",
        _properties(
            [
                ("cpu_cores_count", CPU_CORES),
                ("simd_count", 0),
                ("mem_banks_count", 1),
                ("caches_count", 0),
                ("io_links_count", len(nodes)),
                ("p2p_links_count", 0),
                ("cpu_core_id_base", 0),
                *((key, 0) for key in _ZERO_ON_A_CPU.split()),
                ("max_engine_clk_ccompute", 3700),
            ]
        ),
    )
    _write_mem_bank(out, path, 0, SYSTEM_MEMORY_BYTES, width_bits=64, clock_mhz=4800)
    out.folder(f"{path}/caches")
    out.folder(f"{path}/p2p_links")
    out.folder(f"{path}/io_links")
    for index, node in enumerate(nodes):
        out.file(f"{path}/io_links/{index}/properties", _link(_LINK_PCIE, 0, node.node, 20, 312, 64000))


def _write_gpu_node(out: _Writer, node: _Node, nodes: Sequence[_Node]) -> None:
    gpu, model = node.gpu, node.gpu.model
    path = f"{_TOPOLOGY}/nodes/{node.node}"
    io_links = [_link(_LINK_PCIE, node.node, 0, 20, 312, 64000)]
    p2p_links: list[str] = []
    for peer in nodes:
        if peer is node:
            continue
        if peer.gpu_index == node.gpu_index:
            io_links.append(_link(_LINK_XGMI, node.node, peer.node, 13, 819200, 819200))
        elif node.hive_id and peer.hive_id == node.hive_id:
            # Captures of partitioned GPUs print no bandwidth towards partitions of other GPUs.
            whole = gpu.partition_count == peer.gpu.partition_count == 1
            bandwidth = 50000 if whole else 0
            io_links.append(_link(_LINK_XGMI, node.node, peer.node, 15 if whole else 41, bandwidth, bandwidth))
        elif not model.apu and not peer.gpu.model.apu:
            p2p_links.append(_link(_LINK_PCIE, node.node, peer.node, 40, 312, 64000))
    caches = list(_cache_entries(node))
    share = gpu.partition_count
    out.file(f"{path}/gpu_id", str(node.gpu_id))
    out.file(f"{path}/name", model.asic_name)
    out.file(
        f"{path}/properties",
        _properties(
            [
                ("cpu_cores_count", 0),
                ("simd_count", sum(node.active) * model.simd_per_cu),
                ("mem_banks_count", 1),
                ("caches_count", len(caches)),
                ("io_links_count", len(io_links)),
                ("p2p_links_count", len(p2p_links)),
                ("cpu_core_id_base", 0),
                ("simd_id_base", node.simd_id_base),
                ("max_waves_per_simd", model.waves_per_simd),
                ("lds_size_in_kb", 64),
                ("gds_size_in_kb", 0),
                ("num_gws", 64),
                ("wave_front_size", model.wave_front_size),
                ("array_count", len(node.active)),
                ("simd_arrays_per_engine", model.arrays_per_engine),
                ("cu_per_simd_array", model.max_cus_per_array),
                ("simd_per_cu", model.simd_per_cu),
                ("max_slots_scratch_cu", 32),
                ("gfx_target_version", model.gfx_target_version),
                ("vendor_id", 0x1002),
                ("device_id", model.device_id),
                ("location_id", node.location_id),
                ("domain", gpu.domain),
                ("drm_render_minor", node.minor),
                ("hive_id", node.hive_id),
                ("num_sdma_engines", model.sdma_engines),
                ("num_sdma_xgmi_engines", model.sdma_xgmi_engines if share == 1 else 0),
                ("num_sdma_queues_per_engine", model.sdma_queues_per_engine),
                ("num_cp_queues", model.cp_queues),
                ("max_engine_clk_fcompute", model.max_engine_mhz),
                ("local_mem_size", 0),
                ("fw_version", model.fw_version),
                ("capability", model.capability),
                ("debug_prop", model.debug_prop),
                ("sdma_fw_version", model.sdma_fw_version),
                ("unique_id", gpu.unique_id),
                ("num_xcc", gpu.xccs_per_partition),
                ("max_engine_clk_ccompute", 3700),
            ]
        ),
    )
    _write_mem_bank(out, path, 1, node.memory_bytes, width_bits=model.vram_width_bits, clock_mhz=model.max_memory_mhz)
    out.file(f"{path}/mem_banks/0/used_memory", "0", _ANYBODY)
    for kind, entries in (("caches", caches), ("io_links", io_links), ("p2p_links", p2p_links)):
        out.folder(f"{path}/{kind}")
        for number, text in enumerate(entries):
            out.file(f"{path}/{kind}/{number}/properties", text)


def _write_mem_bank(out: _Writer, path: str, heap: int, size_bytes: int, *, width_bits: int, clock_mhz: int) -> None:
    out.file(
        f"{path}/mem_banks/0/properties",
        _properties(
            [
                ("heap_type", heap),
                ("size_in_bytes", size_bytes),
                ("flags", 0),
                ("width", width_bits),
                ("mem_clk_max", clock_mhz),
            ]
        ),
    )


def _link(kind: int, node_from: int, node_to: int, weight: int, least: int, most: int) -> str:
    return (
        f"type {kind}\nversion_major 0\nversion_minor 0\nnode_from {node_from}\nnode_to {node_to}\nweight {weight}\n"
        f"min_latency 0\nmax_latency 0\nmin_bandwidth {least}\nmax_bandwidth {most}\n"
        "recommended_transfer_size 0\nflags 1\n"
    )


def _cu_slots(node: _Node) -> Iterator[list[int]]:
    """The slots of each shader array's active CUs, counted over the node in steps of ``cu_per_simd_array``.

    Which slots of an array are fused off is not known for any chip; here it moves from array to array, so that holes
    lie inside arrays as well (as one capture shows). On RDNA whole WGPs are fused off.
    """
    model = node.gpu.model
    step = 2 if model.wgp else 1
    units = model.max_cus_per_array // step
    for array, active in enumerate(node.active):
        fused = {(units - 1 - array - i) % units for i in range(units - active // step)}
        first = array * model.max_cus_per_array
        yield [first + step * u + half for u in range(units) if u not in fused for half in range(step)]


def _cache_entries(node: _Node) -> Iterator[str]:
    """The KFD's cache files, in its order: per CU, per two CUs, per array, per XCC, per node (kfd_fill_cache_info).

    ``processor_id_low`` of an L1 entry is where its CU sits, which is how a harvest map can be read from sysfs.
    """
    caches, model = node.gpu.model.caches, node.gpu.model
    arrays = list(_cu_slots(node))
    data, instruction, in_cu = 1, 2, 8
    line = caches.line_bytes

    def entry(slot: int, level: int, size_kib: int, kind: int, line_bytes: int, siblings: Sequence[int]) -> str:
        bits = ["0"] * (32 * len(arrays) if level > 1 else 32)
        for sibling in siblings:
            bits[sibling] = "1"
        return (
            f"processor_id_low {node.simd_id_base + slot}\nlevel {level}\nsize {size_kib}\n"
            f"cache_line_size {line_bytes}\ncache_lines_per_tag 1\nassociation 16\nlatency 0\ntype {kind | in_cu}\n"
            f"sibling_map {','.join(bits)}\n"
        )

    for slots in arrays:
        for slot in slots:
            yield entry(slot, 1, caches.l1_kib, data, line, [0])
    for kind, size_kib in ((instruction, caches.l1i_kib), (data, caches.scalar_kib)):
        for array, slots in enumerate(arrays):
            first = array * model.max_cus_per_array
            for pair in range(0, model.max_cus_per_array, 2):
                present = [s for s in slots if pair <= s - first < pair + 2]
                if present:
                    yield entry(present[0], 1, size_kib, kind, 64, [s - present[0] for s in present])
    if caches.gl1_kib:
        for slots in arrays:
            if slots:
                yield entry(slots[0], 1, caches.gl1_kib, data, line, [s - slots[0] for s in slots])
    per_xcc = model.arrays_per_xcc

    def shared_by(group: Sequence[list[int]], offset: int) -> list[int]:
        """Bits of the CUs of ``group``: the KFD gives each array 32 of them."""
        return [
            32 * (offset + i) + slot - (offset + i) * model.max_cus_per_array
            for i, slots in enumerate(group)
            for slot in slots
        ]

    for xcc in range(node.gpu.xccs_per_partition):
        group = arrays[xcc * per_xcc : (xcc + 1) * per_xcc]
        slot = next(s for slots in group for s in slots)
        yield entry(slot, 2, caches.l2_kib, data, line, shared_by(group, xcc * per_xcc))
    if caches.l3_kib:
        slot = next(s for slots in arrays for s in slots)
        yield entry(slot, 3, caches.l3_kib // node.gpu.partition_count, data, line, shared_by(arrays, 0))


# ------------------------------------------------------------------------------------------------- PCI, DRM, driver


def _pci_path(gpu: SimGpu) -> str:
    return f"sys/devices/pci{gpu.domain:04x}:00/{gpu.pci_address}"


def _write_pci_device(out: _Writer, gpu: SimGpu, index: int, nodes: Sequence[_Node]) -> None:
    model, path = gpu.model, _pci_path(gpu)
    pci_id = f"1002:{model.device_id:04X}"
    out.files(
        path,
        [
            ("vendor", "0x1002"),
            ("device", f"0x{model.device_id:04x}"),
            ("subsystem_vendor", "0x1002"),
            ("subsystem_device", f"0x{model.device_id:04x}"),
            ("revision", f"0x{model.revision:02x}"),
            ("class", f"0x{model.pci_class:06x}"),
            ("numa_node", "0"),
            ("local_cpulist", f"0-{CPU_CORES - 1}"),
            (
                "uevent",
                f"DRIVER=amdgpu\nPCI_CLASS={model.pci_class:X}\nPCI_ID={pci_id}\nPCI_SUBSYS_ID={pci_id}\nPCI_SLOT_NAME={gpu.pci_address}",
            ),
            ("mem_info_vram_total", str(gpu.vram_bytes)),
            ("mem_info_vis_vram_total", str(gpu.vram_bytes)),
            ("mem_info_gtt_total", str(max(GTT_BYTES, gpu.memory_bytes if model.apu else 0))),
            ("mem_info_vis_vram_used", "0"),
            ("gpu_busy_percent", "0"),
            ("mem_busy_percent", "0"),
            ("vbios_version", f"113-SOFTKFD-{index:03d}"),
            ("current_link_speed", "32.0 GT/s PCIe"),
            ("current_link_width", "16"),
            ("max_link_speed", "32.0 GT/s PCIe"),
            ("max_link_width", "16"),
            # Boards of the Radeon line have an empty one. Here it is set: a simulated machine should say what it
            # simulates even where no amdgpu.ids is installed.
            ("product_name", gpu.product),
            ("product_number", ""),
            ("serial_number", ""),
        ],
    )
    out.file(f"{path}/mem_info_vram_used", "0", _ANYBODY)
    out.file(f"{path}/mem_info_gtt_used", "0", _ANYBODY)
    if gpu.unique_id:
        out.file(f"{path}/unique_id", f"{gpu.unique_id:016x}")
    if model.modes:
        memory_modes = sorted({nps for modes in model.modes.values() for nps in modes})
        out.files(
            path,
            [
                ("current_compute_partition", gpu.mode),
                ("available_compute_partition", ", ".join(model.modes)),
                ("current_memory_partition", gpu.memory_mode),
                ("available_memory_partition", ", ".join(memory_modes)),
            ],
        )
        # Of newer drivers: what xcp_config selects is described beside it. It is no more than a selector.
        out.files(
            f"{path}/compute_partition_config",
            [
                ("supported_xcp_configs", ", ".join(model.modes)),
                ("xcp_config", gpu.mode),
                ("supported_nps_configs", ", ".join(model.modes[gpu.mode])),
                ("xcc/num_inst", str(gpu.xccs_per_partition)),
                ("xcc/num_shared", "1"),
            ],
        )
    _write_pci_config(out, path, model.device_id, model.revision, model.pci_class)
    out.link(f"{path}/subsystem", "sys/bus/pci")
    out.link(f"{path}/driver", "sys/bus/pci/drivers/amdgpu")
    out.link(f"sys/bus/pci/devices/{gpu.pci_address}", path)
    out.link(f"sys/bus/pci/drivers/amdgpu/{gpu.pci_address}", path)
    _write_drm_node(out, path, f"card{nodes[0].card}", nodes[0].card)
    _write_drm_node(out, path, f"renderD{nodes[0].minor}", nodes[0].minor)


def _write_pci_config(out: _Writer, path: str, device_id: int, revision: int, pci_class: int) -> None:
    """The first 64 bytes of configuration space: libdrm reads ids and revision from there."""
    config = bytearray(64)
    config[0:2] = (0x1002).to_bytes(2, "little")
    config[2:4] = device_id.to_bytes(2, "little")
    config[8] = revision
    config[9:12] = pci_class.to_bytes(3, "little")
    config[44:46] = (0x1002).to_bytes(2, "little")
    config[46:48] = device_id.to_bytes(2, "little")
    out.blob(f"{path}/config", bytes(config))


def _write_xcp(out: _Writer, xcp: _Xcp) -> None:
    name = xcp.path.rpartition("/")[2]
    out.file(f"{xcp.path}/uevent", f"DRIVER=amdgpu_xcp\nMODALIAS=platform:{name}")
    out.file(f"{xcp.path}/modalias", f"platform:{name}")
    out.link(f"{xcp.path}/subsystem", "sys/bus/platform")
    out.link(f"sys/bus/platform/devices/{name}", xcp.path)
    _write_drm_node(out, xcp.path, f"card{xcp.card}", xcp.card)
    _write_drm_node(out, xcp.path, f"renderD{xcp.minor}", xcp.minor)


def _write_drm_node(out: _Writer, device_path: str, name: str, minor: int) -> None:
    path = f"{device_path}/drm/{name}"
    out.file(f"{path}/dev", f"226:{minor}")
    out.file(f"{path}/uevent", f"MAJOR=226\nMINOR={minor}\nDEVNAME=dri/{name}\nDEVTYPE=drm_minor")
    out.link(f"{path}/device", device_path)
    out.link(f"{path}/subsystem", "sys/class/drm")
    out.link(f"sys/class/drm/{name}", path)
    out.link(f"sys/dev/char/226:{minor}", path)
    out.sparse(f"dev/dri/{name}", RENDER_FILE_BYTES if name.startswith("render") else 0)


def _write_bmc(out: _Writer) -> None:
    """The display controller that a server's management board has: card0 is not an AMD GPU, and it cannot render."""
    path = "sys/devices/pci0000:00/0000:02:00.0"
    out.files(
        path,
        [
            ("vendor", "0x1a03"),
            ("device", "0x2000"),
            ("class", "0x030000"),
            ("revision", "0x52"),
            ("numa_node", "0"),
            ("uevent", "DRIVER=ast\nPCI_CLASS=30000\nPCI_ID=1A03:2000\nPCI_SLOT_NAME=0000:02:00.0"),
        ],
    )
    out.link(f"{path}/subsystem", "sys/bus/pci")
    out.link(f"{path}/driver", "sys/bus/pci/drivers/ast")
    out.folder("sys/bus/pci/drivers/ast")
    out.link("sys/bus/pci/devices/0000:02:00.0", path)
    _write_drm_node(out, path, "card0", 0)


def _write_driver(out: _Writer) -> None:
    out.folder("sys/bus/pci/drivers/amdgpu")
    out.file("sys/module/amdgpu/version", "6.12.12")
    out.file("sys/module/amdgpu/srcversion", "0123456789ABCDEF0123456")
    out.file("sys/module/amdgpu/initstate", "live")
    out.folder("sys/class/hwmon")


# --------------------------------------------------------------------------------------------------------- softkfd


def _write_softkfd(out: _Writer, nodes: Sequence[_Node]) -> None:
    out.sparse("dev/kfd", KFD_FILE_BYTES)
    out.sparse("state", STATE_FILE_BYTES)
    out.file("log.jsonl", "", _ANYBODY)
    out.folder("procs", 0o777)
    out.folder("processes", 0o777)
    out.folder("smi", 0o777)
    out.folder("faults")
    # kfd/proc is by host pid: softkfd makes links there only where a pid means the same as here.
    out.file("pid_namespace", str(os.stat("/proc/self/ns/pid").st_ino))  # noqa: PTH116
    out.file("gpus.conf", "".join(_conf_line(node) for node in nodes))


def _conf_line(node: _Node) -> str:
    """What softkfd has to know of a KFD node; the keys are explained where it reads them (softkfd/src/root.c)."""
    gpu, model = node.gpu, node.gpu.model
    values: list[tuple[str, int | str]] = [
        ("gpu_id", node.gpu_id),
        ("minor", node.minor),
        ("card", node.card),
        ("node", node.node),
        ("vram", node.memory_bytes),
        ("gtt", max(GTT_BYTES, gpu.memory_bytes if model.apu else 0) // PAGE * PAGE),
        ("device_id", model.device_id),
        ("rev", model.revision),
        ("family", model.family),
        ("ses", min(4, model.engines_per_xcc * gpu.xccs_per_partition)),
        ("sa_per_se", model.arrays_per_engine),
        ("cus", sum(node.active)),
        ("vram_type", model.vram_type),
        ("width", model.vram_width_bits),
        ("sclk_khz", model.max_engine_mhz * 1000),
        ("mclk_khz", model.max_memory_mhz * 1000),
        ("counter_khz", model.counter_khz),
        ("wave", model.wave_front_size),
        ("gfx", model.gfx_target_version),
        ("device", _pci_path(gpu)),
    ]
    return " ".join(f"{key}={value}" for key, value in values) + "\n"
