"""Short soak test of GenerateScheduler; tests/nightly has the long one."""

from __future__ import annotations

from tests.unit.controller.rollout.soak import check_soak, run_soak


def test_soak_replays_by_seed() -> None:
    first, second = run_soak(0, 500), run_soak(0, 500)
    check_soak(first)
    assert first.digest.hexdigest() == second.digest.hexdigest()
    assert first.happened == second.happened
