"""Tests of the background loop and of mailboxes, by which other threads reach a loop."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from helmsman._base import event_loop as loops
from helmsman._base.event_loop import mailbox_of, run_sync

LIMIT_S = 30.0


class _InterruptedOnce(asyncio.SelectorEventLoop):
    """A loop whose first wake-up is interrupted in the thread of the caller."""

    was_interrupted = False

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> asyncio.Handle:
        if not self.was_interrupted:
            self.was_interrupted = True
            raise KeyboardInterrupt
        return super().call_soon_threadsafe(callback, *args, **kwargs)


def test_mailbox_post_interrupted_while_waking_the_loop() -> None:
    loop = _InterruptedOnce()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    ran = threading.Event()
    try:
        with pytest.raises(KeyboardInterrupt):
            mailbox_of(loop).post(lambda: None)
        mailbox_of(loop).post(ran.set)
        assert ran.wait(LIMIT_S)
    finally:
        asyncio.SelectorEventLoop.call_soon_threadsafe(loop, loop.stop)
        thread.join()
        loop.close()


def test_mailbox_function_that_raises() -> None:
    loop = asyncio.new_event_loop()
    ran: list[int] = []

    def fail() -> None:
        raise ValueError("logged by the loop")

    for function in (
        fail,
        functools.partial(ran.append, 1),
        functools.partial(ran.append, 2),
        loop.stop,
    ):
        mailbox_of(loop).post(function)
    loop.call_later(LIMIT_S, loop.stop)
    loop.run_forever()
    loop.close()
    assert ran == [1, 2]


@pytest.mark.usefixtures("young_heap")
def test_mailbox_does_not_keep_its_loop() -> None:
    loop = asyncio.new_event_loop()
    mailbox_of(loop).post(loop.stop)
    loop.run_forever()
    loop.close()
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None


def test_background_loop_continues_after_system_exit() -> None:
    async def leave() -> None:
        raise SystemExit(2)

    with pytest.raises(SystemExit):
        run_sync(leave())
    assert loops.submit(_seven()).result(LIMIT_S) == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_run_sync_in_a_child_forked_under_the_lock() -> None:
    with loops._lock:
        pid = os.fork()
        if pid == 0:
            signal.alarm(int(LIMIT_S))  # ends a child that hangs
            os._exit(run_sync(_seven()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


async def _seven() -> int:
    return 7


def test_run_blocking_in_the_callers_thread() -> None:
    """run_async blocks in run_blocking and in coroutines below it, and nowhere else."""

    async def on_loop() -> int:
        return threading.get_ident()

    async def core() -> tuple[int, int]:
        async def nested() -> int:
            return await loops.run_async(on_loop())

        return threading.get_ident(), await nested()

    here, there = loops.run_blocking(core())
    assert (here, there != here) == (threading.get_ident(), True)
    assert asyncio.run(core())[1] == there


def test_run_blocking_refuses_other_awaits() -> None:
    async def core() -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="has awaited something other than run_async"):
        loops.run_blocking(core())
