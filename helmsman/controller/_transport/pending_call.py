"""One request, from its sending to its answer: no task waits for it, callbacks do."""

from __future__ import annotations

import abc
import asyncio
import functools
import pickle
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from helmsman.api import errors
from helmsman.api.fan_out import Fanout, lead_of
from helmsman.controller._aio.event_loop import background_loop, forbid_blocking, mailbox_of, run_on_loop
from helmsman.controller._transport.base import Outgoing, TransportLostError
from helmsman.rpc_server._wire.codec import Payload, decode
from helmsman.rpc_server._wire.messages import CallState, Reply, dotted

if TYPE_CHECKING:
    from helmsman.controller._transport.client import WorkerClient


class Exchange(abc.ABC):
    """One request to one worker; used on the event loop."""

    __slots__ = ("_client", "_given_up", "_is_lost", "_outgoing", "_seen", "started")

    def __init__(self, client: WorkerClient, outgoing: Outgoing, started: float | None = None) -> None:
        self._client = client
        self._outgoing = outgoing
        self._given_up = False
        self._is_lost = False
        """Whether the worker has ended while its exit status is still being looked up."""
        self._seen: CallState | None = None
        """State of the call as the worker reported it shortly before the limit."""
        self.started = time.monotonic() if started is None else started

    def begin(self) -> None:
        """Send the request. One that cannot be encoded fails as if the worker had refused it."""
        if self._outgoing.is_call:
            self._client.in_flight[self._outgoing.request.id] = self
        try:
            self._client.transport.post(self._outgoing, self)
        except Exception as error:  # noqa: BLE001 - it is the answer of this request
            self.failed(error)

    @property
    def name(self) -> str:
        """'engine.method'."""
        request = self._outgoing.request
        return dotted(self._client.engine_of(request), request.method or request.verb.value)

    @abc.abstractmethod
    def _succeeded(self, payload: Payload) -> bool:
        """Take the result; False when nobody wants it any more."""

    @abc.abstractmethod
    def _broke(self, error: Exception) -> None:
        """Take the error."""

    def replied(self, reply: Reply, payload: Payload) -> None:
        """As Awaited's."""
        client, request = self._client, self._outgoing.request
        client.in_flight.pop(request.id, None)
        if self._given_up:
            client.answered_late(request, reply, payload)
        elif not reply.ok:
            self._broke(_error_of(payload))
        elif not self._succeeded(payload):
            client.forget_result(request, payload)

    def failed(self, error: Exception) -> None:
        """As Awaited's."""
        if self._given_up:
            self._client.in_flight.pop(self._outgoing.request.id, None)
            self._client.overdue.discard(self._outgoing.request.id)
            self._client.unanswered.discard(self._outgoing.request.id)
        elif isinstance(error, TransportLostError):
            self._is_lost = True
            self._client.in_background(self._lost(error))
        else:
            self._client.in_flight.pop(self._outgoing.request.id, None)
            self._broke(error)

    def inquire(self, lead_s: float) -> None:
        """The limit is ``lead_s`` seconds away: ask the worker where the call is, for the error that may follow."""
        if self._outgoing.request.id in self._client.in_flight and not self._is_lost:
            self._client.in_background(self._inquire(lead_s))

    async def _inquire(self, lead_s: float) -> None:
        self._seen = await self._client.locate(self._outgoing.request.id, max(lead_s, 0.001))

    def give_up(self, limit_s: float, source: str) -> None:
        """Fail a late call. Its request stays with the transport, since the reply still has to be taken and its
        memory freed, and the worker is OVERDUE until then. A worker that has ended raises another error, which is pending."""
        if self._is_lost:
            return
        self._given_up = True
        self._client.overdue.add(self._outgoing.request.id)
        self._client.in_background(self._told_late(limit_s, source))

    def withdraw(self) -> None:
        """Drop a request for health whose worker was observed instead."""
        self._given_up = True
        self._client.unanswered.add(self._outgoing.request.id)

    async def _lost(self, error: TransportLostError) -> None:
        failure = await self._client.failed(self._outgoing.request)
        failure.__cause__ = error
        self._end(failure)

    async def _told_late(self, limit_s: float, source: str) -> None:
        elapsed_s = time.monotonic() - self.started
        self._end(await self._client.timed_out(self._outgoing.request, elapsed_s, limit_s, source, self._seen))

    def _end(self, error: errors.CallError) -> None:
        self._client.in_flight.pop(self._outgoing.request.id, None)
        self._broke(error)


class FutureExchange(Exchange):
    """For a coroutine on Helmsman's own event loop; late after ``limit_s`` seconds, as ``source`` says."""

    __slots__ = ("_limit_s", "_source", "_timer", "answer")

    def __init__(self, client: WorkerClient, outgoing: Outgoing, limit_s: float, source: str) -> None:
        loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[Payload] = loop.create_future()
        self._limit_s = limit_s
        self._source = source
        lead_s = lead_of(limit_s)
        self._timer = loop.call_later(limit_s - lead_s, self._almost_late, lead_s)
        super().__init__(client, outgoing)

    @classmethod
    def begun(cls, client: WorkerClient, outgoing: Outgoing, limit_s: float, source: str) -> asyncio.Future[Payload]:
        """Send a request; returns its answer to come."""
        exchange = cls(client, outgoing, limit_s, source)
        exchange.begin()
        return exchange.answer

    def _succeeded(self, payload: Payload) -> bool:
        self._timer.cancel()
        if self.answer.done():  # cancelled
            return False
        self.answer.set_result(payload)
        return True

    def _broke(self, error: Exception) -> None:
        self._timer.cancel()
        if not self.answer.done():
            self.answer.set_exception(error)

    def _almost_late(self, lead_s: float) -> None:
        if not self.answer.done():
            self._timer = asyncio.get_running_loop().call_later(lead_s, self._late)
            self.inquire(lead_s)

    def _late(self) -> None:
        if not self.answer.done():
            self.give_up(self._limit_s, self._source)


