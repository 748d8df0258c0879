"""The controller's view of one worker: its state, its calls, and errors of lost or late ones."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import itertools
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from helmsman._base.event_loop import (
    background_loop,
    forbid_blocking,
    mailbox_of,
    run_in_executor,
    run_on_loop,
)
from helmsman._base.readiness import Leader, give_back, readers_of, take_bell
from helmsman._wire.codec import Payload, decode, encode, is_plain
from helmsman._wire.messages import CallState, Reply, Request, Verb, dotted
from helmsman._wire.wire import Outgoing
from helmsman.api import errors
from helmsman.api.fan_out import Fanout, lead_of
from helmsman.api.observer import UNOBSERVED, CallObserver
from helmsman.api.scheduler import (
    PreemptionNotice,
    ResultHandle,
    Timeouts,
    WorkerHealth,
    WorkerState,
    WorkerStatus,
)
from helmsman.controller._placement.placement import Placement
from helmsman.controller._scheduler.driver_log import story
from helmsman.controller._scheduler.transport.base import (
    Ending,
    Transport,
    TransportLostError,
    error_in,
)

T = TypeVar("T")

log = logging.getLogger(__name__)

_CAUSE_S = 1.8
"""Longest wait of a failed call for the cause of its worker's end."""
_UNKNOWN_YET = Ending(
    f"has ended; its node did not report the cause within {_CAUSE_S:g} s. The log shows it when "
    "it arrives"
)
request_ids = itertools.count(1)
"""Unique in this process, so that several workers can be sent the same request."""


_WITHDRAWAL_S = 0.1
"""Longest wait for the withdrawal of a queued call, so that its timeout error can report it."""
_LATE_ANSWER_S = 60.0
"""Limit for a worker to withdraw or locate a late call; the caller does not wait for it."""


class LateCalls:
    """The calls of one worker that are about to time out, or have timed out.

    Args:
        worker_id: Id of the worker.
        log_path: Its log file, for errors.
        control: Sends a control verb to it and returns the reply.
        in_background: Runs a coroutine as a task.
    """

    def __init__(
        self,
        worker_id: str,
        log_path: str,
        control: Callable[..., Coroutine[Any, Any, Any]],
        in_background: Callable[
            [Coroutine[Any, Any, CallState | None]], asyncio.Task[CallState | None]
        ],
    ) -> None:
        self._worker_id, self._log_path = worker_id, log_path
        self._control, self._in_background = control, in_background
        self.overdue: set[int] = set()
        """Ids of timed-out requests that are still unanswered."""
        self._to_locate: list[int] = []
        self._locating: asyncio.Task[dict[int, CallState]] | None = None
        """The pending INSPECT request for all of ``_to_locate``, until it is sent."""

    async def locate(self, request_id: int, limit_s: float) -> CallState | None:
        """Ask the worker for the state of a call; None without a reply in time.

        Calls located at the same time share one request.
        """
        self._to_locate.append(request_id)
        if self._locating is None:
            self._locating = asyncio.ensure_future(self._locate_all(limit_s))
        found = await asyncio.shield(self._locating)
        return found.get(request_id)

    async def _locate_all(self, limit_s: float) -> dict[int, CallState]:
        await asyncio.sleep(0)  # collects the calls that become late at the same time
        request_ids, self._to_locate, self._locating = self._to_locate, [], None
        try:
            found: dict[int, CallState] = await self._control(
                Verb.INSPECT, request_ids, limit_s=limit_s
            )
        except errors.CallError:  # the timeout errors are raised without the calls' states
            return {}
        return found

    async def error_of(
        self,
        request: Request,
        elapsed_s: float,
        limit_s: float,
        source: str,
        seen: CallState | None,
        *,
        may_withdraw: bool,
    ) -> errors.CallTimeoutError:
        """Make the error of a timed-out call.

        A call that has not begun is withdrawn if ``may_withdraw``, and the error waits briefly for
        that. ``source`` names the setting of the limit; ``seen`` is the result of ``locate``.
        """
        state, stack = "it did not reply within the limit", ""
        if request.verb in (Verb.CALL, Verb.CREATE_ENGINE):
            if seen is None:
                state = "the state of the call is unknown; it is logged once the worker reports it"
            if may_withdraw or seen is None:
                found = self._in_background(
                    self._follow(
                        request, elapsed_s, is_seen=seen is not None, may_withdraw=may_withdraw
                    )
                )
                if seen is not None and seen.state != "running":
                    await asyncio.wait([found], timeout=_WITHDRAWAL_S)
                    seen = found.result() or seen if found.done() else seen
        if seen is not None:
            state, stack = seen.describe(may_withdraw=may_withdraw), seen.stack
        return errors.CallTimeoutError(
            worker_id=self._worker_id,
            engine_name=request.engine_name,
            method=request.method or request.verb.value,
            elapsed_s=elapsed_s,
            limit_s=limit_s,
            limit_source=source,
            worker_alive=seen is not None,
            state=state,
            stack=stack,
            log_path=self._log_path,
        )

    async def _follow(
        self, request: Request, elapsed_s: float, *, is_seen: bool, may_withdraw: bool
    ) -> CallState | None:
        """Withdraw or locate a late call; log its state if the error could not report it.

        Returns None without a reply.
        """
        call: CallState | None = None
        with contextlib.suppress(errors.CallError):
            if may_withdraw:
                call = await self._control(Verb.CANCEL, request.id, limit_s=_LATE_ANSWER_S)
            else:
                call = await self.locate(request.id, _LATE_ANSWER_S)
        if call is not None and call.state == "withdrawn":
            self.overdue.discard(request.id)
        if call is not None and not is_seen:
            place = call.describe(may_withdraw=may_withdraw)
            stack = f"; its engine thread is at:\n{call.stack}" if call.stack else ""
            log.warning(
                "%s: %s timed out after %.2f s: %s%s",
                self._worker_id,
                dotted(request.engine_name, request.method or request.verb.value),
                elapsed_s,
                place,
                stack,
            )
        return call


