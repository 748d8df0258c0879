"""The state of a cluster while bundles are laid onto it, and what can be told of it by counting. Pure.

Nodes that are alike (the same free resources, the same selectors met) are one class, and each demand looks at every class once,
so the work grows with classes, demands and bundles, never with their products; on clusters where each node is a class of its
own (their memory differs by a few bytes) it grows as nodes x demands. Amounts are whole numbers of 1/10,000, as in Ray.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from helmsman.controller._placement.bundles import Demand
from helmsman.controller._placement.resources import ACCELERATORS, Resources
from helmsman.controller._placement.snapshot import NodeState

_UNIT = 10_000
_WORK = 400_000
_MOST_SIZES = 16

Amounts = tuple[int, ...]
Placed = dict[tuple[int, int, int], int]
"""(job, replica, part) -> index of a node."""
Key = tuple[Amounts, Amounts, int, bool]


class Work:
    """How much trying is left: a limit in nodes and classes looked at, about a second in all."""

    def __init__(self, left: int = _WORK) -> None:
        self.left = left


class Class:
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
        self.capacity = [int(sum(node.total.get(name, 0.0) for name in ACCELERATORS)) for node in nodes]
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

    def class_of(self, index: int) -> Class:
        """The class of a node as it is now."""
        return self._classes[self._key(index)]

    def _key(self, index: int) -> Key:
        return self.free[index], self.met[index], self.capacity[index], self._in_use[index]

    def reset(self) -> None:
        """Take everything off again."""
        self.free = list(self._free_at_start)
        self._in_use = list(self._was_in_use)
        self._classes = {key: Class(key, list(nodes)) for key, nodes in self._at_start.items()}

    # --- bounds -----------------------------------------------------------------------------------------------------

    def may_fit(self, demands: Iterable[Demand]) -> bool:
        """False when these demands can never be met, by counting alone: each kind of bundle by itself, the sum of each
        resource, and for each size how many pieces of it all nodes have and all bundles need."""
        self.reset()
        groups = list(self._classes.values())
        wanted: Counter[tuple[Amounts, frozenset[int], int]] = Counter()
        for demand in demands:
            wanted[self.amounts(demand), demand.nodes, demand.job if demand.apart else -1] += len(demand.replicas)
        if any(self._room(amounts, nodes, apart >= 0) < count for (amounts, nodes, apart), count in wanted.items()):
            return False
        return all(self._may_fit_pieces(position, wanted, groups) for position in range(len(self.names)))

    def room(self, demand: Demand) -> int:
        """How many such bundles alone fit into what is free now."""
        return self._room(self.amounts(demand), demand.nodes, demand.apart)

    def _room(self, wanted: Amounts, nodes: frozenset[int], apart: bool) -> int:
        selection, room = self._selection[nodes], 0
        for group in self._classes.values():
            if group.met[selection]:
                times = times_in(group.free, wanted)
                room += len(group.nodes) * (min(1, times) if apart else times)
        return room

    def _may_fit_pieces(
        self, position: int, wanted: Mapping[tuple[Amounts, frozenset[int], int], int], groups: Sequence[Class]
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

    # --- use --------------------------------------------------------------------------------------------------------

    def fitting(self, demand: Demand) -> list[Class]:
        """Classes of nodes onto which a bundle fits."""
        wanted = self.amounts(demand)
        self.work.left -= len(self._classes)
        selection = self._selection[demand.nodes]
        return [group for group in self._classes.values() if group.met[selection] and times_in(group.free, wanted)]

    def put(self, demand: Demand, replicas: Sequence[int], index: int, placed: Placed) -> None:
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
            self._classes[key] = Class(key, [index])
        for replica in replicas:
            placed[demand.job, replica, demand.part] = index
        self.work.left -= 1

    def tightness(self, group: Class, demand: Demand) -> tuple[float, ...]:
        """What a single bundle prefers, least first."""
        wanted = self.amounts(demand)
        left = [free - amount for free, amount in zip(group.free, wanted, strict=True)]
        rest = sum(left[position] / amount for position, amount in enumerate(wanted) if amount)
        if not demand.num_devices:  # away from accelerators, whose nodes need their CPUs themselves
            return (group.capacity > 0, not group.in_use, rest)
        return (not group.in_use, sum(left[position] for position in self._accelerators), group.capacity, rest)


def times_in(free: Amounts, wanted: Amounts) -> int:
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
