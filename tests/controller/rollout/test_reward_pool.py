"""Tests of RewardPool.on_this_machine; tests/contract tests pools on every scheduler."""

from __future__ import annotations

import asyncio
import os

import psutil
import pytest

from helmsman.api.errors import EngineCreationError, HelmsmanError, RewardTimeoutError
from helmsman.controller._rollout.executor import WorkflowExecutor
from helmsman.controller._rollout.reward_pool import RewardPool
from tests.contract.helpers import wait_gone

ACT = "tests.contract.reward_functions.act"


def children() -> dict[str, int]:
    return {str(process): process.pid for process in psutil.Process().children(recursive=True)}


def test_reward_pool_on_this_machine() -> None:
    before = children()

    def score(question: str, answer: int) -> tuple[float, int]:
        return float(len(question) == answer), os.getpid()

    async def both(pool: RewardPool) -> list[tuple[float, int]]:
        return await asyncio.gather(pool("four", 4), pool("four", answer=5))

    with RewardPool.on_this_machine(score, num_processes=2, timeout=30.0) as pool:
        (right, one), (wrong, other) = asyncio.run(both(pool))
        assert (right, wrong) == (1.0, 0.0)
        assert len({one, other, os.getpid()}) == 3
        ours = {name: pid for name, pid in children().items() if name not in before}
        assert len(ours) >= 2
    wait_gone(ours)
    pool.close()
    with pytest.raises(HelmsmanError, match="closed"):
        pool.map([1])


def test_reward_pool_failed_start_leaves_no_process() -> None:
    before = children()
    with pytest.raises(EngineCreationError, match="no_such_module"):
        RewardPool.on_this_machine("no_such_module.score", num_processes=1)
    wait_gone({name: pid for name, pid in children().items() if name not in before})


def test_reward_pool_in_episodes() -> None:
    with RewardPool.on_this_machine(ACT, num_processes=2, timeout=3.0) as pool:

        async def workflow(item: int) -> int:
            return int(
                await (pool("wait", os.devnull, "/no/such/file") if item == 3 else pool(item))
            )

        with WorkflowExecutor(workflow) as executor:
            batch = executor.prepare_batch(iter(range(10)), 8)
            assert sorted(episode.value for episode in batch) == [0, 2, 4, 8, 10, 12, 14, 16]
            assert executor.figures().num_failed == 1
            with pytest.raises(RewardTimeoutError):
                executor.rollout_batch([3])
