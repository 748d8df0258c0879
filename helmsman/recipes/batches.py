"""Training samples from answers, and metrics about both."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from helmsman import GenerationResult
from helmsman.api.advantages import group_advantages, sequence_weights
from helmsman.api.reward_shaping import soft_overlong_punishment
from helmsman.recipes.prompts import Draw
from helmsman.recipes.scorer import Scored
from helmsman.recipes.settings import Algorithm, GRPOSettings


class Answer(msgspec.Struct, frozen=True):
    """An answer and its reward."""

    result: GenerationResult
    scored: Scored
    reward: float
    """Weighted sum of the rewards, minus the overlong penalty."""

    @property
    def is_truncated(self) -> bool:
        """Whether the answer was cut at its maximum length."""
        return self.result.stop_reason == "length"


class Group(msgspec.Struct, frozen=True):
    """The answers to one prompt, whose rewards are compared."""

    draw: Draw
    answers: list[Answer]

    @property
    def is_uniform(self) -> bool:
        """Whether all answers have the same reward."""
        rewards = [answer.reward for answer in self.answers]
        return max(rewards) == min(rewards)


def overlong_cost(num_tokens: int, algorithm: Algorithm, max_new_tokens: int) -> float:
    """Return the overlong penalty of an answer: 0 before the buffer, then growing linearly."""
    if not algorithm.overlong_buffer:
        return 0.0
    return -algorithm.overlong_penalty * soft_overlong_punishment(
        num_tokens, max_tokens=max_new_tokens, cache_tokens=algorithm.overlong_buffer
    )


def make_samples(groups: Sequence[Group], settings: GRPOSettings) -> list[dict[str, Any]]:
    """Return one sample per answer, in order.

    Each has ``input_ids``, ``loss_mask``, ``logprobs`` and ``advantages``.
    """
    algorithm = settings.algorithm
    assert algorithm.normalize_std is not None
    answers = [(group.draw.row.prompt_ids, answer) for group in groups for answer in group.answers]
    advantages = group_advantages(
        [answer.reward for _, answer in answers],
        group_size=settings.samples_per_prompt,
        normalize_std=algorithm.normalize_std,
    )
    samples: list[dict[str, Any]] = []
    for (prompt, answer), advantage in zip(answers, advantages, strict=True):
        tokens = answer.result.token_ids
        counts = not (algorithm.overlong_filter and answer.is_truncated)
        samples.append(
            {
                "input_ids": prompt + tokens,
                "loss_mask": [0] * len(prompt) + [int(counts)] * len(tokens),
                "logprobs": [0.0] * len(prompt) + answer.result.logprobs,
                "advantages": advantage,
            }
        )
    return samples


def with_weights(samples: Sequence[dict[str, Any]], settings: GRPOSettings) -> list[dict[str, Any]]:
    """Add ``loss_weights`` for the mean over tokens to the samples of one optimizer step."""
    aggregation = settings.algorithm.aggregation
    assert aggregation is not None
    counts = [sum(sample["loss_mask"]) for sample in samples]
    weights = sequence_weights(counts, aggregation, max_tokens=settings.rollout.max_new_tokens)
    return [
        {**sample, "loss_weights": weight} for sample, weight in zip(samples, weights, strict=True)
    ]


def loss_arguments(algorithm: Algorithm) -> dict[str, Any]:
    """Return the arguments of the loss."""
    return {
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        **({"kl_coef": algorithm.kl_coef} if algorithm.kl_coef else {}),
        **algorithm.loss_args,
    }


def rollout_metrics(
    groups: Sequence[Group], version: int, right: str, right_from: float
) -> dict[str, float]:
    """Return metrics of a step's answers.

    Args:
        groups: The answers by prompt.
        version: Version of the weights that are trained on them.
        right: Name of the reward that decides whether an answer is correct.
        right_from: Smallest value of that reward for a correct answer.
    """
    answers = [answer for group in groups for answer in group.answers]
    rewards = [answer.reward for answer in answers]
    lengths = [len(answer.result.token_ids) for answer in answers]
    behind = [version - each for answer in answers for each in answer.result.versions]
    found = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        "reward/failed": float(sum(answer.scored.failed for answer in answers)),
        "accuracy": statistics.fmean(
            answer.scored.values[right] >= right_from for answer in answers
        ),
        "response_length/mean": statistics.fmean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/truncated": statistics.fmean(answer.is_truncated for answer in answers),
        "prompt_length/mean": statistics.fmean(len(group.draw.row.prompt_ids) for group in groups),
        "groups/uniform": statistics.fmean(group.is_uniform for group in groups),
        "staleness/mean": statistics.fmean(behind) if behind else 0.0,
        "staleness/max": float(max(behind, default=0)),
    }
    if len(answers[0].scored.values) > 1:
        for name in answers[0].scored.values:
            found[f"reward/{name}/mean"] = statistics.fmean(
                answer.scored.values[name] for answer in answers
            )
    return found


def logprob_differences(
    answers: Sequence[tuple[Group, Answer]], logprobs: Sequence[Any], version: int
) -> dict[str, float]:
    """Compare log-probabilities of rollout and trainer for tokens of the trainer's version.

    Args:
        answers: Answers with their groups.
        logprobs: The trainer's log-probabilities of prompt and answer, (T,) float32 each.
        version: Version of the trainer's weights.

    Returns:
        ``logprob_diff/max`` and ``logprob_diff/mean``; empty if no token has this version.
    """
    apart: list[float] = []
    for (group, answer), row in zip(answers, logprobs, strict=True):
        result, begin = answer.result, len(group.draw.row.prompt_ids)
        apart += [
            abs(ours - theirs)
            for ours, theirs, made_by in zip(
                row.tolist()[begin:], result.logprobs, result.versions, strict=True
            )
            if made_by == version
        ]
    return (
        {"logprob_diff/max": max(apart), "logprob_diff/mean": statistics.fmean(apart)}
        if apart
        else {}
    )


_NAMES = {"ref_kl": "kl"}
"""Statistics of losses -> their usual names in the field."""


def train_metrics(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the token-weighted means of all statistics over a step's optimizer steps."""
    total = sum(each["num_tokens"] for each in every)
    found = {
        _NAMES.get(name, name): sum(each[name] * each["num_tokens"] for each in every) / total
        for name in every[0]
    }
    return {**found, "num_tokens": total, "lr": every[-1]["lr"]}
