"""Real engines that return their weights, and that fail in the middle of a transfer."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from helmsman.api.engines import TrainEngine
from helmsman.api.weights import Weights, WeightsInMemory
from helmsman.engines._models.distributed import named_tensors
from helmsman.engines._weights.gathering import gather
from helmsman.engines._weights.group import WeightGroup
from helmsman.engines.rollout import HFRolloutEngine
from helmsman.engines.train import FSDPTrainEngine


class Trainer(FSDPTrainEngine):
    """Returns its weights, and makes a step between two calls on request."""

    _steps_on = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The log of a process that crashes outside of Python contains the stacks of all threads.
        torch._C._set_print_stack_traces_on_fatal_signal(True)  # type: ignore[attr-defined]

    def step_after_next_version(self) -> None:
        """Change the weights after the next call of get_version."""
        self._steps_on = True

    def get_version(self) -> int:
        version = super().get_version()
        if self._steps_on:
            self._steps_on = False
            self.set_version(version + 1)
        return version

    def parameters(self) -> dict[str, torch.Tensor]:
        return {
            name: next(gather([tensor])).cpu().clone()
            for name, tensor in named_tensors(self._built_model()).items()
        }


class Socketless(Trainer):
    """Trainer that cannot share memory of its device."""

    open_weight_socket = TrainEngine.open_weight_socket


class Marked(Trainer):
    """Trainer with weights that make every generated token equal to their version.

    The prompt and the cache do not matter; weights of two mixed versions give other tokens.
    """

    def mark(self, version: int) -> None:
        model = self._built_model()
        sign = 1.0 if version % 2 else -1.0
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                value = torch.zeros(parameter.shape)
                if name == "model.embed_tokens.weight":
                    value += sign
                elif name == "model.norm.weight":
                    value += 1.0
                elif name == "lm_head.weight":
                    value[version % len(value)] = sign
                assert isinstance(parameter, DTensor)
                parameter.copy_(
                    distribute_tensor(value, parameter.device_mesh, parameter.placements)
                )
        self.set_version(version)


class Rollout(HFRolloutEngine):
    """Counts its updates, and dies or stops in the middle of one on request."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.num_updates = self.num_aborts = 0
        self._memory = ("", 0)
        self._fault = 0
        self._fault_after: int | None = None
        self._num_broadcasts = 0
        self._refuses = False

    def parameters(self) -> dict[str, torch.Tensor]:
        return {
            name: tensor.detach().clone()
            for name, tensor in named_tensors(self._running()._model).items()
        }

    def updates(self) -> int:
        return self.num_updates

    def aborts(self) -> int:
        return self.num_aborts

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        self.num_aborts += 1
        return await super().abort(request_ids)

    def memory(self) -> tuple[str, int]:
        """Return device and inode of the memory from which it last read weights."""
        return self._memory

    def fail_in_next_update(self, number: int, num_broadcasts: int | None = None) -> None:
        """Send itself a signal at the begin of the next update, or before one of its broadcasts.

        Args:
            number: The signal.
            num_broadcasts: Broadcasts before the signal; None to join no group.
        """
        self._fault, self._fault_after = number, num_broadcasts

    def num_broadcasts(self) -> int:
        """Return the number of broadcasts of the last update."""
        return self._num_broadcasts

    def refuse_updates(self, refuses: bool) -> None:
        """Raise in each update, before the first collective, or no longer do so."""
        self._refuses = refuses

    async def update_weights(self, weights: Weights, version: int) -> int:
        self.num_updates += 1
        if self._refuses:
            raise NotImplementedError("this engine cannot read them")
        if isinstance(weights, WeightsInMemory):
            self._memory = _inode_of(next(iter(weights.tensors.values())))
        fault, self._fault = self._fault, 0
        if fault and self._fault_after is None:
            _send_to_itself(fault)
        self._count_broadcasts(fault)
        return await super().update_weights(weights, version)

    def _count_broadcasts(self, fault: int) -> None:
        group, self._num_broadcasts = self._running()._weight_group, 0

        def counted(tensor: torch.Tensor) -> None:
            if fault and self._num_broadcasts == self._fault_after:
                _send_to_itself(fault)
            self._num_broadcasts += 1
            WeightGroup.broadcast(group, tensor)

        group.broadcast = counted  # type: ignore[method-assign]


def _send_to_itself(number: int) -> None:
    # To this thread: another one may handle the signal late.
    signal.pthread_kill(threading.get_ident(), number)


def _inode_of(tensor: torch.Tensor) -> tuple[str, int]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, device, inode = line.split()[:5]
        start, end = (int(address, 16) for address in addresses.split("-"))
        if start <= tensor.data_ptr() < end:
            return device, int(inode)
    raise AssertionError("the tensor is in no mapping of this process")


KILL, STOP = int(signal.SIGKILL), int(signal.SIGSTOP)
