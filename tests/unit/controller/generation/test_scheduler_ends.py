"""Tests of GenerateScheduler: deadlines, aborts, cancellations, streams and close."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from helmsman.api.errors import HelmsmanError, InstanceLostError, RequestDeadlineError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.controller._generation.health import Health
from helmsman.controller._generation.request import RequestOptions, RequestState, Ticket
from helmsman.controller._generation.retries import RetryGeneration
from helmsman.testing import run_virtually
from tests.unit.controller.generation.backends import (
    HeldBackend,
    make_request,
    make_requests,
    make_scheduler,
    put,
    settle,
    states,
    virtually,
    waits,
)

S = RequestState


# --- deadlines ------------------------------------------------------------------------------------


@virtually
async def test_deadline() -> None:
    """A deadline fails queued and running requests, and does nothing after their end."""
    backend, scheduler = make_scheduler([1])
    running, queued = scheduler.put(make_requests(2), RequestOptions(deadline_s=30.0))
    (kept,) = scheduler.put([make_request("kept")], RequestOptions(deadline_s=60.0))
    await asyncio.sleep(29.9)
    assert states([running, queued, kept]) == [S.RUNNING, S.QUEUED, S.QUEUED]
    await asyncio.sleep(0.2)
    assert states([running, queued, kept]) == [S.FAILED, S.FAILED, S.RUNNING], "a slot is free"
    for ticket, message in ((running, "it was running on i0"), (queued, "it was queued")):
        error = ticket.future.exception(timeout=0)
        assert isinstance(error, RequestDeadlineError)
        assert (error.request_id, error.limit_s) == (ticket.request_id, 30.0)
        assert message in str(error)
    await backend.end("r0", [1])
    assert isinstance(running.future.exception(), RequestDeadlineError), "a late result is dropped"
    assert scheduler.num_in_flight == 1
    await backend.end("kept")
    await asyncio.sleep(60.0)
    assert kept.state is S.DONE
    assert backend.aborts == [("i0", ["r0"])]
    assert backend.sent == ["r0", "kept"]


# --- abort ----------------------------------------------------------------------------------------


@virtually
async def test_abort_in_every_state() -> None:
    backend, scheduler = make_scheduler([1, 1])
    (running,) = await put(scheduler, [make_request("running")])
    admitted, queued, other = scheduler.put(
        [make_request(id_) for id_ in ("admitted", "queued", "other")]
    )
    assert states([running, admitted, queued, other]) == [S.RUNNING, S.ADMITTED, S.QUEUED, S.QUEUED]
    assert await scheduler.abort(["running", "admitted", "queued", "unknown"]) == 3
    assert states([running, admitted, queued]) == [S.RUNNING, S.ABORTED, S.ABORTED]
    assert backend.aborts == [("i0", ["running"])]
    await backend.give_back("running", [1, 2], version=3)
    assert running.state is S.PARTIAL
    assert running.future.result().versions == [3, 3]
    assert other.state is S.RUNNING
    assert backend.sent == ["running", "other"]


@virtually
async def test_abort_all_is_one_call_per_instance() -> None:
    backend, scheduler = make_scheduler([2, 2, 2])
    tickets = await put(scheduler, make_requests(10))
    assert await scheduler.abort() == 10
    assert sorted(id_ for id_, _ in backend.aborts) == ["i0", "i1", "i2"]
    assert sum(len(ids) for _, ids in backend.aborts) == 6
    for call in backend.open():
        call.give_back()
    await settle()
    assert set(states(tickets)) == {S.ABORTED}
    assert await scheduler.abort() == 0


@virtually
async def test_abort_after_the_end() -> None:
    backend, scheduler = make_scheduler([1])
    (ticket,) = await put(scheduler, [make_request("r")])
    await scheduler.abort(["r"])
    await backend.end("r", [1, 2])
    assert ticket.state is S.DONE


@virtually
async def test_abort_refused_by_an_instance() -> None:
    backend, scheduler = make_scheduler([1, 1])
    tickets = await put(scheduler, make_requests(2))
    backend.abort_error = RuntimeError("abort is not known here")
    with pytest.raises(RuntimeError, match="not known here"):
        await scheduler.abort()
    assert len(backend.aborts) == 2
    for call in backend.open():
        call.give_back([1])
    await settle()
    assert states(tickets) == [S.PARTIAL, S.PARTIAL]


# --- cancellation ---------------------------------------------------------------------------------


def cancel_in_thread(ticket: Ticket) -> bool:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(ticket.future.cancel()))
    thread.start()
    thread.join()
    return answers[0]


@virtually
async def test_cancel_in_another_thread() -> None:
    """A request that was not sent is withdrawn; one that was sent cannot be cancelled."""
    backend, scheduler = make_scheduler([1])
    admitted, sent, queued = scheduler.put(make_requests(3))
    assert admitted.state is S.ADMITTED
    assert cancel_in_thread(admitted)
    await settle()
    assert states([admitted, sent, queued]) == [S.ABORTED, S.RUNNING, S.QUEUED], "a slot is free"
    assert cancel_in_thread(queued)
    assert not cancel_in_thread(sent)
    await settle()
    assert (queued.state, scheduler.num_queued) == (S.ABORTED, 0)
    await backend.end("r1", [1])
    assert sent.future.result().token_ids == [1]
    assert not cancel_in_thread(sent)
    assert backend.sent == ["r1"]


@virtually
async def test_cancel_of_a_request_given_back() -> None:
    backend, scheduler = make_scheduler([1])
    (ticket,) = await put(scheduler, [make_request("r")])
    drained = asyncio.ensure_future(scheduler.drain("i0", migrate=True))
    await settle()
    backend.last("r").give_back([1, 2])
    await drained
    assert ticket.state is S.QUEUED
    assert not cancel_in_thread(ticket)
    await scheduler.abort(["r"])
    assert ticket.state is S.PARTIAL
    assert ticket.future.result().token_ids == [1, 2]


@virtually
async def test_cancel_of_many_while_suspended() -> None:
    """The scheduler resumes before the callbacks of the cancellations run."""
    backend, scheduler = make_scheduler([1])
    scheduler.suspend()
    tickets = scheduler.put(make_requests(1000))
    for ticket in tickets[:-1]:
        assert ticket.future.cancel()
    scheduler.resume()
    await settle()
    assert backend.sent == ["r999"]
    assert set(states(tickets[:-1])) == {S.ABORTED}


# --- stream and close -----------------------------------------------------------------------------


@virtually
async def test_stream_in_order_of_ends() -> None:
    backend, scheduler = make_scheduler([3])
    tickets = await put(scheduler, make_requests(5))
    seen: list[tuple[str, RequestState]] = []

    async def read() -> None:
        async for ticket in scheduler.stream(tickets):
            # the test reads the list meanwhile
            seen.append((ticket.request_id, ticket.state))  # noqa: PERF401

    reader = await waits(read())
    await backend.end("r2")
    assert seen == [("r2", S.DONE)]
    tickets[4].future.cancel()
    backend.last("r0").answer.set_exception(ValueError("no"))
    await settle()
    assert sorted(seen[1:], key=lambda pair: pair[0]) == [("r0", S.FAILED), ("r4", S.ABORTED)]
    backend.last("r1").give_back([1])
    backend.last("r3").end()
    await reader
    assert sorted(id_ for id_, _ in seen) == ["r0", "r1", "r2", "r3", "r4"]
    assert len([ticket async for ticket in scheduler.stream(tickets)]) == 5, (
        "ended requests are included"
    )
    assert [ticket async for ticket in scheduler.stream([])] == []


@virtually
async def test_close_fails_unsent_requests() -> None:
    backend, scheduler = make_scheduler([1], max_queue=1)
    running, queued = [await scheduler.submit(make_request(id_)) for id_ in ("running", "queued")]
    submitting = await waits(scheduler.submit(make_request("submitting")))
    scheduler.close("the job is over")
    scheduler.close("again")
    assert states([running, queued]) == [S.RUNNING, S.FAILED]
    assert "was not sent: the job is over" in str(queued.future.exception(timeout=0))
    await settle()
    with pytest.raises(HelmsmanError, match="request rejected: the job is over"):
        await submitting
    with pytest.raises(HelmsmanError, match="request rejected: the job is over"):
        scheduler.put([make_request("late")])
    await backend.end("running")
    assert running.state is S.DONE
    assert backend.sent == ["running"]


@virtually
async def test_close_fails_requests_that_are_lost_later() -> None:
    """They fail because no further request is sent."""
    backend, scheduler = make_scheduler([4], retries=RetryGeneration())
    lost, aborted = await put(scheduler, make_requests(2))
    await scheduler.abort(["r1"])
    (admitted,) = scheduler.put([make_request("admitted")])
    assert admitted.state is S.ADMITTED
    scheduler.close("the job is over")
    for call in backend.open():
        call.lose()
    await settle()
    assert states([lost, aborted, admitted]) == [S.FAILED, S.ABORTED, S.FAILED]
    assert isinstance(lost.future.exception(timeout=0), InstanceLostError)
    assert backend.sent == ["r0", "r1"]
    assert scheduler.num_in_flight == 0


@virtually
async def test_future_callbacks_may_call_the_scheduler() -> None:
    """Callbacks of a future run within the call that ends it."""
    backend, scheduler = make_scheduler([2, 2])
    tickets = await put(scheduler, make_requests(12))
    again: list[Ticket] = []

    def call_scheduler(_: Any) -> None:
        scheduler.set_health("i0", Health.DEAD)
        if not again:
            again.extend(scheduler.put([make_request("again")]))
        scheduler.suspend()
        scheduler.resume()
        scheduler.close()

    for ticket in tickets:
        ticket.future.add_done_callback(call_scheduler)
    scheduler.set_health("i0", Health.DEAD)
    await backend.end_all("i1")
    assert all(ticket.state.is_end for ticket in [*tickets, *again])
    assert all(ticket.future.done() for ticket in [*tickets, *again])
    assert (scheduler.num_queued, scheduler.num_in_flight) == (0, 0)
    assert {instance.outstanding_tokens for instance in scheduler.instances.values()} == {0}


@virtually
async def test_generate_without_a_result() -> None:
    class Broken(HeldBackend):
        async def generate(self, instance_id: str, request: GenerationRequest) -> GenerationResult:
            return None  # type: ignore[return-value]

    _, scheduler = make_scheduler([1], Broken())
    tickets = await put(scheduler, make_requests(2))
    assert states(tickets) == [S.FAILED, S.FAILED]


@virtually
async def test_generate_call_cancelled() -> None:
    backend, scheduler = make_scheduler([1])
    ticket, other = await put(scheduler, make_requests(2))
    backend.last("r0").answer.cancel()
    await settle()
    assert "the call to i0 was cancelled" in str(ticket.future.exception(timeout=0))
    assert states([ticket, other]) == [S.FAILED, S.RUNNING]


def test_scheduler_ends_with_its_loop() -> None:
    tickets: list[Ticket] = []
    backends: list[HeldBackend] = []

    async def leave() -> None:
        backend, scheduler = make_scheduler([2])
        backends.append(backend)
        tickets.extend(await put(scheduler, make_requests(5)))

    run_virtually(leave())
    assert set(states(tickets)) == {S.FAILED}
    assert all(isinstance(ticket.future.exception(timeout=0), HelmsmanError) for ticket in tickets)
    assert backends[0].sent == ["r0", "r1"]
