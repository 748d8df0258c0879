"""Tests of arguments that RecoveryPolicy and RecoverableTraining refuse."""

from __future__ import annotations

from typing import Any

import pytest

from helmsman.api.errors import InvalidSpecError
from helmsman.api.scheduler import Job, SchedulingStrategy
from helmsman.controller._training.recovery import RecoverableTraining, RecoveryPolicy
from helmsman.controller._training.train_controller import TrainController
from tests.controller.engines import RecordingTrainer
from tests.controller.fakes import FakeScheduler


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"save_every": 0}, "save_every is 0; expected 1 or more"),
        ({"num_kept": 0}, "num_kept is 0; expected 1 or more"),
        ({"max_recoveries": -1}, "max_recoveries is -1; expected 0 or more"),
        ({"pause_s": float("nan")}, "pause_s is nan; expected 0 or more"),
        ({"window_s": 0.0}, "window_s is 0; expected more than 0"),
        (
            {"probe_every_s": 5.0, "dead_s": 4.0},
            "probe_every_s is 5 and dead_s 4; expected 0 < probe_every_s <= dead_s",
        ),
        (
            {"probe_every_s": 0.0},
            "probe_every_s is 0 and dead_s 60; expected 0 < probe_every_s <= dead_s",
        ),
    ],
)
def test_recovery_policy_refuses_invalid_values(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecoveryPolicy(**{"checkpoints": "checkpoints", "save_every": 10, **fields})


def test_recoverable_training_refuses_a_trainer_in_other_workers() -> None:
    inside = SchedulingStrategy(type="colocation", target="rollout")
    job = Job(role="train", replicas=2, scheduling_strategy=inside)
    trainer = TrainController(FakeScheduler(), RecordingTrainer, job)
    policy = RecoveryPolicy(checkpoints="checkpoints", save_every=2)
    with pytest.raises(
        InvalidSpecError, match="fork is False; expected True, since a restart of these workers"
    ):
        RecoverableTraining(trainer, policy, lambda number: None)


def test_recoverable_training_run_without_step() -> None:
    trainer = TrainController(FakeScheduler(), RecordingTrainer, Job(role="train"))
    policy = RecoveryPolicy(checkpoints="checkpoints", save_every=2)
    with pytest.raises(ValueError, match=r"step is None; expected .* a loop over steps\(\)"):
        RecoverableTraining(trainer, policy).run(1, 2)
