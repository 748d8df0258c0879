"""Training samples from answers, and metrics about both."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from helmsman import TrainController
from helmsman.agents.samples import Sample, turn_advantages
from helmsman.api.advantages import group_advantages, sequence_weights
from helmsman.api.corrections import Correction
from helmsman.api.reward_shaping import soft_overlong_punishment
from helmsman.recipes.prompts import Draw, Row
from helmsman.recipes.scorer import Scored
from helmsman.recipes.settings import AGENT_REWARD, Algorithm, GRPOSettings, name_of

T = TypeVar("T")

_MOST_COMPARED = 16
"""Answers per step whose log-probabilities are compared with the trainer's."""


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
            for version in itertools.compress(sample.versions, sample.loss_mask)
        ]


class Group(msgspec.Struct, frozen=True):
    """The answers to one prompt, whose rewards are compared."""

    draw: Draw
    answers: list[Answer]
    started: float = 0.0
    """Unix time at which the first answer began, in seconds."""
    seconds: float = 0.0
    """Time until all answers were complete and rewarded."""

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


def make_answer(samples: list[Sample], scored: Scored, settings: GRPOSettings) -> Answer:
    """Return an answer, whose reward is shaped by the overlong penalty."""
    made = Answer(samples, scored, scored.total)
    cost = overlong_cost(made.num_tokens, settings.algorithm, settings.rollout.max_new_tokens)
    return msgspec.structs.replace(made, reward=scored.total - cost)


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
    found: list[dict[str, Any]] = []
    for group in groups:
        samples = [(answer, sample) for answer in group.answers for sample in answer.samples]
        advantages = _advantages(group.answers, settings)
        for (answer, sample), advantage in zip(samples, advantages, strict=True):
            counts = not (settings.algorithm.overlong_filter and answer.is_truncated)
            found.append(
                {
                    "input_ids": sample.input_ids,
                    "loss_mask": [int(each and counts) for each in sample.loss_mask],
                    "logprobs": sample.logprobs,
                    "advantages": advantage,
                }
            )
    return found


def _advantages(answers: Sequence[Answer], settings: GRPOSettings) -> list[Any]:
    """Return the advantages of a group's samples, in order: a number each, or (T,) with turns."""
    normalize, sessions = settings.algorithm.normalize_std, [each.samples for each in answers]
    assert normalize is not None
    if settings.agent.credit == "turn":
        of_group = turn_advantages(sessions, settings.agent.discount, normalize_std=normalize)
        pairs = zip(itertools.chain(*sessions), itertools.chain(*of_group), strict=True)
        return [sample.per_token(of_turns) for sample, of_turns in pairs]
    rewards = [answer.reward for answer in answers]
    values = group_advantages(rewards, group_size=len(rewards), normalize_std=normalize)
    return [value for session, value in zip(sessions, values, strict=True) for _ in session]


