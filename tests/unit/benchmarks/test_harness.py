"""Test the harness of the benchmarks: alternation, ratios, goals and reports."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.harness import CASES, Case, Pair, Result, goal_value, measure, meets, select
from benchmarks.report import line
from benchmarks.world import World

FIELDS = {"case", "ours", "floor", "unit", "ratio", "goal", "met"}


def measured(pair: Pair, goal: str = "", unit: str = "KB") -> Result:
    declared = Case(
        name="test.case",
        unit=unit,
        goal=goal,
        floor="a floor",
        is_default=True,
        prepare=lambda _: pair,
    )
    with World() as world:
        return measure(declared, world)


def figures(*values: float) -> Callable[[], float]:
    return itertools.cycle(values).__next__


def test_measure_sides_alternate() -> None:
    order: list[str] = []

    def side(name: str) -> Callable[[], float]:
        return lambda: order.append(name) or 1.0  # type: ignore[func-returns-value]

    measured(
        Pair(
            ours=side("ours"),
            floor=side("floor"),
            rounds=3,
            repeats=2,
            returns_figure=True,
            warm_up=1,
        )
    )
    assert order[:2] == ["ours", "floor"]
    assert order[2:] == ["ours"] * 2 + ["floor"] * 4 + ["ours"] * 4 + ["floor"] * 2


def test_measure_ratio_median_over_rounds() -> None:
    # In a round in which the machine is ten times slower, both sides are, and the ratio stays 2.
    result = measured(
        Pair(
            ours=figures(2, 20, 6),
            floor=figures(1, 10, 3),
            rounds=3,
            returns_figure=True,
            warm_up=0,
        )
    )
    assert (result.ours, result.floor) == (6, 3)
    assert (result.ratio, result.ratio_p10, result.ratio_p90) == (2, 2, 2)
    assert result.ours_p10 < result.ours < result.ours_p90


def test_measure_constant_floor() -> None:
    result = measured(Pair(ours=figures(5), floor=20.0, rounds=2, returns_figure=True), goal="<= 1")
    assert (result.floor, result.ratio, result.met) == (20, 0.25, True)


def test_measure_units() -> None:
    result = measured(
        Pair(ours=figures(0.002), floor=figures(0.001), rounds=1, returns_figure=True), unit="ms"
    )
    assert (result.ours, result.floor) == (2, 1)


@pytest.mark.parametrize(
    ("goal", "ratio", "met"),
    [("<= 1/6", 0.16, True), ("<= 1/6", 0.17, False), (">= 1", 1.0, True), (">= 1", 0.99, False)],
)
def test_meets_goals(goal: str, ratio: float, met: bool) -> None:
    assert meets(goal, ratio) is met


def test_goal_value_of_all_cases() -> None:
    assert all(goal_value(each.goal) > 0 for each in CASES.values() if each.goal)


def test_select_by_leading_parts() -> None:
    assert {each.name for each in select(["imports", "planner.found"])} >= {
        "imports.helmsman",
        "planner.found.4",
    }
    assert not [each for each in select(["payload"]) if each.name.startswith("payload_large")]
    assert not [each for each in select([]) if not each.is_default]
    with pytest.raises(ValueError, match=r"'import'.*calls"):
        select(["import"])


def test_measure_broken_case_cleans_up() -> None:
    callbacks: list[str] = []

    def prepare(world: World) -> Pair:
        world.until_case_ends.callback(callbacks.append, "called")
        raise RuntimeError("broken")

    declared = Case(
        name="test.broken", unit="s", goal="", floor="", is_default=True, prepare=prepare
    )
    with World() as world, pytest.raises(RuntimeError, match="broken"):
        measure(declared, world)
    assert callbacks == ["called"]


def test_main_unknown_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing", "--out", str(tmp_path / "out")]) == 2
    assert "no case is called 'nothing'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_main_skipped_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["end_to_end.width_128", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "end_to_end.width_128: skipped. TRL is not installed" in printed
    assert "pip install 'helmsman-rl[bench]'" in printed


def test_main_reports_working_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(world: World) -> Pair:
        raise RuntimeError("broken")

    def works(world: World) -> Pair:
        return Pair(ours=figures(1), floor=2.0, rounds=1, returns_figure=True)

    for name, goal, prepare in (
        ("test.broken", "", breaks),
        ("test.goal", "<= 1", works),
        ("test.works", "", works),
    ):
        declared = Case(name=name, unit="s", goal=goal, floor="", is_default=False, prepare=prepare)
        monkeypatch.setitem(CASES, name, declared)
    assert main(["test", "--out", str(tmp_path)]) == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(result["case"], result["goal"], result["met"]) for result in results] == [
        ("test.goal", "<= 1", True),
        ("test.works", None, None),
    ]
    assert all(result.keys() >= FIELDS for result in results)
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")
    assert "1 of 1 goals met" in capsys.readouterr().out


def test_report_missed_goal() -> None:
    result = measured(
        Pair(ours=figures(3), floor=1.0, rounds=1, returns_figure=True), goal="<= 1.2"
    )
    assert "MISSED" in line(result)
