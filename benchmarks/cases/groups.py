"""Worker groups, compared with plain calls and copies of bytes, and one value to many workers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from benchmarks.engines import value_of
from benchmarks.harness import Pair, case
from benchmarks.world import World
from helmsman import Batch, Cluster, ClusterConfig, Dispatch, GroupWorker, ResourceManager, register
from helmsman._base.event_loop import run_sync

RANKS = 4
FAN_OUT = 8
NUM_BYTES = 64 << 20


class Member(GroupWorker):
    """Takes a value and returns nothing, or returns it."""

    @register(Dispatch.ONE_TO_ALL)
    def take(self, value: Any) -> None:
        """Take a value."""

    @register(Dispatch.DP_MP_COMPUTE)
    def share(self, batch: Batch) -> list[None]:
        """Take a share of a batch."""
        return []

    @register(Dispatch.DP_MP_COMPUTE)
    def same(self, batch: Batch) -> Batch:
        """Take and return a share of a batch."""
        return batch


class Counted:
    """An array that counts how often it is packed in this process."""

    num_packed = 0

    def __init__(self, array: Any) -> None:
        self.array = array

    def __reduce__(self) -> tuple[Any, ...]:
        Counted.num_packed += 1
        return Counted, (self.array,)


def _cluster(world: World, backend: str, name: str, num_ranks: int) -> Cluster[Member]:
    """Make a group for the time of the case."""
    manager = world.until_case_ends.enter_context(
        ResourceManager(0, scheduler=world.scheduler(backend))
    )
    config = ClusterConfig(world_size=num_ranks, num_cpus=0.5)
    return world.until_case_ends.enter_context(Cluster(name, Member, manager, config))


def _batch() -> Batch:
    return Batch({"x": np.random.default_rng(0).random(NUM_BYTES // 8).reshape(-1, 1024)})


def _declare(backend: str) -> None:
    @case(f"groups.{backend}.empty", unit="ms", floor=f"the {RANKS} calls themselves, gathered")
    def empty(world: World) -> Pair:
        one = _cluster(world, backend, "one", RANKS)
        return Pair(
            ours=lambda: one.method(Member.take)(None),
            floor=lambda: _singly(one, None),
            rounds=12,
            repeats=20,
            warm_up=10,
        )

    @case(f"groups.{backend}.replicated", unit="ms", floor="64 MB sent to each rank by itself")
    def replicated(world: World) -> Pair:
        one, value = _cluster(world, backend, "one", RANKS), value_of("torch", NUM_BYTES)
        return Pair(
            ours=lambda: one.method(Member.take)(value),
            floor=lambda: _singly(one, value),
            rounds=5,
            warm_up=2,
        )

    @case(f"groups.{backend}.cut", unit="ms", floor="memcpy of the 64 MB")
    def cut(world: World) -> Pair:
        one, batch = _cluster(world, backend, "one", RANKS), _batch()
        return Pair(
            ours=lambda: one.method(Member.share)(batch), floor=_copy(batch), rounds=7, warm_up=2
        )

    @case(f"groups.{backend}.there_and_back", unit="ms", floor="memcpy of the 64 MB, twice")
    def there_and_back(world: World) -> Pair:
        one, batch = _cluster(world, backend, "one", RANKS), _batch()
        copy = _copy(batch)
        return Pair(
            ours=lambda: one.method(Member.same)(batch),
            floor=lambda: (copy(), copy()),
            rounds=7,
            warm_up=2,
        )

    @case(f"groups.{backend}.kept", unit="ms", floor="64 MB to a second group through the script")
    def kept(world: World) -> Pair:
        one, two = _cluster(world, backend, "one", RANKS), _cluster(world, backend, "two", RANKS)
        batch = _batch()

        def past_the_script() -> None:
            with one.method(Member.same).keep(batch) as rows:
                two.method(Member.share)(rows)

        def through_the_script() -> None:
            two.method(Member.share)(one.method(Member.same)(batch))

        return Pair(ours=past_the_script, floor=through_the_script, rounds=5, warm_up=2)

    @case(f"fanout.{backend}.time", unit="ms", goal="<= 2", floor="64 MB to one worker")
    def fan_out(world: World) -> Pair:
        many, value = _cluster(world, backend, "many", FAN_OUT), value_of("torch", NUM_BYTES)
        worker = many.workers[0].id
        one = many.scheduler
        return Pair(
            ours=lambda: many.method(Member.take)(value),
            floor=lambda: one.call_engine(worker, "take", None, value),
            rounds=7,
            warm_up=2,
        )

    @case(f"fanout.{backend}.packed", unit="times", goal="<= 1", floor="once")
    def packed(world: World) -> Pair:
        many = _cluster(world, backend, "many", FAN_OUT)
        value = Counted(value_of("numpy", NUM_BYTES))

        def counted() -> int:
            before = Counted.num_packed
            many.method(Member.take)(value)
            return Counted.num_packed - before

        return Pair(ours=counted, floor=1, rounds=1, returns_figure=True, warm_up=0)


def _singly(group: Cluster[Member], argument: Any) -> None:
    scheduler = group.scheduler

    async def all_of_them() -> None:
        await asyncio.gather(
            *(
                scheduler.async_call_engine(worker.id, "take", None, argument)
                for worker in group.workers
            )
        )

    run_sync(all_of_them())


def _copy(batch: Batch) -> Any:
    source = batch["x"]
    target = source.copy()

    def copy() -> None:
        target[:] = source

    return copy


for _backend in ("local", "ray"):
    _declare(_backend)
