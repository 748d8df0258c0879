"""Operations on rewards before advantages are computed.

The code is plain Python, because it runs in the driver, which may lack torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

KlEstimator = Literal["k1", "k2", "k3"]


def token_rewards(
    scores: Sequence[float],
    masks: Sequence[Sequence[bool]],
    logprobs: Sequence[Sequence[float]] | None = None,
    ref_logprobs: Sequence[Sequence[float]] | None = None,
    *,
    kl_coef: float = 0.0,
    estimator: KlEstimator = "k1",
) -> tuple[list[list[float]], float]:
    """Compute token rewards: the score at the last token, minus the KL penalty at every token.

    Source: arXiv:1909.08593 eq. 2, per token as in arXiv:2203.02155; for the estimators
    http://joschu.net/blog/kl-approx.html.

    Args:
        scores: One per sample.
        masks: (T,) per sample, its ``loss_mask``: the tokens that the policy chose. Entry 0 is
            ignored.
        logprobs: (T,) per sample, under the policy that chose the tokens; only with ``kl_coef``.
        ref_logprobs: (T,) per sample, under the reference policy; only with ``kl_coef``.
        kl_coef: Weight of the divergence from the reference policy.
        estimator: ``k1``, log policy/reference; ``k2``, half its square; ``k3``, which is never
            negative.

    Returns:
        The rewards, (T,) per sample and 0 outside of the mask; and the divergence summed over each
        sample's tokens, averaged over samples, as input of AdaptiveKl.update (0 without
        ``kl_coef``).

    Raises:
        ValueError: Columns are missing or have other lengths, or the estimator is unknown.
    """
    if estimator not in ("k1", "k2", "k3"):
        raise ValueError(f"there is no KL estimator {estimator!r}; expected 'k1', 'k2' or 'k3'")
    if kl_coef and (logprobs is None or ref_logprobs is None):
        raise ValueError("kl_coef needs logprobs and ref_logprobs of every sample")
    masks = [plain(mask) for mask in masks]
    columns = {"scores": scores, "rows of logprobs": logprobs, "rows of ref_logprobs": ref_logprobs}
    for name, column in columns.items():
        if column is not None and len(column) != len(masks):
            raise ValueError(
                f"{len(column)} {name} for {len(masks)} samples; expected one for each"
            )
    rewards, total_kl = [], 0.0
    for index, (score, mask) in enumerate(zip(scores, masks, strict=True)):
        chosen = chosen_tokens(mask)
        row = [0.0] * len(mask)
        if kl_coef and logprobs is not None and ref_logprobs is not None:
            current, reference = plain(logprobs[index]), plain(ref_logprobs[index])
            if not len(current) == len(reference) == len(mask):
                raise ValueError(
                    f"sample {index} has {len(current)} logprobs, {len(reference)} ref_logprobs, "
                    f"{len(mask)} tokens; expected equal numbers"
                )
            for token in chosen:
                divergence = _estimate(current[token] - reference[token], estimator)
                total_kl += divergence
                row[token] = -kl_coef * divergence
        if chosen:
            row[chosen[-1]] += float(score)
        rewards.append(row)
    return rewards, total_kl / max(1, len(masks))


class AdaptiveKl:
    """A KL coefficient that adapts to a target divergence: arXiv:1909.08593 section 2.2.

    A fixed coefficient needs no object: it is a number.

    Args:
        coef: Initial coefficient.
        target: Desired divergence per sample, in nats.
        gain: Speed of adaptation: an update changes the coefficient by at most a fifth of this, as
            a fraction.

    Raises:
        ValueError: An argument is not above 0.
    """

    def __init__(self, coef: float, target: float, gain: float = 0.1) -> None:
        if coef <= 0 or target <= 0 or gain <= 0:
            raise ValueError(
                f"coef is {coef}, target {target}, gain {gain}; expected numbers above 0"
            )
        self.coef = coef
        self.target = target
        self.gain = gain

    def update(self, divergence: float) -> float:
        """Adapt to a batch's divergence per sample; returns the coefficient for the next batch."""
        error = min(max(divergence / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + self.gain * error
        return self.coef


def soft_overlong_punishment(num_tokens: int, *, max_tokens: int, cache_tokens: int) -> float:
    """Return the length penalty of an answer, from 0 to -1.

    It is 0 up to ``max_tokens - cache_tokens`` tokens, then falls linearly to -1 at ``max_tokens``.
    Source: DAPO, arXiv:2503.14476 eq. 13, where these are L_max and L_cache.

    Args:
        num_tokens: Generated tokens of the answer.
        max_tokens: Length from which the penalty is -1.
        cache_tokens: Number of tokens below ``max_tokens`` over which the penalty grows.

    Returns:
        The penalty, to add to the reward.

    Raises:
        ValueError: ``cache_tokens`` is not between 1 and ``max_tokens``.
    """
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(
            f"cache_tokens is {cache_tokens}; expected 1 to max_tokens, which is {max_tokens}"
        )
    return -min(1.0, max(0.0, (num_tokens - (max_tokens - cache_tokens)) / cache_tokens))


def overlong_filter(
    masks: Sequence[Sequence[bool]], stop_reasons: Sequence[str]
) -> list[list[bool]]:
    """Clear the ``loss_mask`` of truncated answers: they do not train, nor count in means.

    Source: overlong filtering of DAPO, arXiv:2503.14476 section 3.4.

    Args:
        masks: (T,) per sample, its ``loss_mask``.
        stop_reasons: ``stop_reason`` of each sample's GenerationResult; every reason except
            ``stop`` means truncation.

    Returns:
        The new masks.

    Raises:
        ValueError: The lengths differ.
    """
    if len(masks) != len(stop_reasons):
        raise ValueError(
            f"{len(stop_reasons)} stop reasons for {len(masks)} samples; expected one for each"
        )
    return [
        [bool(entry) and reason == "stop" for entry in plain(mask)]
        for mask, reason in zip(masks, stop_reasons, strict=True)
    ]


def plain(column: Any) -> Any:
    """Convert a column to Python numbers; indexing a tensor per entry is a hundred times slower."""
    return column.tolist() if hasattr(column, "tolist") else column


def chosen_tokens(mask: Sequence[bool]) -> list[int]:
    """Return the positions of the policy's tokens. Token 0 is never one: nothing predicts it."""
    return [token for token in range(1, len(mask)) if mask[token]]


def _estimate(log_ratio: float, estimator: KlEstimator) -> float:
    if estimator == "k1":
        return log_ratio
    return 0.5 * log_ratio**2 if estimator == "k2" else math.expm1(-log_ratio) + log_ratio
