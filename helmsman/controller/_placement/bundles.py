"""What jobs ask of a cluster: the bundles of each instance, and the nodes on which they may lie. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence

import msgspec

from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._placement.resources import ACCELERATORS, Resources
from helmsman.controller._placement.snapshot import NodeState

_TRACE = 0.001
"""CPU of a bundle that asks for nothing, since Ray has no empty ones."""
_TYPE_LABEL = "ray.io/accelerator-type"
_MAX_SPLITS = 6
_MAX_WAYS = 64


class Demand(msgspec.Struct, frozen=True):
    """A number of bundles that are alike."""

    job: int
    """Index of the job."""
    replicas: tuple[int, ...]
    """Replica of each bundle, in rank order."""
    part: int
    """Which bundle of its instance this is; the worker is in part 0."""
    bundle: tuple[tuple[str, float], ...]
    """Resources by Ray's names, none of them zero."""
    nodes: frozenset[int]
    """Indexes of the nodes that the selectors allow."""
    num_devices: int
    num_parts: int
    """Bundles of each instance, which lie on nodes of their own."""
    apart: bool
    """Whether no two bundles of the job may lie on one node."""


class Way(msgspec.Struct, frozen=True):
    """One way in which jobs can be cut into bundles."""

    kinds: tuple[str, ...]
    """Accelerators of each job; '' where it asks for none."""
    demands: tuple[Demand, ...]


def bundle_of(spec: SchedulingSpec, kind: str, num_devices: float) -> Resources:
    """What a worker reserves with ``num_devices`` accelerators of a kind."""
    wanted = {"CPU": spec.cpu, kind: num_devices, "memory": spec.mem * 1e9, **spec.resources}
    return {name: amount for name, amount in wanted.items() if amount} or {"CPU": _TRACE}


def ways(jobs: Sequence[Job], nodes: Sequence[NodeState]) -> Iterator[Way]:
    """The ways in which these jobs can be cut into bundles, preferred ones first; at most 64 of them."""
    allowed: dict[Hashable, frozenset[int]] = {}
    groups = [_alike(job, nodes, allowed) for job in jobs]
    choices = [_choices(job, nodes, groups[index]) for index, job in enumerate(jobs)]
    for way in itertools.islice(itertools.product(*choices), _MAX_WAYS):
        demands = [
            demand
            for index, (job, (kind, number)) in enumerate(zip(jobs, way, strict=True))
            for demand in _demands(index, job, kind, number, nodes, groups[index])
        ]
        yield Way(tuple(kind for kind, _ in way), tuple(demands))


class _Alike(msgspec.Struct, frozen=True):
    """Replicas of a job that may lie in each other's place."""

    spec: SchedulingSpec
    replicas: tuple[int, ...]
    nodes: frozenset[int]
    """Indexes of the nodes that the selectors allow."""


def _alike(job: Job, nodes: Sequence[NodeState], allowed: dict[Hashable, frozenset[int]]) -> list[_Alike]:
    """The replicas of a job by what matters for their place; environment, ports and command do not."""
    found: dict[Hashable, list[int]] = {}
    if len(job.tasks) == 1:
        found[_needs(job.spec(0))] = list(range(job.replicas))
    else:
        for replica, spec in enumerate(job.tasks):
            found.setdefault(_needs(spec), []).append(replica)
    groups = []
    for replicas in found.values():
        spec = job.spec(replicas[0])
        selector = _selector(spec)
        if selector not in allowed:
            allowed[selector] = allowed_nodes(spec, nodes)
        groups.append(_Alike(spec, tuple(replicas), allowed[selector]))
    return groups


def _needs(spec: SchedulingSpec) -> Hashable:
    return spec.cpu, spec.gpu, spec.mem, tuple(sorted(spec.resources.items())), _selector(spec)


def _selector(spec: SchedulingSpec) -> Hashable:
    return tuple(spec.nodelist), tuple(spec.exclude), tuple(sorted(spec.node_labels.items())), spec.accelerator_type


