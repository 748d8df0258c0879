"""How an engine is extended: a subclass, named to the controller by its import path."""

from __future__ import annotations

import msgspec

from helmsman.engines.train import FSDPTrainEngine


class Trainer(FSDPTrainEngine):
    """A train engine whose learning rate the script sets, since supervised training and GRPO want different ones."""

    def set_lr(self, lr: float, num_warmup_steps: int = 0) -> None:
        """Use this learning rate from the next step on, after ``num_warmup_steps`` counted from the first step of all."""
        self.config = msgspec.structs.replace(self.config, lr=lr, num_warmup_steps=num_warmup_steps)
