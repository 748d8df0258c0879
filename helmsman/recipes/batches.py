"""Training samples from answers, and metrics about both."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from helmsman.agents.samples import Sample, turn_advantages
from helmsman.api.advantages import group_advantages, sequence_weights
from helmsman.api.reward_shaping import soft_overlong_punishment
from helmsman.recipes.prompts import Draw, Row
from helmsman.recipes.scorer import Scored
from helmsman.recipes.settings import Algorithm, GRPOSettings


class Answer(msgspec.Struct, frozen=True):
    """An answer and its reward."""

    samples: list[Sample]
    """One, or the branches of an agent's session."""
    scored: Scored
    reward: float
    """Weighted sum of the rewards, minus the overlong penalty."""

    @property
    def is_truncated(self) -> bool:
        """Whether the answer was cut at its maximum length."""
        return any(sample.is_truncated for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(sum(sample.loss_mask) for sample in self.samples)

    @property
    def versions(self) -> list[int]:
        """Weight versions of the sampled tokens."""
        return [
            version
            for sample in self.samples
            for version, is_sampled in zip(sample.versions, sample.loss_mask, strict=True)
            if is_sampled
        ]


class Group(msgspec.Struct, frozen=True):
    """The answers to one prompt, whose rewards are compared."""

    draw: Draw
    answers: list[Answer]

    @property
    def judged(self) -> list[tuple[Row, Scored]]:
        """The row and the rewards of each answer."""
        return [(self.draw.row, answer.scored) for answer in self.answers]

    @property
    def scored(self) -> Group:
        """The group without answers whose reward failed."""
        kept = [answer for answer in self.answers if not answer.scored.is_left_out]
        return msgspec.structs.replace(self, answers=kept)

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
    """Return the training samples of all answers, in order.

    Each has ``input_ids``, ``loss_mask``, ``logprobs`` and ``advantages``.
    """
    algorithm = settings.algorithm
    assert algorithm.normalize_std is not None
    answers = [answer for group in groups for answer in group.answers]
    advantages: list[list[Any]]
    if settings.agent.credit == "turn":
        advantages = [
            [
                sample.per_token(of_turns)
                for sample, of_turns in zip(answer.samples, of_samples, strict=True)
            ]
            for group in groups
            for answer, of_samples in zip(
                group.answers,
                turn_advantages(
                    [answer.samples for answer in group.answers],
                    settings.agent.discount,
                    normalize_std=algorithm.normalize_std,
                ),
                strict=True,
            )
        ]
    else:
        of_answers = group_advantages(
            [answer.reward for answer in answers],
            group_ids=[number for number, group in enumerate(groups) for _ in group.answers],
            normalize_std=algorithm.normalize_std,
        )
        advantages = [
            [value] * len(answer.samples) for answer, value in zip(answers, of_answers, strict=True)
        ]
    samples: list[dict[str, Any]] = []
    for answer, of_samples in zip(answers, advantages, strict=True):
        counts = not (algorithm.overlong_filter and answer.is_truncated)
        for sample, advantage in zip(answer.samples, of_samples, strict=True):
            samples.append(
                {
                    "input_ids": sample.input_ids,
                    "loss_mask": [int(each and counts) for each in sample.loss_mask],
                    "logprobs": sample.logprobs,
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
    lengths = [answer.num_tokens for answer in answers]
    behind = [version - each for answer in answers for each in answer.versions]
    found = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        "response_length/mean": statistics.fmean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/truncated": statistics.fmean(answer.is_truncated for answer in answers),
        "prompt_length/mean": statistics.fmean(len(group.draw.row.prompt_ids) for group in groups),
        "groups/uniform": statistics.fmean(group.is_uniform for group in groups),
        "staleness/mean": statistics.fmean(behind) if behind else 0.0,
        "staleness/max": float(max(behind, default=0)),
    }
    by_name: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in answer.scored.values.items():
            by_name.setdefault(name, []).append(value)
    if right in by_name:
        found["accuracy"] = statistics.fmean(value >= right_from for value in by_name[right])
    if len(by_name) > 1:
        found |= {f"reward/{name}/mean": statistics.fmean(each) for name, each in by_name.items()}
    return found


def logprob_differences(
    samples: Sequence[Sample], logprobs: Sequence[Any], version: int
) -> dict[str, float]:
    """Compare log-probabilities of rollout and trainer for tokens of the trainer's version.

    Args:
        samples: Samples of answers.
        logprobs: The trainer's log-probabilities of each sample, (T,) float32.
        version: Version of the trainer's weights.

    Returns:
        ``logprob_diff/max`` and ``logprob_diff/mean``; empty if no token has this version.
    """
    apart: list[float] = []
    for sample, row in zip(samples, logprobs, strict=True):
        columns = (row.tolist(), sample.logprobs, sample.versions, sample.loss_mask)
        apart += [
            abs(ours - theirs)
            for ours, theirs, made_by, is_sampled in zip(*columns, strict=True)
            if is_sampled and made_by == version
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
