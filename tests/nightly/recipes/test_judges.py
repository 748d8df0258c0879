"""Test that judges train a policy, and that one that dies loses no reward."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from helmsman.recipes import GRPO
from tests.recipes.judge_models import make_classifier, make_judge
from tests.recipes.processes import finish
from tests.recipes.runs import Runs, lines

pytestmark = pytest.mark.timeout(400)


def train(model: Path, out: Path, reward: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
    """Train by a judge, beside a reward without weight that measures the answers."""
    GRPO(
        model,
        [f"{number}+1=" for number in range(8)],
        [reward, {"use": share_of_digits, "weight": 0.0, "processes": 1}],
        steps=40,
        prompts_per_step=8,
        samples_per_prompt=8,
        train={"lr": 5e-3},
        cluster={"scheduler": "local"},
        evaluation={"every": 0},
        out=str(out),
        **settings,
    ).train()
    return lines(out / "metrics.jsonl")[1:]


def share_of_digits(completion: str) -> float:
    """Return the part of an answer that the judges prefer."""
    return sum(map(str.isdigit, completion)) / max(1, len(completion))


def means(rows: list[dict[str, Any]], name: str) -> tuple[float, float]:
    """Return the means of a metric over the first and over the last three steps."""
    values = [row[name] for row in rows]
    return statistics.fmean(values[:3]), statistics.fmean(values[-3:])


@pytest.mark.parametrize("seed", [0, 1])
def test_classifier_trains_a_policy(model: Path, tmp_path: Path, seed: int) -> None:
    judge = make_classifier(tmp_path / "judge")
    rollout = {"max_new_tokens": 8}
    rows = train(model, tmp_path / "out", {"judge": str(judge)}, rollout=rollout, seed=seed)
    first, last = means(rows, "reward/judge/mean")
    assert last > first + 0.4
    first, last = means(rows, "reward/share_of_digits/mean")
    assert last > first + 0.3
    assert all(row["reward/failed"] == 0 for row in rows)


def test_language_model_trains_a_policy(model: Path, tmp_path: Path) -> None:
    """It reads the last character, answers 1 for a digit, and x otherwise, which is no number."""
    judge = {
        "judge": str(make_judge(tmp_path / "judge")),
        "prompt": "{{ completion or '?' }}",
        "parse": r"(\d)",
        "max_new_tokens": 1,
        "processes": 1,
        "on_failure": "value",
    }
    rows = train(model, tmp_path / "out", judge, rollout={"max_new_tokens": 4})
    first, last = means(rows, "reward/judge/mean")
    assert last > first + 0.3
    failures = lines(tmp_path / "out" / "failures.jsonl")
    assert len(failures) == sum(row["reward/failed"] for row in rows)
    assert all(each["cause"].startswith("the judge 'judge' answered 'x'") for each in failures)


def test_judge_killed(runs: Runs) -> None:
    """Its requests wait for the rebuilt instance: all steps have the values of a quiet run."""
    judge = make_classifier(runs.folder / "judge")
    rewards = json.dumps([{"judge": str(judge), "timeout_s": 120}])
    flags = ("--rewards", rewards, "--steps", "6")
    finish(runs.start("quiet", *flags), runs.folder / "quiet")
    killed = runs.start("out", *flags)
    _, num_killed = finish(killed, runs.folder / "out", [("judge-judge", 1), ("judge-judge", 3)])
    assert num_killed == 2
    found, quiet = runs.metrics("out"), runs.metrics("quiet")
    assert [each["step"] for each in found] == list(range(7))
    for ours, theirs in zip(found[1:], quiet[1:], strict=True):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-4), ours["step"]
        assert ours["reward/failed"] == 0
