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


class HostSwap:
    """Host copies of tensors; in pinned memory for tensors of a device."""

    def __init__(self) -> None:
        self._swapped: dict[int, _Swapped] = {}
        """By the storage's address in this process."""

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy tensors to the host and release their memory.

        Tensors that are already here are skipped, as is memory that cannot be released, such as a
        mapped file's.
        """
        new: dict[int, _Swapped] = {}
        for storage in map(storage_of, tensors):
            key = storage._cdata
            if (
                key not in self._swapped
                and key not in new
                and storage.nbytes()
                and storage.resizable()
            ):
                new[key] = _Swapped(storage)
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
                swapped.host = None
            elif storage.nbytes() and storage.resizable():
                self._swapped[storage._cdata] = _Swapped(storage, keep=False)
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
        self._swapped = {}

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


class _Swapped:
    def __init__(self, storage: torch.UntypedStorage, *, keep: bool = True) -> None:
        self.storage, self.num_bytes = storage, storage.nbytes()
        self.host: torch.Tensor | None = None
        if keep:
            self.host = torch.empty(
                self.num_bytes, dtype=torch.uint8, pin_memory=storage.device.type != "cpu"
            )
            self.host.copy_(_bytes(storage), non_blocking=True)

    def bring(self) -> None:
        self.storage.resize_(self.num_bytes)
        if self.host is not None:
            _bytes(self.storage).copy_(self.host, non_blocking=True)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
