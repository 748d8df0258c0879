"""Folders of low-rank adapters in the form of PEFT.

<path>/adapter_config.json          rank, alpha and the layers that are adapted
<path>/adapter_model.safetensors    PREFIX + <layer>.lora_A.weight (r, in), .lora_B.weight (out, r)

The tensors of experts (``target_parameters``) have no names there. PEFT wraps their module once for
each tensor: the last one's adapter is <experts>.lora_A, the one before <experts>.base_layer.lora_A.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from helmsman.engines._models.adapter_layers import HOLDER, PARTS, adapted_tensor
from helmsman.engines._models.files import check_replaceable, replace_folder, save_tensors
from helmsman.engines._models.folders import read_json, refused

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_SAVE = "Save it again with save_pretrained, or copy it again"
_DIFFERENT: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(
        (
            *("use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "rank_pattern"),
            *("alpha_pattern", "trainable_token_indices", "layer_replication"),
            *("use_bdlora", "arrow_config", "alora_invocation_tokens"),
        ),
        (False, None, {}, []),
    ),
}
"""Entries of adapter_config.json, with the values by which W x + scale * B (A x) is all."""
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Beginnings of init_lora_weights by which PEFT also changes W, which is not in the folder."""


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an adapter."""

    rank: int
    alpha: float
    layers: tuple[str, ...]
    """Places of the adapters in the model; as read from files, those of experts are wrapped."""
    parameters: tuple[str, ...] = ()
    """Names of the adapted tensors of experts, or ends of them."""
    has_root_scale: bool = False
    """Whether the scale is alpha / sqrt(r), arXiv:2312.03732, instead of alpha / r."""

    @property
    def scale(self) -> float:
        """Factor of B (A x)."""
        return self.alpha / (math.sqrt(self.rank) if self.has_root_scale else self.rank)


def name_in_file(name: str) -> str:
    """Return a parameter's name in files: of ``<layer>.lora_A`` in a model."""
    return f"{PREFIX}{name}.weight"


def place_of(name_in_file: str) -> tuple[str, str]:
    """Return the layer and the part, one of PARTS, of a tensor in files."""
    layer, _, part = name_in_file.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
    return layer, part


def is_adapter_in_files(names: Iterable[str]) -> bool:
    """Return whether tensors of these names in files are an adapter."""
    ends = tuple(f".{part}.weight" for part in PARTS)
    found = list(names)
    return bool(found) and all(name.startswith(PREFIX) and name.endswith(ends) for name in found)


