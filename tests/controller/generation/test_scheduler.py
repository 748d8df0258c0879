"""GenerateScheduler: one end for each request, order, bounds, deadlines, early ends and suspension."""

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
from helmsman.controller.generation.health import Health
from helmsman.controller.generation.instance import Instance
from helmsman.controller.generation.request import RequestOptions, RequestState, Ticket
from helmsman.controller.generation.scheduler import GenerateScheduler, RetryGeneration
from helmsman.controller.generation.virtual_time import run_virtually
from tests.controller.generation.backends import HeldBackend, make_request, make_requests, settle, virtually, waits

S = RequestState


def make_scheduler(backend: HeldBackend, capacities: Sequence[int] = (2,), **options: Any) -> GenerateScheduler:
    """Instances i0, i1... of these capacities."""
    scheduler = GenerateScheduler(backend, **options)
    for index, capacity in enumerate(capacities):
        scheduler.add(f"i{index}", capacity)
    return scheduler


def states(tickets: Sequence[Ticket]) -> list[RequestState]:
    return [ticket.state for ticket in tickets]


# --- outcomes -----------------------------------------------------------------------------------------------------------


@virtually
async def test_each_request_has_its_own_outcome() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [4])
    done, partial, aborted, failed = scheduler.put(make_requests(4))
    assert states([done, partial, aborted, failed]) == [S.ADMITTED] * 4
    await settle()
    assert states([done, partial, aborted, failed]) == [S.RUNNING] * 4
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
async def test_a_request_knows_where_it_was_sent() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    sent, waiting = scheduler.put(make_requests(2))
    await settle()
    assert (sent.sent_to, sent.num_attempts) == ("i0", 1)
    assert (waiting.sent_to, waiting.num_attempts) == ("", 0)
    assert scheduler.running() == {"i0": ["r0"]}
    assert scheduler.running(["r1"]) == {}


@virtually
async def test_requests_wait_for_an_instance() -> None:
    backend = HeldBackend()
    scheduler = GenerateScheduler(backend)
    (ticket,) = scheduler.put([make_request("r")])
    await settle()
    assert ticket.state is S.QUEUED
    scheduler.add("i0", 1)
    await settle()
    backend.last("r").end()
    await settle()
    assert ticket.state is S.DONE


@virtually
async def test_without_hope_requests_fail_with_the_reason() -> None:
    reason: Exception | None = None
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1], why_hopeless=lambda: reason)
    sent, waiting = scheduler.put(make_requests(2))
    await settle()
    reason = HelmsmanError("all instances have died")
    scheduler.set_health("i0", Health.DEAD, reason)
    assert states([sent, waiting]) == [S.FAILED, S.FAILED]
    assert waiting.future.exception() is reason
    with pytest.raises(HelmsmanError, match="all instances have died"):
        scheduler.put([make_request("late")])
    assert scheduler.num_queued == 0


# --- ids ----------------------------------------------------------------------------------------------------------------


@virtually
async def test_an_id_in_use_is_refused_and_nothing_of_its_list_is_taken() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    scheduler.put([make_request("a")])
    for requests in (["b", "a"], ["b", "c", "b"]):
        with pytest.raises(ValueError, match="is in use already"):
            scheduler.put([make_request(request_id) for request_id in requests])
    assert scheduler.num_queued == 0
    await settle()
    assert backend.sent == ["a"]


@pytest.mark.parametrize("end", ["done", "aborted", "failed", "cancelled"])
def test_an_id_is_free_again_after_its_end(end: str) -> None:
    @virtually
    async def check() -> None:
        backend = HeldBackend()
        scheduler = make_scheduler(backend, [1])
        blocker, first = scheduler.put([make_request("blocker"), make_request("r")])
        await settle()
        if end == "aborted":
            await scheduler.abort(["r"])
        elif end == "cancelled":
            first.future.cancel()
        else:
            backend.last("blocker").end()
            await settle()
            assert blocker.state is S.DONE
            call = backend.last("r")
            call.end() if end == "done" else call.answer.set_exception(ValueError(end))
        await settle()
        assert first.state.is_end
        (second,) = scheduler.put([make_request("r")])
        assert not second.state.is_end

    check()


# --- order and bounds ---------------------------------------------------------------------------------------------------


@virtually
async def test_higher_priorities_first_equals_in_their_order() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
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
async def test_what_comes_back_goes_to_the_place_of_its_age() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    first, *_ = scheduler.put(make_requests(3))
    scheduler.suspend()
    assert first.state is S.QUEUED
    scheduler.resume()
    await settle()
    assert backend.sent == ["r0"]


