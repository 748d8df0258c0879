"""Errors of calls to workers, of group calls and of serialization."""

from __future__ import annotations

from collections.abc import Sequence

from helmsman.api.errors._base import HelmsmanError, _LoggedError, few, quoted, stack_section


class CallError(HelmsmanError):
    """A call to one worker that returned no result."""

    worker_id: str
    engine_name: str | None
    method: str

    @property
    def call(self) -> str:
        """The method with its engine; control calls have no engine."""
        return f"{self.engine_name}.{self.method}" if self.engine_name else self.method


class CallTimeoutError(CallError, _LoggedError, TimeoutError):
    """A call that exceeded its deadline. It is never sent again and may still be running."""

    elapsed_s: float
    limit_s: float
    limit_source: str
    worker_alive: bool
    state: str
    stack: str
    template = (
        "{worker_id}: {call} did not finish within {elapsed_s:.2f} s (limit {limit_s:.2f} s, set "
        "by {limit_source}). The call "
        "was not sent again. The worker is {alive}; {state}. Raise the limit if the call is only "
        "slow, or delete_workers to "
        "end it.{at}{log}"
    )

    @property
    def alive(self) -> str:
        """Whether the worker still answers, as text of the message."""
        return "alive" if self.worker_alive else "not answering"

    @property
    def at(self) -> str:
        """Stack of the engine thread, as text of the message; empty if unknown."""
        return stack_section("is", self.stack)


class WorkerFailedError(CallError, _LoggedError):
    """A worker process that died. The call in flight has no result and is not repeated."""

    node: str
    pid: int | None
    cause: str
    """Predicate of a sentence about the end of the process, such as 'was killed by SIGKILL'."""
    exit_code: int | None = None
    exit_signal: int | None = None
    running: str | None = None
    running_s: float | None = None
    next_step: str = ""
    aftermath: str = ""
    """The state of the other workers and the next step after the loss of a whole cluster; else ''.
    """

    @property
    def role(self) -> str:
        """Role of the worker."""
        return self.worker_id.rpartition("/")[0]

    @property
    def index(self) -> int:
        """Rank in the role; -1 if the id has none."""
        index = self.worker_id.rpartition("/")[2]
        return int(index) if index.isdigit() else -1

    def describe(self) -> str:
        since = f" (running for {self.running_s:.1f} s)" if self.running_s is not None else ""
        doing = f" while {self.running} ran{since}" if self.running else ""
        lost = f" {self.call} has no result and was not sent again." if self.method else ""
        step = (
            self.next_step
            or f"restart_worker({self.worker_id!r}) starts it again, without its engines."
        )
        others = (
            self.aftermath
            or f"Other workers are not affected. {step} delete_workers({self.role!r}) frees the "
            "role's resources."
        )
        pid = "unknown" if self.pid is None else self.pid
        return (
            f"worker {self.worker_id} on node {self.node} (pid {pid}) "
            f"{self.cause}{doing}.{lost} {others}{self.log}"
        )


class EngineExistsError(CallError):
    """A second engine under a name that the worker already holds."""

    method: str = "create_engine"
    engine_type: str
    template = (
        "{worker_id} already holds an engine {engine_name!r} (a {engine_type}). Give "
        "create_engine another engine_name, or "
        "delete the workers first."
    )


class EngineImportError(CallError, ImportError):
    """An engine's import path that the worker cannot resolve."""

    method: str = "create_engine"
    engine_path: str
    reason: str
    template = (
        "{worker_id} cannot import the engine {engine_path!r}: {reason}. The path is "
        "'package.module.Class' and must be "
        "importable in the worker's environment (its sys.path is the driver's); a class can be "
        "passed instead."
    )


class _RemoteError(CallError, _LoggedError):
    """An exception inside an engine; the template names the engine code that raised it."""

    remote_type: str
    remote_message: str
    remote_traceback: str
    node: str = ""

    def describe(self) -> str:
        on = f" on {self.node}" if self.node else ""
        return (
            f"{self.worker_id}{on}: {super().describe()} raised {self.remote_type}: "
            f"{self.remote_message}\n"
            f"  traceback in the worker:\n{quoted(self.remote_traceback)}{self.log}"
        )


class EngineCreationError(_RemoteError):
    """An engine's constructor that raised an exception. The engine name is free again."""

    template = "the constructor of engine {engine_name!r}"


