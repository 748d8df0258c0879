"""The controller's view of one worker, and the meaning of its errors. What carries requests is a Transport, and what awaits one
an Exchange."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import time
from collections.abc import Coroutine, Mapping
from typing import Any

import msgspec

from helmsman.api import errors
from helmsman.api.scheduler import Leaving, ResultHandle, Timeouts, WorkerHealth, WorkerState, WorkerStatus
from helmsman.controller._placement.place import Place
from helmsman.controller._transport.base import Ending, Outgoing, Transport
from helmsman.controller._transport.pending_call import Exchange, FutureExchange
from helmsman.rpc_server._wire.codec import Payload, decode, encode
from helmsman.rpc_server._wire.messages import CallState, Reply, Request, Verb, dotted

log = logging.getLogger(__name__)

_WITHDRAWAL_S = 0.1
"""How long the error of a call that had not begun waits for its withdrawal, so that it can say whether it ever will."""
_LATE_ANSWER_S = 60.0
"""How long a worker may take to withdraw a late call; its caller does not wait for that."""

request_ids = itertools.count(1)
"""Unique in this process, so that workers can be sent one and the same request."""


class WorkerClient:
    """One worker, as the scheduler calls it. All methods run on the background loop."""

    def __init__(
        self, worker_id: str, place: Place, pid: int | None, log_path: str, transport: Transport, timeouts: Timeouts
    ) -> None:
        self.worker_id = worker_id
        self.place = place
        self.pid = pid
        self.log_path = log_path
        self.transport = transport
        self.engine_ports: list[str] = []
        self.environment: dict[str, str] = {}
        """Variables that the backend wants in the worker, such as device masks."""
        self.advice: Mapping[str, str] = {}
        """Role -> what to do about the death of one of its workers, where a controller knows better than the scheduler."""
        self._timeouts = timeouts
        self.in_flight: dict[int, Exchange] = {}
        """Engine work that is not answered, by request id."""
        self.overdue: set[int] = set()
        """Requests that were given up and are not answered."""
        self.unanswered: set[int] = set()
        """Requests for its health that an observation has replaced; they do not make the worker OVERDUE."""
        self._to_locate: list[int] = []
        self._locating: asyncio.Task[dict[int, CallState]] | None = None
        """The question about all of ``_to_locate``, until it is sent."""
        self._background: set[asyncio.Task[Any]] = set()
        """The event loop itself holds tasks only weakly."""
        self._ending: Ending | None = None
        self._ran_at_end: tuple[str, float] | None = None
        """The oldest call in flight when the worker died, and for how many seconds."""
        self._stopped = False
        self._ends_at: float | None = None
        """When its process ends, which was told to, by time.monotonic()."""
        self._killed_because = ""

    @property
    def node(self) -> str:
        """Address of its node."""
        return self.place.node

    # --- engine work ------------------------------------------------------------------------------------------------

    async def create_engine(self, engine_name: str, payload: Payload, limit_s: float) -> None:
        """Build an engine; ``payload`` is (path or class, args, kwargs)."""
        request = Request(next(request_ids), Verb.CREATE_ENGINE, engine_name)
        await FutureExchange.begun(self, Outgoing(request, payload), limit_s, "Timeouts.create_engine_s")

    # --- control ----------------------------------------------------------------------------------------------------

    async def control(self, verb: Verb, *arguments: Any, limit_s: float | None = None) -> Any:
        """Ask a control verb and return its answer; ``Timeouts.health_s`` is the limit when none is given."""
        outgoing = Outgoing(Request(next(request_ids), verb), encode(arguments))
        source = "Timeouts.health_s" if limit_s is None else "the operation's deadline"
        return decode(await FutureExchange.begun(self, outgoing, limit_s or self._timeouts.health_s, source))

    @property
    def is_there(self) -> bool:
        """Whether it may answer: it has neither ended nor been told to."""
        return self._ending is None and not self._stopped

    def note(self, health: WorkerHealth) -> None:
        """Store the worker's latest health."""
        self._ends_at = None if health.ends_in_s is None else time.monotonic() + health.ends_in_s

    @property
    def leaving(self) -> Leaving | None:
        """What it has last said of its end, before its controller wants it."""
        if self._ends_at is None or not self.is_there:
            return None
        return Leaving(reason=f"its process {self.pid} was sent SIGTERM", deadline_s=max(0.0, self._ends_at - time.monotonic()))

    def status(self, health: WorkerHealth | None) -> WorkerStatus:
        """The worker's status, with its health where that is known."""
        return WorkerStatus(
            worker_id=self.worker_id,
            state=self.state,
            node=self.node,
            pid=self.pid,
            log_path=self.log_path,
            health=health,
        )

    @property
    def state(self) -> WorkerState:
        """READY, OVERDUE, FAILED or STOPPED."""
        if self._stopped:
            return WorkerState.STOPPED
        if self._ending is not None:
            return WorkerState.FAILED
        return WorkerState.OVERDUE if self.overdue else WorkerState.READY

    async def shut_down(self, limit_s: float) -> None:
        """Ask the process to end and give it time to; whether it did is for ``transport.kill`` to make sure."""
        self._stopped = True
        await self.control(Verb.SHUTDOWN, limit_s=limit_s)
        await self.transport.wait_ended(limit_s)

    async def kill(self, cause: str) -> None:
        """End the process at once; ``cause`` is how it ended, for whoever waits for it."""
        self._killed_because = cause
        await self.transport.kill()

    # --- the ends of requests ---------------------------------------------------------------------------------------

    def answered_late(self, request: Request, reply: Reply, payload: Payload) -> None:
        """The reply to a request that was given up has come."""
        self.overdue.discard(request.id)
        self.unanswered.discard(request.id)
        if reply.ok:
            self.forget_result(request, payload)

    def forget_result(self, request: Request, payload: Payload) -> None:
        """Nobody wants this result, so nothing is kept for it."""
        kept = decode(payload) if request.keep else None
        if isinstance(kept, ResultHandle):
            self.in_background(self._release(kept))

    def engine_of(self, request: Request) -> str | None:
        """The name of the engine that a request is for."""
        return self.worker_id if request.engine_name is None and request.verb is Verb.CALL else request.engine_name

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what no caller waits for."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _release(self, handle: ResultHandle) -> None:
        with contextlib.suppress(errors.CallError):  # of a worker that has ended, or hangs
            await self.control(Verb.RELEASE, handle.id)

    async def locate(self, request_id: int, limit_s: float) -> CallState | None:
        """Ask the worker where a call is; calls that are asked about together share one question.

        Args:
            request_id: of the call.
            limit_s: seconds for the answer.

        Returns: the answer; None when there is none in time.
        """
        self._to_locate.append(request_id)
        if self._locating is None:
            self._locating = asyncio.ensure_future(self._locate_all(limit_s))
        found = await asyncio.shield(self._locating)
        return found.get(request_id)

    async def _locate_all(self, limit_s: float) -> dict[int, CallState]:
        await asyncio.sleep(0)  # the calls that become late at the same time add theirs
        request_ids, self._to_locate, self._locating = self._to_locate, [], None
        try:
            found: dict[int, CallState] = await self.control(Verb.INSPECT, request_ids, limit_s=limit_s)
        except errors.CallError:  # no answer: the errors of the calls are raised without the line
            return {}
        return found

    async def timed_out(
        self, request: Request, elapsed_s: float, limit_s: float, source: str, seen: CallState | None
    ) -> errors.CallTimeoutError:
        """The error of a call that is late. A call that has not begun is withdrawn, and its error waits a moment for that.

        Args:
            request: the call's.
            elapsed_s: seconds since it began.
            limit_s: its limit in seconds, and ``source`` the setting that it comes from.
            seen: where the worker said that the call was, shortly before the limit; None when it gave no answer.
        """
        state, stack = "it did not answer within the limit", ""
        if request.verb in (Verb.CALL, Verb.CREATE_ENGINE):
            if seen is None:
                state = "it did not say in time where the call is; the log has it once it does"
            withdrawal = asyncio.ensure_future(self._withdraw(request, elapsed_s, is_seen=seen is not None))
            self._background.add(withdrawal)
            withdrawal.add_done_callback(self._background.discard)
            if seen is not None and seen.state != "running":
                await asyncio.wait([withdrawal], timeout=_WITHDRAWAL_S)
                seen = withdrawal.result() or seen if withdrawal.done() else seen
        if seen is not None:
            state, stack = _place_of(seen), seen.stack
        return errors.CallTimeoutError(
            worker_id=self.worker_id,
            engine_name=self.engine_of(request),
            method=request.method or request.verb.value,
            elapsed_s=elapsed_s,
            limit_s=limit_s,
            limit_source=source,
            worker_alive=seen is not None,
            state=state,
            stack=stack,
            log_path=self.log_path,
        )

    async def _withdraw(self, request: Request, elapsed_s: float, *, is_seen: bool) -> CallState | None:
        """Withdraw a call that is late; where its error could not say where it was, the log does. None without an answer."""
        try:
            call: CallState = await self.control(Verb.CANCEL, request.id, limit_s=_LATE_ANSWER_S)
        except errors.CallError:
            return None
        if call.state == "withdrawn":
            self.overdue.discard(request.id)
        if not is_seen:
            name = dotted(self.engine_of(request), request.method or request.verb.value)
            place = _place_of(call) + (f"; its engine thread is at:\n{call.stack}" if call.stack else "")
            log.warning("%s: %s timed out after %.2f s: %s", self.worker_id, name, elapsed_s, place)
        return call

    async def failed(self, request: Request) -> errors.WorkerFailedError:
        """The error of a request whose worker has ended."""
        if self._ending is None:
            if self._ran_at_end is None:
                oldest = min(self.in_flight.values(), key=lambda call: call.started, default=None)
                self._ran_at_end = ("", 0.0) if oldest is None else (oldest.name, time.monotonic() - oldest.started)
            ending = await self.transport.ending()
            if self._killed_because and ending.exit_signal in (None, signal.SIGKILL):  # else it ended before the kill
                ending = msgspec.structs.replace(ending, cause=self._killed_because)
            self._ending = ending
        running, running_s = self._ran_at_end or ("", 0.0)
        return errors.WorkerFailedError(
            worker_id=self.worker_id,
            engine_name=self.engine_of(request),
            method=request.method or request.verb.value,
            node=self.node,
            pid=self.pid,
            cause=self._ending.cause,
            exit_code=self._ending.exit_code,
            exit_signal=self._ending.exit_signal,
            running=running or None,
            running_s=running_s if running else None,
            log_path=self._ending.log_path or self.log_path,
            log_tail=self._ending.log_tail,
            next_step=self.advice.get(self.worker_id.rpartition("/")[0], ""),
            aftermath=self._ending.aftermath,
        )


