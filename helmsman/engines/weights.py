"""Putting weights that came from a train engine into a rollout model, in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


@torch.no_grad()
def apply_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy weights into a model, converting type and device; nothing changes unless every name and shape fits.

    Args:
        model: The model; its parameters stay the same tensors.
        weights: All parameters and persistent buffers by Hugging Face name. Of a tensor that has several names (tied
            embeddings) any one is enough.

    Raises:
        ValueError: Names are missing or unexpected, or a shape differs.
    """
    targets: dict[int, torch.Tensor] = {}
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        targets[id(tensor)] = tensor
        names.setdefault(id(tensor), []).append(name)
    sources = {key: weights[given[0]] for key, aliases in names.items() if (given := [a for a in aliases if a in weights])}
    known = {name for aliases in names.values() for name in aliases}
    problems = {
        "missing": [aliases[0] for key, aliases in names.items() if key not in sources],
        "unexpected": [name for name in weights if name not in known],
        "of another shape": [
            f"{names[key][0]} {tuple(source.shape)} for {tuple(targets[key].shape)}"
            for key, source in sources.items()
            if source.shape != targets[key].shape
        ],
    }
    found = [f"{len(items)} {problem}: {', '.join(items[:4])}" for problem, items in problems.items() if items]
    if found:
        raise ValueError(f"the weights do not fit the rollout model, which was left as it is. {'; '.join(found)}")
    for key, source in sources.items():
        targets[key].copy_(source)
