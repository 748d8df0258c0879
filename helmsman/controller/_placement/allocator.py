"""The contract of the part of a backend that plans, takes and frees places for workers."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Mapping, Sequence

from helmsman.api.plan import Plan, PlannedRole
from helmsman.api.scheduler import Job, PreemptionNotice
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._placement.admission import busy, require_feasible
from helmsman.controller._placement.placement import Placement
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.snapshot import ClusterSnapshot


class Allocator(abc.ABC):
    """Takes places on a machine or a cluster. ``snapshot`` and ``reserve`` have to be filled; the rest has defaults."""

    @abc.abstractmethod
    def snapshot(self) -> ClusterSnapshot:
        """The nodes and what of them is free. Blocks for one look at a cluster at most."""

    @abc.abstractmethod
    async def reserve(
        self, jobs: Sequence[Job], deadline: Deadline, resources: Mapping[str, contextlib.AsyncExitStack]
    ) -> Mapping[str, Sequence[Placement]]:
        """Take the resources of all of these jobs, or nothing; returns the place of each replica in rank order, by role.

        The release of a job's resources is pushed on its role's stack as soon as they are taken. Raises:
        PlacementInfeasibleError, PlacementTimeoutError.
        """

    async def hold(self, job: Job, deadline: Deadline, resources: contextlib.AsyncExitStack) -> Sequence[Placement]:
        """Take the resources of a job, as reserve; the places have the ids of their devices."""
        return (await self.reserve([job], deadline, {job.role: resources}))[job.role]

    async def give_back(  # noqa: B027 - where nothing is counted, there is nothing to free
        self, worker_id: str, place: Placement, kept: Sequence[Placement]
    ) -> None:
        """Free the resources of a worker that has ended, of a job whose other workers are at ``kept``. Idempotent."""

    async def is_lost(self, place: Placement) -> bool:
        """Whether no worker can be started again at a place, since a node of it has gone or is about to go."""
        return False

    async def preemption_notices(self, places: Mapping[str, Placement]) -> dict[str, PreemptionNotice]:
        """Of these workers, by id, those whose nodes are about to go."""
        return {}

    def why_node_stays(self, place: Placement) -> str:
        """Why a node cannot be dropped itself; '' when it can. Blocks for one look at a cluster at most."""
        return "the script runs on it"

    def holders(self, jobs: Sequence[Job]) -> str:
        """Who holds the resources that the jobs ask for, for people."""
        return "others"

    def plan(self, jobs: Sequence[Job], running: Sequence[PlannedRole] = ()) -> Plan:
        """A place for every rank in the resources that are free now.

        Args:
            running: roles that the jobs may be colocated with.
        Raises: PlacementInfeasibleError; PlacementTimeoutError when the jobs would fit if others held less.
        """
        snapshot = self.snapshot()
        outcome = plan_jobs(snapshot, jobs, running=running)
        if isinstance(outcome, Plan):
            return outcome
        require_feasible(snapshot, jobs, running)
        raise busy(jobs, snapshot, self.holders(jobs), Deadline(0.0))
