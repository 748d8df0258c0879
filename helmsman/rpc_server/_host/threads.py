"""The two places where engine code runs in a worker: one thread for synchronous methods, one event loop for async ones."""

from __future__ import annotations

import asyncio
import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from helmsman.rpc_server._process.pulse import CallRecord

SWITCH_INTERVAL_S = 1e-6
_LAST_TASKS_S = 1.0
"""For what is in flight on a loop that is stopped to end by its cancellation."""


def share_interpreter() -> None:
    """Let the threads of this process take turns more often than Python's 5 ms.

    A thread that waits for the interpreter's lock asks for it only after it has seen no release for a whole interval. Against
    an engine in a loop of short operations, each of which lets go of the lock and takes it back at once, it never does: with
    5 ms and a release every 7 to 70 us, health took 1.3 to 3.8 s on an idle machine of two cores, with 0.2 ms 1.0 to 2.6 s,
    with 1 us 28 ms at most in the median. The price is a tenth for two threads that both compute in Python; a rollout pays
    nothing.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)


class Running(msgspec.Struct, frozen=True):
    """A piece of work that is under way."""

    request_id: object
    name: str
    since: float
    """time.monotonic() at its begin."""
    task: asyncio.Task[Any] | None = None
    """Its task, when it runs on the event loop."""


class EngineThread:
    """Runs work one after another, in the order of submission, always on the same thread.

    That order is what keeps collectives of several ranks aligned, and one thread is what keeps a device context current.

    Args:
        record: for observers outside this process, where there are any.
    """

    def __init__(self, record: CallRecord | None = None) -> None:
        self._record = record
        self._queue: queue.SimpleQueue[tuple[object, str, Callable[[], None]] | None] = queue.SimpleQueue()
        self._waiting: dict[object, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self.running: Running | None = None
        self.thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        """Run on a new daemon thread."""
        threading.Thread(target=self.run, name=name, daemon=True).start()

    def run(self) -> None:
        """Run on the calling thread until stop."""
        self.thread = threading.current_thread()
        while (item := self._queue.get()) is not None:
            request_id, name, work = item
            with self._lock:
                if self._waiting.pop(request_id, None) is None:
                    continue  # withdrawn
                self.running = running = Running(request_id, name, time.monotonic())
            if self._record is not None:
                self._record.begun(name, running.since)
            try:
                work()
            finally:
                self.running = None
                if self._record is not None:
                    self._record.ended()
                del item, work  # or the arguments of this call would be kept until the next

    def submit(
        self, request_id: object, name: str, work: Callable[[], None], withdrawn: Callable[[], None] = lambda: None
    ) -> None:
        """Queue ``work``, which must not raise; ``withdrawn`` is called instead when it is taken back before it began."""
        with self._lock:
            self._waiting[request_id] = withdrawn
            self._queue.put((request_id, name, work))

    def withdraw(self, request_id: object) -> bool:
        """Take back work that has not begun; False when it has begun, ended or never was."""
        with self._lock:
            withdrawn = self._waiting.pop(request_id, None)
        if withdrawn is None:
            return False
        withdrawn()
        return True

    def is_waiting(self, request_id: object) -> bool:
        """Whether work is queued and has not begun."""
        with self._lock:  # held while work goes from waiting to running
            return request_id in self._waiting

    @property
    def num_waiting(self) -> int:
        """Work not begun."""
        return len(self._waiting)

    def withdraw_all(self) -> None:
        """Drop all work that has not begun; nothing is called in its place."""
        with self._lock:
            self._waiting.clear()

    def stop(self) -> None:
        """End the thread after the work that is queued."""
        self._queue.put(None)


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop on this thread until it is stopped; what is in flight on it then is cancelled, and the loop closed.

    SystemExit and KeyboardInterrupt, which asyncio lets through when a task raises them, end nothing else on it; who awaits
    that task gets them, too.
    """
    while True:
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            continue
        break
    try:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left, timeout=_LAST_TASKS_S))
    finally:
        loop.close()


