"""The resources of one machine and the workers that hold them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

from helmsman.api.plan import Plan, PlannedRole
from helmsman.api.platforms import PLATFORMS
from helmsman.api.scheduler import Job
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._node.checks import cpus_allowed, memory_allowed
from helmsman.controller._node.devices import detect_devices
from helmsman.controller._placement.allocator import Allocator
from helmsman.controller._placement.bundles import change_specs
from helmsman.controller._placement.placement import Placement
from helmsman.controller._placement.resources import Resources, missing_of, show, total_of
from helmsman.controller._placement.snapshot import ClusterSnapshot, NodeState

ADDRESS = "127.0.0.1"


class OneMachine(Allocator):
    """Places on this machine.

    Accelerators, memory and custom resources belong to the worker that requests them. CPUs are shared: each worker may request
    all CPUs of the machine, so that a laptop can run a job of many ranks.

    Args:
        num_cpus: number of CPUs; None for those that this process may use.
        num_gpus: number of accelerators; None for those that this process may use, counted without a driver.
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
        """Memory and custom resources by worker id."""

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
        self, jobs: Sequence[Job], deadline: Deadline, resources: Mapping[str, contextlib.AsyncExitStack]
    ) -> Mapping[str, Sequence[Placement]]:
        plan = self.plan(jobs)
        for role in plan.roles:
            resources[role.role].callback(self._free, [worker.worker_id for worker in role.workers])
            for instance in role.instances:
                for worker in instance.workers:
                    held = instance.bundles[worker.bundle].resources
                    self.devices.hold(worker.worker_id, worker.devices)
                    self._held[worker.worker_id] = {
                        name: amount for name, amount in held.items() if name not in ("CPU", self._kind)
                    }
        return {role.role: [Placement.planned(worker, role.accelerator) for worker in role.workers] for role in plan.roles}

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
        shown = "; ".join(f"{worker_id}: {','.join(each)}" for worker_id, each in held.items() if each)
        return f"this script's own workers ({shown}), which delete_workers frees"

    def plan(self, jobs: Sequence[Job], running: Sequence[PlannedRole] = ()) -> Plan:
        asked = [  # one machine offers no choice of nodes
            change_specs(job, node_labels={}, accelerator_type=None, nodelist=(), exclude=(), node_packing="pack")
            for job in jobs
        ]
        return super().plan(asked, running)
