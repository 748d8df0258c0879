"""`helmsman why` raises no alarm in healthy runs; 50 of them with HELMSMAN_SOAK_ROUNDS=50."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.controller.operator.conftest import end, run_of, start
from tests.controller.operator.healthy import KINDS
from tests.controller.operator.test_why import diagnose

HEALTHY = Path(__file__).with_name("healthy.py")
SOAK_ROUNDS = int(os.environ.get("HELMSMAN_SOAK_ROUNDS", "0"))
NUM_RUNS = max(SOAK_ROUNDS, len(KINDS))
AT_ONCE = 5
WATCHED_S = 30.0 if SOAK_ROUNDS else 10.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("first", range(0, NUM_RUNS, AT_ONCE))
def test_why_raises_no_alarm(first: int) -> None:
    """Each run is of another kind, or has other durations."""
    kinds = [list(KINDS)[number % len(KINDS)] for number in range(first, first + AT_ONCE)]
    processes = [
        start(kind, str(first + number), script=HEALTHY) for number, kind in enumerate(kinds)
    ]
    try:
        runs = [run_of(process).run_id for process in processes]
        deadline = time.monotonic() + WATCHED_S
        while time.monotonic() < deadline:
            for kind, run_id in zip(kinds, runs, strict=True):
                diagnosis = diagnose(run_id)
                assert diagnosis.is_healthy, (kind, diagnosis)
                assert diagnosis.waits_for
    finally:
        for process in processes:
            end(process)
