"""Snapshots of a running job: its script, workers, calls, stacks and nodes; see `helmsman why`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Literal, Protocol, cast

import msgspec

from helmsman.api.workers import WorkerHealth

_FIRST = 15.0
"""The first operation of a kind is overdue after this multiple of the floor."""


class Frame(msgspec.Struct, frozen=True):
    """A frame of a Python stack."""

    file: str
    line: int
    function: str
    text: str = ""
    """Source line, without indentation; '' if it is not available."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a thread or of an asyncio task, as the kernel and the event loop count it."""

    number: int
    """Identifies the thread or task in its process."""
    cpu_s: float | None = None
    """Seconds in which the thread ran or waited for a CPU; None for a task."""
    moved_bytes: int = 0
    """Bytes that the thread has read and written, without network connections."""
    quiet_s: float | None = None
    """Seconds since data moved on the connections that it waits for; None if it waits for none."""
    waits_in: str = ""
    """System call that it waits in, and its file or peer; '' if it runs, and for a task."""
    num_wakes: int = 0
    """Number of times that a task was seen to wait for another future than before, or that a thread
    was woken, if it receives from a local socket.
    """


class StackTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Stack of a thread or of an asyncio task, outermost frame first."""

    thread: str
    """Name of the thread, or of the task's coroutine."""
    frames: list[Frame]
    call: str = ""
    """'engine.method' that it executes; '' for a thread without a call."""
    running_s: float | None = None
    """Seconds since the call began."""
    progress: Progress | None = None
    """None if it was observed from outside."""


class CollectiveState(msgspec.Struct, frozen=True, kw_only=True):
    """The collective that a process entered last in a process group, by torch's flight recorder."""

    group: str
    number: int
    """Counts the collectives of the group."""
    name: str
    """Backend and name: 'nccl:all_reduce'."""
    sizes: list[list[int]]
    """Shapes of its inputs, at most four."""
    age_s: float
    """Seconds since it was enqueued."""
    is_done: bool


class NcclRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of an NCCL communicator, as NCCL's RAS service reports it."""

    communicator: str
    rank: int
    host: str
    pid: int
    num_collectives: int = 0
    """Collectives of all kinds that it has called."""
    problem: str = ""
    """'dead' or 'unresponsive'; '' for a rank that answers."""


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a process about itself."""

    pid: int
    cpu_s: float
    """CPU seconds of the process and its descendants, but not of Helmsman's and Ray's processes."""
    rss_bytes: int
    swap_bytes: int = 0
    """Memory of the process that is swapped out."""
    runnable_s: float = 0.0
    """Seconds in which threads of it and of its descendants computed, but had no CPU."""
    moved_bytes: int = 0
    """Bytes that its threads have read and written, without network connections."""
    children_bytes: int = 0
    """The same of its descendants, but not of Helmsman's and Ray's processes."""
    quiet_s: float | None = None
    """Seconds since data moved on a connection that the code of engines has opened; None without
    any.
    """
    pauses_s: list[float] = []
    """Lengths of the times in the last half minute in which the process was stopped."""
    clock_jump_s: float = 0.0
    """Seconds by which the node's clock was set since its start; negative if it was set back."""
    stacks: list[StackTrace]
    """Stacks of threads and tasks that execute calls, or of a script's main thread and tasks."""
    children: dict[int, tuple[str, str]] = {}
    """Pid of a direct child, such as a worker of a DataLoader -> (state in /proc, command)."""
    forkserver: Progress | None = None
    """Progress of the process that forks a script's local workers, and of its descendants."""
    node: str = ""
    """Address of its node; '' if it is unknown."""
    memory_available: int
    """Bytes of memory that its node has left."""
    disks: dict[str, tuple[int, int]]
    """Path on its node -> (bytes that this user can write, total bytes)."""
    collectives: list[CollectiveState] = []
    nccl_ranks: list[NcclRank] = []
    """From rank 0, while a collective of it waits."""


class OpenCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the script waits for."""

    name: str
    """'engine.method'."""
    age_s: float
    median_s: float | None = None
    """Median duration of earlier calls of this method in this role; None without any."""
    limit_s: float | None = None
    """Age in seconds from which the run's HangPolicy calls it overdue; None if it is unknown."""


class WorkerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as seen by its scheduler."""

    worker_id: str
    role: str
    node: str
    pid: int | None
    state: str
    """Value of WorkerState, 'restarting', or 'unknown' if only its process was observed."""
    log_path: str
    devices: list[str] = []
    world_size: int = 1
    """Number of workers in the role."""
    is_group: bool = False
    """Whether the workers of its role call each other in collectives."""
    num_restarts: int = 0
    calls: list[OpenCall] = []
    """Unanswered calls, oldest first."""
    process_state: str = ""
    """State of its observed process in /proc (R, S, D, T, Z, ...); 'gone' if it has exited."""
    health: WorkerHealth | None = None
    """None if the worker neither answered nor could be observed."""
    error: str = ""
    """Why there is no health or no report."""
    report: ProcessReport | None = None
    """None if it was not requested, or the worker did not answer."""


class RequestSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A generation request that has not ended."""

    request_id: str
    age_s: float
    instance_id: str
    """'' while it is queued."""
    overtaken_s: float = 0.0
    """Seconds by which the newest request that has started was submitted later."""


class RolloutSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of a RolloutController."""

    role: str
    num_queued: int
    num_in_flight: int
    num_done: int
    """Requests that have ended so far."""
    num_tokens_done: int
    """Tokens that these have generated."""
    paused_by: list[str]
    """Owners of suspensions; no request starts while there are any."""
    version: int | None
    """Weight version that the instances serve; None before the first update."""
    is_asleep: bool
    instances: dict[str, str]
    """Instance id -> health, such as 'healthy' or 'stale'; 'drained' while it gets no requests."""
    median_s: float | None
    """Median duration of recent requests."""
    requests: list[RequestSnapshot]
    """Oldest open requests, at most 20."""
    num_behind: dict[int, int] = {}
    """Versions that a sample's oldest token is behind -> number among the last 1,024 samples."""


class PhaseSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An operation of the script that has not ended, such as a start or a weight sync."""

    kind: str
    detail: str
    age_s: float
    median_s: float | None = None
    """Median duration of earlier phases of this kind; None without any."""
    limit_s: float | None = None
    """Age in seconds from which the run's HangPolicy calls it overdue; None for the first one."""
    waits_for: str = ""
    """For a start: the holders of the resources that it waits for."""


class OpenItem(msgspec.Struct, frozen=True, kw_only=True):
    """An episode, session, tool call or reward that has not ended."""

    number: int
    name: str
    """Text of its item, or its name."""
    age_s: float
    still_s: float
    """Seconds since its last sign of progress, as far as it was observed."""
    waits_for: str
    """A predicate: 'awaits Event.wait at train.py:20 (await done.wait())'."""
    is_explained: bool = False
    """Whether other entries explain its wait: generation requests, rewards before it, or a task
    that blocks its event loop.
    """
    awaits_process: bool = False
    """Whether it awaits a child process, whose CPU time the script's report includes."""
    worker_id: str = ""
    """The worker that computes it; '' for none."""
    cpu_s: float | None = None
    """Seconds of CPU that the thread or process that works for it used; a thread's with those in
    which it was runnable. None if it is only awaited.
    """
    stack: StackTrace | None = None
    """Frames that it waits through, up to those of its thread or worker; only with reports."""


class WaitSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A call that waits for a number of items, such as prepare_batch."""

    call: str
    age_s: float
    median_s: float | None = None
    """Median duration of earlier calls; None without any."""
    num_ready: int
    num_wanted: int
    remark: str = ""
    """Why no further item begins, and failures so far."""
    blocked_at: str = ""
    """Place of user code, such as the source of items, that blocks its event loop."""


class WorkSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Open items of an executor, of a gateway, of tools or of a RewardPool."""

    kind: str
    """'episode', 'session', 'outside session', 'tool call', 'tool function' or 'reward'."""
    name: str
    """The workflow's function, the gateway's URL, the class of the tools, or the pool's role."""
    num_open: int
    num_done: int
    median_s: float | None = None
    """Median duration of those that ended recently; None without any."""
    items: list[OpenItem] = []
    """The oldest, at most 20."""
    waits: list[WaitSnapshot] = []
    """Calls that wait for them, oldest first."""


class NodeSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of a node of `helmsman up`, as its supervisor sees it."""

    rank: int
    count: int
    """Number of nodes."""
    doing: str
    """A predicate, such as 'runs the script'."""
    since_s: float
    """Seconds since this began."""
    head: str
    """Address of the head's supervisor; '' with one node."""
    missing: str = ""
    """Nodes that do not answer or have not joined, as text."""
    processes: dict[str, tuple[int, str]] = {}
    """raylet, gcs_server and script -> pid and state in /proc, of those that run."""


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run at one time."""

    run_id: str
    command: str
    scheduler: str
    host: str
    pid: int
    log_dir: str
    started_at: float
    """Seconds since the epoch, as all times of day here."""
    taken_at: float
    answered_by: str = "script"
    """'script'; 'observation' if it did not answer; 'supervisor' for a node of `helmsman up`."""
    script: ProcessReport | None = None
    """None if it was not requested or the script did not answer."""
    loop_stack: StackTrace | None = None
    """Stack of Helmsman's event loop if it is blocked, so that workers could not be asked."""
    script_stuck_s: float | None = None
    """Seconds since the script's interpreter last ran Python; None if it answered."""
    script_state: str = ""
    """State of the script's process in /proc if it did not answer."""
    idle_s: float | None = None
    """Seconds since the last call ended or began; None before the first."""
    longest_idle_s: float = 0.0
    """Longest earlier time without any call."""
    node: NodeSnapshot | None = None
    """If a supervisor answered."""
    workers: list[WorkerSnapshot] = []
    rollouts: list[RolloutSnapshot] = []
    phases: list[PhaseSnapshot] = []
    """Oldest first."""
    work: list[WorkSnapshot] = []
    """Episodes, sessions, tool calls and rewards of the script's process."""
    durations: dict[str, dict[str, tuple[int, float]]] = {}
    """Role -> method -> (calls with an outcome, median duration of the last 32 in seconds)."""
    facts: dict[str, str] = {}
    """Further figures by name, such as the step of a recipe."""


class Operated(Protocol):
    """A controller whose instances an operator can drain and scale."""

    async def async_drain(self, worker_ids: Collection[str], *, migrate: bool = False) -> None:
        """Send these instances no more requests, and wait until they have none."""

    async def async_undrain(self, worker_ids: Collection[str]) -> None:
        """Send these instances requests again."""

    async def async_scale(self, replicas: int, *, migrate: bool = False) -> None:
        """Resize to ``replicas`` instances."""


class HangPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Reaction to calls and phases that take much longer than earlier ones of their kind."""

    on_hang: Literal["report", "raise"] = "report"
    """report: write a diagnosis and all stacks to the run's log directory, once, and log it.
    raise: the overdue calls then also fail with CallTimeoutError.
    """
    notify: Callable[[str], None] | None = None
    """Also receives the text, on the watchdog's thread."""
    floor_s: float = 60.0
    """No operation is overdue before this; the first of its kind not before 15 times this."""
    factor: float = 10.0
    """An operation is overdue from this multiple of the median of earlier ones."""

    def __post_init__(self) -> None:
        given = cast(object, self.notify)  # a URL or a program, in scripts without type checks
        if given is not None and not callable(given):
            raise TypeError(f"notify of HangPolicy is {self.notify!r}, expected a function.")

    def limit_s(self, median_s: float | None) -> float:
        """Return the age in seconds from which an operation is overdue.

        Args:
            median_s: Median of earlier ones in seconds; None for the first one.
        """
        first_s = _FIRST * self.floor_s
        return first_s if median_s is None else max(self.floor_s, self.factor * median_s)


class RunReporter:
    """Reports of a script about its run; this default ignores them."""

    def watch(self, policy: HangPolicy) -> None:
        """Set the reaction to hangs. By default, they are reported."""

    def phase(self, kind: str, detail: str = "") -> contextlib.AbstractContextManager[None]:
        """Name a phase of the script, such as an evaluation. Phases may be nested.

        Args:
            kind: Name of the phase. Its duration is compared with that of earlier ones.
            detail: Further text to display.

        Returns:
            A context; the phase lasts while it is open.
        """
        return contextlib.nullcontext()

    def figure(self, name: str, value: object) -> None:
        """Show a figure of the script, such as its step, in place of an earlier value.

        Args:
            name: Name of the figure.
            value: The value, which is converted to a string.
        """

    def record(self, kind: int, name: str, number: int = 0, value: float = 0.0) -> None:
        """Record an event in the run's flight recorder; for controllers.

        Args:
            kind: A Kind of helmsman.api.observer.
            name: Name of the event; there are at most 2,048 names.
            number: Its number, such as that of a request.
            value: Its value.
        """

    def describe_by(
        self,
        role: str,
        describe: Callable[[], RolloutSnapshot | None],
        operated: Callable[[], Operated | None] = lambda: None,
    ) -> None:
        """Add a controller's description of a role to the run's snapshots; the last one counts.

        Args:
            role: The role.
            describe: Returns the description or None; runs on Helmsman's event loop.
            operated: Returns the controller, for an operator's actions; None if it was dropped.
        """

    def snapshot(
        self, role: str | None = None, *, reports: bool = False, timeout: float = 5.0
    ) -> RunSnapshot | None:
        """Return the state of the run: its calls, workers, requests and phases.

        Args:
            role: Only this role; 'script' for the script; all when None.
            reports: Whether each process reports its stacks, memory and node.
            timeout: Limit in seconds for the workers' answers.

        Returns:
            The state; None where nothing is recorded.

        Raises:
            RoleNotFoundError: There is no such role.
        """
        return None
