"""The reference model: a frozen copy of the initial model, for reference log-probabilities."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from helmsman import TrainController
from helmsman.api.errors import GroupCallError, StartError, WorkerFailedError

log = logging.getLogger(__name__)


class Reference:
    """Computes log-probabilities on frozen ranks.

    When a rank dies, all ranks are rebuilt: they have no state to restore.

    Args:
        ranks: The controller of the frozen job.
        max_recoveries: Maximum rebuilds in the whole run; a further loss is raised.
        takes_turns: Whether devices are shared: the ranks wake for a call and sleep afterwards.
    """

    def __init__(self, ranks: TrainController, max_recoveries: int, *, takes_turns: bool) -> None:
        self._ranks, self._most, self._takes_turns = ranks, max_recoveries, takes_turns

    def logprobs(self, samples: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the log-probabilities of each sample's tokens, (T,) float32.

        Raises:
            WorkerFailedError: A rank was lost after ``max_recoveries`` rebuilds.
            StartError: A rebuild failed, and ``max_recoveries`` is reached.
            GroupCallError: Several ranks failed.
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
                        "a rank of the reference model was lost, and checkpoints.max_recoveries "
                        "is %d: %s",
                        *(self._most, said),
                    )
                    raise
                log.warning(
                    "a rank of the reference model was lost; all its ranks are rebuilt: %s", said
                )
            else:
                return logprobs
