"""Resource bundles of jobs, their allowed nodes, and ways to split instances into parts."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._placement.resources import ACCELERATORS, NodeState, Resources

_TRACE = 0.001
"""CPU of a bundle that requests nothing, because Ray rejects empty bundles."""
_TYPE_LABEL = "ray.io/accelerator-type"
_MAX_EQUAL_CUTS = 6
_MAX_SPLITS = 64


class Demand(msgspec.Struct, frozen=True):
    job: int
    replicas: tuple[int, ...]
    """Replica of each bundle, in rank order."""
    part: int
    """Index of the bundle in its instance; the worker runs in part 0."""
    bundle: tuple[tuple[str, float], ...]
    """Non-zero resources by Ray's names."""
    nodes: frozenset[int]
    """Indexes of the nodes that the selectors allow."""
    num_devices: int
    num_parts: int
    """Number of bundles per instance; each part needs its own node."""
    apart: bool
    """Whether every bundle of the job needs its own node."""


class Split(msgspec.Struct, frozen=True):
    kinds: tuple[str, ...]
    """Accelerator resource of each job; '' for a job without accelerators."""
    demands: tuple[Demand, ...]

    def of_job(self, index: int) -> list[Demand]:
        return [demand for demand in self.demands if demand.job == index]


def by_instance(demands: Iterable[Demand]) -> list[list[Demand]]:
    """Group the demands of one job by replicas; a group lists an instance's parts in order."""
    found: defaultdict[tuple[int, ...], list[Demand]] = defaultdict(list)
    for demand in demands:
        found[demand.replicas].append(demand)
    return list(found.values())


def change_specs(job: Job, **fields: Any) -> Job:
    return msgspec.structs.replace(
        job, tasks=[msgspec.structs.replace(spec, **fields) for spec in job.tasks]
    )


def splits(jobs: Sequence[Job], nodes: Sequence[NodeState]) -> Iterator[Split]:
    """Yield up to 64 ways to split these jobs into bundles, preferred ones first."""
    allowed: dict[Hashable, frozenset[int]] = {}
    choices = [list(_choices(index, job, nodes, allowed)) for index, job in enumerate(jobs)]
    for chosen in itertools.islice(itertools.product(*choices), _MAX_SPLITS):
        yield Split(
            tuple(kind for kind, _ in chosen),
            tuple(demand for _, demands in chosen for demand in demands),
        )


def _choices(
    index: int, job: Job, nodes: Sequence[NodeState], allowed: dict[Hashable, frozenset[int]]
) -> Iterator[tuple[str, list[Demand]]]:
    """Yield (accelerator resource, demands) for each way to split one job."""
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    """Replicas that differ only in environment, ports and command."""
    for replica, spec in enumerate(job.tasks):
        groups[
            spec.cpu, spec.gpu, spec.mem, tuple(sorted(spec.resources.items())), _selector(spec)
        ].append(replica)
    alike = (
        [tuple(replicas) for replicas in groups.values()]
        if len(job.tasks) > 1
        else [tuple(range(job.replicas))]
    )
    specs = [job.spec(replicas[0]) for replicas in alike]
    for spec in specs:
        if _selector(spec) not in allowed:
            allowed[_selector(spec)] = allowed_nodes(spec, nodes)
    some = frozenset().union(*(allowed[_selector(spec)] for spec in specs))
    kinds = [
        kind for kind in ACCELERATORS if any(nodes[node].total.get(kind) for node in some)
    ] or list(ACCELERATORS[:1])
    first = job.spec(0)
    for kind in kinds if any(spec.gpu for spec in specs) else [""]:
        cuts: list[list[tuple[int, ...]]] = [[(int(spec.gpu),)] for spec in specs]
        if kind and first.ray_placement_strategy == "deferred":
            cuts = [_cuts(int(spec.gpu), kind, nodes, some) for spec in specs]
        for number in range(max(map(len, cuts))):
            yield (
                kind,
                [
                    Demand(
                        job=index,
                        replicas=replicas,
                        part=part,
                        bundle=tuple(
                            (
                                _bundle(spec, kind, size) if part == 0 else {kind: float(size)}
                            ).items()
                        ),
                        nodes=allowed[_selector(spec)],
                        num_devices=size,
                        num_parts=len(sizes),
                        apart=first.node_packing == "strict_spread",
                    )
                    for spec, replicas, own in zip(specs, alike, cuts, strict=True)
                    for sizes in [own[min(number, len(own) - 1)]]
                    for part, size in enumerate(sizes)
                ],
            )


def _bundle(spec: SchedulingSpec, kind: str, num_devices: float) -> Resources:
    wanted = {"CPU": spec.cpu, kind: num_devices, "memory": spec.mem * 1e9, **spec.resources}
    return {name: amount for name, amount in wanted.items() if amount} or {"CPU": _TRACE}


def _cuts(
    num_devices: int, kind: str, nodes: Sequence[NodeState], allowed: frozenset[int]
) -> list[tuple[int, ...]]:
    """Return the ways to split an instance, each as a tuple of device counts per part.

    An instance that fits one node is not split. A larger one is split into equal parts, fewest
    nodes first, or else into whole nodes and a remainder.
    """
    largest = int(max((nodes[index].total.get(kind, 0.0) for index in allowed), default=0.0))
    if not largest or num_devices <= largest:
        return [(num_devices,)]
    counts = range(-(-num_devices // largest), min(num_devices, len(allowed)) + 1)
    equal = [(num_devices // count,) * count for count in counts if num_devices % count == 0]
    whole, rest = divmod(num_devices, largest)
    return list(
        dict.fromkeys([*equal[:_MAX_EQUAL_CUTS], (largest,) * whole + ((rest,) if rest else ())])
    )


def _selector(spec: SchedulingSpec) -> Hashable:
    return (
        tuple(spec.nodelist),
        tuple(spec.exclude),
        tuple(sorted(spec.node_labels.items())),
        spec.accelerator_type,
    )


def allowed_nodes(spec: SchedulingSpec, nodes: Sequence[NodeState]) -> frozenset[int]:
    if not (spec.nodelist or spec.exclude or spec.node_labels or spec.accelerator_type):
        return frozenset(range(len(nodes)))
    use, avoid = set(spec.nodelist), set(spec.exclude)
    return frozenset(
        index for index, node in enumerate(nodes) if _is_allowed(spec, node, use, avoid)
    )


def _is_allowed(spec: SchedulingSpec, node: NodeState, use: set[str], avoid: set[str]) -> bool:
    names = {node.node_id, node.address, node.hostname, node.hostname.partition(".")[0]} - {""}
    if (use and not names & use) or names & avoid:
        return False
    if spec.accelerator_type and spec.accelerator_type not in accelerator_types([node]):
        return False
    return all(_meets(node.labels.get(key), wanted) for key, wanted in spec.node_labels.items())


def accelerator_types(nodes: Iterable[NodeState]) -> list[str]:
    """Return the nodes' accelerator models, from their labels or Ray's derived resources."""
    found = {node.labels.get(_TYPE_LABEL, "") for node in nodes}
    found |= {
        name.partition(":")[2]
        for node in nodes
        for name in node.total
        if name.startswith("accelerator_type:")
    }
    return sorted(found - {""})


def _meets(value: str | None, wanted: str) -> bool:
    """Match a label with Ray's selector syntax: 'x', '!x', 'in(x, y)' or '!in(x, y)'."""
    negated, text = wanted.startswith("!"), wanted.removeprefix("!").strip()
    match = re.fullmatch(r"in\((.*)\)", text)
    values = [part.strip() for part in match.group(1).split(",")] if match else [text]
    return (value in values) is not negated
