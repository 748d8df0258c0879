"""Export of a sharded model as a Hugging Face folder; rank 0 holds one file's tensors on its host.

    <path>/config.json, generation_config.json, tokenizer files
    <path>/model.safetensors
        or model-00001-of-00003.safetensors, ... and model.safetensors.index.json

``AutoModelForCausalLM.from_pretrained``, vLLM and SGLang can read it. The folder gets its final
name when it is complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from helmsman.engines._models.files import (
    FolderWriter,
    check_replaceable,
    copy_tokenizer,
    replace_folder,
)
from helmsman.engines._models.heads import plain_config, skeleton
from helmsman.engines._models.model import resolve_dtype
from helmsman.engines._weights.checkpoint_names import CheckpointNames, Conversion
from helmsman.engines._weights.gathering import gather
from helmsman.engines._weights.sending import Bucket, Gather, Packer, Sink, send_all

MAX_SHARD_BYTES = 5 << 30


def export_hf(
    model: nn.Module,
    path: str,
    *,
    tensors: Mapping[str, torch.Tensor],
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    source: str | None = None,
    gather: Gather = gather,
) -> None:
    """Write the weights of all ranks as a Hugging Face folder; rank 0 writes. A collective.

    A model at ``path`` is replaced once the new one is complete.

    Args:
        model: The sharded model.
        path: Folder to write.
        tensors: The tensors to write, by name in the model.
        dtype: Type to cast floating-point tensors to; None keeps theirs.
        max_shard_bytes: Largest size of a file in bytes; a larger tensor gets its own file.
        source: Folder from which the tokenizer is copied; None for no tokenizer.
        gather: Gathers whole tensors of a dtype from their shards.

    Raises:
        ValueError: The dtype is unknown, or ``max_shard_bytes`` is below 1.
        OSError: Rank 0 cannot write there, or the path holds something else than a model.
        RuntimeError: Another rank failed.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes}; expected 1 or more")
    cast = None if dtype is None else resolve_dtype(dtype)
    path = os.path.abspath(path)

    def pack(stack: contextlib.ExitStack) -> Packer[None]:
        return Packer(
            _HFFolder(path, model, cast, source, stack),
            max_shard_bytes,
            convert=Conversion(CheckpointNames(model)),
        )

    send_all(
        tensors,
        gather,
        cast,
        max_shard_bytes,
        pack if dist.get_rank() == 0 else None,
        f"exporting to {path}",
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
        config = plain_config(model)
        config.dtype = dtype or next(model.parameters()).dtype
        config.save_pretrained(self._unfinished)
        if (generation := getattr(skeleton(model), "generation_config", None)) is not None:
            generation.save_pretrained(self._unfinished)
        copy_tokenizer(source, self._unfinished)
        self._writer = FolderWriter(self._unfinished)

    def put(self, bucket: Bucket) -> None:
        self._writer.write(bucket.tensors)

    def finish(self) -> None:
        self._writer.finish(indexes_one=False)
        replace_folder(self._unfinished, self._path)
