"""HAMi's texts, read and written; golden/hami_register.json was made by Go (hami_register.go beside it says how)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amdvgpud.core import hami, plan
from amdvgpud.core.errors import Invalid, NoRoom, NotFound
from amdvgpud.core.hami import Grant, Lock, Mode, Offer, Wish
from amdvgpud.core.health import Condition, Health
from amdvgpud.core.model import (
    Book,
    Compute,
    ComputePolicy,
    CuLayout,
    CuSet,
    Gpu,
    Inventory,
    PartitionId,
    Priority,
    Request,
    Slice,
    SliceName,
)
from tests.fakes import GIB, a_gpu, an_inventory, in_mode

GOLDEN = Path(__file__).parent / "golden"
UID = "0b7f4a52-3c1e-4f0d-9a66-1f2e3d4c5b6a"
ONE, TWO = an_inventory().gpus
WGPS = CuLayout(1, 4, 2, (8,) * 8, wgp=True)
A = Grant("A", "AMD Instinct MI300X VF", 16384, 76)
B = Grant("B", "T", 1, 2)


def offers(inventory: Inventory, book: Book = Book(), mode: Mode = Mode.CU, splits: int = 0) -> tuple[Offer, ...]:  # noqa: B008
    return hami.offers(inventory, book, {}, mode=mode, splits=splits)


def with_slices(inventory: Inventory, *asked: Request, book: Book | None = None) -> Book:
    book = book or Book()
    for request in asked:
        shares = plan.place(book, inventory, request, {}).shares
        book = book.with_slice(Slice(request.name, request, shares, 0.0, 1))
    return book


def exact(name: str, cus: int, vram_bytes: int = GIB) -> Request:
    return Request(SliceName(name), Compute(ComputePolicy.EXACT, cu_count=cus), vram_bytes)


# ----------------------------------------------------------------------------------------------------- registration


def test_a_registration_has_the_bytes_that_go_makes_of_it() -> None:
    plain = Offer(
        id="8eff74b5-0000-1000-801b-b56457addd1b",
        index=0,
        count=10,
        devmem=196288,
        devcore=304,
        type="AMD Instinct MI300X VF",
        numa=0,
        mode="",
        health=True,
        custominfo={"pciBDF": "0000:83:00.0"},
        partition=PartitionId("a/0"),
    )
    odd = Offer(
        id="GPU-0000000000000001-3#cpx",
        index=3,
        count=1,
        devmem=2147483647,
        devcore=38,
        type='AMD <R&D> "x"\\\u2028\u2029é\t\b\f\x01\x7f',
        numa=-1,
        mode="cpx",
        health=False,
        custominfo={
            "partitionProfile": "cpx_nps4",
            "cuPerWGP": 2,
            "pciBDF": "a<b",
            "partitionProfiles": [{"type": "SPX", "profile_index": 0, "memory_caps": "NPS1,NPS4"}],
        },
        partition=PartitionId("b/3"),
    )
    bare = replace(plain, id="bare", count=0, devmem=0, devcore=0, type="AMD GPU", health=False, custominfo={})
    assert hami.format_registration([plain, odd, bare]) + "\n" == (GOLDEN / "hami_register.json").read_text("utf-8")


def test_a_gpu_is_offered_with_all_it_has() -> None:
    (offer,) = offers(Inventory((replace(ONE, smi_uuid="8eff74a1-0000-1000-801b-b56457addd1b"),)))
    assert json.loads(hami.format_registration([offer])) == [
        {
            "id": "8eff74a1-0000-1000-801b-b56457addd1b",
            "count": 10,
            "devmem": 196608,
            "devcore": 304,
            "type": "AMD Instinct MI300X",
            "health": True,
            "devicevendor": "amd",
            "custominfo": {
                "pciBDF": "0000:11:00.0",
                "cuPerWGP": 1,
                "partitionProfiles": [
                    {
                        "profile_index": p.index,
                        "type": p.mode,
                        "memory_caps": ",".join(p.memory_modes),
                        "num_partitions": p.partition_count,
                        "xcc_per_partition": p.xccs_per_partition,
                    }
                    for p in ONE.profiles
                ],
            },
        }
    ]


@pytest.mark.parametrize(
    ("gfx_target", "configured", "count"),
    [("gfx1201", 0, 2), ("gfx1100", 0, 10), ("gfx942", 0, 10), ("gfx1201", 5, 5), ("gfx942", 1, 1)],
)
def test_the_split_count_is_the_configured_one_or_hamis(gfx_target: str, configured: int, count: int) -> None:
    assert hami.split_count(replace(ONE, gfx_target=gfx_target), configured) == count


@pytest.mark.parametrize(
    ("product", "offered"),
    [
        ("AMD Instinct MI300X VF", "AMD Instinct MI300X VF"),
        ("Radeon RX 9060 XT", "AMD Radeon RX 9060 XT"),
        ("amd thing", "amd thing"),
        ("Radeon, Pro: W7900; rev 2", "AMD Radeon Pro W7900 rev 2"),
        ("", "AMD GPU"),
        (",;:", "AMD GPU"),
    ],
)
def test_a_type_begins_with_amd_and_holds_nothing_that_separates(product: str, offered: str) -> None:
    assert hami.type_of(product) == offered


def test_partitions_that_share_their_unique_id_are_offered_under_ids_of_their_own() -> None:
    inventory = Inventory((in_mode(ONE, "CPX"),))
    found = offers(inventory, mode=Mode.PARTITION)
    assert [(o.id, o.count, o.devcore, o.mode) for o in found] == [
        (f"{ONE.id}-{i}#cpx", 1, 38, "cpx") for i in range(8)
    ]
    assert {o.custominfo["partitionProfile"] for o in found} == {"cpx_nps1"}
    assert [o.count for o in offers(inventory, mode=Mode.CU)] == [10] * 8


def test_a_gpu_that_must_not_be_used_is_offered_without_health_never_left_out() -> None:
    inventory = an_inventory(3)
    one, two, three = (gpu.id for gpu in inventory.gpus)
    health = {one: Health(Condition.UNHEALTHY, "r", "ras"), two: Health(Condition.DEGRADED, "r", "ras")}
    found = hami.offers(inventory, Book().with_cordoned([three]), health, mode=Mode.CU, splits=0)
    assert [(o.id, o.health) for o in found] == [(one, False), (two, True), (three, False)]
    assert '"health"' not in hami.format_registration([found[0]])


def test_a_gpu_that_went_is_kept_without_health() -> None:
    before = offers(an_inventory())
    kept = hami.with_missing(offers(Inventory((TWO,))), before, Inventory((TWO,)))
    assert [(o.id, o.index, o.health) for o in kept] == [(TWO.id, 0, True), (ONE.id, 1, False)]


def test_a_partition_that_went_because_its_gpu_is_cut_anew_is_left_out() -> None:
    before, now = Inventory((in_mode(ONE, "CPX"),)), Inventory((in_mode(ONE, "DPX"),))
    kept = hami.with_missing(offers(now, mode=Mode.PARTITION), offers(before, mode=Mode.PARTITION), now)
    assert [o.id for o in kept] == [f"{ONE.id}-{i}#dpx" for i in range(2)]


def test_a_registration_is_read_back_as_it_was_written() -> None:
    for mode, inventory in (
        (Mode.CU, an_inventory()),
        (Mode.PARTITION, Inventory((in_mode(ONE, "CPX"), TWO))),
    ):
        text = hami.format_registration(offers(inventory, mode=mode))
        assert hami.format_registration(hami.parse_offers(text)) == text


@pytest.mark.parametrize(
    ("mode", "before", "now", "kept"),
    [
        (Mode.CU, (ONE, TWO), (TWO,), [TWO.id, ONE.id]),
        (Mode.CU, (ONE, TWO), (ONE, TWO), [ONE.id, TWO.id]),
        (Mode.CU, (), (TWO,), [TWO.id]),
        (Mode.PARTITION, (ONE,), (in_mode(ONE, "DPX"),), [f"{ONE.id}-0#dpx", f"{ONE.id}-1#dpx"]),
        (Mode.PARTITION, (in_mode(ONE, "DPX"), TWO), (TWO,), [f"{TWO.id}#spx", f"{ONE.id}-0#dpx", f"{ONE.id}-1#dpx"]),
    ],
    ids=["one has gone", "all are there", "the first start", "cut anew", "one that was cut has gone"],
)
def test_what_an_earlier_start_has_registered_is_known_as_what_this_one_has(
    mode: Mode, before: tuple[Gpu, ...], now: tuple[Gpu, ...], kept: list[str]
) -> None:
    text = hami.format_registration(offers(Inventory(before), mode=mode))
    found = hami.with_missing(offers(Inventory(now), mode=mode), hami.parse_offers(text), Inventory(now))
    assert [(o.id, o.health) for o in found] == [
        (each, i < len(offers(Inventory(now), mode=mode))) for i, each in enumerate(kept)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "{}",
        "[[]]",
        '[{"id":"a"}]',
        '[{"id":"a:b","type":"AMD"}]',
        '[{"id":"a","type":"AMD","count":-1}]',
        '[{"id":"a","type":"AMD","devmem":Infinity}]',
        '[{"id":"a","type":"AMD","custominfo":7}]',
    ],
)
def test_what_is_no_registration_is_remembered_as_nothing(text: str) -> None:
    assert hami.parse_offers(text) == ()


def test_what_others_than_pods_were_promised_is_not_dealt_out_by_the_scheduler() -> None:
    inventory = Inventory((ONE,))
    book = with_slices(inventory, exact("alice", 76, 48 * GIB), exact(hami.pod_slice(UID, 0), 80, 8 * GIB))
    (offer,) = offers(inventory, book)
    assert (offer.devmem, offer.devcore, offer.health) == ((192 - 48) * 1024, 304 - 72, True)


def test_a_gpu_that_somebody_else_has_whole_is_offered_without_health() -> None:
    inventory = Inventory((ONE,))
    book = with_slices(inventory, Request(SliceName("alice"), Compute(ComputePolicy.WHOLE)))
    (offer,) = offers(inventory, book)
    assert (offer.devmem, offer.devcore, offer.health) == (192 * 1024, 304, False)


@pytest.mark.parametrize(("ratio", "devmem"), [(1.5, 288 * 1024), (1e6, 2**31 - 1)])
def test_oversubscription_is_offered_within_what_the_scheduler_can_decode(ratio: float, devmem: int) -> None:
    (offer,) = offers(Inventory((ONE,)), Book().with_oversubscription({ONE.id: ratio}))
    assert offer.devmem == devmem


def test_a_withdrawn_registration_has_all_gpus_and_no_health() -> None:
    text = hami.format_registration(offers(an_inventory()))
    withdrawn = hami.format_withdrawn(text)
    assert [each["id"] for each in hami.parse_registration(withdrawn)] == [ONE.id, TWO.id]
    assert '"health"' not in withdrawn
    assert withdrawn == text.replace(',"health":true', "")


@pytest.mark.parametrize("text", ["", "[", "{}", "null", "[1]", "[" * 100_000])
def test_a_registration_that_nobody_can_read_names_no_gpu(text: str) -> None:
    assert hami.parse_registration(text) == []


# ------------------------------------------------------------------------------------------------------ allocations


@pytest.mark.parametrize(
    ("text", "containers"),
    [
        ("", ()),
        (";", ((),)),
        (";;", ((), ())),
        ("A,AMD Instinct MI300X VF,16384,76:;", ((A,),)),
        ("A,AMD Instinct MI300X VF,16384,76:B,T,1,2:;", ((A, B),)),
        (";B,T,1,2:;;", ((), (B,), ())),
        ("B,T,99999999999999,2:;", ((replace(B, memory_mib=99999999999999),),)),
    ],
)
def test_an_allocation_is_read_and_written_alike(text: str, containers: tuple[hami.Container, ...]) -> None:
    assert hami.parse_allocation(text) == containers
    assert hami.format_allocation(containers) == text


@given(
    st.lists(
        st.lists(
            st.builds(
                Grant,
                st.from_regex(r"[A-Za-z0-9#.-]{1,20}", fullmatch=True),
                st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9 ]{0,8}[A-Za-z0-9])?", fullmatch=True),
                st.integers(0, 2**62),
                st.integers(0, 2**31),
            ),
            max_size=3,
        ).map(tuple),
        max_size=4,
    ).map(tuple)
)
def test_any_allocation_comes_back_from_its_text(containers: tuple[hami.Container, ...]) -> None:
    text = hami.format_allocation(containers)
    assert hami.parse_allocation(text) == containers
    served = 0
    while (waiting := hami.first_waiting(text)) is not None:
        text = hami.without_waiting(text, waiting[0])
        served += 1
        assert len(hami.parse_allocation(text)) == len(containers)
    assert served == sum(1 for grants in containers if grants)
    assert not hami.is_waiting(text)


@pytest.mark.parametrize(
    "text", ["A", "A,T,1", ",T,1,2:;", "A,,1,2:;", "A,T,-1,2:;", "A,T,1.5,2:;", "A,T,x,2:;", "A,T,１,2:;"]
)
def test_what_is_no_allocation_is_refused_with_its_part(text: str) -> None:
    with pytest.raises(Invalid, match="is no allocation"):
        hami.parse_allocation(text)
    assert not hami.is_waiting(text)


def test_fields_of_later_schedulers_are_let_pass_and_kept() -> None:
    text = "A,T,1,2,new,field:;B,T,1,2,new:;"
    assert hami.parse_allocation(text)[0] == (Grant("A", "T", 1, 2),)
    assert hami.without_waiting(text, 0) == ";B,T,1,2,new:;"


@pytest.mark.parametrize("text", [";;B,T,1,2:;A,T,3,4:;", "B,T,1,2:;A,T,3,4:;"])
def test_both_shapes_serve_the_same_containers_in_the_same_order(text: str) -> None:
    served = []
    while (waiting := hami.first_waiting(text)) is not None:
        served.append(waiting[1][0].id)
        text = hami.without_waiting(text, waiting[0])
    assert served == ["B", "A"]
    assert set(text) == {";"}


# -------------------------------------------------------------------------------------------------------- checks


def wish(memory_mib: int, cu_count: int, name: str = str(ONE.id)) -> Wish:
    inventory = an_inventory()
    there = hami.places(inventory, Mode.CU)
    limits = {p.id: p.vram_bytes for p in there.values()}
    (found,) = hami.wishes((Grant(name, "T", memory_mib, cu_count),), there, limits)
    return found


@pytest.mark.parametrize(
    ("memory_mib", "cu_count", "vram_bytes", "cus"),
    [
        (16384, 76, 16 * GIB, 76),
        (196608, 304, None, None),
        (0, 304, None, None),
        (0, 0, None, None),
        (196608, 0, None, None),
        (16384, 304, 16 * GIB, 304),
        (16384, 0, 16 * GIB, 304),
        (196608, 76, 192 * GIB, 76),
    ],
)
def test_whole_is_whole_in_both(memory_mib: int, cu_count: int, vram_bytes: int | None, cus: int | None) -> None:
    assert wish(memory_mib, cu_count) == Wish(str(ONE.id), ONE.partitions[0], vram_bytes, cus)


@pytest.mark.parametrize(
    ("memory_mib", "cu_count", "why"),
    [
        (16 * GIB, 76, "counts MiB, so write 16384 for 16 GiB"),
        (2**40, 76, "counts MiB"),
        (0, 76, "no memory is named for 76 of the 304 CUs"),
        (1, 305, "305 CUs are wanted"),
    ],
)
def test_what_cannot_be_meant_is_refused(memory_mib: int, cu_count: int, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        wish(memory_mib, cu_count)


def test_an_id_of_another_node_is_refused_with_the_ids_present() -> None:
    with pytest.raises(NotFound, match=f"no GPU 'elsewhere'; it has {ONE.id}, {TWO.id}"):
        wish(1, 1, "elsewhere")


def ask(*wanted: Wish, priority: Priority = Priority.NORMAL) -> tuple[Request, ...]:
    return hami.requests(UID, 0, wanted, priority=priority, oversubscribed=frozenset({TWO.id}))


def test_gpus_with_one_quota_become_one_request_and_others_one_each() -> None:
    first, alike = Wish("a", ONE.partitions[0], GIB, 76), Wish("b", a_gpu(2).partitions[0], GIB, 76)
    other, whole = Wish("c", a_gpu(3).partitions[0], GIB, 38), Wish("d", TWO.partitions[0], None, None)
    names = tuple(SliceName(f"pod-{UID}.0{part}") for part in ("", ".1", ".2"))
    assert ask(first, other, alike, whole, priority=Priority.HIGH) == (
        Request(
            SliceName(f"pod-{UID}.0"),
            Compute(ComputePolicy.EXACT, cu_count=76),
            GIB,
            2,
            (f"{ONE.id}/0", f"{a_gpu(2).id}/0"),
            priority=Priority.HIGH,
            together=names,
        ),
        Request(
            SliceName(f"pod-{UID}.0.1"),
            Compute(ComputePolicy.EXACT, cu_count=38),
            GIB,
            1,
            (f"{a_gpu(3).id}/0",),
            priority=Priority.HIGH,
            together=names,
        ),
        Request(
            SliceName(f"pod-{UID}.0.2"),
            Compute(ComputePolicy.WHOLE),
            None,
            1,
            (f"{TWO.id}/0",),
            priority=Priority.HIGH,
            together=names,
        ),
    )


def test_partitions_of_one_gpu_become_requests_of_their_own() -> None:
    first, second = in_mode(ONE, "CPX").partitions[:2]
    assert [r.on for r in ask(Wish("a", first, GIB, 4), Wish("b", second, GIB, 4))] == [(first.id,), (second.id,)]


def test_a_slice_of_an_oversubscribed_gpu_may_spill_into_host_memory() -> None:
    (request,) = ask(Wish("b", TWO.partitions[0], GIB, 76))
    assert request.oversubscribe


@pytest.mark.parametrize(
    ("layout", "asked", "granted"),
    [
        (None, 76, 72),  # eight XCCs: down
        (None, 3, 8),  # at least one each
        (None, 203, 200),
        (WGPS, 3, 4),  # up to whole WGPs
        (WGPS, 2, 2),
    ],
)
def test_a_dictated_count_is_rounded_as_the_silicon_needs(layout: CuLayout | None, asked: int, granted: int) -> None:
    gpu = a_gpu(0, layout=layout)
    request = hami.requests(
        UID, 0, (Wish("a", gpu.partitions[0], GIB, asked),), priority=Priority.NORMAL, oversubscribed=frozenset()
    )[0]
    assert plan.place(Book(), Inventory((gpu,)), request, {}).shares[0].granted_cus == granted


def test_ten_pods_of_one_per_cent_and_a_big_one_that_still_fits_and_one_that_does_not() -> None:
    inventory = Inventory((ONE,))
    small = [exact(hami.pod_slice(UID, i), 3) for i in range(10)]
    book = with_slices(inventory, *small)
    assert sum(len(share.cus or ()) for item in book.slices.values() for share in item.shares) == 80
    with pytest.raises(NoRoom) as refusal:
        plan.place(book, inventory, exact("big", 274), {})
    assert str(refusal.value) == (
        "wanted 1 GiB and 274 CUs (272 here, as many on each XCC) on one partition; the roomiest, 0000:11:00.0/0, has "
        "182 GiB and 224 CUs"
    )
    assert with_slices(inventory, exact("big", 225), book=book).slices[SliceName("big")].shares[0].granted_cus == 224


@pytest.mark.parametrize(
    ("layout", "taken", "asked", "words"),
    [
        (None, 304, 3, "wanted 1 GiB and 3 CUs (8 here, as many on each XCC) on one partition; .* and 0 CUs"),
        (WGPS, 62, 3, "wanted 1 GiB and 3 CUs (4 here, whole WGPs) on one partition; .* and 2 CUs"),
        (WGPS, 62, 4, "wanted 1 GiB and 4 CUs on one partition; .* and 2 CUs"),
    ],
)
def test_a_refusal_says_what_was_asked_what_it_comes_to_and_what_is_free(
    layout: CuLayout | None, taken: int, asked: int, words: str
) -> None:
    inventory = Inventory((a_gpu(0, layout=layout),))
    book = with_slices(inventory, exact("others", taken))
    with pytest.raises(NoRoom, match=words.replace("(", r"\(").replace(")", r"\)")):
        plan.place(book, inventory, exact("one", asked), {})


@pytest.mark.parametrize(
    ("asked", "ceiling"),
    [(None, Priority.NORMAL), (0, Priority.HIGH), (1, Priority.LOW), (7, Priority.LOW)],
)
def test_a_task_priority_is_a_ceiling(asked: int | None, ceiling: Priority) -> None:
    assert hami.priority_of(asked) is ceiling


# ----------------------------------------------------------------------------------------------- slices of pods


@pytest.mark.parametrize(
    ("name", "uid"),
    [
        (f"pod-{UID}.0", UID),
        (f"pod-{UID}.12.3", UID),
        ("pod-7d0d1f3a9f1e4c1c8c5d3a1b2c3d4e5f.0", "7d0d1f3a9f1e4c1c8c5d3a1b2c3d4e5f"),
        ("alice", None),
        ("pod-alice", None),
        ("pod-alice.x", None),
    ],
)
def test_the_pod_of_a_slice_is_in_its_name(name: str, uid: str | None) -> None:
    assert hami.pod_uid(name) == uid


@pytest.mark.parametrize("uid", ["", "a.0", "../etc", "A", "x" * 60])
def test_a_uid_that_is_none_makes_no_slice(uid: str) -> None:
    with pytest.raises(Invalid):
        hami.pod_slice(uid, 0)


def test_the_cus_of_a_pod_are_those_of_all_its_containers() -> None:
    inventory = Inventory((a_gpu(0, layout=WGPS), TWO))
    book = with_slices(
        inventory,
        replace(exact(hami.pod_slice(UID, 0), 4), on=("0",)),
        replace(exact(hami.pod_slice(UID, 1), 4), on=("0",)),
        replace(exact(hami.pod_slice("other", 0), 4), on=("0",)),
        Request(hami.pod_slice(UID, 2), Compute(ComputePolicy.WHOLE), on=("1",)),
    )
    mine = {p.id: name for name, p in hami.places(inventory, Mode.CU).items()}
    found = hami.cus_of_pods(book, mine)
    first, second = (book.slices[hami.pod_slice(UID, i)].shares[0].cus for i in (0, 1))
    assert first is not None
    assert second is not None
    assert found.keys() == {UID, "other"}
    assert found[UID] == {str(ONE.id): CuSet.from_mask(first.mask | second.mask)}


@pytest.mark.parametrize(
    ("text", "cus"),
    [
        ('{"A":"0-3,8,10-12"}', {"A": CuSet((0, 1, 2, 3, 8, 10, 11, 12))}),
        ('{"A":"0","B":"1-2"}', {"A": CuSet((0,)), "B": CuSet((1, 2))}),
    ],
)
def test_the_cus_of_a_pod_are_read_and_written_alike(text: str, cus: dict[str, CuSet]) -> None:
    assert hami.parse_cus(text) == cus
    assert hami.format_cus(cus) == text


def test_blanks_and_empty_items_between_cus_are_let_pass() -> None:
    assert hami.parse_cus('{"A":" 0 - 1 ,, 3"}') == {"A": CuSet((0, 1, 3))}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"":"1"}', '{"A":"3-1"}', '{"A":""}', '{"A":1}', '{"A":"99999"}'])
def test_what_is_no_list_of_cus_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        hami.parse_cus(text)


def test_what_was_served_is_read_and_written_alike() -> None:
    text = '{"0":["a#1","a#2"],"1":["b#0"]}'
    assert hami.parse_served(text) == {0: frozenset({"a#1", "a#2"}), 1: frozenset({"b#0"})}
    assert hami.format_served(hami.parse_served(text)) == text


@pytest.mark.parametrize("text", ["", "[", "[]", "1", '{"x":["a"]}', '{"0":1}', '{"0":null}'])
def test_what_a_pod_may_have_written_as_served_serves_nothing(text: str) -> None:
    assert hami.parse_served(text) == {}


# -------------------------------------------------------------------------------------------------------- lock


@pytest.mark.parametrize(
    ("text", "lock"),
    [
        ("2026-01-01T00:00:00Z,default,trainer", Lock("2026-01-01T00:00:00Z", "default", "trainer")),
        ("2026-01-01T00:00:00+02:00", Lock("2026-01-01T00:00:00+02:00")),
    ],
)
def test_a_node_lock_is_read_and_written_alike(text: str, lock: Lock) -> None:
    assert hami.parse_lock(text) == lock
    assert hami.format_lock(lock) == text
    assert lock.is_of("default", "trainer") == ("trainer" in text)


@pytest.mark.parametrize("text", ["a,b", "a,b,c,d", ",,", "t,,pod"])
def test_a_lock_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="malformed"):
        hami.parse_lock(text)


# ----------------------------------------------------------------------------------------- inside a container


def test_a_container_finds_hamis_variables_over_all_its_slices() -> None:
    inventory = Inventory((a_gpu(0, layout=WGPS), TWO))
    book = with_slices(
        inventory,
        replace(exact("pod-u.0", 4, 2 * GIB), on=("1",)),
        replace(exact("pod-u.0.1", 4, GIB), on=("0",)),
    )
    found = hami.container_environment(list(book.slices.values()), inventory, task_priority=0)
    assert found == {
        "AMDVGPU_SLICE": "pod-u.0,pod-u.0.1",
        "AMD_TASK_PRIORITY": "0",
        "ROCR_VISIBLE_DEVICES": "GPU-00000000abcd0000,GPU-00000000abcd0001",
        "HSA_CU_MASK": found["HSA_CU_MASK"],
        "HIP_DEVICE_MEMORY_LIMIT_0": "1024m",
        "HIP_DEVICE_MEMORY_LIMIT_1": "2048m",
    }
    assert found["HSA_CU_MASK"].startswith("0:")
    assert ";1:" in found["HSA_CU_MASK"]


def test_equal_limits_are_also_told_without_a_number() -> None:
    inventory = Inventory((ONE,))
    book = with_slices(inventory, exact("pod-u.0", 76, 16 * GIB))
    found = hami.container_environment(list(book.slices.values()), inventory)
    assert (found["HIP_DEVICE_MEMORY_LIMIT"], found["HIP_DEVICE_MEMORY_LIMIT_0"]) == ("16384m", "16384m")


def test_a_whole_gpu_has_no_mask_and_no_limit() -> None:
    inventory = Inventory((ONE,))
    book = with_slices(inventory, Request(SliceName("pod-u.0"), Compute(ComputePolicy.WHOLE)))
    assert hami.container_environment(list(book.slices.values()), inventory) == {"AMDVGPU_SLICE": "pod-u.0"}
