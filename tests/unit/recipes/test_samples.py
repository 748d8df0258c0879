"""Test sample tables: rows in a file that a recovery rewinds, and lines for the console."""

from __future__ import annotations

from pathlib import Path

from helmsman.recipes.samples import SampleLog, SampleRow
from helmsman.recipes.settings import Tracking
from tests.recipes.runs import lines


def row(step: int) -> SampleRow:
    return SampleRow(step=step, prompt="1+1=\n" * 20, completion="2", reward=0.5)


def test_sample_log_rows_and_tables(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples.jsonl", Tracking(samples=2, show_samples_every=3))
    shown = [log.log(step, [row(step)] * 3) for step in range(1, 5)]
    assert [bool(text) for text in shown] == [True, False, True, False]
    assert shown[0].splitlines()[1].split() == [*["1+1="] * 8, "1...", "2", "0.500"]
    assert [each["step"] for each in lines(tmp_path / "samples.jsonl")] == [1, 1, 2, 2, 3, 3, 4, 4]
    log.rewind(2)
    assert [each["step"] for each in lines(tmp_path / "samples.jsonl")] == [1, 1, 2, 2]


def test_sample_log_off(tmp_path: Path) -> None:
    log = SampleLog(tmp_path / "samples.jsonl", Tracking(samples=0))
    assert log.log(1, [row(1)]) == ""
    log.rewind(0)
    assert not (tmp_path / "samples.jsonl").exists()
