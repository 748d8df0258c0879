"""Test that settings come from the command line, the resumed run and the defaults in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.common.settings import TASK_PARAMS, Settings, parse
from helmsman.recipes.files import write_json


def test_parse_defaults() -> None:
    settings, resume = parse([])

    assert (settings.scheduler, settings.task, resume) == ("ray", "palindrome_generation", False)
    assert settings.task_params == TASK_PARAMS["palindrome_generation"]


def test_parse_task_parameters() -> None:
    assert parse(["--task", "chain_sum"])[0].task_params == {}
    assert parse(["--task", "chain_sum", "--task-params", '{"max_terms": 3}'])[0].task_params == {
        "max_terms": 3
    }


def test_parse_pretrained_model() -> None:
    settings, _ = parse(["--model", "folder", "--lr", "3e-6"])

    assert (settings.sft_steps, settings.lr, settings.max_new_tokens) == (0, 3e-6, 256)


def test_parse_resume(tmp_path: Path) -> None:
    first, _ = parse(
        [
            "--scheduler",
            "local",
            "--seed",
            "5",
            "--task",
            "chain_sum",
            "--steps",
            "10",
            "--out",
            str(tmp_path),
        ]
    )
    write_json(tmp_path / "settings.json", first)

    again, resume = parse(["--out", str(tmp_path), "--resume"])
    assert (again, resume) == (first, True)

    longer, _ = parse(
        ["--out", str(tmp_path), "--resume", "--steps", "20", "--scheduler", "ray", "--seed", "5"]
    )
    assert (longer.steps, longer.scheduler, longer.seed, longer.task) == (20, "ray", 5, "chain_sum")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rollout-workers", "0"], "--rollout-workers is 0; expected 1 or more"),
        (["--data", "tasks.jsonl", "--task", "chain_sum"], "--data takes the place of --task"),
        (["--steps", "-1"], "--steps is -1; expected 0 or more"),
        (["--lr", "nan"], "--lr is nan; expected 0 or more"),
        (["--save-every", "0"], "--save-every is 0; expected 1 or more"),
        (["--max-new-tokens", "0"], "--max-new-tokens is 0; expected 1 or more"),
        (["--cpus-per-worker", "inf"], "--cpus-per-worker is inf; expected 0 or more"),
        (["--seed", "4294967296"], "expected less than 2**32"),
        (["--scheduler", "inline", "--train-workers", "2"], "use --scheduler local"),
        (["--task-params", "[1]"], "not a JSON object"),
        (["--scheduler", "slurm"], "invalid choice: 'slurm'"),
        (["--task-params", "{"], "not a JSON object"),
        (["--faults", "kill rollout/0"], "not a JSON array of objects: 'kill rollout/0'"),
        (["--faults", '[{"type": "Kil"}]'], "--faults: Invalid value 'Kil'"),
        (
            [
                "--scheduler",
                "inline",
                "--faults",
                '[{"type": "Kill", "worker_id": "a/0", "at_step": 5}]',
            ],
            "use --scheduler local",
        ),
        (["--resume", "--out", "nowhere"], "there is no run to resume in nowhere"),
    ],
)
def test_parse_invalid_values(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(arguments)
    assert message in capsys.readouterr().err


def test_parse_resume_unreadable_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.json").write_text("{")

    with pytest.raises(SystemExit, match="2"):
        parse(["--out", str(tmp_path), "--resume"])
    assert "settings.json cannot be read" in capsys.readouterr().err


def test_parse_resume_other_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(tmp_path / "settings.json", Settings(seed=5))

    with pytest.raises(SystemExit, match="2"):
        parse(["--out", str(tmp_path), "--resume", "--seed", "6"])
    assert "--seed is 5 in the run to resume" in capsys.readouterr().err
