"""Models that get their weights from a folder after they have been sharded.

Each rank reads its own shards from the folder's files, which are mapped into memory, so it never
has more of the model than these and one tensor of a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from helmsman.api.engines import Head
from helmsman.engines._models.checkpoint import read_parameters
from helmsman.engines._models.checkpoint_files import is_checkpoint
from helmsman.engines._models.distributed import named_tensors
from helmsman.engines._models.files import WeightFiles
from helmsman.engines._models.heads import (
    AUTO_CLASSES,
    CONFIG_ENTRIES,
    check_saved_head,
    give_values,
)
from helmsman.engines._models.model import seeded
from helmsman.engines._weights.checkpoint_names import CheckpointNames, Region

Sources = Mapping[str, Mapping[str, Region]]
"""Regions of the tensors in files: name in the model -> name in files -> region."""


def defer_model(
    folder: str, *, seed: int, dtype: torch.dtype, head: Head = "lm"
) -> DeferredModel | None:
    """Describe the model of a folder without its weights.

    Args:
        folder: Folder in the Hugging Face layout, or a checkpoint.
        seed: Seed of a value head that the folder lacks.
        dtype: Type of the parameters.
        head: With ``lm`` the outputs have ``logits``; with ``value`` they are (B, T) float32.

    Returns:
        The model; None if the files cannot be read piece by piece, because they are quantised or
        have other names and shapes than the model's class declares.

    Raises:
        ValueError: The folder's model has a value head and ``head`` is ``lm``.
    """
    check_saved_head(folder, head, exact=is_checkpoint(folder))
    config = AutoConfig.from_pretrained(folder, local_files_only=True, **CONFIG_ENTRIES[head])
    if getattr(config, "quantization_config", None) is not None:
        return None
    with torch.device("meta"):
        model: nn.Module = AUTO_CLASSES[head].from_config(config, dtype=dtype).eval()
    sources: Sources = {}
    drawn: list[str] = []
    if not is_checkpoint(folder):
        names = CheckpointNames(model)
        try:
            sources = {name: names.regions(name) for name in named_tensors(model)}
        except ValueError:
            return None
        with WeightFiles(folder) as files:
            missing = [
                name
                for name, parts in sources.items()
                if any(files.shapes.get(part) != list(each.shape) for part, each in parts.items())
            ]
        drawn = [name for name in missing if head == "value" and name.startswith("score.")]
        if drawn != missing:
            return None
    return DeferredModel(folder, model, sources, _initialized(model, drawn, seed), head)


class DeferredModel:
    """A model on the meta device, except for buffers that no file has."""

    def __init__(
        self,
        folder: str,
        model: nn.Module,
        sources: Sources,
        drawn: Mapping[str, torch.Tensor],
        head: Head,
    ) -> None:
        self.model = model
        if head == "value":
            give_values(model)
        self._folder, self._sources, self._drawn = folder, sources, drawn
        self._names = set(named_tensors(model))
        """Tensors to read; adapters come later."""

    @torch.no_grad()
    def read(self, device: torch.device) -> None:
        """Allocate this rank's shards on a device, and read them.

        Raises:
            ValueError: The checkpoint is incomplete, or of another model.
            OSError: The files cannot be read.
        """
        buffers = list(_other_buffers(self.model))
        self.model.to_empty(device=device)
        if not isinstance(self.model, FSDPModule):  # which keeps tied parameters tied
            self.model.tie_weights()  # type: ignore[operator]
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
        if not self._sources:
            read_parameters(self._folder, self.model, self._names)
            return
        fill(self.model, self._drawn)
        with WeightFiles(self._folder) as files:
            for name, tensor in named_tensors(self.model).items():
                shard, offsets = _shard_of(tensor)
                if name in self._sources and name not in self._drawn and shard.numel():
                    _fill(shard, offsets, tensor.shape, self._sources[name], files)


@torch.no_grad()
def fill(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Copy whole tensors on the host into this rank's shards of the parameters of these names."""
    for name, tensor in named_tensors(model).items():
        if name in values:
            shard, offsets = _shard_of(tensor)
            shard.copy_(values[name][_box(offsets, shard.shape)])


def _other_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    """Yield each buffer that is not stored in files, with its module and its name there."""
    for module in model.modules():
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers.get(name)) is not None:
                yield module, name, buffer


def _initialized(model: nn.Module, drawn: Sequence[str], seed: int) -> dict[str, torch.Tensor]:
    """Compute the buffers that are not stored in files; return new values for ``drawn`` tensors."""
    for module, name, buffer in _other_buffers(model):
        module._buffers[name] = torch.empty_like(buffer, device="cpu")
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # transformers leaves such a tensor as it is
    empty = {name: model.get_parameter(name) for name in drawn}
    for name, parameter in empty.items():
        _set_parameter(model, name, nn.Parameter(torch.empty_like(parameter, device="cpu")))
    with seeded(seed):
        model.initialize_weights()  # type: ignore[operator]
    values = {name: model.get_parameter(name).detach() for name in drawn}
    for name, parameter in empty.items():
        _set_parameter(model, name, parameter)
    return values


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, last = name.rpartition(".")
    setattr(model.get_submodule(module), last, parameter)


def _shard_of(tensor: torch.Tensor) -> tuple[torch.Tensor, Sequence[int]]:
    """Return this rank's part of a tensor, and where it begins in each dimension."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), [0] * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()
    return tensor.to_local(), chunk.offsets


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def _fill(
    shard: torch.Tensor,
    offsets: Sequence[int],
    shape: Sequence[int],
    parts: Mapping[str, Region],
    files: WeightFiles,
) -> None:
    """Copy the tensors of files, or the needed parts, into a shard of a tensor."""
    if len(parts) == 1:
        ((name, region),) = parts.items()
        if region == Region.whole(shape):
            shard.copy_(files.read(name, offsets, shard.shape))
            return
    first = offsets[0] * math.prod(shape[1:])
    last = first + shard.numel()
    has_whole_rows = tuple(shard.shape[1:]) == tuple(shape[1:])
    needed = {name: each for name, each in parts.items() if each.start < last and each.end > first}
    if has_whole_rows and all(first <= each.start and each.end <= last for each in needed.values()):
        for name, region in needed.items():
            region.of(shard, first).copy_(files.read(name, [0] * len(region.shape), region.shape))
        return
    whole = torch.empty(tuple(shape), dtype=shard.dtype)
    for name, region in parts.items():
        region.of(whole).copy_(files.read(name, [0] * len(region.shape), region.shape))
    shard.copy_(whole[_box(offsets, shard.shape)])
