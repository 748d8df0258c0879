"""How a scheduler of one machine describes it to the planner: its accelerators are counted, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from helmsman.api.scheduler import Job
from helmsman.controller.cluster_snapshot import ClusterSnapshot, NodeState

_PLENTY = 1e9
"""Of what is not counted. A bundle that asks for nothing else still has a trace of CPU."""


def one_machine(address: str, accelerator: str, ids: Sequence[str], free: Sequence[str]) -> ClusterSnapshot:
    """This machine with the devices ``ids``, of which ``free`` are free."""
    total = {"CPU": _PLENTY, accelerator: float(len(ids))}
    available = {"CPU": _PLENTY, accelerator: float(len(free))}
    node = NodeState(node_id=address, address=address, total=total, available=available, free_devices=tuple(free))
    return ClusterSnapshot(nodes=(node,), can_grow=False)


def on_one_machine(job: Job, **changes: float) -> Job:
    """The job without what one machine does not count: CPUs, memory, custom resources, and the choice of a node."""
    tasks = [
        msgspec.structs.replace(
            spec,
            cpu=0,
            mem=0,
            resources={},
            node_labels={},
            accelerator_type=None,
            nodelist=(),
            exclude=(),
            node_packing="pack",
            **changes,
        )
        for spec in job.tasks
    ]
    return msgspec.structs.replace(job, tasks=tasks)
