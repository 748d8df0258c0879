"""Test that callers of a RewardPool fail when none of its workers can be restarted."""

from __future__ import annotations

import pytest

from helmsman.api.errors import RewardWorkersSpentError
from helmsman.controller._rollout.reward_workers import RewardWorkers
from tests.unit.controller.rollout.backends import virtually


@virtually
@pytest.mark.parametrize("max_restarts", [0, 3, 64])
async def test_reward_workers_without_restarts(max_restarts: int) -> None:
    """64 pauses that double would exceed the hour in which restarts are counted."""
    num_tried = 0

    async def rebuild(worker_id: str) -> None:
        nonlocal num_tried
        num_tried += 1
        raise OSError(f"no room for {worker_id}")

    workers = RewardWorkers("reward", ["reward/0"], 1, max_restarts, rebuild)
    process = await workers.acquire(is_again=False)
    workers.lose(process, "it was killed")
    with pytest.raises(
        RewardWorkersSpentError, match="no room for reward/0" if max_restarts else "it was killed"
    ):
        await workers.acquire(is_again=False)
    assert num_tried == max_restarts
