"""GenerateScheduler: instances that come, go, are drained, die and hang."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from helmsman.api.errors import HelmsmanError, InstanceLostError
from helmsman.controller.generation.health import Health
from helmsman.controller.generation.request import RequestOptions, RequestState, Ticket
from helmsman.controller.generation.scheduler import GenerateScheduler, RetryGeneration, RetryPolicy, RetryUnbegun
from tests.controller.generation.backends import HeldBackend, make_request, make_requests, settle, virtually, waits

S = RequestState


def make_scheduler(backend: HeldBackend, capacities: Sequence[int], **options: Any) -> GenerateScheduler:
    """Instances i0, i1... of these capacities."""
    scheduler = GenerateScheduler(backend, **options)
    for index, capacity in enumerate(capacities):
        scheduler.add(f"i{index}", capacity)
    return scheduler


def states(tickets: Sequence[Ticket]) -> list[RequestState]:
    return [ticket.state for ticket in tickets]


def assert_empty(scheduler: GenerateScheduler) -> None:
    assert (scheduler.num_queued, scheduler.num_in_flight) == (0, 0)
    for instance in scheduler.instances.values():
        assert (instance.tickets, instance.outstanding_tokens) == ({}, 0)


# --- coming and going -----------------------------------------------------------------------------------------------------


@virtually
async def test_an_instance_that_comes_takes_what_waits() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    scheduler.put(make_requests(4))
    await settle()
    assert len(backend.open()) == 1
    scheduler.add("new", 2)
    await settle()
    assert len(backend.open("new")) == 2
    scheduler.add("stale", 9, Health.STALE)
    await settle()
    assert backend.open("stale") == []
    scheduler.set_health("stale", Health.HEALTHY)
    await settle()
    assert [call.request_id for call in backend.open("stale")] == ["r3"]


@virtually
async def test_instances_that_make_no_sense_are_refused() -> None:
    scheduler = make_scheduler(HeldBackend(), [1])
    with pytest.raises(ValueError, match="'i0' is here already"):
        scheduler.add("i0", 1)
    with pytest.raises(ValueError, match="capacity is 0"):
        scheduler.add("i1", 0)
    assert list(scheduler.instances) == ["i0"]


@virtually
async def test_only_an_instance_that_has_nothing_is_removed() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [2, 2])
    tickets = scheduler.put(make_requests(3))
    with pytest.raises(ValueError, match="'i0' still has 2 requests; drain it first"):
        scheduler.remove("i0")
    await settle()
    for call in backend.open("i0"):
        call.end()
    await settle()
    scheduler.remove("i0")
    assert list(scheduler.instances) == ["i1"]
    backend.open("i1")[0].end()
    await settle()
    assert set(states(tickets)) == {S.DONE}
    assert_empty(scheduler)


# --- drain --------------------------------------------------------------------------------------------------------------


@virtually
async def test_drain_waits_for_what_runs_and_sends_on_what_was_not_sent() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [2, 1])
    (running,) = scheduler.put([make_request("running")])
    await settle()
    drained = asyncio.ensure_future(scheduler.drain("i0"))  # begins before what is admitted now is sent
    _, admitted = scheduler.put([make_request("on i1"), make_request("admitted")])
    assert scheduler.instances["i0"].num_in_flight == 2
    await settle()
    assert [call.request_id for call in backend.open("i0")] == ["running"]
    backend.open("i1")[0].end()
    await settle()
    assert backend.sent == ["running", "on i1", "admitted"]
    assert backend.calls[-1].instance_id == "i1"
    assert not drained.done()
    backend.last("running").end()
    await drained
    backend.last("admitted").end()
    await settle()
    assert (running.state, admitted.state) == (S.DONE, S.DONE)
    scheduler.put(make_requests(5))
    await settle()
    assert backend.open("i0") == []
    scheduler.remove("i0")
    assert backend.aborts == []


@virtually
async def test_drain_with_migrate_takes_the_tokens_along() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [3])
    request = make_request("r", prompt=[1, 2], max_new_tokens=6)
    ticket, full, untouched = scheduler.put([request, make_request("full", max_new_tokens=2), make_request("untouched")])
    await settle()
    scheduler.add("i1", 3)
    drained = await waits(scheduler.drain("i0", migrate=True))
    assert [(id_, sorted(ids)) for id_, ids in backend.aborts] == [("i0", ["full", "r", "untouched"])]
    backend.last("r").give_back([10, 11], version=3)
    backend.last("full").give_back([20, 21], version=3)
    backend.last("untouched").give_back()
    await drained
    assert full.state is S.DONE, "it had all that it may have"
    assert full.future.result().stop_reason == "length"
    await settle()
    again = backend.last("r")
    assert again.instance_id == "i1"
    assert again.request.prompt_ids == [1, 2, 10, 11]
    assert again.request.sampling.max_new_tokens == 4
    assert backend.last("untouched").request is untouched.request
    again.end([12], version=4)
    backend.last("untouched").end()
    await settle()
    assert states([ticket, untouched]) == [S.DONE, S.DONE]
    result = ticket.future.result()
    assert (result.token_ids, result.versions, result.stop_reason) == ([10, 11, 12], [3, 3, 4], "stop")
    assert result.logprobs == [-0.10, -0.11, -0.12]
    scheduler.remove("i0")
    assert_empty(scheduler)


@virtually
async def test_a_request_moves_as_often_as_it_must() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    (ticket,) = scheduler.put([make_request("r", max_new_tokens=5)])
    for turn in range(4):
        await settle()
        scheduler.add(f"i{turn + 1}", 1)
        drained = asyncio.ensure_future(scheduler.drain(f"i{turn}", migrate=True))
        await settle()
        backend.last("r").give_back([turn], version=turn)
        await drained
        scheduler.remove(f"i{turn}")
    await settle()
    assert backend.last("r").request.sampling.max_new_tokens == 1
    backend.last("r").end([4], version=4, stop_reason="length")
    await settle()
    assert ticket.future.result().token_ids == ticket.future.result().versions == [0, 1, 2, 3, 4]
    assert ticket.num_attempts == 5


@virtually
async def test_what_is_aborted_while_it_moves_ends_with_all_its_tokens() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [2])
    before, after = scheduler.put([make_request("before"), make_request("after")])
    await settle()
    drained = await waits(scheduler.drain("i0", migrate=True))
    await scheduler.abort(["before"])
    backend.last("before").give_back([1], version=1)
    backend.last("after").give_back([2], version=1)
    await drained
    assert states([before, after]) == [S.PARTIAL, S.QUEUED]
    assert before.future.result().token_ids == [1]
    await scheduler.abort()
    assert after.state is S.PARTIAL
    assert (after.future.result().token_ids, after.future.result().stop_reason) == ([2], "abort")
    assert_empty(scheduler)


@pytest.mark.parametrize("migrate", [False, True])
def test_a_cancelled_drain_lets_the_instance_serve_again_and_loses_nothing(migrate: bool) -> None:
    @virtually
    async def check() -> None:
        backend = HeldBackend()
        scheduler = make_scheduler(backend, [2])
        tickets = scheduler.put(make_requests(4))
        await settle()
        drained = await waits(scheduler.drain("i0", migrate=migrate))
        backend.last("r0").end()
        await settle()
        assert backend.sent == ["r0", "r1"]
        drained.cancel()
        await settle()
        assert drained.cancelled()
        assert backend.sent == ["r0", "r1", "r2"]
        if migrate:
            backend.last("r1").give_back([5], version=1)
            await settle()
            assert backend.last("r1").request.prompt_ids == [1, 2, 3, 5]
        while backend.open():
            backend.open()[0].end(version=2)
            await settle()
        assert set(states(tickets)) == {S.DONE}
        assert tickets[1].future.result().versions == ([1, 2] if migrate else [2])
        assert_empty(scheduler)

    check()


@virtually
async def test_a_drain_that_is_cancelled_while_it_asks_loses_nothing() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [2])
    tickets = scheduler.put(make_requests(2))
    await settle()
    backend.abort_gate.clear()
    drained = await waits(scheduler.drain("i0", migrate=True))
    drained.cancel()
    await settle()
    backend.last("r0").end()
    backend.last("r1").end()
    await settle()
    assert set(states(tickets)) == {S.DONE}
    assert scheduler.instances["i0"].serves


@virtually
async def test_a_drain_whose_instance_refuses_to_give_back_serves_on() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    scheduler.put(make_requests(1))
    await settle()
    backend.abort_error = RuntimeError("abort is not known here")
    with pytest.raises(RuntimeError, match="not known here"):
        await scheduler.drain("i0", migrate=True)
    assert scheduler.instances["i0"].serves


@pytest.mark.parametrize("migrate", [False, True])
def test_a_drain_ends_with_the_death_of_its_instance(migrate: bool) -> None:
    @virtually
    async def check() -> None:
        backend = HeldBackend()
        scheduler = make_scheduler(backend, [2], retries=RetryGeneration())
        tickets = scheduler.put(make_requests(2))
        await settle()
        drained = await waits(scheduler.drain("i0", migrate=migrate))
        scheduler.set_health("i0", Health.DEAD)
        await drained
        scheduler.remove("i0")
        scheduler.add("i1", 2)
        await settle()
        for call in backend.open("i1"):
            call.end()
        await settle()
        assert set(states(tickets)) == {S.DONE}

    check()


@virtually
async def test_one_instance_after_the_other_is_replaced_under_load() -> None:
    """Shrink during routing: nothing is lost, and everything is sent to somebody who is there."""
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [2] * 4)
    tickets = scheduler.put(make_requests(100))
    for turn in range(4):
        await settle()
        drained = asyncio.ensure_future(scheduler.drain(f"i{turn}", migrate=turn % 2 == 0))
        await settle()
        for call in backend.open(f"i{turn}"):
            call.give_back([1]) if turn % 2 == 0 else call.end()
        await drained
        scheduler.remove(f"i{turn}")
        scheduler.add(f"new{turn}", 2)
    await settle()
    assert {call.instance_id for call in backend.open()} == {"new0", "new1", "new2", "new3"}
    while backend.open():
        for call in backend.open():
            call.end()
        await settle()
    assert set(states(tickets)) == {S.DONE}
    assert_empty(scheduler)


# --- loss ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retries", "may_have_begun", "is_retried"),
    [
        (None, False, True),
        (None, True, False),
        (RetryUnbegun(), False, True),
        (RetryUnbegun(), True, False),
        (RetryGeneration(), False, True),
        (RetryGeneration(), True, True),
        (RetryGeneration(1), True, False),
        (RetryGeneration(1), False, True),
    ],
)
def test_what_was_lost_is_tried_again_as_the_policy_says(
    retries: RetryPolicy | None, may_have_begun: bool, is_retried: bool
) -> None:
    @virtually
    async def check() -> None:
        backend = HeldBackend()
        scheduler = make_scheduler(backend, [1, 1], retries=retries)
        (ticket,) = scheduler.put([make_request("r")])
        await settle()
        backend.last("r").lose(may_have_begun=may_have_begun)
        await settle()
        if is_retried:
            assert backend.last("r").instance_id == "i1"
            backend.last("r").end()
            await settle()
            assert ticket.state is S.DONE
        else:
            error = ticket.future.exception(timeout=0)
            assert ticket.state is S.FAILED
            assert isinstance(error, InstanceLostError)
            assert (error.instance_id, error.may_have_begun) == ("i0", True)
            assert backend.sent == ["r"]

    check()


@virtually
async def test_attempts_are_bounded() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1] * 9, retries=RetryGeneration(3))
    (ticket,) = scheduler.put([make_request("r")])
    for _ in range(3):
        await settle()
        backend.last("r").lose()
    await settle()
    assert ticket.state is S.FAILED
    assert backend.sent == ["r"] * 3
    with pytest.raises(ValueError, match="max_attempts is 0"):
        RetryGeneration(0)


@virtually
async def test_a_lost_instance_draws_nothing_more() -> None:
    """It would have the fewest tokens outstanding for ever."""
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [2, 2], retries=RetryGeneration())
    tickets = scheduler.put(make_requests(8))
    await settle()
    begun, unbegun = backend.open("i0")
    unbegun.lose(may_have_begun=False)
    await settle()
    assert scheduler.instances["i0"].health is Health.DEAD
    assert scheduler.instances["i0"].num_in_flight == 0
    while backend.open("i1"):
        backend.open("i1")[0].end()
        await settle()
    assert set(states(tickets)) == {S.DONE}
    assert sum(call.instance_id == "i0" for call in backend.calls) == 2
    begun.end([66])
    await settle()
    assert all(ticket.future.result().token_ids == [7] for ticket in tickets)


@virtually
async def test_each_lost_request_has_an_error_of_its_own() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [3])
    unbegun, *begun = scheduler.put(make_requests(3))
    await settle()
    backend.last("r0").lose(may_have_begun=False)
    await settle()
    assert unbegun.state is S.QUEUED
    errors = [ticket.future.exception(timeout=0) for ticket in begun]
    assert errors[0] is not errors[1]
    for error in errors:
        assert isinstance(error, InstanceLostError)
        assert error.may_have_begun
        assert error.reason == "its node was lost"


@virtually
async def test_what_an_instance_died_of_is_told() -> None:
    scheduler = make_scheduler(HeldBackend(), [1])
    (ticket,) = scheduler.put(make_requests(1))
    await settle()
    cause = HelmsmanError("rollout/0 was ended by SIGKILL")
    scheduler.set_health("i0", Health.DEAD, cause)
    assert ticket.future.exception(timeout=0) is cause
    assert scheduler.instances["i0"].error is cause
    scheduler.set_health("i0", Health.RESTARTING)
    assert scheduler.instances["i0"].error is cause
    scheduler.set_health("i0", Health.HEALTHY)
    assert scheduler.instances["i0"].error is None


@virtually
async def test_the_dead_lose_what_they_have_although_their_calls_hang() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [3, 3], retries=RetryGeneration())
    (first,) = scheduler.put([make_request("running")])
    await settle()
    hanging = backend.last("running")
    others = scheduler.put([make_request(id_) for id_ in ("a", "b", "c")])
    on_i0 = [ticket for ticket in others if ticket.instance is scheduler.instances["i0"]]
    assert on_i0, "some are admitted there, and not sent yet"
    scheduler.set_health("i0", Health.DEAD, HelmsmanError("it has not answered for 60 s"))
    await settle()
    assert {call.instance_id for call in backend.open() if call is not hanging} == {"i1"}
    again = backend.last("running")
    assert again is not hanging
    hanging.end([66])
    await settle()
    assert first.state is S.RUNNING, "an answer of the dead is nobody's"
    while backend.open("i1"):
        backend.open("i1")[0].end([1])
        await settle()
    assert set(states([first, *others])) == {S.DONE}
    assert first.future.result().token_ids == [1]
    assert_empty(scheduler)


@pytest.mark.parametrize("late", ["result", "loss", "abort"])
def test_late_news_of_a_former_life_are_ignored(late: str) -> None:
    """The same instance serves again, and has the same request again."""

    @virtually
    async def check() -> None:
        backend = HeldBackend()
        scheduler = make_scheduler(backend, [1], retries=RetryGeneration())
        (ticket,) = scheduler.put([make_request("r")])
        await settle()
        former = backend.last("r")
        for health in (Health.DEAD, Health.RESTARTING, Health.STALE, Health.HEALTHY):
            scheduler.set_health("i0", health)
        if late == "result":
            former.end([66])
        elif late == "loss":
            former.lose()
        else:
            former.give_back([66])
        await settle()
        assert ticket.state is S.RUNNING
        assert scheduler.instances["i0"].health is Health.HEALTHY
        assert scheduler.num_in_flight == 1
        backend.last("r").end([1])
        await settle()
        assert ticket.future.result().token_ids == [1]
        assert_empty(scheduler)

    check()


@virtually
async def test_what_is_suspected_keeps_what_it_has_and_gets_nothing() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [2, 1])
    (running,) = scheduler.put([make_request("running")])
    await settle()
    scheduler.set_health("i0", Health.SUSPECT)
    scheduler.put(make_requests(3))
    await settle()
    assert [call.request_id for call in backend.open("i0")] == ["running"]
    backend.last("running").end()
    await settle()
    assert running.state is S.DONE
    scheduler.set_health("i0", Health.HEALTHY)
    await settle()
    assert len(backend.open("i0")) == 2


@virtually
async def test_what_was_admitted_to_a_suspect_goes_elsewhere_at_once() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1, 1])
    (ticket,) = scheduler.put([make_request("r")])
    assert ticket.instance is scheduler.instances["i0"]
    scheduler.set_health("i0", Health.SUSPECT)
    await settle()
    assert [(call.instance_id, call.request_id) for call in backend.calls] == [("i1", "r")]


@virtually
async def test_an_aborted_request_ends_with_its_instance() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1, 1], retries=RetryGeneration())
    (ticket,) = scheduler.put([make_request("r")])
    await settle()
    await scheduler.abort(["r"])
    backend.last("r").lose()
    await settle()
    assert ticket.state is S.ABORTED
    assert backend.sent == ["r"]


@virtually
async def test_the_abort_of_what_was_lost_is_no_error() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1])
    (ticket,) = scheduler.put([make_request("r")])
    await settle()
    backend.abort_error = InstanceLostError(instance_id="i0", reason="its node was lost", may_have_begun=True)
    assert await scheduler.abort() == 1
    backend.last("r").lose()
    await settle()
    assert ticket.state is S.ABORTED


@virtually
async def test_a_deadline_holds_across_attempts() -> None:
    backend = HeldBackend()
    scheduler = make_scheduler(backend, [1, 1], retries=RetryGeneration())
    (ticket,) = scheduler.put([make_request("r")], RequestOptions(deadline_s=30.0))
    await asyncio.sleep(20.0)
    backend.last("r").lose()
    await asyncio.sleep(9.9)
    assert ticket.state is S.RUNNING
    await asyncio.sleep(0.2)
    assert ticket.state is S.FAILED
    assert backend.aborts == [("i1", ["r"])]
