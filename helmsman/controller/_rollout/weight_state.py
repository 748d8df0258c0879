"""RolloutWeights: weight versions, updates and sleep of rollout instances."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from helmsman.api.errors import (
    EngineCallError,
    HandleLostError,
    HelmsmanError,
    SchedulerClosedError,
)
from helmsman.api.generation import InFlight
from helmsman.api.scheduler import ResultHandle, Worker
from helmsman.api.weight_exchange import KeptWeights
from helmsman.api.weight_states import WeightEvent, WeightState
from helmsman.api.weights import Weights
from helmsman.controller._groups.call_all import DEFAULT_GRACE_S, group_error, observe, release
from helmsman.controller._rollout.health import Health, HealthEvent
from helmsman.controller._rollout.instances import Instances, is_death
from helmsman.controller._rollout.request_api import RolloutRequests
from helmsman.controller._scheduler.driver_log import story

log = logging.getLogger(__name__)

_holds = itertools.count()
_ASLEEP = "sleep"
"""Name of the suspension of requests during sleep."""
_FALLING_ASLEEP = "start of sleep"
"""Name of their suspension while ``sleep`` waits for requests. The role still counts as awake, so
an instance that receives weights meanwhile would end the suspension ``_ASLEEP``.
"""


def check_sleep(level: int, in_flight: InFlight) -> None:
    """Check the arguments of ``sleep``.

    Raises:
        ValueError: One is invalid.
    """
    if level not in (1, 2):
        raise ValueError(
            f"level is {level}; expected 1, which keeps the weights in host memory, or 2, which "
            "drops them"
        )
    if in_flight not in ("wait", "abort"):
        raise ValueError(
            f"in_flight is {in_flight!r}; expected 'wait' or 'abort', since no request can run "
            "during sleep"
        )


class RolloutWeights:
    """Weights and sleep of the instances of a role; implements WeightSink.

    Updates are serialized; the one that began last determines the current weights. An instance
    without them is STALE and receives no requests. Updates and sleep suspend the request queue.
    """

    def __init__(self, instances: Instances, requests: RolloutRequests) -> None:
        self._instances, self._requests = instances, requests
        self.scheduler, self.role = instances.scheduler, instances.role
        self._served: tuple[KeptWeights, int] | None = None
        """Weights of the last update and their version; kept only under supervision."""
        self.version: int | None = None
        self.state = WeightState.AWAKE
        """State of the role; an instance that was rebuilt or missed an update may lag behind."""
        self._has_room = asyncio.Event()
        """Set while the role has memory for weights. A rebuild waits for it: during sleep it would
        occupy memory that other roles need.
        """
        self._has_room.set()
        self._is_updating = False
        self._one_at_a_time = asyncio.Lock()
        self.group_id = ""

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self._instances.workers

    def why_hopeless(self) -> Exception | None:
        """Return the reason why queued requests will never be served, else None.

        None while a live instance may still become ready, by the current update or, after sleep, by
        the next one.
        """
        if (self._is_updating or not self.state.is_serving) and self._instances.some_live():
            return None
        return self._instances.why_none_will_serve()

    def forget(self) -> None:
        old, self._served = self._served, None
        self._release(old)

    def _on(self, event: WeightEvent) -> None:
        before, self.state = self.state, self.state.after(event)
        if self.state is not before:
            story.info("role %s is %s", self.role, self.state.value)
        if self.state.has_weight_memory:
            self._has_room.set()
        else:
            self._has_room.clear()

    # --- sleep ------------------------------------------------------------------------------------

    async def sleep(self, level: int, in_flight: InFlight, timeout: float | None) -> None:
        check_sleep(level, in_flight)
        requests = self._instances.requests
        async with self.in_turn(timeout) as left_s:
            requests.suspend(_FALLING_ASLEEP)
            try:
                ended = requests.wait_ended() if in_flight == "wait" else requests.take_back()
                await self._requests.within(
                    ended,
                    f"sleep(in_flight={in_flight!r})",
                    left_s(),
                    resumes=self.state.is_serving,
                )
                self._on(WeightEvent.SLEPT if level == 1 else WeightEvent.DROPPED)
                requests.suspend(_ASLEEP)
            finally:
                requests.resume(_FALLING_ASLEEP)
            living = self._instances.living_ids()
            if level == 2:
                self.note_dropped(living)
            await self.ask_living("sleep", living, left_s(), level)

    async def wake(self, weights_only: bool, timeout: float | None) -> None:
        async with self.in_turn(timeout) as left_s:
            if self.state.has_cache:
                return
            await self.ask_living(
                "wake", self._instances.living_ids(), left_s(), weights_only=weights_only
            )
            self._on(WeightEvent.WOKE_WEIGHTS if weights_only else WeightEvent.WOKE)
            self._resume_if_awake()

    async def wait_for_room(self, worker_id: str) -> None:
        """Wait until an instance may use memory for weights."""
        while (nap := self._instances.asleep.get(worker_id)) or not self._has_room.is_set():
            await (nap.woken if nap else self._has_room).wait()

    def note_dropped(self, worker_ids: Sequence[str]) -> None:
        """Record that these instances have dropped their weights."""
        for worker_id in worker_ids:
            error = HelmsmanError(
                f"{worker_id} has dropped its weights by sleep(level=2).", worker_id=worker_id
            )
            self._instances.supervisor.note(worker_id, HealthEvent.UPDATE_FAILED, error)

    async def ask_living(
        self, method: str, ids: Sequence[str], timeout: float, *args: Any, **kwargs: Any
    ) -> None:
        """Call instances. A death is only logged: a dead instance occupies no device memory."""
        calls = (
            self._instances.ask_while_it_lives(worker_id, method, *args, timeout=timeout, **kwargs)
            for worker_id in ids
        )
        outcomes = dict(zip(ids, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        failures = {id_: each for id_, each in outcomes.items() if isinstance(each, Exception)}
        errors = {id_: each for id_, each in failures.items() if not is_death(each)}
        if errors:
            error = group_error(self.role, method, errors, len(ids))
            await self._instances.explain(error)
            raise error
        for worker_id, failure in failures.items():
            log.warning("%s died during %s: %s", worker_id, method, str(failure).split("\n", 1)[0])

    def _weights_have_come(self) -> None:
        """Record that an instance has received weights.

        If all instances have freed their memory meanwhile, it sleeps as well.
        """
        if self.state.has_weight_memory:
            self._on(WeightEvent.UPDATED)
            self._resume_if_awake()

    def _resume_if_awake(self) -> None:
        if self.state.is_serving:
            self._instances.requests.resume(_ASLEEP)

    # --- updates ----------------------------------------------------------------------------------

    async def update_all(
        self, weights: ResultHandle | Weights, version: int, timeout: float | None
    ) -> int:
        deadline = time.monotonic() + self._limit_s(timeout)
        async with self.hold("keep", timeout):
            each = dict.fromkeys(self._instances.living_ids(), weights)
            await self.update(each, version, deadline - time.monotonic(), kept=weights)
        return version

    async def update(
        self,
        weights: Mapping[str, ResultHandle | Weights],
        version: int,
        timeout: float | None,
        *,
        kept: KeptWeights | None = None,
        sending: asyncio.Future[Any] | None = None,
        on_failure: Callable[[str, Exception], None] | None = None,
    ) -> Mapping[str, Exception]:
        if not self.state.has_weight_memory:
            raise HelmsmanError(
                f"role {self.role!r} is asleep and has no memory for weights; call "
                "wake(weights_only=True) first.",
                role=self.role,
            )
        if self.version is not None and version < self.version:
            raise ValueError(
                f"weight version is {version}; expected {self.version} or more, since a version "
                "identifies the weights that generated a sample. "
                "After restoring a checkpoint, call set_version with a higher version."
            )
        old = self._served
        # Set before the first call: a worker that is being rebuilt must not start to serve with the
        # previous weights.
        self.version = version
        self._served = (
            (kept, version) if self._instances.is_supervised and kept is not None else None
        )
        requests, note = self._instances.requests, self._instances.supervisor.note
        requests.expect_weights(version)
        asleep = self._instances.asleep
        for left_out in {*self._instances.living_ids(), *asleep}.difference(weights):
            error = HelmsmanError(
                f"{left_out} was left out of the update to weight version {version}"
                f"{', since it sleeps' if left_out in asleep else ''}."
            )
            note(left_out, HealthEvent.UPDATE_FAILED, error)
        try:
            tasks = {
                id_: asyncio.ensure_future(self._update_one(id_, weights[id_], version, timeout))
                for id_ in weights
            }
            failures = await _all_that_answer(tasks, sending, on_failure)
            if len(failures) < len(weights):
                self._weights_have_come()
            num_serving = len(weights) - len(failures)
            story.info(
                "role %s: %d of %d instances serve weight version %d",
                self.role,
                num_serving,
                len(weights),
                version,
            )
        finally:
            if old is not None and old[0] is not kept:
                await asyncio.to_thread(self._release, old)
        if failures:
            some_serve = (
                self._instances.serving_ids() or self._instances.why_none_will_serve() is None
            )
            if not self._instances.is_supervised or not some_serve:
                raise group_error(self.role, "update_weights", failures, len(weights))
            for worker_id, failure in failures.items():
                log.warning(
                    "%s does not serve weight version %d: %s",
                    worker_id,
                    version,
                    str(failure).split("\n", 1)[0],
                )
        return failures

    async def _update_one(
        self, worker_id: str, weights: ResultHandle | Weights, version: int, timeout: float | None
    ) -> None:
        """Update an instance and record the outcome, unless it was rebuilt or removed meanwhile."""
        requests, builds = self._instances.requests, self._instances.num_builds
        build = builds[worker_id]

        def note(event: HealthEvent, error: Exception | None = None) -> None:
            if builds[worker_id] == build:
                self._instances.supervisor.note(worker_id, event, error)

        try:
            served = await self._instances.ask_while_it_lives(
                worker_id, "update_weights", weights, version, timeout=timeout
            )
            if served != version:
                raise HelmsmanError(
                    f"{worker_id} serves weight version {served} after an update to {version}; it "
                    "receives no requests until an "
                    "update succeeds.",
                    worker_id=worker_id,
                )
        except asyncio.CancelledError as cancelled:
            error = HelmsmanError(
                f"{worker_id}: update_weights was cancelled; its outcome is unknown."
            )
            note(HealthEvent.UPDATE_FAILED, error)
            raise error from cancelled
        except Exception as error:
            if worker_id not in requests.instances:
                return  # It was removed meanwhile.
            note(HealthEvent.UPDATE_FAILED, error)
            raise
        if builds[worker_id] == build and worker_id in requests.instances:
            requests.have_weights(worker_id, version)
        note(HealthEvent.UPDATED)

    def _release(self, served: tuple[KeptWeights, int] | None) -> None:
        if served is not None and isinstance(served[0], ResultHandle):
            release(self.scheduler, served[0])

    def _limit_s(self, timeout: float | None) -> float:
        return self.scheduler.timeouts.call_s if timeout is None else timeout

    @contextlib.asynccontextmanager
    async def in_turn(self, timeout: float | None) -> AsyncIterator[Callable[[], float]]:
        """Wait until no other update runs; yields a function that returns the seconds left.

        Updates are serialized, so that instances serve the weights of the latest one.
        """
        limit_s = self._limit_s(timeout)
        deadline = time.monotonic() + limit_s
        try:
            async with asyncio.timeout(limit_s):
                await self._one_at_a_time.acquire()
        except TimeoutError as error:
            raise HelmsmanError(
                f"{self.role}: another weight update, sleep or wake was still running after "
                f"{limit_s:g} s. This operation was not started, and "
                "no instance has changed. Repeat it after the other has ended, or pass a longer "
                "timeout.",
                role=self.role,
                limit_s=limit_s,
            ) from error
        try:
            yield lambda: deadline - time.monotonic()
        finally:
            self._one_at_a_time.release()

    @contextlib.asynccontextmanager
    async def hold(self, in_flight: InFlight, timeout: float | None) -> AsyncIterator[None]:
        """Hold requests during a weight update.

        An instance without the weights may still receive them during the update. Afterwards its
        requests continue elsewhere.
        """
        by = f"hold {next(_holds)}"  # A unique name, so that only this hold ends its suspension.
        requests = self._instances.requests
        async with self.in_turn(timeout) as left_s:
            self._is_updating = True
            try:
                if in_flight == "wait":  # A STALE instance would never finish its requests.
                    requests.suspend(by)
                    self._take_back_stale()
                if in_flight != "keep":
                    await self._requests.pause(in_flight, left_s(), by=by)
                yield
            finally:
                self._is_updating = False
                requests.resume(by)
                if self._instances.serving_ids():
                    self._take_back_stale()

    def _take_back_stale(self) -> None:
        """Take requests back from STALE instances as each replies; they continue elsewhere."""
        requests = self._instances.requests

        async def take_back(worker_id: str) -> None:
            with contextlib.suppress(SchedulerClosedError):
                await requests.recall(worker_id)

        for worker_id, instance in requests.instances.items():
            if instance.health is Health.STALE:
                observe(take_back(worker_id), f"{worker_id}: taking back its requests")

    # --- rebuilt instances ------------------------------------------------------------------------

    async def match_memory(self, worker_id: str) -> bool:
        """Free the memory of a new worker that the others do not have; call it in turn.

        Returns:
            Whether it keeps its weights.
        """
        if self.state.has_cache:
            return True
        keeps_weights = self.state.is_whole
        await self._instances.ask(worker_id, "sleep", 1 if keeps_weights else 2)
        if self.state.has_weight_memory:
            await self._instances.ask(worker_id, "wake", weights_only=True)
        return keeps_weights

    async def catch_up(self, worker_id: str) -> bool:
        """Send the weights of the last update to an instance that has slept, if they are kept.

        Returns:
            Whether the instance has the current weights.
        """
        if self.version is None or not self.state.has_weight_memory:
            return False
        has_weights = await self._instances.supervisor.with_liveness_check(
            [worker_id], self.bring_served(worker_id)
        )
        return has_weights and self.state.is_whole  # All may have dropped them meanwhile.

    async def bring_served(self, worker_id: str) -> bool:
        """Send the weights of the last update to a worker; returns whether they are current."""
        if self.version is None:
            # No update yet: all instances serve the weights that they were built with.
            return True
        while self._served is not None:
            weights, version = self._served
            try:
                served = await self._serve(worker_id, weights, version)
            except (HandleLostError, EngineCallError) as error:
                if self.version != version:
                    continue  # The weights were replaced meanwhile.
                # The trainer or the folder no longer exists, or the weights are unreadable. Another
                # rebuild would not help.
                log.warning(
                    "%s serves no requests until the next weight update: %s", worker_id, error
                )
                return False
            if self.version == version:
                if served == version and worker_id in self._instances.requests.instances:
                    self._instances.requests.have_weights(worker_id, version)
                    self._weights_have_come()
                return bool(served == version)
        return False

    async def _serve(self, worker_id: str, weights: KeptWeights, version: int) -> int:
        """Have an instance load kept weights; return the version that it serves."""
        if not callable(weights):
            served: int = await self._instances.ask(worker_id, "update_weights", weights, version)
            return served
        handle = await weights()
        try:
            return await self._serve(worker_id, handle, version)
        finally:
            await asyncio.to_thread(release, self.scheduler, handle)

    # --- for a sync -------------------------------------------------------------------------------

    def keeps(self, weights: ResultHandle) -> bool:
        return self._served is not None and self._served[0] is weights

    def living_ids(self, *, with_suspects: bool = True) -> list[str]:
        return self._instances.living_ids(with_suspects=with_suspects)

    async def answering_ids(self) -> list[str]:
        return await self._instances.answering_ids()

    def served_by(
        self, failures: Mapping[str, Exception]
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        updated: list[str] = []
        failed: dict[str, str] = {}
        for id_, instance in self._instances.requests.instances.items():
            if instance.health.is_serving:
                updated.append(id_)
            else:
                reason = failures.get(id_) or instance.error or f"it is {instance.health.value}"
                failed[id_] = str(reason).split("\n", 1)[0]
        return tuple(updated), failed


async def _all_that_answer(
    updates: Mapping[str, asyncio.Task[None]],
    sending: asyncio.Future[Any] | None,
    on_failure: Callable[[str, Exception], None] | None,
) -> dict[str, Exception]:
    """Wait for all updates; returns the failures, earliest first.

    Once the transfer that they wait for has failed, only those that end soon are awaited.
    """
    failures: dict[str, Exception] = {}

    def ended(worker_id: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            failures[worker_id] = error
            if on_failure is not None:
                on_failure(worker_id, error)

    for worker_id, task in updates.items():
        task.add_done_callback(functools.partial(ended, worker_id))
    everything = asyncio.gather(*updates.values(), return_exceptions=True)
    try:
        if sending is not None:
            await asyncio.wait([everything, sending], return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and sending.exception() is not None:
                await asyncio.wait([everything], timeout=DEFAULT_GRACE_S)
                for task in updates.values():
                    task.cancel()
        await asyncio.shield(everything)
    except asyncio.CancelledError:
        for task in updates.values():
            task.cancel()
        await everything  # Brief; records for each instance that it lacks the weights.
        raise
    return failures
