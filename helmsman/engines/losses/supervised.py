"""Supervised fine-tuning."""

from __future__ import annotations

import torch

from helmsman.api.engines import loss_traits
from helmsman.engines.losses.columns import Columns, LossResult, masked, weighted_sum


@loss_traits(head="lm")
def sft_loss(logprobs: torch.Tensor, batch: Columns) -> LossResult:
    """Negative log-likelihood of the masked tokens: the cross-entropy of next-token prediction, arXiv:2203.02155 section 3.1.

    Args:
        logprobs: (B, T) float32 under the current weights.
        batch: ``loss_mask`` (B, T) bool; ``loss_weights`` (B, T) or (B,) is optional.
    """
    return weighted_sum(-masked(logprobs, batch["loss_mask"]), batch), {}