def start_loop(
    name: str, run: Callable[[asyncio.AbstractEventLoop], None] = run_loop
) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    """Make an event loop and run it on a new daemon thread; without a thread, no loop is left.

    Args:
        name: of the thread.
        run: the thread's whole work.
    Returns:
        The loop and its running thread.
    Raises:
        RuntimeError: No thread can be started, as a limit on threads or memory is reached.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=run, args=(loop,), name=name, daemon=True)
    try:
        thread.start()
    except BaseException:
        loop.close()
        raise
    return loop, thread


class EngineLoop:
    """An event loop on a thread of its own, started when the first async method is called.

    Args:
        name: of the thread.
        record: for observers outside this process, where there are any.
    """

    def __init__(self, name: str, record: CallRecord | None = None) -> None:
        self._record = record
        self.failure: str | None = None
        """Why async methods cannot run: the last attempt to start the thread failed. The next call tries again."""
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None
        self._ids = itertools.count()
        self._waiting: dict[object, Callable[[], None]] = {}
        """Calls that the loop has not begun, for example while a coroutine blocks it."""
        self.running: dict[int, Running] = {}

    def submit(
        self,
        request_id: object,
        name: str,
        coroutine: Callable[[], Coroutine[Any, Any, None]],
        withdrawn: Callable[[], None] = lambda: None,
    ) -> None:
        """Start ``coroutine()``, which must not raise, on the loop.

        Args:
            request_id: of the call.
            name: 'engine.method'.
            coroutine: makes the coroutine when the loop begins the call.
            withdrawn: is called instead when the call is withdrawn before that.
        Raises:
            RuntimeError: No thread can be started.
        """
        key = next(self._ids)

        async def tracked() -> None:
            with self._lock:
                if self._waiting.pop(request_id, None) is None:
                    return  # withdrawn
                self.running[key] = running = Running(request_id, name, time.monotonic(), asyncio.current_task())
            if self._record is not None:
                self._record.begun(name, running.since)
            try:
                await coroutine()
            finally:
                del self.running[key]

        loop = self._ensure()
        with self._lock:
            self._waiting[request_id] = withdrawn
        asyncio.run_coroutine_threadsafe(tracked(), loop)

    def withdraw(self, request_id: object) -> bool:
        """Take back a call that has not begun; False when it has begun, ended or never was."""
        with self._lock:
            withdrawn = self._waiting.pop(request_id, None)
        if withdrawn is None:
            return False
        withdrawn()
        return True

    def is_waiting(self, request_id: object) -> bool:
        """Whether a call was submitted and has not begun."""
        with self._lock:  # held while a call goes from waiting to running
            return request_id in self._waiting

    @property
    def occupant(self) -> Running | None:
        """The call whose code the loop executes now; None where there is none, or the code is another task's."""
        loop = self._loop
        task = asyncio.current_task(loop) if loop is not None else None
        return next((call for call in list(self.running.values()) if call.task is task), None)

    def counts(self) -> dict[str, int]:
        """Calls in flight by name."""
        counts: dict[str, int] = {}
        for running in list(self.running.values()):
            counts[running.name] = counts.get(running.name, 0) + 1
        return counts

    def stop(self) -> None:
        """End the loop; what is in flight is cancelled, and what has not begun is dropped."""
        with self._lock:
            self._waiting.clear()
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None

    def join(self) -> None:
        """Wait for what stop has begun, or until it is late."""
        if self.thread is not None:
            self.thread.join(2 * _LAST_TASKS_S)

    def _ensure(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                try:
                    self._loop, self.thread = start_loop(self._name)
                except RuntimeError as error:
                    self.failure = (
                        f"no thread for async methods can be started ({self._name}): {error}. Raise the limit on processes and "
                        "threads (ulimit -u, the container's pids limit) or start fewer; the next async call tries again."
                    )
                    raise RuntimeError(self.failure) from error
                self.failure = None
            return self._loop
