"""Helpers of the tests of rollouts on processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from helmsman._base.event_loop import background_loop
from helmsman.api.scheduler import Scheduler
from helmsman.controller._rollout.health import Health, SupervisionPolicy
from helmsman.controller._rollout.rollout_controller import RolloutController
from tests.contract.helpers import wait_until

POLICY = SupervisionPolicy(probe_every_s=0.05, suspect_s=5.0, dead_s=10.0, restart_pause_s=0.05)
"""Policy that detects deaths at once."""


def begin(work: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Start a coroutine on the background loop."""
    return asyncio.run_coroutine_threadsafe(work, background_loop())


def pid_of(scheduler: Scheduler, worker_id: str) -> int:
    """Return the pid of a worker; 0 while it has none."""
    return next(status.pid for status in scheduler.status() if status.worker_id == worker_id) or 0


def kill(scheduler: Scheduler, worker_id: str) -> int:
    """Kill a worker and return its pid."""
    pid = pid_of(scheduler, worker_id)
    os.kill(pid, signal.SIGKILL)
    return pid


def served(scheduler: Scheduler, worker_id: str) -> list[str]:
    """Return the requests that an instance has received."""
    return list(scheduler.call_engine(worker_id, "figures")[2])


def num_updates(scheduler: Scheduler, worker_id: str) -> int:
    """Return the number of weight updates that an instance has received."""
    return int(scheduler.call_engine(worker_id, "figures")[0])


def in_flight(rollout: RolloutController) -> dict[str, int]:
    return {id_: each.num_in_flight for id_, each in rollout.stats().instances.items()}


def awake(rollout: RolloutController) -> list[str]:
    """Return the sleep state of each instance of SleepyRollout."""
    return [rollout.scheduler.call_engine(worker.id, "how_awake") for worker in rollout.workers]


def state_of(rollout: RolloutController, worker_id: str) -> Health:
    return rollout.stats().instances[worker_id].state


def wait_state(rollout: RolloutController, worker_id: str, state: Health) -> None:
    wait_until(lambda: state_of(rollout, worker_id) is state, f"{worker_id} is {state.value}")


def all_serve(rollout: RolloutController) -> bool:
    return all(each.state is Health.HEALTHY for each in rollout.stats().instances.values())
