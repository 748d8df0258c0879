"""Buffers in host or device memory that processes of one user share on one machine."""

from __future__ import annotations

import mmap
import os
import pickle
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

_DEVICE_ARGUMENT = 6
"""Index of the device among the arguments with which torch and torch_npu rebuild a tensor."""


class DeviceSharingError(RuntimeError):
    """Two processes cannot share memory of their device."""


class HostBuffer:
    """An anonymous kernel file of ``num_bytes``, mapped as ``tensor``, (N,) uint8.

    ``path`` is its owner's entry in /proc, by which other processes open it, so no name can be left
    behind.
    """

    def __init__(self, num_bytes: int) -> None:
        self._descriptor = os.memfd_create("helmsman-weights", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._descriptor, num_bytes)
            self.tensor = torch.frombuffer(
                mmap.mmap(self._descriptor, num_bytes), dtype=torch.uint8
            )
        except BaseException:
            self.close()
            raise
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Close the file. Mappings stay valid."""
        os.close(self._descriptor)


class SharedBuffer:
    """Memory of a device, (N,) uint8, with a handle by which ``open_buffer`` maps it elsewhere.

    Raises:
        DeviceSharingError: The device's memory cannot be shared.
        torch.OutOfMemoryError: The device has too little memory.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._on_host: HostBuffer | None = None
        handle: Any
        try:
            if device.type == "cpu":
                self._on_host = HostBuffer(num_bytes)
                self.tensor, handle = self._on_host.tensor, self._on_host.path
            else:
                self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
                handle = reduce_tensor(self.tensor)
        except torch.OutOfMemoryError:
            raise
        except (OSError, RuntimeError) as error:
            raise _not_shared(error) from error
        self.handle = pickle.dumps(handle)

    def close(self) -> None:
        """Release the memory, once no other process maps it."""
        del self.tensor
        if self._on_host is not None:
            self._on_host.close()


def open_buffer(handle: bytes, device: torch.device) -> torch.Tensor:
    """Map the buffer of another process.

    Args:
        handle: From its SharedBuffer. It is unpickled, so its sender must be trusted.
        device: Device of this process, the same physical one.

    Returns:
        (N,) uint8; its memory is mapped as long as the tensor or a view of it exists.

    Raises:
        DeviceSharingError: The memory cannot be mapped.
    """
    found: Any = pickle.loads(handle)
    try:
        if device.type == "cpu":
            with open(found, "r+b") as file:
                return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        rebuild, arguments = found
        own = list(arguments)
        # Processes number their visible devices differently.
        own[_DEVICE_ARGUMENT] = device.index
        mapped: torch.Tensor = rebuild(*own)
    except (OSError, RuntimeError) as error:
        raise _not_shared(error) from error
    return mapped


def _not_shared(error: Exception) -> DeviceSharingError:
    said = str(error).split("\n", 1)[0]
    return DeviceSharingError(
        f"two processes cannot share memory of their device: {type(error).__name__}: {said}. "
        "expandable_segments in PYTORCH_CUDA_ALLOC_CONF needs the system call pidfd_getfd, which "
        "containers may forbid; unset it, or use ViaMemory"
    )


def release_shared(device: torch.device) -> None:
    """Return the memory of closed buffers to the device."""
    if device.type != "cpu":
        runtime: Any = getattr(torch, device.type)
        if hasattr(runtime, "ipc_collect"):
            runtime.ipc_collect()
        runtime.empty_cache()
