"""Base class of the recipes: settings, output folder, plan and run."""

from __future__ import annotations

import abc
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

import msgspec

from helmsman import Checkpoints, Job, Scheduler
from helmsman.engines.train_config import LoRA
from helmsman.recipes.config import as_yaml, read
from helmsman.recipes.ending import RunSummary, finish
from helmsman.recipes.files import clear, only_run_in, write_json
from helmsman.recipes.prompts import Dataset, Encode, load_dataset, prompts
from helmsman.recipes.roles import read_adapter, start_scheduler
from helmsman.recipes.rows import source_of
from helmsman.recipes.settings import RunSettings, distillation
from helmsman.recipes.teacher import check_teacher
from helmsman.recipes.tokens import ChatTokenizer
from helmsman.recipes.trackers import MetricsFile, Trackers, open_trackers, require_trackers

S = TypeVar("S", bound=RunSettings)

FILES = (
    "checks.jsonl",
    "failures.jsonl",
    "samples.jsonl",
    "sessions.sqlite",
    "sessions.sqlite-journal",
    "wandb.json",
)
FOLDERS = ("adapter", "evaluations", "model", "rollouts", "tensorboard", "wandb", "weights")
"""Files and folders of a run, in addition to those of every output folder."""


class Recipe(abc.ABC, Generic[S]):
    """A training run that is defined by its settings.

    Args:
        model: Local Hugging Face folder of the initial model.
        data: A file, a dataset folder, a list of them, a table, any iterable of rows, or a mapping
            with the keys of ``data``.
        config: A YAML or TOML file, or the name of a packaged configuration. Other arguments
            override it.
        resume: Continue from the last checkpoint in ``out``.
        overwrite: Replace an earlier run in ``out``.
        overrides: ``(dotted key, text)`` pairs of a command line; they override everything else.
        **settings: Sections and keys of the recipe's settings, such as ``steps=10`` or
            ``train={"lr": 1e-5}``.

    Raises:
        ValueError: Settings are invalid or do not fit together.
        OSError: The configuration cannot be read.
        BackendNotInstalledError: The configuration needs a package that is missing.
    """

    tokenizer: ChatTokenizer
    """The tokenizer of the model, after ``load``."""
    num_teacher_ids: int
    """Number of token ids that the model shares with its teacher, after ``load``, if it has one."""
    kind: ClassVar[type[RunSettings]]
    """The settings class of the recipe."""
    fixed: ClassVar[tuple[str, ...]] = ("model", "data", "seed")
    """Settings that a resumed run cannot change, because they determine the order of the data."""

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
        self.rows: dict[str, list[Any]] = {}
        """Rows passed as Python objects, by the names that they have in the settings."""
        given = dict(settings)
        if model is not None:
            given["model"] = model
        if data is not None:
            is_rows = not isinstance(data, Mapping) or hasattr(data, "column_names")
            given["data"] = {"train": data} if is_rows else dict(cast(Mapping[str, Any], data))
        section = given.get("data", {})
        has_splits = isinstance(section.get("train"), Mapping)
        if has_splits and section.get("held_out_split") and section.get("held_out") is None:
            section["held_out"] = section["train"]
        for key, split, default in (
            ("train", "split", "train"),
            ("held_out", "held_out_split", "test"),
        ):
            if section.get(key) is not None:
                has_splits = isinstance(section[key], Mapping)
                section[key], rows = source_of(section[key], section.get(split), default)
                section |= {split: None} if has_splits and split in section else {}
                self.rows |= {} if rows is None else {section[key]: rows}
        found: Any
        found, self.choices = read(self.kind, config, overrides, given)
        self.settings: S = found  # its type is self.kind, which a type checker cannot infer
        self._is_loaded = False

    # --- the run ----------------------------------------------------------------------------------

    def train(self) -> RunSummary:
        """Train to the last step and write the results into ``settings.out``.

        Returns:
            A summary of the run.

        Raises:
            ValueError: Settings or data are invalid; no worker was started.
            OSError: A file cannot be read or written.
            BackendNotInstalledError: A package is missing; no worker was started.
            HelmsmanError: The run failed.
        """
        self.load()
        with self.reserve():
            return self.run()

    def plan(self) -> str:
        """Return settings, choices with their arithmetic, and placement of the run as text.

        Starts no worker and writes no file.

        Raises:
            ValueError: Settings or data are invalid.
            OSError: A file cannot be read.
            BackendNotInstalledError: A package is missing.
        """
        self.load()
        self.check()
        with start_scheduler(self.settings.cluster, self.settings.seed, None) as scheduler:
            table = scheduler.plan(self.jobs()).table()
        return f"{as_yaml(self.settings)}\n\n{self.describe()}\n\n{table}"

    def load(self) -> None:
        """Read model folder and data, and check for the packages that trackers need. Idempotent.

        Raises:
            ValueError: The tokenizer or a row is invalid.
            OSError: A file cannot be read.
            BackendNotInstalledError: A package is missing.
        """
        if not self._is_loaded:
            require_trackers(self.settings)
            if adapter := self.inputs()["train.engine.lora.path"]:
                read_adapter(adapter)
            self.dataset = self.load_data()
            found, prefix = distillation(self.settings)
            if found.teacher:
                rows = self.dataset.train
                longest = self.settings.trained_len(max(len(row.prompt_ids) for row in rows))
                longest = min(longest, self.tokenizer.max_positions)
                given, field = (found.teacher, self.settings.model), f"{prefix}teacher"
                self.num_teacher_ids = check_teacher(*given, found.teacher_top_k, field, longest)
            self._is_loaded = True

    @contextlib.contextmanager
    def reserve(self) -> Iterator[None]:
        """Prepare the output folder, and lock it against other runs inside the block.

        Raises:
            ValueError: The run in the folder cannot be resumed, or a row lacks a value.
            OSError: The folder is in use, holds another run, or cannot be written.
        """
        out = Path(self.settings.out)
        out.mkdir(parents=True, exist_ok=True)
        with only_run_in(out):
            self._prepare(out)
            yield

    def run(self) -> RunSummary:
        """Start the workers, train, and write the summary. Call it inside ``reserve()``."""
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
            train = self.start(held, scheduler, {job.role: job for job in jobs})
            print(f"all workers are ready after {time.monotonic() - started:.0f} s\n", flush=True)
            train(held.enter_context(open_trackers(settings, metrics)))
        summary = finish(settings, self.dataset, metrics.read(), seconds=time.monotonic() - started)
        sys.stdout.flush()
        return summary

    def describe(self) -> str:
        """Return a description of choices and data, one per line."""
        lines = [f"chosen: {choice}" for choice in self.choices]
        return "\n".join([*lines, self.describe_data()])

    def describe_data(self) -> str:
        """Return a one-line description of the data."""
        found, end_id = self.dataset, self.tokenizer.end_id
        masks = [sample["loss_mask"] for row in found.train for sample in row.samples]
        kind, key = ("rows", "max_tokens") if masks else ("prompts", "max_prompt_tokens")
        trained = f" ({sum(map(sum, masks)):,} trained tokens)" if masks else ""
        both = f" ({found.num_in_both} trained on as well)" if found.num_in_both else ""
        first = f" (first: {found.skipped[0]})" if found.skipped else ""
        end = "none" if end_id is None else repr(self.tokenizer.tokenizer.decode([end_id]))
        _, limit = self.tokenizer.limit(self.settings.data, key)
        longest = max(len(row.prompt_ids) for row in [*found.train, *found.held_out])
        return (
            f"data: {found.num_rows} rows read, {len(found.train)} {kind} to train on{trained}, "
            f"{len(found.held_out)} held out{both}, {found.num_too_long} left out as longer than "
            f"{limit}, {len(found.skipped)} left out as unusable{first}; the longest has "
            f"{longest} tokens; end-of-turn token: {end}"
        )

    def inputs(self) -> dict[str, str]:
        """Return the folders that the run reads, by their settings; empty without one."""
        settings, (found, prefix) = self.settings, distillation(self.settings)
        adapter = {"train.engine.lora.path": (settings.train.lora or {}).get("path", "")}
        return {"model": settings.model, **adapter, f"{prefix}teacher": found.teacher}

    def _prepare(self, out: Path) -> None:
        """Clear the folder, or check that the run in it can be resumed; then write the settings."""
        path = out / "settings.json"
        if self.resume:
            self._require_resumable(out, path)
        self.check()
        if not self.resume:
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
        pairs = {name: (getattr(before, name), getattr(self.settings, name)) for name in self.fixed}
        if _adapters(before) != _adapters(self.settings):
            pairs["train.engine.lora"] = before.train.lora, self.settings.train.lora
        for name, (value, now) in pairs.items():
            if value != now:
                raise ValueError(
                    f"{name} is {value!r} in the run to resume and {now!r} now. "
                    "Leave it as it was, or start again with --overwrite instead of --resume."
                )
        found = Checkpoints(out / "checkpoints", self.settings.checkpoints.keep).latest()
        if found is not None and found[0] > self.settings.steps:
            raise ValueError(
                f"steps is {self.settings.steps}; expected {found[0]} or more, since the run in "
                f"{out} is already at that step"
            )
        MetricsFile(out / "metrics.jsonl").read()

    # --- hooks of a recipe ------------------------------------------------------------------------

    def load_data(self) -> Dataset:
        """Read tokenizer and rows.

        Raises:
            ValueError: The tokenizer or a row is invalid.
            OSError: A file cannot be read.
            BackendNotInstalledError: A package is missing.
        """
        data = self.settings.data
        self.tokenizer = ChatTokenizer(self.settings.model, data)
        return load_dataset(data, self.tokenizer, self.settings.seed, self.rows, self.encoder)

    @property
    def encoder(self) -> Encode:
        """The encoder of rows; by default they have prompts only."""
        return prompts

    def check(self) -> None:
        """Check that a new run replaces no folder that it reads, and rows have what training takes.

        Raises:
            ValueError: It would replace one, or a row lacks a value.
        """
        out = Path(self.settings.out)
        for name, folder in {} if self.resume else self.inputs().items():
            if folder and Path(folder).resolve().is_relative_to(out.resolve()):
                raise ValueError(
                    f"{name} {folder} is inside the output folder {out}, which a new run replaces. "
                    "Give another --out, or --resume to continue the run in it."
                )

    @abc.abstractmethod
    def jobs(self) -> list[Job]:
        """Return the jobs in start order."""

    @abc.abstractmethod
    def start(
        self, held: contextlib.ExitStack, scheduler: Scheduler, jobs: Mapping[str, Job]
    ) -> Callable[[Trackers], None]:
        """Start the workers.

        Args:
            held: Exit stack that is closed at the end of the run.
            scheduler: The scheduler of the run.
            jobs: The jobs by role.

        Returns:
            A function that runs the loop, with the trackers.
        """


def _adapters(settings: RunSettings) -> LoRA | None:
    """Return what determines the adapters of a run; dropout may change."""
    if settings.train.lora is None:
        return None
    lora = msgspec.convert(settings.train.lora, LoRA)
    path = str(Path(lora.path).absolute()) if lora.path else ""
    return msgspec.structs.replace(lora, dropout=0.0, path=path)


def _progress(out: Path) -> str:
    try:
        rows = MetricsFile(out / "metrics.jsonl").read()
    except ValueError:
        return "its metrics cannot be read"
    return f"{int(rows[-1]['step'])} steps" if rows else "no step yet"
