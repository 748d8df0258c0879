"""Waiting for several things at once, of which one is being told to stop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class StoppedError(Exception):
    """A signal has told this process, or the supervisor of another node, to stop."""

    def __init__(self, number: int, whom: str = "") -> None:
        super().__init__(f"{whom or 'this node'} was told to stop by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """As a shell has it."""
        return 128 + self.number


def stop_signals() -> asyncio.Future[StoppedError]:
    """Settled by the first SIGTERM, SIGINT or SIGHUP."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[StoppedError] = loop.create_future()

    def note(number: int) -> None:
        if not stop.done():
            stop.set_result(StoppedError(number))

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, note, number)
    return stop


async def first(*waited: asyncio.Future[Any]) -> None:
    """Wait until one of them is done."""
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel them, and wait until each has ended, however it does."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def unless(stop: asyncio.Future[StoppedError], work: Coroutine[Any, Any, T]) -> T:
    """Do the work, and break it off when told to stop. Raises: StoppedError."""
    task = asyncio.ensure_future(work)
    try:
        await first(task, stop)
        if not task.done():
            raise stop.result()
        return task.result()
    finally:
        await cancelled(task)


async def in_daemon_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a blocking function off the loop, in a thread that nobody waits for once the waiting is broken off, as the loop does
    for those of its executor when it ends."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wrap_future(future)


Tell = Callable[[str], None]


def teller(rank: int) -> Tell:
    """Prints a line of news of this node. Where nobody can take it, a closed pipe or a full disk, the node goes on."""

    def tell(text: str) -> None:
        line = f"[helmsman up, rank {rank}, {time.strftime('%H:%M:%S')}] {text}\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode(errors="backslashreplace"))  # sys.stderr would keep it, and fail once more at the exit

    return tell
