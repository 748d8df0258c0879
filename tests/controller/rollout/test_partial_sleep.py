"""Tests of a rollout on processes of which some instances sleep while the others serve."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helmsman.api.errors import (
    HelmsmanError,
    InvalidSpecError,
    RequestsInFlightError,
    WorkerNotFoundError,
)
from helmsman.api.scheduler import Job, Scheduler
from helmsman.controller._rollout.health import Health
from helmsman.controller._rollout.retries import RetryGeneration
from helmsman.controller._rollout.rollout_controller import RolloutController
from tests.contract.helpers import wait_until
from tests.controller.rollout.helpers import (
    POLICY,
    awake,
    begin,
    in_flight,
    kill,
    num_updates,
    pid_of,
    served,
    state_of,
    wait_state,
)


@pytest.fixture
def rollout(scheduler: Scheduler, tmp_path: Path) -> Iterator[RolloutController]:
    with RolloutController(
        scheduler,
        "tests.controller.engines.SleepyRollout",
        Job(role="rollout", replicas=3),
        engine_kwargs={"hold": str(tmp_path / "hold")},
        retries=RetryGeneration(),
        supervision=POLICY,
    ) as rollout:
        yield rollout


def test_sleep_of_some_leaves_requests_to_the_others(rollout: RolloutController) -> None:
    rollout.sleep(worker_ids=rollout.workers[1:])
    rollout.sleep(worker_ids=["rollout/2", "rollout/2"])  # idempotent
    assert awake(rollout) == ["awake", "asleep", "asleep"]
    stats = rollout.stats().instances
    assert [each.is_asleep for each in stats.values()] == [False, True, True]
    assert [result.token_ids for result in rollout.generate([[1]] * 12)] == [[2]] * 12
    assert [len(served(rollout.scheduler, worker.id)) for worker in rollout.workers] == [12, 0, 0]
    rollout.wake(worker_ids=["rollout/1"])
    rollout.wake(worker_ids=["rollout/1", "rollout/0"])  # They are awake already.
    assert awake(rollout) == ["awake", "awake", "asleep"]
    rollout.generate([[1]] * 12)
    assert served(rollout.scheduler, "rollout/1") and served(rollout.scheduler, "rollout/2") == []


def test_sleep_of_some_moves_their_requests(scheduler: Scheduler, tmp_path: Path) -> None:
    with RolloutController(
        scheduler,
        "tests.controller.engines.SleepyRollout",
        Job(role="gated", replicas=2),
        engine_kwargs={"hold": str(tmp_path / "hold"), "gated": True},
        max_in_flight_per_worker=4,
    ) as rollout:
        futures = [rollout.submit([number]) for number in range(1, 5)]
        wait_until(lambda: set(in_flight(rollout).values()) == {2}, "each instance has two")
        with pytest.raises(
            RequestsInFlightError, match=r"sleep\(in_flight='wait'\) .* in flight: gated/1 has 2\. "
        ):
            rollout.sleep(worker_ids=["gated/1"], timeout=0.2)
        rollout.sleep(in_flight="abort", worker_ids=["gated/1"])
        assert in_flight(rollout) == {"gated/0": 4, "gated/1": 0}
        scheduler.call_engine("gated/0", "finish")
        wait_until(
            lambda: (
                bool(scheduler.call_engine("gated/0", "finish"))
                or all(future.done() for future in futures)
            ),
            "the requests end",
        )
        assert [future.result(30).token_ids[0] for future in futures] == [2, 3, 4, 5]


def test_wake_of_some_updates_weights(rollout: RolloutController) -> None:
    rollout.sleep(worker_ids=["rollout/2"])
    assert rollout.update_weights({"weight": [1.0]}, 5) == 5
    assert rollout.versions() == {"rollout/0": 5, "rollout/1": 5}
    assert state_of(rollout, "rollout/2") is Health.STALE
    assert rollout.scheduler.call_engine("rollout/2", "get_version") == 0
    rollout.wake(worker_ids=["rollout/2"])
    assert rollout.versions() == {"rollout/0": 5, "rollout/1": 5, "rollout/2": 5}
    assert state_of(rollout, "rollout/2") is Health.HEALTHY


def test_wake_of_some_that_dropped_weights(rollout: RolloutController) -> None:
    rollout.sleep(2, worker_ids=["rollout/2"])
    rollout.wake(worker_ids=["rollout/2"])
    assert state_of(rollout, "rollout/2") is Health.STALE, "no update has been pushed yet"
    rollout.generate([[1]] * 12)
    assert served(rollout.scheduler, "rollout/2") == []
    rollout.update_weights({"weight": [1.0]}, 1)
    rollout.generate([[1]] * 12)
    assert served(rollout.scheduler, "rollout/2")
    rollout.sleep(2, worker_ids=["rollout/2"])
    rollout.wake(worker_ids=["rollout/2"])
    assert state_of(rollout, "rollout/2") is Health.HEALTHY, "weights are kept"


def test_sleep_of_some_within_sleep_of_all(rollout: RolloutController) -> None:
    rollout.sleep(worker_ids=["rollout/2"])
    rollout.sleep()
    assert awake(rollout) == ["asleep"] * 3
    rollout.wake()
    assert awake(rollout) == ["awake", "awake", "asleep"]
    rollout.sleep()
    rollout.wake(worker_ids=["rollout/2"])
    assert awake(rollout) == ["asleep"] * 3
    rollout.wake()
    assert awake(rollout) == ["awake"] * 3
    rollout.generate([[1]] * 12)
    assert served(rollout.scheduler, "rollout/2")


def test_sleeper_is_rebuilt_after_wake(rollout: RolloutController) -> None:
    scheduler = rollout.scheduler
    rollout.update_weights({"weight": [1.0]}, 2)
    rollout.sleep(worker_ids=["rollout/1"])
    before = kill(scheduler, "rollout/1")
    wait_state(rollout, "rollout/1", Health.RESTARTING)
    rollout.generate([[1]] * 4)
    assert state_of(rollout, "rollout/1") is Health.RESTARTING
    rollout.wake(worker_ids=["rollout/1"])
    wait_state(rollout, "rollout/1", Health.HEALTHY)
    assert pid_of(scheduler, "rollout/1") != before
    assert rollout.versions() == dict.fromkeys(["rollout/0", "rollout/1", "rollout/2"], 2)


def test_sleepers_are_removed(rollout: RolloutController) -> None:
    rollout.sleep(worker_ids=["rollout/2"])
    rollout.remove(["rollout/2"])
    rollout.scale(3)
    assert len(rollout.generate([[1]] * 6)) == 6
    assert not any(each.is_asleep for each in rollout.stats().instances.values())


def test_sleep_of_some_refuses(rollout: RolloutController) -> None:
    everyone = list(rollout.workers)
    with pytest.raises(InvalidSpecError, match="without worker_ids, all sleep"):
        rollout.sleep(worker_ids=everyone)
    rollout.sleep(worker_ids=everyone[:2])
    with pytest.raises(InvalidSpecError, match="at least one worker that stays awake"):
        rollout.sleep(worker_ids=everyone[2:])
    with pytest.raises(HelmsmanError, match=re.escape("call wake(worker_ids=['rollout/0']).")):
        rollout.undrain(["rollout/0"])
    with pytest.raises(WorkerNotFoundError, match="rollout/7"):
        rollout.sleep(worker_ids=["rollout/7"])
    with pytest.raises(ValueError, match="weights_only applies to all workers"):
        rollout.wake(weights_only=True, worker_ids=["rollout/0"])
    with pytest.raises(ValueError, match="level is 3"):
        rollout.sleep(3, worker_ids=["rollout/2"])


def test_sleep_of_some_waits_for_update(rollout: RolloutController) -> None:
    updating = begin(rollout.async_update_weights({"weight": "held"}, 3))
    wait_until(lambda: num_updates(rollout.scheduler, "rollout/2") == 1, "the update begins")
    sleeping = begin(rollout.async_sleep(worker_ids=["rollout/2"]))
    rollout.stats()
    assert not sleeping.done()
    for worker in rollout.workers:
        rollout.scheduler.call_engine(worker.id, "finish")
    assert updating.result(30) == 3
    sleeping.result(30)
    assert awake(rollout) == ["awake", "awake", "asleep"]
