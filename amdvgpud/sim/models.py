"""The GPUs that can be simulated: one table, and the text that picks from it (``2*mi300x,rx9070xt:vram=8GiB``).

Owns what a model *is*; :mod:`amdvgpud.sim.tree` turns it into sysfs, ``softkfd`` reads the figures that the tree writes
down for it. Values come from captures of real machines, amdgpu.ids and the driver's sources; each field that is a guess
is named in the model's ``unsourced`` and carries a question mark in ``amdvgpud sim models``. Pure: no I/O.

Grammar of a simulation::

    simulation = item {"," item}
    item       = [count "*"] model ["-" mode] {":" key "=" value}

``model-mode`` (``mi300x-cpx``) is short for ``model:mode=CPX``. A colon separates overrides because a comma separates
GPUs and neither a size nor a mode has a colon in it. Keys:

========== =====================================================================================================
vram       memory the KFD offers on the whole GPU, in any form of :mod:`amdvgpud.core.sizes` (``16GiB``)
bus        PCI bus number (``0xc5``); one GPU only, as two cannot share an address
domain     PCI domain (``1``)
unique_id  64-bit id (``0x1234``), 0 for none; one GPU only
harvest    active CUs of each shader array, with dots: of one XCC (``10.9.10.9``), or of all XCCs in a row
mode       compute partition mode, with its memory mode if not NPS1: ``CPX``, ``CPX/NPS4``
name       product name
========== =====================================================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from amdvgpud.core.errors import Invalid
from amdvgpud.core.sizes import human_size, parse_size

MIB: Final = 1024**2
GIB: Final = 1024**3
MAX_GPUS: Final = 64
"""GPUs in one simulation. The DRM minors (:mod:`amdvgpud.sim.tree`) run out no later than this."""

PAGE: Final = 4096
MIN_VRAM_BYTES: Final = 256 * MIB
"""Least memory of a partition. ROCr takes some 150 MiB for itself; with less than that no program would start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """Sizes in KiB of what the KFD lists as caches of a GPU node; 0: no such cache.

    L1 vector caches belong to one CU; instruction and scalar caches to two neighbours (a WGP on RDNA); ``gl1_kib`` to
    a shader array; L2 to an XCC; L3 to the whole node.
    """

    l1_kib: int
    l1i_kib: int
    scalar_kib: int
    gl1_kib: int = 0
    l2_kib: int
    l3_kib: int = 0
    line_bytes: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One kind of GPU. ``active`` holds the active CUs of each shader array, XCC-major, as in ``core.model.CuLayout``.

    ``modes`` maps each compute partition mode to the memory modes it may be combined with; empty: the GPU has no
    partition files at all. ``hive_size`` is how many of these GPUs xGMI joins into one hive (0: none).
    """

    name: str
    product: str
    device_id: int
    revision: int
    gfx_target_version: int
    """As the KFD prints it: major * 10000 + minor * 100 + stepping."""
    xcc_count: int = 1
    engines_per_xcc: int
    arrays_per_engine: int = 1
    max_cus_per_array: int
    cu_count: int
    vram_bytes: int
    """What the driver reports as mem_info_vram_total of the whole device."""
    kfd_memory_bytes: int | None = None
    """What the KFD offers, where that is not the VRAM: on an APU, a part of system memory."""
    modes: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    pci_class: int
    hive_size: int = 0
    apu: bool = False
    caches: Caches
    asic_name: str = "ip discovery"
    family: int
    """AMDGPU_FAMILY_* of amdgpu_drm.h."""
    vram_type: int
    """AMDGPU_VRAM_TYPE_* of amdgpu_drm.h."""
    vram_width_bits: int
    max_engine_mhz: int
    max_memory_mhz: int
    counter_khz: int = 100_000
    sdma_engines: int
    sdma_xgmi_engines: int = 0
    sdma_queues_per_engine: int
    cp_queues: int
    capability: int
    debug_prop: int
    fw_version: int
    sdma_fw_version: int
    unsourced: frozenset[str] = frozenset()
    """Fields whose value is a guess. It may be right; nothing public was found that says so."""

    @property
    def wgp(self) -> bool:
        """CUs come in pairs that share caches and mask bits (gfx10 and later)."""
        return self.gfx_target_version >= 100_000

    @property
    def gfx_target(self) -> str:
        """``gfx942``, ``gfx90a``: stepping is one hex digit."""
        major, rest = divmod(self.gfx_target_version, 10_000)
        minor, stepping = divmod(rest, 100)
        return f"gfx{major}{minor:x}{stepping:x}"

    @property
    def simd_per_cu(self) -> int:
        return 2 if self.wgp else 4

    @property
    def wave_front_size(self) -> int:
        return 32 if self.wgp else 64

    @property
    def waves_per_simd(self) -> int:
        return 16 if self.wgp else 8

    @property
    def arrays_per_xcc(self) -> int:
        return self.engines_per_xcc * self.arrays_per_engine

    @property
    def active(self) -> tuple[int, ...]:
        """The usual harvest: an even split within each XCC; the CUs left over go to other arrays in each XCC.

        Which arrays have one more differs from chip to chip; the shift by the XCC's number keeps a program honest that
        takes all XCCs to be alike.
        """
        step = 2 if self.wgp else 1
        units, n = self.cu_count // self.xcc_count // step, self.arrays_per_xcc
        base, rest = divmod(units, n)
        return tuple(step * (base + ((array - xcc) % n < rest)) for xcc in range(self.xcc_count) for array in range(n))


_FAMILY_AI: Final = 141
_FAMILY_GC_11_0_0: Final = 145
_FAMILY_GC_11_0_1: Final = 148
_FAMILY_GC_10_3_6: Final = 149
_FAMILY_GC_11_5_0: Final = 150
_FAMILY_GC_12_0_0: Final = 152
_HBM: Final = 6
_GDDR6: Final = 9
_DDR5: Final = 10
_LPDDR5: Final = 12


def _modes(**memory_modes: str) -> Mapping[str, tuple[str, ...]]:
    return MappingProxyType({mode: tuple(nps.split()) for mode, nps in memory_modes.items()})


_GUESSED_FIRMWARE: Final = frozenset({"fw_version", "sdma_fw_version", "debug_prop"})

_MI210: Final = Model(
    name="mi210",
    product="AMD Instinct MI210",
    device_id=0x740F,
    revision=0x02,
    gfx_target_version=90010,
    engines_per_xcc=8,
    max_cus_per_array=14,
    cu_count=104,
    vram_bytes=65520 * MIB,
    pci_class=0x038000,
    hive_size=4,
    caches=Caches(l1_kib=16, l1i_kib=32, scalar_kib=16, l2_kib=8192, line_bytes=64),
    asic_name="aldebaran",
    family=_FAMILY_AI,
    vram_type=_HBM,
    vram_width_bits=4096,
    max_engine_mhz=1700,
    max_memory_mhz=1600,
    sdma_engines=2,
    sdma_xgmi_engines=3,
    sdma_queues_per_engine=8,
    cp_queues=24,
    capability=746037888,
    debug_prop=470,
    fw_version=92,
    sdma_fw_version=9,
    unsourced=frozenset({"vram_bytes", "pci_class", "caches"}),
)
_MI300X: Final = Model(
    name="mi300x",
    product="AMD Instinct MI300X",
    device_id=0x74A1,
    revision=0x00,
    gfx_target_version=90402,
    xcc_count=8,
    engines_per_xcc=4,
    max_cus_per_array=10,
    cu_count=304,
    vram_bytes=196592 * MIB,
    modes=_modes(SPX="NPS1", DPX="NPS1 NPS2", QPX="NPS1 NPS4", CPX="NPS1 NPS4"),
    pci_class=0x120000,
    hive_size=8,
    caches=Caches(l1_kib=32, l1i_kib=64, scalar_kib=16, l2_kib=4096, l3_kib=262_144),
    family=_FAMILY_AI,
    vram_type=_HBM,
    vram_width_bits=8192,
    max_engine_mhz=2100,
    max_memory_mhz=1300,
    sdma_engines=2,
    sdma_xgmi_engines=14,
    sdma_queues_per_engine=8,
    cp_queues=24,
    capability=2893521536,
    debug_prop=1511,
    fw_version=177,
    sdma_fw_version=24,
    unsourced=frozenset({"pci_class", "sdma_xgmi_engines"}),
)
_RX7900XTX: Final = Model(
    name="rx7900xtx",
    product="AMD Radeon RX 7900 XTX",
    device_id=0x744C,
    revision=0xC8,
    gfx_target_version=110000,
    engines_per_xcc=6,
    arrays_per_engine=2,
    max_cus_per_array=8,
    cu_count=96,
    vram_bytes=24560 * MIB,
    pci_class=0x030000,
    caches=Caches(l1_kib=32, l1i_kib=32, scalar_kib=16, gl1_kib=256, l2_kib=6144, l3_kib=98_304),
    family=_FAMILY_GC_11_0_0,
    vram_type=_GDDR6,
    vram_width_bits=384,
    max_engine_mhz=2482,
    max_memory_mhz=1249,
    sdma_engines=2,
    sdma_queues_per_engine=6,
    cp_queues=8,
    capability=0x2807A280,
    debug_prop=1495,
    fw_version=67,
    sdma_fw_version=23,
    unsourced=frozenset({"vram_bytes", "caches"}) | _GUESSED_FIRMWARE,
)
_RX9070XT: Final = replace(
    _RX7900XTX,
    name="rx9070xt",
    product="AMD Radeon RX 9070 XT",
    device_id=0x7550,
    revision=0xC0,
    gfx_target_version=120001,
    engines_per_xcc=4,
    cu_count=64,
    vram_bytes=16304 * MIB,
    caches=Caches(l1_kib=32, l1i_kib=32, scalar_kib=16, l2_kib=8192, l3_kib=65_536),
    family=_FAMILY_GC_12_0_0,
    vram_width_bits=256,
    max_engine_mhz=2970,
    max_memory_mhz=1258,
    sdma_queues_per_engine=8,
    unsourced=frozenset({"vram_bytes", "caches", "capability"}) | _GUESSED_FIRMWARE,
)
_PHOENIX: Final = replace(
    _RX7900XTX,
    name="phoenix",
    product="AMD Radeon 780M",
    device_id=0x15BF,
    revision=0xC1,
    gfx_target_version=110003,
    engines_per_xcc=1,
    max_cus_per_array=6,
    cu_count=12,
    vram_bytes=4096 * MIB,
    kfd_memory_bytes=31433977856,
    apu=True,
    caches=Caches(l1_kib=32, l1i_kib=32, scalar_kib=16, gl1_kib=256, l2_kib=2048),
    family=_FAMILY_GC_11_0_1,
    vram_type=_LPDDR5,
    vram_width_bits=128,
    max_engine_mhz=2700,
    max_memory_mhz=800,
    sdma_engines=1,
    capability=709075584,
    unsourced=frozenset({"revision"}),
)
"""Captured whole, so its figures are the ones that the other APUs borrow."""

_TABLE: Final = (
    _MI210,
    replace(
        _MI210,
        # One of the two GCDs of a board: to the kernel they are two GPUs.
        name="mi250x",
        product="AMD Instinct MI250X",
        device_id=0x7408,
        revision=0x00,
        cu_count=110,
        hive_size=8,
        unsourced=frozenset({"max_cus_per_array", "cu_count", "pci_class", "caches", "hive_size", "sdma_xgmi_engines"})
        | _GUESSED_FIRMWARE,
    ),
    replace(
        _MI300X,
        name="mi300a",
        product="AMD Instinct MI300A",
        device_id=0x74A0,
        xcc_count=6,
        cu_count=228,
        vram_bytes=131072 * MIB,
        modes=_modes(SPX="NPS1", TPX="NPS1 NPS4", CPX="NPS1 NPS4"),
        hive_size=4,
        sdma_xgmi_engines=10,
        unsourced=frozenset({"max_cus_per_array", "pci_class", "modes", "hive_size", "sdma_xgmi_engines"})
        | _GUESSED_FIRMWARE,
    ),
    _MI300X,
    replace(
        _MI300X,
        name="mi300x-vf",
        product="AMD Instinct MI300X VF",
        device_id=0x74B5,
        vram_bytes=196608 * MIB,
        modes=_modes(SPX="NPS1"),
        unsourced=frozenset({"pci_class", "modes", "hive_size", "sdma_xgmi_engines"}) | _GUESSED_FIRMWARE,
    ),
    replace(
        _MI300X,
        name="mi308x",
        product="AMD Instinct MI308X",
        device_id=0x74A2,
        xcc_count=4,
        cu_count=80,
        vram_bytes=196608 * MIB,
        modes=_modes(SPX="NPS1", DPX="NPS1 NPS2", CPX="NPS1 NPS4"),
        max_engine_mhz=1420,
        sdma_xgmi_engines=6,
        capability=746037888,
        fw_version=149,
        sdma_fw_version=19,
        unsourced=frozenset({"pci_class", "modes", "sdma_xgmi_engines"}),
    ),
    replace(
        _MI300X,
        name="mi325x",
        product="AMD Instinct MI325X",
        device_id=0x74A5,
        vram_bytes=262144 * MIB,
        max_memory_mhz=1500,
        unsourced=frozenset({"vram_bytes", "max_cus_per_array", "pci_class", "max_memory_mhz", "sdma_xgmi_engines"})
        | {"modes"}
        | _GUESSED_FIRMWARE,
    ),
    replace(
        _MI300X,
        name="mi355x",
        product="AMD Instinct MI355X",
        device_id=0x75A3,
        gfx_target_version=90500,
        max_cus_per_array=9,
        cu_count=256,
        vram_bytes=294912 * MIB,
        modes=_modes(SPX="NPS1", DPX="NPS1 NPS2", QPX="NPS1", CPX="NPS1"),
        max_engine_mhz=2400,
        max_memory_mhz=2000,
        unsourced=frozenset({"vram_bytes", "max_cus_per_array", "pci_class", "caches", "max_engine_mhz"})
        | {"max_memory_mhz", "sdma_xgmi_engines", "capability"}
        | _GUESSED_FIRMWARE,
    ),
    _RX7900XTX,
    replace(
        _RX7900XTX,
        name="w7900",
        product="AMD Radeon PRO W7900",
        device_id=0x7448,
        revision=0x00,
        vram_bytes=49136 * MIB,
        max_engine_mhz=2495,
        max_memory_mhz=1124,
        unsourced=frozenset({"revision", "engines_per_xcc", "max_cus_per_array", "cu_count", "vram_bytes"})
        | {"pci_class", "max_engine_mhz", "max_memory_mhz", "caches"}
        | _GUESSED_FIRMWARE,
    ),
    replace(
        _RX9070XT,
        name="rx9060xt",
        product="AMD Radeon RX 9060 XT",
        device_id=0x7590,
        gfx_target_version=120000,
        engines_per_xcc=2,
        cu_count=32,
        vram_width_bits=128,
        max_engine_mhz=3130,
        unsourced=frozenset({"engines_per_xcc", "max_cus_per_array", "vram_bytes", "pci_class", "max_engine_mhz"})
        | {"max_memory_mhz", "vram_width_bits", "caches", "capability"}
        | _GUESSED_FIRMWARE,
    ),
    _RX9070XT,
    replace(
        _PHOENIX,
        name="raphael",
        product="AMD Radeon 610M",
        device_id=0x164E,
        revision=0xD8,
        gfx_target_version=100306,
        arrays_per_engine=1,
        max_cus_per_array=2,
        cu_count=2,
        vram_bytes=512 * MIB,
        kfd_memory_bytes=16 * GIB,
        caches=Caches(l1_kib=16, l1i_kib=32, scalar_kib=16, gl1_kib=128, l2_kib=256),
        family=_FAMILY_GC_10_3_6,
        vram_type=_DDR5,
        max_engine_mhz=2200,
        max_memory_mhz=2400,
        unsourced=frozenset({"max_cus_per_array", "vram_bytes", "kfd_memory_bytes", "pci_class", "caches"})
        | {"max_engine_mhz", "max_memory_mhz", "vram_width_bits", "sdma_engines", "capability"}
        | _GUESSED_FIRMWARE,
    ),
    replace(
        _PHOENIX,
        name="strixhalo",
        product="AMD Radeon 8060S",
        device_id=0x1586,
        gfx_target_version=110501,
        engines_per_xcc=2,
        max_cus_per_array=10,
        cu_count=40,
        vram_bytes=512 * MIB,
        kfd_memory_bytes=64 * GIB,
        family=_FAMILY_GC_11_5_0,
        vram_width_bits=256,
        max_engine_mhz=2900,
        max_memory_mhz=1000,
        unsourced=frozenset({"max_cus_per_array", "vram_bytes", "kfd_memory_bytes", "pci_class", "caches"})
        | {"max_engine_mhz", "max_memory_mhz", "sdma_engines", "capability"}
        | _GUESSED_FIRMWARE,
    ),
    _PHOENIX,
)
MODELS: Final[Mapping[str, Model]] = MappingProxyType({m.name: m for m in _TABLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class SimGpu:
    """One simulated GPU: a model with what the simulation's text says of this one."""

    model: Model
    product: str
    memory_bytes: int
    """What the KFD offers on the whole GPU, over all its partitions."""
    domain: int
    bus: int
    unique_id: int
    active: tuple[int, ...]
    mode: str
    memory_mode: str

    @property
    def pci_address(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:00.0"

    @property
    def partition_count(self) -> int:
        """Partitions the mode makes; the tree may have fewer where the DRM minors run out."""
        return _partitions(self.mode, self.model.xcc_count)

    @property
    def xccs_per_partition(self) -> int:
        return self.model.xcc_count // self.partition_count

    @property
    def partition_memory_bytes(self) -> int:
        return self.memory_bytes // self.partition_count // PAGE * PAGE

    @property
    def vram_bytes(self) -> int:
        """mem_info_vram_total: of an APU the carve-out, which is not what the KFD offers."""
        return self.model.vram_bytes if self.model.apu else self.memory_bytes

    def active_in(self, partition: int) -> tuple[int, ...]:
        """Active CUs of each shader array of partition ``partition``, XCC-major."""
        n = self.xccs_per_partition * self.model.arrays_per_xcc
        return self.active[partition * n : (partition + 1) * n]


@dataclass(frozen=True, slots=True)
class Simulation:
    """A machine to simulate: its GPUs in the order in which the driver finds them, which is KFD order."""

    text: str
    gpus: tuple[SimGpu, ...]


def parse_simulation(text: str) -> Simulation:
    """The machine that ``text`` names (grammar above). ``Invalid`` names the value, the reason and what exists."""
    gpus: list[SimGpu] = []
    for item in text.split(","):
        gpus += _parse_item(item.strip(), len(gpus))
        if len(gpus) > MAX_GPUS:
            raise _bad(f"{text!r} asks for more than {MAX_GPUS} GPUs, and no machine has minors for so many")
    addresses = [g.pci_address for g in gpus]
    if twice := {a for a in addresses if addresses.count(a) > 1}:
        raise _bad(f"two GPUs of {text!r} are at PCI address {min(twice)}: give one of them another bus= or domain=")
    return Simulation(text, tuple(gpus))


def _bad(detail: str) -> Invalid:
    return Invalid.field("/simulate", detail)


_ITEM: Final = re.compile(r"(?:(\d+)\s*\*\s*)?([a-z0-9-]+)((?::[^:]*)*)", re.ASCII | re.IGNORECASE)
_MODES_BY_COUNT: Final = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4}


