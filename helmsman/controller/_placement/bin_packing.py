"""Bin packing of bundles onto nodes: counting bounds, heuristics and a bounded search.

The heuristics keep whole nodes free: a bundle goes to the used node that it fills best, and a group
of bundles takes as few nodes as possible. Vector bin packing is NP-hard, so the search is complete
only for small inputs.

Nodes with equal free resources that match the same selectors form one class. Each demand visits
every class once, so work grows with the number of classes, demands and bundles, not with their
products. If each node is its own class (e.g. memory differs by a few bytes), work grows as
nodes x demands. Amounts are integers in units of 1/10,000, as in Ray.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat

from helmsman.api.scheduler import Job
from helmsman.controller._placement.bundles import Demand, Split, by_instance
from helmsman.controller._placement.resources import ACCELERATORS, NodeState, Resources

WORK = 400_000
"""Default limit on visited nodes and classes per plan: about a second."""
_UNIT = 10_000
_MAX_SIZES = 16
_MAX_SEARCHED = 400
"""Maximum number of bundles in a search; each is a level of the recursion."""

Amounts = tuple[int, ...]
Placed = dict[tuple[int, int, int], int]
"""(job, replica, part) -> index of a node."""


@dataclasses.dataclass(slots=True, eq=False)
class NodeClass:
    free: Amounts
    selections: Amounts
    """For each node selection, 1 if it contains these nodes."""
    capacity: int
    """Accelerators per node, free or not."""
    in_use: bool
    """Whether some accelerators of these nodes are held."""
    nodes: list[int] = dataclasses.field(default_factory=list)


class Packing:
    """The state of a cluster while bundles are placed on it.

    Args:
        nodes: Nodes of the cluster.
        free: Free resources of each node.
        demands: All demands that may be placed; they determine the relevant resources and
            selectors.
        work: Limit on visited nodes and classes; the attribute ``work`` holds the remainder.
    """

    def __init__(
        self,
        nodes: Sequence[NodeState],
        free: Sequence[Resources],
        demands: Sequence[Demand],
        work: int = WORK,
    ) -> None:
        self.names = sorted({name for demand in demands for name, _ in demand.bundle})
        self.work = work
        selections = list(dict.fromkeys(demand.nodes for demand in demands))
        self._selection = {selection: number for number, selection in enumerate(selections)}
        self._accelerators = [self.names.index(name) for name in ACCELERATORS if name in self.names]
        self._amounts: dict[tuple[tuple[str, float], ...], Amounts] = {}
        self._capacity = [
            int(sum(node.total.get(name, 0.0) for name in ACCELERATORS)) for node in nodes
        ]
        self._free_at_start = [self._in_units(resources) for resources in free]
        self._in_use_at_start = [
            any(
                resources.get(name, 0.0) < node.total.get(name, 0.0) - 1e-6 for name in ACCELERATORS
            )
            for node, resources in zip(nodes, free, strict=True)
        ]
        everywhere = (
            (1,) * len(selections)
            if all(len(selection) == len(nodes) for selection in selections)
            else None
        )
        self.selections: list[Amounts] = [
            everywhere or tuple(int(index in selection) for selection in selections)
            for index in range(len(nodes))
        ]
        self.reset()

    def _in_units(self, resources: Mapping[str, float]) -> Amounts:
        return tuple(round(resources.get(name, 0.0) * _UNIT) for name in self.names)

    def amounts(self, demand: Demand) -> Amounts:
        found = self._amounts.get(demand.bundle)
        if found is None:
            found = self._amounts[demand.bundle] = self._in_units(dict(demand.bundle))
        return found

    def reset(self) -> None:
        self.free = list(self._free_at_start)
        self._in_use = list(self._in_use_at_start)
        self._classes: dict[tuple[Amounts, Amounts, int, bool], NodeClass] = {}
        for index in range(len(self.free)):
            self.class_of(index).nodes.append(index)

    def class_of(self, index: int) -> NodeClass:
        key = self.free[index], self.selections[index], self._capacity[index], self._in_use[index]
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = NodeClass(*key)
        return found

    # --- bounds -----------------------------------------------------------------------------------

    def may_fit(self, demands: Sequence[Demand]) -> bool:
        """Return False if counting proves that the demands do not fit into the free resources.

        Counts the places for each demand, the sum of each resource and, for each bundle size, the
        pieces of that size on all nodes and in all bundles.
        """
        if any(self.room(demand) < len(demand.replicas) for demand in demands):
            return False
        for position in range(len(self.names)):
            needed, there = Counter[int](), Counter[int]()
            for demand in demands:
                needed[self.amounts(demand)[position]] += len(demand.replicas)
            for group in self._classes.values():
                there[max(0, group.free[position])] += len(group.nodes)
            for size in (1, *sorted(needed, reverse=True)[:_MAX_SIZES]):
                if size and sum(x // size * n for x, n in needed.items()) > sum(
                    x // size * n for x, n in there.items()
                ):
                    return False
        return True

    def room(self, demand: Demand) -> int:
        """Return how many such bundles alone fit into the free resources."""
        wanted, selection, room = self.amounts(demand), self._selection[demand.nodes], 0
        for group in self._classes.values():
            if group.selections[selection]:
                times = times_in(group.free, wanted)
                room += len(group.nodes) * (min(1, times) if demand.apart else times)
        return room

    # --- use --------------------------------------------------------------------------------------

    def fitting(self, demand: Demand) -> list[NodeClass]:
        wanted = self.amounts(demand)
        self.work -= len(self._classes)
        selection = self._selection[demand.nodes]
        return [
            group
            for group in self._classes.values()
            if group.selections[selection] and times_in(group.free, wanted)
        ]

    def put(self, demand: Demand, replicas: Sequence[int], index: int, placed: Placed) -> None:
        wanted, group = self.amounts(demand), self.class_of(index)
        del group.nodes[bisect.bisect_left(group.nodes, index)]
        if not group.nodes:
            del self._classes[group.free, group.selections, group.capacity, group.in_use]
        self.free[index] = tuple(
            free - len(replicas) * amount for free, amount in zip(group.free, wanted, strict=True)
        )
        self._in_use[index] = group.in_use or any(
            wanted[position] for position in self._accelerators
        )
        bisect.insort(self.class_of(index).nodes, index)
        for replica in replicas:
            placed[demand.job, replica, demand.part] = index
        self.work -= 1

    def tightness(self, group: NodeClass, demand: Demand) -> tuple[float, ...]:
        """Return the sort key of nodes for a single bundle; the smallest is best."""
        wanted = self.amounts(demand)
        left = [free - amount for free, amount in zip(group.free, wanted, strict=True)]
        rest = sum(left[position] / amount for position, amount in enumerate(wanted) if amount)
        if not demand.num_devices:
            # Avoid nodes with accelerators, whose workers need their CPUs.
            return (group.capacity > 0, not group.in_use, rest)
        return (
            not group.in_use,
            sum(left[position] for position in self._accelerators),
            group.capacity,
            rest,
        )


def times_in(free: Amounts, wanted: Amounts) -> int:
    """Return how many bundles fit into the free resources."""
    return max(
        0,
        min(
            (have // amount for have, amount in zip(free, wanted, strict=True) if amount), default=0
        ),
    )


def _size(demand: Demand) -> tuple[float, ...]:
    """Return the sort key of a bundle's size: accelerators first."""
    amounts = dict(demand.bundle)
    return (
        demand.num_devices,
        amounts.get("memory", 0.0) / 1e9 + amounts.get("CPU", 0.0),
        len(amounts),
    )


