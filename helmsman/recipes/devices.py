"""Devices and weights of trainer and instances: hand-over, sync, and a check of the weights."""

from __future__ import annotations

from pathlib import Path

from helmsman import DeviceHandoff, RolloutController, TrainController, WeightSync
from helmsman.recipes.prompts import Dataset
from helmsman.recipes.roles import make_sync, sends_adapters
from helmsman.recipes.run import Clock
from helmsman.recipes.settings import GRPOSettings
from helmsman.recipes.weight_check import WeightCheck


class Devices:
    """Gives the devices and the weights to the side that works next.

    With devices of their own, the instances receive the weights by ``sync`` after each step. Shared
    devices are handed over in turns: the trainer owns them between steps, for checkpoints, and a
    hand-over to the instances sends the weights. The methods of the other case do nothing, and
    without instances all do nothing.

    Args:
        settings: The settings of the run.
        trainer: The controller of the policy.
        rollout: The controller of the rollout instances; None without any.
        dataset: Prompts for the check.
        clock: Measures the phases.
    """

    def __init__(
        self,
        settings: GRPOSettings,
        trainer: TrainController,
        rollout: RolloutController | None,
        dataset: Dataset,
        clock: Clock,
    ) -> None:
        self._trainer, self._rollout, self._clock = trainer, rollout, clock
        self._sync: WeightSync | None = None
        self._turns: DeviceHandoff | None = None
        self._check: WeightCheck | None = None
        if rollout is None:
            return
        self._sync = make_sync(settings, trainer, rollout)
        if settings.cluster.takes_turns:
            # Adapters need the base model's weights, which level 2 drops. Over-sampled episodes may
            # have open requests when a batch is complete: hold them until the instances have the
            # devices again.
            level = 1 if sends_adapters(settings) else 2
            self._turns = DeviceHandoff(
                trainer, rollout, self._sync, level=level, hold_requests=True
            )
        rows = [*dataset.held_out, *dataset.train][: settings.check.prompts]
        prompts, path = [row.prompt_ids for row in rows], Path(settings.out) / "checks.jsonl"
        self._check = WeightCheck(prompts, settings.check, path) if settings.check.weights else None

    def begin(self, step: int, checkpoint: Path | None) -> None:
        """Send the trainer's weights to the instances; see Part."""
        if self._sync is not None and self._turns is None:
            self._sync.push()

    def save(self, folder: Path) -> None:
        """See Part."""

    def to_rollout(self) -> None:
        """Hand shared devices to the instances, with the current weights."""
        if self._turns is not None:
            with self._clock.phase("hand_over"):
                self._turns.to_rollout()

    def to_training(self, check_of: int = 0) -> dict[str, float]:
        """Hand shared devices to the trainer.

        Args:
            check_of: Number of a step, to check the instances' weights before; 0 for no check.

        Returns:
            Metrics of the check.
        """
        if self._turns is None or self._rollout is None:
            return {}
        check = self._check if check_of else None
        answers = {} if check is None else check.ask(self._rollout)
        with self._clock.phase("hand_over"):
            self._turns.to_training()
        return {} if check is None else check.compare(self._trainer, answers, check_of)

    def sync(self, step: int) -> dict[str, float]:
        """Send the weights of a step to instances on devices of their own, and check them.

        Returns:
            Metrics of sync and check.
        """
        if self._sync is None or self._rollout is None or self._turns is not None:
            return {}
        with self._clock.phase("sync"):
            metrics = {"sync/bytes": float(self._sync.push().num_bytes)}
        if self._check is not None:
            with self._clock.phase("check"):
                answers = self._check.ask(self._rollout)
                metrics |= self._check.compare(self._trainer, answers, step)
        return metrics