@virtually
async def test_no_instance_has_more_than_its_capacity_nor_all_more_than_the_bound() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1, 2, 9], max_in_flight=7)
    tickets = scheduler.put(make_requests(60))
    most: dict[str, int] = {}
    await settle()
    while backend.open():
        assert len(backend.open()) == scheduler.num_in_flight == min(7, sum(not ticket.state.is_end for ticket in tickets))
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
async def test_submit_waits_while_the_queue_is_full_and_put_does_not() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1], max_queue=2)
    running, *queued = [await scheduler.submit(make_request(f"r{index}")) for index in range(3)]
    assert states([running, *queued]) == [S.ADMITTED, S.QUEUED, S.QUEUED]
    late = await waits(scheduler.submit(make_request("late")))
    later = await waits(scheduler.submit(make_request("later")))
    (put,) = scheduler.put([make_request("put")])
    assert put.state is S.QUEUED
    backend.last("r0").end()
    await settle()
    assert late.done()
    assert not later.done()
    queued[1].future.cancel()
    await settle()
    assert later.done(), "what is withdrawn makes room, too"


@virtually
async def test_a_submission_that_is_given_up_takes_no_room() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1], max_queue=1)
    _, queued = [await scheduler.submit(make_request(f"r{index}")) for index in range(2)]
    given_up, next_ = [await waits(scheduler.submit(make_request(id_))) for id_ in ("given up", "next")]
    given_up.cancel()
    await settle()
    assert not next_.done()
    await scheduler.abort([queued.request_id])
    await settle()
    assert next_.done()


@virtually
async def test_a_submission_that_is_refused_takes_no_room() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1], max_queue=1)
    await scheduler.submit(make_request("r"))
    for _ in range(3):
        with pytest.raises(ValueError, match="in use"):
            await scheduler.submit(make_request("r"))
    assert (await scheduler.submit(make_request("next"))).state is S.QUEUED


@virtually
async def test_a_policy_that_fails_is_that_requests_failure() -> None:
    class Picky:
        def choose(self, ticket: Ticket, able: Sequence[Instance]) -> Instance:
            if ticket.options.session == "bad":
                raise KeyError("no instance for this session")
            return able[0]

    backend = HeldBackend()
    scheduler = make_scheduler(backend, [4], policy=Picky())
    (bad,) = scheduler.put([make_request("bad")], RequestOptions(session="bad"))
    (good,) = scheduler.put([make_request("good")])
    await settle()
    assert isinstance(bad.future.exception(timeout=0), KeyError)
    assert states([bad, good]) == [S.FAILED, S.RUNNING]
    assert scheduler.num_queued == 0


@virtually
async def test_what_ended_while_it_waited_is_not_kept() -> None:
    """Behind a queue that always has something better to do, others that end must not pile up."""
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    scheduler.put([make_request("blocker")])
    (waiting,) = scheduler.put([make_request("waiting")])
    await settle()
    ended: weakref.WeakSet[Ticket] = weakref.WeakSet()
    for turn in range(40):
        tickets = scheduler.put([make_request(f"{turn}-{index}") for index in range(50)], RequestOptions(priority=-1))
        ended.update(tickets)
        assert await scheduler.abort([ticket.request_id for ticket in tickets]) == 50
    gc.collect()
    assert len(ended) < 200
    backend.last("blocker").end()
    await settle()
    assert waiting.state is S.RUNNING


# --- deadlines ----------------------------------------------------------------------------------------------------------


@virtually
async def test_a_deadline_ends_what_waits() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    scheduler.put([make_request("blocker")])
    (ticket,) = scheduler.put([make_request("r")], RequestOptions(deadline_s=30.0))
    await asyncio.sleep(29.9)
    assert ticket.state is S.QUEUED
    await asyncio.sleep(0.2)
    assert ticket.state is S.FAILED
    error = ticket.future.exception(timeout=0)
    assert isinstance(error, RequestDeadlineError)
    assert (error.request_id, error.limit_s) == ("r", 30.0)
    assert "it was queued" in str(error)
    assert backend.aborts == []
    backend.open()[0].end()
    await settle()
    assert backend.sent == ["blocker"]


