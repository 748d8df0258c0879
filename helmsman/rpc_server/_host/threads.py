"""Threads that run engine code in a worker, and reports of their activity.

Synchronous methods run on one thread, async methods on one event loop.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, Protocol

import msgspec

from helmsman._base.loops import LAST_TASKS_S, start_loop
from helmsman._base.readiness import Bell
from helmsman._process.recorder import CallLog
from helmsman._wire.remote_errors import OWN_PACKAGES

SWITCH_INTERVAL_S = 1e-6
_SIGNALS_EVERY_S = 1.0
"""Longest time in seconds until an idle main thread handles a signal, as of a preemption."""


def share_interpreter() -> None:
    """Make the threads of this process switch more often than Python's default of 5 ms.

    A thread requests the interpreter lock only after a whole interval without a release. Beside an
    engine that releases the lock every 7 to 70 us, health took 1.3 to 3.8 s with 5 ms, and 28 ms in
    the median with 1 us. Two threads that both compute in Python become 10 % slower.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)


class Running(msgspec.Struct, frozen=True):
    request_id: object
    name: str
    since: float
    """time.monotonic() at its start."""
    task: asyncio.Task[Any] | None = None
    """Its task if it runs on the event loop."""


class _Waiting:
    """Pending calls by request id: each begins, or is withdrawn, exactly once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while a call changes from waiting to running."""
        self._on_withdrawal: dict[object, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._on_withdrawal)

    def add(self, request_id: object, on_withdrawal: Callable[[], None]) -> None:
        self._on_withdrawal[request_id] = on_withdrawal

    def begins(self, request_id: object) -> bool:
        """Return whether a call may begin; False if it was withdrawn. The caller holds the lock."""
        return self._on_withdrawal.pop(request_id, None) is not None

    def withdraw(self, request_id: object) -> bool:
        with self.lock:
            on_withdrawal = self._on_withdrawal.pop(request_id, None)
        if on_withdrawal is None:
            return False
        on_withdrawal()
        return True

    def has(self, request_id: object) -> bool:
        with self.lock:
            return request_id in self._on_withdrawal

    def drop_all(self) -> None:
        with self.lock:
            self._on_withdrawal.clear()


class RequestSource(Protocol):
    """Requests of a connection, which an idle engine thread reads itself."""

    bell: Bell
    """Ends ``submit_next``."""

    def claim(self) -> bool:
        """Keep other threads from reading; False if one does, or if the connection has ended."""

    def submit_next(self, limit_s: float | None) -> None:
        """Wait until requests arrive, the bell rings or the limit passes; submit the requests."""

    def release(self) -> None:
        """Let other threads read again."""


