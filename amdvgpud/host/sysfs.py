"""Reads the machine: KFD topology, PCI and DRM sysfs -> a frozen Inventory. Needs no ROCm and opens no device.

Owns how the three kernel views are joined, how compute units lie in silicon, which device counts as usable, and the
stable ids. Does not own watching for changes, nor anything per process. Sources: Linux ``kfd_topology.c``,
``kfd_crat.c`` (what the node files say), ``amdgpu_xcp.c`` (partitions), ``amdgpu_pm.c`` (device files), libdrm
``amdgpu.ids`` (product names); layouts checked on captured trees of real machines.

Nothing here raises for what it finds. A device that cannot be understood is listed as unusable with the reason, because
a wrong figure would become a wrong limit; a detail that cannot be read is left out with a warning.
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from amdvgpud.core import modes
from amdvgpud.core.identify import smi_uuid
from amdvgpud.core.model import (
    CuLayout,
    Gpu,
    GpuId,
    Inventory,
    Link,
    LinkKind,
    Partition,
    PartitionId,
    Profile,
    Unusable,
)

AMD: Final = 0x1002
_GPU_CLASSES: Final = (0x03, 0x12)
"""PCI base classes of display controllers and processing accelerators; audio functions and bridges are neither."""

_PCI_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", re.ASCII)
_SENSOR: Final = re.compile(r"[a-z][a-z0-9_]{0,15}", re.ASCII)
_SCANS: Final = 3
"""How often a scan starts over because the topology changed under it. A partition switch on eight GPUs is dozens of
changes; the event that ends it brings a fresh scan anyway, so there is no point in chasing it here."""

_MAX_ENGINES_PER_XCC: Final = 8
"""What the driver's mask walk has registers for. More in a node means that ``num_xcc`` was lost from the file."""
_MAX_VRAM_BYTES: Final = 1 << 48
_LINK_KINDS: Final = {2: LinkKind.PCIE, 11: LinkKind.XGMI}
_FRAMEBUFFER_HEAPS: Final = (1, 2)

_GFX_OF_ASIC: Final = {
    "kaveri": "gfx700",
    "hawaii": "gfx701",
    "carrizo": "gfx801",
    "tonga": "gfx802",
    "fiji": "gfx803",
    "polaris10": "gfx803",
    "polaris11": "gfx803",
    "polaris12": "gfx803",
    "vegam": "gfx803",
    "vega10": "gfx900",
    "raven": "gfx902",
    "vega12": "gfx904",
    "vega20": "gfx906",
    "arcturus": "gfx908",
    "renoir": "gfx90c",
    "navi10": "gfx1010",
    "navi12": "gfx1011",
    "navi14": "gfx1012",
    "sienna_cichlid": "gfx1030",
    "navy_flounder": "gfx1031",
}
"""For kernels whose nodes have no ``gfx_target_version``: they put the ASIC's own name into the ``name`` file."""

_MIB: Final = 1 << 20
_NOMINAL: Final = {0x740F: (1, 65520 * _MIB), 0x74A1: (8, 196592 * _MIB)}
"""Device id -> (XCCs, VRAM) of boards met as topology-only captures without memory banks; see ``_Scan._vram_bytes``."""


class SysfsReader:
    """``node.Sysfs`` on a directory that holds ``sys/`` (``/``, a simulated tree, or a captured one).

    ``name_tables`` are ``amdgpu.ids`` files, first hit wins; None: those under ``root``, then the host's own.
    """

    def __init__(self, root: Path = Path("/"), *, name_tables: Sequence[Path] | None = None) -> None:
        self._root = root
        if name_tables is None:
            usual = ("usr/share/libdrm/amdgpu.ids", "opt/amdgpu/share/libdrm/amdgpu.ids")
            name_tables = [base / name for base in dict.fromkeys((root, Path("/"))) for name in usual]
        self._names = _ProductNames(name_tables)
        self._read_modes: dict[tuple[str, str, int], str] = {}

    def read_inventory(self) -> Inventory:
        """The machine as it is now. Starts over, a few times at most, when the topology changes during the scan."""
        for _ in range(_SCANS):
            scan = _Scan(str(self._root), self._names, self._read_modes)
            inventory = scan.inventory()
            if scan.generation() == inventory.generation_id:
                return inventory
        torn = f"the KFD topology changed during each of {_SCANS} scans: this picture may mix old and new"
        return replace(inventory, warnings=(*inventory.warnings, torn))

    def vram_used_bytes(self, pci_address: str) -> int | None:
        """The driver's own figure for the whole device, in partition modes too. None: cannot be had now."""
        path = self._device(pci_address)
        return None if path is None else _number(_read(f"{path}/mem_info_vram_used"))

    def temperatures_c(self, pci_address: str) -> dict[str, float]:
        """What hwmon has (Documentation/gpu/amdgpu/thermal.rst); empty where there is none, or the card may sleep.

        A read counts as use (``amdgpu_pm.c`` ends in ``pm_runtime_put_autosuspend``), after which the card is awake for
        five seconds; with one every two seconds an idle card would never sleep. No figure is worth that. Which may:
        Documentation/ABI/testing/sysfs-devices-power; the delay of one that has no autosuspend is EIO.
        """
        path = self._device(pci_address)
        if path is None or _text(_read(f"{path}/power/runtime_status")) in ("suspended", "suspending"):
            return {}
        if (
            _text(_read(f"{path}/power/control")) == "auto"
            and _number(_read(f"{path}/power/autosuspend_delay_ms")) is not None  # a negative one: it never sleeps
        ):
            return {}
        found = {}
        for monitor in _names_in(f"{path}/hwmon"):
            for number in range(1, 4):
                at = f"{path}/hwmon/{monitor}/temp{number}"
                label, millidegrees = _text(_read(f"{at}_label")), _number(_read(f"{at}_input"))
                if _SENSOR.fullmatch(label) and millidegrees is not None:
                    found[label] = millidegrees / 1000
        return found

    def _device(self, pci_address: str) -> str | None:
        address = pci_address.lower()
        if not _PCI_ADDRESS.fullmatch(address):
            return None
        path = f"{self._root}/sys/bus/pci/devices/{address}"
        if os.path.isdir(path):  # noqa: PTH112
            return path
        device = _Scan(str(self._root), self._names).pci_devices().get(address)
        return None if device is None else device.path


