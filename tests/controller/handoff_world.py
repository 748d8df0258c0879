"""A trainer and a rollout on the same devices, for tests of DeviceHandoff."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from helmsman import (
    GenerationResult,
    Job,
    RolloutController,
    SamplingParams,
    Scheduler,
    SchedulingSpec,
    SchedulingStrategy,
    TrainController,
)
from helmsman.api.advantages import group_advantages
from helmsman.api.errors import WorkerFailedError
from helmsman.api.platforms import MemoryStats
from helmsman.controller._training.handoff import DeviceHandoff, Owner
from tests.engines.small_models import QWEN2, random_tokens

ENGINES = "tests.controller.turn_engines"
SAMPLES = [{"input_ids": random_tokens(12, seed=5)} for _ in range(4)]
PROMPTS = [random_tokens(6, seed=seed) for seed in range(3)]
GREEDY = SamplingParams(max_new_tokens=6, temperature=0)


class Pair:
    """A trainer, and a rollout in siblings of its workers.

    Args:
        scheduler: Starts the workers.
        name: Suffix of both roles.
        num_ranks: Number of ranks, and of instances.
        **options: Options of RolloutController.
    """

    def __init__(self, scheduler: Scheduler, name: str, num_ranks: int = 1, **options: Any) -> None:
        self.scheduler = scheduler
        fields = {"model": QWEN2, "seed": 3}
        self.trainer = TrainController(
            scheduler,
            f"{ENGINES}.Trainer",
            Job(role=f"train{name}", replicas=num_ranks, tasks=[SchedulingSpec(cpu=0.1)]),
            engine_kwargs={**fields, "lr": 1e-2},
        )
        strategy = SchedulingStrategy(type="colocation", target=f"train{name}", fork=True)
        self.rollout = RolloutController(
            scheduler,
            f"{ENGINES}.Rollout",
            Job(
                role=f"rollout{name}",
                replicas=num_ranks,
                tasks=[SchedulingSpec(cpu=0.1)],
                scheduling_strategy=strategy,
            ),
            engine_kwargs={**fields, "max_concurrency": 8, "max_model_len": 4096},
            **options,
        )
        self.trainer.initialize()
        self.trainer.sleep()
        self.rollout.initialize()
        self.turns = DeviceHandoff(self.trainer, self.rollout)

    def call(self, worker: str, method: str, *args: Any) -> Any:
        return self.scheduler.call_engine(worker, method, None, *args)

    def num_generated(self) -> int:
        return self.call(self.rollout_id, "stats")["num_generated_tokens"]

    @property
    def train_id(self) -> str:
        return self.trainer.workers[0].id

    @property
    def rollout_id(self) -> str:
        return self.rollout.workers[0].id

    def asleep(self) -> tuple[bool, bool]:
        """Return whether trainer and rollout are asleep."""
        return self.call(self.train_id, "is_asleep"), self.call(self.rollout_id, "is_asleep")

    def step(self) -> float:
        with self.turns.training():
            return self.trainer.train_batch(SAMPLES, "sft")["loss"]

    def generate(self) -> list[GenerationResult]:
        with self.turns.rollout():
            return self.rollout.generate(PROMPTS, GREEDY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.rollout.close()
        self.trainer.close()


@pytest.fixture(scope="module")
def shared_pair(engines_scheduler: Scheduler) -> Iterator[Pair]:
    """Pair for tests after which both sides can take a turn."""
    with Pair(engines_scheduler, "-shared") as pair:
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    yield shared_pair
    shared_pair.trainer.device_owner = shared_pair.rollout.device_owner = shared_pair.turns
    shared_pair.turns.owner = Owner.NONE
    shared_pair.generate()
    shared_pair.step()


def check_learning(pair: Pair) -> None:
    """Each turn generates with the weights of the last step, as the log-probabilities show."""
    for step in range(3):
        with pair.turns.rollout() as report:
            assert report is not None
            assert report.version == step
            assert pair.asleep() == (True, False)
            results = pair.rollout.generate(
                [[1, 2], [2, 2]], SamplingParams(max_new_tokens=6, seed=step), num_samples=4
            )
        assert {version for result in results for version in result.versions} == {step}
        rewards = [
            float(result.token_ids.count(7)) + 0.01 * sum(result.token_ids) for result in results
        ]
        samples = [
            {
                "input_ids": [*prompt, *result.token_ids],
                "loss_mask": [False] * 2 + [True] * 6,
                "logprobs": [0.0] * 2 + result.logprobs,
                "advantages": advantage,
            }
            for prompt, result, advantage in zip(
                [[1, 2]] * 4 + [[2, 2]] * 4,
                results,
                group_advantages(rewards, group_size=4),
                strict=True,
            )
        ]
        with pair.turns.training():
            assert pair.asleep() == (False, True)
            stats = pair.trainer.train_batch(samples, "grpo")
        assert stats["ratio"] == pytest.approx(1.0, abs=1e-3)
        assert pair.trainer.get_version() == step + 1


def check_recovery(pair: Pair, folder: Path, method: str) -> None:
    """A trainer that dies in a method is rebuilt on free devices."""
    pair.generate()
    pair.step()
    pair.trainer.save(str(folder / "checkpoint"))
    if method == "wake":
        pair.turns.to_rollout()
    pair.call(pair.train_id, "plan", method, "kill")
    run = {
        "train_batch": pair.step,
        "sleep": pair.turns.to_rollout,
        "wake": pair.turns.to_training,
    }[method]
    with pytest.raises(WorkerFailedError):
        run()
    if method != "train_batch":
        assert pair.turns.owner is Owner.NONE
    version = pair.trainer.recover(str(folder / "checkpoint"))
    assert pair.turns.owner is Owner.TRAINER
    assert pair.asleep() == (False, True)
    assert [result.versions for result in pair.generate()] == [[version] * 6] * 3
    assert pair.step() > 0
    assert isinstance(pair.turns.memory()[pair.train_id], MemoryStats)
