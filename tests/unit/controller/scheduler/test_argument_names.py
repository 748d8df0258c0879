"""Tests that unknown arguments of our engines and schedulers are refused before a start."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from helmsman.api.errors import InvalidSpecError
from helmsman.api.scheduler import Job
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._scheduler.factory import make_scheduler
from helmsman.controller._training.train_controller import TrainController
from tests.controller.engines import RecordingTrainer
from tests.controller.fakes import FakeScheduler

ENGINES = "helmsman.engines."


@pytest.mark.parametrize(
    ("engine", "argument", "expected"),
    [
        ("train.FSDPTrainEngine", "learning_rate", "FSDPTrainEngine: did you mean 'lr'?"),
        ("train:FSDPTrainEngine", "learning_rate", "FSDPTrainEngine: did you mean 'lr'?"),
        ("rollout.HFRolloutEngine", "max_len", "did you mean 'max_model_len'?"),
        ("vllm_engine.VLLMEngine", "tensor_parallel", "did you mean 'tensor_parallel_size'?"),
        ("server_engine.ServerEngine", "modle", "did you mean 'model'?"),
    ],
)
def test_engine_argument_unknown(engine: str, argument: str, expected: str) -> None:
    arguments = {"model": "m", argument: 1}
    with FakeScheduler() as scheduler:
        for controller in (TrainController, RolloutController):
            with pytest.raises(InvalidSpecError) as caught:
                controller(scheduler, ENGINES + engine, Job(role="a"), engine_kwargs=arguments)
            assert expected in str(caught.value)


def test_engine_arguments_of_other_classes() -> None:
    with FakeScheduler() as scheduler:
        for engine in (RecordingTrainer, "own.Engine", "NotThere"):
            TrainController(scheduler, engine, Job(role="a"), engine_kwargs={"hidden": 1})


@pytest.mark.parametrize("engine", [lambda name: None, functools.partial(RecordingTrainer), None])
def test_engine_of_invalid_type(engine: Any) -> None:
    with FakeScheduler() as scheduler:
        for controller in (TrainController, RolloutController):
            with pytest.raises(
                TypeError, match=f"{controller.__name__}: the argument engine is .*, expected str"
            ):
                controller(scheduler, engine, Job(role="actor"), engine_kwargs={"name": "n"})


@pytest.mark.parametrize(
    ("name", "option", "expected"), [("local", "num_gpu", "num_gpus"), ("inline", "sed", "seed")]
)
def test_make_scheduler_unknown_option(name: str, option: str, expected: str) -> None:
    with pytest.raises(
        TypeError, match=f"scheduler {name!r} has no option {option!r}; did you mean {expected!r}"
    ):
        make_scheduler(name, **{option: 1})