def _partitions(mode: str, xcc_count: int) -> int:
    """CPX makes one partition an XCC; the others say their number in the first letter."""
    return _MODES_BY_COUNT.get(mode, xcc_count)


def _parse_item(item: str, first: int) -> list[SimGpu]:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise _bad(f"{item!r} is no GPU: write a model, as in 'mi300x', '2*mi300x' or 'mi300x:vram=16GiB:mode=CPX'")
    count = int(match[1] or 1)
    if not 1 <= count <= MAX_GPUS:
        raise _bad(f"{item!r}: {count} GPUs is out of range: 1 to {MAX_GPUS}")
    model, values = _find_model(match[2].lower())
    for pair in filter(None, match[3].split(":")):
        key, equals, value = pair.partition("=")
        key = key.strip().lower()
        if not equals or key not in _OVERRIDES:
            raise _bad(f"{pair!r} in {item!r} is no override: known are {', '.join(f'{k}=' for k in _OVERRIDES)}")
        if key in values:
            raise _bad(f"{key}= is given twice in {item!r}")
        if key in _ONE_GPU_ONLY and count > 1:
            raise _bad(f"{key}= in {item!r} names one GPU, but there are {count}: write each of them as an item")
        values[key] = value.strip()
    return [_make_gpu(model, values, first + i) for i in range(count)]


