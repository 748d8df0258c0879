"""Train engines whose ranks are killed or stopped at a moment that the test chooses."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from helmsman.engines.losses import resolve_loss
from helmsman.engines.train import FSDPTrainEngine
from tests.contract.engines import hold_interpreter
from tests.controller.engines import CountingRollout, RecordingTrainer

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
RAISE = "raise"
HOLD = "hold"
HELD = "held"
"""Name of the file that a test passes to ``release_interpreter`` to end the fault ``HOLD``."""


def plan_fault(folder: Path, moment: str, rank: int, kind: str = "kill") -> None:
    """Let a rank meet a fault, once, the next time that it reaches a moment.

    Args:
        folder: Folder of the faults, which the engine knows.
        moment: Moment at which the engine calls ``meet_fault``.
        rank: The rank.
        kind: A key of SIGNALS, RAISE or HOLD.
    """
    (folder / f"{moment}-{rank}-{kind}").touch()


def meet_fault(folder: str, moment: str) -> None:
    """Meet the fault that is planned for this moment, if any."""
    for kind in (*SIGNALS, RAISE, HOLD):
        planned = Path(folder, f"{moment}-{os.environ['RANK']}-{kind}")
        if not planned.exists():
            continue
        planned.unlink()
        if kind == RAISE:
            raise OSError(f"the device is busy at {moment}")
        if kind == HOLD:
            hold_interpreter(str(planned.with_name(HELD)))
            continue
        # To this thread: another one may handle SIGSTOP late, while this one finishes the step.
        signal.pthread_kill(threading.get_ident(), SIGNALS[kind])


def sft_with_faults(
    logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, faults: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss 'sft' with a fault between the collectives of the forward and backward passes."""
    meet_fault(faults, "loss")
    return resolve_loss("sft")(logprobs, batch)


class FaultyTrainEngine(FSDPTrainEngine):
    """Trainer with a model that meets faults when it is built, saves and loads."""

    def __init__(self, faults: str, **fields: Any) -> None:
        super().__init__(**fields)
        self.faults = faults

    def initialize(self) -> None:
        meet_fault(self.faults, "initialize")
        super().initialize()

    def save(self, path: str) -> None:
        meet_fault(self.faults, "save")
        super().save(path)
        meet_fault(self.faults, "saved")

    def save_in_background(self, path: str) -> None:
        meet_fault(self.faults, "save")
        super().save_in_background(path)
        meet_fault(self.faults, "begun")

    def load(self, path: str) -> None:
        meet_fault(self.faults, "load")
        super().load(path)

    def pid(self) -> int:
        return os.getpid()


class FaultyTrainer(RecordingTrainer):
    """Trainer without a model that meets faults; its loss depends on the samples of all steps."""

    def __init__(self, faults: str) -> None:
        super().__init__()
        self.faults, self.total = faults, 0

    def initialize(self) -> None:
        meet_fault(self.faults, "initialize")

    def train_batch(
        self, samples: Sequence[Any], loss_fn: Any, loss_kwargs: Mapping[str, Any] | None
    ) -> dict[str, float]:
        meet_fault(self.faults, "loss")
        self.version += 1
        self.total += sum(sum(sample["input_ids"]) for sample in samples)
        return {"loss": float(self.total)}

    def save(self, path: str) -> None:
        if os.environ["RANK"] == "0":
            os.mkdir(path)
            Path(path, "state").write_text(f"{self.version} {self.total}")

    def load(self, path: str) -> None:
        if not Path(path, "state").exists():
            raise FileNotFoundError(f"{path} has no state")
        self.version, total = map(int, Path(path, "state").read_text().split())
        self.total = total if os.environ["RANK"] == "0" else 0

    def pid(self) -> int:
        return os.getpid()


class AnyWeightsRollout(CountingRollout):
    """Rollout engine that holds requests and accepts the weights of any model."""

    def __init__(self) -> None:
        super().__init__(gated=True)

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> int:
        assert weights
        return await super().update_weights({"weight": list(weights)}, version)