class WorkerClient:
    """One worker as the scheduler calls it. All methods run on the background loop."""

    def __init__(
        self,
        worker_id: str,
        place: Placement,
        pid: int | None,
        log_path: str,
        transport: Transport,
        timeouts: Timeouts,
    ) -> None:
        self.worker_id = worker_id
        self.place = place
        self.node = place.node
        self.pid = pid
        self.log_path = log_path
        self.transport = transport
        self.engine_ports: list[str] = []
        self.environment: dict[str, str] = {}
        """Variables that the backend sets in the worker, such as device masks."""
        self.advice: Mapping[str, str] = {}
        """Role -> next step after the death of a worker, where a controller has a better one than
        the default.
        """
        self.observer_of: Callable[[str], CallObserver] = lambda method: UNOBSERVED
        """Returns the observer of the calls of a method."""
        self._timeouts = timeouts
        self.in_flight: dict[int, PendingCall] = {}
        """Unanswered engine work, by request id."""
        self.late = LateCalls(worker_id, log_path, self.control, self.in_background)
        self.unanswered: dict[int, float] = {}
        """Start times of health requests that an observation has replaced, by request id. They do
        not make the worker OVERDUE.
        """
        self._background: set[asyncio.Task[Any]] = set()
        """Strong references, since the event loop holds tasks only weakly."""
        self._ending: Ending | None = None
        self._looking_up: asyncio.Task[Ending] | None = None
        self._is_cause_late = False
        self._ran_at_end = ("", 0.0)
        """The oldest call in flight when the worker died, and its duration in seconds."""
        self._stopped = False
        self._ends_at: float | None = None
        """When the process ends after a SIGTERM, by time.monotonic()."""
        self._killed_because = ""

    async def create_engine(self, engine_name: str, payload: Payload, limit_s: float) -> None:
        """Build an engine; ``payload`` is (path or class, args, kwargs)."""
        request = Request(next(request_ids), Verb.CREATE_ENGINE, engine_name)
        try:
            await await_reply(self, Outgoing(request, payload), limit_s, "Timeouts.create_engine_s")
        except errors.CallTimeoutError as error:
            raise errors.EngineCreationTimeoutError(**vars(error)) from None

    async def control(self, verb: Verb, *arguments: Any, limit_s: float | None = None) -> Any:
        """Send a control verb and return its reply; the limit defaults to ``Timeouts.health_s``."""
        outgoing = Outgoing(Request(next(request_ids), verb), encode(arguments))
        source = "Timeouts.health_s" if limit_s is None else "the operation's deadline"
        return decode(await await_reply(self, outgoing, limit_s or self._timeouts.health_s, source))

    @property
    def is_there(self) -> bool:
        """Whether the worker may reply: it has neither died nor been asked to end."""
        return self._ending is None and not self._stopped

    def note(self, health: WorkerHealth) -> None:
        self._ends_at = None if health.ends_in_s is None else time.monotonic() + health.ends_in_s

    @property
    def preemption_notice(self) -> PreemptionNotice | None:
        """The pending end that the worker reported last; None if the worker has ended."""
        if self._ends_at is None or not self.is_there:
            return None
        return PreemptionNotice(
            reason=f"its process {self.pid} was sent SIGTERM",
            deadline_s=max(0.0, self._ends_at - time.monotonic()),
        )

    def status(self, health: WorkerHealth | None) -> WorkerStatus:
        return WorkerStatus(
            worker_id=self.worker_id,
            state=self.state,
            node=self.node,
            pid=self.pid,
            log_path=self.log_path,
            health=health,
        )

    @property
    def end_cause(self) -> str:
        """Describe how the worker ended, as the predicate of a sentence; '' while it lives."""
        return self._ending.cause if self._ending is not None else ""

    @property
    def state(self) -> WorkerState:
        if self._stopped:
            return WorkerState.STOPPED
        if self._ending is not None:
            return WorkerState.FAILED
        return WorkerState.OVERDUE if self.late.overdue else WorkerState.READY

    async def shut_down(self, limit_s: float) -> None:
        """Ask the process to end, and wait for it."""
        self._stopped = True
        await self.control(Verb.SHUTDOWN, limit_s=limit_s)
        await self.transport.wait_ended(limit_s)

    async def kill(self, cause: str) -> None:
        """Kill the process; pending calls report ``cause`` as the way it ended."""
        self._killed_because = cause
        await self.transport.kill()

    def begins(self, request_id: int, call: PendingCall) -> None:
        """Count a call that is about to be sent; ``settled`` follows."""
        call.observer = observer = self.observer_of(call.method)
        call.slot = observer.begun(request_id, call.started)
        self.in_flight[request_id] = call

    def settled(self, request_id: int, ok: bool = False) -> None:
        """Count the outcome of a request: a result if ``ok``, else an error."""
        call = self.in_flight.pop(request_id, None)
        if call is not None:
            call.observer.ended(call.slot, request_id, call.started, ok)
        self.late.overdue.discard(request_id)
        self.unanswered.pop(request_id, None)

    def forget_result(self, request: Request, payload: Payload) -> None:
        kept = decode(payload) if request.keep else None
        if isinstance(kept, ResultHandle):
            release = self._release(kept)

            def begin() -> None:
                self.in_background(release)

            run_on_loop(begin)

    def named(self, request: Request) -> Request:
        """Return a request with the name of its engine; a call's default is the worker's id."""
        if request.engine_name is None and request.verb is Verb.CALL:
            return msgspec.structs.replace(request, engine_name=self.worker_id)
        return request

    def in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _release(self, handle: ResultHandle) -> None:
        with contextlib.suppress(errors.CallError):  # of a worker that has ended, or hangs
            await self.control(Verb.RELEASE, handle.id)

    async def failed(self, request: Request) -> errors.WorkerFailedError:
        """Build the error of a request whose worker has died."""
        if self._looking_up is None:
            if oldest := min(
                list(self.in_flight.values()), key=lambda call: call.started, default=None
            ):
                self._ran_at_end = oldest.name, time.monotonic() - oldest.started
            self._looking_up = asyncio.ensure_future(self._look_up_ending())
        await asyncio.wait([self._looking_up], timeout=_CAUSE_S)
        self._is_cause_late = not self._looking_up.done()
        self._ending = _UNKNOWN_YET if self._is_cause_late else self._looking_up.result()
        running, running_s = self._ran_at_end
        return errors.WorkerFailedError(
            worker_id=self.worker_id,
            engine_name=self.named(request).engine_name,
            method=request.method or request.verb.value,
            node=self.node,
            pid=self.pid,
            running=running or None,
            running_s=running_s if running else None,
            next_step=self.advice.get(self.worker_id.rpartition("/")[0], ""),
            **{
                **msgspec.structs.asdict(self._ending),
                "log_path": self._ending.log_path or self.log_path,
            },
        )

    async def _look_up_ending(self) -> Ending:
        """Look up how the worker ended, once for all its calls; may take longer than they wait."""
        try:
            ending = await self.transport.ending()
            if self._killed_because and ending.exit_signal in (None, signal.SIGKILL):
                # with another signal or exit code it ended before the kill
                ending = msgspec.structs.replace(ending, cause=self._killed_because)
        except Exception as error:  # noqa: BLE001 - pending calls must still fail
            ending = Ending(f"has ended; the look-up of its exit failed: {error}")
        (log.warning if self._is_cause_late else story.info)("%s %s", self.worker_id, ending.cause)
        return ending


