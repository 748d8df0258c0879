"""The part of a backend that plans, takes and frees places for workers: its contract, and one
machine's.
"""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Mapping, Sequence

from helmsman.api.plan import Plan, PlannedRole
from helmsman.api.platforms import PLATFORMS
from helmsman.api.scheduler import Job, PreemptionNotice
from helmsman.controller._aio.event_loop import Deadline
from helmsman.controller._node.checks import cpus_allowed, memory_allowed
from helmsman.controller._node.devices import detect_devices
from helmsman.controller._placement.admission import busy, require_feasible
from helmsman.controller._placement.bundles import change_specs
from helmsman.controller._placement.placement import Placement
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.resources import (
    ClusterSnapshot,
    NodeState,
    Resources,
    missing_of,
    show,
    total_of,
)


class Allocator(abc.ABC):
    """Takes places on a machine or a cluster. ``snapshot`` and ``reserve`` have to be filled; the
    rest has defaults.
    """

    @abc.abstractmethod
    def snapshot(self) -> ClusterSnapshot:
        """The nodes and what of them is free. Blocks for one look at a cluster at most."""

    @abc.abstractmethod
    async def reserve(
        self,
        jobs: Sequence[Job],
        deadline: Deadline,
        resources: Mapping[str, contextlib.AsyncExitStack],
    ) -> Mapping[str, Sequence[Placement]]:
        """Take the resources of all of these jobs, or nothing; returns the place of each replica in
        rank order, by role.

        The release of a job's resources is pushed on its role's stack as soon as they are taken.
        Raises: PlacementInfeasibleError, PlacementTimeoutError.
        """

    async def hold(
        self, job: Job, deadline: Deadline, resources: contextlib.AsyncExitStack
    ) -> Sequence[Placement]:
        """Take the resources of a job, as reserve; the places have the ids of their devices."""
        return (await self.reserve([job], deadline, {job.role: resources}))[job.role]

    async def give_back(  # noqa: B027 - where nothing is counted, there is nothing to free
        self, worker_id: str, place: Placement, kept: Sequence[Placement]
    ) -> None:
        """Free the resources of a worker that has ended, of a job whose other workers are at
        ``kept``. Idempotent.
        """

    async def is_lost(self, place: Placement) -> bool:
        """Whether no worker can be started again at a place, since a node of it has gone or is
        about to go.
        """
        return False

    async def preemption_notices(
        self, places: Mapping[str, Placement]
    ) -> dict[str, PreemptionNotice]:
        """Of these workers, by id, those whose nodes are about to go."""
        return {}

    def why_node_stays(self, place: Placement) -> str:
        """Why a node cannot be dropped itself; '' when it can. Blocks for one look at a cluster at
        most.
        """
        return "the script runs on it"

    def holders(self, jobs: Sequence[Job]) -> str:
        """Who holds the resources that the jobs ask for, for people."""
        return "others"

    def plan(self, jobs: Sequence[Job], running: Sequence[PlannedRole] = ()) -> Plan:
        """A place for every rank in the resources that are free now; the jobs may be colocated with
        roles that are ``running``. Raises: PlacementInfeasibleError; PlacementTimeoutError when the
        jobs would fit if others held less.
        """
        snapshot = self.snapshot()
        outcome = plan_jobs(snapshot, jobs, running=running)
        if isinstance(outcome, Plan):
            return outcome
        require_feasible(snapshot, jobs, running)
        raise busy(jobs, snapshot, self.holders(jobs), Deadline(0.0))


ADDRESS = "127.0.0.1"


class OneMachine(Allocator):
    """Places on this machine.

    Accelerators, memory and custom resources belong to the worker that requests them. CPUs are
    shared: each worker may request all CPUs of the machine, so that a laptop can run a job of many
    ranks.

    Args:
        num_cpus: number of CPUs; None for those that this process may use.
        num_gpus: number of accelerators; None for those that this process may use, counted without
            a driver.
        accelerator: 'cuda' or 'npu'; None for the kind found on the machine.
        resources: custom resources by name.
    """

    def __init__(
        self,
        *,
        num_cpus: float | None = None,
        num_gpus: int | None = None,
        accelerator: str | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        self.devices = detect_devices(num_gpus, accelerator)
        self._kind = PLATFORMS[self.devices.kind].ray_resource
        self._total: Resources = {
            **(resources or {}),
            "CPU": max(1.0, cpus_allowed(os.environ)) if num_cpus is None else float(num_cpus),
            "memory": float(memory_allowed(os.environ)),
            self._kind: float(len(self.devices.ids)),
        }
        self._held: dict[str, Resources] = {}

    def snapshot(self) -> ClusterSnapshot:
        free = self.devices.free_ids()
        available = missing_of(self._total, total_of(self._held.values()))
        node = NodeState(
            node_id=ADDRESS,
            address=ADDRESS,
            total=self._total,
            available={**available, self._kind: float(len(free))},
            free_devices=free,
        )
        return ClusterSnapshot(nodes=(node,), can_grow=False, shared=frozenset({"CPU"}))

    async def reserve(
        self,
        jobs: Sequence[Job],
        deadline: Deadline,
        resources: Mapping[str, contextlib.AsyncExitStack],
    ) -> Mapping[str, Sequence[Placement]]:
        plan = self.plan(jobs)
        for role in plan.roles:
            resources[role.role].callback(self._free, [worker.worker_id for worker in role.workers])
            for instance in role.instances:
                for worker in instance.workers:
                    held = instance.bundles[worker.bundle].resources
                    self.devices.hold(worker.worker_id, worker.devices)
                    self._held[worker.worker_id] = {
                        name: amount
                        for name, amount in held.items()
                        if name not in ("CPU", self._kind)
                    }
        return {
            role.role: [Placement.planned(worker, role.accelerator) for worker in role.workers]
            for role in plan.roles
        }

    async def give_back(self, worker_id: str, place: Placement, kept: Sequence[Placement]) -> None:
        self._free([worker_id])

    def _free(self, worker_ids: Sequence[str]) -> None:
        self.devices.free(worker_ids)
        for worker_id in worker_ids:
            self._held.pop(worker_id, None)

    def holders(self, jobs: Sequence[Job]) -> str:
        devices = dict(self.devices.holders())
        held = {
            worker_id: [*devices.get(worker_id, ()), *([show(amounts)] if amounts else [])]
            for worker_id, amounts in self._held.items()
        }
        shown = "; ".join(
            f"{worker_id}: {','.join(each)}" for worker_id, each in held.items() if each
        )
        return f"this script's own workers ({shown}), which delete_workers frees"

    def plan(self, jobs: Sequence[Job], running: Sequence[PlannedRole] = ()) -> Plan:
        asked = [  # one machine offers no choice of nodes
            change_specs(
                job,
                node_labels={},
                accelerator_type=None,
                nodelist=(),
                exclude=(),
                node_packing="pack",
            )
            for job in jobs
        ]
        return super().plan(asked, running)
