"""Weights from one worker to another, past the script."""

from __future__ import annotations

import asyncio

from benchmarks.engines import Weights
from benchmarks.harness import Pair, case
from benchmarks.world import World
from helmsman.api.scheduler import Job, SchedulingSpec

NUM_TENSORS = 64
TENSOR_BYTES = 1 << 20


def _declare(backend: str) -> None:
    @case(f"weights.{backend}.64MB", unit="ms", floor="copying the same state dict within one process")
    def sync(world: World) -> Pair:
        scheduler = world.scheduler(backend)
        source, target = scheduler.create_workers(Job(role="weights", replicas=2, tasks=[SchedulingSpec(cpu=0.1)]))
        world.until_case_ends.callback(scheduler.delete_workers, "weights")

        async def equip() -> None:
            await asyncio.gather(
                *(scheduler.create_engine(worker, Weights, "model", NUM_TENSORS, TENSOR_BYTES) for worker in (source, target))
            )

        world.run(equip())
        ours, theirs = Weights(NUM_TENSORS, TENSOR_BYTES), Weights(NUM_TENSORS, TENSOR_BYTES)

        def past_the_script() -> None:
            handle = scheduler.call_engine(source, "export", "model", rpc_meta={"keep": True})
            scheduler.call_engine(target, "load", "model", handle)
            scheduler.release(handle)

        return Pair(ours=past_the_script, floor=lambda: theirs.load(ours.export()), rounds=9, warm_up=2)


for _backend in ("local", "ray"):
    _declare(_backend)
