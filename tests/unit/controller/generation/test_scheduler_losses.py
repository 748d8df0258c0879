"""Tests of GenerateScheduler: instances that die, hang or are suspected."""

from __future__ import annotations

import asyncio

import pytest

from helmsman.api.errors import HelmsmanError, InstanceLostError
from helmsman.controller._generation.health import Health
from helmsman.controller._generation.request import RequestOptions, RequestState, Ticket
from helmsman.controller._generation.retries import RetryGeneration, RetryPolicy, RetryUnbegun
from tests.unit.controller.generation.backends import (
    assert_empty,
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
@virtually
async def test_retry_policies(
    retries: RetryPolicy | None, may_have_begun: bool, is_retried: bool
) -> None:
    backend, scheduler = make_scheduler([1, 1], retries=retries)
    (ticket,) = await put(scheduler, [make_request("r")])
    await backend.lose("r", may_have_begun=may_have_begun)
    if is_retried:
        assert backend.last("r").instance_id == "i1"
        await backend.end("r")
        assert ticket.state is S.DONE
    else:
        error = ticket.future.exception(timeout=0)
        assert ticket.state is S.FAILED
        assert isinstance(error, InstanceLostError)
        assert (error.instance_id, error.may_have_begun) == ("i0", True)
        assert backend.sent == ["r"]


@virtually
async def test_retry_generation_is_bounded() -> None:
    backend, scheduler = make_scheduler([1] * 9, retries=RetryGeneration(3))
    (ticket,) = scheduler.put([make_request("r")])
    for _ in range(3):
        await settle()
        await backend.lose("r")
    assert ticket.state is S.FAILED
    assert backend.sent == ["r"] * 3
    with pytest.raises(ValueError, match="max_attempts is 0"):
        RetryGeneration(0)


@pytest.mark.parametrize("detected", ["by a call", "by supervision"])
@virtually
async def test_retry_policy_that_fails(detected: str) -> None:
    class Picky:
        def may_retry(self, ticket: Ticket, error: InstanceLostError) -> bool:
            if ticket.request_id == "r0":
                raise KeyError("no rule for this request")
            return True

    backend, scheduler = make_scheduler([2], retries=Picky())
    bad, good = await put(scheduler, make_requests(2))
    if detected == "by a call":
        backend.last("r0").lose()
    else:
        scheduler.set_health("i0", Health.DEAD)
    await settle()
    assert scheduler.instances["i0"].health is Health.DEAD
    assert states([bad, good]) == [S.FAILED, S.QUEUED]
    assert isinstance(bad.future.exception(timeout=0), KeyError)
    scheduler.add("i1", 1)
    await settle()
    backend.open("i1")[0].end()
    await settle()
    assert good.state is S.DONE
    assert_empty(scheduler)


@virtually
async def test_retry_does_not_count_recalls() -> None:
    """Each weight update recalls a long request."""
    backend, scheduler = make_scheduler([1, 1], retries=RetryGeneration(2))
    (ticket,) = await put(scheduler, [make_request("r", max_new_tokens=9)])
    for token in range(5):
        scheduler.suspend()
        recalled = await waits(scheduler.take_back())
        backend.last("r").give_back([token], version=token)
        await recalled
        scheduler.resume()
        await settle()
    await backend.lose("r")
    await backend.end("r", [5], version=5)
    assert ticket.state is S.DONE
    assert ticket.future.result(0).token_ids == [0, 1, 2, 3, 4, 5]


@virtually
async def test_loss_excludes_the_instance() -> None:
    """A lost instance has the fewest outstanding tokens, and would attract every request."""
    backend, scheduler = make_scheduler([2, 2], retries=RetryGeneration())
    tickets = await put(scheduler, make_requests(8))
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
async def test_loss_gives_each_request_its_own_error() -> None:
    backend, scheduler = make_scheduler([3])
    unbegun, *begun = await put(scheduler, make_requests(3))
    await backend.lose("r0", may_have_begun=False)
    assert unbegun.state is S.QUEUED
    errors = [ticket.future.exception(timeout=0) for ticket in begun]
    assert errors[0] is not errors[1]
    for error in errors:
        assert isinstance(error, InstanceLostError)
        assert error.may_have_begun
        assert error.reason == "its node was lost"


@virtually
async def test_set_health_dead_passes_the_cause() -> None:
    _, scheduler = make_scheduler([1])
    (ticket,) = await put(scheduler, make_requests(1))
    cause = HelmsmanError("rollout/0 was ended by SIGKILL")
    scheduler.set_health("i0", Health.DEAD, cause)
    assert ticket.future.exception(timeout=0) is cause
    assert scheduler.instances["i0"].error is cause
    scheduler.set_health("i0", Health.RESTARTING)
    assert scheduler.instances["i0"].error is cause
    scheduler.set_health("i0", Health.HEALTHY)
    assert scheduler.instances["i0"].error is None


@virtually
async def test_set_health_dead_with_hanging_calls() -> None:
    backend, scheduler = make_scheduler([3, 3], retries=RetryGeneration())
    (first,) = await put(scheduler, [make_request("running")])
    hanging = backend.last("running")
    others = scheduler.put([make_request(id_) for id_ in ("a", "b", "c")])
    on_i0 = [ticket for ticket in others if ticket.instance is scheduler.instances["i0"]]
    assert on_i0, "no request is admitted on i0 and unsent"
    scheduler.set_health("i0", Health.DEAD, HelmsmanError("it has not answered for 60 s"))
    await settle()
    assert {call.instance_id for call in backend.open() if call is not hanging} == {"i1"}
    again = backend.last("running")
    assert again is not hanging
    hanging.end([66])
    await settle()
    assert first.state is S.RUNNING, "an answer of a dead instance is dropped"
    while backend.open("i1"):
        backend.open("i1")[0].end([1])
        await settle()
    assert set(states([first, *others])) == {S.DONE}
    assert first.future.result().token_ids == [1]
    assert_empty(scheduler)


@pytest.mark.parametrize("late", ["result", "loss", "abort"])
@virtually
async def test_late_answers_of_a_restarted_instance(late: str) -> None:
    """The instance serves again, and runs the same request."""
    backend, scheduler = make_scheduler([1], retries=RetryGeneration())
    (ticket,) = await put(scheduler, [make_request("r")])
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
    await backend.end("r", [1])
    assert ticket.future.result().token_ids == [1]
    assert_empty(scheduler)


@virtually
async def test_set_health_suspect_sends_no_new_requests() -> None:
    backend, scheduler = make_scheduler([2, 1])
    (running,) = await put(scheduler, [make_request("running")])
    scheduler.set_health("i0", Health.SUSPECT)
    await put(scheduler, make_requests(3))
    assert [call.request_id for call in backend.open("i0")] == ["running"]
    await backend.end("running")
    assert running.state is S.DONE
    scheduler.set_health("i0", Health.HEALTHY)
    await settle()
    assert len(backend.open("i0")) == 2
    backend, scheduler = make_scheduler([1, 1])
    (ticket,) = scheduler.put([make_request("r")])
    assert ticket.instance is scheduler.instances["i0"]
    scheduler.set_health("i0", Health.SUSPECT)  # requests are sent in the next turn
    await settle()
    assert [(call.instance_id, call.request_id) for call in backend.calls] == [("i1", "r")]


LOST = InstanceLostError(instance_id="i0", reason="its node was lost", may_have_begun=True)


@pytest.mark.parametrize("answer", [None, LOST])
@virtually
async def test_abort_then_loss_of_the_instance(answer: Exception | None) -> None:
    backend, scheduler = make_scheduler([1, 1], retries=RetryGeneration())
    (ticket,) = await put(scheduler, [make_request("r")])
    backend.abort_error = answer
    assert await scheduler.abort(["r"]) == 1
    await backend.lose("r")
    assert ticket.state is S.ABORTED
    assert backend.sent == ["r"]


@virtually
async def test_drain_of_a_lost_instance() -> None:
    backend, scheduler = make_scheduler([1])
    (ticket,) = await put(scheduler, make_requests(1))
    backend.abort_error = LOST
    drained = await waits(scheduler.drain("i0", migrate=True))
    backend.last("r0").lose()
    await drained
    assert ticket.state is S.FAILED


@pytest.mark.parametrize("operation", ["abort", "drain"])
@virtually
async def test_set_health_dead_ends_abort_and_drain(operation: str) -> None:
    backend, scheduler = make_scheduler([2], retries=RetryGeneration())
    backend.abort_gate.clear()
    tickets = await put(scheduler, make_requests(2))
    task = await waits(
        scheduler.abort() if operation == "abort" else scheduler.drain("i0", migrate=True)
    )
    scheduler.set_health("i0", Health.DEAD)
    await settle()
    assert task.done()
    assert set(states(tickets)) == ({S.ABORTED} if operation == "abort" else {S.QUEUED})


@virtually
async def test_deadline_across_attempts() -> None:
    backend, scheduler = make_scheduler([1, 1], retries=RetryGeneration())
    (ticket,) = scheduler.put([make_request("r")], RequestOptions(deadline_s=30.0))
    await asyncio.sleep(20.0)
    backend.last("r").lose()
    await asyncio.sleep(9.9)
    assert ticket.state is S.RUNNING
    await asyncio.sleep(0.2)
    assert ticket.state is S.FAILED
    assert backend.aborts == [("i1", ["r"])]
