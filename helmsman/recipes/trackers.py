"""Where metrics go, by name: lines in a file, a table on the console, TensorBoard, Weights &
Biases.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from helmsman.api.errors import BackendNotInstalledError
from helmsman.api.extras import install_command
from helmsman.recipes.files import append_line, read_lines, write_json, write_lines
from helmsman.recipes.settings import RunSettings

Metrics = Mapping[str, float]


class Tracker(Protocol):
    """Takes the metrics of steps in their order."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Take those of a step."""

    def rewind(self, step: int) -> None:
        """The steps after this one will be done again."""

    def close(self) -> None:
        """Write out what is held back. Idempotent."""


class MetricsFile:
    """metrics.jsonl: a line ``{"step": 3, "reward/mean": 0.5, ...}`` for each step, in order."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, step: int, metrics: Metrics) -> None:
        """See Tracker."""
        append_line(self._path, {"step": step, **metrics})

    def read(self) -> list[dict[str, Any]]:
        """What the steps so far had; None for what was no finite number. Raises ValueError when the
        file is something else.
        """
        return read_lines(self._path, dict[str, Any])

    def rewind(self, step: int) -> None:
        """See Tracker."""
        write_lines(self._path, [each for each in self.read() if each["step"] <= step])

    def close(self) -> None:
        """See Tracker."""


class Console:
    """A row for each step; the names again from time to time. With rich on a terminal also a
    progress bar.

    Args:
        num_steps: of the run; 0 for no progress bar.
    """

    _COLUMNS = (
        ("step", "", 6, "g"),
        ("loss", "loss", 9, ".4f"),
        ("reward", "reward/mean", 7, ".3f"),
        ("right", "accuracy", 6, ".1%"),
        ("grad", "grad_norm", 8, ".3f"),
        ("kl", "kl", 8, ".5f"),
        ("clipped", "clip_fraction", 7, ".2%"),
        ("length", "response_length/mean", 7, ".1f"),
        ("stale", "staleness/mean", 6, ".2f"),
        ("logp diff", "logprob_diff/max", 9, ".1e"),
        ("tokens/s", "tokens_per_second", 9, ",.0f"),
        ("s", "time/step", 7, ".1f"),
    )
    _NAMES_EVERY = 20

    def __init__(self, num_steps: int = 0) -> None:
        self._num_rows = 0
        self._bar = _progress_bar(num_steps)

    def log(self, step: int, metrics: Metrics) -> None:
        """See Tracker."""
        if self._num_rows % self._NAMES_EVERY == 0:
            self._print("  ".join(name.rjust(width) for name, _, width, _ in self._COLUMNS))
        self._num_rows += 1
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)
        cells = []
        for _, key, width, form in self._COLUMNS:
            value = metrics.get(key) if key else float(step)
            cells.append(("-" if value is None else format(value, form)).rjust(width))
        overall = [
            (name.split("/"), value) for name, value in metrics.items() if name.startswith("eval/")
        ]
        evaluated = [
            f"{parts[1]} {value:{'.1%' if _is_share(parts[1]) else '.4f'}}"
            for parts, value in overall
            if len(parts) == 2
        ]
        self._print("  ".join([*cells, *evaluated]))

    def rewind(self, step: int) -> None:
        """See Tracker."""

    def close(self) -> None:
        """See Tracker."""
        if self._bar is not None:
            self._bar.stop()

    def show(self, text: str) -> None:
        """Print lines above the progress bar."""
        self._print(text)

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            return
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _progress_bar(num_steps: int) -> Any:
    """Return a running progress bar; None without rich, without a terminal or without steps."""
    if not num_steps or not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        return None
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    bar = Progress("step", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar.add_task("step", total=num_steps)
    bar.start()
    return bar


def _is_share(name: str) -> bool:
    """Whether a metric is a share from 0 to 1."""
    return "accuracy" in name or name.startswith("pass@")


class TensorBoard:
    """Scalars in the folder ``tensorboard`` of the run."""

    def __init__(self, folder: Path) -> None:
        _require("tensorboard")
        self._folder = folder
        self._writer = self._open(None)

    def _open(self, purge_step: int | None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=purge_step)

    def log(self, step: int, metrics: Metrics) -> None:
        """See Tracker."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """See Tracker. What was written of later steps is not shown any more."""
        self._writer.close()
        self._writer = self._open(step + 1)

    def close(self) -> None:
        """See Tracker."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; its id lies in ``wandb.json`` of the output folder, so that a
    resumed run goes on in it.

    WANDB_MODE=offline writes to the folder ``wandb`` alone, for `wandb sync` later.
    """

    def __init__(self, out: Path, settings: RunSettings) -> None:
        _require("wandb")
        import wandb

        path = out / "wandb.json"
        known = msgspec.json.decode(path.read_bytes())["id"] if path.exists() else None
        self._run: Any = wandb.init(
            project=settings.tracking.project,
            name=settings.tracking.name or out.name,
            id=known,
            resume="allow",
            dir=str(out),
            config=msgspec.to_builtins(settings),
        )
        # Its own count of steps never goes back; ours does after a recovery.
        self._run.define_metric("*", step_metric="step")
        write_json(path, {"id": self._run.id})

    def log(self, step: int, metrics: Metrics) -> None:
        """See Tracker."""
        self._run.log({"step": step, **metrics})

    def rewind(self, step: int) -> None:
        """See Tracker. Steps that are done again are there twice; the later one is the one that
        counts.
        """

    def close(self) -> None:
        """See Tracker. Its process ends, too."""
        import wandb

        self._run.finish()
        wandb.teardown()


class Trackers:
    """Several at once."""

    def show(self, text: str) -> None:
        """Print lines where the steps are shown; nothing for an empty text."""
        for tracker in self._trackers:
            if text and isinstance(tracker, Console):
                tracker.show(text)

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, step: int, metrics: Metrics) -> None:
        """See Tracker."""
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def rewind(self, step: int) -> None:
        """See Tracker."""
        for tracker in self._trackers:
            tracker.rewind(step)


@contextlib.contextmanager
def open_trackers(settings: RunSettings, metrics: MetricsFile) -> Iterator[Trackers]:
    """Those of the settings, and the file. Raises: BackendNotInstalledError; what wandb raises when
    it cannot be reached.
    """
    out = Path(settings.out)
    with contextlib.ExitStack() as held:
        trackers: list[Tracker] = [metrics]
        for name in dict.fromkeys(settings.tracking.to):
            tracker: Tracker = (
                Console(settings.steps)
                if name == "console"
                else TensorBoard(out / "tensorboard")
                if name == "tensorboard"
                else WeightsAndBiases(out, settings)
            )
            held.callback(tracker.close)
            trackers.append(tracker)
        yield Trackers(trackers)


def require_trackers(settings: RunSettings) -> None:
    """Raise BackendNotInstalledError for one whose package is missing, before anything is
    started.
    """
    for name in settings.tracking.to:
        if name != "console":
            _require(name)


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise BackendNotInstalledError(
            backend=f"the tracker {package!r}", package=package, command=install_command(package)
        )
