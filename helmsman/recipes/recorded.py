"""Recorded rollouts: a parquet part for each step, which one run writes and another can read."""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmsman import HelmsmanError
from helmsman.agents.samples import Sample
from helmsman.api.extras import needed_by
from helmsman.recipes.batches import Group, make_answer
from helmsman.recipes.files import write_atomically
from helmsman.recipes.prompts import Draws, DrawState
from helmsman.recipes.samples import texts_of
from helmsman.recipes.scorer import Scored
from helmsman.recipes.settings import GRPOSettings, Reward
from helmsman.recipes.tokens import FolderTokenizer

FOLDER = "rollouts"
"""Folder of the output folder with the parts."""
_PART = re.compile(r"step-(\d{6,})\.parquet")
_COSTS = ("timeout_s", "processes", "on_cluster", "instances", "devices")
"""Settings of rewards that do not change their values."""
_FACTS = b"helmsman"
"""Key of a file's metadata that has the facts about a part."""


class RecordingError(HelmsmanError, ValueError):
    """Recorded rollouts are missing or damaged, or do not fit the run that reads them."""


class RolloutRow(Sample, kw_only=True):
    """A row of a part: a training sample, of which an answer has one, and a session some."""

    step: int
    draw: int
    """Number of the draw; the rows of a prompt are together."""
    answer: int
    """Number of the answer among those to the prompt, from 0."""
    prompt: str
    """Text before the first sampled token; of an agent, its own."""
    completion: str
    """Text from the first sampled token on, without special tokens."""
    expected: str
    """The answer in the data; empty without one."""
    total: float
    """Weighted sum of the answer's rewards, before the overlong penalty."""
    rewards: dict[str, float]
    """Unweighted rewards by name."""
    started: float
    """Unix time at which the answers to the prompt began, in seconds."""
    seconds: float
    """Time until all of them were complete and rewarded."""
    prompt_ids: list[int]
    """Tokens of the data's prompt, which an agent may not have used."""


class PartFacts(msgspec.Struct, frozen=True):
    """Facts about a part."""

    made_with: dict[str, Any]
    """Settings that a run must share to read it."""
    metrics: dict[str, float]
    """Metrics of the batch."""
    draws: DrawState
    """The draws that were used up to this step."""


def find_parts(run: Path) -> dict[int, Path]:
    """Return the parts of a recording by step, in order.

    Args:
        run: The output folder of a run, the folder of its parts, or one part.
    """
    folder = run / FOLDER if (run / FOLDER).is_dir() else run
    paths = [run] if run.is_file() else folder.glob("*.parquet")
    found = {int(name[1]): path for path in paths if (name := _PART.fullmatch(path.name))}
    return dict(sorted(found.items()))


def read_part(path: Path, columns: list[str] | None = None) -> tuple[PartFacts, list[Any]]:
    """Read a part.

    Args:
        path: The file.
        columns: Names of the columns to read; None for all.

    Returns:
        Facts about the part, and its rows: mappings with these columns, or RolloutRow with all.

    Raises:
        RecordingError: The file is not a part of a recording.
        BackendNotInstalledError: pyarrow is missing.
    """
    pa, pq = _pyarrow()
    try:
        with pq.ParquetFile(path) as file:  # read_table would take a=b in a folder for a column
            if _FACTS not in (metadata := file.schema_arrow.metadata or {}):
                raise ValueError("its metadata has no key 'helmsman'")
            facts = msgspec.json.decode(metadata[_FACTS], type=PartFacts)
            rows = file.read(columns=columns).to_pylist(maps_as_pydicts="strict")
        return facts, rows if columns else msgspec.convert(rows, list[RolloutRow])
    except (OSError, ValueError, pa.ArrowException) as error:
        raise RecordingError(
            f"recorded rollouts cannot be read ({path}): {str(error).rstrip('.')}, expected a part "
            "as a run with rollout.record writes it"
        ) from error


