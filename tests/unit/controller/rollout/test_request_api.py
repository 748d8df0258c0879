"""Tests of RolloutController: samples, streams, pauses and resumed requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from helmsman._base.event_loop import background_loop
from helmsman.api.errors import (
    EngineCallError,
    GroupCallError,
    HelmsmanError,
    RequestsInFlightError,
)
from helmsman.api.generation import GenerationRequest, GenerationResult, SamplingParams
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.testing.contract_tools import wait_until
from tests.controller.engines import CountingRollout
from tests.controller.fakes import FakeScheduler
from tests.unit.controller.rollout.fake_rollout import (
    LIMIT_S,
    Gated,
    engine,
    finish,
    settle,
    started,
    submit_all,
)


class Samples(CountingRollout):
    """Generates the samples of a prompt in one call."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__(gated)
        self.together: list[list[str]] = []

    async def agenerate_samples(
        self, requests: Sequence[GenerationRequest]
    ) -> list[GenerationResult]:
        self.together.append([request.request_id for request in requests])
        return list(await asyncio.gather(*map(self.agenerate, requests)))


class GatedSamples(Samples):
    def __init__(self) -> None:
        super().__init__(gated=True)


class IgnoresAborts(Gated):
    """Does not reply to aborts."""

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        return await asyncio.get_running_loop().create_future()


def is_idle(rollout: RolloutController) -> bool:
    load = rollout.stats()
    return load.num_queued == 0 and not any(each.num_in_flight for each in load.instances.values())


# --- samples --------------------------------------------------------------------------------------


def test_generate_samples(scheduler: FakeScheduler) -> None:
    with started(scheduler, 2, CountingRollout) as rollout:
        named = GenerationRequest(request_id="mine", prompt_ids=[5])
        results = rollout.generate([[1], named, [9]], num_samples=3)
        assert [result.token_ids for result in results] == [[2]] * 3 + [[6]] * 3 + [[10]] * 3
        assert [result.request_id for result in results[2:7]] == [
            "rollout-0#2",
            "mine#0",
            "mine#1",
            "mine#2",
            "rollout-1#0",
        ]
        assert sorted(len(engine(scheduler, index).served) for index in range(2)) == [4, 5], (
            "samples are balanced"
        )
        assert [each.token_ids for each in asyncio.run(rollout.async_generate_samples([3], 2))] == [
            [4],
            [4],
        ]
        with pytest.raises(ValueError, match="num_samples is 0"):
            rollout.generate([[1]], num_samples=0)
        with pytest.raises(GroupCallError, match="token 0 is no prompt"):
            rollout.generate([[1], [0]], num_samples=2)


def test_samples_by_engine_are_one_call(scheduler: FakeScheduler) -> None:
    with started(scheduler, 2, Samples, samples_by_engine=True) as rollout:
        results = rollout.generate([[1], [2]], num_samples=3)
        assert [result.token_ids for result in results] == [[2]] * 3 + [[3]] * 3
        together = [engine(scheduler, index).together for index in range(2)]  # type: ignore[attr-defined]
        assert together == [
            [[f"rollout-0#{sample}" for sample in range(3)]],
            [[f"rollout-1#{sample}" for sample in range(3)]],
        ]
        assert "agenerate" not in scheduler.methods("rollout/0")
        rollout.generate([[1]])
        assert "agenerate" in scheduler.methods("rollout/0") + scheduler.methods("rollout/1"), (
            "a single sample is a plain request"
        )
    with (
        started(scheduler, 1, CountingRollout, samples_by_engine=True) as rollout,
        pytest.raises(HelmsmanError, match="agenerate_samples"),
    ):
        rollout.generate([[1]], num_samples=2)


@pytest.mark.parametrize("samples_by_engine", [False, True])
def test_samples_fail_together(scheduler: FakeScheduler, samples_by_engine: bool) -> None:
    class Picky(GatedSamples):
        async def agenerate(self, request: GenerationRequest) -> GenerationResult:
            if request.request_id.endswith("#2"):
                raise ValueError("not this one")
            return await super().agenerate(request)

    with started(scheduler, 1, Picky, samples_by_engine=samples_by_engine) as rollout:
        other = submit_all(rollout, [[5]])[0]
        with pytest.raises(EngineCallError, match="not this one"):
            asyncio.run(rollout.async_generate_samples([1], 4))
        settle()
        assert not other.done()
        assert rollout.stats().instances["rollout/0"].num_in_flight == 1
        finish(scheduler, 0)


# --- streams --------------------------------------------------------------------------------------


