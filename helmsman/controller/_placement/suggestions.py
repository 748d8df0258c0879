"""The smallest change with which jobs would fit, found by planning again with it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from helmsman.api.errors import InvalidSpecError
from helmsman.api.plan import Plan, PlannedRole, Shortfall
from helmsman.api.scheduler import Job
from helmsman.controller._placement.bin_packing import Work
from helmsman.controller._placement.bundles import allowed_nodes
from helmsman.controller._placement.diagnosis import node_name
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.resources import ACCELERATORS, field_of, show
from helmsman.controller._placement.snapshot import ClusterSnapshot, NodeState

_WORK = 100_000
"""Of each trial, of which there may be dozens."""
_MAX_NODES = 4096
_MAX_CUTS = 8
_UNIQUE = ("node:", "ray.io/node-id")
"""Starts of the names of resources and labels that one node alone has."""


def advise(
    shortfall: Shortfall, snapshot: ClusterSnapshot, jobs: Sequence[Job], running: Sequence[PlannedRole] = ()
) -> Shortfall:
    """The same shortfall of the whole cluster with what to change: smaller workers, fewer replicas, or more nodes.

    Every change named was planned with and fits; numbers are the largest, or the fewest, that do.
    """
    if shortfall.kind == "selector":
        return shortfall
    options = list(_Advice(shortfall, snapshot, jobs, running).options())
    if not options:
        fields = " or ".join(dict.fromkeys(map(field_of, shortfall.missing))) or "SchedulingSpec"
        more = ", or add nodes" if snapshot.can_grow else ""
        options = [f"change {fields} or Job.replicas{more}; no single one of these is enough"]
    text = ", or ".join(options)
    return msgspec.structs.replace(shortfall, change=text[0].upper() + text[1:])


class _Advice:
    def __init__(
        self, shortfall: Shortfall, snapshot: ClusterSnapshot, jobs: Sequence[Job], running: Sequence[PlannedRole]
    ) -> None:
        self._shortfall = shortfall
        self._snapshot = snapshot
        self._jobs = list(jobs)
        self._running = running

    def options(self) -> Iterator[str]:
        """Changes each of which is enough."""
        if self._shortfall.kind == "bundle":
            yield from self._smaller_workers()
            yield from self._deferred()
        else:
            fewer = self._fewer(self._jobs) or self._smaller_instances()
            yield from [fewer] if fewer else []
            more = self._more_nodes()
            yield from [more] if more else []

    def _outcome(self, jobs: Sequence[Job], cluster: ClusterSnapshot | None = None) -> Plan | Shortfall | None:
        """None where roles that are colocated with a changed one would not tile over it."""
        try:
            return plan_jobs(cluster or self._snapshot, jobs, running=self._running, of="total", work=Work(_WORK))
        except InvalidSpecError:
            return None

    def _fits(self, jobs: Sequence[Job], cluster: ClusterSnapshot | None = None) -> bool:
        return isinstance(self._outcome(jobs, cluster), Plan)

    def _of_role(self, job: Job) -> str:
        return f" of {job.role!r}" if len(self._jobs) > 1 else ""

    # --- smaller workers --------------------------------------------------------------------------------------------

    def _smaller_workers(self) -> Iterator[str]:
        """Workers cut down to what the best-fitting node has; with fewer of them when that alone is not enough."""
        jobs, told = self._jobs, dict[tuple[str, str], str]()
        outcome: Plan | Shortfall | None = self._shortfall
        for _ in range(_MAX_CUTS):
            if not isinstance(outcome, Shortfall) or outcome.kind != "bundle":
                break
            index = next(index for index, job in enumerate(jobs) if job.role == outcome.role)
            job = jobs[index]
            for name, by in outcome.missing.items():
                job, left = _cut(job, name, by)
                if not left and name in ACCELERATORS and self._snapshot.can_grow:
                    yield f"add nodes with accelerators, of which those that {job.role!r} may use have none"
                told[job.role, name] = f"set {field_of(name)}{self._of_role(job)} to {_shown(name, left)}"
            jobs = [*jobs[:index], job, *jobs[index + 1 :]]
            outcome = self._outcome(jobs)
        changes = list(told.values())
        if isinstance(outcome, Plan):
            yield " and ".join(changes)
        elif isinstance(outcome, Shortfall) and (fewer := self._fewer(jobs)):
            yield " and ".join([*changes, fewer])

    def _deferred(self) -> Iterator[str]:
        index = next(index for index, job in enumerate(self._jobs) if job.role == self._shortfall.role)
        job = self._jobs[index]
        if job.spec(0).ray_placement_strategy != "separate" or not any(
            name in ACCELERATORS for name in self._shortfall.missing
        ):
            return
        tasks = [msgspec.structs.replace(spec, ray_placement_strategy="deferred") for spec in job.tasks]
        if self._fits([*self._jobs[:index], msgspec.structs.replace(job, tasks=tasks), *self._jobs[index + 1 :]]):
            yield (
                f"set SchedulingSpec.ray_placement_strategy{self._of_role(job)} to 'deferred', whose instances may span nodes"
            )

    def _smaller_instances(self) -> str:
        """Instances that span fewer whole nodes; '' when none does."""
        largest = int(max((node.total.get(name, 0.0) for node in self._snapshot.nodes for name in ACCELERATORS), default=0))
        for index, job in enumerate(self._jobs):
            spec = job.spec(0)
            if len(job.tasks) > 1 or spec.ray_placement_strategy != "deferred" or not 0 < largest < spec.gpu:
                continue
            for count in range(int(spec.gpu - 1) // largest, 0, -1):
                smaller = msgspec.structs.replace(job, tasks=[msgspec.structs.replace(spec, gpu=count * largest)])
                if self._fits([*self._jobs[:index], smaller, *self._jobs[index + 1 :]]):
                    return f"set SchedulingSpec.gpu{self._of_role(job)} to {count * largest}"
        return ""

    # --- fewer workers ----------------------------------------------------------------------------------------------

    def _fewer(self, jobs: Sequence[Job]) -> str:
        """Fewer replicas of one job, the others as they are: of the job that keeps the most of its own. '' when none is
        enough."""
        best: tuple[float, str] = (0.0, "")
        for job in jobs:
            if job.scheduling_strategy.type == "colocation":
                continue
            beside = _beside(job, jobs)
            steps = math.gcd(job.replicas, *(other.replicas for other in beside))
            low, high = 0, steps  # low fits or is 0, high does not
            while high - low > 1:
                middle = (low + high) // 2
                changed = {each.role: _first(each, each.replicas * middle // steps) for each in (job, *beside)}
                fits = self._fits([changed.get(each.role, each) for each in jobs])
                low, high = (middle, high) if fits else (low, middle)
            if low / steps > best[0]:
                also = "".join(f" and of {each.role!r} to {each.replicas * low // steps}" for each in beside)
                best = low / steps, f"set Job.replicas{self._of_role(job)} to {job.replicas * low // steps}{also}"
        return best[1]

    # --- more nodes -------------------------------------------------------------------------------------------------

    def _more_nodes(self) -> str:
        """How many more nodes like the largest one that a job may use would do; '' when no number of them would."""
        if not self._snapshot.can_grow:
            return ""
        found = [(self._num_more(node), node) for node in self._largest_nodes()]
        enough = [(count, node) for count, node in found if count]
        if not enough:
            return ""
        count, node = min(enough, key=lambda each: each[0])
        shape = show({name: amount for name, amount in node.total.items() if name in (*ACCELERATORS, "CPU", "memory")})
        return f"add {count} node{'s' if count > 1 else ''} like {node_name(node)} ({shape})"

    def _largest_nodes(self) -> list[NodeState]:
        """The largest node for each job, each of them once."""
        nodes, missing = self._snapshot.nodes, self._shortfall.missing
        names = [name for name in missing if name in ACCELERATORS] or [*missing, *ACCELERATORS, "CPU"]
        found: dict[int, None] = {}
        for job in self._jobs:
            allowed = sorted(allowed_nodes(job.spec(0), nodes)) if job.scheduling_strategy.type == "separation" else []
            if allowed:
                found[max(allowed, key=lambda index: [nodes[index].total.get(name, 0.0) for name in names])] = None
        return [nodes[index] for index in found]

    def _num_more(self, node: NodeState) -> int:
        like = msgspec.structs.replace(
            node, hostname="", total=_common(node.total), available=_common(node.available), labels=_common(node.labels)
        )

        def fits(count: int) -> bool:
            more = [msgspec.structs.replace(like, node_id=f"more-{index}", address=f"more-{index}") for index in range(count)]
            return self._fits(self._jobs, ClusterSnapshot(nodes=(*self._snapshot.nodes, *more)))

        high = 1
        while not fits(high):
            high *= 2
            if high > _MAX_NODES:
                return 0
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high


def _common(named: Mapping[str, Any]) -> dict[str, Any]:
    """What other nodes may have as well."""
    return {name: value for name, value in named.items() if not name.startswith(_UNIQUE)}


def _beside(job: Job, jobs: Sequence[Job]) -> list[Job]:
    """The jobs that take their places from a job, directly or by way of each other."""
    found = {job.role}
    for _ in jobs:
        found |= {other.role for other in jobs if other.scheduling_strategy.target in found}
    return [other for other in jobs if other.role in found and other.role != job.role]


def _first(job: Job, replicas: int) -> Job:
    return msgspec.structs.replace(job, replicas=replicas, tasks=job.tasks if len(job.tasks) == 1 else job.tasks[:replicas])


def _cut(job: Job, name: str, by: float) -> tuple[Job, float]:
    """The job with no more than what fits of one resource in any of its specs, and how much that is."""
    field = field_of(name).rpartition(".")[2]
    unit = 1e9 if field == "mem" else 1

    def asked(spec: Any) -> float:
        return float(spec.resources.get(name, 0.0) if field == "resources" else getattr(spec, field))

    left = max(0.0, max(map(asked, job.tasks)) - by / unit)
    digits = 0 if name in ACCELERATORS else 1 if field == "mem" and left >= 1 else 4
    left = math.floor(left * 10**digits + 1e-6) / 10**digits
    tasks = [
        msgspec.structs.replace(
            spec,
            **{field: {**spec.resources, name: min(asked(spec), left)} if field == "resources" else min(asked(spec), left)},
        )
        for spec in job.tasks
    ]
    return msgspec.structs.replace(job, tasks=tasks), left


def _shown(name: str, left: float) -> str:
    shown = f"{left:.10g}"
    return f"{{{name!r}: {shown}}}" if field_of(name).endswith(".resources") else shown
