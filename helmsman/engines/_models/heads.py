"""Heads of models: next-token prediction, and one value per token (critic, reward model).

A value head is sequence classification with one label in ``transformers``: the architecture without
its token prediction, and a linear layer ``score``. ``AutoModelForSequenceClassification``, trl and
reward model servers can load its folders. ``transformers`` outputs the score of the last token
only; here every token gets a value.
"""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from helmsman.api.engines import Head

_VALUE_SUFFIX = "ForSequenceClassification"
AUTO_CLASSES: dict[Head, Any] = {
    "lm": AutoModelForCausalLM,
    "value": AutoModelForSequenceClassification,
}
CONFIG_ENTRIES: dict[Head, dict[str, Any]] = {"lm": {}, "value": {"num_labels": 1}}


def head_of(model: nn.Module) -> Head:
    """Return the head of a model from build_model, sharded or not."""
    return "value" if type(model).__name__.endswith(_VALUE_SUFFIX) else "lm"


def check_saved_head(folder: str, head: Head, *, exact: bool = False) -> None:
    """Raise ValueError if the model in a folder has another head.

    ``transformers`` would silently replace that head by a random one. For a value head, a model
    that predicts tokens is accepted unless ``exact``: critics and reward models start from one.
    """
    (architecture, *_) = AutoConfig.from_pretrained(
        folder, local_files_only=True
    ).architectures or [""]
    has_value_head = architecture.endswith(_VALUE_SUFFIX)
    if has_value_head if head == "lm" else (exact and not has_value_head):
        raise ValueError(
            f"{folder!r} holds a {architecture or 'model of unknown architecture'}; expected one "
            f"with the head {head!r}"
        )


def give_values(model: nn.Module) -> None:
    """Make a model with a value head return a value for each token, (B, T) float32.

    This replaces the model's own ``forward``, so that a sharded model gathers the parameters of the
    head with its own. Raises ValueError if there is no linear layer ``score``.
    """
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ValueError(
            f"{type(model).__name__} has no linear layer 'score'; there is no value head for this "
            "architecture"
        )
    model.forward = types.MethodType(_token_values, model)


def _token_values(model: Any, *, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    hidden = model.base_model(input_ids=input_ids, **kwargs).last_hidden_state
    scores: torch.Tensor = model.score(hidden)[..., 0]
    # FSDP cannot protect a view against in-place changes, so return a copy.
    return scores.float().clone()


def plain_config(model: nn.Module) -> Any:
    """Return a copy of a model's configuration with its class, as ``transformers`` saves it."""
    config: Any = copy.deepcopy(model.config)
    config.architectures = [_plain_class(model).__name__]
    return config


def _plain_class(model: nn.Module) -> Any:
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


def skeleton(model: nn.Module) -> PreTrainedModel:
    """Build a model of the same class and configuration, without storage and without sharding."""
    with torch.device("meta"):
        empty: PreTrainedModel = _plain_class(model)(copy.deepcopy(model.config))
    return empty
