"""The learning curve of a run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.common.record import Record, Summary

_SMOOTHING = 9
_GREEN, _BLUE, _GREY = "#1a7f4b", "#3b6fb6", "#8a8f98"


def draw_curve(records: Sequence[Record], path: Path, summary: Summary) -> None:
    """Draw held-out accuracy and training reward over the steps.

    Args:
        records: Those of the run, in order.
        path: A PNG file, written all or nothing.
        summary: Of the same run.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # no display
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure, axes = plt.subplots(figsize=(9.6, 5.4), dpi=150, layout="constrained")
    sft_end, last = summary.sft_steps, max(1, records[-1].step)
    _draw_rewards(axes, records)
    _draw_accuracies(axes, records, sft_end)
    _draw_phases(axes, sft_end, last)

    axes.set_xlim(-0.015 * last, 1.035 * last)
    axes.set_ylim(-0.02, 1.12)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("accuracy, reward")
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.93), frameon=False, fontsize=10)
    figure.suptitle(
        f"{summary.task}: {summary.accuracy_after_sft:.0%} to {summary.accuracy_after_grpo:.0%} "
        "by GRPO",
        fontsize=14,
    )
    axes.set_title(
        f"{summary.num_held_out} held-out tasks, {summary.train_workers} train and "
        f"{summary.rollout_workers} rollout workers "
        f"on {summary.scheduler}, {summary.tokens_per_s:,.0f} tokens/s, {summary.seconds:.0f} s, "
        f"seed {summary.seed}",
        fontsize=9,
        color=_GREY,
    )

    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png")
    plt.close(figure)
    temporary.replace(path)


def _draw_rewards(axes: Any, records: Sequence[Record]) -> None:
    sampled = [(record.step, record.reward) for record in records if record.reward is not None]
    if sampled:
        steps, rewards = [step for step, _ in sampled], [reward for _, reward in sampled]
        axes.plot(steps, rewards, color=_BLUE, alpha=0.2, linewidth=1)
        axes.plot(
            steps,
            _smooth(rewards),
            color=_BLUE,
            linewidth=1.8,
            label="reward of sampled answers (training tasks)",
        )


def _draw_accuracies(axes: Any, records: Sequence[Record], sft_end: int) -> None:
    """The curve, with the numbers of its first, its last and the last supervised step."""
    points = [
        (record.step, record.held_out_accuracy)
        for record in records
        if record.held_out_accuracy is not None
    ]
    axes.plot(
        [step for step, _ in points],
        [accuracy for _, accuracy in points],
        color=_GREEN,
        linewidth=2.4,
        marker="o",
        markersize=6,
        markeredgecolor="white",
        label="accuracy on held-out tasks, greedy",
        zorder=3,
    )
    accuracies = dict(points)
    # Where two of them are the same step, the later one has the say.
    labels = {
        sft_end: ((-9, 6), "right"),
        points[-1][0]: ((0, 11), "center"),
        points[0][0]: ((6, 10), "left"),
    }
    for step, (offset, alignment) in labels.items():
        axes.annotate(
            f"{accuracies[step]:.1%}",
            (step, accuracies[step]),
            xytext=offset,
            textcoords="offset points",
            ha=alignment,
            fontsize=11,
            fontweight="bold",
            color=_GREEN,
            zorder=4,
        )


def _draw_phases(axes: Any, sft_end: int, last: int) -> None:
    if 0 < sft_end < last:
        axes.axvspan(-0.015 * last, sft_end, color=_GREY, alpha=0.08, linewidth=0)
        axes.axvline(sft_end, color=_GREY, linewidth=1, linestyle="--")
    for begin, end, name in ((0, sft_end, "supervised"), (sft_end, last, "GRPO: rewards alone")):
        if end > begin:
            axes.text(
                (begin + end) / 2, 1.075, name, ha="center", va="center", color=_GREY, fontsize=10
            )


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean over a window around each value, narrower at both ends."""
    half = _SMOOTHING // 2
    windows = (values[max(0, index - half) : index + half + 1] for index in range(len(values)))
    return [sum(window) / len(window) for window in windows]
