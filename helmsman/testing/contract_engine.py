"""Engine of the contract suite; it imports nothing heavy, so that workers start fast."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

WAIT_LIMIT_S = 60.0
"""Limit of every wait, so that a failed test leaves no worker waiting."""


def wait_for_file(path: str) -> None:
    """Block until the file exists; raise TimeoutError after WAIT_LIMIT_S."""
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the test did not create {path} within {WAIT_LIMIT_S:g} s")
        time.sleep(0.005)


class CountingEngine:
    """Counts the calls that ran, so that a test detects a call that ran twice."""

    def __init__(self, start: int = 0) -> None:
        self.num_calls = start
        self.log: list[str] = []

    def add(self, number: int = 1) -> int:
        """Add to the count and return it."""
        self.num_calls += number
        return self.num_calls

    async def async_add(self, number: int = 1) -> int:
        """Add to the count on the event loop and return it."""
        return self.add(number)

    def echo(self, *args: Any, **kwargs: Any) -> Any:
        """Return the arguments; a single positional argument is returned as itself."""
        return args[0] if len(args) == 1 and not kwargs else (args, kwargs)

    def wait(self, started: str, release: str) -> int:
        """Count, create the file ``started``, then block until ``release`` exists."""
        self.num_calls += 1
        Path(started).touch()
        wait_for_file(release)  # the line that a time-out shows
        return self.num_calls

    async def async_wait(self, started: str, release: str) -> int:
        """Count and wait for ``release`` without blocking the event loop."""
        self.num_calls += 1
        Path(started).touch()
        deadline = time.monotonic() + WAIT_LIMIT_S
        # Another process creates the file.
        while not os.path.exists(release) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return self.num_calls

    def spin(self, started: str, release: str) -> int:
        """Wait for ``release`` in pure Python that never blocks."""
        Path(started).touch()
        deadline = time.monotonic() + WAIT_LIMIT_S
        turns = 0
        while not (turns % 1000 == 0 and os.path.exists(release)) and time.monotonic() < deadline:
            turns += 1
        return turns

    def note(self, entry: str) -> None:
        """Append an entry to the log."""
        self.log.append(entry)

    def note_size(self, value: Any) -> None:
        """Append the size of a value to the log; append a number as itself."""
        self.log.append(str(value if isinstance(value, int) else len(value)))

    def entries(self) -> list[str]:
        """Return the log, in order."""
        return self.log

    def divide(self) -> float:
        """Raise ZeroDivisionError."""
        return 1 / (self.num_calls - self.num_calls)

    def pid(self) -> int:
        """Return the id of the worker's process."""
        return os.getpid()

    def thread(self) -> str:
        """Return the name of the thread that runs engine methods."""
        return threading.current_thread().name

    def start_child(self) -> list[int]:
        """Start a child that ignores SIGTERM; return the pids of the worker and the child."""
        script = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "print(flush=True); time.sleep(600)"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
        )
        assert child.stdout is not None
        child.stdout.readline()
        return [os.getpid(), child.pid]
