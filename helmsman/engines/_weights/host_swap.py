"""Tensors whose device memory is released while a host copy keeps their bytes.

A tensor stays the same object, with its shape, dtype and views; only its storage is resized to 0.
FSDP, optimizers and other holders of the tensor need no change, but must not read it meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor

from helmsman.api.platforms import current_platform


class HostBlocks:
    """Host memory that is allocated once and used again; pinned for the tensors of a device.

    torch rounds every pinned allocation up to a power of two and never returns it to the system.
    So the memory consists of blocks whose sizes are powers of two, which together exceed the
    requested bytes by less than 8 MiB.
    """

    _LARGEST, _SMALLEST = 1 << 30, 8 << 20

    def __init__(self) -> None:
        self.blocks: list[torch.Tensor] = []
        self._num_used = 0

    def take(self, num_bytes: int) -> list[torch.Tensor]:
        """Return uint8 tensors of ``num_bytes`` in all; ``reserve`` has made room for them."""
        pieces, start = [], 0
        first, end = self._num_used, self._num_used + num_bytes
        for block in self.blocks:
            if start < end and first < start + len(block):
                pieces.append(block[max(first - start, 0) : end - start])
            start += len(block)
        self._num_used = end
        return pieces

    def reserve(self, num_bytes: int, *, pinned: bool) -> None:
        """Allocate the memory missing for ``num_bytes`` beside the bytes in use."""
        missing = self._num_used + num_bytes - sum(map(len, self.blocks))
        while missing > 0:
            size = min(self._LARGEST, 1 << (missing.bit_length() - 1))
            size = max(size, self._SMALLEST)
            self.blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
            missing -= size

    def release(self) -> None:
        """Let later calls of ``take`` use all of the memory again."""
        self._num_used = 0


class HostSwap:
    """Host copies of tensors; in pinned memory for tensors of a device."""

    def __init__(self) -> None:
        self._swapped: dict[int, _Swapped] = {}
        """By the storage's address in this process."""
        self._memory = HostBlocks()

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy tensors to the host and release their memory.

        Tensors that are already here are skipped, as is memory that cannot be released, such as a
        mapped file's.
        """
        storages = {
            storage._cdata: storage
            for storage in map(storage_of, tensors)
            if storage._cdata not in self._swapped and storage.nbytes() and storage.resizable()
        }
        self._memory.reserve(
            sum(storage.nbytes() for storage in storages.values()),
            pinned=any(storage.device.type != "cpu" for storage in storages.values()),
        )
        new = {key: _Swapped(storage, self._memory) for key, storage in storages.items()}
        current_platform.synchronize()
        for each in new.values():
            each.storage.resize_(0)
        self._swapped.update(new)

    def drop(self, tensors: Iterable[torch.Tensor]) -> None:
        """Free the memory of tensors without saving their contents.

        restore() allocates it again.
        """
        for storage in map(storage_of, tensors):
            if (swapped := self._swapped.get(storage._cdata)) is not None:
                swapped.host = []
            elif storage.nbytes() and storage.resizable():
                self._swapped[storage._cdata] = _Swapped(storage)
                storage.resize_(0)

    def restore(self) -> None:
        """Restore the memory and contents of all tensors, or of none.

        Raises:
            torch.OutOfMemoryError: The device has too little free memory; all tensors stay here.
        """
        try:
            for each in self._swapped.values():
                each.bring()
            current_platform.synchronize()
        except BaseException:
            for each in self._swapped.values():
                each.storage.resize_(0)
            raise
        self.clear()

    @contextlib.contextmanager
    def present(self, tensor: torch.Tensor) -> Iterator[None]:
        """Make one tensor readable during the block, even if it is swapped out."""
        swapped = self._swapped.get(storage_of(tensor)._cdata)
        if swapped is None:
            yield
            return
        try:
            swapped.bring()
            yield
        finally:
            current_platform.synchronize()
            swapped.storage.resize_(0)

    def clear(self) -> None:
        self._swapped = {}
        self._memory.release()


class _Swapped:
    def __init__(self, storage: torch.UntypedStorage, memory: HostBlocks | None = None) -> None:
        self.storage, self.num_bytes = storage, storage.nbytes()
        self.host: list[torch.Tensor] = []
        """The contents, in pieces; empty if they are not kept."""
        if memory is not None:
            self.host = memory.take(self.num_bytes)
            for piece, own in self._pieces():
                piece.copy_(own, non_blocking=True)

    def bring(self) -> None:
        self.storage.resize_(self.num_bytes)
        for piece, own in self._pieces():
            own.copy_(piece, non_blocking=True)

    def _pieces(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        if not self.host:
            return ()
        sizes = [len(piece) for piece in self.host]
        return zip(self.host, _bytes(self.storage).split(sizes), strict=True)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
