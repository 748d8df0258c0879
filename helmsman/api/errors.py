"""Every error that Helmsman raises, in one tree.

HelmsmanError
├── JobError (ValueError)                 the job as described can never start
│   ├── InvalidReplicasError
│   ├── TaskCountError
│   ├── InvalidSpecError
│   ├── JobsFileError
│   └── RoleExistsError
├── NotFoundError (LookupError)           a name that this scheduler does not know
│   ├── RoleNotFoundError
│   ├── WorkerNotFoundError
│   └── EngineNotFoundError
├── BackendError
│   ├── BackendNotInstalledError (ImportError)
│   ├── UnknownBackendError (ValueError)
│   ├── AmbiguousAddressError (ValueError)
│   ├── ClusterNotFoundError (ConnectionError)
│   ├── ClusterNotUpError (RuntimeError)
│   ├── NodesMissingError (TimeoutError)
│   ├── RayStartError
│   └── ClusterLostError (ConnectionError)  the Ray that a scheduler has started has ended
├── LauncherError (ValueError)            flags and variables that do not say which node of how many this is
│   ├── LauncherConflictError
│   └── LauncherIncompleteError
├── BootstrapError                        a cluster that does not come up, or that this node has to leave; has an exit_code
│   ├── UnfitNodeError (ValueError)       this node cannot take part as it is
│   ├── NotJoinedError (TimeoutError)     nodes, or the head, have not come within the time
│   ├── NodeRefusedError                  the head does not take this node
│   ├── RayDiedError                      Ray's own processes on this node have ended
│   ├── HeadLostError (ConnectionError)   the head cannot be reached any more
│   └── StrangeClusterError (ConnectionError)  what answers at the address is not this run's cluster
├── StartError                            nothing of the job remains when one of these is raised
│   ├── PlacementInfeasibleError
│   ├── PlacementTimeoutError (TimeoutError)
│   └── WorkerStartError
├── CallError                             one call to one worker
│   ├── CallTimeoutError (TimeoutError)
│   ├── WorkerFailedError
│   ├── EngineExistsError
│   ├── EngineImportError (ImportError)
│   ├── EngineCreationError
│   ├── MethodNotFoundError (AttributeError)
│   ├── EngineCallError
│   │   └── ExceptionNotSerializableError
│   ├── ArgumentNotSerializableError (TypeError)
│   ├── ArgumentNotLoadableError
│   ├── ResultNotSerializableError (TypeError)
│   ├── PeerNotReadyError
│   └── HandleLostError (LookupError)
├── GenerationError                       one generation request
│   ├── InstanceLostError (ConnectionError)  its instance has gone
│   ├── RequestDeadlineError (TimeoutError)
│   └── RequestsInFlightError (TimeoutError) they have not ended, or come back, in time
├── ServerError                           an inference server that an engine runs as a process
│   ├── ServerStartError                  it did not get ready
│   └── ServerRequestError                it refused a request, or answered what is no answer
├── FaultPlanError (ValueError)           a fault plan that makes no sense
├── FaultsUnsupportedError                workers that are no processes of their own
├── EpisodeTimeoutError (TimeoutError)    an episode of a workflow took too long
├── WorkflowFailuresError                 too many episodes have failed
├── EngineDeadError (ConnectionError)     what an engine runs in other processes has ended
│   └── ServerLostError                   its inference server has ended, or the connection to it broke
├── RewardError                           one score of a RewardPool
│   ├── RewardTimeoutError (TimeoutError)
│   ├── RewardLostError                   its worker has gone
│   └── RewardWorkersSpentError           no worker is left, and none comes back
├── RendezvousError (ConnectionError)     the ranks of a role cannot meet at the master's address
├── GroupCallError                        several ranks failed, root cause first
├── CheckpointError                       a checkpoint that cannot be loaded
├── OutOfTurnError                        what needs devices that another role has now
├── DeviceMemoryError                     devices without room, on which two roles take turns
├── RecoveryExhaustedError                train workers were lost more often than is tolerated
├── DispatchError (TypeError)             arguments or results that do not go with how a method is dispatched
├── UnevenBatchError (ValueError)         rows that do not divide over the ranks
├── TopologyMismatchError                 workers that see other coordinates than the controller has computed
├── ParallelLayoutError (ValueError)      sizes of a parallel layout that do not divide
├── ResourcesNotMetError                  nodes or devices that a ResourceManager was told of and the cluster does not have
├── CodecError                            a payload that cannot be packed or unpacked
│   ├── NotSerializableError (TypeError)
│   └── NotLoadableError
├── ProtocolError                         a peer broke the wire protocol or failed to prove itself
├── PlatformError
│   ├── DeviceMismatchError               a process that does not see the devices that it was granted
│   └── PlatformPicklingError (TypeError)
├── SchedulerClosedError
├── ShutdownIncompleteError
└── UntrustedPathError (PermissionError)  a file or directory that another user can have put there

To add an error: subclass the branch it belongs to, take fields as keyword-only arguments, pass the finished message and
the fields to ``super().__init__``, put the next step for the user last, and give the test table in tests/api/test_errors.py a
row. Pickling needs nothing: errors are rebuilt from their message and ``__dict__`` without running ``__init__`` again.
"""

from __future__ import annotations

import reprlib
import signal
from collections.abc import Sequence
from typing import Any


def _rebuild(cls: type[HelmsmanError], message: str, state: dict[str, Any]) -> HelmsmanError:
    error = cls.__new__(cls)
    # The built-in __init__ must run: without it a TimeoutError comes back without its message, an ImportError without msg.
    super(HelmsmanError, error).__init__(message)
    error.__dict__.update(state)
    return error


class HelmsmanError(Exception):
    """Base of all our errors; ``fields`` given to it become attributes and survive pickling."""

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.__dict__.copy())


# --- jobs -------------------------------------------------------------------------------------------------------------


class JobError(HelmsmanError, ValueError):
    """A job that can never start as it is described."""

    role: str


class InvalidReplicasError(JobError):
    """A job that asks for fewer than one replica."""

    replicas: int

    def __init__(self, *, role: str, replicas: int) -> None:
        super().__init__(
            f"job {role!r} asks for {replicas} replicas; a job needs at least 1. Set Job.replicas to 1 or more, "
            "or leave the job out.",
            role=role,
            replicas=replicas,
        )


