"""Putting weights that came from a train engine into a rollout model, in place."""

from __future__ import annotations

import torch
from torch import nn

from helmsman.engines.weight_transfer import Incoming


class PartialWeightUpdateError(RuntimeError):
    """Some parameters have new values and others have not."""


@torch.no_grad()
def apply_weights(model: nn.Module, weights: Incoming) -> None:
    """Copy weights into a model, converting type and device; nothing changes unless every name and shape fits.

    Args:
        model: The model; its parameters stay the same tensors.
        weights: All parameters and persistent buffers by Hugging Face name. Of a tensor that has several names (tied
            embeddings) any one is enough.

    Raises:
        ValueError: Names are missing or unexpected, or a shape differs.
        PartialWeightUpdateError: Something went wrong once the first parameter had been changed.
        Exception: What went wrong before.
    """
    targets: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
    _require_fit(targets, weights)
    is_torn = False
    try:
        for bucket in weights:
            is_torn = True
            for name, tensor in bucket.items():
                targets[name].copy_(tensor)
    except Exception as error:
        if is_torn:
            raise PartialWeightUpdateError(
                f"the weights were exchanged in part: {type(error).__name__}: {error}. Nothing is decoded by them until an "
                "update is completed."
            ) from error
        raise


def _require_fit(targets: dict[str, torch.Tensor], weights: Incoming) -> None:
    names: dict[int, list[str]] = {}
    for name, tensor in targets.items():
        names.setdefault(id(tensor), []).append(name)
    problems = {
        "missing": [aliases[0] for aliases in names.values() if not any(alias in weights.shapes for alias in aliases)],
        "unexpected": [name for name in weights.shapes if name not in targets],
        "of another shape": [
            f"{name} {tuple(shape)} for {tuple(targets[name].shape)}"
            for name, shape in weights.shapes.items()
            if name in targets and tuple(shape) != tuple(targets[name].shape)
        ],
    }
    found = [f"{len(items)} {problem}: {', '.join(items[:4])}" for problem, items in problems.items() if items]
    if found:
        raise ValueError(f"the weights do not fit the rollout model, which was left as it is. {'; '.join(found)}")
