"""Tests of GenerateScheduler: take_back, resumed requests and wait_idle."""

from __future__ import annotations

import asyncio

import pytest

from helmsman.api.generation import GenerationRequest, SamplingParams
from helmsman.controller._generation.health import Health
from helmsman.controller._generation.request import RequestState
from helmsman.controller._generation.retries import RetryGeneration
from helmsman.controller._generation.scheduler import GenerateScheduler
from tests.unit.controller.generation.backends import (
    HeldBackend,
    assert_empty,
    make_request,
    make_requests,
    make_result,
    make_scheduler,
    put,
    settle,
    states,
    virtually,
    waits,
)

S = RequestState


# --- recall ---------------------------------------------------------------------------------------


@virtually
async def test_take_back_keeps_tokens() -> None:
    backend, scheduler = make_scheduler([2, 2])
    tickets = await put(scheduler, make_requests(5, max_new_tokens=6))
    scheduler.suspend()
    recalled = await waits(scheduler.take_back())
    assert sorted((id_, sorted(ids)) for id_, ids in backend.aborts) == [
        ("i0", ["r0", "r2"]),
        ("i1", ["r1", "r3"]),
    ]
    backend.last("r0").give_back([10, 11], version=3)
    backend.last("r1").give_back()
    await backend.end("r2", [12], version=3)
    assert not recalled.done()
    backend.last("r3").give_back([1, 2, 3, 4, 5, 6], version=3)
    await recalled
    assert states(tickets) == [S.QUEUED, S.QUEUED, S.DONE, S.DONE, S.QUEUED]
    assert tickets[3].future.result(0).stop_reason == "length"
    assert (scheduler.num_in_flight, scheduler.num_queued) == (0, 3)
    num_calls = len(backend.calls)
    await asyncio.sleep(3600.0)
    assert len(backend.calls) == num_calls
    scheduler.resume()
    await settle()
    sent = backend.last("r0").request
    assert (sent.prompt_ids, sent.sampling.max_new_tokens, sent.num_generated) == (
        [1, 2, 3, 10, 11],
        4,
        2,
    )
    await backend.end_all(tokens=[13], version=4)
    assert tickets[0].future.result(0).token_ids == [10, 11, 13]
    assert tickets[0].future.result(0).versions == [3, 3, 4]
    assert_empty(scheduler)


@virtually
async def test_take_back_at_a_stop_token() -> None:
    backend, scheduler = make_scheduler([1])
    sampling = SamplingParams(max_new_tokens=8, stop_token_ids=(5,))
    (ticket,) = await put(
        scheduler, [GenerationRequest(request_id="r", prompt_ids=[1], sampling=sampling)]
    )
    scheduler.suspend()
    recalled = await waits(scheduler.take_back())
    backend.last("r").give_back([4, 5])
    await recalled
    assert (ticket.state, ticket.future.result(0).stop_reason) == (S.DONE, "stop")


@virtually
async def test_take_back_of_a_hanging_instance() -> None:
    backend, scheduler = make_scheduler([1, 1], retries=RetryGeneration())
    backend.abort_gate.clear()  # no instance answers
    tickets = await put(scheduler, make_requests(2))
    scheduler.suspend()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(scheduler.take_back(), 60.0)
    assert states(tickets) == [S.RUNNING, S.RUNNING]
    backend.last("r0").give_back([7])  # a late answer
    await settle()
    assert states(tickets) == [S.QUEUED, S.RUNNING]
    again = await waits(scheduler.take_back())
    scheduler.set_health("i1", Health.DEAD)
    await again
    assert states(tickets) == [S.QUEUED, S.QUEUED]
    scheduler.resume()
    await settle()
    assert backend.last("r0").request.prompt_ids == [1, 2, 3, 7]


@virtually
async def test_take_back_during_resume() -> None:
    backend, scheduler = make_scheduler([2])
    await put(scheduler, make_requests(2))
    scheduler.suspend()
    recalled, finished = await waits(scheduler.take_back()), await waits(scheduler.wait_ended())
    backend.last("r0").give_back([7])
    scheduler.resume()
    await settle()
    assert backend.sent == ["r0", "r1", "r0"]
    assert not recalled.done()
    await backend.end("r1")
    assert recalled.done()
    assert finished.done()
    assert len(backend.open()) == 1, "calls after the resume are not waited for"


@virtually
async def test_resume_after_every_suspender() -> None:
    backend, scheduler = make_scheduler([1])
    scheduler.suspend()
    scheduler.suspend("update")
    scheduler.put([make_request("r")])
    scheduler.resume("update")
    scheduler.resume("update")
    await settle()
    assert scheduler.is_suspended
    assert backend.sent == []
    scheduler.resume()
    await settle()
    assert backend.sent == ["r"]


# --- kept results ---------------------------------------------------------------------------------


@virtually
async def test_put_with_kept_results() -> None:
    backend = HeldBackend()
    scheduler = GenerateScheduler(backend)
    before = make_result("other", [10, 11], version=3, stop_reason="abort")
    (ticket,) = scheduler.put([make_request("r", max_new_tokens=6)], kept={"r": before})
    assert await scheduler.abort() == 1
    assert ticket.state is S.PARTIAL
    assert ticket.future.result(0).token_ids == [10, 11], (
        "an abort before the start keeps the tokens"
    )
    scheduler.add("i0", 1)
    (ticket,) = await put(scheduler, [make_request("r", max_new_tokens=6)], kept={"r": before})
    sent = backend.last("r").request
    assert (sent.prompt_ids, sent.sampling.max_new_tokens, sent.num_generated) == (
        [1, 2, 3, 10, 11],
        4,
        2,
    )
    await backend.end("r", [12], version=5)
    result = ticket.future.result(0)
    assert (result.request_id, result.token_ids, result.versions) == ("r", [10, 11, 12], [3, 3, 5])
    assert result.logprobs == [-0.10, -0.11, -0.12]


# --- wait_idle ------------------------------------------------------------------------------------


@virtually
async def test_wait_idle_covers_waiting_requests() -> None:
    backend = HeldBackend()
    scheduler = GenerateScheduler(backend)
    scheduler.put([make_request("a")])
    idle = await waits(scheduler.wait_idle())  # no instance serves yet
    scheduler.add("i0", 1)
    await settle()
    scheduler.put([make_request("b")])
    await backend.end("a")
    assert not idle.done()
    await backend.end("b")
    assert idle.done()
    scheduler.instances["i0"].drains.add("the test")
    scheduler.put([make_request("c")])
    idle = await waits(scheduler.wait_idle())
    await scheduler.abort()
    await settle()
    assert idle.done(), "aborted requests are not waited for"
