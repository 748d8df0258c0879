"""Empty calls: latency, fan-out to several workers, and throughput of many in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from benchmarks.echo import EchoProcess
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
        scheduler, actor = world.workers(backend), world.actors[0]

        async def ours() -> None:
            for _ in range(ASYNC_CALLS):
                await scheduler.async_call_engine("w/0", "ping", ENGINE)

        async def bare() -> None:
            for _ in range(ASYNC_CALLS):
                await actor.ping.remote()

        return Pair(
            ours=lambda: world.run(ours()),
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
        scheduler = world.workers(backend)
        calls = {f"w/{index}": Call() for index in range(num_workers)}
        return _beside_bare(
            world,
            num_workers,
            lambda: run_sync(
                call_all(scheduler, "w", "ping", calls, engine_name=ENGINE, timeout=60)
            ),
        )

    @case(
        f"calls.{backend}.gathered_{num_workers}",
        unit="us",
        goal=goal,
        floor="ray.get of a bare call to each",
    )
    def gathered(world: World) -> Pair:
        """Call workers by asyncio.gather on the script's own loop."""
        return _beside_bare(world, num_workers, _gathered(world, backend, num_workers, num_workers))


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


@case(
    "calls.local.socket",
    unit="us",
    floor="a round trip of the same messages over a bare Unix socket",
)
def local_socket(world: World) -> Pair:
    """Compare a local call with a bare round trip of the same frames over a socket."""
    scheduler = world.workers("local")
    echo = world.until_case_ends.enter_context(EchoProcess())
    connection = world.until_case_ends.enter_context(echo.connect())
    return Pair(
        ours=lambda: scheduler.call_engine("w/0", "ping", ENGINE),
        floor=connection.round_trip,
        rounds=15,
        repeats=60,
        warm_up=50,
    )
