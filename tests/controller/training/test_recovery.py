"""Tests of RecoverableTraining: ranks are lost at many moments of a training job.

Ranks train a model where a test depends on collectives or on real checkpoints.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import re
import signal
from pathlib import Path

import pytest

from helmsman.api.errors import (
    CallTimeoutError,
    CheckpointError,
    EngineCallError,
    GroupCallError,
    InvalidSpecError,
    RecoveryExhaustedError,
    WorkerFailedError,
)
from helmsman.api.scheduler import Job, SchedulingStrategy
from helmsman.controller._rollout.health import Health, SupervisionPolicy
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._scheduler.local import LocalScheduler
from helmsman.controller._training.recovery import RecoverableTraining
from helmsman.controller._training.train_controller import TrainController
from tests.contract.engines import release_interpreter
from tests.contract.helpers import wait_until
from tests.controller.recovery_engines import HELD, HOLD
from tests.controller.recovery_world import (
    ENGINES,
    LAST_STEP,
    LOSS,
    Losses,
    Start,
    Training,
    check_background_saves,
)
from tests.engines.small_models import random_tokens

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def training(start: Start) -> Training:
    return start()


def test_recovery_of_a_rank_killed_in_a_step(start: Start, unbroken: Losses) -> None:
    training = start(has_model=True)
    before = training.pids()
    training.before[4] = training.fault("loss", rank=1)
    training.run()
    assert training.begun == [1, 3]
    assert training.done == [1, 2, 3, 3, 4, 5, 6]
    assert training.losses == unbroken[True], "repeated steps compute the same"
    assert not set(before) & set(training.pids()), "all ranks are rebuilt"
    assert training.versions == [0, 1, 2, 3, 4, 5, 6, 7, 8], (
        "no version belongs to two states of the weights"
    )


def test_recovery_of_silent_ranks(
    start: Start,
    scheduler: LocalScheduler,
    unbroken: Losses,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A rank whose interpreter is held by C code for as long is not ended."""
    training = start(has_model=True, dead_s=1.5)
    held, pids = training.faults / HELD, training.pids()

    def release_late() -> None:
        wait_until(held.exists, "the rank holds its interpreter")
        wait_until(
            lambda: (asyncio.run(scheduler.check_health("train/0")).stuck_s or 0.0) > 3.0,
            "the interpreter is held for twice dead_s",
        )
        release_interpreter(str(held))

    def stop_both() -> None:
        assert training.pids() == pids
        for rank in range(2):
            training.fault("loss", rank, "stop")()

    training.before = {2: training.fault("loss", 0, HOLD), 3: stop_both}
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        caplog.at_level(logging.WARNING, "helmsman"),
    ):
        releasing = pool.submit(release_late)
        training.run()
        releasing.result()
    assert training.begun == [1, 3]
    assert training.trainer.num_recoveries == 1
    assert training.losses == unbroken[True]
    assert not Path(f"/proc/{pids[0]}").exists()
    assert re.search(
        r"train/[01] was lost \(was ended because it has not answered for 1\.5 s "
        r"\(RecoveryPolicy\.dead_s\)\)",
        caplog.text,
    )


def test_recovery_of_ranks_killed_during_recovery(start: Start, unbroken: Losses) -> None:
    training = start(has_model=True)

    def plan() -> None:
        for moment, rank in (("loss", 1), ("initialize", 0), ("load", 1)):
            training.fault(moment, rank)()

    training.before[5] = plan
    training.run()
    assert training.begun == [1, 5]
    assert training.done == [1, 2, 3, 4, 5, 6]
    assert training.losses == unbroken[True]
    assert training.trainer.num_recoveries == 3


def test_recovery_of_ranks_killed_while_they_save(start: Start, unbroken: Losses) -> None:
    training = start(has_model=True)
    training.before = {4: training.fault("save", 1), 6: training.fault("saved", 0)}
    training.run()
    assert training.begun == [1, 3, 5], "incomplete checkpoints do not count"
    assert training.losses == unbroken[True]
    assert sorted(path.name for path in (training.folder / "checkpoints").iterdir()) == [
        *("latest", "step-000002", "step-000004", "step-000006")
    ]