def rank_in_files(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the largest rank of an adapter for an instance by the shapes of its tensors in files.

    Raises:
        ValueError: It adapts experts that are one tensor, which instances do not take.
    """
    if of_experts := [place_of(name)[0] for name in shapes if f".{HOLDER}." in name]:
        raise ValueError(
            f"an adapter of experts that are one tensor, {adapted_tensor(of_experts[0])}, arrived "
            "at an instance that takes adapters of layers; expected the whole model. "
            "Give sync.lora: merged (WeightFormat.adapters False)"
        )
    return max(shape[0] for name, shape in shapes.items() if place_of(name)[1] == PARTS[0])


def write_received(folder: str, buckets: Iterable[Mapping[str, torch.Tensor]]) -> None:
    """Write an adapter that a trainer has sent, by names in files; its scale is 1.

    Raises:
        ValueError: There is no folder, because the instance takes no adapters; or it adapts experts
            that are one tensor.
        OSError: The files cannot be written.
    """
    if not folder:
        raise ValueError(
            "a trained adapter arrived at an instance of vLLM that takes none: max_lora_rank is 0, "
            "or it spans nodes. Set max_lora_rank to the adapter's rank or more, or send the whole "
            "model (WeightFormat.adapters False)"
        )
    own = {
        ".".join(place_of(name)): tensor.to("cpu", copy=True)  # a bucket's memory is used again
        for bucket in buckets
        for name, tensor in bucket.items()
    }
    rank = rank_in_files({name_in_file(name): tensor.shape for name, tensor in own.items()})
    write_adapter(folder, Adapter(rank=rank, alpha=rank, layers=_layers_of(own)), own, base=None)


def _layers_of(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in names))


def read_adapter(folder: str) -> tuple[Adapter, dict[str, torch.Tensor]]:
    """Read an adapter.

    Args:
        folder: Local folder in the form of PEFT.

    Returns:
        The adapter's form, and its tensors by name in the model, ``<layer>.lora_A`` (r, in) and
        ``<layer>.lora_B`` (out, r).

    Raises:
        ValueError: The folder is missing or incomplete, or has another kind of adapter.
    """
    entries, tensors = _read_entries(folder), _read_tensors(folder)
    layers = _layers_of(tensors)
    parameters = tuple(entries.get("target_parameters") or ())
    every = [f"{layer}.{part}" for layer in layers for part in PARTS]
    if lost := [name for name in every if name not in tensors]:
        raise _incomplete(folder, f"{TENSOR_FILE} lacks {lost[0]}")
    ranks = {len(tensors[f"{layer}.{PARTS[0]}"]) for layer in layers}
    rank: Any = entries.get("r")
    alpha = entries.get("lora_alpha")
    stacked = (
        parameters and isinstance(rank, int) and not any(each % max(rank, 1) for each in ranks)
    )
    if ranks != {rank} and not stacked:
        raise _incomplete(folder, f"r is {rank}, but the matrices have {sorted(ranks)}")
    if not isinstance(alpha, int | float) or alpha <= 0:
        raise _refused_entry(folder, "lora_alpha", alpha, "a number above 0", _SAVE)
    form = Adapter(
        rank=int(rank),
        alpha=float(alpha),
        layers=layers,
        parameters=parameters,
        has_root_scale=bool(entries.get("use_rslora")),
    )
    return form, tensors


def _incomplete(folder: str, observed: str) -> ValueError:
    return refused(folder, observed, "a LoRA adapter of PEFT", _SAVE)


def _refused_entry(folder: str, field: str, value: Any, expected: str, step: str) -> ValueError:
    return refused(folder, f"{CONFIG_FILE} has {field}: {json.dumps(value)}", expected, step)


def _read_entries(folder: str) -> Mapping[str, Any]:
    """Read adapter_config.json, and refuse what it says of another arithmetic."""
    entries = read_json(folder, CONFIG_FILE)
    for field, usual in _DIFFERENT.items():
        if entries.get(field, usual[0]) not in usual:
            raise _refused_entry(
                folder,
                field,
                entries[field],
                f"{field}: {json.dumps(usual[0])}" if usual[0] else f"no {field}",
                "Helmsman trains W x + scale * B (A x) only; merge this adapter into its base "
                "model (merge_and_unload) and give the merged model",
            )
    initial = entries.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower().startswith(_CHANGES_BASE):
        raise _refused_entry(
            folder,
            "init_lora_weights",
            initial,
            "an adapter of the base model itself",
            "This one belongs to a base that its initialisation has changed; save it again with "
            "path_initial_model_for_weight_conversion, or merge it (merge_and_unload) and give the "
            "merged model",
        )
    return entries


def _read_tensors(folder: str) -> dict[str, torch.Tensor]:
    """Read adapter_model.safetensors; returns its matrices by name in the model."""
    try:
        stored = load_file(os.path.join(folder, TENSOR_FILE))
    except (OSError, SafetensorError) as error:
        raise _incomplete(folder, f"{TENSOR_FILE} cannot be read ({error})") from error
    if not stored:
        raise _incomplete(folder, f"{TENSOR_FILE} is empty")
    for name, tensor in stored.items():
        if not is_adapter_in_files([name]) or tensor.dim() != 2:
            raise refused(
                folder,
                f"{TENSOR_FILE} has {name} {tuple(tensor.shape)}",
                f"matrices {PREFIX}<layer>.lora_A.weight and lora_B.weight only",
                "Merge this adapter into its base model (merge_and_unload) and give that",
            )
    return {".".join(place_of(name)): tensor for name, tensor in stored.items()}


def wrapped_names(places: Sequence[str]) -> dict[str, str]:
    """Return the names in PEFT's files of adapters of experts, by their places in the model.

    The places are in the order of the tensors in their modules.
    """
    by_module: dict[str, list[str]] = {}
    for place in places:
        by_module.setdefault(place.rpartition(f".{HOLDER}.")[0], []).append(place)
    return {
        place: experts + ".base_layer" * (len(own) - number)
        for experts, own in by_module.items()
        for number, place in enumerate(own, start=1)
    }


def write_adapter(
    folder: str, form: Adapter, tensors: Mapping[str, torch.Tensor], *, base: str | None
) -> None:
    """Write an adapter that PEFT, vLLM and SGLang read, all or nothing.

    Args:
        folder: Folder to write; an adapter there is replaced.
        form: Its form.
        tensors: The tensors of ``read_adapter``.
        base: Folder of the base model; None if it has none.

    Raises:
        OSError: The files cannot be written, or the folder holds something else.
    """
    folder = os.path.abspath(folder)
    check_replaceable(folder, CONFIG_FILE)
    parent, name = os.path.split(folder)
    os.makedirs(parent, exist_ok=True)
    wrapped = wrapped_names([each for each in form.layers if f".{HOLDER}." in each])
    entries = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": form.rank,
        "lora_alpha": form.alpha,
        "use_rslora": form.has_root_scale,
        "target_modules": [each for each in form.layers if each not in wrapped] or None,
        "target_parameters": [adapted_tensor(each) for each in wrapped] or None,
        "bias": "none",
        "inference_mode": True,
    }
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=parent) as unfinished:
        whole = os.path.join(unfinished, "adapter")
        os.mkdir(whole)
        with open(os.path.join(whole, CONFIG_FILE), "w") as file:
            json.dump(entries, file, indent=2)
        save_tensors(
            {
                name_in_file(f"{wrapped.get(place, place)}.{part}"): tensor
                for name, tensor in tensors.items()
                for place, _, part in [name.rpartition(".")]
            },
            os.path.join(whole, TENSOR_FILE),
        )
        replace_folder(whole, folder)
