"""Recovery of a training job after the loss of a rank."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from helmsman._base.event_loop import run_sync
from helmsman.api.errors import (
    CallError,
    GroupCallError,
    HelmsmanError,
    InvalidSpecError,
    JobError,
    RecoveryExhaustedError,
    RendezvousError,
    StartError,
    WorkerFailedError,
)
from helmsman.api.supervision import ProbePolicy, Report, RestartBudget, Sign, Watch
from helmsman.controller._groups.call_all import observe
from helmsman.controller._training.checkpoints import Checkpoints
from helmsman.controller._training.train_controller import TrainController


class RecoveryPolicy(ProbePolicy, frozen=True, kw_only=True):
    """Checkpoint interval, recovery limit and health probes of a training job.

    A rank that is dead by ``dead_s`` or ``busy_s`` is killed, which ends the calls that wait for
    it. Times are in seconds.

    Raises:
        ValueError: A value is out of range.
    """

    checkpoints: str | os.PathLike[str]
    """Checkpoint folder, on storage that all nodes share."""
    save_every: int
    """Steps between two checkpoints; the last step is always saved."""
    num_kept: int = 3
    """Number of checkpoints to keep, newest first."""
    save_in_background: bool = False
    """Write checkpoints while training continues. A checkpoint is published at the end of the step
    in which its write completes. If a rank is lost before that, the previous one is loaded."""
    max_recoveries: int = 3
    """Recoveries within ``window_s``; the next loss ends the run."""
    window_s: float = 3600.0
    """Window over which recoveries are counted."""
    pause_s: float = 1.0
    """Pause before the first recovery; it doubles with each further one within the window."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("save_every", self.save_every, 1),
            ("num_kept", self.num_kept, 1),
            ("max_recoveries", self.max_recoveries, 0),
            ("pause_s", self.pause_s, 0),
        ):
            if not value >= least:
                raise ValueError(f"{name} is {value:g}; expected {least} or more")
        if not self.window_s > 0:
            raise ValueError(f"window_s is {self.window_s:g}; expected more than 0")
        if not 0 < self.probe_every_s <= self.dead_s:
            raise ValueError(
                f"probe_every_s is {self.probe_every_s:g} and dead_s {self.dead_s:g}; expected "
                "0 < probe_every_s <= dead_s"
            )


log = logging.getLogger(__name__)