@virtually
async def test_a_deadline_ends_what_runs_and_its_late_result_is_nobodys() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    (ticket,) = scheduler.put([make_request("r")], RequestOptions(deadline_s=30.0))
    (waiting,) = scheduler.put([make_request("waiting")])
    await asyncio.sleep(30.1)
    error = ticket.future.exception(timeout=0)
    assert isinstance(error, RequestDeadlineError)
    assert "it was running on i0" in str(error)
    assert backend.aborts == [("i0", ["r"])]
    assert waiting.state is S.RUNNING, "its place is free"
    backend.last("r").end([1])
    await settle()
    assert ticket.state is S.FAILED
    assert ticket.future.exception() is error
    assert scheduler.num_in_flight == 1


@virtually
async def test_a_deadline_that_was_kept_does_nothing() -> None:
    backend = HeldBackend()
    backend.abort_error = RuntimeError("not to be asked")
    scheduler = make_scheduler(backend, [1])
    (ticket,) = scheduler.put([make_request("r")], RequestOptions(deadline_s=30.0))
    await settle()
    backend.last("r").end()
    await asyncio.sleep(60.0)
    assert ticket.state is S.DONE
    assert backend.aborts == []


# --- abort --------------------------------------------------------------------------------------------------------------


@virtually
async def test_abort_ends_each_where_it_is() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1, 1])
    (running,) = scheduler.put([make_request("running")])
    await settle()
    admitted, queued, other = scheduler.put([make_request(id_) for id_ in ("admitted", "queued", "other")])
    assert states([running, admitted, queued, other]) == [S.RUNNING, S.ADMITTED, S.QUEUED, S.QUEUED]
    assert await scheduler.abort(["running", "admitted", "queued", "unknown"]) == 3
    assert states([running, admitted, queued]) == [S.RUNNING, S.ABORTED, S.ABORTED]
    assert backend.aborts == [("i0", ["running"])]
    backend.last("running").give_back([1, 2], version=3)
    await settle()
    assert running.state is S.PARTIAL
    assert running.future.result().versions == [3, 3]
    assert other.state is S.RUNNING
    assert backend.sent == ["running", "other"]


@virtually
async def test_abort_of_all_takes_one_call_for_each_instance() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [2, 2, 2])
    tickets = scheduler.put(make_requests(10))
    await settle()
    assert await scheduler.abort() == 10
    assert sorted(id_ for id_, _ in backend.aborts) == ["i0", "i1", "i2"]
    assert sum(len(ids) for _, ids in backend.aborts) == 6
    for call in backend.open():
        call.give_back()
    await settle()
    assert set(states(tickets)) == {S.ABORTED}
    assert await scheduler.abort() == 0


@virtually
async def test_a_request_that_comes_to_its_end_before_the_abort_is_done() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    (ticket,) = scheduler.put([make_request("r")])
    await settle()
    await scheduler.abort(["r"])
    backend.last("r").end([1, 2])
    await settle()
    assert ticket.state is S.DONE


@virtually
async def test_an_instance_that_refuses_an_abort_is_told_and_stops_no_other() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1, 1])
    tickets = scheduler.put(make_requests(2))
    await settle()
    backend.abort_error = RuntimeError("abort is not known here")
    with pytest.raises(RuntimeError, match="not known here"):
        await scheduler.abort()
    assert len(backend.aborts) == 2
    for call in backend.open():
        call.give_back([1])
    await settle()
    assert states(tickets) == [S.PARTIAL, S.PARTIAL]


# --- suspension ---------------------------------------------------------------------------------------------------------


@virtually
async def test_of_a_thousand_none_starts_until_resume() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [8] * 8)
    (running,) = scheduler.put([make_request("running")])
    await settle()
    tickets = scheduler.put(make_requests(1000))
    assert states(tickets).count(S.ADMITTED) == 63
    scheduler.suspend()
    assert scheduler.is_suspended
    assert set(states(tickets)) == {S.QUEUED}, "also those that were admitted in this turn"
    assert scheduler.num_in_flight == 1
    more = scheduler.put([make_request("more")])
    scheduler.add("new", 8)
    scheduler.set_health("i0", Health.SUSPECT)
    scheduler.set_health("i0", Health.HEALTHY)
    backend.last("running").end()
    await asyncio.sleep(3600.0)
    assert running.state is S.DONE, "what runs goes on"
    assert backend.sent == ["running"]
    assert scheduler.num_queued == 1001
    scheduler.resume()
    while backend.open() or scheduler.num_queued:
        await settle()
        for call in backend.open():
            call.end()
    await settle()
    assert set(states(tickets + more)) == {S.DONE}
    assert sorted(backend.sent) == sorted(["running", "more", *(ticket.request_id for ticket in tickets)])


