"""Observation of episodes, sessions, tool calls and rewards: their waits, and their progress."""

from __future__ import annotations

import asyncio
import contextlib
import reprlib
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from helmsman._desk.stacks import at, wait_of
from helmsman._process.recorder import Recorder
from helmsman.api import open_work
from helmsman.api.errors import HelmsmanError
from helmsman.api.observer import Kind
from helmsman.api.open_work import Open, WorkSource
from helmsman.api.run_state import (
    OpenItem,
    ProcessReport,
    RunReporter,
    StackTrace,
    WaitSnapshot,
    WorkerSnapshot,
    WorkSnapshot,
)
from helmsman.rpc_server._host import progress
from helmsman.rpc_server._host.awaiting import TaskWait, Threads, waiting_of

_QUIET_S = 3.0
"""Items are observed and recorded from this age on."""
_MOST_OBSERVED, _MOST_SHOWN = 64, 20
_MOST_TEXTS = 256
"""Waits that the recorder can name; its table of names is shared with calls and phases."""
_NAME_CHARS = 120
_REPORTS_S = 1.0
"""Limit for the reports of all workers of other schedulers; a command waits for the answer."""
_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = _NAME_CHARS


class _Seen(NamedTuple):
    """The last observation of an item."""

    key: object
    """Changes with progress."""
    since: float
    """Time of its last progress, by time.monotonic()."""
    name: int
    """Name of the wait in the recorder."""
    slot: int
    """Its slot."""
    began: float
    """Begin of the recorded wait."""
    at: float
    """Time of the observation."""
    moved_bytes: int
    """Bytes that its thread read and wrote, without connections."""
    is_explained: bool
    """Whether it waits for other items, or for generation requests."""


_Key = tuple[int, int, float]
"""Id of a source, number of an item, and its begin."""


class Still(NamedTuple):
    """An item whose wait nothing known explains, and the time since its last progress."""

    key: object
    """Identifies it."""
    text: str
    still_s: float
    median_s: float | None
    """Median duration of finished ones."""


class _Around(NamedTuple):
    """The process around the items."""

    threads: Threads
    served: dict[asyncio.Task[Any], float]
    """Task -> time.monotonic() of the last progress of an item that it waits for."""

    def served_at(self, wait: TaskWait | None) -> float:
        """Return the last progress of the items that the tasks of a wait have opened."""
        tasks = wait.tasks if wait is not None else ()
        return max((self.served.get(each, 0.0) for each in tasks), default=0.0)


