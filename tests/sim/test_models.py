"""The table of models and the text that picks from it."""

from __future__ import annotations

import pytest

from amdvgpud.core.errors import Invalid
from amdvgpud.sim.models import MODELS, Model, parse_simulation, table_rows

GIB = 1024**3

# CUs, XCCs x engines x arrays x most CUs an array, gfx target, SIMDs a KFD shows: the table of the facts, by hand.
SHAPES = {
    "mi210": (104, (1, 8, 1, 14), "gfx90a", 416),
    "mi250x": (110, (1, 8, 1, 14), "gfx90a", 440),
    "mi300a": (228, (6, 4, 1, 10), "gfx942", 912),
    "mi300x": (304, (8, 4, 1, 10), "gfx942", 1216),
    "mi300x-vf": (304, (8, 4, 1, 10), "gfx942", 1216),
    "mi308x": (80, (4, 4, 1, 10), "gfx942", 320),
    "mi325x": (304, (8, 4, 1, 10), "gfx942", 1216),
    "mi355x": (256, (8, 4, 1, 9), "gfx950", 1024),
    "rx7900xtx": (96, (1, 6, 2, 8), "gfx1100", 192),
    "w7900": (96, (1, 6, 2, 8), "gfx1100", 192),
    "rx9060xt": (32, (1, 2, 2, 8), "gfx1200", 64),
    "rx9070xt": (64, (1, 4, 2, 8), "gfx1201", 128),
    "raphael": (2, (1, 1, 1, 2), "gfx1036", 4),
    "strixhalo": (40, (1, 2, 2, 10), "gfx1151", 80),
    "phoenix": (12, (1, 1, 2, 6), "gfx1103", 24),
}


def test_every_model_has_the_shape_of_the_published_table() -> None:
    shapes = {
        m.name: (
            m.cu_count,
            (m.xcc_count, m.engines_per_xcc, m.arrays_per_engine, m.max_cus_per_array),
            m.gfx_target,
            m.cu_count * m.simd_per_cu,
        )
        for m in MODELS.values()
    }
    assert shapes == SHAPES


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda m: m.name)
def test_the_usual_harvest_adds_up_and_fits(model: Model) -> None:
    per_xcc = model.arrays_per_xcc
    xccs = [model.active[i : i + per_xcc] for i in range(0, len(model.active), per_xcc)]
    assert {sum(xcc) for xcc in xccs} == {model.cu_count // model.xcc_count}
    assert len(xccs) == model.xcc_count
    assert max(model.active) <= model.max_cus_per_array
    assert not model.wgp or all(active % 2 == 0 for active in model.active)


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda m: m.name)
def test_a_guess_is_named_after_a_field_that_exists(model: Model) -> None:
    assert model.unsourced <= {f for f in dir(model) if not f.startswith("_")}


def test_xccs_of_a_harvested_gpu_are_not_all_alike() -> None:
    active = MODELS["mi300x"].active
    assert active[:4] != active[4:8]


def test_the_table_for_people_marks_guesses() -> None:
    rows = {row["model"]: row for row in table_rows()}
    assert list(rows) == list(MODELS)
    assert rows["mi300x"]["VRAM"] == "192 GiB"
    assert rows["mi325x"]["VRAM"] == "256 GiB?"
    assert rows["mi210"]["PCI class"] == "0x038000?"
    assert rows["rx9070xt"]["pci id"] == "7550:c0"
    assert len({tuple(row) for row in rows.values()}) == 1


def test_a_count_repeats_a_model_at_addresses_of_their_own() -> None:
    simulation = parse_simulation("2*mi300x, rx9070xt")
    assert [(g.model.name, g.pci_address, f"{g.unique_id:x}") for g in simulation.gpus] == [
        ("mi300x", "0000:05:00.0", "a1b2c3d4e5f61111"),
        ("mi300x", "0000:25:00.0", "a1b2c3d4e5f62222"),
        ("rx9070xt", "0000:45:00.0", "a1b2c3d4e5f63333"),
    ]


def test_equal_texts_are_equal_simulations() -> None:
    assert parse_simulation("2*mi300x:vram=8GiB") == parse_simulation("2*mi300x:vram=8GiB")


def test_overrides_replace_what_the_model_says() -> None:
    [gpu] = parse_simulation("MI300X:vram=16GiB:bus=0xc5:domain=1:unique_id=0:mode=cpx/nps4:name=My GPU").gpus
    assert (gpu.pci_address, gpu.unique_id, gpu.mode, gpu.memory_mode, gpu.product) == (
        "0001:c5:00.0",
        0,
        "CPX",
        "NPS4",
        "My GPU",
    )
    assert (gpu.memory_bytes, gpu.partition_count, gpu.partition_memory_bytes) == (16 * GIB, 8, 2 * GIB)


