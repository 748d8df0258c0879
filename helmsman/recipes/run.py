"""A run on started workers: steps that survive lost workers, timed phases, metrics, checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from helmsman import Checkpoints, RecoverableTraining, RecoveryPolicy, Scheduler, TrainController
from helmsman.api.errors import CheckpointError
from helmsman.recipes.failures import FILE as FAILURES_FILE
from helmsman.recipes.files import rewind, write_json
from helmsman.recipes.prompts import Draws, DrawState, Row
from helmsman.recipes.samples import FILE as SAMPLES_FILE
from helmsman.recipes.settings import RunSettings
from helmsman.recipes.trackers import Trackers

S = TypeVar("S", bound=RunSettings)

DRAWS_FILE = "draws.json"
"""File of a checkpoint that records the used draws."""

_REPORTED = {"reward/mean", "eval/reward", "loss", "tokens_per_second"}
"""Metrics that ``helmsman status`` shows."""


class Clock:
    """Measures the phases of a step, in seconds, and shows them in the run's status."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.restart()

    def restart(self) -> None:
        """Begin a step."""
        self._started = time.monotonic()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's duration to a phase."""
        started = time.monotonic()
        try:
            with self._scheduler.reporter.phase(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._started

    def metrics(self) -> dict[str, float]:
        """Return the durations as metrics such as ``time/train``."""
        return {f"time/{name}": seconds for name, seconds in self._seconds.items()}


class Part(Protocol):
    """A part of a run that has a state of its own."""

    def begin(self, step: int, checkpoint: Path | None) -> None:
        """Prepare the next step after a start or a recovery.

        Args:
            step: Number of the next step.
            checkpoint: Folder of the last checkpoint, which is of the step before; None at first.
        """

    def save(self, folder: Path) -> None:
        """Add the part's files to a checkpoint."""


class RecipeRun(Generic[S]):
    """The common part of all loops.

    Args:
        settings: The settings of the run.
        trainer: The controller whose checkpoints the run writes.
        rows: Rows to train on.
        trackers: Receivers of metrics.
        num_samples: Answers per draw of a row.
    """

    def __init__(
        self,
        settings: S,
        trainer: TrainController,
        rows: Sequence[Row],
        trackers: Trackers,
        *,
        num_samples: int = 1,
    ) -> None:
        self.settings, self.trainer, self.trackers = settings, trainer, trackers
        shuffle = settings.data.shuffle
        self.draws = Draws(rows, num_samples=num_samples, seed=settings.seed, shuffle=shuffle)
        """Rows to train on, in an order that depends only on the seed."""
        self.out = Path(settings.out)
        self.clock = Clock(trainer.scheduler)
        self.parts: Sequence[Part] = ()
        """Parts that are restored and saved with the trainer, in this order."""
        self.others: Sequence[TrainController] = ()
        """Jobs that are rebuilt together with the trainer."""

    def steps(self) -> Iterator[contextlib.AbstractContextManager[int, bool]]:
        """Yield the steps after the last checkpoint as blocks; see RecoverableTraining.steps.

        Step 0 is the evaluation before training. When a train worker dies in a block, the steps
        since the last checkpoint are repeated.
        """
        settings, kept = self.settings, self.settings.checkpoints
        policy = RecoveryPolicy(
            checkpoints=self.out / "checkpoints",
            save_every=kept.every,
            num_kept=kept.keep,
            save_in_background=kept.in_background,
            max_recoveries=kept.max_recoveries,
        )
        training = RecoverableTraining(
            self.trainer,
            policy,
            on_begin=self._begin,
            add_files=self._add_files,
            others=self.others,
        )
        for attempt in training.steps(0, settings.steps):
            self.clock.restart()
            self.trainer.scheduler.reporter.figure("step", f"{attempt.step} of {settings.steps}")
            yield attempt

    def draw_rows(self, num: int) -> list[Row]:
        """Return the next rows, which count as used."""
        drawn = list(itertools.islice(self.draws, num))
        for draw in drawn:
            self.draws.use(draw.number)
        return [draw.row for draw in drawn]

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a step, with its phases and the weight version."""
        reporter = self.trainer.scheduler.reporter
        for name in _REPORTED & metrics.keys():
            reporter.figure(name, f"{metrics[name]:.4g}")
        version = float(self.trainer.get_version())
        self.trackers.log(step, {**metrics, **self.clock.metrics(), "weight_version": version})

    def export_model(self) -> None:
        """Write the model of the last step, where ``checkpoints.export`` asks for it."""
        if self.settings.checkpoints.export == "last":
            self._export(self.out.absolute())

    def _export(self, folder: Path) -> None:
        self.trainer.export_hf(str(folder / "model"), self.settings.checkpoints.export_dtype)
        if self.settings.train.lora is not None:
            self.trainer.export_adapter(str(folder / "adapter"))

    def _begin(self, step: int) -> None:
        """Restore all parts, and drop records of this and later steps."""
        checkpoints = Checkpoints(self.out / "checkpoints", self.settings.checkpoints.keep)
        _, folder = checkpoints.latest() or (0, None)
        for part in self.parts:
            part.begin(step, folder)
        self.trackers.rewind(step - 1)
        for name in (FAILURES_FILE, SAMPLES_FILE):
            rewind(self.out / name, step - 1)
        self.draws.restore(DrawState() if folder is None else self._saved_draws(folder))

    def _saved_draws(self, folder: Path) -> DrawState:
        try:
            return msgspec.json.decode((folder / DRAWS_FILE).read_bytes(), type=DrawState)
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(
                role=self.trainer.role, path=str(folder), reason=f"{DRAWS_FILE}: {error}"
            ) from error

    def _add_files(self, folder: Path) -> None:
        """Add draws, parts and the exported model to a checkpoint."""
        write_json(folder / DRAWS_FILE, self.draws.state())
        for part in self.parts:
            part.save(folder)
        if self.settings.checkpoints.export == "all":
            self._export(folder)


def is_due(step: int, *, every: int, last: int, at_start: bool = True) -> bool:
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
