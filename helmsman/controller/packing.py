"""Bundles onto nodes: quick rules first, then a search of bounded length. Pure.

Nodes that are alike (the same free resources, the same selectors met) are one class, so the work grows with the number of
classes and of nodes that are touched, not with nodes times bundles. Amounts are whole numbers of 1/10,000, as in Ray.

The quick rules leave whole nodes free: a bundle goes to the node in use that it fills best, before a whole node is broken into;
a group of bundles takes as few nodes as it can. They are tried with the jobs in several orders. Vector bin packing is NP-hard:
what the rules do not find, a depth-first search looks for until its limit. On clusters of up to four nodes it missed none of
3,300 random cases that an exhaustive search solves; of clusters that were cut up at random without a remainder, the hardest
there are, a plan was found again for 100 % with 8 nodes, 98 % with 12, 95 % with 20 and 93 % with 40 (benchmarks/planner.py).
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from helmsman.api.scheduler import Job
from helmsman.controller.cluster_snapshot import NodeState
from helmsman.controller.demand import Demand, Way
from helmsman.controller.resources import ACCELERATORS, Resources

_UNIT = 10_000
_SEARCH_WORK = 400_000
"""Nodes that the search may look at: well under a second."""

Amounts = tuple[int, ...]
Placed = dict[tuple[int, int, int], int]
"""(job, replica, part) -> index of a node."""


class _Class:
    """Nodes that are alike."""

    __slots__ = ("capacity", "free", "in_use", "met", "nodes")

    def __init__(self, free: Amounts, met: Amounts, capacity: int, in_use: bool) -> None:
        self.free = free
        self.met = met
        self.capacity = capacity
        """Accelerators of each node, free or not."""
        self.in_use = in_use
        self.nodes: list[int] = []
        """In order."""


class Packing:
    """The state of a cluster while bundles are laid onto it.

    Args:
        free: what each node has to give.
        demands: everything that may be asked for, which says which resources and selectors matter.
    """

    def __init__(self, nodes: Sequence[NodeState], free: Sequence[Resources], demands: Sequence[Demand]) -> None:
        self.names = sorted({name for demand in demands for name, _ in demand.bundle})
        self._selections = list(dict.fromkeys(demand.nodes for demand in demands))
        self._all = frozenset(range(len(nodes)))
        self._nodes = nodes
        self._free_at_start = [self.amounts(resources) for resources in free]
        self._accelerators = [self.names.index(name) for name in ACCELERATORS if name in self.names]
        self._capacity = [int(sum(node.total.get(name, 0.0) for name in ACCELERATORS)) for node in nodes]
        self._was_in_use = [
            any(free[index].get(name, 0.0) < node.total.get(name, 0.0) - 1e-6 for name in ACCELERATORS)
            for index, node in enumerate(nodes)
        ]
        self._met = self._selections_met()
        self.reset()

    def amounts(self, resources: Mapping[str, float]) -> Amounts:
        """Resources as whole numbers, in the order of ``names``."""
        return tuple(round(resources.get(name, 0.0) * _UNIT) for name in self.names)

    def _selections_met(self) -> list[Amounts]:
        if all(selection == self._all for selection in self._selections):
            return [(1,) * len(self._selections)] * len(self._nodes)
        return [tuple(int(index in selection) for selection in self._selections) for index in self._all]

    def reset(self) -> None:
        """Take everything off again."""
        self.free = list(self._free_at_start)
        self._in_use = list(self._was_in_use)
        self._classes: dict[tuple[Amounts, Amounts, int, bool], _Class] = {}
        for index in range(len(self._nodes)):
            self._class_of(index).nodes.append(index)

    def _class_of(self, index: int) -> _Class:
        key = (self.free[index], self._met[index], self._capacity[index], self._in_use[index])
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = _Class(*key)
        return found

    # --- bounds -----------------------------------------------------------------------------------------------------

    def fits_in_sum(self, demands: Iterable[Demand]) -> bool:
        """Whether what is free would do if it lay in one piece; a no is final."""
        total = [0] * len(self.names)
        for demand in demands:
            wanted = self.amounts(dict(demand.bundle))
            room = 0
            selection = self._selections.index(demand.nodes)
            for group in self._classes.values():
                if group.met[selection]:
                    room += len(group.nodes) * (
                        min(1, _times(group.free, wanted)) if demand.apart else _times(group.free, wanted)
                    )
            if room < len(demand.replicas):
                return False
            total = [sum_ + len(demand.replicas) * amount for sum_, amount in zip(total, wanted, strict=True)]
        for position, amount in enumerate(total):
            if amount > sum(group.free[position] * len(group.nodes) for group in self._classes.values()):
                return False
        return True

    # --- quick rules ------------------------------------------------------------------------------------------------

    def lay(self, jobs: Sequence[Job], way: Way, order: Sequence[int]) -> Placed | None:
        """Lay all jobs in this order by the quick rules; None when they do not find a place for everything."""
        self.reset()
        placed: Placed = {}
        for job in order:
            demands = [demand for demand in way.demands if demand.job == job]
            spec = jobs[job].spec(0)
            if any(demand.num_parts > 1 for demand in demands):
                done = self._lay_parts(demands, placed)
            elif spec.node_packing != "pack":
                done = self._spread(demands, placed)
            elif spec.ray_placement_strategy == "shared":
                done = all(self._lay_group(demand, placed) for demand in _largest_first(demands))
            else:
                done = all(self._lay_singly(demand, placed) for demand in _largest_first(demands))
            if not done:
                return None
        return placed

    def _fitting(self, demand: Demand, wanted: Amounts) -> list[_Class]:
        selection = self._selections.index(demand.nodes)
        return [
            group for group in self._classes.values() if group.nodes and group.met[selection] and _times(group.free, wanted)
        ]

    def _take(self, group: _Class, position: int, wanted: Amounts, times: int) -> int:
        """Lay bundles onto one node of a class; returns the node."""
        index = group.nodes.pop(position)
        self.free[index] = tuple(free - times * amount for free, amount in zip(group.free, wanted, strict=True))
        self._in_use[index] = self._in_use[index] or any(wanted[position] for position in self._accelerators)
        bisect.insort(self._class_of(index).nodes, index)
        return index

    def _tightness(self, group: _Class, wanted: Amounts, num_devices: int) -> tuple[float, ...]:
        """What a single bundle prefers, least first."""
        left = [free - amount for free, amount in zip(group.free, wanted, strict=True)]
        spare = sum(left[position] for position in self._accelerators)
        rest = sum(left[position] / (amount or 1) for position, amount in enumerate(wanted) if amount)
        if not num_devices:  # away from accelerators, whose nodes need their CPUs themselves
            return (group.capacity > 0, not group.in_use, rest, group.nodes[0])
        return (not group.in_use, spare, group.capacity, rest, group.nodes[0])

    def _lay_singly(self, demand: Demand, placed: Placed) -> bool:
        wanted = self.amounts(dict(demand.bundle))
        replicas = list(demand.replicas)
        while replicas:
            fitting = self._fitting(demand, wanted)
            if not fitting:
                return False
            group = min(fitting, key=lambda each: self._tightness(each, wanted, demand.num_devices))
            times = min(_times(group.free, wanted), len(replicas))
            index = self._take(group, 0, wanted, times)
            for replica in replicas[:times]:
                placed[demand.job, replica, 0] = index
            del replicas[:times]
        return True

    def _lay_group(self, demand: Demand, placed: Placed) -> bool:
        """As few nodes as possible: all on the tightest node that holds them, else the largest piece first."""
        wanted = self.amounts(dict(demand.bundle))
        replicas = list(demand.replicas)
        while replicas:
            fitting = self._fitting(demand, wanted)
            if not demand.num_devices:  # nodes with accelerators only when the others are not enough
                fitting = [group for group in fitting if not group.capacity] or fitting
            if not fitting:
                return False

            def preference(group: _Class, left: int = len(replicas)) -> tuple[float, ...]:
                times = _times(group.free, wanted)
                return (times < left, times if times >= left else -times, not group.in_use, group.nodes[0])

            group = min(fitting, key=preference)
            times = min(_times(group.free, wanted), len(replicas))
            index = self._take(group, 0, wanted, times)
            for replica in replicas[:times]:
                placed[demand.job, replica, 0] = index
            del replicas[:times]
        return True

    def _lay_parts(self, demands: Sequence[Demand], placed: Placed) -> bool:
        """Instances of several parts, each part on a node of its own."""
        used_by_job: set[int] = set()
        instances = [(replica, demand) for demand in demands if demand.part == 0 for replica in demand.replicas]
        for replica, head in instances:
            used = used_by_job if head.apart else set()
            for demand in demands:
                if demand.replicas is not head.replicas and demand.replicas != head.replicas:
                    continue
                wanted = self.amounts(dict(demand.bundle))
                index = self._take_unused(demand, wanted, used)
                if index is None:
                    return False
                used.add(index)
                placed[demand.job, replica, demand.part] = index
        return True

    def _take_unused(self, demand: Demand, wanted: Amounts, used: set[int]) -> int | None:
        fitting = self._fitting(demand, wanted)
        for group in sorted(fitting, key=lambda each: self._tightness(each, wanted, demand.num_devices)):
            for position, index in enumerate(group.nodes):
                if index not in used:
                    return self._take(group, position, wanted, 1)
        return None

    def _spread(self, demands: Sequence[Demand], placed: Placed) -> bool:
        """Round after round one bundle to each node, in order; workers without accelerators to nodes without them first."""
        load: Counter[int] = Counter()
        for demand in _largest_first(demands):
            wanted = self.amounts(dict(demand.bundle))
            away = {index: not demand.num_devices and self._capacity[index] > 0 for index in demand.nodes}
            waiting = [(load[index], away[index], index) for index in demand.nodes if _times(self.free[index], wanted)]
            heapq.heapify(waiting)
            for replica in demand.replicas:
                if not waiting or (demand.apart and waiting[0][0]):
                    return False
                index = heapq.heappop(waiting)[2]
                group = self._class_of(index)
                self._take(group, bisect.bisect_left(group.nodes, index), wanted, 1)
                load[index] += 1
                placed[demand.job, replica, 0] = index
                if _times(self.free[index], wanted):
                    heapq.heappush(waiting, (load[index], away[index], index))
        return True

    # --- the search -------------------------------------------------------------------------------------------------

    def search(self, way: Way, work: int = _SEARCH_WORK) -> Placed | None:
        """Depth first over the bundles, largest first, each to one node of every class that is left; None when there is no
        place for everything, or none was found within the limit."""
        self.reset()
        free = [list(amounts) for amounts in self.free]
        items = [
            (self.amounts(dict(demand.bundle)), demand, replica)
            for demand in _largest_first(way.demands)
            for replica in demand.replicas
        ]
        num_nodes = len(free)
        used: list[set[tuple[int, int]]] = [set() for _ in range(num_nodes)]
        """What may not come to a node again: (job, replica) of instances in parts, (job, -1) of jobs spread strictly."""
        chosen: list[int] = []
        spent = 0

        def place(at: int) -> bool:
            nonlocal spent
            if at == len(items):
                return True
            wanted, demand, replica = items[at]
            mark = (demand.job, -1 if demand.apart else replica)
            marked = demand.apart or demand.num_parts > 1
            # Bundles that are alike are laid in the order of nodes, or every plan would be found once for every permutation.
            first = chosen[at - 1] if at and items[at - 1][1] is demand and demand.num_parts == 1 else 0
            tried = set()
            for index in range(first, num_nodes):
                spent += 1
                if spent > work:
                    return False
                if index not in demand.nodes or (marked and mark in used[index]):
                    continue
                if any(amount > have for amount, have in zip(wanted, free[index], strict=True)):
                    continue
                alike = (tuple(free[index]), self._met[index], frozenset(used[index]))
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


_MAX_SEARCHED = 400
"""Bundles, each of which is a level of the search."""


def _times(free: Amounts, wanted: Amounts) -> int:
    """How many such bundles fit."""
    times = min((have // amount for have, amount in zip(free, wanted, strict=True) if amount), default=0)
    return max(0, times)


def _size(demand: Demand) -> tuple[float, ...]:
    amounts = dict(demand.bundle)
    return (demand.num_devices, amounts.get("memory", 0.0) / 1e9 + amounts.get("CPU", 0.0), len(amounts))


def _largest_first(demands: Iterable[Demand]) -> list[Demand]:
    return sorted(demands, key=_size, reverse=True)


def orders(jobs: Sequence[Job], way: Way, num_nodes: int) -> list[list[int]]:
    """Orders of jobs worth a try: what has the fewest places first, by several measures."""

    def of(job: int) -> list[Demand]:
        return [demand for demand in way.demands if demand.job == job]

    def choosy(job: int) -> float:
        return min(len(demand.nodes) for demand in of(job)) / max(1, num_nodes)

    measures: list[Callable[[int], tuple[float, ...]]] = [
        lambda job: (not max(d.num_devices for d in of(job)), choosy(job), *(-x for x in max(map(_size, of(job))))),
        lambda job: (choosy(job), *(-x for x in max(map(_size, of(job))))),
        lambda job: (*(-x for x in max(map(_size, of(job)))),),
        lambda job: (-sum(len(d.replicas) * d.num_devices for d in of(job)), choosy(job)),
        lambda job: (-max(dict(d.bundle).get("CPU", 0.0) for d in of(job)), choosy(job)),
    ]
    found = [sorted(range(len(jobs)), key=measure) for measure in measures]
    return list(map(list, dict.fromkeys(map(tuple, found))))
