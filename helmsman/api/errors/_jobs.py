"""Errors of jobs, roles, clusters, launchers and accelerators."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, ClassVar

from helmsman.api.errors._base import HelmsmanError, _LoggedError, few, indented


class JobError(HelmsmanError, ValueError):
    """A job whose description is invalid, so that it can never start."""

    role: str


class InvalidSpecError(JobError):
    """An invalid value in a field of a job or its specs."""

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
    """A second job with the name of a running role."""

    num_workers: int
    template = (
        "role {role!r} already runs with {num_workers} workers in this scheduler. Call "
        "delete_workers({role!r}) first, or give "
        "the new job another name."
    )


class NotFoundError(HelmsmanError, LookupError):
    """An unknown name; the message lists the known names."""

    name: str
    known: Sequence[str]
    where: str = "this scheduler"

    kind: ClassVar[str] = "name"
    step: ClassVar[str] = ""

    def describe(self) -> str:
        return (
            f"no {self.kind} {self.name!r} in {self.where}; it has: "
            f"{few(sorted(self.known), 20)}. {self.step}"
        ).rstrip()


class WorkerNotFoundError(NotFoundError):
    """A worker id that belongs to no running role."""

    kind = "worker"
    step = "Ids are 'role/index', as create_workers returned them."


class RoleNotFoundError(WorkerNotFoundError):
    """A role that has no workers."""

    kind = "role"
    step = "Create its workers with create_workers(job) first."


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
        "role {role!r} cannot be placed on this cluster, now or later: requested {requested}; "
        "observed {observed}; short of "
        "{shortfall}. {change}."
    )


class PlacementTimeoutError(StartError, TimeoutError):
    """The cluster is large enough, but other jobs held the resources until the deadline."""

    requested: str
    free: str
    holders: str
    elapsed_s: float
    limit_s: float
    template = (
        "role {role!r} was not placed within {elapsed_s:.1f} s (limit {limit_s:.1f} s): requested "
        "{requested}; free now "
        "{free}; held by {holders}. Its placement groups were removed. Wait for the holder, ask "
        "for less, or raise "
        "Timeouts.start_s."
    )

    @property
    def state(self) -> str:
        """The requested, free and held resources, for the log of a start that is still waiting."""
        return (
            f"role {self.role!r}, for {self.elapsed_s:.0f} of at most {self.limit_s:.0f} s: "
            f"requested {self.requested}; free "
            f"now {self.free}; held by {self.holders}"
        )


class WorkerStartError(StartError, _LoggedError):
    """A worker process that did not start."""

    worker_id: str
    node: str
    reason: str
    template = (
        "worker {worker_id} of role {role!r} did not start on node {node}: {reason}. All workers "
        "of the role were stopped.{log}"
    )


class ResourcesNotMetError(HelmsmanError):
    """The cluster lacks nodes or devices that a ResourceManager expects."""

    requested: str
    observed: str
    step: str

    def describe(self) -> str:
        return (
            f"the cluster does not match the ResourceManager. {self.step}.\n"
            f"requested:\n{indented(self.requested)}\nobserved:\n{indented(self.observed)}"
        )


class SchedulerClosedError(HelmsmanError):
    """An operation on a closed scheduler, or in a forked child of the scheduler's process."""

    operation: str
    in_child: bool = False

    def describe(self) -> str:
        what = (
            "in a forked child of the scheduler's process; workers reply only to that process. "
            "Make the call there"
            if self.in_child
            else "on a scheduler that is closed. Make a new scheduler, or move the call inside "
            "its `with` block"
        )
        return f"{self.operation} was called {what}."


class ShutdownIncompleteError(HelmsmanError):
    """Resources of the run that could not be removed within the deadline."""

    operation: str
    remaining: Sequence[str]
    elapsed_s: float
    command: str

    def describe(self) -> str:
        return (
            f"{self.operation} left {len(self.remaining)} thing(s) behind after "
            f"{self.elapsed_s:.1f} s: "
            f"{'; '.join(self.remaining)}. Remove them with: {self.command}"
        )


class BackendError(HelmsmanError):
    """A scheduler backend that cannot be used."""


class BackendNotInstalledError(BackendError, ImportError):
    """A missing optional package; the message names the command that installs it."""

    backend: str
    package: str
    command: str
    template = (
        "{backend} needs the package {package!r}, which is not installed in this "
        "environment. Install it with: {command}"
    )


class UnknownBackendError(BackendError, ValueError):
    """A scheduler name that does not exist."""

    backend: str
    known: Sequence[str]
    template = "there is no scheduler {backend!r}; choose one of: {known}."


class AmbiguousAddressError(BackendError, ValueError):
    """An address that matches more than one cluster."""

    asked: str
    candidates: Sequence[str]
    step: str

    def describe(self) -> str:
        return (
            f"{self.asked} could mean more than one Ray cluster: {'; '.join(self.candidates)}. "
            f"{self.step}."
        )


class ClusterNotFoundError(BackendError, ConnectionError):
    """No cluster at the requested address."""

    asked: str
    reason: str
    template = (
        "there is no Ray cluster at {asked!r}: {reason}. Start one and give its address as "
        "address= or in RAY_ADDRESS, or use "
        "address='local' for an embedded one."
    )


