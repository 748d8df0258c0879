"""Reports about episodes, requests and weight versions, on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from helmsman import BoundedStaleness, GenerateScheduler, HelmsmanError, RewardPool
from helmsman.api.errors import EngineCallError
from helmsman.api.generation import GenerationResult
from helmsman.controller._rollout.episode_runner import EpisodeRunner
from helmsman.controller._rollout.staleness import Episode, ExecutorState
from helmsman.testing import EngineModel, SimulatedBackend, SimulatedInstance, run_virtually
from tests.unit.controller.rollout.backends import make_request, virtually


class Left(BaseException):
    """An exception of the user's own that is no Exception."""


# --- SkyRL #1691 ----------------------------------------------------------------------------------

ENDS = [SystemExit(2), KeyboardInterrupt(), Left("by hand"), GeneratorExit()]


class Raising(BoundedStaleness):
    """Batch policy of which one method raises."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__(1)
        self.method, self.error = method, error

    def _raise_in(self, method: str) -> None:
        if method == self.method:
            raise self.error

    def admit(self, state: ExecutorState) -> int:
        self._raise_in("admit")
        return super().admit(state)

    def keep(self, episode: Episode) -> bool:
        self._raise_in("keep")
        return super().keep(episode)

    def evict(self, waiting: Sequence[Episode], state: ExecutorState) -> Sequence[Episode]:
        self._raise_in("evict")
        return super().evict(waiting, state)

    def stop(self, waiting: Sequence[Episode], state: ExecutorState) -> Sequence[int]:
        self._raise_in("stop")
        return super().stop(waiting, state)

    def select(self, waiting: Sequence[Episode], state: ExecutorState) -> Sequence[Episode]:
        self._raise_in("select")
        return super().select(waiting, state)


@pytest.mark.parametrize("error", ENDS, ids=lambda each: type(each).__name__)
@virtually
async def test_exceptions_that_end_a_task(error: BaseException) -> None:
    """SkyRL #1691: all devices idle without a message, after an exception inside a task."""

    async def workflow(item: int) -> int:
        await asyncio.sleep(1.0)
        if item == 1:
            raise error
        return item

    runner = EpisodeRunner(workflow)
    batch = await runner.prepare_batch(itertools.count(), 3)
    assert [each.item for each in batch] == [0, 2, 3]
    assert runner.figures().num_failed == 1
    with pytest.raises(HelmsmanError, match=f"the episode raised {type(error).__name__}") as caught:
        await runner.rollout_batch([0, 1, 2])
    assert caught.value.__cause__ is error

    def source() -> Iterator[int]:
        yield 0
        raise error

    with pytest.raises(HelmsmanError, match=f"the source of items raised {type(error).__name__}"):
        await EpisodeRunner(workflow).prepare_batch(source(), 2)
    for method in ("admit", "evict", "stop", "select"):
        with pytest.raises(HelmsmanError, match=f"the batch policy raised {type(error).__name__}"):
            await EpisodeRunner(workflow, batch_policy=Raising(method, error)).prepare_batch(
                itertools.count(), 2
            )
    with pytest.raises(HelmsmanError, match="episodes failed.*batch policy raised"):
        await EpisodeRunner(workflow, batch_policy=Raising("keep", error)).prepare_batch(
            itertools.count(2), 2
        )


def leave(kind: str) -> float:
    """A reward that leaves by an exception."""
    raise {"SystemExit": SystemExit(2), "KeyboardInterrupt": KeyboardInterrupt(), "Left": Left()}[
        kind
    ]


async def leave_later(kind: str) -> float:
    return leave(kind)


@pytest.mark.parametrize("function", [leave, leave_later])
def test_exceptions_that_end_a_reward(function: Callable[[str], Any]) -> None:
    """SkyRL #1691: the reward fails with the name of its exception, and its worker goes on."""
    with RewardPool.on_this_machine(function, num_processes=1, timeout=60.0) as pool:
        for kind in ("SystemExit", "KeyboardInterrupt", "Left"):
            with pytest.raises(EngineCallError) as caught:
                pool.score(kind)
            assert caught.value.remote_type.endswith(kind)


# --- verl #7611 -----------------------------------------------------------------------------------

MODEL = EngineModel(step_s=0.02, per_request_s=0.0, prefill_s=0.001)
NUM_TOKENS = 60


def start(num_instances: int) -> tuple[GenerateScheduler, list[SimulatedInstance]]:
    engines = [
        SimulatedInstance(f"i{index}", MODEL, lambda _: NUM_TOKENS)
        for index in range(num_instances)
    ]
    scheduler = GenerateScheduler(SimulatedBackend({each.instance_id: each for each in engines}))
    for each in engines:
        scheduler.add(each.instance_id, capacity=3)
    return scheduler, engines


