"""Batches of a training job: errors name a sample by its index in the batch of the caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from helmsman.api import errors
from helmsman.api.engines import Sample
from helmsman.api.scheduler import Job, Scheduler
from helmsman.controller._training.train_controller import TrainController
from tests.controller.engines import RecordingTrainer

VOCAB_SIZE = 50
SAMPLES = [{"input_ids": [1] * length} for length in (3, 9, 4, 8, 5, 7)]


class CheckingTrainer(RecordingTrainer):
    """Checks its samples as the train engine does."""

    def train_batch(
        self, samples: Sequence[Sample], loss_fn: Any, loss_kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        from helmsman.engines._train.batching import check_samples

        return {"num_samples": len(check_samples(samples, VOCAB_SIZE))}


@pytest.fixture(scope="module")
def actor(scheduler: Scheduler) -> Iterator[TrainController]:
    """Two data-parallel ranks; one in the script's own process, where two ranks cannot be told
    apart.
    """
    replicas = 1 if scheduler.shares_process else 2
    with TrainController(
        scheduler, CheckingTrainer, Job(role="checking", replicas=replicas)
    ) as made:
        made.initialize()
        yield made


@pytest.mark.parametrize("index", range(len(SAMPLES)))
def test_train_batch_bad_sample_index(actor: TrainController, index: int) -> None:
    samples = [
        {**sample, "input_ids": [VOCAB_SIZE] * 3} if at == index else sample
        for at, sample in enumerate(SAMPLES)
    ]
    with pytest.raises(
        errors.HelmsmanError, match=f"sample {index}: 'input_ids' has ids outside the vocabulary"
    ):
        actor.train_batch(samples, "sft")
    assert actor.train_batch(SAMPLES, "sft") == {
        "num_samples": len(SAMPLES) // actor.data_parallel_size
    }


def test_train_batch_unserializable_sample_index(actor: TrainController) -> None:
    samples = [
        {**sample, "tag": threading.Lock() if at == 4 else "fine"}
        for at, sample in enumerate(SAMPLES)
    ]
    with pytest.raises(errors.HelmsmanError, match=r"args\[0\]\[4\]\['tag'\]"):
        actor.train_batch(samples, "sft")