def test_recovery_with_background_saves(start: Start, unbroken: Losses) -> None:
    check_background_saves(start, unbroken, "begun", rank=0)


def test_recovery_of_ranks_killed_between_steps(training: Training) -> None:
    """The first rank dies before the first checkpoint."""
    training.before[0] = lambda: os.kill(training.pids()[0], signal.SIGKILL)
    training.before[3] = lambda: os.kill(training.pids()[1], signal.SIGKILL)
    training.run(first_step=0)
    assert training.begun == [0, 0, 3]
    assert training.done == [0, 1, 2, 3, 4, 5, 6]


def test_recovery_until_the_budget_is_spent(start: Start, tmp_path: Path) -> None:
    """A recovery that fails is repeated within the budget."""
    training = start(max_recoveries=3)

    def fail_to_recover() -> None:
        training.fault("loss", 1)()
        for rank in range(2):
            training.fault("initialize", rank, "raise")()

    training.before = {3: fail_to_recover, 5: fail_to_recover}
    with pytest.raises(
        RecoveryExhaustedError,
        match=r"(?s)RecoveryPolicy\.max_recoveries.*The last of them failed: GroupCallError.*the "
        "device is busy",
    ) as caught:
        training.run()
    error = caught.value
    assert (error.role, error.rank, error.num_recoveries, error.window_s) == ("train", 1, 3, 3600.0)
    assert error.loss.exit_signal == signal.SIGKILL
    assert Path(error.log_path).name == "train-1.log"
    assert error.checkpoint == str((tmp_path / "checkpoints" / "step-000004").resolve())
    assert (training.begun, training.done) == ([1, 3], [1, 2, 3, 4])


def test_recovery_without_checkpoints(start: Start, tmp_path: Path) -> None:
    """A run whose checkpoints are missing does not restart at its first step."""
    training = start(max_recoveries=2)
    checkpoints, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"

    def lose_both() -> None:
        os.kill(training.pids()[0], signal.SIGKILL)
        checkpoints.rename(elsewhere)

    training.before[4] = lose_both
    with pytest.raises(
        RecoveryExhaustedError,
        match="failed: FileNotFoundError: .*checkpoints has no checkpoint any more",
    ):
        training.run()
    assert training.begun == [1]
    elsewhere.rename(checkpoints)
    training.run()
    assert training.begun == [1, 3]
    assert training.done == [1, 2, 3, 3, 4, 5, 6]


def test_recovery_of_a_second_job(
    start: Start, scheduler: LocalScheduler, unbroken: Losses, tmp_path: Path
) -> None:
    """A silent critic is rebuilt with the trainer, and both resume at the same step."""
    training = start(dead_s=2.0)
    critic = TrainController(
        scheduler, f"{ENGINES}.FaultyTrainer", Job(role="critic"), (str(tmp_path),)
    )
    losses: dict[int, list[float]] = {}

    def step(number: int) -> None:
        stats = critic.train_batch([{"input_ids": random_tokens(5, seed=number)}], LOSS)
        losses.setdefault(number, []).append(stats["loss"])
        training.step(number)

    def restore(number: int) -> None:
        training.on_begin(number)
        if number > 1:
            critic.load(str(training.folder / "checkpoints" / "latest" / "critic"))

    with critic:
        pid = scheduler.call_engine(critic.workers[0].id, "pid")
        training.before[4] = lambda: os.kill(pid, signal.SIGSTOP)
        training.run(
            step=step,
            on_begin=restore,
            add_files=lambda folder: critic.save(str(folder / "critic")),
            others=[critic],
        )
    assert training.begun == [1, 3], "the critic could not be saved after step 4"
    assert training.losses == unbroken[False]
    assert [len(each) for each in losses.values()] == [1, 1, 2, 2, 1, 1]
    assert all(len(set(each)) == 1 for each in losses.values()), "repeated steps compute the same"


