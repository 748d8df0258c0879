"""RewardPool: each score is computed once, and only the scores that fail raise."""

from __future__ import annotations

import asyncio
import collections
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helmsman.api.errors import (
    ArgumentNotSerializableError,
    EngineCallError,
    EngineCreationError,
    GroupCallError,
    HelmsmanError,
    RewardTimeoutError,
    RoleNotFoundError,
)
from helmsman.api.scheduler import Job, Scheduler
from helmsman.controller._rollout.reward_pool import RewardPool
from tests.contract.groups import AACT, ACT, MakePool, begin, outcomes, pids
from tests.contract.helpers import LIMIT_S, Gate
from tests.contract.reward_functions import Scorer, act


def test_reward_pool_map_order(make_pool: MakePool) -> None:
    pool = make_pool(act)
    assert pool.map(range(100)) == [2 * number for number in range(100)]
    assert pool.map([]) == []

    async def score() -> list[Any]:
        return await asyncio.gather(*(pool(number) for number in range(5)), pool.async_score(21))

    assert asyncio.run(score()) == [0, 2, 4, 6, 8, 42]


def test_reward_pool_computes_once(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool()

    async def score() -> list[Any]:
        return await asyncio.gather(
            *(pool("note", str(tmp_path), f"n{number}") for number in range(300))
        )

    assert asyncio.run(score()) == [f"n{number}" for number in range(300)]
    noted = collections.Counter(name.partition("-")[0] for name in os.listdir(tmp_path))
    assert noted == {f"n{number}": 1 for number in range(300)}


def test_reward_pool_async_concurrency(make_pool: MakePool) -> None:
    pool = make_pool(AACT, num=1, max_in_flight_per_worker=8)

    async def score() -> list[Any]:
        return await asyncio.gather(*(pool("together", 8) for _ in range(16)))

    assert len(set(asyncio.run(score()))) == 1


def test_reward_pool_async_object(make_pool: MakePool) -> None:
    pool = make_pool(Scorer(3))
    assert asyncio.run(pool.async_score(5, plus=1)) == 16


def test_reward_pool_refuses_non_function(make_pool: MakePool) -> None:
    with pytest.raises(
        (EngineCreationError, GroupCallError),
        match="the reward function is 3, expected a callable",
    ):
        make_pool("tests.contract.reward_functions.UNCALLABLE")
    with pytest.raises((EngineCreationError, GroupCallError), match="no_such_function"):
        make_pool("tests.contract.reward_functions.no_such_function")
    with pytest.raises(
        (EngineCreationError, GroupCallError),
        match="'act' has no module; expected 'package.module.function'",
    ):
        make_pool("act")


def test_reward_pool_exception(make_pool: MakePool) -> None:
    pool = make_pool()
    good, bad, other = asyncio.run(outcomes(pool(1), pool("fail", "x", 7), pool(2)))
    assert (good, other) == (2, 4)
    assert isinstance(bad, EngineCallError)
    assert isinstance(bad.__cause__, ValueError)
    assert "no score for ('x', 7)" in str(bad)
    assert "reward_functions.py" in bad.remote_traceback
    with pytest.raises(EngineCallError, match="no score for"):
        pool.map([1, 2, "fail", 3])
    assert pool.map([4]) == [8]


@pytest.mark.parametrize("function", [ACT, AACT])
def test_reward_pool_sys_exit(make_pool: MakePool, function: str) -> None:
    """Code that a model has written may call sys.exit."""
    pool = make_pool(function, num=1)
    before = pids(pool)

    async def score() -> list[Any]:
        return await outcomes(pool("exit"), pool(1), pool("exit"), pool(2))

    first, one, second, two = asyncio.run(score())
    for bad in (first, second):
        assert isinstance(bad, EngineCallError)
        assert bad.remote_type == "SystemExit"
    assert (one, two) == (2, 4)
    assert pids(pool) == before


def test_reward_pool_unserializable(make_pool: MakePool) -> None:
    pool = make_pool()
    with pytest.raises(ArgumentNotSerializableError, match=r"args\[0\]"):
        pool.map([threading.Lock()])
    assert pool.map([4]) == [8]


def test_reward_pool_async_timeout(make_pool: MakePool) -> None:
    pool = make_pool(AACT, timeout=1.0, num=1)
    before = pids(pool)

    async def score() -> list[Any]:
        return await outcomes(pool("for ever"), *(pool(number) for number in range(10)))

    late, *others = asyncio.run(score())
    assert isinstance(late, RewardTimeoutError)
    assert "The function was cancelled" in str(late)
    assert others == [2 * number for number in range(10)]
    assert pids(pool) == before
    assert pool.map([1]) == [2]


def test_reward_pool_cancelled_score(make_pool: MakePool, gate: Gate) -> None:
    pool = make_pool(num=1)

    async def score() -> list[Any]:
        running = asyncio.create_task(pool.async_score("wait", *gate.files))
        await asyncio.to_thread(gate.wait_started)
        waiting = [
            asyncio.create_task(pool.async_score("note", str(Path(gate.started).parent), name))
            for name in "ab"
        ]
        await asyncio.sleep(0)
        running.cancel()
        waiting[0].cancel()
        ended = await asyncio.gather(running, waiting[0], return_exceptions=True)
        gate.open()
        return [*ended, await waiting[1]]

    running, withdrawn, done = asyncio.run(score())
    assert isinstance(running, asyncio.CancelledError)
    assert isinstance(withdrawn, asyncio.CancelledError)
    assert done == "b"
    assert not list(Path(gate.started).parent.glob("a-*")), "the cancelled score never began"


def test_reward_pool_close_fails_scores(
    make_pool: MakePool, gate: Gate, threads: ThreadPoolExecutor, scheduler: Scheduler
) -> None:
    pool = make_pool(num=1)
    scores = [begin(pool, threads, "wait", *gate.files) for _ in range(3)]
    gate.wait_started()
    closing = threads.submit(pool.close)
    for score in scores:
        with pytest.raises(HelmsmanError, match="closed"):
            score.result(LIMIT_S)
    gate.open()
    closing.result(LIMIT_S)
    pool.close()
    with pytest.raises(HelmsmanError, match="closed"):
        pool.map([1])
    with pytest.raises(RoleNotFoundError):
        scheduler.get_workers(pool.role)


def test_reward_pool_invalid_options(scheduler: Scheduler) -> None:
    job = Job(role="reward")
    for options in ({"timeout": 0.0}, {"max_in_flight_per_worker": 0}, {"max_restarts": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            RewardPool(scheduler, act, job, **options)
    with pytest.raises(HelmsmanError, match="call initialize"):
        RewardPool(scheduler, act, job).map([1])
