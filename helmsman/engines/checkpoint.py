"""Checkpoints of a sharded model: a Hugging Face folder plus the optimizer's state, all or nothing.

    <path>/config.json, model.safetensors   as transformers reads them (heads.py)
    <path>/optimizer.pt                     full (unsharded) optimizer state by parameter name; absent before the first step
    <path>/helmsman.json                    weight version and number of optimizer steps

Nothing depends on the number of ranks, so a checkpoint of eight ranks can be loaded by one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from helmsman.engines.distributed import failing_together
from helmsman.engines.files import replace_folder
from helmsman.engines.heads import check_saved_head, head_of, skeleton
from helmsman.engines.model import build_model, full_tensor, named_tensors, without_progress_bars

_GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SCATTER = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
_OPTIMIZER_FILE = "optimizer.pt"
_PROGRESS_FILE = "helmsman.json"
_TOKENIZER_PREFIXES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")


class Progress(msgspec.Struct, frozen=True):
    """How far training has come."""

    version: int
    """Weight version."""
    num_steps: int
    """Optimizer steps that were taken."""


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The unsharded parameters and persistent buffers by name, on the host of rank 0; empty elsewhere. A collective.

    A tensor with several names (tied embeddings) appears once, under its first name.
    """
    state: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors(model).items():
        full = full_tensor(tensor)
        if dist.get_rank() == 0:
            state[name] = full.to("cpu", copy=True).contiguous()
    return state


def save_checkpoint(
    path: str, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, source: str | None = None
) -> None:
    """Write a checkpoint from all ranks; rank 0 writes the files.

    They are written to a folder beside ``path``, which takes its place at the end; what was there before is removed after that.
    The tokenizer is copied from ``source``, the folder that the model came from, if there is one.

    Raises:
        OSError: Rank 0 cannot write there; the other ranks raise RuntimeError.
    """
    weights = full_state_dict(model)
    # Asking for the state of an optimizer that has not stepped would take a step to create it.
    states = get_optimizer_state_dict(model, optimizer, options=_GATHER) if optimizer.state else {}
    with failing_together(f"saving to {path}"):
        if dist.get_rank() == 0:
            _write(os.path.abspath(path), model, weights, dict(states), progress, source)


def _write(
    path: str,
    model: nn.Module,
    weights: dict[str, torch.Tensor],
    states: dict[str, Any],
    progress: Progress,
    source: str | None,
) -> None:
    parent, name = os.path.split(path)
    os.makedirs(parent, exist_ok=True)
    temporary = tempfile.mkdtemp(prefix=f".{name}.", dir=parent)
    try:
        os.chmod(temporary, 0o755)
        # A skeleton without FSDP's wrapping and without storage writes the layout, names and tied weights of transformers.
        with without_progress_bars():
            skeleton(model).save_pretrained(temporary, state_dict=weights)
        if source is not None:
            for entry in os.scandir(source):
                if entry.is_file() and entry.name.startswith(_TOKENIZER_PREFIXES):
                    shutil.copy(entry.path, temporary)
        if states:
            torch.save(states, os.path.join(temporary, _OPTIMIZER_FILE))
        with open(os.path.join(temporary, _PROGRESS_FILE), "wb") as file:
            file.write(msgspec.json.encode(progress))
        replace_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_checkpoint(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Read a checkpoint into a model and an optimizer that has not stepped, on all ranks; rank 0 reads the big files.

    Raises:
        ValueError: Rank 0 finds no checkpoint there, a part of one, or one of another model; the others raise RuntimeError.
    """
    weights: dict[str, Any] = {}
    shared: list[Any] = [None, False]
    states: dict[str, Any] = {}
    with failing_together(f"loading {path}"):
        if dist.get_rank() == 0:
            progress_path = os.path.join(path, _PROGRESS_FILE)
            if not os.path.isfile(progress_path):
                raise ValueError(f"{path!r} is not a checkpoint of this engine: it has no {_PROGRESS_FILE}")
            with open(progress_path, "rb") as file:
                found = shared[0] = msgspec.json.decode(file.read(), type=Progress)
            optimizer_path = os.path.join(path, _OPTIMIZER_FILE)
            if found.num_steps and not os.path.isfile(optimizer_path):
                raise ValueError(f"{path!r} is of {found.num_steps} optimizer steps and has no {_OPTIMIZER_FILE}")
            check_saved_head(path, head_of(model), exact=True)
            weights = build_model(path, seed=0, dtype=torch.float32, head=head_of(model)).state_dict()
            _check_shapes(path, model, weights)
            if os.path.isfile(optimizer_path):
                states = torch.load(optimizer_path, map_location="cpu", weights_only=True)
            shared[1] = bool(states)
    dist.broadcast_object_list(shared, src=0)
    set_model_state_dict(model, weights, options=_SCATTER)
    if shared[1]:
        set_optimizer_state_dict(model, optimizer, states, options=_SCATTER)
    progress: Progress = shared[0]
    return progress


def _check_shapes(path: str, model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    other = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if own != other:
        names = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
        shown = ", ".join(f"{name} {own.get(name)} here, {other.get(name)} there" for name in names[:4])
        raise ValueError(f"{path!r} holds another model; {len(names)} of its parameters differ: {shown}")
