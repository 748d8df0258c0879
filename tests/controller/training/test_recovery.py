"""A training job on real processes loses ranks at every kind of moment, and goes on as if it had
not.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman.api.errors import (
    CheckpointError,
    EngineCallError,
    GroupCallError,
    InvalidSpecError,
    RecoveryExhaustedError,
    WorkerFailedError,
)
from helmsman.api.scheduler import Job, Scheduler, SchedulingStrategy
from helmsman.controller._generation.health import Health, SupervisionPolicy
from helmsman.controller._rollout.rollout_controller import RolloutController
from helmsman.controller._schedulers.local import LocalScheduler
from helmsman.controller._training.recovery import RecoverableTraining, RecoveryPolicy
from helmsman.controller._training.train_controller import TrainController
from helmsman.controller._weight_sync.sync import WeightSync
from helmsman.controller._weight_sync.via_collective import ViaCollective
from tests.contract.engines import release_interpreter
from tests.contract.helpers import wait_until
from tests.controller.recovery_engines import HELD, HOLD, plan_fault
from tests.engines.small_models import QWEN2, random_tokens

ENGINE = "tests.controller.recovery_engines.FaultyTrainEngine"
LOSS = "tests.controller.recovery_engines.sft_with_faults"
LAST_STEP = 6

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def scheduler(engines_scheduler: LocalScheduler) -> Iterator[LocalScheduler]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELMSMAN_PLATFORM", "cpu")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield engines_scheduler


class Training:
    """A job of two ranks that fits a few tokens, and what becomes of it."""

    def __init__(
        self, scheduler: Scheduler, folder: Path, job: Job | None = None, **policy: Any
    ) -> None:
        self.folder = folder
        self.faults = folder / "faults"
        self.faults.mkdir(exist_ok=True)
        self.policy = RecoveryPolicy(
            **{
                "checkpoints": folder / "checkpoints",
                "save_every": 2,
                "pause_s": 0.01,
                "probe_every_s": 0.1,
                **policy,
            }
        )
        self.trainer = TrainController(
            scheduler,
            ENGINE,
            job or Job(role="train", replicas=2),
            (str(self.faults),),
            {"model": QWEN2, "lr": 1e-2, "rendezvous_timeout_s": 60},
        )
        self.begun: list[int] = []
        self.done: list[int] = []
        self.losses: dict[int, float] = {}
        self.versions: list[int] = []
        self.before: dict[int, Callable[[], None]] = {}
        """What the test does before a step, the first time that it comes."""

    def step(self, number: int) -> None:
        self.before.pop(number, lambda: None)()
        samples = [
            {"input_ids": random_tokens(4 + each, seed=100 * number + each)} for each in range(6)
        ]
        self.losses[number] = self.trainer.train_batch(samples, LOSS, {"faults": str(self.faults)})[
            "loss"
        ]
        self.versions.append(self.trainer.get_version())
        self.done.append(number)

    def on_begin(self, step: int) -> None:
        self.begun.append(step)
        self.versions.append(self.trainer.get_version())

    def run(self, first_step: int = 1, last_step: int = LAST_STEP) -> None:
        RecoverableTraining(self.trainer, self.policy, self.step, on_begin=self.on_begin).run(
            first_step, last_step
        )

    def fault(self, moment: str, rank: int, kind: str = "kill") -> Callable[[], None]:
        return lambda: plan_fault(self.faults, moment, rank, kind)

    def pids(self) -> list[int]:
        return [
            self.trainer.scheduler.call_engine(worker.id, "pid") for worker in self.trainer.workers
        ]


Start = Callable[..., Training]


@pytest.fixture
def start(scheduler: LocalScheduler, tmp_path: Path) -> Iterator[Start]:
    """Start a training; takes fields of its RecoveryPolicy."""
    with contextlib.ExitStack() as stack:

        def make(**policy: Any) -> Training:
            made = Training(scheduler, tmp_path, **policy)
            stack.enter_context(made.trainer).initialize()
            return made

        yield make


@pytest.fixture
def training(start: Start) -> Training:
    return start()


@pytest.fixture(scope="module")
def unbroken(
    scheduler: LocalScheduler, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, float]:
    """The loss of each step of a run without faults."""
    made = Training(
        scheduler, tmp_path_factory.mktemp("unbroken"), Job(role="unbroken", replicas=2)
    )
    with made.trainer:
        made.trainer.initialize()
        made.run()
    assert made.done == [1, 2, 3, 4, 5, 6]
    assert made.versions == [0, 1, 2, 3, 4, 5, 6]
    return made.losses


def test_recovery_of_a_rank_killed_in_a_step(
    training: Training, unbroken: dict[int, float]
) -> None:
    before = training.pids()
    training.before[4] = training.fault("loss", rank=1)
    training.run()
    assert training.begun == [1, 3]
    assert training.done == [1, 2, 3, 3, 4, 5, 6]
    assert training.losses == unbroken, "each step does what it does in a run without a loss"
    assert not set(before) & set(training.pids()), "all ranks were rebuilt"
    assert training.versions == [0, 1, 2, 3, 4, 5, 6, 7, 8], (
        "no version is told of two states of the weights"
    )


def test_recovery_of_silent_ranks(
    start: Start,
    scheduler: LocalScheduler,
    unbroken: dict[int, float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One, and then both at once; a rank whose interpreter is held by C code for as long is not
    ended.
    """
    training = start(dead_s=1.5)
    held, pids = training.faults / HELD, training.pids()

    def end_it_late() -> None:
        wait_until(held.exists, "the rank holds its interpreter")
        wait_until(
            lambda: (asyncio.run(scheduler.check_health("train/0")).stuck_s or 0.0) > 4.0,
            "for longer than dead_s",
        )
        release_interpreter(str(held))

    def stop_one() -> None:
        assert training.pids() == pids
        training.fault("loss", 0, "stop")()

    def stop_both() -> None:
        for rank in range(2):
            training.fault("loss", rank, "stop")()

    training.before = {2: training.fault("loss", 0, HOLD), 3: stop_one, 5: stop_both}
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        caplog.at_level(logging.WARNING, "helmsman"),
    ):
        ending = pool.submit(end_it_late)
        training.run()
        ending.result()
    assert training.begun == [1, 3, 5]
    assert training.trainer.num_recoveries == 2
    assert training.losses == unbroken
    assert not Path(f"/proc/{pids[0]}").exists()
    assert (
        "train/0 was lost (was ended because it has not answered for 1.5 s (RecoveryPolicy.dead_s))"
        in caplog.text
    )


