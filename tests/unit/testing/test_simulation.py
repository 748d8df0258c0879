"""Test that simulated instances take the computed time, and that routing comes near its bound."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket

import msgspec
import pytest

from helmsman.api.errors import InstanceLostError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.controller._rollout.generate_scheduler import GenerateScheduler
from helmsman.controller._rollout.routing import (
    LeastOutstandingTokens,
    PrefixAffinity,
    RoundRobin,
    RoutingPolicy,
)
from helmsman.testing import (
    EngineModel,
    Lengths,
    SimulatedBackend,
    SimulatedInstance,
    log_normal_lengths,
    run_virtually,
)
from tests.unit.controller.rollout.backends import make_request, settle, virtually, waits

MODEL = EngineModel(step_s=0.02, per_request_s=0.01, prefill_s=0.001)
"""A step takes 0.03 s alone, 0.04 s for two, 0.05 s for three."""


def now() -> float:
    return asyncio.get_running_loop().time()


def by_id(request: GenerationRequest) -> int:
    """Return the number at the end of a request's id as its length, such as 100 of r-100."""
    return int(request.request_id.rpartition("-")[2])


def make_instance(
    model: EngineModel = MODEL, lengths: Lengths = by_id, version: int = 0
) -> SimulatedInstance:
    return SimulatedInstance("i0", model, lengths, version)


def sized(request_id: str, num_prompt: int = 0, max_new_tokens: int = 10_000) -> GenerationRequest:
    return make_request(request_id, prompt=[1] * num_prompt, max_new_tokens=max_new_tokens)


async def timed(
    instance: SimulatedInstance, request: GenerationRequest
) -> tuple[GenerationResult, float]:
    result = await instance.generate(request)
    return result, now()


# --- time -----------------------------------------------------------------------------------------

STRAGGLER = msgspec.structs.replace(MODEL, slowdown=3.0)


@pytest.mark.parametrize(
    ("model", "limit", "takes_s", "num_tokens", "stop_reason"),
    [
        (MODEL, 10_000, 50 * 0.001 + 100 * 0.03, 100, "stop"),
        (STRAGGLER, 10_000, 3.0 * (50 * 0.001 + 100 * 0.03), 100, "stop"),
        (MODEL, 40, 50 * 0.001 + 40 * 0.03, 40, "length"),
    ],
)
def test_instance_time_of_prompt_and_steps(
    model: EngineModel, limit: int, takes_s: float, num_tokens: int, stop_reason: str
) -> None:
    async def main() -> tuple[GenerationResult, float]:
        return await timed(
            make_instance(model), sized("r-100", num_prompt=50, max_new_tokens=limit)
        )

    result, at = run_virtually(main())
    assert at == pytest.approx(takes_s)
    assert (len(result.token_ids), result.stop_reason) == (num_tokens, stop_reason)


@virtually
async def test_instance_slower_with_larger_batch() -> None:
    instance = make_instance()
    others = [asyncio.create_task(timed(instance, sized(id_))) for id_ in ("a-10", "b-20", "c-40")]
    cancelled = await waits(instance.generate(sized("d-100")))
    await asyncio.sleep(5 * 0.06 - 1e-6)
    cancelled.cancel()
    first = 5 * 0.06 + 5 * 0.05
    second = first + 10 * 0.04
    await asyncio.sleep(second + 10 * 0.03 - now())
    joins = asyncio.create_task(timed(instance, sized("e-5")))
    third = second + 10 * 0.03 + 5 * 0.04 + 5 * 0.03
    ended = await asyncio.gather(*others)
    assert [at for _, at in ended] == pytest.approx([first, second, third], abs=1e-4)
    assert (await joins)[1] == pytest.approx(second + 10 * 0.03 + 5 * 0.04, abs=1e-4)


@virtually
async def test_instance_prefix_cache() -> None:
    instance = make_instance(
        EngineModel(step_s=0.02, per_request_s=0.01, prefill_s=0.001, cached_tokens=256)
    )
    shared = [5] * 128

    async def prefill_s(request_id: str, prompt: list[int]) -> float:
        start = now()
        await instance.generate(make_request(request_id, prompt=prompt))
        return now() - start - 0.03

    assert await prefill_s("a-1", [*shared, *[1] * 32]) == pytest.approx(0.160)
    assert await prefill_s("b-1", [*shared, *[2] * 32]) == pytest.approx(0.032)
    assert await prefill_s("c-1", [*[9] * 64, *shared]) == pytest.approx(0.192), (
        "the blocks follow other blocks"
    )
    assert (instance.num_cached_tokens, instance.num_prompt_tokens) == (128, 512)
    assert await prefill_s("d-1", [7] * 256) == pytest.approx(0.256)
    assert await prefill_s("e-1", shared) == pytest.approx(0.128), "it was evicted"


