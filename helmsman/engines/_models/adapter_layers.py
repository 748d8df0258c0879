"""Linear layers with a low-rank adapter (LoRA, arXiv:2106.09685): W x + scale * B (A x).

A layer with an adapter stays where it is, with its class and its name, and has two parameters more,
``lora_A`` (r, in) and ``lora_B`` (out, r). So sharding, files and transfers find the base model as
without adapters. The matrices of E experts that are one tensor have the adapters of all experts in
``<experts>.lora.<tensor>``, as PEFT stacks them: ``lora_A`` (E * r, in), ``lora_B`` (out, r * E).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import dropout, linear

from helmsman.api.suggestions import did_you_mean

PARTS = ("lora_A", "lora_B")
HOLDER = "lora"
"""Child of a module of experts, with the adapters of its tensors by their names."""
_ALL = "all-linear"
_EXPERTS = "experts"
_ALIKE = ("FalconLinear",)
"""Subclasses of nn.Linear whose ``forward`` computes W x + b, too."""


class AdapterSwitch:
    """The switch and the scale of all adapters of a model.

    Args:
        scale: Factor of B (A x).
        dropout: Dropout of x in training.
    """

    def __init__(self, scale: float, dropout: float = 0.0) -> None:
        self._scale, self._dropout = scale, dropout
        self.is_on = True
        """Whether layers compute with their adapters."""

    def outputs(self, layer: Any, inputs: torch.Tensor) -> torch.Tensor:
        """Return (..., out) of a layer with an adapter for (..., in)."""
        outputs = linear(inputs, layer.weight, layer.bias)
        if not self.is_on:
            return outputs
        if self._dropout:
            inputs = dropout(inputs, self._dropout, layer.training)
        return outputs + self._scale * linear(linear(inputs, layer.lora_A), layer.lora_B)

    def outputs_of_experts(self, experts: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of experts, whose tensors have their adapters added meanwhile."""
        if not self.is_on:
            return forward(*args, **kwargs)
        try:
            for name, parts in experts.lora.items():  # attributes of the instance hide parameters
                whole = experts._parameters[name]
                low, high = parts.lora_A.to(whole.dtype), parts.lora_B.to(whole.dtype)
                experts.__dict__[name] = add_adapter(experts, whole, low, high, self._scale)
            return forward(*args, **kwargs)
        finally:
            for name in experts.lora:
                experts.__dict__.pop(name, None)


