"""RewardPool: workers that hang or die are replaced, and only their scores fail."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helmsman.api.errors import RewardLostError, RewardTimeoutError, RewardWorkersSpentError
from tests.contract.groups import AACT, ACT, MakePool, begin, outcomes, pids
from tests.contract.helpers import LIMIT_S, Gate, is_running, wait_gone, wait_until
from tests.contract.marks import needs_processes, only_local


def test_reward_pool_stuck_function(
    make_pool: MakePool, gate: Gate, threads: ThreadPoolExecutor, backend: str
) -> None:
    pool = make_pool(timeout=3.0)
    before = pids(pool)
    stuck = begin(pool, threads, "wait", *gate.files)
    gate.wait_started()
    assert pool.map(range(50)) == [2 * number for number in range(50)], "the other worker serves"
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


@only_local
def test_reward_pool_async_blocks_loop(make_pool: MakePool, gate: Gate) -> None:
    pool = make_pool(AACT, timeout=1.0, num=1)
    blocking, beside = asyncio.run(outcomes(pool("block", gate.release), pool("for ever")))
    assert isinstance(blocking, RewardTimeoutError)
    assert isinstance(beside, RewardTimeoutError | RewardLostError)
    gate.open()
    assert pool.map([1]) == [2]


@needs_processes
def test_reward_pool_worker_dies(make_pool: MakePool) -> None:
    pool = make_pool()
    lost, other = asyncio.run(outcomes(pool("die"), pool(1)))
    assert isinstance(lost, RewardLostError)
    assert "score('die') has no result and was not repeated" in str(lost)
    assert "SIGKILL" in str(lost)
    assert other == 2
    assert pool.map(range(20)) == [2 * number for number in range(20)]
    wait_until(lambda: all(map(is_running, pids(pool))), "both workers run")


@needs_processes
@pytest.mark.parametrize("function", [ACT, AACT])
def test_reward_pool_idle_worker_dies(make_pool: MakePool, function: str) -> None:
    pool = make_pool(function)
    assert pool.map([1, 2, 3]) == [2, 4, 6]
    before = pids(pool)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    wait_gone({str(pid): pid for pid in before})
    assert pool.map(range(20)) == [2 * number for number in range(20)]


@needs_processes
def test_reward_pool_restarts_spent(make_pool: MakePool) -> None:
    pool = make_pool(num=1, max_restarts=1)
    first, second, third = asyncio.run(outcomes(pool("die"), pool("die"), pool(1)))
    assert isinstance(first, RewardLostError)
    assert isinstance(second, RewardLostError)
    assert isinstance(third, RewardWorkersSpentError)
    assert "after 1 restarts within" in str(third)
    with pytest.raises(RewardWorkersSpentError, match="SIGKILL"):
        pool.map([1])


@needs_processes
def test_reward_pool_close_during_restart(make_pool: MakePool, threads: ThreadPoolExecutor) -> None:
    pool = make_pool()
    before = pids(pool)
    lost = begin(pool, threads, "die")
    with pytest.raises(RewardLostError):
        lost.result(LIMIT_S)
    pool.close()
    wait_gone({str(pid): pid for pid in before})