def test_recovery_of_a_rank_killed_during_recovery(
    training: Training, unbroken: dict[int, float]
) -> None:
    def plan() -> None:
        for moment, rank in (("loss", 1), ("initialize", 0), ("load", 1)):
            training.fault(moment, rank)()

    training.before[5] = plan
    training.run()
    assert training.begun == [1, 5]
    assert training.done == [1, 2, 3, 4, 5, 6]
    assert training.losses == unbroken
    assert training.trainer.num_recoveries == 3


def fail_to_recover(training: Training) -> None:
    """Plan a loss, and an error of the recovery, as where a device is not free yet or a rendezvous
    has failed.
    """
    training.fault("loss", 1)()
    for rank in range(2):
        training.fault("initialize", rank, "raise")()


def test_recovery_that_always_fails(start: Start) -> None:
    training = start(max_recoveries=1)
    training.before[3] = lambda: fail_to_recover(training)
    with pytest.raises(
        RecoveryExhaustedError,
        match="(?s)The last of them failed: GroupCallError.*the device is busy",
    ) as caught:
        training.run()
    assert caught.value.loss.exit_signal == signal.SIGKILL


def test_recovery_until_the_budget_is_spent(start: Start, tmp_path: Path) -> None:
    """A recovery that fails is tried again."""
    training = start(max_recoveries=2)
    training.before = {3: lambda: fail_to_recover(training), 5: training.fault("loss", 1)}
    with pytest.raises(RecoveryExhaustedError, match="RecoveryPolicy.max_recoveries") as caught:
        training.run()
    error = caught.value
    assert (error.role, error.rank, error.num_recoveries, error.window_s) == ("train", 1, 2, 3600.0)
    assert error.loss.exit_signal == signal.SIGKILL
    assert Path(error.log_path).name == "train-1.log"
    assert error.checkpoint == str((tmp_path / "checkpoints" / "step-000004").resolve())
    assert isinstance(error.__cause__, GroupCallError)
    assert (training.begun, training.done) == ([1, 3], [1, 2, 3, 4])


