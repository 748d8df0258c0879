"""Log-probabilities and entropies from logits, without a float32 copy of all logits.

The computation is in float32, forward and backward. With a group, its ranks hold equal parts of the
vocabulary. All of them compute the same loss, so each has the whole gradient of its own logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_CHUNK_NUMEL = 1 << 24
"""Logits that are converted to float32 at once (64 MiB); bounds the extra memory."""


def target_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    chunk_numel: int = _CHUNK_NUMEL,
) -> torch.Tensor:
    """Compute log-probabilities of targets, differentiable in ``logits``.

    Args:
        logits: (..., V) floating point; with a group, V is this rank's equal part of the
            vocabulary.
        targets: (...) int64, ids of the whole vocabulary.
        group: Ranks that share the vocabulary; the call is then a collective, and the gradient of
            the result must be the same on all of them.
        chunk_numel: Number of logits converted to float32 at once.

    Returns:
        (...) float32.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    picked: torch.Tensor = _TargetLogprobs.apply(flat, targets.reshape(-1), group, chunk_numel)  # type: ignore[no-untyped-call]
    return picked.view(targets.shape)


def distribution_entropies(
    logits: torch.Tensor, group: dist.ProcessGroup | None = None, chunk_numel: int = _CHUNK_NUMEL
) -> torch.Tensor:
    """Compute the entropy in nats of the distribution of each row of logits.

    Arguments as in target_logprobs; logits (..., V) give entropies (...) float32.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    entropies: torch.Tensor = _Entropies.apply(flat, group, chunk_numel)  # type: ignore[no-untyped-call]
    return entropies.view(logits.shape[:-1])


def _entr(probabilities: torch.Tensor) -> torch.Tensor:
    """Compute -p log p, which is 0 at p = 0, so that a logit of -inf contributes nothing.

    torch.special.entr has no kernel for NPUs.
    """
    least = torch.finfo(probabilities.dtype).tiny
    return probabilities.clamp_min(least).log_().mul_(probabilities).neg_()


def _normalizer(logits: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([chunk.float().logsumexp(-1) for chunk in logits.split(rows)])


def _gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group=group)
    return torch.stack(parts)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        group: dist.ProcessGroup | None,
        chunk_numel: int,
    ) -> torch.Tensor:
        size = logits.shape[-1]
        ctx.rows = rows = max(1, chunk_numel // size)
        is_own = []
        if group is not None:
            targets = targets - dist.get_rank(group) * size
            is_own = [(targets >= 0) & (targets < size)]
            targets = targets.where(is_own[0], 0)
        normalizer = _normalizer(logits, rows)
        picked = logits.gather(-1, targets[:, None])[:, 0].float()
        if group is not None:
            parts = _gather(torch.stack([normalizer, picked.where(is_own[0], 0.0)]), group)
            normalizer, picked = parts[:, 0].logsumexp(0), parts[:, 1].sum(0)
        ctx.save_for_backward(logits, targets, normalizer, *is_own)
        return picked - normalizer

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, targets, normalizer, *is_own = ctx.saved_tensors
        (grad,) = grads
        own_grad = grad * is_own[0] if is_own else grad
        grad_logits = torch.empty_like(logits)
        columns = (logits, targets, own_grad, normalizer, grad, grad_logits)
        for chunk, target, own_chunk, norm, all_chunk, out in zip(
            *(each.split(ctx.rows) for each in columns), strict=True
        ):
            softmax = (chunk.float() - norm[:, None]).exp_().mul_(-all_chunk[:, None])
            out.copy_(softmax.scatter_add_(-1, target[:, None], own_chunk[:, None]))
        return grad_logits, None, None, None


class _Entropies(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, group: dist.ProcessGroup | None, chunk_numel: int
    ) -> torch.Tensor:
        ctx.rows = rows = max(1, chunk_numel // logits.shape[-1])
        normalizer = _normalizer(logits, rows)
        if group is not None:
            normalizer = _gather(normalizer, group).logsumexp(0)
        pieces = zip(logits.split(rows), normalizer.split(rows), strict=True)
        entropies = torch.cat(
            [_entr((chunk.float() - norm[:, None]).exp_()).sum(-1) for chunk, norm in pieces]
        )
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
        for chunk, norm, entropy, grad_chunk, out in zip(
            *(each.split(ctx.rows) for each in columns), strict=True
        ):
            # dH / dz = -p (log p + H)
            probabilities = (chunk.float() - norm[:, None]).exp_()
            slope = _entr(probabilities).sub_(probabilities.mul_(entropy[:, None]))
            out.copy_(slope.mul_(grad_chunk[:, None]))
        return grad_logits, None, None
