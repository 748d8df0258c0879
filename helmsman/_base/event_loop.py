"""The driver's event loop: a daemon thread that runs the coroutines of schedulers and controllers.

Operations are written once, as coroutines. ``run_sync`` runs them for blocking callers, and
``run_async`` for callers on another event loop.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from helmsman._base.loops import start_loop

T = TypeVar("T")

log = logging.getLogger(__name__)

LOOP_THREAD = "helmsman-loop"
"""Name of the loop's thread."""

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _after_fork() -> None:
    """Forget the parent's loop in a forked child, and its lock, which a thread may have held."""
    global _lock, _loop
    _lock, _loop = threading.Lock(), None
    threads_awaited.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, and start it on first use.

    A forked child starts its own, since threads do not survive a fork.
    """
    global _loop
    if (loop := _loop) is not None:
        # Without the lock: the thread that a signal handler has interrupted may hold it.
        return loop
    with _lock:
        if _loop is None:
            _loop, _ = start_loop(LOOP_THREAD)
        return _loop


class Mailbox:
    """Runs functions on a loop for other threads, with one wake-up for all that are pending."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # Weak: a strong reference would keep every loop alive in _mailboxes.
        self._loop = weakref.ref(loop)
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._is_woken = False

    def post(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the loop, in the order of posts; does nothing if it is closed."""
        self._waiting.append(function)
        # _run first resets the flag, so it sees every function that was appended before a True.
        if not self._is_woken:
            try:
                self._is_woken = True
                self._wake()
            except BaseException:
                # After an interrupt the flag is set; without a wake-up no post would ever run.
                self._wake()
                raise

    def _wake(self) -> None:
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._is_woken = False
        for _ in range(len(self._waiting)):
            function = self._waiting.popleft()
            try:
                function()
            except BaseException:  # the functions after it get no other wake-up
                log.exception("%r, posted to an event loop, raised an exception", function)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = (
    weakref.WeakKeyDictionary()
)


def mailbox_of(loop: asyncio.AbstractEventLoop) -> Mailbox:
    """Return the mailbox of a loop."""
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        with _lock:
            mailbox = _mailboxes.setdefault(loop, Mailbox(loop))
    return mailbox


def run_on_loop(function: Callable[[], None]) -> None:
    """Run a function that must not raise on the background loop."""
    mailbox_of(background_loop()).post(function)


def submit(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Run a coroutine on the background loop and return its future."""
    return asyncio.run_coroutine_threadsafe(coroutine, background_loop())


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop and block for its result.

    An interrupt of the waiting thread cancels it.

    Raises:
        RuntimeError: A wait for the loop may never end here; see ``forbid_blocking``.
    """
    loop = background_loop()
    try:
        forbid_blocking()
    except RuntimeError:
        coroutine.close()
        raise
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


_caller = threading.local()
"""``blocks``: whether the thread is inside run_blocking."""

threads_awaited: set[int] = set()
"""Ids of threads for which the loop may wait; a signal handler on such a thread must not wait for
the loop.
"""


def forbid_blocking() -> None:
    """Raise RuntimeError where a wait for the loop may never end.

    This is the case on the loop itself, and in signal handlers that interrupt a blocking call.
    """
    if threads_awaited and threading.get_ident() in threads_awaited:
        raise RuntimeError(
            "a signal handler made a blocking Helmsman call while it interrupted another one; "
            "raise an exception in the "
            "handler instead, or make the call in a thread, without waiting for it"
        )
    running = asyncio._get_running_loop()
    if running is not None and running is background_loop():
        raise RuntimeError(
            "a blocking Helmsman call was made from a coroutine or callback on Helmsman's own "
            "event loop, which would wait for "
            "itself; use the non-blocking form there (async_call_engine, agenerate, "
            "submit, ...), or a thread: "
            "await asyncio.to_thread(scheduler.close)"
        )


async def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run ``coroutine`` on the loop and await it from any loop; within ``run_blocking``, block."""
    if getattr(_caller, "blocks", False):
        return run_sync(coroutine)
    loop = background_loop()
    if asyncio._get_running_loop() is loop:
        return await coroutine
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the caller's thread; each ``run_async`` in it blocks.

    It may await nothing else. An interrupt of the thread cancels the part on the loop.
    """
    outer, _caller.blocks = getattr(_caller, "blocks", False), True
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        _caller.blocks = outer
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} has awaited something other than run_async")


async def run_in_executor(function: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking function in a thread, or on the loop while the interpreter shuts down.

    No thread can be started during shutdown, but ``close`` may still run in an atexit handler, and
    other threads may still make calls.
    """
    try:
        running = asyncio.get_running_loop().run_in_executor(
            None, functools.partial(function, *arguments)
        )
    except RuntimeError:
        return function(*arguments)
    return await running


async def await_all(awaitables: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all coroutines; if one fails, cancel and await the others, then raise its error."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class Deadline:
    """A time limit, from now on, that all steps of an operation share."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def remaining_s(self) -> float:
        """Seconds left; 0 once the limit has passed."""
        return max(0.0, self.limit_s - self.elapsed_s)

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining_s == 0.0
