"""Losses on given answers: supervised fine-tuning and critics; and on pairs of answers, the
preferred one first: DPO for policies, Bradley-Terry for reward models.

Sums over pairs are divided by the pairs of the global batch. See helmsman.api.pairs for how samples
say so.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch.nn import functional

from helmsman.api.engines import loss_traits
from helmsman.api.pairs import PAIR
from helmsman.engines.losses.columns import (
    Columns,
    LossResult,
    masked,
    masked_sum,
    require,
    weighted_sum,
)

DpoLossType: TypeAlias = Literal["sigmoid", "ipo", "hinge"]


@loss_traits(head="lm")
def sft_loss(logprobs: torch.Tensor, batch: Columns) -> LossResult:
    """Negative log-likelihood of the masked tokens: the cross-entropy of next-token prediction,
    arXiv:2203.02155 section 3.1.

    Args:
        logprobs: (B, T) float32 under the current weights.
        batch: ``loss_mask`` (B, T) bool; ``loss_weights`` (B, T) or (B,) is optional.
    """
    return weighted_sum(-masked(logprobs, batch["loss_mask"]), batch), {}


@loss_traits(head="value")
def value_loss(values: torch.Tensor, batch: Columns, clip: float | None = None) -> LossResult:
    """Half the squared distance of a critic's values to the returns; PPO, arXiv:1707.06347 eq. 9.

    The value that stands for token t is that of the tokens before it, ``values[t - 1]``: the state
    in which it was chosen.

    Args:
        values: (B, T) float32 under the current weights, as a value head gives them.
        batch: ``loss_mask`` (B, T) bool; ``returns`` (B, T), as helmsman.api.advantages.gae gives
            them, or (B,); with ``clip`` also ``values`` (B, T), those of ``forward`` before the
            batch's updates; ``loss_weights`` is optional.
        clip: The larger loss counts of the value itself and of the value moved to within this
            distance of the old one (arXiv:2005.12729, section 3, optimisation 1); None: the value
            itself.

    Returns:
        The loss summed over tokens, and sums of ``value``; ``return``; ``value_clip_fraction`` with
        ``clip``, tokens whose gradient the clip removed.

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
        # Outside of the clip the near end of its range has no gradient.
        clipped = (torch.clamp(current, old - clip, old + clip) - returns).square()
        stats["value_clip_fraction"] = masked_sum(clipped > loss, mask).float()
        loss = torch.maximum(loss, clipped)
    return weighted_sum(0.5 * loss, batch), stats


def _before(values: torch.Tensor) -> torch.Tensor:
    """Entry t becomes that of t - 1; entry 0, which no loss mask has, 0."""
    return functional.pad(values[:, :-1], (1, 0))


@loss_traits(head="lm", paired=True)
def dpo_loss(
    logprobs: torch.Tensor, batch: Columns, beta: float = 0.1, loss_type: DpoLossType = "sigmoid"
) -> LossResult:
    """Direct preference optimisation: the preferred answer gains probability over the other,
    relative to a reference policy.

    Sources: DPO, arXiv:2305.18290 eq. 7 (``sigmoid``); IPO, arXiv:2310.12036 eq. 17 (``ipo``), of
    the mean over an answer's tokens, so that ``beta`` does not depend on lengths; SLiC,
    arXiv:2305.10425, as arXiv:2309.06657 writes it (``hinge``).

    Args:
        logprobs: (B, T) float32 under the current weights.
        batch: ``loss_mask`` (B, T) bool, true for the tokens of the answers; ``ref_logprobs`` (B,
            T), those of a frozen reference model; ``pair`` (B,).
        beta: How much a difference of log-ratios counts; for ``ipo`` its tau.
        loss_type: The function of the difference.

    Returns:
        The loss summed over pairs, and sums of ``chosen_reward`` and ``rejected_reward``, beta
        times the log-ratio of policy to reference summed over the answer; ``reward_margin``, their
        difference; ``accuracy``, pairs where it is positive.

    Raises:
        ValueError: The batch lacks a column, its rows are no pairs, or there is no such type.
    """
    require("dpo_loss", batch, (PAIR, "ref_logprobs"))
    _check_pairs("dpo_loss", batch)
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
    with torch.no_grad():
        stats = {
            "chosen_reward": beta * chosen.sum(),
            "rejected_reward": beta * rejected.sum(),
            "reward_margin": beta * (chosen - rejected).sum(),
            "accuracy": (chosen > rejected).sum().float(),
        }
    return loss.sum(), stats


@loss_traits(head="value", paired=True)
def reward_model_loss(values: torch.Tensor, batch: Columns, center_coef: float = 0.0) -> LossResult:
    """Bradley-Terry: the log-odds of an answer being preferred are the difference of the rewards;
    arXiv:2203.02155 eq. 1.

    The reward of a sample is the value at the last token of its ``loss_mask``.

    Args:
        values: (B, T) float32 under the current weights, as a value head gives them.
        batch: ``loss_mask`` (B, T) bool; ``pair`` (B,); optionally ``margin`` (B,), by how much the
            preferred reward should be ahead, that of the preferred sample counting
            (arXiv:2307.09288 eq. 2).
        center_coef: Weight of the squared sum of a pair's rewards, which keeps rewards around 0
            (arXiv:2312.09244 section 2).

    Returns:
        The loss summed over pairs, and sums of ``chosen_reward``, ``rejected_reward``,
        ``reward_margin``, their difference, and ``accuracy``, pairs where it is positive.

    Raises:
        ValueError: The batch lacks ``pair``, its rows are no pairs, or a row has no token in its
            mask.
    """
    require("reward_model_loss", batch, (PAIR,))
    _check_pairs("reward_model_loss", batch)
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
    with torch.no_grad():
        stats = {
            "chosen_reward": chosen.sum(),
            "rejected_reward": rejected.sum(),
            "reward_margin": (chosen - rejected).sum(),
            "accuracy": (chosen > rejected).sum().float(),
        }
    return loss.sum(), stats


def _check_pairs(loss: str, batch: Columns) -> None:
    pairs = batch[PAIR]
    if len(pairs) % 2 or not torch.equal(pairs[0::2], pairs[1::2]):
        raise ValueError(
            f"{loss}: rows 2j and 2j + 1 must be of one pair, but the column {PAIR!r} is "
            f"{pairs.tolist()}"
        )
