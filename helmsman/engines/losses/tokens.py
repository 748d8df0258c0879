"""Losses of one model by itself: supervised fine-tuning, and a critic."""

from __future__ import annotations

import torch
from torch import nn

from helmsman.api.engines import loss_traits
from helmsman.engines.losses.columns import Columns, LossResult, masked, masked_sum, require, weighted_sum


@loss_traits(head="lm")
def sft_loss(logprobs: torch.Tensor, batch: Columns) -> LossResult:
    """Negative log-likelihood of the masked tokens: the cross-entropy of next-token prediction, arXiv:2203.02155 section 3.1.

    Args:
        logprobs: (B, T) float32 under the current weights.
        batch: ``loss_mask`` (B, T) bool; ``loss_weights`` (B, T) or (B,) is optional.
    """
    return weighted_sum(-masked(logprobs, batch["loss_mask"]), batch), {}


@loss_traits(head="value")
def value_loss(values: torch.Tensor, batch: Columns, clip: float | None = None) -> LossResult:
    """Half the squared distance of a critic's values to the returns; PPO, arXiv:1707.06347 eq. 9.

    The value that stands for token t is that of the tokens before it, ``values[t - 1]``: the state in which it was chosen.

    Args:
        values: (B, T) float32 under the current weights, as a value head gives them.
        batch: ``loss_mask`` (B, T) bool; ``returns`` (B, T), as helmsman.api.advantages.gae gives them, or (B,); with ``clip``
            also ``values`` (B, T), those of ``forward`` before the batch's updates; ``loss_weights`` is optional.
        clip: The larger loss counts of the value itself and of the value moved to within this distance of the old one
            (arXiv:2005.12729, section 3, optimisation 1); None: the value itself.

    Returns:
        The loss summed over tokens, and sums of ``value``; ``return``; ``value_clip_fraction`` with ``clip``, tokens whose
        gradient the clip removed.

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
    return nn.functional.pad(values[:, :-1], (1, 0))
