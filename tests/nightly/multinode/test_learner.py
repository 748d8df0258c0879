"""Tests of learners whose ranks and devices lie on several nodes."""

from __future__ import annotations

import pytest

from helmsman.api.scheduler import Job, SchedulingSpec, SchedulingStrategy
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from helmsman.controller._training.train_controller import TrainController
from tests.contract.engines import Counter
from tests.contract.helpers import Engine
from tests.controller.engines import SAMPLES, count_loss

pytestmark = pytest.mark.usefixtures("left_as_found")
ON_CPU = {"HELMSMAN_PLATFORM": "cpu"}


def test_learner_spans_nodes(run: RayScheduler) -> None:
    """Three ranks have four devices each, on nodes of eight."""
    job = Job(role="learner", replicas=3, tasks=[SchedulingSpec(cpu=1, gpu=4, env_vars=ON_CPU)])
    with TrainController(run, "tests.controller.engines.CollectiveTrainer", job) as learner:
        places = [(worker.node_id, tuple(worker.devices)) for worker in learner.workers]
        assert len(set(places)) == 3, "no device is assigned twice"
        assert len({node for node, _ in places}) == 2
        assert places == sorted(
            places, key=lambda each: [node for node, _ in places].index(each[0])
        )
        assert learner.train_batch(SAMPLES, count_loss) == {"sum": 6.0}
        # Engines for generation share the devices of the learner.
        beside = Job(
            role="generator",
            replicas=3,
            tasks=[SchedulingSpec(cpu=0.5, env_vars=ON_CPU)],
            scheduling_strategy=SchedulingStrategy(type="colocation", target="learner", fork=True),
        )
        run.create_workers(beside)
        found = run.get_workers("generator")
        assert [(each.node_id, tuple(each.devices)) for each in found] == places
        run.delete_workers("generator")


def test_learners_per_node(run: RayScheduler) -> None:
    """The counterpart of open-instruct's ``--num_learners_per_node 1 2``."""
    first, second = [node.node_id for node in run.nodes() if node.num_devices >= 8][:2]
    tasks = [
        SchedulingSpec(cpu=1, gpu=4, nodelist=[node], env_vars=ON_CPU)
        for node in (first, second, second)
    ]
    workers = run.create_workers(Job(role="learner", replicas=3, tasks=tasks))
    placed = run.get_workers("learner")
    assert [worker.node_id for worker in placed] == [first, second, second]
    devices = [set(worker.devices) for worker in placed]
    assert [len(each) for each in devices] == [4, 4, 4] and not devices[1] & devices[2]
    engines = [Engine.create(run, worker, Counter) for worker in workers]
    assert [engine.call("environ", "CUDA_VISIBLE_DEVICES") for engine in engines] == [
        {"CUDA_VISIBLE_DEVICES": ",".join(worker.devices)} for worker in placed
    ]
