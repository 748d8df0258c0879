"""Bundles onto nodes where the quick rules of packing find no way: their orders, and a search of bounded length. Pure.

Vector bin packing is NP-hard, so the search is complete only as far as its limit reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from helmsman.api.scheduler import Job
from helmsman.controller._placement.bin_packing import Packing, Placed, largest_first, size_of
from helmsman.controller._placement.bundles import Demand, Way

_MAX_SEARCHED = 400
"""Bundles, each of which is a level of the search."""


def orders(jobs: Sequence[Job], way: Way, num_nodes: int) -> list[list[int]]:
    """Orders of jobs worth a try: what has the fewest places first, by several measures."""
    of: list[list[Demand]] = [[demand for demand in way.demands if demand.job == job] for job in range(len(jobs))]
    largest = [[-amount for amount in max(map(size_of, demands))] for demands in of]
    choosy = [min(len(demand.nodes) for demand in demands) / max(1, num_nodes) for demands in of]
    measures: list[Callable[[int], tuple[float, ...]]] = [
        lambda job: (not max(d.num_devices for d in of[job]), choosy[job], *largest[job]),
        lambda job: (choosy[job], *largest[job]),
        lambda job: (*largest[job],),
        lambda job: (-sum(len(d.replicas) * d.num_devices for d in of[job]), choosy[job]),
        lambda job: (-max(dict(d.bundle).get("CPU", 0.0) for d in of[job]), choosy[job]),
    ]
    found = [sorted(range(len(jobs)), key=measure) for measure in measures]
    return list(map(list, dict.fromkeys(map(tuple, found))))


def search(packing: Packing, way: Way, work: int) -> Placed | None:
    """Depth first over the bundles, largest first, each to one node of every class that is left; None when there is no place
    for everything, or none was found with this much work, which is charged to that of the packing."""
    packing.reset()
    free = [list(amounts) for amounts in packing.free]
    items = [(packing.amounts(demand), demand, replica) for demand in largest_first(way.demands) for replica in demand.replicas]
    used: list[set[tuple[int, int]]] = [set() for _ in free]
    """What may not come to a node again: (job, replica) of instances in parts, (job, -1) of jobs spread strictly."""
    chosen: list[int] = []
    until = packing.work.left - work

    def place(at: int) -> bool:
        if at == len(items):
            return True
        wanted, demand, replica = items[at]
        mark = (demand.job, -1 if demand.apart else replica)
        marked = demand.apart or demand.num_parts > 1
        # Bundles that are alike are laid in the order of nodes, or every plan would be found once for every permutation.
        first = chosen[at - 1] if at and items[at - 1][1] is demand and demand.num_parts == 1 else 0
        tried = set()
        for index in range(first, len(free)):
            packing.work.left -= 1
            if packing.work.left < until:
                return False
            if index not in demand.nodes or (marked and mark in used[index]):
                continue
            if any(amount > have for amount, have in zip(wanted, free[index], strict=True)):
                continue
            alike = (tuple(free[index]), packing.met[index], frozenset(used[index]))
            if alike in tried:
                continue
            tried.add(alike)
            for position, amount in enumerate(wanted):
                free[index][position] -= amount
            if marked:
                used[index].add(mark)
            chosen.append(index)
            if place(at + 1):
                return True
            chosen.pop()
            if marked:
                used[index].discard(mark)
            for position, amount in enumerate(wanted):
                free[index][position] += amount
        return False

    if len(items) > _MAX_SEARCHED or not place(0):
        return None
    return {(item[1].job, item[2], item[1].part): index for item, index in zip(items, chosen, strict=True)}
