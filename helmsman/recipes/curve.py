"""Plot of a run's learning curve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

Points: TypeAlias = Sequence[tuple[int, float]]
"""(step, value), in the order of steps."""

_SMOOTHING = 9
_GREEN, _BLUE, _GREY = "#1a7f4b", "#3b6fb6", "#8a8f98"


def draw_curve(
    path: Path,
    *,
    sampled: Points,
    accuracies: Points,
    title: str,
    subtitle: str,
    sampled_label: str,
    last_step: int,
) -> None:
    """Draw a measure of training and the held-out accuracy over the steps, as a PNG file.

    Args:
        path: The file, written atomically.
        sampled: Reward or loss of each step; drawn faintly, with a moving average on top.
        accuracies: Greedy accuracy on held-out prompts, from 0 to 1.
        title: First line above the plot.
        subtitle: Second line above the plot.
        sampled_label: Name of ``sampled`` in the legend.
        last_step: Right end of the axis.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # no display
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure, axes = plt.subplots(figsize=(9.6, 5.4), dpi=150, layout="constrained")
    last = max(1, last_step)
    _draw_sampled(axes, sampled, sampled_label)
    _draw_accuracies(axes, accuracies)
    axes.set_xlim(-0.015 * last, 1.035 * last)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    if all(0 <= value <= 1 for _, value in sampled):
        axes.set_ylim(-0.02, 1.12)
        axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.93), frameon=False, fontsize=10)
    figure.suptitle(title, fontsize=14)
    axes.set_title(subtitle, fontsize=9, color=_GREY)

    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png")
    plt.close(figure)
    temporary.replace(path)


def _draw_sampled(axes: Any, points: Points, label: str) -> None:
    if points:
        steps, values = [step for step, _ in points], [value for _, value in points]
        axes.plot(steps, values, color=_BLUE, alpha=0.2, linewidth=1)
        axes.plot(steps, _smooth(values), color=_BLUE, linewidth=1.8, label=label)


def _draw_accuracies(axes: Any, points: Points) -> None:
    """Draw the curve; label its first and its last step."""
    if not points:
        return
    axes.plot(
        [step for step, _ in points],
        [accuracy for _, accuracy in points],
        color=_GREEN,
        linewidth=2.4,
        marker="o",
        markersize=6,
        markeredgecolor="white",
        label="accuracy on held-out prompts, greedy",
        zorder=3,
    )
    # If both are one step, the later entry applies.
    labels = {points[-1]: ((0, 11), "center"), points[0]: ((6, 10), "left")}
    for (step, accuracy), (offset, alignment) in labels.items():
        axes.annotate(
            f"{accuracy:.1%}",
            (step, accuracy),
            xytext=offset,
            textcoords="offset points",
            ha=alignment,
            fontsize=11,
            fontweight="bold",
            color=_GREEN,
            zorder=4,
        )


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the mean over a window around each value, narrower at both ends."""
    half = _SMOOTHING // 2
    windows = (values[max(0, index - half) : index + half + 1] for index in range(len(values)))
    return [sum(window) / len(window) for window in windows]