def test_stream_in_order_of_ends(scheduler: FakeScheduler) -> None:
    with started(scheduler, 1) as rollout:
        stream = rollout.stream([[1], [2]], SamplingParams(max_new_tokens=1), num_samples=2)
        settle()
        assert is_idle(rollout), "the first next() sends the requests"
        first = asyncio.run_coroutine_threadsafe(asyncio.to_thread(next, stream), background_loop())
        running = engine(scheduler, 0).running
        wait_until(lambda: len(running) == 4, "the requests are sent")
        seen: list[tuple[int, GenerationResult]] = []
        for request_id in ("rollout-1#0", "rollout-0#1", "rollout-1#1", "rollout-0#0"):
            background_loop().call_soon_threadsafe(running[request_id].set_result, "length")
            seen.append(next(stream) if seen else first.result(LIMIT_S))
            assert seen[-1][1].request_id == request_id
        assert [(number, result.token_ids) for number, result in seen] == [
            (2, [3]),
            (1, [2]),
            (3, [3]),
            (0, [2]),
        ]
        assert list(stream) == []


def test_stream_left_early_aborts_the_rest(scheduler: FakeScheduler) -> None:
    class Half(CountingRollout):
        """Holds requests whose first token is even."""

        async def agenerate(self, request: GenerationRequest) -> GenerationResult:
            self.gated = request.prompt_ids[0] % 2 == 0
            return await super().agenerate(request)

    with started(scheduler, 2, Half, max_in_flight_per_worker=2) as rollout:
        for number, result in rollout.stream([[1], *[[2]] * 20]):
            assert (number, result.token_ids) == (0, [2])
            assert not is_idle(rollout)
            break
        rollout.wait_idle(LIMIT_S)
        assert [engine(scheduler, index).running for index in range(2)] == [{}, {}]
        assert sum(len(engine(scheduler, index).served) for index in range(2)) < 10

        async def read() -> None:
            async with contextlib.aclosing(rollout.async_stream([[1], *[[2]] * 20])) as stream:  # type: ignore[type-var]
                async for _ in stream:
                    break

        asyncio.run(read())
        rollout.wait_idle(LIMIT_S)

        async def cancelled() -> None:
            async def wait() -> None:
                async for number, _ in rollout.async_stream([[2]] * 20):
                    pytest.fail(f"{number} has ended")

            reading = asyncio.create_task(wait())
            await asyncio.to_thread(
                wait_until, lambda: not is_idle(rollout), "the requests are sent"
            )
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading

        asyncio.run(cancelled())
        rollout.wait_idle(LIMIT_S)
        assert [engine(scheduler, index).running for index in range(2)] == [{}, {}]


def test_stream_on_error(scheduler: FakeScheduler) -> None:
    prompts = [[1], [0], [2], [0]]
    with started(scheduler, 1, CountingRollout) as rollout:
        with pytest.raises(EngineCallError, match="token 0 is no prompt"):
            for _ in rollout.stream(prompts):
                pass
        rollout.wait_idle(LIMIT_S)
        items = dict(rollout.stream(prompts, on_error="yield"))
        assert [isinstance(items[number], EngineCallError) for number in range(4)] == [
            False,
            True,
            False,
            True,
        ]

        async def read() -> dict[int, Any]:
            return {
                number: item
                async for number, item in rollout.async_stream(prompts, on_error="yield")
            }

        assert sorted(asyncio.run(read())) == [0, 1, 2, 3]
        with pytest.raises(
            ValueError, match="on_error is 'skip'; expected one of 'raise', 'yield'"
        ):
            rollout.stream(prompts, on_error="skip")  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="prompt 1 is empty"):
            rollout.stream([[1], []])
        assert list(rollout.stream([])) == []


def test_stream_ends_with_the_controller(scheduler: FakeScheduler) -> None:
    rollout = started(scheduler, 1, max_in_flight_per_worker=1)
    stream = rollout.stream([[1], [2]], on_error="yield")
    first = asyncio.run_coroutine_threadsafe(asyncio.to_thread(list, stream), background_loop())
    wait_until(lambda: not is_idle(rollout), "the requests are sent")
    rollout.close()
    assert [
        isinstance(item, HelmsmanError)
        for _, item in sorted(first.result(LIMIT_S), key=lambda pair: pair[0])
    ] == [True] * 2


# --- pause ----------------------------------------------------------------------------------------


def test_pause_wait(scheduler: FakeScheduler) -> None:
    with started(scheduler, 2, max_in_flight_per_worker=1) as rollout:
        futures = submit_all(rollout, [[1]] * 4)
        paused = asyncio.run_coroutine_threadsafe(rollout.async_pause("wait"), background_loop())
        settle()
        futures += submit_all(rollout, [[1]])
        finish(scheduler, 0)
        assert not paused.done()
        finish(scheduler, 1)
        paused.result(LIMIT_S)
        load = rollout.stats()
        assert (load.paused, load.num_queued) == (True, 3)
        rollout.wait_idle(LIMIT_S)  # returns although three are queued
        rollout.resume()
        while not all(future.done() for future in futures):
            finish(scheduler, 0)
            finish(scheduler, 1)
        rollout.wait_idle(LIMIT_S)