# ------------------------------------------------------------------------------------------------------ raw reading


def _read(path: str) -> bytes | OSError:
    """One attribute, or why not. A sysfs attribute comes whole in one read, so one read is what we do."""
    try:
        # O_NONBLOCK: in a damaged or hostile tree a FIFO must not hold the scan for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return error
    try:
        return os.read(fd, 1 << 16)
    except OSError as error:
        return error
    finally:
        os.close(fd)


def _text(raw: bytes | OSError) -> str:
    """The attribute as stripped text; empty where it cannot be read. Foreign bytes become replacement characters."""
    return "" if isinstance(raw, OSError) else raw.replace(b"\0", b"").decode("utf-8", "replace").strip()


def _label(raw: bytes | OSError) -> str:
    """Text that will stand in tables, labels and terminals: one printable line, or nothing."""
    text = _text(raw)
    return text[:128] if text.isprintable() and "\ufffd" not in text else ""


def _number(raw: bytes | OSError) -> int | None:
    """A non-negative decimal attribute."""
    text = _text(raw)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


def _hex(raw: bytes | OSError | str) -> int | None:
    """A hexadecimal attribute, with or without 0x."""
    text = raw if isinstance(raw, str) else _text(raw)
    return int(text, 16) if re.fullmatch(r"(0[xX])?[0-9a-fA-F]{1,16}", text, re.ASCII) else None


def _properties(raw: bytes) -> dict[bytes, int]:
    """``name value`` lines. What is no non-negative 64-bit decimal is not there: absent is safer than guessed."""
    found = {}
    for line in raw.split(b"\n"):
        key, _, value = line.rstrip().partition(b" ")
        if value.isdigit() and len(value) <= 20:
            found[key] = int(value)
    return found


def _names_in(path: str) -> list[str]:
    try:
        return os.listdir(path)  # noqa: PTH208 - strings, not Paths: thousands of them, and 150 ms for them all
    except OSError:
        return []


def _numbers_in(path: str) -> list[int]:
    """The entries of a directory whose names are whole numbers, ascending as numbers (10 after 9)."""
    return sorted(int(n) for n in _names_in(path) if n.isascii() and n.isdigit() and len(n) <= 9)