@virtually
async def test_instance_counts_tokens() -> None:
    instance = make_instance(EngineModel(), log_normal_lengths(0, 50.0, 1.0))
    results = await asyncio.gather(
        *(instance.generate(make_request(f"r{n}", max_new_tokens=500)) for n in range(1000))
    )
    assert instance.num_new_tokens == sum(len(result.token_ids) for result in results)
    start = now()
    await instance.generate(make_request("one", prompt=[], max_new_tokens=1))
    assert now() - start == pytest.approx(0.02005), "the batch is empty again"


# --- early ends -----------------------------------------------------------------------------------


@virtually
async def test_instance_abort_keeps_tokens() -> None:
    instance = make_instance()
    aborted = asyncio.create_task(timed(instance, sized("a-100")))
    other = asyncio.create_task(timed(instance, sized("b-100")))
    await asyncio.sleep(25.5 * 0.04)
    instance.abort(["a-100", "unknown"])
    # The id can be used again at once.
    again = asyncio.create_task(instance.generate(sized("a-100")))
    result, at = await aborted
    assert at == pytest.approx(25.5 * 0.04)
    assert (len(result.token_ids), result.stop_reason) == (25, "abort")
    await asyncio.sleep(10.5 * 0.04)
    instance.abort(["a-100"])
    assert len((await again).token_ids) == 10
    assert (await other)[1] == pytest.approx(36 * 0.04 + 64 * 0.03)


@virtually
async def test_instance_abort_and_death_in_prefill() -> None:
    instance = make_instance()
    aborted, lost = [
        asyncio.create_task(timed(instance, sized(id_, num_prompt=1000))) for id_ in ("a-5", "b-5")
    ]
    await asyncio.sleep(0.1)
    instance.abort(["a-5"])
    result, at = await aborted
    assert (result.token_ids, result.stop_reason) == ([], "abort")
    assert at == pytest.approx(0.1)
    await asyncio.sleep(0.1)
    instance.kill("its node was lost")
    with pytest.raises(InstanceLostError, match="its node was lost") as caught:
        await lost
    assert caught.value.may_have_begun
    assert now() == pytest.approx(0.2)
    with pytest.raises(InstanceLostError) as after:
        await instance.generate(sized("c-5"))
    assert not after.value.may_have_begun


# --- versions -------------------------------------------------------------------------------------


@virtually
async def test_instance_versions_of_tokens() -> None:
    instance = make_instance(version=3)
    task = asyncio.create_task(instance.generate(sized("r-100")))
    await asyncio.sleep(20.5 * 0.03)
    instance.version = 4
    await asyncio.sleep(30 * 0.03)
    instance.version = 5
    instance.version = 7
    assert (await task).versions == [3] * 20 + [4] * 30 + [7] * 50
    task = asyncio.create_task(instance.generate(sized("s-100")))
    await asyncio.sleep(10.5 * 0.03)
    instance.version = 8
    await asyncio.sleep(2 * 0.03)
    instance.abort(["s-100"])
    assert (await task).versions == [7] * 10 + [8] * 2


# --- lengths and the clock ------------------------------------------------------------------------


def test_log_normal_lengths_mean() -> None:
    requests = [make_request(f"r{number}") for number in range(5000)]
    lengths = log_normal_lengths(1, mean=500.0, sigma=1.0)
    drawn = [lengths(request) for request in requests]
    assert drawn == [lengths(request) for request in requests]
    assert drawn != [log_normal_lengths(2, 500.0, 1.0)(request) for request in requests]
    assert sum(drawn) / len(drawn) == pytest.approx(500.0, rel=0.05)
    assert min(drawn) >= 1


