"""Log-probabilities from logits of which each tensor-parallel rank has its own part of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _ShardedGatherLogSoftmax(torch.autograd.Function):
    """As the function of model.py for whole logits; what the ranks exchange is two numbers per token, forward only.

    The loss is computed alike by all ranks of the group, so that each has the whole gradient of its own logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup, chunk_numel: int
    ) -> torch.Tensor:
        size = logits.shape[-1]
        own = targets - dist.get_rank(group) * size
        is_own = (own >= 0) & (own < size)
        own = own.where(is_own, 0)
        ctx.rows = rows = max(1, chunk_numel // size)
        local = torch.stack(
            [
                torch.cat([chunk.float().logsumexp(-1) for chunk in logits.split(rows)]),
                logits.gather(-1, own[:, None])[:, 0].float().where(is_own, 0.0),
            ]
        )
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, local, group=group)
        parts = torch.stack(gathered)
        normalizer = parts[:, 0].logsumexp(0)
        ctx.save_for_backward(logits, own, is_own, normalizer)
        return parts[:, 1].sum(0) - normalizer

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, own, is_own, normalizer = ctx.saved_tensors
        (grad,) = grads
        grad_logits = torch.empty_like(logits)
        columns = (logits, own, grad * is_own, normalizer, grad, grad_logits)
        for chunk, target, own_grad, norm, all_grad, out in zip(*(each.split(ctx.rows) for each in columns), strict=True):
            softmax = (chunk.float() - norm[:, None]).exp_().mul_(-all_grad[:, None])
            out.copy_(softmax.scatter_add_(-1, target[:, None], own_grad[:, None]))
        return grad_logits, None, None, None


def sharded_target_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, group: dist.ProcessGroup, chunk_numel: int = 1 << 24
) -> torch.Tensor:
    """As target_logprobs, of logits whose last axis is cut in equal parts over the ranks of a group. A collective.

    Args:
        logits: (..., V / ranks) of any floating-point type.
        targets: (...) int64, ids of the whole vocabulary; the same on all ranks of the group.
        group: The ranks that have the parts.
        chunk_numel: As target_logprobs.

    Returns:
        (...) float32, the same on all ranks; its gradient must be so too.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    picked: torch.Tensor = _ShardedGatherLogSoftmax.apply(flat, targets.reshape(-1), group, chunk_numel)  # type: ignore[no-untyped-call]
    return picked.view(targets.shape)
