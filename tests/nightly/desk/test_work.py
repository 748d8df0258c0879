"""Tests that `why` and `status` show all kinds of hung work, and no fault in healthy runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.desk.work_runs import (
    EXPECTED_WORK,
    assert_work_healthy,
    assert_work_named,
)

pytestmark = pytest.mark.timeout(300)
KINDS = [each.kind for each in EXPECTED_WORK]


@pytest.mark.parametrize("kinds", [KINDS[n::3] for n in range(3)], ids="-".join)
def test_hung_work_is_named(kinds: Sequence[str]) -> None:
    assert_work_named(kinds)


def test_healthy_work_raises_no_alarm() -> None:
    """Watch them for longer than the limits of hung episodes."""
    assert_work_healthy(("progressing", "downloading", "first", "program"), watched_s=45.0)
