"""What makes no sense is said in a line by the script, before anything is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.common.record import MetricsLog, Record
from examples.common.settings import Settings
from examples.common.tokens import CharTokenizer, small_model
from examples.grpo import main
from helmsman import Checkpoints
from helmsman.recipes.files import write_json
from tests.recipes.processes import run_here

Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs the script with flags that it refuses; returns the line that it says."""

    def run(*flags: object) -> str:
        assert run_here(main, ["--scheduler", "inline", *map(str, flags)]) == 2
        said = capsys.readouterr()
        assert (said.out, len(said.err.splitlines())) == ("", 1), said
        return said.err

    return run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + b"".join(b'{"prompt": "%d", "answer": "a"}\n' % number for number in range(20, 30))
    )
    return path


def test_grpo_data_that_is_no_text(refused: Refused, data: Path, tmp_path: Path) -> None:
    data.write_bytes(b"\xff\xfe\n")
    assert f"{data}, line 1: " in refused("--data", data, "--out", tmp_path / "out")


def test_grpo_output_folder_impossible(refused: Refused, data: Path, tmp_path: Path) -> None:
    assert str(data) in refused("--data", data, "--num-held-out", 2, "--out", data / "out")


def test_grpo_model_folder_empty(refused: Refused, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    said = refused(
        "--data",
        data,
        "--num-held-out",
        2,
        "--model",
        tmp_path / "model",
        "--out",
        tmp_path / "out",
    )
    assert f"'{tmp_path / 'model'}' has no readable tokenizer" in said


def test_grpo_model_of_replaced_run(refused: Refused, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "out"
    tokenizer = CharTokenizer(["20", "21"], ["a"])
    saved = Checkpoints(out / "checkpoints", num_kept=1).save(1, lambda folder: folder.mkdir())
    tokenizer.save(saved)
    (saved / "config.json").write_text(json.dumps(small_model(tokenizer, max_len=8)))
    write_json(out / "settings.json", Settings())

    said = refused(
        "--data", data, "--num-held-out", 2, "--model", out / "checkpoints" / "latest", "--out", out
    )
    assert "lies in the run that this one would replace" in said
    assert saved.is_dir()


def test_grpo_resume_impossible(refused: Refused, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write_json(
        out / "settings.json",
        Settings(data=str(data), num_held_out=2, sft_steps=1, steps=3, scheduler="inline"),
    )
    Checkpoints(out / "checkpoints", num_kept=1).save(4, lambda folder: folder.mkdir())

    assert "is at step 4 already; expected --steps 3 or more" in refused(
        "--out", out, "--resume", "--steps", 2
    )
    MetricsLog(out / "metrics.jsonl").append(Record(step=0, phase="eval"))
    assert "lacks steps before the checkpoint of step 4" in refused("--out", out, "--resume")
