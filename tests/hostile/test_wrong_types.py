"""Tests that refused arguments change neither the order nor the results of calls to a worker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman import Job, LocalScheduler
from tests.contract.engines import Counter
from tests.unit.hostile.wrong_values import OF_SCHEDULER, WORKER, assert_refuses


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[LocalScheduler]:
    """A scheduler with one worker, which has a Counter."""
    with LocalScheduler(log_dir=tmp_path / "logs", preload=()) as made:
        made.create_workers(Job(role="w"))
        asyncio.run(made.create_engine(WORKER, Counter, "counter"))
        yield made


def test_wrong_types_keep_call_order(scheduler: LocalScheduler) -> None:
    """Threads pass wrong arguments while calls are in flight."""
    random_numbers = random.Random(0)
    pid = scheduler.call_engine(WORKER, "pid", "counter")

    async def many() -> list[Any]:
        calls = []
        for _ in range(200):
            wrong = random_numbers.choice(OF_SCHEDULER)
            await asyncio.to_thread(assert_refuses, scheduler, wrong)
            call = scheduler.async_call_engine(WORKER, "add", "counter", 1, rpc_timeout=20.0)
            calls.append(asyncio.ensure_future(call))
        return await asyncio.gather(*calls)

    assert asyncio.run(many()) == list(range(1, 201))
    assert scheduler.call_engine(WORKER, "pid", "counter") == pid
    assert [status.worker_id for status in scheduler.status()] == [WORKER]
