"""RequestFlow: moves each request from the queue to an instance, and on to its one end."""

from __future__ import annotations

import asyncio
import collections
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from helmsman._base.durations import Durations
from helmsman.api.errors import HelmsmanError, InstanceLostError, RequestDeadlineError
from helmsman.api.generation import GenerationRequest, GenerationResult
from helmsman.api.observer import Kind
from helmsman.controller._rollout.health import Health
from helmsman.controller._rollout.request import Instance, RequestState, Ticket, WaitingRequests
from helmsman.controller._rollout.retries import RetryPolicy, RetryUnbegun
from helmsman.controller._rollout.routing import LeastOutstandingTokens, RoutingPolicy

_MOST_SAMPLES = 1024
"""Recent samples whose weight versions are shown."""


class InstanceBackend(Protocol):
    """Connection to the rollout instances."""

    async def generate(self, instance_id: str, request: GenerationRequest) -> GenerationResult:
        """Continue a prompt at an instance.

        Raises:
            InstanceLostError: If the instance is lost or was never reached. The scheduler then
                treats it as dead, with all its requests, until set_health changes that.
        """

    async def generate_samples(
        self, instance_id: str, requests: Sequence[GenerationRequest]
    ) -> Sequence[GenerationResult]:
        """Generate several samples of one prompt; return in order, when all have ended.

        Used only for requests that were put ``together``.

        Raises:
            InstanceLostError: If the instance is lost or was never reached, as from ``generate``.
        """

    async def abort(self, instance_id: str, request_ids: Sequence[str]) -> None:
        """Abort requests at an instance; ``generate`` then returns their partial results."""