def test_recovery_without_checkpoints(start: Start, tmp_path: Path) -> None:
    """Where they are gone, the run does not begin at its first step."""
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


def test_recovery_of_a_rank_killed_while_it_saves(
    training: Training, unbroken: dict[int, float]
) -> None:
    training.before = {4: training.fault("save", 1), 6: training.fault("saved", 0)}
    training.run()
    assert training.begun == [1, 3, 5], "what was not saved to its end does not count"
    assert training.losses == unbroken
    assert sorted(path.name for path in (training.folder / "checkpoints").iterdir()) == [
        *("latest", "step-000002", "step-000004", "step-000006")
    ]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_recovery_of_a_second_job(
    start: Start, scheduler: LocalScheduler, unbroken: dict[int, float], fault: int, tmp_path: Path
) -> None:
    """A critic that dies or falls silent is rebuilt with the trainer, and both go on from the same
    step.
    """
    training = start(dead_s=2.0)
    critic = TrainController(
        scheduler, ENGINE, Job(role="critic"), (str(tmp_path),), {"model": QWEN2, "lr": 1e-2}
    )
    losses: dict[int, list[float]] = {}

    def step(number: int) -> None:
        sample = {"input_ids": random_tokens(5, seed=number)}
        stats = critic.train_batch([sample], LOSS, {"faults": str(tmp_path)})
        losses.setdefault(number, []).append(stats["loss"])
        training.step(number)

    def restore(number: int) -> None:
        training.on_begin(number)
        if number > 1:
            critic.load(str(training.folder / "checkpoints" / "latest" / "critic"))

    with critic:
        training.before = {
            4: lambda: os.kill(scheduler.call_engine(critic.workers[0].id, "pid"), fault)
        }
        RecoverableTraining(
            training.trainer,
            training.policy,
            step,
            on_begin=restore,
            add_files=lambda folder: critic.save(str(folder / "critic")),
            others=[critic],
        ).run(1, LAST_STEP)
    assert training.begun == [1, 3], "it could not be saved after step 4"
    assert training.losses == unbroken
    assert [len(each) for each in losses.values()] == [1, 1, 2, 2, 1, 1]
    assert all(len(set(each)) == 1 for each in losses.values()), "repeated steps do the same"


@pytest.mark.parametrize(("moment", "rank"), [("save", 1), ("begun", 0), ("loss", 0)])
def test_recovery_with_background_saves(
    start: Start, unbroken: dict[int, float], moment: str, rank: int
) -> None:
    """A checkpoint counts when it is complete."""
    training = start(save_in_background=True)

    def add(folder: Path) -> None:
        (folder / "of-the-script").write_text(str(max(training.done, default=0)))

    training.before[5 if moment == "loss" else 4] = training.fault(moment, rank)
    RecoverableTraining(
        training.trainer, training.policy, training.step, on_begin=training.on_begin, add_files=add
    ).run(1, LAST_STEP)
    assert training.begun in ([1, 3], [1, 5]), "as far as the one of step 4 was complete, or not"
    assert moment != "save" or training.begun == [1, 3]
    assert training.losses == unbroken
    folders = [training.folder / "checkpoints" / f"step-{step:06d}" for step in (2, 4, 6)]
    assert sorted((training.folder / "checkpoints").iterdir()) == [
        training.folder / "checkpoints" / "latest",
        *folders,
    ]
    assert [(folder / "of-the-script").read_text() for folder in folders] == ["2", "4", "6"], (
        "as it was at that step"
    )


