"""Host placement of a training state: offload between steps, and sleep."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from helmsman.api.platforms import current_platform
from helmsman.engines._train.parallel import reshard
from helmsman.engines._weights.gathering import gather
from helmsman.engines._weights.host_swap import HostSwap
from helmsman.engines.train_config import Offload


def offload_policy(offload: Offload) -> OffloadPolicy:
    if offload == "all":
        return CPUOffloadPolicy(pin_memory=current_platform.device_type != "cpu")
    return OffloadPolicy()


def place(model: nn.Module, device: torch.device, offload: Offload) -> nn.Module:
    """Move a sharded model to its device.

    With ``all`` only its buffers move, as FSDP moves parameters when they are used.
    """
    if offload != "all":
        return model.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    return model


class HostMemory:
    """Tracks and moves a training engine's model and optimizer between device and host."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._between_steps = HostSwap()
        self._asleep = HostSwap()
        self.is_asleep = False

    def sleep(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Move all of it to the host; a frozen model has no optimizer. Idempotent."""
        if self.is_asleep:
            return
        model.zero_grad(set_to_none=True)
        reshard(model)  # gathered parameters are not shards, and would stay on the device
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
        """Move all of it back. Idempotent.

        Raises torch.OutOfMemoryError if the device has too little memory; the state stays on the
        host.
        """
        try:
            self._asleep.restore()
        except BaseException:
            current_platform.empty_cache()
            raise
        self.is_asleep = False

    def gather(
        self, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None
    ) -> Iterator[torch.Tensor]:
        """See ``gathering.gather``. During sleep, one shard at a time is on the device."""
        return gather(tensors, dtype, self._asleep.present if self.is_asleep else None)

    @contextlib.contextmanager
    def optimizer_present(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Keep the optimizer's state with its parameters during the block."""
        self._between_steps.restore()
        try:
            yield
        finally:
            if self._offload == "optimizer":
                self._between_steps.offload(_on_device(_state_tensors(optimizer)))

    def offload_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Place a new optimizer's state as between steps, and drop the previous one's."""
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
    """Select the tensors on the platform's device; FSDP's pinned host tensors stay as they are."""
    return [tensor for tensor in tensors if tensor.device.type == current_platform.device_type]