def add_adapter(
    layer: nn.Module, whole: torch.Tensor, low: torch.Tensor, high: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return W + scale * B A: (out, in), or of each expert, as the layer has them."""
    if whole.dim() == 2:
        return torch.addmm(whole, high, low, alpha=scale)
    size = len(whole)
    one, other = high.unflatten(1, (-1, size)).permute(2, 0, 1), low.unflatten(0, (size, -1))
    one, other = (other.mT, one.mT) if _has_inputs_first(layer) else (one, other)
    return torch.baddbmm(whole, one, other, alpha=scale)


def _has_inputs_first(layer: nn.Module) -> bool:
    """Return whether the tensors of experts are (E, in, out), as transformers marks them."""
    return bool(getattr(layer, "is_transposed", False))


def attach(
    layer: nn.Module, place: str, parts: Mapping[str, nn.Parameter], switch: AdapterSwitch
) -> None:
    """Give a layer, or a tensor of experts, an adapter's parameters, or other ones, by PARTS."""
    adapted: Any = layer
    holder = layer
    if isinstance(layer, nn.Linear):
        adapted.forward = functools.partial(switch.outputs, layer)
    else:
        if not hasattr(layer, HOLDER):
            adapted.lora = nn.ModuleDict()
            adapted.forward = functools.partial(switch.outputs_of_experts, layer, layer.forward)
        adapted.lora[place.rpartition(".")[2]] = holder = nn.Module()
    for part in PARTS:
        holder.register_parameter(part, parts[part])


def detach_all(model: nn.Module) -> None:
    """Remove all adapters of a model."""
    for module in list(model.modules()):
        added = [name for name in (HOLDER, *PARTS) if hasattr(module, name)]
        if added and "forward" in vars(module):
            del module.forward
            for name in added:
                delattr(module, name)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers that can have an adapter, by name.

    A router that is a subclass of nn.Linear computes something else. The output layer's weight is
    used without the layer's ``forward``, and is often the embedding's, too.
    """
    outputs = _output_layers(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (type(module).forward is nn.Linear.forward or type(module).__name__ in _ALIKE)
        and name not in outputs
    }


def _output_layers(model: nn.Module) -> list[str]:
    get_output: Any = getattr(model, "get_output_embeddings", lambda: None)
    found = {get_output(), getattr(model, "score", None)} - {None}
    return [name for name, module in model.named_modules() if module in found]


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules of experts whose matrices are one tensor (E, ., .), by the adapter's place."""
    return {
        f"{name}.{HOLDER}.{own}": module
        for name, module in model.named_modules()
        for own, tensor in module.named_parameters(recurse=False)
        if tensor.dim() == 3 and getattr(module, "num_experts", None) == len(tensor)
    }


def adaptable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers and modules of experts that can have an adapter, by its place."""
    return {**linear_layers(model), **experts_of(model)}


def adapted_tensor(place: str) -> str:
    """Return the name of the tensor in the model that the adapter of a place changes."""
    experts, is_of_experts, own = place.rpartition(f".{HOLDER}.")
    return f"{experts}.{own}" if is_of_experts else f"{place}.weight"


def matrix_sizes(layer: nn.Module, place: str) -> tuple[int, int, int]:
    """Return the number of matrices of an adapted layer, and each one's outputs and inputs."""
    weight = layer.get_parameter(adapted_tensor(place).rpartition(".")[2])
    num_out, num_in = weight.shape[-2:]
    num = len(weight) if weight.dim() == 3 else 1
    return (num, num_in, num_out) if _has_inputs_first(layer) else (num, num_out, num_in)


def meant_experts(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the places of the tensors of experts with these names, or ends of names."""
    return [
        place
        for place in experts_of(model)
        if any(_is_end(target, adapted_tensor(place)) for target in targets)
    ]


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name in a model belongs to an adapter."""
    return name.endswith(tuple(f".{part}" for part in PARTS))


def targets_of(model: nn.Module, targets: str | Sequence[str]) -> tuple[str, ...]:
    """Return the places of the layers that are meant, by PEFT's rules.

    A list has whole names or their ends; a text is a regular expression of whole names, or
    ``all-linear``, every linear layer but the output layer. Tensors of experts are meant by targets
    with ``experts`` in them alone, since PEFT's targets mean layers.

    Raises:
        ValueError: Nothing is meant, or a target is no linear layer, or the output layer.
    """
    linears = linear_layers(model)
    if not linears or not targets:
        raise ValueError(
            f"lora.targets is {targets!r}, and {type(model).__name__} has {len(linears)} linear "
            "layers that can have an adapter (nn.Linear, but for the output layer); expected at "
            "least one of them"
        )
    if targets in (_ALL, (_ALL,), [_ALL]):  # trl's command line makes a list of it
        return tuple(linears)
    is_expression = isinstance(targets, str)
    matches = re.fullmatch if is_expression else _is_end
    experts = {adapted_tensor(place): place for place in experts_of(model)}
    places = {name: name for name in linears} | experts
    chosen: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        if outputs := [name for name in _output_layers(model) if matches(target, name)]:
            raise ValueError(
                f"lora.targets has {target!r}, which matches {outputs[0]}, expected linear layers "
                "besides the output layer"
            )
        meant = places if _EXPERTS in target else linears
        found = {places[name] for name in meant if matches(target, name)}
        if not found:
            ends = [*_ends(linears), *(f"{_EXPERTS}.{end}" for end in _ends(experts))]
            known = [_ALL, *ends] if is_expression else ends
            raise ValueError(
                f"lora.targets has {target!r}, which matches no linear layer of "
                f"{type(model).__name__} besides the output layer; {did_you_mean(target, known)}"
            )
        chosen |= found
    return tuple(place for place in places.values() if place in chosen)


def _is_end(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _ends(names: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))
