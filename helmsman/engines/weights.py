"""In-place updates of a rollout model with weights from a training engine."""

from __future__ import annotations

import torch
from torch import nn

from helmsman.engines._weights.checkpoint_names import CheckpointNames
from helmsman.engines._weights.fit import form_in_files, form_of, require_fit
from helmsman.engines.weight_transfer import Incoming


class PartialWeightUpdateError(RuntimeError):
    """Some parameters have new values and others have old ones."""


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
def apply_weights(model: nn.Module, weights: Incoming) -> None:
    """Copy weights into a model in place, converting dtype and device.

    Nothing changes unless every name and shape fits.

    Args:
        model: The model; its parameters stay the same tensor objects.
        weights: All parameters and persistent buffers, of any dtype and device, by their names
            either in Hugging Face files or in the model. A tensor with several names (tied
            embeddings) may come under any one of them.

    Raises:
        ValueError: Names are missing or unexpected, or a shape differs. The model is unchanged.
        PartialWeightUpdateError: The update failed after the first parameter had changed.
        Exception: Any error of the transfer before that, unchanged.
    """
    targets: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
    forms = [form_of(targets)]
    if not targets.keys() >= weights.shapes.keys():
        in_files = CheckpointNames(model)
        forms.insert(0, form_in_files(in_files))
        targets.update(in_files.views(targets))
    require_fit(forms, weights.shapes)
    is_torn = False
    try:
        for bucket in weights:
            is_torn = True
            for name, tensor in bucket.items():
                targets[name].copy_(tensor)
    except Exception as error:
        if is_torn:
            raise partial_update(error) from error
        raise