class PendingCall(abc.ABC):
    """One request to one worker, until its reply; used on the event loop.

    It is driven by callbacks, so that no task waits for it.
    """

    __slots__ = (
        "_client",
        "_given_up",
        "_is_lost",
        "_may_withdraw",
        "_outgoing",
        "_seen",
        "observer",
        "slot",
        "started",
    )

    def __init__(
        self, client: WorkerClient, outgoing: Outgoing, started: float | None = None
    ) -> None:
        self._client = client
        self._outgoing = outgoing
        self._given_up = False
        self._may_withdraw = True
        self._is_lost = False
        """Whether the worker has died and its exit status is still being looked up."""
        self._seen: CallState | None = None
        """State of the call as reported by the worker shortly before the limit."""
        self.started = time.monotonic() if started is None else started
        self.observer = UNOBSERVED
        self.slot = 0
        """Number of the call for its observer."""

    def begin(self, leader: Leader | None = None) -> None:
        """Send the request, from any thread; a failure to encode or send it is its outcome.

        Args:
            leader: See ``Transport.post``.
        """
        if self._outgoing.is_call:
            self._client.begins(self._outgoing.request.id, self)
        try:
            self._client.transport.post(self._outgoing, self, leader)
        except (TransportLostError, errors.HelmsmanError) as error:
            # the outcome of this request
            run_on_loop(functools.partial(self.failed, error))
        except BaseException:  # an interrupt
            self._client.in_flight.pop(self._outgoing.request.id, None)
            raise

    @property
    def name(self) -> str:
        return dotted(self._client.named(self._outgoing.request).engine_name, self.method)

    @property
    def method(self) -> str:
        request = self._outgoing.request
        return request.method or request.verb.value

    @property
    def is_waiting(self) -> bool:
        return self._seen is not None and self._seen.state == "waiting"

    @abc.abstractmethod
    def _succeeded(self, payload: Payload) -> bool:
        """Accept the result; returns False if no caller waits for it."""

    @abc.abstractmethod
    def _fail(self, error: Exception) -> None:
        """Accept the error."""

    def replied(self, reply: Reply, payload: Payload) -> None:
        client, request = self._client, self._outgoing.request
        client.settled(request.id, reply.ok)
        if not reply.ok:
            if not self._given_up:
                self._fail(error_in(payload))
        elif self._given_up or not self._succeeded(payload):
            client.forget_result(request, payload)

    def failed(self, error: Exception) -> None:
        if isinstance(error, TransportLostError) and not self._given_up:
            self._is_lost = True
            self._client.in_background(self._lost(error))
            return
        self._client.settled(self._outgoing.request.id)
        if not self._given_up:
            self._fail(error)

    def inquire(self, lead_s: float) -> None:
        """Locate the call for its timeout error, ``lead_s`` seconds before the limit."""
        if self._outgoing.request.id in self._client.in_flight and not self._is_lost:
            self._client.in_background(self._inquire(lead_s))

    async def _inquire(self, lead_s: float) -> None:
        self._seen = await self._client.late.locate(self._outgoing.request.id, max(lead_s, 0.001))

    def give_up(self, limit_s: float, source: str) -> None:
        """Fail a late call.

        The worker is OVERDUE until it replies, since it still holds the call's memory. The call of
        a worker that has died fails with that error instead.
        """
        if self._is_lost:
            return
        self._given_up = True
        self._client.late.overdue.add(self._outgoing.request.id)
        self._client.in_background(self._on_timeout(limit_s, source))

    def withdraw(self) -> None:
        """Drop a health request, whose worker was observed instead."""
        self._given_up = True
        self._client.unanswered[self._outgoing.request.id] = self.started

    async def _lost(self, error: TransportLostError) -> None:
        failure = await self._client.failed(self._outgoing.request)
        failure.__cause__ = error
        self._end(failure)

    async def _on_timeout(self, limit_s: float, source: str) -> None:
        elapsed_s = time.monotonic() - self.started
        error = await self._client.late.error_of(
            self._client.named(self._outgoing.request),
            elapsed_s,
            limit_s,
            source,
            self._seen,
            may_withdraw=self._may_withdraw,
        )
        self._end(error)

    def _end(self, error: errors.CallError) -> None:
        self._client.in_flight.pop(self._outgoing.request.id, None)
        self._fail(error)


