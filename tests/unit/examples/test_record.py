"""Test the picture of a run, and that a folder belongs to one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.common.record import MetricsLog, Record, draw, summarize
from examples.common.settings import Settings
from helmsman import Checkpoints
from helmsman.recipes.files import clear, only_run_in, write_json


@pytest.mark.parametrize(("sft_steps", "steps"), [(3, 5), (0, 5), (3, 0), (0, 0)])
def test_draw_curve_every_mix_of_phases(tmp_path: Path, sft_steps: int, steps: int) -> None:
    pytest.importorskip("matplotlib")
    every = [Record(step=0, phase="eval", held_out_accuracy=0.0)]
    every += [Record(step=step, phase="sft", loss=1.0) for step in range(1, sft_steps + 1)]
    every += [
        Record(step=step, phase="grpo", reward=0.4, accuracy=0.35, tokens=10, tokens_per_s=5.0)
        for step in range(sft_steps + 1, sft_steps + steps + 1)
    ]
    every[sft_steps].held_out_accuracy = 0.25
    every[-1].held_out_accuracy = 0.875
    path = tmp_path / "curve.png"
    settings = Settings(sft_steps=sft_steps, steps=steps)
    draw(every, path, summarize(every, settings, "task", seconds=1.0))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_clear_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(FileExistsError, match="has logs but no settings.json"):
        clear(tmp_path)
    assert (tmp_path / "logs").is_dir()


def test_clear_earlier_run(tmp_path: Path) -> None:
    write_json(tmp_path / "settings.json", Settings())
    MetricsLog(tmp_path / "metrics.jsonl").append(Record(step=0, phase="grpo"))
    Checkpoints(tmp_path / "checkpoints", num_kept=1).save(1, lambda folder: folder.mkdir())
    (tmp_path / "notes.txt").write_text("mine")
    assert clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert not clear(tmp_path)


def test_only_run_in_twice(tmp_path: Path) -> None:
    with (
        only_run_in(tmp_path),
        pytest.raises(BlockingIOError, match="another run writes to"),
        only_run_in(tmp_path),
    ):
        pass
    with only_run_in(tmp_path):
        pass
