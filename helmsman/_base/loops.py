"""Event loops on threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

LAST_TASKS_S = 1.0
"""Seconds that cancelled tasks of a stopped loop have to end."""


def run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop on this thread until it is stopped; then cancel its tasks and close it.

    asyncio lets SystemExit and KeyboardInterrupt of a task through run_forever. They do not end the
    loop or its other tasks; awaiting the task raises them, too.
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
            loop.run_until_complete(asyncio.wait(left, timeout=LAST_TASKS_S))
    finally:
        loop.close()


def start_loop(
    name: str, run: Callable[[asyncio.AbstractEventLoop], None] = run_loop
) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    """Start a loop on a daemon thread of its own; ``run`` runs it there.

    Raises:
        RuntimeError: No thread can be started.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=run, args=(loop,), name=name, daemon=True)
    try:
        thread.start()
    except BaseException:
        loop.close()
        raise
    return loop, thread