class TaskCountError(JobError):
    """A job whose number of specs is neither one nor its number of replicas."""

    replicas: int
    num_tasks: int

    def __init__(self, *, role: str, replicas: int, num_tasks: int) -> None:
        super().__init__(
            f"job {role!r} has {num_tasks} scheduling specs for {replicas} replicas; give either 1 spec, which all replicas "
            f"share, or {replicas}, one for each.",
            role=role,
            replicas=replicas,
            num_tasks=num_tasks,
        )


class InvalidSpecError(JobError):
    """A field of a job or of its specs that has no meaning."""

    field: str
    value: Any

    def __init__(self, *, role: str, field: str, value: Any, expected: str) -> None:
        super().__init__(
            f"job {role!r}: {field} is {value!r}; expected {expected}.", role=role, field=field, value=value, expected=expected
        )


class JobsFileError(JobError):
    """A file of jobs or nodes that cannot be read."""

    path: str
    where: str

    def __init__(self, *, path: str, where: str, reason: str) -> None:
        super().__init__(f"{path}: {where}: {reason}.", role="", path=path, where=where, reason=reason)


class RoleExistsError(JobError):
    """A second job under the name of a role that runs."""

    def __init__(self, *, role: str, num_workers: int) -> None:
        super().__init__(
            f"role {role!r} already runs with {num_workers} workers in this scheduler. Call delete_workers({role!r}) first, or "
            "name the new job otherwise.",
            role=role,
            num_workers=num_workers,
        )


# --- names ------------------------------------------------------------------------------------------------------------


class NotFoundError(HelmsmanError, LookupError):
    """A name that is not known; the message lists the names that are."""

    name: str
    known: tuple[str, ...]

    _kind = "name"
    _next_step = ""

    def __init__(self, *, name: str, known: Sequence[str], where: str = "this scheduler") -> None:
        shown = ", ".join(sorted(known)[:20]) or "none"
        more = f" and {len(known) - 20} more" if len(known) > 20 else ""
        super().__init__(
            f"no {self._kind} {name!r} in {where}; it has: {shown}{more}. {self._next_step}".rstrip(),
            name=name,
            known=tuple(known),
            where=where,
        )


class RoleNotFoundError(NotFoundError):
    """A role for which no workers exist."""

    _kind = "role"
    _next_step = "Create its workers with create_workers(job) first."


class WorkerNotFoundError(NotFoundError):
    """A worker id that no running role has."""

    _kind = "worker"
    _next_step = "Ids are 'role/index', as create_workers returned them."


class EngineNotFoundError(NotFoundError):
    """An engine name that the worker does not hold."""

    _kind = "engine"
    _next_step = "Create it with create_engine first; its default name is the worker's id."


# --- backends ---------------------------------------------------------------------------------------------------------


class BackendError(HelmsmanError):
    """A scheduler backend that cannot be used."""


class BackendNotInstalledError(BackendError, ImportError):
    """A backend whose package is missing; the message has the command that installs it."""

    backend: str
    package: str

    def __init__(self, *, backend: str, package: str, command: str) -> None:
        super().__init__(
            f"{backend} needs the package {package!r}, which is not installed in this environment. Install it with: {command}",
            backend=backend,
            package=package,
            command=command,
        )


class UnknownBackendError(BackendError, ValueError):
    """A scheduler name that does not exist."""

    backend: str

    def __init__(self, *, backend: str, known: Sequence[str]) -> None:
        super().__init__(
            f"there is no scheduler {backend!r}; choose one of: {', '.join(known)}.", backend=backend, known=tuple(known)
        )


class AmbiguousAddressError(BackendError, ValueError):
    """More than one cluster could be meant."""

    candidates: tuple[str, ...]

    def __init__(self, *, asked: str, candidates: Sequence[str], step: str) -> None:
        super().__init__(
            f"{asked} could mean more than one Ray cluster: {'; '.join(candidates)}. {step}.",
            asked=asked,
            candidates=tuple(candidates),
        )


class ClusterNotFoundError(BackendError, ConnectionError):
    """No cluster where one is asked for."""

    def __init__(self, *, asked: str, reason: str) -> None:
        super().__init__(
            f"there is no Ray cluster at {asked!r}: {reason}. Start one and give its address as address= or in RAY_ADDRESS, or "
            "use address='local' for an embedded one.",
            asked=asked,
            reason=reason,
        )


class ClusterNotUpError(BackendError, RuntimeError):
    """A launcher has started the script on several nodes without a Ray cluster that spans them."""

    launcher: str
    said: tuple[str, ...]
    command: str

    def __init__(self, *, launcher: str, said: Sequence[str], command: str) -> None:
        super().__init__(
            f"Ray was not started (this node is one of several, by {launcher}: {', '.join(said)}): no cluster is given, "
            "expected one of all nodes; with a Ray of its own, each node would run this script alone. Start one process on "
            f"every node with `{command}`. Or give a cluster in RAY_ADDRESS; RAY_ADDRESS=local starts Ray on this node alone.",
            launcher=launcher,
            said=tuple(said),
            command=command,
        )


class NodesMissingError(BackendError, TimeoutError):
    """Fewer nodes have joined the cluster than the script expects."""

    num_expected: int
    present: tuple[str, ...]

    def __init__(self, *, num_expected: int, present: Sequence[str], elapsed_s: float, limit_s: float) -> None:
        super().__init__(
            f"{num_expected} nodes are expected and {len(present)} have joined within {elapsed_s:.1f} s (limit {limit_s:.1f} "
            f"s, Timeouts.start_s); present: {', '.join(present) or 'none'}. Look at the log of the nodes that are not in this "
            "list, or lower num_nodes.",
            num_expected=num_expected,
            present=tuple(present),
            elapsed_s=elapsed_s,
            limit_s=limit_s,
        )