class _SlotExchange(Exchange):
    """For a caller in another thread, who is woken once its answer is there, and looks at the clock himself."""

    __slots__ = ("_on_filled", "error", "is_abandoned", "payload")

    def __init__(self, client: WorkerClient, outgoing: Outgoing, on_filled: Callable[[], None]) -> None:
        self._on_filled = on_filled
        self.is_abandoned = False
        """Whether the caller no longer waits."""
        self.payload: Payload | None = None
        self.error: Exception | None = None
        super().__init__(client, outgoing)

    def begin(self) -> None:
        """Send the request; on the event loop."""
        if not self.is_abandoned:
            super().begin()

    def abandon(self) -> None:
        """The caller no longer waits."""
        self.is_abandoned = True

    def late(self, limit_s: float, source: str) -> None:
        """End the call at its limit; on the event loop."""
        if self.payload is None and self.error is None and not self.is_abandoned:
            self.give_up(limit_s, source)

    def result(self) -> Payload:
        """What the worker answered. Raises the error."""
        if self.payload is None:
            assert self.error is not None
            try:
                raise self.error
            finally:
                self.error = None  # or it would keep itself alive, by its traceback and this frame
        return self.payload

    def _succeeded(self, payload: Payload) -> bool:
        if self.is_abandoned:
            return False
        self.payload = payload
        self._on_filled()
        return True

    def _broke(self, error: Exception) -> None:
        if not self.is_abandoned:
            self.error = error
            self._on_filled()


def exchange_sync(client: WorkerClient, outgoing: Outgoing, limit_s: float, source: str) -> Payload:
    """Send a request and block for its answer; an interrupt of the waiting thread leaves the call to its worker."""
    forbid_blocking()
    waiting = threading.Lock()
    waiting.acquire()
    exchange = _SlotExchange(client, outgoing, waiting.release)
    try:
        run_on_loop(exchange.begin)
        if not waiting.acquire(timeout=min(max(limit_s - lead_of(limit_s), 0.0), threading.TIMEOUT_MAX)):
            left_s = max(limit_s - (time.monotonic() - exchange.started), 0.0)
            run_on_loop(functools.partial(exchange.inquire, left_s))
            if not waiting.acquire(timeout=left_s):
                run_on_loop(functools.partial(exchange.late, limit_s, source))
                waiting.acquire()
    except BaseException:
        exchange.abandon()
        raise
    return exchange.result()


async def exchange_async(client: WorkerClient, outgoing: Outgoing, limit_s: float, source: str) -> Payload:
    """Send a request and await its answer, on whichever event loop the caller is."""
    loop = asyncio.get_running_loop()
    if loop is background_loop():
        return await FutureExchange.begun(client, outgoing, limit_s, source)
    filled: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not filled.done():
            filled.set_result(None)

    exchange = _SlotExchange(client, outgoing, functools.partial(mailbox_of(loop).post, settle))
    run_on_loop(exchange.begin)
    lead_s = lead_of(limit_s)
    timer: asyncio.TimerHandle

    def almost_late() -> None:
        nonlocal timer
        timer = loop.call_later(lead_s, run_on_loop, functools.partial(exchange.late, limit_s, source))
        run_on_loop(functools.partial(exchange.inquire, lead_s))

    timer = loop.call_later(limit_s - lead_s, almost_late)
    try:
        await filled
    except BaseException:
        exchange.abandon()
        raise
    finally:
        timer.cancel()
    return exchange.result()


class GroupExchange(Exchange):
    """A request that is one of many; their deadline is the group's."""

    __slots__ = ("_group", "_worker_id")

    def __init__(self, client: WorkerClient, outgoing: Outgoing, group: Fanout, worker_id: str) -> None:
        self._group = group
        self._worker_id = worker_id  # with colocation the client may go by another role's name
        group.pending[worker_id] = self
        super().__init__(client, outgoing, group.started)

    def cancel(self) -> None:
        """Nobody waits any more; what has been sent goes on."""

    def _succeeded(self, payload: Payload) -> bool:
        try:
            value = decode(payload)
        except Exception as error:  # noqa: BLE001 - handed to whoever awaits the answer
            self._group.failed(self._worker_id, error)
        else:
            self._group.succeeded(self._worker_id, value)
        return True

    def _broke(self, error: Exception) -> None:
        self._group.failed(self._worker_id, error)


def _error_of(answer: Payload) -> errors.HelmsmanError:
    """The error in a reply, with the original exception as its cause where that can be unpickled here."""
    try:
        error: errors.HelmsmanError = decode(answer)
    except errors.HelmsmanError as unreadable:
        return unreadable
    original = getattr(error, "original", None)
    if isinstance(error, errors.EngineCallError) and original is not None:
        error.original = None
        try:
            error.__cause__ = pickle.loads(original)
        except Exception:  # noqa: BLE001 - unpickling runs the exception's own code; its text is in our error already
            error.__cause__ = None
    return error
