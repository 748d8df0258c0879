"""Test that a training job on several nodes loses a node, and continues elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from helmsman.controller._training.recovery import RecoverableTraining, RecoveryPolicy
from helmsman.controller._training.train_controller import TrainController
from tests.contract.helpers import wait_until
from tests.controller.recovery_engines import plan_fault
from tests.engines.small_models import QWEN2, random_tokens
from tests.multinode.conftest import Nodes, gpu_node

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def nodes(base: Nodes) -> Nodes:
    """The cluster with one node."""
    return base


def test_recovery_after_node_loss(nodes: Nodes, run: RayScheduler, tmp_path: Path) -> None:
    added = {node.node_id: node for node in [nodes.add(**gpu_node(num_gpus=1)) for _ in range(2)]}
    faults = tmp_path / "faults"
    faults.mkdir()
    on_cpu = {"HELMSMAN_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    spec = SchedulingSpec(cpu=1, gpu=1, node_packing="strict_spread", env_vars=on_cpu)
    trainer = TrainController(
        run,
        "tests.controller.recovery_engines.FaultyTrainEngine",
        Job(role="train", replicas=2, tasks=[spec]),
        (str(faults),),
        {"model": QWEN2, "lr": 1e-2, "rendezvous_timeout_s": 180},
    )
    places: list[list[str]] = []
    losses: dict[int, list[float]] = {}
    removals: list[threading.Thread] = []

    def lose_node() -> None:
        """End a node while a step runs there."""
        rank = next(rank for rank, worker in enumerate(trainer.workers) if worker.node_id in added)
        plan_fault(faults, "loss", rank, "stop")
        node = added.pop(trainer.workers[rank].node_id)

        def remove() -> None:
            wait_until(
                lambda: not list(faults.iterdir()), "the step has reached the node", limit_s=240.0
            )
            nodes.cluster.remove_node(node, allow_graceful=False)

        removals.append(threading.Thread(target=remove))
        removals[-1].start()

    planned: dict[int, Callable[[], None]] = {4: lose_node}

    def step(number: int) -> None:
        if (fault := planned.pop(number, None)) is not None:
            fault()
        samples = [
            {"input_ids": random_tokens(4 + each, seed=100 * number + each)} for each in range(6)
        ]
        loss = trainer.train_batch(
            samples, "tests.controller.recovery_engines.sft_with_faults", {"faults": str(faults)}
        )
        losses.setdefault(number, []).append(loss["loss"])

    def on_begin(number: int) -> None:
        places.append([worker.node_id for worker in trainer.workers])

    with trainer:
        trainer.initialize()
        policy = RecoveryPolicy(
            checkpoints=tmp_path / "checkpoints", save_every=2, pause_s=0.1, dead_s=240.0
        )
        RecoverableTraining(trainer, policy, step, on_begin=on_begin).run(1, 5)
        removals[0].join()
        first, after_node = places
        assert len(set(first)) == len(set(after_node)) == 2
        assert set(after_node) != set(first), "one rank is on the spare node"
        assert trainer.get_version() == 5
    assert {number: len(each) for number, each in losses.items()} == {1: 1, 2: 1, 3: 2, 4: 1, 5: 1}
    assert all(len(set(each)) == 1 for each in losses.values()), "a repeated step has the same loss"
    for node in added.values():
        nodes.cluster.remove_node(node)
