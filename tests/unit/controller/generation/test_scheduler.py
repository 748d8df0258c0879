"""Tests of GenerateScheduler: outcomes, order, bounds and suspension."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from helmsman.api.errors import HelmsmanError
from helmsman.controller._generation.health import Health
from helmsman.controller._generation.request import Instance, RequestOptions, RequestState, Ticket
from tests.unit.controller.generation.backends import (
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
