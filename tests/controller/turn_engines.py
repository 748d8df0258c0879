"""Real engines that run out of memory or die in a method that the test chooses."""

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
    "cuda": lambda: torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 78 GiB in all."
    ),
    "npu": lambda: RuntimeError(
        "NPU out of memory. Tried to allocate 20.00 MiB (NPU 0; 60.97 GiB total capacity)"
    ),
    "other": lambda: RuntimeError("the mesh is bent"),
}


class _Faulty:
    """Meets a planned fault in the next call of a method."""

    _planned = ("", "")

    def plan(self, method: str, kind: str) -> None:
        """Let the next call of ``method`` fail with a key of FAULTS, or die for 'kill'."""
        self._planned = method, kind

    def _meet(self, method: str) -> None:
        planned, kind = self._planned
        if method == planned:
            self._planned = "", ""
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise FAULTS[kind]()


class Trainer(_Faulty, FSDPTrainEngine):
    """An FSDPTrainEngine that meets faults."""

    def train_batch(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn | str,
        loss_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, float]:
        self._meet("train_batch")
        return super().train_batch(samples, loss_fn, loss_kwargs)

    def sleep(self) -> None:
        self._meet("sleep")
        super().sleep()

    def wake(self) -> None:
        self._meet("wake")
        super().wake()

    def is_asleep(self) -> bool:
        """Return whether its state is on the host."""
        return self._memory.is_asleep

    def pid(self) -> int:
        return os.getpid()


class Rollout(_Faulty, HFRolloutEngine):
    """An HFRolloutEngine that meets faults."""

    async def agenerate(self, request: GenerationRequest) -> GenerationResult:
        self._meet("agenerate")
        return await super().agenerate(request)

    async def update_weights(self, weights: Weights, version: int) -> int:
        self._meet("update_weights")
        return await super().update_weights(weights, version)

    async def sleep(self, level: int = 1) -> None:
        self._meet("sleep")
        await super().sleep(level)

    async def wake(self, *, weights_only: bool = False) -> None:
        self._meet("wake")
        await super().wake(weights_only=weights_only)

    def is_asleep(self) -> bool:
        """Return whether it accepts no request."""
        return not self._running().state.has_cache
