"""Tests of EpisodeRunner on a virtual clock: timeouts, cancellations, failures and close."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from helmsman.api.errors import EpisodeTimeoutError, HelmsmanError, WorkflowFailuresError
from helmsman.controller._rollout.episode_runner import EpisodeRunner
from helmsman.controller._rollout.staleness import BoundedStaleness, Episode, ExecutorState
from tests.unit.controller.rollout.backends import settle, virtually, waits


def now() -> float:
    return asyncio.get_running_loop().time()


class Stubborn:
    """Workflow whose item 0 ignores cancellations until the test ends it; others take 1 s."""

    def __init__(self) -> None:
        self.was_cancelled = 0
        self.gate = asyncio.Event()

    async def __call__(self, item: int) -> int:
        if item > 0:
            await asyncio.sleep(1.0)
            return item
        while not self.gate.is_set():
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.was_cancelled += 1
        return item

    def __enter__(self) -> Stubborn:
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()


@virtually
async def test_episode_timeout() -> None:
    cancelled: list[int] = []

    async def workflow(item: int) -> int:
        try:
            await asyncio.sleep(100.0 if item == 1 else 1.0)
        except asyncio.CancelledError:
            cancelled.append(item)
            raise
        return item

    runner = EpisodeRunner(workflow, episode_timeout=10.0, max_failures=1)
    batch = await runner.prepare_batch(itertools.count(), 3)
    assert [episode.item for episode in batch] == [0, 2, 3]
    assert now() == pytest.approx(11.0, abs=1e-3), "another episode starts at the limit"
    assert (cancelled, runner.figures().num_failed) == ([1], 1)
    runner.set_version(1)
    with pytest.raises(
        WorkflowFailuresError,
        match=r"the episode of 1 did not end within 10 s .WorkflowExecutor.episode_time",
    ):
        await runner.prepare_batch(iter([1, 1, 1]), 3)


@virtually
async def test_episode_timeout_by_default() -> None:
    async def endless(item: int) -> None:
        await asyncio.Event().wait()

    with pytest.raises(EpisodeTimeoutError, match="the episode of 7 did not end within 1800 s"):
        await EpisodeRunner(endless).rollout_batch([7])
    assert now() == pytest.approx(1800.0)


@virtually
async def test_episode_timeout_of_a_stubborn_episode() -> None:
    with Stubborn() as workflow:
        runner = EpisodeRunner(workflow, episode_timeout=10.0, max_in_flight=1)
        batch = await runner.prepare_batch(itertools.count(), 3)
        assert [episode.item for episode in batch] == [1, 2, 3]
    await settle()
    figures = runner.figures()
    assert (workflow.was_cancelled, figures.num_failed, figures.num_waiting) == (1, 1, 0), (
        "the late result is dropped"
    )


@virtually
async def test_prepare_batch_stops_a_stubborn_episode() -> None:
    batch_policy = BoundedStaleness(oversample=1.5, takes_first=True, stops_rest=True)
    with Stubborn() as workflow:
        runner = EpisodeRunner(workflow, batch_policy=batch_policy, max_in_flight=3)
        for version in range(3):
            assert len(await runner.prepare_batch(itertools.count(), 2)) == 2
            runner.set_version(version + 1)
        await settle()
        assert workflow.was_cancelled == runner.figures().num_stopped == 3
        await runner.close()


@virtually
async def test_rollout_batch_timeout() -> None:
    ended: list[int] = []

    async def workflow(item: int) -> int:
        await asyncio.sleep(item)
        ended.append(item)
        return item

    runner = EpisodeRunner(workflow, episode_timeout=5.0)
    with pytest.raises(
        EpisodeTimeoutError, match="the episode of 50 did not end within 5 s"
    ) as caught:
        await runner.rollout_batch([1, 50, 4])
    assert (caught.value.limit_s, ended) == (5.0, [1, 4])
    with Stubborn() as stubborn, pytest.raises(EpisodeTimeoutError):
        await EpisodeRunner(stubborn, episode_timeout=5.0).rollout_batch([0, 1])


@virtually
async def test_prepare_batch_errors_of_episode_and_filter() -> None:
    """An episode fails if an operation in it is cancelled, or if the filter raises."""

    def keep(episode: Episode) -> bool:
        return 1 // episode.value > -1

    async def workflow(item: int) -> int:
        if item == 1:
            raise asyncio.CancelledError
        return item

    runner = EpisodeRunner(workflow, batch_policy=BoundedStaleness(keep=keep))
    assert [episode.item for episode in await runner.prepare_batch(itertools.count(), 3)] == [
        2,
        3,
        4,
    ]
    assert runner.figures().num_failed == 2
    with pytest.raises(HelmsmanError, match="operation that it awaited was cancelled"):
        await runner.rollout_batch([1])


@virtually
async def test_prepare_batch_source_error() -> None:
    def source() -> Iterator[int]:
        yield from range(8)
        raise OSError("the file has gone")

    async def workflow(item: int) -> int | None:
        await asyncio.sleep(1.0 + item)
        return item if item < 4 else None

    runner = EpisodeRunner(workflow, batch_policy=BoundedStaleness(1))
    items = source()
    assert len(await runner.prepare_batch(items, 4)) == 4
    await asyncio.sleep(100.0)
    runner.set_version(1)
    with pytest.raises(OSError, match="the file has gone"):
        await runner.prepare_batch(items, 4)


class Misbehaving(BoundedStaleness):
    """Returns invalid episodes from one of its methods."""

    def __init__(self, **invalid: list[int]) -> None:
        super().__init__(1)
        self._invalid = invalid

    def _add(self, method: str, valid: Sequence[Any], convert: Callable[[int], Any]) -> list[Any]:
        return [*valid, *map(convert, self._invalid.get(method, []))]

    def stop(self, waiting: Sequence[Episode], state: ExecutorState) -> Sequence[int]:
        return self._add("stop", super().stop(waiting, state), int)

    def evict(self, waiting: Sequence[Episode], state: ExecutorState) -> Sequence[Episode]:
        return self._add("evict", super().evict(waiting, state), episode_of)

    def select(self, waiting: Sequence[Episode], state: ExecutorState) -> Sequence[Episode]:
        batch = super().select(waiting, state)
        return self._add("select", batch, episode_of) if batch else batch


def episode_of(number: int) -> Episode:
    return Episode(item=number, value=number, number=number, version=0)


@virtually
@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        (
            {"stop": [77]},
            (
                r"the batch policy's stop returned episodes \[77\]; expected each once, and only "
                r"those that run: \[\]"
            ),
        ),
        (
            {"evict": [77]},
            r"the batch policy's evict returned episodes \[77\]; .*only those that wait",
        ),
        (
            {"select": [0]},
            r"the batch policy's select returned episodes \[0, 0, 1\]; expected each once",
        ),
        (
            {"select": [77]},
            r"the batch policy's select returned episodes \[0, 1, 77\]; .*those that wait: \[0, 1",
        ),
    ],
)
async def test_prepare_batch_refuses_invalid_policy_answers(
    invalid: dict[str, list[int]], message: str
) -> None:
    async def workflow(item: int) -> int:
        return item

    runner = EpisodeRunner(workflow, batch_policy=Misbehaving(**invalid))
    with pytest.raises(ValueError, match=message):
        await runner.prepare_batch(itertools.count(), 2)
    figures = runner.figures()
    assert figures.num_started == figures.num_running + figures.num_waiting, (
        "nothing was used, stopped or evicted"
    )


@virtually
async def test_close_ends_callers_and_episodes() -> None:
    ended: list[int] = []

    async def workflow(item: int) -> int:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(item)
        return item

    runner = EpisodeRunner(workflow)
    tasks = [
        await waits(runner.prepare_batch(itertools.count(), 2)),
        await waits(runner.rollout_batch([1])),
    ]
    with Stubborn() as stubborn:
        other = EpisodeRunner(stubborn)
        tasks.append(await waits(other.rollout_batch([0])))
        await runner.close()
        await other.close()
        for each in tasks:
            with pytest.raises(HelmsmanError, match="closed; make a new one"):
                await each
        assert stubborn.was_cancelled, "close() does not wait for its end"
    assert sorted(ended) == [0, 1, 1]
    await runner.close()


def test_episode_runner_refuses_invalid_limits() -> None:
    for limit_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="episode_timeout"):
            EpisodeRunner(Stubborn, episode_timeout=limit_s)  # type: ignore[arg-type]


# --- errors of the user ---------------------------------------------------------------------------


@virtually
async def test_episode_failure_log_names_file_and_line(caplog: pytest.LogCaptureFixture) -> None:
    async def workflow(item: int) -> int:
        if item == 1:
            raise KeyError("answer")
        return item

    await EpisodeRunner(workflow).prepare_batch(itertools.count(), 2)
    (record,) = [each for each in caplog.records if "an episode failed" in each.getMessage()]
    line = workflow.__code__.co_firstlineno + 2
    assert (
        record.getMessage()
        == f"an episode failed ({__file__}:{line} in workflow): KeyError: 'answer'"
    )


@virtually
async def test_prepare_batch_exhausted_source(caplog: pytest.LogCaptureFixture) -> None:
    async def workflow(item: int) -> int:
        return item

    runner, source = EpisodeRunner(workflow), iter(range(3))
    sizes = []
    for version in range(4):
        runner.set_version(version)
        sizes.append(len(await runner.prepare_batch(source, 2)))
    assert sizes == [2, 1, 0, 0]
    ended = [
        each.getMessage()
        for each in caplog.records
        if "the source of items has ended" in each.getMessage()
    ]
    assert len(ended) == 1, "it is logged once"
    assert (
        "this batch has 1 of 2 episodes, and later ones are empty. End the loop at an empty batch"
        in ended[0]
    )
    runner.set_version(4)
    assert await runner.prepare_batch(iter(()), 2) == []
    assert "this batch has 0 of 2 episodes" in caplog.records[-1].getMessage()


def test_episode_runner_refuses_workflow_without_async() -> None:
    def plain(item: int) -> int:
        return item

    def generator(item: int) -> Iterator[int]:
        yield item

    class NotAsync:
        def __call__(self, item: int) -> int:
            return item

    for workflow in (plain, generator, functools.partial(plain, 1), NotAsync(), 7):
        with pytest.raises(
            TypeError, match=r"workflow .* is not an async function; .* Define it with `async def`"
        ):
            EpisodeRunner(workflow)  # type: ignore[arg-type]


@virtually
async def test_episode_runner_workflows_that_return_awaitables() -> None:
    async def workflow(item: int, more: int = 0) -> int:
        return item + more

    def annotated(item: int) -> Awaitable[int]:
        return workflow(item)

    for each in (
        annotated,
        lambda item: workflow(item),
        functools.partial(workflow, more=0),
        functools.wraps(workflow)(annotated),
    ):
        assert await EpisodeRunner(each).rollout_batch([1, 2]) == [1, 2]
    with pytest.raises(
        TypeError, match=r"<lambda> returned 1; expected a coroutine. Define it with `async def`"
    ):
        await EpisodeRunner(lambda item: item).rollout_batch([1])


class Abandon(BaseException):
    """An exception of a library that is no Exception."""


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Abandon("mine")])
def test_exit_in_an_episode_fails_only_it(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def episode(item: int) -> int:
        if item == 1:
            raise error
        return item

    async def main() -> list[Any]:
        runner = EpisodeRunner(episode)
        batch = await runner.prepare_batch(itertools.count(), 4)
        assert runner.figures().num_failed == 1
        return [each.value for each in batch]

    assert asyncio.run(main()) == [0, 2, 3, 4]
    assert f"the episode raised {error!r}, which cannot end the script" in caplog.text
    assert "an episode failed (" in caplog.text
    assert "test_episode_runner.py:" in caplog.text
