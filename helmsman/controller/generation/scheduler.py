"""GenerateScheduler: owns every generation request from its submission to its one end.

Everything here runs on one event loop, so nothing is locked; but whatever was true before an ``await`` is looked at again after
it. Time is the loop's, so that the same code runs on a virtual clock (virtual_time.py).
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from helmsman.api.errors import HelmsmanError, InstanceLostError, RequestDeadlineError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.controller.generation.health import Health
from helmsman.controller.generation.instance import Instance
from helmsman.controller.generation.request import RequestOptions, RequestState, Ticket
from helmsman.controller.generation.retries import RetryPolicy, RetryUnbegun
from helmsman.controller.generation.routing import LeastOutstandingTokens, RoutingPolicy

_SPARE_ENTRIES = 64
_NOTHING_KEPT: Mapping[str, GenerationResult] = MappingProxyType({})


class Backend(Protocol):
    """What reaches the instances."""

    async def generate(self, instance_id: str, request: GenerationRequest) -> GenerationResult:
        """Have an instance continue a prompt. Raises InstanceLostError when the instance has gone, or was never reached: it is
        taken for dead then, with all that it has, until set_health says otherwise."""

    async def generate_samples(self, instance_id: str, requests: Sequence[GenerationRequest]) -> Sequence[GenerationResult]:
        """As generate, for several samples of one prompt; their results in order, when all have ended. Asked only for requests
        that were put ``together``."""

    async def abort(self, instance_id: str, request_ids: Sequence[str]) -> None:
        """End these requests there early; ``generate`` then returns what each has."""


class GenerateScheduler:
    """Requests of one role: queued, routed to its instances, followed to their end.

    A request that waits is given to an instance only when that can take it, so a slow instance holds up what it has and nothing
    else. When an instance is lost, its requests are tried elsewhere if ``retries`` allows, and fail with the reason if not.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        policy: RoutingPolicy | None = None,
        retries: RetryPolicy | None = None,
        max_in_flight: int | None = None,
        max_queue: int | None = None,
        why_hopeless: Callable[[], Exception | None] = lambda: None,
    ) -> None:
        """Serve no instance yet; see add.

        Args:
            policy: LeastOutstandingTokens when None.
            retries: RetryUnbegun when None.
            max_in_flight: requests that all instances together have, at most.
            max_queue: requests that wait here, at most; ``submit`` waits beyond it, ``put`` does not.
            why_hopeless: asked while requests wait and no instance serves: why none ever will, with which they fail.
        """
        self._backend = backend
        self._policy = policy or LeastOutstandingTokens()
        self._retries = retries or RetryUnbegun()
        self._max_in_flight = max_in_flight
        self._why_hopeless = why_hopeless
        self.instances: dict[str, Instance] = {}
        self.on_lost: Callable[[str, Exception], None] = lambda id_, error: self.set_health(id_, Health.DEAD, error)
        """Told of an instance that a call has found to be gone."""
        self._queue: list[tuple[tuple[int, int], Ticket]] = []
        """A heap of those that wait, some of them twice, and of some that no longer do: not more than about as many."""
        self._waiting: dict[Ticket, None] = {}
        self._open: dict[str, Ticket] = {}
        """All that have not ended, by id."""
        self._num_in_flight = 0
        self._slots = asyncio.Semaphore(max_queue) if max_queue is not None else None
        self._holds_slot: set[Ticket] = set()
        self._timers: dict[Ticket, asyncio.TimerHandle] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._watchers: list[asyncio.Future[None]] = []
        """Woken whenever an instance has one request less, one less waits, or an instance serves again."""
        self._suspended: set[str] = set()
        """By whom."""
        self._expected_version: int | None = None
        """Of the weights that were the last to be on their way to the instances."""
        self._closed = ""
        """Why it takes no requests."""

    # --- submission -------------------------------------------------------------------------------------------------------

    def put(
        self,
        requests: Iterable[GenerationRequest],
        options: RequestOptions | None = None,
        *,
        together: int = 1,
        kept: Mapping[str, GenerationResult] = _NOTHING_KEPT,
    ) -> list[Ticket]:
        """Queue all of these requests or, on an error, none.

        Args:
            together: each so many in a row are equal but for id and seed: samples of one prompt. They wait until an instance
                has room for all of them, or for as many as it ever has, and are sent by one call. Each is a request still,
                with an end of its own; what an instance gives back with tokens goes on alone.
            kept: by id, the tokens that requests go on from.
        Raises: ValueError (an id that is in use), HelmsmanError (closed), or why no instance will ever serve.
        """
        if self._closed:
            raise HelmsmanError(f"no request is taken: {self._closed}.")
        if not self._anybody_serves() and (reason := self._why_hopeless()) is not None:
            raise reason
        tickets = [Ticket(request, options or RequestOptions()) for request in requests]
        if together > 1:
            for start in range(0, len(tickets), together):
                samples = tickets[start : start + together]
                for ticket in samples:
                    ticket.together = samples
        known: set[str] = set()
        for ticket in tickets:
            if ticket.request_id in self._open or ticket.request_id in known:
                raise ValueError(
                    f"request id {ticket.request_id!r} is in use already; ids must be unique among the requests that have "
                    "not ended"
                )
            known.add(ticket.request_id)
        loop = asyncio.get_running_loop()
        for ticket in tickets:
            self._open[ticket.request_id] = ticket
            if (before := kept.get(ticket.request_id)) is not None:
                ticket.keep(before)
            self._enqueue(ticket)
            if ticket.options.deadline_s is not None:
                self._timers[ticket] = loop.call_later(ticket.options.deadline_s, self._expire, ticket)
            ticket.future.add_done_callback(lambda _, t=ticket: self._on_done(t, loop))  # type: ignore[misc]
        self.pump()
        return tickets

    async def submit(
        self,
        request: GenerationRequest,
        options: RequestOptions | None = None,
        *,
        kept: Mapping[str, GenerationResult] = _NOTHING_KEPT,
    ) -> Ticket:
        """As put for one request, once fewer than ``max_queue`` of this kind wait."""
        if self._slots is None:
            return self.put([request], options, kept=kept)[0]
        await self._slots.acquire()
        try:
            ticket = self.put([request], options, kept=kept)[0]
        except BaseException:
            self._slots.release()
            raise
        if ticket.state is RequestState.QUEUED:
            self._holds_slot.add(ticket)
        else:
            self._slots.release()
        return ticket

    async def stream(self, tickets: Iterable[Ticket]) -> AsyncIterator[Ticket]:
        """These tickets as they end, whichever way."""
        loop, ended, num_waiting = asyncio.get_running_loop(), asyncio.Queue[Ticket](), 0
        for ticket in tickets:
            num_waiting += 1
            tell = functools.partial(loop.call_soon_threadsafe, ended.put_nowait, ticket)
            ticket.future.add_done_callback(lambda _, tell=tell: tell())  # type: ignore[misc]
        for _ in range(num_waiting):
            yield await ended.get()

    # --- flow -------------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Give out what can be given out now; to be called whenever an instance has changed."""
        if self._waiting and not self._anybody_serves() and (reason := self._why_hopeless()) is not None:
            self._fail_waiting(reason)
        held: list[Ticket] = []
        while self._waiting and not self._suspended and self._room() > 0 and (ticket := self._first()) is not None:
            if ticket.future.cancelled():
                self._end_cancelled(ticket)
                continue
            samples = self._that_go_along(ticket)[: self._max_in_flight]
            able = [instance for instance in self.instances.values() if instance.has_room_for(len(samples))]
            if not able or self._room() < len(samples):
                break
            if not (fit := self._not_behind(ticket, able)):
                held.append(ticket)
                heapq.heappop(self._queue)  # it is the first
                continue
            try:
                chosen = self._policy.choose(ticket, fit)
                if chosen not in fit:
                    raise ValueError(
                        f"{type(self._policy).__name__}.choose gave {getattr(chosen, 'instance_id', chosen)!r} for request "
                        f"{ticket.request_id!r}; expected one of the {len(fit)} instances that it was given"
                    )
            except Exception as error:  # noqa: BLE001 - a policy may be the user's; whoever has caused this turn has no part in it
                self._end(ticket, RequestState.FAILED, error)
            else:
                self._admit(samples[: chosen.capacity], chosen)
        for ticket in held:
            if ticket in self._waiting:  # what the end of another has caused may have ended it
                heapq.heappush(self._queue, (ticket.order, ticket))

    def _not_behind(self, ticket: Ticket, able: Sequence[Instance]) -> Sequence[Instance]:
        """Those by which the weights of a sample do not go back."""
        if ticket.newest_version is None or self._expected_version is None:
            return able
        # What is newer than all that was ever expected was made by weights that instances were built with, and will not come.
        least = min(ticket.newest_version, self._expected_version)
        return [instance for instance in able if instance.version is None or instance.version >= least]

    def _fail_waiting(self, reason: Exception) -> None:
        for ticket in list(self._waiting):
            if ticket in self._waiting:  # what the end of another has caused may have ended it
                self._end(ticket, RequestState.FAILED, reason)

    def _room(self) -> float:
        """How many more all instances together may have."""
        return math.inf if self._max_in_flight is None else self._max_in_flight - self._num_in_flight

    def _anybody_serves(self) -> bool:
        return any(instance.health.serves for instance in self.instances.values())

    def _enqueue(self, ticket: Ticket) -> None:
        self._waiting[ticket] = None
        heapq.heappush(self._queue, (ticket.order, ticket))
        self._tidy()

    def _tidy(self) -> None:
        if len(self._queue) > 2 * len(self._waiting) + _SPARE_ENTRIES:
            self._queue = [(ticket.order, ticket) for ticket in self._waiting]
            heapq.heapify(self._queue)

    def _first(self) -> Ticket | None:
        """The first that waits, and is not held back by a turn that is under way."""
        while self._queue:
            if (ticket := self._queue[0][1]) in self._waiting:
                return ticket
            heapq.heappop(self._queue)
        return None

    def _that_go_along(self, ticket: Ticket) -> list[Ticket]:
        """Those that wait and can be sent by the same call as one that does, which is the first of them."""
        if ticket.num_kept:
            return [ticket]
        others = (each for each in ticket.together if each is not ticket and each in self._waiting)
        return [ticket, *(each for each in others if not each.num_kept)]

    def _admit(self, samples: Sequence[Ticket], instance: Instance) -> None:
        for ticket in samples:
            ticket.to(RequestState.ADMITTED)
            self._waiting.pop(ticket, None)
            self._free_slot(ticket)
            ticket.instance = instance
            instance.take(ticket)
            self._num_in_flight += 1
        call = asyncio.get_running_loop().create_task(self._run(samples, instance))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _run(self, samples: Sequence[Ticket], instance: Instance) -> None:
        # A turn of the loop later: requests may have ended, or the instance been left, or everything been suspended.
        admitted = [each for each in samples if each.instance is instance and each.state is RequestState.ADMITTED]
        if self._suspended or not instance.serves:
            for ticket in admitted:
                self._requeue(ticket)
            self.pump()
            return
        attempts: dict[Ticket, int] = {}
        for ticket in admitted:
            if not ticket.future.running() and not ticket.future.set_running_or_notify_cancel():
                self._end_cancelled(ticket)
                continue
            ticket.to(RequestState.RUNNING)
            ticket.sent_to = instance.instance_id
            ticket.num_attempts += 1
            attempts[ticket] = ticket.num_attempts
        if len(attempts) < len(admitted):  # there is room again; soon, since what that causes must not come before the call
            asyncio.get_running_loop().call_soon(self.pump)
        lost: InstanceLostError | None = None
        outcomes = await self._outcomes(instance.instance_id, list(attempts)) if attempts else []
        for (ticket, attempt), outcome in zip(attempts.items(), outcomes, strict=True):
            if ticket.instance is instance and ticket.num_attempts == attempt and ticket.is_running:
                self._settle(ticket, outcome)
                if isinstance(outcome, InstanceLostError):
                    lost = outcome
        if lost is not None and instance.health not in (Health.DEAD, Health.RESTARTING):
            self.on_lost(instance.instance_id, lost)  # or the requests would go there again, and again
        self.pump()

    async def _outcomes(self, instance_id: str, samples: Sequence[Ticket]) -> Sequence[GenerationResult | BaseException]:
        """Send one request, or several by one call; the result or error of each."""
        requests = [ticket.to_send() for ticket in samples]
        answers: Sequence[object]
        try:
            if len(requests) == 1:
                answers = [await self._backend.generate(instance_id, requests[0])]
            else:
                answers = await self._backend.generate_samples(instance_id, requests)
            results = [answer for answer in answers if isinstance(answer, GenerationResult)]
            if not len(answers) == len(results) == len(requests):  # the engine may be the user's
                raise TypeError(
                    f"{instance_id} answered {samples[0].request_id!r} with {[type(answer).__name__ for answer in answers]}; "
                    f"expected {len(requests)} GenerationResult"
                )
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                self.close("its event loop has ended")  # nobody else cancels these tasks
            return [_cancelled_call(ticket, instance_id, error) for ticket in samples]
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the answer to these requests, and others must go on
            return [error] * len(samples)
        return results

    def _settle(self, ticket: Ticket, outcome: GenerationResult | BaseException) -> None:
        """Take in how an attempt ended."""
        if isinstance(outcome, InstanceLostError):
            self._settle_lost(ticket, outcome)
        elif isinstance(outcome, BaseException):
            self._end(ticket, RequestState.FAILED, outcome)
        elif outcome.stop_reason != "abort":
            self._end(ticket, RequestState.DONE, ticket.merged(outcome))
        elif ticket.is_recalled and not ticket.is_aborted and not self._closed:
            ticket.keep(outcome)
            if (reason := ticket.kept_end) is not None:
                self._end(ticket, RequestState.DONE, ticket.merged(None, reason))
            else:
                self._requeue(ticket)
        else:
            self._end_aborted(ticket, outcome)

    def _settle_lost(self, ticket: Ticket, lost: InstanceLostError) -> None:
        try:
            is_retried = not ticket.is_aborted and not self._closed and self._retries.may_retry(ticket, lost)
        except Exception as error:  # noqa: BLE001 - a policy may be the user's; the other requests of the instance go on
            self._end(ticket, RequestState.FAILED, error)
            return
        if ticket.is_aborted:
            self._end_aborted(ticket, None)
        elif is_retried:
            self._requeue(ticket)
        else:
            self._end(ticket, RequestState.FAILED, lost.__cause__ or lost)  # what the instance died of says more

    def _end_aborted(self, ticket: Ticket, last: GenerationResult | None) -> None:
        result = ticket.merged(last, "abort")
        self._end(ticket, RequestState.PARTIAL if result.token_ids else RequestState.ABORTED, result)

    def _requeue(self, ticket: Ticket) -> None:
        """Back to the queue, to the place that its age gives it."""
        self._release(ticket)
        ticket.to(RequestState.QUEUED)
        ticket.is_recalled = False
        self._enqueue(ticket)

    def _release(self, ticket: Ticket) -> None:
        if ticket.instance is not None:
            ticket.instance.give_back(ticket)
            ticket.instance = None
            self._num_in_flight -= 1
            self._wake()

    def _wake(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    def _end(self, ticket: Ticket, state: RequestState, outcome: GenerationResult | BaseException) -> None:
        """Give a request its one outcome."""
        ticket.to(state)
        self._forget(ticket)
        if not ticket.future.running() and not ticket.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, BaseException):
            ticket.future.set_exception(outcome)
        else:
            ticket.future.set_result(outcome)

    def _on_done(self, ticket: Ticket, loop: asyncio.AbstractEventLoop) -> None:
        """Called in whichever thread ended the future; only a cancellation is not known here yet."""
        if ticket.future.cancelled():
            loop.call_soon_threadsafe(self._cancelled, ticket)

    def _cancelled(self, ticket: Ticket) -> None:
        """Its future was cancelled before it was sent."""
        if not ticket.state.is_end:
            self._end_cancelled(ticket)
            self.pump()

    def _end_cancelled(self, ticket: Ticket) -> None:
        ticket.to(RequestState.ABORTED)
        self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        self._waiting.pop(ticket, None)
        self._tidy()
        self._release(ticket)
        self._wake()
        ticket.together = ()  # they refer to each other
        self._open.pop(ticket.request_id, None)
        self._free_slot(ticket)
        if (timer := self._timers.pop(ticket, None)) is not None:
            timer.cancel()

    def _free_slot(self, ticket: Ticket) -> None:
        if ticket in self._holds_slot and self._slots is not None:
            self._holds_slot.remove(ticket)
            self._slots.release()

    def _expire(self, ticket: Ticket) -> None:
        """Its deadline has passed: it ends now, whatever its instance does."""
        self._timers.pop(ticket, None)
        instance = ticket.instance
        error = RequestDeadlineError(
            request_id=ticket.request_id,
            state=ticket.state.value,
            instance=instance.instance_id if instance else "",
            limit_s=ticket.options.deadline_s or 0.0,
        )
        was_running = ticket.state is RequestState.RUNNING
        self._end(ticket, RequestState.FAILED, error)
        if was_running and instance is not None:
            self._abort_at(instance, [ticket])
        self.pump()

    # --- early ends -------------------------------------------------------------------------------------------------------

    async def abort(self, request_ids: Collection[str] | None = None) -> int:
        """End these requests (None: all that are open now) early, with what they have; returns how many.

        What waits ends at once. What runs ends when its instance has given it back, which is not waited for; see wait_idle.
        What is put meanwhile is not meant, nor what waits in ``submit`` for the room that this makes.
        """
        chosen = self._chosen(request_ids)
        running: dict[Instance, list[Ticket]] = {}
        for ticket in chosen:
            if ticket.state.is_end:  # by what the end of another has caused
                continue
            ticket.is_aborted = True
            if ticket.is_running and ticket.instance is not None:
                running.setdefault(ticket.instance, []).append(ticket)
            else:
                self._end_aborted(ticket, None)
        await self._tell_all(running)
        self.pump()
        return len(chosen)

    def _chosen(self, request_ids: Collection[str] | None) -> list[Ticket]:
        """Those of these requests (None: all) that have not ended."""
        if request_ids is None:
            return list(self._open.values())
        return [self._open[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._open]

    async def _tell_all(self, running: Mapping[Instance, Sequence[Ticket]]) -> None:
        """Have instances end these requests; what a lost instance had ends by its loss."""
        outcomes = await asyncio.gather(*(self._tell(*each) for each in running.items()), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, InstanceLostError):
                raise outcome

    async def _tell(self, instance: Instance, tickets: Sequence[Ticket]) -> None:
        """Wait for the instance's answer, or until it has none of them any more: what is dead may never answer."""
        call = self._abort_at(instance, tickets)
        left = asyncio.ensure_future(self._until(lambda: all(ticket.instance is not instance for ticket in tickets)))
        try:
            await asyncio.wait([call, left], return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
        if call.done():
            call.result()

    def _abort_at(self, instance: Instance, tickets: Sequence[Ticket]) -> asyncio.Task[None]:
        async def tell() -> None:
            await self._backend.abort(instance.instance_id, [ticket.request_id for ticket in tickets])

        call = asyncio.get_running_loop().create_task(tell())
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        call.add_done_callback(lambda call: call.cancelled() or call.exception())  # seen, also where nobody waits for it
        return call

    def suspend(self, by: str = "") -> None:
        """Once this has returned, no request starts until resume, whatever it was waiting for. What runs goes on, and
        submission stays open.

        Args:
            by: who suspends: what several have suspended starts when each of them has resumed.
        """
        self._suspended.add(by)
        for ticket in list(self._open.values()):
            if ticket.state is RequestState.ADMITTED:
                self._requeue(ticket)
        self._wake()

    def resume(self, by: str = "") -> None:
        """Start requests again, unless others keep it suspended."""
        self._suspended.discard(by)
        self.pump()

    @property
    def is_suspended(self) -> bool:
        """Whether it is."""
        return bool(self._suspended)

    async def wait_idle(self) -> None:
        """Wait until no instance has a request and, unless it is suspended, none waits: what is put meanwhile is waited for,
        too. It is so when this returns, before anything else happens on the event loop."""
        await self._until(lambda: self._num_in_flight == 0 and (self.is_suspended or not self._waiting))

    async def wait_ended(self) -> None:
        """Wait until instances have ended or given back what they have been sent by now; what they are sent later is not
        waited for."""
        await self._until(_have_ended([each for each in self._open.values() if each.is_running]))

    async def take_back(self) -> None:
        """Take back what instances have been sent by now, and wait until they have given it back: it waits again, with the
        tokens that it has, and goes on anywhere; what came to its end on the way is DONE. To be called when suspended, or it
        starts again at once.

        What an instance does not give back stays where it is until that instance answers, its call reaches its limit, or it is
        found to be dead; this waits for it, and may be cancelled: it goes on then, and still comes back when it is given back.

        Raises: what an instance raised that was asked.
        """
        have_ended = _have_ended(
            [ticket for tickets in self._running_at(self.instances.values()).values() for ticket in tickets]
        )
        await self._recall(self.instances.values())
        await self._until(have_ended)

    async def _recall(self, instances: Iterable[Instance]) -> None:
        """Tell instances to give back what they have been sent, without waiting for it."""
        running = self._running_at(instances)
        for tickets in running.values():
            for ticket in tickets:
                ticket.is_recalled = True
        await self._tell_all(running)

    @staticmethod
    def _running_at(instances: Iterable[Instance]) -> dict[Instance, list[Ticket]]:
        running = {instance: [ticket for ticket in instance.tickets if ticket.is_running] for instance in instances}
        return {instance: tickets for instance, tickets in running.items() if tickets}

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._watchers.append(watcher)
            try:
                await watcher
            finally:
                if watcher in self._watchers:
                    self._watchers.remove(watcher)

    # --- instances --------------------------------------------------------------------------------------------------------

    def add(self, instance_id: str, capacity: int, health: Health = Health.HEALTHY) -> Instance:
        """Serve by one more instance.

        Args:
            capacity: requests that it is given at once, at most.
            health: STALE where it has to get the weights first.
        """
        if instance_id in self.instances:
            raise ValueError(f"instance {instance_id!r} is here already")
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; expected 1 or more")
        instance = self.instances[instance_id] = Instance(instance_id, capacity, health)
        self.pump()
        return instance

    def expect_weights(self, version: int) -> None:
        """Weights are on their way to the instances: a request that has tokens by them goes on only where they have arrived."""
        self._expected_version = version
        for instance in self.instances.values():
            if instance.version is None:
                instance.version = version - 1

    def have_weights(self, instance_id: str, version: int) -> None:
        """Weights have arrived at an instance."""
        self.instances[instance_id].version = version
        self.pump()

    def set_health(self, instance_id: str, health: Health, error: Exception | None = None) -> None:
        """Take in what supervision has found. What a dead instance had is lost now, also where its calls still hang."""
        instance = self.instances[instance_id]
        instance.health = health
        instance.error = None if health.serves else error or instance.error
        if health is Health.DEAD:
            for ticket in list(instance.tickets):
                if ticket.instance is not instance:
                    continue  # what the end of another has caused has taken it away
                if ticket.is_running:
                    self._settle(ticket, self._lost(instance))
                else:
                    self._requeue(ticket)
        self.pump()

    def _lost(self, instance: Instance) -> InstanceLostError:
        """What happened to a request that the instance had."""
        why = instance.error
        if isinstance(why, InstanceLostError):  # met by another request, which it may not have begun
            return InstanceLostError(instance_id=instance.instance_id, reason=why.reason, may_have_begun=True)
        lost = InstanceLostError(instance_id=instance.instance_id, reason=str(why or "it is dead"), may_have_begun=True)
        lost.__cause__ = why
        return lost

    async def drain(self, *instance_ids: str, migrate: bool = False) -> object:
        """Give these instances nothing more, and wait until they have nothing; then remove may follow, or undrain.

        Args:
            migrate: take back what they have, to be continued elsewhere with the tokens so far, instead of waiting for its end.

        When the wait is cancelled they serve again, but for those that somebody else drains, too. Returns: what undrain takes
        to end this drain alone. Raises: HelmsmanError when undrain takes it back.
        """
        mark, chosen = object(), [self.instances[instance_id] for instance_id in instance_ids]
        for instance in chosen:
            instance.drains.add(mark)
        try:
            for ticket in [ticket for instance in chosen for ticket in instance.tickets]:
                if ticket.state is RequestState.ADMITTED:
                    self._requeue(ticket)
            self.pump()
            if migrate:
                await self.recall(*instance_ids)
            await self._until(
                lambda: any(mark not in each.drains for each in chosen) or not any(each.tickets for each in chosen)
            )
            if taken_back := [each.instance_id for each in chosen if mark not in each.drains]:
                raise HelmsmanError(f"{', '.join(taken_back)} got requests again, by undrain, before the drain was through.")
            return mark
        except BaseException:
            for instance in chosen:
                instance.drains.discard(mark)
            self.pump()
            raise

    def undrain(self, instance_id: str, drain: object = None) -> None:
        """Give an instance requests again, whoever has drained it or does so now; with a ``drain``, unless somebody else does.
        Nothing happens when it is gone."""
        if (instance := self.instances.get(instance_id)) is None:
            return
        instance.drains = {mark for mark in instance.drains if drain not in (None, mark)}
        self._wake()
        self.pump()

    async def recall(self, *instance_ids: str) -> None:
        """Have instances, as far as they are still there, give back what they run, to be continued elsewhere with the tokens so
        far; does not wait for it."""
        await self._recall([self.instances[instance_id] for instance_id in instance_ids if instance_id in self.instances])

    def remove(self, instance_id: str) -> None:
        """Serve without an instance that has nothing. Raises: ValueError when it has something; drain it before."""
        instance = self.instances[instance_id]
        if instance.tickets:
            raise ValueError(f"instance {instance_id!r} still has {len(instance.tickets)} requests; drain it first")
        del self.instances[instance_id]
        self.pump()

    # --- figures and end --------------------------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Requests that instances have."""
        return self._num_in_flight

    def running(self, request_ids: Collection[str] | None = None) -> dict[str, list[str]]:
        """Instance id -> ids of these requests (None: all) that it has been sent."""
        found: dict[str, list[str]] = {}
        for ticket in self._chosen(request_ids):
            if ticket.is_running and ticket.instance is not None:
                found.setdefault(ticket.instance.instance_id, []).append(ticket.request_id)
        return found

    def close(self, reason: str = "the generation scheduler was closed") -> None:
        """Fail what waits and take nothing more; what runs ends with its instance. Idempotent."""
        self._closed = self._closed or reason
        for ticket in list(self._open.values()):
            if ticket.state in (RequestState.QUEUED, RequestState.ADMITTED):
                error = HelmsmanError(f"request {ticket.request_id!r} was not sent: {reason}.")
                self._end(ticket, RequestState.FAILED, error)


def _cancelled_call(ticket: Ticket, instance_id: str, cause: BaseException) -> HelmsmanError:
    error = HelmsmanError(f"request {ticket.request_id!r}: the call to {instance_id} was cancelled.")
    error.__cause__ = cause
    return error


def _have_ended(tickets: Iterable[Ticket]) -> Callable[[], bool]:
    """Whether the attempts that these are at now have ended. All calls of it together look at each ticket about once."""
    attempts = [(ticket, ticket.num_attempts) for ticket in tickets]

    def have_ended() -> bool:
        while attempts and not (attempts[-1][0].is_running and attempts[-1][0].num_attempts == attempts[-1][1]):
            attempts.pop()
        return not attempts

    return have_ended
