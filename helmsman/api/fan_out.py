"""Operations on many workers at once, collected as they end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_observed: set[Fanout] = set()
"""Fan-outs with operations that are still running but no longer awaited. The event loop references
tasks only weakly.
"""


_LEAD_S = 2.0
_LEAD_SHARE = 0.75


def lead_of(limit_s: float) -> float:
    """Return how many seconds before a limit to query the worker for the state of its call.

    The answer must arrive by the limit. The lead is most of a short limit: a worker whose engine
    computes in Python needs some hundred milliseconds to answer.
    """
    return min(_LEAD_SHARE * max(limit_s, 0.0), _LEAD_S)


class Member(Protocol):
    """The operation of one worker."""

    @property
    def is_waiting(self) -> bool:
        """Whether the worker has reported that the operation has not begun."""

    def cancel(self) -> object:
        """Stop awaiting the operation."""

    def inquire(self, lead_s: float) -> None:
        """Query the worker for the state of the operation, which is overdue after ``lead_s``."""

    def give_up(self, limit_s: float, source: str) -> None:
        """Fail the operation because its limit has passed.

        Args:
            limit_s: The limit in seconds.
            source: The setting that defines the limit.
        """


class Fanout:
    """Operations that have begun on several workers; created and used on the event loop.

    Args:
        limit_s: Seconds after which pending operations are overdue; None if each operation has its
            own deadline.
        source: The setting that defines the limit, for error messages.
    """

    def __init__(self, limit_s: float | None = None, source: str = "") -> None:
        self.results: dict[str, Any] = {}
        self.failures: dict[str, BaseException] = {}
        """In the order of occurrence."""
        self.pending: dict[str, Member] = {}
        """Operations that have begun; the caller that begins one adds it here. ``succeeded`` or
        ``failed`` removes it.
        """
        self.on_end: Callable[[str], None] | None = None
        """Called with the worker id of each operation that has ended, unless it is observed."""
        self.started = time.monotonic()
        self._observed: dict[str, tuple[str, Callable[[Any], None] | None]] = {}
        """Worker id -> description for the log, and the callback for the result."""
        self._until_failure = False
        self._changed: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if limit_s is not None:
            lead_s = lead_of(limit_s)
            self._timer = asyncio.get_running_loop().call_later(
                limit_s - lead_s, self._almost_late, lead_s, limit_s, source
            )

    def expect_awaitable(self, worker_id: str, awaitable: Awaitable[Any]) -> None:
        """Begin an operation.

        Args:
            worker_id: Id of its worker.
            awaitable: The operation.
        """
        task = asyncio.ensure_future(awaitable)
        self.pending[worker_id] = _Task(task)
        task.add_done_callback(lambda ended: self._task_ended(worker_id, ended))

    def succeeded(self, worker_id: str, value: Any) -> None:
        """Record the result of an operation.

        Args:
            worker_id: Id of its worker.
            value: The result.
        """
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
        if self.on_end is not None:
            self.on_end(worker_id)
        if not self.pending:
            self._wake()

    def failed(self, worker_id: str, error: BaseException) -> None:
        """Record the failure of an operation that failed or could not begin.

        Args:
            worker_id: Id of its worker.
            error: The exception.
        """
        self.pending.pop(worker_id, None)
        what, _ = self._observed.pop(worker_id, ("", None))
        if what:
            logger.warning("%s: ended with %s: %s", what, type(error).__name__, error)
            self._release()
            return
        self.failures[worker_id] = error
        if self.on_end is not None:
            self.on_end(worker_id)
        if self._until_failure or not self.pending:
            self._wake()

    async def wait(self, *, timeout_s: float | None = None, until_failure: bool = False) -> None:
        """Wait until all operations have ended, or until a timeout or the first failure.

        Args:
            timeout_s: Limit of the wait in seconds; None waits without limit.
            until_failure: Whether to return at the first failure.
        """
        self._until_failure = until_failure
        if self.pending and not (until_failure and self.failures):
            self._changed = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._changed], timeout=timeout_s)
            self._changed = None
        if not self.pending:
            self._stop_timer()

    def observe(self, worker_id: str, what: str, forget: Callable[[Any], None] | None) -> None:
        """Leave an operation running without awaiting it; its end is logged.

        Args:
            worker_id: Id of its worker.
            what: Description for the log; not empty.
            forget: Called with the result, to release it.
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
    """An operation that is an asyncio task."""

    is_waiting = False

    def __init__(self, task: asyncio.Future[Any]) -> None:
        self._task = task

    def cancel(self) -> None:
        self._task.cancel()

    def inquire(self, lead_s: float) -> None:
        """Do nothing: the task has its own deadline."""

    def give_up(self, limit_s: float, source: str) -> None:
        """Do nothing: the task has its own deadline."""
