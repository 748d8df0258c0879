"""Entropies of the distributions that tokens are drawn from."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _ChunkedEntropy(torch.autograd.Function):
    """Entropy of ``softmax(logits[i])`` in float32 without a float32 copy of all logits, forward or backward.

    The ranks of a group, if there is one, have equal parts of the vocabulary. The loss is computed alike by all of them, so
    that each has the whole gradient of its own logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: dist.ProcessGroup | None, chunk_numel: int) -> torch.Tensor:
        ctx.rows = rows = max(1, chunk_numel // logits.shape[-1])
        normalizer = torch.cat([chunk.float().logsumexp(-1) for chunk in logits.split(rows)])
        if group is not None:
            parts = [torch.empty_like(normalizer) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, normalizer, group=group)
            normalizer = torch.stack(parts).logsumexp(0)
        pieces = zip(logits.split(rows), normalizer.split(rows), strict=True)
        # entr(p) = -p log p is 0 at p = 0, so that a logit of -inf counts for nothing.
        entropies = torch.cat([torch.special.entr((chunk.float() - norm[:, None]).exp()).sum(-1) for chunk, norm in pieces])
        if group is not None:
            dist.all_reduce(entropies, group=group)
        ctx.save_for_backward(logits, normalizer, entropies)
        return entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, normalizer, entropies = ctx.saved_tensors
        (grad,) = grads
        grad_logits = torch.empty_like(logits)
        columns = (logits, normalizer, entropies, grad, grad_logits)
        for chunk, norm, entropy, grad_chunk, out in zip(*(each.split(ctx.rows) for each in columns), strict=True):
            # dH / dz = -p (log p + H)
            probabilities = (chunk.float() - norm[:, None]).exp_()
            slope = torch.special.entr(probabilities).sub_(probabilities.mul_(entropy[:, None]))
            out.copy_(slope.mul_(grad_chunk[:, None]))
        return grad_logits, None, None


def distribution_entropies(
    logits: torch.Tensor, group: dist.ProcessGroup | None = None, chunk_numel: int = 1 << 24
) -> torch.Tensor:
    """Entropy of the distribution that each row of logits makes, in nats.

    Args:
        logits: (..., V) of any floating-point type.
        group: The ranks that have equal parts of the vocabulary, (..., V / ranks) each; None: this one has all of it.
        chunk_numel: Logits that are turned to float32 at once; bounds the extra memory.

    Returns:
        (...) float32, differentiable in ``logits``; with a group the same on all its ranks, as its gradient must be.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    entropies: torch.Tensor = _ChunkedEntropy.apply(flat, group, chunk_numel)  # type: ignore[no-untyped-call]
    return entropies.view(logits.shape[:-1])
