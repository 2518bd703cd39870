"""Layouts of known GPUs and ways to make inventories and books of them, for all tests of core."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from amdvgpud.core.compute import parse_compute
from amdvgpud.core.model import (
    Book,
    CuLayout,
    Gpu,
    GpuId,
    Inventory,
    Partition,
    PartitionId,
    Request,
    Share,
    Slice,
    SliceName,
    Spread,
)

GIB = 1024**3

# name: XCCs, engines, arrays, active CUs of each array of one XCC, WGPs (facts: the table of GPUs)
_MODELS: dict[str, tuple[int, int, int, tuple[int, ...], bool]] = {
    "MI210": (1, 8, 1, (13,) * 8, False),
    "MI250X": (1, 8, 1, (14,) * 6 + (13,) * 2, False),
    "MI300A": (6, 4, 1, (10, 10, 9, 9), False),
    "MI300X": (8, 4, 1, (10, 10, 9, 9), False),
    "MI300X CPX": (1, 4, 1, (10, 10, 9, 9), False),
    "MI308X": (4, 4, 1, (5,) * 4, False),
    "MI355X": (8, 4, 1, (8,) * 4, False),
    "RX 7900 XTX": (1, 6, 2, (8,) * 12, True),
    "RX 9060 XT": (1, 2, 2, (8,) * 4, True),
    "RX 9070 XT": (1, 4, 2, (8,) * 8, True),
    "Raphael": (1, 1, 1, (2,), True),
    "Strix Halo": (1, 2, 2, (10,) * 4, True),
}

LayoutOf = Callable[[str], CuLayout]
MakeInventory = Callable[..., Inventory]
Ask = Callable[..., Request]
Grant = Callable[[Book, Request, Iterable[Share]], Book]


@pytest.fixture(scope="session")
def layout_of() -> LayoutOf:
    def layout(model: str) -> CuLayout:
        xccs, engines, arrays, active, wgp = _MODELS[model]
        return CuLayout(xccs, engines, arrays, active * xccs, wgp)

    return layout


@pytest.fixture(scope="session")
def make_inventory() -> MakeInventory:
    """An Inventory of one GPU for each layout, its unique id 1, 2, …, KFD nodes from 1 on, partitions alike."""

    def inventory(
        *layouts: CuLayout, vram_bytes: int = 192 * GIB, partitions: int = 1, unique: bool = True
    ) -> Inventory:
        gpus = []
        node = 1
        for i, layout in enumerate(layouts):
            gpu = GpuId(f"GPU-{i + 1:016x}")
            parts = []
            for index in range(partitions):
                parts.append(
                    Partition(
                        id=PartitionId(f"{gpu}/{index}"),
                        gpu=gpu,
                        index=index,
                        kfd_node=node,
                        kfd_gpu_id=1000 + node,
                        render_minor=127 + node,
                        vram_bytes=vram_bytes,
                        layout=layout,
                        gfx_target="gfx942",
                        unique_id=i + 1 if unique else 0,
                    )
                )
                node += 1
            gpus.append(
                Gpu(
                    id=gpu,
                    index=i,
                    pci_address=f"0000:{0x83 + i:02x}:00.0",
                    unique_id=i + 1,
                    smi_uuid=None,
                    device_id=0x74A1,
                    revision=0,
                    product_name="a GPU",
                    gfx_target="gfx942",
                    vram_bytes=vram_bytes * partitions,
                    partitions=tuple(parts),
                )
            )
        return Inventory(tuple(gpus))

    return inventory


@pytest.fixture(scope="session")
def ask() -> Ask:
    def request(
        name: str,
        compute: str = "100%",
        policy: str = "balanced",
        *,
        vram_bytes: int | None = GIB,
        gpus: int = 1,
        on: tuple[str, ...] = (),
        spread: Spread = Spread.BINPACK,
    ) -> Request:
        return Request(SliceName(name), parse_compute(compute, policy), vram_bytes, gpus, on, spread)

    return request


@pytest.fixture(scope="session")
def grant() -> Grant:
    """The Book after a Plan's shares were granted."""

    def after(book: Book, request: Request, shares: Iterable[Share]) -> Book:
        return book.with_slice(Slice(request.name, request, tuple(shares), created_s=0.0, revision=book.revision + 1))

    return after
