"""Entropies of the distributions that tokens are drawn from."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _ChunkedEntropy(torch.autograd.Function):
    """Entropy of ``softmax(logits[i])`` in float32 without a float32 copy of all logits, forward or backward."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, chunk_numel: int) -> torch.Tensor:
        ctx.rows = rows = max(1, chunk_numel // logits.shape[-1])
        # entr(p) = -p log p is 0 at p = 0, so that a logit of -inf counts for nothing.
        entropies = torch.cat([torch.special.entr(chunk.float().softmax(-1)).sum(-1) for chunk in logits.split(rows)])
        ctx.save_for_backward(logits, entropies)
        return entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, entropies = ctx.saved_tensors
        (grad,) = grads
        grad_logits = torch.empty_like(logits)
        for chunk, entropy, grad_chunk, out in zip(
            *(tensor.split(ctx.rows) for tensor in (logits, entropies, grad, grad_logits)), strict=True
        ):
            # dH / dz = -p (log p + H)
            probabilities = chunk.float().softmax(-1)
            slope = torch.special.entr(probabilities).sub_(probabilities.mul_(entropy[:, None]))
            out.copy_(slope.mul_(grad_chunk[:, None]))
        return grad_logits, None


def token_entropies(logits: torch.Tensor, chunk_numel: int = 1 << 24) -> torch.Tensor:
    """Entropy of the distribution that each token is drawn from, in nats.

    Args:
        logits: (B, T, V) of any floating-point type; entry t predicts token t + 1.
        chunk_numel: Logits that are turned to float32 at once; bounds the extra memory.

    Returns:
        (B, T) float32, differentiable in ``logits``; entry 0 of each row, which nothing predicts, is 0.
    """
    batch, length, vocab = logits.shape
    entropies: torch.Tensor = _ChunkedEntropy.apply(logits.reshape(-1, vocab), chunk_numel)  # type: ignore[no-untyped-call]
    return nn.functional.pad(entropies.view(batch, length)[:, :-1], (1, 0))
