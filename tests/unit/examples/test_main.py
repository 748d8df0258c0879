"""Test that examples/grpo.py refuses invalid arguments in one line, before it starts workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from examples.common.launch import prepare
from examples.common.record import MetricsLog, Record
from examples.common.settings import Settings
from examples.grpo import main
from helmsman import Checkpoints
from helmsman.recipes.files import write_json
from tests.recipes.processes import run_here

Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run the script with flags that it refuses; returns the line that it prints."""

    def run(*flags: object) -> str:
        assert run_here(main, ["--scheduler", "inline", *map(str, flags)]) == 2
        printed = capsys.readouterr()
        assert (printed.out, len(printed.err.splitlines())) == ("", 1), printed
        return printed.err

    return run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + b"".join(b'{"prompt": "%d", "answer": "a"}\n' % number for number in range(20, 30))
    )
    return path


def save_checkpoint(out: Path, step: int) -> Path:
    return Checkpoints(out / "checkpoints", num_kept=1).save(step, lambda folder: folder.mkdir())


def test_grpo_data_not_utf8(refused: Refused, data: Path, tmp_path: Path) -> None:
    data.write_bytes(b"\xff\xfe\n")
    assert f"{data}, line 1: " in refused("--data", data, "--out", tmp_path / "out")


def test_grpo_output_folder_inside_file(refused: Refused, data: Path) -> None:
    assert str(data) in refused("--data", data, "--num-held-out", 2, "--out", data / "out")


def test_prepare_model_of_replaced_run(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, 1)
    write_json(tmp_path / "settings.json", Settings())
    settings = Settings(model=str(tmp_path / "checkpoints" / "latest"), out=str(tmp_path))
    with pytest.raises(ValueError, match="lies in the run that this one would replace"):
        prepare(settings, resume=False)
    assert saved.is_dir()


def test_grpo_resume_refused(refused: Refused, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    save_checkpoint(out, 4)
    write_json(
        out / "settings.json",
        Settings(data=str(data), num_held_out=2, sft_steps=1, steps=3, scheduler="inline"),
    )
    assert "is at step 4 already; expected --steps 3 or more" in refused(
        "--out", out, "--resume", "--steps", 2
    )
    MetricsLog(out / "metrics.jsonl").append(Record(step=0, phase="eval"))
    assert "lacks steps before the checkpoint of step 4" in refused("--out", out, "--resume")