def _link_target(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - as above
    except OSError:
        return ""


def _why(error: OSError) -> str:
    if error.errno in (errno.EPERM, errno.EACCES):
        return "permission denied (a device cgroup, or a reset in progress)"
    if error.errno == errno.EBUSY:
        return "busy (a reset or a partition switch in progress)"
    if error.errno == errno.ENOENT:
        return "missing"
    return os.strerror(error.errno or errno.EIO)


class _ProductNames:
    """libdrm's ``amdgpu.ids``: device id, revision id -> product name. Read when first needed, once."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._table: dict[tuple[int, int], str] | None = None

    def find(self, device_id: int, revision: int | None) -> str | None:
        """None without a revision: it decides between products (0x7550 is three of them), so it is not guessed."""
        if self._table is None:
            self._table = {}
            for file in reversed(self._files):
                try:
                    raw = file.read_bytes()
                except OSError:
                    continue
                self._table.update(_parse_ids(raw))
        return None if revision is None else self._table.get((device_id, revision))


def _parse_ids(raw: bytes) -> dict[tuple[int, int], str]:
    found = {}
    for line in raw.decode("utf-8", "replace").splitlines():
        parts = [p.strip() for p in line.split(",", 2)]
        if len(parts) == 3 and parts[2] and not line.startswith("#"):
            device, revision = _hex(parts[0]), _hex(parts[1])
            if device is not None and revision is not None:
                found[device, revision] = parts[2]
    return found


# ------------------------------------------------------------------------------------------------- the three views


@dataclass(frozen=True, slots=True)
class _PciDevice:
    address: str
    path: str
    vendor: int | None
    device_id: int | None
    revision: int | None
    pci_class: int | None
    driver: str | None

    @property
    def is_amd_gpu(self) -> bool:
        return self.vendor == AMD and (self.pci_class is None or self.pci_class >> 16 in _GPU_CLASSES)


@dataclass(frozen=True, slots=True)
class _KfdNode:
    number: int
    path: str
    gpu_id: int
    properties: dict[bytes, int]

    def __getitem__(self, name: str) -> int:
        """A property; 0 where it is missing, which is what the kernel prints for what a node does not have."""
        return self.properties.get(name.encode(), 0)

    @property
    def domain(self) -> int:
        return self["domain"]

    @property
    def address(self) -> str:
        """As ``domain`` and ``location_id`` say, partition bits and all."""
        return _address(self.domain, self["location_id"])

    @property
    def base_address(self) -> str:
        return _address(self.domain, self["location_id"] & ~7)


def _address(domain: int, location: int) -> str:
    return f"{domain:04x}:{location >> 8:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


_PLACE_KEYS: Final = (b"location_id", b"drm_render_minor")
_SHAPE_KEYS: Final = (b"simd_count", b"simd_per_cu", b"array_count", b"simd_arrays_per_engine")


class _Refused(Exception):
    """Why one node or device cannot be used; never leaves this module."""


@dataclass(slots=True)
class _Found:
    """One physical GPU on its way through the join."""

    address: str
    pci: _PciDevice | None
    nodes: dict[int, _KfdNode] = field(default_factory=dict)
    """By partition index."""


class _Scan:
    """One pass over one tree: reads, joins, and collects what was refused."""

    def __init__(
        self, root: str, names: _ProductNames, read_modes: dict[tuple[str, str, int], str] | None = None
    ) -> None:
        """``read_modes``, kept from scan to scan: (PCI address, file, count of partitions) -> mode as last read."""
        self._read_modes = {} if read_modes is None else read_modes
        self._sys = os.path.join(root, "sys")  # noqa: PTH118
        self._names = names
        self._unusable: list[Unusable] = []
        self._warnings: dict[str, None] = {}
        self._topology = next(
            (
                path
                for tail in ("class/kfd/kfd/topology", "devices/virtual/kfd/kfd/topology")
                if os.path.isdir(path := f"{self._sys}/{tail}/nodes")  # noqa: PTH112
            ),
            "",
        ).removesuffix("/nodes")
        self._whole = os.path.isdir(f"{self._sys}/bus/pci")  # noqa: PTH112
        """A machine always has this folder. A tree without it is a capture of parts, and what such a tree does not
        hold cannot be held against a device; on a machine the same absence is a fault."""

    # ------------------------------------------------------------------------------------------------- results

    def generation(self) -> int:
        return _number(_read(f"{self._topology}/generation_id")) or 0 if self._topology else 0

    def inventory(self) -> Inventory:
        generation = self.generation()  # before the first node is read, or a change could hide between the two
        devices = self.pci_devices()
        nodes, cpu_nodes = self._kfd_nodes()
        found = self._join(nodes, devices)
        ids = self._unique_ids(found, devices)
        numa_of_cpu_node = self._numa_of_cpu_nodes(cpu_nodes)
        gpus = []
        for item in found:
            try:
                gpus.append(self._gpu(item, ids, numa_of_cpu_node))
            except (_Refused, ValueError) as error:  # ValueError: the model refuses what our own checks let through
                self._refuse(item.address, self._product_name(item.pci, None), str(error))
        gpus.sort(key=lambda g: min(p.kfd_node for p in g.partitions))
        self._list_the_rest(devices, {item.address for item in found})
        return Inventory(
            gpus=tuple(replace(gpu, index=rank) for rank, gpu in enumerate(gpus)),
            unusable=tuple(sorted(self._unusable, key=lambda u: (u.pci_address or "~", u.name))),
            generation_id=generation,
            driver_version=_label(_read(f"{self._sys}/module/amdgpu/version")) or None,
            driver_src_version=_label(_read(f"{self._sys}/module/amdgpu/srcversion")) or None,
            warnings=tuple(self._warnings),
        )

    def _refuse(self, address: str | None, name: str, reason: str) -> None:
        self._unusable.append(Unusable(address, name, reason))

    def _warn(self, sentence: str) -> None:
        self._warnings[sentence] = None

    # ------------------------------------------------------------------------------------------------- PCI view

    def pci_devices(self) -> dict[str, _PciDevice]:
        """By address: the AMD devices of ``sys/bus/pci``; in a tree of parts those that DRM cards stand on."""
        found: dict[str, _PciDevice] = {}
        if self._whole:
            folder = f"{self._sys}/bus/pci/devices"
            for name in _names_in(folder):
                if _PCI_ADDRESS.fullmatch(name.lower()):
                    device = self._pci_device(name.lower(), f"{folder}/{name}")
                    if device.vendor in (AMD, None):
                        found[device.address] = device
            return found
        for name in sorted(_names_in(f"{self._sys}/class/drm")):
            if not re.fullmatch(r"card\d+", name, re.ASCII):
                continue  # connectors (card0-DP-1), render nodes; partition cards stand on platform devices
            path = f"{self._sys}/class/drm/{name}/device"
            address = self._uevent(path).get("PCI_SLOT_NAME", "").lower()
            if _PCI_ADDRESS.fullmatch(address):
                device = self._pci_device(address, path)
                if device.vendor != AMD:
                    continue
                if address in found:
                    self._warn(f"{address}: two DRM cards claim this PCI address; the second, {name}, is ignored")
                    continue
                found[address] = device
        return found

    def _uevent(self, path: str) -> dict[str, str]:
        lines = _text(_read(f"{path}/uevent")).splitlines()
        return {key: value.strip() for key, equals, value in (line.partition("=") for line in lines) if equals}

    def _pci_device(self, address: str, path: str) -> _PciDevice:
        vendor = _hex(_read(f"{path}/vendor"))
        if vendor not in (AMD, None):
            return _PciDevice(address, path, vendor, None, None, None, None)
        uevent = self._uevent(path)
        said_vendor, _, said_device = uevent.get("PCI_ID", "").partition(":")
        driver = os.path.basename(_link_target(f"{path}/driver")) or uevent.get("DRIVER", "")  # noqa: PTH119

        def attribute(name: str, otherwise: str) -> int | None:
            value = _hex(_read(f"{path}/{name}"))
            return _hex(otherwise) if value is None else value

        return _PciDevice(
            address=address,
            path=path,
            vendor=_hex(said_vendor) if vendor is None else vendor,
            device_id=attribute("device", said_device),
            revision=attribute("revision", ""),
            pci_class=attribute("class", uevent.get("PCI_CLASS", "")),
            driver=driver or None,
        )

    # ------------------------------------------------------------------------------------------------- KFD view

    def _kfd_nodes(self) -> tuple[list[_KfdNode], list[_KfdNode]]:
        """(GPU nodes, CPU nodes), each in node order."""
        gpus: list[_KfdNode] = []
        cpus: list[_KfdNode] = []
        for number in _numbers_in(f"{self._topology}/nodes") if self._topology else []:
            try:
                node = self._kfd_node(number)
            except _Refused as error:
                self._refuse(None, f"KFD node {number}", str(error))
                continue
            if node["simd_count"]:
                gpus.append(node)
            if node["cpu_cores_count"]:  # an APU of old is both in one node
                cpus.append(node)
        return gpus, cpus

    def _kfd_node(self, number: int) -> _KfdNode:
        path = f"{self._topology}/nodes/{number}"
        raw = _read(f"{path}/properties")
        if isinstance(raw, OSError):
            raise _Refused(f"its properties cannot be read: {_why(raw)}")
        properties = _properties(raw)
        gpu_id_raw = _read(f"{path}/gpu_id")
        gpu_id = _number(gpu_id_raw)
        node = _KfdNode(number, path, gpu_id or 0, properties)
        missing = isinstance(gpu_id_raw, OSError) and gpu_id_raw.errno == errno.ENOENT

        if not properties.get(b"simd_count"):
            if gpu_id:
                raise _Refused("torn: it has a gpu_id but no simd_count")
            if not properties.get(b"cpu_cores_count"):
                raise _Refused("torn: it has neither CPU cores nor SIMDs")
            if properties.get(b"drm_render_minor") or properties.get(b"gfx_target_version"):
                raise _Refused("it names a render node or a gfx target but has no SIMD: not a GPU that can compute")
            return node

        if lost := [key.decode() for key in _PLACE_KEYS + _SHAPE_KEYS if key not in properties]:
            raise _Refused(f"torn: its properties have no {', '.join(lost)}")
        if not raw.endswith(b"\n") and raw.rpartition(b"\n")[2].startswith(b"unique_id "):
            # Any other last line cut short is caught by what is then missing or impossible; this would be another id.
            raise _Refused("torn: its properties end in the middle of the unique_id")
        if node["location_id"] > 0xFFFF or node.domain > 0xFFFF_FFFF:
            raise _Refused(f"location_id {node['location_id']} of domain {node.domain} is no PCI address")
        if not 128 <= node["drm_render_minor"] < 1 << 20:
            raise _Refused(f"no render node: drm_render_minor is {node['drm_render_minor']}")
        if not gpu_id:
            # The gpu_id is what a policy is keyed by. Some captures of the topology lack the file; no request will
            # ever carry an id of theirs, so a stand-in that is distinct on the machine serves them.
            if self._whole or not missing:
                raise _Refused(f"no gpu_id: {_why(gpu_id_raw)}" if isinstance(gpu_id_raw, OSError) else "no gpu_id")
            node = replace(node, gpu_id=(node.domain & 0x7FFF) << 16 | node["location_id"])
        return node

    # ---------------------------------------------------------------------------------------------------- join

    def _join(self, nodes: list[_KfdNode], devices: dict[str, _PciDevice]) -> list[_Found]:
        """KFD nodes onto PCI devices by domain and address, plus the partition index; by nothing else, ever."""
        placed: dict[tuple[str, int], list[_KfdNode]] = defaultdict(list)
        for node in nodes:
            address, index = self._place(node, nodes, devices)
            placed[address, index].append(node)

        twice: dict[int, str] = {}
        for what in ("gpu_id", "render minor"):
            owners: dict[int, list[_KfdNode]] = defaultdict(list)
            for node in nodes:
                owners[node.gpu_id if what == "gpu_id" else node["drm_render_minor"]].append(node)
            for value, same in owners.items():
                if len(same) > 1:
                    twice.update({n.number: f"{what} {value} is also that of another KFD node" for n in same})

        found: dict[str, _Found] = {}
        for (address, index), here in placed.items():
            for node in here:
                try:
                    if node.number in twice:
                        raise _Refused(twice[node.number])
                    self._check_join(node, address, index, here, devices)
                except _Refused as error:
                    self._refuse(address, f"KFD node {node.number}", str(error))
                    continue
                found.setdefault(address, _Found(address, devices.get(address))).nodes[index] = node
        return list(found.values())

    def _place(self, node: _KfdNode, nodes: list[_KfdNode], devices: dict[str, _PciDevice]) -> tuple[str, int]:
        """(PCI address, partition index) of a node.

        The driver ORs the partition index into the function bits of ``location_id``, so 0000:05:00.1 is either
        partition 1 of 0000:05:00.0 or a real function 1 (a virtual function that was handed to this machine). A real
        one exists as a PCI device that amdgpu drives; the audio function that Radeon boards have there does not count.
        Without PCI files, nodes whose function 0 is a node too are its partitions.
        """
        index = node["location_id"] & 7
        if index == 0:
            return node.address, 0
        real = devices.get(node.address)
        if real is not None and real.is_amd_gpu and real.driver == "amdgpu":
            return node.address, 0
        if not devices and not self._whole and not any(n.address == node.base_address for n in nodes):
            return node.address, 0
        return node.base_address, index

    def _check_join(
        self, node: _KfdNode, address: str, index: int, here: list[_KfdNode], devices: dict[str, _PciDevice]
    ) -> None:
        if len(here) > 1:
            raise _Refused(f"{len(here)} KFD nodes claim partition {index} of {address}")
        device = devices.get(address)
        if device is None:
            if self._whole or devices:
                raise _Refused(f"no PCI device at {address} matches it")
            return
        if not device.is_amd_gpu:
            raise _Refused(f"the PCI device at {address} is no AMD GPU (vendor or class)")
        if device.driver != "amdgpu":
            raise _Refused(_driver_reason(device.driver))
        said = node.properties.get(b"device_id", device.device_id)
        if device.device_id is not None and said != device.device_id:
            raise _Refused(f"the KFD says device id {said:#06x}, PCI says {device.device_id:#06x}")
        minor = node["drm_render_minor"]
        if not self._whole:
            return
        link = f"{self._sys}/class/drm/renderD{minor}"
        if not os.path.exists(link):  # noqa: PTH110
            raise _Refused(f"no render node: renderD{minor}, which the KFD names, does not exist")
        # Partitions after the first have platform devices (amdgpu_xcp_3 or amdgpu_xcp.3, as the kernel likes), which
        # say nothing about their GPU; only another GPU's address is a contradiction.
        target = _link_target(link).partition("/drm/")[0] or _link_target(f"{link}/device")
        owner = os.path.basename(target).lower()  # noqa: PTH119
        if _PCI_ADDRESS.fullmatch(owner) and owner != address:
            raise _Refused(f"renderD{minor}, which the KFD names, belongs to {owner}")

    def _list_the_rest(self, devices: dict[str, _PciDevice], used: set[str]) -> None:
        """AMD GPUs of the PCI view that no KFD node led to (or whose nodes were all refused, which said why)."""
        spoken_for = {u.pci_address for u in self._unusable} | used
        for device in devices.values():
            if not device.is_amd_gpu or device.address in spoken_for:
                continue
            if device.driver != "amdgpu":
                reason = _driver_reason(device.driver)
            elif not self._topology:
                reason = "there is no KFD topology: amdgpu came up without compute (HSA) support"
            else:
                reason = "no KFD node belongs to it: the driver offers no compute on it"
            self._refuse(device.address, self._product_name(device, None), reason)

    # ---------------------------------------------------------------------------------------------- identities

    def _unique_ids(self, found: list[_Found], devices: dict[str, _PciDevice]) -> dict[str, int]:
        """Unique id of each found GPU by address, 0 where it has none or shares it with another GPU.

        The device file comes first: it names the board in every partition mode, where newer drivers give each KFD
        node of a partitioned GPU an id of its own. Such differing node ids name no GPU; taking the first would rename
        the GPU with each mode switch, so then it goes by its PCI address. A file that is there and cannot be read is
        another matter: a GPU under a second name is a second GPU to the book, free to be promised again. It is left
        out of the result, and so of the inventory.
        """
        own: dict[str, int] = {}
        unreadable = set()
        for address, device in devices.items():
            if not device.is_amd_gpu:
                continue
            raw = _read(f"{device.path}/unique_id")
            value = _hex(raw)
            if value is not None:
                own[address] = value
            elif _text(raw) or (isinstance(raw, OSError) and raw.errno != errno.ENOENT):
                unreadable.add(address)
        for item in found:
            if not own.get(item.address):
                said = {node["unique_id"] for node in item.nodes.values()}
                own[item.address] = said.pop() if len(said) == 1 else 0
        # Counted over unusable devices too: a twin that comes and goes must not rename the one that stays.
        shared = {value for value, count in Counter(own.values()).items() if value and count > 1}
        for value in sorted(shared):
            where = ", ".join(sorted(a for a, v in own.items() if v == value))
            self._warn(f"{where}: these GPUs share the unique id {value:016x}; they go by their PCI addresses")
        usable = (item.address for item in found if item.address not in unreadable)
        return {address: 0 if own[address] in shared else own[address] for address in usable}

    def _product_name(self, device: _PciDevice | None, gfx_target: str | None) -> str:
        if device is not None:
            if name := _label(_read(f"{device.path}/product_name")):
                return name
            known = None if device.device_id is None else self._names.find(device.device_id, device.revision)
            if known:
                return known
            if gfx_target is None:
                return "AMD device" if device.device_id is None else f"AMD device {device.device_id:#06x}"
        return fallback_name(gfx_target or "GPU")

    # -------------------------------------------------------------------------------------------- GPU, partition

    def _gpu(self, item: _Found, ids: dict[str, int], numa_of_cpu_node: dict[int, int]) -> Gpu:
        nodes = sorted(item.nodes.items())
        first = nodes[0][1]
        device = item.pci
        if item.address not in ids:
            raise _Refused("its unique_id cannot be read now; guessing another id would make it another GPU")
        unique_id = ids[item.address]
        gpu_id = GpuId(f"GPU-{unique_id:016x}" if unique_id else f"pci-{item.address.replace(':', '-')}")
        numa = self._numa_node(item, numa_of_cpu_node)

        partitions = []
        for index, node in nodes:
            try:
                partitions.append(self._partition(item, gpu_id, index, node, numa))
            except (_Refused, ValueError) as error:
                self._refuse(item.address, f"KFD node {node.number}", str(error))
        if not partitions:
            raise _Refused("none of its partitions can be used")

        device_id = device.device_id if device and device.device_id is not None else first["device_id"]
        whole_bytes = _number(_read(f"{device.path}/mem_info_vram_total")) if device else None
        gfx_target = partitions[0].gfx_target
        compute = self._mode(device, "current_compute_partition", len(partitions))
        return Gpu(
            id=gpu_id,
            index=0,  # the rank is known when all are
            pci_address=item.address,
            unique_id=unique_id,
            smi_uuid=smi_uuid(unique_id, device_id) if unique_id else None,
            device_id=device_id,
            revision=(device.revision if device else None) or 0,
            product_name=self._product_name(device, gfx_target),
            gfx_target=gfx_target,
            vram_bytes=whole_bytes or sum(p.vram_bytes for p in partitions),
            partitions=tuple(partitions),
            numa_node=numa,
            compute_partition=compute,
            memory_partition=self._mode(device, "current_memory_partition", len(partitions)),
            available_compute_partitions=self._modes(device, "available_compute_partition"),
            available_memory_partitions=self._modes(device, "available_memory_partition"),
            xgmi_hive_id=next((n["hive_id"] for _, n in nodes if n["hive_id"]), 0),
            profiles=self._profiles(device, compute, [p.layout.xcc_count for p in partitions]),
        )

    def _profiles(self, device: _PciDevice | None, compute: str | None, xccs: Sequence[int]) -> tuple[Profile, ...]:
        """What the driver can cut the GPU into. None where it has no such files, and for one mode only (a function of
        a virtual machine, whose host decides).

        Newer drivers describe the profile that ``xcp_config`` selects. The selector is read as it stands and never
        written: it is one for all readers, and a switch of ours must not be what somebody else's tool shows.
        """
        available = self._modes(device, "available_compute_partition")
        described = "compute_partition_config"
        available = available or self._modes(device, f"{described}/supported_xcp_configs")
        if device is None or len(available) < 2:
            return ()
        said = {}
        selected = self._mode_word(_text(_read(f"{device.path}/{described}/xcp_config")))
        if selected is not None:
            said[selected] = self._modes(device, f"{described}/supported_nps_configs")
        memory = self._modes(device, "available_memory_partition")
        return modes.profiles(available, memory, modes.total_xccs(compute, xccs, available), said)

    def _partition(self, item: _Found, gpu: GpuId, index: int, node: _KfdNode, numa: int | None) -> Partition:
        gfx_target, wgp = self._gfx_target(node)
        return Partition(
            id=PartitionId(f"{gpu}/{index}"),
            gpu=gpu,
            index=index,
            kfd_node=node.number,
            kfd_gpu_id=node.gpu_id,
            render_minor=node["drm_render_minor"],
            vram_bytes=self._vram_bytes(item, node),
            layout=self._layout(item, index, node, wgp),
            gfx_target=gfx_target,
            unique_id=node["unique_id"],
            numa_node=numa,
            links=self._links(node),
        )

    def _gfx_target(self, node: _KfdNode) -> tuple[str, bool]:
        """(gfx target, whether its CUs come in pairs)."""
        version = node["gfx_target_version"]
        if version:
            major, minor, step = version // 10000, version // 100 % 100, version % 100
            if not 7 <= major < 100 or minor > 15 or step > 15:
                raise _Refused(f"gfx_target_version {version} is no gfx target")
            return f"gfx{major}{minor:x}{step:x}", major >= 10
        if target := _GFX_OF_ASIC.get(_text(_read(f"{node.path}/name"))):
            return target, len(target) == len("gfx1010")
        self._warn(f"KFD node {node.number} does not say its gfx target")
        return "gfx", node["simd_per_cu"] == 2  # two SIMDs a CU is RDNA, four everything before and CDNA

    def _vram_bytes(self, item: _Found, node: _KfdNode) -> int:
        """What the KFD lets processes allocate on this node: its framebuffer heaps.

        On recent APUs that is more than ``mem_info_vram_total``: there the KFD hands out system memory beyond the
        carve-out. The heaps are what the runtime shows and takes from, so they are what a quota is a part of.
        """
        banks = self._bank_bytes(node)
        if banks:
            return banks
        # The device file is for the whole device: it answers for a partition only if that is the device.
        if item.pci is not None and len(item.nodes) == 1:
            total = _number(_read(f"{item.pci.path}/mem_info_vram_total"))
            if total:
                return total
        nominal = _NOMINAL.get(node["device_id"])
        if nominal and item.pci is None:
            # A capture without memory banks (and without PCI files, so never a machine) can still be planned on. Too
            # high or too low a figure could not hurt anybody there; on a machine it could, hence not on a machine.
            xccs, vram_bytes = nominal
            share = vram_bytes * max(1, node["num_xcc"]) // xccs
            self._warn(f"{item.address}: the tree holds no VRAM figure; {share >> 20} MiB a partition is nominal")
            return share
        raise _Refused("nothing says how much VRAM it has (no readable memory bank, no mem_info_vram_total)")

    def _bank_bytes(self, node: _KfdNode) -> int | None:
        total = 0
        for bank in _numbers_in(f"{node.path}/mem_banks"):
            raw = _read(f"{node.path}/mem_banks/{bank}/properties")
            said = {} if isinstance(raw, OSError) else _properties(raw)
            if b"heap_type" not in said or b"size_in_bytes" not in said:
                return None  # a sum without one of its banks is a wrong figure
            if said[b"heap_type"] in _FRAMEBUFFER_HEAPS:
                total += said[b"size_in_bytes"]
        return total if total <= _MAX_VRAM_BYTES else None

    def _layout(self, item: _Found, index: int, node: _KfdNode, wgp: bool) -> CuLayout:
        simds, per_cu = node["simd_count"], node["simd_per_cu"]
        arrays, per_engine = node["array_count"], node["simd_arrays_per_engine"]
        xccs = node.properties.get(b"num_xcc", 1)
        if min(per_cu, arrays, per_engine, xccs) < 1 or simds % per_cu or arrays % (per_engine * xccs):
            raise _Refused(
                f"torn: {simds} SIMDs of {per_cu} a CU, {arrays} arrays of {per_engine} an engine on {xccs} XCCs"
                " do not fit together"
            )
        engines = arrays // (per_engine * xccs)
        cus = simds // per_cu
        if engines > _MAX_ENGINES_PER_XCC or cus > 16 * arrays:
            raise _Refused(f"torn: {engines} engines an XCC and {cus} CUs in {arrays} arrays is no GPU's shape")
        active = None
        # gfx11 and gfx12 with more than four engines: the driver fills the cache entries from a bitmap that it reads
        # without the stride its own mask code uses, so the total is right and the share of each array is not.
        if not (wgp and engines > 4):
            active = self._active_from_caches(item, index, node, arrays, cus, wgp)
        return CuLayout(
            xcc_count=xccs,
            engines_per_xcc=engines,
            arrays_per_engine=per_engine,
            active=active or _even_split(cus, arrays, wgp),
            wgp=wgp,
            harvest_known=active is not None,
        )

    def _active_from_caches(
        self, item: _Found, index: int, node: _KfdNode, arrays: int, cus: int, wgp: bool
    ) -> tuple[int, ...] | None:
        """Active CUs of each array, from the vector caches: the driver lists one a CU, at the CU's own position.

        Positions count slots in mask-walk order (XCC, engine, array, CU), ``cu_per_simd_array`` slots to an array.
        Scalar and GL1 caches have the same type and level, and on gfx90a and gfx103x the same size too; what tells
        them apart is their number, which is less than the CUs', and that each kind is listed on its own, in order of
        position. So in one size class a new kind begins where positions stop growing.
        """
        folder = f"{node.path}/caches"
        entries = _numbers_in(folder)
        if not entries:
            return None
        runs: dict[int, list[list[int]]] = defaultdict(list)
        for entry in entries:
            raw = _read(f"{folder}/{entry}/properties")
            said = None if isinstance(raw, OSError) else _cache(raw)
            if said is not None:
                of_size = runs[said[1]]
                if not of_size or said[0] <= of_size[-1][-1]:
                    of_size.append([])
                of_size[-1].append(said[0])
        base, slots = node["simd_id_base"], node["cu_per_simd_array"]
        maps = set()
        for positions in (run for of_size in runs.values() for run in of_size):
            if len(positions) == cus and slots and positions[0] >= base and positions[-1] - base < arrays * slots:
                counts = Counter((position - base) // slots for position in positions)
                maps.add(tuple(counts[array] for array in range(arrays)))
        if len(maps) == 1:
            (active,) = maps
            if not (wgp and any(count % 2 for count in active)):
                return active
        self._warn(
            f"{item.address}/{index}: its cache entries do not account for its {cus} CUs; which CUs are fused off is"
            " unknown and an even split is assumed"
        )
        return None

    def _links(self, node: _KfdNode) -> tuple[Link, ...]:
        links = []
        for folder in ("io_links", "p2p_links"):
            for entry in _numbers_in(f"{node.path}/{folder}"):
                raw = _read(f"{node.path}/{folder}/{entry}/properties")
                said = {} if isinstance(raw, OSError) else _properties(raw)
                kind = _LINK_KINDS.get(said.get(b"type", 0))
                if kind is not None and b"node_to" in said:
                    links.append(Link(kind, said[b"node_to"], said.get(b"weight", 0)))
        return tuple(links)

    # ------------------------------------------------------------------------------------------ NUMA and modes

    def _numa_node(self, item: _Found, numa_of_cpu_node: dict[int, int]) -> int | None:
        """The PCI device's own word; -1 and no file are None, not node 0 (FR-47).

        Only where there are no PCI files at all does the nearest CPU node of the KFD answer. Asking it on a machine
        would answer 0 for every GPU of a box whose firmware says nothing, which is a guess dressed as a fact.
        """
        if item.pci is not None:
            text = _text(_read(f"{item.pci.path}/numa_node"))
            return int(text) if text.isascii() and text.isdigit() and len(text) <= 4 else None
        first = item.nodes[min(item.nodes)]
        near = [(link.weight, link.to_kfd_node) for link in self._links(first) if link.to_kfd_node in numa_of_cpu_node]
        return numa_of_cpu_node[min(near)[1]] if near else None

    def _numa_of_cpu_nodes(self, cpu_nodes: Iterable[_KfdNode]) -> dict[int, int]:
        """The KFD makes one CPU node for each NUMA node that is online, in order: by rank, not by number."""
        return {node.number: rank for rank, node in enumerate(cpu_nodes)}

    def _mode(self, device: _PciDevice | None, name: str, partition_count: int) -> str | None:
        """What cannot be read for a moment is what it was, while the GPU has as many partitions as then: a mode that
        came and went would make it another kind of GPU, and take it from those who count these."""
        if device is None:
            return None
        raw = _read(f"{device.path}/{name}")
        key = (device.address, name, partition_count)
        if isinstance(raw, OSError):
            if raw.errno == errno.ENOENT:  # Radeon boards have no such file
                return None
            last = self._read_modes.get(key)
            taken = f"; taken for {last}, as it was" if last else ""
            self._warn(f"{device.address}: {name} is unknown for now: {_why(raw)}{taken}")
            return last
        word = self._mode_word(_text(raw))
        if word is not None:
            self._read_modes[key] = word
        return word

    def _mode_word(self, text: str) -> str | None:
        return text.upper() if re.fullmatch(r"[A-Za-z0-9]{3,8}", text, re.ASCII) else None

    def _modes(self, device: _PciDevice | None, name: str) -> tuple[str, ...]:
        words = _text(_read(f"{device.path}/{name}")).upper().replace(",", " ").split() if device else []
        return tuple(w for w in words if re.fullmatch(r"[A-Z0-9]{3,8}", w, re.ASCII))


def fallback_name(gfx_target: str) -> str:
    """What a GPU is called when neither its board nor libdrm's table names it."""
    return f"AMD {gfx_target}"


def _driver_reason(driver: str | None) -> str:
    return "no driver is bound to it" if driver is None else f"its driver is {driver}, not amdgpu"


def _cache(raw: bytes) -> tuple[int, int] | None:
    """(processor_id_low, size) of a level-1 data cache of the SIMDs (type 9), else None.

    Read by position of the words, not as properties: there are thousands of these files, with a long map at the end.
    """
    low = size = level = kind = -1
    for line in raw.split(b"\n", 16):
        key, _, value = line.rstrip().partition(b" ")
        if key == b"processor_id_low":
            low = int(value) if value.isdigit() and len(value) <= 20 else -1
        elif key == b"level":
            level = 1 if value == b"1" else 0
        elif key == b"size":
            size = int(value) if value.isdigit() and len(value) <= 20 else -1
        elif key == b"type":
            kind = 9 if value == b"9" else 0
            break  # the rest is sibling_map
    return (low, size) if level == 1 and kind == 9 and low >= 0 and size >= 0 else None


def _even_split(cus: int, arrays: int, wgp: bool) -> tuple[int, ...]:
    """``cus`` over ``arrays``, whole WGPs where there are such, the odd ones in the first arrays."""
    unit = 2 if wgp and cus % 2 == 0 else 1
    each, more = divmod(cus // unit, arrays)
    return tuple(unit * (each + (n < more)) for n in range(arrays))
