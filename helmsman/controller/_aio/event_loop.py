"""The driver's background event loop: one daemon thread on which all schedulers and controllers run
their coroutines.

Behaviour is written once, as coroutines; ``run_sync`` and ``run_async`` are how a blocking caller
and a caller on some other event loop reach it.
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

from helmsman.rpc_server._host.threads import start_loop

T = TypeVar("T")

log = logging.getLogger(__name__)

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_loop_pid = 0


def _after_fork() -> None:
    """In the child: another thread of the parent may have held the lock, and is not here to give it
    back.
    """
    global _lock
    _lock = threading.Lock()
    threads_awaited.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def background_loop() -> asyncio.AbstractEventLoop:
    """The loop, started on first use; a forked child gets one of its own, since threads do not
    survive a fork.
    """
    global _loop, _loop_pid
    if (loop := _loop) is not None and _loop_pid == os.getpid():
        # without the lock, which a signal handler's thread may hold
        return loop
    with _lock:
        if _loop is None or _loop_pid != os.getpid():
            loop, _ = start_loop("helmsman-loop")
            _loop_pid, _loop = os.getpid(), loop
        return _loop


class Mailbox:
    """Functions to be run on a loop, given from other threads: however many come while it is busy,
    it is woken once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # a strong one would keep each loop that ever made a call in the table below
        self._loop = weakref.ref(loop)
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._is_woken = False

    def post(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the loop, after those that were posted before. Nothing happens when
        the loop is closed.
        """
        self._waiting.append(function)
        # what is appended after this was read as True is seen by _run, which first sets it to False
        if not self._is_woken:
            try:
                self._is_woken = True
                self._wake()
            except BaseException:
                # an interrupt: without a wake nothing would be seen any more, of no thread
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
            except BaseException:  # its own loss: those after it have no other wake
                log.exception("%r, which was posted to an event loop, has raised", function)


_mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = (
    weakref.WeakKeyDictionary()
)


def mailbox_of(loop: asyncio.AbstractEventLoop) -> Mailbox:
    mailbox = _mailboxes.get(loop)
    if mailbox is None:
        with _lock:
            mailbox = _mailboxes.setdefault(loop, Mailbox(loop))
    return mailbox


def run_on_loop(function: Callable[[], None]) -> None:
    """Run a function that must not raise on the background loop."""
    mailbox_of(background_loop()).post(function)


def submit(coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    return asyncio.run_coroutine_threadsafe(coroutine, background_loop())


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run ``coroutine`` on the loop and block for its result; an interrupt of the waiting thread
    cancels it.
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
"""``blocks``: whether this thread is within run_blocking."""

threads_awaited: set[int] = set()
"""Threads for which the loop may have to wait; a signal handler that runs on one of them must not
wait for the loop.
"""


def forbid_blocking() -> None:
    """Raise RuntimeError where a wait for the loop may never end: on the loop itself, and in some
    signal handlers.
    """
    if threads_awaited and threading.get_ident() in threads_awaited:
        raise RuntimeError(
            "a blocking Helmsman call was made by a signal handler that has interrupted another "
            "one; raise an exception in the "
            "handler instead, or make the call in a thread, without waiting for it"
        )
    if _running_loop() is background_loop():
        raise RuntimeError(
            "a blocking Helmsman call was made from a coroutine or callback on Helmsman's own "
            "event loop, which would wait for "
            "itself; use the form that does not block there (async_call_engine, agenerate, "
            "submit, ...), or a thread: "
            "await asyncio.to_thread(scheduler.close)"
        )


async def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run ``coroutine`` on the loop and await it from any loop; within ``run_blocking``, block."""
    if getattr(_caller, "blocks", False):
        return run_sync(coroutine)
    loop = background_loop()
    if _running_loop() is loop:
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
    """Run a blocking function off the loop; on it, at the end of the interpreter, where no thread
    can be had any more.

    ``close`` runs there, by atexit, in a script that forgot it, and threads go on with their calls
    when the main one has ended.
    """
    try:
        running = asyncio.get_running_loop().run_in_executor(
            None, functools.partial(function, *arguments)
        )
    except RuntimeError:
        return function(*arguments)
    return await running


async def await_all(awaitables: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; when one fails the rest are cancelled and awaited before its error is raised."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class Deadline:
    """A point in time that all steps of an operation share."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._start = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def remaining_s(self) -> float:
        """Seconds left, 0 when it has passed."""
        return max(0.0, self.limit_s - self.elapsed_s)

    @property
    def passed(self) -> bool:
        return self.remaining_s == 0.0