def _largest_first(demands: Iterable[Demand]) -> list[Demand]:
    return sorted(demands, key=_size, reverse=True)


# --- quick rules ----------------------------------------------------------------------------------


def orders(jobs: Sequence[Job], split: Split) -> list[tuple[int, ...]]:
    """Return the job orders to try; by several measures, the most constrained jobs come first."""
    demands = [split.of_job(index) for index in range(len(jobs))]
    sizes = [[-amount for amount in max(map(_size, own))] for own in demands]
    num_nodes = [min(len(demand.nodes) for demand in own) for own in demands]
    num_cpus = [max(dict(demand.bundle).get("CPU", 0.0) for demand in own) for own in demands]
    measures: list[Callable[[int], tuple[float, ...]]] = [
        lambda job: (not sizes[job][0], num_nodes[job], *sizes[job]),
        lambda job: (num_nodes[job], *sizes[job]),
        lambda job: tuple(sizes[job]),
        lambda job: (
            -sum(len(demand.replicas) * demand.num_devices for demand in demands[job]),
            num_nodes[job],
        ),
        lambda job: (-num_cpus[job], num_nodes[job]),
    ]
    return list(dict.fromkeys(tuple(sorted(range(len(jobs)), key=measure)) for measure in measures))


def pack(
    packing: Packing, jobs: Sequence[Job], split: Split, order: Sequence[int]
) -> Placed | None:
    """Place all jobs in this order by the heuristics; None if a bundle does not fit."""
    placed: Placed = {}
    for index in order:
        own, spec = split.of_job(index), jobs[index].spec(0)
        in_parts = any(demand.num_parts > 1 for demand in own)
        if in_parts or spec.node_packing != "pack":
            done = _put_one_by_one(packing, own, placed, spread=not in_parts)
        elif spec.ray_placement_strategy == "shared":
            done = (len(own) > 1 and _put_in_rank_order(packing, own, placed)) or _put_each(
                packing, own, placed, together=True
            )
        else:
            done = _put_each(packing, own, placed, together=False)
        if not done:
            packing.reset()
            return None
    return placed


