"""Stop signals, waits for the first of several futures, and the user's script as a child."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from helmsman.api.errors import PreflightError

T = TypeVar("T")

StatusPrinter = Callable[[str], None]


class StoppedError(Exception):
    """This process, or the supervisor of another node, received a signal to stop."""

    def __init__(self, number: int, whom: str = "") -> None:
        super().__init__(f"{whom or 'this node'} received {signal.Signals(number).name}")
        self.number = number

    @property
    def exit_code(self) -> int:
        return 128 + self.number


def stop_signals() -> asyncio.Future[Any]:
    """Return a future whose result is the StoppedError of the first SIGTERM, SIGINT or SIGHUP."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[Any] = loop.create_future()

    def note(number: int) -> None:
        if not stop.done():
            stop.set_result(StoppedError(number))

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, note, number)
    return stop


async def first(*waited: asyncio.Future[Any]) -> None:
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until each has ended, with any outcome."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def unless(stop: asyncio.Future[Any], work: Coroutine[Any, Any, T]) -> T:
    """Await the work; cancel it when ``stop`` is done and raise the result of ``stop``."""
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
    """Return a function that prints a node's lines to stderr.

    Write errors (a closed pipe, a full disk) are ignored.
    """

    def report(text: str) -> None:
        line = f"[helmsman up, rank {rank}, {time.strftime('%H:%M:%S')}] {text}\n"
        with contextlib.suppress(OSError):
            # sys.stderr would keep the line in its buffer and fail again at exit.
            os.write(2, line.encode(errors="backslashreplace"))

    return report


_ORPHANED_S = 3.0
"""Seconds until the script is killed when the run ends for another reason than a signal."""
_KILLED_S = 2.0
"""Seconds to wait for a killed script to exit; one that hangs in a file system is left behind."""


async def run_script(
    command: Sequence[str],
    environ: Mapping[str, str],
    stop: asyncio.Future[Any],
    grace_s: float,
    started: Callable[[int], None] = lambda pid: None,
) -> int:
    """Run the script in this process's group: it may read the terminal and receives Ctrl-C.

    When ``stop`` is done, its result is the exception that ends the script. The signal of a
    StoppedError is forwarded; other exceptions send SIGTERM. After ``grace_s`` seconds (3 s without
    a signal) the script is killed. ``started`` receives its pid.

    Returns:
        The exit code, as a shell reports it.

    Raises:
        StoppedError: Or any other result of ``stop``, after the script has ended.
        PreflightError: The program does not exist or cannot be started.
    """
    try:
        process = await asyncio.create_subprocess_exec(*command, env=environ)
    except OSError as error:
        raise PreflightError(
            f"the script cannot be started: {command[0]}: {error.strerror}"
        ) from error
    started(process.pid)
    ending = asyncio.ensure_future(process.wait())
    await first(ending, stop)
    if not ending.done():
        why = stop.result()
        number, limit_s = (
            (why.number, grace_s)
            if isinstance(why, StoppedError)
            else (signal.SIGTERM, _ORPHANED_S)
        )
        if not (number == signal.SIGINT and _is_from_terminal()):
            _signal(process, number)
        await asyncio.wait({ending}, timeout=limit_s)
        if not ending.done():
            _signal(process, signal.SIGKILL)
            await asyncio.wait({ending}, timeout=_KILLED_S)
        raise why
    code = ending.result()
    return code if code >= 0 else 128 - code


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _is_from_terminal() -> bool:
    """Return whether Ctrl-C has already reached the script with the whole process group."""
    try:
        return (
            sys.stdin is not None
            and sys.stdin.isatty()
            and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
        )
    except (OSError, ValueError):
        return False
