"""RolloutController under supervision, with real processes: a death costs a worker's unfinished
tokens and nothing else.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helmsman.api.errors import GroupCallError, HelmsmanError, InstanceLostError, WorkerFailedError
from helmsman.api.generation import SamplingParams
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec
from helmsman.controller._aio.event_loop import background_loop, submit
from helmsman.controller._generation.health import Health, SupervisionPolicy
from helmsman.controller._generation.retries import RetryGeneration
from helmsman.controller._rollout.rollout_controller import RolloutController
from tests.contract.engines import release_interpreter
from tests.contract.helpers import stop, wait_until

POLICY = SupervisionPolicy(probe_every_s=0.05, suspect_s=0.5, dead_s=1.5, restart_pause_s=0.05)
ENGINE = "tests.controller.engines.CountingRollout"

pytestmark = pytest.mark.slow


def _rollout(
    scheduler: Scheduler, policy: SupervisionPolicy = POLICY, **options: Any
) -> RolloutController:
    rollout = RolloutController(
        scheduler,
        ENGINE,
        Job(role="rollout", replicas=2),
        retries=RetryGeneration(),
        supervision=policy,
        **options,
    )
    rollout.initialize()
    return rollout


def _pid(scheduler: Scheduler, worker_id: str) -> int:
    return next(status.pid for status in scheduler.status() if status.worker_id == worker_id) or 0


def _kill_all(rollout: RolloutController, scheduler: Scheduler) -> set[int]:
    pids = {_pid(scheduler, worker.id) for worker in rollout.workers}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return pids


def _others_serve(rollout: RolloutController, scheduler: Scheduler, before: set[int]) -> bool:
    """Whether all serve, and none of these processes is among them."""
    return _all_serve(rollout) and not before & {
        _pid(scheduler, worker.id) for worker in rollout.workers
    }


def _all_serve(rollout: RolloutController) -> bool:
    return all(each.state is Health.HEALTHY for each in rollout.stats().instances.values())


def test_killed_worker_is_rebuilt(scheduler: Scheduler) -> None:
    with _rollout(scheduler, max_in_flight_per_worker=4) as rollout:
        assert rollout.update_weights({"weight": [1.0]}, 3) == 3
        futures = [
            rollout.submit([i + 1, i + 2], SamplingParams(max_new_tokens=2)) for i in range(200)
        ]
        killed = _pid(scheduler, "rollout/0")
        os.kill(killed, signal.SIGKILL)
        assert [future.result(30).token_ids for future in futures] == [
            [i + 2, i + 3] for i in range(200)
        ]
        wait_until(lambda: _others_serve(rollout, scheduler, {killed}), "it is back")
        assert rollout.versions() == {"rollout/0": 3, "rollout/1": 3}
        _, _, served = scheduler.call_engine("rollout/0", "figures")
        assert len(rollout.generate([[1]] * 20)) == 20
        assert len(scheduler.call_engine("rollout/0", "figures")[2]) > len(served), (
            "it serves again"
        )


def test_engine_child_death_is_the_death_of_the_instance(scheduler: Scheduler) -> None:
    with _rollout_of_children(scheduler, gated=True) as rollout:
        rollout.update_weights({"weight": [1.0]}, 3)
        futures = [rollout.submit([i + 1]) for i in range(4)]
        wait_until(lambda: _num_served(scheduler) == 4, "they are in flight")
        worker, child = (
            _pid(scheduler, "rollout/0"),
            scheduler.call_engine("rollout/0", "child_pid"),
        )
        os.kill(child, signal.SIGKILL)
        wait_until(
            lambda: rollout.stats().instances["rollout/0"].state is not Health.HEALTHY,
            "it is taken for dead",
        )
        wait_until(
            lambda: len(scheduler.call_engine("rollout/1", "figures")[2]) == 4,
            "what it had is begun elsewhere",
        )
        scheduler.call_engine("rollout/1", "finish")
        assert [(each.result(30).token_ids, each.result().versions) for each in futures] == [
            ([i + 2], [3]) for i in range(4)
        ]
        wait_until(lambda: _others_serve(rollout, scheduler, {worker}), "it is back")
        assert rollout.versions() == {"rollout/0": 3, "rollout/1": 3}


def test_probe_detects_death_of_an_idle_engines_child(scheduler: Scheduler) -> None:
    with _rollout_of_children(scheduler) as rollout:
        rollout.update_weights({"weight": [1.0]}, 3)
        worker, child = (
            _pid(scheduler, "rollout/0"),
            scheduler.call_engine("rollout/0", "child_pid"),
        )
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: _others_serve(rollout, scheduler, {worker}), "it is rebuilt")
        assert {
            version for result in rollout.generate([[1]] * 8) for version in result.versions
        } == {3}


def test_sleep_with_dead_engine_child(scheduler: Scheduler) -> None:
    with _rollout_of_children(scheduler, supervision=None) as rollout:
        # so that it is the call that meets the death
        os.kill(scheduler.call_engine("rollout/0", "child_pid"), signal.SIGKILL)
        wait_until(
            lambda: scheduler.call_engine("rollout/0", "failure") is not None, "it has ended"
        )
        rollout.sleep()
        rollout.wake()
        assert len(rollout.generate([[1]] * 8)) == 8
        states = {id_: each.state for id_, each in rollout.stats().instances.items()}
        assert states == {"rollout/0": Health.DEAD, "rollout/1": Health.HEALTHY}


def _sleepy(
    scheduler: Scheduler, hold: Path, policy: SupervisionPolicy = POLICY
) -> RolloutController:
    rollout = RolloutController(
        scheduler,
        "tests.controller.engines.SleepyRollout",
        Job(role="rollout", replicas=2),
        engine_kwargs={"hold": str(hold)},
        supervision=policy,
    )
    rollout.initialize()
    return rollout


def test_sleep_reaches_worker_under_rebuild(scheduler: Scheduler, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    with _sleepy(scheduler, hold, SupervisionPolicy(restart_pause_s=0.05)) as rollout:
        updating = asyncio.run_coroutine_threadsafe(
            rollout.async_update_weights({"weight": "held"}, 3), background_loop()
        )
        for worker in rollout.workers:
            scheduler.call_engine(worker.id, "finish")
        assert updating.result(30) == 3
        os.kill(_pid(scheduler, "rollout/0"), signal.SIGKILL)
        wait_until(
            lambda: _ask(scheduler, "rollout/0", "figures", [0])[0] == 1,
            "it is rebuilt, and waits for the weights",
        )
        rollout.sleep()
        hold.touch()
        scheduler.call_engine("rollout/0", "finish")
        wait_until(
            lambda: scheduler.call_engine("rollout/0", "how_awake") == "drowsy",
            "it goes to sleep as the others have",
        )
        waking = asyncio.run_coroutine_threadsafe(rollout.async_wake(), background_loop())
        rollout.stats()  # a turn of the loop at least
        hold.unlink()
        waking.result(30)
        assert [scheduler.call_engine(worker.id, "how_awake") for worker in rollout.workers] == [
            "awake",
            "awake",
        ]
        assert rollout.update_weights({"weight": [1.0]}, 4) == 4
        assert _all_serve(rollout)


def _ask(scheduler: Scheduler, worker_id: str, method: str, otherwise: Any) -> Any:
    """An answer, or this while the worker or its engine is not there."""
    try:
        return scheduler.call_engine(worker_id, method)
    except HelmsmanError:
        return otherwise


def test_sleep_waits_for_a_hanging_worker_once(scheduler: Scheduler, tmp_path: Path) -> None:
    with _sleepy(scheduler, tmp_path / "hold") as rollout:
        hanging = _pid(scheduler, "rollout/0")
        stop(hanging)
        sleeping = asyncio.run_coroutine_threadsafe(rollout.async_sleep(), background_loop())
        with pytest.raises(HelmsmanError, match="rollout/0.* has not answered for 1.5 s"):
            sleeping.result(30)
        rollout.sleep()
        rollout.wake()
        wait_until(lambda: _others_serve(rollout, scheduler, {hanging}), "it is rebuilt")


def test_sleep_fails_requests_when_all_are_dead(scheduler: Scheduler, tmp_path: Path) -> None:
    policy = SupervisionPolicy(probe_every_s=0.05, suspect_s=0.5, dead_s=10.0, max_restarts=0)
    with _sleepy(scheduler, tmp_path / "hold", policy) as rollout:
        rollout.sleep(2)
        waiting = rollout.submit([1])
        _kill_all(rollout, scheduler)
        assert isinstance(waiting.exception(30), GroupCallError)
        with pytest.raises(GroupCallError):
            rollout.wake()


def _rollout_of_children(
    scheduler: Scheduler, supervision: SupervisionPolicy | None = POLICY, **engine: Any
) -> RolloutController:
    rollout = RolloutController(
        scheduler,
        "tests.controller.engines.RolloutOfAChild",
        Job(role="rollout", replicas=2),
        engine_kwargs=engine,
        retries=RetryGeneration(),
        supervision=supervision,
    )
    rollout.initialize()
    return rollout


def _num_served(scheduler: Scheduler) -> int:
    return sum(
        len(scheduler.call_engine(worker_id, "figures")[2])
        for worker_id in ("rollout/0", "rollout/1")
    )


def test_more_deaths_at_once_than_loop_threads(scheduler: Scheduler) -> None:
    num = min(32, (os.cpu_count() or 1) + 4) + 1  # of an executor, by default
    rollout = RolloutController(
        scheduler,
        ENGINE,
        Job(role="rollout", replicas=num, tasks=[SchedulingSpec(cpu=0.0)]),
        supervision=POLICY,
    )
    with rollout:
        rollout.initialize()
        before = _kill_all(rollout, scheduler)
        wait_until(lambda: _others_serve(rollout, scheduler, before), "all are back")
        assert len(rollout.generate([[1]] * num)) == num


def test_worker_that_hangs_while_built(scheduler: Scheduler, tmp_path: Path) -> None:
    """It is not added; one that serves already is built once more."""
    stops = tmp_path / "stops"
    rollout = RolloutController(
        scheduler,
        "tests.controller.engines.CountingRolloutThatStops",
        Job(role="rollout"),
        engine_args=(str(stops),),
        supervision=POLICY,
    )
    with rollout:
        rollout.initialize()
        stops.touch()
        with pytest.raises(InstanceLostError, match="has not answered for 1.5 s"):
            rollout.scale(2)
        assert list(rollout.stats().instances) == ["rollout/0"]
        stops.touch()
        before = _kill_all(rollout, scheduler)
        wait_until(lambda: not stops.exists(), "its constructor has stopped its process")
        wait_until(lambda: _others_serve(rollout, scheduler, before), "it is back")
        (new,) = rollout.add()
        assert len(rollout.generate([[1]] * 8)) == 8
        assert scheduler.call_engine(new, "figures")[2]


def test_hanging_worker_is_suspected_then_rebuilt(scheduler: Scheduler) -> None:
    with _rollout(scheduler) as rollout:
        stopped = _pid(scheduler, "rollout/1")
        stop(stopped)
        wait_until(
            lambda: rollout.stats().instances["rollout/1"].state is Health.SUSPECT,
            "it is suspected first",
        )
        assert len(rollout.generate([[1]] * 6)) == 6
        wait_until(
            lambda: _all_serve(rollout) and _pid(scheduler, "rollout/1") != stopped,
            "another is in its place",
        )
        assert len(rollout.generate([[1]] * 6)) == 6


def test_hung_calls_do_not_condemn_the_next_worker(scheduler: Scheduler) -> None:
    policy = SupervisionPolicy(
        probe_every_s=0.05, suspect_s=0.2, dead_s=0.5, restart_pause_s=0.05, max_restarts=1
    )
    with _rollout(scheduler, policy, engine_kwargs={"gated": True}) as rollout:
        futures = [rollout.submit([i + 1]) for i in range(4)]
        wait_until(
            lambda: len(scheduler.call_engine("rollout/1", "figures")[2]) == 2,
            "two of them are at the second",
        )
        stopped = _pid(scheduler, "rollout/1")
        stop(stopped)
        wait_until(
            lambda: _others_serve(rollout, scheduler, {stopped}), "its one restart is enough"
        )
        while not all(future.done() for future in futures):
            for index in range(2):
                scheduler.call_engine(f"rollout/{index}", "finish")
        assert [future.result().token_ids for future in futures] == [[2], [3], [4], [5]]


def _hold(scheduler: Scheduler, folder: Path) -> tuple[str, concurrent.futures.Future[None]]:
    """Have C code hold the interpreter of rollout/0, as is seen from outside; returns the file that
    ends it, and the call.
    """
    started = str(folder / "started")
    holding = submit(scheduler.async_call_engine("rollout/0", "hold_interpreter", None, started))
    wait_until(lambda: os.path.exists(started), "the call has begun")
    wait_until(lambda: _stuck_s(scheduler) is not None, "the interpreter is held")
    return started, holding


def _stuck_s(scheduler: Scheduler) -> float | None:
    return asyncio.run(scheduler.check_health("rollout/0")).stuck_s


def test_busy_worker_is_not_given_up(scheduler: Scheduler, tmp_path: Path) -> None:
    """One that spins stays healthy; one whose interpreter is held by C code is suspected."""
    with _rollout(scheduler) as rollout:
        pids = {worker.id: _pid(scheduler, worker.id) for worker in rollout.workers}
        scheduler.call_engine("rollout/0", "spin", None, 2 * POLICY.dead_s)
        assert _all_serve(rollout)
        started, holding = _hold(scheduler, tmp_path)
        wait_until(lambda: (_stuck_s(scheduler) or 0.0) > 3 * POLICY.dead_s, "it is held for long")
        assert rollout.stats().instances["rollout/0"].state is Health.SUSPECT
        assert len(rollout.generate([[1]] * 6)) == 6, "the others serve"
        release_interpreter(started)
        holding.result(30)
        wait_until(lambda: _all_serve(rollout), "it serves again")
        assert {worker.id: _pid(scheduler, worker.id) for worker in rollout.workers} == pids


def test_worker_held_beyond_busy_s_is_given_up(scheduler: Scheduler, tmp_path: Path) -> None:
    policy = msgspec.structs.replace(POLICY, busy_s=2.5, max_restarts=0)
    with _rollout(scheduler, policy) as rollout:
        started, _ = _hold(scheduler, tmp_path)
        wait_until(
            lambda: rollout.stats().instances["rollout/0"].state is Health.DEAD, "it is given up"
        )
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
        wait_until(lambda: _others_serve(rollout, scheduler, killed), "they are back, once")
        _kill_all(rollout, scheduler)
        with pytest.raises((GroupCallError, WorkerFailedError), match="SIGKILL"):
            rollout.generate([[1]])


def test_rebuilt_worker_without_weights_waits_for_update(scheduler: Scheduler) -> None:
    with _rollout(scheduler) as rollout:
        handle = scheduler.put({"weight": [1.0]})
        assert rollout.update_weights(handle, 1) == 1
        scheduler.release(handle)
        os.kill(_pid(scheduler, "rollout/0"), signal.SIGKILL)
        wait_until(
            lambda: rollout.stats().instances["rollout/0"].state is Health.STALE,
            "it is back, without the weights",
        )
        assert {
            version for result in rollout.generate([[1]] * 6) for version in result.versions
        } == {1}
        assert rollout.update_weights({"weight": [1.0]}, 2) == 2
        assert _all_serve(rollout)
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
        assert rollout.stats().instances["rollout/2"].state is Health.STALE
        assert not waiting.done()
        assert rollout.update_weights({"weight": [1.0]}, 2) == 2
        assert waiting.result(30).versions == [2]


def test_sigterm_moves_requests_and_replaces_worker(scheduler: Scheduler) -> None:
    policy = SupervisionPolicy(probe_every_s=0.05, suspect_s=5.0, dead_s=10.0, max_restarts=0)
    with _rollout(
        scheduler, policy, engine_kwargs={"gated": True}, max_in_flight_per_worker=8
    ) as rollout:
        assert rollout.update_weights({"weight": [1.0]}, 1) == 1
        for _ in range(2):  # a restart in time is not charged to the budget, which is none here
            futures = [
                rollout.submit([i + 1, i + 2, i + 3], SamplingParams(max_new_tokens=8))
                for i in range(4)
            ]
            wait_until(
                lambda: len(scheduler.call_engine("rollout/1", "figures")[2]) == 2,
                "two of them are at the second",
            )
            told = _pid(scheduler, "rollout/1")
            os.kill(told, signal.SIGTERM)
            wait_until(lambda: _others_serve(rollout, scheduler, {told}), "another is in its place")  # noqa: B023
            while not all(future.done() for future in futures):
                scheduler.call_engine("rollout/0", "finish")
            results = [future.result() for future in futures]
            assert sorted(len(result.token_ids) for result in results) == [3, 3, 8, 8], (
                "they went on after what they had"
            )
            assert rollout.versions() == {"rollout/0": 1, "rollout/1": 1}
            assert not any(each.is_draining for each in rollout.stats().instances.values())
        rollout.scale(1)
        future = rollout.submit([1, 2], SamplingParams(max_new_tokens=4))
        wait_until(lambda: scheduler.call_engine("rollout/0", "figures")[2], "the only one has it")
        told = _pid(scheduler, "rollout/0")
        os.kill(told, signal.SIGTERM)
        wait_until(lambda: _others_serve(rollout, scheduler, {told}), "another is in its place")
        wait_until(lambda: scheduler.call_engine("rollout/0", "figures")[2], "that has it now")
        scheduler.call_engine("rollout/0", "finish")
        assert len(future.result(30).token_ids) == 4
