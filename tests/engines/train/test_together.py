"""Generation, advantages, a GRPO step and the transfer of weights, in a loop: the reward rises."""

from __future__ import annotations

import asyncio

import pytest

from helmsman.api.advantages import group_advantages
from helmsman.api.generation import GenerationRequest, SamplingParams
from helmsman.engines.rollout import HFRolloutEngine
from tests.engines.conftest import Make
from tests.engines.small_models import QWEN2

pytestmark = pytest.mark.slow

MODEL = {**QWEN2, "initializer_range": 0.1}
WANTED, NUM_TOKENS, GROUP_SIZE = 7, 6, 16


async def test_grpo_with_rollout_engine_finds_rewarded_token(make: Make) -> None:
    trainer = make(model=MODEL)
    rollout = HFRolloutEngine(model=MODEL, max_concurrency=64, max_model_len=32)
    rollout.initialize()
    mean_rewards = []
    for step in range(15):
        requests = [
            GenerationRequest(
                request_id=f"{step}/{index}",
                prompt_ids=[1 + index // GROUP_SIZE, 2],
                sampling=SamplingParams(max_new_tokens=NUM_TOKENS, seed=1000 * step + index),
            )
            for index in range(4 * GROUP_SIZE)
        ]
        results = await asyncio.gather(*map(rollout.agenerate, requests))
        rewards = [result.token_ids.count(WANTED) / NUM_TOKENS for result in results]
        samples = [
            {
                "input_ids": request.prompt_ids + result.token_ids,
                "loss_mask": [False] * 2 + [True] * NUM_TOKENS,
                "logprobs": [0.0] * 2 + result.logprobs,
                "advantages": advantage,
            }
            for request, result, advantage in zip(
                requests, results, group_advantages(rewards, group_size=GROUP_SIZE), strict=True
            )
        ]
        stats = trainer.train_batch(samples, "grpo", {"clip_high": 0.28})
        # On-policy: what the rollout engine reports is what the train engine computes.
        assert stats["ratio"] == pytest.approx(1.0, abs=1e-4)
        weights = trainer.export_weights()
        assert weights is not None
        assert await rollout.update_weights(weights, trainer.get_version()) == step + 1
        mean_rewards.append(sum(rewards) / len(rewards))
    rollout.destroy()
    assert mean_rewards[0] < 0.1
    assert mean_rewards[-1] > 0.8
