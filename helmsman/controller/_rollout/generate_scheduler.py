"""GenerateScheduler: accepts, aborts and suspends requests, on a RequestFlow that moves them.

Everything here runs on one event loop, so there are no locks; conditions checked before an
``await`` are checked again after it. Time is the loop's clock, so the same code runs on a virtual
clock (helmsman.testing.run_virtually).
"""

from __future__ import annotations

import asyncio
import collections
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from helmsman.api.errors import HelmsmanError, InstanceLostError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.run_state import RequestSnapshot, RolloutSnapshot
from helmsman.controller._rollout.health import Health
from helmsman.controller._rollout.request import Instance, RequestOptions, RequestState, Ticket
from helmsman.controller._rollout.request_lifecycle import InstanceBackend, RequestFlow
from helmsman.controller._rollout.retries import RetryPolicy
from helmsman.controller._rollout.routing import RoutingPolicy

_MOST_DESCRIBED = 20
_NOTHING_KEPT: Mapping[str, GenerationResult] = MappingProxyType({})


class GenerateScheduler:
    """Queues the generation requests of one role and routes them to its instances.

    A queued request is sent only to an instance that has room, so a slow instance delays no request
    but its own. When an instance is lost, its requests are retried on others if ``retries`` allows,
    and otherwise fail with the reason.

    Args:
        backend: Connection to the instances.
        policy: Routing policy; LeastOutstandingTokens when None.
        retries: Retry policy; RetryUnbegun when None.
        max_in_flight: Maximum number of requests at all instances together; None for no limit.
        max_queue: Maximum number of queued requests from ``submit``, which waits for room; ``put``
            ignores it. None for no limit.
        why_hopeless: Called while requests are queued and no instance is serving. Returns the error
            with which they fail when no instance will ever serve, else None.
        record: Records an event of a request: kind, name, number and value.

    Raises:
        ValueError: If ``max_in_flight`` or ``max_queue`` is below 1.
    """

    def __init__(
        self,
        backend: InstanceBackend,
        *,
        policy: RoutingPolicy | None = None,
        retries: RetryPolicy | None = None,
        max_in_flight: int | None = None,
        max_queue: int | None = None,
        why_hopeless: Callable[[], Exception | None] = lambda: None,
        record: Callable[..., None] = lambda *_: None,
    ) -> None:
        self._flow = RequestFlow(backend, policy, retries, max_in_flight, why_hopeless)
        if max_queue is not None and max_queue < 1:
            raise ValueError(f"max_queue is {max_queue}; expected 1 or more")
        self._flow.slots = asyncio.Semaphore(max_queue) if max_queue is not None else None
        self._flow.record = record
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
            requests: The requests, with ids that no open request has.
            options: Options of all of them; the defaults when None.
            together: Samples per prompt: each run of this many requests differs only in id and
                seed. A run waits for an instance with room for all of it (or for as many as the
                instance ever takes) and is sent in one call. Each request still ends on its own,
                and one that comes back with partial tokens continues alone.
            kept: Request id -> partial result to continue from.

        Returns:
            One ticket per request, in order.

        Raises:
            ValueError: If an id is in use.
            HelmsmanError: If the scheduler is closed.
            Exception: The error of ``why_hopeless``, if no instance will ever serve.
        """
        if self._flow.closed:
            raise HelmsmanError(f"request rejected: {self._flow.closed}.")
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
        """Queue one request, after waiting until fewer than ``max_queue`` such requests are queued.

        Args:
            request: The request, with an id that no open request has.
            options: Its options; the defaults when None.
            kept: Request id -> partial result to continue from.

        Returns:
            The ticket of the request.

        Raises:
            ValueError: If the id is in use.
            HelmsmanError: If the scheduler is closed.
            Exception: The error of ``why_hopeless``, if no instance will ever serve.
        """
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
        """Yield these tickets as they end, in any way."""
        loop, ended, num_waiting = asyncio.get_running_loop(), asyncio.Queue[Ticket](), 0
        for ticket in tickets:
            num_waiting += 1
            tell = functools.partial(loop.call_soon_threadsafe, ended.put_nowait, ticket)
            ticket.future.add_done_callback(lambda _, tell=tell: tell())  # type: ignore[misc]
        for _ in range(num_waiting):
            yield await ended.get()

    # --- early ends -------------------------------------------------------------------------------

    async def abort(self, request_ids: Collection[str] | None = None) -> int:
        """Abort requests, keeping their partial results.

        Queued requests end at once. Running requests end when their instance has returned them,
        which this does not wait for; see wait_idle. Requests that are submitted during the call, or
        that wait in ``submit`` for room, are not affected.

        Args:
            request_ids: Ids of the requests; None for all that are open now. Others are ignored.

        Returns:
            The number of requests aborted.
        """
        chosen = self._chosen(request_ids)
        running: dict[Instance, list[Ticket]] = {}
        for ticket in chosen:
            if ticket.state.is_end:  # a callback of another request ended it
                continue
            ticket.is_aborted = True
            if ticket.is_running and ticket.instance is not None:
                running.setdefault(ticket.instance, []).append(ticket)
            else:
                self._flow.end_aborted(ticket, None)
        await abort_running(self._flow, running)
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

    def suspend(self, by: str = "") -> None:
        """Start no further request until resume; running requests continue, submission stays open.

        Args:
            by: Name of the owner of this suspension. Requests start again when every owner has
                resumed.
        """
        self._flow.suspended.add(by)
        for ticket in list(self._flow.open.values()):
            if ticket.state is RequestState.ADMITTED:
                self._flow.requeue(ticket)
        self._flow.wake()

    def resume(self, by: str = "") -> None:
        """End the suspension of owner ``by``; requests start again when none is left."""
        self._flow.suspended.discard(by)
        self._flow.pump()

    @property
    def is_suspended(self) -> bool:
        """Whether any owner has suspended the scheduler."""
        return bool(self._flow.suspended)

    async def wait_idle(self) -> None:
        """Wait until no instance has a request and, unless suspended, none is queued.

        This includes requests that are put meanwhile. The condition holds when this returns, until
        the caller's next await.
        """
        await self._flow.until(
            lambda: self._flow.num_in_flight == 0 and (self.is_suspended or not self._flow.waiting)
        )

    async def wait_ended(self) -> None:
        """Wait until all attempts that run now have ended or been returned, but no later ones."""
        await self._flow.until(have_ended(self._flow.open.values()))

    async def take_back(self) -> None:
        """Recall all requests that run now, and wait until the instances have returned them.

        A returned request is queued again with its partial tokens, and may continue on any
        instance; one that ends meanwhile is DONE. Call suspend first, or requests restart at once.

        A request whose instance does not return it stays there until the instance replies, its call
        times out, or the instance is found dead. This waits for that. If the wait is cancelled, the
        request continues, and is still queued again when it is returned.

        Raises:
            Exception: The error of an instance that failed to recall; a lost instance raises none.
        """
        ended = have_ended(self._flow.open.values())
        await recall_running(self._flow, self.instances.values())
        await self._flow.until(ended)

    # --- instances --------------------------------------------------------------------------------

    def add(self, instance_id: str, capacity: int, health: Health = Health.HEALTHY) -> Instance:
        """Add an instance to route requests to.

        Args:
            instance_id: Unique id of the instance.
            capacity: Maximum number of requests in flight at it; 1 or more.
            health: Its state; STALE if it must load the weights first.

        Returns:
            The instance.

        Raises:
            ValueError: If the id is registered already or ``capacity`` is below 1.
        """
        if instance_id in self.instances:
            raise ValueError(f"instance {instance_id!r} is registered already")
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; expected 1 or more")
        instance = self.instances[instance_id] = Instance(instance_id, capacity, health)
        self._flow.pump()
        return instance

    def expect_weights(self, version: int) -> None:
        """Announce a weight update to ``version``.

        From now on, a request with tokens of this version continues only on instances that have it.
        """
        self._flow.expected_version = version
        for instance in self.instances.values():
            if instance.version is None:
                instance.version = version - 1

    def have_weights(self, instance_id: str, version: int) -> None:
        """Record that an instance has loaded weights.

        Args:
            instance_id: The instance.
            version: Weight version that it serves from now on.
        """
        self.instances[instance_id].version = version
        self._flow.pump()

    async def drain(self, *instance_ids: str, migrate: bool = False) -> object:
        """Send these instances no more requests, and wait until they have none.

        Follow it with remove or undrain. Cancelling the wait ends this drain; other drains of the
        same instances stay in force.

        Args:
            *instance_ids: Ids of the instances.
            migrate: Recall their requests, which continue elsewhere with their partial tokens,
                instead of waiting for them to end.

        Returns:
            A marker that undrain accepts to end this drain alone.

        Raises:
            HelmsmanError: If undrain ends this drain before it completes.
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
                    f"Drain of {', '.join(taken_back)} did not complete: undrain() ended it while "
                    "requests were still running."
                )
            return mark
        except BaseException:
            for instance in chosen:
                instance.drains.discard(mark)
            self._flow.pump()
            raise

    def undrain(self, instance_id: str, drain: object = None) -> None:
        """End the drains of an instance, so that it receives requests again.

        Args:
            instance_id: Id of the instance; ignored if it was removed.
            drain: Marker of the one drain to end; None for all.
        """
        if (instance := self.instances.get(instance_id)) is None:
            return
        instance.drains = {mark for mark in instance.drains if drain not in (None, mark)}
        self._flow.wake()
        self._flow.pump()

    async def recall(self, *instance_ids: str) -> None:
        """Recall the requests of these instances, without waiting until they are returned.

        The requests continue elsewhere with their partial tokens. Removed instances are ignored.
        """
        await recall_running(
            self._flow,
            [
                self.instances[instance_id]
                for instance_id in instance_ids
                if instance_id in self.instances
            ],
        )

    def remove(self, instance_id: str) -> None:
        """Remove an instance.

        Raises:
            ValueError: If the instance has requests; drain it first.
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
        """Set the health of an instance; a dead one loses its requests, even if their calls hang.

        Args:
            instance_id: Id of the instance.
            health: Its new health.
            error: Reason of the change, if any.
        """
        self._flow.set_health(instance_id, health, error)

    def on_lost(self, call: Callable[[str, Exception], None]) -> None:
        """Set the function called with the id and error when a call finds an instance lost.

        It replaces the default, set_health.
        """
        self._flow.on_lost = call

    def close(self, reason: str = "the generation scheduler was closed") -> None:
        """Fail queued requests and reject new ones. Idempotent.

        Running requests end with their instance.
        """
        self._flow.close(reason)

    # --- figures ----------------------------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Number of queued requests."""
        return len(self._flow.waiting)

    @property
    def num_in_flight(self) -> int:
        """Number of requests at the instances."""
        return self._flow.num_in_flight

    def describe(self, role: str, version: int | None, *, is_asleep: bool) -> RolloutSnapshot:
        """Describe the requests and instances.

        Args:
            role: Name of the role.
            version: Weight version that it serves.
            is_asleep: Whether all instances sleep.

        Returns:
            Counts, the health of each instance, and the oldest open requests.
        """
        now, flow = time.monotonic(), self._flow
        return RolloutSnapshot(
            role=role,
            num_queued=self.num_queued,
            num_in_flight=self.num_in_flight,
            num_done=flow.durations.count,
            num_tokens_done=flow.num_tokens_done,
            paused_by=sorted(flow.suspended),
            version=version,
            is_asleep=is_asleep,
            instances={
                id_: "drained" if each.is_draining and each.health.is_serving else each.health.value
                for id_, each in self.instances.items()
            },
            median_s=flow.durations.median_s,
            num_behind=dict(
                sorted(
                    collections.Counter(
                        max(0, (version or 0) - each) for each in flow.oldest_versions
                    ).items()
                )
            ),
            requests=[
                RequestSnapshot(
                    request_id=each.request_id,
                    age_s=now - each.since,
                    instance_id=each.instance.instance_id if each.instance is not None else "",
                    overtaken_s=max(0.0, flow.newest_started - each.since),
                )
                for each in itertools.islice(flow.open.values(), _MOST_DESCRIBED)
            ],
        )

    def running(self, request_ids: Collection[str] | None = None) -> dict[str, list[str]]:
        """Return instance id -> ids of its running requests among ``request_ids`` (None: all)."""
        found: dict[str, list[str]] = {}
        for ticket in self._chosen(request_ids):
            if ticket.is_running and ticket.instance is not None:
                found.setdefault(ticket.instance.instance_id, []).append(ticket.request_id)
        return found


