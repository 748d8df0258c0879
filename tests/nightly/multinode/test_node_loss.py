"""Test of a dead node that Ray's head has not detected yet."""

from __future__ import annotations

import pytest

from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.multinode.conftest import Nodes, gpu_node


@pytest.fixture(scope="module")
def nodes(base: Nodes) -> Nodes:
    """The cluster with one node."""
    return base


def test_node_loss_unnoticed_by_head(nodes: Nodes, run: RayScheduler) -> None:
    doomed = nodes.add(**gpu_node(num_gpus=2, num_cpus=64))
    doomed.kill_raylet()  # the head detects it after some seconds
    spec = SchedulingSpec(cpu=0, gpu=1)
    assert len(run.create_workers(Job(role="train", replicas=2, tasks=[spec]))) == 2
    assert doomed.node_id not in {worker.node_id for worker in run.get_workers("train")}
    nodes.cluster.remove_node(doomed, allow_graceful=False)
