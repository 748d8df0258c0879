"""Construction of Hugging Face models.

Every rank of a training job and every rollout instance builds its model here, from the same
description and seed, so that all of them start from the same weights before the first transfer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from helmsman.api.engines import Head
from helmsman.api.platforms import current_platform
from helmsman.engines._models.checkpoint import read_parameters
from helmsman.engines._models.checkpoint_files import is_checkpoint
from helmsman.engines._models.heads import (
    AUTO_CLASSES,
    CONFIG_ENTRIES,
    check_saved_head,
    give_values,
)


def resolve_dtype(name: str) -> torch.dtype:
    """Return a floating-point dtype by its name in torch; raise ValueError for any other name.

    ``auto`` is bfloat16 on devices, float32 on the host.
    """
    if name == "auto":
        return torch.float32 if current_platform.device_type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"there is no floating-point type {name!r}; give 'auto' or the name of a torch type, "
            "such as 'bfloat16'"
        )
    return dtype


@contextlib.contextmanager
def without_progress_bars() -> Iterator[None]:
    """Disable the progress bars of ``transformers``, to keep them out of a worker's log."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


_drawing = threading.Lock()
"""Held while weights are initialised, since engines in threads of one process (inline) share the
global random state.
"""


def build_model(
    model: str | Mapping[str, Any], *, seed: int, dtype: torch.dtype, head: Head = "lm"
) -> nn.Module:
    """Build a causal ``transformers`` model on the host, in evaluation mode.

    The global random state is unchanged.

    Args:
        model: Local folder in the Hugging Face layout, or a checkpoint (weights are read); or the
            entries of a configuration, such as ``{"model_type": "qwen2", "hidden_size": 64, ...}``
            (weights are initialised randomly).
        seed: Seed of random weights, and of a value head that the folder lacks.
        dtype: Type of the parameters.
        head: With ``lm`` the outputs have ``logits``; with ``value`` they are (B, T) float32.

    Returns:
        The model.

    Raises:
        ValueError: The folder or the model type does not exist, the checkpoint is incomplete, or
            the folder's model has a value head and ``head`` is ``lm``.
    """
    auto_class, entries = AUTO_CLASSES[head], CONFIG_ENTRIES[head]
    if isinstance(model, str):
        if not os.path.isdir(model):
            raise ValueError(
                f"there is no model folder {model!r} on this worker; give a local folder, or a "
                "mapping with 'model_type'"
            )
        check_saved_head(model, head, exact=is_checkpoint(model))
        with without_progress_bars(), seeded(seed):
            if is_checkpoint(model):
                built: nn.Module = auto_class.from_config(
                    AutoConfig.from_pretrained(model, **entries), dtype=dtype
                )
                read_parameters(model, built)
            else:
                built = auto_class.from_pretrained(
                    model, dtype=dtype, local_files_only=True, **entries
                )
    else:
        if "model_type" not in model:
            raise ValueError(
                "the model's configuration has no 'model_type'; it has: "
                f"{', '.join(sorted(model)) or 'nothing'}"
            )
        config = AutoConfig.for_model(**{**model, **entries})
        with seeded(seed):
            built = auto_class.from_config(config, dtype=dtype)
    if head == "value":
        give_values(built)
    return built.eval()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw random weights from a seed; the global random state is unchanged afterwards."""
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


_LENGTH_INCLUDED = ("longrope", "su", "llama3")
"""Kinds of rotary scaling for which max_position_embeddings is already the scaled length."""


def max_positions(config: Any) -> int | None:
    """Return the maximum tokens of a sequence that a model supports; None if unknown.

    Scaled rotary embeddings allow ``factor`` times as many, by vLLM's rules. If the number may
    already include the factor, the larger result is returned.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not positions or positions < 0:
        return None
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    most = int(positions)
    for each in (rope, *rope.values()):  # one for all layers, or one for each kind of layer
        if (
            isinstance(each, Mapping)
            and each.get("factor")
            and each.get("rope_type", each.get("type")) not in _LENGTH_INCLUDED
        ):
            most = max(
                most,
                int((each.get("original_max_position_embeddings") or positions) * each["factor"]),
            )
    return most


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that sharding and checkpointing treat as units (``_no_split_modules``)."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def checkpoint_layers(model: nn.Module) -> None:
    """Make decoder layers recompute activations in the backward pass (arXiv:1604.06174)."""
    for layer in decoder_layers(model):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
