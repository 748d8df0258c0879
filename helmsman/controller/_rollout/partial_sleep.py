"""PartialSleep: some instances free their devices' memory while the others serve."""

from __future__ import annotations

from collections.abc import Collection

from helmsman.api.errors import InvalidSpecError
from helmsman.api.generation import InFlight
from helmsman.controller._rollout.health import Health, HealthEvent
from helmsman.controller._rollout.instances import Instances, Nap
from helmsman.controller._rollout.request_api import RolloutRequests
from helmsman.controller._rollout.weight_state import RolloutWeights, check_sleep


class PartialSleep:
    """Puts some instances to sleep and wakes them.

    A sleeping instance receives neither requests nor weights, and is not rebuilt before it wakes.
    """

    def __init__(
        self, instances: Instances, requests: RolloutRequests, weights: RolloutWeights
    ) -> None:
        self._instances, self._requests, self._weights = instances, requests, weights

    async def sleep(
        self, worker_ids: Collection[str], level: int, in_flight: InFlight, timeout: float | None
    ) -> None:
        check_sleep(level, in_flight)
        asleep, queue = self._instances.asleep, self._instances.requests
        async with self._weights.in_turn(timeout) as left_s:
            chosen = [id_ for id_ in self._instances.known(worker_ids) if id_ not in asleep]
            if not chosen:
                return
            if not queue.instances.keys() - asleep.keys() - set(chosen):
                raise InvalidSpecError(
                    role=self._instances.role,
                    field="worker_ids",
                    value=list(worker_ids),
                    expected="at least one worker that stays awake; without worker_ids, all sleep",
                )
            drain = await self._requests.within(
                queue.drain(*chosen, migrate=in_flight == "abort"),
                f"sleep(in_flight={in_flight!r})",
                left_s(),
                resumes=True,
                at=chosen,
            )
            asleep.update({worker_id: Nap(drain) for worker_id in chosen})
            if level == 2:
                self._weights.note_dropped(chosen)
            await self._weights.ask_living("sleep", chosen, left_s(), level)

    async def wake(self, worker_ids: Collection[str], timeout: float | None) -> None:
        asleep, queue = self._instances.asleep, self._instances.requests
        async with self._weights.in_turn(timeout) as left_s:
            state = self._weights.state
            chosen = [id_ for id_ in self._instances.known(worker_ids) if id_ in asleep]
            if state.has_weight_memory:  # Otherwise they wake with the others.
                await self._weights.ask_living(
                    "wake", chosen, left_s(), weights_only=not state.has_cache
                )
            naps = {worker_id: asleep.pop(worker_id) for worker_id in chosen}
        for worker_id, nap in naps.items():
            nap.woken.set()
            if queue.instances[worker_id].health is Health.STALE and await self._weights.catch_up(
                worker_id
            ):
                self._instances.supervisor.note(worker_id, HealthEvent.UPDATED)
            queue.undrain(worker_id, nap.drain)
