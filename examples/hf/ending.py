"""The end of a run: a summary, and a picture of the curve."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from examples.common.curve import draw_curve
from examples.common.record import Record, Summary, write_json
from examples.hf.prompts import Dataset
from examples.hf.settings import Settings


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run in numbers."""

    steps: int
    seconds: float
    """From start to end, workers' start included; of the last part of a run that was resumed."""
    tokens_per_second: float
    """The mean over steps."""
    reward_first: float | None
    """Mean reward of the first step."""
    reward_last: float | None
    """Mean reward of the last step."""
    accuracy_first: float | None
    """Greedy accuracy of the first evaluation."""
    accuracy_last: float | None
    """Greedy accuracy of the last evaluation."""
    logprob_diff_max: float | None
    """Largest difference of a log-probability between rollout and trainer, over all steps."""
    logprob_diff_mean: float | None
    """The mean of the steps' means."""


def finish(
    settings: Settings, dataset: Dataset, rows: Sequence[Mapping[str, Any]], *, seconds: float
) -> None:
    """Write summary and curve.

    Args:
        rows: of metrics.jsonl.
    """
    out = Path(settings.out)
    if settings.checkpoints.export == "last":
        print(f"model:   {out / 'model'}")
    summary = summarize(settings, rows, seconds)
    write_json(out / "summary.json", summary)
    print(f"summary: {out / 'summary.json'}\nmetrics: {out / 'metrics.jsonl'}")
    with contextlib.suppress(ModuleNotFoundError):  # matplotlib is there with the extra `examples`
        if draw(settings, dataset, rows, summary):
            print(f"curve:   {out / 'curve.png'}")


def summarize(settings: Settings, rows: Sequence[Mapping[str, Any]], seconds: float) -> RunSummary:
    """The summary of a run from its metrics."""

    def all_of(name: str) -> list[float]:
        return [value for row in rows if (value := row.get(name)) is not None]

    rewards, accuracies, speeds = (
        all_of(name) for name in ("reward/mean", "eval/greedy_accuracy", "tokens_per_second")
    )
    largest, means = all_of("logprob_diff/max"), all_of("logprob_diff/mean")
    return RunSummary(
        steps=settings.steps,
        seconds=round(seconds, 1),
        tokens_per_second=round(sum(speeds) / max(1, len(speeds)), 1),
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        accuracy_first=accuracies[0] if accuracies else None,
        accuracy_last=accuracies[-1] if accuracies else None,
        logprob_diff_max=max(largest, default=None),
        logprob_diff_mean=sum(means) / len(means) if means else None,
    )


def draw(
    settings: Settings, dataset: Dataset, rows: Sequence[Mapping[str, Any]], summary: RunSummary
) -> bool:
    """Draw greedy accuracy and reward over the steps; False where the start has no accuracy, or a
    reward does not fit in.
    """
    records = [
        Record(
            step=int(row["step"]),
            phase="grpo" if row["step"] else "eval",
            reward=row.get("reward/mean"),
            held_out_accuracy=row.get("eval/greedy_accuracy"),
        )
        for row in rows
    ]
    fits = all(0 <= (record.reward or 0) <= 1 for record in records)
    if not (fits and records and records[0].held_out_accuracy is not None):
        return False
    first, last = summary.accuracy_first, summary.accuracy_last
    assert first is not None
    assert last is not None
    labels = Summary(
        task=Path(settings.data.train).stem,
        accuracy_before=first,
        accuracy_after_sft=first,
        accuracy_after_grpo=last,
        num_held_out=len(dataset.held_out),
        sft_steps=0,
        grpo_steps=settings.steps,
        seconds=summary.seconds,
        tokens_per_s=summary.tokens_per_second,
        scheduler=settings.cluster.scheduler,
        train_workers=settings.cluster.train_workers,
        rollout_workers=settings.cluster.rollout_instances,
        seed=settings.seed,
    )
    draw_curve(records, Path(settings.out) / "curve.png", labels)
    return True
