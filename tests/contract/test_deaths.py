"""The death of a worker fails its calls at once, with the cause; other workers are not affected."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helmsman._base.event_loop import run_on_loop
from helmsman.api import errors
from helmsman.api.scheduler import Job, Scheduler, SchedulingSpec, Timeouts, WorkerState
from helmsman.controller._rollout.health import SupervisionPolicy
from helmsman.controller._rollout.retries import RetryGeneration
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._training.recovery import RecoverableTraining, RecoveryPolicy
from helmsman.controller._training.train_controller import TrainController
from tests.contract.engines import Counter, wait_for_file  # type: ignore[attr-defined]
from tests.contract.helpers import Engine, Gate, is_running, stop, wait_gone, wait_until
from tests.contract.marks import needs_processes, only_local, ray_smoke
from tests.controller.engines import CountingRollout, RecordingTrainer

pytestmark = needs_processes
NOTICE_LIMIT_S = 2.0
"""Limit for reporting a worker's death to callers."""


@pytest.mark.parametrize(
    ("how", "exit_signal", "exit_code", "cause"),
    [
        pytest.param(
            "SIGKILL",
            signal.SIGKILL,
            None,
            "was ended by SIGKILL (sender unknown)",
            marks=ray_smoke,
        ),
        ("SIGSEGV", signal.SIGSEGV, None, "was ended by SIGSEGV"),
        ("exit 3", None, 3, "exited with code 3"),
    ],
)
def test_worker_death_during_call(
    scheduler: Scheduler,
    role: str,
    how: str,
    exit_signal: int | None,
    exit_code: int | None,
    cause: str,
) -> None:
    first, second = scheduler.create_workers(Job(role=role, replicas=2))
    doomed = Engine.create(scheduler, second, Counter)
    healthy = Engine.create(scheduler, first, Counter)
    doomed.call("print_lines", 80)
    pid = doomed.call("pid")

    future = doomed.begin("die", how)
    with pytest.raises(errors.WorkerFailedError) as caught:
        future.result(timeout=NOTICE_LIMIT_S)
    error = caught.value
    assert (error.worker_id, error.role, error.index, error.pid) == (second, role, 1, pid)
    assert error.node
    assert (error.exit_signal, error.exit_code) == (exit_signal, exit_code)
    assert error.running == f"{second}.die"
    assert error.method == "die"
    lines = error.log_tail.split("\n")
    assert len(lines) == 50
    if how == "SIGSEGV":  # The stack of faulthandler is at the end of the log.
        assert "Fatal Python error: Segmentation fault" in error.log_tail
        assert "in die" in error.log_tail
    else:
        assert lines == [f"line {index}" for index in range(30, 80)]
    facts = (second, error.node, str(pid), cause, f"while {second}.die ran", "was not sent again")
    for fact in (*facts, lines[-1]):
        assert fact in str(error)

    for _ in range(3):
        with pytest.raises(errors.WorkerFailedError) as later:
            doomed.begin("add").result(timeout=NOTICE_LIMIT_S)
        assert (later.value.exit_signal, later.value.exit_code, later.value.cause) == (
            exit_signal,
            exit_code,
            error.cause,
        )
        assert later.value.running == f"{second}.die", "the cause stays known"
    with pytest.raises(errors.WorkerFailedError):
        Engine.create(scheduler, second, Counter, "another")
    with pytest.raises(errors.WorkerFailedError):
        scheduler.get_workers(role, timeout=NOTICE_LIMIT_S)
    assert healthy.call("add") == 1
    states = {status.worker_id: status for status in scheduler.status()}
    assert states[second].state is WorkerState.FAILED
    assert states[second].health is None
    assert states[first].state is WorkerState.READY
    assert "died" in scheduler.stacks(role)[second] or cause in scheduler.stacks(role)[second]

    scheduler.delete_workers(role)
    with pytest.raises(errors.WorkerNotFoundError):
        doomed.call("add")
    assert scheduler.create_workers(Job(role=role, replicas=2)) == [first, second]
    assert Engine.create(scheduler, second, Counter).call("add") == 1


class WaitingTrainer(RecordingTrainer):
    """A training engine with a call that waits."""

    def wait(self, started: str, release: str) -> None:
        """Create the file ``started``, then wait for ``release``."""
        Path(started).touch()
        wait_for_file(release)


def test_worker_death_next_step(scheduler: Scheduler, role: str) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    with pytest.raises(errors.WorkerFailedError) as caught:
        Engine.create(scheduler, worker, Counter).call("die", "exit 3")
    advice = (
        f"restart_worker('{worker}') starts it again, without its engines. "
        f"delete_workers('{role}') frees"
    )
    assert advice in str(caught.value)
    scheduler.restart_worker(worker)
    assert Engine.create(scheduler, worker, Counter).call("add") == 1


