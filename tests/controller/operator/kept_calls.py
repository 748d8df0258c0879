"""A run that has kept calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from helmsman import Job, LocalScheduler
from helmsman.controller._operator.replay import kept_calls


class Adder:
    """Adds to a base, which another method changes."""

    def __init__(self, base: int) -> None:
        self.base = base

    def prepare(self, base: int) -> None:
        self.base += base

    def add(self, values: np.ndarray) -> float:
        total = float(values.sum())
        return self.base + total

    async def add_later(self, value: int) -> int:
        return self.base + value


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Log folder of an ended run that has kept calls."""
    folder = tmp_path / "logs"
    with LocalScheduler(log_dir=folder, preload=()) as scheduler:
        scheduler.reporter.keep_calls("actor", "add", most=2)
        scheduler.reporter.keep_calls("other", "add_later")
        scheduler.create_workers([Job(role="actor", replicas=2), Job(role="other")])
        scheduler.create_engines(["actor/0", "actor/1", "other/0"], Adder, None, 1000)
        scheduler.call_engine("actor/1", "prepare", None, 200)
        for number in range(4):
            scheduler.call_engine("actor/1", "add", None, np.full(10_000, number))
        scheduler.call_engine("actor/0", "add", None, scheduler.put(np.ones(3)))
        scheduler.call_engine("other/0", "add_later", None, 5)
    return folder


def number_of(log_dir: Path, worker_id: str) -> int:
    """Return the number of the last kept call of a worker."""
    calls = kept_calls(log_dir)
    return max(n for n, call in calls.items() if call.before and call.worker_id == worker_id)
