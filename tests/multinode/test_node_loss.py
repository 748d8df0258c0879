"""A node that dies under a running job."""

from __future__ import annotations

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, SchedulingSpec, WorkerState
from helmsman.controller._ray_backend.scheduler import RayScheduler
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, Gate, wait_until
from tests.multinode.conftest import Nodes, gpu_node


@pytest.fixture(scope="module")
def nodes(base: Nodes) -> Nodes:
    """A node that lives on; tests add those that go."""
    return base


def test_node_loss_fails_its_workers(nodes: Nodes, run: RayScheduler, gate: Gate) -> None:
    doomed = nodes.add(**gpu_node(num_gpus=2))
    run.create_workers(
        Job(
            role="rollout",
            replicas=2,
            tasks=[SchedulingSpec(cpu=0, gpu=2, ray_placement_strategy="separate")],
        )
    )
    run.create_workers(Job(role="train", replicas=1, tasks=[SchedulingSpec(cpu=1, gpu=0)]))
    (lost,) = [worker for worker in run.get_workers("rollout") if worker.node_id == doomed.node_id]
    engines = {
        worker.id: Engine.create(run, worker.id, Counter) for worker in run.get_workers("rollout")
    }
    held = engines[lost.id].begin("wait", *gate.files)
    gate.wait_started()
    nodes.cluster.remove_node(doomed, allow_graceful=False)

    with pytest.raises(errors.WorkerFailedError) as caught:
        held.result(60)
    assert "lost with its node" in str(caught.value)
    assert lost.ip in str(caught.value)
    assert "wait" in str(caught.value)
    assert [engine.call("add", 1) for id_, engine in engines.items() if id_ != lost.id] == [1], (
        "the others go on"
    )
    states = {status.worker_id: status.state for status in run.status()}
    assert {id_ for id_, state in states.items() if state is WorkerState.FAILED} == {lost.id}
    with pytest.raises(errors.WorkerFailedError, match="lost with its node"):
        engines[lost.id].call("add", 1)

    run.delete_workers()
    wait_until(
        lambda: all(resources.get("GPU", 2.0) == 2.0 for resources in nodes.free().values()),
        "the other node is free again",
    )
    run.create_workers(Job(role="again", replicas=1, tasks=[SchedulingSpec(cpu=0, gpu=2)]))
    assert {worker.node_id for worker in run.get_workers("again")}.isdisjoint({doomed.node_id})


def test_node_loss_unnoticed_by_head(nodes: Nodes, run: RayScheduler) -> None:
    doomed = nodes.add(**gpu_node(num_gpus=2, num_cpus=64))
    doomed.kill_raylet()  # the head notices after some seconds
    spec = SchedulingSpec(cpu=0, gpu=1)
    assert len(run.create_workers(Job(role="train", replicas=2, tasks=[spec]))) == 2
    assert doomed.node_id not in {worker.node_id for worker in run.get_workers("train")}
    nodes.cluster.remove_node(doomed, allow_graceful=False)
