"""Losses on given answers, and on pairs of answers with the preferred one first.

Single answers: supervised fine-tuning, distillation and critics. Pairs: DPO for policies,
Bradley-Terry for reward models. Sums over pairs are divided by the number of pairs of the global
batch; helmsman.api.pairs describes the layout of pairs.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch.nn import functional

from helmsman.api.engines import loss_traits
from helmsman.api.pairs import PAIR
from helmsman.engines.losses.columns import (
    Columns,
    Direction,
    LossResult,
    masked,
    masked_sum,
    require,
    teacher_kl,
    weighted_sum,
)

DpoLossType: TypeAlias = Literal["sigmoid", "ipo", "hinge"]


@loss_traits(head="lm")
def sft_loss(logprobs: torch.Tensor, batch: Columns) -> LossResult:
    """Compute the negative log-likelihood of the masked tokens.

    This is the cross-entropy of next-token prediction, arXiv:2203.02155 section 3.1.

    Args:
        logprobs: (B, T) float32 under the current weights.
        batch: ``loss_mask`` (B, T) bool; optionally ``loss_weights`` (B,) or (B, T).

    Returns:
        The loss summed over tokens, and no statistics.
    """
    return weighted_sum(-masked(logprobs, batch["loss_mask"]), batch), {}


@loss_traits(head="lm")
def distill_loss(
    logprobs: torch.Tensor, batch: Columns, direction: Direction = "forward", hard: float = 0.0
) -> LossResult:
    """Compute the divergence from a teacher's top k, mixed with the loss on the tokens themselves.

    (1 - hard) * KL + hard * negative log-likelihood. With ``forward`` and given answers, these are
    the soft and hard targets of arXiv:1503.02531 section 2, at temperature 1; with ``reverse`` and
    answers of the policy, GKD, arXiv:2306.13649.

    Args:
        logprobs: (B, T) float32 under the current weights.
        batch: ``loss_mask`` (B, T) bool; ``top_ids`` (B, T, k) integer and ``top_logprobs`` (B, T,
            k) float32 of the teacher, from ``forward_top``; ``own_top_logprobs`` (B, T, k) float32,
            which the engine adds; optionally ``loss_weights`` (B,) or (B, T).
        direction: ``forward``, KL(teacher || policy), or ``reverse``; see ``columns.teacher_kl``.
        hard: Share of the negative log-likelihood, from 0 to 1.

    Returns:
        The loss summed over tokens, and the sum of ``teacher_kl``.

    Raises:
        ValueError: The batch lacks a column, or the direction is unknown.
    """
    mask = batch["loss_mask"]
    divergence = teacher_kl("distill_loss", batch, direction)
    mixed = (1 - hard) * divergence - hard * masked(logprobs, mask)
    return weighted_sum(mixed, batch), {"teacher_kl": masked_sum(divergence, mask)}


@loss_traits(head="value")
def value_loss(values: torch.Tensor, batch: Columns, clip: float | None = None) -> LossResult:
    """Compute half the squared distance of a critic's values to the returns.

    Source: PPO, arXiv:1707.06347 eq. 9. The value for token t is ``values[t - 1]``, that of the
    state in which the token was chosen.

    Args:
        values: (B, T) float32 under the current weights, the outputs of a value head.
        batch: ``loss_mask`` (B, T) bool; float32 ``returns`` (B, T), as from
            helmsman.api.advantages.gae, or (B,); with ``clip`` also ``values`` (B, T), the output
            of ``forward`` before the batch's updates; optionally ``loss_weights`` (B,) or (B, T).
        clip: If given, the loss is the larger of the losses of the value and of the value
            clipped to within this distance of the old one (arXiv:2005.12729, section 3,
            optimisation 1).

    Returns:
        The loss summed over tokens, and sums of ``value`` and ``return``; with ``clip`` also of
        ``value_clip_fraction``, tokens whose gradient the clip removed.

    Raises:
        ValueError: The batch lacks a column.
    """
    require("value_loss", batch, ("returns", *(("values",) if clip is not None else ())))
    mask = batch["loss_mask"]
    current = masked(_before(values), mask)
    returns = masked(batch["returns"], mask)
    loss = (current - returns).square()
    stats = {"value": masked_sum(current, mask), "return": masked_sum(returns, mask)}
    if clip is not None:
        old = masked(_before(batch["values"]), mask)
        # A value outside of the clip range has no gradient where the clipped loss is larger.
        clipped = (torch.clamp(current, old - clip, old + clip) - returns).square()
        stats["value_clip_fraction"] = masked_sum(clipped > loss, mask).float()
        loss = torch.maximum(loss, clipped)
    return weighted_sum(0.5 * loss, batch), stats


def _before(values: torch.Tensor) -> torch.Tensor:
    """Shift values by one: entry t becomes that of t - 1; entry 0, in no loss mask, becomes 0."""
    return functional.pad(values[:, :-1], (1, 0))


@loss_traits(head="lm", paired=True)
def dpo_loss(
    logprobs: torch.Tensor, batch: Columns, beta: float = 0.1, loss_type: DpoLossType = "sigmoid"
) -> LossResult:
    """Compute the loss of direct preference optimisation.

    The preferred answer gains probability over the other one, relative to a reference policy.
    Sources: DPO, arXiv:2305.18290 eq. 7 (``sigmoid``); IPO, arXiv:2310.12036 eq. 17 (``ipo``), on
    the mean over an answer's tokens, so that ``beta`` does not depend on lengths; SLiC,
    arXiv:2305.10425, in the form of arXiv:2309.06657 (``hinge``).

    Args:
        logprobs: (B, T) float32 under the current weights.
        batch: ``loss_mask`` (B, T) bool, true for the tokens of the answers; ``ref_logprobs`` (B,
            T) float32 of a frozen reference model; ``pair`` (B,) int64.
        beta: Scale of the difference of log-ratios; for ``ipo`` its tau.
        loss_type: Function of that difference.

    Returns:
        The loss summed over pairs, and sums of ``chosen_reward`` and ``rejected_reward``, beta
        times the log-ratio of policy to reference summed over the answer; ``reward_margin``, their
        difference; ``accuracy``, pairs where it is positive.

    Raises:
        ValueError: The batch lacks a column, its rows are not pairs, or the type is unknown.
    """
    _require_pairs("dpo_loss", batch, "ref_logprobs")
    mask = batch["loss_mask"]
    log_ratio = (masked(logprobs, mask) - masked(batch["ref_logprobs"], mask)).sum(-1)
    chosen, rejected = log_ratio[0::2], log_ratio[1::2]
    if loss_type == "sigmoid":
        loss = -functional.logsigmoid(beta * (chosen - rejected))
    elif loss_type == "hinge":
        loss = torch.relu(1 - beta * (chosen - rejected))
    elif loss_type == "ipo":
        mean = log_ratio / mask.sum(-1).clamp(min=1)
        loss = (mean[0::2] - mean[1::2] - 1 / (2 * beta)).square()
    else:
        raise ValueError(
            f"there is no loss_type {loss_type!r}; expected 'sigmoid', 'ipo' or 'hinge'"
        )
    return loss.sum(), _reward_stats(chosen, rejected, beta)


@loss_traits(head="value", paired=True)
def reward_model_loss(values: torch.Tensor, batch: Columns, center_coef: float = 0.0) -> LossResult:
    """Compute the Bradley-Terry loss of a reward model, arXiv:2203.02155 eq. 1.

    The log-odds that an answer is preferred are the difference of the rewards. The reward of a
    sample is the value at the last token of its ``loss_mask``.

    Args:
        values: (B, T) float32 under the current weights, the outputs of a value head.
        batch: ``loss_mask`` (B, T) bool; ``pair`` (B,) int64; optionally ``margin`` (B,) float32,
            the minimum lead of the preferred reward, read from the preferred sample
            (arXiv:2307.09288 eq. 2).
        center_coef: Weight of the squared sum of a pair's rewards, which keeps rewards around 0
            (arXiv:2312.09244 section 2).

    Returns:
        The loss summed over pairs, and sums of ``chosen_reward``, ``rejected_reward``,
        ``reward_margin``, their difference, and ``accuracy``, pairs where it is positive.

    Raises:
        ValueError: The batch lacks ``pair``, its rows are not pairs, ``margin`` is per token, or a
            row has no token in its mask.
    """
    _require_pairs("reward_model_loss", batch)
    mask = batch["loss_mask"]
    if not bool(mask.any(-1).all()):
        pairs = batch[PAIR][~mask.any(-1)].tolist()
        raise ValueError(
            f"reward_model_loss: a sample of the pair(s) {pairs} has no token in its loss_mask"
        )
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(-1)
    rewards = values.gather(-1, last[:, None])[:, 0]
    chosen, rejected = rewards[0::2], rewards[1::2]
    if "margin" in batch and batch["margin"].ndim != 1:
        raise ValueError(
            "reward_model_loss takes the column 'margin' as one number per sample; it has one per "
            "token"
        )
    margin = batch["margin"][0::2].float() if "margin" in batch else 0.0
    loss = -functional.logsigmoid(chosen - rejected - margin)
    if center_coef:
        loss = loss + center_coef * (chosen + rejected).square()
    return loss.sum(), _reward_stats(chosen, rejected, 1.0)


def _require_pairs(loss: str, batch: Columns, *further: str) -> None:
    """Raise ValueError if a batch lacks a column that a loss needs, or its rows are not pairs."""
    require(loss, batch, (PAIR, *further))
    pairs = batch[PAIR]
    if len(pairs) % 2 or not torch.equal(pairs[0::2], pairs[1::2]):
        raise ValueError(
            f"{loss}: rows 2j and 2j + 1 must be of one pair, but the column {PAIR!r} is "
            f"{pairs.tolist()}"
        )


@torch.no_grad()
def _reward_stats(
    chosen: torch.Tensor, rejected: torch.Tensor, scale: float
) -> dict[str, torch.Tensor]:
    """Sum the rewards of pairs, their differences, and the pairs with a positive difference."""
    return {
        "chosen_reward": scale * chosen.sum(),
        "rejected_reward": scale * rejected.sum(),
        "reward_margin": scale * (chosen - rejected).sum(),
        "accuracy": (chosen > rejected).sum().float(),
    }