class RankMonitor:
    """Kills the ranks of a job that the scheduler's monitor reports as silent.

    Ranks may be rebuilt while it runs.
    """

    def __init__(self, trainer: TrainController, policy: RecoveryPolicy) -> None:
        self._trainer, self._policy, self._scheduler = trainer, policy, trainer.scheduler
        self._worker_ids = [worker.id for worker in trainer.workers]
        self._builds = dict.fromkeys(self._worker_ids, trainer.num_recoveries)
        """Worker id -> ``num_recoveries`` at its last report. Silence that began before a recovery
        belongs to the previous process.
        """
        self._watch: Watch | None = None

    def __enter__(self) -> Self:
        run_sync(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        run_sync(self._stop())

    async def _start(self) -> None:
        self._watch = Watch(
            self._scheduler.monitor, self._policy, self._on_report, self._worker_ids
        )

    async def _stop(self) -> None:
        if self._watch is not None:
            self._watch.close()

    def lost(self) -> list[WorkerFailedError]:
        """Probe all ranks now, kill silent ones, and return the errors of all dead ranks.

        Takes at most about ``dead_s``.
        """

        async def ask(worker_id: str) -> WorkerFailedError | None:
            report = await self._scheduler.monitor.ask(worker_id, self._policy.dead_s)
            is_silent = report.sign is Sign.DEAD and report.error is None
            return await self._end(report) if is_silent else report.error

        async def ask_all() -> list[WorkerFailedError | None]:
            return await asyncio.gather(*map(ask, self._worker_ids))

        return [error for error in run_sync(ask_all()) if error is not None]

    def _on_report(self, report: Report) -> None:
        if report.sign not in (Sign.ANSWERED, Sign.DEAD):
            return
        build, self._builds[report.worker_id] = (
            self._builds[report.worker_id],
            self._trainer.num_recoveries,
        )
        if (
            report.sign is Sign.DEAD
            and report.error is None
            and build == self._trainer.num_recoveries
        ):
            observe(asyncio.ensure_future(self._end(report)), f"the end of {report.worker_id}")

    async def _end(self, report: Report) -> WorkerFailedError | None:
        """Kill a silent rank, and return the error that describes its death."""
        cause = f"was ended because {report.reason}"
        log.warning("%s %s", report.worker_id, cause)
        try:
            await self._scheduler.kill_worker(report.worker_id, cause)
            await self._scheduler.check_health(report.worker_id)
        except WorkerFailedError as error:
            return error
        except HelmsmanError as error:
            log.warning("%s could not be ended: %s", report.worker_id, error)
        return None


class StepAttempt:
    """The block of one step: ``with attempt as step:``.

    An exception of the block ends it, and the loop over ``RecoverableTraining.steps`` decides
    whether it is raised or the step is repeated.

    Args:
        step: Number of the step.
        held: Closed at once by an exception that ends the run whatever the ranks do, such as
            KeyboardInterrupt.
    """

    def __init__(self, step: int, held: contextlib.ExitStack) -> None:
        self.step = step
        self.error: Exception | None = None
        """The exception that ended the block."""
        self._held = held

    def __enter__(self) -> int:
        return self.step

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
            return True
        if error is not None:
            self._held.close()
        return False


class RecoverableTraining:
    """Runs numbered steps with checkpoints, and resumes from the last one when a rank is lost.

    A rank is lost when its process or node ends, or when it is silent for ``policy.dead_s``. All
    ranks are then rebuilt, and the steps after the last checkpoint are repeated. Other roles are
    not touched: rollout workers keep running. All other errors of a step reach the caller. A
    restarted script also resumes from the last checkpoint.

    Args:
        trainer: The initialized job. No other role may share its workers without a fork.
        policy: Checkpoint folder and interval, recovery limit, health probes.
        step: Executes the step with the given number; None for a loop over ``steps``. Random draws
            should depend on that number alone, so that a repeated step draws the same values.
        on_begin: Called with the number of the next step, before the first step and after each
            recovery. The script discards its records of that step and later ones, pushes the
            restored weights to the rollout, and sets values that checkpoints lack (``set_lr``).
        add_files: Adds files to a checkpoint folder before it is published.
        others: Further jobs that a step uses, such as a critic. When a rank of any job is lost, all
            are rebuilt, these with the weights with which their engines are built; ``on_begin``
            restores them from the files of ``add_files``.

    Raises:
        InvalidSpecError: A job is colocated with another role without a fork.
    """

    def __init__(
        self,
        trainer: TrainController,
        policy: RecoveryPolicy,
        step: Callable[[int], object] | None = None,
        *,
        on_begin: Callable[[int], object] | None = None,
        add_files: Callable[[Path], object] | None = None,
        others: Sequence[TrainController] = (),
    ) -> None:
        for job in (trainer, *others):
            strategy = job.job.scheduling_strategy
            if strategy.type == "colocation" and not strategy.fork:
                raise InvalidSpecError(
                    role=job.role,
                    field="scheduling_strategy.fork",
                    value=False,
                    expected=f"True, since a restart of these workers would also end the engines "
                    f"of role {strategy.target!r}",
                )
        self.trainer, self.policy, self._others = trainer, policy, tuple(others)
        self.checkpoints = Checkpoints(policy.checkpoints, policy.num_kept)
        self._step, self._on_begin, self._add_files = step, on_begin, add_files
        self._budget = RestartBudget(policy.max_recoveries, policy.window_s, policy.pause_s)
        self._last_loss: WorkerFailedError | None = None
        self._is_saved = False

    def run(self, first_step: int, last_step: int) -> None:
        """Run the steps from ``first_step`` to ``last_step``, except those already in a checkpoint.

        Args:
            first_step: Number of the first step.
            last_step: Number of the last step, inclusive.

        Raises:
            ValueError: There is no ``step``.
            Exception: Any error of ``steps`` and ``step``.
        """
        if self._step is None:
            raise ValueError("step is None; expected a function, or a loop over steps()")
        for attempt in self.steps(first_step, last_step):
            with attempt as number:
                self._step(number)

    def steps(self, first_step: int, last_step: int) -> Iterator[StepAttempt]:
        """Yield the steps as blocks of a loop in the script, in place of ``run``.

            for attempt in training.steps(1, 1000):
                with attempt as step:
                    ...

        The end of a block writes the checkpoint that is due. When a rank is lost in a block, the
        loop goes on with the step after the last checkpoint; other errors leave the loop. Without
        a checkpoint, the initial weights are saved as step ``first_step - 1``. This is omitted when
        ``first_step`` is 0: a recovery before the first checkpoint then starts from the weights
        with which the engines are built.

        Args:
            first_step: Number of the first step.
            last_step: Number of the last step, inclusive.

        Returns:
            The blocks, each to be entered before the next one is taken.

        Raises:
            RecoveryExhaustedError: A rank was lost after ``policy.max_recoveries`` recoveries.
            CheckpointError: The ranks cannot load the last checkpoint.
            ValueError: Steps are missing between the last checkpoint and ``first_step``.
            Exception: Any error of a block, ``on_begin`` and ``add_files``.
        """
        begin = self._go_on
        with contextlib.ExitStack() as held:
            monitors = []
            for job in (self.trainer, *self._others):
                advice = "RecoverableTraining continues from the last checkpoint."
                job.scheduler.advise(job.role, advice)
                monitors.append(held.enter_context(RankMonitor(job, self.policy)))
            while True:
                try:
                    for number in range(begin(first_step), last_step + 1):
                        attempt = StepAttempt(number, held)
                        yield attempt
                        if attempt.error is not None:
                            raise attempt.error
                        self._finish_save()
                        if number % self.policy.save_every == 0 or number == last_step:
                            self._save(number, in_background=self.policy.save_in_background)
                    self._wait_for_save()
                except Exception as error:
                    loss = self._loss(error, monitors)
                    if loss is None:
                        self._finish_save()
                        raise
                    self._pause(loss, error)
                    begin = self._recover
                else:
                    return

    def _go_on(self, first_step: int) -> int:
        """Start, or resume from the checkpoint of an earlier script; return the next step."""
        found = self.checkpoints.latest()
        if found is None:
            if first_step > 0:
                # Not in the background: a recovery before it is published would lose the weights
                # that the script has loaded.
                self._save(first_step - 1, in_background=False)
            return self._begin(first_step)
        step, folder = found
        if step < first_step - 1:
            raise ValueError(
                f"the last checkpoint in {self.checkpoints.folder} is of step {step}, and "
                f"first_step is {first_step}; expected "
                f"at most {step + 1}, or an empty folder"
            )
        self._is_saved = True
        self.trainer.load(str(folder))
        self.trainer.raise_version()  # an earlier script may have published later versions
        return self._begin(step + 1)

    def _recover(self, first_step: int) -> int:
        """Rebuild the ranks, load the last checkpoint and return the next step."""
        self._finish_save()  # a background checkpoint may be complete but not yet published
        self.checkpoints.forget()
        found = self.checkpoints.latest()
        if found is None and self._is_saved:
            # The file system may be unavailable for a while; do not restart from the beginning.
            missing = FileNotFoundError(
                f"{self.checkpoints.folder} has no checkpoint any more, but had one in this run"
            )
            raise _NotRecoveredError from missing
        step, folder = found or (first_step - 1, None)
        try:
            version = self.trainer.recover(None if folder is None else str(folder))
            for other in self._others:
                other.recover()
        except JobError as error:
            raise error from self._last_loss
        except (StartError, RendezvousError, CallError, GroupCallError) as error:
            raise _NotRecoveredError from error
        source = "the initial weights" if folder is None else folder
        log.warning(
            "%s: rebuilt with %s as weight version %d; step %d is next",
            self.trainer.role,
            source,
            version,
            step + 1,
        )
        return self._begin(step + 1)

    def _begin(self, step: int) -> int:
        if self._on_begin is not None:
            self._on_begin(step)
        return step

    def _save(self, step: int, *, in_background: bool) -> None:
        self._wait_for_save()
        if in_background:
            self.checkpoints.begin(
                step,
                lambda folder: self.trainer.save(str(folder), background=True),
                self._add_files,
            )
            return

        def write(folder: Path) -> None:
            self.trainer.save(str(folder))
            if self._add_files is not None:
                self._add_files(folder)

        self.checkpoints.save(step, write)
        self._is_saved = True

    def _wait_for_save(self) -> None:
        if self.checkpoints.is_writing:
            self.trainer.wait_for_save()
            self._finish_save()
            if self.checkpoints.is_writing:
                raise FileNotFoundError(
                    "the ranks have written a checkpoint that does not appear in "
                    f"{self.checkpoints.folder}; expected a folder "
                    "that the script and all ranks share"
                )

    def _finish_save(self) -> None:
        if self.checkpoints.finish() is not None:
            self._is_saved = True

    # --- losses -----------------------------------------------------------------------------------

    def _loss(self, error: Exception, monitors: Sequence[RankMonitor]) -> WorkerFailedError | None:
        """Return the loss of a rank that caused an error; None if the error has another cause."""
        if isinstance(error, JobError):  # not transient: another recovery would fail the same way
            return None
        roles = {job.role for job in (self.trainer, *self._others)}
        for cause in _causes(error):
            if isinstance(cause, WorkerFailedError) and cause.role in roles:
                return cause
        if isinstance(error, _NotRecoveredError):
            return self._last_loss
        # A peer may report a broken connection, or a lost handle, before the death is detected.
        return next((loss for monitor in monitors for loss in monitor.lost()), None)

    def _pause(self, loss: WorkerFailedError, error: Exception) -> None:
        """Wait before a recovery; raise RecoveryExhaustedError when the limit is reached."""
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
            *(
                loss.worker_id,
                loss.cause,
                num_recent,
                self.policy.max_recoveries,
                self.policy.window_s,
                pause_s,
            ),
            "" if last is error else f"; the previous recovery failed: {last}",
        )
        time.sleep(pause_s)


class _NotRecoveredError(Exception):
    """A failed rebuild of the ranks, with the reason as ``__cause__``; a retry may succeed."""


def _causes(error: BaseException) -> Iterator[BaseException]:
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
