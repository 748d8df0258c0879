"""Test that a student learns by a teacher from its own tokens, and not by these tokens alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helmsman.api.generation import GenerationRequest, SamplingParams
from helmsman.api.weights import MemoryTarget, WeightFormat
from helmsman.engines.rollout import HFRolloutEngine
from helmsman.engines.train import FSDPTrainEngine
from helmsman.recipes.reference import FrozenReference
from helmsman.recipes.teacher import Teacher
from tests.engines.conftest import Make
from tests.engines.small_models import LLAMA

pytestmark = pytest.mark.timeout(900)

STUDENT = {**LLAMA, "hidden_size": LLAMA["hidden_size"] // 2}
PROMPTS = [[n, n + 1] for n in range(1, 17)]
NUM_TOKENS, NUM_STEPS = 8, 60


class Engine(FrozenReference):
    """An engine in this process in the place of its ranks."""

    def __init__(self, engine: FSDPTrainEngine) -> None:
        self._engine = engine

    def logprobs(self, tokens: Any) -> list[torch.Tensor]:
        return self._engine.forward(tokens)

    def top_choices(self, tokens: Any, num_choices: int, num_ids: int) -> list[Any]:
        return self._engine.forward_top(tokens, num_choices, num_ids)


async def on_own_tokens(
    student: FSDPTrainEngine, measure: Teacher, loss: str, teacher: Teacher
) -> list[float]:
    """Train on tokens that the student samples; returns its sampled divergence before each step."""
    rollout = HFRolloutEngine(model=STUDENT, max_concurrency=128, max_model_len=16, dtype="float32")
    rollout.initialize()
    divergences = []
    for step in range(NUM_STEPS):
        version = student.get_version()
        weights: Any = student.publish_weights(MemoryTarget(version=version), WeightFormat())
        await rollout.update_weights(weights, version)
        samples: list[dict[str, Any]] = []
        for number, prompt in enumerate(PROMPTS):
            sampling = [
                SamplingParams(max_new_tokens=NUM_TOKENS, seed=step * 1000 + number * 10 + each)
                for each in range(8)
            ]
            requests = [
                GenerationRequest(
                    request_id=f"{step}-{number}-{index}", prompt_ids=prompt, sampling=each
                )
                for index, each in enumerate(sampling)
            ]
            for result in await rollout.agenerate_samples(requests):
                length = len(result.token_ids)
                samples.append(
                    {
                        "input_ids": [*prompt, *result.token_ids],
                        "loss_mask": [0] * len(prompt) + [1] * length,
                        "logprobs": [0.0] * len(prompt) + result.logprobs,
                        "advantages": 0.0,
                    }
                )
        divergences.append(measure.teach([{**each} for each in samples])["teacher/kl"])
        teacher.teach(samples)
        student.train_batch(samples, loss)
    rollout.destroy()
    return divergences


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


async def test_student_of_half_the_width(make: Make) -> None:
    """The teacher counts on; SFT on the student's own tokens teaches it nothing of that."""
    rows = [{"input_ids": list(range(n, n + 12))} for n in range(1, 33)]
    engines = []
    for config, num_steps in ((LLAMA, 60), *[(STUDENT, 8)] * 3):
        engine = make(model=config, lr=1e-2, seed=1)
        for _ in range(num_steps):
            engine.train_batch(rows, "sft")
        engines.append(engine)
    counting, sampled, top, by_sft = engines
    measure = Teacher(Engine(counting), coef=1.0)
    found = await on_own_tokens(sampled, measure, "grpo", measure)
    first, last = mean(found[:5]), mean(found[-5:])
    assert last < 0.65 * first, (first, last)
    choices = Teacher(Engine(counting), 1.0, 8, LLAMA["vocab_size"])
    found = await on_own_tokens(top, measure, "grpo", choices)
    # The divergence over the top 8 reaches in a third of the steps what sampled advantages reach.
    assert mean(found[15:20]) < last, (found, last)
    found = await on_own_tokens(by_sft, measure, "sft", measure)
    assert mean(found[-5:]) > 0.9 * mean(found[:5]), found
