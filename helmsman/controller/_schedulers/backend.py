"""The contract of a backend: it starts worker processes at places that its allocator finds for
them.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from helmsman.api.errors import WorkerStartError
from helmsman.api.platforms import current_platform
from helmsman.api.scheduler import Job, Timeouts
from helmsman.controller._aio.event_loop import Deadline
from helmsman.controller._node.driver_log import DriverLog
from helmsman.controller._node.run_registry import default_log_dir, new_run_id
from helmsman.controller._placement.allocator import Allocator
from helmsman.controller._placement.placement import Placement
from helmsman.controller._transport.base import tail_of
from helmsman.controller._transport.client import WorkerClient
from helmsman.rpc_server._host.handles import HandleStore
from helmsman.rpc_server._wire.messages import WorkerIdentity


class Run:
    """The facts of a run that all parts of its scheduler share."""

    def __init__(self, seed: int, log_dir: str | Path | None, timeouts: Timeouts | None) -> None:
        self.id = new_run_id()
        self.seed = seed
        self.timeouts = timeouts or Timeouts()
        self.log_dir = Path(log_dir).absolute() if log_dir is not None else default_log_dir(self.id)
        self.log = DriverLog(self.log_dir, self.id)

    def identity(self, job: Job, rank: int, node: str) -> WorkerIdentity:
        """The identity of a worker that starts on a node, with the path of its log."""
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
    """By rank. The place of a sibling (``Placement.shared``) has devices that its target holds."""
    deadline: Deadline
    resources: contextlib.AsyncExitStack


def start_error(
    worker_id: str, node: str, reason: str, log_path: str = "", log_start: int = 0
) -> WorkerStartError:
    """The error of a worker that did not start, with the end of its log, which begins at byte
    ``log_start`` of the file.
    """
    role, tail = (
        worker_id.rpartition("/")[0],
        tail_of(log_path, start=log_start) if log_path else "",
    )
    return WorkerStartError(
        role=role, worker_id=worker_id, node=node, reason=reason, log_path=log_path, log_tail=tail
    )


class Backend(abc.ABC):
    """Runs the workers of one scheduler. A backend sets ``allocator`` and ``store``, in ``open`` at
    the latest, and fills ``launch``; the rest has defaults.
    """

    allocator: Allocator
    """Finds places for workers; OneMachine where they all run on this machine."""
    store: HandleStore
    run: Run
    shares_process = False
    """Whether workers are threads of the script's own process, whose environment and random state
    they share.
    """
    same_machine = False
    """Whether a worker's environment is only what the script's process gives it."""

    def open(self, run: Run, find_worker: Callable[[str], WorkerClient]) -> None:
        """Acquire what the backend itself needs; ``close`` follows in any case. ``find_worker``
        raises WorkerNotFoundError.
        """
        self.run = run

    @abc.abstractmethod
    async def launch(self, start: Launch) -> list[WorkerClient]:
        """Start a process for each rank at its place; returns clients that can reach them, in rank
        order.

        Everything acquired is pushed on ``start.resources`` as it is acquired, so that unwinding it
        ends the processes at once and frees their resources. Raises: StartError.
        """

    def guard_platform(self) -> contextlib.ExitStack:
        """Limits on the use of accelerators in the script's process, in force until the scheduler
        closes.
        """
        return current_platform.forbid("this process drives workers through a scheduler")

    # Any, by default
    def require_environment(self, worker_id: str, env: Mapping[str, str]) -> None:  # noqa: B027
        """Raise InvalidSpecError if a worker cannot be given these variables."""

    def closing(self) -> None:  # noqa: B027 - most have nothing to note
        """Called in the thread that closes the scheduler, before the workers end."""

    async def close(self) -> None:  # noqa: B027 - most hold nothing
        """Free what the backend itself holds, when all workers have ended."""