class _AwaitedCall(PendingCall):
    """A request whose caller, a thread or coroutine, waits for it and enforces the deadline."""

    __slots__ = ("_on_filled", "error", "is_abandoned", "payload")

    def __init__(
        self, client: WorkerClient, outgoing: Outgoing, on_filled: Callable[[], None]
    ) -> None:
        self._on_filled = on_filled
        self.is_abandoned = False
        """Whether the caller no longer waits."""
        self.payload: Payload | None = None
        self.error: Exception | None = None
        super().__init__(client, outgoing)

    def late(self, limit_s: float, source: str) -> None:
        """Time out the call; on the event loop."""
        if self.payload is None and self.error is None and not self.is_abandoned:
            self.give_up(limit_s, source)

    def result(self) -> Payload:
        """Return the reply or raise the error."""
        if self.payload is None:
            assert self.error is not None
            try:
                raise self.error
            finally:
                self.error = None  # breaks the cycle of error, traceback and this frame
        return self.payload

    def _succeeded(self, payload: Payload) -> bool:
        if self.is_abandoned:
            return False
        self.payload = payload
        self._on_filled()
        return True

    def _fail(self, error: Exception) -> None:
        if not self.is_abandoned:
            self.error = error
            self._on_filled()


def wait_for_reply(
    client: WorkerClient, outgoing: Outgoing, limit_s: float, source: str
) -> Payload:
    """Send a request and block for its reply; an interrupt leaves the call to its worker."""
    forbid_blocking()
    waiting, bell = threading.Lock(), take_bell() if client.transport.has_connection else None
    waiting.acquire()
    call = _AwaitedCall(client, outgoing, waiting.release)

    def is_answered_by(limit_s: float) -> bool:
        left_s = limit_s - (time.monotonic() - call.started)
        if bell is not None:
            client.transport.read(bell, left_s)
            if waiting.acquire(blocking=False):
                return True
            left_s = limit_s - (time.monotonic() - call.started)
        return waiting.acquire(timeout=min(max(left_s, 0.0), threading.TIMEOUT_MAX))

    try:
        call.begin(bell)
        if not is_answered_by(limit_s - lead_of(limit_s)):
            left_s = limit_s - (time.monotonic() - call.started)
            run_on_loop(functools.partial(call.inquire, max(left_s, 0.0)))
            if not is_answered_by(limit_s):
                run_on_loop(functools.partial(call.late, limit_s, source))
                waiting.acquire()
    except BaseException:
        call.is_abandoned = True
        raise
    finally:
        give_back(bell)
    return call.result()


