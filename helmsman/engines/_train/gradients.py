"""The norm of gradients that are sharded over several axes, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.nn.Parameter], limit: float | None) -> float:
    """Scale gradients down so that their global 2-norm is at most ``limit``; the same factor on every rank. A collective.

    torch's own clip_grad_norm_ does not take gradients on different meshes; those of tensor-parallel and other layers are.

    Args:
        parameters: With shards of their gradients, DTensors on any meshes of the world's ranks.
        limit: None measures only.

    Returns:
        The norm before clipping; inf or nan where a gradient is not finite, and then nothing was scaled.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    shards = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    total = torch.zeros((), dtype=torch.float64)
    if shards:
        norms = torch.stack(torch._foreach_norm(shards)).double().cpu()
        weights = torch.tensor([1.0 / _num_copies(grad) for grad in grads], dtype=torch.float64)
        total = (norms.square() * weights).sum()
    dist.all_reduce(total)
    norm = math.sqrt(total) if total >= 0 else math.nan
    if shards and limit is not None and math.isfinite(norm):
        # As torch's clip_grad_norm_ has it.
        torch._foreach_mul_(shards, min(1.0, limit / (norm + 1e-6)))
    return norm


def _num_copies(grad: torch.Tensor) -> float:
    """How many ranks of the world hold each entry of a gradient."""
    num_parts = 1
    if isinstance(grad, DTensor):
        for size, placement in zip(grad.device_mesh.shape, grad.placements, strict=True):
            if placement.is_partial():
                raise AssertionError(f"a gradient that is not reduced: {grad.placements}")
            num_parts *= 1 if placement.is_replicate() else size
    return dist.get_world_size() / num_parts
