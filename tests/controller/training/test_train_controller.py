"""Tests of TrainController with worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helmsman.api.errors import EngineCallError, GroupCallError, HelmsmanError, WorkerFailedError
from helmsman.api.scheduler import Job, Scheduler
from helmsman.controller._groups.call_all import is_communication_error
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._training.ranks import sample_lengths, split_by_tokens
from helmsman.controller._training.train_controller import TrainController
from tests.controller.engines import SAMPLES, count_loss
from tests.engines.small_models import QWEN2, random_tokens

ENGINES = "tests.controller.engines"
MODEL = {**QWEN2, "vocab_size": 52}
MODEL_SAMPLES = [
    {"input_ids": random_tokens(length, seed=length)} for length in (5, 9, 12, 20, 7, 3, 15)
]


def test_controller_calls_engines_in_processes(engines_scheduler: Scheduler) -> None:
    scheduler = engines_scheduler
    rollout = RolloutController(
        scheduler, f"{ENGINES}.CountingRollout", Job(role="rollout", replicas=2)
    )
    job = Job(role="actor", replicas=2)
    actor = TrainController(scheduler, f"{ENGINES}.RecordingTrainer", job, ("critic",))
    with actor, rollout:
        for rank, worker in enumerate(actor.workers):
            name, log, environment = scheduler.call_engine(worker.id, "describe")
            assert (name, log) == ("critic", ["create_process_group", "initialize"])
            assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
            assert environment["MASTER_PORT"] == actor.workers[0].engine_ports[0]
        shares = split_by_tokens(sample_lengths(SAMPLES), 2)
        stats = actor.train_batch(SAMPLES, count_loss, {"scale": 2.0})
        assert stats["loss"] == 2.0 * len(shares[0])
        assert actor.forward(SAMPLES) == [
            [-token for token in sample["input_ids"]] for sample in SAMPLES
        ]
        assert actor.update_rollout(rollout) == 1
        assert set(rollout.versions().values()) == {1}
    assert scheduler.status() == []


@pytest.mark.parametrize(
    ("fault", "cause", "message"),
    [
        ("dies", WorkerFailedError, "was ended by SIGKILL"),
        ("leaves", EngineCallError, "ValueError: loss is nan"),
    ],
)
def test_train_batch_names_the_rank_that_failed_first(
    engines_scheduler: Scheduler, fault: str, cause: type[HelmsmanError], message: str
) -> None:
    """The peer that loses its connection to that rank is listed after it."""
    job = Job(role="actor", replicas=2)
    with TrainController(engines_scheduler, f"{ENGINES}.CollectiveTrainer", job) as actor:
        assert actor.train_batch(SAMPLES, count_loss) == {"sum": 6.0}
        with pytest.raises(GroupCallError, match=message) as caught:
            actor.train_batch(SAMPLES, count_loss, {"fault": fault})
        errors = caught.value.errors
        assert list(errors) == ["actor/1", "actor/0"]
        assert isinstance(errors["actor/1"], cause)
        assert isinstance(errors["actor/0"], EngineCallError)
        assert is_communication_error(errors["actor/0"])
    assert engines_scheduler.status() == []


def make_model(scheduler: Scheduler, role: str, replicas: int, **fields: Any) -> TrainController:
    return TrainController(
        scheduler,
        "helmsman.engines.train.FSDPTrainEngine",
        Job(role=role, replicas=replicas),
        engine_kwargs={"model": MODEL, "lr": 1e-3, "max_tokens_per_micro_batch": 36, **fields},
        model_parallel_size=fields.get("tensor_parallel_size", 1),
    )


@pytest.mark.timeout(600)
def test_train_batch_of_model_parallel_groups(engines_scheduler: Scheduler, tmp_path: Path) -> None:
    """Two data-parallel and two tensor-parallel ranks compute the same as one rank."""
    with make_model(engines_scheduler, "alone", 1) as alone:
        expected = [alone.train_batch(MODEL_SAMPLES, "sft") for _ in range(2)]
        outputs = alone.forward(MODEL_SAMPLES)
    with make_model(engines_scheduler, "train", 4, tensor_parallel_size=2) as train:
        for stats in expected:
            assert train.train_batch(MODEL_SAMPLES, "sft") == pytest.approx(stats, rel=1e-4)
        for mine, theirs in zip(train.forward(MODEL_SAMPLES), outputs, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)
        train.save(str(tmp_path / "checkpoint"))
        more = train.train_batch(MODEL_SAMPLES, "sft")
        # Both ranks of one data-parallel group receive no sample.
        stats = train.eval_batch(MODEL_SAMPLES[:1], "sft")
        assert stats["num_tokens"] == len(MODEL_SAMPLES[0]["input_ids"]) - 1
        with pytest.raises(GroupCallError, match="outside the vocabulary"):
            train.train_batch([{"input_ids": [1, 99]}, *MODEL_SAMPLES], "sft")
        train.load(str(tmp_path / "checkpoint"))
        assert train.get_version() == 2
        assert train.train_batch(MODEL_SAMPLES, "sft") == more


@pytest.mark.timeout(300)
def test_train_batch_aborts_collectives_of_a_failed_rank(
    engines_scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """No later call joins a collective in which other ranks still wait."""
    with TrainController(
        engines_scheduler,
        "tests.controller.turn_engines.Trainer",
        Job(role="train", replicas=2),
        engine_kwargs={"model": MODEL, "collective_timeout_s": 100_000.0},
    ) as train:
        failing = train.workers[1].id
        engines_scheduler.call_engine(failing, "plan", failing, "train_batch", "cuda")
        with pytest.raises(GroupCallError, match="CUDA out of memory"):
            train.train_batch(MODEL_SAMPLES, "sft")
        assert "train: ranks wait in collectives for a rank that has failed" in caplog.text
        with pytest.raises(
            GroupCallError,
            match=r"process groups of this train engine were aborted: a rank failed while others "
            r"waited for it\. Delete its role and create it again",
        ):
            train.train_batch(MODEL_SAMPLES, "sft")