@virtually
async def test_suspend_and_resume_in_one_turn_send_each_request_once() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [4])
    scheduler.put(make_requests(4))
    for _ in range(5):
        scheduler.suspend()
        scheduler.resume()
    await settle()
    assert sorted(backend.sent) == ["r0", "r1", "r2", "r3"]


@virtually
async def test_wait_idle_waits_for_what_runs_and_for_nothing_else() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [2])
    await scheduler.wait_idle()
    tickets = scheduler.put(make_requests(3))
    await settle()
    scheduler.suspend()
    idle = await waits(scheduler.wait_idle())
    given_up = await waits(scheduler.wait_idle())
    given_up.cancel()
    backend.last("r0").end()
    await settle()
    assert not idle.done()
    backend.last("r1").end()
    await settle()
    assert idle.done()
    assert tickets[2].state is S.QUEUED


@virtually
async def test_waits_that_are_given_up_leave_nothing() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    scheduler.put([make_request("r")])
    await settle()

    def num_futures() -> int:
        gc.collect()
        return sum(isinstance(each, asyncio.Future) for each in gc.get_objects())

    before = num_futures()
    for _ in range(100):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scheduler.wait_idle(), 1.0)
    assert num_futures() < before + 10


# --- cancellation -------------------------------------------------------------------------------------------------------


def cancel_in_thread(ticket: Ticket) -> bool:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(ticket.future.cancel()))
    thread.start()
    thread.join()
    return answers[0]


@virtually
async def test_cancelled_from_another_thread_while_it_waits() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    scheduler.put([make_request("blocker")])
    (ticket,) = scheduler.put([make_request("r")])
    await settle()
    assert cancel_in_thread(ticket)
    await settle()
    assert ticket.state is S.ABORTED
    assert scheduler.num_queued == 0
    backend.open()[0].end()
    await settle()
    assert backend.sent == ["blocker"]


@virtually
async def test_cancelled_from_another_thread_when_admitted() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    ticket, other = scheduler.put(make_requests(2))
    assert ticket.state is S.ADMITTED
    assert cancel_in_thread(ticket)
    await settle()
    assert ticket.state is S.ABORTED
    assert other.state is S.RUNNING, "its place is free"
    assert backend.sent == ["r1"]


@virtually
async def test_what_was_sent_is_not_cancelled_from_another_thread() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    (ticket,) = scheduler.put([make_request("r")])
    await settle()
    assert not cancel_in_thread(ticket)
    backend.last("r").end([1])
    await settle()
    assert ticket.future.result().token_ids == [1]
    assert not cancel_in_thread(ticket)


@virtually
async def test_what_came_back_from_an_instance_is_not_cancelled_but_aborted() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    (ticket,) = scheduler.put([make_request("r")])
    await settle()
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
async def test_many_cancelled_ones_are_passed_over() -> None:
    """In the turn of their cancellation, when the scheduler has not been told of it yet."""
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    scheduler.suspend()
    tickets = scheduler.put(make_requests(3000))
    for ticket in tickets[:-1]:
        assert ticket.future.cancel()
    scheduler.resume()
    await settle()
    assert backend.sent == ["r2999"]
    assert set(states(tickets[:-1])) == {S.ABORTED}


# --- stream and close ---------------------------------------------------------------------------------------------------


@virtually
async def test_a_stream_gives_tickets_as_they_end() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [3])
    tickets = scheduler.put(make_requests(5))
    await settle()
    seen: list[tuple[str, RequestState]] = []

    def see(ticket: Ticket) -> None:
        seen.append((ticket.request_id, ticket.state))

    async def read() -> None:
        async for ticket in scheduler.stream(tickets):
            see(ticket)

    reader = await waits(read())
    backend.last("r2").end()
    await settle()
    assert seen == [("r2", S.DONE)]
    tickets[4].future.cancel()
    backend.last("r0").answer.set_exception(ValueError("no"))
    await settle()
    assert sorted(seen[1:], key=lambda pair: pair[0]) == [("r0", S.FAILED), ("r4", S.ABORTED)]
    backend.last("r1").give_back([1])
    backend.last("r3").end()
    await reader
    assert sorted(id_ for id_, _ in seen) == ["r0", "r1", "r2", "r3", "r4"]


