"""TrainController with ranks that share samples: a real engine of two data-parallel and two
tensor-parallel ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helmsman.api.errors import GroupCallError
from helmsman.api.scheduler import Job, Scheduler
from helmsman.controller._training.train_controller import TrainController
from tests.engines.small_models import QWEN2, random_tokens

MODEL = {**QWEN2, "vocab_size": 52}
SAMPLES = [{"input_ids": random_tokens(length, seed=length)} for length in (5, 9, 12, 20, 7, 3, 15)]
ENGINE = "helmsman.engines.train.FSDPTrainEngine"


def controller(
    scheduler: Any, role: str, replicas: int, model_parallel_size: int = 1, **fields: Any
) -> TrainController:
    return TrainController(
        scheduler,
        ENGINE,
        Job(role=role, replicas=replicas),
        engine_kwargs={"model": MODEL, "lr": 1e-3, "max_tokens_per_micro_batch": 36, **fields},
        model_parallel_size=model_parallel_size,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_train_batch_of_model_parallel_groups(engines_scheduler: Scheduler, tmp_path: Path) -> None:
    with controller(engines_scheduler, "alone", 1) as alone:
        alone.initialize()
        expected = [alone.train_batch(SAMPLES, "sft") for _ in range(3)]
        after = alone.forward(SAMPLES)
    with controller(engines_scheduler, "train", 4, 2, tensor_parallel_size=2) as train:
        train.initialize()
        for theirs in expected:
            assert train.train_batch(SAMPLES, "sft") == pytest.approx(theirs, rel=1e-4)
        for mine, theirs in zip(train.forward(SAMPLES), after, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)
        train.save(str(tmp_path / "checkpoint"))
        more = train.train_batch(SAMPLES, "sft")
        # A batch of one sample leaves a data-parallel rank, and both ranks of its group, without
        # any.
        assert (
            train.eval_batch(SAMPLES[:1], "sft")["num_tokens"] == len(SAMPLES[0]["input_ids"]) - 1
        )
        with pytest.raises(GroupCallError, match="outside the vocabulary"):
            train.train_batch([{"input_ids": [1, 99]}, *SAMPLES], "sft")
        train.load(str(tmp_path / "checkpoint"))
        assert train.get_version() == 3
        assert train.train_batch(SAMPLES, "sft") == more


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_train_batch_fails_on_one_rank_alone(
    engines_scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """The others wait for it in a collective, so no later call may join that."""

    def make() -> TrainController:
        return TrainController(
            engines_scheduler,
            "tests.controller.turn_engines.Trainer",
            Job(role="train", replicas=3),
            engine_kwargs={"model": MODEL, "collective_timeout_s": 100_000.0},
        )

    with make() as train:
        failing = train.workers[1].id
        engines_scheduler.call_engine(failing, "plan", failing, "train_batch", "cuda")
        with pytest.raises(GroupCallError, match="CUDA out of memory"):
            train.train_batch(SAMPLES, "sft")
        assert "train: ranks wait in collectives for a rank that has failed" in caplog.text
        with pytest.raises(
            GroupCallError,
            match=r"process groups of this train engine were aborted: a rank failed while others "
            r"waited for it\. Delete its role and create it again",
        ):
            train.train_batch(SAMPLES, "sft")
    with make() as train:
        assert train.train_batch(SAMPLES, "sft")["loss"] > 0
