"""In-place updates of a rollout model with weights from a training engine."""

from __future__ import annotations

import torch
from torch import nn

from helmsman.engines._models.adapter_files import is_adapter_in_files, place_of
from helmsman.engines._models.adapter_layers import (
    PARTS,
    AdapterSwitch,
    adaptable_layers,
    attach,
    detach_all,
    is_adapter,
    matrix_sizes,
)
from helmsman.engines._weights.checkpoint_names import CheckpointNames
from helmsman.engines._weights.fit import form_in_files, form_of, require_fit
from helmsman.engines.weight_transfer import Incoming


class PartialWeightUpdateError(RuntimeError):
    """Some parameters have new values and others have old ones."""


def require_base(*, is_whole: bool, is_random: bool = False) -> None:
    """Refuse an adapter that has arrived at an instance without the weights below it.

    Args:
        is_whole: Whether the instance has all weights of the base model.
        is_random: Whether they are random.

    Raises:
        RuntimeError: The weights are gone.
        ValueError: They are random.
    """
    if not is_whole:
        raise RuntimeError(
            "a trained adapter arrived, but the base model's weights are gone (sleep at level 2, "
            "or a failed update); sleep at level 1, or send the whole model "
            "(WeightFormat.adapters False)"
        )
    if is_random:
        raise ValueError(
            "a trained adapter arrived, but the base model's weights are random (load_format "
            "'dummy'); load them from the folder (load_format 'auto'), or send the whole model "
            "(WeightFormat.adapters False)"
        )


def partial_update(cause: Exception | str) -> PartialWeightUpdateError:
    """Build the error for an update that failed after it changed the first parameter.

    Args:
        cause: The exception or a description of the failure.

    Returns:
        The error, for the caller to raise.
    """
    said = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
    return PartialWeightUpdateError(
        f"the weights were updated only in part: {said}. The instance generates nothing until an "
        "update succeeds."
    )


@torch.no_grad()
def apply_weights(model: nn.Module, weights: Incoming, *, is_whole: bool = True) -> None:
    """Copy weights into a model in place, converting dtype and device.

    Nothing changes unless every name and shape fits. An adapter replaces an earlier one; a whole
    model has none.

    Args:
        model: The model; its parameters stay the same tensor objects.
        weights: All parameters and persistent buffers, of any dtype and device, by their names
            either in Hugging Face files or in the model. A tensor with several names (tied
            embeddings) may come under any one of them. Or an adapter, by its names in PEFT's files.
        is_whole: Whether the model has all of its weights, which an adapter needs.

    Raises:
        ValueError: Names are missing or unexpected, or a shape differs. The model is unchanged.
        PartialWeightUpdateError: The update failed after the first parameter had changed.
        RuntimeError: An adapter arrived, and the model is not whole.
        Exception: Any error of the transfer before that, unchanged.
    """
    if is_adapter_in_files(weights.shapes):
        require_base(is_whole=is_whole)
        _apply_adapter(model, weights)
        return
    targets: dict[str, torch.Tensor] = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not is_adapter(name)
    }
    forms = [form_of(targets)]
    if not targets.keys() >= weights.shapes.keys():
        in_files = CheckpointNames(model)
        forms.insert(0, form_in_files(in_files))
        targets.update(in_files.views(targets))
    require_fit(forms, weights.shapes)
    is_torn = False
    try:
        for bucket in weights:
            if not is_torn:
                detach_all(model)
            is_torn = True
            for name, tensor in bucket.items():
                targets[name].copy_(tensor)
    except Exception as error:
        if is_torn:
            raise partial_update(error) from error
        raise


def _apply_adapter(model: nn.Module, weights: Incoming) -> None:
    adapted = adaptable_layers(model)
    layers: dict[str, dict[str, str]] = {}
    for name, shape in weights.shapes.items():
        layer, part = place_of(name)
        sizes = matrix_sizes(adapted[layer], layer) if layer in adapted else (0, 0, 0)
        if shape[part == PARTS[0]] != sizes[2 if part == PARTS[0] else 1]:
            raise ValueError(
                f"the adapter does not fit the rollout model, which is unchanged: {name} has the "
                f"shape {tuple(shape)}, and {layer} of the model "
                + (f"{sizes[1:]}" if sizes[0] else "is no linear layer")
            )
        layers.setdefault(layer, {})[part] = name
    if lone := [layer for layer, parts in layers.items() if len(parts) < len(PARTS)]:
        raise ValueError(f"the adapter has only one matrix for {lone[0]}, expected A and B")
    received = {name: tensor.clone() for bucket in weights for name, tensor in bucket.items()}
    detach_all(model)
    for layer, parts in layers.items():
        like = next(adapted[layer].parameters())
        own = {
            part: nn.Parameter(received[name].to(like.device, like.dtype), requires_grad=False)
            for part, name in parts.items()
        }
        attach(adapted[layer], layer, own, AdapterSwitch(scale=1.0))
