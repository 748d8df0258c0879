"""Tensors of a model by name, and whole tensors from shards."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, or shards of them; one with several names (tied embeddings) by its first name only."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be sharded, on its device. A collective of the ranks that have a shard."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
