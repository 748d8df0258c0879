"""The steps of a training job, some of them done again when a train worker is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from helmsman.api.errors import (
    CallError,
    GroupCallError,
    InvalidSpecError,
    JobError,
    RecoveryExhaustedError,
    RendezvousError,
    StartError,
    WorkerFailedError,
)
from helmsman.api.supervision import RestartBudget
from helmsman.controller._training.checkpoints import Checkpoints
from helmsman.controller._training.rank_monitor import RankMonitor
from helmsman.controller._training.recovery_policy import RecoveryPolicy
from helmsman.controller._training.train_controller import TrainController

log = logging.getLogger(__name__)


class RecoverableTraining:
    """Runs numbered steps, saves checkpoints, and goes on from the last one when a train worker is lost.

    A rank is lost when its process or node ends, or when it is silent for ``policy.dead_s``. Then all ranks are rebuilt and
    the steps after the last checkpoint are done again; nothing else is touched, so what rollout workers run goes on. Every
    other error of a step is the caller's. A script that is restarted goes on from the last checkpoint, too.

    Args:
        trainer: the job, which has been initialized. Its workers are its own, and no other role uses them without a fork.
        policy: where checkpoints are, how often, and what is done about a loss.
        step: does the step of a number. What it draws should depend on that number, not on what was drawn before.
        on_begin: called with the number of the next step, before the first one and after every recovery. There a script forgets
            what it noted of that step and later ones, brings the restored weights to the rollout workers, and sets what is not
            part of a checkpoint (set_lr).
        add_files: puts more files into the folder of a checkpoint, before it counts as one.

    Raises: InvalidSpecError for a trainer that is colocated with another role without a fork.
    """

    def __init__(
        self,
        trainer: TrainController,
        policy: RecoveryPolicy,
        step: Callable[[int], object],
        *,
        on_begin: Callable[[int], object] | None = None,
        add_files: Callable[[Path], object] | None = None,
    ) -> None:
        strategy = trainer.job.scheduling_strategy
        if strategy.type == "colocation" and not strategy.fork:
            raise InvalidSpecError(
                role=trainer.role,
                field="scheduling_strategy.fork",
                value=False,
                expected=f"True, since workers that are {strategy.target!r}'s cannot be restarted without its engines",
            )
        self.trainer, self.policy = trainer, policy
        self.checkpoints = Checkpoints(policy.checkpoints, policy.num_kept)
        self._step, self._on_begin, self._add_files = step, on_begin, add_files
        self._budget = RestartBudget(policy.max_recoveries, policy.window_s, policy.pause_s)
        self._last_loss: WorkerFailedError | None = None
        self._is_saved = False
        """Whether there has been a checkpoint."""

    def run(self, first_step: int, last_step: int) -> None:
        """Do these steps, both included; those up to the last checkpoint count as done.

        Before ``first_step`` the weights are saved as those of the step before it, unless that is below 0: a recovery before
        the first checkpoint begins with the weights with which the engines are built.

        Raises: RecoveryExhaustedError; CheckpointError; ValueError when steps are missing between the last checkpoint and
            ``first_step``; whatever ``step``, ``on_begin`` and ``add_files`` raise.
        """
        begin = self._go_on
        self.trainer.scheduler.advise(self.trainer.role, "RecoverableTraining goes on from the last checkpoint.")
        with RankMonitor(self.trainer, self.policy) as monitor:
            while True:
                try:
                    for number in range(begin(first_step), last_step + 1):
                        self._step(number)
                        self._finish_save()
                        if number % self.policy.save_every == 0 or number == last_step:
                            self._save(number, in_background=self.policy.save_in_background)
                    self._wait_for_save()
                except Exception as error:
                    loss = self._loss(error, monitor)
                    if loss is None:
                        self._finish_save()
                        raise
                    self._pause(loss, error)
                    begin = self._recover
                else:
                    return

    def _go_on(self, first_step: int) -> int:
        """Begin, or go on from what an earlier script has saved; returns the next step."""
        found = self.checkpoints.latest()
        if found is None:
            if first_step > 0:
                self._save(first_step - 1, in_background=False)  # a recovery before it counts would lose what was loaded
            return self._begin(first_step)
        step, folder = found
        if step < first_step - 1:
            raise ValueError(
                f"the last checkpoint in {self.checkpoints.folder} is of step {step}, and first_step is {first_step}; expected "
                f"at most {step + 1}, or an empty folder"
            )
        self._is_saved = True
        self.trainer.load(str(folder))
        self.trainer.raise_version()  # this script may have gone further before, and told of it
        return self._begin(step + 1)

    def _recover(self, first_step: int) -> int:
        """Rebuild the ranks and go on from the last checkpoint; returns the next step."""
        self._finish_save()  # the last step may have been lost after it was complete
        self.checkpoints.forget()
        found = self.checkpoints.latest()
        if found is None and self._is_saved:  # a file system that is away for a while is no reason to begin again
            missing = FileNotFoundError(f"{self.checkpoints.folder} has no checkpoint any more, and had one in this run")
            raise _NotRecoveredError from missing
        step, folder = found or (first_step - 1, None)
        try:
            version = self.trainer.recover(None if folder is None else str(folder))
        except JobError as error:
            raise error from self._last_loss
        except (StartError, RendezvousError, CallError, GroupCallError) as error:
            raise _NotRecoveredError from error
        source = "the weights of the start" if folder is None else folder
        log.warning("%s: rebuilt with %s as weight version %d; step %d is next", self.trainer.role, source, version, step + 1)
        return self._begin(step + 1)

    def _begin(self, step: int) -> int:
        if self._on_begin is not None:
            self._on_begin(step)
        return step

    def _save(self, step: int, *, in_background: bool) -> None:
        self._wait_for_save()
        if in_background:
            self.checkpoints.begin(step, lambda folder: self.trainer.save(str(folder), background=True), self._add_files)
            return

        def write(folder: Path) -> None:
            self.trainer.save(str(folder))
            if self._add_files is not None:
                self._add_files(folder)

        self.checkpoints.save(step, write)
        self._is_saved = True

    def _wait_for_save(self) -> None:
        """Have the checkpoint that is being written count."""
        if self.checkpoints.is_writing:
            self.trainer.wait_for_save()
            self._finish_save()
            if self.checkpoints.is_writing:
                raise FileNotFoundError(
                    f"a checkpoint was written, and does not appear in {self.checkpoints.folder}; expected a folder that the "
                    "script and all ranks reach"
                )

    def _finish_save(self) -> None:
        if self.checkpoints.finish() is not None:
            self._is_saved = True

    # --- losses -----------------------------------------------------------------------------------------------------

    def _loss(self, error: Exception, monitor: RankMonitor) -> WorkerFailedError | None:
        """The loss of a rank that an error comes from; None when it comes from something else."""
        if isinstance(error, JobError):  # a recovery that is refused would be refused again
            return None
        for cause in _causes(error):
            if isinstance(cause, WorkerFailedError) and cause.role == self.trainer.role:
                return cause
        if isinstance(error, _NotRecoveredError):
            return self._last_loss
        # What a peer says of a lost connection may come before the loss itself is known, and so may a lost handle.
        return next(iter(monitor.lost()), None)

    def _pause(self, loss: WorkerFailedError, error: Exception) -> None:
        """Wait before a recovery; RecoveryExhaustedError when there have been too many."""
        self._last_loss = loss
        last = error.__cause__ if isinstance(error, _NotRecoveredError) else error
        pause_s = self._budget.spend(now := time.monotonic())
        num_recent = self._budget.num_recent(now)
        found = self.checkpoints.latest()
        if pause_s is None:
            raise RecoveryExhaustedError(
                loss=loss,
                num_recoveries=num_recent,
                window_s=self.policy.window_s,
                checkpoint=str(found[1]) if found is not None else "",
                reason="" if last is error else f"{type(last).__name__}: {last}",
            ) from last
        log.warning(
            "%s was lost (%s); recovery %d of at most %d within %g s begins in %g s%s",
            *(loss.worker_id, loss.cause, num_recent, self.policy.max_recoveries, self.policy.window_s, pause_s),
            "" if last is error else f"; the one before failed: {last}",
        )
        time.sleep(pause_s)


class _NotRecoveredError(Exception):
    """The ranks could not be built again, for the reason that is its cause; another attempt may succeed."""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what it was raised from, and what it gathers."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting.append(each.__cause__ or (None if each.__suppress_context__ else each.__context__))
        if isinstance(each, GroupCallError):
            waiting += each.errors.values()
        elif isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions
