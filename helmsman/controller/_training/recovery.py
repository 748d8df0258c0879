"""The steps of a training job, some of them done again when a train worker is lost; ranks that do
not answer are ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

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
from helmsman.controller._aio.event_loop import run_sync
from helmsman.controller._roles.call_all import observe
from helmsman.controller._training.train_controller import TrainController


class RecoveryPolicy(ProbePolicy, frozen=True, kw_only=True):
    """How a training job outlives its workers. A rank that is dead by ``dead_s`` or ``busy_s`` is
    ended, so that the calls which wait for it end. Times in seconds.
    """

    checkpoints: str | os.PathLike[str]
    """Folder of the checkpoints, which every node reaches."""
    save_every: int
    """Steps between two of them; the last step is saved, too."""
    num_kept: int = 3
    """Checkpoints that stay, the newest."""
    save_in_background: bool = False
    """Write checkpoints while the next steps are done. One counts at the end of the step in which
    it is complete; a loss before that costs the steps since the one before it."""
    max_recoveries: int = 3
    """Within ``window_s``; one more loss ends the run."""
    window_s: float = 3600.0
    pause_s: float = 1.0
    """Before the first recovery; doubled with each more within the window."""

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
                f"probe_every_s {self.probe_every_s:g} and dead_s {self.dead_s:g} must be in this "
                "order, and above 0"
            )


log = logging.getLogger(__name__)


class RankMonitor:
    """Ends the ranks of a job that its scheduler's monitor reports as silent; they may be rebuilt
    meanwhile.
    """

    def __init__(self, trainer: TrainController, policy: RecoveryPolicy) -> None:
        self._trainer, self._policy, self._scheduler = trainer, policy, trainer.scheduler
        self._worker_ids = [worker.id for worker in trainer.workers]
        self._builds = dict.fromkeys(self._worker_ids, trainer.num_recoveries)
        """By worker id, ``num_recoveries`` at its last report: silence that began before a recovery
        is another process's.
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
        """Ask all ranks now; how those ended that have ended, or are ended for their silence. At
        most about ``dead_s``.
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
        """End a rank that is silent; returns how it has ended."""
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


class RecoverableTraining:
    """Runs numbered steps, saves checkpoints, and goes on from the last one when a train worker is
    lost.

    A rank is lost when its process or node ends, or when it is silent for ``policy.dead_s``. Then
    all ranks are rebuilt and the steps after the last checkpoint are done again; nothing else is
    touched, so what rollout workers run goes on. Every other error of a step is the caller's. A
    script that is restarted goes on from the last checkpoint, too.

    Args:
        trainer: the job, which has been initialized. Its workers are its own, and no other role
            uses them without a fork.
        policy: where checkpoints are, how often, and what is done about a loss.
        step: does the step of a number. What it draws should depend on that number, not on what was
            drawn before.
        on_begin: called with the number of the next step, before the first one and after every
            recovery. There a script forgets what it noted of that step and later ones, brings the
            restored weights to the rollout workers, and sets what is not part of a checkpoint
            (set_lr).
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
                expected=f"True, since workers that are {strategy.target!r}'s cannot be restarted "
                "without its engines",
            )
        self.trainer, self.policy = trainer, policy
        self.checkpoints = Checkpoints(policy.checkpoints, policy.num_kept)
        self._step, self._on_begin, self._add_files = step, on_begin, add_files
        self._budget = RestartBudget(policy.max_recoveries, policy.window_s, policy.pause_s)
        self._last_loss: WorkerFailedError | None = None
        self._is_saved = False

    def run(self, first_step: int, last_step: int) -> None:
        """Do these steps, both included; those up to the last checkpoint count as done.

        Before ``first_step`` the weights are saved as those of the step before it, unless that is
        below 0: a recovery before the first checkpoint begins with the weights with which the
        engines are built.

        Raises: RecoveryExhaustedError; CheckpointError; ValueError when steps are missing between
            the last checkpoint and ``first_step``; whatever ``step``, ``on_begin`` and
            ``add_files`` raise.
        """
        begin = self._go_on
        self.trainer.scheduler.advise(
            self.trainer.role, "RecoverableTraining goes on from the last checkpoint."
        )
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
                # a recovery before it counts would lose what was loaded
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
        self.trainer.raise_version()  # this script may have gone further before, and told of it
        return self._begin(step + 1)

    def _recover(self, first_step: int) -> int:
        """Rebuild the ranks and go on from the last checkpoint; returns the next step."""
        self._finish_save()  # the last step may have been lost after it was complete
        self.checkpoints.forget()
        found = self.checkpoints.latest()
        if found is None and self._is_saved:
            # a file system that is away for a while is no reason to begin again
            missing = FileNotFoundError(
                f"{self.checkpoints.folder} has no checkpoint any more, and had one in this run"
            )
            raise _NotRecoveredError from missing
        step, folder = found or (first_step - 1, None)
        try:
            version = self.trainer.recover(None if folder is None else str(folder))
        except JobError as error:
            raise error from self._last_loss
        except (StartError, RendezvousError, CallError, GroupCallError) as error:
            raise _NotRecoveredError from error
        source = "the weights of the start" if folder is None else folder
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
                    f"a checkpoint was written, and does not appear in {self.checkpoints.folder}; "
                    "expected a folder that the "
                    "script and all ranks reach"
                )

    def _finish_save(self) -> None:
        if self.checkpoints.finish() is not None:
            self._is_saved = True

    # --- losses -----------------------------------------------------------------------------------

    def _loss(self, error: Exception, monitor: RankMonitor) -> WorkerFailedError | None:
        """The loss of a rank that an error comes from; None when it comes from something else."""
        if isinstance(error, JobError):  # a recovery that is refused would be refused again
            return None
        for cause in _causes(error):
            if isinstance(cause, WorkerFailedError) and cause.role == self.trainer.role:
                return cause
        if isinstance(error, _NotRecoveredError):
            return self._last_loss
        # What a peer says of a lost connection may come before the loss itself is known, and so may
        # a lost handle.
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
            *(
                loss.worker_id,
                loss.cause,
                num_recent,
                self.policy.max_recoveries,
                self.policy.window_s,
                pause_s,
            ),
            "" if last is error else f"; the one before failed: {last}",
        )
        time.sleep(pause_s)


