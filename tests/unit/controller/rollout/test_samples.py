"""Tests of samples of one prompt that share one call to an instance."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from helmsman.api.generation import GenerationRequest, SamplingParams
from helmsman.controller._rollout.generate_scheduler import GenerateScheduler
from helmsman.controller._rollout.health import Health
from helmsman.controller._rollout.request import RequestOptions, RequestState, Ticket
from helmsman.controller._rollout.request_api import sample_seed, samples_of
from helmsman.controller._rollout.retries import RetryGeneration
from tests.unit.controller.rollout.backends import (
    HeldBackend,
    assert_empty,
    make_request,
    make_requests,
    make_scheduler,
    settle,
    states,
    virtually,
    waits,
)

S = RequestState


def put_samples(scheduler: GenerateScheduler, name: str, num: int, **options: Any) -> list[Ticket]:
    return scheduler.put(
        samples_of(make_request(name), num), RequestOptions(**options), together=num
    )


# --- ids and seeds --------------------------------------------------------------------------------


def test_samples_of_differ_in_id_and_seed() -> None:
    request = GenerationRequest(
        request_id="r", prompt_ids=[1, 2], sampling=SamplingParams(temperature=0.5, seed=4)
    )
    samples = samples_of(request, 5)
    assert [each.request_id for each in samples] == [f"r#{number}" for number in range(5)]
    assert samples[0].sampling == request.sampling, (
        "the first sample equals the request without samples"
    )
    assert len({each.sampling.seed for each in samples}) == 5
    assert {each.sampling.temperature for each in samples} == {0.5}
    assert [each.sampling for each in samples_of(request, 3)] == [
        each.sampling for each in samples[:3]
    ]
    assert samples_of(request, 1) == [request]
    with pytest.raises(ValueError, match="num_samples is 0; expected 1 or more"):
        samples_of(request, 0)


def test_sample_seed() -> None:
    assert sample_seed(None, 3) is None
    found = {sample_seed(seed, sample) for seed in range(100) for sample in range(1, 50)}
    assert len(found) == 100 * 49
    assert all(seed is not None and 0 <= seed < 2**63 for seed in found)
    assert sample_seed(7, 2) == 3744221170344160256, "seeds are the same in every release"


# --- one call -------------------------------------------------------------------------------------


@virtually
async def test_put_together_is_one_call() -> None:
    backend, scheduler = make_scheduler([4, 4])
    one, two = put_samples(scheduler, "a", 3), put_samples(scheduler, "b", 3)
    await settle()
    assert backend.together == [("i0", ["a#0", "a#1", "a#2"]), ("i1", ["b#0", "b#1", "b#2"])]
    assert scheduler.num_in_flight == 6
    assert scheduler.instances["i0"].num_in_flight == 3
    backend.last("a#0").end([1])
    await backend.give_back("a#1", [2, 3])
    assert states(one) == [S.RUNNING] * 3, "the call ends with its last sample"
    await backend.give_back("a#2")
    assert states(one) == [S.DONE, S.PARTIAL, S.ABORTED]
    assert [ticket.future.result().token_ids for ticket in one] == [[1], [2, 3], []]
    backend.last("b#1").answer.set_exception(ValueError("no such token"))
    await settle()
    assert states(two) == [S.FAILED] * 3
    assert_empty(scheduler)


@virtually
async def test_put_together_waits_for_room_for_all() -> None:
    backend, scheduler = make_scheduler([4, 3], max_in_flight=5)
    singles = scheduler.put(make_requests(4))  # two on each
    samples = put_samples(scheduler, "a", 3)
    await settle()
    assert backend.together == []
    backend.open("i1")[0].end()
    await settle()
    assert backend.together == [], "each instance has room for two"
    backend.open("i0")[0].end()
    await settle()
    assert backend.together == [("i0", ["a#0", "a#1", "a#2"])]
    await backend.end_all()
    assert set(states([*singles, *samples])) == {S.DONE}


@pytest.mark.parametrize("options", [{}, {"max_in_flight": 2}])
@virtually
async def test_put_together_more_samples_than_room(options: dict[str, Any]) -> None:
    backend, scheduler = make_scheduler([2] if not options else [9], **options)
    samples = put_samples(scheduler, "a", 5)
    for _ in range(3):
        await settle()
        assert scheduler.num_in_flight <= 2
        await backend.end_all()
    assert [ids for _, ids in backend.together] == [["a#0", "a#1"], ["a#2", "a#3"]]
    assert backend.sent[-1] == "a#4"
    assert set(states(samples)) == {S.DONE}


@virtually
async def test_put_together_without_withdrawn_samples() -> None:
    """Samples may be withdrawn while they wait and after they are admitted."""
    backend, scheduler = make_scheduler([3])
    scheduler.suspend()
    samples = put_samples(scheduler, "a", 5)
    samples[0].future.cancel()
    await scheduler.abort(["a#2"])
    scheduler.resume()
    (waiting,) = scheduler.put([make_request("waiting")])
    assert states(samples) == [S.ABORTED, S.ADMITTED, S.ABORTED, S.ADMITTED, S.ADMITTED]
    samples[3].future.cancel()
    await settle()
    assert backend.together == [("i0", ["a#1", "a#4"])]
    assert states(samples) == [S.ABORTED, S.RUNNING, S.ABORTED, S.ABORTED, S.RUNNING]
    assert waiting.state is S.RUNNING, "the withdrawn sample freed its slot"


@virtually
async def test_put_together_suspended_in_the_same_turn() -> None:
    backend, scheduler = make_scheduler([8])
    samples = put_samples(scheduler, "a", 8)
    for _ in range(1000):
        scheduler.suspend()
        scheduler.resume()
    await settle()
    assert sys.getrefcount(samples[0]) < 100, "repeated admissions keep no references"
    assert backend.together == [("i0", [ticket.request_id for ticket in samples])]


@virtually
async def test_put_together_too_few_results() -> None:
    class Short(HeldBackend):
        async def generate_samples(self, instance_id: str, requests: Any) -> Any:
            return (await super().generate_samples(instance_id, requests))[1:]

    backend, scheduler = make_scheduler([3], Short())
    samples = put_samples(scheduler, "a", 3)
    await settle()
    await backend.end_all()
    assert states(samples) == [S.FAILED] * 3
    assert "expected 3 GenerationResult" in str(samples[0].future.exception(timeout=0))


# --- losses, migration, deadlines -----------------------------------------------------------------


@virtually
async def test_put_together_after_a_loss() -> None:
    backend, scheduler = make_scheduler([3, 3], retries=RetryGeneration())
    samples = put_samples(scheduler, "a", 3)
    await settle()
    scheduler.set_health("i0", Health.DEAD)
    await settle()
    assert backend.together == [("i0", ["a#0", "a#1", "a#2"]), ("i1", ["a#0", "a#1", "a#2"])]
    for call in backend.calls[:3]:
        call.end([9])  # a late result is dropped
    await backend.end_all("i1", tokens=[1])
    assert [ticket.future.result(0).token_ids for ticket in samples] == [[1]] * 3
    assert_empty(scheduler)


@virtually
async def test_put_together_migrated() -> None:
    backend, scheduler = make_scheduler([5])
    samples = put_samples(scheduler, "a", 5)
    await settle()
    scheduler.add("i1", 5)
    drained = await waits(scheduler.drain("i0", migrate=True))
    backend.last("a#0").end([1, 2], version=1)
    backend.last("a#1").give_back([3], version=1)
    for name in ("a#2", "a#3", "a#4"):
        backend.last(name).give_back()
    await drained
    await settle()
    assert states(samples) == [S.DONE, *[S.RUNNING] * 4]
    assert backend.together[1:] == [("i1", ["a#2", "a#3", "a#4"])], (
        "a sample with tokens has a prompt of its own"
    )
    assert backend.last("a#1").request.prompt_ids == [1, 2, 3, 3]
    await backend.end_all("i1", tokens=[8], version=2)
    assert [ticket.future.result(0).token_ids for ticket in samples] == [
        [1, 2],
        [3, 8],
        [8],
        [8],
        [8],
    ]
    assert samples[1].future.result(0).versions == [1, 2]
    assert_empty(scheduler)


@virtually
async def test_put_together_deadline() -> None:
    backend, scheduler = make_scheduler([3])
    samples = put_samples(scheduler, "a", 3, deadline_s=5.0)
    (other,) = scheduler.put([make_request("other")])
    await asyncio.sleep(5.1)
    assert states(samples) == [S.FAILED] * 3
    assert sorted(id_ for _, ids in backend.aborts for id_ in ids) == ["a#0", "a#1", "a#2"]
    assert other.state is S.RUNNING, "the deadline freed the slots"
    for call in backend.calls[:3]:
        call.end()
    await settle()
    assert states(samples) == [S.FAILED] * 3
    assert scheduler.num_in_flight == 1
