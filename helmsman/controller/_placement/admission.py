"""Reject jobs that cannot be placed and find the smallest change that makes them fit."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from helmsman._base.event_loop import Deadline
from helmsman.api import errors
from helmsman.api.plan import Plan, PlannedRole, Shortfall
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._placement.bundles import allowed_nodes, change_specs
from helmsman.controller._placement.planner import node_name, plan_jobs
from helmsman.controller._placement.resources import (
    ACCELERATORS,
    ClusterSnapshot,
    NodeState,
    Resources,
    field_of,
    show,
    total_of,
)

_WORK = 100_000
"""Work limit of one trial plan; advice may need dozens of trials."""
_MAX_NODES = 4096
_MAX_CUTS = 8
_UNIQUE = ("node:", "ray.io/node-id")
"""Prefixes of resources and labels that are unique to one node."""


def require_feasible(
    snapshot: ClusterSnapshot, jobs: Sequence[Job], running: Sequence[PlannedRole]
) -> None:
    """Raise PlacementInfeasibleError if the jobs would not fit even on an empty cluster."""
    outcome = plan_jobs(snapshot, jobs, running=running, of="total")
    if isinstance(outcome, Shortfall):
        advised = advise(outcome, snapshot, jobs, running)
        raise errors.PlacementInfeasibleError(
            role=advised.role,
            requested=advised.requested,
            observed=advised.observed,
            shortfall=advised.missing_text,
            change=advised.change,
            best_node=advised.best_node,
        )


def busy(
    jobs: Sequence[Job], snapshot: ClusterSnapshot, holders: str, deadline: Deadline
) -> errors.PlacementTimeoutError:
    """Return the error for jobs that do not fit only because the holders use resources."""
    kinds = [
        name for name in ACCELERATORS if any(node.total.get(name) for node in snapshot.nodes)
    ] or ACCELERATORS[:1]
    hidden = {*ACCELERATORS, *snapshot.shared}.difference(kinds)
    wanted = {name: amount for name, amount in asked_for(jobs).items() if name not in hidden}
    free = total_of(node.available for node in snapshot.nodes)
    return errors.PlacementTimeoutError(
        role=" and ".join(job.role for job in jobs),
        requested=show(wanted),
        free=show({name: free.get(name, 0.0) for name in wanted}),
        holders=holders,
        elapsed_s=deadline.elapsed_s,
        limit_s=deadline.limit_s,
    )


def asked_for(jobs: Iterable[Job]) -> Resources:
    """Return the total request of jobs by Ray's names.

    Accelerators are listed under the name of every kind, since any kind will do.
    """
    specs = [job.spec(index) for job in jobs for index in range(job.replicas)]
    wanted = total_of(
        {
            **dict.fromkeys(ACCELERATORS, spec.gpu),
            "CPU": spec.cpu,
            "memory": spec.mem * 1e9,
            **spec.resources,
        }
        for spec in specs
    )
    return {name: amount for name, amount in wanted.items() if amount}


def advise(
    shortfall: Shortfall,
    snapshot: ClusterSnapshot,
    jobs: Sequence[Job],
    running: Sequence[PlannedRole] = (),
) -> Shortfall:
    """Return the shortfall of an empty cluster with a suggested change.

    Changes are smaller workers, fewer replicas or more nodes. Every suggestion has been planned and
    fits, with the largest sizes or the fewest nodes that do.
    """
    if shortfall.kind == "selector":
        return shortfall
    options = list(filter(None, _Advice(shortfall, snapshot, jobs, running).options()))
    if not options:
        fields = " or ".join(dict.fromkeys(map(field_of, shortfall.missing))) or "SchedulingSpec"
        more = ", or add nodes" if snapshot.can_grow else ""
        options = [f"change {fields} or Job.replicas{more}; no single one of these is enough"]
    text = ", or ".join(options)
    return msgspec.structs.replace(shortfall, change=text[0].upper() + text[1:])


@dataclasses.dataclass
class _Advice:
    _shortfall: Shortfall
    _snapshot: ClusterSnapshot
    _jobs: Sequence[Job]
    _running: Sequence[PlannedRole]

    def options(self) -> Iterator[str]:
        """Yield sufficient changes; '' for a change that is not sufficient."""
        if self._shortfall.kind == "bundle":
            yield from self._smaller_workers()
            yield self._deferred()
        else:
            yield self._fewer_replicas(self._jobs) or self._smaller_instances()
            yield self._more_nodes()

    def _outcome(
        self, jobs: Sequence[Job], nodes: Sequence[NodeState] = ()
    ) -> Plan | Shortfall | None:
        """Plan changed jobs with additional nodes; None if a colocated role would not tile."""
        snapshot = (
            ClusterSnapshot(nodes=(*self._snapshot.nodes, *nodes)) if nodes else self._snapshot
        )
        try:
            return plan_jobs(snapshot, jobs, running=self._running, of="total", work=_WORK)
        except errors.InvalidSpecError:
            return None

    def _fits(
        self, *changed: Job, jobs: Sequence[Job] = (), nodes: Sequence[NodeState] = ()
    ) -> bool:
        return isinstance(self._outcome(_changed(jobs or self._jobs, *changed), nodes), Plan)

    def _of_role(self, job: Job) -> str:
        return f" of {job.role!r}" if len(self._jobs) > 1 else ""

    def _smaller_workers(self) -> Iterator[str]:
        """Reduce workers to the best-fitting node, and their number if that is not enough."""
        jobs, changes = self._jobs, dict[tuple[str, str], str]()
        outcome: Plan | Shortfall | None = self._shortfall
        for _ in range(_MAX_CUTS):
            if not isinstance(outcome, Shortfall) or outcome.kind != "bundle":
                break
            job = next(job for job in jobs if job.role == outcome.role)
            for name, by in outcome.missing.items():
                job, left = _cut(job, name, by)
                if not left and name in ACCELERATORS and self._snapshot.can_grow:
                    yield (
                        f"add nodes with accelerators; the nodes that {job.role!r} may use "
                        "have none"
                    )
                shown = (
                    f"{{{name!r}: {left:.10g}}}"
                    if field_of(name).endswith(".resources")
                    else f"{left:.10g}"
                )
                changes[job.role, name] = f"set {field_of(name)}{self._of_role(job)} to {shown}"
            jobs = _changed(jobs, job)
            outcome = self._outcome(jobs)
        if isinstance(outcome, Plan):
            yield " and ".join(changes.values())
        elif isinstance(outcome, Shortfall) and (fewer := self._fewer_replicas(jobs)):
            yield " and ".join([*changes.values(), fewer])

    def _deferred(self) -> str:
        job = next(job for job in self._jobs if job.role == self._shortfall.role)
        is_short = any(name in ACCELERATORS for name in self._shortfall.missing)
        if not is_short or job.spec(0).ray_placement_strategy != "separate":
            return ""
        if not self._fits(change_specs(job, ray_placement_strategy="deferred")):
            return ""
        return (
            f"set SchedulingSpec.ray_placement_strategy{self._of_role(job)} to 'deferred', "
            "whose instances may span nodes"
        )

    def _smaller_instances(self) -> str:
        largest = int(
            max(
                (
                    node.total.get(name, 0.0)
                    for node in self._snapshot.nodes
                    for name in ACCELERATORS
                ),
                default=0,
            )
        )
        for job in self._jobs:
            spec = job.spec(0)
            if (
                len(job.tasks) == 1
                and spec.ray_placement_strategy == "deferred"
                and 0 < largest < spec.gpu
            ):
                for gpu in range(int(spec.gpu - 1) // largest * largest, 0, -largest):
                    if self._fits(change_specs(job, gpu=gpu)):
                        return f"set SchedulingSpec.gpu{self._of_role(job)} to {gpu}"
        return ""

    def _fewer_replicas(self, jobs: Sequence[Job]) -> str:
        """Reduce the replicas of the job, with its colocated jobs, that keeps the most."""
        best: tuple[float, str] = (0.0, "")
        for job in jobs:
            if job.scheduling_strategy.type == "colocation":
                continue
            group = [job, *_colocated(job, jobs)]
            steps = math.gcd(*(each.replicas for each in group))

            def fits(count: int, group: Sequence[Job] = group, steps: int = steps) -> bool:
                return self._fits(
                    *(_first(each, each.replicas * count // steps) for each in group), jobs=jobs
                )

            count = bisect.bisect_left(range(1, steps), True, key=lambda count: not fits(count))
            if count / steps > best[0]:
                also = "".join(
                    f" and of {each.role!r} to {each.replicas * count // steps}"
                    for each in group[1:]
                )
                text = (
                    f"set Job.replicas{self._of_role(job)} to {job.replicas * count // steps}{also}"
                )
                best = count / steps, text
        return best[1]

    def _more_nodes(self) -> str:
        """Add as few nodes as possible, copies of the largest node that some job may use."""
        nodes, missing = self._snapshot.nodes, self._shortfall.missing
        names = [name for name in missing if name in ACCELERATORS] or [
            *missing,
            *ACCELERATORS,
            "CPU",
        ]
        largest: dict[int, int] = {}
        """Index of a node -> number of additional such nodes that suffice."""
        for job in self._jobs if self._snapshot.can_grow else ():
            allowed = (
                sorted(allowed_nodes(job.spec(0), nodes))
                if job.scheduling_strategy.type == "separation"
                else ()
            )
            if allowed:
                index = max(
                    allowed, key=lambda index: [nodes[index].total.get(name, 0.0) for name in names]
                )
                if index not in largest:
                    largest[index] = self._num_more(nodes[index])
        enough = [(count, nodes[index]) for index, count in largest.items() if count]
        if not enough:
            return ""
        count, node = min(enough, key=lambda each: each[0])
        shape = show(
            {
                name: amount
                for name, amount in node.total.items()
                if name in (*ACCELERATORS, "CPU", "memory")
            }
        )
        return f"add {count} node{'s' if count > 1 else ''} like {node_name(node)} ({shape})"

    def _num_more(self, node: NodeState) -> int:
        """Return how many more nodes like this one suffice; 0 if no number does."""
        common = {
            "total": _common(node.total),
            "available": _common(node.available),
            "labels": _common(node.labels),
        }
        like = msgspec.structs.replace(node, hostname="", **common)

        def fits(count: int) -> bool:
            names = [f"more-{index}" for index in range(count)]
            return self._fits(
                nodes=[msgspec.structs.replace(like, node_id=name, address=name) for name in names]
            )

        high = 1
        while not fits(high):
            high *= 2
            if high > _MAX_NODES:
                return 0
        return bisect.bisect_left(range(high), True, lo=high // 2 + 1, key=fits) if high > 1 else 1


def _common(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources or labels that are not unique to a node."""
    return {name: value for name, value in named.items() if not name.startswith(_UNIQUE)}