class RayStartError(BackendError):
    """An embedded Ray that did not start."""

    reason: str
    processes: tuple[str, ...]
    """Those of its processes that were there when it was given up, each with its state."""

    def __init__(self, *, reason: str, processes: Sequence[str], log_path: str = "", log_tail: str = "") -> None:
        super().__init__(
            f"no Ray of its own could be started on this machine: {reason.rstrip('.')}. "
            f"When it was given up, these of its processes were there: {', '.join(processes) or 'none'}; they were ended. See "
            "what Ray logged, and whether the machine has memory, processes (ulimit -u) and space under its temporary folder "
            "left; or start a cluster with `ray start --head` and give its address."
            f"{_log_section(log_path, log_tail)}",
            reason=reason,
            processes=tuple(processes),
            log_path=log_path,
            log_tail=log_tail,
        )


class ClusterLostError(BackendError, ConnectionError):
    """The embedded Ray of a scheduler has ended, and all of its workers with it."""

    cause: str
    """The process that ended first and how, as 'gcs_server (pid 7) was ended by SIGSEGV'."""
    exit_code: int | None
    exit_signal: int | None
    log_path: str
    """The log of that process."""
    log_tail: str

    def __init__(
        self,
        *,
        cause: str,
        exit_code: int | None = None,
        exit_signal: int | None = None,
        log_path: str = "",
        log_tail: str = "",
    ) -> None:
        super().__init__(
            f"the Ray that this scheduler started has ended, and its workers with it: {cause}. Close the scheduler and start "
            f"another; this process can do so.{_log_section(log_path, log_tail)}",
            cause=cause,
            exit_code=exit_code,
            exit_signal=exit_signal,
            log_path=log_path,
            log_tail=log_tail,
        )


# --- launchers --------------------------------------------------------------------------------------------------------


class LauncherError(HelmsmanError, ValueError):
    """Flags and the variables of launchers do not say which node of how many this is."""


class LauncherConflictError(LauncherError):
    """Two sources say different things of the same."""

    field: str
    said: tuple[str, ...]

    def __init__(self, *, field: str, said: Sequence[str], flag: str) -> None:
        super().__init__(
            f"sources disagree on the {field}: {'; '.join(said)}. Start helmsman with {flag}, which settles it, or without the "
            "variables of the launcher that is not meant.",
            field=field,
            said=tuple(said),
        )


class LauncherIncompleteError(LauncherError):
    """A launcher was found, and what it says is not enough or makes no sense."""

    launcher: str
    missing: tuple[str, ...]
    said: tuple[str, ...]

    def __init__(self, *, launcher: str, missing: Sequence[str], said: Sequence[str]) -> None:
        super().__init__(
            f"{launcher} says {', '.join(said) or 'nothing more'}; missing is {' and '.join(missing)}. Give it as a flag, "
            "the same way on every node.",
            launcher=launcher,
            missing=tuple(missing),
            said=tuple(said),
        )


# --- bootstrap --------------------------------------------------------------------------------------------------------


class BootstrapError(HelmsmanError):
    """A cluster that does not come up, or that this node has to leave.

    Args:
        log: the end of what the failing program has printed.
    """

    exit_code: int = 90
    """With which ``helmsman up`` ends."""

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(f"{message}; the end of what it printed:\n{log}" if log else message)


class UnfitNodeError(BootstrapError, ValueError):
    """This node cannot take part as it is: a port, its address, its shared memory, or what it was told."""

    exit_code = 90


class NotJoinedError(BootstrapError, TimeoutError):
    """Nodes, or the head, have not come within the time, or left before the run began."""

    exit_code = 91


class NodeRefusedError(BootstrapError):
    """The head does not take this node: another token, other versions, a rank that is taken."""

    exit_code = 92


class RayDiedError(BootstrapError):
    """Ray's own processes on this node have ended, or did not start."""

    exit_code = 93


class HeadLostError(BootstrapError, ConnectionError):
    """The head cannot be reached any more; whether the run goes on is not known here."""

    exit_code = 94


class StrangeClusterError(BootstrapError, ConnectionError):
    """What answers at the address is not the cluster of this run."""

    exit_code = 95


# --- starts -----------------------------------------------------------------------------------------------------------


class StartError(HelmsmanError):
    """A job that could not start. Starts are atomic: nothing of the job remains."""

    role: str


class PlacementInfeasibleError(StartError):
    """The cluster, even empty, has not what the jobs ask for."""

    requested: str
    observed: str
    shortfall: str
    change: str
    best_node: str

    def __init__(self, *, role: str, requested: str, observed: str, shortfall: str, change: str, best_node: str = "") -> None:
        super().__init__(
            f"role {role!r} cannot be placed on this cluster, now or later: requested {requested}; observed {observed}; "
            f"short of {shortfall}. {change}.",
            role=role,
            requested=requested,
            observed=observed,
            shortfall=shortfall,
            change=change,
            best_node=best_node,
        )


class PlacementTimeoutError(StartError, TimeoutError):
    """The cluster has what the job asks for, but others held it until the deadline."""

    elapsed_s: float
    limit_s: float
    state: str
    """What it waits for, for the log of a start that goes on waiting."""

    def __init__(self, *, role: str, requested: str, free: str, holders: str, elapsed_s: float, limit_s: float) -> None:
        state = f"requested {requested}; free now {free}; held by {holders}"
        super().__init__(
            f"role {role!r} was not placed within {elapsed_s:.1f} s (limit {limit_s:.1f} s): {state}. Its placement groups "
            "were removed. Wait for the holder, ask for less, or raise Timeouts.start_s.",
            role=role,
            requested=requested,
            free=free,
            holders=holders,
            elapsed_s=elapsed_s,
            limit_s=limit_s,
            state=f"role {role!r}, for {elapsed_s:.0f} of at most {limit_s:.0f} s: {state}",
        )


class WorkerStartError(StartError):
    """A worker process that did not come up."""

    worker_id: str
    reason: str
    log_tail: str

    def __init__(self, *, role: str, worker_id: str, node: str, reason: str, log_path: str = "", log_tail: str = "") -> None:
        super().__init__(
            f"worker {worker_id} of role {role!r} did not start on node {node}: {reason}. All workers of the role were taken "
            f"down again.{_log_section(log_path, log_tail)}",
            role=role,
            worker_id=worker_id,
            node=node,
            reason=reason,
            log_path=log_path,
            log_tail=log_tail,
        )


# --- calls ------------------------------------------------------------------------------------------------------------


