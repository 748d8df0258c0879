"""Evidence: two snapshots of a run, a moment apart, as the rules of a diagnosis read them."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from helmsman._desk.stacks import at, is_in_place, signature, wait_of
from helmsman.api.run_state import ProcessReport, RunSnapshot, StackTrace, WorkerSnapshot

FLOOR_S = 10.0
"""A call is not long before this, however short earlier ones were."""
STATES = {
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "a zombie",
    "gone": "gone",
    "S": "asleep",
    "R": "running",
    "D": "waiting for a disk",
}
"""State of a process in /proc -> its description; it does not run in the first four."""
BUSY = 0.3
"""A thread or process that uses more than this share of a core between the snapshots computes."""
FIRST_S = 15.0
"""The first call of a method is long after this if it makes no progress."""
_QUIET_S = 10.0
"""A connection on which no data moved for this time makes no progress."""
_BESIDE_BYTES_PER_S = 64 << 10
"""Other threads that read and write less than this, as Ray's do, do so beside the call."""
_CHILD_BYTES_PER_S = 100
"""The same for child processes."""
_SLEEPER_BYTES_PER_S = 1 << 10
"""A thread that sleeps in both snapshots, and reads less than this, looks whether it can go on."""


class Finding(msgspec.Struct, frozen=True):
    """A cause of a hang, or a fact that may become one."""

    rule: str
    """Name of the rule."""
    subject: str
    """The worker, role, node or phase; 'script' for the script."""
    cause: str
    """One sentence."""
    next_step: str = ""
    workers: list[str] = []
    """Ids of the workers with the cause."""
    evidence: list[str] = []
    since_s: float | None = None
    """Seconds since it began; None if unknown."""
    is_problem: bool = True
    """Whether the run does not continue, or will soon fail, because of it."""


def is_long(
    age_s: float,
    median_s: float | None,
    *,
    factor: float = 5.0,
    first_s: float = 30.0,
    floor_s: float = FLOOR_S,
) -> bool:
    """Return whether an operation takes much longer than earlier ones of its kind.

    It is long from a multiple of their median, the first of its kind after ``first_s``, and none
    before ``floor_s``.
    """
    return age_s > (first_s if median_s is None else max(floor_s, factor * median_s))


def usual(median_s: float | None) -> str:
    """Describe the usual duration of an operation."""
    return "its first one" if median_s is None else f"the median is {seconds(median_s)}"


def seconds(value: float | None) -> str:
    """Format a duration; '' for None."""
    if value is None:
        return ""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


class Made(NamedTuple):
    """Progress of a thread or task between two snapshots."""

    cpu_share: float
    """Cores that it used or waited for; 0 for a task."""
    moves_data: bool
    is_connected: bool
    """Whether it waits for known connections, so that no other data counts."""


def earlier_of(stack: StackTrace | None, report: ProcessReport | None) -> StackTrace | None:
    """Return the stack of the same thread or task in an earlier report; None if it is unknown."""
    if stack is None or stack.progress is None or report is None:
        return None
    same = ((each, each.progress) for each in report.stacks if each.thread == stack.thread)
    numbers = ((each, p.number) for each, p in same if p is not None)
    return next((each for each, number in numbers if number == stack.progress.number), None)


def made_by(now: StackTrace | None, before: StackTrace | None, apart_s: float) -> Made:
    """Return the progress of a thread or task between two stacks of it."""
    own = now.progress if now is not None else None
    past = before.progress if before is not None else None
    if own is None or past is None or apart_s <= 0:
        return Made(0.0, False, False)
    wait = wait_of(now)
    sleeps = wait is not None and wait.kind == "sleep"
    least_bytes = _SLEEPER_BYTES_PER_S * apart_s if sleeps else 0
    is_woken = own.num_wakes != past.num_wakes and not sleeps
    moved = own.moved_bytes - past.moved_bytes > least_bytes
    used_s = (own.cpu_s or 0.0) - (past.cpu_s or 0.0)
    return Made(
        max(0.0, used_s) / apart_s,
        moved or is_woken or is_recent(own.quiet_s),
        own.quiet_s is not None,
    )


def is_recent(quiet_s: float | None) -> bool:
    """Return whether a connection moves data."""
    return quiet_s is not None and quiet_s < _QUIET_S


