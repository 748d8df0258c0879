"""The requests of one rollout role: a queue, what is in flight, and the rule by which one becomes the other.

Everything here runs on one event loop, so nothing is locked; futures of requests may be awaited and cancelled from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from helmsman.api.errors import HelmsmanError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.controller.group import group_error
from helmsman.controller.instances import Instance, InstanceLoad, InstanceState, RolloutLoad, least_loaded


@dataclass(slots=True, eq=False)
class Ticket:
    """A request between its submission and its end."""

    request: GenerationRequest
    takes_slot: bool
    """Whether it counts against the bound of the queue while it waits."""
    future: Future[GenerationResult] = field(default_factory=Future)
    """PENDING while queued, when it can be cancelled; RUNNING once it is sent, when only abort ends it early."""
    instance: Instance | None = None
    """Where it was sent; it is never sent twice."""

    @property
    def num_tokens(self) -> int:
        """The most tokens that it can come to hold."""
        return len(self.request.prompt_ids) + self.request.sampling.max_new_tokens


class RequestQueue:
    """First come, first served; each request goes to the serving instance with the fewest outstanding tokens.

    An instance is chosen when a request is sent, not when it is submitted, so a slow one holds up only what it already has.
    """

    def __init__(
        self,
        role: str,
        instances: Sequence[Instance],
        send: Callable[[Instance, GenerationRequest], Awaitable[GenerationResult]],
        *,
        max_in_flight_per_worker: int,
        max_queue: int,
    ) -> None:
        """Serve ``instances`` by ``send``, which excludes the instance when it finds it dead."""
        self.role = role
        self.instances = tuple(instances)
        self._send = send
        self._max_in_flight = max_in_flight_per_worker
        self._queue: deque[Ticket] = deque()
        self._open: dict[str, Ticket] = {}
        self._slots = asyncio.Semaphore(max_queue)
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused = False
        self._closed = False

    # --- submission -------------------------------------------------------------------------------------------------

    def put(self, requests: Sequence[GenerationRequest], *, takes_slot: bool = False) -> list[Ticket]:
        """Queue all of ``requests`` or, on an error, none.

        Raises: ValueError (an id that is in use), HelmsmanError (closed), or why no instance serves.
        """
        if self._closed:
            raise HelmsmanError(f"role {self.role!r} takes no requests: its controller is closed.", role=self.role)
        if (reason := self._why_nobody_serves()) is not None:
            raise reason
        ids = [request.request_id for request in requests]
        if len({*ids, *self._open}) < len(ids) + len(self._open):
            twice = next(id_ for i, id_ in enumerate(ids) if id_ in self._open or id_ in ids[:i])
            raise ValueError(
                f"request id {twice!r} is in use already; ids must be unique among the requests that have not ended"
            )
        tickets = [Ticket(request, takes_slot) for request in requests]
        loop = asyncio.get_running_loop()
        for ticket in tickets:
            self._open[ticket.request.request_id] = ticket
            self._queue.append(ticket)
            ticket.future.add_done_callback(lambda _, t=ticket: self._on_done(t, loop))  # type: ignore[misc]
        self.pump()
        return tickets

    async def put_bounded(self, request: GenerationRequest) -> Ticket:
        """Queue one request as soon as fewer than ``max_queue`` of this kind wait."""
        await self._slots.acquire()
        try:
            return self.put([request], takes_slot=True)[0]
        except BaseException:
            self._slots.release()
            raise

    # --- control ----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what can be sent now; to be called whenever a request, an instance or the pause has changed."""
        if (reason := self._why_nobody_serves()) is not None:
            for ticket in list(self._queue):
                self._end(ticket, reason)
        while self._queue and not self._paused:
            instance = least_loaded(self.instances, self._max_in_flight)
            if instance is None:
                return
            ticket = self._queue.popleft()
            if not ticket.future.set_running_or_notify_cancel():
                continue
            self._free_slot(ticket)
            ticket.instance = instance
            instance.begin(ticket.num_tokens)
            task = asyncio.get_running_loop().create_task(self._run(ticket, instance))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def pause(self) -> None:
        """Give nothing more to an instance; what one has been given goes on."""
        self._paused = True

    def resume(self) -> None:
        """Send again."""
        self._paused = False
        self.pump()

    def drop(self, request_ids: Collection[str] | None) -> int:
        """End queued requests (None: all) with stop reason 'abort' and no tokens; returns how many."""
        chosen = [t for t in self._queue if request_ids is None or t.request.request_id in request_ids]
        return sum(
            self._end(
                ticket,
                GenerationResult(
                    request_id=ticket.request.request_id, token_ids=[], logprobs=[], versions=[], stop_reason="abort"
                ),
            )
            for ticket in chosen
        )

    def running(self, request_ids: Collection[str] | None) -> dict[str, list[str]]:
        """Worker id -> ids of these requests (None: all) that are in flight there."""
        found: dict[str, list[str]] = {}
        for request_id, ticket in self._open.items():
            if ticket.instance is not None and (request_ids is None or request_id in request_ids):
                found.setdefault(ticket.instance.worker_id, []).append(request_id)
        return found

    def close(self) -> None:
        """Fail what is queued and take nothing more; what is in flight ends with its worker."""
        self._closed = True
        for ticket in list(self._queue):
            reason = f"request {ticket.request.request_id!r} was not sent: the controller of role {self.role!r} was closed."
            self._end(ticket, HelmsmanError(reason, role=self.role))

    def load(self) -> RolloutLoad:
        """The figures of this moment."""
        return RolloutLoad(
            num_queued=len(self._queue),
            paused=self._paused,
            instances={
                i.worker_id: InstanceLoad(state=i.state, num_in_flight=i.num_in_flight, outstanding_tokens=i.outstanding_tokens)
                for i in self.instances
            },
        )

    # --- inside -----------------------------------------------------------------------------------------------------

    def _why_nobody_serves(self) -> Exception | None:
        """The reasons of all instances as one error; None when at least one serves."""
        if any(instance.state is InstanceState.SERVING for instance in self.instances):
            return None
        return group_error(
            self.role, "agenerate", {i.worker_id: i.error for i in self.instances if i.error}, len(self.instances)
        )

    async def _run(self, ticket: Ticket, instance: Instance) -> None:
        outcome: GenerationResult | BaseException
        try:
            outcome = await self._send(instance, ticket.request)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the answer to this request, and others must go on
            outcome = error
        instance.end(ticket.num_tokens)
        self._end(ticket, outcome)
        self.pump()

    def _end(self, ticket: Ticket, outcome: GenerationResult | BaseException) -> bool:
        """Give a request its outcome; False when it had been cancelled."""
        if ticket.instance is None:
            self._queue.remove(ticket)
            if not ticket.future.set_running_or_notify_cancel():
                return False
        self._forget(ticket)
        if isinstance(outcome, BaseException):
            ticket.future.set_exception(outcome)
        else:
            ticket.future.set_result(outcome)
        return True

    def _on_done(self, ticket: Ticket, loop: asyncio.AbstractEventLoop) -> None:
        """Called in whichever thread ended the future; only a cancellation is not known here yet."""
        if ticket.future.cancelled():
            loop.call_soon_threadsafe(self._forget, ticket)

    def _forget(self, ticket: Ticket) -> None:
        self._open.pop(ticket.request.request_id, None)
        self._free_slot(ticket)
        if ticket.instance is None:
            with contextlib.suppress(ValueError):
                self._queue.remove(ticket)

    def _free_slot(self, ticket: Ticket) -> None:
        if ticket.takes_slot:
            ticket.takes_slot = False
            self._slots.release()
