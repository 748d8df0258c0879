"""Test of plan_jobs on many random clusters; tests/unit has fewer."""

from __future__ import annotations

from tests.unit.controller.placement.exhaustive_search import check_seeds


def test_plan_jobs_finds_a_plan_if_one_exists() -> None:
    check_seeds(range(300, 3300))
