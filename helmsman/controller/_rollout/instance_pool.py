"""InstancePool: adds and removes rollout instances, and rebuilds those that Supervisor names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from helmsman._base.event_loop import await_all
from helmsman.api.errors import HelmsmanError, InvalidSpecError, JobError
from helmsman.api.forms import run_in_new_thread
from helmsman.controller._rollout.health import Health
from helmsman.controller._rollout.instances import Instances
from helmsman.controller._rollout.request import Instance
from helmsman.controller._rollout.weight_state import RolloutWeights

T = TypeVar("T")


class InstancePool:
    """Adds, drains, removes and rebuilds instances.

    A new instance receives the current weights before it serves.
    """

    def __init__(self, instances: Instances, weights: RolloutWeights) -> None:
        self._instances, self._weights = instances, weights
        self._supervisor = instances.supervisor
        self._leaving: set[str] = set()
        """Ids of workers that are being removed."""
        self._scaling = asyncio.Lock()
        """Serializes ``scale``, so that the last call determines the number of instances."""

    async def rebuild(self, worker_id: str) -> bool:
        """Restart a worker with its engine; returns whether it has received the current weights."""
        await self._weights.wait_for_room(worker_id)
        self._instances.num_builds[worker_id] += 1
        self._weights.group_id = ""
        await self._instances.restart(worker_id)
        async with self._entry([worker_id]) as (has_weights,):
            return has_weights

    async def scale(self, replicas: int, migrate: bool) -> None:
        """Resize to ``replicas`` instances; concurrent calls are serialized."""
        if replicas < 1:
            raise InvalidSpecError(
                role=self._instances.role, field="replicas", value=replicas, expected="1 or more"
            )
        async with self._scaling:
            serving = self._instances.requests.instances.keys() - self._leaving
            # In rank order: the last ranks are removed first.
            staying = [each.id for each in self._instances.workers if each.id in serving]
            if replicas > len(staying):
                await self.add(replicas - len(staying))
            else:
                await self.remove(staying[replicas:], migrate)

    async def add(self, count: int) -> list[str]:
        self._instances.check_resizable("count", count)
        requests = self._instances.requests
        adding = asyncio.ensure_future(
            run_in_new_thread(self._instances.scheduler.add_workers, self._instances.role, count)
        )
        try:
            new = await asyncio.shield(adding)
            await self._instances.look()
            await self._supervisor.with_liveness_check(new, self._instances.build(new))
            async with self._entry(new) as have_weights:
                for worker_id, has_weights in zip(new, have_weights, strict=True):
                    health = Health.HEALTHY if has_weights else Health.STALE
                    # watch() precedes add(), which may look the instance up in the supervisor.
                    self._supervisor.watch(worker_id, health)
                    requests.add(worker_id, self._instances.capacity, health)
        except BaseException:
            await _to_its_end(self._undo_add(adding))
            raise
        return new

    async def _undo_add(self, adding: asyncio.Future[list[str]]) -> None:
        await asyncio.wait([adding])  # Workers that it starts later would have no owner.
        if adding.exception() is None:
            await self._end(adding.result(), ())

    @contextlib.asynccontextmanager
    async def _entry(self, worker_ids: Sequence[str]) -> AsyncIterator[list[bool]]:
        """Prepare new workers, which serve from the end of the block on.

        They receive the current weights, and have only the memory that the others have. The block
        must not await: an update, sleep or wake that begins meanwhile would leave them out.

        Yields:
            Whether each has the current weights. Those prepared while the others have no memory for
            weights wait for the next update.
        """

        async def for_each(work: Callable[[str], Coroutine[Any, Any, bool]]) -> list[bool]:
            async def do(worker_id: str) -> bool:
                return await self._supervisor.with_liveness_check([worker_id], work(worker_id))

            return await await_all(map(do, worker_ids))

        weights = self._weights
        while True:
            version, can_load = weights.version, weights.state.has_weight_memory
            have_weights = [False] * len(worker_ids)
            if can_load:
                have_weights = await for_each(weights.bring_served)
            if version != weights.version:
                continue
            if weights.state.has_cache:
                # No wake() is running, and a running sleep() has not chosen its instances yet.
                yield have_weights
                return
            async with weights.in_turn(None):
                # All may have woken up or been updated before this turn.
                could_load = can_load or not weights.state.has_weight_memory
                if version == weights.version and could_load:
                    keep_weights = await for_each(weights.match_memory)
                    yield [all(each) for each in zip(have_weights, keep_weights, strict=True)]
                    return

    async def drain(self, worker_ids: Collection[str], migrate: bool) -> None:
        await self._instances.requests.drain(*self._instances.known(worker_ids), migrate=migrate)

    async def undrain(self, worker_ids: Collection[str]) -> None:
        chosen = self._instances.known(worker_ids)
        if asleep := [worker_id for worker_id in chosen if worker_id in self._instances.asleep]:
            raise HelmsmanError(
                f"{', '.join(asleep)}: asleep, so undrain() would send requests that it cannot "
                f"serve; call wake(worker_ids={asleep!r}).",
                role=self._instances.role,
            )
        for worker_id in chosen:
            self._instances.requests.undrain(worker_id)

    async def remove(self, worker_ids: Collection[str], migrate: bool) -> None:
        self._instances.check_resizable("worker_ids", list(worker_ids))
        requests, chosen = self._instances.requests, self._instances.known(worker_ids)
        refused = ""
        if again := self._leaving.intersection(chosen):
            refused = (
                "workers that are not being removed already; being removed: "
                f"{', '.join(sorted(again))}"
            )
        elif chosen and not requests.instances.keys() - self._leaving - set(chosen):
            refused = "at least one remaining worker; close() ends all workers"
        if refused:
            raise InvalidSpecError(
                role=self._instances.role,
                field="worker_ids",
                value=list(worker_ids),
                expected=refused,
            )
        self._leaving.update(chosen)
        try:
            await self.drain(chosen, migrate)
            # No await in between: undrain could otherwise make them receive requests again.
            gone = self._forget(chosen)
            await _to_its_end(self._end(chosen, gone))
        finally:
            self._leaving.difference_update(chosen)

    def _forget(self, worker_ids: Sequence[str]) -> list[Instance]:
        """Take idle workers out of service; returns their instances."""
        requests = self._instances.requests
        gone = [
            requests.instances[worker_id]
            for worker_id in worker_ids
            if worker_id in requests.instances
        ]
        for instance in gone:
            requests.remove(instance.instance_id)
            self._supervisor.forget(instance.instance_id)
            self._instances.asleep.pop(instance.instance_id, None)
        return gone

    async def _end(self, worker_ids: Sequence[str], gone: Sequence[Instance]) -> None:
        try:
            await run_in_new_thread(
                self._instances.scheduler.remove_workers, self._instances.role, worker_ids
            )
        except JobError:  # None of them was ended.
            for instance in gone:
                self._supervisor.watch(instance.instance_id, instance.health)
                added = self._instances.requests.add(
                    instance.instance_id, instance.capacity, instance.health
                )
                added.error = instance.error
            raise
        finally:
            await self._instances.look()


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work that must complete; a cancellation is raised once it has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