def _put_each(packing: Packing, demands: Iterable[Demand], placed: Placed, together: bool) -> bool:
    for demand in _largest_first(demands):
        chosen = _choose(packing, demand, len(demand.replicas), together)
        if chosen is None:
            return False
        replicas = iter(demand.replicas)
        for index, times in chosen:
            packing.put(demand, list(itertools.islice(replicas, times)), index, placed)
    return True


def _choose(
    packing: Packing, demand: Demand, count: int, together: bool
) -> list[tuple[int, int]] | None:
    """Return (node index, number of bundles) pairs for ``count`` bundles; None if they do not fit.

    With ``together``, take as few nodes as possible: the roomiest nodes first, and the tightest
    sufficient node for the rest. Otherwise take the tightest nodes first.
    """
    wanted = packing.amounts(demand)
    groups = []
    for number, group in enumerate(packing.fitting(demand)):
        times, away = times_in(group.free, wanted), not demand.num_devices and group.capacity > 0
        key = (away, -times, not group.in_use) if together else packing.tightness(group, demand)
        groups.append((key, group.nodes, times, number))
    chosen: dict[int, int] = {}
    for key, index, _, times in heapq.merge(
        *(zip(repeat(k), nodes, repeat(n), repeat(t)) for k, nodes, t, n in groups)
    ):
        if count <= times and together:  # the tightest of the nodes that hold the rest
            index = min(
                (room, other[2], node)
                for other, nodes, room, _ in groups
                if room >= count and other[0] == key[0]
                for node in itertools.islice((node for node in nodes if node not in chosen), 1)
            )[2]
        chosen[index] = min(count, times)
        count -= chosen[index]
        if not count:
            return list(chosen.items())
    return None


def _put_in_rank_order(packing: Packing, demands: Sequence[Demand], placed: Placed) -> bool:
    """Place a group as if all had the most common spec, so that adjacent ranks share nodes."""
    common = max(demands, key=lambda demand: len(demand.replicas))
    chosen = _choose(
        packing, common, sum(len(demand.replicas) for demand in demands), together=True
    )
    ranks = sorted(
        (replica, number) for number, demand in enumerate(demands) for replica in demand.replicas
    )
    slots = (index for index, times in sorted(chosen or ()) for _ in range(times))
    free = {index: list(packing.free[index]) for index, _ in chosen or ()}
    replicas_of: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for (replica, number), index in zip(ranks, slots, strict=False):
        for position, amount in enumerate(packing.amounts(demands[number])):
            free[index][position] -= amount
        if index not in demands[number].nodes or min(free[index]) < 0:
            return False
        replicas_of[number, index].append(replica)
    for (number, index), replicas in replicas_of.items():
        packing.put(demands[number], replicas, index, placed)
    return chosen is not None


