"""Cost of health polls, ten a second, while workers are idle and while they work, and of log
lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterator

from benchmarks.engines import Worker
from benchmarks.harness import Pair, case
from benchmarks.world import World
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec

NUM_WORKERS = 16
POLLS_PER_S = 10
WATCHED_S = 1.0
COUNT = 3_000_000
LINES = 20_000


def _workers(world: World, backend: str, number: int) -> tuple[Scheduler, list[str]]:
    scheduler = world.scheduler(backend)
    workers = scheduler.create_workers(
        Job(role="watched", replicas=number, tasks=[SchedulingSpec(cpu=0.1)])
    )
    world.until_case_ends.callback(scheduler.delete_workers, "watched")

    async def equip() -> None:
        await asyncio.gather(
            *(scheduler.create_engine(worker, Worker, "worker") for worker in workers)
        )

    world.run(equip())
    return scheduler, workers


@contextlib.contextmanager
def _polling(scheduler: Scheduler) -> Iterator[None]:
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(1 / POLLS_PER_S):
            scheduler.status()

    thread = threading.Thread(target=poll, name="polling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _declare(backend: str) -> None:
    @case(f"health.{backend}.idle", unit="% core", floor="one core")
    def idle(world: World) -> Pair:
        """Measure CPU of the controller and all workers, beyond their idle use."""
        scheduler, _ = _workers(world, backend, NUM_WORKERS)
        watched = {
            status.worker_id
            for status in scheduler.status()
            if status.worker_id.startswith("watched/")
        }

        def used_s() -> float:
            health = [status.health for status in scheduler.status() if status.worker_id in watched]
            return time.process_time() + sum(each.cpu_s for each in health if each is not None)

        def percent() -> float:
            before = used_s()
            time.sleep(WATCHED_S)
            unasked = used_s() - before
            before = used_s()
            with _polling(scheduler):
                time.sleep(WATCHED_S)
            return max(0.0, 100 * (used_s() - before - unasked) / WATCHED_S)

        return Pair(ours=percent, floor=100.0, rounds=3, returns_figure=True, warm_up=0)

    @case(
        f"health.{backend}.load",
        unit="ms",
        floor="the same work in as many workers as there are cores, unwatched",
    )
    def load(world: World) -> Pair:
        """Compare the duration of work in polled workers with that in others."""
        scheduler, workers = _workers(world, backend, len(os.sched_getaffinity(0)))

        async def work() -> None:
            await asyncio.gather(
                *(
                    scheduler.async_call_engine(worker, "count", "worker", COUNT)
                    for worker in workers
                )
            )

        def watched() -> None:
            with _polling(scheduler):
                world.run(work())

        return Pair(ours=watched, floor=lambda: world.run(work()), rounds=6)

    @case(
        f"logging.{backend}",
        unit="ms",
        floor=f"{LINES} lines written to a file by the engine itself",
    )
    def logging(world: World) -> Pair:
        """Measure lines that an engine prints."""
        scheduler, (worker,) = _workers(world, backend, 1)
        return Pair(
            ours=lambda: scheduler.call_engine(worker, "print_lines", "worker", LINES),
            floor=lambda: scheduler.call_engine(worker, "write_lines", "worker", LINES),
            rounds=5,
        )


for _backend in ("local", "ray"):
    _declare(_backend)
