"""Which part of a training state waits on the host, and when: offload between steps, and sleep
between turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from helmsman.api.platforms import current_platform
from helmsman.engines._models.distributed import full_tensor
from helmsman.engines._train.parallel import reshard
from helmsman.engines._weights.host_swap import HostSwap, storage_of
from helmsman.engines.train_config import Offload


def offload_policy(offload: Offload) -> OffloadPolicy:
    if offload == "all":
        return CPUOffloadPolicy(pin_memory=current_platform.device_type != "cpu")
    return OffloadPolicy()


def place(model: nn.Module, device: torch.device, offload: Offload) -> nn.Module:
    """Bring a sharded model to its device; with ``all`` its buffers alone, as FSDP brings
    parameters when they are used.
    """
    if offload != "all":
        return model.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return model


class HostMemory:
    """Where a train engine's model and optimizer are: on the device, or waiting on the host."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._between_steps = HostSwap()
        self._asleep = HostSwap()
        self.is_asleep = False

    def sleep(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Have all of it wait on the host; a frozen model has no optimizer. Idempotent."""
        if self.is_asleep:
            return
        model.zero_grad(set_to_none=True)
        reshard(model)  # what the last forward pass has gathered is no shard, and would stay
        self._asleep.offload(
            _on_device(
                [
                    *model.parameters(),
                    *model.buffers(),
                    *([] if optimizer is None else _state_tensors(optimizer)),
                ]
            )
        )
        self.is_asleep = True
        current_platform.empty_cache()

    def wake(self) -> None:
        """Bring all of it back that was there before. Idempotent. Raises: torch.OutOfMemoryError,
        and it sleeps on.
        """
        try:
            self._asleep.restore()
        except BaseException:
            current_platform.empty_cache()
            raise
        self.is_asleep = False

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """As full_tensor, wherever the tensor is; while it sleeps, one at a time is on the
        device.
        """
        with self._asleep.present(tensor):
            whole = full_tensor(tensor)
            # What has one shard is that shard, whose memory goes when this returns.
            is_shard = storage_of(whole)._cdata == storage_of(tensor)._cdata
            return whole.clone() if self.is_asleep and is_shard else whole

    @contextlib.contextmanager
    def optimizer_present(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """While the block lasts the optimizer's state is where its parameters are."""
        self._between_steps.restore()
        try:
            yield
        finally:
            if self._offload == "optimizer":
                self._between_steps.offload(_on_device(_state_tensors(optimizer)))

    def offload_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Have another optimizer's state where it is between steps; the last one's is forgotten."""
        self._between_steps.clear()
        with self.optimizer_present(optimizer):
            pass

    def clear(self) -> None:
        self._between_steps.clear()
        self._asleep.clear()
        self.is_asleep = False


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in states if isinstance(value, torch.Tensor)]


def _on_device(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that are where the platform computes; what FSDP has pinned on the host stays as it
    is.
    """
    return [tensor for tensor in tensors if tensor.device.type == current_platform.device_type]
