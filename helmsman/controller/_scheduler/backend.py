"""The contract of a backend, which starts workers at places that its allocator finds."""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from helmsman._base.event_loop import Deadline
from helmsman._process.upkeep import Folder, Upkeep
from helmsman._wire.messages import WorkerIdentity
from helmsman.api.errors import WorkerStartError
from helmsman.api.observer import RunObserver
from helmsman.api.platforms import current_platform
from helmsman.api.scheduler import Job, Timeouts
from helmsman.controller._placement.allocator import Allocator
from helmsman.controller._placement.placement import Placement
from helmsman.controller._scheduler.driver_log import DriverLog
from helmsman.controller._scheduler.run_registry import default_log_dir, new_run_id
from helmsman.controller._scheduler.transport.base import tail_of
from helmsman.controller._scheduler.transport.client import WorkerClient
from helmsman.rpc_server._host.handles import HandleStore

log = logging.getLogger(__name__)


class Run:
    """Settings and identity of a run, shared by the parts of its scheduler."""

    def __init__(self, seed: int, log_dir: str | Path | None, timeouts: Timeouts | None) -> None:
        self.id = new_run_id()
        self.observer = RunObserver()
        """Receives reports about the run."""
        self.seed = seed
        self.timeouts = timeouts or Timeouts()
        self.log_dir = Path(log_dir).absolute() if log_dir is not None else default_log_dir(self.id)
        self._log = DriverLog(self.log_dir, self.id)
        self._is_begun = False
        self._folder = Folder(self.log_dir)
        self.upkeep = Upkeep(functools.partial(log.warning, "run %s: %s", self.id))
        """Looks after the run's files."""

    def begin(self, scheduler: str) -> None:
        """Write the run's log to its log directory from now on. Idempotent."""
        self._log.begin(scheduler)
        if not self._is_begun:
            self._is_begun = True
            self.upkeep.add(f"its log {self._log.baseFilename}", self._log.renew)
            self.observer.begin()
            self.upkeep.add(f"its folder {self.log_dir}", self._folder.renew)

    def end(self) -> None:
        """Close the log, and give up its folder. Idempotent."""
        self.upkeep.stop()
        self._log.end()
        self.observer.close()
        self._folder.close()

    def identity(self, job: Job, rank: int, node: str) -> WorkerIdentity:
        """Identity of a worker of this run, with the path of its log."""
        return WorkerIdentity(
            run_id=self.id,
            worker_id=f"{job.role}/{rank}",
            role=job.role,
            rank=rank,
            node=node,
            log_path=str(self.log_dir / f"{job.role}-{rank}.log"),
        )


class Launch(NamedTuple):
    """Workers of one job that start together."""

    job: Job
    places: Mapping[int, Placement]
    """By rank. A sibling's place (``Placement.shared``) has devices that its target holds."""
    deadline: Deadline
    undo: contextlib.AsyncExitStack
    """Unwound if the start fails."""


def start_error(
    worker_id: str, node: str, reason: str, log_path: str = "", log_start: int = 0
) -> WorkerStartError:
    """Build the error of a worker that did not start.

    It includes the tail of the worker's log, which begins at byte ``log_start`` of the file.
    """
    role = worker_id.rpartition("/")[0]
    tail = tail_of(log_path, start=log_start) if log_path else ""
    return WorkerStartError(
        role=role, worker_id=worker_id, node=node, reason=reason, log_path=log_path, log_tail=tail
    )


class Backend(abc.ABC):
    """Runs the workers of one scheduler.

    A subclass implements ``launch`` and sets ``allocator`` and ``store`` before ``open`` returns.
    """

    allocator: Allocator
    """Finds places for workers; OneMachine if they all run on this machine."""
    store: HandleStore
    run: Run
    shares_process = False
    """Whether workers are threads of the script's process and share its environment and random
    state.
    """
    same_machine = False
    """Whether a worker gets its whole environment from the script's process."""

    def open(self, run: Run, find_worker: Callable[[str], WorkerClient]) -> None:
        """Acquire the backend's own resources; ``close`` follows even if this fails.

        ``find_worker`` raises WorkerNotFoundError.
        """
        self.run = run

    @abc.abstractmethod
    async def launch(self, start: Launch) -> list[WorkerClient]:
        """Start a worker for each rank at its place; return connected clients in rank order.

        Push the end of each process on ``start.undo`` at once, so that a start that fails leaves
        none. Afterwards ``Transport.kill`` ends a process with all that belongs to it.

        Raises:
            StartError: A worker did not start.
        """

    def guard_platform(self) -> contextlib.ExitStack:
        """Restrict the use of accelerators in the script's process until the scheduler closes."""
        return current_platform.forbid("this process drives workers through a scheduler")

    # All variables are allowed by default.
    def require_environment(self, worker_id: str, env: Mapping[str, str]) -> None:  # noqa: B027
        """Raise InvalidSpecError if the worker cannot be given these variables."""

    def closing(self) -> None:  # noqa: B027 - most do nothing here
        """Hook in the thread that closes the scheduler, before the workers end."""

    async def close(self) -> None:  # noqa: B027 - most hold no resources
        """Free the backend's own resources, after all workers have ended."""
