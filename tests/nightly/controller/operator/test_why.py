"""Tests that `helmsman why` names the cause of staged hangs, and no cause in healthy runs.

HELMSMAN_SOAK_ROUNDS sets the number of healthy runs, which are then watched for 30 s.
"""

from __future__ import annotations

import os

import pytest

from tests.controller.operator.healthy import KINDS
from tests.controller.operator.staged_runs import (
    DAY_FAULTS,
    EXPECTED,
    assert_causes_found,
    assert_no_alarm,
)

pytestmark = pytest.mark.timeout(300)

NIGHT_FAULTS = [each.fault for each in EXPECTED if each.fault not in DAY_FAULTS]
SOAK_ROUNDS = int(os.environ.get("HELMSMAN_SOAK_ROUNDS", "0"))
AT_ONCE = 5


@pytest.mark.parametrize("first", range(0, len(NIGHT_FAULTS), AT_ONCE))
def test_why_names_worker_and_cause(first: int) -> None:
    assert_causes_found(NIGHT_FAULTS[first : first + AT_ONCE])


@pytest.mark.parametrize("first", range(0, max(SOAK_ROUNDS, len(KINDS)), AT_ONCE))
def test_why_raises_no_alarm(first: int) -> None:
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(first, first + AT_ONCE)]
    assert_no_alarm(kinds, first_seed=first, watched_s=30.0 if SOAK_ROUNDS else 10.0)
