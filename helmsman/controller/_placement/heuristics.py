"""The quick rules by which bundles are laid onto nodes. Pure.

They leave whole nodes free: a bundle goes to the node in use that it fills best, before a whole node is broken into; a group of
bundles takes as few nodes as it can. What they do not find, packing_search looks for.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from helmsman.api.scheduler import Job
from helmsman.controller._placement.bin_packing import Amounts, Class, Packing, Placed, largest_first, times_in
from helmsman.controller._placement.bundles import Demand, Way

Chosen = list[tuple[int, int]]
"""(index of a node, bundles that it takes)."""


def lay(packing: Packing, jobs: Sequence[Job], way: Way, order: Sequence[int]) -> Placed | None:
    """Lay all jobs in this order; None when a bundle finds no place."""
    packing.reset()
    placed: Placed = {}
    for job in order:
        demands = largest_first(demand for demand in way.demands if demand.job == job)
        spec = jobs[job].spec(0)
        if any(demand.num_parts > 1 for demand in demands):
            done = _lay_parts(packing, demands, placed)
        elif spec.node_packing != "pack":
            done = _spread(packing, demands, placed)
        elif spec.ray_placement_strategy == "shared":
            done = _lay_group(packing, demands, placed)
        else:
            done = all(_lay_singly(packing, demand, placed) for demand in demands)
        if not done:
            return None
    return placed


def _put_all(packing: Packing, demand: Demand, chosen: Chosen, placed: Placed) -> None:
    replicas = iter(demand.replicas)
    for index, times in chosen:
        packing.put(demand, list(itertools.islice(replicas, times)), index, placed)


def _lay_singly(packing: Packing, demand: Demand, placed: Placed) -> bool:
    wanted, left = packing.amounts(demand), len(demand.replicas)
    groups = packing.fitting(demand)
    chosen: Chosen = []
    for _, index, group in _in_turn((packing.tightness(each, demand), each) for each in groups):
        if not left:
            break
        chosen.append((index, min(left, times_in(group.free, wanted))))
        left -= chosen[-1][1]
    if left:
        return False
    _put_all(packing, demand, chosen, placed)
    return True


def _lay_group(packing: Packing, demands: Sequence[Demand], placed: Placed) -> bool:
    if len(demands) > 1 and _lay_as_one(packing, demands, placed):
        return True
    for demand in demands:
        chosen = _few_nodes(packing, demand, len(demand.replicas))
        if chosen is None:
            return False
        _put_all(packing, demand, chosen, placed)
    return True


def _few_nodes(packing: Packing, demand: Demand, count: int) -> Chosen | None:
    """As few nodes as possible: all on the tightest node that holds them, else the largest piece first."""
    wanted = packing.amounts(demand)
    fitting = packing.fitting(demand)
    chosen: Chosen = []
    if not demand.num_devices:  # nodes with accelerators only when the others are not enough
        count = _choose_few([group for group in fitting if not group.capacity], wanted, count, chosen)
        fitting = [group for group in fitting if group.capacity]
    return chosen if not count or _choose_few(fitting, wanted, count, chosen) == 0 else None


def _choose_few(groups: Sequence[Class], wanted: Amounts, count: int, chosen: Chosen) -> int:
    """Returns how many bundles are left over."""
    times_of = {id(group): times_in(group.free, wanted) for group in groups}
    for position, (_, index, group) in enumerate(_in_turn(((-times_of[id(each)], not each.in_use), each) for each in groups)):
        if count <= times_of[id(group)]:
            taken = {node for node, _ in chosen[len(chosen) - position :]} if position else set()
            best = min(
                (times_of[id(each)], not each.in_use, node)
                for each in groups
                if times_of[id(each)] >= count
                for node in itertools.islice((node for node in each.nodes if node not in taken), 1)
            )
            chosen.append((best[2], count))
            return 0
        chosen.append((index, times_of[id(group)]))
        count -= times_of[id(group)]
    return count


def _lay_as_one(packing: Packing, demands: Sequence[Demand], placed: Placed) -> bool:
    """A group of several specs as if all were of the commonest, so that all its ranks stand in the order of nodes."""
    common = max(demands, key=lambda demand: len(demand.replicas))
    chosen = _few_nodes(packing, common, sum(len(demand.replicas) for demand in demands))
    if chosen is None:
        return False
    ranks = sorted((replica, number) for number, demand in enumerate(demands) for replica in demand.replicas)
    slots = [index for index, times in sorted(chosen) for _ in range(times)]
    free = {index: list(packing.free[index]) for index, _ in chosen}
    laid: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for (replica, number), index in zip(ranks, slots, strict=True):
        demand = demands[number]
        for position, amount in enumerate(packing.amounts(demand)):
            free[index][position] -= amount
        if index not in demand.nodes or min(free[index]) < 0:
            return False
        laid[number, index].append(replica)
    for (number, index), replicas in laid.items():
        packing.put(demands[number], replicas, index, placed)
    return True


def _lay_parts(packing: Packing, demands: Sequence[Demand], placed: Placed) -> bool:
    """Instances of several parts, each part on a node of its own."""
    used: set[int] = set()
    for head in demands:
        if head.part:
            continue
        parts = sorted((each for each in demands if each.replicas == head.replicas), key=lambda each: each.part)
        queues = {demand.bundle: _Queue(packing, demand) for demand in parts}
        for replica in head.replicas:
            if not head.apart:
                used = set()
            for demand in parts:
                index = queues[demand.bundle].pop(used)
                if index is None:
                    return False
                used.add(index)
                packing.put(demand, [replica], index, placed)
                for queue in queues.values():
                    queue.push(index)
            if not head.apart:
                for queue in queues.values():
                    queue.restore()
    return True


def _spread(packing: Packing, demands: Sequence[Demand], placed: Placed) -> bool:
    """Round after round one bundle to each node, in order; workers without accelerators to nodes without them first."""
    load: Counter[int] = Counter()
    for demand in demands:
        wanted = packing.amounts(demand)
        packing.work.left -= len(demand.nodes)
        away = {index: not demand.num_devices and packing.capacity[index] > 0 for index in demand.nodes}
        waiting = [(load[index], away[index], index) for index in demand.nodes if times_in(packing.free[index], wanted)]
        heapq.heapify(waiting)
        for replica in demand.replicas:
            if not waiting or (demand.apart and waiting[0][0]):
                return False
            index = heapq.heappop(waiting)[2]
            packing.put(demand, [replica], index, placed)
            load[index] += 1
            if times_in(packing.free[index], wanted):
                heapq.heappush(waiting, (load[index], away[index], index))
    return True


class _Queue:
    """The nodes onto which a bundle fits, the tightest first, while they fill up."""

    def __init__(self, packing: Packing, demand: Demand) -> None:
        self._packing = packing
        self._demand = demand
        self._wanted = packing.amounts(demand)
        self._heap = [
            (key, index, group.free)
            for group in packing.fitting(demand)
            for key in [packing.tightness(group, demand)]
            for index in group.nodes
        ]
        heapq.heapify(self._heap)
        self._aside: list[tuple[tuple[float, ...], int, Amounts]] = []

    def pop(self, used: set[int]) -> int | None:
        """The first node that is none of those used; these wait for restore()."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if entry[2] != self._packing.free[entry[1]]:
                continue  # as the node was before; it was pushed anew
            if entry[1] not in used:
                return entry[1]
            self._aside.append(entry)
        return None

    def push(self, index: int) -> None:
        """A node has changed."""
        packing = self._packing
        if index in self._demand.nodes and times_in(packing.free[index], self._wanted):
            group = packing.class_of(index)
            key = packing.tightness(group, self._demand)
            heapq.heappush(self._heap, (key, index, group.free))

    def restore(self) -> None:
        """The next instance may use again what the last one used."""
        for entry in self._aside:
            heapq.heappush(self._heap, entry)
        self._aside.clear()


def _in_turn(groups: Iterable[tuple[tuple[float, ...], Class]]) -> Iterator[tuple[tuple[float, ...], int, Class]]:
    """The nodes of all these classes by key and then in order."""
    heap = [(key, group.nodes[0], 0, group) for key, group in groups]
    heapq.heapify(heap)  # no node is in two classes, so classes are never compared
    while heap:
        key, index, position, group = heap[0]
        yield key, index, group
        if position + 1 < len(group.nodes):
            heapq.heapreplace(heap, (key, group.nodes[position + 1], position + 1, group))
        else:
            heapq.heappop(heap)