class ClusterNotUpError(BackendError, RuntimeError):
    """A launcher started the script on several nodes without a Ray cluster that spans them."""

    launcher: str
    said: Sequence[str]
    command: str
    template = (
        "{launcher} started the script on several nodes ({said}), but no Ray cluster is given, so "
        "each node would run the whole script alone. Ray was not started. Start one process on "
        "every node with `{command}`. Or set RAY_ADDRESS to an existing cluster; "
        "RAY_ADDRESS=local starts Ray on this node alone."
    )


class NodesMissingError(BackendError, TimeoutError):
    """Fewer nodes have joined the cluster than the script expects."""

    num_expected: int
    present: Sequence[str]
    elapsed_s: float
    limit_s: float

    def describe(self) -> str:
        return (
            f"{self.num_expected} nodes are expected and {len(self.present)} have joined within "
            f"{self.elapsed_s:.1f} s (limit "
            f"{self.limit_s:.1f} s, Timeouts.start_s); present: "
            f"{', '.join(self.present) or 'none'}. Look at the log of the "
            "nodes that are not in this list, or lower num_nodes."
        )


class RayStartError(BackendError, _LoggedError):
    """An embedded Ray that did not start."""

    reason: str
    processes: Sequence[str]
    """Ray processes that were running when the start was abandoned, each with its state."""

    def describe(self) -> str:
        return (
            f"no embedded Ray could be started on this machine: {self.reason.rstrip('.')}. "
            f"Its running processes were ended: {', '.join(self.processes) or 'none'}. "
            "Read Ray's log, and check that the machine has free memory, processes (ulimit -u) "
            "and space in its temporary "
            "directory; or start a cluster with `ray start --head` and give its "
            f"address.{self.log}"
        )


class ClusterLostError(BackendError, _LoggedError, ConnectionError):
    """The embedded Ray of a scheduler has ended, and all its workers with it.

    The log is that of ``cause``.
    """

    cause: str
    """The process that ended first and how, such as 'gcs_server (pid 7) was ended by SIGSEGV'."""
    exit_code: int | None = None
    exit_signal: int | None = None
    template = (
        "the Ray that this scheduler started has ended, and its workers with it: {cause}. Close "
        "the scheduler and start "
        "another; this process can do so.{log}"
    )


class LauncherError(HelmsmanError, ValueError):
    """Flags and launcher variables conflict, or do not determine this node's rank."""

    said: Sequence[str]
    """The conflicting or insufficient facts, each with its source."""
    problem: str
    step: str
    template = "{problem}. {step}."


class BootstrapExit(enum.IntEnum):
    """Exit codes of ``helmsman up`` if the cluster does not start or this node must leave it."""

    PREFLIGHT = 90
    """This node does not meet the requirements: a port, its address, shared memory or settings."""
    NOT_JOINED = 91
    """Nodes or the head did not join in time, or left before the run began."""
    REFUSED = 92
    """The head rejected this node: wrong token, different versions, or a rank already in use."""
    RAY_DIED = 93
    """Ray's processes on this node have ended, or did not start."""
    HEAD_LOST = 94
    """The connection to the head is lost; whether the run continues there is unknown."""
    CLUSTER_MISMATCH = 95
    """The Ray cluster at the address belongs to another run."""


class BootstrapError(HelmsmanError):
    """A cluster that did not start, or that this node must leave.

    Args:
        message: The message.
        exit_code: Exit code of ``helmsman up``.
        log: End of the output of the program that failed.
    """

    exit_code: BootstrapExit

    def __init__(self, message: str, *, exit_code: BootstrapExit, log: str = "") -> None:
        super().__init__(
            f"{message}; the end of its output:\n{log}" if log else message,
            exit_code=exit_code,
        )


class PreflightError(BootstrapError, ValueError):
    """This node does not meet the requirements of the run."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=BootstrapExit.PREFLIGHT)


class ClusterMismatchError(BootstrapError, ConnectionError):
    """The Ray cluster at this address belongs to another run."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=BootstrapExit.CLUSTER_MISMATCH)


class PlatformError(HelmsmanError):
    """An accelerator that differs from the granted one, or a process that must not use one."""


class DeviceMismatchError(PlatformError):
    """A process that does not see exactly the accelerators that it was granted."""

    where: str
    granted: str
    mask: str
    counted: str
    step: str

    def describe(self) -> str:
        return (
            f"{self.where}: granted {self.granted or 'no accelerator'}; the raw mask is "
            f"{self.mask}; {self.counted}. "
            f"{self.step}."
        )


class LogDirectoryError(HelmsmanError, OSError):
    """The log directory of a run cannot be created or used."""

    path: str
    reason: str
    template = (
        "the logs of this run cannot be kept in {path}: {reason}. Set log_dir to a writable "
        "directory; the default "
        "is below XDG_STATE_HOME, else in the temporary directory (TMPDIR)."
    )


class UntrustedPathError(HelmsmanError, PermissionError):
    """A file or directory that another user may have planted.

    Nothing was written, read or removed through it.
    """

    path: str
    observed: str
    expected: str
    owner: str
    template = (
        "{path} is not used: it is {observed} of {owner}, expected {expected}. Remove it, "
        "or choose another directory: log_dir "
        "for logs, else XDG_STATE_HOME, XDG_RUNTIME_DIR or TMPDIR."
    )
