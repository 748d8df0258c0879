"""Trainers and instances that have the same devices: who has them when, and with which weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from examples.hf.turns import Turns
from helmsman import InlineScheduler, Job, RolloutController, TrainController
from tests.controller.engines import CountingRollout, RecordingTrainer

EVENTS: list[str] = []
"""Of the engines, which run in this process."""


class Trainer(RecordingTrainer):
    def sleep(self) -> None:
        EVENTS.append("trainer sleeps")

    def wake(self) -> None:
        EVENTS.append("trainer wakes")


class Rollout(CountingRollout):
    async def sleep(self, level: int = 1) -> None:
        EVENTS.append(f"rollout sleeps at level {level}")

    async def wake(self, *, weights_only: bool = False) -> None:
        EVENTS.append("rollout wakes for weights" if weights_only else "rollout wakes")

    async def update_weights(self, weights: Any, version: int) -> int:
        EVENTS.append("weights")
        return await super().update_weights(weights, version)


@pytest.fixture
def roles() -> Iterator[tuple[TrainController, RolloutController]]:
    EVENTS.clear()
    with InlineScheduler() as scheduler:
        trainer = TrainController(scheduler, Trainer, Job(role="train"))
        rollout = RolloutController(scheduler, Rollout, Job(role="rollout"))
        trainer.initialize()
        rollout.initialize()
        yield trainer, rollout


def test_the_devices_are_handed_over_with_the_weights_and_back(roles: tuple[TrainController, RolloutController]) -> None:
    trainer, rollout = roles
    turns = Turns(trainer, rollout, lambda: trainer.update_rollout(rollout), are_taken=True)
    assert EVENTS == ["rollout sleeps at level 2"], "the trainer has them first"
    EVENTS.clear()
    with turns.rollout():
        assert EVENTS == ["rollout wakes for weights", "weights", "trainer sleeps", "rollout wakes"]
        EVENTS.clear()
    assert EVENTS == ["rollout sleeps at level 2", "trainer wakes"]


def test_the_trainer_gets_them_back_after_an_error(roles: tuple[TrainController, RolloutController]) -> None:
    trainer, rollout = roles
    turns = Turns(trainer, rollout, lambda: trainer.update_rollout(rollout), are_taken=True)

    def fail() -> None:
        raise LookupError("of the rollout's turn")

    with pytest.raises(LookupError), turns.rollout():
        fail()
    assert EVENTS[-2:] == ["rollout sleeps at level 2", "trainer wakes"]


def test_with_devices_of_their_own_nothing_is_handed_over(roles: tuple[TrainController, RolloutController]) -> None:
    trainer, rollout = roles
    with Turns(trainer, rollout, lambda: trainer.update_rollout(rollout), are_taken=False).rollout():
        pass
    assert EVENTS == []
