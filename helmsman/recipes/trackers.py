"""Trackers of metrics: file, console, TensorBoard, Weights & Biases."""

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
    """Receives the metrics of steps in order."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of a step."""

    def rewind(self, step: int) -> None:
        """Discard the steps after this one, which will be repeated."""

    def close(self) -> None:
        """Flush and close. Idempotent."""


class MetricsFile:
    """metrics.jsonl, with a line ``{"step": 3, "reward/mean": 0.5, ...}`` per step."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, step: int, metrics: Metrics) -> None:
        """See Tracker."""
        append_line(self._path, {"step": step, **metrics})

    def read(self) -> list[dict[str, Any]]:
        """Return the metrics of all steps; non-finite values are None.

        Raises:
            ValueError: The file does not hold metrics.
        """
        return read_lines(self._path, dict[str, Any])

    def rewind(self, step: int) -> None:
        """See Tracker."""
        write_lines(self._path, [each for each in self.read() if each["step"] <= step])

    def close(self) -> None:
        """See Tracker."""


class Console:
    """Prints a row per step, and a header every 20 rows; a progress bar with rich on a terminal.

    Args:
        num_steps: Steps of the run; 0 for no progress bar.
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
    """Return whether a metric is a fraction from 0 to 1."""
    return "accuracy" in name or name.startswith("pass@")


class TensorBoard:
    """Writes scalars into the run's folder ``tensorboard``."""

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
        """See Tracker. TensorBoard hides the later steps already written."""
        self._writer.close()
        self._writer = self._open(step + 1)

    def close(self) -> None:
        """See Tracker."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, which a resumed run continues by the id in ``wandb.json``.

    WANDB_MODE=offline writes only to the folder ``wandb``, for `wandb sync` later.
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
        # The step count of wandb never decreases, but ours does after a recovery.
        self._run.define_metric("*", step_metric="step")
        write_json(path, {"id": self._run.id})

    def log(self, step: int, metrics: Metrics) -> None:
        """See Tracker."""
        self._run.log({"step": step, **metrics})

    def rewind(self, step: int) -> None:
        """See Tracker. Repeated steps appear twice; the later one is valid."""

    def close(self) -> None:
        """See Tracker. Also stops the process of wandb."""
        import wandb

        self._run.finish()
        wandb.teardown()


class Trackers:
    """Passes metrics on to several trackers."""

    def show(self, text: str) -> None:
        """Print lines on the console tracker, if there is one and the text is not empty."""
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
    """Open the trackers of the settings, and add the metrics file.

    Raises:
        BackendNotInstalledError: A tracker's package is missing.
        Exception: Any error of wandb, for example when its server cannot be reached.
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
    """Check that the packages of all trackers are installed.

    Raises:
        BackendNotInstalledError: One is missing.
    """
    for name in settings.tracking.to:
        if name != "console":
            _require(name)


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise BackendNotInstalledError(
            backend=f"the tracker {package!r}", package=package, command=install_command(package)
        )
