"""Test that the metrics log keeps one record of each step, also over a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.common.record import MetricsLog, Record, summarize
from examples.common.settings import Settings
from helmsman import Checkpoints
from helmsman.recipes.files import clear, only_run_in, write_json


def records(*steps: int) -> list[Record]:
    return [Record(step=step, phase="grpo", loss=step / 10, weight_version=step) for step in steps]


def filled(path: Path, *steps: int) -> MetricsLog:
    log = MetricsLog(path)
    for record in records(*steps):
        log.append(record)
    return log


def test_metrics_log_read(tmp_path: Path) -> None:
    log = filled(tmp_path / "metrics.jsonl", 0, 1, 2)

    assert log.read() == records(0, 1, 2)
    assert MetricsLog(tmp_path / "none.jsonl").read() == []


def test_metrics_log_rewind(tmp_path: Path) -> None:
    log = filled(tmp_path / "metrics.jsonl", 0, 1, 2, 3, 4)

    assert log.rewind(2) == records(0, 1, 2)
    log.append(records(3)[0])

    assert [record.step for record in log.read()] == [0, 1, 2, 3]
    assert log.rewind(-1) == []


def test_metrics_log_cut_line(tmp_path: Path) -> None:
    log = filled(tmp_path / "metrics.jsonl", 0, 1)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step":2,"phase":"gr')

    assert log.read() == records(0, 1)
    assert log.rewind(1) == records(0, 1)
    log.append(records(2)[0])
    assert log.read() == records(0, 1, 2)


def test_clear_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()

    with pytest.raises(FileExistsError, match="has logs but no settings.json"):
        clear(tmp_path)
    assert (tmp_path / "logs").is_dir()


def test_only_run_in_twice(tmp_path: Path) -> None:
    with (
        only_run_in(tmp_path),
        pytest.raises(BlockingIOError, match="another run writes to"),
        only_run_in(tmp_path),
    ):
        pass
    with only_run_in(tmp_path):
        pass


def test_metrics_log_invalid_record(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")

    with pytest.raises(ValueError, match="metrics.jsonl is not the record of a run"):
        MetricsLog(tmp_path / "metrics.jsonl").read()


def test_clear_earlier_run(tmp_path: Path) -> None:
    write_json(tmp_path / "settings.json", Settings())
    filled(tmp_path / "metrics.jsonl", 0)
    Checkpoints(tmp_path / "checkpoints", num_kept=1).save(1, lambda folder: folder.mkdir())
    (tmp_path / "notes.txt").write_text("mine")

    assert clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert not clear(tmp_path)


def test_summarize_accuracies() -> None:
    steps = [
        Record(step=0, phase="eval", held_out_accuracy=0.01),
        Record(step=1, phase="sft"),
        Record(step=2, phase="sft", held_out_accuracy=0.3),
        Record(step=3, phase="grpo", tokens=100, tokens_per_s=50.0),
        Record(step=4, phase="grpo", tokens=300, tokens_per_s=150.0, held_out_accuracy=0.9),
    ]

    summary = summarize(steps, Settings(sft_steps=2, steps=2, seed=7), "palindromes", seconds=12.34)

    assert (summary.accuracy_before, summary.accuracy_after_sft, summary.accuracy_after_grpo) == (
        0.01,
        0.3,
        0.9,
    )
    assert (summary.tokens_per_s, summary.seconds, summary.seed, summary.scheduler) == (
        100.0,
        12.3,
        7,
        "ray",
    )