def _log_section(log_path: str, log_tail: str) -> str:
    if not log_tail:
        return f"\n  log: {log_path}" if log_path else ""
    lines = log_tail.rstrip("\n").split("\n")
    return f"\n  log: {log_path}, last {len(lines)} lines:\n" + "\n".join(f"  | {line}" for line in lines)


def signal_name(number: int) -> str:
    """The name of a signal number, such as ``SIGKILL``; ``signal 99`` for one that has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _operation(engine_name: str | None, method: str) -> str:
    return f"{engine_name}.{method}" if engine_name else method


class CallError(HelmsmanError):
    """A call to one worker that did not return a result."""

    worker_id: str
    engine_name: str | None
    method: str


class CallTimeoutError(CallError, TimeoutError):
    """A call that outlived its deadline. It is never sent again and may still be running."""

    elapsed_s: float
    limit_s: float
    worker_alive: bool
    stack: str

    def __init__(
        self,
        *,
        worker_id: str,
        engine_name: str | None,
        method: str,
        elapsed_s: float,
        limit_s: float,
        limit_source: str,
        worker_alive: bool,
        state: str,
        stack: str,
        log_path: str = "",
    ) -> None:
        alive = "alive" if worker_alive else "not answering"
        at = f"\n  its engine thread is at:\n{_indent(stack)}" if stack else ""
        super().__init__(
            f"{worker_id}: {_operation(engine_name, method)} did not finish within {elapsed_s:.2f} s (limit {limit_s:.2f} s, "
            f"set by {limit_source}). The call was not sent again. The worker is {alive}; {state}. Raise the limit if the call "
            f"is only slow, or delete_workers to end it.{at}{_log_section(log_path, '')}",
            worker_id=worker_id,
            engine_name=engine_name,
            method=method,
            elapsed_s=elapsed_s,
            limit_s=limit_s,
            limit_source=limit_source,
            worker_alive=worker_alive,
            state=state,
            stack=stack,
            log_path=log_path,
        )


def _indent(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.rstrip("\n").split("\n"))


class WorkerFailedError(CallError):
    """A worker process that died; the call that was in flight has no result and was not repeated."""

    role: str
    index: int
    node: str
    pid: int | None
    cause: str
    """How it ended, as 'was killed by SIGKILL'."""
    exit_code: int | None
    exit_signal: int | None
    running: str | None
    running_s: float | None
    log_path: str
    log_tail: str
    aftermath: str
    """Sentences about the other workers and the next step if a whole cluster was lost; else ''."""

    def __init__(
        self,
        *,
        worker_id: str,
        engine_name: str | None,
        method: str,
        node: str,
        pid: int | None,
        cause: str,
        exit_code: int | None = None,
        exit_signal: int | None = None,
        running: str | None = None,
        running_s: float | None = None,
        log_path: str = "",
        log_tail: str = "",
        next_step: str = "",
        aftermath: str = "",
    ) -> None:
        role, _, index = worker_id.rpartition("/")
        since = f" (running for {running_s:.1f} s)" if running_s is not None else ""
        doing = f" while {running} ran{since}" if running else ""
        lost = f" {_operation(engine_name, method)} has no result and was not sent again." if method else ""
        step = next_step or f"restart_worker({worker_id!r}) starts it again, without its engines."
        others = aftermath or f"Other workers are unharmed. {step} delete_workers({role!r}) frees what the role holds."
        super().__init__(
            f"worker {worker_id} on node {node} (pid {pid if pid is not None else 'unknown'}) {cause}{doing}.{lost} {others}"
            f"{_log_section(log_path, log_tail)}",
            worker_id=worker_id,
            engine_name=engine_name,
            method=method,
            role=role,
            index=int(index) if index.isdigit() else -1,
            node=node,
            pid=pid,
            cause=cause,
            exit_code=exit_code,
            exit_signal=exit_signal,
            running=running,
            running_s=running_s,
            log_path=log_path,
            log_tail=log_tail,
            aftermath=aftermath,
        )


class EngineExistsError(CallError):
    """A second engine under a name that the worker already holds."""

    def __init__(self, *, worker_id: str, engine_name: str, engine_type: str) -> None:
        super().__init__(
            f"{worker_id} already holds an engine {engine_name!r} (a {engine_type}). Give create_engine another engine_name, "
            "or delete the workers first.",
            worker_id=worker_id,
            engine_name=engine_name,
            method="create_engine",
            engine_type=engine_type,
        )


class EngineImportError(CallError, ImportError):
    """An engine's import path that leads nowhere in the worker."""

    engine_path: str

    def __init__(self, *, worker_id: str, engine_name: str, path: str, reason: str) -> None:
        super().__init__(
            f"{worker_id} cannot import the engine {path!r}: {reason}. The path is 'package.module.Class' and must be "
            "importable in the worker's environment (its sys.path is the driver's); a class can be passed instead.",
            worker_id=worker_id,
            engine_name=engine_name,
            method="create_engine",
            engine_path=path,
            reason=reason,
        )


class _RemoteError(CallError):
    """What an exception inside an engine looked like on the worker."""

    remote_type: str
    remote_message: str
    remote_traceback: str

    _what = ""

    def __init__(
        self,
        *,
        worker_id: str,
        engine_name: str | None,
        method: str,
        remote_type: str,
        remote_message: str,
        remote_traceback: str,
        node: str = "",
        log_path: str = "",
        reason: str = "cannot be pickled",
    ) -> None:
        on = f" on {node}" if node else ""
        what = self._what.format(engine=engine_name, operation=_operation(engine_name, method), reason=reason)
        super().__init__(
            f"{worker_id}{on}: {what} raised {remote_type}: {remote_message}\n"
            f"  traceback in the worker:\n{_indent(remote_traceback)}{_log_section(log_path, '')}",
            worker_id=worker_id,
            engine_name=engine_name,
            method=method,
            remote_type=remote_type,
            remote_message=remote_message,
            remote_traceback=remote_traceback,
            node=node,
            log_path=log_path,
        )


class EngineCreationError(_RemoteError):
    """An engine's constructor that raised; the name is free again."""

    _what = "the constructor of engine {engine!r}"


class EngineCallError(_RemoteError):
    """An engine method that raised. ``__cause__`` is the original exception where it could travel."""

    original: bytes | None = None
    """The pickled original, on its way to the controller."""

    _what = "{operation}"


