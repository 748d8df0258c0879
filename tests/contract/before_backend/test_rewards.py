"""RewardPool on every scheduler: each score once, and whatever takes too long, raises or dies fails
alone.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
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
    RewardLostError,
    RewardTimeoutError,
    RewardWorkersSpentError,
    RoleNotFoundError,
)
from helmsman.api.scheduler import Job, Scheduler
from helmsman.controller._workflows.reward_pool import RewardPool
from tests.contract.helpers import LIMIT_S, Gate, is_running, wait_gone, wait_until
from tests.contract.reward_functions import Scorer, act

ACT, AACT = "tests.contract.reward_functions.act", "tests.contract.reward_functions.aact"
HAS_NO_PROCESS = pytest.mark.not_on("inline", "its workers have no process of their own")
MakePool = Callable[..., RewardPool]


@pytest.fixture
def make_pool(scheduler: Scheduler, role: str) -> Iterator[MakePool]:
    """Make and start a pool of two workers; it is closed after the test."""
    with contextlib.ExitStack() as pools:

        def make(
            function: Any = ACT, timeout: float | None = LIMIT_S, num: int = 2, **options: Any
        ) -> RewardPool:
            pool = pools.enter_context(
                RewardPool(scheduler, function, Job(role=role, replicas=num), timeout, **options)
            )
            pool.initialize()
            return pool

        yield make


async def outcomes(*scores: Awaitable[Any]) -> list[Any]:
    return await asyncio.gather(*scores, return_exceptions=True)


def begin(pool: RewardPool, threads: ThreadPoolExecutor, *args: Any) -> Any:
    """A score that a thread with a loop of its own waits for."""
    return threads.submit(lambda: asyncio.run(pool.async_score(*args)))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def pids(pool: RewardPool) -> list[int]:
    """The processes of its workers, which must be idle."""
    return [
        status.pid or 0
        for status in pool.scheduler.status()
        if status.worker_id.startswith(f"{pool.role}/")
    ]


# --- what works -----------------------------------------------------------------------------------


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


# --- what fails -----------------------------------------------------------------------------------


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
    """As code does that a model has written."""
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


def test_reward_pool_stuck_function(
    make_pool: MakePool, gate: Gate, threads: ThreadPoolExecutor, backend: str
) -> None:
    pool = make_pool(timeout=3.0)
    before = pids(pool)
    stuck = begin(pool, threads, "wait", *gate.files)
    gate.wait_started()
    assert pool.map(range(50)) == [2 * number for number in range(50)], "the other worker goes on"
    with pytest.raises(
        RewardTimeoutError, match=r"score\('wait', .* did not end within .*limit 3 s"
    ) as caught:
        stuck.result(LIMIT_S)
    assert "wait_for_file(release)" in caught.value.stack
    if backend != "inline":
        wait_until(
            lambda: len(set(pids(pool)) - set(before)) == 1, "one worker has another process"
        )
    other = Gate(Path(gate.started).parent, "other")
    again = [
        begin(pool, threads, "wait", f"{other.started}{number}", other.release)
        for number in range(2)
    ]
    wait_until(
        lambda: all(os.path.exists(f"{other.started}{number}") for number in range(2)),
        "both workers serve",
    )
    other.open()
    assert [each.result(LIMIT_S) for each in again] == ["waited"] * 2


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


@pytest.mark.slow
@pytest.mark.not_on("ray", "its workers are ended as for a stuck function")
def test_reward_pool_async_blocks_loop(make_pool: MakePool, gate: Gate) -> None:
    pool = make_pool(AACT, timeout=1.0, num=1)
    blocking, beside = asyncio.run(outcomes(pool("block", gate.release), pool("for ever")))
    assert isinstance(blocking, RewardTimeoutError)
    assert isinstance(beside, RewardTimeoutError | RewardLostError)
    gate.open()
    assert pool.map([1]) == [2]


@HAS_NO_PROCESS
def test_reward_pool_worker_dies(make_pool: MakePool) -> None:
    pool = make_pool()
    lost, other = asyncio.run(outcomes(pool("die"), pool(1)))
    assert isinstance(lost, RewardLostError)
    assert "score('die') has no result and was not repeated" in str(lost)
    assert "SIGKILL" in str(lost)
    assert other == 2
    assert pool.map(range(20)) == [2 * number for number in range(20)]
    wait_until(lambda: all(map(is_running, pids(pool))), "both are back")


@HAS_NO_PROCESS
@pytest.mark.parametrize("function", [ACT, AACT])
def test_reward_pool_idle_worker_dies(make_pool: MakePool, function: str) -> None:
    pool = make_pool(function)
    assert pool.map([1, 2, 3]) == [2, 4, 6]
    before = pids(pool)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_gone({str(pid): pid for pid in before})
    assert pool.map(range(20)) == [2 * number for number in range(20)]


@HAS_NO_PROCESS
def test_reward_pool_restarts_spent(make_pool: MakePool) -> None:
    pool = make_pool(num=1, max_restarts=1)
    first, second, third = asyncio.run(outcomes(pool("die"), pool("die"), pool(1)))
    assert isinstance(first, RewardLostError)
    assert isinstance(second, RewardLostError)
    assert isinstance(third, RewardWorkersSpentError)
    assert "after 1 restarts within" in str(third)
    with pytest.raises(RewardWorkersSpentError, match="SIGKILL"):
        pool.map([1])


# --- who waits no more ----------------------------------------------------------------------------


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
    assert not list(Path(gate.started).parent.glob("a-*")), "it was never begun"


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


@HAS_NO_PROCESS
def test_reward_pool_close_during_restart(make_pool: MakePool, threads: ThreadPoolExecutor) -> None:
    pool = make_pool()
    before = pids(pool)
    lost = begin(pool, threads, "die")
    with pytest.raises(RewardLostError):
        lost.result(LIMIT_S)
    pool.close()
    wait_gone({str(pid): pid for pid in before})


def test_reward_pool_invalid_options(scheduler: Scheduler) -> None:
    job = Job(role="reward")
    for options in ({"timeout": 0.0}, {"max_in_flight_per_worker": 0}, {"max_restarts": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            RewardPool(scheduler, act, job, **options)
    with pytest.raises(HelmsmanError, match="call initialize"):
        RewardPool(scheduler, act, job).map([1])
