"""Tests that `helmsman why` names the cause of staged hangs, and no cause in healthy runs.

HELMSMAN_SOAK_ROUNDS sets the number of healthy runs, which are then watched for 30 s.
"""

from __future__ import annotations

import os

import pytest

from tests.desk.healthy import KINDS
from tests.desk.staged_runs import (
    CALLS,
    DAY_CALLS,
    DAY_FAULTS,
    EXPECTED,
    HEALTHY_CALLS,
    assert_calls_named,
    assert_calls_raise_nothing,
    assert_causes_found,
    assert_no_alarm,
)

pytestmark = pytest.mark.timeout(300)

NIGHT_FAULTS = [each.fault for each in EXPECTED if each.fault not in DAY_FAULTS]
SOAK_ROUNDS = int(os.environ.get("HELMSMAN_SOAK_ROUNDS", "0"))
AT_ONCE = 5
NIGHT_CALLS = [each for each in CALLS if each not in DAY_CALLS]
CALLS_AT_ONCE = 8
RAY_CALLS = ("native_mutex", "peer_answers_nothing", "stream_is_silent", "spins")
RAY_HEALTHY_CALLS = ("slow_download", "download_in_pool", "downloads_together", "sleeps_as_usual")


@pytest.mark.parametrize("first", range(0, len(NIGHT_FAULTS), AT_ONCE))
def test_why_names_worker_and_cause(first: int) -> None:
    assert_causes_found(NIGHT_FAULTS[first : first + AT_ONCE])


@pytest.mark.parametrize("first", range(0, max(SOAK_ROUNDS, len(KINDS)), AT_ONCE))
def test_why_raises_no_alarm(first: int) -> None:
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(first, first + AT_ONCE)]
    assert_no_alarm(kinds, first_seed=first, watched_s=30.0 if SOAK_ROUNDS else 10.0)


@pytest.mark.parametrize("first", range(0, len(NIGHT_CALLS), CALLS_AT_ONCE))
def test_why_names_calls_without_progress(first: int) -> None:
    assert_calls_named(NIGHT_CALLS[first : first + CALLS_AT_ONCE])


@pytest.mark.parametrize("first", range(0, len(HEALTHY_CALLS), CALLS_AT_ONCE))
def test_why_raises_no_alarm_for_calls_with_progress(first: int) -> None:
    assert_calls_raise_nothing(HEALTHY_CALLS[first : first + CALLS_AT_ONCE], watched_s=60.0)


def test_why_names_calls_without_progress_on_ray() -> None:
    assert_calls_named(RAY_CALLS, "ray")


def test_why_raises_no_alarm_for_calls_with_progress_on_ray() -> None:
    assert_calls_raise_nothing(RAY_HEALTHY_CALLS, watched_s=40.0, scheduler="ray")
