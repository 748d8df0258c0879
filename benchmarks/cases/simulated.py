"""CPU and memory of the controller for calls to a thousand workers that answer at once, and for
their health.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from benchmarks.cases.groups import Member
from benchmarks.echo import EchoProcess
from benchmarks.harness import Pair, case
from benchmarks.simulated import SimulatedBackend
from benchmarks.world import World
from helmsman import Cluster, ClusterConfig, ResourceManager
from helmsman._base.event_loop import run_sync
from helmsman._wire.codec import Payload, encode
from helmsman._wire.messages import Reply, Request, Verb
from helmsman._wire.wire import Outgoing
from helmsman.controller._scheduler.backend_scheduler import BackendScheduler

NUM_WORKERS = 1000
POLLS_PER_S = 1.0


def _fleet(world: World) -> tuple[BackendScheduler, SimulatedBackend, Cluster[Member], EchoProcess]:
    keep = world.until_case_ends.enter_context
    echo = keep(EchoProcess())
    backend = SimulatedBackend(echo)
    scheduler = keep(BackendScheduler(backend))
    manager = keep(ResourceManager(0, scheduler=scheduler))
    cluster = keep(
        Cluster("fleet", Member, manager, ClusterConfig(world_size=NUM_WORKERS, num_cpus=0.1))
    )  # type: ignore[var-annotated]
    return scheduler, backend, cluster, echo


def _cpu_s(work: Callable[[], Any]) -> Callable[[], float]:
    """Return a function that measures the CPU seconds of all threads during a run of the work."""

    def taken() -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    return taken


class _All:
    """Counts replies."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def replied(self, reply: Reply, payload: Payload) -> None:
        """Count a reply."""
        self._number -= 1
        if not self._number:
            self.done.set_result(None)

    def failed(self, error: Exception) -> None:
        """Fail the case; the calls are not expected to fail."""
        self.done.set_exception(error)


@case(
    "simulated.group_call",
    unit="ms",
    goal="<= 1.2",
    floor="CPU of a bare loop of sends and receives over the same transports",
)
def group_call(world: World) -> Pair:
    """Measure one call to each of a thousand ranks."""
    _, backend, cluster, _ = _fleet(world)
    ids = itertools.count(1 << 40)  # distinct from the ids of the clients
    payload = encode(((None,), {}))

    async def bare() -> None:
        bare_awaited = _All(len(backend.transports))
        for transport in backend.transports:
            transport.post(
                Outgoing(Request(next(ids), Verb.CALL, "fleet", "take"), payload), bare_awaited
            )
        await bare_awaited.done

    return Pair(
        ours=_cpu_s(lambda: cluster.method(Member.take)(None)),
        floor=_cpu_s(lambda: run_sync(bare())),
        rounds=12,
        repeats=3,
        returns_figure=True,
        warm_up=3,
    )


@case(
    "simulated.sockets",
    unit="ms",
    floor="CPU of a bare loop over bare sockets, without an event loop",
)
def group_call_beside_sockets(world: World) -> Pair:
    """Compare the same calls with bare round trips of the frames over sockets."""
    _, _, cluster, echo = _fleet(world)
    connections = [world.until_case_ends.enter_context(echo.connect()) for _ in range(NUM_WORKERS)]

    def bare() -> None:
        for connection in connections:
            connection.send()
        for connection in connections:
            connection.receive()

    return Pair(
        ours=_cpu_s(lambda: cluster.method(Member.take)(None)),
        floor=_cpu_s(bare),
        rounds=8,
        repeats=3,
        returns_figure=True,
        warm_up=2,
    )


@case(
    "simulated.memory",
    unit="KB",
    goal="<= 1",
    floor="the limit of 20 KB for each worker in the controller",
)
def memory(world: World) -> Pair:
    """Measure Python's memory in the controller for each worker of a group that was called once."""

    def per_worker() -> float:
        gc.collect()
        tracemalloc.start()
        try:
            _, _, cluster, _ = _fleet(world)
            cluster.method(Member.take)(None)
            gc.collect()
            return tracemalloc.get_traced_memory()[0] / 1024 / NUM_WORKERS
        finally:
            tracemalloc.stop()

    return Pair(ours=per_worker, floor=20.0, rounds=1, returns_figure=True, warm_up=0)


@case("simulated.health", unit="% core", goal="<= 0.02", floor="one core")
def health(world: World) -> Pair:
    """Measure the percentage of a core that the controller uses for the health of a thousand
    workers, polled once a second.
    """
    scheduler, _, _, _ = _fleet(world)
    cpu_s = _cpu_s(scheduler.status)
    return Pair(
        ours=lambda: 100 * POLLS_PER_S * cpu_s(),
        floor=100.0,
        rounds=8,
        repeats=3,
        returns_figure=True,
    )
