"""Waiting for the first of several things, and the signals that tell a node to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

StatusPrinter = Callable[[str], None]


class StoppedError(Exception):
    """This process, or the supervisor of another node, received a signal to stop."""

    def __init__(self, number: int, whom: str = "") -> None:
        super().__init__(f"{whom or 'this node'} was told to stop by {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_code(self) -> int:
        """As a shell has it."""
        return 128 + self.number


def stop_signals() -> asyncio.Future[Any]:
    """A future whose result is the StoppedError of the first SIGTERM, SIGINT or SIGHUP."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[Any] = loop.create_future()

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
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless(stop: asyncio.Future[Any], work: Coroutine[Any, Any, T]) -> T:
    """Await the work, and cancel it when ``stop`` is done. Raises the result of ``stop``, an exception."""
    task = asyncio.ensure_future(work)
    try:
        await first(task, stop)
    finally:
        if not task.done():
            await cancelled(task)
    if task.cancelled():
        raise stop.result()
    result = task.result()
    if stop.done():
        raise stop.result()
    return result


def status_printer(rank: int) -> StatusPrinter:
    """Print lines of a node to stderr. When they cannot be written (a closed pipe, a full disk), the node goes on."""

    def report(text: str) -> None:
        line = f"[helmsman up, rank {rank}, {time.strftime('%H:%M:%S')}] {text}\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode(errors="backslashreplace"))  # sys.stderr would keep it, and fail once more at the exit

    return report