async def update(
    scheduler: GenerateScheduler,
    engines: Sequence[SimulatedInstance],
    version: int,
    in_flight: str = "abort",
) -> None:
    """Update the weights of all instances, one after another."""
    scheduler.suspend("update")
    try:
        if in_flight == "abort":
            await scheduler.take_back()
            assert scheduler.num_in_flight == 0
        scheduler.expect_weights(version)
        for each in engines:
            each.version = version
            scheduler.have_weights(each.instance_id, version)
            await asyncio.sleep(0.01)
    finally:
        scheduler.resume("update")


@virtually
async def test_updates_that_abort_among_cancellations() -> None:
    """Verl #7611: a request cancelled by a parameter sync surfaces as another exception.

    Updates abort 1,000 times what runs, while callers give up requests and updates.
    """
    draw = random.Random(7611)
    scheduler, engines = start(4)
    numbers = itertools.count()
    given_up: set[str] = set()
    results: list[GenerationResult] = []
    version = num_updates_given_up = 0

    async def talk() -> None:
        while version < 1000:
            request = make_request(f"r{next(numbers)}", max_new_tokens=NUM_TOKENS + 1)
            (ticket,) = scheduler.put([request])
            ended = asyncio.wrap_future(ticket.future)
            if draw.random() < 0.3:
                await asyncio.wait([ended], timeout=draw.uniform(0.0, 1.5))
                given_up.add(request.request_id)
                if not ticket.future.cancel():
                    await scheduler.abort([request.request_id])
            try:
                results.append(await ended)
            except asyncio.CancelledError:
                assert request.request_id in given_up

    talks = [asyncio.create_task(talk()) for _ in range(12)]
    while version < 1000:
        await asyncio.sleep(draw.uniform(0.0, 0.3))
        version += 1
        updating = asyncio.create_task(update(scheduler, engines, version))
        if draw.random() < 0.3:
            await asyncio.wait([updating], timeout=draw.uniform(0.0, 0.04))
            num_updates_given_up += updating.cancel()
        await asyncio.wait([updating])
        assert updating.cancelled() or updating.result() is None
        for each in engines:  # the next update reaches those that this one has left out
            each.version = version
            scheduler.have_weights(each.instance_id, version)
    await asyncio.gather(*talks)
    assert min(num_updates_given_up, len(given_up), len(results)) > 100
    for result in results:
        is_whole = (result.stop_reason, len(result.token_ids)) == ("stop", NUM_TOKENS)
        assert is_whole or (result.stop_reason == "abort" and result.request_id in given_up)
        assert result.versions == sorted(result.versions)
    assert (scheduler.num_queued, scheduler.num_in_flight, scheduler.running()) == (0, 0, {})


# --- AReaL #1569 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", ["abort", "keep"])
def test_versions_of_tokens_at_every_point(in_flight: str) -> None:
    """AReaL #1569: tokens carry a version that did not make them.

    The weights change at every point between a request and its answer.
    """

    async def ask(update_at: float) -> list[int]:
        scheduler, engines = start(1)
        (ticket,) = scheduler.put([make_request("r", max_new_tokens=NUM_TOKENS + 1)])
        await asyncio.sleep(update_at)
        await update(scheduler, engines, 1, in_flight)
        return (await asyncio.wrap_future(ticket.future)).versions

    prefill_s = 3 * MODEL.prefill_s
    for half_steps in range(2 * NUM_TOKENS + 3):
        update_at = prefill_s + (half_steps / 2 - 0.1) * MODEL.step_s
        num_before = min(NUM_TOKENS, max(0, int((update_at - prefill_s) / MODEL.step_s)))
        expected = [0] * num_before + [1] * (NUM_TOKENS - num_before)
        assert run_virtually(ask(update_at)) == expected, update_at


# --- AReaL #1388 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("max_staleness", [0.0, 0.5, 1.0, 2.0])
@virtually
async def test_staleness_after_resume(max_staleness: float) -> None:
    """AReaL #1388 and #1345: staleness has no bound after a recovery.

    A run continues at step 500, and its rollout is twice as fast as its trainer.
    """

    async def workflow(item: int) -> int:
        await asyncio.sleep(1.0)
        return item

    runner = EpisodeRunner(workflow, batch_policy=BoundedStaleness(max_staleness))
    runner.set_version(500)
    ages: set[int] = set()
    for version in range(500, 540):
        batch = await runner.prepare_batch(itertools.count(), 8)
        ages |= {version - each.version for each in batch}
        figures = runner.figures()
        assert figures.num_running + figures.num_waiting <= max_staleness * 8
        await asyncio.sleep(2.0)
        runner.set_version(version + 1)
    assert max(ages) == math.ceil(max_staleness)
