"""Log-probabilities and entropies of tokens, from hidden states or from logits.

Logits are computed for a chunk of rows at a time. Those of a large batch are computed again in the
backward pass, so that they are never held all at once. The arithmetic after them is in float32.
With a group, its ranks hold equal parts of the vocabulary. All of them compute the same loss, so
each has the whole gradient of its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import linear

_CHUNK_NUMEL = 1 << 24
"""Logits of a chunk (64 MiB in float32), which bound the memory besides the gradients."""
_KEPT_NUMEL = 1 << 27
"""Maximum logits of a batch that are kept for the backward pass rather than computed again (256 MiB
in bfloat16).
"""


class OutputLayer(NamedTuple):
    """The layer from hidden states to logits."""

    weight: torch.Tensor
    """(V, H), or this rank's rows of it."""
    bias: torch.Tensor | None = None
    """(V)."""
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The model's operation on logits (N, V), element by element, such as a soft cap."""


class TokenStatistics(NamedTuple):
    """Statistics of tokens, float32 and differentiable."""

    logprobs: torch.Tensor
    """Log-probability of each target, in the shape of the targets."""
    entropies: torch.Tensor | None
    """(...), entropy in nats of the distribution from which each target is predicted."""


class TopChoices(NamedTuple):
    """The k most probable ids of each distribution, the first one first; without gradients."""

    ids: torch.Tensor
    """(..., k) int64, ids of the whole vocabulary."""
    logprobs: torch.Tensor
    """(..., k) float32."""