class OpenItems:
    """Observes the oldest open items of this process, and records their waits."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._lock = threading.Lock()
        self._seen: dict[_Key, _Seen] = {}
        self._texts = set[str]()

    def look(self) -> list[Still]:
        """Observe the oldest items, and return them; called every second."""
        now = time.monotonic()
        found = {
            _key_of(source, item): (source, item)
            for source in open_work.sources()
            for item in source.open_items(_MOST_OBSERVED)
            if now - item.since > _QUIET_S
        }
        if not (found or self._seen):
            return []
        around = _Around(Threads(), _served(now))
        with self._lock:
            for key in [each for each in self._seen if each not in found]:
                self._finish(key, self._seen.pop(key), now)
            for key, (source, item) in found.items():
                self._observe(key, source, item, around, now)
            return [
                Still(
                    key,
                    f"{source.kind} {item.number} of {source.name}",
                    now - self._seen[key].since,
                    source.finished()[1],
                )
                for key, (source, item) in found.items()
                if not self._seen[key].is_explained
            ]

    def _observe(
        self, key: _Key, source: WorkSource, item: Open, around: _Around, now: float
    ) -> None:
        wait = waiting_of(item.task, around.threads) if item.task is not None else None
        text = f"{source.kind} {_doing(item, wait)}"[:_NAME_CHARS]
        if text not in self._texts and len(self._texts) >= _MOST_TEXTS:
            text = source.kind
        self._texts.add(text)
        name = self._recorder.name(text)
        moved_bytes, quiet_s, num_wakes = 0, None, 0
        if wait is not None and wait.thread is not None:
            thread = progress.of_thread(wait.thread.native_id or 0)
            moved_bytes, quiet_s, num_wakes = thread.moved_bytes, thread.quiet_s, thread.num_wakes
        state = wait.key if wait else None, item.moved, num_wakes
        seen = self._seen.get(key)
        if seen is None:
            began = max(item.since, item.moved, now - 2 * _QUIET_S)
            slot = self._recorder.note(Kind.OPEN, name, item.number, 0.0, began)
            seen = _Seen(state, began, name, slot, began, now, moved_bytes, item.is_explained)
        elif seen.name != name:
            self._finish(key, seen, now)
            slot = self._recorder.note(Kind.OPEN, name, item.number, 0.0, now)
            seen = seen._replace(name=name, slot=slot, began=now)
        receives = quiet_s is not None and quiet_s < now - seen.at
        if seen.key != state or moved_bytes > seen.moved_bytes or receives:
            seen = seen._replace(key=state, since=now)
        since = max(seen.since, around.served_at(wait))
        is_explained = item.is_explained or (wait is not None and wait.is_explained)
        self._seen[key] = seen._replace(
            since=since, at=now, moved_bytes=moved_bytes, is_explained=is_explained
        )

    def _finish(self, key: _Key, seen: _Seen, now: float) -> None:
        self._recorder.finish(seen.slot, now, Kind.OPEN, seen.name, key[1], seen.began)

    def describe(
        self, own: RunReporter, workers: Sequence[WorkerSnapshot], *, reports: bool
    ) -> list[WorkSnapshot]:
        """Describe the oldest items, with stacks and the CPU time of their threads if asked.

        Args:
            own: The reporter of this run.
            workers: The workers of this run.
            reports: Whether the workers have reports.
        """
        self.look()
        now, found = time.monotonic(), []
        around, deadline = _Around(Threads(), _served(now)), now + _REPORTS_S
        for source in open_work.sources():
            computing, items = workers, source.open_items(_MOST_SHOWN)
            num_done, median_s = source.finished()
            if reports and items and source.reporter not in (None, own):
                computing = _workers_of(source, deadline - time.monotonic())
            known = {each.worker_id: each for each in computing}
            found.append(
                WorkSnapshot(
                    kind=source.kind,
                    name=source.name,
                    num_open=len(source),
                    num_done=num_done,
                    median_s=median_s,
                    items=[
                        self._described(source, each, around, known, reports=reports)
                        for each in items
                    ],
                    waits=[_explained(*each, around) for each in source.waits()],
                )
            )
        return sorted(found, key=lambda each: (each.kind, each.name))

    def _described(
        self,
        source: WorkSource,
        item: Open,
        around: _Around,
        workers: dict[str, WorkerSnapshot],
        *,
        reports: bool,
    ) -> OpenItem:
        now, wait = time.monotonic(), None
        if item.task is not None:
            wait = waiting_of(item.task, around.threads)
        seen = self._seen.get(_key_of(source, item))
        begun = item.since if seen is None else seen.since
        since = max(begun, item.moved, around.served_at(wait))
        cpu_s, stack = None, wait.stack() if wait is not None and reports else None
        if wait is not None and wait.thread is not None:
            cpu_s = progress.of_thread(wait.thread.native_id or 0).cpu_s
        doing, worker = _doing(item, wait, source=True), workers.get(item.worker_id)
        if worker is not None and worker.report is not None:
            cpu_s, stack = worker.report.cpu_s, _stack_in(worker.report, now - since)
            inside = wait_of(stack)
            doing += f" and {inside.text if inside is not None else 'computes' + at(stack)}"
        return OpenItem(
            number=item.number,
            name=_text_of(item.shown),
            age_s=now - item.since,
            still_s=max(0.0, now - since),
            waits_for=doing,
            is_explained=item.is_explained or (wait is not None and wait.is_explained),
            awaits_process=wait is not None and wait.is_process,
            worker_id=item.worker_id,
            cpu_s=cpu_s,
            stack=stack,
        )


def _explained(wait: WaitSnapshot, task: asyncio.Task[Any] | None, around: _Around) -> WaitSnapshot:
    """Add the place at which the task of a wait blocks its event loop."""
    found = waiting_of(task, around.threads) if task is not None else None
    if found is None or not found.blocks_loop:
        return wait
    return msgspec.structs.replace(wait, blocked_at=found.text(source=True))


def _key_of(source: WorkSource, item: Open) -> _Key:
    return id(source), item.number, item.since


def _served(now: float) -> dict[asyncio.Task[Any], float]:
    """Return the last progress of sessions and the like, which is that of their openers, too."""
    found: dict[asyncio.Task[Any], float] = {}
    for source in open_work.sources():
        for item in source.open_items() if source.has_openers else ():
            if item.opener is not None:
                at = now if item.is_served else item.moved
                found[item.opener] = max(at, found.get(item.opener, 0.0))
    return found


def _doing(item: Open, wait: TaskWait | None, *, source: bool = False) -> str:
    return item.doing or (wait.text(source=source) if wait is not None else "")


def _text_of(shown: object) -> str:
    return (shown if isinstance(shown, str) else _SHORT.repr(shown))[:_NAME_CHARS]


def _workers_of(source: WorkSource, limit_s: float) -> Sequence[WorkerSnapshot]:
    """Return the workers of a source's own scheduler, such as that of a RewardPool."""
    assert source.reporter is not None
    if limit_s <= 0:
        return ()
    with contextlib.suppress(HelmsmanError):
        snapshot = source.reporter.snapshot(source.name, reports=True, timeout=limit_s)
        return snapshot.workers if snapshot is not None else ()
    return ()


def _stack_in(report: ProcessReport, age_s: float) -> StackTrace | None:
    """Return the stack of the call of a worker that has run for about this time."""
    running = [each for each in report.stacks if each.call and each.frames]
    return min(running, key=lambda each: abs((each.running_s or 0.0) - age_s), default=None)
