"""Evidence: two snapshots of a run, a moment apart, as the rules of a diagnosis read them."""

from __future__ import annotations

import msgspec

from helmsman.api.run_state import ProcessReport, RunSnapshot, StackTrace, WorkerSnapshot
from helmsman.controller._diagnosis.stacks import at, signature, wait_of

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
"""A process that uses more than this share of a core between the snapshots makes progress."""


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


class WorkerEvidence:
    """A worker in two snapshots; ``before`` is None if it was not there."""

    def __init__(self, now: WorkerSnapshot, before: WorkerSnapshot | None, apart_s: float) -> None:
        self.now, self.id = now, now.worker_id
        self.answers = now.health is not None and now.health.answered
        self.call = now.calls[0] if now.calls else None
        """The oldest unanswered call."""
        report, earlier = now.report, before.report if before is not None else None
        self.stack = _stack_of(report)
        """The stack of the oldest call that runs, or of a process that did not answer."""
        self.wait = wait_of(self.stack)
        """The wait of that stack; None if it computes."""
        self.cpu_share: float | None = None
        """Cores that the process used, or waited for, between the snapshots; None if unknown."""
        if report is not None and earlier is not None and apart_s > 0:
            used_s = report.cpu_s - earlier.cpu_s + report.runnable_s - earlier.runnable_s
            self.cpu_share = max(0.0, used_s) / apart_s
        self.is_idle = self.cpu_share is not None and self.cpu_share < BUSY
        """Whether the process needed almost no CPU between the snapshots."""
        self.is_still = signature(self.stack) == signature(_stack_of(earlier)) != ()
        """Whether the call had the same stack in both snapshots."""

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
    def doing(self) -> str:
        """The activity of its process, as a predicate."""
        if self.wait is not None:
            return self.wait.text
        return f"{'is blocked' if self.is_idle else 'computes'}{at(self.stack)}"


def _stack_of(report: ProcessReport | None) -> StackTrace | None:
    shown = [each for each in report.stacks if each.frames] if report is not None else []
    running = sorted((e for e in shown if e.call), key=lambda each: -(each.running_s or 0.0))
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
