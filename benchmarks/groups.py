"""What group calls cost: beside the calls they are made of, and beside copying the bytes that they move.

python benchmarks/groups.py [local|ray|inline]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from helmsman import Batch, Cluster, ClusterConfig, Dispatch, GroupWorker, ResourceManager, make_scheduler, register
from helmsman.controller.loop import run_sync

RANKS = 4
MEGABYTES = 64
OPTIONS: dict[str, dict[str, Any]] = {"local": {}, "ray": {"num_cpus": 2 * RANKS}, "inline": {}}


class Member(GroupWorker):
    """Takes what comes and returns nothing, or all of it."""

    @register(Dispatch.ONE_TO_ALL)
    def take(self, value: Any) -> None:
        """For the way there."""

    @register(Dispatch.DP_MP_COMPUTE)
    def share(self, batch: Batch) -> list[None]:
        """For the way there, cut."""
        return []

    @register(Dispatch.DP_MP_COMPUTE)
    def same(self, batch: Batch) -> Batch:
        """For the way there and back."""
        return batch


def median_s(work: Callable[[], Any], repeats: int) -> float:
    """Seconds of one run, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main(backend: str) -> None:
    """Measure and print."""
    with make_scheduler(backend, **OPTIONS[backend]) as scheduler, ResourceManager(0, scheduler=scheduler) as manager:
        config = ClusterConfig(world_size=RANKS, num_cpus=0.5)
        with Cluster("one", Member, manager, config) as one, Cluster("two", Member, manager, config) as two:
            value = np.random.default_rng(0).random(MEGABYTES << 17)
            batch = Batch({"x": value.reshape(-1, 1024)})
            copy = median_s(value.copy, 9)
            workers = [worker.id for worker in one.workers]

            def singly(argument: Any) -> None:
                async def all_of_them() -> None:
                    await asyncio.gather(*(scheduler.async_call_engine(worker, "take", None, argument) for worker in workers))

                run_sync(all_of_them())

            def kept() -> None:
                with one.method(Member.same).keep(batch) as rows:
                    two.method(Member.share)(rows)

            def through_the_script() -> None:
                two.method(Member.share)(one.method(Member.same)(batch))

            rows = [
                (
                    f"empty call, {RANKS} ranks",
                    "the calls themselves",
                    lambda: one.method(Member.take)(None),
                    lambda: singly(None),
                    200,
                ),
                (
                    f"{MEGABYTES} MB to each",
                    "each sent by itself",
                    lambda: one.method(Member.take)(value),
                    lambda: singly(value),
                    9,
                ),
                (f"{MEGABYTES} MB cut", "a copy", lambda: one.method(Member.share)(batch), value.copy, 9),
                (f"{MEGABYTES} MB cut, there and back", "a copy", lambda: one.method(Member.same)(batch), value.copy, 9),
                (f"{MEGABYTES} MB to a second group, kept", "through the script", kept, through_the_script, 9),
            ]
            print(f"{backend}: a copy of {MEGABYTES} MB takes {copy * 1e3:.1f} ms\n")
            print(f"{'':<38}{'ms':>9}{'ratio':>8}  beside")
            for name, beside, work, floor, repeats in rows:
                took, base = median_s(work, repeats), median_s(floor, repeats)
                print(f"{name:<38}{took * 1e3:>9.2f}{took / base:>8.2f}  {beside} ({base * 1e3:.2f} ms)")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "local")
