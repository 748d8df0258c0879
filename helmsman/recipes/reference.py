"""The frozen model of the start, whose log-probabilities a loss compares with."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from helmsman import TrainController
from helmsman.api.errors import GroupCallError, StartError, WorkerFailedError

log = logging.getLogger(__name__)


class Reference:
    """Computes log-probabilities by frozen ranks, which are rebuilt when one dies: they have no
    state of their own.

    Args:
        ranks: the controller of the frozen job.
        max_recoveries: rebuilds of the whole run, beyond which a loss ends it.
        takes_turns: the ranks wake for a call and sleep afterwards, since others use their devices.
    """

    def __init__(self, ranks: TrainController, max_recoveries: int, *, takes_turns: bool) -> None:
        self._ranks, self._most, self._takes_turns = ranks, max_recoveries, takes_turns

    def logprobs(self, samples: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the log-probabilities of each sample's tokens, (T,) float32.

        Raises: the loss of a rank beyond ``max_recoveries``; as TrainController.forward.
        """
        is_lost = False
        while True:
            try:
                if is_lost:
                    self._ranks.recover()
                if self._takes_turns:
                    self._ranks.wake()
                logprobs: list[Any] = self._ranks.forward(samples)
                if self._takes_turns:
                    self._ranks.sleep()
            except (WorkerFailedError, GroupCallError, StartError) as error:
                errors = error.errors.values() if isinstance(error, GroupCallError) else [error]
                losses = (e for e in errors if isinstance(e, WorkerFailedError | StartError))
                loss = next(losses, None)
                if loss is None:
                    raise
                is_lost, said = True, str(loss).split("\n", 1)[0]
                if self._ranks.num_recoveries >= self._most:
                    log.warning(
                        "a rank of the reference was lost, and checkpoints.max_recoveries is %d: "
                        "%s",
                        *(self._most, said),
                    )
                    raise
                log.warning(
                    "a rank of the reference was lost, and all of them are rebuilt: %s", said
                )
            else:
                return logprobs
