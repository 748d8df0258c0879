"""Who has the devices: trainers and rollout instances that are colocated take turns on them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from helmsman import RolloutController, TrainController


class Turns:
    """Hands the devices from the trainer to the instances and back. The trainer has them at the start, and after every turn.

    Args:
        trainer, rollout: both initialized.
        push: brings the weights.
        are_taken: False where each has devices of its own; then nothing is handed over, and a push is the script's to do.
    """

    def __init__(
        self, trainer: TrainController, rollout: RolloutController, push: Callable[[], object], *, are_taken: bool
    ) -> None:
        self._trainer, self._rollout, self._push = trainer, rollout, push
        self.are_taken = are_taken
        if are_taken:
            on_all(rollout, "sleep", 2)

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        """The instances have the devices, and the weights of now, for the block."""
        if not self.are_taken:
            yield
            return
        on_all(self._rollout, "wake", weights_only=True)  # room for the weights, while the trainer still has the rest
        try:
            self._push()
            on_all(self._trainer, "sleep")
            on_all(self._rollout, "wake")
            yield
        finally:
            # Weights are brought anew in the next turn; so nothing has to wait on the host.
            on_all(self._rollout, "sleep", 2)
            on_all(self._trainer, "wake")


def on_all(role: TrainController | RolloutController, method: str, *args: Any, **kwargs: Any) -> None:
    """Call a method of all engines of a role at once. Raises: the first error, when all have ended."""

    async def call() -> None:
        calls = (
            role.scheduler.async_call_engine(worker.id, method, role.engine_name, *args, **kwargs) for worker in role.workers
        )
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    asyncio.run(call())
