"""Test two policies with trainers of their own on one vLLM, whose engine dies."""

from __future__ import annotations

import functools
from pathlib import Path

import psutil
import pytest
import torch

from helmsman import (
    Job,
    LocalScheduler,
    RetryGeneration,
    RolloutController,
    SamplingParams,
    SchedulingSpec,
    SchedulingStrategy,
    SupervisionPolicy,
    TrainController,
    WeightSync,
)
from helmsman.weights import WeightFormat
from tests.contract.helpers import wait_until
from tests.controller.rollout.helpers import all_serve, pid_of
from tests.processes import command_of
from tests.vllm.vllm_models import ENGINE, LLAMA, SPEC_ENV, folder_of, model_of

pytestmark = pytest.mark.timeout(900)  # a start takes 15 s, and 60 s beside other work

POLICY = SupervisionPolicy(probe_every_s=0.2, suspect_s=20.0, dead_s=60.0, restart_pause_s=0.1)
LONG = SamplingParams(max_new_tokens=400)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6]]
ROLES = {"first": {"rank": 2, "alpha": 8.0}, "second": {"rank": 8, "alpha": 16.0}}


def test_policies_return_after_the_death_of_their_engine(tmp_path: Path) -> None:
    fields = {"model": folder_of(model_of(LLAMA, seed=1), tmp_path), **ENGINE}
    trainers, rollouts = [], []
    with LocalScheduler() as scheduler:
        for name, lora in ROLES.items():
            is_first = name == "first"
            spec = SchedulingSpec(cpu=0.5, env_vars=SPEC_ENV if is_first else {})
            place = SchedulingStrategy()
            engine = "vllm_engine.VLLMEngine"
            if not is_first:
                place = SchedulingStrategy(type="colocation", target="first")
                engine = "shared_base.another_policy"
            rollout = RolloutController(
                scheduler,
                f"helmsman.engines.{engine}",
                Job(role=name, tasks=[spec], scheduling_strategy=place),
                engine_kwargs={**fields, "max_lora_rank": 8, "max_loras": 4} if is_first else {},
                retries=RetryGeneration(),
                supervision=POLICY,
            )
            trainer = TrainController(
                scheduler,
                "helmsman.engines.train.FSDPTrainEngine",
                Job(role=f"train-{name}", tasks=[SchedulingSpec(cpu=0.5)]),
                engine_kwargs={"model": fields["model"], "lora": lora, "lr": 5e-3},
            )
            rollouts.append(rollout)
            trainers.append(trainer)
            rollout.initialize()
            trainer.initialize()
            for _ in range(len(trainers)):
                trainer.train_batch([{"input_ids": list(range(3, 40))}], "sft")
            WeightSync(trainer, rollout, form=WeightFormat(adapters=True)).push()
        begun = [[rollout.submit(prompt, LONG) for prompt in PROMPTS] for rollout in rollouts]
        worker = psutil.Process(pid_of(scheduler, "first/0"))
        next(
            each for each in worker.children(recursive=True) if "EngineCore" in command_of(each)
        ).kill()
        for version, (trainer, futures) in enumerate(zip(trainers, begun, strict=True), 1):
            results = [future.result(400) for future in futures]
            rows = trainer.forward(
                [
                    {"input_ids": [*prompt, *each.token_ids]}
                    for prompt, each in zip(PROMPTS, results, strict=True)
                ]
            )
            for prompt, each, row in zip(PROMPTS, results, rows, strict=True):
                assert set(each.versions) == {version}
                assert (row[len(prompt) :] - torch.tensor(each.logprobs)).abs().max() < 1e-3
        assert pid_of(scheduler, "first/0") not in (0, worker.pid)
        for rollout in rollouts:
            wait_until(functools.partial(all_serve, rollout), "all serve again", 60.0)