class WorkerEvidence:
    """A worker in two snapshots; ``before`` is None if it was not there."""

    def __init__(self, now: WorkerSnapshot, before: WorkerSnapshot | None, apart_s: float) -> None:
        self.now, self.id = now, now.worker_id
        self.answers = now.health is not None and now.health.answered
        report, earlier = now.report, before.report if before is not None else None
        self.stack = _stack_of(report)
        """The stack of the oldest call that runs, or of a process that did not answer."""
        running = self.stack.call if self.stack is not None else ""
        self.call = next(iter([*(e for e in now.calls if e.name == running), *now.calls]), None)
        """The oldest unanswered call that may have this stack."""
        self.wait = wait_of(self.stack)
        """The wait of that stack; None if it computes, or waits in an unknown way."""
        past = earlier_of(self.stack, earlier) or _stack_of(earlier)
        self.is_still = signature(self.stack) == signature(past) != ()
        """Whether the call had the same stack in both snapshots."""
        self.is_in_place = is_in_place(self.stack, past)
        """Whether it was in the same functions."""
        self.cpu_share: float | None = None
        """Cores that the process used, or waited for, between the snapshots; None if unknown."""
        self.computes = False
        """Whether its own thread used, or waited for, a CPU."""
        self.moves_data = False
        """Whether data moved that the call may wait for."""
        if report is not None and earlier is not None and apart_s > 0:
            used_s = report.cpu_s - earlier.cpu_s + report.runnable_s - earlier.runnable_s
            self.cpu_share = max(0.0, used_s) / apart_s
            own = made_by(self.stack, past, apart_s)
            is_thread = self.stack is not None and self.stack.thread in ("engine", "loop")
            self.computes = (own.cpu_share if is_thread else self.cpu_share) >= BUSY
            self.moves_data = own.moves_data
            if not own.is_connected:
                moved = (
                    (report.moved_bytes - earlier.moved_bytes, _BESIDE_BYTES_PER_S),
                    (report.children_bytes - earlier.children_bytes, _CHILD_BYTES_PER_S),
                )
                self.moves_data |= any(num > least * apart_s for num, least in moved)
                self.moves_data |= is_recent(report.quiet_s)
        self.is_idle = self.cpu_share is not None and self.cpu_share < BUSY and not self.moves_data
        """Whether the process needed almost no CPU, and no data moved."""

    @property
    def is_in_call(self) -> bool:
        """Whether its process is known to execute a call."""
        return self.stack is not None and bool(self.stack.call)

    @property
    def age_s(self) -> float:
        """Seconds since the shown call began; since its oldest call was sent, if it is unknown."""
        sent_s = self.call.age_s if self.call is not None else 0.0
        return self.stack.running_s or sent_s if self.stack is not None else sent_s

    @property
    def waits_in(self) -> str:
        """The system call that its thread waits in; '' if it computes, or is unknown."""
        progress = self.stack.progress if self.stack is not None else None
        return progress.waits_in if progress is not None and not self.computes else ""

    @property
    def doing(self) -> str:
        """The activity of its process, as a predicate."""
        if self.wait is not None:
            return self.wait.text
        blocked = f"waits in {self.waits_in}" if self.waits_in else "is blocked"
        return f"{'computes' if self.computes else blocked}{at(self.stack)}"


def _stack_of(report: ProcessReport | None) -> StackTrace | None:
    shown = [each for each in report.stacks if each.frames] if report is not None else []
    running = sorted((e for e in shown if e.call), key=lambda each: -(each.running_s or 0.0))
    running.sort(key=lambda each: each.thread != "loop")  # tasks wait for a blocked loop
    others = (each for each in shown if each.thread in ("main", "current"))
    return next(iter([*running, *others]), None)


class Evidence:
    """Two snapshots of a run, about a second apart."""

    def __init__(self, now: RunSnapshot, before: RunSnapshot) -> None:
        self.now, self.before = now, before
        self.apart_s = now.taken_at - before.taken_at
        earlier = {each.worker_id: each for each in before.workers}
        self.workers = [
            WorkerEvidence(each, earlier.get(each.worker_id), self.apart_s) for each in now.workers
        ]
        self.busy = [each for each in self.workers if each.call is not None]
        """The workers with an unanswered call."""
        self.groups: dict[str, list[WorkerEvidence]] = {}
        """Role with collectives -> its workers."""
        for each in self.workers:
            if each.now.is_group and each.now.world_size > 1:
                self.groups.setdefault(each.now.role, []).append(each)
