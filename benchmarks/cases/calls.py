"""Empty calls: latency, fan-out to several workers, and throughput of many in flight."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from benchmarks.bare import EMPTY, BarePeers
from benchmarks.engines import value_of
from benchmarks.harness import RATE, Pair, case
from benchmarks.world import ENGINE, World
from helmsman._base.event_loop import run_sync
from helmsman.api.scheduler import Call
from helmsman.controller._groups.call_all import call_all

IN_FLIGHT = 1000
"""Calls of one run of a throughput case, all begun before the first is awaited."""
ASYNC_CALLS = 20
"""Calls of one run of an async case, one after another."""

LATENCY_GOALS = {"ray": "<= 0.25", "local": "<= 0.15"}
EACH_OF_16_GOALS = {"ray": "<= 0.25", "local": ""}
THROUGHPUT_GOALS = {"ray": ">= 1", "local": ">= 1"}


def _latency(backend: str) -> None:
    @case(
        f"calls.{backend}.sync",
        unit="us",
        goal=LATENCY_GOALS[backend],
        floor="ray.get(actor.ping.remote())",
    )
    def sync(world: World) -> Pair:
        import ray

        scheduler, actor = world.workers(backend), world.actors[0]
        return Pair(
            ours=lambda: scheduler.call_engine("w/0", "ping", ENGINE),
            floor=lambda: ray.get(actor.ping.remote()),
            rounds=15,
            repeats=60,
            warm_up=50,
        )

    @case(
        f"calls.{backend}.async",
        unit="us",
        goal=LATENCY_GOALS[backend],
        floor="await actor.ping.remote()",
    )
    def awaited(world: World) -> Pair:
        ours, actor = _one_by_one(world, backend), world.actors[0]

        async def bare() -> None:
            for _ in range(ASYNC_CALLS):
                await actor.ping.remote()

        return Pair(
            ours=ours,
            floor=lambda: world.run(bare()),
            rounds=15,
            repeats=4,
            per_run=ASYNC_CALLS,
            warm_up=3,
        )


def _each(backend: str, num_workers: int) -> None:
    goal = EACH_OF_16_GOALS[backend] if num_workers == 16 else ""

    @case(
        f"calls.{backend}.each_of_{num_workers}",
        unit="us",
        goal=goal,
        floor="ray.get of a bare call to each",
    )
    def each(world: World) -> Pair:
        """Call workers as controllers and worker groups do."""
        return _beside_bare(world, num_workers, _to_each(world, backend, num_workers))

    @case(
        f"calls.{backend}.gathered_{num_workers}",
        unit="us",
        goal=goal,
        floor="ray.get of a bare call to each",
    )
    def gathered(world: World) -> Pair:
        """Call workers by asyncio.gather on the script's own loop."""
        return _beside_bare(world, num_workers, _gathered(world, backend, num_workers, num_workers))


def _one_by_one(world: World, backend: str) -> Callable[[], Any]:
    """Await calls one after another."""
    scheduler = world.workers(backend)

    async def calls() -> None:
        for _ in range(ASYNC_CALLS):
            await scheduler.async_call_engine("w/0", "ping", ENGINE)

    return lambda: world.run(calls())


def _to_each(world: World, backend: str, num_workers: int) -> Callable[[], Any]:
    """Call workers as controllers and worker groups do."""
    scheduler = world.workers(backend)
    calls = {f"w/{index}": Call() for index in range(num_workers)}
    return lambda: run_sync(call_all(scheduler, "w", "ping", calls, engine_name=ENGINE, timeout=60))


def _beside_bare(world: World, num_workers: int, ours: Callable[[], Any]) -> Pair:
    import ray

    actors = world.actors[:num_workers]
    return Pair(
        ours=ours,
        floor=lambda: ray.get([actor.ping.remote() for actor in actors]),
        rounds=12,
        repeats=15,
        warm_up=10,
    )


def _pipelined(backend: str, num_workers: int) -> None:
    @case(
        f"calls.{backend}.pipelined_{num_workers}",
        unit=RATE,
        goal=THROUGHPUT_GOALS[backend],
        floor=f"ray.get of {IN_FLIGHT} bare calls",
    )
    def pipelined(world: World) -> Pair:
        import ray

        actors = world.actors[:num_workers]
        return Pair(
            ours=_gathered(world, backend, num_workers, IN_FLIGHT),
            floor=lambda: ray.get(
                [actors[index % num_workers].ping.remote() for index in range(IN_FLIGHT)]
            ),
            rounds=6,
            per_run=IN_FLIGHT,
        )


def _gathered(world: World, backend: str, num_workers: int, num_calls: int) -> Callable[[], Any]:
    """Make this many calls to this many workers, all in flight at once."""
    scheduler = world.workers(backend)

    async def all_of_them() -> None:
        calls = (
            scheduler.async_call_engine(f"w/{index % num_workers}", "ping", ENGINE)
            for index in range(num_calls)
        )
        await asyncio.gather(*calls)

    return lambda: world.run(all_of_them())


for _backend in ("ray", "local"):
    _latency(_backend)
    for _num_workers in (4, 16):
        _each(_backend, _num_workers)
    for _num_workers in (1, 4, 16):
        _pipelined(_backend, _num_workers)


def _beside_sockets(backend: str) -> None:
    """Compare calls with as many bytes over bare Unix sockets, to a process for each worker."""

    def declare(figure: str, goal: str) -> Callable[[Callable[[World], Pair]], object]:
        name, floor = f"calls.{backend}.socket.{figure}", "the same bytes over bare Unix sockets"
        return case(name, unit="us", goal=goal, floor=floor)

    @declare("sync", "<= 5")
    def sync(world: World) -> Pair:
        scheduler = world.workers(backend)
        return _beside_peers(world, lambda: scheduler.call_engine("w/0", "ping", ENGINE))

    @declare("async", "<= 8")
    def awaited(world: World) -> Pair:
        return _beside_peers(world, _one_by_one(world, backend), num_calls=ASYNC_CALLS)

    @declare("each_of_16", "<= 8")
    def each(world: World) -> Pair:
        return _beside_peers(world, _to_each(world, backend, 16), num_peers=16)

    @declare("1MB", "<= 2.5")
    def argument(world: World) -> Pair:
        scheduler, value = world.workers(backend), value_of("numpy", 1 << 20)
        ours = functools.partial(scheduler.call_engine, "w/0", "take", ENGINE, value)
        return _beside_peers(world, ours, bytes(1 << 20))


def _beside_peers(
    world: World,
    ours: Callable[[], Any],
    data: bytes = EMPTY,
    *,
    num_peers: int = 1,
    num_calls: int = 1,
) -> Pair:
    peers = world.until_case_ends.enter_context(BarePeers(num_peers))

    def bare() -> None:
        for _ in range(num_calls):
            peers.round_trips(data)

    repeats = max(4, 60 // (num_calls * num_peers))
    return Pair(
        ours=ours, floor=bare, rounds=15, repeats=repeats, per_run=num_calls, warm_up=repeats
    )


for _backend in ("ray", "local"):
    _beside_sockets(_backend)