class RolloutFiles:
    """The recorded rollouts that a run writes, or reads in place of generating.

    Args:
        settings: The settings of the run.
        tokenizer: The tokenizer of the model.

    Raises:
        BackendNotInstalledError: Rollouts are recorded, and pyarrow is missing.
    """

    def __init__(self, settings: GRPOSettings, tokenizer: FolderTokenizer) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        recorded = settings.rollout.recorded
        self._parts = find_parts(Path(recorded)) if recorded else {}
        if settings.rollout.record or settings.rollout.is_recorded:
            _pyarrow()

    def begin(self, step: int) -> None:
        """Drop the parts that the run wrote of this and later steps."""
        if not self._settings.rollout.is_recorded:  # parts that are read may be in ``out``
            for number, path in find_parts(Path(self._settings.out) / FOLDER).items():
                if number >= step:
                    path.unlink()

    def write(
        self, step: int, groups: Sequence[Group], metrics: Mapping[str, float], draws: DrawState
    ) -> None:
        """Write the part of a step, in place of an earlier one.

        Args:
            step: Number of the step.
            groups: The groups that are trained on.
            metrics: Metrics of the batch.
            draws: The draws that were used up to this step.

        Raises:
            OSError: The file cannot be written.
        """
        pa, pq = _pyarrow()
        rows = [
            RolloutRow(
                **msgspec.structs.asdict(sample),
                **texts_of(sample, group, self._settings, self._tokenizer),
                step=step,
                draw=group.draw.number,
                answer=number,
                expected="" if (right := group.draw.row.answer) is None else str(right),
                total=answer.scored.total,
                rewards=answer.scored.values,
                started=group.started,
                seconds=group.seconds,
                prompt_ids=group.draw.row.prompt_ids,
            )
            for group in groups
            for number, answer in enumerate(group.answers)
            for sample in answer.samples
        ]
        # Floats are as wide as Python's, so that they are read back exactly.
        kinds = {"int": pa.int32(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_()}
        kinds |= {f"list[{name}]": pa.list_(kinds[name]) for name in ("int", "float")}
        kinds["dict[str, float]"] = pa.map_(pa.string(), pa.float64())
        hints = {**RolloutRow.__annotations__, **Sample.__annotations__}
        facts = msgspec.json.encode(PartFacts(self._made_with, dict(metrics), draws))
        schema = pa.schema({name: kinds[hint] for name, hint in hints.items()}, {_FACTS: facts})
        columns = {name: [getattr(row, name) for row in rows] for name in hints}
        data = io.BytesIO()
        pq.write_table(pa.Table.from_pydict(columns, schema), data, compression="zstd")
        path = Path(self._settings.out) / FOLDER / f"step-{step:06d}.parquet"
        write_atomically(path, data.getvalue())

    def require(self, begin: int, draws: Draws) -> None:
        """Check that each step from this one on has a part that fits the run.

        Args:
            begin: Number of the step.
            draws: The order of the prompts.

        Raises:
            RecordingError: A part is missing, or does not fit.
        """
        steps = range(begin, self._settings.steps + 1)
        if missing := [step for step in steps if step not in self._parts]:
            raise RecordingError(
                f"rollout.recorded is {self._settings.rollout.recorded}, which has no {FOLDER}/"
                f"step-{missing[0]:06d}.parquet; expected the output folder of a run with "
                f"rollout.record, and its steps {begin} to {steps[-1]}. It has "
                f"{len(self._parts)} steps, the last is {max(self._parts, default=0)}."
            )
        for step in steps:
            self._require_fit(self._parts[step], draws)

    def _require_fit(self, path: Path, draws: Draws) -> None:
        facts, rows = read_part(path, ["draw", "prompt_ids", "prompt"])
        misfit = f"recorded rollouts do not fit this run ({path}"
        for name, ours in self._made_with.items():
            if (theirs := facts.made_with.get(name)) != ours:
                raise RecordingError(
                    f"{misfit}): {name} is {theirs!r:.200}, expected {ours!r:.200}, as in this "
                    "run. Give the settings of the recorded run."
                )
        for row in rows:
            number, asked = row["draw"], draws.draw(row["draw"]).row
            if asked.prompt_ids != row["prompt_ids"]:
                raise RecordingError(
                    f"{misfit}, draw {number}): prompt_ids are those of {row['prompt']!r:.80}, "
                    f"expected those of {asked.prompt!r:.80} ({asked.place}). Give the data of the "
                    "recorded run."
                )

    def read(self, step: int, draws: Draws) -> tuple[list[Group], dict[str, float]]:
        """Return the groups of a step whose part fits, and metrics of what was left out.

        Args:
            step: Number of the step.
            draws: The order of the prompts; draws that the recorded run had used count as used.

        Raises:
            RecordingError: The part is damaged.
        """
        facts, rows = read_part(self._parts[step])
        groups = list[Group]()
        for (number, _), of_answer in itertools.groupby(rows, lambda row: (row.draw, row.answer)):
            samples: list[Any] = [*of_answer]
            first = samples[0]
            if not groups or groups[-1].draw.number != number:
                groups.append(Group(draws.draw(number), [], first.started, first.seconds))
            scored = Scored(first.rewards, first.total)
            groups[-1].answers.append(make_answer(samples, scored, self._settings))
        draws.restore(facts.draws)
        return groups, facts.metrics

    @functools.cached_property
    def _made_with(self) -> dict[str, Any]:
        """The settings that rollouts depend on, besides the prompts."""
        settings = self._settings
        tokens = sorted(self._tokenizer.tokenizer.get_vocab().items())
        digest = hashlib.sha256(repr(tokens).encode()).hexdigest()[:12]
        return {
            "the tokenizer of model": f"{len(tokens)} tokens, digest {digest}",
            "prompts_per_step": settings.prompts_per_step,
            "samples_per_prompt": settings.samples_per_prompt,
            "rollout.max_new_tokens": settings.rollout.max_new_tokens,
            "algorithm.dynamic_sampling": settings.algorithm.dynamic_sampling,
            "rewards": [_value_of(each) for each in settings.rewards],
        }


def _value_of(reward: Reward) -> dict[str, Any]:
    """Return the settings that are given, and on which the values of a reward depend, as JSON."""
    given = {
        name: value
        for name, value in msgspec.structs.asdict(reward).items()
        if name not in _COSTS and value != getattr(Reward(), name)
    }
    encoded = msgspec.json.encode(given, enc_hook=repr)
    return msgspec.json.decode(encoded, type=dict[str, Any])


def _pyarrow() -> tuple[Any, Any]:
    with needed_by("a recording of rollouts", "pyarrow"):
        import pyarrow.parquet
    return pyarrow, pyarrow.parquet