@only_local
@pytest.mark.parametrize(
    "kind", ["trainer", "recovered trainer", "rollout", "supervised rollout", "retrying rollout"]
)
def test_worker_death_controller_next_step(
    scheduler: Scheduler, role: str, kind: str, gate: Gate
) -> None:
    job = Job(role=role, tasks=[SchedulingSpec(cpu=0)])
    controller: TrainController | RolloutController
    if kind.endswith("trainer"):
        controller = TrainController(scheduler, WaitingTrainer, job)
    else:
        retries = RetryGeneration() if kind == "retrying rollout" else None
        supervision = SupervisionPolicy() if kind == "supervised rollout" else None
        controller = RolloutController(
            scheduler, CountingRollout, job, retries=retries, supervision=supervision
        )
    expected = {
        "trainer": [
            "RecoverableTraining starts all ranks again and continues from the last checkpoint"
        ],
        "recovered trainer": ["RecoverableTraining continues from the last checkpoint."],
        "rollout": ["With supervision=SupervisionPolicy()", "with retries=RetryGeneration()"],
        "supervised rollout": [
            "Its RolloutController starts it again",
            "with retries=RetryGeneration()",
        ],
        "retrying rollout": ["With supervision=SupervisionPolicy()", "its retries decide"],
    }[kind]
    with controller:
        controller.initialize()
        if kind == "recovered trainer":
            assert isinstance(controller, TrainController)
            policy = RecoveryPolicy(checkpoints=os.path.dirname(gate.started), save_every=1)
            RecoverableTraining(controller, policy, lambda _: None).run(0, -1)
        engine = Engine(scheduler, f"{role}/0", f"{role}/0")
        pid = asyncio.run(scheduler.check_health(engine.worker_id)).pid
        future = engine.begin("wait", *gate.files)
        gate.wait_started()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(errors.WorkerFailedError) as caught:
            future.result(timeout=NOTICE_LIMIT_S)
        for part in [*expected, f"delete_workers('{role}') frees the role's resources"]:
            assert part in str(caught.value)
        assert "restart_worker" not in str(caught.value)
    (worker,) = scheduler.create_workers(Job(role=role))
    with pytest.raises(
        errors.WorkerFailedError, match=f"restart_worker\\('{worker}'\\) starts it again"
    ):
        Engine.create(scheduler, worker, Counter).call("die", "exit 3")


@pytest.mark.parametrize(
    "operation", ["delete_workers", pytest.param("restart_worker", marks=ray_smoke)]
)
def test_worker_ended_by_scheduler_cause(
    scheduler: Scheduler, role: str, gate: Gate, operation: str
) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    engine = Engine.create(scheduler, worker, Counter)
    running = engine.begin("wait", *gate.files)
    gate.wait_started()
    if operation == "delete_workers":
        scheduler.delete_workers(role)
    else:
        scheduler.restart_worker(worker)
    with pytest.raises(errors.WorkerFailedError) as caught:
        running.result(timeout=NOTICE_LIMIT_S)
    assert caught.value.cause == f"was ended by {operation}"
    assert "SIGKILL" not in str(caught.value)


def test_worker_death_in_constructor(scheduler: Scheduler, role: str) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    with pytest.raises(errors.WorkerFailedError) as caught:
        Engine.create(scheduler, worker, "os._exit", None, 3)
    assert caught.value.exit_code == 3
    assert caught.value.running == f"{worker}.create_engine"


@ray_smoke
def test_worker_death_while_idle(scheduler: Scheduler, role: str) -> None:
    (worker,) = scheduler.create_workers(Job(role=role))
    engine = Engine.create(scheduler, worker, Counter)
    pid = engine.call("pid")
    os.kill(pid, signal.SIGKILL)
    wait_gone({"worker": pid})
    wait_until(
        lambda: {s.worker_id: s for s in scheduler.status()}[worker].health is None,
        "the death is detected",
    )
    with pytest.raises(errors.WorkerFailedError) as caught:
        engine.begin("add").result(timeout=NOTICE_LIMIT_S)
    assert caught.value.exit_signal == signal.SIGKILL
    assert caught.value.running in (None, f"{worker}.add")
    assert {s.worker_id: s for s in scheduler.status()}[worker].state is WorkerState.FAILED


def test_worker_stopped_is_not_dead(own: Engine) -> None:
    pid = own.call("pid")
    stop(pid)
    with pytest.raises(errors.CallTimeoutError) as caught:
        own.scheduler.get_workers(own.worker_id.rpartition("/")[0], timeout=0.3)
    assert not caught.value.worker_alive
    os.kill(pid, signal.SIGCONT)
    assert own.call("add") == 1


@only_local
def test_close_with_dead_and_stopped_workers(make_own: Callable[..., Scheduler]) -> None:
    scheduler = make_own(timeouts=Timeouts(shutdown_s=2.0))
    dead, stopped, well = scheduler.create_workers(Job(role="a", replicas=3))
    pids = {
        worker: Engine.create(scheduler, worker, Counter).call("pid")
        for worker in (dead, stopped, well)
    }
    os.kill(pids[dead], signal.SIGKILL)
    stop(pids[stopped])
    scheduler.close()
    scheduler.close()
    assert not any(is_running(pid) for pid in pids.values())


def test_worker_death_after_reply(scheduler: Scheduler, role: str, tmp_path: Path) -> None:
    """A result in shared memory is gone with its worker before the script has read the reply."""
    (worker,) = scheduler.create_workers(Job(role=role))
    engine = Engine.create(scheduler, worker, Counter)
    pid, replied = engine.call("pid"), tmp_path / "replied"

    def outlive() -> None:
        wait_until(replied.exists, "the engine has begun its next call")
        os.kill(pid, signal.SIGKILL)
        wait_gone({worker: pid})

    run_on_loop(outlive)  # nothing is read meanwhile
    with ThreadPoolExecutor() as threads:
        made = threads.submit(engine.call, "make", 1_000_000)
        threads.submit(engine.call, "apply", Path.touch, replied)
        with pytest.raises(errors.WorkerFailedError, match="was ended by SIGKILL"):
            made.result()