def _place_of(call: CallState) -> str:
    """Where a late call is, for people."""
    running = f"{call.running} (for {call.running_s or 0.0:.1f} s)" if call.running else "nothing"
    return {
        "running": f"the call still runs there: {running}",
        "waiting": f"the call had not begun behind {running}, and will be withdrawn if it still has not",
        "withdrawn": f"the call had not begun behind {running} and was withdrawn",
        "ended": "the call does not run there: it ended just now and its result was dropped, or it had not arrived and will "
        "not be begun",
    }[call.state]


def encode_arguments(worker_id: str, engine_name: str, method: str, arguments: tuple[Any, ...]) -> Payload:
    """Pack a call's arguments. Raises ArgumentNotSerializableError with the path to the part that is to blame."""
    try:
        return encode(arguments, root="arguments")
    except errors.CodecError as error:
        raise errors.ArgumentNotSerializableError(
            worker_id=worker_id,
            engine_name=engine_name,
            method=method,
            path=_argument_path(error.path, len(arguments)),
            value_type=error.value_type,
            reason=error.reason,
        ) from error


def _argument_path(path: str, num_parts: int) -> str:
    """'arguments[0][1].x' as the caller wrote it: 'args[1].x'."""
    names = ("args", "kwargs") if num_parts == 2 else ("engine", "args", "kwargs")
    for index, name in enumerate(names):
        path = path.replace(f"arguments[{index}]", name, 1)
    return path
