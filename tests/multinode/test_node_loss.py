"""Test of a node that dies under a running job."""

from __future__ import annotations

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, SchedulingSpec, WorkerState
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, Gate, wait_until
from tests.multinode.conftest import Nodes, gpu_node
from tests.multinode.leaving import ELASTIC


def test_node_loss_fails_its_workers(nodes: Nodes, run: RayScheduler, gate: Gate) -> None:
    doomed = nodes.add(**gpu_node(num_gpus=4, labels={"elastic": "yes"}))
    run.create_workers(Job(role="rollout", replicas=2, tasks=[ELASTIC]))
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
        "the others continue"
    )
    states = {status.worker_id: status.state for status in run.status()}
    assert {id_ for id_, state in states.items() if state is WorkerState.FAILED} == {lost.id}
    with pytest.raises(errors.WorkerFailedError, match="lost with its node"):
        engines[lost.id].call("add", 1)

    run.delete_workers()
    wait_until(lambda: nodes.free() == nodes.total(), "the other nodes are free again")
    run.create_workers(Job(role="again", tasks=[ELASTIC]))
    assert run.get_workers("again")[0].node_id != doomed.node_id
