"""Tests of GenerateScheduler: outcomes, order, bounds, suspension, deadlines and aborts."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from helmsman.api.errors import HelmsmanError, InstanceLostError, RequestDeadlineError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.controller._rollout.health import Health
from helmsman.controller._rollout.request import Instance, RequestOptions, RequestState, Ticket
from helmsman.controller._rollout.retries import RetryGeneration
from helmsman.testing import run_virtually
from tests.unit.controller.rollout.backends import (
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


# --- outcomes -------------------------------------------------------------------------------------


@virtually
async def test_put_outcomes() -> None:
    backend, scheduler = make_scheduler([4])
    done, partial, aborted, failed = scheduler.put(make_requests(4))
    assert states([done, partial, aborted, failed]) == [S.ADMITTED] * 4
    await settle()
    assert states([done, partial, aborted, failed]) == [S.RUNNING] * 4
    (waiting,) = await put(scheduler, [make_request("waiting")])
    assert [(ticket.sent_to, ticket.num_attempts) for ticket in (done, waiting)] == [
        ("i0", 1),
        ("", 0),
    ]
    assert scheduler.running() == {"i0": ["r0", "r1", "r2", "r3"]}
    assert scheduler.running(["waiting"]) == {}
    await scheduler.abort(["waiting"])
    backend.last("r0").end([1, 2], version=5)
    backend.last("r1").give_back([3], version=5)
    backend.last("r2").give_back()
    backend.last("r3").answer.set_exception(ValueError("no such token"))
    await settle()
    assert states([done, partial, aborted, failed]) == [S.DONE, S.PARTIAL, S.ABORTED, S.FAILED]
    assert done.future.result().token_ids == [1, 2]
    assert done.future.result().versions == [5, 5]
    assert partial.future.result().token_ids == [3]
    assert partial.future.result().stop_reason == aborted.future.result().stop_reason == "abort"
    assert aborted.future.result().token_ids == []
    assert isinstance(failed.future.exception(), ValueError)
    assert (scheduler.num_queued, scheduler.num_in_flight) == (0, 0)
    assert scheduler.instances["i0"].outstanding_tokens == 0
    assert scheduler.running() == {}


@virtually
async def test_put_after_the_last_instance_has_died() -> None:
    reason: Exception | None = None
    _, scheduler = make_scheduler([1], why_hopeless=lambda: reason)
    sent, waiting = await put(scheduler, make_requests(2))
    reason = HelmsmanError("all instances have died")
    scheduler.set_health("i0", Health.DEAD, reason)
    assert states([sent, waiting]) == [S.FAILED, S.FAILED]
    assert waiting.future.exception() is reason
    with pytest.raises(HelmsmanError, match="all instances have died"):
        scheduler.put([make_request("late")])
    assert scheduler.num_queued == 0


# --- ids ------------------------------------------------------------------------------------------


@virtually
async def test_put_id_in_use() -> None:
    backend, scheduler = make_scheduler([1])
    scheduler.put([make_request("a")])
    for requests in (["b", "a"], ["b", "c", "b"]):
        with pytest.raises(ValueError, match="is in use already"):
            scheduler.put([make_request(request_id) for request_id in requests])
    assert scheduler.num_queued == 0
    await settle()
    assert backend.sent == ["a"]


@pytest.mark.parametrize("end", ["done", "aborted", "failed", "cancelled"])
@virtually
async def test_put_id_of_an_ended_request(end: str) -> None:
    backend, scheduler = make_scheduler([1])
    blocker, first = await put(scheduler, [make_request("blocker"), make_request("r")])
    if end == "aborted":
        await scheduler.abort(["r"])
    elif end == "cancelled":
        first.future.cancel()
    else:
        await backend.end("blocker")
        assert blocker.state is S.DONE
        call = backend.last("r")
        call.end() if end == "done" else call.answer.set_exception(ValueError(end))
    await settle()
    assert first.state.is_end
    (second,) = scheduler.put([make_request("r")])
    assert not second.state.is_end


# --- order and bounds -----------------------------------------------------------------------------


@virtually
async def test_put_priorities() -> None:
    backend, scheduler = make_scheduler([1])
    scheduler.suspend()
    for request_id, priority in (("low", -1), ("a", 0), ("b", 0), ("high", 3), ("c", 0)):
        scheduler.put([make_request(request_id)], RequestOptions(priority=priority))
    scheduler.resume()
    for _ in range(5):
        await settle()
        backend.open()[0].end()
    await settle()
    assert backend.sent == ["high", "a", "b", "c", "low"]


@virtually
async def test_put_keeps_capacities_and_max_in_flight() -> None:
    backend, scheduler = make_scheduler([1, 2, 9], max_in_flight=7)
    tickets = scheduler.put(make_requests(60))
    most: dict[str, int] = {}
    await settle()
    while backend.open():
        assert (
            len(backend.open())
            == scheduler.num_in_flight
            == min(7, sum(not ticket.state.is_end for ticket in tickets))
        )
        for id_, instance in scheduler.instances.items():
            assert len(backend.open(id_)) == instance.num_in_flight <= instance.capacity
            most[id_] = max(most.get(id_, 0), instance.num_in_flight)
        backend.open()[0].end()
        await settle()
    assert set(states(tickets)) == {S.DONE}
    assert most["i0"] == 1
    assert most["i1"] == 2
    assert sorted(backend.sent) == sorted(ticket.request_id for ticket in tickets)


@virtually
async def test_submit_waits_while_the_queue_is_full() -> None:
    backend, scheduler = make_scheduler([1], max_queue=2)
    running, *queued = [await scheduler.submit(make_request(f"r{index}")) for index in range(3)]
    assert states([running, *queued]) == [S.ADMITTED, S.QUEUED, S.QUEUED]
    late = await waits(scheduler.submit(make_request("late")))
    later = await waits(scheduler.submit(make_request("later")))
    (put,) = scheduler.put([make_request("put")])
    assert put.state is S.QUEUED
    await backend.end("r0")
    assert late.done()
    assert not later.done()
    queued[1].future.cancel()
    await settle()
    assert later.done(), "a cancelled request leaves the queue"


@virtually
async def test_submit_refused_or_cancelled_takes_no_room() -> None:
    _, scheduler = make_scheduler([1], max_queue=1)
    await scheduler.submit(make_request("r0"))
    for _ in range(3):
        with pytest.raises(ValueError, match="in use"):
            await scheduler.submit(make_request("r0"))
    queued = await scheduler.submit(make_request("r1"))
    assert queued.state is S.QUEUED
    given_up, next_ = [
        await waits(scheduler.submit(make_request(id_))) for id_ in ("given up", "next")
    ]
    given_up.cancel()
    await settle()
    assert not next_.done()
    await scheduler.abort([queued.request_id])
    await settle()
    assert next_.done()


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (None, "Choosy.choose returned .* for request 'bad'; expected one of the 1 instances"),
        (Instance("elsewhere", 4), "Choosy.choose returned 'elsewhere' for request 'bad'"),
        (KeyError("no instance for this session"), "no instance for this session"),
    ],
    ids=["none", "another", "error"],
)
@virtually
async def test_put_policy_with_an_invalid_choice(chosen: Any, message: str) -> None:
    class Choosy:
        def choose(self, ticket: Ticket, able: Sequence[Instance]) -> Instance:
            if ticket.options.session != "bad":
                return able[0]
            if isinstance(chosen, Exception):
                raise chosen
            return chosen  # type: ignore[no-any-return]

    _, scheduler = make_scheduler([4], policy=Choosy())
    (bad,) = scheduler.put([make_request("bad")], RequestOptions(session="bad"))
    (good,) = await put(scheduler, [make_request("good")])
    with pytest.raises((ValueError, KeyError), match=message):
        bad.future.result(timeout=0)
    assert states([bad, good]) == [S.FAILED, S.RUNNING]
    assert scheduler.num_queued == 0


@pytest.mark.usefixtures("young_heap")
@virtually
async def test_abort_frees_waiting_requests() -> None:
    """Aborted requests behind one of higher priority use no memory."""
    backend, scheduler = make_scheduler([1])
    scheduler.put([make_request("blocker")])
    (waiting,) = await put(scheduler, [make_request("waiting")])
    ended: weakref.WeakSet[Ticket] = weakref.WeakSet()
    for turn in range(40):
        tickets = scheduler.put(
            [make_request(f"{turn}-{index}") for index in range(50)], RequestOptions(priority=-1)
        )
        ended.update(tickets)
        assert await scheduler.abort([ticket.request_id for ticket in tickets]) == 50
    gc.collect()
    assert len(ended) < 200
    await backend.end("blocker")
    assert waiting.state is S.RUNNING


# --- suspension -----------------------------------------------------------------------------------


@virtually
async def test_suspend_until_resume() -> None:
    backend, scheduler = make_scheduler([8] * 8)
    (running,) = await put(scheduler, [make_request("running")])
    tickets = scheduler.put(make_requests(1000))
    assert states(tickets).count(S.ADMITTED) == 63
    scheduler.suspend()
    assert scheduler.is_suspended
    assert set(states(tickets)) == {S.QUEUED}, "requests admitted in this turn are queued again"
    assert scheduler.num_in_flight == 1
    more = scheduler.put([make_request("more")])
    scheduler.add("new", 8)
    scheduler.set_health("i0", Health.SUSPECT)
    scheduler.set_health("i0", Health.HEALTHY)
    backend.last("running").end()
    await asyncio.sleep(3600.0)
    assert running.state is S.DONE, "a running request continues"
    assert backend.sent == ["running"]
    assert scheduler.num_queued == 1001
    scheduler.resume()
    while backend.open() or scheduler.num_queued:
        await settle()
        await backend.end_all()
    assert set(states(tickets + more)) == {S.DONE}
    assert sorted(backend.sent) == sorted(
        ["running", "more", *(ticket.request_id for ticket in tickets)]
    )


@virtually
async def test_wait_idle_while_suspended() -> None:
    backend, scheduler = make_scheduler([2])
    await scheduler.wait_idle()
    tickets = await put(scheduler, make_requests(3))
    scheduler.suspend()
    idle = await waits(scheduler.wait_idle())
    given_up = await waits(scheduler.wait_idle())
    given_up.cancel()
    await backend.end("r0")
    assert not idle.done()
    await backend.end("r1")
    assert idle.done()
    assert tickets[2].state is S.QUEUED


@pytest.mark.usefixtures("young_heap")
@virtually
async def test_wait_idle_cancelled_leaves_no_futures() -> None:
    _, scheduler = make_scheduler([1])
    await put(scheduler, [make_request("r")])

    def num_futures() -> int:
        gc.collect()
        # isinstance would read attributes of the objects
        return sum(issubclass(type(each), asyncio.Future) for each in gc.get_objects())

    before = num_futures()
    for _ in range(100):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scheduler.wait_idle(), 1.0)
    assert num_futures() < before + 10


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
