"""The weights that the instances of a rollout role serve, and their sleep, in which they may have none."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from helmsman.api.errors import (
    CallError,
    EngineCallError,
    HandleLostError,
    HelmsmanError,
    SchedulerClosedError,
)
from helmsman.api.scheduler import ResultHandle
from helmsman.api.weights import Weights
from helmsman.controller._aio.event_loop import run_async, run_sync
from helmsman.controller._generation.health import Event, Health
from helmsman.controller._roles.call_all import DEFAULT_GRACE_S, gather_all, group_error, observe, release
from helmsman.controller._roles.handoff_protocol import Turn
from helmsman.controller._rollout.instance_pool import RolloutInstances, is_death
from helmsman.controller._rollout.request_api import InFlight
from helmsman.controller._transport.health import require_answer
from helmsman.controller._validation.argument_types import checked

log = logging.getLogger(__name__)

_holds = itertools.count()
_ASLEEP = "sleep"
"""Who holds the requests of instances that sleep."""


class RolloutWeights(RolloutInstances, abc.ABC):
    """What the instances of RolloutInstances serve.

    One update is under way at a time, and the last that began says what is served. An instance that has not got that is STALE,
    and takes no request until it has.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As RolloutInstances."""
        super().__init__(*args, **kwargs)
        self._served: tuple[ResultHandle | Weights, int] | None = None
        """Weights of the last update, where there is supervision, and their version."""
        self._version: int | None = None
        """Of the last update."""
        self._num_updating = 0
        """Updates that are under way, one within the other."""
        self._one_update = asyncio.Lock()
        self.weight_group = ""
        """Id of the group for weights that instances were the last to be asked into, which they have left every other for."""
        self._sleep_level = 0
        """At which the instances sleep; 0 when they are awake."""
        self._has_room = asyncio.Event()
        """Unless instances sleep altogether: one that is built anew meanwhile would take what others need."""
        self._has_room.set()
        self._lacks_weights = False
        """Whether sleep has dropped them, and no update has succeeded since."""
        self.turn: Turn | None = None
        """Whose devices these are, where a trainer takes turns with it."""

    # --- control ----------------------------------------------------------------------------------------------------

    @checked
    def update_weights(self, weights: ResultHandle | Weights, version: int, timeout: float | None = None) -> int:
        """Serve ``weights`` as ``version`` on every worker, by one call each; requests in flight go on with them.

        A worker whose update fails takes no more requests until one succeeds.

        Args:
            weights: what TrainController.export_weights returned, or the parameters themselves, by Hugging Face name.
            timeout: seconds for all workers together; the scheduler's ``timeouts.call_s`` when None.
        Returns: the version, which every living worker serves now.
        Raises: as call_all, when all workers have answered; under supervision only when no worker serves the weights, since
            the others are left to it.
        """
        return run_sync(self._update_weights(weights, version, timeout))

    @checked
    async def aupdate_weights(self, weights: ResultHandle | Weights, version: int, timeout: float | None = None) -> int:
        """As update_weights, awaited."""
        return await run_async(self._update_weights(weights, version, timeout))

    @checked
    def sleep(self, level: int = 1, in_flight: InFlight = "finish", timeout: float | None = None) -> None:
        """Give the devices' memory back: the instances accept nothing until wake, and requests are held here. Idempotent.

        Args:
            level: 1 keeps the weights on the hosts; 2 drops them, and an instance serves only after an update.
            in_flight: what becomes of requests that instances have: they ``finish`` first, or it ``recall``s them with the
                tokens that they have; they go on after wake.
            timeout: seconds for all of it; the scheduler's ``timeouts.call_s`` when None.
        Raises: RequestsInFlightError when they have not ended or come back, and then no instance sleeps; ValueError; as
            call_all. What fails otherwise may have left some asleep: sleep or wake again.
        """
        run_sync(self._sleep(level, in_flight, timeout))

    @checked
    async def asleep(self, level: int = 1, in_flight: InFlight = "finish", timeout: float | None = None) -> None:
        """As sleep, awaited."""
        await run_async(self._sleep(level, in_flight, timeout))

    @checked
    def wake(self, *, weights_only: bool = False, timeout: float | None = None) -> None:
        """Take the devices' memory again, and send the requests that were held, once there are weights. Idempotent.

        Args:
            weights_only: only what weights need: update them now, and wake again for the rest.
            timeout: seconds; the scheduler's ``timeouts.call_s`` when None.
        Raises: as call_all; DeviceMemoryError for a rollout that takes Turns, when there is not enough.
        """
        run_sync(self._wake(weights_only, timeout))

    @checked
    async def awake(self, *, weights_only: bool = False, timeout: float | None = None) -> None:
        """As wake, awaited."""
        await run_async(self._wake(weights_only, timeout))

    def versions(self) -> dict[str, int]:
        """The weight version that each living worker serves, by worker id."""
        return run_sync(self._versions())

    # --- sleep ------------------------------------------------------------------------------------------------------

    async def _sleep(self, level: int, in_flight: InFlight, timeout: float | None) -> None:
        if level not in (1, 2):
            raise ValueError(f"level is {level}; expected 1, which keeps the weights on the hosts, or 2, which drops them")
        if in_flight not in ("finish", "recall"):
            raise ValueError(f"in_flight is {in_flight!r}; expected 'finish' or 'recall', as nothing goes on without a device")
        requests, supervisor = self._queue(), self._supervisor
        assert supervisor is not None
        async with self._in_turn(timeout) as left_s:
            requests.suspend(_ASLEEP)
            try:
                ended = requests.wait_ended() if in_flight == "finish" else requests.take_back()
                await self._within(ended, f"sleep(in_flight={in_flight!r})", left_s(), resumes=not self._sleep_level)
            except BaseException:
                if not self._sleep_level:
                    requests.resume(_ASLEEP)
                raise
            self._sleep_level = level
            self._has_room.clear()
            living = self._living_ids()
            if level == 2:
                self._lacks_weights = True
                for worker_id in living:
                    error = HelmsmanError(f"{worker_id} has dropped its weights by sleep(level=2).", worker_id=worker_id)
                    supervisor.note(worker_id, Event.UPDATE_FAILED, error)
            await self._ask_living("sleep", living, left_s(), level)

    async def _wake(self, weights_only: bool, timeout: float | None) -> None:
        async with self._in_turn(timeout) as left_s:
            if not self._sleep_level:
                return
            await self._ask_living("wake", self._living_ids(), left_s(), weights_only=weights_only)
            self._has_room.set()
            if weights_only:
                return
            self._sleep_level = 0
            if not self._lacks_weights:
                self._queue().resume(_ASLEEP)

    async def _ask_living(self, method: str, ids: Sequence[str], timeout: float, *args: Any, **kwargs: Any) -> None:
        """Call instances; one that dies by it, or has died, holds nothing of a device any more."""
        calls = (self._ask_while_it_lives(worker_id, method, *args, timeout=timeout, **kwargs) for worker_id in ids)
        outcomes = dict(zip(ids, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        failures = {id_: each for id_, each in outcomes.items() if isinstance(each, Exception)}
        errors = {id_: each for id_, each in failures.items() if not is_death(each)}
        if errors:
            error = group_error(self.role, method, errors, len(ids))
            if self.turn is not None:
                await self.turn.explain(error)
            raise error
        for worker_id, failure in failures.items():
            log.warning("%s died while it was to %s: %s", worker_id, method, str(failure).split("\n", 1)[0])

    def _weights_have_come(self) -> None:
        """To an instance at least, by an update."""
        self._lacks_weights = False
        if not self._sleep_level:
            self._queue().resume(_ASLEEP)

    async def _ask_while_it_lives(
        self, worker_id: str, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """As _ask; raises also when the instance is given up meanwhile, as the answer of one that hangs may never come."""
        assert self._supervisor is not None
        call = asyncio.ensure_future(self._ask(worker_id, method, *args, timeout=timeout, **kwargs))
        dead = asyncio.ensure_future(self._supervisor.until_dead(worker_id))
        try:
            await asyncio.wait([call, dead], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():  # where it has ended, the call says so soon, and what of
                await asyncio.wait([call], timeout=DEFAULT_GRACE_S)
            if not call.done():
                instance = self._queue().instances.get(worker_id)
                raise (instance and instance.error) or HelmsmanError(f"{worker_id} was given up.", worker_id=worker_id)
            return call.result()
        finally:
            dead.cancel()
            call.cancel()

    # --- updates ----------------------------------------------------------------------------------------------------

    async def _update_weights(self, weights: ResultHandle | Weights, version: int, timeout: float | None) -> int:
        async with self._in_turn(timeout) as left_s:
            await self._update_each(dict.fromkeys(self._living_ids(), weights), version, left_s(), kept=weights)
        return version

    async def _update_each(
        self,
        weights: Mapping[str, ResultHandle | Weights],
        version: int,
        timeout: float | None,
        kept: ResultHandle | Weights | None,
        sending: asyncio.Future[Any] | None = None,
    ) -> dict[str, Exception]:
        """Serve ``version`` on these instances, and on no other, by one call each.

        Args:
            weights: instance id -> what its engine is given.
            kept: what an instance is given that is built anew before the next update; None where there is nothing to keep.
            sending: what they wait for; when it fails they have a short grace to say so.
        Returns: what went wrong, by instance. Raises: as update_weights.
        """
        supervisor = self._supervisor
        assert supervisor is not None
        if not self._has_room.is_set():
            raise HelmsmanError(
                f"role {self.role!r} is asleep, and has no room for weights; call wake(weights_only=True) first.",
                role=self.role,
            )
        if self._version is not None and version < self._version:
            raise ValueError(
                f"weight version {version} after {self._version}: versions only grow, since each says which weights made a "
                "sample; give a trainer that went back to a checkpoint a higher one (set_version)"
            )
        old = self._served[0] if self._served is not None else None
        # From here on this is what serves: a worker that is being built anew must not come to serve with what was before.
        self._version, self._served = version, None
        if self._supervision is not None and kept is not None:
            self._served = (kept, version)

        self._queue().expect_weights(version)

        def note(worker_id: str, build: int, event: Event, error: Exception | None = None) -> None:
            if self._builds[worker_id] == build:
                supervisor.note(worker_id, event, error)

        async def update(worker_id: str) -> None:
            build = self._builds[worker_id]
            try:
                await self._update_one(worker_id, weights[worker_id], version, timeout)
            except asyncio.CancelledError as cancelled:
                error = HelmsmanError(f"{worker_id}: update_weights was not waited for; its outcome is not known.")
                note(worker_id, build, Event.UPDATE_FAILED, error)
                raise error from cancelled
            except Exception as error:
                if worker_id not in self._queue().instances:
                    return  # it was removed meanwhile
                note(worker_id, build, Event.UPDATE_FAILED, error)
                raise
            if self._builds[worker_id] == build and worker_id in self._queue().instances:
                self._queue().have_weights(worker_id, version)
            note(worker_id, build, Event.UPDATED)

        for left_out in set(self._living_ids()).difference(weights):
            error = HelmsmanError(f"{left_out} was left out of the update to weight version {version}.")
            supervisor.note(left_out, Event.UPDATE_FAILED, error)
        try:
            with self._updating():
                failures = await _all_that_answer({id_: asyncio.ensure_future(update(id_)) for id_ in weights}, sending)
                if len(failures) < len(weights):
                    self._weights_have_come()
        finally:
            if isinstance(old, ResultHandle) and old is not kept:
                await asyncio.to_thread(release, self.scheduler, old)
        if failures:
            if self._supervision is None or not (self._serving_ids() or self._why_none_will_serve() is None):
                raise group_error(self.role, "update_weights", failures, len(weights))
            for worker_id, failure in failures.items():
                log.warning("%s does not serve weight version %d: %s", worker_id, version, str(failure).split("\n", 1)[0])
        return failures

    async def _update_one(self, worker_id: str, weights: ResultHandle | Weights, version: int, timeout: float | None) -> None:
        """Have an instance serve weights; raises why it does not."""
        served = await self._ask_while_it_lives(worker_id, "update_weights", weights, version, timeout=timeout)
        if served != version:
            raise HelmsmanError(
                f"{worker_id} serves weight version {served} after an update to {version}; it takes no requests until an "
                "update succeeds.",
                worker_id=worker_id,
            )

    @contextlib.asynccontextmanager
    async def _in_turn(self, timeout: float | None) -> AsyncIterator[Callable[[], float]]:
        """Wait until no other update is under way: what instances serve is what the last one that began has brought. Gives the
        seconds that are left of the time-out."""
        limit_s = self.scheduler.timeouts.call_s if timeout is None else timeout
        deadline = time.monotonic() + limit_s
        try:
            async with asyncio.timeout(limit_s):
                await self._one_update.acquire()
        except TimeoutError as error:
            raise HelmsmanError(
                f"{self.role}: for {limit_s:g} s another update of the weights has been under way; this one was not begun and "
                "no instance has changed. Begin it again when that one has ended, or give it more time.",
                role=self.role,
                limit_s=limit_s,
            ) from error
        try:
            yield lambda: deadline - time.monotonic()
        finally:
            self._one_update.release()

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        """While weights are brought, an instance without them may get them yet; afterwards what it has goes on elsewhere."""
        self._num_updating += 1
        try:
            yield
        finally:
            self._num_updating -= 1
            if not self._num_updating:
                self._queue().pump()
                if self._serving_ids():
                    self._take_back_stale()

    def _take_back_stale(self) -> None:
        """Have what instances without the weights have go on elsewhere, as soon as each answers."""

        async def take_back(worker_id: str) -> None:
            with contextlib.suppress(SchedulerClosedError):
                await self._queue().recall(worker_id)

        for worker_id, instance in self._queue().instances.items():
            if instance.health is Health.STALE:
                observe(asyncio.create_task(take_back(worker_id)), f"{worker_id}: taking back what it has")

    def keeps(self, weights: ResultHandle) -> bool:
        """Whether it keeps these weights, of its last update, for instances that are built anew; it releases them then."""
        return self._served is not None and self._served[0] is weights

    async def _bring_weights(self, worker_id: str) -> bool:
        """Bring a worker that was just built the weights that are served; whether it has them now. Where the others sleep, it
        sleeps as well, and waits for the next update."""
        while True:
            if self._has_room.is_set():
                has_weights = await self._bring_served(worker_id)
                if self._has_room.is_set():
                    return has_weights
            async with self._in_turn(None):  # or the others might wake meanwhile, and leave it asleep
                if not self._has_room.is_set():
                    await self._ask(worker_id, "sleep", self._sleep_level)
                    return False

    async def _bring_served(self, worker_id: str) -> bool:
        """Bring a worker the weights of the last update; whether it has what is served now."""
        if self._version is None:
            return True  # there was no update: it serves what all serve, the weights that it was built with
        while self._served is not None:
            weights, version = self._served
            try:
                served = await self._ask(worker_id, "update_weights", weights, version)
            except (HandleLostError, EngineCallError) as error:
                if self._version != version:
                    continue  # they were replaced meanwhile
                # Their trainer or their folder has gone, or it cannot read them: another process of it could not, either.
                log.warning("%s has to wait for the next update of the weights: %s", worker_id, error)
                return False
            if self._version == version:
                if served == version and worker_id in self._queue().instances:
                    self._queue().have_weights(worker_id, version)
                    self._weights_have_come()
                return bool(served == version)
        return False

    async def _versions(self) -> dict[str, int]:
        living = self._living_ids()
        # To the end of each: instances do not wait for each other, so none is left alone early.
        calls = {worker_id: self._ask(worker_id, "get_version") for worker_id in living}
        versions = await gather_all(self.role, "get_version", calls, grace_s=None)
        return dict(zip(living, versions, strict=True))

    def _reachable_ids(self) -> list[str]:
        """Of those that answer, as far as is known."""
        return [id_ for id_ in self._living_ids() if self._queue().instances[id_].health is not Health.SUSPECT]

    async def _answering_ids(self) -> list[str]:
        """Of those that answer now."""
        living = self._living_ids()
        answers = await asyncio.gather(*map(self._answers, living))
        return [worker_id for worker_id, answered in zip(living, answers, strict=True) if answered]

    async def _answers(self, worker_id: str) -> bool:
        try:
            await require_answer(self.scheduler, worker_id, self.scheduler.timeouts.health_s, or_busy=False)
        except CallError:
            return False
        return True

    def _served_by(self, failures: Mapping[str, Exception]) -> tuple[tuple[str, ...], dict[str, str]]:
        """The instances that have the weights that are served, and why the others have not; ``failures`` of the last update."""
        updated: list[str] = []
        failed: dict[str, str] = {}
        for id_, instance in self._queue().instances.items():
            if instance.health.serves:
                updated.append(id_)
            else:
                reason = failures.get(id_) or instance.error or f"it is {instance.health.value}"
                failed[id_] = str(reason).split("\n", 1)[0]
        return tuple(updated), failed

    def _serving_ids(self) -> list[str]:
        return [instance.instance_id for instance in self._queue().instances.values() if instance.serves]

    def _processes(self, ids: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """Of these workers: each with how often it was built anew."""
        return tuple((worker_id, self._builds[worker_id]) for worker_id in ids)

    @contextlib.asynccontextmanager
    async def _held(self, in_flight: InFlight, timeout: float | None) -> AsyncIterator[None]:
        """For an update, what becomes of requests that are in flight; no other starts meanwhile unless they continue."""
        by = f"hold {next(_holds)}"  # of its own: neither the script nor another hold lets go what this one holds
        requests = self._queue()
        async with self._in_turn(timeout) as left_s:
            with self._updating():
                try:
                    if in_flight == "finish":  # what has no whole weights finishes nothing
                        requests.suspend(by)
                        self._take_back_stale()
                    if in_flight != "continue":
                        await self._pause(in_flight, left_s(), by=by)
                    yield
                finally:
                    requests.resume(by)

    async def _rebuild(self, worker_id: str) -> bool:
        await self._has_room.wait()
        return await super()._rebuild(worker_id)


async def _all_that_answer(
    updates: Mapping[str, asyncio.Task[None]], sending: asyncio.Future[Any] | None
) -> dict[str, Exception]:
    """Wait for all updates or, once what they wait for has failed, for those that end soon; the failures, earliest first."""
    failures: dict[str, Exception] = {}

    def ended(worker_id: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            failures[worker_id] = error

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
        await everything  # soon, and then it is known of each instance that it has not the weights
        raise
    return failures
