"""Summary and learning curve of a finished run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from helmsman.recipes.curve import draw_curve
from helmsman.recipes.failures import FILE
from helmsman.recipes.files import write_json
from helmsman.recipes.prompts import Dataset
from helmsman.recipes.settings import RunSettings


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a finished run."""

    steps: int
    seconds: float
    """Duration, including the start of workers; of the last part, if the run was resumed."""
    tokens_per_second: float
    """Mean over steps."""
    loss_first: float | None
    """Loss of the first step."""
    loss_last: float | None
    """Loss of the last step."""
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
    """Mean of the steps' means."""
    num_failed: int
    """Answers whose reward failed, in training and evaluation."""
    num_groups_failed: int
    """Prompts left out because fewer than two of their answers have a reward."""
    num_rows: int
    """Rows that were read."""
    num_too_long: int
    """Rows left out because of their length."""
    num_skipped: int
    """Rows left out by data.on_bad_row."""


def finish(
    settings: RunSettings, dataset: Dataset, rows: Sequence[Mapping[str, Any]], *, seconds: float
) -> RunSummary:
    """Write summary and curve.

    Args:
        settings: The settings of the run.
        dataset: The data of the run.
        rows: The lines of metrics.jsonl.
        seconds: Duration of the run.
    """
    out = Path(settings.out)
    if settings.checkpoints.export == "last":
        print(f"model:   {out / 'model'}")
    summary = summarize(settings, dataset, rows, seconds)
    write_json(out / "summary.json", summary)
    if summary.num_failed:
        print(
            f"failed:  rewards of {summary.num_failed:,} answers, {summary.num_groups_failed:,} "
            f"prompts left out; causes in {out / FILE}"
        )
    print(f"summary: {out / 'summary.json'}\nmetrics: {out / 'metrics.jsonl'}")
    with contextlib.suppress(ModuleNotFoundError):  # the extra `examples` installs matplotlib
        draw(settings, dataset, rows, summary)
        print(f"curve:   {out / 'curve.png'}")
    return summary


def summarize(
    settings: RunSettings, dataset: Dataset, rows: Sequence[Mapping[str, Any]], seconds: float
) -> RunSummary:
    """Summarise a run from its metrics."""

    def all_of(name: str) -> list[float]:
        return [value for row in rows if (value := row.get(name)) is not None]

    rewards, accuracies, speeds = (
        all_of(name) for name in ("reward/mean", "eval/greedy_accuracy", "tokens_per_second")
    )
    losses = all_of("loss")
    largest, means = all_of("logprob_diff/max"), all_of("logprob_diff/mean")
    return RunSummary(
        steps=settings.steps,
        seconds=round(seconds, 1),
        tokens_per_second=round(sum(speeds) / max(1, len(speeds)), 1),
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        accuracy_first=accuracies[0] if accuracies else None,
        accuracy_last=accuracies[-1] if accuracies else None,
        logprob_diff_max=max(largest, default=None),
        logprob_diff_mean=sum(means) / len(means) if means else None,
        num_failed=int(sum(all_of("reward/failed")) + sum(all_of("eval/reward/failed"))),
        num_groups_failed=int(sum(all_of("groups/failed"))),
        num_rows=dataset.num_rows,
        num_too_long=dataset.num_too_long,
        num_skipped=len(dataset.skipped),
    )


def draw(
    settings: RunSettings, dataset: Dataset, rows: Sequence[Mapping[str, Any]], summary: RunSummary
) -> None:
    """Draw greedy accuracy and reward (or loss, without rewards) over the steps.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """

    def points(name: str) -> list[tuple[int, float]]:
        return [(int(row["step"]), value) for row in rows if (value := row.get(name)) is not None]

    train = settings.data.train
    task = Path(train if isinstance(train, str) else train[0]).stem
    first, last = summary.accuracy_first, summary.accuracy_last
    cluster = settings.cluster
    has_rewards = summary.reward_first is not None
    draw_curve(
        Path(settings.out) / "curve.png",
        sampled=points("reward/mean" if has_rewards else "loss"),
        sampled_label="reward of sampled answers (training prompts)" if has_rewards else "loss",
        accuracies=points("eval/greedy_accuracy"),
        title=task if first is None or last is None else f"{task}: {first:.0%} to {last:.0%}",
        subtitle=f"{len(dataset.held_out)} held-out rows, {cluster.train_workers} train workers on "
        f"{cluster.scheduler}, "
        f"{summary.tokens_per_second:,.0f} tokens/s, {summary.seconds:.0f} s, seed {settings.seed}",
        last_step=settings.steps,
    )
