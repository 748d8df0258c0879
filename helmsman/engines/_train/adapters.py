"""The adapters of a model in training, which is frozen but for them (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch
from torch import nn

from helmsman.engines._models.adapter_files import Adapter, read_adapter, wrapped_names
from helmsman.engines._models.adapter_layers import (
    PARTS,
    AdapterSwitch,
    adaptable_layers,
    adapted_tensor,
    add_adapter,
    attach,
    is_adapter,
    matrix_sizes,
    meant_experts,
    targets_of,
)
from helmsman.engines._models.model import resolve_dtype, seeded
from helmsman.engines._weights.gathering import type_in
from helmsman.engines._weights.sending import Gather
from helmsman.engines.train_config import LoRA


class Adapters:
    """The adapters of a model, which is frozen but for them.

    Args:
        model: The frozen model before it is sharded, on the host or on ``meta``.
        config: Rank, scale, targets and initial values.
        seed: Seed of the initial values of A; those of B are 0.

    Raises:
        ValueError: A target is no linear layer of the model, or the initial adapter is not for
            this model.
    """

    def __init__(self, model: nn.Module, config: LoRA, seed: int) -> None:
        given: Mapping[str, torch.Tensor] = {}
        if config.path:
            self.form, given = _in_places(*read_adapter(config.path), model)
        else:
            layers = targets_of(model, config.targets)
            self.form = Adapter(rank=config.rank, alpha=config.alpha, layers=layers)
        self._switch = AdapterSwitch(self.form.scale, config.dropout)
        self._values: dict[str, torch.Tensor] = {}
        self._layers = adaptable_layers(model)
        with seeded(seed):
            for name in self.form.layers:
                if (layer := self._layers.get(name)) is None:
                    raise ValueError(
                        f"the adapter has {name}, which is no linear layer of "
                        f"{type(model).__name__} besides its output layer: it belongs to another "
                        "model, or has to be merged into its base (merge_and_unload)"
                    )
                if config.dropout and not isinstance(layer, nn.Linear):
                    raise ValueError(
                        f"lora.dropout is {config.dropout}, and the adapters include "
                        f"{adapted_tensor(name)}, the matrices of experts, to whose inputs it "
                        "cannot be applied; expected 0"
                    )
                self._add(layer, name, resolve_dtype(config.dtype), given)

    def _add(
        self, layer: nn.Module, name: str, dtype: torch.dtype, given: Mapping[str, torch.Tensor]
    ) -> None:
        num, num_out, num_in = matrix_sizes(layer, name)
        shapes = (self.form.rank * num, num_in), (num_out, self.form.rank * num)
        parts: dict[str, nn.Parameter] = {}
        for part, shape in zip(PARTS, shapes, strict=True):
            drawn = torch.zeros(shape)
            if part == "lora_A":
                nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))  # as PEFT draws it
            value = given.get(f"{name}.{part}", drawn)
            if tuple(value.shape) != shape:
                raise ValueError(
                    f"{name}.{part} of the adapter has the shape {tuple(value.shape)}, expected "
                    f"{shape}: it belongs to another model"
                )
            self._values[f"{name}.{part}"] = value.to(dtype)
            device = next(layer.parameters()).device
            parts[part] = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        attach(layer, name, parts, self._switch)

    def take_values(self) -> dict[str, torch.Tensor]:
        """Return the initial values on the host, by the parameters' names; once."""
        values, self._values = self._values, {}
        return values

    def select(self, tensors: Mapping[str, torch.Tensor], *, base: bool) -> dict[str, torch.Tensor]:
        """Return those of a model's tensors that are adapters, or the base model's."""
        return {name: each for name, each in tensors.items() if is_adapter(name) is not base}

    def scaled(self, tensors: Mapping[str, torch.Tensor], gather: Gather) -> Gather:
        """Return a ``gather`` of adapters that multiplies each B by the scale.

        What it returns computes W x + B (A x), so that receivers need not know the scale.
        """
        factors = {
            id(tensor): self.form.scale if name.endswith(PARTS[1]) else 1.0
            for name, tensor in tensors.items()
        }

        def scaled(
            wanted: Sequence[torch.Tensor], dtype: torch.dtype | None
        ) -> Iterator[torch.Tensor]:
            wholes = gather(wanted, dtype)
            return (whole * factors[id(each)] for each, whole in zip(wanted, wholes, strict=True))

        return scaled

    def merged(self, tensors: Mapping[str, torch.Tensor], gather: Gather) -> Gather:
        """Return a ``gather`` of the base model that adds scale * B A to each adapted W."""
        places = {id(tensors[adapted_tensor(place)]): place for place in self.form.layers}

        def merged(
            wanted: Sequence[torch.Tensor], dtype: torch.dtype | None
        ) -> Iterator[torch.Tensor]:
            own = [places.get(id(each)) for each in wanted]
            parts = [tensors[f"{place}.{part}"] for place in own if place for part in PARTS]
            wholes, matrices = gather(wanted, None), gather(parts, torch.float32)
            return (
                self._merge(place, whole, matrices).to(type_in(whole, dtype))
                for place, whole in zip(own, wholes, strict=True)
            )

        return merged

    def _merge(
        self, place: str | None, whole: torch.Tensor, matrices: Iterator[torch.Tensor]
    ) -> torch.Tensor:
        if place is None:
            return whole
        low, high = next(matrices), next(matrices)
        return add_adapter(self._layers[place], whole.float(), low, high, self.form.scale)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Compute with the base model alone during the block."""
        self._switch.is_on = False
        try:
            yield
        finally:
            self._switch.is_on = True


def _in_places(
    form: Adapter, tensors: Mapping[str, torch.Tensor], model: nn.Module
) -> tuple[Adapter, dict[str, torch.Tensor]]:
    """Give adapters of experts, as read from files, the names of their places in a model."""
    places = {name: at for at, name in wrapped_names(meant_experts(model, form.parameters)).items()}
    if lost := places.keys() - set(form.layers):
        raise ValueError(f"the adapter lacks {min(lost)}, a tensor of its target_parameters")
    layers = (*(each for each in form.layers if each not in places), *places.values())
    split = ((*name.rpartition("."), tensor) for name, tensor in tensors.items())
    named = {f"{places.get(layer, layer)}.{part}": tensor for layer, _, part, tensor in split}
    return msgspec.structs.replace(form, layers=layers), named
