"""Errors of a training batch name a sample by its index in the caller's batch."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from helmsman.api import errors
from helmsman.api.engines import Sample
from helmsman.api.scheduler import Job, Scheduler
from helmsman.controller._training.train_controller import TrainController
from tests.contract.marks import only_local
from tests.controller.engines import RecordingTrainer

pytestmark = only_local
VOCAB_SIZE = 50
SAMPLES = [{"input_ids": [1] * length} for length in (3, 9, 4, 8, 5, 7)]


class CheckingTrainer(RecordingTrainer):
    """A training engine that checks its samples as the real one does."""

    def train_batch(
        self, samples: Sequence[Sample], loss_fn: Any, loss_kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        from helmsman.engines._train.batching import check_samples

        return {"num_samples": len(check_samples(samples, VOCAB_SIZE))}


@pytest.fixture(scope="module")
def actor(scheduler: Scheduler) -> Iterator[TrainController]:
    """Provide two data-parallel ranks."""
    with TrainController(scheduler, CheckingTrainer, Job(role="checking", replicas=2)) as made:
        made.initialize()
        yield made


def test_train_batch_bad_sample_index(actor: TrainController) -> None:
    for index in range(len(SAMPLES)):
        samples = [*SAMPLES]
        samples[index] = {"input_ids": [VOCAB_SIZE] * 3}
        with pytest.raises(
            errors.HelmsmanError,
            match=f"sample {index}: 'input_ids' has ids outside the vocabulary",
        ):
            actor.train_batch(samples, "sft")
    assert actor.train_batch(SAMPLES, "sft") == {"num_samples": len(SAMPLES) // 2}


def test_train_batch_unserializable_sample_index(actor: TrainController) -> None:
    samples = [
        {**sample, "tag": threading.Lock() if at == 4 else "fine"}
        for at, sample in enumerate(SAMPLES)
    ]
    with pytest.raises(errors.HelmsmanError, match=r"args\[0\]\[4\]\['tag'\]"):
        actor.train_batch(samples, "sft")
