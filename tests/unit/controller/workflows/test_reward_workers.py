"""Who waits for a worker of a RewardPool when none can be started any more."""

from __future__ import annotations

import pytest

from helmsman.api.errors import RewardWorkersSpentError
from helmsman.controller._workflows.reward_workers import RewardWorkers
from tests.unit.controller.generation.backends import virtually


@virtually
@pytest.mark.parametrize("max_restarts", [0, 3, 64])
async def test_reward_workers_that_do_not_come_back(max_restarts: int) -> None:
    """Also where pauses that double would have spread the restarts over more than the hour that
    they are counted in.
    """
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
