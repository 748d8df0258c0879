"""Test the GRPO recipe with packages that only this environment has: math-verify, TensorBoard,
Weights & Biases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from helmsman import InlineScheduler
from helmsman.recipes.prompts import Row
from helmsman.recipes.scorer import Scored, Scorer
from helmsman.recipes.settings import Reward
from helmsman.recipes.trackers import MetricsFile, open_trackers
from tests.unit.recipes.data import completed, settings


def score_all(pairs: Sequence[tuple[str, str]], timeout_s: float = 60.0) -> list[Scored]:
    """Score pairs of answers and texts by math-verify in processes."""

    async def score(scorer: Scorer) -> list[Scored]:
        scored = await asyncio.gather(
            *(
                scorer.score(Row([1], "", answer, "", {}), [completed(text)])
                for answer, text in pairs
            )
        )
        return [each for (each,) in scored]

    rewards = [Reward(use="math", processes=2, timeout_s=timeout_s)]
    with InlineScheduler() as scheduler, Scorer(rewards, scheduler) as scorer:
        return asyncio.run(score(scorer))


def test_math_verify_in_pool() -> None:
    pairs = [
        ("1/2", r"So the answer is \boxed{\frac{1}{2}}."),
        ("0.5", r"$\frac12$"),
        (r"\frac{1}{2}", "it is 0.5"),
        (r"$x = 3$", r"therefore $x=3$"),
        ("42", "the answer is 41"),
        ("42", ""),
    ]
    assert [each.total for each in score_all(pairs)] == [1, 1, 1, 1, 0, 0]


def test_math_verify_endless_expression() -> None:
    found = score_all(
        [("9^{9^{9^{9}}}", "$8^{8^{8^{8}}}$"), ("2", "$2$"), ("3", "$3$")], timeout_s=15.0
    )
    assert [each.is_left_out for each in found] == [True, False, False]
    assert [each.total for each in found[1:]] == [1, 1]


def test_tensorboard_metrics_after_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = settings(("out", str(tmp_path)), ("tracking.to", '["tensorboard"]'))
    with open_trackers(found, MetricsFile(tmp_path / "metrics.jsonl")) as trackers:
        for step in range(3):
            trackers.log(step, {"loss": float(step)})
        trackers.rewind(0)
        trackers.log(1, {"loss": 10.0, "reward/mean": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(0, 0.0), (1, 10.0)]
    assert [each.step for each in events.Scalars("reward/mean")] == [1]


def test_wandb_offline_resumes_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    found = settings(
        ("out", str(tmp_path)), ("tracking.to", '["wandb"]'), ("tracking.name", "mine")
    )
    for step in (1, 2):
        with open_trackers(found, MetricsFile(tmp_path / "metrics.jsonl")) as trackers:
            trackers.log(step, {"loss": 1.0})
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    names = {run.name.rpartition("-")[2] for run in runs}
    assert len(names) == 1, "the id lies in wandb.json"
    assert all(list(run.glob("*.wandb")) for run in runs)
