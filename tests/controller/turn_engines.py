"""Real engines that meet a device without room, or their end, in the method that the test has chosen."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from helmsman.api.engines import LossFn, Sample
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.weights import Weights
from helmsman.engines.rollout import HFRolloutEngine
from helmsman.engines.train import FSDPTrainEngine

FAULTS = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 78 GiB in all."),
    "npu": lambda: RuntimeError("NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 60.97 GiB total capacity)"),
    "other": lambda: RuntimeError("the mesh is bent"),
}


class _Planned:
    """A fault in the next call of a method."""

    def __init__(self) -> None:
        self.method = self.kind = ""

    def meet(self, method: str) -> None:
        if method == self.method:
            self.method = ""
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise FAULTS[self.kind]()


class Trainer(FSDPTrainEngine):
    """Meets faults."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.planned = _Planned()

    def plan(self, method: str, kind: str) -> None:
        """Have the next call of a method meet this."""
        self.planned.method, self.planned.kind = method, kind

    def train_batch(
        self, samples: Sequence[Sample], loss_fn: LossFn | str, loss_kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """As FSDPTrainEngine's."""
        self.planned.meet("train_batch")
        return super().train_batch(samples, loss_fn, loss_kwargs)

    def sleep(self) -> None:
        """As FSDPTrainEngine's."""
        self.planned.meet("sleep")
        super().sleep()

    def wake(self) -> None:
        """As FSDPTrainEngine's."""
        self.planned.meet("wake")
        super().wake()

    def is_asleep(self) -> bool:
        """Whether its state waits on the host."""
        return self._memory.is_asleep

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()


class Rollout(HFRolloutEngine):
    """Meets faults."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.planned = _Planned()

    def plan(self, method: str, kind: str) -> None:
        """Have the next call of a method meet this."""
        self.planned.method, self.planned.kind = method, kind

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        """As HFRolloutEngine's."""
        self.planned.meet("agenerate")
        return await super().agenerate(request)

    async def update_weights(self, weights: Weights, version: int) -> int:
        """As HFRolloutEngine's."""
        self.planned.meet("update_weights")
        return await super().update_weights(weights, version)

    async def sleep(self, level: int = 1) -> None:
        """As HFRolloutEngine's."""
        self.planned.meet("sleep")
        await super().sleep(level)

    async def wake(self, *, weights_only: bool = False) -> None:
        """As HFRolloutEngine's."""
        self.planned.meet("wake")
        await super().wake(weights_only=weights_only)

    def is_asleep(self) -> bool:
        """Whether it accepts no request."""
        return not self._running().state.has_cache
