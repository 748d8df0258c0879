"""The reference model: the initial model, for reference log-probabilities."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from helmsman import TrainController
from helmsman.api.errors import GroupCallError, StartError, WorkerFailedError
from helmsman.recipes.roles import awake, takes_turns
from helmsman.recipes.settings import RunSettings

log = logging.getLogger(__name__)


class Reference(abc.ABC):
    """Computes log-probabilities by the initial model."""

    def add_logprobs(self, samples: Sequence[dict[str, Any]]) -> None:
        """Add ``ref_logprobs`` to the samples, (T,) float32 each."""
        tokens = [{"input_ids": sample["input_ids"]} for sample in samples]
        for sample, logprobs in zip(samples, self.logprobs(tokens), strict=True):
            sample["ref_logprobs"] = logprobs

    @abc.abstractmethod
    def logprobs(self, tokens: Sequence[dict[str, Any]]) -> list[Any]:
        """Return the log-probabilities of samples, (T,) float32 each."""


class BaseReference(Reference):
    """The base model of a trainer of adapters, which takes no memory of its own."""

    def __init__(self, trainer: TrainController) -> None:
        self._trainer = trainer

    def logprobs(self, tokens: Sequence[dict[str, Any]]) -> list[Any]:
        """See Reference."""
        return self._trainer.forward(tokens, base=True)


class FrozenReference(Reference):
    """A frozen copy of the initial model on ranks of its own.

    When a rank dies, all ranks are rebuilt: they have no state to restore.

    Args:
        ranks: The controller of the frozen job.
        settings: The settings of the run: ``checkpoints.max_recoveries`` rebuilds at most. Where
            devices are shared, the ranks wake for a call and sleep afterwards.
    """

    def __init__(self, ranks: TrainController, settings: RunSettings) -> None:
        self._ranks, self._most = ranks, settings.checkpoints.max_recoveries
        self._takes_turns = takes_turns(settings, ranks.role)

    def logprobs(self, tokens: Sequence[dict[str, Any]]) -> list[Any]:
        """See Reference.

        Raises:
            WorkerFailedError: A rank was lost after ``max_recoveries`` rebuilds.
            StartError: A rebuild failed, and ``max_recoveries`` is reached.
            GroupCallError: Several ranks failed.
        """
        return self._call(lambda: self._ranks.forward(tokens))

    def top_choices(
        self, tokens: Sequence[dict[str, Any]], num_choices: int, num_ids: int
    ) -> list[Any]:
        """Return the result of TrainController.forward_top; raises as ``logprobs``."""
        return self._call(lambda: self._ranks.forward_top(tokens, num_choices, num_ids))

    def _call(self, forward: Callable[[], list[Any]]) -> list[Any]:
        is_lost = False
        while True:
            try:
                if is_lost:
                    self._ranks.recover()
                with awake(self._ranks, self._takes_turns):
                    return forward()
            except (WorkerFailedError, GroupCallError, StartError) as error:
                errors = error.errors.values() if isinstance(error, GroupCallError) else [error]
                losses = (e for e in errors if isinstance(e, WorkerFailedError | StartError))
                loss = next(losses, None)
                if loss is None:
                    raise
                is_lost, said = True, str(loss).split("\n", 1)[0]
                is_last = self._ranks.num_recoveries >= self._most
                limit = f"checkpoints.max_recoveries is {self._most}"
                fate = limit if is_last else "all its ranks are rebuilt"
                log.warning("a rank of %s was lost; %s: %s", self._ranks.role, fate, said)
                if is_last:
                    raise


def make_reference(ranked: Mapping[str, TrainController], settings: RunSettings) -> Reference:
    """Return the reference: ranks of its own, or the base model of a trainer of adapters.

    Args:
        ranked: The controllers of the run by role.
        settings: The settings of the run.
    """
    ranks = ranked.get("reference")
    return BaseReference(ranked["train"]) if ranks is None else FrozenReference(ranks, settings)
