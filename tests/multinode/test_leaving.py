"""Nodes that are drained, or die, under a rollout: its instances are rebuilt on others, and no
request is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from typing import Any

import psutil
import pytest
import ray
from ray.core.generated import autoscaler_pb2

from helmsman.api import errors
from helmsman.api.generation import SamplingParams
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._generation.health import Health, SupervisionPolicy
from helmsman.controller._generation.retries import RetryGeneration
from helmsman.controller._ray_backend.scheduler import RayScheduler
from helmsman.controller._rollout.rollout_controller import RolloutController
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, wait_until
from tests.multinode.conftest import Nodes, gpu_node
from tests.processes import command_of

POLICY = SupervisionPolicy(probe_every_s=0.2, suspect_s=10.0, dead_s=30.0, restart_pause_s=0.2)
TWO_DEVICES = SchedulingSpec(cpu=0, gpu=2, ray_placement_strategy="separate")


@pytest.fixture(scope="module")
def nodes(base: Nodes) -> Nodes:
    """A node that lives on; tests add those that go."""
    return base


def _drain(nodes: Nodes, node_id: str, deadline_s: float = 600.0) -> None:
    """As ``ray drain-node`` does it."""
    reason: Any = autoscaler_pb2.DrainNodeReason  # type: ignore[attr-defined]
    client = ray._raylet.GcsClient(address=nodes.address)  # type: ignore[attr-defined]
    is_accepted, why = client.drain_node(
        node_id,
        reason.DRAIN_NODE_REASON_PREEMPTION,
        "a test",
        int((time.time() + deadline_s) * 1000),
    )
    assert is_accepted, why


def _settle(node: Any) -> None:
    """Wait until a node starts no worker: one that does not know its raylet yet outlives it by
    long.
    """
    raylet = node.all_processes["raylet"][0].process.pid

    def starts_one() -> bool:
        with contextlib.suppress(psutil.Error):
            # it ends by itself, once it is drained and has no work
            return any(
                "default_worker.py" in command_of(each)
                for each in psutil.Process(raylet).children()
            )
        return False

    wait_until(lambda: not starts_one(), "workers have started")


def _end(nodes: Nodes, node: Any) -> None:
    """End a node at once."""
    _settle(node)
    nodes.cluster.remove_node(node, allow_graceful=False)


def _rollout(run: RayScheduler, replicas: int, **options: Any) -> RolloutController:
    rollout = RolloutController(
        run,
        "tests.controller.engines.CountingRollout",
        Job(role="rollout", replicas=replicas, tasks=[TWO_DEVICES]),
        retries=RetryGeneration(),
        supervision=POLICY,
        max_in_flight_per_worker=8,
        **options,
    )
    rollout.initialize()
    return rollout


def _on(rollout: RolloutController, node: Any) -> list[str]:
    return [worker.id for worker in rollout.workers if worker.node_id == node.node_id]


def _all_serve(rollout: RolloutController) -> bool:
    return all(each.state is Health.HEALTHY for each in rollout.stats().instances.values())


def test_drained_node_requests_move(nodes: Nodes, run: RayScheduler) -> None:
    doomed = nodes.add(**gpu_node(num_gpus=2))
    with _rollout(run, 2, engine_kwargs={"gated": True}) as rollout:
        assert rollout.update_weights({"weight": [1.0]}, 5) == 5
        (leaving,) = _on(rollout, doomed)
        (staying,) = {worker.id for worker in rollout.workers} - {leaving}
        futures = [
            rollout.submit([i + 1, i + 2, i + 3], SamplingParams(max_new_tokens=8))
            for i in range(6)
        ]
        wait_until(
            lambda: len(run.call_engine(leaving, "figures")[2]) == 3, "half of them are there"
        )
        spare = nodes.add(**gpu_node(num_gpus=2))
        _settle(doomed)
        _drain(nodes, doomed.node_id)
        wait_until(
            lambda: _on(rollout, spare) == [leaving] and _all_serve(rollout),
            "it is on the spare node",
            60.0,
        )
        assert rollout.stats().instances[staying].num_in_flight == 6
        _end(nodes, doomed)
        while not all(future.done() for future in futures):
            run.call_engine(staying, "finish")
        results = [future.result() for future in futures]
        assert sorted(len(result.token_ids) for result in results) == [3, 3, 3, 8, 8, 8], (
            "with the tokens that they had"
        )
        assert {version for result in results for version in result.versions} == {5}
        assert rollout.versions() == {staying: 5, leaving: 5}
        assert run.scale("rollout", 1) == []
    _end(nodes, spare)


def test_drained_node_without_room(
    nodes: Nodes, run: RayScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    doomed = nodes.add(**gpu_node(num_gpus=2))
    with _rollout(run, 2) as rollout, caplog.at_level(logging.WARNING):
        (leaving,) = _on(rollout, doomed)
        _settle(doomed)
        _drain(nodes, doomed.node_id)
        wait_until(
            lambda: rollout.stats().instances[leaving].state is Health.DEAD, "it is given up", 60.0
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
            "it is said",
            90.0,
        )
        assert (
            f"{leaving} is being drained: its node {doomed.node_ip_address} is being drained; its "
            "requests" in caplog.text
        )
        rollout.remove([leaving])
        assert len(rollout.generate([[1]] * 10)) == 10
    _end(nodes, doomed)


def test_killed_node_instances_move(nodes: Nodes, run: RayScheduler) -> None:
    doomed = nodes.add(**gpu_node(num_gpus=2))
    with _rollout(run, 2) as rollout:
        assert rollout.update_weights({"weight": [1.0]}, 3) == 3
        (lost,) = _on(rollout, doomed)
        spare = nodes.add(**gpu_node(num_gpus=2))
        futures = [
            rollout.submit([i + 1, i + 2], SamplingParams(max_new_tokens=2)) for i in range(100)
        ]
        _end(nodes, doomed)
        assert [future.result(60).token_ids for future in futures] == [
            [i + 2, i + 3] for i in range(100)
        ]
        wait_until(
            lambda: _on(rollout, spare) == [lost] and _all_serve(rollout),
            "it is on the spare node",
            90.0,
        )
        assert set(rollout.versions().values()) == {3}
        assert len(rollout.generate([[1]] * 10)) == 10
    wait_until(
        lambda: nodes.free()[spare.node_id].get("GPU") == 2.0, "the spare node is free again"
    )
    _end(nodes, spare)


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
    _drain(nodes, doomed.node_id, deadline_s=300.0)
    notices = wait_until(lambda: asyncio.run(run.preemption_notices()), "it is told")
    assert list(notices) == [f"shared/{index}" for index in range(4)]
    assert 200.0 < notices["shared/0"].deadline_s <= 300.0
    assert "is being drained" in notices["shared/0"].reason
    with pytest.raises(errors.StartError):
        run.restart_worker("shared/1")  # its spec allows no other node
    run.remove_workers("shared", ["shared/1"])
    assert Engine.create(run, "shared/2", Counter).call("add", 1) == 1
    _settle(doomed)
    run.delete_workers("shared")
    _end(nodes, doomed)
    assert asyncio.run(run.preemption_notices()) == {}


def test_restart_worker_after_node_loss(nodes: Nodes, run: RayScheduler) -> None:
    doomed = nodes.add(**gpu_node(num_gpus=2))
    run.create_workers(
        Job(role="train", replicas=2, tasks=[SchedulingSpec(cpu=0, gpu=2, port_count=1)])
    )
    before = {worker.id: worker for worker in run.get_workers("train")}
    (lost,) = [worker.id for worker in before.values() if worker.node_id == doomed.node_id]
    (kept,) = set(before) - {lost}
    _end(nodes, doomed)
    with pytest.raises(errors.PlacementTimeoutError, match="held by train of this run itself"):
        run.restart_worker(lost)
    spare = nodes.add(**gpu_node(num_gpus=2))
    run.restart_worker(lost)
    run.restart_worker(kept)  # its group has lost a bundle, which it does not need
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
    _end(nodes, spare)
