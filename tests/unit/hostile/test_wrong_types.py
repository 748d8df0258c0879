"""Tests that methods refuse values which would pass for others, before they have any effect."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from helmsman import InlineScheduler, Job, Scheduler
from helmsman.api.scheduler import EngineSpec
from helmsman.api.worker_group import ClusterConfig
from helmsman.controller._groups.cluster import Cluster
from helmsman.controller._groups.resource_manager import ResourceManager
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._training.train_controller import TrainController
from helmsman.controller._weights.sync import WeightSync
from tests.contract.engines import Counter
from tests.controller.engines import CountingRollout, RecordingTrainer
from tests.unit.hostile.wrong_values import NAN, OF_SCHEDULER, WORKER, Wrong, assert_refuses

SAMPLES = [{"input_ids": [1]}]
REFUSED: Sequence[tuple[type[Any], Wrong]] = (
    *((Scheduler, wrong) for wrong in OF_SCHEDULER),
    *(
        (TrainController, wrong)
        for wrong in (
            (lambda t: t.train_batch("text", "sft"), ValueError, "sample 0"),
            (lambda t: t.train_batch(SAMPLES, "sft", timeout="1"), TypeError, "timeout is '1'"),
            (lambda t: t.async_forward(SAMPLES, timeout=NAN), ValueError, "timeout=nan"),
            (lambda t: t.save(5), TypeError, "int"),
            (lambda t: t.set_version(True), TypeError, "the argument version is True"),
            (lambda t: t.async_set_version("1"), TypeError, "the argument version is '1'"),
        )
    ),
    *(
        (RolloutController, wrong)
        for wrong in (
            (lambda r: r.generate_one("text"), ValueError, "expected its token ids"),
            (lambda r: r.generate_one(b"text"), ValueError, "expected its token ids"),
            (lambda r: r.generate([1, 2]), ValueError, "prompt 0 is of type int"),
            (lambda r: r.generate([[1]], num_samples=True), TypeError, "num_samples is True"),
            (lambda r: r.async_generate([[1]], num_samples="2"), TypeError, "num_samples is '2'"),
            (lambda r: r.generate_one([1], {"seed": 1}), TypeError, "sampling is {'seed': 1}"),
            (lambda r: r.submit([1], options={}), TypeError, "the argument options is {}"),
            (lambda r: r.generate([[1]], options=5), TypeError, "the argument options is 5"),
            (lambda r: r.abort("id"), ValueError, "expected a sequence of ids, such as ['id']"),
            (lambda r: r.abort([5]), TypeError, "the argument request_ids is 5"),
            (lambda r: r.drain("rollout/0"), ValueError, "expected a sequence of ids"),
            (lambda r: r.drain([5]), TypeError, "the worker is 5"),
            (lambda r: r.add(True), TypeError, "the argument count is True"),
            (lambda r: r.scale("2"), TypeError, "the argument replicas is '2'"),
            (lambda r: r.pause("wait", NAN), ValueError, "pause: timeout=nan"),
            (lambda r: r.wait_idle(True), TypeError, "the argument timeout is True"),
            (lambda r: r.sleep(timeout=NAN), ValueError, "sleep: timeout=nan"),
            (lambda r: r.sleep(in_flight=None), ValueError, "in_flight is None"),
            (lambda r: r.async_wake(timeout="1"), TypeError, "the argument timeout is '1'"),
            (lambda r: r.update_weights("/w", 1), TypeError, "the argument weights is '/w'"),
            (lambda r: r.update_weights({}, True), TypeError, "the argument version is True"),
            (lambda r: r.update_weights({}, 1, NAN), ValueError, "update_weights: timeout=nan"),
        )
    ),
    *(
        (Cluster, wrong)
        for wrong in (
            (lambda c: c.execute_all_sync("add", timeout=NAN), ValueError, "timeout=nan"),
            (lambda c: c.execute_on([True], "add"), TypeError, "the argument rank is True"),
            (lambda c: c.execute_on("0", "add"), TypeError, "the argument rank is '0'"),
            (lambda c: c.restart(0.0), TypeError, "the argument rank is 0.0"),
        )
    ),
    (
        ResourceManager,
        (lambda r: r.allocate_placement_group(True, holder="h"), TypeError, "world_size is True"),
    ),
    (WeightSync, (lambda s: s.push(NAN), ValueError, "push: timeout=nan")),
)


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
        made = (resources, cluster, trainer, rollout, WeightSync(trainer, rollout))
        yield {Scheduler: scheduler, **{type(each): each for each in made}}


def test_methods_refuse_wrong_types(targets: Mapping[type[Any], Any]) -> None:
    scheduler = targets[Scheduler]
    before = [status.worker_id for status in scheduler.status()]
    for owner, wrong in REFUSED:
        assert_refuses(targets[owner], wrong)
    assert [status.worker_id for status in scheduler.status()] == before
    assert scheduler.call_engine(WORKER, "add", "counter", 0) == 0
    assert targets[TrainController].get_version() == 0
    assert targets[Cluster].execute_all_sync("add", 0) == [0]
    assert targets[RolloutController].generate_one([1]).token_ids


def test_create_engine_takes_engine_spec(targets: Mapping[type[Any], Any]) -> None:
    asyncio.run(targets[Scheduler].create_engine(WORKER, EngineSpec(target=Counter), "spec"))
