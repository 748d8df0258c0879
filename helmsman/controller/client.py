"""The controller's view of one worker: deadlines, at-most-once and the meaning of errors. What carries the messages is a
Transport."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import functools
import itertools
import pickle
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec

from helmsman.api import errors
from helmsman.api.scheduler import ResultHandle, Timeouts, WorkerHealth, WorkerState, WorkerStatus
from helmsman.controller.places import Place
from helmsman.rpc_server.codec import Payload, decode, encode
from helmsman.rpc_server.messages import CallState, Reply, Request, Verb, dotted

LOG_TAIL_LINES = 50


class TransportLostError(Exception):
    """The worker's process, or the way to it, is gone; only a transport raises it and only WorkerClient sees it."""


class Ending(msgspec.Struct, frozen=True):
    """How a worker ended, as far as it can be known."""

    cause: str
    """Part of a sentence: 'was ended by SIGKILL'."""
    exit_code: int | None = None
    exit_signal: int | None = None
    log_tail: str = ""


class Transport(abc.ABC):
    """Carries requests to one worker. A request is sent at most once, whatever happens.

    Engine work (``ENGINE_WORK``) arrives in the order in which ``post`` was called, however long each takes to be packed: ranks
    that were called in one order must meet in their collectives in that order. Control verbs wait for nobody.
    """

    @abc.abstractmethod
    def post(self, request: Request, payload: Payload) -> asyncio.Future[tuple[Reply, Payload]]:
        """Send a request; returns its reply to come, which fails with TransportLostError when the worker is gone, and never
        times out by itself."""

    @abc.abstractmethod
    async def ending(self) -> Ending:
        """How the worker ended; called after TransportLostError, answers within about a second."""

    async def wait_ended(self, limit_s: float) -> None:  # noqa: B027 - where ending takes no time, there is nothing to wait for
        """Wait until the worker has ended by itself, at most ``limit_s`` seconds."""

    @abc.abstractmethod
    async def kill(self) -> None:
        """End the worker's process at once and await its end. Idempotent."""