async def recall_running(flow: RequestFlow, instances: Iterable[Instance]) -> None:
    """Abort the running requests of these instances, to be queued again when they return."""
    running: dict[Instance, list[Ticket]] = {}
    for instance in instances:
        for ticket in instance.tickets:
            if ticket.is_running:
                ticket.is_recalled = True
                running.setdefault(instance, []).append(ticket)
    await abort_running(flow, running)


async def abort_running(flow: RequestFlow, running: Mapping[Instance, Sequence[Ticket]]) -> None:
    """Abort these requests at their instances; ignore lost ones, whose loss ends requests."""
    outcomes = await asyncio.gather(
        *(_abort_at(flow, *each) for each in running.items()), return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, InstanceLostError):
            raise outcome


async def _abort_at(flow: RequestFlow, instance: Instance, tickets: Sequence[Ticket]) -> None:
    """Abort requests at an instance; return when it replies or has none of them left.

    The second condition is for a dead instance, which may never reply.
    """
    call = flow.abort_at(instance, tickets)
    left = asyncio.ensure_future(
        flow.until(lambda: all(ticket.instance is not instance for ticket in tickets))
    )
    try:
        await asyncio.wait([call, left], return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()
    if call.done():
        call.result()


def have_ended(tickets: Iterable[Ticket]) -> Callable[[], bool]:
    """Return a predicate: whether the attempts of these tickets that run now have ended.

    It is polled often, so all its calls together look at each ticket about once.
    """
    attempts = [(ticket, ticket.num_attempts) for ticket in tickets if ticket.is_running]

    def ended() -> bool:
        while attempts and not (
            attempts[-1][0].is_running and attempts[-1][0].num_attempts == attempts[-1][1]
        ):
            attempts.pop()
        return not attempts

    return ended