class RequestFlow:
    """Moves the requests of a GenerateScheduler through their states.

    GenerateScheduler validates submissions, manages the instances and aborts requests. It also
    documents the arguments.
    """

    def __init__(
        self,
        backend: InstanceBackend,
        policy: RoutingPolicy | None,
        retries: RetryPolicy | None,
        max_in_flight: int | None,
        why_hopeless: Callable[[], Exception | None],
    ) -> None:
        if max_in_flight is not None and max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; expected 1 or more")
        self._backend = backend
        self._policy = policy or LeastOutstandingTokens()
        self._retries = retries or RetryUnbegun()
        self._max_in_flight = max_in_flight
        self._why_hopeless = why_hopeless
        self.instances: dict[str, Instance] = {}
        self.on_lost: Callable[[str, Exception], None] = lambda id_, error: self.set_health(
            id_, Health.DEAD, error
        )
        """Called with the id and error when a call finds an instance lost."""
        self.waiting = WaitingRequests()
        self.open: dict[str, Ticket] = {}
        """Requests that have not ended, by id."""
        self.num_in_flight = 0
        self.durations = Durations()
        """Durations of requests that are DONE, from submission to end."""
        self.newest_started = 0.0
        """Submission of the newest request that was sent to an instance, on time.monotonic()."""
        self.record: Callable[..., None] = lambda *_: None
        """Records an event: kind, name, number and value."""
        self.num_tokens_done = 0
        """Number of tokens of these requests."""
        self.oldest_versions: collections.deque[int] = collections.deque(maxlen=_MOST_SAMPLES)
        """Weight version of the oldest token of each of the last of them."""
        self.slots: asyncio.Semaphore | None = None
        """Queue room for ``submit``; None for no limit."""
        self.holds_slot: set[Ticket] = set()
        self._timers: dict[Ticket, asyncio.TimerHandle] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        """Pulsed when a request leaves an instance or the queue, or an instance serves again."""
        self.suspended: set[str] = set()
        self.expected_version: int | None = None
        """Weight version of the latest update announced to the instances."""
        self.closed = ""
        """Reason why requests are rejected; '' while open."""

    # --- to an instance ---------------------------------------------------------------------------

    def enter(self, ticket: Ticket, kept: GenerationResult | None) -> None:
        """Queue a request, with the tokens to continue from; the caller then calls pump."""
        loop = asyncio.get_running_loop()
        self.open[ticket.request_id] = ticket
        self.record(Kind.QUEUED, "request", ticket.number)
        if kept is not None:
            ticket.keep(kept)
        self.waiting.add(ticket)
        if ticket.options.deadline_s is not None:
            self._timers[ticket] = loop.call_later(ticket.options.deadline_s, self._expire, ticket)
        ticket.future.add_done_callback(lambda _: self._on_done(ticket, loop))

    def pump(self) -> None:
        """Assign queued requests to instances; call it whenever an instance has changed."""
        if self.waiting and (reason := self.why_none_serves()) is not None:
            self._fail_waiting(reason)
        held: list[Ticket] = []
        while (
            self.waiting
            and not self.suspended
            and self._room() > 0
            and (ticket := self.waiting.first()) is not None
        ):
            if ticket.future.cancelled():
                self._end_cancelled(ticket)
                continue
            samples = self._group_members(ticket)[: self._max_in_flight]
            able = [
                instance
                for instance in self.instances.values()
                if instance.has_room_for(len(samples))
            ]
            if not able or self._room() < len(samples):
                break
            if not (fit := self._fresh_enough(ticket, able)):
                held.append(self.waiting.pass_over())
                continue
            try:
                chosen = self._policy.choose(ticket, fit)
                if chosen not in fit:
                    raise ValueError(
                        f"{type(self._policy).__name__}.choose returned "
                        f"{getattr(chosen, 'instance_id', chosen)!r} for request "
                        f"{ticket.request_id!r}; expected one of the {len(fit)} instances "
                        "passed to it"
                    )
            # A policy may be user code; its error fails this request only.
            except Exception as error:  # noqa: BLE001
                self._end(ticket, RequestState.FAILED, error)
            else:
                self._admit(samples[: chosen.capacity], chosen)
        self.waiting.put_back(held)

    def _fresh_enough(self, ticket: Ticket, able: Sequence[Instance]) -> Sequence[Instance]:
        """Return the instances whose weights are not older than the request's last token."""
        if ticket.newest_version is None or self.expected_version is None:
            return able
        # A version above all announced ones belongs to initial weights of an instance, and no
        # update will bring it to the others.
        least = min(ticket.newest_version, self.expected_version)
        return [
            instance for instance in able if instance.version is None or instance.version >= least
        ]

    def _fail_waiting(self, reason: Exception) -> None:
        for ticket in list(self.waiting):
            if ticket in self.waiting:  # Callbacks may have ended it.
                self._end(ticket, RequestState.FAILED, reason)

    def _room(self) -> float:
        return math.inf if self._max_in_flight is None else self._max_in_flight - self.num_in_flight

    def why_none_serves(self) -> Exception | None:
        """Return why no instance serves or ever will; None while one does or may."""
        return (
            None
            if any(instance.health.is_serving for instance in self.instances.values())
            else self._why_hopeless()
        )

    def _group_members(self, ticket: Ticket) -> list[Ticket]:
        """Return a queued ticket, followed by the queued tickets to send in the same call."""
        if ticket.num_kept:
            return [ticket]
        others = (each for each in ticket.together if each is not ticket and each in self.waiting)
        return [ticket, *(each for each in others if not each.num_kept)]

    def _admit(self, samples: Sequence[Ticket], instance: Instance) -> None:
        for ticket in samples:
            ticket.transition(RequestState.ADMITTED)
            self.waiting.discard(ticket)
            self._free_slot(ticket)
            self.newest_started = max(self.newest_started, ticket.since)
            ticket.instance = instance
            instance.take(ticket)
            self.num_in_flight += 1
        call = asyncio.get_running_loop().create_task(self._run(samples, instance))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _run(self, samples: Sequence[Ticket], instance: Instance) -> None:
        # This runs one turn of the loop after _admit: meanwhile requests may have ended, the
        # instance may have stopped serving, and the scheduler may have been suspended.
        admitted = [
            each
            for each in samples
            if each.instance is instance and each.state is RequestState.ADMITTED
        ]
        if self.suspended or not instance.is_serving:
            for ticket in admitted:
                self.requeue(ticket)
            self.pump()
            return
        attempts: dict[Ticket, int] = {}
        for ticket in admitted:
            if not ticket.future.running() and not ticket.future.set_running_or_notify_cancel():
                self._end_cancelled(ticket)
                continue
            ticket.transition(RequestState.RUNNING)
            ticket.sent_to = instance.instance_id
            self.record(Kind.ASSIGNED, instance.instance_id, ticket.number)
            ticket.num_attempts += 1
            attempts[ticket] = ticket.num_attempts
        if len(attempts) < len(admitted):
            # Cancelled tickets left room. Deferred, so that its effects follow the call below.
            asyncio.get_running_loop().call_soon(self.pump)
        lost: InstanceLostError | None = None
        outcomes = await self._outcomes(instance.instance_id, list(attempts)) if attempts else []
        for (ticket, attempt), outcome in zip(attempts.items(), outcomes, strict=True):
            if ticket.instance is instance and ticket.num_attempts == attempt and ticket.is_running:
                self._settle(ticket, outcome)
                if isinstance(outcome, InstanceLostError):
                    lost = outcome
        if lost is not None and instance.health.is_alive:
            # Otherwise the retries would go to the same instance.
            self.on_lost(instance.instance_id, lost)
        self.pump()

    async def _outcomes(
        self, instance_id: str, samples: Sequence[Ticket]
    ) -> Sequence[GenerationResult | BaseException]:
        """Send one request, or several in one call; return the result or error of each."""
        requests = [ticket.to_send() for ticket in samples]
        answers: Sequence[object]
        try:
            if len(requests) == 1:
                answers = [await self._backend.generate(instance_id, requests[0])]
            else:
                answers = await self._backend.generate_samples(instance_id, requests)
            results = [answer for answer in answers if isinstance(answer, GenerationResult)]
            if not len(answers) == len(results) == len(requests):  # It may be user code.
                raise TypeError(
                    f"{instance_id} answered {samples[0].request_id!r} with "
                    f"{[type(answer).__name__ for answer in answers]}; "
                    f"expected {len(requests)} GenerationResult"
                )
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                self.close("its event loop has ended")  # Nothing else cancels these tasks.
            return [_cancelled_call(ticket, instance_id, error) for ticket in samples]
        # Any error fails these requests only; the others continue.
        except BaseException as error:  # noqa: BLE001
            return [error] * len(samples)
        return results

    # --- to the end -------------------------------------------------------------------------------

    def _settle(self, ticket: Ticket, outcome: GenerationResult | BaseException) -> None:
        if isinstance(outcome, InstanceLostError):
            self._settle_lost(ticket, outcome)
        elif isinstance(outcome, BaseException):
            self._end(ticket, RequestState.FAILED, outcome)
        elif outcome.stop_reason != "abort":
            self._end(ticket, RequestState.DONE, ticket.merged(outcome))
        elif ticket.is_recalled and not ticket.is_aborted and not self.closed:
            ticket.keep(outcome)
            if (reason := ticket.kept_end) is not None:
                self._end(ticket, RequestState.DONE, ticket.merged(None, reason))
            else:
                self.requeue(ticket)
        else:
            self.end_aborted(ticket, outcome)

    def _settle_lost(self, ticket: Ticket, lost: InstanceLostError) -> None:
        ticket.num_losses += 1
        try:
            is_retried = (
                not ticket.is_aborted and not self.closed and self._retries.may_retry(ticket, lost)
            )
        # A policy may be user code; the other requests of the instance continue.
        except Exception as error:  # noqa: BLE001
            self._end(ticket, RequestState.FAILED, error)
            return
        if ticket.is_aborted:
            self.end_aborted(ticket, None)
        elif is_retried:
            self.requeue(ticket)
        else:
            # The cause of the loss is more specific.
            self._end(ticket, RequestState.FAILED, lost.__cause__ or lost)

    def end_aborted(self, ticket: Ticket, last: GenerationResult | None) -> None:
        """End a request early, with the tokens of all attempts."""
        result = ticket.merged(last, "abort")
        self._end(
            ticket, RequestState.PARTIAL if result.token_ids else RequestState.ABORTED, result
        )

    def requeue(self, ticket: Ticket) -> None:
        """Put a request back into the queue, at the place of its priority and age."""
        self._release(ticket)
        ticket.transition(RequestState.QUEUED)
        ticket.is_recalled = False
        self.waiting.add(ticket)

    def _release(self, ticket: Ticket) -> None:
        if ticket.instance is not None:
            ticket.instance.give_back(ticket)
            ticket.instance = None
            self.num_in_flight -= 1
            self.wake()

    def wake(self) -> None:
        """Have ``until`` check its conditions again."""
        self._changed.set()
        self._changed.clear()

    def _end(
        self, ticket: Ticket, state: RequestState, outcome: GenerationResult | BaseException
    ) -> None:
        ticket.transition(state)
        self._forget(ticket)
        num_tokens = len(outcome.token_ids) if isinstance(outcome, GenerationResult) else 0
        self.record(Kind.ENDED, state.value, ticket.number, num_tokens)
        if state is RequestState.DONE:
            self.durations.add(time.monotonic() - ticket.since)
            self.num_tokens_done += num_tokens
            if isinstance(outcome, GenerationResult) and outcome.versions:
                self.oldest_versions.append(min(outcome.versions))
        if not ticket.future.running() and not ticket.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, BaseException):
            ticket.future.set_exception(outcome)
        else:
            ticket.future.set_result(outcome)

    def _on_done(self, ticket: Ticket, loop: asyncio.AbstractEventLoop) -> None:
        """Handle a cancelled future; called in any thread. Other ends are handled by _end."""
        if ticket.future.cancelled():
            loop.call_soon_threadsafe(self._cancelled, ticket)

    def _cancelled(self, ticket: Ticket) -> None:
        if not ticket.state.is_end:
            self._end_cancelled(ticket)
            self.pump()

    def _end_cancelled(self, ticket: Ticket) -> None:
        ticket.transition(RequestState.ABORTED)
        self._forget(ticket)
        self.record(Kind.ENDED, "aborted", ticket.number)

    def _forget(self, ticket: Ticket) -> None:
        self.waiting.discard(ticket)
        self._release(ticket)
        self.wake()
        ticket.together = ()  # Breaks the reference cycle.
        self.open.pop(ticket.request_id, None)
        self._free_slot(ticket)
        if (timer := self._timers.pop(ticket, None)) is not None:
            timer.cancel()

    def _free_slot(self, ticket: Ticket) -> None:
        if ticket in self.holds_slot and self.slots is not None:
            self.holds_slot.remove(ticket)
            self.slots.release()

    def _expire(self, ticket: Ticket) -> None:
        """Fail a request whose deadline has passed, even while its instance still runs it."""
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
            self.abort_at(instance, [ticket])
        self.pump()

    def close(self, reason: str) -> None:
        self.closed = self.closed or reason
        for ticket in list(self.open.values()):
            if ticket.state in (RequestState.QUEUED, RequestState.ADMITTED):
                error = HelmsmanError(f"request {ticket.request_id!r} was not sent: {reason}.")
                self._end(ticket, RequestState.FAILED, error)

    def set_health(self, instance_id: str, health: Health, error: Exception | None = None) -> None:
        instance = self.instances[instance_id]
        instance.health = health
        instance.error = None if health.is_serving else error or instance.error
        if health is Health.DEAD:
            for ticket in list(instance.tickets):
                if ticket.instance is not instance:
                    continue  # A callback of another request moved it.
                if ticket.is_running:
                    self._settle(ticket, self._lost(instance))
                else:
                    self.requeue(ticket)
        self.pump()

    def _lost(self, instance: Instance) -> InstanceLostError:
        why = instance.error
        if isinstance(why, InstanceLostError):
            # This error is from another request: its may_have_begun does not apply to this one.
            return InstanceLostError(
                instance_id=instance.instance_id, reason=why.reason, may_have_begun=True
            )
        lost = InstanceLostError(
            instance_id=instance.instance_id, reason=str(why or "it is dead"), may_have_begun=True
        )
        lost.__cause__ = why
        return lost

    # --- shared with the scheduler ----------------------------------------------------------------

    def abort_at(self, instance: Instance, tickets: Sequence[Ticket]) -> asyncio.Task[None]:
        """Abort requests at an instance, in a task that need not be awaited."""

        async def tell() -> None:
            await self._backend.abort(
                instance.instance_id, [ticket.request_id for ticket in tickets]
            )

        call = asyncio.get_running_loop().create_task(tell())
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        # Retrieved, so that asyncio does not log an error that is not awaited.
        call.add_done_callback(lambda call: call.cancelled() or call.exception())
        return call

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked again at each wake."""
        while not holds():
            await self._changed.wait()


def _cancelled_call(ticket: Ticket, instance_id: str, cause: BaseException) -> HelmsmanError:
    error = HelmsmanError(
        f"request {ticket.request_id!r}: the call to {instance_id} was cancelled."
    )
    error.__cause__ = cause
    return error
