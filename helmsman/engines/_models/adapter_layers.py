"""Linear layers with a low-rank adapter (LoRA, arXiv:2106.09685): W x + scale * B (A x).

A layer with an adapter stays where it is, with its class and its name, and has two parameters more,
``lora_A`` (r, in) and ``lora_B`` (out, r). So sharding, files and transfers find the base model as
without adapters.
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
_ALL = "all-linear"
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


def attach(layer: nn.Linear, parts: Mapping[str, nn.Parameter], switch: AdapterSwitch) -> None:
    """Give a layer the parameters of an adapter, or other ones, by PARTS."""
    for part in PARTS:
        layer.register_parameter(part, parts[part])
    adapted: Any = layer
    adapted.forward = functools.partial(switch.outputs, layer)


def detach_all(model: nn.Module) -> None:
    """Remove all adapters of a model."""
    for module in model.modules():
        if hasattr(module, PARTS[0]):
            del module.forward
            for part in PARTS:
                delattr(module, part)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the layers that can have an adapter, by name.

    A router that is a subclass of nn.Linear computes something else. The output layer's weight is
    used without the layer's ``forward``, and is often the embedding's, too.
    """
    get_output: Any = getattr(model, "get_output_embeddings", lambda: None)
    left_out = (get_output(), getattr(model, "score", None))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (type(module).forward is nn.Linear.forward or type(module).__name__ in _ALIKE)
        and not any(module is each for each in left_out)
    }


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name in a model belongs to an adapter."""
    return name.endswith(tuple(f".{part}" for part in PARTS))


def targets_of(model: nn.Module, targets: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the layers that are meant, by PEFT's rules.

    A list has whole names or their ends; a text is a regular expression of whole names, or
    ``all-linear``, every linear layer but the output layer.

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
    if targets == _ALL:
        return tuple(linears)
    if isinstance(targets, str):
        chosen = [name for name in linears if re.fullmatch(targets, name)]
        if not chosen:
            raise ValueError(
                f"lora.targets is {targets!r}, which matches no linear layer of "
                f"{type(model).__name__}; {did_you_mean(targets, [_ALL, *_ends(linears)])}"
            )
        return tuple(chosen)
    for target in targets:
        if not any(_is_meant(name, target) for name in linears):
            raise ValueError(
                f"lora.targets has {target!r}, but {type(model).__name__} has no linear layer of "
                f"this name besides the output layer; {did_you_mean(target, _ends(linears))}"
            )
    return tuple(name for name in linears if any(_is_meant(name, each) for each in targets))


def _is_meant(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _ends(names: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))