def _choices(job: Job, nodes: Sequence[NodeState], groups: Sequence[_Alike]) -> list[tuple[str, int]]:
    """(kind of accelerators, number of the way to cut instances) that a job may choose from."""
    if not any(spec.gpu for spec in job.tasks):
        return [("", 0)]
    some = frozenset().union(*(group.nodes for group in groups))
    kinds = [kind for kind in ACCELERATORS if any(nodes[index].total.get(kind) for index in some)] or list(ACCELERATORS[:1])
    if job.spec(0).ray_placement_strategy != "deferred":
        return [(kind, 0) for kind in kinds]
    return [
        (kind, number)
        for kind in kinds
        for number in range(max(len(_splits(int(group.spec.gpu), kind, nodes, some)) for group in groups))
    ]


def _splits(num_devices: int, kind: str, nodes: Sequence[NodeState], allowed: frozenset[int]) -> list[tuple[int, ...]]:
    """Ways to cut an instance into parts, each on a node of its own: on as few nodes as possible, in equal parts if they can
    be, else in whole nodes and a rest. What fits one node is not cut."""
    largest = int(max((nodes[index].total.get(kind, 0.0) for index in allowed), default=0.0))
    if not largest or num_devices <= largest:
        return [(num_devices,)]
    fewest = -(-num_devices // largest)
    most = min(num_devices, len(allowed))
    equal = [(num_devices // count,) * count for count in range(fewest, most + 1) if num_devices % count == 0]
    whole = (largest,) * (num_devices // largest)
    rest = (num_devices % largest,) if num_devices % largest else ()
    return list(dict.fromkeys([*equal[:_MAX_SPLITS], whole + rest]))


def _demands(
    index: int, job: Job, kind: str, number: int, nodes: Sequence[NodeState], groups: Sequence[_Alike]
) -> Iterator[Demand]:
    apart = job.spec(0).node_packing == "strict_spread"
    some = frozenset().union(*(group.nodes for group in groups))
    for group in groups:
        spec = group.spec
        sizes: tuple[int, ...] = (int(spec.gpu),)
        if kind and job.spec(0).ray_placement_strategy == "deferred":
            splits = _splits(int(spec.gpu), kind, nodes, some)
            sizes = splits[min(number, len(splits) - 1)]
        for part, size in enumerate(sizes):
            bundle = bundle_of(spec, kind, size) if part == 0 else {kind: float(size)}
            yield Demand(index, group.replicas, part, tuple(bundle.items()), group.nodes, size, len(sizes), apart)


# --- selectors ----------------------------------------------------------------------------------------------------------


def allowed_nodes(spec: SchedulingSpec, nodes: Sequence[NodeState]) -> frozenset[int]:
    """Indexes of the nodes that a spec's selectors allow."""
    if not (spec.nodelist or spec.exclude or spec.node_labels or spec.accelerator_type):
        return frozenset(range(len(nodes)))
    use, avoid = set(spec.nodelist), set(spec.exclude)
    return frozenset(index for index, node in enumerate(nodes) if _is_allowed(spec, node, use, avoid))


def _is_allowed(spec: SchedulingSpec, node: NodeState, use: set[str], avoid: set[str]) -> bool:
    names = {node.node_id, node.address, node.hostname, node.hostname.partition(".")[0]} - {""}
    if (use and not names & use) or names & avoid:
        return False
    if spec.accelerator_type and not has_accelerator_type(node, spec.accelerator_type):
        return False
    return has_labels(node.labels, spec.node_labels)


def has_accelerator_type(node: NodeState, wanted: str) -> bool:
    """Whether a node's accelerators are of a model, by its label or by the resource that Ray gives it."""
    return node.labels.get(_TYPE_LABEL) == wanted or f"accelerator_type:{wanted}" in node.total


def accelerator_types(nodes: Sequence[NodeState]) -> list[str]:
    """The models there are."""
    found = {node.labels.get(_TYPE_LABEL, "") for node in nodes}
    found |= {name.partition(":")[2] for node in nodes for name in node.total if name.startswith("accelerator_type:")}
    return sorted(found - {""})


def has_labels(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node's labels meet a selector: 'x', '!x', 'in(x, y)' or '!in(x, y)' for each key, as Ray reads them."""
    return all(_meets(labels.get(key), wanted) for key, wanted in selector.items())


def _meets(value: str | None, wanted: str) -> bool:
    negated, text = wanted.startswith("!"), wanted.removeprefix("!").strip()
    match = re.fullmatch(r"in\((.*)\)", text)
    values = [part.strip() for part in match.group(1).split(",")] if match else [text]
    return (value in values) is not negated
