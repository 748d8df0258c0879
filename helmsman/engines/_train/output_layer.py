"""Models that return statistics of their tokens instead of logits.

The output layer is taken out of a model's forward pass. The model's operations on the logits after
that layer, such as a soft cap, are found by calling its forward method with stand-ins for layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from helmsman.engines._train.vocabulary import (
    OutputLayer,
    TokenStatistics,
    TopChoices,
    token_statistics,
    top_choices,
)

Transform = Callable[[torch.Tensor], torch.Tensor]


def return_statistics(model: nn.Module) -> None:
    """Make a causal model return TokenStatistics, (B, T). Call this before the model is sharded.

    Its ``forward`` then takes ``targets`` (B, T) or (B, T, M) int64, ``with_entropies``, and the
    ``group`` of ranks that share the vocabulary or None, besides the arguments of the model. With a
    pair ``top``, (k, number of ids) of top_choices, it returns TopChoices (B, T, k) instead.
    """
    own_forward: Any = model.forward
    is_separable, transform = _separated(model)

    def forward(
        *,
        targets: torch.Tensor,
        with_entropies: bool,
        group: dist.ProcessGroup | None,
        top: tuple[int, int] | None = None,
        **arguments: Any,
    ) -> TokenStatistics | TopChoices:
        any_model: Any = model
        if is_separable:
            inputs = any_model.base_model(**arguments).last_hidden_state
            head = any_model.get_output_embeddings()
            bias = None if head.bias is None else _local(head.bias)
            layer = OutputLayer(_local(head.weight), bias, transform)
        else:
            inputs, layer = _local(own_forward(**arguments).logits), None
        if top is not None:
            return top_choices(inputs, *top, layer=layer, group=group)
        logprobs, entropies = token_statistics(
            inputs, targets, layer=layer, group=group, with_entropies=with_entropies
        )
        # FSDP cannot protect a view against in-place changes, so return copies.
        return TokenStatistics(logprobs.clone(), None if entropies is None else entropies.clone())

    model.forward = forward


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _separated(model: Any) -> tuple[bool, Transform | None]:
    """Return whether a linear layer on the base model's hidden states makes the logits.

    Also returns the model's operation on each logit after that; None if there is none.
    """
    head = model.get_output_embeddings()
    names = [name for name, child in model.named_children() if child is head]
    if type(head) is not nn.Linear or not names or model.base_model is model:
        return False, None
    # A copy that shares everything but its children.
    shell: Any = copy.copy(model)
    hidden = _Given()
    shell.__dict__["_modules"] = {
        **model._modules,
        model.base_model_prefix: hidden,
        names[0]: nn.Identity(),
    }

    def transform(logits: torch.Tensor) -> torch.Tensor:
        hidden.value = logits[None]
        ids = torch.zeros((1, len(logits)), dtype=torch.int64, device=logits.device)
        transformed: torch.Tensor = (
            type(model).forward(shell, input_ids=ids, use_cache=False).logits[0]
        )
        return transformed

    probe = torch.linspace(-40.0, 40.0, 2 * head.out_features).view(2, -1)
    try:
        with torch.no_grad():
            found, mirrored = transform(probe), transform(probe.flip(-1))
    # Such a model does something else between its base model and its logits.
    except Exception:  # noqa: BLE001
        return False, None
    if found.shape != probe.shape or not torch.equal(mirrored, found.flip(-1)):
        return False, None
    return True, None if torch.equal(found, probe) else transform


class _Given(nn.Module):
    """Stands for a base model whose hidden states are given."""

    value: torch.Tensor

    def forward(self, *_: Any, **__: Any) -> _Outputs:
        return _Outputs(self.value)


class _Outputs:
    """Outputs of a base model of which all but the hidden states are None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None
