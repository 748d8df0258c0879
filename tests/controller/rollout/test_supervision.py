"""Tests of RolloutController under supervision on processes: instances die, hang and restart."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helmsman._base.event_loop import submit
from helmsman.api.errors import GroupCallError, HelmsmanError, InstanceLostError, WorkerFailedError
from helmsman.api.generation import SamplingParams
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from helmsman.controller._rollout.health import Health, SupervisionPolicy
from helmsman.controller._rollout.retries import RetryGeneration
from helmsman.controller._rollout.rollout_controller import RolloutController
from tests.contract.engines import release_interpreter
from tests.contract.helpers import stop, wait_until
from tests.controller.rollout.helpers import (
    all_serve,
    awake,
    begin,
    kill,
    pid_of,
    served,
    state_of,
    wait_state,
)

POLICY = SupervisionPolicy(probe_every_s=0.05, suspect_s=0.5, dead_s=1.5, restart_pause_s=0.05)
CHILD = "RolloutOfAChild"


def _rollout(
    scheduler: Scheduler,
    policy: SupervisionPolicy | None = POLICY,
    engine: str = "CountingRollout",
    replicas: int = 2,
    **options: Any,
) -> RolloutController:
    return RolloutController(
        scheduler,
        f"tests.controller.engines.{engine}",
        Job(role="rollout", replicas=replicas, tasks=[SchedulingSpec(cpu=0.0)]),
        retries=RetryGeneration(),
        supervision=policy,
        **options,
    )


def _kill_all(rollout: RolloutController, scheduler: Scheduler) -> set[int]:
    return {kill(scheduler, worker.id) for worker in rollout.workers}


def _wait_replaced(rollout: RolloutController, scheduler: Scheduler, pids: set[int]) -> None:
    """Wait until all instances serve, and none in one of these processes."""
    wait_until(
        lambda: (
            all_serve(rollout)
            and not pids & {pid_of(scheduler, worker.id) for worker in rollout.workers}
        ),
        "the workers are replaced",
    )


def test_killed_worker_is_rebuilt(scheduler: Scheduler) -> None:
    with _rollout(scheduler, max_in_flight_per_worker=4) as rollout:
        assert rollout.update_weights({"weight": [1.0]}, 3) == 3
        futures = [
            rollout.submit([i + 1, i + 2], SamplingParams(max_new_tokens=2)) for i in range(200)
        ]
        killed = kill(scheduler, "rollout/0")
        assert [future.result(30).token_ids for future in futures] == [
            [i + 2, i + 3] for i in range(200)
        ]
        _wait_replaced(rollout, scheduler, {killed})
        assert rollout.versions() == {"rollout/0": 3, "rollout/1": 3}
        before = served(scheduler, "rollout/0")
        assert len(rollout.generate([[1]] * 20)) == 20
        assert len(served(scheduler, "rollout/0")) > len(before), "it serves again"


def test_engine_child_death_is_the_death_of_the_instance(scheduler: Scheduler) -> None:
    with _rollout(scheduler, engine=CHILD, engine_kwargs={"gated": True}) as rollout:
        rollout.update_weights({"weight": [1.0]}, 3)
        futures = [rollout.submit([i + 1]) for i in range(4)]
        wait_until(lambda: _num_served(scheduler) == 4, "the requests are in flight")
        worker = pid_of(scheduler, "rollout/0")
        child = scheduler.call_engine("rollout/0", "child_pid")
        os.kill(child, signal.SIGKILL)
        wait_until(
            lambda: state_of(rollout, "rollout/0") is not Health.HEALTHY,
            "its death is detected",
        )
        wait_until(
            lambda: len(served(scheduler, "rollout/1")) == 4,
            "its requests are begun elsewhere",
        )
        scheduler.call_engine("rollout/1", "finish")
        assert [(each.result(30).token_ids, each.result().versions) for each in futures] == [
            ([i + 2], [3]) for i in range(4)
        ]
        _wait_replaced(rollout, scheduler, {worker})
        assert rollout.versions() == {"rollout/0": 3, "rollout/1": 3}


def test_probe_detects_death_of_an_idle_engines_child(scheduler: Scheduler) -> None:
    with _rollout(scheduler, engine=CHILD) as rollout:
        rollout.update_weights({"weight": [1.0]}, 3)
        worker = pid_of(scheduler, "rollout/0")
        child = scheduler.call_engine("rollout/0", "child_pid")
        os.kill(child, signal.SIGKILL)
        _wait_replaced(rollout, scheduler, {worker})
        assert {
            version for result in rollout.generate([[1]] * 8) for version in result.versions
        } == {3}


def test_sleep_with_dead_engine_child(scheduler: Scheduler) -> None:
    with _rollout(scheduler, None, CHILD) as rollout:
        # There is no probe, so the call detects the death.
        os.kill(scheduler.call_engine("rollout/0", "child_pid"), signal.SIGKILL)
        wait_until(
            lambda: scheduler.call_engine("rollout/0", "failure") is not None,
            "the child has exited",
        )
        rollout.sleep()
        rollout.wake()
        assert len(rollout.generate([[1]] * 8)) == 8
        states = {id_: each.state for id_, each in rollout.stats().instances.items()}
        assert states == {"rollout/0": Health.DEAD, "rollout/1": Health.HEALTHY}


def test_sleep_reaches_worker_under_rebuild(scheduler: Scheduler, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    with _rollout(
        scheduler,
        SupervisionPolicy(restart_pause_s=0.05),
        "SleepyRollout",
        engine_kwargs={"hold": str(hold)},
    ) as rollout:
        updating = begin(rollout.async_update_weights({"weight": "held"}, 3))
        for worker in rollout.workers:
            scheduler.call_engine(worker.id, "finish")
        assert updating.result(30) == 3
        kill(scheduler, "rollout/0")
        wait_until(
            lambda: _ask(scheduler, "rollout/0", "figures", [0])[0] == 1,
            "it is rebuilt and waits for the weights",
        )
        rollout.sleep()
        hold.touch()
        scheduler.call_engine("rollout/0", "finish")
        wait_until(
            lambda: scheduler.call_engine("rollout/0", "how_awake") == "drowsy",
            "it begins to sleep",
        )
        waking = begin(rollout.async_wake())
        rollout.stats()  # at least one turn of the loop
        hold.unlink()
        waking.result(30)
        assert awake(rollout) == ["awake", "awake"]
        assert rollout.update_weights({"weight": [1.0]}, 4) == 4
        assert all_serve(rollout)


def _ask(scheduler: Scheduler, worker_id: str, method: str, otherwise: Any) -> Any:
    """Return an answer; ``otherwise`` while the worker or its engine does not exist."""
    try:
        return scheduler.call_engine(worker_id, method)
    except HelmsmanError:
        return otherwise


def test_sleep_waits_for_a_hanging_worker_once(scheduler: Scheduler, tmp_path: Path) -> None:
    with _rollout(
        scheduler, engine="SleepyRollout", engine_args=(str(tmp_path / "hold"),)
    ) as rollout:
        hanging = pid_of(scheduler, "rollout/0")
        stop(hanging)
        sleeping = begin(rollout.async_sleep())
        with pytest.raises(HelmsmanError, match="rollout/0.* has not answered for 1.5 s"):
            sleeping.result(30)
        rollout.sleep()
        rollout.wake()
        _wait_replaced(rollout, scheduler, {hanging})


def test_sleep_fails_requests_when_all_are_dead(scheduler: Scheduler, tmp_path: Path) -> None:
    policy = SupervisionPolicy(probe_every_s=0.05, suspect_s=0.5, dead_s=10.0, max_restarts=0)
    with _rollout(
        scheduler, policy, "SleepyRollout", engine_args=(str(tmp_path / "hold"),)
    ) as rollout:
        rollout.sleep(2)
        waiting = rollout.submit([1])
        _kill_all(rollout, scheduler)
        assert isinstance(waiting.exception(30), GroupCallError)
        with pytest.raises(GroupCallError):
            rollout.wake()


def _num_served(scheduler: Scheduler) -> int:
    return sum(len(served(scheduler, worker_id)) for worker_id in ("rollout/0", "rollout/1"))


def test_more_deaths_at_once_than_loop_threads(scheduler: Scheduler) -> None:
    num = min(32, (os.cpu_count() or 1) + 4) + 1  # one more than the threads of a default executor
    with _rollout(scheduler, replicas=num) as rollout:
        before = _kill_all(rollout, scheduler)
        _wait_replaced(rollout, scheduler, before)
        assert len(rollout.generate([[1]] * num)) == num


def test_worker_that_hangs_while_built(scheduler: Scheduler, tmp_path: Path) -> None:
    """A new worker is not added; one that has served is built again."""
    stops = tmp_path / "stops"
    engine = "CountingRolloutThatStops"
    with _rollout(scheduler, engine=engine, replicas=1, engine_args=(str(stops),)) as rollout:
        stops.touch()
        with pytest.raises(InstanceLostError, match="has not answered for 1.5 s"):
            rollout.scale(2)
        assert list(rollout.stats().instances) == ["rollout/0"]
        stops.touch()
        before = _kill_all(rollout, scheduler)
        wait_until(lambda: not stops.exists(), "its constructor has stopped its process")
        _wait_replaced(rollout, scheduler, before)
        (new,) = rollout.add()
        assert len(rollout.generate([[1]] * 8)) == 8
        assert scheduler.call_engine(new, "figures")[2]


def test_hanging_worker_is_suspected_then_rebuilt(scheduler: Scheduler) -> None:
    with _rollout(scheduler) as rollout:
        stopped = pid_of(scheduler, "rollout/1")
        stop(stopped)
        wait_state(rollout, "rollout/1", Health.SUSPECT)
        assert len(rollout.generate([[1]] * 6)) == 6
        _wait_replaced(rollout, scheduler, {stopped})
        assert len(rollout.generate([[1]] * 6)) == 6


def test_calls_of_a_hung_worker_do_not_end_the_next_one(scheduler: Scheduler) -> None:
    policy = SupervisionPolicy(
        probe_every_s=0.05, suspect_s=0.2, dead_s=0.5, restart_pause_s=0.05, max_restarts=1
    )
    with _rollout(scheduler, policy, engine_kwargs={"gated": True}) as rollout:
        futures = [rollout.submit([i + 1]) for i in range(4)]
        wait_until(
            lambda: len(served(scheduler, "rollout/1")) == 2,
            "the second instance has two requests",
        )
        stopped = pid_of(scheduler, "rollout/1")
        stop(stopped)
        _wait_replaced(rollout, scheduler, {stopped})
        while not all(future.done() for future in futures):
            for index in range(2):
                scheduler.call_engine(f"rollout/{index}", "finish")
        assert [future.result().token_ids for future in futures] == [[2], [3], [4], [5]]


def _hold(scheduler: Scheduler, folder: Path) -> tuple[str, concurrent.futures.Future[None]]:
    """Let C code hold the interpreter of rollout/0.

    Returns:
        The file for release_interpreter, and the call.
    """
    started = str(folder / "started")
    holding = submit(scheduler.async_call_engine("rollout/0", "hold_interpreter", None, started))
    wait_until(lambda: os.path.exists(started), "the call has begun")
    wait_until(lambda: _stuck_s(scheduler) is not None, "the interpreter is held")
    return started, holding


def _stuck_s(scheduler: Scheduler) -> float | None:
    return asyncio.run(scheduler.check_health("rollout/0")).stuck_s


def test_busy_worker_is_not_ended(scheduler: Scheduler, tmp_path: Path) -> None:
    """A worker that spins stays healthy; one whose interpreter is held by C code is suspected."""
    with _rollout(scheduler) as rollout:
        pids = {worker.id: pid_of(scheduler, worker.id) for worker in rollout.workers}
        scheduler.call_engine("rollout/0", "spin", None, 2 * POLICY.dead_s)
        assert all_serve(rollout)
        started, holding = _hold(scheduler, tmp_path)
        wait_until(
            lambda: (_stuck_s(scheduler) or 0.0) > 3 * POLICY.dead_s,
            "it is held for three times dead_s",
        )
        assert state_of(rollout, "rollout/0") is Health.SUSPECT
        assert len(rollout.generate([[1]] * 6)) == 6, "the other instance serves"
        release_interpreter(started)
        holding.result(30)
        wait_until(lambda: all_serve(rollout), "it serves again")
        assert {worker.id: pid_of(scheduler, worker.id) for worker in rollout.workers} == pids


def test_worker_held_beyond_busy_s_is_ended(scheduler: Scheduler, tmp_path: Path) -> None:
    policy = msgspec.structs.replace(POLICY, busy_s=2.5, max_restarts=0)
    with _rollout(scheduler, policy) as rollout:
        started, _ = _hold(scheduler, tmp_path)
        wait_state(rollout, "rollout/0", Health.DEAD)
        _kill_all(rollout, scheduler)
        with pytest.raises(
            GroupCallError,
            match=r"rollout/0.* has not answered for 2.5 s .SupervisionPolicy.busy_s.",
        ):
            rollout.generate([[1]])
        release_interpreter(started)


def test_requests_wait_for_restarts_within_the_budget(scheduler: Scheduler) -> None:
    policy = SupervisionPolicy(probe_every_s=0.05, restart_pause_s=0.01, max_restarts=1)
    with _rollout(scheduler, policy) as rollout:
        killed = _kill_all(rollout, scheduler)
        assert [result.token_ids for result in rollout.generate([[1], [2], [3]])] == [[2], [3], [4]]
        _wait_replaced(rollout, scheduler, killed)
        _kill_all(rollout, scheduler)
        with pytest.raises((GroupCallError, WorkerFailedError), match="SIGKILL"):
            rollout.generate([[1]])


def test_rebuilt_worker_without_weights_waits_for_update(scheduler: Scheduler) -> None:
    with _rollout(scheduler) as rollout:
        handle = scheduler.put({"weight": [1.0]})
        assert rollout.update_weights(handle, 1) == 1
        scheduler.release(handle)
        kill(scheduler, "rollout/0")
        wait_state(rollout, "rollout/0", Health.STALE)
        assert {
            version for result in rollout.generate([[1]] * 6) for version in result.versions
        } == {1}
        assert rollout.update_weights({"weight": [1.0]}, 2) == 2
        assert all_serve(rollout)
        assert rollout.versions() == {"rollout/0": 2, "rollout/1": 2}


def test_scale_without_weights_leaves_requests_waiting(scheduler: Scheduler) -> None:
    policy = SupervisionPolicy(probe_every_s=0.05, restart_pause_s=600.0)
    with _rollout(scheduler, policy) as rollout:
        handle = scheduler.put({"weight": [1.0]})
        assert rollout.update_weights(handle, 1) == 1
        scheduler.release(handle)
        _kill_all(rollout, scheduler)
        wait_until(
            lambda: {each.state for each in rollout.stats().instances.values()} == {Health.DEAD},
            "both are dead",
        )
        waiting = rollout.submit([1])
        rollout.scale(3)
        assert state_of(rollout, "rollout/2") is Health.STALE
        assert not waiting.done()
        assert rollout.update_weights({"weight": [1.0]}, 2) == 2
        assert waiting.result(30).versions == [2]


def test_sigterm_moves_requests_and_replaces_worker(scheduler: Scheduler) -> None:
    policy = SupervisionPolicy(probe_every_s=0.05, suspect_s=5.0, dead_s=10.0, max_restarts=0)
    with _rollout(
        scheduler, policy, engine_kwargs={"gated": True}, max_in_flight_per_worker=8
    ) as rollout:
        assert rollout.update_weights({"weight": [1.0]}, 1) == 1
        for _ in range(2):  # A restart on SIGTERM is not charged to the budget, which is 0.
            futures = [
                rollout.submit([i + 1, i + 2, i + 3], SamplingParams(max_new_tokens=8))
                for i in range(4)
            ]
            wait_until(
                lambda: len(served(scheduler, "rollout/1")) == 2,
                "the second instance has two requests",
            )
            stopped = pid_of(scheduler, "rollout/1")
            os.kill(stopped, signal.SIGTERM)
            _wait_replaced(rollout, scheduler, {stopped})
            while not all(future.done() for future in futures):
                scheduler.call_engine("rollout/0", "finish")
            results = [future.result() for future in futures]
            assert sorted(len(result.token_ids) for result in results) == [3, 3, 8, 8], (
                "the requests kept their tokens"
            )
            assert rollout.versions() == {"rollout/0": 1, "rollout/1": 1}
            assert not any(each.is_draining for each in rollout.stats().instances.values())
        rollout.scale(1)
        future = rollout.submit([1, 2], SamplingParams(max_new_tokens=4))
        wait_until(lambda: served(scheduler, "rollout/0"), "the only instance has it")
        stopped = pid_of(scheduler, "rollout/0")
        os.kill(stopped, signal.SIGTERM)
        _wait_replaced(rollout, scheduler, {stopped})
        wait_until(lambda: served(scheduler, "rollout/0"), "the new worker has it")
        scheduler.call_engine("rollout/0", "finish")
        assert len(future.result(30).token_ids) == 4