def test_recovery_of_ranks_killed_between_steps(training: Training) -> None:
    """One of them before the first checkpoint."""
    training.before[0] = lambda: os.kill(training.pids()[0], signal.SIGKILL)
    training.before[3] = lambda: os.kill(training.pids()[1], signal.SIGKILL)
    training.run(first_step=0)
    assert training.begun == [0, 0, 3]
    assert training.done == [0, 1, 2, 3, 4, 5, 6]


class UnsuitedError(Exception):
    """Of the script."""


def test_recovery_leaves_errors_that_are_no_loss(
    training: Training, scheduler: LocalScheduler
) -> None:
    """They are the caller's. A role that is gone, as an attempt leaves it that found no other
    place, is created again.
    """
    pids = training.pids()

    def raise_own() -> None:
        raise UnsuitedError

    def fail_on_ranks() -> None:
        training.trainer.train_batch([{"input_ids": [1, 2]}], "nowhere.to.be:found")

    training.before[1] = raise_own
    with pytest.raises(UnsuitedError):
        training.run()
    training.before[1] = fail_on_ranks
    with pytest.raises(GroupCallError) as caught:
        training.run()
    assert isinstance(caught.value.first, EngineCallError)
    assert training.pids() == pids
    assert training.trainer.num_recoveries == 0
    training.run(last_step=2)
    assert training.done == [1, 2]
    scheduler.delete_workers("train")
    assert training.trainer.recover() == training.versions[-1] + 1
    training.run(last_step=3)
    assert training.done == [1, 2, 3]


def test_recovery_versions_only_grow(training: Training, unbroken: dict[int, float]) -> None:
    """An error of any kind is a loss when a rank has died. Without one, the script may run the
    steps again.
    """

    def fail() -> None:
        os.kill(training.pids()[1], signal.SIGKILL)
        raise UnsuitedError

    def raise_own() -> None:
        raise UnsuitedError

    training.before = {3: fail, 4: raise_own}
    with pytest.raises(UnsuitedError):
        training.run()
    assert training.begun == [1, 3]
    training.run()
    assert training.begun == [1, 3, 3]
    assert training.losses == unbroken
    assert training.versions == list(range(10))


def test_run_of_a_script_that_is_started_again(
    scheduler: LocalScheduler, tmp_path: Path, unbroken: dict[int, float]
) -> None:
    first = Training(scheduler, tmp_path)
    with first.trainer:
        first.trainer.initialize()
        first.run(last_step=3)
    second = Training(scheduler, tmp_path)
    with second.trainer:
        second.trainer.initialize()
        second.run()
        second.run()
        assert second.begun == [4, 7], "all is done"
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
    assert second.losses == {step: loss for step, loss in unbroken.items() if step > 3}


# --- beside other roles ---------------------------------------------------------------------------


def test_recovery_leaves_requests_running(training: Training, scheduler: LocalScheduler) -> None:
    rollout = RolloutController(
        scheduler,
        "tests.controller.recovery_engines.AnyWeightsRollout",
        Job(role="rollout", replicas=2),
        supervision=SupervisionPolicy(),
    )
    weights: list[int] = []
    with rollout:
        rollout.initialize()
        pids = {status.worker_id: status.pid for status in scheduler.status()}
        held = [rollout.submit([number]) for number in (1, 2)]
        wait_until(
            lambda: sum(each.num_in_flight for each in rollout.stats().instances.values()) == 2,
            "both are in flight",
        )

        def tell(step: int) -> None:
            training.on_begin(step)
            weights.append(training.trainer.update_rollout(rollout))

        def step(number: int) -> None:
            training.step(number)
            weights.append(training.trainer.update_rollout(rollout))

        training.before[3] = training.fault("loss", 0)
        RecoverableTraining(training.trainer, training.policy, step, on_begin=tell).run(1, 4)
        assert weights == [0, 1, 2, 3, 4, 5]
        assert set(rollout.versions().values()) == {5}
        assert not any(future.done() for future in held)
        for worker in rollout.workers:
            scheduler.call_engine(worker.id, "finish")
        assert [future.result(60).token_ids for future in held] == [[2], [3]]
        after = {status.worker_id: status.pid for status in scheduler.status()}
        assert {id_: pid for id_, pid in after.items() if id_.startswith("rollout")} == {
            id_: pid for id_, pid in pids.items() if id_.startswith("rollout")
        }


