"""Test that no call of many kinds is lost, doubled or wrong while workers are killed at random.

HELMSMAN_SOAK_ROUNDS multiplies the number of calls, HELMSMAN_SOAK_SEED draws other ones.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from helmsman import make_scheduler
from tests.hostile.mixed_calls import run

NUM_CALLS = 1_000 * int(os.environ.get("HELMSMAN_SOAK_ROUNDS", "6"))
SEED = int(os.environ.get("HELMSMAN_SOAK_SEED", "1"))
RAY = {"address": "local", "num_cpus": 2}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("backend", "options"), [("local", {}), ("ray", RAY)])
async def test_mixed_calls_have_one_outcome(
    backend: str, options: dict[str, object], tmp_path: Path
) -> None:
    if backend == "ray":
        pytest.importorskip("ray")
    with make_scheduler(backend, **options) as scheduler:
        mix = await run(scheduler, tmp_path, SEED, lambda num_calls: num_calls >= NUM_CALLS)
    assert not mix.faults
    assert mix.num_kills > 0
    assert mix.outcomes["small: replied"] > mix.outcomes["small: WorkerFailedError"] > 0