def _find_model(name: str) -> tuple[Model, dict[str, str]]:
    """The model of ``name`` and what its suffix says (``mi300x-cpx`` is ``mi300x`` with ``mode=CPX``)."""
    if name in MODELS:
        return MODELS[name], {}
    base, dash, mode = name.rpartition("-")
    if dash and base in MODELS and mode.upper() in MODELS[base].modes:
        return MODELS[base], {"mode": mode}
    raise _bad(f"there is no model {name!r}; known are {', '.join(MODELS)} (with -<mode> where it has partition modes)")


def _whole_number(key: str, value: str, highest: int) -> int:
    try:
        number = int(value, 0)
    except ValueError:
        raise _bad(f"{key}={value} is no whole number (decimal, or hex with 0x)") from None
    if not 0 <= number <= highest:
        raise _bad(f"{key}={value} is out of range: 0 to {highest:#x}")
    return number


def _parse_mode(model: Model, value: str) -> tuple[str, str]:
    mode, _, memory = value.upper().partition("/")
    if mode not in model.modes:
        known = ", ".join(model.modes) or "none, it cannot be partitioned"
        raise _bad(f"mode={value}: the modes of {model.name} are {known}")
    memory = memory or "NPS1"
    if memory not in model.modes[mode]:
        raise _bad(f"mode={value}: {mode} of {model.name} goes with {', '.join(model.modes[mode])}")
    return mode, memory