class ScriptError(Exception):
    """An error of the script."""


def raise_own() -> None:
    raise ScriptError


def test_recovery_raises_errors_without_a_loss(
    training: Training, scheduler: LocalScheduler
) -> None:
    """A role that a failed recovery has deleted is created again."""
    pids = training.pids()

    def fail_on_ranks() -> None:
        training.trainer.load("/nowhere")

    training.before[1] = raise_own
    with pytest.raises(ScriptError):
        training.run()
    training.before[1] = fail_on_ranks
    with pytest.raises(CheckpointError) as caught:
        training.run()
    assert isinstance(caught.value.__cause__, GroupCallError)
    assert isinstance(caught.value.__cause__.first, EngineCallError)
    assert training.pids() == pids
    assert training.trainer.num_recoveries == 0
    training.run(last_step=2)
    assert training.done == [1, 2]
    scheduler.delete_workers("train")
    assert training.trainer.recover() == training.versions[-1] + 1
    training.run(last_step=3)
    assert training.done == [1, 2, 3]


def test_recovery_versions_only_grow(training: Training, unbroken: Losses) -> None:
    """Any error counts as a loss when a rank has died; without one, the script may run again."""

    def fail() -> None:
        os.kill(training.pids()[1], signal.SIGKILL)
        raise ScriptError

    training.before = {3: fail, 4: raise_own}
    with pytest.raises(ScriptError):
        training.run()
    assert training.begun == [1, 3]
    training.run()
    assert training.begun == [1, 3, 3]
    assert training.losses == unbroken[False]
    assert training.versions == list(range(10))


def test_steps_as_a_loop(start: Start, unbroken: Losses) -> None:
    """A lost rank repeats blocks; an interrupt leaves the loop, and no rank is watched after it."""
    training = start(dead_s=0.5)
    training.before[4] = training.fault("loss", 0)
    recoverable = RecoverableTraining(training.trainer, training.policy, on_begin=training.on_begin)
    for attempt in recoverable.steps(1, LAST_STEP):
        with attempt as number:
            training.step(number)
    assert (training.begun, training.done) == ([1, 3], [1, 2, 3, 3, 4, 5, 6])
    assert training.losses == unbroken[False]

    scheduler, pids = training.trainer.scheduler, training.pids()
    steps = recoverable.steps(7, 9)
    with pytest.raises(KeyboardInterrupt), next(steps):
        raise KeyboardInterrupt
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(CallTimeoutError):
        scheduler.call_engine("train/1", "pid", rpc_timeout=1.5)
    os.kill(pids[1], signal.SIGCONT)
    assert training.pids() == pids


def test_run_of_a_restarted_script(
    scheduler: LocalScheduler, tmp_path: Path, unbroken: Losses
) -> None:
    first = Training(scheduler, tmp_path, has_model=True)
    with first.trainer:
        first.run(last_step=3)
    second = Training(scheduler, tmp_path, has_model=True)
    with second.trainer:
        second.run()
        second.run()
        assert second.begun == [4, 7], "no step is left"
        with pytest.raises(
            ValueError, match="is of step 6, and first_step is 9; expected at most 7"
        ):
            second.run(first_step=9, last_step=12)
        (tmp_path / "checkpoints" / "step-000006" / "helmsman.json").unlink()
        with pytest.raises(
            CheckpointError,
            match=r"step-000006: '\S*' is not a checkpoint of this engine: it has no "
            r"helmsman.json. Remove it",
        ):
            second.run()
    assert second.losses == {step: loss for step, loss in unbroken[True].items() if step > 3}


# --- other roles ----------------------------------------------------------------------------------