class ExceptionNotSerializableError(EngineCallError):
    """An engine method raised an exception that cannot be pickled, or is too large: type, message and traceback arrive."""

    _what = "{operation} (with an exception that {reason}, so __cause__ is not set)"


class MethodNotFoundError(CallError, AttributeError):
    """A method that the engine does not have, or may not be called from outside."""

    def __init__(
        self, *, worker_id: str, engine_name: str, method: str, engine_type: str, suggestions: Sequence[str], reason: str = ""
    ) -> None:
        hint = (
            f"Did you mean: {', '.join(suggestions)}?"
            if suggestions
            else f"What may be called are the methods of {engine_type} without a leading underscore."
        )
        super().__init__(
            f"{worker_id}: engine {engine_name!r} (a {engine_type}) has no public method {method!r}"
            f"{' (' + reason + ')' if reason else ''}. {hint}",
            worker_id=worker_id,
            engine_name=engine_name,
            method=method,
            engine_type=engine_type,
            suggestions=tuple(suggestions),
        )


class _PayloadError(CallError):
    path: str
    value_type: str
    reason: str

    _text = ""

    def __init__(
        self, *, worker_id: str, engine_name: str | None, method: str, path: str, value_type: str, reason: str
    ) -> None:
        super().__init__(
            self._text.format(
                who=f"{worker_id}: {_operation(engine_name, method)}", path=path, value_type=value_type, reason=reason
            ),
            worker_id=worker_id,
            engine_name=engine_name,
            method=method,
            path=path,
            value_type=value_type,
            reason=reason,
        )


class ArgumentNotSerializableError(_PayloadError, TypeError):
    """An argument that cannot be pickled; nothing was sent."""

    _text = (
        "{who}: the argument {path} (a {value_type}) cannot be sent to a worker: {reason}. Nothing was sent. Leave it out, or "
        "build it inside the engine."
    )


class ArgumentNotLoadableError(_PayloadError):
    """An argument that the worker could not unpickle; the method did not run."""

    _text = (
        "{who}: the worker could not load {path} ({value_type}): {reason}. The method did not run. A module that exists only "
        "in the driver must be importable in the worker too."
    )


class ResultNotSerializableError(_PayloadError, TypeError):
    """A result that cannot be pickled. The method did run; it is not repeated."""

    _text = (
        "{who} ran, but its {path} (a {value_type}) cannot be sent back: {reason}. The call is not repeated. Return plain "
        "data, or keep the object in the engine."
    )


class PeerNotReadyError(CallError):
    """Another rank of the model-parallel group failed before a collective call; no rank ran it."""

    def __init__(self, *, worker_id: str, engine_name: str | None, method: str, ranks: Sequence[int], reason: str) -> None:
        super().__init__(
            f"{worker_id}: {_operation(engine_name, method)} did not run, because rank(s) {', '.join(map(str, ranks))} of its "
            f"model-parallel group were not ready: {reason}. Look at the error of that rank first.",
            worker_id=worker_id,
            engine_name=engine_name,
            method=method,
            ranks=tuple(ranks),
            reason=reason,
        )


class HandleLostError(CallError, LookupError):
    """A result handle whose value is gone: released, or its worker died."""

    def __init__(self, *, worker_id: str, handle_id: str, reason: str) -> None:
        super().__init__(
            f"the value of handle {handle_id} (made by {worker_id}) is gone: {reason}. Produce it again with the call that "
            "returned the handle.",
            worker_id=worker_id,
            engine_name=None,
            method="",
            handle_id=handle_id,
            reason=reason,
        )


class GenerationError(HelmsmanError):
    """A generation request that failed."""


class InstanceLostError(GenerationError, ConnectionError):
    """The rollout instance that had the request has gone, or could not be reached."""

    instance_id: str
    reason: str
    """What is known of the instance alone."""
    may_have_begun: bool
    """Whether it may have worked on the request."""

    def __init__(self, *, instance_id: str, reason: str, may_have_begun: bool) -> None:
        begun = "may have begun the request" if may_have_begun else "had not begun the request"
        super().__init__(
            f"rollout instance {instance_id} was lost and {begun}: {reason}. Give the generation scheduler a RetryGeneration "
            "policy to have such requests continued on other instances.",
            instance_id=instance_id,
            reason=reason,
            may_have_begun=may_have_begun,
        )


class RequestDeadlineError(GenerationError, TimeoutError):
    """A request did not end within its own deadline; it was aborted."""

    request_id: str
    limit_s: float

    def __init__(self, *, request_id: str, state: str, instance: str, limit_s: float) -> None:
        where = f" on {instance}" if instance else ""
        super().__init__(
            f"request {request_id!r} did not end within {limit_s:g} s (RequestOptions.deadline_s); it was {state}{where}. "
            "Raise the deadline, lower max_new_tokens, or add instances if requests wait long.",
            request_id=request_id,
            limit_s=limit_s,
        )


class RequestsInFlightError(GenerationError, TimeoutError):
    """Requests that had not ended, or been given back, when the wait for it was over; they are where they were."""

    role: str
    in_flight: dict[str, int]
    """Instance -> how many requests it has."""
    num_queued: int
    limit_s: float

    def __init__(
        self, *, role: str, operation: str, in_flight: dict[str, int], num_queued: int, paused: bool, limit_s: float
    ) -> None:
        have = ", ".join(f"{instance} has {num}" for instance, num in in_flight.items()) or "none is in flight"
        state = f"It is paused, and {num_queued} wait" if paused else f"{num_queued} wait"
        advice = (
            "Wait on with wait_idle, end them with abort, or go on with resume" if paused else "Wait on, or end them with abort"
        )
        super().__init__(
            f"role {role!r}: {operation} has waited {round(limit_s, 3):g} s for requests in flight: {have}. {state}. {advice}: "
            "they come to their ends wherever they are.",
            role=role,
            in_flight=in_flight,
            num_queued=num_queued,
            limit_s=limit_s,
        )


class EngineDeadError(HelmsmanError, ConnectionError):
    """An engine's processes, which are not the worker's own, have ended: it serves no more, though its worker lives.

    Engines raise it; a rollout controller takes it for the instance's death.
    """

    engine: str
    reason: str

    def __init__(self, *, engine: str, reason: str) -> None:
        super().__init__(
            f"{engine} can serve no more: {reason}. The worker's log has its last words; a rollout controller with a "
            "SupervisionPolicy builds such an instance anew.",
            engine=engine,
            reason=reason,
        )


