"""Weights of a sharded model as a Hugging Face folder, parameter by parameter: rank 0 holds one
file's worth on its host.

    <path>/config.json, generation_config.json, tokenizer files
    <path>/model.safetensors
        or model-00001-of-00003.safetensors, ... and model.safetensors.index.json

``AutoModelForCausalLM.from_pretrained``, vLLM and SGLang read it. The folder gets its name when it
is complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

from helmsman.engines._models.distributed import full_tensor, named_tensors
from helmsman.engines._models.files import (
    FolderWriter,
    check_replaceable,
    copy_tokenizer,
    replace_folder,
)
from helmsman.engines._models.heads import plain_config, skeleton
from helmsman.engines._models.model import resolve_dtype
from helmsman.engines._weights.sending import Bucket, Packer, Sink, send_all

MAX_SHARD_BYTES = 5 << 30


def export_hf(
    model: nn.Module,
    path: str,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    source: str | None = None,
    full: Callable[[torch.Tensor], torch.Tensor] = full_tensor,
) -> None:
    """Write the weights from all ranks, cast to ``dtype`` unless None; rank 0 writes the files of
    at most ``max_shard_bytes``, or one tensor. A model that was at ``path`` is replaced when all is
    there. The tokenizer is copied from ``source``.

    Raises: ValueError for a type that is none, or max_shard_bytes below 1; OSError where rank 0
    cannot write there, or there is something else than a model; the other ranks raise RuntimeError.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; expected 1 or more")
    cast = None if dtype is None else resolve_dtype(dtype)
    path = os.path.abspath(path)

    def pack(stack: contextlib.ExitStack) -> Packer[None]:
        return Packer(_HFFolder(path, model, cast, source, stack), cast, max_shard_bytes)

    send_all(
        named_tensors(model), full, pack if dist.get_rank() == 0 else None, f"exporting to {path}"
    )


class _HFFolder(Sink[None]):
    def __init__(
        self,
        path: str,
        model: nn.Module,
        dtype: torch.dtype | None,
        source: str | None,
        until_the_end: contextlib.ExitStack,
    ) -> None:
        self._path = path
        check_replaceable(path, "config.json")
        parent, name = os.path.split(path)
        os.makedirs(parent, exist_ok=True)
        self._unfinished = tempfile.mkdtemp(prefix=f".{name}.", dir=parent)
        until_the_end.callback(shutil.rmtree, self._unfinished, ignore_errors=True)
        os.chmod(self._unfinished, 0o755)
        # A skeleton without FSDP's wrapping and without storage knows the names that files have,
        # where they differ.
        self._skeleton = skeleton(model)
        config = plain_config(model)
        config.dtype = dtype or next(model.parameters()).dtype
        config.save_pretrained(self._unfinished)
        if (generation := getattr(self._skeleton, "generation_config", None)) is not None:
            generation.save_pretrained(self._unfinished)
        copy_tokenizer(source, self._unfinished)
        self._writer = FolderWriter(self._unfinished)

    def put(self, bucket: Bucket) -> None:
        self._writer.write(revert_weight_conversion(self._skeleton, dict(bucket.tensors)))

    def finish(self) -> None:
        self._writer.finish(indexes_one=False)
        replace_folder(self._unfinished, self._path)