class _NotRecoveredError(Exception):
    """The ranks could not be built again, for the reason that is its cause; another attempt may
    succeed.
    """


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


_PUBLISHED = re.compile(r"step-(\d{6,})")
_UNFINISHED = re.compile(r"\.+step-\d{6,}.*")
"""Ours, and what an engine writes beside it before it takes that name."""


class Checkpoints:
    """The newest few checkpoints of a run: ``step-000120/``, ... and ``latest``, a link to the
    newest. One run writes to it.

    Args:
        folder: where they are; it is made with the first one.
        num_kept: how many stay.
    """

    def __init__(self, folder: str | os.PathLike[str], num_kept: int) -> None:
        if num_kept < 1:
            raise ValueError(f"num_kept is {num_kept}; expected 1 or more")
        # it goes to workers, whose current folder may be another
        self.folder = Path(folder).absolute()
        self.num_kept = num_kept
        self._begun: int | None = None
        """The step of a checkpoint that is being written in the background."""

    def save(self, step: int, write: Callable[[Path], object]) -> Path:
        """Let ``write`` fill a folder for ``step``, publish it and drop the oldest ones. Returns
        the folder.

        What an earlier attempt left, whose worker was killed while it wrote, is removed.
        """
        self._make_ready()
        write(self._unfinished(step))
        return self._publish(step)

    def begin(
        self,
        step: int,
        begin: Callable[[Path], object],
        add_files: Callable[[Path], object] | None = None,
    ) -> None:
        """Let ``begin`` have somebody fill a folder for ``step`` in the background, who gives it
        its name when it is complete; ``finish`` publishes it.

        Args:
            add_files: fills a folder whose contents are added to the checkpoint then: what it
                writes is of now.
        """
        self._make_ready()
        if add_files is not None:
            added = self._added(step)
            added.mkdir()
            add_files(added)
        begin(self._unfinished(step))
        self._begun = step

    def finish(self) -> Path | None:
        """Publish what ``begin`` began, if it is complete by now; returns its folder then, and None
        when it is not, or there is nothing to be published.
        """
        if self._begun is None or not self._unfinished(self._begun).is_dir():
            return None
        step, self._begun = self._begun, None
        added = self._added(step)
        if added.is_dir():
            for path in added.iterdir():
                path.rename(self._unfinished(step) / path.name)
            added.rmdir()
        return self._publish(step)

    def forget(self) -> None:
        """Count nothing that ``begin`` began: those who wrote it have gone."""
        self._begun = None

    @property
    def is_writing(self) -> bool:
        """Whether ``finish`` has something to publish, now or later."""
        return self._begun is not None

    def _unfinished(self, step: int) -> Path:
        return self.folder / f".step-{step:06d}"

    def _added(self, step: int) -> Path:
        return self.folder / f".step-{step:06d}.added"

    def _make_ready(self) -> None:
        self._begun = None
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.iterdir():
            if _UNFINISHED.fullmatch(left.name):
                shutil.rmtree(left, ignore_errors=True)

    def _publish(self, step: int) -> Path:
        path = self.folder / f"step-{step:06d}"
        self._remove(path)
        self._unfinished(step).rename(path)
        link = self.folder / ".latest"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        link.replace(self.folder / "latest")
        for old in self._steps()[: -self.num_kept]:
            self._remove(self.folder / f"step-{old:06d}")
        return path

    def latest(self) -> tuple[int, Path] | None:
        """Step and folder of the newest checkpoint; ``latest`` is for people, as a copied folder
        may have lost the link.
        """
        steps = self._steps()
        return (steps[-1], (self.folder / f"step-{steps[-1]:06d}").resolve()) if steps else None

    def _remove(self, path: Path) -> None:
        """Under another name: a script that is killed meanwhile leaves no half of a checkpoint
        under this one.
        """
        if path.exists():
            shutil.rmtree(path.rename(self.folder / f".{path.name}.old"))

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        matches = (_PUBLISHED.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)
