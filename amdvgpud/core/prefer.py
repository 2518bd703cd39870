"""Which of several ids to take for one container: those whose Partitions lie near each other, or far apart.

Pure: Partitions in, ids out. The distance of two Partitions is a sum of three terms, with the weights of AMD's own
device plugin (ROCm/k8s-device-plugin), so that a cluster that changes plugins keeps its placements: same GPU or
another, kind of link, same NUMA node or another. The choice is greedy from each possible start, which is exact for
groups that are uniform inside (hives, partitions of a GPU) and takes milliseconds for 64 Partitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from amdvgpud.core.model import LinkKind, Partition

POLICIES: Final = ("besteffort", "binpack", "spread")
"""``besteffort`` is ``binpack`` by the name that AMD's plugin has for it."""

_SAME_GPU, _OTHER_GPU = 10, 20
_LINK: Final = {LinkKind.XGMI: 10, LinkKind.PCIE: 40}
_NO_LINK: Final = 50
_SAME_NUMA, _OTHER_NUMA = 10, 20


def distance(one: Partition, other: Partition) -> int:
    """The less, the nearer. Partitions of one GPU are as near as a link can make them, whatever the KFD lists."""
    same = one.gpu == other.gpu
    links = [_LINK[link.kind] for link in one.links if link.to_kfd_node == other.kfd_node]
    links += [_LINK[link.kind] for link in other.links if link.to_kfd_node == one.kfd_node]
    link = _LINK[LinkKind.XGMI] if same else min(links, default=_NO_LINK)
    numa = _SAME_NUMA if one.numa_node == other.numa_node else _OTHER_NUMA
    return (_SAME_GPU if same else _OTHER_GPU) + link + numa


def prefer(
    places: Mapping[str, Partition],
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    policy: str = "besteffort",
    *,
    apart: bool = False,
) -> tuple[str, ...]:
    """``size`` ids of ``available``, ``must_include`` among them; ``places`` says where each lies.

    Nearest together (``spread``: farthest apart); among equals from the GPUs with the fewest ids left (``spread``: the
    most), then in the order of ``places``. ``apart``: never two of one Partition while another has one. All that is
    available, where that is not more than ``size``; ids that ``places`` does not have are never chosen.
    """
    order = {entry: n for n, entry in enumerate(places)}
    left = sorted({entry for entry in available if entry in places} - set(must_include), key=order.__getitem__)
    chosen = [entry for entry in must_include if entry in places]
    missing = size - len(chosen)
    if missing <= 0 or len(left) <= missing:
        return tuple([*chosen, *left][:size])
    sign = -1 if policy == "spread" else 1
    free = Counter(places[entry].gpu for entry in [*left, *chosen])
    nodes = {places[entry].id: places[entry] for entry in [*chosen, *left]}
    far = {(a, b): sign * distance(nodes[a], nodes[b]) for a in nodes for b in nodes}
    here = {entry: places[entry].id for entry in [*chosen, *left]}

    def grown(start: Sequence[str]) -> tuple[tuple[int, int], list[str]]:
        """``start`` with the best next one added again and again: ((total distance, sum of ids left), ids)."""
        group = list(start)
        rest = [entry for entry in left if entry not in group]
        used = Counter(here[entry] for entry in group)
        cost = {entry: sum(far[here[entry], here[one]] for one in group) for entry in rest}
        total = sum(far[here[a], here[b]] for i, a in enumerate(group) for b in group[i + 1 :])
        while len(group) < size:
            best = min(
                rest,
                key=lambda e: (used[here[e]] if apart else 0, cost[e], sign * free[places[e].gpu], order[e]),
            )
            rest.remove(best)
            total += cost.pop(best)
            used[here[best]] += 1
            group.append(best)
            for entry in rest:
                cost[entry] += far[here[entry], here[best]]
        return (total, sign * sum(free[places[entry].gpu] for entry in group)), group

    if chosen:
        starts = [chosen]
    else:  # ids of one Partition are alike, so one start for each will do
        first: dict[object, str] = {}
        for entry in left:
            first.setdefault(here[entry], entry)
        starts = [[entry] for entry in first.values()]
    _, group = min((grown(start) for start in starts), key=lambda found: found[0])
    picked = set(group)
    return (*chosen, *(entry for entry in left if entry in picked))
