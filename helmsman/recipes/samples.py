"""Samples of each step: a few prompts with their answers and rewards, in a file and on the
console.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmsman.recipes.files import append_line, read_lines, write_lines
from helmsman.recipes.settings import Tracking

_WIDTH = 44


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that was trained on, as a line of samples.jsonl."""

    step: int
    prompt: str
    completion: str
    reward: float
    values: dict[str, float] = {}
    """By the rewards' names, without their weights."""


class SampleLog:
    """Writes samples.jsonl and says when a table is due.

    Args:
        path: the file.
        settings: how many rows of a step are written, and how often a table is shown.
    """

    def __init__(self, path: Path, settings: Tracking) -> None:
        self._path, self._settings = path, settings

    def log(self, step: int, rows: Sequence[SampleRow]) -> str:
        """Write the first rows of a step; returns the table when it is due, else an empty text."""
        kept = rows[: self._settings.samples]
        for row in kept:
            append_line(self._path, row)
        every = self._settings.show_samples_every
        return table(kept) if kept and every and (step == 1 or step % every == 0) else ""

    def rewind(self, step: int) -> None:
        """Drop the rows after a step, which is done again."""
        if self._path.exists():
            rows: list[dict[str, Any]] = read_lines(self._path, dict[str, Any])
            write_lines(self._path, [row for row in rows if row["step"] <= step])


def table(rows: Sequence[SampleRow]) -> str:
    """Return samples as lines of plain text."""
    lines = [f"  {'prompt'.ljust(_WIDTH)}  {'completion'.ljust(_WIDTH)}   reward"]
    lines += [f"  {_cell(row.prompt)}  {_cell(row.completion)}  {row.reward:7.3f}" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    line = " ".join(text.split())
    return (line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}...").ljust(_WIDTH)
