"""Whether weights fit the model of a folder, said before any of them is loaded.

vLLM's own parameters have other names (projections are fused) and shapes (of a rank's part), and its loader finds out half-way.
So names and shapes are compared with what a trainer has: the Hugging Face model, or the folder's files where these differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

_INDEX_FILE = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
_HEAD = "lm_head.weight"


class Expected(msgspec.Struct, frozen=True):
    """Names and shapes of one form of a model's weights."""

    shapes: dict[str, list[int]]
    optional: list[str] = []
    """Of these, other names of a tensor that comes by its first one (tied embeddings)."""


def expected_of(folder: str) -> list[Expected]:
    """The forms in which weights of a folder's model may come; at least one.

    Raises: ValueError where neither a configuration that transformers can build nor files of safetensors are there.
    """
    try:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise ValueError(f"{folder} has no configuration that transformers reads: {error}") from error
    forms = []
    problem: Exception | None = None
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - vLLM has models that transformers has not; the files may do
        problem = error
    else:
        forms.append(_form_of(model.state_dict(keep_vars=True)))
    shapes = _shapes_of_files(folder)
    if shapes:
        is_tied = bool(getattr(config, "tie_word_embeddings", False))
        form = Expected(shapes if _HEAD in shapes or not is_tied else {**shapes, _HEAD: []}, [_HEAD] if is_tied else [])
        if not any(form == other for other in forms):
            forms.append(form)
    if not forms:
        raise ValueError(f"it cannot be told which weights the model of {folder} has: {problem}") from problem
    return forms


def _form_of(state: Mapping[str, torch.Tensor]) -> Expected:
    seen: set[int] = set()
    optional = []
    for name, tensor in state.items():
        if id(tensor) in seen:
            optional.append(name)
        seen.add(id(tensor))
    return Expected({name: list(tensor.shape) for name, tensor in state.items()}, optional)


def _shapes_of_files(folder: str) -> dict[str, list[int]]:
    files = [_SINGLE_FILE]
    if os.path.exists(os.path.join(folder, _INDEX_FILE)):
        with open(os.path.join(folder, _INDEX_FILE), "rb") as file:
            files = sorted(set(json.load(file)["weight_map"].values()))
    shapes: dict[str, list[int]] = {}
    for name in files:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            with safe_open(path, framework="pt") as tensors:
                shapes.update({key: list(tensors.get_slice(key).get_shape()) for key in tensors.keys()})  # noqa: SIM118
    return shapes


def require_fit(forms: Sequence[Expected], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises: ValueError unless names and shapes are those of one of the forms."""
    problems = [_problems(form, shapes) for form in forms]
    if all(problems):
        raise ValueError(f"the weights do not fit the model that is served, which was left as it is. {problems[0]}")


def _problems(form: Expected, shapes: Mapping[str, Sequence[int]]) -> str:
    kinds = {
        "missing": [name for name in form.shapes if name not in shapes and name not in form.optional],
        "unexpected": [name for name in shapes if name not in form.shapes],
        "of another shape": [
            f"{name} {tuple(shape)} for {tuple(form.shapes[name])}"
            for name, shape in shapes.items()
            if form.shapes.get(name) and list(shape) != form.shapes[name]
        ],
    }
    return "; ".join(f"{len(names)} {kind}: {', '.join(names[:4])}" for kind, names in kinds.items() if names)