class ServerError(HelmsmanError):
    """An inference server that an engine runs as a process of its own."""


class ServerStartError(ServerError):
    """An inference server that did not get ready."""

    command: str
    """Its command line, without the key."""
    address: str
    reason: str
    exit_code: int | None
    """Negative for a signal; None when it was running."""
    elapsed_s: float
    limit_s: float
    log_tail: str

    def __init__(
        self,
        *,
        command: str,
        address: str,
        reason: str,
        exit_code: int | None,
        elapsed_s: float,
        limit_s: float,
        log_tail: str,
        step: str,
    ) -> None:
        super().__init__(
            f"the inference server was to be ready at {address} within {limit_s:g} s, and {reason} after {elapsed_s:.1f} s. "
            f"{step}.\ncommand: {command}\nlast lines of its output:\n{_indented(log_tail.strip() or '(nothing)')}",
            command=command,
            address=address,
            reason=reason,
            exit_code=exit_code,
            elapsed_s=elapsed_s,
            limit_s=limit_s,
            log_tail=log_tail,
        )


class ServerLostError(EngineDeadError):
    """An inference server that has ended, or whose connection broke; what it was generating is lost."""

    address: str
    exit_code: int | None
    """Negative for a signal; None when it was running."""
    log_tail: str

    def __init__(self, *, address: str, reason: str, exit_code: int | None, log_tail: str) -> None:
        HelmsmanError.__init__(
            self,
            f"the inference server at {address} was lost: {reason}. What it had begun was not sent again; give the rollout "
            "controller supervision, so that the instance is built anew, and retries=RetryGeneration() to have its requests "
            f"continued elsewhere.\nlast lines of its output:\n{_indented(log_tail.strip() or '(nothing)')}",
            engine="ServerEngine",
            address=address,
            reason=reason,
            exit_code=exit_code,
            log_tail=log_tail,
        )


class ServerRequestError(ServerError):
    """A request that an inference server refused, or answered by what is no answer to it."""

    route: str
    status: int
    """Of HTTP."""
    answer: str
    """What it said, at most its first 2000 characters."""

    def __init__(self, *, address: str, route: str, status: int, answer: str, expected: str, step: str) -> None:
        answer = answer.strip()[:2000] or "(nothing)"
        super().__init__(
            f"the inference server at {address} answered {route} with status {status}; expected {expected}. {step}.\n"
            f"it said:\n{_indented(answer)}",
            address=address,
            route=route,
            status=status,
            answer=answer,
        )


class FaultPlanError(HelmsmanError, ValueError):
    """A line of a fault plan that cannot be read."""

    line: int
    """From 1; parts of a line that ';' divides have one number."""
    text: str
    found: str
    expected: str

    def __init__(self, *, line: int, text: str, found: str, expected: str) -> None:
        super().__init__(
            f"fault plan, line {line}: {text!r}: found {found} where {expected} is expected. Write 'kill rollout/3 at step 5', "
            "'hang rollout/1 at step 7 for 20 s', 'slow rollout/2 by 3x at step 3 for 60 s' (without 'for', until its end) or "
            "'drop the node of rollout/0 at step 9', one on each line or divided by ';'.",
            line=line,
            text=text,
            found=found,
            expected=expected,
        )


class FaultsUnsupportedError(HelmsmanError):
    """A scheduler whose workers cannot be killed or stopped alone."""

    scheduler: str

    def __init__(self, *, scheduler: str) -> None:
        super().__init__(
            f"{scheduler} has its workers in the script's own process, which a fault would kill or stop with them. Run the "
            "drill on the 'local' or 'ray' scheduler, or leave the fault plan out.",
            scheduler=scheduler,
        )


class EpisodeTimeoutError(HelmsmanError, TimeoutError):
    """An episode of a workflow did not end within its limit; it was cancelled."""

    limit_s: float

    def __init__(self, *, item: object, limit_s: float) -> None:
        super().__init__(
            f"the episode of {_short(item)} did not end within {limit_s:g} s (WorkflowExecutor.episode_timeout_s), and was "
            "cancelled. Raise the limit, lower max_new_tokens, or give what it waits for a limit of its own.",
            limit_s=limit_s,
        )


class WorkflowFailuresError(HelmsmanError):
    """More episodes of a workflow have failed than are tolerated."""

    num_failed: int
    limit: int

    def __init__(self, *, num_failed: int, limit: int, window: int, last: BaseException) -> None:
        super().__init__(
            f"{num_failed} of the last {window} episodes have failed, and {limit} are tolerated "
            f"(WorkflowExecutor.max_failures). The last error was {type(last).__name__}: {last}. Mend the workflow, have it "
            "return nothing for what cannot be used, or tolerate more.",
            num_failed=num_failed,
            limit=limit,
        )


class RewardError(HelmsmanError):
    """A score that could not be computed by a RewardPool."""


class RewardTimeoutError(RewardError, TimeoutError):
    """A score that took longer than the pool's limit."""

    worker_id: str
    elapsed_s: float
    limit_s: float
    stack: str
    """Where the worker's engine thread was; empty for an async function."""

    def __init__(self, *, worker_id: str, call: str, elapsed_s: float, limit_s: float, then: str, stack: str = "") -> None:
        at = f"\n  its engine thread was at:\n{_indent(stack)}" if stack else ""
        super().__init__(
            f"{worker_id}: {call} did not end within {elapsed_s:.2f} s (limit {limit_s:g} s, RewardPool.timeout_s). {then}. "
            f"Raise the limit if the function is only slow.{at}",
            worker_id=worker_id,
            elapsed_s=elapsed_s,
            limit_s=limit_s,
            stack=stack,
        )


class RewardLostError(RewardError):
    """A score that a worker may have begun, and that has no result since the worker has gone. It was not repeated."""

    worker_id: str

    def __init__(self, *, worker_id: str, call: str, reason: str) -> None:
        super().__init__(
            f"{call} has no result and was not repeated, since its worker has gone: {reason}. The others go on, and it is "
            "started anew as often as RewardPool.max_restarts allows. Score the item again where that does no harm.",
            worker_id=worker_id,
        )


