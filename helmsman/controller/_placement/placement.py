"""Nodes and devices of workers, including those of colocated jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from helmsman.api.errors import InvalidSpecError, RoleNotFoundError
from helmsman.api.plan import PlannedWorker, Reservation
from helmsman.api.platforms import PLATFORMS, DeviceGrant
from helmsman.api.scheduler import Job, SchedulingSpec


def targets_first(jobs: Sequence[Job], running: Iterable[str]) -> list[Job]:
    """Return the colocated jobs, each after its target, which may be running.

    Raises:
        RoleNotFoundError: A target is neither among the jobs nor running, or depends on the job.
    """
    known = {*running, *(job.role for job in jobs if job.scheduling_strategy.type == "separation")}
    waiting = [job for job in jobs if job.scheduling_strategy.type == "colocation"]
    ordered: list[Job] = []
    while waiting:
        ready = [job for job in waiting if job.scheduling_strategy.target in known]
        if not ready:
            raise RoleNotFoundError(
                name=str(waiting[0].scheduling_strategy.target), known=sorted(known)
            )
        ordered += ready
        known.update(job.role for job in ready)
        waiting = [job for job in waiting if job not in ready]
    return ordered


Share = tuple[tuple[int, ...], PlannedWorker]
"""Ranks of the target's workers whose devices a replica uses, and the planned replica; it reuses or
is forked beside the first of them.
"""


def tile(job: Job, target: Sequence[PlannedWorker]) -> list[Share]:
    """Divide the target's workers among the job's replicas; return the share of each replica.

    Workers are divided in rank order. Adjacent workers stay together, and every worker is in
    equally many shares. The number of replicas must divide the number of workers; each replica then
    gets the devices of adjacent workers on one node. With fork it may also be a multiple; each
    replica then gets an equal part of one worker's devices. A device mapping of the job assigns the
    devices explicitly instead.

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
        expected = (
            f"{divisor} of the {len(target)} workers of {strategy.target!r}, its colocation target"
        )
        raise _invalid(job, "replicas", job.replicas, expected)
    for index, (_, worker) in enumerate(shares):
        wanted = job.spec(index).gpu
        if wanted not in (0, worker.num_devices) and (strategy.fork or wanted > worker.num_devices):
            expected = (
                f"{worker.num_devices}, its share of the devices of {strategy.target!r}, or 0 for "
                "the whole share"
            )
            raise _invalid(job, f"gpu of replica {index}", wanted, expected)
    return shares


def _invalid(job: Job, field: str, value: Any, expected: str) -> InvalidSpecError:
    return InvalidSpecError(role=job.role, field=field, value=value, expected=expected)


