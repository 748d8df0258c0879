"""Gathers whole tensors from the shards of a trainer's ranks, many tensors by one collective."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from helmsman.engines._weights.host_swap import storage_of

Present: TypeAlias = Callable[[torch.Tensor], contextlib.AbstractContextManager[None]]
"""Opens a context in which the memory of a tensor can be read."""

# The function has another name since torch 2.13, where the former one warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def type_in(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the type in which a tensor is sent: ``dtype`` if both are floating-point."""
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype


def gather(
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype | None = None,
    present: Present | None = None,
) -> Iterator[torch.Tensor]:
    """Gather possibly sharded tensors on their devices. A collective of their shards' ranks.

    Its communication is over when it returns, so only ranks that need the tensors iterate. Tensors
    that are sharded over the same ranks are gathered together, after they have been cast, so that
    ranks exchange no more bytes than the results have.

    Args:
        tensors: Tensors in the same order on every rank.
        dtype: Type of the results that are floating-point; None keeps theirs.
        present: Makes a tensor's shard readable; the results then share no memory with it. None if
            all shards are readable.

    Returns:
        The whole tensors, in order. An unsharded tensor may be returned as it is.
    """
    together: dict[tuple[DeviceMesh, tuple[int, ...], torch.dtype], list[int]] = {}
    splits: dict[int, list[_Split]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor) and (found := _splits_of(tensor)):
            splits[index] = found
            axes = tuple(sorted(split.axis for split in found))
            key = tensor.device_mesh, axes, type_in(tensor, dtype)
            together.setdefault(key, []).append(index)
    joined: dict[int, Callable[[], torch.Tensor]] = {}
    for (mesh, axes, kind), indices in together.items():
        if len(indices) > 1:
            packed = _Packed(mesh, axes, kind)
            for index in indices:
                joined[index] = packed.add(tensors[index], splits[index])
            packed.gather(present)
    alone = {
        index: _gather_alone(tensor, type_in(tensor, dtype), present)
        for index, tensor in enumerate(tensors)
        if index not in joined
    }
    return (
        alone.pop(index) if index in alone else joined.pop(index)() for index in range(len(tensors))
    )


def _gather_alone(
    tensor: torch.Tensor, dtype: torch.dtype, present: Present | None
) -> torch.Tensor:
    with contextlib.nullcontext() if present is None else present(tensor):
        own = tensor.detach().to(dtype)
        whole = own.full_tensor() if isinstance(own, DTensor) else own
        # The tensor's memory may be released at the end of the block.
        is_shared = storage_of(whole).data_ptr() == storage_of(tensor).data_ptr()
        return whole.clone() if present is not None and is_shared else whole


class _Split(NamedTuple):
    """A division of a tensor among the ranks along one axis of a mesh."""

    axis: int
    dim: int
    num_parts: int

    def part(self, shape: Sequence[int], index: int) -> tuple[int, ...]:
        """Return the shape of a part: as by torch.chunk, the last parts may be smaller."""
        size = shape[self.dim]
        most = -(-size // self.num_parts)
        own = min(size, (index + 1) * most) - min(size, index * most)
        return (*shape[: self.dim], own, *shape[self.dim + 1 :])


def _splits_of(tensor: DTensor) -> list[_Split]:
    """Return how a tensor is divided, outermost first; [] if it is whole or a layout unknown here.

    The answer is the same on all ranks.
    """
    splits: list[_Split] = []
    inner: list[_Split] = []
    for axis, placement in enumerate(tensor.placements):
        num_parts = tensor.device_mesh.size(axis)
        if isinstance(placement, _StridedShard) and num_parts > 1:
            # FSDP's division of a tensor-parallel shard.
            inner.append(_Split(axis, placement.dim, num_parts))
            factor = math.prod(
                tensor.device_mesh.size(later)
                for later, other in enumerate(tensor.placements)
                if later > axis and isinstance(other, Shard) and other.dim == placement.dim
            )
            if factor != placement.split_factor:
                return []
        elif isinstance(placement, Shard) and num_parts > 1:
            splits.append(_Split(axis, placement.dim, num_parts))
        elif not isinstance(placement, Replicate | Shard | _StridedShard):
            return []
    return [*splits, *inner] if len(inner) < 2 else []


class _Packed:
    """Tensors that are sharded along the same axes of a mesh, gathered in one buffer.

    Every rank has its shard of a tensor at the same place of its part of the buffer. Since the last
    ranks may have smaller shards, the place has the size of the first rank's.
    """

    def __init__(self, mesh: DeviceMesh, axes: tuple[int, ...], dtype: torch.dtype) -> None:
        self._mesh, self._axes, self._dtype = mesh, axes, dtype
        self._tensors: list[tuple[torch.Tensor, int]] = []
        """Each with the place where its shard begins."""
        self._size = 0
        self._gathered = torch.empty(0)
        """(ranks along the first axis, ..., elements of one rank)."""

    def add(self, tensor: torch.Tensor, splits: Sequence[_Split]) -> Callable[[], torch.Tensor]:
        """Add a tensor; the result returns it as a whole, once it has been gathered."""
        start, shape = self._size, tuple(tensor.shape)
        self._tensors.append((tensor, start))
        largest = shape
        for split in splits:
            largest = split.part(largest, 0)
        self._size += math.prod(largest)
        return lambda: self._join(shape, start, splits, {})

    def gather(self, present: Present | None) -> None:
        flat = torch.empty(self._size, dtype=self._dtype, device=self._tensors[0][0].device)
        for tensor, start in self._tensors:
            with contextlib.nullcontext() if present is None else present(tensor):
                own = tensor.detach()
                shard = own.to_local() if isinstance(own, DTensor) else own
                flat[start : start + shard.numel()].view(shard.shape).copy_(shard)
        self._tensors = []
        for axis in reversed(self._axes):
            gathered = flat.new_empty(self._mesh.size(axis) * flat.numel())
            _all_gather(gathered, flat, group=self._mesh.get_group(axis))
            flat = gathered
        self._gathered = flat.view(*(self._mesh.size(axis) for axis in self._axes), self._size)

    def _join(
        self, shape: tuple[int, ...], start: int, splits: Sequence[_Split], ranks: dict[int, int]
    ) -> torch.Tensor:
        """Join the parts of these splits, of the ranks with these coordinates by axis."""
        if not splits:
            of_rank = self._gathered[tuple(ranks[axis] for axis in self._axes)]
            return of_rank[start : start + math.prod(shape)].view(shape)
        split, *inner = splits
        parts = [
            self._join(split.part(shape, index), start, inner, {**ranks, split.axis: index})
            for index in range(split.num_parts)
        ]
        return torch.cat(parts, split.dim)
