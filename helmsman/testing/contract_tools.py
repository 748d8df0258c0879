"""Tools of the contract suite: waits, a wrapper for engines, and a gate that blocks a call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman.api.scheduler import Scheduler, WorkerHealth, WorkerState

LIMIT_S = 30.0
"""Default limit of a wait; a longer wait fails its test."""
HEALTH_S = 1.0
"""Limit for a health check to respond."""


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
    """Wait until ``condition()`` is true and return its value; fail the test at the limit.

    Args:
        condition: Polled every 10 ms.
        what: The awaited event, for the failure message.
        limit_s: Limit of the wait, in seconds.

    Returns:
        The first true value.
    """
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {limit_s:g} s: {what}", pytrace=False)
        time.sleep(0.01)
    return value


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


class Engine:
    """An engine in a worker."""

    def __init__(self, scheduler: Scheduler, worker_id: str, name: str) -> None:
        self.scheduler = scheduler
        self.worker_id = worker_id
        self.name = name

    @classmethod
    def create(
        cls, scheduler: Scheduler, worker_id: str, engine: Any, name: str | None = None, *args: Any
    ) -> Engine:
        """Create the engine in a worker and return it."""
        asyncio.run(scheduler.create_engine(worker_id, engine, name, *args))
        return cls(scheduler, worker_id, name or worker_id)

    def call(self, method: str, *args: Any, timeout: float = LIMIT_S, **kwargs: Any) -> Any:
        """Call a method and return its result."""
        return self.scheduler.call_engine(
            self.worker_id, method, self.name, *args, rpc_timeout=timeout, **kwargs
        )

    def acall(
        self, method: str, *args: Any, timeout: float = LIMIT_S, **kwargs: Any
    ) -> Coroutine[Any, Any, Any]:
        """Return the coroutine of a call."""
        return self.scheduler.async_call_engine(
            self.worker_id, method, self.name, *args, rpc_timeout=timeout, **kwargs
        )

    def begin(
        self, method: str, *args: Any, timeout: float = LIMIT_S, **kwargs: Any
    ) -> concurrent.futures.Future[Any]:
        """Start a call and return its future."""
        return asyncio.run_coroutine_threadsafe(
            self.acall(method, *args, timeout=timeout, **kwargs), _loop()
        )

    @property
    def state(self) -> WorkerState:
        """State of the engine's worker."""
        return {status.worker_id: status.state for status in self.scheduler.status()}[
            self.worker_id
        ]

    def health(self) -> WorkerHealth:
        """Check the worker's health five times and require a median within HEALTH_S.

        One late response may be the load of a shared machine; three break the promise.
        """
        answers, elapsed_s = [], []
        for _ in range(5):
            started = time.monotonic()
            answers.append(asyncio.run(self.scheduler.check_health(self.worker_id)))
            elapsed_s.append(time.monotonic() - started)
        assert sorted(elapsed_s)[2] < HEALTH_S, "health is answered within a second"
        return answers[-1]


class Gate:
    """Two files that hold an engine inside a call: the engine creates one, the test the other."""

    def __init__(self, folder: Path, name: str = "gate") -> None:
        self.started = str(folder / f"{name}-started")
        self.release = str(folder / f"{name}-release")

    @property
    def files(self) -> tuple[str, str]:
        """Arguments of the engine's waiting methods."""
        return self.started, self.release

    def wait_started(self) -> None:
        """Wait until the engine is inside the call."""
        wait_until(lambda: os.path.exists(self.started), "the engine began its call")

    def open(self) -> None:
        """Let the engine return. Idempotent."""
        Path(self.release).touch()


@contextlib.contextmanager
def held(
    engine: Engine, gate: Gate, method: str = "wait", timeout: float = LIMIT_S
) -> Iterator[concurrent.futures.Future[Any]]:
    """Hold an engine inside a call until the block ends, and yield the call's future."""
    future = engine.begin(method, *gate.files, timeout=timeout)
    try:
        gate.wait_started()
        yield future
    finally:
        gate.open()