@virtually
async def test_a_stream_gives_what_has_ended_before() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    tickets = scheduler.put(make_requests(1))
    await settle()
    backend.last("r0").end()
    await settle()
    assert [ticket.request_id async for ticket in scheduler.stream(tickets)] == ["r0"]
    assert [ticket async for ticket in scheduler.stream([])] == []


@virtually
async def test_close_fails_what_was_not_sent_and_lets_the_rest_end() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1], max_queue=1)
    running, queued = [await scheduler.submit(make_request(id_)) for id_ in ("running", "queued")]
    submitting = await waits(scheduler.submit(make_request("submitting")))
    scheduler.close("the job is over")
    scheduler.close("again")
    assert states([running, queued]) == [S.RUNNING, S.FAILED]
    assert "was not sent: the job is over" in str(queued.future.exception(timeout=0))
    await settle()
    with pytest.raises(HelmsmanError, match="no request is taken: the job is over"):
        await submitting
    with pytest.raises(HelmsmanError, match="no request is taken: the job is over"):
        scheduler.put([make_request("late")])
    backend.last("running").end()
    await settle()
    assert running.state is S.DONE
    assert backend.sent == ["running"]


@virtually
async def test_nothing_is_sent_after_close() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [4])
    tickets = scheduler.put(make_requests(3))
    assert set(states(tickets)) == {S.ADMITTED}
    scheduler.close()
    await settle()
    assert set(states(tickets)) == {S.FAILED}
    assert backend.sent == []
    assert scheduler.num_in_flight == 0


@virtually
async def test_what_is_lost_after_close_fails_instead_of_waiting_for_ever() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [4], retries=RetryGeneration())
    lost, aborted = scheduler.put(make_requests(2))
    await settle()
    await scheduler.abort(["r1"])
    scheduler.close("the job is over")
    for call in backend.open():
        call.lose()
    await settle()
    assert states([lost, aborted]) == [S.FAILED, S.ABORTED]
    assert isinstance(lost.future.exception(timeout=0), InstanceLostError)


@virtually
async def test_a_callback_may_do_anything() -> None:
    """Futures call back in the midst of what ended them."""
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [2, 2])
    tickets = scheduler.put(make_requests(12))
    await settle()
    again: list[Ticket] = []

    def meddle(_: Any) -> None:
        scheduler.set_health("i0", Health.DEAD)
        if not again:
            again.extend(scheduler.put([make_request("again")]))
        scheduler.suspend()
        scheduler.resume()
        scheduler.close()

    for ticket in tickets:
        ticket.future.add_done_callback(meddle)
    scheduler.set_health("i0", Health.DEAD)
    for call in backend.open("i1"):
        call.end()
    await settle()
    assert all(ticket.state.is_end for ticket in [*tickets, *again])
    assert all(ticket.future.done() for ticket in [*tickets, *again])
    assert (scheduler.num_queued, scheduler.num_in_flight) == (0, 0)
    assert {instance.outstanding_tokens for instance in scheduler.instances.values()} == {0}


@virtually
async def test_results_of_any_shape_end_their_request() -> None:
    class Broken(HeldBackend):
        async def generate(self, instance_id: str, request: GenerationRequest) -> GenerationResult:
            return None  # type: ignore[return-value]

    scheduler = make_scheduler(Broken(), [1])
    tickets = scheduler.put(make_requests(2))
    await settle()
    assert states(tickets) == [S.FAILED, S.FAILED]


@virtually
async def test_a_call_that_was_cancelled_is_an_error_and_cancels_nobody() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    ticket, other = scheduler.put(make_requests(2))
    await settle()
    backend.last("r0").answer.cancel()
    await settle()
    assert "the call to i0 was cancelled" in str(ticket.future.exception(timeout=0))
    assert states([ticket, other]) == [S.FAILED, S.RUNNING]


def test_with_its_loop_all_requests_end() -> None:
    tickets: list[Ticket] = []
    backends: list[HeldBackend] = []

    async def leave() -> None:
        backends.append(HeldBackend())
        scheduler = make_scheduler(backends[0], [2])
        tickets.extend(scheduler.put(make_requests(5)))
        await settle()

    run_virtually(leave())
    assert set(states(tickets)) == {S.FAILED}
    assert all(isinstance(ticket.future.exception(timeout=0), HelmsmanError) for ticket in tickets)
    assert backends[0].sent == ["r0", "r1"]
