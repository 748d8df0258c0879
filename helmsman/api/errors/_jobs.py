"""Errors of jobs, of their names, and of their start and end on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from helmsman.api.errors._base import HelmsmanError, _LoggedError, few, indented


class JobError(HelmsmanError, ValueError):
    """A job that can never start as it is described."""

    role: str


class InvalidSpecError(JobError):
    """A field of a job or of its specs that has no meaning."""

    field: str
    value: Any
    expected: str

    def describe(self) -> str:
        return f"job {self.role!r}: {self.field} is {self.value!r}; expected {self.expected}."


class JobsFileError(JobError):
    """A file of jobs or nodes that cannot be read."""

    role: str = ""
    path: str
    where: str
    reason: str
    template = "{path}: {where}: {reason}."


class RoleExistsError(JobError):
    """A second job under the name of a role that runs."""

    num_workers: int
    template = (
        "role {role!r} already runs with {num_workers} workers in this scheduler. Call delete_workers({role!r}) first, or name "
        "the new job otherwise."
    )


class NotFoundError(HelmsmanError, LookupError):
    """A name that is not known; the message lists the names that are."""

    name: str
    known: Sequence[str]
    where: str = "this scheduler"

    kind: ClassVar[str] = "name"
    step: ClassVar[str] = ""

    def describe(self) -> str:
        return f"no {self.kind} {self.name!r} in {self.where}; it has: {few(sorted(self.known), 20)}. {self.step}".rstrip()


class RoleNotFoundError(NotFoundError):
    """A role for which no workers exist."""

    kind = "role"
    step = "Create its workers with create_workers(job) first."


class WorkerNotFoundError(NotFoundError):
    """A worker id that no running role has."""

    kind = "worker"
    step = "Ids are 'role/index', as create_workers returned them."


class EngineNotFoundError(NotFoundError):
    """An engine name that the worker does not hold."""

    kind = "engine"
    step = "Create it with create_engine first; its default name is the worker's id."


class StartError(HelmsmanError):
    """A job that could not start. Starts are atomic: nothing of the job remains."""

    role: str


class PlacementInfeasibleError(StartError):
    """The jobs would not fit even on an empty cluster."""

    requested: str
    observed: str
    shortfall: str
    change: str
    best_node: str = ""
    template = (
        "role {role!r} cannot be placed on this cluster, now or later: requested {requested}; observed {observed}; short of "
        "{shortfall}. {change}."
    )


class PlacementTimeoutError(StartError, TimeoutError):
    """The cluster has what the job asks for, but others held it until the deadline."""

    requested: str
    free: str
    holders: str
    elapsed_s: float
    limit_s: float
    template = (
        "role {role!r} was not placed within {elapsed_s:.1f} s (limit {limit_s:.1f} s): requested {requested}; free now "
        "{free}; held by {holders}. Its placement groups were removed. Wait for the holder, ask for less, or raise "
        "Timeouts.start_s."
    )

    @property
    def state(self) -> str:
        """What it waits for, for the log of a start that goes on waiting."""
        return (
            f"role {self.role!r}, for {self.elapsed_s:.0f} of at most {self.limit_s:.0f} s: requested {self.requested}; free "
            f"now {self.free}; held by {self.holders}"
        )


class WorkerStartError(StartError, _LoggedError):
    """A worker process that did not come up."""

    worker_id: str
    node: str
    reason: str
    template = (
        "worker {worker_id} of role {role!r} did not start on node {node}: {reason}. All workers of the role were taken down "
        "again.{log}"
    )


class ResourcesNotMetError(HelmsmanError):
    """The cluster lacks nodes or devices that a ResourceManager expects."""

    requested: str
    observed: str
    step: str

    def describe(self) -> str:
        return (
            f"the cluster does not have what the ResourceManager was told of. {self.step}.\n"
            f"requested:\n{indented(self.requested)}\nobserved:\n{indented(self.observed)}"
        )


class SchedulerClosedError(HelmsmanError):
    """An operation on a scheduler that has been closed, or in a forked child of the process whose scheduler it is."""

    operation: str
    in_child: bool = False

    def describe(self) -> str:
        what = (
            "in a forked child of the process whose scheduler it is, to which alone its workers answer. Make the call there"
            if self.in_child
            else "on a scheduler that is closed. Make a new scheduler, or move the call inside its `with` block"
        )
        return f"{self.operation} was called {what}."


class ShutdownIncompleteError(HelmsmanError):
    """Something of ours that could not be removed within the deadline."""

    operation: str
    remaining: Sequence[str]
    elapsed_s: float
    command: str

    def describe(self) -> str:
        return (
            f"{self.operation} left {len(self.remaining)} thing(s) behind after {self.elapsed_s:.1f} s: "
            f"{'; '.join(self.remaining)}. Remove them with: {self.command}"
        )