def _parse_harvest(model: Model, value: str) -> tuple[int, ...]:
    counts = tuple(_whole_number("harvest", c, model.max_cus_per_array) for c in value.split("."))
    per_xcc, total = model.arrays_per_xcc, model.arrays_per_xcc * model.xcc_count
    if len(counts) == per_xcc:
        counts *= model.xcc_count
    if len(counts) != total:
        raise _bad(
            f"harvest={value} has {len(counts)} counts: {model.name} has {per_xcc} shader arrays in each of "
            f"{model.xcc_count} XCCs; give {per_xcc} or {total} counts with dots between them"
        )
    if not all(sum(counts[i : i + per_xcc]) for i in range(0, total, per_xcc)):
        raise _bad(f"harvest={value} leaves an XCC of {model.name} without a CU")
    if model.wgp and any(c % 2 for c in counts):
        raise _bad(f"harvest={value} splits a WGP: the CUs of {model.name} come in pairs")
    return counts


def _parse_name(value: str) -> str:
    if not value or not value.isprintable():
        raise _bad(f"name={value!r} is no product name: at least one printable character")
    return value


_OVERRIDES: Final[Mapping[str, Callable[[Model, str], Any]]] = MappingProxyType(
    {
        "vram": lambda _model, v: parse_size(v, "/simulate/vram"),
        "bus": lambda _model, v: _whole_number("bus", v, 0xFF),
        "domain": lambda _model, v: _whole_number("domain", v, 0xFFFF),
        "unique_id": lambda _model, v: _whole_number("unique_id", v, 2**64 - 1),
        "harvest": _parse_harvest,
        "mode": _parse_mode,
        "name": lambda _model, v: _parse_name(v),
    }
)
_ONE_GPU_ONLY: Final = frozenset({"bus", "unique_id"})


