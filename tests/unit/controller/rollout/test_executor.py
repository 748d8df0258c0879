"""Tests of WorkflowExecutor: batches, failures, limits and close."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from helmsman.api.errors import EpisodeTimeoutError, HelmsmanError, WorkflowFailuresError
from helmsman.api.scheduler import Job
from helmsman.controller._rollout.executor import WorkflowExecutor
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._rollout.staleness import BoundedStaleness, Episode
from helmsman.testing.contract_tools import wait_until
from tests.controller.engines import CountingRollout
from tests.controller.fakes import FakeScheduler


async def _ten_times(item: int) -> int:
    await asyncio.sleep(0)
    return item * 10


def _items(batch: Any) -> list[int]:
    return [episode.item for episode in batch]


def test_rollout_batch() -> None:
    ended = []

    async def workflow(item: int) -> int | None:
        if item > 4:
            raise KeyError("answer")
        await asyncio.sleep(0.001 * (10 - item))
        ended.append(item)
        return None if item == 3 else item * 10

    with WorkflowExecutor(workflow) as executor:
        assert executor.rollout_batch(range(5)) == [0, 10, 20, None, 40]
        assert executor.rollout_batch([]) == []
        ended.clear()
        with pytest.raises(KeyError, match="answer"):
            executor.rollout_batch([5, 1, 2])
    assert sorted(ended) == [1, 2], "the error is raised after the end of all episodes"


def test_prepare_batch_counts_failures() -> None:
    async def workflow(item: int) -> int:
        if item % 4 == 1 or item > 100:
            raise ValueError(f"no answer in {item}")
        return item

    with WorkflowExecutor(workflow, max_failures=3, failure_window=8) as executor:
        source = itertools.count()
        assert _items(executor.prepare_batch(source, 6)) == [0, 2, 3, 4, 6, 7]
        assert executor.figures().num_failed == 2
        executor.set_version(1)
        with pytest.raises(WorkflowFailuresError, match="no answer in") as caught:
            executor.prepare_batch(itertools.count(101), 6)
        assert isinstance(caught.value.__cause__, ValueError)
        assert caught.value.num_failed > 3


def test_prepare_batch_max_in_flight() -> None:
    running, most = 0, 0

    async def workflow(item: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return item

    with WorkflowExecutor(workflow, batch_policy=BoundedStaleness(4), max_in_flight=3) as executor:
        executor.prepare_batch(itertools.count(), 20)
    assert most == 3


def test_executor_refuses_invalid_arguments() -> None:
    with WorkflowExecutor(_ten_times) as executor:
        executor.set_version(3)
        with pytest.raises(ValueError, match="version is 2; expected 3 or more"):
            executor.set_version(2)
        with pytest.raises(ValueError, match="batch_size is 0"):
            executor.prepare_batch(itertools.count(), 0)
    with pytest.raises(HelmsmanError, match="closed; make a new one"):
        executor.rollout_batch([1])
    executor.close()
    for options in ({"max_in_flight": 0}, {"max_failures": -1}, {"failure_window": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            WorkflowExecutor(_ten_times, **options)  # type: ignore[arg-type]


def test_episode_that_raises_system_exit() -> None:
    async def workflow(item: int) -> int:
        if item == 1:
            sys.exit("from the code of a model")
        if item == 2:
            raise KeyboardInterrupt
        if item == 3:
            await asyncio.gather(workflow(0), workflow(1))  # in tasks of their own
        return item

    with WorkflowExecutor(workflow) as executor:
        assert _items(executor.prepare_batch(itertools.count(), 3)) == [0, 4, 5]
        assert executor.figures().num_failed == 3
        with pytest.raises(
            HelmsmanError, match="the episode raised SystemExit.*cannot end the script from another"
        ) as caught:
            executor.rollout_batch([0, 1])
        assert isinstance(caught.value.__cause__, SystemExit)


def test_source_or_filter_that_raises_system_exit() -> None:
    def keep(episode: Episode) -> bool:
        return episode.item > 0 or sys.exit(3)

    def source() -> Iterator[int]:
        yield from range(3)
        sys.exit("no more")

    with WorkflowExecutor(_ten_times, batch_policy=BoundedStaleness(keep=keep)) as executor:
        with pytest.raises(
            HelmsmanError, match=r"the source of items raised SystemExit\('no more'\)"
        ):
            executor.prepare_batch(source(), 4)
        wait_until(lambda: executor.figures().num_failed == 1, "the filter has failed for item 0")
        assert _items(executor.prepare_batch(itertools.count(3), 2)) == [1, 2]


def test_executor_refuses_calls_from_its_loop() -> None:
    async def workflow(item: int) -> int:
        return executor.figures().num_started

    def source() -> Iterator[int]:
        while True:
            yield executor.figures().num_started

    with WorkflowExecutor(workflow) as executor:
        with pytest.raises(RuntimeError, match="it would deadlock"):
            executor.rollout_batch([1])
        with pytest.raises(RuntimeError, match="it would deadlock"):
            executor.prepare_batch(source(), 1)


def test_close_in_many_threads() -> None:
    for _ in range(10):
        executor = WorkflowExecutor(_ten_times, batch_policy=BoundedStaleness(1))
        barrier = threading.Barrier(6)

        def submit(
            executor: WorkflowExecutor = executor, barrier: threading.Barrier = barrier
        ) -> None:
            barrier.wait(10)

            def submit_forever() -> None:
                while True:
                    executor.rollout_batch([1, 2])

            with pytest.raises(HelmsmanError, match="closed; make a new one"):
                submit_forever()

        def close(
            executor: WorkflowExecutor = executor, barrier: threading.Barrier = barrier
        ) -> None:
            barrier.wait(10)
            executor.close()

        with concurrent.futures.ThreadPoolExecutor(6) as threads:
            for future in [threads.submit(work) for work in (submit, close) * 3]:
                future.result(30)


def test_episode_timeout_has_a_default() -> None:
    parameters = inspect.signature(WorkflowExecutor).parameters
    assert parameters["episode_timeout"].default == 1800.0


def test_episode_timeout_aborts_its_requests() -> None:
    with FakeScheduler() as scheduler:
        rollout = RolloutController(
            scheduler, CountingRollout, Job(role="rollout", replicas=1), engine_args=(True,)
        )

        async def workflow(item: int) -> int:
            return len((await rollout.async_generate_one([item, item])).token_ids)

        with rollout:
            rollout.initialize()
            with WorkflowExecutor(workflow, episode_timeout=0.5) as executor:
                with pytest.raises(EpisodeTimeoutError):
                    executor.rollout_batch([1])
                wait_until(
                    lambda: not scheduler.engines["rollout/0"].running,
                    "the instance has no request",
                )
        assert "abort" in scheduler.methods("rollout/0")
