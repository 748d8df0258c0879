"""Worker groups and reward pools of the contract tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from helmsman.api.batch import Batch
from helmsman.controller._groups.cluster import Cluster
from helmsman.controller._rollout.reward_pool import RewardPool
from tests.contract.group_workers import Member

ON_CPU = {"HELMSMAN_PLATFORM": "cpu"}
"""Environment of workers whose devices do not exist."""


class Members(Cluster[Member]):
    """A group with the methods of its workers."""

    add = Member.add
    coordinates = Member.coordinates
    echo = Member.echo
    fail_on = Member.fail_on
    make = Member.make
    rows_of = Member.rows_of


def rows(size: int) -> Batch:
    """Make a batch of numbered rows."""
    return Batch({"x": np.arange(size)})


ACT = "tests.contract.reward_functions.act"
AACT = "tests.contract.reward_functions.aact"
MakePool = Callable[..., RewardPool]


async def outcomes(*scores: Awaitable[Any]) -> list[Any]:
    """Await all scores; return their results and errors."""
    return await asyncio.gather(*scores, return_exceptions=True)


def begin(pool: RewardPool, threads: ThreadPoolExecutor, *args: Any) -> Future[Any]:
    """Begin a score, for which a thread with its own event loop waits."""
    return threads.submit(lambda: asyncio.run(pool.async_score(*args)))


def pids(pool: RewardPool) -> list[int]:
    """Return the processes of the pool's workers."""
    return [
        status.pid or 0
        for status in pool.scheduler.status()
        if status.worker_id.startswith(f"{pool.role}/")
    ]
