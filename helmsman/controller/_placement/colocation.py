"""Which workers and devices of its target each replica of a colocated job gets. Pure, for plans and for starts alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from helmsman.api.errors import InvalidSpecError, RoleNotFoundError
from helmsman.api.plan import PlannedWorker
from helmsman.api.scheduler import Job


def targets_first(jobs: Sequence[Job], running: Iterable[str]) -> list[Job]:
    """The colocated ones of these jobs, each after its target where that is among them.

    Raises: RoleNotFoundError where a target is neither among them nor running, or stands on the job itself.
    """
    known = {*running, *(job.role for job in jobs if job.scheduling_strategy.type == "separation")}
    waiting = [job for job in jobs if job.scheduling_strategy.type == "colocation"]
    ordered: list[Job] = []
    while waiting:
        ready = [job for job in waiting if job.scheduling_strategy.target in known]
        if not ready:
            raise RoleNotFoundError(name=str(waiting[0].scheduling_strategy.target), known=sorted(known))
        ordered += ready
        known.update(job.role for job in ready)
        waiting = [job for job in waiting if job not in ready]
    return ordered


class Share(msgspec.Struct, frozen=True):
    """What one replica gets of its target."""

    targets: tuple[int, ...]
    """Ranks of the target's workers whose devices it uses; it reuses, or is forked beside, the first of them."""
    node_id: str
    node: str
    num_devices: int
    devices: tuple[str, ...]


def tile(job: Job, target: Sequence[PlannedWorker]) -> list[Share]:
    """Lay the job's replicas over the target's workers, neighbours together, every worker in just as many shares as any other.

    Replicas may be as many as the target's workers, or a divisor of them (each gets the devices of a run of neighbours, which
    must be on one node), or with fork a multiple (each gets an equal part of one worker's devices). A device mapping of the job
    says instead which devices each gets.

    Raises: InvalidSpecError.
    """
    if job.scheduling_strategy.device_mapping:
        return [_mapped(job, target, index) for index in range(job.replicas)]
    fork, name = job.scheduling_strategy.fork, job.scheduling_strategy.target
    per_replica, rest = divmod(len(target), job.replicas)
    if per_replica and not rest:
        shares = [_of_neighbours(job, target, index * per_replica, per_replica) for index in range(job.replicas)]
    elif fork and job.replicas % len(target) == 0:
        parts = job.replicas // len(target)
        shares = [_part(job, target, index // parts, index % parts, parts) for index in range(job.replicas)]
    else:
        raise InvalidSpecError(
            role=job.role,
            field="replicas",
            value=job.replicas,
            expected=f"a divisor {'or a multiple ' if fork else ''}of the {len(target)} workers of {name!r} that it is "
            "colocated with",
        )
    for index, share in enumerate(shares):
        wanted = job.spec(index).gpu
        if wanted not in (0, share.num_devices) and (fork or wanted > share.num_devices):
            raise InvalidSpecError(
                role=job.role,
                field=f"gpu of replica {index}",
                value=wanted,
                expected=f"{share.num_devices}, which is its share of the devices of {name!r}, or 0 for just that",
            )
    return shares


def _mapped(job: Job, target: Sequence[PlannedWorker], index: int) -> Share:
    """What the job's device mapping gives a replica."""
    wanted = job.scheduling_strategy.device_mapping[index]
    owners = [(rank, position) for rank, worker in enumerate(target) for position in range(worker.num_devices)]

    def refuse(expected: str) -> InvalidSpecError:
        field = f"scheduling_strategy.device_mapping[{index}]"
        return InvalidSpecError(role=job.role, field=field, value=list(wanted), expected=expected)

    if max(wanted) >= len(owners):
        has = f"only 0 to {len(owners) - 1}" if owners else "none"
        raise refuse(f"devices that {job.scheduling_strategy.target!r} has, which are {has}")
    chosen = [owners[device] for device in wanted]
    first = target[chosen[0][0]]
    if any(target[rank].node_id != first.node_id for rank, _ in chosen):
        nodes = ", ".join(f"{device} on {target[rank].node}" for device, (rank, _) in zip(wanted, chosen, strict=True))
        raise refuse(f"devices of one node; these are {nodes}")
    known = all(target[rank].devices for rank, _ in chosen)
    devices = tuple(target[rank].devices[position] for rank, position in chosen) if known else ()
    return Share(tuple(dict.fromkeys(rank for rank, _ in chosen)), first.node_id, first.node, len(chosen), devices)


def _of_neighbours(job: Job, target: Sequence[PlannedWorker], first: int, count: int) -> Share:
    members = target[first : first + count]
    if not job.scheduling_strategy.fork:
        members = members[:1]
    nodes = dict.fromkeys(worker.node for worker in members)
    if len({worker.node_id for worker in members}) > 1:
        raise InvalidSpecError(
            role=job.role,
            field="replicas",
            value=job.replicas,
            expected=f"a number that keeps each replica on one node: replica {first // count} would share devices with "
            f"{members[0].worker_id} to {members[-1].worker_id}, which are on {', '.join(nodes)}",
        )
    devices = tuple(dict.fromkeys(device for worker in members for device in worker.devices))
    num_devices = len(devices) or sum(worker.num_devices for worker in members)
    ranks = tuple(range(first, first + len(members)))
    return Share(ranks, members[0].node_id, members[0].node, num_devices, devices)


def _part(job: Job, target: Sequence[PlannedWorker], rank: int, part: int, parts: int) -> Share:
    worker = target[rank]
    size, rest = divmod(worker.num_devices, parts)
    if rest:
        raise InvalidSpecError(
            role=job.role,
            field="replicas",
            value=job.replicas,
            expected=f"a number that divides the {worker.num_devices} devices of {worker.worker_id} evenly; {parts} replicas "
            "would share them",
        )
    return Share((rank,), worker.node_id, worker.node, size, worker.devices[part * size : (part + 1) * size])