async def await_reply(
    client: WorkerClient, outgoing: Outgoing, limit_s: float, source: str
) -> Payload:
    """Send a request and await its reply, on any event loop."""
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    filled: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not filled.done():
            filled.set_result(None)

    def on_filled() -> None:
        if threading.get_ident() == thread:
            settle()
        else:
            mailbox_of(loop).post(settle)

    leads = client.transport.has_connection and loop is not background_loop()
    call = _AwaitedCall(client, outgoing, on_filled)
    call.begin(readers_of(loop) if leads else None)
    lead_s = lead_of(limit_s)
    timer: asyncio.TimerHandle

    def at_limit() -> None:
        nonlocal timer
        left_s = limit_s - (time.monotonic() - call.started)
        if left_s > 0:  # uvloop rounds its timers to milliseconds, and may be early
            timer = loop.call_later(max(left_s, 0.001), at_limit)
        else:
            run_on_loop(functools.partial(call.late, limit_s, source))

    def almost_late() -> None:
        nonlocal timer
        timer = loop.call_later(lead_s, at_limit)
        if leads:
            client.transport.hand_back()
        run_on_loop(functools.partial(call.inquire, lead_s))

    timer = loop.call_later(limit_s - lead_s, almost_late)
    try:
        await filled
    except BaseException:
        call.is_abandoned = True
        if leads:
            client.transport.hand_back()
        raise
    finally:
        timer.cancel()
    return call.result()


