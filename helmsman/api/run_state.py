"""Snapshots of a running job: its script, workers, calls, stacks and nodes; see `helmsman why`."""

from __future__ import annotations

import msgspec

from helmsman.api.workers import WorkerHealth


class Frame(msgspec.Struct, frozen=True):
    """A frame of a Python stack."""

    file: str
    line: int
    function: str
    text: str = ""
    """Source line, without indentation; '' if it is not available."""

    def __str__(self) -> str:
        return f"{self.function} at {self.file.rpartition('/')[2]}:{self.line}"


class StackTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Stack of a thread or of an asyncio task, outermost frame first."""

    thread: str
    """Name of the thread, or of the task's coroutine."""
    frames: list[Frame]
    call: str = ""
    """'engine.method' that it executes; '' for a thread without a call."""
    running_s: float | None = None
    """Seconds since the call began."""


class ChildProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A direct child of a process, such as a worker of a DataLoader."""

    pid: int
    state: str
    """State in /proc: R, S, D, T, Z, ..."""
    cpu_s: float
    command: str


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of a node. Sizes are in bytes; a path's free space is what this user can write."""

    node: str
    """Address of the node."""
    clock: float
    """Seconds since the epoch by the node's clock."""
    memory_available: int
    disks: dict[str, tuple[int, int]]
    """Path -> (free, total): shared memory, temporary files and logs."""


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a process about itself."""

    pid: int
    cpu_s: float
    """CPU seconds of the process and its children that have ended."""
    rss_bytes: int
    swap_bytes: int
    """Memory of the process that is swapped out."""
    clock_jump_s: float
    """Seconds by which the node's clock has been set since the process started; negative if it was
    set back.
    """
    stacks: list[StackTrace]
    """Of the threads and tasks that execute calls; of a script, its main thread and its tasks."""
    children: list[ChildProcess]
    node: NodeReport


class OpenCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the script waits for."""

    name: str
    """'engine.method'."""
    age_s: float
    median_s: float | None = None
    """Median duration of earlier calls of this method in this role; None without any."""
    num_before: int = 0
    """Number of earlier calls of this method in this role."""


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
    """State of its process in /proc (R, S, D, T, Z, ...) if it was observed; 'gone' if it exited."""
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
    num_tokens: int
    """Tokens kept from earlier attempts."""


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
    """Instance id -> health, such as 'healthy' or 'stale'."""
    median_s: float | None
    """Median duration of recent requests."""
    requests: list[RequestSnapshot]
    """Oldest open requests, at most 20."""


class PhaseSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An operation of the script that has not ended, such as a start or a weight sync."""

    kind: str
    detail: str
    age_s: float
    median_s: float | None = None
    """Median duration of earlier phases of this kind; None without any."""
    waits_for: str = ""
    """For a start: the holders of the resources that it waits for."""


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
    """'script', or 'observation' if the script's process did not answer."""
    script: ProcessReport | None = None
    """None if it was not requested or the script did not answer."""
    script_stuck_s: float | None = None
    """Seconds since the script's interpreter last ran Python; None if it answered."""
    script_state: str = ""
    """State of the script's process in /proc if it did not answer."""
    idle_s: float | None = None
    """Seconds since the last call ended or began; None before the first."""
    longest_idle_s: float = 0.0
    """Longest earlier time without any call."""
    workers: list[WorkerSnapshot] = []
    rollouts: list[RolloutSnapshot] = []
    phases: list[PhaseSnapshot] = []
    """Oldest first."""
    facts: dict[str, str] = {}
    """Further figures by name, such as the step of a recipe."""