class EngineCreationTimeoutError(EngineCreationError, CallTimeoutError):
    """An engine's constructor that did not return within ``Timeouts.create_engine_s``."""

    method: str = "create_engine"
    remote_type: str = "TimeoutError"
    remote_message: str = ""
    remote_traceback: str = ""
    template = CallTimeoutError.template

    def describe(self) -> str:
        return HelmsmanError.describe(self)


class EngineCallError(_RemoteError):
    """An engine method that raised.

    ``__cause__`` is the original exception, if it could be sent.
    """

    unsent: str = ""
    """Why the original could not be sent, such as 'cannot be pickled'; '' if it was sent."""
    original: bytes | None = None
    """The pickled original exception, as sent to the controller."""
    template = "{call}{without_cause}"

    @property
    def without_cause(self) -> str:
        """Reason why ``__cause__`` is not set, as text of the message."""
        return (
            f" (with an exception that {self.unsent}, so __cause__ is not set)"
            if self.unsent
            else ""
        )


class MethodNotFoundError(EngineCallError, AttributeError):
    """A method that the engine does not have, or that is not callable from outside.

    No engine code ran, so there is no traceback.
    """

    remote_type: str = "AttributeError"
    remote_message: str = "no such public method"
    remote_traceback: str = ""
    engine_type: str
    suggestions: Sequence[str]
    reason: str = ""

    def describe(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        hint = (
            f"Did you mean: {', '.join(self.suggestions)}?"
            if self.suggestions
            else f"Call a method of {self.engine_type} without a leading underscore."
        )
        return (
            f"{self.worker_id}: engine {self.engine_name!r} (a {self.engine_type}) has no public "
            f"method {self.method!r}"
            f"{because}. {hint}"
        )


class _PayloadError(CallError):
    path: str
    value_type: str
    reason: str


class ArgumentNotSerializableError(_PayloadError, TypeError):
    """An argument that cannot be pickled. Nothing was sent."""

    template = (
        "{worker_id}: {call}: the argument {path} (a {value_type}) cannot be sent to a worker: "
        "{reason}. Nothing was sent. "
        "Leave it out, or build it inside the engine."
    )


class ArgumentNotLoadableError(_PayloadError):
    """An argument that the worker could not unpickle. The method did not run."""

    template = (
        "{worker_id}: {call}: the worker could not load {path} ({value_type}): {reason}. The "
        "method did not run. A module that "
        "exists only in the driver must be importable in the worker too."
    )


class ResultNotSerializableError(_PayloadError, TypeError):
    """A result that cannot be pickled. The method ran and is not repeated."""

    template = (
        "{worker_id}: {call} ran, but its {path} (a {value_type}) cannot be sent back: {reason}. "
        "The call is not repeated. "
        "Return plain data, or keep the object in the engine."
    )


class PeerNotReadyError(CallError):
    """Another rank of the model-parallel group failed before a collective call. No rank ran it."""

    ranks: Sequence[int]
    reason: str
    template = (
        "{worker_id}: {call} did not run, because rank(s) {ranks} of its model-parallel group "
        "were not ready: {reason}. Look "
        "at the error of that rank first."
    )


class WorkerBacklogError(CallError):
    """A request that was not sent because the worker has not yet received earlier ones."""

    num_bytes: int
    num_waiting_bytes: int
    limit_bytes: int
    template = (
        "{worker_id}: {call} was not sent ({num_bytes} bytes): {num_waiting_bytes} bytes of "
        "earlier requests wait here for the "
        "worker to take them, and the limit is {limit_bytes}. Its process is stopped, or the "
        "connection is slow. Await earlier "
        "calls before making more, look at status() and stacks(), or end the worker with "
        "delete_workers."
    )


class HandleLostError(CallError, LookupError):
    """A result handle whose value no longer exists: it was released, or its worker died."""

    engine_name: str | None = None
    method: str = ""
    handle_id: str
    reason: str
    template = (
        "the value of handle {handle_id} (made by {worker_id}) no longer exists: {reason}. "
        "Produce it again with the call that returned the handle."
    )


class GroupCallError(HelmsmanError):
    """A call that failed on some of its ranks.

    ``first`` is the root cause, and the ``__cause__``.
    """

    role: str
    method: str
    first: HelmsmanError
    errors: dict[str, HelmsmanError]
    num_ranks: int

    def describe(self) -> str:
        others = list(self.errors)[1:]
        collateral = (
            f" ({len(others)} other rank(s) failed as well: {', '.join(others[:8])})"
            if others
            else ""
        )
        return (
            f"{self.role}: {self.method} failed on {len(self.errors)} of {self.num_ranks} "
            f"ranks{collateral}. Root cause:\n"
            f"{quoted(str(self.first))}"
        )


class RendezvousError(HelmsmanError, ConnectionError):
    """The ranks of a role cannot connect to rank 0, or rank 0 cannot listen on the master port."""

    role: str
    address: str
    port: int
    source: str
    refused: str
    """The operating system's error if rank 0 could not listen; else ''."""
    reached: Sequence[str]
    """Ids of the workers that reached rank 0."""
    failed: dict[str, str]
    """Worker id -> the operating system's error, for workers that did not reach rank 0. Empty if
    rank 0 could not listen.
    """

    def describe(self) -> str:
        if self.refused:
            what = f"rank 0 cannot listen on port {self.port}: {self.refused}"
            step = (
                "End the process that uses the port on that node, or delete the role and create "
                "it again, which leases another port."
            )
        else:
            reasons = dict.fromkeys(self.failed.values())
            groups = [
                (reason, [each for each in self.failed if self.failed[each] == reason])
                for reason in reasons
            ]
            why = "; ".join(f"{reason}: {few(workers)}" for reason, workers in groups)
            num_ranks = len(self.failed) + len(self.reached)
            what = (
                f"{len(self.failed)} of {num_ranks} ranks do not reach rank 0 ({why}); reached "
                f"by {few(self.reached)}"
            )
            step = (
                "Check that the nodes can reach each other at these addresses, and that no "
                "firewall blocks the ports of "
                "HELMSMAN_PORT_RANGE between them."
            )
        return (
            f"the ranks of role {self.role!r} cannot connect to each other at "
            f"{self.address}:{self.port}: {what}. Source: {self.source}. {step}"
        )


class DispatchError(HelmsmanError, TypeError):
    """A declaration, argument or result that does not fit the dispatch mode of a group method."""

    method: str
    reason: str
    step: str
    template = "{method}: {reason}. {step}."


class UnevenBatchError(HelmsmanError, ValueError):
    """Rows that do not divide over the ranks, for a method declared with ``remainder="error"``."""

    num_rows: int
    divisor: int
    derivation: str = ""
    what: str = "a batch"

    @property
    def nearest(self) -> list[int]:
        """Numbers of rows next to this one that the divisor divides."""
        below = self.num_rows // self.divisor * self.divisor
        return [size for size in (below, below + self.divisor) if size]

    def describe(self) -> str:
        derived = f": {self.derivation} = {self.divisor}" if self.derivation else ""
        return (
            f"{self.what} of {self.num_rows} rows does not divide over {self.divisor} "
            f"parts{derived}; nearest valid sizes: "
            f"{' and '.join(map(str, self.nearest))}. Give one of these, or declare "
            "remainder='pad' (the last row is repeated "
            "and masked) or remainder='uneven' (some ranks get one row more)."
        )


class TopologyMismatchError(HelmsmanError):
    """Workers whose coordinates differ from those that the controller computed."""

    cluster: str
    num_ranks: int
    differences: dict[str, tuple[str, str]]
    """Worker id -> (coordinates by the controller, coordinates by the worker)."""

    def describe(self) -> str:
        differences = self.differences
        width = max(map(len, differences))
        rows = [
            f"  {name.ljust(width)}  {ours}; worker: {theirs}"
            for name, (ours, theirs) in list(differences.items())[:16]
        ]
        more = [f"  and {len(differences) - 16} more"] if len(differences) > 16 else []
        return (
            f"{len(differences)} of the {self.num_ranks} ranks of cluster {self.cluster!r} "
            "report different coordinates than worker_config assigns, so batches would go to the "
            "wrong ranks. Set the sizes and mesh of worker_config to those of the ranks' parallel "
            "groups.\n" + "\n".join([*rows, *more])
        )


class CodecError(HelmsmanError):
    """A payload that cannot be packed or unpacked.

    Callers convert it to a CallError that names the call.
    """

    path: str
    value_type: str
    reason: str
    template = "{path} (a {value_type}): {reason}"


class NotSerializableError(CodecError, TypeError):
    """A value that cannot be pickled; ``path`` locates the field that causes it."""


class NotLoadableError(CodecError):
    """Bytes that this process cannot unpickle."""


class ProtocolError(HelmsmanError):
    """A peer that broke the wire protocol or did not authenticate as part of the run."""
