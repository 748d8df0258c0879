"""Allocators, which reserve and free the places that planner.plan_jobs has chosen."""

from __future__ import annotations

import abc
import contextlib
import os
from collections.abc import Mapping, Sequence

from helmsman._base.event_loop import Deadline
from helmsman._process.devices import detect_devices
from helmsman._process.observation import cpus_allowed, memory_allowed
from helmsman.api.plan import Plan, PlannedRole
from helmsman.api.platforms import PLATFORMS
from helmsman.api.scheduler import Job, PreemptionNotice
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
    """Reserves places on a machine or a cluster.

    Subclasses implement ``snapshot`` and ``reserve``; the other methods have defaults.
    """

    @abc.abstractmethod
    def snapshot(self) -> ClusterSnapshot:
        """Return the nodes and their free resources; blocks for one cluster query at most."""

    @abc.abstractmethod
    async def reserve(
        self,
        jobs: Sequence[Job],
        deadline: Deadline,
        resources: Mapping[str, contextlib.AsyncExitStack],
    ) -> Mapping[str, Sequence[Placement]]:
        """Reserve the resources of all of these jobs, or none.

        Args:
            jobs: Jobs to place.
            deadline: Deadline of the whole reservation.
            resources: Exit stack of each role; the release of a job's resources is pushed on it as
                soon as they are reserved.

        Returns:
            The place of each replica in rank order, by role.

        Raises:
            PlacementInfeasibleError: The jobs would not fit even on an empty cluster.
            PlacementTimeoutError: The resources did not become free before the deadline.
        """

    async def hold(
        self, job: Job, deadline: Deadline, resources: contextlib.AsyncExitStack
    ) -> Sequence[Placement]:
        """Reserve one job like ``reserve``; the places include their device ids."""
        return (await self.reserve([job], deadline, {job.role: resources}))[job.role]

    async def give_back(  # noqa: B027 - where nothing is counted, there is nothing to free
        self, worker_id: str, place: Placement, kept: Sequence[Placement]
    ) -> None:
        """Free the resources of a worker that has ended. Idempotent.

        ``kept`` are the places of the job's other workers.
        """

    async def is_lost(self, place: Placement) -> bool:
        """Return whether a node of the place is lost or will be, so no worker can restart there."""
        return False

    async def preemption_notices(
        self, places: Mapping[str, Placement]
    ) -> dict[str, PreemptionNotice]:
        """Return the notices of workers, by id, whose nodes will be preempted."""
        return {}

    def holders(self, jobs: Sequence[Job]) -> str:
        """Describe the holders of the resources that the jobs request, for messages."""
        return "others"

    def why_pending(self, jobs: Sequence[Job]) -> str:
        """Describe why the placement of these jobs is pending; '' if they fit now.

        Blocks for a few cluster queries.
        """
        snapshot = self.snapshot()
        if isinstance(plan_jobs(snapshot, jobs), Plan):
            return ""
        waits = busy(jobs, snapshot, self.holders(jobs), Deadline(0.0))
        return f"requests {waits.requested}; free: {waits.free}; held by {waits.holders}"

    def plan(self, jobs: Sequence[Job], running: Sequence[PlannedRole] = ()) -> Plan:
        """Plan a place for every rank in the resources that are free now.

        Jobs may be colocated with roles in ``running``.

        Raises:
            PlacementInfeasibleError: The jobs would not fit even on an empty cluster.
            PlacementTimeoutError: The jobs would fit on an empty cluster, but not now.
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
        num_cpus: Number of CPUs; by default the number that this process may use.
        num_gpus: Number of accelerators; by default those that this process may use, counted
            without a driver.
        accelerator: 'cuda', 'rocm' or 'npu'; detected by default.
        resources: Custom resources by name.
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