class EngineThread:
    """Runs work in the order of submission, always on the same thread.

    The order keeps collectives of several ranks aligned; a single thread keeps a device context
    current.

    Args:
        record: Shows and records the calls.
    """

    def __init__(self, record: CallLog | None = None) -> None:
        self._record = record
        self._queue: queue.SimpleQueue[tuple[object, str, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self.waiting = _Waiting()
        self.occupant: Running | None = None
        """The running call."""
        self.thread: threading.Thread | None = None
        self._requests: RequestSource | None = None
        self._bell: Bell | None = None
        """Set while the thread reads; rung for work that others submit."""

    def start(self, name: str) -> None:
        threading.Thread(target=self.run, name=name, daemon=True).start()

    def run(self) -> None:
        self.thread = threading.current_thread()
        while (item := self._next()) is not None:
            request_id, name, work = item
            with self.waiting.lock:
                if not self.waiting.begins(request_id):
                    continue
                self.occupant = running = Running(request_id, name, time.monotonic())
            record, slot = self._record, 0
            if record is not None:
                slot = record.begun(name, request_id, running.since)
            try:
                work()
            finally:
                self.occupant = None
                if record is not None:
                    record.ended(slot, name, request_id, running.since)
                del item, work  # else this call's arguments live until the next call

    def _next(self) -> tuple[object, str, Callable[[], None]] | None:
        """Wait for work.

        The wait of the main thread is cut into parts: a signal that arrives just before it, or at
        another thread, does not interrupt it, and would be handled at the next call only.
        """
        limit_s = _SIGNALS_EVERY_S if self.thread is threading.main_thread() else None
        while self._queue.empty():
            requests = self._requests
            if requests is not None and requests.claim():
                self._read(requests, limit_s)
                continue
            try:
                return self._queue.get(timeout=limit_s)
            except queue.Empty:
                continue
        return self._queue.get()

    def read_from(self, requests: RequestSource) -> None:
        """Let the thread read these requests while it is idle, so that a call wakes no other."""
        self._requests = requests
        self._queue.put((None, "", lambda: None))  # wakes it; there is no call of this id
        self._wake()

    def _read(self, requests: RequestSource, limit_s: float | None) -> None:
        self._bell = requests.bell  # before the look at the queue, which ``_wake`` follows
        try:
            if self._queue.empty():
                requests.submit_next(limit_s)
        finally:
            self._bell = None
            requests.release()

    def _wake(self) -> None:
        bell = self._bell
        if bell is not None and threading.current_thread() is not self.thread:
            bell.ring()

    def submit(
        self,
        request_id: object,
        name: str,
        work: Callable[[], None],
        withdrawn: Callable[[], None] = lambda: None,
    ) -> None:
        """Queue work.

        Args:
            request_id: Identifies the call for a withdrawal.
            name: Name of the call in reports.
            work: Must not raise.
            withdrawn: Called instead of ``work`` if the call is withdrawn before it begins.
        """
        with self.waiting.lock:
            self.waiting.add(request_id, withdrawn)
            self._queue.put((request_id, name, work))
        self._wake()

    def stop(self) -> None:
        self._queue.put(None)
        self._wake()


class EngineLoop:
    """An event loop on its own thread, which starts with the first call of an async method.

    Args:
        name: Name of the thread.
        record: Shows and records the calls.
    """

    def __init__(self, name: str, record: CallLog | None = None) -> None:
        self._record = record
        self.failure: str | None = None
        """Why the last attempt to start the thread failed. The next call tries again."""
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None
        self._ids = itertools.count()
        self.waiting = _Waiting()
        """Calls that the loop has not begun, for example while a coroutine blocks it."""
        self.running: dict[int, Running] = {}

    def submit(
        self,
        request_id: object,
        name: str,
        coroutine: Callable[[], Coroutine[Any, Any, None]],
        withdrawn: Callable[[], None] = lambda: None,
    ) -> None:
        """Start a coroutine on the loop.

        Args:
            request_id: Identifies the call for a withdrawal.
            name: Name of the call in reports.
            coroutine: Creates the coroutine, which must not raise.
            withdrawn: Called instead if the call is withdrawn before it begins.

        Raises:
            RuntimeError: The thread cannot be started.
        """
        key = next(self._ids)

        async def tracked() -> None:
            with self.waiting.lock:
                if not self.waiting.begins(request_id):
                    return
                self.running[key] = running = Running(
                    request_id, name, time.monotonic(), asyncio.current_task()
                )
            record, slot = self._record, 0
            if record is not None:
                slot = record.begun(name, request_id, running.since)
            try:
                await coroutine()
            finally:
                del self.running[key]
                if record is not None:
                    record.ended(slot, name, request_id, running.since)

        loop = self._ensure()
        with self.waiting.lock:
            self.waiting.add(request_id, withdrawn)
        asyncio.run_coroutine_threadsafe(tracked(), loop)

    @property
    def occupant(self) -> Running | None:
        """The call whose code the loop executes now; None between calls or in other tasks."""
        loop = self._loop
        task = asyncio.current_task(loop) if loop is not None else None
        return next((call for call in list(self.running.values()) if call.task is task), None)

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for running in list(self.running.values()):
            counts[running.name] = counts.get(running.name, 0) + 1
        return counts

    def stop(self) -> None:
        """Stop the loop: cancels running calls and drops pending ones."""
        self.waiting.drop_all()
        with self.waiting.lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join(2 * LAST_TASKS_S)

    def _ensure(self) -> asyncio.AbstractEventLoop:
        with self.waiting.lock:
            if self._loop is None:
                try:
                    self._loop, self.thread = start_loop(self._name)
                except RuntimeError as error:
                    self.failure = (
                        f"no thread for async methods can be started ({self._name}): {error}. "
                        "Raise the limit on processes and "
                        "threads (ulimit -u, the container's pids limit) or start fewer; the next "
                        "async call tries again."
                    )
                    raise RuntimeError(self.failure) from error
                self.failure = None
            return self._loop


# --- reports of activity --------------------------------------------------------------------------


def all_stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, '?')} ({ident})\n{_format(frame)}")
    return "\n".join(parts)


def thread_stack(thread: threading.Thread | None) -> str:
    """Format the stack of a thread without our own frames at its root; '' if it is not running."""
    frame = (
        sys._current_frames().get(thread.ident)
        if thread is not None and thread.ident is not None
        else None
    )
    return _format(frame, skip_own=True) if frame is not None else ""


def awaited_frames(task: asyncio.Task[Any]) -> list[FrameType]:
    """Return the frames of a task without Helmsman's own; see ``coroutine_frames``."""
    return [each for each in coroutine_frames(task) if not _is_own(each)]


def coroutine_frames(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """Yield the frames of a suspended or running task, through the coroutines that it awaits."""
    awaited: Any = task.get_coro()
    for _ in range(_MOST_AWAITED):
        frame = next(
            (f for name in _FRAMES if (f := getattr(awaited, name, None)) is not None), None
        )
        if frame is None:
            # Such as the object that __anext__ of an async generator returns.
            awaited = next((e for e in gc.get_referents(awaited) if _has_frame(e)), None)
            if awaited is None:
                return
            continue
        yield frame
        awaited = next(
            (e for name in _AWAITS if (e := getattr(awaited, name, None)) is not None), None
        )
        if awaited is None:
            return


_MOST_AWAITED = 60
_FRAMES = "cr_frame", "ag_frame", "gi_frame"
_AWAITS = "cr_await", "ag_await", "gi_yieldfrom"


def _has_frame(found: object) -> bool:
    return any(getattr(found, name, None) is not None for name in _FRAMES)


def task_stack(task: asyncio.Task[Any]) -> str:
    """Format the stack of a task, through the coroutines that it awaits."""
    lines: list[str] = []
    for frame in awaited_frames(task):
        lines += traceback.format_list(traceback.StackSummary.extract([(frame, frame.f_lineno)]))
    return "".join(lines).rstrip("\n")


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(OWN_PACKAGES)


def frames_of(frame: FrameType, *, skip_own: bool = False) -> list[FrameType]:
    """Return the frames of a thread, outermost first; those above Helmsman's last one if asked."""
    frames = [each for each, _ in traceback.walk_stack(frame)][::-1]
    own = [index for index, each in enumerate(frames) if skip_own and _is_own(each)]
    return frames[own[-1] + 1 if own else 0 :]


def _format(frame: FrameType, *, skip_own: bool = False) -> str:
    entries = ((each, each.f_lineno) for each in frames_of(frame, skip_own=skip_own))
    return "".join(traceback.format_list(traceback.StackSummary.extract(entries))).rstrip("\n")
