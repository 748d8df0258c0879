"""Weights on their way into vLLM's processes on this machine: buckets in shared memory, written once and mapped by each.

A bucket is an anonymous file of the kernel's, which the others open by way of its owner's entry in /proc: it has no name that
could be left behind. Tensors on a device go as handles of its driver's for memory of other processes.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from helmsman.engines.weight_transfer import as_bytes

_ALIGNMENT = 64


class SharedBucket:
    """A copy of tensors that other processes of this user on this machine can map; they keep it for as long as they use it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        entries: dict[str, list[Any]] = {}
        end = 0
        for name, tensor in tensors.items():
            entries[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end]
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._fd = os.memfd_create("helmsman-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, max(end, 1))
            with mmap.mmap(self._fd, max(end, 1)) as memory:
                _write(memory, tensors, entries)
        except BaseException:
            self.close()
            raise
        self.message = {"path": f"/proc/{os.getpid()}/fd/{self._fd}", "num_bytes": max(end, 1), "entries": entries}
        """What the others need, of plain types."""

    def close(self) -> None:
        """Let go of it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _write(memory: mmap.mmap, tensors: Mapping[str, torch.Tensor], entries: Mapping[str, list[Any]]) -> None:
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    for name, tensor in tensors.items():
        start = entries[name][2]
        whole[start : start + tensor.nbytes].copy_(as_bytes(tensor))
    del whole  # it holds the mapping


def device_message(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """As SharedBucket.message, for tensors on a device, which must stay as they are until they have been read."""
    from torch.multiprocessing.reductions import reduce_tensor

    return {"handles": {name: pickle.dumps(reduce_tensor(tensor)) for name, tensor in tensors.items()}}


def read_message(message: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a message. Those of a bucket are in its memory, without a copy; what is written to them stays here."""
    if "handles" in message:
        rebuilt = {name: pickle.loads(handle) for name, handle in message["handles"].items()}  # by the parent of this process
        return {name: rebuild(*arguments) for name, (rebuild, arguments) in rebuilt.items()}
    with open(message["path"], "rb") as file:
        memory = mmap.mmap(file.fileno(), message["num_bytes"], access=mmap.ACCESS_COPY)
    tensors = {}
    for name, (dtype, shape, start) in message["entries"].items():
        kind: torch.dtype = getattr(torch, dtype)
        count = torch.Size(shape).numel()
        if count:
            tensors[name] = torch.frombuffer(memory, dtype=kind, count=count, offset=start).view(shape)
        else:
            tensors[name] = torch.empty(shape, dtype=kind)
    return tensors


def split(tensors: Mapping[str, torch.Tensor], bucket_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Parts of at most so many bytes, or of one tensor."""
    part: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        if part and num_bytes + tensor.nbytes > bucket_bytes:
            yield part
            part, num_bytes = {}, 0
        part[name] = tensor
        num_bytes += tensor.nbytes
    if part:
        yield part
