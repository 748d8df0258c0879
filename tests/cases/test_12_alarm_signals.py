"""Engines and rewards limit their time by signals, on every scheduler with worker processes."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import functools
import itertools
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman import Job, RewardPool, Scheduler, make_scheduler
from helmsman.errors import EngineCallError

WAITS: dict[str, Callable[[], object]] = {
    "sleep": lambda: time.sleep(60),
    "event": lambda: threading.Event().wait(),
    "queue": lambda: queue.Queue[int]().get(),
    "select": lambda: select.select([], [], []),
    "python": lambda: [None for _ in itertools.count()],
    "program": lambda: subprocess.run(["sleep", "60"], check=False),
    "pause": signal.pause,
}
OFF_MAIN = "signal only works in main thread of the main interpreter. Helmsman runs def methods and"


class LateError(Exception):
    """The time is over."""


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise LateError in the block when the time is over."""

    def late(*_: object) -> None:
        raise LateError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupted(wait: str) -> bool:
    try:
        with limit(0.05):
            WAITS[wait]()
    except LateError:
        return signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    return False


class Counting:
    """An engine without a constructor that limits its time."""

    def limited(self) -> None:
        with limit(60):
            pass


def scored(text: str) -> float:
    return 1.0 if interrupted("event") else 0.0


class Limited:
    """An engine whose constructor and methods limit their time."""

    def __init__(self) -> None:
        self.began = interrupted("event")

    def interrupts(self, wait: str) -> bool:
        return self.began and interrupted(wait)

    def whole_seconds(self) -> bool:
        """Limit by signal.alarm, as timeout decorators do."""
        try:
            with limit(60):
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.alarm(1)
                threading.Event().wait()
        except LateError:
            return True
        return False

    def continues(self) -> int:
        """Count ticks by a handler that returns."""
        ticks: list[int] = []
        before = signal.signal(signal.SIGALRM, lambda number, _: ticks.append(number))
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        while len(ticks) < 3:
            signal.pause()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        return len(ticks)

    def by_a_thread(self) -> bool:
        """Limit by a thread that interrupts the main one."""
        timer = threading.Timer(0.05, _thread.interrupt_main)
        timer.start()
        try:
            while timer:
                pass
        except KeyboardInterrupt:
            return True
        return False

    def on_a_loop(self) -> bool:
        """Wait for a signal on an event loop."""

        async def wait() -> bool:
            came = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, came.set)
            os.kill(os.getpid(), signal.SIGUSR1)
            return await came.wait()

        return asyncio.run(wait())

    def verified(self) -> bool:
        """Score by math-verify with its own timeouts."""
        from math_verify import parse, verify

        return bool(verify(parse("$1/2$"), parse("$0.5$")))

    def pid(self) -> int:
        return os.getpid()

    async def beside(self) -> None:
        with limit(60):
            pass

    def ray_names(self) -> list[str]:
        """Put an object and run a task; returns the ids."""
        import ray

        task = ray.remote(num_cpus=0)(lambda: os.getpid()).remote()
        assert ray.get(task) != os.getpid()
        return [ray.put(1).hex(), task.hex()]

    def cancels(self, path: str) -> str:
        """Cancel a running task of Ray; returns the name of its error."""
        import ray

        def spin() -> None:
            Path(path).touch()
            while path:
                pass

        task = ray.remote(num_cpus=0)(spin).remote()
        while not os.path.exists(path):
            time.sleep(0.005)
        ray.cancel(task)
        try:
            ray.get(task)
        except Exception as error:  # noqa: BLE001 - its type is the result
            return type(error).__name__
        return ""


@pytest.fixture(scope="module")
def workers(scheduler: Scheduler) -> Iterator[list[str]]:
    """Provide two workers with an engine each."""
    made = scheduler.create_workers(Job(role="alarms", replicas=2))
    scheduler.create_engines(made, Limited)
    yield made
    scheduler.delete_workers("alarms")


@pytest.fixture
def call(scheduler: Scheduler, workers: list[str]) -> Callable[..., Any]:
    """Call a method of the first engine."""
    return functools.partial(scheduler.call_engine, workers[0], rpc_timeout=60)


@pytest.mark.parametrize("wait", WAITS)
def test_an_alarm_interrupts_an_engine(call: Callable[..., Any], wait: str) -> None:
    """An alarm ends any wait, and the handler before it is back afterwards."""
    assert call("interrupts", None, wait)


@pytest.mark.parametrize("method", ["whole_seconds", "by_a_thread", "on_a_loop"])
def test_other_limits_interrupt_an_engine(call: Callable[..., Any], method: str) -> None:
    """Limits by signal.alarm, by interrupt_main and by an event loop's handler come."""
    assert call(method, None)


def test_a_handler_may_return(call: Callable[..., Any]) -> None:
    """A repeated alarm interrupts several waits."""
    assert call("continues", None) >= 3


def test_a_late_interrupt_leaves_the_engine(call: Callable[..., Any]) -> None:
    """SIGINT that comes between two calls is ignored."""
    pid = call("pid", None)
    os.kill(pid, signal.SIGINT)
    assert call("pid", None) == pid


def test_math_verify_keeps_its_timeouts(call: Callable[..., Any]) -> None:
    """math-verify's timeouts need no special settings."""
    pytest.importorskip("math_verify")
    assert call("verified", None)


def test_an_alarm_interrupts_a_reward(scheduler: Scheduler) -> None:
    """Rewards of several processes limit their time."""
    with RewardPool(scheduler, scored, Job(role="scores", replicas=2), timeout=60) as pool:
        assert pool.map(["a", "b", "c"]) == [1.0] * 3


def test_an_alarm_interrupts_a_reward_on_this_machine() -> None:
    """A pool without a scheduler does the same."""
    with RewardPool.on_this_machine(scored, num_processes=1, timeout=60) as pool:
        assert pool.map(["a"]) == [1.0]


def test_an_async_method_has_no_alarm(call: Callable[..., Any]) -> None:
    """The error names the methods that can use signal handlers."""
    with pytest.raises(EngineCallError, match=OFF_MAIN):
        call("beside", None)


def test_inline_has_no_alarm() -> None:
    """The error names the schedulers whose workers can use signal handlers."""
    with make_scheduler("inline") as scheduler:
        (worker,) = scheduler.create_workers(Job(role="alarms"))
        scheduler.create_engines([worker], Counting)
        with pytest.raises(EngineCallError, match=OFF_MAIN):
            scheduler.call_engine(worker, "limited")


def test_engines_use_ray_by_their_own_ids(
    backend: str, scheduler: Scheduler, workers: list[str]
) -> None:
    """Objects and tasks of two engines have different ids."""
    if backend != "ray":
        pytest.skip("needs a Ray cluster")
    names = [name for id_ in workers for name in scheduler.call_engine(id_, "ray_names")]
    assert len(set(names)) == 4


def test_engines_cancel_their_ray_tasks(
    backend: str, call: Callable[..., Any], tmp_path: Path
) -> None:
    """A task of Ray that an engine starts can be interrupted."""
    if backend != "ray":
        pytest.skip("needs a Ray cluster")
    assert call("cancels", None, str(tmp_path / "running")) == "TaskCancelledError"
