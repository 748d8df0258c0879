"""A training job of two ranks that is run with faults, for tests of recovery."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman.api.scheduler import Job, Scheduler
from helmsman.controller._scheduler.local import LocalScheduler
from helmsman.controller._training.recovery import RecoverableTraining, RecoveryPolicy
from helmsman.controller._training.train_controller import TrainController
from tests.controller.recovery_engines import plan_fault
from tests.engines.small_models import QWEN2, random_tokens

ENGINES = "tests.controller.recovery_engines"
LOSS = f"{ENGINES}.sft_with_faults"
LAST_STEP = 6


class Training:
    """A job of two ranks, and the record of its steps.

    Args:
        scheduler: Starts the ranks.
        folder: Folder for checkpoints and faults.
        job: The job; two ranks of role "train" when None.
        has_model: Whether the ranks train a real model.
        **policy: Fields of RecoveryPolicy.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        folder: Path,
        job: Job | None = None,
        *,
        has_model: bool = False,
        **policy: Any,
    ) -> None:
        self.folder, self.has_model = folder, has_model
        self.faults = folder / "faults"
        self.faults.mkdir(exist_ok=True)
        defaults = {"save_every": 2, "pause_s": 0.01, "probe_every_s": 0.1}
        self.policy = RecoveryPolicy(
            **{"checkpoints": folder / "checkpoints", **defaults, **policy}
        )
        fields = {"model": QWEN2, "lr": 1e-2, "rendezvous_timeout_s": 60} if has_model else {}
        self.trainer = TrainController(
            scheduler,
            f"{ENGINES}.{'FaultyTrainEngine' if has_model else 'FaultyTrainer'}",
            job or Job(role="train", replicas=2),
            (str(self.faults),),
            fields,
        )
        self.begun: list[int] = []
        self.done: list[int] = []
        self.losses: dict[int, float] = {}
        self.versions: list[int] = []
        self.before: dict[int, Callable[[], None]] = {}
        """Functions to call before a step, the first time that it runs."""

    def step(self, number: int) -> None:
        self.before.pop(number, lambda: None)()
        samples = [
            {"input_ids": random_tokens(4 + each, seed=100 * number + each)} for each in range(6)
        ]
        stats = self.trainer.train_batch(samples, LOSS, {"faults": str(self.faults)})
        self.losses[number] = stats["loss"]
        self.versions.append(self.trainer.get_version())
        self.done.append(number)

    def on_begin(self, step: int) -> None:
        self.begun.append(step)
        self.versions.append(self.trainer.get_version())

    def run(self, first_step: int = 1, last_step: int = LAST_STEP, **options: Any) -> None:
        options = {"step": self.step, "on_begin": self.on_begin, **options}
        RecoverableTraining(self.trainer, self.policy, **options).run(first_step, last_step)

    def fault(self, moment: str, rank: int, kind: str = "kill") -> Callable[[], None]:
        """Return a function that plans a fault."""
        return lambda: plan_fault(self.faults, moment, rank, kind)

    def pids(self) -> list[int]:
        return [
            self.trainer.scheduler.call_engine(worker.id, "pid") for worker in self.trainer.workers
        ]


Start = Callable[..., Training]
Losses = dict[bool, dict[int, float]]


@pytest.fixture(scope="module")
def scheduler(engines_scheduler: LocalScheduler) -> Iterator[LocalScheduler]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELMSMAN_PLATFORM", "cpu")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield engines_scheduler


@pytest.fixture
def start(scheduler: LocalScheduler, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a training; it takes options of Training."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Training:
            made = Training(scheduler, tmp_path, **options)
            stack.enter_context(made.trainer)
            return made

        yield make


@pytest.fixture(scope="module")
def unbroken(scheduler: LocalScheduler, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """The loss of each step of a run without faults, by whether the ranks train a model."""
    losses: Losses = {}
    for has_model in (False, True):
        folder = tmp_path_factory.mktemp("unbroken")
        job = Job(role="unbroken", replicas=2)
        made = Training(scheduler, folder, job, has_model=has_model)
        with made.trainer:
            made.run()
        assert made.done == [1, 2, 3, 4, 5, 6]
        assert made.versions == [0, 1, 2, 3, 4, 5, 6]
        losses[has_model] = made.losses
    return losses


def check_background_saves(start: Start, unbroken: Losses, moment: str, rank: int) -> Training:
    """A checkpoint counts when it is complete."""
    training = start(has_model=True, save_in_background=True)

    def add_files(folder: Path) -> None:
        (folder / "of-the-script").write_text(str(max(training.done, default=0)))

    training.before[5 if moment == "loss" else 4] = training.fault(moment, rank)
    training.run(add_files=add_files)
    assert training.begun in ([1, 3], [1, 5]), "the checkpoint of step 4 may be complete"
    assert training.losses == unbroken[True]
    folders = [training.folder / "checkpoints" / f"step-{step:06d}" for step in (2, 4, 6)]
    assert sorted((training.folder / "checkpoints").iterdir()) == [
        training.folder / "checkpoints" / "latest",
        *folders,
    ]
    assert [(folder / "of-the-script").read_text() for folder in folders] == ["2", "4", "6"]
    return training
