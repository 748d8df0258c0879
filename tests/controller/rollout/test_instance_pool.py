"""Tests of adding, removing and draining instances of a rollout on processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from helmsman.api.errors import (
    GroupCallError,
    HelmsmanError,
    InvalidSpecError,
    WorkerFailedError,
    WorkerNotFoundError,
)
from helmsman.api.generation import GenerationResult, SamplingParams
from helmsman.api.scheduler import Job, Scheduler, SchedulingStrategy
from helmsman.controller._rollout.health import Health, SupervisionPolicy
from helmsman.controller._rollout.retries import RetryGeneration
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._training.train_controller import TrainController
from tests.contract.helpers import Gate, wait_gone, wait_until
from tests.controller.rollout.helpers import (
    POLICY,
    begin,
    in_flight,
    kill,
    pid_of,
    served,
    state_of,
)

GATED = {"engine_kwargs": {"gated": True}, "max_in_flight_per_worker": 4}


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path)
    yield gate
    gate.open()


@contextlib.contextmanager
def _rollout(
    scheduler: Scheduler, replicas: int = 3, engine: str = "CountingRollout", **options: Any
) -> Iterator[RolloutController]:
    options = {"supervision": POLICY, "retries": RetryGeneration(), **options}
    with RolloutController(
        scheduler,
        f"tests.controller.engines.{engine}",
        Job(role="rollout", replicas=replicas),
        **options,
    ) as rollout:
        rollout.initialize()
        yield rollout


def _finish(
    scheduler: Scheduler, rollout: RolloutController, futures: list[Future[GenerationResult]]
) -> list[list[int]]:
    def all_done() -> bool:
        for worker in rollout.workers:
            with contextlib.suppress(WorkerNotFoundError, WorkerFailedError):  # It may be leaving.
                scheduler.call_engine(worker.id, "finish")
        return all(future.done() for future in futures)

    wait_until(all_done, "all requests end")
    return [future.result().token_ids for future in futures]


def _ids(scheduler: Scheduler, rollout: RolloutController) -> list[str]:
    """Return the worker ids, on which scheduler and rollout must agree."""
    ids = [worker.id for worker in scheduler.get_workers("rollout")]
    assert ids == [worker.id for worker in rollout.workers] == list(rollout.stats().instances)
    return ids


def test_add_and_remove_beside_requests(scheduler: Scheduler) -> None:
    with _rollout(scheduler, max_in_flight_per_worker=2) as rollout:
        assert rollout.update_weights({"weight": [1.0]}, 7) == 7
        futures = [
            rollout.submit([i + 1, i + 2], SamplingParams(max_new_tokens=2)) for i in range(300)
        ]
        rollout.remove(["rollout/1"])
        assert rollout.add(2) == ["rollout/3", "rollout/4"]
        rollout.remove(["rollout/0", "rollout/3"], migrate=True)
        assert _ids(scheduler, rollout) == ["rollout/2", "rollout/4"]
        assert [future.result(30).token_ids for future in futures] == [
            [i + 2, i + 3] for i in range(300)
        ]
        assert {version for future in futures for version in future.result().versions} == {7}
        assert rollout.versions() == {"rollout/2": 7, "rollout/4": 7}
        rollout.scale(3)
        assert _ids(scheduler, rollout) == ["rollout/2", "rollout/4", "rollout/5"]


def test_drain_until_undrain(scheduler: Scheduler) -> None:
    with _rollout(scheduler, replicas=2) as rollout:
        rollout.drain(["rollout/1"])
        assert rollout.stats().instances["rollout/1"].is_draining
        assert len(rollout.generate([[1]] * 10)) == 10
        assert served(scheduler, "rollout/1") == []
        assert rollout.update_weights({"weight": [1.0]}, 1) == 1
        assert rollout.versions() == {"rollout/0": 1, "rollout/1": 1}, "drained instances follow"
        rollout.undrain(["rollout/1"])
        assert len(rollout.generate([[1]] * 10)) == 10
        assert served(scheduler, "rollout/1")


def test_drain_cancelled_or_undrained(scheduler: Scheduler) -> None:
    with _rollout(scheduler, replicas=2, **GATED) as rollout:  # type: ignore[arg-type]
        futures = [rollout.submit([i + 1]) for i in range(8)]
        wait_until(lambda: in_flight(rollout) == {"rollout/0": 4, "rollout/1": 4}, "both are full")
        cancelled = begin(rollout.async_drain(["rollout/1"]))
        other = begin(rollout.async_drain(["rollout/1"]))
        wait_until(lambda: rollout.stats().instances["rollout/1"].is_draining, "it is drained")
        cancelled.cancel()
        rollout.versions()  # at least one turn of the loop
        assert rollout.stats().instances["rollout/1"].is_draining, "the other drain is in force"
        rollout.undrain(["rollout/1"])
        with pytest.raises(HelmsmanError, match="Drain of rollout/1 did not complete"):
            other.result(30)
        assert not rollout.stats().instances["rollout/1"].is_draining
        futures += [rollout.submit([i + 1]) for i in range(8)]
        assert _finish(scheduler, rollout, futures) == [[i + 2] for i in range(8)] * 2
        assert len(served(scheduler, "rollout/1")) > 4


def test_remove_refuses_last_and_removed_workers(scheduler: Scheduler) -> None:
    with _rollout(scheduler, **GATED) as rollout:  # type: ignore[arg-type]
        futures = [rollout.submit([i + 1]) for i in range(12)]
        wait_until(lambda: set(in_flight(rollout).values()) == {4}, "all are full")
        first = begin(rollout.async_remove(["rollout/1"]))
        second = begin(rollout.async_remove(["rollout/0"]))
        wait_until(
            lambda: sum(each.is_draining for each in rollout.stats().instances.values()) == 2,
            "both are drained",
        )
        with pytest.raises(
            InvalidSpecError, match="not being removed already; being removed: rollout/1"
        ):
            rollout.remove(["rollout/1"])
        with pytest.raises(InvalidSpecError, match="at least one remaining worker"):
            rollout.remove(["rollout/2"])
        with pytest.raises(WorkerNotFoundError, match="rollout/9"):
            rollout.remove(["rollout/2", "rollout/9"])
        with pytest.raises(InvalidSpecError, match="replicas is "):
            rollout.scale(0)
        assert _finish(scheduler, rollout, futures) == [[i + 2] for i in range(12)]
        assert first.result(30) is second.result(30) is None
        assert _ids(scheduler, rollout) == ["rollout/2"]
        with pytest.raises(InvalidSpecError, match="at least one remaining worker"):
            rollout.remove(["rollout/2"])
        assert not rollout.stats().instances["rollout/2"].is_draining
        with pytest.raises(WorkerNotFoundError, match="rollout/1"):
            rollout.remove(["rollout/1"])


def test_scale_concurrently(scheduler: Scheduler) -> None:
    with _rollout(scheduler, replicas=1) as rollout:
        for scaling in [begin(rollout.async_scale(3)) for _ in range(4)]:
            scaling.result(60)
        assert len(_ids(scheduler, rollout)) == 3
        for scaling in [begin(rollout.async_scale(2)) for _ in range(4)]:
            scaling.result(60)
        assert _ids(scheduler, rollout) == ["rollout/0", "rollout/1"]


def test_undrain_at_the_end_of_a_removal(scheduler: Scheduler) -> None:
    """Idle instances are drained at once: each is removed, or serves again."""

    async def scenario(rollout: RolloutController, waiting: list[Future[GenerationResult]]) -> None:
        removal = asyncio.ensure_future(rollout.async_remove(["rollout/1", "rollout/2"]))
        undrains = [
            asyncio.to_thread(rollout.undrain, [worker_id])
            for worker_id in ("rollout/2", "rollout/1")
        ]
        waiting += [await rollout.async_submit([5]), await rollout.async_submit([5])]
        for outcome in await asyncio.gather(removal, *undrains, return_exceptions=True):
            assert outcome is None or isinstance(outcome, HelmsmanError), outcome

    with _rollout(scheduler, max_in_flight_per_worker=1) as rollout:
        waiting: list[Future[GenerationResult]] = []
        begin(scenario(rollout, waiting)).result(30)
        assert [future.result(30).token_ids for future in waiting] == [[6], [6]]
        _ids(scheduler, rollout)


def test_remove_while_paused(scheduler: Scheduler) -> None:
    with _rollout(scheduler, replicas=2, **GATED) as rollout:  # type: ignore[arg-type]
        futures = [rollout.submit([i + 1], SamplingParams(max_new_tokens=1)) for i in range(20)]
        wait_until(lambda: in_flight(rollout) == {"rollout/0": 4, "rollout/1": 4}, "both are full")
        rollout.pause()
        rollout.remove(["rollout/0"], migrate=True)
        assert _ids(scheduler, rollout) == ["rollout/1"]
        assert rollout.add() == ["rollout/2"]
        assert in_flight(rollout) == {"rollout/1": 4, "rollout/2": 0}, (
            "nothing starts during a pause"
        )
        rollout.resume()
        assert _finish(scheduler, rollout, futures) == [[i + 2] for i in range(20)]


def test_remove_cancelled_early(scheduler: Scheduler) -> None:
    with _rollout(scheduler, replicas=2, **GATED) as rollout:  # type: ignore[arg-type]
        futures = [rollout.submit([i + 1]) for i in range(8)]
        wait_until(lambda: in_flight(rollout) == {"rollout/0": 4, "rollout/1": 4}, "both are full")
        removal = begin(rollout.async_remove(["rollout/0"]))
        wait_until(lambda: rollout.stats().instances["rollout/0"].is_draining, "it is drained")
        removal.cancel()
        wait_until(
            lambda: not rollout.stats().instances["rollout/0"].is_draining, "it serves again"
        )
        futures += [rollout.submit([i + 1]) for i in range(8)]
        assert _finish(scheduler, rollout, futures) == [[i + 2] for i in range(8)] * 2
        assert len(served(scheduler, "rollout/0")) > 4
        assert _ids(scheduler, rollout) == ["rollout/0", "rollout/1"]
        rollout.remove(["rollout/0"])
        assert _ids(scheduler, rollout) == ["rollout/1"]


def test_remove_cancelled_late_is_finished(scheduler: Scheduler, gate: Gate) -> None:
    with _rollout(scheduler) as rollout:
        pid = pid_of(scheduler, "rollout/1")
        # Its engine cannot be destroyed meanwhile.
        held = begin(scheduler.async_call_engine("rollout/1", "wait", None, *gate.files))
        gate.wait_started()
        removal = begin(rollout.async_remove(["rollout/1"]))
        wait_until(lambda: "rollout/1" not in rollout.stats().instances, "its removal has begun")
        removal.cancel()
        wait_gone({"rollout/1": pid})
        assert isinstance(held.exception(30), HelmsmanError)
        wait_until(lambda: len(rollout.workers) == 2, "the removal completes")
        assert _ids(scheduler, rollout) == ["rollout/0", "rollout/2"]
        assert len(rollout.generate([[1]] * 10)) == 10


def _slow(tmp_path: Path, gate: Gate) -> tuple[Path, dict[str, Any]]:
    hold = tmp_path / "hold"
    return hold, {
        "engine": "SlowRollout",
        "engine_kwargs": {"hold": str(hold), "started": gate.started, "release": gate.release},
    }


def test_remove_during_rebuild(scheduler: Scheduler, tmp_path: Path, gate: Gate) -> None:
    hold, options = _slow(tmp_path, gate)
    with _rollout(scheduler, **options) as rollout:
        hold.touch()
        kill(scheduler, "rollout/1")
        gate.wait_started()
        assert state_of(rollout, "rollout/1") is Health.RESTARTING
        pid = pid_of(scheduler, "rollout/1")
        rollout.remove(["rollout/1"])
        wait_gone({"rollout/1": pid})
        assert _ids(scheduler, rollout) == ["rollout/0", "rollout/2"]
        gate.open()
        assert rollout.add() == ["rollout/3"]
        assert len(rollout.generate([[1]] * 10)) == 10
        assert {each.state for each in rollout.stats().instances.values()} == {Health.HEALTHY}


def test_add_cancelled_or_failed_leaves_no_worker(
    scheduler: Scheduler, tmp_path: Path, gate: Gate
) -> None:
    hold, options = _slow(tmp_path, gate)
    with _rollout(scheduler, replicas=1, **options) as rollout:
        hold.touch()
        addition = begin(rollout.async_add())
        gate.wait_started()
        pid = pid_of(scheduler, "rollout/1")
        addition.cancel()
        wait_gone({"rollout/1": pid})
        wait_until(
            lambda: len(scheduler.get_workers("rollout")) == len(rollout.workers) == 1,
            "the addition is undone",
        )
        assert _ids(scheduler, rollout) == ["rollout/0"]
        gate.open()
        assert rollout.add() == ["rollout/2"]
        early = begin(rollout.async_add())
        early.cancel()  # before its workers exist
        wait_until(
            lambda: (
                early.done() and len(scheduler.get_workers("rollout")) == len(rollout.workers) == 2
            ),
            "the early addition is undone",
        )
        hold.write_text("refuse")
        with pytest.raises(HelmsmanError, match="it was told to refuse"):
            rollout.add(2)
        assert _ids(scheduler, rollout) == ["rollout/0", "rollout/2"]
        with pytest.raises(InvalidSpecError, match="replicas is "):
            rollout.add(0)


def test_add_serves_together_or_not_at_all(scheduler: Scheduler) -> None:
    def is_asked(worker_id: str) -> bool:
        with contextlib.suppress(HelmsmanError):  # It does not exist yet.
            return bool(scheduler.call_engine(worker_id, "figures")[0])
        return False

    with _rollout(scheduler, replicas=1) as rollout:
        update = begin(rollout.async_update_weights({"weight": "held"}, 1))
        wait_until(lambda: is_asked("rollout/0"), "it is asked to take the weights")
        scheduler.call_engine("rollout/0", "finish")
        assert update.result(30) == 1
        addition = begin(rollout.async_add(2))
        wait_until(
            lambda: is_asked("rollout/1") and is_asked("rollout/2"),
            "both are asked to take the weights",
        )
        scheduler.call_engine("rollout/1", "finish")
        wait_until(lambda: scheduler.call_engine("rollout/1", "get_version") == 1, "one has them")
        with pytest.raises(WorkerNotFoundError, match="rollout/1"):
            rollout.remove(["rollout/1"])
        pids = {worker_id: pid_of(scheduler, worker_id) for worker_id in ("rollout/1", "rollout/2")}
        os.kill(pids["rollout/2"], signal.SIGKILL)
        assert isinstance(addition.exception(30), WorkerFailedError)
        wait_gone(pids)
        assert _ids(scheduler, rollout) == ["rollout/0"]


def test_add_without_supervision_waits_for_update(scheduler: Scheduler) -> None:
    with _rollout(scheduler, replicas=1, supervision=None) as rollout:
        assert rollout.add() == ["rollout/1"]
        assert state_of(rollout, "rollout/1") is Health.HEALTHY, "no instance has other weights"
        assert rollout.update_weights({"weight": [1.0]}, 1) == 1
        assert rollout.add() == ["rollout/2"]
        assert state_of(rollout, "rollout/2") is Health.STALE
        assert rollout.update_weights({"weight": [1.0]}, 2) == 2
        assert {each.state for each in rollout.stats().instances.values()} == {Health.HEALTHY}
        rollout.remove(["rollout/0"])
        assert rollout.versions() == {"rollout/1": 2, "rollout/2": 2}
        assert rollout.add() == ["rollout/3"]
        rollout.remove(["rollout/1", "rollout/2"])
        with pytest.raises(
            HelmsmanError,
            match="rollout/3 is stale: it does not have the weights of the last update",
        ):
            rollout.generate([[1]])
        assert rollout.update_weights({"weight": [1.0]}, 3) == 3
        assert len(rollout.generate([[1]])) == 1


@pytest.mark.parametrize("supervision", [POLICY, None])
def test_update_weights_beside_removal(
    scheduler: Scheduler, supervision: SupervisionPolicy | None
) -> None:
    with _rollout(scheduler, replicas=2, supervision=supervision) as rollout:
        update = begin(rollout.async_update_weights({"weight": "held"}, 1))
        wait_until(
            lambda: (
                {scheduler.call_engine(worker.id, "figures")[0] for worker in rollout.workers}
                == {1}
            ),
            "both have received the update",
        )
        rollout.remove(["rollout/1"])
        assert not update.done()
        scheduler.call_engine("rollout/0", "finish")
        assert update.result(30) == 1
        assert rollout.versions() == {"rollout/0": 1}


def test_rollout_in_workers_of_another_role(scheduler: Scheduler) -> None:
    actor = TrainController(
        scheduler, "tests.controller.engines.RecordingTrainer", Job(role="actor", replicas=2)
    )
    strategy = SchedulingStrategy(type="colocation", target="actor")
    rollout = RolloutController(
        scheduler,
        "tests.controller.engines.CountingRollout",
        Job(role="rollout", replicas=2, scheduling_strategy=strategy),
    )
    actor.initialize()
    rollout.initialize()
    assert len({status.pid for status in scheduler.status()}) == 2
    assert [result.token_ids for result in rollout.generate([[1], [2], [3]])] == [[2], [3], [4]]
    assert actor.update_rollout(rollout) == 0
    with pytest.raises(WorkerFailedError):
        scheduler.call_engine("rollout/1", "die")
    with pytest.raises(GroupCallError, match="SIGKILL"):
        rollout.versions()
    states = [load.state for load in rollout.stats().instances.values()]
    assert states == [Health.HEALTHY, Health.DEAD]
    assert len(rollout.generate([[1], [2]])) == 2
    actor.close()  # ends the engines in its workers, too
    rollout.close()
    assert scheduler.status() == []
