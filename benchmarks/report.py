"""Output of results: a table, results.json and a chart of the ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.harness import Result, goal_value

HEADER = (
    f"{'case':<40}{'ours':>10} {'p10..p90':<17}{'floor':>10} "
    f"{'p10..p90':<17}{'unit':<8}{'ratio':>8} {'p10..p90':<15}"
    f"{'goal':<9}"
)
_COLOURS = {True: "#2a7f62", False: "#c0392b", None: "#8795a1"}


def line(result: Result) -> str:
    """Return a row of the table."""
    verdict = {True: "met", False: "MISSED", None: ""}[result.met]
    return (
        f"{result.case:<40}{_short(result.ours):>10} {_range(result.ours_p10, result.ours_p90):<17}"
        f"{_short(result.floor):>10} "
        f"{_range(result.floor_p10, result.floor_p90):<17}{result.unit:<8}"
        f"{_short(result.ratio):>8} "
        f"{_range(result.ratio_p10, result.ratio_p90):<15}{result.goal or '':<9}{verdict}"
    ).rstrip()


def _short(value: float) -> str:
    """Format a number with three digits and no exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.5f}"


def _range(low: float, high: float) -> str:
    return f"{_short(low)}..{_short(high)}"


def write(results: Sequence[Result], folder: Path) -> None:
    """Write results.json and ratios.png; creates the folder if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(list(results)), indent=1)
    (folder / "results.json").write_bytes(encoded + b"\n")
    if results:
        _draw(results, folder / "ratios.png")


def _draw(results: Sequence[Result], path: Path) -> None:
    """Draw a bar for each ratio, with its spread and a mark at its goal."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(11, 1.5 + 0.24 * len(results)), layout="constrained")
    lowest = min(min(result.ratio_p10, result.ratio, _goal_or(result)) for result in results) / 2
    for row, result in enumerate(results):
        axes.barh(row, result.ratio - lowest, left=lowest, color=_COLOURS[result.met], height=0.7)
        axes.plot([result.ratio_p10, result.ratio_p90], [row, row], color="black", linewidth=0.8)
        if result.goal:
            axes.plot(
                [goal_value(result.goal)] * 2,
                [row - 0.45, row + 0.45],
                color="black",
                linewidth=2.5,
            )
        label = f" {_short(result.ratio)}" + (f"  (goal {result.goal})" if result.goal else "")
        axes.text(
            max(result.ratio_p90, _goal_or(result)) * 1.03, row, label, va="center", fontsize=7
        )
    axes.axvline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.set(
        xscale="log",
        ylim=(len(results) - 0.4, -0.6),
        xlabel="ours / floor (for calls/s more is better, else less)",
    )
    axes.set_xlim(lowest, max(max(result.ratio_p90, _goal_or(result)) for result in results) * 4)
    axes.set_yticks(
        range(len(results)), [f"{result.case} [{result.unit}]" for result in results], fontsize=7
    )
    words = {True: "goal met", False: "goal missed", None: "no goal"}
    axes.legend(
        handles=[Patch(color=colour, label=words[met]) for met, colour in _COLOURS.items()],
        fontsize=7,
        loc="best",
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _goal_or(result: Result) -> float:
    return goal_value(result.goal) if result.goal else result.ratio
