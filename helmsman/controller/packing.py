"""Bundles onto nodes by quick rules. Pure.

Nodes that are alike (the same free resources, the same selectors met) are one class, and each demand looks at every class once,
so the work grows with classes, demands and bundles, never with their products; on clusters where each node is a class of its
own (their memory differs by a few bytes) it grows as nodes x demands. Amounts are whole numbers of 1/10,000, as in Ray.

The rules leave whole nodes free: a bundle goes to the node in use that it fills best, before a whole node is broken into; a
group of bundles takes as few nodes as it can. What they do not find, packing_search looks for.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from helmsman.api.scheduler import Job
from helmsman.controller.cluster_snapshot import NodeState
from helmsman.controller.demand import Demand, Way
from helmsman.controller.resources import ACCELERATORS, Resources

_UNIT = 10_000
_WORK = 400_000
_MOST_SIZES = 16

Amounts = tuple[int, ...]
Placed = dict[tuple[int, int, int], int]
"""(job, replica, part) -> index of a node."""
Chosen = list[tuple[int, int]]
"""(index of a node, bundles that it takes)."""
Key = tuple[Amounts, Amounts, int, bool]


class Work:
    """How much trying is left: a limit in nodes and classes looked at, about a second in all."""

    def __init__(self, left: int = _WORK) -> None:
        self.left = left


class _Class:
    """Nodes that are alike."""

    __slots__ = ("capacity", "free", "in_use", "met", "nodes")

    def __init__(self, key: Key, nodes: list[int]) -> None:
        self.free, self.met, self.capacity, self.in_use = key
        """What is free, selections met, accelerators of each node (free or not), and whether some of those are held."""
        self.nodes = nodes
        """In order."""


class Packing:
    """The state of a cluster while bundles are laid onto it.

    Args:
        free: what each node has to give.
        demands: everything that may be asked for, which says which resources and selectors matter.
        work: what the attempts are charged to.
    """

    def __init__(self, nodes: Sequence[NodeState], free: Sequence[Resources], demands: Sequence[Demand], work: Work) -> None:
        self.names = sorted({name for demand in demands for name, _ in demand.bundle})
        self.work = work
        selections = list(dict.fromkeys(demand.nodes for demand in demands))
        self._selection = {selection: number for number, selection in enumerate(selections)}
        self._accelerators = [self.names.index(name) for name in ACCELERATORS if name in self.names]
        self._amounts: dict[tuple[tuple[str, float], ...], Amounts] = {}
        self._capacity = [int(sum(node.total.get(name, 0.0) for name in ACCELERATORS)) for node in nodes]
        self._free_at_start = [self._in_units(resources) for resources in free]
        self._was_in_use = [
            any(free[index].get(name, 0.0) < node.total.get(name, 0.0) - 1e-6 for name in ACCELERATORS)
            for index, node in enumerate(nodes)
        ]
        self.met: list[Amounts]
        """For each node, which of the selections it is in."""
        if all(len(selection) == len(nodes) for selection in selections):
            self.met = [(1,) * len(selections)] * len(nodes)
        else:
            self.met = [tuple(int(index in selection) for selection in selections) for index in range(len(nodes))]
        self.free = self._free_at_start
        self._in_use = self._was_in_use
        at_start: defaultdict[Key, list[int]] = defaultdict(list)
        for index in range(len(nodes)):
            at_start[self._key(index)].append(index)
        self._at_start = dict(at_start)
        self.reset()

    def _in_units(self, resources: Mapping[str, float]) -> Amounts:
        return tuple(round(resources.get(name, 0.0) * _UNIT) for name in self.names)

    def amounts(self, demand: Demand) -> Amounts:
        """A bundle as whole numbers, in the order of ``names``."""
        found = self._amounts.get(demand.bundle)
        if found is None:
            found = self._amounts[demand.bundle] = self._in_units(dict(demand.bundle))
        return found

    def _key(self, index: int) -> Key:
        return self.free[index], self.met[index], self._capacity[index], self._in_use[index]

    def reset(self) -> None:
        """Take everything off again."""
        self.free = list(self._free_at_start)
        self._in_use = list(self._was_in_use)
        self._classes = {key: _Class(key, list(nodes)) for key, nodes in self._at_start.items()}

    # --- bounds -----------------------------------------------------------------------------------------------------

    def may_fit(self, demands: Iterable[Demand]) -> bool:
        """False when these demands can never be met, by counting alone: each kind of bundle by itself, the sum of each
        resource, and for each size how many pieces of it all nodes have and all bundles need."""
        self.reset()
        groups = list(self._classes.values())
        wanted: Counter[tuple[Amounts, frozenset[int], int]] = Counter()
        for demand in demands:
            wanted[self.amounts(demand), demand.nodes, demand.job if demand.apart else -1] += len(demand.replicas)
        for (amounts, nodes, apart), count in wanted.items():
            selection = self._selection[nodes]
            room = 0
            for group in groups:
                if group.met[selection]:
                    times = _times(group.free, amounts)
                    room += len(group.nodes) * (min(1, times) if apart >= 0 else times)
            if room < count:
                return False
        return all(self._may_fit_pieces(position, wanted, groups) for position in range(len(self.names)))

    def _may_fit_pieces(
        self, position: int, wanted: Mapping[tuple[Amounts, frozenset[int], int], int], groups: Sequence[_Class]
    ) -> bool:
        """A bundle of x has x // size whole pieces of a size, and no node gives more of them than it has itself."""
        needed, there = Counter[int](), Counter[int]()
        for (amounts, _, _), count in wanted.items():
            needed[amounts[position]] += count
        for group in groups:
            there[group.free[position]] += len(group.nodes)
        del needed[0]
        for size in (1, *sorted(needed, reverse=True)[:_MOST_SIZES]):
            if sum(x // size * n for x, n in needed.items()) > sum(max(0, x) // size * n for x, n in there.items()):
                return False
        return True

    # --- quick rules ------------------------------------------------------------------------------------------------

    def lay(self, jobs: Sequence[Job], way: Way, order: Sequence[int]) -> Placed | None:
        """Lay all jobs in this order; None when a bundle finds no place."""
        self.reset()
        placed: Placed = {}
        for job in order:
            demands = largest_first(demand for demand in way.demands if demand.job == job)
            spec = jobs[job].spec(0)
            if any(demand.num_parts > 1 for demand in demands):
                done = self._lay_parts(demands, placed)
            elif spec.node_packing != "pack":
                done = self._spread(demands, placed)
            elif spec.ray_placement_strategy == "shared":
                done = self._lay_group(demands, placed)
            else:
                done = all(self._lay_singly(demand, placed) for demand in demands)
            if not done:
                return None
        return placed

    def _fitting(self, demand: Demand, wanted: Amounts) -> list[_Class]:
        self.work.left -= len(self._classes)
        selection = self._selection[demand.nodes]
        return [group for group in self._classes.values() if group.met[selection] and _times(group.free, wanted)]

    def _put(self, demand: Demand, replicas: Sequence[int], index: int, placed: Placed) -> None:
        """Lay bundles of some replicas onto one node."""
        wanted, key = self.amounts(demand), self._key(index)
        group = self._classes[key]
        del group.nodes[bisect.bisect_left(group.nodes, index)]
        if not group.nodes:
            del self._classes[key]
        self.free[index] = tuple(free - len(replicas) * amount for free, amount in zip(group.free, wanted, strict=True))
        self._in_use[index] = self._in_use[index] or any(wanted[position] for position in self._accelerators)
        key = self._key(index)
        if key in self._classes:
            bisect.insort(self._classes[key].nodes, index)
        else:
            self._classes[key] = _Class(key, [index])
        for replica in replicas:
            placed[demand.job, replica, demand.part] = index
        self.work.left -= 1

    def _put_all(self, demand: Demand, chosen: Chosen, placed: Placed) -> None:
        replicas = iter(demand.replicas)
        for index, times in chosen:
            self._put(demand, list(itertools.islice(replicas, times)), index, placed)

    def _tightness(self, group: _Class, wanted: Amounts, num_devices: int) -> tuple[float, ...]:
        """What a single bundle prefers, least first."""
        left = [free - amount for free, amount in zip(group.free, wanted, strict=True)]
        rest = sum(left[position] / amount for position, amount in enumerate(wanted) if amount)
        if not num_devices:  # away from accelerators, whose nodes need their CPUs themselves
            return (group.capacity > 0, not group.in_use, rest)
        return (not group.in_use, sum(left[position] for position in self._accelerators), group.capacity, rest)

    def _lay_singly(self, demand: Demand, placed: Placed) -> bool:
        wanted, left = self.amounts(demand), len(demand.replicas)
        groups = self._fitting(demand, wanted)
        chosen: Chosen = []
        for _, index, group in _in_turn((self._tightness(each, wanted, demand.num_devices), each) for each in groups):
            if not left:
                break
            chosen.append((index, min(left, _times(group.free, wanted))))
            left -= chosen[-1][1]
        if left:
            return False
        self._put_all(demand, chosen, placed)
        return True

    def _lay_group(self, demands: Sequence[Demand], placed: Placed) -> bool:
        if len(demands) > 1 and self._lay_as_one(demands, placed):
            return True
        for demand in demands:
            chosen = self._few_nodes(demand, len(demand.replicas))
            if chosen is None:
                return False
            self._put_all(demand, chosen, placed)
        return True

    def _few_nodes(self, demand: Demand, count: int) -> Chosen | None:
        """As few nodes as possible: all on the tightest node that holds them, else the largest piece first."""
        wanted = self.amounts(demand)
        fitting = self._fitting(demand, wanted)
        chosen: Chosen = []
        if not demand.num_devices:  # nodes with accelerators only when the others are not enough
            count = self._choose_few([group for group in fitting if not group.capacity], wanted, count, chosen)
            fitting = [group for group in fitting if group.capacity]
        return chosen if self._choose_few(fitting, wanted, count, chosen) == 0 else None

    @staticmethod
    def _choose_few(groups: Sequence[_Class], wanted: Amounts, count: int, chosen: Chosen) -> int:
        """Returns how many bundles are left over."""
        times_of = {id(group): _times(group.free, wanted) for group in groups}
        for position, (_, index, group) in enumerate(
            _in_turn(((-times_of[id(each)], not each.in_use), each) for each in groups)
        ):
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

    def _lay_as_one(self, demands: Sequence[Demand], placed: Placed) -> bool:
        """A group of several specs as if all were of the commonest, so that all its ranks stand in the order of nodes."""
        common = max(demands, key=lambda demand: len(demand.replicas))
        chosen = self._few_nodes(common, sum(len(demand.replicas) for demand in demands))
        if chosen is None:
            return False
        ranks = sorted((replica, number) for number, demand in enumerate(demands) for replica in demand.replicas)
        slots = [index for index, times in sorted(chosen) for _ in range(times)]
        free = {index: list(self.free[index]) for index, _ in chosen}
        laid: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for (replica, number), index in zip(ranks, slots, strict=True):
            demand = demands[number]
            for position, amount in enumerate(self.amounts(demand)):
                free[index][position] -= amount
            if index not in demand.nodes or min(free[index]) < 0:
                return False
            laid[number, index].append(replica)
        for (number, index), replicas in laid.items():
            self._put(demands[number], replicas, index, placed)
        return True

    def _lay_parts(self, demands: Sequence[Demand], placed: Placed) -> bool:
        """Instances of several parts, each part on a node of its own."""
        used: set[int] = set()
        for head in demands:
            if head.part:
                continue
            parts = sorted((each for each in demands if each.replicas == head.replicas), key=lambda each: each.part)
            queues = {demand.bundle: _Queue(self, demand) for demand in parts}
            for replica in head.replicas:
                if not head.apart:
                    used = set()
                for demand in parts:
                    index = queues[demand.bundle].pop(used)
                    if index is None:
                        return False
                    used.add(index)
                    self._put(demand, [replica], index, placed)
                    for queue in queues.values():
                        queue.push(index)
                if not head.apart:
                    for queue in queues.values():
                        queue.restore()
        return True

    def _spread(self, demands: Sequence[Demand], placed: Placed) -> bool:
        """Round after round one bundle to each node, in order; workers without accelerators to nodes without them first."""
        load: Counter[int] = Counter()
        for demand in demands:
            wanted = self.amounts(demand)
            self.work.left -= len(demand.nodes)
            away = {index: not demand.num_devices and self._capacity[index] > 0 for index in demand.nodes}
            waiting = [(load[index], away[index], index) for index in demand.nodes if _times(self.free[index], wanted)]
            heapq.heapify(waiting)
            for replica in demand.replicas:
                if not waiting or (demand.apart and waiting[0][0]):
                    return False
                index = heapq.heappop(waiting)[2]
                self._put(demand, [replica], index, placed)
                load[index] += 1
                if _times(self.free[index], wanted):
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
            for group in packing._fitting(demand, self._wanted)
            for key in [packing._tightness(group, self._wanted, demand.num_devices)]
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
        if index in self._demand.nodes and _times(packing.free[index], self._wanted):
            group = packing._classes[packing._key(index)]
            key = packing._tightness(group, self._wanted, self._demand.num_devices)
            heapq.heappush(self._heap, (key, index, group.free))

    def restore(self) -> None:
        """The next instance may use again what the last one used."""
        for entry in self._aside:
            heapq.heappush(self._heap, entry)
        self._aside.clear()


def _in_turn(groups: Iterable[tuple[tuple[float, ...], _Class]]) -> Iterator[tuple[tuple[float, ...], int, _Class]]:
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


def _times(free: Amounts, wanted: Amounts) -> int:
    """How many such bundles fit."""
    times = min((have // amount for have, amount in zip(free, wanted, strict=True) if amount), default=0)
    return max(0, times)


def size_of(demand: Demand) -> tuple[float, ...]:
    """How large a bundle is, for comparison: accelerators first."""
    amounts = dict(demand.bundle)
    return (demand.num_devices, amounts.get("memory", 0.0) / 1e9 + amounts.get("CPU", 0.0), len(amounts))


def largest_first(demands: Iterable[Demand]) -> list[Demand]:
    """Demands by the size of their bundles."""
    return sorted(demands, key=size_of, reverse=True)
