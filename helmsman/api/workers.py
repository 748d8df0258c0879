"""Workers as seen by the scheduler and by their engines, and handles of values kept in them."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from typing import Any, Literal, NamedTuple

import msgspec

from helmsman.api.suggestions import Suggesting
from helmsman.api.topology import RankInfo


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A running worker process."""

    id: str
    """'role/index'."""
    ip: str
    """Address of its node, as reachable from other nodes."""
    worker_ports: list[str] = []
    """Ports on which the worker itself listens; empty if it needs none."""
    engine_ports: list[str] = []
    """Ports leased to its engine."""
    node_id: str = ""
    """The scheduler's id of its node; distinguishes nodes with the same address."""
    devices: list[str] = []
    """Physical ids of the accelerators that it may use on its node."""


def id_of(worker: str | Worker) -> str:
    """Return the id of a worker, given as its id or as a Worker.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(worker, str):
        return worker
    if isinstance(worker, Worker):
        return worker.id
    raise TypeError(
        f"the worker is {worker!r} (of type {type(worker).__qualname__}), expected its id, as "
        "'role/0', or a Worker"
    )


def ids_of(workers: Collection[str | Worker]) -> list[str]:
    """Return the ids of several workers.

    Raises:
        ValueError: ``workers`` is a single id, whose letters would be taken for ids.
        TypeError: One of them is neither an id nor a Worker.
    """
    if isinstance(workers, str):
        raise ValueError(
            f"worker_ids is {workers!r}; expected a sequence of ids, such as [{workers!r}]"
        )
    return [id_of(worker) for worker in workers]


class WorkerState(Enum):
    """States of a worker: READY -> (OVERDUE -> READY)* -> STOPPED | FAILED."""

    READY = "ready"
    """Accepts calls."""
    OVERDUE = "overdue"
    """A call timed out and still occupies the engine thread. READY again once that call ends."""
    STOPPED = "stopped"
    """Ended on request."""
    FAILED = "failed"
    """The process died."""


ProcessState = Literal["running", "sleeping", "disk", "stopped"]


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's health, also available during a call or while the worker cannot answer.

    A worker cannot answer while C code holds its interpreter's lock, or while its process is
    stopped or swapped out. Its health is then an observation from outside: ``stuck_s`` and
    ``process_state`` are set, engines and counts are ``stuck_s`` old, and ``failed_engines`` is
    empty.
    """

    worker_id: str
    pid: int
    node: str
    engines: dict[str, str]
    """Engine name -> type."""
    running: str | None = None
    """'engine.method' on the engine thread; None when idle."""
    running_s: float | None = None
    """Seconds since that call began."""
    num_queued: int = 0
    """Calls waiting for the engine thread."""
    async_running: dict[str, int] = {}
    """'engine.method' -> calls in flight on the event loop."""
    num_calls: int = 0
    """Engine calls begun since the worker started."""
    cpu_s: float = 0.0
    """CPU seconds of the process."""
    rss_bytes: int = 0
    """Resident memory of the process."""
    ends_in_s: float | None = None
    """Seconds until it ends after a preemption notice; None without one."""
    failed_engines: dict[str, str] = {}
    """Engine name -> why it cannot serve, for engines that report it (InferenceEngine.failure)."""
    failure: str | None = None
    """Why the worker itself cannot serve calls, such as a thread that could not start; else None.
    """
    stuck_s: float | None = None
    """Seconds since its interpreter last ran Python, if it did not answer itself; else None."""
    process_state: ProcessState | None = None
    """State of a worker that did not answer itself. running: a thread computes; sleeping: all
    threads wait; disk: it waits for a disk or for swapped memory; stopped: by a signal or a
    debugger.
    """

    @property
    def answered(self) -> bool:
        """Whether the worker answered itself."""
        return self.stuck_s is None

    @property
    def is_busy(self) -> bool:
        """Whether the worker did not answer, but the kernel reports that it makes progress."""
        return self.process_state in ("running", "disk")


class PreemptionNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A notice that a worker will end soon, alone or with its node."""

    reason: str
    """Part of a sentence: 'its node 10.0.0.3 is being drained'."""
    deadline_s: float | None = None
    """Seconds from now until it ends; None if unknown."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's view of a worker."""

    worker_id: str
    state: WorkerState
    node: str
    pid: int | None
    log_path: str
    health: WorkerHealth | None = None
    """None if the worker did not answer."""


CONTROLLER = "controller"
"""Stands for the worker id in the handle of a value that the script has put."""


class ResultHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A result that stays in its worker.

    As an argument of another call it arrives as the value, which moves from worker to worker.
    """

    id: str
    worker_id: str
    """Worker that produced the value; CONTROLLER for a value from ``put``."""
    location: Any
    """Location of the value, in a form that only its transport can read."""
    nbytes: int
    """Size of the packed value."""
    summary: str
    """A description of the value, for messages."""
    type_name: str = ""
    """Name of the value's type; 'Batch' only for Helmsman's own."""
    length: int | None = None
    """``len()`` of the value, if it has one: rows of batches, tensors and lists."""
    num_padding: int = 0
    """Number of padding rows at the end of a batch."""


class Call(NamedTuple):
    """The arguments of one worker's call in a group of calls."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    rpc_meta: Mapping[str, Any] | None = None
    """Options of the call; see Scheduler.call_engine."""
    payload: Any = None
    """``(args, kwargs)`` packed by Helmsman's codec, for schedulers that send it; ignored by
    others.
    """


class EngineSpec(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """An engine to create, with settings to apply before its constructor."""

    target: str | type[Any]
    """Import path or class."""
    env: dict[str, str] = {}
    """Environment variables, set before the engine's module is imported by path and its constructor
    runs.
    """
    rank_info: RankInfo | None = None
    """Place in a worker group; a GroupWorker has it as an attribute before its constructor runs."""
    kwargs: dict[str, Any] = {}
    """Named arguments of the constructor, for names that create_engine itself uses."""


class Timeouts(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """Time limits by class of operation, in seconds."""

    start_s: float = 300.0
    """create_workers: placement, processes and their first answers, for all workers of the job
    together.
    """
    create_engine_s: float = 1800.0
    """An engine's constructor, including imports and model loading."""
    call_s: float = 7200.0
    """An engine call without its own timeout."""
    health_s: float = 5.0
    """Control operations: health, stacks, set_env."""
    shutdown_s: float = 8.0
    """delete_workers and close: engines' ``destroy``, then processes; the rest is killed."""


# --- inside a worker ------------------------------------------------------------------------------


class NodeProcess(abc.ABC):
    """A process that a worker has started on another node of its instance."""

    output: str
    """Command that prints its output."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until its function has returned.

        Raises:
            RuntimeError: The function failed, or the process ended before.
        """

    @abc.abstractmethod
    def kill(self) -> None:
        """Kill it, without waiting for its end. Idempotent."""


class InstanceNodes(abc.ABC):
    """The nodes of a worker's instance; the worker is on the first."""

    @abc.abstractmethod
    def start(self, node: int, target: Callable[..., None], *args: Any) -> NodeProcess:
        """Run ``target(*args)`` in a process on another node, which ends with this worker.

        It sees the instance's devices on that node.

        Args:
            node: Index of the node, from 1.
            target: A picklable function.
            *args: Its arguments.

        Raises:
            RuntimeError: The instance has no such node.
        """


class WorkerContext(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as seen by its engines."""

    worker_id: str
    node: str
    """Address of its node."""
    ports: tuple[int, ...] = ()
    """Leased ports (``SchedulingSpec.port_count``), for its engines to bind."""
    nodes: InstanceNodes | None = None
    """The nodes of its instance; None where the scheduler places an instance on one node."""
    engines: Mapping[str, Any] = {}
    """The worker's engines so far, by name."""


_current: ContextVar[WorkerContext | None] = ContextVar("helmsman_worker_context", default=None)


def worker_context() -> WorkerContext | None:
    """Return the worker that is constructing an engine; None outside of engine constructors.

    An engine therefore calls this in its ``__init__``.
    """
    return _current.get()


@contextlib.contextmanager
def within(context: WorkerContext) -> Iterator[None]:
    """Set the worker context while an engine is constructed."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