def token_statistics(
    inputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    layer: OutputLayer | None = None,
    group: dist.ProcessGroup | None = None,
    with_entropies: bool = False,
    chunk_numel: int = _CHUNK_NUMEL,
) -> TokenStatistics:
    """Compute the log-probability of each target, and the entropy of its distribution.

    Args:
        inputs: (..., H) hidden states; without a layer (..., V) logits. Floating point.
        targets: (...), or several of each distribution (..., M), int64 ids of the whole vocabulary.
        layer: The output layer, which is applied here.
        group: Ranks that share the vocabulary, in equal parts; the call and its backward pass are
            then collectives, and the gradients of the results must be the same on all of them.
        with_entropies: Whether entropies are also computed.
        chunk_numel: Maximum logits that are computed at once.

    Returns:
        The statistics; entropies are None unless asked for.
    """
    weight, bias, transform = (None, None, None) if layer is None else layer
    size = inputs.shape[-1] if weight is None else len(weight)
    how = _How(transform, group, max(1, chunk_numel // size), with_entropies)
    flat = inputs.reshape(-1, inputs.shape[-1])
    columns = targets.reshape(len(flat), -1)
    logprobs, entropies = _TokenStatistics.apply(flat, weight, bias, columns, how)  # type: ignore[no-untyped-call]
    shape = inputs.shape[:-1]
    return TokenStatistics(
        logprobs.view(targets.shape), entropies.view(shape) if with_entropies else None
    )


@torch.no_grad()
def top_choices(
    inputs: torch.Tensor,
    num_choices: int,
    num_ids: int,
    *,
    layer: OutputLayer | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_numel: int = _CHUNK_NUMEL,
) -> TopChoices:
    """Find the most probable ids of each distribution, and their log-probabilities.

    Args:
        inputs: (..., H) hidden states; without a layer (..., V) logits. Floating point.
        num_choices: Number of ids, k; at most the size of the vocabulary and ``num_ids``.
        num_ids: Only ids below this are chosen; the others keep their share of the probability.
        layer: The output layer, which is applied here.
        group: Ranks that share the vocabulary, in equal parts; the call is then a collective.
        chunk_numel: Maximum logits that are computed at once.

    Returns:
        The choices.
    """
    weight, bias, transform = (None, None, None) if layer is None else layer
    size = inputs.shape[-1] if weight is None else len(weight)
    first = 0 if group is None else dist.get_rank(group) * size
    is_left_out = torch.arange(first, first + size, device=inputs.device) >= num_ids
    chunks = []
    for rows in inputs.reshape(-1, inputs.shape[-1]).split(max(1, chunk_numel // size)):
        logits = rows if weight is None else linear(rows, weight, bias)
        logits = (logits if transform is None else transform(logits)).float()
        best = logits.masked_fill(is_left_out, -torch.inf).topk(min(num_choices, size))
        chunks.append((logits.logsumexp(-1, keepdim=True), best.values, best.indices + first))
    normalizers, values, ids = (torch.cat(each) for each in zip(*chunks, strict=True))
    if group is not None:
        normalizers = _gather(normalizers, group).logsumexp(0)
        values, ids = (_gather(each, group).movedim(0, 1).flatten(1) for each in (values, ids))
        values, places = values.topk(num_choices)
        ids = ids.gather(-1, places)
    shape = (*inputs.shape[:-1], num_choices)
    return TopChoices(ids.view(shape), (values - normalizers).view(shape))


class _How(NamedTuple):
    transform: Callable[[torch.Tensor], torch.Tensor] | None
    group: dist.ProcessGroup | None
    num_rows: int
    with_entropies: bool


def _entr(probabilities: torch.Tensor) -> torch.Tensor:
    """Compute -p log p, which is 0 at p = 0, so that a logit of -inf contributes nothing.

    torch.special.entr has no kernel for NPUs.
    """
    least = torch.finfo(probabilities.dtype).tiny
    return probabilities.clamp_min(least).log_().mul_(probabilities).neg_()


def _gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group=group)
    return torch.stack(parts)


def _of_rows(logits: torch.Tensor, targets: torch.Tensor, how: _How) -> torch.Tensor:
    """Return (N, 2 + M) of logits (N, V): normalizers, entropies or 0, logits of the targets."""
    if how.transform is not None:
        logits = how.transform(logits)
    logits = logits.float()
    normalizers = logits.logsumexp(-1)
    picked = logits.gather(-1, targets)
    entropies = torch.zeros_like(normalizers)
    if how.with_entropies:
        entropies = _entr((logits - normalizers[:, None]).exp_()).sum(-1)
    return torch.cat([normalizers[:, None], entropies[:, None], picked], dim=-1)


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        how: _How,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        is_own = torch.ones_like(targets, dtype=torch.bool)
        if how.group is not None:
            size = inputs.shape[-1] if weight is None else len(weight)
            targets = targets - dist.get_rank(how.group) * size
            is_own = (targets >= 0) & (targets < size)
            targets = targets.where(is_own, 0)
        keeps = weight is not None and len(inputs) * len(weight) <= _KEPT_NUMEL
        chunks, kept = [], []
        for rows, chosen in zip(
            inputs.split(how.num_rows), targets.split(how.num_rows), strict=True
        ):
            logits = rows if weight is None else linear(rows, weight, bias)
            chunks.append(_of_rows(logits, chosen, how))
            kept.append(logits if keeps else None)
        whole = torch.cat(chunks)
        normalizers, entropies, picked = whole[:, 0], whole[:, 1], whole[:, 2:]
        if how.group is not None:
            own = torch.cat([whole[:, :2], picked.where(is_own, 0.0)], dim=-1)
            parts = _gather(own, how.group)
            normalizers, picked = parts[..., 0].logsumexp(0), parts[..., 2:].sum(0)
            shares = (parts[..., 0] - normalizers).exp()
            entropies = (shares * parts[..., 1] + _entr(shares)).sum(0)
        ctx.how, ctx.kept = how, kept
        ctx.save_for_backward(inputs, weight, bias, targets, is_own, normalizers, entropies)
        return picked - normalizers[:, None], entropies.clone()

    @staticmethod
    def backward(
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, None, None]:
        inputs, weight, bias, targets, is_own, *columns = ctx.saved_tensors
        how: _How = ctx.how
        grad_inputs = torch.empty_like(inputs)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        # Sums over many chunks lose digits in bfloat16.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        split = (
            each.split(how.num_rows)
            for each in (inputs, targets, is_own, *columns, *grads, grad_inputs)
        )
        for logits, rows, chosen, own, *numbers, grad_rows in zip(ctx.kept, *split, strict=True):
            if logits is None:
                logits = rows if weight is None else linear(rows, weight, bias)
            slope = _slope(logits, chosen, own, numbers, how).to(rows.dtype)
            if weight is None:
                grad_rows.copy_(slope)
                continue
            grad_rows.copy_(slope @ weight)
            if grad_weight is not None:
                if rows.dtype == torch.float32:
                    grad_weight.addmm_(slope.t(), rows)
                else:
                    grad_weight += slope.t() @ rows
            if grad_bias is not None:
                grad_bias += slope.sum(0, dtype=torch.float32)
        if weight is not None and how.group is not None:
            dist.all_reduce(grad_inputs, group=how.group)
        return (
            grad_inputs,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _slope(
    logits: torch.Tensor,
    targets: torch.Tensor,
    is_own: torch.Tensor,
    numbers: Sequence[torch.Tensor],
    how: _How,
) -> torch.Tensor:
    """Return the gradient (N, V) of logits.

    ``numbers`` are normalizers (N,), entropies (N,), and the gradients of log-probabilities (N, M)
    and of entropies (N,).
    """
    normalizers, entropies, grad_entropies = (numbers[each][:, None] for each in (0, 1, 3))
    grad = numbers[2]
    total = grad.sum(-1, keepdim=True)
    transformed = logits
    if how.transform is not None:
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            transformed = how.transform(logits)
    probabilities = (transformed.detach() - normalizers).exp_()  # float32, as the normalizers are
    if how.with_entropies:
        # dH / dz = -p (log p + H)
        slope = _entr(probabilities).sub_(probabilities * entropies).mul_(grad_entropies)
        slope.sub_(probabilities.mul_(total))
    else:
        slope = probabilities.mul_(-total)
    slope.scatter_add_(-1, targets, grad * is_own)
    if how.transform is None:
        return slope
    (through,) = torch.autograd.grad(transformed, logits, slope.to(transformed.dtype))
    return through
