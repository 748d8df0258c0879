"""The run loop shared by all recipes: steps, checkpoints, recovery and metrics."""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from helmsman import Checkpoints, RecoverableTraining, RecoveryPolicy, Scheduler, TrainController
from helmsman.api.errors import CheckpointError
from helmsman.recipes.files import write_json
from helmsman.recipes.prompts import Draws, DrawState
from helmsman.recipes.samples import SampleLog
from helmsman.recipes.settings import RunSettings
from helmsman.recipes.trackers import Trackers

DRAWS_FILE = "draws.json"
"""File of a checkpoint that records the used draws."""


_REPORTED = {"reward/mean", "eval/reward", "loss", "tokens_per_second"}
"""Metrics that ``helmsman status`` shows."""


class Clock:
    """Measures the phases of a step, in seconds, and shows them in the run's status."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's duration to a phase."""
        started = time.monotonic()
        try:
            with self._scheduler.reporter.phase(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def metrics(self) -> dict[str, float]:
        """Return the durations as metrics such as ``time/train``."""
        return {f"time/{name}": seconds for name, seconds in self.seconds.items()}


class Loop(abc.ABC):
    """Steps of a run on started workers; recipes implement ``train_step`` and ``evaluate``.

    Args:
        settings: The settings of the run.
        trainer: The controller whose checkpoints the run writes.
        draws: Rows to train on, in an order that depends only on the seed.
        trackers: Receivers of metrics.
    """

    def __init__(
        self, settings: RunSettings, trainer: TrainController, draws: Draws, trackers: Trackers
    ) -> None:
        self._run_settings, self.trainer, self.draws, self.trackers = (
            settings,
            trainer,
            draws,
            trackers,
        )
        self.out = Path(settings.out)
        self.clock = Clock(trainer.scheduler)
        self.sample_log = SampleLog(self.out / "samples.jsonl", settings.tracking)

    def train(self) -> None:
        """Run all steps after the last checkpoint; step 0 is the evaluation before training.

        When a train worker dies, the steps since the last checkpoint are repeated.
        """
        kept = self._run_settings.checkpoints
        policy = RecoveryPolicy(
            checkpoints=self.out / "checkpoints",
            save_every=kept.every,
            num_kept=kept.keep,
            save_in_background=kept.in_background,
            max_recoveries=kept.max_recoveries,
        )
        training = RecoverableTraining(
            *(self.trainer, policy, self.step),
            on_begin=self.begin,
            add_files=self.add_files,
            others=self.others(),
        )
        training.run(0, self._run_settings.steps)
        if kept.export == "last":
            self.trainer.export_hf(str(self.out.absolute() / "model"), kept.export_dtype)

    def others(self) -> Sequence[TrainController]:
        """Return the jobs that are rebuilt together with the trainer."""
        return ()

    def step(self, step: int) -> None:
        """Run one step and log its metrics."""
        scheduler = self.trainer.scheduler
        self.clock = Clock(scheduler)
        scheduler.reporter.figure("step", f"{step} of {self._run_settings.steps}")
        metrics: dict[str, float] = {}
        with self.clock.phase("step"):
            if step:
                metrics |= self.train_step(step)
            if self.evaluation_is_due(step):
                metrics |= self.evaluate(step)
            self.end_step()
        for name in _REPORTED & metrics.keys():
            scheduler.reporter.figure(name, f"{metrics[name]:.4g}")
        version = float(self.trainer.get_version())
        self.trackers.log(step, {**metrics, **self.clock.metrics(), "weight_version": version})

    def begin(self, step: int) -> None:
        """Prepare a step after a start or recovery; drops records of this and later steps."""
        self.close()
        self.trackers.rewind(step - 1)
        self.sample_log.rewind(step - 1)
        self.draws.restore(self._saved_draws())

    def add_files(self, folder: Path) -> None:
        """Add the recipe's own files to a checkpoint."""
        write_json(folder / DRAWS_FILE, self.draws.state())
        if self._run_settings.checkpoints.export == "all":
            self.trainer.export_hf(
                str(folder / "model"), self._run_settings.checkpoints.export_dtype
            )

    def saved(self) -> Path | None:
        """Return the folder of the last checkpoint, or None."""
        found = Checkpoints(self.out / "checkpoints", self._run_settings.checkpoints.keep).latest()
        return None if found is None else found[1]

    def _saved_draws(self) -> DrawState:
        folder = self.saved()
        if folder is None:
            return DrawState()
        try:
            return msgspec.json.decode((folder / DRAWS_FILE).read_bytes(), type=DrawState)
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(
                role=self.trainer.role, path=str(folder), reason=f"{DRAWS_FILE}: {error}"
            ) from error

    @abc.abstractmethod
    def train_step(self, step: int) -> dict[str, float]:
        """Run the optimizer steps of a step, and return its metrics."""

    @abc.abstractmethod
    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate on the held-out rows, and return metrics that begin with ``eval/``."""

    @abc.abstractmethod
    def evaluation_is_due(self, step: int) -> bool:
        """Return whether a step ends with an evaluation."""

    def end_step(self) -> None:  # noqa: B027 - a hook, empty by default
        """Called at the end of each step, before its metrics are logged."""

    def close(self) -> None:  # noqa: B027 - a hook, empty by default
        """End work in flight. Idempotent."""


def is_due(step: int, *, every: int, last: int, at_start: bool) -> bool:
    """Return whether periodic work is due at a step; it is always due at the last one.

    Args:
        step: Number of the step; 0 is before training.
        every: Period in steps; 0 for never.
        last: Number of the last step.
        at_start: Whether the work is due at step 0.
    """
    if not every:
        return False
    return at_start if step == 0 else step % every == 0 or step == last
