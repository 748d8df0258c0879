"""A scheduler with processes on this machine, and a policy that notices their deaths at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helmsman.api.scheduler import Scheduler
from helmsman.controller._generation.health import SupervisionPolicy
from helmsman.controller._schedulers.factory import make_scheduler

POLICY = SupervisionPolicy(probe_every_s=0.05, suspect_s=5.0, dead_s=10.0, restart_pause_s=0.05)


@pytest.fixture(scope="module")
def scheduler() -> Iterator[Scheduler]:
    with make_scheduler("local", preload=()) as scheduler:
        yield scheduler
