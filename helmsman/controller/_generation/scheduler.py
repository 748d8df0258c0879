"""GenerateScheduler: owns every generation request from its submission to its one end.

Everything here runs on one event loop, so nothing is locked; but a condition from before an
``await`` is checked again after it. Time is the loop's, so that the same code runs on a virtual
clock (helmsman.testing.run_virtually).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from helmsman.api.errors import HelmsmanError, InstanceLostError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.controller._generation.health import Health
from helmsman.controller._generation.request import Instance, RequestOptions, RequestState, Ticket
from helmsman.controller._generation.request_lifecycle import Backend, RequestFlow
from helmsman.controller._generation.retries import RetryPolicy
from helmsman.controller._generation.routing import RoutingPolicy

_NOTHING_KEPT: Mapping[str, GenerationResult] = MappingProxyType({})


class GenerateScheduler:
    """Requests of one role: queued, routed to its instances, followed to their end.

    A request that waits is given to an instance only when that can take it, so a slow instance
    holds up what it has and nothing else. When an instance is lost, its requests are tried
    elsewhere if ``retries`` allows, and fail with the reason if not.
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
            backend: reaches the instances.
            policy: LeastOutstandingTokens when None.
            retries: RetryUnbegun when None.
            max_in_flight: requests that all instances together have, at most.
            max_queue: requests that wait here, at most; ``submit`` waits beyond it, ``put`` does
                not.
            why_hopeless: asked while requests wait and no instance serves: why none ever will, with
                which they fail.
        """
        self._flow = RequestFlow(backend, policy, retries, max_in_flight, why_hopeless)
        if max_queue is not None and max_queue < 1:
            raise ValueError(f"max_queue is {max_queue}; expected 1 or more")
        self._flow.slots = asyncio.Semaphore(max_queue) if max_queue is not None else None
        self.instances = self._flow.instances

    # --- submission -------------------------------------------------------------------------------

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
            together: each so many in a row are equal but for id and seed: samples of one prompt.
                They wait until an instance has room for all of them, or for as many as it ever has,
                and are sent by one call. Each is a request still, with an end of its own; what an
                instance gives back with tokens goes on alone.
            kept: by id, the tokens that requests go on from.
        Raises: ValueError (an id that is in use), HelmsmanError (closed), or why no instance will
            ever serve.
        """
        if self._flow.closed:
            raise HelmsmanError(f"no request is taken: {self._flow.closed}.")
        if (reason := self._flow.why_none_serves()) is not None:
            raise reason
        tickets = [Ticket(request, options or RequestOptions()) for request in requests]
        if together > 1:
            for start in range(0, len(tickets), together):
                samples = tickets[start : start + together]
                for ticket in samples:
                    ticket.together = samples
        known: set[str] = set()
        for ticket in tickets:
            if ticket.request_id in self._flow.open or ticket.request_id in known:
                raise ValueError(
                    f"request id {ticket.request_id!r} is in use already; ids must be unique "
                    "among the requests that have "
                    "not ended"
                )
            known.add(ticket.request_id)
        for ticket in tickets:
            self._flow.enter(ticket, kept.get(ticket.request_id))
        self._flow.pump()
        return tickets

    async def submit(
        self,
        request: GenerationRequest,
        options: RequestOptions | None = None,
        *,
        kept: Mapping[str, GenerationResult] = _NOTHING_KEPT,
    ) -> Ticket:
        """As put for one request, once fewer than ``max_queue`` of this kind wait."""
        if self._flow.slots is None:
            return self.put([request], options, kept=kept)[0]
        await self._flow.slots.acquire()
        try:
            ticket = self.put([request], options, kept=kept)[0]
        except BaseException:
            self._flow.slots.release()
            raise
        if ticket.state is RequestState.QUEUED:
            self._flow.holds_slot.add(ticket)
        else:
            self._flow.slots.release()
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

    # --- early ends -------------------------------------------------------------------------------

    async def abort(self, request_ids: Collection[str] | None = None) -> int:
        """End these requests (None: all that are open now) early, with what they have; returns how
        many.

        What waits ends at once. What runs ends when its instance has given it back, which is not
        waited for; see wait_idle. What is put meanwhile is not meant, nor what waits in ``submit``
        for the room that this makes.
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
                self._flow.end_aborted(ticket, None)
        await self._tell_all(running)
        self._flow.pump()
        return len(chosen)

    def _chosen(self, request_ids: Collection[str] | None) -> list[Ticket]:
        if request_ids is None:
            return list(self._flow.open.values())
        return [
            self._flow.open[request_id]
            for request_id in dict.fromkeys(request_ids)
            if request_id in self._flow.open
        ]

    async def _tell_all(self, running: Mapping[Instance, Sequence[Ticket]]) -> None:
        """Have instances end these requests; what a lost instance had ends by its loss."""
        outcomes = await asyncio.gather(
            *(self._tell(*each) for each in running.items()), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, InstanceLostError):
                raise outcome

    async def _tell(self, instance: Instance, tickets: Sequence[Ticket]) -> None:
        """Wait for the instance's answer, or until it has none of them any more: what is dead may
        never answer.
        """
        call = self._flow.abort_at(instance, tickets)
        left = asyncio.ensure_future(
            self._flow.until(lambda: all(ticket.instance is not instance for ticket in tickets))
        )
        try:
            await asyncio.wait([call, left], return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
        if call.done():
            call.result()

    def suspend(self, by: str = "") -> None:
        """Once this has returned, no request starts until resume. Running requests go on, and
        submission stays open.

        Args:
            by: who suspends: what several have suspended starts when each of them has resumed.
        """
        self._flow.suspended.add(by)
        for ticket in list(self._flow.open.values()):
            if ticket.state is RequestState.ADMITTED:
                self._flow.requeue(ticket)
        self._flow.wake()

    def resume(self, by: str = "") -> None:
        """Start requests again, unless others keep it suspended."""
        self._flow.suspended.discard(by)
        self._flow.pump()

    @property
    def is_suspended(self) -> bool:
        """Whether it is."""
        return bool(self._flow.suspended)

    async def wait_idle(self) -> None:
        """Wait until no instance has a request and, unless it is suspended, none waits: what is put
        meanwhile is waited for, too. It is so when this returns, before anything else happens on
        the event loop.
        """
        await self._flow.until(
            lambda: self._flow.num_in_flight == 0 and (self.is_suspended or not self._flow.waiting)
        )

    async def wait_ended(self) -> None:
        """Wait until instances have ended or given back what they have been sent by now; what they
        are sent later is not waited for.
        """
        await self._flow.until(
            _have_ended([each for each in self._flow.open.values() if each.is_running])
        )

    async def take_back(self) -> None:
        """Take back what instances have been sent by now, and wait until they have given it back:
        it waits again, with the tokens that it has, and goes on anywhere; what came to its end on
        the way is DONE. To be called when suspended, or it starts again at once.

        What an instance does not give back stays where it is until that instance answers, its call
        reaches its limit, or it is found to be dead; this waits for it, and may be cancelled: it
        goes on then, and still comes back when it is given back.

        Raises: what an instance raised that was asked.
        """
        have_ended = _have_ended(
            [
                ticket
                for tickets in self._running_at(self.instances.values()).values()
                for ticket in tickets
            ]
        )
        await self._recall(self.instances.values())
        await self._flow.until(have_ended)

    async def _recall(self, instances: Iterable[Instance]) -> None:
        running = self._running_at(instances)
        for tickets in running.values():
            for ticket in tickets:
                ticket.is_recalled = True
        await self._tell_all(running)

    @staticmethod
    def _running_at(instances: Iterable[Instance]) -> dict[Instance, list[Ticket]]:
        running = {
            instance: [ticket for ticket in instance.tickets if ticket.is_running]
            for instance in instances
        }
        return {instance: tickets for instance, tickets in running.items() if tickets}

    # --- instances --------------------------------------------------------------------------------

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
        self._flow.pump()
        return instance

    def expect_weights(self, version: int) -> None:
        """Weights are on their way to the instances: a request that has tokens by them goes on only
        where they have arrived.
        """
        self._flow.expected_version = version
        for instance in self.instances.values():
            if instance.version is None:
                instance.version = version - 1

    def have_weights(self, instance_id: str, version: int) -> None:
        """Weights have arrived at an instance."""
        self.instances[instance_id].version = version
        self._flow.pump()

    async def drain(self, *instance_ids: str, migrate: bool = False) -> object:
        """Give these instances nothing more, and wait until they have nothing; then remove may
        follow, or undrain.

        Args:
            migrate: take back what they have, to be continued elsewhere with the tokens so far,
                instead of waiting for its end.

        When the wait is cancelled they serve again, but for those that somebody else drains, too.
            Returns: what undrain takes
        to end this drain alone. Raises: HelmsmanError when undrain takes it back.
        """
        mark, chosen = object(), [self.instances[instance_id] for instance_id in instance_ids]
        for instance in chosen:
            instance.drains.add(mark)
        try:
            for ticket in [ticket for instance in chosen for ticket in instance.tickets]:
                if ticket.state is RequestState.ADMITTED:
                    self._flow.requeue(ticket)
            self._flow.pump()
            if migrate:
                await self.recall(*instance_ids)
            await self._flow.until(
                lambda: (
                    any(mark not in each.drains for each in chosen)
                    or not any(each.tickets for each in chosen)
                )
            )
            if taken_back := [each.instance_id for each in chosen if mark not in each.drains]:
                raise HelmsmanError(
                    f"{', '.join(taken_back)} got requests again, by undrain, before the drain "
                    "was through."
                )
            return mark
        except BaseException:
            for instance in chosen:
                instance.drains.discard(mark)
            self._flow.pump()
            raise

    def undrain(self, instance_id: str, drain: object = None) -> None:
        """Give an instance requests again, and end all drains of it; with a ``drain``, end that one
        alone. Nothing happens when it is gone.
        """
        if (instance := self.instances.get(instance_id)) is None:
            return
        instance.drains = {mark for mark in instance.drains if drain not in (None, mark)}
        self._flow.wake()
        self._flow.pump()

    async def recall(self, *instance_ids: str) -> None:
        """Have instances, as far as they are still there, give back what they run, to be continued
        elsewhere with the tokens so far; does not wait for it.
        """
        await self._recall(
            [
                self.instances[instance_id]
                for instance_id in instance_ids
                if instance_id in self.instances
            ]
        )

    def remove(self, instance_id: str) -> None:
        """Serve without an instance that has nothing. Raises: ValueError when it has something;
        drain it before.
        """
        instance = self.instances[instance_id]
        if instance.tickets:
            raise ValueError(
                f"instance {instance_id!r} still has {len(instance.tickets)} requests; drain it "
                "first"
            )
        del self.instances[instance_id]
        self._flow.pump()

    def set_health(self, instance_id: str, health: Health, error: Exception | None = None) -> None:
        """Take in what supervision has found. What a dead instance had is lost now, also where its
        calls still hang.
        """
        self._flow.set_health(instance_id, health, error)

    def on_lost(self, call: Callable[[str, Exception], None]) -> None:
        """Call a function with an instance that a call has found to be gone, and why, in place of
        set_health.
        """
        self._flow.on_lost = call

    def close(self, reason: str = "the generation scheduler was closed") -> None:
        """Fail what waits and take nothing more; what runs ends with its instance. Idempotent."""
        self._flow.close(reason)

    # --- figures ----------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Requests that wait."""
        return len(self._flow.waiting)

    @property
    def num_in_flight(self) -> int:
        """Requests that instances have."""
        return self._flow.num_in_flight

    def running(self, request_ids: Collection[str] | None = None) -> dict[str, list[str]]:
        """Instance id -> ids of these requests (None: all) that it has been sent."""
        found: dict[str, list[str]] = {}
        for ticket in self._chosen(request_ids):
            if ticket.is_running and ticket.instance is not None:
                found.setdefault(ticket.instance.instance_id, []).append(ticket.request_id)
        return found


def _have_ended(tickets: Iterable[Ticket]) -> Callable[[], bool]:
    """Whether the attempts that these are at now have ended. All calls of it together look at each
    ticket about once.
    """
    attempts = [(ticket, ticket.num_attempts) for ticket in tickets]

    def have_ended() -> bool:
        while attempts and not (
            attempts[-1][0].is_running and attempts[-1][0].num_attempts == attempts[-1][1]
        ):
            attempts.pop()
        return not attempts

    return have_ended
