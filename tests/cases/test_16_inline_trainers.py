"""The inline scheduler runs several trainers, and so every recipe, in the process of the script."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from helmsman import (
    Job,
    RolloutController,
    SamplingParams,
    Scheduler,
    TrainController,
    WeightSync,
    make_scheduler,
)
from helmsman.errors import GroupCallError, HelmsmanError, InvalidSpecError
from helmsman.recipes import DPO, GRPO, PPO

pytestmark = pytest.mark.usefixtures("one_thread")

TRAINER = "helmsman.engines.train.FSDPTrainEngine"
SAMPLES = [{"input_ids": [5, 6, 7]}, {"input_ids": [9, 8, 7, 6]}]
RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    before = {name: os.environ.get(name) for name in RENDEZVOUS}
    with make_scheduler("inline") as made:
        yield made
    assert not dist.is_initialized(), "the last trainer destroys the process group"
    assert {name: os.environ.get(name) for name in RENDEZVOUS} == before


def trainer(scheduler: Scheduler, model: str, role: str = "train", **arguments: Any) -> Any:
    return TrainController(
        scheduler, TRAINER, Job(role=role), engine_kwargs={"model": model, "lr": 1e-2, **arguments}
    )


def losses(train: TrainController, num_steps: int = 2) -> list[float]:
    return [train.train_batch(SAMPLES, "sft")["loss"] for _ in range(num_steps)]


@pytest.fixture(scope="module")
def alone(model: str) -> list[float]:
    """Losses of the first three steps of a trainer that is the only one."""
    with make_scheduler("inline") as scheduler, trainer(scheduler, model) as train:
        train.initialize()
        return losses(train, 3)


# --- one after another ------------------------------------------------------------------------


def test_trainer_after_a_closed_one(scheduler: Scheduler, model: str, alone: list[float]) -> None:
    for role in ("first", "second", "second"):
        with trainer(scheduler, model, role) as train:
            train.initialize()
            assert losses(train) == alone[:2]
        assert not dist.is_initialized()


def test_trainer_after_a_failed_start(scheduler: Scheduler, model: str) -> None:
    with (
        pytest.raises(HelmsmanError, match="nowhere"),
        trainer(scheduler, "/nowhere", "first") as train,
    ):
        train.initialize()
    with trainer(scheduler, model, "second") as train:
        train.initialize()
        assert len(losses(train)) == 2


def test_trainer_after_a_job_of_two_ranks(scheduler: Scheduler, model: str) -> None:
    with (
        pytest.raises(GroupCallError, match="variable RANK of pair/1 is '1'; .*Use replicas=1"),
        TrainController(
            scheduler, TRAINER, Job(role="pair", replicas=2), engine_kwargs={"model": model}
        ) as train,
    ):
        train.initialize()
    with trainer(scheduler, model) as train:
        train.initialize()
        assert len(losses(train)) == 2


def test_trainer_that_recovers_beside_another(
    scheduler: Scheduler, model: str, alone: list[float]
) -> None:
    with trainer(scheduler, model, "first") as first, trainer(scheduler, model, "second") as second:
        first.initialize()
        second.initialize()
        assert losses(first, 1) == alone[:1]
        first.recover()
        assert losses(second) == losses(first) == alone[:2]


# --- side by side -----------------------------------------------------------------------------


def test_trainers_in_turns(scheduler: Scheduler, model: str, alone: list[float]) -> None:
    found: dict[str, list[float]] = {"first": [], "second": []}
    with trainer(scheduler, model, "first") as first:
        with trainer(scheduler, model, "second") as second:
            first.initialize()
            second.initialize()
            for _ in range(2):
                found["first"] += losses(first, 1)
                found["second"] += losses(second, 1)
        found["first"] += losses(first, 1)
    assert found == {"first": alone, "second": alone[:2]}


def test_trainers_at_once(scheduler: Scheduler, model: str, alone: list[float]) -> None:
    async def run(train: TrainController) -> list[float]:
        await train.async_initialize()
        return [(await train.async_train_batch(SAMPLES, "sft"))["loss"] for _ in range(2)]

    async def all_of(trains: list[TrainController]) -> list[list[float]]:
        return await asyncio.gather(*map(run, trains))

    trains = [trainer(scheduler, model, f"train{index}") for index in range(3)]
    try:
        assert asyncio.run(all_of(trains)) == [alone[:2]] * 3
    finally:
        for each in trains:
            each.close()


def test_trainer_of_one_rank_beside_a_job_of_two(scheduler: Scheduler, model: str) -> None:
    with trainer(scheduler, model) as train:
        train.initialize()
        with (
            pytest.raises(GroupCallError, match="of pair/0 is '2'; expected '1', as set by tr"),
            TrainController(
                scheduler, TRAINER, Job(role="pair", replicas=2), engine_kwargs={"model": model}
            ) as pair,
        ):
            pair.initialize()
        assert len(losses(train)) == 2


def test_trainers_save_and_load(
    scheduler: Scheduler, model: str, alone: list[float], tmp_path: Path
) -> None:
    with trainer(scheduler, model, "first") as first, trainer(scheduler, model, "second") as second:
        for train in (first, second):
            train.initialize()
            losses(train, 1)
            train.save(tmp_path / train.role, background=True)
        first.wait_for_save()
        second.load(tmp_path / "first")
        assert losses(second) == pytest.approx(alone[1:])


def test_trainers_beside_a_rollout(scheduler: Scheduler, model: str) -> None:
    with (
        trainer(scheduler, model, "first") as first,
        trainer(scheduler, model, "second", lr=1.0) as second,
        RolloutController(
            scheduler,
            "helmsman.engines.rollout.HFRolloutEngine",
            Job(role="rollout"),
            engine_kwargs={"model": model},
        ) as rollout,
    ):
        for each in (first, second, rollout):
            each.initialize()
        sync = WeightSync(first, rollout)
        losses(second)
        losses(first)
        assert sync.push().version == 2
        answer = rollout.generate_one([5, 6, 7], SamplingParams(max_new_tokens=2))
        assert answer.versions[-1] == 2


# --- recipes ----------------------------------------------------------------------------------


def digits_of(completion: str) -> float:
    return sum(map(str.isdigit, completion)) / max(1, len(completion))


@pytest.mark.parametrize("recipe", ["DPO", "GRPO", "PPO"])
def test_recipe_with_two_models(recipe: str, model: str, tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "steps": 1,
        "cluster": {"scheduler": "inline"},
        "out": str(tmp_path / "out"),
    }
    if recipe == "DPO":
        rows = [{"prompt": "1", "chosen": "2", "rejected": "3"}] * 4
        DPO(model, rows, batch_size=2, **common).train()
    else:
        made: Any = {"GRPO": GRPO, "PPO": PPO}[recipe]
        made(
            model,
            ["1+1=", "1+2="],
            [{"use": digits_of, "on_cluster": True}],
            prompts_per_step=2,
            rollout={"max_new_tokens": 2},
            algorithm={"kl_coef": 0.1},
            **common,
        ).train()
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    assert not dist.is_initialized()


def test_recipe_with_two_ranks(model: str, tmp_path: Path) -> None:
    cluster = {"scheduler": "inline", "train_workers": 2}
    with pytest.raises(
        ValueError, match="cluster.train_workers is 2; expected 1 .* in the script's process"
    ):
        DPO(model, [{"prompt": "1", "chosen": "2", "rejected": "3"}], cluster=cluster).load()


# --- a process group or an environment of the script ------------------------------------------


def test_group_of_the_script_is_used_and_kept(model: str, alone: list[float]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        own = dist.group.WORLD
        with make_scheduler("inline") as scheduler, trainer(scheduler, model) as train:
            train.initialize()
            assert losses(train) == alone[:2]
        assert dist.group.WORLD is own
    finally:
        dist.destroy_process_group()


def test_group_of_the_script_with_other_ranks(model: str) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with (
            make_scheduler("inline") as scheduler,
            pytest.raises(HelmsmanError, match="group of 2 ranks, expected WORLD_SIZE, 1. Destroy"),
            trainer(scheduler, model) as train,
        ):
            train.initialize()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_script_destroys_the_group(scheduler: Scheduler, model: str, alone: list[float]) -> None:
    """A closed trainer does not take the group of one that was started after its own had ended."""
    first, second = (trainer(scheduler, model, role) for role in ("first", "second"))
    first.initialize()
    dist.destroy_process_group()
    with second:
        second.initialize()
        assert losses(second, 1) == alone[:1]
        first.close()
        assert losses(second, 1) == alone[1:2]


def test_variable_of_an_ended_worker(scheduler: Scheduler) -> None:
    """Only workers that live conflict, and of addresses only those that another rank needs."""
    scheduler.create_workers(Job(role="first"))
    scheduler.create_workers(Job(role="second"))

    def give(role: str, **env: str) -> None:
        asyncio.run(scheduler.set_worker_env(f"{role}/0", env))

    give("first", MODE="a", WORLD_SIZE="2", MASTER_PORT="1")
    for env in ({"MODE": "b"}, {"MASTER_PORT": "2"}, {"WORLD_SIZE": "1", "MASTER_PORT": "2"}):
        with pytest.raises(InvalidSpecError, match="as set by first/0: inline workers share"):
            give("second", **env)
    scheduler.delete_workers("first")
    give("second", MODE="b", WORLD_SIZE="1", MASTER_PORT="2")
    assert (os.environ["MODE"], os.environ["MASTER_PORT"]) == ("b", "2")
