"""Tests of a rollout on processes of which all instances sleep."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from helmsman.api.errors import HelmsmanError
from helmsman.api.scheduler import Job, Scheduler
from helmsman.controller._rollout.health import Health
from helmsman.controller._rollout.rollout_controller import RolloutController
from tests.contract.helpers import wait_until
from tests.controller.rollout.helpers import (
    POLICY,
    awake,
    begin,
    kill,
    num_updates,
    pid_of,
    served,
    wait_state,
)


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """File while which engines do not complete their sleep."""
    return tmp_path / "hold"


@pytest.fixture
def rollout(scheduler: Scheduler, hold: Path) -> Iterator[RolloutController]:
    """Two instances whose requests end by ``finish``."""
    with RolloutController(
        scheduler,
        "tests.controller.engines.SleepyRollout",
        Job(role="rollout", replicas=2),
        engine_kwargs={"hold": str(hold), "gated": True},
        supervision=POLICY,
    ) as rollout:
        yield rollout


def _wait_asked_to_load(scheduler: Scheduler, *worker_ids: str) -> None:
    """Wait until these engines have been sent weights for the first time."""

    def are_asked() -> bool:
        try:
            return all(num_updates(scheduler, each) == 1 for each in worker_ids)
        except HelmsmanError:  # There is no engine yet.
            return False

    wait_until(are_asked, "the engines load weights")


def _update_held(rollout: RolloutController, version: int) -> None:
    """Update the weights; instances that receive them later load them until ``finish``."""
    updating = begin(rollout.async_update_weights({"weight": "held"}, version))
    for worker_id, instance in rollout.stats().instances.items():
        if not instance.is_asleep:
            rollout.scheduler.call_engine(worker_id, "finish")
    assert updating.result(30) == version


def _begin_sleep_beside_request(rollout: RolloutController) -> tuple[Future[Any], Future[Any]]:
    """Begin a sleep that waits for a request of rollout/0; returns both."""
    request = rollout.submit([1])
    wait_until(lambda: served(rollout.scheduler, "rollout/0") != [], "the request is in flight")
    sleeping = begin(rollout.async_sleep())
    wait_until(lambda: rollout.stats().paused, "the sleep waits for the request")
    return sleeping, request


def _check_sleep_holds_requests(
    rollout: RolloutController, sleeping: Future[Any], request: Future[Any]
) -> None:
    """Check that no request is sent from before the end of a waiting sleep until ``wake``."""
    assert rollout.stats().paused and not sleeping.done()
    later = rollout.submit([5])
    rollout.scheduler.call_engine("rollout/0", "finish")
    sleeping.result(30)
    assert request.result(30).token_ids == [2]
    assert awake(rollout) == ["asleep", "asleep"]
    assert rollout.stats().paused and rollout.stats().num_queued == 1
    rollout.wake()
    wait_until(
        lambda: bool(
            [
                each
                for worker in rollout.workers
                for each in rollout.scheduler.call_engine(worker.id, "finish")
            ]
        ),
        "the request is sent",
    )
    assert later.result(30).token_ids == [6]


def test_rebuild_while_sleep_waits_for_requests(rollout: RolloutController) -> None:
    rollout.update_weights({"weight": [1.0]}, 1)
    rollout.drain(["rollout/1"])
    sleeping, request = _begin_sleep_beside_request(rollout)
    killed = kill(rollout.scheduler, "rollout/1")
    wait_until(lambda: pid_of(rollout.scheduler, "rollout/1") not in (0, killed), "it is restarted")
    wait_state(rollout, "rollout/1", Health.HEALTHY)
    _check_sleep_holds_requests(rollout, sleeping, request)


def test_wake_of_one_loads_weights_while_sleep_waits(rollout: RolloutController) -> None:
    rollout.sleep(worker_ids=["rollout/1"])
    _update_held(rollout, 1)
    waking = begin(rollout.async_wake(worker_ids=["rollout/1"]))
    _wait_asked_to_load(rollout.scheduler, "rollout/1")
    sleeping, request = _begin_sleep_beside_request(rollout)
    rollout.scheduler.call_engine("rollout/1", "finish")
    waking.result(30)
    _check_sleep_holds_requests(rollout, sleeping, request)


def test_wake_of_one_waits_for_sleep_of_all(rollout: RolloutController) -> None:
    rollout.sleep(worker_ids=["rollout/1"])
    sleeping, request = _begin_sleep_beside_request(rollout)
    waking = begin(rollout.async_wake(worker_ids=["rollout/1"]))
    rollout.stats()  # at least one turn of the loop
    _check_sleep_holds_requests(rollout, sleeping, request)
    waking.result(30)


def test_failed_sleep_resumes_requests(rollout: RolloutController) -> None:
    sleeping, request = _begin_sleep_beside_request(rollout)
    sleeping.cancel()
    wait_until(lambda: not rollout.stats().paused, "requests are sent again")
    rollout.scheduler.call_engine("rollout/0", "finish")
    assert request.result(30).token_ids == [2]


def test_wake_while_instance_is_added(rollout: RolloutController, hold: Path) -> None:
    def how_awake() -> str:
        try:
            return str(rollout.scheduler.call_engine("rollout/2", "how_awake"))
        except HelmsmanError:  # There is no engine yet.
            return ""

    rollout.update_weights({"weight": [1.0]}, 1)
    rollout.sleep()
    hold.touch()
    adding = begin(rollout.async_add())
    wait_until(lambda: how_awake() == "drowsy", "the instance begins to sleep")
    waking = begin(rollout.async_wake())
    rollout.stats()  # at least one turn of the loop
    hold.unlink()
    assert adding.result(30) == ["rollout/2"]
    waking.result(30)
    assert awake(rollout) == ["awake"] * 3
    rollout.update_weights({"weight": [1.0]}, 2)
    assert rollout.versions() == dict.fromkeys(["rollout/0", "rollout/1", "rollout/2"], 2)


def test_sleep_while_instances_are_added(rollout: RolloutController) -> None:
    """Sleep does not wait for new instances, which sleep once they have their weights."""
    _update_held(rollout, 1)
    adding = begin(rollout.async_add(2))
    _wait_asked_to_load(rollout.scheduler, "rollout/2", "rollout/3")
    rollout.scheduler.call_engine("rollout/2", "finish")
    wait_until(
        lambda: rollout.scheduler.call_engine("rollout/2", "get_version") == 1,
        "one instance has the weights",
    )
    rollout.sleep()
    assert not adding.done()
    rollout.scheduler.call_engine("rollout/3", "finish")
    assert adding.result(30) == ["rollout/2", "rollout/3"]
    assert awake(rollout) == ["asleep"] * 4
    rollout.wake()
    assert awake(rollout) == ["awake"] * 4
    assert {each.state for each in rollout.stats().instances.values()} == {Health.HEALTHY}


@pytest.mark.parametrize("level", [1, 2])
def test_rebuild_while_weights_alone_areawake(rollout: RolloutController, level: int) -> None:
    rollout.update_weights({"weight": [1.0]}, 1)
    rollout.sleep(level)
    kill(rollout.scheduler, "rollout/1")
    wait_state(rollout, "rollout/1", Health.RESTARTING)
    rollout.wake(weights_only=True)
    wait_state(rollout, "rollout/1", Health.HEALTHY)
    assert awake(rollout) == ["warm", "warm"]
    rollout.update_weights({"weight": [1.0]}, 2)
    rollout.wake()
    assert awake(rollout) == ["awake", "awake"]
    assert rollout.versions() == {"rollout/0": 2, "rollout/1": 2}