def _put_one_by_one(
    packing: Packing, demands: Sequence[Demand], placed: Placed, spread: bool
) -> bool:
    """Place the bundles one at a time, each on the node that is best at that moment.

    A spread job prefers nodes with few of its own bundles; other jobs prefer the tightest nodes.
    The parts of an instance, and all bundles of a strictly spread job, go to different nodes.
    """
    load = Counter[int]()
    for parts in sorted(by_instance(demands), key=lambda parts: _size(parts[0]), reverse=True):
        queues = {demand.bundle: _Queue(packing, demand, load, spread) for demand in parts}
        for replica in parts[0].replicas:
            used = []
            for demand in parts:
                index = queues[demand.bundle].pop()
                if index is None:
                    return False
                packing.put(demand, [replica], index, placed)
                load[index] += 1
                used.append(index)
            if not parts[0].apart:
                for queue in queues.values():
                    queue.push(used)
    return True


class _Queue:
    """Priority queue of the nodes with room for a bundle, updated as they fill up.

    With ``spread``, the nodes with the fewest bundles of the job (``load``) are best; otherwise the
    tightest nodes.
    """

    def __init__(self, packing: Packing, demand: Demand, load: Counter[int], spread: bool) -> None:
        self._packing = packing
        self._demand = demand
        self._wanted = packing.amounts(demand)
        self._load = load
        self._spread = spread
        self._heap: list[tuple[tuple[float, ...], int, Amounts]] = []
        for group in packing.fitting(demand):
            # Tightness is the same for all nodes of a class.
            tightness = () if spread else packing.tightness(group, demand)
            nodes = (index for index in group.nodes if not (demand.apart and load[index]))
            self._heap += [
                (tightness or self._key(group, index), index, group.free) for index in nodes
            ]
        heapq.heapify(self._heap)

    def _key(self, group: NodeClass, index: int) -> tuple[float, ...]:
        if not self._spread:
            return self._packing.tightness(group, self._demand)
        return self._load[index], not self._demand.num_devices and group.capacity > 0

    def pop(self) -> int | None:
        """Remove and return the best node; it stays out until it is pushed again."""
        while self._heap:
            _, index, free = heapq.heappop(self._heap)
            if free == self._packing.free[index]:  # otherwise another queue has used the node
                return index
        return None

    def push(self, indexes: Iterable[int]) -> None:
        """Add nodes again after their free resources have changed."""
        for index in indexes:
            if times_in(self._packing.free[index], self._wanted):
                group = self._packing.class_of(index)
                heapq.heappush(self._heap, (self._key(group, index), index, group.free))


# --- search ---------------------------------------------------------------------------------------


def search(packing: Packing, split: Split, work: int) -> Placed | None:
    """Place bundles depth first, largest first, trying one node of each class.

    Work is charged to the packing.

    Returns:
        The places, or None if there are none or ``work`` is exhausted.
    """
    items = [
        (packing.amounts(demand), demand, replica)
        for demand in _largest_first(split.demands)
        for replica in demand.replicas
    ]
    if len(items) > _MAX_SEARCHED:
        return None
    free = list(packing.free)
    used: list[set[tuple[int, int]]] = [set() for _ in free]
    """Bundles of which a node may hold only one: (job, replica) for instances in parts, (job, -1)
    for strictly spread jobs.
    """
    chosen: list[int] = []
    until = packing.work - work

    def place(at: int) -> bool:
        if at == len(items):
            return True
        wanted, demand, replica = items[at]
        mark = (
            {(demand.job, -1 if demand.apart else replica)}
            if demand.apart or demand.num_parts > 1
            else set()
        )
        # Identical bundles are placed in node order, since all permutations are the same plan.
        first = chosen[-1] if at and items[at - 1][1] is demand and demand.num_parts == 1 else 0
        tried = set()
        for index in range(first, len(free)):
            packing.work -= 1
            if packing.work < until:
                return False
            if (
                index not in demand.nodes
                or mark & used[index]
                or any(map(operator.gt, wanted, free[index]))
            ):
                continue
            alike = (free[index], packing.selections[index], frozenset(used[index]))
            if alike in tried:
                continue
            tried.add(alike)
            before = free[index]
            free[index] = tuple(map(operator.sub, before, wanted))
            used[index] |= mark
            chosen.append(index)
            if place(at + 1):
                return True
            chosen.pop()
            used[index] -= mark
            free[index] = before
        return False

    if not place(0):
        return None
    return {
        (demand.job, replica, demand.part): index
        for (_, demand, replica), index in zip(items, chosen, strict=True)
    }
