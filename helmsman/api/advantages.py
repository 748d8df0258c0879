"""Advantages and loss weights of groups of samples.

The code is plain Python, because it runs in the driver, which may lack torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from typing import Literal

from helmsman.api.reward_shaping import chosen_tokens, plain


def group_advantages(
    rewards: Sequence[float],
    *,
    group_size: int | None = None,
    group_ids: Sequence[Hashable] | None = None,
    normalize_std: bool = True,
    epsilon: float = 1e-6,
) -> list[float]:
    """Compute each sample's advantage within its prompt: ``(r - mean) / (std + epsilon)``.

    Source: GRPO, DeepSeekMath, arXiv:2402.03300 section 4.1.2. Dr. GRPO, arXiv:2503.20783, omits
    the division (``normalize_std=False``), since it favours prompts that are almost always or
    almost never solved.

    Args:
        rewards: One per sample.
        group_size: Samples per prompt, if the samples of a prompt are adjacent.
        group_ids: The prompt of each sample, if they are not; give exactly one of the two.
        normalize_std: Whether to divide by the group's standard deviation (unbiased, n - 1).
        epsilon: Keeps the division finite.

    Returns:
        One advantage per reward; 0 for a group of one, or of equal rewards.

    Raises:
        ValueError: Neither or both of group_size and group_ids are given, or their length does not
            fit.
    """
    if (group_size is None) == (group_ids is None):
        raise ValueError("give either group_size or group_ids")
    if group_size is not None:
        if group_size < 1 or len(rewards) % group_size:
            raise ValueError(
                f"{len(rewards)} rewards cannot be divided into groups of {group_size}"
            )
        group_ids = [index // group_size for index in range(len(rewards))]
    if group_ids is None or len(group_ids) != len(rewards):
        raise ValueError(
            f"{len(group_ids or ())} group ids for {len(rewards)} rewards; expected one for each"
        )
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


def sequence_weights(
    num_tokens: Sequence[int],
    aggregation: Literal["token", "sequence", "constant"],
    *,
    max_tokens: int | None = None,
) -> list[float]:
    """Compute per-token weights that turn a mean over all tokens of the batch into another mean.

    Args:
        num_tokens: Tokens that count in the loss, for each sequence of the *global* batch of one
            optimizer step.
        aggregation: ``token``: all tokens count the same (DAPO, arXiv:2503.14476). ``sequence``:
            the mean over each sequence, then over sequences (GRPO, arXiv:2402.03300 eq. 3).
            ``constant``: each sequence's sum over ``max_tokens``, then the mean over sequences,
            which does not favour long wrong answers (Dr. GRPO, arXiv:2503.20783).
        max_tokens: Maximum number of tokens that a sequence can generate, for ``constant``.

    Returns:
        One weight per sequence, for the samples' ``loss_weights``; meaningless for a sequence
        without tokens.

    Raises:
        ValueError: The aggregation is unknown, or ``constant`` lacks max_tokens.
    """
    total, num_sequences = sum(num_tokens), len(num_tokens)
    if aggregation == "token":
        return [1.0] * num_sequences
    if aggregation == "sequence":
        return [total / (num_sequences * count) if count else 0.0 for count in num_tokens]
    if aggregation == "constant":
        if max_tokens is None or max_tokens < 1:
            raise ValueError(
                "aggregation 'constant' needs max_tokens, the maximum tokens that a sequence can "
                "generate"
            )
        return [total / (num_sequences * max_tokens)] * num_sequences
    raise ValueError(f"aggregation is {aggregation!r}; expected 'token', 'sequence' or 'constant'")


def gae(
    rewards: Sequence[Sequence[float]],
    values: Sequence[Sequence[float]],
    masks: Sequence[Sequence[bool]],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    truncated: Sequence[bool] | None = None,
) -> tuple[list[list[float]], list[list[float]]]:
    """Compute generalised advantage estimates for a batch: arXiv:1506.02438 section 3.

    The steps of an episode are its masked tokens in order; unmasked tokens between them (of a tool,
    of the next turn's prompt) are skipped. The state before token t is all tokens up to t - 1, so
    its value is ``values[t - 1]``.

    Args:
        rewards: (T,) per sample, aligned with its tokens; helmsman.api.reward_shaping.token_rewards
            makes them.
        values: (T,) per sample, as returned by ``forward`` of a train engine with a value head.
        masks: (T,) per sample, its ``loss_mask``. Entry 0 is ignored.
        gamma: Discount per step.
        lam: Weight of longer estimates: 1 gives the return minus the value, 0 the one-step error.
        truncated: Whether each episode was cut off, so that it ends in a state with a value (that
            of its last token) instead of 0. None: no episode was.

    Returns:
        Advantages and returns (advantage + value, the critic's target), each (T,) per sample and 0
        outside of the mask.

    Raises:
        ValueError: The lengths do not match.
    """
    count = len(masks)
    if not len(rewards) == len(values) == count or (
        truncated is not None and len(truncated) != count
    ):
        raise ValueError(
            f"{len(rewards)} rows of rewards, {len(values)} of values, {count} masks; expected "
            "one per sample"
        )
    all_advantages, all_returns = [], []
    for index in range(count):
        row, value, mask = plain(rewards[index]), plain(values[index]), plain(masks[index])
        if not len(row) == len(value) == len(mask):
            raise ValueError(
                f"sample {index} has {len(row)} rewards, {len(value)} values, {len(mask)} tokens; "
                "expected equal numbers"
            )
        advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
        chosen = chosen_tokens(mask)
        next_value = (
            value[chosen[-1]] if chosen and truncated is not None and truncated[index] else 0.0
        )
        advantage = 0.0
        for token in reversed(chosen):
            before = value[token - 1]
            advantage = row[token] + gamma * next_value - before + gamma * lam * advantage
            advantages[token], returns[token] = advantage, advantage + before
            next_value = before
        all_advantages.append(advantages)
        all_returns.append(returns)
    return all_advantages, all_returns


def whiten(
    rows: Sequence[Sequence[float]],
    masks: Sequence[Sequence[bool]],
    *,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> list[list[float]]:
    """Normalize a batch of advantages to mean 0 and standard deviation 1 over its masked tokens.

    Source: arXiv:2006.05990, choice C67, which normalizes per mini-batch. This function normalizes
    the whole batch, independently of later splits.

    Args:
        rows: (T,) per sample.
        masks: (T,) per sample, its ``loss_mask``. Entry 0 is ignored.
        shift_mean: Whether to shift the mean to 0; else it is kept.
        epsilon: Added to the variance, which is the unbiased one (n - 1).

    Returns:
        Rows of the same shapes, 0 outside of the masks.

    Raises:
        ValueError: The lengths do not match, or the masks have fewer than two tokens.
    """
    if len(rows) != len(masks):
        raise ValueError(f"{len(rows)} rows for {len(masks)} masks; expected one for each")
    for index, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        if len(row) != len(mask):
            raise ValueError(
                f"sample {index}: its row has {len(row)} numbers, but its mask {len(mask)} tokens"
            )
    rows, places = [plain(row) for row in rows], [chosen_tokens(plain(mask)) for mask in masks]
    numbers = [row[token] for row, chosen in zip(rows, places, strict=True) for token in chosen]
    if len(numbers) < 2:
        raise ValueError(
            f"the masks have {len(numbers)} token(s); a standard deviation needs 2 or more"
        )
    mean = statistics.fmean(numbers)
    scale = (statistics.variance(numbers, mean) + epsilon) ** -0.5
    offset = 0.0 if shift_mean else mean
    whitened = [[0.0] * len(row) for row in rows]
    for row, chosen, result in zip(rows, places, whitened, strict=True):
        for token in chosen:
            result[token] = (row[token] - mean) * scale + offset
    return whitened
