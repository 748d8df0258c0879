"""Test that value and reward models learn simple tasks; tests/nightly/recipes has the policies."""

from __future__ import annotations

import random
from typing import Any

import pytest

from helmsman.api.pairs import pair_samples
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