class RewardWorkersSpentError(RewardError):
    """No worker of a RewardPool is left, and its budget of restarts is spent."""

    max_restarts: int

    def __init__(self, *, role: str, num_workers: int, max_restarts: int, window_s: float, reason: str) -> None:
        super().__init__(
            f"none of the {num_workers} workers of role {role!r} is left, and {max_restarts} were started anew within "
            f"{window_s:g} s, which is all that is allowed (RewardPool.max_restarts). The last one ended so: {reason}. Mend "
            "the function, or allow more restarts.",
            max_restarts=max_restarts,
        )


class RendezvousError(HelmsmanError, ConnectionError):
    """The ranks of a role cannot meet: rank 0 cannot listen on the master's port, or others do not reach it there."""

    role: str
    address: str
    port: int
    reached: list[str]
    """Worker ids that reached it."""
    failed: dict[str, str]
    """Those that did not, and the operating system's reason; empty when rank 0 could not listen."""

    def __init__(
        self, *, role: str, address: str, port: int, source: str, refused: str, reached: Sequence[str], failed: dict[str, str]
    ) -> None:
        reasons: dict[str, list[str]] = {}
        for worker_id, reason in failed.items():
            reasons.setdefault(reason, []).append(worker_id)
        groups = "; ".join(f"{reason}: {_few(workers)}" for reason, workers in reasons.items())
        if refused:
            what = f"rank 0 cannot listen on port {port}: {refused}"
            step = "End what has that port on its node, or delete the role and create it again, which leases another port."
        else:
            num_ranks = len(failed) + len(reached)
            what = f"{len(failed)} of {num_ranks} ranks do not reach rank 0 ({groups}); reached by {_few(reached)}"
            step = (
                "Check that the nodes reach one another at these addresses, and that no firewall closes the ports of "
                "HELMSMAN_PORT_RANGE between them."
            )
        super().__init__(
            f"role {role!r} cannot meet at {address}:{port}: {what}. Source: {source}. {step}",
            role=role,
            address=address,
            port=port,
            reached=list(reached),
            failed=dict(failed),
        )


def _short(value: object) -> str:
    return reprlib.repr(value)[:120]


def _few(workers: Sequence[str]) -> str:
    more = f" and {len(workers) - 8} more" if len(workers) > 8 else ""
    return ", ".join(workers[:8]) + more or "none"


class GroupCallError(HelmsmanError):
    """A call to several ranks of which some failed; ``first`` is the root cause, also set as ``__cause__``."""

    first: HelmsmanError
    errors: dict[str, HelmsmanError]

    def __init__(
        self, *, role: str, method: str, first: HelmsmanError, errors: dict[str, HelmsmanError], num_ranks: int
    ) -> None:
        others = len(errors) - 1
        collateral = f" ({others} other rank(s) failed as well: {', '.join(list(errors)[1:9])})" if others else ""
        super().__init__(
            f"{role}: {method} failed on {len(errors)} of {num_ranks} ranks{collateral}. Root cause:\n{_indent(str(first))}",
            role=role,
            method=method,
            first=first,
            errors=errors,
            num_ranks=num_ranks,
        )
        self.__cause__ = first


class CheckpointError(HelmsmanError):
    """A checkpoint that the ranks of a training job cannot load."""

    role: str
    path: str

    def __init__(self, *, role: str, path: str, reason: str) -> None:
        super().__init__(
            f"role {role!r} cannot load the checkpoint {path}: {reason.rstrip('.')}. Remove it to go on from the one "
            "before it.",
            role=role,
            path=path,
            reason=reason,
        )


class OutOfTurnError(HelmsmanError):
    """A call that needs devices which are not its role's now."""

    role: str
    method: str
    owner: str

    def __init__(self, *, role: str, method: str, owner: str, next_step: str) -> None:
        super().__init__(
            f"role {role!r}: {method} is out of turn: the devices are {owner}. {next_step}",
            role=role,
            method=method,
            owner=owner,
            next_step=next_step,
        )


class DeviceMemoryError(HelmsmanError):
    """A call that found no room on devices on which two roles take turns."""

    worker_id: str
    method: str
    owner: str
    figures: Sequence[str]

    def __init__(self, *, worker_id: str, method: str, reason: str, owner: str, figures: Sequence[str]) -> None:
        lines = "".join(f"\n  {line}" for line in figures)
        super().__init__(
            f"{worker_id}: {method} found no room: {reason}\n  the devices are {owner}; who holds what:{lines}\n"
            "Give less to the role that holds most: fewer tokens in a micro-batch, gradient checkpointing or offload for the "
            "trainer; a smaller cache, or sleep(level=2), for the rollout.",
            worker_id=worker_id,
            method=method,
            reason=reason,
            owner=owner,
            figures=list(figures),
        )


class RecoveryExhaustedError(HelmsmanError):
    """A train worker was lost, and the job has recovered from as many losses as its RecoveryPolicy allows."""

    role: str
    rank: int
    loss: WorkerFailedError
    num_recoveries: int
    window_s: float
    log_path: str
    checkpoint: str
    """Folder of the last one; '' when there is none."""

    def __init__(
        self, *, loss: WorkerFailedError, num_recoveries: int, window_s: float, checkpoint: str, reason: str = ""
    ) -> None:
        role, rank, log_path = loss.role, loss.index, loss.log_path
        failed = f" The last of them failed: {reason}." if reason else ""
        where = f"go on from {checkpoint}" if checkpoint else "begin again, since there is no checkpoint"
        super().__init__(
            f"role {role!r}: rank {rank} ({loss.worker_id} on node {loss.node}, pid {loss.pid}) {loss.cause}, after "
            f"{num_recoveries} recoveries within {window_s:g} s, which is the most that RecoveryPolicy.max_recoveries allows."
            f"{failed} Mend what ends the workers, or allow more, and start the script again to {where}."
            f"{_log_section(log_path, loss.log_tail)}",
            role=role,
            rank=rank,
            loss=loss,
            num_recoveries=num_recoveries,
            window_s=window_s,
            log_path=log_path,
            checkpoint=checkpoint,
            reason=reason,
        )


