"""Heads of models: the one that predicts the next token, and the one that gives a number per token
(critic, reward model).

A value head is what ``transformers`` calls sequence classification with one label: the architecture
without its prediction of tokens, and a linear layer ``score``. Folders of it are read by
``AutoModelForSequenceClassification``, by trl and by servers of reward models. ``transformers``
gives the score of the last token alone; here it is given for every token.
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
    """The head of a model that build_model has built, sharded or not."""
    return "value" if type(model).__name__.endswith(_VALUE_SUFFIX) else "lm"


def check_saved_head(folder: str, head: Head, *, exact: bool = False) -> None:
    """Raise ValueError when the model in a folder has another head, which ``transformers`` would
    drop for a drawn one. ``exact`` refuses a model that predicts tokens for a value head, too; such
    a model is where critics and reward models begin.
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
    """Make a model with a value head return (B, T) float32, a value for each token, in place of the
    scores of the last ones. It is the model's own ``forward`` that changes, so that a sharded model
    gathers the parameters of the head with its own. Raises: ValueError.
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
    return scores.float().clone()  # FSDP cannot guard a view against changes in place


def plain_config(model: nn.Module) -> Any:
    """A copy of a model's configuration that names its class, as ``transformers`` writes it."""
    config: Any = copy.deepcopy(model.config)
    config.architectures = [_plain_class(model).__name__]
    return config


def _plain_class(model: nn.Module) -> Any:
    return next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))


def skeleton(model: nn.Module) -> PreTrainedModel:
    """A model of the same class and configuration without storage, and without what sharding has
    added to its class.
    """
    with torch.device("meta"):
        empty: PreTrainedModel = _plain_class(model)(copy.deepcopy(model.config))
    return empty
