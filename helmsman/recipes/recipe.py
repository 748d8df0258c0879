"""The base of all recipes: from settings to a finished run in an output folder."""

from __future__ import annotations

import abc
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from helmsman import Checkpoints, Job, Scheduler
from helmsman.recipes.config import as_yaml, read
from helmsman.recipes.ending import RunSummary, finish
from helmsman.recipes.files import clear, only_run_in, write_json
from helmsman.recipes.loop import Loop
from helmsman.recipes.prompts import Dataset
from helmsman.recipes.roles import start_scheduler
from helmsman.recipes.rows import rows_of, source_name
from helmsman.recipes.settings import RunSettings
from helmsman.recipes.trackers import MetricsFile, Trackers, open_trackers, require_trackers

S = TypeVar("S", bound=RunSettings)

FILES = ("checks.jsonl", "samples.jsonl", "wandb.json")
FOLDERS = ("evaluations", "model", "tensorboard", "wandb", "weights")
"""Files and folders of a run besides those that every output folder has."""


class Recipe(abc.ABC, Generic[S]):
    """A training run from its settings.

    Args:
        model: local Hugging Face folder to start from.
        data: a JSONL file, a Hugging Face dataset folder, any iterable of rows, or a mapping with
            the keys of ``data``.
        config: a YAML or TOML file, or the name of a configuration of the package; other arguments
            are over it.
        resume: continue from the last checkpoint in ``out``.
        overwrite: replace an earlier run in ``out``.
        overrides: ``(dotted key, text)`` of a command line, over everything else.
        settings: sections and keys of the recipe's settings, such as ``steps=10`` or ``train={"lr":
            1e-5}``.

    Raises: ValueError for settings that do not fit together; OSError; BackendNotInstalledError.
    """

    kind: ClassVar[type[RunSettings]]
    """The struct of its settings."""
    fixed: ClassVar[tuple[str, ...]] = ("model", "data", "seed")
    """Settings that must be as in the run that is resumed, since they decide what was drawn
    before."""

    def __init__(
        self,
        model: str | Path | None = None,
        data: str | Path | Mapping[str, Any] | Iterable[Any] | None = None,
        *,
        config: str | Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        overrides: Sequence[tuple[str, str]] = (),
        **settings: Any,
    ) -> None:
        self.resume, self.overwrite = resume, overwrite
        self.rows: list[Any] | None = None
        """Rows that were given as objects."""
        given = dict(settings)
        if model is not None:
            given["model"] = str(model)
        if isinstance(data, Mapping):
            given["data"] = dict(data)
            data = given["data"].pop("train", None)
        if data is not None:
            if not isinstance(data, str | Path):
                self.rows = rows_of(data)
                data = source_name(self.rows)
            given["data"] = {**given.get("data", {}), "train": str(data)}
        self._read(config, overrides, given)
        self._is_loaded = False

    def _read(
        self, path: str | Path | None, overrides: Sequence[tuple[str, str]], given: dict[str, Any]
    ) -> None:
        found: Any
        found, self.choices = read(self.kind, path, overrides, given)
        self.settings: S = found  # a type checker cannot follow that it is of self.kind

    # --- the run ----------------------------------------------------------------------------------
    # --------------------

    def train(self) -> RunSummary:
        """Train to the last step and write what a run leaves in ``settings.out``.

        Returns: the run in numbers.
        Raises: ValueError, OSError, BackendNotInstalledError before anything is started;
            HelmsmanError afterwards.
        """
        self.load()
        with self.reserve():
            return self.run()

    def plan(self) -> str:
        """Describe the run: settings, choices with their arithmetic, and places. Starts no worker,
        writes no file.
        """
        self.load()
        with start_scheduler(self.settings.cluster, self.settings.seed, None) as scheduler:
            table = scheduler.plan(self.jobs()).table()
        return f"{as_yaml(self.settings)}\n\n{self.describe()}\n\n{table}"

    def load(self) -> None:
        """Read model folder and data, and check that optional packages are there. Idempotent.

        Raises: ValueError, OSError, BackendNotInstalledError.
        """
        if not self._is_loaded:
            require_trackers(self.settings)
            self.dataset = self.load_data()
            self._is_loaded = True

    @contextlib.contextmanager
    def reserve(self) -> Iterator[None]:
        """Prepare the output folder, and keep other runs out of it for the block. Raises:
        ValueError, OSError.
        """
        out = Path(self.settings.out)
        out.mkdir(parents=True, exist_ok=True)
        with only_run_in(out):
            self._prepare(out)
            yield

    def run(self) -> RunSummary:
        """Start the workers, train, and write the summary; the folder is reserved."""
        started = time.monotonic()
        settings, out = self.settings, Path(self.settings.out)
        print(f"{self.describe()}\n", flush=True)
        metrics = MetricsFile(out / "metrics.jsonl")
        jobs = self.jobs()
        with contextlib.ExitStack() as held:
            scheduler = held.enter_context(
                start_scheduler(settings.cluster, settings.seed, out / "logs")
            )
            print(f"{scheduler.plan(jobs).table()}\n", flush=True)
            start = self.start(held, scheduler, {job.role: job for job in jobs})
            print(f"all workers are ready after {time.monotonic() - started:.0f} s\n", flush=True)
            loop = start(held.enter_context(open_trackers(settings, metrics)))
            with contextlib.closing(loop):
                loop.train()
        summary = finish(settings, self.dataset, metrics.read(), seconds=time.monotonic() - started)
        sys.stdout.flush()
        return summary

    def describe(self) -> str:
        """Describe choices and data in lines."""
        lines = [f"chosen: {choice}" for choice in self.choices]
        return "\n".join([*lines, self.describe_data()])

    def describe_data(self) -> str:
        """Describe the data in a line."""
        found = self.dataset
        longest = max(len(row.prompt_ids) for row in [*found.train, *found.held_out])
        both = f" ({found.num_in_both} trained on as well)" if found.num_in_both else ""
        return (
            f"{len(found.train)} prompts to train on, {len(found.held_out)} held out{both}, "
            f"{found.num_too_long} left out "
            f"as longer than {self.settings.data.max_prompt_tokens} tokens; the longest has "
            f"{longest} tokens"
        )

    def _prepare(self, out: Path) -> None:
        """Clear the folder, or check that the run in it can be resumed; then write the settings."""
        path = out / "settings.json"
        if self.resume:
            self._require_resumable(out, path)
        else:
            if Path(self.settings.model).resolve().is_relative_to(out.resolve()):
                raise ValueError(
                    f"model {self.settings.model} lies in the output folder, which a new run "
                    f"replaces; give another out"
                )
            if path.exists() and not self.overwrite:
                raise FileExistsError(
                    f"the output folder {out} has an earlier run ({_progress(out)}), expected an "
                    f"empty folder. Give "
                    "--resume to continue it, --overwrite to replace it, or another --out."
                )
            if clear(out, files=FILES, folders=FOLDERS):
                print(f"the earlier run in {out} is replaced")
        write_json(path, self.settings)

    def _require_resumable(self, out: Path, path: Path) -> None:
        if not path.exists():
            raise ValueError(f"there is no run to resume in {out}: it has no {path.name}")
        try:
            before = msgspec.json.decode(path.read_bytes(), type=self.kind)
        except msgspec.DecodeError as error:
            raise ValueError(
                f"{path} is not of this version of the recipe ({error}). Start again with "
                f"--overwrite instead of --resume."
            ) from error
        for name in self.fixed:
            if getattr(before, name) != getattr(self.settings, name):
                raise ValueError(
                    f"{name} is {getattr(before, name)!r} in the run to resume and "
                    f"{getattr(self.settings, name)!r} now. "
                    "Leave it as it was, or start again with --overwrite instead of --resume."
                )
        found = Checkpoints(out / "checkpoints", self.settings.checkpoints.keep).latest()
        if found is not None and found[0] > self.settings.steps:
            raise ValueError(
                f"the run in {out} is at step {found[0]} already; expected steps of {found[0]} or "
                f"more"
            )
        MetricsFile(out / "metrics.jsonl").read()

    # --- what a recipe implements
    # -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def load_data(self) -> Dataset:
        """Read tokenizer and rows. Raises: ValueError, OSError, BackendNotInstalledError."""

    @abc.abstractmethod
    def jobs(self) -> list[Job]:
        """Return the jobs in the order of their start."""

    @abc.abstractmethod
    def start(
        self, held: contextlib.ExitStack, scheduler: Scheduler, jobs: Mapping[str, Job]
    ) -> Callable[[Trackers], Loop]:
        """Start the workers; returns the function that makes the loop from trackers.

        Args:
            held: closes at the end of the run.
            scheduler: of the run.
            jobs: by role.
        """


def _progress(out: Path) -> str:
    try:
        rows = MetricsFile(out / "metrics.jsonl").read()
    except ValueError:
        return "its metrics cannot be read"
    return f"{int(rows[-1]['step'])} steps" if rows else "no step yet"
