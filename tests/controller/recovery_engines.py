"""A train engine whose ranks are killed or stopped by the test, at the moment that it chose."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from helmsman.engines.losses import resolve_loss
from helmsman.engines.train import FSDPTrainEngine
from tests.contract.engines import hold_interpreter
from tests.controller.engines import CountingRollout

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
RAISE = "raise"
HOLD = "hold"
HELD = "held"
"""File by which a test ends the fault ``HOLD``: ``release_interpreter`` of it."""


def plan_fault(folder: Path, moment: str, rank: int, kind: str = "kill") -> None:
    """Have a rank meet a fault (a key of SIGNALS, RAISE or HOLD) the next time that it comes to
    this moment, and only then.
    """
    (folder / f"{moment}-{rank}-{kind}").touch()


def meet_fault(folder: str, moment: str) -> None:
    """Meet the fault that is planned for this moment, if there is one."""
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
        # To this thread: another that takes SIGSTOP may be scheduled late, and this one would
        # finish the step meanwhile.
        signal.pthread_kill(threading.get_ident(), SIGNALS[kind])


def sft_with_faults(
    logprobs: torch.Tensor, batch: Mapping[str, torch.Tensor], *, faults: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss 'sft', between the collectives of a forward and a backward pass."""
    meet_fault(faults, "loss")
    return resolve_loss("sft")(logprobs, batch)


class FaultyTrainEngine(FSDPTrainEngine):
    """Meets faults when it is built, before and after it saves, and while it loads."""

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


class AnyWeightsRollout(CountingRollout):
    """A rollout engine whose requests are held, and that takes the weights of any model."""

    def __init__(self) -> None:
        super().__init__(gated=True)

    async def update_weights(self, weights: Mapping[str, Any], version: int) -> int:
        assert weights
        return await super().update_weights({"weight": list(weights)}, version)