def test_a_mode_may_be_written_behind_the_model() -> None:
    assert parse_simulation("mi300x-cpx").gpus == parse_simulation("mi300x:mode=CPX").gpus
    assert parse_simulation("mi300x-vf").gpus[0].model.name == "mi300x-vf"


@pytest.mark.parametrize(
    ("text", "partitions", "xccs", "bytes_each"),
    [
        ("mi300x-dpx", 2, 4, 196592 // 2 * 1024**2),
        ("mi300x-qpx", 4, 2, 196592 // 4 * 1024**2),
        ("mi300a-tpx", 3, 2, 131072 * 1024**2 // 3 // 4096 * 4096),
        ("mi308x-cpx", 4, 1, 51539607552),
        ("rx9070xt", 1, 1, 16304 * 1024**2),
    ],
)
def test_a_mode_cuts_xccs_and_memory(text: str, partitions: int, xccs: int, bytes_each: int) -> None:
    [gpu] = parse_simulation(text).gpus
    assert (gpu.partition_count, gpu.xccs_per_partition, gpu.partition_memory_bytes) == (partitions, xccs, bytes_each)


def test_harvest_is_given_for_one_xcc_or_for_all() -> None:
    [gpu] = parse_simulation("mi308x:harvest=5.5.6.4").gpus
    assert gpu.active == (5, 5, 6, 4) * 4
    [gpu] = parse_simulation("mi308x:harvest=1.2.3.4.5.6.7.8.9.10.1.2.3.4.5.6").gpus
    assert gpu.active == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4, 5, 6)


def test_an_apu_has_a_carve_out_no_unique_id_and_memory_of_the_host() -> None:
    [gpu] = parse_simulation("phoenix").gpus
    assert (gpu.vram_bytes, gpu.memory_bytes, gpu.unique_id) == (4 * GIB, 31433977856, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is no GPU"),
        ("mi300x,", "'' is no GPU"),
        ("mi9000", "there is no model 'mi9000'; known are mi210, mi250x"),
        ("mi210-cpx", "there is no model 'mi210-cpx'"),
        ("0*mi210", "0 GPUs is out of range: 1 to 64"),
        ("65*mi210", "65 GPUs is out of range"),
        ("40*mi210,40*mi210", "more than 64 GPUs"),
        ("mi210:colour=red", "'colour=red' in 'mi210:colour=red' is no override: known are vram=, bus="),
        ("mi210:vram", "'vram' in 'mi210:vram' is no override"),
        ("mi210:vram=1GiB:vram=2GiB", "vram= is given twice"),
        ("mi210:vram=lots", "'lots' is no size"),
        ("mi210:vram=100MiB", "leaves 100 MiB for each of 1 partitions of mi210: at least 256 MiB"),
        ("mi300x-cpx:vram=1GiB", "leaves 128 MiB for each of 8 partitions"),
        ("2*mi210:bus=7", "bus= in '2*mi210:bus=7' names one GPU, but there are 2"),
        ("2*mi210:unique_id=7", "unique_id= in '2*mi210:unique_id=7' names one GPU"),
        ("mi210:bus=256", "bus=256 is out of range: 0 to 0xff"),
        ("mi210:bus=c5", "bus=c5 is no whole number"),
        ("mi210,mi210:bus=5", "two GPUs of 'mi210,mi210:bus=5' are at PCI address 0000:05:00.0"),
        ("mi210:mode=CPX", "the modes of mi210 are none, it cannot be partitioned"),
        ("mi300x:mode=TPX", "the modes of mi300x are SPX, DPX, QPX, CPX"),
        ("mi300x:mode=CPX/NPS2", "CPX of mi300x goes with NPS1, NPS4"),
        ("mi300x-cpx:mode=SPX", "mode= is given twice"),
        ("mi300x:harvest=9.9", "has 2 counts: mi300x has 4 shader arrays in each of 8 XCCs; give 4 or 32 counts"),
        ("mi300x:harvest=11.9.9.9", "harvest=11 is out of range: 0 to 0xa"),
        ("mi300x:harvest=0.0.0.0", "leaves an XCC of mi300x without a CU"),
        ("rx9070xt:harvest=7.8.8.8.8.8.8.8", "splits a WGP"),
        ("mi210:name=", "name='' is no product name"),
    ],
)
def test_a_bad_text_is_refused_in_words_that_help(text: str, says: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_simulation(text)
    assert says in str(refused.value)
