"""Test that each kind of loss makes a tiny model learn a simple task."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from helmsman.api.advantages import gae, group_advantages, whiten
from helmsman.api.generation import GenerationRequest, SamplingParams
from helmsman.api.pairs import pair_samples
from helmsman.api.reward_shaping import token_rewards
from helmsman.engines._models.model import build_model
from helmsman.engines.rollout import HFRolloutEngine
from helmsman.engines.train import FSDPTrainEngine
from tests.engines.conftest import Make
from tests.engines.small_models import QWEN2, VOCAB, random_tokens

MODEL: dict[str, Any] = {**QWEN2, "initializer_range": 0.02}
GOOD = set(range(VOCAB // 2))
"""Tokens that are rewarded."""

FIELDS: dict[str, Any] = {"model": MODEL, "lr": 3e-3}


def share_of_good(tokens: list[int]) -> float:
    return sum(token in GOOD for token in tokens) / len(tokens)


def test_value_learns_returns(make: Make) -> None:
    """The return is the share of good tokens so far."""
    critic = make(**FIELDS, head="value")

    def batch(seed: int) -> list[dict[str, Any]]:
        samples = []
        for row in range(16):
            tokens = random_tokens(12, seed=seed * 100 + row)
            returns = [0.0, *(share_of_good(tokens[:end]) for end in range(1, len(tokens)))]
            samples.append({"input_ids": tokens, "returns": returns})
        return samples

    held_out = batch(99)
    before = critic.eval_batch(held_out, "value")["loss"]
    for seed in range(40):
        critic.train_batch(batch(seed), "value", {"clip": None})
    after = critic.eval_batch(held_out, "value")
    assert after["loss"] < before / 4
    assert after["value"] == pytest.approx(after["return"], abs=0.1)


def preference_pairs(num: int, seed: int) -> list[dict[str, Any]]:
    """Draw pairs of answers to one prompt; the one with more good tokens is preferred."""
    draw = random.Random(seed)
    pairs = []  # type: ignore[var-annotated]
    while len(pairs) < num:
        prompt = draw.choices(range(VOCAB), k=3)
        answers = [draw.choices(range(VOCAB), k=draw.randint(4, 8)) for _ in range(2)]
        chosen, rejected = sorted(answers, key=share_of_good, reverse=True)
        if share_of_good(chosen) - share_of_good(rejected) > 0.3:
            pair = [
                {"input_ids": [*prompt, *a], "loss_mask": [False] * 3 + [True] * len(a)}
                for a in (chosen, rejected)
            ]
            pairs.append((pair[0], pair[1]))
    return pair_samples(pairs)


def test_reward_model_ranks_unseen_pairs(make: Make) -> None:
    model = make(**FIELDS, head="value")
    held_out = preference_pairs(60, seed=99)
    for seed in range(40):
        model.train_batch(preference_pairs(16, seed), "reward_model", {"center_coef": 0.01})
    assert model.eval_batch(held_out, "reward_model")["accuracy"] > 0.9
    # Scripts take the value of the last token as the reward of a sample.
    rewards = [values[-1].item() for values in model.forward(held_out)]
    assert (
        sum(first > second for first, second in zip(rewards[::2], rewards[1::2], strict=True)) > 54
    )


def test_dpo_raises_margin(make: Make) -> None:
    policy, reference = make(**FIELDS), make(**FIELDS, frozen=True)

    def batch(num: int, seed: int) -> list[dict[str, Any]]:
        samples = preference_pairs(num, seed)
        return [
            {**one, "ref_logprobs": row}
            for one, row in zip(samples, reference.forward(samples), strict=True)
        ]

    kwargs = {"beta": 0.1}
    held_out = batch(40, seed=99)
    before = policy.eval_batch(held_out, "dpo", kwargs)
    assert before["reward_margin"] == pytest.approx(0.0, abs=1e-6)
    for seed in range(20):
        policy.train_batch(batch(16, seed), "dpo", kwargs)
    after = policy.eval_batch(held_out, "dpo", kwargs)
    assert after["reward_margin"] > 0.2
    assert after["accuracy"] > 0.9
    assert after["loss"] < before["loss"]


@torch.no_grad()
def generate(
    policy: FSDPTrainEngine, num: int, length: int, generator: torch.Generator
) -> list[list[int]]:
    """Draw tokens of the policy after the token 0."""
    tokens = torch.zeros(num, 1, dtype=torch.int64)
    weights = policy.export_weights()
    assert weights is not None
    model: Any = build_model(policy.config.model, seed=0, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)  # tied weights have one name
    for _ in range(length):
        probabilities = model(input_ids=tokens, use_cache=False).logits[:, -1].softmax(-1)
        tokens = torch.cat(
            [tokens, torch.multinomial(probabilities, 1, generator=generator)], dim=1
        )
    rows: list[list[int]] = tokens.tolist()
    return rows


def test_decoupled_ppo_raises_reward(make: Make) -> None:
    # generate() calls the model without the layout of rows, which packing needs.
    policy = make(model=MODEL, lr=2e-3, packing=False)
    critic, reference = make(**FIELDS, head="value", seed=1), make(**FIELDS, frozen=True)
    generator = torch.Generator().manual_seed(0)
    scores = []
    for _ in range(30):
        samples: list[dict[str, Any]] = [
            {"input_ids": tokens} for tokens in generate(policy, 24, 8, generator)
        ]
        rewards = [share_of_good(sample["input_ids"][1:]) for sample in samples]
        masks = [[False] + [True] * 8] * len(samples)
        logprobs, ref_logprobs, values = (
            engine.forward(samples) for engine in (policy, reference, critic)
        )
        per_token, _ = token_rewards(rewards, masks, logprobs, ref_logprobs, kl_coef=0.01)  # type: ignore[arg-type]
        advantages, returns = gae(per_token, values, masks)  # type: ignore[arg-type]
        columns = zip(samples, logprobs, whiten(advantages, masks), returns, values, strict=True)
        batch = [
            {**one, "logprobs": a, "prox_logprobs": a, "advantages": b, "returns": c, "values": d}
            for one, a, b, c, d in columns
        ]
        for _ in range(2):
            critic.train_batch(batch, "value", {"clip": 0.2})
            policy.train_batch(batch, "decoupled_ppo", {"entropy_coef": 0.001})
        scores.append(sum(rewards) / len(rewards))
    assert scores[0] < 0.65
    assert sum(scores[-3:]) / 3 > 0.85


POLICY = {**QWEN2, "initializer_range": 0.1}
WANTED, NUM_TOKENS, GROUP_SIZE = 7, 6, 16


async def test_grpo_learns_rewarded_token(make: Make) -> None:
    trainer = make(model=POLICY)
    rollout = HFRolloutEngine(model=POLICY, max_concurrency=64, max_model_len=32)
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
        # On-policy: both engines compute the same log-probabilities.
        assert stats["ratio"] == pytest.approx(1.0, abs=1e-4)
        weights = trainer.export_weights()
        assert weights is not None
        assert await rollout.update_weights(weights, trainer.get_version()) == step + 1
        mean_rewards.append(sum(rewards) / len(rewards))
    rollout.destroy()
    assert mean_rewards[0] < 0.1
    assert mean_rewards[-1] > 0.8
