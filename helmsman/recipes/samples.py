"""Samples of each step, in a file and on the console: prompts, answers and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from helmsman.recipes.files import append_line, rewind
from helmsman.recipes.settings import Tracking

_WIDTH = 44


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """A training answer, as a line of samples.jsonl."""

    step: int
    prompt: str
    completion: str
    reward: float
    values: dict[str, float] = {}
    """Unweighted rewards by name."""


class SampleLog:
    """Writes samples.jsonl, and formats tables for the console.

    Args:
        path: The file.
        settings: Number of rows per step, and steps between tables.
    """

    def __init__(self, path: Path, settings: Tracking) -> None:
        self._path, self._settings = path, settings

    def log(self, step: int, rows: Sequence[SampleRow]) -> str:
        """Write the first rows of a step; return a table if one is due, else an empty text."""
        kept = rows[: self._settings.samples]
        for row in kept:
            append_line(self._path, row)
        every = self._settings.show_samples_every
        return table(kept) if kept and every and (step == 1 or step % every == 0) else ""

    def rewind(self, step: int) -> None:
        """Remove the rows of all later steps, which will be repeated."""
        rewind(self._path, step)


def table(rows: Sequence[SampleRow]) -> str:
    """Format samples as a table of plain text."""
    lines = [f"  {'prompt'.ljust(_WIDTH)}  {'completion'.ljust(_WIDTH)}   reward"]
    lines += [f"  {_cell(row.prompt)}  {_cell(row.completion)}  {row.reward:7.3f}" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    line = " ".join(text.split())
    return (line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}...").ljust(_WIDTH)