def test_rebuilt_instance_waits_for_the_trainers_recovery(scheduler: LocalScheduler) -> None:
    """The weights that are served lie with the trainer, and are lost with it."""
    policy = SupervisionPolicy(probe_every_s=0.05, suspect_s=5.0, dead_s=30.0, restart_pause_s=0.01)
    engine = "tests.controller.engines.CountingRollout"
    trainer = TrainController(
        scheduler, "tests.controller.engines.RecordingTrainer", Job(role="train", replicas=2)
    )
    with (
        trainer,
        RolloutController(
            scheduler, engine, Job(role="rollout", replicas=2), supervision=policy
        ) as rollout,
    ):
        trainer.initialize()
        rollout.initialize()
        assert trainer.update_rollout(rollout) == 0
        pids = {status.worker_id: status.pid for status in scheduler.status()}
        for worker_id in ("train/0", "rollout/0"):
            pid = pids[worker_id]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda: rollout.stats().instances["rollout/0"].state is Health.STALE,
            "it is rebuilt",
            limit_s=60.0,
        )
        assert rollout.generate([[4]])[0].token_ids == [5], "the other one serves"
        with pytest.raises((GroupCallError, WorkerFailedError)):
            trainer.update_rollout(rollout)
        assert trainer.recover() == 1
        assert trainer.update_rollout(rollout) == 1
        assert rollout.versions() == {"rollout/0": 1, "rollout/1": 1}
        assert {each.state for each in rollout.stats().instances.values()} == {Health.HEALTHY}


def test_weight_sync_after_recovery(training: Training, scheduler: LocalScheduler) -> None:
    """By broadcasts, whose group the lost process was in."""
    model = {"model": QWEN2, "max_concurrency": 4, "max_model_len": 40}
    rollout = RolloutController(
        scheduler,
        "helmsman.engines.rollout.HFRolloutEngine",
        Job(role="rollout", replicas=2),
        engine_kwargs=model,
    )
    with rollout:
        rollout.initialize()
        sync = WeightSync(training.trainer, rollout, ViaCollective())
        versions: list[int] = []

        def step(number: int) -> None:
            training.step(number)
            versions.append(sync.push().version)

        training.before[3] = training.fault("loss", 0)
        RecoverableTraining(
            training.trainer,
            training.policy,
            step,
            on_begin=lambda number: versions.append(sync.push().version),
        ).run(1, 3)
        assert training.done == [1, 2, 3]
        assert versions == [0, 1, 2, 3, 4]
        assert rollout.versions() == {"rollout/0": 4, "rollout/1": 4}


def test_recovery_leaves_siblings_running(training: Training, scheduler: LocalScheduler) -> None:
    beside = SchedulingStrategy(type="colocation", target="train", fork=True)
    scheduler.create_workers(Job(role="reference", replicas=2, scheduling_strategy=beside))
    before = {status.worker_id: status.pid for status in scheduler.status()}
    training.before[1] = training.fault("loss", 0)
    training.run(last_step=2)
    after = {status.worker_id: status.pid for status in scheduler.status()}
    assert training.done == [1, 2]
    assert [after[f"reference/{rank}"] for rank in range(2)] == [
        before[f"reference/{rank}"] for rank in range(2)
    ]
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


def test_recovery_refuses_a_trainer_in_other_workers(
    scheduler: LocalScheduler, tmp_path: Path
) -> None:
    inside = SchedulingStrategy(type="colocation", target="rollout")
    training = Training(
        scheduler, tmp_path, Job(role="train", replicas=2, scheduling_strategy=inside)
    )
    with pytest.raises(
        InvalidSpecError, match="fork is False; expected True, since a restart of these workers"
    ):
        RecoverableTraining(training.trainer, training.policy, training.step)