def test_pause_abort_keeps_tokens(scheduler: FakeScheduler) -> None:
    with started(scheduler, 2, max_in_flight_per_worker=2) as rollout:
        futures = submit_all(rollout, [[1, 2]] * 5, max_new_tokens=6)
        rollout.pause("abort", LIMIT_S)
        load = rollout.stats()
        assert (load.num_queued, [each.num_in_flight for each in load.instances.values()]) == (
            5,
            [0, 0],
        )
        assert [engine(scheduler, index).running for index in range(2)] == [{}, {}]
        assert not any(future.done() for future in futures)
        rollout.update_weights({"weight": []}, 3)
        asyncio.run(rollout.async_resume())
        while not all(future.done() for future in futures):
            finish(scheduler, 0)
            finish(scheduler, 1)
        # Two tokens of the first attempt, four of the second, which begins with the prompt and
        # these two.
        assert [future.result().token_ids for future in futures[:4]] == [[2, 3, 2, 3, 3, 4]] * 4
        assert futures[0].result().versions == [0, 0, 3, 3, 3, 3]
        assert futures[4].result().versions == [3, 3]


def test_pause_with_hanging_requests(scheduler: FakeScheduler) -> None:
    with started(scheduler, 1, IgnoresAborts, max_in_flight_per_worker=1) as rollout:
        futures = submit_all(rollout, [[1, 2]] * 2, max_new_tokens=3)
        with pytest.raises(
            RequestsInFlightError, match="rollout/0 has 1. It is paused, and 1 are queued"
        ) as caught:
            rollout.pause("abort", 0.05)
        assert (caught.value.in_flight, caught.value.num_queued) == ({"rollout/0": 1}, 1)
        with pytest.raises(RequestsInFlightError, match="wait_idle has waited 0.05 s"):
            rollout.wait_idle(0.05)
        with pytest.raises(RequestsInFlightError):
            asyncio.run(rollout.async_wait_idle(0.05))
        assert rollout.stats().paused
        give_back(scheduler, 0)
        rollout.wait_idle(LIMIT_S)
        assert rollout.stats().num_queued == 2
        rollout.resume()
        while not all(future.done() for future in futures):
            finish(scheduler, 0)
        assert futures[0].result().token_ids == [2, 3, 2]
        with pytest.raises(
            ValueError, match="in_flight is 'stop'; expected one of 'keep', 'wait', 'abort'"
        ):
            rollout.pause("stop")  # type: ignore[arg-type]
        assert not rollout.stats().paused


def give_back(scheduler: FakeScheduler, index: int) -> None:
    """End the one request of an engine that ignores aborts."""
    answer = engine(scheduler, index).running[f"rollout-{index}"].set_result
    # a call from this thread would not wake the loop
    background_loop().call_soon_threadsafe(answer, "abort")


# --- resumed requests -----------------------------------------------------------------------------


def test_submit_resume_from(scheduler: FakeScheduler) -> None:
    with started(scheduler, 1) as rollout:
        sampling = SamplingParams(max_new_tokens=5, seed=4)
        future = rollout.submit([1, 2], sampling)
        settle()
        rollout.abort()
        partial = future.result(LIMIT_S)
        assert partial.token_ids == [2, 3]
        rollout.update_weights({"weight": []}, 2)
        again = rollout.submit([1, 2], sampling, resume_from=partial)
        settle()
        (sent,) = scheduler.sent[-1].args
        assert (sent.prompt_ids, sent.num_generated) == ([1, 2, 2, 3], 2)
        assert sent.sampling == SamplingParams(max_new_tokens=3, seed=4)
        finish(scheduler, 0)
        result = again.result(LIMIT_S)
        assert (result.token_ids, result.versions, len(result.logprobs)) == (
            [2, 3, 2, 3, 3],
            [0, 0, 2, 2, 2],
            5,
        )
        awaited = asyncio.run_coroutine_threadsafe(
            rollout.async_generate_one([1, 2], sampling, resume_from=partial), background_loop()
        )
        settle()
        finish(scheduler, 0)
        assert awaited.result(LIMIT_S).token_ids == result.token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stop_reason": "length"}, "has stop_reason 'length', expected 'abort'"),
        ({"logprobs": [0.0]}, "has 3 tokens, 1 log-probabilities and 3 versions"),
        (
            {"token_ids": [7] * 8, "logprobs": [0.0] * 8, "versions": [0] * 8},
            "has 8 tokens already, and max_new_tokens",
        ),
        ({"token_ids": [7, 7, 9]}, "ends with the stop token 9"),
    ],
)
def test_submit_resume_from_refuses(
    scheduler: FakeScheduler, change: dict[str, Any], message: str
) -> None:
    fields: dict[str, Any] = {
        "request_id": "r",
        "token_ids": [7] * 3,
        "logprobs": [0.0] * 3,
        "versions": [0] * 3,
        "stop_reason": "abort",
    }
    sampling = SamplingParams(max_new_tokens=8, stop_token_ids=(9,))
    with started(scheduler, 1) as rollout:
        with pytest.raises(ValueError, match=f"resume_from, the result of 'r', {message}"):
            rollout.submit([1], sampling, resume_from=GenerationResult(**{**fields, **change}))
        assert "agenerate" not in scheduler.methods("rollout/0")
