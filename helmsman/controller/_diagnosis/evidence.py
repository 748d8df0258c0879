"""Evidence: two snapshots of a run, a moment apart, as the rules of a diagnosis read them."""

from __future__ import annotations

import functools

import msgspec

from helmsman.api.run_state import OpenCall, ProcessReport, RunSnapshot, StackTrace, WorkerSnapshot
from helmsman.controller._diagnosis.stacks import Wait, signature, site_of, wait_of

FLOOR_S = 10.0
"""A call is not long before this, however short earlier ones were."""
FACTOR = 5.0
"""A call is long from this multiple of the median of earlier ones."""
FIRST_S = 30.0
"""The first call of a method is long after this."""
BUSY = 0.3
"""A process that uses more than this share of a core between the snapshots makes progress."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A cause of a hang, or a fact that may become one."""

    rule: str
    """Name of the rule."""
    is_problem: bool
    """Whether the run does not continue, or will soon fail, because of it."""
    subject: str
    """The worker, role, node or phase; 'script' for the script."""
    workers: list[str] = []
    """Ids of the workers with the cause."""
    cause: str
    """One sentence."""
    evidence: list[str] = []
    since_s: float | None = None
    """Seconds since it began; None if unknown."""
    next_step: str = ""


def is_long(age_s: float, median_s: float | None, *, factor: float = FACTOR) -> bool:
    """Return whether an operation takes much longer than earlier ones of its kind."""
    return age_s > (FIRST_S if median_s is None else max(FLOOR_S, factor * median_s))


def is_late(age_s: float, median_s: float | None) -> bool:
    """Return whether an operation that others wait for takes much longer than earlier ones."""
    return age_s > max(FLOOR_S, FACTOR * (median_s or 0.0))


def usual(median_s: float | None) -> str:
    """Describe the usual duration of an operation."""
    return "its first one" if median_s is None else f"the median is {seconds(median_s)}"


def seconds(value: float) -> str:
    """Format a duration."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


class WorkerEvidence:
    """A worker in both snapshots.

    Args:
        now: The worker in the later snapshot.
        before: The same in the earlier one; None if it was not there.
        apart_s: Seconds between the two.
    """

    def __init__(self, now: WorkerSnapshot, before: WorkerSnapshot | None, apart_s: float) -> None:
        self.now, self.before, self._apart_s = now, before, apart_s
        self.id = now.worker_id

    @property
    def call(self) -> OpenCall | None:
        """The oldest unanswered call."""
        return self.now.calls[0] if self.now.calls else None

    @functools.cached_property
    def stack(self) -> StackTrace | None:
        """The stack of the oldest call that runs, or of a process that did not answer."""
        return _stack_of(self.now.report)

    @functools.cached_property
    def wait(self) -> Wait | None:
        """What that stack waits for; None if it computes."""
        return wait_of(self.stack) if self.stack is not None else None

    @property
    def cpu_share(self) -> float | None:
        """Cores that the process used, or waited for, between the snapshots; None if unknown."""
        now, before = self.now.report, self.before.report if self.before is not None else None
        if now is None or before is None or self._apart_s <= 0:
            return None
        used_s = now.cpu_s - before.cpu_s
        return max(0.0, used_s + now.runnable_s - before.runnable_s) / self._apart_s

    @property
    def is_idle(self) -> bool:
        """Whether the process needed almost no CPU between the snapshots."""
        share = self.cpu_share
        return share is not None and share < BUSY

    @property
    def is_still(self) -> bool:
        """Whether the call had the same stack in both snapshots."""
        before = _stack_of(self.before.report) if self.before is not None else None
        if self.stack is None or before is None:
            return False
        return signature(self.stack) == signature(before)

    def where(self) -> str:
        """Describe the place of its call, as a part of a sentence."""
        site = site_of(self.stack) if self.stack is not None else None
        return f"in {site}" if site is not None else "at an unknown place"


def _stack_of(report: ProcessReport | None) -> StackTrace | None:
    if report is None:
        return None
    running = [each for each in report.stacks if each.call and each.frames]
    running.sort(key=lambda each: -(each.running_s or 0.0))
    others = [each for each in report.stacks if each.thread in ("main", "current") and each.frames]
    return next(iter([*running, *others]), None)


class Evidence:
    """Two snapshots of a run.

    Args:
        now: The later snapshot.
        before: The earlier one, about a second before.
    """

    def __init__(self, now: RunSnapshot, before: RunSnapshot) -> None:
        self.now, self.before = now, before
        self.apart_s = now.taken_at - before.taken_at
        earlier = {each.worker_id: each for each in before.workers}
        self.workers = [
            WorkerEvidence(each, earlier.get(each.worker_id), self.apart_s) for each in now.workers
        ]

    def groups(self) -> dict[str, list[WorkerEvidence]]:
        """Return the workers of each role with collectives."""
        found: dict[str, list[WorkerEvidence]] = {}
        for each in self.workers:
            if each.now.is_group and each.now.world_size > 1:
                found.setdefault(each.now.role, []).append(each)
        return found

    def busy(self) -> list[WorkerEvidence]:
        """Return the workers with an unanswered call."""
        return [each for each in self.workers if each.now.calls]