def test_virtual_loop_timers_keep_order() -> None:
    seen: list[tuple[str, float]] = []

    async def wait(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, now()))

    async def main() -> None:
        await asyncio.gather(wait("years", 1e8), wait("day", 86_400.0), wait("tick", 1e-3))
        for _ in range(30):  # a timer that is due at once runs at once, at any virtual time
            await asyncio.sleep(1e7)
            done = asyncio.Event()
            asyncio.get_running_loop().call_later(0.0, done.set)
            await done.wait()

    run_virtually(main())
    assert [name for name, _ in seen] == ["tick", "day", "years"]
    assert [at for _, at in seen] == pytest.approx([1e-3, 86_400.0, 1e8])


def test_virtual_loop_waits_for_sockets() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            loop = asyncio.get_running_loop()
            seen: asyncio.Future[float] = loop.create_future()
            loop.add_reader(ours, lambda: seen.done() or seen.set_result(loop.time()))  # type: ignore[func-returns-value]
            theirs.send(b"x")
            assert await asyncio.wait_for(seen, 1000.0) < 1.0
            loop.remove_reader(ours)

    run_virtually(main())


# --- policies -------------------------------------------------------------------------------------


LENGTHS = log_normal_lengths(seed=7, mean=1000.0, sigma=1.0)
PLACES = 64


async def makespan(
    policy: RoutingPolicy, requests: list[GenerationRequest], model: EngineModel, num: int
) -> tuple[float, float]:
    """Return the seconds that a batch takes on instances of 64 places, and its share of cached
    prompt tokens.
    """
    instances = {f"i{k:02}": SimulatedInstance(f"i{k:02}", model, LENGTHS) for k in range(num)}
    scheduler = GenerateScheduler(SimulatedBackend(instances), policy=policy)
    for id_ in instances:
        scheduler.add(id_, PLACES)
    start = now()
    async for ticket in scheduler.stream(scheduler.put(requests)):
        assert ticket.future.exception() is None
    cached = sum(each.num_cached_tokens for each in instances.values())
    return now() - start, cached / sum(each.num_prompt_tokens for each in instances.values())


def test_routing_long_tail_near_bound() -> None:
    """The default policy takes at most 5 % longer than the lower bound of all policies."""
    model, limit, num = EngineModel(), 16_384, 16
    requests = [
        make_request(f"r{n}", prompt=[1] * 64, max_new_tokens=limit) for n in range(num * PLACES)
    ]
    lengths = [min(LENGTHS(request), limit) for request in requests]
    bound_s = max(sum(lengths) / (num * PLACES * model.rate(PLACES)), max(lengths) / model.rate(1))
    default_s, _ = run_virtually(makespan(LeastOutstandingTokens(), requests, model, num))
    in_turn_s, _ = run_virtually(makespan(RoundRobin(), requests, model, num))
    assert bound_s <= default_s <= 1.05 * bound_s
    assert default_s <= in_turn_s * 1.01


def test_routing_by_prefix_hits_caches() -> None:
    """Each cache holds a quarter of the prompts, of which each has 8 samples in random order."""
    model, num = EngineModel(prefill_s=0.0002, cached_tokens=8 * 2048), 4
    cases = itertools.product(range(8), range(31))
    requests = [
        make_request(f"{n}-{group}", prompt=[group] * 2048, max_new_tokens=256)
        for n, group in cases
    ]
    random.Random(3).shuffle(requests)
    affine_s, affine = run_virtually(makespan(PrefixAffinity(), requests, model, num))
    least_s, least = run_virtually(makespan(LeastOutstandingTokens(), requests, model, num))
    assert affine > 2 * least
    assert affine_s <= 1.01 * least_s


@virtually
async def test_routing_of_migrated_request() -> None:
    instances = {
        id_: SimulatedInstance(id_, MODEL, by_id, version)
        for version, id_ in enumerate(("i0", "i1"))
    }
    scheduler = GenerateScheduler(SimulatedBackend(instances))
    scheduler.add("i0", 4)
    (ticket,) = scheduler.put([sized("r-100")])
    await asyncio.sleep(40.5 * 0.03)
    scheduler.add("i1", 4)
    await scheduler.drain("i0", migrate=True)
    scheduler.remove("i0")
    await scheduler.wait_idle()
    await settle()
    assert ticket.future.result().versions == [0] * 40 + [1] * 60
    assert now() == pytest.approx(100.5 * 0.03 + 40 * 0.001, abs=1e-5), (
        "the 40 tokens are part of the prompt there"
    )
