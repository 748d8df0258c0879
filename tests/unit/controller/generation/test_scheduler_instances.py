"""Tests of GenerateScheduler: adding, removing and draining instances."""

from __future__ import annotations

import asyncio

import pytest

from helmsman.controller._generation.health import Health
from helmsman.controller._generation.request import RequestState
from helmsman.controller._generation.retries import RetryGeneration
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
