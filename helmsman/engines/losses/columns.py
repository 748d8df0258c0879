"""Masked columns and KL estimates, shared by the losses.

Values outside of the loss mask reach neither a loss nor its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch

from helmsman.api.engines import OWN_TOP_LOGPROBS, PER_CHOICE, TOP_LOGPROBS
from helmsman.api.reward_shaping import KlEstimator

Columns: TypeAlias = Mapping[str, torch.Tensor]
"""Columns of a micro-batch by name, (B, T) or (B,): ``loss_mask`` is bool, ``pair`` integer, all
others are used as float32.
"""
Direction: TypeAlias = Literal["reverse", "forward"]
"""``reverse`` is KL(policy || teacher), ``forward`` is KL(teacher || policy)."""
LossResult: TypeAlias = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The sum of a loss, and sums of its statistics by name: float32 tensors of one element."""


def require(loss: str, batch: Columns, needed: Sequence[str]) -> None:
    """Raise ValueError if a batch lacks a column that a loss needs."""
    missing = [name for name in needed if name not in batch]
    if missing:
        raise ValueError(
            f"{loss} needs the column(s) {', '.join(missing)} in every sample; it reads "
            f"{', '.join(needed)}, and the batch has "
            f"{', '.join(sorted(batch))}"
        )


def masked(column: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a column (B, T) or (B,) as (B, T) float32, 0 outside of the mask.

    NaN or infinity outside of the mask has no gradient either.
    """
    per_token = column[:, None].expand_as(mask) if column.ndim == 1 else column
    return per_token.float().masked_fill(~mask, 0.0)


def weighted_sum(per_token: torch.Tensor, batch: Columns) -> torch.Tensor:
    """Sum a finite loss (B, T) over the masked tokens, times ``loss_weights`` if given."""
    mask = batch["loss_mask"]
    weights = batch.get("loss_weights")
    if weights is not None:
        per_token = per_token * masked(weights, mask)
    return (per_token * mask).sum()


def masked_sum(per_token: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum a finite statistic (B, T) over the masked tokens, without gradient."""
    return (per_token.detach() * mask).sum()


def kl_estimate(log_ratio: torch.Tensor, estimator: KlEstimator = "k3") -> torch.Tensor:
    """Estimate KL(p || q) from tokens sampled from p.

    Source: J. Schulman, http://joschu.net/blog/kl-approx.html.

    Args:
        log_ratio: log p - log q of each token, any shape, floating point.
        estimator: ``k1``, log p/q: unbiased, of high variance, often negative. Its gradient as a
            loss is 0 on average, so it belongs in the reward. ``k2``, half its square: biased, but
            its gradient is that of the divergence. ``k3``, q/p - 1 - log q/p: unbiased and never
            negative; used by GRPO (arXiv:2402.03300, eq. 4).

    Returns:
        The estimate of each token, in the shape and dtype of ``log_ratio``.

    Raises:
        ValueError: The estimator is unknown.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"there is no KL estimator {estimator!r}; expected 'k1', 'k2' or 'k3'")


def teacher_kl(loss: str, batch: Columns, direction: Direction) -> torch.Tensor:
    """Compute the KL divergence between policy and teacher over the teacher's top k.

    Both distributions are taken over the teacher's k most probable tokens and one bucket of all
    others, r: KL(p || q) = sum over v in top k of p(v) log(p(v) / q(v)) + p(r) log(p(r) / q(r)),
    where p(r) = 1 - sum of p(v). Never negative, and the divergence itself if k is the size of the
    vocabulary. Without the bucket, the policy would gain by moving probability out of the top k.
    Sources: GKD, arXiv:2306.13649 eq. 1 and 4 (both directions, on the student's tokens); the
    bucket, arXiv:2608.14728.

    Args:
        loss: Name of the loss, for the message.
        batch: ``loss_mask`` (B, T) bool; ``top_ids`` (B, T, k) integer and ``top_logprobs`` (B, T,
            k) float32 of the teacher; ``own_top_logprobs`` (B, T, k) float32 of the policy.
        direction: ``reverse`` has the policy for p, ``forward`` the teacher.

    Returns:
        (B, T) float32, 0 outside of the mask.

    Raises:
        ValueError: The batch lacks a column, or the direction is unknown.
    """
    require(loss, batch, PER_CHOICE)
    if direction not in ("reverse", "forward"):
        raise ValueError(f"there is no direction {direction!r}; expected 'reverse' or 'forward'")
    is_outside = ~batch["loss_mask"][..., None]
    p, q = (
        _with_rest(batch[name].float().masked_fill(is_outside, 0.0))
        for name in (OWN_TOP_LOGPROBS, TOP_LOGPROBS)
    )
    p, q = (p, q) if direction == "reverse" else (q, p)
    return (p.exp() * (p - q)).sum(-1)


def _with_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """Append the log-probability of all other tokens to (..., k), of at least 1e-7."""
    total = logprobs.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    return torch.cat([logprobs, torch.log(-torch.expm1(total))], dim=-1)
