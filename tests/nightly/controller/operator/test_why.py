"""Tests that `helmsman why` names the cause of staged hangs, and no cause in healthy runs.

HELMSMAN_SOAK_ROUNDS sets the number of healthy runs, which are then watched for 30 s.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.controller.operator.healthy import KINDS
from tests.controller.operator.staged_runs import (
    DAY_FAULTS,
    EXPECTED,
    Staged,
    assert_causes_found,
    assert_no_alarm,
    diagnose,
)

pytestmark = pytest.mark.timeout(300)

NIGHT_FAULTS = [each.fault for each in EXPECTED if each.fault not in DAY_FAULTS]
SOAK_ROUNDS = int(os.environ.get("HELMSMAN_SOAK_ROUNDS", "0"))
AT_ONCE = 5


@pytest.mark.parametrize("first", range(0, len(NIGHT_FAULTS), AT_ONCE))
def test_why_names_worker_and_cause(first: int) -> None:
    assert_causes_found(NIGHT_FAULTS[first : first + AT_ONCE])


@pytest.mark.parametrize("run", ["late_rank", "compute"])
def test_why_finds_nothing_in_healthy_run(stage: Callable[[str], Staged], run: str) -> None:
    """A rank is slow, or a first call computes for a long time."""
    staged = stage(run)
    for _ in range(8):
        diagnosis = diagnose(staged.run_id)
        assert diagnosis.is_healthy, diagnosis
        assert "actor" in diagnosis.waits_for


@pytest.mark.parametrize("first", range(0, max(SOAK_ROUNDS, len(KINDS)), AT_ONCE))
def test_why_raises_no_alarm(first: int) -> None:
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(first, first + AT_ONCE)]
    assert_no_alarm(kinds, first_seed=first, watched_s=30.0 if SOAK_ROUNDS else 10.0)
