"""Weights of a sharded model as a Hugging Face folder, parameter by parameter: rank 0 holds one file's worth on its host.

    <path>/config.json, generation_config.json, tokenizer files
    <path>/model.safetensors, or model-00001-of-00003.safetensors, ... and model.safetensors.index.json

``AutoModelForCausalLM.from_pretrained``, vLLM and SGLang read it. The folder gets its name when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from helmsman.engines._models.distributed import failing_together
from helmsman.engines._models.files import check_replaceable, copy_tokenizer, replace_folder, save_tensors
from helmsman.engines._models.heads import plain_config, skeleton
from helmsman.engines._models.model import resolve_dtype
from helmsman.engines._models.tensors import full_tensor, named_tensors

MAX_SHARD_BYTES = 5 << 30


def full_state_dict(model: nn.Module, full: Callable[[torch.Tensor], torch.Tensor] = full_tensor) -> dict[str, torch.Tensor]:
    """The unsharded parameters and persistent buffers by name, on the host of rank 0; empty elsewhere. A collective.

    A tensor with several names (tied embeddings) appears once, under its first name.
    """
    state: dict[str, torch.Tensor] = {}
    for name, tensor in named_tensors(model).items():
        whole = full(tensor)
        if dist.get_rank() == 0:
            state[name] = whole.to("cpu", copy=True).contiguous()
    return state


def export_hf(
    model: nn.Module,
    path: str,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    source: str | None = None,
    full: Callable[[torch.Tensor], torch.Tensor] = full_tensor,
) -> None:
    """Write the weights from all ranks; rank 0 writes the files. A model that was at ``path`` is replaced when all is there.

    Args:
        dtype: Floating-point type of what is written, such as ``bfloat16``; None leaves it as it is.
        max_shard_bytes: Of one file; a tensor that is larger has a file of its own.
        source: The folder that the model came from, whose tokenizer is copied.
        full: All of a tensor, on any device.

    Raises:
        ValueError: The type is none, or max_shard_bytes is below 1.
        OSError: Rank 0 cannot write there, or there is something else than a model; the other ranks raise RuntimeError.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; expected 1 or more")
    cast = None if dtype is None else resolve_dtype(dtype)
    path = os.path.abspath(path)
    folder: _Folder | None = None
    error: Exception | None = None
    try:
        if dist.get_rank() == 0:
            try:
                folder = _Folder(path, model, cast, max_shard_bytes, source)
            except Exception as exc:  # noqa: BLE001 - raised below, once the other ranks' collectives have been served
                error = exc
        for name, tensor in named_tensors(model).items():
            whole = full(tensor)
            if folder is not None and error is None:
                try:
                    folder.add(name, whole)
                except Exception as exc:  # noqa: BLE001 - as above
                    error = exc
        with failing_together(f"exporting to {path}"):
            if error is not None:
                raise error
            if folder is not None:
                folder.finish()
    finally:
        if folder is not None:
            folder.remove_unfinished()


class _Folder:
    """Files on rank 0."""

    def __init__(
        self, path: str, model: nn.Module, dtype: torch.dtype | None, max_shard_bytes: int, source: str | None
    ) -> None:
        self._path, self._dtype, self._max_shard_bytes = path, dtype, max_shard_bytes
        check_replaceable(path, "config.json")
        parent, name = os.path.split(path)
        os.makedirs(parent, exist_ok=True)
        self._shard: dict[str, torch.Tensor] = {}
        self._shard_bytes = self._num_bytes = 0
        self._files: list[list[str]] = []
        """The names of the tensors in each file."""
        self._unfinished = tempfile.mkdtemp(prefix=f".{name}.", dir=parent)
        try:
            os.chmod(self._unfinished, 0o755)
            # A skeleton without FSDP's wrapping and without storage knows the names that files have, where they differ.
            self._skeleton = skeleton(model)
            config = plain_config(model)
            config.dtype = dtype or next(model.parameters()).dtype
            config.save_pretrained(self._unfinished)
            if (generation := getattr(self._skeleton, "generation_config", None)) is not None:
                generation.save_pretrained(self._unfinished)
            copy_tokenizer(source, self._unfinished)
        except BaseException:
            self.remove_unfinished()
            raise

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        if self._shard and self._shard_bytes + tensor.nbytes > self._max_shard_bytes:
            self._write()
        self._shard[name] = tensor.to("cpu", copy=True).contiguous()
        self._shard_bytes += tensor.nbytes

    def _write(self) -> None:
        tensors = {name: each.contiguous() for name, each in revert_weight_conversion(self._skeleton, self._shard).items()}
        self._files.append(list(tensors))
        save_tensors(tensors, self._file(len(self._files)))
        self._num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        self._shard, self._shard_bytes = {}, 0

    def _file(self, number: int) -> str:
        return os.path.join(self._unfinished, f"{number}.unnamed")

    def finish(self) -> None:
        self._write()
        count = len(self._files)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        if count == 1:
            names = ["model.safetensors"]
        else:
            index = {
                "metadata": {"total_size": self._num_bytes},
                "weight_map": {tensor: name for name, tensors in zip(names, self._files, strict=True) for tensor in tensors},
            }
            with open(os.path.join(self._unfinished, "model.safetensors.index.json"), "w") as file:
                json.dump(index, file, indent=2)
        for number, name in enumerate(names, 1):
            os.rename(self._file(number), os.path.join(self._unfinished, name))
        replace_folder(self._unfinished, self._path)

    def remove_unfinished(self) -> None:
        shutil.rmtree(self._unfinished, ignore_errors=True)