class GroupPendingCall(PendingCall):
    """One request of a group, which enforces a common deadline."""

    __slots__ = ("_group", "_is_answered", "_worker_id")

    def __init__(
        self, client: WorkerClient, outgoing: Outgoing, group: Fanout, worker_id: str
    ) -> None:
        self._group = group
        self._is_answered = False
        self._worker_id = worker_id  # with colocation the client has the target role's id
        group.pending[worker_id] = self
        super().__init__(client, outgoing, group.started)

    def cancel(self) -> None:
        """The caller no longer waits; a sent request continues."""

    def _succeeded(self, payload: Payload) -> bool:
        if is_plain(payload):
            self._group.succeeded(self._worker_id, decode(payload))
        else:
            self._is_answered = True
            self._client.in_background(self._decode(payload))
        return True

    async def _decode(self, payload: Payload) -> None:
        """Unpickle a result off the loop, since it may be large and import modules."""
        try:
            value = await run_in_executor(decode, payload)
        except Exception as error:  # noqa: BLE001 - handed to the caller that awaits the answer
            self._group.failed(self._worker_id, error)
        else:
            self._group.succeeded(self._worker_id, value)

    def give_up(self, limit_s: float, source: str) -> None:
        if not self._is_answered:
            # A rank that has begun its call, or may have, could wait for this one in a collective.
            group = self._group
            is_safe = len(group.pending) == 1 or all(
                call.is_waiting for call in group.pending.values()
            )
            self._may_withdraw = is_safe and not group.results
            super().give_up(limit_s, source)

    def _fail(self, error: Exception) -> None:
        self._group.failed(self._worker_id, error)
