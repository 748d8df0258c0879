"""Nodes that are drained or end, and a supervised rollout."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import psutil
import ray
from ray.core.generated import autoscaler_pb2

from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._rollout.health import Health, SupervisionPolicy
from helmsman.controller._rollout.retries import RetryGeneration
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.contract.helpers import wait_until
from tests.multinode.conftest import Nodes
from tests.processes import command_of

POLICY = SupervisionPolicy(probe_every_s=0.2, suspect_s=10.0, dead_s=30.0, restart_pause_s=0.2)
TWO_DEVICES = SchedulingSpec(cpu=0, gpu=2, ray_placement_strategy="separate")
ELASTIC = SchedulingSpec(
    cpu=0, gpu=4, ray_placement_strategy="separate", node_labels={"elastic": "yes"}
)
"""All devices of a node with this label."""


def drain(nodes: Nodes, node_id: str, deadline_s: float = 600.0) -> None:
    """Drain a node like ``ray drain-node``."""
    reason: Any = autoscaler_pb2.DrainNodeReason  # type: ignore[attr-defined]
    client = ray._raylet.GcsClient(address=nodes.address)  # type: ignore[attr-defined]
    is_accepted, why = client.drain_node(
        node_id,
        reason.DRAIN_NODE_REASON_PREEMPTION,
        "a test",
        int((time.time() + deadline_s) * 1000),
    )
    assert is_accepted, why


def settle(node: Any) -> None:
    """Wait until a node starts no worker: a starting worker would outlive its raylet for long."""
    raylet = node.all_processes["raylet"][0].process.pid

    def starts_one() -> bool:
        with contextlib.suppress(psutil.Error):
            # A drained raylet without work ends by itself.
            return any(
                "default_worker.py" in command_of(each)
                for each in psutil.Process(raylet).children()
            )
        return False

    wait_until(lambda: not starts_one(), "workers have started")


def end_node(nodes: Nodes, node: Any) -> None:
    """End a node at once."""
    settle(node)
    nodes.cluster.remove_node(node, allow_graceful=False)


def start_rollout(
    run: RayScheduler, replicas: int, spec: SchedulingSpec = TWO_DEVICES, **options: Any
) -> RolloutController:
    rollout = RolloutController(
        run,
        "tests.controller.engines.CountingRollout",
        Job(role="rollout", replicas=replicas, tasks=[spec]),
        retries=RetryGeneration(),
        supervision=POLICY,
        max_in_flight_per_worker=8,
        **options,
    )
    rollout.initialize()
    return rollout


def ids_on(rollout: RolloutController, node: Any) -> list[str]:
    return [worker.id for worker in rollout.workers if worker.node_id == node.node_id]


def all_serve(rollout: RolloutController) -> bool:
    return all(each.state is Health.HEALTHY for each in rollout.stats().instances.values())
