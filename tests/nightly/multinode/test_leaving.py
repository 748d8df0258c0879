"""Tests of rollouts and roles on nodes that are drained or die."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from helmsman.api import errors
from helmsman.api.generation import SamplingParams
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._rollout.health import Health
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, wait_until
from tests.multinode.conftest import Nodes, gpu_node
from tests.multinode.leaving import all_serve, drain, end_node, ids_on, settle, start_rollout


@pytest.fixture(scope="module")
def nodes(base: Nodes) -> Nodes:
    """The cluster with one node."""
    return base


def test_drained_node_without_room(
    nodes: Nodes, run: RayScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    doomed = nodes.add(**gpu_node(num_gpus=2))
    with start_rollout(run, 2) as rollout, caplog.at_level(logging.WARNING):
        (leaving,) = ids_on(rollout, doomed)
        settle(doomed)
        drain(nodes, doomed.node_id)
        wait_until(
            lambda: rollout.stats().instances[leaving].state is Health.DEAD,
            "the instance is given up",
            60.0,
        )
        assert len(rollout.generate([[1]] * 10)) == 10
        wait_until(
            lambda: (
                re.search(
                    f"{leaving} stays dead for \\d+ s, as its restarts are used up; 1 instances "
                    "remain",
                    caplog.text,
                )
                is not None
            ),
            "the warning is logged",
            90.0,
        )
        assert (
            f"{leaving} is being drained: its node {doomed.node_ip_address} is being drained; its "
            "requests" in caplog.text
        )
        rollout.remove([leaving])
        assert len(rollout.generate([[1]] * 10)) == 10
    end_node(nodes, doomed)


def test_killed_node_instances_move(nodes: Nodes, run: RayScheduler) -> None:
    doomed = nodes.add(**gpu_node(num_gpus=2))
    with start_rollout(run, 2) as rollout:
        assert rollout.update_weights({"weight": [1.0]}, 3) == 3
        (lost,) = ids_on(rollout, doomed)
        spare = nodes.add(**gpu_node(num_gpus=2))
        futures = [
            rollout.submit([i + 1, i + 2], SamplingParams(max_new_tokens=2)) for i in range(100)
        ]
        end_node(nodes, doomed)
        assert [future.result(60).token_ids for future in futures] == [
            [i + 2, i + 3] for i in range(100)
        ]
        wait_until(
            lambda: ids_on(rollout, spare) == [lost] and all_serve(rollout),
            "the instance is on the spare node",
            90.0,
        )
        assert set(rollout.versions().values()) == {3}
        assert len(rollout.generate([[1]] * 10)) == 10
    wait_until(
        lambda: nodes.free()[spare.node_id].get("GPU") == 2.0, "the spare node is free again"
    )
    end_node(nodes, spare)


def test_preemption_notices_of_drained_node(nodes: Nodes, run: RayScheduler) -> None:
    doomed = nodes.add(**gpu_node(num_gpus=4))
    run.create_workers(
        Job(
            role="shared",
            replicas=4,
            tasks=[SchedulingSpec(cpu=0, gpu=1, nodelist=[doomed.node_id])],
        )
    )
    assert asyncio.run(run.preemption_notices()) == {}
    drain(nodes, doomed.node_id, deadline_s=300.0)
    notices = wait_until(lambda: asyncio.run(run.preemption_notices()), "there is a notice")
    assert list(notices) == [f"shared/{index}" for index in range(4)]
    assert 200.0 < notices["shared/0"].deadline_s <= 300.0
    assert "is being drained" in notices["shared/0"].reason
    with pytest.raises(errors.StartError):
        run.restart_worker("shared/1")  # its spec allows no other node
    run.remove_workers("shared", ["shared/1"])
    assert Engine.create(run, "shared/2", Counter).call("add", 1) == 1
    settle(doomed)
    run.delete_workers("shared")
    end_node(nodes, doomed)
    assert asyncio.run(run.preemption_notices()) == {}


def test_restart_worker_after_node_loss(nodes: Nodes, run: RayScheduler) -> None:
    doomed = nodes.add(**gpu_node(num_gpus=2))
    run.create_workers(
        Job(role="train", replicas=2, tasks=[SchedulingSpec(cpu=0, gpu=2, port_count=1)])
    )
    before = {worker.id: worker for worker in run.get_workers("train")}
    (lost,) = [worker.id for worker in before.values() if worker.node_id == doomed.node_id]
    (kept,) = set(before) - {lost}
    end_node(nodes, doomed)
    with pytest.raises(errors.PlacementTimeoutError, match="held by train of this run itself"):
        run.restart_worker(lost)
    spare = nodes.add(**gpu_node(num_gpus=2))
    run.restart_worker(lost)
    run.restart_worker(kept)  # its group has lost a bundle that it does not need
    after = {worker.id: worker for worker in run.get_workers("train")}
    assert list(after) == ["train/0", "train/1"]
    assert after[lost].node_id == spare.node_id
    assert after[kept].node_id == before[kept].node_id
    assert len(after[lost].devices) == len(after[kept].devices) == 2
    for worker_id in after:
        assert Engine.create(run, worker_id, Counter).call("add", 1) == 1
    run.delete_workers("train")
    wait_until(
        lambda: all(resources.get("GPU", 2.0) == 2.0 for resources in nodes.free().values()),
        "all is free again",
    )
    end_node(nodes, spare)
