"""Tests that the watchdog reports an overdue call once, and fails it on request."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helmsman import Job, LocalScheduler, WorkflowExecutor
from helmsman.api.errors import CallTimeoutError
from helmsman.api.run_state import HangPolicy

FLOOR_S = 0.5


class Waiter:
    def wait(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.01)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[LocalScheduler]:
    with LocalScheduler(log_dir=tmp_path / "logs", preload=()) as scheduler:
        scheduler.create_workers(Job(role="actor"))
        scheduler.create_engines(["actor/0"], Waiter)
        for _ in range(3):
            scheduler.call_engine("actor/0", "wait", None, "/")
        yield scheduler


@pytest.fixture
def hang(scheduler: LocalScheduler, tmp_path: Path) -> Iterator[threading.Thread]:
    """A call that hangs until the test ends."""
    end = tmp_path / "end"
    call = threading.Thread(target=scheduler.call_engine, args=("actor/0", "wait", None, str(end)))
    yield call
    end.touch()
    call.join()


def test_watchdog_reports_once(
    scheduler: LocalScheduler, hang: threading.Thread, caplog: pytest.LogCaptureFixture
) -> None:
    reported: list[str] = []
    arrived = threading.Event()

    def notify(text: str) -> None:
        reported.append(text)
        arrived.set()

    scheduler.reporter.watch(HangPolicy(floor_s=FLOOR_S, notify=notify))
    with caplog.at_level(logging.WARNING, "helmsman"):
        hang.start()
        assert arrived.wait(60)
    (path,) = scheduler.log_dir.glob("hang-*.txt")
    text = path.read_text()
    assert text.startswith("Overdue: actor/0.wait on actor/0 (")
    assert "actor/0:\n  engine, actor/0.wait for" in text
    assert f"See {path}" in reported[0]
    assert len(reported) == 1
    (warning,) = [each for each in caplog.messages if "may hang" in each]
    assert "actor/0.wait on actor/0" in warning
    assert str(path) in (scheduler.log_dir / "driver.log").read_text()


def test_watchdog_reports_a_hung_episode(scheduler: LocalScheduler) -> None:
    reported: list[str] = []
    arrived = threading.Event()

    async def episode(item: int) -> int:
        if item == 3:
            await asyncio.Event().wait()
        return item

    def notify(text: str) -> None:
        reported.append(text)
        arrived.set()

    scheduler.reporter.watch(HangPolicy(floor_s=FLOOR_S, notify=notify))
    with WorkflowExecutor(episode) as executor, ThreadPoolExecutor() as pool:
        batch = pool.submit(executor.rollout_batch, range(4))
        assert arrived.wait(60)
        executor.close()
    assert batch.exception() is not None
    (path,) = scheduler.log_dir.glob("hang-*.txt")
    assert path.read_text().startswith("Overdue: episode 3 of episode (")
    assert "awaits Event.wait at test_watchdog.py:" in reported[0]


def test_watchdog_fails_overdue_call(scheduler: LocalScheduler, tmp_path: Path) -> None:
    scheduler.reporter.watch(HangPolicy(floor_s=FLOOR_S, on_hang="raise"))
    end = tmp_path / "end"
    with pytest.raises(CallTimeoutError, match="the watchdog, by on_hang='raise'"):
        scheduler.call_engine("actor/0", "wait", None, str(end))
    end.touch()


def test_watchdog_ignores_usual_calls(scheduler: LocalScheduler) -> None:
    """A call that takes no longer than earlier ones is not overdue."""
    scheduler.reporter.watch(HangPolicy(floor_s=0.0, factor=1e9))
    begun = time.monotonic()
    while time.monotonic() < begun + 2.5:
        scheduler.call_engine("actor/0", "wait", None, "/")
    assert not list(scheduler.log_dir.glob("hang-*"))


def test_notify_is_a_function() -> None:
    target: Any = "https://example.org/hook"
    with pytest.raises(TypeError, match="notify of HangPolicy is 'https://example.org/hook', exp"):
        HangPolicy(notify=target)
