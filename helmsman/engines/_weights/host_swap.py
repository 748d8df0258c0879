"""Tensors whose memory is given back while their bytes wait on the host.

A tensor stays the same object, with its shape and type, and so do all views of it: what goes is the
memory behind it. That is why FSDP, an optimizer and whoever else holds tensors need not know.
Nobody may read one meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor

from helmsman.api.platforms import current_platform


class HostSwap:
    """A place for tensors on the host; pinned memory where they come from a device."""

    def __init__(self) -> None:
        self._swapped: dict[int, _Swapped] = {}
        """By the storage's address in this process."""

    def offload(self, tensors: Iterable[torch.Tensor]) -> None:
        """Bring tensors here and give their memory back. What is here already stays, and so does
        memory that cannot be given back, such as a mapped file's.
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
        """Free the memory of tensors whose contents are no longer needed; restore allocates it
        again.
        """
        for storage in map(storage_of, tensors):
            if (swapped := self._swapped.get(storage._cdata)) is not None:
                swapped.host = None
            elif storage.nbytes() and storage.resizable():
                self._swapped[storage._cdata] = _Swapped(storage, keep=False)
                storage.resize_(0)

    def restore(self) -> None:
        """Give all tensors their memory and contents again. When there is no room all of them stay
        here.

        Raises: torch.OutOfMemoryError.
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
        """While the block lasts this one tensor can be read, wherever it is."""
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
