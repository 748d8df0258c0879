"""Tests of GenerateScheduler: instances that come, leave, die or give requests back."""

from __future__ import annotations

import asyncio

import pytest

from helmsman.api.errors import HelmsmanError, InstanceLostError
from helmsman.api.generation import GenerationRequest, SamplingParams
from helmsman.controller._rollout.generate_scheduler import GenerateScheduler
from helmsman.controller._rollout.health import Health
from helmsman.controller._rollout.request import RequestOptions, RequestState, Ticket
from helmsman.controller._rollout.retries import RetryGeneration, RetryPolicy, RetryUnbegun
from tests.unit.controller.rollout.backends import (
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


# --- add and remove -------------------------------------------------------------------------------


@virtually
async def test_add_takes_waiting_requests() -> None:
    backend, scheduler = make_scheduler([1])
    await put(scheduler, make_requests(4))
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
async def test_add_refuses_invalid_instances() -> None:
    _, scheduler = make_scheduler([1])
    with pytest.raises(ValueError, match="'i0' is registered already"):
        scheduler.add("i0", 1)
    with pytest.raises(ValueError, match="capacity is 0"):
        scheduler.add("i1", 0)
    assert list(scheduler.instances) == ["i0"]


@virtually
async def test_remove_refuses_an_instance_with_requests() -> None:
    backend, scheduler = make_scheduler([2, 2])
    tickets = scheduler.put(make_requests(3))
    with pytest.raises(ValueError, match="'i0' still has 2 requests; drain it first"):
        scheduler.remove("i0")
    await settle()
    await backend.end_all("i0")
    scheduler.remove("i0")
    assert list(scheduler.instances) == ["i1"]
    backend.open("i1")[0].end()
    await settle()
    assert set(states(tickets)) == {S.DONE}
    assert_empty(scheduler)


# --- drain ----------------------------------------------------------------------------------------


@virtually
async def test_drain_moves_unsent_requests() -> None:
    backend, scheduler = make_scheduler([2, 1])
    (running,) = await put(scheduler, [make_request("running")])
    # the drain starts before admitted requests are sent
    drained = asyncio.ensure_future(scheduler.drain("i0"))
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
    await backend.end("admitted")
    assert (running.state, admitted.state) == (S.DONE, S.DONE)
    await put(scheduler, make_requests(5))
    assert backend.open("i0") == []
    scheduler.remove("i0")
    assert backend.aborts == []


@virtually
async def test_drain_migrate_keeps_tokens() -> None:
    backend, scheduler = make_scheduler([3])
    request = make_request("r", prompt=[1, 2], max_new_tokens=6)
    ticket, full, untouched = await put(
        scheduler, [request, make_request("full", max_new_tokens=2), make_request("untouched")]
    )
    scheduler.add("i1", 3)
    drained = await waits(scheduler.drain("i0", migrate=True))
    assert [(id_, sorted(ids)) for id_, ids in backend.aborts] == [
        ("i0", ["full", "r", "untouched"])
    ]
    backend.last("r").give_back([10, 11], version=3)
    backend.last("full").give_back([20, 21], version=3)
    backend.last("untouched").give_back()
    await drained
    assert full.state is S.DONE, "it has max_new_tokens tokens"
    assert full.future.result().stop_reason == "length"
    await settle()
    again = backend.last("r")
    assert again.instance_id == "i1"
    assert again.request.prompt_ids == [1, 2, 10, 11]
    assert again.request.sampling.max_new_tokens == 4
    assert backend.last("untouched").request is untouched.request
    again.end([12], version=4)
    await backend.end("untouched")
    assert states([ticket, untouched]) == [S.DONE, S.DONE]
    result = ticket.future.result()
    assert (result.token_ids, result.versions, result.stop_reason) == (
        [10, 11, 12],
        [3, 3, 4],
        "stop",
    )
    assert result.logprobs == [-0.10, -0.11, -0.12]
    scheduler.remove("i0")
    assert_empty(scheduler)


@virtually
async def test_drain_migrate_needs_new_enough_weights() -> None:
    backend, scheduler = make_scheduler([1, 1, 1])
    moves, *_ = await put(scheduler, make_requests(3))
    scheduler.expect_weights(5)
    scheduler.have_weights("i0", 5)
    leaving = await waits(scheduler.drain("i0", migrate=True))
    backend.last("r0").give_back([7, 8], version=5)
    await leaving
    scheduler.put([make_request("r3"), make_request("r4")])
    await backend.end("r1", version=4)
    assert [call.request_id for call in backend.open("i1")] == ["r3"], (
        "r0 needs weights that i1 does not have"
    )
    assert moves.state is S.QUEUED
    scheduler.have_weights("i2", 5)
    await backend.end("r2", version=5)
    assert [call.request_id for call in backend.open("i2")] == ["r0"], (
        "r0 keeps its place in the queue"
    )
    backend.last("r0").end([9], version=5)
    await backend.end("r3", version=4)
    await backend.end("r4", version=4)
    assert moves.future.result().versions == [5, 5, 5]
    assert_empty(scheduler)


@virtually
async def test_drain_migrate_from_newer_weights_than_expected() -> None:
    backend, scheduler = make_scheduler([1, 1])
    (moves,) = await put(scheduler, make_requests(1))
    leaving = await waits(scheduler.drain("i0", migrate=True))
    scheduler.expect_weights(3)
    backend.last("r0").give_back([7], version=9)
    await leaving
    assert moves.state is S.QUEUED
    scheduler.have_weights("i1", 3)
    await settle()
    assert [call.request_id for call in backend.open("i1")] == ["r0"]


@virtually
async def test_abort_during_migration_keeps_tokens() -> None:
    backend, scheduler = make_scheduler([2])
    before, after = await put(scheduler, [make_request("before"), make_request("after")])
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
@virtually
async def test_drain_cancelled(migrate: bool) -> None:
    backend, scheduler = make_scheduler([2])
    tickets = await put(scheduler, make_requests(4))
    drained = await waits(scheduler.drain("i0", migrate=migrate))
    await backend.end("r0")
    assert backend.sent == ["r0", "r1"]
    drained.cancel()
    await settle()
    assert drained.cancelled()
    assert backend.sent == ["r0", "r1", "r2"]
    if migrate:
        await backend.give_back("r1", [5], version=1)
        assert backend.last("r1").request.prompt_ids == [1, 2, 3, 5]
    while backend.open():
        backend.open()[0].end(version=2)
        await settle()
    assert set(states(tickets)) == {S.DONE}
    assert tickets[1].future.result().versions == ([1, 2] if migrate else [2])
    assert_empty(scheduler)


@virtually
async def test_drain_cancelled_or_refused_during_its_abort() -> None:
    backend, scheduler = make_scheduler([2])
    tickets = await put(scheduler, make_requests(2))
    backend.abort_gate.clear()
    drained = await waits(scheduler.drain("i0", migrate=True))
    drained.cancel()
    await settle()
    assert scheduler.instances["i0"].is_serving
    backend.abort_gate.set()
    backend.abort_error = RuntimeError("abort is not known here")
    with pytest.raises(RuntimeError, match="not known here"):
        await scheduler.drain("i0", migrate=True)
    assert scheduler.instances["i0"].is_serving
    await backend.end_all()
    assert set(states(tickets)) == {S.DONE}


@pytest.mark.parametrize("migrate", [False, True])
@virtually
async def test_drain_ends_with_the_instances_death(migrate: bool) -> None:
    backend, scheduler = make_scheduler([2], retries=RetryGeneration())
    tickets = await put(scheduler, make_requests(2))
    drained = await waits(scheduler.drain("i0", migrate=migrate))
    scheduler.set_health("i0", Health.DEAD)
    await drained
    scheduler.remove("i0")
    scheduler.add("i1", 2)
    await settle()
    await backend.end_all("i1")
    assert set(states(tickets)) == {S.DONE}


# --- losses ---------------------------------------------------------------------------------------


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
