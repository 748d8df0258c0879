"""Assign workers and devices of the target to each replica of a colocated job. Pure, for plans and for starts alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from helmsman.api.errors import InvalidSpecError, RoleNotFoundError
from helmsman.api.plan import PlannedWorker
from helmsman.api.scheduler import Job


def targets_first(jobs: Sequence[Job], running: Iterable[str]) -> list[Job]:
    """Return the colocated ones of these jobs, each after its target.

    Args:
        jobs: jobs of one start.
        running: roles that are targets as well.

    Raises:
        RoleNotFoundError: A target is neither among the jobs nor running, or depends on the job itself.
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


Share = tuple[tuple[int, ...], PlannedWorker]
"""Ranks of the target's workers whose devices a replica uses, and the replica, which reuses or is forked beside the first."""


def tile(job: Job, target: Sequence[PlannedWorker]) -> list[Share]:
    """Divide the target's workers among the job's replicas, neighbours together and every worker in equally many shares.

    The number of replicas must divide the number of workers, or with fork be a multiple of it. In the first case each replica
    gets the devices of neighbours on one node, in the second an equal part of one worker's devices. A device mapping of the job
    assigns the devices explicitly instead.

    Args:
        job: the colocated job.
        target: the workers of its target in rank order.

    Returns:
        A share for each replica.

    Raises:
        InvalidSpecError: The replicas do not tile, or request other devices than their shares have.
    """
    strategy = job.scheduling_strategy
    if strategy.device_mapping:
        return [_mapped(job, target, index) for index in range(job.replicas)]
    per_replica, rest = divmod(len(target), job.replicas)
    if per_replica and not rest:
        shares = [_of_neighbours(job, target, index, per_replica) for index in range(job.replicas)]
    elif strategy.fork and job.replicas % len(target) == 0:
        parts = job.replicas // len(target)
        shares = [_part(job, target, index, parts) for index in range(job.replicas)]
    else:
        divisor = "a divisor or a multiple" if strategy.fork else "a divisor"
        expected = f"{divisor} of the {len(target)} workers of {strategy.target!r} that it is colocated with"
        raise _invalid(job, "replicas", job.replicas, expected)
    for index, (_, worker) in enumerate(shares):
        wanted = job.spec(index).gpu
        if wanted not in (0, worker.num_devices) and (strategy.fork or wanted > worker.num_devices):
            expected = f"{worker.num_devices}, which is its share of the devices of {strategy.target!r}, or 0 for just that"
            raise _invalid(job, f"gpu of replica {index}", wanted, expected)
    return shares


def _invalid(job: Job, field: str, value: Any, expected: str) -> InvalidSpecError:
    return InvalidSpecError(role=job.role, field=field, value=value, expected=expected)


def _share(
    job: Job, index: int, target: Sequence[PlannedWorker], ranks: Sequence[int], num_devices: int, devices: tuple[str, ...]
) -> Share:
    first = target[ranks[0]]
    worker = PlannedWorker(
        worker_id=f"{job.role}/{index}",
        node_id=first.node_id,
        node=first.node,
        num_devices=num_devices,
        devices=devices,
        num_ports=job.spec(index).port_count,
    )
    return tuple(ranks), worker


def _mapped(job: Job, target: Sequence[PlannedWorker], index: int) -> Share:
    """Return the devices that the job's device mapping assigns to a replica."""
    wanted = job.scheduling_strategy.device_mapping[index]
    owners = [(rank, position) for rank, worker in enumerate(target) for position in range(worker.num_devices)]
    field = f"scheduling_strategy.device_mapping[{index}]"
    if max(wanted) >= len(owners):
        has = f"only 0 to {len(owners) - 1}" if owners else "none"
        expected = f"devices that {job.scheduling_strategy.target!r} has, which are {has}"
        raise _invalid(job, field, list(wanted), expected)
    chosen = [owners[device] for device in wanted]
    first = target[chosen[0][0]]
    if any(target[rank].node_id != first.node_id for rank, _ in chosen):
        nodes = ", ".join(f"{device} on {target[rank].node}" for device, (rank, _) in zip(wanted, chosen, strict=True))
        raise _invalid(job, field, list(wanted), f"devices of one node; these are {nodes}")
    known = all(target[rank].devices for rank, _ in chosen)
    devices = tuple(target[rank].devices[position] for rank, position in chosen) if known else ()
    return _share(job, index, target, list(dict.fromkeys(rank for rank, _ in chosen)), len(chosen), devices)


def _of_neighbours(job: Job, target: Sequence[PlannedWorker], index: int, count: int) -> Share:
    ranks = range(index * count, (index + 1) * count if job.scheduling_strategy.fork else index * count + 1)
    members = [target[rank] for rank in ranks]
    if len({worker.node_id for worker in members}) > 1:
        nodes = ", ".join(dict.fromkeys(worker.node for worker in members))
        expected = (
            f"a number that keeps each replica on one node: replica {index} would share devices with "
            f"{members[0].worker_id} to {members[-1].worker_id}, which are on {nodes}"
        )
        raise _invalid(job, "replicas", job.replicas, expected)
    devices = tuple(dict.fromkeys(device for worker in members for device in worker.devices))
    return _share(job, index, target, ranks, len(devices) or sum(worker.num_devices for worker in members), devices)


def _part(job: Job, target: Sequence[PlannedWorker], index: int, parts: int) -> Share:
    rank, part = divmod(index, parts)
    worker = target[rank]
    size, rest = divmod(worker.num_devices, parts)
    if rest:
        has = f"the {worker.num_devices} devices of {worker.worker_id}"
        raise _invalid(job, "replicas", job.replicas, f"a number that divides {has} evenly; {parts} replicas would share them")
    return _share(job, index, target, [rank], size, worker.devices[part * size : (part + 1) * size])
