"""The smallest change with which jobs would fit, found by planning again with it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from helmsman.api.plan import Plan, PlannedRole, Shortfall
from helmsman.api.scheduler import Job
from helmsman.controller.cluster_snapshot import ClusterSnapshot
from helmsman.controller.planner import plan_jobs
from helmsman.controller.resources import ACCELERATORS, field_of, show
from helmsman.controller.shortfall import node_name

_MAX_NODES = 4096


def advise(
    shortfall: Shortfall, snapshot: ClusterSnapshot, jobs: Sequence[Job], running: Sequence[PlannedRole] = ()
) -> Shortfall:
    """The same shortfall of the whole cluster with what to change: smaller workers, fewer replicas, or more nodes."""
    if shortfall.kind == "selector":
        return shortfall

    def fits(changed: Sequence[Job], cluster: ClusterSnapshot = snapshot) -> bool:
        return isinstance(plan_jobs(cluster, changed, running=running, of="total"), Plan)

    changes = list(_smaller(shortfall, jobs, fits)) if shortfall.kind == "bundle" else []
    if not changes:
        changes = list(_fewer(jobs, fits))
    extra = _more_nodes(shortfall, snapshot, jobs, fits)
    options = [*changes, *([extra] if extra else [])]
    if not options:
        fields = " or ".join(dict.fromkeys(map(field_of, shortfall.missing))) or "SchedulingSpec"
        options = [f"change {fields} or Job.replicas, or add nodes; no single one of these is enough"]
    text = ", or ".join(options)
    return msgspec.structs.replace(shortfall, change=text[0].upper() + text[1:])


def _smaller(shortfall: Shortfall, jobs: Sequence[Job], fits: Callable[[Sequence[Job]], bool]) -> Iterator[str]:
    """The role's workers cut down to what the best-fitting node has; with fewer of them when that alone is not enough."""
    index = next(index for index, job in enumerate(jobs) if job.role == shortfall.role)
    job = jobs[index]
    smaller = [msgspec.structs.replace(job, tasks=[_cut(spec, shortfall.missing) for spec in job.tasks])]
    described = " and ".join(f"set {field_of(name)} to {_left(job, name, by)}" for name, by in shortfall.missing.items())
    changed = [*jobs[:index], *smaller, *jobs[index + 1 :]]
    if fits(changed):
        yield described
    else:
        yield from (f"{described} and {fewer}" for fewer in _fewer(changed, fits, only=index))
    if job.spec(0).ray_placement_strategy == "separate" and any(name in ACCELERATORS for name in shortfall.missing):
        tasks = [msgspec.structs.replace(spec, ray_placement_strategy="deferred") for spec in job.tasks]
        if fits([*jobs[:index], msgspec.structs.replace(job, tasks=tasks), *jobs[index + 1 :]]):
            yield "set SchedulingSpec.ray_placement_strategy to 'deferred', whose instances may span nodes"


def _cut(spec: msgspec.Struct, missing: dict[str, float]) -> msgspec.Struct:
    changes: dict[str, object] = {}
    for name, by in missing.items():
        field = field_of(name).rpartition(".")[2]
        if field == "resources":
            left = {**getattr(spec, field), **changes.get("resources", {})}  # type: ignore[dict-item]
            left[name] = max(0.0, left.get(name, 0.0) - by)
            changes["resources"] = left
        else:
            by = by / 1e9 if field == "mem" else by
            changes[field] = max(0.0, getattr(spec, field) - by)
    return msgspec.structs.replace(spec, **changes)


def _left(job: Job, name: str, by: float) -> str:
    field = field_of(name).rpartition(".")[2]
    most = max(spec.resources.get(name, 0.0) if field == "resources" else getattr(spec, field) for spec in job.tasks)
    left = max(0.0, most - (by / 1e9 if field == "mem" else by))
    shown = f"{left:.4g}"
    return f"{{{name!r}: {shown}}}" if field == "resources" else shown


def _fewer(jobs: Sequence[Job], fits: Callable[[Sequence[Job]], bool], only: int | None = None) -> Iterator[str]:
    """Fewer replicas of one job, the others as they are: of the job that keeps the most of its own."""
    best: tuple[float, int, int] | None = None
    for index, job in enumerate(jobs):
        if only not in (None, index) or len(job.tasks) != 1 or job.scheduling_strategy.type == "colocation":
            continue

        def fits_with(replicas: int, index: int = index, job: Job = job) -> bool:
            changed = msgspec.structs.replace(job, replicas=replicas)
            return fits([*jobs[:index], changed, *jobs[index + 1 :]])

        low, high = 0, job.replicas  # low fits or is 0, high does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits_with(middle) else (low, middle)
        if low and (best is None or low / job.replicas > best[0]):
            best = low / job.replicas, index, low
    if best is not None:
        of_role = f" of {jobs[best[1]].role!r}" if len(jobs) > 1 else ""
        yield f"set Job.replicas{of_role} to {best[2]}"


def _more_nodes(
    shortfall: Shortfall,
    snapshot: ClusterSnapshot,
    jobs: Sequence[Job],
    fits: Callable[[Sequence[Job], ClusterSnapshot], bool],
) -> str:
    """How many more nodes like the largest one would do; '' when no number of them would."""
    if not (snapshot.nodes and snapshot.can_grow) or shortfall.kind == "bundle":
        return ""
    names = [name for name in shortfall.missing if name in ACCELERATORS] or [*shortfall.missing, *ACCELERATORS, "CPU"]
    largest = max(snapshot.nodes, key=lambda node: [node.total.get(name, 0.0) for name in names])

    def with_more(count: int) -> ClusterSnapshot:
        more = [
            msgspec.structs.replace(largest, node_id=f"more-{index}", address=f"more-{index}", hostname="")
            for index in range(count)
        ]
        return ClusterSnapshot(nodes=(*snapshot.nodes, *more))

    high = 1
    while not fits(jobs, with_more(high)):
        high *= 2
        if high > _MAX_NODES:
            return ""
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(jobs, with_more(middle)) else (middle, high)
    shape = show({name: amount for name, amount in largest.total.items() if name in (*ACCELERATORS, "CPU", "memory")})
    return f"add {high} node{'s' if high > 1 else ''} like {node_name(largest)} ({shape})"
