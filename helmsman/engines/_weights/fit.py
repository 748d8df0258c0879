"""Checks that weights fit a model, before any of them is loaded.

vLLM's own parameters have other names (fused projections) and shapes (a rank's shard), and its
loader fails half-way. So names and shapes are compared with those of the model in Hugging Face's
form. They come from the configuration in the model's folder, or from the weight files there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helmsman.engines._models.files import WeightFiles
from helmsman.engines._weights.checkpoint_names import CheckpointNames
from helmsman.engines.shared_base import shares_base

_HEAD = "lm_head.weight"


class Expected(msgspec.Struct, frozen=True):
    """Names and shapes of one accepted form of a model's weights."""

    shapes: dict[str, list[int] | None]
    """Shape by name; None accepts any shape."""
    aliases: dict[str, str] = {}
    """Other name of a tensor (tied embeddings) -> the name that it can replace, '' for none."""


def vocab_size_of(folder: str) -> int | None:
    """Return the vocabulary size of a folder's model; None if its configuration lacks it."""
    try:
        with open(os.path.join(folder, "config.json")) as file:
            config: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    size: int | None = config.get("text_config", config).get("vocab_size")
    return size


def form_of(state: Mapping[str, torch.Tensor]) -> Expected:
    """Return the form of a state dict in which a tensor with several names is one object."""
    first: dict[int, str] = {}
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    shapes: dict[str, list[int] | None] = {
        name: list(tensor.shape) for name, tensor in state.items()
    }
    return Expected(
        shapes,
        {name: first[id(tensor)] for name, tensor in state.items() if first[id(tensor)] != name},
    )


def form_in_files(names: CheckpointNames) -> Expected:
    """Return the form that a model's weights have in Hugging Face files."""
    aliases = names.aliases()
    shapes: dict[str, list[int] | None] = {
        **names.shapes,
        **{other: names.shapes[name] for other, name in aliases.items()},
    }
    return Expected(shapes, aliases)


def expected_of(folder: str) -> list[Expected]:
    """Return the forms of a folder's weights that servers accept; at least one.

    They are those of files: some servers skip the names that ``transformers`` uses in memory.

    Raises:
        ValueError: There is neither a configuration that transformers can build nor a safetensors
            file.
    """
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ValueError(
            f"{folder} has no configuration that transformers reads: {error}"
        ) from error
    forms = []
    problem: Exception | None = None
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    # vLLM supports models that transformers lacks; the files may have the shapes.
    except Exception as error:  # noqa: BLE001
        problem = error
    else:
        form = form_in_files(CheckpointNames(model))
        # Servers skip a tied head, so it cannot replace the embeddings.
        forms.append(Expected(form.shapes, dict.fromkeys(form.aliases, "")))
    with WeightFiles(folder) as files:
        shapes: dict[str, list[int] | None] = {**files.shapes}
    if shapes:
        is_tied = bool(getattr(config, "tie_word_embeddings", False))
        form = Expected(
            {_HEAD: None, **shapes} if is_tied else shapes, {_HEAD: ""} if is_tied else {}
        )
        if form not in forms:
            forms.append(form)
    if not forms:
        raise ValueError(f"the weights of {folder}'s model are unknown: {problem}") from problem
    return forms


def require_fit(forms: Sequence[Expected], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError unless names and shapes match one of the forms; none of a shared model."""
    if not forms:
        raise shares_base("a whole model")
    problems = [_problems(form, shapes) for form in forms]
    if all(problems):
        raise ValueError(
            f"the weights do not fit the rollout model, which is unchanged. {problems[0]}"
        )


def _problems(form: Expected, shapes: Mapping[str, Sequence[int]]) -> str:
    given = shapes.keys() | {form.aliases[name] for name in shapes if name in form.aliases}
    kinds = {
        "missing": [name for name in form.shapes if name not in given and name not in form.aliases],
        "unexpected": [name for name in shapes if name not in form.shapes],
        "of another shape": [
            f"{name} {tuple(shape)} for {tuple(expected)}"
            for name, shape in shapes.items()
            if (expected := form.shapes.get(name)) is not None and list(shape) != expected
        ],
    }
    return "; ".join(
        f"{len(names)} {kind}: {', '.join(names[:4])}" for kind, names in kinds.items() if names
    )
