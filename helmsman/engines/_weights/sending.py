"""Sends the full parameters of a trainer's ranks, bucket by bucket, to a sink on rank 0."""

from __future__ import annotations

import abc
import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from helmsman.engines._models.distributed import failing_together
from helmsman.engines._weights.gathering import type_in

T = TypeVar("T")
Convert = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]
Gather = Callable[[Sequence[torch.Tensor], torch.dtype | None], Iterator[torch.Tensor]]
"""Gathers whole tensors of a dtype from their shards; see ``gathering.gather``."""

_GATHERED_BYTES = 32 << 20
"""Maximum bytes gathered at once. More would not be faster, and every rank allocates them."""


def checksum_of(tensor: torch.Tensor) -> int:
    data: Any = as_bytes(tensor.cpu()).numpy()
    return zlib.crc32(data)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, (N,) uint8, without a copy if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class Bucket(NamedTuple):
    tensors: Mapping[str, torch.Tensor]
    checksums: dict[str, int]


class Sink(abc.ABC, Generic[T]):
    """Consumer of buckets on rank 0."""

    @abc.abstractmethod
    def put(self, bucket: Bucket) -> None:
        """Consume a bucket."""

    @abc.abstractmethod
    def finish(self) -> T:
        """Complete the transfer; return the result for the caller."""

    def give_up(self, error: Exception) -> None:
        """Handle a failure: no more buckets follow."""
        return


class Packer(Generic[T]):
    """Packs full tensors into buckets for a sink.

    Each tensor is replaced by the tensors that ``convert`` returns for its name. A tensor of more
    than ``bucket_bytes`` is a bucket of its own.
    """

    def __init__(
        self,
        sink: Sink[T],
        bucket_bytes: int,
        *,
        convert: Convert | None = None,
        checksum: bool = False,
    ) -> None:
        self.sink = sink
        self._bucket_bytes, self._checksum = bucket_bytes, checksum
        self._convert = convert
        self._tensors: dict[str, torch.Tensor] = {}
        self._num_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        parts = {name: tensor} if self._convert is None else self._convert(name, tensor)
        for part_name, part in parts.items():
            self._add(part_name, part)

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        if self._tensors and self._num_bytes + tensor.nbytes > self._bucket_bytes:
            self._put()
        self._tensors[name] = tensor
        self._num_bytes += tensor.nbytes

    def finish(self) -> T:
        if self._tensors:
            self._put()
        return self.sink.finish()

    def _put(self) -> None:
        checksums = (
            {name: checksum_of(tensor) for name, tensor in self._tensors.items()}
            if self._checksum
            else {}
        )
        self.sink.put(Bucket(self._tensors, checksums))
        self._tensors, self._num_bytes = {}, 0


def send_all(
    tensors: Mapping[str, torch.Tensor],
    gather: Gather,
    dtype: torch.dtype | None,
    bucket_bytes: int,
    pack: Callable[[contextlib.ExitStack], Packer[T]] | None,
    what: str,
) -> T | None:
    """Send tensors under their names to rank 0's sink; return its result on rank 0. A collective.

    Every rank takes part until the end, even after rank 0 has failed. At most ``bucket_bytes`` are
    gathered at once, unless one tensor has more. ``pack`` makes rank 0's packer, with an exit stack
    that closes at the end of this call; it is None on other ranks.

    Raises:
        Exception: The error of rank 0, on rank 0.
        RuntimeError: Rank 0 failed, on the other ranks.
    """
    packer: Packer[T] | None = None
    result: T | None = None
    error: Exception | None = None
    with contextlib.ExitStack() as stack:
        try:
            packer = pack(stack) if pack is not None else None
        # Raised below, after this rank has taken part in the remaining collectives.
        except Exception as exc:  # noqa: BLE001
            error = exc
        for batch in _batches(tensors, dtype, min(bucket_bytes, _GATHERED_BYTES)):
            try:
                wholes = gather(list(batch.values()), dtype)
            except Exception as exc:
                if packer is not None:
                    packer.sink.give_up(error or exc)
                raise  # a rank has left or is late, so the collectives are over
            try:
                if packer is not None and error is None:
                    for name, whole in zip(batch, wholes, strict=True):
                        packer.add(name, whole)
            except Exception as exc:  # noqa: BLE001 - as above
                error = exc
            del wholes  # their memory is for the next ones
        try:
            if packer is not None and error is None:
                result = packer.finish()
        except Exception as exc:  # noqa: BLE001 - as above
            error = exc
        with failing_together(what):
            if error is not None:
                if packer is not None:
                    packer.sink.give_up(error)
                raise error
    return result


def _batches(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, num_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield successive tensors that have at most so many bytes together, or are alone."""
    batch: dict[str, torch.Tensor] = {}
    left = num_bytes
    for name, tensor in tensors.items():
        size = tensor.numel() * type_in(tensor, dtype).itemsize
        if batch and size > left:
            yield batch
            batch, left = {}, num_bytes
        batch[name] = tensor
        left -= size
    if batch:
        yield batch
