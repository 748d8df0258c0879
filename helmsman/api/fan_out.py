"""Operations on many workers at once, as they end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_observed: set[Fanout] = set()
"""Those of which something runs on unawaited; the event loop holds tasks only weakly."""


_LEAD_S = 2.0
_LEAD_SHARE = 0.75


def lead_of(limit_s: float) -> float:
    """How many seconds before a limit the worker is asked where the call is, so that its answer is
    there at the limit.

    It is most of a short limit: a worker whose engine computes in Python needs some hundred
        milliseconds to answer.
    """
    return min(_LEAD_SHARE * max(limit_s, 0.0), _LEAD_S)


class Member(Protocol):
    """One worker's operation."""

    @property
    def is_waiting(self) -> bool:
        """Whether the worker has said that it had not begun."""

    def cancel(self) -> object:
        """Await it no longer."""

    def inquire(self, lead_s: float) -> None:
        """Ask the worker for the state of the operation, which will be late in ``lead_s``
        seconds.
        """

    def give_up(self, limit_s: float, source: str) -> None:
        """It is late."""


class Fanout:
    """Operations that were begun on several workers. Made and used on the event loop. Those that
    have not ended are late after ``limit_s`` seconds, which ``source`` says; None for operations
    that have deadlines of their own.
    """

    def __init__(self, limit_s: float | None = None, source: str = "") -> None:
        self.results: dict[str, Any] = {}
        self.failures: dict[str, BaseException] = {}
        """In the order in which they came."""
        self.pending: dict[str, Member] = {}
        """What has begun, and will be told by ``succeeded`` or ``failed``; who begins it puts it
        here.
        """
        self.started = time.monotonic()
        self._observed: dict[str, tuple[str, Callable[[Any], None] | None]] = {}
        """By worker: what is logged of its end, and what is given its result."""
        self._until_failure = False
        self._changed: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if limit_s is not None:
            lead_s = lead_of(limit_s)
            self._timer = asyncio.get_running_loop().call_later(
                limit_s - lead_s, self._almost_late, lead_s, limit_s, source
            )

    def expect_awaitable(self, worker_id: str, awaitable: Awaitable[Any]) -> None:
        """Begin an operation."""
        task = asyncio.ensure_future(awaitable)
        self.pending[worker_id] = _Task(task)
        task.add_done_callback(lambda ended: self._task_ended(worker_id, ended))

    def succeeded(self, worker_id: str, value: Any) -> None:
        """An operation has ended well."""
        self.pending.pop(worker_id, None)
        if self._observed:
            what, forget = self._observed.pop(worker_id, ("", None))
            if what:
                logger.info("%s: ended", what)
                if forget is not None:
                    forget(value)
                self._release()
                return
        self.results[worker_id] = value
        if not self.pending:
            self._wake()

    def failed(self, worker_id: str, error: BaseException) -> None:
        """An operation has failed, or could not even begin."""
        self.pending.pop(worker_id, None)
        what, _ = self._observed.pop(worker_id, ("", None))
        if what:
            logger.warning("%s: ended with %s: %s", what, type(error).__name__, error)
            self._release()
            return
        self.failures[worker_id] = error
        if self._until_failure or not self.pending:
            self._wake()

    async def wait(self, *, timeout_s: float | None = None, until_failure: bool = False) -> None:
        """Wait until all have ended; or until the first failure, or for so many seconds."""
        self._until_failure = until_failure
        if self.pending and not (until_failure and self.failures):
            self._changed = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._changed], timeout=timeout_s)
            self._changed = None
        if not self.pending:
            self._stop_timer()

    def observe(self, worker_id: str, what: str, forget: Callable[[Any], None] | None) -> None:
        """Let an operation run on unawaited: how it ends is logged, and its result is for
        ``forget``.
        """
        self._observed[worker_id] = what, forget
        _observed.add(self)

    def _task_ended(self, worker_id: str, task: asyncio.Future[Any]) -> None:
        if task.cancelled():
            what, _ = self._observed.pop(worker_id, ("", None))
            if what:
                logger.info("%s: no longer awaited", what)
                self.pending.pop(worker_id, None)
                self._release()
            else:
                self.failed(worker_id, asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.failed(worker_id, error)
        else:
            self.succeeded(worker_id, task.result())

    def _almost_late(self, lead_s: float, limit_s: float, source: str) -> None:
        self._timer = asyncio.get_running_loop().call_later(lead_s, self._late, limit_s, source)
        for member in list(self.pending.values()):
            member.inquire(lead_s)

    def _late(self, limit_s: float, source: str) -> None:
        for member in list(self.pending.values()):
            member.give_up(limit_s, source)

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _release(self) -> None:
        if not self._observed:
            _observed.discard(self)
            self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Task:
    """An operation that is a task."""

    is_waiting = False

    def __init__(self, task: asyncio.Future[Any]) -> None:
        self._task = task

    def cancel(self) -> None:
        self._task.cancel()

    def inquire(self, lead_s: float) -> None:
        """It has a deadline of its own."""

    def give_up(self, limit_s: float, source: str) -> None:
        """It has a deadline of its own."""