def test_recovery_leaves_requests_running(training: Training, scheduler: LocalScheduler) -> None:
    rollout = RolloutController(
        scheduler,
        f"{ENGINES}.AnyWeightsRollout",
        Job(role="rollout", replicas=2),
        supervision=SupervisionPolicy(),
    )
    weights: list[int] = []
    with rollout:
        pids = {status.worker_id: status.pid for status in scheduler.status()}
        held = [rollout.submit([number]) for number in (1, 2)]
        wait_until(
            lambda: sum(each.num_in_flight for each in rollout.stats().instances.values()) == 2,
            "both requests are in flight",
        )

        def on_begin(step: int) -> None:
            training.on_begin(step)
            weights.append(training.trainer.update_rollout(rollout))

        def step(number: int) -> None:
            training.step(number)
            weights.append(training.trainer.update_rollout(rollout))

        training.before[3] = training.fault("loss", 0)
        training.run(last_step=4, step=step, on_begin=on_begin)
        assert weights == [0, 1, 2, 3, 4, 5]
        assert set(rollout.versions().values()) == {5}
        assert not any(future.done() for future in held)
        for worker in rollout.workers:
            scheduler.call_engine(worker.id, "finish")
        assert [future.result(60).token_ids for future in held] == [[2], [3]]
        after = {status.worker_id: status.pid for status in scheduler.status()}
        assert all(after[worker.id] == pids[worker.id] for worker in rollout.workers)


def test_rebuilt_instance_waits_for_recovery_of_the_trainer(scheduler: LocalScheduler) -> None:
    """The weights that are served are lost with the trainer, which holds them."""
    policy = SupervisionPolicy(probe_every_s=0.05, suspect_s=5.0, dead_s=30.0, restart_pause_s=0.01)
    engines = "tests.controller.engines"
    trainer = TrainController(
        scheduler, f"{engines}.RecordingTrainer", Job(role="train", replicas=2)
    )
    rollout = RolloutController(
        scheduler,
        f"{engines}.CountingRollout",
        Job(role="rollout", replicas=2),
        supervision=policy,
    )
    with trainer, rollout:
        assert trainer.update_rollout(rollout) == 0
        pids = {status.worker_id: status.pid for status in scheduler.status()}
        for worker_id in ("train/0", "rollout/0"):
            os.kill(pids[worker_id] or 0, signal.SIGKILL)
        wait_until(
            lambda: rollout.stats().instances["rollout/0"].state is Health.STALE,
            "the instance is rebuilt",
            limit_s=60.0,
        )
        assert rollout.generate([[4]])[0].token_ids == [5], "the other instance serves"
        with pytest.raises((GroupCallError, WorkerFailedError)):
            trainer.update_rollout(rollout)
        assert trainer.recover() == 1
        assert trainer.update_rollout(rollout) == 1
        assert rollout.versions() == {"rollout/0": 1, "rollout/1": 1}
        assert {each.state for each in rollout.stats().instances.values()} == {Health.HEALTHY}


def test_recovery_leaves_siblings_running(training: Training, scheduler: LocalScheduler) -> None:
    beside = SchedulingStrategy(type="colocation", target="train", fork=True)
    scheduler.create_workers(Job(role="reference", replicas=2, scheduling_strategy=beside))
    before = {status.worker_id: status.pid for status in scheduler.status()}
    training.before[1] = training.fault("loss", 0)
    training.run(last_step=2)
    after = {status.worker_id: status.pid for status in scheduler.status()}
    assert training.done == [1, 2]
    siblings = ("reference/0", "reference/1")
    assert [after[each] for each in siblings] == [before[each] for each in siblings]
    with pytest.raises(
        InvalidSpecError,
        match="a role whose workers no other role uses; reference would end with them",
    ):
        scheduler.restart_workers("train", elsewhere=True)


def test_recovery_names_roles_in_the_same_workers(
    training: Training, scheduler: LocalScheduler
) -> None:
    inside = SchedulingStrategy(type="colocation", target="train")
    scheduler.create_workers(Job(role="guest", replicas=2, scheduling_strategy=inside))
    training.before[1] = training.fault("loss", 0)
    with pytest.raises(InvalidSpecError, match="guest would end with them") as caught:
        training.run()
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerFailedError)
    assert cause.worker_id == "train/0"
