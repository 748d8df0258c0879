"""Advantages and loss weights of groups of samples, in plain Python: the driver computes them, and it may lack torch."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from typing import Literal

Aggregation = Literal["token", "sequence", "constant"]


def group_advantages(
    rewards: Sequence[float],
    *,
    group_size: int | None = None,
    group_ids: Sequence[Hashable] | None = None,
    normalize_std: bool = True,
    epsilon: float = 1e-6,
) -> list[float]:
    """Advantage of each sample relative to the samples of the same prompt: ``(r - mean) / (std + epsilon)``.

    Source: GRPO, DeepSeekMath, arXiv:2402.03300 section 4.1.2. Dr. GRPO, arXiv:2503.20783, leaves the division out
    (``normalize_std=False``), since it favours prompts that are almost always or almost never solved.

    Args:
        rewards: One per sample.
        group_size: Samples per prompt, when the samples of a prompt stand one after another.
        group_ids: The prompt of each sample, when they do not; give one of the two.
        normalize_std: Divide by the group's standard deviation (the unbiased one, with n - 1).
        epsilon: Keeps the division finite.

    Returns:
        One advantage per reward; 0 for a group of one, or of equal rewards.

    Raises:
        ValueError: Neither or both of group_size and group_ids, or their length does not fit.
    """
    if (group_size is None) == (group_ids is None):
        raise ValueError("give either group_size or group_ids")
    if group_size is not None:
        if group_size < 1 or len(rewards) % group_size:
            raise ValueError(f"{len(rewards)} rewards do not make groups of {group_size}")
        group_ids = [index // group_size for index in range(len(rewards))]
    if group_ids is None or len(group_ids) != len(rewards):
        raise ValueError(f"{len(group_ids or ())} group ids for {len(rewards)} rewards; expected one for each")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        values = [float(rewards[index]) for index in indices]
        if min(values) == max(values):
            continue
        mean = statistics.fmean(values)
        scale = statistics.stdev(values, mean) + epsilon if normalize_std else 1.0
        for index, value in zip(indices, values, strict=True):
            advantages[index] = (value - mean) / scale
    return advantages


def sequence_weights(num_tokens: Sequence[int], aggregation: Aggregation, *, max_tokens: int | None = None) -> list[float]:
    """Weight of every token of each sequence, so that a mean over all tokens of the batch becomes another mean.

    Args:
        num_tokens: Tokens that count in the loss, for each sequence of the *global* batch of one optimizer step.
        aggregation: ``token``: each token alike (DAPO, arXiv:2503.14476). ``sequence``: the mean over each sequence, then over
            sequences (GRPO, arXiv:2402.03300 eq. 3). ``constant``: each sequence's sum over ``max_tokens``, then the mean over
            sequences, which does not favour long wrong answers (Dr. GRPO, arXiv:2503.20783).
        max_tokens: The constant; the most tokens that a sequence can generate.

    Returns:
        One weight per sequence, for the samples' ``loss_weights``; 0 for a sequence without tokens.

    Raises:
        ValueError: An unknown aggregation, or ``constant`` without max_tokens.
    """
    total, num_sequences = sum(num_tokens), len(num_tokens)
    if aggregation == "token":
        return [1.0] * num_sequences
    if aggregation == "sequence":
        return [total / (num_sequences * count) if count else 0.0 for count in num_tokens]
    if aggregation == "constant":
        if max_tokens is None or max_tokens < 1:
            raise ValueError("aggregation 'constant' needs max_tokens, the most tokens that a sequence can generate")
        return [total / (num_sequences * max_tokens)] * num_sequences
    raise ValueError(f"aggregation is {aggregation!r}; expected 'token', 'sequence' or 'constant'")