def split(items: Sequence[T], num_parts: int) -> list[Sequence[T]]:
    """Split samples or rows into minibatches, in order; their sizes differ by one at most."""
    edges = [len(items) * each // num_parts for each in range(num_parts + 1)]
    return [items[begin:end] for begin, end in itertools.pairwise(edges)]


def with_weights(samples: Sequence[dict[str, Any]], settings: GRPOSettings) -> list[dict[str, Any]]:
    """Add ``loss_weights`` for the mean over tokens to the samples of one optimizer step."""
    aggregation = settings.algorithm.aggregation
    assert aggregation is not None
    samples = [_without_rejected(sample, settings.correction) for sample in samples]
    counts = [sum(sample["loss_mask"]) for sample in samples]
    weights = sequence_weights(counts, aggregation, max_tokens=settings.rollout.max_new_tokens)
    return [
        {**sample, "loss_weights": weight} for sample, weight in zip(samples, weights, strict=True)
    ]


def _without_rejected(sample: dict[str, Any], correction: Correction) -> dict[str, Any]:
    """Take rejected tokens, and an answer that is left out, out of the mask, and so of the mean."""
    if "importance" not in sample:
        return sample
    importance = sample["importance"].tolist()
    if correction.mode != "reject" and any(importance):
        return sample
    kept = [int(each and bool(w)) for each, w in zip(sample["loss_mask"], importance, strict=True)]
    return {**sample, "loss_mask": kept}


def loss_arguments(algorithm: Algorithm) -> dict[str, Any]:
    """Return the arguments of the loss."""
    return {
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        **({"kl_coef": algorithm.kl_coef} if algorithm.kl_coef else {}),
        **algorithm.loss_args,
    }


def deciding_reward(settings: GRPOSettings) -> str:
    """Return the name of the reward that decides whether an answer is correct."""
    first = name_of(settings.rewards[0]) if settings.rewards else AGENT_REWARD
    return settings.evaluation.reward or first


def rollout_metrics(
    groups: Sequence[Group], version: int, settings: GRPOSettings
) -> dict[str, float]:
    """Return metrics of a step's answers.

    Args:
        groups: The answers by prompt.
        version: Version of the weights that are trained on them.
        settings: The settings of the run.
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
    if values := by_name.get(deciding_reward(settings)):
        found["accuracy"] = statistics.fmean(
            value >= settings.evaluation.right_from for value in values
        )
    if len(by_name) > 1:
        found |= {f"reward/{name}/mean": statistics.fmean(each) for name, each in by_name.items()}
    return found


def add_logprobs(
    samples: Sequence[dict[str, Any]],
    groups: Sequence[Group],
    trainer: TrainController,
    settings: GRPOSettings,
) -> dict[str, float]:
    """Add the trainer's log-probabilities to the samples, and compare them with the rollout's.

    Does as much of it as ``algorithm.old_logprobs`` and ``tracking.logprob_diff`` ask for.

    Args:
        samples: The samples of all answers.
        groups: The answers by prompt.
        trainer: The controller of the policy.
        settings: The settings of the run.

    Returns:
        Metrics of the comparison.
    """
    correction = settings.correction
    old = settings.algorithm.old_logprobs if correction.mode == "none" else "trainer"
    corrects = correction.mode != "none" or correction.outlier is not None
    needs_all = corrects or old != "rollout"
    if not needs_all and not settings.tracking.logprob_diff:
        return {}
    every = 1 if needs_all else -(-len(samples) // _MOST_COMPARED)
    own = trainer.forward([{"input_ids": each["input_ids"]} for each in samples[::every]])
    found: dict[str, float] = {}
    if corrects:
        found = add_corrections(samples, own, correction)
    if old != "rollout":
        for sample, logprobs in zip(samples, own, strict=True):
            sample["logprobs" if old == "trainer" else "prox_logprobs"] = logprobs
    sampled = [each for group in groups for answer in group.answers for each in answer.samples]
    return found | logprob_differences(sampled[::every], own, trainer.get_version())


def add_corrections(
    samples: Sequence[dict[str, Any]], own: Sequence[Any], correction: Correction
) -> dict[str, float]:
    """Add ``importance`` to the samples, (T,) float32 each, and return statistics of it.

    Args:
        samples: Samples with the ``logprobs`` of the rollout.
        own: The trainer's log-probabilities of each sample's tokens before the step, (T,) float32.
        correction: The kind of weights.
    """
    import torch

    from helmsman.engines.losses.corrections import importance_weights

    sums: dict[str, float] = {}
    for sample, logprobs in zip(samples, own, strict=True):
        rollout, mask = torch.tensor(sample["logprobs"]), torch.tensor(sample["loss_mask"])
        sample["importance"], stats = importance_weights(rollout, logprobs, mask, correction)
        for name, value in stats.items():
            sums[name] = sums.get(name, 0.0) + value
    num_tokens = max(1, sum(sum(sample["loss_mask"]) for sample in samples))
    counts = {"left_out": len(samples)}
    return {
        f"correction/{name}": value / counts.get(name, num_tokens) for name, value in sums.items()
    }


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
    if not apart:
        return {}
    return {"logprob_diff/max": max(apart), "logprob_diff/mean": statistics.fmean(apart)}


_NAMES = {"ref_kl": "kl", "teacher_kl": "teacher/kl"}
"""Statistics of losses -> their usual names in the field."""


def train_metrics(every: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the token-weighted means of all statistics over a step's optimizer steps."""
    if not every:
        return {"optimizer_steps": 0.0}
    total = sum(each["num_tokens"] for each in every)
    found = {
        _NAMES.get(name, name): sum(each[name] * each["num_tokens"] for each in every) / total
        for name in every[0]
    }
    counts = {"num_tokens": total, "optimizer_steps": float(len(every))}
    return {**found, **counts, "lr": every[-1]["lr"]}


def log_likelihood(sample: Mapping[str, Any], logprobs: Any) -> float:
    """Sum the log-probabilities of unmasked tokens; the first token has none.

    Args:
        sample: A sample with ``loss_mask``.
        logprobs: Log-probabilities of its tokens, (T,) float32.
    """
    return float(sum(itertools.compress(logprobs.tolist()[1:], sample["loss_mask"][1:])))