def _changed(jobs: Sequence[Job], *changed: Job) -> list[Job]:
    by_role = {job.role: job for job in changed}
    return [by_role.get(job.role, job) for job in jobs]


def _colocated(job: Job, jobs: Sequence[Job]) -> list[Job]:
    found = {job.role}
    for _ in jobs:
        found |= {other.role for other in jobs if other.scheduling_strategy.target in found}
    return [other for other in jobs if other.role in found and other.role != job.role]


def _first(job: Job, replicas: int) -> Job:
    return msgspec.structs.replace(
        job, replicas=replicas, tasks=job.tasks if len(job.tasks) == 1 else job.tasks[:replicas]
    )


def _cut(job: Job, name: str, by: float) -> tuple[Job, float]:
    """Reduce the largest request for a resource by ``by``.

    Returns the job and the new maximum over its specs, in the unit of the spec's field.
    """
    field = field_of(name).rpartition(".")[2]

    def asked(spec: SchedulingSpec) -> float:
        return float(
            spec.resources.get(name, 0.0) if field == "resources" else getattr(spec, field)
        )

    left = max(0.0, max(map(asked, job.tasks)) - by / (1e9 if field == "mem" else 1))
    digits = 0 if name in ACCELERATORS else 1 if field == "mem" and left >= 1 else 4
    left = math.floor(left * 10**digits + 1e-6) / 10**digits
    tasks = []
    for spec in job.tasks:
        amount = min(asked(spec), left)
        changes = {field: {**spec.resources, name: amount} if field == "resources" else amount}
        tasks.append(msgspec.structs.replace(spec, **changes))
    return msgspec.structs.replace(job, tasks=tasks), left