def _share(
    job: Job,
    index: int,
    target: Sequence[PlannedWorker],
    ranks: Sequence[int],
    num_devices: int,
    devices: tuple[str, ...],
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
    wanted = job.scheduling_strategy.device_mapping[index]
    owners = [
        (rank, position)
        for rank, worker in enumerate(target)
        for position in range(worker.num_devices)
    ]
    field = f"scheduling_strategy.device_mapping[{index}]"
    if max(wanted) >= len(owners):
        has = f"only 0 to {len(owners) - 1}" if owners else "none"
        expected = f"devices that {job.scheduling_strategy.target!r} has, which are {has}"
        raise _invalid(job, field, list(wanted), expected)
    chosen = [owners[device] for device in wanted]
    first = target[chosen[0][0]]
    if any(target[rank].node_id != first.node_id for rank, _ in chosen):
        nodes = ", ".join(
            f"{device} on {target[rank].node}"
            for device, (rank, _) in zip(wanted, chosen, strict=True)
        )
        raise _invalid(job, field, list(wanted), f"devices of one node; device {nodes}")
    known = all(target[rank].devices for rank, _ in chosen)
    devices = tuple(target[rank].devices[position] for rank, position in chosen) if known else ()
    return _share(
        job, index, target, list(dict.fromkeys(rank for rank, _ in chosen)), len(chosen), devices
    )


def _of_neighbours(job: Job, target: Sequence[PlannedWorker], index: int, count: int) -> Share:
    ranks = range(
        index * count, (index + 1) * count if job.scheduling_strategy.fork else index * count + 1
    )
    members = [target[rank] for rank in ranks]
    if len({worker.node_id for worker in members}) > 1:
        nodes = ", ".join(dict.fromkeys(worker.node for worker in members))
        expected = (
            f"a number that keeps each replica on one node: replica {index} would share devices "
            "with "
            f"{members[0].worker_id} to {members[-1].worker_id}, which are on {nodes}"
        )
        raise _invalid(job, "replicas", job.replicas, expected)
    devices = tuple(dict.fromkeys(device for worker in members for device in worker.devices))
    return _share(
        job,
        index,
        target,
        ranks,
        len(devices) or sum(worker.num_devices for worker in members),
        devices,
    )


def _part(job: Job, target: Sequence[PlannedWorker], index: int, parts: int) -> Share:
    rank, part = divmod(index, parts)
    worker = target[rank]
    size, rest = divmod(worker.num_devices, parts)
    if rest:
        has = f"the {worker.num_devices} devices of {worker.worker_id}"
        raise _invalid(
            job,
            "replicas",
            job.replicas,
            f"a number that divides {has} evenly; {parts} replicas would share them",
        )
    return _share(job, index, target, [rank], size, worker.devices[part * size : (part + 1) * size])


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    node_id: str = ""
    node: str
    num_devices: int = 0
    devices: tuple[str, ...] = ()
    """Physical ids in order; they may be unknown until the worker runs."""
    positions: tuple[int, ...] = ()
    accelerator: str = ""
    """Ray's resource of the devices; empty for a worker without devices."""
    shared: bool = False
    """Whether the devices belong to another worker, beside which this worker is forked."""
    instance_devices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(node address, device ids) for each bundle of a deferred instance; the worker is in the
    first.
    """

    @staticmethod
    def planned(worker: PlannedWorker, accelerator: str) -> Placement:
        return Placement(
            node_id=worker.node_id,
            node=worker.node,
            num_devices=worker.num_devices,
            devices=worker.devices,
            accelerator=accelerator if worker.num_devices else "",
        )

    @staticmethod
    def beside(share: Share, targets: Sequence[Placement]) -> Placement:
        """Return the place of a sibling with this share of the workers at ``targets``."""
        ranks, worker = share
        first = targets[ranks[0]]
        whole = len(ranks) == 1 and worker.num_devices == first.num_devices
        place = Placement.planned(worker, first.accelerator)
        return msgspec.structs.replace(
            place, shared=True, instance_devices=first.instance_devices if whole else ()
        )

    @property
    def kind(self) -> str:
        """Key of its devices in PLATFORMS; empty for a worker without devices."""
        return next(
            (
                info.name
                for info in PLATFORMS.values()
                if self.devices and info.ray_resource == self.accelerator
            ),
            "",
        )

    def grant(self, worker_id: str) -> DeviceGrant:
        return DeviceGrant(worker_id=worker_id, kind=self.kind, ids=self.devices)

    def as_reservation(self) -> Reservation:
        return Reservation(node_id=self.node_id, node=self.node, devices=self.devices)

    def as_planned(self, worker_id: str) -> PlannedWorker:
        return PlannedWorker(
            worker_id=worker_id,
            node_id=self.node_id,
            node=self.node,
            num_devices=self.num_devices,
            devices=self.devices,
        )


def in_device_order(specs: Sequence[SchedulingSpec], places: Sequence[Placement]) -> list[int]:
    """Return the place index of each rank, so that ranks on a node follow its device order.

    Only ranks on one node with equal specs are exchanged. Ray does not guarantee the order of the
    devices that it grants (ray#59547).
    """
    alike: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    different: list[SchedulingSpec] = []
    for index, (spec, place) in enumerate(zip(specs, places, strict=True)):
        if spec not in different:
            different.append(spec)
        alike[place.node_id, different.index(spec)].append(index)
    order = list(range(len(places)))
    for ranks in alike.values():
        origins = sorted(ranks, key=lambda index: places[index].positions)
        for rank, origin in zip(ranks, origins, strict=True):
            order[rank] = origin
    return order
