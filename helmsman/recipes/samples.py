"""Samples of each step, in a file and on the console: prompts, answers and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmsman.agents.samples import Sample
from helmsman.recipes.batches import Group
from helmsman.recipes.files import append_line
from helmsman.recipes.settings import GRPOSettings
from helmsman.recipes.tokens import FolderTokenizer

FILE = "samples.jsonl"
"""File of the output folder with some answers of each step."""
_WIDTH = 44


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A training answer, as a line of samples.jsonl."""

    step: int
    prompt: str
    completion: str
    reward: float
    values: dict[str, float] = {}
    """Unweighted rewards by name."""


def log_samples(
    step: int, groups: Sequence[Group], settings: GRPOSettings, tokenizer: FolderTokenizer
) -> str:
    """Write the first answers of a step's first groups, and format those that are shown.

    Args:
        step: Number of the step.
        groups: The answers by prompt.
        settings: The settings of the run.
        tokenizer: The tokenizer of the model.

    Returns:
        A table if one is due, else an empty text.
    """
    rows = []
    for group in groups[: settings.tracking.samples]:
        answer = group.answers[0]
        row = SampleRow(
            **texts_of(answer.samples[0], group, settings, tokenizer),
            step=step,
            reward=answer.reward,
            values=answer.scored.values,
        )
        append_line(Path(settings.out) / FILE, row)
        rows.append(row)
    every = settings.tracking.show_samples_every
    return table(rows) if rows and every and (step == 1 or step % every == 0) else ""


def texts_of(
    sample: Sample, group: Group, settings: GRPOSettings, tokenizer: FolderTokenizer
) -> dict[str, Any]:
    """Return ``prompt`` and ``completion``, the text from the first sampled token of a sample on.

    Args:
        sample: The sample.
        group: Its group, which has the text of the prompt; an agent writes its own.
        settings: The settings of the run.
        tokenizer: The tokenizer of the model.
    """
    new, prompt = sample.continuation, group.draw.row.prompt
    if settings.agent.is_given:
        prompt = tokenizer.decode(sample.input_ids[: len(sample.input_ids) - len(new)])
    return {"prompt": prompt, "completion": tokenizer.decode(new)}


def table(rows: Sequence[SampleRow]) -> str:
    """Format samples as a table of plain text."""
    lines = [f"  {'prompt'.ljust(_WIDTH)}  {'completion'.ljust(_WIDTH)}   reward"]
    lines += [f"  {cell(row.prompt)}  {cell(row.completion)}  {row.reward:7.3f}" for row in rows]
    return "\n".join(lines)


def cell(text: str) -> str:
    """Format a text as a cell of a table: one line of a fixed width."""
    line = " ".join(text.split())
    return (line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}...").ljust(_WIDTH)
