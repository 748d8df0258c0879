"""Tests that each public method refuses arguments of wrong types before it has any effect."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from helmsman import InlineScheduler, Job, Scheduler
from helmsman.api.scheduler import EngineSpec
from helmsman.api.worker_group import ClusterConfig
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._training.train_controller import TrainController
from helmsman.controller._weight_sync.sync import WeightSync
from helmsman.controller._worker_groups.cluster import Cluster
from helmsman.controller._worker_groups.resource_manager import ResourceManager
from tests.contract.engines import Counter
from tests.controller.engines import CountingRollout, RecordingTrainer
from tests.unit.hostile.wrong_values import GOOD, WORKER, arguments_of, assert_refuses, wrong_values

OWNERS = (Scheduler, TrainController, RolloutController, Cluster, ResourceManager, WeightSync)
CHECKED_ELSEWHERE = {
    *(
        (name, "method")
        for name in (
            "execute_all_async",
            "execute_all_sync",
            "execute_rank_zero_sync",
            "execute_rank_zero_async",
            "method",
        )
    ),
    ("keeps", "weights"),
}
"""Arguments whose errors are those of WorkerGroup.method, or which are only compared."""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[type[Any], Any]]:
    """An instance of each class, all on one inline scheduler."""
    with (
        InlineScheduler(log_dir=tmp_path_factory.mktemp("logs")) as scheduler,
        ResourceManager(0, scheduler=scheduler) as resources,
        Cluster("group", Counter, resources, ClusterConfig(world_size=1)) as cluster,  # type: ignore[var-annotated]
        TrainController(scheduler, RecordingTrainer, Job(role="train")) as trainer,
        RolloutController(scheduler, CountingRollout, Job(role="rollout")) as rollout,
    ):
        scheduler.create_workers(Job(role="w"))
        asyncio.run(scheduler.create_engine(WORKER, Counter, "counter"))
        trainer.initialize()
        rollout.initialize()
        made = (resources, cluster, trainer, rollout, WeightSync(trainer, rollout))
        yield {Scheduler: scheduler, **{type(each): each for each in made}}


@pytest.mark.parametrize("owner", OWNERS)
def test_methods_refuse_wrong_types(targets: Mapping[type[Any], Any], owner: type[Any]) -> None:
    scheduler, good = targets[Scheduler], {**GOOD, "rollout": targets[RolloutController]}
    before = [status.worker_id for status in scheduler.status()]
    arguments = set(arguments_of(owner)) - CHECKED_ELSEWHERE
    assert arguments
    for method, argument in sorted(arguments):
        for value in wrong_values(method, argument):
            assert_refuses(getattr(targets[owner], method), argument, value, good)
    assert [status.worker_id for status in scheduler.status()] == before
    assert scheduler.call_engine(WORKER, "add", "counter", 0) == 0
    assert targets[TrainController].get_version() == 0
    assert targets[Cluster].execute_all_sync("add", 0) == [0]


def test_create_engine_takes_engine_spec(targets: Mapping[type[Any], Any]) -> None:
    asyncio.run(targets[Scheduler].create_engine(WORKER, EngineSpec(target=Counter), "spec"))
