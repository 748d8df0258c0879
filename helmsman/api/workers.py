"""Workers as a scheduler reports them and as their engines see them, and handles of values that
stay there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
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
    """Address of its node, as other nodes reach it."""
    worker_ports: list[str] = []
    """Ports on which the worker itself listens; empty where it needs none."""
    engine_ports: list[str] = []
    """Ports leased to its engine."""
    node_id: str = ""
    """The scheduler's name for its node, which tells nodes of one address apart."""
    devices: list[str] = []
    """Physical ids of the accelerators of its node that it may use."""


def id_of(worker: str | Worker) -> str:
    """The id of a worker that is given as its id or itself."""
    return worker.id if isinstance(worker, Worker) else worker


def ids_of(workers: Collection[str | Worker]) -> list[str]:
    """The ids of several workers.

    Raises:
        ValueError: ``workers`` is one id. Its letters would be taken for ids.
    """
    if isinstance(workers, str):
        raise ValueError(
            f"worker_ids is {workers!r}; expected a sequence of ids, such as [{workers!r}]"
        )
    return [id_of(worker) for worker in workers]


class WorkerState(Enum):
    """States of a worker: READY -> (OVERDUE -> READY)* -> STOPPED | FAILED."""

    READY = "ready"
    """It takes calls."""
    OVERDUE = "overdue"
    """A call timed out and still occupies its engine thread; READY again once that call has
    ended.
    """
    STOPPED = "stopped"
    """Ended on request."""
    FAILED = "failed"
    """Its process died."""


ProcessState = Literal["running", "sleeping", "disk", "stopped"]


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's health; given also while a call runs, and while the worker itself cannot answer.

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
    """'engine.method' on the engine thread, None when idle."""
    running_s: float | None = None
    """Seconds since it began."""
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
    """Seconds until it ends, where it was told to; None where it was not."""
    failed_engines: dict[str, str] = {}
    """Engine name -> why it can serve no more, of those that say so (InferenceEngine.failure)."""
    failure: str | None = None
    """Why the worker itself cannot serve calls, such as a thread that could not be started; None
    while it can.
    """
    stuck_s: float | None = None
    """Seconds since its interpreter last ran Python, where it did not answer itself; None where it
    did.
    """
    process_state: ProcessState | None = None
    """State of a worker that did not answer itself. running: a thread of it computes; sleeping: all
    wait; disk: it waits for a disk or for swapped memory; stopped: by a signal or a debugger."""

    @property
    def answered(self) -> bool:
        """Whether the worker answered itself."""
        return self.stuck_s is None

    @property
    def is_busy(self) -> bool:
        """Whether the worker did not answer itself, and the kernel shows that it makes progress."""
        return self.process_state in ("running", "disk")


class PreemptionNotice(msgspec.Struct, frozen=True, kw_only=True):
    """That a worker is about to go, with its node or alone."""

    reason: str
    """Part of a sentence: 'its node 10.0.0.3 is being drained'."""
    deadline_s: float | None = None
    """Seconds from now until it goes; None where nobody has said."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler knows of a worker."""

    worker_id: str
    state: WorkerState
    node: str
    pid: int | None
    log_path: str
    health: WorkerHealth | None = None
    """None when the worker did not answer."""


CONTROLLER = "controller"
"""Stands for a worker's id in the handle of a value that the script has put."""


class ResultHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A result that stayed in its worker. As an argument of a call it arrives as the value, moved
    from worker to worker.
    """

    id: str
    worker_id: str
    """Worker that made the value; CONTROLLER for one that was put."""
    location: Any
    """Where the value lies; only the transport that made it can read this."""
    nbytes: int
    """Size of the packed value."""
    summary: str
    """What the value is, for people."""
    type_name: str = ""
    """Name of the value's type; 'Batch' for ours alone."""
    length: int | None = None
    """``len()`` of the value where it has one: rows, for batches, tensors and lists."""
    num_padding: int = 0
    """Of a batch's rows, how many at the end are padding."""


class Call(NamedTuple):
    """The arguments of one worker's call, as one of several."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    rpc_meta: Mapping[str, Any] | None = None
    """As for Scheduler.call_engine."""
    payload: Any = None
    """``(args, kwargs)`` packed by Helmsman's codec, for schedulers that send it so; others leave
    it alone.
    """


class EngineSpec(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """What create_engine builds, with what is to be set before."""

    target: str | type[Any]
    """Import path or class."""
    env: dict[str, str] = {}
    """Environment variables, set before its module is imported by path and before its constructor
    runs.
    """
    rank_info: RankInfo | None = None
    """Its place in a worker group, which a GroupWorker has as an attribute before its constructor
    runs.
    """
    kwargs: dict[str, Any] = {}
    """Named arguments of the constructor, beside those of create_engine, which has names of its
    own.
    """


class Timeouts(msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True):
    """The one table of time limits, by class of operation, in seconds."""

    start_s: float = 300.0
    """create_workers: placement, processes and their first answer, for all workers of the job
    together.
    """
    create_engine_s: float = 1800.0
    """An engine's constructor (imports and model loading)."""
    call_s: float = 7200.0
    """An engine call without a ``timeout`` of its own."""
    health_s: float = 5.0
    """Control verbs: health, stacks, set_env."""
    shutdown_s: float = 8.0
    """delete_workers and close: engines' destroy, then processes; what is left is killed."""


# --- inside a worker ------------------------------------------------------------------------------


class WorkerContext(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as its engines see it."""

    worker_id: str
    node: str
    """Address of its node."""
    ports: tuple[int, ...] = ()
    """Leased to it (``SchedulingSpec.port_count``), for its engines to bind."""


_current: ContextVar[WorkerContext | None] = ContextVar("helmsman_worker_context", default=None)


def worker_context() -> WorkerContext | None:
    """The worker in which an engine is being constructed; None anywhere else, so an engine asks in
    its ``__init__``.
    """
    return _current.get()


@contextlib.contextmanager
def within(context: WorkerContext) -> Iterator[None]:
    """Construct an engine of this worker."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