class Turn:
    """Keeps work in the order in which it claimed its turn, also where some of it takes long to be packed."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._num_claims = 0

    @property
    def is_free(self) -> bool:
        """Whether nobody is before who comes now, so that he need not claim a turn."""
        return not self._num_claims

    def claim(self) -> contextlib.AbstractAsyncContextManager[None]:
        """A turn, behind all that were claimed before it; to be entered in the order of the claims, and once."""
        self._num_claims += 1
        return self._taken()

    @contextlib.asynccontextmanager
    async def _taken(self) -> AsyncIterator[None]:
        try:
            async with self._lock:
                yield
        finally:
            self._num_claims -= 1


NO_TURN = contextlib.nullcontext()


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
        self._timeouts = timeouts
        self._ids = itertools.count(1)
        self.in_flight: dict[int, tuple[str, float]] = {}
        self._overdue: set[int] = set()
        self._background: set[asyncio.Task[None]] = set()
        """The event loop itself holds tasks only weakly."""
        self._ending: Ending | None = None
        self._ran_at_end: tuple[str, float] | None = None
        """The oldest call in flight when the worker died, and for how many seconds."""
        self._stopped = False

    @property
    def node(self) -> str:
        """Address of its node."""
        return self.place.node

    # --- engine work ------------------------------------------------------------------------------------------------

    async def create_engine(self, engine_name: str, payload: Payload, limit_s: float) -> None:
        """Build an engine; ``payload`` is (path or class, args, kwargs)."""
        request = Request(next(self._ids), Verb.CREATE_ENGINE, engine_name)
        await self._exchange(request, payload, limit_s, "Timeouts.create_engine_s")

    def call(
        self,
        engine_name: str,
        method: str,
        payload: Payload,
        *,
        keep: bool = False,
        discard: bool = False,
        broadcast: bool | None = None,
        limit_s: float | None = None,
        take: Callable[[Payload], Any] | None = None,
    ) -> asyncio.Future[Any]:
        """Call an engine's method; ``payload`` is (args, kwargs). Returns the packed result to come, or what ``take`` makes of
        it."""
        request = Request(next(self._ids), Verb.CALL, engine_name, method, keep, broadcast, discard)
        if limit_s is None:
            return _Exchange(self, request, payload, self._timeouts.call_s, "Timeouts.call_s", take).answer
        return _Exchange(self, request, payload, limit_s, "the call's timeout argument", take).answer

    # --- control ----------------------------------------------------------------------------------------------------

    async def control(self, verb: Verb, *arguments: Any, limit_s: float | None = None) -> Any:
        """Ask a control verb and return its answer; ``Timeouts.health_s`` is the limit when none is given."""
        request = Request(next(self._ids), verb)
        source = "Timeouts.health_s" if limit_s is None else "the operation's deadline"
        payload = await self._exchange(request, encode(arguments), limit_s or self._timeouts.health_s, source)
        return decode(payload)

    async def status(self) -> WorkerStatus:
        """What is known of the worker, with its health where it answers."""
        health: WorkerHealth | None = None
        if self._ending is None and not self._stopped:
            try:
                health = await self.control(Verb.HEALTH)
            except errors.CallError:
                health = None  # the state below says what the failure means
        return WorkerStatus(
            worker_id=self.worker_id, state=self.state, node=self.node, pid=self.pid, log_path=self.log_path, health=health
        )

    @property
    def state(self) -> WorkerState:
        """READY, MARKED, FAILED or STOPPED."""
        if self._stopped:
            return WorkerState.STOPPED
        if self._ending is not None:
            return WorkerState.FAILED
        return WorkerState.MARKED if self._overdue else WorkerState.READY

    async def shut_down(self, limit_s: float) -> None:
        """Ask the process to end and give it time to; whether it did is for ``transport.kill`` to make sure."""
        self._stopped = True
        await self.control(Verb.SHUTDOWN, limit_s=limit_s)
        await self.transport.wait_ended(limit_s)

    # --- the one way of a request -----------------------------------------------------------------------------------

    def _exchange(self, request: Request, payload: Payload, limit_s: float, limit_source: str) -> asyncio.Future[Payload]:
        return _Exchange(self, request, payload, limit_s, limit_source).answer

    def consume(self, request: Request, sending: asyncio.Future[Any]) -> None:
        """Take a late outcome, so that asyncio does not report it as forgotten, and nothing is kept that nobody knows."""
        self._overdue.discard(request.id)
        if sending.cancelled() or sending.exception() is not None or not request.keep:
            return
        reply, answer = sending.result()
        kept = decode(answer) if reply.ok else None
        if isinstance(kept, ResultHandle):
            self.in_background(self._release(kept))

    def overdue(self, request: Request, sending: asyncio.Future[Any]) -> None:
        """Its caller has given up a request; the worker is marked until it is answered."""
        self._overdue.add(request.id)
        sending.add_done_callback(functools.partial(self.consume, request))

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what no caller waits for."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _release(self, handle: ResultHandle) -> None:
        with contextlib.suppress(errors.CallError):  # of a worker that has ended, or hangs
            await self.control(Verb.RELEASE, handle.id)

    async def timed_out(self, request: Request, elapsed_s: float, limit_s: float, source: str) -> errors.CallError:
        """The error of a call that is late, with what the worker says of it. A call that has not begun is withdrawn."""
        alive, stack = False, ""
        state = f"it gave no answer to a control request within {self._timeouts.health_s:g} s"
        if request.verb in (Verb.CALL, Verb.CREATE_ENGINE):
            try:
                call: CallState = await self.control(Verb.CANCEL, request.id)
            except errors.WorkerFailedError as error:
                return error
            except errors.CallError:
                stack = ""
            else:
                alive, stack = True, call.stack
                running = f"{call.running} (for {call.running_s or 0.0:.1f} s)"
                state = {
                    "running": f"the call still runs there: {running}",
                    "withdrawn": f"the call had not begun behind {running} and was withdrawn",
                    "ended": "the call does not run there: it ended just now and its result was dropped, or it had not "
                    "arrived and will not be begun",
                }[call.state]
                if call.state == "withdrawn":
                    self._overdue.discard(request.id)
        return errors.CallTimeoutError(
            worker_id=self.worker_id,
            engine_name=request.engine_name,
            method=request.method or request.verb.value,
            elapsed_s=elapsed_s,
            limit_s=limit_s,
            limit_source=source,
            worker_alive=alive,
            state=state,
            stack=stack,
            log_path=self.log_path,
        )

    async def failed(self, request: Request) -> errors.WorkerFailedError:
        if self._ending is None:
            if self._ran_at_end is None:
                oldest = min(self.in_flight.values(), key=lambda call: call[1], default=("", 0.0))
                self._ran_at_end = (oldest[0], time.monotonic() - oldest[1])
            self._ending = await self.transport.ending()
        running, running_s = self._ran_at_end or ("", 0.0)
        return errors.WorkerFailedError(
            worker_id=self.worker_id,
            engine_name=request.engine_name,
            method=request.method or request.verb.value,
            node=self.node,
            pid=self.pid,
            cause=self._ending.cause,
            exit_code=self._ending.exit_code,
            exit_signal=self._ending.exit_signal,
            running=running or None,
            running_s=running_s if running else None,
            log_path=self.log_path,
            log_tail=self._ending.log_tail,
        )


class _Exchange:
    """One request, from its sending to its answer: no task waits for it, callbacks do."""

    __slots__ = ("_client", "_limit_s", "_limit_source", "_request", "_sending", "_started", "_take", "_timer", "answer")

    def __init__(
        self,
        client: WorkerClient,
        request: Request,
        payload: Payload,
        limit_s: float,
        limit_source: str,
        take: Callable[[Payload], Any] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._client, self._request, self._limit_s, self._limit_source = client, request, limit_s, limit_source
        self._take = take
        self._started = time.monotonic()
        self.answer: asyncio.Future[Any] = loop.create_future()
        if request.verb in (Verb.CALL, Verb.CREATE_ENGINE):
            name = dotted(request.engine_name, request.method or request.verb.value)
            client.in_flight[request.id] = (name, self._started)
        self._sending = client.transport.post(request, payload)
        self._timer = loop.call_later(limit_s, self._late)
        self._sending.add_done_callback(self._replied)

    def _replied(self, sending: asyncio.Future[tuple[Reply, Payload]]) -> None:
        self._timer.cancel()
        if self.answer.done():  # its caller has given up
            self._client.in_flight.pop(self._request.id, None)
            self._client.consume(self._request, sending)
            return
        error = sending.exception()
        if error is None:
            self._client.in_flight.pop(self._request.id, None)
            reply, payload = sending.result()
            if not reply.ok:
                self.answer.set_exception(_error_of(payload))
                return
            try:
                self.answer.set_result(payload if self._take is None else self._take(payload))
            except Exception as failure:  # noqa: BLE001 - handed to whoever awaits the answer
                self.answer.set_exception(failure)
        elif isinstance(error, TransportLostError):
            self._client.in_background(self._lost(error))
        else:
            self._client.in_flight.pop(self._request.id, None)
            self.answer.set_exception(error)

    async def _lost(self, error: TransportLostError) -> None:
        failure = await self._client.failed(self._request)
        failure.__cause__ = error
        self._fail(failure)

    def _late(self) -> None:
        if self.answer.done():
            return
        # Giving up does not cancel the sending, whose reply has still to be taken and its memory given back.
        self._sending.remove_done_callback(self._replied)
        self._client.overdue(self._request, self._sending)
        self._client.in_background(self._told_late())

    async def _told_late(self) -> None:
        elapsed_s = time.monotonic() - self._started
        self._fail(await self._client.timed_out(self._request, elapsed_s, self._limit_s, self._limit_source))

    def _fail(self, error: errors.CallError) -> None:
        self._client.in_flight.pop(self._request.id, None)
        if not self.answer.done():
            self.answer.set_exception(error)


def _error_of(answer: Payload) -> errors.HelmsmanError:
    """The error in a reply, with the original exception as its cause where that can be unpickled here."""
    error: errors.HelmsmanError = decode(answer)
    original = getattr(error, "original", None)
    if isinstance(error, errors.EngineCallError) and original is not None:
        error.original = None
        try:
            error.__cause__ = pickle.loads(original)
        except Exception:  # noqa: BLE001 - unpickling runs the exception's own code; its text is in our error already
            error.__cause__ = None
    return error


def describe_exit(exit_code: int | None, exit_signal: int | None) -> str:
    """How a process ended, as part of a sentence."""
    if exit_signal is not None:
        name = errors.signal_name(exit_signal)
        likely = (
            " (no handler can stop that; often the kernel's or a container's out-of-memory kill)" if name == "SIGKILL" else ""
        )
        return f"was ended by {name}{likely}"
    if exit_code is not None:
        return f"exited with code {exit_code}"
    return "ended without leaving its exit status, most likely by SIGKILL (often an out-of-memory kill)"


def tail_of(path: str, num_lines: int = LOG_TAIL_LINES) -> str:
    """The last lines of a log file; '' when it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 64 * 1024))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num_lines:])


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
