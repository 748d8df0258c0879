"""The names and shapes that a model's tensors have in Hugging Face files.

``transformers`` keeps some tensors in another form than files do: in memory the experts of a layer
are one tensor, in a file there is one for each expert, and some names differ. vLLM, SGLang and
other programs load the form of files, and some of them skip any other name without an error. So
weights leave a trainer in that form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from helmsman.engines._models.distributed import named_tensors
from helmsman.engines._models.heads import skeleton

_LAYER = re.compile(r"^.*?\.\d+\.|^")


class Region(NamedTuple):
    """Evenly spaced elements of a contiguous tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Distances of elements, in elements."""
    start: int
    """Place of the first element."""

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return all elements of a tensor of this shape."""
        return cls(tuple(shape), torch.empty(tuple(shape), device="meta").stride(), 0)

    @property
    def end(self) -> int:
        """Place after the last element."""
        steps = zip(self.shape, self.strides, strict=True)
        return self.start + sum((size - 1) * stride for size, stride in steps) + 1

    def of(self, tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return these elements of a tensor, or of its part that begins with element ``first``."""
        return tensor.as_strided(
            self.shape, self.strides, tensor.storage_offset() + self.start - first
        )


class CheckpointNames:
    """Converts tensors of a model to the form of files.

    Args:
        model: A model of ``transformers``, possibly sharded. Only its class and configuration are
            used.
    """

    def __init__(self, model: nn.Module) -> None:
        self._skeleton = skeleton(model)
        self._tensors = tensors = named_tensors(self._skeleton)
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
        first = {id(tensor): name for name, tensor in self._tensors.items()}
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

    def regions(self, name: str) -> dict[str, Region]:
        """Return where the elements of a tensor of the model are in files, by name in files.

        Raises:
            ValueError: A tensor in files is not an evenly spaced part of one tensor of the model.
        """
        whole = self._tensors[name]
        group = self.group_of(name)
        if not group:
            return {name: Region.whole(whole.shape)}
        expected = self.convert({name: whole}) if len(group) == 1 else {}
        # Conversions hardly ever depend on the last dimension, and are cheap without it.
        for width in (1, whole.shape[-1]):
            shape = (*whole.shape[:-1], width)
            places = torch.arange(math.prod(shape))
            try:
                parts = self.convert({name: places.view(shape)}) if expected else {}
            # A conversion may need the true size, or floating-point numbers.
            except Exception:  # noqa: BLE001
                parts = {}
            regions = {
                part: _region(inside, places, expected[part].shape, whole.shape[-1] // width)
                for part, inside in parts.items()
                if part in expected
            }
            found = {part: region for part, region in regions.items() if region is not None}
            if found.keys() == expected.keys() != set():
                return found
        raise ValueError(
            f"{name} cannot be filled from one tensor of a file at a time, because its elements "
            "have another order there. Use vLLM or a server to generate with this model"
        )

    def views(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parts of a model's tensors that are tensors of their own in files, as views.

        Args:
            tensors: All tensors of the model by name, contiguous, on any device.

        Raises:
            ValueError: A tensor in files is not an evenly spaced part of one tensor of the model.
        """
        found = dict(tensors)
        for name in tensors.keys() & self._groups.keys():
            whole = found.pop(name)
            found.update({part: each.of(whole) for part, each in self.regions(name).items()})
        return found


def _region(
    inside: torch.Tensor, places: torch.Tensor, shape: Sequence[int], factor: int
) -> Region | None:
    """Return the region of ``inside``, a part of ``places``; None if it is not evenly spaced.

    ``places`` are those of a tensor whose last dimension is ``factor`` times as long. ``shape`` is
    the part's with that dimension.
    """
    start = int(inside[(0,) * inside.dim()])
    strides = [
        int(inside.select(dim, 1)[(0,) * (inside.dim() - 1)]) - start if size > 1 else 1
        for dim, size in enumerate(inside.shape)
    ]
    region = Region(tuple(inside.shape), tuple(strides), start)
    if min(strides, default=1) <= 0 or region.end > places.numel():
        return None
    if not torch.equal(inside, region.of(places)):
        return None
    if factor > 1:
        longer = [dim for dim, size in enumerate(inside.shape) if size != shape[dim]]
        if len(longer) != 1 or shape[longer[0]] != factor:
            return None
        strides = [factor * stride for stride in strides]
        strides[longer[0]] = 1
    return Region(tuple(shape), tuple(strides), factor * start)


class Conversion:
    """Converts the tensors of one transfer, in the order of their arrival.

    Args:
        names: CheckpointNames of the model whose tensors are transferred.
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