def _default_bus(index: int) -> int:
    """Buses as a server has them, far apart and not from zero, so that nobody takes a bus for an index."""
    return 0x05 + 0x20 * (index % 8) + 4 * (index // 8)


def _make_gpu(model: Model, values: Mapping[str, str], index: int) -> SimGpu:
    given = {key: _OVERRIDES[key](model, value) for key, value in values.items()}
    mode, memory_mode = given.get("mode", ("SPX", "NPS1"))
    gpu = SimGpu(
        model=model,
        product=given.get("name", model.product),
        memory_bytes=given.get("vram", model.kfd_memory_bytes or model.vram_bytes),
        domain=given.get("domain", 0),
        bus=given.get("bus", _default_bus(index)),
        # An APU has no unique id: two of them must be told apart by something else, which is worth simulating.
        unique_id=given.get("unique_id", 0 if model.apu else 0xA1B2C3D4E5F60000 + 0x1111 * (index + 1)),
        active=given.get("harvest", model.active),
        mode=mode,
        memory_mode=memory_mode,
    )
    if gpu.partition_memory_bytes < MIN_VRAM_BYTES:
        raise _bad(
            f"vram={values.get('vram')} leaves {human_size(gpu.partition_memory_bytes)} for each of "
            f"{gpu.partition_count} partitions of {model.name}: at least {human_size(MIN_VRAM_BYTES)}, "
            "or no ROCm program would start"
        )
    return gpu


_SHOWN: Final = frozenset(
    {"device_id", "revision", "cu_count", "engines_per_xcc", "max_cus_per_array", "vram_bytes", "kfd_memory_bytes"}
    | {"modes", "pci_class"}
)
"""Fields that have a column of their own, where their question mark stands."""


def table_rows() -> list[dict[str, str]]:
    """The table for people, one row a model, columns in order; a value that is a guess ends in a question mark."""

    def shown(model: Model, text: str, *fields: str) -> str:
        return text + "?" if model.unsourced.intersection(fields) else text

    return [
        {
            "model": m.name,
            "product": m.product,
            "pci id": shown(m, f"{m.device_id:04x}:{m.revision:02x}", "device_id", "revision"),
            "gfx": m.gfx_target,
            "CUs": shown(m, str(m.cu_count), "cu_count"),
            "XCC x SE x SH x CU": shown(
                m,
                f"{m.xcc_count}x{m.engines_per_xcc}x{m.arrays_per_engine}x{m.max_cus_per_array}",
                "engines_per_xcc",
                "max_cus_per_array",
            ),
            "VRAM": shown(m, human_size(m.vram_bytes), "vram_bytes"),
            "KFD memory": shown(m, human_size(m.kfd_memory_bytes), "kfd_memory_bytes") if m.kfd_memory_bytes else "",
            "modes": shown(m, " ".join(f"{mode}/{'+'.join(nps)}" for mode, nps in m.modes.items()) or "-", "modes"),
            "WGP": "yes" if m.wgp else "no",
            "PCI class": shown(m, f"{m.pci_class:#08x}", "pci_class"),
            "other guesses": ", ".join(sorted(m.unsourced - _SHOWN)),
        }
        for m in MODELS.values()
    ]
