"""Tests that `helmsman why` names the cause of staged hangs, and no cause in a healthy run."""

from __future__ import annotations

import pytest

from tests.desk.staged_runs import (
    DAY_CALLS,
    DAY_FAULTS,
    assert_calls_named,
    assert_causes_found,
    assert_no_alarm,
)

pytestmark = pytest.mark.timeout(300)


def test_why_names_worker_and_cause() -> None:
    assert_causes_found(DAY_FAULTS)


def test_why_raises_no_alarm() -> None:
    assert_no_alarm(["mixed_generations"], first_seed=0, watched_s=3.0)


def test_why_names_calls_without_progress() -> None:
    assert_calls_named(DAY_CALLS)
