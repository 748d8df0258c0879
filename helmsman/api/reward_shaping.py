"""What is done to rewards before advantages are computed, in plain Python: the driver does it, and
it may lack torch.
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
    """Rewards of tokens: a sample's score at its last token, less the divergence from a reference
    policy at every token.

    Source: arXiv:1909.08593 eq. 2, per token as in arXiv:2203.02155; for the estimators
        http://joschu.net/blog/kl-approx.html.

    Args:
        scores: One per sample.
        masks: ``loss_mask`` of each sample, (T,): the tokens that the policy chose. Entry 0 is left
            out.
        logprobs: Of each sample, (T,), under the policy that chose them; only with ``kl_coef``.
        ref_logprobs: Of each sample, (T,), under the reference policy; only with ``kl_coef``.
        kl_coef: Weight of the divergence.
        estimator: ``k1``, log policy/reference; ``k2``, half its square; ``k3``, which is never
            negative.

    Returns:
        The rewards of each sample's tokens, (T,), 0 outside of its mask; and the mean over samples
        of the divergence, summed over a sample's tokens, as AdaptiveKl.update takes it (0 without
        ``kl_coef``).

    Raises:
        ValueError: Columns are missing or of other lengths, or there is no such estimator.
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
                    f"sample {index}: {len(current)} logprobs and {len(reference)} ref_logprobs "
                    f"for {len(mask)} tokens"
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
    """A weight of the divergence that follows how far the policy is from a target: arXiv:1909.08593
    section 2.2.

    A fixed weight needs no object: it is a number.

    Args:
        coef: The weight to begin with.
        target: Divergence per sample in nats that is wanted.
        gain: How fast the weight follows: it changes by at most a fifth of this, as a fraction,
            with an update.
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
        """Take the divergence per sample that a batch had, and return the weight for the next
        one.
        """
        error = min(max(divergence / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + self.gain * error
        return self.coef


def soft_overlong_punishment(num_tokens: int, *, max_tokens: int, cache_tokens: int) -> float:
    """Added to the reward of an answer: 0, and from ``max_tokens - cache_tokens`` on falling to -1
    at ``max_tokens``.

    Source: DAPO, arXiv:2503.14476 eq. 13, L_max and L_cache there.

    Args:
        num_tokens: Generated tokens of the answer.
        max_tokens: The most that an answer should have; -1 above.
        cache_tokens: Over how many tokens below that the punishment grows.
    """
    if not 0 < cache_tokens <= max_tokens:
        raise ValueError(
            f"cache_tokens is {cache_tokens}; expected 1 to max_tokens, which is {max_tokens}"
        )
    return -min(1.0, max(0.0, (num_tokens - (max_tokens - cache_tokens)) / cache_tokens))


def overlong_filter(
    masks: Sequence[Sequence[bool]], stop_reasons: Sequence[str]
) -> list[list[bool]]:
    """``loss_mask`` of each sample, empty for answers that were cut off: nothing is learned from
    them, and their tokens do not count in means. Source: overlong filtering of DAPO,
    arXiv:2503.14476 section 3.4.

    Args:
        masks: ``loss_mask`` of each sample, (T,).
        stop_reasons: ``stop_reason`` of each sample's GenerationResult; ``stop`` ends an answer,
            the others cut it off.
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
    """A column as a list of Python numbers: indexing a tensor entry by entry takes a hundred times
    as long.
    """
    return column.tolist() if hasattr(column, "tolist") else column


def chosen_tokens(mask: Sequence[bool]) -> list[int]:
    """The places of the tokens that the policy chose. Nothing predicts token 0, so that it is none
    of them.
    """
    return [token for token in range(1, len(mask)) if mask[token]]


def _estimate(log_ratio: float, estimator: KlEstimator) -> float:
    if estimator == "k1":
        return log_ratio
    return 0.5 * log_ratio**2 if estimator == "k2" else math.expm1(-log_ratio) + log_ratio
