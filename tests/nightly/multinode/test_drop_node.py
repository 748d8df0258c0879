"""Tests of a drill that drops a node: its workers, and its raylet in a cluster of the same run."""

from __future__ import annotations

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._node.run_registry import RUN_LABEL, RUN_VARIABLE
from helmsman.controller._ray_backend.scheduler import RayScheduler
from helmsman.testing import DropNode, FaultPlan, FaultRecord
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, is_running, wait_gone
from tests.multinode.conftest import Nodes, gpu_node


@pytest.fixture(scope="module")
def nodes(base: Nodes) -> Nodes:
    """The cluster with one node."""
    return base


def _drop(
    run: RayScheduler, node_id: str
) -> tuple[list[FaultRecord], dict[str, Engine], dict[str, Engine]]:
    """Drop a node under two jobs; return the records, its engines and the other engines."""
    spec = SchedulingSpec(cpu=0, gpu=1)
    spread = SchedulingSpec(cpu=1, gpu=0, node_packing="strict_spread")
    ids = run.create_workers(
        [
            Job(role="rollout", replicas=4, tasks=[spec]),
            Job(role="train", replicas=2, tasks=[spread]),
        ]
    )
    there = {
        worker.id
        for role in ("rollout", "train")
        for worker in run.get_workers(role)
        if worker.node_id == node_id
    }
    engines = {worker_id: Engine.create(run, worker_id, Counter) for worker_id in ids}
    target = min(there)
    records = FaultPlan([DropNode(target, at_step=1)]).begin(run).step(1)
    assert {record.injection.worker_id for record in records} == there
    assert len(there) >= 2
    return (
        records,
        {id_: engines[id_] for id_ in there},
        {id_: engines[id_] for id_ in engines.keys() - there},
    )


def test_drop_node_of_foreign_cluster(nodes: Nodes, run: RayScheduler) -> None:
    doomed = nodes.add(**gpu_node(num_gpus=2))
    raylet = doomed.all_processes["raylet"][0].process.pid
    records, there, elsewhere = _drop(run, doomed.node_id)
    assert {record.injection.outcome for record in records} == {
        "killed; the node itself stays: this run has not started the cluster"
    }
    wait_gone({record.injection.worker_id: record.injection.pid or 0 for record in records})
    for engine in there.values():
        with pytest.raises(errors.WorkerFailedError, match="SIGKILL"):
            engine.call("add")
    assert [engine.call("add") for engine in elsewhere.values()] == [1] * len(elsewhere)
    assert is_running(raylet)
    run.delete_workers()
    nodes.cluster.remove_node(doomed, allow_graceful=False)


def test_drop_node_of_own_cluster(
    nodes: Nodes, run: RayScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, "drill")
    doomed = nodes.add(**gpu_node(num_gpus=2), labels={RUN_LABEL: "drill"})
    raylet = doomed.all_processes["raylet"][0].process.pid
    records, there, elsewhere = _drop(run, doomed.node_id)
    assert {record.injection.outcome for record in records} == {
        "killed; its raylet was killed, too"
    }
    wait_gone(
        {
            "raylet": raylet,
            **{record.injection.worker_id: record.injection.pid or 0 for record in records},
        }
    )
    for engine in there.values():
        with pytest.raises(errors.WorkerFailedError, match="lost with its node"):
            engine.call("add")
    assert [engine.call("add") for engine in elsewhere.values()] == [1] * len(elsewhere)
    nodes.cluster.remove_node(doomed, allow_graceful=False)
    run.delete_workers()