class DispatchError(HelmsmanError, TypeError):
    """A declaration, argument or result that does not go with how a group method is dispatched and collected."""

    method: str

    def __init__(self, *, method: str, reason: str, step: str) -> None:
        super().__init__(f"{method}: {reason}. {step}.", method=method, reason=reason)


class UnevenBatchError(HelmsmanError, ValueError):
    """Rows that do not divide over the ranks, where the method is declared to take nothing else."""

    num_rows: int
    divisor: int
    nearest: list[int]

    def __init__(self, *, num_rows: int, divisor: int, derivation: str = "", what: str = "a batch") -> None:
        below = num_rows // divisor * divisor
        nearest = [size for size in (below, below + divisor) if size]
        derived = f": {derivation} = {divisor}" if derivation else ""
        super().__init__(
            f"{what} of {num_rows} rows does not divide over {divisor} parts{derived}; nearest valid sizes: "
            f"{' and '.join(map(str, nearest))}. Give one of these, or declare remainder='pad' (the last row is repeated and "
            "masked) or remainder='uneven' (some ranks get one row more).",
            num_rows=num_rows,
            divisor=divisor,
            derivation=derivation,
            nearest=nearest,
        )


class TopologyMismatchError(HelmsmanError):
    """Workers whose own coordinates are not those that the controller has computed from the configuration."""

    cluster: str
    differences: dict[str, tuple[str, str]]
    """Worker id -> (what the controller computed, what the worker says)."""

    def __init__(self, *, cluster: str, num_ranks: int, differences: dict[str, tuple[str, str]]) -> None:
        width = max(map(len, differences))
        rows = [f"  {name.ljust(width)}  {ours}; it says {theirs}" for name, (ours, theirs) in list(differences.items())[:16]]
        more = [f"  and {len(differences) - 16} more"] if len(differences) > 16 else []
        super().__init__(
            f"{len(differences)} of the {num_ranks} ranks of cluster {cluster!r} see other coordinates than worker_config "
            "gives them, so batches would go to the wrong ranks. Make the sizes and mesh of worker_config those of their "
            "parallel groups.\n" + "\n".join([*rows, *more]),
            cluster=cluster,
            differences=differences,
        )


class ParallelLayoutError(HelmsmanError, ValueError):
    """A model or a world that cannot be divided as the training configuration asks."""

    what: str
    requested: int
    observed: str

    def __init__(self, *, what: str, requested: int, observed: str, step: str) -> None:
        super().__init__(
            f"{what} asks for {requested}, and there is {observed}. {step}.", what=what, requested=requested, observed=observed
        )


class ResourcesNotMetError(HelmsmanError):
    """A ResourceManager that was told of nodes or devices which the cluster does not have."""

    requested: str
    observed: str

    def __init__(self, *, requested: str, observed: str, step: str) -> None:
        super().__init__(
            f"the cluster does not have what the ResourceManager was told of. {step}.\n"
            f"requested:\n{_indented(requested)}\nobserved:\n{_indented(observed)}",
            requested=requested,
            observed=observed,
        )


def _indented(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())


# --- the rest ---------------------------------------------------------------------------------------------------------


class CodecError(HelmsmanError):
    """A payload that cannot be packed or unpacked; callers turn it into a CallError that names the call."""

    path: str
    value_type: str
    reason: str

    def __init__(self, *, path: str, value_type: str, reason: str) -> None:
        super().__init__(f"{path} (a {value_type}): {reason}", path=path, value_type=value_type, reason=reason)


class NotSerializableError(CodecError, TypeError):
    """A value that cannot be pickled; ``path`` leads to the field that is to blame."""


class NotLoadableError(CodecError):
    """Bytes that cannot be unpickled here."""


class ProtocolError(HelmsmanError):
    """A peer that broke the wire protocol or did not prove that it belongs to the run."""


class PlatformError(HelmsmanError):
    """An accelerator that is not what was granted, or is used where it must not be."""


class DeviceMismatchError(PlatformError):
    """A process that does not see the accelerators that it was granted, or sees others."""

    where: str
    granted: str
    mask: str
    counted: str

    def __init__(self, *, where: str, granted: str, mask: str, counted: str, step: str) -> None:
        super().__init__(
            f"{where}: granted {granted or 'no accelerator'}; the raw mask is {mask}; {counted}. {step}.",
            where=where,
            granted=granted,
            mask=mask,
            counted=counted,
        )


class PlatformPicklingError(PlatformError, TypeError):
    """An attempt to pickle the platform, which each process resolves for itself."""

    def __init__(self, *, name: str) -> None:
        super().__init__(
            f"the platform ({name}) cannot be pickled: it belongs to the process that resolved it. Use "
            "helmsman.api.platforms.current_platform inside the worker instead of passing it there.",
            name=name,
        )


class SchedulerClosedError(HelmsmanError):
    """An operation on a scheduler that has been closed, or in a forked child of the process whose scheduler it is."""

    def __init__(self, *, operation: str, in_child: bool = False) -> None:
        what = (
            "in a forked child of the process whose scheduler it is, to which alone its workers answer. Make the call there"
            if in_child
            else "on a scheduler that is closed. Make a new scheduler, or move the call inside its `with` block"
        )
        super().__init__(f"{operation} was called {what}.", operation=operation, in_child=in_child)


class ShutdownIncompleteError(HelmsmanError):
    """Something of ours that could not be removed within the deadline."""

    remaining: tuple[str, ...]

    def __init__(self, *, operation: str, remaining: Sequence[str], elapsed_s: float, command: str) -> None:
        super().__init__(
            f"{operation} left {len(remaining)} thing(s) behind after {elapsed_s:.1f} s: {'; '.join(remaining)}. Remove them "
            f"with: {command}",
            operation=operation,
            remaining=tuple(remaining),
            elapsed_s=elapsed_s,
            command=command,
        )


class UntrustedPathError(HelmsmanError, PermissionError):
    """A file or directory that another user may have planted; nothing was written, read or removed through it."""

    path: str
    owner: str

    def __init__(self, *, path: str, observed: str, expected: str, owner: str) -> None:
        super().__init__(
            f"{path} is not used: it is {observed} of {owner}, expected {expected}. Have it removed, or name another place: "
            "log_dir for logs, else XDG_STATE_HOME, XDG_RUNTIME_DIR or TMPDIR.",
            path=path,
            owner=owner,
        )
