"""The names and shapes that a model's tensors have in Hugging Face files.

``transformers`` keeps some tensors in another form than files do: in memory the experts of a layer
are one tensor, in a file there is one for each expert, and some names differ. vLLM, SGLang and
other programs load the form of files, and some of them skip any other name without an error. So
weights leave a trainer in that form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from helmsman.engines._models.distributed import named_tensors
from helmsman.engines._models.heads import skeleton

_LAYER = re.compile(r"^.*?\.\d+\.|^")


class CheckpointNames:
    """Converts tensors of a model to the form of files.

    Args:
        model: A model of ``transformers``, possibly sharded. Only its class and configuration are
            used.
    """

    def __init__(self, model: nn.Module) -> None:
        self._skeleton = skeleton(model)
        tensors = named_tensors(self._skeleton)
        self.shapes: dict[str, list[int]] = {
            name: list(tensor.shape) for name, tensor in self.convert(tensors).items()
        }
        """Shape of each tensor in files by name; a tensor with several names is included once."""
        self._groups: dict[str, tuple[str, ...]] = {}
        joined: dict[str, list[str]] = {}
        for name, tensor in tensors.items():
            parts = self.convert({name: tensor})
            if any(list(part.shape) != self.shapes.get(each) for each, part in parts.items()):
                layer = _LAYER.match(name)
                joined.setdefault(layer.group() if layer else "", []).append(name)
            elif parts.get(name) is not tensor:
                self._groups[name] = (name,)
        for names in joined.values():
            self._groups.update(dict.fromkeys(names, tuple(names)))

    def group_of(self, name: str) -> tuple[str, ...]:
        """Return the names that are converted together with this one; () if it stays as it is."""
        return self._groups.get(name, ())

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert one or more whole groups of full tensors, of any dtype and device."""
        return dict(revert_weight_conversion(self._skeleton, dict(tensors)))

    def aliases(self) -> dict[str, str]:
        """Return the other names of tied tensors in files, each with its name in ``shapes``."""
        state = self._skeleton.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in named_tensors(self._skeleton).items()}
        return {
            other: name
            for alias, tensor in state.items()
            if alias != first[id(tensor)]
            for other, name in zip(
                self.convert({alias: tensor}),
                self.convert({first[id(tensor)]: tensor}),
                strict=True,
            )
        }

    def views(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parts of a model's tensors that are tensors of their own in files, as views.

        Args:
            tensors: All tensors of the model by name, contiguous, on any device.

        Raises:
            ValueError: A tensor in files is not a regular part of one tensor in memory.
        """
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            group = self.group_of(name)
            if not group:
                found[name] = tensor
                continue
            places = torch.arange(tensor.numel())
            parts = self.convert({name: places.view(tensor.shape)}) if len(group) == 1 else {}
            views = {part: _view(tensor, places, inside) for part, inside in parts.items()}
            if not views or None in views.values():
                raise ValueError(
                    f"weights in the form of files cannot be copied into {name}, whose elements "
                    "have another order in files. Use vLLM or a server for this model"
                )
            found.update({part: view for part, view in views.items() if view is not None})
        return found


def _view(tensor: torch.Tensor, places: torch.Tensor, inside: torch.Tensor) -> torch.Tensor | None:
    """Return elements of a contiguous tensor as a view; None if they are not evenly spaced."""
    start = int(inside[(0,) * inside.dim()])
    strides = [
        int(inside.select(dim, 1)[(0,) * (inside.dim() - 1)]) - start if size > 1 else 1
        for dim, size in enumerate(inside.shape)
    ]
    regular = min(strides, default=1) > 0 and torch.equal(
        inside, places.as_strided(inside.shape, strides, start)
    )
    return (
        tensor.as_strided(inside.shape, strides, tensor.storage_offset() + start)
        if regular
        else None
    )


class Conversion:
    """Converts the tensors of one transfer, as they come.

    Args:
        names: Of the model whose tensors are transferred.
    """

    def __init__(self, names: CheckpointNames) -> None:
        self._names = names
        self._waiting: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the tensors in files that are complete with this one, by name."""
        group = self._names.group_of(name)
        if not group:
            return {name: tensor}
        self._waiting[name] = tensor
        if any(each not in self._waiting for each in group):
            return {}
        return self._names.convert({each: self._waiting.pop(each) for each in group})
